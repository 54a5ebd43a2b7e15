//! Control flow, collectives, matrices, spaces, copies and mbarriers: small kernels against plain Rust.

mod common;

use common::*;
use mla_ptx::{Arg, Kind, Memory, Module, Options, Outcome, launch};

const HEAD: &str = ".version 9.0\n.target sm_90\n.address_size 64\n";

/// A kernel `k(in, out)` with `%t` = tid.x, `%in`, `%out` = in, out + 4 · tid, and registers %r, %h, %d, %f, %p.
fn kernel(shared: u32, body: &str) -> Module {
    let text = format!(
        "{HEAD}.visible .entry k(.param .u64 a, .param .u64 b) {{
        .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<40>; .reg .b32 %f<8>; .reg .b64 %d<16>;
        .reg .b32 %t; .reg .b64 %in, %out, %base, %dst;
        .shared .align 128 .b8 sm[{}];
        ld.param.u64 %base, [a]; ld.param.u64 %dst, [b]; mov.u32 %t, %tid.x;
        mad.wide.u32 %in, %t, 4, %base; mad.wide.u32 %out, %t, 4, %dst;
        {body}
        ret; }}",
        shared.max(4)
    );
    Module::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Runs `k` on a block of threads; the words of the output.
fn run(m: &Module, threads: u32, input: &[u32], out_words: usize) -> (Vec<u32>, Outcome) {
    let mut mem = Memory::new();
    let (a, b) = (mem.alloc_from(&raw32(input)).unwrap(), mem.alloc(out_words as u64 * 4).unwrap());
    let o = launch(
        m,
        "k",
        [1; 3],
        [threads, 1, 1],
        0,
        &[Arg::Pointer(a), Arg::Pointer(b)],
        &mut mem,
        &Options::default(),
    )
    .unwrap();
    (read32(&mem, b), o)
}

/// The same of a kernel in which nothing may be found.
fn clean(m: &Module, threads: u32, input: &[u32], out_words: usize) -> Vec<u32> {
    let (words, o) = run(m, threads, input, out_words);
    assert!(o.clean(), "{:#?}", o.findings);
    words
}

fn words(n: usize, seed: u64) -> Vec<u32> {
    bits(n, seed).into_iter().map(|b| b as u32).collect()
}

/// One value a lane: `body` makes %r1 of %r0.
fn lanes(body: &str, want: impl Fn(&[u32], usize) -> u32) {
    let m = kernel(0, &format!("ld.global.u32 %r0, [%in]; {body} st.global.u32 [%out], %r1;"));
    let x = words(32, 5);
    let got = clean(&m, 32, &x, 32);
    for (l, g) in got.iter().enumerate() {
        assert_eq!(*g, want(&x, l), "{body}, lane {l}");
    }
}

#[test]
fn shuffle_butterfly() {
    lanes("shfl.sync.bfly.b32 %r1, %r0, 5, 31, -1;", |x, l| x[l ^ 5]);
}
#[test]
fn shuffle_down_of_segments() {
    // Width 8: segment mask 24 in bits 8 to 12, clamp 31.
    lanes("shfl.sync.down.b32 %r1, %r0, 3, 0x181f, -1;", |x, l| if l % 8 + 3 < 8 { x[l + 3] } else { x[l] });
}
#[test]
fn shuffle_up_and_its_predicate() {
    lanes(
        "shfl.sync.up.b32 %r1|%p1, %r0, 4, 0, -1; @!%p1 mov.u32 %r1, 7;",
        |x, l| if l < 4 { 7 } else { x[l - 4] },
    );
}
#[test]
fn shuffle_index() {
    lanes("and.b32 %r2, %r0, 31; shfl.sync.idx.b32 %r1, %r0, %r2, 31, -1;", |x, l| x[(x[l] & 31) as usize]);
}
#[test]
fn vote_ballot() {
    lanes("setp.lt.s32 %p1, %r0, 0; vote.sync.ballot.b32 %r1, %p1, -1;", |x, _| {
        (0..32).fold(0, |o, l| o | x[l] >> 31 << l)
    });
}
#[test]
fn vote_any_all_uni() {
    lanes(
        "setp.lt.s32 %p1, %r0, 0; vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, %p1, -1;
         vote.sync.uni.pred %p4, %p1, -1; selp.b32 %r2, 1, 0, %p2; selp.b32 %r3, 2, 0, %p3; selp.b32 %r4, 4, 0, %p4;
         or.b32 %r1, %r2, %r3; or.b32 %r1, %r1, %r4;",
        |_, _| 1,
    );
}
#[test]
fn match_any() {
    lanes("and.b32 %r2, %r0, 3; match.any.sync.b32 %r1, %r2, -1;", |x, l| {
        (0..32).fold(0, |o, k| o | u32::from(x[k] & 3 == x[l] & 3) << k)
    });
}
#[test]
fn match_all() {
    lanes("mov.u32 %r2, 3; match.all.sync.b32 %r1|%p1, %r2, -1; @!%p1 mov.u32 %r1, 9;", |_, _| !0);
}
#[test]
fn redux_add() {
    lanes("redux.sync.add.u32 %r1, %r0, -1;", |x, _| x.iter().fold(0, |s, v| s.wrapping_add(*v)));
}
#[test]
fn redux_min_signed() {
    lanes("redux.sync.min.s32 %r1, %r0, -1;", |x, _| x.iter().map(|&v| v as i32).min().unwrap() as u32);
}
#[test]
fn redux_max_xor() {
    lanes(
        "redux.sync.max.u32 %r2, %r0, -1; redux.sync.xor.b32 %r3, %r0, -1; sub.u32 %r1, %r2, %r3;",
        |x, _| x.iter().max().unwrap().wrapping_sub(x.iter().fold(0, |s, v| s ^ v)),
    );
}
#[test]
fn active_mask_in_a_branch() {
    lanes("mov.u32 %r1, 0; setp.lt.u32 %p1, %t, 11; @%p1 bra A; bra B; A: activemask.b32 %r1; B:", |_, l| {
        if l < 11 { 0x7ff } else { 0 }
    });
}
#[test]
fn lane_masks_and_ids() {
    lanes(
        "mov.u32 %r2, %lanemask_lt; mov.u32 %r3, %lanemask_ge; xor.b32 %r1, %r2, %r3; add.u32 %r1, %r1, %laneid;
         add.u32 %r1, %r1, %ntid.x; add.u32 %r1, %r1, %warpid;",
        |_, l| (!0u32).wrapping_add(l as u32 + 32),
    );
}
#[test]
fn pack_and_unpack() {
    lanes(
        "mov.b32 {%h1, %h2}, %r0; mov.b32 %r2, {%h2, %h1}; mov.b64 %d1, {%r2, %r0}; mov.b64 {%r3, %r4}, %d1;
         xor.b32 %r1, %r3, %r4;",
        |x, l| x[l].rotate_left(16) ^ x[l],
    );
}
#[test]
fn branch_by_table() {
    lanes(
        "and.b32 %r2, %r0, 3; T: .branchtargets L0, L1, L2, L3; brx.idx %r2, T;
         L0: mov.u32 %r1, 10; bra E; L1: mov.u32 %r1, 11; bra E; L2: mov.u32 %r1, 12; bra E; L3: mov.u32 %r1, 13; E:",
        |x, l| 10 + (x[l] & 3),
    );
}
#[test]
fn loops_of_different_length() {
    lanes(
        "mov.u32 %r1, 0; and.b32 %r2, %r0, 15; L: setp.eq.u32 %p1, %r2, 0; @%p1 bra E; add.u32 %r1, %r1, %r2;
         sub.u32 %r2, %r2, 1; bra L; E: redux.sync.add.u32 %r3, %r1, -1; sub.u32 %r1, %r3, %r1;",
        |x, l| {
            let of = |v: u32| (v & 15) * ((v & 15) + 1) / 2;
            x.iter().map(|&v| of(v)).sum::<u32>() - of(x[l])
        },
    );
}
#[test]
fn local_memory_and_generic_addresses() {
    lanes(
        ".local .align 8 .b8 buf[64]; mov.u64 %d1, buf; cvta.local.u64 %d2, %d1; and.b32 %r2, %t, 7;
         mad.wide.u32 %d3, %r2, 4, %d2; st.u32 [%d3], %r0; isspacep.local %p1, %d3; cvta.to.local.u64 %d4, %d3;
         ld.local.u32 %r1, [%d4]; @!%p1 mov.u32 %r1, 0;",
        |x, l| x[l],
    );
}
#[test]
fn shared_by_generic_address() {
    let m = kernel(
        256,
        "mov.u64 %d1, sm; cvta.shared.u64 %d2, %d1; mad.wide.u32 %d3, %t, 4, %d2; ld.global.u32 %r0, [%in];
         st.u32 [%d3], %r0; bar.sync 0; mov.u32 %r2, sm; xor.b32 %r3, %t, 33; mad.lo.u32 %r2, %r3, 4, %r2;
         ld.shared.u32 %r1, [%r2]; st.global.u32 [%out], %r1;",
    );
    let x = words(64, 6);
    let got = clean(&m, 64, &x, 64);
    assert!((0..64).all(|t| got[t] == x[t ^ 33]));
}
#[test]
fn functions_are_copied_in() {
    let text = format!(
        "{HEAD}.func (.param .b32 ret) twice(.param .b32 x) {{ .reg .b32 %r<3>; .reg .pred %p; ld.param.b32 %r1, [x];
         setp.gt.u32 %p, %r1, 20; @%p bra BIG; add.u32 %r2, %r1, %r1; st.param.b32 [ret], %r2; ret;
         BIG: mov.u32 %r2, 1; st.param.b32 [ret], %r2; ret; }}
         .visible .entry k(.param .u64 a, .param .u64 b) {{ .reg .b32 %r<4>; .reg .b64 %d<4>; ld.param.u64 %d1, [b];
         mov.u32 %r1, %tid.x; mad.wide.u32 %d2, %r1, 4, %d1;
         {{ .param .b32 p0; st.param.b32 [p0], %r1; .param .b32 r0; call.uni (r0), twice, (p0); ld.param.b32 %r2, [r0]; }}
         st.global.u32 [%d2], %r2; ret; }}"
    );
    let got = clean(&Module::parse(&text).unwrap(), 32, &[0], 32);
    assert!((0..32).all(|t| got[t] == if t > 20 { 1 } else { 2 * t as u32 }));
}
#[test]
fn printf_prints_nothing_and_assertions_trap() {
    let text = format!(
        "{HEAD}.extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);
         .extern .func __assertfail(.param .b64 a, .param .b32 line);
         .visible .entry k(.param .u64 a, .param .u64 b) {{ .reg .b32 %r<4>; .reg .b64 %d<4>; .reg .pred %p;
         ld.param.u64 %d1, [b]; ld.param.u64 %d3, [a]; mov.u32 %r1, %tid.x; mad.wide.u32 %d2, %r1, 4, %d1;
         {{ .param .b64 p0; st.param.b64 [p0], %d1; .param .b64 p1; st.param.b64 [p1], %d1; .param .b32 r0;
            st.param.b32 [r0], %r1; call.uni (r0), vprintf, (p0, p1); ld.param.b32 %r2, [r0]; }}
         add.u32 %r2, %r2, 7; st.global.u32 [%d2], %r2; ld.global.u32 %r3, [%d3]; setp.ne.u32 %p, %r3, 0; @%p bra OK;
         {{ .param .b64 q0; st.param.b64 [q0], %d1; .param .b32 q1; st.param.b32 [q1], %r1;
            call.uni __assertfail, (q0, q1); }}
         OK: ret; }}"
    );
    let m = Module::parse(&text).unwrap();
    assert_eq!(clean(&m, 32, &[1], 32), [7; 32]);
    let mut mem = Memory::new();
    let (zero, out) = (mem.alloc_from(&[0; 4]).unwrap(), mem.alloc(128).unwrap());
    let args = [Arg::Pointer(zero), Arg::Pointer(out)];
    let o = launch(&m, "k", [1; 3], [32, 1, 1], 0, &args, &mut mem, &Options::default()).unwrap();
    assert_eq!(o.findings.iter().map(|f| f.kind).collect::<Vec<_>>(), [Kind::Trap]);
}
#[test]
fn isspacep_global() {
    let m = kernel(
        16,
        ".local .align 8 .b8 buf[8]; mov.u64 %d1, buf; cvta.local.u64 %d2, %d1; mov.u64 %d3, sm; cvta.shared.u64 %d4, %d3;
         isspacep.global %p1, %d2; isspacep.global %p2, %d4; isspacep.global %p3, %in; selp.b32 %r1, 1, 0, %p1;
         selp.b32 %r2, 2, 0, %p2; selp.b32 %r3, 4, 0, %p3; or.b32 %r1, %r1, %r2; or.b32 %r1, %r1, %r3;
         st.global.u32 [%out], %r1;",
    );
    assert_eq!(clean(&m, 32, &words(32, 1), 32), [4; 32]);
}
/// libcu++ puts the operation first.
#[test]
fn atomics_with_modifiers_in_another_order() {
    for form in
        ["red.add.global.relaxed.gpu.u32", "red.add.relaxed.gpu.u32", "red.relaxed.gpu.global.add.u32"]
    {
        let m = kernel(
            16,
            &format!(
                "mov.u32 %r1, 0; st.global.u32 [%out], %r1; bar.sync 0; mul.wide.u32 %d1, %t, 4; sub.u64 %d2, %out, %d1;
                 bar.warp.sync -1; {form} [%d2], %t;"
            ),
        );
        let got = clean(&m, 32, &[0], 32);
        assert_eq!((got[0], got[1]), (31 * 32 / 2, 0), "{form}");
    }
    for form in ["atom.const.add.u32", "atom.local.add.u32", "atom.add.gpu.add.u32", "atom.global.u32"] {
        let text = format!(
            "{HEAD}.visible .entry k(.param .u64 a) {{ .reg .b32 %r<4>; .reg .b64 %d; ld.param.u64 %d, [a];
            mov.u32 %r1, 1; {form} %r2, [%d], %r1; ret; }}"
        );
        assert!(Module::parse(&text).is_err(), "{form}");
    }
}
/// As cuda_fp16.h declares the registers of its inline assembly.
#[test]
fn register_declarations_without_a_space() {
    lanes("{ .reg.b32 f; .reg.b16 h; mov.b32 f, %r0; cvt.u16.u32 h, f; cvt.u32.u16 %r1, h; }", |x, l| {
        x[l] & 0xffff
    });
}
#[test]
fn structures_by_value_and_module_variables() {
    let text = format!(
        "{HEAD}.global .align 4 .u32 table[3] = {{5, 6, 7}}; .const .align 8 .u64 where = table+4;
         .visible .entry k(.param .align 8 .b8 s[24], .param .u32 n) {{ .reg .b32 %r<8>; .reg .b64 %d<6>;
         ld.param.u64 %d1, [s+8]; ld.param.u32 %r1, [s+16]; ld.param.u32 %r2, [n]; ld.const.u64 %d2, [where];
         ld.global.u32 %r3, [%d2]; ld.global.u32 %r4, [table+8]; add.u32 %r5, %r1, %r2; add.u32 %r5, %r5, %r3;
         mad.lo.u32 %r5, %r4, 1000, %r5; st.global.u32 [%d1], %r5; ret; }}"
    );
    let m = Module::parse(&text).unwrap();
    let k = m.kernel("k").unwrap();
    assert_eq!(k.parameters.iter().map(|p| (p.offset, p.bytes)).collect::<Vec<_>>(), [(0, 24), (24, 4)]);
    let mut mem = Memory::new();
    let out = mem.alloc(4).unwrap();
    let mut s = vec![0; 24];
    s[8..16].copy_from_slice(&out.to_le_bytes());
    s[16..20].copy_from_slice(&100u32.to_le_bytes());
    let args = [Arg::Bytes(s), Arg::U32(20)];
    let options = Options { outputs: vec![out], ..Options::default() };
    let o = launch(&m, "k", [1; 3], [1; 3], 0, &args, &mut mem, &options).unwrap();
    assert!(o.clean(), "{:?}", o.findings);
    assert_eq!(read32(&mem, out), [7126]);
}

// ---- barriers

#[test]
fn barrier_reductions() {
    let m = kernel(
        0,
        "ld.global.u32 %r0, [%in]; setp.lt.s32 %p1, %r0, 0; bar.red.popc.u32 %r1, 0, %p1; bar.red.or.pred %p2, 0, %p1;
         bar.red.and.pred %p3, 0, %p1; selp.b32 %r2, 1000, 0, %p2; selp.b32 %r3, 2000, 0, %p3; add.u32 %r1, %r1, %r2;
         add.u32 %r1, %r1, %r3; st.global.u32 [%out], %r1;",
    );
    let x = words(96, 7);
    let n = x.iter().filter(|v| (**v as i32) < 0).count() as u32;
    assert!(clean(&m, 96, &x, 96).iter().all(|&v| v == n + 1000));
}
/// Producer and consumer by named barriers: arrive does not wait, and orders.
#[test]
fn named_barriers_order() {
    let body = |arrive: &str| {
        format!(
            "mov.u32 %r1, sm; and.b32 %r2, %t, 31; mad.lo.u32 %r3, %r2, 4, %r1; setp.ge.u32 %p1, %t, 32; @%p1 bra READ;
             st.shared.u32 [%r3], %t; {arrive} bra END; READ: bar.sync 1, 64; ld.shared.u32 %r4, [%r3];
             st.global.u32 [%out], %r4; END:"
        )
    };
    let (got, o) = run(&kernel(128, &body("bar.arrive 1, 64;")), 64, &[0], 64);
    assert!(o.clean(), "{:?}", o.findings);
    assert!((32..64).all(|t| got[t] == t as u32 - 32));
    // Arriving before the store does not order it.
    let late = body("").replace("st.shared.u32 [%r3], %t;", "bar.arrive 1, 64; st.shared.u32 [%r3], %t;");
    let (_, o) = run(&kernel(128, &late), 64, &[0], 64);
    assert_eq!(o.findings.iter().map(|f| f.kind).collect::<Vec<_>>(), [Kind::RaceReadAfterWrite]);
}
#[test]
fn a_barrier_that_nobody_completes() {
    let m = kernel(0, "setp.lt.u32 %p1, %t, 32; @%p1 bar.sync 1, 96;");
    let (_, o) = run(&m, 64, &[0], 1);
    assert_eq!(o.findings.len(), 1);
    assert_eq!(o.findings[0].kind, Kind::Deadlock);
    assert!(o.findings[0].detail.contains("at the barrier of PTX line"), "{}", o.findings[0]);
}
#[test]
fn lanes_that_left_do_not_hold_a_barrier() {
    let m = kernel(0, "setp.gt.u32 %p1, %t, 40; @%p1 bra OUT; bar.sync 0; st.global.u32 [%out], %t; OUT:");
    let (got, o) = run(&m, 64, &[0], 64);
    assert!(o.clean(), "{:?}", o.findings);
    assert!((0..41).all(|t| got[t] == t as u32));
}
#[test]
fn endless_loops_end() {
    let m = kernel(0, "L: bra L;");
    let mut mem = Memory::new();
    let a = mem.alloc(4).unwrap();
    let options = Options { step_limit: 1000, ..Options::default() };
    let args = [Arg::Pointer(a), Arg::Pointer(a)];
    let o = launch(&m, "k", [1; 3], [1; 3], 0, &args, &mut mem, &options).unwrap();
    assert_eq!(o.findings[0].kind, Kind::StepLimit);
}

// ---- atomics

fn atomic(form: &str, start: u32, want: impl Fn(&[u32]) -> u32) {
    let x = words(64, 8);
    for space in ["global", "shared"] {
        let set =
            format!("mov.u64 %d1, sm; setp.eq.u32 %p1, %t, 0; @%p1 st.shared.u32 [sm], {start}; bar.sync 0;");
        let (set, at) =
            if space == "shared" { (set, "%d1") } else { (String::from("add.u64 %d1, %dst, 0;"), "%d1") };
        let m = kernel(
            4,
            &format!(
                "{set} ld.global.u32 %r0, [%in]; {}; {}",
                form.replace("SPACE", space).replace("AT", &format!("[{at}]")),
                if space == "shared" {
                    "bar.sync 0; ld.shared.u32 %r9, [sm]; setp.eq.u32 %p1, %t, 0; @%p1 st.global.u32 [%dst], %r9;"
                } else {
                    ""
                }
            ),
        );
        let mut mem = Memory::new();
        let (a, b) = (mem.alloc_from(&raw32(&x)).unwrap(), mem.alloc_from(&raw32(&[start])).unwrap());
        let args = [Arg::Pointer(a), Arg::Pointer(b)];
        let o = launch(&m, "k", [1; 3], [64, 1, 1], 0, &args, &mut mem, &Options::default()).unwrap();
        assert!(o.clean(), "{form} {space}: {:?}", o.findings);
        assert_eq!(read32(&mem, b)[0], want(&x), "{form} {space}");
    }
}
#[test]
fn atomic_add() {
    atomic("atom.SPACE.add.u32 %r1, AT, %r0", 3, |x| x.iter().fold(3, |s, v| s.wrapping_add(*v)));
}
#[test]
fn atomic_max_signed() {
    atomic("atom.relaxed.gpu.SPACE.max.s32 %r1, AT, %r0", 3, |x| {
        x.iter().fold(3, |s, &v| s.max(v as i32)) as u32
    });
}
#[test]
fn atomic_min_unsigned() {
    atomic("red.SPACE.min.u32 AT, %r0", !0, |x| *x.iter().min().unwrap());
}
#[test]
fn atomic_bits() {
    atomic("red.SPACE.xor.b32 AT, %r0", 9, |x| x.iter().fold(9, |s, v| s ^ v));
}
#[test]
fn atomic_add_float() {
    // Small whole numbers: exact in any order.
    atomic("and.b32 %r2, %r0, 255; cvt.rn.f32.u32 %f1, %r2; atom.SPACE.add.f32 %f2, AT, %f1", 0, |x| {
        (x.iter().map(|v| v & 255).sum::<u32>() as f32).to_bits()
    });
}
#[test]
fn atomic_compare_and_swap() {
    // Each thread spins until its turn.
    atomic(
        "mov.u32 %r3, %t; add.u32 %r4, %t, 1; L: atom.SPACE.cas.b32 %r5, AT, %r3, %r4; setp.ne.u32 %p2, %r5, %r3;
         @%p2 bra L; bar.sync 0",
        0,
        |_| 64,
    );
}
#[test]
fn atomic_increment_wraps() {
    atomic("atom.SPACE.inc.u32 %r1, AT, 9", 0, |_| 64 % 10);
}
#[test]
fn plain_and_atomic_accesses_race() {
    let m =
        kernel(4, "setp.ge.u32 %p1, %t, 32; @%p1 red.shared.add.u32 [sm], 1; @!%p1 st.shared.u32 [sm], %t;");
    let (_, o) = run(&m, 64, &[0], 1);
    assert!(o.of(Kind::RaceWithAtomic).count() > 0, "{:?}", o.findings);
}

// ---- matrices

/// ldmatrix of a tile of numbers against the manual's figure.
fn load_matrix(form: &str, count: usize, transposed: bool) {
    let regs: Vec<String> = (1..=count).map(|i| format!("%r{i}")).collect();
    let stores: String =
        (0..count).map(|i| format!("st.global.u32 [%d2+{}], %r{};", 128 * i, i + 1)).collect();
    let m = kernel(
        512,
        &format!(
            "mov.u32 %r9, sm; shl.b32 %r10, %t, 4; add.u32 %r9, %r9, %r10; mad.wide.u32 %d1, %t, 16, %base;
             ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%d1]; st.shared.v4.u32 [%r9], {{%r20, %r21, %r22, %r23}};
             bar.warp.sync -1; {form} {{{}}}, [%r9]; mov.u64 %d2, %out; {stores}",
            regs.join(", ")
        ),
    );
    let x: Vec<u16> = (0..256).collect();
    let input: Vec<u32> = x.chunks(2).map(|c| u32::from(c[1]) << 16 | u32::from(c[0])).collect();
    let got = clean(&m, 32, &input, 32 * count);
    for q in 0..count {
        for l in 0..32 {
            let at = |row: usize, col: usize| x[q * 64 + row * 8 + col];
            for e in 0..2 {
                let (row, col) = (l / 4, 2 * (l % 4) + e);
                let want = if transposed { at(col, row) } else { at(row, col) };
                assert_eq!((got[q * 32 + l] >> (16 * e)) as u16, want, "{form} matrix {q} lane {l} half {e}");
            }
        }
    }
}
#[test]
fn ldmatrix_x1() {
    load_matrix("ldmatrix.sync.aligned.m8n8.x1.shared.b16", 1, false);
}
#[test]
fn ldmatrix_x2() {
    load_matrix("ldmatrix.sync.aligned.m8n8.x2.shared.b16", 2, false);
}
#[test]
fn ldmatrix_x4() {
    load_matrix("ldmatrix.sync.aligned.m8n8.x4.shared.b16", 4, false);
}
#[test]
fn ldmatrix_x4_transposed() {
    load_matrix("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", 4, true);
}
/// As much code in use has it.
#[test]
fn ldmatrix_with_the_number_before_the_shape() {
    load_matrix("ldmatrix.sync.aligned.x4.m8n8.shared.b16", 4, false);
    load_matrix("ldmatrix.sync.aligned.x2.trans.m8n8.shared.b16", 2, true);
}
#[test]
fn stmatrix_undoes_ldmatrix() {
    for trans in ["", ".trans"] {
        let m = kernel(
            1024,
            &format!(
                "mov.u32 %r9, sm; shl.b32 %r10, %t, 4; add.u32 %r9, %r9, %r10; mad.wide.u32 %d1, %t, 16, %base;
                 ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%d1]; st.shared.v4.u32 [%r9], {{%r20, %r21, %r22, %r23}};
                 bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r1, %r2, %r3, %r4}}, [%r9];
                 stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r9+512], {{%r1, %r2, %r3, %r4}}; bar.warp.sync -1;
                 ld.shared.v4.u32 {{%r5, %r6, %r7, %r8}}, [%r9+512]; mad.wide.u32 %d2, %t, 16, %dst;
                 st.global.v4.u32 [%d2], {{%r5, %r6, %r7, %r8}};"
            ),
        );
        let x = words(128, 9);
        assert_eq!(clean(&m, 32, &x, 128), x);
    }
}

/// mma of small whole numbers, exact in any order, against a naive product; fragments by the manual's formulas.
fn product(form: &str, k: usize, per: usize, encode: impl Fn(u32) -> u32) {
    let (na, nb) = (16 * k / 32 / per, 8 * k / 32 / per);
    let list =
        |from: usize, n: usize| (from..from + n).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(", ");
    let loads: String =
        (0..na + nb + 4).map(|i| format!("ld.global.u32 %r{i}, [%in+{}];", 128 * i)).collect();
    let stores: String = (0..4).map(|i| format!("st.global.u32 [%out+{}], %r{};", 128 * i, 20 + i)).collect();
    let m = kernel(
        0,
        &format!(
            "{loads} {form} {{{}}}, {{{}}}, {{{}}}, {{{}}}; {stores}",
            list(20, 4),
            list(0, na),
            list(na, nb),
            list(na + nb, 4)
        ),
    );
    let v = |n: usize, seed| -> Vec<u32> { words(n, seed).into_iter().map(|w| w % 8).collect() };
    let (a, b, c) = (v(16 * k, 1), v(8 * k, 2), v(128, 3));
    let width = 32 / per;
    let mut input = Vec::new();
    for q in 0..na {
        for l in 0..32 {
            let (row, k0) = (l / 4 + 8 * (q % 2), (l % 4) * per + 4 * per * (q / 2));
            input.push((0..per).fold(0, |w, e| w | encode(a[row * k + k0 + e]) << (width * e)));
        }
    }
    for q in 0..nb {
        for l in 0..32 {
            let (col, k0) = (l / 4, (l % 4) * per + 4 * per * q);
            input.push((0..per).fold(0, |w, e| w | encode(b[(k0 + e) * 8 + col]) << (width * e)));
        }
    }
    let place = |q: usize, l: usize| (l / 4 + 8 * (q / 2)) * 8 + (l % 4) * 2 + q % 2;
    for q in 0..4 {
        for l in 0..32 {
            input.push((c[place(q, l)] as f32).to_bits());
        }
    }
    let got = clean(&m, 32, &input, 128);
    for q in 0..4 {
        for l in 0..32 {
            let (row, col) = (place(q, l) / 8, place(q, l) % 8);
            let want = c[place(q, l)] + (0..k).map(|i| a[row * k + i] * b[i * 8 + col]).sum::<u32>();
            assert_eq!(f32::from_bits(got[q * 32 + l]), want as f32, "{form} row {row} column {col}");
        }
    }
}

fn bf16_bits(v: u32) -> u32 {
    (v as f32).to_bits() >> 16
}
/// Bits of a small whole number in a format with `fraction` bits and a bias.
fn float_bits(v: u32, fraction: u32, bias: u32) -> u32 {
    if v == 0 {
        0
    } else {
        (v.ilog2() + bias) << fraction | (v << fraction >> v.ilog2()) & ((1 << fraction) - 1)
    }
}

#[test]
fn mma_bf16_k16() {
    product("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 16, 2, bf16_bits);
}
#[test]
fn mma_bf16_k8() {
    product("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32", 8, 2, bf16_bits);
}
#[test]
fn mma_f16_k16() {
    product("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 16, 2, |v| float_bits(v, 10, 15));
}
#[test]
fn mma_f16_k8() {
    product("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", 8, 2, |v| float_bits(v, 10, 15));
}
#[test]
fn mma_tf32_k8() {
    product("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", 8, 1, |v| (v as f32).to_bits());
}
#[test]
fn mma_tf32_k4() {
    product("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32", 4, 1, |v| (v as f32).to_bits());
}
#[test]
fn mma_e4m3_k32() {
    product("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", 32, 4, |v| float_bits(v, 3, 7));
}
#[test]
fn mma_e5m2_k32() {
    // Two fraction bits: 7 is 1.75 · 4, exact.
    product("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32", 32, 4, |v| float_bits(v, 2, 15));
}

// ---- asynchronous copies

#[test]
fn copies_of_4_8_16_bytes_and_short_sources() {
    for (form, n, valid) in [("ca", 4, 4), ("ca", 8, 8), ("cg", 16, 16), ("cg", 16, 6), ("ca", 16, 0)] {
        let loads: String = (0..n / 4)
            .map(|i| format!("ld.shared.u32 %r1, [%r9+{}]; st.global.u32 [%d2+{}], %r1;", 4 * i, 4 * i))
            .collect();
        let m = kernel(
            512,
            &format!(
                "mov.u32 %r9, sm; mad.lo.u32 %r9, %t, {n}, %r9; mad.wide.u32 %d1, %t, {n}, %base;
                 mad.wide.u32 %d2, %t, {n}, %dst; cp.async.{form}.shared.global [%r9], [%d1], {n}, {valid};
                 cp.async.commit_group; cp.async.wait_group 0; {loads}"
            ),
        );
        let x = words(8 * n, 11);
        let got = clean(&m, 32, &x, 8 * n);
        let (x, got) = (raw32(&x), raw32(&got));
        for (i, (g, w)) in got.iter().zip(&x).enumerate() {
            assert_eq!(*g, if i % n < valid { *w } else { 0 }, "{form} {n} {valid} byte {i}");
        }
    }
}
#[test]
fn wait_group_leaves_the_newest() {
    let body = |keep: u32| {
        format!(
            "mov.u32 %r9, sm; mad.lo.u32 %r9, %t, 4, %r9; cp.async.ca.shared.global [%r9], [%in], 4; cp.async.commit_group;
             cp.async.ca.shared.global [%r9+128], [%in], 4; cp.async.commit_group; cp.async.wait_group {keep};
             ld.shared.u32 %r1, [%r9]; ld.shared.u32 %r2, [%r9+128]; st.global.u32 [%out], %r2;"
        )
    };
    assert!(run(&kernel(256, &body(0)), 32, &words(32, 1), 32).1.clean());
    let (_, o) = run(&kernel(256, &body(1)), 32, &words(32, 1), 32);
    assert_eq!(o.findings.iter().map(|f| (f.kind, f.count)).collect::<Vec<_>>(), [(Kind::InFlight, 32)]);
}

/// A bulk copy by thread 0, waited for by everybody.
const BULK: &str = "setp.ne.u32 %p1, %t, 0; mov.u32 %r8, sm; add.u32 %r9, %r8, 512;
    @%p1 bra GO; mbarrier.init.shared::cta.b64 [%r9], 1; fence.mbarrier_init.release.cluster; GO: bar.sync 0;
    @%p1 bra WAIT; mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [%r9], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r8], [%base], 256, [%r9];
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 0; @!%p2 bra WAIT;
    READ: mad.lo.u32 %r7, %t, 4, %r8; ld.shared.u32 %r1, [%r7]; st.global.u32 [%out], %r1;";

/// What `change` makes of it.
fn bulk(change: impl Fn(String) -> String) -> (Vec<u32>, Outcome) {
    run(&kernel(528, &change(BULK.to_owned())), 64, &words(64, 12), 64)
}
#[test]
fn bulk_copy() {
    let (got, o) = bulk(|s| s);
    assert!(o.clean(), "{:?}", o.findings);
    assert_eq!(got, words(64, 12));
}
#[test]
fn bulk_copy_polled() {
    let (got, o) = bulk(|s| s.replace("try_wait", "test_wait"));
    assert!(o.clean(), "{:?}", o.findings);
    assert_eq!(got, words(64, 12));
}
#[test]
fn bulk_copy_read_before_the_wait() {
    let (_, o) =
        bulk(|s| s.replace("WAIT: mbar", "WAIT: mad.lo.u32 %r7, %t, 4, %r8; ld.shared.u32 %r2, [%r7]; mbar"));
    assert!(o.of(Kind::InFlight).count() > 0, "{:?}", o.findings);
}
#[test]
fn bulk_copy_that_one_warp_does_not_wait_for() {
    let (_, o) = bulk(|s| s.replace("WAIT: mbar", "WAIT: setp.ge.u32 %p3, %t, 32; @%p3 bra READ; mbar"));
    assert_eq!(o.findings.iter().map(|f| f.kind).collect::<Vec<_>>(), [Kind::RaceReadAfterWrite]);
}
#[test]
fn bulk_copy_of_too_few_bytes() {
    let (_, o) = bulk(|s| s.replace("[%base], 256", "[%base], 240"));
    let f = o.of(Kind::Deadlock).next().expect("a deadlock");
    assert!(f.detail.contains("still wants 0 arrivals and 16 bytes"), "{f}");
}
#[test]
fn bulk_copy_that_nobody_waits_for() {
    let (_, o) = bulk(|s| s.replace("WAIT: mbar", "WAIT: bra END; mbar") + "END:");
    assert_eq!(o.findings.iter().map(|f| f.kind).collect::<Vec<_>>(), [Kind::NeverWaited]);
}
#[test]
fn bulk_copy_over_bytes_that_are_read() {
    // Thread 0 stores, all wait, thread 40 reads, and thread 0 copies with nothing that orders it after the read.
    let early =
        "GO: @!%p1 st.shared.u32 [sm], 1; bar.sync 0; setp.eq.u32 %p4, %t, 40; @%p4 ld.shared.u32 %r5, [sm];";
    for (reverse_warps, kind) in [(false, Kind::RaceReadAfterWrite), (true, Kind::RaceWriteAfterRead)] {
        let m = kernel(528, &BULK.replace("GO: bar.sync 0;", early));
        let mut mem = Memory::new();
        let (a, b) = (mem.alloc_from(&raw32(&words(64, 12))).unwrap(), mem.alloc(256).unwrap());
        let options = Options { reverse_warps, ..Options::default() };
        let args = [Arg::Pointer(a), Arg::Pointer(b)];
        let o = launch(&m, "k", [1; 3], [64, 1, 1], 0, &args, &mut mem, &options).unwrap();
        assert_eq!(o.findings.iter().map(|f| f.kind).collect::<Vec<_>>(), [kind], "reverse {reverse_warps}");
    }
}
#[test]
fn an_mbarrier_that_was_never_initialised() {
    let (_, o) = bulk(|s| s.replace("mbarrier.init.shared::cta.b64 [%r9], 1;", ""));
    assert!(o.of(Kind::SharedUninitialised).count() > 0, "{:?}", o.findings);
}

// ---- NVRTC's code for what the MLA kernels do not use

#[test]
fn divergent_switch_against_a_model() {
    let m = load("misc_compute_120");
    let x = words(64, 13);
    let mut mem = Memory::new();
    let a = mem.alloc_from(&raw32(&x)).unwrap();
    let out = mem.alloc(256).unwrap();
    let total = mem.alloc_from(&raw32(&[0, 0])).unwrap();
    let sum = mem.alloc_from(&raw_f32(&[0.0])).unwrap();
    let args = [Arg::Pointer(a), Arg::Output(out), Arg::Pointer(total), Arg::Pointer(sum)];
    let o = launch(&m, "divergent", [1; 3], [64, 1, 1], 0, &args, &mut mem, &Options::default()).unwrap();
    assert!(o.clean(), "{:?}", o.findings);
    let r: Vec<u32> = x
        .iter()
        .map(|&v| match v & 7 {
            0 => (0..v & 15).fold(0u32, |r, i| r.wrapping_add(i.wrapping_mul(v))),
            1 => v.reverse_bits(),
            2 => v.leading_zeros(),
            3 => v.count_ones(),
            4 => {
                let all = u64::from(v.wrapping_mul(3)) << 32 | u64::from(v);
                // Selector 0x5140, lowest nibble first.
                [0u32, 4, 1, 5]
                    .iter()
                    .enumerate()
                    .fold(0, |o, (i, n)| o | ((all >> (8 * n)) as u32 & 255) << (8 * i))
            }
            5 => v / 7 + v % 5,
            6 => {
                let (mut i, mut r) = (v & 31, 0);
                while i != 0 {
                    r ^= i << (v & 3);
                    i >>= 1;
                }
                r
            }
            _ => v >> 3,
        })
        .collect();
    let got = read32(&mem, out);
    for t in 0..64 {
        let warp = &r[t / 32 * 32..t / 32 * 32 + 32];
        let ballot = warp.iter().enumerate().fold(0, |o, (l, v)| o | (v & 1) << l);
        let any = u32::from(warp.contains(&5));
        let s = warp.iter().fold(0u32, |s, v| s.wrapping_add(*v));
        let count: u32 = (0..64).filter(|k| k % 4 == t % 4).map(|k| r[k] & 255).sum();
        let want = [r[t], ballot, any, s, count].iter().fold(0u32, |s, v| s.wrapping_add(*v));
        assert_eq!(got[t], want, "thread {t}");
    }
    assert_eq!(read32(&mem, total), [64, *r.iter().max().unwrap()]);
    assert_eq!(read_f32(&mem, sum), [96.0]);
}

#[test]
fn double_division_and_square_root() {
    let m = load("misc_compute_120");
    let (a, b) = (gauss(32, 14), gauss(32, 15));
    let a: Vec<f64> = a.iter().map(|v| v.abs() * 1e3).collect();
    let raw = |v: &[f64]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let mut mem = Memory::new();
    let (da, db) = (mem.alloc_from(&raw(&a)).unwrap(), mem.alloc_from(&raw(&b)).unwrap());
    let out = mem.alloc(512).unwrap();
    let args = [Arg::Pointer(da), Arg::Pointer(db), Arg::Output(out)];
    let o = launch(&m, "double_math", [1; 3], [32, 1, 1], 0, &args, &mut mem, &Options::default()).unwrap();
    assert!(o.clean(), "{:?}", o.findings);
    let raw = bytes(&mem, out);
    for (t, c) in raw.chunks(16).enumerate() {
        let v = |i: usize| f64::from_le_bytes(c[8 * i..8 * i + 8].try_into().unwrap());
        assert_eq!((v(0), v(1)), (a[t] / b[t], a[t].sqrt() * b[t]));
    }
}
