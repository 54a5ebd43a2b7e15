/*!
Which files of a folder are the model: those that the index names, or model.safetensors, or all.

An index is the word on which file holds which tensor. A shard that is missing makes its tensors unreadable, not the folder: who
fetched the shards of one layer can judge that layer.
*/

use super::error::{AGAIN, CheckpointError};
use super::header::{self, Entry, Keyed};
use super::{Checkpoint, Dtype, TensorInfo};
use crate::gguf::Map;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// The file with the model's numbers.
pub(super) const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The largest JSON file beside the weights that is read: the index of 100,000 tensors takes some 12 MB.
const LARGEST_JSON: u64 = 256 << 20;

#[derive(serde::Deserialize)]
struct Index {
    weight_map: Keyed<String>,
}

/// Reads a folder's headers.
pub(super) fn open(folder: &Path) -> Result<Checkpoint, CheckpointError> {
    let text = json(&folder.join(CONFIG))?.ok_or_else(|| no_config(folder))?;
    let config: serde_json::Value = serde_json::from_slice(&text).map_err(|e| {
        CheckpointError::new(format!("this is no JSON: {e}"), folder.join(CONFIG).display(), AGAIN)
    })?;
    if !config.is_object() {
        let what = "the file is JSON, but no object";
        return Err(CheckpointError::new(what, folder.join(CONFIG).display(), AGAIN));
    }
    let mut checkpoint = Checkpoint {
        folder: folder.to_path_buf(),
        config,
        files: Vec::new(),
        tensors: Vec::new(),
        index: HashMap::new(),
        warnings: Vec::new(),
    };
    let index = folder.join(INDEX);
    match json(&index)? {
        Some(text) => by_index(&mut checkpoint, &index, &text)?,
        None => all(&mut checkpoint)?,
    }
    Ok(checkpoint)
}

/// A JSON file's bytes; None where there is no such file.
fn json(path: &Path) -> Result<Option<Vec<u8>>, CheckpointError> {
    let about = match std::fs::metadata(path) {
        Ok(about) => about,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(CheckpointError::io(&e, path)),
    };
    if !about.is_file() || about.len() > LARGEST_JSON {
        let what = if about.is_file() {
            format!("the file has {} bytes, more than any of its kind", about.len())
        } else {
            "this is no file".into()
        };
        return Err(CheckpointError::new(what, path.display(), "put the publisher's file there"));
    }
    std::fs::read(path).map(Some).map_err(|e| CheckpointError::io(&e, path))
}

fn no_config(folder: &Path) -> CheckpointError {
    let inside = std::fs::read_dir(folder).map(|all| all.flatten().map(|e| e.path()).collect::<Vec<_>>());
    let has = |ending: &str| {
        inside.as_ref().is_ok_and(|all| all.iter().any(|p| p.extension().is_some_and(|e| e == ending)))
    };
    let (what, advice) = if has("gguf") {
        ("the folder has .gguf files, but no config.json", "name the .gguf file itself")
    } else if has("safetensors") {
        ("the folder has .safetensors files, but no config.json", "put the model's config.json beside them")
    } else {
        (
            "the folder is no checkpoint: it has no config.json",
            "name a .gguf file, or a folder with config.json and .safetensors files",
        )
    };
    CheckpointError::new(what, folder.display(), advice)
}

/// Files as an index names them.
fn by_index(checkpoint: &mut Checkpoint, path: &Path, text: &[u8]) -> Result<(), CheckpointError> {
    let fail = |what: String| CheckpointError::new(what, path.display(), AGAIN);
    let index: Index =
        serde_json::from_slice(text).map_err(|e| fail(format!("the index is not what it should be: {e}")))?;
    let mut by_file: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, file) in index.weight_map.0 {
        // Only names: an index must not lead out of its folder.
        if Path::new(&file).file_name().is_none_or(|n| n != file.as_str()) {
            return Err(fail(format!("{} is no name of a file of this folder", file.escape_debug())));
        }
        by_file.entry(file).or_default().push(tensor);
    }
    let (mut missing, mut strangers) = (Vec::new(), 0);
    for (file, names) in by_file {
        let path = checkpoint.folder.join(&file);
        if !path.exists() {
            for name in names {
                let bad = format!("the index says that it is in {file}, which is missing");
                absent(checkpoint, name, bad);
            }
            missing.push(file);
            continue;
        }
        let mut there: HashMap<String, Entry> =
            add_file(checkpoint, &path)?.into_iter().map(|e| (e.name.clone(), e)).collect();
        let number = checkpoint.files.len() - 1;
        let mut found: Vec<Entry> = Vec::new();
        for name in names {
            match there.remove(&name) {
                Some(entry) => found.push(entry),
                None => {
                    absent(checkpoint, name, format!("the index says that it is in {file}, where it is not"))
                }
            }
        }
        strangers += there.len();
        found.sort_by_key(|e| e.offset);
        found.into_iter().for_each(|e| add(checkpoint, e, number));
    }
    if let Some(first) = missing.first() {
        let more =
            if missing.len() > 1 { format!(" and {} more files", missing.len() - 1) } else { String::new() };
        checkpoint.warnings.push(format!(
            "{}: {first}{more} missing, which the index names: tensors there can't be read",
            checkpoint.folder.display()
        ));
    }
    if strangers > 0 {
        checkpoint.warnings.push(format!(
            "{}: {strangers} tensors of its files are not in the index, and left out",
            path.display()
        ));
    }
    Ok(())
}

/// Files of a folder without an index.
fn all(checkpoint: &mut Checkpoint) -> Result<(), CheckpointError> {
    let folder = checkpoint.folder.clone();
    let single = folder.join(SINGLE);
    let files: Vec<PathBuf> = if single.exists() {
        vec![single]
    } else {
        let inside = std::fs::read_dir(&folder)
            .and_then(|all| all.map(|e| e.map(|e| e.path())).collect::<Result<Vec<_>, _>>());
        let mut files = inside.map_err(|e| CheckpointError::io(&e, &folder))?;
        files.retain(|p| p.extension().is_some_and(|e| e == "safetensors"));
        files.sort();
        files
    };
    if files.is_empty() {
        let advice = "fetch the weights; PyTorch's .bin files must be saved as safetensors first";
        return Err(CheckpointError::new("the folder holds no .safetensors file", folder.display(), advice));
    }
    for path in files {
        let entries = add_file(checkpoint, &path)?;
        let number = checkpoint.files.len() - 1;
        for entry in entries {
            if let Some(first) = checkpoint.index.get(&entry.name).copied() {
                let first = &mut checkpoint.tensors[first];
                first.bad =
                    Some("two files of the folder hold a tensor of this name, and there is no index".into());
                continue;
            }
            add(checkpoint, entry, number);
        }
    }
    Ok(())
}

/// Maps a file and reads its header.
fn add_file(checkpoint: &mut Checkpoint, path: &Path) -> Result<Vec<Entry>, CheckpointError> {
    let map = Map::open(path)?;
    let (entries, warnings) = header::parse(map.bytes(), path)?;
    checkpoint.warnings.extend(warnings);
    checkpoint.files.push(map);
    Ok(entries)
}

fn add(checkpoint: &mut Checkpoint, entry: Entry, file: usize) {
    let Entry { name, dtype, shape, offset, bytes, bad } = entry;
    checkpoint.index.insert(name.clone(), checkpoint.tensors.len());
    checkpoint.tensors.push(TensorInfo { name, dtype, shape, file: Some(file), offset, bytes, bad });
}

fn absent(checkpoint: &mut Checkpoint, name: String, bad: String) {
    checkpoint.index.insert(name.clone(), checkpoint.tensors.len());
    let dtype = Dtype::Unknown("missing".into());
    let info = TensorInfo { name, dtype, shape: Vec::new(), file: None, offset: 0, bytes: 0, bad: Some(bad) };
    checkpoint.tensors.push(info);
}
