//! The same PTX on an NVIDIA H200: what it wrote, recorded by `hw/record.py`, against what the machine writes.

mod common;

use common::load;
use mla_ptx::{Address, Arg, Memory, Options, launch};
use safetensors::SafeTensors;
use serde_json::Value;

/// The recording.
fn file() -> Vec<u8> {
    std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hw/h200.safetensors")).unwrap()
}

/// For each output of a case: what the machine wrote, and what the GPU did.
fn both(bytes: &[u8], case: &str, architecture: u32) -> Vec<(Vec<u8>, Vec<u8>)> {
    let (_, head) = SafeTensors::read_metadata(bytes).unwrap();
    let tensors = SafeTensors::deserialize(bytes).unwrap();
    let about: Value = serde_json::from_str(&head.metadata().as_ref().unwrap()[case]).unwrap();
    let number = |v: &Value| u32::try_from(v.as_u64().unwrap()).unwrap();
    let module = load(&format!("{}_compute_{architecture}", about["module"].as_str().unwrap()));
    let mut memory = Memory::new();
    let (mut args, mut outputs, mut inputs): (Vec<Arg>, Vec<Address>, usize) = Default::default();
    for arg in about["args"].as_array().unwrap() {
        match arg.as_str().unwrap().split_once(' ') {
            Some(("u32", v)) => args.push(Arg::U32(v.parse().unwrap())),
            Some((_, v)) => args.push(Arg::F32(v.parse().unwrap())),
            None if arg == "in" => {
                let tensor = tensors.tensor(&format!("{case}/in{inputs}")).unwrap();
                args.push(Arg::Pointer(memory.alloc_from(tensor.data()).unwrap()));
                inputs += 1;
            }
            None => {
                let size = about["out"][outputs.len()].as_u64().unwrap();
                outputs.push(memory.alloc(size).unwrap());
                args.push(Arg::Output(outputs[outputs.len() - 1]));
            }
        }
    }
    let grid: Vec<u32> = about["grid"].as_array().unwrap().iter().map(number).collect();
    let kernel = about["kernel"].as_str().unwrap();
    let (grid, block) = ([grid[0], grid[1], grid[2]], [number(&about["block"]), 1, 1]);
    let shared = number(&about["shared"]);
    let outcome =
        launch(&module, kernel, grid, block, shared, &args, &mut memory, &Options::default()).unwrap();
    assert!(outcome.findings.is_empty(), "{case}: {:#?}", outcome.findings);
    let ours = outputs.iter().map(|a| common::bytes(&memory, *a));
    ours.enumerate()
        .map(|(i, ours)| (ours, tensors.tensor(&format!("{case}/out{i}")).unwrap().data().to_vec()))
        .collect()
}

const ARCHITECTURES: [u32; 2] = [90, 120];

/// Every bit, whatever the architecture that NVRTC compiled for.
fn same(case: &str, outputs: usize) {
    let bytes = file();
    for architecture in ARCHITECTURES {
        let all = both(&bytes, case, architecture);
        assert_eq!(all.len(), outputs);
        for (i, (ours, gpu)) in all.iter().enumerate() {
            let differ = ours.iter().zip(gpu).filter(|(a, b)| a != b).count();
            assert!(ours.len() == gpu.len() && differ == 0, "{case}/{i}, {architecture}: {differ} bytes");
        }
    }
}

macro_rules! tensor_core {
    ($($name:ident: $case:literal,)*) => { $(#[test] fn $name() { same($case, 1); })* };
}

// 96 tiles of 16 × 8 sums of 16 products and C each.
tensor_core! {
    mma_bf16_normal: "mma bf16 normal",
    mma_bf16_exponents_over_25_binades: "mma bf16 spread",
    mma_bf16_large_terms_that_cancel: "mma bf16 cancel",
    mma_bf16_below_the_normal_numbers: "mma bf16 tiny",
    mma_bf16_any_bits: "mma bf16 raw",
    mma_bf16_overflow: "mma bf16 huge",
    mma_f16_normal: "mma f16 normal",
    mma_f16_any_bits: "mma f16 raw",
    gemm: "gemm_bf16",
    rmsnorm: "rmsnorm",
    dequantise_q4_k: "dequant_q4_k",
    dequantise_q6_k: "dequant_q6_k",
}

/// Outputs that hold exponentials, which hardware only approximates (2^-22 of themselves): float32 values differ by
/// twice that of the largest one at most, bf16 values by a step where that carries them over a tie.
fn near(case: &str, bf16: &[bool]) {
    let bytes = file();
    for architecture in ARCHITECTURES {
        for ((ours, gpu), bf16) in both(&bytes, case, architecture).iter().zip(bf16) {
            if *bf16 {
                let steps = |b: &[u8]| {
                    let v = i32::from(u16::from_le_bytes([b[0], b[1]]));
                    if v & 0x8000 == 0 { v } else { 0x8000 - v }
                };
                let pairs = ours.chunks_exact(2).zip(gpu.chunks_exact(2));
                let off: Vec<i32> = pairs.map(|(a, b)| (steps(a) - steps(b)).abs()).collect();
                assert!(off.iter().all(|d| *d <= 1), "{case}: {:?}", off.iter().max());
                // Values err by 2^-21 of themselves where bf16's ties lie 2^-8 to 2^-9 apart: 2^-12 of them may step over
                // one; a thousandth is four times that.
                assert!(off.iter().filter(|d| **d != 0).count() * 1000 <= off.len().max(1000), "{case}");
            } else {
                let value = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                let largest = gpu.chunks_exact(4).fold(0.0f32, |m, b| m.max(value(b).abs()));
                for (a, b) in ours.chunks_exact(4).zip(gpu.chunks_exact(4)) {
                    let (a, b) = (value(a), value(b));
                    assert!((a - b).abs() <= largest / 2_097_152.0, "{case}: {a:e} {b:e}");
                }
            }
        }
    }
}

#[test]
fn prefill() {
    near("mla_prefill", &[true]);
}

#[test]
fn decode() {
    near("mla_decode", &[false, false]);
}

#[test]
fn merge() {
    near("mla_merge", &[true, false]);
}
