//! The float64 reference.
pub mod ggml;
