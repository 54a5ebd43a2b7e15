/*---
version = 1
dtypes = ["f32"]
geometry = ["NOPE", "ROPE", "LATENT"]

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
requires = ["LATENT % 4 == 0", "ROPE % 4 == 0", "NOPE % 4 == 0"]

[[kernel]]
entry = "absorbed_part"
stages = ["part_o", "part_lse"]
rows = "ROWS * WARPS"
threads = "32 * WARPS"
grid = ["items"]
shared = "4 * BN * (LATENT + ROPE + 4)"
requires = ["LATENT % 4 == 0", "ROPE % 4 == 0", "NOPE % 4 == 0"]

[contract]
activations = "f32"
accumulate = "rn(1)"
softmax = { tile = "BN", p = "none", row_sum = "unrounded", factor = "log2e" }
---*/
// Attention in the latent space, over pages of the cache, in float32 without tensor cores: all heads share the keys, so a row is a
// head of a token, and a tile of the cache in shared memory is key and value at once. A block has up to 32 rows of one
// request, a warp four of them. Rows of the tile are an odd number of 16 bytes apart.
#include "attention_f32.cuh"

struct Absorbed {
    const float* q_latent;  // [token][heads][LATENT]
    const float* q;         // [token][heads][NOPE + ROPE]; the rope columns are read
    const float* cache;     // [page][page_size][LATENT + ROPE]
    const int* pages;       // page tables of all requests; an item's keys begin at its own entry
    const Work* work;       // [items]; rows are heads of tokens
    float* o;               // [token][heads][LATENT]
    float* lse;             // [token][heads]
    int heads, page_size;
    float c2;  // float32 of scale times log2 e
};

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
        const int row = w.row + (row0 + r < w.rows ? row0 + r : 0);
        latent[r] = p.q_latent + size_t(row) * LATENT;
        rope[r] = p.q + size_t(row) * (NOPE + ROPE) + NOPE;
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
            copy_async(shared_address(memory + row * PITCH + col), p.cache + slot * WIDTH + col, there);
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
        const size_t at = w.out + row0 + r;
        if (row0 + r < w.rows) rows.finish(r, p.o + at * LATENT, p.lse + at, p.c2);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) absorbed(const __grid_constant__ Absorbed p) { attend(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) absorbed_part(const __grid_constant__ Absorbed p) { attend(p); }
