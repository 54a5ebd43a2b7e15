/*!
Writing GGUF files, version 3.

Header and table are laid out first, then each tensor's data is asked for and streamed. The file grows
under a temporary name beside its target and takes the target's name only when it is complete, so that
nothing half-written ever replaces something whole.
*/

use super::error::{GgufError, Place, Problem};
use super::extent::size;
use super::table::TensorType;
use super::value::ValueType;
use mla_reference::ggml::GgmlType;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A metadata value to be written.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq)]
pub enum MetaValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    U64(u64),
    I64(i64),
    F64(f64),
    Bool(bool),
    String(String),
    /// Elements of one type, given here so that an empty array has one too.
    Array(ValueType, Vec<MetaValue>),
}

macro_rules! meta_values {
    ($($variant:ident $ty:ty),*) => {
        $(impl From<$ty> for MetaValue { fn from(v: $ty) -> Self { MetaValue::$variant(v) } })*
        impl MetaValue {
            fn ty(&self) -> ValueType {
                match self {
                    $(MetaValue::$variant(_) => ValueType::$variant,)*
                    MetaValue::Bool(_) => ValueType::Bool,
                    MetaValue::String(_) => ValueType::String,
                    MetaValue::Array(..) => ValueType::Array,
                }
            }
            fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $(MetaValue::$variant(v) => out.extend(v.to_le_bytes()),)*
                    MetaValue::Bool(v) => out.push((*v).into()),
                    MetaValue::String(s) => string(out, s),
                    MetaValue::Array(element, values) => {
                        out.extend(element.id().to_le_bytes());
                        out.extend((values.len() as u64).to_le_bytes());
                        values.iter().for_each(|v| v.encode(out));
                    }
                }
            }
        }
    };
}
meta_values!(U8 u8, I8 i8, U16 u16, I16 i16, U32 u32, I32 i32, F32 f32, U64 u64, I64 i64, F64 f64);

impl From<bool> for MetaValue {
    fn from(v: bool) -> Self {
        MetaValue::Bool(v)
    }
}
impl From<&str> for MetaValue {
    fn from(v: &str) -> Self {
        MetaValue::String(v.to_owned())
    }
}
impl From<String> for MetaValue {
    fn from(v: String) -> Self {
        MetaValue::String(v)
    }
}

fn string(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

struct Tensor {
    name: String,
    dims: Vec<u64>,
    ty: GgmlType,
}

/// What is to be written: metadata pairs and tensors, in this order.
#[derive(Default)]
pub struct Writer {
    metadata: Vec<(String, MetaValue)>,
    tensors: Vec<Tensor>,
    alignment: Option<u32>,
}

/// Writes the data of the tensor with this number.
pub type Data<'a> = dyn FnMut(usize, &mut dyn Write) -> io::Result<()> + 'a;

impl Writer {
    /// A file of nothing.
    pub fn new() -> Writer {
        Writer::default()
    }
    /// Adds a metadata pair.
    pub fn meta(&mut self, key: impl Into<String>, value: impl Into<MetaValue>) -> &mut Writer {
        self.metadata.push((key.into(), value.into()));
        self
    }
    /// Sets the alignment of tensor data, a power of two; 32 unless set. Also writes its key.
    pub fn alignment(&mut self, alignment: u32) -> &mut Writer {
        self.alignment = Some(alignment);
        self.meta("general.alignment", alignment)
    }
    /// Adds a tensor: dimensions fastest first.
    pub fn tensor(&mut self, name: impl Into<String>, dims: &[u64], ty: GgmlType) -> &mut Writer {
        self.tensors.push(Tensor { name: name.into(), dims: dims.to_vec(), ty });
        self
    }

    /// Header, metadata, table and padding; each tensor's size in bytes.
    fn layout(&self, path: &Arc<Path>) -> Result<(Vec<u8>, Vec<u64>), GgufError> {
        let alignment = self.alignment.unwrap_or(32);
        if !alignment.is_power_of_two() {
            let problem = Problem::Alignment { found: alignment.to_string() };
            return Err(GgufError::new(problem, Place::file(path)));
        }
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            out.extend(value.ty().id().to_le_bytes());
            value.encode(&mut out);
        }
        let (mut offset, mut sizes) = (0u64, Vec::new());
        for t in &self.tensors {
            let fail = |problem| GgufError::new(problem, Place::file(path).tensor(&t.name));
            let bytes = size(&t.dims, TensorType::Known(t.ty)).map_err(fail)?.unwrap_or(0);
            string(&mut out, &t.name);
            out.extend((t.dims.len() as u32).to_le_bytes());
            t.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(t.ty.id().to_le_bytes());
            out.extend(offset.to_le_bytes());
            let next = offset.checked_add(bytes).and_then(|o| o.checked_next_multiple_of(alignment.into()));
            offset = next
                .ok_or_else(|| fail(Problem::SizeOverflow { dims: t.dims.clone(), ty: t.ty.to_string() }))?;
            sizes.push(bytes);
        }
        if !self.tensors.is_empty() {
            out.resize(out.len().next_multiple_of(alignment as usize), 0);
        }
        Ok((out, sizes))
    }

    /// Writes the file, asking `data` for each tensor in turn. Gives the file's length.
    pub fn write(&self, path: &Path, data: &mut Data<'_>) -> Result<u64, GgufError> {
        let shared: Arc<Path> = path.into();
        let (header, sizes) = self.layout(&shared)?;
        let fail = |action| {
            let shared = &shared;
            move |source| GgufError::new(Problem::Io { action, source }, Place::file(shared))
        };
        let (temporary, file) = Temporary::create(path).map_err(fail("create the file"))?;
        let mut out = Counting { out: BufWriter::with_capacity(1 << 20, file), written: 0 };
        out.write_all(&header).map_err(fail("write the file"))?;
        for (i, (tensor, &needed)) in self.tensors.iter().zip(&sizes).enumerate() {
            let before = out.written;
            let place = || Place::file(&shared).at(before).tensor(&tensor.name);
            let io =
                |source| GgufError::new(Problem::Io { action: "write the tensor's data", source }, place());
            data(i, &mut out).map_err(io)?;
            let written = out.written - before;
            if written != needed {
                return Err(GgufError::new(Problem::DataLength { written, needed }, place()));
            }
            let end = out.written.next_multiple_of(self.alignment.unwrap_or(32).into());
            let padding = end - out.written;
            io::copy(&mut io::Read::take(io::repeat(0), padding), &mut out).map_err(io)?;
        }
        out.flush().map_err(fail("write the file"))?;
        let Counting { out, written } = out;
        drop(out);
        temporary.rename(path).map_err(fail("write the file (rename its temporary to its name)"))?;
        Ok(written)
    }
}

struct Counting<W> {
    out: W,
    written: u64,
}

impl<W: Write> Write for Counting<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.written += n as u64;
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A file that is removed unless it is renamed.
struct Temporary {
    path: Option<PathBuf>,
}

impl Temporary {
    fn create(target: &Path) -> io::Result<(Temporary, File)> {
        if target.is_dir() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder"));
        }
        let mut name = std::ffi::OsString::from(".");
        name.push(target.file_name().ok_or(io::ErrorKind::InvalidFilename)?);
        // Two programs, or what a killed one left behind, must not meet.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now = now.map_or(0, |d| d.as_nanos());
        name.push(format!(".{}.{now}.tmp", std::process::id()));
        let path = target.with_file_name(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok((Temporary { path: Some(path) }, file))
    }
    fn rename(mut self, target: &Path) -> io::Result<()> {
        if let Some(path) = &self.path {
            std::fs::rename(path, target)?;
        }
        self.path = None;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // A file left over is no reason to hide the error that made it so.
            let _ = std::fs::remove_file(path);
        }
    }
}
