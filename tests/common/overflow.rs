//! Values beyond f16's largest number, on an engine that computes in f16: the same on every machine.

use half::f16;
use mla_check::check::{self, EngineKind, Options};
use mla_check::engine::kernels::library::Library;
use mla_check::gguf::Gguf;
use mla_check::judge::{Unit, Verdict, origins};
use mla_check::model::Model;
use mla_check::report::LayerReport;
use mla_check::trace::npy::read_matrix;
use mla_numeric::DType;
use mla_reference::{Form, GgmlType, Regime};
use ndarray::Array2;
use std::path::{Path, PathBuf};

/// A model of the repository: where the process stands, else where it was built.
fn model() -> PathBuf {
    let here = Path::new("fixtures/models/glm5dims.Q4_K_M.gguf");
    if here.exists() { here.into() } else { Path::new(env!("CARGO_MANIFEST_DIR")).join(here) }
}

/// A fixture whose first layer has some tensors multiplied: by name, of types F32 and Q4_K.
fn scaled(folder: &Path, factors: &[(&str, f32)]) -> PathBuf {
    let from = model();
    let mut bytes = std::fs::read(&from).unwrap();
    let gguf = Gguf::open(&from).unwrap();
    for (name, factor) in factors {
        let info = gguf.tensor(&format!("blk.0.{name}.weight")).unwrap();
        let (at, size) = (info.offset as usize, info.size.unwrap() as usize);
        let data = &mut bytes[at..at + size];
        if info.ty.known() == Some(GgmlType::F32) {
            for v in data.as_chunks_mut().0 {
                *v = (f32::from_le_bytes(*v) * factor).to_le_bytes();
            }
        } else {
            // Scale and minimum of each block.
            for block in data.chunks_mut(144) {
                for v in block[..4].as_chunks_mut().0 {
                    *v = f16::from_f32(f16::from_le_bytes(*v).to_f32() * factor).to_le_bytes();
                }
            }
        }
    }
    let path = folder.join("scaled.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

fn report(engine: EngineKind, path: &Path, change: impl FnOnce(&mut Options)) -> LayerReport {
    let model = Model::open(path).unwrap_or_else(|e| panic!("{e}"));
    let mut options = Options { engine, dtype: DType::F16, splits: Some(2), ..Options::default() };
    options.regimes = vec![Regime::Random];
    options.batch = "0+5,70+1".parse().unwrap();
    change(&mut options);
    check::layer(&model, 0, &options, &|_| ()).unwrap_or_else(|e| panic!("{e}"))
}

/// Numbers of `out` that an engine computed.
fn out(save: &Path, form: Form) -> Array2<f64> {
    read_matrix(&save.join("layer-0").join(format!("{}.out.engine.npy", form.name()))).unwrap()
}

/// Values of `out` beyond the largest number, no other tensor's.
const LAST: [(&str, f32); 2] = [("attn_v_b", 128.0), ("attn_output", 512.0)];

/// An overflow that the contract has too is rounding.
pub fn rounding(engine: EngineKind) {
    let folder = tempfile::tempdir().unwrap();
    let path = scaled(folder.path(), &LAST);
    let save = folder.path().join(engine.name());
    let r = report(engine, &path, |o| o.save = Some(save.clone()));
    assert_eq!(r.verdict, Verdict::Rounding, "{engine:?}");
    for form in Form::ALL {
        let out = out(&save, form);
        let infinite = out.iter().filter(|v| v.is_infinite()).count();
        assert!(infinite > 0 && infinite < out.len() / 4, "{engine:?}: {infinite} of {}", out.len());
        assert!(out.iter().all(|v| !v.is_nan()));
    }
}

/// Infinities in the cache: they are the contract's. Where they meet zero or each other there is NaN in engine and reference; that is
/// no verdict, and no fault. What NaN does not reach is judged.
pub fn after(engine: EngineKind) {
    let folder = tempfile::tempdir().unwrap();
    let path = scaled(folder.path(), &[("attn_kv_a_norm", 32_768.0)]);
    let r = report(engine, &path, |_| ());
    let accused: Vec<_> = origins(&r.tensors).map(|u| (u.title(), &u.evidence)).collect();
    assert!(accused.is_empty(), "{engine:?}: {accused:?}");
    assert_eq!(r.verdict, Verdict::NotCompared, "{engine:?}");
    for u in &r.tensors {
        let clean = matches!(u.verdict, Verdict::Exact | Verdict::Rounding);
        let nan = u.note.as_deref().is_some_and(|n| n.contains("are NaN in engine and reference"));
        assert!(clean && u.note.is_none() || u.verdict == Verdict::NotCompared && nan, "{engine:?}: {u:?}");
    }
    let of = |stage: &str| r.tensors.iter().find(|u| u.tensor == stage).unwrap().verdict;
    assert!(matches!(of("cache"), Verdict::Exact) && of("lse") == Verdict::NotCompared, "{engine:?}");
}

/// A copy of the kernels with a text of one file replaced, and the first tensor at fault.
fn planted(engine: EngineKind, model: &Path, file: &str, from: &str, to: &str) -> (String, Unit) {
    let folder = tempfile::tempdir().unwrap();
    let text = Library::built_in_for(DType::F16).unwrap().file(file).unwrap().source.text.clone();
    assert!(text.contains(from), "{from}");
    std::fs::write(folder.path().join(file), text.replacen(from, to, 1)).unwrap();
    let r = report(engine, model, |o| o.kernels = Some(folder.path().into()));
    let unit = origins(&r.tensors).next().expect("nothing was found").clone();
    (unit.tensor.to_string(), unit)
}

/// Infinity and the largest number are faults in each other's place.
pub fn exchanged(engine: EngineKind) {
    let stored = "pack(sum[m][n][2 * e], sum[m][n][2 * e + 1])";
    // One element that overflows where the true value does not.
    let one = "pack(sum[m][n][2 * e] * (row == 3 && col == 8 ? 1e9f : 1.f), sum[m][n][2 * e + 1])";
    let (tensor, unit) = planted(engine, &model(), "product.cu", stored, one);
    assert_eq!((tensor.as_str(), unit.beyond, unit.not_finite), ("q_a", 1, 1), "{:?}", unit.evidence);
    // A kernel that saturates where the contract overflows.
    let folder = tempfile::tempdir().unwrap();
    let path = scaled(folder.path(), &LAST);
    let within = "pack(fmaxf(fminf(sum[m][n][2 * e], 65504.f), -65504.f), sum[m][n][2 * e + 1])";
    let (tensor, unit) = planted(engine, &path, "product.cu", stored, within);
    assert_eq!(tensor, "out", "{:?}", unit.evidence);
}
