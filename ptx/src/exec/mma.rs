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

/// One register of an A or B fragment: its four words of each group of lanes are successive elements, from `k0`, of a row
/// of A or a column of B.
#[inline(always)]
fn unpack<const K: usize>(element: Element, v: &V, out: &mut [[f32; K]], k0: usize) {
    match element {
        Element::Bf16 => spread::<2, K>(v, out, k0, |w, e| f32::from_bits(w >> (16 * e) << 16)),
        Element::F16 => spread::<2, K>(v, out, k0, |w, e| fp::f16_value((w >> (16 * e)) as u16)),
        Element::Tf32 => spread::<1, K>(v, out, k0, |w, _| f32::from_bits(w)),
        Element::E4m3 => spread::<4, K>(v, out, k0, |w, e| fp::E4M3[(w >> (8 * e) & 0xff) as usize]),
        Element::E5m2 => spread::<4, K>(v, out, k0, |w, e| fp::f16_value((w >> (8 * e) << 8) as u16)),
    }
}

#[inline(always)]
fn spread<const PER: usize, const K: usize>(
    v: &V,
    out: &mut [[f32; K]],
    k0: usize,
    value: impl Fn(u32, u32) -> f32,
) {
    for (words, row) in v.as_chunks::<4>().0.iter().zip(out) {
        for (&word, to) in words.iter().zip(row[k0..].as_chunks_mut::<PER>().0) {
            for (e, to) in to.iter_mut().enumerate() {
                *to = value(word, e as u32);
            }
        }
    }
}

/// D = A · B + C. `a`, `b`, `c`: registers of the fragments; the result has as many registers as C.
pub fn mma(shape: Shape, core: TensorCore, a: &[&V], b: &[&V], c: &[&V]) -> [V; 4] {
    match shape.k {
        4 => of_k::<4>(shape.element, core, a, b, c),
        8 => of_k::<8>(shape.element, core, a, b, c),
        16 => of_k::<16>(shape.element, core, a, b, c),
        _ => of_k::<32>(shape.element, core, a, b, c),
    }
}

fn of_k<const K: usize>(element: Element, core: TensorCore, a: &[&V], b: &[&V], c: &[&V]) -> [V; 4] {
    // Elements along k that one register of all lanes holds.
    let step = 4 * (32 / element.bits()) as usize;
    let (mut rows, mut transposed) = ([[0f32; K]; 16], [[0f32; K]; 8]);
    for (q, v) in a.iter().enumerate() {
        unpack(element, v, &mut rows[8 * (q & 1)..], step * (q >> 1));
    }
    for (q, v) in b.iter().enumerate() {
        unpack(element, v, &mut transposed, step * q);
    }
    let mut columns = [[0f32; 8]; K];
    for (n, column) in transposed.iter().enumerate() {
        for (to, v) in columns.iter_mut().zip(column) {
            to[n] = *v;
        }
    }
    let mut acc = [[0f32; 8]; 16];
    for (q, v) in c.iter().enumerate().take(4) {
        for (words, to) in v.as_chunks::<4>().0.iter().zip(&mut acc[8 * (q >> 1)..]) {
            for (word, to) in words.iter().zip(to[q & 1..].iter_mut().step_by(2)) {
                *to = f32::from_bits(*word);
            }
        }
    }

    core.on(element.format()).tile(&mut acc, rows.as_flattened(), &columns);

    let mut out = [[0; LANES]; 4];
    for (q, v) in out.iter_mut().enumerate() {
        for (words, from) in v.as_chunks_mut::<4>().0.iter_mut().zip(&acc[8 * (q >> 1)..]) {
            for (word, from) in words.iter_mut().zip(from[q & 1..].iter().step_by(2)) {
                *word = from.to_bits();
            }
        }
    }
    out
}
