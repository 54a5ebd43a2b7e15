/*!
How small a fault is found: sizes fall in steps of 1-2-5, and the smallest that is found in at least 95 % of the runs
is the figure.

The first seed walks down until it misses; then all seeds are run around that place, upwards until a size is
found by enough of them, then downwards until one is not. A size is given up as soon as more than 5 % of
its seeds have missed. So the size below the figure was tried and failed, and the figure itself has all seeds; larger
sizes have at least the first seed. What gates say is counted on the same runs.

Clean runs come first: a judge (or a gate) that rejects those finds nothing, whatever it says of faults.
*/

use super::subjects::Subject;
use super::{Outcome, accuses};
use crate::case::Case;
use crate::check::{CheckError, Options};
use crate::fault::Fault;
use crate::judge::gates::RULES;
use mla_reference::{Regime, Stage};
use serde::Serialize;
use std::collections::BTreeMap;

/// Share of runs in which a size must be found.
pub const SHARE: f64 = 0.95;
/// Faults whose figure is held against the goal.
pub const HELD: [&str; 2] = ["softmax-scale", "output-gain"];

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Runs of a size.
    pub seeds: u64,
    /// Regimes, one by one.
    pub regimes: Vec<Regime>,
    /// Faults.
    pub subjects: Vec<&'static Subject>,
    /// What all runs share. Its regimes, seed and fault are replaced.
    pub base: Options,
    /// The largest size of [`HELD`] that reaches the figure.
    pub goal: f64,
}

/// Makes one run: the case that the options ask for, and what the judge and the gates say.
pub trait Runner {
    /// The case of these options.
    fn case(&self, options: &Options) -> Result<Case, CheckError>;
    /// Judges it.
    fn run(&self, case: &Case, options: &Options) -> Result<Outcome, CheckError>;
}

/// Runs of one size.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Tried {
    /// Size; 0 where the fault has none.
    pub size: f64,
    /// Runs.
    pub runs: u64,
    /// Runs in which the judge found the fault at the right tensor.
    pub found: u64,
    /// Runs in which it accused something, right or wrong.
    pub accused: u64,
    /// Runs that each gate rejected.
    pub gates: [u64; RULES.len()],
    /// A fault that was missed, as `--fault` takes it, and its seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missed: Option<(String, u64)>,
}

impl Tried {
    fn enough(&self, seeds: u64) -> bool {
        self.found as f64 >= SHARE * seeds as f64
    }
    fn hopeless(&self, seeds: u64) -> bool {
        (self.runs - self.found) as f64 > (1.0 - SHARE) * seeds as f64 + 1e-9
    }
}

/// One fault in one regime.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Fault.
    pub fault: &'static str,
    /// What a size is.
    pub unit: &'static str,
    /// Regime.
    pub regime: Regime,
    /// The smallest size found often enough; none: no size was. A fault without sizes has 0.
    pub smallest: Option<f64>,
    /// Smallest size that each gate rejects in at least 95 % of the runs made of it and of every larger one; none
    /// also where it rejects clean runs.
    pub gates: [Option<f64>; RULES.len()],
    /// All sizes, the largest first.
    pub tried: Vec<Tried>,
}

/// Clean runs of a regime.
#[derive(Clone, Debug, Serialize)]
pub struct Clean {
    /// Regime.
    pub regime: Regime,
    /// Runs.
    pub runs: u64,
    /// Runs in which the judge accused something.
    pub accused: u64,
    /// Runs that each gate rejected, by the tensors of each fault.
    pub gates: BTreeMap<&'static str, [u64; RULES.len()]>,
}

/// The whole study.
#[derive(Clone, Debug, Serialize)]
pub struct Sensitivity {
    /// Name and version of this form.
    pub schema: &'static str,
    /// Version of the program.
    pub version: &'static str,
    /// Seeds of a size.
    pub seeds: u64,
    /// The contract that was judged, as it was asked for.
    pub contract: String,
    /// Batch.
    pub batch: String,
    /// Dtype.
    pub dtype: &'static str,
    /// Gates, in the order of columns.
    pub gates: [&'static str; RULES.len()],
    /// The largest size that reaches the figure, for the faults that are held against it.
    pub goal: f64,
    /// Whether every figure is reached.
    pub ok: bool,
    /// What is missed, in words.
    pub missed: Vec<String>,
    /// Clean runs.
    pub clean: Vec<Clean>,
    /// Fault by fault.
    pub rows: Vec<Row>,
    /// Runs in all.
    pub runs: u64,
    /// Wall time.
    pub seconds: f64,
}

/// Makes the study. `progress` hears what is run.
pub fn sensitivity(
    plan: &Plan,
    runner: &dyn Runner,
    progress: &dyn Fn(&str),
) -> Result<Sensitivity, CheckError> {
    let started = std::time::Instant::now();
    let mut study = Study { plan, runner, progress, runs: 0 };
    let (mut clean, mut rows) = (Vec::new(), Vec::new());
    for &regime in &plan.regimes {
        let of_regime = study.clean(regime)?;
        for subject in &plan.subjects {
            let unusable = of_regime.gates.get(subject.name).copied().unwrap_or_default();
            rows.push(study.row(subject, regime, unusable)?);
        }
        clean.push(of_regime);
    }
    // Fault by fault, regimes beside each other.
    rows.sort_by_key(|r| plan.subjects.iter().position(|s| s.name == r.fault));
    let missed = missed(plan, &clean, &rows);
    Ok(Sensitivity {
        schema: "mla-check.sensitivity/1",
        version: env!("CARGO_PKG_VERSION"),
        seeds: plan.seeds,
        contract: plan.base.contract.to_string(),
        batch: plan.base.batch.to_string(),
        dtype: plan.base.dtype.name(),
        gates: RULES,
        goal: plan.goal,
        ok: missed.is_empty(),
        missed,
        clean,
        rows,
        runs: study.runs,
        seconds: started.elapsed().as_secs_f64(),
    })
}

fn missed(plan: &Plan, clean: &[Clean], rows: &[Row]) -> Vec<String> {
    let mut all = Vec::new();
    for c in clean.iter().filter(|c| c.accused > 0) {
        all.push(format!("{}: {} of {} clean runs were accused", c.regime.name(), c.accused, c.runs));
    }
    for r in rows.iter().filter(|r| HELD.contains(&r.fault)) {
        let reached = r.smallest.is_some_and(|s| s <= plan.goal * (1.0 + 1e-9));
        if !reached {
            let found = r.smallest.map_or("none is found".to_string(), |s| format!("the smallest is {s:e}"));
            all.push(format!("{}, {}: {found}, the figure is {:e}", r.fault, r.regime.name(), plan.goal));
        }
    }
    all
}

struct Study<'a> {
    plan: &'a Plan,
    runner: &'a dyn Runner,
    progress: &'a dyn Fn(&str),
    runs: u64,
}

impl Study<'_> {
    fn options(&self, regime: Regime, seed: u64, shared: bool, gates: Vec<Stage>) -> Options {
        let base = &self.plan.base;
        // Stages that forms share come without any form.
        let forms = if shared { Vec::new() } else { base.forms.clone() };
        Options { regimes: vec![regime], seed: base.seed + seed, forms, gates, fault: None, ..base.clone() }
    }

    fn clean(&mut self, regime: Regime) -> Result<Clean, CheckError> {
        let mut gated: Vec<Stage> = self.plan.subjects.iter().flat_map(|s| s.gated()).collect();
        gated.sort();
        gated.dedup();
        let mut clean = Clean { regime, runs: 0, accused: 0, gates: BTreeMap::new() };
        for seed in 0..self.plan.seeds {
            (self.progress)(&format!("{}, clean, seed {seed}", regime.name()));
            let options = self.options(regime, seed, false, gated.clone());
            let case = self.runner.case(&options)?;
            let outcome = self.runner.run(&case, &options)?;
            self.runs += 1;
            clean.runs += 1;
            clean.accused += u64::from(outcome.units.iter().any(|u| accuses(u.verdict)));
            for subject in &self.plan.subjects {
                let counts = clean.gates.entry(subject.name).or_default();
                counts.iter_mut().zip(subject.rejected(&outcome.gates)).for_each(|(n, r)| *n += u64::from(r));
            }
        }
        Ok(clean)
    }

    /// Runs a size with seeds until it is decided, going on from what was run of it.
    fn size(
        &mut self,
        subject: &'static Subject,
        regime: Regime,
        tried: &mut Tried,
        upto: u64,
    ) -> Result<(), CheckError> {
        let seeds = self.plan.seeds;
        while tried.runs < upto && !tried.hopeless(seeds) {
            let seed = tried.runs;
            (self.progress)(&format!("{}, {} {:e}, seed {seed}", regime.name(), subject.name, tried.size));
            let mut options = self.options(regime, seed, subject.shared, subject.gated().collect());
            let case = self.runner.case(&options)?;
            let fault: Fault = subject.fault(tried.size, &case, options.seed)?;
            options.fault = Some(fault.clone());
            let outcome = self.runner.run(&case, &options)?;
            self.runs += 1;
            tried.runs += 1;
            let found = subject.found(&outcome.units, &options.forms);
            tried.found += u64::from(found);
            tried.accused += u64::from(outcome.units.iter().any(|u| accuses(u.verdict)));
            if !found {
                tried.missed.get_or_insert((fault.text, options.seed));
            }
            let rejected = subject.rejected(&outcome.gates);
            tried.gates.iter_mut().zip(rejected).for_each(|(n, r)| *n += u64::from(r));
        }
        Ok(())
    }

    fn row(
        &mut self,
        subject: &'static Subject,
        regime: Regime,
        clean_rejected: [u64; RULES.len()],
    ) -> Result<Row, CheckError> {
        let seeds = self.plan.seeds;
        let ladder = subject.ladder();
        let mut tried: Vec<Tried> = Vec::new();
        // The first seed down to where it misses.
        for &size in &ladder {
            let mut t = Tried { size, ..Tried::default() };
            self.size(subject, regime, &mut t, 1)?;
            let lost = t.found == 0;
            tried.push(t);
            if lost {
                break;
            }
        }
        // All seeds: up to a size that enough of them find, then down to one that they do not.
        let mut at = tried.len().saturating_sub(if tried.len() > 1 { 2 } else { 1 });
        loop {
            self.size(subject, regime, &mut tried[at], seeds)?;
            if tried[at].enough(seeds) || at == 0 {
                break;
            }
            at -= 1;
        }
        let mut smallest = None;
        while tried[at].enough(seeds) {
            smallest = Some(tried[at].size);
            at += 1;
            if at == tried.len() {
                let Some(&size) = ladder.get(at) else { break };
                tried.push(Tried { size, ..Tried::default() });
            }
            self.size(subject, regime, &mut tried[at], seeds)?;
        }
        let gates = std::array::from_fn(|g| {
            if clean_rejected[g] > 0 {
                return None;
            }
            let rejects = |t: &&Tried| t.gates[g] as f64 >= SHARE * t.runs as f64;
            tried.iter().take_while(rejects).last().map(|t| t.size)
        });
        Ok(Row { fault: subject.name, unit: subject.unit, regime, smallest, gates, tried })
    }
}
