/*!
Four-bit floating-point codes (E2M1): MXFP4 (blocks of 32) and NVFP4 (64, four groups of 16).

| type | fields (bytes) | value |
|---|---|---|
| MXFP4 | e 0, qs 1 | 2^(e - 128) table\[q\], also for e = 255 |
| NVFP4 | scales 0, qs 4 | s\[g\] / 2 · table\[q\] |

The table holds twice the value of a code, so scales are halves; code 8 is 0, not -0. Nibbles of qs are split as in
Q4_0: in the 16 bytes of a block, or the 8 bytes of a group. A scale s of NVFP4 is E4M3 without its sign: bit 7 is not
looked at, but 0x7f is 0 and 0xff is not.

A checkpoint in NVFP4 has one more scale, a float32 a tensor. It is in no block: GGUF has it as a tensor of its own
([`crate::product::Scaled`]).
*/

use super::iq4::group;
use super::{blocks, part};

/// ggml's `kvalues_fp4`.
const TABLE: [f64; 16] = [0., 1., 2., 3., 4., 6., 8., 12., 0., -1., -2., -3., -4., -6., -8., -12.];

/// 2^e.
#[inline(always)]
fn power(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

#[inline(always)]
pub fn mxfp4(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 17], o: &mut [f64; 32]| {
        group(&TABLE, part::<16>(b, 1), power(i32::from(b[0]) - 128), o);
    });
}

/// Half the value of an NVFP4 scale: subnormal m 2^-9 / 2, else (8 + m) 2^(e - 10) / 2.
#[inline(always)]
fn half_e4m3(byte: u8) -> f64 {
    let (e, m) = (i32::from((byte >> 3) & 15), i32::from(byte & 7));
    let normal = i32::from(e != 0);
    let finite = f64::from(8 * normal + m) * power(e - normal - 10);
    if byte == 0x7f { 0.0 } else { finite }
}

#[inline(always)]
pub fn nvfp4(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 36], o: &mut [f64; 64]| {
        for (g, o) in o.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            group(&TABLE, part::<8>(b, 4 + 8 * g), half_e4m3(b[g]), o);
        }
    });
}
