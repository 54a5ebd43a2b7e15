/*! A launch: arguments, limits, blocks in parallel, findings together. */

use crate::error::LaunchError;
use crate::exec::block::{Block, Launch};
use crate::finding::{Check, Checks, Finding, Kind, Seen};
use crate::ir::Program;
use crate::mem::global::{Address, Allocation, Memory, View};
use crate::module::Module;
use mla_numeric::tensor_core::TensorCore;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Steps that a warp may take unless told otherwise.
const STEPS: u64 = 200_000_000;
/// Threads that a block may have.
const MOST_THREADS: u32 = 1024;
/// Shared memory of a block, beyond any GPU's.
const MOST_SHARED: u64 = 232_448;
/// Local memory that a block's threads may have together.
const MOST_LOCAL: u64 = 1 << 30;

/// A kernel argument, in the parameter's order.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg {
    /// A pointer that the kernel reads, or reads and writes.
    Pointer(Address),
    /// A pointer to an output: the launch must store every byte of its allocation.
    Output(Address),
    /// 4 bytes.
    U32(u32),
    /// 4 bytes.
    I32(i32),
    /// 8 bytes.
    U64(u64),
    /// 4 bytes.
    F32(f32),
    /// A structure passed by value, as the device lays it out.
    Bytes(Vec<u8>),
}

/// How to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Detectors that are on.
    pub checks: Checks,
    /// Instructions that one warp may run.
    pub step_limit: u64,
    /// Warps of a block in descending order, to show what depends on it.
    pub reverse_warps: bool,
    /// Blocks one after another in order of their index, so that float atomics give the same bits every time.
    pub sequential: bool,
    /// The tensor core; `None`: that of the module's target.
    pub tensor_core: Option<TensorCore>,
    /// Allocations of which the launch must store every byte, besides [`Arg::Output`].
    pub outputs: Vec<Address>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            checks: Checks::all(),
            step_limit: STEPS,
            reverse_warps: false,
            sequential: false,
            tensor_core: None,
            outputs: Vec::new(),
        }
    }
}

/// How much was run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions of warps.
    pub warp_instructions: u64,
    /// Instructions of threads that were not masked out.
    pub thread_instructions: u64,
    /// mma instructions.
    pub mma: u64,
    /// Branches at which lanes parted.
    pub splits: u64,
}

impl Counts {
    fn add(self, o: Counts) -> Counts {
        Counts {
            warp_instructions: self.warp_instructions + o.warp_instructions,
            thread_instructions: self.thread_instructions + o.thread_instructions,
            mma: self.mma + o.mma,
            splits: self.splits + o.splits,
        }
    }
}

/// What a launch did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// By kind and line; empty for a clean launch.
    pub findings: Vec<Finding>,
    /// How much was run.
    pub counts: Counts,
}

impl Outcome {
    /// Whether nothing was found.
    pub fn clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// Findings of one kind.
    pub fn of(&self, kind: Kind) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |f| f.kind == kind)
    }
}

/// Runs a kernel. What it does wrong are findings; memory holds what it stored either way.
///
/// # Errors
/// Where it can't be launched at all: no such kernel, arguments that don't fit its parameters, limits.
#[allow(clippy::too_many_arguments)]
pub fn launch(
    module: &Module,
    kernel: &str,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_shared: u32,
    args: &[Arg],
    memory: &mut Memory,
    options: &Options,
) -> Result<Outcome, LaunchError> {
    let program = match module.program(kernel) {
        Some(Ok(p)) => p,
        Some(Err(issue)) => {
            return Err(LaunchError::Unsupported { name: kernel.to_owned(), issue: issue.clone() });
        }
        None => {
            let known = module.kernels().map(|k| k.name.to_owned()).collect();
            return Err(LaunchError::NoKernel { name: kernel.to_owned(), known });
        }
    };
    let blocks = limits(program, grid, block, dynamic_shared)?;
    let (parameters, mut outputs) = arguments(program, args)?;
    outputs.extend(&options.outputs);
    for &a in &outputs {
        memory.size(a).map_err(|e| LaunchError::Arguments {
            kernel: kernel.to_owned(),
            what: format!("an output: {e}"),
        })?;
    }
    memory.start_launch();
    let data = Allocation::of(&module.image);
    let launch = Launch {
        program,
        view: View { memory, module: &data },
        parameters: &parameters,
        grid,
        threads: block,
        dynamic_shared,
        sm: module.sm,
        core: options.tensor_core,
        options,
    };
    let one = |id: u32| {
        let (sink, counts) = Block::execute(&launch, id);
        (sink.found, counts)
    };
    let none = || (BTreeMap::new(), Counts::default());
    let (found, counts) = if options.sequential {
        (0..blocks).map(one).fold(none(), merge)
    } else {
        (0..blocks).into_par_iter().map(one).reduce(none, merge)
    };
    let mut findings = lines(module, program, grid, found);
    let ended = findings.iter().any(|f| f.kind.check().is_none() && f.kind != Kind::Operand);
    if options.checks.has(Check::Outputs) && !ended {
        findings.extend(unwritten(program, memory, &outputs));
    }
    Ok(Outcome { findings, counts })
}

type Found = BTreeMap<(Kind, u32), Seen>;

/// Findings of two sets of blocks: the place is that of the lowest block.
fn merge((mut a, n): (Found, Counts), (b, m): (Found, Counts)) -> (Found, Counts) {
    for (key, seen) in b {
        match a.entry(key) {
            std::collections::btree_map::Entry::Vacant(e) => drop(e.insert(seen)),
            std::collections::btree_map::Entry::Occupied(mut e) => {
                let count = e.get().count + seen.count;
                if seen.block < e.get().block {
                    e.insert(seen);
                }
                e.get_mut().count = count;
            }
        }
    }
    (a, n.add(m))
}

fn lines(module: &Module, p: &Program, grid: [u32; 3], found: Found) -> Vec<Finding> {
    let [x, y, _] = grid;
    found
        .into_iter()
        .map(|((kind, pc), s)| {
            let (line, (file, source_line)) =
                p.code.get(pc as usize).map_or((0, (0, 0)), |i| (i.line, i.source));
            let source = module.sources.iter().find(|(n, _)| *n == file && source_line != 0);
            Finding {
                kind,
                kernel: p.name.clone(),
                line,
                source_line,
                source_file: source.map_or(String::new(), |(_, name)| name.clone()),
                block: [s.block % x, s.block / x % y, s.block / x / y],
                warp: s.warp,
                lanes: s.lanes,
                detail: s.detail,
                count: s.count,
            }
        })
        .collect()
}

fn unwritten(p: &Program, memory: &Memory, outputs: &[Address]) -> Vec<Finding> {
    let mut all = Vec::new();
    for (i, &a) in outputs.iter().enumerate() {
        let Ok((count, first)) = memory.unstored(a) else { continue };
        if count > 0 {
            all.push(Finding {
                kind: Kind::OutputUnwritten,
                kernel: p.name.clone(),
                line: 0,
                source_line: 0,
                source_file: String::new(),
                block: [0; 3],
                warp: 0,
                lanes: 0,
                detail: format!(
                    "{count} bytes of output {i} ({a:#x}) were never stored, the first at offset {first}"
                ),
                count,
            });
        }
    }
    all
}

/// The number of blocks.
fn limits(p: &Program, grid: [u32; 3], block: [u32; 3], dynamic_shared: u32) -> Result<u32, LaunchError> {
    let error = |what: String| Err(LaunchError::Limits { kernel: p.name.clone(), what });
    let product = |v: [u32; 3]| v.iter().try_fold(1u32, |n, &k| n.checked_mul(k));
    let (Some(blocks), Some(threads)) = (product(grid), product(block)) else {
        return error(format!("grid {grid:?} or block {block:?} is beyond 2^32"));
    };
    if blocks == 0 || threads == 0 || threads > MOST_THREADS {
        return error(format!("grid {grid:?}, block {block:?}: a block has 1 to {MOST_THREADS} threads"));
    }
    if let Some(most) = p.max_threads {
        let fits = if p.exact_threads { block == most } else { product(most).is_some_and(|n| threads <= n) };
        if !fits {
            return error(format!("a block of {block:?}, compiled for {most:?}"));
        }
    }
    let shared = u64::from(p.shared_bytes.next_multiple_of(128)) + u64::from(dynamic_shared);
    if shared > MOST_SHARED {
        return error(format!("{shared} bytes of shared memory, beyond any GPU's {MOST_SHARED}"));
    }
    let local = u64::from(p.local_bytes) * u64::from(threads.next_multiple_of(32));
    if local > MOST_LOCAL {
        return error(format!("{local} bytes of local memory a block"));
    }
    Ok(blocks)
}

fn arguments(p: &Program, args: &[Arg]) -> Result<(Vec<u8>, Vec<Address>), LaunchError> {
    let error = |what: String| Err(LaunchError::Arguments { kernel: p.name.clone(), what });
    if args.len() != p.parameters.len() {
        return error(format!("{} arguments for {} parameters", args.len(), p.parameters.len()));
    }
    let (mut raw, mut outputs) = (vec![0; p.parameter_bytes as usize], Vec::new());
    for (i, (param, arg)) in p.parameters.iter().zip(args).enumerate() {
        let bytes: Vec<u8> = match arg {
            Arg::Pointer(a) | Arg::U64(a) => a.to_le_bytes().into(),
            Arg::Output(a) => {
                outputs.push(*a);
                a.to_le_bytes().into()
            }
            Arg::U32(v) => v.to_le_bytes().into(),
            Arg::I32(v) => v.to_le_bytes().into(),
            Arg::F32(v) => v.to_bits().to_le_bytes().into(),
            Arg::Bytes(b) => b.clone(),
        };
        if bytes.len() != param.bytes as usize {
            let name = &param.name;
            return error(format!("argument {i} has {} bytes, {name} takes {}", bytes.len(), param.bytes));
        }
        let at = param.offset as usize;
        raw[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    Ok((raw, outputs))
}
