/*!
How the accumulator of a product rounds.

As text, in files and reports: `exact`, `rn(16)` (to nearest, once for every 16 products), `rn(1, 256)` (in chains
of 256 that are added up), `rz(16)` (truncated), `mma(16, 25)` (tensor core, bit for bit), `unknown`.
*/

use mla_numeric::U;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// How a product's accumulator rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Accumulate {
    /// float64, as the reference.
    Exact,
    /// f32 to nearest, once for every `block` products in the order of k, in chains of at most `chain`
    /// consecutive products that are then added up in order (0: one chain).
    Rn {
        /// Products summed exactly before a rounding.
        block: usize,
        /// Products in a chain; 0: all.
        chain: usize,
    },
    /// f32 truncated, once for every `block` products, whose sum is taken as exact.
    Rz {
        /// Products summed exactly before a rounding.
        block: usize,
    },
    /// Tensor core, blocks in the order of k: `k` products and the sum in one, cut to `bits` fractional bits, then cut to f32.
    Mma {
        /// Products in a fused sum.
        k: usize,
        /// Fractional bits below the largest exponent.
        bits: u32,
    },
    /// f32 in some way. Bounded as the worst of the others: truncated after every product, which covers
    /// tensor cores too (17·2⁻²⁵ + 2u = 10.5u for 16 products, here 32u).
    Unknown,
}

impl Accumulate {
    /// Roundings that a sum of `len` products goes through, at most.
    pub fn roundings(self, len: usize) -> usize {
        match self {
            Accumulate::Exact => 0,
            Accumulate::Rn { block, chain } => {
                let chain = if chain == 0 { len } else { chain.min(len) };
                chain.div_ceil(block.max(1)) + len.div_ceil(chain.max(1))
            }
            Accumulate::Rz { block } => len.div_ceil(block.max(1)),
            Accumulate::Mma { k, .. } => len.div_ceil(k.max(1)),
            Accumulate::Unknown => len,
        }
    }

    /// Roundings that count for noise, n of the groundwork's section 4.2: as above; where nothing is known
    /// those of a truncating tensor core, which err more than a loop of `len` roundings to nearest.
    pub fn steps(self, len: usize) -> usize {
        match self {
            Accumulate::Unknown => len.div_ceil(16),
            other => other.roundings(len),
        }
    }

    /// Whether errors may all point to zero and so grow with the number of roundings, not with its root.
    pub fn drifts(self) -> bool {
        matches!(self, Accumulate::Rz { .. } | Accumulate::Mma { .. } | Accumulate::Unknown)
    }

    /// Largest error of one rounding, relative to the largest term or partial sum that takes part.
    ///
    /// Nearest: u; truncated: 2u. Tensor core with k products: the result is cut to f32, at most 2u of itself,
    /// and k + 1 terms are each cut below 2^-bits of the largest exponent, together (k + 1) · 2^-bits.
    pub fn unit(self) -> f64 {
        match self {
            Accumulate::Exact => 0.0,
            Accumulate::Rn { .. } => U,
            Accumulate::Rz { .. } | Accumulate::Unknown => 2.0 * U,
            Accumulate::Mma { k, bits } => 2.0 * U + (k as f64 + 1.0) * f64::powi(2.0, -(bits as i32)),
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

impl std::fmt::Display for Accumulate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Accumulate::Exact => f.write_str("exact"),
            Accumulate::Rn { block, chain: 0 } => write!(f, "rn({block})"),
            Accumulate::Rn { block, chain } => write!(f, "rn({block}, {chain})"),
            Accumulate::Rz { block } => write!(f, "rz({block})"),
            Accumulate::Mma { k, bits } => write!(f, "mma({k}, {bits})"),
            Accumulate::Unknown => f.write_str("unknown"),
        }
    }
}

impl From<Accumulate> for String {
    fn from(a: Accumulate) -> String {
        a.to_string()
    }
}

/// A text that is no accumulator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownAccumulate(String);

impl std::fmt::Display for UnknownAccumulate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:?} is no accumulator; write exact, rn(BLOCK), rn(BLOCK, CHAIN), rz(BLOCK), mma(PRODUCTS, BITS) \
             with numbers of 1 and more, or unknown",
            self.0
        )
    }
}

impl std::error::Error for UnknownAccumulate {}

impl FromStr for Accumulate {
    type Err = UnknownAccumulate;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || UnknownAccumulate(text.to_owned());
        let (name, numbers) = match text.trim().split_once('(') {
            None => (text.trim(), Vec::new()),
            Some((name, rest)) => {
                let inner = rest.strip_suffix(')').ok_or_else(refuse)?;
                let number = |n: &str| n.trim().parse::<usize>().ok().filter(|n| (1..1 << 20).contains(n));
                (name, inner.split(',').map(number).collect::<Option<Vec<_>>>().ok_or_else(refuse)?)
            }
        };
        match (name, numbers.as_slice()) {
            ("exact", []) => Ok(Accumulate::Exact),
            ("unknown", []) => Ok(Accumulate::Unknown),
            ("rn", &[block]) => Ok(Accumulate::Rn { block, chain: 0 }),
            ("rn", &[block, chain]) => Ok(Accumulate::Rn { block, chain }),
            ("rz", &[block]) => Ok(Accumulate::Rz { block }),
            ("mma", &[k, bits]) if bits <= 52 => Ok(Accumulate::Mma { k, bits: bits as u32 }),
            _ => Err(refuse()),
        }
    }
}

impl TryFrom<String> for Accumulate {
    type Error = UnknownAccumulate;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roundings_are_counted_by_block_and_chain() {
        assert_eq!(Accumulate::Rn { block: 16, chain: 0 }.roundings(512), 33);
        assert_eq!(Accumulate::Rn { block: 1, chain: 256 }.roundings(512), 258);
        assert_eq!(Accumulate::Mma { k: 16, bits: 25 }.roundings(520), 33);
        assert_eq!(Accumulate::Exact.roundings(512), 0);
        assert_eq!((Accumulate::Unknown.roundings(520), Accumulate::Unknown.steps(520)), (520, 33));
    }

    /// Whatever the accumulator is, "unknown" is no narrower.
    #[test]
    fn unknown_covers_the_others() {
        for a in [
            Accumulate::Rn { block: 1, chain: 0 },
            Accumulate::Rz { block: 1 },
            Accumulate::Mma { k: 16, bits: 25 },
            Accumulate::Mma { k: 8, bits: 25 },
        ] {
            for len in [16, 64, 576, 7168] {
                // A sum of len terms in one chain has len − 1 additions; ours counts the first too.
                assert!(a.gamma(len) <= Accumulate::Unknown.gamma(len) * (1.0 + 1e-12), "{a} {len}");
            }
        }
    }

    #[test]
    fn text_is_read_back() {
        for text in ["exact", "unknown", "rn(16)", "rn(1, 256)", "rz(16)", "mma(16, 25)"] {
            assert_eq!(text.parse::<Accumulate>().unwrap().to_string(), text);
        }
        for text in
            ["", "rn", "rn()", "rn(0)", "rn(16", "mma(16)", "mma(16, 99)", "mma(1,2,3)", "rz(-1)", "fp16"]
        {
            let e = text.parse::<Accumulate>().unwrap_err().to_string();
            assert!(e.contains(text) && e.contains("mma(PRODUCTS, BITS)"), "{e}");
        }
    }
}
