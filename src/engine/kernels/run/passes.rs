/*!
Computing a tensor as often as the device asks for, and saying what was wrong with the memory it lies in.
*/

use super::super::machine::{Held, broke, poison, spare};
use super::Run;
use crate::device::{Device, Problem};
use crate::engine::{EngineError, Sink};
use crate::trace::{Tensor, TensorId};
use std::ops::Range;

/// Guards that are told of at a time: buffers of a run, twice.
const MOST_GUARDS: usize = 64;

/// Findings of a kernel that left bytes of an output unwritten.
const UNWRITTEN: &str = "output-unwritten";

/// Memory that launches write.
pub(super) struct Output {
    /// Of this shape.
    pub tensor: Tensor,
    /// Name of the memory.
    pub name: &'static str,
    /// Which tensors its columns are.
    pub slots: Vec<(TensorId, Range<usize>)>,
}

impl Output {
    fn first(&self) -> Option<TensorId> {
        self.slots.first().map(|s| s.0)
    }
}

impl<D: Device> Run<'_, '_, D> {
    /// Computes tensors with some launches, as often as the device asks for; says what was wrong with the outputs.
    pub(super) fn compute(
        &mut self,
        sink: &mut dyn Sink,
        ids: &[TensorId],
        launches: impl FnMut(&mut Self, usize, &[Held]) -> Result<(), EngineError>,
    ) -> Result<Vec<(Tensor, Held)>, EngineError> {
        let outputs = ids.iter().map(|id| {
            let tensor = Tensor::zeros(*id, self.plan(), self.geometry(), self.stored(id.stage));
            Output { slots: vec![(*id, 0..tensor.cols)], tensor, name: id.stage.name() }
        });
        let outputs = outputs.collect();
        self.compute_in(sink, outputs, launches)
    }

    /// The same of outputs that may hold several tensors.
    pub(super) fn compute_in(
        &mut self,
        sink: &mut dyn Sink,
        outputs: Vec<Output>,
        mut launches: impl FnMut(&mut Self, usize, &[Held]) -> Result<(), EngineError>,
    ) -> Result<Vec<(Tensor, Held)>, EngineError> {
        let first = outputs.first().and_then(Output::first).ok_or_else(|| broke("a launch has no output"))?;
        self.machine.computing = Some(first);
        let mut out = Vec::new();
        for output in outputs {
            let held = self.machine.allocate(output.tensor.bytes.len(), output.name)?;
            out.push((output, held));
        }
        let buffers: Vec<Held> = out.iter().map(|o| o.1).collect();
        // Without a column there is nothing to compute, as rope where a head has no rotated ones.
        let passes = if out.iter().all(|(o, _)| o.tensor.is_empty()) { 0 } else { self.machine.passes() };
        for pass in 0..passes {
            for (output, held) in &out {
                let fill = poison(pass, output.tensor.dtype);
                self.machine.device.poison(held.buffer, fill).map_err(broke)?;
            }
            launches(self, pass, &buffers)?;
            let names: Vec<_> = out.iter().filter_map(|(o, _)| Some((o.name, o.first()?))).collect();
            self.watch(sink, first, &names)?;
            for (Output { tensor, slots, .. }, held) in &mut out {
                let bytes = self.machine.read(*held)?;
                if pass == 0 {
                    tensor.bytes = bytes;
                    let unwritten = self.machine.device.unwritten(held.buffer).map_err(broke)?.unwrap_or(0);
                    let spare = spare(held.bytes) as u64;
                    if unwritten > spare {
                        let n = unwritten - spare;
                        sink.evidence(
                            where_unwritten(tensor, slots).unwrap_or(first),
                            &format!("{n} of {} bytes of its memory were never written", held.bytes),
                        )?;
                        // Said once: who reads it is not at fault.
                        self.machine.write(*held, &tensor.bytes)?;
                    }
                    continue;
                }
                let mut different = false;
                for (id, columns) in slots.iter() {
                    if let Some(text) = apart(tensor, &bytes, columns.clone()) {
                        sink.evidence(*id, &text)?;
                        different = true;
                    }
                }
                if different {
                    // What was judged is what goes on.
                    self.machine.write(*held, &tensor.bytes)?;
                }
            }
        }
        Ok(out.into_iter().map(|(output, held)| (output.tensor, held)).collect())
    }

    /// Waits, and tells what the device saw and what was written outside of buffers: of the tensor `id`, but where a finding
    /// says that one of the `outputs` was not written.
    pub(super) fn watch(
        &mut self,
        sink: &mut dyn Sink,
        id: TensorId,
        outputs: &[(&str, TensorId)],
    ) -> Result<(), EngineError> {
        let mut left = MOST_GUARDS;
        while let Err(e) = self.machine.device.check_guards() {
            if !matches!(e.problem(), Problem::Guard { .. }) || left == 0 {
                return Err(self.machine.struck(e));
            }
            left -= 1;
            let what = format!("{}, in {}", e.problem(), e.place());
            sink.evidence(id, &what)?;
        }
        for finding in self.machine.device.take_findings() {
            let named = |(name, _): &&(&str, TensorId)| finding.contains(&format!("({name} + "));
            let unwritten = outputs.iter().find(named).filter(|_| finding.contains(UNWRITTEN));
            sink.evidence(unwritten.map_or(id, |o| o.1), &finding)?;
        }
        Ok(())
    }

    /// Hands a tensor over, and takes over what a deliberate fault made of it.
    pub(super) fn hand(
        &mut self,
        sink: &mut dyn Sink,
        id: TensorId,
        (mut tensor, held): (Tensor, Held),
    ) -> Result<Held, EngineError> {
        if sink.tensor(id, &mut tensor)? {
            self.machine.write(held, &tensor.bytes)?;
        }
        Ok(held)
    }

    /// Computes one tensor and hands it over.
    pub(super) fn stage(
        &mut self,
        sink: &mut dyn Sink,
        id: TensorId,
        launches: impl FnMut(&mut Self, usize, &[Held]) -> Result<(), EngineError>,
    ) -> Result<Held, EngineError> {
        let mut made = self.compute(sink, &[id], launches)?;
        let made = made.pop().ok_or_else(|| broke("a stage made nothing"))?;
        self.hand(sink, id, made)
    }
}

/// The tensor whose columns still hold the first pass's poison.
fn where_unwritten(tensor: &Tensor, slots: &[(TensorId, Range<usize>)]) -> Option<TensorId> {
    let (n, fill) = (tensor.dtype.bytes(), poison(0, tensor.dtype).bytes());
    let poisoned = |columns: &Range<usize>| {
        let rows = tensor.bytes.chunks((tensor.cols * n).max(1));
        rows.into_iter().any(|r| r[columns.start * n..columns.end * n].chunks(n).any(|v| v == fill))
    };
    slots.iter().find(|s| poisoned(&s.1)).or(slots.first()).map(|s| s.0)
}

/// In what two passes over different poison differ in some columns, in words.
fn apart(first: &Tensor, second: &[u8], columns: Range<usize>) -> Option<String> {
    let n = first.dtype.bytes();
    let (mut survivors, mut others, mut place) = (0u64, 0u64, None);
    let fills = [poison(0, first.dtype).bytes(), poison(1, first.dtype).bytes()];
    for (i, (a, b)) in first.bytes.chunks(n).zip(second.chunks(n)).enumerate() {
        if a != b && columns.contains(&(i % first.cols.max(1))) {
            place.get_or_insert(i);
            if a == fills[0] && b == fills[1] { survivors += 1 } else { others += 1 }
        }
    }
    let at = place?;
    let (row, col) = (at / first.cols.max(1), at % first.cols.max(1) - columns.start);
    let all = first.rows * columns.len();
    let mut said = Vec::new();
    if survivors > 0 {
        said.push(format!("{survivors} of {all} elements were never written"));
    }
    if others > 0 {
        said.push(format!("{others} of {all} elements differ between two runs over different poison"));
    }
    Some(format!("{}; first at row {row}, column {col}", said.join("; ")))
}
