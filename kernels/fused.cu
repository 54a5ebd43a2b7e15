/*---
version = 1
dtypes = ["bf16", "f16"]
geometry = ["NOPE", "ROPE", "VALUE"]

[tile]
BN = 32       # keys of a tile
WARPS = 8     # each has 16 query rows

[[kernel]]
entry = "fused"
stages = ["attn_out", "lse"]
rows = "16 * WARPS"
threads = "32 * WARPS"
grid = ["items", "heads"]
shared = "2 * BN * ((NOPE + ROPE) * 2 + 16 + VALUE * 2 + 16)"
requires = ["(NOPE + ROPE) % 16 == 0", "VALUE % 16 == 0", "NOPE + ROPE <= 256", "VALUE <= 256"]

[[kernel]]
entry = "fused_part"
stages = ["part_o", "part_lse"]
rows = "16 * WARPS"
threads = "32 * WARPS"
grid = ["items", "heads"]
shared = "2 * BN * ((NOPE + ROPE) * 2 + 16 + VALUE * 2 + 16)"
requires = ["(NOPE + ROPE) % 16 == 0", "VALUE % 16 == 0", "NOPE + ROPE <= 256", "VALUE <= 256"]

[contract]
activations = "bf16"
accumulate = "mma(16, 25)"
softmax = { tile = "BN", p = "bf16", row_sum = "unrounded", factor = "log2e" }
---*/
// Attention over keys and values of each head, as prefill computes it: a block has one head of up to 128 query rows of one
// request, a warp 16 of them, with q in registers. While a tile of keys and values is worked on, the next is loaded.
//
// Rows of shared memory are an odd number of 16 bytes apart, so that ldmatrix meets each bank once. P goes from the
// accumulators of q k to the operands of P v without leaving the registers. Warps skip tiles that none of their rows sees.
#include "attention.cuh"

struct Fused {
    const u16* q;      // [row][heads][NOPE + ROPE]
    const u16* k;      // [key][heads][NOPE + ROPE]
    const u16* v;      // [key][heads][VALUE]
    const Work* work;  // [items]
    void* o;           // [row][heads][VALUE]
    float* lse;        // [row][heads]
    int heads;
    float c2;  // float32 of scale times log2 e
};

constexpr int THREADS = 32 * WARPS, DK = NOPE + ROPE;
constexpr int K_PITCH = DK * 2 + 16, V_PITCH = VALUE * 2 + 16, TILE = BN * (K_PITCH + V_PITCH);
static_assert(BN % 16 == 0 && DK % 16 == 0 && VALUE % 16 == 0, "whole tiles of the tensor core");

// Copies rows of COLS elements of a tile, without waiting; keys that nobody sees become zeros.
template <int COLS> DEVICE void load_tile(u32 to, const u16* from, size_t stride, int keys) {
    constexpr int PIECES = COLS / 8, ALL_PIECES = BN * PIECES;
    UNROLL for (int i = 0; i < (ALL_PIECES + THREADS - 1) / THREADS; i++) {
        const int at = threadIdx.x + i * THREADS, row = at / PIECES, col = at % PIECES * 8;
        if (ALL_PIECES % THREADS && at >= ALL_PIECES) break;
        copy_async(to + row * (COLS * 2 + 16) + col * 2, from + (row < keys ? row * stride + col : 0), row < keys);
    }
}

template <class Out> DEVICE void attend(const Fused& p) {
    extern __shared__ __align__(128) u8 memory[];
    const int warp = warp_index(), lane = threadIdx.x % 32, head = blockIdx.y;
    const int line = lane / 4, pair = lane % 4 * 2;  // of the tensor core's accumulators
    const Work w = p.work[blockIdx.x];
    const int token0 = w.row - w.first, row0 = warp * 16;
    const int last = seen(w, token0 + w.rows - 1), tiles = (last + BN - 1) / BN;
    const int warp_rows = min(w.rows - row0, 16);
    const int warp_first = seen(w, token0 + row0), warp_last = warp_rows > 0 ? seen(w, token0 + row0 + warp_rows - 1) : 0;
    const u32 base = shared_address(memory);
    const u16* keys = p.k + (size_t(w.keys + w.begin) * p.heads + head) * DK;
    const u16* values = p.v + (size_t(w.keys + w.begin) * p.heads + head) * VALUE;
    auto load = [&](int tile) {
        const u32 to = base + tile % 2 * TILE;
        const size_t at = size_t(tile) * BN * p.heads;
        load_tile<DK>(to, keys + at * DK, size_t(p.heads) * DK, last - tile * BN);
        load_tile<VALUE>(to + BN * K_PITCH, values + at * VALUE, size_t(p.heads) * VALUE, last - tile * BN);
    };

    if (tiles > 0) load(0);
    commit();
    u32 q[DK / 16][4];
    {
        const u16* from = p.q + (size_t(w.row + row0 + line) * p.heads + head) * DK + pair;
        const size_t eight = size_t(8) * p.heads * DK;
        const bool low = line < warp_rows, high = line + 8 < warp_rows;
        UNROLL for (int k = 0; k < DK / 16; k++) {
            q[k][0] = low ? *(const u32*)(from + k * 16) : 0;
            q[k][1] = high ? *(const u32*)(from + eight + k * 16) : 0;
            q[k][2] = low ? *(const u32*)(from + k * 16 + 8) : 0;
            q[k][3] = high ? *(const u32*)(from + eight + k * 16 + 8) : 0;
        }
    }
    float o[VALUE / 8][4], most[2], sum[2];
    UNROLL for (int i = 0; i < VALUE / 8; i++) UNROLL for (int e = 0; e < 4; e++) o[i][e] = 0.f;
    most[0] = most[1] = minus_infinity();
    sum[0] = sum[1] = 0.f;

    for (int tile = 0; tile < tiles; tile++) {
        wait<0>();
        __syncthreads();  // the tile is there, and nobody reads the other one
        if (tile + 1 < tiles) load(tile + 1);
        commit();
        const int key0 = tile * BN;
        if (key0 >= warp_last) continue;
        const u32 k_at = base + tile % 2 * TILE + (lane % 8 + lane / 16 * 8) * K_PITCH + lane / 8 % 2 * 16;
        const u32 v_at = base + tile % 2 * TILE + BN * K_PITCH + lane % 16 * V_PITCH + lane / 16 * 16;

        float s[BN / 8][4];
        UNROLL for (int j = 0; j < BN / 8; j++) UNROLL for (int e = 0; e < 4; e++) s[j][e] = 0.f;
        UNROLL for (int k = 0; k < DK / 16; k++) UNROLL for (int j = 0; j < BN / 16; j++) {
            u32 right[4];
            load_matrices(k_at + j * 16 * K_PITCH + k * 32, right);
            multiply(s[2 * j], q[k], right[0], right[1]);
            multiply(s[2 * j + 1], q[k], right[2], right[3]);
        }
        if (key0 + BN > warp_first) {
            UNROLL for (int e = 0; e < 4; e++) {
                const int sees = seen(w, token0 + row0 + line + e / 2 * 8) - key0;
                UNROLL for (int j = 0; j < BN / 8; j++)
                    if (j * 8 + pair + e % 2 >= sees) s[j][e] = minus_infinity();
            }
        }
        float now[2], factor[2];
        UNROLL for (int r = 0; r < 2; r++) {
            now[r] = most[r];
            UNROLL for (int j = 0; j < BN / 8; j++) now[r] = fmaxf(now[r], fmaxf(s[j][2 * r], s[j][2 * r + 1]));
            now[r] = fmaxf(now[r], __shfl_xor_sync(ALL, now[r], 1));
            now[r] = fmaxf(now[r], __shfl_xor_sync(ALL, now[r], 2));
        }
        if (__any_sync(ALL, now[0] != most[0] || now[1] != most[1])) {  // else the factors are 1
            UNROLL for (int r = 0; r < 2; r++) {
                factor[r] = rescale(most[r], now[r], p.c2);
                most[r] = now[r];
                sum[r] *= factor[r];
            }
            UNROLL for (int i = 0; i < VALUE / 8; i++) UNROLL for (int e = 0; e < 4; e++) o[i][e] *= factor[e / 2];
        }
        UNROLL for (int r = 0; r < 2; r++) {
            const float shift = offset(most[r], p.c2);
            UNROLL for (int j = 0; j < BN / 8; j++) {
                UNROLL for (int e = 2 * r; e < 2 * r + 2; e++) s[j][e] = exp2_(fmaf(s[j][e], p.c2, shift));
                sum[r] += s[j][2 * r] + s[j][2 * r + 1];
            }
        }
        UNROLL for (int k = 0; k < BN / 16; k++) {
            const u32 left[4] = {pack(s[2 * k][0], s[2 * k][1]), pack(s[2 * k][2], s[2 * k][3]),
                                 pack(s[2 * k + 1][0], s[2 * k + 1][1]), pack(s[2 * k + 1][2], s[2 * k + 1][3])};
            UNROLL for (int i = 0; i < VALUE / 16; i++) {
                u32 right[4];
                load_transposed(v_at + k * 16 * V_PITCH + i * 32, right);
                multiply(o[2 * i], left, right[0], right[1]);
                multiply(o[2 * i + 1], left, right[2], right[3]);
            }
        }
    }

    UNROLL for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(ALL, sum[r], 1);
        sum[r] += __shfl_xor_sync(ALL, sum[r], 2);
        if (line + r * 8 >= warp_rows) continue;
        const size_t at = size_t(w.out + row0 + line + r * 8) * p.heads + head;
        const float inverse = reciprocal(sum[r]);
        Out* to = (Out*)p.o + at * VALUE + pair;
        UNROLL for (int i = 0; i < VALUE / 8; i++) store_pair(to + i * 8, o[i][2 * r] * inverse, o[i][2 * r + 1] * inverse);
        if (pair == 0) p.lse[at] = log_sum_exp(most[r], sum[r], p.c2);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fused(const __grid_constant__ Fused p) { attend<u16>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) fused_part(const __grid_constant__ Fused p) { attend<float>(p); }
