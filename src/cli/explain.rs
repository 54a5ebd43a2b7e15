/*!
`mla-check explain`: every term behind one element of a report.

A report holds no tensors, but runs are deterministic: the command that stands in it is repeated, for one layer, until the
element's tensor is judged.
*/

use super::out::{Failure, Output};
use super::{Cli, Command, run, text};
use crate::compare::map::nearest;
use crate::explain::{self, Explanation};
use crate::judge::{Ask, Unit};
use crate::report::{LayerReport, Report};
use clap::{Args, Parser};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Options of `explain`.
#[derive(Args)]
#[command(after_help = "Examples:
  mla-check run model.gguf --report run.json
  mla-check explain run.json fused/attn_out 5 2 17
  mla-check explain run.json absorbed/out 5 17 --terms all

The report's own command is run again, in this folder, until the tensor is judged: the model (and dump, map, kernels) that it
names must still be there, as they were.")]
pub struct ExplainArgs {
    /// A JSON report of `run --report` or `compare --report`
    #[arg(value_name = "REPORT.json")]
    report: PathBuf,
    /// Tensor or weight as the report names it: `attn_in`, `absorbed/lse`, `w_q_a`
    #[arg(value_name = "TENSOR")]
    tensor: String,
    /// Its element: a number for each axis of the tensor
    #[arg(value_name = "INDEX", value_delimiter = ',')]
    index: Vec<usize>,
    /// Layer, where the report has several
    #[arg(long, value_name = "N")]
    layer: Option<usize>,
    /// Terms shown of each sum, the largest first: a number or `all`
    #[arg(long, value_name = "N|all", default_value = "8", value_parser = terms)]
    terms: usize,
    /// Threads [default: all cores]; results do not depend on it
    #[arg(long, short = 't', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    threads: Option<u16>,
}

fn terms(text: &str) -> Result<usize, String> {
    match (text, text.parse()) {
        ("all", _) => Ok(usize::MAX),
        (_, Ok(n)) => Ok(n),
        _ => Err("expected a number or `all`".into()),
    }
}

/// `fused/attn_out`
fn name(u: &Unit) -> String {
    u.form.map_or(u.tensor.to_string(), |f| format!("{}/{}", f.name(), u.tensor))
}

/// Runs the command.
pub fn main(args: &ExplainArgs, out: &mut Output) -> Result<u8, Failure> {
    let place = text::quoted(&args.report.display().to_string());
    let bad = |what: String, how: &str| Failure::Input(format!("{what}\n  where: {place}\n  do: {how}"));
    let report = read(&args.report)?;
    let ours = env!("CARGO_PKG_VERSION");
    if report.version != ours {
        let made = text::escape(report.version);
        let what = format!("the report is of mla-check {made}, this is {ours} (schema {})", report.schema);
        return Err(bad(
            what,
            "explain it with the version that made it, or make a new report with this one",
        ));
    }
    let layer = layer(args, &report).map_err(|(what, how)| bad(what, &how))?;
    let units = units(args, layer).map_err(|(what, how)| bad(what, &how))?;
    let unit = units[0];
    same_model(&report, &bad)?;
    let command = parse(report.command_of(layer)).map_err(|(what, how)| bad(what, &how))?;
    run::threads(args.threads)?;
    if unit.tensor.contains("@rank") {
        let what = format!("{} is of ranks that hold something else than the others", name(unit));
        return Err(bad(what, "explain the tensor without its @rank: that of the other ranks"));
    }
    let which = explain::which(unit.tensor, unit.form).ok_or_else(|| {
        bad(
            format!("{} is compared bit for bit with what stands beside it: nothing is computed", name(unit)),
            "explain the tensor that it is a copy of",
        )
    })?;
    let answer = Arc::new(Mutex::new(None));
    let (to, index, shape, shown) = (answer.clone(), args.index.clone(), unit.shape.clone(), args.terms);
    let ask = Ask {
        which,
        answer: Arc::new(move |asked| {
            let made = explain::element(asked, &index, &shape, shown);
            *to.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
        }),
    };
    let bar = out.progress(0);
    let progress = |what: &str| bar.set_message(what.to_string());
    let ran = match command {
        Command::Run(run) => run.ask(layer.layer, ask, &progress),
        Command::Compare(compare) => compare.ask(layer.layer, ask, &progress),
        _ => Ok(()),
    };
    bar.finish_and_clear();
    ran?;
    let made = answer.lock().unwrap_or_else(PoisonError::into_inner).take();
    let none = || Err("it was not judged again".to_string());
    let mut e = made.unwrap_or_else(none).map_err(|why| {
        bad(why, "make a new report with the same command: what it ran on is not what it was")
    })?;
    finish(&mut e, args, &report, layer);
    let own = units.iter().find(|u| u.phase.is_none() || u.phase == e.row.phase).unwrap_or(&unit);
    e.verdict = own.verdict.name().replace(' ', "-");
    for worst in units.iter().filter_map(|u| u.worst.as_ref()) {
        let here = worst.index.iter().map(|(_, i)| *i).eq(args.index.iter().copied());
        let same =
            |v: f64| v.to_bits() == e.value.engine.to_bits() || (v.is_nan() && e.value.engine.is_nan());
        if here && !same(worst.engine) {
            out.warn(&format!(
                "the report has {:e} here, this run {:e}: an engine or a file is not what it was",
                worst.engine, e.value.engine
            ));
        }
    }
    if out.json() {
        out.print_json(&e)?;
    } else if out.quiet() {
        out.print(&format!("{}\n", e.standing.words()))?;
    } else {
        out.print(&explain::text::render(&e, out.width()))?;
    }
    Ok(0)
}

/// What only the report knows.
fn finish(e: &mut Explanation, args: &ExplainArgs, report: &Report, layer: &LayerReport) {
    e.report = args.report.display().to_string();
    e.command = report.command_of(layer).to_string();
    e.layer = layer.layer;
    for from in &mut e.from {
        if let Some(s) =
            layer.weights.iter().find(|s| s.weight.name() == *from || e.tensor == s.weight.name())
        {
            *from = format!("{from} ({} in the file, {})", s.tensor, s.ty);
        }
    }
}

/// What went wrong, and what to do.
type Wrong = (String, String);

fn read(path: &Path) -> Result<Report, Failure> {
    crate::report::read::read(path).map_err(Failure::input)
}

/// The layer that is meant.
fn layer<'r>(args: &ExplainArgs, report: &'r Report) -> Result<&'r LayerReport, Wrong> {
    let mut all: Vec<usize> = report.layers.iter().map(|l| l.layer).collect();
    // Of `compare --other` each layer is there twice; the first is the dump's.
    all.sort_unstable();
    all.dedup();
    let names = crate::model::list(&all);
    match (args.layer.or(all.first().copied().filter(|_| all.len() == 1)), report.layers.as_slice()) {
        (_, []) => Err(("the report has no layer".into(), "make a new one".into())),
        (None, _) => Err((format!("the report has layers {names}"), "pass --layer N".into())),
        (Some(n), layers) => layers
            .iter()
            .find(|l| l.layer == n)
            .ok_or_else(|| (format!("the report has no layer {n}"), format!("choose among {names}"))),
    }
}

/// The units of the tensor, one a phase; its shape holds the element.
fn units<'l>(args: &ExplainArgs, layer: &'l LayerReport) -> Result<Vec<&'l Unit>, Wrong> {
    // Reports print `fused/attn_out, decode`.
    let asked_name = args.tensor.split(',').next().unwrap_or_default().trim();
    let asked = text::escape(asked_name);
    let units: Vec<&Unit> = layer.tensors.iter().filter(|u| name(u) == asked_name).collect();
    let Some(first) = units.first() else {
        let mut names: Vec<String> = layer.tensors.iter().map(name).collect();
        names.dedup();
        // Nearest without their forms; then all that are called so.
        let bare = |n: &str| n.rsplit('/').next().unwrap_or_default().to_string();
        let all: BTreeSet<String> = names.iter().map(|n| bare(n)).collect();
        let near = nearest(&bare(asked_name), &all.iter().map(String::as_str).collect::<Vec<_>>());
        let near = if all.contains(&bare(asked_name)) { vec![bare(asked_name)] } else { near };
        let called = |b: &String| names.iter().filter(|n| bare(n) == *b).cloned().collect::<Vec<_>>();
        let near = near.iter().flat_map(called).collect::<Vec<_>>().join(", ");
        return Err((format!("the report has no tensor {asked}"), format!("choose among {near}")));
    };
    let Some(unit) = units.iter().find(|u| !u.axes.is_empty()) else {
        let note = first.note.as_deref().map_or(String::new(), |n| format!(" ({})", text::escape(n)));
        let what = format!("{asked} was not compared: {}{note}", first.verdict);
        return Err((what, "explain a tensor that was".into()));
    };
    let axes: Vec<String> =
        unit.axes.iter().zip(&unit.shape).map(|(a, n)| format!("{} 0..{n}", a.name())).collect();
    let how = || format!("give {} numbers: {}", axes.len(), axes.join(", "));
    if args.index.len() != unit.axes.len() {
        let count = args.index.len();
        let what = format!(
            "{asked} has {} axes, {count} {} given",
            axes.len(),
            if count == 1 { "was" } else { "were" }
        );
        return Err((what, how()));
    }
    for ((i, n), axis) in args.index.iter().zip(&unit.shape).zip(&unit.axes) {
        if i >= n {
            return Err((format!("{asked} has {n} along {}, so there is no {i}", axis.name()), how()));
        }
    }
    Ok(units.into_iter().filter(|u| u.axes.len() == args.index.len()).collect())
}

/// Whether the model's files are as long as they were.
fn same_model(report: &Report, bad: &dyn Fn(String, &str) -> Failure) -> Result<(), Failure> {
    for (i, file) in report.model.files.iter().enumerate() {
        let now = std::fs::metadata(file).map_err(|e| {
            bad(
                format!("{}, which the report is of, can't be read: {e}", text::escape(file)),
                "run explain in the folder in which the report's command was run",
            )
        })?;
        if let Some(then) = report.model.bytes.get(i).filter(|n| **n != now.len()) {
            return Err(bad(
                format!("{} has {} bytes, {then} when the report was made", text::escape(file), now.len()),
                "take the model that the report was made with, or make a new report",
            ));
        }
    }
    Ok(())
}

/// The command of a report, as the program reads it.
fn parse(line: &str) -> Result<Command, Wrong> {
    let shown = text::escape(line);
    let how = || "make a new report".to_string();
    let words =
        shlex::split(line).ok_or_else(|| (format!("its command is no command line: {shown}"), how()))?;
    let cli = Cli::try_parse_from(&words).map_err(|e| {
        let why = e.to_string();
        let first = why.lines().next().unwrap_or_default().trim_start_matches("error: ").to_string();
        (format!("its command can't be run: {shown}: {}", text::escape(&first)), how())
    })?;
    match cli.command {
        c @ (Command::Run(_) | Command::Compare(_)) => Ok(c),
        _ => Err((format!("its command is neither run nor compare: {shown}"), how())),
    }
}
