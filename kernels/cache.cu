/*---
version = 2
dtypes = ["bf16", "f16", "f32"]

[tile]
THREADS = 128

[[kernel]]
entry = "cache_write"
stages = ["cache"]
threads = "THREADS"
grid = ["rows"]
note = "writes the slots of new tokens and no other"

[[kernel]]
entry = "key_rope"
stages = ["k"]
threads = "THREADS"
grid = ["rows"]
note = "the rope columns of each key; the others come from a product"
---*/
// The latent cache: rows of (kv_c_normed, k_pe), written by slot, and the rope part of keys read from it.
#include "common.cuh"

struct CacheWrite {
    const element* latent;  // [token][latent_cols]
    const element* rope;    // [token][rope_cols]
    const int* tokens;      // [rows]: which token
    const int* slots;       // [rows]: where it goes; requests may share tokens, each with slots of its own
    element* cache;         // [slot][latent_cols + rope_cols]
    int latent_cols, rope_cols;
};

extern "C" __global__ void __launch_bounds__(THREADS) cache_write(const __grid_constant__ CacheWrite p) {
    const size_t row = p.tokens[blockIdx.x];
    element* to = p.cache + size_t(p.slots[blockIdx.x]) * (p.latent_cols + p.rope_cols);
    for (int i = threadIdx.x; i < p.latent_cols; i += THREADS) to[i] = p.latent[row * p.latent_cols + i];
    for (int i = threadIdx.x; i < p.rope_cols; i += THREADS) to[p.latent_cols + i] = p.rope[row * p.rope_cols + i];
}

struct KeyRope {
    const element* cache;  // [slot][latent_cols + rope_cols]
    const int* slots;      // [rows]: where each key lies
    element* k;            // [rows][heads][nope + rope_cols]
    int heads, nope, latent_cols, rope_cols;
};

extern "C" __global__ void __launch_bounds__(THREADS) key_rope(const __grid_constant__ KeyRope p) {
    const size_t row = blockIdx.x;
    const element* from = p.cache + size_t(p.slots[row]) * (p.latent_cols + p.rope_cols) + p.latent_cols;
    const int width = p.nope + p.rope_cols;
    element* to = p.k + row * p.heads * width + p.nope;
    for (int i = threadIdx.x; i < p.heads * p.rope_cols; i += THREADS)
        to[size_t(i / p.rope_cols) * width + i % p.rope_cols] = from[i % p.rope_cols];
}
