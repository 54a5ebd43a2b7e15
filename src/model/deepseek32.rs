/*! `deepseek32`: DeepSeek-V3.2. Attention is that of V3, dense while no request is longer than the top_k of the indexer. */

use super::arch::{Architecture, Layers, NoValueLength, Query, Rotation, Widths, YarnMultiplier};
use mla_reference::Pairing;

/// The row of the table.
pub static DEEPSEEK32: Architecture = Architecture {
    name: "deepseek32",
    models: "DeepSeek-V3.2",
    query: Query::Rank,
    widths: Widths::Mla,
    no_value_length: NoValueLength::Refused,
    value_length_counts: true,
    layers: Layers::All,
    indexer: Some(Pairing::Half),
    yarn: YarnMultiplier::Tenth,
    rotation: Rotation::Pairs(Pairing::Adjacent),
    factors: false,
    temperature: false,
    verified: &["dsv32dims.Q4_K_M"],
};
