/*!
Contracts: which roundings an engine declares to do, and where.

The judge emulates them in float64, so that nearly every output bit is predicted and what is left is
accumulation error and the final rounding. A contract is plain data, known before a run, printable and
comparable; [`Contract::exact`] is pure float64.

Sources: the groundwork on comparing kernels (tile-relative P cast, row sums, accumulators).
*/

use mla_numeric::DType;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How a product's accumulator rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accumulate {
    /// float64, as the reference.
    Exact,
    /// f32 to nearest, once for every `block` products, in chains of at most `chain` products that are
    /// then added up (0: one chain).
    Rn {
        /// Products summed exactly before a rounding.
        block: usize,
        /// Products in a chain; 0: all.
        chain: usize,
    },
    /// Tensor core: `k` products and the sum in one, cut to `bits` fractional bits, then cut to f32.
    Mma {
        /// Products in a fused sum.
        k: usize,
        /// Fractional bits below the largest exponent.
        bits: u32,
    },
}

impl Accumulate {
    /// Roundings that a sum of `len` products goes through, at most.
    pub fn roundings(self, len: usize) -> usize {
        match self {
            Accumulate::Exact => 0,
            Accumulate::Rn { block, chain } => {
                let chain = if chain == 0 { len } else { chain.min(len) };
                chain.div_ceil(block) + len.div_ceil(chain.max(1))
            }
            Accumulate::Mma { k, .. } => len.div_ceil(k),
        }
    }

    /// Largest error of one rounding, relative to the largest term or partial sum that takes part.
    ///
    /// Nearest: u. Tensor core with k products: the result is cut to f32, at most 2u of itself, and k + 1
    /// terms are each cut below 2^-bits of the largest exponent, together (k + 1) · 2^-bits.
    pub fn unit(self) -> f64 {
        match self {
            Accumulate::Exact => 0.0,
            Accumulate::Rn { .. } => mla_numeric::U,
            Accumulate::Mma { k, bits } => {
                2.0 * mla_numeric::U + (k as f64 + 1.0) * f64::powi(2.0, -(bits as i32))
            }
        }
    }

    /// γ: |error of a sum of `len` products| ≤ γ · Σ|a·b|, in any order of the terms.
    ///
    /// Every partial sum and every term is at most Σ|a·b|(1 + γ), so n roundings of `unit` each give
    /// n·unit / (1 − n·unit). The float64 reference's own share, (len + 1) · 2^-53, is added.
    pub fn gamma(self, len: usize) -> f64 {
        let n = self.roundings(len) as f64 * self.unit();
        n / (1.0 - n) + (len as f64 + 1.0) * f64::EPSILON / 2.0
    }
}

/// What the row sum of a softmax adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowSum {
    /// f32 probabilities, before their cast.
    Unrounded,
    /// Probabilities as the product with V reads them.
    Rounded,
}

/// Order in which the tiles of a split are visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum TileOrder {
    Forward,
    Reverse,
}

/// Softmax and its product with V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Softmax {
    /// Keys of a tile: P is relative to the running maximum of its tile. 0: all keys at once.
    pub tile: usize,
    /// Order of tiles.
    pub order: TileOrder,
    /// P is cast to this before P·V; None: it stays as computed.
    pub p: Option<DType>,
    /// What the row sum adds.
    pub row_sum: RowSum,
}

/// Every rounding that an engine declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contract {
    /// Stored dtype of weights of products.
    pub weights: DType,
    /// Stored dtype of norm weights.
    pub norm_weights: DType,
    /// Stored dtype of activations, the cache included.
    pub activations: DType,
    /// Stored dtype of lse, part_o and part_lse.
    pub partials: DType,
    /// Accumulator of products.
    pub accumulate: Accumulate,
    /// RMSNorm: the normalised value is rounded to this before it is multiplied by γ (None: one rounding).
    pub norm_cast: Option<DType>,
    /// cos and sin are held in this, from exact angles.
    pub rope_table: DType,
    /// Softmax.
    pub softmax: Softmax,
    /// Splits of the keys in decode (1: none); prefill is not split.
    pub splits: usize,
}

impl Contract {
    /// Pure float64.
    pub const fn exact() -> Contract {
        Contract {
            weights: DType::F64,
            norm_weights: DType::F64,
            activations: DType::F64,
            partials: DType::F64,
            accumulate: Accumulate::Exact,
            norm_cast: None,
            rope_table: DType::F64,
            softmax: Softmax { tile: 0, order: TileOrder::Forward, p: None, row_sum: RowSum::Unrounded },
            splits: 1,
        }
    }

    /// Key ranges of the splits of a row of `keys` keys: equal parts of whole tiles, empty ones at the end.
    ///
    /// Always `splits` ranges, so that every row of a batch has the same number.
    pub fn split_ranges(&self, keys: usize) -> Vec<Range<usize>> {
        let tile = self.softmax.tile.max(1);
        let per = keys.div_ceil(self.splits).next_multiple_of(tile);
        (0..self.splits).map(|s| (s * per).min(keys)..((s + 1) * per).min(keys)).collect()
    }

    /// Tiles of a key range, in the order in which the engine visits them.
    pub fn tiles(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let tile = if self.softmax.tile == 0 { range.len().max(1) } else { self.softmax.tile };
        let mut tiles: Vec<_> = range.clone().step_by(tile).map(|a| a..(a + tile).min(range.end)).collect();
        if self.softmax.order == TileOrder::Reverse {
            tiles.reverse();
        }
        tiles
    }
}

impl std::fmt::Display for Contract {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let s = &self.softmax;
        if *self == Contract::exact() {
            return f.write_str("float64 throughout");
        }
        write!(f, "operands {}, accumulate ", self.activations)?;
        match self.accumulate {
            Accumulate::Exact => write!(f, "exact")?,
            Accumulate::Rn { block, chain: 0 } => write!(f, "rn(block {block})")?,
            Accumulate::Rn { block, chain } => write!(f, "rn(block {block}, chains of {chain})")?,
            Accumulate::Mma { k, bits } => write!(f, "mma({k}, {bits})")?,
        }
        write!(f, ", tile {}", s.tile)?;
        match s.p {
            Some(p) => write!(f, ", P cast to {p}")?,
            None => write!(f, ", P not cast")?,
        }
        match s.row_sum {
            RowSum::Unrounded => write!(f, ", row sum of f32 P")?,
            RowSum::Rounded => write!(f, ", row sum of cast P")?,
        }
        write!(
            f,
            ", {} in decode",
            if self.splits == 1 { "1 split".into() } else { format!("{} splits", self.splits) }
        )?;
        write!(f, ", partials and lse {}, rope table {}", self.partials, self.rope_table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_cover_the_keys_once_in_whole_tiles() {
        let mut c = Contract::exact();
        c.softmax.tile = 64;
        for splits in 1..=9 {
            c.splits = splits;
            for keys in [1, 63, 64, 65, 257, 1025] {
                let r = c.split_ranges(keys);
                assert_eq!(r.len(), splits);
                assert_eq!(
                    r.iter().flat_map(|r| r.clone()).collect::<Vec<_>>(),
                    (0..keys).collect::<Vec<_>>()
                );
                assert!(r.iter().all(|r| r.is_empty() || r.start % 64 == 0));
            }
        }
        c.softmax.order = TileOrder::Reverse;
        assert_eq!(c.tiles(64..200), [192..200, 128..192, 64..128]);
    }

    #[test]
    fn roundings_are_counted_by_block_and_chain() {
        assert_eq!(Accumulate::Rn { block: 16, chain: 0 }.roundings(512), 33);
        assert_eq!(Accumulate::Rn { block: 1, chain: 256 }.roundings(512), 258);
        assert_eq!(Accumulate::Mma { k: 16, bits: 25 }.roundings(520), 33);
        assert_eq!(Accumulate::Exact.roundings(512), 0);
    }
}
