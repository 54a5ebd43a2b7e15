/*!
Small layers, made up in memory: real head geometry, few heads, narrow hidden states.

A run over one takes a fraction of a second. [`Data`] says how benign the numbers are: beside plain ones, the kinds
that have broken judges of attention before (outlier channels, tiny and uneven norm weights, columns of very
different size, repeated keys, an attention sink, massive activations).
*/

use crate::case::{Case, Stream};
use crate::model::Layer;
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Geometry, Pairing, Rope, Spec, WEIGHTS, Weight, Weights};

/// A geometry by name.
#[derive(Debug)]
pub struct Shape {
    /// Name.
    pub name: &'static str,
    /// Widths.
    pub geometry: Geometry,
}

const fn shape(name: &'static str, widths: [usize; 7]) -> Shape {
    let [hidden, heads, q_rank, latent, rope, nope, value] = widths;
    Shape { name, geometry: Geometry { hidden, heads, q_rank, latent, rope, nope, value } }
}

impl Shape {
    /// Whether our kernels take heads of this size (`requires` in their headers).
    pub fn has_kernels(&self) -> bool {
        let g = &self.geometry;
        g.latent.is_multiple_of(128) && (g.latent + g.rope).is_multiple_of(64) && g.hidden.is_multiple_of(8)
    }
}

/// All: hidden, heads, query rank, latent, rope, nope, value.
pub static SHAPES: &[Shape] = &[
    shape("deepseek", [256, 2, 96, 512, 64, 128, 128]),
    shape("glm-5", [320, 2, 128, 512, 64, 192, 256]),
    shape("no-q-rank", [192, 3, 0, 256, 64, 128, 128]),
    shape("many-heads", [128, 8, 64, 128, 32, 64, 64]),
    shape("small", [64, 1, 32, 64, 16, 32, 32]),
    // Widths that are multiples of nothing.
    shape("uneven", [275, 3, 37, 43, 6, 19, 13]),
];

/// What the numbers of a layer and its inputs are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Independent, of one size.
    Plain,
    /// Eight input channels of every product thirty times larger.
    Outliers,
    /// Norm weights over five decades, most of them tiny.
    Gammas,
    /// Value columns over several decades: some are subnormal in f16.
    Columns,
    /// Every key of the context stands there eight times, every hidden state twice.
    Repeated,
    /// The first key of a context has a large rotated part: scores far above or below all others.
    Sink,
    /// Three channels of the hidden state 64 times larger.
    Massive,
}

impl Data {
    /// All; the plain one first.
    pub const ALL: [Data; 7] =
        [Data::Plain, Data::Outliers, Data::Gammas, Data::Columns, Data::Repeated, Data::Sink, Data::Massive];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Data::Plain => "plain",
            Data::Outliers => "outlier channels",
            Data::Gammas => "tiny norm weights",
            Data::Columns => "uneven value columns",
            Data::Repeated => "repeated keys",
            Data::Sink => "sink",
            Data::Massive => "massive activations",
        }
    }

    /// Changes the inputs of a case. Values stay on their grid: rows are copied, or multiplied by a power of two.
    pub fn harden(self, case: &mut Case, g: &Geometry, dtype: DType) {
        match self {
            Data::Repeated => {
                for context in &mut case.given.context {
                    for p in 0..context.nrows() {
                        let from = context.row(p / 8 * 8).to_owned();
                        context.row_mut(p).assign(&from);
                    }
                }
                for t in 0..case.given.hidden.nrows() {
                    let from = case.given.hidden.row(t / 2 * 2).to_owned();
                    case.given.hidden.row_mut(t).assign(&from);
                }
            }
            Data::Sink => {
                for context in case.given.context.iter_mut().filter(|c| c.nrows() > 0) {
                    context.row_mut(0).iter_mut().skip(g.latent).for_each(|v| *v = dtype.round(*v * 8.0));
                }
            }
            Data::Massive => {
                for c in [1, g.hidden / 3, g.hidden - 1] {
                    case.given.hidden.column_mut(c).iter_mut().for_each(|v| *v = dtype.round(*v * 64.0));
                }
            }
            Data::Plain | Data::Outliers | Data::Gammas | Data::Columns => {}
        }
    }
}

/// A layer that owns its weights.
pub struct Made {
    /// Scalars.
    pub spec: Spec,
    matrices: Vec<(Weight, Matrix)>,
    norms: Vec<(Weight, Vec<f64>)>,
}

/// Values in float32, row-major.
struct Matrix {
    data: Vec<f32>,
    cols: usize,
}

impl Rows for Matrix {
    fn rows(&self) -> usize {
        self.data.len() / self.cols.max(1)
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let from = &self.data[row * self.cols + k0..][..out.len()];
        out.iter_mut().zip(from).for_each(|(o, v)| *o = f64::from(*v));
    }
}

impl Weights for Made {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        self.matrices.iter().find(|(w, _)| *w == weight).map(|(_, m)| m as &dyn Rows)
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.norms.iter().find(|(w, _)| *w == weight).map(|(_, v)| v.as_slice())
    }
}

/// YaRN's factor on cos and sin, 1 + ln(40)/10. A short decimal such as 1.1 would not do: times an 8-bit significand
/// it falls so near to the midpoints of bf16 that rounding to float32 first makes ties of a tenth of all products.
const YARN: f64 = 1.368_887_945_411_393_6;

const WEIGHT: u64 = 20;
const SCALARS: u64 = 21;

impl Made {
    /// Draws a layer: rows of rms 1/√(row length), norm weights in [0.5, 1.5], logits of a standard deviation of
    /// about 0.3, 1 or 4, and scalars as models have them.
    pub fn new(shape: &Shape, data: Data, seed: u64) -> Made {
        let g = shape.geometry;
        let mut rng = Stream::new(seed, SCALARS, 0);
        let theta = [1e4, 1e6][rng.below(2)];
        let spec = Spec {
            geometry: g,
            eps_attn: [1e-6, 1e-5][rng.below(2)],
            eps_latent: 1e-6,
            rope: Rope {
                inv_freq: (0..g.rope / 2)
                    .map(|j| libm::pow(theta, -2.0 * j as f64 / g.rope as f64))
                    .collect(),
                magnitude: [1.0, 1.0, YARN][rng.below(3)],
                pairing: [Pairing::Adjacent, Pairing::Half][rng.below(2)],
            },
            scale: [1.0, 1.87][rng.below(2)] / (g.key() as f64).sqrt(),
            temperature: None,
        };
        let sharpness = [0.3, 1.0, 1.0, 4.0][rng.below(4)];
        let (mut matrices, mut norms) = (Vec::new(), Vec::new());
        for weight in WEIGHTS.iter().map(|r| r.weight).filter(|w| w.exists(&g)) {
            let (rows, cols) = weight.matrix(&g);
            let mut rng = Stream::new(seed, WEIGHT, weight as u64);
            if weight.is_norm() {
                let value = |rng: &mut Stream| match data {
                    Data::Gammas => libm::exp(1.5 * rng.normal() - 3.0),
                    _ => 0.5 + rng.uniform(),
                };
                norms.push((weight, (0..cols).map(|_| f64::from(value(&mut rng) as f32)).collect()));
                continue;
            }
            let queries = matches!(weight, Weight::WQ | Weight::WQB);
            let size = if queries { sharpness } else { 1.0 } / (cols as f64).sqrt();
            let mut data_of = vec![0f32; rows * cols];
            data_of.iter_mut().for_each(|v| *v = (size * bell(&mut rng)) as f32);
            harden(weight, data, &mut rng, &mut data_of, cols);
            matrices.push((weight, Matrix { data: data_of, cols }));
        }
        Made { spec, matrices, norms }
    }

    /// As the engine and the judge take it.
    pub fn layer(&self) -> Layer<'_> {
        Layer { index: 0, spec: self.spec.clone(), weights: self }
    }
}

/// Bell-shaped, mean 0, variance 1: the sum of four uniform 16-bit numbers, whose variance is (2³² − 1)/12 each.
fn bell(rng: &mut Stream) -> f64 {
    let w = rng.next();
    let sum: u64 = (0..4).map(|i| (w >> (16 * i)) & 0xffff).sum();
    (sum as f64 - 2.0 * 65535.0) / (4_294_967_295.0f64 / 3.0).sqrt()
}

fn harden(weight: Weight, data: Data, rng: &mut Stream, values: &mut [f32], cols: usize) {
    match data {
        Data::Outliers => {
            let square = |v: &[f32]| v.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>();
            let before = square(values);
            for _ in 0..8 {
                let c = rng.below(cols);
                values.iter_mut().skip(c).step_by(cols).for_each(|v| *v *= 30.0);
            }
            // The matrix keeps its size: with outliers in queries and keys alike one key would have all the weight.
            let size = (before / square(values)).sqrt() as f32;
            values.iter_mut().for_each(|v| *v *= size);
        }
        Data::Columns if weight == Weight::WUv => {
            for row in values.chunks_mut(cols) {
                let factor = libm::exp(2.0 * rng.normal() - 4.0) as f32;
                row.iter_mut().for_each(|v| *v *= factor);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_have_every_weight_in_its_shape_and_size() {
        for s in SHAPES {
            let made = Made::new(s, Data::Plain, 3);
            for w in Weight::ALL.iter().filter(|w| w.exists(&s.geometry)) {
                let (rows, cols) = w.matrix(&s.geometry);
                if w.is_norm() {
                    assert_eq!(made.norm(*w).unwrap().len(), cols, "{} {w}", s.name);
                    continue;
                }
                let m = made.matrix(*w).unwrap();
                assert_eq!((m.rows(), m.cols()), (rows, cols), "{} {w}", s.name);
                if matches!(w, Weight::WQ | Weight::WQB) {
                    continue;
                }
                let mut line = vec![0.0; cols];
                let mut squares = 0.0;
                for r in 0..rows {
                    m.decode(r, 0, &mut line);
                    squares += line.iter().map(|v| v * v).sum::<f64>();
                }
                // rms · √cols = 1; a mean of n squares of a bell of kurtosis 2.7 errs by √(1.7/n), six times that.
                let n = (rows * cols) as f64;
                assert!((squares / rows as f64 - 1.0).abs() < 6.0 * (1.7 / n).sqrt(), "{} {w}", s.name);
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_layer_and_hard_data_differ() {
        let first = |data, seed| {
            let made = Made::new(&SHAPES[0], data, seed);
            let mut line = vec![0.0; 128];
            made.matrix(Weight::WUv).unwrap().decode(0, 0, &mut line);
            (line, made.norm(Weight::GKv).unwrap().to_vec())
        };
        assert_eq!(first(Data::Plain, 1), first(Data::Plain, 1));
        assert_ne!(first(Data::Plain, 1), first(Data::Plain, 2));
        assert_ne!(first(Data::Plain, 1).0, first(Data::Columns, 1).0);
        assert_ne!(first(Data::Plain, 1).1, first(Data::Gammas, 1).1);
    }
}
