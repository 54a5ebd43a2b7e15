/*!
Integer, logic, bit-field, move and select operations.

Shifts clamp at the width; division by zero gives all ones (remainder: the dividend), which PTX leaves open.
*/

use super::Rows;
use crate::exec::regs::{kern, rare};

/// prmt without a mode: each nibble of `s` names a byte of b:a, its top bit replicates the byte's sign.
pub fn permute(a: u32, b: u32, s: u32) -> u32 {
    let v = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |out, i| {
        let n = s >> (4 * i) & 15;
        let byte = (v >> (8 * (n & 7))) as u8;
        let byte = if n & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        out | u32::from(byte) << (8 * i)
    })
}

/// prmt with a mode: the selectors that the mode makes of the low two bits of `s`.
fn permute_mode(a: u32, b: u32, s: u32, selectors: [u32; 4]) -> u32 {
    permute(a, b, selectors[(s & 3) as usize])
}

fn lop3(a: u32, b: u32, c: u32, table: u32) -> u32 {
    (0..8).filter(|i| table >> i & 1 != 0).fold(0, |out, i| {
        let pick = |v: u32, on: bool| if on { v } else { !v };
        out | pick(a, i & 4 != 0) & pick(b, i & 2 != 0) & pick(c, i & 1 != 0)
    })
}

/// Mask of `n` low bits, at most 64.
fn low(n: u32) -> u64 {
    if n >= 64 { !0 } else { (1 << n) - 1 }
}

/// bfe of `width` bits: field of `len` bits at `pos`, filled with the sign where `signed`.
pub fn extract(a: u64, pos: u32, len: u32, width: u32, signed: bool) -> u64 {
    let (pos, len) = (pos & 255, len & 255);
    if len == 0 {
        return 0;
    }
    let sign = signed && a >> (pos + len - 1).min(width - 1) & 1 != 0;
    let field = if pos >= width { 0 } else { a >> pos };
    // Bits of the field that exist in the source.
    let there = low(len.min(width.saturating_sub(pos)));
    field & there | if sign { !there } else { 0 }
}

/// bfi: the low `len` bits of `a` into `b` at `pos`.
pub fn insert(a: u64, b: u64, pos: u32, len: u32, width: u32) -> u64 {
    let (pos, len) = (pos & 255, len & 255);
    if len == 0 || pos >= width {
        return b;
    }
    let mask = low(len) << pos;
    b & !mask | (a << pos) & mask
}

/// bfind: position of the most significant bit that is not the sign; all ones where there is none.
fn find_bit(a: u64, width: u32, signed: bool) -> u32 {
    let a = if signed && a >> (width - 1) & 1 != 0 { !a & low(width) } else { a };
    if a == 0 { !0 } else { 63 - a.leading_zeros() }
}

fn dot4(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool) -> u32 {
    let byte = |v: u32, i: u32, s: bool| {
        let v = (v >> (8 * i)) as u8;
        if s { i32::from(v as i8) } else { i32::from(v) }
    };
    (0..4).fold(c, |s, i| s.wrapping_add((byte(a, i, a_signed) * byte(b, i, b_signed)) as u32))
}

pub fn rows() -> Rows {
    let mut all = arithmetic();
    all.extend(wide());
    all.extend(logic());
    all.extend(fields());
    all.extend(moves());
    all
}

fn arithmetic() -> Rows {
    vec![
        ("add.{u16,s16}", kern!((u16, u16) -> u16, |a, b| a.wrapping_add(b))),
        ("add.{u32,s32}", kern!((u32, u32) -> u32, |a, b| a.wrapping_add(b))),
        ("add.{u64,s64}", kern!((u64, u64) -> u64, |a, b| a.wrapping_add(b))),
        ("add.sat.s32", rare!((i32, i32) -> i32, |a, b| a.saturating_add(b))),
        ("sub.{u16,s16}", kern!((u16, u16) -> u16, |a, b| a.wrapping_sub(b))),
        ("sub.{u32,s32}", kern!((u32, u32) -> u32, |a, b| a.wrapping_sub(b))),
        ("sub.{u64,s64}", kern!((u64, u64) -> u64, |a, b| a.wrapping_sub(b))),
        ("sub.sat.s32", rare!((i32, i32) -> i32, |a, b| a.saturating_sub(b))),
        ("mul.lo.{u16,s16}", kern!((u16, u16) -> u16, |a, b| a.wrapping_mul(b))),
        ("mul.lo.{u32,s32}", kern!((u32, u32) -> u32, |a, b| a.wrapping_mul(b))),
        ("mul.lo.{u64,s64}", kern!((u64, u64) -> u64, |a, b| a.wrapping_mul(b))),
        ("mul.hi.u16", rare!((u16, u16) -> u16, |a, b| ((u32::from(a) * u32::from(b)) >> 16) as u16)),
        ("mul.hi.s16", rare!((i16, i16) -> i16, |a, b| ((i32::from(a) * i32::from(b)) >> 16) as i16)),
        ("mul.hi.u32", kern!((u32, u32) -> u32, |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32)),
        ("mul.hi.s32", kern!((i32, i32) -> i32, |a, b| ((i64::from(a) * i64::from(b)) >> 32) as i32)),
        ("mul.hi.u64", rare!((u64, u64) -> u64, |a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64)),
        ("mul.hi.s64", rare!((i64, i64) -> i64, |a, b| ((i128::from(a) * i128::from(b)) >> 64) as i64)),
        ("mad.lo.{u16,s16}", rare!((u16, u16, u16) -> u16, |a, b, c| a.wrapping_mul(b).wrapping_add(c))),
        ("mad.lo.{u32,s32}", kern!((u32, u32, u32) -> u32, |a, b, c| a.wrapping_mul(b).wrapping_add(c))),
        ("mad.lo.{u64,s64}", kern!((u64, u64, u64) -> u64, |a, b, c| a.wrapping_mul(b).wrapping_add(c))),
        (
            "mad.hi.u32",
            rare!((u32, u32, u32) -> u32, |a, b, c| (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c)),
        ),
        (
            "mad.hi.s32",
            rare!((i32, i32, i32) -> i32, |a, b, c| (((i64::from(a) * i64::from(b)) >> 32) as i32).wrapping_add(c)),
        ),
        ("div.u16", rare!((u16, u16) -> u16, |a, b| a.checked_div(b).unwrap_or(!0))),
        ("div.s16", rare!((i16, i16) -> i16, |a, b| if b == 0 { -1 } else { a.wrapping_div(b) })),
        ("div.u32", rare!((u32, u32) -> u32, |a, b| a.checked_div(b).unwrap_or(!0))),
        ("div.s32", rare!((i32, i32) -> i32, |a, b| if b == 0 { -1 } else { a.wrapping_div(b) })),
        ("div.u64", rare!((u64, u64) -> u64, |a, b| a.checked_div(b).unwrap_or(!0))),
        ("div.s64", rare!((i64, i64) -> i64, |a, b| if b == 0 { -1 } else { a.wrapping_div(b) })),
        ("rem.u16", rare!((u16, u16) -> u16, |a, b| a.checked_rem(b).unwrap_or(a))),
        ("rem.s16", rare!((i16, i16) -> i16, |a, b| if b == 0 { a } else { a.wrapping_rem(b) })),
        ("rem.u32", rare!((u32, u32) -> u32, |a, b| a.checked_rem(b).unwrap_or(a))),
        ("rem.s32", rare!((i32, i32) -> i32, |a, b| if b == 0 { a } else { a.wrapping_rem(b) })),
        ("rem.u64", rare!((u64, u64) -> u64, |a, b| a.checked_rem(b).unwrap_or(a))),
        ("rem.s64", rare!((i64, i64) -> i64, |a, b| if b == 0 { a } else { a.wrapping_rem(b) })),
        ("min.u16", rare!((u16, u16) -> u16, |a, b| a.min(b))),
        ("min.s16", rare!((i16, i16) -> i16, |a, b| a.min(b))),
        ("min.u32", kern!((u32, u32) -> u32, |a, b| a.min(b))),
        ("min.s32", kern!((i32, i32) -> i32, |a, b| a.min(b))),
        ("min.u64", rare!((u64, u64) -> u64, |a, b| a.min(b))),
        ("min.s64", rare!((i64, i64) -> i64, |a, b| a.min(b))),
        ("max.u16", rare!((u16, u16) -> u16, |a, b| a.max(b))),
        ("max.s16", rare!((i16, i16) -> i16, |a, b| a.max(b))),
        ("max.u32", kern!((u32, u32) -> u32, |a, b| a.max(b))),
        ("max.s32", kern!((i32, i32) -> i32, |a, b| a.max(b))),
        ("max.u64", rare!((u64, u64) -> u64, |a, b| a.max(b))),
        ("max.s64", rare!((i64, i64) -> i64, |a, b| a.max(b))),
        ("neg.s16", rare!((i16) -> i16, |a| a.wrapping_neg())),
        ("neg.s32", kern!((i32) -> i32, |a| a.wrapping_neg())),
        ("neg.s64", rare!((i64) -> i64, |a| a.wrapping_neg())),
        ("abs.s16", rare!((i16) -> i16, |a| a.wrapping_abs())),
        ("abs.s32", kern!((i32) -> i32, |a| a.wrapping_abs())),
        ("abs.s64", rare!((i64) -> i64, |a| a.wrapping_abs())),
        ("sad.u32", rare!((u32, u32, u32) -> u32, |a, b, c| a.abs_diff(b).wrapping_add(c))),
        ("sad.s32", rare!((i32, i32, u32) -> u32, |a, b, c| a.abs_diff(b).wrapping_add(c))),
        ("dp4a.u32.u32", rare!((u32, u32, u32) -> u32, |a, b, c| dot4(a, b, c, false, false))),
        ("dp4a.u32.s32", rare!((u32, u32, u32) -> u32, |a, b, c| dot4(a, b, c, false, true))),
        ("dp4a.s32.u32", rare!((u32, u32, u32) -> u32, |a, b, c| dot4(a, b, c, true, false))),
        ("dp4a.s32.s32", rare!((u32, u32, u32) -> u32, |a, b, c| dot4(a, b, c, true, true))),
    ]
}

fn wide() -> Rows {
    vec![
        ("mul.wide.u16", kern!((u16, u16) -> u32, |a, b| u32::from(a) * u32::from(b))),
        ("mul.wide.s16", kern!((i16, i16) -> i32, |a, b| i32::from(a) * i32::from(b))),
        ("mul.wide.u32", kern!((u32, u32) -> u64, |a, b| u64::from(a) * u64::from(b))),
        ("mul.wide.s32", kern!((i32, i32) -> i64, |a, b| i64::from(a) * i64::from(b))),
        (
            "mad.wide.u16",
            rare!((u16, u16, u32) -> u32, |a, b, c| (u32::from(a) * u32::from(b)).wrapping_add(c)),
        ),
        (
            "mad.wide.s16",
            rare!((i16, i16, i32) -> i32, |a, b, c| (i32::from(a) * i32::from(b)).wrapping_add(c)),
        ),
        (
            "mad.wide.u32",
            kern!((u32, u32, u64) -> u64, |a, b, c| (u64::from(a) * u64::from(b)).wrapping_add(c)),
        ),
        (
            "mad.wide.s32",
            kern!((i32, i32, i64) -> i64, |a, b, c| (i64::from(a) * i64::from(b)).wrapping_add(c)),
        ),
    ]
}

fn logic() -> Rows {
    vec![
        ("and.pred", kern!((bool, bool) -> bool, |a, b| a & b)),
        ("or.pred", kern!((bool, bool) -> bool, |a, b| a | b)),
        ("xor.pred", rare!((bool, bool) -> bool, |a, b| a ^ b)),
        ("not.pred", kern!((bool) -> bool, |a| !a)),
        ("and.b16", kern!((u16, u16) -> u16, |a, b| a & b)),
        ("and.b32", kern!((u32, u32) -> u32, |a, b| a & b)),
        ("and.b64", kern!((u64, u64) -> u64, |a, b| a & b)),
        ("or.b16", kern!((u16, u16) -> u16, |a, b| a | b)),
        ("or.b32", kern!((u32, u32) -> u32, |a, b| a | b)),
        ("or.b64", kern!((u64, u64) -> u64, |a, b| a | b)),
        ("xor.b16", kern!((u16, u16) -> u16, |a, b| a ^ b)),
        ("xor.b32", kern!((u32, u32) -> u32, |a, b| a ^ b)),
        ("xor.b64", kern!((u64, u64) -> u64, |a, b| a ^ b)),
        ("not.b16", kern!((u16) -> u16, |a| !a)),
        ("not.b32", kern!((u32) -> u32, |a| !a)),
        ("not.b64", kern!((u64) -> u64, |a| !a)),
        ("cnot.b16", rare!((u16) -> u16, |a| u16::from(a == 0))),
        ("cnot.b32", rare!((u32) -> u32, |a| u32::from(a == 0))),
        ("cnot.b64", rare!((u64) -> u64, |a| u64::from(a == 0))),
        ("lop3.b32", rare!((u32, u32, u32, u32) -> u32, |a, b, c, t| lop3(a, b, c, t))),
        ("shl.b16", kern!((u16, u32) -> u16, |a, n| if n > 15 { 0 } else { a << n })),
        ("shl.b32", kern!((u32, u32) -> u32, |a, n| if n > 31 { 0 } else { a << n })),
        ("shl.b64", kern!((u64, u32) -> u64, |a, n| if n > 63 { 0 } else { a << n })),
        ("shr.{b16,u16}", kern!((u16, u32) -> u16, |a, n| if n > 15 { 0 } else { a >> n })),
        ("shr.{b32,u32}", kern!((u32, u32) -> u32, |a, n| if n > 31 { 0 } else { a >> n })),
        ("shr.{b64,u64}", kern!((u64, u32) -> u64, |a, n| if n > 63 { 0 } else { a >> n })),
        ("shr.s16", rare!((i16, u32) -> i16, |a, n| a >> n.min(15))),
        ("shr.s32", kern!((i32, u32) -> i32, |a, n| a >> n.min(31))),
        ("shr.s64", rare!((i64, u32) -> i64, |a, n| a >> n.min(63))),
        (
            "shf.l.wrap.b32",
            rare!((u32, u32, u32) -> u32, |a, b, n| ((u64::from(b) << 32 | u64::from(a)) << (n & 31) >> 32) as u32),
        ),
        (
            "shf.l.clamp.b32",
            rare!((u32, u32, u32) -> u32, |a, b, n| ((u64::from(b) << 32 | u64::from(a)) << n.min(32) >> 32) as u32),
        ),
        (
            "shf.r.wrap.b32",
            rare!((u32, u32, u32) -> u32, |a, b, n| ((u64::from(b) << 32 | u64::from(a)) >> (n & 31)) as u32),
        ),
        (
            "shf.r.clamp.b32",
            rare!((u32, u32, u32) -> u32, |a, b, n| ((u64::from(b) << 32 | u64::from(a)) >> n.min(32)) as u32),
        ),
    ]
}

fn fields() -> Rows {
    vec![
        ("popc.b32", rare!((u32) -> u32, |a| a.count_ones())),
        ("popc.b64", rare!((u64) -> u32, |a| a.count_ones())),
        ("clz.b32", rare!((u32) -> u32, |a| a.leading_zeros())),
        ("clz.b64", rare!((u64) -> u32, |a| a.leading_zeros())),
        ("brev.b32", rare!((u32) -> u32, |a| a.reverse_bits())),
        ("brev.b64", rare!((u64) -> u64, |a| a.reverse_bits())),
        ("bfind.u32", rare!((u32) -> u32, |a| find_bit(u64::from(a), 32, false))),
        ("bfind.s32", rare!((u32) -> u32, |a| find_bit(u64::from(a), 32, true))),
        ("bfind.u64", rare!((u64) -> u32, |a| find_bit(a, 64, false))),
        ("bfind.s64", rare!((u64) -> u32, |a| find_bit(a, 64, true))),
        (
            "bfind.shiftamt.u32",
            rare!((u32) -> u32, |a| {
                let p = find_bit(u64::from(a), 32, false);
                if p > 31 { p } else { 31 - p }
            }),
        ),
        (
            "bfind.shiftamt.s32",
            rare!((u32) -> u32, |a| {
                let p = find_bit(u64::from(a), 32, true);
                if p > 31 { p } else { 31 - p }
            }),
        ),
        ("bfe.u32", rare!((u32, u32, u32) -> u32, |a, p, n| extract(u64::from(a), p, n, 32, false) as u32)),
        ("bfe.s32", rare!((u32, u32, u32) -> u32, |a, p, n| extract(u64::from(a), p, n, 32, true) as u32)),
        ("bfe.u64", rare!((u64, u32, u32) -> u64, |a, p, n| extract(a, p, n, 64, false))),
        ("bfe.s64", rare!((u64, u32, u32) -> u64, |a, p, n| extract(a, p, n, 64, true))),
        (
            "bfi.b32",
            rare!((u32, u32, u32, u32) -> u32, |a, b, p, n| insert(u64::from(a), u64::from(b), p, n, 32) as u32),
        ),
        ("bfi.b64", rare!((u64, u64, u32, u32) -> u64, |a, b, p, n| insert(a, b, p, n, 64))),
        ("prmt.b32", rare!((u32, u32, u32) -> u32, |a, b, s| permute(a, b, s))),
        (
            "prmt.b32.f4e",
            rare!((u32, u32, u32) -> u32, |a, b, s| permute_mode(a, b, s, [0x3210, 0x4321, 0x5432, 0x6543])),
        ),
        (
            "prmt.b32.b4e",
            rare!((u32, u32, u32) -> u32, |a, b, s| permute_mode(a, b, s, [0x5670, 0x6701, 0x7012, 0x0123])),
        ),
        (
            "prmt.b32.rc8",
            rare!((u32, u32, u32) -> u32, |a, b, s| permute_mode(a, b, s, [0x0000, 0x1111, 0x2222, 0x3333])),
        ),
        (
            "prmt.b32.ecl",
            rare!((u32, u32, u32) -> u32, |a, b, s| permute_mode(a, b, s, [0x3210, 0x3211, 0x3222, 0x3333])),
        ),
        (
            "prmt.b32.ecr",
            rare!((u32, u32, u32) -> u32, |a, b, s| permute_mode(a, b, s, [0x0000, 0x1110, 0x2210, 0x3210])),
        ),
        (
            "prmt.b32.rc16",
            rare!((u32, u32, u32) -> u32, |a, b, s| permute_mode(a, b, s, [0x1010, 0x3232, 0x1010, 0x3232])),
        ),
    ]
}

fn moves() -> Rows {
    vec![
        ("mov.pred", kern!((bool) -> bool, |a| a)),
        ("mov.{b16,u16,s16,f16,bf16}", kern!((u16) -> u16, |a| a)),
        ("mov.{b32,u32,s32,f32,f16x2,bf16x2}", kern!((u32) -> u32, |a| a)),
        ("mov.{b64,u64,s64,f64}", kern!((u64) -> u64, |a| a)),
        ("selp.{b16,u16,s16,f16,bf16}", kern!((u16, u16, bool) -> u16, |a, b, p| if p { a } else { b })),
        ("selp.{b32,u32,s32,f32}", kern!((u32, u32, bool) -> u32, |a, b, p| if p { a } else { b })),
        ("selp.{b64,u64,s64,f64}", kern!((u64, u64, bool) -> u64, |a, b, p| if p { a } else { b })),
        ("slct.{b32,u32,s32,f32}.s32", rare!((u32, u32, i32) -> u32, |a, b, c| if c >= 0 { a } else { b })),
        ("slct.{b64,u64,s64,f64}.s32", rare!((u64, u64, i32) -> u64, |a, b, c| if c >= 0 { a } else { b })),
    ]
}
