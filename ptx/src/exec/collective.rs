/*! Operations in which lanes see each other: comparisons' bits, shuffles, votes, reductions, matrices. */

use super::block::{Block, Fatal};
use super::mma;
use super::regs::{Compare, LANES, V, W};
use super::shared::Access;
use super::warp::{Warp, lanes};
use crate::finding::Kind;
use crate::ir::{Inst, Join, Shuffle, Update, Vote};

impl Block<'_> {
    pub fn compare(&mut self, w: &mut Warp, x: &Inst, m: u32, k: Compare, join: Join) {
        let r = k.run(&w.regs, x);
        let with = w.regs.pred(x.src[2]);
        let joined = |v: u32| match join {
            Join::None => v,
            Join::And => v & with,
            Join::Or => v | with,
            Join::Xor => v ^ with,
        };
        w.regs.put_pred(x.dst[0], m, joined(r));
        w.regs.put_pred(x.dst[1], m, joined(!r));
    }

    pub fn pack(&mut self, w: &mut Warp, x: &Inst, m: u32, parts: u8, bits: u8) {
        let mask = u64::MAX >> (64 - u32::from(bits));
        let mut out: W = [0; LANES];
        for (i, &s) in x.src.iter().enumerate().take(usize::from(parts)) {
            let v = w.regs.get64(s);
            for (o, v) in out.iter_mut().zip(v) {
                *o |= (v & mask) << (usize::from(bits) * i);
            }
        }
        w.regs.put64(x.dst[0], m, &out);
    }

    pub fn unpack(&mut self, w: &mut Warp, x: &Inst, m: u32, parts: u8, bits: u8) {
        let mask = u64::MAX >> (64 - u32::from(bits));
        let v = w.regs.get64(x.src[0]);
        for (i, &d) in x.dst.iter().enumerate().take(usize::from(parts)) {
            w.regs.put64(d, m, &v.map(|v| v >> (usize::from(bits) * i) & mask));
        }
    }

    pub fn shuffle(&mut self, w: &mut Warp, x: &Inst, m: u32, pc: u32, kind: Shuffle) {
        let (v, b, c) = (w.regs.get32(x.src[0]), w.regs.get32(x.src[1]), w.regs.get32(x.src[2]));
        let (mut out, mut inside, mut bad): (V, u32, u32) = ([0; LANES], 0, 0);
        for l in lanes(m) {
            let lane = l as i32;
            let (clamp, segment) = ((c[l] & 31) as i32, (c[l] >> 8 & 31) as i32);
            let (low, high) = (lane & segment, lane & segment | clamp & !segment);
            let b = (b[l] & 31) as i32;
            let (from, ok) = match kind {
                Shuffle::Up => (lane - b, lane - b >= high),
                Shuffle::Down => (lane + b, lane + b <= high),
                Shuffle::Butterfly => (lane ^ b, lane ^ b <= high),
                Shuffle::Index => (low | b & !segment, low | b & !segment <= high),
            };
            let from = if ok { from } else { lane } & 31;
            inside |= u32::from(ok) << l;
            bad |= u32::from(m >> from & 1 == 0) << l;
            out[l] = v[from as usize];
        }
        if bad != 0 {
            self.each(w, bad, pc, Kind::ShuffleInactive, |_| "the lane read from does not take part".into());
        }
        w.regs.put32(x.dst[0], m, &out);
        w.regs.put_pred(x.dst[1], m, inside);
    }

    pub fn vote(&mut self, w: &mut Warp, x: &Inst, m: u32, kind: Vote) {
        let p = w.regs.pred(x.src[0]) & m;
        let all = |v: bool| if v { !0 } else { 0 };
        match kind {
            Vote::Ballot => w.regs.put32(x.dst[0], m, &[p; LANES]),
            Vote::Any => w.regs.put_pred(x.dst[0], m, all(p != 0)),
            Vote::All => w.regs.put_pred(x.dst[0], m, all(p == m)),
            Vote::Uni => w.regs.put_pred(x.dst[0], m, all(p == m || p == 0)),
        }
    }

    pub fn matching(&mut self, w: &mut Warp, x: &Inst, m: u32, all: bool, wide: bool) {
        let mut v = w.regs.get64(x.src[0]);
        if !wide {
            v = v.map(|v| v & 0xffff_ffff);
        }
        let mut out: V = [0; LANES];
        for l in lanes(m) {
            out[l] = lanes(m).filter(|&k| v[k] == v[l]).fold(0, |o, k| o | 1 << k);
        }
        if all {
            let same = lanes(m).all(|l| out[l] == m);
            w.regs.put32(x.dst[0], m, &[if same { m } else { 0 }; LANES]);
            w.regs.put_pred(x.dst[1], m, if same { !0 } else { 0 });
        } else {
            w.regs.put32(x.dst[0], m, &out);
        }
    }

    pub fn redux(&mut self, w: &mut Warp, x: &Inst, m: u32, update: Update, signed: bool) {
        let v = w.regs.get32(x.src[0]);
        let join = |a: u32, b: u32| match update {
            Update::Add => a.wrapping_add(b),
            Update::And => a & b,
            Update::Or => a | b,
            Update::Xor => a ^ b,
            Update::Min if signed => (a as i32).min(b as i32) as u32,
            Update::Max if signed => (a as i32).max(b as i32) as u32,
            Update::Min => a.min(b),
            _ => a.max(b),
        };
        let r = lanes(m).map(|l| v[l]).reduce(join).unwrap_or(0);
        w.regs.put32(x.dst[0], m, &[r; LANES]);
    }

    /// Lanes of mma, ldmatrix and stmatrix must all be there.
    fn whole_warp(&mut self, w: &Warp, x: &Inst, m: u32, pc: u32) -> Result<(), Fatal> {
        if m == !0 {
            return Ok(());
        }
        let (at, line) = (w.at(pc, m.trailing_zeros() as usize), x.line);
        Err(self.fatal(
            Kind::Divergence,
            at,
            format!("PTX line {line} needs all 32 lanes, there are {m:#010x}"),
        ))
    }

    pub fn mma(&mut self, w: &mut Warp, x: &Inst, m: u32, pc: u32, shape: mma::Shape) -> Result<(), Fatal> {
        self.whole_warp(w, x, m, pc)?;
        self.counts.mma += 1;
        let [na, nb] = shape.registers();
        let mut spare = [[0; LANES]; 10];
        let mut rows = [&[0; LANES]; 10];
        for ((row, spare), &s) in rows.iter_mut().zip(&mut spare).zip(&x.src) {
            *row = w.regs.row32(s, spare);
        }
        let core = self.launch.core.unwrap_or_else(|| mma::core_of(self.launch.sm, shape));
        let d = mma::mma(shape, core, &rows[..na], &rows[na..na + nb], &rows[na + nb..na + nb + 4]);
        for (reg, v) in x.dst.iter().zip(&d) {
            w.regs.put32(*reg, m, v);
        }
        Ok(())
    }

    pub fn load_matrix(&mut self, w: &mut Warp, x: &Inst, pc: u32, count: u8, transposed: bool) {
        let a = w.regs.get32(x.src[0]);
        let mut rows = [[0u8; 16]; LANES];
        for (l, row) in rows.iter_mut().enumerate().take(8 * usize::from(count)) {
            let at = w.at(pc, l);
            let a = u64::from(a[l].wrapping_add(x.offset as u32));
            self.shared.read(&mut self.sink, at, &w.clock, a, 16, Access::Plain, row);
        }
        for (q, &d) in x.dst.iter().enumerate().take(usize::from(count)) {
            let tile = &rows[8 * q..8 * q + 8];
            let mut out: V = [0; LANES];
            for (row, bytes) in tile.iter().enumerate() {
                if transposed {
                    // Element `col` of row `row` is half of lane 4 · col + row / 2.
                    for (col, half) in bytes.as_chunks::<2>().0.iter().enumerate() {
                        out[4 * col + (row >> 1)] |= u32::from(u16::from_le_bytes(*half)) << (16 * (row & 1));
                    }
                } else {
                    for (to, word) in out[4 * row..].iter_mut().zip(bytes.as_chunks::<4>().0) {
                        *to = u32::from_le_bytes(*word);
                    }
                }
            }
            w.regs.put32(d, !0, &out);
        }
    }

    pub fn store_matrix(&mut self, w: &mut Warp, x: &Inst, pc: u32, count: u8, transposed: bool) {
        let a = w.regs.get32(x.src[0]);
        let mut rows = [[0u8; 16]; LANES];
        for q in 0..usize::from(count) {
            let v = w.regs.get32(x.src[1 + q]);
            for (l, v) in v.iter().enumerate() {
                for e in 0..2 {
                    let (g, c) = (l >> 2, (l & 3) * 2 + e);
                    let (row, col) = if transposed { (c, g) } else { (g, c) };
                    let half = (*v >> (16 * e)) as u16;
                    rows[8 * q + row][2 * col..2 * col + 2].copy_from_slice(&half.to_le_bytes());
                }
            }
        }
        for (l, row) in rows.iter().enumerate().take(8 * usize::from(count)) {
            let at = w.at(pc, l);
            let a = u64::from(a[l].wrapping_add(x.offset as u32));
            self.shared.write(&mut self.sink, at, &w.clock, a, row, Access::Plain);
        }
    }
}
