/*!
The seam for results that are known from earlier runs: the judge asks, and does not know where they are kept.

Asked is only where a tensor is compared under the contract that the run is judged by, from the engine's own inputs;
hypotheses and searches compute what they need.
*/

use super::compare::Isolated;
use crate::trace::TensorId;
use crate::trace::store::View;
use mla_reference::Recall;
use serde::{Deserialize, Serialize};

/// Knows results of earlier runs.
pub trait Memory: Sync {
    /// Of a stage with these inputs.
    fn stage(&self, id: TensorId, of: &Isolated, inputs: &View) -> Box<dyn Entry + '_>;
}

/// What is known of one stage with given inputs.
pub trait Entry: Recall {
    /// How often it was of use.
    fn used(&self) -> Use;
}

/// Parts of the reference that were known, and that were computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// Known.
    pub taken: u64,
    /// Computed.
    pub made: u64,
}
