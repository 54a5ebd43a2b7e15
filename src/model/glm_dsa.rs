/*! `glm-dsa`: GLM-5, 5.1, 5.2. Dense attention while no request is longer than the indexer's top_k. */

use super::arch::{Architecture, YarnMultiplier};
use mla_reference::Pairing;

/// The row of the table.
pub static GLM_DSA: Architecture = Architecture {
    name: "glm-dsa",
    models: "GLM-5, GLM-5.1, GLM-5.2",
    without_query_rank: false,
    legacy: false,
    indexer: true,
    yarn: YarnMultiplier::Ignored,
    pairing: Pairing::Adjacent,
    temperature: false,
};
