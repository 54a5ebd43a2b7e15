/*!
Directions: sums of scores of the sampled pairs, and the estimates that are made of them.
*/

use super::{Evidence, Piece};
use crate::judge::sample::Sample;
use crate::judge::stats::direction::{Cluster, Estimate, Kind, Weighed, cluster, floor, test_direction};
use crate::judge::stats::noise::{Jump, jumps};
use crate::judge::stats::score::{Cells, Fineness, scale_of};
use mla_reference::Terms;
use ndarray::{Array2, ArrayView2};
use std::collections::BTreeMap;

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
    /// Family of its tests, for calibration.
    pub const fn family(self, fineness: Fineness) -> &'static str {
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

/// Sums of one pair (row, head) along a direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pair {
    cluster: Cluster,
    jumps: Jumps,
    /// Σ of the score's standard deviations by inputs that were not captured, as if all moved together.
    inherited: f64,
    /// Σ of the score's change, information · |d·x|, where all of the output is off by its own size.
    whole: f64,
}

/// By row, head and first column.
pub type Pairs = BTreeMap<(usize, usize, usize), Pair>;
/// Standard deviations of what inputs that were not captured add, that a floor holds: flips of theirs are shared by rows
/// and heads, so that the spread of the rows does not show all of it. A flip of few is no normal law: 8, not 5.
const INHERITED: f64 = 8.0;

/// What casts of P that may go either way can do to a score: rare, and large where few keys matter. A normal law knows
/// nothing of them, so the floor of a test holds what they may reach.
#[derive(Clone, Copy, Debug, Default)]
pub struct Jumps {
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

impl Evidence {
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
        // A truncating accumulator's drift of the scores, seen along their rope part alone, has no bound: what is nothing
        // in 16 bits shows in float32.
        let mut special = special(piece.terms, rows, (!Self::wide(self.dtype)).then_some(rope), tile);
        let unit = piece.prediction.unit();
        if unit != 1.0 {
            special.iter_mut().for_each(|(_, d)| d.mapv_inplace(|v| v * unit));
        }
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
            let take = |m: ArrayView2<f64>| chosen.iter().map(|j| m[[i, *j]]).collect::<Vec<f64>>();
            let (o, x) = (take(piece.engine.view()), take(piece.x));
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
            let cells: Vec<Cells> = x.iter().map(|x| Cells::around(self.dtype, *x)).collect();
            for fineness in Fineness::ALL {
                let s: Vec<f64> = sigma.iter().zip(&ulp).map(|(a, b)| scale_of(*a, *b, fineness)).collect();
                let both = |j: usize| cells[j].both(self.dtype, o[j], x[j], s[j]);
                let (g, info): (Vec<f64>, Vec<f64>) = (0..x.len()).map(both).unzip();
                let mut add = |direction, d: &[f64]| {
                    let along = inherited.iter().zip(&info).zip(&s).zip(d);
                    let shift = along.map(|(((m, i), s), d)| (i * m).min(1.0 / s) * d.abs()).sum();
                    let whole = info.iter().zip(&x).zip(d).map(|((i, x), d)| i * (x * d).abs()).sum();
                    let mut pair = Pair {
                        cluster: cluster(&g, &info, d),
                        jumps: Jumps::default(),
                        inherited: shift,
                        whole,
                    };
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
                for (direction, d) in &special {
                    add(*direction, &chosen.iter().map(|j| d[[k, j - cols.start]]).collect::<Vec<_>>());
                }
            }
        }
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
                pair.whole += p.whole;
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
                let mut reach = jumps.reach() + INHERITED * of.iter().map(|p| p.inherited).sum::<f64>();
                // A floor is a share of the output. eps moves a norm's output by far less than by its own share, so that
                // what roundings do to the output looks like a large change of eps.
                if *direction == Direction::Eps {
                    let share = floor(Kind::Local, self.steps, *fineness);
                    reach += share * of.iter().map(|p| p.whole).sum::<f64>();
                }
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
}

/// Directions of an attention, for some rows of the chunk; `rope`: width of the rope part, where it is one of them.
fn special(terms: &Terms, rows: &[usize], rope: Option<usize>, tile: usize) -> Vec<(Direction, Array2<f64>)> {
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
    let rope = |of: &dyn Fn(usize) -> Array2<f64>| rope.map(|width| (Direction::RopeWeight, of(width)));
    if *lse {
        let scale = (Direction::Scale, w.scale_of_lse());
        return std::iter::once(scale).chain(rope(&|width| w.rope_weight_of_lse(width))).collect();
    }
    // Tiles count from the first key of their split.
    let in_split = |t: usize| t - starts.iter().copied().filter(|s| *s <= t).max().unwrap_or(0);
    let all = [
        (Direction::Scale, w.scale()),
        (Direction::FirstKey, w.tokens(|t| t == 0)),
        (Direction::TileLast, w.tokens(|t| in_split(t) % tile == tile - 1)),
    ];
    all.into_iter().chain(rope(&|width| w.rope_weight(width))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    #[test]
    fn jumps_reach_as_far_as_rare_events_add_up() {
        let of = |often: f64, largest: f64| Jumps { often, squares: often * largest * largest, largest };
        // Less often than 1e-11: never.
        assert_eq!(of(9e-12, 1.0).reach(), 0.0);
        // A hundredth: four or more with (e/400)^4 = 2e-9, five or more with (e/500)^5 = 5e-12.
        assert_eq!(of(0.01, 0.5).reach(), 2.5);
        // A thousand of them: Bernstein, l = ln 2 + 25.33.
        let l = 26.021_583_203_494f64;
        assert_relative_eq!(
            of(1000.0, 1.0).reach(),
            l / 3.0 + (l * l / 9.0 + 2000.0 * l).sqrt(),
            max_relative = 1e-12
        );
    }
}
