//! Metadata keys that no fixture has: aliases, defaults, and what is refused.

use mla_check::gguf::write::{MetaValue, Writer};
use mla_check::model::{Model, ModelError};

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
