/*!
Contracts in words: one line for a screen, and a table of fields for comparing two of them.
*/

use super::{Contract, RowSum, TileOrder};
use crate::Accumulate;
use std::fmt::{Debug, Display};

/// A field in which two contracts differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Its name, as in files.
    pub field: &'static str,
    /// The value in the first.
    pub left: String,
    /// The value in the second.
    pub right: String,
}

impl Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} against {}", self.field, self.left, self.right)
    }
}

impl Contract {
    /// Every field with its value, in words.
    pub fn fields(&self) -> Vec<(&'static str, String)> {
        let or_none = |d: Option<mla_numeric::DType>| d.map_or("none".into(), |d| d.to_string());
        let word = |v: &dyn Debug| format!("{v:?}").to_lowercase();
        let (s, u) = (&self.softmax, &self.unemulated);
        Vec::from([
            ("activations", self.activations.to_string()),
            ("weights", self.weights.to_string()),
            ("norm_weights", self.norm_weights.to_string()),
            ("accumulate", self.accumulate.to_string()),
            ("operands", self.operands.to_string()),
            ("partials", self.partials.to_string()),
            ("lse", self.lse.to_string()),
            ("lse_base", word(&self.lse_base)),
            ("norm_cast", or_none(self.norm_cast)),
            ("rope_table", self.rope_table.to_string()),
            ("rope_angle", word(&self.rope_angle)),
            ("rope_products", or_none(self.rope_products)),
            ("splits", self.splits.to_string()),
            ("split_prefill", self.split_prefill.to_string()),
            ("merge_groups", self.merge_groups.map_or("none".into(), |n| n.to_string())),
            ("ranks", self.ranks.to_string()),
            ("softmax.tile", s.tile.to_string()),
            ("softmax.order", word(&s.order)),
            ("softmax.pairs", s.pairs.to_string()),
            ("softmax.p", or_none(s.p)),
            ("softmax.normalised", s.normalised.to_string()),
            ("softmax.emulate", s.emulate.to_string()),
            ("softmax.row_sum", word(&s.row_sum)),
            ("softmax.cast_raw", s.cast_raw.to_string()),
            ("softmax.cast_scaled", s.cast_scaled.to_string()),
            ("softmax.factor", word(&s.factor)),
            ("softmax.exponential", word(&s.exponential)),
            ("absorbed", self.absorbed.map_or("as softmax".into(), |s| word(&s))),
            ("unemulated.activations", word(&u.activations)),
            ("unemulated.all_reduce", word(&u.all_reduce)),
            ("unemulated.all_reduce_dtype", u.all_reduce_dtype.to_string()),
            ("unemulated.subnormals", word(&u.subnormals)),
            ("unemulated.ties", word(&u.ties)),
            ("unemulated.weights", word(&u.weights)),
        ])
    }

    /// The fields in which this contract differs from another; none exactly where they are equal.
    pub fn differences(&self, other: &Contract) -> Vec<Difference> {
        let pairs = self.fields().into_iter().zip(other.fields());
        pairs
            .filter(|((_, a), (_, b))| a != b)
            .map(|((field, left), (_, right))| Difference { field, left, right })
            .collect()
    }
}

impl Display for Contract {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let s = &self.softmax;
        if *self == Contract::exact() {
            return f.write_str("float64 throughout");
        }
        write!(f, "operands {}, accumulate ", self.activations)?;
        match self.accumulate {
            Accumulate::Rn { block, chain: 0 } => write!(f, "rn(block {block})")?,
            Accumulate::Rn { block, chain } => write!(f, "rn(block {block}, chains of {chain})")?,
            other => write!(f, "{other}")?,
        }
        if self.operands != crate::Operands::Stored {
            write!(f, ", left sides of products in {}", self.operands)?;
        }
        if s.casts_scores() {
            let which = match (s.cast_raw, s.cast_scaled) {
                (true, true) => "q·k and scores",
                (true, false) => "q·k",
                _ => "scores",
            };
            write!(f, ", {which} cast to {}", self.activations)?;
        }
        let order = if s.order == TileOrder::Reverse { ", last tile first" } else { "" };
        match (s.tile, s.emulate && !s.normalised) {
            (_, false) => {}
            (0, true) => write!(f, ", no tiles")?,
            (tile, true) if s.pairs => write!(f, ", tile {tile} in pairs{order}")?,
            (tile, true) => write!(f, ", tile {tile}{order}")?,
        }
        match self.absorbed {
            Some(a) if a == (super::Softmax { tile: a.tile, ..*s }) => write!(f, " (absorbed {})", a.tile)?,
            Some(a) => write!(f, " (absorbed: {})", format!("{a:?}").to_lowercase())?,
            None => {}
        }
        match (s.p, s.emulate, s.normalised) {
            (None, ..) => write!(f, ", P not cast")?,
            (Some(d), false, _) => write!(f, ", P cast to {d} at an unknown place")?,
            (Some(d), true, true) => write!(f, ", P normalised and cast to {d}")?,
            (Some(d), true, false) => write!(f, ", P cast to {d}")?,
        }
        match s.row_sum {
            RowSum::Unrounded => write!(f, ", row sum of f32 P")?,
            RowSum::Rounded => write!(f, ", row sum of cast P")?,
        }
        write!(
            f,
            ", {} in {}",
            self.splits,
            if self.split_prefill { "decode and prefill" } else { "decode" }
        )?;
        if self.partials == self.lse {
            write!(f, ", partials and lse {}", self.lse)?;
        } else {
            write!(f, ", partials {}, lse {}", self.partials, self.lse)?;
        }
        if self.lse_base == super::LseBase::Two {
            write!(f, " of base 2")?;
        }
        if let Some(n) = self.merge_groups {
            write!(f, ", merged {n} apart first")?;
        }
        if self.ranks > 1 {
            write!(f, ", out summed over {} ranks", self.ranks)?;
        }
        write!(f, ", rope table {}", self.rope_table)?;
        if self.rope_angle == super::RopeAngle::F32 {
            write!(f, " of f32 angles")?;
        }
        if let Some(d) = self.rope_products {
            write!(f, ", its products cast to {d}")?;
        }
        if let Some(d) = self.norm_cast {
            write!(f, ", norms cast to {d} before their weight")?;
        }
        self.unsupported().iter().try_for_each(|u| write!(f, "; not emulated: {u}"))
    }
}
