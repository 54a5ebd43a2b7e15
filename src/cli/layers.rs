/*! `--layer`: which layers a command looks at. */

use super::out::{Failure, Output};
use crate::model::{self, Model, list};

/// Layers as asked for ([`model::choose`]); those that a range skips are named.
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
    let place = format!("{option} {}", super::text::escape(asked));
    let chosen = model::among(asked, with, blocks, &place).map_err(Failure::Input)?;
    if !chosen.skipped.is_empty() {
        out.warn(&format!("skipped layers without MLA attention: {}", list(&chosen.skipped)));
    }
    Ok(chosen.layers)
}
