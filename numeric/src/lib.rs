/*!
Number formats and the tensor core's sum, bit for bit; knows no other crate of the workspace.

- [`DType`]: a storage format. Rounding to it (once, from float64), its spacing, neighbours, cells and bits.
- [`tensor_core`]: the fused, truncating sum that a GPU's matrix unit computes.

A value of a narrow format is kept as the `f64` (in [`tensor_core`]: `f32`) that equals it.
*/

mod bits;
mod dtype;
mod round;
pub mod tensor_core;

pub use dtype::{DType, UnknownDType};

/// Unit roundoff of float32: half the distance from 1 to the next float32, 2^-24.
pub const U: f64 = 1.0 / 16_777_216.0;
