/*! `run --fault kernel:NAME` as people use it: where it can't be planted, where nothing holds the text, and what a report says. */

mod common;
#[path = "common/nvrtc.rs"]
mod environment;

use common::fixture;
use mla_check::engine::kernels::library::Library;
use mla_check::fault::text::{PREFIX, by_name};
use std::process::{Command, Output, Stdio};

const MODEL: &str = "models/dsv3.Q4_K_M-00002-of-00003.gguf";
/// Short: the PTX machine takes its time.
const SHORT: [&str; 8] = ["--batch", "0+2", "--form", "absorbed", "--regime", "random", "--splits", "1"];

/// The fault asked for, with NVRTC in this place.
fn run(name: &str, args: &[&str], nvrtc: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mla-check"));
    command
        .arg("run")
        .arg(fixture(MODEL))
        .args(SHORT)
        .args(["--fault", &format!("{PREFIX}{name}")])
        .args(args);
    command.env("RUST_BACKTRACE", "0").env_remove("MLA_CHECK_REQUIRE_GPU").env("CUDA_VISIBLE_DEVICES", "");
    if let Some(place) = nvrtc {
        command.env("MLA_CHECK_NVRTC", place);
    }
    command.stdin(Stdio::null()).output().unwrap()
}

/// Ends with this code, and says all of this.
fn says(out: &Output, code: i32, parts: &[&str]) {
    let text = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{text}");
    for part in parts {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn an_engine_without_kernels_and_a_name_that_is_none_are_refused() {
    let cpu = run("norm-weight-left-out", &["--engine", "cpu"], None);
    says(
        &cpu,
        2,
        &["engine cpu runs no kernel files", "--fault kernel:norm-weight-left-out", "--engine ptx"],
    );
    let none = run("nope", &["--engine", "ptx"], None);
    says(&none, 2, &["'nope' is no fault inside a kernel", "--fault kernel:nope", "norm-weight-left-out"]);
    let dtype = run("fused-f32-scale", &["--engine", "ptx"], None);
    says(&dtype, 2, &["no kernel of a run in bf16 is fused_f32.cu", "--dtype f32"]);
}

/// A folder of the user's has other texts.
#[test]
fn a_text_that_is_gone_is_named_with_its_kernel() {
    let m = by_name("norm-weight-left-out").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let own = Library::built_in().unwrap();
    let text = &own.file(m.kernel).unwrap().source.text;
    std::fs::write(folder.path().join(m.kernel), text.replace(m.from, "narrow(widen(x[i]))")).unwrap();
    let place = folder.path().to_str().unwrap();
    let out = run(m.name, &["--engine", "ptx", "--kernels", place], None);
    says(
        &out,
        2,
        &["the text that it replaces is gone", "norm.cu", place, m.from, "  do: take --kernels away"],
    );
}

/// No compiler is needed for a file that is not run.
#[test]
fn a_run_that_no_text_of_a_fault_had_part_in_is_refused() {
    let out = run("merge-base-2", &["--engine", "ptx"], Some("/absent"));
    says(&out, 2, &["no kernel that holds this text of merge.cu ran", "--batch 100+1,70+1 --splits 3"]);
    let out = run("q8-1-codes-of-the-sum", &["--engine", "ptx"], Some("/absent"));
    says(&out, 2, &["dequant_wide.cu ran", "weights of type Q8_1"]);
}

#[test]
fn without_a_compiler_it_says_what_to_install() {
    let out = run("norm-weight-left-out", &["--engine", "ptx"], Some("/absent"));
    says(&out, 5, &["libnvrtc.so", "/absent", "\n  do: "]);
}

#[test]
fn a_report_says_what_was_planted_and_what_came_of_it() {
    let Some(_) = environment::nvrtc("a_report_says_what_was_planted_and_what_came_of_it") else { return };
    let out = run("norm-weight-left-out", &["--engine", "ptx"], None);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    // Lines are broken at 80 columns.
    let text = String::from_utf8_lossy(&out.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "DELIBERATE FAULT kernel:norm-weight-left-out",
        "norm.cu altered on purpose",
        "weight g_attn is left out",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
