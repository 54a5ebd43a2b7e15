/*!
Drawings of the terminal report, in characters, and the words that stand in their place for whoever has them read aloud.

The map of the first tensor at fault (which rows and heads, or rows and columns of a weight), the stages with their marks, the
layers of a run. All keep within the width that they are given.
*/

use super::finding::{self, short};
use super::terminal::{paint, wrapped};
use super::{LayerReport, Report};
use crate::judge::picture::{BEYOND, LEVELS, Picture, level};
use crate::judge::{TABLE, Unit, Verdict, Which};
use mla_reference::Form;
use std::fmt::Write;

/// Most lines of a map.
const LINES: usize = 16;

/// Where a tensor is wrong: rows downwards, heads (of a weight columns) across.
pub(super) fn map(out: &mut String, l: &LayerReport, u: &Unit, p: &Picture, width: usize) {
    // Half of the line for the map, at least.
    let named =
        |p: &Picture| -> Vec<String> { p.rows.iter().map(|r| finding::line_words(l, u, *r)).collect() };
    let lines = p.shrunk(LINES, usize::MAX);
    let room = named(&lines).iter().map(String::len).max().unwrap_or(0).min(width / 2 - 4);
    let small = p.shrunk(LINES, width.saturating_sub(room + 5));
    let _ = writeln!(out, "  {:<room$} {}", finding::lines_of(u), finding::across_of(&small));
    for (name, cells) in named(&small).iter().zip(&small.cells) {
        let name: String = name.chars().take(room).collect();
        let mut line = String::new();
        for run in cells.as_bytes().chunk_by(|a, b| (level(*a) < BEYOND) == (level(*b) < BEYOND)) {
            let text = String::from_utf8_lossy(run);
            line += &if level(run[0]) < BEYOND { text.to_string() } else { paint(Verdict::Fault, &text) };
        }
        let _ = writeln!(out, "  {name:<room$} {line}");
    }
    let mut used: Vec<usize> = small.cells.iter().flat_map(|l| l.bytes().map(level)).collect();
    used.sort_unstable();
    used.dedup();
    let mut legend = vec![". equal bits"];
    if used.iter().any(|l| (1..BEYOND).contains(l)) {
        legend.push("a to d within what rounding allows");
    }
    if used.iter().any(|l| (BEYOND..LEVELS.len() - 1).contains(l)) {
        legend.push("1 to 9 beyond it: once, twice, 4 times … 256 times");
    }
    if used.contains(&(LEVELS.len() - 1)) {
        legend.push("! not finite on one side");
    }
    wrapped(out, "  (", &(legend.join("; ") + ")"), width);
}

fn group(u: &Unit) -> &'static str {
    match (u.which, u.form) {
        (Which::Weight(_), _) => "weights",
        (_, None) => "shared",
        (_, Some(Form::Fused)) => "fused",
        (_, Some(Form::Absorbed)) => "absorbed",
    }
}

const GROUPS: [&str; 4] = ["weights", "shared", "fused", "absorbed"];

/// Tensors of a group with the worst verdict of their phases.
fn verdicts<'l>(l: &'l LayerReport, name: &str) -> Vec<(&'l str, Verdict)> {
    let mut marks: Vec<(&str, Verdict)> = Vec::new();
    for u in l.tensors.iter().filter(|u| group(u) == name) {
        match marks.last_mut() {
            Some((t, v)) if *t == u.tensor => *v = (*v).max(u.verdict),
            _ => marks.push((u.tensor, u.verdict)),
        }
    }
    marks
}

/// One line a group: each tensor with the mark of its verdict.
pub(super) fn stages(out: &mut String, l: &LayerReport, width: usize) {
    for name in GROUPS {
        let mut line = format!("{name:<10}");
        let start = line.len();
        let mut used = start;
        for (t, v) in verdicts(l, name) {
            let cell = t.len() + 3;
            if used + cell > width {
                line = format!("{}\n{}", line.trim_end(), " ".repeat(start));
                used = start;
            }
            line += &format!("{t} {} ", paint(v, &v.row().mark.to_string()));
            used += cell;
        }
        if used > start {
            let _ = writeln!(out, "{}", line.trim_end());
        }
    }
    let used = |v: Verdict| l.tensors.iter().any(|u| u.verdict == v);
    let legend: Vec<String> =
        TABLE.iter().filter(|r| used(r.verdict)).map(|r| format!("{} {}", r.mark, r.name)).collect();
    let _ = writeln!(out, "          ({})", legend.join(", "));
}

/// The same in sentences, the worst first.
pub(super) fn stages_in_words(out: &mut String, l: &LayerReport, width: usize) {
    for row in TABLE.iter().rev() {
        let mut all = Vec::new();
        for name in GROUPS {
            let of = verdicts(l, name).into_iter().filter(|(_, v)| *v == row.verdict).map(|(t, _)| t);
            let of: Vec<&str> = of.collect();
            if !of.is_empty() {
                all.push(format!("{name} {}", of.join(", ")));
            }
        }
        if !all.is_empty() {
            wrapped(out, &format!("{}: ", row.name), &(all.join("; ") + "."), width);
        }
    }
}

/// A line a layer: verdict, worst share of a bound, norms of the output.
pub(super) fn layers(out: &mut String, report: &Report, width: usize) {
    if report.layers.len() < 2 {
        return;
    }
    let name = report.layers.iter().map(|l| l.verdict.name().len()).max().unwrap_or(0);
    let _ = writeln!(
        out,
        "{:>5} {:<1} {:<name$} {:>9} {:>11} {:>11}",
        "layer", "", "verdict", "worst", "norm", "reference"
    );
    for l in &report.layers {
        let s = l.summary();
        let norm = |n: Option<f64>| n.map_or("-".into(), |n| format!("{n:.4e}"));
        let v = l.verdict;
        let pad = " ".repeat(name - v.name().len());
        let _ = writeln!(
            out,
            "{:>5} {} {}{pad} {:>9} {:>11} {:>11}",
            l.layer,
            paint(v, &v.row().mark.to_string()),
            paint(v, v.name()),
            s.worst.map_or("-".into(), short),
            norm(s.norm),
            norm(s.reference)
        );
    }
    let legend =
        "worst: the largest share of what rounding allows; norm: of the layer's output, never judged";
    wrapped(out, "", legend, width);
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use mla_reference::{Phase, Stage};

    fn wide() -> (LayerReport, Unit, Picture) {
        let l = sample::layer(1);
        let u = sample::unit(Stage::AttnOut, Some(Form::Fused), Phase::Prefill, Verdict::Fault, 5);
        let mut line = ".".repeat(64);
        line.replace_range(63..64, "7");
        let p = Picture {
            rows: (0..32).map(|i| (i * 10, i * 10 + 9)).collect(),
            heads: (0..64).map(|h| (h * 2, h * 2 + 1)).collect(),
            cells: (0..32).map(|i| if i == 31 { line.clone() } else { ".".repeat(64) }).collect(),
            columns: vec![(0, 0)],
            by_column: "7".into(),
            histogram: vec![],
        };
        (l, u, p)
    }

    #[test]
    fn a_map_fits_and_keeps_the_one_cell_that_is_wrong() {
        let (l, u, p) = wide();
        for width in [40, 60, 80, 200] {
            let mut out = String::new();
            map(&mut out, &l, &u, &p, width);
            let plain = anstream::adapter::strip_str(&out).to_string();
            assert!(plain.lines().all(|l| l.chars().count() <= width), "{width}: {plain}");
            assert_eq!(plain.lines().filter(|l| l.ends_with(".7")).count(), 1, "{plain}");
            assert!(plain.contains("  tokens") && plain.contains("heads 0 to 127"), "{plain}");
            assert!(plain.contains("310..319") || plain.contains("300..319"), "{plain}");
        }
    }

    /// What is read aloud has no marks, and says every tensor.
    #[test]
    fn words_say_what_marks_do() {
        let mut report = sample::report(&[1]);
        sample::spoil(&mut report, 1, Form::Absorbed, Phase::Decode);
        let mut out = String::new();
        stages_in_words(&mut out, &report.layers[0], 80);
        assert_eq!(
            out,
            "fault: absorbed attn_out.\nrounding: shared kv_a; fused attn_out.\nexact: weights w_uk.\n"
        );
    }

    #[test]
    fn layers_have_a_line_each() {
        let mut report = sample::report(&[1, 2, 3]);
        sample::spoil(&mut report, 2, Form::Fused, Phase::Prefill);
        let mut out = String::new();
        layers(&mut out, &report, 60);
        let plain = anstream::adapter::strip_str(&out).to_string();
        assert!(
            plain.contains("\n    1 ~ rounding      0.75") && plain.contains("\n    2 X fault         0.75"),
            "{plain}"
        );
        assert!(plain.lines().all(|l| l.len() <= 60));
        let mut one = String::new();
        layers(&mut one, &sample::report(&[1]), 60);
        assert_eq!(one, "");
    }
}
