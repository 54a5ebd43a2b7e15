/*! An [`Explanation`] for people: what it is first, then how it comes about, then what both values are. */

use super::{Explanation, Key, Operand, Sum, Term};
use mla_reference::{Axis, Phase};
use std::fmt::Write;

/// Columns of a lead word.
const LEAD: usize = 11;

/// The whole, no line longer than `width` where words allow it.
pub fn render(e: &Explanation, width: usize) -> String {
    let mut out = Lines { text: String::new(), width: width.max(40) };
    let index: Vec<String> = e.index.iter().map(|p| format!("{} {}", p.axis.name(), p.index)).collect();
    out.line("", &format!("{}, {}: {}", e.tensor, index.join(", "), e.standing.words()));
    let _ = writeln!(out.text);
    if let Some(row) = row(e) {
        out.line("row", &row);
    }
    out.line("formula", &e.formula);
    if !e.from.is_empty() {
        out.line("from", &e.from.join(", "));
    }
    if !e.contract.is_empty() {
        out.line("contract", &e.contract);
    }
    for (i, cast) in e.casts.iter().enumerate() {
        out.line(if i == 0 { "casts" } else { "" }, cast);
    }
    if !e.steps.is_empty() {
        let _ = writeln!(out.text);
    }
    let name = e.steps.iter().map(|s| s.name.chars().count()).max().unwrap_or(0);
    for s in &e.steps {
        out.plain(&format!("  {:name$}  {:<22} {}", s.name, number(s.value), s.how));
    }
    keys(&mut out, &e.keys);
    for s in &e.sums {
        sum(&mut out, s);
    }
    values(&mut out, e);
    out.line("verdict", &format!("{} of the whole tensor, by the report", e.verdict));
    for note in &e.notes {
        out.line("note", note);
    }
    let _ = writeln!(out.text);
    out.line("repeats", &e.command);
    out.text
}

struct Lines {
    text: String,
    width: usize,
}

impl Lines {
    /// A lead word and what it leads, broken between words.
    fn line(&mut self, lead: &str, text: &str) {
        let indent = if lead.is_empty() && self.text.is_empty() { 0 } else { LEAD };
        let mut column = indent;
        let mut line = format!("{lead:<indent$}");
        for word in text.split(' ') {
            let word: String = word.chars().flat_map(shown).collect();
            let n = word.chars().count();
            if column > indent && column + 1 + n > self.width {
                let _ = writeln!(self.text, "{}", line.trim_end());
                (line, column) = (" ".repeat(LEAD), LEAD);
            } else if column > indent {
                line.push(' ');
                column += 1;
            }
            line += &word;
            column += n;
        }
        let _ = writeln!(self.text, "{}", line.trim_end());
    }

    /// A line of a table.
    fn plain(&mut self, text: &str) {
        let _ = writeln!(self.text, "{}", text.trim_end());
    }
}

/// A character as a terminal may have it.
fn shown(c: char) -> Vec<char> {
    if c.is_control() { c.escape_default().collect() } else { vec![c] }
}

/// To 17 digits: the value itself.
fn number(v: f64) -> String {
    if v == 0.0 || (1e-4..1e15).contains(&v.abs()) { format!("{v}") } else { format!("{v:e}") }
}

/// To six digits.
fn short(v: f64) -> String {
    digits(v, 6)
}

fn digits(v: f64, n: usize) -> String {
    let rounded: f64 = format!("{v:.*e}", n.saturating_sub(1)).parse().unwrap_or(v);
    number(rounded)
}

fn row(e: &Explanation) -> Option<String> {
    let request = e.row.request?;
    let mut text = format!("request {request}");
    if let Some(r) = e.row.regime {
        text += &format!(", {r} context");
    }
    if let Some(i) = e.row.within {
        let keys = matches!(e.index.first().map(|p| p.axis), Some(Axis::Key | Axis::Page));
        text += &format!(", {} {i}", if keys { "key" } else { "token" });
    }
    if let Some(p) = e.row.phase {
        text += &format!(", {}", p.name());
    }
    if let Some(s) = e.row.split {
        let word = if e.row.phase == Some(Phase::Prefill) { "part" } else { "split" };
        text += &format!(", {word} {s}");
    }
    if let Some(r) = e.row.rank {
        text += &format!(", rank {r}");
    }
    Some(text)
}

fn operand(o: &Operand) -> String {
    let mut text = o.name.clone();
    if !o.index.is_empty() {
        let index: Vec<String> = o.index.iter().map(|i| i.to_string()).collect();
        text += &format!("[{}]", index.join(", "));
    }
    text += &format!(" {}", short(o.value));
    let mut said = Vec::new();
    if let (Some(d), Some(b)) = (o.dtype, &o.bits) {
        said.push(format!("{d} {b}"));
    }
    if let Some(v) = o.stored {
        said.push(format!("stored {}", short(v)));
    }
    if let Some(v) = o.file.filter(|v| *v != o.value) {
        said.push(format!("file {}", number(v)));
    }
    if o.computed {
        said.push("computed here".into());
    }
    if said.is_empty() { text } else { format!("{text} ({})", said.join(", ")) }
}

fn sum(out: &mut Lines, s: &Sum) {
    let _ = writeln!(out.text);
    if let [one] = s.terms.as_slice()
        && s.count == 1
    {
        let factors: Vec<String> = one.factors.iter().map(operand).collect();
        out.line(&s.name, &format!("= {} {}", one.name, factors.join(" × ")));
        return;
    }
    let all = match s.rest.count {
        0 => format!("{}: {} terms, the largest first", s.name, s.count),
        _ => format!("{}: {} terms, the largest {}", s.name, s.count, s.terms.len()),
    };
    out.plain(&all);
    let name = s.terms.iter().map(|t| t.name.chars().count()).max().unwrap_or(0).max(4);
    out.plain(&format!("  {:name$}  {:>13}  {:>13}", "term", "value", "sum up to it"));
    for t in &s.terms {
        term(out, t, name);
    }
    if s.rest.count > 0 {
        out.plain(&format!("  {:name$}  {:>13}", "rest", short(s.rest.sum)));
    }
    out.plain(&format!(
        "  {:name$}  {:>13}  Σ of sizes {}, largest partial sum {}",
        "all",
        short(s.total),
        short(s.size),
        short(s.largest_partial)
    ));
}

fn term(out: &mut Lines, t: &Term, name: usize) {
    let factor = |(i, o): (usize, &Operand)| format!("{} {}", if i > 0 { "×" } else { "=" }, operand(o));
    let of = |o: &Operand| format!("of {}", operand(o));
    let parts: Vec<String> = t.factors.iter().enumerate().map(factor).chain(t.from.iter().map(of)).collect();
    let head = format!("  {:name$}  {:>13}  {:>13}", t.name, short(t.value), short(t.partial));
    let line = parts.join(" ");
    if head.chars().count() + 2 + line.chars().count() <= out.width {
        return out.plain(&format!("{head}  {line}"));
    }
    // Operands that don't fit stand below.
    out.plain(&head);
    parts.iter().for_each(|p| out.plain(&format!("{:1$}{p}", "", name + 4)));
}

fn keys(out: &mut Lines, keys: &[Key]) {
    if keys.is_empty() {
        return;
    }
    let _ = writeln!(out.text);
    out.plain("keys with the largest P");
    let line = |cells: [String; 7]| {
        let [key, rest @ ..] = cells;
        rest.iter().fold(format!("  {key:>5}"), |line, cell| format!("{line} {cell:>10}"))
    };
    out.plain(&line(["key", "q·k", "score", "max so far", "P", "P cast", "weight"].map(String::from)));
    for k in keys {
        let numbers = [k.raw, k.score, k.maximum, k.p, k.cast, k.weight].map(|v| digits(v, 4));
        let [a, b, c, d, e, f] = numbers;
        let index: Vec<String> = k.from.index.iter().map(|i| i.to_string()).collect();
        let (text, from) =
            (line([k.key.to_string(), a, b, c, d, e, f]), format!("{}[{}]", k.from.name, index.join(", ")));
        let fits = text.chars().count() + 2 + from.chars().count() <= out.width;
        out.plain(&if fits { format!("{text}  {from}") } else { text });
    }
}

fn values(out: &mut Lines, e: &Explanation) {
    let v = &e.value;
    let _ = writeln!(out.text);
    out.line("x", &format!("{} in float64", number(v.x)));
    out.line("rounded", &format!("{} ({} {})", number(v.rounded), v.dtype, v.rounded_bits));
    out.line("engine", &format!("{} ({} {})", number(v.engine), v.dtype, v.engine_bits));
    out.line("error", &format!("{} ulps of {}", short(v.error_ulps), short(v.ulp)));
    out.line("tie", &format!("{} ulps from x", short(v.tie_ulps)));
    let Some(b) = &e.bound else {
        out.line("bound", "none: bits are equal or not");
        return;
    };
    let in_ulps = |b: f64| format!("{} ({} ulps)", short(b), short(b / v.ulp));
    let mut text = format!("{} proven, {} statistical", in_ulps(b.proven), in_ulps(b.statistical));
    if let Some(r) = b.running {
        text += &format!(", {} by its own partial sums", in_ulps(r));
    }
    if let Some(r) = b.closer {
        text += &format!(", {} by its scores' own terms", in_ulps(r));
    }
    out.line("bound", &text);
    for p in &b.made_of {
        out.line("", &format!("{}: {}", p.what, short(p.value)));
    }
    out.line("usual", &format!("{}: standard deviation before the final rounding", in_ulps(b.usual)));
    out.line("share", &format!("{} of the proven bound and half an ulp", short(b.share)));
}
