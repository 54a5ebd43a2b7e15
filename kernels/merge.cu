/*---
version = 2
dtypes = ["bf16", "f16", "f32"]

[tile]
THREADS = 128

[[kernel]]
entry = "merge"
stages = ["o_latent", "attn_out", "lse"]
threads = "THREADS"
grid = ["rows", "heads"]
note = "writes the rows that were computed in splits and no other"
---*/
// Joins the partial results of splits, in float32, first to last; a split that saw no key (lse of -infinity) is not read.
// What is NaN in one of them is NaN in the result.
#include "common.cuh"

struct Merge {
    const float* part_o;    // [split][rows][heads][width], each normalised in itself
    const float* part_lse;  // [split][rows][heads], natural
    const int* to;          // [rows]: row of the output
    element* o;             // [row][heads][width]
    float* lse;             // [row][heads], natural
    int splits, heads, width;
};

extern "C" __global__ void __launch_bounds__(THREADS) merge(const __grid_constant__ Merge p) {
    constexpr float LOG2_E = 1.4426950408889634f;
    const size_t x = size_t(blockIdx.x) * p.heads + blockIdx.y, stride = size_t(gridDim.x) * p.heads;
    const size_t y = size_t(p.to[blockIdx.x]) * p.heads + blockIdx.y;
    float most = minus_infinity();
    for (int s = 0; s < p.splits; s++) most = fmaxf(most, p.part_lse[s * stride + x]);
    float total = 0.f;
    for (int s = 0; s < p.splits; s++) {
        const float lse = p.part_lse[s * stride + x];
        if (lse != minus_infinity()) total += exp2_((lse - most) * LOG2_E);
    }
    const float inverse = total == 0.f ? 0.f : __frcp_rn(total);
    for (int i = threadIdx.x; i < p.width; i += THREADS) {
        float sum = 0.f;
        for (int s = 0; s < p.splits; s++) {
            const float lse = p.part_lse[s * stride + x];
            if (lse != minus_infinity())
                sum = fmaf(exp2_((lse - most) * LOG2_E), p.part_o[(s * stride + x) * p.width + i], sum);
        }
        p.o[y * p.width + i] = narrow(sum * inverse);
    }
    if (threadIdx.x == 0) p.lse[y] = total == 0.f ? minus_infinity() : fmaf(log2_(total), LN_2, most);
}
