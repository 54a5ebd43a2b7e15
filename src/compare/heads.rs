/*!
Some of a layer's heads: the layer as the ranks of tensor parallelism that dumped hold it.

Whatever has heads is cut to theirs, in the order of the model's; the rest is the same on every rank. So heads that no rank
dumped are neither missing nor judged, and a rank's own part of the output projection can be judged by itself.
*/

use mla_reference::product::Rows;
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

/// Runs of rows and columns of a matrix, one after the other: (first, how many).
struct Cut<'a> {
    inner: &'a dyn Rows,
    rows: Vec<(usize, usize)>,
    cols: Vec<(usize, usize)>,
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

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::product::Dense;

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
}
