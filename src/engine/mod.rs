/*!
Engines: whatever computes the tensors of a layer.

An engine is known before it runs by its [`Engine::describe`] and [`Engine::contract`]; it runs one plan
and streams each tensor to a [`Sink`], in the order of the stage table, stages that forms share once. It
uses no stage mathematics of the reference: the two must not share errors. (The engine `reference` is the
exception by name: it *is* the reference, run from start to end.)
*/

pub mod cpu;
pub mod kernels;
pub mod reference;
pub mod repeat;
pub mod stack;

use crate::case::Case;
use crate::model::Layer;
use crate::trace::{Tensor, TensorId};
use mla_reference::product::Rows;
use mla_reference::{Contract, Form, Selection, Sequence, Spec, Stage, WEIGHTS, Weight};
use std::borrow::Cow;

/// What an engine says of itself, for the report.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Description {
    /// `cpu`, `reference`, …; of a dump, the backend and version that its map names.
    pub name: Cow<'static, str>,
    /// Hardware and arithmetic in a line.
    pub device: String,
    /// Kernel files that it runs, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernels: Vec<KernelFile>,
    /// What compiled them, once they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub compilers: Vec<String>,
}

impl Description {
    /// Of an engine without kernel files.
    pub fn plain(name: impl Into<Cow<'static, str>>, device: impl Into<String>) -> Description {
        Description { name: name.into(), device: device.into(), kernels: Vec::new(), compilers: Vec::new() }
    }
}

/// A kernel file of a report.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct KernelFile {
    /// Name.
    pub name: String,
    /// Of the file and all that it includes: FNV-1a, 128 bits.
    pub hash: String,
    /// Whether it is the program's own.
    pub built_in: bool,
}

/// Why an engine gave up.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A tensor could not be handed over.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The engine broke: what, where, what to do.
    #[error("{0}")]
    Broke(String),
    /// The machine lacks what the engine needs: what, where, what to install.
    #[error("{0}")]
    Unavailable(String),
    /// What the user gave it can't be used, such as kernel files: what, where, what to do.
    #[error("{0}")]
    Input(String),
}

/// Why a sink could not take a tensor.
#[derive(Debug, thiserror::Error)]
pub enum SinkError {
    /// The engine delivered what nobody asked for.
    #[error("{0}")]
    Unasked(String),
    /// Writing it down failed: what, where, what to do.
    #[error("{0}")]
    Write(String),
    /// The sink has what it wanted: the engine stops, and nothing is wrong.
    #[error("nobody asked for more")]
    Enough,
}

/// Takes what an engine computes.
pub trait Sink {
    /// A weight as the engine holds it: rows of values on the grid of the contract's dtype.
    fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError>;
    /// A norm's vector as the engine holds it.
    fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError>;
    /// A tensor, as soon as it is computed. A deliberate fault changes bits here; the engine goes on from
    /// what it gets back, and `true` says that bits were changed.
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError>;
    /// What the engine's device saw go wrong while it computed a tensor, before it hands the tensor over: memory that was
    /// never written, a race, a damaged guard. A fault, whatever the values are.
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError>;
    /// The same of a weight, before it is shown. Who does not tell weights apart has it of the first tensor that is computed.
    fn weight_evidence(&mut self, _weight: Weight, what: &str) -> Result<(), SinkError> {
        self.evidence(TensorId::shared(Stage::AttnIn), what)
    }
}

/// Computes a layer.
pub trait Engine {
    /// Name and hardware.
    fn describe(&self) -> Description;
    /// The scalars it will use, for comparison before any tensor.
    fn spec<'a>(&self, layer: &'a Layer) -> Cow<'a, Spec> {
        Cow::Borrowed(&layer.spec)
    }
    /// Deliberate faults that the engine itself carries out; None: it has no seams.
    fn seams(&self) -> Option<&cpu::Seams> {
        None
    }
    /// Whether it ran one of these entry points (none named: any) of a kernel file, or of one that includes it; None: it
    /// runs no kernel files.
    fn launched(&self, _file: &str, _entries: &[&str]) -> Option<bool> {
        None
    }
    /// The same engine with so many splits of the keys in decode; None: it has only its own.
    fn with_splits(&self, _splits: usize) -> Option<Box<dyn Engine + '_>> {
        None
    }
    /// The roundings it declares, known before the run.
    fn contract(&self) -> Contract;
    /// Runs one plan in these forms; weights first, then stages in table order, shared ones once.
    fn run(&self, layer: &Layer, case: &Case, forms: &[Form], sink: &mut dyn Sink)
    -> Result<(), EngineError>;
}

/// Refuses what an engine can't compute: a plan with other splits than its own, inputs or weights of other shapes than
/// the layer's.
///
/// # Errors
/// What does not fit.
pub(crate) fn fits(name: &str, splits: usize, layer: &Layer, case: &Case) -> Result<(), EngineError> {
    let broke = |what: String| {
        Err(EngineError::Broke(format!(
            "{what}\n  where: engine {name}, layer {}\n  do: build the case for this engine and this layer",
            layer.index
        )))
    };
    let (g, plan) = (&layer.spec.geometry, &case.plan);
    if plan.splits != splits {
        return broke(format!("the plan has {} splits, the engine {splits}", plan.splits));
    }
    if case.given.hidden.dim() != (plan.tokens(), g.hidden) {
        return broke(format!("hidden states of shape {:?} do not fit the plan", case.given.hidden.dim()));
    }
    let fits = |(i, s): (usize, &Sequence)| {
        let context = case.given.context.get(i).map(|c| c.dim());
        s.slots.len() == s.keys() && (s.context == 0 || context == Some((s.context, g.cache())))
    };
    if !plan.sequences.iter().enumerate().all(fits) {
        return broke("context rows or slots do not fit the plan".into());
    }
    let listed = |(seq, lists): (&Sequence, &Selection)| {
        lists.len() == seq.tokens.len() && lists.iter().flatten().all(|s| *s < seq.keys())
    };
    let selection = &case.given.selection;
    let whole = selection.is_empty() || selection.len() == plan.sequences.len();
    if !whole || !plan.sequences.iter().zip(selection).all(listed) {
        return broke("the selection of keys does not fit the plan".into());
    }
    for row in WEIGHTS.iter().filter(|r| r.weight.exists(g)) {
        let (rows, cols) = row.weight.matrix(g);
        let found = if row.weight.is_norm() {
            layer.weights.norm(row.weight).map(|n| (1, n.len()))
        } else {
            layer.weights.matrix(row.weight).map(|m| (m.rows(), m.cols()))
        };
        if found != Some((rows, cols)) {
            return broke(format!("weight {} is {found:?}, not [{rows}, {cols}]", row.weight));
        }
    }
    Ok(())
}
