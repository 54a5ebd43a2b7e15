/*!
Named tensors as bits.

What is judged is bits: a [`Tensor`] keeps the bytes that an engine stored, little-endian, with dtype and
shape. Its matrix view (rows = the first axes as the plan counts them, columns = the rest) is what the
stage functions and the judge read.
*/

pub mod npy;
pub mod read;
pub mod save;
pub mod store;

use mla_numeric::DType;
use mla_reference::{Axis, Form, Plan, Stage};
use ndarray::Array2;
use std::ops::Range;

/// Which tensor: a stage, and the form that computed it (None: shared by both).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
pub struct TensorId {
    /// Stage.
    pub stage: Stage,
    /// Form.
    pub form: Option<Form>,
}

impl TensorId {
    /// Of a stage that both forms share.
    pub fn shared(stage: Stage) -> TensorId {
        TensorId { stage, form: None }
    }
    /// Of a stage in a form; a shared stage has no form.
    pub fn of(stage: Stage, form: Form) -> TensorId {
        let shared = stage.row().scope == mla_reference::Scope::Shared;
        TensorId { stage, form: if shared { None } else { Some(form) } }
    }
}

impl std::fmt::Display for TensorId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.form {
            None => write!(f, "{}", self.stage),
            Some(form) => write!(f, "{}/{}", form.name(), self.stage),
        }
    }
}

/// Bits of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Stored dtype.
    pub dtype: DType,
    /// Axes, slowest first.
    pub axes: Vec<Axis>,
    /// Their lengths.
    pub shape: Vec<usize>,
    /// Rows of the matrix view.
    pub rows: usize,
    /// Columns of the matrix view.
    pub cols: usize,
    /// Little-endian bits, row-major.
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// A tensor of a stage in a plan, all bits zero.
    pub fn zeros(id: TensorId, plan: &Plan, g: &mla_reference::Geometry, dtype: DType) -> Tensor {
        let axes = id.stage.axes(id.form);
        let shape = plan.shape(id.stage, id.form, g);
        let rows = plan.rows(id.stage, id.form);
        let total: usize = shape.iter().product();
        let cols = total.checked_div(rows).unwrap_or(0);
        Tensor { dtype, axes, shape, rows, cols, bytes: vec![0; total * dtype.bytes()] }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Heads and the columns of one, where the tensor has a head axis among its columns.
    pub fn heads(&self) -> Option<(usize, usize)> {
        let heads = self.shape[self.axes.iter().position(|a| *a == Axis::Head)?];
        (heads > 0 && self.cols.is_multiple_of(heads)).then(|| (heads, self.cols / heads))
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value of one element of the matrix view.
    pub fn get(&self, row: usize, col: usize) -> f64 {
        self.dtype.from_bits(self.bits(row, col))
    }

    /// The stored bits of one element of the matrix view.
    pub fn bits(&self, row: usize, col: usize) -> u64 {
        let n = self.dtype.bytes();
        let at = (row * self.cols + col) * n;
        self.bytes[at..at + n].iter().rev().fold(0, |a, b| a << 8 | u64::from(*b))
    }

    /// Sets the stored bits of one element.
    pub fn set_bits(&mut self, row: usize, col: usize, bits: u64) {
        let n = self.dtype.bytes();
        let at = (row * self.cols + col) * n;
        self.bytes[at..at + n].copy_from_slice(&bits.to_le_bytes()[..n]);
    }

    /// Rounds a value and stores it.
    pub fn set(&mut self, row: usize, col: usize, value: f64) {
        self.set_bits(row, col, self.dtype.to_bits(value));
    }

    /// Decodes columns of one row.
    pub fn read(&self, row: usize, cols: Range<usize>, out: &mut [f64]) {
        let n = self.dtype.bytes();
        let at = (row * self.cols + cols.start) * n;
        self.dtype.decode(&self.bytes[at..at + cols.len() * n], out);
    }

    /// Rounds values and stores them as columns of one row.
    pub fn write(&mut self, row: usize, first: usize, values: &[f64]) {
        let n = self.dtype.bytes();
        let at = (row * self.cols + first) * n;
        self.dtype.encode_into(values, &mut self.bytes[at..at + values.len() * n]);
    }

    /// The bytes of columns of one row.
    pub fn bytes_of(&self, row: usize, cols: Range<usize>) -> &[u8] {
        let n = self.dtype.bytes();
        let at = (row * self.cols + cols.start) * n;
        &self.bytes[at..at + cols.len() * n]
    }

    /// Stores bytes that are already encoded as columns of one row.
    pub fn write_bytes(&mut self, row: usize, first: usize, bytes: &[u8]) {
        let at = (row * self.cols + first) * self.dtype.bytes();
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// A block of the matrix view in float64.
    pub fn block(&self, rows: Range<usize>, cols: Range<usize>) -> Array2<f64> {
        let mut out = Array2::zeros((rows.len(), cols.len()));
        for (mut line, row) in out.rows_mut().into_iter().zip(rows) {
            if let Some(line) = line.as_slice_mut() {
                self.read(row, cols.clone(), line);
            }
        }
        out
    }
}
