/*!
Clean runs: a correct engine is never accused, one that lies about its contract always is; runs can be repeated alone.
*/

use mla_check::case::Case;
use mla_check::check::{self, Options};
use mla_check::engine::{Description, Engine, EngineError, Sink};
use mla_check::model::{Layer, Reading};
use mla_check::study::Engines;
use mla_check::study::calibrate::{Calibration, Plan, Source, calibrate};
use mla_numeric::DType;
use mla_reference::{Contract, Form};

fn runs(first: u64, runs: u64, engines: &Engines) -> Calibration {
    let source = Source { models: Vec::new(), reading: Reading::default() };
    let plan = Plan { runs, first, seed: 0, base: Options::default() };
    calibrate(&source, &plan, engines, &|| ()).unwrap()
}

/// The short form of `mla-check calibrate`, for CI.
#[test]
fn forty_clean_runs_are_clean() {
    let report = runs(0, 40, &|o| check::engine(o));
    assert!(report.ok, "{:#?}\n{:#?}", report.missed, report.alarms);
    assert_eq!(report.runs_by_verdict.values().sum::<u64>(), 40);
    // A judge that tests nothing would be clean too.
    let all = &report.families[0];
    assert!(all.name == "all" && all.tests > 40 * 100, "{}", all.tests);
}

/// Runs in which a correct engine was accused once: scores of few terms on a truncating accumulator (of tiny norm weights),
/// and roundings of a float32 norm that looked like another eps.
#[test]
fn runs_that_were_accused_once() {
    for run in [348, 426] {
        let report = runs(run, 1, &|o| check::engine(o));
        assert!(report.ok, "{run}: {:#?}", report.alarms);
    }
}

/// Rounds once where it declares to round the normalised value first: a quarter of the norms' elements differ.
struct Liar(Box<dyn Engine>);

impl Engine for Liar {
    fn describe(&self) -> Description {
        self.0.describe()
    }
    fn contract(&self) -> Contract {
        Contract { norm_cast: Some(DType::Bf16), ..self.0.contract() }
    }
    fn run(
        &self,
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        self.0.run(layer, case, forms, sink)
    }
}

#[test]
fn an_engine_that_lies_about_its_contract_is_an_alarm_in_every_run() {
    let n = 5;
    let report = runs(0, n, &|o| Ok(Box::new(Liar(check::engine(o)?))));
    assert!(!report.ok);
    for run in 0..n {
        let accused = report.alarms.iter().any(|a| a.run == run && a.what.starts_with("attn_in, "));
        assert!(accused, "run {run}: {:#?}", report.alarms);
    }
    assert!(report.missed[0].starts_with(&format!("{n} of {n} ")), "{:?}", report.missed);
    let a = &report.alarms[0];
    assert_eq!(a.repeat, format!("mla-check calibrate --seed 0 --first {} --runs 1", a.run));
    assert!(a.setup.contains("--batch "), "{}", a.setup);
}

/// A run is the same alone and among others, on any number of threads.
#[test]
fn runs_can_be_repeated_alone() {
    let text = |threads: usize, first, n| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut report = pool.install(|| runs(first, n, &|o| check::engine(o)));
        report.seconds = 0.0;
        report
    };
    let json = |c: &Calibration| serde_json::to_string(c).unwrap();
    let three = text(1, 0, 3);
    assert_eq!(json(&three), json(&text(3, 0, 3)));
    let mut tests = 0;
    for first in 0..3 {
        tests += text(2, first, 1).families[0].tests;
    }
    assert_eq!(tests, three.families[0].tests);
    assert!(tests > 100);
}
