/*! `mla-check calibrate`: many clean runs; is a correct engine ever accused? */

use super::out::{Failure, Output};
use super::run::{self, EngineArg};
use crate::check::{self, EngineKind, Options};
use crate::contracts::ContractChoice;
use crate::judge::Budget;
use crate::model::{Model, Reading};
use crate::report::study;
use crate::study::calibrate::{Plan, RunError, Source, calibrate};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Options of `calibrate`.
#[derive(Args)]
#[command(after_help = "Examples:
  mla-check calibrate
  mla-check calibrate --runs 40 --seed 7
  mla-check calibrate --first 137 --runs 1        (repeats one run)
  mla-check calibrate model.gguf --runs 100 --format json

Exit codes: 0 every figure is reached, 1 one is missed.")]
pub struct CalibrateArgs {
    /// Models (GGUF files or Hugging Face folders) whose layers are used [default: small layers, made up in memory]
    #[arg(value_name = "MODEL")]
    models: Vec<PathBuf>,
    /// Runs
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    runs: u64,
    /// Number of the first run
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1_000_000_000))]
    first: u64,
    /// Seed of all runs
    #[arg(long, short = 's', default_value_t = 0)]
    seed: u64,
    /// Who computes
    #[arg(long, value_enum, default_value_t = EngineArg::Auto)]
    engine: EngineArg,
    /// Which contract the judge emulates: the engine's, or none (tiles and the cast of P unknown)
    #[arg(long, value_enum, default_value_t = ContractArg::Declared)]
    contract: ContractArg,
    /// Probability of a false alarm that the judge grants itself, run by run
    #[arg(long, value_name = "P", default_value_t = Budget::default().alpha, value_parser = probability)]
    budget: f64,
}

/// The contracts that a study may be about.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ContractArg {
    /// What the engine declares
    Declared,
    /// The same, with tiles and the place of P's cast unknown
    None,
}

impl ContractArg {
    pub(super) fn choice(self) -> ContractChoice {
        match self {
            ContractArg::Declared => ContractChoice::Declared,
            ContractArg::None => ContractChoice::None,
        }
    }
}

fn probability(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 && x < 1.0 => Ok(x),
        _ => Err("expected a probability between 0 and 1".into()),
    }
}

/// Refuses the engine that is not judged.
pub(super) fn judged_engine(engine: EngineArg) -> Result<EngineKind, Failure> {
    match engine.kind()?.0 {
        EngineKind::Reference => Err(Failure::Input(
            "engine reference is what engines are held against: nothing judges it\n  where: --engine reference\n  do: take --engine cpu".into(),
        )),
        kind => Ok(kind),
    }
}

/// Runs the command.
pub fn main(args: &CalibrateArgs, out: &mut Output) -> Result<u8, Failure> {
    let budget = Budget { alpha: args.budget, ..Budget::default() };
    let contract = args.contract.choice();
    let base = Options { engine: judged_engine(args.engine)?, budget, contract, ..Options::default() };
    let models: Vec<Model> =
        args.models.iter().map(|m| Model::open(m)).collect::<Result<_, _>>().map_err(Failure::input)?;
    if let Some(m) = models.iter().find(|m| m.mla_layers().is_empty()) {
        let what = "no layer of this file has MLA attention";
        return Err(Failure::Input(format!("{what}\n  where: {}\n  do: choose another file", m.file())));
    }
    let paths = args.models.iter().map(|p| p.display().to_string());
    let source = Source { models: paths.zip(&models).collect(), reading: Reading::default() };
    let plan = Plan { runs: args.runs, first: args.first, seed: args.seed, base };
    let bar = out.progress(args.runs);
    bar.set_message("clean runs");
    let result = calibrate(&source, &plan, &|o| check::engine(o), &|| bar.inc(1));
    bar.finish_and_clear();
    let report = result.map_err(|e: RunError| match run::failure(e.error) {
        Failure::Broke(text) => Failure::Broke(format!("{text}\n  repeat: {}", e.repeat)),
        other => Failure::Input(format!("{other}\n  repeat: {}", e.repeat)),
    })?;
    if out.json() {
        out.print_json(&report)?;
    } else if out.quiet() {
        out.print(&study::calibration_line(&report))?;
    } else {
        out.print(&study::calibration(&report))?;
    }
    Ok(u8::from(!report.ok))
}
