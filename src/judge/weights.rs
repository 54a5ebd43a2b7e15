/*!
Judging weights: what an engine holds against what the file says, bit for bit.

While the file's values are decoded anyway, what is odd in the weights themselves is noted: values that are
not finite, aligned blocks of 32 in a row that are zero throughout (a hole in the file, a quantiser that gave
up), a head whose norm stands out.
*/

use super::route::Route;
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
/// Aligned values of a row that count as one block: what the smallest quantised blocks hold.
const BLOCK: usize = 32;
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
    zero_blocks: usize,
    squares: Vec<f64>,
}

/// Compares the engine's rows, stored in `dtype`, with the file's by a route.
pub fn compare(
    weight: Weight,
    g: &Geometry,
    file: &dyn Rows,
    engine: &dyn Rows,
    (route, dtype): (Route, DType),
) -> Compared {
    let (rows, cols) = (file.rows(), file.cols());
    let pieces: Vec<Piece> = (0..rows.div_ceil(ROWS))
        .into_par_iter()
        .map(|i| piece(i * ROWS..((i + 1) * ROWS).min(rows), cols, (file, engine), (route, dtype)))
        .collect();
    let mut out =
        Compared { tally: Tally::default(), patches: BTreeMap::new(), another: false, odd: Vec::new() };
    let (mut not_finite, mut zero_blocks, mut squares) = (0, 0, Vec::new());
    for p in pieces {
        out.tally.merge(p.tally);
        if out.patches.len() + p.patches.len() > MOST_PATCHES {
            out.another = true;
        } else {
            out.patches.extend(p.patches);
        }
        not_finite += p.not_finite;
        zero_blocks += p.zero_blocks;
        squares.extend(p.squares);
    }
    if out.another {
        out.patches.clear();
    }
    if not_finite > 0 {
        let values = rows * cols;
        out.odd.push(format!("{weight}: {not_finite} of {values} values are NaN or infinite"));
    }
    if zero_blocks > 0 {
        let blocks = rows * cols.div_ceil(BLOCK);
        out.odd.push(format!(
            "{weight}: {zero_blocks} of {blocks} blocks of {BLOCK} values are zero throughout"
        ));
    }
    out.odd.extend(odd_heads(weight, g, &squares, cols));
    out
}

fn piece(
    range: std::ops::Range<usize>,
    cols: usize,
    (file, engine): (&dyn Rows, &dyn Rows),
    (route, dtype): (Route, DType),
) -> Piece {
    let mut p = Piece::default();
    let (mut want, mut got) = (vec![0.0; cols], vec![0.0; cols]);
    for r in range {
        file.decode(r, 0, &mut want);
        let square: f64 = want.iter().map(|v| v * v).sum();
        p.squares.push(square);
        p.not_finite += want.iter().filter(|v| !v.is_finite()).count();
        p.zero_blocks += want.chunks(BLOCK).filter(|b| b.iter().all(|v| *v == 0.0)).count();
        // What one rounding is held against is the file's own value; by another route, the route's.
        if route != Route::Once(dtype) {
            want.iter_mut().for_each(|v| *v = route.value(*v));
        }
        engine.decode(r, 0, &mut got);
        p.tally.copy(dtype, (r, 0, cols), &got, &want);
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

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::product::Dense;

    const G: Geometry = Geometry { hidden: 8, heads: 4, q_rank: 0, latent: 2, rope: 2, nope: 80, value: 4 };

    /// What is odd in w_uk [4 heads, 2, 80], all ones but for what `alter` does.
    fn odd(alter: impl Fn(&mut [f64])) -> Vec<String> {
        let mut data = vec![1.0; 4 * 2 * 80];
        alter(&mut data);
        let w = Dense { data: &data, cols: 80 };
        let c = compare(Weight::WUk, &G, &w, &w, (Route::Once(DType::F32), DType::F32));
        // Odd or not: the engine holds what the file says.
        assert_eq!((c.tally.beyond, c.tally.flips, c.another, c.patches.len()), (0, 0, false, 0));
        c.odd
    }

    #[test]
    fn ordinary_weights_are_not_odd() {
        assert!(odd(|_| ()).is_empty());
        // Zeros, but no whole aligned block of them; heads apart by less than a factor of 8.
        assert!(odd(|w| w[1..63].fill(0.0)).is_empty());
        assert!(odd(|w| w[..160].fill(7.0)).is_empty());
    }

    #[test]
    fn values_that_are_not_finite_are_counted() {
        let found = odd(|w| (w[3], w[200]) = (f64::NAN, f64::INFINITY));
        assert_eq!(found[0], "w_uk: 2 of 640 values are NaN or infinite");
    }

    /// A row of 80 has three blocks, the last of 16 values.
    #[test]
    fn zero_blocks_are_counted_also_inside_rows() {
        let text = |n| vec![format!("w_uk: {n} of 24 blocks of 32 values are zero throughout")];
        assert_eq!(odd(|w| w[80 + 32..80 + 64].fill(0.0)), text(1));
        assert_eq!(odd(|w| w[80 + 64..160].fill(0.0)), text(1));
        assert_eq!(odd(|w| w[160..240].fill(-0.0)), text(3));
    }

    #[test]
    fn a_head_that_stands_out_is_named() {
        for (value, rms) in [(9.0, "9.000e0"), (0.0625, "6.250e-2")] {
            let found = odd(|w| w[320..480].fill(value));
            assert_eq!(found, [format!("w_uk: head 2 has rms {rms}, the median head 1.000e0")]);
        }
    }
}
