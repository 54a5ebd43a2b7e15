/*!
Decorators of weights: some rows, values rounded to a dtype, through a function, single values replaced.

They decode on demand like what they wrap: a weight never stands whole in float64.
*/

use crate::product::Rows;
use mla_numeric::DType;
use ndarray::Array2;
use std::collections::BTreeMap;
use std::ops::Range;

/// Some rows of a matrix.
pub struct Part<'a> {
    /// The whole.
    pub inner: &'a dyn Rows,
    /// Which rows.
    pub rows: Range<usize>,
}

impl Rows for Part<'_> {
    fn rows(&self) -> usize {
        self.rows.len()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        self.inner.decode(self.rows.start + row, k0, out);
    }
}

/// Every value rounded to a dtype.
pub struct Rounded<R> {
    /// Exact values.
    pub inner: R,
    /// The grid.
    pub dtype: DType,
}

impl<R: Rows> Rows for Rounded<R> {
    fn rows(&self) -> usize {
        self.inner.rows()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        self.inner.decode(row, k0, out);
        self.dtype.round_slice(out);
    }
}

/// Every value through a function: sizes, squares.
pub struct Mapped<R> {
    /// Values.
    pub inner: R,
    /// The function.
    pub by: fn(f64) -> f64,
}

impl<R: Rows> Rows for Mapped<R> {
    fn rows(&self) -> usize {
        self.inner.rows()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        self.inner.decode(row, k0, out);
        out.iter_mut().for_each(|v| *v = (self.by)(*v));
    }
}

/// Some values replaced: (row, column) → value.
pub struct Patched<R> {
    /// The rest.
    pub inner: R,
    /// What is replaced.
    pub values: BTreeMap<(usize, usize), f64>,
}

impl<R: Rows> Rows for Patched<R> {
    fn rows(&self) -> usize {
        self.inner.rows()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        self.inner.decode(row, k0, out);
        for ((_, col), v) in self.values.range((row, k0)..(row, k0 + out.len())) {
            out[col - k0] = *v;
        }
    }
}

/// Rows of a matrix in float64, [rows, cols], or transposed.
pub fn dense(w: &dyn Rows, rows: Range<usize>, transpose: bool) -> Array2<f64> {
    let mut out = Array2::zeros((rows.len(), w.cols()));
    for (r, mut line) in rows.zip(out.rows_mut()) {
        if let Some(line) = line.as_slice_mut() {
            w.decode(r, 0, line);
        }
    }
    if transpose { out.reversed_axes().as_standard_layout().into_owned() } else { out }
}
