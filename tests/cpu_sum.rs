//! The engine's sum against whole-number arithmetic: every rounding redone in i128.

use mla_check::engine::cpu::sum::{LANES, Lane, Sum};
use mla_numeric::DType;
use mla_reference::Accumulate;

/// A value m · 2^-SHIFT.
const SHIFT: i32 = 30;

/// Operands with at most `bits` significant bits, whole multiples of 2^-SHIFT, magnitudes around 1.
fn operands(n: usize, bits: u32, seed: u64) -> Vec<i64> {
    let mut s = seed;
    let mut next = || {
        s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        s >> 33
    };
    (0..n)
        .map(|_| {
            let m = (next() % (1 << bits)) as i64;
            let m = if next() % 2 == 0 { m } else { -m };
            // A multiple of 2^-SHIFT, of the size of 2^-6 … 2^2; one in 16 is zero.
            let place = SHIFT as u64 - 6 + next() % 8;
            if next() % 16 == 0 { 0 } else { m << (place as u32).saturating_sub(bits) }
        })
        .collect()
}

fn value(m: i64) -> f32 {
    (m as f64 / f64::from(1u32 << SHIFT)) as f32
}

/// The whole number rounded to 24 bits: to nearest, ties to even, or toward zero.
fn to_f32(m: i128, nearest: bool) -> i128 {
    let a = m.unsigned_abs();
    let over = (128 - a.leading_zeros()).saturating_sub(24);
    let (kept, rest) = (a >> over, a & ((1 << over) - 1));
    let half = if over == 0 { 1 } else { 1u128 << (over - 1) };
    let up = nearest && over > 0 && (rest > half || (rest == half && kept % 2 == 1));
    let a = ((kept + u128::from(up)) << over) as i128;
    if m < 0 { -a } else { a }
}

/// Sum of products as multiples of 2^(-2 SHIFT).
fn exact_rn(w: &[i64], x: &[i64], block: usize, chain: usize) -> i128 {
    let chain = if chain == 0 { w.len() } else { chain };
    let mut total = 0;
    for (w, x) in w.chunks(chain).zip(x.chunks(chain)) {
        let mut acc = 0i128;
        for (w, x) in w.chunks(block).zip(x.chunks(block)) {
            let products = w.iter().zip(x).map(|(a, b)| i128::from(*a) * i128::from(*b));
            acc = to_f32(acc + products.sum::<i128>(), true);
        }
        total = to_f32(total + acc, true);
    }
    total
}

/// floor(log2 |m|), relative to the unit of m.
fn exponent(m: i128) -> i32 {
    127 - m.unsigned_abs().leading_zeros() as i32
}

/// A fused sum of k products and the accumulator, terms and result cut toward zero.
fn exact_mma(w: &[i64], x: &[i64], k: usize, bits: i32) -> i128 {
    let mut acc = 0i128;
    for (w, x) in w.chunks(k).zip(x.chunks(k)) {
        // A product's exponent is the sum of its factors' exponents, not that of its value.
        let mut terms: Vec<(i32, i128)> = w
            .iter()
            .zip(x)
            .filter(|(a, b)| **a != 0 && **b != 0)
            .map(|(&a, &b)| (exponent(a.into()) + exponent(b.into()), i128::from(a) * i128::from(b)))
            .collect();
        if acc != 0 {
            terms.push((exponent(acc), acc));
        }
        let Some(e) = terms.iter().map(|t| t.0).max() else { continue };
        let unit = 1i128 << (e - bits).max(0);
        acc = to_f32(terms.iter().map(|(_, m)| m / unit * unit).sum(), false);
    }
    acc
}

fn check(accumulate: Accumulate, dtype: DType, exact: impl Fn(&[i64], &[i64]) -> i128) {
    let sum = Sum::new(accumulate, dtype).unwrap();
    let bits = dtype.precision();
    for k in [1, 7, 16, 50, 300] {
        // Rows that fill the widest tile and some that do not.
        let rows = 11;
        let w = operands(rows * k, bits, 1 + k as u64);
        let x = operands(LANES * k, bits, 1000 + k as u64);
        let weights: Vec<f32> = w.iter().map(|m| value(*m)).collect();
        let lanes: Vec<Lane> = (0..k).map(|k_| std::array::from_fn(|l| value(x[l * k + k_]))).collect();
        let mut acc = vec![[0.0; LANES]; rows];
        sum.add(&weights, &lanes, &mut acc);
        for r in 0..rows {
            for l in 0..LANES {
                let want = exact(&w[r * k..(r + 1) * k], &x[l * k..(l + 1) * k]);
                // A multiple of 2^-60 with 24 bits: exact in float64.
                let want = want as f64 / f64::from(1u32 << SHIFT) / f64::from(1u32 << SHIFT);
                assert_eq!(f64::from(acc[r][l]), want, "{accumulate:?} {dtype} k {k} row {r} lane {l}");
            }
        }
    }
}

#[test]
fn nearest_rounds_once_a_block() {
    for dtype in [DType::Bf16, DType::F16] {
        for (block, chain) in [(16, 0), (16, 32), (8, 0), (5, 0), (1, 0)] {
            check(Accumulate::Rn { block, chain }, dtype, |w, x| exact_rn(w, x, block, chain));
        }
    }
}

#[test]
fn float32_is_a_loop_of_fmas_in_chains() {
    for (block, chain) in [(1, 256), (1, 0), (1, 3)] {
        check(Accumulate::Rn { block, chain }, DType::F32, |w, x| exact_rn(w, x, block, chain));
    }
}

#[test]
fn tensor_cores_cut() {
    for dtype in [DType::Bf16, DType::F16] {
        for (k, bits) in [(16, 25), (8, 24)] {
            check(Accumulate::Mma { k, bits }, dtype, |w, x| exact_mma(w, x, k, bits as i32));
        }
    }
}

#[test]
fn what_no_kernel_does_is_refused() {
    for (accumulate, dtype) in [
        (Accumulate::Exact, DType::Bf16),
        (Accumulate::Rn { block: 0, chain: 0 }, DType::Bf16),
        (Accumulate::Mma { k: 16, bits: 25 }, DType::F32),
    ] {
        assert!(Sum::new(accumulate, dtype).is_none(), "{accumulate:?} {dtype}");
    }
}
