/*!
Where an element stands: both values, the bound and its share, and whether it is a flip, near a tie, or beyond.

By the judge's own rules ([`crate::judge::evidence`]), so that what is said of one element is what was counted of it.
*/

use super::operand::bits;
use crate::judge::evidence::Piece;
use crate::judge::{Tally, differing, within};
use mla_numeric::DType;
use mla_reference::Accumulate;
use serde::Serialize;

/// Both values.
#[derive(Clone, Debug, Serialize)]
pub struct Value {
    /// The reference in float64, before its final rounding.
    pub x: f64,
    /// x rounded to the dtype.
    pub rounded: f64,
    /// Its bits.
    pub rounded_bits: String,
    /// The engine's value.
    pub engine: f64,
    /// Its bits.
    pub engine_bits: String,
    /// Stored dtype.
    pub dtype: DType,
    /// Spacing of the dtype's values at x.
    pub ulp: f64,
    /// |engine − x| in ulps.
    pub error_ulps: f64,
    /// Distance of x from the nearest value at which rounding goes the other way, in ulps.
    pub tie_ulps: f64,
}

/// Something that a bound is made of.
#[derive(Clone, Debug, Serialize)]
pub struct Part {
    /// What.
    pub what: String,
    /// How much.
    pub value: f64,
}

impl Part {
    /// Of a name and a number.
    pub fn new(what: impl Into<String>, value: f64) -> Part {
        Part { what: what.into(), value }
    }
}

/// How far an honest engine's value before its final rounding may be from x.
#[derive(Clone, Debug, Serialize)]
pub struct Bound {
    /// Proven for the contract.
    pub proven: f64,
    /// With the probability that the statistical form leaves; never above the proven one.
    pub statistical: f64,
    /// Of a product with a declared order of sums: from its own partial sums.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<f64>,
    /// Of a row of attention with an element beyond the statistical bound: from each score's own terms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub closer: Option<f64>,
    /// Standard deviation of an honest engine's value before its final rounding.
    pub usual: f64,
    /// What it is made of, as far as that has names.
    pub made_of: Vec<Part>,
    /// |engine − x| as a share of the proven bound and half an ulp.
    pub share: f64,
}

/// What an element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// The rounded reference, bit for bit.
    Exact,
    /// Exact, and an honest engine might as well have stored a neighbour.
    ExactNearTie,
    /// Not the rounded reference, within every bound.
    Flip,
    /// Beyond the statistical bound, within the proven one.
    BeyondStatistical,
    /// No rounding explains it.
    Beyond,
}

impl Standing {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Standing::Exact => "exact: the rounded reference, bit for bit",
            Standing::ExactNearTie => {
                "exact: the rounded reference, bit for bit; so near a tie that a neighbour would be honest too"
            }
            Standing::Flip => "a flip: not the rounded reference, but within the bound",
            Standing::BeyondStatistical => "beyond the statistical bound, within the proven one: evidence",
            Standing::Beyond => "beyond what any rounding explains: evidence",
        }
    }
}

/// Of something that must be equal bit for bit.
pub fn copied(dtype: DType, o: f64, o_bits: u64, x: f64) -> (Value, Option<Bound>, Standing) {
    let mut tally = Tally::default();
    tally.copy(dtype, (0, 0, 1), &[o], &[x]);
    let standing = if tally.beyond > 0 { Standing::Beyond } else { Standing::Exact };
    (value(dtype, o, o_bits, x), None, standing)
}

fn value(dtype: DType, engine: f64, engine_bits: u64, x: f64) -> Value {
    let rounded = dtype.round(x);
    let (low, high) = dtype.cell(rounded);
    let ulp = dtype.spacing(x);
    Value {
        x,
        rounded,
        rounded_bits: bits(dtype, dtype.to_bits(x)),
        engine,
        engine_bits: bits(dtype, engine_bits),
        dtype,
        ulp,
        error_ulps: (engine - x).abs() / ulp,
        tie_ulps: (x - low).min(high - x) / ulp,
    }
}

/// Of element `(i, j)` of a piece, whose bits these are.
pub fn of(
    piece: &Piece,
    (i, j): (usize, usize),
    dtype: DType,
    o_bits: u64,
    made_of: Vec<Part>,
) -> (Value, Option<Bound>, Standing) {
    let (o, x, p) = (piece.engine[[i, j]], piece.x[[i, j]], piece.prediction);
    if p.is_copy() {
        return copied(dtype, o, o_bits, x);
    }
    let bounds = p.bounds(&[i]);
    // A contract that accumulates exactly has neither bound nor noise.
    let at = |m: &ndarray::Array2<f64>| m.get([0, j]).copied().unwrap_or(0.0);
    let (proven, likely) = (at(&bounds.proven), at(&bounds.likely));
    let mut tally = Tally::default();
    let rounded = dtype.round(x);
    let flipped = !differing(&[o], &[rounded], false).is_empty();
    if flipped {
        tally.flip(dtype, (0, 0), o, x, Some(proven));
    }
    let row = piece.x.row(i);
    let rms = (row.iter().map(|v| v * v).sum::<f64>() / row.len().max(1) as f64).sqrt();
    let running = p.running(i, j);
    // As the judge does: the running bound where the one by norms says little, a closer look before anything is evidence.
    let mut b = likely.min(proven);
    if b > dtype.spacing(rms) / 2.0 {
        b = running.map_or(b, |r| r.min(b));
    }
    let fits = |b: f64| within(dtype, o, x, b);
    let closer = if flipped && !fits(b) { p.closer(i).and_then(|row| row.get(j).copied()) } else { None };
    let honest = fits(b) || closer.is_some_and(|c| fits(c.min(proven)));
    let near = dtype.round(x - proven) != dtype.round(x + proven);
    let standing = match (flipped, tally.beyond > 0, honest) {
        (false, ..) if near => Standing::ExactNearTie,
        (false, ..) => Standing::Exact,
        (_, true, _) => Standing::Beyond,
        (_, _, false) => Standing::BeyondStatistical,
        _ => Standing::Flip,
    };
    let total = proven + dtype.spacing(x.abs() + proven) / 2.0;
    let share = tally.worst.map_or((o - x).abs() / total, |w| w.share);
    let bound = Bound {
        proven,
        statistical: likely.min(proven),
        running,
        closer,
        usual: if p.contract().accumulate == Accumulate::Exact { 0.0 } else { p.sigma(i, j) },
        made_of,
        share,
    };
    (value(dtype, o, o_bits, x), Some(bound), standing)
}
