/*!
`mla-check compare`: our own saved runs without a map, other software's arrays with one, and what was altered in them.
*/

mod common;

use common::fixture;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const GLM: &str = "models/glm5dims.Q4_K_M.gguf";

fn command(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mla-check"))
        .args(args)
        .env("RUST_BACKTRACE", "0")
        .env("CUDA_VISIBLE_DEVICES", "")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Saves a run of the CPU engine: prefill, prefill with context over pages, decode over two splits.
fn save(dir: &Path, more: &[&str]) {
    let model = fixture(GLM);
    let mut args = vec!["run", model.to_str().unwrap(), "--engine", "cpu", "-q", "--regime", "random"];
    args.extend([
        "--batch",
        "0+3,20+2,40+1",
        "--splits",
        "2",
        "--page-size",
        "16",
        "--save",
        dir.to_str().unwrap(),
    ]);
    args.extend(more);
    let out = command(&args);
    assert!(dir.join("layer-0/manifest.json").is_file(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// Exit code and report.
fn compare(dump: &Path, more: &[&str]) -> (i32, Value) {
    let model = fixture(GLM);
    let args =
        [&["compare", model.to_str().unwrap(), dump.to_str().unwrap(), "--format", "json"], more].concat();
    let out = command(&args);
    let json = serde_json::from_slice(&out.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&out.stderr)));
    (out.status.code().unwrap(), json)
}

/// Tensors that carry evidence of their own, in order: form/name.
fn faults(report: &Value) -> Vec<String> {
    let all = report["layers"][0]["tensors"].as_array().unwrap();
    let bad = all.iter().filter(|u| ["fault", "contract-broken"].contains(&u["verdict"].as_str().unwrap()));
    let mut names: Vec<String> = bad
        .map(|u| match u["form"].as_str() {
            Some(form) => format!("{form}/{}", u["tensor"].as_str().unwrap()),
            None => u["tensor"].as_str().unwrap().to_string(),
        })
        .collect();
    names.dedup();
    names
}

/// Changes the bits of a saved bf16 tensor; the shape is read from the header.
fn alter(dir: &Path, tensor: &str, change: impl FnOnce(&mut [u16], &[usize])) {
    let path = dir.join(format!("layer-0/{tensor}.engine.npy"));
    let mut bytes = std::fs::read(&path).unwrap();
    let start = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = String::from_utf8(bytes[..start].to_vec().split_off(10)).unwrap();
    let shape = header.split('(').nth(1).unwrap().split(')').next().unwrap();
    let shape: Vec<usize> = shape.split(',').filter_map(|n| n.trim().parse().ok()).collect();
    let mut values: Vec<u16> = bytes[start..].chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    let before = values.clone();
    change(&mut values, &shape);
    assert_ne!(before, values, "{tensor} was not changed");
    bytes.truncate(start);
    bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    std::fs::write(path, bytes).unwrap();
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to.join("layer-0")).unwrap();
    for entry in std::fs::read_dir(from.join("layer-0")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join("layer-0").join(path.file_name().unwrap())).unwrap();
    }
}

/// A bf16 value times a factor, rounded to nearest even.
fn times(bits: u16, factor: f32) -> u16 {
    let v = f32::from_bits(u32::from(bits) << 16) * factor;
    half::bf16::from_f32(v).to_bits()
}

/// What `run --save` writes is clean, tensor by tensor as the run itself was; altered, it is a fault, in the tensor that was
/// altered and first in it.
#[test]
fn a_saved_run_is_clean_and_its_altered_copies_are_faults() {
    let dir = tempfile::tempdir().unwrap();
    let clean = dir.path().join("clean");
    save(&clean, &[]);
    let (exit, report) = compare(&clean, &[]);
    assert_eq!((exit, report["verdict"].as_str()), (0, Some("rounding")), "{:?}", faults(&report));
    let layer = &report["layers"][0];
    assert!(layer["engine"]["name"].as_str().unwrap().starts_with("cpu (mla-check "));
    for u in layer["tensors"].as_array().unwrap() {
        let weight = u["tensor"].as_str().unwrap().starts_with(['w', 'g']);
        let wanted = if weight { &["not-compared"][..] } else { &["exact", "rounding"] };
        assert!(wanted.contains(&u["verdict"].as_str().unwrap()), "{u}");
    }
    let swap_rows = |values: &mut [u16], width: usize, a: usize, b: usize| {
        for i in 0..width {
            values.swap(a * width + i, b * width + i);
        }
    };
    type Change<'a> = Box<dyn Fn(&mut [u16], &[usize]) + 'a>;
    let cases: Vec<(&str, &str, &str, Change)> = vec![
        (
            "scaled by 0.3 %",
            "absorbed.attn_out",
            "absorbed/attn_out",
            Box::new(|v, _| v.iter_mut().for_each(|b| *b = times(*b, 1.003))),
        ),
        (
            "two heads swapped",
            "q",
            "q",
            Box::new(|v, shape| {
                let (heads, width) = (shape[1], shape[2]);
                (0..shape[0]).for_each(|t| swap_rows(v, width, t * heads, t * heads + 1));
            }),
        ),
        (
            "the last token's row lost",
            "fused.attn_out",
            "fused/attn_out",
            Box::new(|v, shape| {
                let width = shape[1] * shape[2];
                v[(shape[0] - 1) * width..].fill(0);
            }),
        ),
        (
            "a page shifted by one slot",
            "cache",
            "cache",
            Box::new(|v, shape| {
                // A page that is owned: its first row is no NaN. Rows of one page, moved on by one.
                let (slots, width) = (shape[1], shape[2]);
                let nan = |bits: u16| half::bf16::from_bits(bits).is_nan();
                let page = (0..shape[0]).find(|p| !nan(v[(p * slots + slots - 1) * width])).unwrap();
                v[page * slots * width..(page + 1) * slots * width].rotate_right(width);
            }),
        ),
        (
            "the output of another request",
            "absorbed.out",
            "absorbed/out",
            Box::new(|v, shape| {
                let width = shape[1];
                v.copy_within(0..width, (shape[0] - 1) * width);
            }),
        ),
        ("one element", "k_pe", "k_pe", Box::new(|v, _| v[5] ^= 0x0010)),
    ];
    for (what, tensor, first, change) in cases {
        let altered = dir.path().join("altered");
        copy(&clean, &altered);
        alter(&altered, tensor, change);
        let (exit, report) = compare(&altered, &[]);
        let found = faults(&report);
        assert_eq!((exit, found.first().map(String::as_str)), (1, Some(first)), "{what}: {found:?}");
        std::fs::remove_dir_all(altered).unwrap();
    }
    // A manifest that contradicts itself or its files is an error.
    let manifest = clean.join("layer-0/manifest.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    for (from, to) in [
        ("\"splits\": 2", "\"splits\": 3"),
        ("\"parts\": 2", "\"parts\": 4"),
        ("\"page_size\": 16", "\"page_size\": 1"),
        ("\"pages\":", "\"pages\": 99, \"was\":"),
        ("\"batch\": \"0+3", "\"batch\": \"0+4"),
        ("\"q_a.engine.npy\"", "\"../q_a.engine.npy\""),
        ("mla-check.dump/1", "mla-check.dump/0"),
    ] {
        assert!(text.contains(from), "{from}");
        std::fs::write(&manifest, text.replace(from, to)).unwrap();
        let model = fixture(GLM);
        let out = command(&["compare", model.to_str().unwrap(), clean.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{to}: {said}");
        assert!(said.contains("where: ") && said.contains("do: "), "{to}: {said}");
    }
    std::fs::write(&manifest, text).unwrap();
    // A file that the manifest lists is gone: missing is never silence.
    std::fs::remove_file(clean.join("layer-0/q_a.engine.npy")).unwrap();
    let (exit, report) = compare(&clean, &[]);
    assert_eq!((exit, faults(&report)), (1, vec!["q_a".to_string()]));
}

/// Faults in the engine itself, seen from what it saved.
#[test]
fn faults_of_a_saved_run_are_found_in_its_dump() {
    for (fault, first) in [("drop-token=2", "fused/part_o"), ("foreign-page=1", "fused/k")] {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &["--fault", fault]);
        let (exit, report) = compare(dir.path(), &[]);
        let found = faults(&report);
        assert_eq!(exit, 1, "{fault}");
        assert_eq!(found.first().map(String::as_str), Some(first), "{fault}: {found:?}");
    }
}

/// llama.cpp's own float32 intermediates, by the map that docs/dumps.md shows: ten causal tokens, no cache.
#[test]
fn llama_cpps_arrays_are_no_fault() {
    let dir = tempfile::tempdir().unwrap();
    let dump = fixture("llamacpp/glm5dims.Q4_K_M.safetensors");
    let map = fixture("llamacpp/map.toml");
    let text = std::fs::read_to_string(&map).unwrap();
    let (exit, report) = compare(&dump, &["--map", map.to_str().unwrap()]);
    assert_eq!(exit, 0, "{} {:?}", report["verdict"], faults(&report));
    assert_eq!(report["convention"], "llama.cpp");
    assert_eq!(report["layers"][0]["engine"]["name"], "llama.cpp 11739");
    for u in report["layers"][0]["tensors"].as_array().unwrap() {
        let judged = ["q_a", "q_a_normed", "q_raw", "kv_a", "kv_c_normed", "q_latent", "attn_out", "out"];
        if judged.contains(&u["tensor"].as_str().unwrap()) {
            assert!(["exact", "rounding"].contains(&u["verdict"].as_str().unwrap()), "{u}");
        }
    }
    let left: Vec<&str> = report["not_judged"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(left[0].contains("L1/q_pe") && left[0].contains("L1/inp"), "{}", left[0]);
    assert!(left[1].contains("rotation"), "{}", left[1]);
    let changed = |change: &dyn Fn(&str) -> String, more: &[&str]| {
        let path = dir.path().join("map.toml");
        std::fs::write(&path, change(&text)).unwrap();
        compare(&dump, &[&["--map", path.to_str().unwrap()], more].concat())
    };
    // Hugging Face's eps of the latent norms is another convention: said, not held against anybody.
    let (exit, report) =
        changed(&|t| format!("convention = \"hf\"\n{}", t.replace("eps_latent = 1e-5\n", "")), &[]);
    assert_eq!((exit, report["verdict"].as_str()), (0, Some("convention-differs")), "{:?}", faults(&report));
    // Layer 1 has no arrays of attention; --layer stands before the map's.
    let before = |t: &str| t.lines().filter(|l| !l.contains("out = ")).collect::<Vec<_>>().join("\n");
    let (exit, report) = changed(&before, &["--layer", "1"]);
    assert_eq!((exit, report["layers"][0]["layer"].as_u64()), (0, Some(1)), "{:?}", faults(&report));
    // A tensor of the other layer: neither made of this layer's, nor what its attention read.
    let (exit, report) = changed(&|t| t.replace("\"L{layer}/kv_cmpr\"", "\"L1/kv_cmpr\""), &[]);
    assert_eq!(
        (exit, faults(&report)),
        (1, vec!["kv_c_normed".to_string(), "absorbed/attn_out".to_string()])
    );
    // Another scale than the model's: said before any tensor is compared.
    let (exit, report) = changed(&|t| t.replace("scale = 0.0625", "scale = 0.07"), &[]);
    assert_eq!((exit, report["layers"][0]["scalars"][0]["name"].as_str()), (1, Some("scale")));
}

#[test]
fn wrong_input_is_exit_2_and_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let (model, dump) = (fixture(GLM), fixture("llamacpp/glm5dims.Q4_K_M.safetensors"));
    let text = std::fs::read_to_string(fixture("llamacpp/map.toml")).unwrap();
    let path = dir.path().join("map.toml");
    for (from, to, words) in [
        ("", "", ""),
        ("L{layer}/kv_cmpr_pe", "L{layer}/kv_cmpr_pq", "L0/kv_cmpr_pe"),
        ("kv_a =", "kv_b =", "kv_a"),
        ("0+10", "0+9", "ask for token 9"),
        ("layer = 0\n", "", "--layer N"),
        ("layer = 0\n", "layer = 99\n", "no MLA attention"),
        ("11739\" }", "11739\" }\npositions = \"L0/inp\"", "does not hold counts"),
        ("contract = \"none\"", "splits = { parts = 1000000000000 }", "1024 parts"),
        ("contract = \"none\"", "contract = \"nobodys\"", "flashmla-decode"),
    ] {
        std::fs::write(&path, text.replace(from, to)).unwrap();
        let args = ["compare", model.to_str().unwrap(), dump.to_str().unwrap()];
        let out = match words {
            // Neither map nor manifest.
            "" => command(&args),
            _ => command(&[&args[..], &["--map", path.to_str().unwrap()]].concat()),
        };
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{words}: {said}");
        assert!(said.contains(words) && said.contains("where: ") && said.contains("do: "), "{words}: {said}");
    }
}

/// Nobody knows which numbers an engine computed with unless somebody says so.
#[test]
fn geometry_is_said_or_taken_for_granted() {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(fixture("llamacpp/map.toml")).unwrap();
    let (head, rest) = text.split_once("[geometry]").unwrap();
    let tensors = rest.split_once("[tensors]").unwrap().1;
    let map = dir.path().join("map.toml");
    std::fs::write(&map, format!("{head}[tensors]{tensors}")).unwrap();
    let (model, dump) = (fixture(GLM), fixture("llamacpp/glm5dims.Q4_K_M.safetensors"));
    let args =
        ["compare", model.to_str().unwrap(), dump.to_str().unwrap(), "--map", map.to_str().unwrap(), "-q"];
    let out = command(&args);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(2) && said.contains("--trust-geometry"), "{said}");
    assert_eq!(command(&[&args[..], &["--trust-geometry"]].concat()).status.code(), Some(0));
}

/// A dump beside another one: each has its verdict, and what differs is counted.
#[test]
fn two_dumps_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    save(&a, &[]);
    copy(&a, &b);
    alter(&b, "fused.attn_out", |v, _| v[5] ^= 0x4000);
    let (exit, report) = compare(&a, &["--other", b.to_str().unwrap()]);
    assert_eq!(exit, 1);
    let verdicts: Vec<&str> =
        report["layers"].as_array().unwrap().iter().map(|l| l["verdict"].as_str().unwrap()).collect();
    assert_eq!(verdicts, ["rounding", "fault"]);
    for t in report["beside"][0]["tensors"].as_array().unwrap() {
        let off = t["elements"].as_u64().unwrap() - t["same"].as_u64().unwrap();
        let altered = t["tensor"] == "fused/attn_out";
        assert_eq!(off, u64::from(altered), "{t}");
        assert!(altered == (t["difference"].as_f64().unwrap() > 0.0), "{t}");
    }
}

/// A log of norms: what agrees, what can't be, and no verdict of what norms can't show.
#[test]
fn norms_alone_are_taken_for_what_they_show() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("norms.txt");
    let model = fixture(GLM);
    let judged = |text: &str| {
        std::fs::write(&log, text).unwrap();
        let out = command(&["compare", model.to_str().unwrap(), log.to_str().unwrap(), "--format", "json"]);
        let report: Value = serde_json::from_slice(&out.stdout).unwrap();
        let said: Vec<String> =
            report["said"].as_array().unwrap().iter().map(|s| s["text"].as_str().unwrap().into()).collect();
        (out.status.code(), said)
    };
    // The norm of g_q in fixtures/hooks, by numpy: 16.6550.
    let (exit, said) = judged("layer 0 q_a_layernorm.weight norm=16.655\nlayer 0 q norm=67.2270\n");
    assert!(exit == Some(3) && said[0].contains("the file's whole weight"), "{said:?}");
    let (exit, said) = judged("layer 0 q_a_layernorm.weight norm=19.0\n");
    assert!(exit == Some(3) && said[0].contains("is neither"), "{said:?}");
    assert_eq!(judged("layer 0 attn_out norm=nan\n").0, Some(1));
    assert_eq!(judged("layer 0 attn_out norm=0.0\nlayer 0 attn_out norm=0.0\n").0, Some(1));
    assert_eq!(judged("layer 0 attn_out norm=0.0\nlayer 0 attn_out norm=2.5\n").0, Some(3));
    assert_eq!(judged("TP0 layer 0 kv_c norm=3\nTP1 layer 0 kv_c norm=4\n").0, Some(1));
    std::fs::write(&log, "nothing").unwrap();
    let out = command(&["compare", model.to_str().unwrap(), log.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(2));
}
