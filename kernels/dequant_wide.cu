/*---
version = 2
dtypes = ["bf16", "f16", "f32"]

[[kernel]]
entry = "dequant_q8_1"
type = "Q8_1"
threads = "256"
grid = ["cdiv(blocks, 256 / 4)"]

[[kernel]]
entry = "dequant_q8_k"
type = "Q8_K"
threads = "256"
grid = ["cdiv(blocks, 256 / 32)"]

[[kernel]]
entry = "dequant_f64"
type = "F64"
threads = "256"
grid = ["cdiv(blocks, 256 * 8)"]

[[kernel]]
entry = "dequant_i8"
type = "I8"
threads = "256"
grid = ["cdiv(blocks, 256 * 8)"]

[[kernel]]
entry = "dequant_i16"
type = "I16"
threads = "256"
grid = ["cdiv(blocks, 256 * 8)"]

[[kernel]]
entry = "dequant_i32"
type = "I32"
threads = "256"
grid = ["cdiv(blocks, 256 * 8)"]

[[kernel]]
entry = "dequant_i64"
type = "I64"
threads = "256"
grid = ["cdiv(blocks, 256 * 8)"]
---*/
// ggml's activation types Q8_1 and Q8_K, F64 and whole numbers to elements; how, and why it rounds once: dequant.cuh.

#include "dequant.cuh"

// int8 codes at QS.
template <int BYTES, int QS> DEVICE Codes signed_bytes(const u8* b, u32 p) {
    const Codes c = load<alignment(BYTES, QS)>(b + QS + 8 * p);
    return {c.w[0] ^ 0x80808080u, c.w[1] ^ 0x80808080u};
}

// d 0, a sum 2, qs 4.
struct Q8_1 {
    static constexpr int ELEMENTS = 32, BYTES = 36, ZERO = 128;
    static constexpr Last LAST = PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) { return {signed_bytes<BYTES, 4>(b, p), half_at(b), 0.f}; }
};

// float32 d 0, qs 4, sums 260.
struct Q8_K {
    static constexpr int ELEMENTS = 256, BYTES = 292, ZERO = 128;
    static constexpr Last LAST = LONG_PRODUCT;
    static DEVICE Part part(const u8* b, u32 p) {
        return {signed_bytes<BYTES, 4>(b, p), __uint_as_float(__ldg((const u32*)b)), 0.f};
    }
};

// ---- types without blocks

DEVICE double wide(const u32* w) { return __hiloint2double(int(w[1]), int(w[0])); }
// The reference holds a whole number of 64 bits as a float64: rounded once more where it is beyond 2^53.
DEVICE float whole(const u32* w) { return shorten(__ll2double_rn((long long)(u64(w[1]) << 32 | w[0]))); }
DEVICE float whole(u32 w) { return shorten(int(w)); }

struct F64 {
    using Word = u64;
    static DEVICE Pair pair(const u32* w, int i) { return pack(shorten(wide(w + 4 * i)), shorten(wide(w + 4 * i + 2))); }
};
struct I8 {
    using Word = u8;
    static DEVICE float element(u32 w, int i) { return float(int(w << (24 - 8 * i)) >> 24); }
    static DEVICE Pair pair(const u32* w, int i) {
        return pack(element(w[i / 2], i % 2 * 2), element(w[i / 2], i % 2 * 2 + 1));
    }
};
struct I16 {
    using Word = u16;
    static DEVICE Pair pair(const u32* w, int i) { return pack(float(int(w[i] << 16) >> 16), float(int(w[i]) >> 16)); }
};
struct I32 {
    using Word = u32;
    static DEVICE Pair pair(const u32* w, int i) { return pack(whole(w[2 * i]), whole(w[2 * i + 1])); }
};
struct I64 {
    using Word = u64;
    static DEVICE Pair pair(const u32* w, int i) { return pack(whole(w + 4 * i), whole(w + 4 * i + 2)); }
};

KERNEL(dequant_q8_1, dequantise, Q8_1)
KERNEL(dequant_q8_k, dequantise, Q8_K)
KERNEL(dequant_f64, convert, F64)
KERNEL(dequant_i8, convert, I8)
KERNEL(dequant_i16, convert, I16)
KERNEL(dequant_i32, convert, I32)
KERNEL(dequant_i64, convert, I64)
