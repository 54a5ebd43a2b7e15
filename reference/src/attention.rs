/*!
Attention over one range of keys in float64, with the casts that a contract declares.

Tiles are visited in the contract's order; `m` is the running maximum, `p = exp(s − m)` with **this** m,
`p̂ = round(p)` to the declared dtype, `w = exp(m − M)` brings a tile to the final maximum M. Then
`x = Σ p̂ w v / l`, `l = Σ p w` (or `Σ p̂ w`), `lse = M + ln l`. With [`Contract::exact`] this is plain softmax.

A row that sees no key of the range has x = 0 and lse = −∞. One NaN among the scores that a row sees makes its
x and lse NaN, as it does in every kernel.
*/

use crate::contract::{Contract, RowSum};
use crate::product::{Rows, Strided, product, weighted_sum};
use ndarray::{Array2, ArrayView2};
use std::ops::Range;

/// Queries, keys and values of one head (or of all heads of one latent cache) of one sequence.
pub struct Head<'a> {
    /// `[rows, width]`: queries.
    pub q: ArrayView2<'a, f64>,
    /// `[keys, width]`.
    pub k: Strided<'a>,
    /// `[keys, value width]`; may be the first columns of the same rows as `k`.
    pub v: Strided<'a>,
    /// How many keys, from the first on, each row of `q` sees.
    pub visible: &'a [usize],
    /// Factor on q·k.
    pub scale: f64,
}

/// Attention over a range of keys, with what bounds and statistics need.
pub struct Attended {
    /// The keys.
    pub range: Range<usize>,
    /// Value before the final rounding, normalised in itself, `[rows, value width]`.
    pub x: Array2<f64>,
    /// ln Σ exp(s) by the row sum that the contract adds up, `[rows]`.
    pub lse: Vec<f64>,
    /// Scores times scale, −∞ where masked, `[rows, range]`.
    pub s: Array2<f64>,
    /// exp(s − running maximum), before its cast, `[rows, range]`.
    pub p: Array2<f64>,
    /// exp(running maximum − M), `[rows, range]`.
    pub w: Array2<f64>,
    /// Row sum relative to M, `[rows]`; 0 where no key is visible.
    pub l: Vec<f64>,
}

/// Attends over `range`.
pub fn attend(head: &Head, range: Range<usize>, contract: &Contract) -> Attended {
    let (rows, n) = (head.q.nrows(), range.len());
    let mut s = scores(head, range.clone());
    for (i, mut row) in s.rows_mut().into_iter().enumerate() {
        let seen = head.visible[i].saturating_sub(range.start).min(n);
        for (t, v) in row.iter_mut().enumerate() {
            *v = if t < seen { *v * head.scale } else { f64::NEG_INFINITY };
        }
    }
    let (mut p, mut w) = (Array2::zeros((rows, n)), Array2::zeros((rows, n)));
    let (mut l, mut lse) = (vec![0.0; rows], vec![f64::NEG_INFINITY; rows]);
    let mut a = Array2::zeros((rows, n));
    let tiles = contract.tiles(0..n);
    let cast = contract.softmax.p;
    for i in 0..rows {
        let last = s.row(i).iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let nan = s.row(i).iter().any(|v| v.is_nan());
        if last == f64::NEG_INFINITY && !nan {
            continue;
        }
        let mut m = f64::NEG_INFINITY;
        for tile in &tiles {
            m = tile.clone().map(|t| s[[i, t]]).fold(m, f64::max);
            if m == f64::NEG_INFINITY && !nan {
                continue;
            }
            let weight = libm::exp(m - last);
            for t in tile.clone() {
                let e = libm::exp(s[[i, t]] - m);
                let c = cast.map_or(e, |d| d.round(e));
                p[[i, t]] = e;
                w[[i, t]] = weight;
                a[[i, t]] = c * weight;
                l[i] += weight * if contract.softmax.row_sum == RowSum::Rounded { c } else { e };
            }
        }
        for v in a.row_mut(i) {
            *v /= l[i];
        }
        lse[i] = last + libm::log(l[i]);
    }
    let x = weigh(a.view(), &part(&head.v, range.clone()));
    Attended { range, x, lse, s, p, w, l }
}

/// q·k over the range, unscaled and unmasked.
fn scores(head: &Head, range: Range<usize>) -> Array2<f64> {
    let q = head.q.as_standard_layout();
    let mut s = Array2::zeros((q.nrows(), range.len()));
    if let (Some(q), Some(out)) = (q.as_slice(), s.as_slice_mut()) {
        product(q, head.q.nrows(), &part(&head.k, range), out);
    }
    s
}

/// Some rows.
pub fn part<'a>(m: &Strided<'a>, range: Range<usize>) -> Strided<'a> {
    Strided { data: m.data.get(range.start * m.stride..).unwrap_or(&[]), rows: range.len(), ..*m }
}

/// A whole matrix, rows contiguous.
pub fn strided(m: &Array2<f64>) -> Strided<'_> {
    Strided { data: m.as_slice().unwrap_or(&[]), rows: m.nrows(), cols: m.ncols(), stride: m.ncols() }
}

/// `Σ_t a[i][t] · v[t]` over all rows of `v`, `[rows of a, value width]`.
pub fn weigh(a: ArrayView2<f64>, v: &Strided) -> Array2<f64> {
    let mut x = Array2::zeros((a.nrows(), v.cols()));
    let a = a.as_standard_layout();
    if let (Some(a), Some(x)) = (a.as_slice(), x.as_slice_mut()) {
        weighted_sum(a, v, x);
    }
    x
}

/// The merge of partial results of one row: weights W_s ∝ exp(lse_s), and the whole row's lse.
///
/// Splits without a visible key (lse −∞) weigh nothing; if all are, lse is −∞.
pub fn merge_weights(lse: &[f64]) -> (Vec<f64>, f64) {
    let m = lse.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if m == f64::NEG_INFINITY || m.is_nan() || lse.iter().any(|v| v.is_nan()) {
        let all = if lse.iter().any(|v| v.is_nan()) { f64::NAN } else { f64::NEG_INFINITY };
        return (vec![if all.is_nan() { all } else { 0.0 }; lse.len()], all);
    }
    let w: Vec<f64> = lse.iter().map(|v| libm::exp(v - m)).collect();
    let sum: f64 = w.iter().sum();
    (w.iter().map(|v| v / sum).collect(), m + libm::log(sum))
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use mla_numeric::DType;
    use ndarray::array;

    fn naive(q: [f64; 2], k: &Array2<f64>, v: &Array2<f64>, n: usize, scale: f64) -> (Vec<f64>, f64) {
        let e: Vec<f64> = (0..n).map(|t| ((q[0] * k[[t, 0]] + q[1] * k[[t, 1]]) * scale).exp()).collect();
        let sum: f64 = e.iter().sum();
        ((0..v.ncols()).map(|j| (0..n).map(|t| e[t] / sum * v[[t, j]]).sum()).collect(), sum.ln())
    }

    fn data() -> (Array2<f64>, Array2<f64>, Array2<f64>) {
        let f = |i: usize, j: usize, m: f64| ((i * 7 + j * 13) % 11) as f64 / m - 0.6;
        (
            array![[1.0, -0.5], [0.25, 2.0]],
            Array2::from_shape_fn((9, 2), |(i, j)| f(i, j, 5.0)),
            Array2::from_shape_fn((9, 3), |(i, j)| f(j, i, 4.0)),
        )
    }

    #[test]
    fn exact_contract_is_plain_softmax_with_a_causal_mask() {
        let (q, k, v) = data();
        let head = Head { q: q.view(), k: strided(&k), v: strided(&v), visible: &[8, 9], scale: 0.7 };
        let mut tiled = Contract::exact();
        tiled.softmax.tile = 4;
        for c in [Contract::exact(), tiled] {
            let got = attend(&head, 0..9, &c);
            for (i, n) in [8, 9].into_iter().enumerate() {
                let (x, lse) = naive([q[[i, 0]], q[[i, 1]]], &k, &v, n, 0.7);
                assert_relative_eq!(got.lse[i], lse, max_relative = 1e-14);
                for (got, want) in got.x.row(i).iter().zip(&x) {
                    assert_relative_eq!(got, want, max_relative = 1e-13);
                }
            }
        }
    }

    #[test]
    fn parts_merge_to_the_whole() {
        let (q, k, v) = data();
        let head = Head { q: q.view(), k: strided(&k), v: strided(&v), visible: &[8, 9], scale: 0.7 };
        let c = Contract::exact();
        let whole = attend(&head, 0..9, &c);
        let parts: Vec<_> = [0..4, 4..8, 8..9].map(|r| attend(&head, r, &c)).into();
        // The first row does not see key 8.
        assert_eq!(parts[2].lse[0], f64::NEG_INFINITY);
        for i in 0..2 {
            let (w, lse) = merge_weights(&parts.iter().map(|p| p.lse[i]).collect::<Vec<_>>());
            assert_relative_eq!(lse, whole.lse[i], max_relative = 1e-14);
            for j in 0..3 {
                let x: f64 = parts.iter().zip(&w).map(|(p, w)| w * p.x[[i, j]]).sum();
                assert_relative_eq!(x, whole.x[[i, j]], max_relative = 1e-13);
            }
        }
    }

    /// `f64::max` ignores NaN, so a row or a tile of nothing else would pass for one that sees no key.
    #[test]
    fn a_score_that_is_not_a_number_is_never_lost() {
        let (mut q, mut k, v) = data();
        k[[1, 0]] = f64::NAN;
        let attended = |q: &Array2<f64>, k: &Array2<f64>, tile| {
            let head = Head { q: q.view(), k: strided(k), v: strided(&v), visible: &[1, 9], scale: 0.7 };
            let mut c = Contract::exact();
            c.softmax.tile = tile;
            attend(&head, 0..9, &c)
        };
        for tile in [0, 1, 2] {
            // The first row does not see key 1.
            let got = attended(&q, &k, tile);
            assert!(got.lse[0].is_finite() && got.lse[1].is_nan() && got.x.row(1).iter().all(|x| x.is_nan()));
        }
        q.row_mut(1).fill(f64::NAN);
        let got = attended(&q, &k, 2);
        assert!(got.lse[1].is_nan() && got.x.row(1).iter().all(|x| x.is_nan()));
    }

    #[test]
    fn p_is_cast_relative_to_the_running_maximum_of_its_tile() {
        // One column of keys, so scores are q·k = 0, ln 1.003, ln 3: tile of 1, then of 2, then of 3.
        let k = array![[0.0], [1.003f64.ln()], [3f64.ln()]];
        let (q, v) = (array![[1.0]], array![[1.0], [10.0], [100.0]]);
        let head = Head { q: q.view(), k: strided(&k), v: strided(&v), visible: &[3], scale: 1.0 };
        let mut c = Contract::exact();
        c.softmax.p = Some(DType::Bf16);
        let r = |x| DType::Bf16.round(x);
        for (tile, p) in [
            // Tile of 1: each p is exp(0) = 1 relative to its own maximum.
            (1, [1.0, 1.003, 3.0]),
            // Tile of 2: the first is 1/1.003 relative to the tile's maximum.
            (2, [r(1.0 / 1.003) * 1.003, 1.003, 3.0]),
            (3, [r(1.0 / 3.0) * 3.0, r(1.003 / 3.0) * 3.0, 3.0]),
        ] {
            c.softmax.tile = tile;
            let x: f64 = (p[0] + 10.0 * p[1] + 100.0 * p[2]) / (1.0 + 1.003 + 3.0);
            assert_relative_eq!(attend(&head, 0..3, &c).x[[0, 0]], x, max_relative = 1e-14);
        }
    }
}
