/*! What the machine saw a kernel do that it must not. */

use std::collections::BTreeMap;
use std::fmt;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident $text:literal $group:ident),+ $(,)?) => {
        /// What a finding is about.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Kind { $($(#[$doc])* $name),+ }

        impl Kind {
            /// Every kind.
            pub const ALL: &'static [Kind] = &[$(Kind::$name),+];
            /// Its name in reports.
            pub const fn name(self) -> &'static str {
                match self { $(Kind::$name => $text),+ }
            }
            /// The check that finds it; `None`: always on.
            pub const fn check(self) -> Option<Check> {
                match self { $(Kind::$name => kinds!(@ $group)),+ }
            }
        }
    };
    (@ Always) => { None };
    (@ $group:ident) => { Some(Check::$group) };
}

kinds! {
    /// A pointer into no allocation, or past the end of one.
    GlobalOutOfBounds "global-out-of-bounds" Bounds,
    /// Shared memory past the block's.
    SharedOutOfBounds "shared-out-of-bounds" Bounds,
    /// Local memory past the thread's.
    LocalOutOfBounds "local-out-of-bounds" Bounds,
    /// Beyond the kernel's parameters.
    ParameterOutOfBounds "parameter-out-of-bounds" Bounds,
    /// A store to memory that the host protected.
    ReadOnly "read-only" Bounds,
    /// An address that is no multiple of the access's width.
    Misaligned "misaligned" Alignment,
    /// Global bytes that nobody wrote.
    GlobalUninitialised "global-uninitialised" Initialised,
    /// Shared bytes that nobody wrote.
    SharedUninitialised "shared-uninitialised" Initialised,
    /// A register that this lane never wrote.
    RegisterUninitialised "register-uninitialised" Registers,
    /// Shared bytes read that another warp wrote, with nothing that orders the two.
    RaceReadAfterWrite "race-read-after-write" Races,
    /// Shared bytes written by two warps, unordered.
    RaceWriteAfterWrite "race-write-after-write" Races,
    /// Shared bytes written that another warp read, unordered.
    RaceWriteAfterRead "race-write-after-read" Races,
    /// A plain access and an atomic one, unordered.
    RaceWithAtomic "race-with-atomic" Races,
    /// Lanes of one warp exchange through shared memory without a warp barrier.
    WarpHazard "warp-hazard" Races,
    /// Bytes touched while an asynchronous copy to them is not known to be done.
    InFlight "async-in-flight" Async,
    /// A bulk copy that nobody waited for.
    NeverWaited "async-never-waited" Async,
    /// Two blocks wrote the same global bytes.
    BlockOverlap "global-block-overlap" Overlap,
    /// Bytes of a declared output that the launch never stored.
    OutputUnwritten "output-unwritten" Outputs,
    /// A shuffle from a lane that does not take part.
    ShuffleInactive "shuffle-from-inactive-lane" Registers,
    /// Lanes that an instruction needs together can't meet.
    Divergence "barrier-divergence" Always,
    /// Nobody can go on.
    Deadlock "deadlock" Always,
    /// A warp ran longer than the limit.
    StepLimit "step-limit" Always,
    /// `trap`.
    Trap "trap" Always,
    /// An operand that the instruction can't take (a branch index, a barrier's count, a copy's size).
    Operand "operand" Always,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A detector that can be turned off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Check {
    /// Accesses outside of memory (still not made when off: reads give zeros).
    Bounds,
    /// Misaligned accesses (likewise).
    Alignment,
    /// Uninitialised global and shared memory.
    Initialised,
    /// Uninitialised registers, shuffles from inactive lanes.
    Registers,
    /// Races on shared memory.
    Races,
    /// Asynchronous copies in flight.
    Async,
    /// Blocks that write the same bytes.
    Overlap,
    /// Outputs that were not stored.
    Outputs,
}

impl Check {
    /// Every check.
    pub const ALL: [Check; 8] = [
        Check::Bounds,
        Check::Alignment,
        Check::Initialised,
        Check::Registers,
        Check::Races,
        Check::Async,
        Check::Overlap,
        Check::Outputs,
    ];
}

/// A set of checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks(u32);

impl Checks {
    /// Every check on.
    pub const fn all() -> Self {
        Checks(!0)
    }
    /// Every check off.
    pub const fn none() -> Self {
        Checks(0)
    }
    /// This set without one check.
    #[must_use]
    pub const fn without(self, c: Check) -> Self {
        Checks(self.0 & !(1 << c as u32))
    }
    /// This set with one check.
    #[must_use]
    pub const fn with(self, c: Check) -> Self {
        Checks(self.0 | 1 << c as u32)
    }
    /// Whether a check is on.
    pub const fn has(self, c: Check) -> bool {
        self.0 >> c as u32 & 1 != 0
    }
}

/// One thing that a kernel did, where it first did it, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub kind: Kind,
    /// The kernel.
    pub kernel: String,
    /// Line of the PTX, 0 where it is no instruction.
    pub line: u32,
    /// Line of the source by `.loc`, 0 where the PTX has none.
    pub source_line: u32,
    /// Name of that source by `.file`, empty where the PTX has none.
    pub source_file: String,
    /// The first block that did it.
    pub block: [u32; 3],
    /// The first warp of it.
    pub warp: u32,
    /// Lanes of that warp.
    pub lanes: u32,
    /// In words.
    pub detail: String,
    /// Accesses, over all blocks.
    pub count: u64,
}

/// `" of NAME"`, nothing without a name.
struct Of<'a>(&'a str);

impl fmt::Display for Of<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " of {}", self.0) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding {
            kind,
            kernel,
            line,
            source_line,
            source_file,
            block: [x, y, z],
            warp,
            lanes,
            detail,
            count,
        } = self;
        write!(f, "{kind} in {kernel}, PTX line {line}")?;
        if *source_line != 0 {
            write!(f, " (source line {source_line}{})", Of(source_file))?;
        }
        write!(f, ", block ({x}, {y}, {z}), warp {warp}, lanes {lanes:#010x}, {count} times: {detail}")
    }
}

/// Where an instruction is, for a finding.
#[derive(Clone, Copy)]
pub struct At {
    pub pc: u32,
    pub warp: u32,
    pub lane: u32,
}

/// Findings of a block; the same kind at the same instruction is one finding.
#[derive(Debug)]
pub struct Sink {
    pub checks: Checks,
    block: u32,
    pub found: BTreeMap<(Kind, u32), Seen>,
}

/// A finding before lines and names are known.
#[derive(Clone, Debug)]
pub struct Seen {
    pub block: u32,
    pub warp: u32,
    pub lanes: u32,
    pub detail: String,
    pub count: u64,
}

impl Sink {
    pub fn new(checks: Checks, block: u32) -> Self {
        Sink { checks, block, found: BTreeMap::new() }
    }

    #[cold]
    #[inline(never)]
    pub fn report(&mut self, kind: Kind, at: At, detail: impl FnOnce() -> String) {
        if kind.check().is_some_and(|c| !self.checks.has(c)) {
            return;
        }
        let block = self.block;
        let (warp, lanes) = (at.warp, 1u32.checked_shl(at.lane).unwrap_or(0));
        self.found
            .entry((kind, at.pc))
            .and_modify(|s| {
                s.count += 1;
                if s.warp == warp {
                    s.lanes |= lanes;
                }
            })
            .or_insert_with(|| Seen { block, warp, lanes, detail: detail(), count: 1 });
    }
}
