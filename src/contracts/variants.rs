/*!
Contracts that somebody's attention may have, for a search: the table of other people's kernels with their ways to split,
and what differs from one contract in a single point.

What is stored in which dtype is known of a dump, and stays. Two contracts whose casts fall alike on the rows at hand are
one: [`Sight`] says what of a contract such rows can show.
*/

use super::{Kernel, kernels};
use mla_numeric::DType;
use mla_reference::contract::ScoreFactor;
use mla_reference::{Contract, Form, RowSum, Softmax, Splits, TileOrder};
use std::ops::Range;

/// A contract to try.
#[derive(Clone, Debug)]
pub struct Try {
    /// What it is called.
    pub name: String,
    /// The contract.
    pub contract: Contract,
    /// Whether it is none of the table.
    pub changed: bool,
}

/// What stands between a kernel's name and what is changed.
pub const CHANGED: &str = ", but ";

impl Try {
    /// As it is.
    pub fn new(name: impl Into<String>, contract: Contract) -> Try {
        Try { name: name.into(), contract, changed: false }
    }
}

/// Tiles that kernels have.
const TILES: [usize; 9] = [16, 32, 64, 80, 96, 128, 176, 256, 0];
/// Ways to split beyond those of one kernel.
const SPLITS: [Splits; 15] = [
    Splits::Parts(1),
    Splits::Keys(32),
    Splits::Keys(64),
    Splits::Keys(128),
    Splits::Keys(192),
    Splits::Keys(256),
    Splits::Keys(320),
    Splits::Keys(512),
    Splits::Keys(1024),
    Splits::Parts(2),
    Splits::Parts(4),
    Splits::Parts(8),
    Splits::Equal { parts: 2, multiple: 1 },
    Splits::Equal { parts: 4, multiple: 1 },
    Splits::Equal { parts: 8, multiple: 1 },
];

/// The kernels of the table that attend, each with its ways to split, in an engine that stores what `base` says: first those
/// of this form.
pub fn table(base: &Contract, form: Option<Form>) -> Vec<Try> {
    let mut all = Vec::new();
    let mut attending: Vec<&Kernel> =
        kernels().iter().filter(|k| k.contract.softmax != Softmax::exact()).collect();
    attending.sort_by_key(|k| k.form.is_some() && k.form != form);
    for kernel in attending {
        let own = kernel.contract_for(base.activations);
        let splits = match kernel.tries.as_slice() {
            // Somebody says how keys are split.
            _ if base.splits != Splits::Parts(1) => std::slice::from_ref(&base.splits),
            [] => std::slice::from_ref(&own.splits),
            some => some,
        };
        for &split in splits.iter().filter(|s| **s != Splits::Scheduled) {
            let contract = Contract {
                accumulate: own.accumulate,
                softmax: own.softmax,
                partials: own.partials,
                merge_groups: own.merge_groups,
                split_prefill: own.split_prefill,
                splits: split,
                ..*base
            };
            let name = match kernel.tries.len() {
                0 => kernel.name.clone(),
                _ => format!("{}, {split}", kernel.name),
            };
            all.push(Try::new(name, contract));
        }
    }
    all
}

/// What differs from a contract of an attention in a single point.
pub fn changes(of: &Try) -> Vec<Try> {
    let mut all: Vec<Try> = Vec::new();
    let mut add = |what: String, change: &dyn Fn(&mut Contract)| {
        let mut contract = of.contract;
        change(&mut contract);
        if contract != of.contract {
            all.push(Try { name: format!("{}{CHANGED}{what}", of.name), contract, changed: true });
        }
    };
    let c = &of.contract;
    for tile in TILES {
        let what = if tile == 0 { "no tiles".into() } else { format!("tiles of {tile} keys") };
        add(what, &|c| c.softmax.tile = tile);
    }
    for (order, what) in [(TileOrder::Forward, "first tile first"), (TileOrder::Reverse, "last tile first")] {
        add(what.into(), &|c| c.softmax.order = order);
    }
    let what = if c.softmax.pairs { "tiles one by one" } else { "tiles in pairs" };
    add(what.into(), &|c| c.softmax.pairs = !c.softmax.pairs);
    add("P not cast".into(), &|c| c.softmax.p = None);
    for p in [DType::Bf16, DType::F16] {
        add(format!("P cast to {p}"), &|c| c.softmax.p = Some(p));
    }
    for (row_sum, what) in [(RowSum::Rounded, "row sum of cast P"), (RowSum::Unrounded, "row sum of f32 P")] {
        add(what.into(), &|c| c.softmax.row_sum = row_sum);
    }
    let what =
        if c.softmax.normalised { "P cast before normalising" } else { "P normalised before its cast" };
    add(what.into(), &|c| c.softmax.normalised = !c.softmax.normalised);
    let on = |is: bool| if is { "not cast" } else { "cast" };
    add(format!("q·k {}", on(c.softmax.cast_raw)), &|c| c.softmax.cast_raw = !c.softmax.cast_raw);
    add(format!("scores {}", on(c.softmax.cast_scaled)), &|c| c.softmax.cast_scaled = !c.softmax.cast_scaled);
    for partials in [DType::F32, c.activations] {
        add(format!("partials in {partials}"), &|c| c.partials = partials);
    }
    for groups in [None, Some(2), Some(4), Some(8)] {
        let what = groups.map_or("merged at once".to_string(), |n| format!("merged {n} apart first"));
        add(what, &|c| c.merge_groups = groups);
    }
    for splits in SPLITS {
        add(splits.to_string(), &|c| (c.splits, c.split_prefill) = (splits, true));
    }
    all
}

/// What of a contract some rows can show: contracts with equal sights make the same values of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Sight {
    softmax: Softmax,
    partials: DType,
    merge_groups: Option<usize>,
    ranges: Vec<Vec<Range<usize>>>,
}

impl Sight {
    /// Of sequences with so many keys; true: a prefill's.
    pub fn new(c: &Contract, sequences: &[(usize, bool)]) -> Sight {
        let whole = |n: usize| std::iter::once(0..n).collect::<Vec<_>>();
        let ranges: Vec<Vec<Range<usize>>> = sequences
            .iter()
            .map(|&(keys, prefill)| match c.softmax.normalised || prefill && !c.split_prefill {
                true => whole(keys),
                false => c.split_ranges(keys).into_iter().filter(|r| !r.is_empty()).collect(),
            })
            .collect();
        let parts = ranges.iter().map(Vec::len).max().unwrap_or(0);
        let longest = ranges.iter().flatten().map(Range::len).max().unwrap_or(0);
        let mut softmax = c.softmax;
        // Of the factor's own rounding, 10⁻⁸, no bit tells.
        softmax.factor = ScoreFactor::Exact;
        let tiles =
            softmax.cast().is_some() && !softmax.normalised && softmax.tile != 0 && softmax.tile < longest;
        if !tiles {
            (softmax.tile, softmax.order, softmax.pairs) = (0, TileOrder::Forward, false);
        }
        if softmax.cast().is_none() {
            (softmax.row_sum, softmax.normalised) = (RowSum::Unrounded, false);
        }
        let cast = c.part_cast().filter(|_| parts > 1);
        Sight {
            softmax,
            partials: cast.unwrap_or(DType::F32),
            merge_groups: c.merge_groups.filter(|n| cast.is_some() && *n < parts),
            ranges,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contracts::find;
    use mla_reference::Accumulate;

    fn base(dtype: DType) -> Contract {
        Contract::usual(dtype, Accumulate::Unknown)
    }

    #[test]
    fn the_table_keeps_what_is_stored_and_leaves_no_splits_open() {
        let dump = Contract { lse: DType::Bf16, ..base(DType::F16) };
        let all = table(&dump, Some(Form::Absorbed));
        assert!(all[0].name.starts_with("vllm-triton-decode"));
        assert!(table(&dump, Some(Form::Fused))[0].name.starts_with("flashinfer-ragged"));
        assert!(all.len() > 60);
        for t in &all {
            assert!(t.contract.splits != Splits::Scheduled, "{}", t.name);
            assert_eq!((t.contract.activations, t.contract.lse), (DType::F16, DType::Bf16));
            assert!(t.contract.softmax.p.is_none_or(|p| p == DType::F16), "{}", t.name);
        }
        let named = |n: &str| all.iter().filter(|t| t.name.starts_with(n)).count();
        assert_eq!(named("flashmla-decode, "), find("flashmla-decode").unwrap().tries.len());
    }

    #[test]
    fn changes_differ_in_one_point_each() {
        let of = Try::new("k", table(&base(DType::Bf16), None)[0].contract);
        let all = changes(&of);
        for t in &all {
            let fields = t.contract.differences(&of.contract);
            let splits = fields.iter().any(|d| d.field == "splits");
            assert!(fields.len() == 1 || splits && fields.len() == 2, "{}: {fields:?}", t.name);
        }
        assert!(all.len() > 30);
    }

    /// One tile is in no order, and one split has no partials.
    #[test]
    fn what_rows_can_not_show_is_one() {
        let c =
            Contract { softmax: find("flashinfer-mla-fa2").unwrap().contract.softmax, ..base(DType::Bf16) };
        let mut other = Contract { partials: DType::Bf16, ..c };
        (other.softmax.tile, other.softmax.order) = (128, TileOrder::Forward);
        assert_eq!(Sight::new(&c, &[(64, false)]), Sight::new(&other, &[(64, false)]));
        assert_ne!(Sight::new(&c, &[(65, false)]), Sight::new(&other, &[(65, false)]));
        other.splits = Splits::Keys(64);
        assert_ne!(Sight::new(&c, &[(100, false)]), Sight::new(&other, &[(100, false)]));
        assert!(Sight::new(&other, &[(100, true)]).ranges[0].iter().eq([&(0..100)]));
    }
}
