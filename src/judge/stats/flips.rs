/*!
The test without a hypothesis: how many outputs are not the correctly rounded reference (section 4.6).

With emulated casts an honest engine flips a few elements in ten thousand; whatever is wrong, more flip.
Noise σ flips an element with the probability E|error|/ulp ≈ 0.8σ/ulp, whose mean over the tensor (or a slice)
is the expected share. The limit is three times that plus 2·10⁻⁴: flips of an attention are not independent,
since one flip of a cast of P moves 6 to 12 % of a row; for the same reason no slice has fewer than 16 rows.
Beyond the limit p0 the count's probability is bounded by Chernoff: with KL(q ‖ p) the relative entropy of
coins, `P(K ≥ k) ≤ exp(−n·KL(k/n ‖ p0))`.
*/

use ndarray::ArrayView2;
use std::collections::BTreeMap;
use std::ops::Range;

/// Columns of a block.
pub const BLOCK: usize = 16;
/// Fewest rows of a slice.
pub const MIN_ROWS: usize = 16;

/// ln of Chernoff's bound on P(K ≥ k), K binomial(n, p); 0 where k is not above its mean. k need not be whole.
pub fn log_chernoff(k: f64, n: f64, p: f64) -> f64 {
    if n <= 0.0 || k <= n * p {
        return 0.0;
    }
    let q = k / n;
    let ones = q * libm::log(q / p);
    if q >= 1.0 {
        return -n * ones;
    }
    -n * (ones + (1.0 - q) * libm::log((1.0 - q) / (1.0 - p)))
}

/// p0 = min(½, 3·share + 2·10⁻⁴) for an expected share.
pub fn limit(share: f64) -> f64 {
    (3.0 * share + 2e-4).min(0.5)
}

/// Unit in which expected flips are added up: whole numbers, so that no order of threads changes the sum.
const UNIT: f64 = (1u64 << 60) as f64;

/// Flips among some elements; adds up over chunks in any order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flips {
    /// Elements that are not the rounded reference.
    pub flips: u64,
    /// Elements.
    pub elements: u64,
    /// Sum of the probabilities with which honest elements flip, in units of 2⁻⁶⁰.
    expected: u128,
}

impl Flips {
    /// What was counted of some elements; `expected`: the sum of their probabilities to be flips.
    pub fn new(flips: u64, elements: u64, expected: f64) -> Flips {
        Flips { flips, elements, expected: (expected * UNIT) as u128 }
    }

    /// Counts elements: whether each is a flip, and its probability to be one.
    pub fn count<'a>(&mut self, of: impl Iterator<Item = (&'a bool, &'a f64)>) {
        for (flip, share) in of {
            self.merge(Flips::new(u64::from(*flip), 1, *share));
        }
    }

    /// Adds what was counted elsewhere.
    pub fn merge(&mut self, other: Flips) {
        self.flips += other.flips;
        self.elements += other.elements;
        self.expected += other.expected;
    }

    /// Expected share of flips.
    pub fn expected(&self) -> f64 {
        self.expected as f64 / UNIT / self.elements.max(1) as f64
    }

    /// p0: the share up to which an engine is honest.
    pub fn limit(&self) -> f64 {
        limit(self.expected())
    }

    /// ln of the bound on the probability of so many flips, of which at most the share `limit` is honest.
    pub fn log_p(&self, limit: f64) -> f64 {
        log_chernoff(self.flips as f64, self.elements as f64, limit)
    }
}

/// Part of a tensor that is tested for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slice {
    /// All of it.
    Whole,
    /// Rows whose label on an axis has one value.
    Rows {
        /// Which of the axes.
        axis: usize,
        /// The label.
        value: usize,
    },
    /// A block of columns.
    Columns(Range<usize>),
}

/// The whole tensor first, then the rows of each label and the blocks of columns, where they are enough.
///
/// `flips`, `share`: `[rows, columns]`. `axes`: for each axis (token, head, request) the label of each row.
pub fn flip_tests(flips: ArrayView2<bool>, share: ArrayView2<f64>, axes: &[&[usize]]) -> Vec<(Slice, Flips)> {
    let mut rows = vec![Flips::default(); flips.nrows()];
    let mut columns = vec![Flips::default(); flips.ncols().div_ceil(BLOCK)];
    for (i, (flips, share)) in flips.rows().into_iter().zip(share.rows()).enumerate() {
        rows[i].count(flips.iter().zip(share));
        for (j, pair) in flips.iter().zip(share).enumerate() {
            columns[j / BLOCK].count(std::iter::once(pair));
        }
    }
    let mut whole = Flips::default();
    rows.iter().for_each(|r| whole.merge(*r));
    let mut tests = vec![(Slice::Whole, whole)];
    for (axis, labels) in axes.iter().enumerate() {
        let mut by: BTreeMap<usize, (usize, Flips)> = BTreeMap::new();
        for (value, row) in labels.iter().zip(&rows) {
            let entry = by.entry(*value).or_default();
            entry.0 += 1;
            entry.1.merge(*row);
        }
        if by.len() > 1 {
            let enough = by.into_iter().filter(|(_, (n, _))| *n >= MIN_ROWS);
            tests.extend(enough.map(|(value, (_, sum))| (Slice::Rows { axis, value }, sum)));
        }
    }
    if rows.len() >= MIN_ROWS {
        let block = |b: usize| b * BLOCK..((b + 1) * BLOCK).min(flips.ncols());
        tests.extend(columns.into_iter().enumerate().map(|(b, sum)| (Slice::Columns(block(b)), sum)));
    }
    tests
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::Array2;

    #[test]
    fn chernoff_is_above_the_exact_binomial_tail() {
        for n in [1u32, 5, 12, 30] {
            for p in [0.001, 0.1, 0.5] {
                let mut mass = f64::powi(1.0 - p, n as i32);
                let mut tail = 1.0;
                for k in 0..=n {
                    let bound = log_chernoff(f64::from(k), f64::from(n), p);
                    assert!(bound >= f64::ln(tail) - 1e-9, "n {n} p {p} k {k}");
                    // Sharp to the first order: within the factor n + 1 of the one term at k.
                    if f64::from(k) > f64::from(n) * p {
                        assert!(bound <= f64::ln(mass * f64::from(n + 1)) + 1e-9);
                    }
                    tail -= mass;
                    tail = tail.max(1e-300);
                    mass *= f64::from(n - k) / f64::from(k + 1) * p / (1.0 - p);
                }
            }
        }
        // All of them: p^n.
        assert_relative_eq!(log_chernoff(7.0, 7.0, 0.1), 7.0 * 0.1f64.ln(), max_relative = 1e-15);
        assert_eq!(log_chernoff(0.0, 0.0, 0.1), 0.0);
    }

    #[test]
    fn slices_of_sixteen_rows_and_sixteen_columns() {
        let flips = Array2::from_shape_fn((40, 40), |(i, j)| i % 2 == 1 && j >= 32);
        let share = Array2::from_elem((40, 40), 1e-4);
        let half: Vec<usize> = (0..40).map(|i| i % 2).collect();
        let few: Vec<usize> = (0..40).map(|i| i / 10).collect();
        let same = [7; 40];
        let got = flip_tests(flips.view(), share.view(), &[&half, &few, &same]);
        let names: Vec<_> = got.iter().map(|(s, _)| s.clone()).collect();
        let rows = |value| Slice::Rows { axis: 0, value };
        let columns = [0..16, 16..32, 32..40].map(Slice::Columns);
        assert_eq!(names, [vec![Slice::Whole, rows(0), rows(1)], columns.to_vec()].concat());
        let counts: Vec<_> = got.iter().map(|(_, f)| (f.flips, f.elements)).collect();
        assert_eq!(counts, [(160, 1600), (0, 800), (160, 800), (0, 640), (0, 640), (160, 320)]);
        for (_, f) in &got {
            assert_relative_eq!(f.limit(), 5e-4, max_relative = 1e-12);
        }
        // KL(½ ‖ 5e-4) = ½ ln(1000) + ½ ln(0.5/0.9995)
        let want = -320.0 * (0.5 * 1000f64.ln() + 0.5 * (0.5f64 / 0.9995).ln());
        assert_relative_eq!(got[5].1.log_p(got[5].1.limit()), want, max_relative = 1e-12);
        // Fifteen rows: nothing but the whole.
        let few = flip_tests(
            flips.slice(ndarray::s![..15, ..]),
            share.slice(ndarray::s![..15, ..]),
            &[&half[..15]],
        );
        assert_eq!(few.len(), 1);
        assert_eq!(limit(0.4), 0.5);
    }
}
