/*!
What the CPU engine can be told to compute wrong inside a stage, one enum a kind, and what each makes of the numbers.

The seams ([`super::seams`]) hold them; stages ask here. Everything is a pure function of what the right stage has.
*/

use mla_numeric::DType;
use mla_reference::{Pairing, Plan, Rope, Sequence, Stage};
use std::ops::Range;

/// How q or k_pe is rotated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Turning {
    /// Not at all.
    Skipped,
    /// Twice, rounded in between.
    Twice,
    /// By minus the angle.
    Backwards,
    /// In the other pairs: half-split for adjacent.
    OtherPairs,
    /// With plain frequencies of this base.
    Base(f64),
    /// With cos and sin times this.
    Magnitude(f64),
}

impl Turning {
    /// The table's numbers under it.
    pub fn rope(self, rope: &Rope) -> Rope {
        let mut r = rope.clone();
        match self {
            Turning::Skipped => r.inv_freq.fill(0.0),
            Turning::Twice => {}
            Turning::Backwards => r.inv_freq.iter_mut().for_each(|f| *f = -*f),
            Turning::OtherPairs => {
                r.pairing = match r.pairing {
                    Pairing::Adjacent => Pairing::Half,
                    Pairing::Half => Pairing::Adjacent,
                }
            }
            Turning::Base(base) => {
                let n = r.inv_freq.len() as f64;
                r.inv_freq.iter_mut().enumerate().for_each(|(j, f)| *f = libm::pow(base, -(j as f64) / n));
            }
            Turning::Magnitude(m) => r.magnitude *= m,
        }
        r
    }
}

/// Which keys a row sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sight {
    /// So many more (or fewer) than the causal mask allows.
    Off(i64),
    /// All of its sequence.
    All,
}

impl Sight {
    /// Keys that a row sees which should see `visible` of `keys`.
    pub fn of(self, visible: usize, keys: usize) -> usize {
        match self {
            Sight::All => keys,
            Sight::Off(n) => (visible as i64).saturating_add(n).clamp(0, keys as i64) as usize,
        }
    }
}

/// Keys that no row sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lost {
    /// Of the context.
    Context,
    /// Of the new tokens.
    New,
    /// The first key.
    FirstKey,
    /// The first page.
    FirstPage,
    /// After the last whole page.
    LastPage,
    /// After the last whole tile.
    LastTile,
}

impl Lost {
    /// The keys of a sequence, with tiles of so many keys.
    pub fn keys(self, seq: &Sequence, page: usize, tile: usize) -> Range<usize> {
        let n = seq.keys();
        let rest = |size: usize| if n > size { n / size.max(1) * size..n } else { 0..0 };
        match self {
            Lost::Context => 0..seq.context,
            Lost::New => seq.context..n,
            Lost::FirstKey => 0..1.min(n),
            Lost::FirstPage => 0..if n > page { page } else { 0 },
            Lost::LastPage => rest(page),
            Lost::LastTile => rest(tile),
        }
    }
}

/// Where keys are read from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Paging {
    /// A page of a sequence from another page of its own.
    Own(usize, usize),
    /// One slot after another from the first one on: the table is not followed.
    Contiguous,
    /// The table of pages is taken for a table of slots.
    TableOfSlots,
}

impl Paging {
    /// The slots that a sequence's keys are read from.
    pub fn slots(self, plan: &Plan, seq: &Sequence) -> Vec<usize> {
        let (size, pool) = (plan.page_size.max(1), plan.pages * plan.page_size);
        let first = seq.slots.first().copied().unwrap_or(0);
        let from = |i: usize| match self {
            Paging::Own(a, b) if i / size == a => {
                seq.slots.get(b * size + i % size).copied().unwrap_or(seq.slots[i])
            }
            Paging::Own(..) => seq.slots[i],
            Paging::Contiguous => (first + i) % pool.max(1),
            Paging::TableOfSlots => {
                let pages = seq.slots.len().div_ceil(size);
                seq.slots[i % pages * size] / size
            }
        };
        (0..seq.slots.len()).map(from).collect()
    }
}

/// How splits and chunks are merged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Merging {
    /// exp2 of natural logarithms.
    Base2,
    /// As if all had the same lse.
    Average,
    /// One left out.
    Lost(usize),
    /// One taken twice.
    Twice(usize),
    /// Outputs with the lse of the part at the other end.
    Reversed,
}

impl Merging {
    /// The lse that parts are weighed by, in place of theirs; and the factor on their differences.
    pub fn lse(self, lse: &[f32]) -> (Vec<f32>, f32) {
        let mut all = lse.to_vec();
        let mut power = 1.0;
        match self {
            Merging::Base2 => power = std::f32::consts::LN_2,
            Merging::Average => power = 0.0,
            Merging::Lost(s) => all.iter_mut().skip(s).take(1).for_each(|v| *v = f32::NEG_INFINITY),
            Merging::Twice(s) => all.iter_mut().skip(s).take(1).for_each(|v| *v += std::f32::consts::LN_2),
            Merging::Reversed => all.reverse(),
        }
        (all, power)
    }
}

/// What is wrong with a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norming {
    /// Not done: the input goes on, rounded.
    Skipped,
    /// Its weight left out.
    NoWeight,
    /// One added to its weight.
    PlusOne,
    /// The mean of squares taken over this many columns from the first on: latent and rope together.
    Wide,
}

/// A norm and what is wrong with it.
pub type NormSlip = (Stage, Norming);

/// Parts of a query that are left out of the scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Part {
    /// The rotated columns.
    Rope,
    /// The others.
    Nope,
}

impl Part {
    /// Takes it out of a query of which the last `rope` columns are rotated.
    pub fn take(self, q: &mut [f32], rope: usize) {
        let n = q.len() - rope;
        match self {
            Part::Rope => q[n..].fill(0.0),
            Part::Nope => q[..n].fill(0.0),
        }
    }
}

/// Rounds to a dtype, in float32.
pub fn rounded(x: &mut [f32], dtype: DType) {
    x.iter_mut().for_each(|v| *v = dtype.round(f64::from(*v)) as f32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::Regime;

    fn plan() -> Plan {
        // Pages 3, 0, 2 of two slots; five keys.
        let slots = vec![6, 7, 0, 1, 4];
        let sequence = Sequence { request: 0, regime: Regime::Random, tokens: 0..1, context: 4, slots };
        Plan { page_size: 2, pages: 5, sequences: vec![sequence], ..Plan::default() }
    }

    #[test]
    fn pages_by_hand() {
        let plan = plan();
        let slots = |p: Paging| p.slots(&plan, &plan.sequences[0]);
        assert_eq!(slots(Paging::Own(0, 1)), [0, 1, 0, 1, 4]);
        assert_eq!(slots(Paging::Contiguous), [6, 7, 8, 9, 0]);
        assert_eq!(slots(Paging::TableOfSlots), [3, 0, 2, 3, 0]);
    }

    #[test]
    fn keys_that_are_lost() {
        let plan = plan();
        let lost = |l: Lost| l.keys(&plan.sequences[0], 2, 3);
        assert_eq!((lost(Lost::Context), lost(Lost::New)), (0..4, 4..5));
        assert_eq!((lost(Lost::LastPage), lost(Lost::LastTile)), (4..5, 3..5));
        assert_eq!((lost(Lost::FirstKey), lost(Lost::FirstPage)), (0..1, 0..2));
        assert_eq!((Sight::Off(-2).of(1, 5), Sight::Off(3).of(4, 5), Sight::All.of(1, 5)), (0, 5, 5));
    }

    #[test]
    fn merging_by_hand() {
        let lse = [1.0, 2.0, 3.0];
        assert_eq!(Merging::Lost(1).lse(&lse).0, [1.0, f32::NEG_INFINITY, 3.0]);
        assert_eq!(Merging::Reversed.lse(&lse).0, [3.0, 2.0, 1.0]);
        assert_eq!(Merging::Average.lse(&lse), (lse.to_vec(), 0.0));
    }
}
