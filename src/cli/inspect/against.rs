/*! `mla-check inspect FILE --against DIR`: the file's attention tensors beside the checkpoint that it was made from. */

use super::super::out::{Failure, Output};
use super::super::text::{escape, short, wrap};
use super::text::{paint, plural};
use crate::against::{Outcome, Report, TensorReport, Unmapped, against};
use crate::model::{Model, list};
use anstyle::AnsiColor;
use std::path::Path;

/// Runs the command for these layers of the file.
pub(super) fn main(
    model: &Model,
    original: &Path,
    layers: &[usize],
    out: &mut Output,
) -> Result<u8, Failure> {
    let original = Model::open(original).map_err(Failure::input)?;
    for w in original.source().warnings() {
        out.warn(&w);
    }
    let bar = out.progress(0);
    let report = against(model, &original, layers, &|what| bar.set_message(what.to_string()));
    bar.finish_and_clear();
    let report = report.map_err(Failure::input)?;
    if out.json() {
        out.print_json(&report)?;
    } else {
        let width = out.width().clamp(40, 80);
        let verdict = verdict(&report);
        out.print(&if out.quiet() { verdict } else { verdict + &text(&report, width) })?;
    }
    Ok(report.exit())
}

fn verdict(r: &Report) -> String {
    let (fits, differ, unreadable) =
        (r.count(Outcome::Fits), r.count(Outcome::Differs), r.count(Outcome::Unreadable));
    let all = plural(fits + differ + unreadable, "attention tensor");
    let more = if unreadable > 0 { format!(", {unreadable} can't be read") } else { String::new() };
    let layers = plural(r.layers.len(), "layer");
    let (colour, what) = if differ > 0 {
        (AnsiColor::Red, format!("{differ} of {all} differ from the original{more} ({layers})"))
    } else if !r.scalars.is_empty() {
        (
            AnsiColor::Red,
            format!("{} of the configuration differ from the original", plural(r.scalars.len(), "number")),
        )
    } else if unreadable > 0 {
        (AnsiColor::Yellow, format!("{unreadable} of {all} can't be read; the others fit the original"))
    } else if fits == 0 {
        (AnsiColor::Yellow, "nothing was compared: no layer is in both".into())
    } else {
        (AnsiColor::Green, format!("{all} of {layers} fit the original"))
    };
    paint(colour, &what) + "\n"
}

fn text(r: &Report, width: usize) -> String {
    let mut out = String::new();
    for (label, text) in [("file", &r.file), ("original", &r.original)] {
        out += &wrap(&format!("{label:<10}{}", escape(text)), width, 10);
        out.push('\n');
    }
    for s in &r.scalars {
        let text = format!(
            "{:<10}{} is {} in the file, {} in the original",
            "differs",
            s.name,
            short(s.file),
            short(s.original)
        );
        out += &wrap(&text, width, 10);
        out.push('\n');
    }
    for l in &r.layers {
        out += &format!(
            "\nlayer {:<24} {:<7} {:>7} {:>9} {:>9}\n",
            l.layer, "type", "blocks", "beyond", "rms error"
        );
        l.tensors.iter().for_each(|t| tensor(&mut out, t, width));
    }
    out.push('\n');
    for (label, u) in [("only in the file", &r.only_file), ("only in the original", &r.only_original)] {
        out += &wrap(&format!("{label}: {}", unmapped(u)), width, 2);
        out.push('\n');
    }
    out += &wrap(
        "rms error: of the values, relative to the original's; beyond: blocks that are further off than their type allows (0.0: the same values)",
        width,
        2,
    );
    out.push('\n');
    out
}

fn tensor(out: &mut String, t: &TensorReport, width: usize) {
    let number = |n: &&str| n.split_once('.').is_some_and(|(n, _)| n.bytes().all(|b| b.is_ascii_digit()));
    let after = ["blk.", "layers."].iter().find_map(|b| t.tensor.split_once(b).map(|s| s.1).filter(number));
    let name = after.and_then(|n| n.split_once('.')).map_or(&*t.tensor, |n| n.1);
    let name = name.strip_suffix(".weight").unwrap_or(name);
    let name = name.strip_prefix("self_attn.").unwrap_or(name);
    // Formats of checkpoints take a line.
    let (ty, format) = if t.ty.len() > 7 { ("", Some(&t.ty)) } else { (&*t.ty, None) };
    let (colour, word) = match t.outcome {
        Outcome::Fits => (AnsiColor::Green, "fits"),
        Outcome::Differs => (AnsiColor::Red, "differs"),
        Outcome::Unreadable => (AnsiColor::Yellow, "unread"),
    };
    let figures = t.fit.as_ref().map_or(String::new(), |f| {
        format!("{:>7} {:>9} {:>9}", f.blocks, f.beyond, format!("{:.1e}", f.relative))
    });
    let line = format!("  {word:<8} {:<20} {:<7} {figures}", escape(name), escape(ty));
    *out += &line.trim_end().replacen(word, &paint(colour, word), 1);
    out.push('\n');
    let mut say = |text: &str| {
        *out += &wrap(&format!("           {}", escape(text)), width, 11);
        out.push('\n');
    };
    if let Some(format) = format {
        say(&format!("{format}, against"));
    }
    say(&format!("{}, {}", t.original, if t.format.is_empty() { "?" } else { &t.format }));
    let odd = t.fit.as_ref().map_or(0, |f| f.odd);
    if odd > 0 {
        say(&format!(
            "{odd} blocks are off by up to four times more than usual{}",
            if t.outcome == Outcome::Fits { ", as an importance matrix can make them" } else { "" }
        ));
    }
    if t.outcome == Outcome::Fits {
        return;
    }
    if !t.cause.is_empty() {
        say(&t.cause);
    }
    if let Some(f) = &t.fit
        && let Some(w) = f.worst
    {
        let (from, to) = f.between.unwrap_or_default();
        let rows = if from == to {
            format!("row {from}")
        } else {
            format!("{} rows from {from} to {to}", f.rows_beyond)
        };
        say(&format!(
            "in {rows}; worst at row {}, columns {} to {}: off by {}, {} allowed; correlation {:.3}",
            w.row,
            w.col,
            w.col + w.len - 1,
            short(w.error),
            short(w.allowed),
            f.correlation
        ));
    }
}

fn unmapped(u: &Unmapped) -> String {
    let mut parts = Vec::new();
    if !u.layers.is_empty() {
        parts.push(format!("layers {}", list(&u.layers)));
    }
    parts.push(match u.attention.as_slice() {
        [] => "no attention tensor".to_string(),
        all => {
            let some: Vec<&str> = all.iter().take(3).map(String::as_str).collect();
            let more = if all.len() > 3 { ", …" } else { "" };
            format!("{} ({}{more})", plural(all.len(), "attention tensor"), escape(&some.join(", ")))
        }
    });
    parts.push(format!("{} outside attention, not looked at", plural(u.others, "tensor")));
    parts.join("; ")
}
