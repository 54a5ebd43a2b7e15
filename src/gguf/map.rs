/*!
The memory map of one file: the only `unsafe` of the readers of models and dumps.

Mapping costs address space, not memory; the pages touched are those that are read. The file's length is
asked again before a tensor's bytes are handed out ([`Map::check`]), so that a file cut short by another
program is an error rather than a bus error in all but the narrowest race.
*/

use super::error::{GgufError, Place, Problem};
use std::fs::{File, FileType};
use std::path::Path;
use std::sync::Arc;

/// A file in memory.
pub(crate) struct Map {
    path: Arc<Path>,
    file: File,
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
        let length = file.metadata().map_err(io("ask for the file's size")).map_err(fail)?.len();
        if length == 0 {
            return Err(fail(Problem::Empty));
        }
        // SAFETY: the map is read-only and private to this object, and only ever seen as bytes (any bit
        // pattern is valid). Another program that changes the file changes these bytes under us: that
        // is outside of what a process can prevent, `check` narrows it, and no length or offset is
        // read from the map twice with the first reading trusted.
        let map =
            unsafe { memmap2::Mmap::map(&file) }.map_err(io("map the file into memory")).map_err(fail)?;
        Ok(Map { path, file, map })
    }
    pub fn path(&self) -> &Arc<Path> {
        &self.path
    }
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
    /// Whether the file is still as long as it was.
    pub fn check(&self) -> Result<(), GgufError> {
        let before = self.map.len() as u64;
        let problem = match self.file.metadata() {
            Ok(now) if now.len() >= before => return Ok(()),
            Ok(now) => Problem::Changed { before, now: now.len() },
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
