/*!
Bounds: how far an honest engine may be from the reference before its final rounding, element by element.

All are *proven* for the declared contract: no statistics, no constant fitted to data. u = 2⁻²⁴.

- **Product**: γ·Σ|a·b| with Σ|a·b| ≤ Σ over blocks of 128 of ‖a‖‖b‖ (Cauchy–Schwarz) and γ by the number
  of accumulator roundings ([`Accumulate::gamma`](mla_reference::Accumulate::gamma)).
- **RMSNorm**: ρ|y|, ρ = ½(D/128 + 8)u + 2^-22.4 + 4u: 128 lanes and a tree of 7 for the sum (halved by the
  root), the mean and eps, an approximate reciprocal root, two products. A declared cast of the
  normalised value moves by at most one step of its grid: the larger of |cast(z ± ρ|z|) − cast(z)|.
- **RoPE**: 3u(|a·cos| + |b·sin|): two products and a sum; a temperature factor adds its own rounding and
  that of the product.
- **Attention**: with ε_t the bound of p_t's relative error
  `ε_t = Δs_t + max Δs + 6u·max|s| + (2⁻²² + u)(1 + r)` (Δs from the product bound; 6u·max|s|: products with
  scale·log₂e and with the maximum, their differences, which telescope; 2⁻²²: exp2, once for p and once for
  each of the r times that the running maximum grows and o and l are rescaled),
  `B_j = Σ_t (ε_t + n·unit) P_t |v_tj| + |x_j|(Σ_t ε_t P_t + λ) + Σ_{t near a tie} ulp(p_t) w_t |v_tj| / l`,
  λ = (tile + 2T/tile + 5)u: the row sum, in a tile and across tiles.
  Only a p within ε_t·p of the middle between two values of the cast's grid can be cast to the other one.
  n counts the roundings of P·V, three a tile for rescaling, six for the end.
- **lse**: `max ε + λ + 2u|lse|`: the row sum and the logarithm.
- **Merge**: each weight W_s errs by at most `e = 2(4u(spread + 1) + 2⁻²² + (splits + 6)u)` of itself, so
  `B = (e + (splits + 2)u) Σ W|o|`; lse: `e + 3u|lse|`.
- **Underflow**: below 2⁻¹²⁶ a float32 errs by up to 2⁻¹⁴⁹ whatever its size. Each rounding of a stage adds that,
  and a p may be flushed to zero: 2⁻¹²⁶|v_tj|/l. Nothing of it shows where values are of usual size.
*/

use mla_numeric::{DType, U};
use mla_reference::attention::{Attended, Head, part, strided, weigh};
use mla_reference::product::Rows;
use mla_reference::{Accumulate, Contract, RowSum, Terms};
use ndarray::Array2;

/// exp2 of a GPU's special function unit: largest relative error 2^-22.7 measured; declared 2^-22.
const EXP2: f64 = 1.0 / 4_194_304.0;
/// Spacing of float32 below its smallest normal value.
const TINY: f64 = f64::from_bits((1023 - 149) << 52);
/// Smallest normal float32.
const FLUSH: f64 = f32::MIN_POSITIVE as f64;

/// |value before the final rounding − x| ≤ this, for every element of a chunk.
pub fn bound(contract: &Contract, terms: &Terms, x: &Array2<f64>, temperature: bool) -> Array2<f64> {
    match terms {
        Terms::Copy => Array2::zeros(x.dim()),
        Terms::Product { len, size, .. } => {
            let gamma = contract.accumulate.gamma(*len);
            let tiny = contract.accumulate.roundings(*len) as f64 * TINY;
            size.mapv(|s| gamma * s + tiny)
        }
        Terms::Norm { len, z, gamma } => {
            let rho = 0.5 * (*len as f64 / 128.0 + 8.0) * U + f64::powf(2.0, -22.4) + 4.0 * U;
            let mut b = x.mapv(|y| rho * y.abs());
            for mut row in b.rows_mut() {
                row.iter_mut().zip(*gamma).for_each(|(b, g)| *b += (g.abs() + 1.0) * TINY);
            }
            if let Some(cast) = contract.norm_cast {
                for ((i, j), b) in b.indexed_iter_mut() {
                    let z = z[[i, j]];
                    *b = step(cast, z, rho * z.abs()) * gamma[j].abs() + U * x[[i, j]].abs();
                }
            }
            b
        }
        Terms::Rope { size, first } => {
            let k = if temperature { 5.0 } else { 3.0 };
            let mut b = size.mapv(|s| k * (U * s + TINY));
            b.slice_mut(ndarray::s![.., ..*first]).fill(0.0);
            b
        }
        Terms::Attention { attended, head, lse } => attention(contract, attended, head, *lse),
        Terms::Merge { spread, size, splits, lse } => {
            let n = *splits as f64;
            let mut b = Array2::zeros(x.dim());
            for ((i, j), b) in b.indexed_iter_mut() {
                let e = 2.0 * (4.0 * U * (spread[i] + 1.0) + EXP2 + (n + 6.0) * U);
                *b = if *lse { e + 3.0 * U * x[[i, j]].abs() } else { (e + (n + 2.0) * U) * size[[i, j]] };
            }
            b
        }
    }
}

/// Largest change of `cast(z)` when z moves by at most `by`.
fn step(cast: DType, z: f64, by: f64) -> f64 {
    let c = cast.round(z);
    (cast.round(z + by) - c).abs().max((cast.round(z - by) - c).abs())
}

/// Whether an error of `by` can move p across the middle between two values of the grid; the step then.
fn near_tie(cast: DType, p: f64, by: f64) -> Option<f64> {
    let s = step(cast, p, by);
    (s > 0.0).then_some(s)
}

/// L2 norms of rows.
fn norms(m: &dyn Rows) -> Vec<f64> {
    let mut row = vec![0.0; m.cols()];
    (0..m.rows())
        .map(|t| {
            m.decode(t, 0, &mut row);
            row.iter().map(|v| v * v).sum::<f64>().sqrt()
        })
        .collect()
}

fn attention(contract: &Contract, a: &Attended, head: &Head, lse: bool) -> Array2<f64> {
    let n = a.range.len();
    let rows = a.x.nrows();
    let keys = norms(&part(&head.k, a.range.clone()));
    let score = contract.accumulate.gamma(head.k.cols()) * head.scale.abs();
    let soft = &contract.softmax;
    let tile = if soft.tile == 0 { n.max(1) } else { soft.tile };
    let tiles = n.div_ceil(tile);
    let pv = (contract.accumulate.roundings(n) + 3 * tiles + 6) as f64 * contract.accumulate.unit();
    let pv = if contract.accumulate == Accumulate::Exact { 0.0 } else { pv };
    let sum = (tile as f64 + 2.0 * n as f64 / tile as f64 + 5.0) * U;
    let tiny = (contract.accumulate.roundings(n) + 3 * tiles + 6) as f64 * TINY;
    let mut weights = Array2::zeros((rows, n));
    let mut of_x = vec![0.0; rows];
    let mut of_lse = vec![0.0; rows];
    for i in 0..rows {
        if a.l[i] == 0.0 {
            continue;
        }
        let q = head.q.row(i).iter().map(|v| v * v).sum::<f64>().sqrt();
        let seen: Vec<usize> = (0..n).filter(|t| a.s[[i, *t]] > f64::NEG_INFINITY).collect();
        let ds = |t: usize| score * q * keys[t];
        let worst = seen.iter().map(|t| ds(*t)).fold(0.0, f64::max);
        let largest = seen.iter().map(|t| a.s[[i, *t]].abs()).fold(0.0, f64::max);
        let rescaled = seen.windows(2).filter(|t| a.w[[i, t[0]]] != a.w[[i, t[1]]]).count();
        let common = worst + 6.0 * U * largest + (EXP2 + U) * (1 + rescaled) as f64;
        let (mut moved, mut most) = (0.0, 0.0f64);
        for &t in &seen {
            let e = ds(t) + common;
            let p = a.p[[i, t]];
            let share = p * a.w[[i, t]] / a.l[i];
            let mut w = (e + pv) * share + FLUSH * a.w[[i, t]] / a.l[i];
            of_x[i] += e * share;
            most = most.max(e);
            if let Some(step) = soft.p.and_then(|d| near_tie(d, p, e * p)) {
                let flip = step * a.w[[i, t]] / a.l[i];
                w += flip;
                moved += flip;
            }
            weights[[i, t]] = w;
        }
        of_x[i] += sum;
        of_lse[i] = most + sum + 2.0 * U * a.lse[i].abs();
        if soft.row_sum == RowSum::Rounded {
            of_x[i] += moved;
            of_lse[i] += moved;
        }
    }
    if lse {
        return Array2::from_shape_vec((rows, 1), of_lse).unwrap_or_default();
    }
    let mut v = mla_reference::rows::dense(&part(&head.v, a.range.clone()), 0..n, false);
    v.mapv_inplace(f64::abs);
    let mut b = weigh(weights.view(), &strided(&v));
    for (i, mut row) in b.rows_mut().into_iter().enumerate() {
        for (j, b) in row.iter_mut().enumerate() {
            *b += a.x[[i, j]].abs() * of_x[i] + tiny;
        }
    }
    b
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use mla_reference::attention::attend;
    use ndarray::{Array2, array};

    fn contract() -> Contract {
        Contract { accumulate: Accumulate::Rn { block: 16, chain: 0 }, ..Contract::exact() }
    }

    fn of(contract: &Contract, terms: &Terms, x: Array2<f64>, temperature: bool) -> Array2<f64> {
        bound(contract, terms, &x, temperature)
    }

    fn near(got: f64, want: f64) {
        assert_relative_eq!(got, want, max_relative = 1e-12);
    }

    /// 64 products in blocks of 16 into one chain: 4 roundings and one for the total; float64's own 65.
    #[test]
    fn products_count_their_roundings() {
        let (a, w) = (Array2::zeros((1, 64)), Array2::zeros((1, 64)));
        let terms = Terms::Product {
            len: 64,
            size: array![[3.0]].into(),
            a_norms: vec![1.0].into(),
            w_norms: vec![1.0].into(),
            a: a.view(),
            w: &strided(&w),
        };
        let gamma = 5.0 * U / (1.0 - 5.0 * U) + 65.0 * f64::powi(2.0, -53);
        near(of(&contract(), &terms, array![[0.1]], false)[[0, 0]], 3.0 * gamma);
        assert_eq!(of(&contract(), &Terms::Copy, array![[7.0]], false)[[0, 0]], 0.0);
    }

    /// 256 values: 2 additions a lane, a tree of 7 and the square, halved: 5u; root 2^-22.4; 4u.
    #[test]
    fn norms_and_their_cast() {
        let rho = 9.0 * U + f64::powf(2.0, -22.4);
        // 1 + 2^-8 is half way between two bf16 values, 1.25 is one of them.
        let (z, gamma) = (array![[1.0 + 1.0 / 256.0, 1.25]], [-2.0, 2.0]);
        let terms = |z: &Array2<f64>| Terms::Norm { len: 256, z: z.clone().into(), gamma: &gamma };
        let b = of(&contract(), &terms(&z), array![[-2.0 - 1.0 / 128.0, 2.5]], false);
        near(b[[0, 0]], rho * (2.0 + 1.0 / 128.0));
        near(b[[0, 1]], rho * 2.5);
        let cast = Contract { norm_cast: Some(DType::Bf16), ..contract() };
        let b = of(&cast, &terms(&z), array![[-2.0, 2.5]], false);
        near(b[[0, 0]], 2.0 / 128.0 + 2.0 * U);
        near(b[[0, 1]], 2.5 * U);
    }

    #[test]
    fn rotations_and_copies_beside_them() {
        let terms = Terms::Rope { size: array![[9.0, 2.0]].into(), first: 1 };
        let b = of(&contract(), &terms, array![[9.0, 1.0]], false);
        assert_eq!(b[[0, 0]], 0.0);
        near(b[[0, 1]], 6.0 * U);
        let terms = Terms::Rope { size: array![[9.0, 2.0]].into(), first: 0 };
        near(of(&contract(), &terms, array![[9.0, 1.0]], true)[[0, 1]], 10.0 * U);
    }

    #[test]
    fn merges_by_the_distance_of_their_parts() {
        let e = 2.0 * (4.0 * U * 3.0 + EXP2 + 10.0 * U);
        let terms = |lse| Terms::Merge { spread: vec![2.0], size: array![[3.0]], splits: 4, lse };
        near(of(&contract(), &terms(false), array![[1.0]], false)[[0, 0]], (e + 6.0 * U) * 3.0);
        near(of(&contract(), &terms(true), array![[-5.0]], false)[[0, 0]], e + 15.0 * U);
    }

    /// Bounds of o and lse of one query 1 over these keys, with values v.
    fn attended(contract: &Contract, k: Array2<f64>, v: Array2<f64>) -> (f64, f64) {
        let q = array![[1.0]];
        let visible = [k.nrows()];
        let head = Head { q: q.view(), k: strided(&k), v: strided(&v), visible: &visible, scale: 1.0 };
        let a = attend(&head, 0..k.nrows(), contract);
        let b = |lse| {
            let x = if lse { array![[a.lse[0]]] } else { a.x.clone() };
            of(contract, &Terms::Attention { attended: &a, head: &head, lse }, x, false)[[0, 0]]
        };
        (b(false), b(true))
    }

    /// One key, s = 0.5, v = 2: one product is 2 roundings; P·V 2 + 3 for a tile + 6; the row sum 1 + 2 + 5.
    #[test]
    fn attention_over_one_key() {
        let ds = 0.5 * (2.0 * U / (1.0 - 2.0 * U) + 2.0 * f64::powi(2.0, -53));
        let e = 2.0 * ds + 6.0 * U * 0.5 + EXP2 + U;
        let (o, lse) = attended(&contract(), array![[0.5]], array![[2.0]]);
        near(o, 2.0 * (e + 11.0 * U) + 2.0 * (e + 8.0 * U));
        near(lse, e + 8.0 * U + 2.0 * U * 0.5);
    }

    /// p = 1 − 2^-9 lies half way between two bf16 values, 2^-8 apart: either may come out.
    #[test]
    fn a_probability_near_a_tie_may_be_cast_to_either_side() {
        let p: f64 = 1.0 - 1.0 / 512.0;
        let step = 1.0 / 256.0 / (1.0 + p);
        let v = array![[0.0], [1.0]];
        for (row_sum, of_lse, of_o) in
            [(RowSum::Unrounded, 0.0, step), (RowSum::Rounded, step, step + step * 0.5)]
        {
            let mut c = contract();
            (c.softmax.p, c.softmax.row_sum) = (Some(DType::Bf16), row_sum);
            // What is not of the tie is some u; step itself depends on which side l takes.
            let (o, lse) = attended(&c, array![[0.0], [p.ln()]], v.clone());
            assert!((o - of_o).abs() < 0.01 * step && (lse - of_lse).abs() < 0.01 * step, "{o} {lse}");
            let (o, lse) = attended(&c, array![[0.0], [0.75f64.ln()]], v.clone());
            assert!(o < 0.01 * step && lse < 0.01 * step, "{o} {lse}");
        }
    }
}
