/*!
Arrays that other software wrote, as bits.

[`Dump`] lists what a file or folder holds and reads one array at a time: .npy, .npz, .safetensors, `torch.save`'s zip
files, and a folder of these. Nothing of a file is executed, no length of a file is believed before it was checked, and
what is damaged is an error, never a panic.
*/

mod folder;
mod npy;
mod pickle;
mod torch;
mod zip;

pub use folder::{Dump, Entry};
pub use pickle::{Global, PickleError, Value};

use mla_numeric::DType;
use std::path::Path;

/// How the elements of an array are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// A number format.
    Float(DType),
    /// Signed integers of so many bytes.
    Int(usize),
    /// Unsigned integers of so many bytes; often the bits of a format that the file's own form has no name for.
    UInt(usize),
    /// One byte, 0 or 1.
    Bool,
}

impl Stored {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Stored::Float(d) => d.bytes(),
            Stored::Int(n) | Stored::UInt(n) => n,
            Stored::Bool => 1,
        }
    }
}

impl std::fmt::Display for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Stored::Float(d) => write!(f, "{d}"),
            Stored::Int(n) => write!(f, "int{}", 8 * n),
            Stored::UInt(n) => write!(f, "uint{}", 8 * n),
            Stored::Bool => f.write_str("bool"),
        }
    }
}

/// An array: little-endian bits, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// How elements are stored.
    pub stored: Stored,
    /// Lengths of the axes, slowest first; empty: one element.
    pub shape: Vec<usize>,
    /// The bits, as many as shape and dtype ask for.
    pub bytes: Vec<u8>,
}

impl Array {
    /// Of parts that belong together; else what does not fit.
    pub(super) fn new(stored: Stored, shape: Vec<usize>, bytes: Vec<u8>) -> Result<Array, String> {
        let wanted = elements(&shape).and_then(|n| n.checked_mul(stored.bytes()));
        match wanted {
            Some(n) if n == bytes.len() => Ok(Array { stored, shape, bytes }),
            _ => Err(format!("shape {shape:?} of {stored} does not fit {} bytes", bytes.len())),
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.stored.bytes()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The values as integers; None where they are none, or do not fit.
    pub fn integers(&self) -> Option<Vec<i64>> {
        let bits = |b: &[u8]| b.iter().rev().fold(0u64, |a, b| a << 8 | u64::from(*b));
        let n = self.stored.bytes();
        let all = self.bytes.chunks_exact(n).map(bits);
        match self.stored {
            Stored::Int(n) => Some(all.map(|b| (b << (64 - 8 * n)) as i64 >> (64 - 8 * n)).collect()),
            Stored::UInt(_) | Stored::Bool => all.map(|b| i64::try_from(b).ok()).collect(),
            Stored::Float(_) => None,
        }
    }
}

/// Elements of a shape; None where that is more than can be counted.
fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |a, n| a.checked_mul(*n))
}

/// Why an array can't be read: what, where, what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ReadError(String);

impl ReadError {
    fn new(what: impl std::fmt::Display, place: &Path, how: impl std::fmt::Display) -> ReadError {
        ReadError(format!("{what}\n  where: {}\n  do: {how}", place.display()))
    }

    fn io(e: &std::io::Error, place: &Path) -> ReadError {
        ReadError::new(format!("reading failed: {e}"), place, "check that the path exists and may be read")
    }
}
