/*!
Clean runs: is a correct engine ever accused, and are p-values as rare as they say?

Every p-value of every run is counted by its family. A family misses when more of its tests lie below a level than
a binomial law with the allowed share would give in one family of ten thousand ([`CHANCE`]), so that a family of a few
hundred tests is not failed by luck; all tests together are held against the allowed share itself. Verdicts
have no allowance: `exact` and `rounding` are right, what gives no verdict (`inconclusive`, and `not compared` where f16
overflowed to NaN on both sides) is counted and shown, anything else is an alarm.
*/

use super::layers::Made;
use super::setup::{Chosen, Layers, Setup, draw, engine_options, run_options};
use super::{Engines, PValue, binomial, judge, p_values};
use crate::case::Case;
use crate::check::{self, CheckError, Options};
use crate::engine::Description;
use crate::judge::{Unit, Verdict};
use crate::model::{Layer, Model, Reading};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;

/// Levels, and the share of tests that may lie below each.
pub const ALLOWED: [(f64, f64); 2] = [(1e-2, 1.5e-2), (1e-3, 2.5e-3)];
/// Chance that a family whose true share is the allowed one is failed, level by level.
pub const CHANCE: f64 = 1e-4;
/// Alarms that are kept with their details.
const KEPT: usize = 100;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Runs.
    pub runs: u64,
    /// Number of the first one.
    pub first: u64,
    /// Seed of everything.
    pub seed: u64,
    /// What all runs share: engine, reading.
    pub base: Options,
}

/// Files whose layers are used; none: layers are made up.
pub struct Source<'a> {
    /// Models with their paths.
    pub models: Vec<(String, &'a Model)>,
    /// How their numbers are read.
    pub reading: Reading,
}

/// Something that a clean run should not have.
#[derive(Clone, Debug, Serialize)]
pub struct Remark {
    /// Number of the run.
    pub run: u64,
    /// What the judge said, of what.
    pub what: String,
    /// What the run was.
    pub setup: String,
    /// The command that repeats it.
    pub repeat: String,
}

/// p-values of a family below a level.
#[derive(Clone, Debug, Serialize)]
pub struct Below {
    /// Level.
    pub level: f64,
    /// Tests below it.
    pub count: u64,
    /// Their share.
    pub share: f64,
    /// The most that there may be.
    pub most: u64,
}

/// A family of tests.
#[derive(Clone, Debug, Serialize)]
pub struct Family {
    /// Name, or `all`.
    pub name: String,
    /// Tests.
    pub tests: u64,
    /// Those below each level.
    pub below: Vec<Below>,
    /// The smallest p as a power of ten; none without tests.
    pub smallest_log10: Option<f64>,
    /// Which test had it, in which run.
    pub smallest: Option<Remark>,
    /// Tests whose p-value is not a number from 0 to 1.
    pub invalid: u64,
}

impl Family {
    /// Whether it is as it should be.
    pub fn holds(&self) -> bool {
        self.invalid == 0 && self.below.iter().all(|b| b.count <= b.most)
    }
}

/// The whole study.
#[derive(Clone, Debug, Serialize)]
pub struct Calibration {
    /// Name and version of this form.
    pub schema: &'static str,
    /// Version of the program.
    pub version: &'static str,
    /// The engine.
    pub engine: Option<Description>,
    /// The contract that was judged, as it was asked for.
    pub contract: String,
    /// Layers: made up, or the files.
    pub layers: Vec<String>,
    /// Runs.
    pub runs: u64,
    /// Number of the first.
    pub first: u64,
    /// Seed.
    pub seed: u64,
    /// Whether every figure is reached.
    pub ok: bool,
    /// What is missed, in words.
    pub missed: Vec<String>,
    /// Runs by verdict.
    pub runs_by_verdict: BTreeMap<Verdict, u64>,
    /// Units by verdict.
    pub units_by_verdict: BTreeMap<Verdict, u64>,
    /// False alarms, the first hundred.
    pub alarms: Vec<Remark>,
    /// Units without enough power, the first hundred.
    pub inconclusive: Vec<Remark>,
    /// All tests, then family by family.
    pub families: Vec<Family>,
    /// Wall time.
    pub seconds: f64,
}

/// A run broke: which, and the command that repeats it.
#[derive(Debug, thiserror::Error)]
#[error("clean run {number} gave no verdict: {error}\n  where: {repeat}\n  do: repeat that one run")]
pub struct RunError {
    /// Number.
    pub number: u64,
    /// Why.
    pub error: CheckError,
    /// Command.
    pub repeat: String,
}

/// What is kept of one run.
struct Judged {
    number: u64,
    setup: String,
    repeat: String,
    engine: Description,
    verdict: Verdict,
    /// Title and verdict of each unit, and why.
    units: Vec<(String, Verdict, String)>,
    p: Vec<PValue>,
}

/// Makes the runs. `progress` hears of each that has ended, in any order.
pub fn calibrate(
    source: &Source,
    plan: &Plan,
    engines: &Engines,
    progress: &(dyn Fn() + Sync),
) -> Result<Calibration, RunError> {
    let started = std::time::Instant::now();
    let mut gather = Gather::default();
    // A few runs at a time: memory does not grow with their number, and the order of results is fixed.
    let at_once = 4 * rayon::current_num_threads() as u64;
    let end = plan.first + plan.runs;
    let mut from = plan.first;
    while from < end {
        let numbers = from..(from + at_once).min(end);
        from = numbers.end;
        let judged: Vec<Result<Judged, RunError>> = numbers
            .into_par_iter()
            .map(|number| {
                let judged = source.run(plan, number, engines);
                progress();
                judged
            })
            .collect();
        for j in judged {
            gather.take(j?);
        }
    }
    let layers = match source.models.is_empty() {
        true => vec!["made up".to_string()],
        false => source.models.iter().map(|m| m.0.clone()).collect(),
    };
    Ok(gather.finish(plan, layers, started.elapsed().as_secs_f64()))
}

impl Source<'_> {
    /// Layers to choose from: (model, index).
    fn layers(&self) -> Vec<(usize, usize)> {
        let of = |(m, (_, model)): (usize, &(String, &Model))| {
            model.mla_layers().into_iter().map(move |l| (m, l)).collect::<Vec<_>>()
        };
        self.models.iter().enumerate().flat_map(of).collect()
    }

    fn run(&self, plan: &Plan, number: u64, engines: &Engines) -> Result<Judged, RunError> {
        let all = self.layers();
        let longest = self.models.iter().filter_map(|m| m.1.top_k).min().unwrap_or(usize::MAX);
        let layers = match all.is_empty() {
            true => Layers::Made,
            false => Layers::Given { count: all.len(), longest, reading: &self.reading },
        };
        let Setup { layer, options } = draw(plan.seed, number, layers, &plan.base);
        let contract = engine_options(&plan.base);
        let alone = format!("mla-check calibrate --seed {} --first {number} --runs 1{contract}", plan.seed);
        match layer {
            Chosen::Made { shape, data, seed } => {
                let made = Made::new(shape, data, seed);
                let setup = format!("{}, {}: {}", shape.name, data.name(), run_options(&options));
                let harden = |case: &mut Case| data.harden(case, &shape.geometry, options.dtype);
                one(number, &made.layer(), &options, engines, &harden, setup, alone)
            }
            Chosen::Given(nth) => {
                let (m, index) = all[nth];
                let (path, model) = &self.models[m];
                let repeat = format!("mla-check run {path} --layer {index} {}", run_options(&options));
                let stored = model.weights(index).map_err(|e| RunError {
                    number,
                    error: e.into(),
                    repeat: repeat.clone(),
                })?;
                let layer = Layer { index, spec: model.spec(&options.reading), weights: &stored };
                let setup = format!("{path}, layer {index}");
                one(number, &layer, &options, engines, &|_| (), setup, repeat)
            }
        }
    }
}

fn one(
    number: u64,
    layer: &Layer,
    options: &Options,
    engines: &Engines,
    harden: &dyn Fn(&mut Case),
    setup: String,
    repeat: String,
) -> Result<Judged, RunError> {
    let fail = |error: CheckError| RunError { number, error, repeat: repeat.clone() };
    let engine = engines(options).map_err(|e| fail(e.into()))?;
    let outcome = check::draw(layer, options).map_err(CheckError::from).and_then(|mut case| {
        harden(&mut case);
        judge(layer, &case, options, engine.as_ref(), true)
    });
    let outcome = match outcome {
        Ok(o) => o,
        Err(error) => return Err(fail(error)),
    };
    let units = &outcome.units;
    Ok(Judged {
        number,
        setup,
        repeat,
        engine: engine.describe(),
        verdict: outcome.verdict,
        p: units.iter().flat_map(p_values).collect(),
        units: units.iter().map(|u| (u.title(), u.verdict, why(u))).collect(),
    })
}

/// What is to be said of a unit: its note, and its first two pieces of evidence.
fn why(unit: &Unit) -> String {
    let worst = unit.worst.as_ref().map(|w| format!("worst {:e} for {:e}", w.engine, w.reference));
    let all = unit.note.iter().chain(unit.evidence.iter().take(2)).chain(&worst);
    all.filter(|t| !t.is_empty()).cloned().collect::<Vec<_>>().join("; ")
}

#[derive(Default)]
struct Gather {
    engine: Option<Description>,
    runs: BTreeMap<Verdict, u64>,
    units: BTreeMap<Verdict, u64>,
    alarms: Vec<Remark>,
    alarmed: u64,
    inconclusive: Vec<Remark>,
    families: BTreeMap<&'static str, Counted>,
    all: Counted,
}

#[derive(Default)]
struct Counted {
    tests: u64,
    below: [u64; ALLOWED.len()],
    invalid: u64,
    smallest: Option<(f64, Remark)>,
}

impl Counted {
    fn take(&mut self, p: &PValue, remark: &dyn Fn(&str) -> Remark) {
        self.tests += 1;
        if p.log_p.is_nan() || p.log_p > 1e-9 {
            self.invalid += 1;
            return;
        }
        for (count, (level, _)) in self.below.iter_mut().zip(ALLOWED) {
            *count += u64::from(p.log_p < libm::log(level));
        }
        if self.smallest.as_ref().is_none_or(|(s, _)| p.log_p < *s) {
            self.smallest = Some((p.log_p, remark(&p.name)));
        }
    }

    /// `chance`: None takes the allowed share as it is.
    fn family(self, name: &str, chance: Option<f64>) -> Family {
        let n = self.tests - self.invalid;
        let below = self.below.iter().zip(ALLOWED).map(|(&count, (level, allowed))| Below {
            level,
            count,
            share: count as f64 / n.max(1) as f64,
            most: match chance {
                None => (allowed * n as f64).floor() as u64,
                Some(chance) => binomial::most(n, allowed, chance),
            },
        });
        Family {
            name: name.to_string(),
            tests: self.tests,
            below: below.collect(),
            smallest_log10: self.smallest.as_ref().map(|(s, _)| s / std::f64::consts::LN_10),
            smallest: self.smallest.map(|s| s.1),
            invalid: self.invalid,
        }
    }
}

impl Gather {
    fn take(&mut self, run: Judged) {
        let remark = |what: String| Remark {
            run: run.number,
            what,
            setup: run.setup.clone(),
            repeat: run.repeat.clone(),
        };
        self.engine.get_or_insert_with(|| run.engine.clone());
        *self.runs.entry(run.verdict).or_default() += 1;
        let mut accused = false;
        for (title, verdict, note) in &run.units {
            *self.units.entry(*verdict).or_default() += 1;
            let kept = match verdict {
                Verdict::Exact | Verdict::Rounding | Verdict::AfterFault => continue,
                Verdict::Inconclusive | Verdict::NotCompared => &mut self.inconclusive,
                _ => {
                    accused = true;
                    &mut self.alarms
                }
            };
            if kept.len() < KEPT {
                let note = if note.is_empty() { String::new() } else { format!(": {note}") };
                kept.push(remark(format!("{title}: {verdict}{note}")));
            }
        }
        let clean = matches!(
            run.verdict,
            Verdict::Exact | Verdict::Rounding | Verdict::Inconclusive | Verdict::NotCompared
        );
        if !clean && !accused {
            self.alarms.push(remark(format!("the run: {}", run.verdict)));
        }
        self.alarmed += u64::from(!clean || accused);
        for p in &run.p {
            let remark = |what: &str| remark(what.to_string());
            self.families.entry(p.family).or_default().take(p, &remark);
            self.all.take(p, &remark);
        }
    }

    fn finish(self, plan: &Plan, layers: Vec<String>, seconds: f64) -> Calibration {
        // Few tests in all: luck is no reason to fail them either.
        let few = (self.all.tests as f64) * ALLOWED[1].0 < 10.0;
        let mut families = vec![self.all.family("all", few.then_some(CHANCE))];
        families.extend(self.families.into_iter().map(|(name, c)| c.family(name, Some(CHANCE))));
        let mut missed = Vec::new();
        if self.alarmed > 0 {
            missed.push(format!("{} of {} clean runs were called something else", self.alarmed, plan.runs));
        }
        for f in families.iter().filter(|f| !f.holds()) {
            for b in f.below.iter().filter(|b| b.count > b.most) {
                missed.push(format!(
                    "{}: {} of {} p-values below {:e}, at most {} may be",
                    f.name, b.count, f.tests, b.level, b.most
                ));
            }
            if f.invalid > 0 {
                missed.push(format!("{}: {} p-values are no probabilities", f.name, f.invalid));
            }
        }
        Calibration {
            schema: "mla-check.calibrate/1",
            version: env!("CARGO_PKG_VERSION"),
            engine: self.engine,
            layers,
            runs: plan.runs,
            contract: plan.base.contract.to_string(),
            first: plan.first,
            seed: plan.seed,
            ok: missed.is_empty(),
            missed,
            runs_by_verdict: self.runs,
            units_by_verdict: self.units,
            alarms: self.alarms,
            inconclusive: self.inconclusive,
            families,
            seconds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(runs: impl Iterator<Item = (Verdict, Vec<PValue>)>) -> Calibration {
        let mut gather = Gather::default();
        let mut n = 0;
        for (number, (verdict, p)) in runs.enumerate() {
            n += 1;
            gather.take(Judged {
                number: number as u64,
                setup: String::new(),
                repeat: String::new(),
                engine: Description::plain("none", String::new()),
                verdict,
                units: vec![("attn_out".into(), verdict, String::new())],
                p,
            });
        }
        let plan = Plan { runs: n, first: 0, seed: 0, base: Options::default() };
        gather.finish(&plan, Vec::new(), 0.0)
    }

    fn p(family: &'static str, p: f64) -> PValue {
        PValue { family, name: "t".into(), log_p: p.ln() }
    }

    /// Runs of 100 p-values that are as uniform as a hundred numbers can be, to the given power.
    fn spread(family: &'static str, power: f64) -> Vec<PValue> {
        (0..100).map(|i| p(family, ((f64::from(i) + 0.5) / 100.0).powf(power))).collect()
    }

    #[test]
    fn uniform_p_values_hold_and_too_many_small_ones_do_not() {
        let good = gathered((0..50).map(|_| (Verdict::Rounding, spread("flips", 1.0))));
        assert!(good.ok, "{:?}", good.missed);
        assert_eq!((good.families[0].tests, good.families[0].below[0].count), (5_000, 50));
        // p² is below 1e-2 in a tenth of the cases.
        let bad = gathered((0..50).map(|_| (Verdict::Rounding, spread("flips", 2.0))));
        assert!(
            !bad.ok && bad.missed.iter().any(|m| m.starts_with("flips: 500 of 5000")),
            "{:?}",
            bad.missed
        );
        // One family that fails is not hidden among many that hold.
        let hidden = (0..50).map(|i| {
            let mut p = spread("gain T1", 1.0);
            p.extend(if i < 2 { spread("eps T1", 2.0) } else { Vec::new() });
            (Verdict::Rounding, p)
        });
        let hidden = gathered(hidden);
        // 20 of 200 below 1e-2, and 6 below 1e-3: (2.5/100)² is.
        assert_eq!(hidden.missed.len(), 2, "{:?}", hidden.missed);
        assert!(hidden.missed[0].starts_with("eps T1: 20 of 200"), "{:?}", hidden.missed);
        assert!(hidden.missed[1].starts_with("eps T1: 6 of 200"), "{:?}", hidden.missed);
    }

    #[test]
    fn a_small_family_is_not_failed_by_luck() {
        // Four of 200 below 1e-2 are 2 %: more than 1.5 %, and no proof of it.
        let lucky = gathered((0..2).map(|_| {
            let mut all = spread("scale T1", 1.0);
            all[1] = p("scale T1", 2e-3);
            (Verdict::Exact, all)
        }));
        assert!(lucky.families[1].below[0].share > ALLOWED[0].1);
        assert!(lucky.ok, "{:?}", lucky.missed);
    }

    #[test]
    fn alarms_fail_inconclusive_is_counted_and_nonsense_is_no_probability() {
        let verdicts = [Verdict::Exact, Verdict::Rounding, Verdict::Inconclusive, Verdict::NotCompared];
        let clean = gathered(verdicts.iter().map(|v| (*v, Vec::new())));
        assert!(clean.ok && clean.inconclusive.len() == 2 && clean.alarms.is_empty());
        for v in [Verdict::Fault, Verdict::ContractBroken, Verdict::ContractDiffers] {
            let bad = gathered([(Verdict::Exact, Vec::new()), (v, Vec::new())].into_iter());
            assert!(!bad.ok && bad.alarms.len() == 1 && bad.alarms[0].run == 1, "{v}");
        }
        let nan = vec![PValue { family: "flips", name: "t".into(), log_p: f64::NAN }];
        assert!(!gathered([(Verdict::Exact, nan)].into_iter()).ok);
        let above = vec![p("flips", 1.5)];
        assert!(!gathered([(Verdict::Exact, above)].into_iter()).ok);
    }
}
