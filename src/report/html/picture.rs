/*! The picture of a tensor at fault: a map, a strip by column, and a histogram, all of characters with colours behind them. */

use super::escaped;
use crate::judge::Unit;
use crate::judge::picture::{LEVELS, Picture, level, words};
use crate::report::{LayerReport, finding};
use std::fmt::Write;

/// Draws it.
pub(super) fn draw(out: &mut String, l: &LayerReport, u: &Unit, p: &Picture) {
    let _ = writeln!(
        out,
        "<p class=\"soft\">How far the worst element of each place is off, as a share of what rounding allows. Lines: {}; across: {}.</p>",
        escaped(&finding::lines_of(u)),
        escaped(&finding::across_of(p))
    );
    out.push_str("<div class=\"scroll\"><table class=\"map\">\n");
    for (rows, cells) in p.rows.iter().zip(&p.cells) {
        let _ = writeln!(
            out,
            "<tr><th>{}</th><td>{}</td></tr>",
            escaped(&finding::line_words(l, u, *rows)),
            coloured(cells)
        );
    }
    out.push_str("</table></div>\n");
    if !p.heads.is_empty() && p.columns.len() > 1 {
        let _ = writeln!(
            out,
            "<p class=\"soft\">By column inside a head, 0 to {}:</p>\n<div class=\"scroll\"><table class=\"map\"><tr><td>{}</td></tr></table></div>",
            p.columns.last().map_or(0, |c| c.1),
            coloured(&p.by_column)
        );
    }
    histogram(out, p);
}

/// Characters in colours, runs of one level together.
fn coloured(text: &str) -> String {
    let mut out = String::new();
    let bytes = text.as_bytes();
    for run in bytes.chunk_by(|a, b| a == b) {
        let chars = escaped(&String::from_utf8_lossy(run));
        let _ = write!(out, "<i class=\"v{}\">{chars}</i>", level(run[0]));
    }
    out
}

/// Elements by level; bars by logarithm, so that few are seen beside many.
fn histogram(out: &mut String, p: &Picture) {
    let most = p.histogram.iter().copied().max().unwrap_or(0);
    if most == 0 {
        return;
    }
    let log = |n: u64| ((n + 1) as f64).ln();
    out.push_str("<div class=\"scroll\"><table class=\"hist\"><tr><th>sign</th><th class=\"l\">of what rounding allows</th><th>elements</th><th class=\"l\">logarithm</th></tr>\n");
    for (i, n) in p.histogram.iter().enumerate().filter(|(_, n)| **n > 0) {
        let _ = writeln!(
            out,
            "<tr><td class=\"mark\"><i class=\"v{i}\">{}</i></td><td class=\"l\">{}</td><td>{n}</td><td class=\"l\"><span style=\"width:{:.0}px\"></span></td></tr>",
            escaped(&char::from(LEVELS[i.min(LEVELS.len() - 1)]).to_string()),
            escaped(&words(i)),
            120.0 * log(*n) / log(most)
        );
    }
    out.push_str("</table></div>\n");
}
