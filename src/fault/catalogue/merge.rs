/*! Faults of what is put together: several query rows, chunks of a context, splits, their lse and their merge. */

// Rows are of the fused form where nothing else is said.
use super::fused as row;
use super::{ABSORBED, CHUNKED, FUSED, Row, SHORT, VERIFY};

pub(super) const ROWS: &[Row] = &[
    row(
        ("merge-base", "F17"),
        "merge-base",
        "splits are merged with exp of base-2 logarithms",
        &["lse"],
        &["merge with base e for base 2"],
    )
    .of(&["vllm-project/vllm#47079"]),
    row(
        ("lse-base-2", "F17"),
        "output-gain=1.4426950408889634@part_lse",
        "the lse of splits is a logarithm of base 2, merged as a natural one",
        &["part_lse"],
        &["base 2"],
    )
    .of(&["sgl-project/sglang#40903", "vllm-project/vllm-xpu-kernels#528"])
    .seen_by_norms(),
    row(
        ("verify-no-mask", "F15"),
        "no-mask",
        "several query rows of one request see each other's future",
        &["o_latent"],
        &["no mask"],
    )
    .of(&["ROCm/aiter#3046", "vllm-project/vllm#45227"])
    .in_run(VERIFY),
    row(
        ("verify-one-length", "F15"),
        "mask=-1",
        "several query rows of one request get the lengths of one",
        &["o_latent"],
        &["mask -1"],
    )
    .of(&["vllm-project/vllm#45227", "vllm-project/vllm-ascend#15329"])
    .in_run(VERIFY),
    row(
        ("verify-rows-stale", "F15"),
        "stale-rows=2@o_latent",
        "rows after the first of a verification step are not computed",
        &["o_latent"],
        &["stale rows"],
    )
    .of(&["vllm-project/vllm#51848"])
    .in_run(VERIFY),
    row(
        ("context-ignored", "F16"),
        "lose=context",
        "attention leaves the cached context out",
        &["part_o"],
        &["context left out"],
    )
    .of(&["vllm-project/vllm#14069", "xLLM-AI/xllm#680"]),
    row(
        ("new-tokens-ignored", "F16"),
        "lose=new",
        "attention leaves the new tokens out",
        &["part_o"],
        &["new tokens left out", "left out"],
    ),
    row(
        ("chunk-lost", "F16"),
        "lost-split=0",
        "the first chunk of the context is lost in the merge",
        &["lse"],
        &["chunk 0 missing", "split 0 missing", "split 1 alone"],
    )
    .of(&["vllm-project/vllm#26042", "sgl-project/sglang#10178"])
    .in_run(CHUNKED),
    row(
        ("chunk-twice", "F16"),
        "split-twice=0",
        "the first chunk of the context is merged twice",
        &["lse"],
        &["chunk 0 twice", "split 0 twice"],
    )
    .of(&["vllm-project/vllm#41490"])
    .in_run(CHUNKED),
    row(
        ("empty-chunk", "F16"),
        "empty-lse",
        "a chunk in which a request has no key reports a finite lse",
        &["part_lse"],
        &["empty parts"],
    )
    .of(&[
        "vllm-project/vllm#49294",
        "vllm-project/vllm#27491",
        "flashinfer-ai/flashinfer#3047",
        "sgl-project/sglang#22688",
    ])
    .in_run(CHUNKED)
    .seen_by_norms(),
    row(
        ("merge-base-2", "F17"),
        "merge=base2",
        "splits are merged with exp2 of natural logarithms",
        &["o_latent"],
        &["merge with base 2 for base e"],
    )
    .of(&["sgl-project/sglang#34240"])
    .in_run(ABSORBED),
    row(
        ("lse-heads-first", "F17"),
        "heads-first@lse",
        "the lse is stored head by head and read token by token",
        &["lse"],
        &["head by head"],
    )
    .of(&["sgl-project/sglang#9363"])
    .in_run(FUSED),
    row(
        ("merge-average", "F18"),
        "merge=average",
        "splits are averaged as if they weighed the same",
        &["lse"],
        &["splits averaged"],
    )
    .of(&["tile-ai/tilelang#158"]),
    row(
        ("split-lost", "F18"),
        "lost-split=1",
        "a split is left out of the merge",
        &["lse"],
        &["split 1 missing"],
    )
    .of(&["vllm-project/flash-attention#190"]),
    row(
        ("split-twice", "F18"),
        "split-twice=0",
        "a split is merged twice",
        &["o_latent"],
        &["split 0 twice"],
    )
    .of(&["vllm-project/flash-attention#176"])
    .in_run(ABSORBED),
    row(
        ("splits-reversed", "F18"),
        "merge=reversed",
        "outputs of splits are weighed by the lse of others",
        &["attn_out"],
        &["lse of splits reversed"],
    )
    .of(&["Dao-AILab/flash-attention#2336"])
    .in_run(FUSED),
    row(
        ("idle-split", "F18"),
        "empty-lse",
        "a split without keys reports a finite lse",
        &["part_lse"],
        &["empty parts"],
    )
    .of(&["sgl-project/sgl-kernel-xpu#487", "vllm-project/vllm-xpu-kernels#528"])
    .in_run(SHORT)
    .seen_by_norms(),
    row(
        ("partials-short", "F18"),
        "fewer-bits=7@part_o",
        "partial outputs are rounded before the merge",
        &["part_o"],
        &["rounded to 7 bits"],
    )
    .of(&["vllm-project/vllm-xpu-kernels#204"]),
];
