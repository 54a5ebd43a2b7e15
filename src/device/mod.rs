/*!
What runs kernels: memory of its own, code, launches. Host code is written once against [`Device`]; a GPU's driver and a
PTX machine implement it.

Nothing is trusted on a device. Buffers are handles, so that no address can be mixed up. What a kernel must write is
poisoned before: a pattern is set, and a device that keeps track of initialised bytes forgets them. Arguments say whether
they are read or written. [`Launch::check`] refuses what a driver would run with garbage.
*/

pub mod case;
pub mod cuda;
mod error;
mod launch;
mod limits;
pub mod ptx;

pub use error::{Error, Problem, Side};
pub use launch::{Arg, Launch, Packed, Scalar};
pub use limits::{Excess, Limits};

use crate::nvrtc::{Compiled, Target};
use std::sync::atomic::{AtomicU64, Ordering};

/// A device with memory and code of its own. Calls happen in order; [`Device::launch`] may return before the kernel ends.
pub trait Device {
    /// One line for reports: name, driver, whether it is emulated.
    fn describe(&self) -> String;

    /// What code is compiled for.
    fn target(&self) -> Target;

    /// What a kernel may take.
    fn limits(&self) -> Limits;

    /// Memory, poisoned with 0xff. `what` names it in errors and findings: `cache`, `guard behind out`.
    ///
    /// # Errors
    /// [`Problem::Memory`].
    fn allocate(&mut self, bytes: u64, what: &str) -> Result<Buffer, Error>;

    /// Gives memory back.
    ///
    /// # Errors
    /// [`Problem::Buffer`].
    fn free(&mut self, buffer: Buffer) -> Result<(), Error>;

    /// Copies host bytes into a buffer, from byte `at` on.
    ///
    /// # Errors
    /// [`Problem::Buffer`], [`Problem::Range`].
    fn write(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Copies bytes of a buffer to the host, from byte `at` on, after all launches so far. What was never written reads
    /// as its poison.
    ///
    /// # Errors
    /// [`Problem::Buffer`], [`Problem::Range`]; and what broke in launches before.
    fn read(&mut self, buffer: Buffer, at: u64, into: &mut [u8]) -> Result<(), Error>;

    /// Sets all of a buffer to a repeated pattern. The bytes count as written.
    ///
    /// # Errors
    /// [`Problem::Buffer`], [`Problem::Pattern`].
    fn fill(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(), Error>;

    /// Sets all of a buffer to a repeated pattern, unless the device [does not](Device::poisons). The bytes count as never
    /// written: a device that keeps track reports a kernel that reads them.
    ///
    /// # Errors
    /// [`Problem::Buffer`], [`Problem::Pattern`].
    fn poison(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(), Error>;

    /// Copies the first bytes of a buffer to another one, in order with launches.
    ///
    /// # Errors
    /// [`Problem::Buffer`], [`Problem::Range`].
    fn copy(&mut self, from: Buffer, to: Buffer, bytes: u64) -> Result<(), Error> {
        const CHUNK: u64 = 1 << 16;
        let mut at = 0;
        while at < bytes {
            let mut host = vec![0; (bytes - at).min(CHUNK) as usize];
            self.read(from, at, &mut host)?;
            self.write(to, at, &host)?;
            at += host.len() as u64;
        }
        Ok(())
    }

    /// Takes code. A GPU uses the CUBIN, a PTX machine the PTX.
    ///
    /// # Errors
    /// [`Problem::Module`].
    fn load(&mut self, code: &Compiled) -> Result<Module, Error>;

    /// Starts a kernel. Implementations call [`Launch::check`] first.
    ///
    /// # Errors
    /// [`Problem::Module`], [`Problem::Kernel`], those of [`Launch::check`], [`Problem::Buffer`]; what breaks while the
    /// kernel runs may come here, or from [`Device::synchronise`] and [`Device::read`].
    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), Error>;

    /// Waits for all launches so far.
    ///
    /// # Errors
    /// [`Problem::Fault`], [`Problem::Hung`]: the device answers nothing else from then on.
    fn synchronise(&mut self) -> Result<(), Error>;

    /// Whether it keeps track of the bytes that were written. One that does not must be asked twice, over different
    /// poison.
    fn tracks(&self) -> bool {
        false
    }

    /// Whether [`Device::poison`] does anything. Where it does not, memory holds whatever it held.
    fn poisons(&self) -> bool {
        true
    }

    /// Bytes of a buffer that nobody wrote since it was poisoned; none where the device does not keep track.
    ///
    /// # Errors
    /// [`Problem::Buffer`].
    fn unwritten(&mut self, buffer: Buffer) -> Result<Option<u64>, Error> {
        let _ = buffer;
        Ok(None)
    }

    /// What the device saw kernels do wrong since this was last asked, in words.
    fn take_findings(&mut self) -> Vec<String> {
        Vec::new()
    }

    /// Waits, and looks whether anything was written outside of buffers. A device that sees every store says so in its
    /// findings, and has nothing to look for here. A broken guard is told once, then mended.
    ///
    /// # Errors
    /// [`Problem::Guard`], of the first buffer that has one; those of [`Device::synchronise`].
    fn check_guards(&mut self) -> Result<(), Error> {
        self.synchronise()
    }

    /// A point in the order of launches, for [`Device::elapsed`]. The last 4,096 are kept.
    ///
    /// # Errors
    /// [`Problem::NoClock`].
    fn mark(&mut self) -> Result<Mark, Error> {
        Err(Error::new(Problem::NoClock, self.describe()))
    }

    /// Milliseconds by the device's clock from one mark to a later one, once both are reached. Time that the device waits
    /// for the host between launches counts too: queue work before the first mark so that it does not.
    ///
    /// # Errors
    /// [`Problem::Mark`], [`Problem::NoClock`]; those of [`Device::synchronise`].
    fn elapsed(&mut self, from: Mark, to: Mark) -> Result<f64, Error> {
        let _ = (from, to);
        Err(Error::new(Problem::NoClock, self.describe()))
    }
}

/// Which device made a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner(u64);

impl Owner {
    /// One that no other device of this process has.
    pub fn unique() -> Owner {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Owner(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name {
            owner: Owner,
            id: u32,
        }

        impl $name {
            /// For devices: a handle of theirs. A number is never used twice, so that a handle that was freed stays so.
            pub fn new(owner: Owner, id: u32) -> $name {
                $name { owner, id }
            }
            /// For devices: the number, if the handle is theirs.
            pub fn id(self, owner: Owner) -> Option<u32> {
                (self.owner == owner).then_some(self.id)
            }
        }
    };
}
handle! {
    /// Memory of one device.
    Buffer
}
handle! {
    /// Code loaded into one device.
    Module
}
handle! {
    /// A point in the order of one device's launches.
    Mark
}

/// A pattern that fills memory, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Pattern {
    Bits8(u8),
    Bits16(u16),
    Bits32(u32),
}

impl Pattern {
    /// A NaN in bf16, f16 and f32.
    pub const NAN: Pattern = Pattern::Bits8(0xff);

    /// The bytes that are repeated.
    pub fn bytes(self) -> Vec<u8> {
        match self {
            Pattern::Bits8(v) => vec![v],
            Pattern::Bits16(v) => v.to_le_bytes().into(),
            Pattern::Bits32(v) => v.to_le_bytes().into(),
        }
    }

    /// Whether it fills so many bytes exactly.
    ///
    /// # Errors
    /// [`Problem::Pattern`].
    pub fn check(self, bytes: u64) -> Result<(), Problem> {
        let pattern = self.bytes().len();
        if bytes.is_multiple_of(pattern as u64) { Ok(()) } else { Err(Problem::Pattern { bytes, pattern }) }
    }
}

/// Bytes `at` to `at + count` of a buffer of `bytes`, for devices to check copies by.
///
/// # Errors
/// [`Problem::Range`].
pub fn range(at: u64, count: usize, bytes: u64) -> Result<std::ops::Range<u64>, Problem> {
    let to = at.saturating_add(count as u64);
    if to <= bytes { Ok(at..to) } else { Err(Problem::Range { from: at, to, bytes }) }
}
