/*!
The tensor core's sum for whole tiles: some rows of A times 8 columns of B, with AVX2 where the processor has it.

Everything is float32 and i32 arithmetic on 8 columns at once. A power of two stands for a term's exponent: of an
operand, that of its exponent field, not below its format's smallest normal one, 0 for zero; the largest product of
powers (and the accumulator's) is 2^e. Products of 11-bit significands are exact; scaled by 2^(bits - e), the
conversion to whole numbers is the cut toward zero, and the whole numbers are summed exactly. What lies outside of
that reasoning is left to [`Unit::sum`], element by element:
- infinities and NaN;
- e below -90 or above 100, where a kept bit could be subnormal or something overflow before the end. Products that
  underflow lie below 2^-115, the last bit kept at e = -90, and would have been cut anyway.
*/

use super::Unit;

/// Columns of a tile.
pub const COLUMNS: usize = 8;

impl Unit {
    /// `acc[r][l] += Σ_k w[r · x.len() + k] · x[k][l]`: [`dot`](Unit::dot) for every row of `acc` and every column.
    ///
    /// # Panics
    /// Where `w` has fewer than `acc.len() · x.len()` values.
    pub fn tile(&self, acc: &mut [[f32; COLUMNS]], w: &[f32], x: &[[f32; COLUMNS]]) {
        let w = &w[..acc.len() * x.len()];
        #[cfg(target_arch = "x86_64")]
        if avx2::takes(self.core) && is_x86_feature_detected!("avx2") {
            // SAFETY: the processor was just asked.
            return unsafe { avx2::tile(self, acc, w, x) };
        }
        self.tile_by_rows(acc, w, x)
    }

    /// The same, row after row, on any processor.
    fn tile_by_rows(&self, acc: &mut [[f32; COLUMNS]], w: &[f32], x: &[[f32; COLUMNS]]) {
        if x.is_empty() {
            return;
        }
        for (acc, w) in acc.iter_mut().zip(w.chunks_exact(x.len())) {
            self.lanes(acc, w, x);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::super::{CUT, EXPONENT, TensorCore, Unit};
    use super::COLUMNS;
    use std::arch::x86_64::*;

    /// Longest block: what the buffers of a row hold.
    const MOST: usize = 32;
    /// Rows at once: their accumulators fit the registers.
    const ROWS: usize = 4;
    const ABSOLUTE: u32 = 0x7fff_ffff;

    type Columns = [f32; COLUMNS];

    /// Products that one i32 can sum: each is below 4 · 2^bits.
    fn products(core: TensorCore) -> usize {
        (1usize << 31) / (4usize << core.bits.min(32))
    }

    /// Whether the kernel below is right for a core.
    pub fn takes(core: TensorCore) -> bool {
        (1..=MOST).contains(&core.block) && products(core) > 0
    }

    /// A row's block, ready to be broadcast.
    #[derive(Clone, Copy)]
    struct Row {
        value: [f32; MOST],
        power: [f32; MOST],
        /// It holds an infinity or NaN.
        special: bool,
        /// All zeros.
        nothing: bool,
    }

    /// The operand as the tensor core reads it, and its power of two.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn operand(v: __m256, least: __m256) -> (__m256, __m256) {
        let cut = _mm256_and_ps(v, all(!CUT));
        (cut, power(cut, least))
    }

    /// 2^exponent, at least `least`; 0 for zero.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn power(v: __m256, least: __m256) -> __m256 {
        let p = _mm256_max_ps(_mm256_and_ps(v, all(EXPONENT)), least);
        _mm256_and_ps(p, _mm256_cmp_ps::<_CMP_NEQ_UQ>(v, _mm256_setzero_ps()))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn all(bits: u32) -> __m256 {
        _mm256_castsi256_ps(_mm256_set1_epi32(bits as i32))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(v: &Columns) -> __m256 {
        // SAFETY: 8 values of float32; no alignment is asked for.
        unsafe { _mm256_loadu_ps(v.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn store(to: &mut Columns, v: __m256) {
        // SAFETY: as in `load`.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
    }

    /// Lanes whose exponent is that of infinity and NaN.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn special(v: __m256) -> __m256 {
        let e = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(EXPONENT as i32));
        _mm256_castsi256_ps(_mm256_cmpeq_epi32(e, _mm256_set1_epi32(EXPONENT as i32)))
    }

    impl Row {
        const EMPTY: Row = Row { value: [0.0; MOST], power: [0.0; MOST], special: false, nothing: true };

        /// At most [`MOST`] values.
        #[inline]
        #[target_feature(enable = "avx2")]
        fn set(&mut self, w: &[f32], least: __m256) {
            let (mut odd, mut some) = (_mm256_setzero_ps(), _mm256_setzero_ps());
            let values = self.value.as_chunks_mut::<COLUMNS>().0;
            let powers = self.power.as_chunks_mut::<COLUMNS>().0;
            for ((w, value), power) in w.chunks(COLUMNS).zip(values).zip(powers) {
                let v = match w.as_array::<COLUMNS>() {
                    Some(w) => load(w),
                    None => {
                        let mut padded = [0.0; COLUMNS];
                        padded[..w.len()].copy_from_slice(w);
                        load(&padded)
                    }
                };
                odd = _mm256_or_ps(odd, special(v));
                let (v, p) = operand(v, least);
                some = _mm256_or_ps(some, p);
                store(value, v);
                store(power, p);
            }
            self.special = _mm256_movemask_ps(odd) != 0;
            self.nothing = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NEQ_UQ>(some, _mm256_setzero_ps())) == 0;
        }
    }

    #[target_feature(enable = "avx2")]
    #[allow(clippy::needless_range_loop)]
    pub fn tile(unit: &Unit, acc: &mut [Columns], w: &[f32], x: &[Columns]) {
        let k = x.len();
        let least = all(((unit.min_exponent + 127) as u32) << 23);
        let mut of = [Row::EMPTY; ROWS];
        let mut from = 0;
        while from < k {
            let to = k.min(from + unit.core.block);
            let x = &x[from..to];
            // Columns with infinities or NaN; columns of zeros.
            let (mut odd, mut some) = (_mm256_setzero_ps(), _mm256_setzero_ps());
            for x in x {
                let v = load(x);
                odd = _mm256_or_ps(odd, special(v));
                some = _mm256_or_ps(some, _mm256_and_ps(v, all(ABSOLUTE & !CUT)));
            }
            let empty = _mm256_cmp_ps::<_CMP_EQ_OQ>(some, _mm256_setzero_ps());
            let mut r = 0;
            while r < acc.len() {
                let n = if acc.len() - r >= ROWS { ROWS } else { 1 };
                let mut here = [w; ROWS];
                for i in 0..n {
                    here[i] = &w[(r + i) * k + from..(r + i) * k + to];
                    of[i].set(here[i], least);
                }
                if let Some(acc) = acc[r..].first_chunk_mut::<ROWS>() {
                    rows(unit, acc, &of, here, x, least, odd, empty);
                } else if let (Some(acc), Some(of)) = (acc[r..].first_chunk_mut::<1>(), of.first_chunk::<1>())
                {
                    rows(unit, acc, of, [here[0]], x, least, odd, empty);
                }
                r += n;
            }
            from = to;
        }
    }

    /// One block of `R` rows.
    #[inline]
    #[target_feature(enable = "avx2")]
    #[allow(clippy::needless_range_loop, clippy::too_many_arguments)]
    fn rows<const R: usize>(
        unit: &Unit,
        acc: &mut [Columns; R],
        of: &[Row; R],
        w: [&[f32]; R],
        x: &[Columns],
        least: __m256,
        odd: __m256,
        empty: __m256,
    ) {
        let zero = _mm256_setzero_ps();
        let mut most = [zero; R];
        for r in 0..R {
            // float32's own least exponent: an accumulator is no operand.
            most[r] = power(load(&acc[r]), all(1 << 23));
        }
        for (k, x) in x.iter().enumerate() {
            let (_, p) = operand(load(x), least);
            for r in 0..R {
                most[r] = _mm256_max_ps(_mm256_mul_ps(_mm256_set1_ps(of[r].power[k]), p), most[r]);
            }
        }

        // 2^(bits - e); without any term (most = 0) some finite number, which multiplies zeros.
        let bits = unit.core.bits;
        let mut scale = [zero; R];
        for r in 0..R {
            let top = _mm256_set1_epi32(((254 + bits) << 23) as i32);
            scale[r] = _mm256_castsi256_ps(_mm256_sub_epi32(top, _mm256_castps_si256(most[r])));
        }
        let mut total = [[_mm256_setzero_pd(); 2]; R];
        for (from, x) in x.chunks(products(unit.core)).enumerate() {
            let mut sum = [_mm256_setzero_si256(); R];
            for (k, x) in x.iter().enumerate() {
                let k = from * products(unit.core) + k;
                let x = _mm256_and_ps(load(x), all(!CUT));
                for r in 0..R {
                    let p = _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(of[r].value[k]), x), scale[r]);
                    sum[r] = _mm256_add_epi32(sum[r], _mm256_cvttps_epi32(p));
                }
            }
            for r in 0..R {
                for (t, s) in total[r].iter_mut().zip(halves(sum[r])) {
                    *t = _mm256_add_pd(*t, s);
                }
            }
        }

        let (low, high) = (all((127 - 90) << 23), all((127 + 100) << 23));
        let unit_bit = _mm256_set1_pd(crate::dtype::pow2(-(bits as i32)));
        for r in 0..R {
            let c = load(&acc[r]);
            let inside = _mm256_and_ps(
                _mm256_cmp_ps::<_CMP_GE_OQ>(most[r], low),
                _mm256_cmp_ps::<_CMP_LE_OQ>(most[r], high),
            );
            // No exponent at all is fine where there is no term; else the product of powers has underflowed.
            let no_term = if of[r].nothing { all(!0) } else { empty };
            let no_term = _mm256_and_ps(no_term, _mm256_cmp_ps::<_CMP_EQ_OQ>(most[r], zero));
            // An accumulator of infinity or NaN has e = 128.
            let fine = _mm256_andnot_ps(odd, _mm256_or_ps(inside, no_term));
            let slow = if of[r].special { 0xff } else { !_mm256_movemask_ps(fine) & 0xff };

            let own = halves(_mm256_cvttps_epi32(_mm256_mul_ps(c, scale[r])));
            let most = [_mm256_castps256_ps128(most[r]), _mm256_extractf128_ps::<1>(most[r])];
            let mut out = [_mm_setzero_ps(); 2];
            for h in 0..2 {
                // Whole numbers below 2^35: exact in float64, whose low 29 bits are then cut to float32's 24.
                let s = _mm256_add_pd(total[r][h], own[h]);
                let s = _mm256_and_pd(s, _mm256_castsi256_pd(_mm256_set1_epi64x(!0x1fff_ffff)));
                let ulp = _mm256_mul_pd(_mm256_cvtps_pd(most[h]), unit_bit);
                out[h] = _mm256_cvtpd_ps(_mm256_mul_pd(s, ulp));
            }
            let before = acc[r];
            store(&mut acc[r], _mm256_set_m128(out[1], out[0]));
            if slow != 0 {
                unit.some_of_row(&mut acc[r], &before, w[r], x, slow as u32);
            }
        }
    }

    /// Whole numbers as float64, the lower four and the upper four.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn halves(v: __m256i) -> [__m256d; 2] {
        [_mm256_cvtepi32_pd(_mm256_castsi256_si128(v)), _mm256_cvtepi32_pd(_mm256_extracti128_si256::<1>(v))]
    }
}

#[cfg(target_arch = "x86_64")]
impl Unit {
    /// One block of the lanes of `which`, by definition.
    #[cold]
    #[inline(never)]
    fn some_of_row(
        &self,
        acc: &mut [f32; COLUMNS],
        before: &[f32; COLUMNS],
        w: &[f32],
        x: &[[f32; COLUMNS]],
        which: u32,
    ) {
        for l in (0..COLUMNS).filter(|l| which >> l & 1 != 0) {
            acc[l] = self.sum(before[l], w.iter().copied().zip(x.iter().map(|x| x[l])));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::DType;
    use crate::tensor_core::TensorCore;
    use proptest::prelude::*;

    /// Any bits at all, exponents about a centre, zeros, infinities, subnormals.
    fn operand() -> impl Strategy<Value = (u32, u32, u32)> {
        (any::<u32>(), 0u32..20, any::<u32>())
    }

    fn value(format: DType, (kind, spread, bits): (u32, u32, u32), centre: u32) -> f32 {
        let sign = bits & 0x8000_0000;
        let finite = sign | ((centre + spread) % 255) << 23 | bits & 0x7f_ffff;
        let raw = f32::from_bits(match kind % 64 {
            0 => sign | EXP,
            1 => sign | EXP | bits & 0x7f_ffff,
            2..=6 => sign,
            7..=10 => sign | bits & 0x7f_ffff,
            11..=13 => bits,
            _ => finite,
        });
        match format {
            // Given to the hardware as float32.
            DType::Tf32 => raw,
            _ if raw.is_finite() => format.round(f64::from(raw)) as f32,
            _ => raw,
        }
    }
    const EXP: u32 = 0x7f80_0000;

    fn accumulator(kind: u32, bits: u32, centre: u32) -> f32 {
        let sign = bits & 0x8000_0000;
        f32::from_bits(match kind % 16 {
            0 => sign,
            1 => sign | bits & 0x7f_ffff,
            2 => bits,
            3 => sign | EXP,
            4 => 0x7fc0_0000 | bits,
            _ => sign | (centre.min(254)) << 23 | bits & 0x7f_ffff,
        })
    }

    const CORES: [TensorCore; 8] = [
        TensorCore::HOPPER,
        TensorCore::AMPERE,
        TensorCore { block: 32, bits: 25 },
        TensorCore { block: 4, bits: 25 },
        TensorCore { block: 4, bits: 24 },
        TensorCore { block: 8, bits: 25 },
        TensorCore { block: 16, bits: 13 },
        TensorCore { block: 11, bits: 29 },
    ];
    const FORMATS: [DType; 4] = [DType::Bf16, DType::F16, DType::Tf32, DType::E4m3];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10_000))]
        /// Every path gives the bits of the definition, for every core and format.
        #[test]
        fn a_tile_is_its_elements(
            w in prop::collection::vec(operand(), 6 * 37), x in prop::collection::vec(operand(), 8 * 37),
            acc in prop::collection::vec(any::<(u32, u32)>(), 6 * 8),
            centres in (0u32..255, 0u32..255), near in any::<bool>(), clean in any::<bool>(),
            core in 0usize..8, format in 0usize..4, rows in 0usize..=6, k in 0usize..=37,
        ) {
            let (core, format) = (CORES[core], FORMATS[format]);
            let unit = core.on(format);
            // Half of the cases multiply near 1, where most of a format's values are; half of those are without
            // infinities and NaN, so that no column is taken by the slow path.
            let (cw, cx) = if near { (107 + centres.0 % 20, 107 + centres.1 % 20) } else { centres };
            let kind = |kind: u32| if clean { 2 + kind % 62 } else { kind };
            let some = |v: f32| if clean && !v.is_finite() { 1.0 } else { v };
            let of = |(k, s, b): (u32, u32, u32), c| some(value(format, (kind(k), s, b), c));
            let w: Vec<f32> = w[..rows * k].iter().map(|&v| of(v, cw)).collect();
            let x: Vec<[f32; 8]> = (0..k).map(|k| std::array::from_fn(|l| of(x[8 * k + l], cx))).collect();
            let start: Vec<[f32; 8]> = (0..rows)
                .map(|r| std::array::from_fn(|l| {
                    let (kind, bits) = acc[8 * r + l];
                    some(accumulator(kind, bits, (cw + cx).saturating_sub(110)))
                }))
                .collect();
            let want: Vec<[u32; 8]> = (0..rows)
                .map(|r| std::array::from_fn(|l| {
                    let column: Vec<f32> = x.iter().map(|x| x[l]).collect();
                    unit.dot(start[r][l], &w[r * k..(r + 1) * k], &column).to_bits()
                }))
                .collect();
            let bits = |acc: &[[f32; 8]]| acc.iter().map(|a| a.map(f32::to_bits)).collect::<Vec<_>>();
            let mut got = start.clone();
            unit.tile(&mut got, &w, &x);
            prop_assert_eq!(bits(&got), want.clone(), "{:?} {:?}", core, format);
            let mut got = start;
            unit.tile_by_rows(&mut got, &w, &x);
            prop_assert_eq!(bits(&got), want, "by rows, {:?} {:?}", core, format);
        }
    }
}
