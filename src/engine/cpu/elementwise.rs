/*!
RMSNorm and rotary embedding in float32, as the kernels do them; every operation rounds once.

- RMSNorm: lane i of 128 adds the squares of columns k ≡ i (mod 128), ascending; a tree of 7 steps adds the
  lanes (distance 64, 32, … 1); then mean, `r = 1/√(mean + eps)`, `(x · r) · γ`.
- Rope: cos and sin are float32 of the exact angle's, times the magnitude; `a·cos − b·sin`, `b·cos + a·sin`
  with both products rounded (no fma), then the temperature's factor where the model has one.

The caller rounds results once more, to the stored dtype.
*/

use mla_reference::{Pairing, Rope, Temperature};

const NORM_LANES: usize = 128;

/// RMSNorm of one row, in place.
pub fn rms_norm(x: &mut [f32], gamma: &[f32], eps: f32) {
    let mut lanes = [0f32; NORM_LANES];
    for part in x.chunks(NORM_LANES) {
        for (l, v) in lanes.iter_mut().zip(part) {
            *l += v * v;
        }
    }
    let mut half = NORM_LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    let mean = lanes[0] / x.len() as f32;
    let r = 1.0 / (mean + eps).sqrt();
    for (v, g) in x.iter_mut().zip(gamma) {
        *v = *v * r * g;
    }
}

/// What a position does to a query or key row.
pub struct Turn {
    /// cos and sin of each pair.
    table: Vec<(f32, f32)>,
    pairing: Pairing,
}

impl Turn {
    /// Of a position, a whole number but for deliberate faults.
    pub fn new(rope: &Rope, position: f64) -> Turn {
        let table = rope.inv_freq.iter().map(|f| {
            let angle = position * f;
            ((libm::cos(angle) * rope.magnitude) as f32, (libm::sin(angle) * rope.magnitude) as f32)
        });
        Turn { table: table.collect(), pairing: rope.pairing }
    }

    /// Rotates one head's rope columns in place.
    pub fn apply(&self, x: &mut [f32]) {
        let half = x.len() / 2;
        for (j, &(cos, sin)) in self.table.iter().enumerate().take(half) {
            let (first, second) = match self.pairing {
                Pairing::Adjacent => (2 * j, 2 * j + 1),
                Pairing::Half => (j, half + j),
            };
            let (a, b) = (x[first], x[second]);
            x[first] = a * cos - b * sin;
            x[second] = b * cos + a * sin;
        }
    }
}

/// The temperature's factor on the queries of a position, in float32.
pub fn temperature(t: &Temperature, position: u64) -> f32 {
    (1.0 + t.scale * libm::log(1.0 + (position as f64 / t.length).floor())) as f32
}
