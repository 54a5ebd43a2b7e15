// One mma a block, its fragments put together element by element: what a tensor core makes of a tile.
typedef unsigned int u32;
typedef unsigned short u16;

template <int F16>
__device__ void tile(const u16* A, const u16* B, const float* C, float* D) {
  // A [16][16], B [16][8], C and D [16][8]; fragments as the PTX manual lays them out for m16n8k16.
  const int group = threadIdx.x >> 2, pair = (threadIdx.x & 3) * 2;
  const size_t t = blockIdx.x;
  A += t * 256;
  B += t * 128;
  C += t * 128;
  D += t * 128;
  u32 a[4], b[2];
  float d[4];
  for (int q = 0; q < 4; ++q) {
    const u16* p = A + (group + 8 * (q & 1)) * 16 + pair + 8 * (q >> 1);
    a[q] = p[0] | (u32)p[1] << 16;
  }
  for (int q = 0; q < 2; ++q) {
    const u16* p = B + (pair + 8 * q) * 8 + group;
    b[q] = p[0] | (u32)p[8] << 16;
  }
  for (int q = 0; q < 4; ++q) d[q] = C[(group + 8 * (q >> 1)) * 8 + pair + (q & 1)];
#define MMA(TYPE)                                                                                        \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                     \
               ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"                                  \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if (F16) MMA("f16");
  else MMA("bf16");
  for (int q = 0; q < 4; ++q) D[(group + 8 * (q >> 1)) * 8 + pair + (q & 1)] = d[q];
}

extern "C" __global__ void tile_bf16(const u16* A, const u16* B, const float* C, float* D) { tile<0>(A, B, C, D); }
extern "C" __global__ void tile_f16(const u16* A, const u16* B, const float* C, float* D) { tile<1>(A, B, C, D); }
