/*!
What is reviewed as a diff: each fixture's snapshots, layer by layer and form by form, and the first screens that README
shows.

The snapshots are those of `run --snapshot`, made by the program itself. A change there is a change of the reference, of
a contract or of a verdict: `cargo insta test --review`, or INSTA_UPDATE=always and `git diff`.
*/

mod common;

use common::{MODELS, fixture};
use mla_check::model::Model;
use std::path::Path;
use std::process::{Command, Output};

fn settings() -> insta::Settings {
    let mut s = insta::Settings::new();
    s.set_snapshot_path(concat!(env!("CARGO_MANIFEST_DIR"), "/snapshots"));
    s.set_prepend_module_to_snapshot(false);
    s.set_omit_expression(true);
    s
}

/// Prefill and decode, with and without context, pages begun and full, splits.
const CASE: [&str; 6] = ["--batch", "0+5,0+1,65+3,130+1", "--splits", "2", "--layer", "all"];

/// `run` on a model, with snapshots in a folder; of insta's environment only what is given, or what the tests have.
fn run(file: &Path, dir: &Path, args: &[&str], environment: Option<&[(&str, &str)]>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mla-check"));
    command
        .arg("run")
        .arg(file)
        .arg("--snapshot")
        .arg(dir)
        .args(["--engine", "cpu"])
        .args(args)
        .env("RUST_BACKTRACE", "0");
    if let Some(variables) = environment {
        for name in ["INSTA_UPDATE", "INSTA_FORCE_PASS", "CI", "TF_BUILD"] {
            command.env_remove(name);
        }
        command.envs(variables.iter().copied());
    }
    command.output().unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let all = std::fs::read_dir(dir).unwrap();
    let mut all: Vec<String> = all.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    all.sort();
    all
}

#[test]
fn fixtures() {
    for (name, file) in MODELS {
        let out = run(&fixture(file), &fixture("../snapshots"), &[&CASE[..], &["--quiet"]].concat(), None);
        let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(0), "{name}: {said}");
    }
}

/// A snapshot's life: new, accepted, different, the same again; and what a reviewer sees of a fault.
#[test]
fn a_users_own_file() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("made");
    let model = fixture("models/glm5dims.Q4_K_M.gguf");
    let name = "glm5dims.Q4_K_M-layer1-absorbed-cpu.snap";
    let args = ["--layer", "1", "--form", "absorbed", "--regime", "random", "--batch", "0+3,65+1"];
    let run = |more: &[&str], environment: &[(&str, &str)]| {
        let out = run(&model, &dir, &[&args[..], more].concat(), Some(environment));
        (
            out.status.code().unwrap(),
            String::from_utf8(out.stdout).unwrap(),
            String::from_utf8(out.stderr).unwrap(),
        )
    };

    // Where nothing may be written, a folder that is not there is known before the work.
    let (code, stdout, stderr) = run(&[], &[("CI", "true")]);
    assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
    assert!(stderr.contains("where: --snapshot") && !dir.exists(), "{stderr}");

    // New: not a pass, though every tensor is clean.
    let (code, stdout, _) = run(&[], &[]);
    assert_eq!(code, 1, "{stdout}");
    assert!(
        stdout.contains(": rounding\n")
            && stdout.contains("snapshots: 1 new")
            && stdout.contains("cargo insta"),
        "{stdout}"
    );
    assert_eq!(names(&dir), [format!("{name}.new")]);

    // Accepted, as `cargo insta accept` does it; then it agrees wherever it runs.
    std::fs::rename(dir.join(format!("{name}.new")), dir.join(name)).unwrap();
    let (code, stdout, _) = run(&["--threads", "1"], &[("CI", "true")]);
    assert_eq!(code, 0, "{stdout}");
    assert!(stdout.contains("snapshots: 1 agree\n"), "{stdout}");

    // The crate itself reads it.
    let snapshot = insta::Snapshot::from_file(&dir.join(name)).unwrap();
    assert_eq!(snapshot.metadata().description(), Some("glm5dims.Q4_K_M, layer 1, absorbed"));
    let text = snapshot.as_text().unwrap().to_string();
    for part in [
        "model       glm5dims.Q4_K_M, glm-dsa\nlayer       1, form absorbed\nengine      cpu\n",
        "\nw_uk ",
        "\nprobe one-key: held\n",
    ] {
        assert!(text.contains(part), "{part:?}: {text}");
    }
    assert!(!text.contains("fused") && !text.contains('/'), "a path, or another form: {text}");

    // Another case, or a fault: a difference that is shown; what is bad in itself keeps its own exit code.
    let (code, stdout, _) = run(&["--seed", "1"], &[("CI", "true")]);
    assert_eq!((code, names(&dir)), (1, vec![name.to_string()]), "{stdout}");
    assert!(
        stdout.contains("    - case        seed 0") && stdout.contains("    + case        seed 1"),
        "{stdout}"
    );
    let (code, stdout, _) = run(&["--fault", "softmax-scale=1.1", "--format", "json"], &[]);
    assert_eq!(code, 1);
    let report: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let kept = &report["snapshots"][0];
    assert_eq!(
        (&report["exit"], kept["state"].as_str(), kept["accepted"].as_bool()),
        (&serde_json::json!(1), Some("differs"), Some(false))
    );
    let text = std::fs::read_to_string(dir.join(format!("{name}.new"))).unwrap();
    assert!(text.contains("\nfault       softmax-scale=1.1 (deliberate)\n"), "{text}");
    let (verdicts, _) = text.split_once("\nfloat64 reference").unwrap();
    let lse: Vec<&str> = verdicts.lines().filter(|l| l.starts_with("lse ")).collect();
    // The cause, and not the factor that was fitted to the engine's bits.
    assert!(lse.iter().all(|l| l.contains(" fault ") && l.ends_with(": softmax scale")), "{lse:?}");
    // The reference knows nothing of the engine's fault.
    let reference = |t: &str| t.split_once("\nfloat64 reference").unwrap().1.to_string();
    assert_eq!(reference(&text), reference(&std::fs::read_to_string(dir.join(name)).unwrap()));

    // Clean again: what was pending is no longer true.
    let (code, ..) = run(&[], &[]);
    assert_eq!((code, names(&dir)), (0, vec![name.to_string()]));
    // Accepted on the way.
    let (code, ..) = run(&["--seed", "1"], &[("INSTA_UPDATE", "always")]);
    assert_eq!((code, names(&dir)), (0, vec![name.to_string()]));
    assert!(std::fs::read_to_string(dir.join(name)).unwrap().contains("seed 1"));
}

#[test]
fn what_can_not_be_is_said_before_the_work() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let model = fixture("models/glm5dims.Q4_K_M.gguf");
    let refused = |dir: &Path, args: &[&str], environment: &[(&str, &str)], code, part| {
        let out = run(&model, dir, args, Some(environment));
        let said = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(code), "{said}");
        assert!(said.contains(part) && out.stdout.is_empty(), "{said}");
        assert_eq!(names(folder.path()), ["file"]);
    };
    refused(&file, &[], &[], 2, "where: --snapshot");
    refused(folder.path(), &[], &[("INSTA_UPDATE", "perhaps")], 2, "INSTA_UPDATE=perhaps");
    refused(folder.path(), &["--bisect"], &[], 128, "cannot be used with");
}

/// What README shows: the first screen of a clean run and of one with a planted fault.
#[test]
fn first_screens() {
    for (name, args, exit) in [
        ("run", &["run", "fixtures/models/glm5dims.Q4_K_M.gguf"][..], 0),
        ("run-fault", &["run", "fixtures/models/glm5dims.Q4_K_M.gguf", "--fault", "k_b-element"][..], 1),
    ] {
        let out = Command::new(env!("CARGO_BIN_EXE_mla-check"))
            .args(args)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env("RUST_BACKTRACE", "0")
            // The same screens where there is a GPU.
            .env("CUDA_VISIBLE_DEVICES", "")
            .env_remove("MLA_CHECK_REQUIRE_GPU")
            .output()
            .unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        assert_eq!(out.status.code(), Some(exit), "{text}");
        // Times differ from run to run; nothing else may.
        let kept: Vec<&str> =
            text.lines().map(|l| if l.ends_with(" s") && l.len() < 9 { "[time]" } else { l }).collect();
        settings().bind(|| insta::assert_snapshot!(name, kept.join("\n")));
    }
}

/// README shows what the program prints: the whole clean run, and the top of the one with a planted fault.
#[test]
fn readme_is_true() {
    let readme = std::fs::read_to_string(fixture("../README.md")).unwrap();
    for (name, command) in [
        ("run", "$ cargo run -- run fixtures/models/glm5dims.Q4_K_M.gguf\n"),
        ("run-fault", "$ cargo run -- run fixtures/models/glm5dims.Q4_K_M.gguf --fault k_b-element\n"),
    ] {
        let (_, shown) = readme.split_once(command).unwrap_or_else(|| panic!("README lacks {command}"));
        let (shown, _) = shown.split_once("```").unwrap();
        let snapshot = std::fs::read_to_string(fixture(&format!("../snapshots/{name}.snap"))).unwrap();
        let printed = snapshot.splitn(3, "---\n").nth(2).unwrap();
        let times = |l: &&str| !(l.ends_with(" s") && l.len() < 9 || *l == "[time]");
        let shown: Vec<&str> = shown.lines().filter(times).collect();
        let printed: Vec<&str> = printed.lines().filter(times).take(shown.len()).collect();
        assert_eq!(shown, printed, "{name}");
        assert!(shown.len() > 10);
    }
}

/// Snapshots that no test writes any more would be reviewed by nobody.
#[test]
fn no_orphans() {
    let mut expected = vec!["run-fault.snap".to_string(), "run.snap".to_string()];
    for (name, file) in MODELS {
        for layer in Model::open(&fixture(file)).unwrap().mla_layers() {
            expected.extend(["absorbed", "fused"].map(|form| format!("{name}-layer{layer}-{form}-cpu.snap")));
        }
    }
    expected.sort();
    let mut found = names(&fixture("../snapshots"));
    found.retain(|n| n.ends_with(".snap"));
    assert_eq!(found, expected);
}

/// The length of the session decides between two sets of rope factors, so it is part of what a snapshot is of.
#[test]
fn the_length_of_the_session_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixture("architectures/minicpm3dims.Q4_K_M.gguf");
    let args = ["--form", "fused", "--regime", "random", "--batch", "0+2"];
    for (more, wanted) in [
        (&[][..], "convention  hf\n"),
        (&["--n-ctx", "40000"], "convention  hf, a session of 40000 positions\n"),
    ] {
        let dir = folder.path().join(more.len().to_string());
        run(&model, &dir, &[&args[..], more].concat(), Some(&[]));
        let text =
            std::fs::read_to_string(dir.join("minicpm3dims.Q4_K_M-layer0-fused-cpu.snap.new")).unwrap();
        assert!(text.contains(wanted), "{text}");
    }
}
