//! The tests that need a GPU, and what they need: named in every list, run where a GPU answers.
//!
//! Each of them runs in a process of its own (`harness::alone`); what ends a process's use of a GPU in one more: this binary
//! again, told by a variable what to do.

#[path = "bisect.rs"]
pub mod bisect;
#[path = "geometries.rs"]
pub mod geometries;
#[path = "on_device.rs"]
pub mod on_device;
#[path = "overflow.rs"]
pub mod overflow;
#[path = "planted.rs"]
pub mod planted;
#[path = "small.rs"]
#[allow(dead_code)]
pub mod small;
#[path = "strided.rs"]
pub mod strided;

use libtest_mimic::{Arguments, Trial};
use mla_check::check::EngineKind;
use mla_check::child;
use mla_check::device::cuda::{Care, Cuda, Installed};
use mla_check::device::{Arg, Buffer, Device, Error, Limits, Mark, Module, Pattern, Problem};
use mla_check::harness::alone::{self, Outcome};
use mla_check::harness::environment::Environment;
use mla_check::harness::gate::{REQUIRE_GPU, Standing, is_on};
use mla_check::nvrtc::{Compiled, Nvrtc, Options, Source};
use on_device::{launch, read};
use std::io::Write;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// What the process is to do instead of tests.
const CHILD: &str = "MLA_CHECK_GPU_CHILD";
/// How long such a process may take: the driver's start, the wait for a kernel that hangs, and much to spare.
const LONGEST: Duration = Duration::from_secs(60);
/// What a kernel that hangs is waited for.
const PATIENCE: Duration = Duration::from_secs(2);

const SOURCE: &str = include_str!("../../fixtures/device/probe.cu");
const CUBIN_90: &[u8] = include_bytes!("../../fixtures/device/probe.sm_90.cubin");

/// A test that needs NVRTC too.
const COMPILES: &str = "compiled_here";

/// A test that needs the program and git.
const BISECTS: &str = "bisection";

/// A test that needs much of a GPU's memory, and how much: two pools of 58,300 pages of 64 slots of 576 columns.
const FAR: &str = "pages_beyond_2_31";
const FAR_BYTES: u64 = 10 << 30;

/// Tests of GPUs alone.
const OWN: [(&str, fn()); 26] = [
    ("description", description),
    ("guards", guards),
    ("bare_memory", bare_memory),
    ("marks", marks),
    ("other_code_is_refused", other_code_is_refused),
    ("two_devices_of_one_gpu", two_devices_of_one_gpu),
    (COMPILES, compiled_here),
    ("illegal_address", illegal_address),
    ("hung_kernel", hung_kernel),
    ("deepseek_v3_heads", || planted::clean(&planted::report(EngineKind::Cuda, planted::FILES[0], |_| ()))),
    ("glm_5_heads", || planted::clean(&planted::report(EngineKind::Cuda, planted::FILES[1], |_| ()))),
    ("ranks", || planted::ranks(EngineKind::Cuda)),
    ("routed_requests", || planted::routed(EngineKind::Cuda)),
    ("geometries", every_geometry),
    ("bare_run", bare_run),
    ("rows_apart", || strided::attention(&mut Cuda::open(0).unwrap())),
    ("repetitions", repetitions),
    (FAR, far_pages),
    ("overflow", || overflow::rounding(EngineKind::Cuda)),
    ("after_an_overflow", || overflow::after(EngineKind::Cuda)),
    ("infinity_and_the_largest_number", || overflow::exchanged(EngineKind::Cuda)),
    ("phantom_buffer", || planted::found(EngineKind::Cuda, &planted::PLANTED[0])),
    ("skipped_row", || planted::found(EngineKind::Cuda, &planted::PLANTED[1])),
    ("wrong_page", || planted::found(EngineKind::Cuda, &planted::PLANTED[2])),
    ("dropped_rescale", || planted::found(EngineKind::Cuda, &planted::PLANTED[3])),
    (BISECTS, || bisect::kernels("cuda")),
];
/// Of these, the tests of the engine: their kernels are compiled where they run.
const ENGINE: usize = 17;

/// How many there are.
#[allow(dead_code)] // who runs them counts them
pub const COUNT: usize = on_device::ALL.len() + OWN.len();

/// Names of the tests of the engine.
#[allow(dead_code)] // who has no GPU leaves them out by name
pub fn of_engine() -> impl Iterator<Item = &'static str> {
    OWN[OWN.len() - ENGINE..].iter().map(|t| t.0)
}

/// Runs the tests, or what a test wants of a process of its own.
pub fn main() -> ExitCode {
    match std::env::var(CHILD).as_deref() {
        Ok("stray") => child_stray(),
        Ok("hang") => child_hang(),
        _ => {
            if let Some(name) = alone::asked() {
                return one(&name);
            }
            // One after the other, unless asked for otherwise: they share one stream, and one of them measures time.
            let mut arguments = Arguments::from_args();
            arguments.test_threads = arguments.test_threads.or(Some(1));
            return libtest_mimic::run(&arguments, trials()).exit_code();
        }
    }
    ExitCode::SUCCESS
}

/// Why there is nothing to test, if so.
fn missing() -> Option<String> {
    let installed = match Installed::look() {
        Ok(installed) => installed,
        Err(e) => return Some(e.problem().to_string()),
    };
    let number = installed.gpus[0].limits.number;
    (number != 90 && Nvrtc::here().is_err())
        .then(|| format!("no NVRTC, and committed code is not for sm_{number}"))
}

fn trials() -> Vec<Trial> {
    let missing = missing();
    // Kernels are committed for sm_90; one test is about compiling.
    let no_compiler = Nvrtc::here().err().map(|e| e.problem().to_string());
    let nvrtc = !is_on("MLA_CHECK_REQUIRE_NVRTC");
    let compiles = |name| name == COMPILES || of_engine().any(|n| n == name);
    let other = |name| (name == BISECTS).then(bisect::lacking).flatten();
    let memory = Installed::look().ok().map(|i| i.gpus[0].memory).filter(|m| *m < FAR_BYTES);
    let room = |name| {
        let told = |m| format!("the GPU has {m} bytes of memory, this test takes {FAR_BYTES}");
        memory.filter(|_| name == FAR).map(told)
    };
    let lacks = |name| {
        let compiler = || no_compiler.clone().filter(|_| nvrtc && compiles(name));
        missing.clone().or_else(compiler).or_else(|| other(name)).or_else(|| room(name))
    };
    let required = |name| is_on(REQUIRE_GPU) && (missing.is_some() || room(name).is_some());
    let limit = Environment::read().limit();
    tests()
        .map(|(name, _)| {
            let limit = limit.clone();
            Standing::of(lacks(name), required(name)).trial(name, move || match alone::run(name, limit?) {
                Outcome::Passed => Ok(()),
                Outcome::Failed(text) | Outcome::Unjudged(text) | Outcome::Ended(text) => Err(text.into()),
            })
        })
        .collect()
}

/// All tests: those of any device, then those of GPUs.
fn tests() -> impl Iterator<Item = (&'static str, Box<dyn FnOnce()>)> {
    let generic = on_device::ALL.into_iter().map(|(name, body)| {
        let test: Box<dyn FnOnce()> = Box::new(move || {
            let (mut device, module) = open();
            body(&mut device, module);
        });
        (name, test)
    });
    generic.chain(OWN.into_iter().map(|(name, test)| (name, Box::new(test) as Box<dyn FnOnce()>)))
}

/// Runs the one test that this process was started for.
fn one(name: &str) -> ExitCode {
    let Some((_, test)) = tests().find(|t| t.0 == name) else {
        return alone::answer(Err(format!("there is no test {name}")), false);
    };
    // What it says in a panic is on stderr already.
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test));
    alone::answer(ended.map_err(|_| format!("{name} panicked")), true)
}

/// The kernels as this GPU runs them: committed for sm_90, else compiled here.
fn code(device: &Cuda) -> Compiled {
    if device.target().number == 90 {
        return Compiled::of_cubin("probe.cu", CUBIN_90.into()).unwrap();
    }
    compile(device, &Options::default())
}

fn compile(device: &Cuda, options: &Options) -> Compiled {
    let nvrtc = Nvrtc::here().unwrap_or_else(|e| panic!("{e}"));
    nvrtc
        .compile(&Source::new("probe.cu", SOURCE), device.target(), options)
        .unwrap_or_else(|e| panic!("{e}"))
}

fn open() -> (Cuda, Module) {
    let mut device = Cuda::open(0).unwrap_or_else(|e| panic!("{e}"));
    let code = code(&device);
    let module = device.load(&code).unwrap_or_else(|e| panic!("{e}"));
    (device, module)
}

/// The device's own answers are those of the table by which kernels are checked without it.
fn description() {
    let (mut device, _) = open();
    let number = device.target().number;
    if let Some(known) = Limits::of(device.target()) {
        assert_eq!(device.limits(), known);
    }
    let text = device.describe();
    assert!(text.contains(&format!("capability {}.{}", number / 10, number % 10)), "{text}");
    let free = device.free_memory().unwrap();
    assert!(free > 0 && free <= device.gpu().memory, "{free}");
    let error = Cuda::open(99).err().unwrap();
    assert!(matches!(error.problem(), Problem::Ordinal { ordinal: 99, .. }), "{error}");
}

/// A byte on either side, seen by whichever call looks first; the buffer and the distance are named, once.
fn guards() {
    let (mut device, module) = open();
    let around: [(i64, &str); 6] = [
        (-1, "1 bytes outside of the buffer, the nearest of them 1 before its first byte"),
        (-65_536, "the nearest of them 65536 before"),
        (1000, "1 bytes outside of the buffer, the nearest of them 1 behind its last byte"),
        (1001, "the nearest of them 2 behind"),
        (1003, "the nearest of them 4 behind"),
        (1000 + 65_535, "the nearest of them 65536 behind"),
    ];
    type Look = fn(&mut Cuda, Buffer) -> Result<(), Error>;
    let looks: [Look; 3] = [|d, _| d.check_guards(), |d, b| d.read(b, 0, &mut [0]), |d, b| d.free(b)];
    for (at, text) in around {
        for look in looks {
            let [beside, out] = ["beside", "poked"].map(|what| device.allocate(1000, what).unwrap());
            launch(&mut device, module, "poke", 1, &[Arg::InOut(out), 999i64.into(), 5u32.into()]).unwrap();
            device.check_guards().unwrap();
            // Poison: what a kernel that copies too far is likely to write.
            launch(&mut device, module, "poke", 1, &[Arg::InOut(out), at.into(), 0xffu32.into()]).unwrap();
            device.read(beside, 0, &mut [0]).unwrap();
            let error = look(&mut device, out).unwrap_err();
            assert!(error.to_string().contains(text), "{at}: {error}");
            assert_eq!(error.place(), "buffer poked");
            // Told once: after another launch the guards are whole again.
            launch(&mut device, module, "poke", 1, &[Arg::InOut(beside), 0i64.into(), 0u32.into()]).unwrap();
            device.check_guards().unwrap();
            device.free(beside).unwrap();
            let _ = device.free(out);
        }
    }
    let fresh = device.allocate(1000, "fresh").unwrap();
    assert_eq!(read(&mut device, fresh, 1000), [0xff; 1000]);
}

/// Without guards nothing is seen of what lands behind a buffer, and memory that is poisoned keeps what it holds.
fn bare_memory() {
    let (mut device, module) = open();
    device.set_care(Care { poison: false, guards: false });
    assert!(!device.poisons());
    let out = device.allocate(1000, "bare").unwrap();
    device.write(out, 0, &[0x21; 1000]).unwrap();
    device.poison(out, Pattern::NAN).unwrap();
    // Behind the buffer, but within the bytes that the driver rounds an allocation up to.
    launch(&mut device, module, "poke", 1, &[Arg::InOut(out), 1003i64.into(), 5u32.into()]).unwrap();
    launch(&mut device, module, "poke", 1, &[Arg::InOut(out), 999i64.into(), 5u32.into()]).unwrap();
    device.check_guards().unwrap();
    let mut expected = [0x21; 1000];
    expected[999] = 5;
    assert_eq!(read(&mut device, out, 1000), expected);
    // Buffers that were made with care keep it.
    device.set_care(Care::default());
    let guarded = device.allocate(1000, "guarded").unwrap();
    launch(&mut device, module, "poke", 1, &[Arg::InOut(guarded), 1000i64.into(), 5u32.into()]).unwrap();
    assert!(matches!(device.check_guards().unwrap_err().problem(), Problem::Guard { .. }));
}

/// Four times the work takes about four times as long.
fn marks() {
    let (mut device, module) = open();
    let out = device.allocate(128, "values").unwrap();
    device.fill(out, Pattern::Bits8(0)).unwrap();
    let spin = |device: &mut Cuda, rounds: u32| -> (Mark, Mark) {
        let from = device.mark().unwrap();
        launch(device, module, "spin", 32, &[Arg::InOut(out), rounds.into()]).unwrap();
        (from, device.mark().unwrap())
    };
    spin(&mut device, 1000);
    // The shortest of some: another process may have the GPU in between.
    let mut least = |rounds| {
        let all = [0; 3].map(|_| {
            let (from, to) = spin(&mut device, rounds);
            device.elapsed(from, to).unwrap()
        });
        all.into_iter().fold(f64::INFINITY, f64::min)
    };
    let (short, long) = (least(1_000_000), least(4_000_000));
    // 10^6 rounds of two dependent operations are some ms at any clock: launch overhead of µs is no part of the ratio; the
    // clock may change in between, by less than a factor of two.
    assert!(short > 0.5 && (2.0..8.0).contains(&(long / short)), "{short} ms, {long} ms");
    let old = device.mark().unwrap();
    for _ in 0..4096 {
        device.mark().unwrap();
    }
    let new = device.mark().unwrap();
    let error = device.elapsed(old, new).unwrap_err();
    assert!(matches!(error.problem(), Problem::Mark), "{error}");
    let mut other = Cuda::open(0).unwrap();
    assert!(matches!(other.elapsed(new, new).unwrap_err().problem(), Problem::Mark));
}

fn other_code_is_refused() {
    let (mut device, _) = open();
    let mut other = code(&device);
    other.target.number += 1;
    let error = device.load(&other).unwrap_err();
    assert!(error.to_string().contains("this device for sm_"), "{error}");
    let mut cut = code(&device);
    if let Some(cubin) = &mut cut.cubin {
        cubin.truncate(cubin.len() / 2);
    }
    assert!(matches!(device.load(&cut).unwrap_err().problem(), Problem::Module { .. }));
    let mut none = code(&device);
    none.cubin = None;
    assert!(device.load(&none).unwrap_err().to_string().contains("without machine code"));
    let mut altered = code(&device);
    altered.kernels[0].parameters.pop();
    assert!(device.load(&altered).unwrap_err().to_string().contains("are not the CUBIN's"));
}

/// Handles do not cross, and one going leaves the other whole.
fn two_devices_of_one_gpu() {
    let (mut a, module_a) = open();
    let (mut b, module_b) = open();
    let buffer = a.allocate(4, "a's").unwrap();
    assert!(matches!(b.read(buffer, 0, &mut [0]).unwrap_err().problem(), Problem::Buffer));
    let word = b.allocate(4, "b's").unwrap();
    let arguments = [Arg::InOut(word), 0i64.into(), 7u32.into()];
    assert!(launch(&mut b, module_a, "poke", 1, &arguments).is_err());
    drop(a);
    launch(&mut b, module_b, "poke", 1, &arguments).unwrap();
    assert_eq!(read(&mut b, word, 4), [7, 0xff, 0xff, 0xff]);
}

/// Source, NVRTC, driver: what engines do.
fn compiled_here() {
    let mut device = Cuda::open(0).unwrap();
    let code = compile(&device, &Options { line_info: true, ..Options::default() });
    let module = device.load(&code).unwrap();
    for (_, body) in on_device::ALL {
        body(&mut device, module);
    }
}

fn every_geometry() {
    geometries::ALL.iter().for_each(|s| geometries::right(EngineKind::Cuda, s));
}

/// What compute-sanitizer looks at: memory as it is. The result is right there too.
fn bare_run() {
    let care = Care { poison: false, guards: false };
    planted::clean(&planted::report(EngineKind::Cuda, planted::FILES[0], |o| o.care = care));
}

/// The same bits twenty times, in every tensor: both forms, decode in splits.
fn repetitions() {
    for file in planted::FILES {
        planted::clean(&planted::report(EngineKind::Cuda, file, |o| o.repeat = 20));
    }
}

/// Ids of pages whose product with a page's elements does not fit 31 bits: 58,255 · 64 · 576 > 2^31.
fn far_pages() {
    let shape = geometries::ALL.into_iter().find(|s| s.name == "pages-of-64").unwrap();
    for form in mla_reference::Form::ALL {
        let faults = geometries::faults(EngineKind::Cuda, &shape, form, |o| o.first_page = 58_255);
        let faults = faults.unwrap_or_else(|e| panic!("{e}"));
        assert!(faults.is_empty(), "{form:?}: {faults:?}");
    }
}

/// Runs this binary again, and gives what it said; it must end by itself.
fn child(what: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let ended = child::run(command.env(CHILD, what).env("RUST_BACKTRACE", "0"), LONGEST).unwrap();
    assert_eq!(ended.code(), Some(0), "{}: {}", ended.how(), ended.text());
    String::from_utf8_lossy(&ended.stdout).into_owned()
}

fn illegal_address() {
    let text = child("stray");
    assert!(text.contains("the kernel broke: CUDA_ERROR_ILLEGAL_ADDRESS"), "{text}");
    assert!(text.contains("where: kernel stray, told by cu"), "{text}");
    assert!(text.contains("this process can't use the device any more: start a new one"), "{text}");
    works();
}

fn hung_kernel() {
    let text = child("hang");
    assert!(text.contains("the kernel did not end within 2 s\n  where: kernel hang"), "{text}");
    works();
}

/// What another process did does not reach this one.
fn works() {
    let (mut device, module) = open();
    on_device::ALL[0].1(&mut device, module);
}

fn say(error: &Error) {
    let mut out = std::io::stdout();
    writeln!(out, "{error}").unwrap();
}

fn child_stray() {
    let (mut device, module) = open();
    let out = device.allocate(4, "out").unwrap();
    launch(&mut device, module, "stray", 1, &[Arg::InOut(out), 16u64.into()]).unwrap();
    let error = device.read(out, 0, &mut [0; 4]).unwrap_err();
    say(&error);
    let fault = |e: Error| assert!(matches!(e.problem(), Problem::Fault { .. }), "{e}");
    fault(device.allocate(4, "more").unwrap_err());
    fault(device.synchronise().unwrap_err());
    fault(device.check_guards().unwrap_err());
    fault(device.free(out).unwrap_err());
    drop(device);
    // A new device of this process does not work either, and says so.
    if let Ok(mut again) = Cuda::open(0) {
        fault(again.allocate(4, "again").unwrap_err());
    }
}

fn child_hang() {
    let (mut device, module) = open();
    device.set_patience(PATIENCE);
    let word = device.allocate(4, "word").unwrap();
    device.fill(word, Pattern::Bits8(0)).unwrap();
    launch(&mut device, module, "hang", 1, &[Arg::InOut(word)]).unwrap();
    let started = Instant::now();
    let error = device.synchronise().unwrap_err();
    assert!((PATIENCE..PATIENCE * 3).contains(&started.elapsed()), "{:?}", started.elapsed());
    say(&error);
    let started = Instant::now();
    let hung = |e: Error| assert!(matches!(e.problem(), Problem::Hung { seconds: 2 }), "{e}");
    hung(device.read(word, 0, &mut [0; 4]).unwrap_err());
    hung(device.write(word, 0, &[1, 0, 0, 0]).unwrap_err());
    hung(device.allocate(4, "more").unwrap_err());
    hung(launch(&mut device, module, "hang", 1, &[Arg::InOut(word)]).unwrap_err());
    drop(device);
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}
