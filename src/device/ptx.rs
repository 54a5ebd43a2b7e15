/*!
The PTX machine as a device: kernels compiled to PTX run on the CPU, and what they do wrong is kept.

What a kernel does wrong is no error of a launch: the machine goes on where a GPU would, and the caller takes the
findings when it wants them. Errors are what a driver would refuse, and what this machine does not run. It is an
emulation: results should say so.
*/

use super::{Arg, Buffer, Device, Error, Launch, Limits, Module, Owner, Packed, Pattern, Problem, range};
use crate::nvrtc::{Compiled, Parameter, Resources, Target};
use mla_ptx::{Address, Counts, Finding, KernelInfo, LaunchError, Memory, Options, launch};
use std::collections::BTreeMap;
use std::fmt;

/// Bytes that all buffers may have together: with what is kept about them, half as much again of the host's memory.
const MOST: u64 = 16 << 30;
/// Bytes that a fill writes at a time; a multiple of every pattern.
const CHUNK: usize = 1 << 16;

/// A finding with the code it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Name of the source, as [`Compiled::name`]. Source lines are this file's where the PTX has lines.
    pub code: String,
    /// What was found. Addresses in its text have the buffer's name and the offset behind them.
    pub finding: Finding,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.finding)
    }
}

struct Held {
    address: Address,
    bytes: u64,
    what: String,
    freed: bool,
}

struct Loaded {
    name: String,
    module: mla_ptx::Module,
    kernels: Vec<Resources>,
}

/// A PTX machine with the limits of a named target.
pub struct PtxMachine {
    owner: Owner,
    target: Target,
    limits: Limits,
    memory: Memory,
    /// Freed ones too: a finding may name them. Ordered by address, as addresses are never used twice.
    buffers: Vec<Held>,
    modules: Vec<Loaded>,
    found: Vec<Found>,
    counts: Counts,
    options: Options,
}

impl PtxMachine {
    /// A machine without memory or code.
    ///
    /// # Errors
    /// [`Problem::Target`] where the target's limits are not known.
    pub fn new(target: Target) -> Result<PtxMachine, Error> {
        let Some(limits) = Limits::of(target) else {
            let known = Limits::known().map(|n| format!("sm_{n}")).collect::<Vec<_>>().join(", ");
            return Err(Error::new(Problem::Target { known }, target.to_string()));
        };
        Ok(PtxMachine {
            owner: Owner::unique(),
            target,
            limits,
            memory: Memory::new(),
            buffers: Vec::new(),
            modules: Vec::new(),
            found: Vec::new(),
            counts: Counts::default(),
            options: Options::default(),
        })
    }

    /// How launches from here on are run: which checks are on, how long a warp may take.
    pub fn options(&mut self) -> &mut Options {
        &mut self.options
    }

    /// What was found in all launches since this was last asked.
    pub fn take_findings(&mut self) -> Vec<Found> {
        std::mem::take(&mut self.found)
    }

    /// How much the last launch ran.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether every byte of a buffer was written, by the host or by a kernel.
    ///
    /// # Errors
    /// [`Problem::Buffer`].
    pub fn is_written(&self, buffer: Buffer) -> Result<bool, Error> {
        let held = self.held(buffer)?;
        let left = self.memory.uninitialised(held.address).map_err(|e| broken(e, &held.what))?;
        Ok(left == 0)
    }

    fn held(&self, buffer: Buffer) -> Result<&Held, Error> {
        let found = buffer.id(self.owner).and_then(|id| self.buffers.get(id as usize)).filter(|b| !b.freed);
        found.ok_or_else(|| Error::new(Problem::Buffer, format!("{buffer:?}")))
    }

    /// Sets a buffer's bytes, which count as written from here on.
    fn set(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(Address, u64), Error> {
        let held = self.held(buffer)?;
        let (address, bytes) = (held.address, held.bytes);
        pattern.check(bytes).map_err(|p| Error::new(p, &*held.what))?;
        let pattern = pattern.bytes();
        let chunk = pattern.repeat(CHUNK / pattern.len());
        let mut at = 0;
        while at < bytes {
            let n = (bytes - at).min(CHUNK as u64);
            self.memory.write(address + at, &chunk[..n as usize]).map_err(|e| broken(e, "a fill"))?;
            at += n;
        }
        Ok((address, bytes))
    }

    /// A finding's text with a name behind each address that lies in a buffer.
    fn named(&self, text: &str) -> String {
        let mut out = String::new();
        let mut parts = text.split("0x");
        out.push_str(parts.next().unwrap_or_default());
        for part in parts {
            let end = part.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(part.len());
            let (digits, rest) = part.split_at(end);
            out.push_str("0x");
            out.push_str(digits);
            let address = u64::from_str_radix(digits, 16).ok();
            if let Some((held, offset)) = address.and_then(|a| self.of_address(a)) {
                let freed = if held.freed { ", freed" } else { "" };
                out.push_str(&format!(" ({} + {offset}{freed})", held.what));
            }
            out.push_str(rest);
        }
        out
    }

    fn of_address(&self, address: Address) -> Option<(&Held, u64)> {
        let start = self.memory.start(address)?;
        let i = self.buffers.binary_search_by_key(&start, |b| b.address).ok()?;
        Some((&self.buffers[i], address - start))
    }
}

/// What can't happen unless this file is wrong, told all the same.
fn broken(e: mla_ptx::MemoryError, place: &str) -> Error {
    Error::new(Problem::Call { call: "the PTX machine's memory", why: e.to_string() }, place)
}

/// A kernel's figures: what the PTX says, and of the machine code, if there is any, what PTX does not have.
fn resources(k: &KernelInfo<'_>, code: &Compiled) -> Resources {
    let machine_code = code.kernel(k.name);
    let parameters: Vec<_> =
        k.parameters.iter().map(|p| Parameter { offset: p.offset, bytes: p.bytes }).collect();
    let bound = k.max_threads.map(|[x, y, z]| x.saturating_mul(y).saturating_mul(z));
    Resources {
        kernel: k.name.into(),
        registers: machine_code.map_or(0, |r| r.registers),
        frame_bytes: k.local_bytes,
        spill_store_bytes: machine_code.and_then(|r| r.spill_store_bytes),
        spill_load_bytes: machine_code.and_then(|r| r.spill_load_bytes),
        static_shared_bytes: machine_code.map_or(k.shared_bytes, |r| r.static_shared_bytes),
        threads_bound: bound,
        parameter_bytes: parameters.last().map_or(0, |p| p.offset + p.bytes),
        parameters,
        code_bytes: machine_code.map_or(0, |r| r.code_bytes),
    }
}

impl Device for PtxMachine {
    fn describe(&self) -> String {
        format!("PTX machine, {} (emulated)", self.target)
    }

    fn target(&self) -> Target {
        self.target
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn allocate(&mut self, bytes: u64, what: &str) -> Result<Buffer, Error> {
        let used: u64 = self.buffers.iter().filter(|b| !b.freed).map(|b| b.bytes).sum();
        if used.saturating_add(bytes) > MOST {
            let why = format!(": this machine holds {MOST} bytes, {used} of them are in use");
            return Err(Error::new(Problem::Memory { bytes, why }, what));
        }
        let refused = |why: String| Error::new(Problem::Memory { bytes, why }, what);
        let id = u32::try_from(self.buffers.len()).map_err(|e| refused(format!(": {e}")))?;
        let address = self.memory.alloc(bytes).map_err(|e| refused(format!(": {e}")))?;
        self.buffers.push(Held { address, bytes, what: what.into(), freed: false });
        let buffer = Buffer::new(self.owner, id);
        self.poison(buffer, Pattern::NAN)?;
        Ok(buffer)
    }

    fn free(&mut self, buffer: Buffer) -> Result<(), Error> {
        let held = self.held(buffer)?;
        self.memory.free(held.address).map_err(|e| broken(e, "a free"))?;
        if let Some(held) = buffer.id(self.owner).and_then(|id| self.buffers.get_mut(id as usize)) {
            held.freed = true;
        }
        Ok(())
    }

    fn write(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<(), Error> {
        let held = self.held(buffer)?;
        let r = range(at, bytes.len(), held.bytes).map_err(|p| Error::new(p, &*held.what))?;
        let address = held.address;
        self.memory.write(address + r.start, bytes).map_err(|e| broken(e, "a copy"))
    }

    fn read(&mut self, buffer: Buffer, at: u64, into: &mut [u8]) -> Result<(), Error> {
        let held = self.held(buffer)?;
        let r = range(at, into.len(), held.bytes).map_err(|p| Error::new(p, &*held.what))?;
        self.memory.read(held.address + r.start, into).map_err(|e| broken(e, &held.what))
    }

    fn fill(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(), Error> {
        self.set(buffer, pattern).map(drop)
    }

    fn poison(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(), Error> {
        let (address, bytes) = self.set(buffer, pattern)?;
        self.memory.mark_uninitialised(address, bytes).map_err(|e| broken(e, "a poison"))
    }

    /// Kernels with forms that the machine does not run are taken, and refused at launch.
    fn load(&mut self, code: &Compiled) -> Result<Module, Error> {
        let fail = |why: String| Error::new(Problem::Module { why }, &*code.name);
        if code.target.number != self.target.number {
            return Err(fail(format!("it is for {}, this device for {}", code.target, self.target)));
        }
        let module = mla_ptx::Module::parse_partly(&code.ptx).map_err(|e| fail(e.to_string()))?;
        let id = u32::try_from(self.modules.len()).map_err(|e| fail(e.to_string()))?;
        let kernels = module.kernels().map(|k| resources(&k, code)).collect();
        self.modules.push(Loaded { name: code.name.clone(), module, kernels });
        Ok(Module::new(self.owner, id))
    }

    fn launch(&mut self, l: &Launch<'_>) -> Result<(), Error> {
        let place = || format!("kernel {}", l.kernel);
        let loaded = l.module.id(self.owner).and_then(|id| self.modules.get(id as usize));
        let loaded = loaded
            .ok_or_else(|| Error::new(Problem::Module { why: "it is another device's".into() }, place()))?;
        let Some(kernel) = loaded.kernels.iter().find(|k| k.kernel == l.kernel) else {
            let known = loaded.kernels.iter().map(|k| k.kernel.as_str()).collect::<Vec<_>>().join(", ");
            return Err(Error::new(Problem::Kernel { known }, place()));
        };
        l.check(&self.limits, Some(kernel))?;
        let mut addresses = BTreeMap::new();
        for (buffer, _) in l.arguments.iter().filter_map(Arg::buffer) {
            addresses.insert(buffer.id(self.owner), self.held(buffer)?.address);
        }
        let address = |b: Buffer| addresses.get(&b.id(self.owner)).copied().unwrap_or(0);
        let mut packed = Packed::of(l.arguments, address);
        packed.bytes.resize(packed.padded(), 0);
        let arguments: Vec<_> = if packed.fields.len() == kernel.parameters.len() {
            let fields = packed.fields.iter().map(|&(at, n)| at as usize..(at + n) as usize);
            fields.map(|r| mla_ptx::Arg::Bytes(packed.bytes[r].into())).collect()
        } else {
            vec![mla_ptx::Arg::Bytes(packed.bytes)]
        };
        let outputs = l.arguments.iter().filter_map(|a| match a {
            Arg::Out(b) => Some(address(*b)),
            _ => None,
        });
        let options = Options { outputs: outputs.collect(), ..self.options.clone() };
        let outcome = launch(
            &loaded.module,
            l.kernel,
            l.grid,
            l.block,
            l.dynamic_shared,
            &arguments,
            &mut self.memory,
            &options,
        )
        .map_err(|e| Error::new(problem(e), place()))?;
        let code = loaded.name.clone();
        self.counts = outcome.counts;
        for mut finding in outcome.findings {
            finding.detail = self.named(&finding.detail);
            self.found.push(Found { code: code.clone(), finding });
        }
        Ok(())
    }

    /// Launches have ended when they return.
    fn synchronise(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn tracks(&self) -> bool {
        true
    }

    fn unwritten(&mut self, buffer: Buffer) -> Result<Option<u64>, Error> {
        let held = self.held(buffer)?;
        self.memory.uninitialised(held.address).map(Some).map_err(|e| broken(e, &held.what))
    }

    fn take_findings(&mut self) -> Vec<String> {
        PtxMachine::take_findings(self).iter().map(ToString::to_string).collect()
    }
}

/// What [`Launch::check`] let pass and the machine refuses.
fn problem(e: LaunchError) -> Problem {
    match e {
        LaunchError::NoKernel { known, .. } => Problem::Kernel { known: known.join(", ") },
        LaunchError::Unsupported { issue, .. } => {
            Problem::Module { why: format!("the PTX machine does not run it: {issue}") }
        }
        LaunchError::Arguments { what, .. } => Problem::Module { why: what },
        LaunchError::Limits { what, .. } => Problem::Exceeded(what),
    }
}
