/*! `plm`: PLM-1.8B. Queries straight from the hidden state, one unsplit decompression weight. */

use super::arch::{Architecture, Layers, NoValueLength, Query, Rotation, Widths, YarnMultiplier};
use mla_reference::Pairing;

/// The row of the table.
pub static PLM: Architecture = Architecture {
    name: "plm",
    models: "PLM",
    query: Query::Direct,
    widths: Widths::Plain,
    no_value_length: NoValueLength::HiddenPerHead,
    value_length_counts: true,
    layers: Layers::All,
    indexer: None,
    yarn: YarnMultiplier::Plain,
    rotation: Rotation::Pairs(Pairing::Adjacent),
    factors: false,
    temperature: false,
    verified: &["plm_dims.Q4_K_M"],
};
