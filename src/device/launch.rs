/*!
A launch: which kernel, how many threads, what it is given; and the checks that drivers do not make.

A driver takes a kernel's arguments as bytes: a wrong number, order or type reads as garbage, and too much shared memory
as an invalid value that says no more. So both are checked here, against the CUBIN's own list of parameters and the
target's limits, once for all devices.
*/

use super::error::{Error, Problem};
use super::limits::Limits;
use super::{Buffer, Module};
use crate::nvrtc::Resources;

/// One argument of a kernel, with what the kernel does to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// Read only.
    In(Buffer),
    /// Read only, from this byte on: a slot of a buffer that holds more.
    InFrom(Buffer, u64),
    /// Written; what it held does not count, so it may be poisoned before.
    Out(Buffer),
    /// Read and written.
    InOut(Buffer),
    /// A number.
    Scalar(Scalar),
}

impl Arg {
    /// The buffer, and whether it is written.
    pub fn buffer(&self) -> Option<(Buffer, bool)> {
        match *self {
            Arg::In(b) | Arg::InFrom(b, _) => Some((b, false)),
            Arg::Out(b) | Arg::InOut(b) => Some((b, true)),
            Arg::Scalar(_) => None,
        }
    }
}

/// A number of the kernel's own type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Scalar {
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
}

impl Scalar {
    /// Its bytes as the device reads them; their number is also the alignment.
    pub fn bytes(self) -> Vec<u8> {
        match self {
            Scalar::U32(v) => v.to_le_bytes().into(),
            Scalar::I32(v) => v.to_le_bytes().into(),
            Scalar::U64(v) => v.to_le_bytes().into(),
            Scalar::I64(v) => v.to_le_bytes().into(),
            Scalar::F32(v) => v.to_le_bytes().into(),
            Scalar::F64(v) => v.to_le_bytes().into(),
        }
    }
}

macro_rules! scalar {
    ($($type:ty => $variant:ident),*) => {$(
        impl From<$type> for Arg {
            fn from(value: $type) -> Arg {
                Arg::Scalar(Scalar::$variant(value))
            }
        }
    )*};
}
scalar!(u32 => U32, i32 => I32, u64 => U64, i64 => I64, f32 => F32, f64 => F64);

/// A kernel to be run.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// The code, as loaded into the device.
    pub module: Module,
    /// Name of the kernel.
    pub kernel: &'a str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub dynamic_shared: u32,
    /// Arguments, in order. A kernel may take them one by one, or as one struct by value with these fields.
    pub arguments: &'a [Arg],
}

/// Most blocks and threads along x, y and z: the same for every target since compute capability 3.0 (CUDA Programming
/// Guide, "Compute Capabilities", table of technical specifications).
const GRID: [(&str, u32); 3] = [("a grid's x", 0x7fff_ffff), ("a grid's y", 65_535), ("a grid's z", 65_535)];
const BLOCK: [(&str, u32); 3] = [("a block's x", 1024), ("a block's y", 1024), ("a block's z", 64)];

impl Launch<'_> {
    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.block.iter().fold(1u32, |n, &axis| n.saturating_mul(axis))
    }

    /// Checks all that can be checked before the device is asked: shape, limits, and arguments against the kernel's
    /// parameters (where its figures are known: PTX alone has none).
    ///
    /// # Errors
    /// The first thing that is wrong; where: the kernel, and which argument.
    pub fn check(&self, limits: &Limits, kernel: Option<&Resources>) -> Result<(), Error> {
        let place = || format!("kernel {}", self.kernel);
        let axes = self.grid.into_iter().zip(GRID).chain(self.block.into_iter().zip(BLOCK));
        for (value, (axis, most)) in axes {
            if value == 0 || value > most {
                return Err(Error::new(Problem::Shape { axis, value, most }, place()));
            }
        }
        if self.threads() > limits.threads_per_block {
            let (value, most) = (self.threads(), limits.threads_per_block);
            return Err(Error::new(Problem::Shape { axis: "a block's threads", value, most }, place()));
        }
        self.check_aliases()?;
        let Some(kernel) = kernel else { return Ok(()) };
        let exceeded = limits.exceeded(kernel, self.threads(), self.dynamic_shared);
        if !exceeded.is_empty() {
            let text = exceeded.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
            return Err(Error::new(Problem::Exceeded(text), format!("{}, sm_{}", place(), limits.number)));
        }
        self.check_parameters(kernel)
    }

    /// A buffer that is written may not be passed twice: what is read through the other argument is not defined.
    fn check_aliases(&self) -> Result<(), Error> {
        for (i, a) in self.arguments.iter().enumerate() {
            let Some((buffer, true)) = a.buffer() else { continue };
            let others = self.arguments.iter().enumerate().filter(|(j, _)| *j != i);
            for (other, b) in others {
                if b.buffer().is_some_and(|(b, _)| b == buffer) {
                    return Err(Error::new(Problem::Alias { other }, self.at(i)));
                }
            }
        }
        Ok(())
    }

    fn check_parameters(&self, kernel: &Resources) -> Result<(), Error> {
        let packed = Packed::of(self.arguments, |_| 0);
        let one_struct = kernel.parameters.len() == 1 && self.arguments.len() != 1;
        if one_struct {
            // A struct's size is a multiple of its alignment.
            let expected = kernel.parameters[0].bytes;
            return if packed.padded() == expected as usize {
                Ok(())
            } else {
                Err(Error::new(Problem::Bytes { found: packed.padded(), expected }, self.all()))
            };
        }
        if kernel.parameters.is_empty() && kernel.parameter_bytes > 0 {
            // A layout of CUBIN that lists no parameters: their size is all there is.
            let (found, expected) = (packed.bytes.len(), kernel.parameter_bytes);
            let same = found == expected as usize;
            return if same {
                Ok(())
            } else {
                Err(Error::new(Problem::Bytes { found, expected }, self.all()))
            };
        }
        if kernel.parameters.len() != self.arguments.len() {
            let (found, expected) = (self.arguments.len(), kernel.parameters.len());
            return Err(Error::new(Problem::Count { found, expected }, self.all()));
        }
        for (i, (&(found, bytes), p)) in packed.fields.iter().zip(&kernel.parameters).enumerate() {
            if (found, bytes) != (p.offset, p.bytes) {
                let (expected, expected_bytes) = (p.offset, p.bytes);
                return Err(Error::new(
                    Problem::Layout { found, bytes, expected, expected_bytes },
                    self.at(i),
                ));
            }
        }
        Ok(())
    }

    fn at(&self, argument: usize) -> String {
        format!("kernel {}, argument {argument} (from 0)", self.kernel)
    }

    fn all(&self) -> String {
        format!("kernel {}, arguments", self.kernel)
    }
}

/// Arguments as a kernel reads them, each at a multiple of its size: the layout of separate parameters and of a C struct
/// alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// The bytes, up to the end of the last field.
    pub bytes: Vec<u8>,
    /// Offset and size of each argument.
    pub fields: Vec<(u32, u32)>,
}

impl Packed {
    /// With the device's address of each buffer.
    pub fn of(arguments: &[Arg], mut address: impl FnMut(Buffer) -> u64) -> Packed {
        let mut packed = Packed { bytes: Vec::new(), fields: Vec::new() };
        for argument in arguments {
            let field = match *argument {
                Arg::In(b) | Arg::Out(b) | Arg::InOut(b) => address(b).to_le_bytes().into(),
                Arg::InFrom(b, at) => address(b).wrapping_add(at).to_le_bytes().into(),
                Arg::Scalar(s) => s.bytes(),
            };
            let offset = packed.bytes.len().next_multiple_of(field.len());
            packed.bytes.resize(offset, 0);
            packed.fields.push((offset as u32, field.len() as u32));
            packed.bytes.extend(field);
        }
        packed
    }

    /// Bytes of a struct with these fields.
    pub fn padded(&self) -> usize {
        let alignment = self.fields.iter().map(|f| f.1 as usize).max().unwrap_or(1);
        self.bytes.len().next_multiple_of(alignment)
    }
}

#[cfg(test)]
mod tests;
