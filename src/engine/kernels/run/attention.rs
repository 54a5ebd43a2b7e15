/*!
Attention of a form: in parts that are merged where the plan has some (splits, chunks of context), all else at once.
*/

use super::super::machine::{Held, broke};
use super::super::work::{self, Item, Layout};
use super::Run;
use crate::device::{Arg, Device};
use crate::engine::{EngineError, Sink};
use crate::trace::TensorId;
use mla_reference::{Form, Stage};
use std::f64::consts::LOG2_E;

impl<D: Device> Run<'_, '_, D> {
    /// Attention of a form: sequences in parts part by part and merged, all others at once. `operands` are the arguments
    /// before the work list.
    pub(super) fn attention(
        &mut self,
        sink: &mut dyn Sink,
        form: Form,
        layout: &Layout,
        file: &str,
        operands: &dyn Fn(usize) -> Vec<Arg>,
    ) -> Result<Held, EngineError> {
        let id = |stage| TensorId::of(stage, form);
        let output = if form == Form::Fused { Stage::AttnOut } else { Stage::OLatent };
        let parts = if self.plan().has(Stage::PartO, Some(form)) {
            let lists = self.lists(layout, file, Stage::PartO, true)?;
            let ids = [id(Stage::PartO), id(Stage::PartLse)];
            let mut made = self
                .compute(sink, &ids, |run, pass, out| run.attend(form, &lists, &operands(pass), out, true))?;
            self.free_lists(lists)?;
            let (Some(lse), Some(o)) = (made.pop(), made.pop()) else {
                return Err(broke("attention made nothing"));
            };
            let o = self.hand(sink, ids[0], o)?;
            Some((o, self.hand(sink, ids[1], lse)?))
        } else {
            None
        };
        let lists = self.lists(layout, file, output, false)?;
        let to = match parts {
            None => None,
            Some(_) => {
                let rows = self.plan().part_sequences(form).flat_map(|(_, _, rows, _)| rows);
                let rows: Vec<u32> = rows.map(|r| r as u32).collect();
                Some(self.machine.upload_words(rows, "rows of merged results")?)
            }
        };
        let ids = [id(output), id(Stage::Lse)];
        let mut made = self.compute(sink, &ids, |run, pass, out| {
            if let (Some((part_o, part_lse)), Some(to)) = (parts, to) {
                run.merge(form, (part_o, part_lse), to, out)?;
            }
            run.attend(form, &lists, &operands(pass), out, parts.is_none())
        })?;
        self.free_lists(lists)?;
        for held in parts.into_iter().flat_map(|(o, lse)| [o, lse]).chain(to) {
            self.machine.free(held)?;
        }
        let (Some(lse), Some(o)) = (made.pop(), made.pop()) else {
            return Err(broke("attention made nothing"));
        };
        // In the order of the table.
        let (o, lse) = if form == Form::Fused {
            let lse = self.hand(sink, ids[1], lse)?;
            (self.hand(sink, ids[0], o)?, lse)
        } else {
            (self.hand(sink, ids[0], o)?, self.hand(sink, ids[1], lse)?)
        };
        self.machine.free(lse)?;
        Ok(o)
    }

    /// Work lists on the device, by entry point.
    pub(super) fn lists(
        &mut self,
        layout: &Layout,
        file: &str,
        stage: Stage,
        parts: bool,
    ) -> Result<Vec<(String, usize, Held)>, EngineError> {
        let entries = self.machine.entries(file, stage.name())?;
        let rows: Vec<usize> = entries.iter().map(|e| e.1).collect();
        let groups = work::items(self.plan(), &self.contract, layout, parts, &rows);
        let mut lists = Vec::new();
        for ((entry, _), items) in entries.into_iter().zip(groups).filter(|(_, items)| !items.is_empty()) {
            let words = items.iter().flat_map(Item::words);
            lists.push((entry, items.len(), self.machine.upload_words(words, "work list")?));
        }
        Ok(lists)
    }

    pub(super) fn free_lists(&mut self, lists: Vec<(String, usize, Held)>) -> Result<(), EngineError> {
        lists.into_iter().try_for_each(|(_, _, held)| self.machine.free(held))
    }

    /// Runs attention kernels over their work lists. `whole`: one launch writes all of the output.
    pub(super) fn attend(
        &mut self,
        form: Form,
        lists: &[(String, usize, Held)],
        operands: &[Arg],
        out: &[Held],
        whole: bool,
    ) -> Result<(), EngineError> {
        let whole = whole && lists.len() == 1;
        let written = |h: Held| if whole { Arg::Out(h.buffer) } else { Arg::InOut(h.buffer) };
        let c2 = (self.layer.spec.scale * LOG2_E) as f32;
        let heads = self.geometry().heads;
        for (entry, items, list) in lists {
            let mut arguments = operands.to_vec();
            arguments.extend([Arg::In(list.buffer), written(out[0]), written(out[1])]);
            arguments.extend(self.strides(form));
            arguments.push(c2.into());
            self.machine.launch(entry, &[("items", *items), ("heads", heads)], &arguments)?;
        }
        Ok(())
    }

    /// How far apart tokens, heads and keys lie, in elements; and what else the form's kernels need of the layout.
    fn strides(&self, form: Form) -> Vec<Arg> {
        let g = self.geometry();
        let tokens =
            |widths: &[usize]| widths.iter().map(|w| Arg::from((g.heads * w) as i64)).collect::<Vec<_>>();
        let numbers = |all: &[usize]| all.iter().map(|n| Arg::from(*n as i32)).collect::<Vec<_>>();
        match form {
            Form::Fused => {
                let widths = [g.key(), g.key(), g.value, g.value];
                [tokens(&widths), numbers(&widths), numbers(&[g.heads])].concat()
            }
            Form::Absorbed => {
                let widths = [g.latent, g.key(), g.latent];
                let row = g.latent + g.rope;
                [tokens(&widths), numbers(&widths), numbers(&[row, g.nope, g.heads, self.plan().page_size])]
                    .concat()
            }
        }
    }

    pub(super) fn merge(
        &mut self,
        form: Form,
        parts: (Held, Held),
        to: Held,
        out: &[Held],
    ) -> Result<(), EngineError> {
        let g = self.geometry();
        let width = if form == Form::Fused { g.value } else { g.latent };
        let rows = self.plan().part_rows(form);
        let arguments = [
            Arg::In(parts.0.buffer),
            Arg::In(parts.1.buffer),
            Arg::In(to.buffer),
            Arg::InOut(out[0].buffer),
            Arg::InOut(out[1].buffer),
            (self.plan().parts(form) as i32).into(),
            (g.heads as i32).into(),
            (width as i32).into(),
        ];
        self.machine.launch("merge", &[("rows", rows), ("heads", g.heads)], &arguments)
    }
}
