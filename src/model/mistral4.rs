/*! `mistral4`: Mistral Small 4. The mathematics of deepseek2, with a Llama-4 temperature where the file has its keys. */

use super::arch::{Architecture, Layers, NoValueLength, Query, Rotation, Widths, YarnMultiplier};
use mla_reference::Pairing;

/// The row of the table.
pub static MISTRAL4: Architecture = Architecture {
    name: "mistral4",
    models: "Mistral Small 4",
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
    verified: &["mistral4dims.Q4_K_M"],
};
