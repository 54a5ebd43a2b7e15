/*!
One-bit codebook types, blocks of 256: IQ1_S, IQ1_M. Their entries are 8 values g of -1, 0, 1, all of them moved by an
eighth.

Group k of 8, ib = k / 4, l = k % 4.

| type | fields (bytes) | entry | minus an eighth, if | n |
|---|---|---|---|---|
| IQ1_S | d f16 0, qs 2, u16 qh 34 | qs\[k\], bits 3 l (3 of them) of qh\[ib\] above it | bit 15 of qh\[ib\] | bits 12 to 14 of qh\[ib\] |
| IQ1_M | qs 0, qh 32, u16 sc 48 | qs\[k\], low bits of nibble k of qh above it | bit 3 of the nibble | bits 3 (k / 2 % 4) (3 of them) of sc\[k / 8\] |

Value: d (2 n + 1) (g ± 1/8), here d (2 n + 1) / 8 · (8 g ± 1). d of IQ1_M is the f16 of the top nibbles of the four sc,
the first one lowest.
*/

use super::{blocks, codebook, half, part};
use mla_numeric::DType;

/// d (2 n + 1) (g ± 1/8).
#[inline(always)]
fn moved(entry: usize, minus: bool, d: f64, n: u16, out: &mut [f64; 8]) {
    let (g, scale) = (&codebook::IQ1[entry & 2047], d * f64::from(2 * n + 1) * 0.125);
    let by = 1 - 2 * i32::from(minus);
    for j in 0..8 {
        out[j] = scale * f64::from(8 * i32::from(g[j]) + by);
    }
}

#[inline(always)]
pub fn iq1_s(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 50], o: &mut [f64; 256]| {
        let d = half(b, 0);
        for (ib, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (q, qh) = (part::<4>(b, 2 + 4 * ib), u16::from_le_bytes(part(b, 34 + 2 * ib)));
            for (l, o) in o.as_chunks_mut().0.iter_mut().enumerate() {
                let entry = usize::from(q[l]) | usize::from((qh >> (3 * l)) & 7) << 8;
                moved(entry, qh >> 15 == 1, d, (qh >> 12) & 7, o);
            }
        }
    });
}

#[inline(always)]
pub fn iq1_m(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 56], o: &mut [f64; 256]| {
        let (mut sc, mut d) = ([0; 4], 0);
        for (i, sc) in sc.iter_mut().enumerate() {
            *sc = u16::from_le_bytes(part(b, 48 + 2 * i));
            d |= (*sc >> 12) << (4 * i);
        }
        let d = DType::F16.from_bits(d.into());
        for (k, o) in o.as_chunks_mut().0.iter_mut().enumerate() {
            let nibble = (b[32 + k / 2] >> (4 * (k % 2))) & 15;
            let entry = usize::from(b[k]) | usize::from(nibble & 7) << 8;
            moved(entry, nibble >> 3 == 1, d, (sc[k / 8] >> (3 * (k / 2 % 4))) & 7, o);
        }
    });
}
