/*!
Evidence: everything that is counted of one unit of judgement, and the tests that are made of it.

Bounds and flips are counted on every element; directions on a sample ([`super::sample`]). Sums are kept a piece
and added in a fixed order, or as whole numbers, so that no figure depends on threads.

Two criteria count *odd* elements, by what the output's format lets one see:
- 16-bit outputs: an element that is not the correctly rounded reference (a flip). The honest share is what the noise
  predicts, see [`super::stats::flips`].
- float32 outputs: accumulation dominates and nearly nothing is the rounded reference. There an element is odd if
  it lies more than [`WIDE`] standard deviations (and half an ulp) from the reference. Whatever the law of an error
  whose standard deviation is σ, at most 1/WIDE² of it lie there (Chebyshev): that is the honest share. Not so for
  attention outputs in float32, all columns of which share the errors of P: one flip of its cast moves a whole row, and
  elements are no independent witnesses. There only bounds and directions (whose unit is the row) speak.
*/

mod directions;
mod keys;
mod tests;

pub use directions::{Direction, Measured};
pub use keys::LostKeys;
pub use tests::{Test, row_name};

use super::predict::Prediction;
use super::stats::flips::{BLOCK, Flips, MIN_ROWS};
use super::stats::noise::flip_probability;
use super::tally::{Tally, differing, within};
use directions::Pairs;
use mla_numeric::DType;
use mla_reference::Terms;
use ndarray::{Array2, ArrayView2};
use std::collections::BTreeMap;

/// Standard deviations beyond which an element of a float32 output is odd.
pub const WIDE: f64 = 8.0;
/// Flips of a piece that the running bound looks at.
const RUNS: usize = 32;
/// ln of the level at which a flip test, alone, stops the fine directions from being believed: 1e-9.
const GUARD: f64 = -20.723_265_836_946_41;

/// How the columns of a stage's matrix fall into heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    /// Heads; 1 where there is no such axis.
    pub heads: usize,
    /// Columns of a head.
    pub width: usize,
}

/// Everything counted of one unit.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// Bits against the proven bound.
    pub tally: Tally,
    /// Elements beyond the statistical bound.
    pub unlikely: u64,
    dtype: DType,
    columns: Columns,
    /// Whether all casts of all pieces were emulated.
    emulated: bool,
    /// Whether the columns of a row share errors that the output's format shows: those of P in float32. Then n columns may
    /// err as one, and a standard error by the model is up to √n times larger (Cauchy and Schwarz).
    shared: bool,
    rows: BTreeMap<usize, Flips>,
    heads: Vec<Flips>,
    blocks: Vec<Flips>,
    clusters: BTreeMap<(Direction, super::stats::score::Fineness), Pairs>,
    keys: keys::Keys,
    /// Pairs that say something of keys.
    pairs_of_keys: u64,
    /// Accumulator roundings of the stage, for floors.
    pub steps: f64,
    /// Elements that directions looked at.
    pub sampled: u64,
    /// Largest change of a sampled element that its bound would let pass, in units of its row's rms.
    pub element: f64,
}

/// One piece to add: the rows `first..` and columns `col..` of a stage.
pub struct Piece<'p, 't, 'h> {
    /// First row and column of the stage's matrix.
    pub at: (usize, usize),
    /// Columns of the stage's matrix.
    pub width: usize,
    /// The engine's values.
    pub engine: &'p Array2<f64>,
    /// The reference before rounding; rows are contiguous.
    pub x: ArrayView2<'p, f64>,
    /// What is predicted.
    pub prediction: &'p Prediction<'p, 't, 'h>,
    /// Terms, for directions.
    pub terms: &'p Terms<'t, 'h>,
}

impl Evidence {
    /// Nothing yet.
    pub fn new(dtype: DType, columns: Columns) -> Evidence {
        Evidence {
            tally: Tally::default(),
            unlikely: 0,
            dtype,
            columns,
            emulated: true,
            shared: false,
            rows: BTreeMap::new(),
            heads: vec![Flips::default(); columns.heads],
            blocks: vec![Flips::default(); columns.width.div_ceil(BLOCK)],
            clusters: BTreeMap::new(),
            keys: BTreeMap::new(),
            pairs_of_keys: 0,
            steps: 0.0,
            sampled: 0,
            element: 0.0,
        }
    }

    /// Whether an odd element is one beyond 8σ instead of a flip.
    pub fn wide(dtype: DType) -> bool {
        dtype.precision() > 20
    }

    /// Counts these rows of a piece, bit for bit. `copies`: rows of the stage that repeat another one, whose flips say nothing
    /// that those of the other did not.
    pub fn count(&mut self, piece: &Piece, rows: &[usize], copies: &[bool]) {
        let n = piece.x.ncols();
        let at = |i: usize| (piece.at.0 + i, piece.at.1, piece.width);
        let (engine, x) = (|i: usize| line(piece.engine.view(), i), |i: usize| line(piece.x, i));
        if piece.prediction.is_copy() {
            rows.iter().for_each(|&i| self.tally.copy(self.dtype, at(i), engine(i), x(i)));
            return;
        }
        self.emulated &= piece.prediction.emulated();
        self.shared |= Self::wide(self.dtype) && piece.terms.shares_errors();
        self.steps = self.steps.max(piece.prediction.steps());
        let mut rounded = vec![0.0; n];
        let mut flips: Vec<(usize, Vec<usize>)> = Vec::new();
        let mut sums = Sums::new(self.columns);
        let mut shares = Vec::with_capacity(n);
        let counts = !Self::wide(self.dtype) || !piece.terms.shares_errors();
        for &i in rows {
            let (o, x) = (engine(i), x(i));
            rounded.copy_from_slice(x);
            self.dtype.round_slice(&mut rounded);
            let flipped = differing(o, &rounded, false);
            self.tally.row(self.dtype, at(i), o, x, &rounded, &[], None);
            if counts && !copies[piece.at.0 + i] {
                piece.prediction.shares(i, x, &mut shares);
                self.odd(piece, i, (o, x), &flipped, &mut shares, &mut sums);
            }
            if !flipped.is_empty() || sampled(piece.at.0 + i, rows.first() == Some(&i)) {
                flips.push((i, flipped));
            }
        }
        sums.add_to(&mut self.heads, &mut self.blocks);
        if flips.is_empty() {
            return;
        }
        let which: Vec<usize> = flips.iter().map(|(i, _)| *i).collect();
        let bounds = piece.prediction.bounds(&which);
        let (mut runs, mut confirmed) = (RUNS, false);
        for (k, (i, flipped)) in flips.iter().enumerate() {
            let (o, x) = (engine(*i), x(*i));
            let (proven, likely) = (line(bounds.proven.view(), k), line(bounds.likely.view(), k));
            let rms = (x.iter().map(|v| v * v).sum::<f64>() / n.max(1) as f64).sqrt();
            // Long sums: where the bound by norms says little, the running one is worth its price.
            let dull = |b: f64| b > self.dtype.spacing(rms) / 2.0;
            let mut closer: Option<Option<Vec<f64>>> = None;
            for &j in flipped {
                self.tally.flip(self.dtype, (at(*i).0, piece.at.1 + j), o[j], x[j], Some(proven[j]));
                let mut b = likely[j].min(proven[j]);
                if runs > 0 && dull(b) {
                    runs -= 1;
                    b = piece.prediction.running(*i, j).map_or(b, |r| r.min(b));
                }
                // One that a closer look confirms is enough to spare the others of the piece the price of it.
                let fits = |b: f64| within(self.dtype, o[j], x[j], b);
                let honest = fits(b)
                    || !confirmed
                        && closer
                            .get_or_insert_with(|| piece.prediction.closer(*i))
                            .as_ref()
                            .is_some_and(|b| fits(b[j].min(proven[j])));
                confirmed |= !honest;
                self.unlikely += u64::from(!honest);
            }
            if sampled(piece.at.0 + i, rows.first() == Some(i)) {
                let narrow: Vec<f64> = proven.iter().zip(likely).map(|(a, b)| a.min(*b)).collect();
                let long = narrow.first().is_some_and(|b| dull(*b)) && !Self::wide(self.dtype);
                let step = if long { 4 * BLOCK } else { BLOCK };
                for j in ((at(*i).0 * 7) % step.min(n.max(1))..n).step_by(step) {
                    let running = if long { piece.prediction.running(*i, j) } else { None };
                    let b = running.map_or(narrow[j], |r| r.min(narrow[j]));
                    self.tally.bound(self.dtype, x[j], b);
                    let passes = (2.0 * b + self.dtype.spacing(x[j].abs() + b)) / rms;
                    if passes.is_finite() {
                        self.element = self.element.max(passes);
                    }
                }
            }
        }
    }

    /// Counts the odd elements of a row by row, head and block of columns.
    fn odd(
        &mut self,
        piece: &Piece,
        i: usize,
        (o, x): (&[f64], &[f64]),
        flipped: &[usize],
        shares: &mut [f64],
        sums: &mut Sums,
    ) {
        let wide = Self::wide(self.dtype);
        // Results are not always spread evenly between ties: a bf16 value times a round factor lies on them more often than
        // chance has it (1.1 times a multiple of 5), and so does the mean of ten values under a flat softmax. So each
        // element's own distance counts too, except in products, whose many terms spread them.
        if !wide && !matches!(piece.terms, Terms::Product { .. }) {
            for (j, share) in shares.iter_mut().enumerate() {
                *share = share.max(flip_probability(self.dtype, x[j], piece.prediction.sigma(i, j)));
            }
        }
        let far = |j: &usize| piece.prediction.far(i, *j, o[*j]);
        let mut next = flipped.iter().copied().filter(|j| !wide || far(j)).peekable();
        let (mut j, n) = (0, x.len());
        let (mut count, mut expected) = (0, 0.0);
        while j < n {
            // Segments: blocks of columns inside a head.
            let col = piece.at.1 + j;
            let (head, within) = (col / self.columns.width, col % self.columns.width);
            let end = n.min(j + BLOCK - within % BLOCK).min(j + self.columns.width - within);
            let mut odd = 0;
            while next.next_if(|c| *c < end).is_some() {
                odd += 1;
            }
            let share: f64 = shares[j..end].iter().sum();
            sums.add(head, within / BLOCK, odd, (end - j) as u64, share);
            (count, expected) = (count + odd, expected + share);
            j = end;
        }
        self.rows.entry(piece.at.0 + i).or_default().merge(Flips::new(count, n as u64, expected));
    }

    /// Adds what was counted of other pieces.
    pub fn merge(&mut self, other: Evidence) {
        self.tally.merge(other.tally);
        self.unlikely += other.unlikely;
        self.emulated &= other.emulated;
        self.shared |= other.shared;
        for (row, flips) in other.rows {
            self.rows.entry(row).or_default().merge(flips);
        }
        self.heads.iter_mut().zip(&other.heads).for_each(|(a, b)| a.merge(*b));
        self.blocks.iter_mut().zip(&other.blocks).for_each(|(a, b)| a.merge(*b));
        for (key, clusters) in other.clusters {
            self.clusters.entry(key).or_default().extend(clusters);
        }
        for (key, (sum, n)) in other.keys {
            let mine = self.keys.entry(key).or_default();
            *mine = (mine.0 + sum, mine.1 + n);
        }
        self.pairs_of_keys += other.pairs_of_keys;
        self.steps = self.steps.max(other.steps);
        self.sampled += other.sampled;
        self.element = self.element.max(other.element);
    }

    /// Honest share of odd elements of some of them.
    fn limit(&self, flips: &Flips) -> f64 {
        if Self::wide(self.dtype) { 1.0 / (WIDE * WIDE) } else { flips.limit() }
    }

    /// Odd elements of all.
    pub fn whole(&self) -> Flips {
        let mut all = Flips::default();
        self.rows.values().for_each(|f| all.merge(*f));
        all
    }

    /// Share of elements that are not the rounded reference.
    pub fn flip_share(&self) -> f64 {
        self.tally.flips as f64 / self.tally.elements.max(1) as f64
    }

    /// Share of elements that rounding does not explain: flips; of float32 those beyond a bound.
    pub fn odd_share(&self) -> f64 {
        match Self::wide(self.dtype) {
            true => self.tally.beyond.max(self.unlikely) as f64 / self.tally.elements.max(1) as f64,
            false => self.flip_share(),
        }
    }

    /// Honest share of odd elements of the whole.
    pub fn whole_limit(&self) -> f64 {
        self.limit(&self.whole())
    }

    /// Whether all casts were emulated.
    pub fn emulated(&self) -> bool {
        self.emulated
    }

    /// Whether odd elements are as few as they should be, so that fine scores may be believed.
    pub fn clean(&self) -> bool {
        let whole = self.whole();
        self.emulated && self.unlikely == 0 && whole.log_p(self.limit(&whole)) > GUARD
    }

    /// Whether odd elements are tested: copies have none, and without emulated casts the honest share is unknown.
    pub fn counts_odd(&self) -> bool {
        self.emulated && self.whole().elements > 0
    }

    /// Whether there is anything that noise is predicted of: no copies alone.
    pub fn has_noise(&self) -> bool {
        !self.clusters.is_empty()
    }

    /// Elements of a row, of the shortest kind that is tested for itself; None where no row is.
    pub fn row_slice(&self) -> Option<Flips> {
        let tested = self.columns.heads >= MIN_ROWS && self.rows.len() > 1 && self.counts_odd();
        tested.then(|| self.rows.values().min_by_key(|f| f.elements).copied()).flatten()
    }

    /// Elements of a head, where heads are tested for themselves.
    pub fn head_slice(&self) -> Option<Flips> {
        let tested = self.columns.heads > 1 && self.rows.len() >= MIN_ROWS && self.counts_odd();
        tested.then(|| self.heads.iter().min_by_key(|f| f.elements).copied()).flatten()
    }
}

/// A row of a matrix whose rows are contiguous.
fn line(m: ArrayView2<'_, f64>, i: usize) -> &[f64] {
    let n = m.ncols();
    m.to_slice().and_then(|all| all.get(i * n..(i + 1) * n)).unwrap_or(&[])
}

/// Whether bounds of a row are computed though it has no flip: the first of a piece, and one in eight.
fn sampled(row: usize, first: bool) -> bool {
    first || (row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61 == 0
}

/// Odd elements of heads and of blocks of columns of one piece: added up in one order, then as whole numbers.
struct Sums {
    heads: Vec<(u64, u64, f64)>,
    blocks: Vec<(u64, u64, f64)>,
}

impl Sums {
    fn new(columns: Columns) -> Sums {
        let none = |n| vec![(0, 0, 0.0); n];
        Sums { heads: none(columns.heads), blocks: none(columns.width.div_ceil(BLOCK)) }
    }

    fn add(&mut self, head: usize, block: usize, odd: u64, all: u64, expected: f64) {
        for sum in [&mut self.heads[head], &mut self.blocks[block]] {
            *sum = (sum.0 + odd, sum.1 + all, sum.2 + expected);
        }
    }

    fn add_to(&self, heads: &mut [Flips], blocks: &mut [Flips]) {
        for (to, from) in [(heads, &self.heads), (blocks, &self.blocks)] {
            for (to, (odd, all, expected)) in to.iter_mut().zip(from).filter(|(_, f)| f.1 > 0) {
                to.merge(Flips::new(*odd, *all, *expected));
            }
        }
    }
}
