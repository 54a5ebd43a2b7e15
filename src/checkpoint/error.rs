/*! What is wrong with a checkpoint: what, where, what to do. */

use std::path::Path;

/// Why a checkpoint can't be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointError(String);

impl CheckpointError {
    /// What is wrong, in which file (with the tensor or key, if it is one's), what to do.
    pub fn new(what: impl std::fmt::Display, place: impl std::fmt::Display, advice: &str) -> CheckpointError {
        CheckpointError(format!("{what}\n  where: {place}\n  do: {advice}"))
    }

    /// Of a file that can't be opened.
    pub(crate) fn io(error: &std::io::Error, path: &Path) -> CheckpointError {
        CheckpointError::new(
            format!("the file can't be read: {error}"),
            path.display(),
            "check the path and its permissions",
        )
    }
}

impl From<crate::gguf::GgufError> for CheckpointError {
    /// The memory map's own error.
    fn from(e: crate::gguf::GgufError) -> CheckpointError {
        CheckpointError(e.to_string())
    }
}

impl std::fmt::Display for CheckpointError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CheckpointError {}

/// What is to be done about files that are not what they were written as.
pub(super) const AGAIN: &str = "download the file again, and compare its checksum with the publisher's";
