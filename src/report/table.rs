/*!
The table of a report: a row a tensor, phases together unless one of them is at fault.

Columns stand in one order and are taken by another: where the terminal is narrow, what matters least is left out first.
*/

use super::LayerReport;
use super::finding::short;
use super::terminal::{compared, paint, wrapped};
use crate::judge::{Digest, Unit, Verdict, Which};
use mla_reference::{Form, Phase};
use std::fmt::Write;

/// Columns beside tensor, phase and verdict, as they stand; the number says which is taken first where room is short.
const COLUMNS: [(&str, usize, usize); 9] = [
    ("axes", 26, 7),
    ("ulps", 6, 2),
    ("bound", 8, 3),
    ("flips", 7, 4),
    ("sees", 7, 1),
    ("norm", 11, 5),
    ("ref norm", 11, 6),
    ("checksum", 12, 8),
    ("ref check", 12, 9),
];
/// Columns of a report that compares nothing.
const DIGESTS: [&str; 3] = ["axes", "ref norm", "ref check"];

/// Rows of the table: phases of a tensor together, unless one of them is at fault.
fn rows(units: &[Unit]) -> Vec<(Vec<&Unit>, String)> {
    let accused = |u: &Unit| matches!(u.verdict, Verdict::Fault | Verdict::ContractBroken);
    let mut rows: Vec<(Vec<&Unit>, String)> = Vec::new();
    for u in units {
        let phase = u.phase.map_or("", Phase::name);
        match rows.last_mut() {
            Some((all, p))
                if (all[0].which, all[0].tensor) == (u.which, u.tensor)
                    && !accused(u)
                    && !accused(all[0]) =>
            {
                all.push(u);
                *p = "both".into();
            }
            _ => rows.push((vec![u], phase.to_string())),
        }
    }
    rows
}

/// Which columns fit beside `used` characters.
fn fitting(l: &LayerReport, used: usize, width: usize) -> Vec<(&'static str, usize)> {
    let wanted = |name: &str| compared(l) || DIGESTS.contains(&name);
    let mut by: Vec<_> = COLUMNS.iter().filter(|c| wanted(c.0)).collect();
    by.sort_by_key(|c| c.2);
    let (mut room, mut taken) = (width.saturating_sub(used), Vec::new());
    for c in by {
        if c.1 > room {
            break;
        }
        room -= c.1;
        taken.push(c.0);
    }
    COLUMNS.iter().filter(|c| taken.contains(&c.0)).map(|c| (c.0, c.1)).collect()
}

/// Writes the table.
pub fn table(out: &mut String, l: &LayerReport, width: usize) {
    let weight = |u: &Unit| matches!(u.which, Which::Weight(_));
    let weights = l.tensors.iter().filter(|u| weight(u)).count();
    let all_exact = l.tensors.iter().filter(|u| weight(u)).all(|u| u.verdict == Verdict::Exact);
    let all = rows(&l.tensors);
    let verdicts =
        if compared(l) { all.iter().map(|(u, _)| worst(u).name().len()).max().unwrap_or(0) + 1 } else { 0 };
    let columns = fitting(l, 21 + verdicts, width);
    let cell = |name: &str, width: usize, text: &str| {
        if name == "axes" { format!("{text:<width$}") } else { format!("{text:>width$}") }
    };
    let axes = columns.iter().take_while(|c| c.0 == "axes").count();
    let mut line = format!("{:<12} {:<8}", "tensor", "phase");
    for (i, (name, n)) in columns.iter().enumerate() {
        if i == axes {
            line += &format!("{:<verdicts$}", if verdicts > 0 { "verdict" } else { "" });
        }
        line += &cell(name, *n, name);
    }
    let _ = writeln!(out, "{}", line.trim_end());
    if all_exact && weights > 0 {
        let _ = writeln!(out, "{weights} weights: {}, bit for bit", paint(Verdict::Exact, "exact"));
    }
    let mut group = None;
    let none = weights > 0 && l.tensors.iter().filter(|u| weight(u)).all(|u| u.uncaptured);
    if none {
        let _ = writeln!(out, "{weights} weights: not captured; the file's are taken");
    }
    for (units, phase) in all.iter().filter(|(u, _)| !(weight(u[0]) && (all_exact || none))) {
        let u = units[0];
        if group != Some(u.form) && u.form.is_some() {
            let _ = writeln!(out, "{}:", u.form.map_or("", Form::name));
        }
        group = Some(u.form);
        let mut line = format!("{:<12} {phase:<8}", u.tensor);
        for (i, (name, n)) in columns.iter().enumerate() {
            if i == axes && verdicts > 0 {
                let v = worst(units);
                line += &(paint(v, v.name()) + &" ".repeat(verdicts.saturating_sub(v.name().len())));
            }
            line += &cell(name, *n, &text(name, units));
        }
        if columns.len() == axes && verdicts > 0 {
            line += &paint(worst(units), worst(units).name());
        }
        let _ = writeln!(out, "{}", line.trim_end());
        let note = units.iter().filter(|u| u.verdict != Verdict::Fault).find_map(|u| u.note.as_deref());
        if let Some(n) = note.filter(|n| !n.is_empty()) {
            wrapped(out, &" ".repeat(13.min(width / 4)), n, width);
        }
    }
    let legend = [
        ("ulps", "worst error in units of the output's last place"),
        ("bound", "the same as a share of what rounding allows"),
        ("flips", "share of elements that are not the rounded reference"),
        ("sees", "smallest gain (in attention also softmax scale) that would have been a fault"),
        ("norm", "L2 norm, shown and never judged"),
    ];
    let legend: Vec<String> = legend
        .iter()
        .filter(|(name, _)| compared(l) && columns.iter().any(|c| c.0 == *name))
        .map(|(name, what)| format!("{name}: {what}"))
        .collect();
    if !legend.is_empty() {
        wrapped(out, "", &legend.join("; "), width);
    }
}

fn worst(units: &[&Unit]) -> Verdict {
    units.iter().map(|u| u.verdict).max().unwrap_or(Verdict::NotCompared)
}

/// A cell of a column.
fn text(column: &str, units: &[&Unit]) -> String {
    let none = || "-".to_string();
    let most = || {
        let all = units.iter().filter_map(|u| u.worst.as_ref());
        all.max_by(|a, b| a.share_of_bound.total_cmp(&b.share_of_bound))
    };
    let digest = |of: fn(&Unit) -> Option<Digest>, f: fn(Digest) -> f64| {
        total(units, of).map_or_else(none, |d| format!("{:.5e}", f(d)))
    };
    match column {
        "axes" => units[0].axes.iter().map(|a| a.name()).collect::<Vec<_>>().join(", "),
        "ulps" => most().map_or_else(none, |w| short(w.ulps)),
        "bound" => most().map_or_else(none, |w| short(w.share_of_bound)),
        "flips" => {
            let (flips, all) = units.iter().fold((0, 0), |(f, n), u| (f + u.flips, n + u.elements));
            match (flips, all) {
                (_, 0) => none(),
                (0, _) => "0".into(),
                _ => format!("{:.0e}", flips as f64 / all as f64),
            }
        }
        "sees" => sees(units),
        "norm" => digest(|u| u.engine, |d| d.norm),
        "ref norm" => digest(|u| u.reference, |d| d.norm),
        "checksum" => digest(|u| u.engine, |d| d.checksum),
        _ => digest(|u| u.reference, |d| d.checksum),
    }
}

/// The smallest gain, or scale where that is larger, that would have been seen in all phases.
fn sees(units: &[&Unit]) -> String {
    let of = |u: &Unit| {
        let p = u.power.as_ref()?;
        let scale = if p.scale_applies { p.scale } else { Some(0.0) };
        Some(p.gain?.max(scale?))
    };
    let compared: Vec<&&Unit> = units.iter().filter(|u| u.power.is_some()).collect();
    let all: Option<Vec<f64>> = compared.iter().map(|u| of(u)).collect();
    match all.and_then(|v| v.into_iter().reduce(f64::max)) {
        Some(v) => format!("{v:.0e}"),
        None if compared.is_empty() => "-".into(),
        None => "none".into(),
    }
}

/// Norm and checksum of several phases together.
fn total(units: &[&Unit], of: fn(&Unit) -> Option<Digest>) -> Option<Digest> {
    let all: Vec<Digest> = units.iter().filter_map(|u| of(u)).collect();
    (!all.is_empty()).then(|| Digest {
        norm: all.iter().map(|d| d.norm * d.norm).sum::<f64>().sqrt(),
        checksum: all.iter().map(|d| d.checksum).sum(),
    })
}
