/*! A test that can't fail tests nothing: broken copies of the kernel are found, in the tensor that they compute. */

use mla_check::check::{self, EngineKind, Options};
use mla_check::judge::{Verdict, Which, origins};
use mla_check::model::Model;
use mla_check::report::LayerReport;
use mla_numeric::DType;
use mla_reference::Form;
use own_kernel::{Norm, Own, kernels, rms_norm};
use std::io::Write;
use std::path::Path;

fn options() -> Options {
    let batch = "0+5,70+1".parse().unwrap();
    Options { batch, forms: vec![Form::Absorbed], ..Options::default() }
}

fn judged(norm: Norm) -> LayerReport {
    let model = model();
    let options = options();
    check::layer_with(&model, 0, &options, &Own::new(&options, norm), &|_| ()).unwrap()
}

fn model() -> Model {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/glm5dims.Q4_K_M.gguf");
    Model::open(&file).unwrap()
}

/// Names of tensors with evidence of their own, in order; probes that the same fault breaks are not among them.
fn found(report: &LayerReport) -> Vec<&'static str> {
    assert_eq!(report.verdict, Verdict::Fault);
    let mut names: Vec<&str> = origins(&report.tensors).map(|u| Which::name(&u.which)).collect();
    names.dedup();
    names
}

#[test]
fn the_kernel_is_clean() {
    assert_eq!(judged(rms_norm).verdict, Verdict::Rounding);
}

/// Hidden rows of rms 1e-5 are among those drawn: eps shows there, and nowhere else.
#[test]
fn a_forgotten_eps_is_found_where_norms_are() {
    let report = judged(|x, gamma, _| rms_norm(x, gamma, 0.0));
    assert_eq!(found(&report).first(), Some(&"attn_in"));
}

#[test]
fn a_column_that_is_never_summed_is_found() {
    let report = judged(|x, gamma, eps| {
        let mut short = x.to_vec();
        short[0] = 0.0;
        let scale = 1.0 / (short.iter().map(|v| v * v).sum::<f32>() / x.len() as f32 + eps).sqrt();
        x.iter().zip(gamma).map(|(x, g)| x * scale * g).collect()
    });
    assert_eq!(found(&report).first(), Some(&"attn_in"));
}

/// The .cu itself, on the machine that watches it. It is compiled: NVRTC must be there.
#[test]
fn the_cuda_file_is_clean_on_the_ptx_machine() {
    if std::env::var_os("MLA_CHECK_NVRTC").is_none_or(|v| v.is_empty()) {
        assert!(
            std::env::var_os("MLA_CHECK_REQUIRE_NVRTC").is_none_or(|v| v != "1"),
            "MLA_CHECK_NVRTC is not set"
        );
        // Not by eprintln!: that is shown of failed tests only.
        let _ = writeln!(std::io::stderr(), "NOT RUN: MLA_CHECK_NVRTC is not set");
        return;
    }
    for dtype in [DType::Bf16, DType::F16] {
        let kernels = Some(kernels().into());
        let options = Options { engine: EngineKind::Ptx, kernels, dtype, ..options() };
        let report = check::layer(&model(), 0, &options, &|_| ()).unwrap();
        assert_eq!(report.verdict, Verdict::Rounding, "{dtype}");
        let own = report.engine.kernels.iter().filter(|k| !k.built_in);
        assert_eq!(own.map(|k| k.name.as_str()).collect::<Vec<_>>(), ["norm.cu"]);
    }
}
