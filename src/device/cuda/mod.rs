/*!
A GPU through NVIDIA's driver. The library is opened at run time; where it, or a GPU, is missing, that is an error.

The driver is not trusted to notice mistakes. Memory is the driver's own, never a pool's, poisoned, and between guards
that are looked at after launches. Everything that could wait for a kernel waits by asking, with a deadline: a kernel that
hangs can't be ended, so the error is told and nothing is called any more, not even in `Drop`; the process can exit. The
same holds for a kernel that breaks: from then on the driver answers every call of the process with that error ([`lost`]).

Everything goes to the null stream of the device's primary context, so that calls happen in order. With
`CUDA_LAUNCH_BLOCKING=1` a launch itself waits, and no deadline holds.
*/

mod blas;
mod driver;
mod guard;
mod probe;

pub use blas::Blas;
pub use probe::{Gpu, Installed};

use super::{
    Arg, Buffer, Device, Error, Launch, Limits, Mark, Module, Owner, Packed, Pattern, Problem, Side, range,
};
use crate::nvrtc::{Compiled, Resources, Target};
use driver::{Code, Context, Driver, Event, Failed, Function, Memory, Value};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What took the GPU away from this process, and where.
static LOST: OnceLock<(Problem, String)> = OnceLock::new();

/// What took the GPU away from this process, if something did: a kernel that broke, or one that hangs. Whatever is to run
/// on a GPU afterwards needs another process.
pub fn lost() -> Option<Error> {
    LOST.get().map(|(problem, place)| Error::new(problem.clone(), place.clone()))
}

/// How long a wait lasts before the kernel counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Launches that may be under way: a driver takes about 1,000 and then waits in the launch, with no deadline.
const IN_FLIGHT: usize = 512;
/// Marks that are kept.
const MARKS: u32 = 4096;
/// While a wait is younger than this, the processor is only yielded; afterwards it sleeps, longer each time.
const SPIN: Duration = Duration::from_micros(200);
const SLEEP: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

struct Held {
    memory: Memory,
    bytes: u64,
    /// Bytes of the guard on either side.
    guard: usize,
    what: String,
    /// Launches that had been made when the guards were last seen whole.
    seen: u64,
}

impl Held {
    /// Bytes of its memory before its own first: those of the guard on either side.
    fn first(&self) -> usize {
        self.memory.bytes().saturating_sub(self.bytes as usize) / 2
    }
}

struct Kernel {
    resources: Resources,
    function: Function,
    /// Bytes of dynamic shared memory that it has opted in to.
    opted_in: u32,
    /// Loading a kernel at its first launch may wait for the device.
    launched: bool,
}

struct Loaded {
    code: Code,
    kernels: Vec<Kernel>,
}

/// What is done to memory beyond what was asked for. All of it, unless a tool is to look that it would mislead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Care {
    /// Memory is filled before kernels run. A tool that looks for reads of memory that nobody wrote sees none then.
    pub poison: bool,
    /// Every buffer lies between guards. A tool that looks for accesses out of bounds sees none that end in one.
    pub guards: bool,
}

impl Default for Care {
    fn default() -> Care {
        Care { poison: true, guards: true }
    }
}

/// A GPU of this machine.
pub struct Cuda {
    owner: Owner,
    installed: Installed,
    gpu: Gpu,
    context: Context,
    buffers: Vec<Option<Held>>,
    modules: Vec<Loaded>,
    guard: Vec<u8>,
    care: Care,
    fence: Event,
    marks: Vec<Event>,
    next_mark: u32,
    launches: u64,
    /// Kernels that were launched and not waited for, by name.
    in_flight: Vec<String>,
    /// Whether anything was asked for that was not waited for: launches, fills, marks.
    queued: bool,
    /// What ended this process's use of the device, and where.
    ended: Option<(Problem, String)>,
    patience: Duration,
}

impl Cuda {
    /// Takes a GPU by its number, from 0. Never panics.
    ///
    /// # Errors
    /// Those of [`Installed::look`]; [`Problem::Ordinal`]; [`Problem::Call`] where the GPU can't be used; what is [`lost`].
    pub fn open(ordinal: u32) -> Result<Cuda, Error> {
        if let Some(lost) = lost() {
            return Err(lost);
        }
        let installed = Installed::look()?;
        let count = installed.gpus.len() as u32;
        let Some(gpu) = installed.gpus.get(ordinal as usize).cloned() else {
            return Err(Error::new(Problem::Ordinal { ordinal, count }, probe::place()));
        };
        let driver = Driver::open().map_err(|p| Error::new(p, probe::place()))?;
        let refused = |f: Failed| {
            let problem = if f.is_fault() { Problem::Fault { why: f.why } } else { f.problem() };
            Error::new(problem, format!("GPU {ordinal}, {}", gpu.name))
        };
        let context = driver.device(ordinal).and_then(Context::new).map_err(refused)?;
        let fence = match context.event(false) {
            Ok(fence) => fence,
            Err(f) => {
                context.release();
                return Err(refused(f));
            }
        };
        Ok(Cuda {
            owner: Owner::unique(),
            installed,
            gpu,
            context,
            buffers: Vec::new(),
            modules: Vec::new(),
            guard: guard::pattern(),
            care: Care::default(),
            fence,
            marks: Vec::new(),
            next_mark: 0,
            launches: 0,
            in_flight: Vec::new(),
            queued: false,
            ended: None,
            patience: PATIENCE,
        })
    }

    /// How long waits last before a kernel counts as hung; [`PATIENCE`] unless set here.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// What is done to memory, of buffers from now on.
    pub fn set_care(&mut self, care: Care) {
        self.care = care;
    }

    /// The GPU, by its own answers.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Bytes of the GPU's memory that are free now.
    ///
    /// # Errors
    /// [`Problem::Call`].
    pub fn free_memory(&mut self) -> Result<u64, Error> {
        self.alive()?;
        self.context.memory().map(|m| m.0).map_err(|f| self.failed(f, "the GPU's memory"))
    }

    /// Refuses every call after the one that broke.
    /// Makes the device's context this thread's, for libraries that work on the thread's.
    fn bind(&mut self) -> Result<(), Error> {
        self.context.bind().map_err(|f| self.failed(f, "the device's context"))
    }

    fn alive(&self) -> Result<(), Error> {
        match &self.ended {
            None => Ok(()),
            Some((problem, place)) => Err(Error::new(problem.clone(), place.clone())),
        }
    }

    /// What a failed call means: a kernel that broke is told by whichever call comes next.
    fn failed(&mut self, f: Failed, place: &str) -> Error {
        if !f.is_fault() {
            return Error::new(f.problem(), place);
        }
        let place = match &self.in_flight[..] {
            [] => place.to_string(),
            [one] => format!("kernel {one}, told by {}", f.call),
            some => format!("one of the kernels {}, told by {}", distinct(some).join(", "), f.call),
        };
        self.end(Problem::Fault { why: f.why }, place)
    }

    fn end(&mut self, problem: Problem, place: String) -> Error {
        let _ = LOST.set((problem.clone(), place.clone()));
        self.ended = Some((problem.clone(), place.clone()));
        Error::new(problem, place)
    }

    /// Waits for what is under way, by asking.
    fn wait(&mut self) -> Result<(), Error> {
        self.alive()?;
        if !self.queued {
            return Ok(());
        }
        let (started, mut sleep) = (Instant::now(), SLEEP[0]);
        let mut reached = self.context.record(&self.fence).map(|()| false);
        loop {
            match reached {
                Ok(true) => break,
                Ok(false) => {}
                Err(f) => return Err(self.failed(f, "a wait for the GPU")),
            }
            reached = self.context.is_reached(&self.fence);
            let waited = started.elapsed();
            if waited > self.patience && reached == Ok(false) {
                let place = format!("kernel {}", distinct(&self.in_flight).join(" or "));
                return Err(self.end(Problem::Hung { seconds: self.patience.as_secs() }, place));
            }
            if waited < SPIN {
                std::thread::yield_now();
            } else if reached == Ok(false) {
                std::thread::sleep(sleep);
                sleep = (sleep * 2).min(SLEEP[1]);
            }
        }
        self.in_flight.clear();
        self.queued = false;
        Ok(())
    }

    fn index(&self, buffer: Buffer) -> Result<usize, Error> {
        let index = buffer.id(self.owner).map(|id| id as usize);
        index
            .filter(|i| matches!(self.buffers.get(*i), Some(Some(_))))
            .ok_or_else(|| Error::new(Problem::Buffer, format!("{buffer:?}")))
    }

    fn held(&self, buffer: Buffer) -> Result<&Held, Error> {
        let held = self.buffers[self.index(buffer)?].as_ref();
        held.ok_or_else(|| Error::new(Problem::Buffer, format!("{buffer:?}")))
    }

    /// Sets all of a buffer.
    fn set(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(), Error> {
        self.alive()?;
        let held = self.held(buffer)?;
        pattern.check(held.bytes).map_err(|p| Error::new(p, &*held.what))?;
        let (value, size) = match pattern {
            Pattern::Bits8(v) => (Value::Bits8(v), 1),
            Pattern::Bits16(v) => (Value::Bits16(v), 2),
            Pattern::Bits32(v) => (Value::Bits32(v), 4),
        };
        self.queued = true;
        let held = self.held(buffer)?;
        let set = self.context.set(&held.memory, held.guard, value, held.bytes as usize / size);
        let what = held.what.clone();
        set.map_err(|f| self.failed(f, &what))
    }

    /// Copies the guards' pattern to where it belongs.
    fn lay_guards(&self, memory: &Memory) -> Result<(), Failed> {
        self.context.write(memory, 0, &self.guard)?;
        self.context.write(memory, memory.bytes() - guard::BYTES, &self.guard)
    }

    /// Looks at a buffer's guards if anything was launched since; nothing may be under way.
    fn check_buffer(&mut self, index: usize) -> Result<(), Error> {
        let Some(held) = self.buffers.get(index).and_then(Option::as_ref) else { return Ok(()) };
        if held.seen == self.launches || held.guard == 0 {
            return Ok(());
        }
        let sides = [(Side::Before, 0), (Side::Behind, held.memory.bytes() - guard::BYTES)];
        let mut bytes = vec![0; guard::BYTES];
        let mut found = None;
        for (side, at) in sides {
            if let Err(f) = self.context.read(&held.memory, at, &mut bytes) {
                let what = held.what.clone();
                return Err(self.failed(f, &what));
            }
            found = found.or_else(|| guard::broken(&bytes, &self.guard, side));
        }
        let mended = if found.is_some() { self.lay_guards(&held.memory) } else { Ok(()) };
        let what = held.what.clone();
        mended.map_err(|f| self.failed(f, &what))?;
        if let Some(held) = &mut self.buffers[index] {
            held.seen = self.launches;
        }
        found.map_or(Ok(()), |p| Err(Error::new(p, format!("buffer {what}"))))
    }

    /// Kernel of a loaded module: indices of both.
    fn kernel(&self, l: &Launch<'_>) -> Result<(usize, usize), Error> {
        let place = || format!("kernel {}", l.kernel);
        let module = l.module.id(self.owner).map(|id| id as usize).filter(|m| *m < self.modules.len());
        let module = module
            .ok_or_else(|| Error::new(Problem::Module { why: "it is another device's".into() }, place()))?;
        let kernels = &self.modules[module].kernels;
        let kernel = kernels.iter().position(|k| k.resources.kernel == l.kernel).ok_or_else(|| {
            let known = kernels.iter().map(|k| k.resources.kernel.as_str()).collect::<Vec<_>>().join(", ");
            Error::new(Problem::Kernel { known }, place())
        })?;
        Ok((module, kernel))
    }
}

/// Names without those that come again.
fn distinct(names: &[String]) -> Vec<&str> {
    let mut out: Vec<&str> = Vec::new();
    for name in names {
        if !out.contains(&name.as_str()) {
            out.push(name);
        }
    }
    out
}

impl Device for Cuda {
    fn describe(&self) -> String {
        let (major, minor) = self.installed.cuda;
        let driver = self.installed.driver.as_deref().map_or(String::new(), |d| format!(" {d}"));
        let gib = self.gpu.memory as f64 / f64::from(1 << 30);
        format!(
            "{}, compute capability {}, {gib:.1} GiB; driver{driver} for CUDA {major}.{minor}",
            self.gpu.name,
            self.gpu.capability()
        )
    }

    fn target(&self) -> Target {
        self.gpu.target()
    }

    fn limits(&self) -> Limits {
        self.gpu.limits
    }

    fn allocate(&mut self, bytes: u64, what: &str) -> Result<Buffer, Error> {
        self.wait()?;
        let refused = |why: String| Error::new(Problem::Memory { bytes, why }, what);
        let id = u32::try_from(self.buffers.len()).map_err(|e| refused(format!(": {e}")))?;
        let guard = if self.care.guards { guard::BYTES } else { 0 };
        let size = usize::try_from(bytes).ok().and_then(|b| b.checked_add(2 * guard));
        let size = size.ok_or_else(|| refused(String::new()))?;
        let memory = match self.context.allocate(size) {
            Ok(memory) => memory,
            Err(f) if f.is_out_of_memory() => {
                let left = self.context.memory();
                let why = left.map_or(String::new(), |(free, all)| {
                    format!(": the GPU has {all} bytes, {free} of them are free")
                });
                return Err(refused(why));
            }
            Err(f) => return Err(self.failed(f, what)),
        };
        let laid = if guard > 0 { self.lay_guards(&memory) } else { Ok(()) };
        self.buffers.push(Some(Held { memory, bytes, guard, what: what.into(), seen: self.launches }));
        laid.map_err(|f| self.failed(f, what))?;
        let buffer = Buffer::new(self.owner, id);
        self.poison(buffer, Pattern::NAN)?;
        Ok(buffer)
    }

    /// Looks at the guards first; the memory is given back all the same.
    fn free(&mut self, buffer: Buffer) -> Result<(), Error> {
        self.wait()?;
        let index = self.index(buffer)?;
        let whole = self.check_buffer(index);
        self.alive()?;
        if let Some(held) = self.buffers[index].take() {
            self.context.free(held.memory).map_err(|f| self.failed(f, &held.what))?;
        }
        whole
    }

    fn write(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<(), Error> {
        self.wait()?;
        let held = self.held(buffer)?;
        let r = range(at, bytes.len(), held.bytes).map_err(|p| Error::new(p, &*held.what))?;
        let written = self.context.write(&held.memory, held.guard + r.start as usize, bytes);
        let what = held.what.clone();
        written.map_err(|f| self.failed(f, &what))
    }

    /// Looks at the buffer's guards first.
    fn read(&mut self, buffer: Buffer, at: u64, into: &mut [u8]) -> Result<(), Error> {
        self.wait()?;
        let index = self.index(buffer)?;
        let held = self.held(buffer)?;
        let r = range(at, into.len(), held.bytes).map_err(|p| Error::new(p, &*held.what))?;
        self.check_buffer(index)?;
        let held = self.held(buffer)?;
        let read = self.context.read(&held.memory, held.guard + r.start as usize, into);
        let what = held.what.clone();
        read.map_err(|f| self.failed(f, &what))
    }

    fn fill(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(), Error> {
        self.set(buffer, pattern)
    }

    fn copy(&mut self, from: Buffer, to: Buffer, bytes: u64) -> Result<(), Error> {
        self.alive()?;
        let (source, target) = (self.held(from)?, self.held(to)?);
        for held in [source, target] {
            range(0, usize::try_from(bytes).unwrap_or(usize::MAX), held.bytes)
                .map_err(|p| Error::new(p, &*held.what))?;
        }
        let copied = self.context.copy(
            (&source.memory, source.first()),
            (&target.memory, target.first()),
            bytes as usize,
        );
        let what = target.what.clone();
        self.queued = true;
        copied.map_err(|f| self.failed(f, &what))
    }

    fn poison(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(), Error> {
        if self.care.poison { self.set(buffer, pattern) } else { Ok(()) }
    }

    fn poisons(&self) -> bool {
        self.care.poison
    }

    /// Takes `sm_NN`, `sm_NNa` and `sm_NNf` of its own number.
    fn load(&mut self, code: &Compiled) -> Result<Module, Error> {
        self.wait()?;
        let fail = |why: String| Error::new(Problem::Module { why }, &*code.name);
        if code.target.number != self.gpu.limits.number {
            return Err(fail(format!("it is for {}, this device for {}", code.target, self.target())));
        }
        let Some(cubin) = &code.cubin else {
            return Err(fail(format!("{} is PTX only, without machine code", code.target)));
        };
        // The driver is given no length, and arguments are checked by these figures: both need a CUBIN that is whole.
        let own = crate::nvrtc::read_cubin(cubin).map_err(&fail)?;
        let mut resources = Vec::new();
        for kernel in own.kernels {
            let same = code.kernel(&kernel.name).filter(|r| r.parameters == kernel.parameters);
            let same = same
                .ok_or_else(|| fail(format!("its figures of kernel {} are not the CUBIN's", kernel.name)))?;
            resources.push(same.clone());
        }
        let id = u32::try_from(self.modules.len()).map_err(|e| fail(e.to_string()))?;
        let loaded = match self.context.load(cubin) {
            Ok(loaded) => loaded,
            Err(f) if f.is_fault() => return Err(self.failed(f, &code.name)),
            Err(f) => return Err(fail(f.why)),
        };
        let kernels = resources.into_iter().map(|resources| {
            let function = self.context.function(&loaded, &resources.kernel)?;
            Ok(Kernel { resources, function, opted_in: 0, launched: false })
        });
        match kernels.collect::<Result<Vec<Kernel>, Failed>>() {
            Ok(kernels) => self.modules.push(Loaded { code: loaded, kernels }),
            Err(f) => return Err(self.failed(f, &code.name)),
        }
        Ok(Module::new(self.owner, id))
    }

    fn launch(&mut self, l: &Launch<'_>) -> Result<(), Error> {
        self.alive()?;
        let place = format!("kernel {}", l.kernel);
        let (module, kernel) = self.kernel(l)?;
        let limits = self.gpu.limits;
        let Kernel { resources, function, opted_in, launched } = &self.modules[module].kernels[kernel];
        l.check(&limits, Some(resources))?;
        let (function, opted_in, launched) = (*function, *opted_in, *launched);
        let parameters = &resources.parameters;
        if parameters.is_empty() && resources.parameter_bytes > 0 {
            let why = "its CUBIN does not list the kernel's parameters".into();
            return Err(Error::new(Problem::Module { why }, place));
        }
        let mut addresses = Vec::new();
        for (buffer, _) in l.arguments.iter().filter_map(Arg::buffer) {
            let held = self.held(buffer)?;
            addresses.push(held.memory.address() + held.guard as u64);
        }
        let mut addresses = addresses.into_iter();
        let mut packed = Packed::of(l.arguments, |_| addresses.next().unwrap_or(0));
        packed.bytes.resize(packed.padded(), 0);
        // As `Launch::check` has it: one by one, or all as the one struct.
        let fields: Vec<usize> = match parameters.len() == packed.fields.len() {
            true => packed.fields.iter().map(|f| f.0 as usize).collect(),
            false => vec![0; parameters.len()],
        };
        let static_shared = resources.static_shared_bytes;
        if !launched || self.in_flight.len() >= IN_FLIGHT {
            self.wait()?;
        }
        if static_shared.saturating_add(l.dynamic_shared) > limits.shared_per_block_default
            && l.dynamic_shared > opted_in
        {
            self.context.opt_in(function, l.dynamic_shared).map_err(|f| self.failed(f, &place))?;
            self.modules[module].kernels[kernel].opted_in = l.dynamic_shared;
        }
        self.in_flight.push(l.kernel.into());
        self.queued = true;
        // SAFETY: the function is of a module that stays loaded as long as `self`; `check` found the arguments to have the
        // offsets and sizes of the kernel's parameters, or to fill its one struct, by figures that `load` found in the
        // CUBIN. Kernels are given handles only, and are code that the caller chose to run.
        let started = unsafe {
            self.context.launch(function, [l.grid, l.block], l.dynamic_shared, &packed.bytes, &fields)
        };
        if let Err(f) = started {
            let error = self.failed(f, &place);
            self.in_flight.pop();
            return Err(error);
        }
        self.launches += 1;
        self.modules[module].kernels[kernel].launched = true;
        Ok(())
    }

    fn synchronise(&mut self) -> Result<(), Error> {
        self.wait()
    }

    fn check_guards(&mut self) -> Result<(), Error> {
        self.wait()?;
        (0..self.buffers.len()).try_for_each(|index| self.check_buffer(index))
    }

    fn mark(&mut self) -> Result<Mark, Error> {
        self.alive()?;
        let id = self.next_mark;
        let slot = (id % MARKS) as usize;
        if slot == self.marks.len() {
            let event = self.context.event(true).map_err(|f| self.failed(f, "a mark"))?;
            self.marks.push(event);
        }
        self.queued = true;
        let recorded = self.context.record(&self.marks[slot]);
        recorded.map_err(|f| self.failed(f, "a mark"))?;
        self.next_mark = id.checked_add(1).ok_or_else(|| Error::new(Problem::Mark, "a mark"))?;
        Ok(Mark::new(self.owner, id))
    }

    fn elapsed(&mut self, from: Mark, to: Mark) -> Result<f64, Error> {
        let slot = |mark: Mark| {
            let id = mark.id(self.owner).filter(|id| *id < self.next_mark && self.next_mark - id <= MARKS);
            id.map(|id| (id % MARKS) as usize).ok_or_else(|| Error::new(Problem::Mark, format!("{mark:?}")))
        };
        let (from, to) = (slot(from)?, slot(to)?);
        self.wait()?;
        let elapsed = self.context.elapsed(&self.marks[from], &self.marks[to]);
        elapsed.map_err(|f| self.failed(f, "two marks"))
    }
}

impl Drop for Cuda {
    /// Gives everything back if that takes no waiting; what is still under way, or broke, is left to the process's end.
    fn drop(&mut self) {
        let idle = || {
            !self.queued
                || (self.context.record(&self.fence).is_ok()
                    && self.context.is_reached(&self.fence) == Ok(true))
        };
        if self.ended.is_some() || !idle() {
            return;
        }
        for held in self.buffers.drain(..).flatten() {
            // What it answers changes nothing any more.
            let _ = self.context.free(held.memory);
        }
        for loaded in self.modules.drain(..) {
            self.context.unload(loaded.code);
        }
        for event in self.marks.iter().chain([&self.fence]) {
            self.context.destroy(event);
        }
        self.context.release();
    }
}
