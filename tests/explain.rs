/*!
`mla-check explain`: what is printed of an element is checked by hand. Terms add up to x, each is the product of its
factors, operands are the bits that `run --save` wrote, and both values are those of the report.
*/

mod common;

use common::fixture;
use mla_check::trace::read::Dump;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

const GLM: &str = "models/glm5dims.Q4_K_M.gguf";
/// Prefill, prefill with context over pages, decode in two splits.
const BATCH: [&str; 10] = [
    "--engine",
    "cpu",
    "--regime",
    "random",
    "--batch",
    "0+3,20+2,100+1",
    "--splits",
    "2",
    "--page-size",
    "16",
];

fn command(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mla-check"))
        .args(args)
        .env("RUST_BACKTRACE", "0")
        .env("CUDA_VISIBLE_DEVICES", "")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Makes a report of a run, and gives it.
fn run(report: &Path, more: &[&str]) -> Value {
    let model = fixture(GLM);
    let args =
        [&["run", model.to_str().unwrap(), "-q", "--report", report.to_str().unwrap()], &BATCH[..], more];
    let out = command(&args.concat());
    assert!(report.is_file(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap()
}

/// A clean run: its folder with report and tensors, where the report is, and the report.
type Clean = (tempfile::TempDir, PathBuf, Value);

fn clean(more: &[&str]) -> Clean {
    let dir = tempfile::tempdir().unwrap();
    let (path, saved) = (dir.path().join("run's report.json"), dir.path().join("saved"));
    let report = run(&path, &[&["--save", saved.to_str().unwrap()], more].concat());
    (dir, path, report)
}

static CLEAN: LazyLock<Clean> = LazyLock::new(|| clean(&[]));
/// The same on two ranks.
static RANKS: LazyLock<Clean> = LazyLock::new(|| clean(&["--tp", "2"]));

fn explain(report: &Path, tensor: &str, index: &[usize], more: &[&str]) -> Output {
    let index: Vec<String> = index.iter().map(|i| i.to_string()).collect();
    let mut args = vec!["explain", report.to_str().unwrap(), tensor];
    args.extend(index.iter().map(String::as_str));
    args.extend(more);
    command(&args)
}

fn json(report: &Path, tensor: &str, index: &[usize]) -> Value {
    let out = explain(report, tensor, index, &["--format", "json"]);
    assert_eq!(out.status.code(), Some(0), "{tensor} {index:?}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// What, where and what to do of an error, whose exit code is 2.
fn error(out: &Output) -> String {
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(2), "{text}");
    assert!(text.contains("\n  where: ") && text.contains("\n  do: "), "{text}");
    text
}

fn number(v: &Value) -> f64 {
    v.as_f64().unwrap_or_else(|| panic!("{v} is no number"))
}

/// Numbers of JSON, as they are read here, may be off in their last bit.
fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 2.0 * f64::EPSILON * a.abs().max(b.abs())
}

fn list(v: &Value) -> &[Value] {
    v.as_array().map_or(&[], Vec::as_slice)
}

/// Nearest bf16 value of a normal float64, ties to even, by its bits.
fn bf16(x: f64) -> f64 {
    // 52 − 7 bits fall away.
    let (bits, half) = (x.to_bits(), 1u64 << 44);
    let odd = bits >> 45 & 1;
    f64::from_bits((bits + half - 1 + odd) >> 45 << 45)
}

/// The value of bits as they are printed.
fn decoded(dtype: &str, bits: &str) -> f64 {
    let bits = u32::from_str_radix(bits.trim_start_matches("0x"), 16).unwrap();
    f64::from(f32::from_bits(if dtype == "bf16" { bits << 16 } else { bits }))
}

/// Bits of an element of an engine's tensor as `run --save` wrote it.
fn saved(dir: &Path, name: &str, index: &[usize]) -> Option<u64> {
    let path = dir.join(format!("layer-0/{name}.engine.npy"));
    let dump = Dump::open(&path).ok()?;
    let array = dump.read(dump.entries().first()?).unwrap();
    let flat = index.iter().zip(&array.shape).fold(0, |at, (i, n)| at * n + i);
    let width = array.bytes.len() / array.shape.iter().product::<usize>();
    let bytes = &array.bytes[flat * width..(flat + 1) * width];
    Some(bytes.iter().rev().fold(0, |a, b| a << 8 | u64::from(*b)))
}

/// A sum is the sum of what is shown and of the rest; terms are products of their factors; operands are their bits, and
/// those of the clean run's saved tensors. Gives how many operands were found there.
fn check_sum(e: &Value, sum: &Value, clean: Option<&Clean>) -> usize {
    let name = format!("{} {}", e["tensor"], sum["name"]);
    let (size, total) = (number(&sum["size"]), number(&sum["total"]));
    let terms = list(&sum["terms"]);
    let shown: f64 = terms.iter().map(|t| number(&t["value"])).sum();
    let all = shown + number(&sum["rest"]["sum"]);
    // A float64 sum of n terms in another order: n + 1 roundings of 2⁻⁵³ of its size.
    let n = number(&sum["count"]);
    let slack = (n + 1.0) * f64::EPSILON * size;
    assert!((all - total).abs() <= slack, "{name}: {all} {total}");
    assert_eq!(terms.len() as f64 + number(&sum["rest"]["count"]), n, "{name}");
    let form = e["tensor"].as_str().unwrap().split_once('/').map(|(f, _)| f);
    let mut found = 0;
    for t in terms {
        let factors = list(&t["factors"]);
        let product: f64 = factors.iter().map(|f| number(&f["value"])).product();
        // Casts of a rotation's products stand between factors and term; the default contract has none.
        if !factors.is_empty() {
            let off = (product - number(&t["value"])).abs();
            assert!(off <= 8.0 * f64::EPSILON * product.abs(), "{name}: {t}");
        }
        for f in factors.iter().chain(list(&t["from"])) {
            let (Some(dtype), Some(bits)) = (f["dtype"].as_str(), f["bits"].as_str()) else { continue };
            assert!(f["value"].is_null() || near(decoded(dtype, bits), number(&f["value"])), "{name}: {f}");
            let index: Vec<usize> = list(&f["index"]).iter().map(|i| number(i) as usize).collect();
            let own = f["name"].as_str().unwrap();
            let names = [Some(own.to_string()), form.map(|form| format!("{form}.{own}"))];
            let find = |run: &Clean| {
                let dir = run.0.path().join("saved");
                names.iter().flatten().find_map(|n| saved(&dir, n, &index))
            };
            if let Some(there) = clean.and_then(find) {
                let printed = u64::from_str_radix(bits.trim_start_matches("0x"), 16).unwrap();
                assert_eq!(printed, there, "{name}: {f}");
                found += 1;
            }
        }
    }
    found
}

/// Checks everything that can be checked of an element of the clean run.
fn check(tensor: &str, index: &[usize]) -> Value {
    check_in(&CLEAN, tensor, index)
}

/// The same of another clean run.
fn check_in(clean: &Clean, tensor: &str, index: &[usize]) -> Value {
    let e = json(&clean.1, tensor, index);
    assert_eq!((&e["schema"], &e["tensor"]), (&"mla-check.explain/1".into(), &tensor.into()));
    let sums = list(&e["sums"]);
    let x = number(&e["value"]["x"]);
    let first = &sums[0];
    assert_eq!(first["name"], "x");
    let slack = (number(&first["count"]) + 1.0) * f64::EPSILON * number(&first["size"]);
    assert!((number(&first["total"]) - x).abs() <= 4.0 * slack, "{tensor}: {} {x}", first["total"]);
    let found: usize = sums.iter().map(|s| check_sum(&e, s, Some(clean))).sum();
    // All but hidden states and context rows are computed from tensors of the run.
    let given = ["hidden", "w_uk", "w_q_a", "g_kv"].contains(&tensor);
    assert!(found > 0 || given || e["notes"].to_string().contains("given"), "{tensor}: {e}");
    let v = &e["value"];
    let dtype = v["dtype"].as_str().unwrap();
    if dtype == "bf16" {
        assert!(near(bf16(x), number(&v["rounded"])), "{tensor}");
    } else {
        assert!(near(f64::from(x as f32), number(&v["rounded"])), "{tensor}");
    }
    assert!(near(decoded(dtype, v["engine_bits"].as_str().unwrap()), number(&v["engine"])), "{tensor}");
    let exact = e["standing"].as_str().unwrap().starts_with("exact");
    assert_eq!(exact, v["engine"] == v["rounded"], "{tensor}");
    assert!(
        ["exact", "exact-near-tie", "flip"].contains(&e["standing"].as_str().unwrap()),
        "{tensor}: {}",
        e["standing"]
    );
    // What the report says of the whole tensor holds for it.
    let (form, name) = tensor.split_once('/').map_or((None, tensor), |(f, n)| (Some(f), n));
    for u in list(&clean.2["layers"][0]["tensors"]) {
        if u["tensor"] == name
            && u["form"].as_str() == form
            && (u["phase"] == e["row"]["phase"] || u["phase"].is_null())
        {
            assert!(u["verdict"] != "exact" || exact, "{tensor}");
        }
    }
    // The engine's own bits are those that were saved.
    let file = tensor.replace('/', ".");
    if let Some(there) = saved(&clean.0.path().join("saved"), &file, index) {
        let printed = v["engine_bits"].as_str().unwrap().trim_start_matches("0x").to_string();
        assert_eq!(u64::from_str_radix(&printed, 16).unwrap(), there, "{tensor}");
    } else {
        assert!(given, "{tensor} was not saved");
    }
    e
}

fn step(e: &Value, name: &str) -> f64 {
    let found = list(&e["steps"]).iter().find(|s| s["name"] == name);
    number(&found.unwrap_or_else(|| panic!("no {name}: {}", e["steps"]))["value"])
}

#[test]
fn weights_and_copies() {
    let e = check("w_uk", &[1, 3, 5]);
    let file = number(&e["sums"][0]["terms"][0]["factors"][0]["file"]);
    assert!(near(bf16(file), number(&e["value"]["engine"])));
    check("w_q_a", &[2, 7]);
    check("g_kv", &[4]);
    check("hidden", &[1, 9]);
    // Every row of the cache: new tokens are copies of kv_c_normed and k_pe, which check() reads.
    let pages = list(&CLEAN.2["layers"][0]["tensors"]).iter().find(|u| u["tensor"] == "cache").unwrap();
    let shape: Vec<usize> = list(&pages["shape"]).iter().map(|n| number(n) as usize).collect();
    let mut seen = [false; 2];
    'all: for page in 0..shape[0] {
        for slot in [0, 1, 4] {
            for col in [3, shape[2] - 1] {
                let out = explain(&CLEAN.1, "cache", &[page, slot, col], &["--format", "json"]);
                let e: Value = serde_json::from_slice(&out.stdout).unwrap();
                let Some(term) = e["sums"].get(0).map(|s| &s["terms"][0]["factors"][0]) else { continue };
                let name = term["name"].as_str().unwrap();
                assert_eq!(e["value"]["engine"], term["value"]);
                seen[usize::from(name.starts_with("context"))] = true;
                if seen == [true, true] {
                    break 'all;
                }
            }
        }
    }
    assert_eq!(seen, [true, true]);
}

#[test]
fn products() {
    let e = check("q_a", &[2, 5]);
    let t = &e["sums"][0]["terms"][0]["factors"];
    assert_eq!((&t[0]["name"], &t[1]["name"]), (&"attn_in".into(), &"w_q_a".into()));
    // Both have the same column, and the weight's value in the file rounds to the one that is multiplied.
    assert_eq!(t[0]["index"][1], t[1]["index"][1]);
    assert!(near(bf16(number(&t[1]["file"])), number(&t[1]["value"])));
    check("kv_a", &[0, 515]);
    check("q_raw", &[5, 1, 17]);
    let e = check("fused/k", &[7, 2, 9]);
    let t = &e["sums"][0]["terms"][0]["factors"];
    assert_eq!((&t[0]["name"], &t[1]["name"]), (&"cache".into(), &"w_uk".into()));
    assert_eq!((&t[1]["index"][0], &t[1]["index"][2]), (&2.into(), &9.into()));
    check("fused/v", &[7, 2, 9]);
    check("absorbed/q_latent", &[4, 3, 100]);
    let e = check("absorbed/attn_out", &[2, 1, 30]);
    assert_eq!(e["sums"][0]["terms"][0]["factors"][0]["name"], "o_latent");
    check("fused/out", &[5, 77]);
    check("absorbed/out", &[0, 3]);
}

#[test]
fn norms_and_rotations() {
    let e = check("attn_in", &[1, 12]);
    let (mean, eps, rms) = (step(&e, "mean square"), step(&e, "eps"), step(&e, "rms"));
    assert!((rms * rms - mean - eps).abs() <= 4.0 * f64::EPSILON * rms * rms);
    let z = step(&e, "hidden") / rms;
    assert!((z - step(&e, "normalised")).abs() <= 4.0 * f64::EPSILON * z.abs());
    check("q_a_normed", &[5, 40]);
    check("kv_c_normed", &[3, 200]);
    // The last rotated column, and a copied one; the last token stands at position 100.
    let e = check("k_pe", &[5, 63]);
    assert_eq!(step(&e, "position"), 100.0);
    let angle = step(&e, "angle");
    assert!((angle - 100.0 * step(&e, "frequency")).abs() <= 2.0 * f64::EPSILON * angle);
    assert_eq!(
        (step(&e, "cos"), step(&e, "sin")),
        (f64::from(angle.cos() as f32), f64::from(angle.sin() as f32))
    );
    let t = &e["sums"][0]["terms"];
    assert_eq!(t[0]["factors"][0]["name"], "kv_a");
    let columns: Vec<f64> = list(t).iter().map(|t| number(&t["factors"][0]["index"][1])).collect();
    assert!(columns[0] != columns[1] && columns.iter().all(|c| *c >= 512.0), "{columns:?}");
    check("q", &[4, 2, 3]);
    let width = list(&CLEAN.2["layers"][0]["tensors"]).iter().find(|u| u["tensor"] == "q").unwrap();
    let last = number(&width["shape"][2]) as usize - 1;
    let e = check("q", &[4, 2, last]);
    assert_eq!(list(&e["sums"][0]["terms"]).len(), 2);
}

/// The numbers of an attention from its keys, by the formulas of a plain softmax.
fn softmax(e: &Value, visible: f64) {
    assert_eq!(step(e, "visible keys"), visible);
    let scale = step(e, "scale");
    for k in list(&e["keys"]) {
        let (score, max) = (number(&k["score"]), number(&k["maximum"]));
        assert!((score - scale * number(&k["raw"])).abs() <= 1e-14 * score.abs().max(1.0), "{k}");
        let p = (score - max).exp();
        assert!((p - number(&k["p"])).abs() <= 1e-14 * p, "{k}");
        let weight = number(&k["cast"]) * number(&k["rescale"]) / step(e, "row sum l");
        assert!((weight - number(&k["weight"])).abs() <= 4.0 * f64::EPSILON * weight, "{k}");
        assert!(e["casts"].to_string().contains("P to bf16"), "{}", e["casts"]);
        assert!(near(bf16(number(&k["p"])), number(&k["cast"])));
    }
    let scores = list(&e["keys"]).iter().map(|k| number(&k["weight"])).collect::<Vec<_>>();
    assert!(scores.is_sorted_by(|a, b| a >= b) && !scores.is_empty());
}

#[test]
fn attention_and_its_lse() {
    // Rows: three tokens of the first request, two of the second on 20 keys, one decode step.
    let e = check("fused/attn_out", &[2, 1, 30]);
    softmax(&e, 3.0);
    assert_eq!(e["sums"][0]["terms"][0]["factors"][1]["name"], "v");
    let e = check("absorbed/o_latent", &[4, 0, 17]);
    softmax(&e, 22.0);
    assert_eq!(e["sums"][0]["terms"][0]["factors"][1]["name"], "cache");
    for form in ["fused", "absorbed"] {
        let e = check(&format!("{form}/lse"), &[3, 2]);
        softmax(&e, 21.0);
        let lse = step(&e, "largest score") + step(&e, "row sum l").ln();
        assert!((lse - number(&e["value"]["x"])).abs() <= 1e-14 * lse.abs().max(1.0));
        // Splits of the decode step.
        let e = check(&format!("{form}/part_o"), &[1, 0, 1, 5]);
        assert!(step(&e, "visible keys") < 101.0);
        check(&format!("{form}/part_lse"), &[0, 0, 2]);
    }
}

/// A rank's part has the terms of its heads alone; `out` those of the ranks.
#[test]
fn parts_of_ranks_and_their_sum() {
    for form in ["fused", "absorbed"] {
        let e = check_in(&RANKS, &format!("{form}/part_out"), &[1, 2, 7]);
        assert_eq!(e["row"]["rank"], 1);
        for t in list(&e["sums"][0]["terms"]) {
            let [attn_out, w_o] = [0, 1].map(|i| &t["factors"][i]);
            assert_eq!((&attn_out["name"], &w_o["name"]), (&"attn_out".into(), &"w_o".into()));
            // Four heads on two ranks.
            assert!(number(&attn_out["index"][1]) >= 2.0 && attn_out["index"][1] == w_o["index"][1], "{t}");
        }
        let e = check_in(&RANKS, &format!("{form}/out"), &[2, 7]);
        assert_eq!(list(&e["from"]).len(), 1);
        let terms = list(&e["sums"][0]["terms"]);
        assert!(terms.len() == 2 && terms.iter().all(|t| t["factors"][0]["name"] == "part_out"));
    }
}

#[test]
fn merges_of_splits() {
    for tensor in ["fused/attn_out", "absorbed/o_latent"] {
        let e = check(tensor, &[5, 1, 40]);
        assert_eq!(list(&e["sums"][0]["terms"]).len(), 2);
        let lse = step(&e, "lse");
        for t in list(&e["sums"][0]["terms"]) {
            let (weight, part) = (&t["factors"][0], &t["from"][0]);
            assert_eq!((&t["factors"][1]["name"], &part["name"]), (&"part_o".into(), &"part_lse".into()));
            let w = (number(&part["value"]) - lse).exp();
            assert!((w - number(&weight["value"])).abs() <= 1e-13 * w, "{t}");
        }
    }
    let e = check("absorbed/lse", &[5, 3]);
    assert_eq!(e["row"]["phase"], "decode");
}

/// The worst element of a deliberate fault is explained as the report has it, and its text says so.
#[test]
fn faults_are_what_the_report_shows() {
    let dir = tempfile::tempdir().unwrap();
    for (fault, tensor, form) in [
        ("attn_out-element=0.05", "attn_out", Some("fused")),
        ("q_a-element", "q_a", None),
        ("w_uv-element", "w_uv", None),
    ] {
        let path = dir.path().join("report.json");
        let report = run(&path, &["--fault", fault]);
        let unit = list(&report["layers"][0]["tensors"])
            .iter()
            .find(|u| u["tensor"] == tensor && u["form"].as_str() == form && u["verdict"] == "fault")
            .unwrap();
        let worst = &unit["worst"];
        let index: Vec<usize> = list(&worst["index"]).iter().map(|i| number(&i[1]) as usize).collect();
        let name = form.map_or(tensor.to_string(), |f| format!("{f}/{tensor}"));
        let e = json(&path, &name, &index);
        assert_eq!(e["standing"], "beyond", "{fault}");
        let text = |v: &Value| v.as_str().unwrap().parse::<f64>().unwrap();
        assert!(near(number(&e["value"]["engine"]), text(&worst["engine"])), "{fault}");
        assert!(near(number(&e["value"]["x"]), text(&worst["reference"])), "{fault}");
        assert!(near(number(&e["value"]["error_ulps"]), text(&worst["ulps"])), "{fault}");
        if !e["bound"].is_null() {
            assert!(near(number(&e["bound"]["share"]), text(&worst["share_of_bound"])), "{fault}");
        }
        let out = explain(&path, &name, &index, &[]);
        assert!(String::from_utf8_lossy(&out.stdout).contains("beyond what any rounding explains"));
    }
}

/// A saved run that is compared says the same of an element as the run.
#[test]
fn comparisons_are_repeated_too() {
    let dir = tempfile::tempdir().unwrap();
    let (path, model) = (dir.path().join("c.json"), fixture(GLM));
    let saved = CLEAN.0.path().join("saved");
    let report = path.to_str().unwrap();
    let out =
        command(&["compare", model.to_str().unwrap(), saved.to_str().unwrap(), "-q", "--report", report]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    for (tensor, index) in [("absorbed/o_latent", [4, 0, 17]), ("fused/attn_out", [5, 1, 40])] {
        let (a, b) = (json(&path, tensor, &index), json(&CLEAN.1, tensor, &index));
        for field in ["value", "sums", "steps", "standing"] {
            assert_eq!(a[field], b[field], "{tensor} {field}");
        }
    }
}

/// Nothing is written: neither tensors nor report are made again.
#[test]
fn nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let (path, saved) = (dir.path().join("r.json"), dir.path().join("saved"));
    run(&path, &["--save", saved.to_str().unwrap()]);
    std::fs::remove_dir_all(&saved).unwrap();
    let before = std::fs::metadata(&path).unwrap().modified().unwrap();
    json(&path, "k_pe", &[0, 0]);
    assert!(!saved.exists());
    assert_eq!(std::fs::metadata(&path).unwrap().modified().unwrap(), before);
}

#[test]
fn names_and_indices_that_are_wrong() {
    let report = &CLEAN.1;
    let said = error(&explain(report, "atn_out", &[0], &[]));
    assert!(said.contains("no tensor atn_out") && said.contains("/attn_out"), "{said}");
    let said = error(&explain(report, "attn_out", &[0, 0, 0], &[]));
    assert!(said.contains("choose among fused/attn_out, absorbed/attn_out"), "{said}");
    let said = error(&explain(report, "fused/lse", &[0], &[]));
    assert!(said.contains("has 2 axes, 1 was given") && said.contains("token 0..6, head 0..4"), "{said}");
    let said = error(&explain(report, "fused/lse", &[], &[]));
    assert!(said.contains("0 were given"), "{said}");
    let said = error(&explain(report, "fused/lse", &[0, 4], &[]));
    assert!(said.contains("has 4 along head, so there is no 4"), "{said}");
    let said = error(&explain(report, "fused/lse", &[0, 3], &["--layer", "7"]));
    assert!(said.contains("no layer 7") && said.contains("choose among 0"), "{said}");
    // As reports print a unit.
    let out = explain(report, "fused/lse, prefill", &[0, 3], &["-q"]);
    assert_eq!(out.status.code(), Some(0));
}

/// Reports that were damaged, are of something else, or of what is no longer there.
#[test]
fn reports_that_are_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.json");
    let say = |text: &[u8]| {
        std::fs::write(&path, text).unwrap();
        error(&explain(&path, "k_pe", &[0, 0], &[]))
    };
    let whole = std::fs::read(&CLEAN.1).unwrap();
    assert!(say(&whole[..whole.len() / 2]).contains("no report"));
    assert!(say(b"{}").contains("no schema"));
    assert!(say(b"[1]").contains("no schema"));
    assert!(error(&explain(&dir.path().join("none.json"), "q", &[0], &[])).contains("can't be read"));
    let with = |change: &dyn Fn(&mut Value)| {
        let mut report = CLEAN.2.clone();
        change(&mut report);
        say(report.to_string().as_bytes())
    };
    assert!(with(&|r| r["version"] = "0.0.1".into()).contains("is of mla-check 0.0.1"));
    assert!(with(&|r| r["model"]["bytes"][0] = 7.into()).contains("7 when the report was made"));
    assert!(with(&|r| r["model"]["files"][0] = "nowhere.gguf".into()).contains("run explain in the folder"));
    assert!(with(&|r| r["command"] = "mla-check devices".into()).contains("neither run nor compare"));
    assert!(with(&|r| r["command"] = "mla-check run --nonsense".into()).contains("can't be run"));
    assert!(with(&|r| r["command"] = "mla-check run 'x".into()).contains("no command line"));
    assert!(with(&|r| r["layers"] = Value::Array(Vec::new())).contains("no layer"));
    // A shape that the run does not have.
    let said = with(&|r| {
        for u in r["layers"][0]["tensors"].as_array_mut().unwrap() {
            if u["tensor"] == "k_pe" {
                u["shape"] = serde_json::json!([900, 64]);
            }
        }
    });
    assert!(said.contains("has shape [6, 64] now"), "{said}");
}

/// Under contracts with everything that the reference emulates (pairs of tiles from the end, cast scores, splits that are
/// merged inside in groups, base 2, casts of norms and rotations) sums still come to the reference's x.
#[test]
fn sums_add_up_under_other_contracts() {
    let dir = tempfile::tempdir().unwrap();
    let (saved, path, model) = (dir.path().join("saved"), dir.path().join("c.json"), fixture(GLM));
    let model = model.to_str().unwrap();
    let args = [
        "run",
        model,
        "--engine",
        "cpu",
        "--regime",
        "random",
        "--batch",
        "0+3,200+1",
        "--splits",
        "1",
        "-q",
    ];
    command(&[&args[..], &["--save", saved.to_str().unwrap()]].concat());
    let manifest = saved.join("layer-0/manifest.json");
    let mut m: Value = serde_json::from_slice(&std::fs::read(&manifest).unwrap()).unwrap();
    let other = serde_json::json!({
        "splits": { "keys": 64 }, "merge_groups": 2, "partials": "bf16", "lse_base": "two", "split_prefill": true,
        "norm_cast": "bf16", "rope_products": "bf16", "rope_angle": "f32",
    });
    let soft = serde_json::json!({
        "tile": 32, "pairs": true, "order": "reverse", "row_sum": "rounded", "cast_scaled": true, "factor": "log2e",
    });
    for (to, from) in [("/contract", other), ("/contract/softmax", soft)] {
        let to = m.pointer_mut(to).unwrap().as_object_mut().unwrap();
        from.as_object().unwrap().iter().for_each(|(k, v)| drop(to.insert(k.clone(), v.clone())));
    }
    std::fs::write(&manifest, m.to_string()).unwrap();
    command(&["compare", model, saved.to_str().unwrap(), "-q", "--report", path.to_str().unwrap()]);
    for (tensor, index, count) in [
        // 201 keys in four splits, two states; both halves of the columns, which pairs treat apart.
        ("fused/attn_out", &[3, 1, 250][..], 2.0),
        ("fused/attn_out", &[3, 1, 3], 2.0),
        ("absorbed/o_latent", &[3, 2, 400], 2.0),
        ("fused/attn_out", &[1, 1, 200], 2.0),
        ("absorbed/lse", &[3, 1], 2.0),
        ("fused/lse", &[1, 1], 2.0),
        ("attn_in", &[1, 4], 1.0),
        ("k_pe", &[2, 3], 2.0),
    ] {
        let e = json(&path, tensor, index);
        let (sum, x) = (&e["sums"][0], number(&e["value"]["x"]));
        assert_eq!(number(&sum["count"]), count, "{tensor}");
        let slack = 8.0 * f64::EPSILON * number(&sum["size"]);
        assert!((number(&sum["total"]) - x).abs() <= slack, "{tensor}: {sum} {x}");
        // Products of a rotation are cast before they are added.
        if tensor != "k_pe" {
            for s in list(&e["sums"]) {
                check_sum(&e, s, None);
            }
        }
        assert!(e["notes"].is_null(), "{tensor}: {}", e["notes"]);
    }
    let e = json(&path, "absorbed/o_latent", &[3, 2, 400]);
    // The result of a state is what its own sum comes to, rounded once more.
    let term = &e["sums"][0]["terms"][0];
    let own = list(&e["sums"])
        .iter()
        .find(|s| s["name"] == format!("merged first: {}", term["name"].as_str().unwrap()));
    let stored = number(&term["factors"][1]["value"]);
    assert!(near(bf16(number(&own.unwrap()["total"])), stored));
}

/// The example of docs/verdicts.md is what the program prints.
#[test]
fn the_example_in_the_docs_is_real() {
    let docs = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/verdicts.md")).unwrap();
    let section = docs.split("## One element in full").nth(1).unwrap();
    let block = section.split("```console\n").nth(1).unwrap().split("```").next().unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixture(GLM), dir.path().join("model.gguf")).unwrap();
    let mut printed = String::new();
    for line in block.lines().filter_map(|l| l.strip_prefix("$ mla-check ")) {
        let out = Command::new(env!("CARGO_BIN_EXE_mla-check"))
            .args(line.split(' '))
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        printed += &format!("$ mla-check {line}\n{}", String::from_utf8_lossy(&out.stdout));
    }
    assert_eq!(printed, block);
}
