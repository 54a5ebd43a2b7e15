/*!
mbarriers and `cp.async.bulk`.

A phase is over when its arrivals are all there and the bytes that it expects have arrived. A bulk copy lands at the
latest legal moment: when somebody who waits for its mbarrier finds nothing else missing. Until then its bytes are in
flight. An arrival gives the barrier the arriving warp's clocks, the end of a phase gives them to whoever waits for it,
and the copies' own writes are ordered before exactly those.

Of a warp, arrivals count for the whole warp's earlier accesses: a missing `__syncwarp` before one lane's arrival is not seen.
*/

use super::block::Block;
use super::regs::LANES;
use super::shared::Access;
use super::warp::{Flow, Warp, join, lanes};
use crate::finding::{At, Kind};
use crate::ir::{Inst, Mbarrier, Reg};
use crate::mem::within;

/// A bulk copy that has not landed.
struct Bulk {
    at: At,
    to: u32,
    from: u64,
    bytes: u32,
}

/// State of one mbarrier.
#[derive(Default)]
pub struct Phases {
    expected: i64,
    pending: i64,
    /// Bytes expected and not landed, of the current phase.
    bytes: i64,
    /// Phases that are over.
    over: u32,
    clock: Vec<u32>,
    /// Clocks of the phases that are over.
    done: Vec<u32>,
    copies: Vec<Bulk>,
}

impl Phases {
    /// In words, for a deadlock.
    pub fn describe(&self) -> String {
        let flying: u32 = self.copies.iter().map(|c| c.bytes).sum();
        format!(
            "whose phase {} still wants {} arrivals and {} bytes ({flying} under way)",
            self.over & 1,
            self.pending,
            self.bytes
        )
    }

    fn finish_if_complete(&mut self) -> bool {
        if self.pending != 0 || self.bytes != 0 {
            return false;
        }
        self.over = self.over.wrapping_add(1);
        self.pending = self.expected;
        let n = self.clock.len();
        self.done.resize(n, 0);
        join(&mut self.done, &self.clock);
        true
    }

    /// Whether the phase of a parity is over: the current one is of the other parity.
    fn over(&self, parity: u32) -> bool {
        self.over & 1 != parity & 1
    }
}

/// Largest count of arrivals, by the PTX manual.
const MOST_ARRIVALS: u32 = (1 << 20) - 1;

impl Block<'_> {
    /// Whether somebody who waits for a phase can go on; lands copies that complete it.
    pub fn phase_done(&mut self, a: u32, parity: u32) -> bool {
        let Some(p) = self.phases.get(&a) else { return false };
        if p.over(parity) {
            return true;
        }
        if p.pending == 0 && !p.copies.is_empty() {
            self.land(a);
        }
        self.phases.get(&a).is_some_and(|p| p.over(parity))
    }

    /// Every copy of the mbarrier at `a` arrives.
    fn land(&mut self, a: u32) {
        let Some(p) = self.phases.get_mut(&a) else { return };
        let copies = std::mem::take(&mut p.copies);
        self.bulk_clock += 1;
        let count = self.bulk_clock;
        for c in &copies {
            let mut row = vec![0; c.bytes as usize];
            for (i, part) in row.chunks_mut(16).enumerate() {
                let mut raw = [0; 16];
                let _ = self.launch.view.read(c.from + 16 * i as u64, 16, &mut raw);
                part.copy_from_slice(&raw[..part.len()]);
            }
            let at = At { warp: self.warps as u32, lane: 0, ..c.at };
            self.shared.land(at, count, c.to as usize, &row);
        }
        let warps = self.warps;
        if let Some(p) = self.phases.get_mut(&a) {
            p.bytes -= copies.iter().map(|c| i64::from(c.bytes)).sum::<i64>();
            if let Some(e) = p.clock.get_mut(warps) {
                *e = count;
            }
            p.finish_if_complete();
        }
    }

    /// The address of an mbarrier; findings where it can't be one.
    fn object(&mut self, w: &Warp, pc: u32, lane: usize, a: u64) -> Option<u32> {
        let at = w.at(pc, lane);
        let (size, a) = (self.shared.bytes.len() as u64, within(a) & 0xffff_ffff);
        if a + 8 > size {
            self.sink.report(Kind::SharedOutOfBounds, at, || format!("mbarrier at {a} of {size}"));
        } else if a & 7 != 0 {
            self.sink.report(Kind::Misaligned, at, || format!("mbarrier at shared {a}"));
        } else {
            return Some(a as u32);
        }
        None
    }

    fn known(&mut self, w: &Warp, pc: u32, lane: usize, a: u32) -> bool {
        let there = self.phases.contains_key(&a);
        if !there {
            let at = w.at(pc, lane);
            self.sink
                .report(Kind::SharedUninitialised, at, || format!("mbarrier at {a} was never initialised"));
        }
        there
    }

    pub fn mbarrier(&mut self, w: &mut Warp, x: &Inst, m: u32, pc: u32, kind: Mbarrier) {
        let a = w.regs.get64(x.src[0]).map(|a| a.wrapping_add(x.offset as u64));
        let count = if x.src[1] == Reg::None { [1; LANES] } else { w.regs.get32(x.src[1]) };
        let bytes = w.regs.get32(x.src[2]);
        let mut state = [0u64; LANES];
        for l in lanes(m) {
            let Some(a) = self.object(w, pc, l, a[l]) else { continue };
            match kind {
                Mbarrier::Init => self.init(w, pc, l, a, count[l]),
                Mbarrier::Inval => {
                    self.phases.remove(&a);
                }
                Mbarrier::Arrive { drop } => {
                    if self.known(w, pc, l, a) {
                        self.arrive(
                            w,
                            pc,
                            l,
                            a,
                            i64::from(count[l]),
                            i64::from(bytes[l]),
                            drop,
                            &mut state[l],
                        );
                    }
                }
                Mbarrier::ExpectTx => {
                    if self.known(w, pc, l, a)
                        && let Some(p) = self.phases.get_mut(&a)
                    {
                        p.bytes += i64::from(bytes[l]);
                    }
                }
                Mbarrier::Wait { .. } => {}
            }
        }
        if matches!(kind, Mbarrier::Arrive { .. }) {
            w.tick();
            w.regs.put64(x.dst[0], m, &state);
        }
    }

    fn init(&mut self, w: &Warp, pc: u32, lane: usize, a: u32, count: u32) {
        let at = w.at(pc, lane);
        if count == 0 || count > MOST_ARRIVALS {
            self.sink.report(Kind::Operand, at, || format!("mbarrier of {count} arrivals"));
        }
        self.shared.write(&mut self.sink, at, &w.clock, u64::from(a), &[0; 8], Access::Plain);
        self.shared.adopt(a as usize, 8);
        let n = i64::from(count);
        let clock = vec![0; w.clock.len()];
        self.phases
            .insert(a, Phases { expected: n, pending: n, done: clock.clone(), clock, ..Phases::default() });
    }

    #[allow(clippy::too_many_arguments)]
    fn arrive(
        &mut self,
        w: &Warp,
        pc: u32,
        lane: usize,
        a: u32,
        n: i64,
        bytes: i64,
        drop: bool,
        state: &mut u64,
    ) {
        // The phase waits for copies alone: they land, since nobody will say that it is over before this arrival.
        if self.phases.get(&a).is_some_and(|p| p.pending == 0 && !p.copies.is_empty()) {
            self.land(a);
        }
        let Some(p) = self.phases.get_mut(&a) else { return };
        *state = u64::from(p.over);
        p.bytes += bytes;
        join(&mut p.clock, &w.clock);
        if n > p.pending {
            let (left, at) = (p.pending, w.at(pc, lane));
            self.sink.report(Kind::Operand, at, || {
                format!("{n} arrivals at the mbarrier {a}, which waits for {left}")
            });
            return;
        }
        p.pending -= n;
        if drop {
            p.expected -= n;
        }
        p.finish_if_complete();
    }

    pub fn wait_mbarrier(&mut self, w: &mut Warp, x: &Inst, m: u32, pc: u32, patient: bool) -> Flow {
        let a = w.regs.get64(x.src[0]).map(|a| a.wrapping_add(x.offset as u64));
        let given = w.regs.get64(x.src[1]);
        let mut done = 0u32;
        for l in lanes(m) {
            let Some(a) = self.object(w, pc, l, a[l]) else { continue };
            if !self.known(w, pc, l, a) {
                // Nothing will ever come; the kernel's loop goes on and the step limit ends it.
                done |= 1 << l;
                continue;
            }
            // A state is the number of the phase that was current, so that its low bit is that phase's parity.
            let want = given[l] as u32 & 1;
            if self.phase_done(a, want) {
                done |= 1 << l;
                if let Some(p) = self.phases.get(&a) {
                    join(&mut w.clock, &p.done);
                }
            } else if patient {
                return Flow::Sleep(a, want);
            }
        }
        w.regs.put_pred(x.dst[0], m, done);
        if done & m != m { Flow::Yield } else { Flow::Next }
    }

    pub fn copy_bulk(&mut self, w: &mut Warp, x: &Inst, m: u32, pc: u32) {
        let to = w.regs.get64(x.src[0]).map(|a| a.wrapping_add(x.offset as u64));
        let from = w.regs.get64(x.src[1]).map(|a| a.wrapping_add(x.offset2 as u64));
        let (bytes, object) = (w.regs.get32(x.src[2]), w.regs.get64(x.src[3]));
        for l in lanes(m) {
            let at = w.at(pc, l);
            let (to, from, n) = (within(to[l]) & 0xffff_ffff, from[l], bytes[l]);
            if n % 16 != 0 || from % 16 != 0 {
                let detail =
                    || format!("bulk copy of {n} bytes from {from:#x}: both must be multiples of 16");
                self.sink.report(Kind::Misaligned, at, detail);
                continue;
            }
            let Some(a) = self.object(w, pc, l, object[l]) else { continue };
            if !self.known(w, pc, l, a) || !self.bulk_readable(at, from, n) {
                continue;
            }
            if self.shared.issue(&mut self.sink, at, &w.clock, to, n, 16)
                && let Some(p) = self.phases.get_mut(&a)
            {
                p.copies.push(Bulk { at, to: to as u32, from, bytes: n });
            }
        }
    }

    fn bulk_readable(&mut self, at: At, from: u64, n: u32) -> bool {
        let mut raw = [0; 16];
        for i in (0..u64::from(n)).step_by(16) {
            match self.launch.view.read(from + i, 16, &mut raw) {
                Ok(true) => {}
                Ok(false) => {
                    let offset = within(from) + i;
                    self.sink
                        .report(Kind::GlobalUninitialised, at, || format!("bulk copy reads offset {offset}"));
                    return true;
                }
                Err(f) => {
                    self.global_fault(at, f, "bulk copy", n, from);
                    return false;
                }
            }
        }
        true
    }

    /// What the end of the block leaves under way.
    pub fn leftovers(&mut self) {
        for (a, p) in &self.phases {
            for c in &p.copies {
                let n = c.bytes;
                self.sink.report(Kind::NeverWaited, c.at, || {
                    format!("a bulk copy of {n} bytes to the mbarrier at {a} that nobody waited for")
                });
            }
        }
    }
}
