/*!
`compare`: tensors that other software computed, before the judge.

A dump and what says how to read it, a map ([`map`]) or the manifest of `run --save` ([`saved`]), become a [`Capture`]: a
case, tensors in the table's axes and dtypes, and what is known of engine and contract. [`judge`] feeds it to a
[`Session`] that knows what was captured and what was not. Data flow one way: file, array, tensor,
judge, report.
*/

pub mod arrange;
pub mod bare;
pub mod beside;
pub mod hook;
pub mod map;
pub mod mapped;
pub mod norms;
mod points;
pub mod saved;

use crate::case::Case;
use crate::check::{CheckError, Neighbours, other_conventions};
use crate::engine::{Description, Sink};
use crate::judge::cause::weight::OtherLayers;
use crate::judge::{Ask, Budget, ScalarDifference, Session, Settings, Unit, Verdict, Which, overall, starts};
use crate::model::{Layer, Layout, Model, Reading, Stored};
use crate::parallel::heads;
use crate::report::{CaseReport, Judgement, LayerReport};
use crate::trace::{Tensor, TensorId};
use mla_reference::product::Dense;
use mla_reference::{Contract, Form, Spec, Splits, Stage, Weight, Weights};
use std::collections::BTreeMap;

/// Why a dump can't be compared: what, where, what to do.
#[derive(Debug, thiserror::Error)]
#[error("{what}\n  where: {place}\n  do: {how}")]
pub struct CompareError {
    what: String,
    place: String,
    how: String,
}

impl CompareError {
    /// Of its three lines.
    pub fn new(what: impl Into<String>, place: impl Into<String>, how: impl Into<String>) -> CompareError {
        CompareError { what: what.into(), place: place.into(), how: how.into() }
    }
}

/// Whether a contract's tiles and splits are of a size that kernels have: else its arithmetic would not end.
fn sane(contract: &Contract) -> bool {
    const MOST_KEYS: usize = 1 << 24;
    let splits = match contract.splits {
        Splits::Parts(parts) => parts <= 1024,
        Splits::Equal { parts, multiple } => parts <= 1024 && multiple <= MOST_KEYS,
        Splits::Keys(_) | Splits::Scheduled => true,
    };
    splits && contract.softmax.tile <= MOST_KEYS
}

/// A name of a file as reports print it: no control characters.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// What was captured of one layer.
pub struct Capture {
    /// Backend, version, and where the files are.
    pub engine: Description,
    /// Forms of which there is anything.
    pub forms: Vec<Form>,
    /// Requests, pages, hidden states and context rows.
    pub case: Case,
    /// The contract to emulate.
    pub contract: Contract,
    /// How it was chosen, for the report; None: the engine declares it.
    pub chosen: Option<String>,
    /// Nobody knows anything of the contract: it is searched for.
    pub undeclared: bool,
    /// What was captured; what of it is not among `tensors` is missing.
    pub captured: Vec<TensorId>,
    /// Tensors.
    pub tensors: Vec<(TensorId, Tensor)>,
    /// Weights, rows one after the other.
    pub weights: Vec<(Weight, Vec<f64>)>,
    /// Tensors that are not judged, whatever is known before them.
    pub unjudged: Vec<TensorId>,
    /// Open stages of which it is known how they come about ([`starts`]).
    pub closed: Vec<Stage>,
    /// Whether another convention is no fault: other software reads the same file by its own.
    pub other_software: bool,
    /// Whether there is a model that says what weights should be.
    pub model: bool,
    /// Scalars that the engine used and that are not the model's.
    pub scalars: Vec<ScalarDifference>,
    /// What of the dump was left out, in words.
    pub left_out: Vec<String>,
    /// Tensors that the engine's path does not have, and why.
    pub not_applicable: Vec<(TensorId, String)>,
    /// The heads that the dump holds, where it lacks some.
    pub heads: Option<heads::Heads>,
    /// `attn_out` as the output projection reads it, where it was taken there as well.
    pub caller: Vec<(TensorId, Tensor)>,
    /// What is wrong with a tensor, whatever its values are.
    pub evidence: Vec<(TensorId, String)>,
}

/// Scalars that a dump states, against those of the model. Unknown names are an error.
pub fn scalars(
    stated: impl IntoIterator<Item = (String, f64)>,
    spec: &Spec,
    place: &str,
) -> Result<Vec<ScalarDifference>, CompareError> {
    let ours = spec.scalars();
    let mut differ = Vec::new();
    for (name, engine) in stated {
        let Some((_, reference)) = ours.iter().find(|(n, _)| *n == name) else {
            let names: Vec<&str> = ours.iter().map(|(n, _)| n.as_str()).collect();
            return Err(CompareError::new(
                format!("no scalar of this model is called {}", name.escape_debug()),
                place,
                format!("the nearest are {}", map::nearest(&name, &names).join(", ")),
            ));
        };
        // Files hold float32, configurations what somebody wrote: one is the other, rounded.
        if (engine - reference).abs() > mla_numeric::U * reference.abs() {
            differ.push(ScalarDifference { name, engine, reference: *reference });
        }
    }
    Ok(differ)
}

/// What a comparison may cost and promise.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Budget and promise.
    pub budget: Budget,
    /// A question about one tensor; the comparison ends with its answer.
    pub ask: Option<Ask>,
}

/// What a model has beside the layer that is judged: other explanations.
#[derive(Default)]
pub struct Beside<'a> {
    /// Other readings of its numbers, by name.
    pub conventions: Vec<(String, Spec)>,
    /// Its other layers' weights.
    pub others: Option<&'a dyn OtherLayers>,
}

/// Judges what was captured of a layer.
///
/// # Errors
/// What the judge can't take: a tensor delivered twice.
pub fn judge(
    layer: &Layer,
    capture: &mut Capture,
    options: &Options,
    beside: Beside,
    progress: &dyn Fn(&str),
) -> Result<(Vec<Unit>, Vec<String>), CheckError> {
    let g = layer.spec.geometry;
    let mut given = starts(&layer.spec, &capture.case, &capture.forms, &capture.captured, &capture.closed);
    given.extend(&capture.unjudged);
    let settings = Settings {
        budget: options.budget,
        conventions: beside.conventions,
        declared: capture.chosen.is_some().then_some(capture.contract),
        captured: Some(capture.captured.clone()),
        captured_weights: Some(capture.weights.iter().map(|(w, _)| *w).collect()),
        given,
        search: capture.undeclared,
        model: capture.model,
        other_conventions_pass: capture.other_software,
        closer: options.ask.is_none(),
        ask: options.ask.clone(),
        ..Settings::default()
    };
    let session =
        Session::new(layer, &capture.case, &capture.forms, capture.contract, None, Box::new(progress));
    let mut session = session.beside(beside.others).with(settings);
    for (weight, values) in &capture.weights {
        let fed = match weight.is_norm() {
            true => session.norm(*weight, values),
            false => session.weight(*weight, &Dense { data: values, cols: weight.matrix(&g).1 }),
        };
        fed.map_err(crate::engine::EngineError::from)?;
    }
    // lse last: its row sum is that of the output, whose contract may have to be found first.
    capture.tensors.sort_by_key(|(id, _)| (id.form, id.stage == Stage::Lse, id.stage));
    let mut caller = std::mem::take(&mut capture.caller);
    // What was to be there and is not has no turn of its own: `out` still has something to be judged from.
    for (id, read) in caller.extract_if(.., |c| !capture.tensors.iter().any(|t| t.0 == c.0)) {
        session.add(points::unseen(id));
        session.hand_on(id, read);
    }
    for (id, mut tensor) in std::mem::take(&mut capture.tensors) {
        session.tensor(id, &mut tensor).map_err(crate::engine::EngineError::from)?;
        if let Some((_, read)) = caller.iter().find(|c| c.0 == id) {
            session.add(points::compare(id, &tensor, read));
            session.hand_on(id, read.clone());
        }
    }
    for (id, what) in std::mem::take(&mut capture.evidence) {
        session.evidence(id, &what).map_err(crate::engine::EngineError::from)?;
    }
    let (mut units, odd) = session.finish();
    for (id, why) in &capture.not_applicable {
        for u in units.iter_mut().filter(|u| u.uncaptured && u.which == Which::Tensor(*id)) {
            (u.verdict, u.note) = (Verdict::NotApplicable, Some(why.clone()));
        }
    }
    Ok((units, odd))
}

/// The report of one layer of a dump.
///
/// # Errors
/// Weights of the layer that can't be read; what [`judge`] refuses.
pub fn layer(
    model: &Model,
    index: usize,
    reading: &Reading,
    mut capture: Capture,
    options: &Options,
    progress: &dyn Fn(&str),
) -> Result<LayerReport, CheckError> {
    let stored = model.weights(index)?;
    let all = model.spec(reading);
    let heads = capture.heads.take();
    let spec = heads.as_ref().map_or_else(|| all.clone(), |h| h.spec(&all));
    let cut = heads.as_ref().map(|h| heads::OfHeads::new(&stored, h, &all.geometry));
    let weights: &dyn Weights = cut.as_ref().map_or(&stored, |c| c);
    let mut conventions = other_conventions(model, &all);
    if let Some(h) = &heads {
        conventions.iter_mut().for_each(|(_, other)| *other = h.spec(other));
    }
    let layer = Layer { index, spec, weights };
    let neighbours = Neighbours { model, index };
    // Of some heads alone, other layers' weights have other shapes.
    let others = heads.is_none().then_some(&neighbours as &dyn OtherLayers);
    let beside = Beside { conventions, others };
    let mut report =
        judged(&layer, stored.stored.clone(), stored.layout, capture, options, beside, progress)?;
    (_, report.notes) = model.remarks(index, reading);
    Ok(report)
}

/// The report of a layer, from a model or without one.
fn judged(
    layer: &Layer,
    weights: Vec<Stored>,
    layout: Layout,
    mut capture: Capture,
    options: &Options,
    beside: Beside,
    progress: &dyn Fn(&str),
) -> Result<LayerReport, CheckError> {
    let started = std::time::Instant::now();
    let contract = capture.contract;
    let mut report = LayerReport {
        layer: layer.index,
        verdict: Verdict::NotCompared,
        engine: capture.engine.clone(),
        contract,
        contract_text: match &capture.chosen {
            None => contract.to_string(),
            Some(by) => format!("{by}, which nobody declares: {contract}"),
        },
        judged: capture.chosen.clone().map(|by| Judgement { by, contract }),
        weights,
        stacks: Vec::new(),
        layout,
        case: case_report(&capture),
        budget: options.budget,
        geometry: Some(layer.spec.geometry),
        names: BTreeMap::new(),
        scalars: std::mem::take(&mut capture.scalars),
        tensors: Vec::new(),
        probes: Vec::new(),
        invariance: Vec::new(),
        probe_seconds: 0.0,
        gates: Vec::new(),
        cumulative: Vec::new(),
        reference_cache: None,
        reference: Vec::new(),
        odd: Vec::new(),
        notes: Vec::new(),
        ranks: None,
        forms_agree: None,
        seconds: 0.0,
        command: None,
    };
    if !report.scalars.is_empty() {
        report.verdict = Verdict::Fault;
        return Ok(report);
    }
    (report.tensors, report.odd) = judge(layer, &mut capture, options, beside, progress)?;
    report.verdict = overall(&report.tensors);
    for unit in report.tensors.iter().filter(|u| u.found.is_some()) {
        if let Which::Tensor(id) = unit.which {
            report.names.entry(unit.tensor).or_insert_with(|| capture.case.plan.names(id.stage, id.form));
        }
    }
    report.seconds = started.elapsed().as_secs_f64();
    Ok(report)
}

fn case_report(capture: &Capture) -> CaseReport {
    let case = &capture.case;
    let hidden = capture.captured.iter().any(|id| id.stage == Stage::Hidden);
    CaseReport {
        batch: case.batch.to_string(),
        regimes: vec!["as dumped"],
        sequences: case.plan.sequences.iter().map(|s| (s.request, s.regime.name())).collect(),
        dtype: capture.contract.activations.name(),
        seed: 0,
        page_size: case.plan.page_size,
        splits: case.plan.splits,
        routed: case.plan.route.threshold.map(|t| case.batch.routed(t)),
        context_chunk: case.plan.route.context_chunk,
        hidden: if hidden { "from the dump" } else { "not in the dump" },
        notes: case.notes.clone(),
    }
}

/// What no comparison of a dump says anything about.
pub fn not_judged(left_out: &[String]) -> Vec<String> {
    let mut all: Vec<String> = left_out.to_vec();
    all.extend(
        [
            "rows, heads, ranks and layers that are not in the dump, and what ran before it was taken",
            "anything outside attention: if all is clean here, look at router, experts, norms after attention, sampling, chat template",
        ]
        .map(str::to_string),
    );
    all
}
