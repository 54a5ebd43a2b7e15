//! Faults put into kernels on purpose: each is found, by the check that should find it. The kernels without them, and a
//! change that is harmless, are silent (also `kernels.rs`).

mod common;
#[path = "common/mla.rs"]
mod mla;

use common::*;
use mla::Run;
use mla_ptx::{Arg, Check, Checks, Memory, Module, Options};

fn run(file: &str, f: impl Fn(&Module, &Options) -> Run) -> Run {
    f(&load(&format!("faults/{file}")), &Options::default())
}

/// Every kind of `wanted` is among the findings, and every finding is one of `wanted` or of `allowed`.
fn found(r: &Run, wanted: &[&str], allowed: &[&str]) {
    let kinds = r.kinds();
    for w in wanted {
        assert!(kinds.contains(w), "{w} is missing among {kinds:?}");
    }
    for k in &kinds {
        assert!(wanted.contains(k) || allowed.contains(k), "{k} was not expected: {:#?}", r.outcomes);
    }
}

/// What a missing barrier shows besides the race that it is: a block's barrier orders the lanes of a warp too, and what
/// comes too late was not written before.
const RACES: [&str; 5] = [
    "race-read-after-write",
    "race-write-after-read",
    "race-write-after-write",
    "warp-hazard",
    "shared-uninitialised",
];

fn decode(m: &Module, o: &Options) -> Run {
    mla::decode(m, 250, o)
}

fn gemm(m: &Module, o: &Options) -> Run {
    mla::gemm(m, [70, 96, 160], o)
}

fn prefill(m: &Module, o: &Options) -> Run {
    mla::prefill(m, 128, o)
}

#[test]
fn unchanged_kernels_are_silent() {
    let (m, o) = (load("mla_compute_120"), Options::default());
    for r in [decode(&m, &o), gemm(&m, &o), prefill(&m, &o), mla::rms(&m, &o)] {
        assert!(r.clean(), "{:#?}", r.outcomes);
    }
}

#[test]
fn decode_barrier_after_wait_removed() {
    let r = run("decode-no-barrier-after-wait", decode);
    found(&r, &["async-in-flight", "race-read-after-write"], &RACES);
}

#[test]
fn decode_wait_removed() {
    found(&run("decode-no-wait", decode), &["async-in-flight"], &["shared-uninitialised"]);
}

#[test]
fn decode_waits_for_one_group_too_few() {
    found(&run("decode-wait-2", decode), &["async-in-flight"], &[]);
}

#[test]
fn decode_barrier_at_loop_end_removed() {
    let r = run("decode-no-barrier-at-end", decode);
    found(&r, &["race-write-after-read"], &[&RACES[..], &["async-in-flight"]].concat());
}

#[test]
fn decode_barrier_before_softmax_removed() {
    let r = run("decode-no-barrier-before-softmax", decode);
    found(&r, &["race-read-after-write"], &RACES);
}

#[test]
fn decode_syncwarp_removed() {
    found(&run("decode-no-syncwarp", decode), &["warp-hazard"], &[]);
}

#[test]
fn decode_pitch_not_of_16_bytes() {
    let allowed =
        ["shared-uninitialised", "async-in-flight", "race-read-after-write", "race-write-after-read"];
    found(&run("decode-pitch-580", decode), &["misaligned"], &allowed);
}

#[test]
fn decode_page_index_off_by_one() {
    found(&run("decode-page-off-by-one", decode), &["global-out-of-bounds"], &["shared-uninitialised"]);
}

#[test]
fn decode_running_sum_not_initialised() {
    found(&run("decode-sum-not-initialised", decode), &["shared-uninitialised"], &[]);
}

#[test]
fn decode_output_rows_too_far() {
    let wanted = ["global-out-of-bounds", "global-block-overlap", "output-unwritten"];
    found(&run("decode-rows-too-far", decode), &wanted, &[]);
}

#[test]
fn decode_half_of_the_output_never_stored() {
    let r = run("decode-half-not-stored", decode);
    found(&r, &["output-unwritten"], &[]);
    assert_eq!(r.outcomes[0].findings[0].count, 32_768);
}

/// Loaded and masked: correct, and nothing is said.
#[test]
fn decode_tokens_past_the_length_are_harmless() {
    // The page table must reach as far as the loads do.
    let m = load("faults/decode-no-length-mask");
    let r = mla::decode(&m, 250, &Options::default());
    found(&r, &[], &[]);
}

#[test]
fn gemm_stage_reused_too_early() {
    found(&run("gemm-stage-too-early", gemm), &["async-in-flight"], &RACES);
}

#[test]
fn gemm_blocks_overlap() {
    found(&run("gemm-blocks-overlap", gemm), &["global-block-overlap"], &["output-unwritten"]);
}

#[test]
fn gemm_rows_not_clamped() {
    found(&run("gemm-rows-not-clamped", gemm), &["global-out-of-bounds"], &["shared-uninitialised"]);
}

#[test]
fn rms_barrier_in_a_divergent_branch() {
    found(&run("rms-barrier-in-branch", mla::rms), &["barrier-divergence"], &["shared-uninitialised"]);
}

#[test]
fn rms_shuffle_in_a_divergent_branch() {
    let r = run("rms-shuffle-in-branch", mla::rms);
    found(&r, &["barrier-divergence"], &[]);
    let f = &r.outcomes[0].findings[0];
    assert!(f.detail.contains("wait apart"), "{f}");
}

#[test]
fn rms_slots_of_absent_warps() {
    found(&run("rms-absent-warps", mla::rms), &["shared-uninitialised"], &[]);
}

#[test]
fn rms_barrier_before_the_read_removed() {
    found(&run("rms-no-barrier-before-read", mla::rms), &["race-read-after-write"], &RACES);
}

#[test]
fn prefill_barrier_before_reuse_removed() {
    let r = run("prefill-no-barrier-before-reuse", prefill);
    found(&r, &["race-write-after-read"], &[&RACES[..], &["async-in-flight"]].concat());
}

/// The founding fault: the merge reads a buffer that nobody wrote.
#[test]
fn merge_of_a_phantom_buffer() {
    let (h, splits) = (16u64, 2u64);
    let mut mem = Memory::new();
    let po = mem.alloc(splits * h * 512 * 4).unwrap();
    let ml = mem.alloc_from(&raw_f32(&vec![1.0; (splits * h * 2) as usize])).unwrap();
    let (out, lse) = (mem.alloc(h * 1024).unwrap(), mem.alloc(h * 4).unwrap());
    let args = [
        Arg::Pointer(po),
        Arg::Pointer(ml),
        Arg::Output(out),
        Arg::Output(lse),
        Arg::U32(h as u32),
        Arg::U32(splits as u32),
    ];
    let m = load("mla_compute_120");
    let o = go(&m, "mla_merge", [h as u32, 1, 1], 128, 0, &args, &mut mem, &Options::default());
    let kinds: Vec<_> = o.findings.iter().map(|f| f.kind.name()).collect();
    assert!(kinds.iter().all(|k| *k == "global-uninitialised"), "{kinds:?}");
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ptx/mla_compute_120.ptx"))
        .unwrap();
    let cu = include_str!("kernels/mla.cu");
    for f in &o.findings {
        assert!(text.lines().nth(f.line as usize - 1).unwrap().contains("ld.global"), "{f}");
        assert!(cu.lines().nth(f.source_line as usize - 1).unwrap().contains("part_o"), "{f}");
    }
}

/// Each check can be turned off, and then its findings are gone.
#[test]
fn checks_can_be_turned_off() {
    let m = load("faults/decode-no-barrier-at-end");
    let without = |c: Checks| decode(&m, &Options { checks: c, ..Options::default() }).kinds();
    let all = without(Checks::all());
    assert!(all.contains(&"race-write-after-read"), "{all:?}");
    let fewer = without(Checks::all().without(Check::Races));
    assert!(!fewer.iter().any(|k| k.starts_with("race") || *k == "warp-hazard"), "{fewer:?}");
    assert!(without(Checks::none()).is_empty());
}
