/*! One case run through the judge, and what its test says. */

use super::alone::{self, Outcome};
use super::matrix::{Cell, report_name};
use super::source::Source;
use crate::case::Batch;
use crate::check::{self, CheckError, EngineKind, Options, not_judged_by};
use crate::engine::EngineError;
use crate::judge::Verdict;
use crate::model::Model;
use crate::report::{Lack, LayerReport, ModelReport, RUN, Report, terminal};
use crate::trace::npy::write_atomically;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Columns of a failure's text.
const WIDTH: usize = 100;

/// One case at a time has the GPU: cases share no stream and measure nothing against each other.
static GPU: Mutex<()> = Mutex::new(());

/// A case with all that it takes.
pub(super) struct Work {
    pub cell: Cell,
    pub model: Arc<Model>,
    pub path: PathBuf,
    pub batch: Batch,
    /// Splits of the keys in decode; None: by length.
    pub splits: Option<usize>,
    pub source: Arc<Source>,
    /// Where its report goes.
    pub reports: Option<PathBuf>,
    /// GPU cases that were judged.
    pub ran: Arc<AtomicUsize>,
}

impl Work {
    /// Runs it; passes where the verdict is exact or rounding. `limit`: in a process of its own, which may take so long.
    ///
    /// # Errors
    /// The text of the failure.
    pub fn run(&self, limit: Option<Duration>) -> Result<(), String> {
        if self.batch.0.is_empty() {
            let file = self.model.file();
            let phase = self.cell.phase.name();
            return Err(format!(
                "the batch has no {phase} request that fits this model\n  where: {file}\n  do: give the engine a batch with both phases"
            ));
        }
        let options = self.options();
        let Some(limit) = limit else { return self.told(&options, self.judged(&options)) };
        let outcome = {
            let _one = GPU.lock().unwrap_or_else(PoisonError::into_inner);
            alone::run(&self.cell.name(), limit)
        };
        if matches!(outcome, Outcome::Passed | Outcome::Failed(_)) {
            self.ran.fetch_add(1, Ordering::Relaxed);
        }
        match outcome {
            Outcome::Passed => Ok(()),
            Outcome::Failed(text) | Outcome::Unjudged(text) => Err(text),
            // It could write no report.
            Outcome::Ended(what) => self.told(&options, Err(EngineError::Broke(what).into())),
        }
    }

    /// Writes the case's report, and says what its test says.
    fn told(&self, options: &Options, result: Result<LayerReport, CheckError>) -> Result<(), String> {
        let (report, error) = self.report(options, result);
        let written = match &self.reports {
            None => Ok(()),
            Some(folder) => write(folder, &self.cell.name(), &report),
        };
        match error {
            None => verdict(&report).and(written),
            Some(e) => Err(format!("{e}\nRepeat with:\n  {}", report.command)),
        }
    }

    fn options(&self) -> Options {
        Options {
            engine: self.source.options_kind(),
            forms: self.cell.forms(),
            batch: self.batch.clone(),
            dtype: self.cell.dtype,
            splits: self.splits,
            ..Options::default()
        }
    }

    fn judged(&self, options: &Options) -> Result<LayerReport, CheckError> {
        let engine = (self.source.make)(options)?;
        let report = check::layer_with(&self.model, self.cell.layer, options, engine.as_ref(), &|_| ())?;
        if self.source.gpu {
            self.ran.fetch_add(1, Ordering::Relaxed);
        }
        Ok(report)
    }

    /// The report that `run` would give, and the error of an engine that gave up: its report has no layer and says why, as
    /// that of a `run` does.
    fn report(&self, options: &Options, result: Result<LayerReport, CheckError>) -> (Report, Option<String>) {
        let mut report = Report {
            model: ModelReport::new(&self.model),
            engine_choice: "chosen by the matrix".into(),
            not_judged: not_judged_by(self.source.kind, options),
            command: self.command(options),
            ..empty()
        };
        report.verdict = match &result {
            Ok(layer) => layer.verdict,
            Err(CheckError::Engine(EngineError::Unavailable(_))) => Verdict::Unavailable,
            Err(CheckError::Engine(EngineError::Broke(_))) => Verdict::Broke,
            Err(_) => Verdict::Usage,
        };
        report.exit = report.verdict.exit(false);
        match result {
            Ok(layer) => {
                report.layers.push(layer);
                (report, None)
            }
            Err(e) => {
                let what = format!("layer {}: {e}", self.cell.layer);
                report.broken.push(Lack { verdict: report.verdict, what });
                (report, Some(e.to_string()))
            }
        }
    }

    /// What repeats it: the program's own engines by `run`, others by the test's name.
    fn command(&self, options: &Options) -> String {
        let Some(kind) = self.source.kind else {
            return format!("cargo test -- --exact {}", self.cell.name());
        };
        let path = quoted(&self.path);
        let form = self.cell.form.map_or("both", |f| f.name());
        let dtype = match kind {
            EngineKind::Reference => String::new(),
            _ => format!(" --dtype {}", self.cell.dtype),
        };
        let splits = self.splits.map_or(String::new(), |n| format!(" --splits {n}"));
        format!(
            "mla-check run {path} --layer {} --engine {} --form {form} --batch {}{splits}{dtype}",
            self.cell.layer,
            kind.name(),
            options.batch
        )
    }
}

/// A report of nothing.
fn empty() -> Report {
    Report {
        verdict: Verdict::Usage,
        exit: Verdict::Usage.exit(false),
        convention: "hf (auto)",
        engine_choice: "none".into(),
        ..Report::empty(RUN, ModelReport::none(), String::new())
    }
}

/// Passes what is exact or rounding. All else fails: `inconclusive` is no pass, it has not shown enough.
pub(super) fn verdict(report: &Report) -> Result<(), String> {
    match report.verdict {
        Verdict::Exact | Verdict::Rounding => Ok(()),
        _ => Err(terminal::failure(report, WIDTH)),
    }
}

/// The record of a test that failed before there was a case: `what` is wrong with a model's file.
pub(super) fn unreadable(folder: &Path, test: &str, file: &Path, what: &str) -> Result<(), String> {
    let mut report = empty();
    report.model.files = vec![file.display().to_string()];
    report.broken = vec![Lack { verdict: Verdict::Usage, what: what.to_string() }];
    report.command = format!("mla-check inspect {}", quoted(file));
    write(folder, test, &report)
}

fn write(folder: &Path, test: &str, report: &Report) -> Result<(), String> {
    let path = folder.join(report_name(test));
    let written = std::fs::create_dir_all(folder).and_then(|()| {
        write_atomically(&path, |out| serde_json::to_writer_pretty(out, report).map_err(Into::into))
    });
    written.map_err(|e| {
        format!(
            "the case's report could not be written: {e}\n  where: {}, of {}\n  do: check room and permissions",
            path.display(),
            super::environment::REPORTS
        )
    })
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    shlex::try_quote(&text).map_or(text.clone(), |q| q.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::{Budget, TABLE};
    use mla_reference::Form;

    #[test]
    fn what_has_not_shown_enough_is_no_pass() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/glm5dims.Q4_K_M.gguf");
        let model = Model::open(&file).unwrap();
        // No size below an ulp's millionth part is visible in bf16.
        let budget = Budget { promise: 1e-9, ..Budget::default() };
        let (batch, forms) = ("0+2".parse().unwrap(), vec![Form::Absorbed]);
        let options = Options { batch, forms, budget, ..Options::default() };
        let layer = check::layer(&model, 0, &options, &|_| ()).unwrap();
        assert_eq!(layer.verdict, Verdict::Inconclusive);
        let report =
            Report { verdict: layer.verdict, layers: vec![layer], command: "again".into(), ..empty() };
        let text = verdict(&report).unwrap_err();
        assert!(text.lines().next().unwrap().ends_with(": inconclusive"), "{text}");
        assert!(text.contains(" is inconclusive: gain: the smallest visible is "), "{text}");
        assert!(text.ends_with("Repeat with:\n  again\n") && !text.contains('\x1b'), "{text}");
    }

    #[test]
    fn exact_and_rounding_pass_and_nothing_else() {
        for row in TABLE {
            let report = Report { verdict: row.verdict, ..empty() };
            let good = matches!(row.name, "exact" | "rounding");
            assert_eq!(verdict(&report).is_ok(), good, "{}", row.name);
        }
    }
}
