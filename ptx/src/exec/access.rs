/*! Loads, stores, atomics and `cp.async`. */

use super::block::Block;
use super::regs::{LANES, V, W};
use super::shared::Access;
use super::warp::{Pending, Warp, lanes};
use crate::finding::{At, Kind};
use crate::fp::{self, Half, HalfMode};
use crate::ir::{Inst, Reg, Space, Update};
use crate::mem::global::{Fault, Met};
use crate::mem::{LOCAL, SHARED, WINDOW_BITS, within};
use crate::ty::Ty;

/// Which space an address of a space is in, and where there.
#[inline(always)]
fn resolve(space: Space, a: u64) -> (Space, u64) {
    match space {
        Space::Generic => match a >> WINDOW_BITS {
            w if w == SHARED >> WINDOW_BITS => (Space::Shared, within(a)),
            w if w == LOCAL >> WINDOW_BITS => (Space::Local, within(a)),
            _ => (Space::Global, a),
        },
        Space::Shared | Space::Local => (space, a & 0xffff_ffff),
        Space::Global => (space, a),
    }
}

/// Addresses of a register and an offset.
#[inline(always)]
fn addresses(w: &Warp, r: Reg, offset: i64) -> W {
    w.regs.get64(r).map(|a| a.wrapping_add(offset as u64))
}

impl Block<'_> {
    pub fn global_fault(&mut self, at: At, fault: Fault, what: &str, n: u32, a: u64) {
        let offset = within(a);
        match fault {
            Fault::Misaligned => {
                self.sink.report(Kind::Misaligned, at, || format!("global {what} of {n} bytes at {a:#x}"))
            }
            Fault::ReadOnly => {
                self.sink.report(Kind::ReadOnly, at, || format!("{what} of {n} bytes at {a:#x}"))
            }
            Fault::Nowhere => self.sink.report(Kind::GlobalOutOfBounds, at, || {
                format!("{what} of {n} bytes at {a:#x}, in no allocation")
            }),
            Fault::Beyond(size) => self.sink.report(Kind::GlobalOutOfBounds, at, || {
                format!("{what} of {n} bytes at {a:#x}, offset {offset} of an allocation of {size} bytes")
            }),
        }
    }

    /// Up to 16 bytes from wherever `a` is.
    #[inline]
    #[allow(clippy::too_many_arguments)]
    fn fetch(&mut self, w: &Warp, at: At, space: Space, a: u64, n: u32, access: Access, out: &mut [u8; 16]) {
        match resolve(space, a) {
            (Space::Shared, a) => self.shared.read(&mut self.sink, at, &w.clock, a, n, access, out),
            (Space::Local, a) => {
                if let Some(from) = self.local(at, a, n, "read") {
                    out[..n as usize].copy_from_slice(&w.local[from..from + n as usize]);
                }
            }
            (_, a) => match self.launch.view.read(a, n, out) {
                Ok(true) => {}
                Ok(false) => self.sink.report(Kind::GlobalUninitialised, at, || {
                    format!("read of {n} bytes at offset {} of {a:#x}", within(a))
                }),
                Err(f) => self.global_fault(at, f, "read", n, a),
            },
        }
    }

    /// The lane's place in the local memory of a warp.
    fn local(&mut self, at: At, a: u64, n: u32, what: &str) -> Option<usize> {
        let size = u64::from(self.launch.program.local_bytes);
        if a + u64::from(n) > size {
            self.sink.report(Kind::LocalOutOfBounds, at, || format!("{what} of {n} bytes at {a} of {size}"));
            return None;
        }
        if a & u64::from(n - 1) != 0 {
            self.sink.report(Kind::Misaligned, at, || format!("local {what} of {n} bytes at {a}"));
            return None;
        }
        Some((u64::from(at.lane) * size + a) as usize)
    }

    #[inline]
    fn place(&mut self, w: &mut Warp, at: At, space: Space, a: u64, v: &[u8], access: Access) {
        let n = v.len() as u32;
        match resolve(space, a) {
            (Space::Shared, a) => self.shared.write(&mut self.sink, at, &w.clock, a, v, access),
            (Space::Local, a) => {
                if let Some(to) = self.local(at, a, n, "write") {
                    w.local[to..to + v.len()].copy_from_slice(v);
                }
            }
            (_, a) => {
                let watch = self.watch_overlap && access != Access::Atomic;
                match self.launch.view.write(a, n, v, self.id, watch) {
                    Ok(Met::Nothing) => {}
                    Ok(Met::Block(o)) => {
                        let [x, y, _] = self.launch.grid;
                        self.sink.report(Kind::BlockOverlap, at, || {
                            let (bx, by, bz) = (o % x, o / x % y, o / x / y);
                            format!("offset {} is also written by block ({bx}, {by}, {bz})", within(a))
                        });
                    }
                    Err(f) => self.global_fault(at, f, "write", n, a),
                }
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub fn load(&mut self, w: &mut Warp, x: &Inst, m: u32, pc: u32, space: Space, ty: Ty, count: u8) {
        let a = addresses(w, x.src[0], x.offset);
        let (n, count) = (ty.bytes(), usize::from(count));
        let total = n * count as u32;
        if n == 4 {
            // The common case: 32-bit elements go straight to 32-bit rows.
            let mut rows: [V; 4] = [[0; LANES]; 4];
            for l in lanes(m) {
                let mut raw = [0; 16];
                self.fetch(w, w.at(pc, l), space, a[l], total, Access::Plain, &mut raw);
                for (row, e) in rows.iter_mut().zip(raw.as_chunks::<4>().0).take(count) {
                    row[l] = u32::from_le_bytes(*e);
                }
            }
            for (d, row) in x.dst.iter().zip(&rows).take(count) {
                if ty.signed() && matches!(d, Reg::D(_)) {
                    w.regs.put64(*d, m, &row.map(|v| ty.extend(u64::from(v))));
                } else {
                    w.regs.put32(*d, m, row);
                }
            }
            return;
        }
        let mut rows: [W; 4] = [[0; LANES]; 4];
        for l in lanes(m) {
            let mut raw = [0; 16];
            self.fetch(w, w.at(pc, l), space, a[l], total, Access::Plain, &mut raw);
            for (e, row) in rows.iter_mut().enumerate().take(count) {
                row[l] = element(&raw, e, n, ty);
            }
        }
        for (d, row) in x.dst.iter().zip(&rows).take(count) {
            w.regs.put64(*d, m, row);
        }
    }

    pub fn parameter(&mut self, w: &mut Warp, x: &Inst, m: u32, pc: u32, ty: Ty, count: u8) {
        let a = addresses(w, x.src[0], x.offset);
        let n = ty.bytes() as usize;
        let total = n * usize::from(count);
        let mut rows: [W; 4] = [[0; LANES]; 4];
        for l in lanes(m) {
            let from = a[l] as usize;
            let Some(bytes) = from.checked_add(total).and_then(|end| self.launch.parameters.get(from..end))
            else {
                let size = self.launch.parameters.len();
                let at = w.at(pc, l);
                self.sink
                    .report(Kind::ParameterOutOfBounds, at, || format!("{total} bytes at {from} of {size}"));
                continue;
            };
            let mut raw = [0; 16];
            raw[..total.min(16)].copy_from_slice(&bytes[..total.min(16)]);
            for (e, row) in rows.iter_mut().enumerate().take(usize::from(count)) {
                row[l] = element(&raw, e, n as u32, ty);
            }
        }
        for (d, row) in x.dst.iter().zip(&rows).take(usize::from(count)) {
            w.regs.put64(*d, m, row);
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub fn store(&mut self, w: &mut Warp, x: &Inst, m: u32, pc: u32, space: Space, ty: Ty, count: u8) {
        let a = addresses(w, x.src[0], x.offset);
        let (n, count) = (ty.bytes() as usize, usize::from(count));
        let mut rows: [W; 4] = [[0; LANES]; 4];
        for (row, s) in rows.iter_mut().zip(&x.src[1..]).take(count) {
            *row = w.regs.get64(*s);
        }
        for l in lanes(m) {
            let mut raw = [0; 16];
            for (e, row) in rows.iter().enumerate().take(count) {
                raw[e * n..e * n + n].copy_from_slice(&row[l].to_le_bytes()[..n]);
            }
            let at = w.at(pc, l);
            self.place(w, at, space, a[l], &raw[..n * count], Access::Plain);
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub fn atomic(&mut self, w: &mut Warp, x: &Inst, m: u32, pc: u32, space: Space, ty: Ty, update: Update) {
        let a = addresses(w, x.src[0], x.offset);
        let (v, second) = (w.regs.get64(x.src[1]), w.regs.get64(x.src[2]));
        let n = ty.bytes();
        let mut old = [0u64; LANES];
        let view = &self.launch.view;
        let _held = view.atomic();
        for l in lanes(m) {
            let mut raw = [0; 16];
            let at = w.at(pc, l);
            self.fetch(w, at, space, a[l], n, Access::Atomic, &mut raw);
            old[l] = element(&raw, 0, n, ty);
            let new = updated(update, ty, old[l], ty.extend(v[l]), ty.extend(second[l]));
            self.place(w, at, space, a[l], &new.to_le_bytes()[..n as usize], Access::Atomic);
        }
        w.regs.put64(x.dst[0], m, &old);
    }

    pub fn copy_async(&mut self, w: &mut Warp, x: &Inst, m: u32, pc: u32, bytes: u8) {
        let to = addresses(w, x.src[0], x.offset);
        let from = addresses(w, x.src[1], x.offset2);
        let n = u32::from(bytes);
        let valid = if x.src[2] == Reg::None { [n; LANES] } else { w.regs.get32(x.src[2]) };
        for l in lanes(m) {
            let at = w.at(pc, l);
            let valid = valid[l].min(n);
            if from[l] & u64::from(n - 1) != 0 {
                let a = from[l];
                self.sink.report(Kind::Misaligned, at, || format!("cp.async of {n} bytes from {a:#x}"));
                continue;
            }
            if !self.readable(at, from[l], n, valid) {
                continue;
            }
            let (_, place) = resolve(Space::Shared, to[l]);
            if self.shared.issue(&mut self.sink, at, &w.clock, place, n, n) {
                w.copies.push(Pending {
                    lane: l as u8,
                    bytes,
                    valid: valid as u8,
                    group: w.commits[l],
                    to: place as u32,
                    from: from[l],
                });
            }
        }
    }

    /// Whether the source of a copy can be read; what is wrong with it is reported at the copy.
    fn readable(&mut self, at: At, from: u64, n: u32, valid: u32) -> bool {
        let mut raw = [0; 16];
        let (step, width) = if valid == n { (n, n) } else { (1, 1) };
        let mut i = 0;
        while i < valid {
            match self.launch.view.read(from + u64::from(i), width, &mut raw) {
                Ok(true) => {}
                Ok(false) => {
                    self.sink.report(Kind::GlobalUninitialised, at, || {
                        format!("cp.async of {valid} bytes at offset {} of {from:#x}", within(from))
                    });
                    return true;
                }
                Err(f) => {
                    self.global_fault(at, f, "cp.async", valid, from);
                    return false;
                }
            }
            i += step;
        }
        true
    }

    /// Copies of the lanes of `m` land, but for those of each lane's last `keep` groups.
    pub fn wait_copies(&mut self, w: &mut Warp, m: u32, pc: u32, keep: Option<u32>) {
        if keep.is_none() {
            lanes(m).for_each(|l| w.commits[l] += 1);
        }
        let keep = keep.unwrap_or(0);
        let count = w.clock[w.id];
        let mut rest = Vec::with_capacity(w.copies.len());
        for c in std::mem::take(&mut w.copies) {
            let l = usize::from(c.lane);
            if m >> l & 1 == 0 || c.group.saturating_add(keep) >= w.commits[l] {
                rest.push(c);
                continue;
            }
            let mut raw = [0; 16];
            if c.valid == c.bytes {
                let _ = self.launch.view.read(c.from, u32::from(c.bytes), &mut raw);
            } else {
                for i in 0..c.valid {
                    let mut one = [0; 16];
                    let _ = self.launch.view.read(c.from + u64::from(i), 1, &mut one);
                    raw[usize::from(i)] = one[0];
                }
            }
            self.shared.land(w.at(pc, l), count, c.to as usize, &raw[..usize::from(c.bytes)]);
        }
        w.copies = rest;
    }
}

/// Element `e` of a vector in memory, extended to 64 bits.
#[inline(always)]
fn element(raw: &[u8; 16], e: usize, n: u32, ty: Ty) -> u64 {
    let (n, mut word) = (n as usize, [0; 8]);
    word[..n].copy_from_slice(&raw[e * n..e * n + n]);
    ty.extend(u64::from_le_bytes(word))
}

/// What an atomic leaves in memory; operands are extended by their type.
pub fn updated(update: Update, ty: Ty, old: u64, v: u64, second: u64) -> u64 {
    let signed = ty.signed();
    match (update, ty) {
        (Update::Add, Ty::F32) => {
            let s = f32::from_bits(old as u32) + f32::from_bits(v as u32);
            u64::from(if s.is_nan() { fp::CANONICAL_NAN } else { s.to_bits() })
        }
        (Update::Add, Ty::F64) => (f64::from_bits(old) + f64::from_bits(v)).to_bits(),
        (Update::Add, Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2) => {
            let h = if matches!(ty, Ty::F16 | Ty::F16x2) { Half::F16 } else { Half::Bf16 };
            let add = |shift: u32| {
                let a = [(old >> shift) as u16, (v >> shift) as u16, 0];
                u64::from(fp::half_op(h, HalfMode::default(), a, |a, b, _| fp::add_odd(a, b))) << shift
            };
            if ty.bytes() == 4 { add(0) | add(16) } else { add(0) }
        }
        (Update::Add, _) => old.wrapping_add(v),
        (Update::Min, _) if signed => (old as i64).min(v as i64) as u64,
        (Update::Max, _) if signed => (old as i64).max(v as i64) as u64,
        (Update::Min, _) => old.min(v),
        (Update::Max, _) => old.max(v),
        (Update::And, _) => old & v,
        (Update::Or, _) => old | v,
        (Update::Xor, _) => old ^ v,
        (Update::Exch, _) => v,
        (Update::Cas, _) => {
            if old == v {
                second
            } else {
                old
            }
        }
        (Update::Inc, _) => {
            if old >= v {
                0
            } else {
                old + 1
            }
        }
        (Update::Dec, _) => {
            if old == 0 || old > v {
                v
            } else {
                old - 1
            }
        }
    }
}
