/*!
Dumps as the hooks in `adapters/` write them: of several ranks, with the output taken at two places. What an honest engine
wrote is clean; what real engines got wrong (a rank's heads in another order, a rank's shard twice, an output that nobody reads, a
place that never ran) is a fault, in the tensor and by the words that say so.
*/

mod common;

use common::fixture;
use mla_check::trace::read::{Array, Dump, Stored};
use mla_numeric::DType;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const GLM: &str = "models/glm5dims.Q4_K_M.gguf";
const RANKS: usize = 2;
const HEADS: usize = 4;

fn command(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mla-check"))
        .args(args)
        .env("CUDA_VISIBLE_DEVICES", "")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// A tensor of a capture: bits, axes, and where its heads stand.
#[derive(Clone)]
struct Part {
    array: Array,
    axes: Vec<&'static str>,
    fired: usize,
    partial: bool,
}

impl Part {
    /// Bits, sixteen a value.
    fn change(&mut self, f: impl FnOnce(&mut Vec<u16>)) {
        let mut bits: Vec<u16> =
            self.array.bytes.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
        f(&mut bits);
        self.array.bytes = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
    }

    /// This rank's heads of it.
    fn of_rank(&self, rank: usize) -> Part {
        let Some(at) = self.axes.iter().position(|a| *a == "head") else { return self.clone() };
        let mut shape = self.array.shape.clone();
        let inner = shape[at + 1..].iter().product::<usize>() * self.array.stored.bytes();
        let each = shape[at] / RANKS;
        let bytes = self
            .array
            .bytes
            .chunks(shape[at] * inner)
            .flat_map(|c| c[rank * each * inner..(rank + 1) * each * inner].to_vec())
            .collect();
        shape[at] = each;
        Part { array: Array { stored: self.array.stored, shape, bytes }, ..self.clone() }
    }
}

/// A capture: requests, form, and tensors rank by rank.
#[derive(Clone)]
struct Captured {
    form: &'static str,
    requests: &'static str,
    /// Slot of each key, request by request.
    slots: Value,
    ranks: Vec<BTreeMap<String, Part>>,
}

fn axes(tensor: &str) -> Option<Vec<&'static str>> {
    Some(match tensor {
        "hidden" | "attn_in" | "out" => vec!["token", "hidden"],
        "q_a" | "q_a_normed" => vec!["token", "q_rank"],
        "q_raw" | "q" => vec!["token", "head", "nope+rope"],
        "kv_a" => vec!["token", "latent+rope"],
        "kv_c_normed" => vec!["token", "latent"],
        "k_pe" => vec!["token", "rope"],
        "k" => vec!["key", "head", "nope+rope"],
        "v" => vec!["key", "head", "value"],
        "q_latent" | "o_latent" => vec!["token", "head", "latent"],
        "lse" => vec!["token", "head"],
        "attn_out" => vec!["token", "head", "value"],
        "cache" => vec!["page", "slot", "latent+rope"],
        _ => return None,
    })
}

/// What an honest engine computes, a run of the CPU engine: tensors by name, and the slots of each request.
fn computed(form: &str, requests: &str) -> (BTreeMap<String, Part>, Value) {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture(GLM);
    let (model, to) = (model.to_str().unwrap(), dir.path().to_str().unwrap());
    let args =
        ["run", model, "--engine", "cpu", "-q", "--regime", "random", "--splits", "1", "--page-size", "64"];
    let out = command(
        &[&args[..], &["--form", form, "--batch", requests, "--convention", "vllm", "--save", to]].concat(),
    );
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
    let dump = Dump::open(&dir.path().join("layer-0")).unwrap();
    let mut all = BTreeMap::new();
    for entry in dump.entries() {
        let Some(name) = entry.name.strip_suffix(".engine") else { continue };
        let name = name.strip_prefix(&format!("{form}.")).unwrap_or(name).to_string();
        let Some(axes) = axes(&name) else { continue };
        let mut array = dump.read(entry).unwrap();
        if let Stored::UInt(2) = array.stored {
            array.stored = Stored::Float(DType::Bf16);
        }
        all.insert(name, Part { array, axes, fired: 1, partial: false });
    }
    let text = std::fs::read_to_string(dir.path().join("layer-0/manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&text).unwrap();
    let slots = manifest["sequences"].as_array().unwrap().iter().map(|s| s["slots"].clone()).collect();
    (all, slots)
}

/// The same as two ranks would hold it, the output taken at two places.
fn honest(form: &'static str, requests: &'static str) -> Captured {
    let (mut all, slots) = computed(form, requests);
    let out = all.remove("attn_out").unwrap();
    all.insert("attn_out@kernel".into(), out.clone());
    all.insert("attn_out@caller".into(), out);
    let ranks = (0..RANKS).map(|r| all.iter().map(|(n, p)| (n.clone(), p.of_rank(r))).collect()).collect();
    Captured { form, requests, slots, ranks }
}

fn dtype(stored: Stored) -> safetensors::Dtype {
    match stored {
        Stored::Float(DType::Bf16) => safetensors::Dtype::BF16,
        Stored::Float(DType::F32) => safetensors::Dtype::F32,
        other => panic!("{other}"),
    }
}

/// Writes it, of the ranks that are named.
fn write(dir: &Path, captured: &[Captured], ranks: &[usize]) {
    for &rank in ranks {
        let mut arrays: Vec<(String, Part)> = Vec::new();
        let mut captures = Vec::new();
        for (step, c) in captured.iter().enumerate() {
            let mut tensors = serde_json::Map::new();
            for (name, part) in &c.ranks[rank] {
                let array = format!("L0.S{step}.{name}");
                let mut entry = json!({ "axes": part.axes, "fired": part.fired, "place": "stand-in" });
                if part.partial {
                    entry["partial"] = json!(true);
                }
                if part.fired > 0 {
                    entry["array"] = json!(array);
                    arrays.push((array, part.clone()));
                }
                tensors.insert(name.clone(), entry);
            }
            let none =
                if c.form == "absorbed" { json!({ "k": "absorbed", "v": "absorbed" }) } else { json!({}) };
            captures.push(json!({
                "layer": 0, "step": step, "form": c.form, "requests": c.requests.split(',').collect::<Vec<_>>(),
                "slots": c.slots, "tensors": tensors, "not_applicable": none
            }));
        }
        let manifest = json!({
            "schema": "mla-check.hook/1", "engine": { "backend": "vllm", "version": "0.33.0" },
            "adapter": "test", "rank": rank, "ranks": RANKS,
            "heads": [rank * HEADS / RANKS, (rank + 1) * HEADS / RANKS], "mode": "eager",
            "notes": { "attention backend": "TRITON_MLA" }, "page_size": 64,
            "geometry": { "heads": HEADS, "scale": 0.0625, "eps_latent": 1e-5 },
            "rope": { "table": "f32" }, "captures": captures
        });
        let views = arrays.iter().map(|(n, p)| {
            (
                n.clone(),
                TensorView::new(dtype(p.array.stored), p.array.shape.clone(), &p.array.bytes).unwrap(),
            )
        });
        std::fs::write(
            dir.join(format!("rank-{rank}.safetensors")),
            safetensors::serialize(views, None).unwrap(),
        )
        .unwrap();
        std::fs::write(dir.join(format!("rank-{rank}.json")), manifest.to_string()).unwrap();
    }
}

/// Exit code and report of a dump.
fn compare(captured: &[Captured], ranks: &[usize]) -> (i32, Value) {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), captured, ranks);
    let model = fixture(GLM);
    let out =
        command(&["compare", model.to_str().unwrap(), dir.path().to_str().unwrap(), "--format", "json"]);
    let json = serde_json::from_slice(&out.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&out.stderr)));
    (out.status.code().unwrap(), json)
}

/// Units of a layer at fault: name and evidence.
fn faults(layer: &Value) -> Vec<(String, String)> {
    let all = layer["tensors"].as_array().unwrap().iter();
    let bad = all.filter(|u| u["verdict"] == "fault");
    bad.map(|u| (u["tensor"].as_str().unwrap().into(), format!("{} {}", u["evidence"], u["note"]))).collect()
}

fn unit<'r>(layer: &'r Value, tensor: &str) -> &'r Value {
    layer["tensors"].as_array().unwrap().iter().find(|u| u["tensor"] == tensor).unwrap()
}

#[test]
fn ranks_are_put_together_and_are_clean() {
    let both = [honest("fused", "0+5,20+3"), honest("absorbed", "20+1,70+1")];
    let (exit, report) = compare(&both, &[0, 1]);
    let layers = report["layers"].as_array().unwrap();
    for l in layers {
        assert_eq!(faults(l), [], "{}", l["engine"]["name"]);
    }
    // The CPU engine holds norms in float32, and the dump does not say so: found, and no fault.
    assert_eq!((exit, layers.len(), report["verdict"].as_str()), (0, 2, Some("contract-differs")));
    for t in ["q_a_normed", "kv_c_normed"] {
        assert_eq!(unit(&layers[0], t)["explained"]["contract"], "weights as decoded, not rounded");
    }
    assert_eq!(layers[0]["engine"]["name"], "vllm 0.33.0, step 0, fused");
    assert_eq!(layers[0]["geometry"]["heads"], 4);
    for (l, tensors) in
        layers.iter().zip([&["q", "k", "v", "out"][..], &["q", "q_latent", "o_latent", "out"]])
    {
        for t in tensors {
            assert!(["rounding", "exact"].contains(&unit(l, t)["verdict"].as_str().unwrap()), "{t}");
        }
        assert_eq!(unit(l, "attn_out@caller")["verdict"], "exact");
    }
    // The absorbed path has no k and v: said, not held against anybody.
    let not = |t: &str| layers[1]["tensors"].as_array().unwrap().iter().any(|u| u["tensor"] == t);
    assert!(!not("k") || unit(&layers[1], "k")["verdict"] == "not-applicable");
}

#[test]
fn a_rank_that_is_missing_is_named_and_the_others_are_judged() {
    let (exit, report) = compare(&[honest("fused", "0+5")], &[1]);
    let l = &report["layers"][0];
    assert_eq!((exit, faults(l)), (0, vec![]));
    assert_eq!(l["geometry"]["heads"], 2);
    assert!(l["engine"]["device"].as_str().unwrap().contains("rank 1 of 2 (not there: 0;"));
    assert!(report["not_judged"].to_string().contains("out: it sums over the heads of rank 0"));
    for t in ["q_raw", "q", "k", "v", "attn_out"] {
        assert_ne!(unit(l, t)["elements"], 0, "{t}");
    }
}

#[test]
fn what_real_engines_got_wrong_is_a_fault() {
    type Change = fn(&mut Captured);
    let cases: [(&str, Change, &[&str], &str); 7] = [
        (
            "heads of rank 1 in another order",
            |c| {
                let q = c.ranks[1].get_mut("q_raw").unwrap();
                let width = 256;
                q.change(|b| b.chunks_exact_mut(2 * width).for_each(|r| r.rotate_left(width)));
            },
            &["q_raw"],
            "",
        ),
        (
            "rank 0's shard twice",
            |c| {
                let twice = c.ranks[0]["v"].clone();
                c.ranks[1].insert("v".into(), twice);
            },
            &["v"],
            "",
        ),
        (
            "an output that nobody reads",
            |c| {
                for r in &mut c.ranks {
                    r.get_mut("attn_out@caller").unwrap().change(|b| b.fill(0));
                }
                // The engine's own projection of what it read: zeros.
                for r in &mut c.ranks {
                    r.get_mut("out").unwrap().change(|b| b.fill(0));
                }
            },
            &["attn_out@caller"],
            "never written",
        ),
        (
            "an attention that never ran",
            |c| {
                for r in &mut c.ranks {
                    r.get_mut("attn_out@kernel").unwrap().fired = 0;
                }
            },
            &["attn_out"],
            "never seen on rank 0..1 (stand-in)",
        ),
        (
            "a tensor without heads that differs between ranks",
            |c| c.ranks[1].get_mut("kv_a").unwrap().change(|b| b[7] ^= 0x40),
            &["kv_a"],
            "1 of 2880 elements of rank 1 are not those of rank 0",
        ),
        (
            "a page of the latents that is another's",
            |c| {
                for r in &mut c.ranks {
                    r.get_mut("k").unwrap().change(|b| b[..4 * 256].rotate_right(256));
                }
            },
            &["k"],
            "",
        ),
        (
            "columns of q_a and kv_a the other way round",
            |c| {
                for r in &mut c.ranks {
                    r.get_mut("q_a").unwrap().change(|b| b.rotate_left(64));
                }
            },
            &["q_a"],
            "",
        ),
    ];
    let right = honest("fused", "0+5");
    for (what, change, tensors, words) in cases {
        let mut wrong = right.clone();
        change(&mut wrong);
        let (exit, report) = compare(&[wrong], &[0, 1]);
        let found = faults(&report["layers"][0]);
        assert_eq!(exit, 1, "{what}");
        let first: Vec<&str> = found.iter().map(|f| f.0.as_str()).take(tensors.len()).collect();
        assert_eq!(first, tensors, "{what}: {found:?}");
        assert!(found[0].1.contains(words), "{what}: {found:?}");
    }
}

/// At two ranks each holds its own part of the sum; what one of them adds wrongly is found in its part alone.
#[test]
fn parts_of_a_sum_are_judged_rank_by_rank() {
    let mut c = honest("absorbed", "20+1,70+1,0+1");
    // A rank's part: what an engine of its two heads alone computes is not at hand here; an exact one is: zero heads add zeros.
    for r in &mut c.ranks {
        r.get_mut("out").unwrap().partial = true;
    }
    let rank_0_alone = |c: &mut Captured| {
        for name in ["attn_out@kernel", "attn_out@caller"] {
            c.ranks[1].get_mut(name).unwrap().change(|b| b.fill(0));
        }
        c.ranks[1].get_mut("out").unwrap().change(|b| b.fill(0));
    };
    rank_0_alone(&mut c);
    let (_, report) = compare(&[c], &[0, 1]);
    let layers = report["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 3);
    assert!(layers[2]["engine"]["name"].as_str().unwrap().ends_with("rank 1's part of out"));
    // Zeros of zeros: exact. Rank 0's part is not its heads' but the whole sum: a fault.
    assert_eq!(faults(&layers[2]), []);
    assert_eq!(unit(&layers[2], "out")["verdict"], "exact");
    assert_eq!(faults(&layers[1])[0].0, "out");
}

#[test]
fn manifests_that_make_no_sense_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let right = honest("fused", "0+2");
    write(dir.path(), &[right], &[0, 1]);
    let model = fixture(GLM);
    let path = dir.path().join("rank-1.json");
    let text = std::fs::read_to_string(&path).unwrap();
    for (from, to, words) in [
        ("hook/1", "hook/9", "schema"),
        ("\"rank\":1", "\"rank\":0", "do not belong together"),
        ("\"ranks\":2", "\"ranks\":4", "do not belong together"),
        ("0.33.0", "0.32.0", "do not belong together"),
        ("\"heads\":[2,4]", "\"heads\":[0,2]", "says that it holds heads 0 to 2"),
        ("\"requests\":[\"0+2\"]", "\"requests\":[\"0+1\"]", "different things"),
        ("\"kv_a\"", "\"kv_b\"", "kv_b"),
        ("{", "", "no manifest"),
    ] {
        let broken = text.replacen(from, to, 1);
        assert_ne!(broken, text, "{from}");
        std::fs::write(&path, broken).unwrap();
        let out = command(&["compare", model.to_str().unwrap(), dir.path().to_str().unwrap()]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && said.contains(words), "{from}: {said}");
    }
}

/// What the adapter for vLLM wrote of its stand-in (fixtures/hooks/README.md): an engine that is right, one whose rank 1 holds
/// its heads of q_b_proj in another order, one whose output went into a copy, one whose attention was deleted from the graph.
#[test]
fn dumps_of_the_adapter_are_diagnosed() {
    let model = fixture(GLM);
    let of = |name: &str| {
        let dump = fixture(&format!("hooks/{name}"));
        let out = command(&["compare", model.to_str().unwrap(), dump.to_str().unwrap(), "--format", "json"]);
        let report: Value = serde_json::from_slice(&out.stdout)
            .unwrap_or_else(|e| panic!("{name}: {e}: {}", String::from_utf8_lossy(&out.stderr)));
        (out.status.code(), report)
    };
    let (exit, report) = of("clean");
    for l in report["layers"].as_array().unwrap() {
        assert_eq!(faults(l), [], "{}", l["engine"]["name"]);
        assert!(unit(l, "attn_out@caller")["verdict"] == "exact" && unit(l, "out")["elements"] != 0);
    }
    // Of six tokens and one not all is to be seen that is promised: no verdict of some tensors, and no fault of any.
    assert!(matches!(exit, Some(0 | 3)), "{exit:?}");
    assert_eq!(report["layers"].as_array().unwrap().len(), 2);
    for (name, tensor, words) in [
        ("permuted", "q_raw", ""),
        ("phantom", "attn_out@caller", "output written elsewhere"),
        ("deleted", "attn_out", "never seen on rank 0"),
    ] {
        let (exit, report) = of(name);
        let found = faults(&report["layers"][0]);
        assert_eq!(exit, Some(1), "{name}");
        assert!(found.iter().any(|f| f.0 == tensor && f.1.contains(words)), "{name}: {found:?}");
        // Where the attention never ran, all that it would have seen is missing; else nothing before is wrong.
        assert!(found[0].0 == tensor || name == "deleted", "{name}: {found:?}");
    }
}

/// Folders of the form in which engines' own dumpers write, by the built-in maps.
#[test]
fn built_in_maps_read_what_dumpers_write() {
    let (absorbed, slots) = computed("absorbed", "20+1,70+1");
    let (fused, _) = computed("fused", "0+5");
    let slots: Vec<Value> =
        slots.as_array().unwrap().iter().flat_map(|s| s.as_array().unwrap().clone()).collect();
    let save = |path: &Path, arrays: &[(&str, Array)]| {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let views = arrays
            .iter()
            .map(|(n, a)| (*n, TensorView::new(dtype(a.stored), a.shape.clone(), &a.bytes).unwrap()));
        std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
    };
    // The stacked projection: q_a, then kv_a.
    let stacked = |of: &BTreeMap<String, Part>| {
        let (q, kv) = (&of["q_a"].array, &of["kv_a"].array);
        let n = kv.shape[0];
        let rows = q.bytes.chunks(q.bytes.len() / n).zip(kv.bytes.chunks(kv.bytes.len() / n));
        let bytes = rows.flat_map(|(a, b)| [a, b].concat()).collect();
        Array { stored: q.stored, shape: vec![n, q.shape[1] + kv.shape[1]], bytes }
    };
    // Columns of each row's heads, or of each row of the cache.
    let columns = |a: &Array, width: usize, from: usize, to: usize, shape: Vec<usize>| {
        let bytes = a.bytes.chunks(2 * width).flat_map(|h| h[2 * from..2 * to].to_vec()).collect();
        Array { stored: a.stored, shape, bytes }
    };
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for (folder, of, attention) in [("p0", &fused, "attn_mha"), ("p1", &absorbed, "attn_mqa")] {
        let step = &folder[1..];
        let out = if folder == "p0" { "attn_out" } else { "o_latent" };
        let layer = |m: &str| format!("model.layers.0.{m}");
        let arrays: Vec<(String, Array)> = vec![
            (layer("input_layernorm.0"), of["attn_in"].array.clone()),
            (layer("self_attn.fused_qkv_a_proj_with_mqa"), stacked(of)),
            (layer("self_attn.q_a_layernorm"), of["q_a_normed"].array.clone()),
            (layer("self_attn.q_b_proj"), of["q_raw"].array.clone()),
            (layer("self_attn.kv_a_layernorm"), of["kv_c_normed"].array.clone()),
            (layer(&format!("self_attn.{attention}")), of[out].array.clone()),
        ];
        let named: Vec<(&str, Array)> = arrays.iter().map(|(n, a)| (n.as_str(), a.clone())).collect();
        save(&at(&format!("sglang/TP0_PP0_Rank0_pid7/Pass0000{step}.safetensors")), &named);
        for (i, (name, array)) in arrays.iter().enumerate() {
            let (name, tail) = match name.strip_suffix(".0") {
                Some(_) => ("model.layers.0.self_attn".to_string(), "inputs.hidden_states"),
                None => (name.clone(), "output"),
            };
            let file = format!(
                "step={step}___rank=0___dump_index={i}___name=non_intrusive__{name}.{tail}___layer_id=0"
            );
            save(&at(&format!("dumper/{file}.safetensors")), &[("value", array.clone())]);
        }
    }
    let (q, cache) = (&absorbed["q"].array, &absorbed["cache"].array);
    let pages = cache.shape[0];
    let inputs = [
        ("arg_1", absorbed["q_latent"].array.clone()),
        ("arg_2", columns(q, 256, 192, 256, vec![2, 4, 64])),
        ("arg_3", columns(cache, 576, 0, 512, vec![pages, 64, 512])),
        ("arg_4", columns(cache, 576, 512, 576, vec![pages, 64, 64])),
    ];
    save(&at("mla/inputs.safetensors"), &inputs);
    let lse = |of: &BTreeMap<String, Part>| {
        let of = &of["lse"].array;
        let two = of.bytes.chunks(4).flat_map(|b| {
            let v = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            ((f64::from(v) * std::f64::consts::LOG2_E) as f32).to_le_bytes()
        });
        Array { bytes: two.collect(), ..of.clone() }
    };
    save(
        &at("mla/outputs.safetensors"),
        &[("result_0", absorbed["o_latent"].array.clone()), ("result_1", lse(&absorbed))],
    );
    save(
        &at("ragged/inputs.safetensors"),
        &[
            ("arg_1", fused["q"].array.clone()),
            ("kwarg_k", fused["k"].array.clone()),
            ("arg_3", fused["v"].array.clone()),
        ],
    );
    save(
        &at("ragged/outputs.safetensors"),
        &[("result_0", fused["attn_out"].array.clone()), ("result_1", lse(&fused))],
    );
    let geometry =
        "[geometry]\nheads = 4\nnope = 192\nrope = 64\nvalue = 256\nlatent = 512\nscale = 0.0625\n";
    let cache_entry = format!(
        "cache = {{ parts = [{{ name = 'inputs/arg_3', axes = ['page', 'slot', 'latent'] }}, {{ name = 'inputs/arg_4', axes = ['page', 'slot', 'rope'] }}], slots = {} }}",
        Value::Array(slots)
    );
    let decode = "requests = ['20+1', '70+1']\nform = 'absorbed'";
    let prefill = "requests = ['0+5']\nform = 'fused'";
    for (base, folder, head, tensors, model, judged) in [
        (
            "sglang",
            "sglang",
            format!("{prefill}\nranks = 1"),
            "",
            true,
            &["q_a", "q_a_normed", "q_raw", "kv_a"][..],
        ),
        (
            "sglang",
            "sglang",
            format!("{decode}\nranks = 1\nstep = 1"),
            "",
            true,
            &["q_a", "q_raw", "kv_c_normed"],
        ),
        (
            "sglang-dumper",
            "dumper",
            format!("{prefill}\nranks = 1"),
            "",
            true,
            &["q_a", "q_a_normed", "q_raw"],
        ),
        ("sglang-dumper", "dumper", format!("{decode}\nranks = 1\nstep = 1"), "", true, &["q_a", "kv_a"]),
        (
            "flashinfer-mla",
            "mla",
            format!("{decode}\nlse = {{ base = 'two' }}"),
            &cache_entry,
            false,
            &["o_latent", "lse"],
        ),
        (
            "flashinfer-ragged",
            "ragged",
            format!("{prefill}\nlse = {{ base = 'two' }}"),
            "",
            false,
            &["attn_out", "lse"],
        ),
    ] {
        let map = at("map.toml");
        let text = format!(
            "base = '{base}'\nengine = {{ backend = 'x', version = '1' }}\nlayer = 0\nconvention = 'vllm'\n{head}\n{geometry}[tensors]\n{tensors}\n"
        );
        std::fs::write(&map, text).unwrap();
        let (file, dump) = (fixture(GLM), at(folder));
        let mut args = vec!["compare"];
        if model {
            args.push(file.to_str().unwrap());
        }
        args.extend([dump.to_str().unwrap(), "--map", map.to_str().unwrap(), "--format", "json"]);
        let out = command(&args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        let report: Value =
            serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{base}: {e}: {said}"));
        let l = &report["layers"][0];
        assert!(out.status.code() == Some(0) && faults(l).is_empty(), "{base}: {:?} {said}", faults(l));
        for t in judged {
            assert_ne!(unit(l, t)["elements"], 0, "{base}: {t}");
        }
    }
}
