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
before anything is listed ([`gate`]), and each of them runs in a process of its own ([`alone`]); variables of the environment
are in [`environment`], the least number of GPU cases in [`floor`]. A case passes when its verdict is `exact` or `rounding`.
*/

pub mod alone;
pub mod environment;
pub mod floor;
pub mod gate;
pub mod matrix;
mod models;
mod source;
mod trial;

pub use source::Source;

use environment::{Environment, FLOOR, LIMIT, USUAL_LIMIT};
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
        let environment = Environment::read();
        if let Some(case) = alone::asked() {
            return self.one(&case, &environment);
        }
        let arguments = Arguments::from_args();
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
        let odd = [(FLOOR, environment.floor().err()), (LIMIT, environment.limit().err())];
        for (variable, what) in odd.into_iter().filter_map(|(v, what)| Some((v, what?))) {
            let test = move || Err(Failed::from(what));
            plan.trials.push(Trial::test(format!("environment::{variable}"), test));
        }
        for entry in self.entries(environment, &plan.ran) {
            plan.trials.push(match entry {
                Entry::Unreadable(trial) => trial,
                Entry::Case(standing, work) => {
                    plan.gpu_cases += usize::from(work.source.gpu);
                    let limit = work.source.gpu.then(|| environment.limit().unwrap_or(USUAL_LIMIT));
                    let name = work.cell.name();
                    standing.trial(name, move || work.run(limit).map_err(Failed::from))
                }
            });
        }
        plan
    }

    /// Runs the one case that this process was started for.
    fn one(&self, name: &str, environment: &Environment) -> ExitCode {
        let ran = Arc::default();
        let mut entries = self.entries(environment, &ran).into_iter();
        let found = entries.find_map(|e| match e {
            Entry::Case(standing, work) if work.cell.name() == name => Some((standing, work)),
            _ => None,
        });
        let result = match found {
            Some((Standing::Runs, work)) => work.run(None),
            Some((Standing::Skipped(why) | Standing::Required(why), _)) => Err(why),
            None => Err(format!(
                "there is no such case\n  where: {}={name}\n  do: leave the variable to the harness",
                alone::ALONE
            )),
        };
        alone::answer(result, ran.load(Ordering::Relaxed) > 0)
    }

    /// All cases, and models that give none. `ran` counts GPU cases that were judged.
    fn entries(&self, environment: &Environment, ran: &Arc<AtomicUsize>) -> Vec<Entry> {
        let mut entries = Vec::new();
        for listed in models::list(&self.models, environment) {
            let (model, layers) = match &listed.content {
                Ok(content) => content,
                Err(what) => {
                    entries.push(Entry::Unreadable(unreadable(&listed, what, environment)));
                    continue;
                }
            };
            for source in self.sources.iter().filter(|s| s.own_models || !listed.own) {
                let column = Column { engine: &source.name, dtypes: &source.dtypes, forms: &source.forms };
                for cell in cells(&listed.label, layers, &column) {
                    let lacking = source.lacking.clone().filter(|_| source.gpu);
                    let standing = match source.uncompiled(cell.dtype) {
                        None => Standing::of(lacking, environment.require_gpu),
                        why => Standing::of_compiled(why, environment.require_nvrtc),
                    };
                    let work = Work {
                        splits: source.splits_of(listed.own),
                        batch: batch(&source.requests(listed.own), cell.phase, model.top_k),
                        cell,
                        model: model.clone(),
                        path: listed.path.clone(),
                        source: source.clone(),
                        reports: environment.reports.clone(),
                        ran: ran.clone(),
                    };
                    entries.push(Entry::Case(standing, Box::new(work)));
                }
            }
        }
        entries
    }
}

/// What becomes a test.
enum Entry {
    Case(Standing, Box<Work>),
    Unreadable(Trial),
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
