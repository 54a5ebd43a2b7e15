/*!
Whole numbers of one bit, two bits or three values, with one f16 scale d: Q1_0 (blocks of 128), Q2_0 (64), TQ1_0 and
TQ2_0 (256).

| type | fields (bytes) | value |
|---|---|---|
| Q1_0 | d 0, qs 2 | ±d: bit i % 8 of byte i / 8, set for plus |
| Q2_0 | d 0, qs 2 | (q - 1) d, q: bits 2 (i % 4) of byte i / 4 |
| TQ1_0 | qs 0, qh 48, d 52 | (q - 1) d |
| TQ2_0 | qs 0, d 64 | (q - 1) d, q: two-bit parts as in the K types |

TQ1_0: a byte b is a fraction, b / 256, of five digits of base 3; digit k is the whole part of 3 · (3^k b mod 256) / 256.
Elements are the digits 0 of bytes 0..32, their digits 1, … 4; then those of bytes 32..48; then digits 0 to 3 of bytes
48..52.
*/

use super::k::bits;
use super::{blocks, half, part};

#[inline(always)]
pub fn q1_0(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 18], o: &mut [f64; 128]| {
        let d = half(b, 0);
        for (i, o) in o.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            for (j, o) in o.iter_mut().enumerate() {
                *o = d * f64::from(2 * ((i32::from(b[2 + i]) >> j) & 1) - 1);
            }
        }
    });
}

#[inline(always)]
pub fn q2_0(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 18], o: &mut [f64; 64]| {
        let d = half(b, 0);
        for (i, o) in o.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for (j, o) in o.iter_mut().enumerate() {
                *o = d * f64::from(((i32::from(b[2 + i]) >> (2 * j)) & 3) - 1);
            }
        }
    });
}

/// Digit k of each byte, `power` = 3^k, to rows of `N` elements.
#[inline(always)]
fn digit<const N: usize>(from: [u8; N], power: u8, d: f64, out: &mut [f64; N]) {
    for m in 0..N {
        let rest = from[m].wrapping_mul(power);
        out[m] = d * f64::from(i32::from((u16::from(rest) * 3) >> 8) - 1);
    }
}

const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

#[inline(always)]
pub fn tq1_0(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 54], o: &mut [f64; 256]| {
        let d = half(b, 52);
        let (first, rest) = o.split_at_mut(160);
        let (second, third) = rest.split_at_mut(80);
        for (o, power) in first.as_chunks_mut::<32>().0.iter_mut().zip(POWERS) {
            digit(part(b, 0), power, d, o);
        }
        for (o, power) in second.as_chunks_mut::<16>().0.iter_mut().zip(POWERS) {
            digit(part(b, 32), power, d, o);
        }
        for (o, power) in third.as_chunks_mut::<4>().0.iter_mut().zip(POWERS) {
            digit(part(b, 48), power, d, o);
        }
    });
}

#[inline(always)]
pub fn tq2_0(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 66], o: &mut [f64; 256]| {
        let d = half(b, 64);
        for (g, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let q = bits(part(b, 32 * (g / 4)), 2 * (g % 4), 2);
            for l in 0..32 {
                o[l] = d * f64::from(q[l] - 1);
            }
        }
    });
}
