/*!
What the judge predicts of some elements: how far an honest engine may be off, and how far it usually is.

Nearly all elements of a correct engine are the correctly rounded reference, and of those no bound needs to be known.
So everything here is computed as far as it is asked for: bounds of the rows that have a flip (or are sampled for
the median), noise of products element by element from two norms, without arrays.
*/

use super::bound::{bound, closer, running, statistical};
use super::chain::Grown;
use super::evidence::WIDE;
use super::stats::noise::{self, Noise};
use mla_numeric::DType;
use mla_reference::attention::Head;
use mla_reference::{Contract, RowSum, Terms};
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

/// Makes something of each row of terms and their values.
type Make<'f, const N: usize> = &'f dyn Fn(&Terms, ArrayView2<f64>) -> [Array2<f64>; N];

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
    /// What a natural value is multiplied with to be as the engine stores it.
    unit: f64,
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
        Prediction {
            contract,
            terms,
            x,
            dtype,
            temperature,
            line,
            noise: OnceLock::new(),
            grown: None,
            unit: 1.0,
        }
    }

    /// The same from inputs that were not captured: their errors are in its bound and in its noise.
    pub fn grown(self, grown: Option<Grown>) -> Self {
        Prediction { grown, ..self }
    }

    /// The same of an lse in another base: `x` and what inputs add are in it already; `unit` is 1 over its ln. A kernel that
    /// converts rounds once more.
    pub fn in_unit(self, unit: f64) -> Self {
        Prediction { unit, ..self }
    }

    /// What a natural value is multiplied with to be as the engine stores it.
    pub fn unit(&self) -> f64 {
        self.unit
    }

    /// A bound in natural units, in those of `x`.
    fn convert(&self, rows: &[usize], mut natural: Array2<f64>) -> Array2<f64> {
        if self.unit != 1.0 {
            for ((k, j), b) in natural.indexed_iter_mut() {
                *b = *b * self.unit + mla_numeric::U * self.x[[rows[k], j]].abs();
            }
        }
        natural
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
        let [proven, likely] = self.each(rows, &|terms, x| {
            [bound, statistical].map(|of| of(self.contract, terms, x, self.temperature))
        });
        Bounds { proven: self.convert(rows, proven), likely: self.convert(rows, likely) }
    }

    /// A closer look at the statistical bound of a row of attention or lse; None where there is none.
    pub fn closer(&self, row: usize) -> Option<Vec<f64>> {
        let has = matches!(self.terms, Terms::Attention { .. } | Terms::Split { .. }) && self.grown.is_none();
        has.then(|| {
            let of = |terms: &Terms, x: ArrayView2<f64>| [closer(self.contract, terms, x, self.temperature)];
            let [b] = self.each(&[row], &of);
            self.convert(&[row], b).row(0).to_vec()
        })
    }

    /// What `of` makes of these rows of the block.
    fn each<const N: usize>(&self, rows: &[usize], of: Make<N>) -> [Array2<f64>; N] {
        if rows.len() == self.x.nrows() {
            return of(self.terms, self.x);
        }
        let x = self.x.select(Axis(0), rows);
        let x = x.view();
        if let Terms::Attention { attended, head, lse } = self.terms {
            let (attended, q) = (attended.select(rows), head.q.select(Axis(0), rows));
            let visible: Vec<usize> = rows.iter().map(|i| head.visible[*i]).collect();
            let head = Head { q: q.view(), visible: &visible, ..**head };
            return of(&Terms::Attention { attended: &attended, head: &head, lse: *lse }, x);
        }
        let mut out = [(); N].map(|()| Array2::zeros(x.dim()));
        let mut whole: Option<[Array2<f64>; N]> = None;
        for (k, &i) in rows.iter().enumerate() {
            let (one, from) = match self.terms.rows(i..i + 1) {
                Some(terms) => (&of(&terms, x.slice(s![k..k + 1, ..])), 0),
                None => (&*whole.get_or_insert_with(|| of(self.terms, self.x)), i),
            };
            for (out, one) in out.iter_mut().zip(one) {
                out.row_mut(k).assign(&one.row(from));
            }
        }
        out
    }

    /// The running bound of one element of a product ([`running::proven`]); None where the accumulator declares no order,
    /// and for other stages.
    pub fn running(&self, i: usize, j: usize) -> Option<f64> {
        // Of inputs that were not captured it knows nothing.
        let (Terms::Product { a, w, .. }, None) = (self.terms, &self.grown) else { return None };
        let mut row = vec![0.0; w.cols()];
        w.decode(j, 0, &mut row);
        running::proven(self.contract.accumulate, &a.row(i).to_vec(), &row)
    }

    fn noise(&self) -> &Noise {
        self.noise.get_or_init(|| {
            let mut noise = noise::of(self.contract, self.terms, self.x, self.dtype);
            if self.unit != 1.0 {
                noise.sigma.mapv_inplace(|s| s * self.unit);
            }
            noise
        })
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
    use mla_reference::Accumulate;
    use mla_reference::attention::strided;

    /// Of a product of 2,048 terms the running bound is a small part of the proven one; it is there for declared orders alone.
    #[test]
    fn the_running_bound_is_narrow() {
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
        for ((i, j), proven) in proven.indexed_iter() {
            let running = p.running(i, j).unwrap();
            assert!(running < 0.3 * proven, "{running} {proven}");
        }
        for unknown in [Accumulate::Rz { block: 16 }, Accumulate::Unknown] {
            let contract = with(unknown);
            let p = Prediction::new(&contract, &terms, x.view(), DType::Bf16, false);
            assert_eq!(p.running(0, 0), None);
        }
    }
}
