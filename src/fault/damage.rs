/*!
Tensors that are damaged on their way: rows, heads and columns that are lost, stale, elsewhere, or read with a wrong layout.

The engine goes on from the damaged bits. What is moved is moved bit for bit.
*/

use crate::case::Stream;
use crate::trace::{Tensor, TensorId};
use mla_reference::{Geometry, Plan, Sequence, Stage};

/// What is done to a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Damage {
    /// The last so many rows are zero.
    ZeroRows(usize),
    /// So many rows, every second one from the second on, hold the one before them.
    StaleRows(usize),
    /// Two rows exchanged.
    Rows(usize, usize),
    /// A head is zero (the last one where there are fewer).
    ZeroHead(usize),
    /// Each head is the one so many later, beginning anew at the end.
    HeadShift(usize),
    /// Heads in reverse order.
    HeadsReversed,
    /// Stored as [head, row, …], read as [row, head, …].
    HeadsFirst,
    /// The last so many columns of each head are zero.
    ZeroColumns(usize),
    /// Each row begins so many elements later than it should (or earlier), as with a stride that is too long.
    Stride(isize),
    /// Heads padded with zeros to the key's width, and cut to the value's without them being taken out.
    Padded,
    /// The parts of a cache row exchanged: rope first.
    RopeFirst,
    /// The rope columns stored in half-split order.
    Paired,
    /// The rope columns are those of the row before.
    StaleRope,
    /// Every element off by a random share, up to this.
    Noise(f64),
    /// Rounded to so many bits of the significand.
    Bits(u32),
    /// Cache rows of the last new token of each request are never written.
    LostToken,
    /// Cache rows of new tokens are written one slot late.
    LateSlots,
    /// The first request's first slot is overwritten by the last request's last token.
    Overwritten,
    /// A page of each request holds what the next request has there.
    StalePage(usize),
    /// A page of each request is read as zeros.
    ZeroPage(usize),
}

/// Heads and columns of one; of a tensor without heads, all of it.
fn heads(t: &Tensor) -> (usize, usize) {
    t.heads().unwrap_or((1, t.cols))
}

/// Copies a cell, bit for bit.
fn copy(to: &mut Tensor, (row, col): (usize, usize), from: &Tensor, (r, c): (usize, usize), n: usize) {
    let bytes = from.bytes_of(r, c..c + n).to_vec();
    to.write_bytes(row, col, &bytes);
}

/// The rows of a page of each sequence in a tensor that has rows of keys: of the cache, k and v.
fn page_rows(plan: &Plan, id: TensorId, page: usize) -> Vec<(&Sequence, Vec<usize>)> {
    let size = plan.page_size;
    let at =
        |s: &Sequence| page.saturating_mul(size).min(s.keys())..(page + 1).saturating_mul(size).min(s.keys());
    match id.stage {
        Stage::Cache => plan.sequences.iter().map(|s| (s, s.slots[at(s)].to_vec())).collect(),
        _ => plan.key_rows().map(|(_, s, rows)| (s, at(s).map(|i| rows.start + i).collect())).collect(),
    }
}

impl Damage {
    /// Damages a tensor; false where there is nothing in it to damage.
    pub fn act(self, id: TensorId, t: &mut Tensor, (plan, g): (&Plan, &Geometry), seed: u64) -> bool {
        let old = t.clone();
        let (count, width) = heads(t);
        let keyed = matches!(id.stage, Stage::Cache | Stage::K | Stage::V);
        match self {
            Damage::ZeroRows(n) => {
                let n = n.min(t.rows) * t.cols * t.dtype.bytes();
                let from = t.bytes.len() - n;
                t.bytes[from..].fill(0);
            }
            Damage::StaleRows(n) => {
                for r in (1..t.rows).step_by(2).take(n) {
                    copy(t, (r, 0), &old, (r - 1, 0), old.cols);
                }
            }
            Damage::Rows(a, b) => {
                if a.max(b) >= t.rows {
                    return false;
                }
                copy(t, (a, 0), &old, (b, 0), old.cols);
                copy(t, (b, 0), &old, (a, 0), old.cols);
            }
            Damage::ZeroHead(h) => {
                if t.heads().is_none() {
                    return false;
                }
                let h = h.min(count - 1);
                let zeros = vec![0; width * t.dtype.bytes()];
                (0..t.rows).for_each(|r| t.write_bytes(r, h * width, &zeros));
            }
            Damage::HeadShift(_) | Damage::HeadsReversed => {
                if count < 2 {
                    return false;
                }
                let from = |h: usize| match self {
                    Damage::HeadShift(n) => (h + n) % count,
                    _ => count - 1 - h,
                };
                for r in 0..t.rows {
                    (0..count).for_each(|h| copy(t, (r, h * width), &old, (r, from(h) * width), width));
                }
            }
            Damage::HeadsFirst => {
                if count < 2 || t.rows < 2 {
                    return false;
                }
                // Flat element i of [head, row, width] stands at flat place i.
                for cell in 0..t.rows * count {
                    let (h, r) = (cell / t.rows, cell % t.rows);
                    copy(t, (cell / count, cell % count * width), &old, (r, h * width), width);
                }
            }
            Damage::ZeroColumns(n) => {
                let n = n.min(width);
                let zeros = vec![0; n * t.dtype.bytes()];
                for r in 0..t.rows {
                    (0..count).for_each(|h| t.write_bytes(r, (h + 1) * width - n, &zeros));
                }
            }
            Damage::Stride(n) => {
                let row = (t.cols * t.dtype.bytes()).max(1);
                let stride = t.cols.saturating_add_signed(n) * t.dtype.bytes();
                for (r, to) in t.bytes.chunks_exact_mut(row).enumerate() {
                    for (i, b) in to.iter_mut().enumerate() {
                        *b = old.bytes.get(r * stride + i).copied().unwrap_or(0);
                    }
                }
            }
            Damage::Padded => {
                if t.heads().is_none() || width >= g.key() {
                    return false;
                }
                for r in 0..t.rows {
                    for c in 0..t.cols {
                        let (h, j) = (c / g.key(), c % g.key());
                        t.set_bits(r, c, if j < width { old.bits(r, h * width + j) } else { 0 });
                    }
                }
            }
            Damage::RopeFirst => {
                if t.cols != g.cache() {
                    return false;
                }
                for r in 0..t.rows {
                    copy(t, (r, 0), &old, (r, g.latent), g.rope);
                    copy(t, (r, g.rope), &old, (r, 0), g.latent);
                }
            }
            Damage::Paired | Damage::StaleRope => {
                let first = match id.stage {
                    Stage::Q | Stage::QRaw | Stage::K => g.nope,
                    Stage::KPe => 0,
                    Stage::KvA | Stage::Cache => g.latent,
                    _ => return false,
                };
                for r in 0..t.rows {
                    for h in 0..count {
                        let at = h * width + first;
                        for j in 0..g.rope {
                            let half = g.rope / 2;
                            let from = if j < half { 2 * j } else { 2 * (j - half) + 1 };
                            match self {
                                Damage::Paired => t.set_bits(r, at + j, old.bits(r, at + from)),
                                _ => t.set_bits(r, at + j, old.bits(r.saturating_sub(1), at + j)),
                            }
                        }
                    }
                }
            }
            Damage::Noise(size) => {
                for r in 0..t.rows {
                    let mut rng = Stream::new(seed, id.stage as u64, r as u64);
                    for c in 0..t.cols {
                        let v = t.get(r, c);
                        t.set(r, c, v * (1.0 + size * (2.0 * rng.uniform() - 1.0)));
                    }
                }
            }
            Damage::Bits(n) => {
                for r in 0..t.rows {
                    for c in 0..t.cols {
                        let v = t.get(r, c);
                        t.set(r, c, short(v, n));
                    }
                }
            }
            Damage::LostToken | Damage::LateSlots | Damage::Overwritten if id.stage != Stage::Cache => {
                return false;
            }
            Damage::LostToken => {
                let nothing = vec![0xff; t.cols * t.dtype.bytes()];
                for slot in plan.sequences.iter().filter_map(|s| s.slots.last()) {
                    t.write_bytes(*slot, 0, &nothing);
                }
            }
            Damage::LateSlots => {
                for s in plan.sequences.iter().filter(|s| s.tokens.len() > 1) {
                    let new = &s.slots[s.context..];
                    for w in new.windows(2) {
                        copy(t, (w[1], 0), &old, (w[0], 0), old.cols);
                    }
                }
            }
            Damage::Overwritten => {
                let slot = |s: Option<&Sequence>, last: bool| {
                    s.and_then(|s| if last { s.slots.last() } else { s.slots.first() }).copied()
                };
                let (to, from) = (slot(plan.sequences.first(), false), slot(plan.sequences.last(), true));
                let (Some(to), Some(from)) = (to, from) else { return false };
                copy(t, (to, 0), &old, (from, 0), old.cols);
            }
            Damage::StalePage(_) | Damage::ZeroPage(_) if !keyed => return false,
            Damage::StalePage(p) => {
                let pages = page_rows(plan, id, p);
                for (i, (s, rows)) in pages.iter().enumerate() {
                    let next = (1..pages.len()).map(|d| &pages[(i + d) % pages.len()]);
                    let fits =
                        |n: &&(&Sequence, Vec<usize>)| n.0.request != s.request && n.1.len() >= rows.len();
                    if let Some((_, from)) = { next }.find(fits) {
                        rows.iter().zip(from).for_each(|(r, f)| copy(t, (*r, 0), &old, (*f, 0), old.cols));
                    }
                }
            }
            Damage::ZeroPage(p) => {
                let zeros = vec![0; t.cols * t.dtype.bytes()];
                let pages = page_rows(plan, id, p);
                pages.iter().flat_map(|(_, rows)| rows).for_each(|r| t.write_bytes(*r, 0, &zeros));
            }
        }
        t.bytes != old.bytes
    }
}

/// A value rounded to so many bits of the significand, the leading one among them.
fn short(v: f64, bits: u32) -> f64 {
    if v == 0.0 || !v.is_finite() {
        return v;
    }
    let (_, exponent) = libm::frexp(v);
    let unit = libm::ldexp(1.0, exponent - bits as i32);
    libm::rint(v / unit) * unit
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_numeric::DType;
    use mla_reference::Axis;

    /// Two rows, two heads of two columns: 1 2 | 3 4, 5 6 | 7 8.
    fn tensor() -> Tensor {
        let values: Vec<f64> = (1..=8).map(f64::from).collect();
        let axes = vec![Axis::Token, Axis::Head, Axis::Value];
        Tensor {
            dtype: DType::F32,
            axes,
            shape: vec![2, 2, 2],
            rows: 2,
            cols: 4,
            bytes: DType::F32.encode(&values),
        }
    }

    fn damaged(d: Damage) -> Vec<f64> {
        let g = Geometry { hidden: 4, heads: 2, q_rank: 0, latent: 2, rope: 2, nope: 1, value: 2 };
        let (mut t, plan) = (tensor(), Plan::default());
        let id = TensorId::of(Stage::AttnOut, mla_reference::Form::Fused);
        assert!(d.act(id, &mut t, (&plan, &g), 0));
        t.block(0..2, 0..4).iter().copied().collect()
    }

    #[test]
    fn by_hand() {
        for (d, want) in [
            (Damage::ZeroRows(1), [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]),
            (Damage::StaleRows(1), [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]),
            (Damage::Rows(0, 1), [5.0, 6.0, 7.0, 8.0, 1.0, 2.0, 3.0, 4.0]),
            (Damage::ZeroHead(1), [1.0, 2.0, 0.0, 0.0, 5.0, 6.0, 0.0, 0.0]),
            (Damage::HeadShift(1), [3.0, 4.0, 1.0, 2.0, 7.0, 8.0, 5.0, 6.0]),
            (Damage::HeadsReversed, [3.0, 4.0, 1.0, 2.0, 7.0, 8.0, 5.0, 6.0]),
            // Row 0 of both heads, then row 1: head 0 has rows (1 2), (5 6), head 1 (3 4), (7 8).
            (Damage::HeadsFirst, [1.0, 2.0, 5.0, 6.0, 3.0, 4.0, 7.0, 8.0]),
            (Damage::ZeroColumns(1), [1.0, 0.0, 3.0, 0.0, 5.0, 0.0, 7.0, 0.0]),
            (Damage::Stride(1), [1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 0.0]),
            (Damage::Stride(-1), [1.0, 2.0, 3.0, 4.0, 4.0, 5.0, 6.0, 7.0]),
            // Heads three wide: 1 2 0 | 3 4 0, of which four columns are taken.
            (Damage::Padded, [1.0, 2.0, 0.0, 3.0, 5.0, 6.0, 0.0, 7.0]),
            (Damage::Bits(2), [1.0, 2.0, 3.0, 4.0, 4.0, 6.0, 8.0, 8.0]),
        ] {
            assert_eq!(damaged(d), want, "{d:?}");
        }
    }
}
