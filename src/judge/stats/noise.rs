/*!
Noise: how far an honest engine's value before rounding usually is from the reference (section 4.2).

σ of an element is a number of its row times a factor c_j of its column. n counts accumulator roundings by the
contract, and κ is the measured spread of a sum in units of u√n times the root of its squares, which an
accumulator that rounds to nearest keeps while a truncating one drifts and multiplies it by √n:

- **Product**: σ = κu√n·‖a‖‖w‖/√K; κ = 0.35 to nearest, 0.35√n truncating.
- **RMSNorm**: σ = |y|(2^-22.4 + 4u)/2, half its bound without the sum. A declared cast of the normalised value
  turns its relative error of about 2⁻²³ into flips of a share 0.8·2⁻²³·2^p, p the bits of its significand.
- **RoPE**: σ = u·max|x| of the row.
- **Attention**, P's cast emulated; v and x divided by c_j, v̄²_t the mean of v_tj² over columns:
  `σ_i² = (κu)² n max(Σ P_t² v̄²_t, mean_j x²) + Σ_t Pr(flip_t) (ulp(p_t) w_t/l)² v̄²_t`, κ = 0.4 to nearest,
  0.24√n truncating. Pr(flip) ≈ ½exp(−0.717z − 0.416z²), a normal tail, where z is the distance of p from
  the middle between two values of its cast in units of ε̂p, and
  `ε̂ = 1.2√n_k u L + (2 + 0.25 n_k) u max|s| + 2^-22.5/√3`, the standard deviation of p's relative error:
  the score's sum, with L = scale·‖q‖·rms‖k‖/√D; roundings of scale, maximum and difference and the drift
  of the largest score (0.25 n_k only where it is truncated); the exponential.

An element flips with the probability 0.8σ/ulp(x). A float64 accumulator has no noise. Partials are stages of
their own here and get the noise of an attention over their range.
*/

use mla_numeric::{DType, U};
use mla_reference::attention::{Attended, Head, part};
use mla_reference::rows::dense;
use mla_reference::{Accumulate, Contract};
use ndarray::{Array2, ArrayView2};

/// Factor of a column that holds nothing: divides by no zero, and weighs nothing.
const EMPTY: f64 = 1e-30;

/// What statistics need of a tensor beside its reference; `[rows, columns]` each.
#[derive(Clone, Debug)]
pub struct Noise {
    /// Standard deviation of an honest engine's value before its final rounding.
    pub sigma: Array2<f64>,
    /// Probability that an honest element is not the rounded reference.
    pub share: Array2<f64>,
    /// Spacing of the output at the row's root mean square times the column's factor.
    pub row_ulp: Array2<f64>,
    /// Accumulator roundings that count for floors.
    pub steps: f64,
}

impl Noise {
    fn new(dtype: DType, x: ArrayView2<f64>, sigma: Array2<f64>, factors: &[f64], steps: f64) -> Noise {
        let at = |(i, j): (usize, usize)| (0.8 * sigma[[i, j]] / dtype.spacing(x[[i, j]])).min(1.0);
        let share = Array2::from_shape_fn(x.dim(), at);
        Noise { share, row_ulp: row_ulp(dtype, x, factors), sigma, steps }
    }
}

fn rms(of: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = of.len().max(1) as f64;
    (of.map(|v| v * v).sum::<f64>() / n).sqrt()
}

/// Sizes of columns divided by their own root mean square.
fn factors(sizes: Vec<f64>) -> Vec<f64> {
    let all = rms(sizes.iter().copied());
    sizes.into_iter().map(|c| if c > 0.0 { c / all } else { EMPTY }).collect()
}

/// c_j = rms_t(v_tj), divided by the rms of these: the size of each column of values.
pub fn column_factors(v: ArrayView2<f64>) -> Vec<f64> {
    factors(v.columns().into_iter().map(|c| rms(c.iter().copied())).collect())
}

/// ulp(c_j · rms_j(x_ij / c_j)).
pub fn row_ulp(dtype: DType, x: ArrayView2<f64>, factors: &[f64]) -> Array2<f64> {
    let sizes: Vec<f64> =
        x.rows().into_iter().map(|r| rms(r.iter().zip(factors).map(|(x, c)| x / c))).collect();
    Array2::from_shape_fn(x.dim(), |(i, j)| dtype.spacing(sizes[i] * factors[j]))
}

/// κu√n, with κ for either kind of accumulator.
fn spread(accumulate: Accumulate, n: f64, nearest: f64, cut: f64) -> f64 {
    match accumulate {
        Accumulate::Exact => 0.0,
        Accumulate::Rn { .. } => nearest * U * n.sqrt(),
        Accumulate::Mma { .. } => cut * U * n,
    }
}

/// A product of rows of norms `a` with weight rows of norms `w`, each of `len` terms.
pub fn product(
    dtype: DType,
    accumulate: Accumulate,
    len: usize,
    (a, w): (&[f64], &[f64]),
    x: ArrayView2<f64>,
) -> Noise {
    let n = accumulate.roundings(len) as f64;
    let k = spread(accumulate, n, 0.35, 0.35) / (len.max(1) as f64).sqrt();
    let sigma = Array2::from_shape_fn(x.dim(), |(i, j)| k * a[i] * w[j]);
    Noise::new(dtype, x, sigma, &factors(w.to_vec()), n)
}

/// An RMSNorm with result `y` before rounding, weights `gamma` and the declared cast before them.
pub fn norm(dtype: DType, cast: Option<DType>, gamma: &[f64], y: ArrayView2<f64>) -> Noise {
    let rho = (f64::powf(2.0, -22.4) + 4.0 * U) / 2.0;
    let sizes = factors(gamma.iter().map(|g| g.abs()).collect());
    let mut noise = Noise::new(dtype, y, y.mapv(|y| rho * y.abs()), &sizes, 8.0);
    if let Some(cast) = cast {
        let flips = 0.8 * f64::powi(2.0, cast.precision() as i32 - 23);
        noise.share.mapv_inplace(|s| (s + flips).min(1.0));
    }
    noise
}

/// A rotation of `x` into `y` before rounding.
pub fn rope(dtype: DType, x: ArrayView2<f64>, y: ArrayView2<f64>) -> Noise {
    let largest: Vec<f64> =
        x.rows().into_iter().map(|r| r.iter().fold(0.0, |m: f64, v| m.max(v.abs()))).collect();
    let sigma = Array2::from_shape_fn(y.dim(), |(i, _)| U * largest[i]);
    Noise::new(dtype, y, sigma, &vec![1.0; y.ncols()], 3.0)
}

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
    let n = contract.accumulate.roundings(keys) + 3 * contract.tiles(0..keys).len();
    if contract.accumulate == Accumulate::Exact { 0.0 } else { n as f64 }
}

/// ε̂: standard deviation of the relative error of p, for each row.
pub fn p_noise(a: &Attended, head: &Head, contract: &Contract) -> Vec<f64> {
    let width = head.k.cols as f64;
    let n = contract.accumulate.roundings(head.k.cols) as f64;
    let drift = match contract.accumulate {
        Accumulate::Exact => return vec![0.0; a.x.nrows()],
        Accumulate::Rn { .. } => 0.0,
        Accumulate::Mma { .. } => 0.25 * n,
    };
    let keys = dense(&part(&head.k, a.range.clone()), 0..a.range.len(), false);
    // rms over keys of their norms, over √D: rms over all their elements.
    let key = rms(keys.iter().copied());
    let row = |(q, s): (ndarray::ArrayView1<f64>, ndarray::ArrayView1<f64>)| {
        let size = head.scale.abs() * rms(q.iter().copied()) * width.sqrt() * key;
        let largest = s.iter().filter(|s| s.is_finite()).fold(0.0, |m: f64, s| m.max(s.abs()));
        1.2 * n.sqrt() * U * size + (2.0 + drift) * U * largest + f64::powf(2.0, -22.5) / 3f64.sqrt()
    };
    head.q.rows().into_iter().zip(a.s.rows()).map(row).collect()
}

/// Pr(flip) of a cast of `p` whose standard deviation is `by`.
fn flip_probability(cast: DType, p: f64, by: f64) -> f64 {
    let tie = cast.spacing(p) / 2.0 - (p - cast.round(p)).abs();
    let z = tie / by;
    if z < 6.0 { 0.5 * libm::exp(-0.717 * z - 0.416 * z * z) } else { 0.0 }
}

/// An attention over a range of keys, P's cast emulated; `dtype`: the output's.
pub fn attention(dtype: DType, contract: &Contract, a: &Attended, head: &Head) -> Noise {
    let v = dense(&part(&head.v, a.range.clone()), 0..a.range.len(), false);
    let factors = column_factors(v.view());
    let scaled = |row: ndarray::ArrayView1<f64>| rms(row.iter().zip(&factors).map(|(v, c)| v / c)).powi(2);
    let v2: Vec<f64> = v.rows().into_iter().map(scaled).collect();
    let n = steps(contract, a.range.len());
    let k = spread(contract.accumulate, n, 0.4, 0.24);
    let by = p_noise(a, head, contract);
    let probable = probabilities(a);
    let mut sigma = Array2::zeros(a.x.dim());
    for (i, mut row) in sigma.rows_mut().into_iter().enumerate() {
        let summed: f64 = probable.row(i).iter().zip(&v2).map(|(p, v2)| p * p * v2).sum();
        let mut variance = k * k * summed.max(scaled(a.x.row(i)));
        if let (Some(cast), true) = (contract.softmax.p, a.l[i] > 0.0 && by[i] > 0.0) {
            for (t, &p) in a.p.row(i).iter().enumerate() {
                // The cast of a weight that underflowed moves nothing.
                if p > f64::MIN_POSITIVE {
                    let moved = cast.spacing(p) * a.w[[i, t]] / a.l[i];
                    variance += flip_probability(cast, p, by[i] * p) * moved * moved * v2[t];
                }
            }
        }
        row.iter_mut().zip(&factors).for_each(|(s, c)| *s = variance.sqrt() * c);
    }
    Noise::new(dtype, a.x.view(), sigma, &factors, n)
}

#[cfg(test)]
mod tests {
    use super::super::tail::log_normal;
    use super::*;
    use approx::assert_relative_eq;
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
    fn product_noise_scales_as_its_formula() {
        let x = array![[1.0, 4.0], [1.5, 3.0]];
        let of = |acc| product(DType::Bf16, acc, 512, (&[2.0, 4.0], &[3.0, 6.0]), x.view());
        let near = of(Accumulate::Rn { block: 16, chain: 512 });
        let cut = of(MMA);
        // 33 roundings along a path to nearest, 32 on the tensor core.
        assert_relative_eq!(near.sigma[[0, 0]], 0.35 * U * (33.0f64 / 512.0).sqrt() * 6.0);
        assert_relative_eq!(cut.sigma[[1, 1]], 0.35 * U * 32.0 / 512f64.sqrt() * 24.0);
        assert_relative_eq!(cut.share[[1, 1]], 0.8 * cut.sigma[[1, 1]] / f64::powi(2.0, -6));
        assert_eq!(of(Accumulate::Exact).sigma.sum(), 0.0);
        // Columns differ by two: factors √0.4 and √1.6; the rms of x/c is √((1/0.4 + 16/1.6)/2) = 2.5.
        assert_eq!(cut.row_ulp[[0, 0]], DType::Bf16.spacing(2.5 * 0.4f64.sqrt()));
        assert_eq!(cut.row_ulp[[0, 1]], DType::Bf16.spacing(2.5 * 1.6f64.sqrt()));
    }

    #[test]
    fn norm_and_rope() {
        let y = array![[1.0, -0.5, 0.0]];
        let plain = norm(DType::Bf16, None, &[1.0, 1.0, 0.0], y.view());
        let cast = norm(DType::Bf16, Some(DType::Bf16), &[1.0, 1.0, 0.0], y.view());
        assert_eq!(plain.sigma, cast.sigma);
        assert_relative_eq!(plain.sigma[[0, 0]] / U, (f64::powf(2.0, 1.6) + 4.0) / 2.0, max_relative = 1e-12);
        // 0.8·2⁻²³·2⁸ more flips.
        let more = cast.share[[0, 0]] - plain.share[[0, 0]];
        assert_relative_eq!(more, 0.8 / 32768.0, max_relative = 1e-10);
        let turned = rope(DType::Bf16, array![[3.0, -4.0]].view(), array![[5.0, 0.0]].view());
        assert_eq!(turned.sigma, array![[4.0 * U, 4.0 * U]]);
        assert_eq!(turned.row_ulp[[0, 1]], DType::Bf16.spacing(12.5f64.sqrt()));
    }

    #[test]
    fn a_weight_at_a_tie_flips_every_second_time() {
        // Scores 0 and ln tie: p = 1 exactly and p at the middle between two bf16 values.
        let tie = 0.5 + f64::powi(2.0, -9);
        let k = array![[0.0], [tie.ln()]];
        let (q, v) = (array![[1.0]], array![[1.0, 1.0], [3.0, 3.0]]);
        let head = Head { q: q.view(), k: strided(&k), v: strided(&v), visible: &[2], scale: 1.0 };
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
