/*!
The scalars of a layer: widths, and the numbers of its mathematics (eps, rope, scale).

Every scalar that could differ between an engine and the truth is in [`Spec::scalars`]: the judge compares
those before any tensor, since equal bytes prove nothing when both sides read the same wrong number.
*/

use serde::{Deserialize, Serialize};

/// Widths of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Geometry {
    /// D: width of the hidden state.
    pub hidden: usize,
    /// H: query heads.
    pub heads: usize,
    /// R: query rank (q_lora_rank); 0: queries come straight from the hidden state.
    pub q_rank: usize,
    /// L: kv_lora_rank.
    pub latent: usize,
    /// P: rotated columns of a head.
    pub rope: usize,
    /// N: columns of a head that are not rotated.
    pub nope: usize,
    /// V: columns of a value head.
    pub value: usize,
}

impl Geometry {
    /// N + P: width of a query or key head.
    pub const fn key(&self) -> usize {
        self.nope + self.rope
    }
    /// L + P: width of a cache row.
    pub const fn cache(&self) -> usize {
        self.latent + self.rope
    }
    /// H · (N + P): width of all query heads.
    pub const fn queries(&self) -> usize {
        self.heads * self.key()
    }
    /// H · V: width of all value heads.
    pub const fn values(&self) -> usize {
        self.heads * self.value
    }
}

/// Which columns rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pairing {
    /// (2j, 2j+1): ggml's NORM, "interleaved".
    Adjacent,
    /// (j, j + P/2): ggml's NEOX, "half-split".
    Half,
}

/// Rotary embedding: angle of pair j at position p is `p · inv_freq[j]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Radians a position, P/2 values; YaRN's ramp is already in them.
    pub inv_freq: Vec<f64>,
    /// Factor on cos and sin (YaRN's attention factor; 1 for all known MLA models).
    pub magnitude: f64,
    /// Pair order as the file stores it.
    pub pairing: Pairing,
}

/// Llama-4 temperature: q of position p is multiplied by 1 + scale · ln(1 + ⌊p / length⌋).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Temperature {
    pub scale: f64,
    pub length: f64,
}

impl Temperature {
    /// The factor at a position.
    pub fn factor(&self, position: u64) -> f64 {
        1.0 + self.scale * libm::log(1.0 + (position as f64 / self.length).floor())
    }
}

/// All that decides the mathematics of one attention layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Widths.
    pub geometry: Geometry,
    /// eps of the norm before attention.
    pub eps_attn: f64,
    /// eps of the q_a and kv_a norms (engines disagree about it).
    pub eps_latent: f64,
    /// Rotation.
    pub rope: Rope,
    /// Factor on q·k: 1/√(N+P), times the YaRN factor.
    pub scale: f64,
    /// Temperature of the queries, where the model has one.
    pub temperature: Option<Temperature>,
}

impl Spec {
    /// Every scalar by name, for comparison before any tensor.
    pub fn scalars(&self) -> Vec<(String, f64)> {
        let g = &self.geometry;
        let mut all: Vec<(String, f64)> = [
            ("hidden", g.hidden as f64),
            ("heads", g.heads as f64),
            ("q_rank", g.q_rank as f64),
            ("latent", g.latent as f64),
            ("rope", g.rope as f64),
            ("nope", g.nope as f64),
            ("value", g.value as f64),
            ("eps_attn", self.eps_attn),
            ("eps_latent", self.eps_latent),
            ("scale", self.scale),
            ("rope_magnitude", self.rope.magnitude),
            ("rope_half_split", f64::from(u8::from(self.rope.pairing == Pairing::Half))),
            ("temperature_scale", self.temperature.map_or(0.0, |t| t.scale)),
            ("temperature_length", self.temperature.map_or(0.0, |t| t.length)),
        ]
        .into_iter()
        .map(|(n, v)| (n.to_string(), v))
        .collect();
        all.extend(self.rope.inv_freq.iter().enumerate().map(|(j, f)| (format!("inv_freq[{j}]"), *f)));
        all
    }
}
