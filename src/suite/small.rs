/*!
The layer that faults inside kernels run on: a few narrow heads, one weight in stored blocks where it is their decoding that is
wrong.

Numbers are drawn by a generator of three lines, so that a run is the same on every machine; rows of weights keep the size of what
they are multiplied with.
*/

use crate::fault::text::{GEOMETRY, Shows};
use mla_reference::product::{Blocks, Rows};
use mla_reference::{Geometry, GgmlType, Pairing, Rope, Spec, WEIGHTS, Weight, Weights};
use std::collections::HashMap;

/// The weight that is stored in blocks, where a run asks for some.
pub const STORED: Weight = Weight::WQA;

struct Random(u64);

impl Random {
    /// Uniform in (−1, 1), on the grid of f32.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from(((self.0 >> 40) as f32 - 8_388_607.5) / 8_388_608.0)
    }
}

/// Values of a weight.
struct Values(Vec<f64>, usize);

impl Rows for Values {
    fn rows(&self) -> usize {
        self.0.len() / self.1.max(1)
    }
    fn cols(&self) -> usize {
        self.1
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        out.copy_from_slice(&self.0[row * self.1 + k0..][..out.len()]);
    }
}

/// A layer that owns its weights.
pub struct Small {
    /// Scalars.
    pub spec: Spec,
    values: HashMap<Weight, Values>,
    stored: Option<(GgmlType, Vec<u8>)>,
}

impl Small {
    /// As a run wants it.
    pub fn new(shows: &Shows) -> Small {
        // Whole blocks of 256.
        let hidden = if shows.stored.is_some() { 256 } else { GEOMETRY.hidden };
        let g = Geometry { hidden, ..GEOMETRY };
        let half = g.rope / 2;
        let inv_freq = (0..half).map(|j| libm::pow(1e4, -2.0 * j as f64 / g.rope as f64)).collect();
        let spec = Spec {
            geometry: g,
            eps_attn: 1e-5,
            eps_latent: 1e-6,
            rope: Rope { inv_freq, magnitude: 1.0, pairing: Pairing::Adjacent },
            scale: 1.0 / (g.key() as f64).sqrt(),
            temperature: None,
        };
        let drawn = WEIGHTS.iter().filter(|r| r.weight.exists(&g)).map(|row| {
            let (rows, cols) = row.weight.matrix(&g);
            let mut r = Random(row.weight as u64);
            // Rows of length √3 keep the size of their input; norms lie around 1.
            let (size, mean) = match row.weight.is_norm() {
                true => (0.5, 1.0),
                false => (3.0 / (cols as f64).sqrt(), 0.0),
            };
            (row.weight, Values((0..rows * cols).map(|_| mean + size * r.next()).collect(), cols))
        });
        let stored = shows.stored.map(|ty| (ty, blocks(ty, g.q_rank * g.hidden)));
        Small { spec, values: drawn.collect(), stored }
    }

    /// Its weights; None where a type's blocks do not fill its rows.
    pub fn weights(&self) -> Option<Held<'_>> {
        let blocks = match &self.stored {
            Some((ty, bytes)) => Some(Blocks::new(*ty, bytes, self.spec.geometry.hidden).ok()?),
            None => None,
        };
        Some(Held { values: &self.values, blocks })
    }
}

/// Weights of a [`Small`].
pub struct Held<'a> {
    values: &'a HashMap<Weight, Values>,
    blocks: Option<Blocks<'a>>,
}

impl Weights for Held<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        match &self.blocks {
            Some(b) if weight == STORED => Some(b),
            _ => self.values.get(&weight).filter(|_| !weight.is_norm()).map(|v| v as &dyn Rows),
        }
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.values.get(&weight).filter(|_| weight.is_norm()).map(|v| v.0.as_slice())
    }
}

/// Where a type has its f16 scales.
fn scales(ty: GgmlType) -> &'static [usize] {
    use GgmlType::*;
    match ty {
        Q4_1 | Q5_1 | Q4_K | Q5_K => &[0, 2],
        Q2_K => &[80, 82],
        Q3_K => &[108],
        Q6_K => &[208],
        TQ1_0 => &[52],
        TQ2_0 => &[64],
        MXFP4 | NVFP4 | F64 | F16 | BF16 | F32 | Q8_K | IQ1_M => &[],
        _ => &[0],
    }
}

/// Random blocks with scales of 2^-9.
fn blocks(ty: GgmlType, elements: usize) -> Vec<u8> {
    let mut r = Random(7);
    let size = ty.block_bytes();
    let count = elements / ty.block_elements();
    let mut bytes: Vec<u8> = (0..count * size).map(|_| (r.next() * 127.5 + 127.5) as u8).collect();
    for block in bytes.chunks_mut(size) {
        for at in scales(ty) {
            block[*at..at + 2].copy_from_slice(&0x1800u16.to_le_bytes());
        }
        match ty {
            GgmlType::MXFP4 => block[0] = 119,
            GgmlType::NVFP4 => block[..4].copy_from_slice(&[0x18, 0x21, 0x13, 0x1c]),
            GgmlType::F64 => block.copy_from_slice(&(r.next() / 16.0).to_le_bytes()),
            _ => {}
        }
    }
    bytes
}
