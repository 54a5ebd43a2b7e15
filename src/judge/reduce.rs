/*!
`out` as tensor parallelism makes it: ranks' parts, each rounded, then summed.

A rank's part p_r is the product over its share of the heads. Let s(v) be half the spacing of the stored dtype at v. Each
part is rounded once: by at most s(|p_r| + B), B the bound of the whole product, which holds for each part of it too. The
sum of R parts is R − 1 additions in an order that nobody knows, in the stored dtype at worst; every partial sum is at most
S = Σ(|p_r| + B + s), so each addition but the last rounds by at most s(S), and the last is the final rounding that every tensor
has. `most = B + Σ s(|p_r| + B) + (R − 2) s(S)`. `usual`: the same roundings as independent and uniform, s/√3 each, partial
sums taken as large as √Σp².
*/

use super::bound::bound;
use super::chain::{Grown, times};
use super::compare::Isolated;
use crate::trace::TensorId;
use mla_numeric::DType;
use mla_reference::rows::Cut;
use mla_reference::{Chunk, Stage, Terms};
use ndarray::{Array2, s};

/// What rounding of ranks' parts adds to a chunk of `out`; None of other stages, and where there is one rank.
pub fn grown(of: &Isolated, id: TensorId, c: &Chunk, dtype: DType) -> Option<Grown> {
    let ranks = of.contract.ranks;
    let (Stage::Out, Terms::Product { len, a, w, .. }, true) = (id.stage, &c.terms, ranks > 1) else {
        return None;
    };
    let own = bound(of.contract, &c.terms, c.x.view(), false);
    let own = if own.dim() == c.x.dim() { own } else { Array2::zeros(c.x.dim()) };
    let half = |v: f64| dtype.spacing(v) / 2.0;
    let (mut most, mut sum) = (own.clone(), Array2::<f64>::zeros(c.x.dim()));
    let (mut usual, mut squares) = (sum.clone(), sum.clone());
    for r in 0..ranks {
        let (from, to) = (r * len / ranks, (r + 1) * len / ranks);
        let part = Cut { inner: *w, rows: vec![(0, w.rows())], cols: vec![(from, to - from)] };
        let p = times(a.slice(s![.., from..to]), &part);
        ndarray::Zip::from(&p).and(&own).and(&mut most).and(&mut sum).for_each(|p, own, most, sum| {
            let s = half(p.abs() + own);
            *most += s;
            *sum += p.abs() + own + s;
        });
        ndarray::Zip::from(&p).and(&mut usual).and(&mut squares).for_each(|p, usual, squares| {
            *usual += half(*p).powi(2) / 3.0;
            *squares += p * p;
        });
    }
    let between = ranks.saturating_sub(2) as f64;
    most.zip_mut_with(&sum, |most, sum| *most += between * half(*sum));
    usual.zip_mut_with(&squares, |usual, square| {
        *usual = (*usual + between * half(square.sqrt()).powi(2) / 3.0).sqrt();
    });
    Some(Grown { most, usual })
}

/// Two errors of one chunk, the stage's own bound in both; taken once.
pub fn both(of: &Isolated, c: &Chunk, inputs: Option<Grown>, ranks: Option<Grown>) -> Option<Grown> {
    match (inputs, ranks) {
        (Some(a), Some(b)) => {
            let own = bound(of.contract, &c.terms, c.x.view(), of.spec.temperature.is_some());
            let once = if own.dim() == a.most.dim() { own } else { Array2::zeros(a.most.dim()) };
            let usual = (a.usual.mapv(|v| v * v) + b.usual.mapv(|v| v * v)).mapv(f64::sqrt);
            Some(Grown { most: a.most + b.most - once, usual })
        }
        (a, b) => a.or(b),
    }
}
