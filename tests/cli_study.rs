/*! `calibrate` and `sensitivity` as people use them: exit codes, JSON, wrong input. */

mod common;

use common::fixture;
use std::process::{Command, Output};

fn mla_check(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mla-check"))
        .args(args)
        .env("RUST_BACKTRACE", "0")
        .env_remove("MLA_CHECK_REQUIRE_GPU")
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .unwrap()
}

fn json(out: &Output) -> serde_json::Value {
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"))
}

/// The exit code is the report's own word, in text and JSON; a run is repeated by its number.
#[test]
fn calibrate_exits_by_its_figures_and_repeats_one_run() {
    let args = ["calibrate", "--seed", "1", "--first", "4", "--runs", "2"];
    let out = mla_check(&[&args[..], &["--format", "json"]].concat());
    let report = json(&out);
    assert_eq!(report["schema"], "mla-check.calibrate/1");
    assert_eq!(out.status.code(), Some(i32::from(report["ok"] == false)));
    assert_eq!(report["ok"], report["missed"].as_array().unwrap().is_empty());
    let verdicts = report["runs_by_verdict"].as_object().unwrap();
    assert_eq!(verdicts.values().map(|v| v.as_u64().unwrap()).sum::<u64>(), 2);
    let text = mla_check(&args);
    assert_eq!(text.status.code(), out.status.code());
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.starts_with("engine cpu, contract declared, 2 clean runs of seed 1: "), "{text}");
    assert!(text.lines().all(|l| l.starts_with(' ') || l.chars().count() <= 110), "{text}");
}

/// With a file, an alarm could be repeated by `run`; all options are those of `run`.
#[test]
fn calibrate_takes_model_files() {
    let model = fixture("models/dsv3.Q4_K_M-00001-of-00003.gguf");
    let out = mla_check(&["calibrate", model.to_str().unwrap(), "--runs", "1", "--format", "json"]);
    let report = json(&out);
    assert!(report["layers"][0].as_str().unwrap().contains("dsv3"), "{report}");
    let mut repeats =
        report["families"].as_array().unwrap().iter().filter_map(|f| f["smallest"]["repeat"].as_str());
    let command = repeats.next().unwrap().to_string();
    assert!(command.starts_with("mla-check run "), "{command}");
    let again: Vec<&str> = command.split(' ').skip(1).collect();
    let ran = mla_check(&[&again[..], &["-q"]].concat());
    assert!(ran.status.code() != Some(2), "{command}: {ran:?}");
}

#[test]
fn sensitivity_exits_by_its_figures() {
    let model = fixture("models/dsv3.Q4_K_M-00001-of-00003.gguf");
    let args = ["--seeds", "1", "--fault", "output-gain", "--regime", "random", "--batch", "0+9,70+1"];
    let args = [&["sensitivity", model.to_str().unwrap()], &args[..]].concat();
    // Nothing below a billionth is ever found; the figure must then be missed.
    let out = mla_check(&[&args[..], &["--goal", "1e-9", "--format", "json"]].concat());
    let report = json(&out);
    assert_eq!((out.status.code(), &report["ok"]), (Some(1), &serde_json::Value::Bool(false)));
    assert_eq!(report["rows"][0]["fault"], "output-gain");
    assert!(report["rows"][0]["tried"].as_array().unwrap().len() > 1, "{report}");
    let text = mla_check(&args);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
}

#[test]
fn what_makes_no_sense_is_refused_in_three_lines() {
    let model = fixture("models/dsv3.Q4_K_M-00001-of-00003.gguf");
    let model = model.to_str().unwrap();
    for (args, code) in [
        (&["calibrate", "--engine", "reference"][..], 2),
        (&["calibrate", "--engine", "cuda"], 5),
        (&["calibrate", "no-such-file.gguf"], 2),
        (&["sensitivity", model, "--engine", "reference"], 2),
        (&["sensitivity", model, "--batch", "nonsense"], 2),
        (&["sensitivity", model, "--layer", "99"], 2),
    ] {
        let out = mla_check(args);
        let err = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(code), "{args:?}: {err}");
        assert_eq!(err.trim_end().lines().count(), 3, "{args:?}: {err}");
        assert!(out.stdout.is_empty());
    }
    for args in [
        &["calibrate", "--runs", "0"][..],
        &["calibrate", "--budget", "2"],
        &["sensitivity", model, "--fault", "nonsense"],
        &["sensitivity", model, "--goal", "0"],
        &["sensitivity"],
    ] {
        assert_eq!(mla_check(args).status.code(), Some(2), "{args:?}");
    }
}
