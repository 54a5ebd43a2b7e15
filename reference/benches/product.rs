//! Float64 products from stored weights, in the shapes of a GLM-5 layer. "items" are floating-point operations:
//! Gitem/s = GFLOP/s. `product_numpy.py` times numpy in the same shapes.
//!
//! `cargo bench --bench product`, or a part: `-- q4_k`, `-- glm5_layer`. `RAYON_NUM_THREADS` sets the threads.
//! Far below 10 GFLOP/s a core means that a loop has lost its instruction set (see `product/kernel.rs`).

use divan::{Bencher, counter::ItemsCount};
use mla_reference::ggml::GgmlType;
use mla_reference::product::{Blocks, product, product_with_norms};

fn main() {
    divan::main();
}

const TOKENS: [usize; 4] = [1, 8, 65, 256];

/// Numbers from a counter.
fn draw(seed: u64) -> impl FnMut() -> u64 {
    let mut s = seed | 1;
    move || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        s
    }
}

/// Uniform in [-1, 1).
fn reals(n: usize) -> Vec<f64> {
    let mut next = draw(1);
    (0..n).map(|_| (next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0).collect()
}

/// Any bytes; the f16 in front (Q4_K: two) gets a moderate exponent.
fn blocks(ty: GgmlType, elements: usize) -> Vec<u8> {
    let mut next = draw(2);
    let n = elements / ty.block_elements() * ty.block_bytes();
    let mut bytes: Vec<u8> = (0..n).map(|_| (next() >> 32) as u8).collect();
    for block in bytes.chunks_mut(ty.block_bytes()) {
        block[1] = 0x28;
        if ty == GgmlType::Q4_K {
            block[3] = 0x28;
        }
    }
    bytes
}

fn bench(bencher: Bencher, k: usize, m: usize, tokens: usize, norms: bool) {
    let (x, bytes) = (reals(tokens * k), blocks(GgmlType::Q4_K, m * k));
    let w = Blocks::new(GgmlType::Q4_K, &bytes, k).unwrap();
    let (mut c, mut sumsq) = (vec![0.0; tokens * m], vec![0.0; m * k.div_ceil(128)]);
    bencher.counter(ItemsCount::new(2 * tokens * k * m)).bench_local(|| match norms {
        true => product_with_norms(&x, tokens, &w, &mut c, &mut sumsq),
        false => product(&x, tokens, &w, &mut c),
    });
}

macro_rules! shapes {
    ($($name:ident $k:literal $m:literal;)*) => {
        #[divan::bench_group(sample_count = 10, sample_size = 1)]
        mod q4_k {
            use super::*;
            $(#[divan::bench(args = TOKENS)]
            fn $name(bencher: Bencher, tokens: usize) {
                bench(bencher, $k, $m, tokens, false);
            })*
        }
        #[divan::bench_group(sample_count = 10, sample_size = 1)]
        mod with_norms {
            use super::*;
            $(#[divan::bench(args = TOKENS)]
            fn $name(bencher: Bencher, tokens: usize) {
                bench(bencher, $k, $m, tokens, true);
            })*
        }
    };
}

// Named K x M.
shapes! {
    k6144_m2048 6144 2048;
    k2048_m16384 2048 16384;
    k6144_m576 6144 576;
    k512_m28672 512 28672;
    k16384_m6144 16384 6144;
}

/// (type, K, M, rows of X, times)
type Product = (GgmlType, usize, usize, usize, usize);

fn products(bencher: Bencher, shapes: &[Product]) {
    let flops: usize = shapes.iter().map(|(_, k, m, t, n)| 2 * t * k * m * n).sum();
    let x = reals(shapes.iter().map(|s| s.1 * s.3).max().unwrap());
    let bytes: Vec<Vec<u8>> = shapes.iter().map(|(ty, k, m, _, n)| blocks(*ty, k * m * n)).collect();
    let mut c = vec![0.0; shapes.iter().map(|s| s.2 * s.3).max().unwrap()];
    bencher.counter(ItemsCount::new(flops)).bench_local(|| {
        for ((ty, k, m, t, n), bytes) in shapes.iter().zip(&bytes) {
            for head in bytes.chunks(bytes.len() / n) {
                let w = Blocks::new(*ty, head, *k).unwrap();
                product(&x[..t * k], *t, &w, &mut c[..t * m]);
            }
        }
    });
}

use GgmlType::{Q4_K, Q5_0};

/// All products of one layer for 65 tokens: W_QA, W_QB, W_KVA, then by head W_UK (192 columns: Q5_0) and W_UV, W_O.
#[divan::bench(sample_count = 5, sample_size = 1)]
fn glm5_layer(bencher: Bencher) {
    let shapes = [
        (Q4_K, 6144, 2048, 65, 1),
        (Q4_K, 2048, 64 * 256, 65, 1),
        (Q4_K, 6144, 576, 65, 1),
        (Q5_0, 192, 512, 65, 64),
        (Q4_K, 512, 256, 65, 64),
        (Q4_K, 64 * 256, 6144, 65, 1),
    ];
    products(bencher, &shapes);
}

/// The products of `run --batch 0+64,1024+1` on a GLM-5 layer, both forms and regimes: the list of
/// `benches/layer_vs_numpy.py`, which times numpy's.
#[divan::bench(sample_count = 5, sample_size = 1)]
fn glm5_run(bencher: Bencher) {
    let shapes = [
        (Q4_K, 6144, 2048, 65, 1),
        (Q4_K, 2048, 64 * 256, 65, 1),
        (Q4_K, 6144, 576, 65, 1),
        (Q4_K, 512, 64 * 192, 2114, 1),
        (Q4_K, 512, 64 * 256, 2114, 1),
        (Q5_0, 192, 512, 65, 64),
        (Q4_K, 512, 256, 66, 64),
        (Q4_K, 64 * 256, 6144, 66, 1),
        (Q4_K, 64 * 256, 6144, 66, 1),
    ];
    products(bencher, &shapes);
}
