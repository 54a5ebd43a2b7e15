/*!
Other software's arrays through `compare`'s own path: a map, a dump, a session. Real kernels on an NVIDIA H200
(fixtures/real/README.md); the layer around them has weights of no meaning, since nothing before q_latent or k is there.
*/

mod common;

use common::fixture;
use common::small::with_layer;
use mla_check::compare::map::Map;
use mla_check::compare::{Options, judge, mapped};
use mla_check::judge::{Unit, Verdict, overall};
use mla_check::trace::read::Dump;
use mla_reference::{Geometry, Pairing, Rope, Spec};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::path::Path;

/// A layer of these kernels' widths; what is not theirs is small.
fn spec(heads: usize, nope: usize, value: usize, scale: f64) -> Spec {
    Spec {
        geometry: Geometry { hidden: 16, heads, q_rank: 0, latent: 512, rope: 64, nope, value },
        eps_attn: 1e-6,
        eps_latent: 1e-6,
        rope: Rope { inv_freq: vec![1.0; 32], magnitude: 1.0, pairing: Pairing::Adjacent },
        scale,
        temperature: None,
    }
}

fn judged(spec: Spec, map: &str) -> Vec<Unit> {
    judged_of(&fixture("real/real.safetensors"), spec, map)
}

fn judged_of(dump: &Path, spec: Spec, map: &str) -> Vec<Unit> {
    let map = Map::parse(map, "map").unwrap_or_else(|e| panic!("{e}"));
    let dump = Dump::open(dump).unwrap();
    with_layer(spec, |layer| {
        let mut capture = mapped::capture(&dump, &map, &layer.spec, 0).unwrap_or_else(|e| panic!("{e}"));
        judge(layer, &mut capture, &Options::default(), Default::default(), &|_| ()).unwrap().0
    })
}

fn named<'u>(units: &'u [Unit], tensor: &str) -> Vec<&'u Unit> {
    units.iter().filter(|u| u.tensor == tensor).collect()
}

/// Decode of five requests by one kernel; `more`: lines of the map before its tensors.
fn absorbed(kernel: &str, more: &str, cache: &str) -> Vec<Unit> {
    let at = "absorbed/a16_unit";
    let map = format!(
        r#"
engine = {{ backend = "kernel", version = "1" }}
lengths = {{ keys = "{at}/lens", new = "{at}/q_lens" }}
{more}
[tensors]
q_latent = {{ name = "{at}/q", axes = ["token", "head", "latent+rope"], slice = {{ "latent+rope" = [0, 512] }} }}
q_pe = {{ name = "{at}/q", axes = ["token", "head", "latent+rope"], slice = {{ "latent+rope" = [512, 576] }} }}
cache = {{ name = "{at}/kv" {cache} }}
o_latent = "{at}/{kernel}/out"
lse = "{at}/{kernel}/lse"
"#
    );
    judged(spec(16, 16, 8, 192f64.powf(-0.5)), &map)
}

/// Chunked prefill of one request by one kernel.
fn fused(kernel: &str, more: &str, lse: bool) -> Vec<Unit> {
    let at = "decompressed/d192_chunk";
    let lse = if lse { format!("lse = \"{at}/{kernel}/lse\"") } else { String::new() };
    let map = format!(
        r#"
engine = {{ backend = "kernel", version = "1" }}
requests = ["135+65"]
form = "fused"
{more}
[tensors]
q = "{at}/q"
k = "{at}/k"
v = "{at}/v"
attn_out = "{at}/{kernel}/out"
{lse}
"#
    );
    judged(spec(1, 128, 128, 192f64.powf(-0.5)), &map)
}

fn clean(units: &[Unit], tensor: &str, what: &str) {
    for u in named(units, tensor) {
        let fine = matches!(u.verdict, Verdict::Exact | Verdict::Rounding) || u.verdict.differs();
        assert!(fine && u.elements > 0, "{what} {}: {} {:?} {:?}", u.title(), u.verdict, u.evidence, u.note);
    }
    assert!(!named(units, tensor).is_empty());
    assert!(overall(units) < Verdict::NotCompared, "{what}: {}", overall(units));
}

#[test]
fn kernels_that_decode_are_no_fault() {
    for (kernel, contract, lse) in [
        ("vllm_triton_s4", "contract = 'vllm-triton-decode'", "e"),
        ("vllm_triton_s4", "contract = 'none'", "e"),
        ("flashmla", "contract = 'none'", "e"),
        ("flashmla", "contract = 'flashmla-decode'", "e"),
        ("fi_mla_fa2", "contract = 'none'", "two"),
        ("fi_mla_fa2", "contract = 'flashinfer-mla-fa2'", "two"),
    ] {
        let units = absorbed(kernel, &format!("{contract}\nlse = {{ base = '{lse}' }}"), "");
        clean(&units, "o_latent", &format!("{kernel}, {contract}"));
        if lse == "e" {
            clean(&units, "lse", &format!("{kernel}, {contract}"));
        }
        for given in ["q", "q_latent", "cache"] {
            assert!(named(&units, given).iter().all(|u| u.given), "{given}");
        }
    }
}

#[test]
fn kernels_that_prefill_are_no_fault() {
    for (kernel, contract) in [
        ("fi_ragged_fa3", "flashinfer-ragged-fa3-d192"),
        ("vllm_fa3", "fa3-prefill-d192"),
        ("sdpa_efficient", "sdpa-efficient"),
        ("fi_ragged_fa2", "flashinfer-ragged-fa2-d192"),
    ] {
        for contract in [contract, "none"] {
            let base = if kernel.starts_with("fi_") { "two" } else { "e" };
            let more = format!("contract = '{contract}'\nlse = {{ base = '{base}' }}");
            let units = fused(kernel, &more, kernel == "vllm_fa3");
            clean(&units, "attn_out", &format!("{kernel}, {contract}"));
        }
    }
}

/// The same decode steps from a paged cache: in shuffled pages with a block table, and what goes wrong with it.
#[test]
fn pages_lengths_scales_and_heads_that_are_wrong_are_faults() {
    const LENS: [usize; 5] = [1, 17, 64, 65, 130];
    let file = std::fs::read(fixture("real/real.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let of = |name: &str| file.tensor(&format!("absorbed/a16_unit/{name}")).unwrap().data().to_vec();
    let (q, kv, out) = (of("q"), of("kv"), of("vllm_triton_s4/out"));
    // Request i, page j lies in page (3 i + j) · 7 mod 16; what nobody owns is 1.0.
    let (page, width) = (64, 576 * 2);
    let at = |i: usize, j: usize| (3 * i + j) * 7 % 16;
    let mut pool = [0x80u8, 0x3f].repeat(16 * page * 576);
    let mut first = 0;
    for (i, n) in LENS.into_iter().enumerate() {
        for p in 0..n {
            let slot = at(i, p / page) * page + p % page;
            pool[slot * width..(slot + 1) * width]
                .copy_from_slice(&kv[(first + p) * width..(first + p + 1) * width]);
        }
        first += n;
    }
    let table = |shift: usize| -> Vec<u8> {
        let entry = |k: usize| if k == 12 { at(4, (k + shift) % 3) } else { at(k / 3, k % 3) };
        (0..15).flat_map(|k| (entry(k) as i32).to_le_bytes()).collect()
    };
    let (right, wrong) = (table(0), table(1));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("paged.safetensors");
    let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).unwrap();
    let mut swapped = out.clone();
    swapped.chunks_exact_mut(16 * 1024).for_each(|row| row[..2048].rotate_left(1024));
    let arrays = [
        ("q", view(Dtype::BF16, &[5, 16, 576], &q)),
        ("pool", view(Dtype::BF16, &[16, 64, 1, 576], &pool)),
        ("out", view(Dtype::BF16, &[5, 1, 8192], &out)),
        ("swapped", view(Dtype::BF16, &[5, 16, 512], &swapped)),
        ("table", view(Dtype::I32, &[5, 3], &right)),
        ("wrong", view(Dtype::I32, &[5, 3], &wrong)),
    ];
    std::fs::write(&path, safetensors::serialize(arrays, None).unwrap()).unwrap();
    let whole = r#"["0+1", "16+1", "63+1", "64+1", "129+1"]"#;
    let short = r#"["0+1", "15+1", "62+1", "63+1", "128+1"]"#;
    let run = |requests: &str, out: &str, table: &str, factor: f64| {
        let map = format!(
            r#"
engine = {{ backend = "kernel", version = "1" }}
requests = {requests}
contract = "vllm-triton-decode"
[tensors]
q_latent = {{ name = "q", axes = ["token", "head", "latent+rope"], slice = {{ "latent+rope" = [0, 512] }} }}
q_pe = {{ name = "q", axes = ["token", "head", "latent+rope"], slice = {{ "latent+rope" = [512, 576] }} }}
cache = {{ name = "pool", axes = ["page", "slot", "1", "latent+rope"], block_table = "{table}" }}
o_latent = "{out}"
"#
        );
        judged_of(&path, spec(16, 16, 8, factor * 192f64.powf(-0.5)), &map)
    };
    clean(&run(whole, "out", "table", 1.0), "o_latent", "paged");
    for (what, units) in [
        ("a foreign page", run(whole, "out", "wrong", 1.0)),
        ("the last token dropped", run(short, "out", "table", 1.0)),
        ("two heads swapped", run(whole, "swapped", "table", 1.0)),
        ("a scale 0.3 % off", run(whole, "out", "table", 1.003)),
    ] {
        let verdicts: Vec<Verdict> = named(&units, "o_latent").iter().map(|u| u.verdict).collect();
        assert_eq!(verdicts, [Verdict::Fault], "{what}");
        assert_eq!(overall(&units), Verdict::Fault, "{what}");
    }
}
