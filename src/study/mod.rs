/*!
Studies of the judge: many runs, to learn how often it is wrong and how small a fault it sees.

- [`calibrate`]: clean runs. No verdict may be an alarm, and p-values must be as rare as they say.
- [`sensitivity`]: deliberate faults of falling size, down to the smallest that is still found; beside it, what
  the gates in common use make of the same tensors.

Both take any engine and any layer: of a model file, or made up in memory ([`layers`]). [`setup`] draws what a
clean run is: a function of a seed and a number, so that one run can be repeated alone.
*/

pub mod binomial;
pub mod calibrate;
pub mod layers;
pub mod sensitivity;
pub mod setup;
pub mod subjects;

use crate::case::Case;
use crate::check::{self, CheckError, Options};
use crate::engine::{Engine, EngineError};
use crate::judge::watch::GateReport;
use crate::judge::{Settings, Unit, Verdict, compare_scalars, overall};
use crate::model::Layer;

/// Makes the engine that options ask for.
pub type Engines<'a> = dyn Fn(&Options) -> Result<Box<dyn Engine>, EngineError> + Sync + 'a;

/// What the judge says of one run.
pub struct Outcome {
    /// Of the run.
    pub verdict: Verdict,
    /// Unit by unit.
    pub units: Vec<Unit>,
    /// What other people's rules say, of the stages that the options ask about.
    pub gates: Vec<GateReport>,
}

/// One p-value of a run, as the judge reports it.
#[derive(Clone, Debug, PartialEq)]
pub struct PValue {
    /// Family of tests.
    pub family: &'static str,
    /// Which test, with its unit.
    pub name: String,
    /// Natural logarithm.
    pub log_p: f64,
}

/// Lets an engine compute a case and judges it; `closer`: looks for what explains evidence, and where it is.
pub fn judge<'a>(
    layer: &'a Layer<'a>,
    case: &'a Case,
    options: &Options,
    engine: &dyn Engine,
    closer: bool,
) -> Result<Outcome, CheckError> {
    if !compare_scalars(&engine.spec(layer), &layer.spec).is_empty() {
        return Ok(Outcome { verdict: Verdict::Fault, units: Vec::new(), gates: Vec::new() });
    }
    let settings = Settings { budget: options.budget, seed: options.seed, closer, ..Settings::default() };
    let beside = check::Beside { settings, ..check::Beside::default() };
    let judged = check::judge(layer, case, options, engine, beside, &|_| ())?;
    Ok(Outcome { verdict: overall(&judged.units), units: judged.units, gates: judged.gates })
}

/// Whether a verdict accuses the engine by evidence of its own.
pub fn accuses(verdict: Verdict) -> bool {
    verdict.exit(false) == 1 && verdict != Verdict::AfterFault
}

/// The tests of a unit.
pub fn p_values(unit: &Unit) -> impl Iterator<Item = PValue> {
    let title = unit.title();
    unit.tests.iter().map(move |t| PValue {
        family: t.family,
        name: format!("{title}: {}", t.name),
        log_p: t.log_p,
    })
}
