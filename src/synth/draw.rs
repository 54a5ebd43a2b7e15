/*!
Random blocks of a quantised type, drawn directly: no quantiser runs.

Every bit of a block that is not one of its float16 scales is random; so quants, sub-scales and high bits
take all their values, independently and uniformly. The scale `d` is then chosen so that a value's mean square is
the one asked for. With E the expectation over the random bits, mean squares for d = 1 follow from the
formula of each type (q: quant, s, m: sub-block scale and minimum):

- q·d: E q²; s·q·d: E s² · E q²;
- d·s·q − c·d·m with c = E q (so that the mean is zero): E s²·E q² + c²·E m² − 2c·E s·E q·E m;
- d·q + m with m = −d·(E q + e), e uniform in ±J: E q² − (E q)² + J²/3;
- codebooks: q is an element of an entry, each entry equally likely; s = 2n + 1.

A scale that is no float16 (MXFP4: a power of two; NVFP4: an E4M3) is one of its two neighbours, drawn so that the mean of
the squares is right. NVFP4 leaves the size to a scale of the whole tensor, as checkpoints do: E4M3 alone does not reach
down to the scales of weights.

Between blocks d varies by a factor uniform in [3/4, 5/4], whose mean square is 1 + 1/48; where the format's
d is signed in real files its sign is random.
*/

use super::random::Stream;
use half::{bf16, f16};
use mla_reference::dequant::codebook;
use mla_reference::ggml::GgmlType;

/// The codebook of IQ4_NL and IQ4_XS (ggml's `kvalues_iq4nl`).
const IQ4: [i32; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice the values of FP4's codes.
const FP4: [i32; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

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

/// Where and how a block holds its scale.
#[derive(Clone, Copy)]
enum Scale {
    /// A float16 at an offset.
    Half(usize),
    /// A float16 in the top nibbles of four u16 at an offset, the lowest first (IQ1_M).
    Nibbles(usize),
    /// The exponent of a power of two, plus 128 (MXFP4).
    Power,
    /// Twice the scales of four groups, as E4M3 (NVFP4).
    E4m3,
}

/// Where a block's scales lie and what they are.
struct Recipe {
    /// The place of `d`.
    at: Scale,
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
    Recipe { at: Scale::Half(at), signed, square, minimum: None }
}
/// s·g·d, s odd and below 2^(bits + 1), of a codebook's elements, as multiples of `unit`.
fn book(at: Scale, bits: u32, grid: &[i8], unit: f64) -> Recipe {
    let s = moments((0..1 << bits).map(|n| 2 * n + 1)).square;
    let g = moments(grid.iter().map(|g| i32::from(*g))).square;
    Recipe { at, signed: false, square: s * g * unit * unit, minimum: None }
}
/// d·q + m.
fn offset(q: Moments) -> Recipe {
    let jitter = q.mean / 4.0;
    let square = q.square - q.mean * q.mean + jitter * jitter / 3.0;
    let minimum = Some(Minimum { at: 2, factor: -q.mean, jitter });
    Recipe { at: Scale::Half(0), signed: false, square, minimum }
}
/// d·s·q − dmin·m.
fn scaled(at: usize, s: Moments, q: Moments) -> Recipe {
    let c = q.mean;
    let square = s.square * q.square + c * c * s.square - 2.0 * c * s.mean * q.mean * s.mean;
    let minimum = Some(Minimum { at: at + 2, factor: c, jitter: 0.0 });
    Recipe { at: Scale::Half(at), signed: false, square, minimum }
}

/// Mean square of TQ1_0's numbers -1, 0, 1: digits 0 to 4 of a random byte, 48 bytes with five digits and 4 with four.
fn ternary() -> f64 {
    let digit = |power: u8| {
        moments(
            (0..=255u8)
                .map(|b| i32::from((u16::from(b.wrapping_mul(power)) * 3) >> 8) - 1)
                .collect::<Vec<_>>()
                .into_iter(),
        )
        .square
    };
    let five: f64 = [1, 3, 9, 27, 81].map(digit).iter().sum();
    (48.0 * five + 4.0 * (five - digit(81))) / 256.0
}

fn recipe(ty: GgmlType) -> Option<Recipe> {
    let q4 = moments(0..16);
    let q5 = moments(0..32);
    let s6 = moments(-32..32).square;
    let iq4 = moments(IQ4.into_iter()).square;
    let fp4 = |at| Recipe { at, signed: false, square: moments(FP4.into_iter()).square, minimum: None };
    // The eighth by which IQ1's elements are moved has a sign of its own: g² + 1/64.
    let iq1 = |at| {
        let mut recipe = book(at, 3, codebook::IQ1.as_flattened(), 1.0);
        recipe.square += moments((0..8).map(|n| 2 * n + 1)).square / 64.0;
        recipe
    };
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
        GgmlType::IQ2_XXS => book(Scale::Half(0), 4, codebook::IQ2_XXS.as_flattened(), 0.125),
        GgmlType::IQ2_XS => book(Scale::Half(0), 4, codebook::IQ2_XS.as_flattened(), 0.125),
        GgmlType::IQ2_S => book(Scale::Half(0), 4, codebook::IQ2_S.as_flattened(), 0.125),
        GgmlType::IQ3_XXS => book(Scale::Half(0), 4, codebook::IQ3_XXS.as_flattened(), 0.25),
        GgmlType::IQ3_S => book(Scale::Half(0), 4, codebook::IQ3_S.as_flattened(), 1.0),
        GgmlType::IQ1_S => iq1(Scale::Half(0)),
        GgmlType::IQ1_M => iq1(Scale::Nibbles(48)),
        GgmlType::Q1_0 => plain(0, false, 1.0),
        GgmlType::Q2_0 => plain(0, true, moments(-1..3).square),
        GgmlType::TQ2_0 => plain(64, true, moments(-1..3).square),
        GgmlType::TQ1_0 => plain(52, true, ternary()),
        GgmlType::MXFP4 => fp4(Scale::Power),
        GgmlType::NVFP4 => fp4(Scale::E4m3),
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
    Blocks { recipe: Recipe, d: f64, tensor: Option<f32> },
}

impl Drawer {
    /// Values of this type with this rms; nothing for a type that has no recipe.
    pub fn rms(ty: GgmlType, rms: f64) -> Option<Drawer> {
        let kind = match ty {
            GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => Kind::Float(ty, rms),
            _ => {
                let recipe = recipe(ty)?;
                let d = rms / (recipe.square * (1.0 + 1.0 / 48.0)).sqrt();
                match recipe.at {
                    // The mean of the blocks' own scales is 1.
                    Scale::E4m3 => Kind::Blocks { recipe, d: 1.0, tensor: Some(d as f32) },
                    _ => Kind::Blocks { recipe, d, tensor: None },
                }
            }
        };
        let values = if ty.block_elements() == 1 { VALUES } else { 1 };
        Some(Drawer { bytes: ty.block_bytes() * values, kind })
    }
    /// The scale of the whole tensor, for types that have one.
    pub fn tensor_scale(&self) -> Option<f32> {
        match self.kind {
            Kind::Blocks { tensor, .. } => tensor,
            _ => None,
        }
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
            Kind::Blocks { recipe, d, .. } => {
                let (words, rest) = block.as_chunks_mut();
                words.iter_mut().for_each(|word| *word = random.word().to_le_bytes());
                rest.iter_mut().zip(random.word().to_le_bytes()).for_each(|(byte, b)| *byte = b);
                let mut d = d * (0.75 + 0.5 * random.unit());
                if recipe.signed && random.word() & 1 == 1 {
                    d = -d;
                }
                recipe.at.put(block, d, &mut random);
                if let Some(min) = &recipe.minimum {
                    let e = min.jitter * (2.0 * random.unit() - 1.0);
                    put_f16(block, min.at, d * (min.factor + e));
                }
            }
        }
    }
}

impl Scale {
    /// Writes d to a block.
    fn put(self, block: &mut [u8], d: f64, random: &mut Stream) {
        match self {
            Scale::Half(at) => put_f16(block, at, d),
            Scale::Nibbles(at) => {
                let bits = f16::from_f32(d as f32).to_bits();
                for (i, word) in block[at..at + 8].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    let rest = u16::from_le_bytes(*word) & 0x0fff;
                    *word = (rest | (bits >> (4 * i)) << 12).to_le_bytes();
                }
            }
            Scale::Power => {
                let (e, _) = neighbour(d, 0, random);
                block[0] = (e + 128).clamp(0, 255) as u8;
            }
            Scale::E4m3 => {
                for byte in &mut block[..4] {
                    let (e, m) = neighbour(2.0 * d, 3, random);
                    *byte = ((e + 7) * 8 + m).clamp(0, 0x7e) as u8;
                }
            }
        }
    }
}

/// One of the two neighbours 2^e (1 + m / 2^bits) of x, so that the mean of its square is x².
fn neighbour(x: f64, bits: i32, random: &mut Stream) -> (i32, i32) {
    let e = x.abs().log2().floor() as i32;
    let step = 2f64.powi(e - bits);
    let low = (x.abs() / step).floor();
    let (l, h) = (low * step, (low + 1.0) * step);
    let up = random.unit() * (h * h - l * l) < x * x - l * l;
    // With a carry to the next power where it is needed: what is added to m is added to 2^bits e + m.
    let code = (e << bits) + (low as i32 - (1 << bits)) + i32::from(up);
    (code >> bits, code & ((1 << bits) - 1))
}

fn each<const N: usize>(block: &mut [u8], mut value: impl FnMut() -> [u8; N]) {
    block.as_chunks_mut().0.iter_mut().for_each(|element| *element = value());
}
fn put_f16(block: &mut [u8], at: usize, v: f64) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(v as f32).to_le_bytes());
}
