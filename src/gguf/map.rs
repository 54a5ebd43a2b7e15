/*!
The memory map of one file: the only `unsafe` of the readers of models and dumps.

Mapping costs address space, not memory; the pages touched are those that are read. The file's length and time of
change are asked again before a tensor's bytes are handed out, and after a layer was read ([`Map::check`]), so that a
file that another program writes to is an error. A file cut short *while* its bytes are read is a bus error, which the
program ends on in words ([`super::lost`]).
*/

use super::error::{GgufError, Place, Problem};
use super::lost::Watched;
use std::fs::{File, FileType};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// A file in memory.
pub(crate) struct Map {
    path: Arc<Path>,
    file: File,
    modified: Option<SystemTime>,
    _watched: Watched,
    map: memmap2::Mmap,
}

impl Map {
    pub fn open(path: &Path) -> Result<Map, GgufError> {
        let path: Arc<Path> = path.into();
        let fail = |problem| GgufError::new(problem, Place::file(&path));
        let io = |action| move |source| Problem::Io { action, source };
        // Before opening: opening a pipe would wait for its writer.
        let kind = std::fs::metadata(&path).map_err(io("open the file")).map_err(fail)?.file_type();
        if let Some(what) = not_a_file(kind) {
            return Err(fail(Problem::NotAFile { what }));
        }
        let file = File::open(&path).map_err(io("open the file")).map_err(fail)?;
        let metadata = file.metadata().map_err(io("ask for the file's size")).map_err(fail)?;
        // A file may have become something else since it was first looked at.
        if let Some(what) = not_a_file(metadata.file_type()) {
            return Err(fail(Problem::NotAFile { what }));
        }
        if metadata.len() == 0 {
            return Err(fail(Problem::Empty));
        }
        // SAFETY: the map is read-only and private to this object, and only ever seen as bytes (any bit
        // pattern is valid). Another program that changes the file changes these bytes under us: that
        // is outside of what a process can prevent, `check` narrows it, and no length or offset is
        // read from the map twice with the first reading trusted.
        let map =
            unsafe { memmap2::Mmap::map(&file) }.map_err(io("map the file into memory")).map_err(fail)?;
        let watched = Watched::new(&map, &path);
        Ok(Map { path, file, modified: metadata.modified().ok(), _watched: watched, map })
    }
    pub fn path(&self) -> &Arc<Path> {
        &self.path
    }
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
    /// Whether the file is still as long as it was, and not written to since.
    pub fn check(&self) -> Result<(), GgufError> {
        let before = self.map.len() as u64;
        let problem = match self.file.metadata() {
            Ok(now) if now.len() != before => Problem::Changed { before, now: now.len() },
            Ok(now) if self.modified.is_some() && now.modified().ok() != self.modified => Problem::Rewritten,
            Ok(_) => return Ok(()),
            Err(source) => Problem::Io { action: "ask for the file's size", source },
        };
        Err(GgufError::new(problem, Place::file(&self.path)))
    }
}

fn not_a_file(kind: FileType) -> Option<&'static str> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return Some("a pipe");
        }
        if kind.is_socket() {
            return Some("a socket");
        }
        if kind.is_block_device() || kind.is_char_device() {
            return Some("a device");
        }
    }
    match kind {
        k if k.is_dir() => Some("a folder"),
        k if k.is_file() => None,
        _ => Some("something else"),
    }
}
