/*!
Faults inside kernels that were written after the judge was done, and run once against it as it was: what they say of it is
in docs/faults.md, untouched. They stay in the catalogue, apart from those that the judge was built with.
*/

use super::shows::{LATENT, LATENT_F32, LATENT_SPLIT, PREFILL, SHORT, stored};
use super::{First, Mutation, ROW, tensor};
use mla_reference::{GgmlType, Stage, Weight};

pub(super) const ROWS: &[Mutation] = &[
    Mutation {
        name: "fused-scale-one-per-mille",
        kernel: "fused.cu",
        family: "F07",
        broken: "the fused kernel's softmax takes a scale that is 0.1 % too large",
        from: "x[n % 4] = exp2_(fmaf(x[n % 4], p.c2, shift",
        to: "x[n % 4] = exp2_(fmaf(x[n % 4], p.c2 * 1.001f, shift",
        shows: PREFILL,
        first: tensor(Stage::Lse),
        cause: Some("scale"),
        ..ROW
    },
    Mutation {
        name: "fused-values-of-even-heads",
        kernel: "fused.cu",
        family: "F21",
        broken: "each odd head reads the values of the head before it, as in grouped attention",
        from: "i64(head) * p.v_head + own",
        to: "i64(head & ~1) * p.v_head + own",
        shows: PREFILL,
        first: tensor(Stage::AttnOut),
        ..ROW
    },
    Mutation {
        name: "absorbed-rope-of-the-head-before",
        kernel: "absorbed.cu",
        family: "F21",
        broken: "each head but the first reads the rope part of q of the head before it",
        from: "i64(head) * p.q_head + p.rope_at",
        to: "i64(head ? head - 1 : 0) * p.q_head + p.rope_at",
        shows: LATENT,
        first: tensor(Stage::OLatent),
        ..ROW
    },
    Mutation {
        name: "absorbed-slots-turned-in-a-page",
        kernel: "absorbed.cu",
        family: "F12",
        broken: "keys lie one slot further in their page than they are read for, and the last one at its beginning",
        from: "+ (position - entry * p.page_size);",
        to: "+ (position - entry * p.page_size + 1) % p.page_size;",
        shows: LATENT,
        first: tensor(Stage::OLatent),
        norms: true,
        ..ROW
    },
    Mutation {
        name: "merge-not-divided",
        kernel: "merge.cu",
        family: "F17",
        broken: "the merge does not divide by the sum of its weights",
        from: "narrow(sum * inverse)",
        to: "narrow(sum)",
        shows: LATENT_SPLIT,
        first: tensor(Stage::OLatent),
        norms: true,
        ..ROW
    },
    Mutation {
        name: "rope-frequencies-in-pairs",
        kernel: "rope.cu",
        family: "F06",
        broken: "two pairs after each other are rotated by one frequency, the upper half of the table is not used",
        from: "c = p.cosine[row * half + j];\n            s = p.sine[row * half + j];",
        to: "c = p.cosine[row * half + j / 2];\n            s = p.sine[row * half + j / 2];",
        shows: SHORT,
        first: tensor(Stage::Q),
        ..ROW
    },
    Mutation {
        name: "key-rope-of-the-key-before",
        kernel: "cache.cu",
        entries: &["key_rope"],
        family: "F11",
        broken: "each key but the first takes the rope columns of the key before it",
        from: "size_t(p.slots[row]) * (p.latent_cols + p.rope_cols) + p.latent_cols",
        to: "size_t(p.slots[row ? row - 1 : 0]) * (p.latent_cols + p.rope_cols) + p.latent_cols",
        shows: PREFILL,
        first: tensor(Stage::K),
        ..ROW
    },
    Mutation {
        name: "product-neighbours-exchanged",
        kernel: "product.cu",
        entries: &["product"],
        family: "F21",
        broken: "the two columns that are stored together change places",
        from: "pack(sum[m][n][2 * e], sum[m][n][2 * e + 1]);",
        to: "pack(sum[m][n][2 * e + 1], sum[m][n][2 * e]);",
        shows: SHORT,
        first: tensor(Stage::QA),
        ..ROW
    },
    Mutation {
        name: "q4-0-zero-at-7",
        kernel: "dequant.cu",
        entries: &["dequant_q4_0"],
        family: "F01",
        broken: "codes of Q4_0 are taken as distances from 7, not from 8",
        from: "using Q4_0 = Split<18, false, 0, 2, 8>;",
        to: "using Q4_0 = Split<18, false, 0, 2, 7>;",
        shows: stored("stored as Q4_0", GgmlType::Q4_0),
        first: Some(First::Weight(Weight::WQA)),
        norms: true,
        ..ROW
    },
    Mutation {
        name: "absorbed-f32-wait-missing",
        kernel: "absorbed_f32.cu",
        family: "F24",
        broken: "the float32 kernel does not wait for its copies of the cache before it reads them",
        from: "wait<0>();\n        __syncthreads();",
        to: "__syncthreads();",
        shows: LATENT_F32,
        finding: Some("async-in-flight in absorbed"),
        ..ROW
    },
];
