/*!
How far a value of a GGUF tensor may be from the original's: what its type allows, by the original's own values.

A quantiser gives `group` values a scale, and with it a step between neighbouring codes. With the scale that spans the group,
step = f · a (a: the largest magnitude of the original there), or f · r for types with a minimum (r: from the smallest to the
largest value, 0 included). Rounding to the nearest code is off by half a step; the end that codes do not reach by up to one
(Q4_0: -8 … 7); a search over scales (K-quants, and Q4_0 … with an importance matrix, try spans of one code more or less) by
one more. So an element is within two steps, and the root mean square of a group within 0.6 (half a step, and a few that are
off by more; uniform errors have 0.29). Where scales (and minima) of 16 or 32 values are codes themselves, relative to the
largest in 256 values, half of their step times the largest code is added: g · A, A the largest magnitude of the 256:

| type | f | g |
|---|---|---|
| Q8_0 | 1/127 | |
| Q4_0, Q5_0 | 1/8, 1/16 | |
| Q4_1, Q5_1 (r) | 1/15, 1/31 | |
| Q4_K, Q5_K (r) | 1/15, 1/31 | 2A/126 for scales of 6 bits, A/126 for minima: 1/42 |
| Q2_K (r) | 1/3 | 2A/30 + A/30 for 4 bits: 1/10 |
| Q3_K | 1/4 | 1/62 for 5 bits and a sign |
| Q6_K | 1/32 | 1/254 |
| IQ4_NL, IQ4_XS | 24/127, the widest gap of the codebook | IQ4_XS: 1/62 |
| MXFP4 | 1/2: codes 4 and 6 are two apart, and a is four at least | |

**Importance matrices.** A quantiser that weighs columns fits scale and minimum to the heavy ones; light ones then may be off by any
amount. So a block up to four times beyond, yet nearer to the original than zero, is counted as odd; up to 1 % of a tensor's
blocks may be. Measured with ggml's own quantisers on Gaussian values: without weights no block takes more than 0.68 of
what is allowed (Q8_0 0.65, Q6_K 0.68, Q4_K 0.42, Q3_K 0.68, Q2_K 0.53); with log-normal weights (σ = 2, far wilder than real
ones) at most 0.14 % of the blocks are odd, 2.2 times beyond at most.

Types below that (codebooks of a few bits, ternary, NVFP4 whose small scales are subnormal) have no such step: a block of 256 must
be nearer to the original than zero is. That a whole tensor has the wrong size would pass there, so its size is asked for too: a
scale that makes the squared error least has ⟨x, y⟩ = ⟨y, y⟩, x the original, y the tensor. Weighted errors and scales in few bits
move the quotient by some percent, TQ1_0 and TQ2_0, whose scale is the largest value, to 0.66 on Gaussian values (y is 0 below half
of 2.8 σ, the largest of 256; E|x| above is 1.85 σ); a lost or inverted tensor scale by powers of ten. [`SIZES`] is what passes.
Plain types hold the original's value rounded: F32, F16 and BF16 of a plain original
bit for bit; of FP8 or NVFP4, which converters decode in float32 first, within the last digit.
*/

use mla_numeric::DType;
use mla_reference::GgmlType;

/// What a type allows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Allowed {
    /// The original's value, rounded once to this format.
    Rounded(DType),
    /// Steps of a group.
    Steps {
        /// Values that share a scale.
        group: usize,
        /// Step, as a part of the largest magnitude, or of the range.
        step: f64,
        /// Whether of the range.
        range: bool,
        /// What codes of scales add, as a part of the largest magnitude of 256.
        coarse: f64,
    },
    /// Nearer than zero, by blocks of so many.
    Nearer(usize),
}

/// ⟨x, y⟩ / ⟨y, y⟩ of tensors without steps.
pub const SIZES: std::ops::RangeInclusive<f64> = 0.55..=1.8;
/// Steps that an element may be off by.
pub const ELEMENT: f64 = 2.0;
/// Steps that the root mean square of a group may be.
pub const GROUP: f64 = 0.6;

/// How far beyond a block may be and count as odd.
pub const FAR: f64 = 4.0;
/// The part of a tensor's blocks that may be odd.
pub const ODD: f64 = 0.01;

/// The rule of a type.
pub fn allowed(ty: GgmlType) -> Allowed {
    let steps = |group, step: f64, range, coarse| Allowed::Steps { group, step, range, coarse };
    match ty {
        GgmlType::F32 => Allowed::Rounded(DType::F32),
        GgmlType::F16 => Allowed::Rounded(DType::F16),
        GgmlType::BF16 => Allowed::Rounded(DType::Bf16),
        GgmlType::F64 => Allowed::Rounded(DType::F64),
        GgmlType::Q8_0 => steps(32, 1.0 / 127.0, false, 0.0),
        GgmlType::Q4_0 => steps(32, 1.0 / 8.0, false, 0.0),
        GgmlType::Q5_0 => steps(32, 1.0 / 16.0, false, 0.0),
        GgmlType::Q4_1 => steps(32, 1.0 / 15.0, true, 0.0),
        GgmlType::Q5_1 => steps(32, 1.0 / 31.0, true, 0.0),
        GgmlType::Q4_K => steps(32, 1.0 / 15.0, true, 1.0 / 42.0),
        GgmlType::Q5_K => steps(32, 1.0 / 31.0, true, 1.0 / 42.0),
        GgmlType::Q2_K => steps(16, 1.0 / 3.0, true, 0.1),
        GgmlType::Q3_K => steps(16, 1.0 / 4.0, false, 1.0 / 62.0),
        GgmlType::Q6_K => steps(16, 1.0 / 32.0, false, 1.0 / 254.0),
        GgmlType::IQ4_NL => steps(32, 24.0 / 127.0, false, 0.0),
        GgmlType::IQ4_XS => steps(32, 24.0 / 127.0, false, 1.0 / 62.0),
        GgmlType::MXFP4 => steps(32, 0.5, false, 0.0),
        _ => Allowed::Nearer(256),
    }
}
