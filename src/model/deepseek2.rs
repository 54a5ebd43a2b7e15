/*! `deepseek2`: DeepSeek-V2, V3, R1, Kimi-K2, GLM-4.7-Flash and relatives. */

use super::arch::{Architecture, Layers, NoValueLength, Query, Rotation, Widths, YarnMultiplier};
use mla_reference::Pairing;

/// The row of the table.
pub static DEEPSEEK2: Architecture = Architecture {
    name: "deepseek2",
    models: "DeepSeek-V2, V2-Lite, V3, R1, Kimi-K2, GLM-4.7-Flash",
    query: Query::Either,
    widths: Widths::Either,
    no_value_length: NoValueLength::Refused,
    value_length_counts: true,
    layers: Layers::All,
    indexer: None,
    yarn: YarnMultiplier::Tenth,
    rotation: Rotation::Pairs(Pairing::Adjacent),
    factors: false,
    temperature: true,
    verified: &["dsv3.Q4_K_M"],
};
