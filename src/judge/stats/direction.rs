/*!
Directions: by how much is the output off in a way that a fault would cause, and is that chance?
(sections 4.2, 4.3, 4.7)

A direction d is the change of the output by a factor (1 + β) on one thing: gain, softmax scale, the rope part
of the scores, the weight of some tokens. Rows are the clusters c; with scores g and informations I
`S_c = Σ g d`, `I_c = Σ I d²`, and one step of Newton from β = 0 gives
`β̂ = ΣS/ΣI`, `se_m = (ΣI)^−½` (by the model), `se_c = √(G/(G−1)·Σe²)/ΣI` with `e = S − β̂I` (by the spread of the
rows), `z_sym = ΣS/√ΣS²`, and the number of rows that really carry it, `G_eff = (ΣI)²/ΣI²`.

What is tested is |β| ≤ β0, the **floor**, not β = 0: what a contract leaves open (truncating accumulators, the
exponential) looks like a small factor too. β0 = steps·2⁻²⁴ + 2⁻²¹, at least 2·10⁻⁵ for the fine score; for
tokens 2⁻⁸, since one flip of the cast of P is a change of that token's weight.

p-values, with z = (|β̂| − β0)/max(se_m, se_c) and "clean" = casts emulated and the flip test passed:

| case | law |
|---|---|
| clean, and the direction is global or G_eff ≥ 12 | normal |
| not clean, G_eff ≥ 12 | Student, G_eff − 1 |
| else | p = 2exp(−z_sym²/2): holds for independent symmetric S_c of any law, and is never below 2exp(−G/2) |
*/

use super::score::Fineness;
use super::tail::{log_normal, log_student};
use mla_numeric::U;
use mla_reference::attention::{Attended, Head, Merged, part, weigh};
use mla_reference::product::{Strided, product};
use ndarray::{Array2, Axis, s};
use std::f64::consts::LN_2;

/// Fewest effective rows for a law that takes the spread of the rows as known.
const FEW: f64 = 12.0;

/// What a direction belongs to: decides its floor and its law.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One factor on the whole tensor: gain, softmax scale, rope weight.
    Global,
    /// A factor that some rows carry: gain of a head, eps of a norm.
    Local,
    /// The weight of some keys.
    Tokens,
}

/// Sums of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cluster {
    /// S_c.
    pub score: f64,
    /// I_c.
    pub information: f64,
}

/// S_c and I_c of a row with scores `g`, informations `info` and direction `d`.
pub fn cluster(g: &[f64], info: &[f64], d: &[f64]) -> Cluster {
    let mut c = Cluster::default();
    for ((g, i), d) in g.iter().zip(info).zip(d) {
        c.score += g * d;
        c.information += i * d * d;
    }
    c
}

/// What the rows say about a direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// β̂.
    pub beta: f64,
    /// Standard error by the model.
    pub se_m: f64,
    /// Standard error by the spread of the rows.
    pub se_c: f64,
    /// Self-normalised statistic.
    pub z_sym: f64,
    /// Rows that carry the direction.
    pub g_eff: f64,
}

impl Estimate {
    /// The larger standard error.
    pub fn se(&self) -> f64 {
        self.se_m.max(self.se_c)
    }
}

/// β̂ of a direction, or None where no row carries it (then it is not tested).
pub fn test_direction(rows: &[Cluster]) -> Option<Estimate> {
    let sum = |f: &dyn Fn(&Cluster) -> f64| rows.iter().map(f).sum::<f64>();
    let (score, info) = (sum(&|c| c.score), sum(&|c| c.information));
    if info.is_nan() || info <= 0.0 {
        return None;
    }
    let (beta, n) = (score / info, rows.len() as f64);
    let spread = sum(&|c| (c.score - beta * c.information).powi(2)) * n / (n - 1.0).max(1.0);
    let squares = sum(&|c| c.score * c.score);
    Some(Estimate {
        beta,
        se_m: 1.0 / info.sqrt(),
        se_c: spread.sqrt() / info,
        z_sym: if squares > 0.0 { score / squares.sqrt() } else { 0.0 },
        g_eff: info * info / sum(&|c| c.information * c.information),
    })
}

/// β0; `steps`: accumulator roundings of the stage.
pub fn floor(kind: Kind, steps: f64, fineness: Fineness) -> f64 {
    let drift = steps * U + 8.0 * U;
    match (kind, fineness) {
        (Kind::Tokens, _) => 1.0 / 256.0,
        (_, Fineness::Coarse) => drift,
        (_, Fineness::Fine) => drift.max(2e-5),
    }
}

/// Law of a test statistic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Law {
    /// Standard normal.
    Normal,
    /// Student's.
    Student {
        /// Degrees of freedom.
        dof: f64,
    },
    /// Bound for symmetric rows.
    SelfNormalised,
}

impl Law {
    /// The row of the table.
    pub fn of(kind: Kind, clean: bool, g_eff: f64) -> Law {
        match (clean, g_eff >= FEW) {
            (true, enough) if enough || kind == Kind::Global => Law::Normal,
            (_, true) => Law::Student { dof: g_eff - 1.0 },
            _ => Law::SelfNormalised,
        }
    }

    /// ln of the two-sided p-value of z.
    pub fn log_p(self, z: f64) -> f64 {
        match self {
            Law::Normal => log_normal(z),
            Law::Student { dof } => log_student(z, dof),
            Law::SelfNormalised => (LN_2 - z * z / 2.0).min(0.0),
        }
    }
}

/// A p-value, with how it was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PValue {
    /// Natural logarithm.
    pub log_p: f64,
    /// Test statistic.
    pub z: f64,
    /// Its law.
    pub law: Law,
}

/// p-value of |β| ≤ `floor`.
pub fn p_value(kind: Kind, estimate: &Estimate, floor: f64, clean: bool) -> PValue {
    let law = Law::of(kind, clean, estimate.g_eff);
    let beyond = (estimate.beta.abs() - floor).max(0.0);
    let z = match law {
        Law::SelfNormalised if beyond > 0.0 => estimate.z_sym,
        Law::SelfNormalised => 0.0,
        _ => beyond / estimate.se(),
    };
    PValue { log_p: law.log_p(z), z, law }
}

/// Some rows of an attention, with what its directions are made of.
pub struct Weighed<'a, 'h> {
    /// True probabilities, without the contract's casts, `[rows, range]`.
    p: Array2<f64>,
    /// Scores times scale; 0 where masked, `[rows, range]`.
    s: Array2<f64>,
    /// The rows' outputs, `[rows, value width]`.
    x: Array2<f64>,
    /// The rows' queries.
    q: Array2<f64>,
    head: &'a Head<'h>,
    range: std::ops::Range<usize>,
}

impl<'a, 'h> Weighed<'a, 'h> {
    /// These rows of an attention.
    pub fn new(a: &Attended, head: &'a Head<'h>, rows: &[usize]) -> Weighed<'a, 'h> {
        Weighed::of(a.s.select(Axis(0), rows), &a.x, a.range.clone(), head, rows)
    }

    /// These rows of an attention whose splits are merged inside.
    pub fn split(m: &Merged, head: &'a Head<'h>, rows: &[usize]) -> Weighed<'a, 'h> {
        let start = m.parts.iter().map(|p| p.range.start).min().unwrap_or(0);
        let end = m.parts.iter().map(|p| p.range.end).max().unwrap_or(start);
        // A key of no split is as good as masked.
        let mut s = Array2::from_elem((rows.len(), end - start), f64::NEG_INFINITY);
        for part in &m.parts {
            let keys = part.range.start - start..part.range.end - start;
            s.slice_mut(s![.., keys]).assign(&part.s.select(Axis(0), rows));
        }
        Weighed::of(s, &m.x, start..end, head, rows)
    }

    fn of(
        mut s: Array2<f64>,
        x: &Array2<f64>,
        range: std::ops::Range<usize>,
        head: &'a Head<'h>,
        rows: &[usize],
    ) -> Weighed<'a, 'h> {
        let mut p = s.clone();
        for mut row in p.rows_mut() {
            let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if most > f64::NEG_INFINITY {
                row.mapv_inplace(|s| libm::exp(s - most));
                let sum = row.sum();
                row.mapv_inplace(|p| p / sum);
            } else {
                row.fill(0.0);
            }
        }
        s.mapv_inplace(|s| if s.is_finite() { s } else { 0.0 });
        Weighed { p, s, x: x.select(Axis(0), rows), q: head.q.select(Axis(0), rows), head, range }
    }

    /// Keys and values of the range.
    fn keys(&self) -> Strided<'h> {
        part(&self.head.k, self.range.clone())
    }

    /// ∂x/∂ln scale = Σ P_t (s_t − s̄) v_t.
    pub fn scale(&self) -> Array2<f64> {
        self.by_scores(&self.s)
    }

    /// ∂lse/∂ln scale = Σ P_t s_t.
    pub fn scale_of_lse(&self) -> Array2<f64> {
        let sums = (&self.p * &self.s).sum_axis(Axis(1));
        sums.insert_axis(Axis(1))
    }

    /// ∂x by a factor on the rope part of the scores, the last `width` columns of queries and keys.
    pub fn rope_weight(&self, width: usize) -> Array2<f64> {
        self.by_scores(&self.rope_scores(width))
    }

    /// ∂lse by the same factor: Σ P_t s_t of the rope part alone.
    pub fn rope_weight_of_lse(&self, width: usize) -> Array2<f64> {
        (&self.p * &self.rope_scores(width)).sum_axis(Axis(1)).insert_axis(Axis(1))
    }

    fn rope_scores(&self, width: usize) -> Array2<f64> {
        let keys = self.keys();
        let first = keys.cols.saturating_sub(width);
        let keys = Strided { data: keys.data.get(first..).unwrap_or(&[]), cols: keys.cols - first, ..keys };
        let mut scores = Array2::zeros(self.s.dim());
        let q = self.q.slice(s![.., first..]);
        let q = q.as_standard_layout();
        if let (Some(q), Some(out)) = (q.as_slice(), scores.as_slice_mut()) {
            product(q, self.s.nrows(), &keys, out);
        }
        scores.mapv_inplace(|v| v * self.head.scale);
        scores
    }

    /// Relative weight of the keys for which `member(position)`: Σ over them of P_t (v_t − x).
    pub fn tokens(&self, member: impl Fn(usize) -> bool) -> Array2<f64> {
        let mut weights = self.p.clone();
        for (t, mut column) in weights.columns_mut().into_iter().enumerate() {
            if !member(self.range.start + t) {
                column.fill(0.0);
            }
        }
        let mut d = weigh(weights.view(), &part(&self.head.v, self.range.clone()));
        for ((mut d, x), w) in d.rows_mut().into_iter().zip(self.x.rows()).zip(weights.rows()) {
            let sum = w.sum();
            d.iter_mut().zip(x).for_each(|(d, x)| *d -= sum * x);
        }
        d
    }

    /// Σ P_t (s_t − s̄) v_t for scores s; masked keys have P = 0.
    fn by_scores(&self, scores: &Array2<f64>) -> Array2<f64> {
        let mut weights = self.p.clone();
        for (mut w, s) in weights.rows_mut().into_iter().zip(scores.rows()) {
            let mean: f64 = w.iter().zip(s).map(|(w, s)| w * s).sum();
            w.iter_mut().zip(s).for_each(|(w, s)| *w *= s - mean);
        }
        weigh(weights.view(), &part(&self.head.v, self.range.clone()))
    }
}

/// All rows of an attention.
fn all<'a, 'h>(a: &Attended, head: &'a Head<'h>) -> Weighed<'a, 'h> {
    Weighed::new(a, head, &(0..a.s.nrows()).collect::<Vec<_>>())
}

/// ∂x/∂ln scale of all rows.
pub fn scale(a: &Attended, head: &Head) -> Array2<f64> {
    all(a, head).scale()
}

/// The same of an attention whose splits are merged inside.
pub fn scale_split(m: &Merged, head: &Head) -> Array2<f64> {
    Weighed::split(m, head, &(0..m.x.nrows()).collect::<Vec<_>>()).scale()
}

/// ∂x by a factor on the rope part of the scores, of all rows.
pub fn rope_weight(a: &Attended, head: &Head, width: usize) -> Array2<f64> {
    all(a, head).rope_weight(width)
}

/// Relative weight of some keys, of all rows.
pub fn tokens(a: &Attended, head: &Head, member: impl Fn(usize) -> bool) -> Array2<f64> {
    all(a, head).tokens(member)
}

#[cfg(test)]
#[path = "direction_tests.rs"]
mod tests;
