/*!
Some of a layer's heads: the layer as a rank of tensor parallelism holds it, or as the ranks that dumped do.

Whatever has heads is cut to theirs, in the order of the model's; the rest is the same on every rank. A run of heads is cut out
of what is stored, blocks whole, as engines that load a shard do: decoding comes after. What is not stored as blocks and
nothing else (weights that are taken out of kv_b, that a scale belongs to, that a fault changed) is cut after it is decoded;
values are the same, since no block reaches over a cut ([`super::Ranks::new`] refuses others).
*/

use mla_reference::product::{Blocks, Rows};
use mla_reference::rows::Cut;
use mla_reference::{Axis, Geometry, Spec, Weight, Weights};
use std::ops::Range;

/// The heads of a layer that there are, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heads(pub Vec<usize>);

impl Heads {
    /// A layer's numbers with these heads alone.
    pub fn spec(&self, spec: &Spec) -> Spec {
        Spec { geometry: Geometry { heads: self.0.len(), ..spec.geometry }, ..spec.clone() }
    }

    /// Elements of an axis of `n` a head: (first, how many) of each run of heads.
    fn runs(&self, n: usize) -> Vec<(usize, usize)> {
        let mut all: Vec<(usize, usize)> = Vec::new();
        for h in &self.0 {
            match all.last_mut() {
                Some((first, length)) if *first + *length == h * n => *length += n,
                _ => all.push((h * n, n)),
            }
        }
        all
    }
}

/// Weights of some heads of a layer.
pub struct OfHeads<'a> {
    matrices: Vec<(Weight, Box<dyn Rows + 'a>)>,
    all: &'a dyn Weights,
}

impl<'a> OfHeads<'a> {
    /// Of a layer with the widths `g`.
    pub fn new(all: &'a dyn Weights, heads: &Heads, g: &Geometry) -> OfHeads<'a> {
        let cut = |w: &Weight| {
            let inner = all.matrix(*w)?;
            let (rows, cols) = (inner.rows(), inner.cols());
            let runs = |n: usize| heads.runs(n / g.heads.max(1));
            let (rows, cols) = match w.row().axes.iter().position(|a| *a == Axis::Head) {
                Some(0) => (runs(rows), vec![(0, cols)]),
                Some(_) => (vec![(0, rows)], runs(cols)),
                None => return Some((*w, Box::new(inner) as Box<dyn Rows>)),
            };
            Some((*w, shard(inner, rows, cols)))
        };
        let there = Weight::ALL.iter().filter(|w| w.exists(g) && !w.is_norm());
        OfHeads { matrices: there.filter_map(cut).collect(), all }
    }
}

/// Runs of rows and columns of a weight: of what is stored, where that can be cut.
fn shard<'a>(
    inner: &'a dyn Rows,
    rows: Vec<(usize, usize)>,
    cols: Vec<(usize, usize)>,
) -> Box<dyn Rows + 'a> {
    let range = |runs: &[(usize, usize)]| match runs {
        [(first, n)] => Some(*first..first + n),
        _ => None,
    };
    let of_blocks = |rows: Range<usize>, cols: Range<usize>| {
        let (ty, bytes) = inner.stored()?;
        Blocks::new(ty, bytes, inner.cols()).ok()?.shard(rows, cols).ok()
    };
    match range(&rows).zip(range(&cols)).and_then(|(r, c)| of_blocks(r, c)) {
        Some(blocks) => Box::new(blocks),
        None => Box::new(Cut { inner, rows, cols }),
    }
}

impl Weights for OfHeads<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        self.matrices.iter().find(|(w, _)| *w == weight).map(|(_, m)| m.as_ref())
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.all.norm(weight)
    }
}
