/*!
Grammars of the instructions that are more than a function of lanes: modifiers in PTX's order, each from a closed
list; whatever is left over makes the form unknown.
*/

use super::body::{Fix, Lowerer};
use super::operands::Symbol;
use crate::exec::mma::{Element, Shape};
use crate::exec::regs::{Run, Width};
use crate::ir::{Inst, Join, Mbarrier, Op, Reduce, Reg, Shuffle, Space, Update, Vote};
use crate::mem::{LOCAL, SHARED, WINDOW_BITS};
use crate::table;
use crate::text::ast::{Instruction, Operand};
use crate::ty::Ty;

type Result<T> = std::result::Result<T, String>;

const UNKNOWN: &str = "no form of this machine's table";

/// Modifiers still to be read.
struct Mods<'t> {
    parts: Vec<&'t str>,
    at: usize,
}

impl<'t> Mods<'t> {
    fn new(opcode: &'t str) -> Self {
        Mods { parts: opcode.split('.').collect(), at: 1 }
    }
    fn peek(&self) -> &'t str {
        self.parts.get(self.at).copied().unwrap_or("")
    }
    /// The next modifier, if it is one of these.
    fn opt(&mut self, choices: &[&str]) -> Option<&'t str> {
        let p = self.peek();
        choices.contains(&p).then(|| {
            self.at += 1;
            p
        })
    }
    fn need(&mut self, choices: &[&str]) -> Result<&'t str> {
        self.opt(choices).ok_or_else(|| UNKNOWN.to_owned())
    }
    /// At most one of each list, whatever their order.
    fn any_order<const N: usize>(&mut self, lists: [&[&str]; N]) -> [Option<&'t str>; N] {
        let mut found = [None; N];
        while let Some(i) = (0..N).find(|&i| found[i].is_none() && lists[i].contains(&self.peek())) {
            found[i] = self.opt(lists[i]);
        }
        found
    }
    fn all(&mut self, words: &[&str]) -> Result<()> {
        words.iter().try_for_each(|w| self.need(&[w]).map(drop))
    }
    fn ty(&mut self) -> Result<Ty> {
        let t = Ty::parse(self.peek()).ok_or(UNKNOWN)?;
        self.at += 1;
        Ok(t)
    }
    fn end(&self) -> Result<()> {
        if self.at == self.parts.len() { Ok(()) } else { Err(UNKNOWN.into()) }
    }
    /// Ordering and scope, which change nothing where blocks are sequentially consistent.
    fn order(&mut self) {
        if self.opt(&["weak", "relaxed", "acquire", "release", "acq_rel", "volatile"]).is_some() {
            self.opt(&["cta", "cluster", "gpu", "sys"]);
        }
    }
    fn space(&mut self) -> Space {
        match self.opt(&["global", "const", "shared", "shared::cta", "local"]) {
            Some("global" | "const") => Space::Global,
            Some("shared" | "shared::cta") => Space::Shared,
            Some("local") => Space::Local,
            _ => Space::Generic,
        }
    }
    fn hints(&mut self) {
        const HINTS: [&str; 11] = [
            "L1::evict_normal",
            "L1::evict_unchanged",
            "L1::evict_first",
            "L1::evict_last",
            "L1::no_allocate",
            "L2::evict_normal",
            "L2::evict_first",
            "L2::evict_last",
            "L2::64B",
            "L2::128B",
            "L2::256B",
        ];
        while self.opt(&HINTS).is_some() {}
    }
    fn vector(&mut self) -> u8 {
        match self.opt(&["v2", "v4"]) {
            Some("v2") => 2,
            Some(_) => 4,
            None => 1,
        }
    }
}

fn count(i: &Instruction, range: std::ops::RangeInclusive<usize>) -> Result<()> {
    if range.contains(&i.operands.len()) {
        return Ok(());
    }
    Err(format!("{} operands", i.operands.len()))
}

impl Lowerer<'_> {
    /// Appends an instruction, or says why it can't be.
    pub fn lower(&mut self, i: &Instruction, mut x: Inst) -> Result<()> {
        let mut m = Mods::new(&i.opcode);
        let o = &i.operands;
        match m.parts[0] {
            "bra" => {
                m.opt(&["uni"]);
                count(i, 1..=1)?;
                let Operand::Name(label) = &o[0] else { return Err("a label belongs here".into()) };
                self.fixes.push(Fix::Branch(self.code.len(), label.clone(), self.names.current));
                x.op = Op::Branch(0);
            }
            "brx" => {
                m.all(&["idx"])?;
                m.opt(&["uni"]);
                count(i, 2..=2)?;
                x.src[0] = self.names.operand(&o[0], Width::W32)?;
                let Operand::Name(label) = &o[1] else { return Err("a list of targets belongs here".into()) };
                self.fixes.push(Fix::Table(self.code.len(), label.clone(), self.names.current));
                x.op = Op::Table(Box::default());
            }
            "ret" => {
                m.opt(&["uni"]);
                count(i, 0..=0)?;
                x.op = Op::Exit;
                let at = self.code.len();
                if let Some(returns) = self.returns.last_mut() {
                    returns.push(at);
                }
            }
            "exit" => x.op = Op::Exit,
            "trap" => x.op = Op::Trap,
            "ld" | "ldu" => self.load(i, &mut m, &mut x)?,
            "st" => self.store(i, &mut m, &mut x)?,
            "atom" | "red" => self.atomic(i, &mut m, &mut x)?,
            "mov" if o.iter().any(|o| matches!(o, Operand::Group(_))) => self.pack(i, &mut m, &mut x)?,
            "setp" => self.setp(i, &mut m, &mut x)?,
            "cvta" => self.cvta(i, &mut m, &mut x)?,
            "isspacep" => self.isspacep(i, &mut m, &mut x)?,
            "shfl" => self.shuffle(i, &mut m, &mut x)?,
            "vote" => self.vote(i, &mut m, &mut x)?,
            "activemask" => {
                m.all(&["b32"])?;
                count(i, 1..=1)?;
                x.op = Op::ActiveMask;
                x.dst[0] = self.target(&o[0], Width::W32)?;
            }
            "match" => self.matching(i, &mut m, &mut x)?,
            "redux" => self.redux(i, &mut m, &mut x)?,
            "bar" | "barrier" => self.barrier(i, &mut m, &mut x)?,
            "membar" => drop(m.need(&["cta", "gl", "sys"])?),
            "fence" => self.fence(&mut m)?,
            "prefetch" | "prefetchu" => m.at = m.parts.len(),
            "nanosleep" => m.all(&["u32"])?,
            "griddepcontrol" => drop(m.need(&["launch_dependents", "wait"])?),
            "setmaxnreg" => {
                m.need(&["inc", "dec"])?;
                m.all(&["sync", "aligned", "u32"])?;
            }
            "ldmatrix" | "stmatrix" => self.matrix(i, &mut m, &mut x)?,
            "mma" => self.mma(i, &mut m, &mut x)?,
            "cp" => self.copy(i, &mut m, &mut x)?,
            "mbarrier" => self.mbarrier(i, &mut m, &mut x)?,
            _ => {
                self.lanes(i, &mut x)?;
                m.at = m.parts.len();
            }
        }
        m.end()?;
        self.code.push(x);
        Ok(())
    }

    /// A destination.
    fn target(&mut self, o: &Operand, width: Width) -> Result<Reg> {
        let Operand::Name(name) = o else { return Err("a register belongs here".into()) };
        if name == "_" {
            return Ok(Reg::None);
        }
        match self.names.find(name) {
            Some(Symbol::Register(r)) if matches!(r, Reg::P(_)) == (width == Width::Bit) => Ok(r),
            Some(Symbol::Register(_)) => Err(format!("`{name}` is a register of another kind")),
            _ => Err(format!("`{name}` is no register")),
        }
    }

    /// `[base + offset]`.
    fn address(&mut self, o: &Operand) -> Result<(Reg, i64)> {
        let Operand::Memory(base, offset) = o else { return Err("an address belongs here".into()) };
        Ok((self.names.operand(base, Width::W64)?, *offset))
    }

    /// `a` or `{a, b}` as destinations or sources.
    fn group(o: &Operand) -> &[Operand] {
        match o {
            Operand::Group(v) => v,
            o => std::slice::from_ref(o),
        }
    }

    fn targets(&mut self, x: &mut Inst, o: &Operand, n: usize) -> Result<()> {
        let g = Self::group(o);
        if g.len() != n || n > x.dst.len() {
            return Err(format!("{} destinations, not {n}", g.len()));
        }
        for (k, o) in g.iter().enumerate() {
            x.dst[k] = self.target(o, Width::W32)?;
        }
        Ok(())
    }

    fn sources(&mut self, x: &mut Inst, from: usize, o: &Operand, n: usize, width: Width) -> Result<()> {
        let g = Self::group(o);
        if g.len() != n {
            return Err(format!("{} sources, not {n}", g.len()));
        }
        for (k, o) in g.iter().enumerate() {
            x.src[from + k] = self.names.operand(o, width)?;
        }
        Ok(())
    }

    /// A row of the table.
    fn lanes(&mut self, i: &Instruction, x: &mut Inst) -> Result<()> {
        let row = table::find(&i.opcode).ok_or(UNKNOWN)?;
        let Run::Lanes(k) = row.run else { return Err(UNKNOWN.into()) };
        count(i, 1 + row.sources.len()..=1 + row.sources.len())?;
        x.op = Op::Lanes(k);
        x.dst[0] = self.target(&i.operands[0], row.result)?;
        for (n, (o, w)) in i.operands[1..].iter().zip(row.sources).enumerate() {
            x.src[n] = self.names.operand(o, *w)?;
        }
        Ok(())
    }

    fn setp(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        let op = m.peek();
        m.at += 1;
        let join = match m.opt(&["and", "or", "xor"]) {
            Some("and") => Join::And,
            Some("or") => Join::Or,
            Some(_) => Join::Xor,
            None => Join::None,
        };
        let rest = m.parts[m.at.min(m.parts.len())..].join(".");
        m.at = m.parts.len();
        let row = table::find(&format!("setp.{op}.{rest}")).ok_or(UNKNOWN)?;
        let Run::Compare(k) = row.run else { return Err(UNKNOWN.into()) };
        let n = 3 + usize::from(join != Join::None);
        count(i, n..=n)?;
        match &i.operands[0] {
            Operand::Pair(p, q) => {
                x.dst[0] = self.target(p, Width::Bit)?;
                x.dst[1] = self.target(q, Width::Bit)?;
            }
            p => x.dst[0] = self.target(p, Width::Bit)?,
        }
        for (n, o) in i.operands[1..].iter().enumerate() {
            x.src[n] = self.names.operand(o, row.sources[n])?;
        }
        x.op = Op::Compare(k, join);
        Ok(())
    }

    fn load(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        m.order();
        let parameter = m.opt(&["param", "param::entry", "param::func"]).is_some();
        let space = if parameter { Space::Local } else { m.space() };
        m.opt(&["ca", "cg", "cs", "lu", "cv"]);
        m.opt(&["nc"]);
        m.hints();
        let n = m.vector();
        let ty = m.ty()?;
        count(i, 2..=2)?;
        if ty == Ty::Pred || ty.bytes() * u32::from(n) > 16 {
            return Err(UNKNOWN.into());
        }
        self.targets(x, &i.operands[0], usize::from(n))?;
        (x.src[0], x.offset) = self.address(&i.operands[1])?;
        x.op = if parameter && !self.is_local(&i.operands[1]) {
            Op::Parameter { ty, count: n }
        } else {
            self.touches(space, ty.bytes() * u32::from(n));
            Op::Load { space, ty, count: n }
        };
        Ok(())
    }

    /// Whether an address is that of a call's parameter, which lives in local memory.
    fn is_local(&self, o: &Operand) -> bool {
        let Operand::Memory(base, _) = o else { return false };
        let Operand::Name(n) = &**base else { return false };
        matches!(self.names.find(n), Some(Symbol::Local(_)))
    }

    fn store(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        m.order();
        let space = if m.opt(&["param", "param::func"]).is_some() {
            if !i.operands.first().is_some_and(|o| self.is_local(o)) {
                return Err("a store to the kernel's parameters".into());
            }
            Space::Local
        } else {
            m.space()
        };
        m.opt(&["wb", "cg", "cs", "wt"]);
        m.hints();
        let n = m.vector();
        let ty = m.ty()?;
        count(i, 2..=2)?;
        if ty == Ty::Pred || ty.bytes() * u32::from(n) > 16 {
            return Err(UNKNOWN.into());
        }
        (x.src[0], x.offset) = self.address(&i.operands[0])?;
        let width = if ty.bytes() == 8 { Width::W64 } else { Width::W32 };
        self.sources(x, 1, &i.operands[1], usize::from(n), width)?;
        self.touches(space, ty.bytes() * u32::from(n));
        x.op = Op::Store { space, ty, count: n };
        Ok(())
    }

    fn atomic(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        let returns = m.parts[0] == "atom";
        // The manual's order is semantics, scope, space, operation; libcu++ writes others, and ptxas takes them.
        let [_, _, space, op] = m.any_order([
            &["relaxed", "acquire", "release", "acq_rel"],
            &["cta", "cluster", "gpu", "sys"],
            &["global", "shared", "shared::cta"],
            &["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"],
        ]);
        let space = match space {
            None => Space::Generic,
            Some("global") => Space::Global,
            Some(_) => Space::Shared,
        };
        let op = op.ok_or(UNKNOWN)?;
        let noftz = m.opt(&["noftz"]).is_some();
        let ty = m.ty()?;
        use Ty::*;
        let (update, taken) = match op {
            "add" if noftz => (Update::Add, matches!(ty, F16 | F16x2 | Bf16 | Bf16x2)),
            "add" => (Update::Add, matches!(ty, U32 | S32 | U64 | F32 | F64)),
            "min" => (Update::Min, matches!(ty, U32 | S32 | U64 | S64)),
            "max" => (Update::Max, matches!(ty, U32 | S32 | U64 | S64)),
            "and" => (Update::And, matches!(ty, B32 | B64)),
            "or" => (Update::Or, matches!(ty, B32 | B64)),
            "xor" => (Update::Xor, matches!(ty, B32 | B64)),
            "exch" => (Update::Exch, returns && matches!(ty, B32 | B64)),
            "cas" => (Update::Cas, returns && matches!(ty, B16 | B32 | B64)),
            "inc" => (Update::Inc, ty == U32),
            _ => (Update::Dec, ty == U32),
        };
        if !taken {
            return Err(UNKNOWN.into());
        }
        let first = usize::from(returns);
        let n = first + 2 + usize::from(update == Update::Cas);
        count(i, n..=n)?;
        let width = if ty.bytes() == 8 { Width::W64 } else { Width::W32 };
        if returns {
            x.dst[0] = self.target(&i.operands[0], width)?;
        }
        (x.src[0], x.offset) = self.address(&i.operands[first])?;
        for (k, o) in i.operands[first + 1..].iter().enumerate() {
            x.src[1 + k] = self.names.operand(o, width)?;
        }
        self.touches(space, ty.bytes());
        x.op = Op::Atomic { space, ty, update };
        Ok(())
    }

    fn pack(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        let ty = m.ty()?;
        count(i, 2..=2)?;
        let bits = ty.bytes() * 8;
        let parts = |o: &Operand| match Self::group(o).len() as u32 {
            n @ (2 | 4) if bits / n >= 8 && matches!(ty, Ty::B16 | Ty::B32 | Ty::B64) => {
                Ok((n as u8, (bits / n) as u8))
            }
            _ => Err(UNKNOWN.to_owned()),
        };
        if let Operand::Group(_) = &i.operands[1] {
            let (n, bits) = parts(&i.operands[1])?;
            x.dst[0] = self.target(&i.operands[0], Width::W32)?;
            self.sources(x, 0, &i.operands[1], usize::from(n), Width::W32)?;
            x.op = Op::Pack { parts: n, bits };
        } else {
            let (n, bits) = parts(&i.operands[0])?;
            self.targets(x, &i.operands[0], usize::from(n))?;
            x.src[0] =
                self.names.operand(&i.operands[1], if ty == Ty::B64 { Width::W64 } else { Width::W32 })?;
            x.op = Op::Unpack { parts: n, bits };
        }
        Ok(())
    }

    fn cvta(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        let to = m.opt(&["to"]).is_some();
        let space = m.need(&["global", "const", "shared", "shared::cta", "local", "param"])?;
        m.all(&["u64"])?;
        count(i, 2..=2)?;
        let base = match space {
            "shared" | "shared::cta" => crate::mem::SHARED,
            "local" => crate::mem::LOCAL,
            "param" => return Err(UNKNOWN.into()),
            _ => 0,
        };
        let row = table::find(if to { "sub.s64" } else { "add.s64" }).ok_or(UNKNOWN)?;
        let Run::Lanes(k) = row.run else { return Err(UNKNOWN.into()) };
        x.op = Op::Lanes(k);
        x.dst[0] = self.target(&i.operands[0], Width::W64)?;
        x.src[0] = self.names.operand(&i.operands[1], Width::W64)?;
        x.src[1] = self.names.constant(base, Width::W64)?;
        Ok(())
    }

    fn isspacep(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        let window = match m.need(&["shared", "shared::cta", "local", "global"])? {
            "local" => Some(LOCAL),
            "global" => None,
            _ => Some(SHARED),
        };
        count(i, 2..=2)?;
        // In the window: the address's upper bits are the window's. Global is what is in neither of the two.
        let row = match window {
            Some(_) => {
                crate::exec::regs::kern!((u64, u64) -> bool, |a, w| a >> WINDOW_BITS == w >> WINDOW_BITS)
            }
            None => crate::exec::regs::kern!((u64) -> bool, |a| {
                (a >> WINDOW_BITS != SHARED >> WINDOW_BITS) & (a >> WINDOW_BITS != LOCAL >> WINDOW_BITS)
            }),
        };
        let Run::Lanes(k) = row.run else { return Err(UNKNOWN.into()) };
        x.op = Op::Lanes(k);
        x.dst[0] = self.target(&i.operands[0], Width::Bit)?;
        x.src[0] = self.names.operand(&i.operands[1], Width::W64)?;
        if let Some(window) = window {
            x.src[1] = self.names.constant(window, Width::W64)?;
        }
        Ok(())
    }

    /// `d` or `d|p`.
    fn with_predicate(&mut self, x: &mut Inst, o: &Operand) -> Result<()> {
        if let Operand::Pair(d, p) = o {
            x.dst[0] = self.target(d, Width::W32)?;
            x.dst[1] = self.target(p, Width::Bit)?;
        } else {
            x.dst[0] = self.target(o, Width::W32)?;
        }
        Ok(())
    }

    fn shuffle(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        m.all(&["sync"])?;
        x.op = Op::Shuffle(match m.need(&["up", "down", "bfly", "idx"])? {
            "up" => Shuffle::Up,
            "down" => Shuffle::Down,
            "bfly" => Shuffle::Butterfly,
            _ => Shuffle::Index,
        });
        m.all(&["b32"])?;
        count(i, 5..=5)?;
        self.with_predicate(x, &i.operands[0])?;
        for (k, o) in i.operands[1..].iter().enumerate() {
            x.src[k] = self.names.operand(o, Width::W32)?;
        }
        Ok(())
    }

    fn vote(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        m.all(&["sync"])?;
        let (kind, width, ty) = match m.need(&["all", "any", "uni", "ballot"])? {
            "all" => (Vote::All, Width::Bit, "pred"),
            "any" => (Vote::Any, Width::Bit, "pred"),
            "uni" => (Vote::Uni, Width::Bit, "pred"),
            _ => (Vote::Ballot, Width::W32, "b32"),
        };
        m.all(&[ty])?;
        count(i, 3..=3)?;
        x.op = Op::Vote(kind);
        x.dst[0] = self.target(&i.operands[0], width)?;
        x.src[0] = self.names.operand(&i.operands[1], Width::Bit)?;
        x.src[1] = self.names.operand(&i.operands[2], Width::W32)?;
        Ok(())
    }

    fn matching(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        let all = m.need(&["any", "all"])? == "all";
        m.all(&["sync"])?;
        let wide = m.need(&["b32", "b64"])? == "b64";
        count(i, 3..=3)?;
        self.with_predicate(x, &i.operands[0])?;
        x.src[0] = self.names.operand(&i.operands[1], if wide { Width::W64 } else { Width::W32 })?;
        x.src[1] = self.names.operand(&i.operands[2], Width::W32)?;
        x.op = Op::Match { all, wide };
        Ok(())
    }

    fn redux(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        m.all(&["sync"])?;
        let op = m.need(&["add", "min", "max", "and", "or", "xor"])?;
        let ty = m.need(if matches!(op, "and" | "or" | "xor") { &["b32"] } else { &["u32", "s32"] })?;
        let update = match op {
            "add" => Update::Add,
            "min" => Update::Min,
            "max" => Update::Max,
            "and" => Update::And,
            "or" => Update::Or,
            _ => Update::Xor,
        };
        count(i, 3..=3)?;
        x.dst[0] = self.target(&i.operands[0], Width::W32)?;
        x.src[0] = self.names.operand(&i.operands[1], Width::W32)?;
        x.src[1] = self.names.operand(&i.operands[2], Width::W32)?;
        x.op = Op::Redux { update, signed: ty == "s32" };
        Ok(())
    }

    fn barrier(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        m.opt(&["cta"]);
        let o = &i.operands;
        let what = m.need(&["sync", "arrive", "red", "warp"])?;
        if what == "warp" {
            m.all(&["sync"])?;
            count(i, 1..=1)?;
            x.src[0] = self.names.operand(&o[0], Width::W32)?;
            x.op = Op::WarpBarrier;
            return Ok(());
        }
        let reduce = match what {
            "red" => Some(match m.need(&["and", "or", "popc"])? {
                "and" => Reduce::And,
                "or" => Reduce::Or,
                _ => Reduce::Popc,
            }),
            _ => None,
        };
        m.opt(&["aligned"]);
        if let Some(r) = reduce {
            m.all(&[if r == Reduce::Popc { "u32" } else { "pred" }])?;
            count(i, 3..=4)?;
            x.dst[0] = self.target(&o[0], if r == Reduce::Popc { Width::W32 } else { Width::Bit })?;
            x.src[2] = self.names.operand(&o[o.len() - 1], Width::Bit)?;
        } else {
            count(i, if what == "arrive" { 2..=2 } else { 1..=2 })?;
        }
        let first = usize::from(reduce.is_some());
        let last = o.len() - first;
        x.src[0] = self.names.operand(&o[first], Width::W32)?;
        x.src[1] = if last - first > 1 || (first == 0 && last == 2) {
            self.names.operand(&o[first + 1], Width::W32)?
        } else {
            self.names.constant(0, Width::W32)?
        };
        x.op = Op::Barrier { arrive: what == "arrive", reduce };
        Ok(())
    }

    fn fence(&mut self, m: &mut Mods<'_>) -> Result<()> {
        if m.opt(&["mbarrier_init"]).is_some() {
            return m.all(&["release", "cluster"]);
        }
        if m.opt(&["proxy"]).is_some() {
            m.need(&["alias", "async", "async::generic"])?;
            m.opt(&["global", "shared::cta", "shared::cluster"]);
            return Ok(());
        }
        m.opt(&["sc", "acq_rel", "acquire", "release"]);
        m.need(&["cta", "cluster", "gpu", "sys"]).map(drop)
    }

    fn matrix(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        let load = m.parts[0] == "ldmatrix";
        m.all(&["sync", "aligned"])?;
        // The manual puts the shape first; much code in use puts the number there, and ptxas takes it.
        let [shape, number, transposed, _] =
            m.any_order([&["m8n8"], &["x1", "x2", "x4"], &["trans"], &["shared", "shared::cta"]]);
        let count_of = match number.filter(|_| shape.is_some()).ok_or(UNKNOWN)? {
            "x1" => 1u8,
            "x2" => 2,
            _ => 4,
        };
        let transposed = transposed.is_some();
        m.all(&["b16"])?;
        count(i, 2..=2)?;
        self.touches(Space::Shared, 16);
        if load {
            self.targets(x, &i.operands[0], usize::from(count_of))?;
            (x.src[0], x.offset) = self.address(&i.operands[1])?;
            x.op = Op::LoadMatrix { count: count_of, transposed };
        } else {
            (x.src[0], x.offset) = self.address(&i.operands[0])?;
            self.sources(x, 1, &i.operands[1], usize::from(count_of), Width::W32)?;
            x.op = Op::StoreMatrix { count: count_of, transposed };
        }
        Ok(())
    }

    fn mma(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        m.all(&["sync", "aligned"])?;
        let k = match m.need(&["m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32"])? {
            "m16n8k4" => 4u8,
            "m16n8k8" => 8,
            "m16n8k16" => 16,
            _ => 32,
        };
        m.all(&["row", "col"])?;
        m.opt(&["kind::f8f6f4"]);
        m.all(&["f32"])?;
        let ty = m.need(&["f16", "bf16", "tf32", "e4m3", "e5m2"])?;
        m.all(&[ty, "f32"])?;
        let (element, sizes): (_, &[u8]) = match ty {
            "f16" => (Element::F16, &[8, 16]),
            "bf16" => (Element::Bf16, &[8, 16]),
            "tf32" => (Element::Tf32, &[4, 8]),
            "e4m3" => (Element::E4m3, &[32]),
            _ => (Element::E5m2, &[32]),
        };
        if !sizes.contains(&k) {
            return Err(UNKNOWN.into());
        }
        if k == 32 && self.names.scope.sm < 90 {
            return Err("8-bit operands before sm_90 have an accumulator that is not modelled".into());
        }
        let shape = Shape { k, element };
        let [a, b] = shape.registers();
        count(i, 4..=4)?;
        self.targets(x, &i.operands[0], 4)?;
        self.sources(x, 0, &i.operands[1], a, Width::W32)?;
        self.sources(x, a, &i.operands[2], b, Width::W32)?;
        self.sources(x, a + b, &i.operands[3], 4, Width::W32)?;
        x.op = Op::Mma(shape);
        Ok(())
    }

    fn copy(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        m.all(&["async"])?;
        let o = &i.operands;
        let number = |o: &Operand| match o {
            Operand::Number(v) => Ok(*v),
            _ => Err("a number belongs here".to_owned()),
        };
        match m.need(&["ca", "cg", "commit_group", "wait_group", "wait_all", "bulk"])? {
            "commit_group" => {
                count(i, 0..=0)?;
                x.op = Op::CommitCopies;
            }
            "wait_all" => {
                count(i, 0..=0)?;
                x.op = Op::WaitCopies(None);
            }
            "wait_group" => {
                count(i, 1..=1)?;
                x.op = Op::WaitCopies(Some(number(&o[0])?.min(1 << 20) as u32));
            }
            "bulk" => {
                m.need(&["shared::cluster", "shared::cta"])?;
                m.all(&["global", "mbarrier::complete_tx::bytes"])?;
                count(i, 4..=4)?;
                (x.src[0], x.offset) = self.address(&o[0])?;
                (x.src[1], x.offset2) = self.address(&o[1])?;
                x.src[2] = self.names.operand(&o[2], Width::W32)?;
                let (object, offset) = self.address(&o[3])?;
                if offset != 0 {
                    return Err("an mbarrier address with an offset".into());
                }
                x.src[3] = object;
                x.op = Op::CopyBulk;
            }
            cache => {
                m.need(&["shared", "shared::cta"])?;
                m.all(&["global"])?;
                m.hints();
                count(i, 3..=4)?;
                let bytes = number(&o[2])?;
                if !matches!((cache, bytes), ("ca", 4 | 8 | 16) | ("cg", 16)) {
                    return Err(format!("a copy of {bytes} bytes"));
                }
                (x.src[0], x.offset) = self.address(&o[0])?;
                (x.src[1], x.offset2) = self.address(&o[1])?;
                if let Some(o) = o.get(3) {
                    x.src[2] = self.names.operand(o, Width::W32)?;
                }
                self.touches(Space::Shared, bytes as u32);
                x.op = Op::CopyAsync { bytes: bytes as u8 };
            }
        }
        Ok(())
    }

    fn mbarrier(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
        let what =
            m.need(&["init", "inval", "arrive", "arrive_drop", "expect_tx", "test_wait", "try_wait"])?;
        let o = &i.operands;
        let waits = matches!(what, "test_wait" | "try_wait");
        let arrives = matches!(what, "arrive" | "arrive_drop");
        let expects = arrives && m.opt(&["expect_tx"]).is_some();
        let parity = waits && m.opt(&["parity"]).is_some();
        m.opt(&["release", "acquire", "relaxed"]);
        m.opt(&["cta", "cluster"]);
        m.opt(&["shared", "shared::cta"]);
        m.all(&["b64"])?;
        self.touches(Space::Shared, 8);
        let first = usize::from(waits || arrives);
        let wanted = match what {
            "inval" => 1..=1,
            "init" | "expect_tx" => 2..=2,
            "test_wait" => 3..=3,
            "try_wait" => 3..=4,
            _ if expects => 3..=3,
            _ => 2..=3,
        };
        count(i, wanted)?;
        (x.src[0], x.offset) = self.address(&o[first])?;
        x.op = Op::Mbarrier(match what {
            "init" => {
                x.src[1] = self.names.operand(&o[1], Width::W32)?;
                Mbarrier::Init
            }
            "inval" => Mbarrier::Inval,
            "expect_tx" => {
                x.src[2] = self.names.operand(&o[1], Width::W32)?;
                Mbarrier::ExpectTx
            }
            "test_wait" | "try_wait" => {
                x.dst[0] = self.target(&o[0], Width::Bit)?;
                x.src[1] = self.names.operand(&o[2], if parity { Width::W32 } else { Width::W64 })?;
                Mbarrier::Wait { patient: what == "try_wait" }
            }
            _ => {
                x.dst[0] = self.target(&o[0], Width::W64)?;
                if let Some(o) = o.get(2) {
                    x.src[if expects { 2 } else { 1 }] = self.names.operand(o, Width::W32)?;
                }
                Mbarrier::Arrive { drop: what == "arrive_drop" }
            }
        });
        Ok(())
    }
}
