/*!
Which models can be made up: one row a model.

Dimensions and constants are those of the published configurations. Only attention is written, so nothing
is said about experts or vocabularies.
*/

use crate::gguf::ValueType;
use crate::gguf::write::{MetaValue, Writer};

/// A model's attention geometry, in the letters of the harness.
#[derive(Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Preset {
    pub name: &'static str,
    /// `general.architecture`.
    pub arch: &'static str,
    pub hidden: u64,
    pub heads: u64,
    /// 0: queries come straight from the hidden states.
    pub q_rank: u64,
    pub latent: u64,
    pub nope: u64,
    pub rope: u64,
    pub value: u64,
    pub rope_base: f32,
    pub eps: f32,
    pub context: u32,
    pub yarn: Option<Yarn>,
    pub indexer: Option<Indexer>,
}

/// YaRN's constants, as a file has them.
#[derive(Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Yarn {
    pub factor: f32,
    pub original_context: u32,
    /// 0.1 · mscale_all_dim.
    pub log_multiplier: f32,
    /// beta_fast and beta_slow, where they are not the usual 32 and 1.
    pub betas: Option<[f32; 2]>,
}

/// The sparse indexer.
#[derive(Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Indexer {
    pub heads: u64,
    pub width: u64,
    pub top_k: u32,
}

/// What a tensor's values are drawn as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draw {
    /// A matrix with row rms 1/√(row length), in the mix's base type.
    Weight,
    /// The same, in the mix's type for `attn_output`.
    Output,
    /// The same, in the mix's type for `attn_q`.
    Query,
    /// The same, in the mix's type for `attn_k_b` and `attn_v_b`.
    Heads,
    /// A norm's weight: uniform in [0.5, 1.5].
    Norm,
    /// A norm's bias: uniform in [-0.5, 0.5].
    Bias,
}

impl Preset {
    /// Every preset.
    pub const ALL: &'static [Preset] = &[
        Preset {
            name: "glm-5",
            arch: "glm-dsa",
            hidden: 6144,
            heads: 64,
            q_rank: 2048,
            latent: 512,
            nope: 192,
            rope: 64,
            value: 256,
            rope_base: 1e6,
            eps: 1e-5,
            context: 202_752,
            yarn: None,
            indexer: Some(Indexer { heads: 32, width: 128, top_k: 2048 }),
        },
        Preset {
            name: "deepseek-v3",
            arch: "deepseek2",
            hidden: 7168,
            heads: 128,
            q_rank: 1536,
            latent: 512,
            nope: 128,
            rope: 64,
            value: 128,
            rope_base: 1e4,
            eps: 1e-6,
            context: 163_840,
            yarn: Some(Yarn { factor: 40.0, original_context: 4096, log_multiplier: 0.1, betas: None }),
            indexer: None,
        },
        Preset {
            name: "deepseek-v2-lite",
            arch: "deepseek2",
            hidden: 2048,
            heads: 16,
            q_rank: 0,
            latent: 512,
            nope: 128,
            rope: 64,
            value: 128,
            rope_base: 1e4,
            eps: 1e-6,
            context: 163_840,
            yarn: Some(Yarn { factor: 40.0, original_context: 4096, log_multiplier: 0.0707, betas: None }),
            indexer: None,
        },
        Preset {
            name: "kimi-k2",
            arch: "deepseek2",
            hidden: 7168,
            heads: 64,
            q_rank: 1536,
            latent: 512,
            nope: 128,
            rope: 64,
            value: 128,
            rope_base: 5e4,
            eps: 1e-6,
            context: 131_072,
            yarn: Some(Yarn {
                factor: 32.0,
                original_context: 4096,
                log_multiplier: 0.1,
                betas: Some([1.0; 2]),
            }),
            indexer: None,
        },
        Preset {
            name: "glm-4.7-flash",
            arch: "deepseek2",
            hidden: 2048,
            heads: 20,
            q_rank: 768,
            latent: 512,
            nope: 192,
            rope: 64,
            value: 256,
            rope_base: 1e6,
            eps: 1e-5,
            context: 202_752,
            yarn: None,
            indexer: None,
        },
    ];

    /// The preset of this name.
    pub fn by_name(name: &str) -> Option<&'static Preset> {
        Preset::ALL.iter().find(|p| p.name == name)
    }

    /// A layer's tensors with this many heads: name, dimensions fastest first, values.
    /// In the order of names as bytes, in which llama-quantize writes a layer.
    pub(super) fn tensors(&self, heads: u64) -> Vec<(&'static str, Vec<u64>, Draw)> {
        use Draw::*;
        let (hidden, q_rank, latent, nope, value) =
            (self.hidden, self.q_rank, self.latent, self.nope, self.value);
        let mut tensors = vec![
            ("attn_k_b.weight", vec![nope, latent, heads], Heads),
            ("attn_kv_a_mqa.weight", vec![hidden, latent + self.rope], Weight),
            ("attn_kv_a_norm.weight", vec![latent], Norm),
            ("attn_norm.weight", vec![hidden], Norm),
            ("attn_output.weight", vec![heads * value, hidden], Output),
        ];
        let q = heads * (nope + self.rope);
        tensors.extend(match q_rank {
            0 => vec![("attn_q.weight", vec![hidden, q], Query)],
            _ => vec![
                ("attn_q_a.weight", vec![hidden, q_rank], Weight),
                ("attn_q_a_norm.weight", vec![q_rank], Norm),
                ("attn_q_b.weight", vec![q_rank, q], Weight),
            ],
        });
        tensors.push(("attn_v_b.weight", vec![latent, value, heads], Heads));
        if let Some(indexer) = &self.indexer {
            tensors.extend([
                ("indexer.attn_k.weight", vec![hidden, indexer.width], Weight),
                ("indexer.attn_q_b.weight", vec![q_rank, indexer.heads * indexer.width], Weight),
                ("indexer.k_norm.bias", vec![indexer.width], Bias),
                ("indexer.k_norm.weight", vec![indexer.width], Norm),
                ("indexer.proj.weight", vec![hidden, indexer.heads], Weight),
            ]);
        }
        tensors
    }

    /// Adds the keys of the architecture, with the names and types of llama.cpp's converter.
    pub(super) fn metadata(&self, writer: &mut Writer, layers: u32, heads: u64) {
        let arch = self.arch;
        let mut put = |key: &str, value: MetaValue| {
            writer.meta(format!("{arch}.{key}"), value);
        };
        // Dimensions are below 2^32: those of the table above, and `heads` is checked by the caller.
        let int = |v: u64| MetaValue::U32(v as u32);
        put("block_count", layers.into());
        put("context_length", self.context.into());
        put("embedding_length", int(self.hidden));
        put("attention.head_count", int(heads));
        put("attention.head_count_kv", 1u32.into());
        if let Some(yarn) = &self.yarn {
            put("rope.scaling.type", "yarn".into());
            put("rope.scaling.factor", yarn.factor.into());
            put("rope.scaling.original_context_length", yarn.original_context.into());
            put("rope.scaling.yarn_log_multiplier", yarn.log_multiplier.into());
            if let Some([fast, slow]) = yarn.betas {
                put("rope.scaling.yarn_beta_fast", fast.into());
                put("rope.scaling.yarn_beta_slow", slow.into());
            }
        }
        put("rope.freq_base", self.rope_base.into());
        put("rope.dimension_count", int(self.rope));
        put("attention.layer_norm_rms_epsilon", self.eps.into());
        put("attention.key_length", int(self.latent + self.rope));
        put("attention.value_length", int(self.latent));
        put("attention.key_length_mla", int(self.nope + self.rope));
        put("attention.value_length_mla", int(self.value));
        if self.q_rank > 0 {
            put("attention.q_lora_rank", int(self.q_rank));
        }
        put("attention.kv_lora_rank", int(self.latent));
        if let Some(indexer) = &self.indexer {
            put("attention.indexer.head_count", int(indexer.heads));
            put("attention.indexer.key_length", int(indexer.width));
            put("attention.indexer.top_k", indexer.top_k.into());
            let full = vec![MetaValue::Bool(true); layers as usize];
            put("attention.indexer.types", MetaValue::Array(ValueType::Bool, full));
        }
    }
}
