/*!
Float64 products `C[T, M] = X[T, K] · W[M, K]ᵀ` from weights as they are stored.

W is decoded block by block inside the product ([`Rows`]) and never stands in memory.

**The result is defined, not found.** For every element: columns in blocks of [`KC`] = 256; inside a block one
accumulator, `p = fma(w[k], x[k], p)`, k ascending from +0.0; blocks ascending, `c = c + p` from +0.0. Lanes hold
different elements, never parts of one sum, so that threads, number of tokens, tile shape and instruction set
decide only *which* elements are computed side by side and cannot change a bit (NaN payloads aside). With
n = 256 + ⌈K/256⌉ roundings, |δ| ≤ γ_n Σ|x||w|, γ_n = n u / (1 - n u), u = 2^-53.

[`weighted_sum`] is the same sum for probabilities and values: `O[R, D] = P[R, T] · V[T, D]`.

Form: lanes are tokens. X is packed once, tokens of a panel side by side; a decoder writes 256 columns of a row as
they come, and a tile broadcasts from it, so that decoded weights need no transposition. One token: lanes are rows of
W. A thread holds 192 rows × 256 columns of W (few tokens: 24 × 1,024), which stay in its L2 cache while the
panels of X (16 KiB) pass through L1. Beside inputs and outputs a product needs 8·T·K bytes, and per thread at most
0.4 MiB and 1,536·T bytes.

Without fused multiply-add in hardware the same bits take some 50 times as long.
*/

mod dispatch;
mod kernel;
mod pack;
pub mod quantised;
mod rows;
#[cfg(test)]
mod tests;
mod weighted;

pub use kernel::KC;
pub use rows::{Blocks, BlocksError, Dense, Rows, Scaled, Strided};
pub use weighted::weighted_sum;

use dispatch::{Isa, UNIT};
use kernel::{LD, Row};
use pack::{Aligned, Packed};
use rayon::prelude::*;

/// Columns per sum of squares of [`product_with_norms`].
pub const NORM_BLOCK: usize = 128;

/// `c[t][m] = Σ_k x[t][k] w[m][k]`, row-major; parallel over rows of `w`.
///
/// # Panics
/// If `x` is not `[tokens, w.cols()]` or `c` not `[tokens, w.rows()]`.
pub fn product(x: &[f64], tokens: usize, w: &dyn Rows, c: &mut [f64]) {
    run(Plan::default(), x, tokens, w, c, None);
}

/// [`product`], and Σ w² of every row of `w` in blocks of [`NORM_BLOCK`] columns, taken while they are decoded:
/// `sumsq` is `[M, ⌈K/128⌉]`. Its order of summation is fixed too.
///
/// # Panics
/// As [`product`], or if `sumsq` has another length.
pub fn product_with_norms(x: &[f64], tokens: usize, w: &dyn Rows, c: &mut [f64], sumsq: &mut [f64]) {
    run(Plan::default(), x, tokens, w, c, Some(sumsq));
}

/// How to compute; the result does not depend on it.
#[derive(Clone, Copy)]
struct Plan {
    isa: Isa,
    /// Rows of W decoded at a time and thread; None: chosen.
    block: Option<usize>,
}

impl Default for Plan {
    fn default() -> Self {
        Plan { isa: Isa::best(), block: None }
    }
}

fn run(plan: Plan, x: &[f64], tokens: usize, w: &dyn Rows, c: &mut [f64], sumsq: Option<&mut [f64]>) {
    let (m, k, isa) = (w.rows(), w.cols(), plan.isa);
    assert_eq!(x.len(), tokens * k, "X is [tokens, columns of W]");
    assert_eq!(c.len(), tokens * m, "C is [tokens, rows of W]");
    let norm_blocks = k.div_ceil(NORM_BLOCK);
    if let Some(s) = &sumsq {
        assert_eq!(s.len(), m * norm_blocks, "sums of squares are [rows of W, ceil(columns / 128)]");
    }
    if m == 0 || k == 0 || tokens == 0 && sumsq.is_none() {
        return c.fill(0.0);
    }
    // Few tokens: long runs of a row, for the memory; many: many rows, so that X is read less often.
    let (most, group) = if tokens <= 16 { (UNIT, 4) } else { (8 * UNIT, 1) };
    let share = m.div_ceil(2 * rayon::current_num_threads());
    let block = plan.block.unwrap_or(share).next_multiple_of(UNIT);
    let block = if plan.block.is_none() { block.min(most) } else { block };

    let x = Packed::new(isa, x, tokens, k);
    // A task writes its columns of C: of each row of C a slice.
    let mut tasks: Vec<Task> = (0..m.div_ceil(block)).map(|_| Task::default()).collect();
    for c in c.chunks_mut(m) {
        tasks.iter_mut().zip(c.chunks_mut(block)).for_each(|(task, c)| task.c.push(c));
    }
    if let Some(s) = sumsq {
        tasks.iter_mut().zip(s.chunks_mut(block * norm_blocks)).for_each(|(task, s)| task.norms = Some(s));
    }
    let scratch =
        || Scratch { w: vec![Row([0.0; LD]); block * group], sums: Aligned::zeros(block * x.width) };
    tasks.into_par_iter().enumerate().for_each_init(scratch, |scratch, (i, task)| {
        row_block(isa, scratch, i * block..((i + 1) * block).min(m), group, &x, w, task);
    });
}

/// Where the results of some rows of W go.
#[derive(Default)]
struct Task<'a> {
    /// For each token, the elements of these rows.
    c: Vec<&'a mut [f64]>,
    /// Their sums of squares.
    norms: Option<&'a mut [f64]>,
}

struct Scratch {
    w: Vec<Row>,
    /// As the tiles leave them: `[panel][row][lane]`.
    sums: Aligned,
}

/// The products of some rows of W with all tokens.
fn row_block(
    isa: Isa,
    scratch: &mut Scratch,
    rows: std::ops::Range<usize>,
    group: usize,
    x: &Packed,
    w: &dyn Rows,
    mut task: Task,
) {
    let (k, padded) = (w.cols(), rows.len().next_multiple_of(UNIT));
    let norm_blocks = k.div_ceil(NORM_BLOCK);
    let sums = &mut scratch.sums.get_mut()[..padded * x.width];
    sums.fill(0.0);
    for k0 in (0..k).step_by(KC * group) {
        let blocks = || (k0..k.min(k0 + KC * group)).step_by(KC).map(|k0| (k0, KC.min(k - k0)));
        for (i, r) in rows.clone().enumerate() {
            for (j, (k0, kc)) in blocks().enumerate() {
                let row = &mut scratch.w[j * padded + i].0[..kc];
                w.decode(r, k0, row);
                if let Some(norms) = &mut task.norms {
                    let norms = &mut norms[i * norm_blocks + k0 / NORM_BLOCK..];
                    for (n, part) in norms.iter_mut().zip(row.chunks(NORM_BLOCK)) {
                        *n = isa.sumsq(part);
                    }
                }
            }
        }
        for (j, (k0, kc)) in blocks().enumerate() {
            let w = &scratch.w[j * padded..][..padded];
            for (panel, lanes, before) in x.block(k0, kc) {
                isa.tiles(lanes, w, panel, &mut sums[before * padded..][..lanes * padded]);
            }
        }
    }
    for (t, c) in task.c.iter_mut().enumerate() {
        let (first, lanes, before) = x.panel_of(t);
        for (c, v) in c.iter_mut().zip(sums[before * padded + t - first..].iter().step_by(lanes)) {
            *c = *v;
        }
    }
}
