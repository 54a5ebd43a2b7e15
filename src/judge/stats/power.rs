/*!
Power: what would have been too small to see (section 7).

- [`mde`]: the smallest factor along a direction that is found in 95 % of cases at level α:
  β0 + (quantile + 1.645)·se, law and se as in the test itself. For the self-normalised bound z = √(2 ln(2/α)), of
  which a signal of z/√(1 − z²/G_eff) standard errors is needed, and none suffices if z² ≥ G_eff.
- [`slice_mde`]: the smallest η of a random relative disturbance η of the elements of a slice that the flip test
  finds. It flips the share 0.8·η·mean(|x|/ulp); spread evenly over a binade in the logarithm,
  |x|/ulp has the mean 2^(p−1)/ln 2 (bf16: 185; measured 184).
- [`element`]: the largest change of one element that its bound lets pass.
- [`rows_needed`]: se falls with the root of the number of rows.
*/

use super::direction::{Estimate, Kind, Law, floor};
use super::flips::log_chernoff;
use super::score::Fineness;
use mla_numeric::DType;
use ndarray::ArrayView2;
use std::f64::consts::LN_2;

/// Size of gain or scale below which a fault may stay unseen, unless said otherwise: 0.1 %.
pub const PROMISE: f64 = 1e-3;
/// 95 % quantile of the normal law: the power that is meant by "found".
const POWER: f64 = 1.645;

/// The z with P(|Z| ≥ z) = α under a law.
pub fn quantile(law: Law, log_alpha: f64) -> f64 {
    if log_alpha >= 0.0 {
        return 0.0;
    }
    if law == Law::SelfNormalised {
        return (2.0 * (LN_2 - log_alpha)).sqrt();
    }
    let mut hi = 1.0;
    while law.log_p(hi) > log_alpha && hi < 1e300 {
        hi *= 2.0;
    }
    let mut lo = 0.0;
    // Bisection to the last bit.
    for _ in 0..64 {
        let middle = (lo + hi) / 2.0;
        if law.log_p(middle) > log_alpha { lo = middle } else { hi = middle }
    }
    hi
}

/// Smallest visible factor along a direction at level α of one test; infinite where no size is visible.
pub fn mde(
    kind: Kind,
    estimate: &Estimate,
    steps: f64,
    fineness: Fineness,
    clean: bool,
    log_alpha: f64,
) -> f64 {
    let law = Law::of(kind, clean, estimate.g_eff);
    let mut z = quantile(law, log_alpha);
    if law == Law::SelfNormalised {
        let left = 1.0 - z * z / estimate.g_eff;
        z = if left > 0.0 { z / left.sqrt() } else { f64::INFINITY };
    }
    floor(kind, steps, fineness) + (z + POWER) * estimate.se()
}

/// Mean of |x|/ulp(x) over a binade.
pub fn mean_in_ulps(dtype: DType) -> f64 {
    f64::powi(2.0, dtype.precision() as i32 - 1) / LN_2
}

/// Smallest visible relative disturbance of a slice of `elements` elements with flip limit `p0`.
///
/// `log_alpha`: level of one slice (ln(α / number of slices)). `in_ulps`: mean |x|/ulp, [`mean_in_ulps`].
/// Infinite where even all elements flipped would not be significant.
pub fn slice_mde(elements: usize, p0: f64, log_alpha: f64, in_ulps: f64) -> f64 {
    let n = elements as f64;
    if log_chernoff(n, n, p0) > log_alpha {
        return f64::INFINITY;
    }
    let (mut lo, mut hi) = (p0, 1.0);
    for _ in 0..64 {
        let share = (lo + hi) / 2.0;
        if log_chernoff(share * n, n, p0) > log_alpha { lo = share } else { hi = share }
    }
    hi / (0.8 * in_ulps)
}

/// Largest change of one element that passes: max 2(B + ulp(|x| + B)/2), relative to its row's rms.
///
/// Rows that are zero throughout are left out.
pub fn element(dtype: DType, x: ArrayView2<f64>, bound: ArrayView2<f64>) -> f64 {
    let mut most = 0.0f64;
    for (x, b) in x.rows().into_iter().zip(bound.rows()) {
        let rms = (x.iter().map(|v| v * v).sum::<f64>() / x.len().max(1) as f64).sqrt();
        if rms > 0.0 {
            let total = |(x, b): (&f64, &f64)| 2.0 * b + dtype.spacing(x.abs() + b);
            most = x.iter().zip(b).map(total).fold(most, |m, t| m.max(t / rms));
        }
    }
    most
}

/// Rows that would bring a smallest visible factor down to `promise`: rows·((MDE − β0)/(promise − β0))².
///
/// None where no number of rows does: the floor is above the promise, or nothing is visible.
pub fn rows_needed(rows: usize, mde: f64, floor: f64, promise: f64) -> Option<usize> {
    let ratio = (mde - floor) / (promise - floor);
    (promise > floor && ratio.is_finite()).then(|| (rows as f64 * ratio * ratio).ceil() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    #[test]
    fn quantiles_meet_tables() {
        let student = |dof| Law::Student { dof };
        assert_relative_eq!(quantile(student(10.0), 0.05f64.ln()), 2.228_139, max_relative = 1e-6);
        assert_relative_eq!(quantile(student(1.0), 0.01f64.ln()), 63.656_741, max_relative = 1e-7);
        assert_relative_eq!(quantile(Law::Normal, 0.05f64.ln()), 1.959_963_985, max_relative = 1e-9);
        // Two-sided 1e-9, to the three digits of the groundwork's table.
        let at = |law, want: f64| assert_relative_eq!(quantile(law, 1e-9f64.ln()), want, max_relative = 5e-3);
        at(Law::Normal, 6.11);
        for (dof, want) in [
            (255.0, 6.35),
            (127.0, 6.60),
            (63.0, 7.17),
            (31.0, 8.61),
            (15.0, 13.3),
            (11.0, 18.9),
            (7.0, 42.8),
        ] {
            at(student(dof), want);
        }
        at(Law::SelfNormalised, 6.54);
        assert_eq!(quantile(Law::Normal, 0.0), 0.0);
    }

    #[test]
    fn smallest_visible_gain_of_eight_rows() {
        // (6.11 + 1.645)·8.5e-5 = 6.6e-4, and the floor of 20 steps.
        let mut e = Estimate { beta: 0.0, se_m: 8.5e-5, se_c: 1e-5, z_sym: 0.0, g_eff: 8.0 };
        let at = |e: &Estimate, kind, clean| mde(kind, e, 20.0, Fineness::Coarse, clean, 1e-9f64.ln());
        assert_relative_eq!(at(&e, Kind::Global, true), 6.6e-4 + 28.0 / 16_777_216.0, max_relative = 2e-3);
        // Without emulation eight rows can't show anything at this level; 44 and more can.
        assert_eq!(at(&e, Kind::Global, false), f64::INFINITY);
        e.g_eff = 44.0;
        assert!(at(&e, Kind::Local, false).is_finite());
    }

    #[test]
    fn smallest_visible_slice() {
        // m = 128: share ≈ 0.084, η ≈ 6e-4; m = 8,192: 0.011, 7e-5 (p0 = 0.005, level 1e-9).
        for (m, share, eta) in [(128, 0.084, 6e-4), (8192, 0.011, 7e-5)] {
            let got = slice_mde(m, 0.005, 1e-9f64.ln(), mean_in_ulps(DType::Bf16));
            assert_relative_eq!(got, eta, max_relative = 0.1);
            assert_relative_eq!(slice_mde(m, 0.005, 1e-9f64.ln(), 1.25), share, max_relative = 0.05);
        }
        assert_relative_eq!(mean_in_ulps(DType::Bf16), 184.0, max_relative = 0.01);
        // Two of two elements: p0² is not below the level.
        assert_eq!(slice_mde(2, 0.005, 1e-9f64.ln(), 184.0), f64::INFINITY);
    }

    #[test]
    fn one_element_and_rows() {
        // rms 1: 2·0.25 and the spacing at 1.25, 2^-7.
        let (x, b) = (array![[1.0, -1.0], [0.0, 0.0]], array![[0.25, 0.0], [9.0, 9.0]]);
        assert_eq!(element(DType::Bf16, x.view(), b.view()), 0.5 + 1.0 / 128.0);
        assert_eq!(rows_needed(10, 2e-3, 0.0, 1e-3), Some(40));
        assert_eq!(rows_needed(10, 2e-3, 1e-3, 1e-3), None);
        assert_eq!(rows_needed(10, f64::INFINITY, 0.0, 1e-3), None);
    }
}
