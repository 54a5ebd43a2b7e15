/*!
A block of Markdown to paste into an issue: the verdict, the first bad tensors, what was run, how to repeat it.

It is short on purpose and names no file but the model: a report that says too much is not pasted.
*/

use super::finding::{bad, sentences, title};
use super::{LayerReport, Report, invariance};
use std::fmt::Write;

/// Findings shown in full.
const SHOWN: usize = 2;

/// Text in a cell of a table: nothing in it ends the cell or is markup.
pub fn cell(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '|' | '`' | '*' | '_' | '[' | ']' | '\\' => out.extend(['\\', c]),
            '<' => out += "&lt;",
            '&' => out += "&amp;",
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// The block of one layer with findings.
pub fn issue(report: &Report, l: &LayerReport) -> String {
    let mut out = String::new();
    let findings = bad(l);
    let first = findings.first().map_or(String::new(), |u| format!(", first in `{}`", u.title()));
    let _ = writeln!(out, "**mla-check {}**: {} in layer {}{first}", report.version, l.verdict, l.layer);
    if let Some(f) = &report.deliberate_fault {
        let _ = writeln!(out, "\n(deliberate fault `{f}`)");
    }
    let _ = writeln!(out);
    for u in findings.iter().take(SHOWN) {
        let _ = writeln!(out, "- `{}`", title(u));
        for (lead, text) in sentences(l, u) {
            let lead = if lead.is_empty() { String::new() } else { format!("{lead}: ") };
            let _ = writeln!(out, "  - {lead}{text}");
        }
    }
    if findings.len() > SHOWN {
        let names: Vec<String> = findings[SHOWN..].iter().map(|u| format!("`{}`", u.title())).collect();
        let _ = writeln!(out, "- evidence of their own also in {}", names.join(", "));
    }
    out += &invariance::bullets(l);
    let _ = writeln!(out, "\n| | |\n|---|---|");
    let mut row = |name: &str, text: &str| {
        let _ = writeln!(out, "| {name} | {} |", text.replace('|', "\\|"));
    };
    row("architecture", report.model.architecture);
    row("convention", report.convention);
    row("engine", &format!("{}, {}", l.engine.name, l.engine.device));
    row("contract", &l.contract_text);
    let c = &l.case;
    row(
        "batch",
        &format!(
            "{} in {}, seed {}, page size {}, {} splits",
            c.batch, c.dtype, c.seed, c.page_size, c.splits
        ),
    );
    if let Some(all) = invariance::cell(l) {
        row("invariance", &all);
    }
    for (label, text) in c.ways() {
        row(label, &text);
    }
    let _ = writeln!(out, "\n```\n{}\n```", report.command_of(l));
    out
}
