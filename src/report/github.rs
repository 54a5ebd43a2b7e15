/*!
The report for GitHub Actions: workflow commands that become annotations, and a Markdown summary of the step.

Escapes are those that the runner takes back: `%`, CR and LF in messages, `:` and `,` as well in properties. GitHub shows ten errors and
ten warnings of a step and drops the rest, so the last one says how many there are; a summary may have 1 MiB, so what does not fit is
left out and counted.
*/

use super::finding::{bad, sentences, short};
use super::invariance::Variant;
use super::{LayerReport, Report, markdown};
use crate::judge::{Unit, Verdict};
use crate::probe::Outcome;
use mla_reference::{Form, Phase};
use std::fmt::Write;

/// Annotations of a kind that GitHub shows of one step.
const SHOWN: usize = 10;
/// Bytes that a step's summary may have, all commands of the step together.
pub const SUMMARY: usize = 1 << 20;
/// Rows of a table that is not folded.
const LONG: usize = 12;

/// An annotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// Error, else warning.
    pub error: bool,
    /// One line.
    pub title: String,
    /// All that is known.
    pub message: String,
}

impl Annotation {
    fn of(verdict: Verdict, title: String, message: String) -> Annotation {
        // What has no verdict, and what differs from what was taken for granted, accuses nobody.
        Annotation { error: !matches!(verdict.row().exit, 0 | 3), title, message }
    }
}

impl std::fmt::Display for Annotation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let word = if self.error { "error" } else { "warning" };
        write!(f, "::{word} title={}::{}", property(&self.title), data(&self.message))
    }
}

fn data(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}

/// Findings as annotations, worst first, no more than are shown.
pub fn annotations(report: &Report) -> Vec<Annotation> {
    let mut all: Vec<Annotation> = report.lacks().iter().map(|(_, l)| lack(l)).collect();
    for l in &report.layers {
        all.extend(layer(l));
    }
    let (mut errors, mut warnings): (Vec<_>, Vec<_>) = all.into_iter().partition(|a| a.error);
    limit(&mut errors, "errors");
    limit(&mut warnings, "warnings");
    errors.append(&mut warnings);
    errors
}

fn limit(all: &mut Vec<Annotation>, what: &str) {
    if all.len() > SHOWN {
        let error = all[0].error;
        let more = all.len() - (SHOWN - 1);
        all.truncate(SHOWN - 1);
        let title = format!("mla-check: {more} more {what}");
        all.push(Annotation { error, title, message: "The summary of the step lists all layers.".into() });
    }
}

fn lack(of: &super::Lack) -> Annotation {
    let first = of.what.lines().next().unwrap_or_default();
    Annotation::of(of.verdict, format!("mla-check: {}: {first}", of.verdict), of.what.clone())
}

fn layer(l: &LayerReport) -> Vec<Annotation> {
    let engine = format!("engine {}, {}", l.engine.name, l.case.dtype);
    let mut all = Vec::new();
    for s in &l.scalars {
        let title = format!("mla-check: geometry differs in layer {}: {}", l.layer, s.name);
        let message =
            format!("{}: the engine has {}, the file says {}\n{engine}", s.name, s.engine, s.reference);
        all.push(Annotation::of(Verdict::Fault, title, message));
    }
    for u in bad(l) {
        let title = format!("mla-check: {} in layer {}, {}", u.verdict, l.layer, u.title());
        let mut message = String::new();
        for (lead, text) in sentences(l, u) {
            let lead = if lead.is_empty() { String::new() } else { format!("{lead}: ") };
            let _ = writeln!(message, "{lead}{text}");
        }
        all.push(Annotation::of(u.verdict, title, message + &engine));
    }
    for p in &l.probes {
        if let Outcome::Broken { what, place, broken, elements } = &p.outcome {
            let title = format!("mla-check: broken probe in layer {}, {}/{}", l.layer, p.form.name(), p.name);
            let message = format!(
                "{what}\nfirst at {place}; {broken} of {elements} elements\nlook at: {}\n{engine}",
                p.says
            );
            all.push(Annotation::of(Verdict::Fault, title, message));
        }
    }
    for v in l.invariance.iter().filter(|v| v.wrong()) {
        let title = format!("mla-check: {} under --invariance in layer {}, {}", v.word(), l.layer, v.name);
        all.push(Annotation::of(v.verdict(), title, format!("{}: {}\n{engine}", v.changes, v.sentence())));
    }
    if all.is_empty() && l.verdict.row().exit != 0 {
        let without = |u: &&Unit| u.verdict == l.verdict && !u.unexpected();
        let names: Vec<String> = l.tensors.iter().filter(without).map(Unit::title).collect();
        let title = format!("mla-check: {} in layer {}", l.verdict, l.layer);
        let list = if names.is_empty() { "the layer as a whole".into() } else { names.join("; ") };
        all.push(Annotation::of(l.verdict, title, format!("{list}\n{engine}")));
    }
    all
}

/// The summary of a report in at most `room` bytes; empty where not even its first line fits.
pub fn summary(report: &Report, room: usize) -> String {
    let mut out = String::new();
    let mark = if report.verdict.row().exit == 0 { "✅" } else { "❌" };
    let fault =
        report.deliberate_fault.as_ref().map(|f| format!(" (deliberate fault `{}`)", markdown::cell(f)));
    let name =
        report.model.name.as_deref().or(report.model.files.first().map(String::as_str)).unwrap_or("no model");
    let _ = writeln!(out, "## {mark} mla-check: {}{}\n", report.verdict, fault.unwrap_or_default());
    let _ = writeln!(
        out,
        "{}, {}, convention {}, mla-check {}\n",
        markdown::cell(name),
        report.model.architecture,
        report.convention,
        report.version
    );
    for l in report.broken.iter().chain(&report.gaps) {
        let lines: Vec<String> = l.what.lines().map(|t| markdown::cell(t.trim())).collect();
        let _ = writeln!(out, "- **{}**: {}", l.verdict, lines.join("; "));
    }
    out.push('\n');
    let mut parts = vec![layers(report)];
    let wrong = |l: &&LayerReport| l.invariance.iter().any(Variant::wrong);
    let issues = report.layers.iter().filter(|l| bad(l).iter().any(|u| !u.verdict.differs()) || wrong(l));
    parts.extend(issues.map(|l| format!("{}\n", markdown::issue(report, l))));
    parts.extend(report.layers.iter().map(tensors));
    // The last line is kept room for.
    let end = |left: usize| format!("\n{left} more parts did not fit; the JSON report has them.\n");
    let reserve = end(usize::MAX).len();
    if out.len() + reserve > room {
        return String::new();
    }
    let mut left = 0;
    for p in parts {
        if left > 0 || out.len() + p.len() + reserve > room {
            left += 1;
        } else {
            out += &p;
        }
    }
    if left > 0 {
        out += &end(left);
    }
    out
}

/// A table, folded where it is long.
fn folded(title: &str, head: &str, rows: &[String], open: bool) -> String {
    let columns = head.matches('|').count().saturating_sub(1);
    let table = format!("{head}\n|{}\n{}\n", "---|".repeat(columns), rows.join("\n"));
    if open && rows.len() <= LONG {
        return format!("{title}\n\n{table}\n");
    }
    format!("<details><summary>{title}</summary>\n\n{table}\n</details>\n\n")
}

fn layers(report: &Report) -> String {
    let rows = report.layers.iter().map(|l| {
        let first = bad(l).first().map_or(String::new(), |u| format!("`{}`", u.title()));
        let probes = l.probes.iter().filter(|p| p.broken()).count();
        let probes = if probes > 0 { format!("{probes} broken probes") } else { String::new() };
        let wrong: Vec<&str> = l.invariance.iter().filter(|v| v.wrong()).map(|v| v.name).collect();
        let wrong =
            if wrong.is_empty() { String::new() } else { format!("invariance: {}", wrong.join(", ")) };
        let found =
            [first, probes, wrong].into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join("; ");
        format!(
            "| {} | {} | {} | {} | {} | {found} | {:.1} s |",
            l.layer,
            markdown::cell(&l.engine.name),
            l.case.dtype,
            markdown::cell(&l.case.batch),
            l.verdict,
            l.seconds
        )
    });
    let rows: Vec<String> = rows.collect();
    if rows.is_empty() {
        return "No layer was judged.\n\n".into();
    }
    folded(
        &format!("{} layer reports", rows.len()),
        "| layer | engine | dtype | batch | verdict | first bad | time |",
        &rows,
        true,
    )
}

fn tensors(l: &LayerReport) -> String {
    let rows = l.tensors.iter().map(|u| {
        let share =
            |n: u64| if u.elements == 0 { "-".into() } else { short(100.0 * n as f64 / u.elements as f64) };
        let worst = u.worst.as_ref().map_or("-".into(), |w| short(w.share_of_bound));
        let norms = |d: Option<crate::judge::Digest>| d.map_or("-".into(), |d| format!("{:.5e}", d.norm));
        format!(
            "| {} | {} | {} | {} | {} | {worst} | {} | {} |",
            u.form.map_or("", Form::name),
            u.phase.map_or("", Phase::name),
            u.tensor,
            u.verdict,
            share(u.flips),
            norms(u.engine),
            norms(u.reference)
        )
    });
    let rows: Vec<String> = rows.collect();
    let title = format!(
        "Layer {}, engine {}: {} in {} tensors and phases",
        l.layer,
        l.engine.name,
        l.verdict,
        rows.len()
    );
    folded(
        &markdown::cell(&title),
        "| form | phase | tensor | verdict | flips, % | worst, of bound | norm | reference |",
        &rows,
        false,
    )
}

#[cfg(test)]
mod tests;
