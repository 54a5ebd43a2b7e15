/*!
The one sum of the engine: `acc[row][lane] += Σ_k w[row][k] · x[k][lane]`, rounded as a GPU rounds.

Projections, scores and P·V all go through [`Sum::add`]; only what stands in rows and lanes differs. A sum
goes over k ascending, so its bits depend on neither the tile shape nor the thread that computes it.

- `Rn { block, chain }`: products of two float32 values are exact in float64 (48 bits at most). A block's
  products are added to the accumulator in float64 and the result is rounded to float32. With 16-bit
  operands (products of at most 22 bits, an accumulator of 24) nothing is lost from terms down to 2^-29 of the
  largest partial sum, and from others less than 2^-53 of it an addition. That is an exact block sum for the
  purpose of a float32 rounding: another result than the ideal one needs an ideal sum within block · 2^-53 of
  a midpoint of two float32 values, and then the error is half an ulp either way.
  A block of one product is a float32 fma. A chain starts from zero, the total takes each chain with one
  float32 addition.
- `Mma { k, bits }`: [`mla_numeric::tensor_core`].

Why lanes: the compiler turns the innermost loop over [`LANES`] into vector instructions, without
changing any sum.
*/

use mla_numeric::DType;
use mla_numeric::tensor_core::{TensorCore, Unit};
use mla_reference::Accumulate;

/// Columns of a product that are summed side by side.
pub const LANES: usize = mla_numeric::tensor_core::COLUMNS;
/// One k of a panel of columns.
pub type Lane = [f32; LANES];

/// How a sum rounds.
#[derive(Clone, Copy, Debug)]
pub enum Sum {
    /// float32 to nearest, once a block, in chains.
    Rn {
        /// Products of a rounding, at least 1.
        block: usize,
        /// Products of a chain, at least 1.
        chain: usize,
    },
    /// A tensor core.
    Mma(Unit),
}

impl Sum {
    /// The sum that an accumulator describes, with operands of a dtype. None: no GPU sums so (a float64
    /// accumulator, a block of nothing, a tensor core with operands that it would cut).
    pub fn new(accumulate: Accumulate, operands: DType) -> Option<Sum> {
        match accumulate {
            Accumulate::Rn { block, chain } if block > 0 => {
                Some(Sum::Rn { block, chain: if chain == 0 { usize::MAX } else { chain } })
            }
            Accumulate::Mma { k, bits }
                if k > 0 && bits <= 32 && matches!(operands, DType::Bf16 | DType::F16) =>
            {
                Some(Sum::Mma(TensorCore { block: k, bits }.on(operands)))
            }
            _ => None,
        }
    }

    /// `acc[row][lane] += Σ_k w[row · x.len() + k] · x[k][lane]` for every row of `acc`.
    ///
    /// With chains, what `acc` held before is one more term of the total.
    pub fn add(self, w: &[f32], x: &[Lane], acc: &mut [Lane]) {
        debug_assert_eq!(w.len(), x.len() * acc.len());
        if x.is_empty() {
            return;
        }
        match self {
            Sum::Mma(unit) => unit.tile(acc, w, x),
            Sum::Rn { block, chain } => {
                #[cfg(target_arch = "x86_64")]
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the processor was just asked.
                    return unsafe { nearest_avx2(block, chain, w, x, acc) };
                }
                nearest::<{ cfg!(target_arch = "aarch64") }>(block, chain, w, x, acc)
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn nearest_avx2(block: usize, chain: usize, w: &[f32], x: &[Lane], acc: &mut [Lane]) {
    nearest::<true>(block, chain, w, x, acc)
}

/// `FMA`: the processor has a fused multiply-add. Bits do not depend on it. No closures in here: they
/// would lose the instruction set of the caller.
#[inline(always)]
fn nearest<const FMA: bool>(block: usize, chain: usize, w: &[f32], x: &[Lane], acc: &mut [Lane]) {
    let k = x.len();
    // Rows at once: as many accumulators as hide the latency of an addition and still fit the registers.
    let wide = if block == 1 { 8 } else { 4 };
    let mut w = w;
    let mut acc = acc;
    while !acc.is_empty() {
        let rows = if acc.len() >= wide { wide } else { 1 };
        let (here, later) = w.split_at(rows * k);
        let (now, rest) = acc.split_at_mut(rows);
        match (rows, block) {
            (8, 1) => rows_of::<8, true, FMA>(block, chain, here, x, now),
            (_, 1) => rows_of::<1, true, FMA>(block, chain, here, x, now),
            (4, _) => rows_of::<4, false, FMA>(block, chain, here, x, now),
            _ => rows_of::<1, false, FMA>(block, chain, here, x, now),
        }
        (acc, w) = (rest, later);
    }
}

/// `R` rows; `ONE`: blocks of one product.
#[inline(always)]
fn rows_of<const R: usize, const ONE: bool, const FMA: bool>(
    block: usize,
    chain: usize,
    w: &[f32],
    x: &[Lane],
    acc: &mut [Lane],
) {
    let Some(acc) = acc.first_chunk_mut::<R>() else { return };
    let mut rows = [w; R];
    for r in 0..R {
        rows[r] = &w[r * x.len()..(r + 1) * x.len()];
    }
    if chain == usize::MAX {
        if ONE {
            by_one(rows, x, acc)
        } else {
            by_block::<R, FMA>(rows, x, block, acc)
        }
        return;
    }
    let mut from = 0;
    while from < x.len() {
        let to = x.len().min(from.saturating_add(chain));
        let mut part = [[0.0; LANES]; R];
        let mut here = rows;
        for r in 0..R {
            here[r] = &rows[r][from..to];
        }
        if ONE {
            by_one(here, &x[from..to], &mut part);
        } else {
            by_block::<R, FMA>(here, &x[from..to], block, &mut part);
        }
        for r in 0..R {
            for l in 0..LANES {
                acc[r][l] += part[r][l];
            }
        }
        from = to;
    }
}

/// Blocks of one product: a float32 fma each.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn by_one<const R: usize>(w: [&[f32]; R], x: &[Lane], acc: &mut [Lane; R]) {
    let mut s = *acc;
    for k in 0..x.len() {
        let x = &x[k];
        for r in 0..R {
            let v = w[r][k];
            for l in 0..LANES {
                s[r][l] = v.mul_add(x[l], s[r][l]);
            }
        }
    }
    *acc = s;
}

/// Blocks of `block` products in float64, rounded to float32 after each.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn by_block<const R: usize, const FMA: bool>(w: [&[f32]; R], x: &[Lane], block: usize, acc: &mut [Lane; R]) {
    let mut s = [[0.0f64; LANES]; R];
    for r in 0..R {
        for l in 0..LANES {
            s[r][l] = f64::from(acc[r][l]);
        }
    }
    let mut from = 0;
    while from < x.len() {
        let to = x.len().min(from.saturating_add(block));
        for k in from..to {
            let mut a = [0.0f64; LANES];
            for l in 0..LANES {
                a[l] = f64::from(x[k][l]);
            }
            for r in 0..R {
                let v = f64::from(w[r][k]);
                for l in 0..LANES {
                    // The product is exact: fused or not, the same bits.
                    s[r][l] = if FMA { v.mul_add(a[l], s[r][l]) } else { s[r][l] + v * a[l] };
                }
            }
        }
        for r in 0..R {
            for l in 0..LANES {
                s[r][l] = f64::from(s[r][l] as f32);
            }
        }
        from = to;
    }
    for r in 0..R {
        for l in 0..LANES {
            acc[r][l] = s[r][l] as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_do_not_depend_on_the_instruction_set_or_the_rows_at_once() {
        let value = |i: usize| DType::Bf16.round(((i * 7919 % 1009) as f64 - 500.0) / 333.0) as f32;
        let (rows, k) = (13, 100);
        let w: Vec<f32> = (0..rows * k).map(value).collect();
        let x: Vec<Lane> = (0..k).map(|k| std::array::from_fn(|l| value(k * 31 + l * 5003))).collect();
        for (block, chain) in [(16, usize::MAX), (1, usize::MAX), (16, 48), (1, 30)] {
            let mut best = vec![[0.5; LANES]; rows];
            Sum::Rn { block, chain }.add(&w, &x, &mut best);
            let mut portable = vec![[0.5; LANES]; rows];
            for (w, acc) in w.chunks_exact(k).zip(portable.chunks_exact_mut(1)) {
                nearest::<false>(block, chain, w, &x, acc);
            }
            assert_eq!(best, portable, "block {block}, chain {chain}");
        }
    }
}
