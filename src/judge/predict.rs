/*!
What the judge predicts of some elements: how far an honest engine may be off, and how far it usually is.
*/

use super::bound::bound;
use super::stats::noise::{self, Noise};
use mla_numeric::{DType, U};
use mla_reference::{Contract, Terms};
use ndarray::Array2;

/// Prediction of some rows and columns of a stage.
pub struct Prediction {
    /// |value before the final rounding − x| is at most this, proven.
    pub bound: Array2<f64>,
    /// σ, expected flips, row ulps; None for copies, which have none.
    pub noise: Option<Noise>,
}

/// Predicts a block `x` with these terms, stored as `dtype`.
pub fn predict(contract: &Contract, terms: &Terms, x: &Array2<f64>, dtype: DType, temperature: bool) -> Prediction {
    Prediction { bound: bound(contract, terms, x, temperature), noise: noise_of(contract, terms, x, dtype) }
}

fn noise_of(c: &Contract, terms: &Terms, x: &Array2<f64>, dtype: DType) -> Option<Noise> {
    let flat = |sigma: Array2<f64>, steps: f64| {
        let share = Array2::from_shape_fn(x.dim(), |at| (0.8 * sigma[at] / dtype.spacing(x[at])).min(1.0));
        Noise { row_ulp: noise::row_ulp(dtype, x.view(), &vec![1.0; x.ncols()]), sigma, share, steps }
    };
    Some(match terms {
        Terms::Copy => return None,
        Terms::Product { len, a_norms, w_norms, .. } => {
            noise::product(dtype, c.accumulate, *len, (a_norms, w_norms), x.view())
        }
        Terms::Norm { gamma, .. } => noise::norm(dtype, c.norm_cast, gamma, x.view()),
        Terms::Rope { size, first } => {
            let mut s = Array2::zeros(x.dim());
            for (mut s, size) in s.rows_mut().into_iter().zip(size.rows()) {
                let most = size.iter().fold(0.0, |m: f64, v| m.max(*v));
                s.iter_mut().skip(*first).for_each(|s| *s = U * most);
            }
            flat(s, 3.0)
        }
        Terms::Attention { attended, head, lse: false } => noise::attention(dtype, c, attended, head),
        Terms::Attention { attended, head, lse: true } => {
            let p = noise::p_noise(attended, head, c);
            flat(Array2::from_shape_fn(x.dim(), |(i, j)| p[i] + U * x[[i, j]].abs()), noise::steps(c, attended.range.len()))
        }
        Terms::Merge { spread, size, splits, lse } => {
            let n = *splits as f64;
            let s = Array2::from_shape_fn(x.dim(), |(i, j)| {
                let e = 2.0 * U * (spread[i] + 1.0) + f64::powf(2.0, -22.5) + n * U;
                if *lse { e + U * x[[i, j]].abs() } else { e * size[[i, j]] }
            });
            flat(s, n + 6.0)
        }
    })
}

/// Whether P's cast is emulated.
pub fn emulated(_contract: &Contract) -> bool {
    true
}
