/*!
Contracts: which roundings an engine declares to do, and where.

The judge emulates them in float64, so that nearly every output bit is predicted and what is left is
accumulation error and the final rounding. A contract is plain data, known before a run, printable and
comparable; [`Contract::exact`] is pure float64. What is declared but not emulated is listed by
[`Contract::unsupported`], never passed over.

Sources: the groundwork on comparing kernels (tile-relative P cast, row sums, accumulators), outputs of real
kernels.
*/

mod accumulate;
mod describe;
mod keys;
mod unemulated;

pub use accumulate::{Accumulate, UnknownAccumulate};
pub use describe::Difference;
pub use keys::{Splits, TileOrder};
pub use unemulated::{AllReduce, Quantised, SubnormalRule, TieRule, Unemulated, WeightDerivation};

use crate::operands::Operands;
use mla_numeric::DType;
use serde::{Deserialize, Serialize};
use std::f64::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// What the row sum of a softmax adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowSum {
    /// f32 probabilities, before their cast.
    Unrounded,
    /// Probabilities as the product with V reads them.
    Rounded,
}

/// The factor that a kernel multiplies scores with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScoreFactor {
    /// The scale as it is given.
    Exact,
    /// f32(scale · log₂e), for exponentials of base 2.
    Log2e,
}

/// How exponentials are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exponential {
    /// Some way with a relative error of at most 2⁻²²: ex2.approx, exp2f, expf.
    Accurate,
    /// A polynomial whose error is not declared.
    Polynomial,
}

/// Base of the logarithm in which an lse is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LseBase {
    /// Natural.
    E,
    /// Two.
    Two,
}

impl LseBase {
    /// What a written lse is multiplied with to be a natural logarithm. Stages are natural logarithms.
    pub const fn to_natural(self) -> f64 {
        match self {
            LseBase::E => 1.0,
            LseBase::Two => LN_2,
        }
    }
}

/// Softmax and its product with V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Softmax {
    /// Keys of a tile: P is relative to the running maximum of its tile. 0: all keys at once.
    pub tile: usize,
    /// Order of tiles.
    #[serde(default = "default::order")]
    pub order: TileOrder,
    /// Two tiles at a time: the upper half of the columns of V takes P of both relative to the maximum of the
    /// pair, the lower half each relative to its own.
    #[serde(default)]
    pub pairs: bool,
    /// P is cast to this before P·V; None: it stays as computed.
    #[serde(with = "none")]
    pub p: Option<DType>,
    /// P is divided by the row sum before its cast, not the result after P·V. Tiles and splits play no part.
    #[serde(default)]
    pub normalised: bool,
    /// False: tiles and place of P's cast are unknown. Then P is not cast here, and the cast is noise.
    #[serde(default = "default::yes")]
    pub emulate: bool,
    /// What the row sum adds.
    pub row_sum: RowSum,
    /// q·k is rounded to the dtype of activations.
    #[serde(default)]
    pub cast_raw: bool,
    /// scale·q·k is rounded to the dtype of activations.
    #[serde(default)]
    pub cast_scaled: bool,
    /// The factor on q·k.
    #[serde(default = "default::factor")]
    pub factor: ScoreFactor,
    /// The exponential.
    #[serde(default = "default::exponential")]
    pub exponential: Exponential,
}

impl Softmax {
    /// float64, all keys at once.
    pub const fn exact() -> Softmax {
        Softmax {
            tile: 0,
            order: TileOrder::Forward,
            pairs: false,
            p: None,
            normalised: false,
            emulate: true,
            row_sum: RowSum::Unrounded,
            cast_raw: false,
            cast_scaled: false,
            factor: ScoreFactor::Exact,
            exponential: Exponential::Accurate,
        }
    }

    /// The cast of P that is emulated.
    pub fn cast(&self) -> Option<DType> {
        self.p.filter(|_| self.emulate)
    }

    /// The cast of P that is not emulated but may have happened anywhere.
    pub fn unplaced(&self) -> Option<DType> {
        self.p.filter(|_| !self.emulate)
    }

    /// Whether scores are rounded.
    pub fn casts_scores(&self) -> bool {
        self.cast_raw || self.cast_scaled
    }
}

/// From which angles cos and sin are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeAngle {
    /// position · frequency.
    Exact,
    /// f32(position · f32(frequency)).
    F32,
}

/// Every rounding that an engine declares.
///
/// In files, `activations` and `accumulate` must be there, and of `[softmax]`, where there is one, `tile`, `p` and
/// `row_sum`. All else has the defaults of [`Contract::usual`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct Contract {
    /// Stored dtype of weights of products.
    pub weights: DType,
    /// Stored dtype of norm weights.
    pub norm_weights: DType,
    /// Stored dtype of activations, the cache included.
    pub activations: DType,
    /// Stored dtype of the partial outputs of splits, part_o.
    pub partials: DType,
    /// Stored dtype of lse and part_lse.
    pub lse: DType,
    /// Base of the lse that the engine writes. The reference computes natural logarithms; whoever compares converts
    /// ([`LseBase::to_natural`]).
    pub lse_base: LseBase,
    /// Accumulator of products.
    pub accumulate: Accumulate,
    /// What the left side of products is rounded to before.
    pub operands: Operands,
    /// RMSNorm: the normalised value is rounded to this before it is multiplied by γ (None: one rounding).
    pub norm_cast: Option<DType>,
    /// cos and sin are held in this.
    pub rope_table: DType,
    /// Angles of the table.
    pub rope_angle: RopeAngle,
    /// Products of a rotation are rounded to this before they are added (None: one rounding).
    pub rope_products: Option<DType>,
    /// Softmax.
    pub softmax: Softmax,
    /// That of the absorbed form, where it is another; see [`Contract::of_form`].
    pub absorbed: Option<Softmax>,
    /// Splits of the keys in decode (1 part: none).
    pub splits: Splits,
    /// Rows of a prefill are split by the same rule, counted over all keys of their sequence.
    pub split_prefill: bool,
    /// n: partials j, j + n, j + 2n, … are merged first, and that state is rounded to `partials` once more.
    pub merge_groups: Option<usize>,
    /// `out` is the sum of so many ranks' parts, each of its share of the heads and rounded to `activations`; added in no
    /// known order, each sum rounded.
    pub ranks: usize,
    /// Declared, printed, compared, not emulated.
    pub unemulated: Unemulated,
}

/// The form in files: one level of keys and two tables.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    activations: DType,
    accumulate: Accumulate,
    weights: Option<DType>,
    norm_weights: Option<DType>,
    #[serde(default = "default::operands")]
    operands: Operands,
    #[serde(default = "default::f32")]
    partials: DType,
    #[serde(default = "default::f32")]
    lse: DType,
    #[serde(default = "default::base")]
    lse_base: LseBase,
    #[serde(default, with = "none")]
    norm_cast: Option<DType>,
    #[serde(default = "default::f32")]
    rope_table: DType,
    #[serde(default = "default::angle")]
    rope_angle: RopeAngle,
    #[serde(default, with = "none")]
    rope_products: Option<DType>,
    #[serde(default = "default::splits")]
    splits: Splits,
    #[serde(default)]
    split_prefill: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    merge_groups: Option<usize>,
    #[serde(default = "default::one", skip_serializing_if = "default::is_one")]
    ranks: usize,
    #[serde(default = "Softmax::exact")]
    softmax: Softmax,
    #[serde(skip_serializing_if = "Option::is_none")]
    absorbed: Option<Softmax>,
    #[serde(default)]
    unemulated: Unemulated,
}

impl From<Written> for Contract {
    fn from(w: Written) -> Contract {
        Contract {
            weights: w.weights.unwrap_or(w.activations),
            norm_weights: w.norm_weights.unwrap_or(w.activations),
            activations: w.activations,
            partials: w.partials,
            lse: w.lse,
            lse_base: w.lse_base,
            accumulate: w.accumulate,
            operands: w.operands,
            norm_cast: w.norm_cast,
            rope_table: w.rope_table,
            rope_angle: w.rope_angle,
            rope_products: w.rope_products,
            softmax: w.softmax,
            absorbed: w.absorbed.filter(|s| *s != w.softmax),
            splits: w.splits,
            split_prefill: w.split_prefill,
            merge_groups: w.merge_groups.filter(|n| *n > 0),
            ranks: w.ranks.max(1),
            unemulated: w.unemulated,
        }
    }
}

impl From<Contract> for Written {
    fn from(c: Contract) -> Written {
        Written {
            activations: c.activations,
            accumulate: c.accumulate,
            operands: c.operands,
            weights: Some(c.weights),
            norm_weights: Some(c.norm_weights),
            partials: c.partials,
            lse: c.lse,
            lse_base: c.lse_base,
            norm_cast: c.norm_cast,
            rope_table: c.rope_table,
            rope_angle: c.rope_angle,
            rope_products: c.rope_products,
            splits: c.splits,
            split_prefill: c.split_prefill,
            merge_groups: c.merge_groups,
            ranks: c.ranks,
            softmax: c.softmax,
            absorbed: c.absorbed,
            unemulated: c.unemulated,
        }
    }
}

impl Contract {
    /// Pure float64.
    pub const fn exact() -> Contract {
        Contract {
            weights: DType::F64,
            norm_weights: DType::F64,
            activations: DType::F64,
            partials: DType::F64,
            lse: DType::F64,
            lse_base: LseBase::E,
            accumulate: Accumulate::Exact,
            operands: Operands::Stored,
            norm_cast: None,
            rope_table: DType::F64,
            rope_angle: RopeAngle::Exact,
            rope_products: None,
            softmax: Softmax::exact(),
            absorbed: None,
            splits: Splits::Parts(1),
            split_prefill: false,
            merge_groups: None,
            ranks: 1,
            unemulated: Unemulated::none(),
        }
    }

    /// What most kernels do: everything stored in `dtype`, f32 inside, one rounding a stage, no splits, P as
    /// computed; the rope table in f32 of exact angles, partials and lse in f32, natural logarithms.
    pub const fn usual(dtype: DType, accumulate: Accumulate) -> Contract {
        Contract {
            weights: dtype,
            norm_weights: dtype,
            activations: dtype,
            partials: DType::F32,
            lse: DType::F32,
            rope_table: DType::F32,
            accumulate,
            ..Contract::exact()
        }
    }

    /// The same contract with one dtype in place of another wherever it stands, as kernels are built for several.
    pub fn retyped(self, from: DType, to: DType) -> Contract {
        let of = |d: DType| if d == from { to } else { d };
        Contract {
            weights: of(self.weights),
            norm_weights: of(self.norm_weights),
            activations: of(self.activations),
            partials: of(self.partials),
            lse: of(self.lse),
            norm_cast: self.norm_cast.map(of),
            rope_table: of(self.rope_table),
            rope_products: self.rope_products.map(of),
            ..self.with_softmax(|s| Softmax { p: s.p.map(of), ..s })
        }
    }

    /// The contract of a form's tensors: this one, with the softmax that the form has.
    pub fn of_form(&self, form: Option<crate::Form>) -> Contract {
        let own = self.absorbed.filter(|_| form == Some(crate::Form::Absorbed));
        Contract { softmax: own.unwrap_or(self.softmax), absorbed: None, ..*self }
    }

    /// The same contract, with every softmax altered.
    pub fn with_softmax(&self, alter: impl Fn(Softmax) -> Softmax) -> Contract {
        Contract { softmax: alter(self.softmax), absorbed: self.absorbed.map(alter), ..*self }
    }

    /// Key ranges of the splits of a row of `keys` keys, in order; see [`Splits::ranges`].
    pub fn split_ranges(&self, keys: usize) -> Vec<Range<usize>> {
        self.splits.ranges(keys, self.softmax.tile)
    }

    /// Tiles of a key range, in the order in which the engine visits them.
    pub fn tiles(&self, range: Range<usize>) -> Vec<Range<usize>> {
        keys::tiles(range, self.softmax.tile, self.softmax.order)
    }

    /// The factor on q·k that the kernel holds, for scores in natural units.
    pub fn score_factor(&self, scale: f64) -> f64 {
        match self.softmax.factor {
            ScoreFactor::Exact => scale,
            ScoreFactor::Log2e => DType::F32.round(scale * LOG2_E) / LOG2_E,
        }
    }

    /// The cast of partial outputs that the merge of internal splits reads. float32 partials are part of the
    /// arithmetic: their rounding is bounded, not emulated.
    pub fn part_cast(&self) -> Option<DType> {
        (self.partials.precision() < DType::F32.precision()).then_some(self.partials)
    }

    /// Dtype in which a stage is stored.
    pub fn stored(&self, stage: crate::Stage) -> DType {
        match stage {
            crate::Stage::PartO => self.partials,
            crate::Stage::Lse | crate::Stage::PartLse => self.lse,
            _ => self.activations,
        }
    }

    /// What is declared but not emulated: a judge must say so wherever it uses this contract.
    pub fn unsupported(&self) -> Vec<String> {
        let mut all = self.unemulated.list();
        if self.softmax.exponential == Exponential::Polynomial {
            all.push("exponentials by a polynomial: taken as accurate to 2^-22".into());
        }
        if self.softmax.pairs && self.softmax.normalised {
            all.push("pairs of tiles: P is normalised before its cast, so tiles play no part".into());
        }
        if self.merge_groups.is_some() && self.part_cast().is_none() {
            all.push(format!("merge groups: with {} partials nothing is rounded between", self.partials));
        }
        all
    }
}

/// Values that need not be written.
mod default {
    use super::*;

    pub fn yes() -> bool {
        true
    }
    pub fn f32() -> DType {
        DType::F32
    }
    pub fn operands() -> Operands {
        Operands::Stored
    }
    pub fn base() -> LseBase {
        LseBase::E
    }
    pub fn angle() -> RopeAngle {
        RopeAngle::Exact
    }
    pub fn splits() -> Splits {
        Splits::Parts(1)
    }
    pub fn one() -> usize {
        1
    }
    pub fn is_one(n: &usize) -> bool {
        *n == 1
    }
    pub fn order() -> TileOrder {
        TileOrder::Forward
    }
    pub fn factor() -> ScoreFactor {
        ScoreFactor::Exact
    }
    pub fn exponential() -> Exponential {
        Exponential::Accurate
    }
}

/// A dtype or the word "none": formats without a null can say it.
mod none {
    use mla_numeric::DType;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(value: &Option<DType>, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(value.map_or("none", DType::name))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<DType>, D::Error> {
        let text = String::deserialize(d)?;
        if text == "none" {
            return Ok(None);
        }
        text.parse().map(Some).map_err(|e| D::Error::custom(format!("{e}; or none")))
    }
}
