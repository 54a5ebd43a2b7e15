/*!
A device that times launches: engines run on it as on the device itself, so that what is timed is what they launch, with
their geometry, arguments and memory.

Each launch is made once, as asked for; then it is made again, between marks. A launch reads and writes the same memory
every time, so that what its output holds afterwards, and what is judged, is the work of the last timed one.
*/

use crate::device::{Buffer, Device, Error, Launch, Limits, Mark, Module, Pattern};
use crate::nvrtc::{Compiled, Target};
use std::collections::HashMap;

/// Fewest repetitions, however long a launch takes.
const LEAST: usize = 3;
/// Milliseconds that all repetitions of one launch may take, about.
const MOST_MS: f64 = 4000.0;

/// Calls of [`Device`] that go on to another device as they are.
macro_rules! passed_on {
    ($to:ident) => {
        fn describe(&self) -> String {
            self.$to.describe()
        }
        fn target(&self) -> Target {
            self.$to.target()
        }
        fn limits(&self) -> Limits {
            self.$to.limits()
        }
        fn write(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<(), Error> {
            self.$to.write(buffer, at, bytes)
        }
        fn read(&mut self, buffer: Buffer, at: u64, into: &mut [u8]) -> Result<(), Error> {
            self.$to.read(buffer, at, into)
        }
        fn fill(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(), Error> {
            self.$to.fill(buffer, pattern)
        }
        fn poison(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(), Error> {
            self.$to.poison(buffer, pattern)
        }
        fn copy(&mut self, from: Buffer, to: Buffer, bytes: u64) -> Result<(), Error> {
            self.$to.copy(from, to, bytes)
        }
        fn load(&mut self, code: &Compiled) -> Result<Module, Error> {
            self.$to.load(code)
        }
        fn synchronise(&mut self) -> Result<(), Error> {
            self.$to.synchronise()
        }
        fn tracks(&self) -> bool {
            self.$to.tracks()
        }
        fn poisons(&self) -> bool {
            self.$to.poisons()
        }
        fn unwritten(&mut self, buffer: Buffer) -> Result<Option<u64>, Error> {
            self.$to.unwritten(buffer)
        }
        fn take_findings(&mut self) -> Vec<String> {
            Device::take_findings(&mut self.$to)
        }
        fn check_guards(&mut self) -> Result<(), Error> {
            self.$to.check_guards()
        }
    };
}
#[cfg(test)]
pub(super) use passed_on;

/// How launches are timed.
#[derive(Clone, Copy, Debug)]
pub struct Protocol {
    /// Repetitions of each launch, cold and warm.
    pub repeats: usize,
    /// Bytes that are overwritten before each: more than twice what any cache holds, and time enough for the host to queue
    /// what is timed behind it.
    pub flush: u64,
}

impl Default for Protocol {
    fn default() -> Protocol {
        // The largest L2 of the targets known here is 126 MB.
        Protocol { repeats: 20, flush: 512 << 20 }
    }
}

/// Milliseconds of one launch, repeated.
#[derive(Clone, Debug, PartialEq)]
pub struct Launched {
    /// Entry point.
    pub entry: String,
    /// Name of the first memory that it writes: a stage's or a weight's.
    pub output: String,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Caches overwritten before each.
    pub cold: Vec<f64>,
    /// The same launch right before each.
    pub warm: Vec<f64>,
}

/// A device whose launches are timed.
pub struct Timed<D: Device> {
    inner: D,
    protocol: Protocol,
    /// Which outputs; None: all.
    wanted: Option<Vec<String>>,
    names: HashMap<Buffer, String>,
    flush: Option<Buffer>,
    launched: Vec<Launched>,
}

impl<D: Device> Timed<D> {
    /// Launches whose output has one of these names are timed; None: all.
    pub fn new(inner: D, protocol: Protocol, wanted: Option<Vec<String>>) -> Timed<D> {
        Timed { inner, protocol, wanted, names: HashMap::new(), flush: None, launched: Vec::new() }
    }

    /// The device.
    pub fn inner(&mut self) -> &mut D {
        &mut self.inner
    }

    /// What was timed so far, in the order of launches, each once: passes over other poison repeat them.
    pub fn take(&mut self) -> Vec<Launched> {
        std::mem::take(&mut self.launched)
    }

    fn output(&self, launch: &Launch<'_>) -> Option<&str> {
        let written = launch.arguments.iter().filter_map(|a| a.buffer()).find(|b| b.1)?;
        self.names.get(&written.0).map(String::as_str)
    }

    /// What of a launch is to be timed: its output's name.
    fn asked(&self, launch: &Launch<'_>) -> Option<String> {
        let output = self.output(launch)?;
        let wanted = self.wanted.as_ref().is_none_or(|w| w.iter().any(|n| n == output));
        let same = |l: &&Launched| l.entry == launch.kernel && l.output == output && l.grid == launch.grid;
        (wanted && !self.launched.iter().any(|l| same(&l))).then(|| output.to_string())
    }

    fn measure(&mut self, launch: &Launch<'_>, output: String) -> Result<Launched, Error> {
        let flush = match self.flush {
            Some(flush) => flush,
            None => {
                let made = self.inner.allocate(self.protocol.flush, "memory that caches are flushed with")?;
                *self.flush.insert(made)
            }
        };
        let once = |device: &mut D, before: bool| -> Result<f64, Error> {
            device.synchronise()?;
            // The host queues the rest while this runs, so that none of its time lies between the marks.
            device.fill(flush, Pattern::Bits8(0))?;
            if before {
                device.launch(launch)?;
            }
            let from = device.mark()?;
            device.launch(launch)?;
            let to = device.mark()?;
            device.elapsed(from, to)
        };
        let first = once(&mut self.inner, false)?;
        let fits = (MOST_MS / first.max(1e-3)) as usize;
        let repeats = self.protocol.repeats.min(fits.max(LEAST)).max(1);
        let (mut cold, mut warm) = (vec![first], Vec::new());
        while warm.len() < repeats {
            if cold.len() < repeats {
                cold.push(once(&mut self.inner, false)?);
            }
            warm.push(once(&mut self.inner, true)?);
        }
        Ok(Launched {
            entry: launch.kernel.into(),
            output,
            grid: launch.grid,
            threads: launch.threads(),
            shared: launch.dynamic_shared,
            cold,
            warm,
        })
    }
}

impl<D: Device> Device for Timed<D> {
    passed_on!(inner);

    fn allocate(&mut self, bytes: u64, what: &str) -> Result<Buffer, Error> {
        let buffer = self.inner.allocate(bytes, what)?;
        self.names.insert(buffer, what.into());
        Ok(buffer)
    }

    fn free(&mut self, buffer: Buffer) -> Result<(), Error> {
        self.names.remove(&buffer);
        self.inner.free(buffer)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), Error> {
        self.inner.launch(launch)?;
        if let Some(output) = self.asked(launch) {
            let timed = self.measure(launch, output)?;
            self.launched.push(timed);
        }
        Ok(())
    }

    fn mark(&mut self) -> Result<Mark, Error> {
        self.inner.mark()
    }

    fn elapsed(&mut self, from: Mark, to: Mark) -> Result<f64, Error> {
        self.inner.elapsed(from, to)
    }
}
