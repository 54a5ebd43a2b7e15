/*---
version = 2
dtypes = ["bf16", "f16"]
geometry = ["NOPE", "ROPE", "VALUE"]

[tile]
BN = 64       # keys of a tile
BM = 128      # query rows of a block

[[kernel]]
entry = "fused"
stages = ["attn_out", "lse"]
rows = "BM"
threads = "BM * (1 + (NOPE + ROPE > 192 || VALUE > 128))"
grid = ["items", "heads"]
shared = "128 * (BM * cdiv(NOPE + ROPE - 128 * (NOPE + ROPE > 192), 64) + BN * (cdiv(NOPE + ROPE, 64) + cdiv(VALUE, 64)))"
requires = ["(NOPE + ROPE) % 16 == 0", "VALUE % 16 == 0", "NOPE + ROPE <= 256", "VALUE <= 256"]

[[kernel]]
entry = "fused_part"
stages = ["part_o", "part_lse"]
rows = "BM"
threads = "BM * (1 + (NOPE + ROPE > 192 || VALUE > 128))"
grid = ["items", "heads"]
shared = "128 * (BM * cdiv(NOPE + ROPE - 128 * (NOPE + ROPE > 192), 64) + BN * (cdiv(NOPE + ROPE, 64) + cdiv(VALUE, 64)))"
requires = ["(NOPE + ROPE) % 16 == 0", "VALUE % 16 == 0", "NOPE + ROPE <= 256", "VALUE <= 256"]

[contract]
activations = "bf16"
accumulate = "mma(16, 25)"
softmax = { tile = "BN", p = "bf16", row_sum = "unrounded", factor = "log2e" }
---*/
// Attention over keys and values of each head, as prefill computes it: a block has one head of up to 128 query rows of one
// request. Where heads are small (keys of up to 192, values of up to 128) a warp has 32 rows, so that what it reads of keys and
// values serves two products; where they are not, 16, since an output of 32 rows has no room in registers.
//
// One buffer for keys, one for values: while scores are computed the values of the tile are loaded, and while the output is,
// the keys of the next. q lies in shared memory, but for 128 columns of long rows, which stay in registers. Piece c of 16 bytes of row
// r lies at piece c ^ (r & 7) of its 128 bytes, so that ldmatrix meets each bank once. P goes from the accumulators of q k to
// the operands of P v without leaving the registers; exponentials are taken just before the product that needs them, beside the
// tensor core. Warps skip tiles that none of their rows sees.
#include "attention.cuh"

constexpr int DK = NOPE + ROPE, STEPS = DK / 16;  // of terms, 16 at a time
constexpr bool WIDE = DK > 192 || VALUE > 128;
constexpr int MT = WIDE ? 1 : 2, WARPS = BM / 16 / MT, THREADS = 32 * WARPS;
constexpr int HELD = DK > 192 ? 8 : 0, LEFT = STEPS - HELD;  // steps of q in registers, in shared memory
template <int COLS> constexpr int PITCH = (COLS + 63) / 64 * 128;  // of rows of so many columns
constexpr int Q_PITCH = PITCH<LEFT * 16>, K_PITCH = PITCH<DK>, V_PITCH = PITCH<VALUE>;
static_assert(BN % 16 == 0 && DK % 16 == 0 && VALUE % 16 == 0 && BM % (16 * MT) == 0, "whole tiles of the tensor core");

// Copies ROWS rows of COLS elements without waiting, 8 threads a row; rows from `rows` on become zeros. `from` is the thread's own piece of row 0.
template <int COLS, int ROWS> DEVICE void copy_rows(u32 to, const element* from, i64 stride, int rows) {
    constexpr int AT_ONCE = THREADS / 8;
    const int first = threadIdx.x / 8, piece = threadIdx.x % 8;
    to += first * PITCH<COLS> + (piece ^ first % 8) * 16;
    UNROLL for (int i = 0; i < (ROWS + AT_ONCE - 1) / AT_ONCE; i++) {
        const int row = i * AT_ONCE + first;
        if (ROWS % AT_ONCE && row >= ROWS) break;
        const bool there = row < rows;
        const element* at = from + (there ? row : 0) * stride;
        UNROLL for (int j = 0; j < (COLS + 63) / 64; j++)
            if (COLS % 64 == 0 || j * 64 + piece * 8 < COLS)
                copy_async(to + i * AT_ONCE * PITCH<COLS> + j * 128, at + j * 64, there);
    }
}

template <class Out> DEVICE void attend(const Fused& p) {
    extern __shared__ __align__(128) u8 memory[];
    const int warp = warp_index(), lane = threadIdx.x % 32, head = blockIdx.y;
    const int line = lane / 4, pair = lane % 4 * 2, row0 = warp * 16 * MT;
    const Work w = p.work[blockIdx.x];
    const int token0 = w.row - w.first;
    const int last = seen(w, token0 + w.rows - 1), tiles = (last + BN - 1) / BN;
    // Keys that the warp's first row sees where no end cuts them short, and that end.
    const int sees0 = w.visible + token0 + row0 - w.begin, end = w.end - w.begin;
    const int warp_first = min(sees0, end), warp_last = row0 < w.rows ? min(sees0 + min(16 * MT, w.rows - row0) - 1, end) : 0;
    const u32 q_base = shared_address(memory), k_base = q_base + BM * Q_PITCH, v_base = k_base + BN * K_PITCH;
    const int own = threadIdx.x % 8 * 8;
    const element* queries = p.q + w.row * p.q_token + i64(head) * p.q_head;
    const element* keys = p.k + (w.keys + w.begin) * p.k_token + i64(head) * p.k_head + own;
    const element* values = p.v + (w.keys + w.begin) * p.v_token + i64(head) * p.v_head + own;
    auto load_keys = [&](int tile) {
        copy_rows<DK, BN>(k_base, keys + i64(tile) * BN * p.k_token, p.k_token, last - tile * BN);
    };

    copy_rows<LEFT * 16, BM>(q_base, queries + HELD * 16 + own, p.q_token, w.rows);
    if (tiles > 0) load_keys(0);
    commit();
    u32 q[MT][HELD ? HELD : 1][4];
    if (HELD) UNROLL for (int m = 0; m < MT; m++) UNROLL for (int r = 0; r < 2; r++) {
        const int row = row0 + m * 16 + line + r * 8;
        const bool there = row < w.rows;
        const element* from = queries + (there ? row : 0) * p.q_token + pair;
        UNROLL for (int k = 0; k < HELD; k++)
            UNROLL for (int e = 0; e < 2; e++) q[m][k][r + 2 * e] = there ? *(const u32*)(from + k * 16 + e * 8) : 0;
    }
    float o[MT][VALUE / 8][4], most[MT][2], sum[MT][2];
    UNROLL for (int m = 0; m < MT; m++) {
        most[m][0] = most[m][1] = minus_infinity();
        sum[m][0] = sum[m][1] = 0.f;
        UNROLL for (int i = 0; i < VALUE / 8; i++) UNROLL for (int e = 0; e < 4; e++) o[m][i][e] = 0.f;
    }
    // What a lane reads: the piece of step k is that of step 0, but for an xor of k % 4 * 32.
    const u32 q_at = q_base + (row0 + lane % 16) * Q_PITCH + (lane / 16 ^ lane % 8) * 16;
    const u32 k_at = k_base + (lane % 8 + lane / 16 * 8) * K_PITCH + (lane / 8 % 2 ^ lane % 8) * 16;
    const u32 v_at = v_base + lane % 16 * V_PITCH + (lane / 16 ^ lane % 8) * 16;

    for (int tile = 0; tile < tiles; tile++) {
        const int key0 = tile * BN;
        const bool active = key0 < warp_last;
        wait<0>();
        __syncthreads();  // the keys are there, and nobody reads the values of the tile before
        copy_rows<VALUE, BN>(v_base, values + i64(tile) * BN * p.v_token, p.v_token, last - key0);
        commit();
        float s[MT][BN / 8][4];
        if (active) {
            UNROLL for (int m = 0; m < MT; m++)
                UNROLL for (int j = 0; j < BN / 8; j++) UNROLL for (int e = 0; e < 4; e++) s[m][j][e] = 0.f;
            UNROLL for (int k = 0; k < STEPS; k++) {
                const int l = k - HELD;
                u32 left[MT][4];
                UNROLL for (int m = 0; m < MT; m++) {
                    if (l >= 0) load_matrices((q_at ^ l % 4 * 32) + l / 4 * 128 + m * 16 * Q_PITCH, left[m]);
                    else UNROLL for (int e = 0; e < 4; e++) left[m][e] = q[m][k < HELD ? k : 0][e];
                }
                UNROLL for (int j = 0; j < BN / 16; j++) {
                    u32 right[4];
                    load_matrices((k_at ^ k % 4 * 32) + k / 4 * 128 + j * 16 * K_PITCH, right);
                    UNROLL for (int m = 0; m < MT; m++) {
                        multiply(s[m][2 * j], left[m], right[0], right[1]);
                        multiply(s[m][2 * j + 1], left[m], right[2], right[3]);
                    }
                }
            }
        }
        wait<0>();
        __syncthreads();  // the values are there, and nobody reads the keys
        if (tile + 1 < tiles) load_keys(tile + 1);
        commit();
        if (!active) continue;

        if (key0 + BN > warp_first) {
            UNROLL for (int m = 0; m < MT; m++) UNROLL for (int e = 0; e < 4; e++) {
                const int sees = min(sees0 + m * 16 + line + e / 2 * 8, end) - key0 - pair - e % 2;
                UNROLL for (int j = 0; j < BN / 8; j++) s[m][j][e] = j * 8 < sees ? s[m][j][e] : minus_infinity();
            }
        }
        float shift[MT][2];
        UNROLL for (int m = 0; m < MT; m++) {
            float now[2];
            UNROLL for (int r = 0; r < 2; r++) {
                now[r] = most[m][r];
                UNROLL for (int j = 0; j < BN / 8; j++) now[r] = fmaxf(now[r], fmaxf(s[m][j][2 * r], s[m][j][2 * r + 1]));
                now[r] = fmaxf(now[r], __shfl_xor_sync(ALL, now[r], 1));
                now[r] = fmaxf(now[r], __shfl_xor_sync(ALL, now[r], 2));
            }
            if (__any_sync(ALL, now[0] != most[m][0] || now[1] != most[m][1])) {  // else the factors are 1
                float factor[2];
                UNROLL for (int r = 0; r < 2; r++) {
                    factor[r] = rescale(most[m][r], now[r], p.c2);
                    most[m][r] = now[r];
                    sum[m][r] *= factor[r];
                }
                UNROLL for (int i = 0; i < VALUE / 8; i++) UNROLL for (int e = 0; e < 4; e++) o[m][i][e] *= factor[e / 2];
            }
            UNROLL for (int r = 0; r < 2; r++) shift[m][r] = offset(most[m][r], p.c2);
        }
        // Number n of the 8 of a row pair of the keys of a step, as an exponential.
        auto exponential = [&](int m, int k, int n) {
            float* x = s[m][2 * k + n / 4];
            x[n % 4] = exp2_(fmaf(x[n % 4], p.c2, shift[m][n % 4 / 2]));
            if (n % 2) sum[m][n % 4 / 2] += x[n % 4 - 1] + x[n % 4];
        };
        UNROLL for (int k = 0; k < BN / 16; k++) {
            u32 left[MT][4];
            UNROLL for (int m = 0; m < MT; m++) {
                if (!WIDE || k == 0) UNROLL for (int n = 0; n < 8; n++) exponential(m, k, n);
                UNROLL for (int e = 0; e < 4; e++) left[m][e] = pack(s[m][2 * k + e / 2][e % 2 * 2], s[m][2 * k + e / 2][e % 2 * 2 + 1]);
            }
            UNROLL for (int i = 0; i < VALUE / 16; i++) {
                if (WIDE && k + 1 < BN / 16) {  // those of the next step, a few beside each product
                    constexpr int SOME = (8 * 16 + VALUE - 1) / VALUE;
                    UNROLL for (int n = i * SOME; n < (i + 1) * SOME; n++)
                        if (n < 8) UNROLL for (int m = 0; m < MT; m++) exponential(m, k + 1, n);
                }
                u32 right[4];
                load_transposed((v_at ^ i % 4 * 32) + i / 4 * 128 + k * 16 * V_PITCH, right);
                UNROLL for (int m = 0; m < MT; m++) {
                    multiply(o[m][2 * i], left[m], right[0], right[1]);
                    multiply(o[m][2 * i + 1], left[m], right[2], right[3]);
                }
            }
        }
    }

    int rows = w.rows, out = w.out;
    if (!WIDE)  // read again: two registers less in the loop
        asm volatile("ld.global.b32 %0, [%2 + 4]; ld.global.b32 %1, [%2 + 8];" : "=r"(rows), "=r"(out) : "l"(p.work + blockIdx.x));
    UNROLL for (int m = 0; m < MT; m++) UNROLL for (int r = 0; r < 2; r++) {
        float total = sum[m][r];
        total += __shfl_xor_sync(ALL, total, 1);
        total += __shfl_xor_sync(ALL, total, 2);
        const int row = row0 + m * 16 + line + r * 8;
        if (row >= rows) continue;
        const i64 at = out + row;
        const float inverse = reciprocal(total);
        Out* to = (Out*)p.o + at * p.o_token + i64(head) * p.o_head + pair;
        UNROLL for (int i = 0; i < VALUE / 8; i++)
            store_pair(to + i * 8, o[m][i][2 * r] * inverse, o[m][i][2 * r + 1] * inverse);
        if (pair == 0) p.lse[at * p.heads + head] = log_sum_exp(most[m][r], total, p.c2);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fused(const __grid_constant__ Fused p) { attend<element>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) fused_part(const __grid_constant__ Fused p) { attend<float>(p); }
