/*!
Seams: places where the CPU engine can be told to compute something wrong, for the fault suite.

A fault that is smaller than half a unit of the stored dtype's last place can't be planted in a tensor that is
already rounded: rounding it again takes it back. So gains and offsets act here, before the one rounding.
*/

use super::slips::{Lost, Merging, NormSlip, Paging, Part, Sight, Turning};
use crate::trace::Tensor;
use mla_reference::{Plan, Sequence, Stage};
use std::ops::Range;

/// Deliberate faults inside the engine; the default is none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seams {
    /// The merge of splits takes exp where its arguments are made for exp2.
    pub merge_base_e: bool,
    /// When the running maximum grows, o and l are not rescaled.
    pub no_rescale: bool,
    /// This key position is left out of attention.
    pub skip_key: Option<usize>,
    /// This page of every page table leads to another request's page when keys are gathered.
    pub foreign_page: Option<usize>,
    /// A stage's values are multiplied before they are rounded.
    pub gain: Option<Gain>,
    /// q or k_pe is rotated by so many positions more.
    pub rope_offset: Option<(Stage, f64)>,
    /// q or k_pe is rotated otherwise.
    pub turning: Option<(Stage, Turning)>,
    /// Rows see other keys than the causal mask allows.
    pub sight: Option<Sight>,
    /// Keys that no row sees.
    pub lost: Option<Lost>,
    /// Keys are read from other slots.
    pub paging: Option<Paging>,
    /// Parts are merged otherwise.
    pub merging: Option<Merging>,
    /// A norm is wrong.
    pub norm: Option<NormSlip>,
    /// A part of queries is left out of the scores.
    pub scores: Option<Part>,
    /// Each head reads the values (true) or keys of the head after it, in the fused form.
    pub next_head: Option<bool>,
    /// A part without a key has the lse of one key of score 0, not −∞.
    pub empty_lse: bool,
    /// At the last tile the running maximum grows, and the sums are not rescaled.
    pub no_last_rescale: bool,
    /// Values are read from this column of a cache row on, in the absorbed form.
    pub value_view: usize,
}

/// A factor on a stage's values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gain {
    /// Stage.
    pub stage: Stage,
    /// Head (the last one where there are fewer), or all (None).
    pub head: Option<usize>,
    /// Factor.
    pub factor: f64,
}

impl Gain {
    /// Whether the engine computes the stage: a copy is bits, and bits have no gain.
    pub fn has_seam(stage: Stage) -> bool {
        !matches!(stage, Stage::Hidden | Stage::Cache | Stage::K)
    }

    /// Columns that are multiplied; nothing where a head is asked for and the tensor has none.
    pub fn columns(&self, t: &Tensor) -> Option<Range<usize>> {
        let Some(h) = self.head else { return Some(0..t.cols) };
        let (heads, width) = t.heads()?;
        let h = h.min(heads - 1);
        Some(h * width..(h + 1) * width)
    }
}

/// Slots that a sequence's keys are gathered from when page `page` of its table leads to another request: the
/// first whole page (cyclically, from the next sequence on) of another request. None where the sequence has no such
/// page, or no other request has one that is filled as far.
pub fn foreign(plan: &Plan, sequence: usize, page: usize) -> Option<Vec<usize>> {
    let seq = plan.sequences.get(sequence)?;
    let size = plan.page_size;
    let at = page.checked_mul(size)?..seq.keys().min(page.checked_add(1)?.checked_mul(size)?);
    if at.is_empty() {
        return None;
    }
    let n = plan.sequences.len();
    let others = (1..n).map(|d| &plan.sequences[(sequence + d) % n]);
    let enough = |s: &&Sequence| s.request != seq.request && s.keys() >= at.len();
    let other = others.into_iter().find(enough)?;
    let mut slots = seq.slots.clone();
    // The same page where the other table has it whole, else its first.
    let from = if other.keys() >= at.end { at.start } else { 0 };
    slots[at.clone()].copy_from_slice(&other.slots[from..from + at.len()]);
    Some(slots)
}
