//! Faults inside kernels, each in the small run that makes it act; and that run without a fault.

use mla_check::check::{self, EngineKind, Options};
use mla_check::fault::text::{First, Mutation, Shows};
use mla_check::judge::cause::Diagnosis;
use mla_check::judge::{Explained, Unit, Verdict, origins};
use mla_check::suite::inside;

/// What is judged of a run.
pub fn run(engine: EngineKind, shows: &Shows, mutation: Option<&Mutation>) -> Result<Vec<Unit>, String> {
    let options = Options { engine, ..Options::default() };
    let ran = inside::one(&options, &|o| check::engine(o), shows, mutation);
    ran.map(|r| r.units().to_vec()).map_err(|e| e.to_string())
}

const UNEXPLAINED: &str = "unexplained";

/// What says why a unit is wrong, and another contract that explains it.
pub fn named(u: &Unit) -> String {
    let cause = match &u.diagnosis {
        Some(Diagnosis::Cause(c)) => format!("{}: {}; {:?}", c.name, c.text, c.ambiguous_with),
        Some(Diagnosis::Unexplained { best, .. }) => format!("{UNEXPLAINED}, best {best:?}"),
        None => String::new(),
    };
    match &u.explained {
        None => cause,
        Some(Explained::Contract(c) | Explained::Convention(c)) => format!("contract: {c}; {cause}"),
    }
}

/// By which share the norm of a unit's tensor is off. Memory that nobody wrote is NaN, as it was filled before.
fn norm_off(u: &Unit) -> f64 {
    let (Some(own), Some(reference)) = (&u.engine, &u.reference) else { return 0.0 };
    // Whoever prints a norm sees NaN; this one is of what is finite.
    if u.not_finite > 0 { f64::INFINITY } else { (own.norm / reference.norm - 1.0).abs() }
}

/// What a row asks for and does not get.
pub fn missed(m: &Mutation, units: &[Unit]) -> Vec<String> {
    let mut missed = Vec::new();
    let evidence = || units.iter().flat_map(|u| &u.evidence);
    let bad: Vec<&Unit> = origins(units).collect();
    if bad.is_empty() {
        missed.push("it was not caught".into());
    }
    if let Some(finding) = m.finding
        && !evidence().any(|e| e.contains(finding))
    {
        missed.push(format!("no detector says {finding:?}"));
    }
    match m.first {
        None => {}
        Some(first) => {
            let is = |u: &&&Unit| match first {
                First::Weight(w) => u.tensor == w.name(),
                First::Tensor(s) => u.tensor == s.name(),
            };
            if !bad.first().iter().all(is) {
                missed.push(format!("the first wrong tensor is not {}", first.name()));
            }
            if let Some(off) = bad.first().map(|u| norm_off(u))
                && (off > 0.1) != m.norms
            {
                missed.push(format!("its norm is off by {:.2} %", 100.0 * off));
            }
        }
    }
    if let (Some(_), Some(u)) = (m.first, bad.first()) {
        let (name, unexplained) = (named(u), named(u).starts_with(UNEXPLAINED));
        match m.cause {
            Some(cause) if unexplained || !name.contains(cause) => {
                missed.push(format!("the cause is not {cause:?}"));
            }
            // Nothing is the name of it: any is a wrong one.
            None if !unexplained => missed.push("it has a name".into()),
            _ => {}
        }
    }
    if !missed.is_empty() {
        for u in bad.iter().take(4) {
            missed.push(format!(
                "{}: {:?}, {} beyond; {}; {}",
                u.title(),
                u.verdict,
                u.beyond,
                shortened(u),
                named(u)
            ));
        }
    }
    missed
}

/// The first pieces of evidence.
fn shortened(u: &Unit) -> String {
    let short = |e: &String| e.chars().take(160).collect::<String>();
    u.evidence.iter().take(4).map(short).collect::<Vec<_>>().join("; ")
}

/// Nothing is held against a run without a fault, and all of it was compared.
pub fn accused(units: &[Unit]) -> Vec<String> {
    let wrong = |u: &&Unit| !matches!(u.verdict, Verdict::Exact | Verdict::Rounding | Verdict::Inconclusive);
    let said = |u: &Unit| format!("{}: {:?}, {}", u.title(), u.verdict, u.evidence.join("; "));
    origins(units).chain(units.iter().filter(wrong)).map(said).collect()
}
