/*!
A question about one tensor, answered while a session judges: everything that its reference is made of stands there, and
nowhere else.

Whoever asks gets the stage as it is recomputed, once, and the session ends ([`SinkError::Enough`]). Other tensors are kept
and not judged, unless contracts are searched for: what one tensor's bits say, later ones are judged by.
*/

use super::compare::Isolated;
use super::search::FoundContract;
use super::unit::Which;
use crate::engine::SinkError;
use crate::trace::store::View;
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Contract, Phase, Stage, Weight, Weights};
use std::sync::Arc;

/// Takes the answer.
pub type Answer = Arc<dyn Fn(&Asked) + Send + Sync>;

/// What is asked about.
#[derive(Clone)]
pub struct Ask {
    /// The tensor.
    pub which: Which,
    /// Who wants to know.
    pub answer: Answer,
}

impl std::fmt::Debug for Ask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ask({:?})", self.which)
    }
}

impl Ask {
    /// Ends the session once what was asked for is there.
    pub(super) fn enough(ask: &Option<Ask>, which: Which) -> Result<(), SinkError> {
        match ask {
            Some(a) if a.which == which => Err(SinkError::Enough),
            _ => Ok(()),
        }
    }
}

/// What there is to be told.
pub enum Asked<'a> {
    /// A weight.
    Weight {
        /// Which.
        weight: Weight,
        /// The file's exact values.
        file: &'a dyn Rows,
        /// The engine's.
        engine: &'a dyn Rows,
        /// What they are stored as.
        dtype: DType,
    },
    /// A tensor of activations.
    Tensor(Standing<'a>),
}

/// A tensor of activations with everything that it is recomputed from.
pub struct Standing<'a> {
    /// Which.
    pub id: TensorId,
    /// The engine's.
    pub tensor: &'a Tensor,
    /// How it is recomputed.
    pub isolated: &'a Isolated<'a>,
    /// The bits of what it is computed from.
    pub inputs: &'a View<'a>,
    /// Inputs that were not captured and are computed in their place.
    pub chained: &'a [Stage],
    /// The file's weights.
    pub file: &'a dyn Weights,
    /// Contracts that the bits say, by phase; of others the declared one.
    pub found: Vec<(Phase, FoundContract)>,
}

impl Standing<'_> {
    /// The contract that rows of a phase are judged by.
    pub fn contract(&self, phase: Phase) -> Contract {
        let found = self.found.iter().find(|(p, _)| *p == phase);
        found.map_or(*self.isolated.contract, |(_, f)| f.contract)
    }
}
