//! Types without blocks: F32, F16, BF16.

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
