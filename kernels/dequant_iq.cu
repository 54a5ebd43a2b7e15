/*---
version = 2
dtypes = ["bf16", "f16", "f32"]

[[kernel]]
entry = "dequant_iq2_xxs"
type = "IQ2_XXS"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_iq2_xs"
type = "IQ2_XS"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_iq2_s"
type = "IQ2_S"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_iq3_xxs"
type = "IQ3_XXS"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_iq3_s"
type = "IQ3_S"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_iq1_s"
type = "IQ1_S"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_iq1_m"
type = "IQ1_M"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]
---*/
// ggml's IQ1, IQ2 and IQ3 types to elements; how, and why it rounds once: dequant.cuh.
//
// Blocks of 256 in eight groups of 32. The eight elements of a part are one entry of a codebook (IQ3: two of four elements),
// times signs (IQ1: moved by an eighth) and a scale of 16 or 32 elements. Layouts as in reference/src/dequant/iq*.rs.

#include "dequant.cuh"
#include "codebooks.cuh"

// Place of a part: group of 32, part in it.
struct At {
    u32 group, l;
    DEVICE explicit At(u32 p) : group(p / 4), l(p % 4) {}
};

// d (2 n + 1) / divisor.
DEVICE float scale(float d, u32 n, float inverse) { return d * float(2 * n + 1) * inverse; }

DEVICE u32 nibble(const u8* at, u32 which) { return byte(at) >> 4 * which & 15; }

// Eight signs of which seven are stored: the number of minus signs is even.
DEVICE u32 even(u32 seven) { return seven | (__popc(seven) & 1) << 7; }

constexpr int SIGNED_ZERO = 64;  // above every magnitude

// Magnitudes, bytes of 1 to 62, with signs, a bit each.
DEVICE Codes with_signs(Codes q, u32 signs) {
    const Codes minus = spread(signs);
    UNROLL for (int i = 0; i < 2; i++) {
        const u32 mask = minus.w[i] * 0xff;
        q.w[i] = SIGNED_ZERO * 0x01010101u + (q.w[i] & ~mask) - (q.w[i] & mask);
    }
    return q;
}

// ---- IQ2: magnitudes 8, 25, 43

struct Iq2 {
    static constexpr int ELEMENTS = 256, ZERO = SIGNED_ZERO;
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(u32 entry, u32 signs, float d, u32 n) {
        constexpr u32 MAGNITUDES = 8 | 25 << 8 | 43 << 16;
        const Codes q = {look_up8(spread_twos(entry & 0xff), MAGNITUDES, 0), look_up8(spread_twos(entry >> 8), MAGNITUDES, 0)};
        return {with_signs(q, signs), scale(d, n, 0.125f), 0.f};
    }
};

// d 0; a group at 2 + 8 ib: four entries, then a word of signs (7 bits each) and n.
struct IQ2_XXS : Iq2 {
    static constexpr int BYTES = 66;
    static DEVICE Part part(const u8* b, u32 p) {
        const At at(p);
        const u8* g = b + 2 + 8 * at.group;
        const u32 w = word32(g + 4);
        return Iq2::part(CODEBOOK_IQ2_XXS[byte(g + at.l)], even(w >> 7 * at.l & 127), half_at(b), w >> 28);
    }
};

// d 0, u16 qs 2 (entry 9 bits, signs 7), n 66: nibbles.
struct IQ2_XS : Iq2 {
    static constexpr int BYTES = 74;
    static DEVICE Part part(const u8* b, u32 p) {
        const At at(p);
        const u32 q = word16(b + 2 + 2 * p), n = nibble(b + 66 + at.group, at.l / 2);
        return Iq2::part(CODEBOOK_IQ2_XS[q & 511], even(q >> 9), half_at(b), n);
    }
};

// d 0, qs 2, signs 34, two more bits of entries 66, n 74: nibbles.
struct IQ2_S : Iq2 {
    static constexpr int BYTES = 82;
    static DEVICE Part part(const u8* b, u32 p) {
        const At at(p);
        const u32 entry = byte(b + 2 + p) | (byte(b + 66 + at.group) >> 2 * at.l & 3) << 8;
        return Iq2::part(CODEBOOK_IQ2_S[entry], byte(b + 34 + p), half_at(b), nibble(b + 74 + at.group, at.l / 2));
    }
};

// ---- IQ3: two entries a part

// d 0, qs 2, a word of signs (7 bits each) and n for each group 66: magnitudes 4, 12, 20, 28, 36, 44, 52, 62.
struct IQ3_XXS {
    static constexpr int ELEMENTS = 256, BYTES = 98, ZERO = SIGNED_ZERO;
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) {
        constexpr u32 A = 4 | 12 << 8 | 20 << 16 | 28 << 24, B = 36 | 44 << 8 | 52 << 16 | 62 << 24;
        const At at(p);
        const u8* q = b + 2 + 2 * p;
        const u32 w = word32(b + 66 + 4 * at.group);
        const Codes codes = {look_up8(spread_threes(CODEBOOK_IQ3_XXS[byte(q)]), A, B),
                             look_up8(spread_threes(CODEBOOK_IQ3_XXS[byte(q + 1)]), A, B)};
        return {with_signs(codes, even(w >> 7 * at.l & 127)), scale(half_at(b), w >> 28, 0.25f), 0.f};
    }
};

// d 0, qs 2, a ninth bit of entries 66, signs 74, n 106: nibbles. Magnitudes 1, 3, 5 to 15: 2 c + 1.
struct IQ3_S {
    static constexpr int ELEMENTS = 256, BYTES = 110, ZERO = SIGNED_ZERO;
    static constexpr Last LAST = PRODUCT;
    static DEVICE u32 magnitudes(u32 entry) { return 2 * spread_threes(CODEBOOK_IQ3_S[entry]) + 0x01010101u; }
    static DEVICE Part part(const u8* b, u32 p) {
        const At at(p);
        const u8* q = b + 2 + 2 * p;
        const u32 high = byte(b + 66 + at.group) >> 2 * at.l;
        const Codes codes = {magnitudes(byte(q) | (high & 1) << 8), magnitudes(byte(q + 1) | (high >> 1 & 1) << 8)};
        const u32 n = nibble(b + 106 + at.group / 2, at.group % 2);
        return {with_signs(codes, byte(b + 74 + p)), scale(half_at(b), n, 1.f), 0.f};
    }
};

// ---- IQ1: values -1, 0, 1, all of them moved by an eighth: (8 c - 8 +- 1) / 8 with c of 0, 1, 2

struct Iq1 {
    static constexpr int ELEMENTS = 256, ZERO = 9;
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(u32 entry, u32 minus, float d, u32 n) {
        const u32 e = CODEBOOK_IQ1[entry], by = (minus ? 0 : 2) * 0x01010101u;
        return {{8 * spread_twos(e & 0xff) + by, 8 * spread_twos(e >> 8) + by}, scale(d, n, 0.125f), 0.f};
    }
};

// d 0, qs 2, u16 qh 34: three more bits of each entry, n, the sign of the eighth.
struct IQ1_S : Iq1 {
    static constexpr int BYTES = 50;
    static DEVICE Part part(const u8* b, u32 p) {
        const At at(p);
        const u32 h = word16(b + 34 + 2 * at.group);
        return Iq1::part(byte(b + 2 + p) | (h >> 3 * at.l & 7) << 8, h >> 15, half_at(b), h >> 12 & 7);
    }
};

// qs 0, qh 32: nibbles, three more bits of an entry and the sign of the eighth; four u16 48: n of 16 elements, three bits each,
// and d in their top nibbles.
struct IQ1_M : Iq1 {
    static constexpr int BYTES = 56;
    static DEVICE Part part(const u8* b, u32 p) {
        const u32 h = nibble(b + 32 + p / 2, p % 2);
        u32 d = 0;
        UNROLL for (int i = 0; i < 4; i++) d |= word16(b + 48 + 2 * i) >> 12 << 4 * i;
        const u32 n = word16(b + 48 + 2 * (p / 8)) >> 3 * (p / 2 % 4) & 7;
        return Iq1::part(byte(b + p) | (h & 7) << 8, h >> 3, widen_half(d), n);
    }
};

KERNEL(dequant_iq2_xxs, dequantise, IQ2_XXS)
KERNEL(dequant_iq2_xs, dequantise, IQ2_XS)
KERNEL(dequant_iq2_s, dequantise, IQ2_S)
KERNEL(dequant_iq3_xxs, dequantise, IQ3_XXS)
KERNEL(dequant_iq3_s, dequantise, IQ3_S)
KERNEL(dequant_iq1_s, dequantise, IQ1_S)
KERNEL(dequant_iq1_m, dequantise, IQ1_M)
