/*!
What the judge predicts of some elements: how far an honest engine may be off, and how far it usually is.
*/

use super::bound::bound;
use super::stats::noise::{self, Noise};
use mla_numeric::DType;
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
pub fn predict(
    contract: &Contract,
    terms: &Terms,
    x: &Array2<f64>,
    dtype: DType,
    temperature: bool,
) -> Prediction {
    Prediction { bound: bound(contract, terms, x, temperature), noise: noise_of(contract, terms, x, dtype) }
}

fn noise_of(c: &Contract, terms: &Terms, x: &Array2<f64>, dtype: DType) -> Option<Noise> {
    (!matches!(terms, Terms::Copy)).then(|| noise::of(c, terms, x.view(), dtype))
}

/// Whether P's cast is emulated.
pub fn emulated(contract: &Contract) -> bool {
    contract.softmax.emulate
}
