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

use super::predict::Prediction;
use super::sample::Sample;
use super::stats::direction::{Cluster, Estimate, Kind, Weighed, cluster, floor, p_value, test_direction};
use super::stats::flips::{BLOCK, Flips, MIN_ROWS};
use super::stats::noise::{Jump, jumps};
use super::stats::score::{Fineness, both_of, scale_of};
use super::tally::Tally;
use mla_numeric::DType;
use mla_reference::{RowName, Terms};
use ndarray::Array2;
use std::collections::BTreeMap;

/// Standard deviations beyond which an element of a float32 output is odd.
pub const WIDE: f64 = 8.0;
/// Flips of a piece that the running bound looks at.
const RUNS: usize = 32;
/// ln of the level at which a flip test, alone, stops the fine directions from being believed: 1e-9.
const GUARD: f64 = -20.723_265_836_946_41;

/// A way in which an output may be off by a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// The whole output.
    Gain,
    /// The softmax scale.
    Scale,
    /// The rope part of the scores.
    RopeWeight,
    /// eps of a norm.
    Eps,
    /// Weight of the first key.
    FirstKey,
    /// Weight of the last key of each tile.
    TileLast,
}

impl Direction {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Direction::Gain => "gain",
            Direction::Scale => "scale",
            Direction::RopeWeight => "rope weight",
            Direction::Eps => "eps",
            Direction::FirstKey => "first key",
            Direction::TileLast => "last keys of tiles",
        }
    }
    /// What decides floor and law.
    pub const fn kind(self) -> Kind {
        match self {
            Direction::Gain | Direction::Scale | Direction::RopeWeight => Kind::Global,
            Direction::Eps => Kind::Local,
            Direction::FirstKey | Direction::TileLast => Kind::Tokens,
        }
    }
    const fn family(self, fineness: Fineness) -> &'static str {
        let coarse = matches!(fineness, Fineness::Coarse);
        match (self, coarse) {
            (Direction::Gain, true) => "gain T1",
            (Direction::Gain, false) => "gain T2",
            (Direction::Scale, true) => "scale T1",
            (Direction::Scale, false) => "scale T2",
            (Direction::RopeWeight, true) => "rope weight T1",
            (Direction::RopeWeight, false) => "rope weight T2",
            (Direction::Eps, true) => "eps T1",
            (Direction::Eps, false) => "eps T2",
            (_, true) => "keys T1",
            (_, false) => "keys T2",
        }
    }
}

/// One statistical test of a unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Test {
    /// Tests of a kind, for calibration: `flips`, `flips slice`, `gain T1`, …
    pub family: &'static str,
    /// What was tested: `flips of head 3`, `scale T1`.
    pub name: String,
    /// ln of the p-value.
    pub log_p: f64,
    /// Estimated factor − 1 of a direction; share of odd elements.
    pub size: f64,
    /// What an honest engine may reach: floor of a direction, limit of a share.
    pub limit: f64,
    /// Whether Holm's procedure over the run rejects it.
    pub rejected: bool,
}

/// An estimate along a direction, kept for the statement of power.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Which.
    pub direction: Direction,
    /// Head, where it is one head's gain.
    pub head: Option<usize>,
    /// T1 or T2.
    pub fineness: Fineness,
    /// The estimate.
    pub estimate: Estimate,
    /// What casts of P that may go either way can add to it.
    pub jump: f64,
}

/// How the columns of a stage's matrix fall into heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    /// Heads; 1 where there is no such axis.
    pub heads: usize,
    /// Columns of a head.
    pub width: usize,
}

/// Sums of one pair (row, head) along a direction.
#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    cluster: Cluster,
    jumps: Jumps,
    /// Σ of the score's standard deviations by inputs that were not captured, as if all moved together.
    inherited: f64,
}

/// By row, head and first column.
type Pairs = BTreeMap<(usize, usize, usize), Pair>;
/// Standard deviations of what inputs that were not captured add, that a floor holds: flips of theirs are shared by rows
/// and heads, so that the spread of the rows does not show all of it. A flip of few is no normal law: 8, not 5.
const INHERITED: f64 = 8.0;

/// What casts of P that may go either way can do to a score: rare, and large where few keys matter. A normal law knows
/// nothing of them, so the floor of a test holds what they may reach.
#[derive(Clone, Copy, Debug, Default)]
struct Jumps {
    /// Σ probabilities.
    often: f64,
    /// Σ probability · size².
    squares: f64,
    /// Largest size.
    largest: f64,
}

/// ln of the probability with which jumps go beyond [`Jumps::reach`]: 1e-11.
const RARE: f64 = -25.328_436_022_934_504;

impl Jumps {
    fn add(&mut self, other: Jumps) {
        self.often += other.often;
        self.squares += other.squares;
        self.largest = self.largest.max(other.largest);
    }

    /// How far jumps carry a sum, but for a probability of e^[`RARE`]: the smaller of Bernstein's bound and of as many of
    /// the largest as there can be (a sum of rare events is at most k with `(e·often/k)^k`).
    fn reach(&self) -> f64 {
        if self.often <= 0.0 || libm::log(self.often) < RARE {
            return 0.0;
        }
        let l = std::f64::consts::LN_2 - RARE;
        let third = self.largest * l / 3.0;
        let bernstein = third + (third * third + 2.0 * self.squares * l).sqrt();
        let mut k = self.often.ceil().max(1.0);
        while k < 100.0 && k * (1.0 + libm::log(self.often / k)) > RARE {
            k += 1.0;
        }
        if k < 100.0 { bernstein.min(k * self.largest) } else { bernstein }
    }
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
    clusters: BTreeMap<(Direction, Fineness), Pairs>,
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
    /// The reference before rounding.
    pub x: &'p Array2<f64>,
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
            steps: 0.0,
            sampled: 0,
            element: 0.0,
        }
    }

    /// Whether an odd element is one beyond 8σ instead of a flip.
    pub fn wide(dtype: DType) -> bool {
        dtype.precision() > 20
    }

    /// Counts these rows of a piece, bit for bit.
    pub fn count(&mut self, piece: &Piece, rows: &[usize]) {
        let n = piece.x.ncols();
        let at = |i: usize| (piece.at.0 + i, piece.at.1, piece.width);
        let (engine, x) = (|i: usize| line(piece.engine, i), |i: usize| line(piece.x, i));
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
            let differs = |j: &usize| o[*j] != rounded[*j] && !(o[*j].is_nan() && rounded[*j].is_nan());
            let flipped: Vec<usize> = (0..n).filter(differs).collect();
            self.tally.row(self.dtype, at(i), o, x, &rounded, &[], None);
            if counts {
                piece.prediction.shares(i, &mut shares);
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
        let mut runs = RUNS;
        for (k, (i, flipped)) in flips.iter().enumerate() {
            let (o, x) = (engine(*i), x(*i));
            let (proven, likely) = (line(&bounds.proven, k), line(&bounds.likely, k));
            let rms = (x.iter().map(|v| v * v).sum::<f64>() / n.max(1) as f64).sqrt();
            // Long sums: where the bound by norms says little, the running one is worth its price.
            let dull = |b: f64| b > self.dtype.spacing(rms) / 2.0;
            for &j in flipped {
                self.tally.flip(self.dtype, (at(*i).0, piece.at.1 + j), o[j], x[j], Some(proven[j]));
                let mut b = likely[j].min(proven[j]);
                if runs > 0 && dull(b) {
                    runs -= 1;
                    b = piece.prediction.running(*i, j).map_or(b, |r| r.min(b));
                }
                let inside = self.dtype.round(x[j] - b) <= o[j] && o[j] <= self.dtype.round(x[j] + b);
                self.unlikely += u64::from(!inside);
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
                *share = share.max(near_tie(self.dtype, x[j], piece.prediction.sigma(i, j)));
            }
        }
        let far = |j: usize| {
            let off = (o[j] - x[j]).abs();
            off.is_nan() || off > WIDE * piece.prediction.sigma(i, j) + self.dtype.spacing(x[j]) / 2.0
        };
        let mut next = flipped.iter().copied().filter(|j| !wide || far(*j)).peekable();
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

    /// Adds what directions see of these rows of a piece: pairs that the sample takes.
    pub fn directions(&mut self, piece: &Piece, among: &[usize], sample: &Sample, rope: usize, tile: usize) {
        if piece.prediction.is_copy() {
            return;
        }
        let n = piece.x.ncols();
        let mut col = 0;
        while col < n {
            let at = piece.at.1 + col;
            let (head, within) = (at / self.columns.width, at % self.columns.width);
            let end = n.min(col + self.columns.width - within);
            let taken = |i: &usize| sample.takes(piece.at.0 + i, head);
            let rows: Vec<usize> = among.iter().copied().filter(taken).collect();
            if !rows.is_empty() {
                self.pairs(piece, sample, (head, within), col..end, &rows, (rope, tile));
            }
            col = end;
        }
    }

    fn pairs(
        &mut self,
        piece: &Piece,
        sample: &Sample,
        (head, within): (usize, usize),
        cols: std::ops::Range<usize>,
        rows: &[usize],
        (rope, tile): (usize, usize),
    ) {
        let special = special(piece.terms, rows, rope, tile);
        let wide = Self::wide(self.dtype);
        let contract = piece.prediction.contract();
        for (k, &i) in rows.iter().enumerate() {
            let row = piece.at.0 + i;
            let width = self.columns.width;
            let chosen: Vec<usize> = sample
                .columns(row, head, width)
                .filter(|c| (within..within + cols.len()).contains(c))
                .map(|c| c - within + cols.start)
                // What is not finite is counted by its bits; it has no direction (the lse of an empty split).
                .filter(|j| piece.x[[i, *j]].is_finite() && piece.engine[[i, *j]].is_finite())
                .filter(|j| piece.prediction.sigma(i, *j).is_finite())
                .collect();
            if chosen.is_empty() {
                continue;
            }
            self.sampled += chosen.len() as u64;
            let take = |m: &Array2<f64>| chosen.iter().map(|j| m[[i, *j]]).collect::<Vec<f64>>();
            let (o, x) = (take(piece.engine), take(piece.x));
            let sigma: Vec<f64> = chosen.iter().map(|j| piece.prediction.sigma(i, *j)).collect();
            let ulp = piece.prediction.row_ulps(i, &chosen);
            let inherited: Vec<f64> = chosen.iter().map(|j| piece.prediction.inherited(i, *j)).collect();
            let jumps: Vec<Jump> = match piece.terms {
                Terms::Attention { attended, head, lse: false } => {
                    jumps(contract, attended, head, i, 1.0, &chosen)
                }
                Terms::Split { merged, head, lse: false } => {
                    let parts = merged.parts.iter().enumerate();
                    parts
                        .flat_map(|(s, a)| jumps(contract, a, head, i, merged.weights[[s, i]], &chosen))
                        .collect()
                }
                _ => Vec::new(),
            };
            for fineness in Fineness::ALL {
                let s: Vec<f64> = sigma.iter().zip(&ulp).map(|(a, b)| scale_of(*a, *b, fineness)).collect();
                let (g, info) = both_of(self.dtype, &o, &x, &s);
                let mut add = |direction, d: &[f64]| {
                    let along = inherited.iter().zip(&info).zip(&s).zip(d);
                    let shift = along.map(|(((m, i), s), d)| (i * m).min(1.0 / s) * d.abs()).sum();
                    let mut pair =
                        Pair { cluster: cluster(&g, &info, d), jumps: Jumps::default(), inherited: shift };
                    for jump in &jumps {
                        // A score is bounded by 1/s, however far the output moves.
                        let along = jump.moves.iter().zip(&info).zip(&s).zip(d);
                        let size = along
                            .map(|(((m, i), s), d)| (i * m).max(-1.0 / s).min(1.0 / s) * d)
                            .sum::<f64>()
                            .abs();
                        let squares = jump.often * size * size;
                        pair.jumps.add(Jumps { often: jump.often, squares, largest: size });
                    }
                    self.clusters.entry((direction, fineness)).or_default().insert((row, head, within), pair);
                };
                add(Direction::Gain, &x);
                if let Terms::Norm { z, .. } = piece.terms {
                    let square = z.row(i).iter().map(|v| v * v).sum::<f64>() / z.ncols() as f64;
                    // ∂y/∂ln eps = −y·eps/(2(mean x² + eps)), and mean z² = mean x²/(mean x² + eps).
                    let factor = -(1.0 - square).max(0.0) / 2.0;
                    add(Direction::Eps, &x.iter().map(|v| v * factor).collect::<Vec<_>>());
                }
                // A truncating accumulator's drift of the scores, seen along their rope part alone, has no bound: what is left out
                // of account in 16 bits shows in float32.
                let special = special.iter().filter(|(d, _)| !wide || *d != Direction::RopeWeight);
                for (direction, d) in special {
                    add(*direction, &chosen.iter().map(|j| d[[k, j - cols.start]]).collect::<Vec<_>>());
                }
            }
        }
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

    /// All tests, the whole tensor's first. `name`: what a row is.
    pub fn tests(&self, name: &dyn Fn(usize) -> Option<RowName>) -> Vec<Test> {
        let mut tests = Vec::new();
        let what = if Self::wide(self.dtype) { "far elements" } else { "flips" };
        let mut odd = |family, of: String, flips: &Flips| {
            let limit = self.limit(flips);
            let size = flips.flips as f64 / flips.elements.max(1) as f64;
            let name = if of.is_empty() { what.to_string() } else { format!("{what} of {of}") };
            tests.push(Test { family, name, log_p: flips.log_p(limit), size, limit, rejected: false });
        };
        if self.counts_odd() {
            odd("flips", String::new(), &self.whole());
            if self.head_slice().is_some() {
                self.heads.iter().enumerate().for_each(|(h, f)| odd("flips slice", format!("head {h}"), f));
            }
            if self.rows.len() * self.columns.heads >= MIN_ROWS && self.blocks.len() > 1 {
                for (b, f) in self.blocks.iter().enumerate() {
                    let to = ((b + 1) * BLOCK).min(self.columns.width) - 1;
                    odd("flips slice", format!("columns {}..{to}", b * BLOCK), f);
                }
            }
            if self.row_slice().is_some() {
                self.rows.iter().for_each(|(r, f)| odd("flips slice", row_name(*r, name(*r)), f));
            }
            let mut groups: BTreeMap<usize, (usize, Flips)> = BTreeMap::new();
            for (r, f) in &self.rows {
                if let Some(request) = name(*r).and_then(|n| n.request) {
                    let g = groups.entry(request).or_default();
                    g.0 += 1;
                    g.1.merge(*f);
                }
            }
            if groups.len() > 1 {
                for (r, (rows, f)) in groups.iter().filter(|(_, g)| g.0 * self.columns.heads >= MIN_ROWS) {
                    let _ = rows;
                    odd("flips slice", format!("request {r}"), f);
                }
            }
        }
        let clean = self.clean();
        for m in self.measured() {
            if m.fineness == Fineness::Fine && !clean {
                continue;
            }
            let kind = if m.head.is_some() { Kind::Local } else { m.direction.kind() };
            let limit = floor(kind, self.steps, m.fineness) + m.jump;
            let p = p_value(kind, &m.estimate, limit, clean);
            let t = if m.fineness == Fineness::Coarse { "T1" } else { "T2" };
            let (family, name) = match m.head {
                Some(h) => ("head gain T1", format!("gain of head {h}, {t}")),
                None => (m.direction.family(m.fineness), format!("{}, {t}", m.direction.name())),
            };
            tests.push(Test { family, name, log_p: p.log_p, size: m.estimate.beta, limit, rejected: false });
        }
        tests
    }

    /// Estimates along all directions; those that no row carries are not among them.
    pub fn measured(&self) -> Vec<Measured> {
        let mut all = Vec::new();
        for ((direction, fineness), clusters) in &self.clusters {
            let mut pairs: BTreeMap<(usize, usize), Pair> = BTreeMap::new();
            for ((row, head, _), p) in clusters {
                let pair = pairs.entry((*row, *head)).or_default();
                pair.cluster.score += p.cluster.score;
                pair.cluster.information += p.cluster.information;
                pair.jumps.add(p.jumps);
                pair.inherited += p.inherited;
            }
            let pairs_in_all = pairs.len();
            let mut measure = |head: Option<usize>, of: Vec<&Pair>| {
                let clusters: Vec<Cluster> = of.iter().map(|p| p.cluster).collect();
                let Some(mut estimate) = test_direction(&clusters) else { return };
                // se_m = (ΣI)^-½.
                let inverse = estimate.se_m * estimate.se_m;
                // Without emulated casts the law rests on the spread of the rows alone.
                if self.shared && self.emulated {
                    let columns = self.sampled as f64 / pairs_in_all.max(1) as f64;
                    estimate.se_m *= columns.max(1.0).sqrt();
                }
                let mut jumps = Jumps::default();
                of.iter().for_each(|p| jumps.add(p.jumps));
                let reach = jumps.reach() + INHERITED * of.iter().map(|p| p.inherited).sum::<f64>();
                let jump = reach * inverse;
                all.push(Measured { direction: *direction, head, fineness: *fineness, estimate, jump });
            };
            measure(None, pairs.values().collect());
            if *direction == Direction::Gain && *fineness == Fineness::Coarse && self.columns.heads > 1 {
                for h in 0..self.columns.heads {
                    measure(
                        Some(h),
                        pairs.iter().filter(|((_, head), _)| *head == h).map(|(_, p)| p).collect(),
                    );
                }
            }
        }
        all
    }

    /// Whether anything is suspicious enough to look closer: a broken bound, or a p-value below the run's level.
    pub fn suspect(&self, log_alpha: f64, name: &dyn Fn(usize) -> Option<RowName>) -> bool {
        self.tally.beyond > 0 || self.unlikely > 0 || self.tests(name).iter().any(|t| t.log_p <= log_alpha)
    }
}

/// A row of a matrix whose rows are contiguous.
fn line(m: &Array2<f64>, i: usize) -> &[f64] {
    let n = m.ncols();
    m.as_slice().and_then(|all| all.get(i * n..(i + 1) * n)).unwrap_or(&[])
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

/// Probability that an element with noise `sigma` is rounded to the other side of its nearest tie: a normal tail, as
/// for casts of P ([`super::stats::noise`]).
fn near_tie(dtype: DType, x: f64, sigma: f64) -> f64 {
    let z = (dtype.spacing(x) / 2.0 - (x - dtype.round(x)).abs()) / sigma;
    if z < 6.0 { 0.5 * libm::exp(-0.717 * z - 0.416 * z * z) } else { 0.0 }
}

/// Words for a row.
pub fn row_name(row: usize, name: Option<RowName>) -> String {
    match name {
        Some(RowName { request: Some(r), index, split: Some(s), .. }) => {
            format!("request {r}, row {index}, split {s}")
        }
        Some(RowName { request: Some(r), index, .. }) => format!("request {r}, row {index}"),
        _ => format!("row {row}"),
    }
}

/// Directions of an attention, for some rows of the chunk.
fn special(terms: &Terms, rows: &[usize], rope: usize, tile: usize) -> Vec<(Direction, Array2<f64>)> {
    let (w, lse, starts) = match terms {
        Terms::Attention { attended, head, lse } => {
            (Weighed::new(attended, head, rows), lse, vec![attended.range.start])
        }
        Terms::Split { merged, head, lse } => {
            let starts = merged.parts.iter().map(|p| p.range.start).collect();
            (Weighed::split(merged, head, rows), lse, starts)
        }
        _ => return Vec::new(),
    };
    if *lse {
        return vec![
            (Direction::Scale, w.scale_of_lse()),
            (Direction::RopeWeight, w.rope_weight_of_lse(rope)),
        ];
    }
    // Tiles count from the first key of their split.
    let in_split = |t: usize| t - starts.iter().copied().filter(|s| *s <= t).max().unwrap_or(0);
    vec![
        (Direction::Scale, w.scale()),
        (Direction::RopeWeight, w.rope_weight(rope)),
        (Direction::FirstKey, w.tokens(|t| t == 0)),
        (Direction::TileLast, w.tokens(|t| in_split(t) % tile == tile - 1)),
    ]
}
