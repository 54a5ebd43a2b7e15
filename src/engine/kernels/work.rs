/*!
Work items of attention kernels: which query rows of which request look at which keys. As `struct Work` in
`kernels/attention.cuh`.
*/

use mla_reference::{Contract, Phase, Plan, Sequence};
use std::ops::Range;

/// One block's work (per head, in the fused form). All in rows as the kernel counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// First query row, how many, first row of the output.
    pub row: usize,
    /// Query rows.
    pub rows: usize,
    /// First row of the output.
    pub out: usize,
    /// Where the request's keys begin: a row of k and v, or an entry of the page table.
    pub keys: usize,
    /// First key, by position.
    pub begin: usize,
    /// End of keys.
    pub end: usize,
    /// Keys that the request's first query row sees.
    pub visible: usize,
    /// The request's first query row.
    pub first: usize,
}

impl Item {
    /// As the kernel reads it.
    pub fn words(&self) -> [u32; 8] {
        [self.row, self.rows, self.out, self.keys, self.begin, self.end, self.visible, self.first]
            .map(|v| v as u32)
    }
}

/// How a form lays out rows and keys.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Query rows of a token: heads in the absorbed form, else 1.
    pub per_token: usize,
    /// Where each sequence's keys begin.
    pub keys: Vec<usize>,
}

/// Work of one part of the plan: decode rows split by split (`parts`), or all rows that are not split. Grouped by the kernel
/// that runs them: `kernels` has their largest numbers of rows.
pub fn items(
    plan: &Plan,
    contract: &Contract,
    layout: &Layout,
    parts: bool,
    kernels: &[usize],
) -> Vec<Vec<Item>> {
    let mut groups = vec![Vec::new(); kernels.len()];
    let (per, decode_rows) = (layout.per_token, plan.decode_rows());
    let mut decode = 0;
    for (index, seq, rows) in plan.attention_rows() {
        let row = decode;
        decode += usize::from(seq.phase() == Phase::Decode);
        if plan.is_split(seq.phase()) != parts {
            continue;
        }
        let all = seq.tokens.len() * per;
        let kernel = choose(all, kernels);
        for (split, keys) in ranges(plan, contract, seq, parts).into_iter().enumerate() {
            let out = if parts { split * decode_rows + row } else { rows.start };
            for start in (0..all).step_by(kernels[kernel]) {
                groups[kernel].push(Item {
                    row: seq.tokens.start * per + start,
                    rows: (all - start).min(kernels[kernel]),
                    out: out * per + start,
                    keys: layout.keys[index],
                    begin: keys.start,
                    end: keys.end,
                    visible: seq.visible(0),
                    first: seq.tokens.start * per,
                });
            }
        }
    }
    for group in &mut groups {
        // The longest first, so that no block starts late.
        group.sort_by_key(|i| {
            std::cmp::Reverse(
                (i.end.min(i.visible + (i.row + i.rows - i.first) / per)).saturating_sub(i.begin),
            )
        });
    }
    groups
}

/// Key ranges: splits of a decode row, or all keys.
fn ranges(plan: &Plan, contract: &Contract, seq: &Sequence, parts: bool) -> Vec<Range<usize>> {
    let splits = if parts { plan.splits } else { 1 };
    Contract { splits: splits.into(), ..*contract }.split_ranges(seq.keys())
}

/// The smallest kernel that takes all rows at once, so that keys are read once; else the largest.
fn choose(rows: usize, kernels: &[usize]) -> usize {
    let fits = (0..kernels.len()).filter(|i| kernels[*i] >= rows).min_by_key(|i| kernels[*i]);
    fits.or_else(|| (0..kernels.len()).max_by_key(|i| kernels[*i])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_kernel_that_takes_all_rows_is_taken() {
        let k = [32, 16, 64];
        for (rows, expected) in
            [(4, 16), (16, 16), (20, 32), (32, 32), (48, 64), (64, 64), (128, 64), (300, 64)]
        {
            assert_eq!(k[choose(rows, &k)], expected, "{rows}");
        }
    }
}
