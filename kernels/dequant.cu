/*---
version = 2
dtypes = ["bf16", "f16", "f32"]

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
// ggml's floats, Q and K types and IQ4 to elements; how, and why it rounds once: dequant.cuh.

#include "dequant.cuh"

// ---- IQ4's table

constexpr int TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int TABLE_ZERO = 127;

// Entries 4 i to 4 i + 3, plus TABLE_ZERO, a byte each.
DEVICE constexpr u32 entries(int i) {
    u32 w = 0;
    for (int j = 0; j < 4; j++) w |= u32(TABLE[4 * i + j] + TABLE_ZERO) << (8 * j);
    return w;
}

DEVICE u32 look_up(u32 codes) { return look_up16(codes, entries(0), entries(1), entries(2), entries(3)); }
DEVICE Codes look_up(Codes c) { return {look_up(c.w[0]), look_up(c.w[1])}; }

// Blocks of 32: f16 d at 0, with a minimum f16 m at 2; fifth bits at QH, if any; split nibbles at QS.
template <int BYTES_, bool MINIMUM, int QH, int QS, int ZERO_> struct Split {
    static constexpr int ELEMENTS = 32, BYTES = BYTES_, ZERO = ZERO_;
    static constexpr Last LAST = MINIMUM ? SUM : PRODUCT;
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
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) {
        const Codes c = load<alignment(BYTES, 2)>(b + 2 + 8 * p);
        return {{c.w[0] ^ 0x80808080u, c.w[1] ^ 0x80808080u}, half_at(b), 0.f};
    }
};

// f16 d 0, qs 2.
struct IQ4_NL {
    static constexpr int ELEMENTS = 32, BYTES = 18, ZERO = TABLE_ZERO;
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) { return {look_up(split<BYTES, 2>(b + 2, p)), half_at(b), 0.f}; }
};

// f16 d 0, high bits of scales u16 2, low nibbles of scales 4, qs 8: eight groups of 32.
struct IQ4_XS {
    static constexpr int ELEMENTS = 256, BYTES = 136, ZERO = TABLE_ZERO;
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) {
        const u32 g = p / 4;
        const u32 low = byte(b + 4 + g / 2) >> g % 2 * 4 & 15, high = word16(b + 2) >> 2 * g & 3;
        const float scale = half_at(b) * float(int(low | high << 4) - 32);
        return {look_up(split<BYTES, 8>(b + 8 + 16 * g, p % 4)), scale, 0.f};
    }
};

// scales 0, qs 16, d 80, dmin 82: 16 groups of 16, scale and minimum in the nibbles of one byte.
struct Q2_K {
    static constexpr int ELEMENTS = 256, BYTES = 84, ZERO = 0;
    static constexpr Last LAST = SUM;
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
    static constexpr Last LAST = PRODUCT;
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
    static constexpr Last LAST = SUM;
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
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) {
        const Place at(p);
        const u32 j = at.quarter % 4;
        const Codes low = bits(load<alignment(BYTES, 0)>(b + 64 * at.half + 32 * (j % 2) + at.l), j / 2 * 4, 4);
        const Codes high = bits(load<alignment(BYTES, 128)>(b + 128 + 32 * at.half + at.l), 2 * j, 2);
        return {join(low, high, 4), half_at(b + 208) * float((signed char)byte(b + 192 + p / 2)), 0.f};
    }
};

// ---- types without blocks

struct F32 {
    using Word = u32;
    static DEVICE Pair pair(const u32* w, int i) { return pack(__uint_as_float(w[2 * i]), __uint_as_float(w[2 * i + 1])); }
};
struct F16 {
    using Word = u16;
    static DEVICE Pair pair(const u32* w, int i) { return pack(widen_half(u16(w[i])), widen_half(u16(w[i] >> 16))); }
};
struct BF16 {
    using Word = u16;
#if defined(ELEMENT_F16) || defined(ELEMENT_F32)
    static DEVICE Pair pair(const u32* w, int i) {
        return pack(__uint_as_float(w[i] << 16), __uint_as_float(w[i] & 0xffff0000u));
    }
#else
    static DEVICE Pair pair(const u32* w, int i) { return w[i]; }
#endif
};

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
