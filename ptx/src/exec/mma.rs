/*!
`mma.sync`: fragments to matrices, the tensor core's sum of [`mla_numeric::tensor_core`], matrices to fragments.

Lane l holds, with g = l / 4 and t = l % 4: of A rows g and g + 8, of B and C columns g and 2t, 2t + 1; each register
of A and B packs the elements of 4 bytes along k. Layouts as in the PTX manual's figures for m16n8k8, k16 and k32.
*/

use super::regs::{LANES, V};
use crate::fp;
use mla_numeric::DType;
use mla_numeric::tensor_core::TensorCore;

/// Operand formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F16,
    Bf16,
    Tf32,
    E4m3,
    E5m2,
}

impl Element {
    fn bits(self) -> u32 {
        match self {
            Element::F16 | Element::Bf16 => 16,
            Element::Tf32 => 32,
            Element::E4m3 | Element::E5m2 => 8,
        }
    }

    #[inline(always)]
    fn value(self, bits: u32) -> f32 {
        match self {
            Element::Bf16 => f32::from_bits(bits << 16),
            Element::F16 => DType::F16.from_bits(u64::from(bits)) as f32,
            Element::Tf32 => f32::from_bits(bits),
            Element::E4m3 => fp::e4m3_value(bits as u8) as f32,
            Element::E5m2 => fp::e5m2_value(bits as u8) as f32,
        }
    }

    /// The format whose smallest normal exponent bounds the operands'.
    fn format(self) -> DType {
        match self {
            Element::F16 | Element::E5m2 => DType::F16,
            Element::Bf16 => DType::Bf16,
            Element::Tf32 => DType::Tf32,
            Element::E4m3 => DType::E4m3,
        }
    }
}

/// What an mma multiplies: 16 rows, 8 columns, `k` products; both operands have one format, accumulator and result are
/// float32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub k: u8,
    pub element: Element,
}

impl Shape {
    /// Registers of A and B; C has 4.
    pub fn registers(self) -> [usize; 2] {
        let per = 32 / self.element.bits();
        let a = 16 * u32::from(self.k) / LANES as u32 / per;
        [a as usize, (a / 2) as usize]
    }
}

/// The sum that an architecture's tensor core makes for a shape.
///
/// sm_90 and later sum all of k at once and keep 25 bits; sm_80 to sm_89 keep 24 and cut the largest k of a format in
/// two. Measured here for sm_90 with 16-bit operands; the rest is from the literature (arXiv 2511.10909). 8-bit operands
/// before sm_90 have an accumulator that this crate does not model; lowering refuses them.
pub fn core_of(sm: u32, shape: Shape) -> TensorCore {
    let k = usize::from(shape.k);
    if sm >= 90 {
        TensorCore { block: k, bits: 25 }
    } else {
        let halves = matches!((shape.element.bits(), k), (32, 8) | (16, 16));
        TensorCore { block: if halves { k / 2 } else { k }, bits: 24 }
    }
}

/// D = A · B + C. `a`, `b`, `c`: registers of the fragments; the result has as many registers as C.
pub fn mma(shape: Shape, core: TensorCore, a: &[V], b: &[V], c: &[V]) -> [V; 4] {
    let (mut rows, mut columns, mut acc) = ([[0f32; 32]; 16], [[0f32; 8]; 32], [[0f32; 8]; 16]);
    let k = usize::from(shape.k).min(32);
    let (bits, per) = (shape.element.bits(), (32 / shape.element.bits()) as usize);
    let mask = u32::MAX >> (32 - bits);
    for (q, v) in a.iter().enumerate() {
        for (l, &word) in v.iter().enumerate() {
            let (row, k0) = ((l >> 2) + 8 * (q & 1), (l & 3) * per + 4 * per * (q >> 1));
            for e in 0..per {
                rows[row][k0 + e] = shape.element.value(word >> (bits * e as u32) & mask);
            }
        }
    }
    for (q, v) in b.iter().enumerate() {
        for (l, &word) in v.iter().enumerate() {
            let (n, k0) = (l >> 2, (l & 3) * per + 4 * per * q);
            for e in 0..per {
                columns[k0 + e][n] = shape.element.value(word >> (bits * e as u32) & mask);
            }
        }
    }
    for (q, v) in c.iter().enumerate().take(4) {
        for (l, &word) in v.iter().enumerate() {
            acc[(l >> 2) + 8 * (q >> 1)][(l & 3) * 2 + (q & 1)] = f32::from_bits(word);
        }
    }

    let unit = core.on(shape.element.format());
    for (acc, row) in acc.iter_mut().zip(&rows) {
        unit.lanes(acc, &row[..k], &columns[..k]);
    }

    let mut out = [[0; LANES]; 4];
    for (q, v) in out.iter_mut().enumerate() {
        for (l, word) in v.iter_mut().enumerate() {
            *word = acc[(l >> 2) + 8 * (q >> 1)][(l & 3) * 2 + (q & 1)].to_bits();
        }
    }
    out
}
