// What the attention kernels share: their parameters, the work items that the host makes, and the softmax's bookkeeping.
//
// Contract: scores in float32, p = exp2(s c2 - m c2) with m the running maximum of the raw scores including the tile's own,
// tiles of BN keys from the first key of the item on; the row sum from p before its cast; P cast to an element; the output
// is multiplied by the reciprocal of the row sum and rounded once.
#pragma once
#include "common.cuh"

// Some query rows of one request and the keys that they look at.
struct Work {
    int row;      // first query row
    int rows;     // how many
    int out;      // first row of the output
    int keys;     // fused: first row of k and v; absorbed: first entry of the page table
    int begin;    // first key, by position
    int end;      // end of keys
    int visible;  // keys, from position 0, that the request's first query row sees; each later token sees one more
    int first;    // the request's first query row
};

// Of both forms, in 16 and in 32 bits. Distances are multiples of 16 bytes: rows are copied so many at a time.
struct Fused {
    const element* q;      // [token][head][NOPE + ROPE]
    const element* k;      // [key][head][NOPE + ROPE]
    const element* v;      // [key][head][VALUE]
    const Work* work;  // [items]
    void* o;           // [token][head][VALUE]
    float* lse;        // [token][heads]
    i64 q_token, k_token, v_token, o_token;  // elements from a token to the next one
    int q_head, k_head, v_head, o_head;      // from a head to the next one
    int heads;
    float c2;  // float32 of scale times log2 e
};

struct Absorbed {
    const element* q_latent;  // [token][head][LATENT]
    const element* q;         // [token][head][.]; its rope columns begin at rope_at
    const element* cache;     // [page][page_size][LATENT + ROPE]
    const int* pages;     // page tables of all requests; an item's keys begin at its own entry
    const Work* work;     // [items]; rows are heads of tokens
    void* o;              // [token][head][LATENT]
    float* lse;           // [token][heads]
    i64 q_latent_token, q_token, o_token;          // elements from a token to the next one
    int q_latent_head, q_head, o_head, cache_row;  // from a head to the next one, from a key to the next one
    int rope_at, heads, page_size;
    float c2;  // float32 of scale times log2 e
};

// Keys of an item, counted from `begin`, that a token sees.
DEVICE int seen(const Work& w, int token) { return max(min(w.visible + token, w.end) - w.begin, 0); }

// What is stored of a row: float32 in parts that are merged later, else elements.
#ifndef ELEMENT_F32
DEVICE void store_pair(u16* to, float a, float b) { *(u32*)to = pack(a, b); }
#endif
DEVICE void store_pair(float* to, float a, float b) { *(float2*)to = make_float2(a, b); }

// 0 where no key was seen. A sum that is NaN stays one, here and below: what overflowed must not look like no key.
DEVICE float reciprocal(float sum) { return sum == 0.f ? 0.f : __frcp_rn(sum); }

// ln of the sum of exp(scale s): the maximum is one of raw scores.
DEVICE float log_sum_exp(float most, float sum, float c2) {
    return sum == 0.f ? minus_infinity() : fmaf(most, c2, log2_(sum)) * LN_2;
}

// Factor of what was summed under an older maximum; 1 where no key was seen yet.
DEVICE float rescale(float before, float now, float c2) {
    return now > minus_infinity() ? exp2_((before - now) * c2) : 1.f;
}

// -m c2, the exponent's offset; 0 where no key was seen yet, so that exp2 of -infinity stays 0.
DEVICE float offset(float most, float c2) { return most > minus_infinity() ? -most * c2 : 0.f; }
