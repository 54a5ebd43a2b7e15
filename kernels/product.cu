/*---
version = 2
dtypes = ["bf16", "f16"]

[tile]
BM = 128       # rows of a block
BN = 128       # columns of a block
BK = 32        # terms loaded at once
STAGES = 3     # loads under way
WARPS_M = 2    # warps over the rows
WARPS_N = 4    # warps over the columns

[[kernel]]
entry = "product"
stages = ["q_a", "q_raw", "kv_a", "v", "q_latent", "attn_out", "out"]
threads = "32 * WARPS_M * WARPS_N"
grid = ["cdiv(n, BN)", "cdiv(m, BM)", "heads"]
shared = "STAGES * 16 * (BM + BN) * (BK / 8 + 1)"
requires = ["k % 8 == 0", "n % 2 == 0"]

[[kernel]]
entry = "product_transposed"
stages = ["k"]
threads = "32 * WARPS_M * WARPS_N"
grid = ["cdiv(n, BN)", "cdiv(m, BM)", "heads"]
shared = "STAGES * 16 * (BM * (BK / 8 + 1) + BK * (BN / 8 + 1))"
requires = ["k % 8 == 0", "n % 8 == 0"]
note = "the right operand's rows are terms, not columns"

[contract]
activations = "bf16"
accumulate = "mma(16, 25)"
---*/
// Products on tensor cores: c[i][j] = sum over t of a[rows[i]][t] b[j][t], one chain in the order of t, rounded once.
//
// Rows of shared memory are a multiple of 16 bytes and an odd number of them apart, so that ldmatrix meets each bank
// once. Warps whose rows or columns all lie outside skip the arithmetic; what is outside is zero and never stored.
#include "common.cuh"

struct Product {
    const u16* a;                // [.][lda]
    const int* rows;             // [m]: which row of a
    const u16* b;                // [n][ldb]; transposed: [k][ldb]
    u16* c;                      // [m][ldc]
    i64 a_head, b_head, c_head;  // elements from a head's operands and columns to the next one's
    int m, n, k, lda, ldb, ldc;
};

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int MT = BM / WARPS_M / 16, NT = BN / WARPS_N / 16;  // a warp's tiles of 16 rows, of 16 columns
constexpr int A_PITCH = BK * 2 + 16;
static_assert(MT * WARPS_M * 16 == BM && NT * WARPS_N * 16 == BN && BK % 16 == 0 && STAGES >= 2, "tile");

template <bool TRANSPOSED> DEVICE void product_of(const Product& p) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr int B_PITCH = TRANSPOSED ? BN * 2 + 16 : A_PITCH, B_ROWS = TRANSPOSED ? BK : BN;
    constexpr int A_BYTES = BM * A_PITCH, STAGE = A_BYTES + B_ROWS * B_PITCH;
    const int warp = warp_index(), lane = threadIdx.x % 32;
    const int m0 = blockIdx.y * BM, n0 = blockIdx.x * BN, head = blockIdx.z;
    const int warp_m = warp % WARPS_M * (MT * 16), warp_n = warp / WARPS_M * (NT * 16);
    const bool at_work = m0 + warp_m < p.m && n0 + warp_n < p.n;
    const u16* a = p.a + head * p.a_head;
    const u16* b = p.b + head * p.b_head;
    const u32 base = shared_address(memory);
    const int steps = (p.k + BK - 1) / BK;

    // Rows of a that this thread copies: looked up once.
    constexpr int A_PIECES = BK / 8, A_ROWS = BM * A_PIECES / THREADS;
    const u16* mine[A_ROWS];
    UNROLL for (int i = 0; i < A_ROWS; i++) {
        const int row = m0 + (threadIdx.x + i * THREADS) / A_PIECES;
        mine[i] = row < p.m ? a + size_t(p.rows[row]) * p.lda : (const u16*)nullptr;
    }
    auto load_step = [&](int step) {
        const u32 to = base + step % STAGES * STAGE;
        const int k0 = step * BK, left = p.k - k0;
        UNROLL for (int i = 0; i < A_ROWS; i++) {
            const int at = threadIdx.x + i * THREADS, row = at / A_PIECES, col = at % A_PIECES * 8;
            const bool there = mine[i] && col < left;
            copy_async(to + row * A_PITCH + col * 2, there ? mine[i] + k0 + col : a, there);
        }
        constexpr int PIECES = (TRANSPOSED ? BN : BK) / 8;
        static_assert(B_ROWS * PIECES % THREADS == 0, "every thread copies as much");
        UNROLL for (int i = 0; i < B_ROWS * PIECES / THREADS; i++) {
            const int at = threadIdx.x + i * THREADS, row = at / PIECES, col = at % PIECES * 8;
            const bool there = TRANSPOSED ? row < left && n0 + col < p.n : n0 + row < p.n && col < left;
            const u16* from = TRANSPOSED ? b + size_t(k0 + row) * p.ldb + n0 + col : b + size_t(n0 + row) * p.ldb + k0 + col;
            copy_async(to + A_BYTES + row * B_PITCH + col * 2, there ? from : b, there);
        }
    };

    float sum[MT][2 * NT][4];
    UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int n = 0; n < 2 * NT; n++) UNROLL for (int e = 0; e < 4; e++) sum[m][n][e] = 0.f;

    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) load_step(step);
        commit();
    }
    for (int step = 0; step < steps; step++) {
        wait<STAGES - 2>();
        __syncthreads();  // the step is there, and nobody reads the slot that is loaded next
        if (step + STAGES - 1 < steps) load_step(step + STAGES - 1);
        commit();
        if (!at_work) continue;
        const u32 a0 = base + step % STAGES * STAGE + (warp_m + lane % 16) * A_PITCH + lane / 16 * 16;
        const u32 b_base = base + step % STAGES * STAGE + A_BYTES;
        const u32 b0 = TRANSPOSED ? b_base + lane % 16 * B_PITCH + warp_n * 2 + lane / 16 * 16
                                  : b_base + (warp_n + lane % 8 + lane / 16 * 8) * B_PITCH + lane / 8 % 2 * 16;
        UNROLL for (int k = 0; k < BK / 16; k++) {
            u32 left[MT][4];
            UNROLL for (int m = 0; m < MT; m++) load_matrices(a0 + m * 16 * A_PITCH + k * 32, left[m]);
            UNROLL for (int n = 0; n < NT; n++) {
                u32 right[4];
                if (TRANSPOSED) load_transposed(b0 + k * 16 * B_PITCH + n * 32, right);
                else load_matrices(b0 + n * 16 * B_PITCH + k * 32, right);
                UNROLL for (int m = 0; m < MT; m++) {
                    multiply(sum[m][2 * n], left[m], right[0], right[1]);
                    multiply(sum[m][2 * n + 1], left[m], right[2], right[3]);
                }
            }
        }
    }

    u16* c = p.c + head * p.c_head;
    UNROLL for (int m = 0; m < MT; m++) UNROLL for (int e = 0; e < 2; e++) {
        const int row = m0 + warp_m + m * 16 + lane / 4 + e * 8;
        UNROLL for (int n = 0; n < 2 * NT; n++) {
            const int col = n0 + warp_n + n * 8 + lane % 4 * 2;
            if (row < p.m && col < p.n)
                *(u32*)(c + size_t(row) * p.ldc + col) = pack(sum[m][n][2 * e], sum[m][n][2 * e + 1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) product(const __grid_constant__ Product p) { product_of<false>(p); }

extern "C" __global__ void __launch_bounds__(THREADS) product_transposed(const __grid_constant__ Product p) {
    product_of<true>(p);
}
