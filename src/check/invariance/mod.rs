/*!
Whether an engine gives the same answer whatever the batch looks like.

The base run is judged as always. Then the same engine runs variants of the same case ([`variants`]), each judged in full
against the float64 reference, and each held against the base run directly, bit by bit ([`compare`]). What mathematics
leaves to rounding may differ in bits while both runs are clean; that is said, and is no fault. A fault that a variant has
and the base has not is one of the run.

Of the base only what is compared is kept. A deliberate fault acts in variants as in the base.
*/

pub mod compare;
pub mod variants;

use crate::case::Case;
use crate::check::{self, CheckError, Options};
use crate::device::cuda;
use crate::engine::{Engine, EngineError, SinkError};
use crate::judge::cause::weight::OtherLayers;
use crate::judge::{Budget, Recorder, Settings, Unit, Verdict, Which, overall};
use crate::model::Layer;
use crate::report::LayerReport;
use crate::report::finding::{bad, seen, sentences, title};
use crate::report::invariance::{Demand, Difference, Outcome, Variant};
use crate::trace::{Tensor, TensorId};
use compare::{Against, STAGES};
use mla_reference::{Form, Stage};
use std::collections::HashMap;
use variants::{Changed, Made, Row, TABLE};

/// Tensors of the base run that variants are compared with.
pub type Kept = HashMap<TensorId, Tensor>;

/// Keeps what is compared while the base is judged, in front of what else records it.
pub struct Keep<'r> {
    on: bool,
    inner: Option<&'r mut dyn Recorder>,
    kept: Kept,
}

impl<'r> Keep<'r> {
    /// In front of `inner`; where it is not `on`, nothing is kept.
    pub fn new(on: bool, inner: Option<&'r mut dyn Recorder>) -> Keep<'r> {
        Keep { on, inner, kept: Kept::new() }
    }

    /// What the judge is to be given.
    pub fn recorder(&mut self) -> Option<&mut dyn Recorder> {
        (self.on || self.inner.is_some()).then_some(self as &mut dyn Recorder)
    }

    /// What was kept.
    pub fn finish(self) -> Kept {
        self.kept
    }
}

impl Recorder for Keep<'_> {
    fn record(&mut self, id: TensorId, engine: &Tensor, reference: &Tensor) -> Result<(), SinkError> {
        if self.on && STAGES.contains(&id.stage) {
            self.kept.insert(id, engine.clone());
        }
        match self.inner.as_deref_mut() {
            Some(inner) => inner.record(id, engine, reference),
            None => Ok(()),
        }
    }
}

/// What is run another way.
pub struct Subject<'a> {
    /// The layer.
    pub layer: &'a Layer<'a>,
    /// The case of the base run.
    pub case: &'a Case,
    /// Options of the base run.
    pub options: &'a Options,
    /// The engine.
    pub engine: &'a dyn Engine,
    /// What the base was judged with.
    pub settings: &'a Settings,
    /// The model's other layers.
    pub others: Option<&'a dyn OtherLayers>,
    /// What the base run gave.
    pub report: &'a LayerReport,
}

/// Runs every variant. Fails only where the engine is not there, or the base's options make no sense.
pub fn all(subject: &Subject, kept: &Kept, progress: &dyn Fn(&str)) -> Result<Vec<Variant>, CheckError> {
    let base = variants::Base {
        case: subject.case,
        kept,
        engine: subject.engine,
        layer: subject.layer,
        forms: &subject.options.forms,
        seed: subject.options.seed,
    };
    let made: Vec<(&Row, Result<Made, String>)> = TABLE.iter().map(|r| (r, (r.make)(&base))).collect();
    let runs = made.iter().filter(|(_, m)| matches!(m, Ok(Made::Run(_)))).count();
    let one = |(row, made): (&Row, Result<Made, String>)| match made {
        Ok(Made::Run(_)) if cuda::lost().is_some() => {
            let why = "not run: a variant before took the GPU away from this process".to_string();
            Ok(variant(row, Outcome::NotApplicable { why }))
        }
        Err(why) => Ok(variant(row, Outcome::NotApplicable { why })),
        Ok(Made::Forms) => Ok(of_forms(row, subject, kept)),
        Ok(Made::Run(changed)) => run(row, subject, kept, &changed, runs, &|what| {
            progress(&format!("{}: {what}", row.name));
        }),
    };
    made.into_iter().map(one).collect()
}

fn variant(row: &Row, outcome: Outcome) -> Variant {
    Variant {
        name: row.name,
        changes: row.changes,
        demands: row.demands,
        outcome,
        judged: None,
        hidden_gain: None,
        hidden_scale: None,
        tensors: Vec::new(),
    }
}

/// Runs and judges one. `runs`: how many share the budget of false alarms.
fn run(
    row: &Row,
    subject: &Subject,
    kept: &Kept,
    changed: &Changed,
    runs: usize,
    progress: &dyn Fn(&str),
) -> Result<Variant, CheckError> {
    let Subject { layer, case, options, engine, settings, others, report } = *subject;
    let splits = changed.case.plan.splits;
    let other = if splits == case.plan.splits { None } else { engine.with_splits(splits) };
    let engine = other.as_deref().unwrap_or(engine);
    let budget = Budget { alpha: settings.budget.alpha / runs.max(1) as f64, ..settings.budget };
    let settings = Settings { budget, ..settings.clone() };
    // What was asked about the base run is not asked again.
    let options =
        &Options { gates: Vec::new(), cumulative: false, hidden: None, repeat: 1, ..options.clone() };
    let mut against = Against { kept, case, changed, found: Vec::new() };
    let beside = check::Beside { settings, recorder: Some(&mut against), others };
    let judged = check::judge(layer, &changed.case, options, engine, beside, progress);
    let units = match judged {
        Ok(judged) => judged.units,
        Err(CheckError::Engine(EngineError::Broke(what))) => {
            return Ok(variant(row, Outcome::Broke { what }));
        }
        Err(CheckError::Fault(e)) => {
            let what = e.to_string();
            let why = format!("the deliberate fault: {}", what.lines().next().unwrap_or_default());
            return Ok(variant(row, Outcome::NotApplicable { why }));
        }
        Err(e) => return Err(e),
    };
    let mut names = std::collections::BTreeMap::new();
    for unit in units.iter().filter(|u| u.found.is_some()) {
        if let Which::Tensor(id) = unit.which {
            names.entry(unit.tensor).or_insert_with(|| changed.case.plan.names(id.stage, id.form));
        }
    }
    let its = LayerReport {
        case: check::case_report(&changed.case, options),
        names,
        verdict: overall(&units),
        tensors: units,
        ..report.clone()
    };
    let tensors = against.found;
    let outcome = outcome(row, report, &its, &tensors);
    let (ours, theirs) = (seen(report), seen(&its));
    // Each lies within what it would have shown of the reference, so both lie within the sum of each other.
    let sum = |a: Option<f64>, b: Option<f64>| Some(a? + b?);
    Ok(Variant {
        judged: Some(its.verdict),
        hidden_gain: sum(ours.0, theirs.0),
        hidden_scale: sum(ours.1, theirs.1),
        tensors,
        ..variant(row, outcome)
    })
}

/// Both forms are of the base run: each was judged there.
fn of_forms(row: &Row, subject: &Subject, kept: &Kept) -> Variant {
    let tensors = compare::forms(kept, subject.case);
    let outcome = direct(row, subject.report, &tensors).unwrap_or_else(|| settled(&tensors));
    let (gain, scale) = seen(subject.report);
    let twice = |v: Option<f64>| v.map(|v| 2.0 * v);
    Variant { hidden_gain: twice(gain), hidden_scale: twice(scale), tensors, ..variant(row, outcome) }
}

/// Where a fault is: parts of an attention are the attention, whatever they are called with or without splits, and parts of the
/// output the output.
fn site(u: &Unit) -> (Option<Form>, &'static str) {
    let Which::Tensor(TensorId { stage, form }) = u.which else { return (u.form, u.tensor) };
    match (stage, form) {
        (Stage::PartO | Stage::PartLse | Stage::OLatent | Stage::Lse, _)
        | (Stage::AttnOut, Some(Form::Fused)) => (form, "attention"),
        (Stage::PartOut, _) => (form, Stage::Out.name()),
        _ => (form, stage.name()),
    }
}

fn accused(l: &LayerReport) -> Vec<&Unit> {
    bad(l).into_iter().filter(|u| !u.verdict.differs()).collect()
}

fn outcome(row: &Row, base: &LayerReport, its: &LayerReport, tensors: &[Difference]) -> Outcome {
    let known: Vec<_> = accused(base).into_iter().map(site).collect();
    if let Some(u) = accused(its).into_iter().find(|u| !known.contains(&site(u))) {
        let lead = |(lead, text): (&str, String)| match lead {
            "" => text,
            lead => format!("{lead}: {text}"),
        };
        let said = sentences(its, u).into_iter().map(lead).collect();
        return Outcome::Fault { first: title(u), said };
    }
    if known.is_empty() {
        return direct(row, base, tensors).unwrap_or_else(|| settled(tensors));
    }
    let what = match accused(its).is_empty() {
        true => "what is wrong with the base run does not show here".into(),
        false => "what is wrong with the base run is wrong here too, and nothing else".into(),
    };
    direct(row, base, tensors).unwrap_or(Outcome::AsBase { what })
}

/// What the bits alone decide.
fn direct(row: &Row, base: &LayerReport, tensors: &[Difference]) -> Option<Outcome> {
    if tensors.iter().all(|d| d.elements == 0) {
        return Some(Outcome::NotApplicable { why: "no tensor could be compared".into() });
    }
    let differs = tensors.iter().find(|d| d.differ > 0);
    match (row.demands, differs) {
        (Demand::Bits, Some(d)) => Some(Outcome::Fault {
            first: d.first.clone().unwrap_or_else(|| d.title()),
            said: vec![format!(
                "bits differ where the same operations are done on the same numbers: {} of {} elements of {}",
                d.differ,
                d.elements,
                d.title()
            )],
        }),
        (Demand::Rounding, _) if !accused(base).is_empty() && row.name == "forms" => Some(Outcome::AsBase {
            what: "the base run has a fault: its forms are not held against each other".into(),
        }),
        _ => None,
    }
}

fn settled(tensors: &[Difference]) -> Outcome {
    if tensors.iter().all(|d| d.differ == 0) { Outcome::Bits } else { Outcome::Rounding }
}

/// The verdict of a layer whose variants gave this.
pub fn with(verdict: Verdict, variants: &[Variant]) -> Verdict {
    crate::report::invariance::worst(variants).map_or(verdict, |v| v.max(verdict))
}
