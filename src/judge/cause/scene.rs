/*!
What hypotheses are made from: one phase of a tensor beside its reference, and the part of it that screens look at.
*/

use super::super::compare::{Isolated, columns};
use super::super::evidence::{Evidence, Piece};
use super::super::localise::{KeySums, key_sums};
use super::change::Change;
use super::{Hypothesis, Known, SCREEN};
use crate::trace::{Tensor, TensorId};
use mla_reference::attention::Attended;
use mla_reference::{Form, Only, Phase, Spec, Stage, Terms};
use ndarray::Array2;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Elements that fits of a factor look at, at most (about).
const SAMPLE: usize = 65_536;

/// One element as fits look at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Element {
    pub head: usize,
    /// The engine's.
    pub o: f64,
    /// The reference before rounding.
    pub x: f64,
    /// Standard deviation of an honest engine's value before rounding.
    pub sigma: f64,
    /// Ulp of its row.
    pub ulp: f64,
}

/// Some elements by row and column of the matrix.
pub(super) type Sampled = BTreeMap<(usize, usize), Element>;

/// Which elements fits look at: of some rows all columns, or some.
struct Sampling {
    rows: Vec<usize>,
    stride: usize,
    width: usize,
}

impl Sampling {
    fn new(rows: &[usize], cols: usize, width: usize) -> Sampling {
        let step = (rows.len() * cols).div_ceil(SAMPLE).max(1);
        let rows: Vec<usize> = rows.iter().copied().step_by(step).collect();
        let stride = (rows.len() * cols).div_ceil(SAMPLE).max(1);
        Sampling { rows, stride, width }
    }

    /// Adds what it takes of row `i` of a piece.
    fn take(&self, piece: &Piece, i: usize, to: &mut Sampled) {
        let row = piece.at.0 + i;
        if piece.prediction.is_copy() || self.rows.binary_search(&row).is_err() {
            return;
        }
        let wanted = |j: &usize| (piece.at.1 + j + row).is_multiple_of(self.stride);
        let some: Vec<usize> = (0..piece.x.ncols()).filter(wanted).collect();
        let ulps = piece.prediction.row_ulps(i, &some);
        for (j, ulp) in some.into_iter().zip(ulps) {
            let (col, o, x) = (piece.at.1 + j, piece.engine[[i, j]], piece.x[[i, j]]);
            let sigma = piece.prediction.sigma(i, j);
            if o.is_finite() && x.is_finite() && sigma.is_finite() {
                to.insert((row, col), Element { head: col / self.width, o, x, sigma, ulp });
            }
        }
    }
}

/// One phase of one tensor.
pub(super) struct Scene<'a> {
    pub of: &'a Isolated<'a>,
    pub id: TensorId,
    pub tensor: &'a Tensor,
    pub phase: Phase,
    /// What other tensors of the run were found to be off by.
    pub known: &'a Known,
    /// Rows of the phase.
    pub rows: Vec<usize>,
    /// Heads; 1 where the tensor has none.
    pub heads: usize,
    /// Columns of a head.
    pub width: usize,
    /// The reference as it would be stored.
    pub rounded: Tensor,
    /// Odd elements, [rows of the tensor, heads].
    pub odd: Array2<u32>,
    /// A sample of the elements.
    pub sample: Sampled,
    /// For each sequence and key: Σ P (v − x)·r and Σ P² ‖v − x‖² over its rows and heads.
    pub keys: BTreeMap<usize, Vec<(f64, f64)>>,
    /// Elements of the phase, and those that are NaN on both sides.
    pub elements: u64,
    pub nan: u64,
    /// Bits are compared, not values.
    pub copy: bool,
    only: Only,
    /// Hypotheses that families looked at by themselves.
    aside: AtomicUsize,
    /// Share of odd elements in the part that screens look at, and in all.
    base: (f64, f64),
    /// Honest share of odd elements.
    limit: f64,
}

fn odd(piece: &Piece, tensor: &Tensor, i: usize, j: usize) -> bool {
    let (o, x) = (piece.engine[[i, j]], piece.x[[i, j]]);
    if o.is_nan() && x.is_nan() || o == tensor.dtype.round(x) {
        return false;
    }
    !Evidence::wide(tensor.dtype) || piece.prediction.is_copy() || piece.prediction.far(i, j, o)
}

/// What an lse that is off says of keys: without key t it is ln(1 − P_t) less. Adds P_t·(exp(off) − 1) and P_t².
fn weights_lost(attended: &Attended, row: usize, off: f64, sums: &mut [(f64, f64)]) {
    let change = libm::expm1(off);
    if !change.is_finite() {
        return;
    }
    for (sum, s) in sums.iter_mut().zip(attended.s.row(row)) {
        let p = libm::exp(s - attended.lse[row]);
        *sum = (sum.0 + p * change, sum.1 + p * p);
    }
}

/// The first half of a third by how bad they are, the rest evenly spread.
fn third(bad: &[u64]) -> Vec<bool> {
    let n = bad.len();
    let wanted = n.div_ceil(3).max(2).min(n);
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(bad[*i]), *i));
    let mut chosen = vec![false; n];
    order.iter().take(wanted.div_ceil(2)).for_each(|i| chosen[*i] = true);
    let rest = wanted / 2;
    (0..rest).for_each(|k| chosen[k * n / rest.max(1)] = true);
    chosen
}

impl<'a> Scene<'a> {
    pub fn new(
        of: &'a Isolated<'a>,
        id: TensorId,
        tensor: &'a Tensor,
        phase: Phase,
        evidence: &Evidence,
        known: &'a Known,
    ) -> Scene<'a> {
        let phases = of.phases(id);
        let rows: Vec<usize> = (0..phases.len()).filter(|r| phases[*r] == phase).collect();
        let cols = columns(tensor);
        let names = of.case.plan.names(id.stage, id.form);
        let zeros = Tensor { bytes: vec![0; tensor.bytes.len()], ..tensor.clone() };
        let seen = Mutex::new((zeros, Array2::<u32>::zeros((tensor.rows, cols.heads))));
        let more = Mutex::new((Sampled::new(), KeySums::new()));
        let copy = Mutex::new(true);
        let sampling = Sampling::new(&rows, tensor.cols, cols.width);
        of.pieces(id, tensor, &|piece| {
            let (n, mut mine) = (piece.x.ncols(), Vec::new());
            let (mut sample, mut sums) = (Sampled::new(), KeySums::new());
            for i in 0..piece.x.nrows() {
                let row = piece.at.0 + i;
                let mut bad = BTreeMap::new();
                (0..n).filter(|j| odd(piece, tensor, i, *j)).for_each(|j| {
                    *bad.entry((piece.at.1 + j) / cols.width).or_insert(0u32) += 1;
                });
                mine.push((row, bad));
                if phases[row] != phase {
                    continue;
                }
                sampling.take(piece, i, &mut sample);
                // Of a selection, keys are places in a list.
                let sequence = names[row].sequence.filter(|_| of.case.given.selection.is_empty());
                match (piece.terms, sequence) {
                    (Terms::Attention { lse: false, .. }, Some(sequence)) => {
                        key_sums(piece, i, (sequence, row, piece.at.1), &mut sums);
                    }
                    (Terms::Attention { attended, head, lse: true }, Some(sequence)) => {
                        let off = piece.engine[[i, 0]] - piece.x[[i, 0]];
                        let all = sums
                            .entry((sequence, row, piece.at.1))
                            .or_insert_with(|| vec![(0.0, 0.0); head.k.rows]);
                        weights_lost(attended, i, off, &mut all[attended.range.start..]);
                    }
                    _ => {}
                }
            }
            {
                let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                for ((row, bad), x) in mine.into_iter().zip(piece.x.rows()) {
                    seen.0.write(row, piece.at.1, &x.to_vec());
                    bad.into_iter().for_each(|(h, n)| seen.1[[row, h]] += n);
                }
            }
            if !piece.prediction.is_copy() {
                *copy.lock().unwrap_or_else(PoisonError::into_inner) = false;
            }
            let mut more = more.lock().unwrap_or_else(PoisonError::into_inner);
            more.0.extend(sample);
            more.1.extend(sums);
        });
        let (rounded, odd) = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (sample, sums) = more.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut keys: BTreeMap<usize, Vec<(f64, f64)>> = BTreeMap::new();
        for ((sequence, _, _), row) in &sums {
            let all = keys.entry(*sequence).or_insert_with(|| vec![(0.0, 0.0); row.len()]);
            all.iter_mut().zip(row).for_each(|(a, b)| *a = (a.0 + b.0, a.1 + b.1));
        }
        let total = |of: &mut dyn Iterator<Item = u32>| of.map(u64::from).sum::<u64>();
        let by_row: Vec<u64> = rows.iter().map(|r| total(&mut odd.row(*r).iter().copied())).collect();
        let by_head: Vec<u64> =
            (0..cols.heads).map(|h| rows.iter().map(|r| u64::from(odd[[*r, h]])).sum()).collect();
        let mut only = Only { heads: third(&by_head), rows: vec![false; tensor.rows] };
        if rows.len() <= 16 {
            rows.iter().for_each(|r| only.rows[*r] = true);
        } else {
            third(&by_row).iter().zip(&rows).for_each(|(on, r)| only.rows[*r] = *on);
        }
        let mut scene = Scene {
            of,
            id,
            tensor,
            phase,
            known,
            heads: cols.heads,
            width: cols.width,
            rounded,
            odd,
            sample,
            keys,
            elements: evidence.tally.elements,
            nan: evidence.tally.nan,
            copy: copy.into_inner().unwrap_or_else(PoisonError::into_inner),
            only,
            aside: AtomicUsize::new(0),
            base: (1.0, 1.0),
            limit: evidence.whole_limit(),
            rows,
        };
        let part = scene.share(&Change::default());
        let all = by_row.iter().sum::<u64>() as f64 / (scene.rows.len() * tensor.cols).max(1) as f64;
        scene.base = (part, all);
        scene
    }

    /// The layer's scalars.
    pub fn spec(&self) -> &'a Spec {
        self.of.spec
    }

    /// Share of odd elements under a hypothesis, of the part that screens look at.
    pub fn share(&self, change: &Change) -> f64 {
        if let Some(share) = change.counted {
            return share;
        }
        self.share_of(change, &self.only)
    }

    /// The same of another part.
    pub fn share_of(&self, change: &Change, only: &Only) -> f64 {
        let tensor = change.tensors.first().map_or(self.tensor, |(_, t)| t);
        let phases = self.of.phases(self.id);
        let counts = Mutex::new((0u64, 0u64));
        change.with(self.of, Some(only), |of| {
            of.pieces(self.id, tensor, &|piece| {
                let (mut bad, mut all) = (0, 0);
                for i in (0..piece.x.nrows()).filter(|i| phases[piece.at.0 + i] == self.phase) {
                    if !only.rows.is_empty() && !only.rows[piece.at.0 + i] {
                        continue;
                    }
                    let some = (0..piece.x.ncols()).filter(|j| only.head((piece.at.1 + j) / self.width));
                    for j in some {
                        all += 1;
                        bad += u64::from(odd(piece, tensor, i, j));
                    }
                }
                let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
                *counts = (counts.0 + bad, counts.1 + all);
            });
        });
        let (bad, all) = counts.into_inner().unwrap_or_else(PoisonError::into_inner);
        if all == 0 { 1.0 } else { bad as f64 / all as f64 }
    }

    /// The sample under a hypothesis.
    pub fn sampled(&self, change: &Change) -> Sampled {
        let sampling = Sampling::new(&self.rows, self.tensor.cols, self.width);
        let all = Mutex::new(Sampled::new());
        change.with(self.of, None, |of| {
            of.pieces(self.id, self.tensor, &|piece| {
                let mut mine = Sampled::new();
                (0..piece.x.nrows()).for_each(|i| sampling.take(piece, i, &mut mine));
                all.lock().unwrap_or_else(PoisonError::into_inner).extend(mine);
            });
        });
        all.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Σ|o − x| of the part that screens look at: what a line search goes by.
    pub fn distance(&self, change: &Change) -> f64 {
        let phases = self.of.phases(self.id);
        let sums = Mutex::new(BTreeMap::new());
        change.with(self.of, Some(&self.only), |of| {
            of.pieces(self.id, self.tensor, &|piece| {
                let mut sum = 0.0;
                for i in (0..piece.x.nrows()).filter(|i| phases[piece.at.0 + i] == self.phase) {
                    if self.only.rows[piece.at.0 + i] {
                        let (o, x) = (piece.engine.row(i), piece.x.row(i));
                        let off = o.iter().zip(x).map(|(o, x)| (o - x).abs());
                        sum += off.filter(|d| d.is_finite()).sum::<f64>();
                    }
                }
                // Added in one order, whatever the threads do.
                sums.lock().unwrap_or_else(PoisonError::into_inner).insert(piece.at, sum);
            });
        });
        sums.into_inner().unwrap_or_else(PoisonError::into_inner).values().sum()
    }

    /// Share of odd elements of some rows and heads under a hypothesis that a family looks at by itself.
    pub fn aside_share(&self, change: &Change, rows: &[usize], heads: &[usize]) -> f64 {
        self.aside.fetch_add(1, Ordering::Relaxed);
        let mut only = self.only.clone();
        if !rows.is_empty() {
            only.rows = vec![false; self.tensor.rows];
            rows.iter().for_each(|r| only.rows[*r] = true);
        }
        if !heads.is_empty() {
            only.heads = (0..self.heads).map(|h| heads.contains(&h)).collect();
        }
        self.share_of(change, &only)
    }

    /// How many of these there were.
    pub fn aside(&self) -> usize {
        self.aside.load(Ordering::Relaxed)
    }

    /// Heads that are bad, worst half of the worst at least.
    pub fn bad_heads(&self) -> Vec<usize> {
        let of = |h: usize| self.rows.iter().map(|r| u64::from(self.odd[[*r, h]])).sum::<u64>();
        let all: Vec<u64> = (0..self.heads).map(of).collect();
        let most = all.iter().copied().max().unwrap_or(0).max(1);
        (0..self.heads).filter(|h| all[*h] * 4 >= most).collect()
    }

    /// Whether a hypothesis that leaves this share is worth the whole judge.
    pub fn goes_on(&self, share: f64, h: &Hypothesis) -> bool {
        let base = if h.change.counted.is_some() { self.base.1 } else { self.base.0 };
        let small = share <= SCREEN.max(3.0 * self.limit);
        small && (share < base || h.effect.is_some() && share <= base)
    }

    /// Share of odd elements of all.
    pub fn odd_share(&self) -> f64 {
        self.base.1
    }

    /// Some rows attend to keys here (else all are merged from parts, or it is no attention).
    pub fn attends(&self) -> bool {
        matches!(self.id.stage, Stage::PartO | Stage::PartLse) || self.outcome() && self.merged().1
    }

    /// Some rows are merged from partial results.
    pub fn merges(&self) -> bool {
        self.outcome() && self.merged().0
    }

    fn merged(&self) -> (bool, bool) {
        self.of.case.plan.merged(self.id.form, self.phase)
    }

    fn outcome(&self) -> bool {
        match self.id.stage {
            Stage::OLatent | Stage::Lse => true,
            Stage::AttnOut => self.id.form == Some(Form::Fused),
            _ => false,
        }
    }

    /// lse, not values.
    pub fn is_lse(&self) -> bool {
        matches!(self.id.stage, Stage::Lse | Stage::PartLse)
    }

    /// Latent keys, gathered from the pool.
    pub fn absorbed(&self) -> bool {
        self.id.form == Some(Form::Absorbed)
    }

    /// Odd elements of a row.
    pub fn odd_row(&self, row: usize) -> u64 {
        self.odd.row(row).iter().map(|n| u64::from(*n)).sum()
    }

    /// A copy of the engine's tensor.
    pub fn copy_of(&self) -> Tensor {
        self.tensor.clone()
    }
}
