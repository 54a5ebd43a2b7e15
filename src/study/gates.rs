/*!
What the gates in common use make of a tensor: columns of a study of sensitivity.

They are given more than their users have: the very tensor at fault, and its *isolated* reference (computed from
the engine's own inputs, under the contract that the judge was told, and rounded to the tensor's dtype) instead of
the end of a layer. A gate rejects a run when it rejects any of the tensors at which the fault acts.

Rules as published (g: engine, r: reference):

- cosine: Σgr / √(Σg²Σr²) < 0.99 (SGLang, grouped against ungrouped attention);
- nmse: Σ(g − r)² / Σr² > 5e-4 (ggml's test-backend-ops, MUL_MAT and FLASH_ATTN_EXT);
- allclose: any |g − r| > 1e-2 + 1e-2·|r| (FlashInfer, MLA);
- flashmla: any |g − r| ≥ 8e-4 that is also ≥ 2.01/128 of |r|, or 1 − 2Σgr/Σ(g² + r²) > 5e-6; of an lse any
  |g − r| ≥ 1e-6 that is also ≥ 8.01/65536 of |r|, and no sum.

Elements that are not finite must agree in kind; else every gate rejects.
*/

use super::subjects::Subject;
use crate::engine::SinkError;
use crate::judge::Recorder;
use crate::trace::{Tensor, TensorId};
use mla_reference::Stage;

/// Names of the gates, in the order of columns.
pub const GATES: [&str; 4] = ["cosine", "nmse", "allclose", "flashmla"];

/// Sums that the gates need.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    gg: f64,
    rr: f64,
    gr: f64,
    dd: f64,
    far: bool,
    far_flashmla: bool,
    far_lse: bool,
    unlike: bool,
}

impl Sums {
    /// Adds one element.
    pub fn add(&mut self, g: f64, r: f64) {
        if !g.is_finite() || !r.is_finite() {
            self.unlike |= !(g == r || g.is_nan() && r.is_nan());
            return;
        }
        let d = (g - r).abs();
        self.gg += g * g;
        self.rr += r * r;
        self.gr += g * r;
        self.dd += d * d;
        self.far |= d > 1e-2 + 1e-2 * r.abs();
        self.far_flashmla |= d >= 8e-4 && d >= 2.01 / 128.0 * r.abs();
        self.far_lse |= d >= 1e-6 && d >= 8.01 / 65_536.0 * r.abs();
    }

    /// Which gates reject a tensor, an lse or another one, in the order of [`GATES`].
    pub fn rejected(&self, lse: bool) -> [bool; GATES.len()] {
        if self.unlike {
            return [true; GATES.len()];
        }
        // Two tensors of zeros agree.
        if self.gg + self.rr == 0.0 {
            return [false; GATES.len()];
        }
        let cosine = self.gr / (self.gg * self.rr).sqrt();
        let like = 1.0 - 2.0 * self.gr / (self.gg + self.rr);
        // Written so that NaN rejects.
        let reject = |passes: bool| !passes;
        [
            reject(cosine >= 0.99),
            reject(self.dd <= 5e-4 * self.rr),
            self.far,
            if lse { self.far_lse } else { self.far_flashmla || reject(like <= 5e-6) },
        ]
    }
}

/// Looks at the tensors at which faults act.
pub struct Watch<'a> {
    /// Which gates have rejected any tensor of each subject.
    subjects: Vec<(&'a Subject, [bool; GATES.len()])>,
}

impl<'a> Watch<'a> {
    /// Tensors of these subjects.
    pub fn all(subjects: &[&'a Subject]) -> Watch<'a> {
        Watch { subjects: subjects.iter().map(|s| (*s, [false; GATES.len()])).collect() }
    }

    /// Which gates reject, subject by subject.
    pub fn results(&self) -> impl Iterator<Item = (&'a str, [bool; GATES.len()])> {
        self.subjects.iter().map(|(s, rejected)| (s.name, *rejected))
    }
}

impl Recorder for Watch<'_> {
    fn record(&mut self, id: TensorId, engine: &Tensor, reference: &Tensor) -> Result<(), SinkError> {
        if !self.subjects.iter().any(|(s, _)| s.stages.contains(&id.stage)) {
            return Ok(());
        }
        let mut sums = Sums::default();
        let (mut g, mut r) = (vec![0.0; engine.cols], vec![0.0; engine.cols]);
        for row in 0..engine.rows {
            engine.read(row, 0..engine.cols, &mut g);
            reference.read(row, 0..engine.cols, &mut r);
            g.iter().zip(&r).for_each(|(g, r)| sums.add(*g, *r));
        }
        let found = sums.rejected(matches!(id.stage, Stage::Lse | Stage::PartLse));
        for (_, all) in self.subjects.iter_mut().filter(|(s, _)| s.stages.contains(&id.stage)) {
            all.iter_mut().zip(found).for_each(|(all, this)| *all |= this);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejected(pairs: impl Iterator<Item = (f64, f64)>) -> [bool; 4] {
        let mut s = Sums::default();
        pairs.for_each(|(g, r)| s.add(g, r));
        s.rejected(false)
    }

    /// A gain of e: NMSE e², cosine none, allclose beyond 1e-2·(1 + 1/|r|), FlashMLA's difference e²/2 to first order.
    #[test]
    fn a_gain_is_seen_from_where_the_formulas_say() {
        let gain = |e: f64, size: f64| {
            rejected((1..100).map(move |i| {
                let r = size * f64::from(i) / 100.0;
                (r * (1.0 + e), r)
            }))
        };
        assert_eq!(gain(0.0, 1.0), [false; 4]);
        assert_eq!(gain(0.5, 1.0), [false, true, true, true]);
        assert_eq!(gain(0.0223, 0.4), [false, false, false, true]);
        assert_eq!(gain(0.0224, 0.4), [false, true, false, true]);
        assert!(gain(0.021, 1.0)[2] && !gain(0.0199, 1.0)[2]);
        assert_eq!(gain(0.0031, 0.01), [false; 4]);
        assert_eq!(gain(0.0033, 0.01), [false, false, false, true]);
    }

    #[test]
    fn an_lse_has_limits_of_its_own() {
        let lse = |g: f64, r: f64| {
            let mut s = Sums::default();
            s.add(g, r);
            s.rejected(true)[3]
        };
        assert!(!lse(8.0 + 8.0 * 8.0 / 65_536.0, 8.0) && lse(8.0 + 8.0 * 8.1 / 65_536.0, 8.0));
        assert!(!lse(9e-7, 0.0) && lse(1.1e-6, 0.0));
    }

    #[test]
    fn permutations_signs_and_nan_are_seen() {
        assert_eq!(rejected([(1.0, -1.0), (2.0, 2.0)].into_iter()), [true; 4]);
        assert_eq!(rejected([(f64::NAN, 1.0)].into_iter()), [true; 4]);
        assert_eq!(rejected([(f64::INFINITY, f64::NEG_INFINITY)].into_iter()), [true; 4]);
        assert_eq!(rejected([(f64::NAN, f64::NAN), (1.0, 1.0)].into_iter()), [false; 4]);
        assert_eq!(rejected([(0.0, 0.0)].into_iter()), [false; 4]);
    }
}
