/*!
q_a and kv_a as one product, and the faults that this program was written for.

Stacked, an engine's bits are those of two products. Then the founding faults, as rows of a table: slots of the stack in a
file's order, the concatenation cut in equal chunks, the attention's output in a buffer that nobody reads. Each is named as what
it is, in the tensor where it happens, while the norms that people print of `q`, `kv_c_normed` and `attn_out` stay within 10 %
of a right run's: that nobody finds these faults by norms is the point.
*/

mod common;

use common::fixture;
use common::small::{G, REQUESTS, case, spec, with_layer};
use mla_check::check::{self, CheckError, EngineKind, Options};
use mla_check::engine::cpu::{CpuEngine, Gain, Seams};
use mla_check::engine::stack::QkvA;
use mla_check::engine::{Engine, Sink, SinkError};
use mla_check::fault::Fault;
use mla_check::judge::{Diagnosis, Settings, Unit, Verdict, origins, overall};
use mla_check::model::{Layer, Model};
use mla_check::synth::{FileType, Lengths, MlaLayers, Preset, Spec, write};
use mla_check::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::rows::dense;
use mla_reference::{Form, Pairing, Phase, Regime, Stage, Weight};
use std::collections::HashMap;
use std::path::PathBuf;

const DSV3: &str = "models/dsv3.Q4_K_M-00001-of-00003.gguf";
/// Slots of types that differ: Q8_0 and Q5_1.
const MIXED: &str = "checkpoints/dsv3.mixed.gguf";
/// More rows in q_a than in kv_a, as models have: 768 and 576.
const SMALL: Preset = Preset {
    name: "small",
    arch: "deepseek2",
    hidden: 512,
    heads: 4,
    q_rank: 768,
    latent: 512,
    nope: 192,
    rope: 64,
    value: 256,
    rope_base: Some(1e6),
    eps: 1e-5,
    context: 4096,
    yarn: None,
    temperature: None,
    indexer: None,
    lengths: Lengths::Split,
    rope_factors: false,
    mla: MlaLayers::All,
};

/// Everything that an engine shows.
#[derive(Default, PartialEq)]
struct Shown {
    weights: HashMap<Weight, Vec<u64>>,
    tensors: HashMap<TensorId, Tensor>,
    /// Tensor whose bits are turned to zeros.
    wiped: Option<Stage>,
}

impl Sink for Shown {
    fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        let bits = dense(rows, 0..rows.rows(), false).iter().map(|v| v.to_bits()).collect();
        assert!(self.weights.insert(weight, bits).is_none());
        Ok(())
    }
    fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
        self.weights.insert(weight, values.iter().map(|v| v.to_bits()).collect());
        Ok(())
    }
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        panic!("{id}: {what}");
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        let wipe = self.wiped == Some(id.stage);
        if wipe {
            tensor.bytes.fill(0);
        }
        assert!(self.tensors.insert(id, tensor.clone()).is_none());
        Ok(wipe)
    }
}

fn same(split: &Shown, stacked: &Shown) {
    assert!(split.tensors.len() > 8 && split.tensors.len() == stacked.tensors.len());
    assert!(split.weights == stacked.weights, "weights");
    for (id, t) in &split.tensors {
        assert!(stacked.tensors[id] == *t, "{id} differs");
    }
}

#[test]
fn a_stack_has_the_bits_of_two_products() {
    let gain = |stage| Seams { gain: Some(Gain { stage, head: None, factor: 1.01 }), ..Seams::default() };
    for (dtype, seams, wiped) in [
        (DType::Bf16, Seams::default(), None),
        (DType::F16, Seams::default(), Some(Stage::QA)),
        (DType::F32, Seams::default(), Some(Stage::KvA)),
        (DType::Bf16, gain(Stage::QA), None),
        (DType::Bf16, gain(Stage::KvA), None),
    ] {
        let run = |qkv_a| {
            let engine = CpuEngine { qkv_a, seams, ..CpuEngine::new(dtype, 2) };
            with_layer(spec(G, Pairing::Adjacent), |layer| {
                let mut shown = Shown { wiped, ..Shown::default() };
                engine.run(layer, &case(&REQUESTS, 2, 1, dtype), &Form::ALL, &mut shown).unwrap();
                shown
            })
        };
        same(&run(QkvA::Split), &run(QkvA::Stacked));
    }
}

/// A file with a layer of the small geometry.
fn small(folder: &tempfile::TempDir) -> PathBuf {
    let path = folder.path().join("small.gguf");
    let preset: &'static Preset = Box::leak(Box::new(SMALL));
    let types = FileType::by_name("Q4_K_M").unwrap();
    write(&Spec::new(preset, types), &path, &mut |_, _| ()).unwrap();
    path
}

fn options(engine: EngineKind, batch: &str) -> Options {
    Options {
        engine,
        batch: batch.parse().unwrap(),
        regimes: vec![Regime::Random],
        splits: Some(1),
        ..Options::default()
    }
}

/// A layer of a file, and the options to run it with.
fn with<T>(path: &std::path::Path, options: &Options, f: impl FnOnce(&Layer, &mla_check::case::Case) -> T) -> T {
    let model = Model::open(path).unwrap();
    let weights = model.weights(0).unwrap();
    let layer = Layer { index: 0, spec: model.spec(&options.reading), weights: &weights };
    let case = check::draw(&layer, options).unwrap();
    f(&layer, &case)
}

#[test]
fn on_the_ptx_machine_too_and_with_types_that_differ() {
    for file in [DSV3, MIXED] {
        for wiped in [None, Some(Stage::KvA)] {
            let run = |qkv_a| {
                let o = Options { qkv_a, forms: vec![Form::Absorbed], ..options(EngineKind::Ptx, "0+3,4+1") };
                let mut shown = Shown { wiped, ..Shown::default() };
                with(&fixture(file), &o, |layer, case| {
                    check::engine(&o).unwrap().run(layer, case, &o.forms, &mut shown).unwrap();
                });
                shown
            };
            same(&run(QkvA::Split), &run(QkvA::Stacked));
        }
    }
}

#[test]
fn a_report_says_what_is_stacked_and_a_layer_without_q_a_has_nothing_to_stack() {
    let o = Options { qkv_a: QkvA::Stacked, forms: vec![Form::Absorbed], ..options(EngineKind::Cpu, "0+3,4+1") };
    let model = Model::open(&fixture(MIXED)).unwrap();
    let report = check::layer(&model, 0, &o, &|_| ()).unwrap();
    assert_eq!(report.verdict, Verdict::Rounding);
    let stacks: Vec<String> = report.stacks.iter().map(ToString::to_string).collect();
    assert_eq!(stacks, ["qkv_a = (q_a:256 Q8_0 + kv_a:576 Q5_1)"]);
    let plm = Model::open(&fixture("architectures/plm_dims.Q4_K_M.gguf")).unwrap();
    for (what, o) in [
        ("--qkv-a stacked", o.clone()),
        (
            "--fault slots-permuted",
            Options { fault: Some(Fault::parse("slots-permuted", 0).unwrap()), qkv_a: QkvA::Split, ..o },
        ),
    ] {
        let e = check::layer(&plm, 0, &o, &|_| ()).unwrap_err();
        assert!(matches!(e, CheckError::Unstackable { .. }));
        assert!(e.to_string().contains(&format!("where: {what}")), "{e}");
    }
}

/// A founding fault.
struct Founding {
    fault: &'static str,
    /// The first tensor at fault, and what is said of it.
    first: &'static str,
    says: &'static [&'static str],
    /// Weights that are at fault too, and what is said of them.
    also: &'static [(&'static str, &'static str)],
    /// How q_a and kv_a may be computed.
    as_: &'static [QkvA],
    /// Which of `q`, `kv_c_normed`, `attn_out` may have norms that move by more than 10 %.
    moves: &'static [&'static str],
}

/// Of a layer with so many rows of q_a.
fn table(q_rank: usize) -> Vec<Founding> {
    // 768 + 576 rows, or 256 + 576: the middle is row 672 or 416, and kv_a's rows from there on end at the stack's end or
    // begin anew.
    let more = q_rank > 576;
    vec![
        Founding {
            fault: "slots-permuted",
            first: "w_q_a",
            says: if more {
                &["slots of qkv_a are permuted: it is laid (kv_a:576 + q_a:768), declared (q_a:768 + kv_a:576)"]
            } else {
                &["slots of qkv_a are permuted: it is laid (kv_a:576 + q_a:256), declared (q_a:256 + kv_a:576)"]
            },
            also: &[("w_kv_a", "slots of qkv_a are permuted")],
            as_: &[QkvA::Stacked],
            moves: &[],
        },
        Founding {
            fault: "equal-chunks",
            first: "w_kv_a",
            says: if more {
                &["qkv_a is cut at row 672, not 768: the concatenation was cut in equal chunks"]
            } else {
                &["qkv_a is cut at row 416, not 256: the concatenation was cut in equal chunks", "its last 160 rows"]
            },
            also: &[],
            as_: &[QkvA::Stacked],
            moves: &[],
        },
        Founding {
            fault: "phantom-output",
            first: "out",
            says: &["zeros throughout, never written or written from nothing"],
            also: &[],
            as_: &[QkvA::Split, QkvA::Stacked],
            moves: &[],
        },
    ]
}

/// Tensor, form, phase.
type Key = (&'static str, Option<Form>, Option<Phase>);

/// Norms as a report prints them of the engine's tensors.
fn norms(units: &[Unit]) -> HashMap<Key, f64> {
    let norm = |u: &Unit| Some(((u.tensor, u.form, u.phase), u.engine.as_ref()?.norm));
    units.iter().filter_map(norm).filter(|((t, ..), _)| ["q", "kv_c_normed", "attn_out"].contains(t)).collect()
}

fn said(u: &Unit) -> String {
    match &u.diagnosis {
        Some(Diagnosis::Cause(c)) => {
            assert!(c.ambiguous_with.is_empty(), "{}: {c:?}", u.tensor);
            c.text.clone()
        }
        other => panic!("{} has no cause: {other:?} {:?}", u.tensor, u.note),
    }
}

fn judged(path: &std::path::Path, o: &Options) -> Vec<Unit> {
    with(path, o, |layer, case| {
        let engine = check::engine(o).unwrap();
        check::judge(layer, case, o, Settings::default(), engine.as_ref(), None, None, &|_| ()).unwrap().units
    })
}

fn founding(path: &std::path::Path, engine: EngineKind, q_rank: usize) {
    let base = options(engine, &std::env::var("BATCH").unwrap_or("0+6,20+1".into()));
    let clean = judged(path, &base);
    assert_eq!(overall(&clean), Verdict::Rounding);
    let right = norms(&clean);
    for f in table(q_rank) {
        for qkv_a in f.as_ {
            let fault = Some(Fault::parse(f.fault, 0).unwrap());
            let units = judged(path, &Options { fault, qkv_a: *qkv_a, ..base.clone() });
            let first = origins(&units).next().unwrap();
            assert_eq!((first.tensor, first.verdict), (f.first, Verdict::Fault), "{}", f.fault);
            let text = said(first);
            assert!(f.says.iter().all(|s| text.contains(s)), "{}: {text}", f.fault);
            for (tensor, says) in f.also {
                let unit = units.iter().find(|u| u.tensor == *tensor).unwrap();
                assert!(said(unit).contains(says), "{}: {}", f.fault, said(unit));
            }
            let weights = |u: &&Unit| u.tensor.starts_with("w_") && u.verdict == Verdict::Fault;
            let wrong = units.iter().filter(weights).count();
            assert_eq!(wrong, f.also.len() + usize::from(f.first.starts_with("w_")), "{}", f.fault);
            let shown = norms(&units);
            assert_eq!(shown.len(), right.len(), "{}", f.fault);
            let by = |(key, norm): (&Key, &f64)| (*key, (norm / right[key] - 1.0) * 100.0);
            let moved: Vec<(Key, f64)> = shown.iter().map(by).collect();
            if std::env::var_os("SHOW").is_some() { eprintln!("{} {moved:?}", f.fault); continue; }
            let far = moved.iter().filter(|(key, by)| by.abs() > 10.0 && !f.moves.contains(&key.0));
            assert_eq!(far.count(), 0, "{} moves norms by %: {moved:?}", f.fault);
        }
    }
}

#[test]
fn founding_faults_are_named_on_a_fixture_while_norms_stay() {
    founding(&fixture(DSV3), EngineKind::Cpu, 256);
}

#[test]
fn founding_faults_are_named_on_a_layer_with_more_rows_of_q_a_while_norms_stay() {
    let folder = tempfile::tempdir().unwrap();
    founding(&small(&folder), EngineKind::Cpu, 768);
}

#[test]
fn founding_faults_are_named_on_the_ptx_machine_while_norms_stay() {
    founding(&fixture(DSV3), EngineKind::Ptx, 256);
    let folder = tempfile::tempdir().unwrap();
    founding(&small(&folder), EngineKind::Ptx, 768);
}
