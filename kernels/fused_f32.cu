/*---
version = 2
dtypes = ["f32"]
geometry = ["NOPE", "ROPE", "VALUE"]

[tile]
BN = 32       # keys of a tile
WARPS = 8     # of a block
ROWS = 4      # query rows of a warp

[[kernel]]
entry = "fused"
stages = ["attn_out", "lse"]
rows = "ROWS * WARPS"
threads = "32 * WARPS"
grid = ["items", "heads"]
shared = "4 * BN * (NOPE + ROPE + 4 + VALUE)"
requires = ["(NOPE + ROPE) % 4 == 0", "VALUE % 4 == 0", "NOPE + ROPE <= 256", "VALUE <= 256"]

[[kernel]]
entry = "fused_part"
stages = ["part_o", "part_lse"]
rows = "ROWS * WARPS"
threads = "32 * WARPS"
grid = ["items", "heads"]
shared = "4 * BN * (NOPE + ROPE + 4 + VALUE)"
requires = ["(NOPE + ROPE) % 4 == 0", "VALUE % 4 == 0", "NOPE + ROPE <= 256", "VALUE <= 256"]

[contract]
activations = "f32"
accumulate = "rn(1)"
softmax = { tile = "BN", p = "none", row_sum = "unrounded", factor = "log2e" }
---*/
// Attention over keys and values of each head, in float32 without tensor cores: a block has one head of up to 32 query rows of one
// request, a warp four of them. Tiles of keys and values lie in shared memory, rows of keys an odd number of 16 bytes apart.
#include "attention_f32.cuh"

constexpr int THREADS = 32 * WARPS, DK = NOPE + ROPE, PITCH = DK + 4;

// Copies rows of COLS elements of a tile, without waiting; keys that nobody sees become zeros.
template <int COLS> DEVICE void load_tile(float* to, int pitch, const float* from, i64 stride, int keys) {
    for (int at = threadIdx.x; at < BN * (COLS / 4); at += THREADS) {
        const int row = at / (COLS / 4), col = at % (COLS / 4) * 4;
        copy_async(shared_address(to + row * pitch + col), from + (row < keys ? row * stride + col : 0), row < keys);
    }
}

DEVICE void attend(const Fused& p) {
    extern __shared__ __align__(128) float memory[];
    float* values = memory + BN * PITCH;
    const int lane = threadIdx.x % 32, row0 = warp_index() * ROWS, head = blockIdx.y;
    const Work w = p.work[blockIdx.x];
    const int token0 = w.row - w.first, last = seen(w, token0 + w.rows - 1);
    const float* keys = p.k + (w.keys + w.begin) * p.k_token + i64(head) * p.k_head;
    const float* from = p.v + (w.keys + w.begin) * p.v_token + i64(head) * p.v_head;
    const float* q[ROWS];
    int all[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        const int row = row0 + r < w.rows ? row0 + r : 0;
        q[r] = p.q + (w.row + row) * p.q_token + i64(head) * p.q_head;
        all[r] = row0 + r < w.rows ? seen(w, token0 + row) : 0;
    }
    Rows<VALUE> rows;
    rows.start();
    for (int key0 = 0; key0 < last; key0 += BN) {
        __syncthreads();  // nobody reads the tile before
        load_tile<DK>(memory, PITCH, keys + key0 * p.k_token, p.k_token, last - key0);
        load_tile<VALUE>(values, VALUE, from + key0 * p.v_token, p.v_token, last - key0);
        commit();
        wait<0>();
        __syncthreads();
        if (row0 >= w.rows) continue;
        rows.score<DK>(q, memory + lane * PITCH);
        int sees[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) sees[r] = all[r] - key0;
        rows.tile(sees, values, VALUE, p.c2);
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        const i64 at = w.out + row0 + r;
        if (row0 + r >= w.rows) continue;
        rows.finish(r, (float*)p.o + at * p.o_token + i64(head) * p.o_head, p.lse + at * p.heads + head, p.c2);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fused(const __grid_constant__ Fused p) { attend(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) fused_part(const __grid_constant__ Fused p) { attend(p); }
