//! The float64 reference.
pub mod dequant;
pub mod ggml;
mod isa;
pub mod product;
