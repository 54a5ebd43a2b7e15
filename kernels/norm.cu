/*---
version = 2
dtypes = ["bf16", "f16", "f32"]

[tile]
THREADS = 256

[[kernel]]
entry = "rms_norm"
stages = ["attn_in", "q_a_normed", "kv_c_normed"]
threads = "THREADS"
grid = ["rows"]
---*/
// RMSNorm of the first `cols` columns of each row: y = x / sqrt(mean(x^2) + eps) * gamma, in float32, rounded once.
#include "common.cuh"

struct Norm {
    const element* x;    // [rows][ldx]
    const float* gamma;  // [cols]
    element* y;          // [rows][ldy]
    int cols, ldx, ldy;
    float eps;
};

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const __grid_constant__ Norm p) {
    constexpr int WARPS = THREADS / 32;
    static_assert(WARPS * 32 == THREADS && WARPS <= 32, "whole warps");
    __shared__ float partial[WARPS];
    const element* x = p.x + size_t(blockIdx.x) * p.ldx;
    element* y = p.y + size_t(blockIdx.x) * p.ldy;

    float sum = 0.f;
    for (int i = threadIdx.x; i < p.cols; i += THREADS) {
        const float v = widen(x[i]);
        sum = fmaf(v, v, sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = partial[0];
    for (int w = 1; w < WARPS; w++) sum += partial[w];

    const float scale = __frcp_rn(__fsqrt_rn(__fdiv_rn(sum, float(p.cols)) + p.eps));
    for (int i = threadIdx.x; i < p.cols; i += THREADS) y[i] = narrow(widen(x[i]) * scale * p.gamma[i]);
}
