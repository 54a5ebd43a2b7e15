/*---
version = 2
dtypes = ["bf16", "f16", "f32"]

[tile]
THREADS = 256

[[kernel]]
entry = "rope"
stages = ["q", "k_pe"]
threads = "THREADS"
grid = ["rows"]
requires = ["nope % 2 == 0", "rope % 2 == 0"]
---*/
// Rotary position embedding of the last `rope` columns of every head; the others are copied. In float32, rounded once.
// cos and sin come from the host, which computes them in float64.
#include "common.cuh"

struct Rope {
    const element* x;     // [rows][ldx], from column x_at on: heads of nope + rope columns
    const float* cosine;  // [rows][rope / 2]
    const float* sine;
    const float* factor;  // [rows]: all of a row is multiplied by it (1 where the model has no temperature)
    element* y;           // [rows][ldy]
    int heads, nope, rope, ldx, x_at, ldy;
    int adjacent;         // pairs are (2i, 2i + 1); else (i, i + rope / 2)
};

extern "C" __global__ void __launch_bounds__(THREADS) rope(const __grid_constant__ Rope p) {
    const int width = p.nope + p.rope, half = p.rope / 2, pairs = width / 2;
    const size_t row = blockIdx.x;
    const element* x = p.x + row * p.ldx + p.x_at;
    element* y = p.y + row * p.ldy;
    const float factor = p.factor[row];
    for (int i = threadIdx.x; i < p.heads * pairs; i += THREADS) {
        const int base = i / pairs * width, pair = i % pairs, j = pair - p.nope / 2;
        int first = base + 2 * pair, second = first + 1;
        float c = 1.f, s = 0.f;
        if (j >= 0) {
            if (!p.adjacent) {
                first = base + p.nope + j;
                second = first + half;
            }
            c = p.cosine[row * half + j];
            s = p.sine[row * half + j];
        }
        const float a = widen(x[first]), b = widen(x[second]);
        y[first] = narrow((j >= 0 ? a * c - b * s : a) * factor);
        y[second] = narrow((j >= 0 ? a * s + b * c : b) * factor);
    }
}
