/*! A difference for people: what is different at all, then what got worse, then the rest. */

use super::{Change, Difference, Figures, Row};
use crate::judge::Verdict;
use crate::report::finding::short;
use crate::report::terminal::{paint, wrapped};
use std::fmt::Write;

/// Rows shown that do not matter.
const SHOWN: usize = 10;

/// One line.
pub fn line(d: &Difference) -> String {
    let other = d.rows.iter().filter(|r| r.change == Change::Other).count();
    format!(
        "{} worse, {} better, {other} differ in nothing that matters, {} equal",
        d.worse, d.better, d.equal
    )
}

/// The whole.
pub fn render(d: &Difference, width: usize) -> String {
    let width = width.max(40);
    let mut out = format!("{}\n\n", line(d));
    for (name, side) in ["A  ", "B  "].iter().zip(&d.reports) {
        let text = format!("{}: {}, engine {}", side.file, side.verdict, side.engines.join("; "));
        wrapped(&mut out, name, &text, width);
    }
    for n in &d.notes {
        wrapped(&mut out, "   ", n, width);
    }
    let mut left = 0;
    let mut others = 0;
    let mut heading = None;
    for r in &d.rows {
        if r.change == Change::Other {
            others += 1;
            if others > SHOWN {
                left += 1;
                continue;
            }
        }
        if heading != Some(r.change) {
            heading = Some(r.change);
            let title = match r.change {
                Change::Worse => "Worse",
                Change::Better => "Better",
                Change::Other => "Not the same, but in nothing that matters",
            };
            let _ = writeln!(out, "\n{title}:");
        }
        row(&mut out, r, width);
    }
    if left > 0 {
        let _ = writeln!(out, "  and {left} more (--format json has all)");
    }
    out.push('\n');
    let flips = match d.tests {
        0 => "The two were judged by different contracts, whose shares of flips are not comparable."
            .to_string(),
        n => format!(
            "Flips of {n} tensors were compared; the probability that any change of them is called one by chance is {:e}.",
            d.alpha
        ),
    };
    let level = format!("{flips} The worst element, norms and times decide nothing.");
    wrapped(&mut out, "", &level, width);
    let total = |i: usize| d.seconds.iter().map(|s| s.1[i]).sum::<f64>();
    let _ = writeln!(out, "{:.1} s | {:.1} s", total(0), total(1));
    out
}

fn row(out: &mut String, r: &Row, width: usize) {
    let word = |v: Verdict| match v {
        Verdict::Exact if r.probe => "held",
        Verdict::Fault if r.probe => "broken",
        Verdict::NotApplicable if r.probe => "nothing learned",
        v => v.name(),
    };
    let verdict = |f: &Option<Figures>| f.as_ref().map_or("-".into(), |f| paint(f.verdict, word(f.verdict)));
    let [a, b] = &r.figures;
    let why = if r.why.is_empty() { String::new() } else { format!(" ({})", r.why.join(", ")) };
    let head = format!("{}: {} → {}{why}", r.title(), verdict(a), verdict(b));
    let _ = writeln!(out, "  {head}");
    let pair = |name: &str, of: &dyn Fn(&Figures) -> Option<String>| {
        let side = |f: &Option<Figures>| f.as_ref().and_then(of).unwrap_or("-".into());
        let (x, y) = (side(a), side(b));
        (x != "-" || y != "-")
            .then(|| if x == y { format!("{name} {x}") } else { format!("{name} {x} → {y}") })
    };
    let percent = |f: &Figures| (f.elements > 0).then(|| format!("{} %", short(100.0 * f.share())));
    let bound = |f: &Figures| f.share_of_bound.as_ref().and_then(|s| s.parse().ok()).map(short);
    let columns = [
        pair("flips", &percent),
        pair("worst, of bound", &bound),
        pair("sees", &|f| f.seen.map(|s| format!("{s:.0e}"))),
        pair("norm", &|f| f.norm.map(|n| format!("{n:.5e}"))),
        pair("checksum", &|f| f.checksum.map(|n| format!("{n:.5e}"))),
    ];
    let columns: Vec<String> = columns.into_iter().flatten().collect();
    if !columns.is_empty() {
        wrapped(out, "      ", &columns.join("; "), width);
    }
}
