/*!
Shared memory of a block and its shadow.

Per granule (the smallest access that the kernel makes): who wrote it last and when, whether it is initialised, whether
an asynchronous copy to it is under way, which warp changed it atomically, and when each warp last read it. "When" is
a warp's own count of barriers. Every warp has a clock vector: the latest count of every other warp that it is ordered
after, joined at barriers. Two accesses conflict where the other's count is later than what I am ordered after. That
does not depend on the order in which the machine runs warps: a race is found although the numbers came out right.

The last entry of a clock vector belongs to bulk copies, which no warp writes.
*/

use crate::finding::{At, Check, Kind, Sink};

/// Last write of a granule: count, warp, lane and two marks in one word.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Cell {
    count: u32,
    warp: u16,
    lane: u8,
    marks: u8,
}

const INITIALISED: u8 = 1;
const FLYING: u8 = 2;
/// Several lanes of the warp read the granule since its last barrier.
const SEVERAL: u32 = 63;

/// How an access relates to the shadow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Plain,
    /// By atom or red: does not conflict with its like.
    Atomic,
    /// An asynchronous copy is issued: the bytes are not there yet.
    Issue,
}

/// Shared memory of one block.
pub struct Shared {
    pub bytes: Vec<u8>,
    cells: Vec<Cell>,
    /// Last read of each granule by each warp, warp after warp: count << 6 | lane.
    reads: Vec<u32>,
    /// Last atomic of a granule: count, warp; empty until the first.
    atomics: Vec<(u32, u16)>,
    warps: usize,
    shift: u32,
    watch: bool,
    races: bool,
}

/// Whether the write that a cell tells of comes before an access.
#[inline(always)]
fn ordered(c: Cell, at: At, clock: &[u32]) -> bool {
    if u32::from(c.warp) == at.warp {
        u32::from(c.lane) == at.lane || c.count != clock[at.warp as usize] || c.count == 0
    } else {
        c.count <= clock[usize::from(c.warp)]
    }
}

impl Shared {
    pub fn new(bytes: usize, warps: usize, granule: u32, sink: &Sink) -> Self {
        let races = sink.checks.has(Check::Races);
        let watch = races || sink.checks.has(Check::Initialised) || sink.checks.has(Check::Async);
        let granules = if watch { bytes.div_ceil(granule as usize) } else { 0 };
        Shared {
            bytes: vec![0xcd; bytes],
            cells: vec![Cell::default(); granules],
            reads: if races { vec![0; granules * warps] } else { Vec::new() },
            atomics: Vec::new(),
            warps,
            shift: granule.trailing_zeros(),
            watch,
            races,
        }
    }

    /// Whether `n` bytes at `a` are there and aligned; a finding where not.
    #[inline(always)]
    fn place(&self, sink: &mut Sink, at: At, a: u64, n: u32, what: &str) -> Option<usize> {
        let size = self.bytes.len() as u64;
        if a + u64::from(n) > size {
            sink.report(Kind::SharedOutOfBounds, at, || format!("{what} of {n} bytes at {a} of {size}"));
            return None;
        }
        if a & u64::from(n - 1) != 0 {
            sink.report(Kind::Misaligned, at, || format!("shared {what} of {n} bytes at {a}"));
            return None;
        }
        Some(a as usize)
    }

    /// `n` bytes (a power of two, at most 16) at `a`.
    #[inline]
    #[allow(clippy::too_many_arguments)]
    pub fn read(
        &mut self,
        sink: &mut Sink,
        at: At,
        clock: &[u32],
        a: u64,
        n: u32,
        access: Access,
        out: &mut [u8; 16],
    ) {
        let Some(a) = self.place(sink, at, a, n, "read") else { return };
        let n = n as usize;
        match n {
            16 => out.copy_from_slice(&self.bytes[a..a + 16]),
            4 => out[..4].copy_from_slice(&self.bytes[a..a + 4]),
            _ => out[..n].copy_from_slice(&self.bytes[a..a + n]),
        }
        if self.watch {
            self.check_read(sink, at, clock, a, n, access);
        }
    }

    #[inline]
    fn check_read(&mut self, sink: &mut Sink, at: At, clock: &[u32], a: usize, n: usize, access: Access) {
        let (first, last) = (a >> self.shift, (a + n - 1) >> self.shift);
        let mine = clock[at.warp as usize];
        // Neighbours were mostly written together.
        let mut bad = !self.atomics.is_empty();
        let mut known = Cell { marks: INITIALISED, ..Cell::default() };
        for &c in &self.cells[first..=last] {
            if c != known {
                bad |= c.marks != INITIALISED || !ordered(c, at, clock);
                known = c;
            }
        }
        if bad {
            self.judge_reads(sink, at, clock, first..=last, access);
        }
        if !self.races || access == Access::Atomic {
            return;
        }
        let stamp = mine << 6 | at.lane;
        let own = at.warp as usize * self.cells.len();
        for r in &mut self.reads[own + first..=own + last] {
            *r = if (*r >> 6 == mine) & (*r != stamp) { mine << 6 | SEVERAL } else { stamp };
        }
    }

    #[cold]
    #[inline(never)]
    fn judge_reads(
        &mut self,
        sink: &mut Sink,
        at: At,
        clock: &[u32],
        granules: std::ops::RangeInclusive<usize>,
        access: Access,
    ) {
        for g in granules {
            let c = self.cells[g];
            if c.marks != INITIALISED || !ordered(c, at, clock) || !self.atomics.is_empty() {
                self.judge_read(sink, at, clock, g, access);
            }
        }
    }

    fn judge_read(&mut self, sink: &mut Sink, at: At, clock: &[u32], g: usize, access: Access) {
        let (c, byte) = (self.cells[g], g << self.shift);
        if c.marks & FLYING != 0 {
            sink.report(Kind::InFlight, at, || {
                format!("read of shared byte {byte} while an asynchronous copy to it may be under way")
            });
            return;
        }
        if c.marks & INITIALISED == 0 {
            sink.report(Kind::SharedUninitialised, at, || format!("read of shared byte {byte}"));
        }
        if !self.races {
            return;
        }
        if access != Access::Atomic
            && let Some(&(count, warp)) = self.atomics.get(g)
            && u32::from(warp) != at.warp
            && count > clock[warp as usize]
        {
            sink.report(Kind::RaceWithAtomic, at, || {
                format!("shared byte {byte} is changed atomically by warp {warp}")
            });
        }
        if c.count == 0 {
            return;
        }
        if u32::from(c.warp) != at.warp {
            if c.count > clock[c.warp as usize] {
                let who = self.writer(c.warp);
                sink.report(Kind::RaceReadAfterWrite, at, || {
                    format!("shared byte {byte} is written by {who} with no barrier between")
                });
            }
        } else if u32::from(c.lane) != at.lane && c.count == clock[at.warp as usize] {
            sink.report(Kind::WarpHazard, at, || {
                format!("shared byte {byte} is written by lane {} with no warp barrier between", c.lane)
            });
        }
    }

    fn writer(&self, warp: u16) -> String {
        if usize::from(warp) == self.warps { "a bulk copy".to_owned() } else { format!("warp {warp}") }
    }

    /// Stores `v` (a power of two of bytes, at most 16) at `a`.
    #[inline]
    pub fn write(&mut self, sink: &mut Sink, at: At, clock: &[u32], a: u64, v: &[u8], access: Access) {
        let n = v.len() as u32;
        let Some(a) = self.place(sink, at, a, n, "write") else { return };
        self.bytes[a..a + v.len()].copy_from_slice(v);
        if self.watch {
            self.mark(sink, at, clock, a, v.len(), access);
        }
    }

    /// An asynchronous copy of `n` bytes (a multiple of `align`) to `a` is issued; whether it can be.
    #[allow(clippy::too_many_arguments)]
    pub fn issue(&mut self, sink: &mut Sink, at: At, clock: &[u32], a: u64, n: u32, align: u32) -> bool {
        let size = self.bytes.len() as u64;
        if a + u64::from(n) > size {
            sink.report(Kind::SharedOutOfBounds, at, || format!("copy of {n} bytes to {a} of {size}"));
            return false;
        }
        if a & u64::from(align - 1) != 0 {
            sink.report(Kind::Misaligned, at, || {
                format!("copy of {n} bytes to shared {a}, not a multiple of {align}")
            });
            return false;
        }
        if self.watch && n > 0 {
            self.mark(sink, at, clock, a as usize, n as usize, Access::Issue);
        }
        true
    }

    /// The bytes of an issued copy arrive, written by `at.warp` (which may be the bulk copies' entry).
    pub fn land(&mut self, at: At, count: u32, a: usize, v: &[u8]) {
        let Some(place) = self.bytes.get_mut(a..a + v.len()) else { return };
        place.copy_from_slice(v);
        if self.watch && !v.is_empty() {
            let cell = Cell { count, warp: at.warp as u16, lane: at.lane as u8, marks: INITIALISED };
            self.cells[a >> self.shift..=(a + v.len() - 1) >> self.shift].fill(cell);
        }
    }

    #[inline]
    fn mark(&mut self, sink: &mut Sink, at: At, clock: &[u32], a: usize, n: usize, access: Access) {
        let (first, last) = (a >> self.shift, (a + n - 1) >> self.shift);
        let (mine, me) = (clock[at.warp as usize], at.warp as usize);
        let marks = if access == Access::Issue { FLYING } else { INITIALISED };
        let mut bad = !self.atomics.is_empty() || access == Access::Atomic;
        let mut known = Cell::default();
        for &c in &self.cells[first..=last] {
            if c != known {
                bad |= c.marks & FLYING != 0 || self.races && !ordered(c, at, clock);
                known = c;
            }
        }
        if self.races {
            let mut late = false;
            for (o, &seen) in clock[..self.warps].iter().enumerate() {
                let reads = &self.reads[o * self.cells.len()..][first..=last];
                if o == me {
                    late |= reads.iter().any(|&r| r >> 6 == mine && r & 63 != at.lane && r != 0);
                } else {
                    late |= reads.iter().fold(false, |late, &r| late | (r >> 6 > seen));
                }
            }
            bad |= late;
        }
        if bad {
            for g in first..=last {
                self.judge_write(sink, at, clock, g, access);
            }
        }
        if access == Access::Atomic {
            if self.atomics.is_empty() {
                self.atomics = vec![(0, 0); self.cells.len()];
            }
            self.atomics[first..=last].fill((mine, at.warp as u16));
            self.cells[first..=last].iter_mut().for_each(|c| c.marks |= INITIALISED);
        } else {
            let cell = Cell { count: mine, warp: at.warp as u16, lane: at.lane as u8, marks };
            self.cells[first..=last].fill(cell);
            if !self.atomics.is_empty() {
                self.atomics[first..=last].fill((0, 0));
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn judge_write(&self, sink: &mut Sink, at: At, clock: &[u32], g: usize, access: Access) {
        let (c, byte, me) = (self.cells[g], g << self.shift, at.warp as usize);
        let mine = clock[me];
        if c.marks & FLYING != 0 {
            sink.report(Kind::InFlight, at, || {
                format!("write of shared byte {byte} while an asynchronous copy to it may be under way")
            });
            return;
        }
        if !self.races {
            return;
        }
        if access != Access::Atomic
            && let Some(&(count, warp)) = self.atomics.get(g)
            && usize::from(warp) != me
            && count > clock[warp as usize]
        {
            sink.report(Kind::RaceWithAtomic, at, || {
                format!("shared byte {byte} is changed atomically by warp {warp}")
            });
        }
        if c.count != 0 {
            if usize::from(c.warp) != me {
                if c.count > clock[c.warp as usize] {
                    let kind = if access == Access::Atomic {
                        Kind::RaceWithAtomic
                    } else {
                        Kind::RaceWriteAfterWrite
                    };
                    let who = self.writer(c.warp);
                    sink.report(kind, at, || format!("shared byte {byte} is also written by {who}"));
                }
            } else if u32::from(c.lane) != at.lane && c.count == mine {
                sink.report(Kind::WarpHazard, at, || {
                    format!("shared byte {byte} is also written by lane {}", c.lane)
                });
            }
        }
        for (o, &r) in self.reads[g..].iter().step_by(self.cells.len().max(1)).enumerate() {
            if r == 0 {
                continue;
            }
            if o != me {
                if r >> 6 > clock[o] {
                    sink.report(Kind::RaceWriteAfterRead, at, || {
                        format!("shared byte {byte} is read by warp {o} with no barrier between")
                    });
                }
            } else if r >> 6 == mine && r & 63 != at.lane {
                sink.report(Kind::WarpHazard, at, || {
                    format!("shared byte {byte} is read by another lane with no warp barrier between")
                });
            }
        }
    }

    /// The bytes of an mbarrier count as initialised and are nobody's.
    pub fn adopt(&mut self, a: usize, n: usize) {
        if self.watch && n > 0 {
            let cell = Cell { marks: INITIALISED, ..Cell::default() };
            if let Some(cells) = self.cells.get_mut(a >> self.shift..=(a + n - 1) >> self.shift) {
                cells.fill(cell);
            }
        }
    }
}
