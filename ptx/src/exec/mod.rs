/*!
Execution: one decoded instruction runs on the 32 lanes of a warp under a mask.

[`regs`] rows and lanes · [`warp`] lane groups and their scheduling · [`block`] warps, barriers, the end ·
[`access`] loads, stores, atomics, copies · [`collective`] shuffles, votes, reductions, matrices ·
[`mbarrier`] phases and bulk copies · [`shared`] shared memory and its shadow · [`mma`] the tensor core.
*/

pub mod access;
pub mod block;
pub mod collective;
pub mod mbarrier;
pub mod mma;
pub mod regs;
pub mod shared;
pub mod warp;
