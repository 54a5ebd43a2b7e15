/*!
Weights on the device, and as the judge is shown them: read back from there. The device decodes stored blocks itself.
*/

use super::machine::{Held, Machine, broke, poison, spare};
use crate::device::{Arg, Device};
use crate::engine::stack::{self, QkvA, Slot};
use crate::engine::{EngineError, Sink};
use crate::model::Layer;
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{WEIGHTS, Weight};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Rows that a thread rounds at once.
const ROWS: usize = 64;

/// Bits read back from a device.
struct ReadBack {
    bytes: Vec<u8>,
    rows: usize,
    cols: usize,
    dtype: DType,
}

impl Rows for ReadBack {
    fn rows(&self) -> usize {
        self.rows
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let n = self.dtype.bytes();
        let at = (row * self.cols + k0) * n;
        self.dtype.decode(&self.bytes[at..at + out.len() * n], out);
    }
}

/// The weights of a layer on a device.
pub struct Uploaded {
    /// Each by itself.
    pub alone: BTreeMap<Weight, Held>,
    /// q_a and kv_a under each other, and their slots.
    pub stack: Option<(Held, [Slot; 2])>,
}

/// Uploads every weight of a layer and shows the judge what the device holds: of a stack the rows at its slots.
pub fn upload<D: Device>(
    machine: &mut Machine<D>,
    layer: &Layer,
    (dtype, qkv_a): (DType, QkvA),
    sink: &mut dyn Sink,
) -> Result<Uploaded, EngineError> {
    let mut all = BTreeMap::new();
    let slots = stack::qkv_a(&layer.spec.geometry).filter(|_| qkv_a == QkvA::Stacked);
    let stack = match slots {
        Some(slots) => Some((stacked(machine, layer, (dtype, &slots), sink)?, slots)),
        None => None,
    };
    for w in WEIGHTS.iter().map(|r| r.weight).filter(|w| w.exists(&layer.spec.geometry)) {
        let missing = || {
            broke(format!(
                "the layer has no {w}\n  where: layer {}\n  do: check the file with inspect",
                layer.index
            ))
        };
        let held = if w.is_norm() {
            let values = layer.weights.norm(w).ok_or_else(missing)?;
            let held = machine.upload(&DType::F32.encode(values), w.name())?;
            let back = machine.read(held)?;
            let mut values = vec![0.0; values.len()];
            DType::F32.decode(&back, &mut values);
            sink.norm(w, &values)?;
            held
        } else if let Some((held, slot)) = slot_of(&stack, w) {
            let (rows, cols) = w.matrix(&layer.spec.geometry);
            let line = cols * dtype.bytes();
            let bytes = machine.read(held)?[slot.rows.start * line..slot.rows.end * line].to_vec();
            sink.weight(w, &ReadBack { bytes, rows, cols, dtype })?;
            continue;
        } else {
            let rows = layer.weights.matrix(w).ok_or_else(missing)?;
            let held = on_device(machine, rows, dtype, w.name())?;
            let bytes = shown(machine, held, w, sink)?;
            sink.weight(w, &ReadBack { bytes, rows: rows.rows(), cols: rows.cols(), dtype })?;
            held
        };
        all.insert(w, held);
    }
    Ok(Uploaded { alone: all, stack })
}

fn slot_of(stack: &Option<(Held, [Slot; 2])>, weight: Weight) -> Option<(Held, &Slot)> {
    let (held, slots) = stack.as_ref()?;
    Some((*held, slots.iter().find(|s| s.weight == weight)?))
}

/// Weights under each other in one buffer, each decoded by its own type before it is laid there.
fn stacked<D: Device>(
    machine: &mut Machine<D>,
    layer: &Layer,
    (dtype, slots): (DType, &[Slot]),
    sink: &mut dyn Sink,
) -> Result<Held, EngineError> {
    let mut parts = Vec::new();
    for slot in slots {
        let name = slot.weight.name();
        let rows =
            layer.weights.matrix(slot.weight).ok_or_else(|| broke(format!("the layer has no {name}")))?;
        let held = on_device(machine, rows, dtype, name)?;
        parts.push(shown(machine, held, slot.weight, sink)?);
        machine.free(held)?;
    }
    machine.upload(&parts.concat(), stack::QKV_A)
}

/// A weight's bytes, after what the device saw go wrong while they were made was told of the weight.
fn shown<D: Device>(
    machine: &mut Machine<D>,
    held: Held,
    weight: Weight,
    sink: &mut dyn Sink,
) -> Result<Vec<u8>, EngineError> {
    for finding in machine.device.take_findings() {
        sink.weight_evidence(weight, &finding)?;
    }
    let bytes = machine.read(held)?;
    let left = machine.device.unwritten(held.buffer).map_err(broke)?.unwrap_or(0);
    if left > spare(held.bytes) as u64 {
        let n = left - spare(held.bytes) as u64;
        sink.weight_evidence(
            weight,
            &format!("{n} of {} bytes of its memory were never written", held.bytes),
        )?;
        // Said once: who reads it is not at fault.
        machine.write(held, &bytes)?;
    }
    Ok(bytes)
}

/// A weight's values on the device, each rounded once.
fn on_device<D: Device>(
    machine: &mut Machine<D>,
    rows: &dyn Rows,
    dtype: DType,
    name: &str,
) -> Result<Held, EngineError> {
    match decoded(machine, rows, dtype, name)? {
        Some(held) => Ok(held),
        None => machine.upload(&rounded(rows, dtype), name),
    }
}

/// A weight decoded on the device from its stored blocks. None where it is no plain matrix of blocks (a weight that is
/// taken out of another, one that a probe or a deliberate fault changed), or no kernel takes its type.
fn decoded<D: Device>(
    machine: &mut Machine<D>,
    rows: &dyn Rows,
    dtype: DType,
    name: &str,
) -> Result<Option<Held>, EngineError> {
    let Some((ty, bytes)) = rows.stored() else { return Ok(None) };
    let Some(entry) = machine.decoder(ty.name()) else { return Ok(None) };
    let count = bytes.len() / ty.block_bytes().max(1);
    let blocks = machine.upload(bytes, name)?;
    let out = machine.allocate(rows.rows() * rows.cols() * dtype.bytes(), name)?;
    machine.device.poison(out.buffer, poison(0, dtype)).map_err(broke)?;
    let arguments = [Arg::In(blocks.buffer), Arg::Out(out.buffer), (count as u64).into()];
    machine.launch(&entry, &[("blocks", count)], &arguments)?;
    machine.device.synchronise().map_err(broke)?;
    machine.free(blocks)?;
    Ok(Some(out))
}

/// A weight's values, each rounded once.
fn rounded(rows: &dyn Rows, dtype: DType) -> Vec<u8> {
    let line = rows.cols() * dtype.bytes();
    let mut bytes = vec![0; rows.rows() * line];
    bytes.par_chunks_mut((line * ROWS).max(1)).enumerate().for_each(|(i, chunk)| {
        let mut exact = vec![0.0; rows.cols()];
        for (j, out) in chunk.chunks_mut(line.max(1)).enumerate() {
            rows.decode(i * ROWS + j, 0, &mut exact);
            dtype.encode_into(&exact, out);
        }
    });
    bytes
}
