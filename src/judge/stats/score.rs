/*!
The interval score: what an output's bits say (section 4.1).

A stored value o is not a number but a statement: the value before rounding lay in o's cell [lo, hi]. With
logistic noise of scale s around the reference x, a = (lo − x)/s, b = (hi − x)/s and F(z) = 1/(1 + e^−z), the
statement has the probability F(b) − F(a), and the derivative of its logarithm by a shift of x is

`g = (F(a) + F(b) − 1)/s`.

|g| ≤ 1/s whatever o is, so that one broken element can neither hide nor fake a direction, and g is odd
in the offset of x from the cell's centre, so that its mean is 0 for any symmetric noise. The information about
the shift is `I = Σ Pr(c)·g(c)²` over the cells c that are likely: round(x) and its two neighbours. Where
these three hold less than 98 % the cell is narrower than the noise, g is that of a continuous logistic
variable, and I is at least its information 1/(3s²).

F of an edge is kept by its smaller side, from which F(a) + F(b) − 1 and F(b) − F(a) are computed: neither loses
digits, and an edge costs one exponential, or none where it is far.
*/

use mla_numeric::DType;
use std::f64::consts::PI;

/// How much of the rounding itself counts as noise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fineness {
    /// Rounding is uniform noise of 0.29 ≈ 1/√12 ulps: needs no emulated casts.
    Coarse,
    /// Only 2⁻⁸ of an ulp: believes what the bits say, if the casts are emulated and few outputs flip.
    Fine,
}

impl Fineness {
    /// Both.
    pub const ALL: [Fineness; 2] = [Fineness::Coarse, Fineness::Fine];

    /// Standard deviation that is added to the noise, in row ulps.
    pub const fn row_ulps(self) -> f64 {
        match self {
            Fineness::Coarse => 0.29,
            Fineness::Fine => 1.0 / 256.0,
        }
    }
}

/// F(z) = 1/(1 + e^−z).
pub fn logistic(z: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-z))
}

/// Scale of the logistic noise: s = √(σ² + (f · row ulp)²) · √3/π, positive because a row ulp is.
pub fn scale_of(sigma: f64, row_ulp: f64, fineness: Fineness) -> f64 {
    sigma.hypot(fineness.row_ulps() * row_ulp) * 3f64.sqrt() / PI
}

/// F(z) of an edge, kept by its smaller side so that no digit is lost: F(−|z|), and whether z is positive.
#[derive(Clone, Copy)]
struct Edge {
    small: f64,
    positive: bool,
}

impl Edge {
    fn new(z: f64) -> Edge {
        // Beyond this F is 0 or 1 to the last bit of everything that is summed here.
        let small = if z.abs() > 40.0 {
            0.0
        } else {
            let t = libm::exp(-z.abs());
            t / (1.0 + t)
        };
        Edge { small, positive: z > 0.0 }
    }

    /// F(b) − F(a) of a cell [a, b].
    fn between(a: Edge, b: Edge) -> f64 {
        match (a.positive, b.positive) {
            (true, _) => a.small - b.small,
            (false, false) => b.small - a.small,
            (false, true) => 1.0 - a.small - b.small,
        }
    }

    /// F(a) + F(b) − 1 of a cell [a, b].
    fn centred(a: Edge, b: Edge) -> f64 {
        match (a.positive, b.positive) {
            (true, _) => 1.0 - a.small - b.small,
            (false, false) => a.small + b.small - 1.0,
            (false, true) => a.small - b.small,
        }
    }
}

/// Score of an output `o`, a value of `dtype`, against the reference `x` with noise scale `s`.
///
/// 0 where there is no statement: x not finite or o not a number (those are counted elsewhere).
pub fn score(dtype: DType, o: f64, x: f64, s: f64) -> f64 {
    if !x.is_finite() || o.is_nan() {
        return 0.0;
    }
    let (lo, hi) = dtype.cell(o);
    Edge::centred(Edge::new((lo - x) / s), Edge::new((hi - x) / s)) / s
}

/// Information of one element about a shift of `x`; 0 where x is not finite.
pub fn information(dtype: DType, x: f64, s: f64) -> f64 {
    if !x.is_finite() {
        return 0.0;
    }
    let cells = Cells::around(dtype, x);
    cells.both(dtype, cells.nearest, x, s).1
}

/// Where the likely cells around a reference value end: those of the rounded reference and of its two neighbours.
#[derive(Clone, Copy, Debug)]
pub struct Cells {
    nearest: f64,
    /// Ascending.
    edges: [f64; 4],
}

impl Cells {
    /// Around a finite `x`.
    pub fn around(dtype: DType, x: f64) -> Cells {
        let nearest = dtype.round(x);
        let a = nearest.abs();
        let usual = a > 4.0 * dtype.spacing(0.0) && a < dtype.largest() / 4.0 && dtype != DType::F64;
        if !usual {
            let (below, above) = (dtype.below(nearest), dtype.above(nearest));
            let (lo, hi) = dtype.cell(nearest);
            return Cells { nearest, edges: [dtype.cell(below).0, lo, hi, dtype.cell(above).1] };
        }
        // Two values to either side; toward zero a power of two has the spacing of the binade below it.
        let (up, down) = (|c: f64| c + dtype.spacing(c), |c: f64| c - dtype.spacing(c.next_down()));
        let (below, above) = (down(a), up(a));
        let middle = |a: f64, b: f64| (a + b) / 2.0;
        let of = [middle(down(below), below), middle(below, a), middle(a, above), middle(above, up(above))];
        let edges = if nearest > 0.0 { of } else { [-of[3], -of[2], -of[1], -of[0]] };
        Cells { nearest, edges }
    }

    /// Score and information with noise of scale `s`: the cell of the output is nearly always that of the rounded
    /// reference, whose edges then serve both.
    pub fn both(&self, dtype: DType, o: f64, x: f64, s: f64) -> (f64, f64) {
        let per = 1.0 / s;
        let edges = self.edges.map(|at| Edge::new((at - x) * per));
        let (mut sum, mut total) = (0.0, 0.0);
        for pair in edges.windows(2) {
            let (probability, g) = (Edge::between(pair[0], pair[1]), Edge::centred(pair[0], pair[1]) * per);
            sum += probability * g * g;
            total += probability;
        }
        let info = if total > 0.98 { sum } else { sum.max(per * per / 3.0) };
        let g =
            if o == self.nearest { Edge::centred(edges[1], edges[2]) * per } else { score(dtype, o, x, s) };
        (g, info)
    }
}

/// Scores of a row.
pub fn scores(dtype: DType, o: &[f64], x: &[f64], s: &[f64]) -> Vec<f64> {
    o.iter().zip(x).zip(s).map(|((o, x), s)| score(dtype, *o, *x, *s)).collect()
}

/// Informations of a row.
pub fn informations(dtype: DType, x: &[f64], s: &[f64]) -> Vec<f64> {
    x.iter().zip(s).map(|(x, s)| information(dtype, *x, *s)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use proptest::prelude::*;

    const KINDS: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

    proptest! {
        #[test]
        fn bounded_odd_and_informative(
            kind in 0usize..3, m in 1.01f64..1.99, e in -8i32..8, off in -3.0f64..3.0, log_s in -8.0f64..2.0,
        ) {
            let d = KINDS[kind];
            let o = d.round(m * f64::powi(2.0, e));
            let (lo, hi) = d.cell(o);
            let s = libm::exp(log_s) * d.spacing(o);
            let (centre, by) = ((lo + hi) / 2.0, off * d.spacing(o));
            let (up, down) = (score(d, o, centre - by, s), score(d, o, centre + by, s));
            prop_assert!(up.abs() <= 1.0 / s);
            // Moved by the same amount to both sides; exact up to the rounding of centre ± by.
            prop_assert!((up + down).abs() * s <= 1e-5);
            // x below the cell's centre: the bits say that it should move up.
            prop_assert!(up * by >= 0.0);
            // Far inside a cell (40 scales from its edges: s < 0.0125 ulps) it is taken as 0.
            let info = information(d, centre + by, s);
            prop_assert!(info > 0.0 || (log_s <= -4.38 && info == 0.0));
        }
    }

    #[test]
    fn score_is_the_derivative_of_the_log_probability() {
        let (d, o, s) = (DType::Bf16, 1.0078125, 0.002);
        let (lo, hi) = d.cell(o);
        let ln = |x: f64| ((1.0 / (1.0 + (-(hi - x) / s).exp())) - 1.0 / (1.0 + (-(lo - x) / s).exp())).ln();
        for x in [1.002, 1.0078, 1.011] {
            let h = 1e-6;
            assert_relative_eq!(score(d, o, x, s), (ln(x + h) - ln(x - h)) / (2.0 * h), max_relative = 1e-6);
        }
    }

    #[test]
    fn information_is_the_variance_of_the_score() {
        // All cells that matter summed up: the three nearest hold nearly everything at this scale.
        let (d, x, s) = (DType::Bf16, 1.013, 0.0005);
        let mut sum = 0.0;
        let mut c = 0.9;
        c = d.round(c);
        while c < 1.2 {
            let (lo, hi) = d.cell(c);
            sum += (logistic((hi - x) / s) - logistic((lo - x) / s)) * score(d, c, x, s).powi(2);
            c = d.above(c);
        }
        assert_relative_eq!(information(d, x, s), sum, max_relative = 1e-3);
        // Noise far wider than a cell: a continuous logistic variable.
        assert_relative_eq!(information(d, x, 1.0), 1.0 / 3.0, max_relative = 1e-12);
    }

    /// The short way to the edges and the general one.
    #[test]
    fn cells_end_where_those_of_the_format_do() {
        for d in KINDS {
            let tiny = d.spacing(0.0);
            let normal = f64::powi(2.0, d.min_exponent());
            let around = [1.0, 1.5, 3.0, 0.3, d.largest(), d.largest() / 8.0, normal, 6.0 * tiny, 0.0];
            for c in around.into_iter().flat_map(|c| [c, d.above(d.round(c)), d.below(d.round(c))]) {
                for x in [c, -c, c * 1.000_1, -c * 0.999_9] {
                    let n = d.round(x);
                    if !n.is_finite() {
                        continue;
                    }
                    let (lo, hi) = d.cell(n);
                    let want = [d.cell(d.below(n)).0, lo, hi, d.cell(d.above(n)).1];
                    assert_eq!(Cells::around(d, x).edges, want, "{d} {x:e}");
                }
            }
        }
    }

    #[test]
    fn scale_is_that_of_a_logistic_of_the_same_variance() {
        // Variance of a logistic variable: s²π²/3.
        let s = scale_of(3.0, 8.0 / 0.29 * 0.5, Fineness::Coarse);
        assert_relative_eq!(s * s * PI * PI / 3.0, 25.0, max_relative = 1e-14);
    }

    #[test]
    fn what_is_not_finite_says_nothing() {
        assert_eq!(score(DType::Bf16, f64::NAN, 1.0, 0.1), 0.0);
        assert_eq!(score(DType::Bf16, 1.0, f64::INFINITY, 0.1), 0.0);
        assert_eq!(information(DType::Bf16, f64::NAN, 0.1), 0.0);
        // An overflowed output still says "larger", boundedly.
        assert_relative_eq!(score(DType::Bf16, f64::INFINITY, 1.0, 0.5), 2.0, max_relative = 1e-12);
    }
}
