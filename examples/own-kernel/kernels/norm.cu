/*---
version = 2
dtypes = ["bf16", "f16"]

[tile]
THREADS = 128

[[kernel]]
entry = "rms_norm"
stages = ["attn_in", "q_a_normed", "kv_c_normed"]
threads = "THREADS"
grid = ["rows"]
requires = ["HIDDEN % 8 == 0", "Q_RANK % 8 == 0", "LATENT % 8 == 0", "ROPE % 8 == 0"]
note = "rows are read 16 bytes at a time"
---*/
// An author's own RMSNorm: 16-byte loads, an approximate reciprocal root, one pass to sum and one to write.
#include "common.cuh"

struct Norm {
    const u16* x;        // [rows][ldx]
    const float* gamma;  // [cols]
    u16* y;              // [rows][ldy]
    int cols, ldx, ldy;
    float eps;
};

DEVICE float2 both(u32 pair) { return make_float2(widen(u16(pair)), widen(u16(pair >> 16))); }

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const __grid_constant__ Norm p) {
    constexpr int WARPS = THREADS / 32;
    __shared__ float partial[WARPS];
    const uint4* x = (const uint4*)(p.x + size_t(blockIdx.x) * p.ldx);
    uint4* y = (uint4*)(p.y + size_t(blockIdx.x) * p.ldy);

    float sum = 0.f;
    for (int i = threadIdx.x; i < p.cols / 8; i += THREADS) {
        const uint4 v = x[i];
        const u32 pairs[4] = {v.x, v.y, v.z, v.w};
        UNROLL for (int j = 0; j < 4; j++) {
            const float2 f = both(pairs[j]);
            sum = fmaf(f.x, f.x, fmaf(f.y, f.y, sum));
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.f;
    UNROLL for (int w = 0; w < WARPS; w++) sum += partial[w];

    const float scale = rsqrtf(sum / float(p.cols) + p.eps);
    for (int i = threadIdx.x; i < p.cols / 8; i += THREADS) {
        const uint4 v = x[i];
        const u32 pairs[4] = {v.x, v.y, v.z, v.w};
        u32 out[4];
        UNROLL for (int j = 0; j < 4; j++) {
            const float2 f = both(pairs[j]);
            const float* g = p.gamma + 8 * i + 2 * j;
            out[j] = pack(f.x * scale * g[0], f.y * scale * g[1]);
        }
        y[i] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}
