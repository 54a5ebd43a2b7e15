/*!
Other people's rules: what they would have said of an engine's output and a plain float64 reference.

| rule | passes where | from |
|---|---|---|
| `cosine` | Σab / √(Σa² Σb²) > 0.99 | SGLang's attention tests |
| `nmse` | Σ(a − b)² / Σb² ≤ 5e-4 | llama.cpp's test-backend-ops |
| `allclose` | every \|a − b\| ≤ 1e-2 + 1e-2 \|b\| | FlashInfer's MLA tests |
| `flashmla` | every element \|a − b\| < 8e-4 or \|a − b\| / \|b\| < 2.01/128, and 1 − 2Σab / Σ(a² + b²) ≤ 5e-6, and what is not finite is so at the same places; lse: every element < 1e-6 or < 8.01/65536, no sum | FlashMLA's tests |
| `twice-low` | max \|a − b\| ≤ 2 max \|low − b\| + 2 max \|(b + 0.3 − 0.3) − b\| | FlashAttention's tests |

a is the engine, b the reference; `low` an eager computation of the same stage in the engine's 16-bit dtype, and
`b + 0.3 − 0.3` is computed in that dtype from b rounded to it. None of this decides anything here: the numbers stand
beside our verdict.

Every rule is turned into the share of what it allows: up to 1 it passes. Elements come in any order, from several
tallies; sums are kept by row and added in the order of rows, so that no figure depends on threads.
*/

use crate::written::{self, Name, text};
use mla_numeric::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Names of all rules, in the order in which they are told.
pub const RULES: [&str; 5] = ["cosine", "nmse", "allclose", "flashmla", "twice-low"];

/// Relative limit and absolute limit of an output in FlashMLA's tests, and of the sum.
const FLASHMLA: (f64, f64, f64) = (2.01 / 128.0, 8e-4, 5e-6);
/// The same for lse, which has no sum.
const FLASHMLA_LSE: (f64, f64) = (8.01 / 65_536.0, 1e-6);

/// Sums over part of a row.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    aa: f64,
    bb: f64,
    ab: f64,
    dd: f64,
}

/// Everything that the rules need of one tensor.
#[derive(Clone, Debug, Default)]
pub struct Gates {
    rows: BTreeMap<(usize, usize), Sums>,
    /// max |a − b| / (1e-2 + 1e-2 |b|).
    allclose: f64,
    /// max over elements of the smaller of its two shares: outputs, lse.
    element: [f64; 2],
    /// max |a − b|, max |low − b|, max |(b + 0.3 − 0.3) − b|.
    largest: [f64; 3],
    /// Elements that are finite on one side only, or differ where they are not.
    odd: u64,
    elements: u64,
}

/// What one rule says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// `cosine`, `nmse`, `allclose`, `flashmla`, `twice-low`.
    #[serde(deserialize_with = "written::name")]
    pub rule: Name,
    /// The rule's own number, as text (infinity has no JSON).
    #[serde(with = "text")]
    pub value: f64,
    /// What it may be.
    pub limit: f64,
    /// How much of the allowance is used, as text; the cosine's is that of 1 − cosine.
    #[serde(with = "text")]
    pub share: f64,
    /// Whether it passes.
    pub passed: bool,
}

impl Gates {
    /// Part of a row: engine, reference, and the eager computation where there is one (else the reference rounded).
    /// `at` is its row and first column; `low` the 16-bit dtype.
    pub fn row(&mut self, at: (usize, usize), a: &[f64], b: &[f64], eager: Option<&[f64]>, low: DType) {
        let mut s = Sums::default();
        for (j, (&a, &b)) in a.iter().zip(b).enumerate() {
            self.elements += 1;
            if !a.is_finite() || !b.is_finite() {
                let same = a.is_nan() && b.is_nan() || a == b;
                self.odd += u64::from(!same);
                continue;
            }
            let d = (a - b).abs();
            s.aa += a * a;
            s.bb += b * b;
            s.ab += a * b;
            s.dd += d * d;
            self.allclose = self.allclose.max(d / (1e-2 + 1e-2 * b.abs()));
            for (most, (relative, absolute)) in
                self.element.iter_mut().zip([(FLASHMLA.0, FLASHMLA.1), FLASHMLA_LSE])
            {
                let by_size = if d == 0.0 { 0.0 } else { d / b.abs() / relative };
                *most = most.max(by_size.min(d / absolute));
            }
            let rounded = low.round(b);
            let there_and_back = low.round(low.round(rounded + 0.3) - 0.3);
            let e = eager.map_or(rounded, |e| e[j]);
            for (most, v) in self.largest.iter_mut().zip([d, (e - b).abs(), (there_and_back - rounded).abs()])
            {
                *most = most.max(if v.is_nan() { f64::INFINITY } else { v });
            }
        }
        self.rows.insert(at, s);
    }

    /// Another part's rows too.
    pub fn merge(&mut self, other: Gates) {
        self.rows.extend(other.rows);
        self.allclose = self.allclose.max(other.allclose);
        self.element.iter_mut().zip(other.element).for_each(|(a, b)| *a = a.max(b));
        self.largest.iter_mut().zip(other.largest).for_each(|(a, b)| *a = a.max(b));
        self.odd += other.odd;
        self.elements += other.elements;
    }

    /// What every rule says; of an lse those that are made for one.
    pub fn rules(&self, lse: bool) -> Vec<Rule> {
        let mut s = Sums::default();
        for r in self.rows.values() {
            s.aa += r.aa;
            s.bb += r.bb;
            s.ab += r.ab;
            s.dd += r.dd;
        }
        let ratio = |a: f64, b: f64, none: f64| if b > 0.0 { a / b } else { none };
        let zero = if s.dd == 0.0 { 0.0 } else { f64::INFINITY };
        let cosine = ratio(s.ab, (s.aa * s.bb).sqrt(), if s.dd == 0.0 { 1.0 } else { 0.0 });
        let nmse = ratio(s.dd, s.bb, zero);
        // = 1 − 2Σab/Σ(a²+b²), without its cancellation.
        let difference = ratio(s.dd, s.aa + s.bb, 0.0);
        let odd = self.odd > 0;
        let rule = |rule, value: f64, limit: f64, share: f64, strict: bool| {
            let (value, share) = if odd { (f64::INFINITY, f64::INFINITY) } else { (value, share) };
            Rule { rule, value, limit, share, passed: if strict { share < 1.0 } else { share <= 1.0 } }
        };
        let mut all = vec![
            rule("cosine", cosine, 0.99, (1.0 - cosine).max(0.0) / 0.01, true),
            rule("nmse", nmse, 5e-4, nmse / 5e-4, false),
            rule("allclose", self.allclose, 1.0, self.allclose, false),
        ];
        if lse {
            all.push(rule("flashmla", self.element[1], 1.0, self.element[1], true));
            return all;
        }
        let both = self.element[0].max(difference / FLASHMLA.2);
        all.push(Rule {
            passed: !odd && self.element[0] < 1.0 && difference <= FLASHMLA.2,
            ..rule("flashmla", both, 1.0, both, false)
        });
        let limit = 2.0 * self.largest[1] + 2.0 * self.largest[2];
        let share = ratio(self.largest[0], limit, if self.largest[0] == 0.0 { 0.0 } else { f64::INFINITY });
        all.push(rule("twice-low", self.largest[0], limit, share, false));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    fn of(a: &[f64], b: &[f64], eager: Option<&[f64]>, lse: bool) -> Vec<Rule> {
        let mut g = Gates::default();
        g.row((0, 0), a, b, eager, DType::Bf16);
        g.rules(lse)
    }

    /// a = (3, 4.5), b = (3, 4): Σa² = 29.25, Σb² = 25, Σab = 27, Σ(a−b)² = 0.25.
    #[test]
    fn rules_by_hand() {
        let r = of(&[3.0, 4.5], &[3.0, 4.0], Some(&[3.0, 4.125]), false);
        assert_eq!(r.iter().map(|r| r.rule).collect::<Vec<_>>(), RULES);
        assert_relative_eq!(r[0].value, 27.0 / (29.25f64 * 25.0).sqrt(), max_relative = 1e-14);
        assert!(r[0].passed); // 0.9985
        assert_relative_eq!(r[1].value, 0.01, max_relative = 1e-14);
        assert!(!r[1].passed);
        assert_relative_eq!(r[2].value, 0.5 / 0.05, max_relative = 1e-14);
        assert!(!r[2].passed);
        // The element: 0.125 / (2.01/128) = 7.96; the sum: 0.25 / 54.25 / 5e-6 = 921.7.
        assert_relative_eq!(r[3].share, 0.25 / 54.25 / 5e-6, max_relative = 1e-12);
        assert!(!r[3].passed);
        // bf16: 3.3 → 3.296875, − 0.3 → 3.0 (2.996875 between 2.984375 and 3, nearer 3); 4.3 → 4.3125, 4.0125 → 4.
        // So nothing is lost there, and 0.5 > 2 · 0.125.
        assert_eq!((r[4].limit, r[4].value, r[4].passed), (0.25, 0.5, false));
        assert!(of(&[3.0, 4.25], &[3.0, 4.0], Some(&[3.0, 4.125]), false)[4].passed);
    }

    /// 0.002 is off by more than the absolute limit only as a share of a small value: 1e-6 of 1e-5 passes by size.
    #[test]
    fn flashmla_takes_the_kinder_of_two_limits_and_a_sum() {
        let flashmla = |a: f64, b: f64| of(&[a, 1.0], &[b, 1.0], None, false)[3].clone();
        assert!(flashmla(1.1e-5, 1e-5).passed);
        assert_relative_eq!(flashmla(0.101, 0.1).share, 0.01 / (2.01 / 128.0), max_relative = 1e-9);
        assert!(flashmla(0.101, 0.1).passed);
        assert!(!flashmla(0.102, 0.1).passed);
        let lse = |a: f64, b: f64| of(&[a], &[b], None, true)[3].passed;
        assert!(lse(8.0 + 8.0 * 8.0 / 65_536.0, 8.0) && !lse(8.0 + 8.0 * 8.1 / 65_536.0, 8.0));
    }

    #[test]
    fn a_gain_is_invisible_to_the_cosine() {
        let b: Vec<f64> = (1..50).map(|i| (f64::from(i)).sin()).collect();
        let a: Vec<f64> = b.iter().map(|v| v * 2.0).collect();
        let r = of(&a, &b, None, false);
        assert!(r[0].passed && (r[0].value - 1.0).abs() < 1e-15 && r[1..].iter().all(|r| !r.passed));
    }

    #[test]
    fn what_is_not_finite_must_be_so_on_both_sides() {
        let nan = f64::NAN;
        assert!(of(&[nan, 1.0], &[1.0, 1.0], None, false).iter().all(|r| !r.passed));
        assert!(of(&[nan, 1.0], &[nan, 1.0], None, false).iter().all(|r| r.passed));
        assert!(of(&[0.0], &[0.0], None, false).iter().all(|r| r.passed));
        assert!(of(&[1.0], &[0.0], None, false).iter().all(|r| !r.passed));
    }

    /// The same bits in any order of rows and any grouping.
    #[test]
    fn order_and_grouping_change_nothing() {
        let value = |i: usize, k: f64| ((i * 7919 % 997) as f64 / 131.0 - 3.5) * k;
        let rows: Vec<(Vec<f64>, Vec<f64>)> = (0..40)
            .map(|r| (0..17).map(|c| (value(r * 17 + c, 1.001), value(r * 17 + c, 1.0))).unzip())
            .collect();
        let add = |g: &mut Gates, r: usize| g.row((r, 0), &rows[r].0, &rows[r].1, None, DType::Bf16);
        let mut forward = Gates::default();
        (0..40).for_each(|r| add(&mut forward, r));
        let (mut odd, mut even) = (Gates::default(), Gates::default());
        (0..40).rev().for_each(|r| add(if r % 2 == 0 { &mut even } else { &mut odd }, r));
        odd.merge(even);
        assert_eq!(forward.rules(false), odd.rules(false));
    }
}
