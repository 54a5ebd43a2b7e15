// Blocks of ggml's types to elements: the exact value of each, rounded once, to nearest even. What all kernels for it
// share; which file has which type: docs/kernels.md.
//
// A thread makes eight elements that follow each other and stores them 16 bytes at a time: four threads a block of 32, a warp a
// block of 256. The eight codes lie in eight bytes of the block that follow each other, each in the same bits of its
// byte, so that four at a time are taken apart in one register.
//
// All arithmetic is float32 and still rounds once; nothing needs float64, of which consumer GPUs do little. A scale is an
// f16, 11 bits of significand, times a whole number:
//
// | type | bits of scale x code | |
// |---|---|---|
// | Q4_0, Q5_0, Q8_0, Q8_1, IQ4_NL | 11 + 3, 4, 7, 7, 7 | the value: exact |
// | Q1_0, Q2_0, TQ1_0, TQ2_0 | 11 + 1, 2, 1, 2 | the value: exact |
// | Q3_K, Q6_K, IQ4_XS | 11 + 5 + 2, 11 + 7 + 5, 11 + 5 + 7 | the value: exact |
// | IQ2_*, IQ3_XXS, IQ3_S, IQ1_* | 11 + 5 + 6, 11 + 5 + 6, 11 + 5 + 4, 11 + 4 + 4 | the value: exact |
// | MXFP4, NVFP4 | 1 + 4, 4 + 4: a power of two or an E4M3 times the code | the value: exact |
// | Q4_1, Q5_1 | 11 + 4, 5 | exact; plus a minimum of 11 bits |
// | Q2_K, Q4_K, Q5_K | 11 + 4 + 2, 11 + 6 + 4, 11 + 6 + 5 | exact; minus a minimum of 11 + 4, 6, 6 bits, exact |
//
// (-8, -16, -128, -32 and -4, which take a bit more, are powers of two.) At most 23 of float32's 24 bits, between 2^-24
// and 2^29: nothing rounds, nothing is subnormal (but MXFP4's smallest scales, which float32 holds, and its largest products,
// which are infinite in bf16 and f16 too). Longer than float32's 24 bits can be the sum with a minimum, Q8_K's product of a
// float32 and a code, F64 and large whole numbers. They are rounded to 24 bits to odd, and then to the 8 of bf16 or the 11 of
// f16 (fewer where it is subnormal) to nearest, which gives what one rounding would: two bits to spare are enough (Boldo and
// Melquiond 2008, Emulation of FMA and Correctly Rounded Sums).
//
// Layouts: ggml 0.25.3, block structures of `ggml-common.h`.

#include "common.cuh"

// `blocks` is aligned to the largest power of two, 16 at most, that divides the bytes of a block (types without blocks:
// of eight elements); `out` to 16. They do not overlap.
struct Dequant {
    const u8* blocks;
    element* out;  // [count][elements of a block]
    u64 count;     // blocks; of types without them: elements
};

constexpr int THREADS = 256;

DEVICE u64 thread_index() { return u64(blockIdx.x) * THREADS + threadIdx.x; }

// ---- numbers

// Eight elements, as four pairs.
DEVICE void store(element* out, u64 t, const Pair (&x)[4]) {
#ifdef ELEMENT_F32
    ((float4*)out)[2 * t] = make_float4(x[0].x, x[0].y, x[1].x, x[1].y);
    ((float4*)out)[2 * t + 1] = make_float4(x[2].x, x[2].y, x[3].x, x[3].y);
#else
    ((uint4*)out)[t] = {x[0], x[1], x[2], x[3]};
#endif
}

// What is longer than a float32 has to be rounded so that the element is rounded once: a 16-bit one needs the float32
// rounded to odd, of the neighbours below and above the one whose last bit is 1; a float32 is the element itself.
#ifdef ELEMENT_F32
DEVICE element low_of(Pair x) { return x.x; }
DEVICE float long_fma(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float long_mul(float a, float b) { return a * b; }
DEVICE float shorten(double x) { return __double2float_rn(x); }
DEVICE float shorten(int x) { return __int2float_rn(x); }
#else
DEVICE element low_of(Pair x) { return element(x); }
// A float is both neighbours of its own.
DEVICE float odd(float down, float up) { return __float_as_uint(down) & 1 ? down : up; }
// Of the two zeros an exact 0 gives that of rounding up, which is that of rounding to nearest.
DEVICE float long_fma(float a, float b, float c) { return odd(__fmaf_rd(a, b, c), __fmaf_ru(a, b, c)); }
DEVICE float long_mul(float a, float b) { return odd(__fmul_rd(a, b), __fmul_ru(a, b)); }
DEVICE float shorten(double x) { return odd(__double2float_rd(x), __double2float_ru(x)); }
DEVICE float shorten(int x) { return odd(__int2float_rd(x), __int2float_ru(x)); }
#endif

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
    if constexpr (ALIGNMENT == 8) {
        const uint2 v = __ldg((const uint2*)at);
        return {v.x, v.y};
    } else if constexpr (ALIGNMENT == 4) {
        return {__ldg((const u32*)at), __ldg((const u32*)at + 1)};
    } else if constexpr (ALIGNMENT == 2) {
        const u16* h = (const u16*)at;
        return {__ldg(h) | u32(__ldg(h + 1)) << 16, __ldg(h + 2) | u32(__ldg(h + 3)) << 16};
    } else {
        Codes c = {0, 0};
        UNROLL for (int i = 0; i < 8; i++) c.w[i / 4] |= u32(__ldg(at + i)) << (8 * (i % 4));
        return c;
    }
}

DEVICE u32 byte(const u8* at) { return __ldg(at); }
DEVICE u32 word16(const u8* at) { return __ldg((const u16*)at); }
DEVICE u32 word32(const u8* at) { return word16(at) | word16(at + 2) << 16; }  // at an even place
DEVICE float half_at(const u8* at) { return widen_half(u16(word16(at))); }

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

// Four codes of two bits in a byte, of three bits in twelve bits.
DEVICE u32 spread_twos(u32 x) { return (x | x << 6 | x << 12 | x << 18) & 0x03030303u; }
DEVICE u32 spread_threes(u32 x) { return (x & 07) | (x & 070) << 5 | (x & 0700) << 10 | (x & 07000) << 15; }

// Four codes of at most three bits, looked up in a table of eight bytes.
DEVICE u32 look_up8(u32 codes, u32 a, u32 b) {
    codes |= codes >> 4;
    return __byte_perm(a, b, __byte_perm(codes, 0, 0x4420));
}

// Four codes of four bits, looked up in a table of sixteen bytes: in both halves, then by the fourth bit.
DEVICE u32 look_up16(u32 codes, u32 a, u32 b, u32 c, u32 d) {
    const u32 low3 = codes & 0x07070707u, mask = (codes >> 3 & 0x01010101u) * 0xff;
    return (look_up8(low3, a, b) & ~mask) | (look_up8(low3, c, d) & mask);
}

// Code `i` minus `zero`, exactly: the float with the bits 0x4b0000cc is 2^23 + c.
DEVICE float value(const Codes& c, int i, int zero) {
    return __uint_as_float(__byte_perm(c.w[i / 4], 0x4b000000u, 0x7440 | i % 4)) - float(8388608 + zero);
}

// ---- types: part `p` of a block, its elements 8 p to 8 p + 7

// Their values are (code - ZERO) scale + offset, without the sum where there is no minimum: it would turn -0 to +0. LAST is the
// last operation, and whether it can round.
enum Last { PRODUCT, LONG_PRODUCT, SUM };

struct Part {
    Codes codes;
    float scale, offset;
};

// Split nibbles: byte j of 16 holds element j in its low and element j + 16 in its high nibble.
template <int BYTES, int QS> DEVICE Codes split(const u8* qs, u32 p) {
    return bits(load<alignment(BYTES, QS)>(qs + p % 2 * 8), p / 2 * 4, 4);
}

// Blocks of 256 are two halves of 128 and each of these four quarters of 32. With one bit for each element, byte l holds
// element l of all eight quarters; with two, byte 32 n + l element l of the four quarters of half n.
struct Place {
    u32 quarter, half, l;
    DEVICE explicit Place(u32 p) : quarter(p / 4), half(p / 16), l(p % 4 * 8) {}
};

template <class T> DEVICE void dequantise(const Dequant& d) {
    constexpr int PARTS = T::ELEMENTS / 8;
    const u64 t = thread_index(), block = t / PARTS;
    if (block >= d.count) return;
    const Part part = T::part(d.blocks + block * T::BYTES, u32(t) % PARTS);
    Pair out[4];
    UNROLL for (int i = 0; i < 4; i++) {
        float x[2];
        UNROLL for (int j = 0; j < 2; j++) {
            const float q = value(part.codes, 2 * i + j, T::ZERO);
            x[j] = T::LAST == SUM            ? long_fma(q, part.scale, part.offset)
                   : T::LAST == LONG_PRODUCT ? long_mul(q, part.scale)
                                             : q * part.scale;
        }
        out[i] = pack(x[0], x[1]);
    }
    store(d.out, t, out);
}


// ---- types without blocks: elements 2 i and 2 i + 1 of some words

template <class T> DEVICE void convert(const Dequant& d) {
    using Word = typename T::Word;
    constexpr int WORDS = 2 * sizeof(Word);
    const u64 t = thread_index(), first = 8 * t;
    if (first + 8 <= d.count) {
        u32 w[WORDS];
        if constexpr (WORDS == 2) {
            const uint2 x = __ldg((const uint2*)d.blocks + t);
            w[0] = x.x, w[1] = x.y;
        } else {
            UNROLL for (int v = 0; v < WORDS / 4; v++) {
                const uint4 x = __ldg((const uint4*)d.blocks + WORDS / 4 * t + v);
                w[4 * v] = x.x, w[4 * v + 1] = x.y, w[4 * v + 2] = x.z, w[4 * v + 3] = x.w;
            }
        }
        store(d.out, t, {T::pair(w, 0), T::pair(w, 1), T::pair(w, 2), T::pair(w, 3)});
    } else {
        // Not unrolled: one thread of the launch comes here.
#pragma unroll 1
        for (u64 i = first; i < d.count; i++) {
            const u64 x = u64(__ldg((const Word*)d.blocks + i));
            const u32 w[4] = {u32(x), u32(x >> 32), 0, 0};
            d.out[i] = low_of(T::pair(w, 0));
        }
    }
}

#define KERNEL(name, function, type)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Dequant d) { \
        function<type>(d);                                                                      \
    }

