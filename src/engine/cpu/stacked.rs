/*!
q_a and kv_a as one product: a weight laid of both, and tensors that are columns of its output.
*/

use super::matrix::{Held, Part, project};
use super::run::Run;
use crate::engine::stack::{QkvA, Slot, qkv_a};
use crate::engine::{Sink, SinkError};
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::rows::{self, Stacked};
use mla_reference::{Stage, Weight};
use std::borrow::Cow;

impl<'a> Run<'a> {
    /// Slots of the stack; none where each projection stands alone.
    fn declared(&self) -> Option<[Slot; 2]> {
        qkv_a(self.geometry()).filter(|_| self.engine.qkv_a == QkvA::Stacked)
    }

    /// The stacked weight, each slot decoded by its own type.
    fn stack(&self, slots: &[Slot; 2]) -> Stacked<&'a dyn Rows> {
        Stacked { parts: slots.iter().filter_map(|s| self.layer.weights.matrix(s.weight)).collect() }
    }

    /// Shows a weight that lies in the stack: its rows at the declared slot. Whether it does.
    pub(super) fn show_slot(&self, weight: Weight, sink: &mut dyn Sink) -> Result<bool, SinkError> {
        let Some(slots) = self.declared() else { return Ok(false) };
        let Some(slot) = slots.iter().find(|s| s.weight == weight) else { return Ok(false) };
        let stack = self.stack(&slots);
        let held = Held { inner: &stack, dtype: self.engine.dtype };
        sink.weight(weight, &rows::Part { inner: &held, rows: slot.rows.clone() })?;
        Ok(true)
    }

    /// The output of the stacked product: rows of tokens, slots side by side. None where nothing is stacked.
    pub(super) fn stacked(&self, attn_in: &Tensor) -> Option<Tensor> {
        let slots = self.declared()?;
        let stack = self.stack(&slots);
        let held = Held { inner: &stack, dtype: self.engine.dtype };
        let like = TensorId::shared(slots[0].stage);
        // In float32 where a gain on a slot is still to come.
        let gained = slots.iter().any(|s| self.gain(s.stage).is_some());
        let dtype = if gained { DType::F32 } else { self.stored(like.stage) };
        let mut out = Tensor::zeros(like, self.plan(), self.geometry(), dtype);
        out.cols = stack.rows();
        out.shape = vec![out.rows, out.cols];
        out.bytes = vec![0; out.len() * dtype.bytes()];
        project(self.sum, attn_in, 0..attn_in.cols, &Part { rows: 0..out.cols, weight: &held }, &mut out, 0);
        Some(out)
    }

    /// One of the down projections, and the column from which it is to be read: a tensor of its own, or a slot in place.
    pub(super) fn down<'s>(
        &self,
        sink: &mut dyn Sink,
        (stage, weight): (Stage, Weight),
        attn_in: &Tensor,
        stack: &'s mut Option<Tensor>,
    ) -> Result<(Cow<'s, Tensor>, usize), SinkError> {
        let (Some(stack), Some(slots)) = (stack, self.declared()) else {
            let alone = self.product(TensorId::shared(stage), attn_in, 0..attn_in.cols, weight);
            return Ok((Cow::Owned(self.put(sink, stage, alone)?), 0));
        };
        let columns = slots.into_iter().find(|s| s.stage == stage).map_or(0..0, |s| s.rows);
        let mut slot = Tensor::zeros(TensorId::shared(stage), self.plan(), self.geometry(), stack.dtype);
        for r in 0..slot.rows {
            slot.write_bytes(r, 0, stack.bytes_of(r, columns.clone()));
        }
        // What the sink made of it is what lies in the stack from now on.
        let slot = self.put(sink, stage, slot)?;
        let mut line = vec![0.0; slot.cols];
        for r in 0..slot.rows {
            if slot.dtype == stack.dtype {
                stack.write_bytes(r, columns.start, slot.bytes_of(r, 0..slot.cols));
            } else {
                slot.read(r, 0..slot.cols, &mut line);
                stack.write(r, columns.start, &line);
            }
        }
        Ok((Cow::Borrowed(stack), columns.start))
    }
}
