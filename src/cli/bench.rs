/*! `mla-check bench`: each stage's kernel timed on a GPU, and what kernels take of a multiprocessor. */

use super::out::{Failure, Output};
use super::run::{self, DtypeArg, EngineArg, FormArg};
use super::synth::{file_types, presets};
use super::text::{escape, wrap};
use crate::bench::timed::Protocol;
use crate::bench::{self, Asked, SCHEMA, Shape, ceilings, resources, text};
use crate::check::{self, EngineKind, Options};
use crate::engine::EngineError;
use crate::engine::kernels::header::COMPUTED;
use crate::engine::kernels::library::Library;
use crate::model::Model;
use crate::nvrtc::{Nvrtc, Target};
use crate::synth::{self, FileType, Preset, Spec};
use clap::Args;
use mla_reference::{Form, Stage, Weight};
use std::path::{Path, PathBuf};

/// Options of `bench`.
#[derive(Args)]
#[command(
    after_help = "Exit codes: 0; 1 where what was timed is wrong; 2 usage; 3 no verdict; 4 the engine broke; 5 no GPU, driver or NVRTC.

Examples:
  mla-check bench --preset deepseek-v3 --batch 128 --context 8192 --tokens 8192
  mla-check bench model.gguf --stage o_latent --batch 1 --context 32768 --splits 64 --kernels my-kernels/
  mla-check bench --resources --target sm_120                                   (needs no GPU)"
)]
pub struct BenchArgs {
    /// Model whose layer is run: a GGUF file or a Hugging Face folder
    #[arg(value_name = "MODEL", conflicts_with_all = ["preset", "heads"])]
    model: Option<PathBuf>,
    /// Model whose dimensions are taken, with random weights, where no file is given
    #[arg(long, value_parser = presets(), default_value = "deepseek-v3")]
    preset: &'static Preset,
    /// Heads, instead of the preset's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    heads: Option<u64>,
    /// File type of the preset's weights
    #[arg(long = "type", value_name = "TYPE", default_value = "Q4_K_M", value_parser = file_types(), ignore_case = true)]
    file_type: &'static FileType,
    /// Layer of MODEL [default: the first with MLA attention]
    #[arg(long, value_name = "N", requires = "model")]
    layer: Option<usize>,
    /// Stages, or weights as they are decoded, as a comma list [default: all stages]
    #[arg(long = "stage", value_name = "STAGES", value_delimiter = ',')]
    stages: Vec<String>,
    /// Requests of a decode step
    #[arg(long, value_name = "N", requires = "context", value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch: Option<u32>,
    /// Keys that each of them sees, its own among them
    #[arg(long, value_name = "L", requires = "batch", value_parser = clap::value_parser!(u32).range(1..=1048576))]
    context: Option<u32>,
    /// Tokens of a prefill; without any of these three: a decode step of 32 requests over 4096 keys and a prefill of 2048
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(2..=1048576))]
    tokens: Option<u32>,
    /// Form of attention [default: absorbed in decode, fused in prefill]
    #[arg(long, value_enum)]
    form: Option<FormArg>,
    /// Dtype of weights and activations
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    dtype: DtypeArg,
    /// Splits of the keys in decode: a number or `auto`
    #[arg(long, default_value = "auto", value_parser = run::splits)]
    splits: run::SplitsArg,
    /// Slots of a page of the cache
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    page_size: u32,
    /// Only kernels on a GPU can be timed
    #[arg(long, value_enum, default_value_t = EngineArg::Cuda)]
    engine: EngineArg,
    /// Number of the GPU, as `devices` counts
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu: u32,
    /// Kernel files; what the folder lacks is taken from the program's own (docs/kernels.md)
    #[arg(long, value_name = "DIR")]
    kernels: Option<PathBuf>,
    /// Repetitions of each launch
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(3..=1000))]
    repeats: u32,
    /// Do not judge what was timed
    #[arg(long)]
    no_judge: bool,
    /// Seed of everything that is drawn
    #[arg(long, short = 's', default_value_t = 0)]
    seed: u64,
    /// Print a table for a Markdown document
    #[arg(long)]
    markdown: bool,
    /// Time nothing: compile the kernels and show registers, shared memory and spills
    #[arg(long)]
    resources: bool,
    /// With --resources: what to compile for, repeatable [default: sm_90 and sm_120]
    #[arg(long = "target", value_name = "sm_NN", requires = "resources")]
    targets: Vec<Target>,
}

/// Runs the command.
pub fn main(args: &BenchArgs, out: &mut Output) -> Result<u8, Failure> {
    let of = |dtype| match &args.kernels {
        None => Library::built_in_for(dtype),
        Some(folder) => Library::folder(folder, dtype),
    };
    let library = of(args.dtype.dtype());
    if args.resources {
        // A folder may serve some dtypes only.
        let all: Vec<_> = COMPUTED.into_iter().map(of).collect();
        let served = all.iter().any(Result::is_ok);
        let libraries = all.into_iter().filter(|l| !served || l.is_ok()).collect::<Result<Vec<_>, _>>();
        return taken(args, &libraries.map_err(failed)?, out);
    }
    let (asked, shapes) = (stages(&args.stages)?, args.shapes()?);
    let timed = [EngineArg::Cuda, EngineArg::Auto].contains(&args.engine);
    if !timed {
        let (name, what) = match args.engine {
            EngineArg::Ptx => ("ptx", "an emulated machine's time says nothing about a kernel"),
            EngineArg::Cpu => ("cpu", "it emulates kernels' arithmetic and runs none"),
            _ => ("reference", "it runs no kernels"),
        };
        return Err(Failure::Input(format!(
            "engine {name} can't be timed: {what}\n  where: --engine {name}\n  do: time on a GPU, with --engine cuda"
        )));
    }
    library.map_err(failed)?;
    EngineArg::Cuda.kind()?;
    let options = Options {
        engine: EngineKind::Cuda,
        dtype: args.dtype.dtype(),
        seed: args.seed,
        page_size: args.page_size as usize,
        splits: args.splits.number(),
        kernels: args.kernels.clone(),
        gpu: args.gpu,
        ..Options::default()
    };
    let made = match &args.model {
        Some(_) => None,
        None => Some(Made::new(args, out)?),
    };
    let path = made.as_ref().map_or(args.model.as_deref(), |m| Some(m.0.as_path()));
    let model = Model::open(path.unwrap_or(Path::new(""))).map_err(Failure::input)?;
    let layer = match args.layer {
        Some(layer) => layer,
        None => *model.mla_layers().first().ok_or_else(|| {
            let what = "no layer of this file has MLA attention";
            Failure::Input(format!("{what}\n  where: {}\n  do: choose another file", model.file()))
        })?,
    };
    for s in &shapes {
        let batch = crate::case::Batch(vec![s.request; s.requests]);
        run::room(&model.geometry, &Options { batch, forms: vec![s.form], ..options.clone() })?;
    }
    let report = time(args, &model, layer, &options, asked, &shapes, out)?;
    if out.json() {
        out.print_json(&report)?;
    } else if args.markdown {
        out.print(&text::markdown(&report))?;
    } else if !out.quiet() {
        out.print(&text::terminal(&report))?;
    }
    Ok(report.verdict().map_or(0, |v| v.exit(false)))
}

fn time(
    args: &BenchArgs,
    model: &Model,
    layer: usize,
    options: &Options,
    stages: Option<Vec<String>>,
    shapes: &[Shape],
    out: &mut Output,
) -> Result<bench::Report, Failure> {
    let bar = out.progress(0);
    bar.set_message("measuring the device");
    let broke = |e: crate::device::Error| Failure::Broke(e.to_string());
    let (device, ceilings) = {
        let mut gpu = check::gpu(options).map_err(failed)?;
        (crate::device::Device::describe(&gpu), ceilings::measure(&mut gpu).map_err(broke)?)
    };
    let protocol = Protocol { repeats: args.repeats as usize, ..Protocol::default() };
    let judge = !args.no_judge;
    let asked = Asked { model, layer, options, stages, protocol, judge };
    let mut report = bench::Report {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        device,
        model: match (&args.model, args.heads) {
            (Some(file), _) => format!("{}, layer {layer}", escape(&file.display().to_string())),
            (None, None) => args.preset.name.into(),
            (None, Some(heads)) => format!("{} with {heads} heads", args.preset.name),
        },
        geometry: model.geometry,
        dtype: options.dtype.name(),
        kernels: Vec::new(),
        compilers: Vec::new(),
        repeats: args.repeats as usize,
        ceilings,
        shapes: Vec::new(),
    };
    for shape in shapes {
        let told = |what: &str| bar.set_message(format!("{}: {what}", shape.name()));
        let gpu = check::gpu(options).map_err(failed)?;
        let ran = bench::shape(gpu, &asked, shape, &report.ceilings, &told).map_err(run::failure)?;
        report.shapes.push(ran.shape);
        report.kernels = ran.kernels;
        for compiler in ran.compilers {
            if !report.compilers.contains(&compiler) {
                report.compilers.push(compiler);
            }
        }
    }
    bar.finish_and_clear();
    Ok(report)
}

fn failed(e: EngineError) -> Failure {
    run::failure(check::CheckError::Engine(e))
}

/// `--resources`: no GPU, no model.
fn taken(args: &BenchArgs, libraries: &[Library], out: &mut Output) -> Result<u8, Failure> {
    let nvrtc = Nvrtc::here().map_err(|e| match e.is_unavailable() {
        true => Failure::Unavailable(e.to_string()),
        false => Failure::input(e),
    })?;
    let targets = if args.targets.is_empty() { &resources::TARGETS[..] } else { &args.targets };
    let bar = out.progress(0);
    bar.set_message("compiling");
    let rows = resources::of(libraries, &nvrtc, targets);
    bar.finish_and_clear();
    let rows = rows.map_err(failed)?;
    if let Some(notice) = nvrtc.notice() {
        out.warn(&notice.to_string());
    }
    if out.json() {
        out.print_json(&rows)?;
    } else if args.markdown {
        out.print(&resources::markdown(&rows))?;
    } else if !out.quiet() {
        out.print(&resources::terminal(&rows))?;
    }
    Ok(0)
}

/// Names as asked for; None: all stages.
fn stages(asked: &[String]) -> Result<Option<Vec<String>>, Failure> {
    let known = |n: &str| Stage::from_name(n).is_some() || Weight::from_name(n).is_some();
    if let Some(name) = asked.iter().find(|n| !known(n)) {
        let names = Stage::ALL.iter().map(|s| s.name()).chain(Weight::ALL.iter().map(|w| w.name()));
        let names = wrap(&names.collect::<Vec<_>>().join(", "), 78, 4);
        return Err(Failure::Input(format!(
            "there is no stage {:?}\n  where: --stage\n  do: name one of {names}",
            escape(name)
        )));
    }
    Ok((!asked.is_empty()).then(|| asked.to_vec()))
}

impl BenchArgs {
    fn shapes(&self) -> Result<Vec<Shape>, Failure> {
        let forms = |own: Form| match self.form {
            None | Some(FormArg::Routed) => vec![own],
            Some(FormArg::Both) => Form::ALL.to_vec(),
            Some(FormArg::Fused) => vec![Form::Fused],
            Some(FormArg::Absorbed) => vec![Form::Absorbed],
        };
        let (decode, prefill) = match (self.batch.zip(self.context), self.tokens) {
            (None, None) => (Some((32, 4096)), Some(2048)),
            given => given,
        };
        let mut all = Vec::new();
        if let Some((batch, context)) = decode {
            let of = |form| Shape::decode(batch as usize, context as usize, form);
            all.extend(forms(Form::Absorbed).into_iter().map(of));
        }
        if let Some(tokens) = prefill {
            all.extend(forms(Form::Fused).into_iter().map(|form| Shape::prefill(tokens as usize, form)));
        }
        Ok(all)
    }
}

/// A file of the preset's dimensions, gone when this is.
struct Made(PathBuf);

impl Made {
    fn new(args: &BenchArgs, out: &mut Output) -> Result<Made, Failure> {
        let name = format!("mla-check-bench-{}.gguf", std::process::id());
        let made = Made(std::env::temp_dir().join(name));
        let spec = Spec {
            preset: args.preset,
            file_type: args.file_type,
            layers: 1,
            heads: args.heads,
            seed: args.seed,
        };
        let bar = out.progress(0);
        bar.set_message(format!("drawing weights of {}", args.preset.name));
        let written = synth::write(&spec, &made.0, &mut |_, _| ());
        bar.finish_and_clear();
        written.map_err(Failure::input)?;
        Ok(made)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // It is random numbers in the system's folder for such files; one that can't be removed harms nobody.
        let _ = std::fs::remove_file(&self.0);
    }
}
