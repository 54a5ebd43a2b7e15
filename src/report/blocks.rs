/*! Blocks of the terminal report beside the table of tensors: probes, other people's rules, cumulative differences. */

use super::LayerReport;
use super::finding::short;
use super::terminal::{paint, wrapped};
use crate::compare::beside::Pair;
use crate::judge::Verdict;
use crate::judge::gates::RULES;
use crate::probe::{Outcome, Probe};
use crate::snapshot::{Kept, State};
use mla_reference::{Form, Phase};
use std::fmt::Write;

/// One line where all probes held; what is broken, and what it means, else.
pub(super) fn probes(out: &mut String, l: &LayerReport, width: usize) {
    if l.probes.is_empty() {
        return;
    }
    let held = l.probes.iter().filter(|p| matches!(p.outcome, Outcome::Held { .. }));
    let mut names: Vec<&str> = Vec::new();
    held.clone().for_each(|p| {
        if !names.contains(&p.name) {
            names.push(p.name);
        }
    });
    let (held, all) = (held.count(), l.probes.len());
    let list = if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) };
    let count = if held == all { format!("all {all} held") } else { format!("{held} of {all} held") };
    wrapped(out, "probes    ", &format!("{count}{list}"), width);
    for p in &l.probes {
        if let Outcome::NotApplicable { why } = &p.outcome {
            let text = format!("{}/{}: nothing learned, {why}", p.form.name(), p.name);
            wrapped(out, "          ", &text, width);
        }
    }
}

/// What a broken probe says, as evidence.
pub(super) fn broken_probes(out: &mut String, l: &LayerReport, width: usize) {
    for Probe { name, form, outcome, says } in &l.probes {
        let Outcome::Broken { what, place, broken, elements } = outcome else { continue };
        let head = format!("broken probe: {}/{name}", form.name());
        let _ = writeln!(out, "\n{}", paint(Verdict::Fault, &head));
        wrapped(out, "  ", what, width);
        wrapped(out, "  first at ", place, width);
        wrapped(out, "  ", &format!("{broken} of {elements} elements"), width);
        wrapped(out, "  look at ", says, width);
    }
}

/// Rules as columns, as shares of what they allow.
pub(super) fn gates(out: &mut String, l: &LayerReport, width: usize) {
    if l.gates.is_empty() {
        return;
    }
    out.push('\n');
    wrapped(
        out,
        "",
        "What other people's rules say of the same outputs, as shares of what they allow (up to 1 passes; ! fails):",
        width,
    );
    let titles: String = RULES.iter().map(|n| format!("{n:>10}")).collect();
    let _ = writeln!(out, "{:<9} {:<8}{:<10}{titles}", "tensor", "phase", "ours");
    let mut form = None;
    for g in &l.gates {
        if form != g.form {
            let _ = writeln!(out, "{}:", g.form.map_or("", Form::name));
            form = g.form;
        }
        let ours = g.verdict.name();
        let pad = " ".repeat(10usize.saturating_sub(ours.len()));
        let mut line = format!("{:<9} {:<8}{}{pad}", g.tensor, Phase::name(g.phase), paint(g.verdict, ours));
        for name in RULES {
            line += &match g.rules.iter().find(|r| r.rule == name) {
                None => format!("{:>10}", "-"),
                Some(r) => format!("{:>9}{}", short(r.share), if r.passed { ' ' } else { '!' }),
            };
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
    let legend = "cosine > 0.99, NMSE 5e-4 (llama.cpp), allclose 1e-2 (FlashInfer), FlashMLA's element and sum limits, \
                  2 × an eager 16-bit computation (FlashAttention); against plain float64, nothing emulated";
    wrapped(out, "rules: ", legend, width);
}

/// Differences from the start of the layer.
pub(super) fn cumulative(out: &mut String, l: &LayerReport, width: usize) {
    if l.cumulative.is_empty() {
        return;
    }
    out.push('\n');
    wrapped(
        out,
        "",
        "Shown, not judged: differences from float64 computed from the start of the layer. Rounding of weights and of \
         all stages before adds up in them.",
        width,
    );
    let _ = writeln!(out, "{:<12} {:<9}{:>12}{:>12}", "tensor", "form", "relative L2", "max abs");
    for d in &l.cumulative {
        let relative = d.relative_l2.map_or("-".into(), |v| format!("{v:.2e}"));
        let odd = if d.not_finite > 0 {
            format!("  {} not finite on one side", d.not_finite)
        } else {
            String::new()
        };
        let form = d.form.map_or("", Form::name);
        let _ = writeln!(
            out,
            "{:<12} {form:<9}{relative:>12}{:>12}{odd}",
            d.tensor,
            format!("{:.2e}", d.max_abs)
        );
    }
}

/// Two dumps of a layer side by side.
pub(super) fn beside(out: &mut String, pair: &Pair, width: usize) {
    let [a, b] = &pair.engines;
    wrapped(out, "", &format!("Side by side, layer {}, shown and not judged: {a} | {b}", pair.layer), width);
    let wide = width >= 78;
    let _ = writeln!(
        out,
        "{:<20} {:>9} {:>10}{}",
        "tensor",
        "same",
        "off, rms",
        if wide { "   norms" } else { "" }
    );
    for t in &pair.tensors {
        if let Some(why) = &t.apart {
            let _ = writeln!(out, "{:<20} {why}", t.tensor);
            continue;
        }
        let norms = match &t.digests {
            [Some(a), Some(b)] if wide => format!("   {:.5e} | {:.5e}", a.norm, b.norm),
            _ => String::new(),
        };
        let same = 100.0 * t.same as f64 / t.elements.max(1) as f64;
        let _ = writeln!(out, "{:<20} {same:>8.2}% {:>10.1e}{norms}", t.tensor, t.difference);
    }
    out.push('\n');
}

/// How many snapshots agree, are new, differ.
pub(super) fn snapshots_line(all: &[Kept]) -> String {
    let count = |state| all.iter().filter(|s| s.state == state).count();
    let counts = [(State::Agrees, "agree"), (State::New, "new"), (State::Differs, "differ")];
    let counts: Vec<String> = counts
        .iter()
        .filter(|(s, _)| count(*s) > 0)
        .map(|(s, word)| format!("{} {word}", count(*s)))
        .collect();
    let line = format!("snapshots: {}", counts.join(", "));
    match all.iter().all(|s| s.accepted) {
        true => line,
        false => paint(Verdict::Fault, &format!("{line}; not accepted, so this run does not pass")),
    }
}

/// What became of the snapshots of a run.
pub(super) fn snapshots(out: &mut String, all: &[Kept], width: usize) {
    if all.is_empty() {
        return;
    }
    let _ = writeln!(out, "{}", snapshots_line(all));
    for s in all.iter().filter(|s| s.state != State::Agrees) {
        let state = if s.state == State::New { "new" } else { "differs" };
        let _ = writeln!(out, "  {state}: {}", s.file);
        for line in &s.diff {
            match line.split_once(' ') {
                Some((sign @ ("+" | "-"), rest)) => wrapped(out, &format!("    {sign} "), rest, width),
                _ => wrapped(out, "    ", line, width),
            }
        }
    }
    let pending = all.iter().any(|s| !s.accepted && s.written.is_some());
    if pending {
        let how = "written beside them as .snap.new: `cargo insta review` shows and accepts them where they lie in a cargo \
                   workspace; renaming one to .snap, or INSTA_UPDATE=always, accepts it as well";
        wrapped(out, "  ", how, width);
    } else if all.iter().any(|s| !s.accepted) {
        wrapped(
            out,
            "  ",
            "nothing was written (CI is set, or INSTA_UPDATE=no): repeat it with INSTA_UPDATE=new, and review",
            width,
        );
    }
    out.push('\n');
}
