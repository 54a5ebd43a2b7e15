/*!
The report as JUnit XML: a suite for each layer and form (weights and stages that forms share have their own), a case for each tensor
and phase, for each probe, and for whatever else made the verdict.

Only attributes that every reader of JUnit files knows are written. Status is a column of the table of verdicts. A layer whose verdict none of its cases shows (nothing was compared at all) gets a case
of its own, so that the file passes where the exit code is 0 and only there.
*/

use super::finding::{sentences, title};
use super::invariance::{Outcome as VariantOutcome, Variant};
use super::{Lack, LayerReport, Report};
use crate::judge::{Status, Unit, Verdict, Which};
use crate::probe::{Outcome, Probe};
use mla_reference::{Form, Phase};
use quick_junit as junit;
use std::collections::BTreeMap;
use std::time::Duration;

/// One test of a file, before it is XML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Form, `weights`, `shared`, `invariance` or `layer`.
    pub group: &'static str,
    /// Phase and tensor, or probe.
    pub name: String,
    /// Status.
    pub status: Status,
    /// Verdict or outcome in words.
    pub kind: String,
    /// First line.
    pub message: String,
    /// All that is known.
    pub text: String,
}

/// Groups in the order of suites.
const GROUPS: [&str; 6] = ["layer", "weights", "shared", "fused", "absorbed", "invariance"];

/// A report as a file.
///
/// # Errors
/// In words, where the XML can't be written.
pub fn render(report: &Report) -> Result<Vec<u8>, String> {
    let mut file = junit::Report::new(clean(&format!("mla-check {}", report.version)));
    file.set_time(time(report.layers.iter().map(|l| l.seconds).sum()));
    let mut taken: BTreeMap<String, usize> = BTreeMap::new();
    for l in &report.layers {
        // A merged report may have a layer more than once: other engines, dtypes, batches.
        let engine = format!("{} {}", l.engine.name, l.case.dtype);
        let nth = taken.entry(format!("layer {} {engine}", l.layer)).or_default();
        *nth += 1;
        let again = if *nth > 1 { format!(", {nth}") } else { String::new() };
        let cases = cases(l);
        for group in GROUPS {
            let mut suite =
                junit::TestSuite::new(clean(&format!("layer {}, {group}, {engine}{again}", l.layer)));
            for (name, value) in properties(report, l) {
                suite.add_property((clean(name), clean(&value)));
            }
            let class = format!(
                "mla-check.{}.layer {}.{group}",
                format!("{engine}{again}").replace('.', "_"),
                l.layer
            );
            for c in cases.iter().filter(|c| c.group == group) {
                let mut case =
                    junit::TestCase::new(clean(&format!("layer {} {}", l.layer, c.name)), status(c));
                case.set_classname(clean(&class));
                if c.status == Status::Passed && !c.text.is_empty() {
                    case.set_system_out(clean(&c.text));
                }
                suite.add_test_case(case);
            }
            if !suite.test_cases.is_empty() {
                file.add_test_suite(suite);
            }
        }
    }
    let lacks = report.lacks();
    if !lacks.is_empty() || report.layers.is_empty() {
        let mut suite = junit::TestSuite::new("run");
        for (word, lack) in lacks {
            suite.add_test_case(of_lack(word, &lack));
        }
        if suite.test_cases.is_empty() {
            let what = "no layer was judged".to_string();
            suite.add_test_case(of_lack("run", &Lack { verdict: Verdict::NotCompared, what }));
        }
        file.add_test_suite(suite);
    }
    let mut bytes = Vec::new();
    file.serialize(&mut bytes).map_err(|e| e.to_string())?;
    Ok(bytes)
}

fn of_lack(word: &str, lack: &Lack) -> junit::TestCase {
    let first = lack.what.lines().next().unwrap_or_default();
    let row = lack.verdict.row();
    let case = Case {
        group: "layer",
        name: format!("{word}: {first}"),
        status: row.junit,
        kind: row.name.into(),
        message: first.into(),
        text: lack.what.clone(),
    };
    let mut made = junit::TestCase::new(clean(&case.name), status(&case));
    made.set_classname("mla-check.run");
    made
}

/// What a suite says of its layer.
fn properties(report: &Report, l: &LayerReport) -> Vec<(&'static str, String)> {
    let c = &l.case;
    let mut all = vec![
        ("verdict", l.verdict.name().to_string()),
        ("engine", format!("{}, {}", l.engine.name, l.engine.device)),
        ("contract", l.contract_text.clone()),
        ("convention", report.convention.to_string()),
        ("batch", format!("{} in {}, seed {}", c.batch, c.dtype, c.seed)),
        ("command", report.command_of(l).to_string()),
    ];
    if let Some(f) = &report.deliberate_fault {
        all.push(("deliberate fault", f.clone()));
    }
    all
}

/// The cases of a layer, in the order of judgement.
pub fn cases(l: &LayerReport) -> Vec<Case> {
    let mut all: Vec<Case> = l.scalars.iter().map(scalar).collect();
    all.extend(l.tensors.iter().map(|u| unit(l, u)));
    all.extend(l.probes.iter().map(probe));
    all.extend(l.invariance.iter().map(variant));
    let worst = all.iter().map(|c| c.status).max();
    let row = l.verdict.row();
    // Nothing above says what the layer's verdict says: nothing was compared, forms disagree.
    if worst.is_none() || (row.junit.stops() && !worst.is_some_and(Status::stops)) || l.forms_agree.is_some()
    {
        let text = match l.forms_agree {
            Some(d) => format!("fused and absorbed agree to {d:.1e} of the largest value"),
            None => format!("the layer as a whole: {}", row.name),
        };
        let case = Case {
            group: "layer",
            name: "verdict".into(),
            status: row.junit,
            kind: row.name.into(),
            message: text.clone(),
            text,
        };
        all.insert(0, case);
    }
    all
}

fn scalar(s: &crate::judge::ScalarDifference) -> Case {
    let message = format!("{}: the engine has {}, the file says {}", s.name, s.engine, s.reference);
    let text = format!("{message}\nno tensor was compared: both sides must compute the same thing first");
    Case {
        group: "layer",
        name: format!("geometry {}", s.name),
        status: Verdict::Fault.row().junit,
        kind: "geometry differs".into(),
        message,
        text,
    }
}

fn unit(l: &LayerReport, u: &Unit) -> Case {
    let group = match (u.which, u.form) {
        (Which::Weight(_), _) => "weights",
        (_, None) => "shared",
        (_, Some(form)) => form.name(),
    };
    let parts = [u.form.map_or(group, Form::name), u.phase.map_or("", Phase::name), u.tensor];
    let name = parts.into_iter().filter(|p| !p.is_empty()).collect::<Vec<_>>().join(" ");
    let row = u.verdict.row();
    // Digests of the reference itself, and what was not captured: no verdict was expected.
    let unasked = l.forms_agree.is_some() || u.unexpected();
    let expected = !(unasked && u.verdict == Verdict::NotCompared);
    let status = if expected { row.junit } else { Status::Skipped };
    let said = sentences(l, u);
    let lines: Vec<String> = said
        .iter()
        .map(|(lead, text)| if lead.is_empty() { text.clone() } else { format!("{lead}: {text}") })
        .collect();
    let first = match status {
        Status::Failure => said.iter().find(|s| s.0 == "where").or(said.first()).map(|s| s.1.clone()),
        _ => u.note.clone(),
    };
    let reason = first.filter(|r| !r.is_empty()).map_or(String::new(), |r| format!(": {r}"));
    let plain = status == Status::Passed && !u.verdict.differs();
    Case {
        group,
        name,
        status,
        kind: row.name.into(),
        message: format!("{}{reason}", row.name),
        text: if plain { String::new() } else { format!("{}\n{}", title(u), lines.join("\n")) },
    }
}

fn probe(p: &Probe) -> Case {
    let (status, kind, message) = match &p.outcome {
        Outcome::Held { what, .. } => (Verdict::Exact.row().junit, "held", what.clone()),
        Outcome::Broken { what, place, broken, elements } => {
            let text = format!("{what}, first at {place}; {broken} of {elements} elements");
            (Verdict::Fault.row().junit, "broken probe", text)
        }
        Outcome::NotApplicable { why } => {
            (Verdict::NotApplicable.row().junit, "nothing learned", why.clone())
        }
    };
    Case {
        group: p.form.name(),
        name: format!("{} probe {}", p.form.name(), p.name),
        status,
        kind: kind.into(),
        text: if p.broken() { format!("{message}\nlook at: {}", p.says) } else { String::new() },
        message,
    }
}

fn variant(v: &Variant) -> Case {
    let message = format!("{}: {}", v.word(), v.sentence());
    let text = match &v.outcome {
        VariantOutcome::Fault { said, .. } => format!("{message}\n{}", said.join("\n")),
        VariantOutcome::Broke { what } => what.clone(),
        VariantOutcome::Rounding => message.clone(),
        _ => String::new(),
    };
    Case {
        group: "invariance",
        name: format!("invariance {}", v.name),
        status: v.verdict().row().junit,
        kind: v.word().into(),
        message,
        text,
    }
}

fn status(c: &Case) -> junit::TestCaseStatus {
    let mut status = match c.status {
        Status::Passed => return junit::TestCaseStatus::success(),
        Status::Skipped => junit::TestCaseStatus::skipped(),
        Status::Failure => junit::TestCaseStatus::non_success(junit::NonSuccessKind::Failure),
        Status::Error => junit::TestCaseStatus::non_success(junit::NonSuccessKind::Error),
    };
    status.set_message(clean(&c.message)).set_type(clean(&c.kind));
    if !c.text.is_empty() {
        status.set_description(clean(&c.text));
    }
    status
}

fn time(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// What XML 1.0 has no character for is written as an escape: names come from files. Line ends and tabs stay.
fn clean(text: &str) -> String {
    let keep =
        |c: char| matches!(c, '\n' | '\t') || !(c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}'));
    text.chars().flat_map(|c| if keep(c) { vec![c] } else { c.escape_default().collect() }).collect()
}

#[cfg(test)]
mod tests;
