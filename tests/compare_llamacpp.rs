/*!
llama.cpp's own arrays from quantised weights: its CPU kernels round the left side of each product to the blocks that go with
the weight's type. With no contract declared the tool finds that, type by type, and none of its arrays is a fault.

`MLA_CHECK_LLAMACPP=DIR` adds every NAME.safetensors of a folder beside its model (NAME.gguf, the first part of a split one,
or without an ending `.wF32`); `--nocapture` prints what was found.
*/

#![allow(clippy::print_stdout)] // The table is what --nocapture is for.

mod common;

use common::fixture;
use mla_check::compare::map::Map;
use mla_check::compare::{self, Options, mapped};
use mla_check::judge::{Unit, Verdict};
use mla_check::model::{Convention, Model, Reading};
use mla_check::report::LayerReport;
use mla_check::trace::read::Dump;
use std::path::{Path, PathBuf};

/// The map for what a dump holds: `fixtures/llamacpp/map.toml` with the head's width, without what is not there.
fn map(dump: &Dump, layer: usize, nope: usize) -> Map {
    let has = |n: &str| dump.find(&format!("L{layer}/{n}")).is_some();
    let text = std::fs::read_to_string(fixture("llamacpp/map.toml")).unwrap();
    let legacy = has("Qcur");
    let mut lines: Vec<String> = Vec::new();
    // Every file has numbers of its own.
    let (head, tensors) =
        (text.split("[geometry]").next().unwrap(), text.split("[tensors]\n").nth(1).unwrap());
    let text = format!("{head}[tensors]\n{tensors}");
    for l in text.lines().take_while(|l| !l.starts_with('#') || !l.contains("columns of each head")) {
        let name = l.split("L{layer}/").nth(1).and_then(|r| r.split('"').next());
        if name.is_none_or(has) {
            lines.push(if legacy { l.replace("\"absorbed\"", "\"fused\"") } else { l.to_string() });
        }
    }
    if legacy {
        for (ours, theirs) in [("q", "Qcur"), ("k", "Kcur"), ("v", "Vcur")] {
            lines.push(format!("{ours} = \"L{{layer}}/{theirs}\""));
        }
    } else {
        lines.push(format!(
            "[tensors.q]\nparts = [\n  {{ name = \"L{{layer}}/q\", axes = [\"token\", \"head*nope+rope\"], slice = {{ \"nope+rope\" = [0, {nope}] }} }},\n  {{ name = \"L{{layer}}/q_pe\", axes = [\"token\", \"head\", \"rope\"] }},\n]"
        ));
    }
    let text = lines.join("\n");
    Map::parse(&text, "map").unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn judged(model: &Path, dump: &Path, layer: usize, change: &dyn Fn(&mut compare::Capture)) -> LayerReport {
    let model = Model::open(model).unwrap_or_else(|e| panic!("{e}"));
    let dump = Dump::open(dump).unwrap();
    let reading = Reading::of(Convention::LlamaCpp);
    let map = map(&dump, layer, model.spec(&reading).geometry.nope);
    let mut capture =
        mapped::capture(&dump, &map, &model.spec(&reading), layer).unwrap_or_else(|e| panic!("{e}"));
    change(&mut capture);
    compare::layer(&model, layer, &reading, capture, &Options::default(), &|_| ()).unwrap()
}

fn print(name: &str, r: &LayerReport) {
    for u in r.tensors.iter().filter(|u| u.elements > 0) {
        let found = u.found_contract.as_ref().map_or(String::new(), |f| f.to_string());
        println!("| {name} L{} | {} | {} | {found} |", r.layer, u.title(), u.verdict);
    }
}

fn faults(r: &LayerReport) -> Vec<String> {
    let bad = |u: &&Unit| u.elements > 0 && matches!(u.verdict, Verdict::Fault | Verdict::ContractBroken);
    let text = |u: &Unit| format!("{}: {:?} {:?}", u.title(), u.evidence, u.note);
    r.tensors.iter().filter(bad).map(text).collect()
}

#[test]
fn quantised_activations_are_found_and_no_fault() {
    let (model, dump) =
        (fixture("models/glm5dims.Q4_K_M.gguf"), fixture("llamacpp/glm5dims.Q4_K_M.quantised.safetensors"));
    let r = judged(&model, &dump, 0, &|_| ());
    print("fixture", &r);
    assert!(faults(&r).is_empty(), "{:#?}", faults(&r));
    for (tensor, operands) in
        [("q_a", "q8_k"), ("q_raw", "q8_k"), ("kv_a", "q8_k"), ("q_latent", "q8_0"), ("out", "q8_k")]
    {
        let u = r.tensors.iter().find(|u| u.tensor == tensor).unwrap();
        assert_eq!(u.verdict, Verdict::Rounding, "{tensor} {:?}", u.note);
        let found = u.found_contract.as_ref().unwrap_or_else(|| panic!("{tensor}: nothing found"));
        assert_eq!(found.contract.operands.name(), operands, "{tensor}");
        assert_eq!(found.tried, 5);
    }
    // A search explains no fault away: a gain of 0.3 % in a tensor, a row of another token.
    for (tensor, what) in [("q_a", 0), ("kv_a", 1), ("out", 0), ("q_latent", 1)] {
        let r = judged(&model, &dump, 0, &|c| {
            let (_, t) = c.tensors.iter_mut().find(|(id, _)| id.stage.name() == tensor).unwrap();
            let mut rows = t.block(0..t.rows, 0..t.cols);
            match what {
                0 => rows.mapv_inplace(|v| f64::from((v * 1.003) as f32)),
                _ => {
                    let other = rows.row(3).to_owned();
                    rows.row_mut(4).assign(&other);
                }
            }
            (0..t.rows).for_each(|i| t.write(i, 0, &rows.row(i).to_vec()));
        });
        let u = r.tensors.iter().find(|u| u.tensor == tensor).unwrap();
        assert_eq!(u.verdict, Verdict::Fault, "{tensor} {what} {:?}", u.explained);
    }
}

#[test]
fn a_folder_of_llama_cpps_arrays_is_no_fault() {
    let Some(dir) = std::env::var_os("MLA_CHECK_LLAMACPP").map(PathBuf::from) else { return };
    let mut bad = Vec::new();
    let mut files: Vec<PathBuf> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|p| p.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    assert!(!files.is_empty());
    for path in files {
        let name = path.file_stem().unwrap().to_string_lossy().to_string();
        let stem = name.strip_suffix(".wF32").unwrap_or(&name);
        let whole = dir.join(format!("{stem}.gguf"));
        let model = if whole.exists() { whole } else { dir.join(format!("{stem}-00001-of-00003.gguf")) };
        for layer in 0..2 {
            if Dump::open(&path).unwrap().find(&format!("L{layer}/inp")).is_none() {
                continue;
            }
            if let Err(e) = Model::open(&model) {
                println!("| {name} | not read: {} |", e.to_string().lines().next().unwrap_or_default());
                continue;
            }
            let r = judged(&model, &path, layer, &|_| ());
            print(&name, &r);
            bad.extend(faults(&r).into_iter().map(|f| format!("{name} L{layer} {f}")));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}
