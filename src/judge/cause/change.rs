/*!
What a hypothesis changes, as data: scalars, rows, inputs, weights, the way of attention, or the tensor itself.

Where an engine stored the right values in the wrong places, it is easier to put them back than to displace the
reference: then the tensor is what changes. Places for which there is no value left take the reference's, rounded:
they are excused, by something that was checked bit for bit before.
*/

use super::super::compare::Isolated;
use crate::case::Case;
use crate::trace::{Tensor, TensorId};
use mla_reference::product::Rows;
use mla_reference::{Contract, Departure, Given, Only, Plan, Source, Spec, Stage, Weight, Weights};
use ndarray::Array2;
use std::ops::Range;

/// Reads a block of an input another way.
pub type Read<'a> = Box<dyn Fn(&dyn Source, Range<usize>, Range<usize>) -> Array2<f64> + Sync + 'a>;

/// What is different under a hypothesis. The default is nothing.
#[derive(Default)]
pub struct Change<'a> {
    /// Scalars of the layer.
    pub spec: Option<Spec>,
    /// Positions, slots.
    pub plan: Option<Plan>,
    /// Roundings.
    pub contract: Option<Contract>,
    /// Attention.
    pub departure: Departure,
    /// An input, read another way.
    pub source: Option<(Stage, Read<'a>)>,
    /// A weight's matrix.
    pub matrix: Option<(Weight, Box<dyn Rows + 'a>)>,
    /// A norm's vector.
    pub norm: Option<(Weight, Vec<f64>)>,
    /// What the engine wrote, put back in order: all of these must pass.
    pub tensors: Vec<(TensorId, Tensor)>,
    /// Share of odd elements, where it was counted without recomputing anything.
    pub counted: Option<f64>,
}

/// Inputs, one of them read another way.
struct Other<'s> {
    inner: &'s dyn Source,
    stage: Stage,
    read: &'s Read<'s>,
}

impl Source for Other<'_> {
    fn block(&self, stage: Stage, rows: Range<usize>, cols: Range<usize>) -> Array2<f64> {
        if stage == self.stage {
            (self.read)(self.inner, rows, cols)
        } else {
            self.inner.block(stage, rows, cols)
        }
    }
}

/// Weights, one of them another.
struct Swapped<'s> {
    inner: &'s dyn Weights,
    matrix: Option<(Weight, &'s dyn Rows)>,
    norm: Option<(Weight, &'s [f64])>,
}

impl Weights for Swapped<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        match self.matrix {
            Some((w, m)) if w == weight => Some(m),
            _ => self.inner.matrix(weight),
        }
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        match self.norm {
            Some((w, v)) if w == weight => Some(v),
            _ => self.inner.norm(weight),
        }
    }
}

impl<'a> Change<'a> {
    /// Other scalars.
    pub fn spec(spec: &Spec, change: impl FnOnce(&mut Spec)) -> Change<'a> {
        let mut spec = spec.clone();
        change(&mut spec);
        Change { spec: Some(spec), ..Change::default() }
    }

    /// Other rows.
    pub fn plan(plan: &Plan, change: impl FnOnce(&mut Plan)) -> Change<'a> {
        let mut plan = plan.clone();
        change(&mut plan);
        Change { plan: Some(plan), ..Change::default() }
    }

    /// Another way of attention.
    pub fn departure(change: impl FnOnce(&mut Departure)) -> Change<'a> {
        let mut departure = Departure::default();
        change(&mut departure);
        Change { departure, ..Change::default() }
    }

    /// An input read another way.
    pub fn source(
        stage: Stage,
        read: impl Fn(&dyn Source, Range<usize>, Range<usize>) -> Array2<f64> + Sync + 'a,
    ) -> Change<'a> {
        Change { source: Some((stage, Box::new(read))), ..Change::default() }
    }

    /// The engine's values put back in order; `share` of them are odd then.
    pub fn tensors(tensors: Vec<(TensorId, Tensor)>, share: f64) -> Change<'a> {
        Change { tensors, counted: Some(share), ..Change::default() }
    }

    /// What is held against the reference: the engine's tensor, or what was made of it.
    pub fn held<'t>(&'t self, id: TensorId, own: &'t Tensor) -> Vec<(TensorId, &'t Tensor)> {
        match self.tensors.as_slice() {
            [] => vec![(id, own)],
            some => some.iter().map(|(id, t)| (*id, t)).collect(),
        }
    }

    /// Calls `f` with the stage under this hypothesis, or with a part of it.
    pub fn with<T>(&self, of: &Isolated, only: Option<&Only>, f: impl FnOnce(&Isolated) -> T) -> T {
        let case = self.plan.as_ref().map(|plan| Case {
            batch: of.case.batch.clone(),
            regimes: of.case.regimes.clone(),
            plan: plan.clone(),
            // Stages that read what is given are copies: no hypothesis moves their rows this way.
            given: Given::default(),
            notes: Vec::new(),
        });
        let departure = Departure { only: only.cloned().unwrap_or_default(), ..self.departure.clone() };
        let other = self.source.as_ref().map(|(stage, read)| Other { inner: of.source, stage: *stage, read });
        let weights = Swapped {
            inner: of.weights,
            matrix: self.matrix.as_ref().map(|(w, m)| (*w, m.as_ref() as &dyn Rows)),
            norm: self.norm.as_ref().map(|(w, v)| (*w, v.as_slice())),
        };
        let isolated = Isolated {
            spec: self.spec.as_ref().unwrap_or(of.spec),
            case: case.as_ref().unwrap_or(of.case),
            weights: &weights,
            contract: self.contract.as_ref().unwrap_or(of.contract),
            source: other.as_ref().map_or(of.source, |o| o as &dyn Source),
            slacks: of.slacks,
            seed: of.seed,
            departure: Some(&departure),
            wanted: None,
            memory: None,
        };
        f(&isolated)
    }
}
