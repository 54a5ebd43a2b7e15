/*!
The table of architectures, by the value of `general.architecture`.

What differs between architectures is data in [`Architecture`]; nothing else asks for a name. An architecture
that is not in [`ARCHITECTURES`] is refused, with the reason where it is known ([`REFUSED`]): reading a file by the
wrong rules would accuse a correct engine. Keys, layouts and pair orders: llama.cpp 0c1e57098 and its converter.
*/

use super::{deepseek2, deepseek32, glm_dsa, kimi_linear, minicpm3, mistral4, plm};
use mla_reference::Pairing;

/// What YaRN does to the softmax scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum YarnMultiplier {
    /// `rope.scaling.yarn_log_multiplier` holds a tenth of mscale_all_dim, whose square goes into the scale.
    Tenth,
    /// The key has no meaning here.
    Ignored,
    /// The scale is 1/√(N+P) whatever the file says.
    Plain,
}

/// What positions do to the rope columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// They rotate them, in this pair order.
    Pairs(Pairing),
    /// Nothing: the columns are used as they are, whatever rope keys the file has.
    None,
}

/// Where queries come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Query {
    /// From a latent: q_lora_rank is needed.
    Rank,
    /// Straight from the hidden state: q_lora_rank is not read.
    Direct,
    /// From a latent where q_lora_rank is there and not 0.
    Either,
}

/// Which keys hold the widths of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Widths {
    /// key_length_mla and value_length_mla, which are needed: the decompression weight is split.
    Mla,
    /// Those, or, where neither is there, key_length and value_length: it may be attn_kv_b.
    Either,
    /// key_length and value_length: it is attn_kv_b.
    Plain,
}

/// What a missing value_length means where it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoValueLength {
    /// The file can't be read.
    Refused,
    /// embedding_length / head_count.
    HiddenPerHead,
}

/// Which layers have MLA attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layers {
    /// All.
    All,
    /// Those whose entry of `attention.head_count_kv` is not 0; others have linear attention.
    ByHeadCountKv,
}

/// What decides how a file of an architecture is read.
#[derive(Clone, Copy, Debug)]
pub struct Architecture {
    /// Value of `general.architecture`.
    pub name: &'static str,
    /// Models that use it.
    pub models: &'static str,
    /// Where queries come from.
    pub query: Query,
    /// Which keys hold the widths of heads.
    pub widths: Widths,
    /// What a missing value_length means.
    pub no_value_length: NoValueLength,
    /// Whether attention.value_length has a meaning; where it has none, it may hold anything.
    pub value_length_counts: bool,
    /// Which layers have MLA attention.
    pub layers: Layers,
    /// Pair order of the sparse indexer's rope; None: no indexer chooses keys.
    pub indexer: Option<Pairing>,
    /// YaRN's multiplier.
    pub yarn: YarnMultiplier,
    /// What positions do.
    pub rotation: Rotation,
    /// Whether `rope_factors_long.weight` and `rope_factors_short.weight` divide the frequencies.
    pub factors: bool,
    /// Whether the Llama-4 temperature keys are read.
    pub temperature: bool,
    /// Files whose attention other software computed in float64 (`fixtures/oracle/NAME.safetensors`), held against the
    /// reference in every run of the tests. None: reports say that the architecture is unverified.
    pub verified: &'static [&'static str],
}

/// All that are read.
pub static ARCHITECTURES: &[&Architecture] = &[
    &deepseek2::DEEPSEEK2,
    &deepseek32::DEEPSEEK32,
    &glm_dsa::GLM_DSA,
    &mistral4::MISTRAL4,
    &minicpm3::MINICPM3,
    &plm::PLM,
    &kimi_linear::KIMI_LINEAR,
];

/// Relatives that are not read, and why.
pub static REFUSED: &[(&str, &str)] = &[
    (
        "kimi-k3",
        "a gate, sigmoid(attn_gate · x), multiplies the attention output before attn_output, and no stage computes it",
    ),
    (
        "bailingmoe3",
        "a sigmoid gate a head (attn_gate) multiplies the attention output, and no stage computes it",
    ),
    (
        "dots3note",
        "some layers attend within a sliding window with widths of their own, k_pe has a norm before rope, and heads have gates",
    ),
    (
        "glm5-next",
        "keys are pooled before the sparse indexer chooses among them, and layers are joined by hyper-connections",
    ),
    (
        "glm5next",
        "keys are pooled before the sparse indexer chooses among them, and layers are joined by hyper-connections",
    ),
    (
        "hy_v4",
        "attention has sinks (attn_sinks) and an output gate, and layers are joined by hyper-connections",
    ),
    ("deepseek2-ocr", "its attention is plain multi-head attention (attn_q, attn_k, attn_v), not MLA"),
    ("deepseek", "its attention is plain multi-head attention (attn_q, attn_k, attn_v), not MLA"),
    (
        "deepseek4",
        "its attention is not MLA: there is no decompression weight, and keys are compressed along the tokens",
    ),
    ("longcat", LONGCAT),
    ("longcat-flash", LONGCAT),
    ("longcat-flash-ngram", LONGCAT),
    ("longcat-flash-sparse", LONGCAT),
    ("longcat-next", LONGCAT),
];

const LONGCAT: &str = "queries and the normalised latent are multiplied by √(hidden / rank), which no stage computes, and only forks of llama.cpp write such files";

/// Why a file of any other architecture is not read.
pub const UNKNOWN: &str = "it is not an MLA architecture known here";

/// The architecture with this name.
pub fn find(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().copied().find(|a| a.name == name)
}

/// Why an architecture of this name is not read.
pub fn refusal(name: &str) -> &'static str {
    REFUSED.iter().find(|r| r.0 == name).map_or(UNKNOWN, |r| r.1)
}

impl Architecture {
    /// What a report says where no answers of other software are held against the reference.
    pub fn warning(&self) -> Option<String> {
        self.verified.is_empty().then(|| {
            format!(
                "unverified architecture: no numbers of other software were held against what is computed here for {}; a fault may be the checker's",
                self.name
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_or_refused_and_never_both() {
        for (i, a) in ARCHITECTURES.iter().enumerate() {
            assert!(ARCHITECTURES.iter().skip(i + 1).all(|b| a.name != b.name), "{}", a.name);
            assert_eq!(refusal(a.name), UNKNOWN);
        }
        for (name, why) in REFUSED {
            assert!(find(name).is_none() && refusal(name) == *why && *why != UNKNOWN, "{name}");
        }
        assert_eq!(refusal("llama"), UNKNOWN);
    }

    /// The frequencies that factors divide are those of a rotation.
    #[test]
    fn rows_make_sense() {
        for a in ARCHITECTURES {
            assert!(!a.factors || a.rotation != Rotation::None, "{}", a.name);
            assert!(a.no_value_length == NoValueLength::Refused || a.widths == Widths::Plain, "{}", a.name);
        }
    }

    #[test]
    fn what_nobody_verified_says_so() {
        let row = Architecture { verified: &[], ..deepseek2::DEEPSEEK2 };
        assert!(row.warning().unwrap().contains("unverified architecture"));
        assert_eq!(deepseek2::DEEPSEEK2.warning(), None);
    }
}
