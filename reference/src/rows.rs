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
    fn say(&self, to: &mut dyn FnMut(&[u8])) {
        to(format!("rounded to {};", self.dtype).as_bytes());
        self.inner.say(to);
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
    fn say(&self, to: &mut dyn FnMut(&[u8])) {
        to(format!("{} patched;", self.values.len()).as_bytes());
        for ((row, col), v) in &self.values {
            to(format!("{row} {col} {:x};", v.to_bits()).as_bytes());
        }
        self.inner.say(to);
    }
}

/// Runs of rows and columns of a matrix, one after the other: (first, how many).
pub struct Cut<'a> {
    /// The whole.
    pub inner: &'a dyn Rows,
    /// Runs of rows.
    pub rows: Vec<(usize, usize)>,
    /// Runs of columns.
    pub cols: Vec<(usize, usize)>,
}

/// Columns that `decode` starts at and ends at are multiples of this.
const STEP: usize = 256;

impl Rows for Cut<'_> {
    fn rows(&self) -> usize {
        self.rows.iter().map(|r| r.1).sum()
    }
    fn cols(&self) -> usize {
        self.cols.iter().map(|c| c.1).sum()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let mut before = row;
        let Some(first) = self.rows.iter().find_map(|(first, n)| {
            let here = (before < *n).then_some(first + before);
            before = before.wrapping_sub(*n);
            here
        }) else {
            return;
        };
        if let [(0, n)] = self.cols[..]
            && n == self.inner.cols()
        {
            return self.inner.decode(first, k0, out);
        }
        // Runs begin anywhere: the steps that cover each are decoded, and their part is taken.
        let (end, mut at, mut part) = (k0 + out.len(), 0, Vec::new());
        for (from, n) in &self.cols {
            let (a, b) = (at.max(k0), (at + n).min(end));
            if a < b {
                let (i, j) = (from + a - at, from + b - at);
                let start = i / STEP * STEP;
                let stop = j.next_multiple_of(STEP).min(self.inner.cols());
                part.resize(stop - start, 0.0);
                self.inner.decode(first, start, &mut part);
                out[a - k0..b - k0].copy_from_slice(&part[i - start..j - start]);
            }
            at += n;
        }
    }
}

/// Matrices of equal width under each other, each with an encoding of its own.
pub struct Stacked<R> {
    /// From the top.
    pub parts: Vec<R>,
}

impl<R: Rows> Rows for Stacked<R> {
    fn rows(&self) -> usize {
        self.parts.iter().map(Rows::rows).sum()
    }
    fn cols(&self) -> usize {
        self.parts.first().map_or(0, Rows::cols)
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let mut left = row;
        for part in &self.parts {
            match left.checked_sub(part.rows()) {
                None => return part.decode(left, k0, out),
                Some(rest) => left = rest,
            }
        }
    }
    fn say(&self, to: &mut dyn FnMut(&[u8])) {
        to(format!("{} stacked;", self.parts.len()).as_bytes());
        self.parts.iter().for_each(|p| p.say(to));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::Dense;

    #[test]
    fn rows_and_columns_of_heads_stand_one_after_the_other() {
        // 4 heads of 96 columns, 3 rows; heads 1 and 3 are there.
        let data: Vec<f64> = (0..3 * 384).map(f64::from).collect();
        let inner = Dense { data: &data, cols: 384 };
        let cut = Cut { inner: &inner, rows: vec![(0, 3)], cols: vec![(96, 96), (288, 96)] };
        assert_eq!((cut.rows(), cut.cols()), (3, 192));
        let mut out = vec![0.0; 192];
        cut.decode(2, 0, &mut out);
        let wanted: Vec<f64> = (96..192).chain(288..384).map(|c| f64::from(2 * 384 + c)).collect();
        assert_eq!(out, wanted);
        let rows = Cut { inner: &inner, rows: vec![(0, 1), (2, 1)], cols: vec![(0, 384)] };
        let mut out = vec![0.0; 128];
        rows.decode(1, 256, &mut out);
        assert_eq!(out, (256..384).map(|c| f64::from(2 * 384 + c)).collect::<Vec<_>>());
    }

    #[test]
    fn a_stack_is_its_parts_from_the_top() {
        let data: Vec<f64> = (0..5 * 300).map(f64::from).collect();
        let part = |from: usize, rows: usize| Dense { data: &data[from * 300..(from + rows) * 300], cols: 300 };
        let stack = Stacked { parts: vec![part(3, 2), part(0, 0), part(0, 3)] };
        assert_eq!((stack.rows(), stack.cols()), (5, 300));
        for (row, from) in [3, 4, 0, 1, 2].into_iter().enumerate() {
            let mut out = vec![0.0; 44];
            stack.decode(row, 256, &mut out);
            assert_eq!(out, data[from * 300 + 256..(from + 1) * 300], "row {row}");
        }
        let said = |rows: &dyn Rows| {
            let mut all = Vec::new();
            rows.say(&mut |b| all.extend_from_slice(b));
            all
        };
        let other = Stacked { parts: vec![part(0, 3), part(3, 2)] };
        assert_ne!(said(&stack), said(&other));
    }
}
