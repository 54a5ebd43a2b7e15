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
    #[error("{what} failed: {source}\n  where: {path}\n  do: check that the path exists and may be {verb}")]
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
    #[error("{found}\n  where: {path}\n  do: {wanted}")]
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

/// Writes a tensor. bfloat16 goes out as its bits (`<u2`), everything else as NumPy knows it.
pub fn write(path: &Path, tensor: &Tensor) -> Result<(), NpyError> {
    let shape: Vec<u64> = tensor.shape.iter().map(|n| *n as u64).collect();
    let n = tensor.dtype.bytes();
    let bits = tensor.bytes.chunks_exact(n).map(|b| b.iter().rev().fold(0u64, |a, b| a << 8 | u64::from(*b)));
    let result = write_atomically(path, |out| match tensor.dtype {
        DType::F64 => put(out, &shape, bits.map(f64::from_bits)),
        DType::F32 | DType::Tf32 => put(out, &shape, bits.map(|b| f32::from_bits(b as u32))),
        DType::F16 => put(out, &shape, bits.map(|b| half::f16::from_bits(b as u16))),
        DType::Bf16 => put(out, &shape, bits.map(|b| b as u16)),
        DType::E4m3 | DType::E2m1 => put(out, &shape, bits.map(|b| b as u8)),
    });
    result.map_err(|source| NpyError::Io {
        what: "writing an array",
        verb: "written",
        path: path.display().to_string(),
        source,
    })
}

fn put<T: npyz::AutoSerialize>(
    out: &mut dyn Write,
    shape: &[u64],
    values: impl Iterator<Item = T>,
) -> std::io::Result<()> {
    let mut writer = npyz::WriteOptions::new().default_dtype().shape(shape).writer(out).begin_nd()?;
    writer.extend(values)?;
    writer.finish()
}

/// Writes integers.
pub fn write_integers(path: &Path, shape: &[usize], values: &[i32]) -> Result<(), NpyError> {
    let shape: Vec<u64> = shape.iter().map(|n| *n as u64).collect();
    write_atomically(path, |out| put(out, &shape, values.iter().copied())).map_err(|source| NpyError::Io {
        what: "writing an array",
        verb: "written",
        path: path.display().to_string(),
        source,
    })
}

/// Reads a two-dimensional float array as float64.
pub fn read_matrix(path: &Path) -> Result<Array2<f64>, NpyError> {
    let name = path.display().to_string();
    let io = |source| NpyError::Io { what: "reading an array", verb: "read", path: name.clone(), source };
    let bad = |found: String| {
        NpyError::Content {
        found,
        path: name.clone(),
        wanted: "save it with numpy.save as a two-dimensional C-ordered float32, float64 or float16 array [token, hidden]"
            .into(),
    }
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
        "f2" => npy.into_vec::<half::f16>().map_err(io)?.into_iter().map(f64::from).collect(),
        "f4" => npy.into_vec::<f32>().map_err(io)?.into_iter().map(f64::from).collect(),
        _ => return Err(bad(format!("the array has dtype {descr}"))),
    };
    Array2::from_shape_vec((rows, cols), values).map_err(|e| bad(e.to_string()))
}
