/*!
Routes of a weight from its file into the numbers that an engine multiplies by.

The judge rounds the file's exact value once. Where an engine promised nothing, it may as well have decoded into float32 or
float16 first, kept the values unrounded inside its product, or taken them out of a product of the quantised matrix with the identity;
none of these is a fault. A route explains a weight that was captured if every element is the route's, bit for bit, and a tensor
computed from one that was not if it passes under it.
*/

use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Weight, Weights};
use rayon::prelude::*;

/// A route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Rounded once.
    Once(DType),
    /// Rounded to the first, then to the second.
    By(DType, DType),
    /// Not rounded.
    Exact,
    /// Row of an identity matrix, quantised to q8_1 as ggml's kernels do with the left side of a product, times the
    /// matrix: the one becomes 127 · f16(1/127).
    Identity(DType),
}

/// What a one becomes in q8_1: f16(1/127) = 129 · 2^-14.
const ONE: f64 = 127.0 * 129.0 / 16384.0;
/// How far the product's float32 sum may be from ONE times the value, relative to it, before it is rounded: one term that
/// counts, scaled twice in float32.
const SLACK: f64 = 4.0 / 16_777_216.0;

impl Route {
    /// In words.
    pub fn name(self) -> String {
        match self {
            Route::Once(d) => format!("weights rounded to {d}"),
            Route::By(a, b) => format!("weights rounded to {a}, then to {b}"),
            Route::Exact => "weights as decoded, not rounded".into(),
            Route::Identity(d) => {
                format!("weights taken out of a product with the identity in q8_1, rounded to {d}")
            }
        }
    }

    /// Routes of a captured weight other than [`Route::Once`]; the file's `stored` dtype is `dtype`.
    pub fn of_captured(weight: Weight, dtype: DType) -> Vec<Route> {
        let mut all = vec![Route::By(DType::F32, dtype), Route::By(DType::F16, dtype)];
        if matches!(weight, Weight::WUk | Weight::WUv) {
            all.push(Route::Identity(dtype));
        }
        all
    }

    /// Routes of a weight that nobody captured, other than being rounded once to `dtype`.
    pub fn of_unknown(dtype: DType) -> Vec<Route> {
        let mut all: Vec<Route> =
            [DType::Bf16, DType::F16].into_iter().filter(|d| *d != dtype).map(Route::Once).collect();
        all.extend([Route::Exact, Route::By(DType::F32, dtype), Route::By(DType::F16, dtype)]);
        all
    }

    /// The engine's value of the file's.
    pub fn value(self, x: f64) -> f64 {
        match self {
            Route::Once(d) => d.round(x),
            Route::By(a, b) => b.round(a.round(x)),
            Route::Exact => x,
            Route::Identity(d) => d.round(x * ONE),
        }
    }

    /// Whether the engine's value is the route's.
    fn takes(self, engine: f64, x: f64) -> bool {
        let same = |v: f64| engine.to_bits() == v.to_bits() || engine == v || engine.is_nan() && v.is_nan();
        match self {
            Route::Identity(d) => {
                let v = x * ONE;
                same(d.round(v)) || same(d.round(v * (1.0 + SLACK))) || same(d.round(v * (1.0 - SLACK)))
            }
            other => same(other.value(x)),
        }
    }

    /// Whether every element is the route's.
    pub fn explains(self, file: &dyn Rows, engine: &dyn Rows) -> bool {
        let cols = file.cols();
        (0..file.rows()).into_par_iter().all(|r| {
            let (mut x, mut o) = (vec![0.0; cols], vec![0.0; cols]);
            file.decode(r, 0, &mut x);
            engine.decode(r, 0, &mut o);
            o.iter().zip(&x).all(|(o, x)| self.takes(*o, *x))
        })
    }
}

/// A matrix by a route.
pub struct Routed<R> {
    /// The file's.
    pub inner: R,
    /// The route.
    pub route: Route,
}

impl<R: Rows> Rows for Routed<R> {
    fn rows(&self) -> usize {
        self.inner.rows()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        self.inner.decode(row, k0, out);
        out.iter_mut().for_each(|v| *v = self.route.value(*v));
    }
    fn say(&self, to: &mut dyn FnMut(&[u8])) {
        to(format!("{:?};", self.route).as_bytes());
        self.inner.say(to);
    }
}

/// The weights that an engine holds, where those that nobody captured took a route.
pub struct Otherwise<'a> {
    held: &'a dyn Weights,
    matrices: Vec<(Weight, Routed<&'a dyn Rows>)>,
    norms: Vec<(Weight, Vec<f64>)>,
}

impl<'a> Otherwise<'a> {
    /// Of these weights, the file's.
    pub fn new(
        held: &'a dyn Weights,
        file: &'a dyn Weights,
        unknown: &[Weight],
        route: Route,
    ) -> Otherwise<'a> {
        let matrices =
            unknown.iter().filter_map(|w| Some((*w, Routed { inner: file.matrix(*w)?, route }))).collect();
        let norm = |w: &Weight| Some((*w, file.norm(*w)?.iter().map(|v| route.value(*v)).collect()));
        Otherwise { held, matrices, norms: unknown.iter().filter_map(norm).collect() }
    }
}

impl Weights for Otherwise<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        let own = self.matrices.iter().find(|(w, _)| *w == weight).map(|(_, m)| m as &dyn Rows);
        own.or_else(|| self.held.matrix(weight))
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        let own = self.norms.iter().find(|(w, _)| *w == weight).map(|(_, v)| v.as_slice());
        own.or_else(|| self.held.norm(weight))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::product::Dense;

    /// f16(1/127): 1/127 = 2^-7 · 1.00787…, of which f16 keeps ten bits: 1 + 8/1024.
    #[test]
    fn a_one_in_q8_1() {
        let d = DType::F16.round(1.0 / 127.0);
        assert_eq!(127.0 * d, ONE);
        assert!((ONE - 1.0 + 6.1e-5).abs() < 1e-6);
    }

    #[test]
    fn routes_differ_where_they_should() {
        // Just above the middle of two bf16 values by less than float32 sees: once up, by way of float32 to even.
        let x = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
        assert_eq!(Route::Once(DType::Bf16).value(x), 1.0 + 2f64.powi(-7));
        assert_eq!(Route::By(DType::F32, DType::Bf16).value(x), 1.0);
        let file = [x, 3.0, -0.7];
        let file = Dense { data: &file, cols: 3 };
        let by: Vec<f64> = [x, 3.0, -0.7].map(|v| Route::By(DType::F32, DType::Bf16).value(v)).to_vec();
        let engine = Dense { data: &by, cols: 3 };
        assert!(Route::By(DType::F32, DType::Bf16).explains(&file, &engine));
        assert!(!Route::Once(DType::Bf16).explains(&file, &engine));
        // The identity moves what stands just above a middle, and nothing else.
        let identity = Route::Identity(DType::Bf16);
        assert_eq!(identity.value(3.0), 3.0);
        assert_eq!(identity.value(1.0 + 2f64.powi(-8) + 2f64.powi(-16)), 1.0);
        let off = [1.0, 3.0 + 2f64.powi(-6), DType::Bf16.round(-0.7)];
        assert!(!identity.explains(&file, &Dense { data: &off, cols: 3 }));
    }
}
