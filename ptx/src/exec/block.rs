/*!
A block: its warps one after another, each until it has to wait; barriers between them; what no warp can wait out is
a deadlock.
*/

use super::mbarrier::Phases;
use super::shared::Shared;
use super::warp::{Place, State, Warp, join, lanes};
use crate::finding::{At, Kind, Sink};
use crate::ir::{Inst, Program, Reduce};
use crate::launch::{Counts, Options};
use crate::mem::global::View;
use mla_numeric::tensor_core::TensorCore;
use std::collections::BTreeMap;

/// What every block of a launch shares.
pub struct Launch<'a> {
    pub program: &'a Program,
    pub view: View<'a>,
    pub parameters: &'a [u8],
    pub grid: [u32; 3],
    pub threads: [u32; 3],
    pub dynamic_shared: u32,
    pub sm: u32,
    pub core: Option<TensorCore>,
    pub options: &'a Options,
}

/// The block can't go on; the finding is in the sink.
pub struct Fatal;

/// Barriers that a block has.
const BARRIERS: usize = 16;

/// One named barrier.
#[derive(Default)]
struct Named {
    /// Threads that arrived, in whole warps.
    arrived: u32,
    /// Threads it waits for; `None`: all.
    want: Option<u32>,
    waiting: Vec<usize>,
    clock: Vec<u32>,
    reduce: Option<Reduce>,
    value: u32,
    /// Lanes that gave a predicate.
    voters: u32,
    at: Option<At>,
}

/// A block in execution.
pub struct Block<'a> {
    pub launch: &'a Launch<'a>,
    pub id: u32,
    pub sink: Sink,
    pub shared: Shared,
    pub counts: Counts,
    pub check_registers: bool,
    pub watch_overlap: bool,
    pub phases: BTreeMap<u32, Phases>,
    /// Bulk copies that arrived: their entry of the clock vectors.
    pub bulk_clock: u32,
    pub warps: usize,
    named: Vec<Named>,
}

impl<'a> Block<'a> {
    /// Runs block `id`; findings and counts.
    pub fn execute(launch: &'a Launch<'a>, id: u32) -> (Sink, Counts) {
        use crate::finding::Check;
        let p = launch.program;
        let threads = launch.threads.iter().product::<u32>();
        let warps = threads.div_ceil(32) as usize;
        let checks = launch.options.checks;
        let sink = Sink::new(checks, id);
        let fixed = if p.dynamic_shared { p.shared_bytes.next_multiple_of(128) } else { p.shared_bytes };
        let bytes = fixed + if p.dynamic_shared { launch.dynamic_shared } else { 0 };
        let mut block = Block {
            launch,
            id,
            shared: Shared::new(bytes as usize, warps, p.granule, &sink),
            sink,
            counts: Counts::default(),
            check_registers: checks.has(Check::Registers),
            watch_overlap: checks.has(Check::Overlap),
            phases: BTreeMap::new(),
            bulk_clock: 0,
            warps,
            named: (0..BARRIERS).map(|_| Named::default()).collect(),
        };
        let [gx, gy, _] = launch.grid;
        let place = Place {
            block: [id % gx, id / gx % gy, id / gx / gy],
            grid: launch.grid,
            threads: launch.threads,
            dynamic_shared: launch.dynamic_shared,
        };
        let mut all: Vec<Warp> = (0..warps).map(|i| Warp::new(p, i, threads, warps, &place)).collect();
        if block.rounds(&mut all).is_ok() {
            block.leftovers();
        }
        block.counts.warp_instructions = all.iter().map(|w| w.steps).sum();
        (block.sink, block.counts)
    }

    fn rounds(&mut self, all: &mut [Warp]) -> Result<(), Fatal> {
        let n = all.len();
        loop {
            let before: u64 = all.iter().map(|w| w.steps).sum();
            for k in 0..n {
                let i = if self.launch.options.reverse_warps { n - 1 - k } else { k };
                if all[i].state == State::Ready {
                    self.run(&mut all[i])?;
                }
            }
            if all.iter().all(|w| w.state == State::Done) {
                return Ok(());
            }
            let released = self.release(all);
            if !released && all.iter().map(|w| w.steps).sum::<u64>() == before {
                return Err(self.deadlock(all));
            }
        }
    }

    /// A finding that ends the block.
    pub fn fatal(&mut self, kind: Kind, at: At, detail: String) -> Fatal {
        self.sink.report(kind, at, || detail);
        Fatal
    }

    /// A warp comes to a barrier.
    pub fn arrive_barrier(
        &mut self,
        w: &mut Warp,
        x: &Inst,
        m: u32,
        pc: u32,
        arrive: bool,
        reduce: Option<Reduce>,
    ) -> Result<(), Fatal> {
        let first = |w: &Warp, i: usize| w.regs.get32(x.src[i])[(m.trailing_zeros() & 31) as usize];
        let (id, count) = (first(w, 0), first(w, 1));
        let at = w.at(pc, m.trailing_zeros() as usize);
        if id as usize >= BARRIERS {
            return Err(self.fatal(Kind::Operand, at, format!("barrier {id} of {BARRIERS}")));
        }
        if count % 32 != 0 {
            let detail = format!("a barrier of {count} threads, not a multiple of 32");
            return Err(self.fatal(Kind::Operand, at, detail));
        }
        let b = &mut self.named[id as usize];
        let want = (count != 0).then_some(count);
        if b.arrived > 0 && b.want != want {
            let detail = format!(
                "barrier {id} is for {} threads here and for {} where others wait",
                want.map_or("all".into(), |n| n.to_string()),
                b.want.map_or("all".into(), |n| n.to_string())
            );
            return Err(self.fatal(Kind::Operand, at, detail));
        }
        b.want = want;
        b.arrived += 32;
        b.clock.resize(w.clock.len(), 0);
        join(&mut b.clock, &w.clock);
        b.at = Some(at);
        if let Some(kind) = reduce {
            if b.reduce.is_none() {
                b.value = u32::from(kind == Reduce::And);
                b.voters = 0;
            }
            b.reduce = Some(kind);
            let yes = w.regs.pred(x.src[2]) & m;
            b.value = match kind {
                Reduce::And => b.value & u32::from(yes == m),
                Reduce::Or => b.value | u32::from(yes != 0),
                Reduce::Popc => b.value + yes.count_ones(),
            };
            b.voters += m.count_ones();
            w.reduced = Some((x.dst[0], m));
        }
        if arrive {
            w.tick();
        } else {
            b.waiting.push(w.id);
        }
        Ok(())
    }

    /// Lets warps go whose barrier is complete; whether there were any.
    fn release(&mut self, all: &mut [Warp]) -> bool {
        let live = all.iter().filter(|w| w.state != State::Done).count() as u32 * 32;
        let mut any = false;
        for b in &mut self.named {
            if b.arrived == 0 || b.arrived < b.want.unwrap_or(live) {
                continue;
            }
            let done = std::mem::take(b);
            any = true;
            for i in done.waiting {
                let Some(w) = all.get_mut(i) else { continue };
                w.join(&done.clock);
                w.tick();
                w.state = State::Ready;
                if let Some((reg, m)) = w.reduced.take() {
                    match done.reduce {
                        Some(Reduce::Popc) => w.regs.put32(reg, m, &[done.value; 32]),
                        _ => w.regs.put_pred(reg, m, if done.value != 0 { !0 } else { 0 }),
                    }
                }
            }
        }
        any
    }

    fn deadlock(&mut self, all: &[Warp]) -> Fatal {
        let code = &self.launch.program.code;
        let line = |pc: u32| code.get(pc as usize).map_or(0, |x| x.line);
        let mut places: Vec<String> = Vec::new();
        let mut at = At { pc: 0, warp: 0, lane: 0 };
        for w in all.iter().filter(|w| w.state != State::Done) {
            for g in &w.groups {
                let what = match (w.state, g.wait) {
                    (State::Barrier, _) => {
                        format!("at the barrier of PTX line {}", line(g.pc.saturating_sub(1)))
                    }
                    (_, super::warp::Wait::Phase(a, parity)) => {
                        let why = self
                            .phases
                            .get(&a)
                            .map_or_else(|| "which was never initialised".to_owned(), Phases::describe);
                        format!("at PTX line {} for phase {parity} of the mbarrier at {a}, {why}", line(g.pc))
                    }
                    _ => format!("at PTX line {}", line(g.pc)),
                };
                if places.is_empty() {
                    let pc = if w.state == State::Barrier { g.pc.saturating_sub(1) } else { g.pc };
                    at = w.at(pc, g.mask.trailing_zeros() as usize);
                }
                places.push(format!("warp {} ({:#010x}) {what}", w.id, g.mask));
            }
        }
        let gone = all.iter().filter(|w| w.state == State::Done).count();
        places.truncate(8);
        self.fatal(
            Kind::Deadlock,
            at,
            format!("nobody can go on: {}; {gone} warps have ended", places.join("; ")),
        )
    }

    /// Findings for each lane of `m`.
    pub fn each(&mut self, w: &Warp, m: u32, pc: u32, kind: Kind, detail: impl Fn(usize) -> String) {
        for l in lanes(m) {
            self.sink.report(kind, w.at(pc, l), || detail(l));
        }
    }
}
