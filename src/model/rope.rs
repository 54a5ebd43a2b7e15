/*!
Frequencies of rope: plain, with YaRN's ramp, or divided by one of two sets of factors.

Two sets of factors ("longrope"; MiniCPM3): `rope_factors_short.weight` holds while the session is not longer than what
the model was trained on, `rope_factors_long.weight` beyond it: `inv_freq_j = θ^(−2j/P) / factor_j`.
llama.cpp decides once, by the length of the session (n_ctx), whatever the positions are; transformers
takes the long set for every position of a call as soon as one lies beyond the trained length. So a file alone does not say which set holds:
the length of the session does, [`Reading::n_ctx`](super::Reading::n_ctx).
*/

use serde::Serialize;

/// YaRN as the file has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// rope.scaling.factor
    pub factor: f64,
    /// rope.scaling.original_context_length
    pub original: f64,
    /// rope.scaling.yarn_beta_fast, 32 where absent
    pub beta_fast: f64,
    /// rope.scaling.yarn_beta_slow, 1 where absent
    pub beta_slow: f64,
    /// rope.scaling.yarn_log_multiplier as stored
    pub log_multiplier: Option<f64>,
}

/// Two sets of divisors of the frequencies, as stored, P/2 each.
#[derive(Clone, Debug, PartialEq)]
pub struct Factors {
    /// For sessions up to `original`.
    pub short: Vec<f64>,
    /// For longer ones.
    pub long: Vec<f64>,
    /// Length the model was trained on: rope.scaling.original_context_length, else context_length.
    pub original: f64,
    /// Length the model was made for: context_length.
    pub context: f64,
}

/// A set of factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FactorSet {
    /// `rope_factors_short.weight`
    Short,
    /// `rope_factors_long.weight`
    Long,
}

impl FactorSet {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            FactorSet::Short => "short",
            FactorSet::Long => "long",
        }
    }
}

impl Factors {
    /// The set that holds in a session of `n_ctx` positions; None: one of the trained length.
    pub fn set(&self, n_ctx: Option<u64>) -> FactorSet {
        if n_ctx.is_some_and(|n| n as f64 > self.original) { FactorSet::Long } else { FactorSet::Short }
    }
    /// Its divisors.
    pub fn of(&self, set: FactorSet) -> &[f64] {
        match set {
            FactorSet::Short => &self.short,
            FactorSet::Long => &self.long,
        }
    }
    /// Which set a session of `n_ctx` positions takes, in words.
    pub fn said(&self, n_ctx: Option<u64>) -> String {
        let set = self.set(n_ctx);
        let session = n_ctx.map_or_else(
            || format!("a session of at most {} positions", self.original),
            |n| format!("a session of {n} positions, trained on {}", self.original),
        );
        let other = match (set, n_ctx) {
            (FactorSet::Short, None) => "; --n-ctx N says how long it is",
            _ => "",
        };
        format!("rope factors: the {} set, {session}{other}", set.name())
    }
    /// transformers' factor on cos and sin, of both sets: √(1 + ln f / ln original), f = context / original where above 1.
    pub fn magnitude(&self) -> f64 {
        let f = self.context / self.original;
        if f <= 1.0 { 1.0 } else { (1.0 + libm::log(f) / libm::log(self.original)).sqrt() }
    }
}

/// θ^(−2j/P), j = 0 … P/2 − 1.
pub(super) fn plain_frequencies(theta: f64, width: usize) -> Vec<f64> {
    (0..width / 2).map(|j| libm::pow(theta, -2.0 * j as f64 / width as f64)).collect()
}

/// YaRN's ramp between f and f / factor (arXiv 2309.00071, as transformers and llama.cpp compute it):
/// `dim(r) = P·ln(orig / 2πr) / (2 ln θ)`, from ⌊dim(fast)⌋ to ⌈dim(slow)⌉.
pub(super) fn yarn_frequencies(
    plain: &[f64],
    theta: f64,
    width: usize,
    y: &Yarn,
    betas: (f64, f64),
) -> Vec<f64> {
    let width = width as f64;
    let dim = |r: f64| width * libm::log(y.original / (r * std::f64::consts::TAU)) / (2.0 * libm::log(theta));
    let low = dim(betas.0).floor().max(0.0);
    let mut high = dim(betas.1).ceil().min(width - 1.0);
    if low == high {
        high += 0.001;
    }
    let ramp = |j: usize| ((j as f64 - low) / (high - low)).clamp(0.0, 1.0);
    plain.iter().enumerate().map(|(j, f)| f * (1.0 - ramp(j)) + f / y.factor * ramp(j)).collect()
}

/// Rounded to so many significant decimal digits: the decimal that a float32 in a file stands for.
pub(super) fn significant(x: f64, digits: usize) -> f64 {
    format!("{:.*e}", digits - 1, x).parse().unwrap_or(x)
}
