/*! Splits and chunks: what each leaves behind, how they are merged, and the base of an lse. */

use super::shows::{CHUNKED, LATENT, LATENT_EMPTY, LATENT_SPLIT, PREFILL, SPLIT};
use super::{Mutation, ROW, tensor};
use mla_reference::Stage;

const MERGE: Mutation =
    Mutation { kernel: "merge.cu", family: "F17", first: tensor(Stage::OLatent), shows: LATENT_SPLIT, ..ROW };
const EMPTY: Mutation = Mutation { kernel: "attention.cuh", family: "F18", shows: LATENT_EMPTY, ..MERGE };

pub(super) const ROWS: &[Mutation] = &[
    Mutation {
        name: "merge-base-2",
        issues: &["sgl-project/sglang#40903", "vllm-project/vllm#47079"],
        broken: "the merge takes natural logarithms for those of base 2",
        from: "constexpr float LOG2_E = 1.4426950408889634f;",
        to: "constexpr float LOG2_E = 1.f;",
        cause: Some("merge with base 2 for base e"),
        ..MERGE
    },
    Mutation {
        name: "merge-base-e-of-chunks",
        issues: &["sgl-project/sglang#34240", "sgl-project/sglang#40903"],
        broken: "the merge of a context's chunks converts the base of the logarithms twice",
        from: "constexpr float LOG2_E = 1.4426950408889634f;",
        to: "constexpr float LOG2_E = 1.4426950408889634f * 1.4426950408889634f;",
        shows: CHUNKED,
        first: tensor(Stage::Lse),
        cause: Some("merge with base e for base 2"),
        ..MERGE
    },
    Mutation {
        name: "merge-last-split-lost",
        family: "F18",
        issues: &["vllm-project/flash-attention#176"],
        broken: "the merge leaves the last split out",
        from: "merge(const __grid_constant__ Merge p) {",
        to: "merge(const __grid_constant__ Merge given) {\n    Merge p = given;\n    p.splits -= 1;",
        cause: Some("split 2 missing"),
        ..MERGE
    },
    Mutation {
        name: "merge-lse-in-base-2",
        issues: &["vllm-project/vllm-xpu-kernels#528"],
        broken: "the merge writes its lse with the logarithm of the sum in base 2",
        from: "fmaf(log2_(total), LN_2, most)",
        to: "log2_(total) + most",
        first: tensor(Stage::Lse),
        ..MERGE
    },
    Mutation {
        name: "merge-rows-of-one",
        family: "F18",
        issues: &["vllm-project/flash-attention#176"],
        broken: "the merge reads the first row's parts for every row and head: their stride is 0",
        from: "p.part_o[(s * stride + x) * p.width + i]",
        to: "p.part_o[s * stride * p.width + i]",
        norms: true,
        ..MERGE
    },
    Mutation {
        name: "merge-splits-averaged",
        family: "F18",
        broken: "the merge gives all splits the same weight",
        from: "#include \"common.cuh\"",
        to: "#include \"common.cuh\"\n#define exp2_(x) 1.f",
        cause: Some("splits averaged"),
        norms: true,
        ..MERGE
    },
    Mutation {
        name: "lse-in-base-2",
        kernel: "attention.cuh",
        issues: &["sgl-project/sglang#40903", "vllm-project/vllm#47079"],
        entries: &["absorbed_part_16"],
        broken: "attention hands over its lse in base 2 where a natural one is declared",
        from: "fmaf(most, c2, log2_(sum)) * LN_2;",
        to: "fmaf(most, c2, log2_(sum));",
        first: tensor(Stage::PartLse),
        cause: Some("lse in base 2"),
        norms: true,
        ..MERGE
    },
    Mutation {
        name: "lse-without-maximum",
        kernel: "attention.cuh",
        entries: &["fused"],
        issues: &["flashinfer-ai/flashinfer#58"],
        broken: "the lse is the logarithm of the sum without the maximum",
        from: "fmaf(most, c2, log2_(sum)) * LN_2;",
        to: "log2_(sum) * LN_2;",
        shows: PREFILL,
        first: tensor(Stage::Lse),
        norms: true,
        ..MERGE
    },
    Mutation {
        name: "lse-last-row-lost",
        kernel: "absorbed.cu",
        family: "F20",
        issues: &["vllm-project/vllm#37442"],
        broken: "the last row of a block writes no lse",
        from: "if (row < w.rows) p.lse[w.out + row]",
        to: "if (row < w.rows - 1) p.lse[w.out + row]",
        shows: LATENT,
        first: tensor(Stage::Lse),
        finding: Some("never written"),
        norms: true,
        cause: Some("unwritten rows"),
        ..MERGE
    },
    Mutation {
        name: "empty-split-nan",
        issues: &["vllm-project/vllm#27491", "sgl-project/sglang#22688"],
        broken: "a split that sees no key divides by its row sum of 0",
        from: "return sum == 0.f ? 0.f : __frcp_rn(sum);",
        to: "return __frcp_rn(sum);",
        first: tensor(Stage::PartO),
        norms: true,
        cause: Some("rows without a key"),
        ..EMPTY
    },
    Mutation {
        name: "empty-split-finite-lse",
        family: "F16",
        issues: &["vllm-project/vllm#49294", "flashinfer-ai/flashinfer#4452"],
        broken: "a split that sees no key hands over an lse of 0, as if it had seen one",
        from: "return sum == 0.f ? minus_infinity() : fmaf(",
        to: "return sum == 0.f ? 0.f : fmaf(",
        first: tensor(Stage::PartLse),
        cause: Some("empty parts with a finite lse"),
        norms: true,
        ..EMPTY
    },
    Mutation {
        name: "splits-write-one-place",
        kernel: "fused.cu",
        family: "F18",
        issues: &["vllm-project/flash-attention#190", "Dao-AILab/flash-attention#1217"],
        broken: "all splits write their partial output to the place of the first",
        entries: &["fused_part"],
        from: "const i64 at = out + row;",
        to: "const i64 at = w.row + row;",
        shows: SPLIT,
        first: tensor(Stage::PartO),
        finding: Some("never written"),
        norms: true,
        also: &["unwritten rows"],
        ..MERGE
    },
    Mutation {
        name: "split-values-from-the-start",
        kernel: "fused.cu",
        family: "F18",
        issues: &["Dao-AILab/flash-attention#1217"],
        broken: "every split reads the values of the first one's keys",
        entries: &["fused_part"],
        from: "(w.keys + w.begin) * p.v_token",
        to: "i64(w.keys) * p.v_token",
        shows: SPLIT,
        first: tensor(Stage::PartO),
        ..MERGE
    },
];
