/*!
Three-bit codebook types, blocks of 256: IQ3_XXS, IQ3_S.

Eight groups ib of 32, each eight entries e of 4 magnitudes g; signs belong to pairs of entries, l = e / 2.

| type | fields (bytes) | entry | signs | value |
|---|---|---|---|---|
| IQ3_XXS | d f16 0, qs 2, u32 w 66 | qs\[8 ib + e\] | even, bits 7 l of w\[ib\] | d (n + 1/2) / 2 · g, n = w >> 28 |
| IQ3_S | d f16 0, qs 2, qh 66, signs 74, scales 106 | the same, bit e of qh\[ib\] above it | signs\[4 ib + l\] | d (2 n + 1) g, n = nibble ib of scales |

"Even": seven bits of eight signs.
*/

use super::codebook::{self, even_signs, signed};
use super::{blocks, half, part, word};

#[inline(always)]
pub fn iq3_xxs(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 98], o: &mut [f64; 256]| {
        let d = half(b, 0);
        for (ib, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (q, w) = (part::<8>(b, 2 + 8 * ib), word(b, 66 + 4 * ib));
            let s = d * f64::from(2 * (w >> 28) + 1) * 0.25;
            for (e, o) in o.as_chunks_mut().0.iter_mut().enumerate() {
                let signs = even_signs(w, e / 2) >> (4 * (e % 2));
                signed(&codebook::IQ3_XXS[usize::from(q[e])], signs, s, o);
            }
        }
    });
}

#[inline(always)]
pub fn iq3_s(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 110], o: &mut [f64; 256]| {
        let d = half(b, 0);
        for (ib, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (q, signs) = (part::<8>(b, 2 + 8 * ib), part::<4>(b, 74 + 4 * ib));
            let (high, n) = (usize::from(b[66 + ib]), (b[106 + ib / 2] >> (4 * (ib % 2))) & 15);
            let s = d * f64::from(2 * n + 1);
            for (e, o) in o.as_chunks_mut().0.iter_mut().enumerate() {
                let entry = usize::from(q[e]) | ((high >> e) & 1) << 8;
                signed(&codebook::IQ3_S[entry], signs[e / 2] >> (4 * (e % 2)), s, o);
            }
        }
    });
}
