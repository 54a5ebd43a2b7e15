/*!
Stages judged together: a Trace that lacks tensors, and what errors of those tensors do.

The engine is the CPU engine; a sink between it and the judge drops what was not captured.
*/

mod common;

use common::small::{G, case, spec, with_layer};
use common::{fixture, reference};
use mla_check::case::Case;
use mla_check::check::{self, Options};
use mla_check::engine::cpu::CpuEngine;
use mla_check::engine::{Engine, Sink, SinkError};
use mla_check::fault::{Alter, Fault, FaultyWeights};
use mla_check::judge::chain::{Chain, Errors, Slack, grown, loosened};
use mla_check::judge::compare::Isolated;
use mla_check::judge::{Session, Settings, Unit, Verdict, Which, expected, origins, overall};
use mla_check::model::{Layer, Model};
use mla_check::trace::store::Store;
use mla_check::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Accumulate, Contract, Form, Pairing, Splits, Stage, Temperature, Weight};
use ndarray::Array2;
use std::collections::HashMap;
use std::sync::Mutex;

/// Both phases, with and without a context; the second split of one row is empty.
const REQUESTS: [(usize, usize); 4] = [(0, 5), (9, 1), (0, 1), (6, 3)];

/// Keeps back what was not captured.
struct Without<'s, 'a, 'd> {
    session: &'s mut Session<'a>,
    dropped: &'d [TensorId],
    weights: bool,
}

impl Sink for Without<'_, '_, '_> {
    fn weight(&mut self, w: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        if self.weights { self.session.weight(w, rows) } else { Ok(()) }
    }
    fn norm(&mut self, w: Weight, values: &[f64]) -> Result<(), SinkError> {
        if self.weights { self.session.norm(w, values) } else { Ok(()) }
    }
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.session.evidence(id, what)
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        if self.dropped.contains(&id) { Ok(false) } else { self.session.tensor(id, tensor) }
    }
}

/// What the judge says of an engine's run without some tensors; `fault`: planted in the engine or behind it.
fn judged(
    layer: &Layer,
    case: &Case,
    engine: &CpuEngine,
    dropped: &[TensorId],
    fault: Option<&str>,
    weights: bool,
) -> Vec<Unit> {
    let captured = expected(&layer.spec, case, &Form::ALL).into_iter().filter(|id| !dropped.contains(id));
    let settings = Settings {
        captured: Some(captured.collect()),
        captured_weights: (!weights).then(Vec::new),
        ..Settings::default()
    };
    let mut session =
        Session::new(layer, case, &Form::ALL, engine.contract(), None, Box::new(|_| ())).with(settings);
    let mut sink = Without { session: &mut session, dropped, weights };
    match fault.map(|f| Fault::parse(f, 0).unwrap()) {
        None => engine.run(layer, case, &Form::ALL, &mut sink).unwrap(),
        Some(fault) => {
            let engine = CpuEngine { seams: fault.seams(), ..*engine };
            let weights = FaultyWeights::new(&fault, layer.weights, &layer.spec.geometry, None).unwrap();
            let faulty = Layer { index: 0, spec: fault.spec(&layer.spec), weights: &weights };
            let mut alter =
                Alter::new(&fault, Some(&engine.seams), &layer.spec, &case.plan, &mut sink).unwrap();
            engine.run(&faulty, case, &Form::ALL, &mut alter).unwrap();
            alter.finish().unwrap();
        }
    }
    session.finish().0
}

fn small(dtype: DType, splits: usize, dropped: &[TensorId], fault: Option<&str>) -> Vec<Unit> {
    let engine = CpuEngine { tile: 4, ..CpuEngine::new(dtype, splits) };
    let case = case(&REQUESTS, splits, 1, dtype);
    with_layer(spec(G, Pairing::Adjacent), |layer| judged(layer, &case, &engine, dropped, fault, true))
}

fn all(splits: usize) -> Vec<TensorId> {
    expected(&spec(G, Pairing::Adjacent), &case(&REQUESTS, splits, 1, DType::Bf16), &Form::ALL)
}

/// These stages, in every form that has them.
fn named(stages: &[Stage], splits: usize) -> Vec<TensorId> {
    all(splits).into_iter().filter(|id| stages.contains(&id.stage)).collect()
}

/// All but these.
fn but(stages: &[Stage], splits: usize) -> Vec<TensorId> {
    all(splits).into_iter().filter(|id| !stages.contains(&id.stage)).collect()
}

fn note(u: &Unit) -> &str {
    u.note.as_deref().unwrap_or("")
}

/// No fault anywhere; what was dropped says with what it was judged; what was judged says what it stands for.
fn clean(units: &[Unit], dropped: &[TensorId], what: &str) {
    for u in units {
        let Which::Tensor(id) = u.which else { continue };
        assert!(
            matches!(
                u.verdict,
                Verdict::Exact | Verdict::Rounding | Verdict::Inconclusive | Verdict::NotCompared
            ),
            "{what}: {} {} {:?} {}",
            u.title(),
            u.verdict,
            u.evidence,
            note(u)
        );
        assert_eq!(u.uncaptured, dropped.contains(&id), "{what}: {}", u.title());
        assert_eq!(u.elements == 0, u.uncaptured, "{what}: {} {}", u.title(), note(u));
        for stage in &u.chained {
            assert!(note(u).contains(stage.name()), "{what}: {}", note(u));
            assert!(dropped.iter().any(|d| d.stage == *stage), "{what}: {stage}");
        }
        if u.uncaptured {
            assert!(note(u).starts_with("not captured"), "{what}: {}", note(u));
        }
    }
    assert!(!matches!(overall(units), Verdict::Fault | Verdict::NotCompared), "{what}");
}

/// Names of what a tensor's unit stands for; of prefill where the phases differ.
fn chained(units: &[Unit], stage: Stage, form: Option<Form>) -> Vec<Stage> {
    let of = |u: &&Unit| u.which == Which::Tensor(TensorId { stage, form });
    units.iter().filter(of).map(|u| u.chained.clone()).next().unwrap()
}

#[test]
fn a_trace_that_lacks_one_tensor_is_clean() {
    for (dtype, splits) in [(DType::Bf16, 2), (DType::F16, 1), (DType::F32, 2)] {
        for id in all(splits) {
            let units = small(dtype, splits, &[id], None);
            let what = format!("{dtype}, {splits} splits, without {id}");
            clean(&units, &[id], &what);
            for u in &units {
                let Which::Tensor(reader) = u.which else { continue };
                let reads = reader.stage.inputs(&G, reader.form, false).contains(&id.stage)
                    && (id.form.is_none() || id.form == reader.form);
                let merged = splits > 1
                    && u.phase == Some(mla_reference::Phase::Decode)
                    && reader.stage.row().merges
                    && !(reader.stage == Stage::AttnOut && reader.form == Some(Form::Absorbed));
                if reads && !merged {
                    assert_eq!(u.chained, [id.stage], "{what}: {}", u.title());
                }
            }
        }
    }
}

#[test]
fn a_trace_that_lacks_nearly_everything_is_clean() {
    use Stage::*;
    for (dtype, splits) in [(DType::Bf16, 2), (DType::F16, 2), (DType::F32, 1)] {
        for dropped in [
            but(&[Hidden, Out], splits),
            but(&[Q, Cache, AttnOut], splits),
            named(&[QA, QANormed, QRaw], splits),
            named(&[PartO, PartLse], splits),
            named(&[PartLse, K, OLatent], splits),
            named(&[KvCNormed, KPe], splits),
            named(&[AttnIn, KvA, Cache, V, QLatent], splits),
        ] {
            let units = small(dtype, splits, &dropped, None);
            clean(&units, &dropped, &format!("{dtype}, {splits} splits, without {dropped:?}"));
        }
    }
    let units = small(DType::Bf16, 2, &but(&[Hidden, Out], 2), None);
    let between = [AttnIn, QA, QANormed, QRaw, Q, KvA, KvCNormed, KPe, Cache];
    let fused = [&between[..], &[K, V, PartO, PartLse, AttnOut]].concat();
    assert_eq!(chained(&units, Out, Some(Form::Fused)), fused);
    let absorbed = [&between[..], &[QLatent, PartO, PartLse, OLatent, AttnOut]].concat();
    assert_eq!(chained(&units, Out, Some(Form::Absorbed)), absorbed);
    let lse = units.iter().find(|u| u.which == Which::Tensor(TensorId::of(Lse, Form::Fused))).unwrap();
    assert_eq!(note(lse), "not captured, and nothing after it was compared");
    let q = units.iter().find(|u| u.which == Which::Tensor(TensorId::shared(Q))).unwrap();
    assert_eq!(note(q), "not captured; judged together with fused/out, absorbed/out");
}

/// Hidden states alone are given: nothing that was computed was compared.
#[test]
fn nothing_comparable_is_no_verdict() {
    let units = small(DType::Bf16, 2, &but(&[Stage::Hidden], 2), None);
    assert_eq!(overall(&units), Verdict::NotCompared);
}

/// Listed and not delivered stays a fault, and is not chained across.
#[test]
fn what_is_listed_must_come() {
    let (engine, case) = (CpuEngine::new(DType::Bf16, 1), case(&REQUESTS, 1, 1, DType::Bf16));
    let units = with_layer(spec(G, Pairing::Adjacent), |layer| {
        let gone = named(&[Stage::QRaw, Stage::Q], 1);
        let captured: Vec<TensorId> = all(1).into_iter().filter(|id| id.stage != Stage::Q).collect();
        let settings = Settings { captured: Some(captured), ..Settings::default() };
        let mut session =
            Session::new(layer, &case, &Form::ALL, engine.contract(), None, Box::new(|_| ())).with(settings);
        let mut sink = Without { session: &mut session, dropped: &gone, weights: true };
        engine.run(layer, &case, &Form::ALL, &mut sink).unwrap();
        session.finish().0
    });
    let faults: Vec<String> = origins(&units).map(Unit::title).collect();
    assert_eq!(faults, ["q_raw"]);
    for u in units.iter().filter(|u| u.tensor == "q_latent") {
        assert_eq!(u.verdict, Verdict::NotCompared, "{}", note(u));
        assert!(note(u).contains("q was not captured, and its input q_raw is not there"), "{}", note(u));
    }
}

#[test]
fn weights_that_were_not_captured_are_the_files() {
    let engine = CpuEngine { tile: 4, ..CpuEngine::new(DType::Bf16, 2) };
    let case = case(&REQUESTS, 2, 1, DType::Bf16);
    let units = with_layer(spec(G, Pairing::Adjacent), |layer| {
        judged(layer, &case, &engine, &named(&[Stage::QA], 2), None, false)
    });
    clean(&units, &named(&[Stage::QA], 2), "no weights");
    let w = units.iter().find(|u| u.which == Which::Weight(Weight::WQA)).unwrap();
    assert!(w.uncaptured && note(w).contains("the file's is taken"));
}

/// A fault in a stage that is not there shows in the first one behind it that is, which names where it may lie.
#[test]
fn faults_behind_a_missing_tensor_are_found() {
    use Stage::*;
    for (fault, dropped, at) in [
        ("output-gain=1.1@q_a_normed", vec![QANormed, QRaw], "q"),
        ("swap-heads=0,1@q_raw", vec![QRaw], "q"),
        ("q_raw-element=8", vec![QRaw], "q"),
        ("rope-offset=1@q", vec![QRaw, Q], "absorbed/o_latent"),
        ("output-gain=1.1@kv_c_normed", vec![KvCNormed, KPe], "cache"),
        ("rope-offset=3@k_pe", vec![KPe, KvCNormed], "cache"),
        ("output-gain=1.2@v", vec![V], "fused/attn_out"),
        ("softmax-scale=1.5", vec![PartO, PartLse, OLatent, Lse], "absorbed/attn_out"),
        ("softmax-scale=1.5", vec![PartO, PartLse, OLatent], "fused/lse"),
        ("merge-base", vec![PartO, PartLse], "absorbed/o_latent"),
        ("swap-heads=0,1@attn_out", vec![AttnOut], "fused/out"),
        ("drop-token=2", vec![K, V, PartO, PartLse], "fused/attn_out"),
        ("swap-heads=0,2@attn_out", vec![Q, K, V, AttnOut, OLatent, QLatent], "fused/out"),
    ] {
        let dropped = named(&dropped, 2);
        let units = small(DType::Bf16, 2, &dropped, Some(fault));
        let found: Vec<String> =
            origins(&units).map(|u| u.title().split(',').next().unwrap_or_default().to_string()).collect();
        assert!(found.iter().any(|f| f == at), "{fault} without {dropped:?}: {found:?}, not {at}");
        for u in origins(&units).filter(|u| !u.chained.is_empty()) {
            assert!(note(u).contains("the fault may lie in any of"), "{fault}: {} {}", u.title(), note(u));
            for stage in &u.chained {
                assert!(note(u).contains(stage.name()), "{fault}: {}", note(u));
            }
        }
    }
}

/// What reads a chained unit at fault, or a weight at fault through a tensor that is not there, stands after it.
#[test]
fn after_fault_follows_the_chain() {
    let dropped = named(&[Stage::QANormed], 2);
    let units = small(DType::Bf16, 2, &dropped, Some("g_q-element=1"));
    let verdict = |name: &str| units.iter().find(|u| u.tensor == name).unwrap().verdict;
    assert_eq!((verdict("g_q"), verdict("q_raw")), (Verdict::Fault, Verdict::AfterFault));
    assert!(verdict("q_a") <= Verdict::Rounding && verdict("q_a_normed") == Verdict::NotCompared);
}

/// Real dimensions, quantised weights, and the sizes of bounds.
#[test]
fn a_fixture_is_clean_whatever_is_missing() {
    use Stage::*;
    let mut pinned = 0;
    let model = Model::open(&fixture("models/glm5dims.Q4_K_M.gguf")).unwrap();
    for dtype in [DType::Bf16, DType::F32] {
        let options =
            Options { dtype, batch: "0+6,40+1,24+3".parse().unwrap(), splits: Some(2), ..Options::default() };
        let stored = model.weights(0).unwrap();
        let layer = Layer { index: 0, spec: model.spec(&options.reading), weights: &stored };
        let case = check::draw(&layer, &options).unwrap();
        let engine = CpuEngine::new(dtype, 2);
        for stages in [
            vec![],
            vec![QRaw],
            vec![QANormed, QRaw],
            vec![Q],
            vec![KvCNormed, KPe],
            vec![K, V, QLatent],
            vec![QANormed, QRaw, Q, QLatent, K, V, OLatent, PartO, PartLse],
            vec![PartO, PartLse, OLatent],
            vec![
                AttnIn, QA, QANormed, QRaw, Q, KvA, KvCNormed, KPe, Cache, K, V, QLatent, PartO, PartLse,
                OLatent, Lse,
            ],
        ] {
            let ids = expected(&layer.spec, &case, &Form::ALL);
            let dropped: Vec<TensorId> = ids.into_iter().filter(|id| stages.contains(&id.stage)).collect();
            let units = judged(&layer, &case, &engine, &dropped, None, true);
            clean(&units, &dropped, &format!("{dtype} without {stages:?}"));
            // What is still seen: a rotation behind one missing product, attention behind missing keys and values.
            for u in units.iter().filter(|u| dtype == DType::Bf16 && u.elements > 0) {
                let most = match (u.tensor, u.chained.as_slice()) {
                    ("q", [QRaw]) => 1.0,
                    ("attn_out", [K, V]) => 2.0,
                    _ => continue,
                };
                let Some(bound) = u.median_bound_ulps else { continue };
                assert!(
                    bound <= most && u.verdict <= Verdict::Rounding,
                    "{}: {bound} {}",
                    u.title(),
                    u.verdict
                );
                pinned += 1;
            }
        }
    }
    // q in both phases, attn_out in prefill.
    assert_eq!(pinned, 3);
}

/// One stage in float64 with errors of one input: reference, bound, usual; and the same from another input.
struct Bench<'a> {
    layer: &'a Layer<'a>,
    case: &'a Case,
    contract: Contract,
    tensors: HashMap<TensorId, Tensor>,
    id: TensorId,
    input: TensorId,
}

impl Bench<'_> {
    /// The stage where its input is off by `d`; with the errors' growth where given.
    fn run(&self, d: &Array2<f64>, errors: Option<&Errors>) -> [Array2<f64>; 3] {
        let (mut store, mut chain) = (Store::default(), Chain::default());
        for (id, t) in &self.tensors {
            let mut t = t.clone();
            if *id == self.input {
                for ((i, j), d) in d.indexed_iter() {
                    t.set(i, j, t.get(i, j) + d);
                }
            }
            store.keep(*id, t);
        }
        if let Some(e) = errors {
            chain.keep(self.input, Slack::new(&e.most, &e.usual), vec![self.input.stage]);
        }
        let view = store.view(self.id.form);
        let of = Isolated {
            spec: &self.layer.spec,
            case: self.case,
            weights: self.layer.weights,
            contract: &self.contract,
            source: &view,
            slacks: chain.view(self.id.form),
            seed: 0,
            wanted: None,
            departure: None,
            memory: None,
        };
        let t = &self.tensors[&self.id];
        let zeros = || Array2::<f64>::zeros((t.rows, t.cols));
        let out = Mutex::new([zeros(), zeros(), zeros()]);
        of.evaluate(self.id, &|c| {
            let g = grown(&of, self.id, &c);
            let mut out = out.lock().unwrap();
            let at = ndarray::s![c.rows.clone(), c.cols.clone()];
            out[0].slice_mut(at).assign(&c.x);
            if let Some(g) = g {
                out[1].slice_mut(at).assign(&g.most);
                out[2].slice_mut(at).assign(&g.usual);
            }
        });
        out.into_inner().unwrap()
    }

    fn errors(&self, size: f64) -> Errors {
        let t = &self.tensors[&self.input];
        let mut r = common::small::Random(7);
        let most = Array2::from_shape_fn((t.rows, t.cols), |(i, j)| {
            let v = t.get(i, j);
            if v.is_nan() || r.next() < -0.3 { 0.0 } else { f64::from((size * (v.abs() + 0.1)) as f32) }
        });
        Errors { usual: most.clone(), most }
    }

    /// Largest share of the bound that any error within E reaches in some elements of the output: the worst signs for
    /// each come from derivatives. No error may go beyond the bound anywhere.
    fn share(&self, size: f64) -> f64 {
        let e = self.errors(size);
        let none = Array2::zeros(e.most.dim());
        let [x, most, _] = self.run(&none, Some(&e));
        let within = |d: &Array2<f64>| {
            let [y, ..] = self.run(d, None);
            let mut shares = Array2::<f64>::zeros(x.dim());
            for ((at, x), y) in x.indexed_iter().zip(&y) {
                if x.is_finite() && most[at] > 0.0 {
                    shares[at] = (y - x).abs() / most[at];
                    // y − x is of float64 too.
                    assert!(shares[at] <= 1.0 + 1e-9, "{} of {}: {at:?} {}", self.id, self.input, shares[at]);
                } else {
                    assert!(x == y || x.is_nan() || x == &f64::NEG_INFINITY, "{} {at:?}: {x} {y}", self.id);
                }
            }
            shares
        };
        let mut r = common::small::Random(3);
        for _ in 0..3 {
            within(&e.most.mapv(|e| if r.next() < 0.0 { -e } else { e }));
        }
        // The most uncertain finite element, and its worst signs.
        let at = most
            .indexed_iter()
            .filter(|(at, _)| x[*at].is_finite())
            .max_by(|a, b| a.1.total_cmp(b.1))
            .unwrap()
            .0;
        let mut signs = e.most.clone();
        for ((i, j), error) in e.most.indexed_iter().filter(|(_, e)| **e > 0.0) {
            let mut d = none.clone();
            d[[i, j]] = error * 1e-3;
            let [y, ..] = self.run(&d, None);
            signs[[i, j]] = if y[at] < x[at] { -error } else { *error };
        }
        within(&signs)[at]
    }

    /// Root mean square of the effect of independent errors of size S over what is called usual.
    fn usual(&self) -> f64 {
        let e = self.errors(1e-4);
        let [x, _, usual] = self.run(&Array2::zeros(e.most.dim()), Some(&e));
        let mut r = common::small::Random(5);
        let (mut sum, mut n) = (0.0, 0.0);
        for _ in 0..20 {
            let [y, ..] = self.run(&e.usual.mapv(|e| if r.next() < 0.0 { -e } else { e }), None);
            for ((at, x), y) in x.indexed_iter().zip(&y).filter(|((_, x), _)| x.is_finite()) {
                if usual[at] > 0.0 {
                    sum += ((y - x) / usual[at]).powi(2);
                    n += 1.0;
                }
            }
        }
        f64::sqrt(sum / n)
    }
}

/// Bounds hold for every error within E, and the worst error reaches most of them: half of E would be too little.
#[test]
fn errors_of_inputs_reach_their_bounds_and_no_further() {
    use Stage::*;
    let requests = [(5, 1), (0, 2)];
    let mut case = case(&requests, 1, 1, DType::F64);
    case.plan.splits = 1;
    let mut layer = spec(G, Pairing::Adjacent);
    layer.geometry.hidden = 40;
    case.given.hidden = case.given.hidden.slice(ndarray::s![.., ..40]).to_owned();
    layer.temperature = Some(Temperature { scale: 0.3, length: 3.0 });
    let shared = |s| TensorId::shared(s);
    with_layer(layer, |layer| {
        let tensors = reference(layer, &case, &Form::ALL).tensors;
        let plain = Contract { accumulate: Accumulate::Rn { block: 16, chain: 0 }, ..Contract::exact() };
        let split = Contract { splits: Splits::Equal { parts: 2, multiple: 1 }, ..plain };
        let of = |form, s| TensorId::of(s, form);
        let (fused, absorbed) = (Form::Fused, Form::Absorbed);
        let mut short = Vec::new();
        for (contract, id, input, least, spread) in [
            (&plain, shared(AttnIn), shared(Hidden), 0.8, 0.8),
            (&plain, shared(QA), shared(AttnIn), 0.99, 0.8),
            (&plain, shared(QANormed), shared(QA), 0.75, 0.8),
            (&plain, shared(Q), shared(QRaw), 0.99, 0.8),
            (&plain, shared(KPe), shared(KvA), 0.99, 0.8),
            (&plain, shared(Cache), shared(KvCNormed), 0.99, 0.8),
            (&plain, of(fused, K), shared(Cache), 0.99, 0.8),
            (&plain, of(fused, V), shared(Cache), 0.99, 0.8),
            (&plain, of(absorbed, QLatent), shared(Q), 0.99, 0.8),
            (&plain, of(absorbed, AttnOut), of(absorbed, OLatent), 0.99, 0.8),
            (&plain, of(fused, Out), of(fused, AttnOut), 0.99, 0.8),
            (&plain, of(fused, AttnOut), shared(Q), 0.55, 0.7),
            (&plain, of(fused, AttnOut), of(fused, K), 0.8, 0.8),
            (&plain, of(fused, AttnOut), of(fused, V), 0.9, 0.8),
            (&plain, of(fused, Lse), shared(Q), 0.55, 0.7),
            (&plain, of(fused, Lse), of(fused, K), 0.9, 0.8),
            (&plain, of(absorbed, OLatent), of(absorbed, QLatent), 0.55, 0.7),
            (&plain, of(absorbed, OLatent), shared(Cache), 0.8, 0.8),
            (&split, of(fused, AttnOut), of(fused, K), 0.8, 0.8),
            (&split, of(fused, Lse), of(fused, K), 0.9, 0.8),
        ] {
            let contract = loosened(contract);
            let bench = Bench { layer, case: &case, contract, tensors: tensors.clone(), id, input };
            let (small, usual) = (bench.share(1e-3), bench.usual());
            if small < least || !(spread..1.1).contains(&usual) {
                short.push(format!("{id} of {input}: {small} of its bound, {usual} of what is usual"));
            }
            // Large errors: no order is dropped.
            bench.share(0.2);
        }
        assert!(short.is_empty(), "{short:#?}");
    });
}
