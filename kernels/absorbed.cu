/*---
version = 1
dtypes = ["bf16", "f16"]
geometry = ["NOPE", "ROPE", "LATENT"]

[tile]
BN = 32       # keys of a tile

[[kernel]]
entry = "absorbed_16"
stages = ["o_latent", "lse"]
rows = "16"
threads = "256"
grid = ["items"]
shared = "2 * BN * ((LATENT + ROPE) * 2 + 16) + 16 * (2 * (BN + 4) * 4 + BN * 2 + 16 + 8)"
requires = ["(LATENT + ROPE) % 64 == 0", "LATENT % 128 == 0", "ROPE % 16 == 0"]

[[kernel]]
entry = "absorbed_32"
stages = ["o_latent", "lse"]
rows = "32"
threads = "256"
grid = ["items"]
shared = "2 * BN * ((LATENT + ROPE) * 2 + 16) + 32 * (2 * (BN + 4) * 4 + BN * 2 + 16 + 8)"
requires = ["(LATENT + ROPE) % 64 == 0", "LATENT % 128 == 0", "ROPE % 16 == 0"]

[[kernel]]
entry = "absorbed_64"
stages = ["o_latent", "lse"]
rows = "64"
threads = "256"
grid = ["items"]
shared = "2 * BN * ((LATENT + ROPE) * 2 + 16) + 64 * (2 * (BN + 4) * 4 + BN * 2 + 16 + 8)"
requires = ["(LATENT + ROPE) % 64 == 0", "LATENT % 128 == 0", "ROPE % 16 == 0"]

[[kernel]]
entry = "absorbed_part_16"
stages = ["part_o", "part_lse"]
rows = "16"
threads = "256"
grid = ["items"]
shared = "2 * BN * ((LATENT + ROPE) * 2 + 16) + 16 * (2 * (BN + 4) * 4 + BN * 2 + 16 + 8)"
requires = ["(LATENT + ROPE) % 64 == 0", "LATENT % 128 == 0", "ROPE % 16 == 0"]

[[kernel]]
entry = "absorbed_part_32"
stages = ["part_o", "part_lse"]
rows = "32"
threads = "256"
grid = ["items"]
shared = "2 * BN * ((LATENT + ROPE) * 2 + 16) + 32 * (2 * (BN + 4) * 4 + BN * 2 + 16 + 8)"
requires = ["(LATENT + ROPE) % 64 == 0", "LATENT % 128 == 0", "ROPE % 16 == 0"]

[[kernel]]
entry = "absorbed_part_64"
stages = ["part_o", "part_lse"]
rows = "64"
threads = "256"
grid = ["items"]
shared = "2 * BN * ((LATENT + ROPE) * 2 + 16) + 64 * (2 * (BN + 4) * 4 + BN * 2 + 16 + 8)"
requires = ["(LATENT + ROPE) % 64 == 0", "LATENT % 128 == 0", "ROPE % 16 == 0"]

[contract]
activations = "bf16"
accumulate = "mma(16, 25)"
softmax = { tile = "BN", p = "bf16", row_sum = "unrounded", factor = "log2e" }
---*/
// Attention in the latent space, over pages of the cache: all heads share the keys, so a row is a head of a token, and a
// tile of the cache is key and value at once. A block has up to 16, 32 or 64 rows of one request and eight warps:
//
// - scores: a warp has 16 rows, some keys of the tile and half of the terms; q stays in registers, the halves meet in
//   shared memory;
// - softmax: as many threads a row as there are, P to shared memory;
// - output: a warp has all rows and an eighth of the columns, in registers.
//
// While a tile is worked on, the next is loaded. Rows of shared memory are an odd number of 16 bytes apart, so that ldmatrix
// meets each bank once.
#include "attention.cuh"

struct Absorbed {
    const u16* q_latent;  // [token][heads][LATENT]
    const u16* q;         // [token][heads][NOPE + ROPE]; the rope columns are read
    const u16* cache;     // [page][page_size][LATENT + ROPE]
    const int* pages;     // page tables of all requests; an item's keys begin at its own entry
    const Work* work;     // [items]; rows are heads of tokens
    void* o;              // [token][heads][LATENT]
    float* lse;           // [token][heads]
    int heads, page_size;
    float c2;  // float32 of scale times log2 e
};

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int WIDTH = LATENT + ROPE, PITCH = WIDTH * 2 + 16, TILE = BN * PITCH;
constexpr int STEPS = WIDTH / 16, HALF = STEPS / 2;  // of terms, 16 at a time
constexpr int S_PITCH = BN + 4, P_PITCH = BN * 2 + 16;
constexpr int COLUMNS = LATENT / WARPS;  // of a warp
static_assert(BN == 32 && HALF % 2 == 0 && COLUMNS % 16 == 0 && LATENT % 16 == 0, "tile");

template <int ROWS, class Out> DEVICE void attend(const Absorbed& p) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr int MT = ROWS / 16, KEY_GROUPS = 4 / MT, KEYS = BN / KEY_GROUPS;
    constexpr int SHARE = THREADS / ROWS, OWN = BN / SHARE;  // threads of a row in the softmax, and keys of each
    float* scores = (float*)(memory + 2 * TILE);             // [half][row][S_PITCH]
    u8* probabilities = (u8*)(scores + 2 * ROWS * S_PITCH);  // [row][P_PITCH]
    float* factors = (float*)(probabilities + ROWS * P_PITCH);
    float* inverses = factors + ROWS;
    const int warp = warp_index(), lane = threadIdx.x % 32, line = lane / 4, pair = lane % 4 * 2;
    const Work w = p.work[blockIdx.x];
    const int* pages = p.pages + w.keys;
    const u32 base = shared_address(memory);
    const int last = seen(w, (w.row + w.rows - 1 - w.first) / p.heads), tiles = (last + BN - 1) / BN;

    constexpr int READERS = THREADS / BN, PIECES = WIDTH / 8;  // of a row of the cache
    auto load = [&](int tile) {
        const int row = threadIdx.x / READERS, key = tile * BN + row, position = w.begin + key;
        const bool there = key < last;
        const size_t slot = there ? size_t(pages[position / p.page_size]) * p.page_size + position % p.page_size : 0;
        const u16* from = p.cache + slot * WIDTH;
        const u32 to = base + tile % 2 * TILE + row * PITCH;
        UNROLL for (int i = 0; i < PIECES / READERS; i++) {
            const int col = (threadIdx.x % READERS + i * READERS) * 8;
            copy_async(to + col * 2, from + col, there);
        }
    };
    static_assert(PIECES % READERS == 0, "every thread copies as much");

    if (tiles > 0) load(0);
    commit();
    // Scores: which rows, keys and terms this warp has.
    const int group = warp % MT, keys0 = warp / MT % KEY_GROUPS * KEYS, half = warp / 4;
    u32 q[HALF][4];
    {
        const int low = group * 16 + line;
        UNROLL for (int k = 0; k < HALF; k++) UNROLL for (int e = 0; e < 4; e++) {
            const int row = low + e % 2 * 8, col = (half * HALF + k) * 16 + pair + e / 2 * 8;
            const size_t at = w.row + row;
            const u16* from = col < LATENT ? p.q_latent + at * LATENT + col : p.q + at * (NOPE + ROPE) + NOPE + col - LATENT;
            q[k][e] = row < w.rows ? *(const u32*)from : 0;
        }
    }
    // Softmax: which row and keys this thread has.
    const int own_row = threadIdx.x / SHARE, own_key = threadIdx.x % SHARE * OWN;
    const int sees = own_row < w.rows ? seen(w, (w.row + own_row - w.first) / p.heads) : 0;
    float most = minus_infinity(), sum = 0.f;
    float o[MT][COLUMNS / 8][4];
    UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int i = 0; i < COLUMNS / 8; i++) UNROLL for (int e = 0; e < 4; e++) o[m][i][e] = 0.f;

    for (int tile = 0; tile < tiles; tile++) {
        wait<0>();
        __syncthreads();  // the tile is there, and nobody reads the other one
        if (tile + 1 < tiles) load(tile + 1);
        commit();
        const u32 keys = base + tile % 2 * TILE;

        float s[KEYS / 8][4];
        UNROLL for (int j = 0; j < KEYS / 8; j++) UNROLL for (int e = 0; e < 4; e++) s[j][e] = 0.f;
        if (KEYS == 8) {  // one load has 8 keys and 32 terms
            const u32 at = keys + (keys0 + lane % 8) * PITCH + half * HALF * 32 + lane / 8 * 16;
            UNROLL for (int k = 0; k < HALF; k += 2) {
                u32 right[4];
                load_matrices(at + k * 32, right);
                multiply(s[0], q[k], right[0], right[1]);
                multiply(s[0], q[k + 1], right[2], right[3]);
            }
        } else {  // one load has 16 keys and 16 terms
            const u32 at = keys + (keys0 + lane % 8 + lane / 16 * 8) * PITCH + half * HALF * 32 + lane / 8 % 2 * 16;
            UNROLL for (int k = 0; k < HALF; k++) UNROLL for (int j = 0; j < KEYS / 16; j++) {
                u32 right[4];
                load_matrices(at + j * 16 * PITCH + k * 32, right);
                multiply(s[2 * j], q[k], right[0], right[1]);
                multiply(s[2 * j + 1], q[k], right[2], right[3]);
            }
        }
        UNROLL for (int j = 0; j < KEYS / 8; j++) UNROLL for (int r = 0; r < 2; r++)
            store_pair(scores + (half * ROWS + group * 16 + line + r * 8) * S_PITCH + keys0 + j * 8 + pair, s[j][2 * r], s[j][2 * r + 1]);
        __syncthreads();

        float x[OWN], now = most;
        UNROLL for (int j = 0; j < OWN; j++) {
            const float* from = scores + own_row * S_PITCH + own_key + j;
            x[j] = tile * BN + own_key + j < sees ? from[0] + from[ROWS * S_PITCH] : minus_infinity();
            now = fmaxf(now, x[j]);
        }
        UNROLL for (int d = 1; d < SHARE; d *= 2) now = fmaxf(now, __shfl_xor_sync(ALL, now, d));
        const float factor = rescale(most, now, p.c2), shift = offset(now, p.c2);
        const bool moved = now != most;
        most = now;
        sum *= factor;
        UNROLL for (int j = 0; j < OWN; j += 2) {
            x[j] = exp2_(fmaf(x[j], p.c2, shift));
            x[j + 1] = exp2_(fmaf(x[j + 1], p.c2, shift));
            sum += x[j] + x[j + 1];
            *(u32*)(probabilities + own_row * P_PITCH + (own_key + j) * 2) = pack(x[j], x[j + 1]);
        }
        if (threadIdx.x % SHARE == 0) factors[own_row] = factor;

        if (__syncthreads_or(moved)) {  // else all factors are 1
            UNROLL for (int m = 0; m < MT; m++) UNROLL for (int r = 0; r < 2; r++) {
                const float f = factors[m * 16 + line + r * 8];
                UNROLL for (int i = 0; i < COLUMNS / 8; i++) {
                    o[m][i][2 * r] *= f;
                    o[m][i][2 * r + 1] *= f;
                }
            }
        }
        const u32 p_at = shared_address(probabilities) + lane % 16 * P_PITCH + lane / 16 * 16;
        const u32 v_at = keys + lane % 16 * PITCH + (warp * COLUMNS + lane / 16 * 8) * 2;
        UNROLL for (int k = 0; k < BN / 16; k++) {
            u32 left[MT][4];
            UNROLL for (int m = 0; m < MT; m++) load_matrices(p_at + m * 16 * P_PITCH + k * 32, left[m]);
            UNROLL for (int i = 0; i < COLUMNS / 16; i++) {
                u32 right[4];
                load_transposed(v_at + k * 16 * PITCH + i * 32, right);
                UNROLL for (int m = 0; m < MT; m++) {
                    multiply(o[m][2 * i], left[m], right[0], right[1]);
                    multiply(o[m][2 * i + 1], left[m], right[2], right[3]);
                }
            }
        }
    }

    UNROLL for (int d = 1; d < SHARE; d *= 2) sum += __shfl_xor_sync(ALL, sum, d);
    if (threadIdx.x % SHARE == 0) {
        inverses[own_row] = reciprocal(sum);
        if (own_row < w.rows) p.lse[w.out + own_row] = log_sum_exp(most, sum, p.c2);
    }
    __syncthreads();
    UNROLL for (int m = 0; m < MT; m++) UNROLL for (int r = 0; r < 2; r++) {
        const int row = m * 16 + line + r * 8;
        if (row >= w.rows) continue;
        const float inverse = inverses[row];
        Out* to = (Out*)p.o + size_t(w.out + row) * LATENT + warp * COLUMNS + pair;
        UNROLL for (int i = 0; i < COLUMNS / 8; i++)
            store_pair(to + i * 8, o[m][i][2 * r] * inverse, o[m][i][2 * r + 1] * inverse);
    }
}

#define KERNEL(NAME, ROWS, OUT) \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ Absorbed p) { attend<ROWS, OUT>(p); }
KERNEL(absorbed_16, 16, u16)
KERNEL(absorbed_32, 32, u16)
KERNEL(absorbed_64, 64, u16)
KERNEL(absorbed_part_16, 16, float)
KERNEL(absorbed_part_32, 32, float)
KERNEL(absorbed_part_64, 64, float)
