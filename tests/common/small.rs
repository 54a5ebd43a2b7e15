//! A small layer with random weights in memory, and cases for it.

use mla_check::case::Case;
use mla_check::model::Layer;
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Geometry, Given, Pairing, Plan, Regime, Rope, Sequence, Spec, WEIGHTS, Weight, Weights};
use ndarray::Array2;
use std::collections::HashMap;

/// Widths that are multiples of nothing; rows of hidden are decoded in two parts.
pub const G: Geometry =
    Geometry { hidden: 275, heads: 3, q_rank: 37, latent: 43, rope: 6, nope: 19, value: 13 };

pub struct Random(pub u64);

impl Random {
    /// Uniform in (-1, 1), on the grid of f32.
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from(((self.0 >> 40) as f32 - 8_388_607.5) / 8_388_608.0)
    }
    pub fn matrix(&mut self, shape: (usize, usize), size: f64) -> Array2<f64> {
        Array2::from_shape_simple_fn(shape, || self.next() * size)
    }
}

/// Weights in float64, decoded from memory.
pub struct Memory(pub HashMap<Weight, (Vec<f64>, usize)>);

impl Memory {
    pub fn new(g: &Geometry) -> Memory {
        let mut all = HashMap::new();
        for row in WEIGHTS.iter().filter(|r| r.weight.exists(g)) {
            let (rows, cols) = row.weight.matrix(g);
            let mut r = Random(row.weight as u64);
            // Rows of length √3 keep the size of their input; norms lie around 1.
            let (size, mean) =
                if row.weight.is_norm() { (0.5, 1.0) } else { (3.0 / (cols as f64).sqrt(), 0.0) };
            all.insert(row.weight, ((0..rows * cols).map(|_| mean + size * r.next()).collect(), cols));
        }
        Memory(all)
    }
}

/// A matrix that owns nothing and lives as long as its weights.
pub struct View<'a>(&'a [f64], usize);

impl Rows for View<'_> {
    fn rows(&self) -> usize {
        self.0.len() / self.1
    }
    fn cols(&self) -> usize {
        self.1
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let part = &self.0[row * self.1..(row + 1) * self.1];
        assert!(k0.is_multiple_of(256) && (k0 + out.len() == self.1 || out.len().is_multiple_of(256)));
        out.copy_from_slice(&part[k0..k0 + out.len()]);
    }
}

pub struct Views<'a>(HashMap<Weight, View<'a>>);

impl Views<'_> {
    /// Of weights in memory.
    pub fn of(memory: &Memory) -> Views<'_> {
        Views(memory.0.iter().map(|(w, (v, cols))| (*w, View(v, *cols))).collect())
    }
}

impl Weights for Views<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        self.0.get(&weight).filter(|_| !weight.is_norm()).map(|v| v as &dyn Rows)
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.0.get(&weight).filter(|_| weight.is_norm()).map(|v| v.0)
    }
}

pub fn spec(g: Geometry, pairing: Pairing) -> Spec {
    Spec {
        geometry: g,
        eps_attn: 1e-5,
        eps_latent: 1e-6,
        rope: Rope { inv_freq: vec![1.0, 0.11, 0.013], magnitude: 1.1, pairing },
        scale: 0.45,
        temperature: None,
    }
}

pub fn with_layer<T>(spec: Spec, f: impl FnOnce(&Layer) -> T) -> T {
    with_weights(spec, |_| (), f)
}

/// With weights that are changed before.
pub fn with_weights<T>(spec: Spec, change: impl FnOnce(&mut Memory), f: impl FnOnce(&Layer) -> T) -> T {
    let mut memory = Memory::new(&spec.geometry);
    change(&mut memory);
    let views = Views::of(&memory);
    f(&Layer { index: 0, spec, weights: &views })
}

/// Requests (context, new) in this order; each draws the same values wherever it stands.
pub fn case(requests: &[(usize, usize)], splits: usize, pages: u64, dtype: DType) -> Case {
    let page_size = 4;
    let (mut positions, mut token_request, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
    let mut hidden = Vec::new();
    let mut context = Vec::new();
    let total: usize = requests.iter().map(|(c, n)| (c + n).div_ceil(page_size)).sum::<usize>() + 2;
    let mut order: Vec<usize> = (0..total).collect();
    let mut r = Random(pages);
    for i in (1..total).rev() {
        order.swap(i, ((r.next() + 1.0) / 2.0 * (i + 1) as f64) as usize);
    }
    let mut next = order.into_iter();
    for (request, &(c, n)) in requests.iter().enumerate() {
        let mut r = Random((c * 1000 + n) as u64);
        let start = positions.len();
        positions.extend((c..c + n).map(|p| p as u64));
        token_request.extend(std::iter::repeat_n(request, n));
        hidden.extend((0..n * G.hidden).map(|_| dtype.round(2.0 * r.next())));
        context.push(r.matrix((c, G.cache()), 1.5).mapv(|v| dtype.round(v)));
        let own: Vec<usize> = next.by_ref().take((c + n).div_ceil(page_size)).collect();
        sequences.push(Sequence {
            request,
            regime: Regime::Random,
            tokens: start..start + n,
            context: c,
            slots: (0..c + n).map(|p| own[p / page_size] * page_size + p % page_size).collect(),
        });
    }
    let hidden = Array2::from_shape_vec((positions.len(), G.hidden), hidden).unwrap();
    Case {
        batch: requests
            .iter()
            .map(|(c, n)| format!("{c}+{n}"))
            .collect::<Vec<_>>()
            .join(",")
            .parse()
            .unwrap(),
        regimes: vec![Regime::Random],
        plan: Plan {
            positions,
            token_request,
            sequences,
            page_size,
            pages: total,
            splits,
            ..Plan::default()
        },
        given: Given { hidden, context, ..Given::default() },
        notes: Vec::new(),
    }
}

pub const REQUESTS: [(usize, usize); 4] = [(0, 21), (50, 1), (0, 1), (33, 5)];
