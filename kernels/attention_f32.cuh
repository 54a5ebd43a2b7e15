// What both attention kernels in float32 share: some query rows of a warp, without tensor cores. A lane has one key of a tile of
// 32 for the scores, and every 32nd column of the output.
//
// Contract: as in attention.cuh, with P as it is computed. Scores and output are chains of fma, by term and by key.
#pragma once
#include "attention.cuh"

static_assert(BN == 32, "a lane a key");

template <int COLUMNS> struct Rows {
    static constexpr int OWN = (COLUMNS + 31) / 32;
    float most[ROWS], sum[ROWS], s[ROWS], o[ROWS][OWN];

    DEVICE void start() {
        UNROLL for (int r = 0; r < ROWS; r++) {
            most[r] = minus_infinity();
            sum[r] = s[r] = 0.f;
            UNROLL for (int i = 0; i < OWN; i++) o[r][i] = 0.f;
        }
    }

    // Adds N terms to the scores of the lane's key.
    template <int N> DEVICE void score(const float* const (&q)[ROWS], const float* key) {
        static_assert(N % 4 == 0, "16 bytes at a time");
#pragma unroll 4
        for (int t = 0; t < N; t += 4) {
            const float4 k = *(const float4*)(key + t);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const float4 x = *(const float4*)(q[r] + t);
                s[r] = fmaf(x.w, k.w, fmaf(x.z, k.z, fmaf(x.y, k.y, fmaf(x.x, k.x, s[r]))));
            }
        }
    }

    // Takes a tile whose scores are there: `sees` of its keys are seen by each row. The scores begin anew.
    DEVICE void tile(const int (&sees)[ROWS], const float* values, int pitch, float c2) {
        const int lane = threadIdx.x % 32;
        float p[ROWS];
        int keys = 0;
        UNROLL for (int r = 0; r < ROWS; r++) {
            const float x = lane < sees[r] ? s[r] : minus_infinity();
            float now = x;
            UNROLL for (int d = 16; d > 0; d /= 2) now = fmaxf(now, __shfl_xor_sync(ALL, now, d));
            now = fmaxf(most[r], now);
            const float factor = rescale(most[r], now, c2);
            most[r] = now;
            p[r] = exp2_(fmaf(x, c2, offset(now, c2)));
            sum[r] = sum[r] * factor + p[r];
            UNROLL for (int i = 0; i < OWN; i++) o[r][i] *= factor;
            keys = max(keys, sees[r]);
            s[r] = 0.f;
        }
        keys = min(keys, BN);
        for (int key = 0; key < keys; key++) {
            float share[ROWS];
            UNROLL for (int r = 0; r < ROWS; r++) share[r] = __shfl_sync(ALL, p[r], key);
            UNROLL for (int i = 0; i < OWN; i++) {
                const int col = i * 32 + lane;
                const float v = COLUMNS % 32 == 0 || col < COLUMNS ? values[key * pitch + col] : 0.f;
                UNROLL for (int r = 0; r < ROWS; r++) o[r][i] = fmaf(share[r], v, o[r][i]);
            }
        }
    }

    // Stores row `r` at `to` and its lse.
    DEVICE void finish(int r, float* to, float* lse, float c2) {
        const int lane = threadIdx.x % 32;
        const float total = warp_sum(sum[r]), inverse = reciprocal(total);
        UNROLL for (int i = 0; i < OWN; i++)
            if (COLUMNS % 32 == 0 || i * 32 + lane < COLUMNS) to[i * 32 + lane] = o[r][i] * inverse;
        if (lane == 0) *lse = log_sum_exp(most[r], total, c2);
    }
};
