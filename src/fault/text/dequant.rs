/*! Decoding of stored blocks: scales, minima, zero points, order, the last block. */

use super::shows::{Shows, stored};
use super::{First, Mutation, ROW};
use mla_reference::{GgmlType, Weight};

const DECODED: Mutation =
    Mutation { kernel: "dequant.cu", family: "F01", first: Some(First::Weight(Weight::WQA)), ..ROW };
const Q4_K: Shows = stored("stored as Q4_K", GgmlType::Q4_K);
const Q8_0: Shows = stored("stored as Q8_0", GgmlType::Q8_0);

pub(super) const ROWS: &[Mutation] = &[
    Mutation {
        name: "q4-k-high-bits-of-scales",
        entries: &["dequant_q4_k"],
        family: "F03",
        broken: "scales of groups 4 to 7 of Q4_K lack their two high bits",
        from: "(z & 15) | x >> 6 << 4, minimum",
        to: "(z & 15), minimum",
        shows: Q4_K,
        norms: true,
        ..DECODED
    },
    Mutation {
        name: "q4-k-minimum-added",
        entries: &["dequant_q4_k"],
        broken: "the minimum of Q4_K is added where it should be taken away",
        from: "-(half_at(b + 2) * float(minimum))",
        to: "half_at(b + 2) * float(minimum)",
        shows: Q4_K,
        norms: true,
        ..DECODED
    },
    Mutation {
        name: "q6-k-scales-without-sign",
        entries: &["dequant_q6_k"],
        family: "F03",
        broken: "scales of Q6_K are read without their sign",
        from: "float((signed char)byte(b + 192 + p / 2))",
        to: "float(byte(b + 192 + p / 2))",
        shows: stored("stored as Q6_K", GgmlType::Q6_K),
        norms: true,
        ..DECODED
    },
    Mutation {
        name: "q8-0-codes-without-sign",
        entries: &["dequant_q8_0"],
        broken: "codes of Q8_0 are read without their sign",
        from: "return {{c.w[0] ^ 0x80808080u, c.w[1] ^ 0x80808080u}, half_at(b), 0.f};",
        to: "return {{c.w[0], c.w[1]}, half_at(b), 0.f};",
        shows: Q8_0,
        ..DECODED
    },
    Mutation {
        name: "last-block-not-decoded",
        kernel: "dequant.cuh",
        entries: &["dequant_q8_0"],
        family: "F03",
        issues: &["huggingface/transformers#36026"],
        broken: "the last block of a weight is not decoded",
        from: "if (block >= d.count) return;",
        to: "if (block + 1 >= d.count) return;",
        finding: Some("never written"),
        shows: Q8_0,
        norms: true,
        cause: Some("values of w_q_a unwritten"),
        ..DECODED
    },
    Mutation {
        name: "nibbles-in-pairs",
        kernel: "dequant.cuh",
        entries: &["dequant_q4_0"],
        issues: &["ikawrakow/ik_llama.cpp#305"],
        broken: "low and high nibbles of a block of 32 are taken for each other",
        from: "(qs + p % 2 * 8), p / 2 * 4, 4);",
        to: "(qs + p % 2 * 8), (1 - p / 2) * 4, 4);",
        shows: stored("stored as Q4_0", GgmlType::Q4_0),
        cause: Some("columns of w_q_a in another order"),
        ..DECODED
    },
    Mutation {
        name: "q5-0-fifth-bit",
        entries: &["dequant_q5_0"],
        broken: "fifth bits of Q5_0 are those of the other half of the block",
        from: "spread(byte(b + QH + p)), 4)",
        to: "spread(byte(b + QH + (p ^ 2))), 4)",
        shows: stored("stored as Q5_0", GgmlType::Q5_0),
        ..DECODED
    },
    Mutation {
        name: "iq4-xs-scale-off-by-one",
        entries: &["dequant_iq4_xs"],
        family: "F03",
        broken: "scales of IQ4_XS are one too large",
        from: "float(int(low | high << 4) - 32)",
        to: "float(int(low | high << 4) - 31)",
        shows: stored("stored as IQ4_XS", GgmlType::IQ4_XS),
        ..DECODED
    },
    Mutation {
        name: "iq2-xxs-eighth-sign",
        kernel: "dequant_iq.cu",
        entries: &["dequant_iq2_xxs"],
        broken: "the eighth sign of IQ2_XXS is not made of the other seven",
        from: "return seven | (__popc(seven) & 1) << 7;",
        to: "return seven;",
        shows: stored("stored as IQ2_XXS", GgmlType::IQ2_XXS),
        ..DECODED
    },
    Mutation {
        name: "nvfp4-factor-two",
        kernel: "dequant_low.cu",
        entries: &["dequant_nvfp4"],
        family: "F03",
        issues: &["sgl-project/sglang#2667", "vllm-project/vllm#37464"],
        broken: "scales of NVFP4 are twice as large",
        from: "power(e - normal - 10)",
        to: "power(e - normal - 9)",
        shows: stored("stored as NVFP4", GgmlType::NVFP4),
        norms: true,
        cause: Some("w_q_a × 2"),
        ..DECODED
    },
    Mutation {
        name: "q8-1-codes-of-the-sum",
        kernel: "dequant_wide.cu",
        entries: &["dequant_q8_1"],
        broken: "codes of Q8_1 begin two bytes early, with the block's sum",
        from: "return {signed_bytes<BYTES, 4>(b, p), half_at(b), 0.f}; }",
        to: "return {signed_bytes<BYTES, 2>(b, p), half_at(b), 0.f}; }",
        shows: stored("stored as Q8_1", GgmlType::Q8_1),
        ..DECODED
    },
];
