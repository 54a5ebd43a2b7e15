/*! `--layer`: which layers a command looks at. */

use super::out::{Failure, Output};
use crate::model::{Model, list};
use std::collections::BTreeSet;

/// Layers as asked for (`N`, `A..B` with both ends, a comma list, `all`), in order. An explicit layer must have
/// MLA attention; ranges skip those that have none, and say so.
pub(super) fn choose(asked: &str, model: &Model, out: &mut Output) -> Result<Vec<usize>, Failure> {
    among(asked, "--layer", &model.mla_layers(), model.blocks, out)
}

/// The same of a model of `blocks` layers, of which `with` have MLA attention; `option` is where it was asked.
pub(super) fn among(
    asked: &str,
    option: &str,
    with: &[usize],
    blocks: usize,
    out: &mut Output,
) -> Result<Vec<usize>, Failure> {
    let with: BTreeSet<usize> = with.iter().copied().collect();
    let names = list(&with.iter().copied().collect::<Vec<_>>());
    let bad = |what: String, how: &str| {
        Failure::Input(format!(
            "{what}\n  where: {option} {}\n  do: {how}; layers with MLA attention: {names}",
            super::text::escape(asked)
        ))
    };
    let none = || bad("none of these layers has MLA attention".into(), "choose others");
    if asked == "all" {
        return if with.is_empty() { Err(none()) } else { Ok(with.into_iter().collect()) };
    }
    let (mut all, mut skipped) = (BTreeSet::new(), Vec::new());
    for part in asked.split(',').map(str::trim) {
        let number = |text: &str| {
            let how = "write N, A..B, a comma list, or all";
            text.parse::<usize>().map_err(|_| bad(format!("{part:?} is not a layer"), how))
        };
        if let Some((a, b)) = part.split_once("..") {
            let (a, b) = (number(a)?, number(b)?);
            if a > b || b >= blocks {
                let what = format!("{a}..{b} are not layers of a model of {blocks}");
                return Err(bad(what, "write A..B, both ends included"));
            }
            all.extend(with.range(a..=b));
            skipped.extend((a..=b).filter(|n| !with.contains(n)));
        } else {
            let n = number(part)?;
            if !with.contains(&n) {
                return Err(bad(format!("layer {n} has no MLA attention"), "choose another one"));
            }
            all.insert(n);
        }
    }
    if all.is_empty() {
        return Err(none());
    }
    if !skipped.is_empty() {
        out.warn(&format!("skipped layers without MLA attention: {}", list(&skipped)));
    }
    Ok(all.into_iter().collect())
}
