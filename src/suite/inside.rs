/*!
Faults inside kernels in the suite: each in the small run that makes it act, beside that run without it.

Only engines that run kernel files have them. What no value shows, such as a barrier that is missing, the PTX machine's detectors
have to see; there is no such row for a GPU.
*/

use super::measures;
use super::outcome::{Alarm, Naming, Outcome, Tried};
use super::runs::{Ran, kept};
use super::small::Small;
use crate::check::{CheckError, EngineKind, Options};
use crate::fault::Fault;
use crate::fault::text::{Mutation, PREFIX, Shows};
use crate::judge::Verdict;
use crate::model::Layer;
use crate::study::Engines;
use mla_reference::Regime;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Runs them; alarms of clean runs, and how many there were, beside.
///
/// # Errors
/// A clean run that can't be made.
pub(super) fn run(
    rows: &[&'static Mutation],
    base: &Options,
    engines: &Engines,
    progress: &(dyn Fn(&str) + Sync),
) -> Result<(Vec<Tried>, Vec<Alarm>, usize), CheckError> {
    let fit: Vec<&Mutation> = rows.iter().copied().filter(|m| unfit(m, base.engine).is_none()).collect();
    let setups: BTreeMap<&str, Shows> = fit.iter().map(|m| (m.shows.name, m.shows)).collect();
    let clean = |(name, shows): (&&'static str, &Shows)| Ok((*name, one(base, engines, shows, None)?));
    let twins: BTreeMap<&str, Ran> = setups.par_iter().map(clean).collect::<Result<_, CheckError>>()?;
    let alarms = twins.iter().filter(|(_, ran)| ran.verdict.exit(false) != 0);
    let alarms = alarms.map(|(name, ran)| Alarm { options: in_words(&setups[name]), what: ran.alarm() });
    let alarms = alarms.collect();
    let tried = |m: &&'static Mutation| {
        let began = std::time::Instant::now();
        let tried = judged(m, base, engines, twins.get(m.shows.name));
        progress(m.name);
        Tried { seconds: began.elapsed().as_secs_f64(), ..tried }
    };
    Ok((rows.par_iter().map(tried).collect(), alarms, twins.len()))
}

/// Why an engine can't have a row's fault.
fn unfit(m: &Mutation, engine: EngineKind) -> Option<&'static str> {
    match engine {
        EngineKind::Ptx => None,
        EngineKind::Cuda if m.first.is_some() => None,
        EngineKind::Cuda => Some("its values are right by chance: only the PTX machine's detectors see it"),
        _ => Some("it acts inside of a kernel: pass --engine ptx or cuda"),
    }
}

/// A run of the suite's small layer.
///
/// # Errors
/// As of any run.
pub fn one(
    base: &Options,
    engines: &Engines,
    shows: &Shows,
    m: Option<&Mutation>,
) -> Result<Ran, CheckError> {
    let fault = m.map(|m| Fault::parse(&format!("{PREFIX}{}", m.name), base.seed)).transpose()?;
    let options = Options {
        forms: vec![shows.form],
        dtype: shows.dtype,
        batch: shows.batch.parse().unwrap_or(base.batch.clone()),
        regimes: vec![Regime::Random],
        page_size: shows.page_size,
        splits: Some(shows.splits),
        context_chunk: shows.context_chunk,
        fault,
        ..base.clone()
    };
    let small = Small::new(shows);
    let Some(weights) = small.weights() else {
        return Err(crate::engine::EngineError::Broke(format!("{}: no whole blocks", shows.name)).into());
    };
    let layer = Layer { index: 0, spec: small.spec.clone(), weights: &weights };
    kept(&layer, &options, engines, true, None)
}

fn in_words(s: &Shows) -> String {
    let mut text = format!(
        "--batch {} --dtype {} --form {} --regime random --page-size {} --splits {}",
        s.batch,
        s.dtype,
        s.form.name(),
        s.page_size,
        s.splits
    );
    if let Some(chunk) = s.context_chunk {
        text += &format!(" --context-chunk {chunk}");
    }
    text
}

fn judged(m: &'static Mutation, base: &Options, engines: &Engines, twin: Option<&Ran>) -> Tried {
    let mut tried = Tried {
        name: m.name,
        family: m.family,
        issues: m.issues,
        what: m.broken,
        fault: format!("{PREFIX}{}", m.name),
        options: in_words(&m.shows),
        outcome: Outcome::Missed,
        why: None,
        first: None,
        first_expected: m.first.iter().map(|f| f.name()).collect(),
        first_right: m.first.is_none(),
        causes: Vec::new(),
        cause_expected: m.cause.into_iter().chain(m.also.iter().copied()).collect(),
        cause: if m.cause.is_none() && m.also.is_empty() { Naming::Nameless } else { Naming::Unnamed },
        smallest: None,
        sizes: &[],
        norms_expected: m.norms,
        first_measures: None,
        out_measures: None,
        known: None,
        seconds: 0.0,
    };
    if let Some(why) = unfit(m, base.engine) {
        (tried.outcome, tried.why) = (Outcome::NotApplicable, Some(why.to_string()));
        return tried;
    }
    let ran = match one(base, engines, &m.shows, Some(m)) {
        Ok(ran) => ran,
        Err(e) => {
            (tried.outcome, tried.why) = (Outcome::Broke, Some(e.to_string()));
            return tried;
        }
    };
    let found = |finding: &str| ran.units().iter().flat_map(|u| &u.evidence).any(|e| e.contains(finding));
    let unseen = m.finding.filter(|f| base.engine == EngineKind::Ptx && !found(f));
    match (ran.verdict, unseen) {
        (Verdict::Fault | Verdict::ContractBroken, None) => tried.outcome = Outcome::Caught,
        (Verdict::Fault | Verdict::ContractBroken, Some(f)) => {
            tried.why = Some(format!("no detector says {f}"))
        }
        (v, _) => tried.why = Some(format!("the run is {v}")),
    }
    if let Some(first) = ran.first() {
        let is = super::runs::plain(first.tensor);
        tried.first_right = m.first.is_none_or(|f| f.name() == is);
        tried.first = Some(first.title());
    }
    // Of values that are right or wrong by chance nothing is asked but that detectors see it.
    if m.first.is_some() {
        let names = ran.causes();
        tried.cause = super::naming(&tried.cause_expected, &names);
        tried.causes = names.into_iter().map(|(at, names)| format!("{at}: {}", names.join(" or "))).collect();
    }
    if let Some(twin) = twin.filter(|_| m.first.is_some()) {
        tried.first_measures = ran.first_tensor().and_then(|id| measures::of(&ran, twin, id));
        tried.out_measures = ran.out().and_then(|id| measures::of(&ran, twin, id));
    }
    tried
}
