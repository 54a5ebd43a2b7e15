/*!
The sparse indexer and attention over a selection, in float64, against Hugging Face's modules run in float64
(fixtures/oracle/README.md).

`MLA_CHECK_ORACLE_INDEXER=DIR` adds every NAME.gguf and Hugging Face folder NAME in DIR with its NAME.indexer.safetensors (`convert.py --indexer --all`).

Bound: 1e-13 of the largest magnitude of a tensor, 1e-10 where positions reach 120,000. Selections are equal but for the rows whose
last kept and first dropped logit are less than 1e-9 apart: those are ties, and the answers mark them. Attention is held against the
answers on the answers' own selection, ties included.
*/

#![allow(clippy::print_stdout)]

mod common;

use common::{arrays, fixture, reference, sequence};
use mla_check::judge::selection::{self, Ids, Order, Selected, Wrong};
use mla_check::model::{Convention, Layer, Model, Reading, Selects};
use mla_numeric::DType;
use mla_reference::indexer::{margin, top_k};
use mla_reference::product::Rows;
use mla_reference::rows::dense;
use mla_reference::{Form, Indexer, Pairing, Stage};
use ndarray::{Array2, ArrayD, Axis};
use safetensors::{Dtype, tensor::TensorView};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

type Answers = HashMap<String, ArrayD<f64>>;

const TIE: f64 = 1e-9;

/// Largest difference over largest magnitude; what is −∞ in one is in the other.
fn distance(a: &Array2<f64>, b: &ArrayD<f64>) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut largest, mut worst) = (0.0f64, 0.0f64);
    for (x, y) in a.iter().zip(b) {
        assert_eq!(x.is_finite(), y.is_finite(), "{x} {y}");
        if y.is_finite() {
            (largest, worst) = (largest.max(y.abs()), worst.max((x - y).abs()));
        }
    }
    worst / largest
}

/// Worst distance by name of the tensor.
struct Seen(Vec<(String, f64)>);

impl Seen {
    fn hold(&mut self, case: &str, name: &str, ours: &Array2<f64>, theirs: &ArrayD<f64>) {
        let d = distance(ours, theirs);
        let limit = if case.starts_with("far") { 1e-10 } else { 1e-13 };
        assert!(d <= limit, "{case} {name}: {d:e} > {limit:e}");
        self.0.push((format!("{case}/{name}"), d));
    }
}

fn compare(model: &Path, answers: &Answers) -> Seen {
    let model = Model::open(model).unwrap();
    let mut seen = Seen(Vec::new());
    let mut cases: Vec<&str> = answers.keys().filter_map(|k| k.strip_suffix("/rows")).collect();
    cases.retain(|c| ["index_q", "selected"].iter().any(|t| answers.contains_key(&format!("{c}/{t}"))));
    cases.sort_unstable();
    for case in cases {
        let (name, layer) = case.split_once("/L").unwrap();
        let of = |tensor: &str| answers.get(&format!("{case}/{tensor}"));
        let input = |tensor: &str| of(tensor).unwrap_or_else(|| &answers[&format!("seq/L{layer}/{tensor}")]);
        let layer: usize = layer.parse().unwrap();
        let hidden = input("hidden").clone().into_dimensionality().unwrap();
        let positions: Vec<u64> = input("positions").iter().map(|p| *p as u64).collect();
        let rows: Vec<usize> = of("rows").unwrap().iter().map(|r| *r as usize).collect();
        let n = positions.len();
        let reading = Reading::of(if name == "seq_eps" { Convention::Vllm } else { Convention::Hf });
        let weights = model.weights(layer).unwrap();
        let loaded = Layer { index: layer, spec: model.spec(&reading), weights: &weights };
        let mut case_of = sequence(hidden, &positions);
        let dense = reference(&loaded, &case_of, &Form::ALL);
        let block = |stage| {
            let t = dense.get(stage, Form::Fused);
            t.block(0..t.rows, 0..t.cols)
        };
        let Selects::Own(own) = model.selects(layer, &reading).unwrap() else { panic!("{case}") };
        let (mut indexer, w) = *own;
        let visible: Vec<usize> = (1..=n).collect();
        let (latent, attn_in) = (block(Stage::QANormed), block(Stage::AttnIn));
        let q = indexer.queries(&w, latent.view(), &positions);
        let k = indexer.keys(&w, attn_in.view(), &positions);
        let heads = indexer.head_weights(&w, attn_in.view());
        let logits = indexer.logits(q.view(), heads.view(), k.view(), &visible);
        for (tensor, ours) in
            [("index_q", &q), ("index_k", &k), ("index_w", &heads), ("index_scores", &logits)]
        {
            if let Some(theirs) = of(tensor) {
                seen.hold(case, tensor, &ours.select(Axis(0), &rows), theirs);
            }
        }
        indexer.hadamard = true;
        if let Some(theirs) = of("index_k_hadamard") {
            let k = indexer.keys(&w, attn_in.view(), &positions);
            seen.hold(case, "index_k_hadamard", &k.select(Axis(0), &rows), theirs);
        }
        if let Some(theirs) = of("index_q_hadamard") {
            let q = indexer.queries(&w, latent.view(), &positions);
            seen.hold(case, "index_q_hadamard", &q.select(Axis(0), &rows), theirs);
        }
        let Some(selected) = of("selected") else { continue };
        let keep = if name == "seq_topk8" { 8 } else { indexer.top_k };
        let (mut given, mut ties) = (Vec::new(), Vec::new());
        for i in 0..n {
            let theirs: Vec<usize> = (0..n).filter(|s| selected[[i, *s]] != 0.0).collect();
            let row = logits.row(i).to_vec();
            let gap = margin(&row, keep);
            let mut ours = top_k(&row, keep);
            ours.sort_unstable();
            if gap < TIE {
                ties.push(i);
            } else {
                assert_eq!(ours, theirs, "{case} row {i}");
            }
            if let Some(marked) = of("select_gap") {
                let marked = marked[i];
                let equal = gap == marked || (gap - marked).abs() < 1e-12;
                assert!(equal, "{case} row {i}: margin {gap:e}, theirs {marked:e}");
            }
            given.push(theirs);
        }
        let marked: Vec<usize> = match of("select_gap") {
            Some(gap) => (0..n).filter(|i| gap[*i] < TIE).collect(),
            None if case == "seq_topk8/L0" => vec![23],
            None => ties.clone(),
        };
        assert_eq!(ties, marked, "{case}");
        assert!(given.iter().any(|l| l.len() < n && l.len() == keep), "{case} selects nothing");
        case_of.given.selection = vec![given];
        let sparse = reference(&loaded, &case_of, &Form::ALL);
        let all: Vec<usize> = (0..n).collect();
        for (tensor, stage) in [("lse", Stage::Lse), ("attn_out", Stage::AttnOut), ("out", Stage::Out)] {
            let Some(theirs) = of(tensor) else { continue };
            for form in Form::ALL {
                let t = sparse.get(stage, form);
                let rows = if stage == Stage::Lse { &all } else { &rows };
                let ours = t.block(0..t.rows, 0..t.cols).select(Axis(0), rows);
                seen.hold(case, tensor, &ours, theirs);
                // What a run without the indexer gives is no rounding away.
                let t = dense.get(stage, form);
                let whole = t.block(0..t.rows, 0..t.cols).select(Axis(0), rows);
                assert!(distance(&whole, theirs) > 1e-2, "{case} {tensor} {form:?}");
            }
        }
    }
    seen
}

#[test]
fn fixtures_agree_with_hugging_face_in_float64() {
    for (name, file) in
        common::ORACLE.into_iter().filter(|o| ["glm5dims", "dsv32dims"].iter().any(|n| o.0.starts_with(n)))
    {
        let mut answers = arrays(&fixture(&format!("oracle/{name}.safetensors")));
        answers.retain(|k, _| k.ends_with("/hidden") || k.ends_with("/positions"));
        answers.extend(arrays(&fixture(&format!("oracle/{name}.indexer.safetensors"))));
        let seen = compare(&fixture(file), &answers).0;
        assert!(seen.len() >= 8, "{name}: {seen:?}");
        seen.iter().for_each(|(what, d)| println!("{name} {what} {d:.1e}"));
    }
}

/// A checkpoint with the indexer that a GGUF file holds computes the same; what it lacks is named, and nothing else needs it.
#[test]
fn a_checkpoint_holds_the_same_indexer() {
    let gguf = Model::open(&fixture(common::MODELS[1].1)).unwrap();
    let reading = Reading::default();
    let Selects::Own(own) = gguf.selects(0, &reading).unwrap() else { panic!() };
    let (indexer, w) = *own;
    let from = fixture("checkpoints/glm5dims.nvfp4-modelopt");
    let folder = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    let put = |config: &str| {
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        Model::open(folder.path()).unwrap()
    };
    std::fs::copy(from.join("model.safetensors"), folder.path().join("model-00001-of-00002.safetensors"))
        .unwrap();
    let bare = put(&config);
    bare.weights(0).unwrap();
    let error = bare.selects(0, &reading).err().unwrap().to_string();
    assert!(error.contains("model.layers.0.self_attn.indexer.wq_b is missing"), "{error}");
    let whole = |r: &dyn Rows| dense(r, 0..r.rows(), false).into_raw_vec_and_offset().0;
    let (width, hidden) = (indexer.width, gguf.geometry.hidden);
    let tensors = [
        ("wq_b.weight", vec![indexer.heads * width, gguf.geometry.q_rank], whole(w.q.as_ref())),
        ("wk.weight", vec![width, hidden], whole(w.k.as_ref())),
        ("k_norm.weight", vec![width], w.gamma.clone()),
        ("k_norm.bias", vec![width], w.beta.clone()),
        ("weights_proj.weight", vec![indexer.heads, hidden], whole(w.proj.as_ref())),
    ]
    .map(|(name, shape, values)| {
        let bytes: Vec<u8> = values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect();
        (format!("model.layers.0.self_attn.indexer.{name}"), shape, bytes)
    });
    let views = tensors.iter().map(|(n, s, b)| (n, TensorView::new(Dtype::F32, s.clone(), b).unwrap()));
    std::fs::write(
        folder.path().join("model-00002-of-00002.safetensors"),
        safetensors::serialize(views, None).unwrap(),
    )
    .unwrap();
    let checkpoint = put(&config);
    let Selects::Own(own) = checkpoint.selects(0, &reading).unwrap() else { panic!() };
    let (other, v) = *own;
    assert_eq!(other, indexer);
    let x = Array2::from_shape_fn((3, hidden), |(i, j)| ((i * 7919 + j * 31) % 101) as f64 / 50.0 - 1.0);
    let positions = [0, 5, 900];
    assert_eq!(indexer.queries(&w, x.view(), &positions), other.queries(&v, x.view(), &positions));
    assert_eq!(indexer.keys(&w, x.view(), &positions), other.keys(&v, x.view(), &positions));
    assert_eq!(indexer.head_weights(&w, x.view()), other.head_weights(&v, x.view()));
    // What the configuration says of the pairs, and what engines take where it is silent.
    let pairing = |config: &str, convention| {
        let model = put(config);
        let Selects::Own(own) = model.selects(0, &Reading::of(convention)).unwrap() else { panic!() };
        own.0.rope.pairing
    };
    assert!(!config.contains("indexer_rope_interleave"));
    let said = |v: &str| config.replacen('{', &format!("{{\"indexer_rope_interleave\": {v},"), 1);
    for (config, hf, vllm) in [
        (config.clone(), Pairing::Adjacent, Pairing::Half),
        (said("true"), Pairing::Adjacent, Pairing::Adjacent),
        (said("false"), Pairing::Half, Pairing::Half),
    ] {
        assert_eq!((pairing(&config, Convention::Hf), pairing(&config, Convention::Vllm)), (hf, vllm));
        assert_eq!(pairing(&config, Convention::LlamaCpp), Pairing::Adjacent);
    }
    // A first layer that shares has nobody to share with.
    let shared = config.replace("\"full\"", "\"shared\"");
    assert_ne!(shared, config);
    let error = put(&shared).selects(0, &reading).err().unwrap().to_string();
    assert!(error.contains("indexer_types"), "{error}");
}

/// What a layer of a fixture chooses from: the exact logits of q, k and weights on the bf16 grid, how far float32 may be from
/// them, and what a float32 engine makes of them, head after head and column after column.
struct Chosen {
    indexer: Indexer,
    q: Array2<f64>,
    k: Array2<f64>,
    heads: Array2<f64>,
    exact: Array2<f64>,
    slack: Array2<f64>,
    engine: Vec<Vec<f32>>,
}

fn chosen_from(file: &str, answers: &str, change: &dyn Fn(&mut Indexer)) -> Chosen {
    let model = Model::open(&fixture(file)).unwrap();
    let reading = Reading::default();
    let weights = model.weights(0).unwrap();
    let loaded = Layer { index: 0, spec: model.spec(&reading), weights: &weights };
    let all = arrays(&fixture(&format!("oracle/{answers}.safetensors")));
    let hidden = all["seq/L0/hidden"].clone().into_dimensionality().unwrap();
    let positions: Vec<u64> = (0..33).collect();
    let keep = reference(&loaded, &sequence(hidden, &positions), &[Form::Fused]);
    let block = |stage| {
        let t = keep.get(stage, Form::Fused);
        t.block(0..t.rows, 0..t.cols)
    };
    let Selects::Own(own) = model.selects(0, &reading).unwrap() else { panic!() };
    let (mut indexer, w) = *own;
    change(&mut indexer);
    let round = |x: Array2<f64>| x.mapv(|v| DType::Bf16.round(v));
    let q = round(indexer.queries(&w, block(Stage::QANormed).view(), &positions));
    let k = round(indexer.keys(&w, block(Stage::AttnIn).view(), &positions));
    let heads = round(indexer.head_weights(&w, block(Stage::AttnIn).view()));
    let visible: Vec<usize> = (1..=33).collect();
    let exact = indexer.logits(q.view(), heads.view(), k.view(), &visible);
    let slack = selection::slack(&indexer, q.view(), heads.view(), k.view());
    let mut all = Chosen { indexer, q, k, heads, exact, slack, engine: Vec::new() };
    all.engine = all.float32(true, true);
    all
}

impl Chosen {
    /// Logits in float32, `[token][key]`, keys that are seen; with a relu or none, with the heads' weights or ones.
    fn float32(&self, relu: bool, weighed: bool) -> Vec<Vec<f32>> {
        let (d, heads) = (self.indexer.width, self.indexer.heads);
        let logit = |i: usize, s: usize| {
            (0..heads).fold(0f32, |sum, h| {
                let dot = (0..d).fold(0f32, |x, j| x + self.q[[i, h * d + j]] as f32 * self.k[[s, j]] as f32);
                let scaled = dot * (1.0 / (d as f32).sqrt());
                let passed = if relu { scaled.max(0.0) } else { scaled };
                sum + passed * if weighed { self.heads[[i, h]] as f32 } else { 1.0 }
            })
        };
        (0..33).map(|i| (0..=i).map(|s| logit(i, s)).collect()).collect()
    }

    /// The k largest of each row, the higher position first among equals: not as the reference breaks ties.
    fn lists(logits: &[Vec<f32>], k: usize) -> Vec<Vec<i64>> {
        let one = |row: &Vec<f32>| {
            let mut order: Vec<usize> = (0..row.len()).rev().collect();
            order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
            order.into_iter().take(k).map(|s| s as i64).collect()
        };
        logits.iter().map(one).collect()
    }

    /// −0 and 0 are one number.
    fn plain(logits: &[Vec<f32>]) -> Vec<Vec<f32>> {
        logits.iter().map(|r| r.iter().map(|v| v + 0.0).collect()).collect()
    }

    fn judge(&self, lists: &[Vec<i64>], k: usize, order: Order) -> Selected {
        let plan = sequence(Array2::zeros((33, 1)), &(0..33).collect::<Vec<u64>>()).plan;
        selection::judge((&plan, 0), (self.exact.view(), self.slack.view()), k, (lists, Ids::Position, order))
    }
}

const SPARSE: [(&str, &str); 2] = [
    ("models/glm5dims.Q4_K_M.gguf", "glm5dims.Q4_K_M"),
    ("architectures/dsv32dims.Q4_K_M.gguf", "dsv32dims.Q4_K_M"),
];

/// A float32 engine is never accused, whatever top_k is and whichever way it breaks ties.
#[test]
fn honest_selections_are_clean() {
    let (mut equal, mut rounding) = (0, 0);
    for (file, answers) in SPARSE {
        let c = chosen_from(file, answers, &|_| {});
        for (i, row) in c.engine.iter().enumerate() {
            for (s, v) in row.iter().enumerate() {
                let off = (f64::from(*v) - c.exact[[i, s]]).abs();
                assert!(off <= c.slack[[i, s]], "{answers} {i} {s}: {off:e} > {:e}", c.slack[[i, s]]);
            }
        }
        for k in 1..34 {
            let got = c.judge(&Chosen::lists(&Chosen::plain(&c.engine), k), k, Order::Descending);
            assert!(got.wrong.is_empty(), "{answers} top {k}: {:?}", got.wrong);
            (equal, rounding) = (equal + got.equal, rounding + got.rounding);
        }
    }
    assert!(equal > 1500 && rounding > 0, "{equal} {rounding}");
}

/// Faults of real engines (ids, cut, relu, weights, pairs, lanes): the first token that is named is the first one that is wrong.
#[test]
fn planted_faults_of_selections_are_found() {
    const K: usize = 8;
    for (file, answers) in SPARSE {
        let c = chosen_from(file, answers, &|_| {});
        let good = Chosen::lists(&Chosen::plain(&c.engine), K);
        assert_eq!(c.judge(&good, K, Order::Descending).wrong, []);
        let with = |change: &dyn Fn(usize, &mut Vec<i64>)| {
            let mut lists = good.clone();
            lists.iter_mut().enumerate().for_each(|(i, l)| change(i, l));
            c.judge(&lists, K, Order::Any).wrong
        };
        let first = |wrong: &[(usize, Wrong)]| wrong.first().cloned().map(|w| w.0);
        // Lists of single tokens.
        let (twice, from) = (good[20][3] as usize, 9);
        let at = |token: usize, change: &dyn Fn(&mut Vec<i64>)| {
            with(&|i, l| {
                if i == token {
                    change(l)
                }
            })
        };
        assert_eq!(at(20, &|l| l[7] = l[3]), [(20, Wrong::Double { position: twice })]);
        assert_eq!(at(20, &|l| l[0] = 21), [(20, Wrong::Unseen { position: 21 })]);
        assert_eq!(at(20, &|l| l[0] = 33), [(20, Wrong::NoKey { id: 33 })]);
        assert_eq!(at(20, &|l| l.truncate(7)), [(20, Wrong::Count { found: 7, wanted: 8 })]);
        assert_eq!(at(4, &|l| l.push(0)), [(4, Wrong::Double { position: 0 })]);
        assert_eq!(at(4, &|l| l.truncate(4)), [(4, Wrong::Count { found: 4, wanted: 5 })]);
        assert_eq!(at(20, &|l| l[5] = -1), [(20, Wrong::Padding { at: 5 })]);
        // Stale lanes behind a short list, dense attention, the last keys, the first keys, the smallest, ids off by one.
        assert_eq!(first(&with(&|i, l| (l.len()..K).for_each(|s| l.push((i + s) as i64)))), Some(0));
        assert_eq!(first(&with(&|i, l| *l = (0..=i as i64).collect())), Some(8));
        for (name, wrong) in [
            ("last", with(&|i, l| *l = (0..=i as i64).rev().take(K).collect())),
            ("first", with(&|i, l| *l = (0..=i as i64).take(K).collect())),
            (
                "smallest",
                with(&|i, l| {
                    *l = Chosen::lists(
                        &Chosen::plain(
                            &c.engine.iter().map(|r| r.iter().map(|v| -v).collect()).collect::<Vec<_>>(),
                        ),
                        K,
                    )[i]
                        .clone()
                }),
            ),
            ("off by one", with(&|_, l| l.iter_mut().for_each(|s| *s = (*s - 1).max(0)))),
        ] {
            assert!(wrong.len() > 15, "{answers} {name}: {wrong:?}");
            assert!(first(&wrong).is_some_and(|t| t <= from), "{answers} {name}: {wrong:?}");
        }
        // Logits that are wrong: the set is held against right ones.
        let swapped = |i: &mut Indexer| {
            i.rope.pairing = if i.rope.pairing == Pairing::Half { Pairing::Adjacent } else { Pairing::Half };
        };
        let turned = chosen_from(file, answers, &swapped);
        for (name, logits, many) in [
            ("no relu", c.float32(false, true), 5),
            ("no weights", c.float32(true, false), 15),
            ("other pairs", turned.engine.clone(), 15),
        ] {
            let wrong = c.judge(&Chosen::lists(&Chosen::plain(&logits), K), K, Order::Any).wrong;
            assert!(wrong.len() >= many, "{answers} {name}: {}", wrong.len());
            assert!(wrong.iter().all(|(i, w)| *i >= K && matches!(w, Wrong::Worse { .. })), "{wrong:?}");
        }
        // An order that was promised.
        let mut lists = good.clone();
        lists[20].swap(0, 7);
        assert!(matches!(c.judge(&lists, K, Order::Descending).wrong[..], [(20, Wrong::Order { .. })]));
        assert_eq!(c.judge(&lists, K, Order::Any).wrong, []);
    }
}

#[test]
fn a_whole_folder_agrees_where_one_is_given() {
    let Some(dir) = std::env::var_os("MLA_CHECK_ORACLE_INDEXER").map(PathBuf::from) else { return };
    let mut compared = 0;
    for entry in std::fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        let answers = match path.extension() {
            Some(e) if e == "gguf" => path.with_extension("indexer.safetensors"),
            _ if path.is_dir() => PathBuf::from(format!("{}.indexer.safetensors", path.display())),
            _ => continue,
        };
        let seen = compare(&path, &arrays(&answers)).0;
        seen.iter().for_each(|(what, d)| println!("{} {what} {d:.1e}", path.display()));
        compared += seen.len();
    }
    assert!(compared > 20, "{compared} tensors compared");
}
