/*! `out` under tensor parallelism: each rank's part, from its own heads, and the sum of recorded parts. */

use super::{Chunk, Evaluator, TOKEN_CHUNK, Terms, Visit, row_chunks};
use crate::rows::Cut;
use crate::stage::{Form, Stage, Weight};
use ndarray::Array2;
use rayon::prelude::*;

impl Evaluator<'_> {
    /// Each rank's heads with its columns of w_o.
    pub(super) fn ranks(&self, form: Option<Form>, visit: Visit) {
        let Some(w) = self.weights.matrix(Weight::WO) else { return };
        let (ranks, total) = (self.plan.ranks, self.plan.rows(Stage::Out, form));
        let width = self.spec.geometry.values() / ranks;
        for rank in 0..ranks {
            let own = rank * width..(rank + 1) * width;
            let part = Cut { inner: w, rows: vec![(0, w.rows())], cols: vec![(own.start, width)] };
            for rows in row_chunks(total, TOKEN_CHUNK) {
                let mut a = self.source.block(Stage::AttnOut, rows.clone(), own.clone());
                let sums = self.operands(&mut a);
                let to = rank * total + rows.start..rank * total + rows.end;
                self.panels((a.view(), sums.as_ref()), to, &part, visit);
            }
        }
    }

    /// `out` of the ranks' parts.
    pub(super) fn sum(&self, form: Option<Form>, visit: Visit) {
        let (ranks, total) = (self.plan.ranks, self.plan.rows(Stage::Out, form));
        let width = self.spec.geometry.hidden;
        row_chunks(total, TOKEN_CHUNK).into_par_iter().for_each(|rows| {
            let (mut x, mut size) =
                (Array2::zeros((rows.len(), width)), Array2::<f64>::zeros((rows.len(), width)));
            for rank in 0..ranks {
                let from = rank * total + rows.start..rank * total + rows.end;
                let part = self.source.block(Stage::PartOut, from, 0..width);
                size.zip_mut_with(&part, |s, p| *s += p.abs());
                x += &part;
            }
            visit(Chunk { rows, cols: 0..width, x, terms: Terms::Sum { size: size.into(), parts: ranks } });
        });
    }
}
