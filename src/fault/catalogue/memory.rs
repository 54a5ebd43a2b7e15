/*! Faults of what is stored where: the cache, page tables, buffers, rows and strides. */

use super::{ABSORBED, FUSED, Row, row};

pub(super) const ROWS: &[Row] = &[
    row(("cache-element", "F27"), "cache-element", "one element of the cache is another", &["cache"], &[])
        .of(&["LMCache/LMCache#530"]),
    row(
        ("foreign-page", "F12"),
        "foreign-page=0",
        "the first page of each table leads to another request's",
        &["k"],
        &["rows of other places", "page 0 ←"],
    )
    .of(&["sgl-project/sglang#25556", "vllm-project/vllm#49427"]),
    row(
        ("foreign-page-absorbed", "F12"),
        "foreign-page=2",
        "a page in the middle of each table leads to another request's",
        &["part_o"],
        &["page 2"],
    )
    .of(&["sgl-project/sglang#16531"])
    .in_run(ABSORBED),
    row(
        ("phantom-output", "F23"),
        "phantom-output",
        "the projection reads another buffer than attention wrote",
        &["out"],
        &["zeros throughout"],
    )
    .of(&["vllm-project/vllm#31701", "vllm-project/vllm#16618"]),
    row(
        ("skipped-row", "F23"),
        "skipped-row",
        "the last row of attn_out is never written",
        &["attn_out"],
        &["unwritten rows"],
    )
    .of(&["sgl-project/sglang#4964"])
    .seen_by_norms(),
    row(
        ("skipped-row-k_pe", "F23"),
        "skipped-row@k_pe",
        "the last row of k_pe is never written",
        &["k_pe"],
        &["unwritten rows"],
    )
    .seen_by_norms(),
    row(
        ("new-row-not-written", "F09"),
        "lost-token",
        "the cache row of each request's last new token is never written",
        &["cache"],
        &["unwritten rows"],
    )
    .of(&["vllm-project/vllm#42581", "vllm-project/vllm#13922"])
    .seen_by_norms(),
    row(
        ("slots-one-late", "F09"),
        "late-slots",
        "cache rows of new tokens go one slot too far",
        &["cache"],
        &["rows of other places", "stale rows"],
    )
    .of(&["vllm-project/vllm-ascend#16775"]),
    row(
        ("pad-row-in-a-slot", "F09"),
        "overwritten-slot",
        "a padding row is written into a slot that a request owns",
        &["cache"],
        &["rows of other places", "stale rows"],
    )
    .of(&["sgl-project/sglang#36207"]),
    row(
        ("old-rows-stay", "F09"),
        "stale-rows=1@cache",
        "a slot keeps the row of a request that is gone",
        &["cache"],
        &["stale rows", "rows of other places"],
    )
    .of(&["mudler/vllm.cpp#2672"]),
    row(("rope-first", "F11"), "rope-first", "cache rows hold the rope part first", &["cache"], &["columns"])
        .of(&["ggml-org/llama.cpp#12801", "ggml-org/llama.cpp#8862"]),
    row(
        ("value-view-late", "F11"),
        "value-view=64",
        "values are read from the rope's width on, as if rope came first",
        &["part_o"],
        &["values from column 64"],
    )
    .of(&["ggml-org/llama.cpp#12801"])
    .in_run(ABSORBED),
    row(
        ("own-page", "F12"),
        "own-page=1,0",
        "a page of each table is read as the one before it",
        &["k"],
        &["rows of other places"],
    )
    .of(&["flashinfer-ai/flashinfer#810"])
    .in_run(FUSED),
    row(
        ("own-page-absorbed", "F12"),
        "own-page=1,0",
        "a page of each table is read as the one before it",
        &["part_o"],
        &["page 1 ← 0"],
    )
    .of(&["flashinfer-ai/flashinfer#4347"])
    .in_run(ABSORBED),
    row(
        ("table-not-followed", "F12"),
        "pages=contiguous",
        "pages are read one after another from the first one on",
        &["k"],
        &["rows"],
    )
    .of(&["Dao-AILab/flash-attention#2367"])
    .in_run(FUSED)
    .seen_by_norms(),
    row(
        ("table-of-slots", "F12"),
        "pages=slots",
        "the table of pages is taken for a table of slots",
        &["k"],
        &["rows"],
    )
    .of(&["sgl-project/sglang#25556"])
    .in_run(FUSED)
    .seen_by_norms(),
    row(
        ("far-page-zero-keys", "F13"),
        "zero-page=1@k",
        "an index past 32 bits reads zeros: keys of a page",
        &["k"],
        &["zero rows"],
    )
    .of(&["flashinfer-ai/flashinfer#3130", "vllm-project/vllm#47671"])
    .in_run(FUSED)
    .seen_by_norms(),
    row(
        ("far-page-zero-values", "F13"),
        "zero-page=1@v",
        "an index past 32 bits reads zeros: values of a page",
        &["v"],
        &["zero rows"],
    )
    .of(&["vllm-project/vllm#4907"])
    .in_run(FUSED)
    .seen_by_norms(),
    row(
        ("far-page-other", "F13"),
        "stale-page=1@k",
        "an index past 32 bits reads another request's keys",
        &["k"],
        &["rows of other places"],
    )
    .of(&["yhfgyyf/vllm-deepseek-v4-sm89#51"])
    .in_run(FUSED),
    row(
        ("unowned-slots", "F19"),
        "pages=contiguous",
        "slots that no request owns are read: NaN reaches the output",
        &["part_o"],
        &["page table not followed"],
    )
    .of(&["flashinfer-ai/flashinfer#941", "flashinfer-ai/flashinfer#942", "Dao-AILab/flash-attention#2374"])
    .in_run(ABSORBED)
    .seen_by_norms(),
    row(
        ("stride-of-q", "F21"),
        "stride=8@q",
        "rows of q are read with a stride 8 elements too long",
        &["q"],
        &["stride"],
    )
    .of(&["ml-explore/mlx#1340", "ml-explore/mlx#3795"]),
    row(
        ("stride-of-k_pe", "F21"),
        "stride=-8@k_pe",
        "rows of k_pe are read with a stride that lacks their padding",
        &["k_pe"],
        &["stride"],
    )
    .of(&["vllm-project/vllm-xpu-kernels#165"]),
    row(
        ("padded-values", "F21"),
        "padded",
        "heads padded to the key's width are cut without taking the padding out",
        &["attn_out"],
        &["padded"],
    )
    .of(&["vllm-project/vllm#42642"]),
    row(
        ("heads-first", "F21"),
        "heads-first@attn_out",
        "attn_out is stored head by head and read token by token",
        &["attn_out"],
        &["head by head"],
    )
    .of(&["vllm-project/vllm#14658"])
    .in_run(FUSED),
    row(
        ("row-stays-zero", "F23"),
        "zero-rows=3",
        "the last rows of attn_out keep the zeros that they began with",
        &["attn_out"],
        &["zero rows"],
    )
    .of(&["vllm-project/vllm#31701"])
    .seen_by_norms(),
    row(
        ("row-of-last-step", "F23"),
        "stale-rows=2",
        "rows of attn_out hold what stood there before",
        &["attn_out"],
        &["stale rows"],
    ),
    row(
        ("stale-chunk", "F27"),
        "stale-page=0",
        "a chunk of the cache came over as another's",
        &["cache"],
        &["rows of other places", "stale rows"],
    )
    .of(&["LMCache/LMCache#4870", "vllm-project/vllm#52617"]),
    row(
        ("missing-chunk", "F27"),
        "zero-page=1",
        "a chunk of the cache did not come over",
        &["cache"],
        &["zero rows"],
    )
    .of(&["ROCm/ATOM#2154", "sgl-project/sglang#30321"])
    .seen_by_norms(),
    row(
        ("stale-rope-part", "F27"),
        "stale-rope@cache",
        "the rope part of cache rows is that of the rows before",
        &["cache"],
        &[],
    )
    .of(&["sgl-project/sglang#33656"]),
    row(
        ("table-of-slots-absorbed", "F12"),
        "pages=slots",
        "the table of pages is taken for a table of slots",
        &["part_o"],
        &["page table taken for slots"],
    )
    .of(&["sgl-project/sglang#25556"])
    .in_run(ABSORBED),
];
