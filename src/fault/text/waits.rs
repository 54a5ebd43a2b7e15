/*!
Barriers and waits for copies, taken away. Which values come out is chance, on a GPU as on the PTX machine, where warps take
turns: what counts is what its detectors say.
*/

use super::shows::{LATENT, PREFILL, PREFILL_F32, SHORT};
use super::{Mutation, ROW};

const FUSED: Mutation = Mutation { kernel: "fused.cu", family: "F24", shows: PREFILL, ..ROW };
const ABSORBED: Mutation = Mutation { kernel: "absorbed.cu", shows: LATENT, ..FUSED };

pub(super) const ROWS: &[Mutation] = &[
    Mutation {
        name: "fused-wait-missing",
        issues: &["ROCm/aiter#3682"],
        broken: "the fused kernel does not wait for its copies of keys before it reads them",
        from: "wait<0>();\n        __syncthreads();  // the keys are there,",
        to: "__syncthreads();  // the keys are there,",
        finding: Some("async-in-flight in fused"),
        ..FUSED
    },
    Mutation {
        name: "fused-barrier-missing",
        issues: &["ROCm/aiter#3682"],
        broken: "warps of the fused kernel load the next keys while others still read these",
        from: "__syncthreads();  // the values are there, and nobody reads the keys",
        to: "",
        finding: Some("race-write-after-read in fused"),
        ..FUSED
    },
    Mutation {
        name: "fused-f32-barrier-missing",
        kernel: "fused_f32.cu",
        broken: "warps of the float32 kernel load the next tile while others still read this one",
        from: "__syncthreads();  // nobody reads the tile before",
        to: "",
        shows: PREFILL_F32,
        finding: Some("race-write-after-read in fused"),
        ..FUSED
    },
    Mutation {
        name: "norm-barrier-missing",
        kernel: "norm.cu",
        broken: "warps of the norm add up partial sums before the others wrote theirs",
        from: "__syncthreads();",
        to: "",
        shows: SHORT,
        finding: Some("race-read-after-write in rms_norm"),
        ..FUSED
    },
    Mutation {
        name: "product-wait-too-short",
        kernel: "product.cu",
        broken: "the product waits for one load fewer than it reads",
        from: "wait<STAGES - 2>();",
        to: "wait<STAGES - 1>();",
        shows: SHORT,
        finding: Some("async-in-flight in product"),
        ..FUSED
    },
    Mutation {
        name: "product-barrier-missing",
        kernel: "product.cu",
        broken: "warps of the product read a step's operands before all threads' copies of them are there",
        from: "__syncthreads();  // the step is there, and nobody reads the slot that is loaded next",
        to: "",
        shows: SHORT,
        finding: Some("race-read-after-write in product"),
        ..FUSED
    },
    Mutation {
        name: "product-f32-wait-missing",
        kernel: "product_f32.cu",
        broken: "the float32 product does not wait for its copies before it reads them",
        from: "wait<0>();",
        to: "",
        shows: PREFILL_F32,
        finding: Some("async-in-flight in product"),
        ..FUSED
    },
    Mutation {
        name: "absorbed-keys-not-waited-for",
        issues: &["ROCm/aiter#3682"],
        broken: "the warps of the scores read a slot of keys before its copies have come",
        from: "barrier_wait(full + 8 * slot, parity);\n                float a[2][2][4];",
        to: "float a[2][2][4];",
        finding: Some("async-in-flight in absorbed_16"),
        ..ABSORBED
    },
    Mutation {
        name: "absorbed-probabilities-not-waited-for",
        issues: &["flashinfer-ai/flashinfer#5048"],
        broken: "the warps of the output read P before it is written",
        from: "barrier_wait(p_full + 8 * buffer, tile / 2 % 2);",
        to: "",
        finding: Some("race-read-after-write in absorbed_16"),
        ..ABSORBED
    },
    Mutation {
        name: "absorbed-probabilities-overwritten",
        broken: "the warps of the scores write P of the next tile but one while it is still read",
        from: "if (tile >= 2) barrier_wait(p_empty + 8 * buffer, (tile / 2 - 1) % 2);",
        to: "",
        finding: Some("race-write-after-read in absorbed_16"),
        ..ABSORBED
    },
    Mutation {
        name: "absorbed-slot-overwritten",
        broken: "slots of keys are loaded again while they are still read",
        from: "if (i >= N) barrier_wait(empty + 8 * slot, parity);",
        to: "",
        finding: Some("async-in-flight in absorbed_16"),
        ..ABSORBED
    },
    Mutation {
        name: "absorbed-bytes-not-announced",
        issues: &["flashinfer-ai/flashinfer#4732", "flashinfer-ai/flashinfer#5048"],
        broken: "the barrier of a slot is told of 15 rows where 16 are copied",
        from: "if (speaks) barrier_expect(full + 8 * slot, 16 * WIDTH * 2);",
        to: "if (speaks) barrier_expect(full + 8 * slot, 15 * WIDTH * 2);",
        finding: Some("deadlock in absorbed_16"),
        ..ABSORBED
    },
    Mutation {
        name: "absorbed-sums-not-waited-for",
        broken: "the warps of the output read the row sums before they are there",
        from: "barrier_wait(summed, 0);",
        to: "",
        finding: Some("race-read-after-write in absorbed_16"),
        ..ABSORBED
    },
];
