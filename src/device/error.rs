/*! Why a device did not do what it was asked: what, where, what to do. */

use std::borrow::Cow;

/// A device refused or broke, at a kernel, an argument or a buffer.
pub type Error = crate::problem::Error<Problem>;

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
                "run it on engine ptx, which names the instruction; this process can't use the device any more"
            }
            Buffer | Range { .. } | Pattern { .. } => {
                "this is a mistake in the program that launches, not in the model"
            }
            Call { .. } => "see the driver's message; `mla-check devices` shows what is there",
        })
    }
}
