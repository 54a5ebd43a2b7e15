//! mla-check
