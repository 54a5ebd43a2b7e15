/*!
How far an engine is from the float64 reference computed from the start of the layer, for `--cumulative`.

Shown, never judged: errors of earlier stages, of weights rounded to the engine's dtype and of rounded activations add
up in these numbers, so their size says nothing about right or wrong. The engine's tensors are kept (memory for tensors
doubles, and more), then the engine `reference` runs on the same case and each of its tensors is compared as it comes.
`part_o` and `part_lse` are left out: the reference splits keys elsewhere.
*/

use crate::case::Case;
use crate::engine::reference::ReferenceEngine;
use crate::engine::{Engine, EngineError, Sink, SinkError};
use crate::model::Layer;
use crate::trace::{Tensor, TensorId};
use crate::written::{self, Name};
use mla_reference::product::Rows;
use mla_reference::{Form, Stage, Weight};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// One tensor's difference from the start of the layer. Part of the report; names are stable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Drift {
    /// Tensor.
    #[serde(deserialize_with = "written::name")]
    pub tensor: Name,
    /// Form; none for shared stages.
    pub form: Option<Form>,
    /// ‖engine − reference‖ / ‖reference‖; none where the reference is zero.
    pub relative_l2: Option<f64>,
    /// Largest |engine − reference|.
    #[serde(deserialize_with = "written::number")]
    pub max_abs: f64,
    /// Elements that are finite on one side only; they are left out of the figures.
    pub not_finite: u64,
}

/// A sink in front of another one that keeps what passes.
pub struct KeepAll<'a> {
    inner: &'a mut dyn Sink,
    kept: Option<HashMap<TensorId, Tensor>>,
}

impl<'a> KeepAll<'a> {
    /// In front of `inner`; where it is not `on`, everything just passes.
    pub fn new(on: bool, inner: &'a mut dyn Sink) -> KeepAll<'a> {
        KeepAll { inner, kept: on.then(HashMap::new) }
    }
    /// What passed.
    pub fn finish(self) -> HashMap<TensorId, Tensor> {
        self.kept.unwrap_or_default()
    }
}

impl Sink for KeepAll<'_> {
    fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        self.inner.weight(weight, rows)
    }
    fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
        self.inner.norm(weight, values)
    }
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.inner.evidence(id, what)
    }
    fn weight_evidence(&mut self, weight: Weight, what: &str) -> Result<(), SinkError> {
        self.inner.weight_evidence(weight, what)
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        let altered = self.inner.tensor(id, tensor)?;
        if let Some(kept) = self.kept.as_mut().filter(|_| !matches!(id.stage, Stage::PartO | Stage::PartLse))
        {
            kept.insert(id, tensor.clone());
        }
        Ok(altered)
    }
}

/// Runs the reference from start to end and compares.
pub fn drift(
    layer: &Layer,
    case: &Case,
    forms: &[Form],
    kept: HashMap<TensorId, Tensor>,
) -> Result<Vec<Drift>, EngineError> {
    let mut compare = Compare { kept, all: Vec::new() };
    ReferenceEngine.run(layer, case, forms, &mut compare)?;
    Ok(compare.all)
}

struct Compare {
    kept: HashMap<TensorId, Tensor>,
    all: Vec<Drift>,
}

impl Sink for Compare {
    fn weight(&mut self, _: Weight, _: &dyn Rows) -> Result<(), SinkError> {
        Ok(())
    }
    fn norm(&mut self, _: Weight, _: &[f64]) -> Result<(), SinkError> {
        Ok(())
    }
    fn evidence(&mut self, _: TensorId, _: &str) -> Result<(), SinkError> {
        Ok(())
    }
    fn tensor(&mut self, id: TensorId, reference: &mut Tensor) -> Result<bool, SinkError> {
        let Some(engine) = self.kept.remove(&id) else { return Ok(false) };
        let whole = engine.bytes.len() == engine.len() * engine.dtype.bytes();
        if engine.shape == reference.shape && engine.rows == reference.rows && whole {
            self.all.push(between(id, &engine, reference));
        }
        Ok(false)
    }
}

fn between(id: TensorId, engine: &Tensor, reference: &Tensor) -> Drift {
    let (mut squares, mut size, mut max_abs, mut not_finite) = (0.0, 0.0, 0.0f64, 0);
    let (mut a, mut b) = (vec![0.0; engine.cols], vec![0.0; engine.cols]);
    for row in 0..engine.rows {
        engine.read(row, 0..engine.cols, &mut a);
        reference.read(row, 0..engine.cols, &mut b);
        for (a, b) in a.iter().zip(&b) {
            if !a.is_finite() || !b.is_finite() {
                not_finite += u64::from(a.is_finite() != b.is_finite());
                continue;
            }
            squares += (a - b) * (a - b);
            size += b * b;
            max_abs = max_abs.max((a - b).abs());
        }
    }
    Drift {
        tensor: id.stage.name(),
        form: id.form,
        relative_l2: (size > 0.0).then(|| (squares / size).sqrt()),
        max_abs,
        not_finite,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_numeric::DType;

    /// (3, 4, NaN) against (3, 4.5, 1): 0.5 / √(9 + 20.25).
    #[test]
    fn differences_by_hand() {
        let tensor = |v: &[f64]| Tensor {
            dtype: DType::F64,
            axes: Vec::new(),
            shape: vec![1, 3],
            rows: 1,
            cols: 3,
            bytes: DType::F64.encode(v),
        };
        let d =
            between(TensorId::shared(Stage::Q), &tensor(&[3.0, 4.0, f64::NAN]), &tensor(&[3.0, 4.5, 1.0]));
        assert_eq!((d.max_abs, d.not_finite), (0.5, 1));
        assert!((d.relative_l2.unwrap() - 0.5 / 29.25f64.sqrt()).abs() < 1e-15);
    }
}
