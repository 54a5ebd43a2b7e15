/*! `mla-check run`: load weights, run an engine, judge every tensor. */

mod rest;

use super::copies::Copies;
use super::out::{Failure, Output};
use super::{bisect::Bisecting, devices, layers, text};
use crate::case::{Batch, DEFAULT_BATCH, MOST_PARTS};
use crate::check::{self, AccumulateKind, CheckError, EngineKind, Options, Sparse, not_judged};
use crate::contracts::ContractChoice;
use crate::device::cuda::{self, Care, Installed};
use crate::engine::stack::QkvA;
use crate::engine::{EngineError, SinkError};
use crate::fault::text::{PREFIX, all};
use crate::fault::{self, Fault};
use crate::harness::gate;
use crate::judge::watch::OUTPUTS;
use crate::judge::{Ask, Budget, Verdict};
use crate::model::{Convention, Model, Reading};
use crate::nvrtc::{Nvrtc, Target};
use crate::reference_cache::ReferenceCache;
use crate::report::{LayerReport, ModelReport, RUN, Report, terminal};
use crate::signature;
use crate::snapshot::{self, Head, Kept, Update};
use crate::trace::npy;
use clap::{Args, ValueEnum};
use mla_numeric::DType;
use mla_reference::{Form, Geometry, Regime};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Options of `run`.
#[derive(Args)]
#[command(after_help = "Examples:
  mla-check run model.gguf
  mla-check run model.gguf --layer 3 --batch 0+64,1024+1 --form absorbed
  mla-check run model.gguf --engine reference --save tensors/
  mla-check run model.gguf --fault k_b-element        (does it find a fault?)

A request is CONTEXT+NEW: 0+64 is a prefill of 64 tokens, 1024+1 one decode step on 1024 cached tokens.")]
pub struct RunArgs {
    /// Model: a GGUF file, any part of a split one, or a Hugging Face folder
    #[arg(value_name = "MODEL", required_unless_present = "model_flag")]
    model: Option<PathBuf>,
    /// The same, as in llama.cpp
    #[arg(short = 'm', long = "model", value_name = "MODEL", hide = true, conflicts_with = "model")]
    model_flag: Option<PathBuf>,
    /// Layers: N, A..B, a comma list, or all [default: the first with MLA attention]
    #[arg(long, value_name = "LAYERS")]
    layer: Option<String>,
    /// Who computes: `auto` takes cuda where a GPU answers, else cpu
    #[arg(long, value_enum, default_value_t = EngineArg::Auto)]
    engine: EngineArg,
    /// Form of attention; `routed` sends each request of the batch one way, as vLLM does (docs/routing.md)
    #[arg(long, value_enum, default_value_t = FormArg::Both)]
    form: FormArg,
    /// With --form routed: a request of at most so many new tokens is a decode and goes through the absorbed form, decodes
    /// first [default: 1]
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..))]
    decode_threshold: Option<u32>,
    /// Prefills of the fused form attend to their context in chunks of so many keys, merged with the new tokens [default: in
    /// one go]
    #[arg(long, value_name = "C", value_parser = clap::value_parser!(u32).range(1..))]
    context_chunk: Option<u32>,
    /// Requests, CONTEXT+NEW, as a comma list
    #[arg(long, default_value = DEFAULT_BATCH)]
    batch: String,
    /// Dtype of weights and activations in the engine
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    dtype: DtypeArg,
    /// How context rows are drawn
    #[arg(long, value_enum, default_value_t = RegimeArg::Both)]
    regime: RegimeArg,
    /// Seed of everything that is drawn
    #[arg(long, short = 's', default_value_t = 0)]
    seed: u64,
    /// Slots of a page of the cache
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    page_size: u32,
    /// Number of the pool's first page, for engines cuda and ptx: pages in front of it have memory that nobody uses
    #[arg(long, value_name = "N", default_value_t = 0)]
    first_page: u32,
    /// Splits of the keys in decode: a number or `auto`
    #[arg(long, default_value = "auto", value_parser = splits)]
    splits: SplitsArg,
    /// Ranks of tensor parallelism: heads are shared, out is summed (docs/parallel.md). They run one after the other on one
    /// device
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    tp: u16,
    /// How engines compute q_a and kv_a (docs/stacked.md)
    #[arg(long, value_enum, default_value_t = QkvA::Split)]
    qkv_a: QkvA,
    /// Accumulator that engine cpu emulates
    #[arg(long, value_enum, default_value_t = AccumulateKind::Rn)]
    accumulate: AccumulateKind,
    /// Number of the GPU that engine cuda takes, as `devices` counts
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu: u32,
    /// Seconds that engine cuda waits for a kernel before it counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = cuda::PATIENCE.as_secs(), value_parser = clap::value_parser!(u64).range(1..=86400))]
    kernel_timeout: u64,
    /// Engine cuda fills no memory before its kernels run, and runs each once: for tools that look for reads of memory that
    /// nobody wrote (docs/kernels.md)
    #[arg(long)]
    no_poison: bool,
    /// Engine cuda lays no guards round its memory: for tools that look for accesses out of bounds
    #[arg(long)]
    no_guards: bool,
    /// Kernel files for engines cuda and ptx; what the folder lacks is taken from the program's own (docs/kernels.md)
    #[arg(long, value_name = "DIR")]
    kernels: Option<PathBuf>,
    /// What engine ptx compiles for and stands for
    #[arg(long, value_name = "compute_NN", default_value = "compute_120")]
    target: Target,
    /// Which contract the judge emulates: `declared`, `none` (tiles and the cast of P unknown: noise), the softmax of
    /// a kernel of the built-in table, or a contract in a .toml file
    #[arg(long, value_name = "declared|none|NAME|FILE.toml", default_value = "declared")]
    contract: String,
    /// Real hidden states, a .npy file of [token, hidden], instead of drawn ones
    #[arg(long, value_name = "FILE.npy")]
    hidden: Option<PathBuf>,
    /// Whose reading of the file's numbers: eps, YaRN, decimals
    #[arg(long, value_enum, default_value_t = Convention::Auto)]
    convention: Convention,
    /// eps of the q_a and kv_a norms, instead of the convention's
    #[arg(long, value_name = "X", value_parser = positive)]
    norm_eps: Option<f64>,
    /// Positions of the session, as llama.cpp's -c: chooses between the short and the long rope factors of a model that has
    /// both (MiniCPM3) [default: as many as it was trained on: the short ones]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    n_ctx: Option<u64>,
    /// Attention of models with a sparse indexer: `auto` is dense while every request fits its top_k
    #[arg(long, value_enum, default_value_t = AttentionArg::Auto)]
    attention: AttentionArg,
    /// Keys that are kept with --attention dsa [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// Alter one thing on purpose: NAME[=SIZE][@TENSOR]
    #[arg(long, value_name = "NAME", long_help = fault_help())]
    fault: Option<String>,
    /// Probability of any false alarm in the whole run
    #[arg(long, value_name = "P", default_value_t = 1e-6, value_parser = share)]
    budget: f64,
    /// Size of gain and softmax scale that must be visible; a tensor that can't show it is `inconclusive`
    #[arg(long, value_name = "X", default_value_t = 1e-3, value_parser = share)]
    promise: f64,
    /// Write every tensor of engine and reference as .npy, with a manifest
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Also show what other people's rules say of the outputs: cosine 0.99, NMSE 5e-4, allclose 1e-2, FlashMLA's,
    /// 2 × low precision. They decide nothing. Memory for tensors doubles
    #[arg(long)]
    gates: bool,
    /// Also show differences from float64 computed from the start of the layer, never judged. Memory for tensors
    /// doubles, and the reference runs a second time
    #[arg(long)]
    cumulative: bool,
    /// Run the same requests another way too (order of the batch, pages, splits, one token at a time), judge each and compare
    /// its bits with the run's (docs/invariance.md)
    #[arg(long)]
    invariance: bool,
    /// Run the case so many times: the same bits must come out each time, in every tensor. The last run is judged
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000), conflicts_with = "fault")]
    repeat: u16,
    /// Hold shapes, contract, verdicts and digests of the float64 reference against the snapshots of this folder, in insta's
    /// form: what differs is written as .snap.new for `cargo insta review` and fails (INSTA_UPDATE; docs/snapshots.md). The
    /// reference runs a second time
    #[arg(long, value_name = "DIR", conflicts_with = "bisect")]
    snapshot: Option<PathBuf>,
    #[command(flatten)]
    copies: Copies,
    /// Threads [default: all cores]; results do not depend on it
    #[arg(long, short = 't', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    threads: Option<u16>,
    /// Keep results of the float64 reference in a folder, for the next run of the same case: only equal bits are found
    /// again, and what is damaged is computed anew
    #[arg(long, value_name = "DIR", help_heading = "Bisecting")]
    reference_cache: Option<PathBuf>,
    /// Most that may stand in it, in GB; the oldest go first
    #[arg(long, value_name = "GB", help_heading = "Bisecting", default_value_t = 16.0, value_parser = positive)]
    reference_cache_limit: f64,
    /// Exit codes for `git bisect run` (docs/bisecting.md): 0 good, 1 bad, 125 skip, 128 stop
    #[arg(long, help_heading = "Bisecting")]
    pub(super) bisect: bool,
    /// Write what is wrong here to a file, for --signature
    #[arg(long, value_name = "FILE", help_heading = "Bisecting", conflicts_with = "signature")]
    pub(super) record_signature: Option<PathBuf>,
    /// Only the fault recorded in this file is bad: under --bisect another one is 125, skip
    #[arg(long, value_name = "FILE", help_heading = "Bisecting")]
    pub(super) signature: Option<PathBuf>,
}

fn fault_help() -> String {
    let names = fault::names().map(|(name, what)| format!("\n- {name}: {what}"));
    let inside = all().iter().map(|m| format!("\n- {} ({}): {}", m.name, m.kernel, m.broken));
    format!(
        "Alter one thing on purpose: NAME[=SIZE][@TENSOR]\n\nNames:{}\n\nInside kernels ({PREFIX}NAME):{}",
        names.collect::<String>(),
        inside.collect::<String>()
    )
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum EngineArg {
    /// cuda where driver, GPU and NVRTC are there, else cpu
    Auto,
    /// A GPU kernel's arithmetic, emulated
    Cpu,
    /// float64 from start to end
    Reference,
    /// Our kernels on a GPU; needs NVIDIA's driver and NVRTC
    Cuda,
    /// Our kernels' PTX on an emulated machine that watches them; needs no GPU
    Ptx,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum FormArg {
    /// Each form computes all requests
    Both,
    Fused,
    Absorbed,
    /// Decodes through the absorbed form, prefills through the fused one
    Routed,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum DtypeArg {
    Bf16,
    F16,
    F32,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum RegimeArg {
    Both,
    Random,
    Peaked,
}

/// Whether no GPU is a failure.
fn gpu_required() -> bool {
    gate::is_on(gate::REQUIRE_GPU)
}

impl EngineArg {
    /// The engine, and why it is this one.
    pub(super) fn kind(self) -> Result<(EngineKind, String), Failure> {
        let required = gpu_required();
        let asked = "chosen by --engine".to_string();
        Ok(match self {
            EngineArg::Cpu => (EngineKind::Cpu, asked),
            EngineArg::Reference => (EngineKind::Reference, asked),
            EngineArg::Ptx => (EngineKind::Ptx, asked),
            EngineArg::Cuda => match lacking() {
                None => (EngineKind::Cuda, asked),
                Some(what) => return Err(Failure::Unavailable(what)),
            },
            EngineArg::Auto => match lacking() {
                None => (EngineKind::Cuda, "chosen because a GPU answers".into()),
                Some(what) if required => {
                    return Err(Failure::Unavailable(format!(
                        "a GPU is required (MLA_CHECK_REQUIRE_GPU=1): {what}"
                    )));
                }
                Some(_) => (EngineKind::Cpu, "chosen because no GPU can be used (devices says why)".into()),
            },
        })
    }
}

/// What engine cuda lacks here: driver, GPU or compiler.
fn lacking() -> Option<String> {
    Installed::look().err().map(|e| e.to_string()).or_else(|| Nvrtc::here().err().map(|e| e.to_string()))
}

impl FormArg {
    /// The forms.
    pub(super) fn forms(self) -> Vec<Form> {
        match self {
            FormArg::Both | FormArg::Routed => Form::ALL.to_vec(),
            FormArg::Fused => vec![Form::Fused],
            FormArg::Absorbed => vec![Form::Absorbed],
        }
    }
}

impl DtypeArg {
    /// The dtype.
    pub(super) fn dtype(self) -> DType {
        match self {
            DtypeArg::Bf16 => DType::Bf16,
            DtypeArg::F16 => DType::F16,
            DtypeArg::F32 => DType::F32,
        }
    }
}

impl RegimeArg {
    /// The regimes.
    pub(super) fn regimes(self) -> Vec<Regime> {
        match self {
            RegimeArg::Both => Regime::ALL.to_vec(),
            RegimeArg::Random => vec![Regime::Random],
            RegimeArg::Peaked => vec![Regime::Peaked],
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum AttentionArg {
    Auto,
    /// What an engine without the indexer computes
    Dense,
    /// Over the keys that the layer's indexer chooses in float64 (`run`, engines cpu and reference; docs/sparse.md)
    Dsa,
}

#[derive(Clone, Copy)]
pub(super) enum SplitsArg {
    Auto,
    Number(usize),
}

impl SplitsArg {
    /// The number; None: by length.
    pub(super) fn number(self) -> Option<usize> {
        match self {
            SplitsArg::Auto => None,
            SplitsArg::Number(n) => Some(n),
        }
    }
}

pub(super) fn splits(text: &str) -> Result<SplitsArg, String> {
    match (text, text.parse::<usize>()) {
        ("auto", _) => Ok(SplitsArg::Auto),
        (_, Ok(n)) if (1..=1024).contains(&n) => Ok(SplitsArg::Number(n)),
        _ => Err("expected `auto` or a number from 1 to 1024".into()),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x.is_finite() && x >= 0.0 => Ok(x),
        _ => Err("expected a number that is finite and not negative".into()),
    }
}

pub(super) fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 && x < 1.0 => Ok(x),
        _ => Err("expected a number between 0 and 1".into()),
    }
}

/// Runs the command.
pub fn main(args: &RunArgs, out: &mut Output) -> Result<u8, Failure> {
    args.copies.check()?;
    let (options, choice) = match options(args) {
        Ok(chosen) => chosen,
        Err(e) => return Err(args.never_ran(e, out)),
    };
    let snapshots_in = match &args.snapshot {
        None => None,
        Some(dir) => {
            let update = Update::from_environment().map_err(Failure::Input)?;
            update.prepare(dir).map_err(Failure::Input)?;
            Some((dir, update))
        }
    };
    threads(args.threads)?;
    let model = args.open()?;
    for w in model.source().warnings() {
        out.warn(&w);
    }
    session(args.n_ctx, &model, &options.batch, out)?;
    match options.sparse {
        None => attention(args.attention, &model, &options.batch, out)?,
        Some(sparse) => args.sparse(sparse, &model, &options.batch, out)?,
    }
    room(&model.geometry, &options)?;
    let layers = match rest::asked().as_ref().or(args.layer.as_ref()) {
        Some(asked) => layers::choose(asked, &model, out)?,
        None => vec![*model.mla_layers().first().ok_or_else(|| {
            let what = "no layer of this file has MLA attention";
            Failure::Input(format!("{what}\n  where: {}\n  do: choose another file", model.file()))
        })?],
    };
    let bisecting = Bisecting::new(args, signature::Setup::of(&model, &options, &layers))?;
    let mut report = Report {
        deliberate_fault: options.fault.as_ref().map(|f| f.text.clone()),
        engine_choice: choice,
        not_judged: not_judged(&options),
        ..args.empty(ModelReport::new(&model))
    };
    if rest::asked().is_some() {
        let done = rest::judge(&model, &layers, &options, true, out)?;
        (report.broken, report.layers) = (rest::lacks(&done.broken), done.layers);
        return rest::answer(&report, out);
    }
    // The first break decides for a bisection, and snapshots need what a process does not tell another.
    let alone =
        args.bisect || args.snapshot.is_some() || args.record_signature.is_some() || args.signature.is_some();
    let done = rest::judge(&model, &layers, &options, alone, out)?;
    report.layers = done.layers;
    report.broken = rest::lacks(&done.broken);
    let broken = done.broken.into_iter().next();
    let recorded = bisecting.judged(&mut report, broken.as_ref())?;
    if let Some((dir, update)) = snapshots_in {
        report.snapshots = snapshots(args, &options, &report, dir, update)?;
    }
    match emit(report, broken, &args.copies, args.bisect, out) {
        Err(e) if recorded => {
            out.error(&e.to_string());
            Ok(Verdict::Fault.exit(true))
        }
        other => other,
    }
}

/// Holds each layer and form against its snapshot.
fn snapshots(
    args: &RunArgs,
    options: &Options,
    report: &Report,
    dir: &Path,
    update: Update,
) -> Result<Vec<Kept>, Failure> {
    let head = Head {
        model: snapshot::stem(report.model.files.first().map_or("model", String::as_str)),
        architecture: report.model.architecture,
        convention: if args.convention == Convention::Auto { "hf" } else { args.convention.name() },
        norm_eps: args.norm_eps,
        n_ctx: args.n_ctx,
        fault: report.deliberate_fault.clone(),
    };
    let mut all = Vec::new();
    for layer in &report.layers {
        for &form in &options.forms {
            let name = snapshot::file_name(&head, layer, form);
            let what = format!("{}, layer {}, {}", head.model, layer.layer, form.name());
            let text = snapshot::text(&head, layer, form);
            all.push(snapshot::file::keep(dir, &name, &what, &text, update).map_err(Failure::Input)?);
        }
    }
    Ok(all)
}

impl RunArgs {
    /// Whether attention is sparse, and how.
    fn sparse_asked(&self) -> Result<Option<Sparse>, Failure> {
        let sparse = self.attention == AttentionArg::Dsa;
        if self.top_k.is_some() && !sparse {
            return Err(Failure::Input(
                "only sparse attention keeps some keys\n  where: --top-k\n  do: pass --attention dsa, or leave --top-k out".into(),
            ));
        }
        if sparse && (self.signature.is_some() || self.record_signature.is_some()) {
            return Err(Failure::Input(
                "a signature does not say which keys were attended to\n  where: --attention dsa, --signature or --record-signature\n  do: leave one of them out".into(),
            ));
        }
        Ok(sparse.then_some(Sparse { top_k: self.top_k.map(|k| k as usize) }))
    }

    /// Says where sparse attention is dense.
    fn sparse(&self, sparse: Sparse, model: &Model, batch: &Batch, out: &mut Output) -> Result<(), Failure> {
        let Some(own) = model.top_k else { return attention(AttentionArg::Dsa, model, batch, out) };
        let (k, longest) =
            (sparse.top_k.unwrap_or(own), batch.0.iter().map(|r| r.total()).max().unwrap_or(0));
        if longest <= k {
            out.warn(&format!(
                "no request has more than the {k} keys that are kept, so every token attends to all that it sees: --top-k N lowers it"
            ));
        }
        Ok(())
    }

    /// The threshold of a routed batch, and keys of a chunk of context.
    fn route(&self, batch: &Batch) -> Result<(Option<usize>, Option<usize>), Failure> {
        let routed = self.form == FormArg::Routed;
        if self.decode_threshold.is_some() && !routed {
            return Err(Failure::Input(
                "only a routed batch has decodes and prefills that go different ways\n  where: --decode-threshold\n  do: pass --form routed, or leave --decode-threshold out".into(),
            ));
        }
        let threshold = routed.then(|| self.decode_threshold.unwrap_or(1) as usize);
        let Some(chunk) = self.context_chunk.map(|n| n as usize) else { return Ok((threshold, None)) };
        if self.form == FormArg::Absorbed {
            return Err(Failure::Input(
                "the absorbed form reads the context where it lies, in no chunks\n  where: --context-chunk --form absorbed\n  do: pass --form fused, routed or both, or leave --context-chunk out".into(),
            ));
        }
        let parts = batch.parts(threshold, chunk);
        if parts > MOST_PARTS {
            let longest = batch.0.iter().map(|r| r.context).max().unwrap_or(0);
            let least = longest.div_ceil(MOST_PARTS - 1);
            return Err(Failure::Input(format!(
                "chunks of {chunk} keys cut a request into {parts} parts, more than {MOST_PARTS}\n  where: --context-chunk\n  do: pass {least} or more, or shorter contexts"
            )));
        }
        Ok((threshold, Some(chunk)))
    }

    /// A report without layers.
    fn empty(&self, model: ModelReport) -> Report {
        Report {
            convention: if self.convention == Convention::Auto {
                "hf (auto)"
            } else {
                self.convention.name()
            },
            ..Report::empty(RUN, model, command())
        }
    }

    /// The engine that was asked for is not there: reports say so, and of which model.
    fn never_ran(&self, e: Failure, out: &mut Output) -> Failure {
        if !matches!(e, Failure::Unavailable(_)) {
            return e;
        }
        let model = self.open().map_or_else(|_| ModelReport::none(), |m| ModelReport::new(&m));
        let report = Report { deliberate_fault: self.fault.clone(), ..self.empty(model) };
        emit(report, Some(e), &self.copies, self.bisect, out).err().unwrap_or(Failure::ClosedPipe)
    }

    fn open(&self) -> Result<Model, Failure> {
        let path = self.model.as_ref().or(self.model_flag.as_ref());
        let path = path.ok_or_else(|| {
            Failure::Input(
                "no model file was given\n  where: MODEL\n  do: name a GGUF file or a Hugging Face folder"
                    .into(),
            )
        })?;
        Model::open(path).map_err(Failure::input)
    }

    /// Repeats one layer of a run until `ask` has its answer; nothing is printed or written.
    pub(super) fn ask(&self, layer: usize, ask: Ask, progress: &dyn Fn(&str)) -> Result<(), Failure> {
        let (options, _) = options(self)?;
        if options.engine == EngineKind::Reference {
            return Err(Failure::Input(
                "engine reference is held against nothing, so nothing was judged\n  where: the report's command\n  do: make a report with another --engine".into(),
            ));
        }
        let options = Options {
            save: None,
            gates: Vec::new(),
            cumulative: false,
            snapshot: false,
            invariance: false,
            repeat: 1,
            ask: Some(ask),
            ..options
        };
        answered(check::layer(&self.open()?, layer, &options, progress))
    }
}

/// What a layer ends with once a question is answered is no error.
pub(super) fn answered(of: Result<LayerReport, CheckError>) -> Result<(), Failure> {
    match of {
        Ok(_) | Err(CheckError::Engine(EngineError::Sink(SinkError::Enough))) => Ok(()),
        Err(e) => Err(failure(e)),
    }
}

/// Threads of the whole program, where a number is given.
pub(super) fn threads(number: Option<u16>) -> Result<(), Failure> {
    let Some(n) = number else { return Ok(()) };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(usize::from(n)).build_global();
    pool.map_err(|e| {
        Failure::Broke(format!(
            "threads could not be started: {e}\n  where: --threads {n}\n  do: ask for fewer"
        ))
    })
}

/// Prints a report, writes its copies and chooses the exit code; `broken`: why layers are missing.
///
/// Where nothing was judged there is nothing to print but the error; copies say it too, unless the input was at fault.
pub(super) fn emit(
    mut report: Report,
    broken: Option<Failure>,
    copies: &Copies,
    bisect: bool,
    out: &mut Output,
) -> Result<u8, Failure> {
    let lack = broken.as_ref().and_then(Failure::lack).filter(|l| !report.broken.contains(l));
    report.broken.extend(lack);
    report.verdict = report.worst();
    let exit = report.exit_code(bisect);
    report.exit = exit;
    if let Some(e @ Failure::Input(_)) = broken.as_ref().filter(|_| report.layers.is_empty()) {
        return Err(Failure::Input(e.to_string()));
    }
    // Printed first: a full disk must not cost the verdict. A reader who left early (`| head`) does not change it.
    let printed = if report.layers.is_empty() && broken.is_some() {
        Ok(())
    } else if out.json() {
        out.print_json(&report)
    } else if out.quiet() {
        out.print(&terminal::verdict_lines(&report))
    } else {
        out.print(&terminal::render(&report, out.page()))
    };
    let written = copies.write(&report, out);
    match (broken, printed) {
        (Some(e), _) => {
            // One error decides the exit code; the other is said.
            if let Err(w) = written {
                out.error(&w.to_string());
            }
            Err(e)
        }
        (None, Err(Failure::ClosedPipe) | Ok(())) => written.map(|()| exit),
        (None, Err(e)) => Err(e),
    }
}

pub(super) fn failure(e: CheckError) -> Failure {
    match e {
        CheckError::Engine(EngineError::Sink(SinkError::Write(e))) => Failure::Input(e),
        CheckError::Engine(EngineError::Unavailable(e)) => Failure::Unavailable(e),
        CheckError::Engine(EngineError::Input(e)) => Failure::Input(e),
        CheckError::Engine(EngineError::Broke(e)) => Failure::Broke(e),
        CheckError::Engine(e) => Failure::Broke(format!(
            "the engine gave up: {e}\n  where: engine cpu\n  do: report it with the command line"
        )),
        other => Failure::input(other),
    }
}

fn options(args: &RunArgs) -> Result<(Options, String), Failure> {
    let (engine, choice) = args.engine.kind()?;
    if args.accumulate == AccumulateKind::Mma && engine != EngineKind::Cpu {
        return Err(Failure::Input(format!(
            "engine {} accumulates as its kernels do\n  where: --accumulate mma\n  do: pass --engine cpu, or leave it out",
            engine.name()
        )));
    }
    if args.accumulate == AccumulateKind::Mma && args.dtype == DtypeArg::F32 {
        return Err(Failure::Input(
            "a tensor core has 16-bit operands\n  where: --accumulate mma --dtype f32\n  do: pass --dtype bf16 or f16, or --accumulate rn".into(),
        ));
    }
    let batch: Batch = args.batch.parse().map_err(Failure::input)?;
    let (route, context_chunk) = args.route(&batch)?;
    let fault = match &args.fault {
        None => None,
        Some(text) => Some(Fault::parse(text, args.seed).map_err(Failure::input)?),
    };
    if fault.is_some() && engine == EngineKind::Reference {
        return Err(Failure::Input(
            "engine reference has no faults: it is what engines are held against\n  where: --fault\n  do: use --engine cpu".into(),
        ));
    }
    let shown = [
        ("--gates", args.gates),
        ("--cumulative", args.cumulative),
        ("--invariance", args.invariance),
        ("--repeat", args.repeat > 1),
    ];
    if let Some(flag) =
        shown.iter().find_map(|(name, on)| (*on && engine == EngineKind::Reference).then_some(name))
    {
        return Err(Failure::Input(format!(
            "engine reference is compared with nothing\n  where: {flag}\n  do: use --engine cpu, or leave {flag} out"
        )));
    }
    if args.qkv_a == QkvA::Stacked && engine == EngineKind::Reference {
        return Err(Failure::Input(
            "engine reference computes each projection by itself\n  where: --qkv-a stacked\n  do: use --engine cpu, or leave --qkv-a out".into(),
        ));
    }
    let bare = [("--no-poison", args.no_poison), ("--no-guards", args.no_guards)];
    if let Some((flag, _)) = bare.iter().find(|(_, on)| *on && engine != EngineKind::Cuda) {
        return Err(Failure::Input(format!(
            "engine {} has no memory on a GPU\n  where: {flag}\n  do: pass --engine cuda, or leave {flag} out",
            engine.name()
        )));
    }
    if args.first_page > 0 && !engine.runs_kernels() {
        return Err(Failure::Input(format!(
            "engine {} has no pool on a device\n  where: --first-page\n  do: pass --engine cuda or ptx, or leave --first-page out",
            engine.name()
        )));
    }
    let contract = ContractChoice::read(&args.contract).map_err(Failure::input)?;
    if engine == EngineKind::Reference && !matches!(contract, ContractChoice::Declared) {
        return Err(Failure::Input(
            "engine reference is judged by no contract\n  where: --contract\n  do: use --engine cpu, or leave --contract out".into(),
        ));
    }
    let hidden = match &args.hidden {
        None => None,
        Some(path) => Some(npy::read_matrix(path).map_err(Failure::input)?),
    };
    let options = Options {
        engine,
        forms: args.form.forms(),
        batch,
        dtype: args.dtype.dtype(),
        regimes: args.regime.regimes(),
        seed: args.seed,
        page_size: args.page_size as usize,
        splits: args.splits.number(),
        qkv_a: args.qkv_a,
        tp: usize::from(args.tp),
        route,
        context_chunk,
        sparse: args.sparse_asked()?,
        accumulate: args.accumulate,
        kernels: args.kernels.clone(),
        gpu: args.gpu,
        patience: Duration::from_secs(args.kernel_timeout),
        care: Care { poison: !args.no_poison, guards: !args.no_guards },
        architecture: args.target.number,
        contract,
        hidden,
        budget: Budget { alpha: args.budget, promise: args.promise },
        reading: Reading { convention: args.convention, norm_eps: args.norm_eps, n_ctx: args.n_ctx },
        fault,
        save: args.save.clone(),
        gates: if args.gates { OUTPUTS.to_vec() } else { Vec::new() },
        cumulative: args.cumulative,
        snapshot: args.snapshot.is_some(),
        invariance: args.invariance,
        first_page: args.first_page as usize,
        repeat: usize::from(args.repeat),
        ask: None,
        reference_cache: match &args.reference_cache {
            None => None,
            Some(folder) => {
                let limit = (args.reference_cache_limit * 1e9) as u64;
                Some(Arc::new(ReferenceCache::open(folder, limit).map_err(Failure::Input)?))
            }
        },
    };
    Ok((options, choice))
}

/// Holds requests against the length of the session, and says where that length decides nothing.
pub(super) fn session(
    n_ctx: Option<u64>,
    model: &Model,
    batch: &Batch,
    out: &mut Output,
) -> Result<(), Failure> {
    let Some(n_ctx) = n_ctx else { return Ok(()) };
    let longest = batch.0.iter().map(|r| r.total()).max().unwrap_or(0);
    if longest as u64 > n_ctx {
        return Err(Failure::Input(format!(
            "a request has {longest} tokens, more than a session of {n_ctx} positions holds\n  where: --n-ctx, --batch\n  do: pass a longer --n-ctx, or shorter requests"
        )));
    }
    if model.numbers.factors.is_none() {
        out.warn(&format!(
            "architecture {} reads no two sets of rope factors from this file: --n-ctx decides nothing",
            model.arch.name
        ));
    }
    Ok(())
}

/// Models with a sparse indexer are the same as dense ones while every request fits its top_k.
pub(super) fn attention(
    asked: AttentionArg,
    model: &Model,
    batch: &Batch,
    out: &mut Output,
) -> Result<(), Failure> {
    let longest = batch.0.iter().map(|r| r.total()).max().unwrap_or(0);
    if let Some(trained) = model.context_length.filter(|c| longest as u64 > *c) {
        out.warn(&format!("a request has {longest} tokens, the model was made for {trained}"));
    }
    match (asked, model.top_k) {
        (AttentionArg::Dsa, Some(_)) => Err(Failure::Input(
            "only `run` attends over a selection\n  where: --attention dsa\n  do: keep requests within top_k, or pass --attention dense".into(),
        )),
        (AttentionArg::Dsa, None) => Err(Failure::Input(format!(
            "architecture {} has no sparse indexer\n  where: --attention dsa\n  do: leave the option out",
            model.arch.name
        ))),
        (AttentionArg::Auto, Some(k)) if longest > k => Err(Failure::Input(format!(
            "a request has {longest} tokens, but the sparse indexer keeps {k} keys, so dense attention is not what the model computes\n  where: --batch, {}\n  do: pass --attention dense (what an engine without the indexer computes), or shorter requests",
            model.file()
        ))),
        _ => Ok(()),
    }
}

/// Refuses a batch that can't fit: being killed after minutes says nothing to anybody. Counted is what surely
/// stands in memory at once: drawn context rows in float64, and keys and values at engine and judge.
pub(super) fn room(g: &Geometry, o: &Options) -> Result<(), Failure> {
    let Some(free) = devices::memory("MemAvailable:") else { return Ok(()) };
    // The emulated machine keeps track of each byte.
    let front = (o.first_page * o.page_size * g.cache() * o.dtype.bytes()) as u64;
    if o.engine == EngineKind::Ptx && 4 * front > free {
        return Err(Failure::Input(format!(
            "a pool with {} in front of its first page is too large for the emulated machine\n  where: --first-page\n  do: pass a smaller one, or --engine cuda",
            text::size(front)
        )));
    }
    let (mut context, mut keys, mut part_rows) = (0, 0, 0);
    for r in &o.batch.0 {
        let times = if r.context > 0 { o.regimes.len() } else { 1 };
        let fused = o.forms.contains(&Form::Fused) && o.route.is_none_or(|most| r.new > most);
        let a_key = if fused { g.heads * (g.key() + g.value) } else { g.cache() };
        context += times * r.context;
        keys += times * r.total() * a_key;
        part_rows += if fused && r.new > 1 && r.context > 0 { times * r.new } else { 0 };
    }
    // Each chunk of a context has a float32 result of all rows.
    let parts =
        o.context_chunk.map_or(0, |n| o.batch.parts(o.route, n)) * part_rows * g.heads * (g.value + 1);
    let need = (context * g.cache() * 8 + 2 * (keys * o.dtype.bytes() + parts * 4)) as u64;
    if need <= free {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "the batch needs more than {} of memory, {} are free\n  where: --batch\n  do: ask for fewer or shorter requests, one --form or one --regime",
        text::size(need),
        text::size(free)
    )))
}

/// The command line as it can be pasted.
pub(super) fn command() -> String {
    let quote = |a: String| {
        let plain = !a.is_empty() && a.chars().all(|c| c.is_ascii_alphanumeric() || "-_./+=,:@".contains(c));
        if plain { a } else { format!("'{}'", a.replace('\'', "'\\''")) }
    };
    let args = std::env::args_os().skip(1).map(|a| quote(a.to_string_lossy().into_owned()));
    std::iter::once("mla-check".to_string()).chain(args).collect::<Vec<_>>().join(" ")
}
