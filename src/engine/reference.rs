/*!
The engine `reference`: float64 from start to end.

Not judged against itself; what can be said of it is whether the fused and the absorbed form agree, which
they must to rounding of float64. Its tensors are what `--save` writes and snapshots digest.
*/

use super::{Description, Engine, EngineError, Sink};
use crate::case::Case;
use crate::judge::expected;
use crate::model::Layer;
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::{Contract, Evaluator, Form, Scope, Source, Stage, Weight};
use ndarray::Array2;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The float64 reference as an engine.
#[derive(Default)]
pub struct ReferenceEngine;

struct Computed<'a> {
    tensors: &'a HashMap<TensorId, Tensor>,
    form: Option<Form>,
}

impl Source for Computed<'_> {
    fn block(&self, stage: Stage, rows: Range<usize>, cols: Range<usize>) -> Array2<f64> {
        let id = TensorId { stage, form: self.form.filter(|_| stage.row().scope != Scope::Shared) };
        self.tensors.get(&id).map(|t| t.block(rows, cols)).unwrap_or_default()
    }
}

impl Engine for ReferenceEngine {
    fn describe(&self) -> Description {
        Description {
            name: "reference",
            device: format!("float64 on {} threads", rayon::current_num_threads()),
        }
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
        let contract = Contract { splits: case.plan.splits, ..Contract::exact() };
        let mut tensors: HashMap<TensorId, Tensor> = HashMap::new();
        let order = expected(&layer.spec, case, forms);
        for (i, &id) in order.iter().enumerate() {
            let out = Mutex::new(Tensor::zeros(id, &case.plan, g, DType::F64));
            if id.stage == Stage::Cache {
                // Slots that nobody owns stay what they are: not a number.
                let mut t = out.lock().unwrap_or_else(PoisonError::into_inner);
                t.bytes.iter_mut().for_each(|b| *b = 0xff);
            }
            let source = Computed { tensors: &tensors, form: id.form };
            Evaluator {
                spec: &layer.spec,
                plan: &case.plan,
                given: &case.given,
                weights: layer.weights,
                contract: &contract,
                source: &source,
            }
            .evaluate(id.stage, id.form, &|c| {
                let mut t = out.lock().unwrap_or_else(PoisonError::into_inner);
                for (row, x) in c.rows.clone().zip(c.x.rows()) {
                    match x.as_slice() {
                        Some(x) => t.write(row, c.cols.start, x),
                        None => t.write(row, c.cols.start, &x.to_vec()),
                    }
                }
            });
            let mut tensor = out.into_inner().unwrap_or_else(PoisonError::into_inner);
            sink.tensor(id, &mut tensor)?;
            tensors.insert(id, tensor);
            let later = &order[i + 1..];
            tensors.retain(|id, _| {
                later.iter().any(|p| {
                    let reads = |split| p.stage.inputs(g, p.form, split).contains(&id.stage);
                    (reads(false) || reads(true)) && (id.form.is_none() || id.form == p.form)
                })
            });
        }
        Ok(())
    }
}
