/*!
Four-bit codes of a fixed, uneven table: IQ4_NL (blocks of 32) and IQ4_XS (256, eight groups of 32).

| type | fields (bytes) | value |
|---|---|---|
| IQ4_NL | d f16 0, qs 2 | d table\[q\] |
| IQ4_XS | d f16 0, scales_h u16 2, scales_l 4, qs 8 | d (s\[g\] - 32) table\[q\] |

s\[g\] = nibble g of scales_l, with bits 2g of scales_h above it. Nibbles of qs are split as in Q4_0, per group of 16
bytes.
*/

use super::{blocks, half, part};

/// ggml's `kvalues_iq4nl`.
const TABLE: [f64; 16] =
    [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];

/// scale table\[q\] of split nibbles, `N` = 2 `H`.
#[inline(always)]
pub fn group<const H: usize, const N: usize>(table: &[f64; 16], qs: [u8; H], scale: f64, out: &mut [f64; N]) {
    for i in 0..H {
        out[i] = scale * table[usize::from(qs[i] & 15)];
        out[i + H] = scale * table[usize::from(qs[i] >> 4)];
    }
}

#[inline(always)]
pub fn iq4_nl(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 18], o: &mut [f64; 32]| group(&TABLE, part::<16>(b, 2), half(b, 0), o));
}

#[inline(always)]
pub fn iq4_xs(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 136], o: &mut [f64; 256]| {
        let (d, high) = (half(b, 0), u16::from_le_bytes([b[2], b[3]]));
        for (g, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let low = i32::from((b[4 + g / 2] >> (4 * (g % 2))) & 15);
            let s = low | i32::from((high >> (2 * g)) & 3) << 4;
            group(&TABLE, part::<16>(b, 8 + 16 * g), d * f64::from(s - 32), o);
        }
    });
}
