/*! What comes before and after attention: norms, rotation, products. */

use super::shows::{PREFILL, PREFILL_F32, SHORT};
use super::{Mutation, ROW, tensor};
use mla_reference::Stage;

const NORM: Mutation =
    Mutation { kernel: "norm.cu", family: "F08", first: tensor(Stage::AttnIn), shows: SHORT, ..ROW };
const ROPE: Mutation = Mutation { kernel: "rope.cu", family: "F06", first: tensor(Stage::Q), ..NORM };
const PRODUCT: Mutation =
    Mutation { kernel: "product.cu", family: "F22", entries: &["product"], first: tensor(Stage::QA), ..NORM };

pub(super) const ROWS: &[Mutation] = &[
    Mutation {
        name: "norm-eps-on-the-sum",
        issues: &["ml-explore/mlx-lm#1624"],
        broken: "eps is added to the sum of squares, not to their mean",
        from: "__fdiv_rn(sum, float(p.cols)) + p.eps",
        to: "__fdiv_rn(sum + p.eps, float(p.cols))",
        cause: Some("eps / width"),
        ..NORM
    },
    Mutation {
        name: "norm-over-rope-too",
        issues: &["junfanz1/MiniGPT-and-DeepSeek-MLA-Multi-Head-Latent-Attention#1"],
        broken: "the sum of squares takes in the whole row, the rope part too",
        from: "for (int i = threadIdx.x; i < p.cols; i += THREADS) {",
        to: "for (int i = threadIdx.x; i < p.ldx; i += THREADS) {",
        first: tensor(Stage::KvCNormed),
        ..NORM
    },
    Mutation {
        name: "norm-weight-left-out",
        broken: "the norm's weight is left out",
        from: "narrow(widen(x[i]) * scale * p.gamma[i])",
        to: "narrow(widen(x[i]) * scale)",
        cause: Some("norm weight left out"),
        ..NORM
    },
    Mutation {
        name: "norm-rounds-twice",
        issues: &["vllm-project/vllm#42379"],
        broken: "the normed value is rounded before it is multiplied with the weight",
        from: "narrow(widen(x[i]) * scale * p.gamma[i])",
        to: "narrow(widen(narrow(widen(x[i]) * scale)) * p.gamma[i])",
        cause: Some("contract"),
        ..NORM
    },
    Mutation {
        name: "norm-weight-of-the-neighbour",
        broken: "each column is multiplied with the weight of the one before",
        from: "* p.gamma[i])",
        to: "* p.gamma[i ? i - 1 : 0])",
        ..NORM
    },
    Mutation {
        name: "rope-other-pairs",
        issues: &["huggingface/transformers#35926", "huggingface/optimum-intel#1877"],
        broken: "halves are rotated together where neighbours should be",
        from: "if (!p.adjacent) {",
        to: "if (p.adjacent) {",
        cause: Some("half-split pairs"),
        ..ROPE
    },
    Mutation {
        name: "rope-backwards",
        issues: &["ModelTC/LightLLM#672"],
        broken: "pairs are rotated the other way round",
        from: "s = p.sine[row * half + j];",
        to: "s = -p.sine[row * half + j];",
        cause: Some("rope backwards"),
        ..ROPE
    },
    Mutation {
        name: "rope-position-of-the-row-before",
        issues: &["ml-explore/mlx#3795"],
        broken: "each row but the first is rotated by the position of the row before it",
        from: "c = p.cosine[row * half + j];\n            s = p.sine[row * half + j];",
        to: "const size_t at = (row ? row - 1 : 0) * half + j;\n            c = p.cosine[at];\n            s = p.sine[at];",
        cause: Some("positions of q of the row before"),
        also: &["positions of k_pe of the row before"],
        ..ROPE
    },
    Mutation {
        name: "rope-of-the-first-heads",
        family: "F08",
        issues: &["vllm-project/vllm#51049"],
        broken: "heads from the third on are copied, not rotated",
        from: "if (j >= 0) {",
        to: "if (j >= 0 && i / pairs < 2) {",
        cause: Some("holds q_raw"),
        ..ROPE
    },
    Mutation {
        name: "product-last-terms-lost",
        issues: &["triton-lang/triton#621"],
        broken: "the product leaves out the terms after the last whole step",
        from: "steps = (p.k + BK - 1) / BK;",
        to: "steps = p.k / BK;",
        first: tensor(Stage::QRaw),
        norms: true,
        cause: Some("last 8 of 40 terms left out"),
        ..PRODUCT
    },
    Mutation {
        name: "product-last-columns-lost",
        broken: "the last two columns of the product are not written",
        from: "if (row < p.m && col < p.n)",
        to: "if (row < p.m && col < p.n - 2)",
        finding: Some("never written"),
        norms: true,
        ..PRODUCT
    },
    Mutation {
        name: "product-last-tile-idle",
        broken: "warps whose rows are not all there compute nothing, and zeros are stored",
        from: "m0 + warp_m < p.m &&",
        to: "m0 + warp_m + MT * 16 <= p.m &&",
        shows: PREFILL,
        cause: Some("zero rows"),
        ..PRODUCT
    },
    Mutation {
        name: "product-rounds-between",
        family: "F28",
        issues: &["ggml-org/llama.cpp#11446"],
        broken: "sums are rounded to an element after each step of 32 terms",
        from: "multiply(sum[m][2 * n + 1], left[m], right[2], right[3]);\n                }\n            }\n        }",
        to: "multiply(sum[m][2 * n + 1], left[m], right[2], right[3]);\n                }\n            }\n        }\n        UNROLL for (int m = 0; m < MT; m++) UNROLL for (int n = 0; n < 2 * NT; n++)\n            UNROLL for (int e = 0; e < 4; e++) sum[m][n][e] = widen(narrow(sum[m][n][e]));",
        ..PRODUCT
    },
    Mutation {
        name: "product-weights-of-head-0",
        family: "F21",
        broken: "all heads are multiplied with the weights of head 0",
        from: "const u16* b = p.b + head * p.b_head;",
        to: "const u16* b = p.b;",
        first: tensor(Stage::QLatent),
        cause: Some("heads of w_uk"),
        also: &["heads of w_uv"],
        ..PRODUCT
    },
    Mutation {
        name: "product-rows-not-looked-up",
        family: "F12",
        entries: &["product_transposed"],
        issues: &["sgl-project/sglang#25556"],
        broken: "keys are made of the cache's rows in the order of slots, not of the page table",
        from: "a + size_t(p.rows[row]) * p.lda",
        to: "a + size_t(row) * p.lda",
        shows: PREFILL,
        first: tensor(Stage::K),
        norms: true,
        also: &["rows of other places"],
        ..PRODUCT
    },
    Mutation {
        name: "product-f32-last-terms-lost",
        kernel: "product_f32.cu",
        issues: &["triton-lang/triton#621"],
        broken: "the float32 product leaves out the terms after the last whole step",
        from: "steps = (p.k + BK - 1) / BK;",
        to: "steps = p.k / BK;",
        shows: PREFILL_F32,
        first: tensor(Stage::QRaw),
        norms: true,
        cause: Some("last 8 of 40 terms left out"),
        ..PRODUCT
    },
    Mutation {
        name: "product-f32-last-rows-idle",
        kernel: "product_f32.cu",
        broken: "warps of the float32 product whose rows are not all there compute nothing, and zeros are stored",
        from: "m0 + warp * 8 < p.m;",
        to: "m0 + warp * 8 + 8 <= p.m;",
        shows: PREFILL_F32,
        cause: Some("zero rows"),
        ..PRODUCT
    },
];
