/*!
A report as one HTML file for people: nothing is loaded, no script runs, it is legible without colour and on a phone.

Verdict and cause first, then the layers as a strip, then each layer that is not clean in full and as many clean ones as fit: a file
that a browser opens at once and a mail takes stays below a megabyte, and says what it leaves to the JSON. All that comes from a model
file, a dump or the command line is escaped.
*/

mod graph;
mod parts;
mod picture;

use super::finding;
use super::{LayerReport, Report, terminal};
use crate::judge::Verdict;
use std::fmt::Write;

/// What the parts of a report's layers may take, in bytes.
const ROOM: usize = 800_000;
const STYLE: &str = include_str!("style.css");

/// The file.
///
/// # Errors
/// None: the signature is that of all kinds of reports.
pub fn render(report: &Report) -> Result<Vec<u8>, String> {
    let mut out = String::from("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    out += "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n";
    let title = format!("mla-check: {}", report.verdict);
    let _ = write!(out, "<title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n", escaped(&title));
    head(&mut out, report);
    // Whatever is wrong comes before what is clean.
    let (wrong, clean): (Vec<_>, Vec<_>) = report.layers.iter().partition(|l| class(l.verdict) != "ok");
    let (mut sections, mut shown, mut left) = (String::new(), Vec::new(), Vec::new());
    for l in wrong.into_iter().chain(clean) {
        let section = layer(report, l);
        if sections.len() + section.len() > ROOM {
            left.push(l.layer);
        } else {
            shown.push(l.layer);
            sections += &section;
        }
    }
    parts::strip(&mut out, report, &shown);
    out += &sections;
    if !left.is_empty() {
        let which = finding::ranges(&left);
        let _ = writeln!(
            out,
            "<p>Not shown in full, for the size of this file: layers {which}. The JSON report has them.</p>"
        );
    }
    foot(&mut out, report);
    out += "</body>\n</html>\n";
    Ok(out.into_bytes())
}

/// Text for HTML.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c if c.is_control() && c != '\n' => out += &escaped(&c.escape_default().to_string()),
            c => out.push(c),
        }
    }
    out
}

/// Class of a verdict: ok, warn, open or bad.
fn class(v: Verdict) -> &'static str {
    match (v.exit(false), v) {
        (0, v) if v.differs() => "warn",
        (0, _) => "ok",
        (_, Verdict::AfterFault) => "warn",
        (3, _) => "open",
        _ => "bad",
    }
}

/// A verdict with its mark.
fn marked(v: Verdict) -> String {
    format!(
        "<span class=\"{}\"><span class=\"mark\">{}</span> {}</span>",
        class(v),
        escaped(&v.row().mark.to_string()),
        escaped(v.name())
    )
}

fn head(out: &mut String, report: &Report) {
    let _ = writeln!(out, "<header class=\"banner {}\">", class(report.verdict));
    if let Some(f) = &report.deliberate_fault {
        let _ = writeln!(out, "<p><strong>DELIBERATE FAULT {}</strong></p>", escaped(f));
    }
    let _ = writeln!(
        out,
        "<h1><span class=\"mark\">{}</span> {}</h1>",
        escaped(&report.verdict.row().mark.to_string()),
        escaped(report.verdict.name())
    );
    let lines = anstream::adapter::strip_str(&terminal::verdict_lines(report)).to_string();
    let shown = 6;
    for line in lines.lines().filter(|l| !l.starts_with("DELIBERATE FAULT")).take(shown) {
        let _ = writeln!(out, "<p>{}</p>", escaped(line));
    }
    let more = lines.lines().count().saturating_sub(shown);
    if more > 0 {
        let _ = writeln!(out, "<p>and {more} more lines, layer by layer below</p>");
    }
    // Why, of the first tensor at fault.
    let first = report.layers.iter().find_map(|l| Some((l, *finding::bad(l).first()?)));
    if let Some((l, u)) = first {
        let _ = writeln!(
            out,
            "<p>First bad, layer {}: <strong>{}</strong></p>",
            l.layer,
            escaped(&finding::title(u))
        );
        let why = ["cause", "explained", "unexplained", "where"];
        let sentences = finding::sentences(l, u);
        for (lead, text) in sentences.iter().filter(|s| why.contains(&s.0)) {
            let _ = writeln!(out, "<p>{}: {}</p>", escaped(lead), escaped(text));
        }
    }
    let _ = writeln!(out, "</header>");
    for lack in report.broken.iter().chain(&report.gaps) {
        let _ = writeln!(out, "<p>{}: {}</p>", marked(lack.verdict), escaped(&lack.what));
    }
}

fn layer(report: &Report, l: &LayerReport) -> String {
    let mut out = String::new();
    let _ =
        writeln!(out, "<section id=\"layer-{}\"><h2>Layer {}: {}</h2>", l.layer, l.layer, marked(l.verdict));
    parts::scalars(&mut out, l);
    let bad = finding::bad(l);
    let shown = 4;
    for (i, u) in bad.iter().enumerate().take(shown) {
        let _ = writeln!(out, "<h3>{}</h3>", escaped(&finding::title(u)));
        parts::sentences(&mut out, &finding::sentences(l, u));
        if i == 0
            && let Some(p) = &u.picture
        {
            picture::draw(&mut out, l, u, p);
        }
    }
    if bad.len() > shown {
        let names: Vec<String> = bad[shown..].iter().map(|u| u.title()).collect();
        let _ = writeln!(
            out,
            "<p>and {} more with evidence of their own: {}</p>",
            names.len(),
            escaped(&names.join("; "))
        );
    }
    parts::probes(&mut out, l);
    out += "<h3>Stages</h3>\n";
    out += &graph::draw(l);
    parts::legend(&mut out, l);
    parts::about(&mut out, report, l);
    parts::tensors(&mut out, l);
    parts::power(&mut out, l);
    out + "</section>\n"
}

fn foot(out: &mut String, report: &Report) {
    let _ = writeln!(out, "<h2>Not judged</h2>\n<ul>");
    for n in &report.not_judged {
        let _ = writeln!(out, "<li>{}</li>", escaped(n));
    }
    let _ = writeln!(out, "</ul>\n<h2>Repeat with</h2>\n<pre>{}</pre>", escaped(&report.command));
    let _ = writeln!(
        out,
        "<p class=\"soft\">mla-check {}, {}</p>",
        escaped(report.version),
        escaped(report.schema)
    );
}

#[cfg(test)]
mod tests;
