//! Types without blocks: F32, F16, BF16, F64, and the whole numbers I8, I16, I32, I64.

use mla_numeric::DType;

#[inline(always)]
pub fn f32(bytes: &[u8], out: &mut [f64]) {
    DType::F32.decode(bytes, out)
}

#[inline(always)]
pub fn f16(bytes: &[u8], out: &mut [f64]) {
    DType::F16.decode(bytes, out)
}

#[inline(always)]
pub fn bf16(bytes: &[u8], out: &mut [f64]) {
    DType::Bf16.decode(bytes, out)
}

#[inline(always)]
pub fn f64(bytes: &[u8], out: &mut [f64]) {
    DType::F64.decode(bytes, out)
}

/// Decoders of whole numbers. I64 beyond 2^53 is rounded to the nearest, ties to even.
macro_rules! whole {
    ($($name:ident $bytes:literal;)*) => {$(
        #[inline(always)]
        pub fn $name(bytes: &[u8], out: &mut [f64]) {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<$bytes>().0) {
                *o = $name::from_le_bytes(*b) as f64;
            }
        }
    )*};
}

whole! {
    i8 1;
    i16 2;
    i32 4;
    i64 8;
}
