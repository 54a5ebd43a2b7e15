/*! Barriers of warps and blocks, fences, mbarriers. */

use super::Result;
use super::mods::{Mods, count};
use crate::exec::regs::Width;
use crate::ir::{Inst, Mbarrier, Op, Reduce, Space};
use crate::lower::body::Lowerer;
use crate::text::ast::Instruction;

impl Lowerer<'_> {
    pub(super) fn barrier(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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

    pub(super) fn fence(&mut self, m: &mut Mods<'_>) -> Result<()> {
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

    pub(super) fn mbarrier(&mut self, i: &Instruction, m: &mut Mods<'_>, x: &mut Inst) -> Result<()> {
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
