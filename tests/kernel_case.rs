/*!
`mla-check case` and `compare --case`, with a kernel of this test's own: attention by its definition, in float64, from the
arrays of the case. Right outputs are clean; a key that is dropped, a page that is another's, a scale that is off are not.
*/

mod common;

use common::fixture;
use mla_check::kernel_case::CaseFile;
use mla_check::trace::read::Dump;
use mla_numeric::DType;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const BATCH: &str = "0+3,70+2,66+1,0+1";

fn command(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mla-check")).args(args).stdin(Stdio::null()).output().unwrap()
}

fn write(dir: &Path, more: &[&str]) -> CaseFile {
    let model = fixture("models/glm5dims.Q4_K_M.gguf");
    let args = ["case", model.to_str().unwrap(), "--save", dir.to_str().unwrap(), "--batch", BATCH];
    let out = command(&[&args[..], more].concat());
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_str(&std::fs::read_to_string(dir.join("case.json")).unwrap()).unwrap()
}

/// Values of an array of the case.
fn load(dir: &Path, case: &CaseFile, name: &str) -> Vec<f64> {
    let array = &case.tensors[name];
    let read = Dump::open(&dir.join(&array.file)).unwrap();
    let bits = read.read(&read.entries()[0]).unwrap();
    assert_eq!(bits.shape, array.shape, "{name}");
    let Some(format) = array.format() else {
        return bits.integers().unwrap().into_iter().map(|v| v as f64).collect();
    };
    let mut values = vec![0.0; bits.len()];
    format.decode(&bits.bytes, &mut values);
    values
}

/// Writes an output in its dtype, as numpy.save would.
fn save(dir: &Path, case: &CaseFile, name: &str, values: &[f64]) {
    let array = &case.wanted[name];
    assert_eq!(values.len(), array.shape.iter().product::<usize>(), "{name}");
    let format = array.format().unwrap();
    let mut bytes = vec![0; values.len() * format.bytes()];
    format.encode_into(values, &mut bytes);
    let descr = if format == DType::F32 { "<f4" } else { "<u2" };
    let shape: Vec<String> = array.shape.iter().map(|n| format!("{n},")).collect();
    let mut head = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", shape.concat());
    head.extend(std::iter::repeat_n(' ', 63 - (10 + head.len()) % 64));
    head.push('\n');
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((head.len() as u16).to_le_bytes());
    file.extend(head.as_bytes());
    file.extend(bytes);
    std::fs::write(dir.join(&array.file), file).unwrap();
}

/// What a kernel may get wrong.
#[derive(Clone, Copy, Default)]
struct Wrong {
    drop_last: bool,
    swap_pages: bool,
    scale: f64,
}

/// softmax(scale · q·k) v of a query over keys, and lse.
fn attend(q: &[f64], keys: &[&[f64]], values: &[&[f64]], scale: f64) -> (Vec<f64>, f64) {
    let s: Vec<f64> =
        keys.iter().map(|k| scale * q.iter().zip(*k).map(|(a, b)| a * b).sum::<f64>()).collect();
    let most = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let p: Vec<f64> = s.iter().map(|s| (s - most).exp()).collect();
    let total: f64 = p.iter().sum();
    let column = |c: usize| p.iter().zip(values).map(|(p, v)| p * v[c]).sum::<f64>() / total;
    ((0..values[0].len()).map(column).collect(), most + total.ln())
}

/// Fills in the outputs of a case.
fn kernel(dir: &Path, case: &CaseFile, wrong: Wrong) {
    let g = |name: &str| case.geometry[name];
    let (heads, key, latent) = (g("heads"), g("nope") + g("rope"), g("latent"));
    let absorbed = case.tensors.contains_key("cache");
    let scale = case.scale * (1.0 + wrong.scale);
    let all: BTreeMap<&str, Vec<f64>> =
        case.tensors.keys().map(|n| (n.as_str(), load(dir, case, n))).collect();
    let (mut out, mut lse, mut up) = (Vec::new(), Vec::new(), Vec::new());
    let (mut row, mut first) = (0, 0);
    for (r, request) in case.requests.iter().enumerate() {
        let (context, new) = request.split_once('+').unwrap();
        let (context, new): (usize, usize) = (context.parse().unwrap(), new.parse().unwrap());
        for i in 0..new {
            let seen = context + i + 1 - usize::from(wrong.drop_last && context + i > 0);
            for h in 0..heads {
                if absorbed {
                    let (q, pe) = (&all["q_latent"], &all["q_pe"]);
                    let (cache, table) = (&all["cache"], &all["block_table"]);
                    let (size, width) = (case.page_size, latent + g("rope"));
                    let pages = case.tensors["block_table"].shape[1];
                    let slot = |p: usize| {
                        let mut page = p / size;
                        if wrong.swap_pages && context + new > size && page < 2 {
                            page = 1 - page;
                        }
                        table[r * pages + page] as usize * size + p % size
                    };
                    let keys: Vec<&[f64]> =
                        (0..seen).map(|p| &cache[slot(p) * width..(slot(p) + 1) * width]).collect();
                    let values: Vec<&[f64]> = keys.iter().map(|k| &k[..latent]).collect();
                    let at = (row + i) * heads + h;
                    let own: Vec<f64> = q[at * latent..(at + 1) * latent]
                        .iter()
                        .chain(&pe[at * g("rope")..(at + 1) * g("rope")])
                        .copied()
                        .collect();
                    let (o, l) = attend(&own, &keys, &values, scale);
                    let w = &all["w_uv"];
                    let o: Vec<f64> = o.into_iter().map(|v| DType::Bf16.round(v)).collect();
                    for v in 0..g("value") {
                        let w = &w[(h * g("value") + v) * latent..(h * g("value") + v + 1) * latent];
                        up.push(o.iter().zip(w).map(|(a, b)| a * b).sum());
                    }
                    out.extend(o);
                    lse.push(l);
                } else {
                    let [q, k, v] = ["q", "k", "v"].map(|n| &all[n]);
                    let of =
                        |p: usize, n: usize| ((first + p) * heads + h) * n..((first + p) * heads + h + 1) * n;
                    let at = (row + i) * heads + h;
                    let keys: Vec<&[f64]> = (0..seen).map(|p| &k[of(p, key)]).collect();
                    let values: Vec<&[f64]> = (0..seen).map(|p| &v[of(p, g("value"))]).collect();
                    let (o, l) = attend(&q[at * key..(at + 1) * key], &keys, &values, scale);
                    out.extend(o);
                    lse.push(l);
                }
            }
        }
        row += new;
        first += context + new;
    }
    if absorbed {
        save(dir, case, "o_latent", &out);
        save(dir, case, "attn_out", &up);
    } else {
        save(dir, case, "attn_out", &out);
    }
    save(dir, case, "lse", &lse);
}

/// Exit code and what was said.
fn compare(dir: &Path) -> (Option<i32>, String) {
    let out = command(&["compare", "--case", dir.to_str().unwrap()]);
    let text = [out.stdout, out.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()).concat();
    (out.status.code(), text)
}

#[test]
fn a_kernel_that_is_right_is_clean_and_one_that_is_not_is_found() {
    for form in ["absorbed", "fused"] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let case = write(dir, &["--form", form, "--regime", "random"]);
        assert!(dir.join("mla_case.py").is_file());
        let (exit, text) = compare(dir);
        assert!(exit == Some(2) && text.contains("no output is filled in"), "{text}");
        kernel(dir, &case, Wrong::default());
        let (exit, text) = compare(dir);
        assert_eq!(exit, Some(0), "{form}: {text}");
        let wrongs = [
            Wrong { drop_last: true, ..Wrong::default() },
            Wrong { scale: 3e-3, ..Wrong::default() },
            Wrong { swap_pages: form == "absorbed", drop_last: form == "fused", ..Wrong::default() },
        ];
        for wrong in wrongs {
            kernel(dir, &case, wrong);
            let (exit, text) = compare(dir);
            assert_eq!(exit, Some(1), "{form}: {text}");
        }
        // The outputs of another shape, and what is no case.
        std::fs::copy(dir.join("out/lse.npy"), dir.join("out/attn_out.npy")).unwrap();
        assert_eq!(compare(dir).0, Some(2));
        std::fs::write(dir.join("case.json"), "{}").unwrap();
        let (exit, text) = compare(dir);
        assert!(exit == Some(2) && text.contains("no case"), "{text}");
    }
}
