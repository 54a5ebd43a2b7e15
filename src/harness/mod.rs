/*!
`cargo test` as the harness: every case of a matrix is a test with a name of its own.

[`Harness`] takes engines and models; [`Harness::main`] is the `main` of a test target with `harness = false`:

```no_run
use mla_check::check::EngineKind;
use mla_check::harness::{Harness, Source};

fn main() -> std::process::ExitCode {
    Harness::new()
        .model("fixtures/models")
        .engine(Source::of(EngineKind::Cpu))
        .main()
}
```

An engine of your own is a [`Source::new`]. What cases there are is data ([`matrix`]); whether those of a GPU run is decided
before anything is listed ([`gate`]); variables of the environment are in [`environment`], the least number of GPU cases in
[`floor`]. A case passes when its verdict is `exact` or `rounding`.
*/

pub mod environment;
pub mod floor;
pub mod gate;
pub mod matrix;
mod models;
mod source;
mod trial;

pub use source::Source;

use environment::{Environment, FLOOR};
use gate::Standing;
use libtest_mimic::{Arguments, Failed, Trial};
use matrix::{Column, batch, cells};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use trial::Work;

/// Engines and models of a matrix.
#[derive(Default)]
pub struct Harness {
    sources: Vec<Arc<Source>>,
    models: Vec<PathBuf>,
}

impl Harness {
    /// Of nothing.
    pub fn new() -> Harness {
        Harness::default()
    }

    /// Adds an engine.
    pub fn engine(mut self, source: Source) -> Harness {
        self.sources.push(Arc::new(source));
        self
    }

    /// Adds a model, all its layers: a GGUF file, any part of a split one, or a folder of such files.
    pub fn model(mut self, path: impl Into<PathBuf>) -> Harness {
        self.models.push(path.into());
        self
    }

    /// Runs what the command line of `cargo test` or cargo-nextest asks for, as the environment says.
    ///
    /// Ends with 0, or with 101 where a case failed or fewer GPU cases ran than must.
    pub fn main(&self) -> ExitCode {
        let (arguments, environment) = (Arguments::from_args(), Environment::read());
        let plan = self.plan(&environment);
        let gpu_cases = plan.gpu_cases;
        let ran = plan.ran.clone();
        let conclusion = libtest_mimic::run(&arguments, plan.trials);
        if arguments.list || environment.nextest {
            return conclusion.exit_code();
        }
        let filtered = arguments.filter.is_some() || !arguments.skip.is_empty() || arguments.ignored;
        let short = environment.floor().map_or_else(Some, |asked| {
            let floor = floor::floor(asked, environment.require_gpu, filtered, gpu_cases);
            floor::missed(ran.load(Ordering::Relaxed), floor, asked.is_some())
        });
        match short {
            None => conclusion.exit_code(),
            Some(what) => {
                let _ = writeln!(std::io::stderr(), "error: {what}");
                ExitCode::from(101)
            }
        }
    }

    /// The tests, in the order of lists.
    fn plan(&self, environment: &Environment) -> Plan {
        let mut plan = Plan { trials: Vec::new(), gpu_cases: 0, ran: Arc::default() };
        if let Err(what) = environment.floor() {
            plan.trials.push(Trial::test(format!("environment::{FLOOR}"), move || Err(Failed::from(what))));
        }
        for listed in models::list(&self.models, environment) {
            let (model, layers) = match &listed.content {
                Ok(content) => content,
                Err(what) => {
                    plan.trials.push(unreadable(&listed, what, environment));
                    continue;
                }
            };
            for source in self.sources.iter().filter(|s| s.own_models || !listed.own) {
                let column = Column { engine: &source.name, dtypes: &source.dtypes, forms: &source.forms };
                for cell in cells(&listed.label, layers, &column) {
                    plan.gpu_cases += usize::from(source.gpu);
                    let lacking = source.lacking.clone().filter(|_| source.gpu);
                    let standing = match source.uncompiled(cell.dtype) {
                        None => Standing::of(lacking, environment.require_gpu),
                        why => Standing::of_compiled(why, environment.require_nvrtc),
                    };
                    let name = cell.name();
                    let work = Work {
                        splits: source.splits_of(listed.own),
                        batch: batch(&source.requests(listed.own), cell.phase, model.top_k),
                        cell,
                        model: model.clone(),
                        path: listed.path.clone(),
                        source: source.clone(),
                        reports: environment.reports.clone(),
                        ran: plan.ran.clone(),
                    };
                    let test = move || work.run().map_err(Failed::from);
                    plan.trials.push(standing.trial(name, test));
                }
            }
        }
        plan
    }
}

struct Plan {
    trials: Vec<Trial>,
    gpu_cases: usize,
    /// GPU cases that were judged.
    ran: Arc<AtomicUsize>,
}

/// A model that can't be opened is a test that fails.
fn unreadable(listed: &models::Listed, what: &str, environment: &Environment) -> Trial {
    let name = format!("unreadable::{}", listed.label);
    let (reports, path, what) = (environment.reports.clone(), listed.path.clone(), what.to_string());
    Trial::test(name.clone(), move || {
        let written = reports.map_or(Ok(()), |folder| trial::unreadable(&folder, &name, &path, &what));
        Err(Failed::from(written.err().map_or(what.clone(), |e| format!("{what}\n{e}"))))
    })
}
