/*!
Judging weights: what an engine holds against what the file says, bit for bit.

While the file's values are decoded anyway, what is odd in the weights themselves is noted: values that are
not finite, rows that are zero throughout, a head whose norm stands out.
*/

use super::tally::Tally;
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Axis, Geometry, Weight};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Differences that are kept one by one, so that later stages can still be isolated; beyond that the weight
/// counts as another one altogether.
const MOST_PATCHES: usize = 4096;
/// A head stands out when its rms is this many times the median head's, or a fraction of one over this.
const STANDS_OUT: f64 = 8.0;
/// Rows compared at a time by one thread.
const ROWS: usize = 64;

/// A weight compared.
pub struct Compared {
    /// Counts.
    pub tally: Tally,
    /// Where the engine differs: (row, column) → its value. Empty when `another`.
    pub patches: BTreeMap<(usize, usize), f64>,
    /// Whether so much differs that the stages that read it can't be isolated.
    pub another: bool,
    /// What is odd in the file's own values.
    pub odd: Vec<String>,
}

#[derive(Default)]
struct Piece {
    tally: Tally,
    patches: Vec<((usize, usize), f64)>,
    not_finite: usize,
    zero_rows: usize,
    squares: Vec<f64>,
}

/// Compares the engine's rows with the file's, rounded to the contract's dtype.
pub fn compare(weight: Weight, g: &Geometry, file: &dyn Rows, engine: &dyn Rows, dtype: DType) -> Compared {
    let (rows, cols) = (file.rows(), file.cols());
    let pieces: Vec<Piece> = (0..rows.div_ceil(ROWS))
        .into_par_iter()
        .map(|i| piece(i * ROWS..((i + 1) * ROWS).min(rows), cols, file, engine, dtype))
        .collect();
    let mut out =
        Compared { tally: Tally::default(), patches: BTreeMap::new(), another: false, odd: Vec::new() };
    let (mut not_finite, mut zero_rows, mut squares) = (0, 0, Vec::new());
    for p in pieces {
        out.tally.merge(p.tally);
        if out.patches.len() + p.patches.len() > MOST_PATCHES {
            out.another = true;
        } else {
            out.patches.extend(p.patches);
        }
        not_finite += p.not_finite;
        zero_rows += p.zero_rows;
        squares.extend(p.squares);
    }
    if out.another {
        out.patches.clear();
    }
    if not_finite > 0 {
        out.odd.push(format!("{weight}: {not_finite} values are NaN or infinite"));
    }
    if zero_rows > 0 {
        out.odd.push(format!("{weight}: {zero_rows} of {rows} rows are zero throughout"));
    }
    out.odd.extend(odd_heads(weight, g, &squares, cols));
    out
}

fn piece(
    range: std::ops::Range<usize>,
    cols: usize,
    file: &dyn Rows,
    engine: &dyn Rows,
    dtype: DType,
) -> Piece {
    let mut p = Piece::default();
    let (mut want, mut got, zeros) = (vec![0.0; cols], vec![0.0; cols], vec![0.0; cols]);
    for r in range {
        file.decode(r, 0, &mut want);
        let square: f64 = want.iter().map(|v| v * v).sum();
        p.squares.push(square);
        p.not_finite += want.iter().filter(|v| !v.is_finite()).count();
        p.zero_rows += usize::from(square == 0.0);
        engine.decode(r, 0, &mut got);
        p.tally.row(dtype, (r, 0, cols), &got, &want, &zeros);
        for (c, (o, x)) in got.iter().zip(&want).enumerate() {
            if o.to_bits() != dtype.round(*x).to_bits() && !(o.is_nan() && x.is_nan()) {
                p.patches.push(((r, c), *o));
            }
        }
        if p.patches.len() > MOST_PATCHES {
            p.patches.truncate(MOST_PATCHES + 1);
        }
    }
    p
}

/// Heads whose rms is far from the median head's.
fn odd_heads(weight: Weight, g: &Geometry, squares: &[f64], cols: usize) -> Vec<String> {
    if weight.row().axes.first() != Some(&Axis::Head) || g.heads < 3 {
        return Vec::new();
    }
    let per = squares.len() / g.heads;
    let rms: Vec<f64> =
        squares.chunks(per.max(1)).map(|s| (s.iter().sum::<f64>() / (per * cols) as f64).sqrt()).collect();
    let mut sorted = rms.clone();
    sorted.sort_by(f64::total_cmp);
    let median = sorted[sorted.len() / 2];
    rms.iter()
        .enumerate()
        .filter(|(_, r)| **r > median * STANDS_OUT || **r * STANDS_OUT < median)
        .map(|(h, r)| format!("{weight}: head {h} has rms {r:.3e}, the median head {median:.3e}"))
        .collect()
}
