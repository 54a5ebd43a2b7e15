/*!
A unit of judgement, (form, phase, tensor), and its verdict.

Requests and regimes are pooled; stages that forms share are judged once. What is counted becomes a
verdict here, in one place, and nowhere else.
*/

use super::cause::Diagnosis;
use super::conclude::{Basis, Power};
use super::evidence::Test;
use super::localise::Found;
use super::picture::Picture;
use super::search::FoundContract;
use super::tally::{Digest, Tally};
use super::verdict::Verdict;
use crate::trace::{Tensor, TensorId};
use crate::written::{self, Name, text};
use mla_numeric::DType;
use mla_reference::evaluate::row_chunks;
use mla_reference::{Axis, Form, Geometry, Phase, Plan, RowName, Scope, Stage, Weight};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// What was judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Which {
    /// A weight.
    Weight(Weight),
    /// A tensor of activations.
    Tensor(TensorId),
}

impl Which {
    /// Of a unit that was just read: [`Unit::place`] says what it is.
    fn unread() -> Which {
        Which::Tensor(TensorId::shared(Stage::Hidden))
    }
    /// Name in the table.
    pub fn name(&self) -> &'static str {
        match self {
            Which::Weight(w) => w.name(),
            Which::Tensor(id) => id.stage.name(),
        }
    }
    /// Form, where forms differ.
    pub fn form(&self) -> Option<Form> {
        match self {
            Which::Weight(_) => None,
            Which::Tensor(id) => id.form,
        }
    }
    /// Order of judgement: weights, shared stages, then form by form, in table order.
    fn order(&self) -> (u8, Option<Form>, usize) {
        match self {
            Which::Weight(w) => (0, None, *w as usize),
            Which::Tensor(id) => (1, id.form, id.stage as usize),
        }
    }
}

/// The worst element, placed by axis names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worst {
    /// (axis, index) along every axis.
    pub index: Vec<(Axis, usize)>,
    /// Request of the batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<usize>,
    /// Token or key within the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub within: Option<usize>,
    /// Sequence of the plan (request and regime).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<usize>,
    /// The engine's value, as text (NaN and infinity have no JSON).
    #[serde(with = "text")]
    pub engine: f64,
    /// The reference before rounding, as text.
    #[serde(with = "text")]
    pub reference: f64,
    /// Error in ulps of the output, as text.
    #[serde(with = "text")]
    pub ulps: f64,
    /// Error as a share of its bound (half an ulp included), as text.
    #[serde(with = "text")]
    pub share_of_bound: f64,
}

/// What explains a tensor that the declared contract and convention do not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Explained {
    /// Another contract: in what it differs from the declared one.
    Contract(String),
    /// Another convention.
    Convention(String),
}

/// A unit with its verdict.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Unit {
    /// What.
    #[serde(skip, default = "Which::unread")]
    pub which: Which,
    /// Name in the table of stages or weights.
    #[serde(deserialize_with = "written::name")]
    pub tensor: Name,
    /// Form; none for weights and shared stages.
    pub form: Option<Form>,
    /// Phase; none for weights.
    pub phase: Option<Phase>,
    /// Axes, slowest first.
    pub axes: Vec<Axis>,
    /// Lengths of the whole tensor (both phases).
    pub shape: Vec<usize>,
    /// Stored dtype.
    pub dtype: Option<DType>,
    /// Verdict.
    pub verdict: Verdict,
    /// Why, where it is not plain from the numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Stages that were not captured and are judged together with this one, in the order of the table.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chained: Vec<Stage>,
    /// Not listed among what was captured: nothing was expected, nothing is held against anybody.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uncaptured: bool,
    /// Captured, and taken as it is: nothing is known to come before it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub given: bool,
    /// Elements compared.
    pub elements: u64,
    /// Elements that are not the rounded reference.
    pub flips: u64,
    /// Elements that no rounding explains.
    pub beyond: u64,
    /// Of these, finite on one side only.
    pub not_finite: u64,
    /// Worst element.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst: Option<Worst>,
    /// Median bound, half an ulp included, in ulps of the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub median_bound_ulps: Option<f64>,
    /// Norm and checksum of the engine's tensor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<Digest>,
    /// Norm and checksum of the isolated reference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<Digest>,
    /// Share of odd elements that an honest engine may have (flips; for float32, elements beyond 8σ).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub odd_limit: Option<f64>,
    /// What says that it is not rounding, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<String>,
    /// What explains the evidence, where something does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explained: Option<Explained>,
    /// Other contracts and conventions that were tried.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub tried: usize,
    /// The contract that it was judged under, where nobody declares one and the bits say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found_contract: Option<FoundContract>,
    /// Contracts that were tried in the search for it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub searched: usize,
    /// Why it is wrong, where nothing explains the evidence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diagnosis: Option<Diagnosis>,
    /// Where it is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<Found>,
    /// How far elements are off, by place, where it was looked at closer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub picture: Option<Picture>,
    /// What would have been seen; None where nothing was compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<Power>,
    /// How the engine is off, on random axes, where there is evidence: what tells one fault from another.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub residual: Vec<i16>,
    /// All tests, for calibration.
    #[serde(skip)]
    pub tests: Vec<Test>,
    /// What power is computed from, once the number of tests of the run is known.
    #[serde(skip)]
    pub basis: Option<Box<Basis>>,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl Unit {
    /// A unit of which there is nothing to count.
    pub fn without_data(which: Which, phase: Option<Phase>, verdict: Verdict, note: &str) -> Unit {
        Unit {
            which,
            tensor: which.name(),
            form: which.form(),
            phase,
            axes: Vec::new(),
            shape: Vec::new(),
            dtype: None,
            verdict,
            note: Some(note.to_string()),
            chained: Vec::new(),
            uncaptured: false,
            given: false,
            elements: 0,
            flips: 0,
            beyond: 0,
            not_finite: 0,
            worst: None,
            median_bound_ulps: None,
            engine: None,
            reference: None,
            odd_limit: None,
            evidence: Vec::new(),
            explained: None,
            tried: 0,
            found_contract: None,
            searched: 0,
            diagnosis: None,
            found: None,
            picture: None,
            power: None,
            residual: Vec::new(),
            tests: Vec::new(),
            basis: None,
        }
    }

    /// The verdict of bits and bounds alone: an element beyond its bound is a fault; no flip at all is exact.
    pub fn counted(
        which: Which,
        phase: Option<Phase>,
        axes: Vec<Axis>,
        shape: Vec<usize>,
        dtype: DType,
        tally: Tally,
        name: impl Fn(usize) -> Option<RowName>,
    ) -> Unit {
        // NaN on both sides agrees, but nothing was learned. Not so in the cache, where slots that nobody owns are
        // NaN on purpose, and in weights, which are compared bit for bit.
        let free = match which {
            Which::Weight(_) => true,
            Which::Tensor(id) => id.stage == Stage::Cache,
        };
        let nothing = tally.nan > 0 && !free;
        let verdict = match (tally.beyond, tally.flips) {
            (0, _) if nothing => Verdict::NotCompared,
            (0, 0) => Verdict::Exact,
            (0, _) => Verdict::Rounding,
            _ => Verdict::Fault,
        };
        let note = nothing
            .then(|| format!("{} of {} elements are NaN in engine and reference", tally.nan, tally.elements));
        let cols: usize = row_width(&axes, &shape);
        let worst = tally.worst.map(|w| {
            let row = name(w.row);
            Worst {
                index: axes.iter().copied().zip(unravel(w.row * cols + w.col, &shape)).collect(),
                request: row.and_then(|r| r.request),
                within: row.map(|r| r.index),
                sequence: row.and_then(|r| r.sequence),
                engine: w.engine,
                reference: w.reference,
                ulps: w.ulps,
                share_of_bound: w.share,
            }
        });
        let (engine, reference) = tally.digests();
        let residual = tally.residual.direction();
        Unit {
            axes,
            shape,
            dtype: Some(dtype),
            verdict,
            note,
            elements: tally.elements,
            flips: tally.flips,
            beyond: tally.beyond,
            not_finite: tally.not_finite,
            worst,
            median_bound_ulps: tally.median_bound(),
            residual,
            engine: Some(engine),
            reference: Some(reference),
            ..Unit::without_data(which, phase, verdict, "")
        }
    }

    /// A tensor of the reference itself: digests, nothing compared.
    pub fn digest(id: TensorId, tensor: &Tensor) -> Unit {
        let mut tally = Tally::default();
        let chunks: Vec<Tally> = row_chunks(tensor.rows, 64)
            .into_par_iter()
            .map(|rows| {
                let (mut tally, mut row) = (Tally::default(), vec![0.0; tensor.cols]);
                for r in rows {
                    tensor.read(r, 0..tensor.cols, &mut row);
                    tally.copy(tensor.dtype, (r, 0, tensor.cols), &row, &row);
                }
                tally
            })
            .collect();
        chunks.into_iter().for_each(|t| tally.merge(t));
        Unit {
            axes: tensor.axes.clone(),
            shape: tensor.shape.clone(),
            dtype: Some(tensor.dtype),
            note: None,
            reference: Some(tally.digests().1),
            ..Unit::without_data(Which::Tensor(id), None, Verdict::NotCompared, "")
        }
    }

    /// Finds out what a unit is that was read from a report. False where its name is none of a stage or weight.
    #[must_use]
    pub fn place(&mut self) -> bool {
        // `attn_out@caller`: the output where it is read; `kv_a@rank 3`: of ranks that hold something else than the others.
        let name = self.tensor.split('@').next().unwrap_or(self.tensor);
        let stage = |form| Stage::from_name(name).map(|stage| Which::Tensor(TensorId { stage, form }));
        let which = Weight::from_name(name).map(Which::Weight).or_else(|| stage(self.form));
        self.which = which.unwrap_or(self.which);
        which.is_some()
    }

    /// Whether no verdict was expected of it: not captured, or nothing before it is known.
    pub fn unexpected(&self) -> bool {
        self.uncaptured || self.given
    }

    /// `fused/attn_out, decode`
    pub fn title(&self) -> String {
        let mut t = match self.form {
            Some(f) => format!("{}/{}", f.name(), self.tensor),
            None => self.tensor.to_string(),
        };
        if let Some(p) = self.phase {
            t += &format!(", {}", p.name());
        }
        t
    }
}

/// Columns of the matrix view: all axes that are not rows.
fn row_width(axes: &[Axis], shape: &[usize]) -> usize {
    match axes.first() {
        // Weights: rows are all axes but the last, except w_o, whose rows are `hidden`.
        Some(Axis::Hidden) if axes.len() == 3 => shape[1..].iter().product(),
        Some(Axis::Head | Axis::Hidden | Axis::QRank | Axis::Latent | Axis::LatentRope) => {
            shape.last().copied().unwrap_or(1)
        }
        Some(Axis::Page | Axis::Split | Axis::Rank) => shape[2..].iter().product(),
        _ => shape[1..].iter().product(),
    }
}

/// The index along each axis of an element, of its place among all.
pub fn unravel(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, n) in index.iter_mut().zip(shape).rev() {
        *i = flat % n.max(&1);
        flat /= n.max(&1);
    }
    index
}

/// With what a tensor that was not captured was judged, in words.
pub fn judged_with(id: TensorId, units: &[Unit]) -> String {
    let mut with: Vec<String> = Vec::new();
    for u in units.iter().filter(|u| u.elements > 0 && u.chained.contains(&id.stage)) {
        let Which::Tensor(other) = u.which else { continue };
        let name = other.to_string();
        if (id.form.is_none() || id.form == other.form) && !with.contains(&name) {
            with.push(name);
        }
    }
    match with.as_slice() {
        [] => "not captured, and nothing after it was compared".into(),
        some => format!("not captured; judged together with {}", some.join(", ")),
    }
}

/// Says which stages a unit stands for, and that a fault of it may lie in any of them.
pub fn name_chained(unit: &mut Unit) {
    if unit.chained.is_empty() {
        return;
    }
    let names: Vec<&str> = unit.chained.iter().map(|s| s.name()).collect();
    let mut note = format!("together with {}, not captured", names.join(", "));
    if matches!(unit.verdict, Verdict::Fault | Verdict::ContractBroken) {
        note += &format!(": the fault may lie in any of {}, {}", names.join(", "), unit.tensor);
    }
    unit.note = Some(match unit.note.take() {
        Some(n) if !n.is_empty() => format!("{note}; {n}"),
        _ => note,
    });
}

/// What the engine's device saw go wrong with a tensor or weight is a fault of it, whatever its values are. It is not known in which
/// phase: the unit of the first says it.
pub fn accuse(units: &mut Vec<Unit>, which: Which, what: String) {
    match units.iter_mut().find(|u| u.which == which && u.tensor == u.which.name()) {
        Some(unit) => {
            unit.verdict = Verdict::Fault;
            unit.evidence.push(what);
        }
        None => {
            let mut unit = Unit::without_data(which, None, Verdict::Fault, "not delivered");
            unit.evidence.push(what);
            units.push(unit);
            sort(units);
        }
    }
}

/// Puts units in the order of judgement.
pub fn sort(units: &mut [Unit]) {
    // What is said of a tensor besides its values comes after them.
    units.sort_by_key(|u| (u.which.order(), u.tensor != u.which.name(), u.tensor, u.phase));
}

/// Everything that a unit was computed from: inputs, and those of what was not captured between them.
fn feeds(unit: &Unit, id: TensorId, g: &Geometry, plan: &Plan) -> (Vec<Stage>, Vec<Weight>) {
    let (mut stages, mut weights, mut open) = (Vec::new(), Vec::new(), vec![id.stage]);
    while let Some(stage) = open.pop() {
        weights.extend(stage.weights(g, id.form));
        for &input in [false, plan.joins(stage, id.form)].iter().flat_map(|s| stage.inputs(g, id.form, *s)) {
            if !stages.contains(&input) {
                stages.push(input);
                if unit.chained.contains(&input) {
                    open.push(input);
                }
            }
        }
    }
    (stages, weights)
}

/// What is clean in itself but was computed from something at fault says so.
pub fn mark_after_fault(units: &mut [Unit], g: &Geometry, plan: &Plan) {
    let bad = |u: &Unit| matches!(u.verdict, Verdict::Fault | Verdict::ContractBroken | Verdict::AfterFault);
    for i in 0..units.len() {
        let Which::Tensor(id) = units[i].which else { continue };
        if !matches!(
            units[i].verdict,
            Verdict::Exact | Verdict::Rounding | Verdict::NotCompared | Verdict::Inconclusive
        ) {
            continue;
        }
        if units[i].unexpected() {
            continue;
        }
        let (inputs, weights) = feeds(&units[i], id, g, plan);
        let cause = units[..i].iter().find(|u| {
            let feeds = match u.which {
                Which::Weight(w) => weights.contains(&w),
                Which::Tensor(t) => {
                    inputs.contains(&t.stage)
                        && (t.stage.row().scope == Scope::Shared || t.form == id.form)
                        // A decode row does not read a prefill row's tensors; keys may be shared through pages.
                        && (u.phase == units[i].phase || u.phase.is_none() || units[i].phase.is_none())
                }
            };
            bad(u) && feeds
        });
        if let Some(cause) = cause {
            let note = format!("computed from {}", cause.tensor);
            units[i].verdict = Verdict::AfterFault;
            units[i].note = Some(match units[i].note.take() {
                Some(n) if !n.is_empty() => format!("{n}; {note}"),
                _ => note,
            });
        }
    }
}

/// The worst verdict of what was captured; `NotCompared` where nothing was compared at all.
///
/// Where only some tensors were captured, weights and hidden states alone say nothing: nothing computed was compared.
pub fn overall(units: &[Unit]) -> Verdict {
    let partly = units.iter().any(Unit::unexpected);
    let computed = |u: &Unit| matches!(u.which, Which::Tensor(id) if id.stage != Stage::Hidden);
    let compared = units.iter().any(|u| u.elements > 0 && (!partly || computed(u)));
    let expected = units.iter().filter(|u| !u.unexpected());
    let worst = expected.map(|u| u.verdict).filter(|v| *v != Verdict::AfterFault).max();
    match worst {
        Some(v) if compared || v == Verdict::Fault => v,
        _ => Verdict::NotCompared,
    }
}

/// Units that carry evidence of their own, in the order of judgement.
pub fn origins(units: &[Unit]) -> impl Iterator<Item = &Unit> {
    let carries =
        |u: &&Unit| matches!(u.verdict, Verdict::Fault | Verdict::ContractBroken) || u.verdict.differs();
    units.iter().filter(carries)
}
