/*!
Grammars of the instructions that are more than a function of lanes: modifiers in PTX's order, each from a closed
list; whatever is left over makes the form unknown. Here: which family an opcode belongs to, control flow, operands.
*/

mod barrier;
mod memory;
mod mods;
mod values;
mod warp;

use super::body::{Fix, Lowerer};
use super::operands::Symbol;
use crate::exec::regs::Width;
use crate::ir::{Inst, Op, Reg};
use crate::text::ast::{Instruction, Operand};
use mods::{Mods, count};

type Result<T> = std::result::Result<T, String>;

const UNKNOWN: &str = "no form of this machine's table";

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
}
