/*!
The fault suite: every fault of the catalogue planted, and what the judge made of it.

Each fault runs beside its clean twin (the same run with no fault), which must pass. Of each it is asked: was it caught, was the
right tensor the first, was its cause named rightly, how small may it be, and what would common measures ([`measures`]) have said
of the same tensors. A cause is right only if every name that was given is; a wrong name anywhere in the run counts as wrong.
*/

pub mod inside;
pub mod measures;
mod outcome;
mod runs;
mod small;

pub use outcome::{Alarm, Count, Naming, Outcome, Score, Suite, Tried};

use crate::check::{CheckError, EngineKind, Options};
use crate::engine::stack::QkvA;
use crate::fault::Fault;
use crate::fault::catalogue::{FAMILIES, Row, Setup};
use crate::fault::text::Mutation;
use crate::judge::Verdict;
use crate::study::Engines;
use measures::Said;
use rayon::prelude::*;
use runs::{Ran, Subject};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Rows of the catalogue: faults that `--fault` plants.
    pub rows: Vec<Row>,
    /// Faults inside kernels.
    pub inside: Vec<&'static Mutation>,
    /// What all runs share: the engine and where it computes.
    pub base: Options,
    /// Whether the smallest size is looked for.
    pub sizes: bool,
}

/// Runs the suite. `progress` hears the name of each fault that was tried, in any order.
///
/// # Errors
/// A clean run that can't be made: the engine is not there, or broke.
pub fn run(plan: &Plan, engines: &Engines, progress: &(dyn Fn(&str) + Sync)) -> Result<Suite, CheckError> {
    let started = std::time::Instant::now();
    let subject = Subject::new();
    let mut setups: Vec<Setup> = Vec::new();
    for row in plan.rows.iter().filter(|r| unfit(r, plan.base.engine).is_none()) {
        if !setups.contains(&row.setup) {
            setups.push(row.setup);
        }
    }
    let twins: Vec<Ran> = setups
        .par_iter()
        .map(|s| subject.run(engines, &options(&plan.base, s), true))
        .collect::<Result<_, _>>()?;
    let twin = |s: &Setup| setups.iter().position(|t| t == s).map(|i| &twins[i]);
    let mut faults: Vec<Tried> = plan
        .rows
        .par_iter()
        .map(|row| {
            let began = std::time::Instant::now();
            let tried = one(plan, (&subject, engines), row, twin(&row.setup));
            progress(row.name);
            Tried { seconds: began.elapsed().as_secs_f64(), ..tried }
        })
        .collect();
    let mut false_alarms: Vec<Alarm> = setups
        .iter()
        .zip(&twins)
        .filter(|(_, ran)| ran.verdict.exit(false) != 0)
        .map(|(s, ran)| Alarm { options: in_words(s), what: ran.alarm() })
        .collect();
    let (inside, alarms, more) = inside::run(&plan.inside, &plan.base, engines, progress)?;
    faults.extend(inside);
    faults.sort_by_key(|t| t.family);
    false_alarms.extend(alarms);
    let score = score(&faults, &false_alarms, twins.len() + more);
    let due = |f: &&crate::fault::catalogue::Family| f.without.is_some();
    Ok(Suite {
        schema: "mla-check.faults/1",
        version: env!("CARGO_PKG_VERSION"),
        engine: plan.base.engine.name(),
        // Nothing that was tried is nothing that held.
        ok: score.caught.of > 0
            && score.caught.n == score.caught.of
            && score.named_wrongly == 0
            && false_alarms.is_empty(),
        score,
        measures: measures::NAMES,
        false_alarms,
        faults,
        without: FAMILIES.iter().filter(due).map(|f| [f.name, f.what, f.without.unwrap_or("")]).collect(),
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// Why an engine can't have a row's fault.
fn unfit(row: &Row, engine: EngineKind) -> Option<String> {
    let fault = Fault::parse(&row.text(None), 0).ok()?;
    (engine != EngineKind::Cpu && fault.needs_seams())
        .then(|| "it acts inside of the engine: only cpu has a seam for it".to_string())
}

/// The options of a setup.
pub fn options(base: &Options, s: &Setup) -> Options {
    Options {
        forms: s.forms.to_vec(),
        batch: s.batch.parse().unwrap_or(base.batch.clone()),
        dtype: s.dtype,
        regimes: vec![s.regime],
        page_size: s.page,
        splits: Some(s.splits),
        qkv_a: if s.stacked { QkvA::Stacked } else { QkvA::Split },
        tp: s.tp,
        context_chunk: s.chunk,
        fault: None,
        ..base.clone()
    }
}

/// A setup as options of `run`.
pub fn in_words(s: &Setup) -> String {
    let form = match s.forms {
        [one] => one.name(),
        _ => "both",
    };
    let mut text = format!(
        "--batch {} --dtype {} --form {form} --regime {} --page-size {} --splits {}",
        s.batch,
        s.dtype,
        s.regime.name(),
        s.page,
        s.splits
    );
    if s.tp > 1 {
        text += &format!(" --tp {}", s.tp);
    }
    if s.stacked {
        text += " --qkv-a stacked";
    }
    if let Some(chunk) = s.chunk {
        text += &format!(" --context-chunk {chunk}");
    }
    text
}

fn one(plan: &Plan, (subject, engines): (&Subject, &Engines), row: &Row, twin: Option<&Ran>) -> Tried {
    let mut tried = Tried {
        name: row.name,
        family: row.family,
        issues: row.issues,
        what: row.what,
        fault: row.text(None),
        options: in_words(&row.setup),
        outcome: Outcome::Missed,
        why: None,
        first: None,
        first_expected: row.first.to_vec(),
        first_right: false,
        causes: Vec::new(),
        cause_expected: row.cause.to_vec(),
        cause: if row.cause.is_empty() { Naming::Nameless } else { Naming::Unnamed },
        smallest: None,
        sizes: row.sizes,
        norms_expected: row.norms,
        first_measures: None,
        out_measures: None,
        known: row.known,
        seconds: 0.0,
    };
    if let Some(why) = unfit(row, plan.base.engine) {
        (tried.outcome, tried.why) = (Outcome::NotApplicable, Some(why));
        return tried;
    }
    let run = |size: Option<f64>, closer: bool| {
        let base = options(&plan.base, &row.setup);
        let fault = Some(Fault::parse(&row.text(size), base.seed)?);
        subject.run(engines, &Options { fault, ..base }, closer)
    };
    let ran = match run(None, true) {
        Ok(ran) => ran,
        Err(e) => {
            (tried.outcome, tried.why) = (Outcome::Broke, Some(e.to_string()));
            return tried;
        }
    };
    if ran.verdict == Verdict::Fault || ran.verdict == Verdict::ContractBroken {
        tried.outcome = Outcome::Caught;
    } else {
        tried.why = Some(format!("the run is {}", ran.verdict));
    }
    if let Some(first) = ran.first() {
        tried.first_right = row.first.contains(&runs::plain(first.tensor));
        tried.first = Some(first.title());
    }
    let names = ran.causes();
    tried.cause = naming(row.cause, &names);
    tried.causes = names.into_iter().map(|(at, names)| format!("{at}: {}", names.join(" or "))).collect();
    if let Some(twin) = twin {
        tried.first_measures = ran.first_tensor().and_then(|id| measures::of(&ran, twin, id));
        tried.out_measures = ran.out().and_then(|id| measures::of(&ran, twin, id));
    }
    if plan.sizes && tried.outcome == Outcome::Caught {
        tried.smallest = smallest(row.sizes, &|size| {
            run(Some(size), false)
                .is_ok_and(|r| matches!(r.verdict, Verdict::Fault | Verdict::ContractBroken))
        });
    }
    tried
}

/// Whether a name with its sentence says what it should: the words stand in it, a factor is the same within 1e-4 (a fit of bits that
/// are 8 to 11 long does not find more).
fn fits(name: &str, right: &str) -> bool {
    let factor = |text: &str| {
        let (what, value) = text.split(" | ").next()?.rsplit_once(" × ")?;
        Some((what.to_string(), value.parse::<f64>().ok()?))
    };
    match (factor(name), factor(right)) {
        (Some((a, v)), Some((b, w))) => a == b && (v / w - 1.0).abs() < 1e-4,
        _ => name.contains(right),
    }
}

/// What the names that were given are worth: each tensor's list of names that fit it.
fn naming(expected: &[&str], given: &[(String, Vec<String>)]) -> Naming {
    let fits = |name: &String| expected.iter().any(|c| fits(name, c));
    let wrong = |names: &Vec<String>| !names.iter().any(fits);
    match (given.is_empty(), expected.is_empty()) {
        (true, true) => Naming::Nameless,
        (true, false) => Naming::Unnamed,
        _ if given.iter().any(|(_, names)| wrong(names)) => Naming::Wrong,
        _ if given.iter().any(|(_, names)| !names.iter().all(fits)) => Naming::Ambiguous,
        _ => Naming::Right,
    }
}

/// The smallest size that is caught, by bisection; the largest, which comes first, is.
fn smallest(sizes: &[f64], caught: &dyn Fn(f64) -> bool) -> Option<f64> {
    let (mut good, mut bad) = (0, sizes.len());
    while bad - good > 1 {
        let middle = (good + bad) / 2;
        if caught(sizes[middle]) { good = middle } else { bad = middle }
    }
    sizes.get(good).copied()
}

fn score(faults: &[Tried], alarms: &[Alarm], twins: usize) -> Score {
    let apply = || faults.iter().filter(|t| t.outcome != Outcome::NotApplicable);
    let caught = || faults.iter().filter(|t| t.outcome == Outcome::Caught);
    let seen = |of: fn(&Tried) -> Option<&Said>, i: usize| {
        Count::of(caught().filter(|t| of(t).is_some()), |t| of(t).is_some_and(|s| s.seen()[i]))
    };
    Score {
        caught: Count::of(apply(), |t| t.outcome == Outcome::Caught),
        first: Count::of(caught().filter(|t| !t.first_expected.is_empty()), |t| t.first_right),
        cause: Count::of(caught().filter(|t| !t.cause_expected.is_empty()), |t| t.cause == Naming::Right),
        named_wrongly: faults.iter().filter(|t| t.cause == Naming::Wrong).count(),
        false_alarms: Count { n: alarms.len(), of: twins },
        first_seen: std::array::from_fn(|i| seen(|t| t.first_measures.as_ref(), i)),
        out_seen: std::array::from_fn(|i| seen(|t| t.out_measures.as_ref(), i)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_size_is_found_by_bisection() {
        let sizes = [0.5, 0.1, 0.05, 0.01, 0.001];
        for least in sizes {
            assert_eq!(smallest(&sizes, &|s| s >= least), Some(least));
        }
        assert_eq!(smallest(&[], &|_| true), None);
    }

    #[test]
    fn one_wrong_name_anywhere_is_wrong() {
        let row = Row { cause: &["key 3 left out"], ..crate::fault::catalogue::all()[0] };
        let given = |all: &[&[&str]]| {
            all.iter()
                .map(|n| ("o".to_string(), n.iter().map(|n| n.to_string()).collect()))
                .collect::<Vec<_>>()
        };
        assert_eq!(naming(row.cause, &given(&[])), Naming::Unnamed);
        assert_eq!(naming(row.cause, &given(&[&["key 3 left out"]])), Naming::Right);
        assert_eq!(naming(row.cause, &given(&[&["key 3 left out", "mask -1"]])), Naming::Ambiguous);
        assert_eq!(naming(row.cause, &given(&[&["key 3 left out"], &["mask -1"]])), Naming::Wrong);
        assert!(fits("output × 1.099998 | off", "output × 1.1") && !fits("output × 1.11", "output × 1.1"));
        assert!(fits("output × 1/2 | off", "output × 1/2") && !fits("head 1 × 1.1", "output × 1.1"));
        let nameless = Row { cause: &[], ..row };
        assert_eq!(naming(nameless.cause, &given(&[])), Naming::Nameless);
        assert_eq!(naming(nameless.cause, &given(&[&["mask -1"]])), Naming::Wrong);
    }
}
