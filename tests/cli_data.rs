//! `inspect --data`: what is planted in a file's values is found and named, what is healthy lists nothing.

#[path = "common/sparse.rs"]
#[allow(dead_code)]
mod sparse;

use mla_check::gguf::Gguf;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn mla_check() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mla-check"));
    command.env("CUDA_VISIBLE_DEVICES", "").stdin(Stdio::null());
    command
}

fn data(args: &[&str], model: &Path) -> Output {
    mla_check().args(["inspect", "--data"]).args(args).arg(model).output().unwrap()
}

fn words(output: &Output) -> String {
    let both = [output.stdout.clone(), output.stderr.clone()].concat();
    String::from_utf8(both).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", words(output)))
}

/// What was found at this severity.
fn found(report: &serde_json::Value, severity: &str) -> Vec<String> {
    let all = report["findings"].as_array().unwrap().iter().filter(|f| f["severity"] == severity);
    all.map(|f| format!("{} ({})", f["what"].as_str().unwrap(), f["place"].as_str().unwrap())).collect()
}

fn synth(folder: &Path, preset: &str, ty: &str, heads: &str, layers: &str) -> PathBuf {
    let path = folder.join(format!("{preset}-{ty}-{heads}-{layers}.gguf"));
    let made = mla_check()
        .args(["synth", "--preset", preset, "--type", ty, "--heads", heads, "--layers", layers])
        .arg(&path)
        .output()
        .unwrap();
    assert_eq!(made.status.code(), Some(0), "{}", words(&made));
    path
}

#[test]
fn healthy_files_list_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let inside = |folder: &str| {
        let all = std::fs::read_dir(fixtures.join(folder)).unwrap().map(|e| e.unwrap().path());
        all.filter(|p| p.extension().is_some_and(|e| e == "gguf") || p.is_dir()).collect::<Vec<_>>()
    };
    let mut all = [inside("models"), inside("architectures"), inside("checkpoints")].concat();
    assert!(all.len() > 8, "{all:?}");
    all.push(synth(folder.path(), "deepseek-v2-lite", "Q4_K_M", "8", "6"));
    all.push(synth(folder.path(), "glm-4.7-flash", "Q2_K", "2", "5"));
    for path in all {
        let output = data(&[], &path);
        assert_eq!(output.status.code(), Some(0), "{}: {}", path.display(), words(&output));
        assert!(words(&output).starts_with("headers and values are sound"), "{}", words(&output));
        let long = String::from_utf8_lossy(&output.stdout)
            .lines()
            .find(|l| l.chars().count() > 80)
            .map(String::from);
        assert_eq!(long, None);
        let report = json(&data(&["--format", "json"], &path));
        // Other warnings are of the headers.
        let plain = mla_check().args(["inspect", "--format", "json"]).arg(&path).output().unwrap();
        assert_eq!(found(&report, "warning"), found(&json(&plain), "warning"), "{}", path.display());
        assert_eq!(report["data"]["unread"], serde_json::json!([]));
        assert_eq!(report["data"]["odd"], serde_json::json!([]));
    }
}

/// The file's bytes, and where a tensor's data lies.
fn planted(path: &Path, tensor: &str, plant: impl FnOnce(&mut [u8])) {
    let gguf = Gguf::open(path).unwrap();
    let info = gguf.tensor(tensor).unwrap().clone();
    drop(gguf);
    let mut bytes = std::fs::read(path).unwrap();
    let from = info.offset as usize;
    plant(&mut bytes[from..from + info.size.unwrap() as usize]);
    std::fs::write(path, bytes).unwrap();
}

/// Bytes of a block of Q8_0: an f16 scale and 32 integers.
const BLOCK: usize = 34;

/// Doubles the scales of blocks of Q8_0 some times.
fn double(blocks: &mut [u8], times: u16) {
    for block in blocks.chunks_exact_mut(BLOCK) {
        let d = u16::from_le_bytes([block[0], block[1]]) + 0x400 * times;
        block[..2].copy_from_slice(&d.to_le_bytes());
    }
}

/// A model of 6 layers of 4 heads in Q8_0: 2048 wide, latent 512, keys of 128 + 64, values of 128, no query rank.
fn model(folder: &Path) -> PathBuf {
    synth(folder, "deepseek-v2-lite", "Q8_0", "4", "6")
}

#[test]
fn heads_and_layers_that_stand_out_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    // w_uv [head, 128, 512]: head 2 four times what it was.
    let head = 128 * 512 / 32 * BLOCK;
    planted(&path, "blk.1.attn_v_b.weight", |b| double(&mut b[2 * head..3 * head], 2));
    // w_q [head, 192, 2048]: the rope rows of head 3 are zero.
    let row = 2048 / 32 * BLOCK;
    planted(&path, "blk.2.attn_q.weight", |b| b[(3 * 192 + 128) * row..4 * 192 * row].fill(0));
    // w_o [2048, head · 128]: the columns of head 1 twice what they were.
    planted(&path, "blk.4.attn_output.weight", |b| {
        for row in b.chunks_exact_mut(4 * 128 / 32 * BLOCK) {
            double(&mut row[4 * BLOCK..8 * BLOCK], 1);
        }
    });
    // A whole tensor, its layer in the middle of the model.
    planted(&path, "blk.3.attn_k_b.weight", |b| double(b, 1));
    let output = data(&["--format", "json"], &path);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    let report = json(&output);
    let mut odd: Vec<_> = report["data"]["odd"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| {
            let factor = o["norm"].as_f64().unwrap() / o["typical"].as_f64().unwrap();
            let group = o["group"].as_str().unwrap();
            (o["role"].as_str().unwrap(), group, o["layer"].as_u64(), o["head"].as_u64(), factor)
        })
        .collect();
    odd.sort_by_key(|o| o.2);
    let expected = [
        ("w_uv", "all", Some(1), Some(2), 4.0),
        ("w_q", "rope rows", Some(2), Some(3), 0.0),
        ("w_uk", "all", Some(3), None, 2.0),
        ("w_o", "all", Some(4), Some(1), 2.0),
    ];
    assert_eq!(odd.len(), expected.len(), "{odd:?}");
    for (found, expected) in odd.iter().zip(expected) {
        assert_eq!((found.0, found.1, found.2, found.3), (expected.0, expected.1, expected.2, expected.3));
        // Norms of random heads differ by less than 2 %.
        assert!((found.4 - expected.4).abs() <= 0.02 * expected.4, "{found:?}");
    }
    let warnings = found(&report, "warning").join("\n");
    for sentence in [
        "w_uv: head 2 stands out: its norm is",
        "w_q (rope rows): head 3 stands out: its norm is 0 times",
        "w_uk stands out: its norm is",
        "w_o: head 1 stands out",
        // 64 rows of 64 blocks.
        "blk.2.attn_q.weight (Q8_0): 4096 of 49152 blocks are all zero (of 4096 also all bytes), the first is block 45056",
    ] {
        assert!(warnings.contains(sentence), "{sentence}: {warnings}");
    }
}

#[test]
fn nan_and_zeros_in_a_weight_are_defects() {
    let folder = tempfile::tempdir().unwrap();
    let whole = model(folder.path());
    let copy = folder.path().join("planted.gguf");
    type Plant = fn(&mut [u8]);
    let cases: [(&str, Plant, i32, &str, &str); 6] = [
        (
            "blk.1.attn_kv_a_mqa.weight",
            |b| b[17 * BLOCK..17 * BLOCK + 2].copy_from_slice(&0x7e00u16.to_le_bytes()),
            1,
            "defect",
            "blk.1.attn_kv_a_mqa.weight (Q8_0): 32 NaN and 0 infinite values in 1 of 36864 blocks, the first is block 17",
        ),
        (
            // An infinite scale: 0 · inf is NaN.
            "blk.5.attn_output.weight",
            |b| {
                b[40 * BLOCK..41 * BLOCK].fill(1);
                b[40 * BLOCK..40 * BLOCK + 2].copy_from_slice(&0x7c00u16.to_le_bytes());
                b[40 * BLOCK + 2] = 0;
            },
            1,
            "defect",
            "1 NaN and 31 infinite values in 1 of 32768 blocks, the first is block 40",
        ),
        ("blk.0.attn_norm.weight", |b| b.fill(0), 1, "defect", "all its bytes are zero, like a hole"),
        (
            // Integers of zero, scales that are not.
            "blk.2.attn_k_b.weight",
            |b| b.chunks_exact_mut(BLOCK).for_each(|block| block[2..].fill(0)),
            1,
            "defect",
            "blk.2.attn_k_b.weight (Q8_0): all its values are zero",
        ),
        (
            "blk.3.attn_norm.weight",
            |b| b[4 * 300..4 * 301].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes()),
            1,
            "defect",
            "0 NaN and 1 infinite values in 1 of 8 blocks, the first is block 1",
        ),
        (
            "blk.4.attn_kv_a_mqa.weight",
            |b| {
                let row = 64 * BLOCK;
                for block in b[7 * row..8 * row].chunks_exact_mut(BLOCK) {
                    block.fill(1);
                }
            },
            0,
            "warning",
            "1 rows hold one value throughout, the first is row 7",
        ),
    ];
    for (tensor, plant, code, severity, sentence) in cases {
        std::fs::copy(&whole, &copy).unwrap();
        planted(&copy, tensor, plant);
        let output = data(&["--format", "json"], &copy);
        let report = json(&output);
        let said = found(&report, severity).join("\n");
        assert!(said.contains(sentence) && said.contains(tensor), "{sentence}: {said}");
        assert_eq!(output.status.code(), Some(code), "{said}");
        // Layers that are not chosen are not read.
        let layer = if tensor.contains("blk.1.") { "0" } else { "1" };
        let output = data(&["--layer", layer, "-q"], &copy);
        assert_eq!(words(&output), "headers and values are sound", "{tensor}");
    }
}

/// NaN outside of attention: a warning, with `--tensors` only.
#[test]
fn damage_elsewhere_is_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/glm5dims.Q4_K_M.gguf"), &path)
        .unwrap();
    // d of the second block of Q4_K.
    planted(&path, "blk.0.ffn_up.weight", |b| b[144..146].copy_from_slice(&0xfe01u16.to_le_bytes()));
    assert_eq!(words(&data(&["-q"], &path)), "headers and values are sound");
    let output = data(&["-q", "--tensors"], &path);
    assert_eq!(words(&output), "headers and values are sound, 1 warning");
    let said = words(&data(&["--tensors"], &path));
    assert!(said.contains("256 NaN and 0 infinite values in 1 of 32 blocks, the first is block 1"), "{said}");
}

#[test]
fn threads_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = synth(folder.path(), "deepseek-v2-lite", "Q4_K_M", "4", "2");
    let report = |threads: &str| {
        let mut report = json(&data(&["--format", "json", "--threads", threads], &path));
        report["data"]["seconds"].take();
        report
    };
    assert_eq!(report("1"), report("3"));
}

/// A file that another program cuts while it is read ends with an error, not by a signal.
#[cfg(unix)]
#[test]
fn a_file_cut_while_it_is_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: Vec<sparse::Tensor> = (0..8).flat_map(|l| sparse::attention(l, 128)).collect();
    let (path, bytes) = sparse::write(folder.path(), &tensors, 8, 128, 1);
    assert!(bytes > 700 << 20);
    let child = mla_check()
        .args(["inspect", "--data", "--threads", "1"])
        .arg(&path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // 0.8 GB take longer than that in any build.
    std::thread::sleep(Duration::from_millis(300));
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{:?} {}", output.status, words(&output));
    let said = words(&output);
    assert!(said.contains("where:") && said.contains("do not write to a model while it is read"), "{said}");
}
