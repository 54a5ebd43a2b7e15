// What warps with different roles need: mbarriers between them, bulk copies, registers handed from role to role. From
// sm_90 on.
#pragma once
#include "common.cuh"

// An mbarrier's phase ends when all arrivals, and all bytes that were announced, have come.
DEVICE void barrier_init(u32 at, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to copies.
DEVICE void barrier_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u32 at) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" :: "r"(at) : "memory");
}

// Arrives, and announces bytes.
DEVICE void barrier_expect(u32 at, u32 bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" :: "r"(at), "r"(bytes) : "memory");
}

// Waits for the end of a phase of this parity.
DEVICE void barrier_wait(u32 at, u32 parity) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at), "r"(parity) : "memory");
    } while (!done);
}

// Bytes, a multiple of 16, to shared memory without waiting; they count towards the mbarrier's phase. The two forms mean
// the same here: where both assemble, one costs a call for each copy (sm_120, CUDA 13.0).
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
#if __CUDA_ARCH__ >= 1000
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
#else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
#endif
}

// Whether this is code for one architecture alone (sm_90a, sm_120a …), which may hand registers round.
#if defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)  // the first from CUDA 12.9 on
#define SPECIFIC 1
#else
#define SPECIFIC 0
#endif

// Registers of each thread of four neighbouring warps, which all must call it: more of them, once others gave theirs up.
template <int N> DEVICE void more_registers() {
#if SPECIFIC
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N));
#endif
}

template <int N> DEVICE void fewer_registers() {
#if SPECIFIC
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N));
#endif
}
