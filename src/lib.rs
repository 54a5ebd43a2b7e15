/*!
mla-check: an offline correctness harness for MLA attention. A model file in, a verdict out, tensor by tensor:
rounding or fault, where, how big.
*/

pub mod case;
pub mod check;
pub mod cli;
pub mod engine;
pub mod fault;
pub mod gguf;
pub mod judge;
pub mod model;
pub mod report;
pub mod synth;
pub mod trace;
