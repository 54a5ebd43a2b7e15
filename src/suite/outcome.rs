/*! What came of the suite, as reports have it: one struct a fault, the score, the whole. Names of fields are stable. */

use super::measures::{self, Said};
use serde::Serialize;

/// How a row ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The run is a fault.
    Caught,
    /// It is not.
    Missed,
    /// The engine can't have it.
    NotApplicable,
    /// The run could not be made.
    Broke,
}

/// What was made of the cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Naming {
    /// Right.
    Right,
    /// Right, and others that fit as well.
    Ambiguous,
    /// None was named.
    Unnamed,
    /// It has no name, and was given none.
    Nameless,
    /// Wrong.
    Wrong,
}

/// One fault and what the judge made of it.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    /// Name of the row.
    pub name: &'static str,
    /// Family.
    pub family: &'static str,
    /// Public reports.
    pub issues: &'static [&'static str],
    /// What is broken.
    pub what: &'static str,
    /// As `--fault` takes it.
    pub fault: String,
    /// The run, as options of `run`.
    pub options: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, where it did not apply or broke.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The first tensor at fault.
    pub first: Option<String>,
    /// Those of which it should be one.
    pub first_expected: Vec<&'static str>,
    /// Whether it is.
    pub first_right: bool,
    /// Causes that were named, tensor by tensor.
    pub causes: Vec<String>,
    /// What they should say.
    pub cause_expected: Vec<&'static str>,
    /// Whether they do.
    pub cause: Naming,
    /// The smallest size that was still caught, of those that were tried.
    pub smallest: Option<f64>,
    /// Sizes, the largest first.
    pub sizes: &'static [f64],
    /// Whether norms were expected to see it.
    pub norms_expected: bool,
    /// What common measures say of the first wrong tensor.
    pub first_measures: Option<Said>,
    /// What they say of the layer's output.
    pub out_measures: Option<Said>,
    /// What is known to be missed, and why.
    pub known: Option<&'static str>,
    /// Wall time, beside others that ran.
    pub seconds: f64,
}

impl Tried {
    /// Whether all is as it should be.
    pub fn complete(&self) -> bool {
        let named = matches!(self.cause, Naming::Right | Naming::Nameless);
        self.outcome == Outcome::NotApplicable || self.outcome == Outcome::Caught && self.first_right && named
    }
}

/// A clean run that was accused, or that gave no verdict.
#[derive(Clone, Debug, Serialize)]
pub struct Alarm {
    /// The run, as options of `run`.
    pub options: String,
    /// What was said of it.
    pub what: String,
}

/// How many of so many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    /// How many.
    pub n: usize,
    /// Of how many.
    pub of: usize,
}

impl Count {
    pub(super) fn of<'a>(all: impl Iterator<Item = &'a Tried>, hit: impl Fn(&Tried) -> bool) -> Count {
        all.fold(Count::default(), |c, t| Count { n: c.n + usize::from(hit(t)), of: c.of + 1 })
    }
}

/// Figures of the whole suite.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Score {
    /// Faults that were caught, of those that apply.
    pub caught: Count,
    /// First tensor right, of those caught.
    pub first: Count,
    /// Cause right, of those caught that have a name.
    pub cause: Count,
    /// Named wrongly.
    pub named_wrongly: usize,
    /// Clean runs that did not pass, of all.
    pub false_alarms: Count,
    /// What norms, cosine, NMSE and allclose see of the first wrong tensors.
    pub first_seen: [Count; measures::NAMES.len()],
    /// What they see of the layer's outputs.
    pub out_seen: [Count; measures::NAMES.len()],
}

/// The whole suite.
#[derive(Clone, Debug, Serialize)]
pub struct Suite {
    /// Name and version of this form.
    pub schema: &'static str,
    /// Version of the program.
    pub version: &'static str,
    /// Engine.
    pub engine: &'static str,
    /// Whether some fault applied, all that did are caught, none is named wrongly and no clean run is accused.
    pub ok: bool,
    /// Figures.
    pub score: Score,
    /// Measures, in the order of the arrays.
    pub measures: [&'static str; measures::NAMES.len()],
    /// Clean runs that did not pass.
    pub false_alarms: Vec<Alarm>,
    /// Fault by fault.
    pub faults: Vec<Tried>,
    /// Families without a row: name, what, why.
    pub without: Vec<[&'static str; 3]>,
    /// Wall time.
    pub seconds: f64,
}
