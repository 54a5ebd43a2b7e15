/*!
Where: the smallest boxes outside of which a tensor is clean, and the keys that the residual points at.

A box is a set of rows, of heads and of columns. From the whole tensor each axis keeps the indices whose count of bad
elements inside the box is in excess (Chernoff at α/number of indices), again and again until nothing shrinks; if the
outside is not clean then, the box is taken out and the search goes on, `MAX_BOXES` times at most. Columns are
counted by block of 16 and parity, since a rotation in the wrong pairing shows in one of the two.

A fault in the keys (a page, a split, one token) shows in every row that sees them. The key axis is scanned on its own:
of the residual r = o − x, `z_t = Σ P_t (v_t − x)·r / √(Σ P_t² ‖v_t − x‖²)` over all rows and heads, which is large for
keys whose weight is wrong. Source: the groundwork on comparing kernels, section 5.1.
*/

use super::compare::{Isolated, columns};
use super::evidence::{Evidence, Piece};
use super::picture::{Canvas, Picture};
use super::stats::flips::{BLOCK, log_chernoff};
use super::tally::within;
use crate::trace::{Tensor, TensorId};
use mla_reference::attention::part;
use mla_reference::product::Rows;
use mla_reference::{Phase, Terms};
use ndarray::{Array2, Array3, s};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Most boxes.
const MAX_BOXES: usize = 8;
/// ln of the level of one box, 1e-7.
const LEVEL: f64 = -16.118_095_650_958_32;
/// ln of the level at which the outside counts as clean, 1e-6.
const OUTSIDE: f64 = -13.815_510_557_964_274;
/// Share of elements beyond their bound in a clean tensor: none; the search needs a number.
const BEYOND: f64 = 2e-4;
/// Most cells that are counted (rows × heads × column groups): bounds memory to about 200 MB.
const MAX_CELLS: usize = 1 << 25;
/// How far a key's z must stand out from the others'.
const STANDS_OUT: f64 = 6.0;

/// Bad elements and all elements of a cell.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    bad: u16,
    all: u16,
}

/// A place: indices along each axis. An axis that is kept whole is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Rows of the tensor's matrix view.
    pub rows: Vec<usize>,
    /// Heads.
    pub heads: Vec<usize>,
    /// First and last column (inside a head) of each run of blocks.
    pub columns: Vec<(usize, usize)>,
    /// Where only even (0) or only odd (1) columns are bad.
    pub parity: Option<usize>,
    /// Elements in it.
    pub elements: u64,
    /// Bad ones.
    pub bad: u64,
}

/// Keys that the residual points at, of one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Keys {
    /// Sequence of the plan.
    pub sequence: usize,
    /// Key positions, ascending: one, or those of a page.
    pub first: usize,
    /// Last.
    pub last: usize,
    /// Page of the pool, where the keys fill one.
    pub page: Option<usize>,
    /// z.
    #[serde(deserialize_with = "crate::written::number")]
    pub z: f64,
}

/// Where a tensor is wrong.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// Boxes, in the order in which they were found.
    pub places: Vec<Place>,
    /// Whether everything outside of them is clean.
    pub outside_clean: bool,
    /// Keys.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<Keys>,
    /// Whether the boxes are of elements beyond their bounds (else of flips).
    pub by_bound: bool,
}

/// num and den of the keys of a sequence, by (sequence, row, first column).
pub(super) type KeySums = BTreeMap<(usize, usize, usize), Vec<(f64, f64)>>;

/// Finds the place of a fault in the rows of one phase, and draws it. None where the tensor is too large to be mapped.
pub fn find(
    of: &Isolated,
    id: TensorId,
    tensor: &Tensor,
    phase: Phase,
    evidence: &Evidence,
) -> Option<(Found, Picture)> {
    let phases = of.phases(id);
    let rows: Vec<usize> = (0..phases.len()).filter(|r| phases[*r] == phase).collect();
    let at: BTreeMap<usize, usize> = rows.iter().enumerate().map(|(i, r)| (*r, i)).collect();
    let cols = columns(tensor);
    let groups = 2 * cols.width.div_ceil(BLOCK);
    if rows.len().saturating_mul(cols.heads).saturating_mul(groups) > MAX_CELLS {
        return None;
    }
    let by_bound = evidence.tally.beyond > 0;
    let cells = Mutex::new(Array3::<Cell>::default((rows.len(), cols.heads, groups)));
    let blank = || Canvas::new(tensor.dtype, rows.clone(), cols.heads, cols.width);
    let picture = Mutex::new(blank());
    let keys = Mutex::new(KeySums::new());
    let names = of.case.plan.names(id.stage, id.form);
    let take = |piece: &Piece| {
        let rows: Vec<usize> = (0..piece.x.nrows()).collect();
        let proven = piece.prediction.bounds(&rows).proven;
        let bad = |i: usize, j: usize| is_bad(piece, i, j, tensor, by_bound.then_some(&proven));
        let (mut mine, mut drawn) = (Vec::new(), blank());
        for i in 0..piece.x.nrows() {
            let Some(&row) = at.get(&(piece.at.0 + i)) else { continue };
            let bound = |j: usize| if piece.prediction.is_copy() { 0.0 } else { proven[[i, j]] };
            let own = |of: ndarray::ArrayView1<f64>| of.to_vec();
            drawn.add(row, piece.at.1, &own(piece.engine.row(i)), &own(piece.x.row(i)), &bound);
            for j in 0..piece.x.ncols() {
                let col = piece.at.1 + j;
                let (head, within) = (col / cols.width, col % cols.width);
                mine.push(((row, head, within / BLOCK * 2 + within % 2), bad(i, j)));
            }
        }
        let mut all = cells.lock().unwrap_or_else(PoisonError::into_inner);
        for (at, bad) in mine {
            all[at].all = all[at].all.saturating_add(1);
            all[at].bad = all[at].bad.saturating_add(u16::from(bad));
        }
        drop(all);
        picture.lock().unwrap_or_else(PoisonError::into_inner).merge(&drawn);
        if let Terms::Attention { lse: false, .. } = piece.terms {
            let mut sums = KeySums::new();
            for i in 0..piece.x.nrows() {
                let row = piece.at.0 + i;
                if let (true, Some(sequence)) = (at.contains_key(&row), names[row].sequence) {
                    key_sums(piece, i, (sequence, row, piece.at.1), &mut sums);
                }
            }
            keys.lock().unwrap_or_else(PoisonError::into_inner).extend(sums);
        }
    };
    of.pieces(id, tensor, &take);
    let cells = cells.into_inner().unwrap_or_else(PoisonError::into_inner);
    let limit = if by_bound { BEYOND } else { evidence.whole_limit() };
    let (boxes, outside_clean) = boxes(cells, limit);
    let places = boxes.into_iter().map(|(axes, bad, elements)| {
        let kept =
            |axis: usize, n: usize| if axes[axis].len() == n { Vec::new() } else { axes[axis].clone() };
        let parity =
            [0, 1].into_iter().find(|p| axes[2].iter().all(|g| g % 2 == *p)).filter(|_| cols.width > 1);
        let mut blocks: Vec<usize> = axes[2].iter().map(|g| g / 2).collect();
        blocks.dedup();
        let whole = blocks.len() == cols.width.div_ceil(BLOCK);
        Place {
            rows: kept(0, rows.len()).into_iter().map(|i| rows[i]).collect(),
            heads: kept(1, cols.heads),
            columns: if whole { Vec::new() } else { runs(&blocks, cols.width) },
            parity,
            elements,
            bad,
        }
    });
    let keys = point_at(&keys.into_inner().unwrap_or_else(PoisonError::into_inner), of);
    let picture = picture.into_inner().unwrap_or_else(PoisonError::into_inner).finish();
    Some((Found { places: places.collect(), outside_clean, keys, by_bound }, picture))
}

fn is_bad(piece: &Piece, i: usize, j: usize, tensor: &Tensor, bounds: Option<&Array2<f64>>) -> bool {
    let (o, x, dtype) = (piece.engine[[i, j]], piece.x[[i, j]], tensor.dtype);
    if o.is_nan() && x.is_nan() || o == dtype.round(x) {
        return false;
    }
    match bounds {
        Some(b) => !within(dtype, o, x, b[[i, j]]) || piece.prediction.is_copy(),
        None if Evidence::wide(dtype) && !piece.prediction.is_copy() => piece.prediction.far(i, j, o),
        None => true,
    }
}

/// Adds P_t (v_t − x)·r and P_t² ‖v_t − x‖² of one row.
pub(super) fn key_sums(piece: &Piece, i: usize, key: (usize, usize, usize), sums: &mut KeySums) {
    let Terms::Attention { attended, head, .. } = piece.terms else { return };
    let (x, range) = (piece.x.row(i), attended.range.clone());
    let r: Vec<f64> = piece.engine.row(i).iter().zip(x).map(|(o, x)| o - x).collect();
    if r.iter().any(|r| !r.is_finite()) {
        return;
    }
    let s = attended.s.row(i);
    let most = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let p: Vec<f64> = s.iter().map(|s| libm::exp(s - most)).collect();
    let total: f64 = p.iter().sum();
    let values = part(&head.v, range.clone());
    let mut v = vec![0.0; values.cols()];
    let out = sums.entry(key).or_insert_with(|| vec![(0.0, 0.0); head.k.rows]);
    for (t, p) in p.iter().enumerate().filter(|(_, p)| **p > 0.0) {
        values.decode(t, 0, &mut v);
        let p = p / total;
        let (mut along, mut square) = (0.0, 0.0);
        for ((v, x), r) in v.iter().zip(x).zip(&r) {
            along += (v - x) * r;
            square += (v - x) * (v - x);
        }
        let at = &mut out[range.start + t];
        at.0 += p * along;
        at.1 += p * p * square;
    }
}

/// The key, or the page of keys, that stands out in each sequence.
fn point_at(sums: &KeySums, of: &Isolated) -> Vec<Keys> {
    let mut by: BTreeMap<usize, Vec<(f64, f64)>> = BTreeMap::new();
    if !of.case.given.selection.is_empty() {
        // What rows read are places in lists, each row's own: no key has a place for all of them.
        return Vec::new();
    }
    for ((sequence, _, _), rows) in sums {
        let all = by.entry(*sequence).or_insert_with(|| vec![(0.0, 0.0); rows.len()]);
        all.iter_mut().zip(rows).for_each(|(a, b)| *a = (a.0 + b.0, a.1 + b.1));
    }
    let z = |(num, den): (f64, f64)| if den > 0.0 { num / den.sqrt() } else { 0.0 };
    let mut found = Vec::new();
    for (sequence, keys) in by {
        let Some(seq) = of.case.plan.sequences.get(sequence) else { continue };
        let size = of.case.plan.page_size.max(1);
        let mut pages: BTreeMap<usize, (f64, f64, usize, usize)> = BTreeMap::new();
        for (t, (num, den)) in keys.iter().enumerate() {
            let page = seq.slots.get(t).map_or(0, |s| s / size);
            let p = pages.entry(page).or_insert((0.0, 0.0, t, t));
            *p = (p.0 + num, p.1 + den, p.2.min(t), p.3.max(t));
        }
        let zs: Vec<f64> = keys.iter().map(|k| z(*k).abs()).collect();
        let Some(worst) = (0..zs.len()).max_by(|a, b| zs[*a].total_cmp(&zs[*b])) else { continue };
        let others = zs.iter().enumerate().filter(|(t, _)| *t != worst).map(|(_, z)| z * z);
        let rms = (others.sum::<f64>() / (zs.len().max(2) - 1) as f64).sqrt();
        let page = pages.iter().max_by(|a, b| z((a.1.0, a.1.1)).abs().total_cmp(&z((b.1.0, b.1.1)).abs()));
        if zs[worst] > STANDS_OUT * rms {
            found.push(Keys { sequence, first: worst, last: worst, page: None, z: z(keys[worst]) });
        } else if let Some((page, p)) = page
            && pages.len() > 1
        {
            let z_page = z((p.0, p.1));
            let rest = pages.iter().filter(|(k, _)| *k != page).map(|(_, p)| z((p.0, p.1)).powi(2));
            let rms = (rest.sum::<f64>() / (pages.len() - 1) as f64).sqrt();
            if z_page.abs() > STANDS_OUT * rms {
                found.push(Keys { sequence, first: p.2, last: p.3, page: Some(*page), z: z_page });
            }
        }
    }
    found
}

/// Runs of neighbouring blocks as first and last columns.
fn runs(blocks: &[usize], width: usize) -> Vec<(usize, usize)> {
    let mut out: Vec<(usize, usize)> = Vec::new();
    for b in blocks {
        let (first, last) = (b * BLOCK, ((b + 1) * BLOCK).min(width) - 1);
        match out.last_mut() {
            Some(run) if run.1 + 1 == first => run.1 = last,
            _ => out.push((first, last)),
        }
    }
    out
}

type Axes = [Vec<usize>; 3];

/// Disjoint boxes with their bad and all elements, and whether the outside is clean.
fn boxes(mut cells: Array3<Cell>, limit: f64) -> (Vec<(Axes, u64, u64)>, bool) {
    let mut out = Vec::new();
    loop {
        let (bad, all) = count(cells.iter());
        if all == 0 || log_chernoff(bad as f64, all as f64, limit) > OUTSIDE {
            return (out, true);
        }
        let Some(axes) = (out.len() < MAX_BOXES).then(|| shrink(&cells, limit)).flatten() else {
            return (out, false);
        };
        let mut inside = (0, 0);
        for &i in &axes[0] {
            for &j in &axes[1] {
                for &k in &axes[2] {
                    let cell = std::mem::take(&mut cells[[i, j, k]]);
                    inside = (inside.0 + u64::from(cell.bad), inside.1 + u64::from(cell.all));
                }
            }
        }
        out.push((axes, inside.0, inside.1));
    }
}

fn count<'a>(cells: impl Iterator<Item = &'a Cell>) -> (u64, u64) {
    cells.fold((0, 0), |(b, n), c| (b + u64::from(c.bad), n + u64::from(c.all)))
}

/// One box, or None where no index of any axis is in excess.
fn shrink(cells: &Array3<Cell>, limit: f64) -> Option<Axes> {
    let dim = cells.shape().to_vec();
    let level = LEVEL - libm::log(dim.iter().sum::<usize>() as f64);
    let mut axes: Axes = [0, 1, 2].map(|a| (0..dim[a]).collect());
    let mut found = false;
    for _ in 0..6 {
        let mut changed = false;
        for axis in 0..3 {
            let mut sums = vec![(0u64, 0u64); dim[axis]];
            for &i in &axes[0] {
                for &j in &axes[1] {
                    let line = cells.slice(s![i, j, ..]);
                    for &k in &axes[2] {
                        let at = &mut sums[[i, j, k][axis]];
                        *at = (at.0 + u64::from(line[k].bad), at.1 + u64::from(line[k].all));
                    }
                }
            }
            let excess = |i: &usize| {
                let (bad, all) = sums[*i];
                all > 0 && log_chernoff(bad as f64, all as f64, limit) < level
            };
            let kept: Vec<usize> = axes[axis].iter().copied().filter(excess).collect();
            found |= !kept.is_empty();
            if !kept.is_empty() && kept.len() < axes[axis].len() {
                axes[axis] = kept;
                changed = true;
            }
        }
        if !changed {
            break;
        }
    }
    found.then_some(axes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 32 rows, 8 heads, 16 groups of 8 columns; a fault bad in `bad` of the 8 elements of chosen cells.
    fn cells(bad: u16, at: impl Fn(usize, usize, usize) -> bool) -> Array3<Cell> {
        Array3::from_shape_fn((32, 8, 16), |(i, j, k)| Cell {
            bad: if at(i, j, k) { bad } else { 0 },
            all: 8,
        })
    }

    #[test]
    fn boxes_are_exact() {
        let all = |n: usize| (0..n).collect::<Vec<_>>();
        let (found, clean) = boxes(cells(4, |_, j, _| j == 3), 5e-3);
        assert!(clean);
        assert_eq!(found, [([all(32), vec![3], all(16)], 32 * 16 * 4, 32 * 16 * 8)]);
        // Every token from 20 on, the last two groups: a page's worth of rope columns.
        let (found, clean) = boxes(cells(3, |i, _, k| i >= 20 && k >= 14), 5e-3);
        assert!(clean);
        assert_eq!(found[0].0, [(20..32).collect(), all(8), vec![14, 15]]);
        // Two faults that share nothing.
        let (found, clean) = boxes(cells(8, |i, j, _| i == 1 && j == 1 || i == 9 && j == 6), 5e-3);
        assert!(clean && found.len() <= 3, "{found:?}");
        let covered = |i, j| found.iter().any(|(a, _, _)| a[0].contains(&i) && a[1].contains(&j));
        assert!(covered(1, 1) && covered(9, 6) && !covered(5, 5));
        // Nothing wrong: nothing found.
        assert_eq!(boxes(cells(0, |_, _, _| true), 5e-3), (vec![], true));
    }

    #[test]
    fn runs_of_columns() {
        assert_eq!(runs(&[0, 1, 3], 60), [(0, 31), (48, 59)]);
    }
}
