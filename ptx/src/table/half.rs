/*! f16 and bf16 arithmetic: exact or rounded to odd in float64, then rounded once; NaN is 0x7fff. */

use super::Rows;
use crate::exec::regs::rare;
use crate::fp::{self, Half, HalfMode, add_odd, fma_odd, half_op};

const fn mode(ftz: bool, sat: bool, relu: bool) -> HalfMode {
    HalfMode { ftz, sat, relu }
}

/// Both halves of a register, each by `half_op`.
#[inline(always)]
fn packed(h: Half, m: HalfMode, a: [u32; 3], f: impl Fn(f64, f64, f64) -> f64) -> u32 {
    let low = half_op(h, m, a.map(|x| x as u16), &f);
    let high = half_op(h, m, a.map(|x| (x >> 16) as u16), &f);
    u32::from(high) << 16 | u32::from(low)
}

/// Scalar and packed rows of one formula with 1 to 3 sources.
macro_rules! halves {
    ($all:ident, $name:expr, $mode:expr, $h:expr, $ty:literal, ($($a:ident),+) [$x:expr, $y:expr, $z:expr] $f:expr) => {
        $all.push((concat!($name, ".", $ty), rare!(($(one!($a u16)),+) -> u16, |$($a),+| half_op($h, $mode, [$x, $y, $z], $f))));
        $all.push((concat!($name, ".", $ty, "x2"), rare!(($(one!($a u32)),+) -> u32, |$($a),+| packed($h, $mode, [$x, $y, $z], $f))));
    };
}
macro_rules! one {
    ($a:ident $t:ty) => {
        $t
    };
}

/// The rows of a two-operand formula in every mode of its format.
macro_rules! binary {
    ($all:ident, $h:expr, $ty:literal, $name:literal, $f:expr) => {
        halves!($all, concat!($name, "{,.rn}"), mode(false, false, false), $h, $ty, (a, b) [a, b, 0] $f);
    };
}

macro_rules! format {
    ($all:ident, $h:expr, $ty:literal) => {
        binary!($all, $h, $ty, "add", |a, b, _| add_odd(a, b));
        binary!($all, $h, $ty, "sub", |a, b, _| add_odd(a, -b));
        binary!($all, $h, $ty, "mul", |a, b, _| a * b);
        halves!($all, "fma.rn", mode(false, false, false), $h, $ty, (a, b, c) [a, b, c] fma_odd);
        halves!($all, "fma.rn.relu", mode(false, false, true), $h, $ty, (a, b, c) [a, b, c] fma_odd);
        halves!($all, "min", mode(false, false, false), $h, $ty, (a, b) [a, b, 0] |a, b, _| minimum(a, b));
        halves!($all, "max", mode(false, false, false), $h, $ty, (a, b) [a, b, 0] |a, b, _| -minimum(-a, -b));
        halves!($all, "min.NaN", mode(false, false, false), $h, $ty, (a, b) [a, b, 0]
            |a, b, _| if a.is_nan() || b.is_nan() { f64::NAN } else { minimum(a, b) });
        halves!($all, "max.NaN", mode(false, false, false), $h, $ty, (a, b) [a, b, 0]
            |a, b, _| if a.is_nan() || b.is_nan() { f64::NAN } else { -minimum(-a, -b) });
        halves!($all, "tanh.approx", mode(false, false, false), $h, $ty, (a) [a, 0, 0] |a, _, _| libm::tanh(a));
    };
}

/// The operand that is a number; -0 below +0.
fn minimum(a: f64, b: f64) -> f64 {
    if a.is_nan() || b < a || (a == b && b.is_sign_negative()) { b } else { a }
}

const SIGN: u32 = 0x8000_8000;

pub fn rows() -> Rows {
    let mut all: Rows = Vec::new();
    format!(all, Half::F16, "f16");
    format!(all, Half::Bf16, "bf16");
    // Modes that f16 alone has.
    halves!(all, "add{,.rn}.ftz", mode(true, false, false), Half::F16, "f16", (a, b) [a, b, 0] |a, b, _| add_odd(a, b));
    halves!(all, "sub{,.rn}.ftz", mode(true, false, false), Half::F16, "f16", (a, b) [a, b, 0] |a, b, _| add_odd(a, -b));
    halves!(all, "mul{,.rn}.ftz", mode(true, false, false), Half::F16, "f16", (a, b) [a, b, 0] |a, b, _| a * b);
    halves!(all, "fma.rn.ftz", mode(true, false, false), Half::F16, "f16", (a, b, c) [a, b, c] fma_odd);
    halves!(all, "add{,.rn}.sat", mode(false, true, false), Half::F16, "f16", (a, b) [a, b, 0] |a, b, _| add_odd(a, b));
    halves!(all, "mul{,.rn}.sat", mode(false, true, false), Half::F16, "f16", (a, b) [a, b, 0] |a, b, _| a * b);
    halves!(all, "fma.rn.sat", mode(false, true, false), Half::F16, "f16", (a, b, c) [a, b, c] fma_odd);
    halves!(all, "ex2.approx", mode(false, false, false), Half::F16, "f16", (a) [a, 0, 0] |a, _, _| libm::exp2(a));
    halves!(all, "ex2.approx.ftz", mode(true, false, false), Half::Bf16, "bf16", (a) [a, 0, 0] |a, _, _| libm::exp2(a));
    all.push(("neg.{f16,bf16}", rare!((u16) -> u16, |a| a ^ 0x8000)));
    all.push(("abs.{f16,bf16}", rare!((u16) -> u16, |a| a & 0x7fff)));
    all.push(("neg.{f16x2,bf16x2}", rare!((u32) -> u32, |a| a ^ SIGN)));
    all.push(("abs.{f16x2,bf16x2}", rare!((u32) -> u32, |a| a & !SIGN)));
    // Mixed precision (PTX 8.6): exact widening of the first operand, float32 arithmetic.
    all.push(("add{,.rn}.f32.bf16", rare!((u16, f32) -> f32, |a, b| fp::Half::Bf16.value(a) as f32 + b)));
    all.push(("add{,.rn}.f32.f16", rare!((u16, f32) -> f32, |a, b| fp::Half::F16.value(a) as f32 + b)));
    all
}
