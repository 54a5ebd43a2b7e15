/*!
What can be wrong with a model file, and where.

An error or a warning is a [`Problem`] or a [`Notice`] (one variant for each invariant of the container)
together with a [`Place`]. Displayed, an error has three lines: what is wrong, where, what to do.
Refused is what makes a tensor's bytes ambiguous or unreadable; what every reader understands in the
same way, but a correct writer would not have written, is a warning.
*/

use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Where in which file something was found.
#[derive(Clone, Debug)]
pub struct Place {
    /// The file.
    pub path: Arc<Path>,
    /// Byte offset from the start of the file.
    pub offset: Option<u64>,
    /// The tensor or the metadata key, e.g. `tensor "blk.0.attn_norm.weight"`.
    pub subject: Option<String>,
}

impl Place {
    /// A file as a whole.
    pub fn file(path: &Arc<Path>) -> Place {
        Place { path: path.clone(), offset: None, subject: None }
    }
    /// The same place, at this byte of the file.
    pub fn at(mut self, offset: u64) -> Place {
        self.offset = Some(offset);
        self
    }
    /// The same place, said to belong to a tensor.
    pub fn tensor(mut self, name: &str) -> Place {
        self.subject = Some(format!("tensor {name:?}"));
        self
    }
    /// The same place, said to belong to a metadata key.
    pub fn key(mut self, key: &str) -> Place {
        self.subject = Some(format!("key {key:?}"));
        self
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some(offset) = self.offset {
            write!(f, ", byte {offset}")?;
        }
        if let Some(subject) = &self.subject {
            write!(f, ", {subject}")?;
        }
        Ok(())
    }
}

/// A file that cannot be read or written, or that cannot be trusted.
#[derive(Clone, Debug)]
pub struct GgufError {
    inner: Arc<(Problem, Place)>,
}

impl GgufError {
    /// This problem at this place.
    pub fn new(problem: Problem, place: Place) -> GgufError {
        GgufError { inner: Arc::new((problem, place)) }
    }
    /// Which invariant is broken.
    pub fn problem(&self) -> &Problem {
        &self.inner.0
    }
    /// Where it is broken.
    pub fn place(&self) -> &Place {
        &self.inner.1
    }
}

impl fmt::Display for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  where: {}\n  do: {}", self.problem(), self.place(), self.problem().advice())
    }
}

impl std::error::Error for GgufError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(self.problem())
    }
}

/// A broken invariant.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the messages say they are
pub enum Problem {
    #[error("cannot {action}: {source}")]
    Io { action: &'static str, source: std::io::Error },
    #[error("this is {what}, not an ordinary file")]
    NotAFile { what: &'static str },
    #[error("the file is empty")]
    Empty,
    #[error("not a GGUF file: it begins with {found}, expected \"GGUF\"{guess}")]
    Magic { found: String, guess: &'static str },
    #[error("GGUF version {found}, expected 2 or 3")]
    Version { found: u32 },
    #[error("a big-endian file (version field {found:#010x}), expected little-endian")]
    BigEndian { found: u32 },
    #[error("{field} needs {needed} bytes, but the file has {left} left")]
    Truncated { field: &'static str, needed: u64, left: u64 },
    #[error("{field} is {found}, but the {left} bytes left in the file hold at most {most}")]
    Count { field: &'static str, found: u64, left: u64, most: u64 },
    #[error("a metadata key is empty")]
    EmptyKey,
    #[error("the metadata key appears a second time")]
    DuplicateKey,
    #[error("{field} is {found}, expected a type of metadata value, 0 to 12")]
    ValueType { field: &'static str, found: u32 },
    #[error("arrays are nested more than {limit} deep")]
    ArrayDepth { limit: u32 },
    #[error("the value is {found}, expected {expected}")]
    WrongType { found: String, expected: &'static str },
    #[error("the alignment is {found}, expected a power of two stored as u32")]
    Alignment { found: String },
    #[error("the tensor name appears a second time{first}")]
    DuplicateTensor { first: String },
    #[error("the tensor has {found} dimensions, expected at most 4")]
    DimensionCount { found: u32 },
    #[error("dimension {axis} is {found}, expected less than 2^63")]
    Dimension { axis: usize, found: u64 },
    #[error("the dimensions {dims:?} of type {ty} make more elements or bytes than 64 bits can count")]
    SizeOverflow { dims: Vec<u64>, ty: String },
    #[error("a row has {row} elements, but type {ty} stores whole blocks of {block}")]
    Row { row: u64, ty: &'static str, block: usize },
    #[error("the data offset {offset} is not a multiple of the alignment {alignment}")]
    Misaligned { offset: u64, alignment: u64 },
    #[error("the tensor's {needed} bytes of data pass the end of the file by {missing} bytes")]
    DataTruncated { needed: u64, missing: u64 },
    #[error("the tensor's data overlaps that of tensor {other:?}")]
    Overlap { other: String },
    #[error("the tensor has type id {id}: {what}")]
    UnknownType { id: u32, what: &'static str },
    #[error("the tensor has no elements: its dimensions are {dims:?}")]
    NoElements { dims: Vec<u64> },
    #[error("the file was {before} bytes when it was opened, and is {now} now")]
    Changed { before: u64, now: u64 },
    #[error("the file was written to after it was opened")]
    Rewritten,
    #[error("the tensor is not one of this model")]
    ForeignTensor,
    #[error("this is a part of a split of {count}, but its name does not end in -NNNNN-of-{count:05}.gguf")]
    SplitName { count: u64 },
    #[error("part {number} of {count} is missing")]
    SplitMissing { number: u64, count: u64 },
    #[error("the name says part {number} of {count}, but split.no is {no} (counted from 0) of {found}")]
    SplitNumber { number: u64, count: u64, no: String, found: String },
    #[error("part {number} is of another model: {key} is {found}, but {expected} in part 1")]
    SplitForeign { number: u64, key: &'static str, found: String, expected: String },
    #[error("split.tensors.count is {expected}, but the parts hold {found} tensors")]
    SplitTotal { expected: u64, found: u64 },
    #[error("{written} bytes of data were given for a tensor of {needed}")]
    DataLength { written: u64, needed: u64 },
}

impl Problem {
    /// What the user can do about it.
    fn advice(&self) -> &'static str {
        use Problem::*;
        match self {
            Io { action, .. } if action.starts_with("write") || action.starts_with("create") => {
                "check that the folder exists and may be written to, and that the disk has room"
            }
            Io { .. } => "check the path and its permissions",
            NotAFile { .. } => "give the path of a .gguf file (of a split model: of any part)",
            Empty | Truncated { .. } | DataTruncated { .. } => {
                "the file is cut short (an incomplete download or copy) or damaged: compare its size, fetch it again"
            }
            Magic { .. } => "give a .gguf file; other formats must be converted to GGUF first",
            Version { found: 1 } => {
                "version 1 is no longer read by anything current: convert the model again"
            }
            Version { .. } => "check for a damaged file, or for a newer version of this program",
            BigEndian { .. } => "convert it to little-endian (gguf-py has a script for that)",
            UnknownType { .. } => "quantise the model to a current ggml type, or take another file of it",
            NoElements { .. } => "this tensor cannot be used: convert the model again",
            Changed { .. } | Rewritten => {
                "do not write to a model while it is read: run again when the file is complete"
            }
            ForeignTensor => "this is a mistake in the calling program, not in the file",
            DataLength { .. } => "this is a mistake in the program that writes, not in the file",
            WrongType { .. } => "the file's writer stored an unexpected value: convert the model again",
            SplitName { .. } => "give the file the name that it was published under",
            SplitMissing { .. } => {
                "put all parts of the split into one folder, under the names they were published with"
            }
            SplitNumber { .. } | SplitForeign { .. } | SplitTotal { .. } => {
                "parts were swapped, renamed or come from another model: fetch the split again"
            }
            _ => "the file is damaged, or its writer is faulty: fetch it again, or convert the model again",
        }
    }
}

/// Something odd that does not keep the file from being read.
#[derive(Clone, Debug)]
pub struct Warning {
    /// What is odd.
    pub notice: Notice,
    /// Where.
    pub place: Place,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.notice, self.place)
    }
}

/// What is odd.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Notice {
    #[error("the name is not UTF-8; shown escaped")]
    NotUtf8,
    #[error("the name contains a NUL byte, where C programs will cut it")]
    NulByte,
    #[error("a bool is stored as {found}; taken as true")]
    Bool { found: u8 },
    #[error("the alignment {found} is not a multiple of 8, as the format asks")]
    OddAlignment { found: u64 },
    #[error("the tensor name has {found} bytes; llama.cpp takes at most 63")]
    LongName { found: usize },
    #[error("the tensor name is empty")]
    EmptyName,
    #[error("the tensor has no dimensions; taken as one element")]
    Scalar,
    #[error("the tensor has no elements: its dimensions are {dims:?}")]
    NoElements { dims: Vec<u64> },
    #[error("type id {id} cannot be read: {what}")]
    UnknownType { id: u32, what: &'static str },
    #[error("{what}: this tensor cannot be used")]
    Damaged { what: String },
    #[error("{bytes} unused bytes before the tensor's data; llama.cpp refuses such a file")]
    Hole { bytes: u64 },
    #[error("the tensors' data is not in the order of the table; llama.cpp refuses such a file")]
    Order,
    #[error("{bytes} bytes follow the last tensor's data")]
    TrailingBytes { bytes: u64 },
    #[error("the padding before the data is not zero: the count of tensors may be wrong")]
    Padding,
    #[error("split.count is stored as {found}, not as u16; llama.cpp refuses such a file")]
    SplitType { found: &'static str },
    #[error("the file is named like a part of a split, but says nothing about a split")]
    NotSplit,
    #[error("no split.tensors.count: whether parts lack tensors was not checked")]
    NoSplitTotal,
}
