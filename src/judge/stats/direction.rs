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

use super::noise::probabilities;
use super::score::Fineness;
use super::tail::{log_normal, log_student};
use mla_numeric::U;
use mla_reference::attention::{Attended, Head, Merged, part, weigh};
use mla_reference::product::{Strided, product};
use ndarray::{Array2, ArrayView2, s};
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

/// ∂x/∂ln scale = Σ P_t (s_t − s̄) v_t.
pub fn scale(a: &Attended, head: &Head) -> Array2<f64> {
    by_scores(a, head, a.s.view())
}

/// The same of an attention whose splits are merged inside.
pub fn scale_split(m: &Merged, head: &Head) -> Array2<f64> {
    let mut d = Array2::zeros(m.x.dim());
    let probable: Vec<Array2<f64>> = m.parts.iter().map(probabilities).collect();
    let finite = |s: &f64| if s.is_finite() { *s } else { 0.0 };
    // s̄ of each row over all keys.
    let means: Vec<f64> = (0..m.x.nrows())
        .map(|i| {
            let part = |(s, (a, p)): (usize, (&Attended, &Array2<f64>))| {
                let own: f64 = p.row(i).iter().zip(a.s.row(i)).map(|(p, s)| p * finite(s)).sum();
                m.weights[[s, i]] * own
            };
            m.parts.iter().zip(&probable).enumerate().map(part).sum()
        })
        .collect();
    for (s, (a, mut weights)) in m.parts.iter().zip(probable).enumerate() {
        for (i, (mut w, scores)) in weights.rows_mut().into_iter().zip(a.s.rows()).enumerate() {
            let of_part = m.weights[[s, i]];
            w.iter_mut().zip(scores).for_each(|(w, s)| *w *= of_part * (finite(s) - means[i]));
        }
        d += &weigh(weights.view(), &part(&head.v, a.range.clone()));
    }
    d
}

/// ∂x by a factor on the rope part of the scores, the last `width` columns of queries and keys.
pub fn rope_weight(a: &Attended, head: &Head, width: usize) -> Array2<f64> {
    let first = head.k.cols.saturating_sub(width);
    let keys = part(&head.k, a.range.clone());
    let keys = Strided { data: keys.data.get(first..).unwrap_or(&[]), cols: head.k.cols - first, ..keys };
    let mut scores = Array2::zeros(a.s.dim());
    let q = head.q.slice(s![.., first..]);
    let q = q.as_standard_layout();
    if let (Some(q), Some(out)) = (q.as_slice(), scores.as_slice_mut()) {
        product(q, a.s.nrows(), &keys, out);
    }
    scores.mapv_inplace(|v| v * head.scale);
    by_scores(a, head, scores.view())
}

/// Relative weight of the keys for which `member(position)`: Σ over them of P_t (v_t − x).
pub fn tokens(a: &Attended, head: &Head, member: impl Fn(usize) -> bool) -> Array2<f64> {
    let mut weights = probabilities(a);
    for (t, mut column) in weights.columns_mut().into_iter().enumerate() {
        if !member(a.range.start + t) {
            column.fill(0.0);
        }
    }
    let mut d = weigh(weights.view(), &part(&head.v, a.range.clone()));
    for ((mut d, x), w) in d.rows_mut().into_iter().zip(a.x.rows()).zip(weights.rows()) {
        let sum = w.sum();
        d.iter_mut().zip(x).for_each(|(d, x)| *d -= sum * x);
    }
    d
}

/// Σ P_t (s_t − s̄) v_t for scores s, whose masked ones weigh nothing.
fn by_scores(a: &Attended, head: &Head, scores: ArrayView2<f64>) -> Array2<f64> {
    let mut weights = probabilities(a);
    for (mut w, s) in weights.rows_mut().into_iter().zip(scores.rows()) {
        let finite = |s: &f64| if s.is_finite() { *s } else { 0.0 };
        let mean: f64 = w.iter().zip(s).map(|(w, s)| w * finite(s)).sum();
        w.iter_mut().zip(s).for_each(|(w, s)| *w *= finite(s) - mean);
    }
    weigh(weights.view(), &part(&head.v, a.range.clone()))
}

#[cfg(test)]
#[path = "direction_tests.rs"]
mod tests;
