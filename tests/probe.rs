/*!
Probes hold for correct engines and break for the ones they are made for.

The engine is the CPU engine on a small random layer whose widths are multiples of nothing, or that engine inside a
wrapper that does one thing wrong; and planted faults, which act on probes as on the run.
*/

mod common;

use common::small::{G, spec, with_layer};
use mla_check::case::Case;
use mla_check::engine::cpu::CpuEngine;
use mla_check::engine::{Description, Engine, EngineError, Sink, SinkError};
use mla_check::fault::Fault;
use mla_check::model::Layer;
use mla_check::probe::{Outcome, Probe, Subject, all};
use mla_check::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::{Dense, Rows};
use mla_reference::rows::dense;
use mla_reference::{Accumulate, Contract, Form, Geometry, Pairing, Spec, Stage, Weight, Weights};

const PAGE: usize = 4;

fn probes(engine: &dyn Engine, g: Geometry, fault: Option<&str>) -> Vec<Probe> {
    let fault = fault.map(|f| Fault::parse(f, 0).unwrap());
    with_layer(spec(g, Pairing::Adjacent), |layer| {
        let splits = engine.contract().split_ranges(1).len();
        let (forms, fault) = (&Form::ALL, fault.as_ref());
        all(&Subject { engine, layer, forms, fault, seed: 0, page_size: PAGE, splits }, &|_| ()).unwrap()
    })
}

fn cpu(dtype: DType) -> CpuEngine {
    CpuEngine { tile: 4, ..CpuEngine::new(dtype, 2) }
}

/// (form, probe) of what is broken.
fn broken(probes: &[Probe]) -> Vec<(Form, &'static str)> {
    probes.iter().filter(|p| p.broken()).map(|p| (p.form, p.name)).collect()
}

fn outcome(probes: &[Probe], form: Form, name: &str) -> Outcome {
    probes.iter().find(|p| p.form == form && p.name == name).unwrap().outcome.clone()
}

fn what(probes: &[Probe], form: Form, name: &str) -> String {
    match outcome(probes, form, name) {
        Outcome::Broken { what, place, broken, elements } => {
            assert!(broken > 0 && broken <= elements && place.contains('/') | place.contains(','), "{place}");
            what
        }
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn all_hold_for_correct_engines() {
    let straight = Geometry { q_rank: 0, ..G };
    let mma = CpuEngine { accumulate: Accumulate::Mma { k: 16, bits: 25 }, ..cpu(DType::Bf16) };
    let whole = CpuEngine::new(DType::F16, 1);
    for (engine, g) in [
        (cpu(DType::Bf16), G),
        (cpu(DType::F16), G),
        (cpu(DType::F32), G),
        (cpu(DType::Bf16), straight),
        (mma, G),
        (whole, G),
        (CpuEngine { cast_p: false, ..cpu(DType::Bf16) }, G),
    ] {
        let probes = probes(&engine, g, None);
        assert_eq!(probes.len(), 8);
        for p in &probes {
            match &p.outcome {
                Outcome::Held { elements, .. } => assert!(*elements > 100, "{p:?}"),
                other => panic!("{engine:?}: {} {:?}", p.name, other),
            }
        }
    }
}

type Done = Result<(), EngineError>;
/// Runs the engine on a layer of its own making.
type Relayer<'f> = &'f dyn Fn(&Layer, &mut dyn FnMut(&Layer) -> Done) -> Done;

/// An engine around the CPU engine that reads another layer, or something else of what it handed over.
struct Wrapped<'f> {
    layer: Relayer<'f>,
    reads: &'f dyn Fn(&Case, TensorId, &mut Tensor),
}

struct Reads<'a, 'f> {
    inner: &'a mut dyn Sink,
    case: &'a Case,
    reads: &'f dyn Fn(&Case, TensorId, &mut Tensor),
}

impl Sink for Reads<'_, '_> {
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
        self.inner.tensor(id, tensor)?;
        (self.reads)(self.case, id, tensor);
        Ok(true)
    }
}

impl Engine for Wrapped<'_> {
    fn describe(&self) -> Description {
        cpu(DType::Bf16).describe()
    }
    fn contract(&self) -> Contract {
        cpu(DType::Bf16).contract()
    }
    fn run(&self, l: &Layer, case: &Case, forms: &[Form], sink: &mut dyn Sink) -> Result<(), EngineError> {
        (self.layer)(l, &mut |l| {
            let mut sink = Reads { inner: sink, case, reads: self.reads };
            cpu(DType::Bf16).run(l, case, forms, &mut sink)
        })
    }
}

fn right(_: &Case, _: TensorId, _: &mut Tensor) {}

/// The scale is compiled in: right for this layer, but not the layer's.
#[test]
fn a_scale_that_is_not_the_layers_breaks_powers_of_two() {
    let fixed = spec(G, Pairing::Adjacent).scale;
    let engine = Wrapped {
        layer: &move |l, go| {
            let spec = Spec { scale: fixed, ..l.spec.clone() };
            go(&Layer { index: l.index, spec, weights: l.weights })
        },
        reads: &right,
    };
    let probes = probes(&engine, G, None);
    assert_eq!(broken(&probes), Form::ALL.map(|f| (f, "powers-of-two")));
    // What the other change of the same run does is told apart.
    assert!(matches!(outcome(&probes, Form::Fused, "relabelled-pages"), Outcome::Held { .. }));
}

/// A matrix of a test's own.
struct Own<'a>(&'a [f64], usize);

impl Rows for Own<'_> {
    fn rows(&self) -> usize {
        self.0.len() / self.1
    }
    fn cols(&self) -> usize {
        self.1
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        Dense { data: self.0, cols: self.1 }.decode(row, k0, out);
    }
}

#[test]
fn a_transposed_weight_breaks_one_hot() {
    for which in [Weight::WUk, Weight::WUv] {
        let engine = Wrapped {
            layer: &move |l, go| {
                let m = l.weights.matrix(which).unwrap();
                let (rows, cols) = (m.rows() / G.heads, m.cols());
                // The bytes of [rows, cols] taken as [cols, rows] and transposed.
                let data: Vec<f64> = (0..G.heads)
                    .flat_map(|h| {
                        let flat = dense(m, h * rows..(h + 1) * rows, false).into_raw_vec_and_offset().0;
                        (0..rows * cols).map(move |i| flat[i % cols * rows + i / cols]).collect::<Vec<_>>()
                    })
                    .collect();
                let own = Own(&data, cols);
                let turned = With { inner: l.weights, which, own: &own };
                go(&Layer { index: l.index, spec: l.spec.clone(), weights: &turned })
            },
            reads: &right,
        };
        let probes = probes(&engine, G, None);
        let names = broken(&probes);
        for form in Form::ALL {
            assert!(names.contains(&(form, "one-hot")), "{which}: {names:?}");
            // A wrong w_uk changes scores only, and one key's softmax is 1 whatever its score is.
            assert_eq!(names.contains(&(form, "one-key")), which == Weight::WUv, "{which}: {names:?}");
            assert!(
                !names.contains(&(form, "relabelled-pages")) && !names.contains(&(form, "powers-of-two"))
            );
        }
        if which == Weight::WUv {
            assert!(what(&probes, Form::Fused, "one-key").starts_with("values side"));
        }
    }
}

struct With<'a> {
    inner: &'a dyn Weights,
    which: Weight,
    own: &'a Own<'a>,
}

impl Weights for With<'_> {
    fn matrix(&self, w: Weight) -> Option<&dyn Rows> {
        if w == self.which { Some(self.own) } else { self.inner.matrix(w) }
    }
    fn norm(&self, w: Weight) -> Option<&[f64]> {
        self.inner.norm(w)
    }
}

/// Behind the first page the engine takes the next page of the pool instead of the table's.
#[test]
fn a_page_table_that_is_not_followed_breaks_relabelled_pages() {
    let engine = Wrapped {
        layer: &|l, go| go(l),
        reads: &|case, id, t| {
            if id.stage != Stage::Cache {
                return;
            }
            let written = t.clone();
            for s in &case.plan.sequences {
                let first = s.slots[0] / PAGE;
                for (p, slot) in s.slots.iter().enumerate().skip(PAGE) {
                    let page = (first + p / PAGE) % case.plan.pages;
                    let from = page * PAGE + p % PAGE;
                    // Memory that nobody wrote holds zeros here.
                    let bits = |c| if written.get(from, c).is_nan() { 0 } else { written.bits(from, c) };
                    (0..t.cols).for_each(|c| t.set_bits(*slot, c, bits(c)));
                }
            }
        },
    };
    let probes = probes(&engine, G, None);
    let names = broken(&probes);
    for form in Form::ALL {
        assert!(names.contains(&(form, "relabelled-pages")), "{names:?}");
        assert!(!names.contains(&(form, "powers-of-two")), "{names:?}");
    }
}

/// Faults that are planted in a run act on its probes, which say on which side of the softmax they lie.
#[test]
fn planted_faults_act_on_probes() {
    let of = |fault: &str| {
        let seams = Fault::parse(fault, 0).unwrap().seams();
        probes(&CpuEngine { seams, ..cpu(DType::Bf16) }, G, Some(fault))
    };
    let p = of("softmax-scale=1.01");
    assert_eq!(broken(&p), Form::ALL.map(|f| (f, "one-key")));
    for form in Form::ALL {
        assert!(what(&p, form, "one-key").starts_with("scores side"));
    }
    let p = of("w_uv-element");
    for form in Form::ALL {
        assert!(what(&p, form, "one-key").starts_with("values side"));
    }
    let p = of("drop-token=0");
    for form in Form::ALL {
        assert!(what(&p, form, "one-key").starts_with("scores side"), "{form:?}");
    }
    // Heads exchanged behind the softmax: in the absorbed form the product with w_uv comes after it.
    let p = of("swap-heads=0,1");
    assert!(what(&p, Form::Fused, "one-key").starts_with("scores side"));
    assert!(what(&p, Form::Absorbed, "one-key").starts_with("values side"));
    for form in Form::ALL {
        what(&p, form, "one-hot");
    }
    // Queries may be what they like: nothing here depends on them.
    assert_eq!(broken(&of("rope-offset=1")), []);
    assert_eq!(broken(&of("w_q_b-element")), []);
}
