/*!
`inspect --against`: files that other software made from a checkpoint fit it; planted mistakes of converters are found and named.

`fixtures/checkpoints/dsv3.mixed.gguf` was quantised by the Python package `gguf`. Mistakes are planted in its bytes (rows are whole
blocks, so that rows can be moved), or in files that are written here from a checkpoint's values: those hold what a right converter
would write, but for the mistake.
*/

mod common;

use common::fixture;
use mla_check::against::{Outcome, Report, TensorReport, against};
use mla_check::gguf::Gguf;
use mla_check::gguf::write::Writer;
use mla_check::model::Model;
use mla_reference::rows::dense;
use mla_reference::{Geometry, GgmlType, Weight};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIXED: &str = "checkpoints/dsv3.mixed.gguf";
const BF16: &str = "checkpoints/dsv3.bf16";

fn compare(file: &Path, original: &Path) -> Report {
    let (file, original) = (Model::open(file).unwrap(), Model::open(original).unwrap());
    let layers = file.mla_layers();
    against(&file, &original, &layers, &|_| ()).unwrap_or_else(|e| panic!("{e}"))
}

fn find<'a>(report: &'a Report, name: &str) -> &'a TensorReport {
    report.tensors().find(|t| t.tensor.contains(&format!("{name}.weight"))).unwrap()
}

/// Exactly these tensors differ, and what is said of the first holds a text.
fn named(report: &Report, tensors: &[&str], wanted: &str) {
    let differ: Vec<&str> =
        report.tensors().filter(|t| t.outcome == Outcome::Differs).map(|t| t.tensor.as_str()).collect();
    let expected: Vec<String> = tensors.iter().map(|t| format!("blk.0.{t}.weight")).collect();
    assert_eq!(differ, expected, "{wanted}");
    for t in tensors {
        let cause = &find(report, t).cause;
        assert!(cause.contains(wanted), "{t}: {cause:?} has no {wanted:?}");
    }
    assert_eq!(report.exit(), 1);
}

/// Types without steps: NVFP4's tensor scale lost, inverted, or only near.
#[test]
fn another_size_of_a_codebook_type_is_found() {
    use mla_check::against::allowed::{Allowed, allowed};
    use mla_check::against::fit::fit;
    use mla_reference::product::Dense;
    let x: Vec<f64> =
        (0..8 * 512u32).map(|i| f64::from(i.wrapping_mul(2_654_435_761) >> 8) / 8_388_608.0 - 1.0).collect();
    // Ternary, by the largest value of 256, as TQ1_0's quantiser does; and any codebook's values at other sizes.
    let ternary = |x: &[f64]| -> Vec<f64> {
        x.chunks(256)
            .flat_map(|c| {
                let d = c.iter().fold(0.0f64, |m, v| m.max(v.abs()));
                c.iter().map(move |v| d * (v / d).round())
            })
            .collect()
    };
    let of = |y: &[f64]| {
        fit(&Dense { data: y, cols: 512 }, &Dense { data: &x, cols: 512 }, allowed(GgmlType::TQ1_0), true, 1)
    };
    assert_eq!(allowed(GgmlType::NVFP4), Allowed::Nearer(256));
    assert!(of(&ternary(&x)).fits(), "{:?}", of(&ternary(&x)));
    for (by, fits) in
        [(1.0, true), (1.2, true), (1.0 / 1.2, true), (2.0, false), (0.5, false), (1e-3, false), (0.0, false)]
    {
        let y: Vec<f64> = x.iter().map(|v| v * by).collect();
        let found = of(&y);
        assert_eq!((found.fits(), found.other_size), (fits, !fits), "{by}: {found:?}");
    }
}

#[test]
fn a_right_file_fits() {
    let report = compare(&fixture(MIXED), &fixture(BF16));
    assert_eq!((report.exit(), report.count(Outcome::Fits)), (0, 9));
    assert!(report.scalars.is_empty());
    assert_eq!(report.only_file.attention.len() + report.only_original.attention.len(), 0);
    // Rounding to 4 bits is off by 1/√12 of a step, the step is 1/8 of the largest of 32 Gaussian values (2.1 σ): 8 %.
    let q4 = find(&report, "attn_q_b").fit.as_ref().unwrap().relative;
    assert!((0.07..0.1).contains(&q4), "{q4}");
    for exact in ["attn_output", "attn_norm", "attn_q_a_norm", "attn_kv_a_norm"] {
        assert_eq!(find(&report, exact).fit.as_ref().unwrap().relative, 0.0, "{exact}");
    }
}

/// A copy of the file with the bytes of a tensor altered.
fn altered(dir: &Path, tensor: &str, alter: impl Fn(&mut [u8])) -> PathBuf {
    let source = fixture(MIXED);
    let gguf = Gguf::open(&source).unwrap();
    let info = gguf.tensor(&format!("blk.0.{tensor}.weight")).unwrap();
    let (at, size) = (info.offset as usize, info.size.unwrap() as usize);
    let mut bytes = std::fs::read(&source).unwrap();
    alter(&mut bytes[at..at + size]);
    let path = dir.join("altered.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Rows of so many bytes in another order.
fn rows(bytes: &mut [u8], n: usize, order: impl Fn(usize) -> usize) {
    let width = bytes.len() / n;
    let before = bytes.to_vec();
    for (r, row) in bytes.chunks_mut(width).enumerate() {
        let from = order(r) * width;
        row.copy_from_slice(&before[from..from + width]);
    }
}

/// Even rope rows first.
fn halves(i: usize) -> usize {
    if i < 32 { 2 * i } else { 2 * (i - 32) + 1 }
}

#[test]
fn rows_in_another_order_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let check = |tensor: &str, n: usize, order: &dyn Fn(usize) -> usize, wanted: &str| {
        let path = altered(dir.path(), tensor, |b| rows(b, n, order));
        named(&compare(&path, &fixture(BF16)), &[tensor], wanted);
    };
    let swapped = |group: usize| move |r: usize| (r + group) % (2 * group);
    check("attn_q_b", 384, &swapped(192), "heads are permuted: 0 is 1, 1 is 0 of the original");
    check("attn_k_b", 1024, &swapped(512), "heads are permuted");
    check("attn_v_b", 256, &swapped(128), "heads are permuted");
    let query = |r: usize| r / 192 * 192 + if r % 192 < 128 { r % 192 } else { 128 + halves(r % 192 - 128) };
    check("attn_q_b", 384, &query, "half-split order");
    check("attn_kv_a_mqa", 576, &|r| if r < 512 { r } else { 512 + halves(r - 512) }, "half-split order");
    check("attn_kv_a_mqa", 576, &|r| (r + 512) % 576, "rope rows come first");
    check("attn_q_a", 256, &|r| r ^ 1, "rows are in another order: ");
}

#[test]
fn one_damaged_block_is_found_and_placed() {
    let dir = tempfile::tempdir().unwrap();
    // Row 300 of kv_a, block 5: Q5_1 has 24 bytes of 32 values; its scale, times 256.
    let at = (300 * 8 + 5) * 24;
    let path = altered(dir.path(), "attn_kv_a_mqa", |b| b[at + 1] ^= 0x20);
    let report = compare(&path, &fixture(BF16));
    named(&report, &["attn_kv_a_mqa"], "");
    let fit = find(&report, "attn_kv_a_mqa").fit.clone().unwrap();
    assert_eq!((fit.beyond, fit.rows_beyond), (1, 1));
    let worst = fit.worst.unwrap();
    assert_eq!((worst.row, worst.col, worst.len), (300, 160, 32));
    // One bit of one value that was stored exactly.
    let path = altered(dir.path(), "attn_output", |b| b[2 * (17 * 256 + 40)] ^= 1);
    let report = compare(&path, &fixture(BF16));
    named(&report, &["attn_output"], "");
    assert_eq!(
        find(&report, "attn_output").fit.clone().unwrap().worst.map(|w| (w.row, w.col)),
        Some((17, 32))
    );
    let path = altered(dir.path(), "attn_output", |b| b.chunks_mut(2).for_each(|v| v[1] ^= 0x80));
    named(&compare(&path, &fixture(BF16)), &["attn_output"], "the sign turned");
    let path = altered(dir.path(), "attn_output", |b| b[..2].copy_from_slice(&[0xff, 0x7f]));
    named(&compare(&path, &fixture(BF16)), &["attn_output"], "1 values are not finite");
    // Heads of o are columns.
    let path = altered(dir.path(), "attn_output", |b| b.chunks_mut(512).for_each(|row| row.rotate_left(256)));
    named(&compare(&path, &fixture(BF16)), &["attn_output"], "heads are permuted");
}

/// A matrix on its way into a file.
struct Matrix {
    layer: usize,
    name: &'static str,
    dims: Vec<usize>,
    values: Vec<f64>,
}

/// Writes all layers of a checkpoint as a GGUF file of this type, as a right converter would; `mistake` may alter it.
fn convert(folder: &Path, path: &Path, ty: GgmlType, mistake: &dyn Fn(&mut Vec<Matrix>)) {
    let model = Model::open(folder).unwrap();
    let g = model.geometry;
    let mut all = Vec::new();
    for layer in model.mla_layers() {
        let weights = model.weights(layer).unwrap();
        use mla_reference::Weights;
        for &w in Weight::ALL.iter().filter(|w| w.exists(&g)) {
            let name = w.row().gguf;
            let (dims, values) = match weights.norm(w) {
                Some(norm) => (vec![norm.len()], norm.to_vec()),
                None => {
                    let m = weights.matrix(w).unwrap();
                    let dims = match w {
                        Weight::WUk | Weight::WUv => w.shape(&g),
                        _ => vec![m.rows(), m.cols()],
                    };
                    (dims, dense(m, 0..m.rows(), false).into_raw_vec_and_offset().0)
                }
            };
            all.push(Matrix { layer, name, dims, values });
        }
    }
    mistake(&mut all);
    let mut w = Writer::new();
    w.meta("general.architecture", "deepseek2").meta("deepseek2.rope.scaling.type", "yarn");
    for (key, n) in numbers(&g, model.blocks) {
        w.meta(format!("deepseek2.{key}"), n as u32);
    }
    for (key, x) in [
        ("attention.layer_norm_rms_epsilon", 1e-6f32),
        ("rope.freq_base", 10000.0),
        ("rope.scaling.factor", 40.0),
        ("rope.scaling.yarn_log_multiplier", 0.1),
    ] {
        w.meta(format!("deepseek2.{key}"), x);
    }
    for m in &all {
        let dims: Vec<u64> = m.dims.iter().rev().map(|d| *d as u64).collect();
        let ty = if m.dims.len() == 1 { GgmlType::F32 } else { ty };
        w.tensor(format!("blk.{}.{}", m.layer, m.name), &dims, ty);
    }
    w.write(path, &mut |i, out: &mut dyn Write| {
        let m = &all[i];
        for v in &m.values {
            match ty {
                GgmlType::BF16 if m.dims.len() > 1 => {
                    out.write_all(&mla_numeric::DType::Bf16.encode(&[*v]))?;
                }
                _ => out.write_all(&(*v as f32).to_le_bytes())?,
            }
        }
        Ok(())
    })
    .unwrap();
}

fn numbers(g: &Geometry, blocks: usize) -> Vec<(&'static str, usize)> {
    vec![
        ("block_count", blocks),
        ("context_length", 163_840),
        ("embedding_length", g.hidden),
        ("attention.head_count", g.heads),
        ("attention.head_count_kv", 1),
        ("attention.q_lora_rank", g.q_rank),
        ("attention.kv_lora_rank", g.latent),
        ("attention.key_length", g.latent + g.rope),
        ("attention.value_length", g.latent),
        ("attention.key_length_mla", g.key()),
        ("attention.value_length_mla", g.value),
        ("rope.dimension_count", g.rope),
        ("rope.scaling.original_context_length", 4096),
    ]
}

/// The matrix of a name of layer 0.
fn of<'a>(all: &'a mut [Matrix], name: &str) -> &'a mut Matrix {
    all.iter_mut().find(|m| m.layer == 0 && m.name == format!("{name}.weight")).unwrap()
}

fn converted(original: &str, ty: GgmlType, mistake: &dyn Fn(&mut Vec<Matrix>)) -> Report {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("converted.gguf");
    convert(&fixture(original), &path, ty, mistake);
    compare(&path, &fixture(original))
}

#[test]
fn every_format_of_originals_is_read_right() {
    for original in [BF16, "checkpoints/dsv3.fp8", "checkpoints/dsv3.nvfp4-ct"] {
        for ty in [GgmlType::F32, GgmlType::BF16] {
            let report = converted(original, ty, &|_| ());
            assert_eq!((report.exit(), report.count(Outcome::Fits)), (0, 9), "{original} {ty}");
        }
    }
}

#[test]
fn wrong_orientations_of_kv_b_are_named() {
    // Heads of key rows as they are, in the shape of transposed ones.
    let untransposed = |all: &mut Vec<Matrix>| {
        let m = of(all, "attn_k_b");
        let (l, n) = (512, 128);
        let before = m.values.clone();
        for h in 0..2 {
            for (i, v) in m.values[h * l * n..(h + 1) * l * n].iter_mut().enumerate() {
                *v = before[h * l * n + (i % l) * n + i / l];
            }
        }
    };
    named(&converted(BF16, GgmlType::BF16, &untransposed), &["attn_k_b"], "heads are not transposed");
    let transposed = |all: &mut Vec<Matrix>| {
        let m = of(all, "attn_q_a");
        let before = m.values.clone();
        m.values.iter_mut().enumerate().for_each(|(i, v)| *v = before[i % 256 * 256 + i / 256]);
    };
    named(&converted(BF16, GgmlType::BF16, &transposed), &["attn_q_a"], "it is transposed");
    // [value rows, key rows] in each head: both are 128, so that the two change places.
    let exchanged = |all: &mut Vec<Matrix>| {
        let (k, v) = (of(all, "attn_k_b").values.clone(), of(all, "attn_v_b").values.clone());
        for h in 0..2 {
            for l in 0..512 {
                for n in 0..128 {
                    of(all, "attn_k_b").values[(h * 512 + l) * 128 + n] = v[(h * 128 + n) * 512 + l];
                    of(all, "attn_v_b").values[(h * 128 + n) * 512 + l] = k[(h * 512 + l) * 128 + n];
                }
            }
        }
    };
    named(
        &converted(BF16, GgmlType::F32, &exchanged),
        &["attn_k_b", "attn_v_b"],
        "read as value rows, then key rows",
    );
}

/// The last row of FP8 scales covers the 64 rope rows of 576 alone.
#[test]
fn a_lost_row_of_scales_is_named() {
    let scaled = |by: f64| {
        move |all: &mut Vec<Matrix>| {
            let m = of(all, "attn_kv_a_mqa");
            m.values[512 * 256..].iter_mut().for_each(|v| *v *= by);
        }
    };
    for by in [4096.0, 0.0, 1e-3] {
        let report = converted("checkpoints/dsv3.fp8", GgmlType::F32, &scaled(by));
        named(&report, &["attn_kv_a_mqa"], "rows 512 to 575, which are the rope rows");
        assert!(find(&report, "attn_kv_a_mqa").cause.contains("row 4 of the original's scales"));
    }
    // In the original itself: four rows of scales where 576 rows need five.
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture("checkpoints/dsv3.fp8")).unwrap() {
        let file = file.unwrap().path();
        let mut bytes = std::fs::read(&file).unwrap();
        let find = |bytes: &[u8], text: &str| bytes.windows(text.len()).position(|w| w == text.as_bytes());
        if let Some(at) =
            find(&bytes, "kv_a_proj_with_mqa.weight_scale_inv\":{\"dtype\":\"F32\",\"shape\":[5,2]")
        {
            let at = at + find(&bytes[at..], "[5,2]").unwrap();
            bytes[at + 1] = b'4';
        }
        std::fs::write(dir.path().join(file.file_name().unwrap()), bytes).unwrap();
    }
    let path = dir.path().join("right.gguf");
    convert(&fixture("checkpoints/dsv3.fp8"), &path, GgmlType::F32, &|_| ());
    let report = compare(&path, dir.path());
    let kv_a = find(&report, "attn_kv_a_mqa");
    assert_eq!((kv_a.outcome, report.exit()), (Outcome::Unreadable, 2));
    assert!(kv_a.cause.contains("[4, 2] takes 32 bytes, but it has 40"), "{}", kv_a.cause);
}

/// compressed-tensors divides by the scale of the tensor, modelopt multiplies.
#[test]
fn wrong_conventions_of_nvfp4_are_named() {
    let report = converted("checkpoints/dsv3.nvfp4-ct", GgmlType::F32, &|_| ());
    assert_eq!(report.exit(), 0);
    let model = Model::open(&fixture("checkpoints/dsv3.nvfp4-ct")).unwrap();
    let global = model.checkpoint().unwrap().0.matrix("model.layers.0.self_attn.q_a_proj").unwrap().unwrap();
    let global = global.scale.unwrap().value;
    let times =
        |k: f64| move |all: &mut Vec<Matrix>| of(all, "attn_q_a").values.iter_mut().for_each(|v| *v *= k);
    let report = converted("checkpoints/dsv3.nvfp4-ct", GgmlType::F32, &times(global * global));
    named(&report, &["attn_q_a"], "is a divisor there, and the values were multiplied by it");
    let report = converted("checkpoints/dsv3.nvfp4-ct", GgmlType::BF16, &times(global));
    named(&report, &["attn_q_a"], "was left out");
    let report = converted("checkpoints/dsv3.nvfp4-ct", GgmlType::F32, &times(1.5));
    named(&report, &["attn_q_a"], "the original's values times 1.5");
}

/// Two layers of the same shapes, with values of their own.
fn two_layers(dir: &Path) {
    let one = std::fs::read(fixture(BF16).join("model.safetensors")).unwrap();
    let n = u64::from_le_bytes(one[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&one[8..8 + n]).unwrap();
    let second = header.replace("layers.0.", "layers.1.");
    // The second layer: the same numbers times their place's sign, so that it is another layer of the same size.
    let mut data = one[8 + n..].to_vec();
    data.chunks_mut(2)
        .enumerate()
        .for_each(|(i, v)| v[1] ^= if ((i * 2_654_435_761) >> 7) & 1 == 1 { 0x80 } else { 0 });
    std::fs::write(dir.join("a.safetensors"), &one).unwrap();
    std::fs::write(dir.join("b.safetensors"), [&one[..8], second.as_bytes(), &data].concat()).unwrap();
    let config = std::fs::read_to_string(fixture(BF16).join("config.json")).unwrap();
    let config = config.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2");
    std::fs::write(dir.join("config.json"), config).unwrap();
}

#[test]
fn a_neighbours_tensor_is_named_and_what_is_not_in_both_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    two_layers(dir.path());
    let path = dir.path().join("two.gguf");
    convert(dir.path(), &path, GgmlType::BF16, &|_| ());
    let report = compare(&path, dir.path());
    assert_eq!((report.exit(), report.count(Outcome::Fits)), (0, 18));

    let path = dir.path().join("swapped.gguf");
    convert(dir.path(), &path, GgmlType::BF16, &|all| {
        let index = |layer| move |m: &Matrix| m.layer == layer && m.name == "attn_kv_a_mqa.weight";
        let (a, b) = (all.iter().position(index(0)).unwrap(), all.iter().position(index(1)).unwrap());
        let values = std::mem::take(&mut all[a].values);
        all[a].values = std::mem::replace(&mut all[b].values, values);
    });
    let report = compare(&path, dir.path());
    let causes: Vec<_> =
        report.tensors().filter(|t| t.outcome == Outcome::Differs).map(|t| &*t.cause).collect();
    assert_eq!(causes, ["it is layer 1's of the original", "it is layer 0's of the original"]);

    // One layer against two.
    let report = compare(&fixture(MIXED), dir.path());
    assert_eq!(
        (report.exit(), report.only_original.layers.clone(), report.only_file.layers.len()),
        (0, vec![1], 0)
    );
    let both = compare(&path, &fixture(BF16));
    assert_eq!(both.only_file.layers, [1]);
    // A norm in place of another of the same length.
    let path = dir.path().join("norms.gguf");
    convert(&fixture(BF16), &path, GgmlType::BF16, &|all| {
        let values = of(all, "attn_norm").values.clone();
        of(all, "attn_q_a_norm").values = values;
    });
    named(&compare(&path, &fixture(BF16)), &["attn_q_a_norm"], "input_layernorm of the original");
}

#[test]
fn the_command_says_it_in_its_exit_code() {
    let run = |args: &[&str]| {
        let out = Command::new(env!("CARGO_BIN_EXE_mla-check")).arg("inspect").args(args).output().unwrap();
        let text = |b: &[u8]| String::from_utf8(b.to_vec()).unwrap();
        (out.status.code().unwrap(), text(&out.stdout), text(&out.stderr))
    };
    let path = |name: &str| fixture(name).display().to_string();
    let (mixed, bf16) = (path(MIXED), path(BF16));
    let (code, text, _) = run(&[&mixed, "--against", &bf16]);
    assert_eq!(code, 0);
    assert!(text.starts_with("9 attention tensors of 1 layer fit the original\n"), "{text}");
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
    let dir = tempfile::tempdir().unwrap();
    let swapped = altered(dir.path(), "attn_q_b", |b| rows(b, 384, |r| (r + 192) % 384));
    let (code, text, _) = run(&[&swapped.display().to_string(), "--against", &bf16]);
    assert_eq!(code, 1);
    assert!(
        text.contains("1 of 9 attention tensors differ") && text.contains("heads are permuted"),
        "{text}"
    );
    let (code, json, _) = run(&[&swapped.display().to_string(), "--against", &bf16, "--format", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((code, &json["schema"]), (1, &"mla-check.against".into()));
    assert_eq!(json["layers"][0]["tensors"].as_array().unwrap().len(), 9);
    for original in ["nowhere", &mixed] {
        let (code, _, error) = run(&[&mixed, "--against", original]);
        assert_eq!((code, error.lines().count()), (2, 3), "{error}");
    }
    // Another model: the numbers say so, and nothing is compared.
    let (code, text, _) = run(&[&mixed, "--against", &path("checkpoints/glm5dims.nvfp4-modelopt")]);
    assert_eq!(code, 1);
    assert!(text.contains("nope is 128 in the file, 192 in the original"), "{text}");
}
