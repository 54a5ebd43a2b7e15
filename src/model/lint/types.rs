/*! Types of metadata values: llama.cpp takes the one that its converter writes, and refuses a file with any other. */

use crate::gguf::{Gguf, ValueType};

/// Keys after the architecture's prefix, with the type that they have.
const KEYS: &[(&str, ValueType)] = &[
    ("context_length", ValueType::U32),
    ("embedding_length", ValueType::U32),
    ("block_count", ValueType::U32),
    ("attention.head_count", ValueType::U32),
    ("attention.head_count_kv", ValueType::U32),
    ("attention.key_length", ValueType::U32),
    ("attention.value_length", ValueType::U32),
    ("attention.key_length_mla", ValueType::U32),
    ("attention.value_length_mla", ValueType::U32),
    ("attention.kv_lora_rank", ValueType::U32),
    ("attention.q_lora_rank", ValueType::U32),
    ("attention.layer_norm_rms_epsilon", ValueType::F32),
    ("attention.temperature_scale", ValueType::F32),
    ("attention.temperature_length", ValueType::U32),
    ("attention.indexer.top_k", ValueType::U32),
    ("rope.dimension_count", ValueType::U32),
    ("rope.freq_base", ValueType::F32),
    ("rope.scaling.type", ValueType::String),
    ("rope.scaling.factor", ValueType::F32),
    ("rope.scaling.original_context_length", ValueType::U32),
    ("rope.scaling.yarn_log_multiplier", ValueType::F32),
    ("nextn_predict_layers", ValueType::U32),
];

/// A sentence for each key that has another type. Head counts may be arrays, one value a layer.
pub(super) fn odd(gguf: &Gguf, arch: &str) -> Vec<String> {
    let found = KEYS.iter().filter_map(|(name, wanted)| {
        let key = format!("{arch}.{name}");
        let ty = gguf.metadata().get(&key)?.ty();
        let array = ty == ValueType::Array && name.starts_with("attention.head_count");
        (ty != *wanted && !array).then(|| {
            format!("{key} has type {ty:?}, but llama.cpp takes {wanted:?} alone and refuses the file; its value is used here")
        })
    });
    found.collect()
}
