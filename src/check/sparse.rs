/*!
Sparse attention in a run: which keys tokens attend to is given, as hidden states are. The layer's indexer chooses them in float64, or,
where a layer takes over another one's choice, that one's. Engines that can attend over a list are given the lists, and all that follows is
judged on them. What an engine's own indexer would choose is not looked at, and the report says so.
*/

use super::{CheckError, EngineKind, Options};
use crate::case::{Case, Chooser};
use crate::model::{Layer, Model, Selects};
use mla_reference::Weights;

/// How a run's attention is sparse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sparse {
    /// Keys that are kept; None: as many as the model says.
    pub top_k: Option<usize>,
}

/// What a run says it did not look at.
pub const NOT_JUDGED: &str = "the sparse indexer of any engine: which keys are attended to was given (float64), and only the attention over them ran";

/// Options that make no sense, or are not there yet, beside sparse attention.
fn refused(options: &Options) -> Option<(String, &'static str)> {
    let kernels = !matches!(options.engine, EngineKind::Cpu | EngineKind::Reference);
    let all = [
        (kernels, format!("--engine {}", options.engine.name()), "pass --engine cpu or reference"),
        (options.tp > 1, "--tp".into(), "leave --tp out"),
        (options.context_chunk.is_some(), "--context-chunk".into(), "leave --context-chunk out"),
        (options.route.is_some(), "--form routed".into(), "pass --form both, fused or absorbed"),
        (options.save.is_some(), "--save".into(), "leave --save out: dumps have no place for a selection"),
        (options.snapshot, "--snapshot".into(), "leave --snapshot out"),
        (options.invariance, "--invariance".into(), "leave --invariance out"),
        (options.ask.is_some(), "explain".into(), "ask a report of dense attention"),
        (options.reference_cache.is_some(), "--reference-cache".into(), "leave --reference-cache out"),
    ];
    all.into_iter().find(|a| a.0).map(|a| (a.1, a.2))
}

fn error(what: &str, place: &str, advice: &str) -> CheckError {
    CheckError::Sparse(format!("{what}\n  where: {place}\n  do: {advice}"))
}

/// Gives a case its selections, where attention is sparse.
///
/// # Errors
/// Options that do not go with it; a model without an indexer, or whose indexer can't be read.
pub(super) fn choose(
    model: &Model,
    layer: &Layer,
    options: &Options,
    case: &mut Case,
) -> Result<(), CheckError> {
    let Some(sparse) = options.sparse else { return Ok(()) };
    if let Some((what, advice)) = refused(options) {
        let place = format!("--attention dsa {what}");
        return Err(error("sparse attention does not go with this option yet", &place, advice));
    }
    let by =
        |index: usize, whose: &dyn Weights, case: &mut Case| match model.selects(index, &options.reading)? {
            Selects::Own(own) => {
                let (indexer, index) = &*own;
                let top_k = sparse.top_k.unwrap_or(indexer.top_k);
                let spec = &layer.spec;
                Chooser { spec, weights: whose, indexer, index, top_k, seed: options.seed }.choose(case);
                Ok(None)
            }
            Selects::From(other) => Ok(Some(other)),
            Selects::All => {
                let place = format!("--attention dsa, architecture {}", model.arch.name);
                Err(error("the model has no sparse indexer", &place, "leave --attention out"))
            }
        };
    let Some(other) = by(layer.index, layer.weights, case)? else { return Ok(()) };
    case.notes.push(format!("layer {} takes over the choice of layer {other}'s indexer", layer.index));
    by(other, &model.weights(other)?, case).map(drop)
}
