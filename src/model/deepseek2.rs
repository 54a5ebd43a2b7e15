/*! `deepseek2`: DeepSeek-V2, V3, R1, Kimi-K2, GLM-4.7-Flash and relatives. */

use super::arch::{Architecture, YarnMultiplier};
use mla_reference::Pairing;

/// The row of the table.
pub static DEEPSEEK2: Architecture = Architecture {
    name: "deepseek2",
    models: "DeepSeek-V2, V2-Lite, V3, R1, Kimi-K2, GLM-4.7-Flash",
    without_query_rank: true,
    legacy: true,
    indexer: false,
    yarn: YarnMultiplier::Tenth,
    pairing: Pairing::Adjacent,
    temperature: true,
};
