/*!
From a GGUF file to layers: architecture, geometry, rope, weights by role.

One file an architecture and one row in [`ARCHITECTURES`](arch::ARCHITECTURES); everything else here is the
same for all of them.
*/

use mla_reference::{Spec, Weights};

/// One attention layer: its numbers and its weights.
pub struct Layer<'a> {
    /// Index in the model.
    pub index: usize,
    /// Scalars.
    pub spec: Spec,
    /// Exact float64 values of the stored weights, decoded on demand.
    pub weights: &'a dyn Weights,
}
