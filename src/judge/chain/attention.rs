/*!
What errors of queries, keys and values do to attention.

P's cast is not emulated here: the reference is the plain softmax average c = Σ P_t v_t with the contract's casts of scores.
With errors E of q, k and v, an engine's score is off by at most
`Δ_t = score(Σ_d (E_q(|k| + E_k) + |q|E_k) + γ(‖q‖ + ‖E_q‖)(‖k_t‖ + ‖E_k‖))`, its own rounding included; `score`: times
the factor, and what declared casts step by. Then, whatever the size of Δ:

- weights: P'_t ≤ κ_t P_t with `κ_t = exp(Δ_t)/Σ P exp(−Δ)`.
- values: `x' − c = Σ P'_t (v'_t − v_t) + Σ P'_t (v_t − c)`, and since Σ P_t (v_t − c) = 0,
  `Σ P'_t (v_t − c) = Σ P_t (exp(δ_t) − 1)(v_t − c) / Σ P exp(δ)`. So `|x' − c| ≤ G + e`,
  `G = Σ P_t (exp(Δ_t) − 1)|v_t − c| / Σ P exp(−Δ)`, `e = Σ κ_t P_t E_v`.
- roundings after the scores, taken at the engine's own inputs: A = max κ · Σ P_t|v_t| + e is at least Σ P'_t|v'_t|
  and |x'|. With Λ the bound of the row's lse ([`super::super::bound::attention`]), which holds every error of a weight and
  of the row sum, plus 16u·max Δ since scores are larger, with n·unit of P·V and h half an ulp of P's cast:
  `r A`, r = 2Λ + n·unit + h + 2·2⁻²²; and for p too small for their format `(spacing(0)/2 + 2⁻¹²⁶) Σ|v'_t|`.
- splits merged inside: one softmax over all keys, besides each weight's error η = exp(z) − 1,
  `z = Λ + 4u(spread + 2 max Δ + 1) + 2⁻²² + (splits + 6)u`: `3η/(1 − η) + (splits + 2)u` more in r; a cast of partials
  acts on both sides, half an ulp each of Σ W|x_s| ≤ A: twice its h in r, and once more for merge groups.
- `most = G + e + r(1 + 2r)A`, (1 + 2r) for products of errors.
- **lse**: `|lse' − lse| ≤ ln Σ P exp(Δ)` (Jensen: the other side is less), and Λ + 16u·max Δ, h and n·spacing(0)/2
  where the row sum takes cast p; η/(1 − η) + 3u(|lse| + max Δ) for splits.

Usual, to first order: an error of a query moves all keys together, so its part adds up; errors of keys and values are their
own: `(Σ P σ_q|v − c|)² + Σ P²σ_k²(v − c)² + Σ P²S_v²`; lse: `(Σ P σ_q)² + Σ P²σ_k²`.
*/

use super::super::bound::attention::{Basis, range, score_error, value_error};
use super::super::compare::Isolated;
use super::grow::{Grown, between, enlarged};
use super::{Errors, sizes, squares};
use mla_numeric::U;
use mla_reference::attention::{Attended, Head, Merged};
use mla_reference::product::Rows;
use mla_reference::{Contract, Form, RowSum, Sequence, Stage};
use ndarray::{Array2, ArrayView2, s};
use std::ops::Range;

/// 2⁻²²: a special function.
const EXP2: f64 = 1.0 / 4_194_304.0;

/// Errors of what an attention reads: queries of its rows, keys and values of the whole sequence.
pub struct Inputs {
    /// Of queries, `[rows, key width]`.
    pub q: Errors,
    /// Of keys, `[keys, key width]`.
    pub k: Errors,
    /// Of values, `[keys, value width]`.
    pub v: Errors,
}

impl Inputs {
    /// Of a head of some tokens of a sequence; None where all inputs were captured or none may differ.
    pub fn of(
        of: &Isolated,
        form: Option<Form>,
        seq: &Sequence,
        tokens: Range<usize>,
        h: usize,
    ) -> Option<Inputs> {
        let (g, plan) = (&of.spec.geometry, &of.case.plan);
        let rows = seq.tokens.start + tokens.start..seq.tokens.start + tokens.end;
        let at = h * g.key();
        let or = |e: Option<Errors>, dim| e.unwrap_or_else(|| Errors::zeros(dim));
        let dim = (rows.len(), g.key());
        let q = or(of.slacks.block(Stage::Q, rows.clone(), at..at + g.key()), dim);
        let keys = seq.keys();
        let inputs = if form == Some(Form::Absorbed) {
            let own = h * g.latent..(h + 1) * g.latent;
            let latent = or(of.slacks.block(Stage::QLatent, rows.clone(), own), (rows.len(), g.latent));
            let lift = |latent: &Array2<f64>, q: &Array2<f64>| {
                let mut all = Array2::zeros((rows.len(), g.cache()));
                all.slice_mut(s![.., ..g.latent]).assign(latent);
                all.slice_mut(s![.., g.latent..]).assign(&q.slice(s![.., g.nope..]));
                all
            };
            let q = Errors { most: lift(&latent.most, &q.most), usual: lift(&latent.usual, &q.usual) };
            let k = or(of.slacks.rows(Stage::Cache, &seq.slots, 0..g.cache()), (keys, g.cache()));
            let v = |m: &Array2<f64>| m.slice(s![.., ..g.latent]).to_owned();
            let v = Errors { most: v(&k.most), usual: v(&k.usual) };
            Inputs { q, k, v }
        } else {
            let rows = plan.key_rows().find(|(_, s, _)| std::ptr::eq(*s, seq)).map_or(0..0, |r| r.2);
            let k = of.slacks.block(Stage::K, rows.clone(), at..at + g.key());
            let v = of.slacks.block(Stage::V, rows, h * g.value..(h + 1) * g.value);
            Inputs { q, k: or(k, (keys, g.key())), v: or(v, (keys, g.value)) }
        };
        (inputs.q.any() || inputs.k.any() || inputs.v.any()).then_some(inputs)
    }
}

/// Parts of an attention with their weights.
pub struct Parts<'a> {
    all: Vec<&'a Attended>,
    /// `[parts, rows]`.
    weights: Array2<f64>,
    merged: bool,
    /// Natural logarithm of all.
    lse: &'a [f64],
}

impl<'a> Parts<'a> {
    /// One range of keys.
    pub fn one(a: &'a Attended) -> Parts<'a> {
        Parts { all: vec![a], weights: Array2::ones((1, a.x.nrows())), merged: false, lse: &a.lse }
    }

    /// Splits that are merged inside.
    pub fn many(m: &'a Merged) -> Parts<'a> {
        let merged = m.parts.len() > 1;
        Parts { all: m.parts.iter().collect(), weights: m.weights.clone(), merged, lse: &m.lse }
    }
}

/// One visible key of a row.
struct Key {
    /// Position in the sequence.
    t: usize,
    /// P over all keys.
    p: f64,
    /// Δ.
    most: f64,
    /// Standard deviations of the score by errors of the query and of the key.
    by_q: f64,
    by_k: f64,
}

/// Errors of q·k of a part: `[rows, range]` each.
struct Scores {
    most: Array2<f64>,
    by_q: Array2<f64>,
    by_k: Array2<f64>,
}

fn scores(contract: &Contract, a: &Attended, head: &Head, e: &Inputs) -> Scores {
    let mut keys = Array2::zeros((a.range.len(), head.k.cols()));
    for (t, mut row) in a.range.clone().zip(keys.rows_mut()) {
        if let Some(row) = row.as_slice_mut() {
            head.k.decode(t, 0, row);
        }
    }
    let own = |m: &Array2<f64>| m.slice(s![a.range.clone(), ..]).to_owned();
    let (ek, sk) = (own(&e.k.most), own(&e.k.usual));
    let large = enlarged(keys.view(), &ek);
    let mut most = between(e.q.most.view(), large.view()) + between(sizes(head.q).view(), ek.view());
    let norms = |m: ArrayView2<f64>| -> Vec<f64> {
        m.rows().into_iter().map(|r| r.iter().map(|v| v * v).sum::<f64>().sqrt()).collect()
    };
    let (of_q, of_k) = (norms(enlarged(head.q, &e.q.most).view()), norms(large.view()));
    let gamma = contract.accumulate.gamma(head.k.cols());
    for ((i, t), v) in most.indexed_iter_mut() {
        *v = *v * (1.0 + f64::powi(2.0, -30)) + gamma * of_q[i] * of_k[t];
    }
    let root = |m: Array2<f64>| m.mapv(f64::sqrt);
    Scores {
        most,
        by_q: root(between(squares(e.q.usual.view()).view(), squares(keys.view()).view())),
        by_k: root(between(squares(head.q).view(), squares(sk.view()).view())),
    }
}

/// Bound and spread of the rows of one head; `x`: the chunk's value.
pub fn grown(
    contract: &Contract,
    parts: &Parts,
    head: &Head,
    e: &Inputs,
    x: &Array2<f64>,
    lse: bool,
) -> Grown {
    let of_scores: Vec<Scores> = parts.all.iter().map(|a| scores(contract, a, head, e)).collect();
    let of_lse: Vec<Vec<f64>> =
        parts.all.iter().map(|a| range(Basis::Proven, contract, a, head, false).lse).collect();
    let factor = contract.score_factor(head.scale);
    let (mut most, mut usual) = (Array2::zeros(x.dim()), Array2::zeros(x.dim()));
    for i in 0..x.nrows() {
        let mut keys = Vec::new();
        for (s, (a, of)) in parts.all.iter().zip(&of_scores).enumerate() {
            let weight = parts.weights[[s, i]];
            let total: f64 = a.p.row(i).iter().zip(a.w.row(i)).map(|(p, w)| p * w).sum();
            for (t, score) in a.s.row(i).iter().enumerate() {
                // NaN in a score makes everything NaN, as it does the reference.
                if *score == f64::NEG_INFINITY || weight == 0.0 {
                    continue;
                }
                let raw = a.raw.as_ref().map(|r| r[[i, t]]);
                keys.push(Key {
                    t: a.range.start + t,
                    p: weight * a.p[[i, t]] * a.w[[i, t]] / total,
                    most: score_error(contract, factor, of.most[[i, t]], raw),
                    by_q: of.by_q[[i, t]] * factor.abs(),
                    by_k: of.by_k[[i, t]] * factor.abs(),
                });
            }
        }
        if keys.is_empty() {
            continue;
        }
        let seen = |s: &usize| parts.weights[[*s, i]] > 0.0;
        let seen: Vec<usize> = (0..parts.all.len()).filter(seen).collect();
        let own = Own {
            lse: seen.iter().map(|s| of_lse[*s][i]).fold(0.0, f64::max),
            spread: seen.iter().map(|s| (parts.all[*s].lse[i] - parts.lse[i]).abs()).fold(0.0, f64::max),
            keys: seen.iter().map(|s| parts.all[*s].range.len()).max().unwrap_or(0),
            splits: if parts.merged { Some(parts.all.len()) } else { None },
            total: parts.lse[i],
        };
        let row = Row::new(contract, &keys, own);
        if lse {
            most[[i, 0]] = row.lse();
            let by_q: f64 = keys.iter().map(|k| k.p * k.by_q).sum();
            usual[[i, 0]] = by_q.hypot(keys.iter().map(|k| (k.p * k.by_k).powi(2)).sum::<f64>().sqrt());
        } else {
            row.values(contract, &keys, head, e, (most.row_mut(i), usual.row_mut(i)));
        }
    }
    Grown { most, usual }
}

/// What a row's own roundings rest on.
struct Own {
    /// Largest bound of the lse of its parts.
    lse: f64,
    /// Largest |lse_s − lse|.
    spread: f64,
    /// Keys of its longest part.
    keys: usize,
    /// Splits that are merged inside.
    splits: Option<usize>,
    /// lse.
    total: f64,
}

struct Row {
    /// Σ P exp(−Δ).
    den: f64,
    /// ln Σ P exp(Δ).
    shift: f64,
    /// max Δ.
    top: f64,
    /// Λ + 16u·max Δ, and h where the row sum takes cast p.
    sum: f64,
    own: Own,
}

impl Row {
    fn new(contract: &Contract, keys: &[Key], own: Own) -> Row {
        let sum = |f: &dyn Fn(&Key) -> f64| keys.iter().map(f).sum::<f64>();
        let top = keys.iter().map(|k| k.most).fold(0.0, f64::max);
        let (mut cast, soft) = (0.0, &contract.softmax);
        if let (Some(d), RowSum::Rounded) = (soft.p, soft.row_sum) {
            cast = half_ulp(d) + own.keys as f64 * d.spacing(0.0) / 2.0;
        }
        Row {
            den: sum(&|k| k.p * libm::exp(-k.most)),
            shift: libm::log(sum(&|k| k.p * libm::exp(k.most))),
            top,
            sum: own.lse + 16.0 * U * top + cast,
            own,
        }
    }

    /// η/(1 − η) of the weights of splits; 0 without.
    fn merge(&self) -> f64 {
        let Some(n) = self.own.splits else { return 0.0 };
        let z = self.sum + 4.0 * U * (self.own.spread + 2.0 * self.top + 1.0) + EXP2 + (n as f64 + 6.0) * U;
        let error = libm::expm1(z);
        if error < 1.0 { error / (1.0 - error) } else { f64::INFINITY }
    }

    fn lse(&self) -> f64 {
        let merge = self.merge();
        let end = if merge > 0.0 { merge + 3.0 * U * (self.own.total.abs() + self.top) } else { 0.0 };
        self.shift + self.sum + end
    }

    fn values(
        &self,
        contract: &Contract,
        keys: &[Key],
        head: &Head,
        e: &Inputs,
        (mut most, mut usual): (ndarray::ArrayViewMut1<f64>, ndarray::ArrayViewMut1<f64>),
    ) {
        let n = most.len();
        let value = |t: usize| head.v.data.get(t * head.v.stride..t * head.v.stride + n).unwrap_or(&[]);
        let (mut centre, mut size, mut plain) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
        for k in keys {
            for (j, v) in value(k.t).iter().enumerate() {
                centre[j] += k.p * v;
                size[j] += k.p * v.abs();
                plain[j] += v.abs() + e.v.most[[k.t, j]];
            }
        }
        let (mut moved, mut of_v) = (vec![0.0; n], vec![0.0; n]);
        let (mut by_q, mut squares) = (vec![0.0; n], vec![0.0; n]);
        for k in keys {
            let weight = k.p * libm::expm1(k.most) / self.den;
            let value_weight = k.p * libm::exp(k.most) / self.den;
            for (j, v) in value(k.t).iter().enumerate() {
                let apart = (v - centre[j]).abs();
                moved[j] += weight * apart;
                of_v[j] += value_weight * e.v.most[[k.t, j]];
                by_q[j] += k.p * k.by_q * apart;
                squares[j] += (k.p * k.by_k * apart).powi(2) + (k.p * e.v.usual[[k.t, j]]).powi(2);
            }
        }
        let soft = &contract.softmax;
        let merge = self.merge();
        let partial = contract.part_cast().filter(|_| merge > 0.0).map_or(0.0, half_ulp);
        let casts = if contract.merge_groups.is_some() { 4.0 } else { 2.0 };
        let of_splits = self.own.splits.map_or(0.0, |n| 3.0 * merge + (n as f64 + 2.0) * U);
        let r = 2.0 * self.sum
            + value_error(contract, self.own.keys)
            + soft.p.map_or(0.0, half_ulp)
            + 2.0 * EXP2
            + of_splits
            + casts * partial;
        let r = r * (1.0 + 2.0 * r);
        let flushed = soft.p.map_or(0.0, |d| d.spacing(0.0) / 2.0) + f64::from(f32::MIN_POSITIVE);
        let largest = libm::exp(self.top) / self.den;
        for j in 0..n {
            let all = largest * size[j] + of_v[j];
            most[j] = moved[j] + of_v[j] + r * all + flushed * plain[j];
            usual[j] = by_q[j].hypot(squares[j].sqrt());
        }
    }
}

/// Half a spacing of a normal value, relative to it at most.
fn half_ulp(d: mla_numeric::DType) -> f64 {
    f64::powi(2.0, -(d.precision() as i32))
}
