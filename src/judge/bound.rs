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
- **Sum** of the parts of n ranks in float32, in whatever order: every partial sum is at most Σ|part|, and each of the
  n − 1 additions errs by at most u of its own: (n − 1)u/(1 − (n − 1)u) · Σ|part|.
- **Underflow**: below 2⁻¹²⁶ a float32 errs by up to 2⁻¹⁴⁹ whatever its size. Each rounding of a stage adds that,
  and a p may be flushed to zero: 2⁻¹²⁶|v_tj|/l. Nothing of it shows where values are of usual size.
*/

pub mod attention;
pub mod running;

pub use attention::{Basis, LOG_P_SCORE};

use mla_numeric::U;
use mla_reference::elementwise::step;
use mla_reference::{Contract, Terms};
use ndarray::{Array2, ArrayView2};

/// exp2 of a GPU's special function unit: largest relative error 2^-22.7 measured; declared 2^-22.
const EXP2: f64 = 1.0 / 4_194_304.0;
/// Spacing of float32 below its smallest normal value.
const TINY: f64 = f64::from_bits((1023 - 149) << 52);
/// Smallest normal float32.
const FLUSH: f64 = f32::MIN_POSITIVE as f64;

/// |value before the final rounding − x| ≤ this, for every element of a chunk.
pub fn bound(contract: &Contract, terms: &Terms, x: ArrayView2<f64>, temperature: bool) -> Array2<f64> {
    of(Basis::Proven, contract, terms, x, temperature)
}

/// The same from the statistical error of scores ([`Basis::Statistical`]): for attention and lse, before and after
/// internal merges. Of products with a truncating accumulator γ with 2u a rounding, as if a tensor core summed a block
/// exactly: 1.4 million outputs of real ones used 0.15 of it at most. Of products that round to nearest λ√n·u in place of
/// n·u: n independent errors of mean 0, each at most u·Σ|a·b|, add up to more than λ√n times that with a probability of
/// at most 2exp(−λ²/2) (Hoeffding). Of other stages the proven bound.
///
/// Breaking it is evidence that draws from the budget of the run: [`LOG_P_SCORE`] a score.
pub fn statistical(contract: &Contract, terms: &Terms, x: ArrayView2<f64>, temperature: bool) -> Array2<f64> {
    of(Basis::Statistical, contract, terms, x, temperature)
}

/// The statistical bound of attention and lse with the error of each score from its own terms ([`running::likely`]): the
/// other one takes terms for alike in size, and where few of them are nearly all of a score, an honest engine may err by
/// more. Costs as much as the scores themselves.
pub fn closer(contract: &Contract, terms: &Terms, x: ArrayView2<f64>, temperature: bool) -> Array2<f64> {
    of(Basis::Closer, contract, terms, x, temperature)
}

/// ρ of an RMSNorm over `len` values.
pub fn rho(len: usize) -> f64 {
    0.5 * (len as f64 / 128.0 + 8.0) * U + f64::powf(2.0, -22.4) + 4.0 * U
}

fn of(
    basis: Basis,
    contract: &Contract,
    terms: &Terms,
    x: ArrayView2<f64>,
    temperature: bool,
) -> Array2<f64> {
    match terms {
        Terms::Copy => Array2::zeros(x.dim()),
        Terms::Product { len, size, .. } => {
            let gamma = match basis {
                Basis::Statistical | Basis::Closer if contract.accumulate.drifts() => {
                    let n = contract.accumulate.roundings(*len) as f64 * 2.0 * U;
                    n / (1.0 - n) + (*len as f64 + 1.0) * f64::EPSILON / 2.0
                }
                Basis::Statistical | Basis::Closer
                    if matches!(contract.accumulate, mla_reference::Accumulate::Rn { .. }) =>
                {
                    let n = contract.accumulate.roundings(*len) as f64;
                    // The second term: errors of errors.
                    attention::LAMBDA * n.sqrt() * U
                        + (n * U).powi(2)
                        + (*len as f64 + 1.0) * f64::EPSILON / 2.0
                }
                _ => contract.accumulate.gamma(*len),
            };
            let tiny = contract.accumulate.roundings(*len) as f64 * TINY;
            size.mapv(|s| gamma * s + tiny)
        }
        Terms::Norm { len, z, gamma } => {
            let rho = rho(*len);
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
            attention::range(basis, contract, attended, head, !lse).of(*lse)
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
        Terms::Sum { size, parts } => {
            let n = parts.saturating_sub(1) as f64 * U;
            size.mapv(|s| n / (1.0 - n) * s)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use mla_numeric::DType;
    use mla_reference::attention::{Head, attend, attend_split, strided};
    use mla_reference::{Accumulate, KeyStats, RowSum};
    use ndarray::{Array2, array};

    fn contract() -> Contract {
        Contract { accumulate: Accumulate::Rn { block: 16, chain: 0 }, ..Contract::exact() }
    }

    fn of(contract: &Contract, terms: &Terms, x: Array2<f64>, temperature: bool) -> Array2<f64> {
        super::bound(contract, terms, x.view(), temperature)
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
        // The statistical one grows with the root of 5 to nearest (9 standard deviations), and is 2u a rounding where it
        // truncates, here four.
        let hoeffding = 9.0 * 5f64.sqrt() * U + (5.0 * U).powi(2) + 65.0 * f64::powi(2.0, -53);
        near(statistical(&contract(), &terms, array![[0.1]].view(), false)[[0, 0]], 3.0 * hoeffding);
        let mma = Contract { accumulate: Accumulate::Mma { k: 16, bits: 25 }, ..Contract::exact() };
        let gamma = 8.0 * U / (1.0 - 8.0 * U) + 65.0 * f64::powi(2.0, -53);
        near(statistical(&mma, &terms, array![[0.1]].view(), false)[[0, 0]], 3.0 * gamma);
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
        // Casts of products step besides.
        let steps = array![[0.0, 0.5]].into();
        let terms = Terms::Rope { size: array![[9.0, 2.0]].into(), first: 0, steps };
        near(of(&contract(), &terms, array![[9.0, 1.0]], false)[[0, 1]], 6.0 * U + 0.5);
    }

    #[test]
    fn merges_by_the_distance_of_their_parts() {
        let e = 2.0 * (4.0 * U * 3.0 + EXP2 + 10.0 * U);
        let terms = |lse| Terms::Merge { spread: vec![2.0], size: array![[3.0]], splits: 4, lse };
        near(of(&contract(), &terms(false), array![[1.0]], false)[[0, 0]], (e + 6.0 * U) * 3.0);
        near(of(&contract(), &terms(true), array![[-5.0]], false)[[0, 0]], e + 15.0 * U);
    }

    /// Eight parts: seven additions of at most u·Σ|part|.
    #[test]
    fn sums_of_ranks_by_their_size() {
        let terms = Terms::Sum { size: array![[3.0]].into(), parts: 8 };
        near(of(&contract(), &terms, array![[0.5]], false)[[0, 0]], 21.0 * U / (1.0 - 7.0 * U));
        let one = Terms::Sum { size: array![[3.0]].into(), parts: 1 };
        assert_eq!(of(&contract(), &one, array![[3.0]], false)[[0, 0]], 0.0);
    }

    /// Bounds of o and lse of one query 1 over these keys, with values v.
    fn attended(contract: &Contract, k: Array2<f64>, v: Array2<f64>) -> (f64, f64) {
        let q = array![[1.0]];
        let visible = [k.nrows()];
        let head = Head {
            q: q.view(),
            k: strided(&k),
            v: strided(&v),
            visible: &visible,
            scale: 1.0,
            stats: &KeyStats::default(),
        };
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

    /// Two splits of one key each, weights ½: bounds of the merge.
    fn two_splits(contract: &Contract, v: Array2<f64>) -> (f64, f64) {
        let (k, q) = (array![[0.0], [0.0]], array![[1.0]]);
        let stats = KeyStats::default();
        let (keys, values) = (strided(&k), strided(&v));
        let head = Head { q: q.view(), k: keys, v: values, visible: &[2], scale: 1.0, stats: &stats };
        let m = attend_split(&head, &[0..1, 1..2], contract);
        let b = |lse| {
            let x = if lse { array![[m.lse[0]]] } else { m.x.clone() };
            of(contract, &Terms::Split { merged: &m, head: &head, lse }, x, false)[[0, 0]]
        };
        (b(false), b(true))
    }

    /// A partial result half way between two bf16 values, 2^-7 apart, may be stored as either.
    #[test]
    fn partials_of_sixteen_bits_step() {
        let narrow = Contract { partials: DType::Bf16, ..contract() };
        let tie = 1.0 + 1.0 / 256.0;
        let half = 0.5 / 128.0;
        let small = 1e-3 * half;
        let near = |got: f64, want: f64| assert!((got - want).abs() < small, "{got} {want}");
        near(two_splits(&narrow, array![[tie], [1.0]]).0, half);
        near(two_splits(&narrow, array![[1.25], [1.0]]).0, 0.0);
        near(two_splits(&contract(), array![[tie], [1.0]]).0, 0.0);
        // One state of both, (1 + 1.0078125)/2, at a tie itself: as it is stored again, so it steps.
        let twice = Contract { merge_groups: Some(1), ..narrow };
        near(two_splits(&twice, array![[1.0078125], [1.0]]).0, 1.0 / 128.0);
    }

    /// By hand: e = 2Δs + (6u·0 + 2⁻²² + u) of each part, λ = 8u, 2u·0; the weight's 4u(ln 2 + 1) + 2⁻²² + 8u.
    #[test]
    fn lse_of_merged_splits() {
        // γ of one product in blocks of 16: two roundings; keys are 0, so scores err by nothing.
        let e = EXP2 + U;
        let z = e + 8.0 * U + 4.0 * U * (2f64.ln() + 1.0) + EXP2 + 8.0 * U;
        let eta = z.exp_m1();
        let (x, lse) = two_splits(&contract(), array![[1.0], [1.0]]);
        near(lse, eta / (1.0 - eta) + 3.0 * U * 2f64.ln());
        // Both values are 1: errors of weights cancel; each part errs by (e + 11u) + (e + 8u).
        let part = 2.0 * e + 19.0 * U;
        near(x, (1.0 + 2.0 * eta) * part / (1.0 - eta) + 4.0 * U);
    }

    /// 2⁻⁸ of every value and half the smallest step; and of the row sum where it takes cast P.
    #[test]
    fn a_cast_of_unknown_place() {
        let mut c = contract();
        (c.softmax.p, c.softmax.emulate) = (Some(DType::Bf16), false);
        let (o, lse) = attended(&c, array![[0.0], [0.1]], array![[1.0], [-1.0]]);
        assert!((o * 256.0 - 1.0).abs() < 1e-2 && lse < 1e-5, "{o} {lse}");
        c.softmax.row_sum = RowSum::Rounded;
        let (o, lse) = attended(&c, array![[0.0], [0.1]], array![[1.0], [-1.0]]);
        // |x| = tanh 0.05.
        assert!((o * 256.0 - 1.0 - 0.05f64.tanh()).abs() < 1e-2 && (lse * 256.0 - 1.0).abs() < 1e-2);
    }

    /// A rounded score at a tie moves p by a whole step of the score.
    #[test]
    fn casts_of_scores_step() {
        let mut c = Contract { activations: DType::Bf16, ..contract() };
        c.softmax.cast_raw = true;
        let lse = |c: &Contract, k: f64| attended(c, array![[k]], array![[1.0]]).1;
        assert!((lse(&c, 1.0 + 1.0 / 256.0) * 128.0 / 2.0 - 1.0).abs() < 1e-2);
        assert!(lse(&c, 1.25) < 1e-5);
    }

    /// The statistical bound is the narrower one, and 12 units of u√n‖q‖‖k‖/√D for tensor cores.
    #[test]
    fn statistical_errors_of_scores() {
        let c = Contract { accumulate: Accumulate::Mma { k: 16, bits: 25 }, ..Contract::exact() };
        let (k, q) = (Array2::from_elem((1, 64), 1.0), Array2::from_elem((1, 64), 1.0 / 64.0));
        let stats = KeyStats::default();
        let (keys, v) = (strided(&k), array![[1.0]]);
        let head = Head { q: q.view(), k: keys, v: strided(&v), visible: &[1], scale: 1.0, stats: &stats };
        let a = attend(&head, 0..1, &c);
        let terms = Terms::Attention { attended: &a, head: &head, lse: true };
        let x = array![[a.lse[0]]];
        let got = statistical(&c, &terms, x.view(), false)[[0, 0]];
        // n = 4, ‖q‖‖k‖ = 1, √D = 8: 3u, twice.
        near(got, 2.0 * 3.0 * U + 6.0 * U + EXP2 + U + 8.0 * U + 2.0 * U);
        assert!(got < bound(&c, &terms, x.view(), false)[[0, 0]]);
        // 2·exp(−40.5).
        assert_relative_eq!(LOG_P_SCORE.exp(), 5.15e-18, max_relative = 1e-2);
    }

    /// One product that is nearly all of a score, before 35 blocks that a truncating accumulator loses: the statistical bound
    /// takes terms for alike and is broken by an honest engine; a closer look is not, and is within the proven one.
    #[test]
    fn scores_of_few_terms_take_a_closer_look() {
        let c = Contract { accumulate: Accumulate::Mma { k: 16, bits: 25 }, ..Contract::exact() };
        let lost = 0.9 * f64::powi(2.0, -17) / 16.0;
        // Both keys score 64 in float32; the first one is 560 · lost more.
        let q = Array2::from_shape_fn((1, 576), |(_, d)| if d < 16 { 2.0 } else { 1.0 });
        let k = Array2::from_shape_fn((2, 576), |(t, d)| match (t, d < 16) {
            (_, true) => 2.0,
            (0, false) => lost,
            _ => 0.0,
        });
        let (stats, v) = (KeyStats::default(), array![[1.0], [-1.0]]);
        let (keys, values) = (strided(&k), strided(&v));
        let head = Head { q: q.view(), k: keys, v: values, visible: &[2], scale: 1.0, stats: &stats };
        let a = attend(&head, 0..2, &c);
        let terms = Terms::Attention { attended: &a, head: &head, lse: false };
        // The engine's two scores are equal: its output is 0.
        let off = a.x[[0, 0]].abs();
        // float64 sums err by up to 560 half ulps of 64, 4e-12, in a difference of 2.4e-4.
        assert_relative_eq!(off, (560.0 * lost / 2.0).tanh(), max_relative = 2e-8);
        let [narrow, look, proven] =
            [statistical, closer, bound].map(|of| of(&c, &terms, a.x.view(), false)[[0, 0]]);
        assert!(narrow < off && off < look && look <= proven, "{narrow} {off} {look} {proven}");
    }
}
