/*!
How a stage departs from its formula: what hypotheses about faults change beside inputs, weights and scalars.

An engine that drops a token, masks one key too many or forgets to rescale computes something definite, and a
reference that departs in the same way predicts its bits. The default departs in nothing. A departure may also narrow
a stage down to some heads and rows, so that many hypotheses can be held against a part of a tensor cheaply.
*/

use ndarray::Array2;
use std::ops::Range;

/// How many keys a row sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Causal by position, and so many keys more (or fewer).
    Causal(i64),
    /// All keys of the sequence.
    All,
}

/// What takes the new scale when the running maximum grows; what does not keeps the old one's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rescale {
    /// Output and row sum.
    #[default]
    Both,
    /// The output alone.
    Output,
    /// The row sum alone.
    Sum,
    /// Nothing.
    Neither,
}

impl Rescale {
    /// The weight of a tile in the output and in the row sum, where `right` is what both should have.
    pub fn weights(self, right: f64) -> (f64, f64) {
        match self {
            Rescale::Both => (right, right),
            Rescale::Output => (right, 1.0),
            Rescale::Sum => (1.0, right),
            Rescale::Neither => (1.0, 1.0),
        }
    }
}

/// Keys of one sequence in the order in which attention reads them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyList {
    /// Position whose key and value are read; beyond the last one: key and value are zeros.
    pub source: Vec<usize>,
    /// Position for which they are read, ascending: a row sees it or not by this one.
    pub place: Vec<usize>,
}

impl KeyList {
    /// Keys, or values, as they are read.
    pub fn of(&self, all: &Array2<f64>) -> Array2<f64> {
        let mut out = Array2::zeros((self.source.len(), all.ncols()));
        for (mut to, from) in out.rows_mut().into_iter().zip(&self.source) {
            if *from < all.nrows() {
                to.assign(&all.row(*from));
            }
        }
        out
    }
}

/// Part of a stage. An empty list keeps all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Only {
    /// Heads that are computed.
    pub heads: Vec<bool>,
    /// Rows of attention that are computed, in blocks that hold one of them.
    pub rows: Vec<bool>,
}

impl Only {
    /// Whether a head is part of it.
    pub fn head(&self, h: usize) -> bool {
        self.heads.get(h).copied().unwrap_or(true)
    }
    /// Whether any of these rows is part of it.
    pub fn any(&self, rows: Range<usize>) -> bool {
        self.rows.is_empty() || self.rows.get(rows).is_some_and(|r| r.contains(&true))
    }
}

/// Departures from the formulas of attention and of the merge of splits.
#[derive(Clone, Debug, PartialEq)]
pub struct Departure {
    /// Keys as they are read, for some sequences.
    pub keys: Vec<(usize, KeyList)>,
    /// Key positions that no row sees, ascending, for some sequences.
    pub gone: Vec<(usize, Vec<usize>)>,
    /// What rows see.
    pub mask: Mask,
    /// What is rescaled when the running maximum grows.
    pub rescale: Rescale,
    /// When the running maximum grows in a row's last tile, sums keep the old one's scale.
    pub no_last_rescale: bool,
    /// Column of a cache row from which values are read; 0 is right.
    pub value_from: usize,
    /// Exponent of the weights of splits: `W_s ∝ exp(power · lse_s)`; 1 is right.
    pub merge_power: f64,
    /// Factor on the values of each head; empty: none.
    pub value_gain: Vec<f64>,
    /// The part of the stage that is computed.
    pub only: Only,
}

impl Default for Departure {
    fn default() -> Departure {
        Departure {
            keys: Vec::new(),
            gone: Vec::new(),
            mask: Mask::Causal(0),
            rescale: Rescale::Both,
            no_last_rescale: false,
            value_from: 0,
            merge_power: 1.0,
            value_gain: Vec::new(),
            only: Only::default(),
        }
    }
}

impl Departure {
    /// Keys of a sequence that no row sees.
    pub fn gone(&self, sequence: usize) -> &[usize] {
        self.gone.iter().find(|(s, _)| *s == sequence).map_or(&[], |(_, g)| g.as_slice())
    }
    /// Keys of a sequence as they are read; None: in order.
    pub fn list(&self, sequence: usize) -> Option<&KeyList> {
        self.keys.iter().find(|(s, _)| *s == sequence).map(|(_, l)| l)
    }
    /// Keys that a row sees which should see `visible` of `keys`, of a sequence.
    pub fn visible(&self, sequence: usize, visible: usize, keys: usize) -> usize {
        let seen = match self.mask {
            Mask::All => keys,
            Mask::Causal(0) => visible,
            Mask::Causal(n) => (visible as i64 + n).clamp(0, keys as i64) as usize,
        };
        self.list(sequence).map_or(seen, |l| l.place.iter().take_while(|p| **p < seen).count())
    }
}

/// How one attention departs, as [`crate::attention::attend_as`] takes it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slip<'a> {
    /// Keys that no row sees, ascending.
    pub gone: &'a [usize],
    /// What is rescaled when the running maximum grows.
    pub rescale: Rescale,
    /// The same in a row's last tile alone.
    pub no_last_rescale: bool,
}
