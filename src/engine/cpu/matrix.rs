/*!
Products with weights: rows of a tensor times rows of a weight, into columns of a tensor.

Operands are float32 values on the grid of the engine's dtype. Weights are decoded a few rows at a time;
rows of tokens are taken [`TOKENS`] at a time and turned so that tokens stand in the lanes of
[`Sum`]. Threads take different weight rows, so bits do not depend on their number.
*/

use super::sum::{LANES, Lane, Sum};
use crate::trace::Tensor;
use mla_reference::product::Rows;
use mla_reference::rows::Rounded;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of tokens in one product: bounds memory for long prefills.
pub const TOKENS: usize = 1024;
/// Weight rows that a thread decodes at once: a multiple of the rows that `Sum` takes at once.
const GROUP: usize = 8;
/// Weight rows whose results stand in float32 before they are stored.
const BLOCK: usize = 512;
/// Columns that `Rows::decode` is asked for at once.
const DECODED: usize = 256;

/// A weight as the engine holds it: exact values rounded once to its dtype.
pub type Held<'a> = Rounded<&'a dyn Rows>;

/// Rows of a right operand in float32.
pub trait Operand: Sync {
    /// Rows: columns of the result.
    fn rows(&self) -> usize;
    /// Terms of each sum.
    fn cols(&self) -> usize;
    /// One row.
    fn read(&self, row: usize, out: &mut [f32]);
}

/// Some rows of a weight.
pub struct Part<'a> {
    /// The weight.
    pub weight: &'a Held<'a>,
    /// Which rows.
    pub rows: Range<usize>,
}

impl Operand for Part<'_> {
    fn rows(&self) -> usize {
        self.rows.len()
    }
    fn cols(&self) -> usize {
        self.weight.cols()
    }
    fn read(&self, row: usize, out: &mut [f32]) {
        let mut exact = [0.0; DECODED];
        for (i, out) in out.chunks_mut(DECODED).enumerate() {
            let exact = &mut exact[..out.len()];
            self.weight.decode(self.rows.start + row, i * DECODED, exact);
            narrow(exact, out);
        }
    }
}

/// Some rows of a weight, transposed: its columns are the rows. Stands whole, so it is for a head at a time.
pub struct Transposed {
    data: Vec<f32>,
    cols: usize,
}

impl Transposed {
    /// Decodes and transposes.
    pub fn new(part: &Part) -> Transposed {
        let (cols, rows) = (part.rows(), part.cols());
        let mut data = vec![0.0; rows * cols];
        let mut line = vec![0.0; rows];
        for c in 0..cols {
            part.read(c, &mut line);
            for (r, v) in line.iter().enumerate() {
                data[r * cols + c] = *v;
            }
        }
        Transposed { data, cols }
    }
}

impl Operand for Transposed {
    fn rows(&self) -> usize {
        self.data.len() / self.cols.max(1)
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn read(&self, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&self.data[row * self.cols..(row + 1) * self.cols]);
    }
}

/// float64 values of a narrower grid, as float32.
pub fn narrow(from: &[f64], to: &mut [f32]) {
    for (t, f) in to.iter_mut().zip(from) {
        *t = *f as f32;
    }
}

/// Columns of a row of a tensor in float32.
pub fn read(tensor: &Tensor, row: usize, cols: Range<usize>, out: &mut [f32]) {
    let mut wide = vec![0.0; cols.len()];
    tensor.read(row, cols, &mut wide);
    narrow(&wide, out);
}

/// Rounds float32 values once and stores them.
pub fn write(tensor: &mut Tensor, row: usize, first: usize, values: &[f32]) {
    let wide: Vec<f64> = values.iter().map(|v| f64::from(*v)).collect();
    tensor.write(row, first, &wide);
}

/// Rows of a tensor turned into lanes: `[⌈rows / LANES⌉][width][LANES]`, missing rows zero.
pub struct Panels {
    lanes: Vec<Lane>,
    rows: usize,
    width: usize,
}

impl Panels {
    /// Columns `cols` of the given rows.
    pub fn gather(tensor: &Tensor, rows: &[usize], cols: Range<usize>) -> Panels {
        let width = cols.len();
        let mut lanes = vec![[0.0; LANES]; rows.len().div_ceil(LANES) * width];
        let mut line = vec![0.0; width];
        for (i, &row) in rows.iter().enumerate() {
            tensor.read(row, cols.clone(), &mut line);
            for (lane, v) in lanes[i / LANES * width..].iter_mut().zip(&line) {
                lane[i % LANES] = *v as f32;
            }
        }
        Panels { lanes, rows: rows.len(), width }
    }

    /// Multiplies by `w`, rounds each sum once to `out`'s dtype: element `[first_row + i][first_col + m]` of
    /// `out` is `Σ_k panels[i][k] · w[m][k]`.
    pub fn multiply(&self, sum: Sum, w: &dyn Operand, out: &mut Tensor, first_row: usize, first_col: usize) {
        let row_bytes = out.cols * out.dtype.bytes();
        if self.rows == 0 || row_bytes == 0 {
            return;
        }
        let panels = self.rows.div_ceil(LANES);
        for start in (0..w.rows()).step_by(BLOCK) {
            let rows = start..(start + BLOCK).min(w.rows());
            // [group][panel][row of the group][lane]
            let groups: Vec<Vec<Lane>> = (rows.start..rows.end)
                .into_par_iter()
                .step_by(GROUP)
                .map(|a| self.group(sum, w, a..(a + GROUP).min(rows.end)))
                .collect();
            let (dtype, at) = (out.dtype, (first_col + rows.start) * out.dtype.bytes());
            let lines = out.bytes[first_row * row_bytes..].par_chunks_mut(row_bytes).take(self.rows);
            lines.enumerate().for_each(|(i, line)| {
                let mut values = Vec::with_capacity(rows.len());
                for g in &groups {
                    let n = g.len() / panels;
                    values.extend(g[i / LANES * n..][..n].iter().map(|lane| f64::from(lane[i % LANES])));
                }
                line[at..at + values.len() * dtype.bytes()].copy_from_slice(&dtype.encode(&values));
            });
        }
    }

    /// Sums of a few weight rows with all panels.
    fn group(&self, sum: Sum, w: &dyn Operand, rows: Range<usize>) -> Vec<Lane> {
        let n = rows.len();
        let mut weights = vec![0.0; n * self.width];
        if self.width > 0 {
            for (row, line) in rows.zip(weights.chunks_exact_mut(self.width)) {
                w.read(row, line);
            }
        }
        let mut acc = vec![[0.0; LANES]; self.rows.div_ceil(LANES) * n];
        if self.width > 0 {
            for (x, acc) in self.lanes.chunks_exact(self.width).zip(acc.chunks_exact_mut(n)) {
                sum.add(&weights, x, acc);
            }
        }
        acc
    }
}

/// Columns `cols` of all rows of `input`, times `w`, into columns from `first_col` on of the same rows of `out`.
pub fn project(
    sum: Sum,
    input: &Tensor,
    cols: Range<usize>,
    w: &dyn Operand,
    out: &mut Tensor,
    first_col: usize,
) {
    let rows: Vec<usize> = (0..input.rows).collect();
    for (i, rows) in rows.chunks(TOKENS).enumerate() {
        Panels::gather(input, rows, cols.clone()).multiply(sum, w, out, i * TOKENS, first_col);
    }
}
