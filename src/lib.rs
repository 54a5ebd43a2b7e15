//! mla-check

pub mod gguf;
pub mod synth;
