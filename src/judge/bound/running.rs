/*!
Bounds of one sum of products that know its partial sums: worth their price where a bound by norms says too little, and
where a law that takes terms for alike would be wrong of terms that are not.

With S_j the exact partial sums in the declared order, every rounding errs by `unit` of |S_j| (and a tensor core by what
it cuts off the terms of a block). That is *proven*, for accumulators whose declaration states the order.
*/

use mla_numeric::U;
use mla_reference::Accumulate;

/// Spacing of float32 below its smallest normal value.
const TINY: f64 = f64::from_bits((1023 - 149) << 52);
/// Standard deviations of a Brownian bridge that partial sums leave their straight line by: the probability of more is at
/// most 2exp(−2·4.5²), that of a score's statistical bound ([`super::LOG_P_SCORE`]).
const BRIDGE: f64 = 4.5;

/// |computed Σ a·w − Σ a·w| is at most this; None where the accumulator's order is not declared.
pub fn proven(accumulate: Accumulate, a: &[f64], w: &[f64]) -> Option<f64> {
    let (block, chain, unit, cut) = match accumulate {
        Accumulate::Rn { block, chain } => (block, chain, U, 0.0),
        Accumulate::Mma { k, bits } => (k, 0, 2.0 * U, (k as f64 + 1.0) * f64::powi(2.0, -(bits as i32))),
        _ => return None,
    };
    let (len, block) = (a.len().min(w.len()), block.max(1));
    let chain = if chain == 0 { len.max(1) } else { chain };
    let (mut total, mut error, mut size) = (0.0f64, 0.0f64, 0.0f64);
    for (a, w) in a.chunks(chain).zip(w.chunks(chain)) {
        let mut sum = 0.0f64;
        for (a, w) in a.chunks(block).zip(w.chunks(block)) {
            let mut largest = 0.0f64;
            for t in a.iter().zip(w).map(|(a, w)| a * w) {
                largest = largest.max(t.abs());
                size += t.abs();
                sum += t;
            }
            error += unit * sum.abs() + cut * largest.max(sum.abs());
        }
        total += sum;
        error += if chain < len { unit * total.abs() } else { 0.0 };
    }
    // Errors of errors, the float64 sum's own, and what underflow adds.
    let n = accumulate.roundings(len) as f64;
    Some(error * (1.0 + 2.0 * n * U) + (len + 1) as f64 * f64::EPSILON * size + n * TINY)
}

/// The same for any accumulator. Where the order is not declared it is taken to have nothing to do with the values: then
/// partial sums are a bridge from 0 to the sum, and |S_j| ≤ |Σ a·w| + 4.5·√Σ(a·w)² but for a probability of
/// 2exp(−2·4.5²); n truncations err by 2u of that each.
pub fn likely(accumulate: Accumulate, a: &[f64], w: &[f64]) -> f64 {
    if let Some(error) = proven(accumulate, a, w) {
        return error;
    }
    let len = a.len().min(w.len());
    let (mut sum, mut square, mut size) = (0.0f64, 0.0f64, 0.0f64);
    for t in a.iter().zip(w).map(|(a, w)| a * w) {
        sum += t;
        square += t * t;
        size += t.abs();
    }
    let any = accumulate.gamma(len) * size;
    let n = accumulate.roundings(len) as f64 * 2.0 * U;
    any.min(n / (1.0 - n) * (sum.abs() + BRIDGE * square.sqrt()) + (len + 1) as f64 * f64::EPSILON * size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_numeric::DType;

    fn value(i: usize, j: usize) -> f64 {
        ((i * 7919 + j * 104_729) as f64).sin().powi(3)
    }

    fn rows(i: usize, j: usize, n: usize) -> (Vec<f64>, Vec<f64>) {
        let of = |i: usize, by: usize| (0..n).map(|k| DType::Bf16.round(value(i, by * k))).collect();
        (of(i, 1), of(j + 11, 3))
    }

    /// A float32 sum of 2,048 products in blocks of 16, in plain loops: its error never passes the bound and uses a good
    /// part of it.
    #[test]
    fn sums_to_nearest_stay_within() {
        let accumulate = Accumulate::Rn { block: 16, chain: 0 };
        let mut most = 0.0f64;
        for (i, j) in (0..3).flat_map(|i| (0..4).map(move |j| (i, j))) {
            let (a, w) = rows(i, j, 2048);
            let (mut sum, mut exact) = (0.0, 0.0);
            for (a, w) in a.chunks(16).zip(w.chunks(16)) {
                let block: f64 = a.iter().zip(w).map(|(a, w)| a * w).sum();
                exact += block;
                sum = DType::F32.round(sum + block);
            }
            let bound = proven(accumulate, &a, &w).unwrap();
            assert!((sum - exact).abs() <= bound, "{i} {j}");
            most = most.max((sum - exact).abs() / bound);
        }
        assert!(most > 0.02, "{most}");
    }

    /// Truncated after each product in an order that is not declared: one large term first, so that each of the others
    /// costs a part of an ulp of it.
    #[test]
    fn sums_in_an_unknown_order_stay_within() {
        for accumulate in [Accumulate::Rz { block: 1 }, Accumulate::Unknown] {
            assert_eq!(proven(accumulate, &[1.0], &[1.0]), None);
            let mut most = 0.0f64;
            for i in 0..8 {
                let (mut a, w) = rows(i, 2, 512);
                a[i] = 300.0;
                let (mut sum, mut exact) = (0.0f64, 0.0);
                for (a, w) in a.iter().zip(&w) {
                    exact += a * w;
                    let near = sum + a * w;
                    let cut = DType::F32.round(near);
                    sum =
                        if cut.abs() > near.abs() { DType::F32.below(cut.abs()).copysign(near) } else { cut };
                }
                let bound = likely(accumulate, &a, &w);
                assert!((sum - exact).abs() <= bound, "{i}");
                most = most.max((sum - exact).abs() / bound);
            }
            assert!(most > 0.05, "{accumulate}: {most}");
        }
    }
}
