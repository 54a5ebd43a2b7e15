/*!
Noise of attention: of its values, of its lse, and of splits that are merged inside.

- **Attention**, P's cast emulated; v and x divided by c_j, v̄²_t the mean of v_tj² over columns:
  `σ_i² = (κu)² n max(Σ P_t² v̄²_t, mean_j x²) + Σ_t Pr(flip_t) (ulp(p_t) w_t/l)² v̄²_t`, κ = 0.4 to nearest,
  0.24√n truncating. Pr(flip) ≈ ½exp(−0.717z − 0.416z²), a normal tail, where z is the distance of p from
  the middle between two values of its cast in units of ε̂p, and
  `ε̂ = 1.2√n_k u L + (2 + 0.25 n_k) u max|s| + 2^-22.5/√3`, the standard deviation of p's relative error:
  the score's sum, with L = scale·‖q‖·rms‖k‖/√D; roundings of scale, maximum and difference and the drift
  of the largest score (0.25 n_k only where it is truncated); the exponential. In pairs of tiles each half of the
  columns has its own flips. A P whose cast is not emulated: Σ (ulp(p_t) w_t/l)² v̄²_t/12 in their place. A cast of
  scores: Σ min(1, 0.8σ_s/ulp(s_t)) (P_t ulp(s_t))² v̄²_t, σ_s = 1.2√n_k u L.
- **Splits merged inside**: the same over all keys, with weights W_s P_t. Partials of 16 bits besides: a cast keeps
  E|error| and makes E error² = E|error|·ulp, so with a_s = 0.8σ_s c_j of part s alone the variance grows by
  Σ W_s² a_s ulp(x_s), for states that are cast again by Σ W_g² a_g ulp(y_g), a_g = Σ (W_s/W_g) a_s; and the share of
  flips by Σ W_s a_s/ulp(x), since a rare step of a whole ulp has a large σ and flips little.
- **lse**: `σ² = ε̂² + (tile + 2T/tile + 5)u²/3 + (2u|lse|)²/3 + Σ_t Pr(flip_t) (ulp(p_t) w_t/l)²`, the last where the
  row sum takes cast p: errors of p that all keys share, the sum, the logarithm.
*/

use super::{Noise, Share, even, exponential, rms, spread};
use mla_numeric::{DType, U};
use mla_reference::attention::{Attended, Group, Head, Joined, Merged};
use mla_reference::key_stats::RangeStats;
use mla_reference::{Accumulate, Contract, RowSum};
use ndarray::{Array2, ArrayView1, ArrayView2};
use std::ops::Range;

/// True probabilities, without the contract's casts: p·w over its sum, `[rows, range]`.
pub fn probabilities(a: &Attended) -> Array2<f64> {
    let mut p = &a.p * &a.w;
    for mut row in p.rows_mut() {
        let sum = row.sum();
        if sum > 0.0 {
            row.mapv_inplace(|v| v / sum);
        }
    }
    p
}

/// Roundings of an attention over `keys` keys: those of P·V and three a tile for rescaling.
pub fn steps(contract: &Contract, keys: usize) -> f64 {
    let n = contract.accumulate.steps(keys) + 3 * contract.tiles(0..keys).len();
    if contract.accumulate == Accumulate::Exact { 0.0 } else { n as f64 }
}

/// Standard deviation of the sum of a score, 1.2√n_k u L, and of the relative error of its p, ε̂.
#[derive(Clone, Copy, Debug, Default)]
struct OfP {
    score: f64,
    p: f64,
}

fn of_p(contract: &Contract, head: &Head, key_rms: f64, i: usize, largest: f64) -> OfP {
    if contract.accumulate == Accumulate::Exact {
        return OfP::default();
    }
    let n = contract.accumulate.steps(head.k.cols) as f64;
    let drift = if contract.accumulate.drifts() { 0.25 * n } else { 0.0 };
    // rms over keys of their norms, over √D: rms over all their elements.
    let size = head.scale.abs() * rms(head.q.row(i).iter().copied()) * (head.k.cols as f64).sqrt() * key_rms;
    let score = 1.2 * n.sqrt() * U * size;
    OfP { score, p: score + (2.0 + drift) * U * largest + exponential() }
}

fn largest(s: ArrayView1<f64>) -> f64 {
    s.iter().filter(|s| s.is_finite()).fold(0.0, |m: f64, s| m.max(s.abs()))
}

/// ε̂: standard deviation of the relative error of p, for each row.
pub fn p_noise(a: &Attended, head: &Head, contract: &Contract) -> Vec<f64> {
    let key_rms = head.stats.key_rms(head, a.range.clone());
    (0..a.x.nrows()).map(|i| of_p(contract, head, key_rms, i, largest(a.s.row(i))).p).collect()
}

/// Pr(flip) of a cast of `p` whose standard deviation is `by`.
pub fn flip_probability(cast: DType, p: f64, by: f64) -> f64 {
    let tie = cast.spacing(p) / 2.0 - (p - cast.round(p)).abs();
    if tie < 6.0 * by {
        let z = tie / by;
        0.5 * libm::exp(-0.717 * z - 0.416 * z * z)
    } else {
        0.0
    }
}

/// Σ_t Pr(flip_t)(ulp(p_t) w_t/l)² size_t of one row of a group; of a cast that is not emulated 1/12 for Pr.
fn flips(contract: &Contract, g: &Group, i: usize, l: f64, by: f64, size: impl Fn(usize) -> f64) -> f64 {
    let soft = &contract.softmax;
    let Some(cast) = soft.p.filter(|_| l > 0.0 && (by > 0.0 || !soft.emulate)) else { return 0.0 };
    let mut sum = 0.0;
    for (t, (&p, w)) in g.p.row(i).iter().zip(g.w.row(i)).enumerate() {
        // The cast of a weight that underflowed moves nothing.
        if p > f64::MIN_POSITIVE {
            let often = if soft.emulate { flip_probability(cast, p, by * p) } else { 1.0 / 12.0 };
            if often > 0.0 {
                let moved = cast.spacing(p) * w / l;
                sum += often * moved * moved * size(t);
            }
        }
    }
    sum
}

/// A cast of one weight that may go either way: its probability, and what the output's columns move by if it does.
pub struct Jump {
    /// Probability.
    pub often: f64,
    /// Change of each of the columns asked for.
    pub moves: Vec<f64>,
}

/// Jumps of these columns of row `i`, of one part whose share of the row is `weight`.
pub fn jumps(
    contract: &Contract,
    a: &Attended,
    head: &Head,
    i: usize,
    weight: f64,
    columns: &[usize],
) -> Vec<Jump> {
    let soft = &contract.softmax;
    let Some(cast) = soft.p.filter(|_| soft.emulate && a.l[i] > 0.0) else { return Vec::new() };
    let key_rms = head.stats.key_rms(head, a.range.clone());
    let by = of_p(contract, head, key_rms, i, largest(a.s.row(i))).p;
    let mut all = Vec::new();
    for g in a.groups() {
        let own: Vec<usize> = (0..columns.len()).filter(|k| g.columns.contains(&columns[*k])).collect();
        for (t, (&p, w)) in g.p.row(i).iter().zip(g.w.row(i)).enumerate() {
            let often = if p > f64::MIN_POSITIVE { flip_probability(cast, p, by * p) } else { 0.0 };
            if often > 0.0 && !own.is_empty() {
                let step = weight * cast.spacing(p) * w / a.l[i];
                let v = head.v.data.get((a.range.start + t) * head.v.stride..).unwrap_or(&[]);
                let mut moves = vec![0.0; columns.len()];
                own.iter().for_each(|k| {
                    let j = columns[*k];
                    let centre = if soft.row_sum == RowSum::Rounded { a.x[[i, j]] } else { 0.0 };
                    moves[*k] = step * (v.get(j).copied().unwrap_or(0.0) - centre);
                });
                all.push(Jump { often, moves });
            }
        }
    }
    all
}

/// Variances of one row of a part alone, in columns divided by their factors; without the accumulator's.
struct Variances {
    /// Σ P² v̄².
    squares: f64,
    /// Of score casts.
    scores: f64,
    /// Of flips, for each group of columns.
    flips: Vec<f64>,
}

/// Variances of the rows of a part; `keys`: of the range from `first` on that it lies in.
fn variances(contract: &Contract, a: &Attended, keys: (&RangeStats, usize), by: &[OfP]) -> Vec<Variances> {
    let at = a.range.start - keys.1;
    let v2 = keys.0.squares.get(at..at + a.range.len()).unwrap_or_default();
    let groups = a.groups();
    let row = |i: usize| {
        let (mut squares, mut scores, mut total) = (0.0, 0.0, 0.0);
        for (t, (p, w)) in a.p.row(i).iter().zip(a.w.row(i)).enumerate() {
            let p = p * w;
            total += p;
            squares += p * p * v2[t];
            if contract.softmax.casts_scores() && p > 0.0 {
                let step = contract.activations.spacing(a.s[[i, t]]);
                scores += (0.8 * by[i].score / step).min(1.0) * (p * step).powi(2) * v2[t];
            }
        }
        let whole = if total > 0.0 { total * total } else { 1.0 };
        let of = groups.iter().map(|g| flips(contract, g, i, a.l[i], by[i].p, |t| v2[t])).collect();
        Variances { squares: squares / whole, scores: scores / whole, flips: of }
    };
    (0..a.x.nrows()).map(row).collect()
}

/// mean_j (x_j/c_j)².
fn scaled(row: ArrayView1<f64>, factors: &[f64]) -> f64 {
    rms(row.iter().zip(factors).map(|(v, c)| v / c)).powi(2)
}

/// An attention over a range of keys, P's cast emulated or not; `dtype`: the output's.
pub fn attention(dtype: DType, contract: &Contract, a: &Attended, head: &Head) -> Noise {
    let weight = Array2::ones((1, a.x.nrows()));
    over(dtype, contract, std::slice::from_ref(a), weight.view(), (a.x.view(), a.range.clone()), head)
}

/// An attention whose splits are merged inside; `dtype`: the output's.
pub fn split(dtype: DType, contract: &Contract, m: &Merged, head: &Head) -> Noise {
    let all = spanned(m);
    let mut noise = over(dtype, contract, &m.parts, m.weights.view(), (m.x.view(), all.clone()), head);
    if let Some(cast) = contract.part_cast().filter(|_| m.parts.len() > 1) {
        narrow_partials(&mut noise, (dtype, cast), contract, m, head);
    }
    noise
}

/// All keys of all parts.
fn spanned(m: &Merged) -> Range<usize> {
    let start = m.parts.iter().map(|p| p.range.start).min().unwrap_or(0);
    start..m.parts.iter().map(|p| p.range.end).max().unwrap_or(start)
}

fn errors_of_p(contract: &Contract, parts: &[Attended], keys: Range<usize>, head: &Head) -> Vec<OfP> {
    let key_rms = head.stats.key_rms(head, keys);
    let row = |i: usize| {
        let most = parts.iter().map(|a| largest(a.s.row(i))).fold(0.0, f64::max);
        of_p(contract, head, key_rms, i, most)
    };
    (0..head.q.nrows()).map(row).collect()
}

/// Parts with weights W `[parts, rows]`, merged to `x` over all `keys` without narrow casts.
fn over(
    dtype: DType,
    contract: &Contract,
    parts: &[Attended],
    weights: ArrayView2<f64>,
    (x, range): (ArrayView2<f64>, Range<usize>),
    head: &Head,
) -> Noise {
    let keys = head.stats.range(head, range.clone());
    let by = errors_of_p(contract, parts, range.clone(), head);
    let n: f64 = parts.iter().map(|a| steps(contract, a.range.len())).sum();
    let k = spread(contract.accumulate, n, 0.4, 0.24);
    let own: Vec<Vec<Variances>> =
        parts.iter().map(|a| variances(contract, a, (&keys, range.start), &by)).collect();
    let columns: Vec<Range<usize>> =
        parts.first().map(|a| a.groups().into_iter().map(|g| g.columns).collect()).unwrap_or_default();
    let mut sigma = Array2::zeros(x.dim());
    for (i, mut row) in sigma.rows_mut().into_iter().enumerate() {
        let sum = |f: &dyn Fn(&Variances) -> f64| -> f64 {
            own.iter().enumerate().map(|(s, v)| weights[[s, i]].powi(2) * f(&v[i])).sum()
        };
        let mut base = k * k * sum(&|v| v.squares).max(scaled(x.row(i), &keys.factors)) + sum(&|v| v.scores);
        // An output wider than P's cast shows the error of p itself, not only where it flips a cast.
        if dtype.precision() > 20 {
            base += by[i].p.powi(2) * sum(&|v| v.squares);
        }
        for (g, columns) in columns.iter().enumerate() {
            let deviation = (base + sum(&|v| v.flips[g])).sqrt();
            for j in columns.clone() {
                row[j] = deviation * keys.factors[j];
            }
        }
    }
    Noise::new(sigma, keys.factors.clone(), n)
}

/// What casts of partial results to `cast` add.
fn narrow_partials(
    noise: &mut Noise,
    (dtype, cast): (DType, DType),
    contract: &Contract,
    m: &Merged,
    head: &Head,
) {
    let range = spanned(m);
    let keys = head.stats.range(head, range.clone());
    let by = errors_of_p(contract, &m.parts, range.clone(), head);
    let mut more = Array2::<f64>::zeros(m.x.dim());
    let mut share = Array2::<f64>::zeros(m.x.dim());
    let mut line = Vec::new();
    for (i, (x, mut share)) in m.x.rows().into_iter().zip(share.rows_mut()).enumerate() {
        noise.shares(dtype, i, &x.to_vec(), &mut line);
        share.iter_mut().zip(&line).for_each(|(to, from)| *to = *from);
    }
    for Joined { parts, x: y, weight, .. } in &m.states {
        // W_g a_g.
        let mut size = Array2::<f64>::zeros(m.x.dim());
        for &s in parts {
            let a = &m.parts[s];
            let n = steps(contract, a.range.len());
            let k = spread(contract.accumulate, n, 0.4, 0.24);
            for (i, v) in variances(contract, a, (&keys, range.start), &by).into_iter().enumerate() {
                let w = m.weights[[s, i]];
                let variance = k * k * v.squares.max(scaled(a.x.row(i), &keys.factors))
                    + v.flips.first().unwrap_or(&0.0);
                for (j, c) in keys.factors.iter().enumerate() {
                    let mean = 0.8 * variance.sqrt() * c;
                    more[[i, j]] += w * w * mean * cast.spacing(a.x[[i, j]]);
                    size[[i, j]] += w * mean;
                }
            }
        }
        for ((i, j), size) in size.indexed_iter() {
            if contract.merge_groups.is_some() && parts.len() > 1 {
                more[[i, j]] += weight[i] * size * cast.spacing(y[[i, j]]);
            }
            share[[i, j]] = (share[[i, j]] + size / dtype.spacing(m.x[[i, j]])).min(1.0);
        }
    }
    noise.share = Share::Own(share);
    noise.sigma.zip_mut_with(&more, |s, more| *s = (*s * *s + more).sqrt());
}

/// The lse of an attention over a range of keys.
pub fn attention_lse(contract: &Contract, a: &Attended, head: &Head) -> Noise {
    let ones = Array2::ones((1, a.x.nrows()));
    lse(contract, std::slice::from_ref(a), ones.view(), (&a.lse, a.range.clone()), head)
}

/// The lse of an attention whose splits are merged inside.
pub fn split_lse(contract: &Contract, m: &Merged, head: &Head) -> Noise {
    lse(contract, &m.parts, m.weights.view(), (&m.lse, spanned(m)), head)
}

fn lse(
    contract: &Contract,
    parts: &[Attended],
    weights: ArrayView2<f64>,
    (lse, range): (&[f64], Range<usize>),
    head: &Head,
) -> Noise {
    let by = errors_of_p(contract, parts, range.clone(), head);
    let tiles: usize = parts.iter().map(|a| contract.tiles(0..a.range.len()).len()).sum();
    let tile = contract.tiles(0..range.len()).first().map_or(1, |t| t.len());
    let sum = (tile + 2 * tiles + 5 * parts.len()) as f64 * U * U / 3.0;
    let exact = contract.accumulate == Accumulate::Exact;
    let sigma = |(i, _): (usize, usize)| {
        if exact || !lse[i].is_finite() {
            return 0.0;
        }
        let mut variance = by[i].p.powi(2) + sum + (2.0 * U * lse[i]).powi(2) / 3.0;
        if contract.softmax.row_sum == RowSum::Rounded {
            for (s, a) in parts.iter().enumerate() {
                let moved: f64 =
                    a.groups().first().map_or(0.0, |g| flips(contract, g, i, a.l[i], by[i].p, |_| 1.0));
                variance += weights[[s, i]].powi(2) * moved;
            }
        }
        variance.sqrt()
    };
    let x = Array2::from_shape_fn((lse.len(), 1), |(i, _)| lse[i]);
    let steps = parts.iter().map(|a| steps(contract, a.range.len())).sum();
    even(x.view(), sigma, steps)
}

#[cfg(test)]
mod tests {
    use super::super::super::tail::log_normal;
    use super::*;
    use approx::assert_relative_eq;
    use mla_reference::KeyStats;
    use mla_reference::attention::{attend, strided};
    use ndarray::array;

    const MMA: Accumulate = Accumulate::Mma { k: 16, bits: 25 };

    #[test]
    fn flips_follow_the_normal_tail() {
        // One ulp is 2^-8 between ½ and 1: `by` of a standard deviation puts z where it is wanted.
        let by = 1e-4;
        for z in [0.0, 0.5, 1.0, 2.0, 3.0] {
            let p = 0.625 + f64::powi(2.0, -9) + z * by;
            let want = libm::exp(log_normal(z)) / 2.0;
            assert_relative_eq!(flip_probability(DType::Bf16, p, by), want, max_relative = 0.03);
        }
        assert_eq!(flip_probability(DType::Bf16, 0.625, by), 0.0);
    }

    #[test]
    fn a_weight_at_a_tie_flips_every_second_time() {
        // Scores 0 and ln tie: p = 1 exactly and p at the middle between two bf16 values.
        let tie = 0.5 + f64::powi(2.0, -9);
        let k = array![[0.0], [tie.ln()]];
        let (q, v) = (array![[1.0]], array![[1.0, 1.0], [3.0, 3.0]]);
        let head = Head {
            q: q.view(),
            k: strided(&k),
            v: strided(&v),
            visible: &[2],
            scale: 1.0,
            stats: &KeyStats::default(),
        };
        let mut c = Contract { accumulate: MMA, ..Contract::exact() };
        let base = attention(DType::Bf16, &c, &attend(&head, 0..2, &c), &head).sigma[[0, 0]];
        c.softmax.p = Some(DType::Bf16);
        let a = attend(&head, 0..2, &c);
        let got = attention(DType::Bf16, &c, &a, &head);
        let flip = 0.5 * (f64::powi(2.0, -8) / (1.0 + tie)).powi(2) * 9.0;
        assert_relative_eq!(got.sigma[[0, 0]].powi(2), base * base + flip, max_relative = 1e-6);
        // One rounding of P·V, one tile: n = 4.
        assert_eq!(got.steps, 4.0);
        assert_relative_eq!(base, 0.24 * U * 4.0 * (1.0 + 3.0 * tie) / (1.0 + tie), max_relative = 0.3);
        // To nearest: n = 2 + 3, the spread grows with √n, and p's error has no drift.
        c = Contract { accumulate: Accumulate::Rn { block: 16, chain: 0 }, ..Contract::exact() };
        let a = attend(&head, 0..2, &c);
        let near = attention(DType::Bf16, &c, &a, &head).sigma[[0, 0]];
        let x = a.x[[0, 0]];
        assert_relative_eq!(near, 0.4 * 5f64.sqrt() * U * x, max_relative = 1e-12);
        let size = (tie.ln() * tie.ln() / 2.0).sqrt();
        let want =
            1.2 * 2f64.sqrt() * U * size + 2.0 * U * tie.ln().abs() + f64::powf(2.0, -22.5) / 3f64.sqrt();
        assert_relative_eq!(p_noise(&a, &head, &c)[0], want, max_relative = 1e-12);
        // A float64 engine has none.
        let exact = Contract::exact();
        assert_eq!(attention(DType::F64, &exact, &attend(&head, 0..2, &exact), &head).sigma.sum(), 0.0);
    }
}
