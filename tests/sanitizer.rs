/*!
Planted faults for compute-sanitizer: the PTX machine names each of them too, and `scripts/sanitize.sh` takes nothing for
clean or reported that is not. On a GPU the script itself is the test.
*/

#[path = "common/nvrtc.rs"]
mod environment;
#[path = "common/planted.rs"]
#[allow(dead_code)]
mod planted;

use mla_check::check::EngineKind;
use mla_check::report::LayerReport;
use mla_reference::{Form, Regime};
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A run on the PTX machine with a kernel file in which a line begins otherwise.
fn with(path: &str, line: &str, begins: &str, batch: &str, splits: usize) -> LayerReport {
    let path = root().join(path);
    let text = std::fs::read_to_string(&path).unwrap();
    let chosen = text.replacen(&format!("\n{line}"), &format!("\n{begins}"), 1);
    assert_eq!(chosen != text, line != begins);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(path.file_name().unwrap()), chosen).unwrap();
    planted::report(EngineKind::Ptx, planted::FILES[0], |o| {
        o.kernels = Some(folder.path().into());
        o.forms = vec![Form::Absorbed];
        o.regimes = vec![Regime::Random];
        o.batch = batch.parse().unwrap();
        o.splits = Some(splits);
    })
}

/// The norm of fixtures/sanitizer with this fault.
fn with_fault(number: u32) -> LayerReport {
    with("fixtures/sanitizer/norm.cu", "FAULT = 0 ", &format!("FAULT = {number} "), "0+3", 1)
}

#[test]
fn the_machine_names_each_planted_fault() {
    let Some(_) = environment::nvrtc("the_machine_names_each_planted_fault") else { return };
    let all = [
        (1, "memcheck", "global-out-of-bounds"),
        (2, "racecheck", "race-read-after-write"),
        (3, "initcheck", "global-uninitialised"),
        (4, "synccheck", "barrier-divergence"),
    ];
    for (number, tool, says) in all {
        let report = with_fault(number);
        assert!(mla_check::judge::origins(&report.tensors).next().is_some(), "{tool}: nothing was found");
        let (tensor, evidence) = planted::first(&report);
        assert!(tensor == "attn_in" && evidence.contains(says), "{tool}: {tensor}: {evidence}");
    }
}

/// So it is the fault that is found.
#[test]
fn without_a_fault_the_planted_kernel_is_right() {
    let Some(_) = environment::nvrtc("without_a_fault_the_planted_kernel_is_right") else { return };
    let report = with_fault(0);
    assert_eq!(mla_check::judge::origins(&report.tensors).count(), 0, "{:?}", report.verdict);
}

/// What racecheck is shown computes the same.
#[test]
fn every_lane_may_arrive() {
    let Some(_) = environment::nvrtc("every_lane_may_arrive") else { return };
    let arrivals = |n: u32| format!("constexpr u32 ARRIVALS = {n};");
    let report = with("kernels/absorbed.cu", &arrivals(1), &arrivals(32), "64+3,0+1,65+1", 2);
    assert_eq!(mla_check::judge::origins(&report.tensors).count(), 0, "{:?}", report.verdict);
}

/// The script with a sanitizer and a program that are shell scripts of ours.
#[cfg(unix)]
fn script(sanitizer: Option<&str>, program: &str) -> (Option<i32>, String) {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| -> PathBuf {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    let sanitizer = match sanitizer {
        Some(text) => write("sanitizer", text),
        None => folder.path().join("none"),
    };
    let output = Command::new("bash")
        .arg(root().join("scripts/sanitize.sh"))
        .env("COMPUTE_SANITIZER", sanitizer)
        .env("MLA_CHECK", write("program", program))
        .env_remove("KERNELS")
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

#[cfg(unix)]
#[test]
fn the_script_passes_where_all_is_as_expected_and_nowhere_else() {
    let (code, text) = script(None, "exit 0");
    assert_eq!(code, Some(5), "{text}");
    assert!(
        text.contains("compute-sanitizer is not there") && text.contains("nothing was looked at"),
        "{text}"
    );
    let (code, text) = script(Some("exit 0"), "exit 5");
    assert_eq!(code, Some(5), "{text}");
    assert!(text.contains("no GPU answers"), "{text}");
    // A sanitizer that reports planted faults alone; one that reports nothing, everything, one fault too few; a run that fails.
    let right = r#"case "$*" in */planted/*) exit 86;; esac; exit 0"#;
    let few = r#"case "$*" in *synccheck*) exit 0;; */planted/*) exit 86;; esac; exit 0"#;
    for (sanitizer, expected, wrong) in
        [(right, 0, 0), ("exit 0", 1, 4), ("exit 86", 1, 16), (few, 1, 1), ("exit 1", 1, 20)]
    {
        let (code, text) = script(Some(sanitizer), "exit 0");
        assert_eq!(code, Some(expected), "{sanitizer}: {text}");
        assert_eq!(text.matches(" NOT: ").count(), wrong, "{sanitizer}: {text}");
        assert_eq!(text.matches("as expected").count(), 20 - wrong, "{sanitizer}: {text}");
    }
    // The engine is missing after all.
    assert_eq!(script(Some("exit 5"), "exit 0").0, Some(5));
}

/// Every run is without fills and guards, under each of the tools, and with the built-in kernels; racecheck sees every lane arrive.
#[cfg(unix)]
#[test]
fn the_script_looks_at_bare_memory_with_every_tool() {
    let bare = r#"case "$*" in *--no-poison*--no-guards*) ;; *) exit 3;; esac
case "$*" in */planted/*) exit 86;; *racecheck*/every-lane*) ;; *racecheck*) exit 3;; *--kernels*) exit 3;; esac"#;
    let (code, text) = script(Some(bare), "exit 0");
    assert_eq!(code, Some(0), "{text}");
    for tool in ["memcheck", "racecheck", "initcheck", "synccheck"] {
        assert_eq!(text.lines().filter(|l| l.starts_with(tool)).count(), 5, "{tool}: {text}");
    }
}
