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
    /// None: the converter of this architecture writes none.
    pub rope_base: Option<f32>,
    pub eps: f32,
    pub context: u32,
    pub yarn: Option<Yarn>,
    /// Llama-4 temperature: scale and length.
    pub temperature: Option<(f32, u32)>,
    pub indexer: Option<Indexer>,
    pub lengths: Lengths,
    /// Whether there are two sets of rope factors: random ones, since what the published model has is not known here.
    pub rope_factors: bool,
    /// Which layers have MLA attention.
    pub mla: MlaLayers,
}

/// How the decompression weight is stored, and which widths of heads the keys give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// attn_k_b and attn_v_b; key_length and value_length are a cache row's, `*_mla` a head's.
    Split,
    /// The same, but value_length holds a number that means nothing.
    SplitBut(u32),
    /// attn_kv_b; key_length and value_length.
    Whole,
    /// attn_kv_b; value_length is left out where it is embedding_length / head_count.
    WholeWithoutValue,
}

/// Which layers have MLA attention; the others are not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlaLayers {
    /// All.
    All,
    /// Every so many, and the last one.
    Every(u32),
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
    /// Whether the file says which layers have an indexer of their own.
    pub types: bool,
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

/// What most models have; widths are those of a DeepSeek head.
const USUAL: Preset = Preset {
    name: "",
    arch: "deepseek2",
    hidden: 0,
    heads: 0,
    q_rank: 0,
    latent: 512,
    nope: 128,
    rope: 64,
    value: 128,
    rope_base: Some(1e4),
    eps: 1e-6,
    context: 163_840,
    yarn: None,
    temperature: None,
    indexer: None,
    lengths: Lengths::Split,
    rope_factors: false,
    mla: MlaLayers::All,
};

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
            rope_base: Some(1e6),
            eps: 1e-5,
            context: 202_752,
            yarn: None,
            indexer: Some(Indexer { heads: 32, width: 128, top_k: 2048, types: true }),
            ..USUAL
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
            rope_base: Some(1e4),
            eps: 1e-6,
            context: 163_840,
            yarn: Some(Yarn { factor: 40.0, original_context: 4096, log_multiplier: 0.1, betas: None }),
            indexer: None,
            ..USUAL
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
            rope_base: Some(1e4),
            eps: 1e-6,
            context: 163_840,
            yarn: Some(Yarn { factor: 40.0, original_context: 4096, log_multiplier: 0.0707, betas: None }),
            indexer: None,
            ..USUAL
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
            rope_base: Some(5e4),
            eps: 1e-6,
            context: 131_072,
            yarn: Some(Yarn {
                factor: 32.0,
                original_context: 4096,
                log_multiplier: 0.1,
                betas: Some([1.0; 2]),
            }),
            indexer: None,
            ..USUAL
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
            rope_base: Some(1e6),
            eps: 1e-5,
            context: 202_752,
            yarn: None,
            indexer: None,
            ..USUAL
        },
        Preset {
            name: "deepseek-v3.2",
            arch: "deepseek32",
            hidden: 7168,
            heads: 128,
            q_rank: 1536,
            yarn: Some(Yarn {
                factor: 40.0,
                original_context: 4096,
                log_multiplier: 0.1,
                betas: Some([32.0, 1.0]),
            }),
            indexer: Some(Indexer { heads: 64, width: 128, top_k: 2048, types: false }),
            ..USUAL
        },
        Preset {
            name: "mistral4",
            arch: "mistral4",
            hidden: 4096,
            heads: 32,
            q_rank: 1024,
            latent: 256,
            nope: 64,
            context: 1_048_576,
            yarn: Some(Yarn {
                factor: 128.0,
                original_context: 8192,
                log_multiplier: 0.1,
                betas: Some([32.0, 1.0]),
            }),
            temperature: Some((0.1, 8192)),
            ..USUAL
        },
        Preset {
            name: "minicpm3",
            arch: "minicpm3",
            hidden: 2560,
            heads: 40,
            q_rank: 768,
            latent: 256,
            nope: 64,
            rope: 32,
            value: 64,
            rope_base: None,
            eps: 1e-5,
            context: 32_768,
            lengths: Lengths::WholeWithoutValue,
            rope_factors: true,
            ..USUAL
        },
        Preset {
            name: "plm",
            arch: "plm",
            hidden: 2048,
            heads: 16,
            rope_base: Some(1e5),
            context: 4096,
            lengths: Lengths::Whole,
            ..USUAL
        },
        Preset {
            name: "kimi-linear",
            arch: "kimi-linear",
            hidden: 2304,
            heads: 32,
            eps: 1e-5,
            context: 1_048_576,
            lengths: Lengths::SplitBut(72),
            mla: MlaLayers::Every(4),
            ..USUAL
        },
    ];

    /// The preset of this name.
    pub fn by_name(name: &str) -> Option<&'static Preset> {
        Preset::ALL.iter().find(|p| p.name == name)
    }

    /// Whether a layer of so many has MLA attention.
    pub(super) fn is_mla(&self, layer: u32, layers: u32) -> bool {
        match self.mla {
            MlaLayers::All => true,
            MlaLayers::Every(n) => (layer + 1).is_multiple_of(n) || layer + 1 == layers,
        }
    }

    /// Tensors of float32 that belong to no layer: name, dimensions, least and greatest value.
    pub(super) fn globals(&self) -> Vec<(&'static str, u64, [f32; 2])> {
        if !self.rope_factors {
            return Vec::new();
        }
        vec![
            ("rope_factors_long.weight", self.rope / 2, [1.0, 26.0]),
            ("rope_factors_short.weight", self.rope / 2, [1.0, 1.3]),
        ]
    }

    fn whole(&self) -> bool {
        matches!(self.lengths, Lengths::Whole | Lengths::WholeWithoutValue)
    }

    /// A layer's tensors with this many heads: name, dimensions fastest first, values.
    /// In the order of names as bytes, in which llama-quantize writes a layer.
    pub(super) fn tensors(&self, heads: u64) -> Vec<(&'static str, Vec<u64>, Draw)> {
        use Draw::*;
        let (hidden, q_rank, latent, nope, value) =
            (self.hidden, self.q_rank, self.latent, self.nope, self.value);
        let mut tensors = Vec::new();
        if !self.whole() {
            tensors.push(("attn_k_b.weight", vec![nope, latent, heads], Heads));
        }
        tensors.extend([
            ("attn_kv_a_mqa.weight", vec![hidden, latent + self.rope], Weight),
            ("attn_kv_a_norm.weight", vec![latent], Norm),
        ]);
        if self.whole() {
            tensors.push(("attn_kv_b.weight", vec![latent, heads * (nope + value)], Weight));
        }
        tensors.extend([
            ("attn_norm.weight", vec![hidden], Norm),
            ("attn_output.weight", vec![heads * value, hidden], Output),
        ]);
        let q = heads * (nope + self.rope);
        tensors.extend(match q_rank {
            0 => vec![("attn_q.weight", vec![hidden, q], Query)],
            _ => vec![
                ("attn_q_a.weight", vec![hidden, q_rank], Weight),
                ("attn_q_a_norm.weight", vec![q_rank], Norm),
                ("attn_q_b.weight", vec![q_rank, q], Weight),
            ],
        });
        if !self.whole() {
            tensors.push(("attn_v_b.weight", vec![latent, value, heads], Heads));
        }
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
        let kv_heads = |layer| MetaValue::I32(i32::from(self.is_mla(layer, layers)));
        put(
            "attention.head_count_kv",
            match self.mla {
                MlaLayers::Every(_) => MetaValue::Array(ValueType::I32, (0..layers).map(kv_heads).collect()),
                MlaLayers::All if self.whole() => int(heads),
                MlaLayers::All => 1u32.into(),
            },
        );
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
        if let Some((scale, length)) = self.temperature {
            put("attention.temperature_scale", scale.into());
            put("attention.temperature_length", length.into());
        }
        if let Some(base) = self.rope_base {
            put("rope.freq_base", base.into());
        }
        put("rope.dimension_count", int(self.rope));
        put("attention.layer_norm_rms_epsilon", self.eps.into());
        let (key, cache) = (self.nope + self.rope, self.latent + self.rope);
        put("attention.key_length", int(if self.whole() { key } else { cache }));
        match self.lengths {
            Lengths::Split => put("attention.value_length", int(self.latent)),
            Lengths::SplitBut(n) => put("attention.value_length", n.into()),
            // What an absent key would mean holds for the preset's own number of heads alone.
            Lengths::WholeWithoutValue if self.hidden / heads == self.value => {}
            Lengths::Whole | Lengths::WholeWithoutValue => put("attention.value_length", int(self.value)),
        }
        if !self.whole() {
            put("attention.key_length_mla", int(key));
            put("attention.value_length_mla", int(self.value));
        }
        if self.q_rank > 0 {
            put("attention.q_lora_rank", int(self.q_rank));
        }
        put("attention.kv_lora_rank", int(self.latent));
        if let Some(indexer) = &self.indexer {
            put("attention.indexer.head_count", int(indexer.heads));
            put("attention.indexer.key_length", int(indexer.width));
            put("attention.indexer.top_k", indexer.top_k.into());
            if indexer.types {
                let full = vec![MetaValue::Bool(true); layers as usize];
                put("attention.indexer.types", MetaValue::Array(ValueType::Bool, full));
            }
        }
    }
}
