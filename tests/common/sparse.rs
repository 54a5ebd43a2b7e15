//! Models of full size without their data: headers written by hand, files grown to their length with `set_len`, which
//! takes no room on the disk.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A tensor: name, dimensions (fastest first), type id, bytes.
pub type Tensor = (String, Vec<u64>, u32, u64);

const Q4_K: u32 = 12;
const F32: u32 = 0;
const Q5_0: u32 = 6;

fn string(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

fn number(out: &mut Vec<u8>, key: &str, ty: u32, value: &[u8]) {
    string(out, key);
    out.extend(ty.to_le_bytes());
    out.extend(value);
}

pub fn tensor(name: String, dims: &[u64], ty: u32) -> Tensor {
    let n: u64 = dims.iter().product();
    let bytes = match ty {
        F32 => 4 * n,
        Q4_K => n / 256 * 144,
        Q5_0 => n / 32 * 22,
        _ => panic!("type {ty}"),
    };
    (name, dims.to_vec(), ty, bytes)
}

/// The attention tensors of a layer of DeepSeek-V3 with this many heads.
pub fn attention(layer: usize, heads: u64) -> Vec<Tensor> {
    let t = |name: &str, dims: &[u64], ty| tensor(format!("blk.{layer}.{name}.weight"), dims, ty);
    vec![
        t("attn_norm", &[7168], F32),
        t("attn_q_a", &[7168, 1536], Q4_K),
        t("attn_q_a_norm", &[1536], F32),
        t("attn_q_b", &[1536, 192 * heads], Q4_K),
        t("attn_kv_a_mqa", &[7168, 576], Q4_K),
        t("attn_kv_a_norm", &[512], F32),
        t("attn_k_b", &[128, 512, heads], Q5_0),
        t("attn_v_b", &[512, 128, heads], Q4_K),
        t("attn_output", &[128 * heads, 7168], Q4_K),
    ]
}

/// 61 layers of DeepSeek-V3, each expert a tensor of its own up to 8,000 tensors in all.
pub fn deepseek_v3() -> Vec<Tensor> {
    let mut all: Vec<Tensor> = Vec::new();
    for layer in 0..61 {
        all.extend(attention(layer, 128));
        for i in 0..122 {
            all.push(tensor(format!("blk.{layer}.ffn_up.{i}.weight"), &[7168, 18432], Q4_K));
        }
    }
    all.push(tensor("token_embd.weight".into(), &[7168, 129_280], Q4_K));
    while all.len() < 8000 {
        all.push(tensor(format!("extra.{}.weight", all.len()), &[7168], F32));
    }
    all
}

/// Writes these tensors in `parts` files; gives the first file and the bytes of all.
pub fn write(folder: &Path, tensors: &[Tensor], layers: u32, heads: u32, parts: usize) -> (PathBuf, u64) {
    let (mut first, mut total) = (PathBuf::new(), 0);
    for (no, tensors_of) in tensors.chunks(tensors.len().div_ceil(parts)).enumerate() {
        let mut meta = Vec::new();
        let mut pairs = 0u64;
        let mut add = |key: &str, ty: u32, value: &[u8]| {
            number(&mut meta, key, ty, value);
            pairs += 1;
        };
        if parts > 1 {
            add("split.no", 2, &(no as u16).to_le_bytes());
            add("split.count", 2, &(parts as u16).to_le_bytes());
            add("split.tensors.count", 5, &(tensors.len() as i32).to_le_bytes());
        }
        if no == 0 {
            let mut architecture = Vec::new();
            string(&mut architecture, "deepseek2");
            add("general.architecture", 8, &architecture);
            for (key, value) in [
                ("block_count", layers),
                ("context_length", 163_840),
                ("embedding_length", 7168),
                ("attention.head_count", heads),
                ("attention.head_count_kv", 1),
                ("attention.q_lora_rank", 1536),
                ("attention.kv_lora_rank", 512),
                ("attention.key_length", 576),
                ("attention.value_length", 512),
                ("attention.key_length_mla", 192),
                ("attention.value_length_mla", 128),
                ("rope.dimension_count", 64),
            ] {
                add(&format!("deepseek2.{key}"), 4, &value.to_le_bytes());
            }
            add("deepseek2.attention.layer_norm_rms_epsilon", 6, &1e-6f32.to_le_bytes());
        }
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((tensors_of.len() as u64).to_le_bytes());
        out.extend(pairs.to_le_bytes());
        out.extend(meta);
        let mut offset = 0u64;
        for (name, dims, ty, bytes) in tensors_of {
            string(&mut out, name);
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(ty.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset = (offset + bytes).next_multiple_of(32);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        let name = if parts > 1 {
            format!("model-{:05}-of-{parts:05}.gguf", no + 1)
        } else {
            "model.gguf".to_string()
        };
        let path = folder.join(name);
        let mut file = File::create(&path).unwrap();
        file.write_all(&out).unwrap();
        file.set_len(out.len() as u64 + offset).unwrap();
        total += out.len() as u64 + offset;
        if no == 0 {
            first = path;
        }
    }
    (first, total)
}
