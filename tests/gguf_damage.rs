//! Damaged files: each of the ways in which a GGUF file is known to go wrong, and random ones.
//!
//! Files are made by hand here, byte by byte, so that the reader is not tested against our own writer.
//! Cases are named by the row of the list of damages that they come from.

#[path = "common/counting.rs"]
mod counting;
#[path = "common/sparse.rs"]
mod sparse;

use counting::memory;
use mla_check::gguf::{Gguf, GgufError, Problem, Value};
use proptest::prelude::*;
use std::error::Error;
use std::path::Path;

type Outcome = Result<(), Box<dyn Error>>;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// What opening a file may hold: a constant, and for each byte of the file what the densest table costs
/// (a row of 24 bytes becomes a tensor in two lists and two maps, and two warnings with their places).
fn justified(file: usize) -> isize {
    32768 + 64 * file as isize
}

/// What must happen to a case; the text must occur in the message.
enum Verdict {
    Refused(&'static str),
    /// The file opens with a warning; the bytes of tensor "b" (always the last) are an error, those of the others are
    /// not, but for one that it shares bytes with.
    Unusable(&'static str),
    Warned(&'static str),
    Accepted,
}
use Verdict::{Accepted, Refused, Unusable, Warned};

fn string(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s].concat()
}
fn pair(key: &[u8], ty: u32, value: &[u8]) -> Vec<u8> {
    [&string(key), &ty.to_le_bytes()[..], value].concat()
}
fn array(ty: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&ty.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

/// A row of the tensor table.
#[derive(Clone)]
struct Row {
    name: Vec<u8>,
    count: Option<u32>,
    dims: Vec<u64>,
    ty: u32,
    offset: u64,
}

/// A file, with everything in it that can be wrong.
#[derive(Clone)]
struct File {
    version: u32,
    tensors: Option<u64>,
    pairs: Option<u64>,
    metadata: Vec<Vec<u8>>,
    rows: Vec<Row>,
    alignment: usize,
    padding: u8,
    data: Vec<u8>,
}

const F32: u32 = 0;
const Q8_0: u32 = 8;
const Q4_K: u32 = 12;

/// A sound file: "a" is Q8_0 [32, 2] (68 bytes), "b" is F32 [4] (16 bytes).
fn sound() -> File {
    let row = |name: &[u8], dims: &[u64], ty, offset| Row {
        name: name.to_vec(),
        count: None,
        dims: dims.to_vec(),
        ty,
        offset,
    };
    File {
        version: 3,
        tensors: None,
        pairs: None,
        metadata: vec![
            pair(b"general.architecture", 8, &string(b"test")),
            pair(b"test.number", 4, &7u32.to_le_bytes()),
            pair(b"test.flag", 7, &[1]),
            pair(b"test.words", 9, &array(8, 2, &[string(b"x"), string(b"yz")].concat())),
        ],
        rows: vec![row(b"a", &[32, 2], Q8_0, 0), row(b"b", &[4], F32, 96)],
        alignment: 32,
        padding: 0,
        data: vec![0x11; 128],
    }
}

impl File {
    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensors.unwrap_or(self.rows.len() as u64).to_le_bytes());
        out.extend(self.pairs.unwrap_or(self.metadata.len() as u64).to_le_bytes());
        out.extend(self.metadata.concat());
        for row in &self.rows {
            out.extend(string(&row.name));
            out.extend(row.count.unwrap_or(row.dims.len() as u32).to_le_bytes());
            row.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(row.ty.to_le_bytes());
            out.extend(row.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(self.alignment), self.padding);
        out.extend(&self.data);
        out
    }
}

fn with(change: impl FnOnce(&mut File)) -> Vec<u8> {
    let mut file = sound();
    change(&mut file);
    file.bytes()
}
/// The sound file with one more metadata pair.
fn meta(pair: Vec<u8>) -> Vec<u8> {
    with(|f| f.metadata.push(pair))
}
/// The sound file with a change to tensor "b", the last.
fn last(change: impl FnOnce(&mut Row)) -> Vec<u8> {
    with(|f| change(&mut f.rows[1]))
}
fn align(ty: u32, value: &[u8], alignment: usize) -> Vec<u8> {
    with(|f| {
        f.metadata.push(pair(b"general.alignment", ty, value));
        f.alignment = alignment;
    })
}
fn cut(end: usize) -> Vec<u8> {
    sound().bytes()[..end].to_vec()
}
fn replaced(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut out = sound().bytes();
    out[at..at + bytes.len()].copy_from_slice(bytes);
    out
}
/// All numbers of the sound file's header turned round.
fn big_endian() -> Vec<u8> {
    let mut out = sound().bytes();
    out[4..8].reverse();
    out[8..16].reverse();
    out[16..24].reverse();
    out
}

#[rustfmt::skip]
fn cases() -> Vec<(&'static str, Vec<u8>, Verdict)> {
    let words = |n: u64, inner: u64| pair(b"w", 9, &array(8, n, &inner.to_le_bytes()));
    let nested = |depth: usize| {
        let inner = (1..depth).fold(array(0, 1, &[5]), |inner, _| array(9, 1, &inner));
        pair(b"n", 9, &inner)
    };
    vec![
        ("0 sound", sound().bytes(), Accepted),
        ("1 empty", vec![], Refused("empty")),
        ("2 cut in the magic", cut(3), Refused("not a GGUF file")),
        ("2 cut in the version", cut(6), Refused("the version needs 4 bytes")),
        ("2 cut in the counts", cut(20), Refused("needs 8 bytes")),
        ("3 ggml", replaced(0, b"lmgg"), Refused("before GGUF")),
        ("3 reversed", replaced(0, b"FUGG"), Refused("\"FUGG\"")),
        ("3 zip", replaced(0, b"PK\x03\x04"), Refused("zip")),
        ("3 pickle", replaced(0, &[0x80, 2]), Refused("pickle")),
        ("3 safetensors", replaced(0, b"\x40\0\0\0\0\0\0\0{\""), Refused("safetensors")),
        ("3 html", replaced(0, b"<!doctype html>"), Refused("web page")),
        ("3 lfs", b"version https://git-lfs.github.com/spec/v1\n".to_vec(), Refused("git-lfs")),
        ("4 version 0", with(|f| f.version = 0), Refused("version 0")),
        ("5 version 1", with(|f| f.version = 1), Refused("version 1")),
        ("6 version 2", with(|f| f.version = 2), Accepted),
        ("7 version 4", with(|f| f.version = 4), Refused("version 4")),
        ("8 version swapped", with(|f| f.version = 3u32.swap_bytes()), Refused("big-endian")),
        ("9 big-endian", big_endian(), Refused("big-endian")),
        ("10 cut in a pair", cut(60), Refused("bytes")),
        ("11 cut in the table", cut(sound().bytes().len() - 200), Refused("bytes")),
        ("12 data cut", cut(sound().bytes().len() - 20), Refused("\"b\"")),
        ("12 no data", with(|f| f.data.clear()), Refused("68 bytes of data")),
        ("13 2^63 tensors", with(|f| f.tensors = Some(1 << 63)), Refused("hold at most")),
        ("13 -1 tensors", with(|f| f.tensors = Some(u64::MAX)), Refused("hold at most")),
        ("14 10^12 tensors", with(|f| f.tensors = Some(1_000_000_000_000)), Refused("hold at most")),
        ("15 one tensor too many", with(|f| f.tensors = Some(3)), Refused("")),
        ("16 one tensor too few", with(|f| f.tensors = Some(1)), Warned("count of tensors")),
        ("17 2^63 pairs", with(|f| f.pairs = Some(1 << 63)), Refused("metadata pairs")),
        ("17 10^12 pairs", with(|f| f.pairs = Some(1_000_000_000_000)), Refused("metadata pairs")),
        ("17 one pair too many", with(|f| f.pairs = Some(5)), Refused("")),
        ("18 one pair too few", with(|f| f.pairs = Some(3)), Refused("test.words")),
        ("19 key of 2^40", meta([&(1u64 << 40).to_le_bytes()[..], b"key"].concat()), Refused("key needs")),
        ("19 key of 2^64-1", meta([&u64::MAX.to_le_bytes()[..], b"key"].concat()), Refused("key needs")),
        ("20 empty key", meta(pair(b"", 4, &[0; 4])), Refused("key is empty")),
        ("21 key twice", meta(pair(b"test.flag", 4, &[0; 4])), Refused("test.flag")),
        ("22 key not UTF-8", meta(pair(b"k\xff", 4, &[0; 4])), Warned("UTF-8")),
        ("23 NUL in a key", meta(pair(b"k\0y", 4, &[0; 4])), Warned("NUL")),
        ("24 value type 13", meta(pair(b"k", 13, &[0; 4])), Refused("is 13")),
        ("24 value type -1", meta(pair(b"k", u32::MAX, &[0; 4])), Refused("key \"k\"")),
        ("25 bool 2", meta(pair(b"k", 7, &[2])), Warned("stored as 2")),
        ("26 string of 2^62", meta(pair(b"k", 8, &(1u64 << 62).to_le_bytes())), Refused("a string value")),
        ("27 array of arrays", meta(nested(4)), Accepted),
        ("27 too deep", meta(nested(5)), Refused("deep")),
        ("28 element type 13", meta(pair(b"k", 9, &array(13, 1, &[0; 8]))), Refused("elements is 13")),
        ("29 count 2^63", meta(pair(b"k", 9, &array(4, 1 << 63, &[]))), Refused("length of an array")),
        ("30 count 2^31 of u8", meta(pair(b"k", 9, &array(0, 1 << 31, &[]))), Refused("length of an array")),
        ("31 inner string of 2^40", meta(words(1, 1 << 40)), Refused("a string value")),
        ("32 empty array", meta(pair(b"k", 9, &array(8, 0, &[]))), Accepted),
        ("33 alignment 0", align(4, &0u32.to_le_bytes(), 32), Refused("alignment is 0")),
        ("33 alignment 3", align(4, &3u32.to_le_bytes(), 32), Refused("alignment is 3")),
        ("33 alignment 48", align(4, &48u32.to_le_bytes(), 32), Refused("general.alignment")),
        ("34 alignment 1", align(4, &1u32.to_le_bytes(), 1), Warned("alignment 1")),
        ("- alignment 64", {
            let mut file = sound();
            file.metadata.push(pair(b"general.alignment", 4, &64u32.to_le_bytes()));
            (file.alignment, file.rows[1].offset) = (64, 128);
            file.data.resize(192, 0);
            file.bytes()
        }, Accepted),
        ("35 alignment 2^31", align(4, &(1u32 << 31).to_le_bytes(), 32), Refused("")),
        ("36 alignment as u64", align(10, &32u64.to_le_bytes(), 32), Refused("(u64)")),
        ("36 alignment as i32", align(5, &32u32.to_le_bytes(), 32), Refused("(i32)")),
        ("37 name of 64", last(|t| t.name = vec![b'n'; 64]), Warned("64 bytes")),
        ("37 name of 63", last(|t| t.name = vec![b'n'; 63]), Accepted),
        ("38 empty name", last(|t| t.name.clear()), Warned("name is empty")),
        ("39 name twice", last(|t| t.name = b"a".to_vec()), Refused("second time")),
        ("40 no dimensions", last(|t| t.dims.clear()), Warned("one element")),
        ("41 5 dimensions", last(|t| t.dims = vec![1; 5]), Refused("5 dimensions")),
        ("41 2^32-1 dimensions", last(|t| t.count = Some(u32::MAX)), Refused("4294967295 dimensions")),
        ("42 a dimension 0", last(|t| t.dims = vec![4, 0]), Unusable("no elements")),
        ("43 a dimension -1", last(|t| t.dims = vec![u64::MAX]), Unusable("18446744073709551615")),
        ("44 2^63 elements", last(|t| t.dims = vec![1 << 32, 1 << 31]), Unusable("more elements")),
        ("44 2^66 elements", last(|t| t.dims = vec![1 << 33, 1 << 33]), Unusable("more elements")),
        ("45 2^62 of F32", last(|t| t.dims = vec![1 << 31, 1 << 31]), Unusable("more elements")),
        ("46 2^40 elements", last(|t| t.dims = vec![1 << 40]), Refused("pass the end")),
        ("47 0 hides 2^124", last(|t| t.dims = vec![0, 1 << 62, 1 << 62]), Unusable("more elements")),
        ("48 Q4_2", last(|t| t.ty = 4), Unusable("Q4_2")),
        ("48 Q4_0_4_4", last(|t| t.ty = 31), Unusable("ARM")),
        ("49 type 43", last(|t| t.ty = 43), Unusable("id 43")),
        ("49 IQ4_KS", last(|t| t.ty = 144), Unusable("IQ4_KS")),
        ("49 type -1", last(|t| t.ty = u32::MAX), Unusable("4294967295")),
        ("50 Q4_K row of 128", last(|t| (t.dims, t.ty) = (vec![128, 2], Q4_K)), Unusable("blocks of 256")),
        ("51 Q8_0 row of 48", last(|t| (t.dims, t.ty) = (vec![48, 2], Q8_0)), Unusable("48 elements")),
        ("52 offset 100", last(|t| t.offset = 100), Unusable("multiple of the alignment")),
        ("53 hole", with(|f| { f.rows[1].offset = 128; f.data.resize(160, 0) }), Warned("32 unused bytes")),
        ("54 equal offsets", last(|t| t.offset = 0), Unusable("overlaps that of tensor \"a\"")),
        ("54 overlap", last(|t| t.offset = 64), Unusable("overlaps")),
        ("55 order", with(|f| f.rows.swap(0, 1)), Warned("order")),
        ("56 first offset not 0", with(|f| {
            (f.rows[0].offset, f.rows[1].offset) = (32, 128);
            f.data.resize(160, 0);
        }), Warned("32 unused bytes")),
        ("57 offset past the end", last(|t| t.offset = 1 << 20), Unusable("pass the end")),
        ("57 offset 2^64-32", last(|t| t.offset = u64::MAX - 31), Unusable("pass the end")),
        ("58 no trailing padding", with(|f| f.data.truncate(112)), Accepted),
        ("59 extra bytes", with(|f| f.data.resize(192, 9)), Warned("64 bytes follow")),
        ("60 no padding before data", with(|f| { f.alignment = 1; f.data.truncate(112) }), Refused("pass the end")),
        ("61 no tensors", with(|f| { f.rows.clear(); f.data.clear() }), Accepted),
    ]
}

/// Rows of the list whose cases are not in [`cases`]: a test's file, and what the case says there.
const ELSEWHERE: &[(u32, &str, &str)] = &[
    (39, HERE, "39 over parts"),
    (62, HERE, "fn odd_splits_are_warned_of"),
    (63, HERE, "63 missing"),
    (64, HERE, "64 part 1 missing"),
    (65, HERE, "65 total"),
    (66, INSPECT, r#"d.set("attention.kv_lora_rank", 512u64)"#),
    (67, INSPECT, r#"d.unset("attention.value_length_mla")"#),
    (68, INSPECT, "only attn_kv_b.weight, but the metadata has key_length_mla"),
    (69, INSPECT, "it looks transposed"),
    (70, INSPECT, "attn_k_b is square"),
    (71, INSPECT, r#"d.set("attention.head_count", 3u32)"#),
    (72, INSPECT, r#"d.set("rope.dimension_count", 63u32)"#),
    (73, DATA, "32 NaN and 0 infinite values in 1 of 36864 blocks"),
    (74, DATA, "all its bytes are zero"),
    (75, HERE, "75 swapped"),
    (76, HERE, "fn a_file_cut_while_it_is_read_ends_in_words"),
    (77, INSPECT, "is no weight of this architecture's attention"),
    (78, INSPECT, "layers 1 lie beyond block_count 1"),
];
const HERE: &str = include_str!("gguf_damage.rs");
const INSPECT: &str = include_str!("cli_inspect.rs");
const DATA: &str = include_str!("cli_data.rs");

/// Every row of the list of damages has a case somewhere.
#[test]
fn every_row_has_a_case() {
    let number = |name: &str| name.split(' ').next().and_then(|n| n.parse::<u32>().ok());
    let mut rows: std::collections::BTreeSet<u32> = cases().iter().filter_map(|c| number(c.0)).collect();
    for (row, file, says) in ELSEWHERE {
        // In this file the list itself is one occurrence.
        let least = if *file == HERE { 2 } else { 1 };
        assert!(file.matches(says).count() >= least, "row {row}: {says:?} is gone");
        rows.insert(*row);
    }
    let missing: Vec<u32> = (1..=78).filter(|row| !rows.contains(row)).collect();
    assert!(missing.is_empty(), "no case of rows {missing:?}");
}

fn open(folder: &Path, bytes: &[u8]) -> Result<Gguf, Box<dyn Error>> {
    let path = folder.join("model.gguf");
    std::fs::write(&path, bytes)?;
    Ok(Gguf::open(&path)?)
}

#[test]
fn every_damage_has_its_verdict() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut wrong = Vec::new();
    for (name, bytes, verdict) in cases() {
        let (result, held) = memory(|| open(folder.path(), &bytes));
        if held > justified(bytes.len()) {
            wrong.push(format!("{name}: held {held} bytes for a file of {}", bytes.len()));
        }
        let (message, right) = match (&verdict, &result) {
            (Refused(text), Err(error)) => {
                let message = error.to_string();
                let placed = message.contains("model.gguf, byte ") || bytes.is_empty();
                let right = message.contains(text) && placed && message.lines().count() == 3;
                (message, right)
            }
            (Unusable(text), Ok(gguf)) => {
                let warned = gguf.warnings().iter().any(|w| w.to_string().contains(text));
                let errors: Vec<String> =
                    gguf.tensors().iter().filter_map(|t| Some(gguf.bytes(t).err()?.to_string())).collect();
                let shared = errors.iter().any(|e| e.contains("overlaps that of tensor \"b\""));
                let last = errors.last().is_some_and(|e| e.contains(text) && e.lines().count() == 3);
                let right = warned && last && errors.len() == 1 + usize::from(shared);
                (format!("{:?}, {errors:?}", gguf.warnings()), right)
            }
            (Warned(text), Ok(gguf)) => {
                let message: Vec<_> = gguf.warnings().iter().map(|w| w.to_string()).collect();
                let message = message.join("\n");
                let right = message.contains(text) && message.contains("model.gguf, byte ");
                (message, right)
            }
            (Accepted, Ok(gguf)) => (format!("{:?}", gguf.warnings()), gguf.warnings().is_empty()),
            (_, Ok(gguf)) => (format!("opened, {:?}", gguf.warnings()), false),
            (_, Err(error)) => (error.to_string(), false),
        };
        if !right {
            wrong.push(format!("{name}: {message}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// The error that a tensor's bytes give.
fn bytes_error(folder: &Path, file: &[u8]) -> Result<String, Box<dyn Error>> {
    let gguf = open(folder, file)?;
    assert_eq!(gguf.bytes(gguf.tensor("a").ok_or("a")?)?.len(), 68);
    let error = gguf.bytes(gguf.tensor("b").ok_or("b")?).err().ok_or("expected an error")?;
    Ok(error.to_string())
}

#[test]
fn unusable_tensors_are_errors_only_when_asked_for() -> Outcome {
    let folder = tempfile::tempdir()?;
    let error = bytes_error(folder.path(), &last(|t| t.ty = 144))?;
    assert!(error.contains("ik_llama.cpp") && error.contains("\"b\""), "{error}");
    let error = bytes_error(folder.path(), &last(|t| t.dims = vec![4, 0]))?;
    assert!(error.contains("[4, 0]") && error.contains("\"b\""), "{error}");
    Ok(())
}

/// Row 76: a file that shrinks after it was opened.
#[test]
fn a_file_cut_after_opening_is_an_error() -> Outcome {
    let folder = tempfile::tempdir()?;
    let gguf = open(folder.path(), &sound().bytes())?;
    std::fs::OpenOptions::new().write(true).open(folder.path().join("model.gguf"))?.set_len(100)?;
    let error = gguf.bytes(&gguf.tensors()[0]).err().ok_or("expected an error")?;
    assert!(matches!(error.problem(), Problem::Changed { now: 100, .. }), "{error}");
    Ok(())
}

/// Run by the test below in a process of its own: cuts the file that it is reading.
#[cfg(unix)]
#[test]
#[ignore = "ends the process; run by a_file_cut_while_it_is_read_ends_in_words"]
fn cuts_what_it_reads() -> Outcome {
    // Without it, this is `--ignored` of all tests.
    let Ok(path) = std::env::var("MLA_CHECK_TEST_CUT") else { return Ok(()) };
    mla_check::gguf::end_on_lost_pages(2);
    let gguf = Gguf::open(Path::new(&path))?;
    let bytes = gguf.bytes(gguf.tensor("b").ok_or("b")?)?;
    std::fs::OpenOptions::new().write(true).open(&path)?.set_len(100)?;
    let sum: u64 = bytes.iter().map(|b| u64::from(*b)).sum();
    Err(format!("read on, {sum}").into())
}

/// Row 76: a file that shrinks while its bytes are read.
#[cfg(unix)]
#[test]
fn a_file_cut_while_it_is_read_ends_in_words() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    let file = with(|f| {
        f.rows[1].dims = vec![1 << 18];
        f.data = vec![1; 96 + (4 << 18)];
    });
    std::fs::write(&path, file)?;
    let output = std::process::Command::new(std::env::current_exe()?)
        .args(["--exact", "cuts_what_it_reads", "--ignored", "--nocapture"])
        .env("MLA_CHECK_TEST_CUT", &path)
        .output()?;
    let said = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("error: the file became shorter while it was read"), "{said}");
    assert!(said.contains(&format!("where: {}, byte ", path.display())) && said.contains("  do: "), "{said}");
    Ok(())
}

/// A file that is written to, of the same length: its bytes are of two files.
#[test]
fn a_file_written_to_after_opening_is_an_error() -> Outcome {
    let folder = tempfile::tempdir()?;
    let gguf = open(folder.path(), &sound().bytes())?;
    gguf.unchanged()?;
    let file = std::fs::OpenOptions::new().write(true).open(folder.path().join("model.gguf"))?;
    file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(10))?;
    assert!(matches!(gguf.unchanged().err().ok_or("expected an error")?.problem(), Problem::Rewritten));
    assert!(gguf.bytes(&gguf.tensors()[0]).is_err());
    Ok(())
}

#[test]
fn every_truncation_is_refused() -> Outcome {
    let folder = tempfile::tempdir()?;
    let whole = sound().bytes();
    // The last 16 bytes are padding behind the last tensor, which a file may lack.
    for end in 0..whole.len() - 16 {
        let error = open(folder.path(), &whole[..end]).err().ok_or(format!("{end} bytes were accepted"))?;
        assert!(error.to_string().contains("model.gguf"), "{error}");
    }
    for end in whole.len() - 16..=whole.len() {
        open(folder.path(), &whole[..end])?;
    }
    Ok(())
}

#[test]
fn what_is_not_a_file_is_said() -> Outcome {
    let folder = tempfile::tempdir()?;
    let error = |path: &Path| Gguf::open(path).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error(folder.path()).contains("a folder"));
    let absent = error(&folder.path().join("absent.gguf"));
    assert!(absent.contains("cannot open the file") && absent.contains("absent.gguf"), "{absent}");
    #[cfg(unix)]
    {
        let pipe = folder.path().join("pipe.gguf");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status()?.success());
        assert!(error(&pipe).contains("a pipe"));
    }
    Ok(())
}

/// Part `no` (from 0) of a split of `count`, holding these tensors of the sound file.
fn part(no: u16, count: u16, total: i32, rows: &[usize]) -> File {
    let mut file = sound();
    file.rows = rows.iter().map(|&r| Row { offset: 0, ..file.rows[r].clone() }).collect();
    file.data.truncate(rows.iter().map(|r| [96, 32][*r]).sum());
    file.metadata.extend([
        pair(b"split.no", 2, &no.to_le_bytes()),
        pair(b"split.count", 2, &count.to_le_bytes()),
        pair(b"split.tensors.count", 5, &total.to_le_bytes()),
    ]);
    file
}

fn open_split(parts: &[(&str, File)], through: &str) -> Result<Gguf, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    for (name, file) in parts {
        std::fs::write(folder.path().join(name), file.bytes())?;
    }
    Ok(Gguf::open(&folder.path().join(through))?)
}

#[test]
fn splits() -> Outcome {
    let (one, two, three) = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "m-00003-of-00002.gguf");
    let sound = [(one, part(0, 2, 2, &[0])), (two, part(1, 2, 2, &[1]))];
    for through in [one, two] {
        let gguf = open_split(&sound, through)?;
        assert_eq!(gguf.tensors().iter().map(|t| t.part).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(gguf.warnings().len(), 0);
    }
    // Part 1 may hold no tensors.
    let gguf = open_split(&[(one, part(0, 2, 1, &[])), (two, part(1, 2, 1, &[1]))], two)?;
    assert_eq!(gguf.tensors().len(), 1);

    let refused = |parts: &[(&str, File)], through: &str| -> Result<String, Box<dyn Error>> {
        Ok(open_split(parts, through).err().ok_or("was accepted")?.to_string())
    };
    let mut foreign = part(1, 2, 2, &[1]);
    foreign.metadata[0] = pair(b"general.architecture", 8, &string(b"other"));
    let first = part(0, 2, 2, &[0]);
    for (row, parts, through, text) in [
        (
            "39 over parts",
            vec![(one, first.clone()), (two, part(1, 2, 2, &[0]))],
            one,
            "second time (first in part 1)",
        ),
        ("63 missing", vec![(one, first.clone())], one, "part 2 of 2 is missing"),
        ("63 renamed", vec![("m.gguf", first.clone())], "m.gguf", "its name does not end in"),
        ("63 renamed", vec![(three, part(1, 2, 2, &[1]))], three, "its name does not end in"),
        (
            "63 of another split",
            vec![(one, first.clone()), (two, foreign)],
            one,
            "part 2 is of another model",
        ),
        ("64 part 1 missing", vec![(two, part(1, 2, 2, &[1]))], two, "part 1 of 2 is missing"),
        ("65 total", vec![(one, part(0, 2, 3, &[0])), (two, part(1, 2, 3, &[1]))], one, "is 3, but"),
        ("75 swapped", vec![(one, part(1, 2, 2, &[1])), (two, first.clone())], one, "split.no"),
    ] {
        let message = refused(&parts, through)?;
        assert!(message.contains(text), "{row}: {message}");
        assert!(message.contains(".gguf"), "{row}: {message}");
    }
    Ok(())
}

#[test]
fn odd_splits_are_warned_of() -> Outcome {
    let mut file = part(0, 2, 2, &[0]);
    file.metadata[5] = pair(b"split.count", 4, &2u32.to_le_bytes());
    let (one, two) = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf");
    let gguf = open_split(&[(one, file), (two, part(1, 2, 2, &[1]))], one)?;
    assert!(gguf.warnings()[0].to_string().contains("u32"), "{:?}", gguf.warnings());
    let gguf = open_split(&[(one, sound())], one)?;
    assert!(gguf.warnings()[0].to_string().contains("nothing about a split"), "{:?}", gguf.warnings());
    Ok(())
}

/// A vocabulary of 150,000 tokens is checked, not copied.
#[test]
fn a_vocabulary_costs_no_memory() -> Outcome {
    let tokens: Vec<u8> = (0..150_000).flat_map(|i| string(format!("token {i}").as_bytes())).collect();
    let file = meta(pair(b"tokenizer.ggml.tokens", 9, &array(8, 150_000, &tokens)));
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, &file)?;
    let (gguf, held) = memory(|| Gguf::open(&path));
    assert!(held < 16384, "{held} bytes held");
    let gguf = gguf?;
    let Some(Value::Array(words)) = gguf.metadata().get("tokenizer.ggml.tokens") else { panic!("no array") };
    assert_eq!(words.iter().last(), Some(Value::String(b"token 149999")));
    Ok(())
}

/// A table as dense as it can be, of rows that are all odd.
#[test]
fn a_dense_table_costs_a_multiple_of_the_file() -> Outcome {
    let mut file = sound();
    let row = file.rows[1].clone();
    file.rows = (0..20_000u32)
        .map(|i| Row { name: i.to_le_bytes()[..3].to_vec(), dims: vec![0], ..row.clone() })
        .collect();
    let bytes = file.bytes();
    let folder = tempfile::tempdir()?;
    let (gguf, held) = memory(|| open(folder.path(), &bytes));
    assert_eq!(gguf?.tensors().len(), 20_000);
    assert!(held < justified(bytes.len()), "{held} bytes held for {}", bytes.len());
    Ok(())
}

/// 8,000 tensors of full size in five parts, without their data: headers are all that is read.
#[test]
fn headers_of_a_model_of_full_size_cost_little() -> Outcome {
    let folder = tempfile::tempdir()?;
    let (path, bytes) = sparse::write(folder.path(), &sparse::deepseek_v3(), 61, 128, 5);
    assert!(bytes > 500 << 30, "{bytes}");
    let (found, held) = memory(|| {
        mla_check::model::Model::open(&path).map(|m| (m.mla_layers().len(), mla_check::model::lint::lint(&m)))
    });
    let (layers, findings) = found?;
    assert_eq!(layers, 61);
    assert!(findings.iter().all(|f| !f.what.contains("missing")), "{findings:?}");
    // 8,000 tensors with their names in a list and a map: less than 1 KiB each.
    assert!(held < 8 << 20, "{held} bytes held");
    Ok(())
}

/// Reads everything that can be asked for.
fn read_all(gguf: &Gguf) -> Result<usize, GgufError> {
    let mut sum = gguf.warnings().iter().map(|w| w.to_string().len()).sum();
    for (key, value) in gguf.metadata().iter() {
        sum += key.len() + value.to_string().len();
        sum += gguf.metadata().u64_or_array(key).map_or(0, |v| v.map_or(0, |v| v.len()));
    }
    for tensor in gguf.tensors() {
        sum += gguf.bytes(tensor).map_or(0, |bytes| bytes.len());
    }
    Ok(sum)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    /// Any few bytes changed: a verdict, never a panic, and everything listed can be asked for.
    #[test]
    fn mutations(changes in prop::collection::vec((0usize..1000, prop_oneof![
        any::<u8>().prop_map(|b| vec![b]),
        any::<u64>().prop_map(|v| v.to_le_bytes().to_vec()),
        (0u32..64).prop_map(|s| (1u64 << s).to_le_bytes().to_vec()),
    ]), 1..4), cut in prop::option::of(0usize..1000)) {
        let mut bytes = sound().bytes();
        for (at, new) in changes {
            let at = at % (bytes.len() - 8);
            bytes[at..at + new.len()].copy_from_slice(&new);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.min(bytes.len()));
        }
        let folder = tempfile::tempdir()?;
        let (result, held) = memory(|| open(folder.path(), &bytes));
        prop_assert!(held < justified(bytes.len()), "held {held} bytes");
        if let Ok(gguf) = result {
            let read = read_all(&gguf);
            prop_assert!(read.is_ok());
        }
    }
}
