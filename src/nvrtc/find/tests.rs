/*! The search, on folders made for it; no variable of this process is read or set. */

use super::*;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A folder with empty files of these names.
fn folder(root: &Path, below: &str, files: &[&str]) -> PathBuf {
    let folder = root.join(below);
    std::fs::create_dir_all(&folder).unwrap();
    for file in files {
        std::fs::write(folder.join(file), b"").unwrap();
    }
    folder
}

fn v(major: u32, minor: u32) -> Option<Version> {
    Some(Version { major, minor })
}

const WHEEL_13: [&str; 4] =
    ["libnvrtc.so.13", "libnvrtc.alt.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0"];
const WHEEL_12: [&str; 2] = ["libnvrtc.so.12", "libnvrtc-builtins.so.12.9"];

fn libraries(search: &Search) -> Vec<(PathBuf, Option<Version>)> {
    search.candidates().unwrap().0.into_iter().map(|c| (c.library, c.version)).collect()
}

#[test]
fn a_named_file_or_folder_is_the_only_place() {
    let root = tempfile::tempdir().unwrap();
    let lib = folder(root.path(), "nvidia/cu13/lib", &WHEEL_13);
    folder(root.path(), "cuda/lib64", &WHEEL_12);
    let expected = Candidate {
        library: lib.join("libnvrtc.so.13"),
        builtins: Some(lib.join("libnvrtc-builtins.so.13.0")),
        version: v(13, 0),
    };
    for named in [lib.clone(), lib.join("libnvrtc.so.13"), root.path().into(), root.path().join("nvidia")] {
        let toolkits = vec![root.path().join("cuda")];
        let search = Search { named: Some(named), toolkits, system: true, ..Search::default() };
        assert_eq!(search.candidates().unwrap().0, std::slice::from_ref(&expected));
    }
}

#[test]
fn a_named_place_without_the_library_is_an_error_with_its_place() {
    let root = tempfile::tempdir().unwrap();
    let stubs = folder(root.path(), "lib64/stubs", &["libnvrtc.so"]);
    let empty =
        folder(root.path(), "empty", &["libnvrtc.alt.so.13", "libnvrtc.so.old", "libnvrtc-builtins.so.13.0"]);
    let cases = [
        (root.path().join("absent"), "no such file"),
        (empty, "no libnvrtc.so"),
        (stubs.clone(), "stubs"),
        (stubs.join("libnvrtc.so"), "stubs"),
    ];
    for (named, word) in cases {
        let search = Search { named: Some(named.clone()), system: true, ..Search::default() };
        let error = search.candidates().unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(word) && text.contains(&format!("where: {} (named by MLA", named.display())),
            "{text}"
        );
        assert!(error.is_unavailable());
    }
}

#[test]
fn the_pinned_version_comes_first_then_higher_ones_then_the_system() {
    let root = tempfile::tempdir().unwrap();
    let old = folder(root.path(), "cuda-12/lib64", &WHEEL_12);
    let new = folder(root.path(), "cuda-13.5/lib64", &["libnvrtc.so.13", "libnvrtc-builtins.so.13.5"]);
    let venv = root.path().join("venv");
    let wheel = folder(&venv, "lib/python3.12/site-packages/nvidia/cu13/lib", &WHEEL_13);
    let toolkits = vec![root.path().join("cuda-12"), root.path().join("cuda-13.5"), root.path().join("gone")];
    let search = Search { toolkits, environments: vec![venv], ..Search::default() };
    let expected = [
        (wheel.join("libnvrtc.so.13"), v(13, 0)),
        (new.join("libnvrtc.so.13"), v(13, 5)),
        (old.join("libnvrtc.so.12"), v(12, 9)),
    ];
    assert_eq!(libraries(&search), expected);
    let search = Search { system: true, ..search };
    assert_eq!(libraries(&search)[..3], expected);
    assert_eq!(libraries(&search)[3], ("libnvrtc.so.13".into(), None));
    let looked = search.candidates().unwrap().1;
    assert!(looked.iter().any(|l| l.ends_with("/gone")), "{looked:?}");
}

#[cfg(unix)]
#[test]
fn links_of_a_toolkit_tell_the_version() {
    let root = tempfile::tempdir().unwrap();
    let files = ["libnvrtc.so.13.0.88", "libnvrtc-builtins.so.13.0.88", "libnvrtc-builtins.so.13.1"];
    let lib = folder(root.path(), "lib64", &files);
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, lib.join(name)).unwrap();
    link("libnvrtc.so.13.0.88", "libnvrtc.so.13");
    link("libnvrtc.so.13", "libnvrtc.so");
    link("libnvrtc-builtins.so.13.0.88", "libnvrtc-builtins.so.13.0");
    let found = in_folder(&lib).unwrap();
    assert_eq!(found.library, lib.join("libnvrtc.so.13"));
    assert_eq!(found.version, v(13, 0));
    assert_eq!(found.builtins, Some(lib.join("libnvrtc-builtins.so.13.0")));
}

#[test]
fn the_environment_is_what_is_passed() {
    let values = |pairs: &'static [(&str, &str)]| {
        move |name: &str| pairs.iter().find(|p| p.0 == name).map(|p| OsString::from(p.1))
    };
    let search = Search::with(&values(&[("CUDA_PATH", "/a"), ("VIRTUAL_ENV", "/v"), ("CUDA_HOME", "/h")]));
    assert_eq!(search.named, None);
    // Behind these come the machine's own.
    assert_eq!(search.toolkits[..3], ["/h", "/a", "/usr/local/cuda"].map(PathBuf::from));
    assert_eq!(search.environments, [PathBuf::from("/v")]);
    assert!(search.system);
    let search = Search::with(&values(&[("MLA_CHECK_NVRTC", "/n"), ("CUDA_HOME", "")]));
    assert_eq!((search.named, &search.toolkits[0]), (Some("/n".into()), &"/usr/local/cuda".into()));
    let conda = Search::with(&values(&[("CONDA_PREFIX", "/c")]));
    assert_eq!(conda.toolkits[..2], ["/c", "/usr/local/cuda"].map(PathBuf::from));
    assert_eq!(conda.environments, [PathBuf::from("/c")]);
    assert_eq!(Search::with(&values(&[("MLA_CHECK_NVRTC", "")])).named, None);
}

/// Toolkits by their versions, and the folder of libraries that NVIDIA's packages for distributions use.
#[test]
fn installed_toolkits_are_found_without_a_link() {
    let root = tempfile::tempdir().unwrap();
    let lib = folder(root.path(), "cuda-13.0/targets/x86_64-linux/lib", &WHEEL_13);
    folder(root.path(), "cuda-13.0/lib64/stubs", &["libnvrtc.so"]);
    folder(root.path(), "cudnn/lib64", &WHEEL_12);
    let toolkits = installed(root.path());
    assert_eq!(toolkits, [root.path().join("cuda"), root.path().join("cuda-13.0")]);
    let found = libraries(&Search { toolkits, ..Search::default() });
    assert_eq!(found, [(lib.join("libnvrtc.so.13"), v(13, 0))]);
}

/// One test at a time: a program can't be started while a sibling that is being started still holds its file open.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A program that answers as a Python would.
#[cfg(unix)]
fn python(root: &Path, script: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = root.join("python3");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[cfg(unix)]
#[test]
fn a_python_is_asked_only_where_the_pinned_version_is_not_found() {
    let _alone = alone();
    let root = tempfile::tempdir().unwrap();
    let wheel = folder(root.path(), "site/nvidia/cu13/lib", &WHEEL_13);
    folder(root.path(), "cuda/lib64", &WHEEL_12);
    folder(root.path(), "other/lib64", &WHEEL_13);
    let mark = root.path().join("asked");
    let answer =
        format!("touch {}; echo {}/site/nvidia; echo relative", mark.display(), root.path().display());
    let python = Some(python(root.path(), &answer));
    let toolkits = vec![root.path().join("other")];
    libraries(&Search { toolkits, python: python.clone(), ..Search::default() });
    assert!(!mark.exists());
    let found = libraries(&Search { toolkits: vec![root.path().join("cuda")], python, ..Search::default() });
    assert!(mark.exists());
    assert_eq!(found[0], (wheel.join("libnvrtc.so.13"), v(13, 0)));
    assert_eq!(found[1].1, v(12, 9));
}

#[cfg(unix)]
#[test]
fn a_python_that_hangs_fails_or_is_absent_is_passed_over() {
    let _alone = alone();
    let root = tempfile::tempdir().unwrap();
    let start = Instant::now();
    // The grandchild keeps the pipe open after its parent was ended.
    assert_eq!(ask(&python(root.path(), "sleep 20 & sleep 20"), Duration::from_millis(200)), None);
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(ask(&python(root.path(), "exit 1"), PATIENCE), None);
    assert_eq!(ask(&root.path().join("absent"), PATIENCE), None);
    let search = Search { python: Some(root.path().join("absent")), ..Search::default() };
    let (found, looked) = search.candidates().unwrap();
    assert!(found.is_empty() && looked[0].contains("absent"), "{looked:?}");
}
