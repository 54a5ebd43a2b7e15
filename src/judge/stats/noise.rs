/*!
Noise: how far an honest engine's value before rounding usually is from the reference (section 4.2).

σ of an element is a number of its row times a factor c_j of its column. n counts accumulator roundings by the
contract, and κ is the measured spread of a sum in units of u√n times the root of its squares, which an
accumulator that rounds to nearest keeps while a truncating one drifts and multiplies it by √n:

- **Product**: σ = κu√n·‖a‖‖w‖/√K; κ = 0.35 to nearest, 0.35√n truncating.
- **RMSNorm**: σ = |y|(2^-22.4 + 4u)/2, half its bound without the sum. A declared cast of the normalised value
  turns its relative error of about 2⁻²³ into flips of a share 0.8·2⁻²³·2^p, p the bits of its significand.
- **RoPE**: σ = u·max|x| of the row, of |a·cos| + |b·sin| where x is not at hand. Declared casts of the two products:
  flips of a share 2·0.8·2⁻²⁴·2^p.
- **Attention**, lse, splits merged inside: [`attention`].
- **Merge**: `σ = (2^-22.5 + 2u(spread + 1) + √splits·u)/√3 · Σ W|o|`; lse: that without Σ W|o|, and 2u|lse|/√3.
- **Sum** of n parts: n − 1 additions in float32, each uniform within u of at most Σ|part|: σ = √((n − 1)/3)·u·Σ|part|.

An element flips with the probability 0.8σ/ulp(x). A float64 accumulator has no noise.
*/

mod attention;

pub use attention::{
    Jump, attention, attention_lse, flip_probability, jumps, p_noise, probabilities, split, split_lse, steps,
};

use mla_numeric::{DType, U};
use mla_reference::key_stats::relative as factors;
use mla_reference::{Accumulate, Contract, Terms};
use ndarray::{Array2, ArrayView1, ArrayView2};

/// Standard deviation of an exponential's relative error: uniform within 2^-22.5.
fn exponential() -> f64 {
    f64::powf(2.0, -22.5) / 3f64.sqrt()
}

/// What statistics need of a tensor beside its reference; `[rows, columns]` each.
#[derive(Clone, Debug)]
pub struct Noise {
    /// Standard deviation of an honest engine's value before its final rounding.
    pub sigma: Array2<f64>,
    /// Probability to be a flip where it is not 0.8σ/ulp alone.
    pub share: Share,
    /// c_j, for each column.
    pub factors: Vec<f64>,
    /// Accumulator roundings that count for floors.
    pub steps: f64,
}

/// Probability of flips.
#[derive(Clone, Debug)]
pub enum Share {
    /// 0.8σ/ulp.
    OfNoise,
    /// So much more in all columns from one on: casts inside a stage.
    More(usize, f64),
    /// `[rows, columns]`.
    Own(Array2<f64>),
}

impl Noise {
    fn new(sigma: Array2<f64>, factors: Vec<f64>, steps: f64) -> Noise {
        Noise { sigma, share: Share::OfNoise, factors, steps }
    }

    /// Probability that an honest element is not the rounded reference: of row `i`, whose values are `x`, to `out`.
    pub fn shares(&self, dtype: DType, i: usize, x: &[f64], out: &mut Vec<f64>) {
        if let Share::Own(own) = &self.share {
            out.clear();
            out.extend(own.row(i));
            return;
        }
        flip_shares(dtype, x, self.sigma.row(i).iter().map(|s| 0.8 * s), out);
        if let Share::More(first, more) = self.share {
            out.iter_mut().skip(first).for_each(|s| *s = (*s + more).min(1.0));
        }
    }
}

/// min(size/ulp(x), 1) to `out`.
pub fn flip_shares(dtype: DType, x: &[f64], sizes: impl Iterator<Item = f64>, out: &mut Vec<f64>) {
    out.clear();
    out.resize(x.len(), 0.0);
    dtype.spacing_slice(x, out);
    out.iter_mut().zip(sizes).for_each(|(s, size)| {
        let share = size / *s;
        *s = if share < 1.0 { share } else { 1.0 };
    });
}

fn rms(of: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = of.len().max(1) as f64;
    (of.map(|v| v * v).sum::<f64>() / n).sqrt()
}

/// ulp(c_j · rms_j(x_j / c_j)) of some columns of a row: the spacing of the output at the row's size.
pub fn row_ulps(
    dtype: DType,
    x: ArrayView1<f64>,
    factors: &[f64],
    columns: impl Iterator<Item = usize>,
) -> Vec<f64> {
    let size = rms(x.iter().zip(factors).map(|(x, c)| x / c));
    columns.map(|j| dtype.spacing(size * factors[j])).collect()
}

/// κu√n, with κ for either kind of accumulator.
fn spread(accumulate: Accumulate, n: f64, nearest: f64, cut: f64) -> f64 {
    match accumulate {
        Accumulate::Exact => 0.0,
        a if a.drifts() => cut * U * n,
        _ => nearest * U * n.sqrt(),
    }
}

/// Noise of a chunk of a stage stored in `dtype`, whatever the stage. `x`: its value before the final rounding.
pub fn of(contract: &Contract, terms: &Terms, x: ArrayView2<f64>, dtype: DType) -> Noise {
    match terms {
        Terms::Copy => even(x, |_| 0.0, 0.0),
        Terms::Product { a_norms, w_norms, .. } if a_norms.is_empty() || w_norms.is_empty() => {
            even(x, |_| 0.0, 0.0)
        }
        Terms::Product { len, a_norms, w_norms, .. } => {
            product(contract.accumulate, *len, (a_norms, w_norms), x)
        }
        Terms::Norm { gamma, .. } => norm(contract.norm_cast, gamma, x),
        Terms::Rope { size, first, .. } => turned(contract.rope_products, size.view(), *first, x),
        Terms::Attention { attended, head, lse: false } => attention(dtype, contract, attended, head),
        Terms::Attention { attended, head, lse: true } => attention_lse(contract, attended, head),
        Terms::Split { merged, head, lse: false } => split(dtype, contract, merged, head),
        Terms::Split { merged, head, lse: true } => split_lse(contract, merged, head),
        Terms::Merge { spread, size, splits, lse } => {
            let n = *splits as f64;
            let weight = |i: usize| {
                (exponential() * 3f64.sqrt() + 2.0 * U * (spread[i] + 1.0) + n.sqrt() * U) / 3f64.sqrt()
            };
            let sigma = |(i, j): (usize, usize)| match lse {
                true => weight(i).hypot(2.0 * U * x[[i, j]].abs() / 3f64.sqrt()),
                false => weight(i) * size[[i, j]],
            };
            even(x, sigma, n + 2.0)
        }
        Terms::Sum { size, parts } => {
            let n = parts.saturating_sub(1) as f64;
            even(x, |at| (n / 3.0).sqrt() * U * size[at], n)
        }
    }
}

/// Noise of columns of one size.
fn even(x: ArrayView2<f64>, sigma: impl Fn((usize, usize)) -> f64, steps: f64) -> Noise {
    Noise::new(Array2::from_shape_fn(x.dim(), sigma), vec![1.0; x.ncols()], steps)
}

/// A product of rows of norms `a` with weight rows of norms `w`, each of `len` terms.
pub fn product(accumulate: Accumulate, len: usize, (a, w): (&[f64], &[f64]), x: ArrayView2<f64>) -> Noise {
    let (k, n) = product_scale(accumulate, len);
    let sigma = Array2::from_shape_fn(x.dim(), |(i, j)| k * a[i] * w[j]);
    Noise::new(sigma, factors(w.to_vec()), n)
}

/// k of σ = k‖a‖‖w‖ of a product of `len` terms, and the accumulator roundings that count for floors.
pub fn product_scale(accumulate: Accumulate, len: usize) -> (f64, f64) {
    let n = accumulate.steps(len) as f64;
    (spread(accumulate, n, 0.35, 0.35) / (len.max(1) as f64).sqrt(), n)
}

/// An RMSNorm with result `y` before rounding, weights `gamma` and the declared cast before them.
pub fn norm(cast: Option<DType>, gamma: &[f64], y: ArrayView2<f64>) -> Noise {
    let rho = (f64::powf(2.0, -22.4) + 4.0 * U) / 2.0;
    let sizes = factors(gamma.iter().map(|g| g.abs()).collect());
    let mut noise = Noise::new(y.mapv(|y| rho * y.abs()), sizes, 8.0);
    if let Some(cast) = cast {
        let flips = 0.8 * f64::powi(2.0, cast.precision() as i32 - 23);
        noise.share = Share::More(0, flips);
    }
    noise
}

/// A rotation of `x` into `y` before rounding.
pub fn rope(x: ArrayView2<f64>, y: ArrayView2<f64>) -> Noise {
    let largest: Vec<f64> =
        x.rows().into_iter().map(|r| r.iter().fold(0.0, |m: f64, v| m.max(v.abs()))).collect();
    let sigma = Array2::from_shape_fn(y.dim(), |(i, _)| U * largest[i]);
    Noise::new(sigma, vec![1.0; y.ncols()], 3.0)
}

/// A rotation from the sizes |a·cos| + |b·sin| of its terms; columns before `first` are copies.
fn turned(cast: Option<DType>, size: ArrayView2<f64>, first: usize, y: ArrayView2<f64>) -> Noise {
    let largest: Vec<f64> =
        size.rows().into_iter().map(|r| r.iter().skip(first).fold(0.0, |m: f64, v| m.max(*v))).collect();
    let mut noise = even(y, |(i, j)| if j < first { 0.0 } else { U * largest[i] }, 3.0);
    if let Some(cast) = cast {
        let flips = 2.0 * 0.8 * f64::powi(2.0, cast.precision() as i32 - 24);
        noise.share = Share::More(first, flips);
    }
    noise
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    const MMA: Accumulate = Accumulate::Mma { k: 16, bits: 25 };

    #[test]
    fn product_noise_scales_as_its_formula() {
        let x = array![[1.0, 4.0], [1.5, 3.0]];
        let of = |acc| product(acc, 512, (&[2.0, 4.0], &[3.0, 6.0]), x.view());
        let near = of(Accumulate::Rn { block: 16, chain: 512 });
        let cut = of(MMA);
        // 33 roundings along a path to nearest, 32 on the tensor core.
        assert_relative_eq!(near.sigma[[0, 0]], 0.35 * U * (33.0f64 / 512.0).sqrt() * 6.0);
        assert_relative_eq!(cut.sigma[[1, 1]], 0.35 * U * 32.0 / 512f64.sqrt() * 24.0);
        let mut shares = Vec::new();
        cut.shares(DType::Bf16, 1, &[1.5, 3.0], &mut shares);
        assert_relative_eq!(shares[1], 0.8 * cut.sigma[[1, 1]] / f64::powi(2.0, -6));
        assert_eq!(of(Accumulate::Exact).sigma.sum(), 0.0);
        // Columns differ by two: factors √0.4 and √1.6; the rms of x/c is √((1/0.4 + 16/1.6)/2) = 2.5.
        let ulps = row_ulps(DType::Bf16, x.row(0), &cut.factors, 0..2);
        assert_eq!(ulps, [0.4f64, 1.6].map(|c| DType::Bf16.spacing(2.5 * c.sqrt())));
    }

    #[test]
    fn norm_and_rope() {
        let y = array![[1.0, -0.5, 0.0]];
        let plain = norm(None, &[1.0, 1.0, 0.0], y.view());
        let cast = norm(Some(DType::Bf16), &[1.0, 1.0, 0.0], y.view());
        assert_eq!(plain.sigma, cast.sigma);
        assert_relative_eq!(plain.sigma[[0, 0]] / U, (f64::powf(2.0, 1.6) + 4.0) / 2.0, max_relative = 1e-12);
        // 0.8·2⁻²³·2⁸ more flips.
        let share = |n: &Noise| {
            let mut all = Vec::new();
            n.shares(DType::Bf16, 0, &[1.0, -0.5, 0.0], &mut all);
            all[0]
        };
        let more = share(&cast) - share(&plain);
        assert_relative_eq!(more, 0.8 / 32768.0, max_relative = 1e-10);
        let turned = rope(array![[3.0, -4.0]].view(), array![[5.0, 0.0]].view());
        assert_eq!(turned.sigma, array![[4.0 * U, 4.0 * U]]);
        let ulps = row_ulps(DType::Bf16, array![5.0, 0.0].view(), &turned.factors, 1..2);
        assert_eq!(ulps, [DType::Bf16.spacing(12.5f64.sqrt())]);
    }
}
