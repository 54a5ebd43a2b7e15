/*!
A warp as a list of lane groups (program counter, mask): the group of lowest pc that can run runs, and groups merge
where their pcs meet. That reconverges wherever the compiler put the join behind the branches; where it did not,
instructions that need lanes together find them missing, which is a loud finding and never a wrong number.
*/

use super::block::{Block, Fatal};
use super::regs::{LANES, Regs};
use crate::finding::{At, Kind};
use crate::ir::{Inst, Mbarrier, Op, Program, Reg, Special};

/// Why a group does not run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    No,
    /// For other lanes of its warp.
    Lanes,
    /// For a phase of the mbarrier at an address, of a parity.
    Phase(u32, u32),
}

/// Lanes at one place.
pub struct Group {
    pub pc: u32,
    pub mask: u32,
    pub wait: Wait,
}

/// A cp.async that has not landed.
pub struct Pending {
    pub lane: u8,
    pub bytes: u8,
    pub valid: u8,
    /// The lane's count of commits when it was issued.
    pub group: u32,
    pub to: u32,
    pub from: u64,
}

/// Where a warp stands.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum State {
    Ready,
    /// At a barrier of the block; the pc is behind it.
    Barrier,
    Done,
}

/// One warp.
pub struct Warp {
    pub id: usize,
    /// Lanes that have not exited.
    pub live: u32,
    pub state: State,
    pub regs: Regs,
    pub groups: Vec<Group>,
    pub local: Vec<u8>,
    pub copies: Vec<Pending>,
    pub commits: [u32; LANES],
    /// What it is ordered after, by warp; the last entry is the bulk copies'.
    pub clock: Vec<u32>,
    pub steps: u64,
    /// Where a bar.red result goes.
    pub reduced: Option<(Reg, u32)>,
}

/// What comes after an instruction.
pub enum Flow {
    Next,
    /// The group sleeps at this instruction.
    Sleep(u32, u32),
    /// The warp lets others run; the group goes on behind this instruction.
    Yield,
}

impl Warp {
    /// Warp `id` of a block of `threads`.
    pub fn new(p: &Program, id: usize, threads: u32, warps: usize, place: &Place) -> Self {
        let lanes = (threads - id as u32 * 32).min(32);
        let live = u32::MAX >> (32 - lanes);
        let mut regs = Regs::new(p);
        for &(reg, s) in &p.specials {
            set_special(&mut regs, reg, s, id, warps, place);
        }
        let mut clock = vec![0; warps + 1];
        clock[id] = 1;
        Warp {
            id,
            live,
            state: State::Ready,
            regs,
            groups: vec![Group { pc: 0, mask: live, wait: Wait::No }],
            local: vec![0; p.local_bytes as usize * LANES],
            copies: Vec::new(),
            commits: [0; LANES],
            clock,
            steps: 0,
            reduced: None,
        }
    }

    pub fn at(&self, pc: u32, lane: usize) -> At {
        At { pc, warp: self.id as u32, lane: lane as u32 }
    }

    /// Later accesses are not those that others were told of.
    pub fn tick(&mut self) {
        self.clock[self.id] += 1;
    }

    /// Ordered after everything that `other` is.
    pub fn join(&mut self, other: &[u32]) {
        join(&mut self.clock, other);
    }
}

/// Entry-wise largest.
pub fn join(into: &mut [u32], other: &[u32]) {
    for (a, b) in into.iter_mut().zip(other) {
        *a = (*a).max(*b);
    }
}

/// Where a block is.
pub struct Place {
    pub block: [u32; 3],
    pub grid: [u32; 3],
    pub threads: [u32; 3],
    pub dynamic_shared: u32,
}

fn set_special(regs: &mut Regs, reg: Reg, s: Special, id: usize, warps: usize, p: &Place) {
    use crate::ir::MaskKind;
    let axis = |v: &[u32; 3], a: u8| v[usize::from(a % 3)];
    let (bx, by) = (p.threads[0].max(1), p.threads[1].max(1));
    let row: [u32; LANES] = std::array::from_fn(|l| {
        let linear = (id * LANES + l) as u32;
        let bit = 1u32 << l;
        match s {
            Special::Tid(0) => linear % bx,
            Special::Tid(1) => linear / bx % by,
            Special::Tid(_) => linear / bx / by,
            Special::Ntid(a) => axis(&p.threads, a),
            Special::Ctaid(a) => axis(&p.block, a),
            Special::Nctaid(a) => axis(&p.grid, a),
            Special::Lane => l as u32,
            Special::Warp => id as u32,
            Special::Warps => warps as u32,
            Special::DynamicShared => p.dynamic_shared,
            Special::LaneMask(k) => match k {
                MaskKind::Eq => bit,
                MaskKind::Lt => bit - 1,
                MaskKind::Le => (bit - 1) | bit,
                MaskKind::Gt => !((bit - 1) | bit),
                MaskKind::Ge => !(bit - 1),
            },
        }
    });
    regs.put32(reg, !0, &row);
}

/// Puts lanes at a pc, with a group that is there already.
fn put(groups: &mut Vec<Group>, pc: u32, mask: u32) {
    if let Some(g) = groups.iter_mut().find(|g| g.pc == pc) {
        g.mask |= mask;
        g.wait = Wait::No;
    } else {
        groups.push(Group { pc, mask, wait: Wait::No });
    }
}

fn first(v: &[u32; LANES], mask: u32) -> u32 {
    v[(mask.trailing_zeros() as usize).min(LANES - 1)]
}

impl Block<'_> {
    /// The group to run: lowest pc of those that can.
    fn choose(&mut self, w: &mut Warp) -> Option<usize> {
        let mut best: Option<usize> = None;
        for i in 0..w.groups.len() {
            let runs = match w.groups[i].wait {
                Wait::No => true,
                Wait::Lanes => false,
                Wait::Phase(a, parity) => self.phase_done(a, parity),
            };
            if runs && best.is_none_or(|b| w.groups[i].pc < w.groups[b].pc) {
                best = Some(i);
            }
        }
        best
    }

    /// Groups whose missing lanes have exited can go on; whether there was one.
    fn wake(&self, w: &mut Warp) -> bool {
        for i in 0..w.groups.len() {
            let Group { pc, mask, wait } = w.groups[i];
            let Some(x) = self.launch.program.code.get(pc as usize) else { continue };
            let m = match x.guard {
                None => mask,
                Some((p, negated)) => mask & w.regs.pred(if negated { Reg::NotP(p) } else { Reg::P(p) }),
            };
            if wait == Wait::Lanes && self.needed(w, x, m) & !m == 0 {
                w.groups[i].wait = Wait::No;
                return true;
            }
        }
        false
    }

    /// Lanes that must stand at an instruction together.
    fn needed(&self, w: &Warp, x: &Inst, m: u32) -> u32 {
        let mask = |i: usize| first(&w.regs.get32(x.src[i]), m);
        w.live
            & match x.op {
                Op::Barrier { .. } | Op::Mma(_) | Op::LoadMatrix { .. } | Op::StoreMatrix { .. } => !0,
                Op::WarpBarrier => mask(0),
                Op::Shuffle(_) => mask(3),
                Op::Vote(_) | Op::Redux { .. } | Op::Match { .. } => mask(1),
                _ => 0,
            }
    }

    /// Runs a warp until it stands at a barrier, sleeps, yields or ends.
    pub fn run(&mut self, w: &mut Warp) -> Result<(), Fatal> {
        let code = &self.launch.program.code[..];
        loop {
            if w.groups.is_empty() {
                w.state = State::Done;
                return Ok(());
            }
            let Some(gi) = self.choose(w) else {
                if self.wake(w) {
                    continue;
                }
                if w.groups.iter().any(|g| matches!(g.wait, Wait::Phase(..))) {
                    return Ok(());
                }
                return Err(self.diverged(w));
            };
            w.groups[gi].wait = Wait::No;
            let (mut pc, mut mask) = (w.groups[gi].pc, w.groups[gi].mask);
            let others = || w.groups.iter().enumerate().filter(move |(i, _)| *i != gi);
            let next =
                others().filter(|(_, g)| g.wait == Wait::No).map(|(_, g)| g.pc).min().unwrap_or(u32::MAX);
            let waiting = others().any(|(_, g)| g.wait != Wait::No);
            loop {
                if pc >= next || waiting && w.groups.iter().enumerate().any(|(i, g)| i != gi && g.pc == pc) {
                    w.groups.swap_remove(gi);
                    put(&mut w.groups, pc, mask);
                    break;
                }
                let Some(x) = code.get(pc as usize) else {
                    // Running off the end is an exit.
                    w.live &= !mask;
                    w.groups.swap_remove(gi);
                    break;
                };
                w.steps += 1;
                if w.steps > self.launch.options.step_limit {
                    let (steps, at) = (w.steps - 1, w.at(pc, mask.trailing_zeros() as usize));
                    return Err(self.fatal(Kind::StepLimit, at, format!("{steps} instructions and no end")));
                }
                let m = match x.guard {
                    None => mask,
                    Some((p, negated)) => {
                        let reg = if negated { Reg::NotP(p) } else { Reg::P(p) };
                        if self.check_registers {
                            let bad = w.regs.unwritten(reg, mask);
                            if bad != 0 {
                                self.unwritten(w, pc, bad, "the guard");
                            }
                        }
                        mask & w.regs.pred(reg)
                    }
                };
                self.counts.thread_instructions += u64::from(m.count_ones());
                match &x.op {
                    Op::Lanes(k) => {
                        if m != 0 {
                            if self.check_registers {
                                self.sources(w, x, m, pc);
                            }
                            k.run(&mut w.regs, x, m);
                        }
                        pc += 1;
                        continue;
                    }
                    Op::Branch(to) => {
                        if m == mask {
                            pc = *to;
                        } else if m == 0 {
                            pc += 1;
                        } else {
                            self.counts.splits += 1;
                            w.groups.swap_remove(gi);
                            put(&mut w.groups, pc + 1, mask & !m);
                            put(&mut w.groups, *to, m);
                            break;
                        }
                        continue;
                    }
                    Op::Table(targets) => {
                        if m == 0 {
                            pc += 1;
                            continue;
                        }
                        let index = w.regs.get32(x.src[0]);
                        w.groups.swap_remove(gi);
                        if mask & !m != 0 {
                            put(&mut w.groups, pc + 1, mask & !m);
                        }
                        for l in lanes(m) {
                            let Some(&to) = targets.get(index[l] as usize) else {
                                let at = w.at(pc, l);
                                let detail = format!("branch index {} of {}", index[l], targets.len());
                                return Err(self.fatal(Kind::Operand, at, detail));
                            };
                            put(&mut w.groups, to, 1 << l);
                        }
                        break;
                    }
                    Op::Exit => {
                        w.live &= !m;
                        mask &= !m;
                        if mask == 0 {
                            w.groups.swap_remove(gi);
                            break;
                        }
                        pc += 1;
                        continue;
                    }
                    Op::Trap if m != 0 => {
                        let at = w.at(pc, m.trailing_zeros() as usize);
                        return Err(self.fatal(Kind::Trap, at, "the kernel gave up".into()));
                    }
                    _ => {}
                }
                if m == 0 {
                    pc += 1;
                    continue;
                }
                let missing = self.needed(w, x, m) & !m;
                if missing != 0 {
                    w.groups[gi] = Group { pc, mask, wait: Wait::Lanes };
                    break;
                }
                if self.check_registers {
                    self.sources(w, x, m, pc);
                }
                if let Op::Barrier { arrive, reduce } = x.op {
                    w.groups[gi].pc = pc + 1;
                    w.groups[gi].mask = mask;
                    self.arrive_barrier(w, x, m, pc, arrive, reduce)?;
                    if !arrive {
                        w.state = State::Barrier;
                        return Ok(());
                    }
                    pc += 1;
                    continue;
                }
                match self.step(w, x, m, pc)? {
                    Flow::Next => pc += 1,
                    Flow::Sleep(a, parity) => {
                        w.groups[gi] = Group { pc, mask, wait: Wait::Phase(a, parity) };
                        break;
                    }
                    Flow::Yield => {
                        w.groups[gi].pc = pc + 1;
                        w.groups[gi].mask = mask;
                        return Ok(());
                    }
                }
            }
        }
    }

    /// The lanes of a warp that wait for one another at different places.
    fn diverged(&mut self, w: &Warp) -> Fatal {
        let code = &self.launch.program.code;
        let line = |pc: u32| code.get(pc as usize).map_or(0, |x| x.line);
        let mut groups: Vec<&Group> = w.groups.iter().collect();
        groups.sort_by_key(|g| g.pc);
        let places: Vec<String> =
            groups.iter().map(|g| format!("lanes {:#010x} at PTX line {}", g.mask, line(g.pc))).collect();
        let pc = groups.first().map_or(0, |g| g.pc);
        let absent = w.live & !groups.iter().fold(0, |m, g| m | g.mask);
        let mut detail = format!("lanes that must meet wait apart: {}", places.join(", "));
        if groups.len() == 1 {
            detail += &format!(
                "; the other lanes it names took another path or exited (live: {:#010x}, absent: {absent:#010x})",
                w.live
            );
        }
        let at = w.at(pc, groups.first().map_or(0, |g| g.mask.trailing_zeros() as usize));
        self.fatal(Kind::Divergence, at, detail)
    }

    /// Sources that were never written.
    #[inline(always)]
    fn sources(&mut self, w: &Warp, x: &Inst, m: u32, pc: u32) {
        for (i, &s) in x.src.iter().enumerate() {
            if s == Reg::None {
                if i >= 4 {
                    break;
                }
                continue;
            }
            let m = match x.op {
                Op::LoadMatrix { count, .. } => m & (u32::MAX >> (32 - 8 * u32::from(count))),
                _ => m,
            };
            let bad = w.regs.unwritten(s, m);
            if bad != 0 {
                self.unwritten(w, pc, bad, &format!("operand {i}"));
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn unwritten(&mut self, w: &Warp, pc: u32, bad: u32, what: &str) {
        for l in lanes(bad) {
            self.sink
                .report(Kind::RegisterUninitialised, w.at(pc, l), || format!("{what} was never written"));
        }
    }

    fn step(&mut self, w: &mut Warp, x: &Inst, m: u32, pc: u32) -> Result<Flow, Fatal> {
        match x.op {
            Op::Compare(k, join) => self.compare(w, x, m, k, join),
            Op::Pack { parts, bits } => self.pack(w, x, m, parts, bits),
            Op::Unpack { parts, bits } => self.unpack(w, x, m, parts, bits),
            Op::Load { space, ty, count } => self.load(w, x, m, pc, space, ty, count),
            Op::Parameter { ty, count } => self.parameter(w, x, m, pc, ty, count),
            Op::Store { space, ty, count } => self.store(w, x, m, pc, space, ty, count),
            Op::Atomic { space, ty, update } => self.atomic(w, x, m, pc, space, ty, update),
            Op::Shuffle(kind) => self.shuffle(w, x, m, pc, kind),
            Op::Vote(kind) => self.vote(w, x, m, kind),
            Op::Match { all, wide } => self.matching(w, x, m, all, wide),
            Op::Redux { update, signed } => self.redux(w, x, m, update, signed),
            Op::ActiveMask => w.regs.put32(x.dst[0], m, &[m; LANES]),
            Op::WarpBarrier => w.tick(),
            Op::LoadMatrix { count, transposed } => self.load_matrix(w, x, pc, count, transposed),
            Op::StoreMatrix { count, transposed } => self.store_matrix(w, x, pc, count, transposed),
            Op::Mma(shape) => self.mma(w, x, m, pc, shape)?,
            Op::CopyAsync { bytes } => self.copy_async(w, x, m, pc, bytes),
            Op::CommitCopies => lanes(m).for_each(|l| w.commits[l] += 1),
            Op::WaitCopies(keep) => self.wait_copies(w, m, pc, keep),
            Op::CopyBulk => self.copy_bulk(w, x, m, pc),
            Op::Mbarrier(Mbarrier::Wait { patient }) => {
                return Ok(self.wait_mbarrier(w, x, m, pc, patient));
            }
            Op::Mbarrier(kind) => self.mbarrier(w, x, m, pc, kind),
            _ => {}
        }
        Ok(Flow::Next)
    }
}

/// Lanes of a mask, ascending.
pub fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut m = mask;
    std::iter::from_fn(move || {
        (m != 0).then(|| {
            let l = m.trailing_zeros() as usize;
            m &= m - 1;
            l
        })
    })
}
