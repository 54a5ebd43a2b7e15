// Absorbed MLA decode over a paged latent cache with mma.sync: bf16, latent 512 + rope 64, page 64, split-KV. Throw-away prototype.
typedef unsigned int u32; typedef unsigned short u16; typedef unsigned long long u64;
constexpr int DK = 576, DV = 512, PAGE = 64, PITCH = 1168;   // PITCH: bytes of a token row in shared memory, 73 chunks of 16 (odd)
constexpr int GRP = 16, GB = GRP * PITCH, TILE = 32, SP = 40; // a slot holds 16 tokens; a tile is 32; SP: pitch of the score exchange in floats
__device__ __forceinline__ u32 sm32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pack(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ void ldm(u32 a, u32* r) { asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory"); }
__device__ __forceinline__ void ldmt(u32 a, u32* r) { asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory"); }
__device__ __forceinline__ void mma(float* d, const u32* a, u32 b0, u32 b1) { asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); }
__device__ __forceinline__ void mb_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared.b64 [%0],%1;" :: "r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void mb_tx(u32 b, u32 n) { asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t,[%0],%1;}" :: "r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void mb_wait(u32 b, u32 par) { asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @p bra D; bra W; D:}" :: "r"(b), "r"(par) : "memory"); }
#if __CUDA_ARCH__ >= 1000 // with .shared::cluster, ptxas for sm_120 adds a call that also makes it ignore setmaxnreg
#define BULK "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
#else
#define BULK "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" // the form that was timed
#endif
__device__ __forceinline__ void bulk(u32 d, const void* s, u32 n, u32 b) { asm volatile(BULK :: "r"(d), "l"(s), "r"(n), "r"(b) : "memory"); }
__device__ __forceinline__ void bulk2(u32 d, const void* s, u32 n, u32 b) { asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0],[%1],%2,[%3],%4;" :: "r"(d), "l"(s), "r"(n), "r"(b), "h"((u16)3) : "memory"); }
__device__ __forceinline__ void cpa(u32 d, const void* s) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" :: "r"(d), "l"(s) : "memory"); }
#define CL_ARRIVE asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory")
#define CL_WAIT asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory")

// TEAMS teams of 16 heads; WK = parts into which k is cut for the scores; SL = slots of 16 tokens; LD: 0 cp.async, 1 bulk copies, a row each, 2 the same multicast in a cluster of two, 3 rows padded to 584 elements in global memory too, one bulk copy per 16 tokens; AB = 1: loads only; EA = 1: refill a tile's slots at the start of the next tile (one more barrier a tile), 0: after its scores
template <int TEAMS, int WK, int SL, int LD, int AB, int EA>
__device__ __forceinline__ void decode(const u16* __restrict__ Q, const u16* __restrict__ C, const int* __restrict__ table, const int* __restrict__ lens, float* __restrict__ PO, float* __restrict__ PL, u16* __restrict__ O, int H, int maxp, float c2) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int NW = TEAMS * 4 * WK, T = NW * 32, KS = 36 / WK, COLS = DV / (4 * WK), NT = COLS / 8;
    float* sx = (float*)(smem + SL * GB); u64* full = (u64*)(smem + SL * GB + 2 * TEAMS * WK * 16 * SP * 4);
    const int tid = threadIdx.x, warp = tid >> 5, l = tid & 31, g = l >> 2, c = (l & 3) * 2, team = warp / (4 * WK), w = warp % (4 * WK), kg = w & 3, kh = w >> 2;
    const int hb = blockIdx.x * 16 * TEAMS + team * 16, split = blockIdx.y, splits = gridDim.y, b = blockIdx.z;
    const int len = lens[b], per = ((len + splits - 1) / splits + PAGE - 1) / PAGE * PAGE, t0 = split * per, n = min(len - t0, per);
    const int* tab = table + (size_t)b * maxp + t0 / PAGE; const int tiles = n > 0 ? (n + TILE - 1) / TILE : 0, groups = tiles * 2;
    const u32 base = sm32(smem), fb = sm32(full);
    if (LD) { if (tid == 0) { for (int i = 0; i < SL; i++) mb_init(fb + 8 * i, 1); asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); } __syncthreads(); if (LD == 2) { CL_ARRIVE; CL_WAIT; } }
    u32 rank = 0; if (LD == 2) asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(rank));
    auto src = [&](int tok) { tok = min(tok, n - 1); return (const unsigned char*)(C + ((size_t)tab[tok / PAGE] * PAGE + tok % PAGE) * (LD == 3 ? 584 : DK)); };
    int pg0 = 0, pg1 = 0; if (LD == 3) { if (SL < groups) pg0 = __ldg(tab + SL * GRP / PAGE); if (SL + 1 < groups) pg1 = __ldg(tab + (SL + 1) * GRP / PAGE); }
    auto load2 = [&](int gi, int s0) { // groups gi and gi + 1 into slots s0 and s0 + 1
        int s1 = s0 + 1 == SL ? 0 : s0 + 1;
        if (LD == 0) {
            if (gi < groups) for (int i = tid; i < GRP * 72; i += T) { int r = i / 72, ch = i - r * 72; cpa(base + s0 * GB + r * PITCH + ch * 16, src(gi * GRP + r) + ch * 16); }
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (gi + 1 < groups) for (int i = tid; i < GRP * 72; i += T) { int r = i / 72, ch = i - r * 72; cpa(base + s1 * GB + r * PITCH + ch * 16, src(gi * GRP + GRP + r) + ch * 16); }
            asm volatile("cp.async.commit_group;" ::: "memory");
        } else if (LD == 3) {
            if (tid < 32) for (int q = 0; q < 2; q++) { int g0 = gi + q, s = q ? s1 : s0; if (g0 < groups) { bool whole = g0 * GRP + GRP <= n; if (l == 0) { mb_tx(fb + 8 * s, whole ? GB : GRP * DK * 2); if (whole) bulk(base + s * GB, C + ((size_t)(q ? pg1 : pg0) * PAGE + g0 * GRP % PAGE) * 584, GB, fb + 8 * s); } if (!whole && l < GRP) bulk(base + s * GB + l * PITCH, src(g0 * GRP + l), DK * 2, fb + 8 * s); } }
            if (gi + 2 < groups) pg0 = __ldg(tab + (gi + 2) * GRP / PAGE); if (gi + 3 < groups) pg1 = __ldg(tab + (gi + 3) * GRP / PAGE);
        } else {
            if (tid == 0) { if (gi < groups) mb_tx(fb + 8 * s0, GRP * DK * 2); if (gi + 1 < groups) mb_tx(fb + 8 * s1, GRP * DK * 2); }
            constexpr int R = LD == 2 ? 16 : 32; // rows this block brings
            constexpr int PW = R / NW; if (l < PW) { int r = warp * PW + l; if (LD == 2) r = r * 2 + rank; int q = r >> 4; if (gi + q < groups) { u32 d = base + (q ? s1 : s0) * GB + (r & 15) * PITCH, m = fb + 8 * (q ? s1 : s0);
                if (LD == 2) bulk2(d, src(gi * GRP + r), DK * 2, m); else bulk(d, src(gi * GRP + r), DK * 2, m); } }
        }
    };
    if (tiles) { if (LD == 0) { for (int i = 0; i < SL; i += 2) { if (i + 1 < SL) load2(i, i); else { // odd last slot
                if (i < groups) for (int k = tid; k < GRP * 72; k += T) { int r = k / 72, ch = k - r * 72; cpa(base + i * GB + r * PITCH + ch * 16, src(i * GRP + r) + ch * 16); } asm volatile("cp.async.commit_group;" ::: "memory"); } } }
        else if (LD == 3) { for (int i = 0; i < SL; i++) if (i < groups && tid < 32) { bool whole = i * GRP + GRP <= n; if (l == 0) { mb_tx(fb + 8 * i, whole ? GB : GRP * DK * 2); if (whole) bulk(base + i * GB, src(i * GRP), GB, fb + 8 * i); } if (!whole && l < GRP) bulk(base + i * GB + l * PITCH, src(i * GRP + l), DK * 2, fb + 8 * i); } }
        else for (int i = 0; i < SL; i++) if (i < groups) { if (tid == 0) mb_tx(fb + 8 * i, GRP * DK * 2); constexpr int R = LD == 2 ? 8 : 16; if (tid < R) { int r = LD == 2 ? tid * 2 + rank : tid; u32 d = base + i * GB + r * PITCH; if (LD == 2) bulk2(d, src(i * GRP + r), DK * 2, fb + 8 * i); else bulk(d, src(i * GRP + r), DK * 2, fb + 8 * i); } } }
    u32 q[KS][4]; { const u16* qr = Q + ((size_t)b * H + hb + g) * DK + kh * KS * 16 + c;
#pragma unroll
        for (int k = 0; k < KS; k++) { q[k][0] = *(const u32*)(qr + k * 16); q[k][1] = *(const u32*)(qr + 8 * DK + k * 16); q[k][2] = *(const u32*)(qr + k * 16 + 8); q[k][3] = *(const u32*)(qr + 8 * DK + k * 16 + 8); } }
    float o[NT][4];
#pragma unroll
    for (int i = 0; i < NT; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
    float m0 = -1e30f, m1 = -1e30f, l0 = 0.f, l1 = 0.f; int s0 = 0; u32 par0 = 0, par1 = 0; int slot1 = 1 % SL;
    const u32 kofs = ((kg & 1) * 8 + (l & 7)) * PITCH + kh * KS * 32 + (l >> 3) * 16, vofs = ((l & 7) + ((l >> 3) & 1) * 8) * PITCH + (w * COLS + (l >> 4) * 8) * 2;
    for (int t = 0; t < tiles; t++) {
        float* sb = sx + ((t & 1) * TEAMS + team) * WK * 16 * SP;
        if (LD == 0) asm volatile("cp.async.wait_group %0;" :: "n"(SL - 4 < 0 ? 0 : SL - 4) : "memory");
        if (LD == 2 && EA && t > 0) CL_WAIT;
        if (LD == 0 || (EA && t > 0)) __syncthreads();
        if (EA && t > 0) { int f = s0 - 2; if (f < 0) f += SL; load2(2 * t - 2 + SL, f); }
        if (LD) { mb_wait(fb + 8 * s0, par0); if (AB || kg >= 2) mb_wait(fb + 8 * slot1, par1); }
        if (!AB) {
            float s[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
            u32 ka = base + (kg >= 2 ? slot1 : s0) * GB + kofs;
#pragma unroll
            for (int k = 0; k < KS; k += 2) { u32 r[4]; ldm(ka + k * 32, r); mma(s[k & 2], q[k], r[0], r[1]); mma(s[(k & 2) + 1], q[k + 1], r[2], r[3]); }
            float* p = sb + (kh * 16 + g) * SP + kg * 8 + c;
            *(float2*)p = make_float2((s[0][0] + s[1][0]) + (s[2][0] + s[3][0]), (s[0][1] + s[1][1]) + (s[2][1] + s[3][1]));
            *(float2*)(p + 8 * SP) = make_float2((s[0][2] + s[1][2]) + (s[2][2] + s[3][2]), (s[0][3] + s[1][3]) + (s[2][3] + s[3][3]));
        }
        if (LD == 2 && !EA && t > 0) CL_WAIT;
        __syncthreads(); // scores are there, and everybody is through with tile t - 1
        if (!EA && t > 0) { int f = s0 - 2; if (f < 0) f += SL; load2(2 * t - 2 + SL, f); }
        if (LD && !AB && kg < 2) mb_wait(fb + 8 * slot1, par1);
        if (LD && !AB && kg >= 2) mb_wait(fb + 8 * s0, par0);
        if (!AB) {
            float2 x[4], y[4]; const float* p = sb + g * SP + c; int v = n - t * TILE;
#pragma unroll
            for (int j = 0; j < 4; j++) { x[j] = *(const float2*)(p + 8 * j); y[j] = *(const float2*)(p + 8 * SP + 8 * j);
                if (WK == 2) { float2 a = *(const float2*)(p + 16 * SP + 8 * j), d = *(const float2*)(p + 24 * SP + 8 * j); x[j].x += a.x; x[j].y += a.y; y[j].x += d.x; y[j].y += d.y; } }
            if (v < TILE) {
#pragma unroll
                for (int j = 0; j < 4; j++) { if (8 * j + c >= v) x[j].x = y[j].x = -1e30f; if (8 * j + c + 1 >= v) x[j].y = y[j].y = -1e30f; } }
            float a0 = m0, a1 = m1;
#pragma unroll
            for (int j = 0; j < 4; j++) { a0 = fmaxf(a0, fmaxf(x[j].x, x[j].y)); a1 = fmaxf(a1, fmaxf(y[j].x, y[j].y)); }
            a0 = fmaxf(a0, __shfl_xor_sync(~0u, a0, 1)); a0 = fmaxf(a0, __shfl_xor_sync(~0u, a0, 2)); a1 = fmaxf(a1, __shfl_xor_sync(~0u, a1, 1)); a1 = fmaxf(a1, __shfl_xor_sync(~0u, a1, 2));
            if (__any_sync(~0u, a0 != m0 || a1 != m1)) { float f0 = ex2((m0 - a0) * c2), f1 = ex2((m1 - a1) * c2); l0 *= f0; l1 *= f1; m0 = a0; m1 = a1;
#pragma unroll
                for (int i = 0; i < NT; i++) { o[i][0] *= f0; o[i][1] *= f0; o[i][2] *= f1; o[i][3] *= f1; } }
            float n0 = -m0 * c2, n1 = -m1 * c2; u32 pa[2][4];
#pragma unroll
            for (int j = 0; j < 4; j++) { x[j].x = ex2(fmaf(x[j].x, c2, n0)); x[j].y = ex2(fmaf(x[j].y, c2, n0)); y[j].x = ex2(fmaf(y[j].x, c2, n1)); y[j].y = ex2(fmaf(y[j].y, c2, n1)); l0 += x[j].x + x[j].y; l1 += y[j].x + y[j].y;
                pa[j >> 1][(j & 1) * 2] = pack(x[j].x, x[j].y); pa[j >> 1][(j & 1) * 2 + 1] = pack(y[j].x, y[j].y); }
#pragma unroll
            for (int h = 0; h < 2; h++) { u32 va = base + (h ? slot1 : s0) * GB + vofs;
#pragma unroll
                for (int i = 0; i < NT; i += 2) { u32 r[4]; ldmt(va + i * 16, r); mma(o[i], pa[h], r[0], r[1]); mma(o[i + 1], pa[h], r[2], r[3]); } }
        }
        if (LD == 2 && t + 1 < tiles) CL_ARRIVE;
        s0 = s0 + 2; if (s0 >= SL) { s0 -= SL; par0 ^= 1; } slot1 = slot1 + 2; if (slot1 >= SL) { slot1 -= SL; par1 ^= 1; }
    }
    if (LD == 2) { CL_ARRIVE; CL_WAIT; }
    l0 += __shfl_xor_sync(~0u, l0, 1); l0 += __shfl_xor_sync(~0u, l0, 2); l1 += __shfl_xor_sync(~0u, l1, 1); l1 += __shfl_xor_sync(~0u, l1, 2);
    float i0 = tiles ? 1.f / l0 : 0.f, i1 = tiles ? 1.f / l1 : 0.f;
    if (splits > 1) {
        float* p = PO + (((size_t)b * splits + split) * H + hb + g) * DV + w * COLS + c; float* pl = PL + ((size_t)b * splits + split) * H + hb + g;
#pragma unroll
        for (int i = 0; i < NT; i++) { *(float2*)(p + 8 * i) = make_float2(o[i][0] * i0, o[i][1] * i0); *(float2*)(p + 8 * DV + 8 * i) = make_float2(o[i][2] * i1, o[i][3] * i1); }
        if (w == 0 && (l & 3) == 0) { pl[0] = tiles ? m0 * c2 + log2f(l0) : -1e30f; pl[8] = tiles ? m1 * c2 + log2f(l1) : -1e30f; }
    } else {
        u16* p = O + ((size_t)b * H + hb + g) * DV + w * COLS + c;
#pragma unroll
        for (int i = 0; i < NT; i++) { *(u32*)(p + 8 * i) = pack(o[i][0] * i0, o[i][1] * i0); *(u32*)(p + 8 * DV + 8 * i) = pack(o[i][2] * i1, o[i][3] * i1); }
    }
}
#define K(name, TEAMS, WK, SL, LD, AB, EA, MINB) extern "C" __global__ void __launch_bounds__(TEAMS * WK * 128, MINB) name(const u16* Q, const u16* C, const int* table, const int* lens, float* PO, float* PL, u16* O, int H, int maxp, float c2) { decode<TEAMS, WK, SL, LD, AB, EA>(Q, C, table, lens, PO, PL, O, H, maxp, c2); }
#define KC(name, TEAMS, WK, SL, LD, AB, EA, MINB) extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(TEAMS * WK * 128, MINB) name(const u16* Q, const u16* C, const int* table, const int* lens, float* PO, float* PL, u16* O, int H, int maxp, float c2) { decode<TEAMS, WK, SL, LD, AB, EA>(Q, C, table, lens, PO, PL, O, H, maxp, c2); }
K(d8_s4_bulk_e0, 1, 2, 4, 1, 0, 0, 1)
K(d8_s4_bulk_e1, 1, 2, 4, 1, 0, 1, 1)
K(d8_s4_pad_e0, 1, 2, 4, 3, 0, 0, 1)
K(d8_s4_pad_e1, 1, 2, 4, 3, 0, 1, 1)
K(d8_s4_cpa_e0, 1, 2, 4, 0, 0, 0, 1)
K(d8_s4_cpa_e1, 1, 2, 4, 0, 0, 1, 1)
K(d4_s5_bulk_e0, 1, 1, 5, 1, 0, 0, 2)
K(d4_s5_bulk_e1, 1, 1, 5, 1, 0, 1, 2)
K(d4_s5_pad_e0, 1, 1, 5, 3, 0, 0, 2)
K(d4_s5_pad_e1, 1, 1, 5, 3, 0, 1, 2)
K(d4_s5_cpa_e0, 1, 1, 5, 0, 0, 0, 2)
K(d4_s5_cpa_e1, 1, 1, 5, 0, 0, 1, 2)
K(load4_s5_bulk_e1, 1, 1, 5, 1, 1, 1, 2)
K(load4_s5_pad_e1, 1, 1, 5, 3, 1, 1, 2)
K(load4_s5_cpa_e1, 1, 1, 5, 0, 1, 1, 2)
K(t2_s4_bulk_e0, 2, 1, 4, 1, 0, 0, 1)
K(t2_s4_pad_e0, 2, 1, 4, 3, 0, 0, 1)
KC(t2_s4_mc_e0, 2, 1, 4, 2, 0, 0, 1)
extern "C" __global__ void merge(const float* PO, const float* PL, u16* O, int H, int splits) {
    int h = blockIdx.x, b = blockIdx.y, j = threadIdx.x * 4; float m = -1e30f; for (int s = 0; s < splits; s++) m = fmaxf(m, PL[((size_t)b * splits + s) * H + h]);
    float4 a = {0, 0, 0, 0}; float z = 0; for (int s = 0; s < splits; s++) { float e = ex2(PL[((size_t)b * splits + s) * H + h] - m); z += e; float4 v = *(const float4*)(PO + (((size_t)b * splits + s) * H + h) * DV + j); a.x += e * v.x; a.y += e * v.y; a.z += e * v.z; a.w += e * v.w; }
    z = 1.f / z; u32* p = (u32*)(O + ((size_t)b * H + h) * DV + j); p[0] = pack(a.x * z, a.y * z); p[1] = pack(a.z * z, a.w * z);
}
// Second plan: tiles of 16 tokens, 16*MT heads a block, NW warps; scores of tile t + 1 and P.V of tile t in one phase; softmax by row owners, P through shared memory.
// LDV 0: a bulk copy a token row, rows spread over the warps; 1: rows padded to 584 elements in global memory too, one bulk copy a tile
template <int MT, int NW, int SL, int NG, int LDV>
__device__ __forceinline__ void decode2(const u16* __restrict__ Q, const u16* __restrict__ C, const int* __restrict__ table, const int* __restrict__ lens, float* __restrict__ PO, float* __restrict__ PL, u16* __restrict__ O, int H, int maxp, float c2) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int KQ = 4, KS = 9, MH = NW / KQ / NG, MS = MT / MH, R = MT * 16, COLS = DV / NW, NT = COLS / 8, XP = 20, PP = 48, RW = R / NW, LPR = 32 / RW, KPL = 16 / LPR, NN = 2 / NG;
    static_assert(MS >= 1 && MH * MS == MT, "warps");
    float* sx = (float*)(smem + SL * GB); unsigned char* pp = (unsigned char*)(sx + KQ * R * XP); float* al = (float*)(pp + R * PP); u64* full = (u64*)(al + 2 * R);
    const int tid = threadIdx.x, warp = tid >> 5, l = tid & 31, g = l >> 2, c = (l & 3) * 2;
    const int kq = warp & 3, ng = NG == 2 ? (warp >> 2) & 1 : 0, mh = NG == 2 ? warp >> 3 : warp >> 2;
    const int hb = blockIdx.x * R, split = blockIdx.y, splits = gridDim.y, b = blockIdx.z;
    const int len = lens[b], per = ((len + splits - 1) / splits + PAGE - 1) / PAGE * PAGE, t0 = split * per, n = min(len - t0, per), tiles = n > 0 ? (n + 15) / 16 : 0;
    const int* tab = table + (size_t)b * maxp + t0 / PAGE; const u32 base = sm32(smem), fb = sm32(full), pb = sm32(pp);
    if (tid == 0) { for (int i = 0; i < SL; i++) mb_init(fb + 8 * i, 1); asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); } __syncthreads();
    constexpr int GE = LDV ? 584 : DK, RPW = 16 / NW;
    const int mine = LDV ? 0 : warp * RPW + (l < RPW ? l : 0);
    auto tokof = [&](int gi) { return min(gi * 16 + mine, n - 1); };
    auto load = [&](int gi, int s, int pg) { if (gi < tiles) {
        if (LDV) { if (warp == 0) { bool whole = gi * 16 + 16 <= n; if (l == 0) mb_tx(fb + 8 * s, whole ? GB : GRP * DK * 2); if (whole) { if (l == 0) bulk(base + s * GB, C + ((size_t)pg * PAGE + gi * 16 % PAGE) * GE, GB, fb + 8 * s); }
            else if (l < 16) { int tok = min(gi * 16 + l, n - 1); bulk(base + s * GB + l * PITCH, C + ((size_t)tab[tok / PAGE] * PAGE + tok % PAGE) * GE, DK * 2, fb + 8 * s); } } }
        else { if (tid == 0) mb_tx(fb + 8 * s, GRP * DK * 2); if (l < RPW) bulk(base + s * GB + mine * PITCH, C + ((size_t)pg * PAGE + tokof(gi) % PAGE) * GE, DK * 2, fb + 8 * s); } } };
    for (int i = 0; i < SL; i++) if (i < tiles) load(i, i, __ldg(tab + tokof(i) / PAGE)); int pg = 0; if (SL < tiles) pg = __ldg(tab + tokof(SL) / PAGE);
    u32 q[MS][KS][4];
#pragma unroll
    for (int m = 0; m < MS; m++) { const u16* qr = Q + ((size_t)b * H + hb + (mh * MS + m) * 16 + g) * DK + kq * KS * 16 + c;
#pragma unroll
        for (int k = 0; k < KS; k++) { q[m][k][0] = *(const u32*)(qr + k * 16); q[m][k][1] = *(const u32*)(qr + 8 * DK + k * 16); q[m][k][2] = *(const u32*)(qr + k * 16 + 8); q[m][k][3] = *(const u32*)(qr + 8 * DK + k * 16 + 8); } }
    float o[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < NT; i++) o[m][i][0] = o[m][i][1] = o[m][i][2] = o[m][i][3] = 0.f;
    float mx = -1e30f, ls = 0.f; const int row = warp * RW + l / LPR, key = (l % LPR) * KPL;
    const u32 kofs = (NG == 1 ? ((l & 7) + (l >> 4) * 8) * PITCH + ((l >> 3) & 1) * 16 : (ng * 8 + (l & 7)) * PITCH + ((l >> 3) & 1) * 16) + kq * KS * 32;
    const u32 vofs = ((l & 7) + ((l >> 3) & 1) * 8) * PITCH + (warp * COLS + (l >> 4) * 8) * 2, pofs = pb + ((l & 7) + ((l >> 3) & 1) * 8) * PP + (l >> 4) * 16;
    float s[MS][NN][4];
    auto zero = [&] {
#pragma unroll
        for (int m = 0; m < MS; m++)
#pragma unroll
            for (int j = 0; j < NN; j++) s[m][j][0] = s[m][j][1] = s[m][j][2] = s[m][j][3] = 0.f; };
    auto sstep = [&](u32 ka, int k) { u32 r[4]; if (NG == 1) ldm(ka + k * 32, r); else asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(ka + k * 32) : "memory");
#pragma unroll
        for (int m = 0; m < MS; m++) { mma(s[m][0], q[m][k], r[0], r[1]); if (NG == 1) mma(s[m][NN - 1], q[m][k], r[2], r[3]); } };
    auto put = [&] {
#pragma unroll
        for (int m = 0; m < MS; m++)
#pragma unroll
            for (int j = 0; j < NN; j++) { float* p = sx + (kq * R + (mh * MS + m) * 16 + g) * XP + (NG == 1 ? j * 8 : ng * 8) + c; *(float2*)p = make_float2(s[m][j][0], s[m][j][1]); *(float2*)(p + 8 * XP) = make_float2(s[m][j][2], s[m][j][3]); } };
    auto soft = [&](int t) -> bool { float x[KPL]; const float* p = sx + row * XP + key; int v = n - t * 16 - key;
        if (KPL == 4) { float4 a = *(const float4*)p, d = *(const float4*)(p + R * XP), e = *(const float4*)(p + 2 * R * XP), f = *(const float4*)(p + 3 * R * XP); x[0] = (a.x + d.x) + (e.x + f.x); x[KPL > 1] = (a.y + d.y) + (e.y + f.y); x[KPL > 2 ? 2 : 0] = (a.z + d.z) + (e.z + f.z); x[KPL > 3 ? 3 : 0] = (a.w + d.w) + (e.w + f.w); if (KPL != 4) x[0] = 0; }
        else {
#pragma unroll
            for (int j = 0; j < KPL; j++) x[j] = (p[j] + p[j + R * XP]) + (p[j + 2 * R * XP] + p[j + 3 * R * XP]); }
        float m = mx;
#pragma unroll
        for (int j = 0; j < KPL; j++) { if (j >= v) x[j] = -1e30f; m = fmaxf(m, x[j]); }
#pragma unroll
        for (int d = 1; d < LPR; d *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
        float f = ex2((mx - m) * c2), nb = -m * c2; bool ch = m != mx; mx = m; ls *= f;
#pragma unroll
        for (int j = 0; j < KPL; j++) { x[j] = ex2(fmaf(x[j], c2, nb)); ls += x[j]; }
        unsigned char* w = pp + row * PP + key * 2; if (KPL == 4) *(uint2*)w = make_uint2(pack(x[0], x[KPL > 1]), pack(x[KPL > 2 ? 2 : 0], x[KPL > 3 ? 3 : 0])); else if (KPL == 2) *(u32*)w = pack(x[0], x[KPL > 1]); else { *(u16*)w = (u16)pack(x[0], 0.f); }
        if (l % LPR == 0) al[row] = f; return ch; };
    int sc = 0; u32 par = 0; bool ch = false; // sc: slot of tile t; par: parity of the slot of tile t + 1
    if (tiles) { mb_wait(fb, 0); zero(); u32 ka = base + kofs;
#pragma unroll
        for (int k = 0; k < KS; k++) sstep(ka, k);
        put(); __syncthreads(); soft(0); __syncthreads(); }
    for (int t = 0; t < tiles; t++) {
        int sn = sc + 1; if (sn == SL) { sn = 0; par ^= 1; }
        if (t + 1 < tiles) mb_wait(fb + 8 * sn, par);
        u32 ka = base + sn * GB + kofs, va = base + sc * GB + vofs, pa[MT][4]; zero();
#pragma unroll
        for (int m = 0; m < MT; m++) ldm(pofs + m * 16 * PP, pa[m]);
        if (ch) {
#pragma unroll
            for (int m = 0; m < MT; m++) { float f0 = al[m * 16 + g], f1 = al[m * 16 + g + 8];
#pragma unroll
                for (int i = 0; i < NT; i++) { o[m][i][0] *= f0; o[m][i][1] *= f0; o[m][i][2] *= f1; o[m][i][3] *= f1; } } }
#pragma unroll
        for (int k = 0; k < KS; k++) { sstep(ka, k);
            if (NT <= 8 ? (k & 1) && k - 1 < NT : k > 0) { int i = NT <= 8 ? k - 1 : 2 * k - 2; u32 r[4]; ldmt(va + i * 16, r);
#pragma unroll
                for (int m = 0; m < MT; m++) { mma(o[m][i], pa[m], r[0], r[1]); mma(o[m][i + 1], pa[m], r[2], r[3]); } } }
        put(); __syncthreads(); load(t + SL, sc, pg); if (t + 1 + SL < tiles) pg = __ldg(tab + tokof(t + 1 + SL) / PAGE);
        bool x = t + 1 < tiles ? soft(t + 1) : false; ch = __syncthreads_or(x); sc = sn;
    }
#pragma unroll
    for (int d = 1; d < LPR; d *= 2) ls += __shfl_xor_sync(~0u, ls, d);
    if (l % LPR == 0) { al[R + row] = tiles ? 1.f / ls : 0.f; if (splits > 1) PL[((size_t)b * splits + split) * H + hb + row] = tiles ? mx * c2 + log2f(ls) : -1e30f; } __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; m++) { float i0 = al[R + m * 16 + g], i1 = al[R + m * 16 + g + 8];
        if (splits > 1) { float* p = PO + (((size_t)b * splits + split) * H + hb + m * 16 + g) * DV + warp * COLS + c;
#pragma unroll
            for (int i = 0; i < NT; i++) { *(float2*)(p + 8 * i) = make_float2(o[m][i][0] * i0, o[m][i][1] * i0); *(float2*)(p + 8 * DV + 8 * i) = make_float2(o[m][i][2] * i1, o[m][i][3] * i1); }
        } else { u16* p = O + ((size_t)b * H + hb + m * 16 + g) * DV + warp * COLS + c;
#pragma unroll
            for (int i = 0; i < NT; i++) { *(u32*)(p + 8 * i) = pack(o[m][i][0] * i0, o[m][i][1] * i0); *(u32*)(p + 8 * DV + 8 * i) = pack(o[m][i][2] * i1, o[m][i][3] * i1); } } }
}
#define P2(name, MT, NW, SL, NG, LDV, MINB) extern "C" __global__ void __launch_bounds__(NW * 32, MINB) name(const u16* Q, const u16* C, const int* table, const int* lens, float* PO, float* PL, u16* O, int H, int maxp, float c2) { decode2<MT, NW, SL, NG, LDV>(Q, C, table, lens, PO, PL, O, H, maxp, c2); }
P2(p16_w8_s5_row, 1, 8, 5, 2, 0, 2)
P2(p16_w4_s5_row, 1, 4, 5, 1, 0, 2)
P2(p32_w8_s4_row, 2, 8, 4, 1, 0, 2)
P2(p64_w8_s4_row, 4, 8, 4, 1, 0, 1)
P2(p64_w16_s4_row, 4, 16, 4, 1, 0, 1)
P2(p16_w8_s5_pad, 1, 8, 5, 2, 1, 2)
P2(p16_w4_s5_pad, 1, 4, 5, 1, 1, 2)
P2(p32_w8_s4_pad, 2, 8, 4, 1, 1, 2)
P2(p64_w8_s4_pad, 4, 8, 4, 1, 1, 1)
P2(p64_w16_s4_pad, 4, 16, 4, 1, 1, 1)
// Third plan, roles: MT warps compute scores and softmax (a warp owns 16 heads, all of q in registers), NPV warps compute P.V; P and the rescale factors pass through shared memory.
__device__ __forceinline__ void mb_arr(u32 b) { asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t,[%0];}" :: "r"(b) : "memory"); }
template <int MT, int NPV, int SL, int LDV, int CH, int SM, int PD, int PR>
__device__ __forceinline__ void decode3(const u16* __restrict__ Q, const u16* __restrict__ C, const int* __restrict__ table, const int* __restrict__ lens, float* __restrict__ PO, float* __restrict__ PL, u16* __restrict__ O, int H, int maxp, float c2) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int R = MT * 16, COLS = DV / NPV, NT = COLS / 8, PP = 48, GE = LDV ? 584 : DK, RPW = 16 / NPV;
    unsigned char* pp = smem + SL * GB; float* al = (float*)(pp + 2 * R * PP); int* flag = (int*)(al + 2 * R); float* li = (float*)(flag + 8); u64* bars = (u64*)(li + R);
    const int tid = threadIdx.x, warp = tid >> 5, l = tid & 31, g = l >> 2, c = (l & 3) * 2, hb = blockIdx.x * R, split = blockIdx.y, splits = gridDim.y, b = blockIdx.z;
    const int len = lens[b], per = ((len + splits - 1) / splits + PAGE - 1) / PAGE * PAGE, t0 = split * per, n = min(len - t0, per), tiles = n > 0 ? (n + 15) / 16 : 0;
    const int* tab = table + (size_t)b * maxp + t0 / PAGE; const u32 base = sm32(smem), fb = sm32(bars), pf = fb + 8 * SL, pe = pf + 16, em = pe + 16, pb = sm32(pp);
    if (tid == 0) { for (int i = 0; i < SL; i++) { mb_init(fb + 8 * i, 1); mb_init(em + 8 * i, NPV); } for (int i = 0; i < 2; i++) { mb_init(pf + 8 * i, MT); mb_init(pe + 8 * i, NPV); } asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
    __syncthreads();
    if (warp < MT) {
#ifdef SETMAX
        if (SM) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(SM));
#endif
        u32 q[36][4]; { const u16* qr = Q + ((size_t)b * H + hb + warp * 16 + g) * DK + c;
#pragma unroll
            for (int k = 0; k < 36; k++) { q[k][0] = *(const u32*)(qr + k * 16); q[k][1] = *(const u32*)(qr + 8 * DK + k * 16); q[k][2] = *(const u32*)(qr + k * 16 + 8); q[k][3] = *(const u32*)(qr + 8 * DK + k * 16 + 8); } }
        float m0 = -1e30f, m1 = -1e30f, l0 = 0.f, l1 = 0.f; int s = 0; u32 par = 0; const u32 kofs = base + ((l & 7) + (l >> 4) * 8) * PITCH + ((l >> 3) & 1) * 16;
        for (int t = 0; t < tiles; t++) {
            if (t >= 2) mb_wait(pe + 8 * (t & 1), ((t >> 1) - 1) & 1); // P's buffer is free
            mb_wait(fb + 8 * s, par);
            float a[CH][2][4];
#pragma unroll
            for (int i = 0; i < CH; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) a[i][j][0] = a[i][j][1] = a[i][j][2] = a[i][j][3] = 0.f;
            u32 ka = kofs + s * GB, r[PD + 1][4];
#pragma unroll
            for (int k = 0; k < PD; k++) ldm(ka + k * 32, r[k]);
#pragma unroll
            for (int k = 0; k < 36; k++) { if (k + PD < 36) ldm(ka + (k + PD) * 32, r[(k + PD) % (PD + 1)]); u32* z = r[k % (PD + 1)]; mma(a[k % CH][0], q[k], z[0], z[1]); mma(a[k % CH][1], q[k], z[2], z[3]); }
#pragma unroll
            for (int i = 1; i < CH; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) a[0][j >> 2][j & 3] += a[i][j >> 2][j & 3];
            float (*x)[4] = a[0]; int v = n - t * 16;
            if (v < 16) {
#pragma unroll
                for (int j = 0; j < 8; j++) if ((j >> 2) * 8 + c + (j & 1) >= v) x[j >> 2][j & 3] = -1e30f; }
            float b0 = fmaxf(m0, fmaxf(fmaxf(x[0][0], x[0][1]), fmaxf(x[1][0], x[1][1]))), b1 = fmaxf(m1, fmaxf(fmaxf(x[0][2], x[0][3]), fmaxf(x[1][2], x[1][3])));
            b0 = fmaxf(b0, __shfl_xor_sync(~0u, b0, 1)); b0 = fmaxf(b0, __shfl_xor_sync(~0u, b0, 2)); b1 = fmaxf(b1, __shfl_xor_sync(~0u, b1, 1)); b1 = fmaxf(b1, __shfl_xor_sync(~0u, b1, 2));
            int any = __any_sync(~0u, b0 != m0 || b1 != m1); float f0 = ex2((m0 - b0) * c2), f1 = ex2((m1 - b1) * c2), n0 = -b0 * c2, n1 = -b1 * c2; m0 = b0; m1 = b1;
#pragma unroll
            for (int j = 0; j < 2; j++) { x[j][0] = ex2(fmaf(x[j][0], c2, n0)); x[j][1] = ex2(fmaf(x[j][1], c2, n0)); x[j][2] = ex2(fmaf(x[j][2], c2, n1)); x[j][3] = ex2(fmaf(x[j][3], c2, n1)); }
            l0 = l0 * f0 + ((x[0][0] + x[0][1]) + (x[1][0] + x[1][1])); l1 = l1 * f1 + ((x[0][2] + x[0][3]) + (x[1][2] + x[1][3]));
            unsigned char* w = pp + ((t & 1) * R + warp * 16 + g) * PP + c * 2; *(u32*)w = pack(x[0][0], x[0][1]); *(u32*)(w + 16) = pack(x[1][0], x[1][1]); *(u32*)(w + 8 * PP) = pack(x[0][2], x[0][3]); *(u32*)(w + 8 * PP + 16) = pack(x[1][2], x[1][3]);
            if (any && c == 0) { al[(t & 1) * R + warp * 16 + g] = f0; al[(t & 1) * R + warp * 16 + g + 8] = f1; } if (l == 0) flag[(t & 1) * 4 + warp] = any;
            __syncwarp(); if (l == 0) mb_arr(pf + 8 * (t & 1));
            if (++s == SL) { s = 0; par ^= 1; }
        }
        l0 += __shfl_xor_sync(~0u, l0, 1); l0 += __shfl_xor_sync(~0u, l0, 2); l1 += __shfl_xor_sync(~0u, l1, 1); l1 += __shfl_xor_sync(~0u, l1, 2);
        if (c == 0) { li[warp * 16 + g] = tiles ? 1.f / l0 : 0.f; li[warp * 16 + g + 8] = tiles ? 1.f / l1 : 0.f; if (splits > 1) { float* pl = PL + ((size_t)b * splits + split) * H + hb + warp * 16 + g; pl[0] = tiles ? m0 * c2 + log2f(l0) : -1e30f; pl[8] = tiles ? m1 * c2 + log2f(l1) : -1e30f; } }
        __syncthreads();
    } else if (PR && warp == MT + NPV) { // a warp that only loads
        int s = 0; u32 par = 1; auto tokof = [&](int gi) { return min(gi * 16 + (LDV ? 0 : l & 15), n - 1); }; int pg = tiles ? __ldg(tab + tokof(0) / PAGE) : 0;
        for (int i = 0; i < tiles; i++) {
            int nx = i + 1 < tiles ? __ldg(tab + tokof(i + 1) / PAGE) : 0;
            if (i >= SL) mb_wait(em + 8 * s, par);
            if (LDV && i * 16 + 16 <= n) { if (l == 0) { mb_tx(fb + 8 * s, GB); bulk(base + s * GB, C + ((size_t)pg * PAGE + i * 16 % PAGE) * GE, GB, fb + 8 * s); } }
            else { if (l == 0) mb_tx(fb + 8 * s, GRP * DK * 2); __syncwarp(); if (l < 16) { int tok = min(i * 16 + l, n - 1); bulk(base + s * GB + l * PITCH, C + ((size_t)(LDV ? tab[tok / PAGE] : pg) * PAGE + tok % PAGE) * GE, DK * 2, fb + 8 * s); } }
            pg = nx; if (++s == SL) { s = 0; par ^= 1; }
        }
        __syncthreads();
    } else {
#ifdef SETMAX
        if (SM) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"((504 - SM) / 16 * 8));
#endif
        const int pw = warp - MT; float o[MT][NT][4];
        const int mine = LDV ? 0 : pw * RPW + (l < RPW ? l : 0); // the row of a tile that this lane brings
        auto tokof = [&](int gi) { return min(gi * 16 + mine, n - 1); };
        auto load = [&](int gi, int s, int pg) { if (gi < tiles) {
            if (LDV) { if (pw == 0) { bool whole = gi * 16 + 16 <= n; if (l == 0) mb_tx(fb + 8 * s, whole ? GB : GRP * DK * 2); if (whole) { if (l == 0) bulk(base + s * GB, C + ((size_t)pg * PAGE + gi * 16 % PAGE) * GE, GB, fb + 8 * s); }
                else if (l < 16) { int tok = min(gi * 16 + l, n - 1); bulk(base + s * GB + l * PITCH, C + ((size_t)tab[tok / PAGE] * PAGE + tok % PAGE) * GE, DK * 2, fb + 8 * s); } } }
            else { if (pw == 0 && l == 0) mb_tx(fb + 8 * s, GRP * DK * 2); if (l < RPW) bulk(base + s * GB + mine * PITCH, C + ((size_t)pg * PAGE + tokof(gi) % PAGE) * GE, DK * 2, fb + 8 * s); } } };
        if (!PR) for (int i = 0; i < SL; i++) if (i < tiles) load(i, i, __ldg(tab + tokof(i) / PAGE));
        int pg = 0, sf = 0; if (SL < tiles) pg = __ldg(tab + tokof(SL) / PAGE);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < NT; i++) o[m][i][0] = o[m][i][1] = o[m][i][2] = o[m][i][3] = 0.f;
        const u32 vofs = base + ((l & 7) + ((l >> 3) & 1) * 8) * PITCH + (pw * COLS + (l >> 4) * 8) * 2, pofs = pb + ((l & 7) + ((l >> 3) & 1) * 8) * PP + (l >> 4) * 16; int s = 0; u32 par = 0;
        for (int t = 0; t < tiles; t++) {
            if (!PR && t > 0 && (!LDV || pw == 0)) { mb_wait(pe + 8 * ((t - 1) & 1), ((t - 1) >> 1) & 1); load(t - 1 + SL, sf, pg); sf = sf + 1 == SL ? 0 : sf + 1; if (t + SL < tiles) pg = __ldg(tab + tokof(t + SL) / PAGE); }
            mb_wait(fb + 8 * s, par); u32 pa[MT][4], va = vofs + s * GB, r[2][4]; ldmt(va, r[0]); mb_wait(pf + 8 * (t & 1), (t >> 1) & 1);
#pragma unroll
            for (int m = 0; m < MT; m++) ldm(pofs + ((t & 1) * R + m * 16) * PP, pa[m]);
#pragma unroll
            for (int m = 0; m < MT; m++) if (flag[(t & 1) * 4 + m]) { float f0 = al[(t & 1) * R + m * 16 + g], f1 = al[(t & 1) * R + m * 16 + g + 8];
#pragma unroll
                for (int i = 0; i < NT; i++) { o[m][i][0] *= f0; o[m][i][1] *= f0; o[m][i][2] *= f1; o[m][i][3] *= f1; } }
#pragma unroll
            for (int i = 0; i < NT; i += 2) { if (i + 2 < NT) ldmt(va + (i + 2) * 16, r[(i / 2 + 1) & 1]); u32* z = r[(i / 2) & 1];
#pragma unroll
                for (int m = 0; m < MT; m++) { mma(o[m][i], pa[m], z[0], z[1]); mma(o[m][i + 1], pa[m], z[2], z[3]); } }
            __syncwarp(); if (l == 0) { mb_arr(pe + 8 * (t & 1)); if (PR) mb_arr(em + 8 * s); }
            if (++s == SL) { s = 0; par ^= 1; }
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < MT; m++) { float i0 = li[m * 16 + g], i1 = li[m * 16 + g + 8];
            if (splits > 1) { float* p = PO + (((size_t)b * splits + split) * H + hb + m * 16 + g) * DV + pw * COLS + c;
#pragma unroll
                for (int i = 0; i < NT; i++) { *(float2*)(p + 8 * i) = make_float2(o[m][i][0] * i0, o[m][i][1] * i0); *(float2*)(p + 8 * DV + 8 * i) = make_float2(o[m][i][2] * i1, o[m][i][3] * i1); }
            } else { u16* p = O + ((size_t)b * H + hb + m * 16 + g) * DV + pw * COLS + c;
#pragma unroll
                for (int i = 0; i < NT; i++) { *(u32*)(p + 8 * i) = pack(o[m][i][0] * i0, o[m][i][1] * i0); *(u32*)(p + 8 * DV + 8 * i) = pack(o[m][i][2] * i1, o[m][i][3] * i1); } } }
    }
}
#define P3(name, MT, NPV, SL, LDV, CH, SM, PD, PR, MINB) extern "C" __global__ void __launch_bounds__((MT + NPV + PR) * 32, MINB) name(const u16* Q, const u16* C, const int* table, const int* lens, float* PO, float* PL, u16* O, int H, int maxp, float c2) { decode3<MT, NPV, SL, LDV, CH, SM, PD, PR>(Q, C, table, lens, PO, PL, O, H, maxp, c2); }
P3(r64_c1_pd1_pad, 4, 8, 5, 1, 1, 0, 1, 0, 1)
P3(r64_c2_pad_s200, 4, 8, 5, 1, 2, 200, 1, 0, 1)
P3(r64_c2_row_s200, 4, 8, 5, 0, 2, 200, 1, 0, 1)
P3(r16_v2_row, 1, 2, 5, 0, 2, 0, 1, 0, 2)
P3(r16_v2_pad, 1, 2, 5, 1, 2, 0, 1, 0, 2)
P3(r16_v2_row_prod, 1, 2, 5, 0, 2, 0, 1, 1, 2)
P3(r16_v2_pad_prod, 1, 2, 5, 1, 2, 0, 1, 1, 2)
P3(r16_v4_row, 1, 4, 5, 0, 2, 0, 1, 0, 1)
P3(r32_v4_pad, 2, 4, 5, 1, 2, 0, 1, 0, 1)
P3(r32_v4_row_prod, 2, 4, 5, 0, 2, 0, 1, 1, 1)
P3(r32_v4_pad_prod, 2, 4, 5, 1, 2, 0, 1, 1, 1)
