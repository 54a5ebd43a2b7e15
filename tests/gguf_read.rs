//! The fixture models, read as the Python package `gguf` reads them (`fixtures/gguf/README.md`).

use mla_check::gguf::{Gguf, Problem, Value};
use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;

type Outcome = Result<(), Box<dyn Error>>;

fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/models").join(name)
}
fn dsv3(part: usize) -> String {
    format!("dsv3.Q4_K_M-0000{part}-of-00003.gguf")
}

/// The rows of one kind: file, then the fields behind it.
fn rows(kind: &str) -> Vec<Vec<&'static str>> {
    let lines = include_str!("../fixtures/gguf/tables.tsv").lines();
    let rows: Vec<_> = lines
        .map(|line| line.split('\t').collect::<Vec<_>>())
        .filter(|row| row[0] == kind)
        .map(|row| row[1..].to_vec())
        .collect();
    assert!(!rows.is_empty());
    rows
}

/// All fixture models by the file that they were opened through.
fn models() -> Result<BTreeMap<String, Gguf>, Box<dyn Error>> {
    let names = [dsv3(1), "glm5dims.Q4_K_M.gguf".to_owned()];
    names.into_iter().map(|n| Ok((n.clone(), Gguf::open(&model(&n))?))).collect()
}

#[test]
fn tensors_agree_with_gguf_py() -> Outcome {
    let models = models()?;
    let mut seen = BTreeMap::<&str, usize>::new();
    for row in rows("tensor") {
        let [file, name, ty, dims, bytes, offset] = row[..] else { panic!("{row:?}") };
        let first = if file.starts_with("dsv3") { dsv3(1) } else { file.to_owned() };
        let gguf = &models[&first];
        let tensor = gguf.tensor(name).ok_or(name)?;
        assert_eq!(gguf.parts()[tensor.part].path(), model(file));
        assert_eq!(tensor.ty.to_string(), ty, "{name}");
        assert_eq!(tensor.dims, dims.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?, "{name}");
        assert_eq!(tensor.size, Some(bytes.parse()?), "{name}");
        assert_eq!(tensor.offset, offset.parse::<u64>()?, "{name}");
        let whole = std::fs::read(model(file))?;
        let (from, size): (usize, usize) = (offset.parse()?, bytes.parse()?);
        assert!(gguf.bytes(tensor)? == &whole[from..from + size], "{name}");
        let number = seen.entry(gguf.parts()[0].path().to_str().ok_or("path")?).or_default();
        assert_eq!(gguf.tensors()[*number].name, name, "order of the files");
        *number += 1;
    }
    for gguf in models.values() {
        assert_eq!(gguf.tensors().len(), seen[gguf.parts()[0].path().to_str().ok_or("path")?]);
        assert_eq!(gguf.warnings().len(), 0, "{:?}", gguf.warnings());
    }
    Ok(())
}

#[test]
fn metadata_agrees_with_gguf_py() -> Outcome {
    let models = models()?;
    for row in rows("key") {
        let [file, key, ty, value] = row[..] else { panic!("{row:?}") };
        let metadata = match models.get(file) {
            Some(gguf) => gguf.metadata(),
            None => {
                models[&dsv3(1)].parts().iter().find(|p| p.path().ends_with(file)).ok_or(file)?.metadata()
            }
        };
        let read = metadata.get(key).ok_or(key)?;
        assert_eq!(read.ty().name(), ty, "{key}");
        match read {
            Value::String(_) => assert_eq!(metadata.str(key)?, Some(value), "{key}"),
            Value::Bool(_) => assert_eq!(metadata.bool(key)?, Some(value.parse()?), "{key}"),
            Value::F32(_) => assert_eq!(metadata.f64(key)?, Some(value.parse()?), "{key}"),
            _ => assert_eq!(metadata.u64(key)?, Some(value.parse()?), "{key}"),
        }
    }
    for row in rows("tokens") {
        let [file, count, first, last] = row[..] else { panic!("{row:?}") };
        let Some(Value::Array(tokens)) = models[file].metadata().get("tokenizer.ggml.tokens") else {
            panic!("{file}: no tokens")
        };
        assert_eq!(tokens.len(), count.parse::<u64>()?);
        assert_eq!(tokens.iter().next(), Some(Value::String(first.as_bytes())));
        assert_eq!(tokens.iter().last(), Some(Value::String(last.as_bytes())));
        assert_eq!(tokens.iter().count() as u64, tokens.len());
    }
    Ok(())
}

#[test]
fn any_part_opens_the_whole_model() -> Outcome {
    let first = Gguf::open(&model(&dsv3(1)))?;
    assert_eq!(first.parts().len(), 3);
    assert_eq!(first.metadata().u64("split.tensors.count")?, Some(first.tensors().len() as u64));
    for part in 2..=3 {
        let other = Gguf::open(&model(&dsv3(part)))?;
        assert_eq!(other.tensors(), first.tensors());
        assert_eq!(other.metadata().str("general.architecture")?, Some("deepseek2"));
        for tensor in other.tensors() {
            assert!(other.bytes(tensor)? == first.bytes(tensor)?);
        }
    }
    Ok(())
}

#[test]
fn typed_getters_refuse_what_does_not_fit() -> Outcome {
    let gguf = Gguf::open(&model("glm5dims.Q4_K_M.gguf"))?;
    let metadata = gguf.metadata();
    assert_eq!(metadata.u64("no.such.key")?, None);
    assert_eq!(metadata.u64_or_array("glm-dsa.attention.indexer.types")?, Some(vec![1, 1]));
    assert_eq!(metadata.u64_or_array("glm-dsa.attention.head_count")?, Some(vec![4]));
    assert_eq!(metadata.f64("glm-dsa.attention.head_count")?, Some(4.0));
    for error in [
        metadata.u64("general.name").err(),
        metadata.u64("glm-dsa.rope.freq_base").err(),
        metadata.str("glm-dsa.block_count").err(),
        metadata.bool("glm-dsa.block_count").err(),
        metadata.f64("general.name").err(),
    ] {
        let error = error.ok_or("expected an error")?;
        assert!(matches!(error.problem(), Problem::WrongType { .. }), "{error}");
        assert_eq!(error.to_string().lines().count(), 3);
        assert!(error.to_string().contains("glm5dims.Q4_K_M.gguf, byte "), "{error}");
    }
    Ok(())
}
