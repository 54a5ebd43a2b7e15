/*!
The matrix as people run it: what is skipped, what fails, what is written down, with which exit code.

This binary runs itself again: as the program's matrix, or as that of a kernel author with an engine of their own.
*/

#[path = "common/matrix.rs"]
mod matrix;

use libtest_mimic::{Arguments, Trial};
use mla_check::check::Options;
use mla_check::engine::cpu::{CpuEngine, Gain, Seams};
use mla_check::engine::{Engine, EngineError};
use mla_check::harness::{Harness, Source};
use mla_numeric::DType;
use mla_reference::{Form, Stage};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// What the process is to be instead of tests: `program`, or what an author's engine does.
const INSIDE: &str = "MLA_CHECK_INSIDE_MATRIX";
/// Requests of the author's.
const REQUESTS: &str = "0+3,64+3,0+1,65+1";
/// Two layers, one form, two phases.
const CASES: usize = 4;

fn main() -> ExitCode {
    match std::env::var(INSIDE).as_deref() {
        Ok("program") => return matrix::harness().main(),
        Ok(what) => return author(what).main(),
        Err(_) => {}
    }
    type Test = fn(&Path);
    let tests: [(&str, Test); 13] = [
        ("gpu_cases_are_skipped_by_name", gpu_cases_are_skipped_by_name),
        ("a_required_gpu_is_a_failure", a_required_gpu_is_a_failure),
        ("a_floor_is_a_failure_where_nothing_ran", a_floor_is_a_failure_where_nothing_ran),
        ("gpu_cases_that_ran_are_counted", gpu_cases_that_ran_are_counted),
        ("under_nextest_somebody_must_count", under_nextest_somebody_must_count),
        ("every_case_writes_its_report", every_case_writes_its_report),
        ("a_fault_fails_with_its_tensor", a_fault_fails_with_its_tensor),
        ("an_engine_that_breaks_fails_with_its_error", an_engine_that_breaks_fails_with_its_error),
        ("a_case_that_hangs_is_ended", a_case_that_hangs_is_ended),
        ("a_case_that_dies_takes_no_other_with_it", a_case_that_dies_takes_no_other_with_it),
        ("a_limit_that_is_none_is_a_failure", a_limit_that_is_none_is_a_failure),
        ("the_user_s_models_join", the_user_s_models_join),
        ("what_can_not_be_read_fails_by_name", what_can_not_be_read_fails_by_name),
    ];
    let trials = tests.into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            test(tempfile::tempdir().map_err(|e| e.to_string())?.path());
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

/// A kernel author's matrix: one engine that says it is on a GPU, one model.
fn author(what: &str) -> Harness {
    let gain = (what == "wrong").then_some(Gain { stage: Stage::AttnOut, head: None, factor: 1.02 });
    let what = what.to_string();
    let make = move |options: &Options| -> Result<Box<dyn Engine>, EngineError> {
        if what == "breaks" {
            return Err(EngineError::Broke("the kernel hung\n  where: mine\n  do: mend it".into()));
        }
        let prefill = options.batch.0.iter().any(|r| r.new > 1);
        match what.as_str() {
            "hangs" if prefill => loop {
                std::thread::park();
            },
            "hangs" => {
                return Err(EngineError::Broke("here it only breaks\n  where: mine\n  do: mend it".into()));
            }
            "dies" if prefill => {
                let _ = std::io::stderr().write_all(b"its last words\n");
                std::process::abort();
            }
            _ => {}
        }
        let mut engine = CpuEngine::new(options.dtype, options.splits());
        engine.seams = Seams { gain, ..Seams::default() };
        Ok(Box::new(engine))
    };
    let mine = Source::new("my kernels", &[DType::Bf16], make)
        .on_gpu(None)
        .forms(&[Form::Absorbed])
        .batch(REQUESTS.parse().unwrap());
    Harness::new().model(glm()).engine(mine)
}

fn glm() -> PathBuf {
    matrix::models().join("glm5dims.Q4_K_M.gguf")
}

/// Runs the matrix; gives its exit code and all that it printed.
fn run(inside: &str, arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("MLA_CHECK_")) {
        command.env_remove(name);
    }
    // No GPU, also where there is one.
    command.env_remove("NEXTEST").env("CUDA_VISIBLE_DEVICES", "").env("RUST_BACKTRACE", "0");
    command.env(INSIDE, inside).args(["--color", "never"]).args(arguments);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.code(), text + &String::from_utf8_lossy(&output.stderr))
}

/// A compiler that is not there.
const NO_COMPILER: (&str, &str) = ("MLA_CHECK_NVRTC", "none/libnvrtc.so");

/// No case of an engine that computes here.
const NONE_HERE: [&str; 6] = ["--skip", "cpu::", "--skip", "ptx::", "--skip", "reference::"];

fn reports(folder: &Path) -> Vec<(String, serde_json::Value)> {
    let mut all: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| {
            let path = e.unwrap().path();
            let value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            (path.file_name().unwrap().to_string_lossy().into_owned(), value)
        })
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn gpu_cases_are_skipped_by_name(_: &Path) {
    let (code, all) = run("program", &["--list"], &[]);
    assert_eq!(code, Some(0), "{all}");
    // 2 models × 2 layers × 2 phases × (reference 1, cpu, ptx and cuda 3 dtypes × 2 forms).
    let tests: Vec<&str> = all.lines().filter(|l| l.ends_with(": test")).collect();
    assert_eq!(tests.len(), 152, "{all}");
    let ignored_by = |test: &str| {
        let (code, ignored) = run("program", &["--list", "--ignored", test], &[NO_COMPILER]);
        assert_eq!(code, Some(0), "{ignored}");
        (ignored.lines().filter(|l| l.ends_with(": test")).count(), ignored)
    };
    let (count, ignored) = ignored_by("cuda::");
    assert_eq!(count, 48, "{ignored}");
    assert!(ignored.lines().all(|l| !l.ends_with(": test") || l.contains("[skipped: ")), "{ignored}");
    // What has to be compiled for the PTX machine: all but bf16.
    let (count, ignored) = ignored_by("ptx::");
    assert_eq!(count, 32, "{ignored}");
    assert!(!ignored.contains("::bf16::") && ignored.contains("there is no NVRTC library here"), "{ignored}");
    assert!(ignored.lines().all(|l| !l.ends_with(": test") || l.contains("[skipped: ")), "{ignored}");
    let name = "cuda::dsv3.Q4_K_M::layer1::bf16::fused::decode";
    let (code, text) = run("program", &[name], &[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("0 passed; 0 failed; 1 ignored"), "{text}");
    let line = text.lines().find(|l| l.contains(name));
    assert!(line.is_some_and(|l| l.contains("[skipped: ") && l.contains("ignored")), "{text}");
}

fn a_required_gpu_is_a_failure(_: &Path) {
    let (code, text) = run("program", &NONE_HERE, &[("MLA_CHECK_REQUIRE_GPU", "1")]);
    assert_eq!(code, Some(101), "{text}");
    assert!(text.contains("0 passed; 48 failed; 0 ignored"), "{text}");
    assert!(text.contains("MLA_CHECK_REQUIRE_GPU=1, but "), "{text}");
}

fn a_floor_is_a_failure_where_nothing_ran(_: &Path) {
    for (floor, expected, says) in [
        ("0", 0, ""),
        ("1", 101, "error: 0 GPU cases ran, fewer than the floor of 1\n  where: MLA_CHECK_GPU_FLOOR=1\n"),
        ("many", 101, "the floor of GPU cases is not a number"),
    ] {
        let (code, text) = run("program", &NONE_HERE, &[("MLA_CHECK_GPU_FLOOR", floor)]);
        assert_eq!(code, Some(expected), "{floor}: {text}");
        assert!(text.contains(says) && text.contains("48 ignored"), "{floor}: {text}");
    }
}

fn gpu_cases_that_ran_are_counted(_: &Path) {
    let (code, text) = run("right", &[], &[("MLA_CHECK_REQUIRE_GPU", "1")]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains(&format!("{CASES} passed; 0 failed; 0 ignored")), "{text}");
    let (all, more) = (CASES.to_string(), (CASES + 1).to_string());
    let (code, text) = run("right", &["layer0"], &[("MLA_CHECK_GPU_FLOOR", &all)]);
    assert_eq!(code, Some(101), "{text}");
    assert!(text.contains(&format!("2 GPU cases ran, fewer than the floor of {CASES}")), "{text}");
    // Chosen by name, and nobody asked for a number: what ran is enough.
    let (code, text) = run("right", &["layer0"], &[("MLA_CHECK_REQUIRE_GPU", "1")]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = run("right", &["decode"], &[("MLA_CHECK_GPU_FLOOR", &more)]);
    assert_eq!(code, Some(101), "{text}");
}

fn under_nextest_somebody_must_count(folder: &Path) {
    let test = "environment::MLA_CHECK_GPU_FLOOR";
    let nextest = [("NEXTEST", "1"), ("MLA_CHECK_GPU_FLOOR", "3")];
    let (code, text) = run("program", &["--exact", test], &nextest);
    assert_eq!(code, Some(101), "{text}");
    assert!(text.contains("merge DIR --gpu-floor 3"), "{text}");
    let folder = folder.display().to_string();
    let counted = [nextest[0], nextest[1], ("MLA_CHECK_REPORTS", folder.as_str())];
    let (code, text) = run("program", &NONE_HERE, &counted);
    assert_eq!(code, Some(0), "{text}");
    assert!(!text.contains(test), "{text}");
}

fn every_case_writes_its_report(folder: &Path) {
    let folder = folder.join("made");
    let place = folder.display().to_string();
    let (code, text) =
        run("program", &["cpu::glm5dims.Q4_K_M::layer1::bf16::absorbed"], &[("MLA_CHECK_REPORTS", &place)]);
    assert_eq!(code, Some(0), "{text}");
    let all = reports(&folder);
    let names: Vec<&str> = all.iter().map(|r| r.0.as_str()).collect();
    let phases = ["decode", "prefill"];
    assert_eq!(names, phases.map(|p| format!("cpu+glm5dims.Q4_K_M+layer1+bf16+absorbed+{p}.json")));
    for ((_, report), phase) in all.iter().zip(phases) {
        assert_eq!(report["schema"], "mla-check.run/1");
        assert_eq!((&report["verdict"], &report["exit"]), (&"rounding".into(), &0.into()));
        let layer = &report["layers"][0];
        assert_eq!((&layer["layer"], &layer["engine"]["name"]), (&1.into(), &"cpu".into()));
        let units = layer["tensors"].as_array().unwrap();
        for u in units {
            assert!(u["phase"].is_null() || u["phase"] == phase, "{u}");
            assert!(u["form"].is_null() || u["form"] == "absorbed", "{u}");
            assert!(u["verdict"] == "exact" || u["verdict"] == "rounding", "{u}");
            assert!(u["elements"].as_u64().unwrap() > 0, "{u}");
        }
        for tensor in ["attn_in", "q", "k_pe", "o_latent", "lse", "attn_out", "out"] {
            assert!(units.iter().any(|u| u["tensor"] == tensor && u["phase"] == phase), "{tensor}");
        }
        // Keys of decode stand in two splits.
        assert_eq!(units.iter().any(|u| u["tensor"] == "part_o"), phase == "decode");
        // The command repeats it.
        let command = report["command"].as_str().unwrap();
        let mut words = shlex::split(command).unwrap().into_iter();
        assert_eq!(words.next().as_deref(), Some("mla-check"), "{command}");
        let again = Command::new(env!("CARGO_BIN_EXE_mla-check"))
            .args(words)
            .args(["--format", "json"])
            .output()
            .unwrap();
        let again: serde_json::Value = serde_json::from_slice(&again.stdout).unwrap();
        let digest = |r: &serde_json::Value| {
            let units = r["layers"][0]["tensors"].as_array().unwrap();
            units.iter().map(|u| u["engine"].clone()).collect::<Vec<_>>()
        };
        assert_eq!(digest(report), digest(&again), "{command}");
    }
}

fn a_fault_fails_with_its_tensor(folder: &Path) {
    let place = folder.display().to_string();
    let test = "my_kernels::glm5dims.Q4_K_M::layer0::bf16::absorbed::decode";
    let (code, text) = run("wrong", &["--exact", test], &[("MLA_CHECK_REPORTS", &place)]);
    assert_eq!(code, Some(101), "{text}");
    for part in ["layer 0 of 2, weights as stored: fault", "first bad: ", "Repeat with:\n", test] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains('\x1b'), "{text:?}");
    let all = reports(folder);
    assert_eq!((all.len(), &all[0].1["verdict"]), (1, &"fault".into()));
}

fn an_engine_that_breaks_fails_with_its_error(folder: &Path) {
    let place = folder.display().to_string();
    let (code, text) =
        run("breaks", &["decode"], &[("MLA_CHECK_REPORTS", &place), ("MLA_CHECK_GPU_FLOOR", "1")]);
    assert_eq!(code, Some(101), "{text}");
    assert!(text.contains("the kernel hung\n  where: mine\n  do: mend it"), "{text}");
    // It was not judged: it does not count.
    assert!(text.contains("0 GPU cases ran"), "{text}");
    for (_, report) in reports(folder) {
        assert_eq!((&report["verdict"], report["layers"].as_array().unwrap().len()), (&"broke".into(), 0));
    }
}

/// The other case of the layer has a failure of its own.
fn a_case_that_hangs_is_ended(folder: &Path) {
    let place = folder.display().to_string();
    let variables =
        [("MLA_CHECK_REPORTS", place.as_str()), ("MLA_CHECK_CASE_LIMIT", "10"), ("MLA_CHECK_GPU_FLOOR", "1")];
    let (code, text) = run("hangs", &["layer0"], &variables);
    assert_eq!(code, Some(101), "{text}");
    let prefill = "my_kernels::glm5dims.Q4_K_M::layer0::bf16::absorbed::prefill";
    let says =
        format!("the case took longer than 10 s and was ended; a kernel may hang\n  where: {prefill}\n");
    assert!(text.contains("0 passed; 2 failed") && text.contains(&says), "{text}");
    assert!(text.contains("here it only breaks\n  where: mine\n"), "{text}");
    assert!(text.contains("0 GPU cases ran, fewer than the floor of 1"), "{text}");
    let verdicts: Vec<_> = reports(folder).into_iter().map(|(_, r)| r["verdict"].clone()).collect();
    assert_eq!(verdicts, ["broke", "broke"]);
}

fn a_case_that_dies_takes_no_other_with_it(folder: &Path) {
    let place = folder.display().to_string();
    let (code, text) = run("dies", &[], &[("MLA_CHECK_REPORTS", &place)]);
    assert_eq!(code, Some(101), "{text}");
    assert!(text.contains("2 passed; 2 failed") && text.contains("its last words"), "{text}");
    if cfg!(unix) {
        assert!(text.contains("the case's process ended by signal 6 without a result"), "{text}");
    }
    let verdicts: Vec<_> = reports(folder).into_iter().map(|(_, r)| r["verdict"].clone()).collect();
    assert_eq!(verdicts, ["rounding", "broke", "rounding", "broke"]);
}

fn a_limit_that_is_none_is_a_failure(_: &Path) {
    let (code, text) = run("right", &["environment::"], &[("MLA_CHECK_CASE_LIMIT", "soon")]);
    assert_eq!(code, Some(101), "{text}");
    assert!(text.contains("environment::MLA_CHECK_CASE_LIMIT") && text.contains("1 failed"), "{text}");
}

fn the_user_s_models_join(_: &Path) {
    let file = glm().display().to_string();
    let list = |layers: &str| {
        let (code, text) = run(
            "program",
            &["--list", "Q4_K_M-2"],
            &[("MLA_CHECK_MODELS", &file), ("MLA_CHECK_LAYERS", layers)],
        );
        assert_eq!(code, Some(0), "{text}");
        text
    };
    // The first layer, by all engines but the emulated machine.
    let first = list("");
    assert!(first.contains("cpu::glm5dims.Q4_K_M-2::layer0::f32::fused::prefill: test"), "{first}");
    assert!(first.contains("cuda::glm5dims.Q4_K_M-2::layer0::"), "{first}");
    assert!(!first.contains("layer1") && !first.contains("ptx::"), "{first}");
    assert!(list("all").contains("layer1") && list("1..1").contains("layer1"));
    assert!(list("0..7").contains("unreadable::glm5dims.Q4_K_M-2: test"));
}

fn what_can_not_be_read_fails_by_name(folder: &Path) {
    let (models, empty, place) = (folder.join("models"), folder.join("empty"), folder.join("reports"));
    std::fs::create_dir(&models).unwrap();
    std::fs::create_dir(&empty).unwrap();
    std::fs::write(models.join("cut short.gguf"), "GGUF").unwrap();
    let both = std::env::join_paths([models, empty]).unwrap();
    let variables =
        [("MLA_CHECK_MODELS", both.to_str().unwrap()), ("MLA_CHECK_REPORTS", place.to_str().unwrap())];
    let (code, text) = run("program", &["unreadable::"], &variables);
    assert_eq!(code, Some(101), "{text}");
    assert!(text.contains("0 passed; 2 failed"), "{text}");
    for part in
        ["unreadable::cut_short ", "cut short.gguf", "unreadable::empty ", "the folder holds no .gguf file"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let names: Vec<String> = reports(&place).into_iter().map(|r| r.0).collect();
    assert_eq!(names, ["unreadable+cut_short.json", "unreadable+empty.json"]);
}
