/*!
A test case: requests, pages, slots, positions, and what is drawn as input.

The batch is a comma list of `C+N`: N new tokens on top of C tokens already in the cache. All requests are
stacked into one [`Plan`]; requests with a context appear once a regime.
*/

mod draw;
pub(crate) mod pages;
mod request;
mod routing;
mod select;

pub(crate) use draw::Stream;
pub use draw::{Draw, HiddenError, automatic_splits};
pub use request::{Batch, BatchError, DEFAULT_BATCH, Request};
pub use routing::{MOST_PARTS, Routed};
pub use select::Chooser;

use mla_reference::{Given, Plan, Regime};

/// Everything about a run that is not the model.
#[derive(Clone, Debug)]
pub struct Case {
    /// The batch as asked for.
    pub batch: Batch,
    /// Regimes that are part of the plan.
    pub regimes: Vec<Regime>,
    /// Rows and sequences.
    pub plan: Plan,
    /// Hidden states and context rows, on the grid of the activations.
    pub given: Given,
    /// What the draw was: seed, logits, peaks.
    pub notes: Vec<String>,
}
