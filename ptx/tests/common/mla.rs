//! The MLA kernels of `tests/kernels/mla.cu` with inputs, and what float64 says of their outputs.
#![allow(dead_code)]

use super::common::*;
use mla_ptx::{Address, Arg, Memory, Module, Options, Outcome};

/// What a case gave: outcome of each launch, and the largest error against float64.
pub struct Run {
    pub outcomes: Vec<Outcome>,
    pub error: f64,
    /// Raw output words, for comparisons of bits.
    pub words: Vec<u32>,
}

impl Run {
    pub fn clean(&self) -> bool {
        self.outcomes.iter().all(Outcome::clean)
    }
    pub fn kinds(&self) -> Vec<&'static str> {
        let mut k: Vec<_> =
            self.outcomes.iter().flat_map(|o| o.findings.iter().map(|f| f.kind.name())).collect();
        k.sort_unstable();
        k.dedup();
        k
    }
}

const LOG2E: f64 = std::f64::consts::LOG2_E;

pub fn scale_log2() -> f32 {
    (LOG2E / 192f64.sqrt()) as f32
}

pub const DECODE_SHARED: u32 = (16 * 584 + 2 * 32 * 584 + 16 * 40) * 2 + (16 * 36 + 48) * 4;

/// Decode of 16 heads over `len` tokens in two splits, without looking at the result.
pub fn decode_only(len: usize) -> Ready {
    decode_ready(len).0
}

/// Decode of 16 heads over `len` tokens in two splits, and the merge where the module has it.
pub fn decode(m: &Module, len: usize, options: &Options) -> Run {
    let (h, splits) = (HEADS, SPLITS);
    let (mut ready, ml, [q, cache], perm) = decode_ready(len);
    let mut outcomes = vec![ready.go(m, options)];
    let Ready { memory: mut mem, output: po, .. } = ready;
    let mut words = read32(&mem, po);
    words.extend(read32(&mem, ml));
    if m.kernel("mla_merge").is_none() {
        return Run { outcomes, error: 0.0, words };
    }
    let out = mem.alloc((h * 512 * 2) as u64).unwrap();
    let lse = mem.alloc((h * 4) as u64).unwrap();
    let args = [
        Arg::Pointer(po),
        Arg::Pointer(ml),
        Arg::Output(out),
        Arg::Output(lse),
        Arg::U32(h as u32),
        Arg::U32(splits as u32),
    ];
    outcomes.push(go(m, "mla_merge", [h as u32, 1, 1], 128, 0, &args, &mut mem, options));
    let rows: Vec<Vec<f64>> = (0..len)
        .map(|t| {
            let at = (perm[t / 16] as usize * 16 + t % 16) * 576;
            cache[at..at + 576].iter().map(|&b| of_bf16(b)).collect()
        })
        .collect();
    let keys: Vec<&[f64]> = rows.iter().map(|r| &r[..]).collect();
    let values: Vec<&[f64]> = rows.iter().map(|r| &r[..512]).collect();
    let mut want = Vec::new();
    for head in 0..h {
        let q: Vec<f64> = q[head * 576..(head + 1) * 576].iter().map(|&b| of_bf16(b)).collect();
        want.extend(attention(&q, &keys, &values, 1.0 / 192f64.sqrt()).0);
    }
    let got: Vec<f64> = read16(&mem, out).into_iter().map(of_bf16).collect();
    Run { outcomes, error: error(&got, &want), words }
}

const HEADS: usize = 16;
const SPLITS: usize = 2;

/// The launch; the second output; queries and cache; pages.
fn decode_ready(len: usize) -> (Ready, Address, [Vec<u16>; 2], Vec<u32>) {
    let (h, splits) = (HEADS, SPLITS);
    let pages = len.div_ceil(16);
    let perm: Vec<u32> = (0..pages).map(|i| ((i * 7 + 3) % (pages + 3)) as u32).collect();
    let q: Vec<u16> = gauss(h * 576, 1).into_iter().map(bf16).collect();
    let cache: Vec<u16> = gauss((pages + 3) * 16 * 576, 2).into_iter().map(bf16).collect();
    let mut mem = Memory::new();
    let dq = mem.alloc_from(&raw16(&q)).unwrap();
    let dc = mem.alloc_from(&raw16(&cache)).unwrap();
    let dt = mem.alloc_from(&raw32(&perm)).unwrap();
    let dl = mem.alloc_from(&raw32(&[len as u32])).unwrap();
    let po = mem.alloc((splits * h * 512 * 4) as u64).unwrap();
    let ml = mem.alloc((splits * h * 2 * 4) as u64).unwrap();
    let args = [
        Arg::Pointer(dq),
        Arg::Pointer(dc),
        Arg::Pointer(dt),
        Arg::Pointer(dl),
        Arg::Output(po),
        Arg::Output(ml),
        Arg::U32(h as u32),
        Arg::U32(pages as u32),
        Arg::U32(splits as u32),
        Arg::F32(scale_log2()),
    ];
    let grid = [splits as u32, 1, 1];
    let ready = Ready {
        memory: mem,
        output: po,
        kernel: "mla_decode",
        grid,
        shared: DECODE_SHARED,
        args: args.into(),
    };
    (ready, ml, [q, cache], perm)
}

/// Causal prefill of `t` tokens and two heads.
pub fn prefill(m: &Module, t: usize, options: &Options) -> Run {
    let h = 2usize;
    let [q, k]: [Vec<u16>; 2] = [11, 12].map(|s| gauss(t * h * 192, s).into_iter().map(bf16).collect());
    let v: Vec<u16> = gauss(t * h * 128, 13).into_iter().map(bf16).collect();
    let mut mem = Memory::new();
    let [dq, dk, dv] = [&q, &k, &v].map(|x| mem.alloc_from(&raw16(x)).unwrap());
    let out = mem.alloc((t * h * 128 * 2) as u64).unwrap();
    let args = [
        Arg::Pointer(dq),
        Arg::Pointer(dk),
        Arg::Pointer(dv),
        Arg::Output(out),
        Arg::U32(t as u32),
        Arg::U32(h as u32),
        Arg::F32(scale_log2()),
    ];
    let grid = [t.div_ceil(64) as u32, h as u32, 1];
    let shared = (64 * 200 * 2 + 64 * 136) * 2;
    let o = go(m, "mla_prefill", grid, 128, shared, &args, &mut mem, options);
    let f = |x: &[u16], w: usize, tok: usize, head: usize| -> Vec<f64> {
        x[(tok * h + head) * w..(tok * h + head + 1) * w].iter().map(|&b| of_bf16(b)).collect()
    };
    let mut want = vec![0.0; t * h * 128];
    for head in 0..h {
        let keys: Vec<Vec<f64>> = (0..t).map(|s| f(&k, 192, s, head)).collect();
        let values: Vec<Vec<f64>> = (0..t).map(|s| f(&v, 128, s, head)).collect();
        let keys: Vec<&[f64]> = keys.iter().map(|x| &x[..]).collect();
        let values: Vec<&[f64]> = values.iter().map(|x| &x[..]).collect();
        for tok in 0..t {
            let (o, _) =
                attention(&f(&q, 192, tok, head), &keys[..=tok], &values[..=tok], 1.0 / 192f64.sqrt());
            want[(tok * h + head) * 128..(tok * h + head + 1) * 128].copy_from_slice(&o);
        }
    }
    let got: Vec<f64> = read16(&mem, out).into_iter().map(of_bf16).collect();
    Run { outcomes: vec![o], error: error(&got, &want), words: read32(&mem, out) }
}

/// C = A · Wᵀ.
pub fn gemm(m: &Module, shape: [usize; 3], options: &Options) -> Run {
    let [rows, columns, k] = shape;
    let [a, w] = gemm_inputs(shape);
    let mut ready = gemm_ready(shape);
    let o = ready.go(m, options);
    let mut want = Vec::new();
    for r in 0..rows {
        for n in 0..columns {
            want.push((0..k).map(|i| of_bf16(a[r * k + i]) * of_bf16(w[n * k + i])).sum());
        }
    }
    let c = ready.output;
    let got: Vec<f64> = read_f32(&ready.memory, c).into_iter().map(f64::from).collect();
    Run { outcomes: vec![o], error: error(&got, &want), words: read32(&ready.memory, c) }
}

fn gemm_inputs([rows, columns, k]: [usize; 3]) -> [Vec<u16>; 2] {
    [(rows, 51), (columns, 52)].map(|(n, seed)| gauss(n * k, seed).into_iter().map(bf16).collect())
}

/// A launch whose inputs lie in memory.
pub struct Ready {
    pub memory: Memory,
    pub output: Address,
    kernel: &'static str,
    grid: [u32; 3],
    shared: u32,
    args: Vec<Arg>,
}

impl Ready {
    pub fn go(&mut self, m: &Module, options: &Options) -> Outcome {
        go(m, self.kernel, self.grid, 128, self.shared, &self.args, &mut self.memory, options)
    }
}

pub fn gemm_ready(shape: [usize; 3]) -> Ready {
    let [rows, columns, _] = shape;
    let [a, w] = gemm_inputs(shape);
    let mut mem = Memory::new();
    let [da, dw] = [&a, &w].map(|x| mem.alloc_from(&raw16(x)).unwrap());
    let c = mem.alloc((rows * columns * 4) as u64).unwrap();
    let [um, un, uk] = shape.map(|v| Arg::U32(v as u32));
    let args = vec![Arg::Pointer(da), Arg::Pointer(dw), Arg::Output(c), um, un, uk];
    let grid = [columns.div_ceil(64) as u32, rows.div_ceil(64) as u32, 1];
    Ready { memory: mem, output: c, kernel: "gemm_bf16", grid, shared: 0, args }
}

/// RMSNorm of 4 rows of 512.
pub fn rms(m: &Module, options: &Options) -> Run {
    let (t, n) = (4usize, 512usize);
    let x: Vec<u16> = gauss(t * n, 21).into_iter().map(|v| bf16(3.0 * v)).collect();
    let w: Vec<f32> = gauss(n, 22).into_iter().map(|v| v as f32).collect();
    let mut mem = Memory::new();
    let dx = mem.alloc_from(&raw16(&x)).unwrap();
    let dw = mem.alloc_from(&raw_f32(&w)).unwrap();
    let y = mem.alloc((t * n * 2) as u64).unwrap();
    let args = [Arg::Pointer(dx), Arg::Pointer(dw), Arg::Output(y), Arg::U32(n as u32), Arg::F32(1e-6)];
    let o = go(m, "rmsnorm", [t as u32, 1, 1], 128, 0, &args, &mut mem, options);
    let mut want = Vec::new();
    for r in 0..t {
        let row: Vec<f64> = x[r * n..(r + 1) * n].iter().map(|&b| of_bf16(b)).collect();
        let rms = (row.iter().map(|v| v * v).sum::<f64>() / n as f64 + 1e-6).sqrt();
        want.extend(row.iter().zip(&w).map(|(v, w)| v / rms * f64::from(*w)));
    }
    let got: Vec<f64> = read16(&mem, y).into_iter().map(of_bf16).collect();
    Run { outcomes: vec![o], error: error(&got, &want), words: read32(&mem, y) }
}

/// Rotation of 8 tokens, 2 heads, 64 columns; the slow path of sincosf included.
pub fn rope(m: &Module, options: &Options) -> Run {
    let pos: [u32; 8] = [0, 1, 7, 4095, 131_071, 163_839, 200_000, 1_048_575];
    let x: Vec<f32> = gauss(8 * 2 * 64, 31).into_iter().map(|v| v as f32).collect();
    let mut mem = Memory::new();
    let dx = mem.alloc_from(&raw_f32(&x)).unwrap();
    let dp = mem.alloc_from(&raw32(&pos)).unwrap();
    let args = [
        Arg::Pointer(dx),
        Arg::Pointer(dp),
        Arg::U32(2),
        Arg::U32(64),
        Arg::U32(64),
        Arg::F32(10000.0),
        Arg::U32(0),
    ];
    let o = go(m, "rope", [8, 2, 1], 32, 0, &args, &mut mem, options);
    let mut want: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    for (t, &position) in pos.iter().enumerate() {
        for h in 0..2 {
            for i in 0..32 {
                let angle = f64::from(position) * 10000f64.powf(-2.0 * i as f64 / 64.0);
                let at = (t * 2 + h) * 64 + 2 * i;
                let (a, b) = (f64::from(x[at]), f64::from(x[at + 1]));
                want[at] = a * angle.cos() - b * angle.sin();
                want[at + 1] = a * angle.sin() + b * angle.cos();
            }
        }
    }
    let got: Vec<f64> = read_f32(&mem, dx).into_iter().map(f64::from).collect();
    Run { outcomes: vec![o], error: error(&got, &want), words: read32(&mem, dx) }
}

fn scaled_halves(bytes: &mut [u8], n: usize, stride: usize, at: usize, count: usize, seed: u64) {
    let u = uniform(n * count, seed);
    for b in 0..n {
        for c in 0..count {
            // f16 bits of a value in [0, 0.1): exponent and fraction by hand, rounding toward zero.
            let v = (u[b * count + c] * 0.1) as f32;
            let bits = v.to_bits();
            let e = (bits >> 23) as i32 - 127 + 15;
            let h = if e <= 0 { 0 } else { (e as u32) << 10 | bits >> 13 & 0x3ff };
            bytes[b * stride + at + 2 * c..b * stride + at + 2 * c + 2]
                .copy_from_slice(&(h as u16).to_le_bytes());
        }
    }
}

fn half(b: &[u8]) -> f64 {
    let h = u16::from_le_bytes([b[0], b[1]]);
    let (e, f) = (i32::from(h >> 10 & 31), f64::from(h & 0x3ff));
    if e == 0 { f * 2f64.powi(-24) } else { (1.0 + f / 1024.0) * 2f64.powi(e - 15) }
}

/// Q4_K blocks.
pub fn q4k(m: &Module, options: &Options) -> Run {
    let n = 64usize;
    let mut src: Vec<u8> = bits(n * 144, 41).into_iter().map(|b| b as u8).collect();
    scaled_halves(&mut src, n, 144, 0, 2, 42);
    let mut mem = Memory::new();
    let (ds, y) = (mem.alloc_from(&src).unwrap(), mem.alloc((n * 512) as u64).unwrap());
    let o = go(
        m,
        "dequant_q4_k",
        [n as u32, 1, 1],
        32,
        0,
        &[Arg::Pointer(ds), Arg::Output(y)],
        &mut mem,
        options,
    );
    let mut want = Vec::new();
    for b in src.chunks(144) {
        let (d, min, sc, qs) = (half(b), half(&b[2..]), &b[4..16], &b[16..]);
        for j in 0..8 {
            let (s, mn) = if j < 4 {
                (sc[j] & 63, sc[j + 4] & 63)
            } else {
                (sc[j + 4] & 15 | sc[j - 4] >> 6 << 4, sc[j + 4] >> 4 | sc[j] >> 6 << 4)
            };
            for l in 0..32 {
                let v = qs[32 * (j / 2) + l];
                let v = if j & 1 == 1 { v >> 4 } else { v & 15 };
                want.push(d * f64::from(s) * f64::from(v) - min * f64::from(mn));
            }
        }
    }
    let got: Vec<f64> = read16(&mem, y).into_iter().map(of_bf16).collect();
    Run { outcomes: vec![o], error: error(&got, &want), words: read32(&mem, y) }
}

/// Q6_K blocks.
pub fn q6k(m: &Module, options: &Options) -> Run {
    let n = 64usize;
    let mut src: Vec<u8> = bits(n * 210, 43).into_iter().map(|b| b as u8).collect();
    scaled_halves(&mut src, n, 210, 208, 1, 44);
    let mut mem = Memory::new();
    let (ds, y) = (mem.alloc_from(&src).unwrap(), mem.alloc((n * 512) as u64).unwrap());
    let o = go(
        m,
        "dequant_q6_k",
        [n as u32, 1, 1],
        64,
        0,
        &[Arg::Pointer(ds), Arg::Output(y)],
        &mut mem,
        options,
    );
    let mut want = Vec::new();
    for b in src.chunks(210) {
        let (ql, qh, sc, d) = (&b[..128], &b[128..192], &b[192..208], half(&b[208..]));
        for e in 0..256 {
            let (h, r) = (e >> 7, e & 127);
            let (l, k) = (r & 31, r >> 5);
            let lo = ql[64 * h + l + 32 * (k & 1)];
            let lo = if k & 2 != 0 { lo >> 4 } else { lo & 15 };
            let hi = qh[32 * h + l] >> (2 * k) & 3;
            let q = f64::from(lo | hi << 4) - 32.0;
            want.push(d * f64::from(sc[8 * h + 2 * k + (l >> 4)] as i8) * q);
        }
    }
    let got: Vec<f64> = read16(&mem, y).into_iter().map(of_bf16).collect();
    Run { outcomes: vec![o], error: error(&got, &want), words: read32(&mem, y) }
}
