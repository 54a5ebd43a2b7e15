/*! `ptx FILE.ptx` and `--launch`: what a PTX file holds and what its kernels do wrong, without NVRTC and GPU. */

mod common;

use common::fixture;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

fn ptx(file: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mla-check"));
    // NVRTC must not be looked for: one named that is absent would be an error.
    command.arg("ptx").arg(file).args(args).env("MLA_CHECK_NVRTC", "/absent").output().unwrap()
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

fn json(out: &Output) -> serde_json::Value {
    serde_json::from_slice(&out.stdout).unwrap()
}

/// A launch of `kernel` of add.ptx over eight values.
fn case(kernel: &str) -> String {
    format!(
        "kernel = \"{kernel}\"\ngrid = [1]\nblock = [32]\nargs = [\n  \
         {{ in = {{ name = \"x\", dtype = \"f32\", shape = [2, 4], fill = [0, 1, 2, 3, 4, 5, 6, 7] }} }},\n  \
         {{ out = {{ name = \"y\", dtype = \"f32\", shape = [8] }} }},\n  {{ u32 = 8 }},\n  {{ f32 = 0.5 }},\n]\n"
    )
}

/// `ptx add.ptx --launch` of a case of this text.
fn launch(text: &str, args: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("case.toml");
    std::fs::write(&file, text).unwrap();
    let mut all = vec!["--launch", file.to_str().unwrap()];
    all.extend(args);
    ptx(&fixture("ptx/add.ptx"), &all)
}

#[test]
fn a_ptx_file_is_shown_with_kernels_and_forms() {
    let out = ptx(&fixture("ptx/add.ptx"), &["--format", "json"]);
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    let report = json(&out);
    let target = &report["targets"][0];
    assert_eq!(target["target"], "compute_120");
    assert_eq!(target["limits"]["shared_per_block"], 101_376);
    let kernel = &target["ptx"]["kernels"][0];
    assert_eq!((&kernel["kernel"], &kernel["runs"]), (&"add".into(), &true.into()));
    let offsets: Vec<_> = kernel["parameters"].as_array().unwrap().iter().map(|p| &p["offset"]).collect();
    assert_eq!(offsets, [0, 8, 16, 20]);
    assert!(target["ptx"]["forms"].as_array().unwrap().iter().any(|f| f["form"] == "add.rn.f32"), "{report}");
    assert_eq!(target["ptx"]["unsupported"].as_array().unwrap().len(), 0);
    let text = String::from_utf8(ptx(&fixture("ptx/add.ptx"), &[]).stdout).unwrap();
    for part in ["kernel add(u64 add_param_0", "kernel add_short(", "add.rn.f32 x3"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_form_that_the_machine_does_not_run_is_named_with_its_line_and_exits_1() {
    let out = ptx(&fixture("ptx/unsupported.ptx"), &[]);
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    let text = String::from_utf8(out.stdout).unwrap();
    for part in [
        "line 8 (tiles): `wgmma.fence",
        "kernel tiles()  DOES NOT RUN",
        "fusible: 2 products or sums",
        "18, 19",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_clean_launch_shows_what_the_kernel_wrote() {
    let out = launch(&case("add"), &["--format", "json"]);
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    let report = json(&out);
    let launch = &report["targets"][0]["launch"];
    assert_eq!(launch["findings"].as_array().unwrap().len(), 0);
    let first = ["0.5", "1.5", "2.5", "3.5", "4.5", "5.5", "6.5", "7.5"];
    assert_eq!(launch["outputs"][0]["first"], serde_json::json!(first));
    let bytes: Vec<u8> = (0..8).flat_map(|i| (i as f32 + 0.5).to_le_bytes()).collect();
    let digest = mla_check::nvrtc::stamp::Hash::of(&bytes).to_string();
    assert_eq!(launch["outputs"][0]["digest"], digest);
    let text = String::from_utf8(launch_text(&case("add"))).unwrap();
    assert!(text.contains("no findings") && text.contains("output y: 32 bytes"), "{text}");
    // All eight values are shown: nothing follows. Of nine, the last is left out.
    assert!(flat(&text).contains("6.5, 7.5") && !text.contains("..."), "{text}");
    let nine = case("add")
        .replace("shape = [2, 4]", "shape = [9]")
        .replace("6, 7]", "6, 7, 8]")
        .replace("shape = [8]", "shape = [9]")
        .replace("u32 = 8", "u32 = 9");
    let text = String::from_utf8(launch_text(&nine)).unwrap();
    assert!(flat(&text).contains("6.5, 7.5, ..."), "{text}");
}

/// A .cu file is compiled and launched; findings name its lines.
#[test]
fn a_source_file_is_compiled_and_launched() {
    let Some(nvrtc) = std::env::var_os("MLA_CHECK_NVRTC").filter(|v| !v.is_empty()) else {
        assert!(
            std::env::var_os("MLA_CHECK_REQUIRE_NVRTC").is_none_or(|v| v != "1"),
            "MLA_CHECK_REQUIRE_NVRTC=1, but MLA_CHECK_NVRTC is not set"
        );
        let _ = writeln!(
            std::io::stderr(),
            "a_source_file_is_compiled_and_launched: NOT RUN, MLA_CHECK_NVRTC is not set"
        );
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = |kernel: &str| {
        let file = folder.path().join("case.toml");
        std::fs::write(&file, case(kernel)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_mla-check"));
        command.arg("ptx").arg(fixture("ptx/add.cu")).arg("--launch").arg(&file);
        command.args(["--target", "compute_120"]).env("MLA_CHECK_NVRTC", &nvrtc).output().unwrap()
    };
    let out = run("add");
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.contains("no findings") && flat(&text).contains("6.5, 7.5"), "{text}");
    let out = run("add_unguarded");
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    let text = String::from_utf8(out.stdout).unwrap();
    for part in ["NVRTC ", "global-out-of-bounds in add_unguarded", "source line 8 of add.cu, block"] {
        assert!(flat(&text).contains(part), "{part}: {text}");
    }
}

/// Without the breaks of lines.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn launch_text(text: &str) -> Vec<u8> {
    launch(text, &[]).stdout
}

#[test]
fn what_a_kernel_does_wrong_is_found_with_lines_lanes_and_buffer_and_exits_1() {
    let out = launch(&case("add_unguarded"), &[]);
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    let text = String::from_utf8(out.stdout).unwrap();
    for part in [
        "global-out-of-bounds in add_unguarded, PTX line",
        "source line 8 of add.cu, block",
        "lanes 0x00000100",
        "(x + 32)",
        "(y + 32)",
    ] {
        assert!(flat(&text).contains(part), "{part}: {text}");
    }
    let out = launch(&case("add_short"), &["--format", "json"]);
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    let findings = &json(&out)["targets"][0]["launch"]["findings"];
    assert_eq!(findings.as_array().unwrap().len(), 1);
    assert_eq!(findings[0]["kind"], "output-unwritten");
}

#[test]
fn a_bad_case_is_refused_with_what_is_allowed() {
    let good = case("add");
    let cases = [
        (good.replace("grid", "gird"), "expected one of `kernel`, `grid`, `block`"),
        (good.replace("out =", "output ="), "expected one of `in`, `out`, `inout`"),
        (good.replace("fill", "fil"), "expected one of `name`, `bytes`, `shape`, `dtype`, `fill`, `file`"),
        (good.replace("[2, 4]", "[9]"), "the values have 32 bytes, the buffer 36"),
        (good.replace("[0, 1, 2, 3, 4, 5, 6, 7]", "\"ones\""), "\"random SEED\""),
        (good.replace("fill = [0, 1, 2, 3, 4, 5, 6, 7]", "file = \"no.npy\""), "no.npy"),
        (good.replace("[32]", "[32, 1, 1, 1]"), "block has 4 numbers"),
        (good.replace("[32]", "[1025]"), "1 to 1024"),
        (good.replace("{ u32 = 8 },", ""), "3 arguments were given, but the kernel takes 4"),
        (good.replace("u32 = 8", "u64 = 8"), "at 16"),
        (good.replace("\"add\"", "\"sub\""), "there are: add, add_short, add_unguarded"),
        ("kernel".into(), "line 1"),
    ];
    for (text, word) in cases {
        let out = launch(&text, &[]);
        assert_eq!(out.status.code(), Some(2), "{text}\n{}", said(&out));
        assert!(said(&out).contains(word) && said(&out).contains("\n  do: "), "{word}: {}", said(&out));
        assert!(out.stdout.is_empty());
    }
}

#[test]
fn random_values_are_those_of_the_seed_and_npy_files_are_read() {
    let list = "[0, 1, 2, 3, 4, 5, 6, 7]";
    let digest = |text: &str| {
        let out = launch(text, &["--format", "json"]);
        assert_eq!(out.status.code(), Some(0), "{}", said(&out));
        json(&out)["targets"][0]["launch"]["outputs"][0]["digest"].as_str().unwrap().to_owned()
    };
    let random = |seed: &str| digest(&case("add").replace(list, &format!("\"random {seed}\"")));
    assert_eq!(random("1"), random("1"));
    assert_ne!(random("1"), random("2"));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.npy");
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (8,), }";
    let mut bytes = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    bytes.extend(format!("{header:<117}\n").into_bytes());
    bytes.extend((0..8).flat_map(|i| (i as f32).to_le_bytes()));
    std::fs::write(&file, bytes).unwrap();
    let of_file = case("add").replace(&format!("fill = {list}"), &format!("file = {file:?}"));
    assert_eq!(digest(&of_file), digest(&case("add")));
}

#[test]
fn what_is_no_ptx_exits_2_and_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.ptx");
    for text in ["int main() { return 0; }", "", "\u{1b}[2J"] {
        std::fs::write(&file, text).unwrap();
        let out = ptx(&file, &[]);
        assert_eq!(out.status.code(), Some(2), "{text}: {out:?}");
        assert!(said(&out).contains("a.ptx") && said(&out).contains("\n  do: "), "{}", said(&out));
        assert!(!said(&out).contains("\u{1b}[2J"));
    }
    let out = ptx(&fixture("ptx/add.ptx"), &["--target", "sm_90"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(said(&out).contains("a PTX file is not compiled"), "{}", said(&out));
}
