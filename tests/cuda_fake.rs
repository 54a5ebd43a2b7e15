/*!
The GPU's tests, and `mla-check devices`, on a libcuda that is none (`fake_cuda/lib.rs`, compiled here): what the program
makes of a driver's answers can be tested without a GPU. What a GPU does can't.
*/

#[path = "common/nvrtc.rs"]
mod environment;
#[path = "common/gpu.rs"]
mod gpu;

use libtest_mimic::{Arguments, Trial};
use std::path::Path;
use std::process::{Command, ExitCode, Output};

/// Set where this binary runs as the GPU's tests.
const INSIDE: &str = "MLA_CHECK_INSIDE_FAKE";

fn main() -> ExitCode {
    if std::env::var_os(INSIDE).is_some() {
        return gpu::main();
    }
    let arguments = Arguments::from_args();
    type Test = fn(&Path);
    let tests: [(&str, Test); 9] = [
        ("gpu_tests_pass_on_it", gpu_tests_pass_on_it),
        ("gpu_tests_are_skipped_by_name", gpu_tests_are_skipped_by_name),
        ("a_required_gpu_is_a_failure", a_required_gpu_is_a_failure),
        ("devices_says_what_is_missing", devices_says_what_is_missing),
        ("devices_lists_gpus", devices_lists_gpus),
        ("a_kernel_that_hangs_is_named_and_ends_the_run", a_kernel_that_hangs_is_named_and_ends_the_run),
        ("a_layer_that_breaks_takes_no_other_with_it", a_layer_that_breaks_takes_no_other_with_it),
        ("a_variant_that_breaks_is_told", a_variant_that_breaks_is_told),
        ("bare_memory_is_not_filled", bare_memory_is_not_filled),
    ];
    let trials = tests.into_iter().map(|(name, test)| {
        let run = move || {
            let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
            if cfg!(target_os = "linux") {
                test(folder.path());
            }
            Ok(())
        };
        Trial::test(name, run)
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// The library, in a folder of its own.
fn library(folder: &Path, name: &str) {
    let rustc = std::env::var_os("RUSTC").unwrap_or("rustc".into());
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_cuda/lib.rs");
    let built = Command::new(rustc)
        .args(["--edition", "2024", "--crate-type", "cdylib", "-o"])
        .arg(folder.join(name))
        .arg(source)
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

/// This binary as the GPU's tests, or the program, with libraries of this folder.
fn run(folder: &Path, program: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(program);
    for name in ["CUDA_VISIBLE_DEVICES", "MLA_CHECK_REQUIRE_GPU", "MLA_CHECK_REQUIRE_NVRTC", "FAKE_CUDA"] {
        command.env_remove(name);
    }
    command.env("LD_LIBRARY_PATH", folder).env("RUST_BACKTRACE", "0").env(INSIDE, "1");
    command.args(arguments).envs(variables.iter().copied()).output().unwrap()
}

fn tests(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let output = run(folder, &std::env::current_exe().unwrap(), arguments, variables);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.code(), text + &String::from_utf8_lossy(&output.stderr))
}

fn gpu_tests_pass_on_it(folder: &Path) {
    library(folder, "libcuda.so.1");
    // It runs the kernels of device tests, none of the engine's.
    let skipped: Vec<&str> = gpu::of_engine().flat_map(|name| ["--skip", name]).collect();
    let (code, text) = tests(folder, &skipped, &[("MLA_CHECK_REQUIRE_GPU", "1")]);
    assert_eq!(code, Some(0), "{text}");
    // One of them needs NVRTC.
    let all = ["18 passed; 0 failed; 0 ignored", "17 passed; 0 failed; 1 ignored"];
    assert!(all.iter().any(|a| text.contains(a)), "{text}");
}

/// A machine's own driver is hidden by a library that is none.
fn no_driver(folder: &Path) {
    std::fs::write(folder.join("libcuda.so.1"), "no library").unwrap();
    std::fs::write(folder.join("libcuda.so"), "no library").unwrap();
}

fn gpu_tests_are_skipped_by_name(folder: &Path) {
    library(folder, "libcuda.so.1");
    let reasons = [
        ("stub", "skipped: the libcuda that was found is a stub for linking, and no driver"),
        ("none", "skipped: NVIDIA's driver is there, but offers no GPU: CUDA_ERROR_NO_DEVICE, a text"),
    ];
    for (fake, reason) in reasons {
        let (code, text) = tests(folder, &[], &[("FAKE_CUDA", fake)]);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains(&format!("0 passed; 0 failed; {} ignored", gpu::COUNT)), "{text}");
        for name in gpu::on_device::ALL.map(|t| t.0).into_iter().chain(["guards", "hung_kernel"]) {
            let line = text.lines().find(|l| l.contains(&format!("] {name} ")));
            assert!(line.is_some_and(|l| l.contains(reason) && l.contains("ignored")), "{name}: {text}");
        }
    }
}

fn a_required_gpu_is_a_failure(folder: &Path) {
    no_driver(folder);
    if Path::new("/dev/nvidiactl").exists() {
        return; // the loader goes on to the machine's own libcuda
    }
    let (code, text) = tests(folder, &[], &[("MLA_CHECK_REQUIRE_GPU", "1")]);
    assert_eq!(code, Some(101), "{text}");
    assert!(
        text.contains(&format!("{} failed", gpu::COUNT))
            && text.contains("MLA_CHECK_REQUIRE_GPU=1, but libcuda"),
        "{text}"
    );
}

fn devices(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let program = Path::new(env!("CARGO_BIN_EXE_mla-check"));
    let output = run(folder, program, &[&["devices"], arguments].concat(), variables);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
    assert!(!text.contains('\x1b'), "{text:?}");
    let text = text + &String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text.split_whitespace().collect::<Vec<_>>().join(" "))
}

fn devices_says_what_is_missing(folder: &Path) {
    library(folder, "libcuda.so");
    for (fake, what, advice) in [
        ("stub", "is a stub for linking, and no driver", "take the toolkit's folder `stubs` out of"),
        ("none", "offers no GPU: CUDA_ERROR_NO_DEVICE", "see whether `nvidia-smi` lists one"),
    ] {
        let (code, text) = devices(folder, &[], &[("FAKE_CUDA", fake)]);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains(what) && text.contains(advice), "{text}");
        assert!(text.contains("libcuda.so"), "{text}");
        let (code, text) = devices(folder, &["--gpu", "0"], &[("FAKE_CUDA", fake)]);
        assert_eq!(code, Some(5), "{text}");
        let (code, text) = devices(folder, &[], &[("FAKE_CUDA", fake), ("MLA_CHECK_REQUIRE_GPU", "1")]);
        assert_eq!(code, Some(5), "{text}");
    }
    // A library with none of the functions.
    let libm = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/libm.so.6", "/usr/lib/libm.so.6"];
    if let Some(libm) = libm.iter().find(|p| Path::new(p).exists()) {
        std::fs::copy(libm, folder.join("libcuda.so")).unwrap();
        let (code, text) = devices(folder, &["--gpu", "0"], &[]);
        assert_eq!(code, Some(5), "{text}");
        assert!(text.contains("the driver has no function cuInit"), "{text}");
    }
    no_driver(folder);
    if Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let (code, text) = devices(folder, &[], &[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("libcuda, the library of NVIDIA's driver, was not found"), "{text}");
    assert!(text.contains("install NVIDIA's driver") && text.contains("GPUs none"), "{text}");
    let (code, _) = devices(folder, &["--gpu", "0"], &[]);
    assert_eq!(code, Some(5));
}

fn devices_lists_gpus(folder: &Path) {
    library(folder, "libcuda.so.1");
    let nowhere = folder.join("none").display().to_string();
    let (code, text) = devices(folder, &["--gpu", "0"], &[("MLA_CHECK_NVRTC", &nowhere)]);
    assert_eq!(code, Some(0), "{text}");
    for part in [
        "for CUDA 13.0",
        "0 Fake H200\\u{1b}, compute capability 9.0 (sm_90, known), 139.0 GiB",
        "227.0 KiB of shared memory a block",
        "pip install",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (code, text) = devices(folder, &["--gpu", "1"], &[]);
    assert_eq!(code, Some(5), "{text}");
    assert!(text.contains("there is no GPU 1; the driver has 1"), "{text}");
    let program = Path::new(env!("CARGO_BIN_EXE_mla-check"));
    let json = run(folder, program, &["devices", "--format", "json"], &[]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let gpu = &json["driver"]["gpus"][0];
    assert_eq!(gpu["name"], "Fake H200\x1b");
    assert_eq!(gpu["limits"]["shared_per_block"], 232_448);
    assert_eq!((&gpu["target"], &gpu["known"]), (&"sm_90".into(), &true.into()));
}

/// Layers of a fixture on it, as JSON where a report was written. Needs a compiler.
fn layers(folder: &Path, fake: &str, arguments: &[&str]) -> (Option<i32>, serde_json::Value, String) {
    library(folder, "libcuda.so.1");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/glm5dims.Q4_K_M.gguf");
    let report = folder.join("report.json").display().to_string();
    let mut all = vec!["run", model, "--form", "absorbed", "--report", &report];
    for usual in [["--engine", "cuda"], ["--batch", "0+2"]] {
        all.extend(usual.into_iter().filter(|_| !arguments.contains(&usual[0])));
    }
    let program = Path::new(env!("CARGO_BIN_EXE_mla-check"));
    let output = run(folder, program, &[&all, arguments].concat(), &[("FAKE_CUDA", fake)]);
    let report = std::fs::read(&report).ok().map(|b| serde_json::from_slice(&b).unwrap());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), report.unwrap_or_default(), text)
}

/// What is said of layers that are missing.
fn broken(report: &serde_json::Value) -> Vec<&str> {
    report["broken"].as_array().map_or(&[][..], |b| b).iter().map(|l| l["what"].as_str().unwrap()).collect()
}

fn judged(report: &serde_json::Value) -> Vec<u64> {
    report["layers"].as_array().unwrap().iter().map(|l| l["layer"].as_u64().unwrap()).collect()
}

fn a_kernel_that_hangs_is_named_and_ends_the_run(folder: &Path) {
    let Some(_) = environment::nvrtc("a_kernel_that_hangs_is_named_and_ends_the_run") else { return };
    let (code, report, text) = layers(folder, "hang:rope", &["--kernel-timeout", "1", "--layer", "0..1"]);
    assert_eq!(code, Some(4), "{text}");
    let hung = "the kernel did not end within 1 s\n  where: kernel rope, computing q\n";
    assert!(text.contains(hung), "{text}");
    let broken = broken(&report);
    assert!(broken[0].starts_with(&format!("layer 0: {hung}")), "{broken:?}");
    assert!(broken[1].starts_with("layers 1 were not run: a kernel hung in layer 0\n"), "{broken:?}");
    assert_eq!((broken.len(), judged(&report).len()), (2, 0), "{report}");
}

fn a_layer_that_breaks_takes_no_other_with_it(folder: &Path) {
    let Some(_) = environment::nvrtc("a_layer_that_breaks_takes_no_other_with_it") else { return };
    let fault = |layer| {
        format!(
            "layer {layer}: the kernel broke: CUDA_ERROR_ILLEGAL_ADDRESS, a text\n  where: kernel rope, told by cu"
        )
    };
    // The first launch alone: the layer behind is judged.
    let once = format!("fault:rope:{}", folder.join("struck").display());
    let (code, report, text) = layers(folder, &once, &["--layer", "0..1"]);
    assert_eq!(code, Some(4), "{text}");
    assert!(broken(&report)[0].starts_with(&fault(0)) && text.contains("computing q"), "{text}");
    assert_eq!((broken(&report).len(), judged(&report)), (1, vec![1]));
    assert_eq!((&report["verdict"], &report["exit"]), (&"broke".into(), &4.into()));
    // Every launch: each layer breaks by itself.
    let (code, report, text) = layers(folder, "fault:rope", &["--layer", "0..1"]);
    assert_eq!(code, Some(4), "{text}");
    let broken = broken(&report);
    assert!(broken[0].starts_with(&fault(0)) && broken[1].starts_with(&fault(1)), "{broken:?}");
    assert_eq!((broken.len(), judged(&report).len()), (2, 0));
}

/// Only keys in several splits are merged.
fn a_variant_that_breaks_is_told(folder: &Path) {
    let Some(_) = environment::nvrtc("a_variant_that_breaks_is_told") else { return };
    let arguments = ["--batch", "40+1", "--splits", "1", "--invariance"];
    let (_, report, text) = layers(folder, "fault:merge", &arguments);
    let variants = report["layers"][0]["invariance"].as_array().unwrap_or_else(|| panic!("{text}"));
    let of = |name: &str| variants.iter().find(|v| v["name"] == name).unwrap();
    assert_eq!(of("splits-2")["outcome"], "broke", "{}", of("splits-2"));
    let lost = "not run: a variant before took the GPU away from this process";
    assert_eq!(
        (&of("splits-5")["outcome"], &of("splits-5")["why"]),
        (&"not-applicable".into(), &lost.into())
    );
    assert_ne!(of("pages")["outcome"], "broke", "{}", of("pages"));
}

fn bare_memory_is_not_filled(folder: &Path) {
    let Some(_) = environment::nvrtc("bare_memory_is_not_filled") else { return };
    let said = |report: &serde_json::Value, what: &str| report.to_string().contains(what);
    // Kernels that do nothing: with poison that is seen of every output.
    let (code, report, text) = layers(folder, "engine", &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(said(&report, "were never written") && !said(&report, "(--no-poison)"), "{report}");
    let (code, _, text) = layers(folder, "bare", &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(text.contains("cuMemsetD8 failed"), "{text}");
    let (code, report, text) = layers(folder, "bare", &["--no-poison", "--no-guards"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(!said(&report, "were never written"), "{report}");
    assert!(said(&report, "(--no-poison)") && said(&report, "(--no-guards)"), "{report}");
    for flag in ["--no-poison", "--no-guards"] {
        let (code, _, text) = layers(folder, "engine", &["--engine", "ptx", flag]);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(&format!("where: {flag}\n")), "{text}");
    }
}
