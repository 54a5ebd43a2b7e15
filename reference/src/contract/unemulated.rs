/*!
What contracts can declare and nothing emulates yet: data, printed and compared, listed by
[`Contract::unsupported`](super::Contract::unsupported). A judge that uses such a contract says so.
*/

use mla_numeric::DType;
use serde::{Deserialize, Serialize};

/// Block format to which activations are quantised before a product with quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Quantised {
    None,
    #[serde(rename = "q8_0")]
    Q8_0,
    #[serde(rename = "q8_1")]
    Q8_1,
    #[serde(rename = "q8_k")]
    Q8K,
}

/// What happens below the smallest normal value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum SubnormalRule {
    Kept,
    Flushed,
}

/// Where a value half way between two goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum TieRule {
    Even,
    Away,
}

/// How an engine's weights come from the file's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightDerivation {
    /// Each value rounded once.
    Copy,
    /// Several matrices stacked, then cast.
    Stacked,
    /// A product with the identity, through activations quantised to q8_1.
    Identity,
}

/// A sum of the results of several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AllReduce {
    /// One device.
    None,
    /// One after the other.
    Ring,
    /// In pairs.
    Tree,
}

/// Declared only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Unemulated {
    /// Quantisation of activations.
    pub activations: Quantised,
    /// Order in which devices' results are added.
    pub all_reduce: AllReduce,
    /// Dtype of those sums.
    pub all_reduce_dtype: DType,
    /// Subnormal values.
    pub subnormals: SubnormalRule,
    /// Ties.
    pub ties: TieRule,
    /// Weights.
    pub weights: WeightDerivation,
}

impl Default for Unemulated {
    fn default() -> Unemulated {
        Unemulated::none()
    }
}

impl Unemulated {
    /// Nothing: what the reference does.
    pub const fn none() -> Unemulated {
        Unemulated {
            activations: Quantised::None,
            all_reduce: AllReduce::None,
            all_reduce_dtype: DType::F32,
            subnormals: SubnormalRule::Kept,
            ties: TieRule::Even,
            weights: WeightDerivation::Copy,
        }
    }

    /// What differs from [`Unemulated::none`], in words.
    pub fn list(&self) -> Vec<String> {
        let mut all = Vec::new();
        let mut say = |declared: bool, text: String| {
            if declared {
                all.push(text);
            }
        };
        say(
            self.activations != Quantised::None,
            format!("activations quantised to {}: taken as they are", name(self.activations)),
        );
        say(
            self.all_reduce != AllReduce::None,
            format!("all-reduce by {} in {}: taken as one sum", name(self.all_reduce), self.all_reduce_dtype),
        );
        say(self.subnormals != SubnormalRule::Kept, "subnormals flushed: kept here".into());
        say(self.ties != TieRule::Even, "ties away from zero: to even here".into());
        say(
            self.weights != WeightDerivation::Copy,
            format!("weights derived by {}: taken as rounded once", name(self.weights)),
        );
        all
    }
}

/// The lower-case name of a variant.
fn name(variant: impl std::fmt::Debug) -> String {
    format!("{variant:?}").to_lowercase()
}
