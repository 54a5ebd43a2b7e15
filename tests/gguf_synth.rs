//! Made-up models: names, shapes, types and sizes of weights as other software has them.

use mla_check::check::{self, Options};
use mla_check::gguf::{Gguf, TensorInfo};
use mla_check::judge::Verdict;
use mla_check::model::Model;
use mla_check::model::lint::{Severity, lint};
use mla_check::synth::{FileType, MlaLayers, Preset, Spec, SynthError, write};
use mla_reference::dequant;
use std::error::Error;
use std::path::{Path, PathBuf};

type Outcome = Result<(), Box<dyn Error>>;

fn spec(preset: &str, file_type: &str, heads: u64) -> Result<Spec, Box<dyn Error>> {
    let preset = Preset::by_name(preset).ok_or("preset")?;
    let file_type = FileType::by_name(file_type).ok_or("file type")?;
    Ok(Spec { heads: Some(heads), ..Spec::new(preset, file_type) })
}

fn make(folder: &Path, spec: &Spec) -> Result<Gguf, Box<dyn Error>> {
    let path = folder.join("synth.gguf");
    let mut last = (0, 0);
    let length = write(spec, &path, &mut |done, total| {
        assert!(done > last.0 && done <= total, "progress goes on");
        last = (done, total);
    })?;
    assert_eq!(last.0, last.1, "progress ends at the whole");
    assert_eq!(length, std::fs::metadata(&path)?.len());
    let gguf = Gguf::open(&path)?;
    assert_eq!(gguf.warnings().len(), 0, "{:?}", gguf.warnings());
    Ok(gguf)
}

/// The types that llama-quantize gave these tensors of GLM-5 and DeepSeek-V3 (measured by calling its
/// `llama_tensor_get_type`): q_a, q_b and kv_a; k_b, whose rows of 128 or 192 are no whole blocks of 256; v_b; output; and of
/// V2-Lite q.
const MIXES: [[&str; 6]; 13] = [
    ["Q4_K_M", "Q4_K", "Q5_0", "Q4_K", "Q4_K", "Q4_K"],
    ["Q2_K", "Q2_K", "Q4_0", "Q2_K", "Q3_K", "Q2_K"],
    ["IQ4_XS", "IQ4_XS", "IQ4_NL", "IQ4_XS", "IQ4_XS", "IQ4_XS"],
    ["Q5_K_M", "Q5_K", "Q5_1", "Q5_K", "Q5_K", "Q5_K"],
    ["Q6_K", "Q6_K", "Q8_0", "Q6_K", "Q6_K", "Q6_K"],
    ["Q3_K_M", "Q3_K", "Q4_0", "Q3_K", "Q4_K", "Q3_K"],
    ["IQ3_XXS", "IQ3_XXS", "IQ4_NL", "IQ3_XXS", "IQ3_S", "IQ2_S"],
    ["IQ2_XXS", "IQ2_XXS", "IQ4_NL", "IQ2_XXS", "IQ2_XXS", "IQ2_XXS"],
    ["IQ1_S", "IQ1_S", "IQ4_NL", "IQ1_S", "IQ2_XXS", "IQ1_S"],
    ["MXFP4_MOE", "Q8_0", "MXFP4", "MXFP4", "Q8_0", "Q8_0"],
    ["Q4_0", "Q4_0", "Q4_0", "Q4_0", "Q4_0", "Q4_0"],
    ["Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0"],
    ["BF16", "BF16", "BF16", "BF16", "BF16", "BF16"],
];

#[test]
fn types_are_those_of_llama_quantize() -> Outcome {
    let folder = tempfile::tempdir()?;
    for preset in ["glm-5", "deepseek-v3", "deepseek-v2-lite"] {
        for [file_type, base, k_b, v_b, output, query] in MIXES {
            let gguf = make(folder.path(), &spec(preset, file_type, 2)?)?;
            for tensor in gguf.tensors() {
                let name = tensor.name.trim_start_matches("blk.0.").trim_end_matches(".weight");
                let expected = match name {
                    "attn_k_b" => k_b,
                    "attn_v_b" => v_b,
                    "attn_output" => output,
                    "attn_q" => query,
                    n if n.ends_with("norm") || n.ends_with("norm.bias") => "F32",
                    _ => base,
                };
                assert_eq!(tensor.ty.to_string(), expected, "{preset} {file_type} {name}");
            }
        }
    }
    Ok(())
}

/// NVFP4's matrices each have a scale, as llama.cpp's converter writes them from a checkpoint.
#[test]
fn nvfp4_has_tensor_scales() -> Outcome {
    let folder = tempfile::tempdir()?;
    let gguf = make(folder.path(), &spec("deepseek-v3", "NVFP4", 2)?)?;
    let mut scaled = 0;
    for tensor in gguf.tensors().iter().filter(|t| t.ty.to_string() == "NVFP4") {
        let scale = gguf.tensor(&tensor.name.replace(".weight", ".scale")).ok_or(tensor.name.clone())?;
        assert_eq!((scale.ty.to_string().as_str(), &scale.dims[..]), ("F32", &[1][..]));
        scaled += 1;
    }
    assert_eq!(scaled, 6);
    Ok(())
}

/// Keys that say nothing about MLA attention, or what only a whole model has.
fn elsewhere(key: &str) -> bool {
    let parts =
        ["expert", "feed_forward", "tokenizer", "size_label", "dense_block", "vocab_size", ".ssm.", ".kda."];
    parts.iter().any(|p| key.contains(p)) || key == "general.name"
}

/// Presets, files of that architecture that llama.cpp's converter and llama-quantize wrote, and heads and layers of those.
const REAL: [(&str, &str, u64, u32); 6] = [
    ("glm-5", "models/glm5dims", 4, 2),
    ("deepseek-v3.2", "architectures/dsv32dims", 2, 1),
    ("mistral4", "architectures/mistral4dims", 4, 1),
    ("minicpm3", "architectures/minicpm3dims", 4, 1),
    ("plm", "architectures/plm_dims", 2, 1),
    ("kimi-linear", "architectures/kimi_linear_dims", 2, 2),
];

/// A made-up model has the keys, with their types, and the attention tensors, in their order, of a file that llama.cpp's
/// converter and llama-quantize wrote.
#[test]
fn layout_is_that_of_a_real_file() -> Outcome {
    for (preset, real, heads, layers) in REAL {
        let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures");
        let real = Gguf::open(&fixtures.join(format!("{real}.Q4_K_M.gguf")))?;
        let folder = tempfile::tempdir()?;
        let mut spec = spec(preset, "Q4_K_M", heads)?;
        spec.layers = layers;
        let ours = make(folder.path(), &spec)?;

        // Same geometry but for the widths that the small file made smaller. MiniCPM3's value_length is left out where it is hidden /
        // heads, which it is for 4 heads of the small file and for 40 of the real one.
        let smaller = ["embedding_length", "q_lora_rank", "indexer.head_count"];
        let left_out = |k: &str| preset == "minicpm3" && k.ends_with("value_length");
        let keys = |gguf: &Gguf| -> Vec<String> {
            let keys = gguf.metadata().iter().filter(|(k, _)| !elsewhere(k) && !left_out(k));
            let value =
                |k: &str, v: String| if smaller.iter().any(|s| k.ends_with(s)) { String::new() } else { v };
            let mut keys: Vec<_> =
                keys.map(|(k, v)| format!("{k} {:?} {}", v.ty(), value(k, v.to_string()))).collect();
            keys.sort();
            keys
        };
        assert_eq!(keys(&ours), keys(&real), "{preset}");

        // The type of attn_kv_b depends on how many layers there are, and layers without MLA attention are not made up.
        let attention = |t: &&TensorInfo| {
            let mla =
                t.name.contains(".attn") || t.name.contains(".indexer") || t.name.contains("rope_factors");
            mla && !(preset == "kimi-linear" && t.name.starts_with("blk.0."))
        };
        let names = |gguf: &Gguf| -> Vec<_> {
            let tensors = gguf.tensors().iter().filter(attention);
            let ty = |t: &TensorInfo| if t.name.contains("kv_b") { String::new() } else { t.ty.to_string() };
            tensors.map(|t| (t.name.clone(), t.dims.len(), ty(t))).collect()
        };
        assert_eq!(names(&ours), names(&real), "{preset}");
        assert_eq!(ours.tensors().len(), names(&ours).len(), "{preset}");
    }
    Ok(())
}

/// Every preset is read back as the geometry it was made of, with no defect and, with as many heads as it has, nothing odd.
#[test]
fn presets_are_read_back() -> Outcome {
    let folder = tempfile::tempdir()?;
    for preset in Preset::ALL {
        let spec =
            Spec { layers: 5, heads: Some(2), ..Spec::new(preset, FileType::by_name("Q4_0").ok_or("type")?) };
        make(folder.path(), &spec)?;
        let model = Model::open(&folder.path().join("synth.gguf"))?;
        let g = model.geometry;
        let widths = [g.hidden, g.heads, g.q_rank, g.latent, g.nope, g.rope, g.value].map(|w| w as u64);
        let p = preset;
        assert_eq!(widths, [p.hidden, 2, p.q_rank, p.latent, p.nope, p.rope, p.value], "{}", p.name);
        let layers = if p.mla == MlaLayers::All { vec![0, 1, 2, 3, 4] } else { vec![3, 4] };
        assert_eq!(model.mla_layers(), layers, "{}", p.name);
        assert_eq!(model.numbers.factors.is_some(), p.rope_factors, "{}", p.name);
        let odd: Vec<_> = lint(&model).into_iter().filter(|f| f.severity != Severity::Note).collect();
        assert_eq!(odd, [], "{}", p.name);
    }
    Ok(())
}

/// A correct engine is clean on real dimensions (two heads) of the architectures that no other test has.
#[test]
fn a_run_of_each_architecture_is_clean() -> Outcome {
    let folder = tempfile::tempdir()?;
    for (preset, layer) in
        [("mistral4", 0), ("minicpm3", 0), ("plm", 0), ("kimi-linear", 3), ("deepseek-v3.2", 0)]
    {
        let mut spec = spec(preset, "Q4_K_M", 2)?;
        spec.layers = layer + 1;
        make(folder.path(), &spec)?;
        let model = Model::open(&folder.path().join("synth.gguf"))?;
        let options = Options { batch: "0+9,20+1".parse()?, ..Options::default() };
        let report = check::layer(&model, layer as usize, &options, &|_| {})?;
        assert_eq!(report.verdict, Verdict::Rounding, "{preset}: {:#?}", report.tensors);
    }
    Ok(())
}

/// GLM-5's published dimensions, and the seed in the name.
#[test]
fn dimensions_are_glm_5s() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut spec =
        Spec::new(Preset::by_name("glm-5").ok_or("preset")?, FileType::by_name("q4_k_m").ok_or("type")?);
    spec.seed = 77;
    let gguf = make(folder.path(), &spec)?;
    for (name, dims) in [
        ("attn_k_b.weight", &[192, 512, 64][..]),
        ("attn_v_b.weight", &[512, 256, 64]),
        ("attn_q_a.weight", &[6144, 2048]),
        ("attn_q_b.weight", &[2048, 64 * 256]),
        ("attn_kv_a_mqa.weight", &[6144, 576]),
        ("attn_output.weight", &[64 * 256, 6144]),
        ("indexer.attn_q_b.weight", &[2048, 4096]),
    ] {
        assert_eq!(gguf.tensor(&format!("blk.0.{name}")).ok_or(name)?.dims, dims, "{name}");
    }
    // Of 393,216 blocks no two are the same.
    let output = gguf.bytes(gguf.tensor("blk.0.attn_output.weight").ok_or("output")?)?;
    let blocks: std::collections::HashSet<_> = output.chunks_exact(144).collect();
    assert_eq!(blocks.len(), 64 * 256 * 6144 / 256);
    let name = gguf.metadata().str("general.name")?.ok_or("name")?;
    assert!(name.contains("synthetic") && name.contains("seed 77"), "{name}");
    Ok(())
}

/// Whole rows of a tensor, spread over it, about a million values at most.
fn rows(gguf: &Gguf, tensor: &TensorInfo) -> Result<Vec<f64>, Box<dyn Error>> {
    let ty = tensor.ty.known().ok_or("type")?;
    let row = tensor.dims[0] as usize;
    let bytes = gguf.bytes(tensor)?.chunks_exact(row / ty.block_elements() * ty.block_bytes());
    let step = (bytes.len() * row).div_ceil(1 << 20);
    let mut values = Vec::new();
    for bytes in bytes.step_by(step) {
        let from = values.len();
        values.resize(from + row, f64::NAN);
        dequant::decode(ty, bytes, &mut values[from..]).ok_or("no decoder")?;
    }
    if let Some(scale) =
        gguf.tensor(&tensor.name.replace(".weight", ".scale")).filter(|s| s.name != tensor.name)
    {
        let scale = f32::from_le_bytes(gguf.bytes(scale)?.try_into()?);
        values.iter_mut().for_each(|v| *v *= f64::from(scale));
    }
    Ok(values)
}

/// Rows have rms 1/√(row length), means near zero; norms lie in [0.5, 1.5].
#[test]
fn weights_have_the_size_asked_for() -> Outcome {
    let folder = tempfile::tempdir()?;
    for file_type in FileType::ALL.iter().map(|t| t.name) {
        let gguf = make(folder.path(), &spec("glm-5", file_type, 2)?)?;
        for tensor in gguf.tensors().iter().filter(|t| !t.name.ends_with(".scale")) {
            let values = rows(&gguf, tensor)?;
            assert!(values.iter().all(|v| v.is_finite()));
            let name = format!("{file_type} {}", tensor.name);
            if tensor.dims.len() == 1 {
                let (low, high) = if name.ends_with("bias") { (-0.5, 0.5) } else { (0.5, 1.5) };
                assert!(values.iter().all(|v| (low..=high).contains(v)), "{name}");
                continue;
            }
            let row = tensor.dims[0] as f64;
            let square = |v: &[f64]| v.iter().map(|v| v * v).sum::<f64>() / v.len() as f64 * row;
            // Values that share a sub-block's scales are one draw (at most 32 of them) of a mean square X. X is
            // between 0 and 4.7 of its mean (the most is Q5_K's, scale 63 and minimum 0: 325.5 · 63² / 277651), so
            // its relative standard deviation is below √(1 · (4.7 − 1)) < 2. Six deviations of the mean of all draws.
            let draws = (values.len() / 32) as f64;
            let whole = square(&values);
            assert!((whole - 1.0).abs() < 6.0 * 2.0 / draws.sqrt(), "{name}: mean square {whole}");
            // The square of a draw's mean is at most its mean square, 1 on the average.
            let mean = values.iter().sum::<f64>() / values.len() as f64 * row.sqrt();
            assert!(mean.abs() < 6.0 / draws.sqrt(), "{name}: mean {mean} rms");
            // A row of two blocks has 16 draws: this only finds rows of another size altogether.
            for (i, v) in values.chunks(tensor.dims[0] as usize).enumerate() {
                assert!((0.2..3.0).contains(&square(v)), "{name} row {i}: {}", square(v));
            }
        }
    }
    Ok(())
}

#[test]
fn bytes_depend_on_the_seed_alone() -> Outcome {
    let folder = tempfile::tempdir()?;
    let file = |threads: usize, spec: &Spec| -> Result<Vec<u8>, Box<dyn Error>> {
        let path = folder.path().join(format!("{threads}.gguf"));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        pool.install(|| write(spec, &path, &mut |_, _| ()).map(drop))?;
        Ok(std::fs::read(path)?)
    };
    let mut spec = spec("glm-5", "Q4_K_M", 2)?;
    let one = file(1, &spec)?;
    assert!(one == file(3, &spec)?);
    spec.seed = 1;
    assert!(one != file(1, &spec)?);

    // A layer is the same whatever follows it, and another layer is another one.
    (spec.seed, spec.layers) = (0, 2);
    let two = make(folder.path(), &spec)?;
    let single = Gguf::open(&folder.path().join("3.gguf"))?;
    for tensor in single.tensors() {
        let same = two.tensor(&tensor.name).ok_or("tensor")?;
        assert!(single.bytes(tensor)? == two.bytes(same)?, "{}", tensor.name);
        let other = two.tensor(&tensor.name.replace("blk.0", "blk.1")).ok_or("tensor")?;
        assert!(single.bytes(tensor)? != two.bytes(other)?, "{}", tensor.name);
    }
    Ok(())
}

#[test]
fn impossible_models_are_errors() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("synth.gguf");
    for (layers, heads) in [(0, 1), (513, 1), (1, 0), (1, 1 << 40)] {
        let spec = Spec { layers, ..spec("glm-5", "Q8_0", heads)? };
        let error = write(&spec, &path, &mut |_, _| ()).err().ok_or("expected an error")?;
        assert!(matches!(error, SynthError::Number { .. }), "{error}");
        assert_eq!(error.to_string().lines().count(), 3);
    }
    assert!(!path.exists());
    assert!(Preset::by_name("glm-6").is_none() && FileType::by_name("Q9").is_none());
    Ok(())
}

/// Layers whose weights are of codebooks, of three values, of FP4 and of FP4 with tensor scales are judged clean.
#[test]
fn layers_of_unusual_types_are_judged_clean() -> Outcome {
    let folder = tempfile::tempdir()?;
    for file_type in ["IQ3_XXS", "TQ1_0", "MXFP4_MOE", "NVFP4"] {
        let path = folder.path().join(format!("{file_type}.gguf"));
        write(&spec("deepseek-v2-lite", file_type, 2)?, &path, &mut |_, _| ())?;
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_mla-check"))
            .args(["run", "--engine", "cpu", "--batch", "0+3", "--form", "fused", "--quiet"])
            .arg(&path)
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{file_type}: {text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(text.contains("rounding"), "{file_type}: {text}");
    }
    Ok(())
}

/// The scale of a tensor multiplies what its blocks say, and who asks for its blocks alone is given none.
#[test]
fn a_tensor_scale_multiplies_every_value() -> Outcome {
    use mla_reference::{Weight, Weights};
    let folder = tempfile::tempdir()?;
    let gguf = make(folder.path(), &spec("deepseek-v2-lite", "NVFP4", 2)?)?;
    let model = mla_check::model::Model::open(&folder.path().join("synth.gguf"))?;
    let weights = model.weights(0)?;
    for weight in [Weight::WQ, Weight::WKvA, Weight::WUk, Weight::WUv, Weight::WO] {
        let name = format!("blk.0.{}", weight.row().gguf);
        let tensor = gguf.tensor(&name).ok_or("tensor")?;
        let scale = gguf.bytes(gguf.tensor(&name.replace(".weight", ".scale")).ok_or("scale")?)?;
        let scale = f64::from(f32::from_le_bytes(scale.try_into()?));
        let matrix = weights.matrix(weight).ok_or("matrix")?;
        assert!(matrix.stored().is_none(), "{weight}");
        let (mut got, row) = (vec![0.0; matrix.cols()], matrix.rows() - 1);
        matrix.decode(row, 0, &mut got);
        let mut blocks = vec![0.0; got.len()];
        let bytes = gguf.bytes(tensor)?;
        let line = bytes.len() / matrix.rows();
        dequant::decode(tensor.ty.known().ok_or("type")?, &bytes[row * line..][..line], &mut blocks)
            .ok_or("decoder")?;
        assert!(got.iter().zip(&blocks).all(|(g, b)| *g == scale * b), "{weight}");
        assert!(blocks.iter().any(|b| *b != 0.0) && scale != 1.0);
    }
    Ok(())
}
