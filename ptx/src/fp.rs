/*!
Arithmetic that the host does not give directly: directed roundings of float32, half arithmetic with one rounding,
8-bit floats, and the approximate functions.

Approximate functions (`ex2.approx`, `rcp.approx` …) are the correctly rounded float32 of the float64 result. Hardware
differs from that by up to [`APPROX_ULPS`], measured over all inputs on an H200: a kernel's outcome must not depend on
more, and a comparison with a GPU must allow it.
*/

use mla_numeric::DType;

/// What every NaN that float32 arithmetic makes is.
pub const CANONICAL_NAN: u32 = 0x7fff_ffff;

/// Largest distance, in float32 ulps, of an H200's approximate functions from the correctly rounded value that this
/// machine computes; measured exhaustively over all 2^32 inputs. `lg2` has no such bound near 1 (use an absolute one),
/// `tanh` is given as measured, `sin` and `cos` for |x| < π have an absolute bound of 2^-21.2.
pub const APPROX_ULPS: &[(&str, u32)] =
    &[("ex2.approx", 2), ("rsqrt.approx", 2), ("rcp.approx", 1), ("sqrt.approx", 1), ("tanh.approx", 134)];

/// Subnormals to zero of the same sign.
#[inline(always)]
pub fn flush(v: u32) -> u32 {
    if v & 0x7f80_0000 == 0 { v & 0x8000_0000 } else { v }
}

/// A rounding that is not to nearest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Directed {
    Zero,
    Down,
    Up,
}

/// The float64 `s` with the sign of what rounding lost (`lost` = exact - s), made odd where it is inexact, so that a
/// second rounding to at most 51 bits is a single one of the exact value.
#[inline]
pub fn odd(s: f64, lost: f64) -> f64 {
    if lost == 0.0 || !s.is_finite() || lost.is_nan() {
        return s;
    }
    let bits = s.to_bits();
    // Toward zero first: where the magnitude was rounded up, step back.
    let magnitude_up = (lost > 0.0) != (s > 0.0);
    let bits = if magnitude_up { bits - 1 } else { bits };
    f64::from_bits(bits | 1)
}

/// a + b, rounded to odd.
#[inline]
pub fn add_odd(a: f64, b: f64) -> f64 {
    let s = a + b;
    if !s.is_finite() {
        return s;
    }
    let t = s - a;
    odd(s, (a - (s - t)) + (b - t))
}

/// a · b + c of values with at most 26 significant bits each, rounded to odd.
#[inline]
pub fn fma_odd(a: f64, b: f64, c: f64) -> f64 {
    add_odd(a * b, c)
}

/// a / b of float32 values, rounded to odd.
#[inline]
pub fn div_odd(a: f32, b: f32) -> f64 {
    let (a, b) = (f64::from(a), f64::from(b));
    let q = a / b;
    if !q.is_finite() || b.is_infinite() || q == 0.0 {
        return q;
    }
    let rest = libm::fma(-q, b, a);
    odd(q, if b > 0.0 { rest } else { -rest })
}

/// √a, rounded to odd.
#[inline]
pub fn sqrt_odd(a: f32) -> f64 {
    let a = f64::from(a);
    let q = a.sqrt();
    if !q.is_finite() { q } else { odd(q, libm::fma(-q, q, a)) }
}

/// `v` (exact, or rounded to odd) to float32 in a direction; overflow as IEEE 754 has it.
#[inline]
pub fn direct(v: f64, to: Directed) -> f32 {
    let n = v as f32;
    if v.is_nan() || v.is_infinite() || f64::from(n) == v {
        return n;
    }
    let up = match to {
        Directed::Zero => v < 0.0,
        Directed::Down => false,
        Directed::Up => true,
    };
    let above = f64::from(n) > v;
    match (above, up) {
        (true, false) => n.next_down(),
        (false, true) => n.next_up(),
        _ => n,
    }
}

/// A 16-bit format with the NaN that arithmetic makes of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Half {
    F16,
    Bf16,
}

impl Half {
    #[inline]
    pub fn value(self, bits: u16) -> f64 {
        match self {
            Half::F16 => DType::F16.from_bits(u64::from(bits)),
            Half::Bf16 => DType::Bf16.from_bits(u64::from(bits)),
        }
    }

    /// Rounded once to nearest even; NaN is 0x7fff.
    #[inline]
    pub fn bits(self, v: f64) -> u16 {
        if v.is_nan() {
            return 0x7fff;
        }
        match self {
            Half::F16 => DType::F16.to_bits(v) as u16,
            // Not through the format's own conversion, which goes by way of float32's infinities.
            Half::Bf16 => ((DType::Bf16.round(v) as f32).to_bits() >> 16) as u16,
        }
    }

    /// Rounded toward zero.
    pub fn bits_toward_zero(self, v: f64) -> u16 {
        let n = self.bits(v);
        if v.is_nan() || v.is_infinite() || self.value(n).abs() <= v.abs() { n } else { n - 1 }
    }

    fn flush(self, bits: u16) -> u16 {
        let exponent = if self == Half::F16 { 0x7c00 } else { 0x7f80 };
        if bits & exponent == 0 { bits & 0x8000 } else { bits }
    }
}

/// What a half operation does besides rounding.
#[derive(Clone, Copy, Default)]
pub struct HalfMode {
    pub ftz: bool,
    /// Clamp to [0, 1], NaN to 0.
    pub sat: bool,
    /// Negative to 0.
    pub relu: bool,
}

/// One half operation on values; `f` gives the exact result or one rounded to odd.
#[inline]
pub fn half_op(h: Half, mode: HalfMode, a: [u16; 3], f: impl Fn(f64, f64, f64) -> f64) -> u16 {
    let a = a.map(|x| h.value(if mode.ftz { h.flush(x) } else { x }));
    let mut v = f(a[0], a[1], a[2]);
    if mode.sat {
        // As float32's: NaN and -0 become +0.
        v = if v > 0.0 { v.min(1.0) } else { 0.0 };
    }
    if mode.relu && v < 0.0 {
        v = 0.0;
    }
    let out = h.bits(v);
    if mode.ftz { h.flush(out) } else { out }
}

/// E5M2 of `v`: nearest even, beyond the largest value that value; NaN 0x7f.
pub fn e5m2(v: f64) -> u8 {
    if v.is_nan() {
        return 0x7f;
    }
    let exponent = ((v.abs().to_bits() >> 52) as i32 - 1023).max(-14);
    let step = libm::ldexp(1.0, exponent - 2);
    let r = ((v.abs() / step).round_ties_even() * step).min(57344.0).copysign(v);
    (Half::F16.bits(r) >> 8) as u8
}

/// The value of E5M2 bits, as the upper byte of an f16.
pub fn e5m2_value(bits: u8) -> f64 {
    Half::F16.value(u16::from(bits) << 8)
}

/// E4M3 of `v`, saturating; NaN 0x7f.
pub fn e4m3(v: f64) -> u8 {
    if v.is_nan() { 0x7f } else { DType::E4m3.to_bits(v) as u8 }
}

/// The value of E4M3 bits.
pub fn e4m3_value(bits: u8) -> f64 {
    DType::E4m3.from_bits(u64::from(bits))
}

/// The values of all E4M3 bit patterns.
pub static E4M3: std::sync::LazyLock<[f32; 256]> =
    std::sync::LazyLock::new(|| std::array::from_fn(|bits| e4m3_value(bits as u8) as f32));

/// The value of f16 bits; infinities and NaN are float32's.
#[inline(always)]
pub fn f16_value(bits: u16) -> f32 {
    let (sign, rest) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff) << 13);
    // The exponent field moves to float32's place; 2^112 makes up for the bias.
    let finite = (f32::from_bits(rest) * f32::from_bits((127 + 112) << 23)).to_bits();
    f32::from_bits(sign | if rest < 0x7c00 << 13 { finite } else { 0x7f80_0000 | rest & 0x7f_ffff })
}

/// TF32 by `cvt.rna`: nearest, ties away from zero; the low 13 bits are zero.
pub fn tf32_away(v: u32) -> u32 {
    if f32::from_bits(v).is_nan() {
        CANONICAL_NAN
    } else if f32::from_bits(v).is_infinite() {
        v
    } else {
        v.wrapping_add(0x1000) & !0x1fff
    }
}

pub fn ex2(x: f32) -> f32 {
    libm::exp2(f64::from(x)) as f32
}
pub fn lg2(x: f32) -> f32 {
    libm::log2(f64::from(x)) as f32
}
#[inline(always)]
pub fn rcp(x: f32) -> f32 {
    1.0 / x
}
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    (1.0 / f64::from(x).sqrt()) as f32
}
pub fn sin(x: f32) -> f32 {
    libm::sin(f64::from(x)) as f32
}
pub fn cos(x: f32) -> f32 {
    libm::cos(f64::from(x)) as f32
}
pub fn tanh(x: f32) -> f32 {
    libm::tanh(f64::from(x)) as f32
}

/// `max.f32`: the operand that is a number; +0 above -0.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else if a == b {
        f32::from_bits(a.to_bits() & b.to_bits())
    } else if a > b {
        a
    } else {
        b
    }
}

/// `min.f32`, likewise.
#[inline(always)]
pub fn min(a: f32, b: f32) -> f32 {
    -max(-a, -b)
}
