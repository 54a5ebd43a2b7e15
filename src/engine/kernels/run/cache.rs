/*!
The paged cache: written by slot, read through page tables, decompressed to keys and values.
*/

use super::super::machine::{Held, PASSES, broke, poison, spare};
use super::simple::Product;
use super::{Run, Shared};
use crate::device::{Arg, Device};
use crate::engine::{EngineError, Sink};
use crate::trace::{Tensor, TensorId};
use mla_reference::{Form, Stage, Weight};

/// Page tables begin at multiples of so many entries.
const TABLE: usize = 8;

/// The page tables of all sequences, for each pass: entries behind a table's end differ.
pub struct Pages {
    pub tables: Vec<Held>,
    pub begin: Vec<usize>,
}

impl<D: Device> Run<'_, '_, D> {
    /// The pool, one for each pass: context as given, new tokens by the kernel, all else poison.
    pub(super) fn cache(
        &mut self,
        sink: &mut dyn Sink,
        latent: Held,
        k_pe: Held,
    ) -> Result<Vec<Held>, EngineError> {
        let (g, plan) = (self.geometry(), self.plan());
        let id = TensorId::shared(Stage::Cache);
        self.machine.computing = Some(id);
        let mut tensor = Tensor::zeros(id, plan, g, self.stored(Stage::Cache));
        let (dtype, row_bytes) = (tensor.dtype, g.cache() * tensor.dtype.bytes());
        // Pages in front of the plan's own have memory, and no tensor.
        let first = self.first_slot();
        let mut owned = vec![false; tensor.rows];
        let mut context = Vec::new();
        for (i, seq) in plan.sequences.iter().enumerate() {
            for (position, &slot) in seq.slots.iter().enumerate() {
                owned[slot] = true;
                if position < seq.context {
                    context.push((slot, dtype.encode(&self.case.given.context[i].row(position).to_vec())));
                }
            }
        }
        // Tokens that several sequences share are written to each one's slots.
        let mut writes: Vec<(u32, u32)> = Vec::new();
        for seq in &plan.sequences {
            writes.extend(
                seq.tokens.clone().zip(&seq.slots[seq.context..]).map(|(t, s)| (t as u32, *s as u32)),
            );
        }
        let tokens = self.machine.upload_words(writes.iter().map(|w| w.0), "tokens")?;
        let to = self.machine.upload_words(writes.iter().map(|w| first as u32 + w.1), "slots")?;
        let mut pools = Vec::new();
        for pass in 0..self.machine.passes() {
            let pool = self.machine.allocate(first * row_bytes + tensor.bytes.len(), "cache")?;
            self.machine.device.poison(pool.buffer, poison(pass, dtype)).map_err(broke)?;
            for (slot, bytes) in &context {
                let at = ((first + slot) * row_bytes) as u64;
                self.machine.device.write(pool.buffer, at, bytes).map_err(broke)?;
            }
            let arguments = [
                Arg::In(latent.buffer),
                Arg::In(k_pe.buffer),
                Arg::In(tokens.buffer),
                Arg::In(to.buffer),
                Arg::InOut(pool.buffer),
                (g.latent as i32).into(),
                (g.rope as i32).into(),
            ];
            self.machine.launch("cache_write", &[("rows", writes.len())], &arguments)?;
            self.watch(sink, id, &[])?;
            let known = self.machine.device.poisons();
            let bytes = if known {
                self.machine.read_from(pool, first * row_bytes)?
            } else {
                // What nobody owns nobody wrote.
                self.machine.read_rows(pool, (first, row_bytes, dtype), &owned)?
            };
            let left = self.machine.device.unwritten(pool.buffer).map_err(broke)?;
            let nobodys = pool.bytes + spare(pool.bytes) - row_bytes * owned.iter().filter(|o| **o).count();
            if let Some(n) = left.and_then(|n| n.checked_sub(nobodys as u64)).filter(|n| *n > 0) {
                sink.evidence(id, &format!("{n} bytes of the slots of requests were never written"))?;
            }
            let poisoned = poison(pass, dtype).bytes();
            let stray = (0..tensor.rows)
                .filter(|r| known && !owned[*r])
                .find(|r| bytes[r * row_bytes..][..row_bytes].chunks(poisoned.len()).any(|c| c != poisoned));
            if let Some(slot) = stray {
                sink.evidence(id, &format!("slot {slot} was written, which no request owns"))?;
            }
            // What every slot holds from here on was said of the cache: who reads it is not at fault.
            let tracked = self.machine.device.tracks();
            for slot in (0..tensor.rows).filter(|r| tracked && owned[*r]) {
                let at = ((first + slot) * row_bytes) as u64;
                let line = &bytes[slot * row_bytes..][..row_bytes];
                self.machine.device.write(pool.buffer, at, line).map_err(broke)?;
            }
            if pass == 0 {
                tensor.bytes = bytes;
            } else {
                let apart = |r: &usize| {
                    owned[*r]
                        && bytes[r * row_bytes..][..row_bytes] != tensor.bytes[r * row_bytes..][..row_bytes]
                };
                if let Some(slot) = (0..tensor.rows).find(apart) {
                    sink.evidence(
                        id,
                        &format!("slot {slot} depends on what lay there before: it was not wholly written"),
                    )?;
                }
            }
            pools.push(pool);
        }
        let before = tensor.bytes.clone();
        if sink.tensor(id, &mut tensor)? {
            for (slot, (new, old)) in tensor.bytes.chunks(row_bytes).zip(before.chunks(row_bytes)).enumerate()
            {
                for pool in pools.iter().filter(|_| new != old) {
                    let at = ((first + slot) * row_bytes) as u64;
                    self.machine.device.write(pool.buffer, at, new).map_err(broke)?;
                }
            }
        }
        self.machine.free(tokens)?;
        self.machine.free(to)?;
        Ok(pools)
    }

    /// k: each head's latent · w_uk, beside a copy of the rope columns.
    pub(super) fn keys(
        &mut self,
        sink: &mut dyn Sink,
        shared: &Shared,
        slots: Held,
    ) -> Result<Held, EngineError> {
        let g = self.geometry();
        let (stage, m, heads) = (Stage::K, self.plan().rows(Stage::K, Some(Form::Fused)), g.heads);
        let p = Product {
            weight: Weight::WUk,
            m,
            n: g.nope,
            k: g.latent,
            heads,
            a: (g.cache(), 0),
            b: g.nope,
            c: (heads * g.key(), g.key()),
            transposed: true,
        };
        self.stage(sink, TensorId::of(stage, Form::Fused), |run, pass, out| {
            run.product(shared.cache[pass], slots, &p, out[0], false)?;
            let arguments = [
                Arg::In(shared.cache[pass].buffer),
                Arg::In(slots.buffer),
                Arg::InOut(out[0].buffer),
                (heads as i32).into(),
                (g.nope as i32).into(),
                (g.latent as i32).into(),
                (g.rope as i32).into(),
            ];
            run.machine.launch("key_rope", &[("rows", m)], &arguments)
        })
    }

    pub(super) fn values(
        &mut self,
        sink: &mut dyn Sink,
        shared: &Shared,
        slots: Held,
    ) -> Result<Held, EngineError> {
        let g = self.geometry();
        let (stage, m, n) = (Stage::V, self.plan().rows(Stage::V, Some(Form::Fused)), g.heads * g.value);
        let p = Product {
            weight: Weight::WUv,
            m,
            n,
            k: g.latent,
            heads: 1,
            a: (g.cache(), 0),
            b: g.latent,
            c: (n, 0),
            transposed: false,
        };
        self.stage(sink, TensorId::of(stage, Form::Fused), |run, pass, out| {
            run.product(shared.cache[pass], slots, &p, out[0], true)
        })
    }

    /// Page tables. Behind each stand an entry of another page, and ids of pages that there are not.
    pub(super) fn pages(&mut self) -> Result<Pages, EngineError> {
        let plan = self.plan();
        let (mut begin, mut entries) = (Vec::new(), Vec::new());
        for (i, seq) in plan.sequences.iter().enumerate() {
            begin.push(entries.len());
            let page = |at: &usize| at / plan.page_size;
            let odd = seq.slots.iter().enumerate().find(|(p, slot)| {
                page(slot) != page(&seq.slots[p - p % plan.page_size])
                    || *slot % plan.page_size != p % plan.page_size
            });
            if let Some((position, slot)) = odd {
                return Err(broke(format!(
                    "position {position} lies in slot {slot}, which no page table can say\n  where: sequence {i}\n  do: draw the case in whole pages"
                )));
            }
            let id = |page: usize| (self.first_page + page) as u32;
            entries.extend(seq.slots.iter().step_by(plan.page_size).map(|s| [id(page(s)); PASSES]));
            // Reading one too far is told by what differs between passes, reading on ends outside of the pool.
            entries.push([id(0), id(plan.pages.saturating_sub(1))]);
            entries.resize(entries.len().next_multiple_of(TABLE), [i32::MAX as u32, u32::MAX]);
        }
        let mut tables = Vec::new();
        for pass in 0..self.machine.passes() {
            tables.push(self.machine.upload_words(entries.iter().map(|e| e[pass]), "page tables")?);
        }
        Ok(Pages { tables, begin })
    }
}
