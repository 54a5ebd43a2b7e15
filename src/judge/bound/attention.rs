/*!
Bounds of attention: over one range of keys, and over splits that the engine merges itself.

With ε_t the bound of p_t's relative error,
`ε_t = Δs_t + max Δs + 6u·max|s| + (2⁻²² + u)(1 + r)` (6u·max|s|: products with scale·log₂e and with the
maximum, their differences, which telescope; 2⁻²²: the exponential, once for p and once for each of the r times that
the running maximum grows and o and l are rescaled; once more, and 2u, where a pair of tiles rescales p),
`B_j = Σ_t (ε_t + n·unit) P_t |v_tj| + |x_j|(Σ_t ε_t P_t + λ) + Σ_{t near a tie} step(p_t) w_t |v_tj| / l`,
λ = (tile + 2T/tile + 5)u: the row sum, in a tile and across tiles.
Only a p within ε_t·p of the middle between two values of the cast's grid can be cast to the other one; where the
row sum takes cast p, l moves too, by `moved = Σ step(p_t) w_t / l`, and x by |x_j| · moved.
n counts the roundings of P·V, three a tile for rescaling, six for the end.
Σ_t a_t |v_tj| is taken by pages of keys: Σ over pages of (Σ a_t) · max |v_tj|, never less. Flips are taken exactly,
those of the proven bound from a weight of 2⁻¹³ on: a long context has many smaller ones.

- **Scores** q·k: Δs_t is γ‖q‖‖k_t‖·factor, proven, or statistical ([`Basis`]). A declared cast moves a score by what
  its error before moves the cast value.
- **P normalised before its cast**: p errs by ε_t + Σ ε P + λ + u, the step is of that p, and nothing is divided
  afterwards.
- **P's cast of unknown place**: 2^-precision of each P_t, half the smallest spacing at least; with cast row sums
  of the row sum too. Tiles are unknown as well: of 16 keys for what counts tiles, one sum of all keys for λ.
- **lse**: `max ε + λ + moved + 2u|lse|`.
- **Splits**: with B_s and the bound η_s of the relative error of the weight W_s (that of lse_s, and
  `4u(spread + 1) + 2⁻²² + (splits + 6)u` for its exponent), both computed in each split alone; D_s = B_s, or what B_s
  moves the cast of x_s by where partials are of 16 bits; ŷ_s what is stored; η̄ = Σ W η. Weights sum to one whatever
  their errors, so these act on differences alone:
  `B = Σ W_s [(1 + η_s + η̄) D_s + (η_s + η̄)|ŷ_s − x|] / (1 − η̄) + (splits + 2)u Σ W_s|ŷ_s|`.
  Merge groups do the same twice, with the step of the second cast between. lse: `η̄/(1 − η̄) + 3u|lse|`.
- **Underflow**: see the parent module.
*/

use super::{EXP2, FLUSH, TINY, running};
use mla_numeric::{DType, U};
use mla_reference::attention::{Attended, Group, Head, Merged, part, strided, weigh};
use mla_reference::elementwise::step;
use mla_reference::key_stats::PAGE;
use mla_reference::{Accumulate, Contract, RowSum};
use ndarray::{Array2, ArrayView1, ArrayViewMut1, s};

/// Standard deviations that the statistical error of a score allows, for accumulators that round to nearest.
pub const LAMBDA: f64 = 9.0;
/// ln of the probability that one score of an honest engine breaks its statistical bound: ln 2 − λ²/2, 5·10⁻¹⁸.
/// A run of 10⁹ scores breaks it with 5·10⁻⁹.
pub const LOG_P_SCORE: f64 = std::f64::consts::LN_2 - LAMBDA * LAMBDA / 2.0;

/// What the error of a score and of an accumulator rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// Proven for any data.
    Proven,
    /// Δs in units of `u√n‖q‖‖k‖·scale/√D`, n roundings and D columns of a key.
    ///
    /// Roundings to nearest, uniform in their cells and independent, are sub-Gaussian with their own variance:
    /// P(|Δs| > λκ units) ≤ 2exp(−λ²/2) where κ is their spread in these units. Measured 0.30 where partial sums
    /// grow as a random walk; κ = 0.6 leaves room for partial sums twice as large. λ = 9: 5.4 units.
    /// Truncating accumulators have no such law: 12 units, at n = 36 five times the largest of 10⁵ errors of real
    /// tensor cores (2.4 n u‖a‖‖w‖/√K, of which 0.35√n units are one spread). What they drift where a score grows
    /// steadily, up to n·u|s|, is covered by 6u·max|s| besides, as long as n ≤ 6 + 12√n‖q‖‖k‖/(√D|q·k|).
    /// A rounding of an accumulator counts 2u where it truncates (tensor cores measured: 0.66 of that at most).
    Statistical,
    /// As the statistical one, with Δs from the terms of each score ([`super::running::likely`]).
    Closer,
}

/// Bounds of values and lse.
pub struct Bounds {
    /// `[rows, value width]`.
    pub x: Array2<f64>,
    /// `[rows]`.
    pub lse: Vec<f64>,
}

impl Bounds {
    /// One of the two, lse as a column.
    pub fn of(self, lse: bool) -> Array2<f64> {
        if !lse {
            return self.x;
        }
        Array2::from_shape_vec((self.lse.len(), 1), self.lse).unwrap_or_default()
    }
}

/// Numbers that hold for a range of keys.
struct Sizes {
    /// Error of q·k in units of ‖q‖‖k‖.
    score: f64,
    /// Roundings of P·V and the end times their unit.
    values: f64,
    /// λ.
    sum: f64,
    /// What underflow adds to an output.
    tiny: f64,
}

impl Sizes {
    fn new(basis: Basis, contract: &Contract, keys: usize, width: usize) -> Sizes {
        let acc = contract.accumulate;
        let soft = &contract.softmax;
        let unplaced = soft.unplaced().is_some();
        let tile = match soft.tile {
            _ if unplaced => 16,
            0 => keys.max(1),
            tile => tile,
        };
        let tiles = if soft.normalised { 0 } else { keys.div_ceil(tile) };
        let summed = if unplaced || soft.normalised { keys } else { tile };
        let steps = (acc.roundings(keys) + 3 * tiles + 6) as f64;
        let (unit, score) = match (basis, acc) {
            (_, Accumulate::Exact) => (0.0, acc.gamma(width)),
            (Basis::Proven, _) => (acc.unit(), acc.gamma(width)),
            (Basis::Statistical | Basis::Closer, _) => {
                let (unit, units) = if acc.drifts() { (2.0, 12.0) } else { (1.0, 0.6 * LAMBDA) };
                let (n, width) = (acc.steps(width) as f64, width.max(1) as f64);
                (unit * U, units * U * (n / width).sqrt())
            }
        };
        Sizes {
            score,
            values: steps * unit,
            sum: (summed as f64 + 2.0 * keys as f64 / tile as f64 + 5.0) * U,
            tiny: steps * TINY,
        }
    }
}

/// Roundings of P·V over so many keys and of the end, times their unit.
pub fn value_error(contract: &Contract, keys: usize) -> f64 {
    Sizes::new(Basis::Proven, contract, keys, 1).values
}

/// Flips of less than this weight go into pages of keys where the basis is proven: there may be many.
const FINE: f64 = 1.0 / 8192.0;

/// A cast of P, for a whole row at a time.
struct Cast {
    dtype: DType,
    /// Spacing over the power of two below a normal value.
    relative: f64,
    normal: f64,
    rounded: Vec<f64>,
}

impl Cast {
    fn new(dtype: DType) -> Cast {
        let relative = f64::powi(2.0, 1 - dtype.precision() as i32);
        Cast { dtype, relative, normal: f64::powi(2.0, dtype.min_exponent()), rounded: Vec::new() }
    }

    fn round(&mut self, p: ArrayView1<f64>) {
        self.rounded.clear();
        self.rounded.extend(p);
        self.dtype.round_slice(&mut self.rounded);
    }

    /// Whether an error of `by` can move the row's p across the middle between two values of the grid; the step.
    fn near_tie(&self, t: usize, p: f64, by: f64) -> Option<f64> {
        let spacing = if p >= self.normal {
            f64::from_bits(p.to_bits() & (0x7ff << 52)) * self.relative
        } else {
            self.dtype.spacing(p)
        };
        let off = (p - self.rounded[t]).abs();
        // Both ties around: the nearer one, or the one below a power of two, where the grid is twice as fine.
        if (spacing / 2.0 - off).min(spacing / 4.0 + off) > by {
            return None;
        }
        let s = step(self.dtype, p, by);
        (s > 0.0).then_some(s)
    }
}

/// Δs_t in natural units, for a score whose q·k errs by `by`; `raw`: q·k where scores are cast.
pub fn score_error(contract: &Contract, factor: f64, by: f64, raw: Option<f64>) -> f64 {
    let Some(raw) = raw else { return by * factor.abs() };
    let (soft, dtype) = (&contract.softmax, contract.activations);
    let (mut by, mut value) = (by, raw);
    if soft.cast_raw {
        (by, value) = (step(dtype, raw, by), dtype.round(raw));
    }
    value *= factor;
    by = by * factor.abs() + U * value.abs();
    if soft.cast_scaled { step(dtype, value, by) } else { by }
}

/// Bounds of a row's weights.
struct Row {
    /// ε_t for each key; 0 where it is not seen.
    e: Vec<f64>,
    /// Σ ε P.
    mean: f64,
    /// max ε.
    most: f64,
}

fn row(
    basis: Basis,
    contract: &Contract,
    a: &Attended,
    head: &Head,
    i: usize,
    sizes: &Sizes,
    norms: &[f64],
) -> Row {
    let n = a.range.len();
    let factor = contract.score_factor(head.scale);
    let query = head.q.row(i).to_vec();
    let q = query.iter().map(|v| v * v).sum::<f64>().sqrt();
    let keys = part(&head.k, a.range.clone());
    let key =
        |t: usize| keys.data.get(t * keys.stride..).and_then(|k| k.get(..keys.cols)).unwrap_or_default();
    let (scores, ps, ws) = (a.s.row(i), a.p.row(i), a.w.row(i));
    let (mut worst, mut largest, mut rescaled) = (0.0f64, 0.0f64, 0usize);
    let mut e = vec![0.0; n];
    let mut before = None;
    for (t, (((e, s), w), norm)) in e.iter_mut().zip(scores).zip(ws).zip(norms).enumerate() {
        if *s == f64::NEG_INFINITY {
            continue;
        }
        let raw = a.raw.as_ref().map(|r| r[[i, t]]);
        let by = match basis {
            Basis::Closer => running::likely(contract.accumulate, &query, key(t)),
            _ => sizes.score * q * norm,
        };
        *e = score_error(contract, factor, by, raw);
        worst = worst.max(*e);
        largest = largest.max(s.abs());
        rescaled += usize::from(before.is_some_and(|b| b != *w));
        before = Some(*w);
    }
    if contract.softmax.unplaced().is_some() {
        rescaled = n.div_ceil(16);
    }
    let common = worst + 6.0 * U * largest + (EXP2 + U) * (1 + rescaled) as f64;
    let (mut sum, mut most) = (0.0, 0.0f64);
    for (((e, s), p), w) in e.iter_mut().zip(scores).zip(ps).zip(ws) {
        if *s > f64::NEG_INFINITY {
            *e += common;
            sum += *e * p * w;
            most = most.max(*e);
        }
    }
    Row { e, mean: sum / a.l[i], most }
}

/// Bounds of attention over one range of keys; those of values only where they are asked for.
pub fn range(basis: Basis, contract: &Contract, a: &Attended, head: &Head, of_values: bool) -> Bounds {
    let (n, rows) = (a.range.len(), a.x.nrows());
    let sizes = Sizes::new(basis, contract, n, head.k.cols);
    let norms = head.stats.norms(head).get(a.range.clone()).unwrap_or_default();
    let values = part(&head.v, a.range.clone());
    let soft = &contract.softmax;
    let rounded = soft.row_sum == RowSum::Rounded;
    let fine = if basis == Basis::Proven { FINE } else { 0.0 };
    let (mut lse, mut of_x) = (vec![0.0; rows], vec![0.0; rows]);
    let mut b = Array2::zeros(if of_values { a.x.dim() } else { (0, 0) });
    let all: Vec<Row> = (0..rows)
        .map(|i| match a.l[i] {
            0.0 => Row { e: Vec::new(), mean: 0.0, most: 0.0 },
            _ => row(basis, contract, a, head, i, &sizes, norms),
        })
        .collect();
    for (g, Group { columns, p, w }) in a.groups().into_iter().enumerate() {
        let extra = if g > 0 { EXP2 + 2.0 * U } else { 0.0 };
        let mut cast = soft.cast().map(Cast::new);
        let mut pages = Array2::zeros((rows, n.div_ceil(PAGE)));
        let mut flips: Vec<(usize, usize, f64)> = Vec::new();
        for (i, r) in all.iter().enumerate().filter(|(_, r)| !r.e.is_empty()) {
            let divided = if soft.normalised { r.mean + sizes.sum + U } else { 0.0 };
            let (mut moved, per) = (0.0, 1.0 / a.l[i]);
            let row = p.row(i);
            if let Some(cast) = &mut cast {
                cast.round(row);
            }
            let mut pages = pages.row_mut(i);
            for (t, (((p, w), s), e)) in row.iter().zip(w.row(i)).zip(a.s.row(i)).zip(&r.e).enumerate() {
                let (p, w) = (*p, w * per);
                if *s == f64::NEG_INFINITY {
                    continue;
                }
                let e = e + extra + divided;
                let mut weight = (e + sizes.values) * p * w + FLUSH * w;
                if let Some(cast) = soft.unplaced() {
                    let free = f64::powi(2.0, -(cast.precision() as i32)) * p * w + cast.spacing(0.0) / 2.0;
                    weight += free;
                    moved += free;
                } else if let Some(step) = cast.as_ref().and_then(|cast| cast.near_tie(t, p, e * p)) {
                    let flip = step * w;
                    moved += flip;
                    if flip < fine {
                        weight += flip;
                    } else {
                        flips.push((i, t, flip));
                    }
                }
                pages[t / PAGE] += weight;
            }
            // The row sum belongs to the first group.
            if g == 0 {
                let moved = if rounded && !soft.normalised { moved } else { 0.0 };
                of_x[i] = if soft.normalised { 0.0 } else { r.mean + sizes.sum + moved };
                lse[i] = r.most + sizes.sum + 2.0 * U * a.lse[i].abs() + moved;
            }
        }
        if !of_values {
            // The first group has the row sum.
            break;
        }
        let keys = head.stats.range(head, a.range.clone());
        let maxima = keys.maxima.slice(s![.., columns.clone()]).as_standard_layout().into_owned();
        let mut own = weigh(pages.view(), &strided(&maxima));
        for (i, t, flip) in flips {
            let at = t * values.stride;
            let v = values.data.get(at..at + values.cols).and_then(|v| v.get(columns.clone()));
            let of_row = own.row_mut(i).into_iter().zip(v.unwrap_or_default());
            of_row.for_each(|(b, v)| *b += flip * v.abs());
        }
        b.slice_mut(s![.., columns]).assign(&own);
    }
    for ((i, j), b) in b.indexed_iter_mut() {
        if a.l[i] != 0.0 {
            *b += a.x[[i, j]].abs() * of_x[i] + sizes.tiny;
        }
    }
    Bounds { x: b, lse }
}

/// Something that a merge adds up, row by row.
struct Summand<'a> {
    weight: f64,
    /// η.
    error: f64,
    /// ŷ.
    stored: ArrayView1<'a, f64>,
    /// D.
    bound: ArrayView1<'a, f64>,
}

/// Bound of `Σ W ŷ / Σ W = y` of one row into `out`; gives η̄/(1 − η̄).
fn sum(of: &[Summand], y: ArrayView1<f64>, mut out: ArrayViewMut1<f64>) -> f64 {
    let total: f64 = of.iter().map(|s| s.weight).sum();
    if total.is_nan() || total <= 0.0 {
        return 0.0;
    }
    let mean = of.iter().map(|s| s.weight * s.error).sum::<f64>() / total;
    // An error as large as the thing itself: nothing is known.
    let left = if mean < 1.0 { 1.0 - mean } else { return f64::INFINITY };
    let roundings = (of.len() as f64 + 2.0) * U;
    for s in of.iter().filter(|s| s.weight > 0.0) {
        let (w, e) = (s.weight / total, s.error + mean);
        for (j, b) in out.iter_mut().enumerate() {
            *b += w * ((1.0 + e) * s.bound[j] + e * (s.stored[j] - y[j]).abs()) / left
                + roundings * w * s.stored[j].abs();
        }
    }
    mean / left
}

/// Bounds of attention over splits that are merged inside.
pub fn merged(basis: Basis, contract: &Contract, m: &Merged, head: &Head) -> Bounds {
    let mut parts: Vec<Bounds> = m.parts.iter().map(|a| range(basis, contract, a, head, true)).collect();
    if parts.len() == 1 {
        return parts.swap_remove(0);
    }
    let rows = m.x.nrows();
    let n = parts.len() as f64;
    if let Some(cast) = contract.part_cast() {
        for (b, a) in parts.iter_mut().zip(&m.parts) {
            b.x.zip_mut_with(&a.x, |b, x| *b = step(cast, *x, *b));
        }
    }
    // η_s of each part and row: e^z − 1 for an error z of the exponent.
    let mut errors = Array2::zeros((parts.len(), rows));
    for i in 0..rows {
        let apart = |s: usize| (m.parts[s].lse[i] - m.lse[i]).abs();
        let seen: Vec<usize> = (0..parts.len()).filter(|s| m.weights[[*s, i]] > 0.0).collect();
        let spread = seen.iter().map(|s| apart(*s)).fold(0.0, f64::max);
        for s in seen {
            let z = parts[s].lse[i] + 4.0 * U * (spread + 1.0) + EXP2 + (n + 6.0) * U;
            errors[[s, i]] = libm::expm1(z);
        }
    }
    let mut x = Array2::zeros(m.x.dim());
    let mut lse = vec![0.0; rows];
    let cast = contract.part_cast().filter(|_| contract.merge_groups.is_some());
    for i in 0..rows {
        let mut states = Array2::zeros((m.states.len(), m.x.ncols()));
        let mut weights = vec![0.0; m.states.len()];
        for (g, state) in m.states.iter().enumerate() {
            let of: Vec<Summand> = state
                .parts
                .iter()
                .map(|&s| Summand {
                    weight: m.weights[[s, i]],
                    error: errors[[s, i]],
                    stored: m.stored[s].row(i),
                    bound: parts[s].x.row(i),
                })
                .collect();
            if let [one] = of.as_slice() {
                states.row_mut(g).assign(&one.bound);
                weights[g] = one.error;
                continue;
            }
            weights[g] = sum(&of, state.x.row(i), states.row_mut(g));
            if let Some(cast) = cast {
                let row = states.row_mut(g);
                row.into_iter().zip(state.x.row(i)).for_each(|(b, x)| *b = step(cast, *x, *b));
            }
        }
        let of: Vec<Summand> = m
            .states
            .iter()
            .enumerate()
            .map(|(g, state)| Summand {
                weight: state.weight[i],
                error: weights[g],
                stored: state.stored.row(i),
                bound: states.row(g),
            })
            .collect();
        let error = sum(&of, m.x.row(i), x.row_mut(i));
        lse[i] = error + 3.0 * U * m.lse[i].abs();
    }
    Bounds { x, lse }
}
