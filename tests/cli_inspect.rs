//! `inspect`, `devices` and `synth` as a user runs them: on good files, on files damaged by hand, into pipes.

mod common;

use common::{MODELS, fixture};
use mla_check::gguf::write::{MetaValue, Writer};
use mla_check::gguf::{Gguf, Value};
use mla_check::model::Model;
use mla_check::model::lint::lint;
use mla_reference::GgmlType;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn mla_check() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mla-check"));
    command
        .env_remove("NO_COLOR")
        .env_remove("CLICOLOR_FORCE")
        .env("CUDA_VISIBLE_DEVICES", "")
        .stdin(Stdio::null());
    command
}

fn run(args: &[&str], path: &Path) -> Output {
    mla_check().args(args).arg(path).output().unwrap()
}

/// Both streams with every run of spaces and line ends as one space, so that sentences can be found across lines.
fn words(output: &Output) -> String {
    let both = [output.stdout.clone(), output.stderr.clone()].concat();
    String::from_utf8(both).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

fn fits(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    let long = text.lines().find(|l| l.chars().count() > 80);
    assert_eq!(long, None, "longer than 80 columns");
}

/// The headers of a model, to be altered; its data is written as zeros.
struct Draft {
    arch: String,
    meta: Vec<(String, MetaValue)>,
    tensors: Vec<(String, Vec<u64>, GgmlType)>,
}

impl Draft {
    fn of(name: &str) -> Draft {
        let file = MODELS.iter().find(|m| m.0.starts_with(name)).unwrap().1;
        let gguf = Gguf::open(&fixture(file)).unwrap();
        let pairs = gguf.metadata().iter().filter(|(k, _)| !k.starts_with("split."));
        let meta = pairs.filter_map(|(key, value)| {
            let value = match value {
                Value::U32(v) => v.into(),
                Value::F32(v) => v.into(),
                Value::Bool(v) => v.into(),
                Value::String(s) => std::str::from_utf8(s).unwrap().into(),
                _ => return None,
            };
            Some((key.to_string(), value))
        });
        let tensors = gguf.tensors().iter().map(|t| (t.name.clone(), t.dims.clone(), t.ty.known().unwrap()));
        Draft {
            arch: gguf.metadata().str("general.architecture").unwrap().unwrap().to_string(),
            meta: meta.collect(),
            tensors: tensors.collect(),
        }
    }
    fn key(&self, name: &str) -> String {
        if name.starts_with("general.") { name.into() } else { format!("{}.{name}", self.arch) }
    }
    fn unset(&mut self, name: &str) -> &mut Draft {
        let key = self.key(name);
        self.meta.retain(|(k, _)| *k != key);
        self
    }
    fn set(&mut self, name: &str, value: impl Into<MetaValue>) -> &mut Draft {
        let pair = (self.key(name), value.into());
        self.unset(name).meta.push(pair);
        self
    }
    /// Removes the tensors of all layers whose names end so.
    fn remove(&mut self, end: &str) -> &mut Draft {
        self.tensors.retain(|(n, ..)| !n.ends_with(end));
        self
    }
    fn add(&mut self, name: &str, dims: &[u64], ty: GgmlType) -> &mut Draft {
        self.remove(name).tensors.push((name.into(), dims.to_vec(), ty));
        self
    }
    fn write(&self, folder: &Path) -> PathBuf {
        let path = folder.join("draft.gguf");
        let mut writer = Writer::new();
        for (key, value) in &self.meta {
            writer.meta(key, value.clone());
        }
        for (name, dims, ty) in &self.tensors {
            writer.tensor(name, dims, *ty);
        }
        let size = |i: usize| {
            let (_, dims, ty) = &self.tensors[i];
            dims.iter().product::<u64>() as usize / ty.block_elements() * ty.block_bytes()
        };
        writer.write(&path, &mut |i, out| out.write_all(&vec![0; size(i)])).unwrap();
        path
    }
}

use GgmlType::{F32, NVFP4, Q4_K, Q5_0};

/// What is altered, the exit code, and what must be said.
type Damage = (&'static str, fn(&mut Draft) -> &mut Draft, i32, &'static [&'static str]);

const DAMAGES: &[Damage] = &[
    ("dsv3", |d| d, 0, &["headers are sound", "4 heads, query rank 256, latent 512"]),
    ("glm5dims", |d| d, 0, &["hf 1e-6; llama.cpp, vllm, sglang 1e-5, a factor of 10", "No defect"]),
    (
        "dsv3",
        |d| d.remove("blk.1.attn_output.weight"),
        1,
        &["1 defect that breaks attention", "tensor blk.1.attn_output.weight (w_o) is missing (layer 1)"],
    ),
    (
        "dsv3",
        |d| d.remove("attn_q_a_norm.weight"),
        1,
        &["1 defect", "blk.*.attn_q_a_norm.weight (g_q) is missing (layers 0..1)", "g_q missing"],
    ),
    ("dsv3", |d| d.remove("blk.0.attn_kv_a_mqa.weight"), 1, &["w_kv_a) is missing", "MLA attention in 1"]),
    (
        "dsv3",
        |d| d.remove("attn_k_b.weight"),
        1,
        &["attn_k_b.weight (w_uk) is missing (nor is there attn_kv_b.weight)"],
    ),
    (
        "dsv3",
        |d| d.add("blk.0.attn_kv_a_mqa.weight", &[256, 580], Q4_K),
        1,
        &["has shape 256 x 580 (fastest first), its metadata asks for 256 x 576", "leave 68 for rope"],
    ),
    (
        "dsv3",
        |d| d.set("rope.dimension_count", 32u32),
        1,
        &["leave 64 for rope after a latent of 512, but deepseek2.rope.dimension_count is 32"],
    ),
    (
        "dsv3",
        |d| d.add("blk.0.attn_k_b.weight", &[512, 128, 4], Q5_0),
        1,
        &["metadata asks for 128 x 512 x 4: it looks transposed"],
    ),
    (
        "dsv3",
        |d| d.add("blk.0.attn_k_b.weight", &[128, 2048], Q5_0),
        0,
        &["headers are sound, 1 warning", "folded to two axes 128 x 2048"],
    ),
    ("dsv3", |d| d.add("blk.0.attn_kv_b.weight", &[512, 1024], Q4_K), 0, &["both layouts", "(layer 0)"]),
    (
        "dsv3",
        |d| {
            d.remove("attn_k_b.weight").remove("attn_v_b.weight");
            d.add("blk.0.attn_kv_b.weight", &[512, 1024], Q4_K).add(
                "blk.1.attn_kv_b.weight",
                &[512, 1024],
                Q4_K,
            )
        },
        0,
        &[
            "only attn_kv_b.weight, but the metadata has key_length_mla",
            "head_count_kv is 1, but files with attn_kv_b.weight have 4",
        ],
    ),
    (
        "dsv3",
        |d| d.unset("attention.key_length_mla").unset("attention.value_length_mla"),
        1,
        &["key_length 576 was taken as the width of a head", "every width of a head is wrong"],
    ),
    (
        "glm5dims",
        |d| d.unset("attention.key_length_mla").unset("attention.value_length_mla"),
        2,
        &["the key glm-dsa.attention.key_length_mla is missing", "where:", "do:"],
    ),
    ("dsv3", |d| d.set("attention.head_count_kv", 4u32), 0, &["head_count_kv is 4", "attn_k_b have 1"]),
    ("dsv3", |d| d.unset("attention.head_count_kv"), 0, &["head_count_kv is absent, which means 4"]),
    ("dsv3", |d| d.set("attention.key_length", 500u32), 0, &["key_length is 500, but a cache row has 576"]),
    ("dsv3", |d| d.set("attention.key_length", "wide"), 0, &["an integer or an array"]),
    ("dsv3", |d| d.set("block_count", 3u32), 1, &["no tensors of layers 2: parts of the file are missing"]),
    (
        "dsv3",
        |d| d.set("block_count", 3u32).set("nextn_predict_layers", 1u32),
        0,
        &["no tensors of layers 2: the layers for multi-token prediction were left out"],
    ),
    ("dsv3", |d| d.set("nextn_predict_layers", 1u32), 0, &["for multi-token prediction: 1"]),
    (
        "dsv3",
        |d| d.add("blk.1.nextn.enorm.weight", &[256], F32),
        0,
        &["nextn tensors, but deepseek2.nextn_predict_layers does not count"],
    ),
    ("dsv3", |d| d.set("block_count", 1u32), 0, &["layers 1 lie beyond block_count 1"]),
    ("dsv3", |d| d.set("block_count", u32::MAX), 1, &["no tensors of layers 2..4294967294"]),
    (
        "dsv3",
        |d| d.set("general.file_type", 17u32),
        0,
        &["is 17 (Q5_K_M), but no tensor of the file has type"],
    ),
    ("dsv3", |d| d.set("general.file_type", 999u32), 0, &["is 999, which is no file type"]),
    ("dsv3", |d| d.set("general.file_type", 1024u32 + 15), 0, &["headers are sound"]),
    (
        "dsv3",
        |d| d.add("blk.1.attn_q_a.weight", &[256, 256], NVFP4).add("blk.1.attn_q_a.scale", &[1], F32),
        0,
        &[
            "blk.1.attn_q_a.scale is a tensor scale that llama.cpp does not ask for",
            "`run` multiplies by it (layer 1)",
        ],
    ),
    (
        "dsv3",
        |d| d.add("blk.1.attn_output.weight", &[512, 256], NVFP4).add("blk.1.attn_output.scale", &[1], F32),
        0,
        &["headers are sound"],
    ),
    (
        "dsv3",
        |d| d.add("blk.0.attn_output.weight", &[512, 256], NVFP4),
        0,
        &["blk.0.attn_output.weight is NVFP4 and has no tensor scale: 1 is taken (layer 0)"],
    ),
    (
        "dsv3",
        |d| d.add("blk.0.attn_output.scale", &[2], F32),
        1,
        &[
            "blk.0.attn_output.scale should be the scale of its weight, one F32, but has type F32 and dims [2]",
        ],
    ),
    (
        "dsv3",
        |d| {
            d.set("attention.key_length_mla", 576u32).remove("attn_k_b.weight").remove("attn_q_b.weight");
            for n in 0..2 {
                d.add(&format!("blk.{n}.attn_k_b.weight"), &[512, 512, 4], Q4_K);
                d.add(&format!("blk.{n}.attn_q_b.weight"), &[256, 4 * 576], Q4_K);
            }
            d
        },
        0,
        &["attn_k_b is square (512 x 512)"],
    ),
    ("dsv3", |d| d.add("token_embd.weight", &[512, 288], Q4_K), 0, &["token_embd.weight has rows of 512"]),
    (
        "dsv3",
        |d| d.set("rope.scaling.yarn_beta_fast", 1f32),
        0,
        &["conventions differ in the frequencies of rope", "takes 32 and 1"],
    ),
    (
        "dsv3",
        // (0.1 ln 40 + 1)² = 1.8738
        |d| d.unset("rope.scaling.yarn_log_multiplier"),
        0,
        &["conventions differ in the softmax scale", "a factor of 1.874"],
    ),
    (
        "dsv3",
        |d| d.set("general.architecture", "llama"),
        2,
        &["architecture 'llama' is not supported", "deepseek2 (DeepSeek-V2", "glm-dsa (GLM-5"],
    ),
    ("dsv3", |d| d.unset("general.architecture"), 2, &["architecture '(none)' is not supported"]),
    (
        "dsv3",
        |d| d.unset("attention.kv_lora_rank"),
        2,
        &["the key deepseek2.attention.kv_lora_rank is missing"],
    ),
    (
        "dsv3",
        |d| d.set("attention.kv_lora_rank", 512u64),
        0,
        &["deepseek2.attention.kv_lora_rank (u64): not stored as u32, which llama.cpp asks for"],
    ),
    (
        "dsv3",
        |d| d.set("attention.kv_lora_rank", 512f32),
        2,
        &["the value is 512.0 (f32), expected an integer"],
    ),
    ("dsv3", |d| d.unset("attention.value_length_mla"), 2, &["attention.value_length_mla is missing"]),
    (
        "dsv3",
        |d| d.set("attention.head_count", 3u32),
        1,
        &[
            "blk.*.attn_q_b.weight (w_q_b) has shape 256 x 768 (fastest first), its metadata asks for 256 x 576",
        ],
    ),
    ("dsv3", |d| d.set("rope.dimension_count", 63u32), 2, &["is 63, but columns rotate in pairs"]),
    ("dsv3", |d| d.set("rope.dimension_count", 192u32), 2, &["no column is left unrotated"]),
    (
        "dsv3",
        |d| d.add("blk.1.attn_q_a.bias", &[256], F32).add("blk.1.ffn_new.weight", &[256], F32),
        0,
        &[
            "blk.1.attn_q_a.bias is no weight of this architecture's attention: `run` leaves it out",
            "1 warning",
        ],
    ),
    (
        "dsv3",
        |d| {
            let name = format!("{} \u{1b}]0;title\u{7}\u{202e}", "long ".repeat(40) + &"x".repeat(200));
            d.set("general.name", name).add("blk.0.evil\u{1b}[2J", &[4], F32)
        },
        0,
        &["\\u{1b}]0;title\\u{7}\\u{202e}", "blk.0.evil\\u{1b}[2J"],
    ),
];

#[test]
fn damages_are_told_and_sorted_by_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    for (i, (model, damage, code, sentences)) in DAMAGES.iter().enumerate() {
        let mut draft = Draft::of(model);
        damage(&mut draft);
        let path = draft.write(folder.path());
        let started = Instant::now();
        let output = run(&["inspect", "--tensors"], &path);
        assert!(started.elapsed() < Duration::from_secs(5), "damage {i} takes {:?}", started.elapsed());
        let said = words(&output);
        assert_eq!(output.status.code(), Some(*code), "damage {i}: {said}");
        for sentence in *sentences {
            assert!(said.contains(sentence), "damage {i}: {sentence:?} is not in {said}");
        }
        if *code < 2 {
            fits(&output);
            let raw = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
            assert!(!String::from_utf8(output.stdout).unwrap().contains(raw), "damage {i}");
            let json = run(&["inspect", "--format", "json"], &path);
            assert_eq!(json.status.code(), Some(*code));
            let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
            let findings = json["findings"].as_array().unwrap();
            assert_eq!(findings.iter().any(|f| f["severity"] == "defect"), *code == 1, "damage {i}");
        } else {
            assert!(output.stdout.is_empty());
        }
    }
}

#[test]
fn a_report_in_json_names_every_role() {
    let output = run(&["inspect", "--format", "json", "--layer", "all"], &fixture(MODELS[0].1));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((json["schema"].as_str(), json["version"].as_u64()), (Some("mla-check.inspect"), Some(1)));
    assert_eq!(json["files"].as_array().unwrap().len(), 3);
    assert_eq!(json["attention_types"], serde_json::json!({"Q4_K": 10, "Q5_0": 2}));
    assert_eq!(json["weights"].as_array().unwrap().len(), 2);
    // Offset and part as gguf-py read them (fixtures/gguf/tables.tsv).
    let w_uv =
        &json["weights"][1]["weights"].as_array().unwrap().iter().find(|w| w["role"] == "w_uv").unwrap();
    let expected = serde_json::json!({
        "name": "blk.1.attn_v_b.weight", "type": "Q4_K", "dims": [512, 128, 4], "part": 3, "offset": 111424,
        "bytes": 147456
    });
    assert_eq!(w_uv["tensor"], expected);
    assert_eq!(w_uv["hf"], "model.layers.1.self_attn.kv_b_proj.weight (value rows)");
}

#[test]
fn layers_are_chosen() {
    let file = fixture(MODELS[1].1);
    for (asked, code, sentence) in [
        ("1", 0, "blk.1.attn_k_b.weight"),
        ("0..1", 0, "blk.1.attn_k_b.weight"),
        ("all", 0, "blk.1.attn_k_b.weight"),
        (
            "7",
            2,
            "layer 7 has no MLA attention where: --layer 7 do: choose another one; layers with MLA attention: 0..1",
        ),
        ("1..9", 2, "are not layers of a model of 2"),
        ("x", 2, "is not a layer"),
    ] {
        let output = run(&["inspect", "--layer", asked], &file);
        assert_eq!(output.status.code(), Some(code), "{asked}");
        assert!(words(&output).contains(sentence), "{asked}: {}", words(&output));
    }
    let first = words(&run(&["inspect"], &file));
    assert!(first.contains("blk.0.attn_k_b.weight") && !first.contains("blk.1.attn_k_b.weight"));
}

#[test]
fn what_cannot_be_read_is_exit_2() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("empty.gguf"), b"").unwrap();
    let whole = std::fs::read(fixture(MODELS[1].1)).unwrap();
    std::fs::write(path("cut.gguf"), &whole[..whole.len() / 2]).unwrap();
    for name in ["nothing.gguf", "", "empty.gguf", "cut.gguf"] {
        let output = run(&["inspect"], &path(name));
        assert_eq!(output.status.code(), Some(2), "{name}");
        assert!(output.stdout.is_empty());
        assert!(String::from_utf8_lossy(&output.stderr).lines().count() >= 3, "{}", words(&output));
    }
}

#[test]
fn colours_only_where_wanted_and_quiet_is_one_line() {
    let file = fixture(MODELS[1].1);
    assert!(run(&["inspect", "--color", "always"], &file).stdout.contains(&0x1b));
    assert!(!run(&["inspect"], &file).stdout.contains(&0x1b));
    assert_eq!(run(&["inspect", "--quiet"], &file).stdout, b"headers are sound\n");
}

#[test]
fn a_closed_pipe_is_no_error() {
    for format in ["text", "json"] {
        let mut child = mla_check()
            .args(["inspect", "--tensors", "--format", format])
            .arg(fixture(MODELS[1].1))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]), "{format}");
    }
}

/// 8,000 tensors, each layer lacking the same: one finding, and no time.
#[test]
fn a_large_table_takes_no_time() {
    let mut draft = Draft::of("dsv3");
    draft.set("block_count", 400u32);
    for layer in 2..400 {
        for i in 0..20 {
            draft.tensors.push((format!("blk.{layer}.ffn_{i}.weight"), vec![8], F32));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let model = Model::open(&draft.write(folder.path())).unwrap();
    assert!(model.gguf().unwrap().tensors().len() > 7900);
    let started = Instant::now();
    let findings = lint(&model);
    // Measured: 9 ms.
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    let defects: Vec<_> = findings.iter().map(|f| (f.what.as_str(), f.place.as_str())).collect();
    assert_eq!(defects, [("no attention tensors", "layers 2..399")]);
}

#[test]
fn devices_are_listed() {
    let text = mla_check().arg("devices").output().unwrap();
    fits(&text);
    assert_eq!(text.status.code(), Some(0));
    for sentence in ["reference yes", "cpu yes", "ptx yes our kernels", "cuda no our kernels"] {
        assert!(words(&text).contains(sentence), "{}", words(&text));
    }
    let json = mla_check().args(["devices", "--format", "json"]).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["engines"].as_array().unwrap().len(), 4);
    assert!(json["threads"].as_u64().unwrap() > 0);
    // Either there, or with what to do about it.
    for part in ["driver", "nvrtc"] {
        let missing = json[part]["missing"].as_str();
        assert_ne!(json[part]["library"].is_string(), missing.is_some(), "{json}");
        assert!(missing.is_none_or(|m| m.contains("\n  do: ")), "{json}");
    }
    assert!(words(&text).contains("GPUs"), "{}", words(&text));
}

#[test]
fn a_made_up_model_is_sound() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("made up.gguf");
    let synth =
        run(&["synth", "--preset", "glm-5", "--heads", "2", "--layers", "2", "--type", "q4_k_m"], &path);
    assert_eq!(synth.status.code(), Some(0), "{}", words(&synth));
    assert!(words(&synth).contains("random weights of seed 0 next: mla-check run '"), "{}", words(&synth));
    let inspected = run(&["inspect"], &path);
    assert_eq!(inspected.status.code(), Some(0), "{}", words(&inspected));
    assert!(words(&inspected).contains("2 heads, query rank 2048"));
    assert!(!words(&inspected).contains("warning"), "{}", words(&inspected));

    for (args, sentence) in [
        (&["--preset", "glm-6"][..], "[possible values: glm-5"),
        (&["--preset", "glm-5", "--heads", "0"], "ask for 1 to"),
        (&["--preset", "glm-5", "--type", "Q9"], "[possible values: F32"),
    ] {
        let output = run(&[&["synth"], args].concat(), &folder.path().join("none.gguf"));
        assert_eq!(output.status.code(), Some(2));
        assert!(words(&output).contains(sentence), "{}", words(&output));
    }
    assert!(!folder.path().join("none.gguf").exists());
    let help = mla_check().args(["synth", "--help"]).output().unwrap();
    assert!(words(&help).contains("glm-5, deepseek-v3"), "{}", words(&help));
}

/// A type of nobody: its number in the file is changed by hand.
#[test]
fn a_type_that_is_unknown_is_said_and_not_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("unknown.gguf");
    let mut bytes = std::fs::read(fixture("models/glm5dims.Q4_K_M.gguf")).unwrap();
    let name = b"blk.1.attn_q_a.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len();
    // Two dimensions, then the type.
    assert_eq!(bytes[at..at + 4], 2u32.to_le_bytes());
    bytes[at + 20..at + 24].copy_from_slice(&9999u32.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let output = run(&["inspect"], &path);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    let expected = "blk.1.attn_q_a.weight has type type 9999, which can't be decoded: `run` can't judge this layer (layer 1)";
    assert!(words(&output).contains(expected), "{}", words(&output));
    let output = run(&["run", "--layer", "1", "--batch", "0+2"], &path);
    assert_eq!(output.status.code(), Some(2), "{}", words(&output));
    assert!(words(&output).contains("blk.1.attn_q_a.weight"), "{}", words(&output));
}
