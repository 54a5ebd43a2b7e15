//! Models of two layers of some kilobytes: what damage and fuzzing begin with.

use mla_check::gguf::write::{MetaValue, Writer};
use mla_check::gguf::{GgufError, ValueType};
use mla_reference::{GgmlType, Weight};
use std::path::Path;

/// One of each architecture and layout.
pub const NAMES: [&str; 3] = ["split.gguf", "legacy.gguf", "glm.gguf"];

/// Writes them all.
pub fn write(folder: &Path) -> Result<(), GgufError> {
    model("deepseek2", false, GgmlType::Q8_0, folder, NAMES[0])?;
    model("deepseek2", true, GgmlType::Q4_0, folder, NAMES[1])?;
    model("glm-dsa", false, GgmlType::BF16, folder, NAMES[2])
}

/// Widths: hidden 32, 2 heads, query rank 32, latent 32, 4 rope columns, 28 other ones, 32 of value.
fn model(arch: &str, legacy: bool, ty: GgmlType, folder: &Path, name: &str) -> Result<(), GgufError> {
    let mut w = Writer::new();
    w.meta("general.architecture", arch);
    let mut key = |name: &str, value: MetaValue| {
        w.meta(format!("{arch}.{name}"), value);
    };
    for (name, value) in [
        ("block_count", 2u32),
        ("context_length", 8192),
        ("embedding_length", 32),
        ("attention.head_count", 2),
        ("attention.head_count_kv", if legacy { 2 } else { 1 }),
        ("attention.q_lora_rank", 32),
        ("attention.kv_lora_rank", 32),
        ("rope.dimension_count", 4),
        ("rope.scaling.original_context_length", 4096),
        ("attention.indexer.top_k", 64),
        ("nextn_predict_layers", 1),
        ("attention.temperature_length", 8192),
    ] {
        key(name, value.into());
    }
    let widths: &[&str] = if legacy {
        &["attention.key_length", "attention.value_length"]
    } else {
        &["attention.key_length_mla", "attention.value_length_mla"]
    };
    key(widths[0], 36u32.into());
    key(widths[1], 32u32.into());
    key("attention.layer_norm_rms_epsilon", 1e-6f32.into());
    key("rope.freq_base", 1e4f32.into());
    key("rope.scaling.type", "yarn".into());
    key("rope.scaling.factor", 40f32.into());
    key("rope.scaling.yarn_log_multiplier", 0.1f32.into());
    key("attention.temperature_scale", 0.1f32.into());
    w.meta("tokenizer.ggml.tokens", MetaValue::Array(ValueType::String, vec!["a".into(), "b".into()]));
    let mut sizes = Vec::new();
    for layer in 0..2 {
        for row in mla_reference::WEIGHTS.iter().filter(|r| r.weight != Weight::WQ) {
            let (dims, ty): (&[u64], _) = match row.weight {
                Weight::GAttn | Weight::GQ | Weight::GKv => (&[32], GgmlType::F32),
                Weight::WQA => (&[32, 32], ty),
                Weight::WQB => (&[32, 72], ty),
                Weight::WKvA => (&[32, 36], ty),
                Weight::WUk if legacy => (&[32, 128], ty),
                Weight::WUv if legacy => continue,
                Weight::WUk => (&[32, 32, 2], ty),
                Weight::WUv => (&[32, 32, 2], ty),
                Weight::WO => (&[64, 32], ty),
                _ => continue,
            };
            let tensor =
                if legacy && row.weight == Weight::WUk { mla_check::model::LEGACY } else { row.gguf };
            w.tensor(format!("blk.{layer}.{tensor}"), dims, ty);
            let blocks = dims.iter().product::<u64>() as usize / ty.block_elements();
            sizes.push(blocks * ty.block_bytes());
        }
    }
    w.write(&folder.join(name), &mut |i, out| {
        let bytes: Vec<u8> =
            (0..sizes[i]).map(|j| (j as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] & 0x3f).collect();
        out.write_all(&bytes)
    })?;
    Ok(())
}
