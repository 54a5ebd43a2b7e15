/*!
The sum of a tensor core, bit for bit: `mma.sync` with float32 accumulation.

One instruction block is ONE fused sum of `block` products and the accumulator:
1. products are exact and not normalised: significand in [1, 4), exponent e_a + e_b (an operand's exponent is
   never below its format's smallest normal one);
2. e = the largest exponent of products and accumulator, zeros ignored;
3. each term is cut toward zero to `bits` fractional bits relative to 2^e;
4. the whole numbers are summed exactly;
5. the sum is cut toward zero to float32: subnormals kept, overflow to infinity, an exact zero is +0, every NaN
   is 0x7fffffff.

Sources: "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores", arXiv 2511.10909, for the
parameters; the Hopper model agreed with an H200 in every bit of 524,288 outputs (bf16 and f16 operands; normal,
wide, cancelling, tiny, huge and arbitrary bit patterns). RTX Blackwell is stated there to have Hopper's
parameters; that was not measured.

Operands are float32 values that a 16-bit format or TF32 holds; further significand bits are cut, as the hardware
does with float32 given as TF32.
*/

mod tile;

use crate::DType;
pub use tile::COLUMNS;

/// What every NaN becomes.
const NAN: f32 = f32::from_bits(0x7fff_ffff);
const EXPONENT: u32 = 0x7f80_0000;
/// Significand bits below this are cut: 11 stay.
const CUT: u32 = 0x1fff;

/// A generation of tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorCore {
    /// Products in one fused sum.
    pub block: usize,
    /// Fractional bits that a term keeps, at most 32.
    pub bits: u32,
}

/// A tensor core with operands of one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Unit {
    core: TensorCore,
    /// Exponent of the smallest normal operand.
    min_exponent: i32,
}

impl TensorCore {
    /// sm_90; by the literature also sm_100 and sm_120.
    pub const HOPPER: TensorCore = TensorCore { block: 16, bits: 25 };
    /// sm_80, sm_86, sm_89: m16n8k16 is two steps of 8.
    pub const AMPERE: TensorCore = TensorCore { block: 8, bits: 24 };

    /// The same core with operands of the given format. It matters for f16 alone, whose subnormals keep the
    /// exponent of its smallest normal value; the methods of `TensorCore` itself take bf16 or TF32.
    pub const fn on(self, operands: DType) -> Unit {
        Unit { core: self, min_exponent: operands.min_exponent() }
    }

    /// One fused sum of `acc` and at most `block` products; missing ones count as zero.
    pub fn sum<P>(&self, acc: f32, products: P) -> f32
    where
        P: IntoIterator<Item = (f32, f32), IntoIter: Clone>,
    {
        self.on(DType::Bf16).sum(acc, products)
    }

    /// `acc + Σ a[k] b[k]`, block after block, ascending.
    pub fn dot(&self, acc: f32, a: &[f32], b: &[f32]) -> f32 {
        self.on(DType::Bf16).dot(acc, a, b)
    }

    /// [`dot`](TensorCore::dot) for `L` columns of `x` at once: `acc[l] + Σ w[k] x[k][l]`.
    pub fn lanes<const L: usize>(&self, acc: &mut [f32; L], w: &[f32], x: &[[f32; L]]) {
        self.on(DType::Bf16).lanes(acc, w, x)
    }
}

/// The exponent field's power and the significand with 23 fractional bits; the exponent not below `min`.
#[inline(always)]
fn split(v: f32, min: i32) -> (i32, u64) {
    let field = (v.to_bits() & EXPONENT) >> 23;
    let fraction = u64::from(v.to_bits() & 0x7f_ffff);
    let (e, m) = if field == 0 { (-126, fraction) } else { (field as i32 - 127, fraction | 1 << 23) };
    if e < min { (min, m >> (min - e).min(63)) } else { (e, m) }
}

/// Operands keep 11 significand bits; infinities and NaN stay what they are.
#[inline(always)]
fn cut(v: f32) -> f32 {
    if v.is_finite() { f32::from_bits(v.to_bits() & !CUT) } else { v }
}

/// The power of two of a value: its exponent alone.
#[inline(always)]
fn power(v: f32) -> f32 {
    f32::from_bits(v.to_bits() & EXPONENT)
}

/// The bits of |v| minus one: zero becomes the largest u32 and, as i32, the smallest.
#[inline(always)]
fn magnitude(v: f32) -> u32 {
    (v.to_bits() & 0x7fff_ffff).wrapping_sub(1)
}

/// `v` cut toward zero, |v| < 2^30; anything else gives some number. (`as` would be right for every value, but
/// does not vectorise.)
#[inline(always)]
fn whole(v: f32) -> i32 {
    const MOST: f32 = (1 << 30) as f32;
    let v = if v < MOST { v } else { MOST };
    let v = if v > -MOST { v } else { -MOST };
    // SAFETY: between -2^30 and 2^30; a NaN became 2^30 above.
    unsafe { v.to_int_unchecked() }
}

/// Whether a magnitude is that of infinity or NaN.
#[inline(always)]
fn special(magnitude: u32) -> bool {
    magnitude as i32 >= (EXPONENT - 1) as i32
}

/// v · 2^e cut toward zero to float32.
fn truncate(v: i64, e: i32) -> f32 {
    let m = v.unsigned_abs();
    if m == 0 {
        return 0.0;
    }
    let top = 63 - m.leading_zeros() as i32;
    // The last place kept: 24 bits, or the smallest subnormal.
    let last = (e + top - 23).max(-149);
    let down = last - e;
    let kept = if down >= 64 {
        0
    } else if down >= 0 {
        m >> down
    } else {
        m << -down
    };
    // At most 24 bits times a power of two: exact, or beyond float32 and then infinity.
    let a = (kept as f64 * crate::dtype::pow2(last)) as f32;
    if v < 0 { -a } else { a }
}

impl Unit {
    /// See [`TensorCore::sum`].
    pub fn sum<P>(&self, acc: f32, products: P) -> f32
    where
        P: IntoIterator<Item = (f32, f32), IntoIter: Clone>,
    {
        let products = products.into_iter().map(|(a, b)| (cut(a), cut(b)));
        if !acc.is_finite() || products.clone().any(|(a, b)| !a.is_finite() || !b.is_finite()) {
            let s = products.fold(f64::from(acc), |s, (a, b)| s + f64::from(a) * f64::from(b));
            return if s.is_nan() { NAN } else { s as f32 };
        }
        let terms = products.filter(|&(a, b)| a != 0.0 && b != 0.0).map(|(a, b)| {
            let ((ea, ma), (eb, mb)) = (split(a, self.min_exponent), split(b, self.min_exponent));
            // 22 bits, 20 of them fractional; then 62 and 60.
            (ea + eb, ((ma >> 13) * (mb >> 13)) << 40, (a < 0.0) != (b < 0.0))
        });
        let (ec, mc) = split(acc, -126);
        let term = (acc != 0.0).then_some((ec, mc << 37, acc < 0.0));
        let terms = terms.chain(term);
        let Some(e) = terms.clone().map(|t| t.0).max() else { return 0.0 };
        let bits = self.core.bits as i32;
        let sum = terms.fold(0i64, |s, (et, m, negative)| {
            let m = (m >> (60 - bits + (e - et)).min(63)) as i64;
            s + if negative { -m } else { m }
        });
        truncate(sum, e - bits)
    }

    /// See [`TensorCore::dot`].
    pub fn dot(&self, acc: f32, a: &[f32], b: &[f32]) -> f32 {
        let n = self.core.block.max(1);
        a.chunks(n)
            .zip(b.chunks(n))
            .fold(acc, |acc, (a, b)| self.sum(acc, a.iter().copied().zip(b.iter().copied())))
    }

    /// See [`TensorCore::lanes`]. For any number of columns and any processor; [`tile`](Unit::tile) is faster.
    pub fn lanes<const L: usize>(&self, acc: &mut [f32; L], w: &[f32], x: &[[f32; L]]) {
        let n = self.core.block.max(1);
        // Sums of whole numbers must fit an i32: block · 4 · 2^bits, where the factor 4 is never reached.
        let fits = n.checked_mul(4 << self.core.bits.min(32)).is_some_and(|most| most <= 1 << 31);
        for (w, x) in w.chunks(n).zip(x.chunks(n)) {
            let slow = if fits { self.block_of_lanes(acc, w, x) } else { [true; L] };
            if slow.contains(&true) {
                self.block_by_lane(acc, w, x, &slow);
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn block_by_lane<const L: usize>(
        &self,
        acc: &mut [f32; L],
        w: &[f32],
        x: &[[f32; L]],
        which: &[bool; L],
    ) {
        for l in (0..L).filter(|&l| which[l]) {
            acc[l] = self.sum(acc[l], w.iter().copied().zip(x.iter().map(|x| x[l])));
        }
    }

    /// One block, in float32 and i32 arithmetic that vectorises. Powers of two carry the exponents, products of
    /// 11-bit significands are exact, and the conversion to whole numbers is the cut toward zero. A lane where
    /// that is not the whole truth (subnormals, infinities, extreme exponents) is left alone and returned as true.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    fn block_of_lanes<const L: usize>(&self, acc: &mut [f32; L], w: &[f32], x: &[[f32; L]]) -> [bool; L] {
        let normal = (((self.min_exponent + 127) as u32) << 23) - 1;
        let (mut all, mut nothing) = (false, true);
        for &w in w {
            all |= (magnitude(w) < normal) | special(magnitude(w)) | (w.to_bits() & CUT != 0);
            nothing &= w == 0.0;
        }

        let (mut most, mut low, mut high, mut wide) = ([0f32; L], [u32::MAX; L], [-1i32; L], [0u32; L]);
        for l in 0..L {
            most[l] = power(acc[l]);
        }
        for (w, x) in w.iter().zip(x) {
            let w = power(*w);
            for l in 0..L {
                let p = w * power(x[l]);
                most[l] = if p > most[l] { p } else { most[l] };
                low[l] = low[l].min(magnitude(x[l]));
                high[l] = high[l].max(magnitude(x[l]) as i32);
                wide[l] |= x[l].to_bits();
            }
        }

        // 2^(bits - e); without any term (most = 0) some finite number, which multiplies zeros.
        let mut scale = [0f32; L];
        for l in 0..L {
            scale[l] = f32::from_bits(((254 + self.core.bits) << 23).wrapping_sub(most[l].to_bits()));
        }
        let mut sum = [0i32; L];
        for (w, x) in w.iter().zip(x) {
            // Opaque, so that LLVM puts the lanes side by side and not (slower by half) the steps of k.
            let w = std::hint::black_box(*w);
            for l in 0..L {
                sum[l] = sum[l].wrapping_add(whole(w * x[l] * scale[l]));
            }
        }

        // No exponent at all is fine where there is no term; else the product of powers has underflowed.
        // Below 2^100 nothing overflows float32 before the end; above 2^-90 no kept bit is subnormal.
        let (least, greatest) = (f32::from_bits(37 << 23), f32::from_bits(227 << 23));
        let unit = crate::dtype::pow2(-(self.core.bits as i32));
        let mut slow = [false; L];
        for l in 0..L {
            let c = acc[l];
            slow[l] = !((most[l] >= least && most[l] <= greatest)
                || (most[l] == 0.0 && (nothing || high[l] < 0)))
                | (low[l] < normal)
                | (special(high[l] as u32))
                | (wide[l] & CUT != 0)
                | (magnitude(c) < 0x7f_ffff)
                | special(magnitude(c))
                | all;
            // 32 bits and 27 bits: exact in float64, whose low 29 bits are then cut to float32's 24.
            let s = f64::from(sum[l]) + f64::from(whole(c * scale[l]));
            let s = f64::from_bits(s.to_bits() & !0x1fff_ffff);
            let r = (s * (f64::from(most[l]) * unit)) as f32;
            acc[l] = if slow[l] { c } else { r };
        }
        slow
    }
}
