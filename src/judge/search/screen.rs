/*!
How many bits of a few rows a contract explains.

A search goes through a hundred contracts and more. All are computed for the same few pairs of row and head, those with the
most keys first, since short rows look alike under most contracts.
*/

use super::super::compare::{Isolated, columns};
use crate::trace::{Tensor, TensorId};
use mla_reference::evaluate::row_chunks;
use mla_reference::{Chunk, Contract, Form, Phase};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

/// Rows of attention that the reference computes at once.
const ROWS: usize = 64;
/// Elements of a sample: a share of flips of 10⁻³ is a dozen of them.
const ELEMENTS: usize = 12_288;
/// Products that one contract may cost, but for three pairs.
const COST: usize = 40_000_000;

/// What a contract makes of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screened {
    /// Elements that are not its rounded values.
    pub flips: u64,
    /// Elements of the sample.
    pub elements: u64,
    /// Of all rounded values: contracts with one digest can't be told apart here.
    pub digest: u64,
}

impl Screened {
    /// Share of flips.
    pub fn share(&self) -> f64 {
        self.flips as f64 / self.elements.max(1) as f64
    }
}

/// Pairs of row and head of one phase, by the first row of the chunk that the reference computes.
pub struct Sample(HashSet<(usize, usize)>);

impl Sample {
    /// Of an attention's tensor; `all`: every pair there is.
    pub fn new(isolated: &Isolated, form: Option<Form>, tensor: &Tensor, phase: Phase, all: bool) -> Sample {
        let (heads, width) = (columns(tensor).heads, columns(tensor).width);
        // First row, rows, keys that the last of them sees.
        let mut chunks: Vec<(usize, usize, usize)> = Vec::new();
        for (_, seq, rows) in isolated.case.plan.attention_rows(form) {
            if seq.phase() == phase {
                let of = |c: std::ops::Range<usize>| (rows.start + c.start, c.len(), seq.visible(c.end - 1));
                chunks.extend(row_chunks(seq.tokens.len(), ROWS).into_iter().map(of));
            }
        }
        if all {
            let pairs = chunks.iter().flat_map(|c| (0..heads).map(move |h| (c.0, h)));
            return Sample(pairs.collect());
        }
        chunks.sort_by_key(|c| std::cmp::Reverse(c.2));
        let g = &isolated.spec.geometry;
        let per_key = g.key().max(g.cache()) + width;
        let (mut pairs, mut elements, mut cost) = (HashSet::new(), 0, 0);
        // Every second pair is of the longest chunk as long as it has heads, the others go around.
        let (mut of_first, mut around) = (0..heads, 0..chunks.len().saturating_sub(1) * heads);
        // Heads far from each other come first.
        let step = (1..).find(|s| s * s >= heads && gcd(*s, heads) == 1).unwrap_or(1);
        while elements < ELEMENTS && (pairs.len() < 3 || cost < COST) {
            let other = around.next().map(|i| (1 + i % (chunks.len() - 1), i / (chunks.len() - 1)));
            let next = [of_first.next().map(|h| (0, h)), other];
            if next == [None, None] {
                break;
            }
            for (c, h) in next.into_iter().flatten() {
                let (first, rows, keys) = chunks[c];
                pairs.insert((first, h * step % heads));
                elements += rows * width;
                cost += rows * keys * per_key;
            }
        }
        Sample(pairs)
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Counts the flips of a tensor's sample under a contract.
pub fn screen(
    isolated: &Isolated,
    id: TensorId,
    tensor: &Tensor,
    contract: &Contract,
    sample: &Sample,
) -> Screened {
    let wanted = |row: usize, head: usize| sample.0.contains(&(row, head));
    let of = Isolated { contract, wanted: Some(&wanted), ..*isolated };
    let [flips, elements, digest] = [const { AtomicU64::new(0) }; 3];
    of.evaluate(id, &|c: Chunk| {
        let engine = tensor.block(c.rows.clone(), c.cols.clone());
        let (mut odd, mut sum) = (0, 0u64);
        for ((i, j), x) in c.x.indexed_iter() {
            let rounded = tensor.dtype.round(*x);
            odd += u64::from(rounded != engine[[i, j]]);
            let at = ((c.rows.start + i) * tensor.cols + c.cols.start + j) as u64;
            let mixed = (rounded.to_bits() ^ at.wrapping_mul(0x9e37_79b9_7f4a_7c15))
                .wrapping_mul(0xbf58_476d_1ce4_e5b9);
            sum = sum.wrapping_add(mixed ^ mixed >> 31);
        }
        flips.fetch_add(odd, Ordering::Relaxed);
        elements.fetch_add(c.x.len() as u64, Ordering::Relaxed);
        digest.fetch_add(sum, Ordering::Relaxed);
    });
    let [flips, elements, digest] = [flips, elements, digest].map(AtomicU64::into_inner);
    Screened { flips, elements, digest }
}
