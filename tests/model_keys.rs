//! Metadata keys that no fixture has: aliases, defaults, and what is refused or warned of.

use mla_check::gguf::ValueType;
use mla_check::gguf::write::{MetaValue, Writer};
use mla_check::model::lint::{Severity, lint};
use mla_check::model::{Model, ModelError};
use mla_reference::GgmlType;

/// A deepseek2 file without tensors, with these keys beside the needed ones.
fn open(more: &[(&str, MetaValue)]) -> Result<Model, ModelError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut w = Writer::new();
    w.meta("general.architecture", "deepseek2");
    for (key, value) in [
        ("block_count", 1u32),
        ("context_length", 8192),
        ("embedding_length", 32),
        ("attention.head_count", 2),
        ("attention.kv_lora_rank", 16),
        ("attention.key_length_mla", 12),
        ("attention.value_length_mla", 8),
        ("rope.dimension_count", 4),
    ] {
        w.meta(format!("deepseek2.{key}"), value);
    }
    w.meta("deepseek2.attention.layer_norm_rms_epsilon", 1e-6f32);
    for (key, value) in more {
        w.meta(format!("deepseek2.{key}"), value.clone());
    }
    w.write(&path, &mut |_, _| Ok(())).unwrap();
    Model::open(&path)
}

/// Defaults as llama.cpp and transformers have them: base 10000, betas 32 and 1, the context's length.
#[test]
fn what_is_absent_has_the_defaults_of_the_field() {
    let model = open(&[]).unwrap();
    assert_eq!((model.numbers.theta, model.numbers.yarn, model.numbers.temperature), (1e4, None, None));
    assert_eq!((model.geometry.nope, model.geometry.rope, model.geometry.value), (8, 4, 8));
    let yarn = [("rope.scaling.type", "yarn".into()), ("rope.scaling.factor", 40f32.into())];
    let y = open(&yarn).unwrap().numbers.yarn.unwrap();
    assert_eq!((y.factor, y.original, y.beta_fast, y.beta_slow), (40.0, 8192.0, 32.0, 1.0));
    assert_eq!(y.log_multiplier, None);
}

#[test]
fn what_is_there_is_read() {
    let y = open(&[
        ("rope.scaling.type", "yarn".into()),
        ("rope.scale_linear", 8f32.into()),
        ("rope.scaling.original_context_length", 512u32.into()),
        ("rope.scaling.yarn_beta_fast", 16f32.into()),
        ("rope.scaling.yarn_beta_slow", 2f32.into()),
        ("rope.scaling.yarn_log_multiplier", 0.5f32.into()),
        ("rope.scaling.attn_factor", 1f32.into()),
        ("rope.freq_base", 5e5f32.into()),
    ])
    .unwrap()
    .numbers;
    assert_eq!(y.theta, 5e5);
    let y = y.yarn.unwrap();
    assert_eq!((y.factor, y.original, y.beta_fast, y.beta_slow), (8.0, 512.0, 16.0, 2.0));
    assert_eq!(y.log_multiplier, Some(0.5));
}

#[test]
fn mathematics_that_is_not_implemented_is_refused() {
    for (more, key) in [
        (
            &[
                ("rope.scaling.type", "yarn".into()),
                ("rope.scaling.factor", 40f32.into()),
                ("rope.scaling.attn_factor", 1.5f32.into()),
            ][..],
            "rope.scaling.attn_factor",
        ),
        (
            &[("rope.scaling.type", "linear".into()), ("rope.scaling.factor", 4f32.into())],
            "rope.scaling.type",
        ),
        (&[("rope.scale_linear", 4f32.into())], "rope.scaling.type"),
        (&[("rope.scaling.type", "yarn".into())], "rope.scaling.factor"),
        (&[("attention.temperature_scale", 0.1f32.into())], "attention.temperature_length"),
    ] {
        let message = open(more).err().unwrap().to_string();
        assert!(message.contains(key), "{key}: {message}");
    }
}

/// A file of an architecture, to be altered: keys under its prefix, tensors with their dims.
struct Draft {
    arch: &'static str,
    keys: Vec<(&'static str, MetaValue)>,
    tensors: Vec<(String, Vec<u64>)>,
}

impl Draft {
    /// One sound layer.
    fn of(arch: &'static str) -> Draft {
        let (_, keys, tensors) = ALL.iter().find(|a| a.0 == arch).unwrap();
        let ints = COMMON.iter().chain(keys.iter().copied().flatten());
        let mut keys: Vec<_> = ints.map(|(k, v)| (*k, MetaValue::U32(*v))).collect();
        keys.push(("attention.layer_norm_rms_epsilon", 1e-6f32.into()));
        let tensors = LATENT.iter().chain(tensors.iter().copied().flatten());
        let mut tensors: Vec<_> = tensors.map(|(n, d)| (format!("blk.0.{n}"), d.to_vec())).collect();
        if arch == "minicpm3" {
            tensors.push(("rope_factors_long.weight".into(), vec![2]));
            tensors.push(("rope_factors_short.weight".into(), vec![2]));
        }
        Draft { arch, keys, tensors }
    }
    fn unset(mut self, key: &str) -> Draft {
        self.keys.retain(|(k, _)| *k != key);
        self
    }
    fn set(self, key: &'static str, value: impl Into<MetaValue>) -> Draft {
        let mut draft = self.unset(key);
        draft.keys.push((key, value.into()));
        draft
    }
    fn without(mut self, name: &str) -> Draft {
        self.tensors.retain(|(n, _)| n != name);
        self
    }
    fn with(self, name: &str, dims: &[u64]) -> Draft {
        let mut draft = self.without(name);
        draft.tensors.push((name.into(), dims.to_vec()));
        draft
    }
    /// What `inspect` would say: the error, or defects and warnings.
    fn said(&self) -> Result<Vec<String>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        let mut w = Writer::new();
        w.meta("general.architecture", self.arch);
        for (key, value) in &self.keys {
            w.meta(format!("{}.{key}", self.arch), value.clone());
        }
        for (name, dims) in &self.tensors {
            w.tensor(name, dims, GgmlType::F32);
        }
        let ones = |i: usize| vec![1f32; self.tensors[i].1.iter().product::<u64>() as usize];
        w.write(&path, &mut |i, out| ones(i).iter().try_for_each(|v| out.write_all(&v.to_le_bytes())))
            .unwrap();
        let model = Model::open(&path).map_err(|e| e.to_string())?;
        let found = lint(&model).into_iter().filter(|f| f.severity != Severity::Note);
        let mut said: Vec<String> =
            found.map(|f| format!("{:?}: {} ({})", f.severity, f.what, f.place)).collect();
        for layer in model.mla_layers() {
            said.extend(model.weights(layer).err().map(|e| e.to_string()));
        }
        Ok(said)
    }
    /// The same in one text.
    fn text(&self) -> String {
        self.said().map_or_else(|e| e, |all| all.join("\n"))
    }
}

const COMMON: &[(&str, u32)] = &[
    ("block_count", 1),
    ("context_length", 8192),
    ("embedding_length", 32),
    ("attention.head_count", 2),
    ("attention.kv_lora_rank", 16),
    ("rope.dimension_count", 4),
];
const RANKED: &[(&str, &[u64])] =
    &[("attn_q_a.weight", &[32, 8]), ("attn_q_a_norm.weight", &[8]), ("attn_q_b.weight", &[8, 24])];
const DIRECT: &[(&str, &[u64])] = &[("attn_q.weight", &[32, 24])];
/// Of every layer: 2 heads of 8 + 4 columns of key and 8 of value.
const LATENT: &[(&str, &[u64])] = &[
    ("attn_norm.weight", &[32]),
    ("attn_kv_a_mqa.weight", &[32, 20]),
    ("attn_kv_a_norm.weight", &[16]),
    ("attn_output.weight", &[16, 32]),
];
const SPLIT: &[(&str, &[u64])] = &[("attn_k_b.weight", &[8, 16, 2]), ("attn_v_b.weight", &[16, 8, 2])];
const WHOLE: &[(&str, &[u64])] = &[("attn_kv_b.weight", &[16, 32])];
const MLA: &[(&str, u32)] = &[
    ("attention.key_length_mla", 12),
    ("attention.value_length_mla", 8),
    ("attention.key_length", 20),
    ("attention.value_length", 16),
    ("attention.head_count_kv", 1),
];
const PLAIN: &[(&str, u32)] =
    &[("attention.key_length", 12), ("attention.value_length", 8), ("attention.head_count_kv", 2)];
const RANK: &[(&str, u32)] = &[("attention.q_lora_rank", 8)];
const TOP_K: &[(&str, u32)] = &[("attention.indexer.top_k", 4)];

type Ints = &'static [(&'static str, u32)];
type Shapes = &'static [(&'static str, &'static [u64])];
/// Every architecture: the keys and tensors of its kind.
const ALL: [(&str, &[Ints], &[Shapes]); 7] = [
    ("deepseek2", &[MLA, RANK], &[SPLIT, RANKED]),
    ("deepseek32", &[MLA, RANK, TOP_K], &[SPLIT, RANKED]),
    ("glm-dsa", &[MLA, RANK, TOP_K], &[SPLIT, RANKED]),
    ("mistral4", &[MLA, RANK], &[SPLIT, RANKED]),
    ("minicpm3", &[PLAIN, RANK], &[WHOLE, RANKED]),
    ("plm", &[PLAIN], &[WHOLE, DIRECT]),
    ("kimi-linear", &[MLA], &[SPLIT, DIRECT]),
];

#[test]
fn a_sound_file_of_every_architecture_has_no_finding() {
    assert_eq!(ALL.map(|a| a.0).len(), mla_check::model::arch::ARCHITECTURES.len());
    for (arch, ..) in ALL {
        assert_eq!(Draft::of(arch).said(), Ok(Vec::new()), "{arch}");
    }
}

/// Rows 66 to 70, 72 and 78 of the field's ways to damage a file, for every architecture that they can befall.
#[test]
fn damage_of_keys_and_shapes_is_named() {
    type Alter = fn(Draft) -> Draft;
    let mla: &[&str] = &["deepseek2", "deepseek32", "glm-dsa", "mistral4", "kimi-linear"];
    let whole: &[&str] = &["minicpm3", "plm"];
    let all = &ALL.map(|a| a.0)[..];
    let cases: [(&[&str], Alter, &str); 23] = [
        // 66: a needed key is missing, or has another type.
        (all, |d| d.unset("attention.kv_lora_rank"), "attention.kv_lora_rank is missing"),
        (all, |d| d.set("attention.kv_lora_rank", "16"), "attention.kv_lora_rank"),
        (
            all,
            |d| d.set("attention.kv_lora_rank", 16u64),
            "kv_lora_rank has type U64, but llama.cpp takes U32 alone",
        ),
        (all, |d| d.unset("attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon is missing"),
        (all, |d| d.unset("rope.dimension_count"), "rope.dimension_count is missing"),
        (
            &["deepseek32", "glm-dsa", "minicpm3"],
            |d| d.unset("attention.q_lora_rank"),
            "q_lora_rank is missing",
        ),
        (
            &["deepseek32", "glm-dsa"],
            |d| d.unset("attention.indexer.top_k"),
            "attention.indexer.top_k is missing",
        ),
        (whole, |d| d.unset("attention.key_length"), "attention.key_length is missing"),
        // 67: one of the widths of heads without the other.
        (mla, |d| d.unset("attention.value_length_mla"), "attention.value_length_mla is missing"),
        (mla, |d| d.unset("attention.key_length_mla"), "attention.key_length_mla is missing"),
        // Neither, where the plain keys mean something else.
        (
            &["deepseek32", "glm-dsa", "kimi-linear"],
            |d| d.unset("attention.value_length_mla").unset("attention.key_length_mla"),
            "attention.key_length_mla is missing",
        ),
        // 68: keys of one layout, tensors of the other.
        (
            mla,
            |d| {
                let d = d.without("blk.0.attn_k_b.weight").without("blk.0.attn_v_b.weight");
                d.with("blk.0.attn_kv_b.weight", &[16, 32])
            },
            "only attn_kv_b.weight, but the metadata has key_length_mla",
        ),
        (
            whole,
            |d| {
                let d = d.without("blk.0.attn_kv_b.weight").with("blk.0.attn_k_b.weight", &[8, 16, 2]);
                d.with("blk.0.attn_v_b.weight", &[16, 8, 2])
            },
            "attn_k_b, but engines look for attn_kv_b.weight",
        ),
        // 69: k_b folded to two axes, not transposed; kv_b transposed.
        (mla, |d| d.with("blk.0.attn_k_b.weight", &[8, 32]), "folded to two axes 8 x 32, not 8 x 16 x 2"),
        (mla, |d| d.with("blk.0.attn_k_b.weight", &[16, 8, 2]), "(w_uk) has shape 16 x 8 x 2"),
        (whole, |d| d.with("blk.0.attn_kv_b.weight", &[32, 16]), "has shape 32 x 16 (fastest first)"),
        // 70: k_b square.
        (
            mla,
            |d| {
                let d = d.set("attention.kv_lora_rank", 8u32).set("attention.key_length", 12u32);
                let d = d.set("attention.value_length", 8u32).with("blk.0.attn_k_b.weight", &[8, 8, 2]);
                let d = d.with("blk.0.attn_v_b.weight", &[8, 8, 2]).with("blk.0.attn_kv_a_norm.weight", &[8]);
                d.with("blk.0.attn_kv_a_mqa.weight", &[32, 12])
            },
            "attn_k_b is square (8 x 8): were it transposed",
        ),
        // 72: rope columns.
        (all, |d| d.set("rope.dimension_count", 3u32), "columns rotate in pairs"),
        (all, |d| d.set("rope.dimension_count", 12u32), "no column is left unrotated"),
        (
            &["deepseek2", "deepseek32", "glm-dsa", "mistral4", "plm", "kimi-linear"],
            |d| d.set("rope.dimension_count", 6u32),
            "its rows leave 4 for rope after a latent of 16, but",
        ),
        // 78: layers beyond the last, a hole.
        (all, |d| d.with("blk.1.attn_norm.weight", &[32]), "layers 1 lie beyond block_count 1"),
        (all, |d| d.set("block_count", 2u32), "no tensors of layers 1"),
        // What one architecture alone has.
        (&["plm", "kimi-linear"], |d| d.set("attention.q_lora_rank", 8u32), "straight from the hidden state"),
    ];
    for (archs, alter, said) in cases {
        for &arch in archs {
            let text = alter(Draft::of(arch)).text();
            assert!(text.contains(said), "{arch}: {said}: {text}");
        }
    }
}

/// value_length is hidden / heads where it is absent, in architectures whose converter leaves it out; elsewhere it is needed.
#[test]
fn a_missing_value_length_has_a_meaning_in_some() {
    for (arch, ok) in [("minicpm3", true), ("plm", true), ("deepseek2", false)] {
        let draft = Draft::of(arch).unset("attention.key_length_mla").unset("attention.value_length_mla");
        let draft = draft.set("attention.key_length", 12u32).unset("attention.value_length");
        let text = draft.text();
        // 32 / 2 = 16, which is not the 8 that the tensors have.
        let said = if ok { "attn_kv_b.weight (w_uk) has shape 16 x 32" } else { "value_length is missing" };
        assert!(text.contains(said), "{arch}: {text}");
    }
    // In kimi-linear it may hold anything.
    assert_eq!(Draft::of("kimi-linear").set("attention.value_length", 72u32).said(), Ok(Vec::new()));
    assert!(Draft::of("mistral4").set("attention.value_length", 72u32).text().contains("value_length is 72"));
}

/// The array that says which layers have MLA attention: too short, or without any.
#[test]
fn head_count_kv_of_layers_of_two_kinds() {
    let array = |values: &[i32]| {
        MetaValue::Array(ValueType::I32, values.iter().map(|v| MetaValue::I32(*v)).collect())
    };
    let draft = |values| Draft::of("kimi-linear").set("attention.head_count_kv", array(values));
    assert_eq!(draft(&[1]).said(), Ok(Vec::new()));
    let three = |values| draft(values).set("block_count", 3u32);
    assert!(three(&[1, 0]).text().contains("an array of 2, but kimi-linear.block_count is 3"));
    assert_eq!(three(&[1, 0, 0]).said(), Ok(Vec::new()), "layers of another kind may be missing");
    assert!(three(&[1, 0, 1]).text().contains("no tensors of layers 2"));
    assert!(draft(&[2]).text().contains("head_count_kv is 2, but files with attn_k_b have 1"));
}

/// Rope factors: both sets or none, of the right length, numbers that divide.
#[test]
fn rope_factors_are_checked() {
    let short = "rope_factors_short.weight";
    let one = Draft::of("minicpm3").without(short);
    assert!(one.text().contains("tensor rope_factors_short.weight is missing"), "{}", one.text());
    let none = one.without("rope_factors_long.weight");
    assert!(none.text().contains("frequencies are taken as they are"), "{}", none.text());
    let long = Draft::of("minicpm3").with(short, &[3]);
    assert!(long.text().contains("rope_factors_short.weight has dims [3]"), "{}", long.text());
}
