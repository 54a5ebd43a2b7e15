/*!
Some of a layer's heads: the layer as the ranks of tensor parallelism that dumped hold it.

Whatever has heads is cut to theirs, in the order of the model's; the rest is the same on every rank. So heads that no rank
dumped are neither missing nor judged, and a rank's own part of the output projection can be judged by itself.
*/

use mla_reference::product::Rows;
use mla_reference::rows::Cut;
use mla_reference::{Axis, Geometry, Spec, Weight, Weights};

/// The heads of a layer that there are, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heads(pub Vec<usize>);

impl Heads {
    /// A layer's numbers with these heads alone.
    pub fn spec(&self, spec: &Spec) -> Spec {
        Spec { geometry: Geometry { heads: self.0.len(), ..spec.geometry }, ..spec.clone() }
    }
}

/// Weights of some heads of a layer.
pub struct OfHeads<'a> {
    matrices: Vec<(Weight, Cut<'a>)>,
    all: &'a dyn Weights,
}

impl<'a> OfHeads<'a> {
    /// Of a layer with the widths `g`.
    pub fn new(all: &'a dyn Weights, heads: &Heads, g: &Geometry) -> OfHeads<'a> {
        let cut = |w: &Weight| {
            let inner = all.matrix(*w)?;
            let axes = w.row().axes;
            let at = axes.iter().position(|a| *a == Axis::Head);
            let runs = |whole: usize| {
                let n = whole / g.heads.max(1);
                heads.0.iter().map(|h| (h * n, n)).collect::<Vec<_>>()
            };
            let everything = |n: usize| vec![(0, n)];
            let (rows, cols) = match at {
                Some(0) => (runs(inner.rows()), everything(inner.cols())),
                Some(_) => (everything(inner.rows()), runs(inner.cols())),
                None => (everything(inner.rows()), everything(inner.cols())),
            };
            Some((*w, Cut { inner, rows, cols }))
        };
        let there = Weight::ALL.iter().filter(|w| w.exists(g) && !w.is_norm());
        OfHeads { matrices: there.filter_map(cut).collect(), all }
    }
}

impl Weights for OfHeads<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        self.matrices.iter().find(|(w, _)| *w == weight).map(|(_, m)| m as &dyn Rows)
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.all.norm(weight)
    }
}
