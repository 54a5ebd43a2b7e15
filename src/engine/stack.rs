/*!
Projections that an engine stacks: one product with weights that lie under each other, whose output is read in slots.

q_a and kv_a multiply the same rows, so serving engines join them. The slots have unequal sizes and a declared order, and
each may be stored in a type of its own; which rows of the stack a slot really holds is what an engine can get wrong, so the
judge is shown the rows at the declared slots, whatever they are.
*/

use crate::model::Stored;
use crate::written::{self, Name};
use mla_reference::{Geometry, Stage, Weight};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// How q_a and kv_a are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum QkvA {
    /// Each with a weight and a product of its own
    #[default]
    Split,
    /// One product with one weight: rows of q_a, then rows of kv_a
    Stacked,
}

/// A slot of a stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Whose rows it holds.
    pub weight: Weight,
    /// What its columns of the output are.
    pub stage: Stage,
    /// Rows of the weight, columns of the output.
    pub rows: Range<usize>,
}

/// Name of the stack of q_a and kv_a.
pub const QKV_A: &str = "qkv_a";

/// Slots of qkv_a in the declared order: q_a, then kv_a. None where the model projects queries at once.
pub fn qkv_a(g: &Geometry) -> Option<[Slot; 2]> {
    let rows = g.q_rank + g.cache();
    (g.q_rank > 0).then_some([
        Slot { weight: Weight::WQA, stage: Stage::QA, rows: 0..g.q_rank },
        Slot { weight: Weight::WKvA, stage: Stage::KvA, rows: g.q_rank..rows },
    ])
}

/// A stack as reports show it: `qkv_a = (q_a:1536 Q4_K + kv_a:576 Q6_K)`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackReport {
    /// `qkv_a`.
    #[serde(deserialize_with = "written::name")]
    pub name: Name,
    /// Its slots in the declared order.
    pub slots: Vec<SlotReport>,
}

/// A slot of a stack as reports show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotReport {
    /// The tensor that it computes.
    #[serde(deserialize_with = "written::name")]
    pub name: Name,
    /// Rows of the weight.
    pub rows: usize,
    /// The type in which the file stores it.
    pub ty: String,
}

impl StackReport {
    /// The stack of q_a and kv_a of a layer that stores its weights so.
    pub fn qkv_a(g: &Geometry, stored: &[Stored]) -> Option<StackReport> {
        let slot = |s: Slot| {
            let ty = stored.iter().find(|w| w.weight == s.weight).map_or("?", |w| &w.ty).to_string();
            SlotReport { name: s.stage.name(), rows: s.rows.len(), ty }
        };
        Some(StackReport { name: QKV_A, slots: qkv_a(g)?.map(slot).into() })
    }
}

impl fmt::Display for StackReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots: Vec<String> =
            self.slots.iter().map(|s| format!("{}:{} {}", s.name, s.rows, s.ty)).collect();
        write!(f, "{} = ({})", self.name, slots.join(" + "))
    }
}
