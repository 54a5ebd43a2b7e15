// Control flow, collectives, atomics, half arithmetic and float64 division, which the MLA kernels do not use.
typedef unsigned int u32; typedef unsigned short u16;
extern "C" __global__ void divergent(const u32* x, u32* out, u32* total, float* sum) {
  __shared__ u32 count[4];
  int t = threadIdx.x, lane = t & 31;
  if (t < 4) count[t] = 0;
  __syncthreads();
  u32 v = x[t], r = 0;
  switch (v & 7) {
    case 0: for (u32 i = 0; i < (v & 15); ++i) r += i * v; break;
    case 1: r = __brev(v); break;
    case 2: r = __clz(v); break;
    case 3: r = __popc(v); break;
    case 4: r = __byte_perm(v, v * 3, 0x5140); break;
    case 5: r = v / 7 + v % 5; break;
    case 6: for (u32 i = v & 31; i; i >>= 1) r ^= i << (v & 3); break;
    default: r = v >> 3; break;
  }
  u32 b = __ballot_sync(0xffffffffu, r & 1), any = __any_sync(0xffffffffu, r == 5);
  u32 s = __reduce_add_sync(0xffffffffu, r);
  atomicAdd(&count[t & 3], r & 0xff);
  atomicAdd(total, 1u); atomicMax(total + 1, r); atomicAdd(sum, (float)(lane & 3));
  asm volatile("bar.sync 1, 64;" ::: "memory");
  out[t] = r + b + any + s + count[t & 3];
}
extern "C" __global__ void half_math(const u16* a, const u16* b, u16* out) {
  int t = threadIdx.x; u16 x = a[t], y = b[t], s, m, f; u32 p, q;
  asm("add.f16 %0, %1, %2;" : "=h"(s) : "h"(x), "h"(y));
  asm("mul.f16 %0, %1, %2;" : "=h"(m) : "h"(x), "h"(y));
  asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(f) : "h"(x), "h"(y), "h"(s));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(p) : "r"((u32)x << 16 | y), "r"((u32)y << 16 | x), "r"((u32)s << 16 | m));
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(q) : "r"((u32)x << 16 | y), "r"((u32)y << 16 | x), "r"((u32)s << 16 | m));
  u16* o = out + t * 7; o[0] = s; o[1] = m; o[2] = f; o[3] = (u16)p; o[4] = (u16)(p >> 16); o[5] = (u16)q; o[6] = (u16)(q >> 16);
}
extern "C" __global__ void double_math(const double* a, const double* b, double* out) {
  int t = threadIdx.x; out[2 * t] = a[t] / b[t]; out[2 * t + 1] = sqrt(a[t]) * b[t];
}
