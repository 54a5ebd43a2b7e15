//! Bytes as a model file: container, metadata, model, lint, weights, one decoded row of
//! each, and the survey of all values.

#![no_main]

#[path = "../../tests/common/walk.rs"]
mod walk;

use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::OnceLock;

/// A file in memory where there is such a folder: written once for each input, mapped as a user's is.
fn file() -> &'static PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let memory = PathBuf::from("/dev/shm");
        let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
        folder.join(format!("mla-check-fuzz-{}.gguf", std::process::id()))
    })
}

fuzz_target!(|data: &[u8]| {
    if std::fs::write(file(), data).is_ok() {
        walk::everything(file(), true);
    }
});
