/*!
A PTX machine: runs CUDA kernels compiled to PTX on the CPU, bit for bit where PTX fixes the bits, and watches what
they do. PTX text and memory in; effects and [findings](Finding) out. No GPU, no driver.

```
use mla_ptx::{Arg, Memory, Module, Options, launch};

let module = Module::parse(
    ".version 9.0
     .target sm_90
     .address_size 64
     .visible .entry double(.param .u64 data) {
         .reg .b32 %r<3>; .reg .b64 %d<3>;
         ld.param.u64 %d1, [data];
         mov.u32 %r1, %tid.x;
         mad.wide.u32 %d2, %r1, 4, %d1;
         ld.global.u32 %r2, [%d2];
         add.u32 %r2, %r2, %r2;
         st.global.u32 [%d2], %r2;
         ret;
     }",
)?;
let mut memory = Memory::new();
let data = memory.alloc_from(&[1, 0, 0, 0, 2, 0, 0, 0])?;
// Three threads for two words:
let outcome = launch(&module, "double", [1; 3], [3, 1, 1], 0, &[Arg::Pointer(data)], &mut memory, &Options::default())?;
let mut bytes = [0; 8];
memory.read(data, &mut bytes)?;
assert_eq!(bytes, [2, 0, 0, 0, 4, 0, 0, 0]);
assert_eq!(outcome.findings[0].kind.name(), "global-out-of-bounds");
assert_eq!((outcome.findings[0].line, outcome.findings[0].lanes), (9, 0b100));
# Ok::<(), Box<dyn std::error::Error>>(())
```

# What it runs

Kernels as NVRTC writes them for compute_90 and compute_120. An instruction runs only if its form (opcode, type, every
modifier) is in a closed table ([`forms`]) or grammar; anything else is a [`LoadError`] with instruction and line, never
a guess. [`Module::report`] lists the forms in use.

32 lanes run at a time under a mask; lanes that part at a branch are groups, of which the one of lowest address runs,
until they meet again. Warps of a block take turns at barriers and mbarriers; blocks run in parallel.

# What it promises about numbers

- Integers, float32 and float64 arithmetic: as PTX says, with every rounding mode of float32 and `.ftz`. A float32 NaN
  is 0x7fffffff.
- `mma`: the tensor core's own truncating sum, by architecture ([`Options::tensor_core`]), from
  [`mla_numeric::tensor_core`]. For sm_90 and 16-bit operands that was equal to an H200 in every bit; sm_120, TF32 and
  8-bit operands are from the literature.
- Approximate functions: the correctly rounded value; hardware differs by up to [`APPROX_ULPS`]. A kernel's outcome must
  not depend on more, and a comparison with a GPU has to allow it.
- `mul` and `add` without `.rn` may be fused by ptxas: compile with `-fmad=false`, or PTX does not fix the result
  ([`Report::fusible`]).

# What it finds

Each of these can be turned off ([`Checks`]): accesses out of bounds or misaligned; global and shared memory and
registers read that nobody wrote; races on shared memory, by vector clocks, whatever order the warps ran in; lanes of a
warp that exchange through shared memory without a warp barrier; bytes of `cp.async` and bulk copies touched in flight;
global bytes written by two blocks; bytes of an output never stored. Barriers that can't complete, lanes that can't
meet, and warps that don't end are always found. A [`Finding`] names kernel, line of the PTX, line of the source (with
`-lineinfo`), block, warp and lanes.

# What it cannot show

- Faults of ptxas, and contraction in SASS (compile with `-fmad=false`); whether a driver takes the module.
- Speed, occupancy, registers, bank conflicts.
- Weak-memory effects between blocks: fences do nothing here, global memory is consistent, and a block that spins until
  another one writes may hang until the step limit. A read of what another block of the same launch writes is not
  found, nor are races on global memory within a block, nor two blocks that write single bytes.
- A missing `__syncwarp` where another lane's mbarrier arrival covers it; a warp barrier counts for the whole warp
  though its mask names fewer lanes; a missing proxy fence before a bulk copy.
- Uninitialised local memory. Module variables start afresh at every launch.
- Clusters, TMA with tensor maps, wgmma, tcgen05, textures, recursion and calls through pointers: refused at load.
- Time: `%clock` stands still.
- What approximate functions give on a given chip, bit by bit.

It is no proof for a GPU: results should say "emulated".
*/

mod error;
mod exec;
mod finding;
mod fp;
mod ir;
mod launch;
mod lower;
mod mem;
mod module;
mod table;
mod text;
mod ty;

pub use error::{Issue, LaunchError, LoadError, MemoryError};
pub use finding::{Check, Checks, Finding, Kind};
pub use fp::APPROX_ULPS;
pub use ir::Parameter;
pub use launch::{Arg, Counts, Options, Outcome, launch};
pub use mem::global::{Address, Memory};
pub use mla_numeric::tensor_core::TensorCore;
pub use module::{KernelInfo, Module, Report};
pub use table::forms;
pub use ty::Ty;
