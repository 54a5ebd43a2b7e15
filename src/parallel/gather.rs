/*!
What one rank delivers: a sink that keeps it until the others have run.

Weights are kept as rows that are not the file's (of a correct engine: none), so that N ranks hold no more than one; tensors as
their bits. What every rank has (all that has no heads, `out` aside) is compared with the other ranks' when the rank is done
([`super::group`]), and kept once.
*/

use crate::engine::{Sink, SinkError};
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Axis, Stage, Weight, Weights};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Rows of a weight that a thread compares at once.
const ROWS: usize = 64;

/// A weight as a rank showed it.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Whether that is the shape of the rank's share of the file's; else nothing of it was kept.
    pub fits: bool,
    /// Rows that are not the file's, rounded: their bits in the contract's dtype.
    pub differs: BTreeMap<usize, Vec<u8>>,
}

/// What one rank delivered.
pub struct Rank {
    /// Its number.
    pub number: usize,
    /// Matrices.
    pub weights: BTreeMap<Weight, Shown>,
    /// Norms.
    pub norms: BTreeMap<Weight, Vec<f64>>,
    /// Tensors; None: the same bits as those of the first rank of its group.
    pub tensors: BTreeMap<TensorId, Option<Tensor>>,
    /// What its device saw go wrong.
    pub evidence: Vec<(TensorId, String)>,
    /// L2 norms of the tensors' finite values, in the order in which they came.
    pub sizes: Vec<(TensorId, f64)>,
}

impl Rank {
    /// Whether it delivered no tensor at all.
    pub fn silent(&self) -> bool {
        self.tensors.is_empty()
    }
}

/// Whether every rank has the same of a weight.
pub fn weight_is_whole(weight: Weight) -> bool {
    !weight.row().axes.contains(&Axis::Head)
}

/// Whether every rank has the same of a tensor: all that has no heads. `out` of a rank is its part of a sum.
pub fn tensor_is_whole(stage: Stage) -> bool {
    !stage.row().axes.contains(&Axis::Head) && !matches!(stage, Stage::Out | Stage::PartOut)
}

/// Takes what one rank delivers.
pub struct Gather<'a> {
    /// The rank's share of the file's weights.
    file: &'a dyn Weights,
    /// Dtypes of matrices and of norms.
    dtypes: (DType, DType),
    progress: &'a dyn Fn(&str),
    rank: Rank,
}

impl<'a> Gather<'a> {
    /// Of rank `number`, whose share of the file's weights is `file`; `dtypes`: the contract's for matrices and for norms.
    pub fn new(
        number: usize,
        file: &'a dyn Weights,
        dtypes: (DType, DType),
        progress: &'a dyn Fn(&str),
    ) -> Gather<'a> {
        let rank = Rank {
            number,
            weights: BTreeMap::new(),
            norms: BTreeMap::new(),
            tensors: BTreeMap::new(),
            evidence: Vec::new(),
            sizes: Vec::new(),
        };
        Gather { file, dtypes, progress, rank }
    }

    /// What it took.
    pub fn finish(self) -> Rank {
        self.rank
    }

    fn twice(&self, what: &str) -> SinkError {
        SinkError::Unasked(format!("rank {} delivered {what} twice", self.rank.number))
    }
}

/// Rows of an engine's weight that are not the file's, rounded to `dtype`.
fn differing(file: &dyn Rows, engine: &dyn Rows, dtype: DType) -> BTreeMap<usize, Vec<u8>> {
    let (rows, cols) = (engine.rows(), engine.cols());
    let chunks: Vec<usize> = (0..rows).step_by(ROWS).collect();
    let of = |first: &usize| {
        let (mut want, mut got) = (vec![0.0; cols], vec![0.0; cols]);
        let mut found = Vec::new();
        for r in *first..(first + ROWS).min(rows) {
            file.decode(r, 0, &mut want);
            engine.decode(r, 0, &mut got);
            let bits = dtype.encode(&got);
            if bits != dtype.encode(&want) {
                found.push((r, bits));
            }
        }
        found
    };
    chunks.par_iter().flat_map_iter(of).collect()
}

impl Sink for Gather<'_> {
    fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        let Some(file) = self.file.matrix(weight) else {
            return Err(SinkError::Unasked(format!("the layer has no {weight}")));
        };
        (self.progress)(&format!("rank {}, {weight}", self.rank.number));
        let fits = (rows.rows(), rows.cols()) == (file.rows(), file.cols());
        let differs = if fits { differing(file, rows, self.dtypes.0) } else { BTreeMap::new() };
        let shown = Shown { rows: rows.rows(), cols: rows.cols(), fits, differs };
        match self.rank.weights.insert(weight, shown) {
            Some(_) => Err(self.twice(weight.name())),
            None => Ok(()),
        }
    }

    fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
        match self.rank.norms.insert(weight, values.to_vec()) {
            Some(_) => Err(self.twice(weight.name())),
            None => Ok(()),
        }
    }

    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        (self.progress)(&format!("rank {}, {id}", self.rank.number));
        self.rank.sizes.push((id, norm(tensor)));
        match self.rank.tensors.insert(id, Some(tensor.clone())) {
            Some(_) => Err(self.twice(&id.to_string())),
            None => Ok(false),
        }
    }

    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.rank.evidence.push((id, what.to_string()));
        Ok(())
    }
}

/// L2 norm of the values that are finite.
fn norm(t: &Tensor) -> f64 {
    let mut row = vec![0.0; t.cols];
    let mut squares = 0.0;
    // A tensor whose bytes are not those of its shape is the judge's to refuse.
    let whole = t.bytes.len() == t.len() * t.dtype.bytes();
    for r in 0..if whole { t.rows } else { 0 } {
        t.read(r, 0..t.cols, &mut row);
        squares += row.iter().filter(|v| v.is_finite()).map(|v| v * v).sum::<f64>();
    }
    squares.sqrt()
}
