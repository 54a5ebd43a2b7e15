/*!
The float64 reference against the formulas of attention, written out as plain loops: what no fixture has.

Contexts, pages, splits of the keys, models without a query rank, half-split pairs, a magnitude of the rope, a
temperature, and the legacy layout of kv_b. Both sides compute in float64; sums of a few hundred terms in
another order differ by less than 1e-13, so that 1e-12 of the tensor's largest magnitude is ample.
*/

mod common;

use common::small::{G, REQUESTS, Random, case, spec, with_layer};
use common::{Keep, reference, sequence};
use mla_check::case::Case;
use mla_check::gguf::write::{MetaValue, Writer};
use mla_check::model::{Convention, Layer, Layout, Model, Reading};
use mla_numeric::DType;
use mla_reference::{
    Contract, Evaluator, Form, Geometry, GgmlType, Pairing, Source, Spec, Stage, Temperature, Weight, Weights,
};
use ndarray::{Array2, s};
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

const BOUND: f64 = 1e-12;

/// A layer in plain loops.
struct Plain<'a> {
    spec: &'a Spec,
    weights: &'a dyn Weights,
}

impl Plain<'_> {
    /// W · x with rows `first ..` of a weight.
    fn product(&self, w: Weight, first: usize, count: usize, x: &[f64]) -> Vec<f64> {
        let m = self.weights.matrix(w).unwrap();
        let mut row = vec![0.0; m.cols()];
        assert_eq!(row.len(), x.len());
        (first..first + count)
            .map(|r| {
                m.decode(r, 0, &mut row);
                row.iter().zip(x).map(|(a, b)| a * b).sum()
            })
            .collect()
    }

    fn norm(&self, w: Weight, x: &[f64], eps: f64) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let gamma = self.weights.norm(w).unwrap();
        x.iter().zip(gamma).map(|(x, g)| x / (mean + eps).sqrt() * g).collect()
    }

    fn rotate(&self, x: &mut [f64], position: u64) {
        let rope = &self.spec.rope;
        let half = x.len() / 2;
        for (j, f) in rope.inv_freq.iter().enumerate() {
            let (first, second) = match rope.pairing {
                Pairing::Adjacent => (2 * j, 2 * j + 1),
                Pairing::Half => (j, j + half),
            };
            let (sin, cos) = (position as f64 * f).sin_cos();
            let (a, b) = (x[first], x[second]);
            x[first] = (a * cos - b * sin) * rope.magnitude;
            x[second] = (a * sin + b * cos) * rope.magnitude;
        }
    }

    /// (q, cache row) of a token.
    fn token(&self, hidden: &[f64], position: u64) -> (Vec<f64>, Vec<f64>) {
        let (s, g) = (self.spec, &self.spec.geometry);
        let x = self.norm(Weight::GAttn, hidden, s.eps_attn);
        let mut q = if g.q_rank == 0 {
            self.product(Weight::WQ, 0, g.queries(), &x)
        } else {
            let low = self.norm(Weight::GQ, &self.product(Weight::WQA, 0, g.q_rank, &x), s.eps_latent);
            self.product(Weight::WQB, 0, g.queries(), &low)
        };
        for head in q.chunks_mut(g.key()) {
            self.rotate(&mut head[g.nope..], position);
            if let Some(t) = s.temperature {
                let factor = 1.0 + t.scale * (1.0 + (position as f64 / t.length).floor()).ln();
                head.iter_mut().for_each(|v| *v *= factor);
            }
        }
        let kv = self.product(Weight::WKvA, 0, g.cache(), &x);
        let mut row = self.norm(Weight::GKv, &kv[..g.latent], s.eps_latent);
        let mut pe = kv[g.latent..].to_vec();
        self.rotate(&mut pe, position);
        row.extend(pe);
        (q, row)
    }

    /// (lse, attn_out, out) of a query over cache rows: every head decompresses its own keys and values.
    fn attend(&self, q: &[f64], rows: &[Vec<f64>]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let g = &self.spec.geometry;
        let uk = self.weights.matrix(Weight::WUk).unwrap();
        let (mut lse, mut all) = (Vec::new(), Vec::new());
        for h in 0..g.heads {
            let q = &q[h * g.key()..(h + 1) * g.key()];
            let lines: Vec<Vec<f64>> = (0..g.latent)
                .map(|l| {
                    let mut line = vec![0.0; g.nope];
                    uk.decode(h * g.latent + l, 0, &mut line);
                    line
                })
                .collect();
            let weights: Vec<f64> = rows
                .iter()
                .map(|c| {
                    let nope: f64 = (0..g.nope)
                        .map(|n| q[n] * (0..g.latent).map(|l| c[l] * lines[l][n]).sum::<f64>())
                        .sum();
                    let rope: f64 = (0..g.rope).map(|p| q[g.nope + p] * c[g.latent + p]).sum();
                    ((nope + rope) * self.spec.scale).exp()
                })
                .collect();
            let sum: f64 = weights.iter().sum();
            lse.push(sum.ln());
            let mut o = vec![0.0; g.value];
            for (w, c) in weights.iter().zip(rows) {
                let v = self.product(Weight::WUv, h * g.value, g.value, &c[..g.latent]);
                o.iter_mut().zip(v).for_each(|(o, v)| *o += w / sum * v);
            }
            all.extend(o);
        }
        let out = self.product(Weight::WO, 0, g.hidden, &all);
        (lse, all, out)
    }

    /// q, lse, attn_out, out of a whole case, in the order of the plan's rows.
    fn run(&self, case: &Case) -> [Vec<Vec<f64>>; 4] {
        let plan = &case.plan;
        let tokens: Vec<_> = (0..plan.tokens())
            .map(|t| self.token(&case.given.hidden.row(t).to_vec(), plan.positions[t]))
            .collect();
        let [mut lse, mut o, mut out] = [Vec::new(), Vec::new(), Vec::new()];
        for (i, seq) in plan.sequences.iter().enumerate() {
            let mut rows: Vec<Vec<f64>> =
                (0..seq.context).map(|p| case.given.context[i].row(p).to_vec()).collect();
            for t in seq.tokens.clone() {
                rows.push(tokens[t].1.clone());
                let (l, a, x) = self.attend(&tokens[t].0, &rows);
                lse.push(l);
                o.push(a);
                out.push(x);
            }
        }
        [tokens.into_iter().map(|t| t.0).collect(), lse, o, out]
    }
}

fn compare(layer: &Layer, case: &Case, keep: &Keep) {
    let want = Plain { spec: &layer.spec, weights: layer.weights }.run(case);
    for form in Form::ALL {
        for (stage, want) in [Stage::Q, Stage::Lse, Stage::AttnOut, Stage::Out].into_iter().zip(&want) {
            let got = keep.get(stage, form);
            let largest = want.iter().flatten().fold(0.0f64, |m, v| m.max(v.abs()));
            assert_eq!((got.rows, got.cols), (want.len(), want[0].len()), "{stage}");
            for (r, line) in want.iter().enumerate() {
                for (c, v) in line.iter().enumerate() {
                    let d = (got.get(r, c) - v).abs();
                    assert!(d <= BOUND * largest, "{form:?} {stage} [{r}, {c}]: {d:e} of {largest}");
                }
            }
        }
    }
}

#[test]
fn contexts_splits_pairs_and_temperature_are_plain_attention() {
    let no_rank = Geometry { q_rank: 0, ..G };
    let hot = Some(Temperature { scale: 0.1, length: 8.0 });
    for (g, pairing, temperature, splits) in
        [(G, Pairing::Adjacent, None, 1), (G, Pairing::Adjacent, None, 3), (no_rank, Pairing::Half, hot, 3)]
    {
        let case = case(&REQUESTS, splits, 3, DType::F64);
        with_layer(Spec { temperature, ..spec(g, pairing) }, |layer| {
            compare(layer, &case, &reference(layer, &case, &Form::ALL));
        });
    }
}

struct Kept<'a>(&'a Keep);

impl Source for Kept<'_> {
    fn block(&self, stage: Stage, rows: Range<usize>, cols: Range<usize>) -> Array2<f64> {
        self.0.get(stage, Form::Fused).block(rows, cols)
    }
}

/// What a contract says of norms and rope tables reaches the stages: γ · round(z), and rounded cos and sin.
#[test]
fn declared_casts_are_emulated_where_they_happen() {
    let case = case(&[(0, 3), (5, 2)], 1, 3, DType::F64);
    let d = DType::Bf16;
    let contract = Contract { norm_cast: Some(d), rope_table: d, ..Contract::exact() };
    with_layer(spec(G, Pairing::Adjacent), |layer| {
        let keep = reference(layer, &case, &Form::ALL);
        let value = |stage| {
            let out = Mutex::new(Array2::zeros((case.plan.tokens(), keep.get(stage, Form::Fused).cols)));
            Evaluator {
                spec: &layer.spec,
                plan: &case.plan,
                given: &case.given,
                weights: layer.weights,
                contract: &contract,
                source: &Kept(&keep),
                wanted: None,
                departure: None,
                memory: None,
            }
            .evaluate(stage, None, &|c| out.lock().unwrap().slice_mut(s![c.rows, c.cols]).assign(&c.x));
            out.into_inner().unwrap()
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() <= BOUND * b.abs().max(1.0), "{a} {b}");
        for (stage, input, w, eps) in [
            (Stage::AttnIn, Stage::Hidden, Weight::GAttn, layer.spec.eps_attn),
            (Stage::QANormed, Stage::QA, Weight::GQ, layer.spec.eps_latent),
            (Stage::KvCNormed, Stage::KvA, Weight::GKv, layer.spec.eps_latent),
        ] {
            let got = value(stage);
            for t in 0..got.nrows() {
                let x: Vec<f64> = (0..got.ncols()).map(|j| keep.get(input, Form::Fused).get(t, j)).collect();
                let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
                for (j, v) in x.iter().enumerate() {
                    near(got[[t, j]], d.round(v / (mean + eps).sqrt()) * layer.weights.norm(w).unwrap()[j]);
                }
            }
        }
        for (stage, input, from, to) in
            [(Stage::KPe, Stage::KvA, G.latent, 0), (Stage::Q, Stage::QRaw, G.nope, G.nope)]
        {
            let (got, x) = (value(stage), keep.get(input, Form::Fused));
            for (t, p) in case.plan.positions.iter().enumerate() {
                for (j, f) in layer.spec.rope.inv_freq.iter().enumerate() {
                    let (sin, cos) = (*p as f64 * f).sin_cos();
                    let m = layer.spec.rope.magnitude;
                    let (sin, cos) = (d.round(sin * m), d.round(cos * m));
                    let (a, b) = (x.get(t, from + 2 * j), x.get(t, from + 2 * j + 1));
                    near(got[[t, to + 2 * j]], a * cos - b * sin);
                    near(got[[t, to + 2 * j + 1]], a * sin + b * cos);
                }
            }
        }
    });
}

/// Without a query rank, and small enough to be written out.
const FILE: Geometry = Geometry { hidden: 32, heads: 3, q_rank: 0, latent: 24, rope: 4, nope: 6, value: 5 };

/// A deepseek2 file of one layer in float32 with a temperature, in either layout of the same numbers.
fn write(path: &Path, layout: Layout) {
    let g = FILE;
    let mut w = Writer::new();
    w.meta("general.architecture", "deepseek2");
    for (key, value) in [
        ("block_count", 1),
        ("context_length", 4096),
        ("embedding_length", g.hidden),
        ("attention.head_count", g.heads),
        ("attention.kv_lora_rank", g.latent),
        ("rope.dimension_count", g.rope),
        ("attention.temperature_length", 4),
        // Old files have no _mla keys; in new ones key_length is that of the cache.
        ("attention.key_length", if layout == Layout::Legacy { g.key() } else { g.cache() }),
        ("attention.value_length", if layout == Layout::Legacy { g.value } else { g.latent }),
    ] {
        w.meta(format!("deepseek2.{key}"), value as u32);
    }
    if layout == Layout::Split {
        w.meta("deepseek2.attention.key_length_mla", g.key() as u32);
        w.meta("deepseek2.attention.value_length_mla", g.value as u32);
    }
    for (key, value) in [("attention.layer_norm_rms_epsilon", 1e-6f32), ("attention.temperature_scale", 0.1)]
    {
        w.meta(format!("deepseek2.{key}"), MetaValue::F32(value));
    }
    let mut r = Random(7);
    let mut draw = |n: usize, size: f64| -> Vec<f32> { (0..n).map(|_| (r.next() * size) as f32).collect() };
    // k_b[h][l][n] and v_b[h][v][l]; kv_b[h] has N rows of l, the transpose of k_b[h], then V rows of l.
    let k_b = draw(g.heads * g.latent * g.nope, 1.0);
    let v_b = draw(g.heads * g.value * g.latent, 1.0);
    let mut kv_b = Vec::new();
    for h in 0..g.heads {
        for n in 0..g.nope {
            kv_b.extend((0..g.latent).map(|l| k_b[(h * g.latent + l) * g.nope + n]));
        }
        kv_b.extend(&v_b[h * g.value * g.latent..(h + 1) * g.value * g.latent]);
    }
    let mut tensors = vec![
        ("attn_norm", vec![g.hidden], draw(g.hidden, 2.0)),
        ("attn_q", vec![g.hidden, g.queries()], draw(g.hidden * g.queries(), 0.3)),
        ("attn_kv_a_mqa", vec![g.hidden, g.cache()], draw(g.hidden * g.cache(), 0.3)),
        ("attn_kv_a_norm", vec![g.latent], draw(g.latent, 2.0)),
        ("attn_output", vec![g.values(), g.hidden], draw(g.values() * g.hidden, 1.0)),
    ];
    match layout {
        Layout::Legacy => tensors.push(("attn_kv_b", vec![g.latent, g.heads * (g.nope + g.value)], kv_b)),
        Layout::Split => {
            tensors.push(("attn_k_b", vec![g.nope, g.latent, g.heads], k_b));
            tensors.push(("attn_v_b", vec![g.latent, g.value, g.heads], v_b));
        }
    }
    for (name, dims, _) in &tensors {
        let dims: Vec<u64> = dims.iter().map(|d| *d as u64).collect();
        w.tensor(format!("blk.0.{name}.weight"), &dims, GgmlType::F32);
    }
    let mut data = |i: usize, out: &mut dyn std::io::Write| {
        tensors[i].2.iter().try_for_each(|v| out.write_all(&v.to_le_bytes()))
    };
    w.write(path, &mut data).unwrap();
}

#[test]
fn the_legacy_layout_is_the_same_layer_and_a_plain_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut r = Random(11);
    let hidden: Array2<f64> = r.matrix((9, FILE.hidden), 1.0);
    let case = sequence(hidden, &(0..9).collect::<Vec<u64>>());
    let runs = [Layout::Split, Layout::Legacy].map(|layout| {
        let path = dir.path().join("model.gguf");
        write(&path, layout);
        let model = Model::open(&path).unwrap();
        assert_eq!(model.geometry, FILE);
        let weights = model.weights(0).unwrap();
        assert_eq!(weights.layout, layout);
        let spec = model.spec(&Reading::of(Convention::Hf));
        assert_eq!(spec.temperature, Some(Temperature { scale: 0.1, length: 4.0 }));
        let layer = Layer { index: 0, spec, weights: &weights };
        let keep = reference(&layer, &case, &Form::ALL);
        compare(&layer, &case, &keep);
        keep.tensors
    });
    assert_eq!(runs[0].len(), runs[1].len());
    for (id, tensor) in &runs[0] {
        assert!(tensor.bytes == runs[1][id].bytes, "{id}");
    }
}
