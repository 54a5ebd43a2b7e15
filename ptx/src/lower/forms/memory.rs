/*! Loads, stores, atomics and asynchronous copies. */

use super::mods::{Mods, count};
use super::{Result, UNKNOWN};
use crate::exec::regs::Width;
use crate::ir::{Inst, Op, Space, Update};
use crate::lower::body::Lowerer;
use crate::lower::operands::Symbol;
use crate::text::ast::{Instruction, Operand};
use crate::ty::Ty;

impl Lowerer<'_> {
    pub(super) fn load(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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
    pub(super) fn is_local(&self, o: &Operand) -> bool {
        let Operand::Memory(base, _) = o else { return false };
        let Operand::Name(n) = &**base else { return false };
        matches!(self.names.find(n), Some(Symbol::Local(_)))
    }

    pub(super) fn store(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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

    pub(super) fn atomic(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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

    pub(super) fn copy(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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
}
