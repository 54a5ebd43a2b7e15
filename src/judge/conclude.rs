/*!
From evidence to verdicts, once for the whole run.

All p-values of the run share one budget: Holm's procedure rejects at most the share α of clean runs, however many
tests there are and however they depend on each other. A tenth of α is kept for statistical bounds, whose derivation
leaves them less. Where there is no evidence, power decides: the smallest gain (every tensor) and the smallest softmax
scale (attention, lse) that would have been found in 95 % of cases are held against the promise. At or below it:
`rounding`; otherwise `inconclusive`, with what would mend it. Other sizes are printed and never decide.
*/

use super::evidence::{Direction, Evidence, LostKeys, Measured};
use super::stats::direction::{Kind, floor};
use super::stats::holm::holm;
use super::stats::power::{mde, mean_in_ulps, rows_needed, slice_mde};
use super::stats::score::Fineness;
use super::unit::{Explained, Unit};
use super::verdict::Verdict;
use mla_numeric::DType;
use serde::{Deserialize, Serialize};

/// Median bound above which a 16-bit tensor with emulated casts says too little, in ulps.
const DULL: f64 = 2.0;

/// What a run may get wrong, and what it promises to see.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// Probability of any false alarm in the run.
    pub alpha: f64,
    /// Size of gain and scale that must be visible.
    pub promise: f64,
}

impl Default for Budget {
    fn default() -> Self {
        Budget { alpha: 1e-6, promise: super::stats::power::PROMISE }
    }
}

impl Budget {
    /// ln of the level of all tests together.
    pub fn log_alpha(&self) -> f64 {
        libm::log(0.9 * self.alpha)
    }
}

/// The smallest faults that would have been seen in 95 % of cases.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Power {
    /// Factor − 1 on the whole tensor; None: no size is visible.
    pub gain: Option<f64>,
    /// Factor − 1 on the softmax scale; None: no size is visible, or not applicable.
    pub scale: Option<f64>,
    /// Whether a scale can be seen here at all: not in tensors other than attention's, nor with one visible key.
    pub scale_applies: bool,
    /// Factor − 1 on the rope part of the scores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_weight: Option<f64>,
    /// Relative change of eps of a norm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eps: Option<f64>,
    /// Gain of the head where it is hardest to see.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_gain: Option<f64>,
    /// Random relative disturbance of one row (all heads), where rows are tested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row: Option<f64>,
    /// Change of one element, in units of its row's rms, that every bound would see.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub element: Option<f64>,
    /// Share of the keys of all contexts of which the loss of any one would have been seen, in 16-bit outputs of attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost_key: Option<f64>,
    /// Elements that directions looked at.
    pub sampled: u64,
}

/// What power is computed from.
#[derive(Clone, Debug)]
pub struct Basis {
    measured: Vec<Measured>,
    steps: f64,
    clean: bool,
    emulated: bool,
    dtype: DType,
    row: Option<(u64, f64)>,
    head: Option<(u64, f64)>,
    element: f64,
    keys: LostKeys,
    sampled: u64,
    rows: usize,
}

impl Basis {
    /// Of one unit; `rows`: rows of its phase.
    pub fn new(e: &Evidence, dtype: DType, rows: usize) -> Basis {
        Basis {
            measured: e.measured(),
            steps: e.steps,
            clean: e.clean(),
            emulated: e.emulated(),
            dtype,
            row: e.row_slice().map(|f| (f.elements, f.limit())),
            head: e.head_slice().map(|f| (f.elements, f.limit())),
            element: e.element,
            keys: e.keys_at_stake(),
            sampled: e.sampled,
            rows,
        }
    }

    /// The smallest visible size along a direction, of T1 and, where it may be believed, T2.
    fn smallest(&self, direction: Direction, head: bool, log_alpha: f64) -> Option<f64> {
        let size = |m: &Measured| {
            let kind = if head { Kind::Local } else { direction.kind() };
            mde(kind, &m.estimate, self.steps, m.fineness, self.clean, log_alpha) + m.jump
        };
        let usable = |m: &&Measured| {
            m.direction == direction
                && m.head.is_some() == head
                && (m.fineness == Fineness::Coarse || self.clean)
        };
        let all = self.measured.iter().filter(usable).map(size);
        // Of the whole tensor the better test counts; of heads the worst head.
        all.reduce(if head { f64::max } else { f64::min })
    }

    /// All of it, at the level of one test.
    fn power(&self, log_alpha: f64) -> Power {
        let finite = |v: Option<f64>| v.filter(|v| v.is_finite());
        let slice = |of: Option<(u64, f64)>| {
            let (n, limit) = of.filter(|_| !Evidence::wide(self.dtype))?;
            finite(Some(slice_mde(n as usize, limit, log_alpha, mean_in_ulps(self.dtype))))
        };
        let head = match (finite(self.smallest(Direction::Gain, true, log_alpha)), slice(self.head)) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Power {
            gain: finite(self.smallest(Direction::Gain, false, log_alpha)),
            scale: finite(self.smallest(Direction::Scale, false, log_alpha)),
            scale_applies: self.measured.iter().any(|m| m.direction == Direction::Scale),
            rope_weight: finite(self.smallest(Direction::RopeWeight, false, log_alpha)),
            eps: finite(self.smallest(Direction::Eps, false, log_alpha)),
            head_gain: head,
            row: slice(self.row),
            element: (self.element > 0.0).then_some(self.element),
            lost_key: self.keys.seen(log_alpha),
            sampled: self.sampled,
        }
    }

    /// Why the power is not enough, with what would mend it.
    fn short(&self, power: &Power, promise: f64, median_bound: Option<f64>) -> Vec<String> {
        let mut why = Vec::new();
        let mut hold = |name: &str, size: Option<f64>| {
            if size.is_some_and(|s| s <= promise) {
                return;
            }
            let least = floor(Kind::Global, self.steps, Fineness::Coarse);
            let mend = match size.and_then(|s| rows_needed(self.rows, s, least, promise)) {
                _ if least >= promise => {
                    format!("no number of rows would do: {least:.0e} is left open by the contract")
                }
                Some(n) if n > self.rows && n < 1_000_000 => {
                    format!("about {n} rows instead of {} would do", self.rows)
                }
                _ => "more requests, or contexts with more than one key that matters, would do".into(),
            };
            let seen =
                size.map_or("no size is visible".into(), |s| format!("the smallest visible is {s:.1e}"));
            why.push(format!("{name}: {seen}, promised is {promise:.0e}; {mend}"));
        };
        hold("gain", power.gain);
        if power.scale_applies {
            hold("scale", power.scale);
        }
        // A cast that may have been anywhere is in every bound: asked to judge without its place, one asks for that.
        let narrow = self.emulated && !Evidence::wide(self.dtype);
        if let Some(m) = median_bound.filter(|m| *m > DULL && narrow) {
            why.push(format!(
                "half of the bounds are wider than {m:.1} ulps (at most {DULL} say something); a contract with fewer \
                 roundings, or a wider dtype, would do"
            ));
        }
        why
    }
}

/// Gives every unit its verdict; `explained`: that of evidence which another contract explains, or another convention.
pub fn conclude(units: &mut [Unit], budget: Budget, explained: [Verdict; 2]) {
    let at: Vec<(usize, usize)> =
        units.iter().enumerate().flat_map(|(u, unit)| (0..unit.tests.len()).map(move |t| (u, t))).collect();
    let logs: Vec<f64> = at.iter().map(|(u, t)| units[*u].tests[*t].log_p).collect();
    // Each contract that a search tried might have been the one that passes.
    let all = at.len() + units.iter().map(|u| u.searched).sum::<usize>();
    for i in holm(&logs, budget.log_alpha(), all) {
        let (u, t) = at[i];
        units[u].tests[t].rejected = true;
    }
    let one = budget.log_alpha() - libm::log(all.max(1) as f64);
    for unit in units.iter_mut() {
        let mut rejected: Vec<&super::evidence::Test> = unit.tests.iter().filter(|t| t.rejected).collect();
        rejected.sort_by(|a, b| a.log_p.total_cmp(&b.log_p));
        let words = rejected.iter().map(|t| {
            let p = t.log_p / std::f64::consts::LN_10;
            let ln = if t.family.starts_with("flips") {
                format!("{:.2e} of them, honest is up to {:.2e}", t.size, t.limit)
            } else {
                format!("{:+.2e}, honest is up to {:.1e}", t.size, t.limit)
            };
            format!("{}: {ln}, p = 10^{p:.0}", t.name)
        });
        unit.evidence.extend(words.collect::<Vec<_>>());
        let power = unit.basis.as_ref().map(|b| b.power(one));
        let bad = !unit.evidence.is_empty() || unit.verdict == Verdict::Fault;
        if bad {
            unit.verdict = match &unit.explained {
                Some(Explained::Contract(_)) => explained[0],
                Some(Explained::Convention(_)) => explained[1],
                None => Verdict::Fault,
            };
        } else {
            (unit.explained, unit.found, unit.tried) = (None, None, 0);
            unit.diagnosis = None;
            if let (Some(basis), Some(power), Verdict::Rounding) = (&unit.basis, &power, unit.verdict) {
                let why = basis.short(power, budget.promise, unit.median_bound_ulps);
                if !why.is_empty() {
                    unit.verdict = Verdict::Inconclusive;
                    unit.note = Some(why.join("; "));
                }
            }
        }
        unit.power = power;
        unit.basis = None;
    }
}
