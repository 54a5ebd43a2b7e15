//! The engine `cpu` on a small layer with random weights: bits that must and must not change, and float32
//! stages against plain float64 loops over the engine's own inputs.

mod common;

use common::Keep;
use common::small::{G, REQUESTS, case, spec, with_layer};
use mla_check::case::Case;
use mla_check::engine::cpu::{CpuEngine, Gain, Seams};
use mla_check::engine::{Engine, EngineError, Sink, SinkError};
use mla_check::judge::expected;
use mla_check::model::Layer;
use mla_check::trace::{Tensor, TensorId};
use mla_numeric::{DType, U};
use mla_reference::product::Rows;
use mla_reference::{Accumulate, Form, Geometry, Pairing, Spec, Stage, Temperature, WEIGHTS, Weight};
use ndarray::Array2;

const TILE: usize = 16;

fn engine(dtype: DType, splits: usize) -> CpuEngine {
    CpuEngine { tile: TILE, ..CpuEngine::new(dtype, splits) }
}

fn run(engine: &CpuEngine, case: &Case) -> Keep {
    with_layer(spec(G, Pairing::Adjacent), |layer| {
        let mut keep = Keep::default();
        engine.run(layer, case, &Form::ALL, &mut keep).unwrap();
        keep
    })
}

/// Runs the usual requests.
fn usual(engine: CpuEngine) -> Keep {
    run(&engine, &case(&REQUESTS, engine.splits, 1, engine.dtype))
}

/// Bytes of the attention rows of a request.
fn rows_of(tensor: &Tensor, case: &Case, request: (usize, usize)) -> Vec<u8> {
    let found = case.plan.attention_rows(None).find(|(_, s, _)| (s.context, s.tokens.len()) == request);
    let n = tensor.cols * tensor.dtype.bytes();
    let rows = found.unwrap().2;
    tensor.bytes[rows.start * n..rows.end * n].to_vec()
}

#[test]
fn tensors_come_in_the_order_of_the_table_and_weights_first() {
    struct Order(Vec<String>);
    impl Sink for Order {
        fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
            assert_eq!((rows.rows(), rows.cols()), weight.matrix(&G));
            let mut v = vec![0.0; rows.cols()];
            rows.decode(rows.rows() - 1, 0, &mut v);
            assert!(v.iter().all(|v| DType::Bf16.round(*v) == *v && *v != 0.0));
            self.0.push(weight.to_string());
            Ok(())
        }
        fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
            assert_eq!(values.len(), weight.matrix(&G).1);
            self.0.push(weight.to_string());
            Ok(())
        }
        fn evidence(&mut self, _: TensorId, _: &str) -> Result<(), SinkError> {
            Ok(())
        }
        fn tensor(&mut self, id: TensorId, _: &mut Tensor) -> Result<bool, SinkError> {
            self.0.push(id.to_string());
            Ok(false)
        }
    }
    let e = engine(DType::Bf16, 2);
    let case = case(&REQUESTS, 2, 1, e.dtype);
    with_layer(spec(G, Pairing::Half), |layer| {
        let mut order = Order(Vec::new());
        e.run(layer, &case, &Form::ALL, &mut order).unwrap();
        let weights = WEIGHTS.iter().filter(|r| r.weight.exists(&G)).map(|r| r.weight.to_string());
        let tensors = expected(&layer.spec, &case, &Form::ALL);
        assert_eq!(order.0, weights.chain(tensors.iter().map(TensorId::to_string)).collect::<Vec<_>>());
    });
}

#[test]
fn what_comes_back_from_the_sink_is_what_the_engine_goes_on_from() {
    struct Wipe(Keep);
    impl Sink for Wipe {
        fn weight(&mut self, _: Weight, _: &dyn Rows) -> Result<(), SinkError> {
            Ok(())
        }
        fn norm(&mut self, _: Weight, _: &[f64]) -> Result<(), SinkError> {
            Ok(())
        }
        fn evidence(&mut self, _: TensorId, _: &str) -> Result<(), SinkError> {
            Ok(())
        }
        fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
            if [Stage::QA, Stage::V, Stage::PartO, Stage::OLatent].contains(&id.stage) {
                tensor.bytes.fill(0);
            }
            self.0.tensor(id, tensor)
        }
    }
    with_layer(spec(G, Pairing::Adjacent), |layer| {
        let mut sink = Wipe(Keep::default());
        engine(DType::Bf16, 2)
            .run(layer, &case(&REQUESTS, 2, 1, DType::Bf16), &Form::ALL, &mut sink)
            .unwrap();
        let zero = |t: &Tensor| t.bytes.iter().all(|b| *b & 0x7f == 0);
        for form in Form::ALL {
            for stage in [Stage::Q, Stage::AttnOut, Stage::Out] {
                assert!(zero(sink.0.get(stage, form)), "{form:?} {stage}");
            }
        }
        assert!(!zero(sink.0.get(Stage::KvA, Form::Fused)));
    });
}

#[test]
fn output_bits_depend_on_splits_tiles_and_the_cast_and_lse_not_on_the_cast() {
    // Many decode rows: few elements of one row lie near a midpoint of bf16.
    let requests: Vec<(usize, usize)> = (40..60).map(|c| (c, 1)).chain([(33, 5)]).collect();
    let usual = |e: CpuEngine| run(&e, &case(&requests, e.splits, 1, e.dtype));
    for dtype in [DType::Bf16, DType::F16] {
        let base = engine(dtype, 1);
        let usual_bits = usual(base);
        for form in Form::ALL {
            let differs = |other: &Keep, stage| usual_bits.get(stage, form) != other.get(stage, form);
            let tiled = usual(CpuEngine { tile: 2 * TILE, ..base });
            assert!(differs(&tiled, Stage::AttnOut) && differs(&tiled, Stage::Lse), "{form:?} {dtype}");
            let uncast = usual(CpuEngine { cast_p: false, ..base });
            assert!(differs(&uncast, Stage::AttnOut) && !differs(&uncast, Stage::Lse), "{form:?} {dtype}");
            let split = usual(CpuEngine { splits: 2, ..base });
            assert!(differs(&split, Stage::AttnOut) && differs(&split, Stage::Lse), "{form:?} {dtype}");
            // Prefill rows are not split.
            let c = case(&requests, 1, 1, dtype);
            let rows = |k: &Keep, r| rows_of(k.get(Stage::AttnOut, form), &c, r);
            assert_eq!(rows(&split, (33, 5)), rows(&usual_bits, (33, 5)));
            let cut = usual(CpuEngine { accumulate: Accumulate::Mma { k: 16, bits: 25 }, ..base });
            assert!(differs(&cut, Stage::Lse));
        }
    }
}

#[test]
fn pages_neighbours_and_threads_leave_bits_alone() {
    for (dtype, splits) in [(DType::Bf16, 3), (DType::F32, 1)] {
        let e = engine(dtype, splits);
        let base_case = case(&REQUESTS, splits, 1, dtype);
        let base = run(&e, &base_case);
        let mut turned = REQUESTS;
        turned.rotate_left(2);
        turned.swap(0, 1);
        let few = [REQUESTS[1], REQUESTS[3]];
        for (requests, pages) in [(&REQUESTS[..], 99), (&turned[..], 5), (&few[..], 7)] {
            let c = case(requests, splits, pages, dtype);
            let other = run(&e, &c);
            for form in Form::ALL {
                for stage in [Stage::Lse, Stage::AttnOut, Stage::Out] {
                    for r in requests {
                        let (a, b) = (base.get(stage, form), other.get(stage, form));
                        assert_eq!(rows_of(a, &base_case, *r), rows_of(b, &c, *r), "{form:?} {stage} {r:?}");
                    }
                }
            }
        }
        for threads in [1, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let other = pool.install(|| run(&e, &base_case));
            for (id, t) in &base.tensors {
                assert_eq!(t, &other.tensors[id], "{id} on {threads} threads");
            }
        }
    }
}

#[test]
fn unused_slots_stay_poison_and_empty_splits_are_empty() {
    let e = engine(DType::Bf16, 7);
    let c = case(&REQUESTS, 7, 1, e.dtype);
    let keep = run(&e, &c);
    let pool = keep.get(Stage::Cache, Form::Fused);
    let used: Vec<usize> = c.plan.sequences.iter().flat_map(|s| s.slots.clone()).collect();
    for slot in 0..pool.rows {
        let nan = (0..pool.cols).filter(|j| pool.get(slot, *j).is_nan()).count();
        assert_eq!(nan, if used.contains(&slot) { 0 } else { pool.cols });
    }
    for form in Form::ALL {
        let (o, lse) = (keep.get(Stage::PartO, form), keep.get(Stage::PartLse, form));
        // Decode rows: 51 keys, four tiles of 16; and one key.
        for split in 0..7 {
            for (i, filled) in [(0, 4), (1, 1)] {
                let row = split * 2 + i;
                let empty = split >= filled;
                assert_eq!(lse.get(row, 0) == f64::NEG_INFINITY, empty, "split {split} of row {i}");
                assert_eq!((0..o.cols).all(|j| o.get(row, j) == 0.0), empty);
            }
        }
    }
}

#[test]
fn seams_change_what_they_should() {
    let base = engine(DType::Bf16, 2);
    let clean = usual(base);
    let c = case(&REQUESTS, 2, 1, base.dtype);
    for form in Form::ALL {
        let same = |other: &Keep, stage, r| {
            rows_of(clean.get(stage, form), &c, r) == rows_of(other.get(stage, form), &c, r)
        };
        let merged = usual(CpuEngine { seams: Seams { merge_base_e: true, ..Seams::default() }, ..base });
        assert_eq!(clean.get(Stage::PartO, form), merged.get(Stage::PartO, form));
        assert_eq!(clean.get(Stage::PartLse, form), merged.get(Stage::PartLse, form));
        for stage in [Stage::AttnOut, Stage::Lse] {
            assert!(!same(&merged, stage, (50, 1)), "{form:?} {stage}");
            // Not split, and one key alone in its split.
            assert!(same(&merged, stage, (33, 5)) && same(&merged, stage, (0, 1)));
        }

        let unscaled = usual(CpuEngine { seams: Seams { no_rescale: true, ..Seams::default() }, ..base });
        assert!(!same(&unscaled, Stage::AttnOut, (33, 5)) && !same(&unscaled, Stage::Lse, (33, 5)));
        assert!(same(&unscaled, Stage::AttnOut, (0, 1)), "one tile has nothing to rescale");

        let skipped = usual(CpuEngine { seams: Seams { skip_key: Some(20), ..Seams::default() }, ..base });
        assert!(!same(&skipped, Stage::AttnOut, (33, 5)) && !same(&skipped, Stage::Lse, (50, 1)));
        // Only the last of 21 tokens sees key 20.
        let (a, b) = (clean.get(Stage::Lse, form), skipped.get(Stage::Lse, form));
        let changed: Vec<usize> =
            (0..21).filter(|t| (0..G.heads).any(|h| a.bits(*t, h) != b.bits(*t, h))).collect();
        assert_eq!(changed, [20]);
        // A row without any key.
        let none = usual(CpuEngine { seams: Seams { skip_key: Some(0), ..Seams::default() }, ..base });
        assert_eq!(none.get(Stage::Lse, form).get(0, 0), f64::NEG_INFINITY);
        assert_eq!(none.get(Stage::AttnOut, form).get(0, 0), 0.0);
    }
}

/// A gain acts before the one rounding: a tenth of a percent moves about a quarter of all bf16 values of a tensor (a
/// value rounds elsewhere when a midpoint lies within 1e-3 of itself: 1e-3 · 2⁷ to 2⁸), and what is already
/// rounded not at all.
#[test]
fn gains_and_offsets_act_before_rounding() {
    let base = engine(DType::Bf16, 2);
    let clean = usual(base);
    let seam = |stage, head, factor| {
        let gain = Some(Gain { stage, head, factor });
        usual(CpuEngine { seams: Seams { gain, ..Seams::default() }, ..base })
    };
    let moved = |a: &Tensor, b: &Tensor, cols: std::ops::Range<usize>| {
        let all = (0..a.rows).flat_map(|r| cols.clone().map(move |c| (r, c)));
        let (n, k) =
            all.fold((0, 0), |(n, k), (r, c)| (n + 1, k + usize::from(a.bits(r, c) != b.bits(r, c))));
        k as f64 / f64::from(n)
    };
    for (stage, form) in [
        (Stage::QA, Form::Fused),
        (Stage::V, Form::Fused),
        (Stage::AttnOut, Form::Fused),
        (Stage::OLatent, Form::Absorbed),
        (Stage::AttnOut, Form::Absorbed),
    ] {
        let (a, b) = (clean.get(stage, form), &seam(stage, None, 1.001));
        let share = moved(a, b.get(stage, form), 0..a.cols);
        assert!((0.1..0.35).contains(&share), "{form:?} {stage}: {share}");
        assert_eq!(a.dtype, b.get(stage, form).dtype);
        for r in 0..a.rows {
            for c in 0..a.cols {
                let x = a.get(r, c);
                assert_eq!(a.dtype.round(x * 1.001), x, "a value that is rounded keeps it");
            }
        }
        let none = seam(stage, None, 1.0);
        assert_eq!(a, none.get(stage, form), "{form:?} {stage}: a gain of 1 is none");
    }
    let attn_out = clean.get(Stage::AttnOut, Form::Fused);
    let one = seam(Stage::AttnOut, Some(1), 1.001);
    let share =
        |h: usize| moved(attn_out, one.get(Stage::AttnOut, Form::Fused), h * G.value..(h + 1) * G.value);
    assert!(share(0) == 0.0 && share(1) > 0.1 && share(2) == 0.0);
    // Half a thousandth of a position turns the first pair by 5e-4: less than a value that is rounded can show.
    let turned =
        usual(CpuEngine { seams: Seams { rope_offset: Some((Stage::Q, 5e-4)), ..Seams::default() }, ..base });
    let (a, b) = (clean.get(Stage::Q, Form::Fused), turned.get(Stage::Q, Form::Fused));
    assert_eq!(moved(a, b, 0..G.nope), 0.0);
    assert!(moved(a, b, G.nope..G.key()) > 0.02);
}

/// Keys of another request are read, none is written elsewhere.
#[test]
fn a_foreign_page_is_read_and_never_written() {
    let base = engine(DType::Bf16, 2);
    let clean = usual(base);
    let foreign = usual(CpuEngine { seams: Seams { foreign_page: Some(1), ..Seams::default() }, ..base });
    let c = case(&REQUESTS, 2, 1, base.dtype);
    assert_eq!(clean.get(Stage::Cache, Form::Fused).bytes, foreign.get(Stage::Cache, Form::Fused).bytes);
    let changed: Vec<Vec<usize>> = c
        .plan
        .key_rows()
        .map(|(_, _, rows)| {
            let (a, b) = (clean.get(Stage::K, Form::Fused), foreign.get(Stage::K, Form::Fused));
            let differs =
                |r: &usize| (0..a.cols).any(|j| a.bits(rows.start + r, j) != b.bits(rows.start + r, j));
            (0..rows.len()).filter(differs).collect()
        })
        .collect();
    // Pages have four slots; one token alone has no second page.
    assert_eq!(changed, [vec![4, 5, 6, 7], vec![4, 5, 6, 7], vec![], vec![4, 5, 6, 7]]);
    for form in Form::ALL {
        let finite = |t: &Tensor| (0..t.rows).all(|r| (0..t.cols).all(|j| t.get(r, j).is_finite()));
        assert!(finite(foreign.get(Stage::AttnOut, form)), "{form:?}");
        assert_ne!(clean.get(Stage::AttnOut, form), foreign.get(Stage::AttnOut, form));
    }
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    let refused = |e: CpuEngine, c: &Case| {
        with_layer(spec(G, Pairing::Adjacent), |layer| {
            match e.run(layer, c, &Form::ALL, &mut Keep::default()) {
                Err(EngineError::Broke(text)) => assert_eq!(text.lines().count(), 3, "{text}"),
                other => panic!("{other:?}"),
            }
        });
    };
    let usual = case(&REQUESTS, 1, 1, DType::Bf16);
    refused(engine(DType::Bf16, 2), &usual);
    refused(engine(DType::E4m3, 1), &usual);
    let mma = Accumulate::Mma { k: 16, bits: 25 };
    refused(CpuEngine { accumulate: mma, ..engine(DType::F32, 1) }, &usual);
    refused(CpuEngine { accumulate: mma, cast_p: false, ..engine(DType::Bf16, 1) }, &usual);
    refused(CpuEngine { tile: 0, ..engine(DType::Bf16, 1) }, &usual);
    let mut short = usual.clone();
    short.plan.sequences[1].slots.pop();
    refused(engine(DType::Bf16, 1), &short);
    let mut narrow = usual;
    narrow.given.hidden = Array2::zeros((28, 3));
    refused(engine(DType::Bf16, 1), &narrow);
}

/// Plain float64 loops over tensors that the engine recorded in float32, and the bounds that its
/// arithmetic has by derivation. u = 2^-24; every `(1 + ku)` is written as k roundings.
struct Plain<'a> {
    keep: &'a Keep,
    layer: &'a Layer<'a>,
    case: &'a Case,
}

impl Plain<'_> {
    fn weight(&self, w: Weight, row: usize) -> Vec<f64> {
        let m = self.layer.weights.matrix(w).unwrap();
        let mut v = vec![0.0; m.cols()];
        m.decode(row, 0, &mut v);
        v
    }

    fn near(&self, what: &str, got: f64, want: f64, bound: f64) {
        assert!((got - want).abs() <= bound, "{what}: {got} is not {want} ± {bound}");
    }

    /// Σ a·b: at most `terms + 1` roundings (a fma each, and the chain's total), each at most u · Σ|a·b| · 1.01.
    fn product(&self, what: &str, got: f64, a: &[f64], b: &[f64]) {
        let sum: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
        let size: f64 = a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum();
        self.near(what, got, sum, 1.01 * (a.len() + 1) as f64 * U * size);
    }

    fn project(&self, input: &Tensor, out: &Tensor, w: Weight) {
        for t in 0..out.rows {
            let a = input.block(t..t + 1, 0..input.cols).into_raw_vec_and_offset().0;
            for m in 0..out.cols {
                self.product(w.name(), out.get(t, m), &a, &self.weight(w, m));
            }
        }
    }

    /// Σx²: a square, at most 3 additions in a lane here and a tree of 7 are 11 roundings; eps, the sum with it and
    /// the mean are 3 more, and the root halves them all: 7. Root, quotient, two products and γ: 5. Together 12.
    fn norm(&self, input: &Tensor, out: &Tensor, w: Weight, eps: f64) {
        let gamma = self.layer.weights.norm(w).unwrap();
        for t in 0..out.rows {
            let x: Vec<f64> = (0..out.cols).map(|j| input.get(t, j)).collect();
            let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
            for (j, v) in x.iter().enumerate() {
                let want = v / (mean + eps).sqrt() * gamma[j];
                self.near(w.name(), out.get(t, j), want, 12.1 * U * want.abs());
            }
        }
    }

    /// A rotation rounds cos or sin, a product and the sum: 3 roundings of |a·c| + |b·s|.
    fn rope(&self, input: &Tensor, from: usize, out: &Tensor, to: usize, factor: impl Fn(u64) -> f64) {
        let rope = &self.layer.spec.rope;
        for (t, position) in self.case.plan.positions.iter().enumerate() {
            for (j, f) in rope.inv_freq.iter().enumerate() {
                let (i1, i2) = match rope.pairing {
                    Pairing::Adjacent => (2 * j, 2 * j + 1),
                    Pairing::Half => (j, j + 3),
                };
                let (a, b) = (input.get(t, from + i1), input.get(t, from + i2));
                let (sin, cos) = (*position as f64 * f).sin_cos();
                let m = rope.magnitude * factor(*position);
                // 5 with the temperature: its own rounding and one product.
                let bound = |p: f64, q: f64| 5.01 * U * (p.abs() + q.abs()) * m;
                self.near("rope", out.get(t, to + i1), (a * cos - b * sin) * m, bound(a * cos, b * sin));
                self.near("rope", out.get(t, to + i2), (b * cos + a * sin) * m, bound(b * cos, a * sin));
            }
        }
    }

    /// One row of attention.
    ///
    /// Relative error of a p: twice (numerator and sum) that of its score s (its product, c's rounding and
    /// the fma: |s| and |m| take part, 4u · max|s| together), 2u for exp2, and a tile more each u · max|s| · 2
    /// for the rescale's exponent and 3u for its exp2 and product.
    /// l adds at most `keys` p in any order: keys · u. P·V: (keys + tiles) roundings of Σ P|v|.
    /// A merge of splits adds the rounding of a partial lse (its ln and its fma), of its difference, of its
    /// exponential, weight, product, sum: (2 |lse| + 2 max|s| + 8) u more, as if in every p.
    fn attend(
        &self,
        q: &[f64],
        keys: &[Vec<f64>],
        values: &[Vec<f64>],
        splits: usize,
        got: (Option<&dyn Fn(usize) -> f64>, f64),
    ) {
        let scale = self.layer.spec.scale;
        let dot = |k: &Vec<f64>| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() * scale;
        let size = |k: &Vec<f64>| q.iter().zip(k).map(|(a, b)| (a * b).abs()).sum::<f64>() * scale;
        let s: Vec<f64> = keys.iter().map(dot).collect();
        let largest = s.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        let noise = keys.iter().map(size).fold(0.0, f64::max) * 1.01 * (q.len() + 1) as f64 * U;
        let (n, tiles) = (keys.len() as f64, keys.len().div_ceil(TILE) as f64);
        let top = s.iter().copied().fold(f64::MIN, f64::max);
        let e: Vec<f64> = s.iter().map(|s| (s - top).exp()).collect();
        let l: f64 = e.iter().sum();
        let lse = top + l.ln();
        let mut one = noise + (4.0 * largest + 2.0 + tiles * (2.0 * largest + 3.0)) * U;
        if splits > 1 {
            one += (2.0 * lse.abs() + 2.0 * largest + 8.0) * U * splits as f64;
        }
        // ln l and the fma with ln 2 (whose own rounding is below u/16).
        self.near("lse", got.1, lse, one + n * U + (l.ln().abs() + 2.0 * lse.abs() + largest) * U);
        let Some(o) = got.0 else { return };
        for j in 0..values[0].len() {
            let x: f64 = e.iter().zip(values).map(|(e, v)| e / l * v[j]).sum();
            let size: f64 = e.iter().zip(values).map(|(e, v)| (e / l * v[j]).abs()).sum();
            let bound = (2.0 * one + (2.0 * n + 2.0 * tiles + 2.0) * U) * size;
            self.near("attention", o(j), x, 1.01 * bound);
        }
    }

    fn row(t: &Tensor, row: usize, cols: std::ops::Range<usize>) -> Vec<f64> {
        cols.map(|j| t.get(row, j)).collect()
    }

    fn form(&self, form: Form) {
        let k = |stage| self.keep.get(stage, form);
        let (g, plan) = (&self.layer.spec.geometry, &self.case.plan);
        let cache = k(Stage::Cache);
        if form == Form::Fused {
            for (_, seq, rows) in plan.key_rows() {
                for (row, &slot) in rows.zip(&seq.slots) {
                    let latent = Self::row(cache, slot, 0..g.latent);
                    for h in 0..g.heads {
                        let w: Vec<Vec<f64>> =
                            (0..g.latent).map(|l| self.weight(Weight::WUk, h * g.latent + l)).collect();
                        for n in 0..g.nope {
                            let column: Vec<f64> = w.iter().map(|r| r[n]).collect();
                            self.product("k", k(Stage::K).get(row, h * g.key() + n), &latent, &column);
                        }
                        for p in 0..g.rope {
                            let at = h * g.key() + g.nope + p;
                            assert_eq!(k(Stage::K).bits(row, at), cache.bits(slot, g.latent + p));
                        }
                        for v in 0..g.value {
                            let w = self.weight(Weight::WUv, h * g.value + v);
                            self.product("v", k(Stage::V).get(row, h * g.value + v), &latent, &w);
                        }
                    }
                }
            }
        } else {
            for t in 0..plan.tokens() {
                for h in 0..g.heads {
                    let q = Self::row(k(Stage::Q), t, h * g.key()..h * g.key() + g.nope);
                    for l in 0..g.latent {
                        let w = self.weight(Weight::WUk, h * g.latent + l);
                        self.product("q_latent", k(Stage::QLatent).get(t, h * g.latent + l), &q, &w);
                    }
                }
            }
            for row in 0..k(Stage::OLatent).rows {
                for h in 0..g.heads {
                    let o = Self::row(k(Stage::OLatent), row, h * g.latent..(h + 1) * g.latent);
                    for v in 0..g.value {
                        let w = self.weight(Weight::WUv, h * g.value + v);
                        self.product("attn_out", k(Stage::AttnOut).get(row, h * g.value + v), &o, &w);
                    }
                }
            }
        }
        for ((_, seq, rows), (_, _, key_rows)) in plan.attention_rows(None).zip(plan.key_rows()) {
            for (i, row) in rows.enumerate() {
                for h in 0..g.heads {
                    let (t, n) = (seq.tokens.start + i, seq.context + i + 1);
                    let own = h * g.key()..(h + 1) * g.key();
                    let q = Self::row(k(Stage::Q), t, own.clone());
                    let (q, keys, values): (_, Vec<_>, Vec<_>) = if form == Form::Fused {
                        let rows = || key_rows.clone().take(n);
                        let keys = rows().map(|r| Self::row(k(Stage::K), r, own.clone())).collect();
                        let values =
                            rows().map(|r| Self::row(k(Stage::V), r, h * g.value..(h + 1) * g.value));
                        (q, keys, values.collect())
                    } else {
                        let mut lifted = Self::row(k(Stage::QLatent), t, h * g.latent..(h + 1) * g.latent);
                        lifted.extend(&q[g.nope..]);
                        let slots = || seq.slots.iter().take(n);
                        let keys = slots().map(|s| Self::row(cache, *s, 0..g.cache())).collect();
                        (lifted, keys, slots().map(|s| Self::row(cache, *s, 0..g.latent)).collect())
                    };
                    let (stage, width) = if form == Form::Fused {
                        (Stage::AttnOut, g.value)
                    } else {
                        (Stage::OLatent, g.latent)
                    };
                    let o = |j: usize| k(stage).get(row, h * width + j);
                    let splits = if seq.tokens.len() == 1 { plan.splits } else { 1 };
                    self.attend(&q, &keys, &values, splits, (Some(&o), k(Stage::Lse).get(row, h)));
                }
            }
        }
        self.project(k(Stage::AttnOut), k(Stage::Out), Weight::WO);
    }
}

#[test]
fn float32_stages_lie_within_derived_bounds_of_plain_float64_loops() {
    let no_rank = Geometry { q_rank: 0, ..G };
    let hot = Some(Temperature { scale: 0.1, length: 8.0 });
    for (g, pairing, temperature, splits) in
        [(G, Pairing::Adjacent, None, 1), (no_rank, Pairing::Half, hot, 3)]
    {
        let case = case(&REQUESTS, splits, 3, DType::F32);
        with_layer(Spec { temperature, ..spec(g, pairing) }, |layer| {
            let mut keep = Keep::default();
            engine(DType::F32, splits).run(layer, &case, &Form::ALL, &mut keep).unwrap();
            let plain = Plain { keep: &keep, layer, case: &case };
            let k = |stage| keep.get(stage, Form::Fused);
            let factor = |p: u64| {
                temperature.map_or(1.0, |t| 1.0 + t.scale * (1.0 + (p as f64 / t.length).floor()).ln())
            };
            plain.norm(k(Stage::Hidden), k(Stage::AttnIn), Weight::GAttn, layer.spec.eps_attn);
            if g.q_rank > 0 {
                plain.project(k(Stage::AttnIn), k(Stage::QA), Weight::WQA);
                plain.norm(k(Stage::QA), k(Stage::QANormed), Weight::GQ, layer.spec.eps_latent);
                plain.project(k(Stage::QANormed), k(Stage::QRaw), Weight::WQB);
            } else {
                plain.project(k(Stage::AttnIn), k(Stage::QRaw), Weight::WQ);
            }
            for h in 0..g.heads {
                let at = h * g.key();
                plain.rope(k(Stage::QRaw), at + g.nope, k(Stage::Q), at + g.nope, factor);
                for (t, p) in case.plan.positions.iter().enumerate() {
                    for j in at..at + g.nope {
                        let want = k(Stage::QRaw).get(t, j) * factor(*p);
                        plain.near("nope", k(Stage::Q).get(t, j), want, 2.01 * U * want.abs());
                    }
                }
            }
            plain.project(k(Stage::AttnIn), k(Stage::KvA), Weight::WKvA);
            plain.norm(k(Stage::KvA), k(Stage::KvCNormed), Weight::GKv, layer.spec.eps_latent);
            plain.rope(k(Stage::KvA), g.latent, k(Stage::KPe), 0, |_| 1.0);
            for (i, seq) in case.plan.sequences.iter().enumerate() {
                for (p, &slot) in seq.slots.iter().enumerate() {
                    for j in 0..g.cache() {
                        let want = match p.checked_sub(seq.context).map(|t| seq.tokens.start + t) {
                            None => case.given.context[i][[p, j]],
                            Some(t) if j < g.latent => k(Stage::KvCNormed).get(t, j),
                            Some(t) => k(Stage::KPe).get(t, j - g.latent),
                        };
                        assert_eq!(k(Stage::Cache).get(slot, j), want);
                    }
                }
            }
            Form::ALL.iter().for_each(|f| plain.form(*f));
        });
    }
}
