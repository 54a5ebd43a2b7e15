//! Damaged model files as a user meets them: `run` goes on where the damage is outside of the weights it needs, and says
//! exactly what is wrong where it is not.

mod common;

use common::fixture;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const GLM: &str = "models/glm5dims.Q4_K_M.gguf";
/// Little work: what is judged is not the point here.
const SMALL: [&str; 4] = ["--batch", "0+2", "--form", "absorbed"];

fn mla_check(args: &[&str], model: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mla-check"))
        .args(args)
        .arg(model)
        .env("CUDA_VISIBLE_DEVICES", "")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Both streams with every run of spaces and line ends as one space.
fn words(output: &Output) -> String {
    let both = [output.stdout.clone(), output.stderr.clone()].concat();
    String::from_utf8(both).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The bytes of a table row behind the tensor's name: dimensions, type, offset.
struct Row {
    dims: usize,
    ty: usize,
    offset: usize,
}

fn row(bytes: &[u8], tensor: &str) -> Row {
    let name = [&(tensor.len() as u64).to_le_bytes(), tensor.as_bytes()].concat();
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len();
    let count = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    Row { dims: at + 4, ty: at + 4 + 8 * count, offset: at + 8 + 8 * count }
}

/// The model with some bytes replaced.
fn changed(folder: &Path, change: impl FnOnce(&mut [u8])) -> PathBuf {
    let mut bytes = std::fs::read(fixture(GLM)).unwrap();
    change(&mut bytes);
    let path = folder.join("damaged.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// What is done to a tensor's row, and what is said of it.
type Damage = (&'static str, fn(&mut [u8], &Row), &'static str);

#[rustfmt::skip]
const DAMAGES: &[Damage] = &[
    ("a fork's type", |b, r| put(b, r.ty, &144u32.to_le_bytes()), "IQ4_KS, a type of the fork ik_llama.cpp"),
    ("a removed type", |b, r| put(b, r.ty, &4u32.to_le_bytes()), "Q4_2, removed from ggml"),
    ("2^62 rows", |b, r| put(b, r.dims + 8, &(1u64 << 62).to_le_bytes()), "more elements or bytes than 64 bits"),
    ("-1 rows", |b, r| put(b, r.dims + 8, &u64::MAX.to_le_bytes()), "expected less than 2^63"),
    ("2^40 rows", |b, r| put(b, r.dims + 8, &(1u64 << 40).to_le_bytes()), "pass the end of the file"),
    ("rows of 100", |b, r| put(b, r.dims, &100u64.to_le_bytes()), "whole blocks of"),
    ("offset 33", |b, r| put(b, r.offset, &33u64.to_le_bytes()), "not a multiple of the alignment"),
    ("offset 2^64 - 32", |b, r| put(b, r.offset, &(u64::MAX - 31).to_le_bytes()), "pass the end of the file"),
    ("no rows", |b, r| put(b, r.dims + 8, &[0; 8]), "no elements"),
];

/// The row of the table is that of a tensor that attention does not need: a warning, and the layer is judged.
#[test]
fn run_goes_on_where_the_damage_is_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    for (name, damage, sentence) in DAMAGES {
        let path = changed(folder.path(), |bytes| {
            let row = row(bytes, "blk.0.ffn_up.weight");
            damage(bytes, &row);
        });
        let output = mla_check(&[&["run"], &SMALL[..]].concat(), &path);
        let said = words(&output);
        assert_eq!(output.status.code(), Some(0), "{name}: {said}");
        assert!(said.contains("warning:") && said.contains(sentence), "{name}: {said}");
        assert!(said.contains("blk.0.ffn_up.weight"), "{name}: {said}");
    }
}

/// The same to a tensor that is needed: an error of three lines for `run`, a finding for `inspect`.
#[test]
fn the_same_damage_to_a_weight_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for (name, damage, sentence) in DAMAGES {
        let path = changed(folder.path(), |bytes| {
            let row = row(bytes, "blk.0.attn_q_a.weight");
            damage(bytes, &row);
        });
        let output = mla_check(&[&["run"], &SMALL[..]].concat(), &path);
        let said = words(&output);
        assert_eq!(output.status.code(), Some(2), "{name}: {said}");
        // A tensor of other dimensions is refused for its shape, before its bytes are asked for.
        let shape = said.contains("its metadata asks for");
        assert!(said.contains(sentence) || shape, "{name}: {said}");
        assert!(said.contains("blk.0.attn_q_a.weight") && said.contains(" do: "), "{name}: {said}");
        assert!(output.stdout.is_empty());

        let output = mla_check(&["inspect"], &path);
        let said = words(&output);
        assert!(said.contains(sentence), "{name}: {said}");
        // What can't be decoded is a warning of `inspect`: another program may know the type.
        let defect = !name.ends_with("type");
        assert_eq!(output.status.code(), Some(i32::from(defect)), "{name}: {said}");
    }
}

/// A weight whose bytes another tensor claims, too.
#[test]
fn overlapping_weights_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = changed(folder.path(), |bytes| {
        let (from, to) = (row(bytes, "blk.0.attn_q_a.weight"), row(bytes, "blk.0.ffn_up.weight"));
        let offset = bytes[from.offset..from.offset + 8].to_vec();
        put(bytes, to.offset, &offset);
    });
    let output = mla_check(&[&["run"], &SMALL[..]].concat(), &path);
    assert_eq!(output.status.code(), Some(2), "{}", words(&output));
    assert!(words(&output).contains("overlaps that of tensor \"blk.0.ffn_up.weight\""), "{}", words(&output));
    // The other layer is not touched by it.
    let output = mla_check(&[&["run", "--layer", "1"], &SMALL[..]].concat(), &path);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
}

#[test]
fn what_is_no_file_is_said_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe.gguf");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for (path, what) in [
        (pipe.as_path(), "a pipe"),
        (Path::new("/dev/null"), "a device"),
        (Path::new("/dev/zero"), "a device"),
    ] {
        for command in ["run", "inspect"] {
            let output = mla_check(&[command], path);
            let said = words(&output);
            assert_eq!(output.status.code(), Some(2), "{command} {}: {said}", path.display());
            assert!(said.contains(&format!("this is {what}, not an ordinary file")), "{said}");
        }
    }
}
