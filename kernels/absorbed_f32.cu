/*---
version = 2
dtypes = ["f32"]
geometry = ["ROPE", "LATENT"]

[tile]
BN = 32       # keys of a tile
WARPS = 8     # of a block
ROWS = 4      # query rows of a warp

[[kernel]]
entry = "absorbed"
stages = ["o_latent", "lse"]
rows = "ROWS * WARPS"
threads = "32 * WARPS"
grid = ["items"]
shared = "4 * BN * (LATENT + ROPE + 4)"
requires = ["LATENT % 4 == 0", "ROPE % 4 == 0"]

[[kernel]]
entry = "absorbed_part"
stages = ["part_o", "part_lse"]
rows = "ROWS * WARPS"
threads = "32 * WARPS"
grid = ["items"]
shared = "4 * BN * (LATENT + ROPE + 4)"
requires = ["LATENT % 4 == 0", "ROPE % 4 == 0"]

[contract]
activations = "f32"
accumulate = "rn(1)"
softmax = { tile = "BN", p = "none", row_sum = "unrounded", factor = "log2e" }
---*/
// Attention in the latent space, over pages of the cache, in float32 without tensor cores: all heads share the keys, so a row is a
// head of a token, and a tile of the cache in shared memory is key and value at once. A block has up to 32 rows of one
// request, a warp four of them. Rows of the tile are an odd number of 16 bytes apart.
#include "attention_f32.cuh"

constexpr int THREADS = 32 * WARPS, WIDTH = LATENT + ROPE, PITCH = WIDTH + 4;

DEVICE void attend(const Absorbed& p) {
    extern __shared__ __align__(128) float memory[];
    const int lane = threadIdx.x % 32, row0 = warp_index() * ROWS;
    const Work w = p.work[blockIdx.x];
    const int* pages = p.pages + w.keys;
    const int last = seen(w, (w.row + w.rows - 1 - w.first) / p.heads);
    const float* latent[ROWS];
    const float* rope[ROWS];
    int all[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        const int row = w.row + (row0 + r < w.rows ? row0 + r : 0), token = row / p.heads, head = row % p.heads;
        latent[r] = p.q_latent + token * p.q_latent_token + i64(head) * p.q_latent_head;
        rope[r] = p.q + token * p.q_token + i64(head) * p.q_head + p.rope_at;
        all[r] = row0 + r < w.rows ? seen(w, (row - w.first) / p.heads) : 0;
    }
    constexpr int READERS = THREADS / BN;  // of a row of the cache
    Rows<LATENT> rows;
    rows.start();
    for (int key0 = 0; key0 < last; key0 += BN) {
        __syncthreads();  // nobody reads the tile before
        const int row = threadIdx.x / READERS, position = w.begin + key0 + row;
        const bool there = key0 + row < last;
        const size_t slot = there ? size_t(pages[position / p.page_size]) * p.page_size + position % p.page_size : 0;
        for (int col = threadIdx.x % READERS * 4; col < WIDTH; col += READERS * 4)
            copy_async(shared_address(memory + row * PITCH + col), p.cache + slot * p.cache_row + col, there);
        commit();
        wait<0>();
        __syncthreads();
        if (row0 >= w.rows) continue;
        rows.score<LATENT>(latent, memory + lane * PITCH);
        rows.score<ROPE>(rope, memory + lane * PITCH + LATENT);
        int sees[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) sees[r] = all[r] - key0;
        rows.tile(sees, memory, PITCH, p.c2);
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        const i64 at = w.out + row0 + r;
        if (row0 + r >= w.rows) continue;
        float* to = (float*)p.o + at / p.heads * p.o_token + at % p.heads * p.o_head;
        rows.finish(r, to, p.lse + at, p.c2);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) absorbed(const __grid_constant__ Absorbed p) { attend(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) absorbed_part(const __grid_constant__ Absorbed p) { attend(p); }
