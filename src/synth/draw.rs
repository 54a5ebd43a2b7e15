/*!
Random blocks of a quantised type, drawn directly: no quantiser runs.

Every bit of a block that is not one of its float16 scales is random; so quants, sub-scales and high bits
take all their values, independently and uniformly. The scale `d` is then chosen so that a value's mean square is
the one asked for. With E the expectation over the random bits, mean squares for d = 1 follow from the
formula of each type (q: quant, s, m: sub-block scale and minimum):

- q·d: E q²; s·q·d: E s² · E q²;
- d·s·q − c·d·m with c = E q (so that the mean is zero): E s²·E q² + c²·E m² − 2c·E s·E q·E m;
- d·q + m with m = −d·(E q + e), e uniform in ±J: E q² − (E q)² + J²/3.

Between blocks d varies by a factor uniform in [3/4, 5/4], whose mean square is 1 + 1/48; where the format's
d is signed in real files its sign is random.
*/

use super::random::Stream;
use half::{bf16, f16};
use mla_reference::ggml::GgmlType;

/// The codebook of IQ4_NL and IQ4_XS (ggml's `kvalues_iq4nl`).
const IQ4: [i32; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Values of a type without blocks that are drawn from one stream; below [`super::BLOCK_WORDS`].
const VALUES: usize = 32;

/// A random integer: mean and mean square.
#[derive(Clone, Copy)]
struct Moments {
    mean: f64,
    square: f64,
}

fn moments(values: impl ExactSizeIterator<Item = i32> + Clone) -> Moments {
    let n = values.len() as f64;
    let mean = values.clone().map(f64::from).sum::<f64>() / n;
    Moments { mean, square: values.map(|v| f64::from(v).powi(2)).sum::<f64>() / n }
}

/// Where a block's scales lie and what they are.
struct Recipe {
    /// Offset of the f16 `d`.
    at: usize,
    signed: bool,
    /// Mean square of a value where d = 1.
    square: f64,
    minimum: Option<Minimum>,
}

/// A second f16: d · (factor + e), e uniform in ±jitter.
struct Minimum {
    at: usize,
    factor: f64,
    jitter: f64,
}

/// q·d.
fn plain(at: usize, signed: bool, square: f64) -> Recipe {
    Recipe { at, signed, square, minimum: None }
}
/// d·q + m.
fn offset(q: Moments) -> Recipe {
    let jitter = q.mean / 4.0;
    let square = q.square - q.mean * q.mean + jitter * jitter / 3.0;
    Recipe { at: 0, signed: false, square, minimum: Some(Minimum { at: 2, factor: -q.mean, jitter }) }
}
/// d·s·q − dmin·m.
fn scaled(at: usize, s: Moments, q: Moments) -> Recipe {
    let c = q.mean;
    let square = s.square * q.square + c * c * s.square - 2.0 * c * s.mean * q.mean * s.mean;
    Recipe { at, signed: false, square, minimum: Some(Minimum { at: at + 2, factor: c, jitter: 0.0 }) }
}

fn recipe(ty: GgmlType) -> Option<Recipe> {
    let q4 = moments(0..16);
    let q5 = moments(0..32);
    let s6 = moments(-32..32).square;
    let iq4 = moments(IQ4.into_iter()).square;
    Some(match ty {
        GgmlType::Q4_0 => plain(0, true, moments(-8..8).square),
        GgmlType::Q4_1 => offset(q4),
        GgmlType::Q5_0 => plain(0, true, moments(-16..16).square),
        GgmlType::Q5_1 => offset(q5),
        GgmlType::Q8_0 => plain(0, false, moments(-128..128).square),
        GgmlType::Q2_K => scaled(80, q4, moments(0..4)),
        GgmlType::Q3_K => plain(108, false, s6 * moments(-4..4).square),
        GgmlType::Q4_K => scaled(0, moments(0..64), q4),
        GgmlType::Q5_K => scaled(0, moments(0..64), q5),
        GgmlType::Q6_K => plain(208, false, moments(-128..128).square * s6),
        GgmlType::IQ4_NL => plain(0, true, iq4),
        GgmlType::IQ4_XS => plain(0, false, s6 * iq4),
        _ => return None,
    })
}

/// Draws blocks of one type.
pub(super) struct Drawer {
    /// Bytes drawn from one stream: a block, or several values of a type without blocks.
    pub bytes: usize,
    kind: Kind,
}

enum Kind {
    Float(GgmlType, f64),
    Uniform(f32, f32),
    Blocks { recipe: Recipe, d: f64 },
}

impl Drawer {
    /// Values of this type with this rms; nothing for a type that has no recipe.
    pub fn rms(ty: GgmlType, rms: f64) -> Option<Drawer> {
        let kind = match ty {
            GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => Kind::Float(ty, rms),
            _ => {
                let recipe = recipe(ty)?;
                let d = rms / (recipe.square * (1.0 + 1.0 / 48.0)).sqrt();
                Kind::Blocks { recipe, d }
            }
        };
        let values = if ty.block_elements() == 1 { VALUES } else { 1 };
        Some(Drawer { bytes: ty.block_bytes() * values, kind })
    }
    /// F32 values uniform in a range.
    pub fn uniform(low: f32, high: f32) -> Drawer {
        Drawer { bytes: 4 * VALUES, kind: Kind::Uniform(low, high) }
    }

    /// Fills one block (or up to as many values) from a stream of its own.
    pub fn block(&self, block: &mut [u8], mut random: Stream) {
        match &self.kind {
            Kind::Uniform(low, high) => {
                each(block, || (low + (high - low) * random.unit() as f32).to_le_bytes());
            }
            Kind::Float(ty, rms) => {
                let mut value = || (rms * random.bell()) as f32;
                match ty {
                    GgmlType::F16 => each(block, || f16::from_f32(value()).to_le_bytes()),
                    GgmlType::BF16 => each(block, || bf16::from_f32(value()).to_le_bytes()),
                    _ => each(block, || value().to_le_bytes()),
                }
            }
            Kind::Blocks { recipe, d } => {
                let (words, rest) = block.as_chunks_mut();
                words.iter_mut().for_each(|word| *word = random.word().to_le_bytes());
                rest.iter_mut().zip(random.word().to_le_bytes()).for_each(|(byte, b)| *byte = b);
                let mut d = d * (0.75 + 0.5 * random.unit());
                if recipe.signed && random.word() & 1 == 1 {
                    d = -d;
                }
                put_f16(block, recipe.at, d);
                if let Some(min) = &recipe.minimum {
                    let e = min.jitter * (2.0 * random.unit() - 1.0);
                    put_f16(block, min.at, d * (min.factor + e));
                }
            }
        }
    }
}

fn each<const N: usize>(block: &mut [u8], mut value: impl FnMut() -> [u8; N]) {
    block.as_chunks_mut().0.iter_mut().for_each(|element| *element = value());
}
fn put_f16(block: &mut [u8], at: usize, v: f64) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(v as f32).to_le_bytes());
}
