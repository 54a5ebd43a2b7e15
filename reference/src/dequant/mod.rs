/*!
Decoding of ggml's tensor types to float64, exactly.

The value of every type with blocks has at most 51 significand bits, so float64 holds it exactly and nothing rounds;
ggml's own float32 result is that value rounded once (the fixtures of ggml's results show it bit for bit). Only an
infinite or NaN scale gives NaN, and zeros keep the sign that ggml gives them. ggml decodes no Q8_1, F64 and whole
numbers: theirs are the values that their layout says. The one exception: float64 can't hold every I64 beyond 2^53, so
these are rounded, once, to the nearest.

A decoder is a plain function of whole blocks, written so that it vectorises; it is compiled a second time for
AVX2, and the machine decides which one runs. (Loops, not `array::from_fn` or `map`: those are compiled on their own,
without AVX2, and called; a third of the speed.) A type is one function in a file of its family, and one row below.

Layouts: ggml 0.25.3, block structures of `ggml-common.h`. In the files of this folder, little-endian throughout,
`lo` and `hi` are the nibbles of a byte.
*/

pub mod codebook;
mod fp4;
mod iq1;
mod iq2;
mod iq3;
mod iq4;
mod k;
mod low;
mod plain;
mod q32;

use crate::ggml::GgmlType;
use mla_numeric::DType;

/// Decodes blocks of one type.
pub struct Decoder {
    ty: GgmlType,
    portable: fn(&[u8], &mut [f64]),
    #[cfg(target_arch = "x86_64")]
    avx2: unsafe fn(&[u8], &mut [f64]),
}

macro_rules! decoders {
    ($($ty:ident $path:path;)*) => {
        #[cfg(target_arch = "x86_64")]
        #[allow(non_snake_case)]
        mod avx2 {
            use super::*;
            $(#[target_feature(enable = "avx2,fma,f16c")]
            pub fn $ty(bytes: &[u8], out: &mut [f64]) {
                $path(bytes, out)
            })*
        }

        /// Every type that can be decoded.
        pub static DECODERS: &[Decoder] = &[$(Decoder {
            ty: GgmlType::$ty,
            portable: $path,
            #[cfg(target_arch = "x86_64")]
            avx2: avx2::$ty,
        }),*];
    };
}

decoders! {
    F32 plain::f32;
    F16 plain::f16;
    BF16 plain::bf16;
    Q4_0 q32::q4_0;
    Q4_1 q32::q4_1;
    Q5_0 q32::q5_0;
    Q5_1 q32::q5_1;
    Q8_0 q32::q8_0;
    Q2_K k::q2_k;
    Q3_K k::q3_k;
    Q4_K k::q4_k;
    Q5_K k::q5_k;
    Q6_K k::q6_k;
    IQ4_NL iq4::iq4_nl;
    IQ4_XS iq4::iq4_xs;
    IQ2_XXS iq2::iq2_xxs;
    IQ2_XS iq2::iq2_xs;
    IQ2_S iq2::iq2_s;
    IQ3_XXS iq3::iq3_xxs;
    IQ3_S iq3::iq3_s;
    IQ1_S iq1::iq1_s;
    IQ1_M iq1::iq1_m;
    Q1_0 low::q1_0;
    Q2_0 low::q2_0;
    TQ1_0 low::tq1_0;
    TQ2_0 low::tq2_0;
    MXFP4 fp4::mxfp4;
    NVFP4 fp4::nvfp4;
    Q8_1 q32::q8_1;
    Q8_K k::q8_k;
    F64 plain::f64;
    I8 plain::i8;
    I16 plain::i16;
    I32 plain::i32;
    I64 plain::i64;
}

impl Decoder {
    /// The type that this decodes.
    pub fn ty(&self) -> GgmlType {
        self.ty
    }

    /// Decodes whole blocks; stops at the last one that both `bytes` and `out` hold in full.
    #[inline]
    pub fn decode(&self, bytes: &[u8], out: &mut [f64]) {
        #[cfg(target_arch = "x86_64")]
        if crate::isa::has_avx2() {
            // SAFETY: the processor has the features that the function was compiled for.
            return unsafe { (self.avx2)(bytes, out) };
        }
        (self.portable)(bytes, out)
    }
}

/// The decoder of a type, if there is one.
pub fn decoder(ty: GgmlType) -> Option<&'static Decoder> {
    DECODERS.iter().find(|d| d.ty == ty)
}

/// Whether a type can be decoded.
pub fn is_supported(ty: GgmlType) -> bool {
    decoder(ty).is_some()
}

/// Decodes `bytes` to `out`. None, with nothing written, where the type has no decoder or the lengths are not those
/// of the same number of whole blocks.
#[must_use]
pub fn decode(ty: GgmlType, bytes: &[u8], out: &mut [f64]) -> Option<()> {
    let decoder = decoder(ty)?;
    let blocks = out.len() / ty.block_elements();
    let fits = blocks * ty.block_elements() == out.len() && blocks * ty.block_bytes() == bytes.len();
    fits.then(|| decoder.decode(bytes, out))
}

/// Calls `one` for every block of `B` bytes and `N` elements.
#[inline(always)]
fn blocks<const B: usize, const N: usize>(
    bytes: &[u8],
    out: &mut [f64],
    one: impl Fn(&[u8; B], &mut [f64; N]),
) {
    for (b, o) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<N>().0) {
        one(b, o);
    }
}

/// The f16 at byte `at`.
#[inline(always)]
fn half<const B: usize>(b: &[u8; B], at: usize) -> f64 {
    DType::F16.from_bits(u16::from_le_bytes([b[at], b[at + 1]]).into())
}

/// `N` bytes from `at`.
#[inline(always)]
fn part<const N: usize>(b: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&b[at..at + N]);
    part
}

/// The u32 at byte `at`.
#[inline(always)]
fn word(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(part(b, at))
}

/// q d, of codes that are int8.
#[inline(always)]
fn signed_bytes<const N: usize>(qs: [u8; N], d: f64, out: &mut [f64; N]) {
    for i in 0..N {
        out[i] = f64::from(qs[i] as i8) * d;
    }
}
