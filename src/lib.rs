/*!
mla-check: an offline correctness harness for MLA attention. A model file in, a verdict out, tensor by tensor:
rounding or fault, where, how big.

Data flows one way:

```text
gguf → model → case → engine → judge → report
```

- [`gguf`]: the container, memory-mapped; every damaged file is named, none is trusted.
- [`model`]: architecture, geometry, conventions, weights by role, layer by layer.
- [`case`](mod@case): requests, pages, positions, drawn inputs: the plan of a run.
- [`engine`]: whatever computes the tensors of a layer and streams them.
- [`judge`]: each tensor against the float64 reference, from the engine's own inputs, within proven bounds.
- [`report`]: one serde struct and its renderers. [`explain`]: the same of one element. [`snapshot`]: what people review as
  a diff.

[`probe`] asks an engine small questions of its own. [`check`] puts them in order; [`cli`] sits on top and calls all.
[`mod@bench`] times kernels. [`trace`] holds tensors as bits, [`fault`] plants deliberate faults, [`synth`] writes model files, [`study`] runs the
judge many times to learn how good it is. [`harness`] makes every case a named
test of `cargo test`. [`nvrtc`] compiles kernels without a GPU, [`device`] is what runs them.
Vocabulary and truth lie underneath, in the crates `mla_reference`
(stages in float64, contracts, dequantisation) and `mla_numeric` (number formats, the tensor core's sum).

```
use mla_check::check::{Options, layer};
use mla_check::judge::Verdict;
use mla_check::model::Model;

let model = Model::open("fixtures/models/glm5dims.Q4_K_M.gguf".as_ref())?;
let options = Options { batch: "0+4,70+1".parse()?, ..Options::default() };
let report = layer(&model, 0, &options, &|_| {})?;
assert_eq!(report.verdict, Verdict::Rounding);
for unit in &report.tensors {
    assert!(unit.beyond == 0, "{} has elements that rounding can't explain", unit.title());
}
# Ok::<(), Box<dyn std::error::Error>>(())
```
*/

pub mod against;
pub mod bench;
pub mod case;
pub mod check;
pub mod checkpoint;
pub mod child;
pub mod cli;
pub mod compare;
pub mod contracts;
pub mod device;
pub mod diff;
pub mod engine;
pub mod explain;
pub mod fault;
pub mod gguf;
pub mod harness;
pub mod judge;
pub mod kernel_case;
pub mod merge;
pub mod model;
pub mod nvrtc;
pub mod parallel;
pub mod probe;
pub mod problem;
pub mod reference_cache;
pub mod report;
pub mod signature;
pub mod snapshot;
pub mod study;
pub mod suite;
pub mod survey;
pub mod synth;
pub mod trace;
mod written;
