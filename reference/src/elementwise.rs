/*!
RMSNorm and rotary embedding in float64, with the casts that a contract declares.

Formulas: `y = x / √(mean x² + eps) · γ`; `(a, b) → (a·cos − b·sin, b·cos + a·sin)` for each pair.
*/

use crate::geometry::{Pairing, Rope};
use mla_numeric::DType;
use ndarray::{Array2, ArrayView2};

/// x before γ: [rows, width] divided by the root of its mean square plus `eps`.
pub fn normalise(x: ArrayView2<f64>, eps: f64) -> Array2<f64> {
    let mut y = x.to_owned();
    for mut row in y.rows_mut() {
        let mean = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
        let r = 1.0 / (mean + eps).sqrt();
        row.mapv_inplace(|v| v * r);
    }
    y
}

/// γ after [`normalise`]; `cast` rounds the normalised value before it is multiplied.
pub fn times_gamma(z: &Array2<f64>, gamma: &[f64], cast: Option<DType>) -> Array2<f64> {
    let mut y = z.clone();
    for mut row in y.rows_mut() {
        for (v, g) in row.iter_mut().zip(gamma) {
            *v = cast.map_or(*v, |d| d.round(*v)) * g;
        }
    }
    y
}

/// cos and sin of each row's position, [rows, P/2] each, times the rope's magnitude, held in `dtype`.
pub fn rope_table(rope: &Rope, positions: &[u64], dtype: DType) -> (Array2<f64>, Array2<f64>) {
    let shape = (positions.len(), rope.inv_freq.len());
    let angle = |(i, j): (usize, usize)| positions[i] as f64 * rope.inv_freq[j];
    let cos = Array2::from_shape_fn(shape, |at| dtype.round(libm::cos(angle(at)) * rope.magnitude));
    let sin = Array2::from_shape_fn(shape, |at| dtype.round(libm::sin(angle(at)) * rope.magnitude));
    (cos, sin)
}

/// The two columns of pair `j` of `width`.
pub const fn pair(pairing: Pairing, j: usize, width: usize) -> (usize, usize) {
    match pairing {
        Pairing::Adjacent => (2 * j, 2 * j + 1),
        Pairing::Half => (j, j + width / 2),
    }
}

/// Rotated rows, and for each element |a·cos| + |b·sin|: the size of the terms that were added.
pub fn rotate(
    x: ArrayView2<f64>,
    table: &(Array2<f64>, Array2<f64>),
    rows: impl Fn(usize) -> usize,
    pairing: Pairing,
) -> (Array2<f64>, Array2<f64>) {
    let (mut y, mut terms) = (Array2::zeros(x.dim()), Array2::zeros(x.dim()));
    let width = x.ncols();
    for i in 0..x.nrows() {
        let t = rows(i);
        for j in 0..width / 2 {
            let (ia, ib) = pair(pairing, j, width);
            let (a, b, c, s) = (x[[i, ia]], x[[i, ib]], table.0[[t, j]], table.1[[t, j]]);
            y[[i, ia]] = a * c - b * s;
            y[[i, ib]] = b * c + a * s;
            terms[[i, ia]] = (a * c).abs() + (b * s).abs();
            terms[[i, ib]] = (b * c).abs() + (a * s).abs();
        }
    }
    (y, terms)
}

/// L2 norms of blocks of 128 columns: [rows, ceil(width/128)].
pub fn block_norms(x: ArrayView2<f64>) -> Array2<f64> {
    let mut out = Array2::zeros((x.nrows(), x.ncols().div_ceil(128)));
    for (row, mut norms) in x.rows().into_iter().zip(out.rows_mut()) {
        let row = row.to_vec();
        for (n, part) in norms.iter_mut().zip(row.chunks(128)) {
            *n = part.iter().map(|v| v * v).sum::<f64>().sqrt();
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    #[test]
    fn norm_is_x_over_root_mean_square_plus_eps() {
        let z = normalise(array![[3.0, 4.0]].view(), 0.5);
        let y = times_gamma(&z, &[1.0, 2.0], None);
        // mean square 12.5, plus eps 13.
        assert_relative_eq!(y[[0, 0]], 3.0 / 13f64.sqrt(), max_relative = 1e-15);
        assert_relative_eq!(y[[0, 1]], 8.0 / 13f64.sqrt(), max_relative = 1e-15);
        // 3/√13 = 0.83205 lies between the bf16 values 213 and 214 of 1/256; 4/√13 = 1.10940 between 142 and 143 of 1/128.
        let y = times_gamma(&z, &[1.0, 2.0], Some(DType::Bf16));
        assert_eq!((y[[0, 0]], y[[0, 1]]), (213.0 / 256.0, 2.0 * 142.0 / 128.0));
    }

    #[test]
    fn rotation_is_a_complex_product() {
        let rope = Rope { inv_freq: vec![1.0, 0.1], magnitude: 1.0, pairing: Pairing::Adjacent };
        let t = rope_table(&rope, &[3], DType::F64);
        let x = array![[1.0, 2.0, 3.0, 4.0]];
        // (1 + 2i)·e^{3i}, (3 + 4i)·e^{0.3i}
        let (y, _) = rotate(x.view(), &t, |i| i, Pairing::Adjacent);
        let want = [3f64.cos() - 2.0 * 3f64.sin(), 2.0 * 3f64.cos() + 3f64.sin()];
        assert_relative_eq!(y[[0, 0]], want[0], max_relative = 1e-14);
        assert_relative_eq!(y[[0, 1]], want[1], max_relative = 1e-14);
        // (1 + 3i)·e^{3i} in columns 0 and 2.
        let (y, _) = rotate(x.view(), &t, |i| i, Pairing::Half);
        assert_relative_eq!(y[[0, 0]], 3f64.cos() - 3.0 * 3f64.sin(), max_relative = 1e-14);
        assert_relative_eq!(y[[0, 2]], 3.0 * 3f64.cos() + 3f64.sin(), max_relative = 1e-14);
    }
}
