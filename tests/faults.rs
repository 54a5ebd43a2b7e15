/*!
The fault suite in short: faults of the catalogue are caught, at the right tensor, under the right name, beside clean twins.

The whole suite is `mla-check faults`. Here a part of it runs, one fault or more of every family that is due, without the search for
the smallest sizes; the catalogue's own tests hold its rows. `MLA_CHECK_FAULTS=all` runs all rows.
*/
#![allow(clippy::print_stdout)]

#[path = "common/nvrtc.rs"]
mod environment;

use mla_check::check::{self, EngineKind, Options};
use mla_check::fault::catalogue::{self, FAMILIES, Row};
use mla_check::fault::text;
use mla_check::suite::{self, Naming, Outcome, Plan, Suite};
use std::collections::BTreeSet;
use std::process::{Command, Output};

fn suite(rows: Vec<Row>) -> Suite {
    let plan = Plan { rows, inside: Vec::new(), base: Options::default(), sizes: false };
    suite::run(&plan, &|o| check::engine(o), &|_| ()).unwrap()
}

/// The first row of each family, and those that the program was written for.
fn short() -> Vec<Row> {
    const FOUNDING: [&str; 4] = ["slots-permuted", "equal-chunks", "shard-zero", "phantom-output"];
    let all = catalogue::all();
    if std::env::var("MLA_CHECK_FAULTS").is_ok_and(|v| v == "all") {
        return all.to_vec();
    }
    let mut seen = BTreeSet::new();
    all.iter().filter(|r| seen.insert(r.family) || FOUNDING.contains(&r.name)).copied().collect()
}

#[test]
fn the_catalogue_is_large_and_covers_what_is_due() {
    assert!(catalogue::all().len() >= 80, "{}", catalogue::all().len());
    let has = |name: &str| short().iter().any(|r| r.family == name);
    assert!(FAMILIES.iter().all(|f| f.without.is_some() || has(f.name)));
}

/// Every fault is caught at its tensor, no name is wrong, no clean run is accused; what a row says is missed is all that is.
#[test]
fn faults_are_caught_and_named_beside_clean_twins() {
    let s = suite(short());
    for t in &s.faults {
        println!("{} {:?} {:?} {:?} {:?}", t.name, t.outcome, t.first, t.cause, t.causes);
    }
    assert!(s.false_alarms.is_empty(), "{:?}", s.false_alarms);
    for t in &s.faults {
        assert_eq!(t.outcome, Outcome::Caught, "{}: {:?}", t.name, t.why);
        assert!(t.cause != Naming::Wrong, "{}: {:?}", t.name, t.causes);
        assert!(t.complete() || t.known.is_some(), "{}: {:?} {:?}", t.name, t.first, t.causes);
    }
    assert!(s.ok && s.score.false_alarms.of > 1);
}

/// A suite can fail: rows that expect another tensor or another name are not complete, and what does nothing is missed.
#[test]
fn a_wrong_expectation_is_a_failure() {
    let of = |name: &str| *catalogue::all().iter().find(|r| r.name == name).unwrap();
    let elsewhere = Row { first: &["q"], cause: &["mask"], ..of("heads-swapped") };
    let nothing = Row { fault: "output-gain=1", sizes: &[], ..of("output-gain") };
    let s = suite(vec![elsewhere, nothing]);
    assert!(!s.ok && !s.faults[0].first_right);
    assert_eq!((s.faults[0].outcome, s.faults[0].cause), (Outcome::Caught, Naming::Wrong));
    assert_eq!(s.faults[1].outcome, Outcome::Missed);
    assert_eq!((s.score.caught.n, s.score.named_wrongly), (1, 1));
}

/// Faults inside kernels beside their clean twins; what an engine can't have is said, and counts for nothing.
#[test]
fn faults_inside_kernels_are_rows_where_kernels_run() {
    let inside = ["fused-no-mask", "norm-barrier-missing"].map(|n| text::by_name(n).unwrap()).to_vec();
    let run = |engine| {
        let base = Options { engine, ..Options::default() };
        let plan = Plan { rows: Vec::new(), inside: inside.clone(), base, sizes: false };
        suite::run(&plan, &|o| check::engine(o), &|_| ()).unwrap()
    };
    let s = run(EngineKind::Cpu);
    assert!(
        s.faults.iter().all(|t| t.outcome == Outcome::NotApplicable && t.why.is_some()),
        "{:?}",
        s.faults
    );
    assert!(!s.ok && (s.score.caught.of, s.score.false_alarms.of) == (0, 0));
    let Some(_) = environment::nvrtc("faults_inside_kernels_are_rows_where_kernels_run") else { return };
    let s = run(EngineKind::Ptx);
    assert!(s.ok && s.faults.iter().all(suite::Tried::complete), "{:?}", s.faults);
    // Of the barrier no tensor is asked.
    assert_eq!((s.score.caught.of, s.score.first.of, s.score.false_alarms.of), (2, 1, 2));
    // An expectation that is wrong is a failure.
    let wrong = text::Mutation { cause: Some("rope"), ..*inside[0] };
    let base = Options { engine: EngineKind::Ptx, ..Options::default() };
    let plan = Plan { rows: Vec::new(), inside: vec![Box::leak(Box::new(wrong))], base, sizes: false };
    let s = suite::run(&plan, &|o| check::engine(o), &|_| ()).unwrap();
    assert!(!s.ok && s.faults[0].cause == Naming::Wrong, "{:?}", s.faults);
}

fn mla_check(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mla-check")).args(args).env("RUST_BACKTRACE", "0").output().unwrap()
}

#[test]
fn the_command_prints_a_table_and_writes_a_report() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("faults.json");
    let out = mla_check(&["faults", "heads-swapped", "attn_out-element", "--report", file.to_str().unwrap()]);
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(0), "{text}");
    assert!(text.starts_with("engine cpu: 2 of 2 faults caught"), "{text}");
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(json["schema"], "mla-check.faults/1");
    assert_eq!(json["faults"][0]["fault"], "swap-heads=0,2");
    // Sizes are looked for: a quarter of the rms is not the smallest element that is seen.
    let smallest =
        json["faults"].as_array().unwrap().iter().find(|f| f["name"] == "attn_out-element").unwrap();
    assert!(smallest["smallest"].as_f64().unwrap() < 0.25, "{smallest}");
}

#[test]
fn wrong_arguments_are_errors_and_the_catalogue_is_listed() {
    for args in [&["faults", "nope"][..], &["faults", "--family", "F99"], &["faults", "--report", "x.txt"]] {
        assert_eq!(mla_check(args).status.code(), Some(2), "{args:?}");
    }
    let none = mla_check(&["faults", "eps", "--family", "F02"]);
    assert_eq!(none.status.code(), Some(2));
    let said = String::from_utf8(none.stderr).unwrap();
    assert!(said.contains("where: NAME, --family") && said.contains("do: "), "{said}");
    let listed = mla_check(&["faults", "--list"]);
    let text = String::from_utf8(listed.stdout).unwrap();
    assert!(catalogue::all().iter().all(|r| text.contains(r.name)) && listed.status.success());
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
}
