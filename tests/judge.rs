/*!
The judge against engines that do something wrong on purpose: what is missing, twice, misshapen, of another
dtype, not finite, or computed with other numbers than those of the file.

The engine is the CPU engine on a small random layer; a sink between it and the judge tampers. The engine goes on
from what the judge was given, so that whatever stands behind the tampering is clean in itself.
*/

mod common;

use common::fixture;
use common::small::{G, Memory, case, spec, with_layer, with_weights};
use mla_check::case::Case;
use mla_check::check::{Options, layer_with};
use mla_check::engine::cpu::CpuEngine;
use mla_check::engine::{Description, Engine, EngineError, Sink, SinkError};
use mla_check::judge::{Session, Unit, Verdict, Which, expected, overall};
use mla_check::model::{Layer, Model};
use mla_check::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::rows::Part;
use mla_reference::{Contract, Form, Pairing, Phase, Spec, Stage, Weight};
use std::borrow::Cow;

/// Both phases, with and without a context; the second split of one row is empty.
const REQUESTS: [(usize, usize); 4] = [(0, 5), (9, 1), (0, 1), (6, 3)];
const DTYPE: DType = DType::Bf16;

fn engine() -> CpuEngine {
    CpuEngine { tile: 4, ..CpuEngine::new(DTYPE, 2) }
}

fn small_case() -> Case {
    case(&REQUESTS, 2, 1, DTYPE)
}

/// What is handed on of a weight.
#[derive(Clone, Copy, PartialEq)]
enum Hand {
    Whole,
    Nothing,
    /// Without its first row, or first value.
    Short,
}

/// Between engine and judge.
struct Between<'s, 'a, 'f> {
    session: &'s mut Session<'a>,
    hand: &'f dyn Fn(Weight) -> Hand,
    /// What the judge gets of a tensor: nothing, one, or more.
    change: &'f dyn Fn(TensorId, &Tensor) -> Vec<Tensor>,
}

impl Sink for Between<'_, '_, '_> {
    fn weight(&mut self, w: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        match (self.hand)(w) {
            Hand::Whole => self.session.weight(w, rows),
            Hand::Nothing => Ok(()),
            Hand::Short => self.session.weight(w, &Part { inner: rows, rows: 1..rows.rows() }),
        }
    }
    fn norm(&mut self, w: Weight, values: &[f64]) -> Result<(), SinkError> {
        match (self.hand)(w) {
            Hand::Whole => self.session.norm(w, values),
            Hand::Nothing => Ok(()),
            Hand::Short => self.session.norm(w, &values[1..]),
        }
    }
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.session.evidence(id, what)
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        let mut given = (self.change)(id, tensor);
        for t in &mut given {
            self.session.tensor(id, t)?;
        }
        match given.pop() {
            Some(t) if t != *tensor && t.shape == tensor.shape && t.dtype == tensor.dtype => {
                let whole = t.bytes.len() == tensor.bytes.len();
                if whole {
                    *tensor = t;
                }
                Ok(whole)
            }
            _ => Ok(false),
        }
    }
}

fn whole(_: Weight) -> Hand {
    Hand::Whole
}

fn as_is(_: TensorId, t: &Tensor) -> Vec<Tensor> {
    vec![t.clone()]
}

/// Judges an engine that computes with these weights against the usual ones.
fn judged(
    change_weights: impl FnOnce(&mut Memory),
    hand: &dyn Fn(Weight) -> Hand,
    change: &dyn Fn(TensorId, &Tensor) -> Vec<Tensor>,
) -> Result<Vec<Unit>, EngineError> {
    judged_in(&small_case(), change_weights, hand, change)
}

/// The same in another case.
fn judged_in(
    case: &Case,
    change_weights: impl FnOnce(&mut Memory),
    hand: &dyn Fn(Weight) -> Hand,
    change: &dyn Fn(TensorId, &Tensor) -> Vec<Tensor>,
) -> Result<Vec<Unit>, EngineError> {
    let (spec, engine) = (spec(G, Pairing::Adjacent), engine());
    with_weights(spec.clone(), change_weights, |engines| {
        with_layer(spec, |layer| {
            let mut session =
                Session::new(layer, case, &Form::ALL, engine.contract(), None, Box::new(|_| ()));
            engine.run(engines, case, &Form::ALL, &mut Between { session: &mut session, hand, change })?;
            Ok(session.finish().0)
        })
    })
}

/// Judges the usual engine with one tensor changed on its way.
fn tampered(which: TensorId, change: &dyn Fn(&mut Tensor)) -> Vec<Unit> {
    judged(|_| (), &whole, &|id, t| {
        let mut t = t.clone();
        if id == which {
            change(&mut t);
        }
        vec![t]
    })
    .unwrap()
}

fn tensors() -> Vec<TensorId> {
    expected(&spec(G, Pairing::Adjacent), &small_case(), &Form::ALL)
}

fn of(units: &[Unit], which: Which) -> Vec<&Unit> {
    let all: Vec<&Unit> = units.iter().filter(|u| u.which == which).collect();
    assert!(!all.is_empty(), "{which:?}");
    all
}

fn clean(u: &Unit) -> bool {
    matches!(u.verdict, Verdict::Exact | Verdict::Rounding)
}

fn note(u: &Unit) -> &str {
    u.note.as_deref().unwrap_or("")
}

/// Titles of the units at fault.
fn faults(units: &[Unit]) -> Vec<String> {
    units.iter().filter(|u| u.verdict == Verdict::Fault).map(Unit::title).collect()
}

/// A place of the tensor that some request owns.
fn place(id: TensorId) -> usize {
    if id.stage == Stage::Cache { small_case().plan.sequences[0].slots[0] } else { 0 }
}

/// A place of the cache that no request owns.
fn free_slot() -> usize {
    let plan = small_case().plan;
    (0..plan.rows(Stage::Cache, None)).find(|s| plan.sequences.iter().all(|q| !q.slots.contains(s))).unwrap()
}

#[test]
fn an_honest_engine_is_clean_in_every_element() {
    let units = judged(|_| (), &whole, &as_is).unwrap();
    for u in &units {
        assert!(clean(u) && note(u).is_empty(), "{}: {} {}", u.title(), u.verdict, note(u));
    }
    for id in tensors() {
        let elements: u64 = of(&units, Which::Tensor(id)).iter().map(|u| u.elements).sum();
        let wanted: usize = small_case().plan.shape(id.stage, id.form, &G).iter().product();
        assert_eq!(elements, wanted as u64, "{id}");
    }
    for w in Weight::ALL.iter().filter(|w| w.exists(&G)) {
        let elements: u64 = of(&units, Which::Weight(*w)).iter().map(|u| u.elements).sum();
        assert_eq!(elements, w.shape(&G).iter().product::<usize>() as u64, "{w}");
    }
    // Copies are equal, and say so.
    for stage in [Stage::Hidden, Stage::Cache] {
        let copies = of(&units, Which::Tensor(TensorId::shared(stage)));
        assert!(copies.iter().all(|u| u.verdict == Verdict::Exact), "{stage}");
    }
    assert_eq!(overall(&units), Verdict::Rounding);
}

/// A request that stands there three times says what it says once, in directions and in flips: rows that are equal bit for
/// bit err alike.
#[test]
fn rows_that_repeat_another_count_once() {
    let sampled = |requests: &[(usize, usize)]| {
        // Two splits, as the engine has.
        let units = judged_in(&case(requests, 2, 1, DTYPE), |_| (), &whole, &as_is).unwrap();
        let of = |stage| {
            let u = units.iter().find(|u| u.which == Which::Tensor(TensorId::shared(stage))).unwrap();
            u.power.as_ref().unwrap().sampled
        };
        [Stage::AttnIn, Stage::QA, Stage::KvCNormed].map(of)
    };
    let once = sampled(&[(0, 7)]);
    assert_eq!(once, sampled(&[(0, 7), (0, 7), (0, 7)]));
    assert_eq!(once.map(|n| 2 * n), sampled(&[(0, 7), (1, 7)]));
}

#[test]
fn what_is_not_delivered_is_a_fault_and_what_reads_it_is_not_clean() {
    for missing in tensors() {
        let change = |id, t: &Tensor| if id == missing { Vec::new() } else { vec![t.clone()] };
        let units = judged(|_| (), &whole, &change).unwrap();
        for u in of(&units, Which::Tensor(missing)) {
            assert!(u.verdict == Verdict::Fault && note(u).contains("missing"), "{missing}: {}", u.verdict);
        }
        assert_eq!(faults(&units).len(), 1, "{missing}: {:?}", faults(&units));
        for u in &units {
            let Which::Tensor(id) = u.which else { continue };
            let reads =
                [false, true].iter().any(|s| id.stage.inputs(&G, id.form, *s).contains(&missing.stage));
            if reads && (missing.form.is_none() || missing.form == id.form) {
                assert_eq!(u.verdict, Verdict::AfterFault, "{missing}, {}", u.title());
                assert!(note(u).contains("is not there"), "{missing}, {}: {}", u.title(), note(u));
            }
        }
        assert_eq!(overall(&units), Verdict::Fault);
    }
}

#[test]
fn a_weight_that_is_not_shown_is_a_fault_and_its_readers_are_not_clean() {
    for &w in Weight::ALL.iter().filter(|w| w.exists(&G)) {
        let units = judged(|_| (), &|x| if x == w { Hand::Nothing } else { Hand::Whole }, &as_is).unwrap();
        let weight = of(&units, Which::Weight(w))[0];
        assert!(weight.verdict == Verdict::Fault && note(weight).contains("missing"), "{w}");
        readers_are_after(&units, w, "not compared");
        assert_eq!(overall(&units), Verdict::Fault);
    }
}

/// The units that read a weight are after-fault, and nothing but the weight is a fault.
fn readers_are_after(units: &[Unit], w: Weight, says: &str) {
    assert_eq!(faults(units), [w.name()]);
    let mut readers = 0;
    for u in units {
        if let Which::Tensor(id) = u.which
            && id.stage.weights(&G, id.form).contains(&w)
        {
            assert_eq!(u.verdict, Verdict::AfterFault, "{w}, {}", u.title());
            assert!(note(u).contains(says), "{w}, {}: {}", u.title(), note(u));
            readers += 1;
        }
    }
    assert!(readers > 0, "{w}");
}

#[test]
fn nothing_delivered_is_a_fault_and_not_no_verdict() {
    let case = small_case();
    with_layer(spec(G, Pairing::Adjacent), |layer| {
        let session = Session::new(layer, &case, &Form::ALL, engine().contract(), None, Box::new(|_| ()));
        let units = session.finish().0;
        assert!(units.iter().all(|u| u.verdict == Verdict::Fault));
        assert_eq!(overall(&units), Verdict::Fault);
    });
}

#[test]
fn a_clean_run_with_something_not_compared_is_no_verdict() {
    let mut units = judged(|_| (), &whole, &as_is).unwrap();
    let which = Which::Tensor(TensorId::shared(Stage::Q));
    units.push(Unit::without_data(which, None, Verdict::NotCompared, "nobody looked"));
    assert_eq!(overall(&units), Verdict::NotCompared);
    assert_eq!(overall(&[]), Verdict::NotCompared);
}

#[test]
fn twice_or_unasked_is_an_engine_that_broke() {
    for twice in tensors() {
        let change = |id, t: &Tensor| vec![t.clone(); if id == twice { 2 } else { 1 }];
        let e = judged(|_| (), &whole, &change).unwrap_err().to_string();
        assert!(e.contains(&twice.to_string()) && e.contains("twice"), "{e}");
    }
    let case = small_case();
    with_layer(spec(G, Pairing::Adjacent), |layer| {
        let mut session =
            Session::new(layer, &case, &[Form::Absorbed], engine().contract(), None, Box::new(|_| ()));
        let e = engine().run(layer, &case, &Form::ALL, &mut session).unwrap_err().to_string();
        assert!(e.contains("fused/k"), "{e}");
    });
}

#[test]
fn another_shape_length_or_dtype_is_a_fault() {
    let longer = |t: &mut Tensor| {
        let row = t.cols * t.dtype.bytes();
        t.bytes.extend(vec![0; row]);
        t.rows += 1;
        t.shape[0] += 1;
    };
    let turned = |t: &mut Tensor| {
        t.shape.rotate_left(1);
        t.axes.rotate_left(1);
    };
    let cut = |t: &mut Tensor| t.bytes.truncate(t.bytes.len() - 1);
    let wide = |t: &mut Tensor| {
        let values: Vec<f64> =
            (0..t.rows).flat_map(|r| (0..t.cols).map(move |c| (r, c))).map(|(r, c)| t.get(r, c)).collect();
        t.dtype = if t.dtype == DType::F32 { DType::F64 } else { DType::F32 };
        t.bytes = t.dtype.encode(&values);
    };
    type Change<'a> = &'a dyn Fn(&mut Tensor);
    let changes: [(Change, &str); 4] =
        [(&longer, "shape"), (&turned, "shape"), (&cut, "bytes"), (&wide, "stored as")];
    for id in tensors() {
        for (change, says) in changes {
            let units = tampered(id, change);
            let own = of(&units, Which::Tensor(id));
            assert!(own.len() == 1 && own[0].verdict == Verdict::Fault, "{id} {says}");
            assert!(note(own[0]).contains(says), "{id}: {}", note(own[0]));
            assert_eq!(faults(&units), [own[0].title()], "{says}");
        }
    }
}

#[test]
fn one_element_that_is_not_finite_is_a_fault_at_its_place() {
    for id in tensors() {
        let row = place(id);
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let units = tampered(id, &|t| t.set(row, t.cols - 1, value));
            let own: Vec<&Unit> =
                of(&units, Which::Tensor(id)).into_iter().filter(|u| u.verdict == Verdict::Fault).collect();
            assert_eq!(own.len(), 1, "{id} {value}");
            assert_eq!((own[0].beyond, own[0].not_finite), (1, 1), "{id} {value}");
            let worst = own[0].worst.as_ref().unwrap();
            let flat = worst.index.iter().zip(&own[0].shape).fold(0, |n, ((_, i), len)| n * len + i);
            let cols = own[0].shape.iter().product::<usize>() / small_case().plan.rows(id.stage, id.form);
            assert_eq!((flat / cols, flat % cols), (row, cols - 1), "{id} {:?}", worst.index);
        }
    }
}

/// Slots that nobody owns and splits that see no key have no value: writing one is a fault.
#[test]
fn a_value_where_there_is_none_is_a_fault() {
    let cache = TensorId::shared(Stage::Cache);
    let units = tampered(cache, &|t| t.set(free_slot(), 3, 0.5));
    assert_eq!(faults(&units).len(), 1);
    assert!(of(&units, Which::Tensor(cache)).iter().any(|u| u.not_finite == 1));
    for form in Form::ALL {
        let id = TensorId::of(Stage::PartLse, form);
        let units = tampered(id, &|t| {
            let row = (0..t.rows).find(|r| t.get(*r, 0) == f64::NEG_INFINITY).unwrap();
            t.set(row, 0, -3.0);
        });
        assert_eq!(faults(&units), [format!("{}/part_lse, decode", form.name())]);
        // Whatever stands in such a split's part_o, no merge reads it.
        let units = tampered(TensorId::of(Stage::PartO, form), &|t| t.set(t.rows - 1, 0, f64::NAN));
        assert_eq!(faults(&units), [format!("{}/part_o, decode", form.name())]);
    }
}

/// One bit of a copy is enough.
#[test]
fn copies_have_no_tolerance() {
    let k = TensorId::of(Stage::K, Form::Fused);
    for (id, col) in [
        (TensorId::shared(Stage::Hidden), 7),
        (TensorId::shared(Stage::Cache), 7),
        (TensorId::shared(Stage::Cache), G.latent + 1),
        (TensorId::shared(Stage::Q), G.nope - 1),
        (k, G.key() + G.nope),
    ] {
        let units = tampered(id, &|t| {
            let bits = t.bits(place(id), col);
            t.set_bits(place(id), col, bits ^ 1);
        });
        let own: u64 = of(&units, Which::Tensor(id)).iter().map(|u| u.beyond).sum();
        assert_eq!((faults(&units).len(), own), (1, 1), "{id} {col}: {:?}", faults(&units));
    }
}

/// The next value of the grid in one element of a weight is a fault of the weight; what reads it is isolated with
/// the engine's own weight, so a large difference makes no second fault either.
#[test]
fn weights_are_judged_bit_for_bit_and_make_one_fault() {
    for &w in Weight::ALL.iter().filter(|w| w.exists(&G)) {
        let dtype = if w.is_norm() { DType::F32 } else { DTYPE };
        let ulp = |v: f64| dtype.round(v) + dtype.spacing(dtype.round(v));
        let far = |v: f64| v + 8.0;
        let changes: [&dyn Fn(f64) -> f64; 2] = [&ulp, &far];
        for change in changes {
            let edit = |m: &mut Memory| {
                let values = &mut m.0.get_mut(&w).unwrap().0;
                values[1] = change(values[1]);
            };
            let units = judged(edit, &whole, &as_is).unwrap();
            assert_eq!(of(&units, Which::Weight(w))[0].beyond, 1, "{w}");
            readers_are_after(&units, w, &format!("computed from {w}"));
        }
    }
}

#[test]
fn another_weight_altogether_is_one_fault_too() {
    for w in [Weight::WQA, Weight::WKvA, Weight::WO] {
        let edit = |m: &mut Memory| m.0.get_mut(&w).unwrap().0.iter_mut().for_each(|v| *v = -*v);
        readers_are_after(&judged(edit, &whole, &as_is).unwrap(), w, "another weight altogether");
    }
    for &w in Weight::ALL.iter().filter(|w| w.exists(&G)) {
        let units = judged(|_| (), &|x| if x == w { Hand::Short } else { Hand::Whole }, &as_is).unwrap();
        assert!(note(of(&units, Which::Weight(w))[0]).contains("the file's"), "{w}");
        readers_are_after(&units, w, "another weight altogether");
    }
}

/// A fault in one form and one phase says nothing about the others, and goes on to the last stage.
#[test]
fn after_fault_follows_the_data() {
    let k = TensorId::of(Stage::K, Form::Fused);
    // The first rows belong to the prefill of the first request.
    let units = tampered(k, &|t| t.set(0, 0, t.get(0, 0) + 4.0));
    assert_eq!(faults(&units), ["fused/k, prefill"]);
    let after: Vec<String> =
        units.iter().filter(|u| u.verdict == Verdict::AfterFault).map(Unit::title).collect();
    assert_eq!(after, ["fused/lse, prefill", "fused/attn_out, prefill", "fused/out, prefill"]);
    // A shared tensor of a decode row reaches both forms, in that phase only.
    let decode = small_case().plan.sequences[1].tokens.start;
    let units = tampered(TensorId::shared(Stage::Q), &|t| t.set(decode, 0, t.get(decode, 0) + 4.0));
    assert_eq!(faults(&units), ["q, decode"]);
    for u in units.iter().filter(|u| u.verdict == Verdict::AfterFault) {
        assert_eq!(u.phase, Some(Phase::Decode), "{}", u.title());
    }
    for form in Form::ALL {
        let out = of(&units, Which::Tensor(TensorId::of(Stage::Out, form)));
        assert!(out.iter().any(|u| u.verdict == Verdict::AfterFault), "{form:?}");
    }
}

/// What is odd in the file's own weights is said, and is nobody's fault.
#[test]
fn odd_weights_are_noted() {
    let case = small_case();
    let edit = |m: &mut Memory| {
        let (rows, cols) = m.0.get_mut(&Weight::WO).unwrap();
        rows[..*cols].fill(0.0);
        rows[2 * *cols] = f64::NAN;
        // The second of three heads.
        let (uv, _) = m.0.get_mut(&Weight::WUv).unwrap();
        let head = uv.len() / 3;
        uv[head..2 * head].iter_mut().for_each(|v| *v *= 100.0);
    };
    with_weights(spec(G, Pairing::Adjacent), edit, |layer| {
        let mut session = Session::new(layer, &case, &Form::ALL, engine().contract(), None, Box::new(|_| ()));
        engine().run(layer, &case, &Form::ALL, &mut session).unwrap();
        let (units, odd) = session.finish();
        assert!(faults(&units).is_empty(), "{:?}", faults(&units));
        assert_eq!(odd.len(), 3, "{odd:?}");
        assert!(
            odd.iter().any(|o| o.starts_with("w_o: 1 of ") && o.ends_with("values are NaN or infinite")),
            "{odd:?}"
        );
        assert!(odd.iter().any(|o| o.starts_with("w_o: ") && o.ends_with("are zero throughout")), "{odd:?}");
        assert!(odd.iter().any(|o| o.contains("w_uv: head 1 ")), "{odd:?}");
    });
}

/// An engine that was told another number: no tensor is looked at.
struct Misread;

impl Engine for Misread {
    fn describe(&self) -> Description {
        engine().describe()
    }
    fn spec<'a>(&self, layer: &'a Layer) -> Cow<'a, Spec> {
        let mut other = layer.spec.clone();
        other.eps_latent = 1e-5;
        Cow::Owned(other)
    }
    fn contract(&self) -> Contract {
        engine().contract()
    }
    fn run(&self, _: &Layer, _: &Case, _: &[Form], _: &mut dyn Sink) -> Result<(), EngineError> {
        Err(EngineError::Broke("nobody should run it".into()))
    }
}

#[test]
fn another_scalar_is_a_fault_before_any_tensor() {
    let model = Model::open(&fixture("models/glm5dims.Q4_K_M.gguf")).unwrap();
    let options = Options { batch: "0+2".parse().unwrap(), splits: Some(2), ..Options::default() };
    let report = layer_with(&model, 0, &options, &Misread, &|_| ()).unwrap();
    assert_eq!(report.verdict, Verdict::Fault);
    let found: Vec<_> = report.scalars.iter().map(|s| (s.name.as_str(), s.engine, s.reference)).collect();
    assert_eq!(found, [("eps_latent", 1e-5, 1e-6)]);
    assert!(report.tensors.is_empty());
}

/// docs/verdicts.md prints the table of verdicts as the program has it.
#[test]
fn the_documented_table_is_the_programs() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/verdicts.md")).unwrap();
    for row in mla_check::judge::TABLE {
        let line = format!("| {} | {} | {} | {} |", row.name, row.exit, row.bisect, row.junit.name());
        assert!(page.contains(&line), "docs/verdicts.md lacks: {line}");
    }
}
