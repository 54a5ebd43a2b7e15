/*!
Architectures beyond those of the other tests' fixtures: correct engines are clean on them, the two sets of rope factors,
layers that hold the decompression weight twice, relatives that are refused.
*/

mod common;
#[path = "common/nvrtc.rs"]
mod nvrtc;

use common::{MODELS, ORACLE, fixture, reference, sequence};
use mla_check::case::Case;
use mla_check::check::{self, EngineKind, Options};
use mla_check::engine::cpu::CpuEngine;
use mla_check::engine::{Description, Engine, EngineError, Sink};
use mla_check::gguf::write::{MetaValue, Writer};
use mla_check::gguf::{Gguf, Value, ValueType};
use mla_check::judge::Verdict;
use mla_check::model::arch::{ARCHITECTURES, REFUSED, UNKNOWN};
use mla_check::model::{Convention, FactorSet, Layer, Model, Reading};
use mla_numeric::DType;
use mla_reference::product::{Blocks, Rows};
use mla_reference::{Contract, Form, GgmlType, Rope, Spec, Stage};
use ndarray::Array2;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn judge(file: &str, engine: EngineKind, batch: &str, forms: &[Form]) {
    let model = Model::open(&fixture(file)).unwrap();
    let layer = model.mla_layers()[0];
    let (batch, forms) = (batch.parse().unwrap(), forms.to_vec());
    let options = Options { engine, batch, forms: forms.clone(), ..Options::default() };
    let report = check::layer(&model, layer, &options, &|_| {}).unwrap_or_else(|e| panic!("{file}: {e}"));
    assert_eq!(report.verdict, Verdict::Rounding, "{file}: {:#?}", report.tensors);
    assert!(report.odd.is_empty(), "{:?}", report.odd);
    for form in forms {
        assert!(report.tensors.iter().any(|t| t.form == Some(form)), "{file}: {}", form.name());
    }
    assert!(model.arch.warning().is_none());
}

#[test]
fn a_correct_engine_is_clean_on_every_architecture() {
    for (_, file) in ORACLE.iter().filter(|o| !MODELS.contains(o)) {
        judge(file, EngineKind::Cpu, "0+17,33+1", &Form::ALL);
    }
}

/// Those for whose geometry PTX is committed.
#[test]
fn our_kernels_are_clean_without_a_query_rank_and_without_rotation() {
    for file in ["architectures/plm_dims.Q4_K_M.gguf", "architectures/kimi_linear_dims.Q4_K_M.gguf"] {
        judge(file, EngineKind::Ptx, "0+5,9+1", &Form::ALL);
    }
}

/// Those that the compiler is needed for. The absorbed kernels take no cache row of 288 columns, and say so.
#[test]
fn our_kernels_take_half_split_pairs_and_other_widths() {
    if nvrtc::nvrtc("half-split pairs on the PTX machine").is_none() {
        return;
    }
    judge("architectures/mistral4dims.Q4_K_M.gguf", EngineKind::Ptx, "0+5,9+1", &Form::ALL);
    judge("architectures/minicpm3dims.Q4_K_M.gguf", EngineKind::Ptx, "0+5,9+1", &Form::ALL);
}

/// What is not rotated keeps its bits at every position.
#[test]
fn without_rotation_rope_columns_are_copied() {
    let model = Model::open(&fixture("architectures/kimi_linear_dims.Q4_K_M.gguf")).unwrap();
    let weights = model.weights(1).unwrap();
    let layer = Layer { index: 1, spec: model.spec(&Reading::default()), weights: &weights };
    let hidden = Array2::from_shape_fn((3, 256), |(i, j)| ((i * 256 + j) as f64 * 0.7).sin());
    let keep = reference(&layer, &sequence(hidden, &[0, 7, 120_000]), &[Form::Fused]);
    let all = |stage| {
        let t = keep.get(stage, Form::Fused);
        t.block(0..t.rows, 0..t.cols)
    };
    assert_eq!(all(Stage::Q), all(Stage::QRaw));
    assert_eq!(all(Stage::KPe), all(Stage::KvA).slice(ndarray::s![.., 512..]));
}

fn mla_check(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mla-check")).env("CUDA_VISIBLE_DEVICES", "").args(args).output().unwrap()
}

/// Both streams with every run of spaces and line ends as one space.
fn words(output: &Output) -> String {
    let both = [output.stdout.clone(), output.stderr.clone()].concat();
    String::from_utf8(both).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn the_session_chooses_the_rope_factors_and_the_report_says_which() {
    let file = fixture("architectures/minicpm3dims.Q4_K_M.gguf");
    let path = file.to_str().unwrap();
    let model = Model::open(&file).unwrap();
    for (n_ctx, set) in
        [(None, FactorSet::Short), (Some(32_768), FactorSet::Short), (Some(32_769), FactorSet::Long)]
    {
        let reading = Reading { n_ctx, ..Reading::default() };
        assert_eq!(model.factor_set(&reading), Some(set));
    }
    let run = |more: &[&str]| {
        let fixed = ["run", path, "--engine", "reference", "--batch", "0+3"];
        mla_check(&[&fixed[..], more].concat())
    };
    assert!(words(&run(&[])).contains("rope factors: the short set, a session of at most 32768 positions"));
    let long = run(&["--n-ctx", "40000"]);
    assert!(words(&long).contains("the long set, a session of 40000 positions, trained on 32768"));
    let narrow = run(&["--n-ctx", "2"]);
    assert_eq!(narrow.status.code(), Some(2));
    assert!(words(&narrow).contains("a request has 3 tokens, more than a session of 2 positions holds"));
    let inspected = words(&mla_check(&["inspect", path, "--n-ctx", "40000"]));
    assert!(inspected.contains("rope factors: the long set"), "{inspected}");
    let other = fixture("architectures/plm_dims.Q4_K_M.gguf");
    let args = ["run", other.to_str().unwrap(), "--engine", "reference", "--batch", "0+3", "--n-ctx", "9"];
    assert!(words(&mla_check(&args)).contains("--n-ctx decides nothing"));
}

/// A dump of the session with long factors, read as one with short ones, is another reading and not a wrong engine.
#[test]
fn the_other_rope_factors_are_another_convention() {
    let model = Model::open(&fixture("architectures/minicpm3dims.Q4_K_M.gguf")).unwrap();
    let spec = model.spec(&Reading::of(Convention::Hf));
    let long = model.spec(&Reading { n_ctx: Some(100_000), ..Reading::of(Convention::Hf) });
    let others = check::other_conventions(&model, &spec);
    let named: Vec<&str> = others.iter().filter(|o| o.1 == long).map(|o| o.0.as_str()).collect();
    assert_eq!(named, ["hf with the long rope factors"]);
}

/// An engine that reads the file's rope otherwise, and does not know it.
struct Misread {
    inner: CpuEngine,
    rope: Rope,
}

impl Engine for Misread {
    fn describe(&self) -> Description {
        self.inner.describe()
    }
    fn contract(&self) -> Contract {
        self.inner.contract()
    }
    fn run(
        &self,
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        let spec = Spec { rope: self.rope.clone(), ..layer.spec.clone() };
        self.inner.run(&Layer { index: layer.index, spec, weights: layer.weights }, case, forms, sink)
    }
}

/// What is said of k_pe where an engine rotates by other frequencies than the reading's.
fn said_of_k_pe(file: &str, rope: impl Fn(&Model, Rope) -> Rope) -> String {
    let model = Model::open(&fixture(file)).unwrap();
    let options =
        Options { batch: "0+17,33+1".parse().unwrap(), forms: vec![Form::Absorbed], ..Options::default() };
    let rope = rope(&model, model.spec(&options.reading).rope);
    let engine = Misread { inner: CpuEngine::new(options.dtype, options.splits()), rope };
    let layer = model.mla_layers()[0];
    let report = check::layer_with(&model, layer, &options, &engine, &|_| {}).unwrap();
    assert_eq!(report.verdict, Verdict::Fault, "{file}");
    let of_k_pe = report.tensors.iter().filter(|u| u.tensor == "k_pe" && u.verdict == Verdict::Fault);
    of_k_pe.map(|u| format!("{:?} {:?}", u.explained, u.diagnosis)).collect()
}

/// A rotation where there is none, and frequencies without the model's factors, are named; the other set of factors is
/// recognised as another reading.
#[test]
fn what_engines_get_wrong_about_rope_is_named() {
    let plain = |_: &Model, rope: Rope| {
        let n = rope.inv_freq.len();
        let inv_freq = (0..n).map(|j| 1e4f64.powf(-(j as f64) / n as f64)).collect();
        Rope { inv_freq, ..rope }
    };
    let said = said_of_k_pe("architectures/kimi_linear_dims.Q4_K_M.gguf", plain);
    assert!(said.contains("k_pe is rotated with base 10000, but the model rotates nothing"), "{said}");
    let said = said_of_k_pe("architectures/minicpm3dims.Q4_K_M.gguf", plain);
    assert!(said.contains("plain frequencies of base 10000: the model's factors are left out"), "{said}");
    let long = |model: &Model, _| model.spec(&Reading { n_ctx: Some(40_000), ..Reading::default() }).rope;
    let said = said_of_k_pe("architectures/minicpm3dims.Q4_K_M.gguf", long);
    assert!(said.contains("with the long rope factors"), "{said}");
}

/// Kimi-Linear's other layers are no defect; contradictions between its array and its tensors are said.
#[test]
fn layers_with_another_attention_are_no_defect() {
    let file = fixture("architectures/kimi_linear_dims.Q4_K_M.gguf");
    let sound = mla_check(&["inspect", file.to_str().unwrap()]);
    assert_eq!(sound.status.code(), Some(0));
    let said = words(&sound);
    assert!(said.contains("headers are sound") && said.contains("MLA attention in 1"), "{said}");
    assert!(said.contains("rope none: rope columns are used as they are"), "{said}");
    let other = mla_check(&["run", file.to_str().unwrap(), "--layer", "0"]);
    assert_eq!(other.status.code(), Some(2));
    assert!(words(&other).contains("layers with MLA attention: 1"));
    let dir = tempfile::tempdir().unwrap();
    for (array, code, what) in [
        ([1, 1], 1, "tensor blk.0.attn_kv_a_mqa.weight (w_kv_a) is missing"),
        ([0, 0], 0, "layer has no MLA attention, but it has its tensors"),
    ] {
        let values = array.map(MetaValue::I32).to_vec();
        let path = Copied::of(&file)
            .set("kimi-linear.attention.head_count_kv", MetaValue::Array(ValueType::I32, values))
            .write(dir.path());
        let output = mla_check(&["inspect", path.to_str().unwrap()]);
        assert!(words(&output).contains(what), "{array:?}: {}", words(&output));
        assert_eq!(output.status.code(), Some(code), "{array:?}");
    }
}

#[test]
fn relatives_are_refused_by_name_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for (name, why) in REFUSED.iter().chain(&[("llama", UNKNOWN)]) {
        let mut w = Writer::new();
        w.meta("general.architecture", *name);
        w.write(&path, &mut |_, _| Ok(())).unwrap();
        let message = Model::open(&path).err().unwrap().to_string();
        assert!(message.contains(&format!("'{name}' is not supported: {why}")), "{message}");
    }
}

/// docs/architectures.md has every name.
#[test]
fn documentation_lists_all_architectures() {
    let text = include_str!("../docs/architectures.md");
    let relatives = |n: &&str| !n.starts_with("longcat") && *n != "glm5next";
    for name in ARCHITECTURES.iter().map(|a| a.name).chain(REFUSED.iter().map(|r| r.0).filter(relatives)) {
        assert!(text.contains(&format!("`{name}`")), "{name}");
    }
}

/// A copy of a model file: its numbers, strings and tensors, to be altered.
struct Copied {
    meta: Vec<(String, MetaValue)>,
    tensors: Vec<(String, Vec<u64>, GgmlType, Vec<u8>)>,
}

impl Copied {
    fn of(path: &Path) -> Copied {
        let gguf = Gguf::open(path).unwrap();
        let meta = gguf.metadata().iter().filter_map(|(key, value)| {
            let value = match value {
                Value::U32(v) => v.into(),
                Value::F32(v) => v.into(),
                Value::String(s) => std::str::from_utf8(s).unwrap().into(),
                _ => return None,
            };
            Some((key.to_string(), value))
        });
        let tensor = |t: &mla_check::gguf::TensorInfo| {
            let bytes = gguf.bytes(t).unwrap().to_vec();
            (t.name.clone(), t.dims.clone(), t.ty.known().unwrap(), bytes)
        };
        Copied { meta: meta.collect(), tensors: gguf.tensors().iter().map(tensor).collect() }
    }
    fn set(mut self, key: &str, value: MetaValue) -> Copied {
        self.meta.retain(|(k, _)| k != key);
        self.meta.push((key.into(), value));
        self
    }
    /// A tensor's values by rows of its fastest dimension.
    fn values(&self, name: &str) -> Vec<Vec<f64>> {
        let (_, dims, ty, bytes) = self.tensors.iter().find(|t| t.0 == name).unwrap();
        let cols = dims[0] as usize;
        let blocks = Blocks::new(*ty, bytes, cols).unwrap();
        let row = |r| {
            let mut out = vec![0.0; cols];
            blocks.decode(r, 0, &mut out);
            out
        };
        (0..blocks.rows()).map(row).collect()
    }
    fn write(&self, folder: &Path) -> PathBuf {
        let path = folder.join("copied.gguf");
        let mut writer = Writer::new();
        for (key, value) in &self.meta {
            writer.meta(key, value.clone());
        }
        for (name, dims, ty, _) in &self.tensors {
            writer.tensor(name, dims, *ty);
        }
        writer.write(&path, &mut |i, out| out.write_all(&self.tensors[i].3)).unwrap();
        path
    }
}

/// attn_kv_b of float16 beside the split tensors of a layer, of the same values but for what `alter` does to its rows.
fn held_twice(folder: &Path, alter: impl Fn(&mut [Vec<f64>])) -> PathBuf {
    let mut copied = Copied::of(&fixture("architectures/dsv32dims.Q4_K_M.gguf"));
    let (k, v) = (copied.values("blk.0.attn_k_b.weight"), copied.values("blk.0.attn_v_b.weight"));
    let (heads, latent, nope, value) = (2, 512, 128, 128);
    let mut rows: Vec<Vec<f64>> = Vec::new();
    for h in 0..heads {
        rows.extend((0..nope).map(|n| (0..latent).map(|l| k[h * latent + l][n]).collect()));
        rows.extend(v[h * value..(h + 1) * value].iter().cloned());
    }
    alter(&mut rows);
    let bytes = rows
        .iter()
        .flatten()
        .flat_map(|x| half::f16::from_f32(DType::F16.round(*x) as f32).to_le_bytes())
        .collect();
    let dims = vec![latent as u64, rows.len() as u64];
    copied.tensors.push(("blk.0.attn_kv_b.weight".into(), dims, GgmlType::F16, bytes));
    copied.write(folder)
}

/// Two roundings of one weight are a note; heads swapped, a head 3 % off (against float16's 5e-4 and Q5_0's 6e-2 of a block's largest
/// value: seen in the value rows of Q4_K at 30 %), one element put elsewhere are warnings that name the head.
#[test]
fn weights_that_a_file_holds_twice_are_held_against_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let same = Model::open(&held_twice(dir.path(), |_| {})).unwrap();
    let [k, v] = same.held_twice(0).unwrap().try_into().unwrap();
    for d in [&k, &v] {
        // float16 rounds to 2^-11 of an element.
        assert!(d.largest > 0.0 && d.largest < 1.0 / 2048.0 && d.rms < 1.0 / 2048.0, "{d}");
        assert!(!d.too_far() && d.to_string().contains("as far as two roundings are"), "{d}");
    }
    assert_eq!((k.elements, v.elements), (2 * 512 * 128, 2 * 128 * 512));
    assert_eq!(k.types, ["Q5_0", "F16"]);

    type Alter = fn(&mut [Vec<f64>]);
    let swapped: Alter = |rows| (0..256).for_each(|i| rows.swap(i, 256 + i));
    let element: Alter = |rows| rows[256 + 3][7] = 40.0 * rows[256 + 3][7].abs().max(0.01);
    let louder: Alter = |rows| rows[128..256].iter_mut().flatten().for_each(|x| *x *= 1.3);
    for (what, alter, of_k, of_v) in
        [("swapped", swapped, true, true), ("element", element, true, false), ("louder", louder, false, true)]
    {
        let model = Model::open(&held_twice(dir.path(), alter)).unwrap();
        let [k, v] = model.held_twice(0).unwrap().try_into().unwrap();
        assert_eq!((k.too_far(), v.too_far()), (of_k, of_v), "{what}: {k} / {v}");
    }
    // The reader is told, and what is used is said.
    let path = held_twice(dir.path(), swapped);
    let inspected = words(&mla_check(&["inspect", path.to_str().unwrap()]));
    assert!(inspected.contains("warning blk.0.attn_k_b.weight (Q5_0) is used"), "{inspected}");
    assert!(inspected.contains("an engine that reads attn_kv_b.weight computes something else"));
    let fixed = ["--engine", "reference", "--batch", "0+3"];
    let run = words(&mla_check(&[&["run", path.to_str().unwrap()], &fixed[..]].concat()));
    assert!(run.contains("odd: blk.0.attn_k_b.weight (Q5_0) is used"), "{run}");
    let path = held_twice(dir.path(), |_| {});
    let run = words(&mla_check(&[&["run", path.to_str().unwrap()], &fixed[..]].concat()));
    assert!(run.contains("as far as two roundings are") && !run.contains("odd:"), "{run}");
}
