//! What judging costs beside the isolated reference that it is made of: every tensor of a run of the CPU engine, recomputed
//! (`reference`), and recomputed, compared and tested (`judged`). The second should take at most 1.3 times the first.
//!
//! `cargo bench --bench judge`; `MLA_CHECK_BENCH_MODEL=FILE` takes another file than the fixture,
//! `MLA_CHECK_BENCH_BATCH=…` another batch than the default one.

use mla_check::case::{Batch, Case, DEFAULT_BATCH, Draw, automatic_splits};
use mla_check::engine::cpu::CpuEngine;
use mla_check::engine::{Engine, Sink, SinkError};
use mla_check::judge::compare::Isolated;
use mla_check::model::{Convention, Layer, Model, Reading};
use mla_check::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::rows::Rounded;
use mla_reference::{Contract, Evaluator, Form, Regime, Scope, Source, Spec, Stage, Weight, Weights};
use ndarray::Array2;
use std::collections::HashMap;
use std::ops::Range;

fn main() {
    divan::main();
}

#[derive(Default)]
struct Kept(Vec<(TensorId, Tensor)>);

impl Sink for Kept {
    fn weight(&mut self, _: Weight, _: &dyn Rows) -> Result<(), SinkError> {
        Ok(())
    }
    fn norm(&mut self, _: Weight, _: &[f64]) -> Result<(), SinkError> {
        Ok(())
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        self.0.push((id, tensor.clone()));
        Ok(false)
    }
    fn evidence(&mut self, _: TensorId, _: &str) -> Result<(), SinkError> {
        Ok(())
    }
}

struct View<'a> {
    all: HashMap<TensorId, &'a Tensor>,
    form: Option<Form>,
}

impl Source for View<'_> {
    fn block(&self, stage: Stage, rows: Range<usize>, cols: Range<usize>) -> Array2<f64> {
        let form = self.form.filter(|_| stage.row().scope != Scope::Shared);
        self.all[&TensorId { stage, form }].block(rows, cols)
    }
}

/// The weights on the engine's grid, as the judge holds them.
struct Grid<'a> {
    matrices: Vec<(Weight, Rounded<&'a dyn Rows>)>,
    inner: &'a dyn Weights,
}

impl Weights for Grid<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        self.matrices.iter().find(|(w, _)| *w == weight).map(|(_, m)| m as &dyn Rows)
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.inner.norm(weight)
    }
}

/// Runs the engine once and hands `f` all that a judgement needs.
fn with_run(f: impl FnOnce(&Spec, &Case, &Grid, &Contract, &Kept)) {
    let path = std::env::var("MLA_CHECK_BENCH_MODEL").unwrap_or_else(|_| {
        concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/glm5dims.Q4_K_M.gguf").into()
    });
    let batch = std::env::var("MLA_CHECK_BENCH_BATCH").unwrap_or_else(|_| DEFAULT_BATCH.into());
    let batch: Batch = batch.parse().expect("a batch");
    let model = Model::open(std::path::Path::new(&path)).expect("a model");
    let index = model.mla_layers()[0];
    let weights = model.weights(index).expect("weights");
    let spec = model.spec(&Reading::of(Convention::Hf));
    let splits = automatic_splits(&batch);
    let dtype = DType::Bf16;
    let case = Draw {
        batch,
        regimes: Regime::ALL.to_vec(),
        seed: 0,
        page_size: 64,
        route: Default::default(),
        splits,
        dtype,
        hidden: None,
        spec: &spec,
        weights: &weights,
    }
    .case()
    .expect("a case");
    let engine = CpuEngine::new(dtype, splits);
    let layer = Layer { index, spec: spec.clone(), weights: &weights };
    let mut kept = Kept::default();
    engine.run(&layer, &case, &Form::ALL, &mut kept).expect("a run");
    let matrices = mla_reference::WEIGHTS
        .iter()
        .filter_map(|r| {
            Some((r.weight, Rounded { inner: (&weights as &dyn Weights).matrix(r.weight)?, dtype }))
        })
        .collect();
    f(&spec, &case, &Grid { matrices, inner: &weights }, &engine.contract(), &kept);
}

fn each(kept: &Kept, mut f: impl FnMut(TensorId, &Tensor, &View)) {
    for (id, tensor) in &kept.0 {
        let view = View { all: kept.0.iter().map(|(id, t)| (*id, t)).collect(), form: id.form };
        f(*id, tensor, &view);
    }
}

/// The isolated reference alone.
#[divan::bench(sample_count = 5)]
fn reference(bencher: divan::Bencher) {
    with_run(|spec, case, weights, contract, kept| {
        bencher.bench_local(|| {
            each(kept, |id, _, source| {
                let e = Evaluator {
                    spec,
                    plan: &case.plan,
                    given: &case.given,
                    weights,
                    contract,
                    source,
                    wanted: None,
                    departure: None,
                    memory: None,
                };
                e.evaluate(id.stage, id.form, &|c| drop(divan::black_box(c.x)));
            });
        });
    });
}

/// The same, compared and tested.
#[divan::bench(sample_count = 5)]
fn judged(bencher: divan::Bencher) {
    with_run(|spec, case, weights, contract, kept| {
        bencher.bench_local(|| {
            each(kept, |id, tensor, source| {
                let of = Isolated {
                    spec,
                    case,
                    weights,
                    contract,
                    source,
                    slacks: Default::default(),
                    seed: 0,
                    wanted: None,
                    departure: None,
                    memory: None,
                };
                for e in of.compare(id, tensor, None).values() {
                    divan::black_box(e.tests(&|_| None));
                }
            });
        });
    });
}
