/*! The report of `bench` as a table, for terminals and for Markdown. */

use super::{Report, ShapeReport, Spread, StageReport};

/// A number in a column of eight.
fn figure(x: f64) -> String {
    match x {
        x if !x.is_finite() => "-".into(),
        x if x >= 1000.0 => format!("{x:.0}"),
        x if x >= 10.0 => format!("{x:.1}"),
        x => format!("{x:.2}"),
    }
}

/// The cells of a stage, as in [`HEAD`].
fn cells(s: &StageReport) -> [String; 9] {
    let mut entries: Vec<&str> = s.launches.iter().map(|l| l.entry.as_str()).collect();
    entries.dedup();
    let some = |x: f64, there: bool| if there { figure(x) } else { "-".into() };
    [
        s.stage.clone(),
        entries.join(" + "),
        figure(s.cold.median),
        format!("{} to {}", figure(s.cold.least), figure(s.cold.most)),
        figure(s.warm.median),
        some(s.gb_a_second, s.bytes > 0),
        some(s.tflop_a_second, s.operations > 0),
        s.binds.map_or("-", |b| b.name()).into(),
        s.share.map_or("-".into(), |x| format!("{x:.2}")),
    ]
}

const HEAD: [&str; 9] =
    ["stage", "kernel", "cold us", "least to most", "warm us", "GB/s", "TFLOP/s", "bound by", "share"];
/// Columns of text; the others are numbers, flush right.
const LEFT: [usize; 3] = [0, 1, 7];

/// All launches one after the other.
fn total(shape: &ShapeReport) -> [Spread; 2] {
    let sum =
        |of: fn(&StageReport) -> Spread| shape.stages.iter().map(of).fold(Spread::default(), Spread::and);
    [sum(|s| s.cold), sum(|s| s.warm)]
}

fn title(s: &ShapeReport) -> String {
    let splits = if s.new == 1 && s.splits > 1 { format!(", {} splits", s.splits) } else { String::new() };
    format!("{}, {}{splits}", s.shape, s.form.name())
}

fn judged(s: &ShapeReport) -> Vec<String> {
    let Some(j) = &s.judged else { return vec!["not judged".into()] };
    let mut lines = vec![format!("judged: {} ({})", j.verdict.name(), j.drawn)];
    lines.extend(j.evidence.iter().map(|e| format!("  {e}")));
    lines
}

fn ceilings(r: &Report) -> Vec<String> {
    let copy = format!("copy {:.0} GB/s", r.ceilings.copy_bytes_a_second / 1e9);
    let product = match r.ceilings.product_operations_a_second {
        Some(x) => format!("bf16 matrix product {:.0} TFLOP/s, by {}", x / 1e12, r.ceilings.product_by),
        None => format!("ceiling of products: not measured ({})", r.ceilings.product_by),
    };
    vec![copy, product]
}

const LEGEND: &str = "cold: caches overwritten before each launch, median of the repetitions; warm: the same launch right before. \
GB/s and TFLOP/s of what must move and be computed, cold. bound by: the ceiling, copy or product, that takes longer; share: of \
its speed.";

/// For a terminal.
pub fn terminal(r: &Report) -> String {
    let mut out = format!("{}\n{}, {}\n", r.device, r.model, r.dtype);
    for line in ceilings(r) {
        out += &format!("{line}\n");
    }
    for s in &r.shapes {
        let rows: Vec<[String; 9]> =
            std::iter::once(HEAD.map(str::to_string)).chain(s.stages.iter().map(cells)).collect();
        let widths: Vec<usize> =
            (0..HEAD.len()).map(|c| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0)).collect();
        out += &format!("\n{}\n", title(s));
        for row in &rows {
            let line: Vec<String> = row
                .iter()
                .enumerate()
                .map(|(c, cell)| match LEFT.contains(&c) {
                    true => format!("{cell:<w$}", w = widths[c]),
                    false => format!("{cell:>w$}", w = widths[c]),
                })
                .collect();
            out += line.join("  ").trim_end();
            out.push('\n');
        }
        let [cold, warm] = total(s);
        out += &format!("all of these: {} us cold, {} us warm\n", figure(cold.median), figure(warm.median));
        for line in judged(s) {
            out += &format!("{line}\n");
        }
    }
    out + "\n" + LEGEND + "\n"
}

/// For a document.
pub fn markdown(r: &Report) -> String {
    let mut out = format!("{}; {}, {}. {}.\n", r.device, r.model, r.dtype, ceilings(r).join("; "));
    for s in &r.shapes {
        let [cold, warm] = total(s);
        out += &format!(
            "\n{}: {} us cold, {} us warm; {}\n\n| {} |\n|{}\n",
            title(s),
            figure(cold.median),
            figure(warm.median),
            judged(s).join("; "),
            HEAD.join(" | "),
            HEAD.iter()
                .enumerate()
                .map(|(c, _)| if LEFT.contains(&c) { "---|" } else { "---:|" })
                .collect::<String>(),
        );
        for stage in &s.stages {
            out += &format!("| {} |\n", cells(stage).join(" | "));
        }
    }
    out
}
