/*! `bench` as people use it where there is no GPU: what it refuses, and what kernels take, for which none is needed. */

#[path = "common/nvrtc.rs"]
mod environment;

use environment::nvrtc;
use std::path::Path;
use std::process::Command;

/// A process that sees no driver: exit code, stdout, stderr.
fn bench(args: &[&str]) -> (Option<i32>, String, String) {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(folder.path().join(name), "no library").unwrap();
    }
    let out = Command::new(env!("CARGO_BIN_EXE_mla-check"))
        .arg("bench")
        .args(args)
        .env("LD_LIBRARY_PATH", folder.path())
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (out.status.code(), text(out.stdout), text(out.stderr))
}

#[test]
fn without_a_gpu_it_says_what_is_missing_and_exits_5() {
    if Path::new("/dev/nvidiactl").exists() {
        return; // the loader goes on to the machine's own libcuda
    }
    let (code, out, error) = bench(&["--batch", "4", "--context", "100"]);
    assert_eq!((code, out.as_str()), (Some(5), ""), "{error}");
    assert!(error.contains("\n  where: ") && error.contains("\n  do: "), "{error}");
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_else() {
    let cases: [(&[&str], &str); 6] = [
        (&["--engine", "ptx"], "engine ptx can't be timed: an emulated machine's time says nothing"),
        (&["--engine", "reference"], "it runs no kernels"),
        (&["--stage", "q_a,attention"], "there is no stage \"attention\""),
        (&["--batch", "3"], "--context"),
        (&["--tokens", "1"], "1 is not in 2.."),
        (&["--kernels", "/absent"], "where: /absent"),
    ];
    for (args, word) in cases {
        let (code, _, error) = bench(args);
        assert_eq!(code, Some(2), "{args:?}: {error}");
        assert!(error.contains(word), "{args:?}: {error}");
    }
}

/// One target, a folder of one file: figures of every entry point in text and JSON.
#[test]
fn resources_are_those_of_the_compiled_code() {
    let Some(_) = nvrtc("resources_are_those_of_the_compiled_code") else { return };
    let (code, out, error) = bench(&["--resources", "--target", "sm_90", "--format", "json"]);
    assert_eq!(code, Some(0), "{error}");
    let rows: serde_json::Value = serde_json::from_str(&out).unwrap();
    // Of files that depend on the widths of heads two for each dtype, of all others one; what takes the same is one row.
    let of = |entry: &str| {
        let all = rows.as_array().unwrap().iter().filter(|r| r["entry"] == entry);
        all.map(|r| r["dtypes"].as_array().unwrap().len()).sum::<usize>()
    };
    assert_eq!((of("rms_norm"), of("fused")), (3, 6));
    let norm = rows.as_array().unwrap().iter().find(|r| r["entry"] == "rms_norm").unwrap();
    let taken = &norm["targets"][0];
    assert_eq!((&norm["geometry"], &taken["target"]), (&"".into(), &"sm_90".into()));
    // A float for each of 8 warps; nothing spilled; eight blocks of 256 threads where registers allow.
    assert_eq!(
        (&norm["threads"], &taken["static_shared"], &taken["local"]),
        (&256.into(), &32.into(), &0.into())
    );
    assert_eq!(taken["blocks"], 8, "{taken}");
    assert!(taken["registers"].as_u64().unwrap() <= 32);
}
