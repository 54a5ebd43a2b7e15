/*!
Attention in float64, with the casts that a contract declares: over one range of keys ([`attend`]), or over
several whose results a kernel merges itself ([`attend_split`]).

Tiles are visited in the contract's order; `m` is the running maximum, `p = exp(s − m)` with **this** m,
`p̂ = round(p)` to the declared dtype, `w = exp(m − M)` brings a tile to the final maximum M. Then
`x = Σ p̂ w v / l`, `l = Σ p w` (or `Σ p̂ w`), `lse = M + ln l`. With [`Contract::exact`] this is plain softmax.

A row that sees no key of the range has x = 0 and lse = −∞. One NaN among the scores that a row sees makes its
x and lse NaN, as it does in every kernel.
*/

use crate::contract::{Contract, RowSum, Softmax};
use crate::departure::Slip;
use crate::key_stats::KeyStats;
use crate::product::{Rows, Strided, product, weighted_sum};
use ndarray::{Array2, ArrayView2, Axis, s};
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
    /// What bounds and statistics need of `k` and `v` alone; shared by all heads that have the same.
    pub stats: &'a KeyStats,
}

/// Weights of the upper half of the columns, where a contract pairs tiles.
pub struct Upper {
    /// First of these columns.
    pub first: usize,
    /// As [`Attended::p`], relative to the maximum so far of whole pairs.
    pub p: Array2<f64>,
    /// As [`Attended::w`].
    pub w: Array2<f64>,
}

/// Attention over a range of keys, with what bounds and statistics need.
pub struct Attended {
    /// The keys.
    pub range: Range<usize>,
    /// Value before the final rounding, normalised in itself, `[rows, value width]`.
    pub x: Array2<f64>,
    /// ln Σ exp(s) by the row sum that the contract adds up, `[rows]`.
    pub lse: Vec<f64>,
    /// Scores times scale, as the contract rounds them, −∞ where masked, `[rows, range]`.
    pub s: Array2<f64>,
    /// exp(s − running maximum), before its cast, `[rows, range]`; of a contract that normalises P first,
    /// that P.
    pub p: Array2<f64>,
    /// exp(running maximum − M), `[rows, range]`; 1 where P is normalised first.
    pub w: Array2<f64>,
    /// Row sum relative to M, `[rows]`; 0 where no key is visible. 1 where P is normalised first.
    pub l: Vec<f64>,
    /// p and w of the upper half of the columns, where they differ.
    pub upper: Option<Upper>,
    /// q·k before any cast, `[rows, range]`, where the contract casts scores.
    pub raw: Option<Array2<f64>>,
}

/// Columns with one set of weights.
pub struct Group<'a> {
    /// The columns.
    pub columns: Range<usize>,
    /// As [`Attended::p`].
    pub p: &'a Array2<f64>,
    /// As [`Attended::w`].
    pub w: &'a Array2<f64>,
}

impl Attended {
    /// Some rows.
    pub fn select(&self, rows: &[usize]) -> Attended {
        let matrix = |m: &Array2<f64>| m.select(Axis(0), rows);
        let list = |v: &[f64]| rows.iter().map(|i| v[*i]).collect();
        let upper = |u: &Upper| Upper { first: u.first, p: matrix(&u.p), w: matrix(&u.w) };
        Attended {
            range: self.range.clone(),
            x: matrix(&self.x),
            lse: list(&self.lse),
            s: matrix(&self.s),
            p: matrix(&self.p),
            w: matrix(&self.w),
            l: list(&self.l),
            upper: self.upper.as_ref().map(upper),
            raw: self.raw.as_ref().map(matrix),
        }
    }

    /// Groups of columns that share weights: one, or the two halves.
    pub fn groups(&self) -> Vec<Group<'_>> {
        let n = self.x.ncols();
        match &self.upper {
            None => Vec::from([Group { columns: 0..n, p: &self.p, w: &self.w }]),
            Some(u) => Vec::from([
                Group { columns: 0..u.first, p: &self.p, w: &self.w },
                Group { columns: u.first..n, p: &u.p, w: &u.w },
            ]),
        }
    }
}

/// Attends over `range`.
pub fn attend(head: &Head, range: Range<usize>, contract: &Contract) -> Attended {
    attend_as(head, range, contract, Slip::default())
}

/// The same with a slip that an engine may make.
pub fn attend_as(head: &Head, range: Range<usize>, contract: &Contract, slip: Slip) -> Attended {
    let (rows, n) = (head.q.nrows(), range.len());
    let soft = &contract.softmax;
    let mut s = scores(head, range.clone());
    let raw = soft.casts_scores().then(|| s.clone());
    let factor = contract.score_factor(head.scale);
    for (i, mut row) in s.rows_mut().into_iter().enumerate() {
        let seen = head.visible[i].saturating_sub(range.start).min(n);
        for (t, v) in row.iter_mut().enumerate() {
            let sees = t < seen && slip.gone.binary_search(&(range.start + t)).is_err();
            *v = if sees { scaled(*v, factor, contract) } else { f64::NEG_INFINITY };
        }
    }
    let tiles = contract.tiles(0..n);
    let by = |many: usize| tiles.chunks(many).collect::<Vec<_>>();
    let values = part(&head.v, range.clone());
    let own = if soft.normalised { normalised(&s, contract) } else { weights(&s, &by(1), contract, slip) };
    if !soft.pairs || soft.normalised {
        let x = weigh(own.a.view(), &values);
        let Weights { p, w, l, lse, .. } = own;
        return Attended { range, x, lse, s, p, w, l, upper: None, raw };
    }
    let mut above = weights(&s, &by(2), contract, slip);
    // Both halves are divided by the one row sum.
    for i in 0..rows {
        let by = above.l[i] / own.l[i];
        above.a.row_mut(i).mapv_inplace(|v| if own.l[i] > 0.0 { v * by } else { v });
    }
    let first = values.cols.div_ceil(2);
    let low = Strided { cols: first, ..values };
    let high = Strided { data: values.data.get(first..).unwrap_or(&[]), cols: values.cols - first, ..values };
    let mut x = Array2::zeros((rows, values.cols));
    x.slice_mut(s![.., ..first]).assign(&weigh(own.a.view(), &low));
    x.slice_mut(s![.., first..]).assign(&weigh(above.a.view(), &high));
    let upper = Some(Upper { first, p: above.p, w: above.w });
    let Weights { p, w, l, lse, .. } = own;
    Attended { range, x, lse, s, p, w, l, upper, raw }
}

/// A score from q·k, with the casts that the contract declares.
pub fn scaled(raw: f64, factor: f64, contract: &Contract) -> f64 {
    let cast = |on: bool, v: f64| if on { contract.activations.round(v) } else { v };
    cast(contract.softmax.cast_scaled, cast(contract.softmax.cast_raw, raw) * factor)
}

/// Weights of all keys of a range.
struct Weights {
    p: Array2<f64>,
    w: Array2<f64>,
    l: Vec<f64>,
    lse: Vec<f64>,
    /// Cast p times w over l: what values are weighed with.
    a: Array2<f64>,
}

/// Online softmax over groups of tiles, each group relative to the maximum so far.
fn weights(s: &Array2<f64>, groups: &[&[Range<usize>]], contract: &Contract, slip: Slip) -> Weights {
    let (rows, n) = s.dim();
    let (mut p, mut w) = (Array2::zeros((rows, n)), Array2::zeros((rows, n)));
    let (mut l, mut lse) = (vec![0.0; rows], vec![f64::NEG_INFINITY; rows]);
    let mut a = Array2::zeros((rows, n));
    let cast = contract.softmax.cast();
    for i in 0..rows {
        let last = s.row(i).iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let nan = s.row(i).iter().any(|v| v.is_nan());
        if last == f64::NEG_INFINITY && !nan {
            continue;
        }
        let mut m = f64::NEG_INFINITY;
        let most = |group: &[Range<usize>]| {
            group.iter().cloned().flatten().map(|t| s[[i, t]]).fold(f64::NEG_INFINITY, f64::max)
        };
        // The group that sums are not rescaled at, and the maximum before it.
        let slips = slip.no_last_rescale.then(|| {
            let end = groups.iter().rposition(|g| most(g) > f64::NEG_INFINITY).unwrap_or(0);
            (end, groups[..end].iter().map(|g| most(g)).fold(f64::NEG_INFINITY, f64::max))
        });
        for (at, group) in groups.iter().enumerate() {
            m = group.iter().cloned().flatten().map(|t| s[[i, t]]).fold(m, f64::max);
            if m == f64::NEG_INFINITY && !nan {
                continue;
            }
            let whole = match slips {
                Some((end, before)) if at < end => libm::exp(m - before),
                _ => libm::exp(m - last),
            };
            let (weight, of_sum) = slip.rescale.weights(whole);
            for t in group.iter().cloned().flatten() {
                let e = libm::exp(s[[i, t]] - m);
                let c = cast.map_or(e, |d| d.round(e));
                p[[i, t]] = e;
                w[[i, t]] = weight;
                a[[i, t]] = c * weight;
                l[i] += of_sum * if contract.softmax.row_sum == RowSum::Rounded { c } else { e };
            }
        }
        for v in a.row_mut(i) {
            *v /= l[i];
        }
        lse[i] = last + libm::log(l[i]);
    }
    Weights { p, w, l, lse, a }
}

/// Softmax of whole rows, divided by the row sum before the cast.
fn normalised(s: &Array2<f64>, contract: &Contract) -> Weights {
    let all = 0..s.ncols();
    let uncast = Contract { softmax: Softmax { p: None, ..contract.softmax }, ..*contract };
    let mut got = weights(s, &[std::slice::from_ref(&all)], &uncast, Slip::default());
    got.p.assign(&got.a);
    for (l, mut w) in got.l.iter_mut().zip(got.w.rows_mut()) {
        if *l != 0.0 {
            *l = 1.0;
            w.fill(1.0);
        }
    }
    if let Some(cast) = contract.softmax.cast() {
        got.a.mapv_inplace(|v| cast.round(v));
    }
    got
}

/// A state that the last step of a merge adds up: some splits, merged.
pub struct Joined {
    /// Which parts.
    pub parts: Vec<usize>,
    /// Merged value before it is stored, `[rows, value width]`.
    pub x: Array2<f64>,
    /// The same as stored.
    pub stored: Array2<f64>,
    /// Weight in the result, `[rows]`.
    pub weight: Vec<f64>,
}

/// Attention whose splits are merged inside the kernel, so that nobody sees partial results.
///
/// `x = Σ_g W_g y_g` over states g, `y_g = Σ_{s in g} (W_s/W_g) cast(x_s)`, `W_s ∝ exp(lse_s)`. Without merge groups
/// all parts are one state; with them y_g is cast once more.
pub struct Merged {
    /// Splits that hold keys, in order.
    pub parts: Vec<Attended>,
    /// W_s, `[parts, rows]`.
    pub weights: Array2<f64>,
    /// What the merge reads: the parts' x as they are stored.
    pub stored: Vec<Array2<f64>>,
    /// States that the last step adds up.
    pub states: Vec<Joined>,
    /// Value before the final rounding, `[rows, value width]`.
    pub x: Array2<f64>,
    /// lse of all keys, `[rows]`.
    pub lse: Vec<f64>,
}

/// Attends over splits and merges them. `ranges`: keys of the splits, those of [`Contract::split_ranges`] or what
/// a scheduler dealt; empty ones don't count. A contract that normalises P first has no splits.
pub fn attend_split(head: &Head, ranges: &[Range<usize>], contract: &Contract) -> Merged {
    attend_split_as(head, ranges, contract, Slip::default(), 1.0)
}

/// The same with a slip in each part, and weights `W_s ∝ exp(power · lse_s)`.
pub fn attend_split_as(
    head: &Head,
    ranges: &[Range<usize>],
    contract: &Contract,
    slip: Slip,
    power: f64,
) -> Merged {
    let mut ranges: Vec<Range<usize>> = ranges.iter().filter(|r| !r.is_empty()).cloned().collect();
    if contract.softmax.normalised || ranges.is_empty() {
        let end = ranges.iter().map(|r| r.end).max().unwrap_or(0);
        let whole = ranges.first().map_or(0, |r| r.start)..end;
        ranges = std::iter::once(whole).collect();
    }
    let parts: Vec<Attended> = ranges.into_iter().map(|r| attend_as(head, r, contract, slip)).collect();
    let rows = head.q.nrows();
    let (mut weights, mut lse) = (Array2::zeros((parts.len(), rows)), vec![0.0; rows]);
    for (i, total) in lse.iter_mut().enumerate() {
        let own: Vec<f64> = parts.iter().map(|p| p.lse[i]).collect();
        let (w, all) = merge_weights_as(&own, power);
        weights.column_mut(i).iter_mut().zip(w).for_each(|(to, w)| *to = w);
        *total = all;
    }
    let cast = contract.part_cast().filter(|_| parts.len() > 1);
    let round = |x: &Array2<f64>, on: bool| match cast.filter(|_| on) {
        Some(d) => x.mapv(|v| d.round(v)),
        None => x.clone(),
    };
    let stored: Vec<Array2<f64>> = parts.iter().map(|p| round(&p.x, true)).collect();
    let apart = contract.merge_groups.unwrap_or(parts.len()).clamp(1, parts.len());
    // Without groups every part is a state of its own: one sum.
    let state = |g: usize| {
        let members: Vec<usize> = (g..parts.len()).step_by(apart).collect();
        let weight: Vec<f64> = (0..rows).map(|i| members.iter().map(|s| weights[[*s, i]]).sum()).collect();
        let mut x = Array2::zeros(parts[g].x.dim());
        for &s in &members {
            for i in 0..rows {
                // A weight of zero adds nothing, whatever it is multiplied with; NaN stays.
                if weight[i] != 0.0 {
                    x.row_mut(i).scaled_add(weights[[s, i]] / weight[i], &stored[s].row(i));
                }
            }
        }
        let stored = round(&x, contract.merge_groups.is_some());
        Joined { parts: members, x, stored, weight }
    };
    let states: Vec<Joined> = (0..apart).map(state).collect();
    let mut x = Array2::zeros(parts[0].x.dim());
    for joined in &states {
        for i in 0..rows {
            if joined.weight[i] != 0.0 {
                x.row_mut(i).scaled_add(joined.weight[i], &joined.stored.row(i));
            }
        }
    }
    Merged { parts, weights, stored, states, x, lse }
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
    merge_weights_as(lse, 1.0)
}

/// The same with weights `W_s ∝ exp(power · lse_s)`, as a wrong base of the logarithm makes them.
pub fn merge_weights_as(lse: &[f64], power: f64) -> (Vec<f64>, f64) {
    let m = lse.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if m == f64::NEG_INFINITY || m.is_nan() || lse.iter().any(|v| v.is_nan()) {
        let all = if lse.iter().any(|v| v.is_nan()) { f64::NAN } else { f64::NEG_INFINITY };
        return (vec![if all.is_nan() { all } else { 0.0 }; lse.len()], all);
    }
    let w: Vec<f64> =
        lse.iter().map(|v| if *v == f64::NEG_INFINITY { 0.0 } else { libm::exp((v - m) * power) }).collect();
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
        let head = Head {
            q: q.view(),
            k: strided(&k),
            v: strided(&v),
            visible: &[8, 9],
            scale: 0.7,
            stats: &KeyStats::default(),
        };
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
        let head = Head {
            q: q.view(),
            k: strided(&k),
            v: strided(&v),
            visible: &[8, 9],
            scale: 0.7,
            stats: &KeyStats::default(),
        };
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
            let head = Head {
                q: q.view(),
                k: strided(k),
                v: strided(&v),
                visible: &[1, 9],
                scale: 0.7,
                stats: &KeyStats::default(),
            };
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
        let head = Head {
            q: q.view(),
            k: strided(&k),
            v: strided(&v),
            visible: &[3],
            scale: 1.0,
            stats: &KeyStats::default(),
        };
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

    /// Scores ln of these, against the query 1.
    fn keys(weights: &[f64]) -> Array2<f64> {
        Array2::from_shape_fn((weights.len(), 1), |(t, _)| weights[t].ln())
    }

    fn close(got: f64, want: f64) {
        assert_relative_eq!(got, want, max_relative = 1e-14);
    }

    #[test]
    fn pairs_of_tiles_share_a_maximum_in_the_upper_columns() {
        // Tiles of one key: in the lower column each p is exp(0) = 1, in the upper one the first of a pair is
        // relative to the larger of the two, and the odd one out to itself.
        let (k, q) = (keys(&[1.0, 1.003, 1.01]), array![[1.0]]);
        let v = array![[1.0, 1.0], [10.0, 10.0], [100.0, 100.0]];
        let stats = KeyStats::default();
        let head =
            Head { q: q.view(), k: strided(&k), v: strided(&v), visible: &[3], scale: 1.0, stats: &stats };
        let mut c = Contract::exact();
        (c.softmax.p, c.softmax.tile, c.softmax.pairs) = (Some(DType::Bf16), 1, true);
        let a = attend(&head, 0..3, &c);
        let sum = 1.0 + 1.003 + 1.01;
        let first = DType::Bf16.round(1.0 / 1.003) * 1.003;
        close(a.x[[0, 0]], (1.0 + 10.0 * 1.003 + 100.0 * 1.01) / sum);
        close(a.x[[0, 1]], (first + 10.0 * 1.003 + 100.0 * 1.01) / sum);
        assert!(first != 1.0);
        // The row sum is that of the lower columns, cast or not.
        c.softmax.row_sum = RowSum::Rounded;
        close(attend(&head, 0..3, &c).l[0], sum / 1.01);
        assert_eq!(a.groups().iter().map(|g| g.columns.clone()).collect::<Vec<_>>(), [0..1, 1..2]);
    }

    #[test]
    fn p_may_be_normalised_before_its_cast_and_scores_cast_before_that() {
        let (k, q, v) = (array![[0.705], [0.3]], array![[1.01]], array![[1.0], [3.0]]);
        let stats = KeyStats::default();
        let head =
            Head { q: q.view(), k: strided(&k), v: strided(&v), visible: &[2], scale: 0.9, stats: &stats };
        let r = |x| DType::Bf16.round(x);
        let mut c = Contract { activations: DType::Bf16, ..Contract::exact() };
        (c.softmax.p, c.softmax.normalised) = (Some(DType::Bf16), true);
        (c.softmax.cast_raw, c.softmax.cast_scaled) = (true, true);
        let s = [0.705, 0.3].map(|k| r(r(1.01 * k) * 0.9));
        let sum: f64 = s.iter().map(|s| s.exp()).sum();
        let p = s.map(|s| r(s.exp() / sum));
        let a = attend(&head, 0..2, &c);
        close(a.x[[0, 0]], p[0] + 3.0 * p[1]);
        close(a.lse[0], sum.ln());
        assert_eq!(a.raw, Some(array![[1.01 * 0.705, 1.01 * 0.3]]));
        // One of the two alone.
        c.softmax.cast_scaled = false;
        let s = [0.705, 0.3].map(|k| r(1.01 * k) * 0.9);
        close(attend(&head, 0..2, &c).lse[0], s.iter().map(|s| s.exp()).sum::<f64>().ln());
        assert!((s[0] - 1.01 * 0.705 * 0.9).abs() > 1e-3);
        // Splits play no part.
        assert_eq!(attend_split(&head, &[0..1, 1..2], &c).x, attend(&head, 0..2, &c).x);
        // A cast of unknown place is not emulated.
        (c.softmax.emulate, c.softmax.cast_raw) = (false, false);
        let e = [0.705, 0.3].map(|k| (1.01f64 * k * 0.9).exp());
        close(attend(&head, 0..2, &c).x[[0, 0]], (e[0] + 3.0 * e[1]) / (e[0] + e[1]));
    }

    #[test]
    fn narrow_partials_are_cast_once_or_twice() {
        // Four splits of one key: x_s is its value, W_s its weight over 1 + 2 + 3 + 4.
        let (k, q) = (keys(&[1.0, 2.0, 3.0, 4.0]), array![[1.0]]);
        let v = array![[1.003], [2.01], [3.01], [4.03]];
        let stats = KeyStats::default();
        let head =
            Head { q: q.view(), k: strided(&k), v: strided(&v), visible: &[4], scale: 1.0, stats: &stats };
        let r = |x| DType::Bf16.round(x);
        let parts = [0..1, 1..2, 2..3, 3..4];
        let mut c = Contract { partials: DType::Bf16, ..Contract::exact() };
        let stored: Vec<f64> = v.iter().map(|v| r(*v)).collect();
        let once: f64 = stored.iter().zip([0.1, 0.2, 0.3, 0.4]).map(|(v, w)| v * w).sum();
        let m = attend_split(&head, &parts, &c);
        close(m.x[[0, 0]], once);
        close(m.lse[0], 10f64.ln());
        assert_eq!((m.states.len(), m.parts.len()), (4, 4));
        // Partials 0 and 2, 1 and 3 first, and those two states once more.
        c.merge_groups = Some(2);
        let groups = [(stored[0] * 0.25 + stored[2] * 0.75, 0.4), ((stored[1] + 2.0 * stored[3]) / 3.0, 0.6)];
        let twice: f64 = groups.iter().map(|(y, w)| r(*y) * w).sum();
        let m = attend_split(&head, &parts, &c);
        close(m.x[[0, 0]], twice);
        assert_eq!(m.states.iter().map(|s| s.parts.clone()).collect::<Vec<_>>(), [vec![0, 2], vec![1, 3]]);
        assert!((once - twice).abs() > 1e-4);
        // One split is stored nowhere.
        assert_eq!(attend_split(&head, &[0..4, 4..4], &c).x, attend(&head, 0..4, &c).x);
    }
}
