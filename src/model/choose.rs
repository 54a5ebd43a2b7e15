/*! Which layers of a model somebody asks for, on a command line or in the environment. */

use super::{Model, list};
use std::collections::BTreeSet;

/// Layers that were asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Those with MLA attention, in order; at least one.
    pub layers: Vec<usize>,
    /// Those without it that a range names.
    pub skipped: Vec<usize>,
}

/// Layers as asked for (`N`, `A..B` with both ends, a comma list, `all`), in order. An explicit layer must have MLA
/// attention; ranges skip those that have none. `place`: where it was asked, for errors.
///
/// # Errors
/// What, where and what to do.
pub fn choose(asked: &str, model: &Model, place: &str) -> Result<Chosen, String> {
    among(asked, &model.mla_layers(), model.blocks, place)
}

/// The same of a model of `blocks` layers, of which `with` have MLA attention.
///
/// # Errors
/// As [`choose`].
pub fn among(asked: &str, with: &[usize], blocks: usize, place: &str) -> Result<Chosen, String> {
    let with: BTreeSet<usize> = with.iter().copied().collect();
    let names = list(&with.iter().copied().collect::<Vec<_>>());
    let bad = |what: String, how: &str| {
        format!("{what}\n  where: {place}\n  do: {how}; layers with MLA attention: {names}")
    };
    let none = || bad("none of these layers has MLA attention".into(), "choose others");
    if asked == "all" {
        let layers: Vec<usize> = with.iter().copied().collect();
        return if layers.is_empty() { Err(none()) } else { Ok(Chosen { layers, skipped: Vec::new() }) };
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
    Ok(Chosen { layers: all.into_iter().collect(), skipped })
}
