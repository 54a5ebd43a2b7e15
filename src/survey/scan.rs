/*!
One pass over a tensor's values.

Rows are cut into chunks by the shape alone, chunks go to threads as they are free, and their results are added in the
order of the rows: the same numbers on any number of threads. Inside a chunk values are decoded into a buffer that
fits the cache, then squared and summed in lanes, on machines with AVX2 and without it in the same order.

What is rare is looked for where it can be told cheaply: NaN and infinities where a sum is not finite, zeros where the
first value of a block is zero, constant rows until the first value that differs.
*/

use super::{Heads, Subject};
use mla_reference::GgmlType;
use mla_reference::dequant;
use mla_reference::product::Rows;
use rayon::prelude::*;
use serde::Serialize;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Elements that are decoded at a time: 16 KiB of float64.
const BUFFER: usize = 2048;
/// Elements of a chunk, about: small enough that every thread has some of a tensor, large enough to cost nothing.
const CHUNK: usize = 1 << 18;
/// Of types whose block is one element, this many are taken as one (fewer at the end of a row).
pub const RUN: usize = 256;

/// What a tensor's values are like. A *block* is one of the stored type; of F32, F16, BF16 and integers, a run of 256
/// elements of a row.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Elements.
    pub elements: u64,
    /// Root of the mean square of the finite ones.
    pub rms: f64,
    /// Largest magnitude of the finite ones.
    pub largest: f64,
    /// Values that are NaN.
    pub nan: u64,
    /// Infinite values.
    pub inf: u64,
    /// Blocks.
    pub blocks: u64,
    /// Blocks with a value that is NaN or infinite.
    pub bad_blocks: u64,
    /// The first of them, counted from 0 over the tensor.
    pub first_bad_block: Option<u64>,
    /// Blocks whose values are all zero.
    pub zero_blocks: u64,
    /// Those of them whose bytes are all zero.
    pub zero_byte_blocks: u64,
    /// The first block of zeros.
    pub first_zero_block: Option<u64>,
    /// Rows of one value that is not zero (of matrices only).
    pub constant_rows: u64,
    /// The first of them.
    pub first_constant_row: Option<u64>,
}

/// Sums over a part of the rows.
struct Part {
    stats: Stats,
    squares: f64,
    /// Sums of squares by slot (head, or group of a head), from this slot on.
    first_slot: usize,
    slots: Vec<f64>,
    /// Of the part of a row that is looked at: (slot, sum).
    piece: Vec<(usize, f64)>,
}

/// Statistics of a tensor, and sums of squares: one a head, or two a head where its rows are of two groups. `progress`
/// hears the stored bytes that were read.
pub fn scan(subject: &Subject, progress: &(dyn Fn(u64) + Sync)) -> (Stats, Vec<f64>) {
    let (rows, cols) = (subject.values.rows(), subject.values.cols());
    let mut slots = vec![0.0; slot_count(subject.heads, rows, cols)];
    let mut all = Stats { elements: rows as u64 * cols as u64, ..Stats::default() };
    if rows == 0 || cols == 0 {
        return (all, slots);
    }
    let layout = Layout::new(subject);
    let per_chunk = (CHUNK / cols).max(1);
    let chunks = rows.div_ceil(per_chunk);
    let done = AtomicU64::new(0);
    let parts: Vec<Part> = (0..chunks)
        .into_par_iter()
        .map(|i| {
            let range = i * per_chunk..rows.min((i + 1) * per_chunk);
            let part = layout.part(range.clone());
            let share = (subject.bytes as u128 * range.len() as u128 / rows as u128) as u64;
            progress(done.fetch_add(share, Ordering::Relaxed) + share);
            part
        })
        .collect();
    let mut squares = 0.0;
    for p in parts {
        let s = p.stats;
        squares += p.squares;
        all.largest = all.largest.max(s.largest);
        all.nan += s.nan;
        all.inf += s.inf;
        all.blocks += s.blocks;
        all.bad_blocks += s.bad_blocks;
        all.first_bad_block = all.first_bad_block.or(s.first_bad_block);
        all.zero_blocks += s.zero_blocks;
        all.zero_byte_blocks += s.zero_byte_blocks;
        all.first_zero_block = all.first_zero_block.or(s.first_zero_block);
        all.constant_rows += s.constant_rows;
        all.first_constant_row = all.first_constant_row.or(s.first_constant_row);
        for (to, from) in slots[p.first_slot..].iter_mut().zip(p.slots) {
            *to += from;
        }
    }
    let finite = all.elements - all.nan - all.inf;
    all.rms = if finite > 0 { (squares / finite as f64).sqrt() } else { 0.0 };
    (all, slots)
}

fn slot_count(heads: Heads, rows: usize, cols: usize) -> usize {
    match heads {
        Heads::None => 1,
        Heads::Rows { each, cut } => rows.div_ceil(each.max(1)) * (1 + usize::from(cut < each)),
        Heads::Columns { each } => cols.div_ceil(each.max(1)),
    }
}

/// A tensor as it is passed over.
struct Layout<'a> {
    values: &'a dyn Rows,
    stored: Option<(GgmlType, &'a [u8])>,
    decoder: Option<&'static dequant::Decoder>,
    cols: usize,
    heads: Heads,
    /// Elements of a block.
    unit: usize,
    blocks_per_row: usize,
}

impl<'a> Layout<'a> {
    fn new(subject: &'a Subject) -> Layout<'a> {
        let values = subject.values.as_ref();
        let stored = values.stored();
        let block = stored.map_or(1, |(ty, _)| ty.block_elements());
        let unit = if block > 1 { block } else { RUN };
        let cols = values.cols();
        Layout {
            values,
            stored,
            decoder: stored.and_then(|(ty, _)| dequant::decoder(ty)),
            cols,
            heads: subject.heads,
            unit,
            blocks_per_row: cols.div_ceil(unit),
        }
    }

    fn slot(&self, row: usize) -> usize {
        match self.heads {
            Heads::Rows { each, cut } if cut < each => 2 * (row / each) + usize::from(row % each >= cut),
            Heads::Rows { each, .. } => row / each.max(1),
            _ => 0,
        }
    }

    fn part(&self, rows: Range<usize>) -> Part {
        let first_slot = self.slot(rows.start);
        let slots = match self.heads {
            Heads::Columns { each } => self.cols.div_ceil(each.max(1)),
            _ => self.slot(rows.end - 1) + 1 - first_slot,
        };
        let mut part = Part {
            stats: Stats::default(),
            squares: 0.0,
            first_slot,
            slots: vec![0.0; slots],
            piece: Vec::new(),
        };
        // Whole rows where several fit into the buffer, else parts of a row.
        let at_a_time = (BUFFER / self.cols).max(1);
        let mut buffer = vec![0.0; BUFFER.min(at_a_time * self.cols)];
        let mut row = rows.start;
        while row < rows.end {
            let n = at_a_time.min(rows.end - row);
            let mut constant = Constant::default();
            for k0 in (0..self.cols).step_by(BUFFER) {
                let width = BUFFER.min(self.cols - k0);
                let values = &mut buffer[..n * width];
                self.decode(row, k0, n, width, values);
                for (i, piece) in values.chunks_exact_mut(width).enumerate() {
                    self.piece(row + i, k0, piece, &mut part);
                    if n > 1 {
                        constant = Constant::default();
                    }
                    constant.add(piece);
                    if k0 + width == self.cols && self.cols > 1 && self.values.rows() > 1 && constant.is() {
                        part.stats.constant_rows += 1;
                        part.stats.first_constant_row.get_or_insert((row + i) as u64);
                    }
                }
            }
            row += n;
        }
        part
    }

    /// Columns `k0 .. k0 + width` of `n` rows; several rows only where they are whole.
    fn decode(&self, row: usize, k0: usize, n: usize, width: usize, to: &mut [f64]) {
        match (self.bytes(row, k0, n * width), self.decoder) {
            (Some(bytes), Some(decoder)) => decoder.decode(bytes, to),
            _ => {
                for (i, to) in to.chunks_exact_mut(width).enumerate() {
                    self.values.decode(row + i, k0, to);
                }
            }
        }
    }

    /// The stored bytes of elements from (row, k0) on, both ends at whole blocks.
    fn bytes(&self, row: usize, k0: usize, elements: usize) -> Option<&'a [u8]> {
        let (ty, bytes) = self.stored?;
        let (block, size) = (ty.block_elements(), ty.block_bytes());
        let from = (row * self.cols + k0) / block * size;
        bytes.get(from..from + elements.div_ceil(block) * size)
    }

    /// Takes in a part of a row.
    fn piece(&self, row: usize, k0: usize, piece: &mut [f64], part: &mut Part) {
        self.blocks(row, k0, piece, &mut part.stats);
        let (mut sum, mut largest) = self.sums(row, k0, piece, &mut part.piece);
        if !sum.is_finite() {
            self.bad(row, k0, piece, &mut part.stats);
            (sum, largest) = self.sums(row, k0, piece, &mut part.piece);
        }
        part.squares += sum;
        part.stats.largest = part.stats.largest.max(largest);
        for (slot, sum) in part.piece.drain(..) {
            part.slots[slot - part.first_slot] += sum;
        }
    }

    /// Sum of squares and largest magnitude of a part of a row; `by_slot`: sums of squares by slot.
    fn sums(&self, row: usize, k0: usize, piece: &[f64], by_slot: &mut Vec<(usize, f64)>) -> (f64, f64) {
        let Heads::Columns { each } = self.heads else {
            let (sum, largest) = squares(piece);
            by_slot.clear();
            by_slot.push((self.slot(row), sum));
            return (sum, largest);
        };
        by_slot.clear();
        let (mut all, mut largest, mut k) = (0.0, 0.0f64, 0);
        while k < piece.len() {
            let slot = (k0 + k) / each;
            let end = piece.len().min((slot + 1) * each - k0);
            let (sum, most) = squares(&piece[k..end]);
            by_slot.push((slot, sum));
            all += sum;
            largest = largest.max(most);
            k = end;
        }
        (all, largest)
    }

    fn block_index(&self, row: usize, k: usize) -> u64 {
        (row * self.blocks_per_row + k / self.unit) as u64
    }

    /// Counts blocks, and those of zeros.
    fn blocks(&self, row: usize, k0: usize, piece: &[f64], stats: &mut Stats) {
        for (i, block) in piece.chunks(self.unit).enumerate() {
            stats.blocks += 1;
            if block.iter().any(|v| *v != 0.0) {
                continue;
            }
            let k = k0 + i * self.unit;
            stats.zero_blocks += 1;
            stats.first_zero_block.get_or_insert(self.block_index(row, k));
            let bytes = self.bytes(row, k, block.len());
            stats.zero_byte_blocks += u64::from(bytes.is_some_and(|b| b.iter().all(|b| *b == 0)));
        }
    }

    /// Counts what is not finite, and puts zeros in its place.
    fn bad(&self, row: usize, k0: usize, piece: &mut [f64], stats: &mut Stats) {
        for (i, block) in piece.chunks_mut(self.unit).enumerate() {
            let before = stats.nan + stats.inf;
            for v in block.iter_mut().filter(|v| !v.is_finite()) {
                stats.nan += u64::from(v.is_nan());
                stats.inf += u64::from(v.is_infinite());
                *v = 0.0;
            }
            if stats.nan + stats.inf > before {
                stats.bad_blocks += 1;
                stats.first_bad_block.get_or_insert(self.block_index(row, k0 + i * self.unit));
            }
        }
    }
}

/// Whether the parts of a row hold one value.
#[derive(Default)]
struct Constant {
    value: Option<f64>,
    varied: bool,
}

impl Constant {
    fn add(&mut self, piece: &[f64]) {
        if let Some(&first) = piece.first().filter(|_| !self.varied) {
            let value = *self.value.get_or_insert(first);
            self.varied = piece.iter().any(|v| *v != value);
        }
    }
    fn is(&self) -> bool {
        !self.varied && self.value.is_some_and(|v| v != 0.0)
    }
}

/// Sum of squares and largest magnitude.
#[inline]
fn squares(x: &[f64]) -> (f64, f64) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { squares_avx2(x) };
    }
    lanes(x)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn squares_avx2(x: &[f64]) -> (f64, f64) {
    lanes(x)
}

/// Sums side by side: enough that additions do not wait for each other.
const LANES: usize = 16;

/// The same roundings however wide the machine's registers are: lanes in order, no fused multiply-add.
#[inline(always)]
fn lanes(x: &[f64]) -> (f64, f64) {
    let (mut sums, mut most) = ([0.0f64; LANES], [0.0f64; LANES]);
    let (whole, rest) = x.as_chunks::<LANES>();
    for values in whole {
        for i in 0..LANES {
            let v = values[i];
            sums[i] += v * v;
            let a = v.abs();
            most[i] = if a > most[i] { a } else { most[i] };
        }
    }
    for (i, v) in rest.iter().enumerate() {
        sums[i] += v * v;
        most[i] = most[i].max(v.abs());
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
            most[i] = most[i].max(most[i + half]);
        }
        half /= 2;
    }
    (sums[0], most[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::product::Dense;

    fn subject(data: &[f64], cols: usize, heads: Heads) -> Subject<'_> {
        Subject {
            name: String::new(),
            layer: None,
            role: None,
            ty: String::new(),
            bytes: 8,
            values: Box::new(Dense { data, cols }),
            heads,
            groups: ["one", "two"],
        }
    }

    fn look(data: &[f64], cols: usize, heads: Heads) -> (Stats, Vec<f64>) {
        scan(&subject(data, cols, heads), &|_| ())
    }

    /// Σ i² = n (n + 1) (2n + 1) / 6, exact in float64 here; every row and column has its own sum.
    #[test]
    fn sums_are_those_of_squares() {
        let squares = |n: f64| n * (n + 1.0) * (2.0 * n + 1.0) / 6.0;
        for (rows, cols) in [(1, 7), (6, 2500), (600, 30), (12, 2048)] {
            let data: Vec<f64> =
                (1..=rows * cols).map(|i| i as f64 * if i % 3 == 0 { -1.0 } else { 1.0 }).collect();
            let n = (rows * cols) as f64;
            let (stats, slots) = look(&data, cols, Heads::None);
            assert_eq!((stats.rms, stats.largest), ((squares(n) / n).sqrt(), n));
            assert_eq!(slots, [squares(n)]);
            assert_eq!(stats.blocks, (rows * cols.div_ceil(RUN)) as u64);
            assert_eq!((stats.zero_blocks, stats.bad_blocks, stats.constant_rows), (0, 0, 0));
            if rows % 6 == 0 {
                // Heads of 3 rows, cut after the second.
                let (_, slots) = look(&data, cols, Heads::Rows { each: 3, cut: 2 });
                let upto = |row: usize| squares((row * cols) as f64);
                let expected: Vec<f64> = (0..rows / 3)
                    .flat_map(|h| [upto(3 * h + 2) - upto(3 * h), upto(3 * h + 3) - upto(3 * h + 2)])
                    .collect();
                assert_eq!(slots, expected);
            }
            let each = cols / 2;
            let (_, slots) = look(&data, cols, Heads::Columns { each });
            let column = |c: usize| (0..rows).map(|r| ((r * cols + c + 1) as f64).powi(2)).sum::<f64>();
            let expected: Vec<f64> = (0..cols)
                .collect::<Vec<_>>()
                .chunks(each)
                .map(|c| c.iter().map(|c| column(*c)).sum())
                .collect();
            assert_eq!(slots, expected);
        }
    }

    #[test]
    fn what_is_rare_is_counted_where_it_is() {
        let (rows, cols) = (5, 3000);
        let mut data = vec![0.5; rows * cols];
        for (i, v) in data.iter_mut().enumerate() {
            *v += (i % 7) as f64;
        }
        data[cols + 2999] = f64::NAN;
        data[2 * cols + 256] = f64::INFINITY;
        data[2 * cols + 257] = f64::NEG_INFINITY;
        data[3 * cols..4 * cols].fill(2.0);
        data[4 * cols + 2048..4 * cols + 2560].fill(0.0);
        for heads in [Heads::None, Heads::Columns { each: 1000 }, Heads::Rows { each: 1, cut: 1 }] {
            let (s, slots) = look(&data, cols, heads);
            assert_eq!((s.nan, s.inf, s.bad_blocks, s.blocks), (1, 2, 2, 60));
            // Twelve blocks a row: the last of row 1.
            assert_eq!(s.first_bad_block, Some(23));
            assert_eq!((s.zero_blocks, s.first_zero_block), (2, Some(4 * 12 + 8)));
            assert_eq!((s.constant_rows, s.first_constant_row), (1, Some(3)));
            assert_eq!(s.largest, 6.5);
            assert!(slots.iter().all(|s| s.is_finite()));
        }
    }
}
