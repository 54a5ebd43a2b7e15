/*! What is wrong or odd about a checkpoint: every attention weight of every layer asked for, and what the container found. */

use super::super::source::Held;
use super::super::{Model, list};
use super::{Finding, Severity, conventions};
use crate::checkpoint::Checkpoint;
use mla_reference::Weight;
use std::collections::{BTreeMap, BTreeSet};

/// All findings, the worst first.
pub(super) fn lint(model: &Model, checkpoint: &Checkpoint) -> Vec<Finding> {
    let with = model.mla_layers();
    let mut by_what: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    for &layer in &with {
        for &weight in Weight::ALL.iter().filter(|w| w.exists(&model.geometry)) {
            let held = match weight {
                // Both are rows of kv_b: one question.
                Weight::WUv => continue,
                Weight::WUk => Held::KvB(weight),
                _ => Held::Weight(weight),
            };
            if let Err(e) = model.source().take(layer, held, &model.geometry) {
                let what = e.to_string();
                let what = what.lines().next().unwrap_or_default();
                let what = what.replace(&format!("layers.{layer}."), "layers.*.");
                by_what.entry(what).or_default().insert(layer);
            }
        }
    }
    let mut found: Vec<Finding> = by_what
        .into_iter()
        .map(|(what, layers)| {
            let layers: Vec<usize> = layers.into_iter().collect();
            let what = match layers.as_slice() {
                [n] => what.replace("layers.*.", &format!("layers.{n}.")),
                _ => what,
            };
            Finding { severity: Severity::Defect, what, place: format!("layers {}", list(&layers)) }
        })
        .collect();
    let said = |severity, what| Finding { severity, what, place: "config.json".into() };
    let ordinary = model.mtp_layers().start;
    let there: BTreeSet<usize> = with.into_iter().collect();
    // Ranges without attention; the number of layers is the file's word, and may be anything.
    let mut holes = Vec::new();
    let mut next = 0;
    for n in there.iter().copied().filter(|n| *n < ordinary).chain([ordinary]) {
        if n > next {
            holes.push(if n == next + 1 { format!("{next}") } else { format!("{next}..{}", n - 1) });
        }
        next = n + 1;
    }
    if !holes.is_empty() && model.all_layers_attend() {
        let what = format!(
            "num_hidden_layers is {ordinary}, but layers {} have no kv_a_proj_with_mqa: files are missing, or the number is wrong",
            holes.join(", ")
        );
        found.push(said(Severity::Defect, what));
    }
    found.extend(checkpoint.warnings().iter().map(|w| Finding {
        severity: Severity::Warning,
        what: w.clone(),
        place: "files".into(),
    }));
    found.extend(conventions::differences(model).into_iter().map(|what| said(Severity::Note, what)));
    found.sort_by_key(|f| f.severity);
    found
}
