/*! Reports as CI uses them: JUnit, GitHub, `merge` and `diff`, from the command line. */

mod common;

use clap::Parser;
use common::fixture;
use mla_check::cli::Cli;
use quick_junit::Report as JUnit;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const GLM: &str = "models/glm5dims.Q4_K_M.gguf";
/// One form and regime, both phases.
const SMALL: [&str; 8] =
    ["--engine", "cpu", "--batch", "0+3,20+1", "--form", "absorbed", "--regime", "random"];

fn command(dir: &Path, args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_mla-check"));
    c.current_dir(dir)
        .args(args)
        .env("RUST_BACKTRACE", "0")
        .env("CUDA_VISIBLE_DEVICES", "")
        .env_remove("MLA_CHECK_REQUIRE_GPU")
        .env_remove("GITHUB_ACTIONS")
        .env_remove("GITHUB_STEP_SUMMARY")
        .stdin(Stdio::null());
    c
}

fn done(dir: &TempDir, args: &[&str]) -> Output {
    command(dir.path(), args).output().unwrap()
}

/// `run` of the fixture with the small case.
fn run(dir: &TempDir, args: &[&str]) -> Output {
    let model = fixture(GLM);
    let mut all = vec!["run", model.to_str().unwrap()];
    all.extend(SMALL);
    all.extend(args);
    done(dir, &all)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn junit(path: &Path) -> JUnit {
    JUnit::deserialize_from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Takes out what depends on the clock and on how it was asked for.
fn timeless(v: &mut Value) {
    match v {
        Value::Object(all) => {
            for key in ["seconds", "probe_seconds", "command"] {
                all.remove(key);
            }
            all.values_mut().for_each(timeless);
        }
        Value::Array(all) => all.iter_mut().for_each(timeless),
        _ => {}
    }
}

#[test]
fn layers_apart_and_merged_are_the_run_of_all() {
    let dir = tempfile::tempdir().unwrap();
    for (layer, file) in [("0", "0.json"), ("1", "1.json"), ("all", "all.json")] {
        let out = run(&dir, &["--layer", layer, "--report", file, "-q"]);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    }
    let out = done(&dir, &["merge", "1.json", "0.json", "--report", "m.json", "--report", "m.xml"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("engine cpu in bf16: layers 0..1 (2 of 2)"), "{}", text(&out.stderr));
    assert!(text(&out.stdout).contains("engine cpu, layer 1 of 2"));
    let read = |name: &str| json(&dir.path().join(name));
    let (mut merged, mut all) = (read("m.json"), read("all.json"));
    assert_eq!(merged["layers"][1]["command"], read("1.json")["command"]);
    timeless(&mut merged);
    timeless(&mut all);
    assert_eq!(merged, all);

    // Other orders, a folder, and the merge with its own parts: the same bytes.
    let bytes = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    std::fs::create_dir_all(dir.path().join("parts/deep")).unwrap();
    for name in ["0.json", "1.json"] {
        std::fs::copy(dir.path().join(name), dir.path().join("parts/deep").join(name)).unwrap();
    }
    for from in [vec!["0.json", "1.json"], vec!["parts"], vec!["m.json"], vec!["m.json", "0.json"]] {
        let args = [vec!["merge", "-q", "--report", "again.json"], from.clone()].concat();
        assert_eq!(done(&dir, &args).status.code(), Some(0));
        assert!(bytes("again.json") == bytes("m.json"), "{from:?}");
    }
    assert_eq!((junit(&dir.path().join("m.xml")).failures, junit(&dir.path().join("m.xml")).errors), (0, 0));

    // A merge is a report like another: diff finds nothing, explain repeats the layer's own command.
    let out = done(&dir, &["diff", "all.json", "m.json", "-q"]);
    assert_eq!(out.status.code(), Some(0));
    assert!(text(&out.stdout).starts_with("0 worse, 0 better, 0 differ"), "{}", text(&out.stdout));
    let out =
        done(&dir, &["explain", "m.json", "absorbed/out", "0", "1", "--layer", "1", "--format", "json"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let explained: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(explained["layer"], 1);
    assert_eq!(explained["command"], read("1.json")["command"]);

    // A layer that is missing is no verdict, unless it was not asked for; too few GPU reports are a failure.
    let out = done(&dir, &["merge", "0.json", "-q", "--report", "gap.xml"]);
    assert_eq!((out.status.code(), text(&out.stdout).contains("no report has layer 1")), (Some(3), true));
    assert_eq!(junit(&dir.path().join("gap.xml")).errors, 1);
    assert_eq!(done(&dir, &["merge", "0.json", "-q", "--layers", "0..0"]).status.code(), Some(0));
    let out = done(&dir, &["merge", "m.json", "-q", "--gpu-floor", "1"]);
    assert_eq!((out.status.code(), text(&out.stdout).contains("by engine cuda, 1 must be")), (Some(1), true));
    assert_eq!(done(&dir, &["merge", "0.json", "--layers", "7"]).status.code(), Some(2));

    // The same layer with other figures, another model, another schema.
    let altered = |name: &str, from: &str, to: &str| {
        let text = std::fs::read_to_string(dir.path().join("0.json")).unwrap();
        assert!(text.contains(from), "{from}");
        std::fs::write(dir.path().join(name), text.replacen(from, to, 1)).unwrap();
        let out = done(&dir, &["merge", "0.json", name, "--report", "never.json"]);
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    let (code, said) = altered("x.json", "\"elements\": 65536", "\"elements\": 65535");
    assert!(code == Some(1) && said.contains("differ in elements of w_q_a: 6553"), "{code:?} {said}");
    let (code, said) = altered("x.json", "glm5dims.Q4_K_M.gguf", "other.gguf");
    assert!(code == Some(2) && said.contains("different models"), "{code:?} {said}");
    let (code, said) = altered("x.json", "mla-check.run/1", "mla-check.run/2");
    assert!(code == Some(2) && said.contains("its schema is mla-check.run/2"), "{code:?} {said}");
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    assert_eq!(done(&dir, &["merge", "empty"]).status.code(), Some(2));
}

#[test]
fn a_fault_shows_in_junit_on_github_and_in_a_diff() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    assert_eq!(run(&dir, &["--report", "clean.json", "-q"]).status.code(), Some(0));
    let model = fixture(GLM);
    let mut args = vec!["run", model.to_str().unwrap()];
    args.extend(SMALL);
    args.extend([
        "--fault",
        "attn_out-element",
        "--report",
        "bad.json",
        "--report",
        "bad.xml",
        "--format",
        "json",
    ]);
    std::fs::write(at("summary.md"), "before\n").unwrap();
    let out = command(dir.path(), &args)
        .env("GITHUB_ACTIONS", "true")
        .env("GITHUB_STEP_SUMMARY", at("summary.md"))
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
    let printed: Value = serde_json::from_slice(&out.stdout).expect("stdout is JSON alone");
    assert_eq!(printed["verdict"], "fault");
    let stderr = text(&out.stderr);
    let title = "::error title=mla-check%3A fault in layer 0%2C absorbed/attn_out%2C ";
    assert!(stderr.lines().any(|l| l.starts_with(title)), "{stderr}");
    let summary = std::fs::read_to_string(at("summary.md")).unwrap();
    assert!(summary.starts_with("before\n## ❌ mla-check: fault"), "{summary}");
    assert!(summary.contains("| absorbed | prefill | attn_out | fault |"), "{summary}");
    let file = junit(&at("bad.xml"));
    assert!(file.failures > 0 && file.errors == 0);

    // What the report was written from is what is read: the same annotations and the same XML.
    let merge =
        ["merge", "bad.json", "--layers", "0..0", "--report", "again.xml", "--github", "always", "-q"];
    let out = done(&dir, &merge);
    assert_eq!(out.status.code(), Some(1));
    let errors = |s: &str| s.lines().filter(|l| l.starts_with("::")).map(String::from).collect::<Vec<_>>();
    assert_eq!(errors(&text(&out.stderr)), errors(&stderr));
    assert_eq!(std::fs::read(at("again.xml")).unwrap(), std::fs::read(at("bad.xml")).unwrap());

    // A summary that can't be written costs nothing but a warning.
    let out = command(dir.path(), &["merge", "bad.json", "--layers", "0..0"])
        .env("GITHUB_ACTIONS", "true")
        .env("GITHUB_STEP_SUMMARY", at("no/such/folder.md"))
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("warning: the summary of the step could not be written"));
    let out = command(dir.path(), &["merge", "bad.json", "--layers", "0..0", "--github", "never"])
        .env("GITHUB_ACTIONS", "true")
        .output()
        .unwrap();
    assert!(!text(&out.stderr).contains("::error"));

    let out = done(&dir, &["diff", "clean.json", "bad.json", "--format", "json"]);
    assert_eq!(out.status.code(), Some(1));
    let d: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(d["schema"], "mla-check.diff/1");
    let first = &d["rows"][0];
    assert_eq!((&first["tensor"], &first["form"]), (&"attn_out".into(), &"absorbed".into()));
    assert_eq!(first["figures"][1]["verdict"], "fault");
    // Nothing before the fault moved.
    let early = ["hidden", "attn_in", "q_a", "kv_a", "cache", "q_latent", "o_latent"];
    let rows = d["rows"].as_array().unwrap();
    assert!(rows.iter().all(|r| !early.contains(&r["tensor"].as_str().unwrap())), "{d:#}");
    assert_eq!(done(&dir, &["diff", "bad.json", "clean.json", "-q"]).status.code(), Some(0));
    let other = run(&dir, &["--seed", "1", "--report", "other.json", "-q"]);
    assert_eq!(other.status.code(), Some(0));
    let out = done(&dir, &["diff", "clean.json", "other.json"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("seed 0") && text(&out.stderr).contains("seed 1"));
}

#[test]
fn an_engine_that_is_not_there_leaves_a_report() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture(GLM);
    let args =
        ["run", model.to_str().unwrap(), "--engine", "cuda", "--report", "r.xml", "--report", "r.json"];
    let out = done(&dir, &args);
    assert_eq!(out.status.code(), Some(5), "{}", text(&out.stderr));
    assert!(out.stdout.is_empty());
    let file = junit(&dir.path().join("r.xml"));
    assert_eq!((file.tests, file.errors), (1, 1));
    let report = json(&dir.path().join("r.json"));
    assert_eq!((&report["verdict"], &report["exit"]), (&"unavailable".into(), &5.into()));
    assert_eq!(report["model"]["layers"], 2);
    // A merge does not lose it.
    let out = done(&dir, &["merge", "r.json", "-q"]);
    assert_eq!(out.status.code(), Some(5), "{}", text(&out.stdout));
}

#[test]
fn kinds_of_reports_are_known_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["r.pdf", "r", "no/r.xml"] {
        let out = run(&dir, &["--report", name]);
        assert_eq!(out.status.code(), Some(2), "{name}");
        assert!(text(&out.stderr).contains(".json, .html or .xml"), "{}", text(&out.stderr));
    }
}

/// Commands of the example workflows are ones that the program takes.
#[test]
fn example_workflows_call_what_there_is() {
    let mut count = 0;
    for name in ["github-plain.yml", "github-gpu.yml"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/ci").join(name);
        let yaml = std::fs::read_to_string(path).unwrap();
        assert!(!yaml.contains('\t'), "{name}: YAML has no tabs");
        for line in yaml.lines().map(str::trim) {
            let line = line.strip_prefix("run: ").unwrap_or(line);
            if !line.starts_with("mla-check ") {
                continue;
            }
            // `${{ matrix.layers }}` and `"$MODEL"` are one word each.
            let mut plain = String::new();
            let mut rest = line;
            while let Some((before, after)) = rest.split_once("${{") {
                plain += before;
                plain += "1";
                rest = after.split_once("}}").expect("an expression ends").1;
            }
            plain += rest;
            let words = shlex::split(&plain).expect("a command line");
            if let Err(e) = Cli::try_parse_from(&words) {
                panic!("{name}: {line}: {e}");
            }
            count += 1;
        }
    }
    assert_eq!(count, 5);
    assert!(Cli::try_parse_from(["mla-check", "merge", "--no-such-option"]).is_err());
}

/// A folder with reports of several models, as the test matrix writes it.
#[test]
fn reports_of_two_models_are_merged_model_by_model() {
    let dir = TempDir::new().unwrap();
    for (name, model) in common::MODELS {
        let (path, model) = (dir.path().join(format!("{name}.json")), fixture(model));
        let mut args =
            vec!["run", model.to_str().unwrap(), "--layer", "all", "-q", "--report", path.to_str().unwrap()];
        args.extend(SMALL);
        done(&dir, &args);
    }
    let out = done(&dir, &["merge", ".", "-q"]);
    let said = text(&out.stdout);
    assert_eq!(said.lines().filter(|l| l.starts_with("engine cpu, layer")).count(), 4, "{said}");
    let out = done(&dir, &["merge", ".", "-q", "--gpu-floor", "1"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("0 layer reports are by engine cuda"), "{out:?}");
    // A file holds one model's.
    let out = done(&dir, &["merge", ".", "--report", "all.json"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("different models"), "{out:?}");
}
