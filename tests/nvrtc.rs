/*!
NVRTC itself, where it is: set `MLA_CHECK_NVRTC` to a libnvrtc.so or its folder (of the PyPI wheel `nvidia-cuda-nvrtc`).
Without it these tests do nothing and say so; with `MLA_CHECK_REQUIRE_NVRTC=1` they fail.
*/

#[path = "common/nvrtc.rs"]
mod environment;

use environment::nvrtc;
use mla_check::nvrtc::stamp::{self, Stamp};
use mla_check::nvrtc::{Options, PINNED, Problem, Source, Target};
use std::path::Path;

fn small() -> Source {
    Source::new("small.cu", include_str!("../fixtures/nvrtc/small.cu"))
}

/// Figures and CUBIN bytes of the pinned version are those that were recorded.
#[test]
fn compiles_for_all_targets_at_once_with_the_recorded_figures() {
    let Some(nvrtc) = nvrtc("compiles_for_all_targets_at_once_with_the_recorded_figures") else { return };
    let targets = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "sm_120a", "sm_121", "compute_120"];
    let targets = targets.map(|t| t.parse::<Target>().unwrap());
    let all = nvrtc.compile_all(&small(), &targets, &Options::default());
    for (target, code) in targets.iter().zip(&all) {
        let code = code.as_ref().unwrap_or_else(|e| panic!("{target}: {e}"));
        assert_eq!(code.target, *target);
        let line = format!(".target {}", target.to_string().replace("compute", "sm"));
        assert!(code.ptx.lines().any(|l| l == line), "{target}");
        assert_eq!(code.cubin.is_some(), target.is_real());
        assert_eq!(code.diagnostics(), "");
        if target.is_real() {
            let crowded = code.kernel("crowded").unwrap();
            assert_eq!((crowded.registers, crowded.threads_bound), (64, Some(1024)));
            assert!(crowded.spill_store_bytes.unwrap() > 0 && crowded.frame_bytes > 0);
            let centre = code.kernel("centre").unwrap();
            assert_eq!((centre.spill_store_bytes, centre.static_shared_bytes), (Some(0), 128));
        }
        assert_eq!(code.notices.is_empty(), nvrtc.version() == PINNED, "{:?}", code.notices);
    }
    // The PTX of `sm_120` is that of `compute_120`.
    let ptx = |i: usize| all[i].as_ref().unwrap().ptx.as_str();
    stamp::same_code(ptx(4), ptx(7)).unwrap();
    if nvrtc.version() == PINNED {
        let recorded: [(usize, &[u8]); 2] = [
            (2, include_bytes!("../fixtures/nvrtc/small.sm_90.cubin")),
            (4, include_bytes!("../fixtures/nvrtc/small.sm_120.cubin")),
        ];
        for (i, bytes) in recorded {
            assert!(all[i].as_ref().unwrap().cubin.as_deref() == Some(bytes), "{}", targets[i]);
        }
    }
}

/// Committed PTX: stamped, checked without a compiler, compiled again.
#[test]
fn stamped_ptx_compiles_again_to_the_same_code() {
    let Some(nvrtc) = nvrtc("stamped_ptx_compiles_again_to_the_same_code") else { return };
    let (target, options) = (Target::compute(120), Options::default());
    let stamp = Stamp::of(&small(), target, &options, nvrtc.version());
    let committed = stamp.head(&nvrtc.compile(&small(), target, &options).unwrap().ptx);
    let again = nvrtc.compile(&small(), target, &options).unwrap();
    stamp::same_code(stamp.check(&committed).unwrap(), &again.ptx).unwrap();
    let fused = Options { fmad: true, ..options };
    let other = nvrtc.compile(&small(), target, &fused).unwrap();
    assert!(stamp::same_code(&other.ptx, &again.ptx).is_err());
}

#[test]
fn headers_are_found_in_memory_and_macros_reach_the_code() {
    let Some(nvrtc) = nvrtc("headers_are_found_in_memory_and_macros_reach_the_code") else { return };
    let text = "#include \"sub/size.cuh\"\nextern \"C\" __global__ void k(float* x) { __shared__ float s[SIZE]; s[threadIdx.x] = x[0]; __syncthreads(); x[1] = s[(threadIdx.x + 1) % SIZE]; }\n";
    let source = Source::new("k.cu", text)
        .header("sub/size.cuh", "#ifndef HALF\nmissing x;\n#endif\n#define SIZE (2 * HALF)\n");
    let code = nvrtc.compile(&source, Target::sm(90), &Options::default().define("HALF", 96)).unwrap();
    assert_eq!(code.kernel("k").unwrap().static_shared_bytes, 192 * 4);
    let error = nvrtc.compile(&source, Target::sm(90), &Options::default()).unwrap_err().to_string();
    assert!(error.contains("sub/size.cuh(2): error") && error.contains("where: k.cu"), "{error}");
}

/// What is wrong is told apart: code, option, target, text.
#[test]
fn what_is_wrong_is_named() {
    let Some(nvrtc) = nvrtc("what_is_wrong_is_named") else { return };
    let compile = |text: &str, target: &str, options: &Options| {
        nvrtc.compile(&Source::new("x.cu", text), target.parse().unwrap(), options).unwrap_err()
    };
    let plain = Options::default();
    let e = compile("extern \"C\" __global__ void f(int* p) { *p = nothing; }", "sm_120", &plain);
    assert!(matches!(e.problem(), Problem::Code { .. }) && e.to_string().contains("x.cu(1): error"), "{e}");
    assert!(!e.is_unavailable());
    let odd = Options { extra: vec!["--no-such-option".into()], ..plain.clone() };
    let e = compile("", "sm_120", &odd);
    assert!(
        matches!(e.problem(), Problem::Options { .. }) && e.to_string().contains("no-such-option"),
        "{e}"
    );
    let e = compile("", "sm_52", &plain);
    assert!(matches!(e.problem(), Problem::Target { .. }) && e.to_string().contains("120"), "{e}");
    assert_eq!(e.place(), nvrtc.place());
    assert!(matches!(compile("a\0b", "sm_120", &plain).problem(), Problem::Nul { at: 1, .. }));
}

/// Committed code of tests on devices is what the pinned compiler makes of its source. What was made lies in the folder
/// that a failure names.
#[test]
fn code_of_device_tests_is_up_to_date() {
    let Some(nvrtc) = nvrtc("code_of_device_tests_is_up_to_date") else { return };
    if nvrtc.version() != PINNED {
        return;
    }
    let source = Source::new("probe.cu", include_str!("../fixtures/device/probe.cu"));
    let made = |target| nvrtc.compile(&source, target, &Options::default()).unwrap();
    let (ptx, cubin) = (made(Target::compute(120)).ptx, made(Target::sm(90)).cubin.unwrap());
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/device");
    let read = |name: &str| std::fs::read(committed.join(name)).unwrap_or_default();
    if read("probe.ptx") != ptx.as_bytes() || read("probe.sm_90.cubin") != cubin {
        let folder = std::env::temp_dir();
        std::fs::write(folder.join("probe.ptx"), ptx).unwrap();
        std::fs::write(folder.join("probe.sm_90.cubin"), cubin).unwrap();
        panic!("fixtures/device differs; what was made is in {}", folder.display());
    }
}
