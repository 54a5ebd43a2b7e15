/*!
The engine `reference`: float64 from start to end.

Not judged against itself; what can be said of it is whether the fused and the absorbed form agree, which
they must to rounding of float64. Its tensors are what `--save` writes and snapshots digest.
*/

use super::{Description, Engine, EngineError, Sink, SinkError};
use crate::case::Case;
use crate::judge::{Unit, expected};
use crate::model::Layer;
use crate::trace::save::Saver;
use crate::trace::store::Store;
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Contract, Evaluator, Form, Stage, Weight};
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Rows of a chunk that one thread encodes at a time.
const ROWS: usize = 32;

/// The float64 reference as an engine.
#[derive(Default)]
pub struct ReferenceEngine;

impl Engine for ReferenceEngine {
    fn describe(&self) -> Description {
        Description::plain("reference", format!("float64 on {} threads", rayon::current_num_threads()))
    }

    fn contract(&self) -> Contract {
        Contract::exact()
    }

    fn run(
        &self,
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        let g = &layer.spec.geometry;
        for &w in Weight::ALL.iter().filter(|w| w.exists(g)) {
            match (layer.weights.norm(w), layer.weights.matrix(w)) {
                (Some(n), _) => sink.norm(w, n)?,
                (None, Some(m)) => sink.weight(w, m)?,
                (None, None) => return Err(EngineError::Broke(format!("the layer has no {w}"))),
            }
        }
        let contract = Contract { splits: case.plan.splits.into(), ..Contract::exact() };
        let mut tensors = Store::default();
        let order = expected(&layer.spec, case, forms);
        for (i, &id) in order.iter().enumerate() {
            let out = Mutex::new(Tensor::zeros(id, &case.plan, g, DType::F64));
            if id.stage == Stage::Cache {
                // Slots that nobody owns stay what they are: not a number.
                let mut t = out.lock().unwrap_or_else(PoisonError::into_inner);
                t.bytes.iter_mut().for_each(|b| *b = 0xff);
            }
            let source = tensors.view(id.form);
            Evaluator {
                spec: &layer.spec,
                plan: &case.plan,
                given: &case.given,
                weights: layer.weights,
                contract: &contract,
                source: &source,
                wanted: None,
                departure: None,
                memory: None,
            }
            .evaluate(id.stage, id.form, &|c| {
                // Encoded by all threads, copied by one: no work is done while the tensor is locked.
                let x = c.x.as_standard_layout();
                let width = c.cols.len() * DType::F64.bytes();
                let mut bytes = vec![0; x.len() * DType::F64.bytes()];
                if let Some(x) = x.as_slice() {
                    let rows = bytes.par_chunks_mut(width * ROWS).zip(x.par_chunks(c.cols.len() * ROWS));
                    rows.for_each(|(bytes, x)| DType::F64.encode_into(x, bytes));
                }
                let mut t = out.lock().unwrap_or_else(PoisonError::into_inner);
                for (row, bytes) in c.rows.clone().zip(bytes.chunks(width)) {
                    t.write_bytes(row, c.cols.start, bytes);
                }
            });
            let mut tensor = out.into_inner().unwrap_or_else(PoisonError::into_inner);
            sink.tensor(id, &mut tensor)?;
            tensors.keep(id, tensor);
            tensors.release(&order[i + 1..], g);
        }
        Ok(())
    }
}

/// Takes the reference's own tensors: digests, files, and how far the forms are apart.
pub struct Collect<'a> {
    saver: Option<&'a mut Saver>,
    progress: &'a dyn Fn(&str),
    units: Vec<Unit>,
    /// Whether forms compute the same rows, so that they must agree.
    alike: bool,
    /// lse, attn_out and out of the first form.
    first: HashMap<Stage, Tensor>,
    apart: Option<f64>,
}

impl<'a> Collect<'a> {
    /// With a place to write tensors to, or none; `alike`: forms compute the same rows.
    pub fn new(saver: Option<&'a mut Saver>, progress: &'a dyn Fn(&str), alike: bool) -> Collect<'a> {
        Collect { saver, progress, units: Vec::new(), alike, first: HashMap::new(), apart: None }
    }

    /// Digests, and the largest difference between forms relative to the largest value.
    pub fn finish(self) -> (Vec<Unit>, Option<f64>) {
        (self.units, self.apart)
    }
}

impl Sink for Collect<'_> {
    fn weight(&mut self, _: Weight, _: &dyn Rows) -> Result<(), SinkError> {
        Ok(())
    }

    fn norm(&mut self, _: Weight, _: &[f64]) -> Result<(), SinkError> {
        Ok(())
    }

    fn evidence(&mut self, _: TensorId, _: &str) -> Result<(), SinkError> {
        Ok(())
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        (self.progress)(&id.to_string());
        self.units.push(Unit::digest(id, tensor));
        if self.alike && matches!(id.stage, Stage::Lse | Stage::AttnOut | Stage::Out) {
            match self.first.remove(&id.stage) {
                None => drop(self.first.insert(id.stage, tensor.clone())),
                Some(other) => {
                    let d = apart(&other, tensor);
                    self.apart = Some(self.apart.map_or(d, |a| if d > a || d.is_nan() { d } else { a }));
                }
            }
        }
        if let Some(s) = self.saver.as_deref_mut() {
            s.write(id, "reference", tensor)?;
        }
        Ok(false)
    }
}

/// Largest difference over largest magnitude; NaN where something is not finite on one side only.
fn apart(a: &Tensor, b: &Tensor) -> f64 {
    let (mut worst, mut largest) = (0.0f64, 0.0f64);
    let (mut left, mut right) = (vec![0.0; a.cols], vec![0.0; a.cols]);
    for r in 0..a.rows {
        a.read(r, 0..a.cols, &mut left);
        b.read(r, 0..a.cols, &mut right);
        for (x, y) in left.iter().zip(&right) {
            if x == y || x.is_nan() && y.is_nan() {
                largest = largest.max(if x.is_finite() { x.abs() } else { 0.0 });
                continue;
            }
            if !x.is_finite() || !y.is_finite() {
                return f64::NAN;
            }
            worst = worst.max((x - y).abs());
            largest = largest.max(x.abs());
        }
    }
    if worst == 0.0 { 0.0 } else { worst / largest }
}
