/*!
Test cases for kernels that live elsewhere: in Triton, CUTLASS, Python.

[`write()`] hands out what an attention reads (queries, keys and values, or the absorbed query and a paged cache) as an
honest engine computed it from a model's weights, and what is wanted of it. Whoever has a kernel fills in the outputs;
[`map`] then makes the folder one that `compare` reads, with no model. Requests of both regimes stand side by side, each with rows
of its own, so that a kernel sees nothing but requests.
*/

mod file;
mod read;
mod write;

pub use file::{Array, CaseFile, SCHEMA};
pub use read::map;
pub use write::{CaseError, Options, Written, write};
