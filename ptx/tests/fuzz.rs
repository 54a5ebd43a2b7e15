//! Text that is no PTX, and PTX that was changed at random: errors, never a panic. Bit operations on random operands.

mod common;

use mla_ptx::{Arg, LaunchError, Memory, Module, Options, launch};
use proptest::prelude::*;

/// Small kernels with everything the grammar knows, to be mutated.
const SEED: &str = r#"//
.version 9.0
.target sm_90
.address_size 64
.global .align 4 .u32 T[4] = {1, 2, 0x3, 4};
.extern .shared .align 16 .b8 dyn[];
.func (.param .b32 r) f(.param .b32 x) { .reg .b32 %a; ld.param.b32 %a, [x]; add.s32 %a, %a, 1; st.param.b32 [r], %a; ret; }
.visible .entry k(.param .u64 .ptr .align 1 p, .param .u32 n)
.maxntid 64, 1, 1
{
	.reg .pred %p<4>;
	.reg .b16 %h<4>;
	.reg .b32 %r<20>;
	.reg .b64 %d<6>;
	.shared .align 8 .b8 s[64];
	.loc 1 3 4
	ld.param.u64 %d1, [p];
	ld.param.u32 %r2, [n];
	mov.u32 %r1, %tid.x;
	setp.ge.u32 %p1, %r1, %r2;
	@%p1 bra $END;
	mad.wide.u32 %d2, %r1, 4, %d1;
	mov.u32 %r4, 5;
	{ .reg .pred q; W: setp.eq.u32 q, %r4, 0; @q bra D; sub.u32 %r4, %r4, 1; bra W; D: }
	{ .param .b32 a; st.param.b32 [a], %r1; .param .b32 b; call.uni (b), f, (a); ld.param.b32 %r5, [b]; }
	mov.b32 {%h1, %h2}, %r5;
	mov.b32 %r6, {%h2, %h1};
	shfl.sync.bfly.b32 %r7|%p2, %r6, 1, 31, -1;
	bar.sync 0;
	mov.u32 %r8, s;
	st.shared.u32 [%r8+4], %r7;
	ld.shared.u32 %r9, [%r8+4];
	mbarrier.init.shared.b64 [%r8+8], 1;
	cp.async.ca.shared.global [%r8+16], [%d2], 4;
	cp.async.wait_all;
	mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r10,%r11,%r12,%r13}, {%r1,%r2}, {%r4}, {%r5,%r6,%r7,%r9};
	atom.global.add.u32 %r14, [%d2], 0f3F800000;
	TS: .branchtargets $END, $END;
	brx.idx %r4, TS;
	st.global.v2.u32 [%d1], {%r10, %r11};
$END:
	ret;
}
"#;

fn try_everything(text: &str) {
    let Ok(m) = Module::parse_partly(text) else { return };
    let _ = m.report();
    let names: Vec<String> = m.kernels().map(|k| k.name.to_owned()).collect();
    for name in names {
        let Some(k) = m.kernel(&name) else { continue };
        if k.local_bytes > 1 << 16 || k.shared_bytes > 1 << 16 {
            continue;
        }
        let mut mem = Memory::new();
        let a = mem.alloc(256).unwrap();
        let args: Vec<Arg> = k
            .parameters
            .iter()
            .map(|p| match p.bytes {
                8 => Arg::Pointer(a),
                4 => Arg::U32(40),
                n => Arg::Bytes(vec![0; n as usize]),
            })
            .collect();
        let options = Options { step_limit: 2000, sequential: true, ..Options::default() };
        let _ = launch(&m, &name, [2, 1, 1], [48, 1, 1], 64, &args, &mut mem, &options);
    }
}

#[test]
fn the_seed_itself_loads() {
    Module::parse(SEED).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn any_text(text in "\\PC{0,400}") {
        try_everything(&text);
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        try_everything(&String::from_utf8_lossy(&bytes));
    }

    /// Words of PTX in any order.
    #[test]
    fn any_words(picks in prop::collection::vec(0usize..10_000, 0..120)) {
        let words: Vec<&str> = SEED.split_inclusive([' ', ',', ';', '\n', '.', '[', '{']).collect();
        let text: String = picks.iter().map(|i| words[i % words.len()]).collect();
        try_everything(&format!(".version 9.0\n.target sm_90\n{text}"));
    }

    /// A few characters of real PTX replaced, removed or doubled.
    #[test]
    fn mutated_characters(edits in prop::collection::vec((0usize..SEED.len(), 0u8..4, 32u8..127), 1..6)) {
        let mut text: Vec<u8> = SEED.into();
        for (at, how, c) in edits {
            let at = at % text.len();
            match how {
                0 => text[at] = c,
                1 => drop(text.remove(at)),
                2 => text.insert(at, c),
                _ => { let end = (at + 9).min(text.len()); let piece = text[at..end].to_vec(); text.splice(at..at, piece); }
            }
        }
        try_everything(&String::from_utf8_lossy(&text));
    }

    /// Whole statements exchanged, and numbers made extreme.
    #[test]
    fn mutated_statements(a in 0usize..60, b in 0usize..60, n in prop::sample::select(vec!["0", "-1", "4294967295", "18446744073709551615", "65537", "3"])) {
        let mut lines: Vec<String> = SEED.lines().map(str::to_owned).collect();
        let count = lines.len();
        lines.swap(a % count, b % count);
        let digits: String = lines[b % count].chars().map(|c| if c.is_ascii_digit() { '\u{1}' } else { c }).collect();
        if a % 3 == 0 {
            lines[b % count] = digits.replacen('\u{1}', n, 1).replace('\u{1}', "1");
        }
        try_everything(&lines.join("\n"));
    }

    /// No launch argument panics.
    #[test]
    fn any_launch(grid in any::<[u32; 3]>(), block in any::<[u32; 3]>(), shared: u32, p: u64, small: bool) {
        let m = Module::parse(SEED).unwrap();
        let (grid, block) = if small { (grid.map(|g| g % 3), block.map(|b| b % 9)) } else { (grid, block) };
        let mut mem = Memory::new();
        let args = [Arg::Pointer(p), Arg::U32(p as u32)];
        let options = Options { step_limit: 2000, ..Options::default() };
        let r = launch(&m, "k", grid, block, shared, &args, &mut mem, &options);
        if !small {
            prop_assert!(r.is_err(), "{:?} {:?}", grid, block);
        }
    }
}

#[test]
fn errors_name_instruction_and_line() {
    let text =
        SEED.replace("bar.sync 0;", "bar.sync 0; wgmma.fence.sync.aligned;\n\tadd.cc.u32 %r1, %r1, 1;");
    let e = Module::parse(&text).err().unwrap();
    let line = |what: &str| text.lines().position(|l| l.contains(what)).unwrap() as u32 + 1;
    let seen: Vec<(u32, &str)> = e.issues.iter().map(|i| (i.line, i.what.as_str())).collect();
    let want = [(line("wgmma"), "wgmma.fence.sync.aligned"), (line("add.cc"), "add.cc.u32")];
    assert_eq!(seen, want);
    // The rest of the module can be looked at all the same.
    let m = Module::parse_partly(&text).unwrap();
    assert_eq!(m.report().unsupported.len(), 2);
    assert!(!m.kernel("k").unwrap().runs);
    let r = launch(&m, "k", [1; 3], [1; 3], 0, &[], &mut Memory::new(), &Options::default());
    assert!(matches!(r, Err(LaunchError::Unsupported { .. })), "{r:?}");
}

#[test]
fn launches_that_cannot_be() {
    let m = Module::parse(SEED).unwrap();
    let mut mem = Memory::new();
    let a = mem.alloc(1024).unwrap();
    let good = [Arg::Pointer(a), Arg::U32(1)];
    let mut go = |name: &str, grid, block, shared, args: &[Arg]| {
        launch(&m, name, grid, block, shared, args, &mut mem, &Options::default()).err()
    };
    assert!(matches!(go("x", [1; 3], [1; 3], 0, &good), Some(LaunchError::NoKernel { .. })));
    assert!(matches!(go("k", [1; 3], [1; 3], 0, &good[..1]), Some(LaunchError::Arguments { .. })));
    let narrow = [Arg::U32(0), Arg::U32(1)];
    assert!(matches!(go("k", [1; 3], [1; 3], 0, &narrow), Some(LaunchError::Arguments { .. })));
    assert!(matches!(go("k", [0, 1, 1], [1; 3], 0, &good), Some(LaunchError::Limits { .. })));
    assert!(matches!(go("k", [1; 3], [65, 1, 1], 0, &good), Some(LaunchError::Limits { .. })));
    assert!(matches!(go("k", [1; 3], [1; 3], 300_000, &good), Some(LaunchError::Limits { .. })));
    let nowhere = [Arg::Output(5), Arg::U32(1)];
    assert!(matches!(go("k", [1; 3], [1; 3], 0, &nowhere), Some(LaunchError::Arguments { .. })));
}

fn permute(a: u32, b: u32, s: u32, form: &str) -> u32 {
    let text = format!(
        ".version 9.0\n.target sm_90\n.visible .entry k(.param .u64 o, .param .u32 a, .param .u32 b, .param .u32 c) {{
        .reg .b32 %r<6>; .reg .b64 %d; ld.param.u64 %d, [o]; ld.param.u32 %r1, [a]; ld.param.u32 %r2, [b];
        ld.param.u32 %r3, [c]; {form}; st.global.u32 [%d], %r4; ret; }}"
    );
    let m = Module::parse(&text).unwrap();
    let mut mem = Memory::new();
    let o = mem.alloc(4).unwrap();
    let args = [Arg::Output(o), Arg::U32(a), Arg::U32(b), Arg::U32(s)];
    let r = launch(&m, "k", [1; 3], [1; 3], 0, &args, &mut mem, &Options::default()).unwrap();
    assert!(r.clean());
    common::read32(&mem, o)[0]
}

proptest! {
    #[test]
    fn prmt_of_the_identity_and_its_reverse(a: u32, b: u32) {
        prop_assert_eq!(permute(a, b, 0x3210, "prmt.b32 %r4, %r1, %r2, %r3"), a);
        prop_assert_eq!(permute(a, b, 0x7654, "prmt.b32 %r4, %r1, %r2, %r3"), b);
        prop_assert_eq!(permute(a, b, 0x0123, "prmt.b32 %r4, %r1, %r2, %r3"), a.swap_bytes());
    }

    /// A field taken out and put back changes nothing.
    #[test]
    fn bfi_undoes_bfe(a: u32, pos in 0u32..40, len in 0u32..40) {
        let s = pos | len << 8;
        let form = "and.b32 %r3, %r3, 0xffff; and.b32 %r2, %r3, 255; shr.u32 %r5, %r3, 8; bfe.u32 %r4, %r1, %r2, %r5; bfi.b32 %r4, %r4, %r1, %r2, %r5";
        prop_assert_eq!(permute(a, 0, s, form), a);
    }

    #[test]
    fn funnel_shifts_are_rotations(a: u32, n: u32) {
        prop_assert_eq!(permute(a, n, 0, "shf.l.wrap.b32 %r4, %r1, %r1, %r2"), a.rotate_left(n % 32));
        prop_assert_eq!(permute(a, n, 0, "shf.r.wrap.b32 %r4, %r1, %r1, %r2"), a.rotate_right(n % 32));
    }

    /// bf16 and back is the identity on bf16 values, and rounding is monotone.
    #[test]
    fn conversion_to_bf16_is_monotone(a in -1e30f32..1e30, b in -1e30f32..1e30) {
        let to = |x: f32| f32::from_bits(permute(x.to_bits(), 0, 0, ".reg .b16 %h; cvt.rn.bf16.f32 %h, %r1; cvt.u32.u16 %r4, %h; shl.b32 %r4, %r4, 16"));
        let (ra, rb) = (to(a), to(b));
        prop_assert_eq!(to(ra).to_bits(), ra.to_bits());
        prop_assert!((a <= b) == (ra <= rb) || ra == rb);
        prop_assert!((ra - a).abs() <= a.abs() / 256.0);
    }

    #[test]
    fn directed_roundings_enclose(a: u32, b: u32) {
        let of = |op: &str| f32::from_bits(permute(a, b, 0, &format!("{op} %r4, %r1, %r2")));
        for op in ["add", "mul", "div"] {
            let (down, near, up) = (of(&format!("{op}.rm.f32")), of(&format!("{op}.rn.f32")), of(&format!("{op}.rp.f32")));
            prop_assert!(near.is_nan() == down.is_nan() && near.is_nan() == up.is_nan());
            if !near.is_nan() {
                prop_assert!(down <= near && near <= up);
                prop_assert!(down == up || down.next_up() == up);
                let zero = of(&format!("{op}.rz.f32"));
                let toward_zero = if near.is_sign_negative() { up } else { down };
                prop_assert!(zero == toward_zero || zero == 0.0);
            }
        }
    }
}
