//! mla-check

pub mod gguf;
