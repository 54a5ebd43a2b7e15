/*!
Blocks of 32 with an f16 scale d: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1.

"Split nibbles": byte j of the 16 bytes `qs` holds element j in its low and element j + 16 in its high nibble. A fifth
bit of element i is bit i of the u32 `qh`.

| type | fields (bytes) | value |
|---|---|---|
| Q4_0 | d 0, qs 2 | (q - 8) d |
| Q4_1 | d 0, m 2, qs 4 | q d + m |
| Q5_0 | d 0, qh 2, qs 6 | (q - 16) d |
| Q5_1 | d 0, m 2, qh 4, qs 8 | q d + m |
| Q8_0 | d 0, int8 qs 2 | q d |
| Q8_1 | d 0, sum 2, int8 qs 4 | q d |

The sum of Q8_1, d Σ q, repeats what the codes say; no value is made of it.
*/

use super::{blocks, half, part, signed_bytes, word};

/// Split nibbles, each with its fifth bit (none: `fifth` = 0).
#[inline(always)]
fn codes(qs: [u8; 16], fifth: u32) -> [i32; 32] {
    let mut q = [0; 32];
    for i in 0..16 {
        q[i] = i32::from(qs[i] & 15) | (((fifth >> i) & 1) << 4) as i32;
        q[i + 16] = i32::from(qs[i] >> 4) | (((fifth >> (i + 16)) & 1) << 4) as i32;
    }
    q
}

/// (q - zero) d.
#[inline(always)]
fn centred(q: [i32; 32], zero: i32, d: f64, out: &mut [f64; 32]) {
    for i in 0..32 {
        out[i] = f64::from(q[i] - zero) * d;
    }
}

/// q d + m.
#[inline(always)]
fn affine(q: [i32; 32], d: f64, m: f64, out: &mut [f64; 32]) {
    for i in 0..32 {
        out[i] = f64::from(q[i]) * d + m;
    }
}

#[inline(always)]
pub fn q4_0(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 18], o| centred(codes(part(b, 2), 0), 8, half(b, 0), o));
}

#[inline(always)]
pub fn q4_1(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 20], o| affine(codes(part(b, 4), 0), half(b, 0), half(b, 2), o));
}

#[inline(always)]
pub fn q5_0(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 22], o| centred(codes(part(b, 6), word(b, 2)), 16, half(b, 0), o));
}

#[inline(always)]
pub fn q5_1(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 24], o| affine(codes(part(b, 8), word(b, 4)), half(b, 0), half(b, 2), o));
}

#[inline(always)]
pub fn q8_0(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 34], o: &mut [f64; 32]| signed_bytes(part(b, 2), half(b, 0), o));
}

#[inline(always)]
pub fn q8_1(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 36], o: &mut [f64; 32]| signed_bytes(part(b, 4), half(b, 0), o));
}
