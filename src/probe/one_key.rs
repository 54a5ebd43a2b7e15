/*!
A token with one visible key: its softmax is 1, whatever q, rope, scale and mask are.

Then `attn_out = W_UV · kv_c_normed` and `lse = scale · q·k`, and the space of faults falls in two:

- **values**: the token's cache row is its (kv_c_normed, k_pe) bit for bit; the value (fused: `v`; absorbed:
  `attn_out` from `o_latent`) is w_uv times it, within the bound of that product.
- **scores**: what attention gives (fused: `attn_out`; absorbed: `o_latent`) is its only value (`v`, the cache row);
  lse is the score.

How sharply: p = exp2(s·c − m·c) with m = s. Without fma the argument is 0, exp2(0) = 1, l = 1 and 1·v/1 = v. With
fma it is the rounding error of m·c, so p = 1 + δ with |δ| ≤ 6u|s| + 2⁻²² + u, as in
[`bound`](crate::judge::bound). Where P is cast, p̂ = 1 again as long as δ is below half a step of the cast, but the
sum of the uncast P leaves v/(1 + δ); where it is not, p cancels in p·v/p. On top come the product, the division and the
weights of a merge (exp2(0) = 1 for the split that has the key, 0 for empty ones): eight roundings cover them. The
output must lie between the rounded ends of this interval; in 16-bit formats both ends are v itself, bit for bit,
unless |s| is beyond some hundreds.
*/

use super::place::{Count, place};
use super::run::{Inputs, Kept};
use super::{ONE_KEY, Outcome};
use crate::case::Case;
use crate::judge::bound::bound;
use crate::model::{Grid, Layer};
use crate::trace::Tensor;
use mla_numeric::{DType, U};
use mla_reference::{Contract, Evaluator, Form, Given, Plan, Regime, RowSum, Sequence, Stage, Weight};
use std::sync::{Mutex, PoisonError};

/// Largest relative error of an exp2, as in `judge/bound.rs`.
const EXP2: f64 = 1.0 / 4_194_304.0;
/// Spacing of float32 below its smallest normal value.
const TINY: f64 = f64::from_bits((1023 - 149) << 52);

const VALUES: &str = "values: the cache, its slots, w_uv or the product with it";
const SCORES: &str = "scores: mask, softmax, row sum, merge of splits, scale, or rows exchanged";

/// A token that sees one key.
pub struct Single {
    /// Row of its token.
    pub token: usize,
    /// Its row of attention.
    pub row: usize,
    /// Its key's row of k and v.
    pub key: usize,
    /// Its key's slot.
    pub slot: usize,
    /// Whether it is computed in splits.
    pub split: bool,
}

/// All tokens of a plan that see one key.
pub fn singles(plan: &Plan) -> Vec<Single> {
    let keys: Vec<usize> = plan.key_rows().map(|(_, _, r)| r.start).collect();
    plan.attention_rows(None)
        .filter(|(_, s, _)| s.visible(0) == 1)
        .map(|(i, s, rows)| Single {
            token: s.tokens.start,
            row: rows.start,
            key: keys[i],
            slot: s.slots[0],
            // One new token: both forms split it alike.
            split: plan.in_parts(Form::Absorbed, s),
        })
        .collect()
}

/// The tensors of a form that the probe reads.
struct Read<'a> {
    q: &'a Tensor,
    latent: &'a Tensor,
    k_pe: &'a Tensor,
    cache: &'a Tensor,
    lse: &'a Tensor,
}

/// Looks at the base run.
pub fn probe(
    base: &Kept,
    case: &Case,
    form: Form,
    layer: &Layer,
    contract: &Contract,
) -> (Outcome, &'static str) {
    let all = (|| {
        Some(Read {
            q: base.get(Stage::Q)?,
            latent: base.get(Stage::KvCNormed)?,
            k_pe: base.get(Stage::KPe)?,
            cache: base.get(Stage::Cache)?,
            lse: base.get(Stage::Lse)?,
        })
    })();
    let Some(read) = all else {
        return (Outcome::NotApplicable { why: "a tensor is missing".into() }, ONE_KEY.1);
    };
    let rows = singles(&case.plan);
    let mut values = written(&read, case, form, &rows);
    values.add(weighed(base, &read, case, form, layer, contract, &rows));
    let scores = scored(base, &read, case, form, layer, contract, &rows);
    let elements = values.elements + scores.elements;
    let broken = values.broken + scores.broken;
    let (what, says) = match (values.broken, scores.broken) {
        (0, 0) => {
            let what = format!("{} tokens with one visible key", rows.len());
            return (Outcome::Held { what, elements }, ONE_KEY.1);
        }
        (_, 0) => ("values side: attn_out is not w_uv times the token's latent", VALUES),
        (0, _) => ("scores side: attention does not give the only value, or lse not the score", SCORES),
        _ => ("both sides: neither the value nor its weight is right", ONE_KEY.1),
    };
    let place = values.first.or(scores.first).unwrap_or_default();
    (Outcome::Broken { what: what.into(), place, broken, elements }, says)
}

/// The cache rows are what was computed for them.
fn written(read: &Read, case: &Case, form: Form, rows: &[Single]) -> Count {
    let mut count = Count::default();
    for s in rows {
        for c in 0..read.cache.cols {
            let (from, at) = match c.checked_sub(read.latent.cols) {
                None => (read.latent, c),
                Some(at) => (read.k_pe, at),
            };
            let holds = read.cache.bits(s.slot, c) == from.bits(s.token, at);
            count.check(holds, || place(case, form, Stage::Cache, read.cache, s.slot, c));
        }
    }
    count
}

/// The values are w_uv times the latent, within the product's bound.
fn weighed(
    base: &Kept,
    read: &Read,
    case: &Case,
    form: Form,
    layer: &Layer,
    contract: &Contract,
    rows: &[Single],
) -> Count {
    let sequence = |(i, _): (usize, &Single)| Sequence {
        request: i,
        regime: Regime::Random,
        tokens: i..i + 1,
        context: 0,
        slots: vec![i],
    };
    let plan = Plan {
        positions: vec![0; rows.len()],
        token_request: (0..rows.len()).collect(),
        sequences: rows.iter().enumerate().map(sequence).collect(),
        page_size: 1,
        pages: rows.len(),
        splits: 1,
        ..Plan::default()
    };
    let tokens: Vec<usize> = rows.iter().map(|s| s.token).collect();
    let own: Vec<usize> = rows.iter().map(|s| s.row).collect();
    let (stage, input, small) = match (form, base.get(Stage::OLatent)) {
        (Form::Absorbed, Some(o)) => (Stage::AttnOut, Stage::OLatent, some_rows(o, &own)),
        _ => (Stage::V, Stage::Cache, some_rows(read.latent, &tokens)),
    };
    let Some(out) = base.get(stage) else { return Count::default() };
    let grid = Grid::new(layer.weights, contract.weights, &[Weight::WUv]);
    let count = Mutex::new(Count::default());
    Evaluator {
        spec: &layer.spec,
        plan: &plan,
        given: &Given::default(),
        weights: &grid,
        contract,
        source: &Inputs(vec![(input, &small)]),
        wanted: None,
        departure: None,
        memory: None,
    }
    .evaluate(stage, Some(form), &|chunk| {
        let b = bound(contract, &chunk.terms, chunk.x.view(), false);
        let mut mine = Count::default();
        for ((i, j), &x) in chunk.x.indexed_iter() {
            let (single, col) = (&rows[chunk.rows.start + i], chunk.cols.start + j);
            let row = if stage == Stage::V { single.key } else { single.row };
            between(&mut mine, out, (row, col), x, b[[i, j]], None, || {
                place(case, form, stage, out, row, col)
            });
        }
        count.lock().unwrap_or_else(PoisonError::into_inner).add(mine);
    });
    count.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Attention gives its only value, lse its only score.
fn scored(
    base: &Kept,
    read: &Read,
    case: &Case,
    form: Form,
    layer: &Layer,
    contract: &Contract,
    rows: &[Single],
) -> Count {
    let g = &layer.spec.geometry;
    let mut count = Count::default();
    let stage = if form == Form::Fused { Stage::AttnOut } else { Stage::OLatent };
    let (Some(out), k, v) = (base.get(stage), base.get(Stage::K), base.get(Stage::V)) else { return count };
    for s in rows {
        for h in 0..g.heads {
            let q = floats(read.q, s.token, h * g.key(), g.key());
            // Query and key as attention multiplies them, and the value with the columns of the output.
            let (q, key, (values, value_row, from), width) = match (form, k, v, base.get(Stage::QLatent)) {
                (Form::Fused, Some(k), Some(v), _) => {
                    let key = floats(k, s.key, h * g.key(), g.key());
                    (q, key, (v, s.key, h * g.value), g.value)
                }
                (Form::Absorbed, _, _, Some(lifted)) => {
                    let mut all = floats(lifted, s.token, h * g.latent, g.latent);
                    all.extend_from_slice(&q[g.nope..]);
                    let key = floats(read.cache, s.slot, 0, g.cache());
                    (all, key, (read.cache, s.slot, 0), g.latent)
                }
                _ => continue,
            };
            let dot: f64 = q.iter().zip(&key).map(|(a, b)| a * b).sum();
            let size: f64 = q.iter().zip(&key).map(|(a, b)| (a * b).abs()).sum();
            let score = dot * layer.spec.scale;
            let kept = Kernel { contract, p: p_error(score), split: s.split };
            for c in 0..width {
                let (x, col) = (values.get(value_row, from + c), h * width + c);
                let part = s.split.then_some(contract.partials);
                let name = || place(case, form, stage, out, s.row, col);
                between(&mut count, out, (s.row, col), x, kept.of_value(x), part, name);
            }
            let ds = contract.accumulate.gamma(q.len()) * size * layer.spec.scale.abs();
            let name = || place(case, form, Stage::Lse, read.lse, s.row, h);
            let part = s.split.then_some(contract.partials);
            between(&mut count, read.lse, (s.row, h), score, kept.of_lse(score, ds), part, name);
        }
    }
    count
}

/// Largest |p − 1| of the only key, by its score.
pub fn p_error(score: f64) -> f64 {
    6.0 * U * score.abs() + EXP2 + U
}

/// How far attention over one key may be off.
pub struct Kernel<'a> {
    /// The contract.
    pub contract: &'a Contract,
    /// Largest |p − 1|.
    pub p: f64,
    /// Computed in splits and merged.
    pub split: bool,
}

impl Kernel<'_> {
    /// |o − v| before the final rounding.
    pub fn of_value(&self, v: f64) -> f64 {
        let soft = &self.contract.softmax;
        let p = match soft.p {
            // p̂/l with l of the same p: it cancels.
            None => 0.0,
            Some(_) if soft.row_sum == RowSum::Rounded => 0.0,
            // l = 1 + δ, and p̂ is 1 or, where δ reaches half a step, its neighbour.
            Some(cast) => self.p + (cast.round(1.0 + self.p) - 1.0).max(1.0 - cast.round(1.0 - self.p)),
        };
        (p + 8.0 * self.contract.accumulate.unit().max(U)) * v.abs() + 8.0 * TINY
    }

    /// |lse − s| before the final rounding, `ds` the bound of the score itself: row sum, logarithm, product with
    /// the maximum; a merge as in [`bound`](crate::judge::bound).
    pub fn of_lse(&self, s: f64, ds: f64) -> f64 {
        let splits = self.contract.split_ranges(1).len() as f64;
        let merge =
            if self.split { 2.0 * (4.0 * U + EXP2 + (splits + 6.0) * U) + 3.0 * U * s.abs() } else { 0.0 };
        2.0 * ds + 2.0 * self.p + 8.0 * U + 2.0 * U * s.abs() + merge + 8.0 * TINY
    }
}

/// Whether an element lies in [round(x − b), round(x + b)], rounded to `part` on the way where it is stored in between.
fn between(
    count: &mut Count,
    t: &Tensor,
    at: (usize, usize),
    x: f64,
    b: f64,
    part: Option<DType>,
    name: impl FnOnce() -> String,
) {
    if !(x.is_finite() && b.is_finite()) {
        return;
    }
    let round = |v: f64| t.dtype.round(part.map_or(v, |d| d.round(v)));
    let o = t.get(at.0, at.1);
    count.check(round(x - b) <= o && o <= round(x + b), name);
}

fn floats(t: &Tensor, row: usize, from: usize, n: usize) -> Vec<f64> {
    let mut out = vec![0.0; n];
    t.read(row, from..from + n, &mut out);
    out
}

/// Some rows of a tensor as a tensor.
fn some_rows(t: &Tensor, rows: &[usize]) -> Tensor {
    let n = t.cols * t.dtype.bytes();
    let bytes = rows.iter().flat_map(|r| t.bytes[r * n..(r + 1) * n].iter().copied()).collect();
    Tensor { shape: vec![rows.len(), t.cols], rows: rows.len(), bytes, ..t.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 16-bit outputs have no room: both ends of the interval are the value, for scores of usual size.
    #[test]
    fn sixteen_bit_values_must_be_equal() {
        let mut contract = Contract::exact();
        contract.accumulate = mla_reference::Accumulate::Rn { block: 16, chain: 0 };
        for dtype in [DType::Bf16, DType::F16] {
            contract.softmax.p = Some(dtype);
            for s in [0.0, 3.0, 30.0, 100.0] {
                let kernel = Kernel { contract: &contract, p: p_error(s), split: false };
                // A power of two has the narrowest cell below it; 1 − 2^-8 and 1.98 have the widest error.
                for v in [1.0, 1.0 - 1.0 / 256.0, 1.984375, -0.75] {
                    let b = kernel.of_value(v);
                    assert_eq!((dtype.round(v - b), dtype.round(v + b)), (v, v), "{dtype} {s} {v}");
                }
            }
        }
        // In float32 the P that is not cast cancels: eight roundings are left.
        contract.softmax.p = None;
        let kernel = Kernel { contract: &contract, p: 1e-3, split: false };
        assert!(kernel.of_value(1.0) <= 8.001 * U);
    }
}
