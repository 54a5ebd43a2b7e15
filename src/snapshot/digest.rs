/*!
What is left of a tensor of the reference in a snapshot: norm, mean, extremes, first and last value.

Numbers are printed to 6 significant digits, so that last bits do not matter, and as text, so that a NaN can't hide.
Sums are taken row by row in fixed chunks, in order: the number of threads changes nothing.
*/

use crate::engine::{Sink, SinkError};
use crate::trace::{Tensor, TensorId};
use mla_reference::evaluate::row_chunks;
use mla_reference::product::Rows;
use mla_reference::{Axis, Weight};
use rayon::prelude::*;

/// Rows that one thread sums at a time.
const ROWS: usize = 64;

/// A digest of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Digest {
    /// Axes, slowest first.
    pub axes: Vec<Axis>,
    /// Their lengths.
    pub shape: Vec<usize>,
    /// Sums over the finite values.
    sums: Sums,
    /// First and last element, whatever they are; none of an empty tensor.
    ends: Option<(f64, f64)>,
}

/// Sums over values.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sums {
    finite: u64,
    nan: u64,
    infinite: u64,
    sum: f64,
    squares: f64,
    least: f64,
    largest: f64,
}

impl Default for Sums {
    fn default() -> Sums {
        let (least, largest) = (f64::INFINITY, f64::NEG_INFINITY);
        Sums { finite: 0, nan: 0, infinite: 0, sum: 0.0, squares: 0.0, least, largest }
    }
}

impl Sums {
    fn add(&mut self, v: f64) {
        if !v.is_finite() {
            self.nan += u64::from(v.is_nan());
            self.infinite += u64::from(v.is_infinite());
            return;
        }
        self.finite += 1;
        self.sum += v;
        self.squares += v * v;
        self.least = self.least.min(v);
        self.largest = self.largest.max(v);
    }

    fn merge(&mut self, other: &Sums) {
        self.finite += other.finite;
        self.nan += other.nan;
        self.infinite += other.infinite;
        self.sum += other.sum;
        self.squares += other.squares;
        self.least = self.least.min(other.least);
        self.largest = self.largest.max(other.largest);
    }
}

impl Digest {
    /// Of a tensor, which is read once.
    pub fn of(t: &Tensor) -> Digest {
        let chunks: Vec<Sums> = row_chunks(t.rows, ROWS)
            .into_par_iter()
            .map(|rows| {
                let (mut sums, mut row) = (Sums::default(), vec![0.0; t.cols]);
                for r in rows {
                    t.read(r, 0..t.cols, &mut row);
                    row.iter().for_each(|v| sums.add(*v));
                }
                sums
            })
            .collect();
        let mut sums = Sums::default();
        chunks.iter().for_each(|c| sums.merge(c));
        let ends = (!t.is_empty()).then(|| (t.get(0, 0), t.get(t.rows - 1, t.cols - 1)));
        Digest { axes: t.axes.clone(), shape: t.shape.clone(), sums, ends }
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some((first, last)) = self.ends else { return f.write_str("empty") };
        let s = &self.sums;
        if s.finite > 0 {
            let mean = s.sum / s.finite as f64;
            let norm = s.squares.sqrt();
            write!(f, "norm {norm:.5e} mean {mean:.5e} from {:.5e} to {:.5e} ", s.least, s.largest)?;
        }
        write!(f, "first {first:.5e} last {last:.5e}")?;
        for (n, what) in [(s.nan, "NaN"), (s.infinite, "infinite")] {
            if n > 0 {
                write!(f, ", {n} {what}")?;
            }
        }
        Ok(())
    }
}

/// A sink that takes digests of what passes, in front of another one or of none; no tensor is kept.
#[derive(Default)]
pub struct Digests<'a> {
    inner: Option<&'a mut dyn Sink>,
    all: Vec<(TensorId, Digest)>,
}

impl<'a> Digests<'a> {
    /// In front of another sink.
    pub fn before(inner: &'a mut dyn Sink) -> Digests<'a> {
        Digests { inner: Some(inner), all: Vec::new() }
    }
    /// What passed, in order.
    pub fn finish(self) -> Vec<(TensorId, Digest)> {
        self.all
    }
}

impl Sink for Digests<'_> {
    fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        self.inner.as_mut().map_or(Ok(()), |s| s.weight(weight, rows))
    }
    fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
        self.inner.as_mut().map_or(Ok(()), |s| s.norm(weight, values))
    }
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.inner.as_mut().map_or(Ok(()), |s| s.evidence(id, what))
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        self.all.push((id, Digest::of(tensor)));
        self.inner.as_mut().map_or(Ok(false), |s| s.tensor(id, tensor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_numeric::DType;

    fn digest(shape: &[usize], values: &[f64]) -> String {
        let (rows, cols) = (shape[0], shape[1]);
        let axes = vec![Axis::Token, Axis::Hidden];
        let bytes = DType::F64.encode(values);
        Digest::of(&Tensor { dtype: DType::F64, axes, shape: shape.to_vec(), rows, cols, bytes }).to_string()
    }

    /// (3, −4, 0, 1): norm √26, mean 0.
    #[test]
    fn by_hand() {
        let expected =
            "norm 5.09902e0 mean 0.00000e0 from -4.00000e0 to 3.00000e0 first 3.00000e0 last 1.00000e0";
        assert_eq!(digest(&[2, 2], &[3.0, -4.0, 0.0, 1.0]), expected);
    }

    /// What is no number is a word, is counted, and is in no sum.
    #[test]
    fn what_is_not_finite_is_said_in_words() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let expected = "norm 2.00000e0 mean 2.00000e0 from 2.00000e0 to 2.00000e0 first NaN last -inf, 1 NaN, 1 infinite";
        assert_eq!(digest(&[1, 3], &[nan, 2.0, -inf]), expected);
        assert_eq!(digest(&[1, 2], &[nan, inf]), "first NaN last inf, 1 NaN, 1 infinite");
        assert_eq!(digest(&[0, 2], &[]), "empty");
    }
}
