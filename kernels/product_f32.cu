/*---
version = 2
dtypes = ["f32"]

[tile]
BM = 64    # rows of a block: 8 a warp
BN = 64    # columns of a block
BK = 16    # terms loaded at once

[[kernel]]
entry = "product"
stages = ["q_a", "q_raw", "kv_a", "v", "q_latent", "attn_out", "out"]
threads = "4 * BM"
grid = ["cdiv(n, BN)", "cdiv(m, BM)", "heads"]
shared = "2 * 4 * (BM + BN) * (BK + 4)"
requires = ["k % 4 == 0"]

[[kernel]]
entry = "product_transposed"
stages = ["k"]
threads = "4 * BM"
grid = ["cdiv(n, BN)", "cdiv(m, BM)", "heads"]
shared = "2 * 4 * (BM * (BK + 4) + BK * (BN + 4))"
requires = ["k % 4 == 0", "n % 4 == 0"]
note = "the right operand's rows are terms, not columns"

[contract]
activations = "f32"
accumulate = "rn(1)"
---*/
// Products in float32 without tensor cores: c[i][j] = sum over t of a[rows[i]][t] b[j][t], one chain of fma in the order of t.
//
// A warp has 8 rows, a lane 4 of them and every 16th column. Rows of shared memory are an odd number of 16 bytes apart. Warps
// whose rows all lie outside skip the arithmetic; what is outside is zero and never stored.
#include "common.cuh"

struct Product {
    const float* a;              // [.][lda]
    const int* rows;             // [m]: which row of a
    const float* b;              // [n][ldb]; transposed: [k][ldb]
    float* c;                    // [m][ldc]
    i64 a_head, b_head, c_head;  // elements from a head's operands and columns to the next one's
    int m, n, k, lda, ldb, ldc;
};

constexpr int THREADS = 4 * BM, MT = 4, NT = BN / 16;  // a lane's rows and columns
constexpr int A_PITCH = BK + 4;
static_assert(BM % 8 == 0 && BN % 16 == 0 && BK % 4 == 0, "tile");

template <bool TRANSPOSED> DEVICE void product_of(const Product& p) {
    extern __shared__ __align__(128) float memory[];
    constexpr int B_PITCH = TRANSPOSED ? BN + 4 : A_PITCH, B_ROWS = TRANSPOSED ? BK : BN;
    constexpr int STAGE = BM * A_PITCH + B_ROWS * B_PITCH;
    const int warp = warp_index(), lane = threadIdx.x % 32;
    const int m0 = blockIdx.y * BM, n0 = blockIdx.x * BN, head = blockIdx.z;
    const int row0 = warp * 8 + lane / 16 * MT, col0 = lane % 16;
    const bool at_work = m0 + warp * 8 < p.m;
    const float* a = p.a + head * p.a_head;
    const float* b = p.b + head * p.b_head;
    const int steps = (p.k + BK - 1) / BK;

    auto load = [&](int step) {
        const u32 to = shared_address(memory + step % 2 * STAGE);
        const int k0 = step * BK, left = p.k - k0;
        for (int at = threadIdx.x; at < BM * BK / 4; at += THREADS) {
            const int row = at / (BK / 4), col = at % (BK / 4) * 4;
            const bool there = m0 + row < p.m && col < left;
            const float* from = there ? a + size_t(p.rows[m0 + row]) * p.lda + k0 + col : a;
            copy_async(to + (row * A_PITCH + col) * 4, from, there);
        }
        constexpr int PIECES = (TRANSPOSED ? BN : BK) / 4;
        for (int at = threadIdx.x; at < B_ROWS * PIECES; at += THREADS) {
            const int row = at / PIECES, col = at % PIECES * 4;
            const bool there = TRANSPOSED ? row < left && n0 + col < p.n : n0 + row < p.n && col < left;
            const float* from = TRANSPOSED ? b + size_t(k0 + row) * p.ldb + n0 + col : b + size_t(n0 + row) * p.ldb + k0 + col;
            copy_async(to + (BM * A_PITCH + row * B_PITCH + col) * 4, there ? from : b, there);
        }
    };

    float sum[MT][NT];
    UNROLL for (int m = 0; m < MT; m++) UNROLL for (int n = 0; n < NT; n++) sum[m][n] = 0.f;

    load(0);
    commit();
    for (int step = 0; step < steps; step++) {
        wait<0>();
        __syncthreads();  // the step is there, and nobody reads the slot that is loaded next
        if (step + 1 < steps) load(step + 1);
        commit();
        if (!at_work) continue;
        const float* left = memory + step % 2 * STAGE + row0 * A_PITCH;
        const float* right = memory + step % 2 * STAGE + BM * A_PITCH;
        UNROLL for (int k = 0; k < BK; k += 4) {
            float x[MT][4], y[NT][4];
            UNROLL for (int m = 0; m < MT; m++) *(float4*)x[m] = *(const float4*)(left + m * A_PITCH + k);
            UNROLL for (int n = 0; n < NT; n++) {
                if (TRANSPOSED)
                    UNROLL for (int e = 0; e < 4; e++) y[n][e] = right[(k + e) * B_PITCH + col0 + n * 16];
                else
                    *(float4*)y[n] = *(const float4*)(right + (col0 + n * 16) * B_PITCH + k);
            }
            UNROLL for (int e = 0; e < 4; e++) UNROLL for (int m = 0; m < MT; m++)
                UNROLL for (int n = 0; n < NT; n++) sum[m][n] = fmaf(x[m][e], y[n][e], sum[m][n]);
        }
    }

    float* c = p.c + head * p.c_head;
    UNROLL for (int m = 0; m < MT; m++) UNROLL for (int n = 0; n < NT; n++) {
        const int row = m0 + row0 + m, col = n0 + col0 + n * 16;
        if (row < p.m && col < p.n) c[size_t(row) * p.ldc + col] = sum[m][n];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) product(const __grid_constant__ Product p) { product_of<false>(p); }

extern "C" __global__ void __launch_bounds__(THREADS) product_transposed(const __grid_constant__ Product p) {
    product_of<true>(p);
}
