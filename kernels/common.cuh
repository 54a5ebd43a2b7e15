// What the kernels share: names of types, and one function for each instruction that C++ has no word for.
//
// Nothing here branches on the architecture: the same source computes the same bits everywhere. It does branch on what tensors
// are stored in, an `element`: the host passes ELEMENT_BF16, ELEMENT_F16 or ELEMENT_F32.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;  // the bits of a bf16 or an f16
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

constexpr u32 ALL = 0xffffffffu;
constexpr float LN_2 = 0.6931471805599453f;
DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

// 2^x, relative error below 2^-22.
DEVICE float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2 x, error below 2^-22.
DEVICE float log2_(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The value of an f16.
DEVICE float widen_half(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// An element: two of them are a Pair, `low` at the lower address. 16 bits are rounded to nearest even; what is beyond an f16's
// largest number is infinite.
#ifdef ELEMENT_F32
typedef float element;
typedef float2 Pair;
DEVICE float widen(float x) { return x; }
DEVICE float narrow(float x) { return x; }
DEVICE Pair pack(float low, float high) { return make_float2(low, high); }
#else
#ifdef ELEMENT_F16
#define ELEMENT "f16"
DEVICE float widen(u16 bits) { return widen_half(bits); }
#else
#define ELEMENT "bf16"
DEVICE float widen(u16 bits) { return __uint_as_float(u32(bits) << 16); }
#endif
typedef u16 element;
typedef u32 Pair;
DEVICE Pair pack(float low, float high) {
    u32 r;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE u16 narrow(float x) { return u16(pack(x, 0.f)); }

// d += a b: 16 x 16 by 16 x 8, accumulated in float32 by the tensor core.
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// The warp's index. The shuffle tells the compiler that it is the same in all lanes, and so is what branches on it.
DEVICE int warp_index() { return __shfl_sync(ALL, threadIdx.x >> 5, 0); }

// Four 8 x 8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32 address, u32 (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// The same, each transposed.
DEVICE void load_transposed(u32 address, u32 (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// 16 bytes to shared memory without waiting; zeros where `there` is false, and then nothing is read.
DEVICE void copy_async(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N groups are under way.
template <int N> DEVICE void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// Sum over the lanes of a warp; every lane has the result, and the order is the same for all.
DEVICE float warp_sum(float x) {
    UNROLL for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(ALL, x, d);
    return x;
}
