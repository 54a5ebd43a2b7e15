/*! `minicpm3`: MiniCPM3. Half-split pairs; frequencies are divided by one of two sets of factors, by the length of the session. */

use super::arch::{Architecture, Layers, NoValueLength, Query, Rotation, Widths, YarnMultiplier};
use mla_reference::Pairing;

/// The row of the table.
pub static MINICPM3: Architecture = Architecture {
    name: "minicpm3",
    models: "MiniCPM3",
    query: Query::Rank,
    widths: Widths::Plain,
    no_value_length: NoValueLength::HiddenPerHead,
    value_length_counts: true,
    layers: Layers::All,
    indexer: None,
    yarn: YarnMultiplier::Plain,
    rotation: Rotation::Pairs(Pairing::Half),
    factors: true,
    temperature: false,
    verified: &["minicpm3dims.Q4_K_M"],
};
