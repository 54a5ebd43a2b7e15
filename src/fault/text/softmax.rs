/*! The online softmax's bookkeeping: maximum, rescaling, row sum, scale. */

use super::shows::{DECODE, LATENT, LATENT_F32, LATENT_PREFILL, PREFILL, PREFILL_F32};
use super::{Mutation, ROW, tensor};
use mla_reference::Stage;

const FUSED: Mutation =
    Mutation { kernel: "fused.cu", first: tensor(Stage::Lse), shows: DECODE, family: "F22", ..ROW };
const ABSORBED: Mutation =
    Mutation { kernel: "absorbed.cu", first: tensor(Stage::OLatent), shows: LATENT, ..FUSED };

pub(super) const ROWS: &[Mutation] = &[
    Mutation {
        name: "fused-rescale-missing",
        kernel: "attention.cuh",
        entries: &["fused"],
        broken: "output and row sum keep the old maximum's scale when the running maximum grows (fused)",
        from: "return now > minus_infinity() ? exp2_((before - now) * c2) : 1.f;",
        to: "return 1.f;",
        cause: Some("no rescale"),
        ..FUSED
    },
    Mutation {
        name: "absorbed-rescale-missing",
        kernel: "attention.cuh",
        entries: &["absorbed_16"],
        broken: "output and row sum keep the old maximum's scale when the running maximum grows (absorbed)",
        from: "return now > minus_infinity() ? exp2_((before - now) * c2) : 1.f;",
        to: "return 1.f;",
        cause: Some("no rescale"),
        norms: true,
        ..ABSORBED
    },
    Mutation {
        name: "fused-output-not-rescaled",
        broken: "the fused kernel rescales the row sum and not the output when the running maximum grows",
        from: "o[m][i][e] *= factor[e / 2];",
        to: "o[m][i][e] *= 1.f;",
        first: tensor(Stage::AttnOut),
        cause: Some("output not rescaled"),
        ..FUSED
    },
    Mutation {
        name: "fused-sum-not-rescaled",
        broken: "the fused kernel rescales the output and not the row sum when the running maximum grows",
        from: "sum[m][r] *= factor[r];",
        to: "sum[m][r] *= 1.f;",
        cause: Some("no rescale"),
        also: &["row sum not rescaled"],
        ..FUSED
    },
    Mutation {
        name: "absorbed-sum-not-rescaled",
        broken: "the absorbed kernel rescales the output and not the row sum when the running maximum grows",
        from: "sum[r] *= factor[r];",
        to: "sum[r] *= 1.f;",
        norms: true,
        cause: Some("row sum not rescaled"),
        also: &["no rescale"],
        ..ABSORBED
    },
    Mutation {
        name: "absorbed-output-not-rescaled",
        broken: "the absorbed kernel's output warps miss that the running maximum grew",
        from: "if (!moved[buffer * 4 + m]) continue;",
        to: "if (true || !moved[buffer * 4 + m]) continue;",
        norms: true,
        cause: Some("output not rescaled"),
        ..ABSORBED
    },
    Mutation {
        name: "fused-f32-rescale-missing",
        kernel: "attention_f32.cuh",
        entries: &["fused"],
        broken: "the float32 kernels keep the old maximum's scale when the running maximum grows",
        from: "const float factor = rescale(most[r], now, c2);",
        to: "const float factor = 1.f;",
        shows: PREFILL_F32,
        cause: Some("no rescale"),
        ..FUSED
    },
    Mutation {
        name: "fused-maximum-of-half",
        broken: "a row's maximum is taken over half of the lanes that hold it, so that lanes scale by different ones",
        from: "now[r] = fmaxf(now[r], __shfl_xor_sync(ALL, now[r], 2));",
        to: "",
        shows: PREFILL,
        ..FUSED
    },
    Mutation {
        name: "fused-row-sum-of-half",
        broken: "a row's sum is taken over half of the lanes that hold it",
        from: "total += __shfl_xor_sync(ALL, total, 2);",
        to: "",
        shows: PREFILL,
        norms: true,
        ..FUSED
    },
    Mutation {
        name: "absorbed-row-sum-of-half",
        broken: "a row's sum is taken over half of the lanes that hold it, in blocks of 64 rows too",
        from: "sum[r] += __shfl_xor_sync(ALL, sum[r], 2);",
        to: "",
        shows: LATENT_PREFILL,
        norms: true,
        ..ABSORBED
    },
    Mutation {
        name: "fused-f32-scale",
        kernel: "fused_f32.cu",
        family: "F07",
        issues: &["sgl-project/sglang#3785", "onnxruntime/mobius#548"],
        broken: "the softmax scale of the scores is 0.5 % too large inside the float32 kernel",
        from: "DEVICE void attend(const Fused& p) {",
        to: "DEVICE void attend(const Fused& given) {\n    Fused p = given;\n    p.c2 *= 1.005f;",
        shows: PREFILL_F32,
        cause: Some("softmax scale"),
        ..FUSED
    },
    Mutation {
        name: "fused-scale-of-one-head",
        family: "F07",
        issues: &["sgl-project/sglang#3785"],
        broken: "the softmax scale of head 3 is 1 % too large",
        from: "DEVICE void attend(const Fused& p) {",
        to: "DEVICE void attend(const Fused& given) {\n    Fused p = given;\n    if (blockIdx.y == 3) p.c2 *= 1.01f;",
        shows: PREFILL,
        ..FUSED
    },
    Mutation {
        name: "absorbed-f32-rope-left-out",
        kernel: "absorbed_f32.cu",
        family: "F06",
        issues: &["ModelTC/LightLLM#672"],
        broken: "the float32 kernel leaves the rope part out of the scores",
        from: "rows.score<ROPE>(rope, memory + lane * PITCH + LATENT);",
        to: "",
        shows: LATENT_F32,
        first: tensor(Stage::OLatent),
        cause: Some("rope part left out"),
        ..FUSED
    },
    Mutation {
        name: "absorbed-scale-of-latent-width",
        family: "F07",
        issues: &["antonellof/ferrox#225"],
        broken: "the absorbed kernel scales scores by the root of the latent row's width, not of the head's",
        from: "DEVICE void attend(const Absorbed& p) {",
        to: "DEVICE void attend(const Absorbed& given) {\n    Absorbed p = given;\n    p.c2 *= sqrtf(48.f / float(LATENT + ROPE));",
        cause: Some("nope+rope over latent+rope"),
        norms: true,
        ..ABSORBED
    },
];
