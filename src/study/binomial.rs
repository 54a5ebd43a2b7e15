/*!
The binomial tail: how many small p-values may a family of tests have before it is not chance?

With a true share of at most p, P(K ≥ k) ≤ Σ_{i ≥ k} C(n, i) pⁱ (1 − p)ⁿ⁻ⁱ, summed term by term in logarithms:
from term to term the factor is (n − i)/(i + 1) · p/(1 − p), which falls, so that the sum may end when a term no
longer counts. Tests are taken as independent. Tests of slices of one tensor are not: for them the true chance of
failing a correct judge is larger than the level says.
*/

/// ln P(K ≥ k), K binomial of n and 0 < p < 1.
pub fn log_tail(k: u64, n: u64, p: f64) -> f64 {
    if k == 0 {
        return 0.0;
    }
    if k > n {
        return f64::NEG_INFINITY;
    }
    let (kf, nf) = (k as f64, n as f64);
    let choose = libm::lgamma(nf + 1.0) - libm::lgamma(kf + 1.0) - libm::lgamma(nf - kf + 1.0);
    let first = choose + kf * libm::log(p) + (nf - kf) * libm::log1p(-p);
    let (mut sum, mut term) = (1.0f64, 1.0f64);
    for i in k..n {
        let factor = (n - i) as f64 / (i + 1) as f64 * p / (1.0 - p);
        term *= factor;
        sum += term;
        if factor < 1.0 && term < 1e-17 * sum {
            break;
        }
    }
    (first + libm::log(sum)).min(0.0)
}

/// The most of `n` tests that may lie below a level of which a share `p` is allowed: the largest k with
/// P(K ≥ k) ≥ `chance`.
pub fn most(n: u64, p: f64, chance: f64) -> u64 {
    // Never below the share itself, nor above it by more than the whole: bisect between.
    let (mut low, mut high) = (0, n + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if log_tail(middle, n, p) >= libm::log(chance) { low = middle } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    #[test]
    fn tails_are_those_of_counting() {
        // Three fair coins: at least two heads 4/8; at least one of two at 1/10: 1 − 0.81.
        assert_relative_eq!(log_tail(2, 3, 0.5), 0.5f64.ln(), max_relative = 1e-14);
        assert_relative_eq!(log_tail(1, 2, 0.1), 0.19f64.ln(), max_relative = 1e-13);
        assert_relative_eq!(log_tail(200, 200, 0.01), 200.0 * 0.01f64.ln(), max_relative = 1e-12);
        assert_eq!(log_tail(0, 5, 0.3), 0.0);
        assert_eq!(log_tail(6, 5, 0.3), f64::NEG_INFINITY);
        // Far below the mean nearly everything; at the mean of a symmetric law half and half the middle term.
        assert_relative_eq!(log_tail(1, 100_000, 0.5), 0.0, epsilon = 1e-12);
        let middle = libm::exp(libm::lgamma(101.0) - 2.0 * libm::lgamma(51.0) - 100.0 * 2f64.ln());
        assert_relative_eq!(log_tail(50, 100, 0.5), (0.5 + middle / 2.0).ln(), max_relative = 1e-12);
    }

    #[test]
    fn limits_grow_towards_the_share() {
        // By the definition, and by Poisson: 200 tests at 1.5 %, mean 3: P(K ≥ 12) = 7e-5, P(K ≥ 11) = 2.9e-4.
        assert_eq!(most(200, 0.015, 1e-4), 11);
        assert_eq!(most(0, 0.015, 1e-4), 0);
        assert_eq!(most(1, 0.015, 1e-4), 1);
        for n in [10u64, 1_000, 100_000] {
            let k = most(n, 0.015, 1e-4);
            assert!(log_tail(k, n, 0.015) >= 1e-4f64.ln() && log_tail(k + 1, n, 0.015) < 1e-4f64.ln());
        }
        let share = most(1_000_000, 0.015, 1e-4) as f64 / 1e6;
        assert!(share > 0.015 && share < 0.0155, "{share}");
    }
}
