/*! One run of the suite: its layer, what the engine handed over, what the judge said. */

use crate::check::{self, Beside, CheckError, Options};
use crate::engine::SinkError;
use crate::judge::cause::weight::OtherLayers;
use crate::judge::{Diagnosis, Explained, Recorder, Settings, Unit, Verdict, Which, origins, overall};
use crate::model::Layer;
use crate::study::Engines;
use crate::study::layers::{Data, Made, Shape};
use crate::trace::{Tensor, TensorId};
use mla_reference::product::{Dense, Rows};
use mla_reference::{Geometry, Pairing, Stage, Weight, Weights};
use std::collections::HashMap;

/// Heads, widths and ranks that differ from each other, of a size that takes a fraction of a second; our kernels take it.
static SHAPE: Shape = Shape {
    name: "faults",
    geometry: Geometry { hidden: 128, heads: 4, q_rank: 96, latent: 128, rope: 64, nope: 96, value: 64 },
};
const SEED: u64 = 11;
/// YaRN's multiplier for a factor of 40, on the softmax scale twice.
const MSCALE: f64 = 1.368_887_945_411_394;

/// The suite's layer and its neighbour.
pub struct Subject {
    made: Made,
    next: Neighbour,
}

/// The model's next layer: what stale weights are taken from.
struct Neighbour(Made);

impl OtherLayers for Neighbour {
    fn layers(&self) -> Vec<usize> {
        vec![1]
    }
    fn with(&self, _: usize, weight: Weight, f: &mut dyn FnMut(&dyn Rows)) {
        if let Some(values) = self.0.norm(weight) {
            f(&Dense { data: values, cols: values.len() });
        } else if let Some(m) = self.0.matrix(weight) {
            f(m);
        }
    }
}

/// What came of one run.
pub struct Ran {
    /// Of the run.
    pub verdict: Verdict,
    /// Unit by unit.
    units: Vec<Unit>,
    /// What the engine handed over.
    pub tensors: HashMap<TensorId, Tensor>,
}

struct Keep(HashMap<TensorId, Tensor>);

impl Recorder for Keep {
    fn record(&mut self, id: TensorId, engine: &Tensor, _: &Tensor) -> Result<(), SinkError> {
        self.0.insert(id, engine.clone());
        Ok(())
    }
}

impl Subject {
    /// Made up in memory.
    pub fn new() -> Subject {
        let mut made = Made::new(&SHAPE, Data::Plain, SEED);
        // Scalars as DeepSeek has them: slow pairs of columns stretched by 40, the scale times mscale².
        let g = SHAPE.geometry;
        let half = g.rope / 2;
        let freq = |j: usize| libm::pow(1e4, -2.0 * j as f64 / g.rope as f64);
        made.spec.rope.inv_freq =
            (0..half).map(|j| freq(j) / if j > half / 2 { 40.0 } else { 1.0 }).collect();
        made.spec.rope.magnitude = 1.0;
        made.spec.rope.pairing = Pairing::Adjacent;
        made.spec.scale = MSCALE * MSCALE / (g.key() as f64).sqrt();
        (made.spec.eps_attn, made.spec.eps_latent) = (1e-6, 1e-6);
        let next = Neighbour(Made::new(&SHAPE, Data::Plain, SEED + 1));
        Subject { made, next }
    }

    /// Runs the options' engine with their fault and judges it; `closer`: causes are looked for.
    pub fn run(&self, engines: &Engines, options: &Options, closer: bool) -> Result<Ran, CheckError> {
        let layer: Layer = self.made.layer();
        kept(&layer, options, engines, closer, Some(&self.next))
    }
}

/// Runs a layer and keeps what the engine handed over.
pub(super) fn kept(
    layer: &Layer,
    options: &Options,
    engines: &Engines,
    closer: bool,
    others: Option<&dyn OtherLayers>,
) -> Result<Ran, CheckError> {
    let case = check::draw(layer, options)?;
    let engine = engines(options)?;
    let settings = Settings { budget: options.budget, seed: options.seed, closer, ..Settings::default() };
    let mut keep = Keep(HashMap::new());
    let beside = Beside { settings, recorder: Some(&mut keep), others };
    let judged = check::judge(layer, &case, options, engine.as_ref(), beside, &|_| ())?;
    Ok(Ran { verdict: overall(&judged.units), units: judged.units, tensors: keep.0 })
}

/// A tensor's name without the rank that it is of.
pub fn plain(tensor: &str) -> &str {
    tensor.split('@').next().unwrap_or(tensor)
}

impl Ran {
    /// Unit by unit.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The first unit at fault.
    pub fn first(&self) -> Option<&Unit> {
        origins(&self.units).next()
    }

    /// The first tensor at fault that is no weight and differs in its bits at all; of a weight, what is computed from it.
    pub fn first_tensor(&self) -> Option<TensorId> {
        let tensor = |u: &Unit| match u.which {
            Which::Tensor(id) => Some(id),
            Which::Weight(_) => None,
        };
        let first = self.first()?;
        tensor(first).or_else(|| {
            let after = self.units.iter().find(|u| u.verdict == Verdict::AfterFault);
            after.and_then(tensor)
        })
    }

    /// The layer's output, of the first form that ran.
    pub fn out(&self) -> Option<TensorId> {
        let mut all: Vec<TensorId> =
            self.tensors.keys().copied().filter(|id| id.stage == Stage::Out).collect();
        all.sort();
        all.first().copied()
    }

    /// Causes of all tensors at fault: where, and the names that fit, each with its sentence.
    pub fn causes(&self) -> Vec<(String, Vec<String>)> {
        let named = |u: &Unit| {
            let names = match (&u.explained, &u.diagnosis) {
                (Some(Explained::Contract(c)), _) => vec![format!("contract: {c}")],
                (Some(Explained::Convention(c)), _) => vec![format!("convention {c}")],
                (None, Some(Diagnosis::Cause(c))) => std::iter::once(format!("{} | {}", c.name, c.text))
                    .chain(c.ambiguous_with.iter().cloned())
                    .collect(),
                _ => return None,
            };
            Some((u.title(), names))
        };
        origins(&self.units).filter_map(named).collect()
    }

    /// Why a clean run did not pass.
    pub fn alarm(&self) -> String {
        let bad = self.units.iter().find(|u| u.verdict == self.verdict);
        let why = bad.map_or(String::new(), |u| {
            let said = u.evidence.first().or(u.note.as_ref()).cloned().unwrap_or_default();
            format!(": {} {said}", u.title())
        });
        format!("{}{why}", self.verdict)
    }
}
