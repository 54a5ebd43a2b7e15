/*!
A PTX machine.
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
