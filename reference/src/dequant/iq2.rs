/*!
Two-bit codebook types, blocks of 256: IQ2_XXS, IQ2_XS, IQ2_S.

Eight groups ib of 32, each four entries l of 8 magnitudes g with signs.

| type | fields (bytes) | entry | signs | n |
|---|---|---|---|---|
| IQ2_XXS | d f16 0, ib: u32 a, u32 w at 2 + 8 ib | byte l of a | even, bits 7 l of w | w >> 28 |
| IQ2_XS | d f16 0, u16 qs 2, scales 66 | qs & 511 | even, qs >> 9 | nibble l / 2 of scales\[ib\] |
| IQ2_S | d f16 0, qs 2, signs 34, qh 66, scales 74 | qs, bits 2 l of qh\[ib\] above it | signs | as IQ2_XS |

Value: d (n + 1/2) / 4 · g, here d (2 n + 1) / 8 · g. "Even": seven bits of eight signs.
*/

use super::codebook::{self, even_signs, signed};
use super::{blocks, half, part, word};

/// d (2 n + 1) / 8.
#[inline(always)]
fn scale(d: f64, n: u32) -> f64 {
    d * f64::from(2 * n + 1) * 0.125
}

/// The scales of the two halves of a group, from the nibbles of a byte.
#[inline(always)]
fn scales(d: f64, byte: u8) -> [f64; 2] {
    [scale(d, u32::from(byte & 15)), scale(d, u32::from(byte >> 4))]
}

#[inline(always)]
pub fn iq2_xxs(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 66], o: &mut [f64; 256]| {
        let d = half(b, 0);
        for (ib, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (a, w) = (part::<4>(b, 2 + 8 * ib), word(b, 6 + 8 * ib));
            let s = scale(d, w >> 28);
            for (l, o) in o.as_chunks_mut().0.iter_mut().enumerate() {
                signed(&codebook::IQ2_XXS[usize::from(a[l])], even_signs(w, l), s, o);
            }
        }
    });
}

#[inline(always)]
pub fn iq2_xs(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 74], o: &mut [f64; 256]| {
        let d = half(b, 0);
        for (ib, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (q, s) = (part::<8>(b, 2 + 8 * ib), scales(d, b[66 + ib]));
            for (l, o) in o.as_chunks_mut().0.iter_mut().enumerate() {
                let q = u16::from_le_bytes([q[2 * l], q[2 * l + 1]]);
                let signs = even_signs(u32::from(q >> 9), 0);
                signed(&codebook::IQ2_XS[usize::from(q & 511)], signs, s[l / 2], o);
            }
        }
    });
}

#[inline(always)]
pub fn iq2_s(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 82], o: &mut [f64; 256]| {
        let d = half(b, 0);
        for (ib, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (q, signs) = (part::<4>(b, 2 + 4 * ib), part::<4>(b, 34 + 4 * ib));
            let (high, s) = (usize::from(b[66 + ib]), scales(d, b[74 + ib]));
            for (l, o) in o.as_chunks_mut().0.iter_mut().enumerate() {
                let entry = usize::from(q[l]) | ((high >> (2 * l)) & 3) << 8;
                signed(&codebook::IQ2_S[entry], signs[l], s[l / 2], o);
            }
        }
    });
}
