/*---
version = 1

[[kernel]]
entry = "dequant_f32"
type = "F32"
threads = "256"
grid = ["cdiv(blocks, 256 * 8)"]

[[kernel]]
entry = "dequant_f16"
type = "F16"
threads = "256"
grid = ["cdiv(blocks, 256 * 8)"]

[[kernel]]
entry = "dequant_bf16"
type = "BF16"
threads = "256"
grid = ["cdiv(blocks, 256 * 8)"]

[[kernel]]
entry = "dequant_q4_0"
type = "Q4_0"
threads = "256"
grid = ["cdiv(blocks, 256 / 4)"]

[[kernel]]
entry = "dequant_q4_1"
type = "Q4_1"
threads = "256"
grid = ["cdiv(blocks, 256 / 4)"]

[[kernel]]
entry = "dequant_q5_0"
type = "Q5_0"
threads = "256"
grid = ["cdiv(blocks, 256 / 4)"]

[[kernel]]
entry = "dequant_q5_1"
type = "Q5_1"
threads = "256"
grid = ["cdiv(blocks, 256 / 4)"]

[[kernel]]
entry = "dequant_q8_0"
type = "Q8_0"
threads = "256"
grid = ["cdiv(blocks, 256 / 4)"]

[[kernel]]
entry = "dequant_q2_k"
type = "Q2_K"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_q3_k"
type = "Q3_K"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_q4_k"
type = "Q4_K"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_q5_k"
type = "Q5_K"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_q6_k"
type = "Q6_K"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_iq4_nl"
type = "IQ4_NL"
threads = "256"
grid = ["cdiv(blocks, 256 / 4)"]

[[kernel]]
entry = "dequant_iq4_xs"
type = "IQ4_XS"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]
---*/
// Blocks of ggml's types to bf16: the exact value of each element, rounded once, to nearest even.
//
// A thread makes eight elements that follow each other and stores them as 16 bytes: four threads a block of 32, a warp a
// block of 256. The eight codes lie in eight bytes of the block that follow each other, each in the same bits of its
// byte, so that four at a time are taken apart in one register.
//
// All arithmetic is float32 and still rounds once; nothing needs float64, of which consumer GPUs do little. A scale is an
// f16, 11 bits of significand, times a whole number:
//
// | type | bits of scale x code | |
// |---|---|---|
// | Q4_0, Q5_0, Q8_0, IQ4_NL | 11 + 3, 4, 7, 7 | the value: exact |
// | Q3_K, Q6_K, IQ4_XS | 11 + 5 + 2, 11 + 7 + 5, 11 + 5 + 7 | the value: exact |
// | Q4_1, Q5_1 | 11 + 4, 5 | exact; plus a minimum of 11 bits |
// | Q2_K, Q4_K, Q5_K | 11 + 4 + 2, 11 + 6 + 4, 11 + 6 + 5 | exact; minus a minimum of 11 + 4, 6, 6 bits, exact |
//
// (-8, -16, -128, -32 and -4, which take a bit more, are powers of two.) At most 23 of float32's 24 bits, between 2^-24
// and 2^29: nothing rounds, nothing is subnormal. Only the sum with a minimum can be longer than float32's 24 bits. It is
// rounded to them to odd, and then to bf16's 8 to nearest, which gives what rounding the sum itself would: two bits to
// spare are enough (Boldo and Melquiond 2008, Emulation of FMA and Correctly Rounded Sums).
//
// Layouts: ggml 0.25.3, block structures of `ggml-common.h`.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

// `blocks` is aligned to the largest power of two, 16 at most, that divides the bytes of a block (F32, F16, BF16: to 16);
// `out` to 16. They do not overlap.
struct Dequant {
    const u8* blocks;
    u16* out;   // [count][elements of a block], bf16
    u64 count;  // blocks; F32, F16, BF16: elements
};

constexpr int THREADS = 256;

DEVICE u64 thread_index() { return u64(blockIdx.x) * THREADS + threadIdx.x; }

// ---- numbers

DEVICE float widen_half(u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(u16(bits)));
    return x;
}

// Two floats to bf16, to nearest even; `low` at the lower address.
DEVICE u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// a b + c rounded to odd: itself where it is a float, else that of its two neighbours whose last bit is 1. Of the two
// zeros an exact 0 gives `up`'s, which is that of rounding to nearest.
DEVICE float fma_odd(float a, float b, float c) {
    const float down = __fmaf_rd(a, b, c), up = __fmaf_ru(a, b, c);
    return __float_as_uint(down) & 1 ? down : up;
}

// ---- codes

// Eight codes, a byte each, in order.
struct Codes {
    u32 w[2];
};

// The largest power of two, 8 at most, that divides all distances from an aligned `blocks` to byte `at` of a block.
DEVICE constexpr int alignment(int block, int at) {
    int a = 8;
    while (block % a || at % a) a /= 2;
    return a;
}

// The eight bytes at `at`, by the widest loads that their alignment allows.
template <int ALIGNMENT> DEVICE Codes load(const u8* at) {
    static_assert(ALIGNMENT >= 2, "blocks are whole f16");
    if constexpr (ALIGNMENT == 8) {
        const uint2 v = __ldg((const uint2*)at);
        return {v.x, v.y};
    } else if constexpr (ALIGNMENT == 4) {
        return {__ldg((const u32*)at), __ldg((const u32*)at + 1)};
    } else {
        const u16* h = (const u16*)at;
        return {__ldg(h) | u32(__ldg(h + 1)) << 16, __ldg(h + 2) | u32(__ldg(h + 3)) << 16};
    }
}

DEVICE u32 byte(const u8* at) { return __ldg(at); }
DEVICE u32 word16(const u8* at) { return __ldg((const u16*)at); }
DEVICE float half_at(const u8* at) { return widen_half(word16(at)); }

// `width` bits of each byte, from bit `shift`.
DEVICE Codes bits(Codes c, u32 shift, int width) {
    const u32 mask = ((1u << width) - 1) * 0x01010101u;
    return {c.w[0] >> shift & mask, c.w[1] >> shift & mask};
}

// `low` with the bits `high` above its `width` bits.
DEVICE Codes join(Codes low, Codes high, int width) {
    return {low.w[0] | high.w[0] << width, low.w[1] | high.w[1] << width};
}

// The eight bits of a byte as codes.
DEVICE Codes spread(u32 b) {
    // Four copies of four bits, 7 apart: bit i of copy i lies at 8 i.
    return {((b & 15) * 0x00204081u) & 0x01010101u, ((b >> 4) * 0x00204081u) & 0x01010101u};
}

// Code `i` minus `zero`, exactly: the float with the bits 0x4b0000cc is 2^23 + c.
DEVICE float value(const Codes& c, int i, int zero) {
    return __uint_as_float(__byte_perm(c.w[i / 4], 0x4b000000u, 0x7440 | i % 4)) - float(8388608 + zero);
}

// ---- IQ4's table

constexpr int TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int TABLE_ZERO = 127;

// Entries 4 i to 4 i + 3, plus TABLE_ZERO, a byte each.
DEVICE constexpr u32 entries(int i) {
    u32 w = 0;
    for (int j = 0; j < 4; j++) w |= u32(TABLE[4 * i + j] + TABLE_ZERO) << (8 * j);
    return w;
}

// Four codes looked up: by their low three bits in both halves of the table, then by the fourth bit.
DEVICE u32 look_up(u32 codes) {
    constexpr u32 A = entries(0), B = entries(1), C = entries(2), D = entries(3);
    u32 low3 = codes & 0x07070707u;
    low3 |= low3 >> 4;
    const u32 selector = __byte_perm(low3, 0, 0x4420);
    const u32 mask = (codes >> 3 & 0x01010101u) * 0xff;
    return (__byte_perm(A, B, selector) & ~mask) | (__byte_perm(C, D, selector) & mask);
}

DEVICE Codes look_up(Codes c) { return {look_up(c.w[0]), look_up(c.w[1])}; }

// ---- types: part `p` of a block, its elements 8 p to 8 p + 7

// Their values are (code - ZERO) scale + offset, without the sum where there is no minimum: it would turn -0 to +0.
struct Part {
    Codes codes;
    float scale, offset;
};

// Split nibbles: byte j of 16 holds element j in its low and element j + 16 in its high nibble.
template <int BYTES, int QS> DEVICE Codes split(const u8* qs, u32 p) {
    return bits(load<alignment(BYTES, QS)>(qs + p % 2 * 8), p / 2 * 4, 4);
}

// Blocks of 32: f16 d at 0, with a minimum f16 m at 2; fifth bits at QH, if any; split nibbles at QS.
template <int BYTES_, bool MINIMUM_, int QH, int QS, int ZERO_> struct Split {
    static constexpr int ELEMENTS = 32, BYTES = BYTES_, ZERO = ZERO_;
    static constexpr bool MINIMUM = MINIMUM_;
    static DEVICE Part part(const u8* b, u32 p) {
        Codes codes = split<BYTES, QS>(b + QS, p);
        if constexpr (QH != 0) codes = join(codes, spread(byte(b + QH + p)), 4);
        return {codes, half_at(b), MINIMUM ? half_at(b + 2) : 0.f};
    }
};
using Q4_0 = Split<18, false, 0, 2, 8>;
using Q4_1 = Split<20, true, 0, 4, 0>;
using Q5_0 = Split<22, false, 2, 6, 16>;
using Q5_1 = Split<24, true, 4, 8, 0>;

// f16 d 0, int8 qs 2.
struct Q8_0 {
    static constexpr int ELEMENTS = 32, BYTES = 34, ZERO = 128;
    static constexpr bool MINIMUM = false;
    static DEVICE Part part(const u8* b, u32 p) {
        const Codes c = load<alignment(BYTES, 2)>(b + 2 + 8 * p);
        return {{c.w[0] ^ 0x80808080u, c.w[1] ^ 0x80808080u}, half_at(b), 0.f};
    }
};

// f16 d 0, qs 2.
struct IQ4_NL {
    static constexpr int ELEMENTS = 32, BYTES = 18, ZERO = TABLE_ZERO;
    static constexpr bool MINIMUM = false;
    static DEVICE Part part(const u8* b, u32 p) { return {look_up(split<BYTES, 2>(b + 2, p)), half_at(b), 0.f}; }
};

// f16 d 0, high bits of scales u16 2, low nibbles of scales 4, qs 8: eight groups of 32.
struct IQ4_XS {
    static constexpr int ELEMENTS = 256, BYTES = 136, ZERO = TABLE_ZERO;
    static constexpr bool MINIMUM = false;
    static DEVICE Part part(const u8* b, u32 p) {
        const u32 g = p / 4;
        const u32 low = byte(b + 4 + g / 2) >> g % 2 * 4 & 15, high = word16(b + 2) >> 2 * g & 3;
        const float scale = half_at(b) * float(int(low | high << 4) - 32);
        return {look_up(split<BYTES, 8>(b + 8 + 16 * g, p % 4)), scale, 0.f};
    }
};

// Blocks of 256 are two halves of 128 and each of these four quarters of 32. With one bit for each element, byte l holds
// element l of all eight quarters; with two, byte 32 n + l element l of the four quarters of half n.
struct Place {
    u32 quarter, half, l;
    DEVICE explicit Place(u32 p) : quarter(p / 4), half(p / 16), l(p % 4 * 8) {}
};

// scales 0, qs 16, d 80, dmin 82: 16 groups of 16, scale and minimum in the nibbles of one byte.
struct Q2_K {
    static constexpr int ELEMENTS = 256, BYTES = 84, ZERO = 0;
    static constexpr bool MINIMUM = true;
    static DEVICE Part part(const u8* b, u32 p) {
        const Place at(p);
        const Codes codes = bits(load<alignment(BYTES, 16)>(b + 16 + 32 * at.half + at.l), at.quarter % 4 * 2, 2);
        const u32 s = byte(b + p / 2);
        return {codes, half_at(b + 80) * float(s & 15), -(half_at(b + 82) * float(s >> 4))};
    }
};

// hmask 0, qs 32, scales 96, d 108: 16 groups of 16. Scales of 6 bits: low nibbles in bytes 0 to 7 (of groups 8 to 15 the
// high nibbles), two high bits in bytes 8 to 11.
struct Q3_K {
    static constexpr int ELEMENTS = 256, BYTES = 110, ZERO = 4;
    static constexpr bool MINIMUM = false;
    static DEVICE Part part(const u8* b, u32 p) {
        const Place at(p);
        const Codes low = bits(load<alignment(BYTES, 32)>(b + 32 + 32 * at.half + at.l), at.quarter % 4 * 2, 2);
        const Codes high = bits(load<alignment(BYTES, 0)>(b + at.l), at.quarter, 1);
        const u32 g = p / 2, nibble = byte(b + 96 + g % 8) >> g / 8 * 4 & 15;
        const u32 above = byte(b + 104 + g % 4) >> g / 4 * 2 & 3;
        return {join(low, high, 2), half_at(b + 108) * float(int(nibble | above << 4) - 32), 0.f};
    }
};

// d 0, dmin 2, scales 4, fifth bits at QH, if any, qs QS: eight groups of 32. Scales and minima of 6 bits: of groups 0 to
// 3 in the low bits of bytes k and k + 4; of groups 4 to 7 in the nibbles of byte k + 4, with the top bits of bytes
// k - 4 and k.
template <int BYTES_, int QH, int QS> struct Six {
    static constexpr int ELEMENTS = 256, BYTES = BYTES_, ZERO = 0;
    static constexpr bool MINIMUM = true;
    static DEVICE Part part(const u8* b, u32 p) {
        const Place at(p);
        const u32 k = at.quarter;
        Codes codes = bits(load<alignment(BYTES, QS)>(b + QS + 32 * (k / 2) + at.l), k % 2 * 4, 4);
        if constexpr (QH != 0) codes = join(codes, bits(load<alignment(BYTES, QH)>(b + QH + at.l), k, 1), 4);
        const u8* s = b + 4 + k % 4;
        const u32 x = byte(s), y = byte(s + 4), z = byte(s + 8);
        const u32 scale = k < 4 ? x & 63 : (z & 15) | x >> 6 << 4, minimum = k < 4 ? y & 63 : z >> 4 | y >> 6 << 4;
        return {codes, half_at(b) * float(scale), -(half_at(b + 2) * float(minimum))};
    }
};
using Q4_K = Six<144, 0, 16>;
using Q5_K = Six<176, 16, 48>;

// ql 0, qh 128, int8 scales 192, d 208: 16 groups of 16. Low nibbles of quarters 0 and 1 of a half, then, in the high
// nibbles of the same bytes, of 2 and 3.
struct Q6_K {
    static constexpr int ELEMENTS = 256, BYTES = 210, ZERO = 32;
    static constexpr bool MINIMUM = false;
    static DEVICE Part part(const u8* b, u32 p) {
        const Place at(p);
        const u32 j = at.quarter % 4;
        const Codes low = bits(load<alignment(BYTES, 0)>(b + 64 * at.half + 32 * (j % 2) + at.l), j / 2 * 4, 4);
        const Codes high = bits(load<alignment(BYTES, 128)>(b + 128 + 32 * at.half + at.l), 2 * j, 2);
        return {join(low, high, 4), half_at(b + 208) * float((signed char)byte(b + 192 + p / 2)), 0.f};
    }
};

template <class T> DEVICE void dequantise(const Dequant& d) {
    constexpr int PARTS = T::ELEMENTS / 8;
    const u64 t = thread_index(), block = t / PARTS;
    if (block >= d.count) return;
    const Part part = T::part(d.blocks + block * T::BYTES, u32(t) % PARTS);
    u32 out[4];
    UNROLL for (int i = 0; i < 4; i++) {
        float x[2];
        UNROLL for (int j = 0; j < 2; j++) {
            const float q = value(part.codes, 2 * i + j, T::ZERO);
            x[j] = T::MINIMUM ? fma_odd(q, part.scale, part.offset) : q * part.scale;
        }
        out[i] = pack(x[0], x[1]);
    }
    ((uint4*)d.out)[t] = {out[0], out[1], out[2], out[3]};
}

// ---- types without blocks: elements 2 i and 2 i + 1 of some words

struct F32 {
    using Word = u32;
    static DEVICE u32 pair(const u32* w, int i) { return pack(__uint_as_float(w[2 * i]), __uint_as_float(w[2 * i + 1])); }
};
struct F16 {
    using Word = u16;
    static DEVICE u32 pair(const u32* w, int i) { return pack(widen_half(w[i]), widen_half(w[i] >> 16)); }
};
struct BF16 {
    using Word = u16;
    static DEVICE u32 pair(const u32* w, int i) { return w[i]; }
};

template <class T> DEVICE void convert(const Dequant& d) {
    using Word = typename T::Word;
    constexpr int VECTORS = sizeof(Word) / 2;
    const u64 t = thread_index(), first = 8 * t;
    if (first + 8 <= d.count) {
        u32 w[4 * VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const uint4 x = __ldg((const uint4*)d.blocks + VECTORS * t + v);
            w[4 * v] = x.x, w[4 * v + 1] = x.y, w[4 * v + 2] = x.z, w[4 * v + 3] = x.w;
        }
        ((uint4*)d.out)[t] = {T::pair(w, 0), T::pair(w, 1), T::pair(w, 2), T::pair(w, 3)};
    } else {
        // Not unrolled: one thread of the launch comes here.
#pragma unroll 1
        for (u64 i = first; i < d.count; i++) {
            const u32 w[2] = {__ldg((const Word*)d.blocks + i), 0};
            d.out[i] = u16(T::pair(w, 0));
        }
    }
}

#define KERNEL(name, function, type)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Dequant d) { \
        function<type>(d);                                                                      \
    }

KERNEL(dequant_f32, convert, F32)
KERNEL(dequant_f16, convert, F16)
KERNEL(dequant_bf16, convert, BF16)
KERNEL(dequant_q4_0, dequantise, Q4_0)
KERNEL(dequant_q4_1, dequantise, Q4_1)
KERNEL(dequant_q5_0, dequantise, Q5_0)
KERNEL(dequant_q5_1, dequantise, Q5_1)
KERNEL(dequant_q8_0, dequantise, Q8_0)
KERNEL(dequant_q2_k, dequantise, Q2_K)
KERNEL(dequant_q3_k, dequantise, Q3_K)
KERNEL(dequant_q4_k, dequantise, Q4_K)
KERNEL(dequant_q5_k, dequantise, Q5_K)
KERNEL(dequant_q6_k, dequantise, Q6_K)
KERNEL(dequant_iq4_nl, dequantise, IQ4_NL)
KERNEL(dequant_iq4_xs, dequantise, IQ4_XS)
