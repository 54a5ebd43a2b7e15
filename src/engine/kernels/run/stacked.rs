/*!
q_a and kv_a as one product: both weights in one buffer, one launch, and an output whose columns are two tensors. Norms and
rope read a slot in place, by its first column and the stack's width.
*/

use super::super::machine::{Held, broke};
use super::Run;
use super::passes::Output;
use super::simple::Product;
use crate::device::{Arg, Device};
use crate::engine::stack::{QKV_A, Slot};
use crate::engine::{EngineError, Sink};
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::{Stage, Weight};

/// Where the rows of a tensor lie.
#[derive(Clone, Copy)]
pub struct Lying {
    /// Memory.
    pub held: Held,
    /// Column of the memory that is the tensor's first.
    pub first: usize,
    /// Elements between rows.
    pub stride: usize,
    /// Whether the memory holds nothing else.
    alone: bool,
}

impl Lying {
    /// Memory of its own.
    pub fn alone(held: Held, cols: usize) -> Lying {
        Lying { held, first: 0, stride: cols, alone: true }
    }

    /// As a kernel's argument; elements are of `dtype`.
    pub fn argument(&self, dtype: DType) -> Arg {
        match self.first * dtype.bytes() {
            0 => Arg::In(self.held.buffer),
            at => Arg::InFrom(self.held.buffer, at as u64),
        }
    }
}

/// The output of the stacked product.
pub struct Stacked {
    /// Memory.
    pub held: Held,
    tensor: Tensor,
    slots: [Slot; 2],
}

impl<D: Device> Run<'_, '_, D> {
    /// Multiplies with the stack; none where each projection stands alone.
    pub(super) fn stacked(
        &mut self,
        sink: &mut dyn Sink,
        attn_in: Held,
    ) -> Result<Option<Stacked>, EngineError> {
        let Some((weight, slots)) = self.stack.clone() else { return Ok(None) };
        let like = TensorId::shared(slots[0].stage);
        let mut tensor = Tensor::zeros(like, self.plan(), self.geometry(), self.stored(like.stage));
        tensor.cols = slots.iter().map(|s| s.rows.len()).sum();
        tensor.shape = vec![tensor.rows, tensor.cols];
        tensor.bytes = vec![0; tensor.len() * tensor.dtype.bytes()];
        let (m, n, k) = (tensor.rows, tensor.cols, self.geometry().hidden);
        let p = Product {
            weight: slots[0].weight,
            m,
            n,
            k,
            heads: 1,
            a: (k, 0),
            b: k,
            c: (n, 0),
            transposed: false,
        };
        let columns = slots.iter().map(|s| (TensorId::shared(s.stage), s.rows.clone())).collect();
        let output = Output { tensor, name: QKV_A, slots: columns };
        let identity = self.identity;
        let mut made = self.compute_in(sink, vec![output], |run, _, out| {
            run.multiply(attn_in, identity, (&p, weight), out[0], true)
        })?;
        let (tensor, held) = made.pop().ok_or_else(|| broke("a stage made nothing"))?;
        Ok(Some(Stacked { held, tensor, slots }))
    }

    /// One of the down projections: a product of its own, or a slot of the stack's output. What the sink makes of a slot is
    /// written back to where it lies.
    pub(super) fn down(
        &mut self,
        sink: &mut dyn Sink,
        (stage, weight): (Stage, Weight),
        attn_in: Held,
        stack: &mut Option<Stacked>,
    ) -> Result<Lying, EngineError> {
        let id = TensorId::shared(stage);
        let Some(stack) = stack else {
            let held = self.plain(sink, id, attn_in, weight)?;
            return Ok(Lying::alone(held, weight.matrix(self.geometry()).0));
        };
        let slot = stack.slots.iter().find(|s| s.stage == stage);
        let columns = slot.map(|s| s.rows.clone()).ok_or_else(|| broke(format!("{stage} is not stacked")))?;
        let whole = &mut stack.tensor;
        let mut tensor = Tensor::zeros(id, self.plan(), self.geometry(), whole.dtype);
        for r in 0..tensor.rows {
            tensor.write_bytes(r, 0, whole.bytes_of(r, columns.clone()));
        }
        if sink.tensor(id, &mut tensor)? {
            for r in 0..tensor.rows {
                whole.write_bytes(r, columns.start, tensor.bytes_of(r, 0..columns.len()));
            }
            self.machine.write(stack.held, &whole.bytes)?;
        }
        Ok(Lying { held: stack.held, first: columns.start, stride: whole.cols, alone: false })
    }

    /// Gives a tensor's memory back, unless others lie there too.
    pub(super) fn leave(&mut self, at: Lying) -> Result<(), EngineError> {
        if at.alone { self.machine.free(at.held) } else { Ok(()) }
    }
}
