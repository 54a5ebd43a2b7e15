/*! Tensors that later stages will read, kept as bits and dropped as soon as none will. */

use super::{Tensor, TensorId};
use mla_reference::{Form, Geometry, Scope, Source, Stage};
use ndarray::Array2;
use std::collections::HashMap;
use std::ops::Range;

/// Tensors by name.
#[derive(Default)]
pub struct Store(HashMap<TensorId, Tensor>);

/// A store as a form's stages read it: shared stages have no form.
pub struct View<'a> {
    store: &'a Store,
    form: Option<Form>,
}

impl Store {
    /// Keeps a tensor.
    pub fn keep(&mut self, id: TensorId, tensor: Tensor) {
        self.0.insert(id, tensor);
    }

    /// Whether a tensor is kept.
    pub fn contains(&self, id: TensorId) -> bool {
        self.0.contains_key(&id)
    }

    /// What a stage of this form reads as input.
    pub fn view(&self, form: Option<Form>) -> View<'_> {
        View { store: self, form }
    }

    /// Drops what none of the pending tensors reads.
    pub fn release(&mut self, pending: &[TensorId], g: &Geometry) {
        self.0.retain(|id, _| {
            pending.iter().any(|p| {
                let reads = |split| p.stage.inputs(g, p.form, split).contains(&id.stage);
                (reads(false) || reads(true)) && (id.form.is_none() || id.form == p.form)
            })
        });
    }
}

impl View<'_> {
    /// The tensor of a stage, where it is kept.
    pub fn get(&self, stage: Stage) -> Option<&Tensor> {
        let form = self.form.filter(|_| stage.row().scope != Scope::Shared);
        self.store.0.get(&TensorId { stage, form })
    }
}

impl Source for View<'_> {
    fn block(&self, stage: Stage, rows: Range<usize>, cols: Range<usize>) -> Array2<f64> {
        self.get(stage).map(|t| t.block(rows, cols)).unwrap_or_default()
    }
}
