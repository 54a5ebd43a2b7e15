/*!
The line from end to end: a model, a layer and options in, a report out.

Nothing here computes or judges: it puts the pieces in order. Geometry is compared first, then the engine
streams into the judge, then verdicts are gathered.
*/

use crate::case::{Batch, Case, Draw, HiddenError, automatic_splits};
use crate::contracts::{ChoiceError, ContractChoice};
use crate::device::Device;
use crate::device::cuda::{Care, Cuda, PATIENCE};
use crate::device::ptx::PtxMachine;
use crate::engine::cpu::CpuEngine;
use crate::engine::kernels::KernelEngine;
use crate::engine::kernels::library::Library;
use crate::engine::reference::ReferenceEngine;
use crate::engine::repeat::Repeated;
use crate::engine::stack::{QkvA, StackReport};
use crate::engine::{Engine, EngineError, Sink};
use crate::fault::{self, Alter, Fault, FaultError, FaultyWeights};
use crate::judge::cause::weight::OtherLayers;
use crate::judge::cumulative::{self, Drift, KeepAll};
use crate::judge::memory::Memory;
use crate::judge::watch::{self, GateReport, Watch};
use crate::judge::{
    Ask, Budget, Recorder, Session, Settings, Unit, Verdict, Which, compare_scalars, overall,
};
use crate::model::{Convention, Layer, Model, ModelError, Reading};
use crate::nvrtc::Target;
use crate::parallel::RanksError;
use crate::probe::{self, Probe, Subject};
use crate::reference_cache::ReferenceCache;
use crate::report::ranks::RanksReport;
use crate::report::{CacheReport, CaseReport, Judgement, LayerReport};
use crate::snapshot::Digests;
use crate::trace::save::{Run, Saver};
use mla_numeric::DType;
use mla_reference::product::{Dense, Rows};
use mla_reference::{Accumulate, Contract, Form, Regime, Route, Spec, Stage, Weight, Weights};
use ndarray::Array2;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

mod invariance;
mod ranks;
mod sparse;

pub use sparse::Sparse;

use invariance::{Keep, Subject as Variants};

/// Which engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// A GPU kernel's arithmetic, emulated.
    Cpu,
    /// float64 from start to end.
    Reference,
    /// Our kernels on the PTX machine.
    Ptx,
    /// Our kernels on a GPU.
    Cuda,
}

impl EngineKind {
    /// Whether it runs kernel files.
    pub fn runs_kernels(self) -> bool {
        matches!(self, EngineKind::Ptx | EngineKind::Cuda)
    }

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Cpu => "cpu",
            EngineKind::Reference => "reference",
            EngineKind::Ptx => "ptx",
            EngineKind::Cuda => "cuda",
        }
    }
}

/// Accumulator of the CPU engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum AccumulateKind {
    /// f32 to nearest, once for every 16 products
    Rn,
    /// The tensor core of sm_90 and later: 16 products and the sum in one, cut to 25 bits
    Mma,
}

/// Everything that a run may be told.
#[derive(Clone, Debug)]
pub struct Options {
    /// Engine.
    pub engine: EngineKind,
    /// Forms.
    pub forms: Vec<Form>,
    /// Requests.
    pub batch: Batch,
    /// Dtype of weights and activations.
    pub dtype: DType,
    /// Regimes of the context.
    pub regimes: Vec<Regime>,
    /// Seed of everything drawn.
    pub seed: u64,
    /// Slots of a page.
    pub page_size: usize,
    /// Splits of the keys in decode; None: by length.
    pub splits: Option<usize>,
    /// Whether q_a and kv_a are one product; see [`Options::stacked`].
    pub qkv_a: QkvA,
    /// Ranks of tensor parallelism, one after the other on one device; 1: none.
    pub tp: usize,
    /// Most new tokens of a request that goes through the absorbed form, all others going through the fused one; None: each
    /// form computes all requests.
    pub route: Option<usize>,
    /// Keys of a chunk of the context, where the fused form prefills on top of one; None: in one go.
    pub context_chunk: Option<usize>,
    /// Attention over the keys that the layer's indexer chooses; None: over all.
    pub sparse: Option<Sparse>,
    /// Accumulator of the CPU engine.
    pub accumulate: AccumulateKind,
    /// Kernel files instead of the program's own, for engines that run kernels.
    pub kernels: Option<PathBuf>,
    /// Number of the GPU.
    pub gpu: u32,
    /// How long a GPU's kernel is waited for before it counts as hung.
    pub patience: Duration,
    /// What is done to a GPU's memory beyond what kernels need.
    pub care: Care,
    /// Architecture that the PTX machine stands for, ten times the compute capability.
    pub architecture: u32,
    /// Which contract the judge emulates.
    pub contract: ContractChoice,
    /// Hidden states.
    pub hidden: Option<Array2<f64>>,
    /// Convention and eps.
    pub reading: Reading,
    /// What a run may get wrong, and what it promises to see.
    pub budget: Budget,
    /// Deliberate fault.
    pub fault: Option<Fault>,
    /// Where tensors are written.
    pub save: Option<PathBuf>,
    /// Stages that other people's rules are asked about too.
    pub gates: Vec<Stage>,
    /// Show differences from the start of the layer.
    pub cumulative: bool,
    /// Take digests of the reference from the start of the layer.
    pub snapshot: bool,
    /// Run the same requests another way too, and compare.
    pub invariance: bool,
    /// Number of the first page of a kernel's pool; 0: pages are numbered from 0.
    pub first_page: usize,
    /// Times that an engine runs the case; its bits must be the same each time.
    pub repeat: usize,
    /// A question about one tensor; the run ends with its answer.
    pub ask: Option<Ask>,
    /// Results of the reference from earlier runs.
    pub reference_cache: Option<Arc<ReferenceCache>>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            engine: EngineKind::Cpu,
            forms: Form::ALL.to_vec(),
            batch: crate::case::DEFAULT_BATCH.parse().unwrap_or(Batch(Vec::new())),
            dtype: DType::Bf16,
            regimes: Regime::ALL.to_vec(),
            seed: 0,
            page_size: 64,
            splits: None,
            qkv_a: QkvA::Split,
            tp: 1,
            route: None,
            context_chunk: None,
            sparse: None,
            accumulate: AccumulateKind::Rn,
            kernels: None,
            gpu: 0,
            patience: PATIENCE,
            care: Care::default(),
            architecture: 120,
            contract: ContractChoice::Declared,
            hidden: None,
            reading: Reading::of(Convention::Hf),
            budget: Budget::default(),
            fault: None,
            save: None,
            gates: Vec::new(),
            cumulative: false,
            snapshot: false,
            invariance: false,
            first_page: 0,
            repeat: 1,
            ask: None,
            reference_cache: None,
        }
    }
}

impl Options {
    /// Splits of the keys in decode.
    pub fn splits(&self) -> usize {
        self.splits.unwrap_or_else(|| automatic_splits(&self.batch))
    }

    /// How q_a and kv_a are computed: stacked where it was asked for, and where a deliberate fault is one of stacks.
    pub fn stacked(&self) -> QkvA {
        match &self.fault {
            Some(f) if f.stacks() => QkvA::Stacked,
            _ => self.qkv_a,
        }
    }

    /// What asks for a stack.
    fn stacked_by(&self) -> String {
        match &self.fault {
            Some(f) if f.stacks() => format!("--fault {}", f.text),
            _ => "--qkv-a stacked".into(),
        }
    }
}

/// Why a layer could not be checked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CheckError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Hidden(#[from] HiddenError),
    #[error(transparent)]
    Fault(#[from] FaultError),
    #[error(transparent)]
    Contract(#[from] ChoiceError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(
        "layer {layer} projects queries at once (q_rank is 0): there is no q_a to stack with kv_a\n  where: {what}\n  do: pass --qkv-a split, or a layer with attn_q_a"
    )]
    Unstackable { layer: usize, what: String },
    #[error(transparent)]
    Ranks(#[from] RanksError),
    #[error("{0}")]
    Save(String),
    #[error("{0}")]
    Sparse(String),
}

/// Checks one layer with the engine of the options. `progress` hears the name of each tensor as it is taken up.
pub fn layer(
    model: &Model,
    index: usize,
    options: &Options,
    progress: &dyn Fn(&str),
) -> Result<LayerReport, CheckError> {
    layer_with(model, index, options, engine(options)?.as_ref(), progress)
}

/// Checks one layer with any engine, which must take the dtype and the splits of the options.
pub fn layer_with(
    model: &Model,
    index: usize,
    options: &Options,
    engine: &dyn Engine,
    progress: &dyn Fn(&str),
) -> Result<LayerReport, CheckError> {
    let started = std::time::Instant::now();
    let stored = model.weights(index)?;
    let spec = model.spec(&options.reading);
    let layer = Layer { index, spec: spec.clone(), weights: &stored };
    let stacks = match options.stacked() {
        QkvA::Split => Vec::new(),
        QkvA::Stacked => {
            let stack = StackReport::qkv_a(&spec.geometry, &stored.stored);
            vec![stack.ok_or_else(|| CheckError::Unstackable { layer: index, what: options.stacked_by() })?]
        }
    };
    let ranks = ranks::of(&layer, &stored.stored, options.tp)?;
    progress("drawing the case");
    let mut case = draw(&layer, options)?;
    sparse::choose(model, &layer, options, &mut case)?;
    let contract = engine.contract();
    let judged = options.contract.of(&contract)?;
    let (odd, notes) = model.remarks(index, &options.reading);
    let mut saver = match &options.save {
        None => None,
        Some(dir) => Some(Saver::new(dir, index).map_err(|e| CheckError::Save(e.to_string()))?),
    };
    let mut report = LayerReport {
        layer: index,
        verdict: Verdict::NotCompared,
        engine: engine.describe(),
        contract,
        contract_text: contract_text(&contract, &judged, &options.contract),
        judged: (judged != contract)
            .then(|| Judgement { by: options.contract.to_string(), contract: judged }),
        weights: stored.stored.clone(),
        stacks,
        layout: stored.layout,
        case: case_report(&case, options),
        budget: options.budget,
        geometry: Some(layer.spec.geometry),
        names: BTreeMap::new(),
        scalars: compare_scalars(&engine.spec(&layer), &layer.spec),
        tensors: Vec::new(),
        probes: Vec::new(),
        invariance: Vec::new(),
        probe_seconds: 0.0,
        gates: Vec::new(),
        cumulative: Vec::new(),
        reference_cache: None,
        reference: Vec::new(),
        odd,
        notes,
        ranks: None,
        forms_agree: None,
        seconds: 0.0,
        command: None,
    };
    if !report.scalars.is_empty() {
        report.verdict = Verdict::Fault;
        return Ok(report);
    }
    if options.engine == EngineKind::Reference {
        report.forms_agree = reference(&layer, &case, options, &mut saver, progress, &mut report)?;
        report.verdict = match report.forms_agree {
            None => Verdict::NotCompared,
            Some(d) if d <= FORMS_AGREE => Verdict::Rounding,
            Some(_) => Verdict::Fault,
        };
    } else {
        let settings = Settings {
            budget: options.budget,
            seed: options.seed,
            conventions: other_conventions(model, &spec),
            closer: options.ask.is_none(),
            ask: options.ask.clone(),
            ..Settings::default()
        };
        let recorder = saver.as_mut().map(|s| s as &mut dyn Recorder);
        let mut keep = Keep::new(options.invariance, recorder);
        let others = Neighbours { model, index };
        let (others, asked) = (Some(&others as &dyn OtherLayers), settings.clone());
        let beside = Beside { settings: asked, recorder: keep.recorder(), others };
        let repeated = Repeated::new(engine, options.repeat);
        let judged = judge(&layer, &case, options, &repeated, beside, progress)?;
        (report.tensors, report.ranks) = (judged.units, judged.ranks);
        report.odd.extend(judged.odd);
        (report.gates, report.cumulative) = (judged.gates, judged.cumulative);
        report.reference_cache = judged.reference_cache;
        report.verdict = overall(&report.tensors);
        // Now it is known what compiled its kernels.
        report.engine = engine.describe();
        let probe =
            |layer: &Layer, report: &mut LayerReport| probed(layer, &case, options, engine, progress, report);
        match ranks {
            None => probe(&layer, &mut report)?,
            // Of one rank, the last: its shards begin inside of the file's tensors.
            Some(r) => ranks::with(r, r.of - 1, &layer, |own| probe(own, &mut report))?,
        }
        if options.invariance {
            let (layer, case, settings) = (&layer, &case, &settings);
            let subject = Variants { layer, case, options, engine, settings, others, report: &report };
            let variants = invariance::all(&subject, &keep.finish(), progress)?;
            report.verdict = invariance::with(report.verdict, &variants);
            report.invariance = variants;
        }
        if options.snapshot {
            progress("digests of the reference");
            let mut digests = Digests::default();
            ReferenceEngine.run(&layer, &case, &options.forms, &mut digests)?;
            report.reference = digests.finish();
        }
    }
    if let Some(s) = saver {
        let run = Run {
            engine: &report.engine,
            reading: &options.reading,
            spec: &spec,
            case: &case,
            contract: &contract,
        };
        s.finish(&run).map_err(|e| CheckError::Save(e.to_string()))?;
    }
    for unit in report.tensors.iter().filter(|u| u.found.is_some()) {
        if let Which::Tensor(id) = unit.which {
            report.names.entry(unit.tensor).or_insert_with(|| case.plan.names(id.stage, id.form));
        }
    }
    // What was judged must be what lies on the disk.
    model.source().unchanged().map_err(ModelError::from)?;
    report.seconds = started.elapsed().as_secs_f64();
    Ok(report)
}

/// How far the two forms of the float64 reference may differ, relative to the largest value: sums of a few
/// thousand terms in another order, each rounding 2^-53.
pub const FORMS_AGREE: f64 = 1e-12;

/// The case that the options ask for.
pub fn draw(layer: &Layer, options: &Options) -> Result<Case, HiddenError> {
    let mut case = Draw {
        batch: options.batch.clone(),
        regimes: options.regimes.clone(),
        seed: options.seed,
        page_size: options.page_size,
        splits: options.splits(),
        route: Route { threshold: options.route, context_chunk: options.context_chunk, inside: false },
        dtype: if options.engine == EngineKind::Reference { DType::F64 } else { options.dtype },
        hidden: options.hidden.clone(),
        spec: &layer.spec,
        weights: layer.weights,
    }
    .case()?;
    case.plan.ranks = options.tp.max(1);
    Ok(case)
}

/// The engine that the options ask for.
///
/// # Errors
/// Kernel files that are wrong; a device that is not there.
pub fn engine(options: &Options) -> Result<Box<dyn Engine>, EngineError> {
    if let Some(f) = options.fault.as_ref().filter(|f| f.edit().is_some() && !options.engine.runs_kernels()) {
        return Err(EngineError::Input(format!(
            "engine {} runs no kernel files\n  where: --fault {}\n  do: {}",
            options.engine.name(),
            f.text,
            fault::KERNELS
        )));
    }
    Ok(match options.engine {
        EngineKind::Reference => Box::new(ReferenceEngine),
        EngineKind::Cpu => {
            let mut e = CpuEngine::new(options.dtype, options.splits());
            e.qkv_a = options.stacked();
            if options.accumulate == AccumulateKind::Mma && options.dtype != DType::F32 {
                e.accumulate = Accumulate::Mma { k: 16, bits: 25 };
            }
            if let Some(f) = &options.fault {
                e.seams = f.seams();
            }
            Box::new(e)
        }
        EngineKind::Ptx => {
            let device = PtxMachine::new(Target::compute(options.architecture));
            let device = device.map_err(|e| EngineError::Input(e.to_string()))?;
            Box::new(kernels("ptx", device, options)?)
        }
        EngineKind::Cuda => Box::new(kernels("cuda", gpu(options)?, options)?),
    })
}

/// The GPU that the options name.
pub(crate) fn gpu(options: &Options) -> Result<Cuda, EngineError> {
    let mut device = Cuda::open(options.gpu).map_err(|e| match e.is_unavailable() {
        true => EngineError::Unavailable(e.to_string()),
        false => EngineError::Broke(e.to_string()),
    })?;
    device.set_patience(options.patience);
    device.set_care(options.care);
    Ok(device)
}

/// Our kernels on a device, by the options.
pub(crate) fn kernels<D: Device>(
    name: &'static str,
    device: D,
    options: &Options,
) -> Result<KernelEngine<D>, EngineError> {
    let mut engine = KernelEngine::new(name, device, library(options)?, options.splits(), &options.forms)?;
    engine.qkv_a = options.stacked();
    engine.first_page = options.first_page;
    Ok(engine)
}

/// The kernel files that the options ask for, with a deliberate fault inside one where it is asked for.
fn library(options: &Options) -> Result<Library, EngineError> {
    let library = match &options.kernels {
        None => Library::built_in_for(options.dtype)?,
        Some(folder) => Library::folder(folder, options.dtype)?,
    };
    match options.fault.as_ref().and_then(Fault::edit) {
        None => Ok(library),
        Some(edit) => library.edited(&edit),
    }
}

/// Readings of the model by other conventions, and with the other set of rope factors, where they differ in a number.
pub fn other_conventions(model: &Model, spec: &Spec) -> Vec<(String, Spec)> {
    let mut others: Vec<(String, Spec)> = Vec::new();
    // A session as long as the model was trained on, and one that is longer than any.
    let sessions: &[Option<u64>] =
        if model.numbers.factors.is_some() { &[None, Some(u64::MAX)] } else { &[None] };
    for convention in Convention::ALL {
        for &n_ctx in sessions {
            let reading = Reading { n_ctx, ..Reading::of(convention) };
            let other = model.spec(&reading);
            if other != *spec && others.iter().all(|(_, s)| *s != other) {
                let set = model.factor_set(&reading);
                let set = set.map_or(String::new(), |s| format!(" with the {} rope factors", s.name()));
                others.push((format!("{}{set}", convention.name()), other));
            }
        }
    }
    others
}

/// What a judgement gives.
#[derive(Default)]
pub struct Judged {
    /// Units in the order of judgement.
    pub units: Vec<Unit>,
    /// What is odd in the weights.
    pub odd: Vec<String>,
    /// What other people's rules say, where asked for.
    pub gates: Vec<GateReport>,
    /// Differences from the start of the layer, where asked for.
    pub cumulative: Vec<Drift>,
    /// What a cache of the reference was good for, where there is one.
    pub reference_cache: Option<CacheReport>,
    /// The ranks, where there are several.
    pub ranks: Option<RanksReport>,
}

/// The layers of a model beside one of them.
pub struct Neighbours<'a> {
    /// The model.
    pub model: &'a Model,
    /// The layer that is judged.
    pub index: usize,
}

impl OtherLayers for Neighbours<'_> {
    fn layers(&self) -> Vec<usize> {
        let mut all: Vec<usize> = (0..self.model.blocks).filter(|l| *l != self.index).collect();
        all.sort_by_key(|l| l.abs_diff(self.index));
        all
    }

    fn with(&self, layer: usize, weight: Weight, f: &mut dyn FnMut(&dyn Rows)) {
        let Ok(weights) = self.model.weights(layer) else { return };
        if let Some(values) = weights.norm(weight) {
            f(&Dense { data: values, cols: values.len() });
        } else if let Some(m) = weights.matrix(weight) {
            f(m);
        }
    }
}

/// What a judgement has beside the engine's tensors.
#[derive(Default)]
pub struct Beside<'a> {
    /// What it may cost and try.
    pub settings: Settings,
    /// Where tensors are also written.
    pub recorder: Option<&'a mut dyn Recorder>,
    /// The model's other layers.
    pub others: Option<&'a dyn OtherLayers>,
}

/// Runs an engine into the judge, once a rank of the case's plan, with the options' deliberate fault if there is one.
pub fn judge<'a>(
    layer: &'a Layer<'a>,
    case: &'a Case,
    options: &'a Options,
    engine: &dyn Engine,
    beside: Beside<'a>,
    progress: &'a dyn Fn(&str),
) -> Result<Judged, CheckError> {
    if case.plan.ranks > 1 {
        return ranks::judge(layer, case, options, engine, beside, progress);
    }
    if let Some(fault) = options.fault.as_ref().filter(|f| f.needs_ranks()) {
        return Err(FaultError::Nowhere(
            "there are no ranks in this run".into(),
            fault.text.clone(),
            "pass --tp 2 or more".into(),
        )
        .into());
    }
    let others = beside.others;
    judge_fed(layer, case, options, &engine.contract(), beside, progress, &mut |sink| {
        let Some(fault) = &options.fault else {
            return Ok(engine.run(layer, case, &options.forms, sink)?);
        };
        let weights = FaultyWeights::new(fault, layer.weights, &layer.spec.geometry, others)?;
        let spec: Spec = fault.spec(&layer.spec);
        let faulty = Layer { index: layer.index, spec, weights: &weights };
        let mut alter = Alter::new(fault, engine.seams(), &layer.spec, &case.plan, sink)?;
        engine.run(&faulty, &fault.case(case), &options.forms, &mut alter)?;
        alter.finish()?;
        Ok(fault.took_part(engine)?)
    })
}

/// Judges what `feed` hands over, of an engine with the contract `declared`.
fn judge_fed<'a>(
    layer: &'a Layer<'a>,
    case: &'a Case,
    options: &'a Options,
    declared: &Contract,
    beside: Beside<'a>,
    progress: &'a dyn Fn(&str),
    feed: &mut dyn FnMut(&mut dyn Sink) -> Result<(), CheckError>,
) -> Result<Judged, CheckError> {
    let Beside { settings, recorder, others } = beside;
    let contract = options.contract.of(declared)?;
    let settings = Settings { declared: (contract != *declared).then_some(*declared), ..settings };
    let mut session = Session::new(layer, case, &options.forms, contract, recorder, Box::new(progress))
        .with(settings)
        .remembering(options.reference_cache.as_deref().map(|c| c as &dyn Memory))
        .beside(others);
    let mut keep = KeepAll::new(options.cumulative, &mut session);
    let mut watch = Watch::new(&options.gates, layer, case, &options.forms, &contract, &mut keep);
    feed(&mut watch)?;
    let mut gates = watch.finish();
    let kept = keep.finish();
    let used = session.used();
    let (units, odd) = session.finish();
    watch::with_verdicts(&mut gates, &units);
    let cumulative =
        if options.cumulative { cumulative::drift(layer, case, &options.forms, kept)? } else { Vec::new() };
    let known = options.reference_cache.as_deref();
    let reference_cache =
        known.map(|c| CacheReport { used, damaged: c.damaged(), lost: c.lost().map(Into::into) });
    Ok(Judged { units, odd, gates, cumulative, reference_cache, ranks: None })
}

/// Probes the engine; what is broken is evidence for a fault.
fn probed(
    layer: &Layer,
    case: &Case,
    options: &Options,
    engine: &dyn Engine,
    progress: &dyn Fn(&str),
    report: &mut LayerReport,
) -> Result<(), CheckError> {
    let subject = Subject {
        engine,
        layer,
        forms: &options.forms,
        fault: options.fault.as_ref(),
        seed: options.seed,
        page_size: case.plan.page_size,
        splits: case.plan.splits,
    };
    let started = std::time::Instant::now();
    report.probes = probe::all(&subject, progress)?;
    report.probe_seconds = started.elapsed().as_secs_f64();
    // Values that are NaN in engine and reference alike answer no question, and break no promise.
    if report.tensors.iter().any(|u| u.verdict == Verdict::NotCompared) {
        for p in report.probes.iter_mut().filter(|p| p.broken()) {
            let why =
                "not all tensors could be compared, so this is no evidence against the engine".to_string();
            p.outcome = probe::Outcome::NotApplicable { why };
        }
    }
    if report.probes.iter().any(Probe::broken) {
        report.verdict = report.verdict.max(Verdict::Fault);
    }
    Ok(())
}

/// Runs the float64 reference; returns the largest difference between its forms, where both ran.
fn reference(
    layer: &Layer,
    case: &Case,
    options: &Options,
    saver: &mut Option<Saver>,
    progress: &dyn Fn(&str),
    report: &mut LayerReport,
) -> Result<Option<f64>, CheckError> {
    let mut sink = crate::engine::reference::Collect::new(saver.as_mut(), progress, options.route.is_none());
    if options.snapshot {
        let mut digests = Digests::before(&mut sink);
        ReferenceEngine.run(layer, case, &options.forms, &mut digests)?;
        report.reference = digests.finish();
    } else {
        ReferenceEngine.run(layer, case, &options.forms, &mut sink)?;
    }
    let (units, apart) = sink.finish();
    report.tensors = units;
    Ok(apart)
}

/// The contract in words, and that it is not the engine's where it is not.
fn contract_text(declared: &Contract, judged: &Contract, choice: &ContractChoice) -> String {
    match judged == declared {
        true => judged.to_string(),
        false => format!("{choice}, not what the engine declares: {judged}"),
    }
}

/// The case as reports show it.
pub(crate) fn case_report(case: &Case, options: &Options) -> CaseReport {
    CaseReport {
        batch: case.batch.to_string(),
        regimes: case.regimes.iter().map(|r| r.name()).collect(),
        sequences: case.plan.sequences.iter().map(|s| (s.request, s.regime.name())).collect(),
        dtype: if options.engine == EngineKind::Reference { "f64" } else { options.dtype.name() },
        seed: options.seed,
        page_size: case.plan.page_size,
        splits: case.plan.splits,
        routed: case.plan.route.threshold.map(|t| case.batch.routed(t)),
        context_chunk: case.plan.route.context_chunk,
        hidden: if options.hidden.is_some() { "given" } else { "drawn" },
        notes: case
            .notes
            .iter()
            .cloned()
            .chain(unserved(case, &options.forms))
            .chain(
                (options.first_page > 0).then(|| format!("the pool's first page is {}", options.first_page)),
            )
            .chain((options.repeat > 1).then(|| {
                format!("run {} times: every bit of every tensor must be the same each time", options.repeat)
            }))
            .collect(),
    }
}

/// Forms that have nothing to compute, in words.
fn unserved(case: &Case, forms: &[Form]) -> Vec<String> {
    let idle = forms.iter().filter(|f| !case.plan.has_form(**f));
    idle.map(|f| format!("no request goes to the {} form: it has no tensors", f.name())).collect()
}

/// What no run of an engine of ours says anything about.
pub fn not_judged(options: &Options) -> Vec<String> {
    not_judged_by(Some(options.engine), options)
}

/// The same of any engine; None: of one that is not the program's.
pub fn not_judged_by(engine: Option<EngineKind>, options: &Options) -> Vec<String> {
    let mut all = vec![
        "whether the file's weights are the right ones: `inspect --against` asks that".to_string(),
        "what a serving engine computes from this file".to_string(),
        "anything outside attention: router, experts, norms after attention, sampling, chat template"
            .to_string(),
    ];
    match engine {
        Some(EngineKind::Cpu) => {
            all.push("GPU kernels: engine cpu emulates a kernel's arithmetic, it runs none".to_string())
        }
        Some(EngineKind::Cuda) => {
            all.push("kernels other than those that ran, and other GPUs than this one".to_string());
        }
        Some(EngineKind::Ptx) => all.push(
            "a GPU: the kernels' PTX ran on an emulated machine, which does not show what ptxas and hardware make of it".to_string(),
        ),
        Some(EngineKind::Reference) => {
            all.push(
                "any engine: the float64 reference was computed, nothing was held against it".to_string(),
            );
        }
        None => all.push("engines other than the one that ran, and other machines than this one".to_string()),
    }
    if !options.care.poison {
        all.push(
            "outputs that nobody wrote, and reads of such memory: nothing was filled before, and every kernel ran once (--no-poison)"
                .to_string(),
        );
    }
    if !options.care.guards {
        all.push("stores outside of buffers: they had no guards (--no-guards)".to_string());
    }
    if matches!(options.contract, ContractChoice::None) {
        all.push("tiles and the place of P's cast: no contract says where they are".to_string());
    }
    if options.sparse.is_some() {
        all.push(sparse::NOT_JUDGED.into());
    }
    if options.route.is_some() {
        all.push(
            "the other form of each request: routed, each goes one way (--form both computes both)".into(),
        );
    }
    if options.forms.len() < 2 {
        let other = if options.forms.contains(&Form::Fused) { "absorbed" } else { "fused" };
        all.push(format!("the {other} form"));
    }
    all
}
