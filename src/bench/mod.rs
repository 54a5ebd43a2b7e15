/*!
How fast kernels are: each stage's launch timed on the device, beside what it has to move and compute, and what the device
reaches in a copy and in a matrix product.

Engines run as they always do, on a device that times what they launch ([`timed`]); nothing here knows a kernel's arguments
or geometry. What was timed is judged too ([`drawn`]): a fast kernel that is wrong at its own size is no fast kernel.

- [`work`]: bytes and operations of a stage, by its formula.
- [`ceilings`]: the device's own speed.
- [`resources`]: registers, shared memory and spills of the program's kernels; needs no device.
*/

pub mod ceilings;
pub mod drawn;
pub mod resources;
pub mod text;
pub mod timed;
pub mod work;

use crate::case::{Batch, Request};
use crate::check::{self, CheckError, Options};
use crate::device::Device;
use crate::engine::{Engine, EngineError, KernelFile, Sink};
use crate::judge::{Session, Settings, Unit, Verdict, origins, overall};
use crate::model::{Layer, Model};
use drawn::{Drawn, Few};
use mla_reference::{Form, Geometry, Phase, Regime, Stage, Weight};
use serde::Serialize;
use timed::{Launched, Protocol, Timed};
use work::{Binds, Ceilings, Work};

/// Name and version of the report's form.
pub const SCHEMA: &str = "mla-check.bench/1";

/// Requests that are all alike, and the form that computes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How many.
    pub requests: usize,
    /// Each of them.
    pub request: Request,
    /// How attention is computed.
    pub form: Form,
}

impl Shape {
    /// Decode steps of so many requests over `keys` keys each, the new token's among them.
    pub fn decode(requests: usize, keys: usize, form: Form) -> Shape {
        Shape { requests, request: Request { context: keys.saturating_sub(1), new: 1 }, form }
    }

    /// One prompt of so many tokens.
    pub fn prefill(tokens: usize, form: Form) -> Shape {
        Shape { requests: 1, request: Request { context: 0, new: tokens }, form }
    }

    /// What it is.
    pub fn phase(&self) -> Phase {
        if self.request.new == 1 { Phase::Decode } else { Phase::Prefill }
    }

    /// As a table's title.
    pub fn name(&self) -> String {
        match self.phase() {
            Phase::Decode => format!("decode {} x {}", self.requests, self.request.total()),
            Phase::Prefill => format!("prefill {}", self.request.new),
        }
    }
}

/// What is timed.
pub struct Asked<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its layer.
    pub layer: usize,
    /// Dtype, kernels, seed, splits, page size.
    pub options: &'a Options,
    /// Names of stages and weights; None: all stages.
    pub stages: Option<Vec<String>>,
    /// How.
    pub protocol: Protocol,
    /// Whether results are judged.
    pub judge: bool,
}

/// Microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    fn of(milliseconds: &[f64]) -> Spread {
        let mut all: Vec<f64> = milliseconds.iter().map(|ms| ms * 1e3).collect();
        all.sort_by(f64::total_cmp);
        let at = |i: usize| all.get(i).copied().unwrap_or(f64::NAN);
        let half = all.len() / 2;
        let median = if all.len() % 2 == 1 { at(half) } else { 0.5 * (at(half.wrapping_sub(1)) + at(half)) };
        Spread { median, least: at(0), most: at(all.len().wrapping_sub(1)) }
    }

    fn and(self, o: Spread) -> Spread {
        Spread { median: self.median + o.median, least: self.least + o.least, most: self.most + o.most }
    }
}

/// One launch of a stage.
#[derive(Clone, Debug, Serialize)]
pub struct LaunchReport {
    /// Entry point.
    pub entry: String,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
    /// Microseconds, caches overwritten before.
    pub cold: Spread,
    /// Microseconds, the same launch right before.
    pub warm: Spread,
}

/// A stage or weight.
#[derive(Clone, Debug, Serialize)]
pub struct StageReport {
    /// Name.
    pub stage: String,
    /// Its launches, in order.
    pub launches: Vec<LaunchReport>,
    /// Microseconds of all of them, caches overwritten before each.
    pub cold: Spread,
    /// The same, each launch right behind itself.
    pub warm: Spread,
    /// Bytes that must move.
    pub bytes: u64,
    /// Multiplications and additions that are of use.
    pub operations: u64,
    /// 10⁹ bytes a second, cold.
    pub gb_a_second: f64,
    /// 10¹² operations a second, cold.
    pub tflop_a_second: f64,
    /// Which ceiling binds; none where it was not measured.
    pub binds: Option<Binds>,
    /// Share of that ceiling that is reached, cold.
    pub share: Option<f64>,
}

/// What the judge says.
#[derive(Clone, Debug, Serialize)]
pub struct Judged {
    /// Of all that was drawn.
    pub verdict: Verdict,
    /// How much that was.
    pub drawn: String,
    /// Tensors with evidence of their own: name and what it is.
    pub evidence: Vec<String>,
}

/// One shape.
#[derive(Clone, Debug, Serialize)]
pub struct ShapeReport {
    /// Name.
    pub shape: String,
    /// Form.
    pub form: Form,
    /// Requests, cached tokens and new tokens of each.
    pub requests: usize,
    /// Cached tokens of each.
    pub context: usize,
    /// New tokens of each.
    pub new: usize,
    /// Splits of the keys in decode.
    pub splits: usize,
    /// Stages, in the order of launches.
    pub stages: Vec<StageReport>,
    /// The judge's word; None: it was not asked.
    pub judged: Option<Judged>,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA`]
    pub schema: &'static str,
    /// Of the program.
    pub version: &'static str,
    /// The device, in a line.
    pub device: String,
    /// Model or preset.
    pub model: String,
    /// Widths.
    pub geometry: Geometry,
    /// Of activations.
    pub dtype: &'static str,
    /// Kernel files that ran.
    pub kernels: Vec<KernelFile>,
    /// What compiled them.
    pub compilers: Vec<String>,
    /// Repetitions of each launch at most.
    pub repeats: usize,
    /// What the device reaches.
    pub ceilings: Ceilings,
    /// Shapes.
    pub shapes: Vec<ShapeReport>,
}

impl Report {
    /// The worst of the shapes' verdicts; None: nothing was judged.
    pub fn verdict(&self) -> Option<Verdict> {
        self.shapes.iter().filter_map(|s| s.judged.as_ref()).map(|j| j.verdict).max()
    }
}

/// What one shape gives, with what ran.
pub struct Ran {
    /// Times.
    pub shape: ShapeReport,
    /// Kernel files.
    pub kernels: Vec<KernelFile>,
    /// What compiled them.
    pub compilers: Vec<String>,
}

/// Times the stages of one shape on a device, and judges what they computed.
///
/// # Errors
/// Those of the engine, and of the model.
pub fn shape<D: Device>(
    device: D,
    asked: &Asked,
    shape: &Shape,
    ceilings: &Ceilings,
    progress: &dyn Fn(&str),
) -> Result<Ran, CheckError> {
    let stored = asked.model.weights(asked.layer)?;
    let spec = asked.model.spec(&asked.options.reading);
    let layer = Layer { index: asked.layer, spec, weights: &stored };
    let g = &layer.spec.geometry;
    let options = Options {
        forms: vec![shape.form],
        batch: Batch(vec![shape.request; shape.requests]),
        regimes: vec![Regime::Random],
        ..asked.options.clone()
    };
    progress("drawing the case");
    let case = check::draw(&layer, &options)?;
    let all = || Stage::ALL.iter().map(|s| s.name().to_string()).collect();
    let wanted = asked.stages.clone().unwrap_or_else(all);
    let timed = Timed::new(device, asked.protocol, Some(wanted));
    let engine = check::kernels("cuda", timed, &options)?;
    let contract = engine.contract();
    let mut drawn = Drawn::new(&case, g, options.seed);
    progress("running and timing");
    engine.run(&layer, &case, &options.forms, &mut drawn)?;
    let launched = engine.with_device(Timed::take);
    let work = |name: &str| -> Option<Work> {
        if let Some(stage) = Stage::from_name(name) {
            return Some(work::of_stage(stage, shape.form, &case.plan, g, &contract));
        }
        let weight = Weight::from_name(name)?;
        let (ty, _) = layer.weights.matrix(weight)?.stored()?;
        Some(work::of_weight(ty, weight.matrix(g), &contract))
    };
    let judged = match asked.judge {
        false => None,
        true => {
            progress("judging");
            Some(judge(&layer, &options, &contract, drawn, progress)?)
        }
    };
    let described = engine.describe();
    Ok(Ran {
        shape: ShapeReport {
            shape: shape.name(),
            form: shape.form,
            requests: shape.requests,
            context: shape.request.context,
            new: shape.request.new,
            splits: case.plan.splits,
            stages: stages(&launched, &work, ceilings),
            judged,
        },
        kernels: described.kernels,
        compilers: described.compilers,
    })
}

/// Launches by what they compute, in the order of the first.
fn stages(
    launched: &[Launched],
    work: &dyn Fn(&str) -> Option<Work>,
    ceilings: &Ceilings,
) -> Vec<StageReport> {
    let mut names: Vec<&str> = Vec::new();
    for l in launched {
        if !names.contains(&l.output.as_str()) {
            names.push(&l.output);
        }
    }
    let of = |name: &&str| {
        let launches: Vec<LaunchReport> = launched
            .iter()
            .filter(|l| l.output == *name)
            .map(|l| LaunchReport {
                entry: l.entry.clone(),
                grid: l.grid,
                threads: l.threads,
                shared: l.shared,
                cold: Spread::of(&l.cold),
                warm: Spread::of(&l.warm),
            })
            .collect();
        let cold = launches.iter().fold(Spread::default(), |s, l| s.and(l.cold));
        let warm = launches.iter().fold(Spread::default(), |s, l| s.and(l.warm));
        let work = work(name).unwrap_or_default();
        let seconds = cold.median * 1e-6;
        let least = ceilings.least(work);
        StageReport {
            stage: name.to_string(),
            launches,
            cold,
            warm,
            bytes: work.bytes,
            operations: work.operations,
            gb_a_second: work.bytes as f64 / seconds / 1e9,
            tflop_a_second: work.operations as f64 / seconds / 1e12,
            binds: least.map(|l| l.0),
            share: least.map(|l| l.1 / seconds),
        }
    };
    names.iter().map(of).collect()
}

/// Judges the drawn rows.
fn judge(
    layer: &Layer,
    options: &Options,
    contract: &mla_reference::Contract,
    drawn: Drawn,
    progress: &dyn Fn(&str),
) -> Result<Judged, CheckError> {
    let described = drawn.describe();
    let Few { case, tensors, seen } = drawn.finish();
    let settings = Settings {
        budget: options.budget,
        seed: options.seed,
        captured_weights: Some(Vec::new()),
        closer: false,
        ..Settings::default()
    };
    let mut session =
        Session::new(layer, &case, &options.forms, *contract, None, Box::new(progress)).with(settings);
    let refused = |e: crate::engine::SinkError| CheckError::Engine(EngineError::Sink(e));
    for (id, mut tensor) in tensors {
        for (_, what) in seen.iter().filter(|(of, _)| *of == id) {
            session.evidence(id, what).map_err(refused)?;
        }
        session.tensor(id, &mut tensor).map_err(refused)?;
    }
    let (units, _) = session.finish();
    let evidence = |u: &Unit| {
        let first = u.evidence.first().cloned().or_else(|| u.note.clone()).unwrap_or_default();
        format!("{} ({}): {first}", u.title(), u.verdict.name())
    };
    Ok(Judged {
        verdict: overall(&units),
        drawn: described,
        evidence: origins(&units).map(evidence).collect(),
    })
}

#[cfg(test)]
mod tests;
