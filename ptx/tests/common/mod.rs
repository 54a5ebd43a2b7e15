//! Inputs, formats and launches that the tests share.
#![allow(dead_code, clippy::print_stdout)]

use mla_ptx::{Address, Arg, Memory, Module, Options, Outcome, launch};

/// splitmix64 of 1, 2, …
pub fn bits(n: usize, seed: u64) -> Vec<u64> {
    (1..=n as u64)
        .map(|i| {
            let mut z = i.wrapping_add(seed << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ z >> 31
        })
        .collect()
}

/// Uniform in [0, 1).
pub fn uniform(n: usize, seed: u64) -> Vec<f64> {
    bits(n, seed).iter().map(|b| (b >> 40) as f64 / f64::from(1 << 24)).collect()
}

/// Nearly normal: a sum of eight uniforms.
pub fn gauss(n: usize, seed: u64) -> Vec<f64> {
    let parts: Vec<Vec<f64>> = (0..8).map(|i| uniform(n, seed * 16 + i)).collect();
    (0..n).map(|k| parts.iter().map(|p| p[k]).sum::<f64>() * 1.5f64.sqrt() - 4.0 * 1.5f64.sqrt()).collect()
}

/// bf16 bits, by way of float32 as numpy code does it.
pub fn bf16(x: f64) -> u16 {
    let u = (x as f32).to_bits();
    ((u + 0x7fff + (u >> 16 & 1)) >> 16) as u16
}

/// The value of bf16 bits.
pub fn of_bf16(b: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(b) << 16))
}

pub fn raw16(v: &[u16]) -> Vec<u8> {
    v.iter().flat_map(|x| x.to_le_bytes()).collect()
}
pub fn raw32(v: &[u32]) -> Vec<u8> {
    v.iter().flat_map(|x| x.to_le_bytes()).collect()
}
pub fn raw_f32(v: &[f32]) -> Vec<u8> {
    v.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub fn read16(m: &Memory, a: Address) -> Vec<u16> {
    bytes(m, a).chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect()
}
pub fn read32(m: &Memory, a: Address) -> Vec<u32> {
    bytes(m, a).chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
}
pub fn read_f32(m: &Memory, a: Address) -> Vec<f32> {
    read32(m, a).into_iter().map(f32::from_bits).collect()
}
pub fn bytes(m: &Memory, a: Address) -> Vec<u8> {
    let mut out = vec![0; m.size(a).unwrap() as usize];
    m.read(a, &mut out).unwrap();
    out
}

/// A PTX file of `tests/ptx`, but for kernels that the machine does not run.
pub fn load(name: &str) -> Module {
    let path = format!("{}/tests/ptx/{name}.ptx", env!("CARGO_MANIFEST_DIR"));
    Module::parse_partly(&std::fs::read_to_string(&path).unwrap()).unwrap()
}

#[allow(clippy::too_many_arguments)]
/// Runs and insists that it could be launched.
pub fn go(
    module: &Module,
    kernel: &str,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    args: &[Arg],
    memory: &mut Memory,
    options: &Options,
) -> Outcome {
    launch(module, kernel, grid, [threads, 1, 1], shared, args, memory, options).unwrap()
}

/// Largest |got - want| as a share of the largest |want|; NaN counts as infinite.
pub fn error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let most = want.iter().fold(0.0f64, |m, w| m.max(w.abs()));
    got.iter().zip(want).fold(0.0f64, |e, (g, w)| {
        let d = (g - w).abs();
        if d.is_nan() { f64::INFINITY } else { e.max(d / most) }
    })
}

/// softmax(q · kᵀ · scale) · v for one query over rows of keys; `values`: leading columns of a key that are its value.
pub fn attention(q: &[f64], keys: &[&[f64]], values: &[&[f64]], scale: f64) -> (Vec<f64>, f64) {
    let s: Vec<f64> = keys.iter().map(|k| k.iter().zip(q).map(|(a, b)| a * b).sum::<f64>() * scale).collect();
    let m = s.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
    let p: Vec<f64> = s.iter().map(|x| (x - m).exp()).collect();
    let sum: f64 = p.iter().sum();
    let mut out = vec![0.0; values[0].len()];
    for (p, v) in p.iter().zip(values) {
        out.iter_mut().zip(*v).for_each(|(o, v)| *o += p / sum * v);
    }
    (out, m + sum.ln())
}
