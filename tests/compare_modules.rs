/*!
Stages of transformers' attention modules through `compare` with no contract declared: norms cast before their weight,
rotations in 16 bits three times over, eager attention with its scores rounded twice, each found by the tool.

The repository holds 24 tokens of one module (fixtures/real/README.md). `MLA_CHECK_GPU_DUMPS=DIR` adds
DIR/modules.safetensors, whole modules with their weights; `--nocapture` prints what was found.
*/

#![allow(clippy::print_stdout)] // The table is what --nocapture is for.

mod common;

use common::fixture;
use common::small::with_weights;
use mla_check::compare::map::Map;
use mla_check::compare::{Options, judge, mapped};
use mla_check::judge::{Unit, Verdict};
use mla_check::trace::read::Dump;
use mla_numeric::DType;
use mla_reference::{Contract, Geometry, Pairing, Rope, Spec, Weight};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

/// A module: its name, nope and value widths.
type Module<'a> = (&'a str, usize, usize);

/// Judges what a map's lines name of a module, with the weights that the file holds.
fn judged(path: &Path, (tag, nope, value): Module, lines: &str, change: &dyn Fn(&mut Spec)) -> Vec<Unit> {
    let bytes = std::fs::read(path).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let values = |name: &str| -> Option<Vec<f64>> {
        let t = all.tensor(&format!("{tag}/{name}")).ok()?;
        let mut out = vec![0.0; t.data().len() / 2];
        DType::Bf16.decode(t.data(), &mut out);
        Some(out)
    };
    let numbers = |name: &str| -> Vec<f64> {
        let t = all.tensor(&format!("{tag}/{name}")).unwrap();
        t.data().chunks(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let g = Geometry { hidden: 512, heads: 4, q_rank: 256, latent: 512, rope: 64, nope, value };
    let mut spec = Spec {
        geometry: g,
        eps_attn: 1e-6,
        eps_latent: 1e-6,
        rope: Rope { inv_freq: numbers("inv_freq"), magnitude: 1.0, pairing: Pairing::Adjacent },
        scale: numbers("scale")[0],
        temperature: None,
    };
    change(&mut spec);
    let text = format!(
        "engine = {{ backend = 'transformers', version = '5.17.0' }}\nform = 'fused'\n{}",
        lines.replace("TAG", tag)
    );
    let map = Map::parse(&text, "map").unwrap_or_else(|e| panic!("{e}\n{text}"));
    let dump = Dump::open(path).unwrap();
    let weights = |memory: &mut common::small::Memory| {
        for (w, name) in [
            (Weight::WQA, "w_q_a"),
            (Weight::GQ, "g_q"),
            (Weight::WQB, "w_q_b"),
            (Weight::WKvA, "w_kv_a"),
            (Weight::GKv, "g_kv"),
            (Weight::WO, "w_o"),
        ] {
            if let Some(v) = values(name) {
                memory.0.insert(w, (v, w.matrix(&g).1));
            }
        }
        if let Some(kv_b) = values("kv_b") {
            let head = |h: usize| &kv_b[h * (nope + value) * 512..(h + 1) * (nope + value) * 512];
            let uk = (0..4).flat_map(|h| (0..512 * nope).map(move |i| head(h)[i % nope * 512 + i / nope]));
            memory.0.insert(Weight::WUk, (uk.collect(), nope));
            let uv = (0..4).flat_map(|h| head(h)[nope * 512..].to_vec());
            memory.0.insert(Weight::WUv, (uv.collect(), 512));
        }
    };
    with_weights(spec, weights, |layer| {
        let mut capture = mapped::capture(&dump, &map, &layer.spec, 0).unwrap_or_else(|e| panic!("{e}"));
        judge(layer, &mut capture, &Options::default(), Default::default(), &|_| ()).unwrap().0
    })
}

const BEFORE: &str = "
kv_a = 'TAG/kv_a'
kv_c_normed = 'TAG/kv_c_normed'
k_pe = { name = 'TAG/k_pe', pair_order = 'half' }
q = { name = 'TAG/q', axes = ['head', 'token', 'nope+rope'], pair_order = 'half' }
[tensors.q_raw]
parts = [
  { name = 'TAG/q_nope', axes = ['head', 'token', 'nope'] },
  { name = 'TAG/q_rope_before' },
]
";

const ATTENTION: &str = "
q = { name = 'TAG/Q', axes = ['head', 'token', 'nope+rope'], pair_order = 'half' }
k = { name = 'TAG/k', axes = ['head', 'key', 'nope+rope'], pair_order = 'half' }
v = { name = 'TAG/v', axes = ['head', 'key', 'value'] }
attn_out = 'TAG/OUT'
";

fn attention(requests: &str, q: &str, out: &str) -> String {
    let tensors = ATTENTION.replace("TAG/Q", &format!("TAG/{q}")).replace("TAG/OUT", &format!("TAG/{out}"));
    format!("requests = ['{requests}']\n[tensors]{tensors}")
}

fn unit<'u>(units: &'u [Unit], tensor: &str) -> &'u Unit {
    units.iter().find(|u| u.tensor == tensor).unwrap()
}

fn found(units: &[Unit], tensor: &str) -> Contract {
    let u = unit(units, tensor);
    let fine = matches!(u.verdict, Verdict::Exact | Verdict::Rounding);
    assert!(fine, "{}: {} {:?} {:?}", u.title(), u.verdict, u.evidence, u.note);
    let f = u.found_contract.as_ref().unwrap_or_else(|| panic!("{}: nothing found; {:?}", u.title(), u.note));
    println!("| {} | {} | {f} | alike: {:?} |", u.title(), u.verdict, f.alike);
    f.contract
}

fn all(path: &Path, module: Module, tokens: usize) {
    println!("{}", module.0);
    let units = judged(path, module, &format!("requests = ['0+{tokens}']\n[tensors]{BEFORE}"), &|_| ());
    assert_eq!(found(&units, "kv_c_normed").norm_cast, Some(DType::Bf16));
    for rotated in ["q", "k_pe"] {
        let c = found(&units, rotated);
        assert_eq!((c.rope_table, c.rope_products), (DType::Bf16, Some(DType::Bf16)), "{rotated}");
    }
    let c = found(
        &judged(path, module, &attention(&format!("0+{tokens}"), "q", "attn_out"), &|_| ()),
        "attn_out",
    );
    let s = c.softmax;
    assert!(s.cast_raw && s.cast_scaled && s.normalised && s.p == Some(DType::Bf16), "{c}");
}

#[test]
fn transformers_roundings_are_found() {
    let path = fixture("real/modules.safetensors");
    let module = ("v3", 128, 128);
    all(&path, module, 24);
    // What is wrong stays wrong: another eps, angles of the wrong base, a scale 0.3 % off.
    let before = format!("requests = ['0+24']\n[tensors]{BEFORE}");
    let units = judged(&path, module, &before, &|s| s.eps_latent = 1e-2);
    assert_eq!(unit(&units, "kv_c_normed").verdict, Verdict::Fault);
    // Nobody says from which table rotations are: of those that fit none there is no verdict.
    let units = judged(&path, module, &before, &|s| s.rope.inv_freq.iter_mut().for_each(|f| *f *= 1.01));
    assert_eq!(unit(&units, "q").verdict, Verdict::NotCompared);
    assert!(unit(&units, "q").found_contract.is_none() && unit(&units, "k_pe").given);
    let units = judged(&path, module, &attention("0+24", "q", "attn_out"), &|s| s.scale *= 1.003);
    assert_eq!(unit(&units, "attn_out").verdict, Verdict::Fault);
}

#[test]
fn whole_modules_are_no_fault() {
    let Some(dir) = std::env::var_os("MLA_CHECK_GPU_DUMPS").map(PathBuf::from) else { return };
    let path = dir.join("modules.safetensors");
    for module in [("v3", 128, 128), ("glm5", 192, 256)] {
        all(&path, module, 65);
        let whole = "
attn_in = 'TAG/attn_in'
q_a = 'TAG/q_a'
q_a_normed = 'TAG/q_a_normed'
k = { name = 'TAG/k', axes = ['head', 'key', 'nope+rope'], pair_order = 'half' }
v = { name = 'TAG/v', axes = ['head', 'key', 'value'] }
attn_out = 'TAG/attn_out'
out = 'TAG/out'
";
        let units = judged(&path, module, &format!("requests = ['0+65']\n[tensors]{whole}{BEFORE}"), &|_| ());
        for u in units.iter().filter(|u| u.elements > 0) {
            println!("| {} | {} | {} flips |", u.title(), u.verdict, u.flips);
            assert!(
                u.verdict <= Verdict::Rounding,
                "{}: {} {:?} {:?}",
                u.title(),
                u.verdict,
                u.evidence,
                u.note
            );
        }
        found(&judged(&path, module, &attention("64+1", "q_decode", "attn_out_decode"), &|_| ()), "attn_out");
    }
    let module = ("v3", 128, 128);
    found(&judged(&path, module, &attention("0+65", "q", "attn_out_sdpa"), &|_| ()), "attn_out");
}
