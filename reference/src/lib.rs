/*!
The float64 reference of MLA attention: vocabulary, truth, no I/O.

- [`stage`]: the one table of stages and weights; [`geometry`]: widths and scalars of a layer;
  [`plan`]: rows of a run; [`route`]: which form serves which of them, and in which parts; [`contract`]: roundings that an engine declares.
- [`evaluate`]: one function a stage, from inputs to the float64 value, chunk by chunk.
- [`elementwise`], [`attention`], [`product`]: the mathematics underneath; [`indexer`]: the keys that sparse attention keeps.
- [`ggml`], [`dequant`]: what stored weights mean.

```
use mla_reference::{Stage, Weight};
assert_eq!(Stage::KvCNormed.name(), "kv_c_normed");
assert_eq!(Weight::WUk.row().gguf, "attn_k_b.weight");
```
*/

pub mod attention;
pub mod contract;
pub mod departure;
pub mod dequant;
pub mod elementwise;
pub mod evaluate;
pub mod geometry;
pub mod ggml;
pub mod indexer;
mod isa;
pub mod key_stats;
pub mod operands;
pub mod plan;
pub mod product;
pub mod recall;
pub mod route;
pub mod rows;
pub mod stage;

pub use contract::{Accumulate, Contract, LseBase, RopeAngle, RowSum, Softmax, Splits, TileOrder};
pub use departure::{Departure, KeyList, Mask, Only, Rescale};
pub use evaluate::{Chunk, Evaluator, Source, Terms, Weights};
pub use geometry::{Geometry, Pairing, Rope, Spec, Temperature};
pub use ggml::GgmlType;
pub use indexer::{IndexWeights, Indexer};
pub use key_stats::KeyStats;
pub use operands::Operands;
pub use plan::{Given, Plan, Regime, RowName, Selection, Sequence};
pub use recall::Recall;
pub use route::{Cut, Route};
pub use stage::{Axis, Form, Phase, STAGES, Scope, Stage, WEIGHTS, Weight};
