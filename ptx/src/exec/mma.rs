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

/// How an element is read from its register: the word, which of its elements.
macro_rules! with_value {
    ($element:expr, $f:ident::<$per:tt, $k:ident>($($arg:expr),*)) => {
        match $element {
            Element::Bf16 => $f::<2, $k>($($arg),*, |w, e| f32::from_bits(w >> (16 * e) << 16)),
            Element::F16 => $f::<2, $k>($($arg),*, |w, e| fp::f16_value((w >> (16 * e)) as u16)),
            Element::Tf32 => $f::<1, $k>($($arg),*, |w, _| f32::from_bits(w)),
            Element::E4m3 => $f::<4, $k>($($arg),*, |w, e| fp::E4M3[(w >> (8 * e) & 0xff) as usize]),
            Element::E5m2 => $f::<4, $k>($($arg),*, |w, e| fp::f16_value((w >> (8 * e) << 8) as u16)),
        }
    };
}

/// One register of an A fragment: the four words of each group of lanes are successive elements, from `k0`, of a row.
#[inline(always)]
fn rows<const PER: usize, const K: usize>(
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

/// One register of a B fragment: the same for a column.
#[inline(always)]
fn columns<const PER: usize, const K: usize>(
    v: &V,
    out: &mut [[f32; 8]; K],
    k0: usize,
    value: impl Fn(u32, u32) -> f32,
) {
    let mut side_by_side = [[0; 8]; 4];
    for (n, words) in v.as_chunks::<4>().0.iter().enumerate() {
        for (to, word) in side_by_side.iter_mut().zip(words) {
            to[n] = *word;
        }
    }
    for (words, to) in side_by_side.iter().zip(out[k0..].as_chunks_mut::<PER>().0) {
        for (e, to) in to.iter_mut().enumerate() {
            for (to, word) in to.iter_mut().zip(words) {
                *to = value(*word, e as u32);
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
    let (mut w, mut x) = ([[0f32; K]; 16], [[0f32; 8]; K]);
    for (q, v) in a.iter().enumerate() {
        with_value!(element, rows::<_, K>(v, &mut w[8 * (q & 1)..], step * (q >> 1)));
    }
    for (q, v) in b.iter().enumerate() {
        with_value!(element, columns::<_, K>(v, &mut x, step * q));
    }
    let mut acc = [[0f32; 8]; 16];
    for (pair, to) in c.as_chunks::<2>().0.iter().zip(acc.as_chunks_mut::<8>().0) {
        let [even, odd] = pair.map(|v| v.as_chunks::<4>().0);
        for ((e, o), to) in even.iter().zip(odd).zip(to) {
            *to = [e[0], o[0], e[1], o[1], e[2], o[2], e[3], o[3]].map(f32::from_bits);
        }
    }

    core.on(element.format()).tile(&mut acc, w.as_flattened(), &x);

    let mut out = [[0; LANES]; 4];
    for (pair, from) in out.as_chunks_mut::<2>().0.iter_mut().zip(acc.as_chunks::<8>().0) {
        let [even, odd] = pair.each_mut().map(|v| v.as_chunks_mut::<4>().0);
        for ((e, o), from) in even.iter_mut().zip(odd).zip(from) {
            let v = from.map(f32::to_bits);
            (*e, *o) = ([v[0], v[2], v[4], v[6]], [v[1], v[3], v[5], v[7]]);
        }
    }
    out
}
