/*!
Outputs of real kernels on an NVIDIA H200, each judged under the contract of the built-in table: none is a fault.
With another contract, or another softmax scale, they are.

The repository holds a part of them (fixtures/real/README.md). `MLA_CHECK_GPU_DUMPS=DIR` judges DIR/real.safetensors,
all 130 of them, and `--nocapture` prints the table.
*/

#![allow(clippy::print_stdout)] // The table is what --nocapture is for.

mod common;

use common::fixture;
use common::real::{Judged, Noise, Prediction, join, judge};
use mla_check::contracts;
use mla_check::judge::bound::{bound, statistical};
use mla_check::judge::stats::direction;
use mla_check::judge::stats::noise::{self, Share};
use mla_numeric::DType;
use mla_reference::attention::{Head, attend_split, strided};
use mla_reference::elementwise::{block_norms, normalise, rotate_cast, times_gamma};
use mla_reference::product::Strided;
use mla_reference::{Contract, KeyStats, Pairing, RowSum, Splits, Terms, TileOrder};
use ndarray::{Array2, ArrayD, Axis, Ix2, Ix3, s};
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// Arrays in float64, with the dtype of those of 16 bits.
struct Dumps(BTreeMap<String, (DType, ArrayD<f64>)>);

impl Dumps {
    fn read() -> Dumps {
        let path = match std::env::var_os("MLA_CHECK_GPU_DUMPS") {
            Some(dir) => PathBuf::from(dir).join("real.safetensors"),
            None => fixture("real/real.safetensors"),
        };
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let read = |(name, t): (String, safetensors::tensor::TensorView)| {
            let data = t.data();
            let halves = |d: DType| {
                let bits = data.as_chunks().0.iter().map(|b| u32::from(u16::from_le_bytes(*b)));
                bits.map(|b| value(d, b)).collect::<Vec<f64>>()
            };
            let (dtype, values) = match t.dtype() {
                Dtype::BF16 => (DType::Bf16, halves(DType::Bf16)),
                Dtype::F16 => (DType::F16, halves(DType::F16)),
                Dtype::F32 => {
                    (DType::F32, data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect())
                }
                Dtype::I64 => {
                    (DType::F64, data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect())
                }
                _ => (DType::F64, data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()),
            };
            (name, (dtype, ArrayD::from_shape_vec(t.shape(), values).unwrap()))
        };
        Dumps(file.tensors().into_iter().map(read).collect())
    }

    fn get(&self, key: &str) -> &ArrayD<f64> {
        &self.0.get(key).unwrap_or_else(|| panic!("no {key}")).1
    }
    fn dtype(&self, key: &str) -> DType {
        self.0[key].0
    }
    fn three(&self, key: &str) -> ndarray::ArrayView3<'_, f64> {
        self.get(key).view().into_dimensionality::<Ix3>().unwrap()
    }
    fn two(&self, key: &str) -> ndarray::ArrayView2<'_, f64> {
        self.get(key).view().into_dimensionality::<Ix2>().unwrap()
    }
    fn number(&self, key: &str) -> f64 {
        self.get(key)[[0]]
    }
    fn counts(&self, key: &str) -> Vec<usize> {
        self.get(key).iter().map(|v| *v as usize).collect()
    }
    /// Names below a prefix that hold `last`, without both.
    fn below(&self, prefix: &str, last: &str) -> Vec<String> {
        let inner = |k: &String| Some(k.strip_prefix(prefix)?.strip_suffix(last)?.to_owned());
        self.0.keys().filter_map(inner).collect()
    }
}

fn value(d: DType, bits: u32) -> f64 {
    match d {
        DType::Bf16 => f64::from(f32::from_bits(bits << 16)),
        _ => f64::from(half::f16::from_bits(bits as u16)),
    }
}

/// A row of the table.
struct Row {
    kernel: String,
    problem: String,
    contract: String,
    judged: Judged,
    lse: Option<f64>,
    attention: bool,
}

impl Row {
    fn verdict(&self) -> &'static str {
        if self.lse.is_some_and(|u| u > 1.0) { "fault" } else { self.judged.verdict }
    }
}

/// How the table's contract is changed before the reference is computed.
type Change<'a> = &'a dyn Fn(Contract) -> Contract;

/// Name in the table and contract of a stored kernel.
fn contract(kernel: &str, problem: &str, dtype: DType, keys: usize) -> (String, Contract) {
    let wide = problem.starts_with("d256");
    let by_width = |name: &str| format!("{name}-{}", if wide { "d256" } else { "d192" });
    let n = || kernel.rsplit("_s").next().unwrap().parse::<usize>().unwrap();
    let (name, splits) = match kernel {
        k if k.starts_with("vllm_triton") => {
            ("vllm-triton-decode".into(), Some(Splits::Equal { parts: n(), multiple: 1 }))
        }
        k if k.starts_with("sgl_triton") => {
            ("sglang-triton-decode".into(), Some(Splits::Equal { parts: n(), multiple: 32 }))
        }
        k if k.starts_with("fa3_mla") => ("fa3-mla-decode".into(), Some(Splits::Parts(n()))),
        "flashmla" => ("flashmla-decode".into(), None),
        "fi_mla_fa2" => ("flashinfer-mla-fa2".into(), None),
        "fi_mla_fa3" => ("flashinfer-mla-fa3".into(), None),
        "fi_mla_fa2_99k" => ("flashinfer-mla-fa2-100kb".into(), None),
        "fi_ragged_fa2" => {
            (by_width("flashinfer-ragged-fa2"), Some(Splits::Keys(if keys == 2048 { 256 } else { 128 })))
        }
        "fi_ragged_fa3" => (by_width("flashinfer-ragged-fa3"), None),
        "vllm_fa3" => (by_width("fa3-prefill"), None),
        "sdpa_flash" | "sdpa_flash_vpad" => {
            let per = match keys {
                129 => 64,
                1024 => 128,
                _ => 320,
            };
            ("sdpa-flash".into(), Some(Splits::Keys(per)))
        }
        other => (other.replace('_', "-"), None),
    };
    let c = contracts::find(&name).unwrap().contract_for(dtype);
    (name, Contract { splits: splits.unwrap_or(c.splits), ..c })
}

/// Attention of some rows that share keys; its lse in the contract's base, if there is one.
fn attention(
    head: &Head,
    ranges: &[Range<usize>],
    c: &Contract,
    lse: Option<Vec<f64>>,
    label: Vec<usize>,
) -> (Prediction, Option<f64>) {
    let m = attend_split(head, ranges, c);
    let terms = |lse| Terms::Split { merged: &m, head, lse };
    let p = Prediction {
        proven: bound(c, &terms(false), m.x.view(), false),
        statistical: statistical(c, &terms(false), m.x.view(), false),
        noise: Noise::new(c.activations, &m.x, noise::of(c, &terms(false), m.x.view(), c.activations)),
        directions: Vec::from([("gain", m.x.clone()), ("scale", direction::scale_split(&m, head))]),
        x: m.x.clone(),
        label,
    };
    let used = lse.map(|lse| {
        let x = Array2::from_shape_vec((m.lse.len(), 1), m.lse.clone()).unwrap();
        let b = statistical(c, &terms(true), x.view(), false);
        let wide = bound(c, &terms(true), x.view(), false);
        let of = |(i, o): (usize, &f64)| {
            let off = (o * c.lse_base.to_natural() - m.lse[i]).abs();
            let rounding = DType::F32.spacing(*o) / 2.0;
            assert!(wide[[i, 0]] >= b[[i, 0]] * 0.999, "the proven bound is the narrower one");
            (off - rounding) / b[[i, 0]]
        };
        lse.iter().enumerate().map(of).fold(0.0, f64::max)
    });
    (p, used)
}

fn absorbed(d: &Dumps, scale: f64, change: Change, take: &dyn Fn(&str) -> bool) -> Vec<Row> {
    let mut rows = Vec::new();
    for problem in d.below("absorbed/", "/q") {
        let at = format!("absorbed/{problem}");
        let (q, kv) = (d.three(&format!("{at}/q")), d.two(&format!("{at}/kv")));
        let (lens, q_lens) = (d.counts(&format!("{at}/lens")), d.counts(&format!("{at}/q_lens")));
        let heads = q.shape()[1];
        for kernel in d.below(&format!("{at}/"), "/out").into_iter().filter(|k| take(k)) {
            let key = format!("{at}/{kernel}");
            let out = d.three(&format!("{key}/out"));
            let lse =
                d.0.get(&format!("{key}/lse")).map(|l| l.1.view().into_dimensionality::<Ix2>().unwrap());
            let ranges =
                d.0.get(&format!("{key}/ranges")).map(|r| r.1.clone().into_dimensionality::<Ix2>().unwrap());
            let dtype = d.dtype(&format!("{key}/out"));
            let (name, c) = contract(&kernel, &problem, dtype, 0);
            let c = change(c);
            let (mut parts, mut uses, mut token, mut first) = (Vec::new(), None, 0, 0);
            for (i, (&n, &nq)) in lens.iter().zip(&q_lens).enumerate() {
                let own = q.slice(s![token..token + nq, .., ..]);
                let own = own.to_shape((nq * heads, 576)).unwrap().into_owned();
                let k = kv.slice(s![first..first + n, ..]).to_owned();
                let visible: Vec<usize> = (0..nq * heads).map(|r| n - nq + 1 + r / heads).collect();
                let splits = match &ranges {
                    Some(r) => r
                        .rows()
                        .into_iter()
                        .filter(|r| r[0] as usize == i)
                        .map(|r| r[1] as usize..r[2] as usize)
                        .collect(),
                    None => c.split_ranges(n),
                };
                let stats = KeyStats::default();
                let scale = scale * d.number(&format!("{at}/scale"));
                let (keys, values) = (strided(&k), Strided { cols: 512, ..strided(&k) });
                let head =
                    Head { q: own.view(), k: keys, v: values, visible: &visible, scale, stats: &stats };
                let own = lse.map(|l| l.slice(s![token..token + nq, ..]).iter().copied().collect());
                let label = (0..nq * heads).map(|r| r % heads).collect();
                let (p, used) = attention(&head, &splits, &c, own, label);
                parts.push(p);
                uses = used.or(uses).map(|u: f64| u.max(uses.unwrap_or(0.0)));
                (token, first) = (token + nq, first + n);
            }
            let (p, axes) = join(parts);
            let o = out.to_shape((token * heads, 512)).unwrap().into_owned();
            let judged = judge(dtype, &o, &p, &axes, true);
            let contract = format!("{name}, {}", c.splits);
            rows.push(Row { kernel, problem: problem.clone(), contract, judged, lse: uses, attention: true });
        }
    }
    rows
}

fn decompressed(d: &Dumps, scale: f64, change: Change, take: &dyn Fn(&str) -> bool) -> Vec<Row> {
    let mut rows = Vec::new();
    for problem in d.below("decompressed/", "/q") {
        let at = format!("decompressed/{problem}");
        let [q, k, v] = ["q", "k", "v"].map(|n| d.three(&format!("{at}/{n}")));
        let visible = d.counts(&format!("{at}/visible"));
        for kernel in d.below(&format!("{at}/"), "/out").into_iter().filter(|k| take(k)) {
            let key = format!("{at}/{kernel}");
            let out = d.three(&format!("{key}/out"));
            let lse =
                d.0.get(&format!("{key}/lse")).map(|l| l.1.view().into_dimensionality::<Ix2>().unwrap());
            let dtype = d.dtype(&format!("{key}/out"));
            let keys = k.shape()[0];
            let (name, c) = contract(&kernel, &problem, dtype, keys);
            let c = change(c);
            let (mut parts, mut uses, mut os) = (Vec::new(), None, Vec::new());
            for h in 0..q.shape()[1] {
                let of =
                    |m: ndarray::ArrayView3<f64>| m.index_axis(Axis(1), h).as_standard_layout().into_owned();
                let (q, k, v) = (of(q), of(k), of(v));
                let stats = KeyStats::default();
                let scale = scale * d.number(&format!("{at}/scale"));
                let head = Head {
                    q: q.view(),
                    k: strided(&k),
                    v: strided(&v),
                    visible: &visible,
                    scale,
                    stats: &stats,
                };
                let own = lse.map(|l| l.column(h).to_vec());
                let label = vec![h; q.nrows()];
                let (p, used) = attention(&head, &c.split_ranges(keys), &c, own, label);
                parts.push(p);
                uses = used.or(uses).map(|u: f64| u.max(uses.unwrap_or(0.0)));
                os.push(of(out));
            }
            let (p, axes) = join(parts);
            let o = ndarray::concatenate(Axis(0), &os.iter().map(|o| o.view()).collect::<Vec<_>>()).unwrap();
            let judged = judge(dtype, &o, &p, &axes, true);
            let contract = format!("{name}, {}", c.splits);
            rows.push(Row { kernel, problem: problem.clone(), contract, judged, lse: uses, attention: true });
        }
    }
    rows
}

/// A prediction from terms, with the gain as the only direction.
fn predict(c: &Contract, terms: &Terms, x: Array2<f64>) -> Prediction {
    Prediction {
        proven: bound(c, terms, x.view(), false),
        statistical: statistical(c, terms, x.view(), false),
        noise: Noise::new(c.activations, &x, noise::of(c, terms, x.view(), c.activations)),
        directions: Vec::from([("gain", x.clone())]),
        label: vec![0; x.nrows()],
        x,
    }
}

fn norms(m: &Array2<f64>) -> Vec<f64> {
    m.rows().into_iter().map(|r| r.iter().map(|v| v * v).sum::<f64>().sqrt()).collect()
}

/// The product of rows of a with rows of w.
fn product(c: &Contract, a: Array2<f64>, w: Array2<f64>) -> Prediction {
    let x = a.dot(&w.t());
    let size = block_norms(a.view()).dot(&block_norms(w.view()).t());
    let rows = strided(&w);
    let (a_norms, w_norms) = (norms(&a), norms(&w));
    let terms = Terms::Product {
        len: a.ncols(),
        size: size.into(),
        a_norms: a_norms.into(),
        w_norms: w_norms.into(),
        a: a.view(),
        w: &rows,
    };
    predict(c, &terms, x)
}

/// Softmax in float32 of scores that were rounded after their scale; not a stage of ours. P errs by twice
/// 2⁻²² + (6max|s| + T/4 + 4)u: the exponential and the sum of T terms.
fn softmax(dtype: DType, raw: Array2<f64>, scale: f64, causal: bool) -> Prediction {
    let n = raw.ncols();
    let (mut x, mut b) = (Array2::zeros(raw.dim()), Array2::zeros(raw.dim()));
    let u = mla_numeric::U;
    for (i, row) in raw.rows().into_iter().enumerate() {
        let seen = if causal { i + 1 } else { n };
        let s: Vec<f64> = row.iter().take(seen).map(|v| dtype.round(v * scale)).collect();
        let last = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let largest = s.iter().fold(0.0f64, |m, s| m.max(s.abs()));
        let sum: f64 = s.iter().map(|s| (s - last).exp()).sum();
        for (t, s) in s.iter().enumerate() {
            x[[i, t]] = (s - last).exp() / sum;
            let e = f64::powi(2.0, -22) + (6.0 * largest + n as f64 / 4.0 + 4.0) * u;
            b[[i, t]] = 2.0 * x[[i, t]] * e;
        }
    }
    let sigma = x.mapv(|p: f64| 4.0 * u * p);
    let own = noise::Noise { sigma, share: Share::OfNoise, factors: vec![1.0; n], steps: 16.0 };
    let noise = Noise::new(dtype, &x, own);
    let (label, directions) = (vec![0; x.nrows()], Vec::from([("gain", x.clone())]));
    Prediction { proven: b.clone(), statistical: b, noise, directions, label, x }
}

fn modules(d: &Dumps) -> Vec<Row> {
    let mut rows = Vec::new();
    for name in d.below("hf/", "/o") {
        let at = format!("hf/{name}");
        let parts: Vec<&str> = name.split('/').collect();
        let (tag, kind, stage) = (parts[0], parts[1], parts[2]);
        let dtype = d.dtype(&format!("{at}/a"));
        let table = match kind {
            "product" => "hf-linear",
            "attention" => "sdpa-cudnn",
            _ if tag == "v2" => "hf-deepseek-v2",
            _ => "hf-eager",
        };
        let c = contracts::find(table).unwrap().contract_for(dtype);
        let a = d.three(&format!("{at}/a"));
        let o = d.three(&format!("{at}/o"));
        let of = |key: &str, h: usize| {
            let m = d.three(&format!("{at}/{key}"));
            m.index_axis(Axis(0), h.min(m.shape()[0] - 1)).as_standard_layout().into_owned()
        };
        let (mut predictions, mut os) = (Vec::new(), Vec::new());
        for h in 0..a.shape()[0] {
            let a = of("a", h);
            os.push(of("o", h));
            predictions.push(match kind {
                "product" => product(&c, a, of("w", h)),
                "norm" => {
                    let gamma = of("w", 0).into_raw_vec_and_offset().0;
                    let z = normalise(a.view(), d.number(&format!("{at}/eps")));
                    let x = times_gamma(&z, &gamma, c.norm_cast);
                    predict(&c, &Terms::Norm { len: a.ncols(), z: z.into(), gamma: &gamma }, x)
                }
                "rope" => {
                    let key = |n: &str| format!("{at}/{n}");
                    let table = |n: &str| match d.get(&key(n)).ndim() {
                        3 => of(n, 0),
                        _ => d.two(&key(n)).to_owned(),
                    };
                    let pairing = if tag == "v2" { Pairing::Adjacent } else { Pairing::Half };
                    let r =
                        rotate_cast(a.view(), &(table("cos"), table("sin")), |i| i, pairing, c.rope_products);
                    let terms = Terms::Rope { size: r.size.into(), first: 0, steps: r.steps.into() };
                    predict(&c, &terms, r.y)
                }
                "softmax" => {
                    let causal = d.number(&format!("{at}/causal")) != 0.0;
                    softmax(dtype, a, d.number(&format!("{at}/scale")), causal)
                }
                _ => {
                    let (k, v, stats) = (of("k", h), of("v", h), KeyStats::default());
                    let visible: Vec<usize> = (1..=a.nrows()).collect();
                    let scale = d.number(&format!("{at}/scale"));
                    let (k, v) = (strided(&k), strided(&v));
                    let head = Head { q: a.view(), k, v, visible: &visible, scale, stats: &stats };
                    attention(&head, &c.split_ranges(k.rows), &c, None, vec![h; a.nrows()]).0
                }
            });
        }
        let (p, axes) = join(predictions);
        let o = o.to_shape((o.shape()[0] * o.shape()[1], o.shape()[2])).unwrap().into_owned();
        assert_eq!(os.len(), a.shape()[0]);
        let judged = judge(dtype, &o, &p, &axes, true);
        let kernel = format!("HF {stage}");
        let (problem, contract) = (tag.to_owned(), table.to_owned());
        rows.push(Row { kernel, problem, contract, judged, lse: None, attention: false });
    }
    rows
}

fn print(rows: &[Row]) {
    let mut text = String::from(
        "| kernel | problem | contract | elements | flips | p0 | use of proven | use of statistical | beyond | lse: use | verdict |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for r in rows {
        let j = &r.judged;
        let lse = r.lse.map_or("-".into(), |u| format!("{u:.2}"));
        text += &format!(
            "| {} | {} | {} | {} | {:.5} | {:.4} | {:.2} | {:.2} | {} / {} | {lse} | {} {} |\n",
            r.kernel,
            r.problem,
            r.contract,
            j.elements,
            j.flips,
            j.p0,
            j.use_proven,
            j.use_statistical,
            j.beyond.0,
            j.beyond.1,
            r.verdict(),
            j.evidence.join(", "),
        );
    }
    println!("{text}\n{} outputs", rows.len());
    if let Some(path) = std::env::var_os("MLA_CHECK_TABLE") {
        std::fs::write(path, text).unwrap();
    }
}

fn all(d: &Dumps, scale: f64, change: Change, take: &dyn Fn(&str) -> bool) -> Vec<Row> {
    let mut rows = absorbed(d, scale, change, take);
    rows.extend(decompressed(d, scale, change, take));
    rows
}

/// How many outputs the file holds: all of them, or those of the repository.
fn expected() -> (usize, usize) {
    if std::env::var_os("MLA_CHECK_GPU_DUMPS").is_some() { (93, 37) } else { (7, 4) }
}

#[test]
fn no_real_kernel_is_at_fault() {
    let d = Dumps::read();
    let mut rows = all(&d, 1.0, &|c| c, &|_| true);
    let attention = rows.iter().filter(|r| r.attention).count();
    rows.extend(modules(&d));
    print(&rows);
    assert_eq!((attention, rows.len() - attention), expected());
    for r in &rows {
        let text = format!("{} on {}: {:?} {:?}", r.kernel, r.problem, r.judged.evidence, r.lse);
        assert!(["rounding", "exact"].contains(&r.verdict()), "{text}");
    }
}

/// A scale 3·10⁻⁴ off is found in every one, by whatever evidence.
#[test]
fn a_scale_slightly_off_is_a_fault() {
    let d = Dumps::read();
    let rows = all(&d, 1.0003, &|c| c, &|_| true);
    assert_eq!(rows.len(), expected().0);
    for r in &rows {
        assert_eq!(r.verdict(), "fault", "{} on {}", r.kernel, r.problem);
    }
}

/// Each declared rounding is needed: with another in its place a kernel is a fault.
#[test]
fn another_contract_is_a_fault() {
    let d = Dumps::read();
    let faults = |change: Change, kernels: &[&str]| {
        let rows = all(&d, 1.0, change, &|k| kernels.contains(&k));
        assert!(!rows.is_empty());
        rows.iter().filter(|r| r.verdict() == "fault").count()
    };
    let tile = |n: usize| {
        move |mut c: Contract| {
            c.softmax.tile = n;
            c
        }
    };
    let row_sum = |r: RowSum| {
        move |mut c: Contract| {
            c.softmax.row_sum = r;
            c
        }
    };
    assert!(faults(&tile(64), &["vllm_triton_s4"]) > 0, "tile of 64 for 32");
    assert!(faults(&tile(32), &["flashmla"]) > 0, "tile of 32 for 64");
    assert!(faults(&row_sum(RowSum::Unrounded), &["fi_mla_fa2"]) > 0, "row sum of uncast P");
    assert!(faults(&row_sum(RowSum::Rounded), &["flashmla", "vllm_triton_s4"]) > 0, "row sum of cast P");
    let partials = |c| Contract { partials: DType::F32, ..c };
    assert!(faults(&partials, &["fi_mla_fa2"]) > 0, "partials of 32 bits");
    let partials = |c| Contract { partials: DType::Bf16, ..c };
    assert!(faults(&partials, &["vllm_triton_s4"]) > 0, "partials of 16 bits");
    let pairs = |mut c: Contract| {
        c.softmax.pairs = false;
        c
    };
    if std::env::var_os("MLA_CHECK_GPU_DUMPS").is_some() {
        // Splits of the small problems hold one tile each.
        assert!(faults(&pairs, &["flashmla"]) > 0, "no pairs of tiles");
    }
    let order = |mut c: Contract| {
        c.softmax.order = TileOrder::Reverse;
        c
    };
    assert!(faults(&order, &["vllm_triton_s4"]) > 0, "last tile first");
}
