/*!
K types, blocks of 256: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, and Q8_K.

16 groups of 16 (Q2_K, Q3_K, Q6_K) or 8 of 32 (Q4_K, Q5_K), each with a small whole-number scale, which the f16 `d`
multiplies; some with a minimum, which the f16 `dmin` multiplies.

| type | fields (bytes) | value of element i in group g |
|---|---|---|
| Q2_K | scales 0, qs 16, d 80, dmin 82 | d lo(scales\[g\]) q - dmin hi(scales\[g\]) |
| Q3_K | hmask 0, qs 32, scales 96, d 108 | d (sc\[g\] - 32) (q + 4 h - 4) |
| Q4_K | d 0, dmin 2, scales 4, qs 16 | d sc\[g\] q - dmin m\[g\] |
| Q5_K | d 0, dmin 2, scales 4, qh 16, qs 48 | the same, q has a fifth bit |
| Q6_K | ql 0, qh 128, int8 scales 192, d 208 | d scales\[g\] (q - 32) |
| Q8_K | d **f32** 0, int8 qs 4, sums of qs 260 | d q |

Elements lie in halves n of 128 and quarters j of 32: i = 128 n + 32 j + l. Two-bit parts of element i are bits 2j of
byte 32 n + l.
*/

use super::{blocks, half, part, signed_bytes};
use mla_numeric::DType;

/// `width` bits of each byte, from bit `shift`.
#[inline(always)]
pub fn bits(bytes: [u8; 32], shift: usize, width: usize) -> [i8; 32] {
    let mut q = [0; 32];
    for l in 0..32 {
        q[l] = ((bytes[l] >> shift) & ((1 << width) - 1)) as i8;
    }
    q
}

/// `low` with the bits `high` above its `width` bits, minus `zero`.
#[inline(always)]
fn join(low: [i8; 32], high: [i8; 32], width: usize, zero: i8) -> [i8; 32] {
    let mut q = [0; 32];
    for l in 0..32 {
        q[l] = (low[l] | high[l] << width) - zero;
    }
    q
}

/// scale q - min, each of them for a half of 16.
#[inline(always)]
fn affine(q: [i8; 32], scale: [f64; 2], min: [f64; 2], out: &mut [f64; 32]) {
    for l in 0..32 {
        out[l] = scale[l / 16] * f64::from(q[l]) - min[l / 16];
    }
}

/// scale q: without the subtraction, which would turn -0 to +0.
#[inline(always)]
fn scaled(q: [i8; 32], scale: [f64; 2], out: &mut [f64; 32]) {
    for l in 0..32 {
        out[l] = scale[l / 16] * f64::from(q[l]);
    }
}

#[inline(always)]
pub fn q2_k(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 84], o: &mut [f64; 256]| {
        let (d, dmin) = (half(b, 80), half(b, 82));
        for (g, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (n, j) = (g / 4, g % 4);
            let (s, t) = (b[2 * g], b[2 * g + 1]);
            let scale = [d * f64::from(s & 15), d * f64::from(t & 15)];
            let min = [dmin * f64::from(s >> 4), dmin * f64::from(t >> 4)];
            affine(bits(part(b, 16 + 32 * n), 2 * j, 2), scale, min, o);
        }
    });
}

/// Six-bit scales, minus 32: low nibbles in bytes 0..8 (of groups 8..16 the high nibbles), two high bits in bytes
/// 8..12.
#[inline(always)]
fn q3_scale(s: [u8; 12], g: usize) -> f64 {
    let low = (s[g % 8] >> (4 * (g / 8))) & 15;
    let high = (s[8 + g % 4] >> (2 * (g / 4))) & 3;
    f64::from(i32::from(low | high << 4) - 32)
}

#[inline(always)]
pub fn q3_k(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 110], o: &mut [f64; 256]| {
        let (d, s) = (half(b, 108), part(b, 96));
        for (g, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (n, j) = (g / 4, g % 4);
            let scale = [d * q3_scale(s, 2 * g), d * q3_scale(s, 2 * g + 1)];
            let (low, high) = (bits(part(b, 32 + 32 * n), 2 * j, 2), bits(part(b, 0), g, 1));
            scaled(join(low, high, 2, 4), scale, o);
        }
    });
}

/// Six-bit scale and minimum of group k: groups 0..4 in the low bits of bytes k and k + 4; groups 4..8 in the nibbles
/// of byte k + 4, with the top bits of bytes k - 4 and k.
#[inline(always)]
fn q4_scale(s: [u8; 12], k: usize) -> (f64, f64) {
    let (sc, m) = if k < 4 {
        (s[k] & 63, s[k + 4] & 63)
    } else {
        ((s[k + 4] & 15) | (s[k - 4] >> 6) << 4, (s[k + 4] >> 4) | (s[k] >> 6) << 4)
    };
    (f64::from(sc), f64::from(m))
}

#[inline(always)]
pub fn q4_k(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 144], o: &mut [f64; 256]| {
        let (d, dmin, s) = (half(b, 0), half(b, 2), part(b, 4));
        for (k, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (sc, m) = q4_scale(s, k);
            let q = bits(part(b, 16 + 32 * (k / 2)), 4 * (k % 2), 4);
            affine(q, [d * sc; 2], [dmin * m; 2], o);
        }
    });
}

#[inline(always)]
pub fn q5_k(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 176], o: &mut [f64; 256]| {
        let (d, dmin, s) = (half(b, 0), half(b, 2), part(b, 4));
        for (k, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (sc, m) = q4_scale(s, k);
            let (low, high) = (bits(part(b, 48 + 32 * (k / 2)), 4 * (k % 2), 4), bits(part(b, 16), k, 1));
            affine(join(low, high, 4, 0), [d * sc; 2], [dmin * m; 2], o);
        }
    });
}

#[inline(always)]
pub fn q6_k(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 210], o: &mut [f64; 256]| {
        let d = half(b, 208);
        for (g, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (n, j) = (g / 4, g % 4);
            let scale = [d * f64::from(b[192 + 2 * g] as i8), d * f64::from(b[193 + 2 * g] as i8)];
            // Opaque: LLVM would else compute several quarters side by side, byte by byte.
            let shift = std::hint::black_box(4 * (j / 2));
            let low = bits(part(b, 64 * n + 32 * (j % 2)), shift, 4);
            let high = bits(part(b, 128 + 32 * n), 2 * j, 2);
            scaled(join(low, high, 4, 32), scale, o);
        }
    });
}

#[inline(always)]
pub fn q8_k(bytes: &[u8], out: &mut [f64]) {
    blocks(bytes, out, |b: &[u8; 292], o: &mut [f64; 256]| {
        let d = DType::F32.from_bits(u32::from_le_bytes(part(b, 0)).into());
        signed_bytes(part(b, 4), d, o);
    });
}
