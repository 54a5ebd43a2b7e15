/*!
Bounds: how far an honest engine may be from the reference before its final rounding, element by element.

[`bound`] is *proven* for the declared contract: no statistics, no constant fitted to data. u = 2⁻²⁴.
[`statistical`] is narrower for attention and lse, and may be broken by an honest engine with a probability
that its derivation states.

- **Product**: γ·Σ|a·b| with Σ|a·b| ≤ Σ over blocks of 128 of ‖a‖‖b‖ (Cauchy–Schwarz) and γ by the number
  of accumulator roundings ([`Accumulate::gamma`](mla_reference::Accumulate::gamma)).
- **RMSNorm**: ρ|y|, ρ = ½(D/128 + 8)u + 2^-22.4 + 4u: 128 lanes and a tree of 7 for the sum (halved by the
  root), the mean and eps, an approximate reciprocal root, two products. A declared cast of the
  normalised value moves by at most one step of its grid: the larger of |cast(z ± ρ|z|) − cast(z)|.
- **RoPE**: 3u(|a·cos| + |b·sin|): two products and a sum; a temperature factor adds its own rounding and
  that of the product. Declared casts of the products: what an error of u moves them by, besides.
- **Attention**, one range of keys or several that the engine merges: [`attention`].
- **Merge**: each weight W_s errs by at most `e = 2(4u(spread + 1) + 2⁻²² + (splits + 6)u)` of itself, so
  `B = (e + (splits + 2)u) Σ W|o|`; lse: `e + 3u|lse|`.
- **Underflow**: below 2⁻¹²⁶ a float32 errs by up to 2⁻¹⁴⁹ whatever its size. Each rounding of a stage adds that,
  and a p may be flushed to zero: 2⁻¹²⁶|v_tj|/l. Nothing of it shows where values are of usual size.
*/

pub mod attention;

pub use attention::{Basis, LOG_P_SCORE};

use mla_numeric::U;
use mla_reference::elementwise::step;
use mla_reference::{Contract, Terms};
use ndarray::Array2;

/// exp2 of a GPU's special function unit: largest relative error 2^-22.7 measured; declared 2^-22.
const EXP2: f64 = 1.0 / 4_194_304.0;
/// Spacing of float32 below its smallest normal value.
const TINY: f64 = f64::from_bits((1023 - 149) << 52);
/// Smallest normal float32.
const FLUSH: f64 = f32::MIN_POSITIVE as f64;

/// |value before the final rounding − x| ≤ this, for every element of a chunk.
pub fn bound(contract: &Contract, terms: &Terms, x: &Array2<f64>, temperature: bool) -> Array2<f64> {
    of(Basis::Proven, contract, terms, x, temperature)
}

/// The same from the statistical error of scores ([`Basis::Statistical`]): for attention and lse, before and after
/// internal merges. Of other stages the proven bound.
///
/// Breaking it is evidence that draws from the budget of the run: [`LOG_P_SCORE`] a score.
pub fn statistical(contract: &Contract, terms: &Terms, x: &Array2<f64>, temperature: bool) -> Array2<f64> {
    of(Basis::Statistical, contract, terms, x, temperature)
}

fn of(basis: Basis, contract: &Contract, terms: &Terms, x: &Array2<f64>, temperature: bool) -> Array2<f64> {
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
        Terms::Rope { size, first, steps } => {
            let k = if temperature { 5.0 } else { 3.0 };
            let mut b = size.mapv(|s| k * (U * s + TINY));
            if !steps.is_empty() {
                let turned = b.ncols().saturating_sub(steps.ncols());
                b.slice_mut(ndarray::s![.., turned..]).zip_mut_with(steps, |b, s| *b += s);
            }
            b.slice_mut(ndarray::s![.., ..*first]).fill(0.0);
            b
        }
        Terms::Attention { attended, head, lse } => {
            attention::range(basis, contract, attended, head).of(*lse)
        }
        Terms::Split { merged, head, lse } => attention::merged(basis, contract, merged, head).of(*lse),
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

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use mla_numeric::DType;
    use mla_reference::attention::{Head, attend, strided};
    use mla_reference::{Accumulate, KeyStats, RowSum};
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
        let none = || Array2::zeros((0, 0)).into();
        let terms = Terms::Rope { size: array![[9.0, 2.0]].into(), first: 1, steps: none() };
        let b = of(&contract(), &terms, array![[9.0, 1.0]], false);
        assert_eq!(b[[0, 0]], 0.0);
        near(b[[0, 1]], 6.0 * U);
        let terms = Terms::Rope { size: array![[9.0, 2.0]].into(), first: 0, steps: none() };
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
        let head = Head { q: q.view(), k: strided(&k), v: strided(&v), visible: &visible, scale: 1.0, stats: &KeyStats::default() };
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
