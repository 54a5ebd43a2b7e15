/*! Faults of attention itself: masks, tiles, splits and their merge, heads, precision. */

use super::elementwise::FACTORS;
// Rows are of the fused form where nothing else is said.
use super::fused as row;
use super::{ABSORBED, FUSED, RANKS, Row, TILES};
use mla_numeric::DType;
use mla_reference::Regime;

pub(super) const ROWS: &[Row] = &[
    row(
        ("key-dropped", "F14"),
        "drop-token=1",
        "one key is left out of attention",
        &["part_o"],
        &["key 1 left out", "key 1 of request"],
    )
    .of(&["vectorch-ai/ScaleLLM#408"])
    .in_run(ABSORBED),
    row(
        ("no-rescale", "F22"),
        "no-rescale",
        "sums are not rescaled when the running maximum grows",
        &["o_latent"],
        &["no rescale"],
    )
    .in_run(super::Setup { forms: ABSORBED.forms, ..TILES }),
    row(
        ("output-gain", "F28"),
        "output-gain={}",
        "attn_out is too large by a little",
        &["attn_out"],
        &["output × 1.1"],
    )
    .sized(FACTORS),
    row(
        ("output-half", "F03"),
        "output-gain=0.5",
        "attn_out is half of what it should be: a scale of a factor two",
        &["attn_out"],
        &["output × 1/2"],
    )
    .of(&["sgl-project/sglang#2667"])
    .seen_by_norms(),
    row(
        ("head-gain", "F22"),
        "head-gain={}",
        "one head is too large by a little",
        &["attn_out"],
        &["head 1 × 1.1"],
    )
    .of(&["ggml-org/llama.cpp#18953"])
    .sized(FACTORS),
    row(
        ("heads-swapped", "F22"),
        "swap-heads=0,2",
        "two heads of attn_out are exchanged",
        &["attn_out"],
        &["heads 0 and 2 exchanged"],
    )
    .of(&["vllm-project/vllm-ascend#15882"]),
    row(("attn_out-element", "F24"), "attn_out-element={}", "one element is another", &["attn_out"], &[])
        .of(&["ROCm/aiter#3682"])
        .sized(&[0.25, 0.1, 0.03, 0.01, 0.003]),
    row(
        ("mask-one-more", "F14"),
        "mask=1",
        "each row sees one key more than the causal mask allows",
        &["lse"],
        &["mask +1"],
    )
    .of(&["vectorch-ai/ScaleLLM#408"])
    .in_run(FUSED),
    row(
        ("length-one-short", "F14"),
        "mask=-1",
        "the length is one short: no row sees its own key",
        &["part_o"],
        &["mask -1"],
    )
    .of(&["sgl-project/sglang#15601"])
    .in_run(ABSORBED),
    row(("no-mask", "F14"), "no-mask", "there is no causal mask", &["lse"], &["no mask"])
        .of(&["ROCm/aiter#3046"])
        .in_run(FUSED),
    row(("no-mask-absorbed", "F14"), "no-mask", "there is no causal mask", &["o_latent"], &["no mask"])
        .in_run(ABSORBED),
    row(
        ("first-key-lost", "F14"),
        "lose=first-key",
        "attention begins at the second key",
        &["part_o"],
        &["first key left out", "key 0 left out", "key 0 of request"],
    ),
    row(
        ("last-tile-lost", "F22"),
        "lose=last-tile",
        "keys after the last whole tile are left out",
        &["part_o"],
        &["last partial tile left out"],
    )
    .of(&["tile-ai/tilelang#1213"]),
    row(
        ("last-page-lost", "F22"),
        "lose=last-page",
        "keys after the last whole page are left out",
        &["part_o"],
        &["last partial page left out"],
    )
    .of(&["tile-ai/tilelang#1266"])
    .in_run(ABSORBED),
    row(
        ("no-last-rescale", "F22"),
        "no-last-rescale",
        "the last tile does not rescale the sums",
        &["lse"],
        &["no rescale at the last tile"],
    )
    .of(&["tile-ai/tilelang#1213"])
    .in_run(TILES),
    row(
        ("last-head-lost", "F22"),
        "zero-head=3",
        "the last head is not computed",
        &["attn_out"],
        &["zeros throughout"],
    )
    .of(&["ROCm/ATOM#2120", "ggml-org/llama.cpp#26404"])
    .seen_by_norms(),
    row(
        ("columns-lost", "F22"),
        "zero-columns=16",
        "only the first columns of each head are computed",
        &["attn_out"],
        &["columns zero"],
    )
    .of(&["triton-lang/triton#621"])
    .seen_by_norms(),
    row(
        ("columns-lost-absorbed", "F22"),
        "zero-columns=32@o_latent",
        "only the first columns of the latent output are computed",
        &["o_latent"],
        &["columns zero"],
    )
    .of(&["vllm-project/vllm#41119"])
    .in_run(ABSORBED)
    .seen_by_norms(),
    row(
        ("values-of-next-head", "F25"),
        "next-head=v",
        "each head attends with the next head's values",
        &["part_o"],
        &["heads of v"],
    )
    .of(&["flashinfer-ai/flashinfer#2689"])
    .in_run(FUSED),
    row(
        ("keys-of-next-head", "F25"),
        "next-head=k",
        "each head attends with the next head's keys",
        &["part_o"],
        &["heads of k"],
    )
    .of(&["NVIDIA/cutlass#3173"])
    .in_run(FUSED),
    row(
        ("scores-without-rope", "F25"),
        "scores-without=rope",
        "the rope part is left out of the scores",
        &["part_o"],
        &["rope part left out"],
    )
    .of(&["vllm-project/vllm#32614"])
    .in_run(ABSORBED),
    row(
        ("scores-without-nope", "F25"),
        "scores-without=nope",
        "the part without rope is left out of the scores",
        &["part_o"],
        &["nope part left out"],
    ),
    row(
        ("heads-shifted", "F25"),
        "head-shift=1",
        "fragments of heads stand one head early",
        &["attn_out"],
        &["heads permuted"],
    )
    .of(&["flashinfer-ai/flashinfer#2689"]),
    row(
        ("heads-reversed", "F25"),
        "heads-reversed@q_latent",
        "heads of q_latent stand in reverse order",
        &["q_latent"],
        &["heads reversed"],
    )
    .of(&["sgl-project/sglang#10058"])
    .in_run(ABSORBED),
    row(
        ("tokens-swapped", "F05"),
        "swap-rows=1,2@q",
        "two tokens of q are exchanged",
        &["q"],
        &["rows of other places"],
    ),
    row(
        ("race", "F24"),
        "noise={}@attn_out",
        "elements differ at random, as after a race",
        &["attn_out"],
        &[],
    )
    .of(&["ikawrakow/ik_llama.cpp#2347"])
    .sized(&[0.1, 0.03, 0.01, 0.005]),
    row(
        ("few-bits", "F28"),
        "fewer-bits=6@q_latent",
        "q_latent is rounded to fewer bits than its dtype has",
        &["q_latent"],
        &["rounded to 6 bits"],
    )
    .of(&["ggml-org/llama.cpp#11446"])
    .in_run(ABSORBED),
    row(
        ("gain-in-f16", "F28"),
        "output-gain={}",
        "attn_out is too large by a little, in f16",
        &["attn_out"],
        &["output × 1.1"],
    )
    .of(&["vllm-project/vllm#14809"])
    .in_run(super::Setup { dtype: DType::F16, ..FUSED })
    .sized(FACTORS),
    row(
        ("scale-in-f32", "F07"),
        "softmax-scale={}",
        "the softmax scale is off by a little, in f32",
        &["part_o"],
        &["softmax scale × 1.1"],
    )
    .in_run(super::Setup { dtype: DType::F32, ..FUSED })
    .sized(FACTORS),
    row(
        ("scale-peaked", "F07"),
        "softmax-scale={}",
        "the softmax scale is off by a little, where heads attend to one key",
        &["part_o"],
        &["softmax scale × 1.1"],
    )
    .in_run(super::Setup { regime: Regime::Peaked, ..FUSED })
    .sized(FACTORS),
    row(
        ("rank-head-gain", "F02"),
        "zero-head=0",
        "a head of one rank is not computed",
        &["attn_out"],
        &["zeros throughout"],
    )
    .of(&["vllm-project/vllm#47779"])
    .in_run(RANKS)
    .seen_by_norms(),
];
