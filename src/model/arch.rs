/*!
The table of architectures, by the value of `general.architecture`.

An architecture that is not in [`ARCHITECTURES`] is refused by name: reading a file by the wrong rules would
accuse a correct engine.
*/

use super::{deepseek2, glm_dsa};
use mla_reference::Pairing;

/// How a file says YaRN's multiplier of the softmax scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum YarnMultiplier {
    /// `rope.scaling.yarn_log_multiplier` holds a tenth of mscale_all_dim.
    Tenth,
    /// The key has no meaning here.
    Ignored,
}

/// What decides how a file of an architecture is read.
#[derive(Debug)]
pub struct Architecture {
    /// Value of `general.architecture`.
    pub name: &'static str,
    /// Models that use it.
    pub models: &'static str,
    /// Whether queries may come straight from the hidden state (no q_lora_rank).
    pub without_query_rank: bool,
    /// Whether the unsplit `attn_kv_b` occurs.
    pub legacy: bool,
    /// Whether a sparse indexer chooses the keys beyond top_k.
    pub indexer: bool,
    /// YaRN's multiplier.
    pub yarn: YarnMultiplier,
    /// Pair order of rotated columns.
    pub pairing: Pairing,
    /// Whether the Llama-4 temperature keys are read.
    pub temperature: bool,
}

/// All that are read.
pub static ARCHITECTURES: &[&Architecture] = &[&deepseek2::DEEPSEEK2, &glm_dsa::GLM_DSA];

/// The architecture with this name.
pub fn find(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().copied().find(|a| a.name == name)
}
