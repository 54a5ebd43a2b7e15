/*! `--layer`: which layers a command looks at. */

use super::out::{Failure, Output};
use crate::model::{self, Model, list};

/// Layers as asked for ([`model::choose`]); those that a range skips are named.
pub(super) fn choose(asked: &str, model: &Model, out: &mut Output) -> Result<Vec<usize>, Failure> {
    let place = format!("--layer {}", super::text::escape(asked));
    let chosen = model::choose(asked, model, &place).map_err(Failure::Input)?;
    if !chosen.skipped.is_empty() {
        out.warn(&format!("skipped layers without MLA attention: {}", list(&chosen.skipped)));
    }
    Ok(chosen.layers)
}
