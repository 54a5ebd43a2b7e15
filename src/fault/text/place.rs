/*! Where things lie: pages, rows, heads, strides, views, offsets of too few bits. */

use super::shows::{LATENT, LATENT_F32, LATENT_PREFILL, LATENT_SPLIT, PREFILL, PREFILL_F32, SHORT};
use super::{Mutation, ROW, tensor};
use mla_reference::Stage;

const PAGES: Mutation =
    Mutation { kernel: "absorbed.cu", family: "F12", first: tensor(Stage::OLatent), shows: LATENT, ..ROW };
const CACHE: Mutation = Mutation {
    kernel: "cache.cu",
    family: "F09",
    entries: &["cache_write"],
    first: tensor(Stage::Cache),
    shows: SHORT,
    ..ROW
};

pub(super) const ROWS: &[Mutation] = &[
    Mutation {
        name: "one-page-wrong",
        issues: &["flashinfer-ai/flashinfer#810"],
        broken: "page 2 of each request is read from its page 1",
        from: "u32(pages[entry])",
        to: "u32(pages[entry == 2 ? 1 : entry])",
        cause: Some("page 2 ← 1"),
        ..PAGES
    },
    Mutation {
        name: "page-table-not-followed",
        issues: &["sgl-project/sglang#25556", "flashinfer-ai/flashinfer#810"],
        broken: "pages are taken to follow each other from a request's first one on",
        from: "u32(pages[entry])",
        to: "u32(pages[0] + entry)",
        norms: true,
        cause: Some("read from memory that nobody wrote"),
        ..PAGES
    },
    Mutation {
        name: "page-of-8-slots",
        issues: &["sgl-project/sglang#25556", "sgl-project/sglang#16531"],
        broken: "rows of a page are found as if pages had 8 slots",
        from: "(position - entry * p.page_size);",
        to: "(position - entry * p.page_size) % 8;",
        ..PAGES
    },
    Mutation {
        name: "row-offset-in-16-bits",
        family: "F13",
        issues: &["flashinfer-ai/flashinfer#3130", "vllm-project/vllm#47671"],
        broken: "the offset of a cache row is kept in too few bits, and begins anew",
        from: "p.cache + i64(from) * p.cache_row, WIDTH * 2, full",
        to: "p.cache + i64(u32(from * p.cache_row) & 0x3fff), WIDTH * 2, full",
        shows: LATENT_SPLIT,
        first: tensor(Stage::PartO),
        norms: true,
        ..PAGES
    },
    Mutation {
        name: "values-of-the-last-columns",
        family: "F11",
        issues: &["ggml-org/llama.cpp#12801"],
        broken: "values are the last columns of a cache row, not the first",
        from: "(column0 + lane / 16 * 8) * 2;",
        to: "(ROPE + column0 + lane / 16 * 8) * 2;",
        norms: true,
        cause: Some("values from column 16"),
        ..PAGES
    },
    Mutation {
        name: "rope-of-head-0",
        family: "F21",
        issues: &["vllm-project/vllm#17091", "sgl-project/sglang#20598"],
        broken: "all heads take the rope part of head 0's query",
        from: "p.q + token * p.q_token + i64(head) * p.q_head + p.rope_at + pair;",
        to: "p.q + token * p.q_token + p.rope_at + pair;",
        shows: LATENT_PREFILL,
        ..PAGES
    },
    Mutation {
        name: "absorbed-f32-page-table-not-followed",
        kernel: "absorbed_f32.cu",
        issues: &["sgl-project/sglang#25556"],
        broken: "the float32 kernel takes pages to follow each other from a request's first one on",
        from: "size_t(pages[position / p.page_size]) * p.page_size",
        to: "size_t(pages[0] + position / p.page_size) * p.page_size",
        shows: LATENT_F32,
        cause: Some("page table not followed"),
        also: &["read from memory that nobody wrote"],
        ..PAGES
    },
    Mutation {
        name: "absorbed-f32-one-row-for-two",
        kernel: "absorbed_f32.cu",
        family: "F15",
        issues: &["vllm-project/vllm#51848"],
        broken: "rows of a block are taken for heads of one token, though they are of several",
        from: "token = row / p.heads, head = row % p.heads;",
        to: "token = w.row / p.heads, head = row % p.heads;",
        shows: LATENT_F32,
        ..PAGES
    },
    Mutation {
        name: "values-with-the-stride-of-keys",
        kernel: "fused.cu",
        family: "F21",
        issues: &["sgl-project/sglang#20598", "ikawrakow/ik_llama.cpp#1130"],
        broken: "heads of the values are taken to lie as far apart as heads of the keys",
        from: "i64(head) * p.v_head + own;",
        to: "i64(head) * p.k_head + own;",
        shows: PREFILL,
        first: tensor(Stage::AttnOut),
        finding: Some("out-of-bounds"),
        norms: true,
        ..PAGES
    },
    Mutation {
        name: "fused-last-row-lost",
        kernel: "fused.cu",
        family: "F20",
        issues: &["vllm-project/vllm#37442"],
        broken: "the last query row of a block is not written",
        from: "if (row >= rows) continue;",
        to: "if (row >= rows - 1) continue;",
        shows: PREFILL,
        first: tensor(Stage::Lse),
        cause: Some("unwritten rows"),
        finding: Some("never written"),
        norms: true,
        ..PAGES
    },
    Mutation {
        name: "fused-f32-heads-of-one",
        kernel: "fused_f32.cu",
        family: "F21",
        broken: "all heads read the values of head 0",
        from: "p.v_token + i64(head) * p.v_head;",
        to: "p.v_token;",
        shows: PREFILL_F32,
        first: tensor(Stage::AttnOut),
        cause: Some("heads of v"),
        ..PAGES
    },
    Mutation {
        name: "fused-last-head-twice",
        kernel: "fused.cu",
        family: "F22",
        issues: &["ggml-org/llama.cpp#18953"],
        broken: "the last head is taken for the one before: its outputs are never written",
        from: "lane = threadIdx.x % 32, head = blockIdx.y;",
        to: "lane = threadIdx.x % 32, head = min(blockIdx.y, gridDim.y - 2);",
        shows: PREFILL,
        first: tensor(Stage::Lse),
        cause: Some("unwritten rows"),
        finding: Some("never written"),
        norms: true,
        ..PAGES
    },
    Mutation {
        name: "absorbed-last-rows-of-a-block",
        family: "F22",
        issues: &["ggml-org/llama.cpp#26404", "flashinfer-ai/flashinfer#2689"],
        broken: "the rows of a block after its last whole 16 are taken for absent: zeros, and an lse of no key",
        from: "const bool there = row < w.rows;",
        to: "const bool there = row < w.rows / 16 * 16;",
        shows: LATENT_PREFILL,
        cause: Some("zero rows"),
        also: &["rows taken to see no key"],
        ..PAGES
    },
    Mutation {
        name: "cache-slot-wrong",
        issues: &["vllm-project/vllm-ascend#16775"],
        broken: "new tokens are written to each other's slots, two by two",
        from: "p.cache + size_t(p.slots[blockIdx.x])",
        to: "p.cache + size_t(p.slots[blockIdx.x ^ (blockIdx.x + 1 < gridDim.x ? 1 : 0)])",
        cause: Some("rows of other places"),
        ..CACHE
    },
    Mutation {
        name: "cache-row-not-written",
        issues: &["mudler/vllm.cpp#2672", "vllm-project/vllm#42581"],
        broken: "the last new token's row is not written to the cache",
        from: "const size_t row = p.tokens[blockIdx.x];",
        to: "if (blockIdx.x + 1 == gridDim.x) return;\n    const size_t row = p.tokens[blockIdx.x];",
        cause: Some("unwritten rows"),
        norms: true,
        ..CACHE
    },
    Mutation {
        name: "cache-rope-first",
        family: "F11",
        issues: &["ggml-org/llama.cpp#12801", "ggml-org/llama.cpp#8862"],
        broken: "a cache row holds the rope part first and the latent after it",
        from: "to[i] = p.latent[row * p.latent_cols + i];\n    for (int i = threadIdx.x; i < p.rope_cols; i += THREADS) to[p.latent_cols + i]",
        to: "to[p.rope_cols + i] = p.latent[row * p.latent_cols + i];\n    for (int i = threadIdx.x; i < p.rope_cols; i += THREADS) to[i]",
        cause: Some("permuted"),
        ..CACHE
    },
    Mutation {
        name: "key-rope-of-head-0-alone",
        family: "F21",
        entries: &["key_rope"],
        issues: &["vllm-project/vllm#17091"],
        broken: "the rope part of a key is copied to head 0 alone",
        from: "i < p.heads * p.rope_cols;",
        to: "i < p.rope_cols;",
        shows: PREFILL,
        first: tensor(Stage::K),
        finding: Some("never written"),
        norms: true,
        ..CACHE
    },
];
