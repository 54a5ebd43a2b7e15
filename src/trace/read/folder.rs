/*!
What a dump holds: one file, or a folder of files.

A file with one array gives it the file's name without its ending; of one with several, in a folder, the file's name
stands before theirs, with a slash. Folders inside are read too; their names stand before those of their files.
*/

use super::pickle::Strided;
use super::zip::File;
use super::{Array, ReadError, Stored, npy, torch, zip};
use crate::gguf::Map;
use mla_numeric::DType;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

const KINDS: &str = "give a .npy, .npz, .safetensors or .pt file (torch.save), or a folder of these";

/// Folders inside folders that are looked into.
const DEEPEST: usize = 3;

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
    /// The longer name of a file's only array.
    full: Option<String>,
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
            dump.add(path, None)?;
            return Ok(dump);
        }
        dump.folder(path, "", DEEPEST)?;
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

    /// The arrays of a name in which `*` stands for any text.
    pub fn matching(&self, pattern: &str) -> Vec<&Entry> {
        let is = |name: &str| like(pattern.as_bytes(), name.as_bytes());
        self.entries.iter().filter(|e| is(&e.name) || e.full.as_deref().is_some_and(is)).collect()
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

    /// Adds a folder's files, in the order of their names; `before` stands before these.
    fn folder(&mut self, path: &Path, before: &str, deeper: usize) -> Result<(), ReadError> {
        let mut inside: Vec<PathBuf> = std::fs::read_dir(path)
            .and_then(|all| all.map(|e| e.map(|e| e.path())).collect())
            .map_err(|e| ReadError::io(&e, path))?;
        inside.sort();
        for file in inside {
            if file.is_dir() && deeper > 0 {
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                self.folder(&file, &format!("{before}{name}/"), deeper - 1)?;
            } else if kind(&file).is_some() && file.is_file() {
                self.add(&file, Some(before))?;
            }
        }
        Ok(())
    }

    /// Adds a file; of a folder, what stands before its name.
    fn add(&mut self, path: &Path, folder: Option<&str>) -> Result<(), ReadError> {
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
            let (name, full) = match folder {
                Some(before) if one => (
                    format!("{before}{stem}"),
                    (!inner.is_empty()).then(|| format!("{before}{stem}/{inner}")),
                ),
                Some(before) => (format!("{before}{stem}/{inner}"), None),
                None if inner.is_empty() => (stem.clone(), None),
                None => (inner, None),
            };
            self.entries.push(Entry { name, full, file: self.files.len(), part });
        }
        self.files.push(map);
        Ok(())
    }
}

/// Whether a name is one that a pattern stands for, whose `*` is any text. Linear in memory, no recursion.
fn like(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n, mut back) = (0, 0, None);
    while n < name.len() {
        if p < pattern.len() && pattern[p] == b'*' {
            back = Some((p + 1, n));
            p += 1;
        } else if p < pattern.len() && pattern[p] == name[n] {
            (p, n) = (p + 1, n + 1);
        } else if let Some((after, from)) = back {
            back = Some((after, from + 1));
            (p, n) = (after, from + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
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

#[cfg(test)]
mod tests {
    use super::like;

    #[test]
    fn stars_stand_for_any_text() {
        for (pattern, name, is) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "", true),
            ("a*c", "abcbc", true),
            ("a*c", "abcb", false),
            ("*b*", "abc", true),
            ("*name=q.output___*", "step=0___name=q.output___layer=1", true),
            ("*name=q.output___*", "step=0___name=q.output2___layer=1", false),
            ("", "a", false),
        ] {
            assert_eq!(like(pattern.as_bytes(), name.as_bytes()), is, "{pattern} {name}");
        }
    }
}
