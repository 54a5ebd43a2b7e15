/*!
The float64 reference under llama.cpp's convention against llama.cpp's own float32 intermediates
(fixtures/llamacpp/README.md).

`MLA_CHECK_LLAMACPP=DIR` adds every pair NAME.gguf and NAME.safetensors of a folder; the file in `fixtures/` is
always compared.

Bound: 1e-6 of the largest magnitude of the tensor. llama.cpp computes in float32 (u = 2⁻²⁴ = 6e-8) from weights
that are the exact values rounded to float32. A product over K terms of random sign, summed by fused
multiply-add in 8 lanes of m = K/8 terms, carries an error of u·√(m/6) of its own rms (step j rounds a partial sum
of rms √j of a term, so the squares add to m²/2 a lane, u²/3 each; the sum's rms is √(8m) of a term):
K = 1024, the longest, 2.8e-7; K = 256, 1.4e-7; rounding the weights adds u/√3. Largest error over
largest value is about the same ratio. The longest way is attn_norm, q_a, norm, q, absorbed, scores, o_latent, v,
output: 6 products, whose errors add in squares to at most √6 · 2.8e-7 = 7e-7, and a score's error enters the softmax
as it is, not relative to the score: some tenths more. So 1e-6: an estimate, not proven (the proven bound of a
single product is K·u = 6e-5), beside which a difference of conventions is 2e-3 and more.
*/

mod common;

use common::{Keep, arrays, fixture, reference, sequence};
use mla_check::model::{Convention, Layer, Model, Reading};
use mla_check::trace::TensorId;
use mla_reference::{Form, Stage};
use ndarray::{Array2, ArrayD, Axis, s};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

const BOUND: f64 = 1e-6;

/// llama.cpp's name, ours.
const TENSORS: &[(&str, Stage)] = &[
    ("attn_norm", Stage::AttnIn),
    ("q_a", Stage::QA),
    ("q_a_norm", Stage::QANormed),
    ("q", Stage::QRaw),
    ("q_pe", Stage::Q),
    ("kv_cmpr_pe", Stage::KvA),
    ("kv_cmpr", Stage::KvCNormed),
    ("k_pe", Stage::KPe),
    ("q_nope_absorbed", Stage::QLatent),
    ("kqv_out", Stage::AttnOut),
    ("attn_out", Stage::Out),
];

/// Our rows of a tensor, of `q` the rotated columns of each head; None where the form does not have it.
fn ours(keep: &Keep, stage: Stage, form: Form, theirs: &ArrayD<f64>) -> Option<Array2<f64>> {
    let t = keep.tensors.get(&TensorId::of(stage, form))?;
    let all = t.block(0..t.rows, 0..t.cols);
    if stage != Stage::Q {
        return Some(all);
    }
    let (heads, rope) = (theirs.shape()[1], theirs.shape()[2]);
    let (rows, width) = (t.rows, t.cols / heads);
    let heads_apart = all.into_shape_with_order((rows, heads, width)).unwrap();
    let rotated = heads_apart.slice(s![.., .., width - rope..]).to_owned();
    Some(rotated.into_shape_with_order((rows, heads * rope)).unwrap())
}

/// Largest difference over largest magnitude.
fn distance(a: &Array2<f64>, b: &ArrayD<f64>) -> f64 {
    assert_eq!((a.len(), a.len_of(Axis(0))), (b.len(), b.len_of(Axis(0))));
    assert!(a.iter().chain(b).all(|v| v.is_finite()));
    let worst = a.iter().zip(b).fold(0.0f64, |m, (x, y)| m.max((x - y).abs()));
    worst / b.iter().fold(0.0f64, |m, v| m.max(v.abs()))
}

/// The worst distance of each tensor over layers and forms.
fn compare(
    model: &Path,
    answers: &HashMap<String, ArrayD<f64>>,
    convention: Convention,
) -> BTreeMap<&'static str, f64> {
    let model = Model::open(model).unwrap_or_else(|e| panic!("{e}"));
    let mut worst = BTreeMap::new();
    for index in model.mla_layers() {
        let hidden: Array2<f64> = answers[&format!("L{index}/inp")].clone().into_dimensionality().unwrap();
        let positions: Vec<u64> = (0..hidden.nrows() as u64).collect();
        let spec = model.spec(&Reading::of(convention));
        let weights = model.weights(index).unwrap_or_else(|e| panic!("{e}"));
        let layer = Layer { index, spec, weights: &weights };
        let keep = reference(&layer, &sequence(hidden, &positions), &Form::ALL);
        for (theirs, stage) in TENSORS {
            let Some(b) = answers.get(&format!("L{index}/{theirs}")) else { continue };
            for a in Form::ALL.iter().filter_map(|form| ours(&keep, *stage, *form, b)) {
                let most = worst.entry(*theirs).or_insert(0.0f64);
                *most = most.max(distance(&a, b));
            }
        }
    }
    // Without a query rank there are two less.
    let expected = TENSORS.len() - if model.geometry.q_rank == 0 { 2 } else { 0 };
    assert_eq!(worst.len(), expected, "{worst:?}");
    worst
}

#[allow(clippy::print_stdout)]
fn check(name: &str, model: &Path, answers: &HashMap<String, ArrayD<f64>>) {
    for (tensor, distance) in compare(model, answers, Convention::LlamaCpp) {
        println!("{name:20} {tensor:16} {distance:.1e}");
        assert!(distance <= BOUND, "{name} {tensor}: {distance:e} > {BOUND:e}");
    }
}

const NAME: &str = "glm5dims.Q4_K_M";

fn fixtures() -> (PathBuf, HashMap<String, ArrayD<f64>>) {
    let answers = arrays(&fixture(&format!("llamacpp/{NAME}.safetensors")));
    (fixture(&format!("models/{NAME}.gguf")), answers)
}

#[test]
fn the_fixture_agrees_with_llama_cpp() {
    let (model, answers) = fixtures();
    check(NAME, &model, &answers);
}

/// eps of the q_a and kv_a norms: what is after them differs by thousands of bounds, what is before does not.
#[test]
fn hugging_faces_convention_does_not() {
    let (model, answers) = fixtures();
    let worst = compare(&model, &answers, Convention::Hf);
    for tensor in ["attn_norm", "q_a", "kv_cmpr_pe", "k_pe"] {
        assert!(worst[tensor] <= BOUND, "{tensor}: {:e}", worst[tensor]);
    }
    for tensor in ["q_a_norm", "q", "q_pe", "q_nope_absorbed", "kv_cmpr", "kqv_out", "attn_out"] {
        assert!(worst[tensor] > 1000.0 * BOUND, "{tensor}: {:e}", worst[tensor]);
    }
}

#[test]
fn a_whole_folder_agrees_where_one_is_given() {
    let Some(dir) = std::env::var_os("MLA_CHECK_LLAMACPP").map(PathBuf::from) else { return };
    let mut compared = 0;
    for entry in std::fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            check(&name, &dir.join(format!("{name}.gguf")), &arrays(&path));
            compared += 1;
        }
    }
    assert!(compared > 0, "nothing in {} was compared", dir.display());
}
