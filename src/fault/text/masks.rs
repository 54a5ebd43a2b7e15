/*! Which keys a row sees, and what becomes of the last tile. */

use super::shows::{DECODE, DECODE_F32, LATENT, LATENT_FEW, ONE_TILE, PREFILL, PREFILL_F32};
use super::{Mutation, ROW, tensor};
use mla_reference::Stage;

// The fused kernel stores lse and output at once, and the lse stands first in the table.
const FUSED: Mutation = Mutation { kernel: "fused.cu", first: tensor(Stage::Lse), family: "F14", ..ROW };
const ABSORBED: Mutation =
    Mutation { kernel: "absorbed.cu", first: tensor(Stage::OLatent), shows: LATENT, ..FUSED };

pub(super) const ROWS: &[Mutation] = &[
    Mutation {
        name: "fused-mask-plus-one",
        issues: &["vectorch-ai/ScaleLLM#408"],
        broken: "the fused kernel's causal mask lets each row see one key more",
        from: "const int sees0 = w.visible + token0 + row0 - w.begin,",
        to: "const int sees0 = w.visible + token0 + row0 - w.begin + 1,",
        shows: PREFILL,
        cause: Some("mask +1"),
        ..FUSED
    },
    Mutation {
        name: "fused-mask-minus-one",
        issues: &["vectorch-ai/ScaleLLM#408"],
        broken: "the fused kernel's causal mask hides each row's own key",
        from: "const int sees0 = w.visible + token0 + row0 - w.begin,",
        to: "const int sees0 = w.visible + token0 + row0 - w.begin - 1,",
        shows: PREFILL,
        cause: Some("mask -1"),
        norms: true,
        ..FUSED
    },
    Mutation {
        name: "fused-no-mask",
        issues: &["ROCm/aiter#3046", "vectorch-ai/ScaleLLM#408"],
        broken: "the fused kernel masks what lies behind the last key, and nothing by position",
        from: "const int sees = min(sees0 + m * 16 + line + e / 2 * 8, end) - key0 - pair - e % 2;",
        to: "const int sees = end - key0 - pair - e % 2;",
        shows: ONE_TILE,
        cause: Some("no mask"),
        norms: true,
        ..FUSED
    },
    Mutation {
        name: "absorbed-no-mask-among-tokens",
        family: "F15",
        issues: &["ROCm/aiter#3046", "vllm-project/vllm#45227"],
        broken: "the absorbed kernel takes several tokens of a request for one: each sees what the last one sees",
        from: "sees[r] = there ? seen(w, token - w.first / p.heads) : 0;",
        to: "sees[r] = there ? last : 0;",
        shows: LATENT_FEW,
        cause: Some("no mask"),
        ..ABSORBED
    },
    Mutation {
        name: "absorbed-mask-plus-one",
        issues: &["vectorch-ai/ScaleLLM#408"],
        broken: "the absorbed kernel's causal mask lets each token see one key more",
        from: "sees[r] = there ? seen(w, token - w.first / p.heads) : 0;",
        to: "sees[r] = there ? seen(w, token - w.first / p.heads + 1) : 0;",
        shows: LATENT_FEW,
        cause: Some("mask +1"),
        ..ABSORBED
    },
    Mutation {
        name: "fused-f32-mask-plus-one",
        kernel: "fused_f32.cu",
        issues: &["vectorch-ai/ScaleLLM#408"],
        broken: "the float32 kernel's causal mask lets each row see one key more",
        from: "all[r] = row0 + r < w.rows ? seen(w, token0 + row) : 0;",
        to: "all[r] = row0 + r < w.rows ? seen(w, token0 + row + 1) : 0;",
        shows: PREFILL_F32,
        cause: Some("mask +1"),
        ..FUSED
    },
    Mutation {
        name: "fused-tail-not-masked",
        family: "F22",
        issues: &["tile-ai/tilelang#1213"],
        broken: "the fused kernel lets rows see the zeros that fill up the last tile",
        from: "if (key0 + BN > warp_first) {",
        to: "if (key0 + BN < warp_first) {",
        shows: DECODE,
        cause: Some("keys of zeros to the end of the tile"),
        ..FUSED
    },
    Mutation {
        name: "fused-f32-one-key-of-zeros",
        kernel: "attention_f32.cuh",
        entries: &["fused"],
        family: "F22",
        issues: &["tile-ai/tilelang#1213"],
        broken: "the float32 kernels compare with <= in the mask: one key more, of zeros where there is none",
        from: "lane < sees[r] ? s[r]",
        to: "lane <= sees[r] ? s[r]",
        shows: DECODE_F32,
        cause: Some("keys of zeros once"),
        ..FUSED
    },
    Mutation {
        name: "absorbed-tail-not-masked",
        family: "F22",
        issues: &["tile-ai/tilelang#1213"],
        broken: "the absorbed kernel lets rows see the last key again where it fills up a slot",
        from: "if ((tile + 1) * BN > least) {",
        to: "if ((tile + 1) * BN < least) {",
        cause: Some("the last key again to the end of the"),
        ..ABSORBED
    },
    Mutation {
        name: "fused-last-tile-lost",
        family: "F22",
        issues: &["tile-ai/tilelang#1213"],
        broken: "the fused kernel drops the keys after the last whole tile",
        from: "tiles = (last + BN - 1) / BN;",
        to: "tiles = last / BN;",
        shows: DECODE,
        cause: Some("last partial tile left out"),
        ..FUSED
    },
    Mutation {
        name: "absorbed-last-tile-lost",
        family: "F22",
        issues: &["tile-ai/tilelang#1213"],
        broken: "the absorbed kernel drops the keys after the last whole tile",
        from: "tiles = (last + BN - 1) / BN;",
        to: "tiles = last / BN;",
        cause: Some("last partial tile left out"),
        ..ABSORBED
    },
];
