/*! Why a device did not do what it was asked: what, where, what to do. */

use std::borrow::Cow;
use std::fmt;

/// A device refused or broke, at a kernel, an argument or a buffer.
pub type Error = crate::problem::Error<Problem>;

impl Error {
    /// Whether it is the device that is missing, rather than a launch or a kernel that is wrong.
    pub fn is_unavailable(&self) -> bool {
        use Problem::*;
        matches!(self.problem(), NoDriver | Stub | OldDriver { .. } | NoDevice { .. } | Ordinal { .. })
    }
}

/// Which end of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Before its first byte.
    Before,
    /// Behind its last byte.
    Behind,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Before => "before its first",
            Side::Behind => "behind its last",
        })
    }
}

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the messages say they are
pub enum Problem {
    #[error("there are not {bytes} bytes of memory left{why}")]
    Memory { bytes: u64, why: String },
    #[error("the buffer is not one of this device, or was freed")]
    Buffer,
    #[error("bytes {from} to {to} lie outside of the buffer's {bytes}")]
    Range { from: u64, to: u64, bytes: u64 },
    #[error("the buffer's {bytes} bytes are no multiple of the pattern's {pattern}")]
    Pattern { bytes: u64, pattern: usize },
    #[error("the code was not loaded into this device, or can't be: {why}")]
    Module { why: String },
    #[error("the limits of this target are not known; there are: {known}")]
    Target { known: String },
    #[error("there is no kernel of this name; there are: {known}")]
    Kernel { known: String },
    #[error("the launch has {axis} of {value}, expected 1 to {most}")]
    Shape { axis: &'static str, value: u32, most: u32 },
    #[error("{0}")]
    Exceeded(String),
    #[error("{found} arguments were given, but the kernel takes {expected}")]
    Count { found: usize, expected: usize },
    #[error(
        "it lies at byte {found} with {bytes} bytes, but the kernel reads {expected_bytes} bytes at {expected}"
    )]
    Layout { found: u32, bytes: u32, expected: u32, expected_bytes: u32 },
    #[error("the arguments take {found} bytes, but the kernel's parameters {expected}")]
    Bytes { found: usize, expected: u32 },
    #[error("a buffer that is written is passed a second time, as argument {other}")]
    Alias { other: usize },
    #[error("the kernel broke: {why}")]
    Fault { why: String },
    #[error("the kernel did not end within {seconds} s")]
    Hung { seconds: u64 },
    #[error("a kernel wrote {bytes} bytes outside of the buffer, the nearest of them {at} {side} byte")]
    Guard { side: Side, at: u64, bytes: u64 },
    #[error("this device has no clock")]
    NoClock,
    #[error("the mark is not one of this device, or so many were set since that it is forgotten")]
    Mark,
    #[error("libcuda, the library of NVIDIA's driver, was not found")]
    NoDriver,
    #[error("the libcuda that was found is a stub for linking, and no driver")]
    Stub,
    #[error("the driver has no function {missing}")]
    OldDriver { missing: &'static str },
    #[error("NVIDIA's driver is there, but offers no GPU: {why}")]
    NoDevice { why: String },
    #[error("there is no GPU {ordinal}; the driver has {count}, counted from 0")]
    Ordinal { ordinal: u32, count: u32 },
    #[error("{call} failed: {why}")]
    Call { call: &'static str, why: String },
}

impl crate::problem::Problem for Problem {
    fn advice(&self) -> Cow<'static, str> {
        use Problem::*;
        Cow::Borrowed(match self {
            Memory { .. } => {
                "take a smaller batch or fewer layers, or free the device's memory of other programs"
            }
            Exceeded(_) => "give the kernel smaller tiles or fewer threads for this target",
            Module { .. } => "compile for this device's target",
            Target { .. } => "name one of these, or add a row to the table of limits",
            Kernel { .. } => {
                "declare it extern \"C\" __global__, and name it in the kernel's header as in the code"
            }
            Count { .. } | Layout { .. } | Bytes { .. } => {
                "make the kernel's parameters and the host's arguments the same, in order and type"
            }
            Alias { .. } => "pass it once, as InOut, or give the kernel another buffer",
            Shape { .. } => "correct the launch's grid and block",
            Fault { .. } | Hung { .. } => {
                "run it on engine ptx, which names the instruction; this process can't use the device any more: start a new one"
            }
            Buffer | Range { .. } | Pattern { .. } => {
                "this is a mistake in the program that launches, not in the model"
            }
            Guard { .. } => {
                "correct the kernel's addresses; engine ptx names the instruction and the thread that writes there"
            }
            NoClock => "measure on a GPU: an emulated device's time says nothing about a kernel",
            Mark => "take the time between marks soon after they were set",
            NoDriver => {
                "install NVIDIA's driver (it brings libcuda.so.1); in a container, give it the GPU: docker run --gpus all"
            }
            Stub => {
                "take the toolkit's folder `stubs` out of LD_LIBRARY_PATH; with no driver there, install NVIDIA's"
            }
            OldDriver { .. } => "install a newer driver of NVIDIA's",
            NoDevice { .. } => {
                "see whether `nvidia-smi` lists one, and what CUDA_VISIBLE_DEVICES is set to; in a container, give it the GPU: docker run --gpus all"
            }
            Ordinal { .. } => "name one that `mla-check devices` lists",
            Call { .. } => "see the driver's message; `mla-check devices` shows what is there",
        })
    }
}
