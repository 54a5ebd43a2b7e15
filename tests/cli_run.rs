/*! `mla-check run` as people use it: exit codes, wrong input, faults, files, pipes. */

mod common;

use common::fixture;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const GLM: &str = "models/glm5dims.Q4_K_M.gguf";
const DSV3: &str = "models/dsv3.Q4_K_M-00002-of-00003.gguf";
/// Small, with both phases, a context and a split.
const SMALL: [&str; 4] = ["--batch", "0+3,0+1,64+2,200+1", "--splits", "2"];

fn command(args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_mla-check"));
    c.args(args)
        .env("RUST_BACKTRACE", "0")
        .env_remove("MLA_CHECK_REQUIRE_GPU")
        .env("CUDA_VISIBLE_DEVICES", "")
        .stdin(Stdio::null());
    c
}

fn run(model: &str, args: &[&str]) -> Output {
    let path = fixture(model);
    command(&["run", path.to_str().unwrap()]).args(args).output().unwrap()
}

fn json(out: &Output) -> serde_json::Value {
    serde_json::from_slice(&out.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&out.stdout)))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn the_tensor_core_model_is_clean_too() {
    for dtype in ["bf16", "f16"] {
        let mut args = vec!["--accumulate", "mma", "--dtype", dtype, "-q"];
        args.extend(SMALL);
        let out = run(GLM, &args);
        assert_eq!(out.status.code(), Some(0), "{dtype}: {}", text(&out.stdout));
    }
}

/// The bounds must be sharp enough: at most 2 ulps in the median on projections, norms and rope, and 3 % of
/// the tensor's rms in one element of at most 1 rms is a fault.
#[test]
fn bounds_are_sharp_and_three_percent_in_one_element_is_a_fault() {
    let stages = [
        "attn_in",
        "q_a",
        "q_a_normed",
        "q_raw",
        "q",
        "kv_a",
        "kv_c_normed",
        "k_pe",
        "k",
        "v",
        "q_latent",
        "out",
    ];
    for model in [GLM, DSV3] {
        let mut args = vec!["--format", "json"];
        args.extend(SMALL);
        let report = json(&run(model, &args));
        let mut seen = 0;
        for unit in report["layers"][0]["tensors"].as_array().unwrap() {
            if stages.contains(&unit["tensor"].as_str().unwrap()) {
                let median = unit["median_bound_ulps"].as_f64().unwrap();
                assert!(median <= 2.0, "{model} {}: {median}", unit["tensor"]);
                seen += 1;
            }
        }
        assert!(seen >= stages.len());
        for stage in stages {
            for seed in ["0", "1", "2"] {
                let fault = format!("{stage}-element=0.03");
                let mut args = vec!["--fault", &fault, "-s", seed, "--format", "json"];
                args.extend(SMALL);
                let out = run(model, &args);
                assert_eq!(out.status.code(), Some(1), "{model} {fault} seed {seed}");
                let report = json(&out);
                let units = report["layers"][0]["tensors"].as_array().unwrap();
                let first = units.iter().find(|u| u["verdict"] == "fault").unwrap();
                assert_eq!(first["tensor"], stage, "{model} {fault}");
            }
        }
    }
}

/// In float32 the bounds themselves show: in bf16 half an ulp hides them. An ulp of y is at least u|y|.
///
/// - Norms: ρ = (½(512/128 + 8) + 4)u + 2^-22.4 = 13.1u at most, so 13.1 ulps and a half; the histogram adds an eighth.
/// - Rope: 3u(|a·cos| + |b·sin|). For normal a and b both that sum (mean 1.02) and |x| (median 0.67) are a share of
///   one rms, and an ulp is 1.4u|x| on the average: 3 · 1.02 / 0.67 / 1.4 = 3.3.
/// - Projections over K = 256 in one chain: 257u · K against √K · 0.67 of a median sum: 257 · 16 / 0.67 = 6,100 ulps.
#[test]
fn bounds_are_sharp_in_float32() {
    for model in [GLM, DSV3] {
        let report = json(&run(model, &[&["--format", "json", "--dtype", "f32"], &SMALL[..]].concat()));
        for (stages, most) in [
            (&["attn_in", "q_a_normed", "kv_c_normed"][..], 15.3),
            (&["k_pe"], 5.0),
            (&["q_a", "q_raw", "kv_a"], 7000.0),
        ] {
            for stage in stages {
                let units = report["layers"][0]["tensors"].as_array().unwrap();
                let own: Vec<f64> = units
                    .iter()
                    .filter(|u| u["tensor"] == *stage)
                    .map(|u| u["median_bound_ulps"].as_f64().unwrap())
                    .collect();
                assert_eq!(own.len(), 2, "{stage}");
                assert!(own.iter().all(|m| *m <= most), "{model} {stage}: {own:?}, at most {most}");
            }
        }
    }
}

/// One altered element, or one of the other planted faults: exit 1, and the right tensor first.
#[test]
fn planted_faults_are_found_where_they_are() {
    let mut faults: Vec<(String, &str)> = [
        "hidden",
        "attn_in",
        "q_a",
        "q_a_normed",
        "q_raw",
        "q",
        "kv_a",
        "kv_c_normed",
        "k_pe",
        "cache",
        "k",
        "v",
        "q_latent",
        "part_o",
        "part_lse",
        "o_latent",
        "lse",
        "attn_out",
        "out",
        "g_attn",
        "w_q_a",
        "g_q",
        "w_q_b",
        "w_kv_a",
        "g_kv",
        "w_uk",
        "w_uv",
        "w_o",
    ]
    .into_iter()
    .map(|t| (format!("{t}-element"), t))
    .collect();
    for (fault, tensor) in [
        ("k_b-element", "w_uk"),
        ("v_b-element", "w_uv"),
        ("softmax-scale=1.01", "part_o"),
        ("output-gain=1.02", "attn_out"),
        ("head-gain=1.02@v", "v"),
        ("eps=10@kv_c_normed", "q_a_normed"),
        ("eps=10@attn_in", "attn_in"),
        ("rope-offset=1", "q"),
        ("rope-offset=1@k_pe", "k_pe"),
        ("swap-heads=0,2", "attn_out"),
        ("drop-token=1", "part_o"),
        ("foreign-page=0", "k"),
        ("merge-base", "lse"),
        ("no-rescale", "part_o"),
        ("phantom-output", "out"),
        ("skipped-row", "attn_out"),
        ("skipped-row@k_pe", "k_pe"),
    ] {
        faults.push((fault.into(), tensor));
    }
    for (fault, tensor) in faults {
        let mut args = vec!["--fault", &fault, "--format", "json"];
        args.extend(SMALL);
        let out = run(DSV3, &args);
        assert_eq!(out.status.code(), Some(1), "{fault}: {}{}", text(&out.stdout), text(&out.stderr));
        let report = json(&out);
        assert_eq!(report["deliberate_fault"], fault.as_str());
        let units = report["layers"][0]["tensors"].as_array().unwrap();
        let bad: Vec<&str> =
            units.iter().filter(|u| u["verdict"] == "fault").map(|u| u["tensor"].as_str().unwrap()).collect();
        assert_eq!(bad[0], tensor, "{fault}: {bad:?}");
    }
}

#[test]
fn a_fault_without_anything_to_act_on_is_refused() {
    for (fault, args) in [
        ("part_o-element", &["--batch", "0+3"][..]),
        ("merge-base", &["--batch", "0+3"]),
        ("k-element", &["--batch", "0+3", "--form", "absorbed"]),
        ("w_q-element", &["--batch", "0+3"]),
        ("shard-zero", &[]),
        ("nonsense", &[]),
    ] {
        let out = run(GLM, &[&["--fault", fault], args].concat());
        assert_eq!(out.status.code(), Some(2), "{fault}");
        three_lines(&out, "--fault");
    }
}

/// Every error says what, where and what to do.
fn three_lines(out: &Output, named: &str) {
    let e = text(&out.stderr);
    assert!(e.starts_with("error: "), "{e}");
    assert!(e.contains("\n  where: ") && e.contains("\n  do: ") && e.contains(named), "{e}");
    assert!(!e.contains("panicked"), "{e}");
}

#[test]
fn wrong_input_is_exit_2_and_says_what_to_do() {
    for (args, named) in [
        (&["--batch", "64"][..], "--batch"),
        (&["--batch", "1+0"], "--batch"),
        (&["--layer", "7"], "--layer"),
        (&["--layer", "0..9"], "--layer"),
        (&["--layer", "x"], "--layer"),
        (&["--batch", "4000+1"], "--attention"),
        (&["--attention", "dsa", "--tp", "2", "-q"], "--attention dsa --tp"),
        (&["--hidden", "nowhere.npy"], "nowhere.npy"),
        (&["--report", "x.pdf"], "x.pdf"),
        (&["--report", "nowhere/x.json"], "nowhere"),
    ] {
        let out = run(GLM, args);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        three_lines(&out, named);
        let bisect = run(GLM, &[args, &["--bisect"]].concat());
        assert_eq!(bisect.status.code(), Some(128), "{args:?}");
    }
    for path in
        ["nowhere.gguf", env!("CARGO_MANIFEST_DIR"), concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")]
    {
        let out = command(&["run", path]).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{path}");
        three_lines(&out, path);
    }
    // clap's own errors.
    for args in [&["--page-size", "0"][..], &["--norm-eps", "nan"], &["--splits", "0"], &["--dtype", "int4"]]
    {
        assert_eq!(run(GLM, args).status.code(), Some(2), "{args:?}");
        assert_eq!(run(GLM, &[args, &["--bisect"]].concat()).status.code(), Some(128), "{args:?}");
    }
}

#[test]
fn engines_that_are_not_here_are_exit_5() {
    let out = run(GLM, &["--engine", "cuda"]);
    assert_eq!(out.status.code(), Some(5));
    three_lines(&out, "driver");
    let path = fixture(GLM);
    let out = command(&["run", path.to_str().unwrap()]).env("MLA_CHECK_REQUIRE_GPU", "1").output().unwrap();
    assert_eq!(out.status.code(), Some(5));
    three_lines(&out, "MLA_CHECK_REQUIRE_GPU");
}

#[test]
fn longer_requests_than_top_k_run_dense_where_asked() {
    let out = run(GLM, &["--attention", "dense", "--batch", "2100+1", "-q"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stdout));
}

#[test]
fn reference_agrees_in_both_forms_and_saves_its_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let save = dir.path().to_str().unwrap();
    let mut args = vec!["--engine", "reference", "--save", save, "--format", "json"];
    args.extend(SMALL);
    let out = run(DSV3, &args);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let apart = json(&out)["layers"][0]["forms_agree"].as_f64().unwrap();
    assert!(apart <= 1e-12, "{apart}");
    let manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("layer-0/manifest.json")).unwrap()).unwrap();
    for entry in manifest["tensors"].as_array().unwrap() {
        let file =
            std::fs::File::open(dir.path().join("layer-0").join(entry["file"].as_str().unwrap())).unwrap();
        let npy = npyz::NpyFile::new(std::io::BufReader::new(file)).unwrap();
        let shape: Vec<u64> =
            entry["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert_eq!(npy.shape(), shape);
        assert_eq!(npy.into_vec::<f64>().unwrap().len() as u64, shape.iter().product::<u64>());
    }
    // With one form there is nothing to hold it against: no verdict.
    let mut args = vec!["--engine", "reference", "--form", "fused", "-q"];
    args.extend(SMALL);
    assert_eq!(run(DSV3, &args).status.code(), Some(3));
}

/// What was saved can be given back as hidden states, and gives the same norms.
#[test]
fn saved_hidden_states_run_again() {
    let dir = tempfile::tempdir().unwrap();
    let save = dir.path().to_str().unwrap();
    let mut args = vec!["--dtype", "f32", "--save", save, "--format", "json"];
    args.extend(SMALL);
    let first = json(&run(DSV3, &args));
    let hidden = dir.path().join("layer-0/hidden.engine.npy");
    let mut args = vec!["--dtype", "f32", "--hidden", hidden.to_str().unwrap(), "--format", "json"];
    args.extend(SMALL);
    let second = json(&run(DSV3, &args));
    assert_eq!(first["layers"][0]["tensors"], second["layers"][0]["tensors"]);
    // Another batch needs another number of rows.
    let out = run(DSV3, &["--hidden", hidden.to_str().unwrap(), "--batch", "0+2"]);
    assert_eq!(out.status.code(), Some(2));
    three_lines(&out, "--hidden");
}

#[test]
fn threads_do_not_change_a_bit() {
    let figures = |threads: &str| {
        let mut args = vec!["-t", threads, "--format", "json"];
        args.extend(SMALL);
        json(&run(GLM, &args))["layers"][0]["tensors"].clone()
    };
    let one = figures("1");
    assert_eq!(one, figures("2"));
    assert_eq!(one, figures("3"));
}

#[test]
fn conventions_change_what_is_computed() {
    let scale = |c: &str| {
        let dir = tempfile::tempdir().unwrap();
        let out = run(
            GLM,
            &[
                "--convention",
                c,
                "--engine",
                "reference",
                "--batch",
                "0+2",
                "--save",
                dir.path().to_str().unwrap(),
            ],
        );
        assert_eq!(out.status.code(), Some(0));
        let m: serde_json::Value =
            serde_json::from_slice(&std::fs::read(dir.path().join("layer-0/manifest.json")).unwrap())
                .unwrap();
        let find = |n: &str| {
            let all = m["scalars"].as_array().unwrap();
            all.iter().find(|s| s[0] == n).unwrap()[1].as_f64().unwrap()
        };
        find("eps_latent")
    };
    assert_eq!(scale("hf"), 1e-6);
    assert_eq!(scale("vllm"), 1e-5);
    assert_eq!(scale("llama.cpp"), f64::from(1e-5f32));
}

#[test]
fn text_fits_eighty_columns_and_pipes_may_close() {
    let path = fixture(GLM);
    let mut args = vec!["run", path.to_str().unwrap(), "--fault", "k-element"];
    args.extend(SMALL);
    let out = command(&args).output().unwrap();
    let longest = text(&out.stdout)
        .lines()
        // The block to paste is Markdown: its lines are not wrapped.
        .filter(|l| !l.contains(".gguf") && !l.starts_with("    "))
        .map(|l| l.chars().count())
        .max();
    assert!(longest.unwrap() <= 80, "{longest:?}");
    assert!(!text(&out.stdout).contains('\u{1b}'), "no colour in a pipe");
    args.push("--color=always");
    assert!(text(&command(&args).output().unwrap().stdout).contains('\u{1b}'));
    // A reader that leaves after the first byte.
    let mut child = command(&["run", path.to_str().unwrap(), "--batch", "0+2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let status = child.wait().unwrap();
    let mut e = String::new();
    child.stderr.take().unwrap().read_to_string(&mut e).unwrap();
    assert!(status.code() == Some(0) && e.is_empty(), "{status:?} {e}");
}

#[test]
fn reports_are_written_whole() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.json");
    let mut args = vec!["--report", file.to_str().unwrap(), "-q"];
    args.extend(SMALL);
    let out = run(GLM, &args);
    assert_eq!(out.status.code(), Some(0));
    assert_eq!(text(&out.stdout), "engine cpu, layer 0 of 2, weights as stored: rounding\n");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(report["schema"], "mla-check.run/1");
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "temporary files are gone");
    assert!(Path::new(&file).exists());
}

/// A two-dimensional float32 .npy file.
fn npy(path: &Path, rows: usize, values: &[f32]) {
    let header =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {}), }}", values.len() / rows);
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    std::fs::write(path, bytes).unwrap();
}

fn refused(out: &Output, what: &str) {
    let e = text(&out.stderr);
    assert!(out.status.code() == Some(2) && e.contains(what), "{:?} {e}", out.status);
    assert_eq!(e.lines().count(), 3, "what, where, what to do: {e}");
}

#[test]
fn hidden_states_must_be_finite_in_the_dtype() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hidden.npy");
    let with = |value: f32, dtype| {
        let mut values = vec![1.0; 2 * 256];
        values[256 + 7] = value;
        npy(&path, 2, &values);
        run(GLM, &["--batch", "0+2", "--hidden", path.to_str().unwrap(), "--dtype", dtype])
    };
    refused(&with(f32::NAN, "bf16"), "NaN is not finite in bf16");
    refused(&with(f32::INFINITY, "f32"), "inf is not finite in f32");
    refused(&with(7e4, "f16"), "7e4 is not finite in f16");
    assert_eq!(with(7e4, "bf16").status.code(), Some(0));
}

/// Below the smallest normal float32 an error is not relative to anything.
#[test]
fn underflow_is_no_fault() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hidden.npy");
    let values: Vec<f32> = (0..3 * 256).map(|i| ((i * 37 % 101) as f32 - 50.0) * 2e-43).collect();
    npy(&path, 3, &values);
    for dtype in ["bf16", "f16", "f32"] {
        let out = run(GLM, &["--batch", "0+2,9+1", "--hidden", path.to_str().unwrap(), "--dtype", dtype]);
        // In float32 nothing of it can be seen: no fault, and no clean bill either.
        let want = if dtype == "f32" { 3 } else { 0 };
        assert_eq!(out.status.code(), Some(want), "{dtype}: {}", text(&out.stdout));
    }
}

/// NaN in the file is NaN in every correct engine: no fault of it, and no clean bill either.
#[test]
fn weights_that_are_not_numbers_give_no_verdict() {
    let mut bytes = std::fs::read(fixture(GLM)).unwrap();
    let model = mla_check::model::Model::open(&fixture(GLM)).unwrap();
    let at = model.gguf().unwrap().tensor("blk.0.attn_q_a_norm.weight").unwrap().offset as usize;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nan.gguf");
    std::fs::write(&path, bytes).unwrap();
    for splits in ["1", "2"] {
        let args = ["run", path.to_str().unwrap(), "--batch", "0+3,64+2,200+1", "--splits", splits];
        let out = command(&args).output().unwrap();
        let t = text(&out.stdout);
        assert_eq!(out.status.code(), Some(3), "{t}");
        assert!(t.contains("no verdict: not all could be compared"), "{t}");
        assert!(t.contains("odd: g_q: 1 of 256 values are NaN or infinite"), "{t}");
        assert!(t.contains("are NaN in engine and reference") && !t.contains("first bad"), "{t}");
    }
}

#[test]
fn a_verdict_outlives_its_readers() {
    let path = fixture(GLM);
    let faulty = ["run", path.to_str().unwrap(), "--batch", "0+2", "--fault", "k-element"];
    let mut child = command(&faulty).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(1));
    // A report that can't be written: said, after the verdict.
    let dir = tempfile::tempdir().unwrap();
    let taken = dir.path().join("folder.json");
    std::fs::create_dir(&taken).unwrap();
    let out = run(GLM, &["--batch", "0+2", "-q", "--report", taken.to_str().unwrap()]);
    refused(&out, "the report could not be written");
    assert!(text(&out.stdout).contains("rounding"));
}

#[test]
fn a_tensor_that_cannot_be_saved_is_no_broken_engine() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("layer-0/q.engine.npy")).unwrap();
    refused(
        &run(GLM, &["--batch", "0+2", "--save", dir.path().to_str().unwrap()]),
        "writing an array failed",
    );
}

#[test]
fn a_fault_that_changes_nothing_is_not_called_clean() {
    for fault in ["output-gain=1", "w_uk-element=1e-9", "drop-token=5000"] {
        let out = run(GLM, &["--batch", "0+2", "-q", "--fault", fault]);
        assert!(text(&out.stdout).contains("the deliberate fault was not seen"), "{}", text(&out.stdout));
    }
}

#[test]
fn what_cannot_be_is_refused_at_once() {
    refused(&run(GLM, &["--accumulate", "mma", "--dtype", "f32"]), "16-bit operands");
    refused(&run(GLM, &["--accumulate", "mma", "--engine", "ptx"]), "accumulates as its kernels do");
    refused(&run(GLM, &["--qkv-a", "stacked", "--engine", "reference"]), "each projection by itself");
    refused(
        &run("architectures/plm_dims.Q4_K_M.gguf", &["--qkv-a", "stacked", "--engine", "cpu"]),
        "there is no q_a to stack",
    );
}

/// The verdict of a run with a chosen contract, with what explains each unit that carries evidence.
fn judged_by(contract: &str, more: &[&str]) -> (Option<i32>, serde_json::Value, Vec<(String, String)>) {
    let mut args = vec!["--contract", contract, "--form", "absorbed", "--format", "json"];
    args.extend(more);
    let out = run(GLM, &args);
    let report = json(&out);
    let explained = |u: &serde_json::Value| {
        let why = u["explained"]["contract"].as_str().unwrap_or("").to_string();
        (u["evidence"].is_array()).then(|| (u["verdict"].as_str().unwrap().to_string(), why))
    };
    let units = report["layers"][0]["tensors"].as_array().unwrap().iter().filter_map(explained).collect();
    (out.status.code(), report, units)
}

/// Where P is cast need not be known (with as many rows as the promise takes: the default batch): a correct engine is clean, and a gain of 1 % is not. The same bits that are
/// rounding under the engine's contract are another contract's under a wrong one, and that names the engine's.
#[test]
fn a_run_is_judged_by_the_contract_that_is_asked_for() {
    let (code, report, accused) = judged_by("none", &[]);
    assert_eq!((code, accused.len()), (Some(0), 0), "{accused:?}");
    assert_eq!(report["layers"][0]["judged"]["by"], "none");
    assert_eq!(report["layers"][0]["judged"]["contract"]["softmax"]["emulate"], false);
    assert_eq!(report["layers"][0]["contract"]["softmax"]["emulate"], true);
    let (code, report, accused) = judged_by("none", &["--fault", "softmax-scale=1.01"]);
    assert_eq!((code, report["verdict"].as_str()), (Some(1), Some("fault")), "{accused:?}");

    let declared = report["layers"][0]["contract"].clone();
    let contract = mla_check::contracts::parse(
        &toml::to_string(&serde_json::from_value::<mla_reference::Contract>(declared).unwrap()).unwrap(),
        "report",
    );
    let mut contract = contract.unwrap();
    contract.softmax.tile = 32;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tile32.toml");
    std::fs::write(&path, mla_check::contracts::to_toml(&contract).unwrap()).unwrap();
    let path = path.to_str().unwrap();
    let (code, report, accused) = judged_by(path, &SMALL);
    assert_eq!((code, report["verdict"].as_str()), (Some(0), Some("contract-differs")), "{accused:?}");
    assert!(!accused.is_empty());
    for (verdict, why) in &accused {
        assert_eq!(verdict, "contract-differs");
        assert!(
            why.starts_with("what the engine declares: ") && why.contains("softmax.tile 64 (not 32)"),
            "{why}"
        );
    }
    // What neither explains is a fault whatever contract was asked for.
    let (code, report, _) =
        judged_by(path, &["--fault", "output-gain=1.01", SMALL[0], SMALL[1], SMALL[2], SMALL[3]]);
    assert_eq!((code, report["verdict"].as_str()), (Some(1), Some("fault")));
}

#[test]
fn a_contract_that_is_none_or_does_not_fit_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    };
    let broken = write("broken.toml", "activations = 'bf16'\n");
    let f16 = write("f16.toml", "activations = 'f16'\naccumulate = 'unknown'\n");
    for (contract, what) in [
        ("tile-32", "flashmla-decode"),
        ("nowhere.toml", "can't be read"),
        (&broken, "accumulate"),
        (&f16, "stores activations in f16, the engine in bf16"),
    ] {
        let out = run(GLM, &["--contract", contract, "--batch", "0+1"]);
        let e = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{contract}: {e}");
        assert!(e.contains(what) && e.contains("where: --contract") && e.contains("do: "), "{contract}: {e}");
    }
    let out = run(GLM, &["--contract", "none", "--engine", "reference"]);
    assert!(out.status.code() == Some(2) && text(&out.stderr).contains("--contract"));
}
