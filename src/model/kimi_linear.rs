/*! `kimi-linear`: Kimi-Linear. MLA attention without any rotation in some layers; the others have linear attention. */

use super::arch::{Architecture, Layers, NoValueLength, Query, Rotation, Widths, YarnMultiplier};

/// The row of the table.
pub static KIMI_LINEAR: Architecture = Architecture {
    name: "kimi-linear",
    models: "Kimi-Linear",
    query: Query::Direct,
    widths: Widths::Mla,
    no_value_length: NoValueLength::Refused,
    value_length_counts: false,
    layers: Layers::ByHeadCountKv,
    indexer: None,
    yarn: YarnMultiplier::Plain,
    rotation: Rotation::None,
    factors: false,
    temperature: false,
    verified: &["kimi_linear_dims.Q4_K_M"],
};
