/*! float32 and float64 arithmetic, and the approximate functions. float32 results that are NaN are 0x7fffffff. */

use super::Rows;
use crate::exec::regs::{Ftz, kern, rare};
use crate::fp::{self, Directed, add_odd, direct, div_odd, fma_odd, sqrt_odd};

/// `.sat`: [0, 1], NaN to 0.
#[inline(always)]
fn sat(v: f32) -> f32 {
    if v > 0.0 { if v < 1.0 { v } else { 1.0 } } else { 0.0 }
}

macro_rules! as_f32 {
    ($a:ident) => {
        f32
    };
}
macro_rules! as_ftz {
    ($a:ident) => {
        Ftz
    };
}

/// Two rows, plain and `.ftz`, of one formula over float32 values; `after` stands behind `.ftz`, `how` is the macro
/// that makes a row.
macro_rules! pair {
    ($all:ident, $name:expr, $after:expr, ($($a:ident),+) $e:expr) => {
        pair!(kern $all, $name, $after, ($($a),+) $e);
    };
    ($how:ident $all:ident, $name:expr, $after:expr, ($($a:ident),+) $e:expr) => {
        $all.push((concat!($name, $after, ".f32"), $how!(($(as_f32!($a)),+) -> f32, |$($a),+| $e)));
        $all.push((concat!($name, ".ftz", $after, ".f32"), $how!(($(as_ftz!($a)),+) -> Ftz, |$($a),+| {
            $(let $a = $a.0;)+
            Ftz($e)
        })));
    };
}

/// The directed roundings of an operation whose result, rounded to odd, is `$e`.
macro_rules! directed {
    ($all:ident, $name:expr, ($($a:ident),+) $e:expr) => {
        pair!(rare $all, concat!($name, ".rz"), "", ($($a),+) direct($e, Directed::Zero));
        pair!(rare $all, concat!($name, ".rm"), "", ($($a),+) direct($e, Directed::Down));
        pair!(rare $all, concat!($name, ".rp"), "", ($($a),+) direct($e, Directed::Up));
    };
}

/// float64 of a float32.
#[inline(always)]
fn w(v: f32) -> f64 {
    f64::from(v)
}

pub fn rows() -> Rows {
    let mut all: Rows = Vec::new();
    nearest(&mut all);
    toward(&mut all);
    approximate(&mut all);
    signs(&mut all);
    double(&mut all);
    all
}

fn nearest(all: &mut Rows) {
    pair!(all, "add{,.rn}", "", (a, b) a + b);
    pair!(all, "sub{,.rn}", "", (a, b) a - b);
    pair!(all, "mul{,.rn}", "", (a, b) a * b);
    pair!(all, "fma.rn", "", (a, b, c) a.mul_add(b, c));
    pair!(rare all, "add{,.rn}", ".sat", (a, b) sat(a + b));
    pair!(rare all, "sub{,.rn}", ".sat", (a, b) sat(a - b));
    pair!(rare all, "mul{,.rn}", ".sat", (a, b) sat(a * b));
    pair!(rare all, "fma.rn", ".sat", (a, b, c) sat(a.mul_add(b, c)));
    pair!(all, "div.rn", "", (a, b) a / b);
    pair!(all, "rcp.rn", "", (a) 1.0 / a);
    pair!(all, "sqrt.rn", "", (a) a.sqrt());
    pair!(all, "min", "", (a, b) fp::min(a, b));
    pair!(all, "max", "", (a, b) fp::max(a, b));
    pair!(rare all, "min", ".NaN", (a, b) if a.is_nan() || b.is_nan() { f32::NAN } else { fp::min(a, b) });
    pair!(rare all, "max", ".NaN", (a, b) if a.is_nan() || b.is_nan() { f32::NAN } else { fp::max(a, b) });
}

fn toward(all: &mut Rows) {
    directed!(all, "add", (a, b) add_odd(w(a), w(b)));
    directed!(all, "sub", (a, b) add_odd(w(a), -w(b)));
    directed!(all, "mul", (a, b) w(a) * w(b));
    directed!(all, "fma", (a, b, c) fma_odd(w(a), w(b), w(c)));
    directed!(all, "div", (a, b) div_odd(a, b));
    directed!(all, "rcp", (a) div_odd(1.0, a));
    directed!(all, "sqrt", (a) sqrt_odd(a));
}

fn approximate(all: &mut Rows) {
    pair!(rare all, "ex2.approx", "", (a) fp::ex2(a));
    pair!(rare all, "lg2.approx", "", (a) fp::lg2(a));
    pair!(all, "rcp.approx", "", (a) fp::rcp(a));
    pair!(all, "rsqrt.approx", "", (a) fp::rsqrt(a));
    pair!(all, "sqrt.approx", "", (a) a.sqrt());
    pair!(rare all, "sin.approx", "", (a) fp::sin(a));
    pair!(rare all, "cos.approx", "", (a) fp::cos(a));
    pair!(rare all, "div.approx", "", (a, b) a / b);
    pair!(rare all, "div.full", "", (a, b) a / b);
    all.push(("tanh.approx.f32", rare!((f32) -> f32, |a| fp::tanh(a))));
}

fn signs(all: &mut Rows) {
    all.push(("neg.f32", kern!((u32) -> u32, |a| a ^ 1 << 31)));
    all.push(("abs.f32", kern!((u32) -> u32, |a| a & !(1 << 31))));
    all.push(("neg.ftz.f32", kern!((u32) -> u32, |a| fp::flush(a) ^ 1 << 31)));
    all.push(("abs.ftz.f32", kern!((u32) -> u32, |a| fp::flush(a) & !(1 << 31))));
    all.push(("copysign.f32", kern!((u32, u32) -> u32, |a, b| b & !(1 << 31) | a & 1 << 31)));
    all.push(("neg.f64", kern!((u64) -> u64, |a| a ^ 1 << 63)));
    all.push(("abs.f64", kern!((u64) -> u64, |a| a & !(1 << 63))));
    all.push(("copysign.f64", kern!((u64, u64) -> u64, |a, b| b & !(1 << 63) | a & 1 << 63)));
    all.push(("testp.finite.f32", rare!((f32) -> bool, |a| a.is_finite())));
    all.push(("testp.infinite.f32", rare!((f32) -> bool, |a| a.is_infinite())));
    all.push(("testp.number.f32", rare!((f32) -> bool, |a| !a.is_nan())));
    all.push(("testp.notanumber.f32", rare!((f32) -> bool, |a| a.is_nan())));
    all.push(("testp.normal.f32", rare!((f32) -> bool, |a| a.is_normal())));
    all.push(("testp.subnormal.f32", rare!((f32) -> bool, |a| a.is_subnormal())));
}

fn double(all: &mut Rows) {
    all.push(("add{,.rn}.f64", rare!((f64, f64) -> f64, |a, b| a + b)));
    all.push(("sub{,.rn}.f64", rare!((f64, f64) -> f64, |a, b| a - b)));
    all.push(("mul{,.rn}.f64", rare!((f64, f64) -> f64, |a, b| a * b)));
    all.push(("fma.rn.f64", rare!((f64, f64, f64) -> f64, |a, b, c| a.mul_add(b, c))));
    all.push(("div.rn.f64", rare!((f64, f64) -> f64, |a, b| a / b)));
    all.push(("rcp.rn.f64", rare!((f64) -> f64, |a| 1.0 / a)));
    all.push(("sqrt.rn.f64", rare!((f64) -> f64, |a| a.sqrt())));
    all.push(("min.f64", rare!((f64, f64) -> f64, |a, b| a.min(b))));
    all.push(("max.f64", rare!((f64, f64) -> f64, |a, b| a.max(b))));
}
