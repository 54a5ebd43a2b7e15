/*! Operands: a value, and the element of which tensor it is, with the bits that stand there. */

use crate::judge::{Standing, unravel};
use crate::trace::store::View;
use mla_numeric::DType;
use mla_reference::{Contract, Geometry, Stage, Weight, Weights};
use serde::Serialize;

/// A factor of a term.
#[derive(Clone, Debug, Serialize)]
pub struct Operand {
    /// Tensor, weight, or what else it is.
    pub name: String,
    /// Its element.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub index: Vec<usize>,
    /// The value that is multiplied.
    pub value: f64,
    /// Dtype in which it is stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DType>,
    /// Stored bits, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits: Option<String>,
    /// The stored value, where the product's operands are rounded to something else.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored: Option<f64>,
    /// A weight's value in the file, exactly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<f64>,
    /// The tensor was not captured: computed in its place.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub computed: bool,
}

impl Operand {
    /// A value with a name.
    pub fn plain(name: impl Into<String>, index: Vec<usize>, value: f64) -> Operand {
        Operand {
            name: name.into(),
            index,
            value,
            dtype: None,
            bits: None,
            stored: None,
            file: None,
            computed: false,
        }
    }
}

/// Bits as they are printed: as many digits as the dtype has.
pub fn bits(dtype: DType, bits: u64) -> String {
    format!("0x{bits:0width$x}", width = 2 * dtype.bytes())
}

/// Where operands are read.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    inputs: &'a View<'a>,
    file: &'a dyn Weights,
    contract: &'a Contract,
    chained: &'a [Stage],
    geometry: &'a Geometry,
}

impl<'a> Sources<'a> {
    /// Of what stands ready for a stage.
    pub fn new(of: &'a Standing<'a>, contract: &'a Contract) -> Sources<'a> {
        Sources {
            inputs: of.inputs,
            file: of.file,
            contract,
            chained: of.chained,
            geometry: &of.isolated.spec.geometry,
        }
    }

    /// The values of a row of an input; empty where it is not there.
    pub fn row(&self, stage: Stage, row: usize, cols: std::ops::Range<usize>) -> Vec<f64> {
        let inside = |t: &&crate::trace::Tensor| row < t.rows && cols.end <= t.cols;
        let tensor = self.inputs.get(stage).filter(inside);
        tensor.map(|t| t.block(row..row + 1, cols).into_raw_vec_and_offset().0).unwrap_or_default()
    }

    /// An element of an input; `used`: the value that is multiplied, where it is not the stored one.
    pub fn input(&self, stage: Stage, row: usize, col: usize, used: Option<f64>) -> Operand {
        let Some(t) = self.inputs.get(stage).filter(|t| row < t.rows && col < t.cols) else {
            return Operand::plain(stage.name(), Vec::new(), used.unwrap_or(f64::NAN));
        };
        let stored = t.get(row, col);
        let value = used.unwrap_or(stored);
        Operand {
            dtype: Some(t.dtype),
            bits: Some(bits(t.dtype, t.bits(row, col))),
            stored: (value != stored).then_some(stored),
            computed: self.chained.contains(&stage),
            ..Operand::plain(stage.name(), unravel(row * t.cols + col, &t.shape), value)
        }
    }

    /// An element of a weight as the engine holds it.
    pub fn weight(&self, weight: Weight, row: usize, col: usize, held: f64) -> Operand {
        let (matrix, norm) = (self.file.matrix(weight), self.file.norm(weight));
        let file = match (matrix, norm) {
            (Some(m), _) if row < m.rows() && col < m.cols() => {
                let mut values = vec![0.0; m.cols()];
                m.decode(row, 0, &mut values);
                values.get(col).copied()
            }
            (_, Some(n)) => n.get(col).copied(),
            _ => None,
        };
        let dtype = if weight.is_norm() { self.contract.norm_weights } else { self.contract.weights };
        let on_grid = dtype.round(held) == held;
        let flat = row * weight.matrix(self.geometry).1 + col;
        Operand {
            dtype: on_grid.then_some(dtype),
            bits: on_grid.then(|| bits(dtype, dtype.to_bits(held))),
            file,
            ..Operand::plain(weight.name(), unravel(flat, &weight.shape(self.geometry)), held)
        }
    }
}
