/*!
The report for people: verdict first, then what is bad and where, then every tensor, then what was not
looked at.

Everything fits the given width (40 columns at least); columns that do not fit are left out, never wrapped.
Colours are ANSI sequences that the writer strips where they are not wanted; no meaning is in colour alone.
*/

use super::finding;
use super::invariance::{self, Variant};
use super::{LayerReport, Report, blocks, drawing, markdown, ranks, table};
use crate::judge::{Unit, Verdict};
use std::fmt::Write;

/// How a report is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Columns.
    pub width: usize,
    /// Words in place of drawings.
    pub plain: bool,
}

/// The whole report.
pub fn render(report: &Report, page: Page) -> String {
    let mut out = String::new();
    let page = Page { width: page.width.max(40), ..page };
    let width = page.width;
    if let Some(s) = &report.signature {
        wrapped(&mut out, "signature: ", &s.text, width);
    }
    for layer in &report.layers {
        layer_report(&mut out, report, layer, page);
    }
    drawing::layers(&mut out, report, width);
    for lack in report.broken.iter().chain(&report.gaps) {
        let line = format!("{}: ", lack.verdict);
        for (i, text) in lack.what.lines().enumerate() {
            wrapped(&mut out, if i == 0 { &line } else { "  " }, text.trim(), width);
        }
        out.push('\n');
    }
    for pair in &report.beside {
        blocks::beside(&mut out, pair, width);
    }
    blocks::snapshots(&mut out, &report.snapshots, width);
    not_judged(&mut out, report, width);
    out
}

/// The verdict line alone, one a layer.
pub fn verdict_lines(report: &Report) -> String {
    let mut out: String = report.signature.iter().map(|s| format!("signature: {}\n", s.text)).collect();
    out.extend(report.layers.iter().map(|l| verdict_line(report, l) + "\n"));
    for lack in &report.gaps {
        let _ = writeln!(out, "{}: {}", lack.verdict, lack.what.lines().next().unwrap_or_default());
    }
    if report.snapshots.iter().any(|s| !s.accepted) {
        let _ = writeln!(out, "{}", blocks::snapshots_line(&report.snapshots));
    }
    out
}

/// What a test that failed says: verdict lines, what is wrong with which tensor, the command that repeats it. Without colours.
pub fn failure(report: &Report, width: usize) -> String {
    let (mut out, width) = (String::new(), width.max(40));
    for l in &report.layers {
        let _ = writeln!(out, "{}", verdict_line(report, l));
        for s in &l.scalars {
            let _ = writeln!(out, "  {}: the engine has {}, the file says {}", s.name, s.engine, s.reference);
        }
        let bad = finding::bad(l);
        for (i, u) in bad.iter().enumerate().take(4) {
            evidence(&mut out, l, u, i, width);
        }
        if bad.len() > 4 {
            wrapped(&mut out, "", &format!("and {} more with evidence of their own", bad.len() - 4), width);
        }
        // What nobody can say anything about is no pass either, and has its reason in a note.
        let open = |u: &&Unit| matches!(u.verdict, Verdict::Inconclusive | Verdict::NotCompared);
        for u in l.tensors.iter().filter(open).filter(|_| l.forms_agree.is_none()) {
            let why = u.note.as_deref().unwrap_or("no reason is given");
            wrapped(&mut out, "  ", &format!("{} is {}: {why}", u.title(), u.verdict), width);
        }
        blocks::broken_probes(&mut out, l, width);
    }
    let _ = writeln!(out, "Repeat with:\n  {}", report.command);
    anstream::adapter::strip_str(&out).to_string()
}

pub(crate) fn paint(v: Verdict, text: &str) -> String {
    match v.row().colour {
        Some(c) => {
            let style = c.on_default().effects(anstyle::Effects::BOLD);
            format!("{style}{text}{style:#}")
        }
        None => text.to_string(),
    }
}

/// Whether anything was held against the reference (engine `reference` only shows digests).
pub(super) fn compared(l: &LayerReport) -> bool {
    l.tensors.iter().any(|u| u.elements > 0)
}

fn verdict_line(report: &Report, l: &LayerReport) -> String {
    let mut line = String::new();
    if let Some(f) = &report.deliberate_fault {
        line += &format!("{}\n", paint(Verdict::Fault, &format!("DELIBERATE FAULT {f}")));
    }
    let verdict = match (l.verdict, l.forms_agree) {
        (_, Some(d)) => format!("fused and absorbed agree to {d:.1e} of the largest value"),
        (Verdict::Rounding | Verdict::Exact, None) if report.deliberate_fault.is_some() => {
            format!("{}: the deliberate fault was not seen", l.verdict)
        }
        (Verdict::NotCompared, None) if compared(l) => "no verdict: not all could be compared".into(),
        (Verdict::NotCompared, None) => "no verdict: nothing was compared".into(),
        (v, None) => v.to_string(),
    };
    line += &format!(
        "engine {}, {}{}: {}",
        l.engine.name,
        match report.model.layers {
            0 => "no model".to_string(),
            n => format!("layer {} of {n}, weights as stored", l.layer),
        },
        l.judged.as_ref().map_or(String::new(), |j| format!(", contract {}", j.by)),
        paint(l.verdict, &verdict)
    );
    line
}

/// What would have been seen.
fn seen(l: &LayerReport) -> Option<String> {
    let sizes = match finding::seen(l) {
        (Some(gain), Some(scale)) => format!("a gain of {gain:.0e} or a softmax scale of {scale:.0e}"),
        (Some(gain), None) => format!("a gain of {gain:.0e}"),
        _ => return None,
    };
    Some(format!("{sizes} would have been seen in every tensor"))
}

fn layer_report(out: &mut String, report: &Report, l: &LayerReport, page: Page) {
    let width = page.width;
    let _ = writeln!(out, "{}", verdict_line(report, l));
    if !l.scalars.is_empty() {
        for s in &l.scalars {
            let _ = writeln!(out, "  {}: the engine has {}, the file says {}", s.name, s.engine, s.reference);
        }
        let _ = writeln!(out, "  no tensor was compared: both sides must compute the same thing first\n");
        return;
    }
    // A fault stands before what was found out of the others.
    let accused = finding::bad(l).iter().any(|u| !u.verdict.differs());
    if !accused {
        contracts_found(out, l, width);
    }
    if let (Verdict::Exact | Verdict::Rounding, Some(seen)) = (l.verdict, seen(l)) {
        wrapped(out, "", &seen, width);
    }
    if compared(l) {
        out.push('\n');
        match page.plain {
            true => drawing::stages_in_words(out, l, width),
            false => drawing::stages(out, l, width),
        }
    }
    let bad = finding::bad(l);
    for (i, u) in bad.iter().enumerate().take(4) {
        out.push('\n');
        evidence(out, l, u, i, width);
        if let Some(p) = u.picture.as_ref().filter(|_| i == 0 && !page.plain) {
            drawing::map(out, l, u, p, width);
        }
    }
    if bad.len() > 4 {
        let names: Vec<String> = bad[4..].iter().map(|u| u.title()).collect();
        wrapped(
            out,
            "",
            &format!("and {} more with evidence of their own: {}", bad.len() - 4, names.join("; ")),
            width,
        );
    }
    blocks::broken_probes(out, l, width);
    out.push('\n');
    let m = &report.model;
    let files = match m.files.as_slice() {
        [one] => one.clone(),
        [first, rest @ ..] => format!("{first} and {} more", rest.len()),
        [] => String::new(),
    };
    let model = match m.layers {
        0 => "none: widths and the softmax scale are the map's".to_string(),
        _ => format!("{files}, {}, convention {}", m.architecture, report.convention),
    };
    wrapped(out, "model     ", &model, width);
    for w in &m.warnings {
        wrapped(out, "warning   ", w, width);
    }
    for n in &l.notes {
        wrapped(out, "          ", n, width);
    }
    wrapped(out, "engine    ", &format!("{}; {}", l.engine.device, report.engine_choice), width);
    wrapped(out, "contract  ", &l.contract_text, width);
    for s in &l.stacks {
        wrapped(out, "stacked   ", &s.to_string(), width);
    }
    if accused {
        contracts_found(out, l, width);
    }
    let c = &l.case;
    let pages = format!(
        "page size {}, {} splits in decode, seed {}, hidden states {}",
        c.page_size, c.splits, c.seed, c.hidden
    );
    wrapped(
        out,
        "batch     ",
        &format!("{} in {}, contexts {}; {pages}", c.batch, c.dtype, c.regimes.join(" and ")),
        width,
    );
    for n in &c.notes {
        wrapped(out, "          ", n, width);
    }
    if c.regimes.len() > 1 {
        wrapped(
            out,
            "          ",
            "requests without context are the same in both regimes and run once",
            width,
        );
    }
    for (label, text) in c.ways() {
        wrapped(out, &format!("{label:<10}"), &text, width);
    }
    ranks::line(out, l, width);
    blocks::probes(out, l, width);
    out.push('\n');
    table::table(out, l, width);
    ranks::norms(out, l, width);
    invariance::text(out, l, width);
    blocks::gates(out, l, width);
    blocks::cumulative(out, l, width);
    for o in &l.odd {
        wrapped(out, "odd: ", o, width);
    }
    let broken = bad.iter().any(|u| !u.verdict.differs());
    if broken && norms_agree(&bad) {
        out.push('\n');
        wrapped(
            out,
            "",
            "Norms of engine and reference agree to 1 % in every tensor at fault: norms can't see this fault.",
            width,
        );
    }
    let _ = writeln!(out, "\n{:.1} s\n", l.seconds);
    if broken || l.invariance.iter().any(Variant::wrong) {
        paste(out, report, l);
    }
}

fn contracts_found(out: &mut String, l: &LayerReport, width: usize) {
    for found in finding::contracts(l) {
        wrapped(out, "contract found: ", &found, width);
    }
}

/// What is bad about one unit, where and how much.
fn evidence(out: &mut String, l: &LayerReport, u: &Unit, nth: usize, width: usize) {
    let word = match (u.verdict, nth) {
        (v, _) if v.differs() => v.name(),
        (_, 0) => "first bad",
        _ => "also bad",
    };
    let _ = writeln!(out, "{}", paint(u.verdict, &format!("{word}: {}", finding::title(u))));
    for (lead, text) in finding::sentences(l, u) {
        wrapped(out, &format!("  {lead:<12}"), &text, width);
    }
}

/// The block to paste, after all findings.
fn paste(out: &mut String, report: &Report, l: &LayerReport) {
    let _ = writeln!(out, "To paste into an issue:\n");
    for line in markdown::issue(report, l).lines() {
        let _ = writeln!(out, "    {line}");
    }
    out.push('\n');
}

fn norms_agree(units: &[&Unit]) -> bool {
    units.iter().all(|u| match (u.engine, u.reference) {
        (Some(a), Some(b)) => (a.norm - b.norm).abs() <= 0.01 * b.norm,
        _ => false,
    })
}

fn not_judged(out: &mut String, report: &Report, width: usize) {
    let _ = writeln!(out, "Not judged:");
    for n in &report.not_judged {
        wrapped(out, "  - ", n, width);
    }
    let _ = writeln!(out, "Repeat with:\n  {}", report.command.replace('\n', "\n  "));
}

/// Writes a paragraph with a hanging indent.
pub(crate) fn wrapped(out: &mut String, lead: &str, text: &str, width: usize) {
    let indent = " ".repeat(lead.chars().count());
    let mut line = lead.to_string();
    let mut used = line.chars().count();
    for (i, word) in text.split(' ').enumerate() {
        let n = word.chars().count();
        if i > 0 && used + 1 + n > width {
            let _ = writeln!(out, "{}", line.trim_end());
            line = indent.clone();
            used = indent.len();
        } else if i > 0 {
            line.push(' ');
            used += 1;
        }
        line += word;
        used += n;
    }
    let _ = writeln!(out, "{}", line.trim_end());
}

#[cfg(test)]
mod tests {
    use super::super::sample;

    const PAGE: super::Page = super::Page { width: 80, plain: false };

    /// What is said of the model and of how its file was read stands in the text and in JSON.
    #[test]
    fn warnings_and_notes_are_shown() {
        let mut report = sample::report(&[1]);
        let plain = super::render(&report, PAGE);
        assert!(!plain.contains("warning"), "{plain}");
        report.model.warnings = vec!["unverified architecture: nobody knows".into()];
        report.layers[0].notes = vec!["rope factors: the short set".into()];
        let text = super::render(&report, PAGE);
        assert!(text.contains("warning   unverified architecture: nobody knows"), "{text}");
        assert!(text.contains("          rope factors: the short set"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["model"]["warnings"][0], "unverified architecture: nobody knows");
        assert_eq!(json["layers"][0]["notes"][0], "rope factors: the short set");
    }
}
