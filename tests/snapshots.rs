/*!
Digests of each fixture's float64 reference, and the first screens that README shows.

Numbers are kept as text with 6 significant digits, so that a NaN can't hide as `null` and last bits of a
C library do not matter. A change here is a change of the reference: review it.
*/

mod common;

use common::{MODELS, fixture};
use mla_check::case::Draw;
use mla_check::model::{Layer, Model, Reading};
use mla_check::trace::Tensor;
use mla_numeric::DType;
use mla_reference::{Form, Regime, Scope, Stage};
use std::fmt::Write;

fn settings() -> insta::Settings {
    let mut s = insta::Settings::new();
    s.set_snapshot_path(concat!(env!("CARGO_MANIFEST_DIR"), "/snapshots"));
    s.set_prepend_module_to_snapshot(false);
    s.set_omit_expression(true);
    s
}

/// `shape  norm  mean  least  largest  first .. last`, finite values only, with their number where some are not.
fn digest(t: &Tensor) -> String {
    let all = t.block(0..t.rows, 0..t.cols);
    let finite: Vec<f64> = all.iter().copied().filter(|v| v.is_finite()).collect();
    let norm = finite.iter().map(|v| v * v).sum::<f64>().sqrt();
    let mean = finite.iter().sum::<f64>() / finite.len() as f64;
    let least = finite.iter().copied().fold(f64::INFINITY, f64::min);
    let largest = finite.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let ends = [finite[0], finite[finite.len() - 1]];
    let mut line = format!("{:?} norm {norm:.5e} mean {mean:.5e} from {least:.5e} to {largest:.5e}", t.shape);
    let _ = write!(line, " first {:.5e} last {:.5e}", ends[0], ends[1]);
    if finite.len() < all.len() {
        let _ = write!(line, " ({} not finite)", all.len() - finite.len());
    }
    line
}

#[test]
fn reference_of_the_fixtures() {
    for (name, file) in MODELS {
        let model = Model::open(&fixture(file)).unwrap();
        let mut text = String::new();
        for index in 0..model.blocks {
            let weights = model.weights(index).unwrap();
            let spec = model.spec(&Reading::default());
            let case = Draw {
                batch: "0+5,0+1,65+3,130+1".parse().unwrap(),
                regimes: Regime::ALL.to_vec(),
                seed: 0,
                page_size: 64,
                splits: 2,
                dtype: DType::F64,
                hidden: None,
                spec: &spec,
                weights: &weights,
            }
            .case()
            .unwrap();
            let layer = Layer { index, spec: spec.clone(), weights: &weights };
            let keep = common::reference(&layer, &case, &Form::ALL);
            let _ = writeln!(text, "layer {index}");
            for form in Form::ALL {
                for stage in Stage::ALL.iter().filter(|s| s.in_form(form) && s.exists(&spec.geometry)) {
                    if stage.row().scope == Scope::Shared && form == Form::Absorbed {
                        continue;
                    }
                    let shared = stage.row().scope == Scope::Shared;
                    let place = if shared { "" } else { form.name() };
                    let _ =
                        writeln!(text, "{place:8} {:12} {}", stage.name(), digest(keep.get(*stage, form)));
                }
            }
        }
        settings().bind(|| insta::assert_snapshot!(format!("reference-{name}"), text));
    }
}

/// What README shows: the first screen of a clean run and of one with a planted fault.
#[test]
fn first_screens() {
    for (name, args, exit) in [
        ("run", &["run", "fixtures/models/glm5dims.Q4_K_M.gguf"][..], 0),
        ("run-fault", &["run", "fixtures/models/glm5dims.Q4_K_M.gguf", "--fault", "k_b-element"][..], 1),
    ] {
        let out = std::process::Command::new(env!("CARGO_BIN_EXE_mla-check"))
            .args(args)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env("RUST_BACKTRACE", "0")
            // The same screens where there is a GPU.
            .env("CUDA_VISIBLE_DEVICES", "")
            .env_remove("MLA_CHECK_REQUIRE_GPU")
            .output()
            .unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        assert_eq!(out.status.code(), Some(exit), "{text}");
        // Times differ from run to run; nothing else may.
        let kept: Vec<&str> =
            text.lines().map(|l| if l.ends_with(" s") && l.len() < 9 { "[time]" } else { l }).collect();
        settings().bind(|| insta::assert_snapshot!(name, kept.join("\n")));
    }
}

/// README shows what the program prints: the whole clean run, and the top of the one with a planted fault.
#[test]
fn readme_is_true() {
    let readme = std::fs::read_to_string(fixture("../README.md")).unwrap();
    for (name, command) in [
        ("run", "$ cargo run -- run fixtures/models/glm5dims.Q4_K_M.gguf\n"),
        ("run-fault", "$ cargo run -- run fixtures/models/glm5dims.Q4_K_M.gguf --fault k_b-element\n"),
    ] {
        let (_, shown) = readme.split_once(command).unwrap_or_else(|| panic!("README lacks {command}"));
        let (shown, _) = shown.split_once("```").unwrap();
        let snapshot = std::fs::read_to_string(fixture(&format!("../snapshots/{name}.snap"))).unwrap();
        let printed = snapshot.splitn(3, "---\n").nth(2).unwrap();
        let times = |l: &&str| !(l.ends_with(" s") && l.len() < 9 || *l == "[time]");
        let shown: Vec<&str> = shown.lines().filter(times).collect();
        let printed: Vec<&str> = printed.lines().filter(times).take(shown.len()).collect();
        assert_eq!(shown, printed, "{name}");
        assert!(shown.len() > 10);
    }
}

/// Snapshots that no test writes any more would be reviewed by nobody.
#[test]
fn no_orphans() {
    let mut found: Vec<String> = std::fs::read_dir(fixture("../snapshots"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.ends_with(".snap"))
        .collect();
    found.sort();
    assert_eq!(
        found,
        ["reference-dsv3.Q4_K_M.snap", "reference-glm5dims.Q4_K_M.snap", "run-fault.snap", "run.snap"]
    );
}
