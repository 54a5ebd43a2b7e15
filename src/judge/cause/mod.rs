/*!
Why: which one thing an engine would have to do wrong for its bits to be what they are.

A hypothesis is data ([`change::Change`]): another scale, another rope, a token left out, heads in another order. Each
recomputes the stage as an engine with that fault would, and the tensor is held against it with the same tests. A cause
is accepted only if under it the tensor passes as a clean one would; whatever merely makes the residual smaller is never
named: a wrong name is worse than none. Where several pass, all are listed.

Hypotheses are cheap to reject: each is first held against a part of the tensor (a third of its rows and heads, the
worst among them), and only what leaves few odd elements there goes through the whole judge. Numbers of evaluations are
capped (`SCREENS`, `FULL`), not seconds: the result does not depend on the machine. Families are tried in the order
of how often their faults are met in public. Source: the groundwork on comparing kernels, sections 5.2 and 5.3.
*/

pub mod change;
mod fit;
mod input;
mod keys;
mod layout;
mod merge;
mod norm;
mod order;
mod rope;
mod rows;
mod scale;
mod scene;
pub mod settle;
mod tail;
pub mod weight;

use super::compare::Isolated;
use super::evidence::Evidence;
use crate::trace::{Tensor, TensorId};
use crate::written::{self, Name};
use change::Change;
use mla_reference::{Phase, RowName};
use scene::Scene;
use serde::{Deserialize, Serialize};
use std::sync::{Mutex, PoisonError};

/// Most hypotheses that are held against a part of one tensor.
const SCREENS: usize = 240;
/// Most that go through the whole judge.
const FULL: usize = 12;
/// Share of odd elements that a part may have for its hypothesis to go on.
const SCREEN: f64 = 0.02;
/// By how much a hypothesis must raise the logarithm of the smallest p-value, where no bound was broken: without this,
/// one that changes nothing could carry a tensor over the level by chance.
const BETTER: f64 = 7.0;

/// A hypothesis, or the name of one, with what it left unexplained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Left {
    /// Name.
    pub name: String,
    /// Share of odd elements of the part that was looked at.
    #[serde(deserialize_with = "written::number")]
    pub share: f64,
}

/// A cause under which a tensor passes as a clean one would.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cause {
    /// Short name.
    pub name: String,
    /// Family of hypotheses.
    #[serde(deserialize_with = "written::name")]
    pub family: Name,
    /// One sentence.
    pub text: String,
    /// Size of the effect and its standard error, where it has one: a factor, an eps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<(f64, f64)>,
    /// Hypotheses tried.
    pub tried: usize,
    /// The best one that is not accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runner_up: Option<Left>,
    /// Others that pass as well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ambiguous_with: Vec<String>,
}

/// What a search for causes found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Diagnosis {
    /// One that explains everything.
    Cause(Cause),
    /// None does.
    Unexplained {
        /// Hypotheses tried.
        tried: usize,
        /// The best three.
        best: Vec<Left>,
    },
}

/// One thing that an engine may do wrong.
pub struct Hypothesis<'a> {
    /// Short name.
    pub name: String,
    /// Family.
    pub family: &'static str,
    /// One sentence.
    pub text: String,
    /// Size and standard error, where it has one.
    pub effect: Option<(f64, f64)>,
    /// What is different.
    pub change: Change<'a>,
}

impl<'a> Hypothesis<'a> {
    fn new(
        family: &'static str,
        name: impl Into<String>,
        text: impl Into<String>,
        change: Change<'a>,
    ) -> Hypothesis<'a> {
        Hypothesis { name: name.into(), family, text: text.into(), effect: None, change }
    }

    fn sized(self, value: f64, error: f64) -> Hypothesis<'a> {
        Hypothesis { effect: Some((value, error)), ..self }
    }
}

/// What causes of other tensors of the run say: a factor that fits one is tried at the next before another is fitted.
#[derive(Debug, Default)]
pub struct Known(Mutex<Option<(f64, f64)>>);

impl Known {
    /// A factor on the softmax scale and its standard error: the most exact one so far.
    fn scale(&self) -> Option<(f64, f64)> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn learn(&self, cause: &Cause) {
        let mut scale = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let (scale::FAMILY, Some((factor, error))) = (cause.family, cause.effect)
            && scale.is_none_or(|(_, e)| error < e)
        {
            *scale = Some((factor, error));
        }
    }
}

/// Makes hypotheses about what a scene shows.
type Family = for<'s, 'a> fn(&'s Scene<'a>) -> Vec<Hypothesis<'a>>;

/// Families in the order in which they are tried. The first ones are independent of each other, so that all that pass
/// are listed; those of `LATE` are only asked where none of them passed, since they fit numbers or excuse rows.
const FAMILIES: &[Family] = &[
    scale::constants,
    rope::all,
    norm::all,
    keys::masks,
    keys::softmax,
    keys::tails,
    merge::all,
    merge::without_keys,
    order::all,
    layout::moved,
    input::all,
    tail::all,
    keys::lists,
];
const LATE: &[Family] = &[scale::fitted, fit::gains, norm::fitted, rows::all, layout::lost];

/// Of a few elements of many nothing else is asked: whatever acts on a stage as a whole shows in more of them.
const FEW: &[Family] = &[fit::gains, rows::all];
/// How many these are.
const FEW_ELEMENTS: u64 = 3;
/// Of how many.
const MANY: u64 = 256;

/// Whether the evidence is a few elements, and nothing that is counted or summed.
fn few(e: &Evidence, log_alpha: f64, name: &dyn Fn(usize) -> Option<RowName>) -> bool {
    let bounds = e.tally.beyond + e.unlikely;
    let tests = || e.tests(name).iter().any(|t| t.log_p <= log_alpha);
    e.tally.elements >= MANY && bounds <= FEW_ELEMENTS && !tests()
}

/// Looks for what explains the evidence of one phase of a tensor. `log_alpha`: ln of the run's level; `known`: what
/// was found of tensors before it.
pub fn search(
    of: &Isolated,
    id: TensorId,
    tensor: &Tensor,
    phase: Phase,
    evidence: &Evidence,
    (log_alpha, known): (f64, &Known),
    name: &dyn Fn(usize) -> Option<RowName>,
) -> Diagnosis {
    let scene = Scene::new(of, id, tensor, phase, evidence, known);
    let judge = Judge { log_alpha, name, base: worst(evidence, name) };
    let mut all: Vec<Left> = Vec::new();
    let groups: &[&[Family]] = if few(evidence, log_alpha, name) { &[FEW] } else { &[FAMILIES, LATE] };
    for group in groups {
        let mut passed: Vec<(f64, Hypothesis)> = Vec::new();
        for family in *group {
            for h in family(&scene) {
                if all.len() >= SCREENS {
                    break;
                }
                let share = scene.share(&h.change);
                all.push(Left { name: h.name.clone(), share });
                if scene.goes_on(share, &h) {
                    passed.push((share, h));
                }
            }
        }
        passed.sort_by(|a, b| a.0.total_cmp(&b.0));
        passed.truncate(FULL);
        let mut accepted: Vec<Hypothesis> =
            passed.into_iter().map(|(_, h)| h).filter(|h| judge.accepts(&scene, h)).collect();
        if !accepted.is_empty() {
            let first = accepted.remove(0);
            // One name may have several ways to be true.
            let mut others: Vec<String> = Vec::new();
            for h in accepted {
                if h.name != first.name && !others.contains(&h.name) {
                    others.push(h.name);
                }
            }
            let mut rest: Vec<Left> =
                all.iter().filter(|l| l.name != first.name && !others.contains(&l.name)).cloned().collect();
            rest.sort_by(|a, b| a.share.total_cmp(&b.share));
            let cause = Cause {
                name: first.name,
                family: first.family,
                text: first.text,
                effect: first.effect,
                tried: all.len() + scene.aside(),
                runner_up: rest.into_iter().next(),
                ambiguous_with: others,
            };
            known.learn(&cause);
            return Diagnosis::Cause(cause);
        }
    }
    let tried = all.len() + scene.aside();
    all.sort_by(|a, b| a.share.total_cmp(&b.share));
    all.truncate(3);
    Diagnosis::Unexplained { tried, best: all }
}

/// ln of the smallest p-value of a unit; −∞ where a bound is broken.
fn worst(e: &Evidence, name: &dyn Fn(usize) -> Option<RowName>) -> f64 {
    if e.tally.beyond > 0 || e.unlikely > 0 {
        return f64::NEG_INFINITY;
    }
    e.tests(name).iter().map(|t| t.log_p).fold(0.0, f64::min)
}

/// Decides whether a tensor passes under a hypothesis.
struct Judge<'a> {
    log_alpha: f64,
    name: &'a dyn Fn(usize) -> Option<RowName>,
    base: f64,
}

impl Judge<'_> {
    /// Whether the tensor passes as a clean one would, and did not before.
    fn accepts(&self, scene: &Scene, h: &Hypothesis) -> bool {
        h.change.held(scene.id, scene.tensor).iter().all(|(id, tensor)| {
            let counted = h.change.with(scene.of, None, |of| of.compare(*id, tensor, None));
            let Some(e) = counted.get(&scene.phase) else { return false };
            // What reads memory that nobody wrote predicts NaN; half of the elements still have to be numbers.
            let nan = if h.family == keys::TABLE { e.tally.elements / 2 } else { scene.nan };
            if *id == scene.id && (e.tally.elements != scene.elements || e.tally.nan > nan) {
                return false;
            }
            let clean = !e.suspect(self.log_alpha, &e.tests(self.name));
            clean && worst(e, self.name) - self.base > BETTER
        })
    }
}
