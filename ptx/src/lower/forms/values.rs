/*! Values of lanes: rows of the table, comparisons, packing, addresses of spaces. */

use super::mods::{Mods, count};
use super::{Result, UNKNOWN};
use crate::exec::regs::{Run, Width};
use crate::ir::{Inst, Join, Op};
use crate::lower::body::Lowerer;
use crate::mem::{LOCAL, SHARED, WINDOW_BITS};
use crate::table;
use crate::text::ast::{Instruction, Operand};
use crate::ty::Ty;

impl Lowerer<'_> {
    /// A row of the table.
    pub(super) fn lanes(&mut self, i: &Instruction, x: &mut Inst) -> Result<()> {
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

    pub(super) fn setp(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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

    pub(super) fn pack(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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

    pub(super) fn cvta(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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

    pub(super) fn isspacep(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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
}
