/*! What lanes of a warp do together: shuffles, votes, reductions, matrices. */

use super::mods::{Mods, count};
use super::{Result, UNKNOWN};
use crate::exec::mma::{Element, Shape};
use crate::exec::regs::Width;
use crate::ir::{Inst, Op, Shuffle, Space, Update, Vote};
use crate::lower::body::Lowerer;
use crate::text::ast::{Instruction, Operand};

impl Lowerer<'_> {
    /// `d` or `d|p`.
    pub(super) fn with_predicate(&mut self, x: &mut Inst, o: &Operand) -> Result<()> {
        if let Operand::Pair(d, p) = o {
            x.dst[0] = self.target(d, Width::W32)?;
            x.dst[1] = self.target(p, Width::Bit)?;
        } else {
            x.dst[0] = self.target(o, Width::W32)?;
        }
        Ok(())
    }

    pub(super) fn shuffle(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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

    pub(super) fn vote(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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

    pub(super) fn matching(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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

    pub(super) fn redux(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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

    pub(super) fn matrix(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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

    pub(super) fn mma(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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
}
