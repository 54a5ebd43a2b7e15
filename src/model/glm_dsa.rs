/*! `glm-dsa`: GLM-5, 5.1, 5.2. Dense attention while no request is longer than the indexer's top_k. */

use super::arch::{Architecture, Layers, NoValueLength, Query, Rotation, Widths, YarnMultiplier};
use mla_reference::Pairing;

/// The row of the table.
pub static GLM_DSA: Architecture = Architecture {
    name: "glm-dsa",
    models: "GLM-5, GLM-5.1, GLM-5.2",
    query: Query::Rank,
    widths: Widths::Mla,
    no_value_length: NoValueLength::Refused,
    value_length_counts: true,
    layers: Layers::All,
    indexer: Some(Pairing::Adjacent),
    yarn: YarnMultiplier::Ignored,
    rotation: Rotation::Pairs(Pairing::Adjacent),
    factors: false,
    temperature: false,
    verified: &["glm5dims.Q4_K_M"],
};
