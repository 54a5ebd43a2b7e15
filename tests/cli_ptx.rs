/*! `ptx` as people use it: figures where NVRTC is, a clear word where it is not. */

mod common;

use common::fixture;
use std::io::Write;
use std::process::{Command, Output};

/// Nothing of the machine's NVRTC, toolkits or Pythons is seen but what a test names.
fn ptx(args: &[&str], nvrtc: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mla-check"))
        .arg("ptx")
        .arg(fixture("nvrtc/small.cu"))
        .args(args)
        .env("RUST_BACKTRACE", "0")
        .env("MLA_CHECK_NVRTC", nvrtc)
        .output()
        .unwrap()
}

/// Not by println!: that is shown of failed tests only.
fn not_run(why: &str) {
    let _ = writeln!(std::io::stderr(), "NOT RUN: {why}");
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn without_nvrtc_it_says_what_to_install_and_exits_5() {
    let empty = tempfile::tempdir().unwrap();
    let place = empty.path().to_str().unwrap();
    for (args, nvrtc) in [(vec![], place), (vec!["--nvrtc", place], "/also/absent")] {
        let out = ptx(&args, nvrtc);
        assert_eq!(out.status.code(), Some(5), "{out:?}");
        assert!(out.stdout.is_empty());
        let text = said(&out);
        assert!(
            text.contains("no libnvrtc.so") && text.contains(place) && text.contains("\n  do: "),
            "{text}"
        );
    }
    // A search that finds nothing: the loader's own search can't be switched off, so only where it finds nothing.
    let out = Command::new(env!("CARGO_BIN_EXE_mla-check"))
        .arg("ptx")
        .arg(fixture("nvrtc/small.cu"))
        .env_clear()
        .env("PATH", place)
        .output()
        .unwrap();
    if out.status.code() == Some(0) {
        not_run("an NVRTC of the system was found: the message of its absence was not tried");
        return;
    }
    let text = said(&out);
    assert_eq!(out.status.code(), Some(5), "{text}");
    for part in ["was not found", "nvidia-cuda-nvrtc==13.0.*", "MLA_CHECK_NVRTC", "/usr/local/cuda"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn wrong_arguments_exit_2_and_say_what_is_right() {
    let cases = [
        (vec!["--target", "gpu"], "sm_120"),
        (vec!["-D", "1A=2"], "no name of a macro"),
        (vec!["--save", "x.ptx", "--target", "sm_90", "--target", "sm_120"], "--save writes one file"),
    ];
    for (args, word) in cases {
        let out = ptx(&args, "/absent");
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        assert!(said(&out).contains(word), "{}", said(&out));
    }
    let out = Command::new(env!("CARGO_BIN_EXE_mla-check")).args(["ptx", "/absent.cu"]).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(said(&out).contains("where: /absent.cu"), "{}", said(&out));
}

/// With `MLA_CHECK_NVRTC` set: figures of the recorded log, in text and JSON.
#[test]
fn figures_are_shown_against_the_targets_limits() {
    let Some(nvrtc) = std::env::var("MLA_CHECK_NVRTC").ok().filter(|v| !v.is_empty()) else {
        not_run("figures_are_shown_against_the_targets_limits: MLA_CHECK_NVRTC is not set");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("small.ptx");
    let out = ptx(&["--save", file.to_str().unwrap(), "--format", "json"], &nvrtc);
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let target = &report["targets"][0];
    assert_eq!(target["target"], "sm_120");
    assert_eq!(target["limits"]["shared_per_block"], 101_376);
    assert_eq!(target["kernels"][1]["kernel"], "crowded");
    assert_eq!(target["kernels"][1]["registers"], 64);
    assert!(target["kernels"][1]["spill_store_bytes"].as_u64().unwrap() > 0);
    assert!(std::fs::read_to_string(&file).unwrap().contains("\n.target sm_120\n"));
    let out = ptx(&["--target", "sm_90", "--target", "compute_120"], &nvrtc);
    let text = String::from_utf8(out.stdout).unwrap();
    for part in ["232448 bytes of shared memory", "crowded", " 232320 ", "compute_120  PTX", "no figures"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let broken = folder.path().join("broken.cu");
    std::fs::write(&broken, "extern \"C\" __global__ void f(int* p) { *p = x\x1b[2J; }").unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_mla-check")).arg("ptx").arg(&broken).output().unwrap();
    assert_eq!(out.status.code(), Some(4));
    assert!(said(&out).contains("broken.cu(1): error") && !said(&out).contains("\x1b[2J"), "{}", said(&out));
}
