/*! `mla-check compare` of a log of norms: what it can show, and what it can't. */

use super::out::{Failure, Output};
use super::text::wrap;
use crate::compare::norms::{self, Logged, Said};
use crate::judge::Verdict;
use crate::model::Model;
use std::path::Path;

/// What no norm shows.
const BLIND: [&str; 4] = [
    "the order of rows, heads, shards and stacked parts: every permutation has the same norm",
    "rotations, positions, the softmax and its scale, masks, page tables: their faults leave lengths nearly alone",
    "whether a tensor is what its inputs give: dump tensors (docs/hooks.md), then mla-check compare MODEL DUMP",
    "buffers: an output that was written elsewhere has a norm all the same",
];

#[derive(serde::Serialize)]
struct Report<'a> {
    schema: &'static str,
    version: &'static str,
    verdict: Verdict,
    exit: u8,
    model: String,
    log: String,
    norms: &'a [Logged],
    said: &'a [Said],
    not_judged: &'a [&'static str],
}

/// Whether a path is a log, by its ending.
pub fn is_log(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "txt" || e == "log")
}

/// Reads a log and says what its norms say.
pub fn main(
    model: &Model,
    path: &Path,
    layer: Option<usize>,
    bisect: bool,
    out: &mut Output,
) -> Result<u8, Failure> {
    let bad =
        |what: String, how: &str| Failure::Input(format!("{what}\n  where: {}\n  do: {how}", path.display()));
    let bytes =
        std::fs::read(path).map_err(|e| bad(format!("the log can't be read: {e}"), "check its path"))?;
    let all = norms::parse(&String::from_utf8_lossy(&bytes));
    if all.is_empty() {
        return Err(bad(
            "the log holds no norm".into(),
            "print them as `layer 3 q norm=67.2270`, or dump tensors (docs/hooks.md)",
        ));
    }
    let said = norms::judge(model, &all, layer).map_err(Failure::input)?;
    let fault = said.iter().any(|s| s.verdict == Verdict::Fault);
    let verdict = if fault { Verdict::Fault } else { Verdict::NotCompared };
    let exit = verdict.exit(bisect);
    if out.json() {
        out.print_json(&Report {
            schema: "mla-check.norms/1",
            version: env!("CARGO_PKG_VERSION"),
            verdict,
            exit,
            model: model.file().to_string(),
            log: path.display().to_string(),
            norms: &all,
            said: &said,
            not_judged: &BLIND,
        })?;
        return Ok(exit);
    }
    let line = match fault {
        true => "fault".to_string(),
        false => "no verdict: norms alone show no fault, and can't show most".into(),
    };
    let mut text = format!("log of {} norms: {line}\n", all.len());
    if !out.quiet() {
        let width = out.width().max(40);
        for (word, v) in
            [("fault", Verdict::Fault), ("agrees", Verdict::Exact), ("unknown", Verdict::NotCompared)]
        {
            for s in said.iter().filter(|s| s.verdict == v) {
                let lines: Vec<String> = s.lines.iter().map(ToString::to_string).collect();
                let entry = format!("{word:<8} {} (line {})", s.text, lines.join(" and "));
                text += &format!("{}\n", wrap(&super::text::escape(&entry), width, 9));
            }
        }
        text += "\nNorms can't show:\n";
        for b in BLIND {
            text += &format!("{}\n", wrap(&format!("  - {b}"), width, 4));
        }
    }
    out.print(&text)?;
    Ok(exit)
}
