/*!
RMSNorm and rotary embedding in float64, with the casts that a contract declares.

Formulas: `y = x / √(mean x² + eps) · γ`; `(a, b) → (a·cos − b·sin, b·cos + a·sin)` for each pair.
*/

use crate::contract::{Contract, RopeAngle};
use crate::geometry::{Pairing, Rope};
use mla_numeric::{DType, U};
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

/// cos and sin, [rows, P/2] each.
pub type Table = (Array2<f64>, Array2<f64>);

/// cos and sin of each row's position, [rows, P/2] each, times the rope's magnitude, held in `dtype`.
pub fn rope_table(rope: &Rope, positions: &[u64], dtype: DType) -> Table {
    table(rope, positions, dtype, |p, f| p * f)
}

/// The same as a contract declares it: of exact angles, or of f32(position · f32(frequency)).
pub fn declared_table(rope: &Rope, positions: &[u64], contract: &Contract) -> Table {
    let f32 = |v| DType::F32.round(v);
    match contract.rope_angle {
        RopeAngle::Exact => rope_table(rope, positions, contract.rope_table),
        RopeAngle::F32 => table(rope, positions, contract.rope_table, |p, f| f32(p * f32(f))),
    }
}

fn table(rope: &Rope, positions: &[u64], dtype: DType, angle: impl Fn(f64, f64) -> f64) -> Table {
    let shape = (positions.len(), rope.inv_freq.len());
    let angle = |(i, j): (usize, usize)| angle(positions[i] as f64, rope.inv_freq[j]);
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

/// Rotated rows, with what bounds need; `[rows, width]` each.
pub struct Rotated {
    /// The rotation.
    pub y: Array2<f64>,
    /// |a·cos| + |b·sin|: the size of the terms that are added.
    pub size: Array2<f64>,
    /// How far the casts of the two products may step if each product errs by u of itself; empty without casts.
    pub steps: Array2<f64>,
}

/// Rotated rows, and for each element |a·cos| + |b·sin|: the size of the terms that were added.
pub fn rotate(
    x: ArrayView2<f64>,
    table: &Table,
    rows: impl Fn(usize) -> usize,
    pairing: Pairing,
) -> (Array2<f64>, Array2<f64>) {
    let r = rotate_cast(x, table, rows, pairing, None);
    (r.y, r.size)
}

/// The same with products rounded to `cast` before they are added.
pub fn rotate_cast(
    x: ArrayView2<f64>,
    table: &Table,
    rows: impl Fn(usize) -> usize,
    pairing: Pairing,
    cast: Option<DType>,
) -> Rotated {
    let zeros = || Array2::zeros(x.dim());
    let (mut y, mut size) = (zeros(), zeros());
    let mut steps = if cast.is_some() { zeros() } else { Array2::zeros((0, 0)) };
    let width = x.ncols();
    for i in 0..x.nrows() {
        let t = rows(i);
        for j in 0..width / 2 {
            let (ia, ib) = pair(pairing, j, width);
            let (a, b, c, s) = (x[[i, ia]], x[[i, ib]], table.0[[t, j]], table.1[[t, j]]);
            for (at, p, q) in [(ia, a * c, -(b * s)), (ib, b * c, a * s)] {
                size[[i, at]] = p.abs() + q.abs();
                y[[i, at]] = match cast {
                    None => p + q,
                    Some(d) => {
                        steps[[i, at]] = step(d, p, U * p.abs()) + step(d, q, U * q.abs());
                        d.round(p) + d.round(q)
                    }
                };
            }
        }
    }
    Rotated { y, size, steps }
}

/// Largest change of `cast(z)` when z moves by at most `by`.
pub fn step(cast: DType, z: f64, by: f64) -> f64 {
    let c = cast.round(z);
    (cast.round(z + by) - c).abs().max((cast.round(z - by) - c).abs())
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

    #[test]
    fn products_are_rounded_before_they_are_added() {
        // 1.0078125² = 1.01568604 lies between 1.015625 and 1.0234375; 1.0078125·3 = 3.0234375 is half way between
        // 3.015625 and 3.03125 and goes to the even one of 194/64.
        let x = 1.0078125;
        let table = (array![[x]], array![[3.0]]);
        let r = rotate_cast(array![[x, x]].view(), &table, |i| i, Pairing::Half, Some(DType::Bf16));
        let (square, triple) = (DType::Bf16.round(x * x), DType::Bf16.round(3.0 * x));
        assert_eq!((square, triple), (1.015625, 3.03125));
        assert_eq!(r.y, array![[square - triple, square + triple]]);
        // Only the product at the tie may step, by one spacing.
        assert_eq!(r.steps, array![[1.0 / 64.0, 1.0 / 64.0]]);
        let plain = rotate_cast(array![[x, x]].view(), &table, |i| i, Pairing::Half, None);
        assert_eq!(plain.y, array![[x * x - 3.0 * x, x * x + 3.0 * x]]);
        assert!(plain.steps.is_empty());
    }

    #[test]
    fn f32_angles_are_rounded_twice() {
        let rope = Rope { inv_freq: vec![0.1], magnitude: 1.0, pairing: Pairing::Adjacent };
        let c = Contract { rope_angle: RopeAngle::F32, ..Contract::exact() };
        let (cos, _) = declared_table(&rope, &[131_071], &c);
        let angle = f64::from((131_071f64 * f64::from(0.1f32)) as f32);
        assert_relative_eq!(cos[[0, 0]], angle.cos(), max_relative = 1e-12);
        assert!((cos[[0, 0]] - (131_071f64 * 0.1).cos()).abs() > 1e-5);
    }
}
