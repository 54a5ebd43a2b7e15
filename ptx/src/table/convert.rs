/*!
Conversions. Float to integer clamps and NaN becomes 0; integer to integer extends by the source's sign and cuts.
*/

use super::Rows;
use crate::exec::regs::{Ftz, kern, rare};
use crate::fp::{self, CANONICAL_NAN, Directed, Half, direct, flush};

/// Integers of every width: `$wide` is how a value of type `$s` is read as `$t`'s source.
macro_rules! between {
    ($all:ident, $d:ident $dn:literal) => {
        between!($all, $d $dn, u8 "u8");
        between!($all, $d $dn, i8 "s8");
        between!($all, $d $dn, u16 "u16");
        between!($all, $d $dn, i16 "s16");
        between!($all, $d $dn, u32 "u32");
        between!($all, $d $dn, i32 "s32");
        between!($all, $d $dn, u64 "u64");
        between!($all, $d $dn, i64 "s64");
    };
    ($all:ident, $d:ident $dn:literal, $s:ident $sn:literal) => {
        $all.push((concat!("cvt.", $dn, ".", $sn), rare!((u64) -> u64, |a| (a as $s) as $d as i64 as u64)));
        $all.push((concat!("cvt.sat.", $dn, ".", $sn), rare!((u64) -> u64, |a| {
            let v = i128::from(a as $s);
            v.clamp(i128::from(<$d>::MIN), i128::from(<$d>::MAX)) as $d as i64 as u64
        })));
    };
}

/// From and to floats, for one integer type.
macro_rules! floats {
    ($all:ident, $i:ident $n:literal) => {
        $all.push((concat!("cvt.rn.f32.", $n), rare!((u64) -> f32, |a| (a as $i) as f32)));
        $all.push((concat!("cvt.rz.f32.", $n), rare!((u64) -> f32, |a| whole(i128::from(a as $i), Directed::Zero))));
        $all.push((concat!("cvt.rm.f32.", $n), rare!((u64) -> f32, |a| whole(i128::from(a as $i), Directed::Down))));
        $all.push((concat!("cvt.rp.f32.", $n), rare!((u64) -> f32, |a| whole(i128::from(a as $i), Directed::Up))));
        $all.push((concat!("cvt.rn.f64.", $n), rare!((u64) -> f64, |a| (a as $i) as f64)));
        $all.push((concat!("cvt.rn.f16.", $n), rare!((u64) -> u16, |a| Half::F16.bits(small(i128::from(a as $i))))));
        $all.push((concat!("cvt.rn.bf16.", $n), rare!((u64) -> u16, |a| Half::Bf16.bits(sticky(i128::from(a as $i))))));
        floats!(@ $all, $i $n, "rni", round_ties_even);
        floats!(@ $all, $i $n, "rzi", trunc);
        floats!(@ $all, $i $n, "rmi", floor);
        floats!(@ $all, $i $n, "rpi", ceil);
    };
    (@ $all:ident, $i:ident $n:literal, $r:literal, $f:ident) => {
        $all.push((concat!("cvt.", $r, "{,.sat}.", $n, ".f32"), rare!((f32) -> u64, |a| a.$f() as $i as i64 as u64)));
        $all.push((concat!("cvt.", $r, ".ftz{,.sat}.", $n, ".f32"), rare!((Ftz) -> u64, |a| a.0.$f() as $i as i64 as u64)));
        $all.push((concat!("cvt.", $r, "{,.sat}.", $n, ".f64"), rare!((f64) -> u64, |a| a.$f() as $i as i64 as u64)));
        $all.push((concat!("cvt.", $r, "{,.sat}.", $n, ".f16"), rare!((u16) -> u64, |a| Half::F16.value(a).$f() as $i as i64 as u64)));
        $all.push((concat!("cvt.", $r, "{,.sat}.", $n, ".bf16"), rare!((u16) -> u64, |a| Half::Bf16.value(a).$f() as $i as i64 as u64)));
    };
}

/// A whole number of at most 64 bits as a float64 rounded to odd.
fn sticky(v: i128) -> f64 {
    let m = v.unsigned_abs() as u64;
    let up = 64u32.saturating_sub(m.leading_zeros()).saturating_sub(53);
    let kept = (m >> up) | u64::from(m & ((1 << up) - 1) != 0);
    libm::ldexp(kept as f64, up as i32) * if v < 0 { -1.0 } else { 1.0 }
}

/// The same where f16 is the goal: everything beyond its range is infinity anyway.
fn small(v: i128) -> f64 {
    sticky(v)
}

fn whole(v: i128, to: Directed) -> f32 {
    direct(sticky(v), to)
}

#[inline(always)]
fn sat(v: f32) -> f32 {
    if v > 0.0 { if v < 1.0 { v } else { 1.0 } } else { 0.0 }
}

fn relu(v: f32) -> f32 {
    if v < 0.0 { 0.0 } else { v }
}

/// float32 to bf16 bits, nearest even; NaN 0x7fff.
#[inline(always)]
fn bf16(v: u32) -> u32 {
    let r = v.wrapping_add(0x7fff + (v >> 16 & 1)) >> 16;
    if v & 0x7fff_ffff > 0x7f80_0000 { 0x7fff } else { r }
}

#[inline(always)]
fn f16(v: f32) -> u32 {
    u32::from(Half::F16.bits(f64::from(v)))
}

fn pack(high: u32, low: u32) -> u32 {
    high << 16 | low & 0xffff
}

/// satfinite: beyond the largest value, it; NaN stays.
fn finite(h: Half, v: f32) -> f64 {
    let most = match h {
        Half::F16 => 65504.0,
        Half::Bf16 => f64::from(f32::from_bits(0x7f7f_0000)),
    };
    f64::from(v).clamp(-most, most)
}

/// A half's bits widened exactly; NaN canonical.
#[inline(always)]
fn widen(h: u16) -> f32 {
    Half::F16.value(h) as f32
}

pub fn rows() -> Rows {
    let mut all: Rows = Vec::new();
    integers(&mut all);
    to_halves(&mut all);
    float_to_float(&mut all);
    eight_bit(&mut all);
    frequent(&mut all);
    all
}

/// The conversions of addresses and indices, which every kernel makes; they replace the rows above.
fn frequent(all: &mut Rows) {
    let rows: Rows = vec![
        ("cvt.u64.u32", kern!((u32) -> u64, |a| u64::from(a))),
        ("cvt.s64.s32", kern!((i32) -> i64, |a| i64::from(a))),
        ("cvt.u32.u64", kern!((u64) -> u64, |a| a & 0xffff_ffff)),
        ("cvt.u32.u16", kern!((u16) -> u32, |a| u32::from(a))),
        ("cvt.u16.u32", kern!((u32) -> u32, |a| a & 0xffff)),
        ("cvt.rn.f32.s32", kern!((i32) -> f32, |a| a as f32)),
        ("cvt.f32.bf16", kern!((u16) -> u32, |a| u32::from(a) << 16)),
    ];
    for row in rows {
        all.retain(|r| r.0 != row.0);
        all.push(row);
    }
}

fn integers(all: &mut Rows) {
    between!(all, u8 "u8");
    between!(all, i8 "s8");
    between!(all, u16 "u16");
    between!(all, i16 "s16");
    between!(all, u32 "u32");
    between!(all, i32 "s32");
    between!(all, u64 "u64");
    between!(all, i64 "s64");
    floats!(all, u8 "u8");
    floats!(all, i8 "s8");
    floats!(all, u16 "u16");
    floats!(all, i16 "s16");
    floats!(all, u32 "u32");
    floats!(all, i32 "s32");
    floats!(all, u64 "u64");
    floats!(all, i64 "s64");
}

fn to_halves(all: &mut Rows) {
    all.push(("cvt.rn.bf16x2.f32", kern!((u32, u32) -> u32, |a, b| pack(bf16(a), bf16(b)))));
    all.push(("cvt.rn.bf16.f32", kern!((u32) -> u32, |a| bf16(a))));
    all.push(("cvt.rn.f16x2.f32", rare!((f32, f32) -> u32, |a, b| pack(f16(a), f16(b)))));
    all.push(("cvt.rn.f16.f32", rare!((f32) -> u32, |a| f16(a))));
    all.push(("cvt.rn.ftz.f16.f32", rare!((Ftz) -> u32, |a| f16(a.0))));
    all.push((
        "cvt.rn.relu.bf16x2.f32",
        rare!((f32, f32) -> u32, |a, b| pack(bf16(relu(a).to_bits()), bf16(relu(b).to_bits()))),
    ));
    all.push(("cvt.rn.relu.bf16.f32", rare!((f32) -> u32, |a| bf16(relu(a).to_bits()))));
    all.push(("cvt.rn.relu.f16x2.f32", rare!((f32, f32) -> u32, |a, b| pack(f16(relu(a)), f16(relu(b))))));
    all.push(("cvt.rn.relu.f16.f32", rare!((f32) -> u32, |a| f16(relu(a)))));
    all.push(("cvt.rn.satfinite.f16.f32", rare!((f32) -> u16, |a| Half::F16.bits(finite(Half::F16, a)))));
    all.push(("cvt.rn.satfinite.bf16.f32", rare!((f32) -> u16, |a| Half::Bf16.bits(finite(Half::Bf16, a)))));
    all.push((
        "cvt.rz.bf16x2.f32",
        rare!((f32, f32) -> u32, |a, b| {
            let cut = |v: f32| u32::from(Half::Bf16.bits_toward_zero(f64::from(v)));
            pack(cut(a), cut(b))
        }),
    ));
    all.push(("cvt.rz.bf16.f32", rare!((f32) -> u16, |a| Half::Bf16.bits_toward_zero(f64::from(a)))));
    all.push(("cvt.rz.f16.f32", rare!((f32) -> u16, |a| toward_zero_f16(a))));
    all.push(("cvt.rn.f16.f64", rare!((f64) -> u16, |a| Half::F16.bits(a))));
    all.push(("cvt.rn.bf16.f16", rare!((u16) -> u16, |a| Half::Bf16.bits(Half::F16.value(a)))));
    all.push(("cvt.rn.f16.bf16", rare!((u16) -> u16, |a| Half::F16.bits(Half::Bf16.value(a)))));
    all.push(("cvt.rna.tf32.f32", rare!((u32) -> u32, |a| fp::tf32_away(a))));
    all.push(("cvt{,.rn}.f32.f16", rare!((u16) -> f32, |a| widen(a))));
    all.push(("cvt.ftz.f32.f16", rare!((u16) -> f32, |a| widen(a))));
    all.push(("cvt.sat.f32.f16", rare!((u16) -> f32, |a| sat(widen(a)))));
    all.push(("cvt.f32.bf16", rare!((u16) -> u32, |a| u32::from(a) << 16)));
    all.push(("cvt.f64.f16", rare!((u16) -> f64, |a| Half::F16.value(a))));
}

fn toward_zero_f16(a: f32) -> u16 {
    // Beyond the largest value toward zero is that value.
    let v = f64::from(a);
    if v.is_finite() && v.abs() > 65504.0 {
        0x7bff | u16::from(v < 0.0) << 15
    } else {
        Half::F16.bits_toward_zero(v)
    }
}

macro_rules! to_whole {
    ($all:ident, $r:literal, $f:ident) => {
        $all.push((concat!("cvt.", $r, ".f32.f32"), rare!((f32) -> f32, |a| a.$f())));
        $all.push((concat!("cvt.", $r, ".ftz.f32.f32"), rare!((Ftz) -> Ftz, |a| Ftz(a.0.$f()))));
        $all.push((concat!("cvt.", $r, ".sat.f32.f32"), rare!((f32) -> f32, |a| sat(a.$f()))));
        $all.push((concat!("cvt.", $r, ".f64.f64"), rare!((f64) -> f64, |a| a.$f())));
        $all.push((concat!("cvt.", $r, ".f16.f16"), rare!((u16) -> u16, |a| Half::F16.bits(Half::F16.value(a).$f()))));
    };
}

fn float_to_float(all: &mut Rows) {
    to_whole!(all, "rni", round_ties_even);
    to_whole!(all, "rzi", trunc);
    to_whole!(all, "rmi", floor);
    to_whole!(all, "rpi", ceil);
    all.push((
        "cvt.f32.f32",
        rare!((u32) -> u32, |a| if a & 0x7fff_ffff > 0x7f80_0000 { CANONICAL_NAN } else { a }),
    ));
    all.push((
        "cvt.ftz.f32.f32",
        rare!((u32) -> u32, |a| if a & 0x7fff_ffff > 0x7f80_0000 { CANONICAL_NAN } else { flush(a) }),
    ));
    all.push(("cvt.sat.f32.f32", rare!((f32) -> f32, |a| sat(a))));
    all.push(("cvt.ftz.sat.f32.f32", rare!((Ftz) -> Ftz, |a| Ftz(sat(a.0)))));
    all.push(("cvt.rn.f32.f64", rare!((f64) -> f32, |a| a as f32)));
    all.push(("cvt.rn.ftz.f32.f64", rare!((f64) -> Ftz, |a| Ftz(a as f32))));
    all.push(("cvt.rz.f32.f64", rare!((f64) -> f32, |a| direct(a, Directed::Zero))));
    all.push(("cvt.rm.f32.f64", rare!((f64) -> f32, |a| direct(a, Directed::Down))));
    all.push(("cvt.rp.f32.f64", rare!((f64) -> f32, |a| direct(a, Directed::Up))));
    all.push(("cvt.f64.f32", rare!((f32) -> f64, |a| f64::from(a))));
    all.push(("cvt.ftz.f64.f32", rare!((Ftz) -> f64, |a| f64::from(a.0))));
}

fn eight_bit(all: &mut Rows) {
    all.push((
        "cvt.rn.satfinite.e4m3x2.f32",
        rare!((f32, f32) -> u16, |a, b| {
            u16::from(fp::e4m3(f64::from(a))) << 8 | u16::from(fp::e4m3(f64::from(b)))
        }),
    ));
    all.push((
        "cvt.rn.satfinite.e5m2x2.f32",
        rare!((f32, f32) -> u16, |a, b| {
            u16::from(fp::e5m2(f64::from(a))) << 8 | u16::from(fp::e5m2(f64::from(b)))
        }),
    ));
    all.push((
        "cvt.rn.satfinite.e4m3x2.f16x2",
        rare!((u32) -> u16, |a| {
            let byte = |h: u32| u16::from(fp::e4m3(Half::F16.value(h as u16)));
            byte(a >> 16) << 8 | byte(a)
        }),
    ));
    all.push((
        "cvt.rn.satfinite.e5m2x2.f16x2",
        rare!((u32) -> u16, |a| {
            let byte = |h: u32| u16::from(fp::e5m2(Half::F16.value(h as u16)));
            byte(a >> 16) << 8 | byte(a)
        }),
    ));
    all.push((
        "cvt.rn.f16x2.e4m3x2",
        rare!((u16) -> u32, |a| {
            let half = |b: u16| u32::from(Half::F16.bits(fp::e4m3_value(b as u8)));
            pack(half(a >> 8), half(a))
        }),
    ));
    all.push((
        "cvt.rn.f16x2.e5m2x2",
        rare!((u16) -> u32, |a| {
            let half = |b: u16| u32::from(Half::F16.bits(fp::e5m2_value(b as u8)));
            pack(half(a >> 8), half(a))
        }),
    ));
}
