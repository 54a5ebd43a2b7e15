/*! `mla-check sensitivity`: the smallest fault of each kind that the judge finds. */

use super::calibrate::{ContractArg, judged_engine};
use super::out::{Failure, Output};
use super::run::{self, DtypeArg, EngineArg, FormArg, RegimeArg};
use crate::case::{Case, DEFAULT_BATCH};
use crate::check::{self, CheckError, Options};
use crate::model::{Convention, Layer, Model, Reading};
use crate::report::study;
use crate::study::sensitivity::{Plan, Runner, sensitivity};
use crate::study::subjects::{SUBJECTS, Subject};
use crate::study::{self as studies, Outcome};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::path::PathBuf;

/// Options of `sensitivity`.
#[derive(Args)]
#[command(after_help = "Examples:
  mla-check sensitivity model.gguf
  mla-check sensitivity model.gguf --fault softmax-scale,output-gain --seeds 5
  mla-check sensitivity model.gguf --batch 0+16,130+1 --regime random --format json

Exit codes: 0 every figure is reached, 1 one is missed or a clean run is accused.")]
pub struct SensitivityArgs {
    /// Model: a GGUF file, any part of a split one, or a Hugging Face folder
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Layer [default: the first with MLA attention]
    #[arg(long, value_name = "N")]
    layer: Option<usize>,
    /// Runs of a size
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    seeds: u64,
    /// Seed of the first run
    #[arg(long, short = 's', default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=u64::from(u32::MAX)))]
    seed: u64,
    /// Who computes
    #[arg(long, value_enum, default_value_t = EngineArg::Auto)]
    engine: EngineArg,
    /// How context rows are drawn; each regime has rows of its own
    #[arg(long, value_enum, default_value_t = RegimeArg::Both)]
    regime: RegimeArg,
    /// Form of attention
    #[arg(long, value_enum, default_value_t = FormArg::Both)]
    form: FormArg,
    /// Dtype of weights and activations in the engine
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    dtype: DtypeArg,
    /// Requests, CONTEXT+NEW, as a comma list
    #[arg(long, default_value = DEFAULT_BATCH)]
    batch: String,
    /// Faults, a comma list [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = subjects())]
    fault: Vec<&'static Subject>,
    /// Which contract the judge emulates: the engine's, or none (tiles and the cast of P unknown)
    #[arg(long, value_enum, default_value_t = ContractArg::Declared)]
    contract: ContractArg,
    /// Size of softmax-scale and output-gain that must be found [default: 3e-4, without a contract 1e-3]
    #[arg(long, value_name = "X", value_parser = goal)]
    goal: Option<f64>,
}

fn subjects() -> impl TypedValueParser<Value = &'static Subject> {
    PossibleValuesParser::new(SUBJECTS.iter().map(|s| s.name))
        .try_map(|name| Subject::by_name(&name).ok_or("no such fault"))
}

fn goal(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x.is_finite() && x > 0.0 => Ok(x),
        _ => Err("expected a number above 0".into()),
    }
}

/// Runs of one layer of a file.
struct OfFile<'a> {
    layer: Layer<'a>,
}

impl Runner for OfFile<'_> {
    fn case(&self, options: &Options) -> Result<Case, CheckError> {
        Ok(check::draw(&self.layer, options)?)
    }
    fn run(&self, case: &Case, options: &Options) -> Result<Outcome, CheckError> {
        studies::judge(&self.layer, case, options, check::engine(options)?.as_ref(), false)
    }
}

/// The largest size of softmax-scale and output-gain that reaches the figure.
const fn default_goal(contract: ContractArg) -> f64 {
    match contract {
        ContractArg::Declared => 3e-4,
        ContractArg::None => 1e-3,
    }
}

/// Runs the command.
pub fn main(args: &SensitivityArgs, out: &mut Output) -> Result<u8, Failure> {
    let engine = judged_engine(args.engine)?;
    if args.form == FormArg::Routed {
        return Err(Failure::Input(
            "sensitivity is measured form by form\n  where: --form routed\n  do: pass --form both, fused or absorbed".into(),
        ));
    }
    let model = Model::open(&args.model).map_err(Failure::input)?;
    let first = model.mla_layers().first().copied().ok_or_else(|| {
        let what = "no layer of this file has MLA attention";
        Failure::Input(format!("{what}\n  where: {}\n  do: choose another file", model.file()))
    })?;
    let index = args.layer.unwrap_or(first);
    let stored = model.weights(index).map_err(Failure::input)?;
    let reading = Reading::of(Convention::Auto);
    let runner = OfFile { layer: Layer { index, spec: model.spec(&reading), weights: &stored } };
    let plan = Plan {
        seeds: args.seeds,
        regimes: args.regime.regimes(),
        subjects: if args.fault.is_empty() { SUBJECTS.iter().collect() } else { args.fault.clone() },
        base: Options {
            engine,
            forms: args.form.forms(),
            batch: args.batch.parse().map_err(Failure::input)?,
            dtype: args.dtype.dtype(),
            seed: args.seed,
            reading,
            contract: args.contract.choice(),
            ..Options::default()
        },
        goal: args.goal.unwrap_or(default_goal(args.contract)),
    };
    let bar = out.progress(0);
    let result = sensitivity(&plan, &runner, &|what| bar.set_message(what.to_string()));
    bar.finish_and_clear();
    let report = result.map_err(run::failure)?;
    if out.json() {
        out.print_json(&report)?;
    } else if out.quiet() {
        out.print(&study::sensitivity_line(&report))?;
    } else {
        out.print(&study::sensitivity(&report))?;
    }
    Ok(u8::from(!report.ok))
}
