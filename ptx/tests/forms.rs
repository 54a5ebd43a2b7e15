//! One test per form of a lane operation: a kernel of a few lines against scalar Rust, over edge cases and random bits.
//!
//! A signature names the registers: h 16 bits, w 32, d 64, p a predicate; then, behind `>`, the result (F and D: a float
//! result, of which every NaN is the same).

mod common;

use common::bits;
use mla_ptx::{Arg, Memory, Module, Options, launch};

const THREADS: usize = 256;

const POOL: [u64; 29] = [
    0,
    1,
    2,
    7,
    !0,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0x8000,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0001,
    0x0000_0003,
    0x8000_0001,
    0x3f80_0000,
    0xbf80_0000,
    0x7f7f_ffff,
    0x0080_0000,
    0x4f00_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0x3c00_3c00,
    0x7c00_fc00,
    0x42f7_0000_c2f6_0000,
    // bf16 -127, -128: powers of two that are subnormal.
    0xc2fe_c300,
];

fn inputs(seed: u64) -> Vec<[u64; 4]> {
    let r = bits(THREADS * 8, seed);
    (0..THREADS)
        .map(|t| {
            std::array::from_fn(|k| {
                let (how, v) = (r[t * 8 + k], r[t * 8 + 4 + k]);
                match how % 4 {
                    0 => POOL[(v % POOL.len() as u64) as usize],
                    1 => v % 80,
                    // A float of moderate size in either width.
                    2 => (v & 0x80ff_ffff_80ff_ffff) | 0x3f00_0000_3f00_0000,
                    _ => v,
                }
            })
        })
        .collect()
}

fn source(form: &str, signature: &str) -> String {
    let (args, result) = signature.split_once('>').unwrap();
    let (mut load, mut names) = (String::new(), Vec::new());
    for (k, a) in args.chars().enumerate() {
        let at = 8 * k;
        load += &match a {
            'h' => format!("ld.global.u16 %h{k}, [%rd3+{at}];\n"),
            'w' => format!("ld.global.u32 %w{k}, [%rd3+{at}];\n"),
            'd' => format!("ld.global.u64 %d{k}, [%rd3+{at}];\n"),
            _ => format!(
                "ld.global.u32 %w{k}, [%rd3+{at}];\nand.b32 %w{k}, %w{k}, 1;\nsetp.ne.u32 %p{k}, %w{k}, 0;\n"
            ),
        };
        names.push(format!("%{a}{k}"));
    }
    // A number in the form stands for the last operand: `lop3.b32 #0x96`.
    let (form, constant) = form.split_once(" #").map_or((form, None), |(f, c)| (f, Some(c)));
    names.extend(constant.map(str::to_owned));
    let (d, store) = match result {
        "h" | "H" => ("%h9", "cvt.u64.u16 %d9, %h9;"),
        "w" | "F" => ("%w9", "cvt.u64.u32 %d9, %w9;"),
        "p" => ("%p9", "selp.b64 %d9, 1, 0, %p9;"),
        _ => ("%d9", ""),
    };
    format!(
        ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 a, .param .u64 b) {{
        .reg .pred %p<10>; .reg .b16 %h<10>; .reg .b32 %w<10>; .reg .b32 %t; .reg .b64 %d<10>; .reg .b64 %rd<5>;
        ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %t, %tid.x;
        mad.wide.u32 %rd3, %t, 32, %rd1; mad.wide.u32 %rd4, %t, 8, %rd2;
        {load}{form} {d}, {};\n{store}\nst.global.u64 [%rd4], %d9; ret; }}\n",
        names.join(", ")
    )
}

fn check(form: &str, signature: &str, want: impl Fn(u64, u64, u64, u64) -> u64) {
    let m = Module::parse(&source(form, signature)).unwrap();
    for seed in [1, 2, 3] {
        let input = inputs(seed);
        let raw: Vec<u8> = input.iter().flatten().flat_map(|v| v.to_le_bytes()).collect();
        let mut mem = Memory::new();
        let (a, b) = (mem.alloc_from(&raw).unwrap(), mem.alloc(THREADS as u64 * 8).unwrap());
        let args = [Arg::Pointer(a), Arg::Output(b)];
        let o =
            launch(&m, "k", [1; 3], [THREADS as u32, 1, 1], 0, &args, &mut mem, &Options::default()).unwrap();
        assert!(o.clean(), "{:#?}", o.findings);
        let got = common::bytes(&mem, b);
        let (args, result) = signature.split_once('>').unwrap();
        for (t, x) in input.iter().enumerate() {
            let cut = |k: usize| match args.chars().nth(k) {
                Some('h') => x[k] & 0xffff,
                Some('w') => x[k] & 0xffff_ffff,
                Some('p') => x[k] & 1,
                _ => x[k],
            };
            let v = want(cut(0), cut(1), cut(2), cut(3));
            let v = match result {
                "h" | "H" => v & 0xffff,
                "w" | "F" => v & 0xffff_ffff,
                _ => v,
            };
            let g = u64::from_le_bytes(got[8 * t..8 * t + 8].try_into().unwrap());
            let same = match result {
                "D" => f64::from_bits(g).is_nan() && f64::from_bits(v).is_nan() || g == v,
                "F" if f32::from_bits(v as u32).is_nan() => g == 0x7fff_ffff,
                _ => g == v,
            };
            assert!(same, "{form} of {:x?}: {g:#x}, not {v:#x}", &x[..args.len()]);
        }
    }
}

fn f(v: u64) -> f32 {
    f32::from_bits(v as u32)
}
fn z(v: u64) -> f32 {
    let x = f(v);
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}
fn b(v: f32) -> u64 {
    u64::from(v.to_bits())
}
fn zb(v: f32) -> u64 {
    b(z(b(v)))
}
fn d(v: u64) -> f64 {
    f64::from_bits(v)
}
fn s(v: u64) -> i32 {
    v as i32
}
/// A shift clamped at the width.
fn sh(n: u64, width: u64) -> u32 {
    (n & 0xffff_ffff).min(width) as u32
}

macro_rules! forms {
    ($($name:ident: $form:literal $sig:literal |$a:pat_param, $b:pat_param, $c:pat_param, $d:pat_param| $e:expr;)+) => {
        $(#[test]
        #[allow(clippy::precedence, clippy::manual_checked_ops)]
        fn $name() {
            check($form, $sig, |$a, $b, $c, $d| $e);
        })+
    };
}

forms! {
    add_u16: "add.u16" "hh>h" |a, b, _, _| a + b;
    add_s32: "add.s32" "ww>w" |a, b, _, _| a + b;
    add_s64: "add.s64" "dd>d" |a, b, _, _| a.wrapping_add(b);
    add_sat_s32: "add.sat.s32" "ww>w" |a, b, _, _| s(a).saturating_add(s(b)) as u64;
    sub_s16: "sub.s16" "hh>h" |a, b, _, _| a.wrapping_sub(b);
    sub_u32: "sub.u32" "ww>w" |a, b, _, _| a.wrapping_sub(b);
    sub_u64: "sub.u64" "dd>d" |a, b, _, _| a.wrapping_sub(b);
    sub_sat_s32: "sub.sat.s32" "ww>w" |a, b, _, _| s(a).saturating_sub(s(b)) as u64;
    mul_lo_s16: "mul.lo.s16" "hh>h" |a, b, _, _| a * b;
    mul_lo_u32: "mul.lo.u32" "ww>w" |a, b, _, _| a.wrapping_mul(b);
    mul_lo_s64: "mul.lo.s64" "dd>d" |a, b, _, _| a.wrapping_mul(b);
    mul_hi_u16: "mul.hi.u16" "hh>h" |a, b, _, _| (a * b) >> 16;
    mul_hi_s16: "mul.hi.s16" "hh>h" |a, b, _, _| ((a as i16 as i64 * b as i16 as i64) >> 16) as u64;
    mul_hi_u32: "mul.hi.u32" "ww>w" |a, b, _, _| (a * b) >> 32;
    mul_hi_s32: "mul.hi.s32" "ww>w" |a, b, _, _| ((s(a) as i64 * s(b) as i64) >> 32) as u64;
    mul_hi_u64: "mul.hi.u64" "dd>d" |a, b, _, _| ((a as u128 * b as u128) >> 64) as u64;
    mul_hi_s64: "mul.hi.s64" "dd>d" |a, b, _, _| ((a as i64 as i128 * b as i64 as i128) >> 64) as u64;
    mul_wide_u16: "mul.wide.u16" "hh>w" |a, b, _, _| a * b;
    mul_wide_s16: "mul.wide.s16" "hh>w" |a, b, _, _| (a as i16 as i32 * b as i16 as i32) as u64;
    mul_wide_u32: "mul.wide.u32" "ww>d" |a, b, _, _| a * b;
    mul_wide_s32: "mul.wide.s32" "ww>d" |a, b, _, _| (s(a) as i64 * s(b) as i64) as u64;
    mad_lo_u16: "mad.lo.u16" "hhh>h" |a, b, c, _| a * b + c;
    mad_lo_s32: "mad.lo.s32" "www>w" |a, b, c, _| a.wrapping_mul(b).wrapping_add(c);
    mad_lo_u64: "mad.lo.u64" "ddd>d" |a, b, c, _| a.wrapping_mul(b).wrapping_add(c);
    mad_hi_u32: "mad.hi.u32" "www>w" |a, b, c, _| (a * b >> 32) + c;
    mad_hi_s32: "mad.hi.s32" "www>w" |a, b, c, _| ((s(a) as i64 * s(b) as i64) >> 32).wrapping_add(c as i64) as u64;
    mad_wide_u16: "mad.wide.u16" "hhw>w" |a, b, c, _| a * b + c;
    mad_wide_s16: "mad.wide.s16" "hhw>w" |a, b, c, _| (a as i16 as i64 * b as i16 as i64 + c as i64) as u64;
    mad_wide_u32: "mad.wide.u32" "wwd>d" |a, b, c, _| (a * b).wrapping_add(c);
    mad_wide_s32: "mad.wide.s32" "wwd>d" |a, b, c, _| (s(a) as i64 * s(b) as i64).wrapping_add(c as i64) as u64;
    div_u16: "div.u16" "hh>h" |a, b, _, _| if b == 0 { !0 } else { a / b };
    div_s16: "div.s16" "hh>h" |a, b, _, _| if b == 0 { !0 } else { (a as i16 as i32 / b as i16 as i32) as u64 };
    div_u32: "div.u32" "ww>w" |a, b, _, _| if b == 0 { !0 } else { a / b };
    div_s32: "div.s32" "ww>w" |a, b, _, _| if b == 0 { !0 } else { (s(a) as i64 / s(b) as i64) as u64 };
    div_u64: "div.u64" "dd>d" |a, b, _, _| if b == 0 { !0 } else { a / b };
    div_s64: "div.s64" "dd>d" |a, b, _, _| if b == 0 { !0 } else { (a as i64 as i128 / b as i64 as i128) as u64 };
    rem_u32: "rem.u32" "ww>w" |a, b, _, _| if b == 0 { a } else { a % b };
    rem_s32: "rem.s32" "ww>w" |a, b, _, _| if b == 0 { a } else { (s(a) as i64 % s(b) as i64) as u64 };
    rem_u64: "rem.u64" "dd>d" |a, b, _, _| if b == 0 { a } else { a % b };
    rem_s64: "rem.s64" "dd>d" |a, b, _, _| if b == 0 { a } else { (a as i64 as i128 % b as i64 as i128) as u64 };
    min_s16: "min.s16" "hh>h" |a, b, _, _| (a as i16).min(b as i16) as u64;
    min_u32: "min.u32" "ww>w" |a, b, _, _| a.min(b);
    min_s32: "min.s32" "ww>w" |a, b, _, _| s(a).min(s(b)) as u64;
    min_u64: "min.u64" "dd>d" |a, b, _, _| a.min(b);
    min_s64: "min.s64" "dd>d" |a, b, _, _| (a as i64).min(b as i64) as u64;
    max_u16: "max.u16" "hh>h" |a, b, _, _| a.max(b);
    max_u32: "max.u32" "ww>w" |a, b, _, _| a.max(b);
    max_s32: "max.s32" "ww>w" |a, b, _, _| s(a).max(s(b)) as u64;
    max_s64: "max.s64" "dd>d" |a, b, _, _| (a as i64).max(b as i64) as u64;
    neg_s16: "neg.s16" "h>h" |a, _, _, _| a.wrapping_neg();
    neg_s32: "neg.s32" "w>w" |a, _, _, _| a.wrapping_neg();
    neg_s64: "neg.s64" "d>d" |a, _, _, _| a.wrapping_neg();
    abs_s32: "abs.s32" "w>w" |a, _, _, _| (s(a) as i64).unsigned_abs();
    abs_s64: "abs.s64" "d>d" |a, _, _, _| (a as i64).unsigned_abs();
    sad_u32: "sad.u32" "www>w" |a, b, c, _| a.max(b) - a.min(b) + c;
    sad_s32: "sad.s32" "www>w" |a, b, c, _| (s(a) as i64 - s(b) as i64).unsigned_abs() + c;
    dp4a_s32: "dp4a.s32.s32" "www>w" |a, b, c, _| (0..4).fold(c, |t, i| t.wrapping_add(((a >> (8 * i)) as i8 as i64 * (b >> (8 * i)) as i8 as i64) as u64));
    dp4a_u32: "dp4a.u32.u32" "www>w" |a, b, c, _| (0..4).fold(c, |t, i| t + (a >> (8 * i) & 255) * (b >> (8 * i) & 255));
    and_b16: "and.b16" "hh>h" |a, b, _, _| a & b;
    and_b32: "and.b32" "ww>w" |a, b, _, _| a & b;
    and_b64: "and.b64" "dd>d" |a, b, _, _| a & b;
    or_b16: "or.b16" "hh>h" |a, b, _, _| a | b;
    or_b32: "or.b32" "ww>w" |a, b, _, _| a | b;
    or_b64: "or.b64" "dd>d" |a, b, _, _| a | b;
    xor_b16: "xor.b16" "hh>h" |a, b, _, _| a ^ b;
    xor_b32: "xor.b32" "ww>w" |a, b, _, _| a ^ b;
    xor_b64: "xor.b64" "dd>d" |a, b, _, _| a ^ b;
    not_b16: "not.b16" "h>h" |a, _, _, _| !a;
    not_b32: "not.b32" "w>w" |a, _, _, _| !a;
    not_b64: "not.b64" "d>d" |a, _, _, _| !a;
    cnot_b32: "cnot.b32" "w>w" |a, _, _, _| (a == 0) as u64;
    and_pred: "and.pred" "pp>p" |a, b, _, _| a & b;
    or_pred: "or.pred" "pp>p" |a, b, _, _| a | b;
    xor_pred: "xor.pred" "pp>p" |a, b, _, _| a ^ b;
    not_pred: "not.pred" "p>p" |a, _, _, _| 1 - a;
    shl_b16: "shl.b16" "hw>h" |a, n, _, _| if n > 15 { 0 } else { a << n };
    shl_b32: "shl.b32" "ww>w" |a, n, _, _| if n > 31 { 0 } else { a << n };
    shl_b64: "shl.b64" "dw>d" |a, n, _, _| if n > 63 { 0 } else { a << n };
    shr_u16: "shr.u16" "hw>h" |a, n, _, _| a >> sh(n, 16);
    shr_s16: "shr.s16" "hw>h" |a, n, _, _| ((a as i16 as i64) >> sh(n, 16)) as u64;
    shr_u32: "shr.u32" "ww>w" |a, n, _, _| a >> sh(n, 32);
    shr_s32: "shr.s32" "ww>w" |a, n, _, _| ((s(a) as i64) >> sh(n, 32)) as u64;
    shr_u64: "shr.u64" "dw>d" |a, n, _, _| ((a as u128) >> sh(n, 64)) as u64;
    shr_s64: "shr.s64" "dw>d" |a, n, _, _| ((a as i64 as i128) >> sh(n, 64)) as u64;
    shf_l_wrap: "shf.l.wrap.b32" "www>w" |a, b, n, _| ((b << 32 | a) << (n % 32)) >> 32;
    shf_r_wrap: "shf.r.wrap.b32" "www>w" |a, b, n, _| (b << 32 | a) >> (n % 32);
    shf_l_clamp: "shf.l.clamp.b32" "www>w" |a, b, n, _| ((b << 32 | a) << sh(n, 32)) >> 32;
    shf_r_clamp: "shf.r.clamp.b32" "www>w" |a, b, n, _| (b << 32 | a) >> sh(n, 32);
    popc_b32: "popc.b32" "w>w" |a, _, _, _| (0..32).map(|i| a >> i & 1).sum();
    popc_b64: "popc.b64" "d>w" |a, _, _, _| (0..64).map(|i| a >> i & 1).sum();
    clz_b32: "clz.b32" "w>w" |a, _, _, _| (0..32).rev().take_while(|i| a >> i & 1 == 0).count() as u64;
    clz_b64: "clz.b64" "d>w" |a, _, _, _| (0..64).rev().take_while(|i| a >> i & 1 == 0).count() as u64;
    brev_b32: "brev.b32" "w>w" |a, _, _, _| (0..32).fold(0, |o, i| o | (a >> i & 1) << (31 - i));
    brev_b64: "brev.b64" "d>d" |a, _, _, _| (0..64).fold(0, |o, i| o | (a >> i & 1) << (63 - i));
    bfind_u32: "bfind.u32" "w>w" |a, _, _, _| if a == 0 { !0 } else { a.ilog2() as u64 };
    bfind_s64: "bfind.s64" "d>w" |a, _, _, _| { let a = if (a as i64) < 0 { !a } else { a }; if a == 0 { !0 } else { a.ilog2() as u64 } };
    bfind_shiftamt: "bfind.shiftamt.u32" "w>w" |a, _, _, _| if a == 0 { !0 } else { 31 - a.ilog2() as u64 };
    bfe_u32: "bfe.u32" "www>w" |a, p, n, _| field(a, p, n, 32, false);
    bfe_s32: "bfe.s32" "www>w" |a, p, n, _| field(a, p, n, 32, true);
    bfe_u64: "bfe.u64" "dww>d" |a, p, n, _| field(a, p, n, 64, false);
    bfe_s64: "bfe.s64" "dww>d" |a, p, n, _| field(a, p, n, 64, true);
    bfi_b32: "bfi.b32" "wwww>w" |a, b, p, n| put(a, b, p, n, 32);
    bfi_b64: "bfi.b64" "ddww>d" |a, b, p, n| put(a, b, p, n, 64);
    prmt: "prmt.b32" "www>w" |a, b, c, _| bytes(a, b, c);
    prmt_f4e: "prmt.b32.f4e" "www>w" |a, b, c, _| (b << 32 | a) >> (8 * (c & 3)) & 0xffff_ffff;
    prmt_rc8: "prmt.b32.rc8" "www>w" |a, _, c, _| (a >> (8 * (c & 3)) & 255) * 0x0101_0101;
    prmt_rc16: "prmt.b32.rc16" "www>w" |a, _, c, _| (a >> (16 * (c & 1)) & 0xffff) * 0x1_0001;
    prmt_ecl: "prmt.b32.ecl" "www>w" |a, _, c, _| (0..4).fold(0, |o, i| o | (a >> (8 * (i).max(c & 3)) & 255) << (8 * i));
    prmt_ecr: "prmt.b32.ecr" "www>w" |a, _, c, _| (0..4).fold(0, |o, i| o | (a >> (8 * (i).min(c & 3)) & 255) << (8 * i));
    lop3_xor: "lop3.b32 #0x96" "www>w" |a, b, c, _| a ^ b ^ c;
    lop3_mux: "lop3.b32 #0xca" "www>w" |a, b, c, _| a & b | !a & c;
    lop3_majority: "lop3.b32 #0xe8" "www>w" |a, b, c, _| a & b | a & c | b & c;
    selp_b32: "selp.b32" "wwp>w" |a, b, p, _| if p == 1 { a } else { b };
    selp_b64: "selp.b64" "ddp>d" |a, b, p, _| if p == 1 { a } else { b };
    selp_u16: "selp.u16" "hhp>h" |a, b, p, _| if p == 1 { a } else { b };
    slct: "slct.b32.s32" "www>w" |a, b, c, _| if s(c) >= 0 { a } else { b };
    mov_b16: "mov.b16" "h>h" |a, _, _, _| a;
    mov_b32: "mov.b32" "w>w" |a, _, _, _| a;
    mov_b64: "mov.b64" "d>d" |a, _, _, _| a;
    mov_pred: "mov.pred" "p>p" |a, _, _, _| a;
    add_f32: "add.f32" "ww>F" |x, y, _, _| b(f(x) + f(y));
    add_rn_f32: "add.rn.f32" "ww>F" |x, y, _, _| b(f(x) + f(y));
    add_ftz_f32: "add.ftz.f32" "ww>F" |x, y, _, _| zb(z(x) + z(y));
    add_sat_f32: "add.sat.f32" "ww>w" |x, y, _, _| { let v = f(x) + f(y); b(if v > 0.0 { v.min(1.0) } else { 0.0 }) };
    sub_f32: "sub.f32" "ww>F" |x, y, _, _| b(f(x) - f(y));
    mul_f32: "mul.f32" "ww>F" |x, y, _, _| b(f(x) * f(y));
    mul_ftz_f32: "mul.rn.ftz.f32" "ww>F" |x, y, _, _| zb(z(x) * z(y));
    fma_f32: "fma.rn.f32" "www>F" |x, y, w, _| b(libm_fma(f(x), f(y), f(w)));
    fma_ftz_f32: "fma.rn.ftz.f32" "www>F" |x, y, w, _| zb(libm_fma(z(x), z(y), z(w)));
    div_f32: "div.rn.f32" "ww>F" |x, y, _, _| b(f(x) / f(y));
    rcp_f32: "rcp.rn.f32" "w>F" |x, _, _, _| b(1.0 / f(x));
    sqrt_f32: "sqrt.rn.f32" "w>F" |x, _, _, _| b(f(x).sqrt());
    add_rz_f32: "add.rz.f32" "ww>F" |x, y, _, _| toward(f(x) as f64, f(y) as f64, 0);
    add_rm_f32: "add.rm.f32" "ww>F" |x, y, _, _| toward(f(x) as f64, f(y) as f64, -1);
    add_rp_f32: "add.rp.f32" "ww>F" |x, y, _, _| toward(f(x) as f64, f(y) as f64, 1);
    mul_rz_f32: "mul.rz.f32" "ww>F" |x, y, _, _| toward(f(x) as f64 * f(y) as f64, -0.0, 0);
    mul_rp_f32: "mul.rp.f32" "ww>F" |x, y, _, _| toward(f(x) as f64 * f(y) as f64, -0.0, 1);
    min_f32: "min.f32" "ww>F" |x, y, _, _| least(f(x), f(y));
    max_f32: "max.f32" "ww>F" |x, y, _, _| least(-f(x), -f(y)) ^ 1 << 31;
    max_nan_f32: "max.NaN.f32" "ww>F" |x, y, _, _| if f(x).is_nan() || f(y).is_nan() { b(f32::NAN) } else { least(-f(x), -f(y)) ^ 1 << 31 };
    neg_f32: "neg.f32" "w>w" |x, _, _, _| x ^ 1 << 31;
    abs_f32: "abs.f32" "w>w" |x, _, _, _| x & 0x7fff_ffff;
    copysign_f32: "copysign.f32" "ww>w" |x, y, _, _| y & 0x7fff_ffff | x & 0x8000_0000;
    ex2_f32: "ex2.approx.f32" "w>F" |x, _, _, _| b((f(x) as f64).exp2() as f32);
    ex2_ftz_f32: "ex2.approx.ftz.f32" "w>F" |x, _, _, _| zb((z(x) as f64).exp2() as f32);
    lg2_f32: "lg2.approx.f32" "w>F" |x, _, _, _| b((f(x) as f64).log2() as f32);
    rcp_approx_f32: "rcp.approx.ftz.f32" "w>F" |x, _, _, _| zb((1.0 / z(x) as f64) as f32);
    rsqrt_f32: "rsqrt.approx.f32" "w>F" |x, _, _, _| b((1.0 / (f(x) as f64).sqrt()) as f32);
    sqrt_approx_f32: "sqrt.approx.ftz.f32" "w>F" |x, _, _, _| zb((z(x) as f64).sqrt() as f32);
    div_full_f32: "div.full.f32" "ww>F" |x, y, _, _| b((f(x) as f64 / f(y) as f64) as f32);
    testp_f32: "testp.finite.f32" "w>p" |x, _, _, _| (x >> 23 & 255 != 255) as u64;
    add_f64: "add.rn.f64" "dd>D" |x, y, _, _| (d(x) + d(y)).to_bits();
    sub_f64: "sub.f64" "dd>D" |x, y, _, _| (d(x) - d(y)).to_bits();
    mul_f64: "mul.rn.f64" "dd>D" |x, y, _, _| (d(x) * d(y)).to_bits();
    fma_f64: "fma.rn.f64" "ddd>D" |x, y, w, _| d(x).mul_add(d(y), d(w)).to_bits();
    div_f64: "div.rn.f64" "dd>D" |x, y, _, _| (d(x) / d(y)).to_bits();
    sqrt_f64: "sqrt.rn.f64" "d>D" |x, _, _, _| d(x).sqrt().to_bits();
    setp_eq_s32: "setp.eq.s32" "ww>p" |x, y, _, _| (x == y) as u64;
    setp_ne_u16: "setp.ne.u16" "hh>p" |x, y, _, _| (x != y) as u64;
    setp_lt_s16: "setp.lt.s16" "hh>p" |x, y, _, _| ((x as i16) < y as i16) as u64;
    setp_lt_s32: "setp.lt.s32" "ww>p" |x, y, _, _| (s(x) < s(y)) as u64;
    setp_lt_u32: "setp.lt.u32" "ww>p" |x, y, _, _| (x < y) as u64;
    setp_le_s64: "setp.le.s64" "dd>p" |x, y, _, _| (x as i64 <= y as i64) as u64;
    setp_gt_u64: "setp.gt.u64" "dd>p" |x, y, _, _| (x > y) as u64;
    setp_ge_and_s32: "setp.ge.and.s32" "wwp>p" |x, y, p, _| (s(x) >= s(y)) as u64 & p;
    setp_ge_or_u32: "setp.ge.or.u32" "wwp>p" |x, y, p, _| (x >= y) as u64 | p;
    setp_eq_xor_b32: "setp.eq.xor.b32" "wwp>p" |x, y, p, _| (x == y) as u64 ^ p;
    setp_lt_f32: "setp.lt.f32" "ww>p" |x, y, _, _| (f(x) < f(y)) as u64;
    setp_ne_f32: "setp.ne.f32" "ww>p" |x, y, _, _| (!f(x).is_nan() && !f(y).is_nan() && f(x) != f(y)) as u64;
    setp_neu_f32: "setp.neu.f32" "ww>p" |x, y, _, _| (f(x) != f(y)) as u64;
    setp_equ_f32: "setp.equ.f32" "ww>p" |x, y, _, _| (f(x).is_nan() || f(y).is_nan() || f(x) == f(y)) as u64;
    setp_geu_f32: "setp.geu.f32" "ww>p" |x, y, _, _| (f(x).is_nan() || f(y).is_nan() || f(x) >= f(y)) as u64;
    setp_num_f32: "setp.num.f32" "ww>p" |x, y, _, _| (!f(x).is_nan() && !f(y).is_nan()) as u64;
    setp_nan_f64: "setp.nan.f64" "dd>p" |x, y, _, _| (d(x).is_nan() || d(y).is_nan()) as u64;
    setp_eq_ftz_f32: "setp.eq.ftz.f32" "ww>p" |x, y, _, _| (z(x) == z(y)) as u64;
    cvt_u64_u32: "cvt.u64.u32" "w>d" |x, _, _, _| x;
    cvt_s64_s32: "cvt.s64.s32" "w>d" |x, _, _, _| s(x) as i64 as u64;
    cvt_u32_u64: "cvt.u32.u64" "d>w" |x, _, _, _| x;
    cvt_u32_u8: "cvt.u32.u8" "w>w" |x, _, _, _| x & 255;
    cvt_s32_s8: "cvt.s32.s8" "w>w" |x, _, _, _| x as i8 as i64 as u64;
    cvt_s16_s8: "cvt.s16.s8" "h>h" |x, _, _, _| x as i8 as i64 as u64;
    cvt_u16_u32: "cvt.u16.u32" "w>h" |x, _, _, _| x;
    cvt_sat_u8_s32: "cvt.sat.u8.s32" "w>w" |x, _, _, _| s(x).clamp(0, 255) as u64;
    cvt_sat_s16_s64: "cvt.sat.s16.s64" "d>h" |x, _, _, _| (x as i64).clamp(-32768, 32767) as u64;
    cvt_rn_f32_s32: "cvt.rn.f32.s32" "w>w" |x, _, _, _| b(s(x) as f32);
    cvt_rn_f32_u64: "cvt.rn.f32.u64" "d>w" |x, _, _, _| b(x as f32);
    cvt_rz_f32_u32: "cvt.rz.f32.u32" "w>w" |x, _, _, _| toward(x as f64, 0.0, 0);
    cvt_rp_f32_s32: "cvt.rp.f32.s32" "w>w" |x, _, _, _| toward(s(x) as f64, 0.0, 1);
    cvt_rn_f64_s64: "cvt.rn.f64.s64" "d>d" |x, _, _, _| (x as i64 as f64).to_bits();
    cvt_rzi_s32_f32: "cvt.rzi.s32.f32" "w>w" |x, _, _, _| f(x).trunc() as i32 as u64;
    cvt_rni_s32_f32: "cvt.rni.s32.f32" "w>w" |x, _, _, _| f(x).round_ties_even() as i32 as u64;
    cvt_rmi_u32_f32: "cvt.rmi.u32.f32" "w>w" |x, _, _, _| f(x).floor() as u32 as u64;
    cvt_rpi_s64_f64: "cvt.rpi.s64.f64" "d>d" |x, _, _, _| d(x).ceil() as i64 as u64;
    cvt_rni_f32_f32: "cvt.rni.f32.f32" "w>F" |x, _, _, _| b(f(x).round_ties_even());
    cvt_rzi_f32_f32: "cvt.rzi.f32.f32" "w>F" |x, _, _, _| b(f(x).trunc());
    cvt_rmi_f32_f32: "cvt.rmi.f32.f32" "w>F" |x, _, _, _| b(f(x).floor());
    cvt_sat_f32_f32: "cvt.sat.f32.f32" "w>w" |x, _, _, _| b(if f(x) > 0.0 { f(x).min(1.0) } else { 0.0 });
    cvt_rn_f32_f64: "cvt.rn.f32.f64" "d>F" |x, _, _, _| b(d(x) as f32);
    cvt_rz_f32_f64: "cvt.rz.f32.f64" "d>F" |x, _, _, _| toward(d(x), -0.0, 0);
    cvt_f64_f32: "cvt.f64.f32" "w>D" |x, _, _, _| (f(x) as f64).to_bits();
    cvt_rn_bf16_f32: "cvt.rn.bf16.f32" "w>h" |x, _, _, _| bf16(f(x));
    cvt_rn_bf16x2_f32: "cvt.rn.bf16x2.f32" "ww>w" |x, y, _, _| bf16(f(x)) << 16 | bf16(f(y));
    cvt_rn_f16_f32: "cvt.rn.f16.f32" "w>h" |x, _, _, _| f16(f(x) as f64);
    cvt_rn_f16x2_f32: "cvt.rn.f16x2.f32" "ww>w" |x, y, _, _| f16(f(x) as f64) << 16 | f16(f(y) as f64);
    cvt_f32_f16: "cvt.f32.f16" "h>F" |x, _, _, _| b(of_f16(x) as f32);
    cvt_f32_bf16: "cvt.f32.bf16" "h>w" |x, _, _, _| x << 16;
    cvt_rna_tf32: "cvt.rna.tf32.f32" "w>F" |x, _, _, _| if f(x).is_finite() { (x + 0x1000) & !0x1fff } else { b(f(x)) };
    cvt_e4m3x2_f32: "cvt.rn.satfinite.e4m3x2.f32" "ww>h" |x, y, _, _| small(f(x), 3, 7, 448.0) << 8 | small(f(y), 3, 7, 448.0);
    cvt_e5m2x2_f32: "cvt.rn.satfinite.e5m2x2.f32" "ww>h" |x, y, _, _| small(f(x), 2, 15, 57344.0) << 8 | small(f(y), 2, 15, 57344.0);
    cvt_f16x2_e5m2x2: "cvt.rn.f16x2.e5m2x2" "h>w" |x, _, _, _| { let h = |v: u64| if v & 0x7c == 0x7c && v & 3 != 0 { 0x7fff } else { v << 8 }; h(x >> 8) << 16 | h(x & 255) };
    add_f16: "add.f16" "hh>h" |x, y, _, _| f16(of_f16(x) + of_f16(y));
    mul_f16: "mul.rn.f16" "hh>h" |x, y, _, _| f16(of_f16(x) * of_f16(y));
    sub_f16x2: "sub.f16x2" "ww>w" |x, y, _, _| f16(of_f16(x >> 16) - of_f16(y >> 16)) << 16 | f16(of_f16(x & 0xffff) - of_f16(y & 0xffff));
    mul_bf16: "mul.rn.bf16" "hh>h" |x, y, _, _| bf16_of(f(x << 16) as f64 * f(y << 16) as f64);
    mul_bf16x2: "mul.bf16x2" "ww>w" |x, y, _, _| bf16_of(f(x & 0xffff_0000) as f64 * f(y & 0xffff_0000) as f64) << 16 | bf16_of(f(x << 16) as f64 * f(y << 16) as f64);
    neg_f16x2: "neg.f16x2" "w>w" |x, _, _, _| x ^ 0x8000_8000;
    abs_bf16: "abs.bf16" "h>h" |x, _, _, _| x & 0x7fff;
    max_f16: "max.f16" "hh>h" |x, y, _, _| half_max(x, y);
}

fn libm_fma(x: f32, y: f32, w: f32) -> f32 {
    x.mul_add(y, w)
}

/// Smaller of two floats: the one that is a number, -0 below +0.
fn least(x: f32, y: f32) -> u64 {
    if x.is_nan() {
        return b(y);
    }
    if y.is_nan() {
        return b(x);
    }
    match x.partial_cmp(&y) {
        Some(std::cmp::Ordering::Less) => b(x),
        Some(std::cmp::Ordering::Greater) => b(y),
        _ => b(x) | b(y),
    }
}

/// x + y, exact, to float32: toward zero (0), down (-1), up (1). By search among neighbours, with the error of the
/// float64 sum.
fn toward(x: f64, y: f64, direction: i32) -> u64 {
    let sum = x + y;
    if !sum.is_finite() {
        return b(sum as f32);
    }
    // exact = sum + rest
    let (big, small) = if x.abs() >= y.abs() { (x, y) } else { (y, x) };
    let rest = small - (sum - big);
    let above = |v: f32| if f64::from(v) == sum { rest < 0.0 } else { f64::from(v) > sum };
    let below = |v: f32| if f64::from(v) == sum { rest > 0.0 } else { f64::from(v) < sum };
    let n = sum as f32;
    let down = direction == -1 || direction == 0 && sum >= 0.0;
    b(if down && above(n) {
        n.next_down()
    } else if !down && below(n) {
        n.next_up()
    } else {
        n
    })
}

/// Bit field by single bits.
fn field(a: u64, p: u64, n: u64, width: u64, signed: bool) -> u64 {
    let (p, n) = (p & 255, n & 255);
    let sign = if signed && n > 0 { a >> (p + n - 1).min(width - 1) & 1 } else { 0 };
    (0..width).fold(0, |o, i| o | (if i < n && p + i < width { a >> (p + i) & 1 } else { sign }) << i)
}

fn put(a: u64, into: u64, p: u64, n: u64, width: u64) -> u64 {
    let (p, n) = (p & 255, n & 255);
    (0..width).fold(0, |o, i| o | (if i >= p && i < p + n { a >> (i - p) & 1 } else { into >> i & 1 }) << i)
}

fn bytes(a: u64, b: u64, c: u64) -> u64 {
    let all: Vec<u64> =
        (0..4).map(|i| a >> (8 * i) & 255).chain((0..4).map(|i| b >> (8 * i) & 255)).collect();
    (0..4).fold(0, |o, i| {
        let n = c >> (4 * i) & 15;
        let byte = all[(n & 7) as usize];
        o | (if n < 8 {
            byte
        } else if byte > 127 {
            255
        } else {
            0
        }) << (8 * i)
    })
}

/// Rounds to a format of `fraction` bits by comparing with the neighbours on its grid.
fn grid(v: f64, fraction: i32, bias: i32) -> f64 {
    let e = if v == 0.0 { 1 - bias } else { (v.abs().log2().floor() as i32).max(1 - bias) };
    let step = 2f64.powi(e - fraction);
    // log2 may be off by one at powers of two, where both steps give the same value.
    (v / step).round_ties_even() * step
}

fn encode(v: f64, fraction: i32, bias: i32) -> u64 {
    let a = v.abs();
    let mut e = 1 - bias;
    while a >= 2f64.powi(e + 1) {
        e += 1;
    }
    let m = (a / 2f64.powi(e - fraction)) as u64;
    let field = if m >> fraction == 0 { 0 } else { (e + bias) as u64 };
    field << fraction | m & ((1 << fraction) - 1)
}

fn small(v: f32, fraction: i32, bias: i32, most: f64) -> u64 {
    if v.is_nan() {
        return 0x7f;
    }
    let sign = u64::from(v.is_sign_negative()) << 7;
    let v = f64::from(v).clamp(-most, most);
    sign | encode(grid(v, fraction, bias).abs().min(most), fraction, bias)
}

fn f16(v: f64) -> u64 {
    if v.is_nan() {
        return 0x7fff;
    }
    let sign = u64::from(v.is_sign_negative()) << 15;
    if v.is_infinite() {
        return sign | 0x7c00;
    }
    let r = grid(v, 10, 15).abs();
    sign | if r > 65504.0 { 0x7c00 } else { encode(r, 10, 15) }
}

fn of_f16(h: u64) -> f64 {
    let (sign, e, m) = (if h >> 15 & 1 == 1 { -1.0 } else { 1.0 }, (h >> 10 & 31) as i32, (h & 0x3ff) as f64);
    sign * match e {
        0 => m * 2f64.powi(-24),
        31 => {
            if m == 0.0 {
                f64::INFINITY
            } else {
                f64::NAN
            }
        }
        _ => (1.0 + m / 1024.0) * 2f64.powi(e - 15),
    }
}

fn bf16(v: f32) -> u64 {
    bf16_of(f64::from(v))
}

fn bf16_of(v: f64) -> u64 {
    if v.is_nan() {
        return 0x7fff;
    }
    let sign = u64::from(v.is_sign_negative()) << 15;
    if v.is_infinite() {
        return sign | 0x7f80;
    }
    let r = grid(v, 7, 127).abs();
    sign | if r > f64::from(f32::from_bits(0x7f7f_0000)) { 0x7f80 } else { encode(r, 7, 127) }
}

fn half_max(x: u64, y: u64) -> u64 {
    let (a, b) = (of_f16(x), of_f16(y));
    if a.is_nan() && b.is_nan() {
        0x7fff
    } else if a.is_nan() || b > a || b == a && x >> 15 == 1 {
        y
    } else {
        x
    }
}

/// Values of a half format, and rounding to it once.
#[derive(Clone, Copy)]
struct Format {
    name: &'static str,
    of: fn(u64) -> f64,
    round: fn(f64) -> u64,
    /// Bits of the exponent field.
    exponent: u64,
}
const F16: Format = Format { name: "f16", of: of_f16, round: f16, exponent: 0x7c00 };
const BF16: Format = Format { name: "bf16", of: |h| f64::from(f(h << 16)), round: bf16_of, exponent: 0x7f80 };

impl Format {
    /// a + b rounded once. The float64 sum is rounded already; that matters where it lies on a midpoint of the format, and
    /// then what it lost says on which side the sum is.
    fn sum(self, a: f64, b: f64) -> u64 {
        let s = a + b;
        if !s.is_finite() {
            return (self.round)(s);
        }
        let lost = (a - (s - (s - a))) + (b - (s - a));
        let midpoint = (self.round)(s.next_down()) != (self.round)(s.next_up());
        (self.round)(match lost {
            l if midpoint && l > 0.0 => s.next_up(),
            l if midpoint && l < 0.0 => s.next_down(),
            _ => s,
        })
    }
    /// Subnormals to zero.
    fn flush(self, h: u64) -> u64 {
        if h & self.exponent == 0 { h & 0x8000 } else { h }
    }
    /// The form and its packed twin.
    fn both(self, form: &str, sources: usize, g: impl Fn(u64, u64, u64) -> u64) {
        let name = self.name;
        check(&format!("{form}.{name}"), ["", "h>h", "hh>h", "hhh>h"][sources], |a, b, c, _| g(a, b, c));
        check(&format!("{form}.{name}x2"), ["", "w>w", "ww>w", "www>w"][sources], |a, b, c, _| {
            let low = |v: u64| v & 0xffff;
            g(a >> 16, b >> 16, c >> 16) << 16 | g(low(a), low(b), low(c))
        });
    }
    /// min, by `less`: the operand that is a number, -0 below +0.
    fn least(self, a: u64, b: u64, sign: f64, nan: bool) -> u64 {
        let (x, y) = (sign * (self.of)(a), sign * (self.of)(b));
        match (x.is_nan(), y.is_nan()) {
            (true, true) => 0x7fff,
            (true, _) | (_, true) if nan => 0x7fff,
            (true, _) => b,
            (_, true) => a,
            _ if x < y || x == y && x.is_sign_negative() => a,
            _ => b,
        }
    }
}

/// Clamped to [0, 1], NaN to 0.
fn saturated(h: u64) -> u64 {
    let v = of_f16(h);
    if v.is_nan() || v <= 0.0 { 0 } else { f16(v.min(1.0)) }
}

#[test]
fn half_add_sub_mul() {
    for t in [F16, BF16] {
        for rn in ["", ".rn"] {
            t.both(&format!("add{rn}"), 2, |a, b, _| t.sum((t.of)(a), (t.of)(b)));
            t.both(&format!("sub{rn}"), 2, |a, b, _| t.sum((t.of)(a), -(t.of)(b)));
            t.both(&format!("mul{rn}"), 2, |a, b, _| (t.round)((t.of)(a) * (t.of)(b)));
        }
    }
}
#[test]
fn half_fma() {
    for t in [F16, BF16] {
        let fma = move |a: u64, b: u64, c: u64| t.sum((t.of)(a) * (t.of)(b), (t.of)(c));
        t.both("fma.rn", 3, fma);
        t.both(
            "fma.rn.relu",
            3,
            move |a, b, c| {
                if (t.of)(a) * (t.of)(b) + (t.of)(c) < 0.0 { 0 } else { fma(a, b, c) }
            },
        );
    }
}
#[test]
fn half_flushed() {
    let t = F16;
    let v = move |h: u64| of_f16(t.flush(h));
    t.both("add.ftz", 2, move |a, b, _| t.flush(t.sum(v(a), v(b))));
    t.both("sub.rn.ftz", 2, move |a, b, _| t.flush(t.sum(v(a), -v(b))));
    t.both("mul.ftz", 2, move |a, b, _| t.flush(f16(v(a) * v(b))));
    t.both("fma.rn.ftz", 3, move |a, b, c| t.flush(t.sum(v(a) * v(b), v(c))));
}
#[test]
fn half_saturated() {
    let t = F16;
    t.both("add.sat", 2, move |a, b, _| saturated(t.sum(of_f16(a), of_f16(b))));
    t.both("mul.sat", 2, |a, b, _| saturated(f16(of_f16(a) * of_f16(b))));
    t.both("fma.rn.sat", 3, move |a, b, c| saturated(t.sum(of_f16(a) * of_f16(b), of_f16(c))));
}
#[test]
fn half_least_and_greatest() {
    for t in [F16, BF16] {
        t.both("min", 2, move |a, b, _| t.least(a, b, 1.0, false));
        t.both("max", 2, move |a, b, _| t.least(a, b, -1.0, false));
        t.both("min.NaN", 2, move |a, b, _| t.least(a, b, 1.0, true));
        t.both("max.NaN", 2, move |a, b, _| t.least(a, b, -1.0, true));
        t.both("neg", 1, |a, _, _| a ^ 0x8000);
        t.both("abs", 1, |a, _, _| a & 0x7fff);
    }
}
/// The standard library's functions: their error of an ulp of float64 is far below the distance of these arguments' results
/// from a midpoint of the format.
#[test]
fn half_functions() {
    for t in [F16, BF16] {
        t.both("tanh.approx", 1, move |a, _, _| (t.round)((t.of)(a).tanh()));
    }
    F16.both("ex2.approx", 1, |a, _, _| f16(of_f16(a).exp2()));
    let t = BF16;
    t.both("ex2.approx.ftz", 1, move |a, _, _| t.flush(bf16_of((t.of)(t.flush(a)).exp2())));
}
#[test]
fn half_and_float() {
    check("add.f32.f16", "hw>F", |a, c, _, _| b(of_f16(a) as f32 + f(c)));
    check("add.rn.f32.bf16", "hw>F", |a, c, _, _| b(f(a << 16) + f(c)));
}

/// A whole number as float32 in a direction, by comparison of whole numbers with the neighbours.
fn whole_toward(v: i128, up: i32) -> u64 {
    let near = v as f32;
    // Beyond i128 for no argument of 64 bits.
    let exact = near as i128;
    b(match (up, exact.cmp(&v)) {
        (1, std::cmp::Ordering::Less) => near.next_up(),
        (-1, std::cmp::Ordering::Greater) => near.next_down(),
        (0, std::cmp::Ordering::Greater) if v > 0 => near.next_down(),
        (0, std::cmp::Ordering::Less) if v < 0 => near.next_up(),
        _ => near,
    })
}

#[test]
fn whole_to_float_in_every_direction() {
    for (r, up) in [("rz", 0), ("rm", -1), ("rp", 1)] {
        check(&format!("cvt.{r}.f32.s64"), "d>w", |x, _, _, _| whole_toward(i128::from(x as i64), up));
        check(&format!("cvt.{r}.f32.u64"), "d>w", |x, _, _, _| whole_toward(i128::from(x), up));
        check(&format!("cvt.{r}.f32.s32"), "w>w", |x, _, _, _| whole_toward(i128::from(s(x)), up));
        check(&format!("cvt.{r}.f32.u32"), "w>w", |x, _, _, _| whole_toward(i128::from(x), up));
        check(&format!("cvt.{r}.f32.u8"), "w>w", |x, _, _, _| whole_toward(i128::from(x & 255), up));
    }
    check("cvt.rn.f32.s8", "w>w", |x, _, _, _| b(f32::from(x as i8)));
    check("cvt.rn.f64.u64", "d>d", |x, _, _, _| (x as f64).to_bits());
    check("cvt.rn.f16.s32", "w>h", |x, _, _, _| f16(f64::from(s(x))));
    check("cvt.rn.f16.u16", "h>h", |x, _, _, _| f16(x as f64));
    check("cvt.rn.bf16.u32", "w>h", |x, _, _, _| bf16_of(x as f64));
}
#[test]
fn halves_to_whole() {
    check("cvt.rzi.s32.f16", "h>w", |x, _, _, _| of_f16(x).trunc() as i32 as u64);
    check("cvt.rni.u16.f16", "h>h", |x, _, _, _| of_f16(x).round_ties_even() as u16 as u64);
    check("cvt.rmi.s64.bf16", "h>d", |x, _, _, _| f(x << 16).floor() as i64 as u64);
    check("cvt.rpi.u32.bf16", "h>w", |x, _, _, _| u64::from(f(x << 16).ceil() as u32));
    check("cvt.rpi.ftz.s32.f32", "w>w", |x, _, _, _| z(x).ceil() as i32 as u64);
    check("cvt.rni.u64.f64", "d>d", |x, _, _, _| d(x).round_ties_even() as u64);
}
#[test]
fn floats_to_whole_floats() {
    check("cvt.rpi.f32.f32", "w>F", |x, _, _, _| b(f(x).ceil()));
    check("cvt.rmi.ftz.f32.f32", "w>F", |x, _, _, _| zb(z(x).floor()));
    check("cvt.rzi.f64.f64", "d>D", |x, _, _, _| d(x).trunc().to_bits());
    check("cvt.rni.f16.f16", "h>h", |x, _, _, _| f16(of_f16(x).round_ties_even()));
    check("cvt.rpi.f16.f16", "h>h", |x, _, _, _| f16(of_f16(x).ceil()));
    check("cvt.rm.f32.f64", "d>F", |x, _, _, _| directed(d(x), -1));
    check("cvt.rp.f32.f64", "d>F", |x, _, _, _| directed(d(x), 1));
}
/// The float32 on a side of a float64.
fn directed(v: f64, up: i32) -> u64 {
    let near = v as f32;
    b(match up {
        1 if f64::from(near) < v => near.next_up(),
        -1 if f64::from(near) > v => near.next_down(),
        _ => near,
    })
}
/// Toward zero: the largest of the format that is not beyond, by trying the nearest and the one below it.
fn truncated(t: Format, v: f64) -> u64 {
    let near = (t.round)(v);
    if v.is_finite() && (t.of)(near).abs() > v.abs() { near - 1 } else { near }
}
#[test]
fn float_to_halves() {
    let relu = |v: f32| if v < 0.0 { 0.0 } else { v };
    check("cvt.rz.f16.f32", "w>h", |x, _, _, _| truncated(F16, f64::from(f(x))));
    check("cvt.rz.bf16.f32", "w>h", |x, _, _, _| truncated(BF16, f64::from(f(x))));
    check("cvt.rz.bf16x2.f32", "ww>w", |x, y, _, _| {
        truncated(BF16, f64::from(f(x))) << 16 | truncated(BF16, f64::from(f(y)))
    });
    check("cvt.rn.relu.bf16.f32", "w>h", |x, _, _, _| bf16(relu(f(x))));
    check("cvt.rn.relu.f16.f32", "w>h", |x, _, _, _| f16(f64::from(relu(f(x)))));
    check("cvt.rn.relu.f16x2.f32", "ww>w", |x, y, _, _| {
        f16(f64::from(relu(f(x)))) << 16 | f16(f64::from(relu(f(y))))
    });
    check("cvt.rn.relu.bf16x2.f32", "ww>w", |x, y, _, _| bf16(relu(f(x))) << 16 | bf16(relu(f(y))));
    check("cvt.rn.satfinite.f16.f32", "w>h", |x, _, _, _| f16(f64::from(f(x).clamp(-65504.0, 65504.0))));
    check("cvt.rn.satfinite.bf16.f32", "w>h", |x, _, _, _| {
        let most = f(0x7f7f_0000);
        bf16(f(x).clamp(-most, most))
    });
    check("cvt.rn.ftz.f16.f32", "w>h", |x, _, _, _| f16(f64::from(z(x))));
    check("cvt.rn.f16.f64", "d>h", |x, _, _, _| f16(d(x)));
    check("cvt.rn.bf16.f16", "h>h", |x, _, _, _| bf16_of(of_f16(x)));
    check("cvt.rn.f16.bf16", "h>h", |x, _, _, _| f16(f64::from(f(x << 16))));
}
#[test]
fn halves_to_float() {
    check("cvt.f64.f16", "h>D", |x, _, _, _| of_f16(x).to_bits());
    check("cvt.sat.f32.f16", "h>w", |x, _, _, _| {
        let v = of_f16(x) as f32;
        b(if v > 0.0 { v.min(1.0) } else { 0.0 })
    });
    check("cvt.ftz.f64.f32", "w>D", |x, _, _, _| f64::from(z(x)).to_bits());
    check("cvt.rn.f16x2.e4m3x2", "h>w", |x, _, _, _| {
        // No infinity: 0x7f is NaN, the exponent field is that of 2^(e - 7).
        let half = |v: u64| {
            let (e, m) = ((v >> 3 & 15) as i32, (v & 7) as f64);
            let a = if e == 0 { m * 2f64.powi(-9) } else { (1.0 + m / 8.0) * 2f64.powi(e - 7) };
            if v & 0x7f == 0x7f { 0x7fff } else { f16(if v & 0x80 != 0 { -a } else { a }) }
        };
        half(x >> 8) << 16 | half(x & 255)
    });
    check("cvt.rn.satfinite.e4m3x2.f16x2", "w>h", |x, _, _, _| {
        let byte = |h: u64| small(of_f16(h) as f32, 3, 7, 448.0);
        byte(x >> 16) << 8 | byte(x & 0xffff)
    });
    check("cvt.rn.satfinite.e5m2x2.f16x2", "w>h", |x, _, _, _| {
        let byte = |h: u64| small(of_f16(h) as f32, 2, 15, 57344.0);
        byte(x >> 16) << 8 | byte(x & 0xffff)
    });
}
