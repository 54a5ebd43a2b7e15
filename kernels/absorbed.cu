/*---
version = 2
dtypes = ["bf16", "f16"]
specific = true
geometry = ["ROPE", "LATENT", "SHARED"]

[tile]
BN = 32       # keys of a tile of the softmax
SLOTS = 5     # of 16 keys in shared memory
SLOTS_64 = 4  # beside 64 rows, which leave no room for more in 99 KiB: where there is more, one more

[[kernel]]
entry = "absorbed_16"
stages = ["o_latent", "lse"]
rows = "16"
threads = "32 * 7"
grid = ["items"]
shared = "SLOTS * 16 * ((LATENT + ROPE) * 2 + 16) + 16 * (4 * BN + 44) + 16 * SLOTS + 72"
requires = ["LATENT % 32 == 0", "ROPE % 16 == 0"]

[[kernel]]
entry = "absorbed_32"
stages = ["o_latent", "lse"]
rows = "32"
threads = "32 * 8"
grid = ["items"]
shared = "SLOTS * 16 * ((LATENT + ROPE) * 2 + 16) + 32 * (4 * BN + 44) + 16 * SLOTS + 72"
requires = ["LATENT % 64 == 0", "ROPE % 16 == 0"]

[[kernel]]
entry = "absorbed_64"
stages = ["o_latent", "lse"]
rows = "64"
threads = "32 * 12"
grid = ["items"]
shared = "(SLOTS_64 + (SHARED > 101376)) * (16 * ((LATENT + ROPE) * 2 + 16) + 16) + 64 * (4 * BN + 44) + 72"
requires = ["LATENT % 128 == 0", "ROPE % 16 == 0"]

[[kernel]]
entry = "absorbed_part_16"
stages = ["part_o", "part_lse"]
rows = "16"
threads = "32 * 7"
grid = ["items"]
shared = "SLOTS * 16 * ((LATENT + ROPE) * 2 + 16) + 16 * (4 * BN + 44) + 16 * SLOTS + 72"
requires = ["LATENT % 32 == 0", "ROPE % 16 == 0"]

[[kernel]]
entry = "absorbed_part_32"
stages = ["part_o", "part_lse"]
rows = "32"
threads = "32 * 8"
grid = ["items"]
shared = "SLOTS * 16 * ((LATENT + ROPE) * 2 + 16) + 32 * (4 * BN + 44) + 16 * SLOTS + 72"
requires = ["LATENT % 64 == 0", "ROPE % 16 == 0"]

[[kernel]]
entry = "absorbed_part_64"
stages = ["part_o", "part_lse"]
rows = "64"
threads = "32 * 12"
grid = ["items"]
shared = "(SLOTS_64 + (SHARED > 101376)) * (16 * ((LATENT + ROPE) * 2 + 16) + 16) + 64 * (4 * BN + 44) + 72"
requires = ["LATENT % 128 == 0", "ROPE % 16 == 0"]

[contract]
activations = "bf16"
accumulate = "mma(16, 25)"
softmax = { tile = "BN", p = "bf16", row_sum = "unrounded", factor = "log2e" }
---*/
// Attention in the latent space, over pages of the cache: all heads share the keys, so a row is a head of a token, and what
// is read of the cache is key and value at once. A block has up to 16, 32 or 64 rows of one request; its warps have roles:
//
// - loading: copies 16 keys at a time into a ring of slots, as soon as a slot is free;
// - scores: a warp has 16 rows, with all of q in registers; it does the softmax too, and leaves P in shared memory;
// - output: a warp has all rows and a share of the columns, in registers.
//
// They meet at mbarriers alone, so that loads, scores and output of different tiles go on at once. A copy of a row is issued
// by one lane after the other (20 to 30 ns each on an H200), so several warps load where there are few rows; with 64 rows
// there are no registers for more warps, and the warps of the output load. Rows of shared memory are an odd number of 16
// bytes apart, so that ldmatrix meets each bank once; a cache whose rows are as far apart is copied 16 rows at once.
#include "attention.cuh"
#include "pipeline.cuh"

constexpr int WIDTH = LATENT + ROPE, STEPS = WIDTH / 16;  // of terms, 16 at a time
constexpr int PITCH = WIDTH * 2 + 16, SLOT = 16 * PITCH, P_PITCH = BN * 2 + 16;
constexpr int PARTS = BN / 16;  // slots of a tile
static_assert(BN % 16 == 0 && LATENT % 16 == 0 && ROPE % 16 == 0, "whole tiles of the tensor core");
// Lanes of a warp that arrive at an mbarrier once the warp has met: one stands for all. With 32, a fifth slower at 64 and 128
// heads, compute-sanitizer sees the order too: it does not follow one from lane to lane and on through one lane's arrival.
constexpr u32 ARRIVALS = 1;

// A warp whose lanes have met arrives.
DEVICE void arrive(u32 at, int lane) {
    if (ARRIVALS == 32 || lane == 0) barrier_arrive(at);
}

// The next slot of a ring of N, and the parity of its phase.
template <int N> DEVICE void advance(int& slot, u32& parity) {
    if (++slot == N) {
        slot = 0;
        parity ^= 1;
    }
}

// LOADERS: warps that only load, none: those of the output do. SCORE_REGISTERS, OUTPUT_REGISTERS: what the roles have once
// they have begun, 0: all the same.
template <int ROWS, int LOADERS, int SCORE_REGISTERS, int OUTPUT_REGISTERS, class Out> DEVICE void attend(const Absorbed& p) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr int MT = ROWS / 16, N = ROWS == 64 ? SLOTS_64 + (SHARED > 101376) : SLOTS, OUTPUTS = 2 * MT, COLUMNS = LATENT / OUTPUTS, NT = COLUMNS / 8;
    static_assert(COLUMNS % 16 == 0, "whole tiles of the tensor core");
    u8* probabilities = memory + N * SLOT;                      // [2][ROWS][P_PITCH]
    float* factors = (float*)(probabilities + 2 * ROWS * P_PITCH);  // [2][ROWS]
    float* inverses = factors + 2 * ROWS;                           // [ROWS]
    int* moved = (int*)(inverses + ROWS);                           // [2][4]: whether any factor of a warp is not 1
    const u32 full = shared_address(moved + 8), empty = full + 8 * N, p_full = empty + 8 * N, p_empty = p_full + 16;
    const u32 summed = p_empty + 16;
    const int warp = warp_index(), lane = threadIdx.x % 32, line = lane / 4, pair = lane % 4 * 2;
    const Work w = p.work[blockIdx.x];
    const int last = seen(w, (w.row + w.rows - 1 - w.first) / p.heads), slots = (last + 15) / 16, tiles = (last + BN - 1) / BN;
    const u32 base = shared_address(memory);

    if (threadIdx.x == 0) {
        for (int i = 0; i < N; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, OUTPUTS * ARRIVALS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(p_full + 8 * i, MT * ARRIVALS);
            barrier_init(p_empty + 8 * i, OUTPUTS * ARRIVALS);
        }
        barrier_init(summed, MT * ARRIVALS);
        barrier_ready();
    }
    __syncthreads();

    const int* pages = p.pages + w.keys;
    const int shift = p.page_size & p.page_size - 1 ? -1 : 31 - __clz(p.page_size);
    // Which row of the cache a key is; beyond the last key the last one's, whose numbers are finite. Pools have fewer than
    // 2^32 rows; elements are counted in 64 bits.
    auto row_of = [&](int key) {
        const int position = w.begin + min(key, last - 1), entry = shift < 0 ? position / p.page_size : position >> shift;
        return u32(pages[entry]) * p.page_size + (position - entry * p.page_size);
    };
    auto copy_row = [&](int slot, int row, u32 from) {
        copy_bulk(base + slot * SLOT + row * PITCH, p.cache + i64(from) * p.cache_row, WIDTH * 2, full + 8 * slot);
    };

    if (warp < MT) {
        if (SCORE_REGISTERS) more_registers<SCORE_REGISTERS ? SCORE_REGISTERS : 8>();
        u32 q[STEPS][4];
        int sees[2];
        UNROLL for (int r = 0; r < 2; r++) {
            const int row = warp * 16 + line + r * 8, at = w.row + row, token = at / p.heads, head = at % p.heads;
            const bool there = row < w.rows;
            sees[r] = there ? seen(w, token - w.first / p.heads) : 0;
            const element* latent = p.q_latent + token * p.q_latent_token + i64(head) * p.q_latent_head + pair;
            const element* rope = p.q + token * p.q_token + i64(head) * p.q_head + p.rope_at + pair;
            UNROLL for (int k = 0; k < STEPS; k++) UNROLL for (int e = 0; e < 2; e++) {
                const int col = k * 16 + e * 8;
                q[k][r + 2 * e] = there ? *(const u32*)(col < LATENT ? latent + col : rope + (col - LATENT)) : 0;
            }
        }
        const int least = __reduce_min_sync(ALL, min(sees[0], sees[1]));
        float most[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.f, 0.f};
        const u32 keys = base + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
        int slot = 0;
        u32 parity = 0;
        for (int tile = 0; tile < tiles; tile++) {
            float s[2 * PARTS][4];
            UNROLL for (int part = 0; part < PARTS; part++) {
                if (part && tile * PARTS + part >= slots) {  // nobody sees these
                    UNROLL for (int e = 0; e < 8; e++) s[2 * part + e / 4][e % 4] = minus_infinity();
                    continue;
                }
                barrier_wait(full + 8 * slot, parity);
                float a[2][2][4];  // two chains of terms, so that no product waits for the one before
                UNROLL for (int e = 0; e < 8; e++) a[0][e / 4][e % 4] = a[1][e / 4][e % 4] = 0.f;
                UNROLL for (int k = 0; k < STEPS; k++) {
                    u32 right[4];
                    load_matrices(keys + slot * SLOT + k * 32, right);
                    multiply(a[k % 2][0], q[k], right[0], right[1]);
                    multiply(a[k % 2][1], q[k], right[2], right[3]);
                }
                UNROLL for (int e = 0; e < 8; e++) s[2 * part + e / 4][e % 4] = a[0][e / 4][e % 4] + a[1][e / 4][e % 4];
                advance<N>(slot, parity);
            }
            if ((tile + 1) * BN > least) {
                UNROLL for (int e = 0; e < 4; e++) {
                    const int left = sees[e / 2] - tile * BN - pair - e % 2;
                    UNROLL for (int j = 0; j < 2 * PARTS; j++) if (j * 8 >= left) s[j][e] = minus_infinity();
                }
            }
            float now[2], factor[2];
            UNROLL for (int r = 0; r < 2; r++) {
                now[r] = most[r];
                UNROLL for (int j = 0; j < 2 * PARTS; j++) now[r] = fmaxf(now[r], fmaxf(s[j][2 * r], s[j][2 * r + 1]));
                now[r] = fmaxf(now[r], __shfl_xor_sync(ALL, now[r], 1));
                now[r] = fmaxf(now[r], __shfl_xor_sync(ALL, now[r], 2));
            }
            const bool any = __any_sync(ALL, now[0] != most[0] || now[1] != most[1]);
            UNROLL for (int r = 0; r < 2; r++) {
                factor[r] = rescale(most[r], now[r], p.c2);
                most[r] = now[r];
                sum[r] *= factor[r];
                const float shift = offset(now[r], p.c2);
                UNROLL for (int j = 0; j < 2 * PARTS; j++) {
                    UNROLL for (int e = 2 * r; e < 2 * r + 2; e++) s[j][e] = exp2_(fmaf(s[j][e], p.c2, shift));
                    sum[r] += s[j][2 * r] + s[j][2 * r + 1];
                }
            }
            const int buffer = tile % 2;
            if (tile >= 2) barrier_wait(p_empty + 8 * buffer, (tile / 2 - 1) % 2);
            UNROLL for (int r = 0; r < 2; r++) {
                const int row = buffer * ROWS + warp * 16 + line + r * 8;
                u8* to = probabilities + row * P_PITCH + pair * 2;
                UNROLL for (int j = 0; j < 2 * PARTS; j++) *(u32*)(to + j * 16) = pack(s[j][2 * r], s[j][2 * r + 1]);
                if (any && pair == 0) factors[row] = factor[r];
            }
            if (lane == 0) moved[buffer * 4 + warp] = any;
            __syncwarp();
            arrive(p_full + 8 * buffer, lane);
        }
        UNROLL for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(ALL, sum[r], 1);
            sum[r] += __shfl_xor_sync(ALL, sum[r], 2);
            const int row = warp * 16 + line + r * 8;
            if (pair == 0) {
                inverses[row] = reciprocal(sum[r]);
                if (row < w.rows) p.lse[w.out + row] = log_sum_exp(most[r], sum[r], p.c2);
            }
        }
        __syncwarp();
        arrive(summed, lane);
    } else if (LOADERS && warp >= MT + OUTPUTS) {
        constexpr int EACH = 16 / (LOADERS ? LOADERS : 1);  // rows of a slot that a warp brings
        const bool together = p.cache_row * 2 == PITCH && p.page_size % 16 == 0 && w.begin % 16 == 0;
        const int first = (warp - MT - OUTPUTS) * EACH, mine = together ? 0 : first + lane % EACH;
        const bool speaks = first == 0 && lane == 0;
        u32 from = slots ? row_of(mine) : 0;
        int slot = 0;
        u32 parity = 1;
        for (int i = 0; i < slots; i++) {
            // Looked up while the slot is not free yet.
            const u32 next = i + 1 < slots ? row_of((i + 1) * 16 + mine) : 0;
            if (i >= N) barrier_wait(empty + 8 * slot, parity);
            if (together && i * 16 + 16 <= last) {
                if (speaks) {
                    barrier_expect(full + 8 * slot, SLOT - 16);
                    copy_bulk(base + slot * SLOT, p.cache + i64(from) * p.cache_row, SLOT - 16, full + 8 * slot);
                }
            } else {
                if (speaks) barrier_expect(full + 8 * slot, 16 * WIDTH * 2);
                __syncwarp();
                if (lane < EACH) copy_row(slot, first + lane, together ? row_of(i * 16 + first + lane) : from);
            }
            from = next;
            advance<N>(slot, parity);
        }
    } else {
        if (OUTPUT_REGISTERS) fewer_registers<OUTPUT_REGISTERS ? OUTPUT_REGISTERS : 8>();
        const int own = warp - MT, column0 = own * COLUMNS;
        constexpr int EACH = 16 / OUTPUTS;  // rows of a slot that a warp brings, where it does
        const int mine = own * EACH + min(lane, EACH - 1);
        auto bring = [&](int slot, u32 from) {
            if (own == 0 && lane == 0) barrier_expect(full + 8 * slot, 16 * WIDTH * 2);
            if (lane < EACH) copy_row(slot, mine, from);
        };
        u32 from = 0;
        int filled = 0;
        u32 emptied = 0;
        if (!LOADERS) {
            for (int i = 0; i < N && i < slots; i++) bring(i, row_of(i * 16 + mine));
            if (N < slots) from = row_of(N * 16 + mine);
        }
        float o[MT][NT][4];
        UNROLL for (int m = 0; m < MT; m++)
            UNROLL for (int i = 0; i < NT; i++) UNROLL for (int e = 0; e < 4; e++) o[m][i][e] = 0.f;
        const u32 values = base + lane % 16 * PITCH + (column0 + lane / 16 * 8) * 2;
        const u32 p_at = shared_address(probabilities) + lane % 16 * P_PITCH + lane / 16 * 16;
        int slot = 0;
        u32 parity = 0;
        for (int tile = 0; tile < tiles; tile++) {
            const int buffer = tile % 2;
            barrier_wait(full + 8 * slot, parity);
            barrier_wait(p_full + 8 * buffer, tile / 2 % 2);
            UNROLL for (int m = 0; m < MT; m++) {
                if (!moved[buffer * 4 + m]) continue;
                UNROLL for (int r = 0; r < 2; r++) {
                    const float f = factors[buffer * ROWS + m * 16 + line + r * 8];
                    UNROLL for (int i = 0; i < NT; i++) {
                        o[m][i][2 * r] *= f;
                        o[m][i][2 * r + 1] *= f;
                    }
                }
            }
            UNROLL for (int part = 0; part < PARTS; part++) {
                const int now = tile * PARTS + part;
                if (part) {
                    if (now >= slots) break;
                    barrier_wait(full + 8 * slot, parity);
                }
                if (!LOADERS && now > 0 && now - 1 + N < slots) {  // the slot before this one is read: it is filled again
                    barrier_wait(empty + 8 * filled, emptied);
                    bring(filled, from);
                    advance<N>(filled, emptied);
                    if (now + N < slots) from = row_of((now + N) * 16 + mine);
                }
                u32 left[MT][4];
                UNROLL for (int m = 0; m < MT; m++)
                    load_matrices(p_at + (buffer * ROWS + m * 16) * P_PITCH + part * 32, left[m]);
                UNROLL for (int i = 0; i < NT; i += 2) {
                    u32 right[4];
                    load_transposed(values + slot * SLOT + i * 16, right);
                    UNROLL for (int m = 0; m < MT; m++) {
                        multiply(o[m][i], left[m], right[0], right[1]);
                        multiply(o[m][i + 1], left[m], right[2], right[3]);
                    }
                }
                __syncwarp();
                arrive(empty + 8 * slot, lane);
                advance<N>(slot, parity);
            }
            arrive(p_empty + 8 * buffer, lane);
        }
        barrier_wait(summed, 0);
        UNROLL for (int m = 0; m < MT; m++) UNROLL for (int r = 0; r < 2; r++) {
            const int row = m * 16 + line + r * 8, at = w.out + row;
            if (row >= w.rows) continue;
            const float inverse = inverses[row];
            Out* to = (Out*)p.o + at / p.heads * p.o_token + i64(at % p.heads) * p.o_head + column0 + pair;
            UNROLL for (int i = 0; i < NT; i++) store_pair(to + i * 8, o[m][i][2 * r] * inverse, o[m][i][2 * r + 1] * inverse);
        }
    }
}

#define KERNEL(NAME, ROWS, LOADERS, SCORE_REGISTERS, OUTPUT_REGISTERS, OUT)                                              \
    extern "C" __global__ void __launch_bounds__((3 * ROWS / 16 + LOADERS) * 32, 1) NAME(const __grid_constant__ Absorbed p) { \
        attend<ROWS, LOADERS, SCORE_REGISTERS, OUTPUT_REGISTERS, OUT>(p);                                                \
    }
KERNEL(absorbed_16, 16, 4, 0, 0, element)
KERNEL(absorbed_32, 32, 2, 0, 0, element)
KERNEL(absorbed_part_16, 16, 4, 0, 0, float)
KERNEL(absorbed_part_32, 32, 2, 0, 0, float)
#if SPECIFIC  // 4 warps of 200 registers and 8 of 152 are all that a multiprocessor has for 12 warps of 168
KERNEL(absorbed_64, 64, 0, 200, 152, element)
KERNEL(absorbed_part_64, 64, 0, 200, 152, float)
#endif
