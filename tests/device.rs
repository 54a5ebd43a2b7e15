/*!
`Device` can be implemented, and host code written once against it finds what goes wrong.

The first device here is host memory that keeps track of written bytes; its one kernel adds a number to f32 values. It
stands for devices that report reads of poison when waiting. The second is the PTX machine, which runs the same kernel
from committed PTX.
*/

#[path = "common/on_device.rs"]
mod on_device;

use mla_check::device::ptx::{Found, PtxMachine};
use mla_check::device::{
    Arg, Buffer, Device, Error, Launch, Limits, Module, Owner, Packed, Pattern, Problem, range,
};
use mla_check::nvrtc::{Compiled, PINNED, Parameter, Resources, Target};
use mla_ptx::Kind;
use std::collections::HashMap;

struct Memory {
    bytes: Vec<u8>,
    written: Vec<bool>,
    what: String,
}

/// Host memory.
struct Host {
    owner: Owner,
    next: u32,
    buffers: HashMap<u32, Memory>,
    modules: Vec<Vec<Resources>>,
    pending: Option<Error>,
}

impl Host {
    fn new() -> Host {
        let (buffers, modules) = (HashMap::new(), Vec::new());
        Host { owner: Owner::unique(), next: 0, buffers, modules, pending: None }
    }
    fn memory(&mut self, buffer: Buffer) -> Result<&mut Memory, Error> {
        let found = buffer.id(self.owner).and_then(|id| self.buffers.get_mut(&id));
        found.ok_or_else(|| Error::new(Problem::Buffer, format!("{buffer:?}")))
    }
    fn set(&mut self, buffer: Buffer, pattern: Pattern, written: bool) -> Result<(), Error> {
        let memory = self.memory(buffer)?;
        pattern.check(memory.bytes.len() as u64).map_err(|p| Error::new(p, &*memory.what))?;
        let pattern = pattern.bytes();
        for (i, b) in memory.bytes.iter_mut().enumerate() {
            *b = pattern[i % pattern.len()];
        }
        memory.written.fill(written);
        Ok(())
    }
    /// y[i] = x[i] + c for n values.
    fn add(&mut self, arguments: &[Arg]) -> Result<(), Error> {
        let [Arg::In(x), Arg::Out(y), n, c] = arguments else { panic!("checked before") };
        let (Arg::Scalar(n), Arg::Scalar(c)) = (n, c) else { panic!("checked before") };
        let n = u32::from_le_bytes(n.bytes().try_into().unwrap()) as usize;
        let c = f32::from_le_bytes(c.bytes().try_into().unwrap());
        let x = self.memory(*x)?;
        if let Some(at) = x.written[..4 * n].iter().position(|w| !w) {
            let why = format!("byte {at} is read and was never written");
            return Err(Error::new(Problem::Fault { why }, format!("kernel add, {}", x.what)));
        }
        let values: Vec<u8> = x.bytes[..4 * n]
            .as_chunks()
            .0
            .iter()
            .flat_map(|b| (f32::from_le_bytes(*b) + c).to_le_bytes())
            .collect();
        self.write(*y, 0, &values)
    }
}

impl Device for Host {
    fn describe(&self) -> String {
        "host memory".into()
    }
    fn target(&self) -> Target {
        Target::sm(120)
    }
    fn limits(&self) -> Limits {
        Limits::of(self.target()).unwrap()
    }
    fn allocate(&mut self, bytes: u64, what: &str) -> Result<Buffer, Error> {
        let Some(size) = usize::try_from(bytes).ok().filter(|b| *b <= 1 << 20) else {
            return Err(Error::new(Problem::Memory { bytes, why: String::new() }, what));
        };
        self.next += 1;
        let memory = Memory { bytes: vec![0xff; size], written: vec![false; size], what: what.into() };
        self.buffers.insert(self.next, memory);
        Ok(Buffer::new(self.owner, self.next))
    }
    fn free(&mut self, buffer: Buffer) -> Result<(), Error> {
        self.memory(buffer)?;
        buffer.id(self.owner).map(|id| self.buffers.remove(&id));
        Ok(())
    }
    fn write(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<(), Error> {
        let memory = self.memory(buffer)?;
        let r =
            range(at, bytes.len(), memory.bytes.len() as u64).map_err(|p| Error::new(p, &*memory.what))?;
        let r = r.start as usize..r.end as usize;
        memory.bytes[r.clone()].copy_from_slice(bytes);
        memory.written[r].fill(true);
        Ok(())
    }
    fn read(&mut self, buffer: Buffer, at: u64, into: &mut [u8]) -> Result<(), Error> {
        self.synchronise()?;
        let memory = self.memory(buffer)?;
        let r = range(at, into.len(), memory.bytes.len() as u64).map_err(|p| Error::new(p, &*memory.what))?;
        into.copy_from_slice(&memory.bytes[r.start as usize..r.end as usize]);
        Ok(())
    }
    fn fill(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(), Error> {
        self.set(buffer, pattern, true)
    }
    fn poison(&mut self, buffer: Buffer, pattern: Pattern) -> Result<(), Error> {
        self.set(buffer, pattern, false)
    }
    fn load(&mut self, code: &Compiled) -> Result<Module, Error> {
        if code.target.number != self.target().number {
            let why = format!("it is for {}", code.target);
            return Err(Error::new(Problem::Module { why }, &*code.name));
        }
        self.modules.push(code.kernels.clone());
        Ok(Module::new(self.owner, self.modules.len() as u32 - 1))
    }
    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), Error> {
        let kernels = launch.module.id(self.owner).and_then(|id| self.modules.get(id as usize));
        let kernels = kernels
            .ok_or_else(|| Error::new(Problem::Module { why: "another device's".into() }, launch.kernel))?;
        let Some(kernel) = kernels.iter().find(|k| k.kernel == launch.kernel) else {
            let known = kernels.iter().map(|k| k.kernel.as_str()).collect::<Vec<_>>().join(", ");
            return Err(Error::new(Problem::Kernel { known }, launch.kernel));
        };
        launch.check(&self.limits(), Some(kernel))?;
        for buffer in launch.arguments.iter().filter_map(Arg::buffer) {
            self.memory(buffer.0)?;
        }
        // As on a GPU, what breaks shows at the next call that waits.
        self.pending = self.add(launch.arguments).err();
        Ok(())
    }
    fn synchronise(&mut self) -> Result<(), Error> {
        self.pending.take().map_or(Ok(()), Err)
    }
}

/// Code with the kernel's figures; the device here runs a function of its own in its place.
fn code(target: Target) -> Compiled {
    let parameters = [(0, 8), (8, 8), (16, 4), (20, 4)].map(|(offset, bytes)| Parameter { offset, bytes });
    let kernel = Resources {
        kernel: "add".into(),
        registers: 16,
        frame_bytes: 0,
        spill_store_bytes: Some(0),
        spill_load_bytes: Some(0),
        static_shared_bytes: 0,
        threads_bound: None,
        parameters: parameters.into(),
        parameter_bytes: 24,
        code_bytes: 1,
    };
    Compiled {
        target,
        version: PINNED,
        name: "add.cu".into(),
        ptx: include_str!("../fixtures/ptx/add.ptx").into(),
        cubin: None,
        log: String::new(),
        kernels: vec![kernel],
        notices: Vec::new(),
    }
}

/// Host code as an engine has it: any device, poisoned output.
fn add(device: &mut dyn Device, x: &[f32], c: f32, written: usize) -> Result<Vec<f32>, Error> {
    let module = device.load(&code(device.target()))?;
    let bytes: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
    let input = device.allocate(bytes.len() as u64, "x")?;
    let output = device.allocate(bytes.len() as u64, "y")?;
    device.write(input, 0, &bytes[..4 * written])?;
    device.poison(output, Pattern::NAN)?;
    let arguments = [Arg::In(input), Arg::Out(output), (x.len() as u32).into(), c.into()];
    let (grid, block) = ([1, 1, 1], [32, 1, 1]);
    device.launch(&Launch {
        module,
        kernel: "add",
        grid,
        block,
        dynamic_shared: 0,
        arguments: &arguments,
    })?;
    let mut out = vec![0; bytes.len()];
    device.read(output, 0, &mut out)?;
    device.free(input)?;
    device.free(output)?;
    Ok(out.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

fn machine() -> PtxMachine {
    PtxMachine::new(Target::sm(120)).unwrap()
}

/// Two devices of each kind.
fn pairs() -> [[Box<dyn Device>; 2]; 2] {
    [[Box::new(Host::new()), Box::new(Host::new())], [Box::new(machine()), Box::new(machine())]]
}

#[test]
fn host_code_runs_on_a_device_behind_the_trait() {
    for [mut device, _] in pairs() {
        let sums = add(&mut *device, &[1.0, 2.5, -3.0], 0.5, 3).unwrap();
        assert_eq!(sums, [1.5, 3.0, -2.5], "{}", device.describe());
    }
    let mut host = Host::new();
    add(&mut host, &[1.0], 0.5, 1).unwrap();
    assert!(host.buffers.is_empty());
    let mut machine = machine();
    add(&mut machine, &[1.0, 2.5, -3.0], 0.5, 3).unwrap();
    assert_eq!(machine.take_findings(), []);
    assert!(machine.counts().warp_instructions > 0);
}

/// What GPUs are tested by (tests/gpu.rs), on the PTX machine: the same code runs, and none of it does anything wrong.
#[test]
fn the_tests_of_gpus_hold_on_the_ptx_machine() {
    let code =
        Compiled::of_ptx("probe.cu", Target::compute(120), include_str!("../fixtures/device/probe.ptx"));
    for (name, body) in on_device::ALL {
        let mut machine = machine();
        let module = machine.load(&code).unwrap();
        body(&mut machine, module);
        assert_eq!(machine.take_findings(), [], "{name}");
    }
}

#[test]
fn an_emulated_device_has_no_clock() {
    let mut machine = machine();
    let error = machine.mark().unwrap_err();
    assert!(matches!(error.problem(), Problem::NoClock), "{error}");
    assert!(error.place().contains("emulated"), "{error}");
    machine.check_guards().unwrap();
}

/// The launch goes on, as on a GPU; the finding names instruction, source line, lane and buffer.
#[test]
fn on_the_ptx_machine_it_is_a_finding_and_no_error() {
    let mut machine = machine();
    let sums = add(&mut machine, &[1.0, 2.5], 0.5, 1).unwrap();
    assert!(sums[0] == 1.5 && sums[1].is_nan(), "{sums:?}");
    let found = machine.take_findings();
    assert_eq!(found.len(), 1, "{found:?}");
    let Found { code, finding } = &found[0];
    assert_eq!((&**code, finding.kind, finding.source_line), ("add.cu", Kind::GlobalUninitialised, 4));
    assert_eq!((finding.lanes, finding.count), (0b10, 1));
    assert!(finding.detail.contains("(x + 4)"), "{finding}");
    assert_eq!(machine.take_findings(), []);
}

/// `kernel` of the committed PTX over buffers of three values, and what was found, by name.
fn run(kernel: &str, arguments: impl Fn([Buffer; 2]) -> Vec<Arg>) -> Vec<(String, String)> {
    let mut machine = machine();
    let module = machine.load(&code(Target::sm(120))).unwrap();
    let [x, y] = ["x", "y"].map(|what| machine.allocate(12, what).unwrap());
    machine.fill(x, Pattern::Bits32(0x3f80_0000)).unwrap();
    let arguments = arguments([x, y]);
    let (grid, block, dynamic_shared) = ([1; 3], [32, 1, 1], 0);
    machine.launch(&Launch { module, kernel, grid, block, dynamic_shared, arguments: &arguments }).unwrap();
    let found = machine.take_findings().into_iter();
    found.map(|f| (f.finding.kind.name().into(), f.finding.detail)).collect()
}

#[test]
fn an_output_must_be_written_whole_and_an_inout_need_not() {
    let found = run("add_short", |[x, y]| vec![Arg::In(x), Arg::Out(y), 3u32.into(), 1f32.into()]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].0, "output-unwritten");
    assert!(found[0].1.starts_with("4 bytes") && found[0].1.contains("(y + 0)"), "{found:?}");
    let found = run("add_short", |[x, y]| vec![Arg::In(x), Arg::InOut(y), 3u32.into(), 1f32.into()]);
    assert_eq!(found, []);
}

#[test]
fn what_lies_behind_a_buffer_is_found_with_its_name() {
    let found = run("add_unguarded", |[x, y]| vec![Arg::In(x), Arg::Out(y), 3u32.into(), 1f32.into()]);
    let kinds: Vec<_> = found.iter().map(|f| &*f.0).collect();
    assert_eq!(kinds, ["global-out-of-bounds"; 2], "{found:?}");
    assert!(found.iter().any(|f| f.1.contains("(x + 12)")), "{found:?}");
    assert!(found.iter().any(|f| f.1.contains("(y + 12)")), "{found:?}");
}

#[test]
fn the_machine_keeps_the_targets_limits_and_forgets_what_is_freed() {
    let mut machine = machine();
    let module = machine.load(&code(Target::sm(120))).unwrap();
    let x = machine.allocate(4, "x").unwrap();
    machine.fill(x, Pattern::Bits8(0)).unwrap();
    assert!(machine.is_written(x).unwrap());
    machine.poison(x, Pattern::Bits8(0)).unwrap();
    assert!(!machine.is_written(x).unwrap());
    let arguments = [Arg::In(x), 0u64.into(), 0u32.into(), 0f32.into()];
    let launch = Launch {
        module,
        kernel: "add",
        grid: [1; 3],
        block: [1; 3],
        dynamic_shared: 101_376,
        arguments: &arguments,
    };
    machine.launch(&launch).unwrap();
    let error = machine.launch(&Launch { dynamic_shared: 101_377, ..launch.clone() }).unwrap_err();
    assert!(matches!(error.problem(), Problem::Exceeded(_)), "{error}");
    let error = machine.launch(&Launch { block: [1025, 1, 1], ..launch.clone() }).unwrap_err();
    assert!(matches!(error.problem(), Problem::Shape { value: 1025, .. }), "{error}");
    machine.free(x).unwrap();
    assert!(matches!(machine.launch(&launch).unwrap_err().problem(), Problem::Buffer));
    assert!(matches!(PtxMachine::new(Target::sm(75)).err().unwrap().problem(), Problem::Target { .. }));
    let text = Compiled::of_ptx("x.ptx", Target::compute(120), "int x;");
    assert!(matches!(machine.load(&text).unwrap_err().problem(), Problem::Module { .. }));
}

#[test]
fn a_kernel_that_reads_what_was_never_written_is_found_when_waiting() {
    let error = add(&mut Host::new(), &[1.0, 2.5], 0.5, 1).unwrap_err();
    assert!(matches!(error.problem(), Problem::Fault { .. }), "{error}");
    assert!(error.to_string().contains("byte 4 is read") && error.place().contains(", x"), "{error}");
}

#[test]
fn poison_and_fill_set_the_same_bytes_and_differ_in_what_counts_as_written() {
    for [mut device, _] in pairs() {
        set_patterns(&mut *device);
    }
    let mut host = Host::new();
    let b = host.allocate(4, "x").unwrap();
    host.fill(b, Pattern::NAN).unwrap();
    assert_eq!(host.memory(b).unwrap().written, [true; 4]);
    host.poison(b, Pattern::NAN).unwrap();
    assert_eq!(host.memory(b).unwrap().written, [false; 4]);
}

fn set_patterns(device: &mut dyn Device) {
    let b = device.allocate(8, "scratch").unwrap();
    let pattern = Pattern::Bits32(0x44c0_0000); // 1.5 · 2^10 in f32
    for written in [true, false] {
        device.fill(b, Pattern::NAN).unwrap();
        if written { device.fill(b, pattern) } else { device.poison(b, pattern) }.unwrap();
        let mut bytes = [0; 8];
        device.read(b, 0, &mut bytes).unwrap();
        let values = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>();
        assert_eq!(values, [1536.0; 2], "{}", device.describe());
    }
    let odd = device.allocate(6, "odd").unwrap();
    let error = device.poison(odd, pattern).unwrap_err();
    assert!(matches!(error.problem(), Problem::Pattern { bytes: 6, pattern: 4 }), "{error}");
    device.poison(odd, Pattern::Bits16(0x44c0)).unwrap();
}

#[test]
fn handles_of_another_device_and_freed_ones_are_refused() {
    for [mut a, mut b] in pairs() {
        let buffer = a.allocate(4, "x").unwrap();
        assert!(matches!(b.write(buffer, 0, &[0]).unwrap_err().problem(), Problem::Buffer));
        a.free(buffer).unwrap();
        assert!(matches!(a.free(buffer).unwrap_err().problem(), Problem::Buffer));
        assert_ne!(a.allocate(4, "x").unwrap(), buffer);
        let module = a.load(&code(a.target())).unwrap();
        let (kernel, arguments) = ("add", &[]);
        let launch = Launch { module, kernel, grid: [1; 3], block: [1; 3], dynamic_shared: 0, arguments };
        assert!(matches!(b.launch(&launch).unwrap_err().problem(), Problem::Module { .. }));
        let error = a.launch(&Launch { kernel: "sub", ..launch.clone() }).unwrap_err();
        assert!(error.to_string().contains("there are: add"), "{error}");
        let error = a.launch(&launch).unwrap_err();
        assert!(matches!(error.problem(), Problem::Count { found: 0, expected: 4 }), "{error}");
        assert!(matches!(a.load(&code(Target::sm(90))).unwrap_err().problem(), Problem::Module { .. }));
    }
}

#[test]
fn copies_outside_of_a_buffer_and_too_much_memory_are_errors() {
    for [mut device, _] in pairs() {
        let b = device.allocate(8, "cache").unwrap();
        let error = device.write(b, 6, &[0; 3]).unwrap_err();
        assert!(error.to_string().contains("bytes 6 to 9 lie outside of the buffer's 8"), "{error}");
        assert_eq!(error.place(), "cache");
        assert!(device.read(b, u64::MAX, &mut [0; 2]).is_err());
        assert!(device.write(b, 8, &[]).is_ok());
        let error = device.allocate(1 << 40, "cache").unwrap_err();
        assert!(matches!(error.problem(), Problem::Memory { .. }), "{error}");
    }
}

/// What a device hands to its driver.
#[test]
fn addresses_are_put_where_the_kernel_reads_them() {
    let mut host = Host::new();
    let (x, y) = (host.allocate(4, "x").unwrap(), host.allocate(4, "y").unwrap());
    let packed =
        Packed::of(&[Arg::InOut(x), Arg::In(y), 7u32.into()], |b| if b == x { 0x100 } else { 0x200 });
    let expected = [&0x100u64.to_le_bytes()[..], &0x200u64.to_le_bytes(), &7u32.to_le_bytes()].concat();
    assert_eq!(packed.bytes, expected);
}
