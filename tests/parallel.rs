//! Tensor parallelism: layers on N ranks are clean, agree with one rank, and what goes wrong on a rank is named there.

mod common;

use common::fixture;
use mla_check::case::{Batch, Case};
use mla_check::check::{self, Beside, CheckError, EngineKind, Options};
use mla_check::engine::cpu::CpuEngine;
use mla_check::engine::stack::QkvA;
use mla_check::engine::{Description, Engine, EngineError, Sink, SinkError};
use mla_check::fault::Fault;
use mla_check::judge::{Diagnosis, Recorder, Unit, Verdict, Which};
use mla_check::model::{Layer, Model};
use mla_check::parallel::RanksError;
use mla_check::report::LayerReport;
use mla_check::synth::{FileType, Preset, Spec, write};
use mla_check::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Contract, Form, Regime, Scope, Stage, Weight};
use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;

fn model(name: &str) -> Model {
    let file = match name {
        "dsv3" => "models/dsv3.Q4_K_M-00001-of-00003.gguf".into(),
        "glm5dims" => "models/glm5dims.Q4_K_M.gguf".into(),
        other => format!("architectures/{other}.Q4_K_M.gguf"),
    };
    Model::open(&fixture(&file)).unwrap()
}

/// A made-up GLM-4.7-Flash with other heads.
fn made(folder: &Path, heads: u64, file_type: &str) -> Model {
    let preset = Preset::by_name("glm-4.7-flash").unwrap();
    let spec = Spec { heads: Some(heads), ..Spec::new(preset, FileType::by_name(file_type).unwrap()) };
    let path = folder.join("model.gguf");
    write(&spec, &path, &mut |_, _| ()).unwrap();
    Model::open(&path).unwrap()
}

fn options(tp: usize, batch: &str) -> Options {
    Options {
        tp,
        batch: batch.parse::<Batch>().unwrap(),
        regimes: vec![Regime::Random],
        ..Options::default()
    }
}

fn fault(text: &str, seed: u64) -> Option<Fault> {
    Some(Fault::parse(text, seed).unwrap())
}

fn layer(model: &Model, options: &Options) -> Result<LayerReport, CheckError> {
    check::layer(model, model.mla_layers()[0], options, &|_| ())
}

/// Units that carry a fault of their own, by name.
fn bad(l: &LayerReport) -> Vec<(String, &Unit)> {
    let bad = l.tensors.iter().filter(|u| u.verdict == Verdict::Fault);
    bad.map(|u| (u.form.map_or(u.tensor.to_string(), |f| format!("{}/{}", f.name(), u.tensor)), u)).collect()
}

fn cause(u: &Unit) -> &str {
    match &u.diagnosis {
        Some(Diagnosis::Cause(c)) => &c.text,
        _ => "",
    }
}

fn clean(l: &LayerReport, what: &str) {
    let found: Vec<String> = bad(l).into_iter().map(|(n, u)| format!("{n}: {:?}", u.evidence)).collect();
    assert!(matches!(l.verdict, Verdict::Rounding | Verdict::Exact), "{what}: {} {found:?}", l.verdict);
    let ranks = l.ranks.as_ref().unwrap();
    assert!(ranks.differ.is_empty(), "{what}: {:?}", ranks.differ);
    assert_eq!(ranks.ranks.len(), ranks.of);
    // Every part of out and its sum, of both forms, in their phases.
    let parts = l.tensors.iter().filter(|u| u.which.name() == "part_out").count();
    let sums = l.tensors.iter().filter(|u| u.which.name() == "out").count();
    assert!(parts > 0 && parts == sums, "{what}: {parts} {sums}");
}

#[test]
fn ranks_of_the_fixtures_are_clean() {
    for (name, tp) in [("glm5dims", 2), ("glm5dims", 4), ("dsv3", 2), ("mistral4dims", 2)] {
        let model = model(name);
        for (dtype, qkv_a) in [
            (DType::Bf16, QkvA::Split),
            (DType::Bf16, QkvA::Stacked),
            (DType::F16, QkvA::Split),
            (DType::F32, QkvA::Stacked),
        ] {
            let o = Options { dtype, qkv_a, ..options(tp, "0+3,17+5,0+1,65+1") };
            clean(&layer(&model, &o).unwrap(), &format!("{name}, {tp} ranks, {dtype}, {qkv_a:?}"));
        }
    }
}

#[test]
fn ranks_on_the_ptx_machine_are_clean() {
    for (name, tp, form) in [("glm5dims", 4, Form::Absorbed), ("dsv3", 2, Form::Fused)] {
        let o = Options {
            engine: EngineKind::Ptx,
            forms: vec![form],
            qkv_a: QkvA::Stacked,
            ..options(tp, "0+3,17+2,65+1")
        };
        clean(&layer(&model(name), &o).unwrap(), name);
    }
}

/// One head and one to three tokens: an lse of 4 to 12 bytes has no memory beside it that nobody writes.
#[test]
fn outputs_of_a_few_bytes_accuse_nobody() {
    let model = model("glm5dims");
    for batch in ["0+1", "0+1,9+1", "0+3"] {
        let o = Options { engine: EngineKind::Ptx, ..options(4, batch) };
        let l = layer(&model, &o).unwrap();
        assert!(bad(&l).is_empty(), "{batch}: {:?}", bad(&l));
    }
}

/// 12 heads at 3 and 12 ranks, 16 at 8 and 16; split and stacked; requests of every kind.
#[test]
fn ranks_of_made_up_layers_are_clean() {
    let folder = tempfile::tempdir().unwrap();
    for (heads, tp, qkv_a) in
        [(12, 3, QkvA::Split), (12, 12, QkvA::Stacked), (16, 8, QkvA::Stacked), (16, 16, QkvA::Split)]
    {
        let model = made(folder.path(), heads, "Q4_K_M");
        let o = Options { qkv_a, ..options(tp, "0+1,0+5,64+7,50+1") };
        clean(&layer(&model, &o).unwrap(), &format!("{heads} heads, {tp} ranks, {qkv_a:?}"));
    }
}

/// What heads and blocks forbid, and what would do; with MiniCPM3's widths two ranks would cut blocks of 256 of w_o.
#[test]
fn ranks_that_cut_heads_or_blocks_are_refused() {
    let refused = |name: &str, tp| match layer(&model(name), &options(tp, "0+2")) {
        Err(CheckError::Ranks(e)) => e,
        other => panic!("{name} at {tp}: {:?}", other.map(|l| l.verdict)),
    };
    for tp in [3, 5, 8] {
        let e = refused("glm5dims", tp);
        assert!(matches!(e, RanksError::Heads { .. }), "{e}");
        assert!(e.to_string().contains("do: pass --tp 2 or 4"), "{e}");
    }
    for (name, tp, own, would) in [
        ("minicpm3dims", 2, "128 columns", "leave --tp out"),
        ("dsv3", 4, "128 columns", "pass --tp 2"),
        ("plm_dims", 2, "128 columns", "leave --tp out"),
    ] {
        let e = refused(name, tp).to_string();
        assert!(e.contains("a shard of w_o (blk.0.attn_output.weight)") && e.contains(own), "{e}");
        assert!(e.contains("has blocks of 256") && e.contains(would), "{e}");
    }
    // Of blocks of 32 the same cut is none inside.
    let folder = tempfile::tempdir().unwrap();
    let model = made(folder.path(), 2, "Q8_0");
    clean(&layer(&model, &options(2, "0+3,17+5,65+1")).unwrap(), "Q8_0");
}

/// Keeps what an engine computed.
#[derive(Default)]
struct Keep(HashMap<TensorId, Tensor>);

impl Recorder for Keep {
    fn record(&mut self, id: TensorId, engine: &Tensor, _: &Tensor) -> Result<(), SinkError> {
        self.0.insert(id, engine.clone());
        Ok(())
    }
}

/// The tensors of a run.
fn tensors(model: &Model, options: &Options) -> HashMap<TensorId, Tensor> {
    let stored = model.weights(0).unwrap();
    let layer = Layer { index: 0, spec: model.spec(&options.reading), weights: &stored };
    let case = check::draw(&layer, options).unwrap();
    let engine = check::engine(options).unwrap();
    let mut keep = Keep::default();
    let beside = Beside { recorder: Some(&mut keep), ..Beside::default() };
    check::judge(&layer, &case, options, engine.as_ref(), beside, &|_| ()).unwrap();
    keep.0
}

/// A head's arithmetic does not depend on who computes it: all but `out` has the same bits on one rank and on four. `out` is
/// rounded a part at a time: each part by half an ulp of its own, so the sums are within 4 halves of the largest part's ulp and
/// one of their own, and what float32 leaves (far less in bf16).
#[test]
fn four_ranks_compute_what_one_does() {
    let model = model("glm5dims");
    for engine in [EngineKind::Cpu, EngineKind::Ptx] {
        let batch = if engine == EngineKind::Cpu { "0+3,17+5,0+1,65+1" } else { "0+2,17+1" };
        let of = |tp| tensors(&model, &Options { engine, ..options(tp, batch) });
        let (one, four) = (of(1), of(4));
        assert_eq!(four.len(), one.len() + 2);
        for (id, a) in &one {
            let b = &four[id];
            assert_eq!((a.dtype, &a.shape), (b.dtype, &b.shape), "{id}");
            if id.stage != Stage::Out {
                assert!(a.bytes == b.bytes, "{id} differs");
                continue;
            }
            let parts = &four[&TensorId { stage: Stage::PartOut, form: id.form }];
            for row in 0..a.rows {
                for col in 0..a.cols {
                    let part = |r: usize| parts.get(r * a.rows + row, col);
                    let most: f64 = (0..4).map(|r| a.dtype.spacing(part(r)) / 2.0).sum();
                    let own = a.dtype.spacing(a.get(row, col).abs().max(b.get(row, col).abs()));
                    let off = (a.get(row, col) - b.get(row, col)).abs();
                    assert!(
                        off <= (most + own) * (1.0 + 1e-6),
                        "{id} {row} {col}: {off} of {most} and {own}"
                    );
                }
            }
        }
    }
}

#[test]
fn every_rank_with_the_first_one_s_shard_is_named() {
    let model = model("glm5dims");
    for tp in [2, 4] {
        let of = |text: &str| {
            layer(&model, &Options { fault: fault(text, 0), ..options(tp, "0+3,17+5") }).unwrap()
        };
        let l = of("shard-zero");
        let bad = bad(&l);
        let names: Vec<&str> = bad.iter().map(|b| b.0.as_str()).collect();
        // All of them in front of any activation, and no activation by itself.
        assert_eq!(names, ["w_q_b", "w_uk", "w_uv", "w_o"]);
        for (name, u) in &bad {
            assert!(cause(u).contains("rank 0's shard"), "{name}: {:?}", u.diagnosis);
        }
        for weight in ["w_q_b", "w_uk", "w_uv", "w_o"] {
            let l = of(&format!("shard-zero@{weight}"));
            let one: Vec<String> = self::bad(&l).into_iter().map(|b| b.0).collect();
            assert_eq!(one, [weight]);
        }
    }
}

#[test]
fn a_rank_that_is_not_in_the_sum_is_named() {
    let model = model("glm5dims");
    for rank in 0..4 {
        let text = format!("lost-rank={rank}");
        let o = Options { fault: fault(&text, 0), forms: vec![Form::Fused], ..options(4, "0+3,17+5") };
        let l = layer(&model, &o).unwrap();
        let bad = bad(&l);
        assert_eq!(bad.len(), 1);
        assert_eq!(bad[0].0, "fused/out");
        assert_eq!(cause(bad[0].1), format!("the part of rank {rank} of 4 is missing from the sum"));
    }
    let o = Options { fault: fault("lost-rank=4", 0), ..options(4, "0+3") };
    assert!(layer(&model, &o).unwrap_err().to_string().contains("there is no rank 4 among 4"));
    for text in ["lost-rank=0", "shard-zero", "part_out-element"] {
        let o = Options { fault: fault(text, 0), ..options(1, "0+3") };
        assert!(layer(&model, &o).unwrap_err().to_string().contains("no ranks in this run"), "{text}");
    }
}

/// One element on one rank: what every rank has deviates there and nowhere else, and what is that rank's own shows as one
/// layer's does.
#[test]
fn one_element_on_one_rank_is_found_there() {
    let model = model("glm5dims");
    for seed in 0..3 {
        let at = seed as usize % 4;
        for stage in Stage::ALL
            .iter()
            .filter(|s| !matches!(s, Stage::PartO | Stage::PartLse | Stage::QLatent | Stage::OLatent))
        {
            let text = format!("{stage}-element");
            let o = Options {
                fault: fault(&text, seed),
                forms: vec![Form::Fused],
                seed,
                ..options(4, "0+3,17+5")
            };
            let l = layer(&model, &o).unwrap();
            let form = if stage.row().scope == Scope::Shared { "" } else { "fused/" };
            let shared = !stage.row().axes.contains(&mla_reference::Axis::Head)
                && !matches!(stage, Stage::PartOut | Stage::Out);
            let label = if shared { format!("@rank {at}") } else { String::new() };
            let bad = bad(&l);
            assert!(!bad.is_empty(), "{text} of seed {seed} is not seen");
            assert!(
                bad.iter().all(|b| b.0 == format!("{form}{stage}{label}")),
                "{text}, seed {seed}: {bad:?}"
            );
            let differ = &l.ranks.as_ref().unwrap().differ;
            assert_eq!(differ.len(), usize::from(shared), "{differ:?}");
            if shared {
                let other = usize::from(at == 0);
                let said = format!("rank {at} holds other bits than rank {other}: 1 of ");
                assert!(differ[0].starts_with(&said), "{}", differ[0]);
            }
        }
    }
}

/// What is wrong with a rank, as an engine's own doing.
#[derive(Clone, Copy, PartialEq)]
enum Wrong {
    Silent,
    Without(Stage),
    Cache,
    Shape,
}

/// The CPU engine, with one rank that does something else.
struct Astray {
    inner: CpuEngine,
    rank: usize,
    wrong: Wrong,
    runs: Cell<usize>,
}

struct Through<'a> {
    inner: &'a mut dyn Sink,
    wrong: Wrong,
}

impl Sink for Through<'_> {
    fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        self.inner.weight(weight, rows)
    }
    fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
        self.inner.norm(weight, values)
    }
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.inner.evidence(id, what)
    }
    fn tensor(&mut self, id: TensorId, t: &mut Tensor) -> Result<bool, SinkError> {
        match self.wrong {
            Wrong::Without(stage) if stage == id.stage => return Ok(false),
            // The first row that belongs to somebody.
            Wrong::Cache if id.stage == Stage::Cache => {
                let row = (0..t.rows).find(|r| t.get(*r, 0).is_finite()).unwrap();
                let was = t.get(row, 0);
                t.set(row, 0, was + 1.0);
                self.inner.tensor(id, t)?;
                return Ok(true);
            }
            Wrong::Shape if id.stage == Stage::AttnOut => {
                t.shape[0] -= 1;
                t.rows -= 1;
                t.bytes.truncate(t.rows * t.cols * t.dtype.bytes());
                let said = self.inner.tensor(id, t);
                t.shape[0] += 1;
                t.rows += 1;
                t.bytes.resize(t.rows * t.cols * t.dtype.bytes(), 0);
                return said;
            }
            _ => {}
        }
        self.inner.tensor(id, t)
    }
}

impl Engine for Astray {
    fn describe(&self) -> Description {
        self.inner.describe()
    }
    fn contract(&self) -> Contract {
        self.inner.contract()
    }
    fn run(
        &self,
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        let rank = self.runs.get();
        self.runs.set(rank + 1);
        if rank != self.rank {
            return self.inner.run(layer, case, forms, sink);
        }
        match self.wrong {
            Wrong::Silent => Ok(()),
            wrong => self.inner.run(layer, case, forms, &mut Through { inner: sink, wrong }),
        }
    }
}

fn astray(rank: usize, wrong: Wrong) -> LayerReport {
    let model = model("glm5dims");
    let o = Options { forms: vec![Form::Fused], ..options(4, "0+3,17+5") };
    let inner = CpuEngine::new(DType::Bf16, o.splits());
    let engine = Astray { inner, rank, wrong, runs: Cell::new(0) };
    check::layer_with(&model, 0, &o, &engine, &|_| ()).unwrap()
}

#[test]
fn a_rank_without_tensors_is_missing() {
    let l = astray(2, Wrong::Silent);
    let bad = bad(&l);
    let names: Vec<&str> = bad.iter().map(|b| b.0.as_str()).collect();
    assert_eq!(names, ["hidden@rank 2"]);
    assert_eq!(bad[0].1.note.as_deref(), Some("missing: the rank delivered no tensor at all"));
    assert_eq!(l.verdict, Verdict::Fault);
    // The others are judged.
    assert!(
        l.tensors.iter().any(|u| u.tensor == "part_out@ranks 0..1, 3"
            && matches!(u.verdict, Verdict::Exact | Verdict::Rounding))
    );

    let l = astray(1, Wrong::Without(Stage::V));
    let (name, unit) = &self::bad(&l)[0];
    assert_eq!(name, "fused/v");
    assert!(unit.evidence.iter().any(|e| e == "rank 1 never delivered it"), "{:?}", unit.evidence);

    let l = astray(3, Wrong::Shape);
    let (name, unit) = &self::bad(&l)[0];
    assert_eq!(name, "fused/attn_out");
    assert!(
        unit.evidence.iter().any(|e| e.starts_with("ranks delivered it as bf16 [8, 1, 256], ")),
        "{:?}",
        unit.evidence
    );
}

/// A cache row that is another one on one rank accuses that rank's cache alone: its later tensors are right for what it read.
#[test]
fn a_rank_with_another_cache_is_found_in_its_cache() {
    for rank in [0, 3] {
        let l = astray(rank, Wrong::Cache);
        let names: Vec<String> = bad(&l).into_iter().map(|b| b.0).collect();
        assert!(!names.is_empty() && names.iter().all(|n| *n == format!("cache@rank {rank}")), "{names:?}");
        let after = l.tensors.iter().filter(|u| u.verdict == Verdict::AfterFault);
        assert!(after.clone().count() > 0);
        assert!(after.into_iter().all(|u| u.tensor.ends_with(&format!("@rank {rank}"))));
    }
}

#[test]
fn units_of_ranks_are_read_back() {
    let l = astray(0, Wrong::Cache);
    let text = serde_json::to_string(&l).unwrap();
    let mut read: LayerReport = serde_json::from_str(&text).unwrap();
    assert_eq!(read.ranks, l.ranks);
    for (a, b) in read.tensors.iter_mut().zip(&l.tensors) {
        assert!(a.place());
        assert_eq!((a.which, a.tensor), (b.which, b.tensor));
        assert!(matches!(a.which, Which::Weight(_) | Which::Tensor(_)));
    }
}
