/*!
A tensor of a GGUF file against the original's values, block by block, in one pass over both.

Nothing stands whole in memory; sums are taken row by row and added in the order of rows, so that no figure depends on the number
of threads.
*/

use super::allowed::{Allowed, ELEMENT, FAR, GROUP, ODD, SIZES};
use mla_numeric::DType;
use mla_reference::product::Rows;
use rayon::prelude::*;
use serde::Serialize;

/// Values that scales of scales are relative to.
const SUPER: usize = 256;

/// The block that is furthest beyond what is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spot {
    /// Row of the tensor.
    pub row: usize,
    /// First column.
    pub col: usize,
    /// Columns.
    pub len: usize,
    /// Largest difference.
    pub error: f64,
    /// What was allowed.
    pub allowed: f64,
}

/// How a tensor fits.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Fit {
    /// Blocks compared.
    pub blocks: usize,
    /// Those beyond what their type allows, by more than an importance matrix explains.
    pub beyond: usize,
    /// Those beyond it by less.
    pub odd: usize,
    /// Rows with either.
    pub rows_beyond: usize,
    /// First and last such row.
    pub between: Option<(usize, usize)>,
    /// The worst of them.
    pub worst: Option<Spot>,
    /// The largest part of what is allowed that a block takes (beyond: more than 1; at most the largest float32).
    pub most: f64,
    /// Root mean square of the differences over that of the original.
    pub relative: f64,
    /// Correlation (about 0).
    pub correlation: f64,
    /// The factor that takes the original nearest to the tensor.
    pub factor: f64,
    /// Whether a tensor without steps is not of the original's size.
    pub other_size: bool,
    /// Values that are not finite, in either.
    pub not_finite: usize,
}

impl Fit {
    /// Whether every block is within what its type allows.
    pub fn fits(&self) -> bool {
        self.beyond == 0
            && self.not_finite == 0
            && !self.other_size
            && self.odd as f64 <= ODD * self.blocks as f64
    }
    /// Blocks beyond what their type allows by however much.
    pub fn off(&self) -> usize {
        self.beyond + self.odd
    }
}

#[derive(Clone, Copy, Default)]
struct Line {
    xx: f64,
    yy: f64,
    xy: f64,
    dd: f64,
    blocks: usize,
    beyond: usize,
    odd: usize,
    not_finite: usize,
    most: f64,
    worst: Option<(Spot, f64)>,
}

/// Compares all rows (`every` 1) or each `every`th. `plain`: whether the original is stored as plain values.
pub fn fit(y: &dyn Rows, x: &dyn Rows, rule: Allowed, plain: bool, every: usize) -> Fit {
    let cols = y.cols().min(x.cols());
    let rows: Vec<usize> = (0..y.rows().min(x.rows())).step_by(every.max(1)).collect();
    let lines: Vec<Line> = rows
        .par_iter()
        .map_init(
            || (vec![0.0; cols], vec![0.0; cols]),
            |(a, b), &row| {
                x.decode(row, 0, a);
                y.decode(row, 0, b);
                line(row, a, b, rule, plain)
            },
        )
        .collect();
    let (mut sum, mut out) = (Line::default(), Fit::default());
    for (row, l) in rows.into_iter().zip(lines) {
        sum.xx += l.xx;
        sum.yy += l.yy;
        sum.xy += l.xy;
        sum.dd += l.dd;
        out.blocks += l.blocks;
        out.beyond += l.beyond;
        out.odd += l.odd;
        out.not_finite += l.not_finite;
        out.most = out.most.max(l.most);
        if l.beyond + l.odd > 0 {
            out.rows_beyond += 1;
            out.between = Some((out.between.map_or(row, |b| b.0), row));
        }
        if let Some((spot, ratio)) = l.worst
            && sum.worst.is_none_or(|w| ratio > w.1)
        {
            sum.worst = Some((spot, ratio));
        }
    }
    let over = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    out.worst = sum.worst.map(|w| w.0);
    out.relative = over(sum.dd, sum.xx).sqrt();
    out.correlation = over(sum.xy, (sum.xx * sum.yy).sqrt());
    out.factor = over(sum.xy, sum.xx);
    // Zeros are as far from the original as zero: they would pass as "nearer".
    let sized = sum.yy > 0.0 && SIZES.contains(&(sum.xy / sum.yy));
    out.other_size = matches!(rule, Allowed::Nearer(_)) && sum.xx > 0.0 && !sized;
    out
}

fn line(row: usize, x: &[f64], y: &[f64], rule: Allowed, plain: bool) -> Line {
    let mut out = Line::default();
    for (a, b) in x.iter().zip(y) {
        if !(a.is_finite() && b.is_finite()) {
            out.not_finite += 1;
            continue;
        }
        out.xx += a * a;
        out.yy += b * b;
        out.xy += a * b;
        out.dd += (a - b) * (a - b);
    }
    let group = match rule {
        Allowed::Rounded(_) => 32,
        Allowed::Steps { group, .. } | Allowed::Nearer(group) => group,
    };
    for (i, (a, b)) in x.chunks(group).zip(y.chunks(group)).enumerate() {
        let col = i * group;
        out.blocks += 1;
        let whole = &x[col / SUPER * SUPER..x.len().min(col / SUPER * SUPER + SUPER)];
        let (error, limit, ratio) = block(a, b, whole, rule, plain);
        let ratio = if ratio.is_nan() { f64::INFINITY } else { ratio };
        out.most = out.most.max(ratio.min(f64::from(f32::MAX)));
        if ratio > 1.0 {
            // A few blocks of a type with steps may be off by more, where an importance matrix had other values in mind.
            let odd = matches!(rule, Allowed::Steps { .. }) && ratio <= FAR && nearer(a, b);
            if odd {
                out.odd += 1
            } else {
                out.beyond += 1
            }
            if out.worst.is_none_or(|w| ratio > w.1) {
                let spot = Spot { row, col, len: a.len(), error, allowed: limit };
                out.worst = Some((spot, ratio));
            }
        }
    }
    out
}

/// Largest difference of a block, what is allowed, and how many times that it is (more than 1: beyond).
fn block(x: &[f64], y: &[f64], whole: &[f64], rule: Allowed, plain: bool) -> (f64, f64, f64) {
    let largest = |v: &[f64]| v.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    let times = |a: f64, b: f64| if a == 0.0 { 0.0 } else { a / b };
    let differences = || x.iter().zip(y).map(|(a, b)| (a - b).abs());
    let error = differences().fold(0.0f64, |m, d| if d.is_nan() { f64::NAN } else { m.max(d) });
    let square: f64 = differences().map(|d| d * d).sum();
    match rule {
        Allowed::Rounded(dtype) => {
            let mut worst = (error, 0.0, 0.0f64);
            for (a, b) in x.iter().zip(y) {
                let off = (dtype.round(*a) - b).abs();
                let limit = if plain { 0.0 } else { last_digit(dtype, *a) };
                let ratio = if off <= limit {
                    0.0
                } else if off.is_nan() {
                    f64::INFINITY
                } else {
                    f64::MAX.min(off / limit)
                };
                if ratio > worst.2 {
                    worst = (off, limit, ratio);
                }
            }
            worst
        }
        Allowed::Steps { step, range, coarse, .. } => {
            let span = if range {
                let (lo, hi) = x.iter().fold((0.0f64, 0.0f64), |(lo, hi), v| (lo.min(*v), hi.max(*v)));
                hi - lo
            } else {
                largest(x)
            };
            let (step, more) = (step * span, coarse * largest(whole));
            let limit = ELEMENT * step + more;
            let rms = (square / x.len() as f64).sqrt();
            let ratio = times(error, limit).max(times(rms, GROUP * step + more));
            (error, limit, if error.is_nan() { f64::NAN } else { ratio })
        }
        Allowed::Nearer(_) => {
            let size: f64 = x.iter().map(|v| v * v).sum();
            (error, largest(x), times(square, size))
        }
    }
}

/// Whether a block is nearer to the original than zero is.
fn nearer(x: &[f64], y: &[f64]) -> bool {
    let size: f64 = x.iter().map(|v| v * v).sum();
    x.iter().zip(y).map(|(a, b)| (a - b) * (a - b)).sum::<f64>() <= size
}

/// Distance of neighbours of a format at a value's size.
fn last_digit(dtype: DType, x: f64) -> f64 {
    let exponent = if x == 0.0 { dtype.min_exponent() } else { libm::ilogb(x).max(dtype.min_exponent()) };
    libm::exp2(f64::from(exponent) + 1.0 - f64::from(dtype.precision()))
}
