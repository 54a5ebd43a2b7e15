/*!
Holm's procedure: one level α for all tests of a run (section 4.8).

The p-values of the run are sorted, and from the smallest on each is compared with α/(m − i), i = 0, 1, …; the
first that fails ends the procedure. The probability of any false rejection is at most α, however the tests
depend on each other.
*/

/// Indices of the rejected tests, the smallest p first.
///
/// `log_p`: natural logarithms of all p-values; NaN is never rejected. `tests`: m, where more tests were
/// made than are listed.
pub fn holm(log_p: &[f64], log_alpha: f64, tests: usize) -> Vec<usize> {
    let m = tests.max(log_p.len());
    let mut order: Vec<usize> = (0..log_p.len()).filter(|i| !log_p[*i].is_nan()).collect();
    order.sort_by(|a, b| log_p[*a].total_cmp(&log_p[*b]).then(a.cmp(b)));
    let kept = |(i, j): (usize, &usize)| log_p[*j] <= log_alpha - libm::log((m - i) as f64);
    let rejected = order.iter().enumerate().take_while(|&(i, j)| kept((i, j))).count();
    order.truncate(rejected);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logs(p: &[f64]) -> Vec<f64> {
        p.iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn textbook_example() {
        // Limits 0.0125, 0.0167, 0.025: 0.005 and 0.01 are rejected, 0.03 is not, and 0.04 is not tried.
        let p = logs(&[0.01, 0.04, 0.03, 0.005]);
        assert_eq!(holm(&p, 0.05f64.ln(), 0), [3, 0]);
        // Bonferroni alone would take 0.0125 for all; one by one 0.05.
        assert_eq!(holm(&logs(&[0.013, 0.012, 0.9, 0.8]), 0.05f64.ln(), 0), [1, 0]);
        assert_eq!(holm(&logs(&[0.04, 0.03]), 0.05f64.ln(), 0), [0usize; 0]);
    }

    #[test]
    fn tests_that_are_not_listed_count() {
        let p = logs(&[1e-7]);
        assert_eq!(holm(&p, 1e-6f64.ln(), 10), [0]);
        assert_eq!(holm(&p, 1e-6f64.ln(), 11), [0usize; 0]);
        assert_eq!(holm(&[f64::NAN, f64::NEG_INFINITY], 1e-6f64.ln(), 1000), [1]);
        assert_eq!(holm(&[], 0.0, 0), [0usize; 0]);
    }
}
