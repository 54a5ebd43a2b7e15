/*! Readers of other software's arrays: what NumPy, safetensors and torch.save write, and files that are damaged. */

mod common;

use common::fixture;
use mla_check::trace::read::{Array, Dump, Stored};
use mla_numeric::DType;
use proptest::prelude::*;
use std::path::Path;

fn read(dump: &Dump, name: &str) -> Array {
    dump.read(dump.find(name).unwrap_or_else(|| panic!("no {name} in {:?}", names(dump)))).unwrap()
}

fn names(dump: &Dump) -> Vec<&str> {
    dump.entries().iter().map(|e| e.name.as_str()).collect()
}

fn values(a: &Array) -> Vec<f64> {
    let Stored::Float(d) = a.stored else { panic!("{}", a.stored) };
    let mut out = vec![0.0; a.len()];
    d.decode(&a.bytes, &mut out);
    out
}

fn counting(n: usize) -> Vec<f64> {
    (0..n).map(|i| i as f64).collect()
}

#[test]
fn numpy_archives() {
    for file in ["dump/small.npz", "dump/stored.npz"] {
        let dump = Dump::open(&fixture(file)).unwrap();
        assert_eq!(names(&dump), ["a", "b", "n"]);
        let (a, b) = (read(&dump, "a"), read(&dump, "b"));
        assert_eq!((a.stored, a.shape.as_slice()), (Stored::Float(DType::F32), &[2, 3, 4][..]));
        assert_eq!((b.stored, b.shape.as_slice()), (Stored::Float(DType::F16), &[2, 3][..]));
        assert_eq!((values(&a), values(&b)), (counting(24), counting(6)));
        assert_eq!(read(&dump, "n").integers().unwrap(), [3, 1, 2]);
    }
}

/// As Python writes it in the form of torch.save, and as PyTorch 2.15 does.
#[test]
fn torch_archives() {
    for file in ["dump/small.pt", "dump/torch.pt"] {
        let dump = Dump::open(&fixture(file)).unwrap();
        assert_eq!(names(&dump)[..5], ["whole", "turned", "wide", "list.0", "state.w"], "{file}");
        assert_eq!(values(&read(&dump, "whole")), counting(24));
        // Element (i, j) of `turned` is 1 + 3i + 12j.
        let turned = read(&dump, "turned");
        assert_eq!(
            (turned.shape.as_slice(), values(&turned)),
            (&[4, 2][..], vec![1., 13., 4., 16., 7., 19., 10., 22.])
        );
        assert_eq!(values(&read(&dump, "wide")), [0.5, 3., 0.5, 3., 0.5, 3.]);
        assert_eq!(read(&dump, "list.0").integers().unwrap(), [3, 1, 2]);
        let w = read(&dump, "state.w");
        assert_eq!((w.stored, values(&w)), (Stored::Float(DType::Bf16), vec![1., -2.5, 0.5, 3.]));
    }
    let dump = Dump::open(&fixture("dump/torch.pt")).unwrap();
    assert_eq!(names(&dump)[5..], ["f16", "e4m3", "i32", "empty", "scalar"]);
    let f16 = read(&dump, "f16");
    assert_eq!((f16.stored, values(&f16)), (Stored::Float(DType::F16), vec![1.5, -0.25]));
    let e4m3 = read(&dump, "e4m3");
    assert_eq!((e4m3.stored, values(&e4m3)), (Stored::Float(DType::E4m3), vec![1.0, -448.0]));
    assert_eq!(read(&dump, "i32").integers().unwrap(), [-1, 2]);
    assert_eq!(read(&dump, "empty").shape, [0, 3]);
    let scalar = read(&dump, "scalar");
    assert_eq!((scalar.shape.as_slice(), values(&scalar)), (&[][..], vec![2.5]));
}

#[test]
fn folders_and_what_is_no_array() {
    let dir = tempfile::tempdir().unwrap();
    let bad = |path: &Path, words: &str| {
        let e = Dump::open(path).map(|_| ()).unwrap_err().to_string();
        assert!(e.contains(words) && e.contains("\n  where: ") && e.contains("\n  do: "), "{e}");
    };
    bad(dir.path(), "holds no arrays");
    bad(&dir.path().join("gone.npy"), "No such file");
    std::fs::write(dir.path().join("x.txt"), "x").unwrap();
    bad(&dir.path().join("x.txt"), "kind");
    std::fs::copy(fixture("dump/small.pt"), dir.path().join("many.pt")).unwrap();
    std::fs::copy(fixture("oracle/glm5dims.Q4_K_M.safetensors"), dir.path().join("o.safetensors")).unwrap();
    let dump = Dump::open(dir.path()).unwrap();
    assert_eq!(names(&dump)[0], "many/whole");
    assert!(names(&dump).iter().any(|n| n.starts_with("o/")));
    for (text, words) in [(&b"PK\x03\x04"[..], "directory"), (b"", "empty")] {
        std::fs::write(dir.path().join("p.pt"), text).unwrap();
        bad(&dir.path().join("p.pt"), words);
    }
}

/// Opens and reads everything; only what it says is of interest, not that it can be read.
fn swallow(name: &str, bytes: &[u8]) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    if let Ok(dump) = Dump::open(&path) {
        for entry in dump.entries() {
            let _ = dump.read(entry);
        }
    }
}

const FILES: [&str; 5] =
    ["dump/small.npz", "dump/stored.npz", "dump/small.pt", "dump/torch.pt", "dump/b.npy"];

fn bytes(file: &str) -> Vec<u8> {
    if file.ends_with(".npy") {
        let mut all = b"\x93NUMPY\x01\x00".to_vec();
        let header = "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }\n";
        all.extend((header.len() as u16).to_le_bytes());
        all.extend(header.as_bytes());
        all.extend([7; 24]);
        return all;
    }
    std::fs::read(fixture(file)).unwrap()
}

#[test]
fn cut_files_are_errors() {
    for file in FILES {
        let (all, name) = (bytes(file), file.rsplit('/').next().unwrap());
        for n in (0..all.len()).step_by(7) {
            swallow(name, &all[..n]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Bits turned anywhere: errors or other values, no panic, no endless memory.
    #[test]
    fn damaged_files_never_panic(
        file in 0..FILES.len(),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut all = bytes(FILES[file]);
        for (at, value) in flips {
            let at = at.index(all.len());
            all[at] = value;
        }
        swallow(FILES[file].rsplit('/').next().unwrap(), &all);
    }
}
