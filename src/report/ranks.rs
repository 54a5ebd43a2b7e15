/*! The ranks of a run under tensor parallelism: norms side by side, as people print them while debugging. */

use super::LayerReport;
use super::finding::short;
use super::terminal::wrapped;
use crate::written::{self, Name};
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// Tensors that the text shows, the first ones first where room is short; all of them are in the JSON.
const SHOWN: [&str; 8] = [
    "q",
    "kv_c_normed",
    "fused/attn_out",
    "absorbed/attn_out",
    "fused/out",
    "absorbed/out",
    "fused/k",
    "fused/v",
];
/// Ranks that the text shows.
const MOST: usize = 16;

/// One rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Its number.
    pub rank: usize,
    /// First and last of its heads.
    pub heads: (usize, usize),
    /// L2 norm of each tensor as the rank has it; `out` is its part of the sum.
    pub norms: Vec<RankNorm>,
}

/// The norm of a rank's tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankNorm {
    /// `form/name`.
    #[serde(deserialize_with = "written::name")]
    pub tensor: Name,
    /// L2 norm of the values that are finite.
    pub norm: f64,
}

/// All ranks of a layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RanksReport {
    /// How many there are.
    pub of: usize,
    /// How their parts of `out` were summed.
    pub sum: String,
    /// Rank by rank.
    pub ranks: Vec<RankReport>,
    /// What should be the same on all of them and is not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub differ: Vec<String>,
}

/// How the layer was cut, in a line.
pub(super) fn line(out: &mut String, l: &LayerReport, width: usize) {
    let Some(r) = &l.ranks else { return };
    let heads = r.ranks.first().map_or(0, |r| r.heads.1 + 1 - r.heads.0);
    let alike = match r.differ.as_slice() {
        [] => "what all ranks have is the same on each, bit for bit".to_string(),
        some => some.join("; "),
    };
    let text = format!("{}, {heads} heads each, one after the other; out summed in {}; {alike}", r.of, r.sum);
    wrapped(out, "ranks     ", &text, width);
}

/// Norms of the ranks side by side.
pub(super) fn norms(out: &mut String, l: &LayerReport, width: usize) {
    let Some(r) = &l.ranks else { return };
    let norm = |rank: &RankReport, name: &str| rank.norms.iter().find(|n| n.tensor == name).map(|n| n.norm);
    let there = SHOWN.iter().filter(|n| r.ranks.iter().any(|rank| norm(rank, n).is_some()));
    let mut room = width.saturating_sub(14);
    let columns: Vec<&str> = there
        .copied()
        .take_while(|n| {
            let cell = n.len().max(9) + 2;
            let fits = cell <= room;
            room = room.saturating_sub(cell);
            fits
        })
        .collect();
    out.push('\n');
    wrapped(
        out,
        "",
        "Norms of each rank, shown, never judged (a shard in the wrong place keeps them):",
        width,
    );
    let titles: String = columns.iter().map(|n| format!("  {n:>9}")).collect();
    let _ = writeln!(out, "{:<5} {:<8}{titles}", "rank", "heads");
    for rank in r.ranks.iter().take(MOST) {
        let heads = format!("{}..{}", rank.heads.0, rank.heads.1);
        let mut text = format!("{:<5} {heads:<8}", rank.rank);
        for name in &columns {
            let value = norm(rank, name).map_or("missing".into(), short);
            let cell = name.len().max(9);
            text += &format!("  {value:>cell$}");
        }
        let _ = writeln!(out, "{}", text.trim_end());
    }
    if r.ranks.len() > MOST {
        let _ = writeln!(out, "and {} more (all of them with --format json)", r.ranks.len() - MOST);
    }
}
