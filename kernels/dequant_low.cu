/*---
version = 2
dtypes = ["bf16", "f16", "f32"]

[[kernel]]
entry = "dequant_q1_0"
type = "Q1_0"
threads = "256"
grid = ["cdiv(blocks, 256 / 16)"]

[[kernel]]
entry = "dequant_q2_0"
type = "Q2_0"
threads = "256"
grid = ["cdiv(blocks, 256 / 8)"]

[[kernel]]
entry = "dequant_tq1_0"
type = "TQ1_0"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_tq2_0"
type = "TQ2_0"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_mxfp4"
type = "MXFP4"
threads = "256"
grid = ["cdiv(blocks, 256 / 4)"]

[[kernel]]
entry = "dequant_nvfp4"
type = "NVFP4"
threads = "256"
grid = ["cdiv(blocks, 256 / 8)"]
---*/
// ggml's types of one bit, two bits or three values, and FP4, to elements; how, and why it rounds once: dequant.cuh. Layouts as in
// reference/src/dequant/low.rs and fp4.rs.

#include "dequant.cuh"

// d 0, qs 2: a bit an element, set for plus.
struct Q1_0 {
    static constexpr int ELEMENTS = 128, BYTES = 18, ZERO = 1;
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) {
        const Codes c = spread(byte(b + 2 + p));
        return {{c.w[0] << 1, c.w[1] << 1}, half_at(b), 0.f};
    }
};

// d 0, qs 2: two bits an element.
struct Q2_0 {
    static constexpr int ELEMENTS = 64, BYTES = 18, ZERO = 1;
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) {
        const u32 q = word16(b + 2 + 2 * p);
        return {{spread_twos(q & 0xff), spread_twos(q >> 8)}, half_at(b), 0.f};
    }
};

// qs 0, qh 48, d 52. A byte is a fraction of five digits of base 3; elements are the digits 0 of bytes 0 to 31, their digits 1
// to 4; then those of bytes 32 to 47; then digits 0 to 3 of the last four bytes.
struct TQ1_0 {
    static constexpr int ELEMENTS = 256, BYTES = 54, ZERO = 1;
    static constexpr Last LAST = PRODUCT;
    // Digit `k` of two bytes, 16 bits apart.
    static DEVICE u32 pair(u32 two, u32 power) { return ((two * power & 0x00ff00ffu) * 3) >> 8 & 0x00ff00ffu; }
    // Digit `k` of four bytes.
    static DEVICE u32 digit(u32 four, u32 k) {
        const u32 power = u32(0x511b090301ull >> 8 * k) & 255;  // 3^k
        return pair(four & 0x00ff00ffu, power) | pair(four >> 8 & 0x00ff00ffu, power) << 8;
    }
    static DEVICE Part part(const u8* b, u32 p) {
        const float d = half_at(b + 52);
        if (p >= 30) {
            const u32 w = word32(b + 48), k = 2 * (p - 30);
            return {{digit(w, k), digit(w, k + 1)}, d, 0.f};
        }
        // Rows of 32 bytes, four parts, up to part 19; then of 16, two parts.
        const u32 k = p < 20 ? p / 4 : (p - 20) / 2, at = p < 20 ? p % 4 * 8 : 32 + p % 2 * 8;
        const Codes c = load<alignment(BYTES, 0)>(b + at);
        return {{digit(c.w[0], k), digit(c.w[1], k)}, d, 0.f};
    }
};

// qs 0, d 64: two bits an element, as in the K types.
struct TQ2_0 {
    static constexpr int ELEMENTS = 256, BYTES = 66, ZERO = 1;
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) {
        const Place at(p);
        const Codes c = bits(load<alignment(BYTES, 0)>(b + 32 * at.half + at.l), at.quarter % 4 * 2, 2);
        return {c, half_at(b + 64), 0.f};
    }
};

// Codes of FP4 as twice their value, 0, 1, 2, 3, 4, 6, 8, 12 and the same negative, plus FP4_ZERO; code 8 is 0.
constexpr int FP4_ZERO = 12;
DEVICE u32 fp4(u32 codes) { return look_up16(codes, 0x0f0e0d0c, 0x18141210, 0x090a0b0c, 0x00040608); }
DEVICE Codes fp4(Codes c) { return {fp4(c.w[0]), fp4(c.w[1])}; }

// 2^e of a float that is not subnormal.
DEVICE float power(int e) { return __uint_as_float(u32(e + 127) << 23); }

// e 0, qs 1: 2^(e - 128).
struct MXFP4 {
    static constexpr int ELEMENTS = 32, BYTES = 17, ZERO = FP4_ZERO;
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) {
        const u32 e = byte(b);
        // 2^-128 and 2^-127 are subnormal: a quarter and a half of 2^-126.
        const float scale = e < 2 ? __uint_as_float(0x00200000u << e) : power(int(e) - 128);
        return {fp4(split<BYTES, 1>(b + 1, p)), scale, 0.f};
    }
};

// Four scales 0, qs 4: groups of 16. A scale is half of an E4M3 without its sign: bit 7 is not looked at, but 0x7f is 0 and
// 0xff is not.
struct NVFP4 {
    static constexpr int ELEMENTS = 64, BYTES = 36, ZERO = FP4_ZERO;
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) {
        const u32 g = p / 2, s = byte(b + g), m = s & 7;
        const int e = s >> 3 & 15, normal = e != 0;
        const float scale = s == 0x7f ? 0.f : float(8 * normal + int(m)) * power(e - normal - 10);
        return {fp4(bits(load<alignment(BYTES, 4)>(b + 4 + 8 * g), p % 2 * 4, 4)), scale, 0.f};
    }
};

KERNEL(dequant_q1_0, dequantise, Q1_0)
KERNEL(dequant_q2_0, dequantise, Q2_0)
KERNEL(dequant_tq1_0, dequantise, TQ1_0)
KERNEL(dequant_tq2_0, dequantise, TQ2_0)
KERNEL(dequant_mxfp4, dequantise, MXFP4)
KERNEL(dequant_nvfp4, dequantise, NVFP4)
