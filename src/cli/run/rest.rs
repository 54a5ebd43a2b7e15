/*!
Layers one after the other, and what becomes of the rest where one of them takes the GPU away from this process.

A kernel that breaks does that (`device::cuda::lost`), so the layers behind it run in a process of their own, up to the
next one that breaks. What broke in a process that had judged a layer before is run once more by itself: an earlier layer
may be to blame. A kernel that hangs ends the run.
*/

use super::super::out::{Failure, Output};
use super::failure;
use crate::check::{self, CheckError, Options};
use crate::child;
use crate::device::Problem;
use crate::device::cuda;
use crate::engine::EngineError;
use crate::model::{Model, list};
use crate::report::{Lack, LayerReport, Report};
use std::process::Command;
use std::time::Duration;

/// Set by a run for the process that goes on with its last layers.
const REST: &str = "MLA_CHECK_REST";
/// Exit codes of such a process that wrote a report; else it wrote none.
const BROKE: u8 = 64;
const HUNG: u8 = 65;

/// What came of layers.
#[derive(Default)]
pub(super) struct Done {
    /// Those that were judged.
    pub layers: Vec<LayerReport>,
    /// Why the others were not, the first one first.
    pub broken: Vec<Failure>,
}

/// The layers that this process was started for by another run.
pub(super) fn asked() -> Option<String> {
    std::env::var(REST).ok().filter(|text| !text.is_empty())
}

/// Judges layers. `alone`: where one takes the GPU away, no process goes on.
pub(super) fn judge(
    model: &Model,
    layers: &[usize],
    options: &Options,
    alone: bool,
    out: &Output,
) -> Result<Done, Failure> {
    let (mut done, error) = here(model, layers, options, out);
    let Some(error) = error else { return Ok(done) };
    if alone || layers.len() < 2 || cuda::lost().is_none() {
        done.broken.push(failure(error));
        return Ok(done);
    }
    let mut next = done.layers.len();
    if next == 0 {
        done.broken.push(of(layers[0], failure(error)));
        next = 1;
    }
    let mut hung = next == 1 && lost_to_hang();
    while next < layers.len() && !hung {
        let bar = out.progress(0);
        bar.set_message(format!("layers {} in another process", list(&layers[next..])));
        let (report, hangs) = elsewhere(&layers[next..]);
        bar.finish_and_clear();
        hung = hangs;
        let report = match report {
            Ok(report) => report,
            Err(what) => {
                done.broken.push(of(layers[next], Failure::Broke(what)));
                next += 1;
                continue;
            }
        };
        next += report.layers.len();
        done.layers.extend(report.layers);
        if let Some(lack) = report.broken.into_iter().next() {
            let layer = layers.get(next).copied().unwrap_or_default();
            done.broken.push(of(layer, Failure::Broke(lack.what)));
            next += 1;
        }
    }
    if next < layers.len() {
        let what = format!(
            "layers {} were not run: a kernel hung in layer {}\n  where: --layer\n  do: run them by --layer once it does not",
            list(&layers[next..]),
            layers[next - 1]
        );
        done.broken.push(Failure::Broke(what));
    }
    Ok(done)
}

fn of(layer: usize, failure: Failure) -> Failure {
    match failure {
        Failure::Broke(what) => Failure::Broke(format!("layer {layer}: {what}")),
        other => other,
    }
}

fn lost_to_hang() -> bool {
    cuda::lost().is_some_and(|e| matches!(e.problem(), Problem::Hung { .. }))
}

/// In this process, up to the first that can't be judged.
fn here(model: &Model, layers: &[usize], options: &Options, out: &Output) -> (Done, Option<CheckError>) {
    let mut done = Done::default();
    for (i, &layer) in layers.iter().enumerate() {
        let bar = out.progress(0);
        let prefix = if layers.len() > 1 {
            format!("layer {layer} ({} of {}): ", i + 1, layers.len())
        } else {
            String::new()
        };
        let result = match cuda::lost() {
            // By a variant of a layer before, whose report says it.
            Some(lost) if i > 0 => Err(EngineError::Broke(lost.to_string()).into()),
            _ => check::layer(model, layer, options, &|what| bar.set_message(format!("{prefix}{what}"))),
        };
        bar.finish_and_clear();
        match result {
            Ok(report) => done.layers.push(report),
            // What was judged before is not lost: it is printed, then the error.
            Err(e) => return (done, Some(e)),
        }
    }
    (done, None)
}

/// In a process of its own: its report, and whether a kernel hung there.
fn elsewhere(layers: &[usize]) -> (Result<Report, String>, bool) {
    let rest: Vec<String> = layers.iter().map(usize::to_string).collect();
    let started = std::env::current_exe().and_then(|own| {
        let mut command = Command::new(own);
        // Its kernels have a time limit of their own.
        child::run(command.args(std::env::args_os().skip(1)).env(REST, rest.join(",")), Duration::MAX)
    });
    let what = |text: String| {
        format!(
            "{text}\n  where: the process for layers {}\n  do: run the layer by itself, with --layer",
            list(layers)
        )
    };
    match started {
        Err(e) => (Err(what(format!("no process could be started: {e}"))), false),
        Ok(ended) => match ended.code().map(u8::try_from) {
            Some(Ok(code @ (0 | BROKE | HUNG))) => {
                let report = serde_json::from_slice(&ended.stdout);
                (report.map_err(|e| what(format!("its report can't be read: {e}"))), code == HUNG)
            }
            _ => (Err(what(format!("it {} without a report: {}", ended.how(), ended.text()))), false),
        },
    }
}

/// For the process that was started for some layers: prints its report, and chooses the exit code.
pub(super) fn answer(report: &Report, out: &mut Output) -> Result<u8, Failure> {
    out.print_json(report)?;
    Ok(match (report.broken.is_empty(), lost_to_hang()) {
        (_, true) => HUNG,
        (false, false) => BROKE,
        (true, false) => 0,
    })
}

/// As it stands in a report.
pub(super) fn lacks(broken: &[Failure]) -> Vec<Lack> {
    broken.iter().filter_map(Failure::lack).collect()
}
