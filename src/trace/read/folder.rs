/*!
What a dump holds: one file, or a folder of files.

A file with one array gives it the file's name without its ending; of one with several, in a folder, the file's name
stands before theirs, with a slash.
*/

use super::pickle::Strided;
use super::zip::File;
use super::{Array, ReadError, Stored, npy, torch, zip};
use crate::gguf::Map;
use mla_numeric::DType;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

const KINDS: &str = "give a .npy, .npz, .safetensors or .pt file (torch.save), or a folder of these";

/// Arrays by name.
pub struct Dump {
    path: PathBuf,
    files: Vec<Map>,
    entries: Vec<Entry>,
}

/// An array of a dump.
#[derive(Debug)]
pub struct Entry {
    /// Name, as maps write it.
    pub name: String,
    file: usize,
    part: Part,
}

/// Where an array stands in its file.
#[derive(Debug)]
enum Part {
    Npy,
    Npz(File),
    Safetensors(String),
    Torch(Strided),
}

impl Dump {
    /// Lists a file's or folder's arrays.
    pub fn open(path: &Path) -> Result<Dump, ReadError> {
        let mut dump = Dump { path: path.into(), files: Vec::new(), entries: Vec::new() };
        if !path.is_dir() {
            dump.add(path, false)?;
            return Ok(dump);
        }
        let mut inside: Vec<PathBuf> = std::fs::read_dir(path)
            .and_then(|all| all.map(|e| e.map(|e| e.path())).collect())
            .map_err(|e| ReadError::io(&e, path))?;
        inside.sort();
        for file in inside.iter().filter(|f| kind(f).is_some()) {
            dump.add(file, true)?;
        }
        if dump.entries.is_empty() {
            return Err(ReadError::new("the folder holds no arrays", path, KINDS));
        }
        Ok(dump)
    }

    /// The file or folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All arrays.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The array of this name.
    pub fn find(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|e| e.name == name)
    }

    /// Reads an array.
    pub fn read(&self, entry: &Entry) -> Result<Array, ReadError> {
        let file = &self.files[entry.file];
        let (path, map) = (file.path(), file.bytes());
        file.check().map_err(|e| ReadError(e.to_string()))?;
        let array = match &entry.part {
            Part::Npy => npy::parse(map),
            Part::Npz(file) => zip::read(map, file, true).and_then(|b| npy::parse(&b)),
            Part::Safetensors(name) => safetensor(map, name),
            Part::Torch(strided) => torch::read(map, strided),
        };
        array.map_err(|what| {
            let what = format!("array {} can't be read: {what}", entry.name.escape_debug());
            ReadError::new(what, path, "write it again, and check that the copy is complete")
        })
    }

    fn add(&mut self, path: &Path, in_folder: bool) -> Result<(), ReadError> {
        let kind = kind(path).ok_or_else(|| match path.exists() {
            true => ReadError::new("a file of this kind is not read", path, KINDS),
            false => ReadError::io(&std::io::Error::from(std::io::ErrorKind::NotFound), path),
        })?;
        let map = Map::open(path).map_err(|e| ReadError(e.to_string()))?;
        let parts = parts(kind, map.bytes()).map_err(|what| {
            ReadError::new(
                format!("the file can't be read: {what}"),
                path,
                "write it again, and check that the copy is complete; tensors only, with torch.save of a dictionary of them",
            )
        })?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let one = parts.len() == 1;
        for (inner, part) in parts {
            let name = match in_folder {
                true if one => stem.clone(),
                true => format!("{stem}/{inner}"),
                false if inner.is_empty() => stem.clone(),
                false => inner,
            };
            self.entries.push(Entry { name, file: self.files.len(), part });
        }
        self.files.push(map);
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Npy,
    Npz,
    Safetensors,
    Torch,
}

fn kind(path: &Path) -> Option<Kind> {
    match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
        "npy" => Some(Kind::Npy),
        "npz" => Some(Kind::Npz),
        "safetensors" => Some(Kind::Safetensors),
        "pt" | "pth" | "bin" => Some(Kind::Torch),
        _ => None,
    }
}

fn parts(kind: Kind, bytes: &[u8]) -> Result<Vec<(String, Part)>, String> {
    Ok(match kind {
        Kind::Npy => vec![(String::new(), Part::Npy)],
        Kind::Npz => zip::list(bytes)?
            .into_iter()
            .map(|f| (f.name.strip_suffix(".npy").unwrap_or(&f.name).to_string(), Part::Npz(f)))
            .collect(),
        Kind::Safetensors => {
            let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
            let mut names: Vec<String> = file.names().into_iter().map(str::to_string).collect();
            names.sort();
            names.into_iter().map(|n| (n.clone(), Part::Safetensors(n))).collect()
        }
        Kind::Torch => torch::list(bytes)?.into_iter().map(|(n, t)| (n, Part::Torch(t))).collect(),
    })
}

fn safetensor(bytes: &[u8], name: &str) -> Result<Array, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    let tensor = file.tensor(name).map_err(|e| e.to_string())?;
    let stored = match tensor.dtype() {
        Dtype::F64 => Stored::Float(DType::F64),
        Dtype::F32 => Stored::Float(DType::F32),
        Dtype::F16 => Stored::Float(DType::F16),
        Dtype::BF16 => Stored::Float(DType::Bf16),
        Dtype::F8_E4M3 => Stored::Float(DType::E4m3),
        Dtype::I64 => Stored::Int(8),
        Dtype::I32 => Stored::Int(4),
        Dtype::I16 => Stored::Int(2),
        Dtype::I8 => Stored::Int(1),
        Dtype::U64 => Stored::UInt(8),
        Dtype::U32 => Stored::UInt(4),
        Dtype::U16 => Stored::UInt(2),
        Dtype::U8 => Stored::UInt(1),
        Dtype::BOOL => Stored::Bool,
        other => return Err(format!("dtype {other:?} is not read")),
    };
    Array::new(stored, tensor.shape().to_vec(), tensor.data().to_vec())
}
