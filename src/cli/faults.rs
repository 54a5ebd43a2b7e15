/*! `mla-check faults`: the fault suite and its score. */

use super::calibrate::judged_engine;
use super::out::{Failure, Output};
use super::run::{self, EngineArg};
use crate::check::{self, Options};
use crate::fault::catalogue::{self, FAMILIES, Row};
use crate::fault::text::{self, Mutation};
use crate::fault::{self};
use crate::report::faults;
use crate::suite::{self, Plan, Suite};
use clap::Args;
use clap::builder::PossibleValuesParser;
use std::path::{Path, PathBuf};

/// Options of `faults`.
#[derive(Args)]
#[command(after_help = "Examples:
  mla-check faults
  mla-check faults --family F07 --engine ptx
  mla-check faults scale-small key-dropped --report faults.json
  mla-check faults --list

Exit codes: 0 every fault that applies is caught, none is named wrongly, no clean run is accused; 1 otherwise, or where none applies.")]
pub struct FaultsArgs {
    /// Faults of the catalogue, or inside kernels, by name [default: all]
    #[arg(value_name = "NAME", value_parser = PossibleValuesParser::new(named()), hide_possible_values = true)]
    names: Vec<String>,
    /// Families, a comma list [default: all]
    #[arg(long, value_name = "F", value_delimiter = ',', value_parser = PossibleValuesParser::new(FAMILIES.iter().map(|f| f.name)), hide_possible_values = true)]
    family: Vec<String>,
    /// Who computes
    #[arg(long, value_enum, default_value_t = EngineArg::Cpu)]
    engine: EngineArg,
    /// Those faults alone that were written when the judge was done, against which nothing was ever tuned
    #[arg(long)]
    later: bool,
    /// Do not look for the smallest size of each fault
    #[arg(long)]
    no_sizes: bool,
    /// Number of the GPU that engine cuda takes, as `devices` counts
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu: u32,
    /// Also write the report to a .json file (repeatable)
    #[arg(long, value_name = "FILE")]
    report: Vec<PathBuf>,
    /// Print the catalogue and the names that --fault takes, and run nothing
    #[arg(long)]
    list: bool,
}

fn named() -> impl Iterator<Item = &'static str> {
    let rows = catalogue::all().iter().chain(catalogue::later()).map(|r| r.name);
    rows.chain(text::all().iter().chain(text::later()).map(|m| m.name))
}

impl FaultsArgs {
    fn wants(&self, name: &str, family: &str) -> bool {
        let any = |list: &[String], name: &str| list.is_empty() || list.iter().any(|n| n == name);
        any(&self.names, name) && any(&self.family, family)
    }
}

/// Runs the command.
pub fn main(args: &FaultsArgs, out: &mut Output) -> Result<u8, Failure> {
    let is_json = |p: &&PathBuf| p.extension().is_some_and(|e| e.eq_ignore_ascii_case("json"));
    if let Some(path) = args.report.iter().find(|p| !is_json(p)) {
        return Err(Failure::Input(format!(
            "the suite's report is written as JSON\n  where: --report {}\n  do: name a .json file",
            path.display()
        )));
    }
    let (rows, inside) = match args.later {
        true => (catalogue::later(), text::later()),
        false => (catalogue::all(), text::all()),
    };
    let rows: Vec<Row> = rows.iter().filter(|r| args.wants(r.name, r.family)).copied().collect();
    let engine = || judged_engine(args.engine);
    // On an engine that runs no kernel files they are named only where they were asked for.
    let kernels = args.list || !args.names.is_empty() || engine()?.runs_kernels();
    let inside: Vec<&'static Mutation> =
        inside.iter().filter(|m| kernels && args.wants(m.name, m.family)).collect();
    if args.list {
        out.print(&faults::list(&rows, &inside, fault::names()))?;
        return Ok(0);
    }
    if rows.is_empty() && inside.is_empty() {
        return Err(Failure::Input(
            "no fault of the catalogue has these names and families\n  where: NAME, --family\n  do: see mla-check faults --list".into(),
        ));
    }
    let base = Options { engine: engine()?, gpu: args.gpu, ..Options::default() };
    let bar = out.progress((rows.len() + inside.len()) as u64);
    bar.set_message("faults");
    let plan = Plan { rows, inside, base, sizes: !args.no_sizes };
    let result = suite::run(&plan, &|o| check::engine(o), &|_| bar.inc(1));
    bar.finish_and_clear();
    let report = result.map_err(run::failure)?;
    if out.json() {
        out.print_json(&report)?;
    } else if out.quiet() {
        out.print(&faults::score(&report))?;
    } else {
        out.print(&faults::suite(&report))?;
    }
    args.report.iter().try_for_each(|path| write(path, &report))?;
    Ok(u8::from(!report.ok))
}

fn write(path: &Path, report: &Suite) -> Result<(), Failure> {
    let failed = |e: String| {
        Failure::Input(format!(
            "the report can't be written: {e}\n  where: --report {}\n  do: name a file in a folder that may be written",
            path.display()
        ))
    };
    let text = serde_json::to_vec_pretty(report).map_err(|e| failed(e.to_string()))?;
    std::fs::write(path, text).map_err(|e| failed(e.to_string()))
}
