/*!
What the judge predicts of some elements: how far an honest engine may be off, and how far it usually is.

Nearly all elements of a correct engine are the correctly rounded reference, and of those no bound needs to be known.
So everything here is computed as far as it is asked for: bounds of the rows that have a flip (or are sampled for
the median), noise of products element by element from two norms, without arrays.
*/

use super::bound::{bound, statistical};
use super::chain::Grown;
use super::evidence::WIDE;
use super::stats::noise::{self, Noise};
use mla_numeric::{DType, U};
use mla_reference::attention::Head;
use mla_reference::{Accumulate, Contract, RowSum, Terms};
use ndarray::{Array2, ArrayView2, Axis, s};
use std::sync::OnceLock;

/// Spacing of float32 below its smallest normal value.
const TINY: f64 = f64::from_bits((1023 - 149) << 52);

/// Bounds of some rows, `[rows, columns]`.
pub struct Bounds {
    /// |value before the final rounding − x| is at most this, proven.
    pub proven: Array2<f64>,
    /// The same with the probability that the statistical form leaves; never above the proven one.
    pub likely: Array2<f64>,
}

/// Noise of a product: σ = k‖a‖‖w‖.
struct Line<'p> {
    k: f64,
    steps: f64,
    a: &'p [f64],
    w: &'p [f64],
    /// Columns' sizes over their root mean square.
    factors: OnceLock<Vec<f64>>,
}

/// Prediction of a block of a stage.
pub struct Prediction<'p, 't, 'h> {
    contract: &'p Contract,
    terms: &'p Terms<'t, 'h>,
    x: ArrayView2<'p, f64>,
    dtype: DType,
    temperature: bool,
    line: Option<Line<'p>>,
    noise: OnceLock<Noise>,
    grown: Option<Grown>,
}

impl<'p, 't, 'h> Prediction<'p, 't, 'h> {
    /// Of a block `x` with these terms, stored as `dtype`. `temperature`: a rope's factor on queries.
    pub fn new(
        contract: &'p Contract,
        terms: &'p Terms<'t, 'h>,
        x: ArrayView2<'p, f64>,
        dtype: DType,
        temperature: bool,
    ) -> Self {
        let line = match terms {
            Terms::Product { len, a_norms, w_norms, .. } if !a_norms.is_empty() => {
                let (k, steps) = noise::product_scale(contract.accumulate, *len);
                Some(Line { k, steps, a: a_norms, w: w_norms, factors: OnceLock::new() })
            }
            _ => None,
        };
        Prediction { contract, terms, x, dtype, temperature, line, noise: OnceLock::new(), grown: None }
    }

    /// The same from inputs that were not captured: their errors are in its bound and in its noise.
    pub fn grown(self, grown: Option<Grown>) -> Self {
        Prediction { grown, ..self }
    }

    /// Standard deviation of what inputs that were not captured add to an element.
    pub fn inherited(&self, i: usize, j: usize) -> f64 {
        self.grown.as_ref().map_or(0.0, |g| g.usual[[i, j]])
    }

    /// The contract that is emulated.
    pub fn contract(&self) -> &'p Contract {
        self.contract
    }

    /// Whether every cast that the values may have seen is emulated. Where the place of P's cast is unknown it is not:
    /// in outputs of attention, and in an lse whose row sum takes cast P.
    /// Nor is it of inputs that were computed here in place of ones that were not captured.
    pub fn emulated(&self) -> bool {
        if self.grown.is_some() {
            return false;
        }
        let soft = &self.contract.softmax;
        let lse = match self.terms {
            Terms::Attention { lse, .. } | Terms::Split { lse, .. } => *lse,
            _ => return true,
        };
        soft.unplaced().is_none() || lse && soft.row_sum == RowSum::Unrounded
    }

    /// Copies have neither bound nor noise: bits are equal.
    pub fn is_copy(&self) -> bool {
        matches!(self.terms, Terms::Copy) && self.grown.is_none()
    }

    /// Bounds of these rows of the block.
    pub fn bounds(&self, rows: &[usize]) -> Bounds {
        if let Some(g) = &self.grown {
            let most = g.most.select(Axis(0), rows);
            return Bounds { likely: most.clone(), proven: most };
        }
        let all = |terms: &Terms, x: ArrayView2<f64>| Bounds {
            proven: bound(self.contract, terms, x, self.temperature),
            likely: statistical(self.contract, terms, x, self.temperature),
        };
        if rows.len() == self.x.nrows() {
            return all(self.terms, self.x);
        }
        let x = self.x.select(Axis(0), rows);
        let x = x.view();
        match self.terms {
            Terms::Attention { attended, head, lse } => {
                let (attended, q) = (attended.select(rows), head.q.select(Axis(0), rows));
                let visible: Vec<usize> = rows.iter().map(|i| head.visible[*i]).collect();
                let head = Head { q: q.view(), visible: &visible, ..**head };
                all(&Terms::Attention { attended: &attended, head: &head, lse: *lse }, x)
            }
            _ => {
                let mut out = Bounds { proven: Array2::zeros(x.dim()), likely: Array2::zeros(x.dim()) };
                let mut whole: Option<Bounds> = None;
                for (k, &i) in rows.iter().enumerate() {
                    let one = match self.terms.rows(i..i + 1) {
                        Some(terms) => all(&terms, x.slice(s![k..k + 1, ..])),
                        None => {
                            let whole = whole.get_or_insert_with(|| all(self.terms, self.x));
                            let row = |m: &Array2<f64>| m.slice(s![i..i + 1, ..]).to_owned();
                            Bounds { proven: row(&whole.proven), likely: row(&whole.likely) }
                        }
                    };
                    out.proven.row_mut(k).assign(&one.proven.row(0));
                    out.likely.row_mut(k).assign(&one.likely.row(0));
                }
                out
            }
        }
    }

    /// The running bound of one element of a product: with S_j the exact partial sums in the order of k, every rounding
    /// errs by `unit` of |S_j| (and a tensor core by what it cuts off the terms of a block). Only for accumulators whose
    /// declaration states that order; None for others, and for other stages.
    pub fn running(&self, i: usize, j: usize) -> Option<f64> {
        // Of inputs that were not captured it knows nothing.
        let (Terms::Product { a, w, .. }, None) = (self.terms, &self.grown) else { return None };
        let (block, chain, unit, cut) = match self.contract.accumulate {
            Accumulate::Rn { block, chain } => (block, chain, U, 0.0),
            Accumulate::Mma { k, bits } => (k, 0, 2.0 * U, (k as f64 + 1.0) * f64::powi(2.0, -(bits as i32))),
            _ => return None,
        };
        let mut row = vec![0.0; w.cols()];
        w.decode(j, 0, &mut row);
        let chain = if chain == 0 { row.len().max(1) } else { chain };
        let (mut total, mut error, mut size) = (0.0f64, 0.0f64, 0.0f64);
        for (c, part) in row.chunks(chain).enumerate() {
            let mut sum = 0.0f64;
            for (b, terms) in part.chunks(block.max(1)).enumerate() {
                let mut largest = 0.0f64;
                for (k, w) in terms.iter().enumerate() {
                    let t = a[[i, c * chain + b * block + k]] * w;
                    largest = largest.max(t.abs());
                    size += t.abs();
                    sum += t;
                }
                error += unit * sum.abs() + cut * largest.max(sum.abs());
            }
            total += sum;
            error += if chain < row.len() { unit * total.abs() } else { 0.0 };
        }
        // Errors of errors, the float64 sum's own, and what underflow adds.
        let n = self.contract.accumulate.roundings(row.len()) as f64;
        Some(error * (1.0 + 2.0 * n * U) + (row.len() + 1) as f64 * f64::EPSILON * size + n * TINY)
    }

    fn noise(&self) -> &Noise {
        self.noise.get_or_init(|| noise::of(self.contract, self.terms, self.x, self.dtype))
    }

    /// Accumulator roundings of the stage, for floors.
    pub fn steps(&self) -> f64 {
        self.line.as_ref().map_or_else(|| self.noise().steps, |l| l.steps)
    }

    /// Probability of each element of row `i`, whose values are `x`, to be a flip; to `out`.
    pub fn shares(&self, i: usize, x: &[f64], out: &mut Vec<f64>) {
        match &self.line {
            Some(l) => {
                let k = 0.8 * l.k * l.a[i];
                noise::flip_shares(self.dtype, x, l.w.iter().map(|w| k * w), out);
            }
            None => self.noise().shares(self.dtype, i, x, out),
        }
    }

    /// Standard deviation of an honest element before its final rounding. Below the smallest normal float32 each
    /// rounding errs by up to 2⁻¹⁴⁹, whatever the size of the value.
    pub fn sigma(&self, i: usize, j: usize) -> f64 {
        let own = match &self.line {
            Some(l) => l.k * l.a[i] * l.w[j] + (l.steps + 6.0) * TINY,
            None => self.noise().sigma[[i, j]] + (self.noise().steps + 6.0) * TINY,
        };
        own.hypot(self.inherited(i, j))
    }

    /// Whether a float32 output lies so far from the reference that few honest ones do: [`WIDE`] standard deviations and
    /// half an ulp. NaN is far.
    pub fn far(&self, i: usize, j: usize, o: f64) -> bool {
        let x = self.x[[i, j]];
        let off = (o - x).abs();
        off.is_nan() || off > WIDE * self.sigma(i, j) + self.dtype.spacing(x) / 2.0
    }

    /// Row ulps of these columns.
    pub fn row_ulps(&self, i: usize, columns: &[usize]) -> Vec<f64> {
        let factors = match &self.line {
            Some(l) => l.factors.get_or_init(|| mla_reference::key_stats::relative(l.w.to_vec())),
            None => &self.noise().factors,
        };
        noise::row_ulps(self.dtype, self.x.row(i), factors, columns.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::attention::strided;

    /// A float32 sum of 2,048 products in blocks of 16, in plain loops: its error never passes the running bound, uses a
    /// good part of it, and the running bound is a small part of the proven one.
    #[test]
    fn the_running_bound_holds_and_is_narrow() {
        // Cubes of sines: sizes that differ by orders of magnitude, so that sums do round.
        let value = |i: usize, j: usize| ((i * 7919 + j * 104_729) as f64).sin().powi(3);
        let a = Array2::from_shape_fn((3, 2048), |(i, k)| DType::Bf16.round(value(i, k)));
        let w = Array2::from_shape_fn((4, 2048), |(j, k)| DType::Bf16.round(value(j + 11, 3 * k)));
        let x = a.dot(&w.t());
        let norms = |m: &Array2<f64>| m.rows().into_iter().map(|r| r.dot(&r).sqrt()).collect::<Vec<_>>();
        let rows = strided(&w);
        let size = a.mapv(f64::abs).dot(&w.mapv(f64::abs).t());
        let terms = Terms::Product {
            len: 2048,
            size: size.into(),
            a_norms: norms(&a).into(),
            w_norms: norms(&w).into(),
            a: a.view(),
            w: &rows,
        };
        let with = |accumulate| Contract { accumulate, ..Contract::exact() };
        let contract = with(Accumulate::Rn { block: 16, chain: 0 });
        let p = Prediction::new(&contract, &terms, x.view(), DType::Bf16, false);
        let proven = p.bounds(&[0, 1, 2]).proven;
        let mut most = 0.0f64;
        for ((i, j), x) in x.indexed_iter() {
            let mut sum = 0.0;
            for k in (0..2048).step_by(16) {
                sum = DType::F32.round(sum + (k..k + 16).map(|k| a[[i, k]] * w[[j, k]]).sum::<f64>());
            }
            let running = p.running(i, j).unwrap();
            assert!((sum - x).abs() <= running, "{i} {j}");
            assert!(running < 0.3 * proven[[i, j]], "{running} {}", proven[[i, j]]);
            most = most.max((sum - x).abs() / running);
        }
        assert!(most > 0.02, "{most}");
        // No order is declared: no running bound.
        for unknown in [Accumulate::Rz { block: 16 }, Accumulate::Unknown] {
            let contract = with(unknown);
            assert_eq!(Prediction::new(&contract, &terms, x.view(), DType::Bf16, false).running(0, 0), None);
        }
    }
}
