/*!
Running an engine on a probe's case, with weights replaced where a probe asks for it, and keeping its tensors.

A planted fault acts here as it does in the run itself: the same altered weights and scalars, the same sink in
front of ours. Replacements of a probe lie on top: what a probe replaces is not at fault there.
*/

use crate::case::Case;
use crate::engine::{Engine, EngineError, Sink, SinkError};
use crate::fault::{Alter, Fault, FaultyWeights};
use crate::judge::expected;
use crate::model::Layer;
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::rows::{Patched, Rounded};
use mla_reference::{Form, Source, Spec, Stage, Weight, Weights};
use ndarray::Array2;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// The engine under probe.
pub struct Runner<'a> {
    /// Engine.
    pub engine: &'a dyn Engine,
    /// The layer as the file has it.
    pub layer: &'a Layer<'a>,
    /// Deliberate fault.
    pub fault: Option<&'a Fault>,
    /// What the engine's device saw go wrong, in all runs so far.
    pub evidence: RefCell<Vec<String>>,
}

/// What a probe changes about a layer, given the weights that the engine would see without it.
pub type Rework<'f> = &'f dyn for<'w> Fn(&'w dyn Weights) -> Change<'w>;

/// A layer as it is.
pub fn unchanged(_: &dyn Weights) -> Change<'_> {
    Change::default()
}

/// What a probe changes about the layer.
#[derive(Default)]
pub struct Change<'a> {
    /// Weights by role; all others are the layer's.
    pub weights: Vec<(Weight, Box<dyn Rows + 'a>)>,
    /// Factor on the softmax scale.
    pub scale: Option<f64>,
}

impl Runner<'_> {
    /// Runs one form up to `attn_out`: what comes after it is no business of a probe. The second error says
    /// what is wrong with the tensors, so that nothing can be read from them: the judge's business.
    pub fn run(&self, case: &Case, form: Form, rework: Rework) -> Result<Result<Kept, String>, EngineError> {
        let mut kept = Kept::default();
        let spec = self.layer.spec.clone();
        let result = match self.fault {
            None => self.with(case, form, rework, spec, self.layer.weights, &mut kept),
            Some(fault) => {
                // The run itself has planted the same fault: it can be made.
                let broke = |e: crate::fault::FaultError| EngineError::Broke(e.to_string());
                let g = &spec.geometry;
                let weights = FaultyWeights::new(fault, self.layer.weights, g, None).map_err(broke)?;
                let seen = fault.spec(&spec);
                let mut alter =
                    Alter::new(fault, self.engine.seams(), &self.layer.spec, &case.plan, &mut kept)
                        .map_err(broke)?;
                self.with(&fault.case(case), form, rework, seen, &weights, &mut alter)
            }
        };
        self.evidence.borrow_mut().append(&mut kept.evidence);
        match result {
            Ok(()) | Err(EngineError::Sink(SinkError::Enough)) => Ok(match self.lacking(case, form, &kept) {
                None => Ok(kept),
                Some(what) => Err(what),
            }),
            Err(e) => Err(e),
        }
    }

    /// What is missing, or not as its shape and the contract say.
    fn lacking(&self, case: &Case, form: Form, kept: &Kept) -> Option<String> {
        let (g, contract) = (&self.layer.spec.geometry, self.engine.contract());
        let until = |id: &TensorId| id.stage <= Stage::AttnOut;
        expected(&self.layer.spec, case, &[form]).into_iter().filter(until).find_map(|id| {
            let Some(t) = kept.get(id.stage) else { return Some(format!("{id} was not delivered")) };
            let want = Tensor::zeros(id, &case.plan, g, contract.stored(id.stage));
            let same = (t.dtype, &t.shape, t.rows, t.cols) == (want.dtype, &want.shape, want.rows, want.cols);
            (!same || t.bytes.len() != want.bytes.len())
                .then(|| format!("{id} has another shape or dtype than it should"))
        })
    }

    fn with(
        &self,
        case: &Case,
        form: Form,
        rework: Rework,
        mut spec: Spec,
        weights: &dyn Weights,
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        let change = &rework(weights);
        spec.scale *= change.scale.unwrap_or(1.0);
        let changed = Changed { inner: weights, change };
        let layer = Layer { index: self.layer.index, spec, weights: &changed };
        self.engine.run(&layer, case, &[form], sink)
    }
}

struct Changed<'a, 'c> {
    inner: &'a dyn Weights,
    change: &'a Change<'c>,
}

impl Weights for Changed<'_, '_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        match self.change.weights.iter().find(|(w, _)| *w == weight) {
            Some((_, m)) => Some(m.as_ref()),
            None => self.inner.matrix(weight),
        }
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.inner.norm(weight)
    }
}

/// The tensors of one form, shared ones too.
#[derive(Default)]
pub struct Kept {
    tensors: HashMap<Stage, Tensor>,
    evidence: Vec<String>,
}

impl Kept {
    /// The tensor of a stage, where the engine delivered it.
    pub fn get(&self, stage: Stage) -> Option<&Tensor> {
        self.tensors.get(&stage)
    }
    /// What was delivered, in the order of the table.
    pub fn stages(&self) -> impl Iterator<Item = Stage> {
        Stage::ALL.iter().copied().filter(|s| self.tensors.contains_key(s))
    }
}

impl Sink for Kept {
    fn weight(&mut self, _: Weight, _: &dyn Rows) -> Result<(), SinkError> {
        Ok(())
    }
    fn norm(&mut self, _: Weight, _: &[f64]) -> Result<(), SinkError> {
        Ok(())
    }
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.evidence.push(format!("{id}: {what}"));
        Ok(())
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        self.tensors.insert(id.stage, tensor.clone());
        if id.stage == Stage::AttnOut { Err(SinkError::Enough) } else { Ok(false) }
    }
}

/// Tensors under stages' names, as the reference reads them.
pub struct Inputs<'a>(pub Vec<(Stage, &'a Tensor)>);

impl Source for Inputs<'_> {
    fn block(&self, stage: Stage, rows: Range<usize>, cols: Range<usize>) -> Array2<f64> {
        self.0.iter().find(|(s, _)| *s == stage).map(|(_, t)| t.block(rows, cols)).unwrap_or_default()
    }
}

/// Values on a dtype's grid, times a power of two.
pub struct Scaled<'a> {
    /// What is scaled.
    pub inner: Rounded<&'a dyn Rows>,
    /// The power of two.
    pub factor: f64,
}

impl<'a> Scaled<'a> {
    /// Rounded first: a value that is subnormal in `dtype` would be finer after scaling.
    pub fn new(inner: &'a dyn Rows, dtype: DType, factor: f64) -> Scaled<'a> {
        Scaled { inner: Rounded { inner, dtype }, factor }
    }
}

impl Rows for Scaled<'_> {
    fn rows(&self) -> usize {
        self.inner.rows()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        self.inner.decode(row, k0, out);
        out.iter_mut().for_each(|v| *v *= self.factor);
    }
}

/// A matrix of zeros.
pub struct Zeros(pub usize, pub usize);

impl Rows for Zeros {
    fn rows(&self) -> usize {
        self.0
    }
    fn cols(&self) -> usize {
        self.1
    }
    fn decode(&self, _: usize, _: usize, out: &mut [f64]) {
        out.fill(0.0);
    }
}

/// A matrix with ones at (row, column), zeros elsewhere.
pub fn selection(shape: (usize, usize), ones: impl Iterator<Item = (usize, usize)>) -> Patched<Zeros> {
    let values: BTreeMap<_, _> = ones.map(|at| (at, 1.0)).collect();
    Patched { inner: Zeros(shape.0, shape.1), values }
}
