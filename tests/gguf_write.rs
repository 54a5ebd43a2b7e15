//! The writer: the same bytes as other software, and nothing half-written.

use mla_check::gguf::write::{MetaValue, Writer};
use mla_check::gguf::{Gguf, Problem, Value, ValueType};
use mla_reference::ggml::GgmlType;
use std::error::Error;
use std::io;
use std::path::Path;

type Outcome = Result<(), Box<dyn Error>>;

const SMALL: &[u8] = include_bytes!("../fixtures/gguf/small.gguf");

/// What `fixtures/gguf/README.md` says of `small.gguf`.
fn small() -> Writer {
    let mut writer = Writer::new();
    let array = |ty, values: Vec<MetaValue>| MetaValue::Array(ty, values);
    writer
        .meta("general.architecture", "test")
        .meta("t.u8", u8::MAX)
        .meta("t.i8", i8::MIN)
        .meta("t.u16", u16::MAX)
        .meta("t.i16", i16::MIN)
        .meta("t.u32", u32::MAX)
        .meta("t.i32", i32::MIN)
        .meta("t.f32", 1e-6f32)
        .meta("t.bool", true)
        .meta("t.string", "grüße")
        .meta("t.u64", u64::MAX)
        .meta("t.i64", i64::MIN)
        .meta("t.f64", 1e-6f64)
        .meta("t.words", array(ValueType::String, vec!["a".into(), "".into(), "bc".into()]))
        .meta("t.numbers", array(ValueType::I32, vec![1i32.into(), (-2i32).into(), 3i32.into()]))
        .meta("t.flags", array(ValueType::Bool, vec![true.into(), false.into()]))
        .alignment(64)
        .tensor("one.weight", &[3, 2], GgmlType::F32)
        .tensor("two.weight", &[32, 2], GgmlType::Q8_0);
    writer
}

fn data(tensor: usize, out: &mut dyn io::Write) -> io::Result<()> {
    match tensor {
        0 => (0..6u8).try_for_each(|v| out.write_all(&f32::from(v).to_le_bytes())),
        _ => (0..68u8).try_for_each(|v| out.write_all(&[v])),
    }
}

fn names(folder: &Path) -> io::Result<Vec<String>> {
    std::fs::read_dir(folder)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect()
}

#[test]
fn writes_the_bytes_of_gguf_py() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("small.gguf");
    let length = small().write(&path, &mut data)?;
    assert!(std::fs::read(&path)? == SMALL);
    assert_eq!(length, SMALL.len() as u64);
    Ok(())
}

#[test]
fn reads_every_type_of_value() -> Outcome {
    let gguf = Gguf::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/gguf/small.gguf"))?;
    let m = gguf.metadata();
    for (key, value) in [
        ("t.u8", Value::U8(255)),
        ("t.i8", Value::I8(-128)),
        ("t.u16", Value::U16(65535)),
        ("t.i16", Value::I16(-32768)),
        ("t.u32", Value::U32(u32::MAX)),
        ("t.i32", Value::I32(i32::MIN)),
        ("t.f32", Value::F32(1e-6)),
        ("t.bool", Value::Bool(true)),
        ("t.string", Value::String("grüße".as_bytes())),
        ("t.u64", Value::U64(u64::MAX)),
        ("t.i64", Value::I64(i64::MIN)),
        ("t.f64", Value::F64(1e-6)),
    ] {
        assert_eq!(m.get(key), Some(value));
    }
    assert_eq!(m.u64("t.u64")?, Some(u64::MAX));
    assert!(m.u64("t.i8").is_err());
    assert!(m.u64_or_array("t.numbers").is_err());
    assert!(m.f64("t.u64").is_err(), "2^64 - 1 is no float64");
    assert_eq!(m.f64("t.f32")?, Some(f64::from(1e-6f32)));
    assert_eq!(m.u64_or_array("t.flags")?, Some(vec![1, 0]));
    assert_eq!((gguf.parts()[0].alignment(), gguf.parts()[0].version()), (64, 3));
    assert_eq!(gguf.warnings().len(), 0);
    assert_eq!(gguf.bytes(gguf.tensor("two.weight").ok_or("two")?)?, (0..68).collect::<Vec<u8>>());
    Ok(())
}

#[test]
fn a_failed_write_leaves_the_old_file() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, "whole")?;
    let full = small().write(&path, &mut |_, _| Err(io::ErrorKind::StorageFull.into()));
    let full = full.err().ok_or("expected an error")?;
    assert!(matches!(full.problem(), Problem::Io { .. }));
    assert!(full.to_string().contains("one.weight") && full.to_string().contains("room"), "{full}");
    let short = small().write(&path, &mut |_, out| out.write_all(&[0; 24]));
    let short = short.err().ok_or("expected an error")?;
    assert!(matches!(short.problem(), Problem::DataLength { written: 24, needed: 68 }), "{short}");
    assert_eq!(std::fs::read(&path)?, b"whole");
    assert_eq!(names(folder.path())?, ["model.gguf"]);
    Ok(())
}

#[test]
fn bad_targets_and_tensors_are_errors() -> Outcome {
    let folder = tempfile::tempdir()?;
    for path in [folder.path().join("absent/model.gguf"), folder.path().to_owned(), "/".into()] {
        let error = small().write(&path, &mut data).err().ok_or("expected an error")?.to_string();
        assert!(
            error.contains("cannot create the file") && error.contains(&*path.to_string_lossy()),
            "{error}"
        );
    }
    let path = folder.path().join("model.gguf");
    for (dims, ty) in [(vec![48], GgmlType::Q8_0), (vec![1 << 40, 1 << 40], GgmlType::F32)] {
        let mut writer = Writer::new();
        writer.tensor("t", &dims, ty);
        assert!(writer.write(&path, &mut data).is_err());
    }
    assert!(Writer::new().alignment(24).write(&path, &mut data).is_err());
    assert_eq!(names(folder.path())?, [""; 0]);
    Ok(())
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() -> Outcome {
    // A file that may not grow past 64 blocks stands in for a full disk: the shell lowers the limit for
    // this very test, run again with a variable that says where to write.
    if let Ok(path) = std::env::var("MLA_CHECK_TEST_FULL") {
        let mut writer = Writer::new();
        writer.tensor("big", &[1 << 20], GgmlType::F32);
        let error = writer.write(Path::new(&path), &mut |_, out| out.write_all(&[0; 1 << 22]));
        let error = error.err().ok_or("expected an error")?.to_string();
        assert!(error.contains("\"big\""), "{error}");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    let status = std::process::Command::new("sh")
        .args([
            "-c",
            "trap '' XFSZ; ulimit -f 64; exec \"$0\" --exact a_full_disk_is_an_error >/dev/null 2>&1",
        ])
        .arg(std::env::current_exe()?)
        .env("MLA_CHECK_TEST_FULL", &path)
        .status()?;
    assert!(status.success());
    assert_eq!(names(folder.path())?, [""; 0]);
    Ok(())
}
