/*!
One launch described in TOML: kernel, shape and arguments with what their buffers hold. For trying a kernel on a device
without host code of its own.

Closed on purpose: an unknown key is an error that says what is allowed, and so is a whole number that does not fit its
type.
*/

use super::{Arg, Buffer, Device, Launch, Module, Pattern};
use crate::case::Stream;
use crate::nvrtc::stamp::Hash;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Bytes that one argument's values may have.
const MOST: u64 = 1 << 32;
/// Values of an output that are shown.
const SHOWN: usize = 8;
/// Number of the stream of random values.
const VALUES: u64 = 16;

/// What is wrong with a case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}\n  where: {place}\n  do: {advice}")]
pub struct CaseError {
    what: String,
    place: String,
    advice: &'static str,
}

fn error(what: impl Into<String>, place: impl Into<String>, advice: &'static str) -> CaseError {
    CaseError { what: what.into(), place: place.into(), advice }
}

/// The file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CaseText {
    kernel: String,
    grid: Vec<u32>,
    block: Vec<u32>,
    #[serde(default)]
    dynamic_shared: u32,
    args: Vec<ArgText>,
}

/// A table of one key.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ArgText {
    In(BufferText),
    Out(BufferText),
    InOut(BufferText),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BufferText {
    name: Option<String>,
    bytes: Option<u64>,
    shape: Option<Vec<u64>>,
    dtype: Option<Type>,
    fill: Option<toml::Value>,
    file: Option<String>,
}

macro_rules! types {
    ($($name:ident $rust:ty, $bytes:literal, $npy:literal, $from:ident);+ $(;)?) => {
        /// Type of a buffer's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
        #[serde(rename_all = "lowercase")]
        enum Type { $($name),+ }

        impl Type {
            fn bytes(self) -> u64 {
                match self { $(Type::$name => $bytes),+ }
            }
            /// A number as this type; none where it does not fit.
            fn encode(self, value: &toml::Value) -> Option<Vec<u8>> {
                match self { $(Type::$name => $from::<$rust>(value).map(|v| v.to_le_bytes().to_vec())),+ }
            }
            /// As people read it.
            fn show(self, bytes: &[u8]) -> String {
                match self {
                    $(Type::$name => bytes.try_into().map_or_else(
                        |_| String::new(),
                        |b| <$rust>::from_le_bytes(b).to_string(),
                    )),+
                }
            }
            /// By NumPy's letters and size.
            fn of_npy(text: &str) -> Option<Type> {
                match text { $($npy => Some(Type::$name),)+ _ => None }
            }
            fn of_file<R: std::io::Read>(self, file: npyz::NpyFile<R>) -> std::io::Result<Vec<u8>> {
                match self {
                    $(Type::$name => bytes_of!($name, $rust, file)),+
                }
            }
        }
    };
}
/// NumPy has no bf16: those bits come as uint16.
macro_rules! bytes_of {
    (BF16, $rust:ty, $file:ident) => {
        Ok($file.into_vec::<u16>()?.into_iter().flat_map(u16::to_le_bytes).collect())
    };
    ($name:ident, $rust:ty, $file:ident) => {
        Ok($file.into_vec::<$rust>()?.into_iter().flat_map(|v| v.to_le_bytes()).collect())
    };
}
types! {
    U8 u8, 1, "u1", integer;
    U32 u32, 4, "u4", integer;
    I32 i32, 4, "i4", integer;
    U64 u64, 8, "u8", integer;
    I64 i64, 8, "i8", integer;
    F16 half::f16, 2, "f2", float;
    BF16 half::bf16, 2, "u2", float;
    F32 f32, 4, "f4", float;
    F64 f64, 8, "f8", float;
}

fn integer<T: TryFrom<i64>>(value: &toml::Value) -> Option<T> {
    T::try_from(value.as_integer()?).ok()
}

/// A type that float64 rounds to.
trait Rounded: Sized {
    fn rounded(x: f64) -> Self;
}
impl Rounded for half::f16 {
    fn rounded(x: f64) -> Self {
        Self::from_f32(mla_numeric::DType::F16.round(x) as f32)
    }
}
impl Rounded for half::bf16 {
    fn rounded(x: f64) -> Self {
        Self::from_f32(mla_numeric::DType::Bf16.round(x) as f32)
    }
}
impl Rounded for f32 {
    fn rounded(x: f64) -> Self {
        x as f32
    }
}
impl Rounded for f64 {
    fn rounded(x: f64) -> Self {
        x
    }
}

fn float<T: Rounded>(value: &toml::Value) -> Option<T> {
    let x = value.as_float().or_else(|| value.as_integer().map(|n| n as f64))?;
    Some(T::rounded(x))
}

/// A launch that can be run on any device.
pub struct Case {
    kernel: String,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_shared: u32,
    arguments: Vec<Argument>,
}

enum Argument {
    Scalar(Arg),
    Memory { make: fn(Buffer) -> Arg, written: bool, name: String, dtype: Type, bytes: u64, holds: Holds },
}

/// What a buffer holds before the launch.
enum Holds {
    Nothing,
    Zeros,
    Bytes(Vec<u8>),
}

impl Case {
    /// From TOML; `place` names it in errors, `.npy` files are looked for in `folder`.
    ///
    /// # Errors
    /// What is wrong, at which line or argument, and what is allowed.
    pub fn parse(text: &str, place: &str, folder: &Path) -> Result<Case, CaseError> {
        let case: CaseText = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(String::new(), |s| {
                let before = text.as_bytes().iter().take(s.start).filter(|b| **b == b'\n').count();
                format!(", line {}", before + 1)
            });
            let advice =
                "write kernel, grid, block, args and, if needed, dynamic_shared; docs/ptx.md has the form";
            error(format!("the case can't be read: {}", e.message()), format!("{place}{line}"), advice)
        })?;
        let axes = |name: &str, v: &[u32]| match *v {
            [x] => Ok([x, 1, 1]),
            [x, y] => Ok([x, y, 1]),
            [x, y, z] => Ok([x, y, z]),
            _ => Err(error(
                format!("{name} has {} numbers", v.len()),
                place,
                "write one to three numbers: x, y, z",
            )),
        };
        let (grid, block) = (axes("grid", &case.grid)?, axes("block", &case.block)?);
        let arguments = case.args.into_iter().enumerate().map(|(i, a)| {
            let at = format!("{place}, argument {i} (from 0)");
            Ok(match a {
                ArgText::In(b) => b.memory(i, &at, folder, Arg::In)?,
                ArgText::Out(b) => b.memory(i, &at, folder, Arg::Out)?,
                ArgText::InOut(b) => b.memory(i, &at, folder, Arg::InOut)?,
                ArgText::U32(v) => Argument::Scalar(v.into()),
                ArgText::I32(v) => Argument::Scalar(v.into()),
                ArgText::U64(v) => Argument::Scalar(v.into()),
                ArgText::I64(v) => Argument::Scalar(v.into()),
                ArgText::F32(v) => Argument::Scalar(v.into()),
                ArgText::F64(v) => Argument::Scalar(v.into()),
            })
        });
        let arguments = arguments.collect::<Result<_, CaseError>>()?;
        Ok(Case { kernel: case.kernel, grid, block, dynamic_shared: case.dynamic_shared, arguments })
    }

    /// Allocates, launches, and reads what the kernel may have written.
    ///
    /// # Errors
    /// Those of the device.
    pub fn run(&self, device: &mut dyn Device, module: Module) -> Result<Ran, super::Error> {
        let (mut arguments, mut written) = (Vec::new(), Vec::new());
        for argument in &self.arguments {
            arguments.push(match argument {
                Argument::Scalar(a) => *a,
                Argument::Memory { make, written: is_written, name, dtype, bytes, holds } => {
                    let buffer = device.allocate(*bytes, name)?;
                    match holds {
                        Holds::Nothing => device.poison(buffer, Pattern::NAN)?,
                        Holds::Zeros => device.fill(buffer, Pattern::Bits8(0))?,
                        Holds::Bytes(b) => device.write(buffer, 0, b)?,
                    }
                    if *is_written {
                        written.push((buffer, name, *dtype, *bytes));
                    }
                    make(buffer)
                }
            });
        }
        device.launch(&Launch {
            module,
            kernel: &self.kernel,
            grid: self.grid,
            block: self.block,
            dynamic_shared: self.dynamic_shared,
            arguments: &arguments,
        })?;
        let outputs = written.into_iter().map(|(buffer, name, dtype, bytes)| {
            let mut held = vec![0; bytes as usize];
            device.read(buffer, 0, &mut held)?;
            let values = held.chunks_exact(dtype.bytes() as usize).take(SHOWN);
            let first = values.map(|v| dtype.show(v)).collect();
            Ok(Written { name: name.clone(), dtype, bytes, first, digest: Hash::of(&held).to_string() })
        });
        Ok(Ran {
            kernel: self.kernel.clone(),
            grid: self.grid,
            block: self.block,
            dynamic_shared: self.dynamic_shared,
            outputs: outputs.collect::<Result<_, super::Error>>()?,
        })
    }
}

/// A launch that was run.
#[derive(Debug, Serialize)]
#[allow(missing_docs)] // as in the case
pub struct Ran {
    pub kernel: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_shared: u32,
    /// Buffers passed as `out` or `inout`.
    pub outputs: Vec<Written>,
}

/// What a buffer holds after the launch.
#[derive(Debug, Serialize)]
pub struct Written {
    /// By the case; else `argN`.
    pub name: String,
    dtype: Type,
    /// Bytes of it.
    pub bytes: u64,
    /// First values.
    pub first: Vec<String>,
    /// 128-bit FNV-1a of all bytes.
    pub digest: String,
}

impl Written {
    /// Whether the first values are all that there are.
    pub fn is_whole(&self) -> bool {
        self.first.len() as u64 * self.dtype.bytes() == self.bytes
    }
}

impl BufferText {
    fn memory(
        self,
        index: usize,
        at: &str,
        folder: &Path,
        make: fn(Buffer) -> Arg,
    ) -> Result<Argument, CaseError> {
        let probe = make(Buffer::new(super::Owner::unique(), 0));
        let (reads, written) =
            (!matches!(probe, Arg::Out(_)), probe.buffer().is_some_and(|(_, written)| written));
        let given = self.fill.is_some() || self.file.is_some();
        if reads != given || (self.fill.is_some() && self.file.is_some()) {
            let what = if reads {
                "a buffer that is read needs one of fill and file"
            } else {
                "an out has no fill and no file"
            };
            let advice = "fill = \"zeros\", \"random SEED\" or [values], or file = \"NAME.npy\"; an out begins poisoned";
            return Err(error(what, at, advice));
        }
        let from_file = match &self.file {
            Some(name) => Some(npy(&folder.join(name), self.dtype, at)?),
            None => None,
        };
        let dtype = from_file.as_ref().map(|f| f.0).or(self.dtype).unwrap_or(Type::U8);
        let asked = self.size(dtype, at)?;
        let (holds, found) = match (from_file, &self.fill) {
            (Some((_, bytes)), _) => {
                let n = bytes.len() as u64;
                (Holds::Bytes(bytes), Some(n))
            }
            (None, Some(fill)) => fill_of(fill, dtype, asked, at)?,
            (None, None) => (Holds::Nothing, None),
        };
        let bytes = match (asked, found) {
            (Some(a), Some(f)) if a != f => {
                let what = format!("the values have {f} bytes, the buffer {a}");
                return Err(error(what, at, "give as many values as bytes or shape and dtype say"));
            }
            (Some(n), _) | (None, Some(n)) => n,
            (None, None) => {
                return Err(error("the buffer has no size", at, "give bytes, or shape and dtype"));
            }
        };
        let name = self.name.unwrap_or_else(|| format!("arg{index}"));
        Ok(Argument::Memory { make, written, name, dtype, bytes, holds })
    }

    /// Bytes by `bytes` or by `shape`.
    fn size(&self, dtype: Type, at: &str) -> Result<Option<u64>, CaseError> {
        let of_shape = match &self.shape {
            Some(_) if self.dtype.is_none() && self.file.is_none() => {
                return Err(error("shape without dtype", at, "give both, or bytes"));
            }
            Some(shape) => Some(shape.iter().try_fold(dtype.bytes(), |n, &d| n.checked_mul(d))),
            None => None,
        };
        let size = match (self.bytes, of_shape) {
            (Some(_), Some(_)) => {
                return Err(error("bytes and shape are both given", at, "give one of them"));
            }
            (Some(b), None) => Some(b),
            (None, Some(Some(b))) => Some(b),
            (None, Some(None)) => Some(u64::MAX),
            (None, None) => None,
        };
        match size {
            Some(n) if n > MOST => {
                Err(error(format!("the buffer has more than {MOST} bytes"), at, "take a smaller one"))
            }
            Some(n) if n % dtype.bytes() != 0 => {
                Err(error(format!("{n} bytes are no whole number of elements"), at, "correct bytes or dtype"))
            }
            size => Ok(size),
        }
    }
}

/// What `fill` says, and its bytes where it fixes them.
fn fill_of(
    fill: &toml::Value,
    dtype: Type,
    size: Option<u64>,
    at: &str,
) -> Result<(Holds, Option<u64>), CaseError> {
    if let toml::Value::Array(values) = fill {
        let mut bytes = Vec::new();
        for (i, v) in values.iter().enumerate() {
            let encoded = dtype.encode(v).ok_or_else(|| {
                error(format!("value {i}, {v}, does not fit {dtype:?}"), at, "correct it, or the dtype")
            })?;
            bytes.extend(encoded);
        }
        let n = bytes.len() as u64;
        return Ok((Holds::Bytes(bytes), Some(n)));
    }
    let text = fill.as_str().unwrap_or_default();
    if text == "zeros" {
        return Ok((Holds::Zeros, None));
    }
    let seed = text.strip_prefix("random ").and_then(|s| s.parse::<u64>().ok());
    let Some(seed) = seed else {
        let advice = "fill = \"zeros\", \"random SEED\" or a list of numbers";
        return Err(error(format!("fill = {fill} is none of the fills"), at, advice));
    };
    let mut stream = Stream::new(seed, VALUES, 0);
    let mut next = || match dtype {
        Type::U8 => Some(vec![stream.next() as u8]),
        Type::F16 | Type::BF16 | Type::F32 | Type::F64 => {
            dtype.encode(&toml::Value::Float(2.0 * stream.uniform() - 1.0))
        }
        _ => None,
    };
    let mut bytes = Vec::new();
    for _ in 0..size.unwrap_or(0) / dtype.bytes() {
        let value = next().ok_or_else(|| {
            error(format!("no random values of {dtype:?}"), at, "they are indices or counts: list the values")
        })?;
        bytes.extend(value);
    }
    Ok((Holds::Bytes(bytes), None))
}

/// Elements of a .npy file, in C order.
fn npy(path: &Path, wanted: Option<Type>, at: &str) -> Result<(Type, Vec<u8>), CaseError> {
    let advice = "save it with numpy.save in C order; bf16 as its bits in uint16, with dtype = \"bf16\"";
    let bad = |what: String| error(format!("{}: {what}", path.display()), at, advice);
    let file = std::fs::File::open(path).map_err(|e| bad(e.to_string()))?;
    let npy = npyz::NpyFile::new(std::io::BufReader::new(file)).map_err(|e| bad(e.to_string()))?;
    if npy.order() == npyz::Order::Fortran && npy.shape().len() > 1 {
        return Err(bad("the array is stored in Fortran order".into()));
    }
    let descr = npy.dtype().descr();
    let letters = descr.trim_matches('\'').trim_start_matches(['<', '>', '=', '|']);
    let found = Type::of_npy(letters).filter(|t| wanted.is_none_or(|w| w == *t));
    let found = found.filter(|t| *t != Type::BF16 || wanted.is_some());
    let found = found.ok_or_else(|| bad(format!("it has dtype {descr}")))?;
    let bytes = found.of_file(npy).map_err(|e| bad(e.to_string()))?;
    Ok((found, bytes))
}
