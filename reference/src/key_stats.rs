/*!
What bounds and statistics need of keys and values alone: norms, maxima, sizes of columns.

All heads of one latent cache share keys and values, and every chunk of rows of a head does; so these are
computed once, when first asked for, and kept beside the keys.
*/

use crate::attention::{Head, part};
use crate::product::{Rows, Strided};
use ndarray::Array2;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Keys in a page of maxima.
pub const PAGE: usize = 8;
/// Factor of a column that holds nothing: divides by no zero, and weighs nothing.
pub const EMPTY: f64 = 1e-30;

/// Filled lazily; belongs to one `k` and one `v`.
#[derive(Default)]
pub struct KeyStats {
    norms: OnceLock<Vec<f64>>,
    ranges: Mutex<BTreeMap<(usize, usize), Arc<RangeStats>>>,
}

/// Of the values of a range of keys.
pub struct RangeStats {
    /// Largest |v_tj| of every [`PAGE`] keys, `[pages, value width]`.
    pub maxima: Array2<f64>,
    /// c_j: root mean square of each column of values, divided by the root mean square of these.
    pub factors: Vec<f64>,
    /// Mean over columns of (v_tj/c_j)², for each key.
    pub squares: Vec<f64>,
}

impl KeyStats {
    /// L2 norms of all keys.
    pub fn norms(&self, head: &Head) -> &[f64] {
        self.norms.get_or_init(|| {
            let mut row = vec![0.0; head.k.cols()];
            let norm = |t| {
                head.k.decode(t, 0, &mut row);
                row.iter().map(|v| v * v).sum::<f64>().sqrt()
            };
            (0..head.k.rows()).map(norm).collect()
        })
    }

    /// Root mean square of all elements of a range of keys.
    pub fn key_rms(&self, head: &Head, range: Range<usize>) -> f64 {
        let norms = self.norms(head).get(range).unwrap_or_default();
        let elements = (norms.len() * head.k.cols()).max(1) as f64;
        (norms.iter().map(|k| k * k).sum::<f64>() / elements).sqrt()
    }

    /// Of the values of a range of keys.
    pub fn range(&self, head: &Head, range: Range<usize>) -> Arc<RangeStats> {
        let key = (range.start, range.end);
        let lock = || self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = lock().get(&key) {
            return found.clone();
        }
        // Two threads may both compute it: the same numbers.
        let made = Arc::new(RangeStats::new(&part(&head.v, range)));
        lock().insert(key, made.clone());
        made
    }
}

impl RangeStats {
    fn new(v: &Strided) -> RangeStats {
        let (n, width) = (v.rows(), v.cols());
        let row = |t: usize| v.data.get(t * v.stride..).and_then(|v| v.get(..width)).unwrap_or_default();
        let mut maxima = Array2::zeros((n.div_ceil(PAGE), width));
        let mut sums = vec![0.0; width];
        for (page, mut maxima) in maxima.rows_mut().into_iter().enumerate() {
            let Some(maxima) = maxima.as_slice_mut() else { continue };
            for t in page * PAGE..n.min((page + 1) * PAGE) {
                for ((m, s), v) in maxima.iter_mut().zip(&mut sums).zip(row(t)) {
                    // In the form of the processor's own max; NaN is passed over.
                    *m = if v.abs() > *m { v.abs() } else { *m };
                    *s += v * v;
                }
            }
        }
        let sizes = sums.into_iter().map(|s| (s / n.max(1) as f64).sqrt()).collect();
        let factors = relative(sizes);
        let inverse: Vec<f64> = factors.iter().map(|c| 1.0 / c).collect();
        let square = |t: usize| {
            // Four sums at a time: one would wait for each addition.
            let mut sums = [0.0; 4];
            let (row, whole) = (row(t), width / 4 * 4);
            for (v, c) in row.chunks_exact(4).zip(inverse.chunks_exact(4)) {
                (0..4).for_each(|k| sums[k] += (v[k] * c[k]) * (v[k] * c[k]));
            }
            let rest = row.iter().zip(&inverse).skip(whole).map(|(v, c)| (v * c) * (v * c)).sum::<f64>();
            (sums.iter().sum::<f64>() + rest) / width.max(1) as f64
        };
        let squares = (0..n).map(square).collect();
        RangeStats { maxima, factors, squares }
    }
}

/// Sizes of columns divided by their own root mean square; [`EMPTY`] for those of size 0.
pub fn relative(sizes: Vec<f64>) -> Vec<f64> {
    let all = (sizes.iter().map(|v| v * v).sum::<f64>() / sizes.len().max(1) as f64).sqrt();
    sizes.into_iter().map(|c| if c > 0.0 { c / all } else { EMPTY }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::strided;
    use approx::assert_relative_eq;
    use ndarray::array;

    #[test]
    fn ranges_know_their_own_keys() {
        let k = Array2::from_shape_fn((20, 2), |(t, j)| if j == 0 { 3.0 } else { 4.0 } * (t as f64));
        let v = Array2::from_shape_fn((20, 3), |(t, j)| [-(t as f64), 1.0, 0.0][j]);
        let q = array![[0.0, 0.0]];
        let stats = KeyStats::default();
        let head =
            Head { q: q.view(), k: strided(&k), v: strided(&v), visible: &[20], scale: 1.0, stats: &stats };
        assert_relative_eq!(stats.norms(&head)[7], 35.0);
        let r = stats.range(&head, 4..17);
        assert_eq!(r.maxima, array![[11.0, 1.0, 0.0], [16.0, 1.0, 0.0]]);
        // Keys 4 to 16: Σt² = 1482; elements 13·2, squares (9 + 16)·1482.
        assert_relative_eq!(
            stats.key_rms(&head, 4..17),
            (25.0 * 1482.0 / 26.0f64).sqrt(),
            max_relative = 1e-14
        );
        let (a, b) = ((1482.0 / 13.0f64).sqrt(), 1.0);
        let all = ((a * a + b * b) / 3.0).sqrt();
        assert_relative_eq!(r.factors[0], a / all, max_relative = 1e-14);
        assert_eq!(r.factors[2], EMPTY);
        let want = ((5.0 / r.factors[0]).powi(2) + (1.0 / r.factors[1]).powi(2)) / 3.0;
        assert_relative_eq!(r.squares[1], want, max_relative = 1e-14);
        assert!(Arc::ptr_eq(&r, &stats.range(&head, 4..17)));
    }
}
