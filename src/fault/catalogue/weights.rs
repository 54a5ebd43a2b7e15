/*! Faults of weights: what a file or a loader makes of them, shards of ranks, stacks. */

use super::{RANKS, Row, STACKED, row};

pub(super) const ROWS: &[Row] = &[
    row(("w_uk-element", "F01"), "w_uk-element={}", "one element of w_uk is off", &["w_uk"], &[])
        .of(&["ikawrakow/ik_llama.cpp#601"])
        .sized(&[0.25, 0.1, 0.03, 0.01, 0.003]),
    row(("w_uv-element", "F01"), "w_uv-element", "one element of w_uv is off", &["w_uv"], &[]),
    row(("w_kv_a-element", "F01"), "w_kv_a-element", "one element of w_kv_a is off", &["w_kv_a"], &[]),
    row(
        ("g_kv-element", "F01"),
        "g_kv-element",
        "one element of the latent norm's weight is off",
        &["g_kv"],
        &[],
    ),
    row(
        ("slots-permuted", "F02"),
        "slots-permuted",
        "q_a and kv_a lie in the stack in the file's order, read in the declared one",
        &["w_q_a"],
        &["slots of qkv_a are permuted"],
    )
    .of(&["vllm-project/vllm#41057", "vllm-project/vllm#35019"])
    .in_run(STACKED),
    row(
        ("equal-chunks", "F02"),
        "equal-chunks",
        "the stack of q_a and kv_a is cut in two equal chunks",
        &["w_kv_a"],
        &["cut in equal chunks"],
    )
    .of(&["vllm-project/vllm#35019"])
    .in_run(STACKED),
    row(
        ("shard-zero", "F02"),
        "shard-zero",
        "every rank holds rank 0's shard of every weight with heads",
        &["w_q_b"],
        &["every rank holds rank 0's shard"],
    )
    .of(&["vllm-project/tpu-inference#2988"])
    .in_run(RANKS),
    row(
        ("shard-zero-w_uk", "F02"),
        "shard-zero@w_uk",
        "every rank holds rank 0's shard of w_uk",
        &["w_uk"],
        &["every rank holds rank 0's shard"],
    )
    .in_run(RANKS),
    row(
        ("shard-zero-w_uv", "F02"),
        "shard-zero@w_uv",
        "every rank holds rank 0's shard of w_uv",
        &["w_uv"],
        &["every rank holds rank 0's shard"],
    )
    .in_run(RANKS),
    row(
        ("shard-zero-w_o", "F02"),
        "shard-zero@w_o",
        "every rank holds rank 0's shard of w_o",
        &["w_o"],
        &["every rank holds rank 0's shard"],
    )
    .in_run(RANKS),
    row(
        ("lost-rank", "F02"),
        "lost-rank=1",
        "the sum over ranks lacks the part of one",
        &["out"],
        &["rank 1"],
    )
    .in_run(RANKS)
    .seen_by_norms(),
    row(
        ("w_uk-transposed", "F01"),
        "transposed@w_uk",
        "k_b is read with its axes exchanged",
        &["w_uk"],
        &["w_uk transposed"],
    )
    .of(&["ikawrakow/ik_llama.cpp#259", "ikawrakow/ik_llama.cpp#250"]),
    row(
        ("w_uv-transposed", "F01"),
        "transposed@w_uv",
        "v_b is read with its axes exchanged",
        &["w_uv"],
        &["w_uv transposed"],
    ),
    row(
        ("kv_b-halves", "F01"),
        "kv-b-halves",
        "kv_b, which lies head by head, is taken as all keys, then all values",
        &["w_uk"],
        &["kv_b laid otherwise"],
    )
    .of(&["ggml-org/llama.cpp#12801", "ikawrakow/ik_llama.cpp#394"]),
    row(
        ("kv_b-values-first", "F01"),
        "kv-b-values-first",
        "kv_b is taken as if each head had its values before its keys",
        &["w_uk"],
        &["kv_b laid otherwise"],
    )
    .of(&["ggml-org/llama.cpp#12725"]),
    row(
        ("w_uk-requantised", "F01"),
        "requantised@w_uk",
        "k_b is quantised a second time, to q8_0, whatever kv_b was",
        &["w_uk"],
        &["w_uk quantised again"],
    )
    .of(&["ikawrakow/ik_llama.cpp#259"]),
    row(
        ("w_uk-heads", "F01"),
        "weight-heads=0,2@w_uk",
        "two heads of k_b are exchanged",
        &["w_uk"],
        &["heads of w_uk are in another order"],
    ),
    row(
        ("w_q_b-heads", "F02"),
        "weight-heads=0,1@w_q_b",
        "two heads of q_b are exchanged",
        &["w_q_b"],
        &["heads of w_q_b are in another order"],
    ),
    row(
        ("w_q_b-cut-late", "F02"),
        "row-shift=16@w_q_b",
        "a shard of q_b is cut 16 rows late",
        &["w_q_b"],
        &["rows of w_q_b in another order"],
    )
    .of(&["vllm-project/tpu-inference#2988"]),
    row(
        ("qkv_a-cut-late", "F02"),
        "cut-at=8",
        "the stack of q_a and kv_a is cut 8 rows late",
        &["w_kv_a"],
        &["qkv_a cut at another row", "rows of w_q_a in w_kv_a"],
    )
    .of(&["vllm-project/vllm#35019"])
    .in_run(STACKED),
    row(
        ("w_uv-not-loaded", "F02"),
        "zero-half@w_uv",
        "a rank's shard of v_b was never loaded",
        &["w_uv"],
        &["rows of w_uv zero"],
    )
    .of(&["vllm-project/vllm#35019"])
    .in_run(RANKS)
    .seen_by_norms(),
    row(
        ("w_q_a-not-loaded", "F02"),
        "zero-half@w_q_a",
        "half of q_a was never loaded",
        &["w_q_a"],
        &["rows of w_q_a zero"],
    )
    .seen_by_norms(),
    row(
        ("norm-weight-shifted", "F02"),
        "row-shift=64@g_kv",
        "the latent norm's weight is sharded though every rank needs all of it",
        &["g_kv"],
        &["columns of g_kv in another order"],
    )
    .of(&["sgl-project/sglang#20967"]),
    row(
        ("scale-factor-two", "F03"),
        "weight-gain=2@w_uk",
        "k_b's scale is twice what it should be, as between two fp8 formats",
        &["w_uk"],
        &["w_uk × 2"],
    )
    .of(&["sgl-project/sglang#2667"])
    .seen_by_norms(),
    row(
        ("scale-of-w_uv-small", "F03"),
        "weight-gain={}@w_uv",
        "v_b's scale is a little too large",
        &["w_uv"],
        &["w_uv × 1.1"],
    )
    .of(&["sgl-project/sglang#39193"])
    .sized(super::elementwise::FACTORS)
    .seen_by_norms(),
    row(
        ("scale-of-tail", "F03"),
        "tail-gain={}@w_kv_a",
        "the last, partial block of kv_a's rows takes the scale of another",
        &["w_kv_a"],
        &["rows 128..191 of w_kv_a × 1.1"],
    )
    .of(&["huggingface/transformers#36026", "vllm-project/vllm-gaudi#1220"])
    .sized(super::elementwise::FACTORS)
    .seen_by_norms(),
    row(
        ("scale-rounded", "F03"),
        "weight-gain=1.3125@w_o",
        "a scale is rounded to a power of two after the values were quantised with the exact one",
        &["w_o"],
        &["w_o × 1.3125"],
    )
    .of(&["sgl-project/sglang#28418"])
    .seen_by_norms(),
    row(
        ("stale-w_uk", "F04"),
        "stale-weight@w_uk",
        "the absorbed k_b is another layer's",
        &["w_uk"],
        &["w_uk of layer 1"],
    )
    .of(&["sgl-project/sglang#6265", "vllm-project/vllm-ascend#16717"]),
    row(
        ("stale-w_uv", "F04"),
        "stale-weight@w_uv",
        "the absorbed v_b is another layer's",
        &["w_uv"],
        &["w_uv of layer 1"],
    )
    .of(&["vllm-project/vllm-ascend#16700"]),
    row(("stale-drift", "F04"), "drift={}@w_uk", "k_b is that of older weights", &["w_uk"], &[])
        .of(&["InternLM/lmdeploy#4917"])
        .sized(&[0.1, 0.01, 0.003, 0.001, 0.0003]),
    row(
        ("rope-rows-permuted", "F06"),
        "rope-rows@w_kv_a",
        "the rope rows of kv_a are permuted for half-split pairs, and rotated in adjacent ones",
        &["w_kv_a"],
        &["rows of w_kv_a in another order"],
    )
    .of(&["huggingface/transformers#35926"]),
    row(
        ("rope-rows-of-q", "F06"),
        "rope-rows@w_q_b",
        "the rope rows of q_b are permuted for half-split pairs, and rotated in adjacent ones",
        &["w_q_b"],
        &["rows of w_q_b in another order"],
    )
    .of(&["huggingface/transformers#35926"]),
    row(
        ("latent-width", "F05"),
        "row-shift=64@w_kv_a",
        "kv_a is split at the rope's width: latent and rope change places",
        &["w_kv_a"],
        &["rows of w_kv_a in another order"],
    )
    .of(&["junfanz1/MiniGPT-and-DeepSeek-MLA-Multi-Head-Latent-Attention#1"])
    .seen_by_norms(),
    row(
        ("weight-plus-one", "F08"),
        "norm-plus-one@g_kv",
        "the latent norm's weight is stored less one, and one is added to it",
        &["g_kv"],
        &["g_kv plus one"],
    )
    .seen_by_norms(),
    row(
        ("weight-left-out", "F08"),
        "norm-left-out@g_q",
        "the query norm's weight is taken for one",
        &["g_q"],
        &["g_q left out"],
    ),
];
