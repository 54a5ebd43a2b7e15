/*!
The float64 reference against Hugging Face's own modules run in float64 (fixtures/oracle/README.md).

`MLA_CHECK_ORACLE=DIR` adds every pair NAME.gguf (or its first part) and NAME.safetensors of a folder; the
files in `fixtures/` are always compared.

Bound: 1e-13 of the largest magnitude of the tensor (sums of at most 512 terms in two orders: two programs were 6e-15 apart); 1e-10 where positions reach 120,000, because an angle
of 1.2e5 rad carries an error of 1e-11 in float64 itself.

Where a model has two sets of rope factors, `far` was computed with the long ones (a session of more than
32,768 positions), all else with the short ones. Where the answers are of sparse attention (glm5dec), they end with the keys and values.
*/

#![allow(clippy::print_stdout)]

mod common;

use common::{Keep, ORACLE, arrays, fixture, reference, sequence};
use mla_check::model::arch::ARCHITECTURES;
use mla_check::model::{Convention, FactorSet, Layer, Model, ModelError, Reading};
use mla_reference::{Form, Stage};
use ndarray::{Array2, ArrayD, Axis};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Names of the answers: ours, theirs, first column of a head.
const TENSORS: &[(&str, Stage)] = &[
    ("attn_in", Stage::AttnIn),
    ("q_a", Stage::QA),
    ("q_a_norm", Stage::QANormed),
    ("q", Stage::QRaw),
    ("q_pe_rope", Stage::Q),
    ("kv_a", Stage::KvA),
    ("kv_c_norm", Stage::KvCNormed),
    ("k_pe_rope", Stage::KPe),
    ("k", Stage::K),
    ("v", Stage::V),
    ("lse", Stage::Lse),
    ("attn_out", Stage::AttnOut),
    ("out", Stage::Out),
];

/// Rows `rows` of a stage as [rows, …], for the rope part of q only its last columns.
fn ours(keep: &Keep, stage: Stage, form: Form, rows: &[usize], theirs: &ArrayD<f64>) -> Option<Array2<f64>> {
    if !keep.tensors.contains_key(&mla_check::trace::TensorId::of(stage, form)) {
        return None;
    }
    let t = keep.get(stage, form);
    let mut all = t.block(0..t.rows, 0..t.cols).select(Axis(0), rows);
    if stage == Stage::Q {
        let (heads, pe) = (theirs.shape()[1], theirs.shape()[2]);
        let width = t.cols / heads;
        let cols: Vec<usize> = (0..heads).flat_map(|h| (h + 1) * width - pe..(h + 1) * width).collect();
        all = all.select(Axis(1), &cols);
    }
    Some(all)
}

/// Largest difference over largest magnitude.
fn distance(a: &Array2<f64>, b: &ArrayD<f64>) -> f64 {
    assert_eq!(a.len(), b.len());
    let largest = b.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    let mut worst = 0.0f64;
    for (x, y) in a.iter().zip(b.iter()) {
        assert!(x.is_finite() && y.is_finite());
        worst = worst.max((x - y).abs());
    }
    worst / largest
}

/// Their rotated queries with the temperature of the rows' positions, which they were stored without.
fn warm(b: &ArrayD<f64>, stage: Stage, rows: &[usize], factors: Option<&ArrayD<f64>>) -> ArrayD<f64> {
    let mut b = b.clone();
    if let (Stage::Q, Some(factors)) = (stage, factors) {
        for (mut row, i) in b.outer_iter_mut().zip(rows) {
            row *= factors[*i];
        }
    }
    b
}

fn compare(model: &Path, answers: &HashMap<String, ArrayD<f64>>) -> Result<Vec<String>, ModelError> {
    let model = Model::open(model)?;
    let mut table: HashMap<(String, &str), f64> = HashMap::new();
    let mut cases: Vec<&str> = answers.keys().filter_map(|k| k.strip_suffix("/hidden")).collect();
    cases.sort_unstable();
    assert!(!cases.is_empty());
    let mut total = 0;
    for case in cases {
        let (name, layer) = case.split_once("/L").unwrap();
        let layer: usize = layer.parse().unwrap();
        let hidden = answers[&format!("{case}/hidden")].clone().into_dimensionality().unwrap();
        let positions: Vec<u64> = answers[&format!("{case}/positions")].iter().map(|p| *p as u64).collect();
        let rows: Vec<usize> = answers[&format!("{case}/rows")].iter().map(|r| *r as usize).collect();
        // seq_eps: the metadata's eps in the q_a and kv_a norms, as vLLM does.
        let convention = if name == "seq_eps" { Convention::Vllm } else { Convention::Hf };
        let n_ctx = positions.iter().max().map(|p| p + 1).filter(|_| name == "far");
        let reading = Reading { n_ctx, ..Reading::of(convention) };
        let spec = model.spec(&reading);
        let long = model.factor_set(&reading) == Some(FactorSet::Long);
        assert_eq!(long, name == "far" && model.numbers.factors.is_some());
        let inv_freq = &answers[if long { "meta/inv_freq_long" } else { "meta/inv_freq" }];
        assert_eq!(spec.rope.inv_freq.len(), inv_freq.len());
        for (a, b) in spec.rope.inv_freq.iter().zip(inv_freq) {
            assert!((a - b).abs() <= 1e-15 * b, "inv_freq {a} {b}");
        }
        let scale = answers["meta/softmax_scale"][0];
        assert!((spec.scale - scale).abs() <= 1e-14 * scale, "scale {} {scale}", spec.scale);
        let weights = model.weights(layer)?;
        let layer = Layer { index: layer, spec, weights: &weights };
        let keep = reference(&layer, &sequence(hidden, &positions), &Form::ALL);
        let limit = if name == "far" { 1e-10 } else { 1e-13 };
        let all: Vec<usize> = (0..positions.len()).collect();
        let (mut seen, mut named) = (0, 0);
        for (theirs, stage) in TENSORS {
            let Some(b) = answers.get(&format!("{case}/{theirs}")) else { continue };
            let b = &warm(b, *stage, &rows, answers.get(&format!("{case}/q_temp")));
            named += 1;
            let before = seen;
            for form in Form::ALL {
                let rows = if *stage == Stage::Lse { &all } else { &rows };
                let Some(a) = ours(&keep, *stage, form, rows, b) else { continue };
                let d = distance(&a, b);
                assert!(d <= limit, "{case} {theirs} {form:?}: {d:e} > {limit:e}");
                let worst = table.entry((name.to_string(), theirs)).or_default();
                *worst = worst.max(d);
                seen += 1;
            }
            assert!(seen > before, "{case}: {theirs} was not compared");
        }
        // seq_eps of sparse answers has no more: what the eps of the latents decides before the keys.
        assert!(named >= 3, "{case}: only {named} tensors compared");
        total += named;
    }
    assert!(total >= 12, "only {total} tensors compared");
    let mut lines: Vec<String> =
        table.into_iter().map(|((case, tensor), d)| format!("{case:10} {tensor:10} {d:.1e}")).collect();
    lines.sort();
    Ok(lines)
}

#[test]
fn fixtures_agree_with_hugging_face_in_float64() {
    for (name, file) in ORACLE {
        let answers = arrays(&fixture(&format!("oracle/{name}.safetensors")));
        let lines = compare(&fixture(file), &answers).unwrap_or_else(|e| panic!("{name}: {e}"));
        println!("{name}: worst {:.1e}", worst(&lines));
    }
}

/// The largest distance of lines.
fn worst(lines: &[String]) -> f64 {
    let all = lines.iter().map(|l| l.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
    all.fold(0.0, f64::max)
}

/// What a row of the table of architectures says it is verified by is compared above, and is of that architecture.
#[test]
fn every_verified_architecture_has_its_files_in_the_table() {
    let mut named = Vec::new();
    for arch in ARCHITECTURES {
        for name in arch.verified {
            let (_, file) = ORACLE.iter().find(|o| o.0 == *name).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(Model::open(&fixture(file)).unwrap().arch.name, arch.name, "{name}");
            named.push(*name);
        }
    }
    named.sort_unstable();
    let mut all = ORACLE.map(|o| o.0);
    all.sort_unstable();
    assert_eq!(named, all);
}

/// Hugging Face folders (fixtures/checkpoints/README.md), their answers beside them. `MLA_CHECK_CHECKPOINTS=DIR` adds those of
/// a folder. Their positions end at 23: 1e-13 of the largest magnitude.
#[test]
fn checkpoints_agree_with_hugging_face_in_float64() {
    for folder in common::checkpoints() {
        let answers = common::answers(&folder);
        let lines = compare(&folder, &answers).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        println!("{}", folder.display());
        for line in lines {
            println!("  {line}");
            let worst: f64 = line.rsplit(' ').next().unwrap().parse().unwrap();
            assert!(worst <= 1e-13, "{}: {line}", folder.display());
        }
    }
}

#[test]
fn a_whole_folder_agrees_where_one_is_given() {
    let Some(dir) = std::env::var_os("MLA_CHECK_ORACLE").map(PathBuf::from) else { return };
    let mut compared = 0;
    for entry in std::fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        let whole = dir.join(format!("{name}.gguf"));
        let model = if whole.exists() { whole } else { dir.join(format!("{name}-00001-of-00003.gguf")) };
        match compare(&model, &arrays(&path)) {
            Ok(lines) => {
                compared += 1;
                println!("{name}: worst {:.1e}", worst(&lines));
                lines.iter().for_each(|l| println!("  {l}"));
            }
            Err(e @ ModelError::Architecture { .. }) => println!("{name}: not supported: {e}"),
            Err(e) => panic!("{name}: {e}"),
        }
    }
    assert!(compared > 0, "nothing in {} was compared", dir.display());
}
