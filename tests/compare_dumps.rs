/*!
Real kernels' arrays through `compare`, without a model and with no contract declared: the tool finds it. Altered copies are
faults whatever it searches.

The repository holds a part of the outputs (fixtures/real/README.md). `MLA_CHECK_GPU_DUMPS=DIR` judges all of
DIR/real.safetensors, and `--nocapture` prints the table of what was found.
*/

#![allow(clippy::print_stdout)] // The table is what --nocapture is for.

mod common;

use common::fixture;
use mla_check::compare::map::Map;
use mla_check::compare::{Options, bare};
use mla_check::judge::{Unit, Verdict};
use mla_check::report::LayerReport;
use mla_check::trace::read::Dump;
use mla_numeric::DType;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// An array of bits.
#[derive(Clone)]
struct Bits {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Bits {
    /// Bytes of one index of the first axis.
    fn row(&self) -> usize {
        self.bytes.len() / self.shape[0]
    }
    /// Some indices of the first axis.
    fn take(&self, rows: &[usize]) -> Bits {
        let n = self.row();
        let bytes = rows.iter().flat_map(|r| self.bytes[r * n..(r + 1) * n].iter().copied()).collect();
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        Bits { dtype: self.dtype, shape, bytes }
    }
    fn numbers(&self) -> Vec<f64> {
        let all = self.bytes.chunks(8).map(|b| <[u8; 8]>::try_from(b).unwrap());
        all.map(
            |b| if self.dtype == Dtype::I64 { i64::from_le_bytes(b) as f64 } else { f64::from_le_bytes(b) },
        )
        .collect()
    }
    fn number_format(&self) -> DType {
        if self.dtype == Dtype::F16 { DType::F16 } else { DType::Bf16 }
    }
}

/// What one kernel was given and gave back.
#[derive(Clone)]
struct Output {
    problem: String,
    kernel: String,
    absorbed: bool,
    scale: f64,
    /// Keys and new tokens of each request.
    requests: Vec<(usize, usize)>,
    arrays: BTreeMap<&'static str, Bits>,
}

fn file() -> PathBuf {
    match std::env::var_os("MLA_CHECK_GPU_DUMPS") {
        Some(dir) => PathBuf::from(dir).join("real.safetensors"),
        None => fixture("real/real.safetensors"),
    }
}

fn outputs() -> Vec<Output> {
    let bytes = std::fs::read(file()).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let get = |name: &str| {
        let t = all.tensor(name).ok()?;
        Some(Bits { dtype: t.dtype(), shape: t.shape().to_vec(), bytes: t.data().to_vec() })
    };
    let mut names: Vec<String> =
        all.names().iter().filter(|n| n.ends_with("/out")).map(|n| n.to_string()).collect();
    names.sort();
    let mut found = Vec::new();
    for name in names {
        let parts: Vec<&str> = name.split('/').collect();
        let [form, problem, kernel, _] = parts.as_slice() else { continue };
        let at = format!("{form}/{problem}");
        let of = |n: &str| get(&format!("{at}/{n}"));
        let scale = of("scale").unwrap().numbers()[0];
        let mut arrays = BTreeMap::from([("out", of(&format!("{kernel}/out")).unwrap())]);
        if let Some(lse) = of(&format!("{kernel}/lse")) {
            arrays.insert("lse", lse);
        }
        let absorbed = *form == "absorbed";
        let requests = if absorbed {
            arrays.insert("q", of("q").unwrap());
            arrays.insert("kv", of("kv").unwrap());
            let [keys, new] = ["lens", "q_lens"].map(|n| of(n).unwrap().numbers());
            keys.iter().zip(&new).map(|(k, n)| (*k as usize, *n as usize)).collect()
        } else {
            // Rows that were kept, in runs of following ones; each run has keys of its own.
            let visible: Vec<usize> = of("visible").unwrap().numbers().iter().map(|v| *v as usize).collect();
            let mut runs: Vec<(usize, usize)> = Vec::new();
            for v in visible {
                match runs.last_mut() {
                    Some((keys, new)) if *keys + 1 == v => (*keys, *new) = (v, *new + 1),
                    _ => runs.push((v, 1)),
                }
            }
            let rows: Vec<usize> = runs.iter().flat_map(|(keys, _)| 0..*keys).collect();
            arrays.insert("q", of("q").unwrap());
            arrays.insert("k", of("k").unwrap().take(&rows));
            arrays.insert("v", of("v").unwrap().take(&rows));
            runs
        };
        let (problem, kernel) = (problem.to_string(), kernel.to_string());
        found.push(Output { problem, kernel, absorbed, scale, requests, arrays });
    }
    found
}

impl Output {
    /// The map: no contract; the base of the lse, which no bits of an output say.
    fn map(&self) -> String {
        let base = if self.kernel.starts_with("fi_") { "two" } else { "e" };
        let requests: Vec<String> =
            self.requests.iter().map(|(keys, new)| format!("\"{}+{new}\"", keys - new)).collect();
        let q = &self.arrays["q"];
        let mut map = format!(
            "engine = {{ backend = \"kernel\", version = \"1\" }}\nrequests = [{}]\nlse = {{ base = \"{base}\" }}\n\
             form = \"{}\"\n[geometry]\nheads = {}\nscale = {:e}\nrope = 64\n",
            requests.join(", "),
            if self.absorbed { "absorbed" } else { "fused" },
            q.shape[1],
            self.scale,
        );
        if self.absorbed {
            map += "latent = 512\n[tensors]\n\
                 q_latent = { name = 'q', axes = ['token', 'head', 'latent+rope'], slice = { 'latent+rope' = [0, 512] } }\n\
                 q_pe = { name = 'q', axes = ['token', 'head', 'latent+rope'], slice = { 'latent+rope' = [512, 576] } }\n\
                 cache = 'kv'\no_latent = 'out'\n";
        } else {
            let (nope, value) = (q.shape[2] - 64, self.arrays["v"].shape[2]);
            map += &format!(
                "nope = {nope}\nvalue = {value}\n[tensors]\nq = 'q'\nk = 'k'\nv = 'v'\nattn_out = 'out'\n"
            );
        }
        if self.arrays.contains_key("lse") {
            map += "lse = 'lse'\n";
        }
        map
    }

    fn judge(&self) -> LayerReport {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dump.safetensors");
        let views = self
            .arrays
            .iter()
            .map(|(n, b)| (*n, TensorView::new(b.dtype, b.shape.clone(), &b.bytes).unwrap()));
        std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        compared(&path, &self.map()).unwrap_or_else(|e| panic!("{} {}: {e}", self.problem, self.kernel))
    }

    fn output(&self) -> &'static str {
        if self.absorbed { "o_latent" } else { "attn_out" }
    }

    /// The output's bits changed element by element.
    fn scaled(&self, by: f64) -> Output {
        let mut other = self.clone();
        let out = other.arrays.get_mut("out").unwrap();
        let d = out.number_format();
        let mut values = vec![0.0; out.bytes.len() / 2];
        d.decode(&out.bytes, &mut values);
        values.iter_mut().for_each(|v| *v = d.round(*v * by));
        d.encode_into(&values, &mut out.bytes);
        other
    }

    /// What an engine that is wrong would have dumped, or would have been judged from.
    fn altered(&self) -> Vec<(&'static str, Output)> {
        let mut all = vec![
            ("scale of 1.003", Output { scale: self.scale * 1.003, ..self.clone() }),
            ("gain of 1.003", self.scaled(1.003)),
        ];
        let heads = self.arrays["out"].shape[1];
        if heads > 1 {
            let mut other = self.clone();
            let out = other.arrays.get_mut("out").unwrap();
            let (row, one) = (out.row(), out.row() / heads);
            out.bytes.chunks_mut(row).for_each(|r| r[..2 * one].rotate_left(one));
            all.push(("two heads swapped", other));
        }
        let keys: Vec<&'static str> = if self.absorbed { vec!["kv"] } else { vec!["k", "v"] };
        // The longest request's second page reads the first; of one page, each row the one before it.
        let (at, _) = self.requests.iter().enumerate().max_by_key(|(_, r)| r.0).unwrap();
        let first: usize = self.requests[..at].iter().map(|r| r.0).sum();
        let n = self.requests[at].0;
        let mut other = self.clone();
        for name in &keys {
            let b = other.arrays.get_mut(name).unwrap();
            let order: Vec<usize> = (0..b.shape[0])
                .map(|r| match r.checked_sub(first).filter(|i| *i < n) {
                    Some(i) if n > 64 && (64..128).contains(&i) => r - 64,
                    Some(i) if n <= 64 => r - i.min(1),
                    _ => r,
                })
                .collect();
            *b = b.take(&order);
        }
        all.push(("a page shifted", other));
        // One key less in every request that has two.
        let mut other = self.clone();
        let mut rows = Vec::new();
        let mut start = 0;
        for (keys, new) in &mut other.requests {
            let all = *keys;
            *keys -= usize::from(*keys > *new);
            rows.extend(start..start + *keys);
            start += all;
        }
        if rows.len() < start {
            for name in &keys {
                let b = other.arrays.get_mut(name).unwrap();
                *b = b.take(&rows);
            }
            all.push(("the last token dropped", other));
        }
        all
    }
}

fn compared(dump: &Path, map: &str) -> Result<LayerReport, String> {
    let map = Map::parse(map, "map").map_err(|e| e.to_string())?;
    let dump = Dump::open(dump).map_err(|e| e.to_string())?;
    let (spec, capture) = bare::capture(&dump, &map, 0).map_err(|e| e.to_string())?;
    bare::layer(spec, 0, capture, &Options::default(), &|_| ()).map_err(|e| e.to_string())
}

fn units<'r>(r: &'r LayerReport, tensor: &str) -> Vec<&'r Unit> {
    r.tensors.iter().filter(|u| u.tensor == tensor && u.elements > 0).collect()
}

/// The contract that the dumps' README documents, as a search names it.
fn documented(kernel: &str, wide: bool) -> String {
    let d = if wide { "d256" } else { "d192" };
    match kernel {
        k if k.starts_with("vllm_triton") => "vllm-triton-decode".into(),
        k if k.starts_with("sgl_triton") => "sglang-triton-decode".into(),
        k if k.starts_with("fa3_mla") => "fa3-mla-decode".into(),
        "flashmla" => "flashmla-decode".into(),
        "fi_mla_fa2" => "flashinfer-mla-fa2,".into(),
        "fi_mla_fa3" => "flashinfer-mla-fa3,".into(),
        "fi_mla_fa2_99k" => "flashinfer-mla-fa2-100kb".into(),
        "fi_ragged_fa2" => format!("flashinfer-ragged-fa2-{d}"),
        "fi_ragged_fa3" => format!("flashinfer-ragged-fa3-{d}"),
        "vllm_fa3" => format!("fa3-prefill-{d}"),
        k if k.starts_with("sdpa_flash") => "sdpa-flash".into(),
        other => other.replace('_', "-"),
    }
}

fn line(u: &Unit, o: &Output) -> (String, bool) {
    let wide = o.problem.starts_with("d256");
    let (found, right) = match &u.found_contract {
        None => (format!("none ({})", u.note.clone().unwrap_or_default()), false),
        Some(f) => {
            let wanted = documented(&o.kernel, wide);
            let right = f.name.starts_with(&wanted) || f.alike.iter().any(|n| n.starts_with(&wanted));
            let runner =
                f.runner_up.as_ref().map_or(String::new(), |(n, s)| format!("; next {n} {:.2} %", 100.0 * s));
            let (before, after) = (100.0 * f.flips_before, 100.0 * f.flips);
            (
                format!(
                    "{} [{} alike], {} tried, {before:.2} % → {after:.3} %{runner}",
                    f.name,
                    f.alike.len(),
                    f.tried
                ),
                right,
            )
        }
    };
    let mark = if right { "as documented" } else { "NOT AS DOCUMENTED" };
    (
        format!(
            "| {} | {} | {}, {} | {} | {found} | {mark} |",
            o.problem,
            o.kernel,
            u.title(),
            u.flips,
            u.verdict
        ),
        right,
    )
}

/// Every output is `rounding` or `exact` under a contract that the search found, and it is the documented one.
#[test]
fn contracts_are_found() {
    let only = std::env::var("MLA_CHECK_ONLY").unwrap_or_default();
    let all: Vec<Output> =
        outputs().into_iter().filter(|o| format!("{}/{}", o.problem, o.kernel).contains(&only)).collect();
    let (mut right, mut bad) = (0, Vec::new());
    for o in &all {
        let report = o.judge();
        let mut as_documented = true;
        for u in units(&report, o.output()) {
            let (text, is) = line(u, o);
            println!("{text} {:.1} s", report.seconds);
            as_documented &= is;
        }
        for u in units(&report, "lse") {
            println!(
                "|  |  | {} | {} | {:?} |",
                u.title(),
                u.verdict,
                u.found_contract.as_ref().map(|f| &f.name)
            );
        }
        right += usize::from(as_documented);
        for u in report.tensors.iter().filter(|u| u.elements > 0) {
            if !matches!(u.verdict, Verdict::Exact | Verdict::Rounding) {
                bad.push(format!(
                    "{} {} {}: {} {:?} {:?}",
                    o.problem,
                    o.kernel,
                    u.title(),
                    u.verdict,
                    u.evidence,
                    u.note
                ));
            }
        }
    }
    println!("{right} of {} as documented", all.len());
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    assert!(right == all.len(), "{right} of {}", all.len());
}

/// A search explains no fault away.
#[test]
fn altered_copies_are_faults() {
    let only = std::env::var("MLA_CHECK_ONLY").unwrap_or_default();
    let mut missed = Vec::new();
    let mut n = 0;
    let all: Vec<Output> =
        outputs().into_iter().filter(|o| format!("{}/{}", o.problem, o.kernel).contains(&only)).collect();
    for o in all.iter().step_by(3) {
        for (what, other) in o.altered() {
            let report = other.judge();
            n += 1;
            let verdicts: Vec<Verdict> = units(&report, o.output()).iter().map(|u| u.verdict).collect();
            let fault = verdicts.contains(&Verdict::Fault);
            if !fault {
                let u = units(&report, o.output())[0];
                missed.push(format!(
                    "{} {}: {what}: {verdicts:?} {:?} {:?}",
                    o.problem, o.kernel, u.explained, u.note
                ));
            }
            println!("| {} | {} | {what} | {verdicts:?} | {:.1} s |", o.problem, o.kernel, report.seconds);
        }
    }
    println!("{} of {n} caught", n - missed.len());
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// The command itself, without a model: what was found stands before all tables, and what only a model says is refused.
#[test]
fn the_command_needs_no_model() {
    let dir = tempfile::tempdir().unwrap();
    let o = outputs().into_iter().find(|o| o.kernel == "flashmla" && o.problem == "a16_unit").unwrap();
    let views =
        o.arrays.iter().map(|(n, b)| (*n, TensorView::new(b.dtype, b.shape.clone(), &b.bytes).unwrap()));
    let (dump, map) = (dir.path().join("dump.safetensors"), dir.path().join("map.toml"));
    std::fs::write(&dump, safetensors::serialize(views, None).unwrap()).unwrap();
    let run = |text: &str| {
        std::fs::write(&map, text).unwrap();
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_mla-check"));
        let out = command.arg("compare").arg(&dump).arg("--map").arg(&map).output().unwrap();
        let text = |b: &[u8]| String::from_utf8_lossy(b).to_string();
        (out.status.code(), text(&out.stdout), text(&out.stderr))
    };
    let (code, out, err) = run(&o.map());
    assert_eq!(code, Some(0), "{out}{err}");
    let first: Vec<&str> = out.lines().take(2).collect();
    assert_eq!(first[0], "engine kernel 1, no model, contract none: rounding");
    assert!(
        first[1].starts_with("contract found: absorbed/o_latent, decode: flashmla-decode, splits of 64"),
        "{out}"
    );
    assert!(out.contains("they need a model"), "{out}");
    for (from, to, words) in [
        ("latent = 512\n", "", "does not say latent"),
        ("rope = 64\n", "rope = 64.5\n", "rope = 64.5 is no width"),
        ("rope = 64\n", "rope = 64\nhidden = 7168\n", "hidden"),
        ("o_latent = 'out'", "o_latent = 'out'\nkv_a = 'kv'", "kv_a needs a model"),
        ("o_latent = 'out'", "attn_out = 'out'", "needs w_uv"),
    ] {
        assert!(o.map().contains(from), "{from}");
        let (code, _, err) = run(&o.map().replace(from, to));
        assert_eq!(code, Some(2), "{words}: {err}");
        assert!(err.contains(words) && err.contains("do: "), "{words}: {err}");
    }
}

/// An lse in base 2 is judged as one of base e is: not only its size, and not against the wrong base.
#[test]
fn an_lse_in_base_two_is_judged() {
    let all: Vec<Output> = outputs();
    for kernel in ["fi_ragged_fa3", "fi_mla_fa2"] {
        let o = all.iter().find(|o| o.kernel == kernel && o.arrays.contains_key("lse")).unwrap();
        let verdicts = |o: &Output, base: &str| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("dump.safetensors");
            let views = o
                .arrays
                .iter()
                .map(|(n, b)| (*n, TensorView::new(b.dtype, b.shape.clone(), &b.bytes).unwrap()));
            std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
            let map = o.map().replace("base = \"two\"", &format!("base = \"{base}\""));
            let report = compared(&path, &map).unwrap();
            let of = |t| units(&report, t).iter().map(|u| u.verdict).collect::<Vec<_>>();
            (of("lse"), of(o.output()))
        };
        assert_eq!(verdicts(o, "two"), (vec![Verdict::Rounding], vec![Verdict::Rounding]), "{kernel}");
        assert_eq!(verdicts(o, "e").0, [Verdict::Fault], "{kernel}, as if of base e");
        // Ten times what the row sum of cast P may move it by (2⁻⁹), a hundred times what float32 does.
        let mut other = o.clone();
        let lse = other.arrays.get_mut("lse").unwrap();
        for b in lse.bytes.chunks_mut(4) {
            let v = f32::from_le_bytes(b.try_into().unwrap());
            b.copy_from_slice(&(v + 0.02).to_le_bytes());
        }
        assert_eq!(
            verdicts(&other, "two"),
            (vec![Verdict::Fault], vec![Verdict::Rounding]),
            "{kernel}, moved"
        );
    }
}
