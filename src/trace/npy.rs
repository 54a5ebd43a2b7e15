/*!
Tensors to and from NumPy's .npy files.

NumPy has no bfloat16: such tensors are written as `<u2` bits and the manifest beside them says `bf16`.
Files are written beside their final name and renamed, so that a killed run leaves nothing half-written.
*/

use crate::trace::Tensor;
use mla_numeric::DType;
use ndarray::Array2;
use npyz::WriterBuilder;
use std::io::{BufReader, BufWriter, Write};
use std::path::Path;

/// What went wrong with an array file.
#[derive(Debug, thiserror::Error)]
pub enum NpyError {
    /// The system said no.
    #[error("{what} failed: {source}\n  file: {path}\n  do: check that the path exists and may be {verb}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// read or written
        verb: &'static str,
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// Not the array that is wanted.
    #[error("{found}\n  file: {path}\n  do: {wanted}")]
    Content {
        /// What it is.
        found: String,
        /// The file.
        path: String,
        /// What is wanted.
        wanted: String,
    },
}

/// Writes a file through a temporary one beside it.
pub fn write_atomically(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    let result = (|| {
        let mut out = BufWriter::new(std::fs::File::create(&temporary)?);
        fill(&mut out)?;
        out.into_inner().map_err(|e| e.into_error())?.sync_data()?;
        std::fs::rename(&temporary, path)
    })();
    if result.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    result
}

/// Writes a tensor; returns the dtype name that NumPy will show.
pub fn write(path: &Path, tensor: &Tensor) -> Result<&'static str, NpyError> {
    let descr = match tensor.dtype {
        DType::F64 => "<f8",
        DType::F32 | DType::Tf32 => "<f4",
        DType::F16 => "<f2",
        DType::Bf16 => "<u2",
        DType::E4m3 | DType::E2m1 => "|u1",
    };
    let shape: Vec<u64> = tensor.shape.iter().map(|n| *n as u64).collect();
    let result = write_atomically(path, |out| {
        // The bytes are already in the file's order: only the header is npyz's to write.
        let ty = descr.parse::<npyz::TypeStr>().map_err(std::io::Error::other)?;
        let header = npyz::WriteOptions::<u8>::new()
            .dtype(npyz::DType::Plain(ty))
            .shape(&shape)
            .writer(Vec::new());
        drop(header);
        write_header(out, descr, &shape)?;
        out.write_all(&tensor.bytes)
    });
    result.map_err(|source| NpyError::Io {
        what: "writing an array",
        verb: "written",
        path: path.display().to_string(),
        source,
    })?;
    Ok(descr)
}

fn write_header(out: &mut dyn Write, descr: &str, shape: &[u64]) -> std::io::Result<()> {
    let dims: Vec<String> = shape.iter().map(|n| format!("{n},")).collect();
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", dims.join(" "));
    let total = (10 + header.len() + 1).next_multiple_of(64);
    header.push_str(&" ".repeat(total - 11 - header.len()));
    header.push('\n');
    out.write_all(b"\x93NUMPY\x01\x00")?;
    out.write_all(&(header.len() as u16).to_le_bytes())?;
    out.write_all(header.as_bytes())
}

/// Reads a two-dimensional float array as float64.
pub fn read_matrix(path: &Path) -> Result<Array2<f64>, NpyError> {
    let name = path.display().to_string();
    let io = |source| NpyError::Io { what: "reading an array", verb: "read", path: name.clone(), source };
    let bad = |found: String| NpyError::Content {
        found,
        path: name.clone(),
        wanted: "save it with numpy.save as a two-dimensional C-ordered float32, float64 or float16 array [token, hidden]"
            .into(),
    };
    let file = BufReader::new(std::fs::File::open(path).map_err(io)?);
    let npy = npyz::NpyFile::new(file).map_err(|e| bad(format!("not a NumPy array: {e}")))?;
    let shape: Vec<usize> = npy.shape().iter().map(|n| *n as usize).collect();
    let &[rows, cols] = shape.as_slice() else {
        return Err(bad(format!("the array has shape {shape:?}, not two axes")));
    };
    if npy.order() == npyz::Order::Fortran && rows > 1 && cols > 1 {
        return Err(bad("the array is stored in Fortran order".into()));
    }
    let descr = npy.dtype().descr();
    let values: Vec<f64> = match descr.trim_matches('\'').trim_start_matches(['<', '>', '=']) {
        "f8" => npy.into_vec::<f64>().map_err(io)?,
        "f4" => npy.into_vec::<f32>().map_err(io)?.into_iter().map(f64::from).collect(),
        _ => return Err(bad(format!("the array has dtype {descr}"))),
    };
    Array2::from_shape_vec((rows, cols), values).map_err(|e| bad(e.to_string()))
}
