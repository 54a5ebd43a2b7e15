/*!
Tails of the normal and of Student's law, two-sided, in natural logarithms.

In logarithms because a fault's p-value easily lies below the smallest float64, and a family of tests
compares logarithms anyway.

- Normal: P(|Z| ≥ z) = erfc(z/√2). Beyond x = z/√2 = 25, where erfc nears the smallest float64, the asymptotic
  series `e^(−x²)/(x√π)·(1 − 1/(2x²) + 3/(4x⁴))`: an upper bound, since the series alternates, and too large
  by less than 15/(8x⁶) < 1e-8 of itself.
- Student: P(|T| ≥ t) = I_x(ν/2, ½), x = ν/(ν + t²), by the continued fraction of the incomplete beta function
  in Lentz's form; for large x by 1 − I_{1−x}(½, ν/2), where that fraction converges faster.
*/

use std::f64::consts::{PI, SQRT_2};

/// ln P(|Z| ≥ z), Z standard normal.
pub fn log_normal(z: f64) -> f64 {
    let x = z.max(0.0) / SQRT_2;
    if x < 25.0 {
        return libm::log(libm::erfc(x));
    }
    let r = 1.0 / (2.0 * x * x);
    -x * x - libm::log(x * PI.sqrt()) + libm::log1p(r * (3.0 * r - 1.0))
}

/// ln P(|T| ≥ t), T by Student's law with `dof` > 0 degrees of freedom, whole or not.
pub fn log_student(t: f64, dof: f64) -> f64 {
    let squared = t * t;
    let (a, b) = (dof / 2.0, 0.5);
    let x = dof / (dof + squared);
    let front = libm::lgamma(a + b)
        - libm::lgamma(a)
        - libm::lgamma(b)
        - a * libm::log1p(squared / dof)
        - b * libm::log1p(dof / squared);
    if x < (a + 1.0) / (a + b + 2.0) {
        front + libm::log(fraction(a, b, x) / a)
    } else {
        let y = squared / (dof + squared);
        libm::log1p(-libm::exp(front) * fraction(b, a, y) / b).min(0.0)
    }
}

/// Continued fraction of the incomplete beta function I_x(a, b).
fn fraction(a: f64, b: f64, x: f64) -> f64 {
    let mut c = 1.0;
    let mut d = 1.0 / (1.0 - (a + b) * x / (a + 1.0));
    let mut h = d;
    // About √max(a, b) steps are needed.
    for m in 1..10_000 {
        let m = f64::from(m);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        for term in [even, odd] {
            d = 1.0 / (1.0 + term * d);
            c = 1.0 + term / c;
            h *= d * c;
        }
        if (d * c - 1.0).abs() < 1e-15 {
            break;
        }
    }
    h
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    #[test]
    fn normal_tail_meets_tables_and_goes_on_below_float64() {
        // erfc(1) of any table; 1.959964: two-sided 5 %.
        assert_relative_eq!(log_normal(SQRT_2), 0.157_299_207_050_285f64.ln(), max_relative = 1e-14);
        assert_relative_eq!(log_normal(1.959_963_984_540_054), 0.05f64.ln(), max_relative = 1e-13);
        assert_eq!(log_normal(0.0), 0.0);
        // Both forms meet at the seam; far out ln p = −z²/2 − ln(z√(π/2)) + O(1/z²).
        let z = 25.0 * SQRT_2;
        assert_relative_eq!(log_normal(z * (1.0 - 1e-13)), log_normal(z), max_relative = 1e-10);
        assert_relative_eq!(
            log_normal(1e4),
            -5e7 - (1e4 * (PI / 2.0).sqrt()).ln() - 1e-8,
            max_relative = 1e-15
        );
        assert_eq!(log_normal(f64::INFINITY), f64::NEG_INFINITY);
    }

    #[test]
    fn student_tail_meets_tables_and_closed_forms() {
        for (t, dof, p) in [
            (2.228_139, 10.0, 0.05),
            (4.032_143, 5.0, 0.01),
            (3.645_959, 30.0, 0.001),
            (1.372_184, 10.0, 0.2),
        ] {
            assert_relative_eq!(log_student(t, dof), f64::ln(p), max_relative = 1e-6);
        }
        for t in [1e-3, 0.3, 1.0, 5.0, 1e3, 1e9] {
            // One degree of freedom: Cauchy. Two: 1 − t/√(2 + t²) = 2/(√(2 + t²)(√(2 + t²) + t)).
            assert_relative_eq!(
                log_student(t, 1.0),
                (2.0 / PI * (1.0 / t).atan()).ln(),
                max_relative = 1e-12
            );
            let root = (2.0 + t * t).sqrt();
            assert_relative_eq!(log_student(t, 2.0), (2.0 / (root * (root + t))).ln(), max_relative = 1e-12);
        }
        assert_eq!(log_student(0.0, 7.0), 0.0);
        assert_eq!(log_student(f64::INFINITY, 7.0), f64::NEG_INFINITY);
        // Many degrees of freedom: normal, up to (t⁴ + t²)/(4ν)·φ/p.
        assert_relative_eq!(log_student(3.0, 1e6), log_normal(3.0), max_relative = 1e-4);
    }
}
