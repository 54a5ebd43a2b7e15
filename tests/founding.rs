/*!
q_a and kv_a as one product, and the faults that this program was written for.

Stacked, an engine's bits are those of two products. Then the founding faults, as rows of a table: slots of the stack in a
file's order, the concatenation cut in equal chunks, every rank with the first one's shard, the attention's output in a buffer
that nobody reads. Each is named as what
it is, in the tensor where it happens, while the norms that people print of `q`, `kv_c_normed` and `attn_out` stay within 10 %
of a right run's: nobody finds these faults by norms.
*/
#![allow(clippy::print_stdout)]

mod common;

use common::fixture;
use common::small::{G, REQUESTS, case, spec, with_layer};
use mla_check::check::{self, Beside, CheckError, EngineKind, Judged, Options};
use mla_check::engine::cpu::{CpuEngine, Gain, Seams};
use mla_check::engine::stack::QkvA;
use mla_check::engine::{Engine, Sink, SinkError};
use mla_check::fault::Fault;
use mla_check::judge::{Diagnosis, Unit, Verdict, origins, overall};
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
/// More rows in q_a than in kv_a, and as many heads as GLM-5 has: norms of a few heads are chance.
const MANY_HEADS: Preset = Preset {
    name: "many-heads",
    arch: "deepseek2",
    hidden: 256,
    heads: 64,
    q_rank: 96,
    latent: 64,
    nope: 16,
    rope: 16,
    value: 16,
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
/// A head of DeepSeek, for which kernels are there, and more rows in q_a than in kv_a.
const ONE_HEAD: Preset = Preset {
    name: "one-head",
    heads: 1,
    q_rank: 640,
    latent: 512,
    nope: 128,
    rope: 64,
    value: 128,
    ..MANY_HEADS
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

/// A file with a layer of this geometry.
fn synth(folder: &tempfile::TempDir, preset: Preset) -> PathBuf {
    let path = folder.path().join(format!("{}.gguf", preset.name));
    let preset: &'static Preset = Box::leak(Box::new(preset));
    let types = FileType::by_name("Q8_0").unwrap();
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
fn with<T>(
    path: &std::path::Path,
    options: &Options,
    f: impl FnOnce(&Layer, &mla_check::case::Case) -> T,
) -> T {
    let model = Model::open(path).unwrap();
    let weights = model.weights(0).unwrap();
    let layer = Layer { index: 0, spec: model.spec(&options.reading), weights: &weights };
    let case = check::draw(&layer, options).unwrap();
    f(&layer, &case)
}

#[test]
fn on_the_ptx_machine_too_and_with_types_that_differ() {
    for (file, wiped) in [(DSV3, Some(Stage::KvA)), (MIXED, None)] {
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

#[test]
fn a_report_says_what_is_stacked_and_a_layer_without_q_a_has_nothing_to_stack() {
    let o =
        Options { qkv_a: QkvA::Stacked, forms: vec![Form::Absorbed], ..options(EngineKind::Cpu, "0+3,4+1") };
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
    says: String,
    /// Weights that are at fault too, and what is said of them.
    also: &'static [(&'static str, &'static str)],
    /// How q_a and kv_a may be computed.
    qkv_a: &'static [QkvA],
    /// Ranks of tensor parallelism; 1: none.
    ranks: &'static [usize],
    /// Whether no norm moves at all, whatever the layer is: the tensors themselves are right.
    norms_are_equal: bool,
}

/// Of a layer with so many rows of q_a and kv_a.
fn table(q_a: usize, kv_a: usize) -> Vec<Founding> {
    let middle = (q_a + kv_a) / 2;
    let declared = format!("(q_a:{q_a} + kv_a:{kv_a})");
    // Where q_a is the smaller part, kv_a's rows from the middle on are more than there are.
    let anew = match (middle + kv_a).checked_sub(q_a + kv_a) {
        None | Some(0) => String::new(),
        Some(n) => format!("; its last {n} rows are the stack's first"),
    };
    vec![
        Founding {
            fault: "slots-permuted",
            first: "w_q_a",
            says: format!(
                "slots of qkv_a are permuted: it is laid (kv_a:{kv_a} + q_a:{q_a}), declared {declared}"
            ),
            also: &[("w_kv_a", "slots of qkv_a are permuted")],
            qkv_a: &[QkvA::Stacked],
            ranks: &[1, 2],
            norms_are_equal: false,
        },
        Founding {
            fault: "equal-chunks",
            first: "w_kv_a",
            says: format!(
                "qkv_a is cut at row {middle}, not {q_a}: the concatenation was cut in equal chunks{anew}"
            ),
            also: &[],
            qkv_a: &[QkvA::Stacked],
            ranks: &[1, 2],
            norms_are_equal: false,
        },
        Founding {
            fault: "phantom-output",
            first: "out",
            says: "zeros throughout, never written or written from nothing".into(),
            also: &[],
            qkv_a: &[QkvA::Split, QkvA::Stacked],
            ranks: &[1],
            norms_are_equal: true,
        },
        // A rank's projection reads the buffer: its part of the sum is the first to be wrong.
        Founding {
            fault: "phantom-output",
            first: "part_out",
            says: "zeros throughout, never written or written from nothing".into(),
            also: &[],
            qkv_a: &[QkvA::Split],
            ranks: &[2],
            norms_are_equal: true,
        },
        Founding {
            fault: "shard-zero",
            first: "w_q_b",
            says: "every rank holds rank 0's shard".into(),
            also: &[
                ("w_uk", "every rank holds rank 0's shard"),
                ("w_uv", "every rank holds rank 0's shard"),
                ("w_o", "every rank holds rank 0's shard"),
            ],
            qkv_a: &[QkvA::Split, QkvA::Stacked],
            ranks: &[2, 4],
            norms_are_equal: false,
        },
    ]
}

/// Tensor, form, phase.
type Key = (&'static str, Option<Form>, Option<Phase>);

/// Norms as a report prints them of the engine's tensors, phase by phase, and of whole tensors: from the ranks', where there
/// are some. What every rank has has its norm on each.
fn norms(judged: &Judged) -> HashMap<Key, f64> {
    const NAMES: [&str; 3] = ["q", "kv_c_normed", "attn_out"];
    let norm = |u: &Unit| Some(((u.tensor, u.form, u.phase), u.engine.as_ref()?.norm));
    let phases = judged.units.iter().filter_map(norm).filter(|((t, ..), _)| NAMES.contains(t));
    let mut all: HashMap<Key, f64> = phases.collect();
    let mut whole: HashMap<Key, f64> = HashMap::new();
    match &judged.ranks {
        None => all.iter().for_each(|((t, form, _), n)| *whole.entry((t, *form, None)).or_default() += n * n),
        Some(ranks) => {
            for n in ranks.ranks.iter().flat_map(|r| &r.norms) {
                let (form, name) = n.tensor.split_once('/').unwrap_or(("", n.tensor));
                let form = Form::ALL.into_iter().find(|f| f.name() == form);
                if let Some(name) = NAMES.into_iter().find(|known| *known == name) {
                    let each = if name == "kv_c_normed" { ranks.of as f64 } else { 1.0 };
                    *whole.entry((name, form, None)).or_default() += n.norm * n.norm / each;
                }
            }
        }
    }
    all.extend(whole.into_iter().map(|(key, squares)| (key, squares.sqrt())));
    all
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

fn judged(path: &std::path::Path, o: &Options) -> Judged {
    with(path, o, |layer, case| {
        let engine = check::engine(o).unwrap();
        check::judge(layer, case, o, engine.as_ref(), Beside::default(), &|_| ()).unwrap()
    })
}

/// A layer and how it is run.
struct Subject {
    path: PathBuf,
    engine: EngineKind,
    batch: &'static str,
    forms: Vec<Form>,
    /// The most ranks that its heads and blocks allow, of those that are tried.
    ranks: usize,
    /// Whether norms of `q`, `kv_c_normed` and `attn_out` stay within 10 % under every fault. Other rows than the right
    /// ones have the same sizes; what is left is chance, and it is small over many heads and tokens.
    norms_stay: bool,
}

fn founding(subject: &Subject) {
    let base = Options { forms: subject.forms.clone(), ..options(subject.engine, subject.batch) };
    let clean = judged(&subject.path, &base);
    assert_eq!(overall(&clean.units), Verdict::Rounding);
    let right = norms(&clean);
    let rows = |name: &str| clean.units.iter().find(|u| u.tensor == name).unwrap().shape[0];
    for f in table(rows("w_q_a"), rows("w_kv_a")) {
        let fits = |tp: &&usize| **tp <= subject.ranks;
        let ways = f.qkv_a.iter().flat_map(|q| f.ranks.iter().filter(fits).map(move |tp| (*q, *tp)));
        for (qkv_a, tp) in ways {
            let fault = Some(Fault::parse(f.fault, 0).unwrap());
            let judged = judged(&subject.path, &Options { fault, qkv_a, tp, ..base.clone() });
            let units = &judged.units;
            let first = origins(units).next().unwrap();
            assert_eq!((first.tensor, first.verdict), (f.first, Verdict::Fault), "{}", f.fault);
            let text = said(first);
            assert!(text.contains(&f.says), "{}: {text}", f.fault);
            for (tensor, says) in f.also {
                let unit = units.iter().find(|u| u.tensor == *tensor).unwrap();
                assert!(said(unit).contains(says), "{}: {}", f.fault, said(unit));
            }
            let weights = |u: &&Unit| u.tensor.starts_with("w_") && u.verdict == Verdict::Fault;
            let wrong = units.iter().filter(weights).count();
            assert_eq!(wrong, f.also.len() + usize::from(f.first.starts_with("w_")), "{}", f.fault);
            let shown = norms(&judged);
            let most = match (f.norms_are_equal, subject.norms_stay) {
                // Sums of squares in another order.
                (true, _) => 1e-10,
                (false, true) => 10.0,
                (false, false) => continue,
            };
            // What has no norm of its phases (a tensor that was computed with another weight) has one of the whole.
            let whole = |k: &Key| shown.contains_key(&(k.0, k.1, None));
            assert!(right.keys().all(whole), "{}", f.fault);
            let by = |(key, norm): (&Key, &f64)| (*key, (norm / right[key] - 1.0) * 100.0);
            let moved: Vec<(Key, f64)> = shown.iter().map(by).collect();
            println!("{}: {moved:?}", f.fault);
            assert!(moved.iter().all(|(_, by)| by.abs() <= most), "{} moves norms by %: {moved:?}", f.fault);
        }
    }
}

#[test]
fn founding_faults_are_named_on_a_fixture() {
    founding(&Subject {
        path: fixture(DSV3),
        engine: EngineKind::Cpu,
        batch: "0+6,20+1",
        forms: Form::ALL.to_vec(),
        ranks: 2,
        norms_stay: false,
    });
}

#[test]
fn founding_faults_are_named_on_a_layer_of_many_heads_while_norms_stay() {
    let folder = tempfile::tempdir().unwrap();
    founding(&Subject {
        path: synth(&folder, MANY_HEADS),
        engine: EngineKind::Cpu,
        batch: "0+40,20+1,33+1,47+1",
        forms: Form::ALL.to_vec(),
        ranks: 4,
        norms_stay: true,
    });
}

#[test]
fn founding_faults_are_named_on_the_ptx_machine() {
    let folder = tempfile::tempdir().unwrap();
    for (path, ranks) in [(fixture(DSV3), 2), (synth(&folder, ONE_HEAD), 1)] {
        founding(&Subject {
            path,
            engine: EngineKind::Ptx,
            batch: "0+3,4+1",
            forms: vec![Form::Absorbed],
            ranks,
            norms_stay: false,
        });
    }
}
