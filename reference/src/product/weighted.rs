//! The weighted sum of attention, `O[R, D] = P[R, T] · V[T, D]`, by the same tiles and the same defined sum.

use super::dispatch::Isa;
use super::kernel::{KC, LD, Row};
use super::pack::Aligned;
use super::rows::{Rows, Strided};

/// Rows of P held at a time: 192 × 264 doubles, 0.4 MiB.
const ROWS: usize = 192;

/// `out[r][d] = Σ_t p[r][t] v[t][d]`, t ascending in the defined sum (see [`super`]): blocks of 256, in each
/// `a = fma(p, v, a)` from +0.0, then the blocks' sums from +0.0. A row's result depends on no other row. On one
/// thread: callers are parallel over heads.
///
/// # Panics
/// If `p` is not `[R, v.rows]` and `out` not `[R, v.cols]` for some R.
pub fn weighted_sum(p: &[f64], v: &Strided, out: &mut [f64]) {
    with(Isa::best(), p, v, out);
}

pub(super) fn with(isa: Isa, p: &[f64], v: &Strided, out: &mut [f64]) {
    let (t, d) = (v.rows(), v.cols());
    let rows = out.len().checked_div(d).unwrap_or(0);
    assert_eq!(out.len(), rows * d, "the output is [R, D]");
    assert_eq!(p.len(), rows * t, "P is [R, T]");
    out.fill(0.0);
    if t == 0 || d == 0 {
        return;
    }
    let lanes = isa.lanes().0;
    let mut held = vec![Row([0.0; LD]); rows.min(ROWS).next_multiple_of(super::UNIT)];
    let mut panel = Aligned::zeros(KC * lanes);
    let mut sums = Aligned::zeros(held.len() * lanes);
    for (p, out) in p.chunks(ROWS * t).zip(out.chunks_mut(ROWS * d)) {
        for t0 in (0..t).step_by(KC) {
            let n = KC.min(t - t0);
            let rows = p.len() / t;
            for (to, p) in held.iter_mut().zip(p.chunks(t)) {
                to.0[..n].copy_from_slice(&p[t0..t0 + n]);
            }
            // One row is a tile of its own; else whole tiles, whose last rows are not used.
            let held = &held[..if rows == 1 { 1 } else { rows.next_multiple_of(super::UNIT) }];
            for d0 in (0..d).step_by(lanes) {
                let width = lanes.min(d - d0);
                for (i, to) in panel.get_mut().chunks_mut(lanes).take(n).enumerate() {
                    to[..width].copy_from_slice(v.part(t0 + i, d0, width));
                }
                let sums = &mut sums.get_mut()[..held.len() * lanes];
                sums.fill(0.0);
                isa.tiles(lanes, held, &panel.get()[..n * lanes], sums);
                for (out, s) in out.chunks_mut(d).zip(sums.chunks(lanes)) {
                    for (o, s) in out[d0..d0 + width].iter_mut().zip(s) {
                        *o += s;
                    }
                }
            }
        }
    }
}
