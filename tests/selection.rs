/*!
Attention over given keys (`--attention dsa`): correct engines are clean in both forms and every dtype, with splits and without; engines
that read other keys than they were given are found at the attention, and nothing before it is accused.
*/

mod common;

use common::fixture;
use mla_check::case::Case;
use mla_check::check::{self, CheckError, EngineKind, Options, Sparse};
use mla_check::engine::cpu::CpuEngine;
use mla_check::engine::{Description, Engine, EngineError, Sink};
use mla_check::fault::Fault;
use mla_check::judge::{Unit, Verdict, Which};
use mla_check::model::{Layer, Model};
use mla_check::probe::Outcome;
use mla_check::report::LayerReport;
use mla_numeric::DType;
use mla_reference::{Contract, Form, Regime, Stage};

const FILES: [&str; 2] = ["models/glm5dims.Q4_K_M.gguf", "architectures/dsv32dims.Q4_K_M.gguf"];
const TOP_K: usize = 12;
const BATCH: &str = "0+20,30+2,25+1,3+1";

fn options(dtype: DType, splits: usize) -> Options {
    Options {
        batch: BATCH.parse().unwrap(),
        sparse: Some(Sparse { top_k: Some(TOP_K) }),
        splits: Some(splits),
        dtype,
        ..Options::default()
    }
}

fn faults(report: &LayerReport) -> Vec<&Unit> {
    report.tensors.iter().filter(|u| u.verdict == Verdict::Fault).collect()
}

/// Stages of attention itself.
const ATTENTION: [Stage; 5] = [Stage::PartO, Stage::PartLse, Stage::OLatent, Stage::Lse, Stage::AttnOut];

#[test]
fn correct_engines_are_clean() {
    for (file, engines) in
        [(FILES[0], [(DType::Bf16, 3), (DType::F32, 1)]), (FILES[1], [(DType::Bf16, 1), (DType::F16, 2)])]
    {
        let model = Model::open(&fixture(file)).unwrap();
        for (dtype, splits) in engines {
            let report = check::layer(&model, 0, &options(dtype, splits), &|_| {}).unwrap();
            let clean = |u: &Unit| {
                matches!(
                    u.verdict,
                    Verdict::Exact | Verdict::Rounding | Verdict::Inconclusive | Verdict::NotApplicable
                )
            };
            let odd: Vec<_> =
                report.tensors.iter().filter(|u| !clean(u)).map(|u| (&u.tensor, u.verdict)).collect();
            assert!(odd.is_empty(), "{file} {dtype} {splits}: {odd:?}");
            let broken: Vec<_> =
                report.probes.iter().filter(|p| matches!(p.outcome, Outcome::Broken { .. })).collect();
            assert!(broken.is_empty(), "{file} {dtype} {splits}");
            // 20 − 12 rows of the first request, and both regimes of the two with a long context.
            let note = report.case.notes.iter().find(|n| n.starts_with("sparse attention: 14 of 28 rows"));
            assert!(note.is_some(), "{:?}", report.case.notes);
        }
        let exact = Options { engine: EngineKind::Reference, ..options(DType::Bf16, 2) };
        let report = check::layer(&model, 0, &exact, &|_| {}).unwrap();
        assert!(report.forms_agree.unwrap() < 1e-12, "{file}: {:?}", report.forms_agree);
    }
}

/// An engine that computes another case than it is given.
struct Other(CpuEngine, fn(&mut Case));

impl Engine for Other {
    fn describe(&self) -> Description {
        self.0.describe()
    }
    fn contract(&self) -> Contract {
        self.0.contract()
    }
    fn run(
        &self,
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        let mut other = case.clone();
        if !other.given.selection.is_empty() {
            (self.1)(&mut other);
        }
        self.0.run(layer, &other, forms, sink)
    }
}

type Wrong = (&'static str, fn(&mut Case));

/// What engines do to a selection.
const WRONG: [Wrong; 8] = [
    ("dense", |c| c.given.selection.clear()),
    ("one key fewer", |c| each(c, |l, _| l.truncate(TOP_K - 1))),
    ("ids off by one", |c| each(c, |l, _| l.iter_mut().for_each(|s| *s = s.saturating_sub(1)))),
    ("the list of the token before", |c| {
        c.given
            .selection
            .iter_mut()
            .for_each(|all| (1..all.len()).rev().for_each(|i| all[i] = all[i - 1].clone()));
    }),
    ("the last keys", |c| each(c, |l, i| *l = (0..=i).rev().take(l.len()).collect())),
    ("a lane that is not masked", |c| each(c, |l, _| l.push(0))),
    ("a key twice", |c| each(c, |l, _| l[TOP_K - 1] = l[0])),
    ("positions of another request", |c| {
        let other = c.given.selection[0][0].iter().map(|s| s % 26).collect();
        let last = c.given.selection[1].last_mut().unwrap();
        *last = other;
    }),
];

/// Changes the lists that leave keys out; the number: how many keys the token has before itself.
fn each(case: &mut Case, change: impl Fn(&mut Vec<usize>, usize)) {
    for (seq, lists) in case.plan.sequences.iter().zip(&mut case.given.selection) {
        for (i, list) in lists.iter_mut().enumerate().filter(|(_, l)| l.len() == TOP_K) {
            change(list, seq.context + i);
        }
    }
}

#[test]
fn other_keys_than_those_given_are_found() {
    let model = Model::open(&fixture(FILES[0])).unwrap();
    for (i, (name, change)) in WRONG.into_iter().enumerate() {
        let splits = 1 + i % 2;
        let engine = Other(CpuEngine::new(DType::Bf16, splits), change);
        let batch = "30+2,25+1".parse().unwrap();
        let options = Options { batch, regimes: vec![Regime::Random], ..options(DType::Bf16, splits) };
        let report = check::layer_with(&model, 0, &options, &engine, &|_| {}).unwrap();
        let found = faults(&report);
        for form in Form::ALL {
            let of = |u: &&&Unit| matches!(u.which, Which::Tensor(id) if id.form == Some(form));
            assert!(found.iter().any(|u| of(&u)), "{name} {form:?}: nothing found");
        }
        let own = |u: &&&Unit| matches!(u.which, Which::Tensor(id) if ATTENTION.contains(&id.stage));
        let stray = found.iter().find(|u| !own(u));
        assert!(stray.is_none(), "{name}: {:?}", stray.map(|u| &u.tensor));
    }
}

/// Faults that act inside attention or its inputs are found where they act.
#[test]
fn planted_faults_are_found_where_they_are() {
    let model = Model::open(&fixture(FILES[0])).unwrap();
    let first = |name: &str, splits| {
        let fault = Some(Fault::parse(name, 0).unwrap());
        let report = check::layer(&model, 0, &Options { fault, ..options(DType::Bf16, splits) }, &|_| {});
        let report = report.unwrap();
        faults(&report).first().map(|u| u.tensor.to_string()).unwrap_or_default()
    };
    for (name, splits, at) in
        [("softmax-scale=1.01", 1, "lse"), ("cache-element", 1, "cache"), ("q-element", 1, "q")]
    {
        let found = first(name, splits);
        let attention = ["lse", "o_latent", "attn_out", "part_o", "part_lse"];
        let right = if at == "lse" { attention.contains(&found.as_str()) } else { found == at };
        assert!(right, "{name}: {found}");
    }
}

/// Splits are dealt over the list: 150 keys make three, whose merge is judged.
#[test]
fn splits_of_a_list_are_merged() {
    let model = Model::open(&fixture(FILES[0])).unwrap();
    let run = |fault: Option<&str>| {
        let options = Options {
            batch: "200+1".parse().unwrap(),
            sparse: Some(Sparse { top_k: Some(150) }),
            regimes: vec![Regime::Random],
            fault: fault.map(|f| Fault::parse(f, 0).unwrap()),
            ..options(DType::Bf16, 3)
        };
        check::layer(&model, 0, &options, &|_| {}).unwrap()
    };
    let clean = run(None);
    assert!(faults(&clean).is_empty(), "{:?}", faults(&clean).iter().map(|u| &u.tensor).collect::<Vec<_>>());
    assert!(clean.case.notes.iter().any(|n| n.starts_with("sparse attention: 1 of 1 rows")));
    let broken = run(Some("merge-base"));
    let found: Vec<String> = faults(&broken).iter().map(|u| u.tensor.to_string()).collect();
    let merged = ["lse", "o_latent", "attn_out"];
    assert!(!found.is_empty() && found.iter().all(|t| merged.contains(&t.as_str())), "{found:?}");
}

#[test]
fn what_does_not_go_with_it_is_refused() {
    let model = Model::open(&fixture(FILES[0])).unwrap();
    let refused = |o: Options| match check::layer(&model, 0, &o, &|_| {}) {
        Err(CheckError::Sparse(e)) => e,
        other => panic!("{:?}", other.map(|r| r.verdict)),
    };
    let base = || options(DType::Bf16, 1);
    assert!(refused(Options { invariance: true, ..base() }).contains("--invariance"));
    assert!(refused(Options { tp: 2, ..base() }).contains("--tp"));
    assert!(refused(Options { context_chunk: Some(8), ..base() }).contains("--context-chunk"));
    let dense = Model::open(&fixture(common::MODELS[0].1)).unwrap();
    let e = check::layer(&dense, 0, &base(), &|_| {}).err().unwrap().to_string();
    assert!(e.contains("no sparse indexer") && e.contains("deepseek2"), "{e}");
}
