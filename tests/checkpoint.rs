/*!
Checkpoints in Hugging Face's format: values against other software's, folders that are damaged, and what their configurations
come to.
*/

mod common;

use common::{answers, checkpoints, fixture};
use mla_check::checkpoint::Checkpoint;
use mla_check::model::{Convention, Model, Reading};
use mla_reference::rows::dense;
use std::path::Path;
use std::process::Command;

/// Dequantised rows and sums that `fixtures/checkpoints/README.md` says the origin of, in float64. Every product is exact in
/// float64, a quotient rounds once (2^-53); sums of up to 458,752 values in any order are within 1e-12 of their absolute sum.
#[test]
fn values_are_those_of_other_software() {
    for folder in checkpoints() {
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let answers = answers(&folder);
        let mut seen = 0;
        for (name, rows) in &answers {
            let Some(tensor) = name.strip_prefix("dequant/").and_then(|n| n.strip_suffix("/rows")) else {
                continue;
            };
            let module = tensor.strip_suffix(".weight").unwrap();
            let matrix = checkpoint.matrix(module).unwrap().unwrap();
            let theirs = &answers[&format!("dequant/{tensor}/values")];
            let all = dense(matrix.rows.as_ref(), 0..matrix.rows.rows(), false);
            for (i, row) in rows.iter().enumerate() {
                for (c, ours) in all.row(*row as usize).iter().enumerate() {
                    let b = theirs[[i, c]];
                    assert!(
                        (ours - b).abs() <= b.abs() * 2f64.powi(-52),
                        "{tensor} [{row}, {c}]: {ours:e} {b:e}"
                    );
                }
            }
            let sums = &answers[&format!("dequant/{tensor}/sum")];
            let absolute: f64 = all.iter().map(|v| v.abs()).sum();
            assert!((all.sum() - sums[0]).abs() <= 1e-12 * absolute, "{tensor}");
            let squares: f64 = all.iter().map(|v| v * v).sum();
            assert!((squares - sums[1]).abs() <= 1e-12 * squares, "{tensor}");
            seen += 1;
        }
        assert!(seen >= 5, "{}: {seen}", folder.display());
    }
}

/// A tensor of a made-up file: name, dtype, shape, bytes.
type Made = (String, &'static str, Vec<usize>, Vec<u8>);

const CONFIG: &str = r#"{"model_type": "deepseek_v3", "hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": null,
  "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000,
  "rope_scaling": null, "num_hidden_layers": 1, "attention_bias": false, "max_position_embeddings": 4096}"#;

fn bf16(name: &str, shape: &[usize]) -> Made {
    let n: usize = shape.iter().product();
    let data = (0..n).flat_map(|i| (0x3c00u16 + (i * 37 % 251) as u16).to_le_bytes()).collect();
    (format!("model.layers.0.{name}.weight"), "BF16", shape.to_vec(), data)
}

/// One layer of the model of [`CONFIG`].
fn layer() -> Vec<Made> {
    vec![
        bf16("input_layernorm", &[32]),
        bf16("self_attn.q_proj", &[24, 32]),
        bf16("self_attn.kv_a_proj_with_mqa", &[20, 32]),
        bf16("self_attn.kv_a_layernorm", &[16]),
        bf16("self_attn.kv_b_proj", &[32, 16]),
        bf16("self_attn.o_proj", &[32, 16]),
    ]
}

/// A .safetensors file, its header as a value so that it can be altered.
fn file(tensors: &[Made], alter: impl Fn(&mut serde_json::Value)) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let from = data.len();
        data.extend(bytes);
        header.insert(
            name.clone(),
            serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [from, data.len()]}),
        );
    }
    let mut header = serde_json::Value::Object(header);
    alter(&mut header);
    raw(header.to_string().as_bytes(), &data)
}

fn raw(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// Writes files into a new folder.
fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

/// What reading all of a folder's attention comes to: the error, or the warnings.
fn read(dir: &Path) -> Result<Vec<String>, String> {
    let model = Model::open(dir).map_err(|e| e.to_string())?;
    model.weights(0).map_err(|e| e.to_string())?;
    Ok(model.source().warnings())
}

fn with_model(bytes: &[u8]) -> Result<Vec<String>, String> {
    read(folder(&[("config.json", CONFIG.as_bytes()), ("model.safetensors", bytes)]).path())
}

const KV_A: &str = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight";

/// Every row: what was done, and what the message says (all three lines of it).
#[test]
fn damaged_files_are_errors_that_say_where() {
    let good = file(&layer(), |_| ());
    assert_eq!(with_model(&good), Ok(Vec::new()));
    let at =
        |key: &'static str, value: serde_json::Value| file(&layer(), move |h| h[KV_A][key] = value.clone());
    let text = |from: &str, to: &str| {
        let n = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
        let header = std::str::from_utf8(&good[8..8 + n]).unwrap().replacen(from, to, 1);
        raw(header.as_bytes(), &good[8 + n..])
    };
    let json = serde_json::json!({"a": 1});
    let rows: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "empty"),
        ("7 bytes", good[..7].into(), "the file has 7 bytes"),
        ("cut within its header", good[..100].into(), "ends within its header"),
        ("a header of 2^63 bytes", [&[0xff; 8], &good[8..]].concat(), "no safetensors file"),
        ("a GGUF file", [b"GGUF\x03\0\0\0", &good[8..]].concat(), "it is a GGUF file"),
        ("no JSON", raw(b"{\"a\": ", b""), "the header is not what it should be"),
        ("not UTF-8", raw(b"{\"\xff\": {}}", b""), "the header is not what it should be"),
        ("an array", raw(b"[]", b""), "the header is not what it should be"),
        ("an entry of another form", file(&layer(), |h| h[KV_A] = json.clone()), "the header is not"),
        ("a name twice", text("self_attn.o_proj", "self_attn.kv_b_proj"), "is there twice"),
        ("deep nesting", raw("[".repeat(100_000).as_bytes(), b""), "the header is not what it should be"),
        ("cut within its data", good[..good.len() - 1].into(), "it lies at bytes"),
        (
            "offsets swapped",
            at("data_offsets", serde_json::json!([9, 3])),
            "it ends (3) before it begins (9)",
        ),
        (
            "offsets beyond 2^63",
            at("data_offsets", serde_json::json!([u64::MAX - 1, u64::MAX])),
            "it lies at bytes",
        ),
        (
            "negative offsets",
            at("data_offsets", serde_json::json!([-1, 4])),
            "the header is not what it should be",
        ),
        ("overlap", at("data_offsets", serde_json::json!([2, 1282])), "overlap those of"),
        (
            "a shape of more bytes",
            at("shape", serde_json::json!([21, 32])),
            "takes 1344 bytes, but it has 1280",
        ),
        (
            "a shape that overflows",
            at("shape", serde_json::json!([1u64 << 40, 1u64 << 40])),
            "no whole number of bytes",
        ),
        (
            "another shape",
            at("shape", serde_json::json!([32, 20])),
            "is 32 x 20, config.json asks for 20 x 32",
        ),
        ("three axes", at("shape", serde_json::json!([2, 10, 32])), "which is no matrix"),
        ("an unknown dtype", at("dtype", "Q9".into()), "its dtype Q9 is not known"),
        ("integers", at("dtype", "I16".into()), "has dtype I16, which is not read as a weight"),
        ("a weight missing", file(&layer()[..5], |_| ()), "o_proj has no weight"),
        ("no attention", file(&layer()[..1], |_| ()), "no tensor is named"),
    ];
    for (what, bytes, wanted) in rows {
        let message = with_model(&bytes).expect_err(what);
        assert!(message.contains(wanted), "{what}: {message}");
        assert_eq!(message.lines().count(), 3, "{what}: {message}");
        assert!(message.contains("\n  where: ") && message.contains("\n  do: "), "{what}: {message}");
    }
}

/// What no weight of attention needs is a warning.
#[test]
fn damage_elsewhere_is_a_warning() {
    let mut more = layer();
    more.push(("lm_head.weight".into(), "F4", vec![3], vec![0; 2]));
    assert_eq!(with_model(&file(&more, |_| ())), Ok(Vec::new()));
    let longer = [&file(&layer(), |_| ())[..], b"xx"].concat();
    assert!(with_model(&longer).unwrap()[0].contains("2 bytes after the last tensor"));
    let mut more = layer();
    more.push(("zz".into(), "U8", vec![3], vec![0; 3]));
    let cut = file(&more, |_| ());
    assert!(with_model(&cut[..cut.len() - 1]).unwrap()[0].contains("1 of 7 tensors lie beyond its end"));
}

#[test]
fn an_index_is_the_word_on_files() {
    let all = layer();
    let (a, b) = (file(&all[..4], |_| ()), file(&all[4..], |_| ()));
    let map = |names: &[(usize, &str)]| {
        let map: serde_json::Map<String, serde_json::Value> =
            names.iter().map(|(i, f)| (all[*i].0.clone(), (*f).into())).collect();
        serde_json::json!({"metadata": {}, "weight_map": map}).to_string()
    };
    let right = [
        (0, "a.safetensors"),
        (1, "a.safetensors"),
        (2, "a.safetensors"),
        (3, "a.safetensors"),
        (4, "b.safetensors"),
        (5, "b.safetensors"),
    ];
    let given = |index: &str, files: &[(&str, &[u8])]| {
        let all = [
            &[("config.json", CONFIG.as_bytes()), ("model.safetensors.index.json", index.as_bytes())],
            files,
        ]
        .concat();
        read(folder(&all).path())
    };
    let both: &[(&str, &[u8])] = &[("a.safetensors", &a), ("b.safetensors", &b)];
    assert_eq!(given(&map(&right), both), Ok(Vec::new()));
    // Without an index, all files of the folder are read.
    let none = folder(&[("config.json", CONFIG.as_bytes()), both[0], both[1]]);
    assert_eq!(read(none.path()), Ok(Vec::new()));
    let twice = folder(&[("config.json", CONFIG.as_bytes()), both[0], both[1], ("c.safetensors", &b)]);
    assert!(read(twice.path()).unwrap_err().contains("two files of the folder hold"));

    let missing = given(&map(&right), &both[..1]).unwrap_err();
    assert!(missing.contains("b.safetensors, which is missing"), "{missing}");
    let mut wrong = right;
    wrong[4].1 = "a.safetensors";
    let elsewhere = given(&map(&wrong), both).unwrap_err();
    assert!(elsewhere.contains("a.safetensors, where it is not"), "{elsewhere}");
    for (index, wanted) in [
        ("{", "the index is not what it should be"),
        ("{}", "the index is not what it should be"),
        (&map(&[(0, "../a.safetensors")]), "no name of a file of this folder"),
        (&map(&[(0, "/etc/passwd")]), "no name of a file of this folder"),
        (r#"{"weight_map": {"x": "a", "x": "b"}}"#, "x is there twice"),
    ] {
        let message = given(index, both).unwrap_err();
        assert!(message.contains(wanted), "{index}: {message}");
    }
    // A tensor that the index leaves out is left out; here nobody needs it.
    let mut more = all[4..].to_vec();
    more.push(("zz".into(), "U8", vec![3], vec![0; 3]));
    let warnings =
        given(&map(&right), &[("a.safetensors", &a), ("b.safetensors", &file(&more, |_| ()))]).unwrap();
    assert!(warnings[0].contains("1 tensors of its files are not in the index"));
}

#[test]
fn configurations_that_make_no_sense_are_refused() {
    let good = file(&layer(), |_| ());
    for (from, to, wanted) in [
        ("deepseek_v3", "llama", "model_type llama is not supported"),
        ("deepseek_v3", "longcat_flash", "latents are scaled"),
        ("\"hidden_size\": 32", "\"hidden_size\": 0", "hidden_size is 0"),
        ("\"hidden_size\": 32", "\"hidden_size\": \"x\"", "hidden_size is \"x\""),
        ("\"hidden_size\": 32, ", "", "the key hidden_size is missing"),
        ("\"kv_lora_rank\": 16", "\"kv_lora_rank\": 1e300", "kv_lora_rank is 1e+300"),
        ("\"qk_rope_head_dim\": 4", "\"qk_rope_head_dim\": 3", "columns rotate in pairs"),
        ("\"attention_bias\": false", "\"attention_bias\": true", "bias are not computed"),
        ("\"rope_theta\": 10000", "\"rope_theta\": 1", "a base is above 1"),
        ("\"rope_theta\": 10000,", "", "rope_theta is missing"),
        ("\"rms_norm_eps\": 1e-6", "\"rms_norm_eps\": -1", "rms_norm_eps is -1"),
        ("\"rope_scaling\": null", r#""rope_scaling": {"type": "ntk"}"#, "not supported for this model"),
        ("\"rope_scaling\": null", r#""rope_scaling": {"type": "yarn"}"#, "rope_scaling.factor is missing"),
        (
            "\"rope_scaling\": null",
            r#""rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 1.5}"#,
            "a factor of its own",
        ),
    ] {
        let config = CONFIG.replace(from, to);
        assert_ne!(config, CONFIG);
        let dir = folder(&[("config.json", config.as_bytes()), ("model.safetensors", &good)]);
        let message = read(dir.path()).expect_err(to);
        assert!(message.contains(wanted), "{to}: {message}");
        assert_eq!(message.lines().count(), 3, "{message}");
    }
    for (files, wanted) in [
        (&[("x.gguf", &b"GGUF"[..])][..], "the folder has .gguf files, but no config.json"),
        (&[], "it has no config.json"),
        (&[("model.safetensors", &good)], "put the model's config.json beside them"),
        (&[("config.json", b"[]")], "no object"),
        (&[("config.json", b"{")], "this is no JSON"),
        (&[("config.json", CONFIG.as_bytes())], "holds no .safetensors file"),
    ] {
        let message = read(folder(files).path()).unwrap_err();
        assert!(message.contains(wanted), "{message}");
    }
}

/// transformers 5.24 (`_compute_yarn_parameters`; the models' own scaling of the softmax): g(m) = 0.1 m ln 4 + 1.
#[test]
fn yarn_in_general_is_what_transformers_and_vllm_make_of_it() {
    let good = file(&layer(), |_| ());
    let spec = |settings: &str, convention| {
        let config = CONFIG.replace("\"rope_scaling\": null", &format!("\"rope_scaling\": {settings}"));
        let dir = folder(&[("config.json", config.as_bytes()), ("model.safetensors", &good)]);
        let model = Model::open(dir.path()).unwrap();
        let s = model.spec(&Reading { convention, ..Reading::default() });
        (s.rope.magnitude, s.scale * 12f64.sqrt())
    };
    let g = |m: f64| 0.1 * m * 4f64.ln() + 1.0;
    let yarn = |more: &str| {
        format!(r#"{{"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024{more}}}"#)
    };
    let close = |a: (f64, f64), b: (f64, f64)| {
        assert!((a.0 / b.0 - 1.0).abs() < 1e-15 && (a.1 / b.1 - 1.0).abs() < 4e-16, "{a:?} {b:?}");
    };
    let (hf, vllm) = (Convention::Hf, Convention::Vllm);
    close(spec(&yarn(""), hf), (g(1.0), 1.0));
    close(spec(&yarn(r#", "mscale": 0.5, "mscale_all_dim": 2"#), hf), (g(0.5) / g(2.0), g(2.0) * g(2.0)));
    close(spec(&yarn(r#", "mscale": 0.5, "mscale_all_dim": 2"#), vllm), (g(0.5) / g(2.0), g(2.0) * g(2.0)));
    close(spec(&yarn(r#", "mscale": 0.5"#), hf), (g(1.0), 1.0));
    close(spec(&yarn(r#", "mscale": 0.5"#), vllm), (g(0.5), 1.0));
    close(spec(&yarn(r#", "mscale_all_dim": 0.5"#), vllm), (g(1.0) / g(0.5), g(0.5) * g(0.5)));
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config { cases: 300, failure_persistence: None, ..Default::default() })]

    /// Bytes replaced anywhere: an answer or an error, never a panic.
    #[test]
    fn no_damage_panics(places in proptest::collection::vec((0usize..1 << 16, 0u8..), 1..6), cut in 0usize..1 << 16) {
        let fp8 = vec![
            bf16("input_layernorm", &[32]),
            bf16("self_attn.q_proj", &[24, 32]),
            ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight".into(), "F8_E4M3", vec![20, 32], vec![0x38; 640]),
            ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv".into(), "F32", vec![1, 1], vec![0; 4]),
            ("model.layers.0.self_attn.o_proj.weight_packed".into(), "U8", vec![32, 8], vec![0x21; 256]),
            ("model.layers.0.self_attn.o_proj.weight_scale".into(), "F8_E4M3", vec![32, 1], vec![0x38; 32]),
            ("model.layers.0.self_attn.o_proj.weight_global_scale".into(), "F32", vec![1], 2f32.to_le_bytes().into()),
        ];
        let mut bytes = file(&fp8, |_| ());
        // Most of it is data: three of four places are in the header.
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 8;
        let all = bytes.len();
        for (at, value) in places {
            bytes[if at % 4 == 0 { at % all } else { at % header }] = value;
        }
        if cut % 3 == 0 {
            bytes.truncate(cut % all);
        }
        let _ = with_model(&bytes);
    }
}

fn command(args: &[&str]) -> (i32, String, String) {
    let out = Command::new(env!("CARGO_BIN_EXE_mla-check")).args(args).output().unwrap();
    let text = |b: &[u8]| String::from_utf8(b.to_vec()).unwrap();
    (out.status.code().unwrap(), text(&out.stdout), text(&out.stderr))
}

/// A folder takes the place of a file: run, its saved tensors compared, a case for a kernel, an element explained.
#[test]
fn commands_take_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    for (i, folder) in
        ["dsv3.fp8", "dsv3.nvfp4-ct", "glm5dims.nvfp4-modelopt", "dsv3.bf16"].into_iter().enumerate()
    {
        let model = fixture(&format!("checkpoints/{folder}")).display().to_string();
        let report = at(&format!("{i}.json"));
        let more: &[&str] = if i == 0 { &["--save", &at("saved")] } else { &[] };
        let args = ["run", &model, "--engine", "cpu", "--batch", "0+2,9+1", "--report", &report];
        let (code, text, error) = command(&[&args[..], more].concat());
        assert_eq!(code, 0, "{text}{error}");
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
        assert_eq!(json["layers"][0]["verdict"], "rounding", "{folder}");
        assert_eq!(json["layers"][0]["layout"], "legacy", "kv_b is unsplit");
        if i == 0 {
            let files = json["model"]["files"].as_array().unwrap();
            assert_eq!(files.len(), 2);
            assert_eq!(json["model"]["name"], "dsv3.fp8");
            let (code, text, error) = command(&["compare", &model, &at("saved")]);
            assert_eq!(code, 0, "{text}{error}");
            let (code, _, error) = command(&["case", &model, "--save", &at("case"), "--batch", "5+1"]);
            assert_eq!(code, 0, "{error}");
            let (code, text, error) = command(&["run", &model, "--batch", "0+2", "--fault", "k_b-element"]);
            assert_eq!(code, 1, "{text}{error}");
            let (code, text, error) = command(&["explain", &report, "fused/attn_out", "0", "0", "0"]);
            assert_eq!(code, 0, "{text}{error}");
        }
        let (code, text, error) = command(&["inspect", &model]);
        assert_eq!(code, 0, "{error}");
        assert!(text.starts_with("headers and scales are sound\n"), "{text}");
        assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
    }
}

/// A layer that lacks a weight is a defect with its name, and exit 1.
#[test]
fn inspect_names_what_is_missing() {
    let dir =
        folder(&[("config.json", CONFIG.as_bytes()), ("model.safetensors", &file(&layer()[..5], |_| ()))]);
    let (code, text, _) = command(&["inspect", &dir.path().display().to_string()]);
    assert_eq!(code, 1);
    assert!(text.starts_with("1 defect that breaks attention"), "{text}");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("model.layers.0.self_attn.o_proj has no weight"), "{text}");
    let (code, json, _) =
        command(&["inspect", &dir.path().display().to_string(), "--format", "json", "--tensors"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((code, &json["schema"]), (1, &"mla-check.inspect-checkpoint".into()));
    assert_eq!(json["tensors"].as_array().unwrap().len(), 5);
}

/// The numbers of config.json as published for each model_type come to the same mathematics as the GGUF files that converters made of
/// them (`fixtures/models`, `fixtures/architectures`), whose answers other software computed.
#[test]
fn configurations_come_to_the_numbers_of_their_gguf_files() {
    let yarn = |factor: f64, original: u64, more: &str| {
        format!(
            r#"{{"rope_type": "yarn", "rope_theta": 10000.0, "factor": {factor}, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
              "mscale_all_dim": 1.0, "original_max_position_embeddings": {original}{more}}}"#
        )
    };
    let theta = |t: f64| format!(r#"{{"rope_type": "default", "rope_theta": {t}}}"#);
    let rows = [
        ("dsv3.Q4_K_M", "deepseek_v3", "1e-6", yarn(40.0, 4096, "")),
        ("dsv32dims.Q4_K_M", "deepseek_v32", "1e-6", yarn(40.0, 4096, "")),
        ("glm5dims.Q4_K_M", "glm_moe_dsa", "1e-5", theta(1e6)),
        ("mistral4dims.Q4_K_M", "mistral4", "1e-6", yarn(128.0, 8192, r#", "llama_4_scaling_beta": 0.1"#)),
        ("plm_dims.Q4_K_M", "plm", "1e-6", theta(1e5)),
        ("kimi_linear_dims.Q4_K_M", "kimi_linear", "1e-5", "null".into()),
        ("minicpm3dims.Q4_K_M", "minicpm3", "1e-5", String::new()),
    ];
    for (name, model_type, eps, mut rope) in rows {
        let (_, path) = common::ORACLE.iter().find(|o| o.0 == name).unwrap();
        let gguf = Model::open(&fixture(path)).unwrap();
        let g = gguf.geometry;
        let positions = gguf.context_length.unwrap();
        if let Some(f) = &gguf.numbers.factors {
            // Decimals of six digits, of which the file holds float32.
            let decimals = |v: &[f64]| v.iter().map(|x| format!("{x:.5e}")).collect::<Vec<_>>().join(", ");
            rope = format!(
                r#"{{"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [{}], "long_factor": [{}],
                  "original_max_position_embeddings": {}}}"#,
                decimals(&f.short),
                decimals(&f.long),
                f.original
            );
        }
        let rank = if g.q_rank > 0 { g.q_rank.to_string() } else { "null".into() };
        let text = format!(
            r#"{{"model_type": "{model_type}", "hidden_size": {}, "num_attention_heads": {}, "q_lora_rank": {rank},
              "kv_lora_rank": {}, "qk_rope_head_dim": {}, "qk_nope_head_dim": {}, "v_head_dim": {}, "rms_norm_eps": {eps},
              "rope_parameters": {rope}, "num_hidden_layers": {}, "max_position_embeddings": {positions}, "index_topk": 2048}}"#,
            g.hidden, g.heads, g.latent, g.rope, g.nope, g.value, gguf.blocks
        );
        // Nested, and behind a prefix, as multimodal models have them.
        let config = format!(r#"{{"model_type": "outer", "text_config": {text}}}"#);
        let tensors: Vec<Made> = gguf
            .mla_layers()
            .into_iter()
            .map(|l| {
                let (_, ty, shape, data) = bf16("x", &[1, 1]);
                (
                    format!("language_model.model.layers.{l}.self_attn.kv_a_proj_with_mqa.weight"),
                    ty,
                    shape,
                    data,
                )
            })
            .collect();
        let dir =
            folder(&[("config.json", config.as_bytes()), ("model.safetensors", &file(&tensors, |_| ()))]);
        let model = Model::open(dir.path()).unwrap_or_else(|e| panic!("{model_type}: {e}"));
        assert_eq!(model.arch.name, gguf.arch.name, "{model_type}");
        assert_eq!(model.mla_layers(), gguf.mla_layers(), "{model_type}");
        assert_eq!((model.geometry, model.blocks), (g, gguf.blocks), "{model_type}");
        for convention in Convention::ALL {
            for n_ctx in [None, Some(1 << 30)] {
                let reading = Reading { convention, n_ctx, norm_eps: None };
                // llama.cpp's converter and transformers round differently; both are within float32.
                let limit = if convention == Convention::LlamaCpp { 1e-7 } else { 1e-14 };
                let (a, b) = (model.spec(&reading).scalars(), gguf.spec(&reading).scalars());
                assert_eq!(a.len(), b.len());
                for ((name, a), (_, b)) in a.into_iter().zip(b) {
                    assert!(
                        (a - b).abs() <= limit * b.abs(),
                        "{model_type} {convention:?} {name}: {a:e} {b:e}"
                    );
                }
            }
        }
    }
}
