/*!
The PTX that the machine's tests run (`ptx/tests/ptx`) is what NVRTC makes of the sources in `ptx/tests/kernels`: set
`MLA_CHECK_NVRTC` to a libnvrtc.so or its folder. Without it, or with another version than the pinned one, this test does
nothing and says so; with `MLA_CHECK_REQUIRE_NVRTC=1` it fails.

Each file's first lines name its source, the replacement that made a fault of it, the entries that were kept and the
options: from those it is made again.
*/

#[path = "common/nvrtc.rs"]
mod environment;

use environment::nvrtc;
use mla_check::nvrtc::{Options, PINNED, Source, Target, stamp};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What a committed file says of itself.
#[derive(Debug, PartialEq)]
struct Head<'t> {
    entries: Vec<&'t str>,
    source: &'t str,
    replaced: Option<(String, String)>,
    target: Target,
    lines: bool,
}

/// Python's way of writing a string: in single or double quotes, with backslashes; and what follows it.
fn literal(text: &str) -> (String, &str) {
    let quote = text.chars().next().unwrap();
    assert!(matches!(quote, '\'' | '"'), "{text}");
    let (mut out, mut rest) = (String::new(), text[1..].char_indices());
    while let Some((at, c)) = rest.next() {
        match c {
            c if c == quote => return (out, &text[at + 2..]),
            '\\' => match rest.next().unwrap().1 {
                'n' => out.push('\n'),
                c @ ('\\' | '\'' | '"') => out.push(c),
                c => panic!("escape {c:?} in {text}"),
            },
            c => out.push(c),
        }
    }
    panic!("no end: {text}")
}

fn head(ptx: &str) -> Head<'_> {
    let mut lines = ptx.lines();
    let first = lines.next().and_then(|l| l.strip_prefix("// entries ")).unwrap();
    let (entries, source) = first.split_once(" of ").unwrap();
    let (source, replaced) = match source.split_once(", with ") {
        None => (source, None),
        Some((source, rest)) => {
            let (old, rest) = literal(rest);
            let (new, rest) = literal(rest.strip_prefix(" replaced by ").unwrap());
            assert_eq!(rest, "");
            (source, Some((old, new)))
        }
    };
    let options = lines.nth(1).and_then(|l| l.split_once(", options ")).unwrap().1;
    let mut options = options.split(' ');
    let target = options.next().and_then(|o| o.strip_prefix("--gpu-architecture=")).unwrap();
    assert_eq!((options.next(), options.next()), (Some("--std=c++17"), Some("-fmad=false")));
    let lines = options.next() == Some("-lineinfo");
    Head { entries: entries.split(' ').collect(), source, replaced, target: target.parse().unwrap(), lines }
}

/// The module's head and the named entries, without comments, debug sections and folders: as make.py keeps them.
fn kept(ptx: &str, entries: &[&str]) -> String {
    let (mut out, mut keep) = (String::new(), true);
    for line in ptx.lines() {
        if let Some(entry) = line.strip_prefix(".visible .entry ") {
            keep = entries.contains(&entry.split('(').next().unwrap());
        }
        let word = line.trim_start();
        let debug = word.starts_with(".section") && word.contains(".debug");
        if keep && (debug || word.starts_with("//")) {
            // With the empty lines before it.
            out.truncate(out.trim_end().len());
            out.push('\n');
        }
        if debug {
            break;
        }
        if !keep || word.starts_with("//") {
            continue;
        }
        match line.split_once('"').filter(|_| word.starts_with(".file")) {
            Some((before, name)) => {
                out.push_str(before);
                out.push('"');
                let (name, after) = name.split_once('"').unwrap();
                out.push_str(name.rsplit('/').next().unwrap());
                out.push('"');
                out.push_str(after);
            }
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    all.sort();
    all.into_iter().flat_map(|p| if p.is_dir() { files(&p) } else { vec![p] }).collect()
}

#[test]
fn committed_ptx_is_made_from_the_committed_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("ptx/tests");
    let files = files(&root.join("ptx"));
    assert!(files.len() > 20, "{}", files.len());
    let texts: Vec<(&PathBuf, String)> =
        files.iter().map(|f| (f, std::fs::read_to_string(f).unwrap())).collect();
    // Their heads can be read with and without the compiler.
    let heads: Vec<Head<'_>> = texts.iter().map(|(_, text)| head(text)).collect();
    let test = "committed_ptx_is_made_from_the_committed_sources";
    let Some(nvrtc) = nvrtc(test) else { return };
    if nvrtc.version() != PINNED {
        let required = std::env::var_os("MLA_CHECK_REQUIRE_NVRTC").is_some_and(|v| v == "1");
        assert!(!required, "MLA_CHECK_REQUIRE_NVRTC=1, but this is NVRTC {}", nvrtc.version());
        let _ = writeln!(std::io::stderr(), "{test}: NOT RUN, this is NVRTC {}", nvrtc.version());
        return;
    }
    for ((file, committed), head) in texts.iter().zip(heads) {
        let mut source = std::fs::read_to_string(root.join("kernels").join(head.source)).unwrap();
        if let Some((old, new)) = &head.replaced {
            assert!(source.contains(old), "{}: {} has no {old:?}", file.display(), head.source);
            source = source.replacen(old, new, 1);
        }
        let options = Options { line_info: head.lines, ..Options::default() };
        let made = nvrtc.compile(&Source::new(head.source, source), head.target, &options);
        let made = made.unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        if let Err(e) = stamp::same_code(committed, &kept(&made.ptx, &head.entries)) {
            panic!("{}: {e}; make it again with ptx/tests/kernels/make.py", file.display());
        }
    }
}

#[test]
fn a_replacement_is_read_as_python_writes_it() {
    let text = "// entries a b of x.cu, with 'p\\n  \"q\"' replaced by \"it's\"\n// sha256\n\
                // NVRTC 13.0 (wheel), options --gpu-architecture=compute_90 --std=c++17 -fmad=false -lineinfo\n";
    let want = Head {
        entries: vec!["a", "b"],
        source: "x.cu",
        replaced: Some(("p\n  \"q\"".into(), "it's".into())),
        target: Target::compute(90),
        lines: true,
    };
    assert_eq!(head(text), want);
}
