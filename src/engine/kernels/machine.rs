/*!
A device with the kernels' code and the memory of one run.

Every output is poisoned before its kernels run. A device that keeps track of written bytes says itself what was wrong; on
any other each stage is computed twice, over a NaN and over a finite number, and what differs was never written, or
depends on what lay there before. Memory that is still held when this ends is given back.
*/

use super::code::Code;
use super::header::Entry;
use crate::device::{self, Arg, Buffer, Device, Launch, Pattern};
use crate::engine::EngineError;
use crate::trace::TensorId;
use mla_numeric::DType;

/// Passes of a device at most.
pub const PASSES: usize = 2;

/// The poison of a pass: NaN, and 1.5 * 2^10.
pub fn poison(pass: usize, dtype: DType) -> Pattern {
    let bits = if pass.is_multiple_of(PASSES) { u64::MAX } else { dtype.to_bits(1536.0) };
    if dtype.bytes() == 2 { Pattern::Bits16(bits as u16) } else { Pattern::Bits32(bits as u32) }
}

/// Bytes of memory beyond those that were asked for: whole words, and never nothing, since devices refuse that. No more: a
/// kernel has to write its output to the end.
pub fn spare(bytes: usize) -> usize {
    bytes.max(4).next_multiple_of(4) - bytes
}

/// Memory, with what it is for.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// The device's handle.
    pub buffer: Buffer,
    /// Bytes.
    pub bytes: usize,
}

/// One run's device.
pub struct Machine<'a, D: Device> {
    /// The device.
    pub device: &'a mut D,
    code: &'a mut Code,
    geometry: Vec<(&'static str, i64)>,
    held: Vec<Buffer>,
    /// The tensor that is computed, for errors.
    pub computing: Option<TensorId>,
}

/// What went wrong on the way: what, where, what to do.
pub fn broke(text: impl ToString) -> EngineError {
    EngineError::Broke(text.to_string())
}

impl<'a, D: Device> Machine<'a, D> {
    /// A device for one layer; `geometry` has the scalars that headers may ask for.
    pub fn new(device: &'a mut D, code: &'a mut Code, geometry: Vec<(&'static str, i64)>) -> Machine<'a, D> {
        Machine { device, code, geometry, held: Vec::new(), computing: None }
    }

    /// Passes that each stage takes.
    pub fn passes(&self) -> usize {
        if self.device.tracks() || !self.device.poisons() { 1 } else { PASSES }
    }

    /// What a kernel did to the device, with the tensor that was computed.
    pub fn struck(&self, e: device::Error) -> EngineError {
        let Some(TensorId { stage, form }) = self.computing else { return broke(e) };
        let form = form.map_or(String::new(), |f| format!("{}/", f.name()));
        broke(device::Error::new(
            e.problem().clone(),
            format!("{}, computing {form}{}", e.place(), stage.name()),
        ))
    }

    /// Poisoned memory; never nothing, since devices refuse that.
    pub fn allocate(&mut self, bytes: usize, what: &str) -> Result<Held, EngineError> {
        let buffer = self.device.allocate((bytes + spare(bytes)) as u64, what).map_err(broke)?;
        self.held.push(buffer);
        Ok(Held { buffer, bytes })
    }

    /// Memory with these bytes.
    pub fn upload(&mut self, bytes: &[u8], what: &str) -> Result<Held, EngineError> {
        let held = self.allocate(bytes.len(), what)?;
        self.device.write(held.buffer, 0, bytes).map_err(broke)?;
        Ok(held)
    }

    /// Memory with 32-bit numbers.
    pub fn upload_words(
        &mut self,
        words: impl IntoIterator<Item = u32>,
        what: &str,
    ) -> Result<Held, EngineError> {
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        self.upload(&bytes, what)
    }

    /// Gives memory back.
    pub fn free(&mut self, held: Held) -> Result<(), EngineError> {
        self.held.retain(|b| *b != held.buffer);
        self.device.free(held.buffer).map_err(broke)
    }

    /// All of some memory.
    pub fn read(&mut self, held: Held) -> Result<Vec<u8>, EngineError> {
        self.read_from(held, 0)
    }

    /// Memory from a byte on.
    pub fn read_from(&mut self, held: Held, at: usize) -> Result<Vec<u8>, EngineError> {
        let mut bytes = vec![0; held.bytes.saturating_sub(at)];
        self.device.read(held.buffer, at as u64, &mut bytes).map_err(|e| self.struck(e))?;
        Ok(bytes)
    }

    /// Some rows of memory from row `first` on, of so many bytes each; the first pass's poison for those that are not wanted.
    pub fn read_rows(
        &mut self,
        held: Held,
        (first, row_bytes, dtype): (usize, usize, DType),
        wanted: &[bool],
    ) -> Result<Vec<u8>, EngineError> {
        let mut bytes = poison(0, dtype).bytes().repeat(wanted.len() * row_bytes / dtype.bytes());
        for (row, into) in bytes.chunks_mut(row_bytes.max(1)).enumerate().filter(|(row, _)| wanted[*row]) {
            let read = self.device.read(held.buffer, ((first + row) * row_bytes) as u64, into);
            read.map_err(|e| self.struck(e))?;
        }
        Ok(bytes)
    }

    /// Replaces all of some memory.
    pub fn write(&mut self, held: Held, bytes: &[u8]) -> Result<(), EngineError> {
        self.device.write(held.buffer, 0, bytes).map_err(broke)
    }

    /// Entry points of a file that compute a stage: (name, most query rows of an item).
    pub fn entries(&self, file: &str, stage: &str) -> Result<Vec<(String, usize)>, EngineError> {
        let missing = || {
            let place = self.code.library().place(file);
            EngineError::Broke(format!(
                "no kernel computes {stage}\n  where: {place}\n  do: name the stage in a [[kernel]] of its header"
            ))
        };
        let header = &self.code.library().file(file).ok_or_else(missing)?.header;
        let computes = |k: &&Entry| k.stages.iter().any(|s| s == stage);
        let mut found = Vec::new();
        for k in header.kernels.iter().filter(computes) {
            let rows = match &k.rows {
                None => 1,
                Some(rows) => header.value(rows, &self.geometry).map_err(|e| self.refused(file, &e))?,
            };
            found.push((k.entry.clone(), usize::try_from(rows).unwrap_or(0).max(1)));
        }
        if found.is_empty() { Err(missing()) } else { Ok(found) }
    }

    fn refused(&self, file: &str, what: &str) -> EngineError {
        EngineError::Broke(format!(
            "{what}\n  where: {}\n  do: correct its header; docs/kernels.md has the fields",
            self.code.library().place(file)
        ))
    }

    /// The entry point that decodes a ggml type, if there is one.
    pub fn decoder(&self, ty: &str) -> Option<String> {
        self.code.library().decoder(ty).map(str::to_string)
    }

    /// Runs a kernel: geometry of the launch from its header, by what the layer has and `names`.
    pub fn launch(
        &mut self,
        entry: &str,
        names: &[(&'static str, usize)],
        arguments: &[Arg],
    ) -> Result<(), EngineError> {
        let Some((file, found)) = self.code.library().with_entry(entry) else {
            return Err(EngineError::Broke(format!(
                "no kernel is called {entry}\n  where: the kernel files\n  do: see docs/kernels.md"
            )));
        };
        let (file, header) = (file.to_string(), found.header.clone());
        let mut all: Vec<(&str, i64)> = self.geometry.clone();
        all.extend(names.iter().map(|(n, v)| (*n, *v as i64)));
        let value = |e: &str| header.value(e, &all).map_err(|e| self.refused(&file, &e));
        let Some(kernel) = header.entry(entry) else {
            return Err(self.refused(&file, "an entry point is missing"));
        };
        for condition in &kernel.requires {
            if value(condition)? == 0 {
                let shown: Vec<String> = all.iter().map(|(n, v)| format!("{n} = {v}")).collect();
                return Err(EngineError::Input(format!(
                    "kernel {entry} asks for {condition}, which does not hold: {}\n  where: {}\n  do: pass --kernels with one that takes this geometry, or --engine cpu",
                    shown.join(", "),
                    self.code.library().place(&file)
                )));
            }
        }
        let number = |e: &str| -> Result<u32, EngineError> {
            let v = value(e)?;
            u32::try_from(v).map_err(|_| self.refused(&file, &format!("{e:?} in its header is {v}")))
        };
        let mut grid = [1; 3];
        if kernel.grid.len() > 3 {
            return Err(self.refused(&file, "its header has a grid of more than three axes"));
        }
        for (g, e) in grid.iter_mut().zip(&kernel.grid) {
            *g = number(e)?;
        }
        let block = [number(&kernel.threads)?, 1, 1];
        let dynamic_shared = kernel.shared.as_deref().map_or(Ok(0), number)?;
        if grid.contains(&0) {
            return Ok(()); // nothing to do
        }
        let module = self.code.module(self.device, &file, &self.geometry)?;
        self.code.note(entry);
        let launch = Launch { module, kernel: entry, grid, block, dynamic_shared, arguments };
        self.device.launch(&launch).map_err(|e| self.struck(e))
    }
}

impl<D: Device> Drop for Machine<'_, D> {
    fn drop(&mut self) {
        for buffer in self.held.drain(..) {
            // What can't be given back after an error is the device's own affair.
            let _ = self.device.free(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::library::Library;
    use super::*;
    use crate::device::ptx::PtxMachine;
    use crate::nvrtc::Target;

    #[test]
    fn poison_is_nan_and_then_the_same_number_in_every_dtype() {
        for dtype in crate::engine::kernels::header::COMPUTED {
            let value = |pass| {
                let bytes = poison(pass, dtype).bytes();
                let mut value = [0.0];
                dtype.decode(&bytes, &mut value);
                value[0]
            };
            assert!(value(0).is_nan() && value(1) == 1536.0, "{dtype}");
        }
        assert_eq!(poison(1, DType::F16).bytes(), 0x6600u16.to_le_bytes());
    }

    #[test]
    fn rows_that_nobody_wants_are_poison() {
        let mut device = PtxMachine::new(Target::compute(120)).unwrap();
        let mut code = Code::new(Library::built_in().unwrap());
        let mut machine = Machine::new(&mut device, &mut code, Vec::new());
        let held = machine.upload(&[1, 2, 3, 4, 5, 6, 7, 8], "rows").unwrap();
        let read = machine.read_rows(held, (1, 2, DType::Bf16), &[true, false, true]).unwrap();
        assert_eq!(read, [3, 4, 0xff, 0xff, 7, 8]);
    }
}
