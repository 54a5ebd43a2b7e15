/*!
Routed batches and chunked contexts: parts of the reference merge to the whole, engines are clean whatever threshold and chunk
are, what goes the wrong way is found where it does.
*/

mod common;

use common::small::{G, case, spec, with_layer};
use common::{Keep, fixture, reference};
use mla_check::case::{Batch, Case};
use mla_check::check::{self, EngineKind, Options};
use mla_check::engine::cpu::CpuEngine;
use mla_check::engine::{Description, Engine, EngineError, Sink, SinkError};
use mla_check::judge::{Session, Settings, Unit, Verdict, overall};
use mla_check::model::{Layer, Model};
use mla_check::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Contract, Form, Pairing, Plan, Route, Stage, Weight};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Page size of the small case.
const PAGE: usize = 4;
/// Chunks that divide the context of 33 keys, that do not, pages, all of it, and more.
const CHUNKS: [usize; 6] = [1, 3, 7, PAGE, 33, 38];
/// In the order in which a threshold of 1 runs them.
const REQUESTS: [(usize, usize); 4] = [(0, 1), (50, 1), (0, 5), (33, 17)];

fn routed(threshold: Option<usize>, chunk: Option<usize>, splits: usize, dtype: DType) -> Case {
    let batch: Batch = "0+1,50+1,0+5,33+17".parse().unwrap();
    let requests: Vec<(usize, usize)> = batch.order(threshold).iter().map(|i| REQUESTS[*i]).collect();
    let mut case = case(&requests, splits, 1, dtype);
    case.plan.route = Route { threshold, context_chunk: chunk, inside: false };
    case
}

fn on_small<T>(f: impl FnOnce(&Layer) -> T) -> T {
    with_layer(spec(G, Pairing::Adjacent), f)
}

fn values(t: &Tensor) -> Vec<f64> {
    (0..t.rows).flat_map(|r| (0..t.cols).map(move |c| (r, c))).map(|(r, c)| t.get(r, c)).collect()
}

/// Largest difference over the largest value.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let most = a.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    a.iter().zip(b).fold(0.0f64, |m, (a, b)| m.max((a - b).abs())) / most
}

/// Attention and lse of a head over keys `0..n`, in plain loops.
fn naive(kept: &Keep, layer: &Layer, (token, first_key, n): (usize, usize, usize), h: usize) -> Vec<f64> {
    let (q, k) = (&kept.tensors[&TensorId::shared(Stage::Q)], kept.get(Stage::K, Form::Fused));
    let v = kept.get(Stage::V, Form::Fused);
    let score = |t: usize| -> f64 {
        let dot = |c| q.get(token, h * G.key() + c) * k.get(first_key + t, h * G.key() + c);
        (0..G.key()).map(dot).sum::<f64>() * layer.spec.scale
    };
    let weights: Vec<f64> = (0..n).map(|t| score(t).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let value = |c| (0..n).map(|t| weights[t] / sum * v.get(first_key + t, h * G.value + c)).sum();
    (0..G.value).map(value).chain([sum.ln()]).collect()
}

/// Sums of 50 terms and exponentials of at most a few tens, each good to a few 2^-53: 1e-12 leaves room for a thousand.
#[test]
fn parts_of_the_reference_merge_to_the_whole() {
    on_small(|layer| {
        let whole = reference(layer, &routed(None, None, 1, DType::F64), &Form::ALL);
        for chunk in CHUNKS {
            let case = routed(None, Some(chunk), 1, DType::F64);
            let parts = reference(layer, &case, &Form::ALL);
            let held = parts.get(Stage::PartLse, Form::Fused);
            assert_eq!(held.shape, [33usize.div_ceil(chunk) + 1, 17, G.heads], "{chunk}");
            for stage in [Stage::Lse, Stage::AttnOut, Stage::Out] {
                let (a, b) = (whole.get(stage, Form::Fused), parts.get(stage, Form::Fused));
                assert!(apart(&values(a), &values(b)) < 1e-12, "{chunk} {stage}");
                let b = parts.get(stage, Form::Absorbed);
                assert_eq!(
                    whole.get(stage, Form::Absorbed),
                    b,
                    "{chunk} {stage}: the absorbed form has no chunks"
                );
            }
            let (lse, o) = (parts.get(Stage::Lse, Form::Fused), parts.get(Stage::AttnOut, Form::Fused));
            for ((_, seq, rows), (_, _, keys)) in
                case.plan.attention_rows(Some(Form::Fused)).zip(case.plan.key_rows())
            {
                for (i, row) in rows.enumerate() {
                    for h in 0..G.heads {
                        let at = (seq.tokens.start + i, keys.start, seq.visible(i));
                        let mut got: Vec<f64> = (0..G.value).map(|c| o.get(row, h * G.value + c)).collect();
                        got.push(lse.get(row, h));
                        assert!(apart(&naive(&parts, layer, at, h), &got) < 1e-12, "{chunk} {row} {h}");
                    }
                }
            }
        }
    });
}

/// The rows of each form are those that it has where nothing is routed.
#[test]
fn a_routed_reference_has_the_rows_of_the_forms_that_serve_them() {
    on_small(|layer| {
        for threshold in [1, 5, 17] {
            let case = routed(Some(threshold), Some(7), 2, DType::F64);
            let alone = Plan { route: Route::default(), ..case.plan.clone() };
            let unrouted = Case { plan: alone, ..case.clone() };
            let (one, all) = (reference(layer, &case, &Form::ALL), reference(layer, &unrouted, &Form::ALL));
            for form in Form::ALL {
                assert_eq!(case.plan.has_form(form), form == Form::Absorbed || threshold < 17);
                for stage in [Stage::Lse, Stage::AttnOut, Stage::Out] {
                    if !case.plan.has_form(form) {
                        assert!(!one.tensors.contains_key(&TensorId::of(stage, form)));
                        continue;
                    }
                    let (a, b) = (one.get(stage, form), all.get(stage, form));
                    let own: Vec<usize> = case
                        .plan
                        .attention_rows(None)
                        .filter(|(_, s, _)| (s.tokens.len() <= threshold) == (form == Form::Absorbed))
                        .flat_map(|(_, _, rows)| rows)
                        .collect();
                    let want: Vec<f64> = own.iter().flat_map(|r| (0..b.cols).map(|c| b.get(*r, c))).collect();
                    assert!(apart(&want, &values(a)) < 1e-12, "{threshold} {form:?} {stage}");
                }
            }
        }
    });
}

fn engine(splits: usize) -> CpuEngine {
    CpuEngine { tile: 4, ..CpuEngine::new(DType::Bf16, splits) }
}

fn judged(case: &Case, engine: &dyn Engine, after: &dyn Fn(TensorId, &mut Tensor)) -> Vec<Unit> {
    on_small(|layer| {
        let session = Session::new(layer, case, &Form::ALL, engine.contract(), None, Box::new(|_| ()));
        let mut sink = After { session: session.with(Settings::default()), after };
        engine.run(layer, case, &Form::ALL, &mut sink).unwrap();
        sink.session.finish().0
    })
}

/// Changes tensors once the judge has seen them: the engine goes on from the change.
struct After<'a, 'f> {
    session: Session<'a>,
    after: &'f dyn Fn(TensorId, &mut Tensor),
}

impl Sink for After<'_, '_> {
    fn weight(&mut self, w: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        self.session.weight(w, rows)
    }
    fn norm(&mut self, w: Weight, values: &[f64]) -> Result<(), SinkError> {
        self.session.norm(w, values)
    }
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.session.evidence(id, what)
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        self.session.tensor(id, tensor)?;
        let before = tensor.clone();
        (self.after)(id, tensor);
        Ok(before != *tensor)
    }
}

fn as_is(_: TensorId, _: &mut Tensor) {}

/// What carries evidence of its own, in the order of judgement.
fn faults(units: &[Unit]) -> Vec<String> {
    units.iter().filter(|u| u.verdict == Verdict::Fault).map(Unit::title).collect()
}

#[track_caller]
fn clean(units: &[Unit], what: &str) {
    // So few elements promise little; none may be accused, and none be left out.
    let fine = |u: &Unit| matches!(u.verdict, Verdict::Exact | Verdict::Rounding | Verdict::Inconclusive);
    let bad: Vec<_> =
        units.iter().filter(|u| !fine(u)).map(|u| (u.title(), u.verdict, &u.evidence)).collect();
    assert!(bad.is_empty(), "{what}: {bad:?}");
    assert!(overall(units) <= Verdict::Inconclusive, "{what}");
}

#[test]
fn the_cpu_engine_is_clean_whatever_the_chunk_and_the_threshold() {
    for chunk in CHUNKS {
        for (threshold, splits) in [(None, 1), (None, 2), (Some(1), 2), (Some(5), 1)] {
            let case = routed(threshold, Some(chunk), splits, DType::Bf16);
            clean(&judged(&case, &engine(splits), &as_is), &format!("{chunk} {threshold:?} {splits}"));
        }
    }
    for threshold in [1, 5, 17] {
        let units = judged(&routed(Some(threshold), None, 1, DType::Bf16), &engine(1), &as_is);
        clean(&units, &format!("{threshold}"));
        assert_eq!(units.iter().any(|u| u.form == Some(Form::Fused)), threshold < 17);
    }
}

/// Runs a plan with another threshold than the one it is asked for.
struct WrongWay {
    inner: CpuEngine,
    threshold: usize,
}

impl Engine for WrongWay {
    fn describe(&self) -> Description {
        self.inner.describe()
    }
    fn contract(&self) -> Contract {
        self.inner.contract()
    }
    fn run(&self, l: &Layer, case: &Case, forms: &[Form], sink: &mut dyn Sink) -> Result<(), EngineError> {
        let mut case = case.clone();
        case.plan.route.threshold = Some(self.threshold);
        self.inner.run(l, &case, forms, sink)
    }
}

/// One-token requests that an engine takes for prefills: their keys are among those that it decompresses.
#[test]
fn a_request_that_goes_the_other_way_is_found_in_the_first_tensor_that_has_its_rows() {
    let case = routed(Some(1), None, 1, DType::Bf16);
    let units = judged(&case, &WrongWay { inner: engine(1), threshold: 0 }, &as_is);
    assert_eq!(faults(&units).first().map(String::as_str), Some("fused/k"), "{:?}", faults(&units));
    let k = units.iter().find(|u| u.title() == "fused/k").unwrap();
    assert!(k.note.as_deref().unwrap_or("").contains("[107, 3, 25]"), "{:?}", k.note);
    // Nothing came of the absorbed form.
    assert!(faults(&units).iter().any(|t| t.starts_with("absorbed/o_latent")), "{:?}", faults(&units));
}

/// A one-token prompt counted one row too short: its one key is not what was written for it, and nothing else is wrong.
#[test]
fn a_one_token_prompt_that_loses_its_key_is_found() {
    let case = routed(Some(1), None, 1, DType::Bf16);
    let lost = |id: TensorId, t: &mut Tensor| {
        if id == TensorId::shared(Stage::Cache) {
            // What attention reads, not what was written: the one key of request 0 is lost on the way.
            let slot = case.plan.sequences[0].slots[0];
            let zeros = vec![0.0; t.cols];
            t.write(slot, 0, &zeros);
        }
    };
    let units = judged(&case, &engine(1), &lost);
    assert_eq!(
        faults(&units).first().map(String::as_str),
        Some("absorbed/o_latent, decode"),
        "{:?}",
        faults(&units)
    );
    let unit = units.iter().find(|u| u.title().starts_with("absorbed/o_latent")).unwrap();
    let names = case.plan.names(Stage::OLatent, Some(Form::Absorbed));
    let found = unit.found.as_ref().unwrap();
    assert!(found.places.iter().all(|p| p.rows.iter().all(|r| names[*r].request == Some(0))), "{found:?}");
}

/// Chunks of context that the merge leaves out or takes twice: the parts are right, the merge is not.
#[test]
fn a_chunk_that_is_lost_or_merged_twice_is_found_and_named() {
    let case = routed(Some(1), Some(7), 1, DType::Bf16);
    let rows = case.plan.part_rows(Form::Fused);
    assert_eq!((case.plan.parts(Form::Fused), rows), (6, 17));
    for (name, change) in [("missing", None), ("twice", Some(std::f64::consts::LN_2))] {
        let units = judged(&case, &engine(1), &|id, t| {
            if id == TensorId::of(Stage::PartLse, Form::Fused) {
                for r in 2 * rows..3 * rows {
                    for c in 0..t.cols {
                        let lse = change.map_or(f64::NEG_INFINITY, |by| t.get(r, c) + by);
                        t.write(r, c, &[lse]);
                    }
                }
            }
        });
        let first = faults(&units);
        assert_eq!(first.first().map(String::as_str), Some("fused/lse, prefill"), "{name}: {first:?}");
        assert!(first.iter().any(|t| t == "fused/attn_out, prefill"), "{name}: {first:?}");
        for title in ["fused/lse, prefill", "fused/attn_out, prefill"] {
            let unit = units.iter().find(|u| u.title() == title).unwrap();
            let said = format!("{:?}", unit.diagnosis);
            assert!(said.contains(&format!("chunk 2 {name}")), "{title}: {said}");
        }
    }
}

/// Each way of a batch with a one-token prompt, on the CPU engine and on our kernels, on a model's heads.
#[test]
fn one_token_prompts_are_right_on_both_engines() {
    let model = Model::open(&fixture(common::MODELS[0].1)).unwrap();
    for engine in [EngineKind::Cpu, EngineKind::Ptx] {
        for threshold in [1, 5, 17] {
            let units = run(&model, engine, "0+1,0+5,64+17,50+1", (Some(threshold), None, 1));
            clean(&units, &format!("{engine:?} {threshold}"));
        }
    }
}

/// Each chunk of a context of 20 keys, with the page size and beyond.
#[test]
fn kernels_are_clean_whatever_the_chunk() {
    let model = Model::open(&fixture(common::MODELS[0].1)).unwrap();
    for chunk in [1, 3, 7, 16, 20, 25] {
        let route = if chunk == 7 { Some(1) } else { None };
        clean(&run(&model, EngineKind::Ptx, "0+1,40+1,20+6", (route, Some(chunk), 2)), &format!("{chunk}"));
    }
}

/// Judges a small run without probes.
fn run(
    model: &Model,
    engine: EngineKind,
    batch: &str,
    (route, context_chunk, splits): (Option<usize>, Option<usize>, usize),
) -> Vec<Unit> {
    let options = Options {
        engine,
        batch: batch.parse().unwrap(),
        regimes: vec![mla_reference::Regime::Random],
        page_size: 16,
        splits: Some(splits),
        forms: if context_chunk.is_some() && route.is_none() {
            vec![Form::Fused]
        } else {
            Form::ALL.to_vec()
        },
        route,
        context_chunk,
        ..Options::default()
    };
    let stored = model.weights(0).unwrap();
    let layer = Layer { index: 0, spec: model.spec(&options.reading), weights: &stored };
    let case = check::draw(&layer, &options).unwrap();
    let engine = check::engine(&options).unwrap();
    let settings = Settings::default();
    let beside = check::Beside { settings, ..check::Beside::default() };
    check::judge(&layer, &case, &options, engine.as_ref(), beside, &|_| ()).unwrap().units
}

fn command(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mla-check"))
        .args(args)
        .env("RUST_BACKTRACE", "0")
        .env("CUDA_VISIBLE_DEVICES", "")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn refused(args: &[&str], says: &str) {
    let model = fixture(common::MODELS[0].1);
    let out = command(&[&["run", model.to_str().unwrap(), "--engine", "cpu"], args].concat());
    let text = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{args:?}: {text}");
    assert!(text.contains(says) && text.contains("do: "), "{args:?}: {text}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    refused(&["--decode-threshold", "4"], "--form routed");
    refused(&["--context-chunk", "4", "--form", "absorbed"], "the absorbed form");
    let batch = ["--batch", "5000+2", "--attention", "dense"];
    refused(&[&["--form", "fused", "--context-chunk", "4"], &batch[..]].concat(), "1251 parts");
    refused(&[&["--form", "fused", "--context-chunk", "4"], &batch[..]].concat(), "pass 5 or more");
}

/// A saved run is clean under `compare`, with its parts and without.
#[test]
fn a_saved_routed_run_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture(common::MODELS[0].1);
    let at = dir.path().to_str().unwrap();
    let out = command(&[
        "run",
        model.to_str().unwrap(),
        "--engine",
        "cpu",
        "--regime",
        "random",
        "--form",
        "routed",
        "--batch",
        "0+3,40+1,20+2,0+1",
        "--splits",
        "2",
        "--page-size",
        "16",
        "--context-chunk",
        "8",
        "--save",
        at,
        "--format",
        "json",
    ]);
    let json: Value = serde_json::from_slice(&out.stdout).unwrap();
    let counts = &json["layers"][0]["case"]["routed"];
    for (name, value) in
        [("num_mqa_tokens", 2), ("num_mha_tokens", 5), ("num_decodes", 2), ("num_prefills", 2)]
    {
        assert_eq!(counts[name], value, "{name}");
    }
    assert_eq!((&counts["has_context"], &counts["order"]), (&true.into(), &serde_json::json!([1, 3, 0, 2])));
    let compare = |says: &str| {
        let out = command(&["compare", model.to_str().unwrap(), at, "--format", "json"]);
        let json: Value = serde_json::from_slice(&out.stdout)
            .unwrap_or_else(|e| panic!("{says}: {e}: {}", String::from_utf8_lossy(&out.stderr)));
        assert_eq!(out.status.code(), Some(0), "{says}: {}", json["layers"][0]["tensors"]);
        assert_eq!(&json["layers"][0]["case"]["routed"]["order"], &serde_json::json!([1, 3, 0, 2]));
    };
    compare("whole");
    for form in ["fused", "absorbed"] {
        forget(dir.path(), form, "part_o");
        forget(dir.path(), form, "part_lse");
    }
    compare("without parts");
}

/// Takes a tensor out of a saved run and its manifest.
fn forget(dir: &Path, form: &str, tensor: &str) {
    let path = dir.join("layer-0/manifest.json");
    let mut m: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let all = m["tensors"].as_array_mut().unwrap();
    let before = all.len();
    all.retain(|e| e["form"] != form || e["tensor"] != tensor);
    assert_eq!(before, all.len() + 2, "{form}/{tensor}");
    std::fs::write(&path, m.to_string()).unwrap();
}
