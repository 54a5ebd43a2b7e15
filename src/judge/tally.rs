/*!
Counting: each element's bits against the reference and its bound.

The engine's value before its final rounding lies in [x − B, x + B]. Rounding is monotone, so its stored
value lies between round(x − B) and round(x + B): an element outside is *beyond*, and one is enough for a
fault. An element that is not round(x) is a *flip*. What is not finite must be so on both sides.

Every figure is the same for any number of threads: sums are kept a chunk and added in the chunks' order.
*/

use super::sketch::Sketch;
use mla_numeric::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bins of the histogram of bounds: eighths of an octave, from 2^-8 to 2^24 ulps.
const BINS: usize = 256;

/// One element, with both values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Element {
    /// Row of the matrix view.
    pub row: usize,
    /// Column of the matrix view.
    pub col: usize,
    /// The engine's value.
    pub engine: f64,
    /// The reference's value before rounding.
    pub reference: f64,
    /// |engine − reference| in ulps of the output.
    pub ulps: f64,
    /// |engine − reference| as a share of bound + half an ulp; infinite where it can't be a number.
    pub share: f64,
}

/// Sums of one chunk.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    engine: f64,
    reference: f64,
    engine_check: f64,
    reference_check: f64,
}

/// Σ v² and Σ r v of a few elements, the first of which is the tensor's element `index`.
fn digest(values: &[f64], index: usize) -> (f64, f64) {
    // Four sums at a time: one alone would wait for each addition.
    let mut lanes = [(0.0f64, 0.0f64); 4];
    for (k, v) in values.iter().enumerate() {
        let v = finite(*v);
        let lane = &mut lanes[k % 4];
        lane.0 += v * v;
        lane.1 += v * checksum_weight((index + k) as u64);
    }
    lanes.iter().fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1))
}

impl Sums {
    /// Of a row whose first element is the tensor's element `index`, and how many are NaN on both sides.
    fn of(engine: &[f64], rounded: &[f64], index: usize) -> (Sums, u64) {
        let (mut all, mut nan) = (Sums::default(), 0);
        for (c, (o, r)) in engine.chunks(CHUNK).zip(rounded.chunks(CHUNK)).enumerate() {
            let at = index + c * CHUNK;
            let of_engine = digest(o, at);
            // Nearly everything is equal.
            let of_reference = if same_bits(o, r) { of_engine } else { digest(r, at) };
            all.engine += of_engine.0;
            all.engine_check += of_engine.1;
            all.reference += of_reference.0;
            all.reference_check += of_reference.1;
            nan += o.iter().zip(r).map(|(o, r)| u64::from(o.is_nan() & r.is_nan())).sum::<u64>();
        }
        (all, nan)
    }

    fn add(&mut self, other: &Sums) {
        self.engine += other.engine;
        self.reference += other.reference;
        self.engine_check += other.engine_check;
        self.reference_check += other.reference_check;
    }
}

/// Everything counted of one unit of judgement.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Elements compared.
    pub elements: u64,
    /// Elements whose bits are not round(x).
    pub flips: u64,
    /// Elements that no rounding explains.
    pub beyond: u64,
    /// Of these, elements finite on one side only.
    pub not_finite: u64,
    /// Elements that are NaN on both sides: equal, but they say nothing.
    pub nan: u64,
    /// Of the flips, the one with the largest share of its bound.
    pub worst: Option<Element>,
    /// Of the flips, how the engine is off, on random axes.
    pub residual: Sketch,
    bins: Vec<u64>,
    sums: BTreeMap<(usize, usize), Sums>,
}

/// L2 norm and order-sensitive checksum of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Digest {
    #[serde(deserialize_with = "crate::written::number")]
    pub norm: f64,
    #[serde(deserialize_with = "crate::written::number")]
    pub checksum: f64,
}

/// r_i of the checksum Σ r_i x_i: uniform in (−1, 1), a function of the index alone (SplitMix64).
pub fn checksum_weight(index: u64) -> f64 {
    let mut z = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 11) as f64 * f64::powi(2.0, -52) - 1.0
}

impl Tally {
    /// Counts a row of a copy: engine values against what they must be, bit for bit. `width`: columns of the tensor.
    pub fn copy(&mut self, dtype: DType, at: (usize, usize, usize), engine: &[f64], x: &[f64]) {
        let mut rounded = x.to_vec();
        dtype.round_slice(&mut rounded);
        let flipped = differing(engine, &rounded, true);
        self.row(dtype, at, engine, x, &rounded, &flipped, None);
    }

    /// Counts a row: engine values, reference, the reference rounded, columns that differ from that, and their bounds (in
    /// place of which copies have none).
    #[allow(clippy::too_many_arguments)]
    pub fn row(
        &mut self,
        dtype: DType,
        (row, first, width): (usize, usize, usize),
        engine: &[f64],
        x: &[f64],
        rounded: &[f64],
        flipped: &[usize],
        bound: Option<&[f64]>,
    ) {
        let (sums, nan) = Sums::of(engine, rounded, row * width + first);
        self.nan += nan;
        self.sums.insert((row, first), sums);
        self.elements += x.len() as u64;
        for &j in flipped {
            self.flip(dtype, (row, first + j), engine[j], x[j], bound.map(|b| b[j]));
        }
    }

    /// Adds the bound of an element to the histogram of bounds.
    pub fn bound(&mut self, dtype: DType, x: f64, bound: f64) {
        let total = bound + dtype.spacing(x.abs() + bound) / 2.0;
        if total.is_finite() && x.is_finite() {
            self.bins.resize(BINS, 0);
            self.bins[bin(total / dtype.spacing(x))] += 1;
        }
    }

    /// Counts an element that is not the rounded reference.
    pub fn flip(&mut self, dtype: DType, at: (usize, usize), o: f64, x: f64, bound: Option<f64>) {
        self.flips += 1;
        let b = bound.unwrap_or(0.0);
        let inside = bound.is_some() && within(dtype, o, x, b);
        let total = b + dtype.spacing(x.abs() + b) / 2.0;
        let (mut ulps, mut share) = ((o - x).abs() / dtype.spacing(x), (o - x).abs() / total);
        if inside {
            // An infinity that the bound allows is no distance.
            share = if share.is_finite() { share.min(1.0) } else { 1.0 };
            ulps = if ulps.is_finite() { ulps } else { 0.0 };
        } else {
            self.beyond += 1;
            self.not_finite += u64::from(o.is_finite() != x.is_finite());
            if share.is_nan() {
                (ulps, share) = (f64::INFINITY, f64::INFINITY);
            }
            // Nothing that is beyond ranks below something that is not.
            share = share.max(1.0 + f64::EPSILON);
        }
        // Float32 flips in every other element: one in 16 of those that rounding allows will do.
        if !inside || checksum_weight((at.0 as u64) << 32 ^ at.1 as u64) > 0.875 {
            self.residual.add(at, (o - x) / dtype.spacing(x));
        }
        let found = Element { row: at.0, col: at.1, engine: o, reference: x, ulps, share };
        if self.worst.is_none_or(|w| rank(&found) > rank(&w)) {
            self.worst = Some(found);
        }
    }

    /// Adds what another thread counted.
    pub fn merge(&mut self, other: Tally) {
        self.elements += other.elements;
        self.flips += other.flips;
        self.beyond += other.beyond;
        self.not_finite += other.not_finite;
        self.nan += other.nan;
        self.residual.merge(&other.residual);
        if let Some(w) = other.worst
            && self.worst.is_none_or(|mine| rank(&w) > rank(&mine))
        {
            self.worst = Some(w);
        }
        if !other.bins.is_empty() {
            self.bins.resize(BINS, 0);
            self.bins.iter_mut().zip(&other.bins).for_each(|(a, b)| *a += b);
        }
        self.sums.extend(other.sums);
    }

    /// Digests of the engine's and the reference's tensor.
    pub fn digests(&self) -> (Digest, Digest) {
        let mut t = Sums::default();
        self.sums.values().for_each(|s| t.add(s));
        (
            Digest { norm: t.engine.sqrt(), checksum: t.engine_check },
            Digest { norm: t.reference.sqrt(), checksum: t.reference_check },
        )
    }

    /// Median of bound + half an ulp, in ulps of the output (upper end of the histogram's bin), of a sample.
    pub fn median_bound(&self) -> Option<f64> {
        let total: u64 = self.bins.iter().sum();
        let mut seen = 0;
        for (i, n) in self.bins.iter().enumerate() {
            seen += n;
            if total > 0 && seen * 2 >= total {
                return Some(f64::powi(2.0, (i / 8) as i32 - 8) * (1.0 + (i % 8 + 1) as f64 / 8.0));
            }
        }
        None
    }
}

/// Elements that are looked at together.
const CHUNK: usize = 16;

/// Whether two chunks are equal bit for bit; without branches.
fn same_bits(o: &[f64], r: &[f64]) -> bool {
    o.iter().zip(r).fold(0, |any, (o, r)| any | (o.to_bits() ^ r.to_bits())) == 0
}

/// Columns in which two rows differ; `signs`: in the sign of a zero too. NaN is NaN.
pub fn differing(o: &[f64], r: &[f64], signs: bool) -> Vec<usize> {
    let mut found = Vec::new();
    for (k, (o, r)) in o.chunks(CHUNK).zip(r.chunks(CHUNK)).enumerate() {
        if !same_bits(o, r) {
            let odd = |j: &usize| (o[*j] != r[*j] || signs) && !(o[*j].is_nan() && r[*j].is_nan());
            let differs = |j: &usize| o[*j].to_bits() != r[*j].to_bits() && odd(j);
            found.extend((0..o.len()).filter(differs).map(|j| k * CHUNK + j));
        }
    }
    found
}

/// Whether a value within `b` of x before its final rounding can be stored as `o`: rounding is monotone.
pub fn within(dtype: DType, o: f64, x: f64, b: f64) -> bool {
    dtype.round(x - b) <= o && o <= dtype.round(x + b)
}

/// Bin of a ratio: its exponent and the first three bits of its fraction.
fn bin(ratio: f64) -> usize {
    let exponent = (ratio.to_bits() >> 52) as i64 - 1023;
    let eighth = (ratio.to_bits() >> 49) as i64 & 7;
    ((exponent + 8) * 8 + eighth).clamp(0, BINS as i64 - 1) as usize
}

/// What is not finite adds nothing to a sum.
fn finite(v: f64) -> f64 {
    if v.is_finite() { v } else { 0.0 }
}

/// Order of elements by how bad they are, then by place, so that threads do not matter.
fn rank(e: &Element) -> (f64, f64, std::cmp::Reverse<(usize, usize)>) {
    (e.share, e.ulps, std::cmp::Reverse((e.row, e.col)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(dtype: DType, o: f64, x: f64, b: f64) -> Tally {
        let mut t = Tally::default();
        let r = dtype.round(x);
        let flipped: Vec<usize> = (o != r && !(o.is_nan() && r.is_nan())).then_some(0).into_iter().collect();
        t.row(dtype, (0, 0, 1), &[o], &[x], &[r], &flipped, Some(&[b]));
        t
    }

    /// bf16 at 1: spacing 2^-7 above. 1 + 2^-8 is a tie and goes to 1 (even).
    #[test]
    fn beyond_is_what_no_value_within_the_bound_rounds_to() {
        let (above, x) = (1.0 + 1.0 / 128.0, 1.0 + 1.0 / 256.0);
        for (o, b, flips, beyond) in [
            (1.0, 0.0, 0, 0),
            (above, 0.0, 1, 1),
            (above, 1e-9, 1, 0),
            (1.0 - 1.0 / 256.0, 1e-9, 1, 1),
            (f64::NAN, 1e-9, 1, 1),
            (f64::INFINITY, 1e-9, 1, 1),
        ] {
            let t = one(DType::Bf16, o, x, b);
            assert_eq!((t.flips, t.beyond), (flips, beyond), "{o} {b}");
        }
    }

    /// f16 overflows from 65,520 on: a reference just below may become infinite, within its bound only.
    #[test]
    fn overflow_is_judged_by_the_bound() {
        assert_eq!(one(DType::F16, f64::INFINITY, 65_519.0, 2.0).beyond, 0);
        assert_eq!(one(DType::F16, f64::INFINITY, 65_500.0, 2.0).beyond, 1);
        assert_eq!(one(DType::F16, 65_504.0, 65_521.0, 2.0).beyond, 0);
        assert_eq!(one(DType::F16, f64::INFINITY, 1e9, 2.0).beyond, 0);
        assert_eq!(one(DType::Bf16, f64::NEG_INFINITY, f64::NEG_INFINITY, 0.0).beyond, 0);
        assert_eq!(one(DType::Bf16, 0.0, f64::NAN, 0.0).beyond, 1);
    }

    /// Rounding may lose the sign of a zero; a copy may not.
    #[test]
    fn the_sign_of_a_zero_counts_in_copies_only() {
        assert_eq!(one(DType::Bf16, -0.0, 0.0, 0.0).beyond, 0);
        let mut copy = Tally::default();
        copy.copy(DType::Bf16, (0, 0, 3), &[-0.0, 0.0, 1.0], &[0.0, 0.0, 1.0]);
        assert_eq!((copy.flips, copy.beyond), (1, 1));
    }

    #[test]
    fn checksum_sees_order_where_the_norm_does_not() {
        let digest = |v: [f64; 3]| {
            let mut t = Tally::default();
            t.copy(DType::F64, (0, 0, 3), &v, &v);
            t.digests().0
        };
        let (a, b) = (digest([1.0, 2.0, 3.0]), digest([3.0, 2.0, 1.0]));
        assert_eq!(a.norm, b.norm);
        assert!((a.checksum - b.checksum).abs() > 1e-3);
    }
}
