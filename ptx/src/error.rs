/*! What can be wrong with PTX text or with a launch, and how it is told. */

use std::fmt;

/// One thing in a PTX file that the machine can't take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issue {
    /// Line of the PTX text, from 1; 0 where it is the file as a whole.
    pub line: u32,
    /// Kernel or function; empty at module scope.
    pub function: String,
    /// The instruction's opcode or the declaration, as written.
    pub what: String,
    /// What is wrong with it.
    pub why: String,
}

impl fmt::Display for Issue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}", self.line)?;
        if !self.function.is_empty() {
            write!(f, " ({})", self.function)?;
        }
        write!(f, ": `{}`: {}", self.what, self.why)
    }
}

/// PTX text that the machine can't take: everything that is wrong with it, in order of lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// Never empty.
    pub issues: Vec<Issue>,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the PTX has {} thing(s) that this machine does not run", self.issues.len())?;
        self.issues.iter().try_for_each(|i| write!(f, "\n  {i}"))
    }
}

impl std::error::Error for LoadError {}

/// A launch that can't be made, or that the machine had to end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// No kernel of that name.
    #[error("the module has no kernel {name:?}; it has {known:?}")]
    NoKernel {
        /// The name asked for.
        name: String,
        /// The kernels there are.
        known: Vec<String>,
    },
    /// The kernel holds instructions outside of the table.
    #[error("kernel {name:?} can't run: {issue}")]
    Unsupported {
        /// The kernel.
        name: String,
        /// The first of its issues.
        issue: Issue,
    },
    /// Arguments don't match the kernel's parameters.
    #[error("kernel {kernel:?}: {what}")]
    Arguments {
        /// The kernel.
        kernel: String,
        /// Which argument, what is there, what is wanted.
        what: String,
    },
    /// Grid, block or shared memory beyond what a GPU takes, or beyond what this machine holds.
    #[error("kernel {kernel:?}: {what}")]
    Limits {
        /// The kernel.
        kernel: String,
        /// Which limit.
        what: String,
    },
}

/// An access to [`Memory`](crate::Memory) by the host that can't be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// Not an allocation of this memory.
    #[error("address {address:#x} is in no allocation")]
    NoAllocation {
        /// The address.
        address: u64,
    },
    /// Beyond the allocation's end.
    #[error("{bytes} bytes at offset {offset} don't fit an allocation of {size}")]
    Bounds {
        /// From the start of the allocation.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes it has.
        size: u64,
    },
    /// More than one allocation can hold.
    #[error("an allocation of {bytes} bytes is more than the {most} that this machine holds")]
    Size {
        /// Bytes asked for.
        bytes: u64,
        /// The limit.
        most: u64,
    },
}
