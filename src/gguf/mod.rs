/*!
The GGUF container: header, metadata, tensor table, splits; nothing about what the tensors mean.

Files are mapped, not read: opening a model touches its headers, asking for a tensor touches that tensor.
Nothing in a file is trusted before it was checked against the file's size, so a bad file is an error
with file, offset and tensor, or a warning where every reader understands it in the same way. What is wrong with one
tensor only keeps that tensor from being read.
Versions 2 and 3, little-endian. Layout: the GGUF specification in the ggml repository; where readers
disagree (overlaps, holes, order of data) an offset is honoured, and said to be odd.
*/

mod cursor;
mod error;
mod extent;
mod lost;
mod map;
mod metadata;
mod split;
mod table;
mod value;
pub mod write;

pub(crate) use map::Map;

pub use error::{GgufError, Notice, Place, Problem, Warning};
pub use lost::end_on_lost_pages;
pub use metadata::Metadata;
pub use split::{Name as SplitName, parse as split_name};
pub use table::{Part, TensorInfo, TensorType};
pub use value::{Array, ArrayIter, Value, ValueType};

use std::collections::HashMap;
use std::path::Path;

/// A model: all its parts.
pub struct Gguf {
    parts: Vec<Part>,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
    warnings: Vec<Warning>,
    damaged: table::Damaged,
}

impl Gguf {
    /// Opens a model, given its file or any part of its split.
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        let (mut parts, mut warnings) = split::open(path)?;
        let mut tensors = Vec::new();
        let mut index: HashMap<String, usize> = HashMap::new();
        let mut damaged = table::Damaged::new();
        for part in &mut parts {
            warnings.append(&mut part.warnings);
            damaged.extend(part.damaged.drain());
            for tensor in &part.tensors {
                if let Some(first) = index.insert(tensor.name.clone(), tensors.len()) {
                    let first: &TensorInfo = &tensors[first];
                    let first = format!(" (first in part {})", first.part + 1);
                    let place = Place::file(part.map.path()).tensor(&tensor.name).at(tensor.offset);
                    return Err(GgufError::new(Problem::DuplicateTensor { first }, place));
                }
                tensors.push(tensor.clone());
            }
        }
        Ok(Gguf { parts, tensors, index, warnings, damaged })
    }

    /// The model's files.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }
    /// The model's metadata: that of part 1.
    pub fn metadata(&self) -> &Metadata {
        // Never empty: `split::open` gives at least the file that was asked for.
        &self.parts[0].metadata
    }
    /// All tensors of all parts, in the order of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }
    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(*self.index.get(name)?)
    }
    /// What is odd about the files.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The place of a tensor's data, for messages about it.
    pub fn place(&self, tensor: &TensorInfo) -> Place {
        let part = self.parts.get(tensor.part).unwrap_or(&self.parts[0]);
        Place::file(part.map.path()).at(tensor.offset).tensor(&tensor.name)
    }

    /// What is impossible about a tensor's row of the table, so that its bytes cannot be had.
    pub fn damage(&self, tensor: &TensorInfo) -> Option<&GgufError> {
        self.damaged.get(&tensor.name)
    }

    /// Whether the files are still what they were when they were opened, as far as lengths and times tell. Asked after
    /// reading, since a file that is written to meanwhile gives bytes of both.
    pub fn unchanged(&self) -> Result<(), GgufError> {
        self.parts.iter().try_for_each(|p| p.map.check())
    }

    /// A tensor's bytes, borrowed from the memory map.
    pub fn bytes(&self, tensor: &TensorInfo) -> Result<&[u8], GgufError> {
        let fail = |problem| Err(GgufError::new(problem, self.place(tensor)));
        if let Some(error) = self.damage(tensor) {
            return Err(error.clone());
        }
        let size = match (tensor.ty, tensor.size) {
            (TensorType::Unknown(id), _) => {
                let what = mla_reference::ggml::describe_unknown(id);
                return fail(Problem::UnknownType { id, what });
            }
            (_, Some(0)) => return fail(Problem::NoElements { dims: tensor.dims.clone() }),
            (_, size) => size.unwrap_or(0),
        };
        let Some(part) = self.parts.get(tensor.part) else { return fail(Problem::ForeignTensor) };
        part.map.check()?;
        let range = || {
            let from = usize::try_from(tensor.offset).ok()?;
            part.map.bytes().get(from..from.checked_add(usize::try_from(size).ok()?)?)
        };
        range().map_or_else(|| fail(Problem::ForeignTensor), Ok)
    }
}
