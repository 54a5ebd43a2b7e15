/*! Faults of norms, rope and the softmax scale. */

use super::{ABSORBED, FUSED, Row, row};

/// Steps of a factor: 10 % down to a ten-thousandth.
pub(super) const FACTORS: &[f64] = &[1.1, 1.03, 1.01, 1.003, 1.001, 1.0003, 1.0001];

pub(super) const ROWS: &[Row] = &[
    row(
        ("q-position", "F06"),
        "rope-offset={}",
        "q is rotated by another position",
        &["q"],
        &["position of q"],
    )
    .of(&["ModelTC/LightLLM#672"])
    .sized(&[1.0, 0.3, 0.1, 0.03, 0.01]),
    row(
        ("k_pe-position", "F06"),
        "rope-offset=1@k_pe",
        "k_pe is rotated by the next position",
        &["k_pe"],
        &["position of k_pe +1"],
    ),
    row(
        ("scale-small", "F07"),
        "softmax-scale={}",
        "the softmax scale is off by a little",
        &["part_o"],
        &["softmax scale × 1.1"],
    )
    .of(&["antonellof/ferrox#226"])
    .sized(FACTORS)
    .in_run(FUSED),
    row(
        ("scale-log2e", "F07"),
        "softmax-scale=1.4426950408889634",
        "exp2 takes the place of exp with no log2(e) in the scale, or with it twice",
        &["part_o"],
        &["log2(e)"],
    )
    .of(&["NVIDIA/TensorRT-LLM#6881"])
    .in_run(FUSED),
    row(
        ("scale-no-mscale", "F07"),
        "softmax-scale=0.5336594470450007",
        "YaRN's mscale² is left out of the softmax scale",
        &["part_o"],
        &["1/mscale²"],
    )
    .of(&[
        "sgl-project/sglang#3785",
        "onnxruntime/mobius#548",
        "huggingface/transformers#47435",
        "vllm-project/tpu-inference#521",
    ])
    .in_run(ABSORBED),
    row(
        ("scale-mscale-twice", "F07"),
        "softmax-scale=1.8738542070926276",
        "YaRN's mscale² is multiplied in twice",
        &["part_o"],
        &["× mscale²"],
    )
    .of(&["1bit-MONSTER/1bit-MONSTER#1632"])
    .in_run(FUSED),
    row(
        ("scale-mscale-once", "F07"),
        "softmax-scale=0.7305199840148117",
        "mscale is multiplied in once, not squared",
        &["part_o"],
        &["1/mscale |"],
    )
    .of(&["ggml-org/llama.cpp#17945"])
    .in_run(FUSED),
    row(
        ("scale-of-latent", "F07"),
        "softmax-scale=0.9128709291752769",
        "the scale is made of the latent key's width, latent+rope, not of nope+rope",
        &["part_o"],
        &["√(160/192)"],
    )
    .of(&["antonellof/ferrox#225"])
    .in_run(ABSORBED),
    row(
        ("scale-of-nope", "F07"),
        "softmax-scale=1.2909944487358056",
        "the scale is made of the width without rope",
        &["part_o"],
        &["√(160/96)"],
    )
    .of(&["huggingface/optimum-intel#1877"])
    .in_run(FUSED),
    row(
        ("scale-of-value", "F07"),
        "softmax-scale=1.5811388300841898",
        "the scale is made of the value's width",
        &["part_o"],
        &["√(160/64)"],
    )
    .in_run(FUSED),
    row(
        ("scale-none", "F07"),
        "softmax-scale=6.750317390112865",
        "there is no scale at all",
        &["part_o"],
        &["no scale at all"],
    )
    .of(&["mlc-ai/mlc-llm#3426", "MetaX-MACA/vLLM-metax#113"])
    .in_run(ABSORBED),
    row(("eps", "F08"), "eps={}", "eps of every norm is another", &["attn_in"], &["eps"])
        .of(&["huggingface/transformers#44346"])
        .sized(&[10.0, 5.0, 2.0, 1.5, 1.1]),
    row(
        ("eps-latent", "F08"),
        "eps=10@kv_c_normed",
        "eps of the latents' norms is that of the layer's",
        &["q_a_normed", "kv_c_normed"],
        &["eps"],
    )
    .of(&["huggingface/transformers#44346"]),
    row(
        ("eps-on-the-sum", "F08"),
        "eps=0.0078125@kv_c_normed",
        "eps is added to the sum of squares, not to their mean",
        &["q_a_normed", "kv_c_normed"],
        &["eps"],
    )
    .of(&["ml-explore/mlx-lm#1624"]),
    row(
        ("norm-gain", "F08"),
        "output-gain={}@kv_c_normed",
        "the normed latent is too large",
        &["kv_c_normed"],
        &["output × 1.1"],
    )
    .sized(FACTORS)
    .seen_by_norms(),
    row(("rope-skipped", "F06"), "rope=skipped", "neither q nor k_pe is rotated", &["q"], &["rope skipped"]),
    row(
        ("k_pe-not-rotated", "F06"),
        "rope=skipped@k_pe",
        "k_pe goes into the cache as it was projected",
        &["k_pe"],
        &["rope skipped"],
    )
    .of(&["ml-explore/mlx-lm#1189"]),
    row(("q-rotated-twice", "F06"), "rope=twice@q", "q is rotated twice", &["q"], &["rope twice"]),
    row(
        ("q-rotated-backwards", "F06"),
        "rope=backwards@q",
        "q is rotated by minus the angle",
        &["q"],
        &["rope backwards"],
    ),
    row(
        ("half-split-pairs", "F06"),
        "rope=other-pairs",
        "q and k_pe are rotated in half-split pairs, the file's order is adjacent",
        &["q"],
        &["rope with half-split pairs"],
    )
    .of(&["vllm-project/vllm#26995", "huggingface/optimum-intel#1877"]),
    row(
        ("half-split-k_pe", "F06"),
        "rope=other-pairs@k_pe",
        "k_pe alone is rotated in half-split pairs",
        &["k_pe"],
        &["rope with half-split pairs"],
    ),
    row(
        ("base-of-others", "F06"),
        "rope=base-1000000",
        "rope has another base, and no YaRN",
        &["q"],
        &["rope base 1000000"],
    )
    .of(&["ml-explore/mlx-lm#1189"]),
    row(
        ("no-yarn", "F06"),
        "rope=base-10000",
        "YaRN's frequencies are left out",
        &["q"],
        &["rope without YaRN"],
    )
    .of(&["vllm-project/vllm-ascend#1530"]),
    row(
        ("positions-of-new", "F06"),
        "positions=within",
        "positions count the new tokens alone",
        &["q"],
        &["without context"],
    )
    .of(&["vllm-project/vllm#56440"]),
    row(
        ("positions-of-batch", "F14"),
        "positions=batch",
        "positions count over the whole batch",
        &["q"],
        &["over the batch"],
    )
    .of(&["vllm-project/vllm#43966"]),
    row(
        ("table-too-short", "F06"),
        "positions=table-64",
        "the rope table ends before the context does",
        &["q"],
        &["stop at 64"],
    )
    .of(&["pegainfer-project/pegainfer#220", "vllm-project/vllm#44286"]),
    row(
        ("stored-in-pairs", "F06"),
        "paired-rope@k_pe",
        "k_pe is rotated right and stored in half-split order",
        &["k_pe"],
        &["half-split order", "columns of k_pe in another order"],
    ),
    row(
        ("magnitude-on-rope", "F07"),
        "rope=magnitude-1.368887945411394",
        "cos and sin carry mscale though the ratio is one",
        &["q"],
        &["rope magnitude mscale"],
    )
    .of(&["ggml-org/llama.cpp#7118", "ggml-org/llama.cpp#17945"])
    .seen_by_norms(),
    row(
        ("norm-skipped", "F08"),
        "norm=skipped@kv_c_normed",
        "the latent goes on without its norm",
        &["kv_c_normed"],
        &["norm skipped"],
    )
    .of(&["NVIDIA/Megatron-LM#1620"])
    .seen_by_norms(),
    row(
        ("norm-without-weight", "F08"),
        "norm=no-weight@kv_c_normed",
        "the latent's norm does not multiply with its weight",
        &["kv_c_normed"],
        &["norm weight left out"],
    ),
    row(
        ("norm-plus-one", "F08"),
        "norm=plus-one@q_a_normed",
        "the query's norm multiplies with one and its weight",
        &["q_a_normed"],
        &["norm weight plus one"],
    )
    .seen_by_norms(),
    row(
        ("norm-of-all-columns", "F08"),
        "norm=wide@kv_c_normed",
        "the latent's norm is taken over latent and rope together",
        &["kv_c_normed"],
        &["norm over latent and rope"],
    )
    .of(&["vllm-project/vllm#51049"]),
];
