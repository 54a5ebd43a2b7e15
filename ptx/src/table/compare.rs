/*!
Comparisons of setp, named by comparison and type: `eq.s32`. How the result joins a predicate is the instruction's.

Unordered comparisons (`equ`, `ltu` …) are true where an operand is NaN; ordered ones, `ne` included, are false.
*/
// Unordered comparisons are negations of ordered ones, and `a < b || a > b` is not `a != b`: NaN.
#![allow(clippy::neg_cmp_op_on_partial_ord, clippy::nonminimal_bool, clippy::double_comparisons)]

use super::Rows;
use crate::exec::regs::{Ftz, compare, compare_rare};
use crate::fp::Half;

macro_rules! ordered {
    ($all:ident, $names:literal, $t:ty) => {
        $all.push((concat!("setp.lt.", $names), compare!($t, |a, b| a < b)));
        $all.push((concat!("setp.le.", $names), compare!($t, |a, b| a <= b)));
        $all.push((concat!("setp.gt.", $names), compare!($t, |a, b| a > b)));
        $all.push((concat!("setp.ge.", $names), compare!($t, |a, b| a >= b)));
    };
}

macro_rules! equal {
    ($all:ident, $names:literal, $t:ty) => {
        $all.push((concat!("setp.eq.", $names), compare!($t, |a, b| a == b)));
        $all.push((concat!("setp.ne.", $names), compare!($t, |a, b| a != b)));
    };
}

/// Comparisons of a float type; `$v` gives the value of a lane.
macro_rules! floats {
    ($all:ident, $how:ident, $name:literal, $t:ty, $v:expr) => {
        floats!(@ $all, $how, "eq", $name, $t, $v, |a, b| a == b);
        floats!(@ $all, $how, "ne", $name, $t, $v, |a, b| a < b || a > b);
        floats!(@ $all, $how, "lt", $name, $t, $v, |a, b| a < b);
        floats!(@ $all, $how, "le", $name, $t, $v, |a, b| a <= b);
        floats!(@ $all, $how, "gt", $name, $t, $v, |a, b| a > b);
        floats!(@ $all, $how, "ge", $name, $t, $v, |a, b| a >= b);
        floats!(@ $all, $how, "equ", $name, $t, $v, |a, b| !(a < b || a > b));
        floats!(@ $all, $how, "neu", $name, $t, $v, |a, b| a != b);
        floats!(@ $all, $how, "ltu", $name, $t, $v, |a, b| !(a >= b));
        floats!(@ $all, $how, "leu", $name, $t, $v, |a, b| !(a > b));
        floats!(@ $all, $how, "gtu", $name, $t, $v, |a, b| !(a <= b));
        floats!(@ $all, $how, "geu", $name, $t, $v, |a, b| !(a < b));
        floats!(@ $all, $how, "num", $name, $t, $v, |a, b| !a.is_nan() && !b.is_nan());
        floats!(@ $all, $how, "nan", $name, $t, $v, |a, b| a.is_nan() || b.is_nan());
    };
    (@ $all:ident, $how:ident, $op:literal, $name:literal, $t:ty, $v:expr, |$a:ident, $b:ident| $e:expr) => {
        $all.push((concat!("setp.", $op, ".", $name), $how!($t, |x, y| {
            let ($a, $b) = ($v(x), $v(y));
            $e
        })));
    };
}

#[inline(always)]
fn same<T>(v: T) -> T {
    v
}
#[inline(always)]
fn flushed(v: Ftz) -> f32 {
    // Comparing reads subnormals as zero; `Ftz` already did.
    v.0
}

pub fn rows() -> Rows {
    let mut all: Rows = Vec::new();
    equal!(all, "{b16,u16,s16}", u16);
    equal!(all, "{b32,u32,s32}", u32);
    equal!(all, "{b64,u64,s64}", u64);
    ordered!(all, "u16", u16);
    ordered!(all, "s16", i16);
    ordered!(all, "u32", u32);
    ordered!(all, "s32", i32);
    ordered!(all, "u64", u64);
    ordered!(all, "s64", i64);
    all.push(("setp.lo.u32", compare!(u32, |a, b| a < b)));
    all.push(("setp.ls.u32", compare!(u32, |a, b| a <= b)));
    all.push(("setp.hi.u32", compare!(u32, |a, b| a > b)));
    all.push(("setp.hs.u32", compare!(u32, |a, b| a >= b)));
    floats!(all, compare, "f32", f32, same);
    floats!(all, compare_rare, "ftz.f32", Ftz, flushed);
    floats!(all, compare_rare, "f64", f64, same);
    floats!(all, compare_rare, "f16", u16, |v| Half::F16.value(v));
    floats!(all, compare_rare, "bf16", u16, |v| Half::Bf16.value(v));
    all
}
