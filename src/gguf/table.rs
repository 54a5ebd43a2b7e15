/*!
One file: header, metadata, and the table of tensors.

What keeps the table from being read is an error of the file. What is impossible about one row (its dimensions, its
offset, another tensor's bytes) is that tensor's *damage*: the file opens with a warning, and only who asks for the
tensor's bytes gets the error. Every other tensor of a known type lies whole inside the file, in whole blocks, on its
alignment, and overlaps none ([`super::extent`]).
*/

use super::cursor::Cursor;
use super::error::{GgufError, Notice, Problem, Warning};
use super::extent::{place, size};
use super::map::Map;
use super::metadata::{Metadata, name};
use super::value::Value;
use mla_reference::ggml::{GgmlType, describe_unknown};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Bytes that a row of the table takes at least: name length, dimension count, type, offset.
const LEAST_ROW: u64 = 8 + 4 + 4 + 8;
/// The same for a metadata pair: key length, one byte of key, type, one byte of value.
const LEAST_PAIR: u64 = 8 + 1 + 4 + 1;
const DEFAULT_ALIGNMENT: u64 = 32;

/// The stored type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// A current type of ggml.
    Known(GgmlType),
    /// Any other number: the tensor is listed, its bytes cannot be had.
    Unknown(u32),
}

impl TensorType {
    /// The current type, if it is one.
    pub fn known(self) -> Option<GgmlType> {
        match self {
            TensorType::Known(ty) => Some(ty),
            TensorType::Unknown(_) => None,
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TensorType::Known(ty) => f.pad(ty.name()),
            TensorType::Unknown(id) => f.pad(&format!("type {id}")),
        }
    }
}

/// A tensor of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name; escaped where the file's is not UTF-8.
    pub name: String,
    /// Dimensions, fastest first as in the file, without trailing ones, at least one.
    pub dims: Vec<u64>,
    /// Its type.
    pub ty: TensorType,
    /// Which part of the split it lies in, from 0.
    pub part: usize,
    /// Where its data begins in that part's file.
    pub offset: u64,
    /// Bytes of data; nothing for an unknown type, and where the row of the table is damaged.
    pub size: Option<u64>,
}

impl TensorInfo {
    /// Number of elements; of a damaged row at most 2^64 - 1.
    pub fn elements(&self) -> u64 {
        self.dims.iter().fold(1, |n, d| n.saturating_mul(*d))
    }
}

/// One file of a model.
pub struct Part {
    pub(super) map: Arc<Map>,
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) metadata: Metadata,
    pub(super) version: u32,
    pub(super) alignment: u64,
    pub(super) warnings: Vec<Warning>,
    pub(super) damaged: Damaged,
}

/// What is impossible about a tensor, by its name.
pub(super) type Damaged = HashMap<String, GgufError>;

impl Part {
    /// The file's path.
    pub fn path(&self) -> &Path {
        self.map.path()
    }
    /// The file's length in bytes.
    pub fn length(&self) -> u64 {
        self.map.bytes().len() as u64
    }
    /// Its tensors, in the order of its table.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }
    /// Its own metadata; a model's is that of part 1.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }
    /// The version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }
    /// The alignment of tensor data.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    pub(super) fn open(path: &Path, part: usize) -> Result<Part, GgufError> {
        Part::parse(Arc::new(Map::open(path)?), part)
    }

    fn parse(map: Arc<Map>, part: usize) -> Result<Part, GgufError> {
        let data = map.bytes();
        let mut cursor = Cursor::new(map.path(), data);
        let mut warnings = Vec::new();
        magic(&cursor, data)?;
        cursor.take(4, "the file's magic number")?;
        let version = cursor.u32("the version")?;
        match version {
            2 | 3 => {}
            found if found != 0 && found & 0xffff == 0 => {
                return Err(cursor.error(4, Problem::BigEndian { found }));
            }
            found => return Err(cursor.error(4, Problem::Version { found })),
        }
        let (tensors_at, tensors) = (cursor.offset(), cursor.u64("the number of tensors")?);
        let pairs = cursor.count("the number of metadata pairs", LEAST_PAIR)?;
        cursor.check_count(tensors_at, "the number of tensors", tensors, LEAST_ROW)?;
        let metadata = Metadata::parse(&map, &mut cursor, pairs, &mut warnings)?;
        let alignment = alignment(&metadata, &mut warnings)?;

        cursor.check_count(tensors_at, "the number of tensors", tensors, LEAST_ROW)?;
        let mut rows = Vec::new();
        let mut names = HashSet::new();
        let mut damaged = Damaged::new();
        for _ in 0..tensors {
            let at = cursor.offset();
            let (row, damage) = row(&mut cursor, part, alignment, &mut warnings)?;
            if !names.insert(row.name.clone()) {
                return Err(cursor.error(at, Problem::DuplicateTensor { first: String::new() }));
            }
            if let Some(error) = damage {
                damaged.insert(row.name.clone(), error);
            }
            rows.push(row);
        }
        cursor.subject = None;
        place(&mut rows, &cursor, data, alignment, &mut damaged, &mut warnings)?;
        Ok(Part { tensors: rows, metadata, version, alignment, warnings, damaged, map })
    }
}

/// Refuses what does not begin with "GGUF", and says what it looks like.
fn magic(cursor: &Cursor<'_>, data: &[u8]) -> Result<(), GgufError> {
    if data.starts_with(b"GGUF") {
        return Ok(());
    }
    let head = &data[..data.len().min(4)];
    let begins = |s: &[u8]| data.len() >= s.len() && data[..s.len()].eq_ignore_ascii_case(s);
    let guess = match head {
        b"FUGG" => " (reversed: a big-endian or byte-swapped file)",
        b"lmgg" | b"tjgg" | b"algg" | b"ggml" | b"ggjt" | b"ggla" => " (an old ggml file from before GGUF)",
        b"PK\x03\x04" => " (a zip archive, as PyTorch writes)",
        [0x80, 2..=5, ..] => " (a Python pickle, as PyTorch writes)",
        [0x1f, 0x8b, ..] => " (a gzip archive)",
        _ if data.get(8) == Some(&b'{') => " (it looks like safetensors)",
        _ if begins(b"<!DOCTYPE") || begins(b"<html") => " (a web page: the download got an error page)",
        _ if begins(b"version https://git-lfs") => {
            " (a git-lfs pointer: fetch the file itself, `git lfs pull`)"
        }
        _ => "",
    };
    let found = format!("\"{}\" ({head:02x?})", head.escape_ascii());
    Err(cursor.error(0, Problem::Magic { found, guess }))
}

fn alignment(metadata: &Metadata, warnings: &mut Vec<Warning>) -> Result<u64, GgufError> {
    let key = "general.alignment";
    match metadata.get(key) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Value::U32(v)) if v.is_power_of_two() => {
            let found = u64::from(v);
            if v < 8 {
                let notice = Notice::OddAlignment { found };
                warnings.push(Warning { notice, place: metadata.place(key) });
            }
            Ok(found)
        }
        Some(v) => {
            let found = format!("{v} ({})", v.ty().name());
            Err(GgufError::new(Problem::Alignment { found }, metadata.place(key)))
        }
    }
}

/// Reads a row of the table, and what is impossible about it; its offset is still relative to the data section.
fn row(
    cursor: &mut Cursor<'_>,
    part: usize,
    alignment: u64,
    warnings: &mut Vec<Warning>,
) -> Result<(TensorInfo, Option<GgufError>), GgufError> {
    cursor.subject = None;
    let start = cursor.offset();
    let raw = cursor.string("the length of a tensor name")?;
    let mut notices = Vec::new();
    let name = name(raw, |notice| notices.push(notice)).into_string();
    cursor.subject = Some(format!("tensor {name:?}"));
    match raw.len() {
        0 => notices.push(Notice::EmptyName),
        1..64 => {}
        found => notices.push(Notice::LongName { found }),
    }

    let at = cursor.offset();
    let count = cursor.u32("the number of dimensions")?;
    if count > 4 {
        return Err(cursor.error(at, Problem::DimensionCount { found: count }));
    }
    let mut damage = None;
    let mut dims = Vec::with_capacity(4);
    for axis in 0..count as usize {
        let at = cursor.offset();
        let found = cursor.u64("a dimension")?;
        if found > i64::MAX as u64 {
            damage.get_or_insert_with(|| cursor.error(at, Problem::Dimension { axis, found }));
        }
        dims.push(found);
    }
    if dims.is_empty() {
        notices.push(Notice::Scalar);
        dims.push(1);
    }
    if dims.contains(&0) {
        notices.push(Notice::NoElements { dims: dims.clone() });
    }
    let last = dims.iter().rposition(|&d| d != 1).unwrap_or(0);
    dims.truncate(last + 1);

    let at = cursor.offset();
    let id = cursor.u32("the type of a tensor")?;
    let ty = match GgmlType::from_id(id) {
        Some(ty) => TensorType::Known(ty),
        None => {
            notices.push(Notice::UnknownType { id, what: describe_unknown(id) });
            TensorType::Unknown(id)
        }
    };
    let size = size(&dims, ty).unwrap_or_else(|problem| {
        damage.get_or_insert_with(|| cursor.error(at, problem));
        None
    });

    let at = cursor.offset();
    let offset = cursor.u64("the offset of a tensor")?;
    if !offset.is_multiple_of(alignment) {
        damage.get_or_insert_with(|| cursor.error(at, Problem::Misaligned { offset, alignment }));
    }
    warnings.extend(notices.into_iter().map(|notice| Warning { notice, place: cursor.place(start) }));
    let size = if damage.is_some() { None } else { size };
    Ok((TensorInfo { name, dims, ty, part, offset, size }, damage))
}
