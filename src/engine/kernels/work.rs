/*!
Work items of attention kernels: which query rows of which request look at which keys. As `struct Work` in
`kernels/attention.cuh`.
*/

use mla_reference::{Contract, Form, Plan, Sequence};
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
    /// Which form.
    pub form: Form,
    /// Query rows of a token: heads in the absorbed form, else 1.
    pub per_token: usize,
    /// Where each sequence's keys begin, of all sequences of the plan.
    pub keys: Vec<usize>,
}

/// Work of one part of the plan: sequences that are computed in parts, part by part (`parts`), or all others. Grouped by the kernel
/// that runs them: `kernels` has their largest numbers of rows.
pub fn items(
    plan: &Plan,
    contract: &Contract,
    layout: &Layout,
    parts: bool,
    kernels: &[usize],
) -> Vec<Vec<Item>> {
    let mut groups = vec![Vec::new(); kernels.len()];
    let (form, per, part_rows) = (layout.form, layout.per_token, plan.part_rows(layout.form));
    // Sequences and the first row of each that they write, of the first part where they have parts.
    let some: Vec<(usize, &Sequence, usize)> = if parts {
        plan.part_sequences(form).map(|(i, s, _, own)| (i, s, own.start)).collect()
    } else {
        let whole = plan.attention_rows(Some(form)).filter(|(_, s, _)| !plan.in_parts(form, s));
        whole.map(|(i, s, rows)| (i, s, rows.start)).collect()
    };
    for (index, seq, first) in some {
        let all = seq.tokens.len() * per;
        let kernel = choose(all, kernels);
        for (part, keys) in ranges(plan, contract, form, seq, parts).into_iter().enumerate() {
            let out = part * part_rows + first;
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

/// Key ranges: those of the parts, or all keys.
fn ranges(plan: &Plan, contract: &Contract, form: Form, seq: &Sequence, parts: bool) -> Vec<Range<usize>> {
    if parts {
        return plan.part_ranges(form, seq, &contract.of_form(Some(form)));
    }
    Contract { splits: 1.into(), ..*contract }.split_ranges(seq.keys())
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
