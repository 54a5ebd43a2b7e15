/*!
`run --invariance`: correct engines have bits or rounding in every variant; engines that are wrong in one variant only are found there
and nowhere else; one that is right but not bit-invariant is said to be that, and no more.

The model is made here, of a few kilobytes; its widths are small, so the base run may be `inconclusive`. Nothing here rests on that.
*/

mod common;

use common::fixture;
use mla_check::case::Case;
use mla_check::check::{EngineKind, Options, engine, layer, layer_with};
use mla_check::engine::cpu::CpuEngine;
use mla_check::engine::{Description, Engine, EngineError, Sink, SinkError};
use mla_check::fault::Fault;
use mla_check::gguf::write::Writer;
use mla_check::judge::{Status, Verdict, origins};
use mla_check::model::{Layer, Model};
use mla_check::report::invariance::{Outcome, Variant};
use mla_check::report::{LayerReport, ModelReport, RUN, Report, junit, markdown, terminal};
use mla_check::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Accumulate, Contract, Form, GgmlType, Phase, Stage, WEIGHTS, Weight};
use std::path::Path;

const BATCH: &str = "0+5,0+1,20+3,17+1";
const NAMES: [&str; 11] = [
    "order",
    "pages",
    "page-size",
    "splits-1",
    "splits-2",
    "splits-5",
    "one-by-one",
    "chunks",
    "routed",
    "tp",
    "forms",
];

/// One layer: hidden 64, 3 heads of 24 + 8 and 32, query rank 32, latent 32; float32, rows of length √3.
fn write(path: &Path) {
    let mut w = Writer::new();
    w.meta("general.architecture", "deepseek2");
    for (name, value) in [
        ("block_count", 1u32),
        ("context_length", 4096),
        ("embedding_length", 64),
        ("attention.head_count", 3),
        ("attention.head_count_kv", 1),
        ("attention.q_lora_rank", 32),
        ("attention.kv_lora_rank", 32),
        ("rope.dimension_count", 8),
        ("attention.key_length", 40),
        ("attention.value_length", 32),
        ("attention.key_length_mla", 32),
        ("attention.value_length_mla", 32),
    ] {
        w.meta(format!("deepseek2.{name}"), value);
    }
    w.meta("deepseek2.attention.layer_norm_rms_epsilon", 1e-6f32);
    w.meta("deepseek2.rope.freq_base", 1e4f32);
    let mut all = Vec::new();
    for row in WEIGHTS.iter().filter(|r| r.weight != Weight::WQ) {
        let dims: &[u64] = match row.weight {
            Weight::GAttn => &[64],
            Weight::GQ | Weight::GKv => &[32],
            Weight::WQA => &[64, 32],
            Weight::WQB => &[32, 96],
            Weight::WKvA => &[64, 40],
            Weight::WUk => &[24, 32, 3],
            Weight::WUv => &[32, 32, 3],
            _ => &[96, 64],
        };
        w.tensor(format!("blk.0.{}", row.gguf), dims, GgmlType::F32);
        all.push((dims.iter().product::<u64>(), dims[0], row.weight.is_norm()));
    }
    let mut state = 7u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    let data = |i: usize, out: &mut dyn std::io::Write| {
        let (count, cols, norm) = all[i];
        let (size, mean) = if norm { (0.5, 1.0) } else { (3.0 / (cols as f32).sqrt(), 0.0) };
        let bytes: Vec<u8> = (0..count).flat_map(|_| (mean + size * next()).to_le_bytes()).collect();
        out.write_all(&bytes)
    };
    w.write(path, &mut { data }).unwrap();
}

fn model() -> Model {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("small.gguf");
    write(&path);
    // The file stays while it is read.
    std::mem::forget(dir);
    Model::open(&path).unwrap()
}

fn options(dtype: DType) -> Options {
    Options { batch: BATCH.parse().unwrap(), dtype, splits: Some(1), invariance: true, ..Options::default() }
}

/// Short tiles, so that 18 keys are dealt to 5 splits.
fn cpu(dtype: DType) -> CpuEngine {
    CpuEngine { tile: 4, ..CpuEngine::new(dtype, 1) }
}

fn of<'a>(report: &'a LayerReport, name: &str) -> &'a Variant {
    report.invariance.iter().find(|v| v.name == name).unwrap()
}

fn words(report: &LayerReport) -> Vec<(&'static str, &'static str)> {
    report.invariance.iter().map(|v| (v.name, v.word())).collect()
}

/// Rows of the base that a variant is held against: one-by-one leaves out requests of one token.
fn elements(name: &str) -> u64 {
    // Tokens 5 + 1 + 3 + 1; rows of attention: those, and requests with context again (3 + 1).
    let (tokens, rows) = if name == "one-by-one" { (8, 11) } else { (10, 14) };
    // kv_c_normed, k_pe, q; lse, attn_out and out of two forms, or of one where each request goes one way.
    match name {
        "forms" => rows * (3 + 96 + 64),
        "routed" => tokens * (32 + 8 + 96) + rows * (3 + 96 + 64),
        _ => tokens * (32 + 8 + 96) + 2 * rows * (3 + 96 + 64),
    }
}

#[test]
fn a_correct_engine_has_bits_or_rounding_in_every_variant() {
    let model = model();
    for dtype in [DType::Bf16, DType::F16, DType::F32] {
        let report = layer_with(&model, 0, &options(dtype), &cpu(dtype), &|_| ()).unwrap();
        assert_eq!(report.invariance.iter().map(|v| v.name).collect::<Vec<_>>(), NAMES);
        assert_eq!(origins(&report.tensors).count(), 0, "{dtype}");
        assert_ne!(report.verdict, Verdict::Fault, "{dtype}");
        for v in &report.invariance {
            // Nothing of the CPU engine depends on order, on pages or on whether a token stands alone.
            let wanted = match v.name {
                "splits-1" => "not applicable",
                "order" | "pages" | "page-size" | "one-by-one" | "routed" => "bits",
                _ => "rounding",
            };
            assert_eq!(v.word(), wanted, "{dtype} {}: {v:?}", v.name);
            if v.word() != "not applicable" {
                let compared: u64 = v.tensors.iter().map(|t| t.elements).sum();
                assert_eq!(compared, elements(v.name), "{dtype} {}", v.name);
            }
        }
        // Splits are merged in float32 and rounded to 16 bits once more: most bits stay, an ulp is what some differ by.
        let split = of(&report, "splits-2");
        let lse = split.tensors.iter().find(|t| t.tensor == "lse" && t.differ > 0);
        assert!(lse.is_some(), "{dtype}: {split:?}");
        assert!(split.tensors.iter().filter(|t| t.form.is_none()).all(|t| t.differ == 0), "{split:?}");
        // Contexts are read in chunks by the fused form alone; ranks meet in the output alone.
        let differ = |name: &str| {
            let all = of(&report, name).tensors.iter().filter(|t| t.differ > 0);
            all.map(|t| (t.form, t.tensor)).collect::<Vec<_>>()
        };
        assert!(
            differ("chunks").iter().all(|(form, _)| *form == Some(Form::Fused)),
            "{:?}",
            differ("chunks")
        );
        assert!(differ("tp").iter().all(|(_, tensor)| *tensor == "out"), "{:?}", differ("tp"));
    }
}

/// A base that is routed, in chunks and on ranks itself: variants are the way back, and rows that went another way are compared too.
#[test]
fn a_base_that_is_cut_is_held_against_the_whole() {
    let cut = Options { route: Some(1), context_chunk: Some(7), tp: 3, ..options(DType::Bf16) };
    let report = layer_with(&model(), 0, &cut, &cpu(DType::Bf16), &|_| ()).unwrap();
    assert_eq!(origins(&report.tensors).count(), 0);
    for v in &report.invariance {
        let wanted: &[&str] = match v.name {
            "splits-1" | "forms" => &["not applicable"],
            "order" | "pages" | "page-size" | "routed" => &["bits", "rounding"],
            _ => &["rounding"],
        };
        assert!(wanted.contains(&v.word()), "{}: {v:?}", v.name);
    }
    for name in ["order", "pages", "page-size"] {
        assert_eq!(of(&report, name).word(), "bits", "{name}");
    }
    // Prefills went through the fused form, their tokens alone go through the absorbed one.
    let one = of(&report, "one-by-one");
    let attn_out = one.tensors.iter().find(|t| t.tensor == "attn_out").unwrap();
    assert_eq!((attn_out.form, attn_out.elements), (Some(Form::Absorbed), 11 * 96), "{one:?}");
    assert!(attn_out.relative_l2 < 2e-2, "{one:?}");
}

/// The same on a model of the repository, through the options that the command line makes.
#[test]
fn a_model_of_the_repository_is_invariant() {
    let model = Model::open(&fixture("models/glm5dims.Q4_K_M.gguf")).unwrap();
    let options = Options { forms: vec![Form::Absorbed], ..options(DType::Bf16) };
    let report = layer(&model, 0, &options, &|_| ()).unwrap();
    assert_eq!(report.verdict, Verdict::Rounding);
    for v in &report.invariance {
        let wanted = match v.name {
            "splits-1" | "forms" | "chunks" | "routed" => "not applicable",
            "tp" => "rounding",
            _ => "bits",
        };
        assert_eq!(v.word(), wanted, "{}: {v:?}", v.name);
    }
}

/// Our kernels on the PTX machine: the same kernels, the same bits.
#[test]
fn kernels_on_the_ptx_machine_are_clean_in_every_variant() {
    let model = Model::open(&fixture("models/glm5dims.Q4_K_M.gguf")).unwrap();
    let options = Options {
        engine: EngineKind::Ptx,
        forms: vec![Form::Absorbed],
        batch: "0+2,3+1".parse().unwrap(),
        regimes: vec![mla_reference::Regime::Random],
        ..options(DType::Bf16)
    };
    let report = layer_with(&model, 0, &options, engine(&options).unwrap().as_ref(), &|_| ()).unwrap();
    assert_ne!(report.verdict, Verdict::Fault, "{:?}", report.invariance);
    for v in &report.invariance {
        let wanted: &[&str] = match v.name {
            "splits-1" | "forms" | "chunks" | "routed" => &["not applicable"],
            "order" | "pages" | "page-size" => &["bits"],
            _ => &["bits", "rounding"],
        };
        assert!(wanted.contains(&v.word()), "{}: {v:?}", v.name);
    }
}

/// What an engine takes for the case, knowing the one that it is given.
type Takes = fn(&mut Case);
/// What it goes on from, after a tensor was judged.
type Reads = fn(&Case, TensorId, &mut Tensor);

/// The CPU engine with one thing wrong, or another order of products, where a batch looks so.
#[derive(Clone, Copy)]
struct Wrapped {
    inner: CpuEngine,
    takes: Takes,
    reads: Reads,
    /// Whether products add up 16 at a time where the contract allows 8.
    long: fn(&Case) -> bool,
}

fn wrapped(takes: Takes, reads: Reads, long: fn(&Case) -> bool) -> Wrapped {
    let inner = CpuEngine { accumulate: Accumulate::Rn { block: 8, chain: 0 }, ..cpu(DType::Bf16) };
    Wrapped { inner, takes, reads, long }
}

struct Reading<'a> {
    inner: &'a mut dyn Sink,
    case: &'a Case,
    reads: Reads,
}

impl Sink for Reading<'_> {
    fn weight(&mut self, w: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        self.inner.weight(w, rows)
    }
    fn norm(&mut self, w: Weight, values: &[f64]) -> Result<(), SinkError> {
        self.inner.norm(w, values)
    }
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.inner.evidence(id, what)
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        let altered = self.inner.tensor(id, tensor)?;
        (self.reads)(self.case, id, tensor);
        Ok(altered)
    }
}

impl Engine for Wrapped {
    fn describe(&self) -> Description {
        self.inner.describe()
    }
    fn contract(&self) -> Contract {
        self.inner.contract()
    }
    fn with_splits(&self, splits: usize) -> Option<Box<dyn Engine + '_>> {
        Some(Box::new(Wrapped { inner: CpuEngine { splits, ..self.inner }, ..*self }))
    }
    fn run(
        &self,
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        let mut taken = case.clone();
        (self.takes)(&mut taken);
        let block = if (self.long)(case) { 16 } else { 8 };
        let inner = CpuEngine { accumulate: Accumulate::Rn { block, chain: 0 }, ..self.inner };
        inner.run(layer, &taken, forms, &mut Reading { inner: sink, case, reads: self.reads })
    }
}

fn never(_: &Case) -> bool {
    false
}

fn checked(engine: &Wrapped) -> LayerReport {
    layer_with(&model(), 0, &options(DType::Bf16), engine, &|_| ()).unwrap()
}

/// The variants that are at fault; the base run is clean, the layer is at fault.
fn at_fault(report: &LayerReport) -> Vec<&'static str> {
    assert_eq!(origins(&report.tensors).count(), 0, "the base run is not clean");
    assert!(report.probes.iter().all(|p| !p.broken()), "{:?}", report.probes);
    let wrong: Vec<_> = report.invariance.iter().filter(|v| v.word() == "fault").map(|v| v.name).collect();
    assert_eq!(report.verdict == Verdict::Fault, !wrong.is_empty());
    wrong
}

/// Where the first request has a context, the last one goes by the first one's page table.
fn first_page_table(case: &mut Case) {
    let sequences = &mut case.plan.sequences;
    let (first, n) = (sequences[0].slots.clone(), sequences.len());
    if sequences[0].context > 0 && n > 1 {
        let last = &mut sequences[n - 1];
        let keys = last.keys().min(first.len());
        last.slots[..keys].copy_from_slice(&first[..keys]);
    }
}

/// The last split is not merged.
fn last_split_dropped(case: &Case, id: TensorId, t: &mut Tensor) {
    let rows = id.form.map_or(0, |form| case.plan.part_rows(form));
    if id.stage == Stage::PartLse && case.plan.splits > 1 {
        let bits = t.dtype.to_bits(f64::NEG_INFINITY);
        for row in t.rows - rows..t.rows {
            (0..t.cols).for_each(|col| t.set_bits(row, col, bits));
        }
    }
}

/// A batch of decode steps alone takes the positions that a graph was captured with.
fn captured_positions(case: &mut Case) {
    if case.plan.sequences.iter().all(|s| s.phase() == Phase::Decode) {
        case.plan.positions.fill(0);
    }
}

/// Positions of requests of several tokens begin at 0.
fn positions_restart(case: &mut Case) {
    for s in case.plan.sequences.iter().filter(|s| s.phase() == Phase::Prefill) {
        for (i, t) in s.tokens.clone().enumerate() {
            case.plan.positions[t] = i as u64;
        }
    }
}

/// Pages have 64 slots, whatever the case says.
fn pages_of_64(case: &mut Case) {
    let (size, pool) = (case.plan.page_size, case.plan.pages * case.plan.page_size);
    for s in &mut case.plan.sequences {
        let table: Vec<usize> = s.slots.iter().step_by(size).map(|slot| slot / size).collect();
        for (p, slot) in s.slots.iter_mut().enumerate() {
            *slot = (table[p / 64] * 64 + p % 64) % pool;
        }
    }
}

#[test]
fn what_is_wrong_in_one_variant_is_found_there_alone() {
    let found = |takes: Takes, reads: Reads| checked(&wrapped(takes, reads, never));
    let order = found(first_page_table, |_, _, _| ());
    assert_eq!(at_fault(&order), ["order"], "{:?}", words(&order));
    let splits = found(|_| (), last_split_dropped);
    assert_eq!(at_fault(&splits), ["splits-2", "splits-5"], "{:?}", words(&splits));
    let graph = found(captured_positions, |_, _, _| ());
    assert_eq!(at_fault(&graph), ["one-by-one"], "{:?}", words(&graph));
    let pages = found(pages_of_64, |_, _, _| ());
    assert_eq!(at_fault(&pages), ["page-size"], "{:?}", words(&pages));
    for (report, name, tensor) in [
        (&order, "order", "cache"),
        (&splits, "splits-2", "lse"),
        (&graph, "one-by-one", "q"),
        (&pages, "page-size", "cache"),
    ] {
        let Outcome::Fault { first, said } = &of(report, name).outcome else { unreachable!() };
        let stage = first.split([' ', ',']).next().unwrap().rsplit('/').next().unwrap();
        assert_eq!(stage, tensor, "{name}: {first}");
        assert!(!said.is_empty(), "{name}");
    }
    shown(&splits);
}

/// Text, JSON, JUnit and Markdown say it, and the run fails.
fn shown(layer: &LayerReport) {
    let mut report = Report::empty(RUN, ModelReport::none(), "mla-check run MODEL --invariance".into());
    report.layers.push(layer.clone());
    report.verdict = report.worst();
    assert_eq!(report.exit_code(false), 1);
    let text =
        anstream::adapter::strip_str(&terminal::render(&report, terminal::Page { width: 80, plain: false }))
            .to_string();
    for line in [
        "order       bits           all ",
        "splits-1    not applicable it is what the base run has",
        "splits-2    fault          fused/",
        "The answer is wrong under splits-2, splits-5, and not in the run above.",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let cases = junit::cases(layer);
    let status = |name: &str| cases.iter().find(|c| c.name == format!("invariance {name}")).unwrap().status;
    let all = ["order", "splits-1", "splits-2"].map(status);
    assert_eq!(all, [Status::Passed, Status::Skipped, Status::Failure]);
    assert!(String::from_utf8(junit::render(&report).unwrap()).unwrap().contains("invariance splits-2"));
    let issue = markdown::issue(&report, layer);
    assert!(
        issue.contains("- `--invariance`, splits-2") && issue.contains("splits-1: not applicable"),
        "{issue}"
    );
    let json = serde_json::to_string(&report).unwrap();
    let read: Report = serde_json::from_str(&json).unwrap();
    assert_eq!(serde_json::to_string(&read).unwrap(), json);
}

/// A fault of the base run is not counted again, and what does not show in a variant is said not to.
#[test]
fn a_fault_of_the_base_run_is_no_other_one_in_a_variant() {
    let report = checked(&wrapped(positions_restart, |_, _, _| (), never));
    assert_eq!(report.verdict, Verdict::Fault);
    for (name, shows) in [("order", "is wrong here too"), ("one-by-one", "does not show here")] {
        let Outcome::AsBase { what } = &of(&report, name).outcome else {
            panic!("{name}: {:?}", of(&report, name))
        };
        assert!(what.contains(shows), "{name}: {what}");
    }
    // A deliberate fault acts in variants as in the base run: parts of an attention are where the attention was.
    let fault = Fault::parse("softmax-scale=1.05", 0).unwrap();
    let planted = Options { fault: Some(fault), ..options(DType::Bf16) };
    let report = layer_with(&model(), 0, &planted, &cpu(DType::Bf16), &|_| ()).unwrap();
    for name in ["order", "pages", "page-size", "splits-2", "splits-5", "one-by-one"] {
        let Outcome::AsBase { what } = &of(&report, name).outcome else {
            panic!("{name}: {:?}", of(&report, name))
        };
        assert!(what.contains("is wrong here too"), "{name}: {what}");
    }
}

/// Right, but other bits in another order: said, and no fault.
#[test]
fn an_honest_engine_that_is_not_bit_invariant_is_rounding() {
    let report = checked(&wrapped(|_| (), |_, _, _| (), |c| c.plan.sequences[0].context > 0));
    assert_eq!(at_fault(&report), [""; 0], "{:?}", words(&report));
    let order = of(&report, "order");
    assert_eq!(order.outcome, Outcome::Rounding, "{order:?}");
    let lse = order.tensors.iter().find(|t| t.tensor == "lse").unwrap();
    assert!(lse.differ > 0 && lse.relative_l2 > 0.0 && lse.relative_l2 < 1e-2, "{lse:?}");
    for name in ["pages", "page-size", "one-by-one"] {
        assert_eq!(of(&report, name).outcome, Outcome::Bits, "{name}");
    }
}

/// Where pages lie must not change a bit, even where all of it is rounding.
#[test]
fn bits_that_depend_on_where_pages_lie_are_a_fault() {
    let low = |c: &Case| c.plan.sequences[0].slots[0] / c.plan.page_size < c.plan.pages / 2;
    let report = checked(&wrapped(|_| (), |_, _, _| (), low));
    let pages = of(&report, "pages");
    let Outcome::Fault { first, said } = &pages.outcome else { panic!("{pages:?}") };
    assert!(first.contains("request 0+5 token"), "{first}");
    assert!(said[0].starts_with("bits differ where the same operations"), "{said:?}");
    assert_eq!(report.verdict, Verdict::Fault);
}
