//! Kernels that NVRTC compiled, against float64, for both architectures and both orders of warps.

#![allow(clippy::print_stdout)]

mod common;
#[path = "common/mla.rs"]
mod mla;

use common::*;
use mla::Run;
use mla_ptx::{Options, TensorCore};

const ARCHITECTURES: [&str; 2] = ["mla_compute_90", "mla_compute_120"];

fn each(name: &str, bound: f64, f: impl Fn(&mla_ptx::Module, &Options) -> Run) {
    for arch in ARCHITECTURES {
        let m = load(arch);
        let mut words = Vec::new();
        for reverse_warps in [false, true] {
            let r = f(&m, &Options { reverse_warps, ..Options::default() });
            assert!(r.clean(), "{name} {arch}: {:#?}", r.outcomes);
            println!(
                "{name} {arch} reverse {reverse_warps}: error {:.3e} {:?}",
                r.error, r.outcomes[0].counts
            );
            assert!(r.error <= bound, "{name} {arch}: {:e}", r.error);
            words.push(r.words);
        }
        assert!(words[0] == words[1], "{name} {arch}: the order of warps changes bits");
    }
}

/// Half a step of bf16, which has 8 significant bits: at most 2^-8 of a value.
const BF16: f64 = 1.0 / 256.0;

#[test]
fn decode_and_merge() {
    // Rounding of P to bf16 and of the output, each half a step.
    each("decode", 2.0 * BF16, |m, o| mla::decode(m, 250, o));
}

#[test]
fn prefill() {
    each("prefill", 2.0 * BF16, |m, o| mla::prefill(m, 100, o));
}

#[test]
fn gemm() {
    // 576 products in 36 truncating steps: 36 · 2^-23 of partial sums that are below 4 times the largest value.
    each("gemm", 36.0 * 4.0 / 8_388_608.0, |m, o| mla::gemm(m, [70, 96, 576], o));
}

#[test]
fn rmsnorm() {
    each("rms", BF16 * 1.001, mla::rms);
}

#[test]
fn rope() {
    // The angle is a float32 product: position · 2^-24 twice (frequency and product), 1,048,575 · 2^-23 = 0.125, times
    // the factor 2 of two columns.
    each("rope", 0.25, mla::rope);
}

#[test]
fn dequantise_q4_k() {
    each("q4_k", BF16 * 1.001, mla::q4k);
}

#[test]
fn dequantise_q6_k() {
    each("q6_k", BF16 * 1.001, mla::q6k);
}

/// The accumulator's model shows in the bits: an Ampere core gives other sums than a Hopper one.
#[test]
fn the_tensor_core_matters() {
    let m = load("mla_compute_90");
    let of = |core| mla::gemm(&m, [70, 96, 576], &Options { tensor_core: core, ..Options::default() }).words;
    let hopper = of(None);
    assert_eq!(hopper, of(Some(TensorCore::HOPPER)));
    let same = hopper.iter().zip(of(Some(TensorCore::AMPERE))).filter(|(a, b)| **a == *b).count();
    // 2,029 of 6,720 in a measurement against an H200, whose bits the Hopper model has.
    assert!((1_800..2_300).contains(&same), "{same}");
}
