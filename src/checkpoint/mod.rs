/*!
A Hugging Face checkpoint as a container: a folder with config.json and .safetensors files; nothing about what the tensors mean
in a model, but for the formats that spread one matrix over several tensors ([`Checkpoint::matrix`]).

Shards are mapped, not read: opening touches their headers. A tensor that can't be read is an error only for who asks for it;
what is odd besides is a warning. Format: the safetensors specification; layout of folders and index: transformers 5.
*/

mod dtype;
mod error;
mod folder;
mod header;
mod stored;

pub use dtype::Dtype;
pub use error::CheckpointError;
pub use stored::{Matrix, Scales};

use crate::gguf::{GgufError, Map};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A folder with a model.
pub struct Checkpoint {
    folder: PathBuf,
    config: serde_json::Value,
    files: Vec<Map>,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
    warnings: Vec<String>,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Dtype.
    pub dtype: Dtype,
    /// Slowest first; empty: a scalar.
    pub shape: Vec<u64>,
    /// Index in [`Checkpoint::files`]; None: its file is missing.
    pub file: Option<usize>,
    /// From the start of the file.
    pub offset: u64,
    /// Bytes of its data.
    pub bytes: u64,
    /// Why it can't be read.
    bad: Option<String>,
}

impl Checkpoint {
    /// Whether a path can be meant as a checkpoint: a folder, or a file of one.
    pub fn is_meant(path: &Path) -> bool {
        let ending = path.extension().is_some_and(|e| e == "safetensors" || e == "json");
        path.is_dir() || ending && path.is_file()
    }

    /// Opens a folder, given it or any of its .safetensors or .json files.
    ///
    /// # Errors
    /// What, where, what to do.
    pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        folder::open(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Path of config.json, for messages about it.
    pub fn config_path(&self) -> PathBuf {
        self.folder.join(folder::CONFIG)
    }

    /// config.json, an object.
    pub fn config(&self) -> &serde_json::Value {
        &self.config
    }

    /// Paths and bytes of the .safetensors files.
    pub fn files(&self) -> Vec<(PathBuf, u64)> {
        self.files.iter().map(|f| (f.path().to_path_buf(), f.bytes().len() as u64)).collect()
    }

    /// Whether the .safetensors files are still what they were when they were opened, as far as lengths and times tell.
    ///
    /// # Errors
    /// The first that is not.
    pub fn unchanged(&self) -> Result<(), GgufError> {
        self.files.iter().try_for_each(Map::check)
    }

    /// All tensors, file by file in the order of their data.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(*self.index.get(name)?)
    }

    /// What is odd about the files, a sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// A tensor's bytes, borrowed from the memory map.
    ///
    /// # Errors
    /// Where they are not there, or are no tensor's.
    pub fn bytes(&self, tensor: &TensorInfo) -> Result<&[u8], CheckpointError> {
        let fail = |what: &str| {
            let what = format!("tensor {} can't be read: {what}", tensor.name.escape_debug());
            Err(CheckpointError::new(what, self.place(tensor), error::AGAIN))
        };
        if let Some(bad) = &tensor.bad {
            return fail(bad);
        }
        let Some(map) = tensor.file.and_then(|f| self.files.get(f)) else {
            return fail("its file is missing");
        };
        map.check()?;
        let range = || {
            let from = usize::try_from(tensor.offset).ok()?;
            map.bytes().get(from..from.checked_add(usize::try_from(tensor.bytes).ok()?)?)
        };
        range().map_or_else(|| fail("it lies beyond the end of its file"), Ok)
    }

    /// The file that holds a tensor, for messages about it.
    fn place(&self, tensor: &TensorInfo) -> String {
        let map = tensor.file.and_then(|f| self.files.get(f));
        map.map_or(&*self.folder, |m| m.path()).display().to_string()
    }
}
