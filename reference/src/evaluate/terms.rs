/*! What is known of a block of a stage beside its value: the terms that decide how far an honest engine may be off. */

use crate::attention::{Attended, Head, Merged};
use crate::product::Rows;
use ndarray::{Array2, ArrayView2, CowArray, Ix2, s};
use std::borrow::Cow;
use std::ops::Range;

/// What an honest engine's error depends on.
pub enum Terms<'a, 'b> {
    /// A copy, or given: bits are equal.
    Copy,
    /// A product of `len` terms; `size` ≥ Σ|a·b| for each element (blockwise Cauchy–Schwarz).
    Product {
        /// Terms of each sum.
        len: usize,
        /// Upper bound of Σ|a·b|; empty where the contract accumulates exactly.
        size: CowArray<'a, f64, Ix2>,
        /// L2 norm of each row of the left side; empty where the contract accumulates exactly.
        a_norms: Cow<'a, [f64]>,
        /// L2 norm of each row of the weight (a column of the chunk); empty where the contract accumulates exactly.
        w_norms: Cow<'a, [f64]>,
        /// The left side, a row for each row of the chunk.
        a: ArrayView2<'a, f64>,
        /// The weight, a row for each column of the chunk.
        w: &'a dyn Rows,
    },
    /// RMSNorm over `len` values; `z` is the normalised value.
    Norm {
        /// Values of a row.
        len: usize,
        /// Normalised value before γ.
        z: CowArray<'a, f64, Ix2>,
        /// γ.
        gamma: &'a [f64],
    },
    /// Rotation; `size` = |a·cos| + |b·sin|; columns before `first` are copies.
    Rope {
        /// Size of the terms.
        size: CowArray<'a, f64, Ix2>,
        /// First rotated column.
        first: usize,
        /// Steps of the products' casts, of the rotated columns alone; empty without casts.
        steps: CowArray<'a, f64, Ix2>,
    },
    /// Attention of one head over a range of keys; `lse`: the chunk is its lse.
    Attention {
        /// With scores, probabilities and sums.
        attended: &'a Attended,
        /// Queries, keys and values.
        head: &'a Head<'b>,
        /// Whether x is the lse (else the weighted values).
        lse: bool,
    },
    /// Attention over splits that the engine merges itself; `lse`: the chunk is its lse.
    Split {
        /// Parts, their weights and the merge.
        merged: &'a Merged,
        /// Queries, keys and values.
        head: &'a Head<'b>,
        /// Whether x is the lse (else the weighted values).
        lse: bool,
    },
    /// Merge of partial results; for each row the partial lse and weights, and Σ W|o|.
    Merge {
        /// Largest |lse_s − lse| among splits of weight, for each row.
        spread: Vec<f64>,
        /// Σ_s W_s |o_s|, [rows, cols]; empty for lse.
        size: Array2<f64>,
        /// Splits.
        splits: usize,
        /// Whether x is the lse.
        lse: bool,
    },
    /// A sum of `parts` stored values: `size` = Σ|part|.
    Sum {
        /// Size of the terms.
        size: CowArray<'a, f64, Ix2>,
        /// How many.
        parts: usize,
    },
}

impl Terms<'_, '_> {
    /// Whether the columns of a row share errors that no column has alone: those of P in an attention.
    pub fn shares_errors(&self) -> bool {
        matches!(self, Terms::Attention { lse: false, .. } | Terms::Split { lse: false, .. })
    }

    /// The terms of some rows of the chunk, where rows are independent of what the terms share; else None.
    pub fn rows(&self, rows: Range<usize>) -> Option<Terms<'_, '_>> {
        fn part<'m>(m: &'m CowArray<f64, Ix2>, rows: Range<usize>) -> CowArray<'m, f64, Ix2> {
            if m.is_empty() { m.view().into() } else { m.slice(s![rows, ..]).into() }
        }
        match self {
            Terms::Product { len, size, a_norms, w_norms, a, w } => Some(Terms::Product {
                len: *len,
                size: part(size, rows.clone()),
                a_norms: Cow::Borrowed(a_norms.get(rows.clone()).unwrap_or(&[])),
                w_norms: Cow::Borrowed(w_norms),
                a: a.slice(s![rows, ..]),
                w: *w,
            }),
            Terms::Norm { len, z, gamma } => Some(Terms::Norm { len: *len, z: part(z, rows), gamma }),
            Terms::Rope { size, first, steps } => {
                Some(Terms::Rope { size: part(size, rows.clone()), first: *first, steps: part(steps, rows) })
            }
            Terms::Sum { size, parts } => Some(Terms::Sum { size: part(size, rows), parts: *parts }),
            _ => None,
        }
    }
}

/// A block of a stage's matrix: the value before the final rounding, and its terms.
pub struct Chunk<'a, 'b> {
    /// Rows of the stage's matrix.
    pub rows: Range<usize>,
    /// Columns of the stage's matrix.
    pub cols: Range<usize>,
    /// Value, [rows, cols]. NaN where the reference says nothing (a slot of the cache that nobody owns).
    pub x: Array2<f64>,
    /// What the error depends on.
    pub terms: Terms<'a, 'b>,
}
