//! What the machine costs: parsing, scalar code, mma, whole kernels with and without checks. One thread.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/mla.rs"]
mod mla;

use common::*;
use divan::{Bencher, counter::ItemsCount};
use mla_ptx::{Arg, Checks, Memory, Module, Options, launch};

fn main() {
    divan::main();
}

fn options(checks: bool) -> Options {
    let checks = if checks { Checks::all() } else { Checks::none() };
    Options { sequential: true, checks, ..Options::default() }
}

#[divan::bench]
fn parse_eight_kernels() -> Module {
    load("mla_compute_120")
}

/// A loop of `body` in 8 warps; items are thread instructions, or warps' mma.
fn repeat(b: Bencher, checks: bool, body: &str, of_mma: bool) {
    let text = format!(
        ".version 9.0\n.target sm_90\n.visible .entry k(.param .u64 o, .param .u32 n) {{ .reg .pred %p; .reg .b32 %r<30>;
         .reg .b64 %d<4>; ld.param.u64 %d1, [o]; ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x; mov.u32 %r3, 3;
         mov.u32 %r4, 0x3f803f80; mov.u32 %r5, 0x40004000; mov.u32 %r10, 0; mov.u32 %r11, 0; mov.u32 %r12, 0; mov.u32 %r13, 0;
         mad.wide.u32 %d2, %r2, 4, %d1;
         L: {body} sub.u32 %r1, %r1, 1; setp.ne.u32 %p, %r1, 0; @%p bra L; st.global.u32 [%d2], %r2; ret; }}"
    );
    let m = Module::parse(&text).unwrap();
    let mut mem = Memory::new();
    let o = mem.alloc(1024).unwrap();
    let mut go = || {
        let args = [Arg::Output(o), Arg::U32(200)];
        launch(&m, "k", [1; 3], [256, 1, 1], 0, &args, &mut mem, &options(checks)).unwrap().counts
    };
    let c = go();
    let items = if of_mma { c.mma } else { c.thread_instructions };
    b.counter(ItemsCount::new(items)).bench_local(go);
}

#[divan::bench(args = [false, true])]
fn scalar(b: Bencher, checks: bool) {
    let body = "add.u32 %r2, %r2, %r3; xor.b32 %r6, %r2, %r3; mul.lo.u32 %r2, %r6, %r3; add.rn.f32 %r7, %r2, %r4;
        fma.rn.f32 %r8, %r7, %r4, %r2; and.b32 %r2, %r2, 0xffffff; max.f32 %r9, %r8, %r7; selp.b32 %r6, %r2, %r9, %p;"
        .replace("selp.b32 %r6, %r2, %r9, %p;", "shl.b32 %r6, %r9, 2;");
    repeat(b, checks, &body, false);
}

#[divan::bench(args = [false, true])]
fn mma(b: Bencher, checks: bool) {
    let body = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r10,%r11,%r12,%r13}, {%r4,%r5,%r4,%r5}, {%r5,%r4},
        {%r10,%r11,%r12,%r13};"
        .repeat(8);
    repeat(b, checks, &body, true);
}

#[divan::bench(args = [false, true])]
fn decode_16_heads_256_tokens(b: Bencher, checks: bool) {
    whole(b, mla::decode_only(256), checks);
}

#[divan::bench(args = [false, true])]
fn gemm_70_96_160(b: Bencher, checks: bool) {
    whole(b, mla::gemm_ready([70, 96, 160]), checks);
}

#[divan::bench(args = [false, true])]
fn gemm_64_256_512(b: Bencher, checks: bool) {
    whole(b, mla::gemm_ready([64, 256, 512]), checks);
}

fn whole(b: Bencher, mut ready: mla::Ready, checks: bool) {
    let m = load("mla_compute_120");
    b.bench_local(|| ready.go(&m, &options(checks)));
}
