//! A git repository with a regression in its history, and `git bisect run` that looks for it.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A commit: its message, and the files that it changes.
pub type Commit<'a> = (&'a str, Vec<(&'a str, String)>);

/// A repository in a folder of its own, which knows nothing of the user's settings.
pub struct Repository(tempfile::TempDir);

/// The program. A test binary that was carried to another machine is told where it lies.
pub fn program() -> PathBuf {
    match std::env::var_os("MLA_CHECK_PROGRAM") {
        Some(path) => path.into(),
        None => option_env!("CARGO_BIN_EXE_mla-check").unwrap_or("mla-check").into(),
    }
}

/// What a bisection lacks here: a test binary may have been carried to a machine without the program or without git.
pub fn lacking() -> Option<String> {
    let runs = |command: &Path| Command::new(command).arg("--version").output().is_ok();
    if !runs(&program()) {
        return Some("the program is not there, name it by MLA_CHECK_PROGRAM".into());
    }
    (!runs(Path::new("git"))).then(|| "there is no git".into())
}

/// A model of the repository's fixtures.
pub fn model() -> PathBuf {
    let name = Path::new("fixtures/models/dsv3.Q4_K_M-00001-of-00003.gguf");
    match name.canonicalize() {
        Ok(path) => path,
        Err(_) => Path::new(env!("CARGO_MANIFEST_DIR")).join(name),
    }
}

pub fn text(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

impl Repository {
    /// With these commits, one after the other.
    pub fn new(history: &[Commit]) -> Repository {
        let repository = Repository(tempfile::tempdir().unwrap());
        repository.git(&["init", "--quiet", "--initial-branch=main"]);
        for (n, (message, files)) in history.iter().enumerate() {
            for (name, text) in files {
                let path = repository.path().join(name);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            std::fs::write(repository.path().join("NOTES"), format!("{n}\n")).unwrap();
            repository.git(&["add", "--all"]);
            repository.git(&["commit", "--quiet", "--message", message]);
        }
        repository
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A command in the repository's folder.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.path()).env("RUST_BACKTRACE", "0");
        for (name, value) in [
            ("GIT_CONFIG_GLOBAL", "/dev/null"),
            ("GIT_CONFIG_NOSYSTEM", "1"),
            ("GIT_AUTHOR_NAME", "test"),
            ("GIT_AUTHOR_EMAIL", "test@localhost"),
            ("GIT_COMMITTER_NAME", "test"),
            ("GIT_COMMITTER_EMAIL", "test@localhost"),
        ] {
            command.env(name, value);
        }
        command
    }

    pub fn git(&self, args: &[&str]) -> String {
        let out = self.command(Path::new("git")).args(args).output().unwrap();
        assert!(out.status.success(), "git {args:?}: {}", text(&out));
        text(&out)
    }

    /// The program on what is checked out.
    pub fn check(&self, args: &[&str]) -> Output {
        self.command(&program()).args(args).output().unwrap()
    }

    /// What `git bisect run` says, from the first commit, which is good, to the last, which is bad.
    pub fn bisect(&self, command: &[&str]) -> String {
        let first = self.git(&["rev-list", "--max-parents=0", "HEAD"]);
        self.git(&["bisect", "start", "main", first.trim()]);
        let out = self.command(Path::new("git")).args(["bisect", "run"]).args(command).output().unwrap();
        let said = text(&out);
        self.git(&["bisect", "reset", "main"]);
        said
    }
}

/// The message of the commit that a bisection names; None where it names none.
pub fn culprit(said: &str) -> Option<&str> {
    let rest = said.split_once("is the first bad commit")?.1;
    rest.lines().filter(|l| l.starts_with("    ")).map(str::trim).find(|l| !l.is_empty())
}

/// The texts of kernels that a history is made of: norm.cu and merge.cu, right and wrong.
pub struct Kernels {
    norm: String,
    merge: String,
}

/// A wrong base in the merge of splits: decode alone, long after the norms.
const REGRESSION: [&str; 2] = ["LOG2_E = 1.4426950408889634f", "LOG2_E = 1.f"];
/// A warp's share of a norm's sum is lost: everything after it has other inputs.
const OTHER: [&str; 2] = ["for (int w = 1; w < WARPS", "for (int w = 2; w < WARPS"];
/// What no compiler takes.
const BROKEN: [&str; 2] = ["float sum = 0.f;", "float sum = nothing;"];

impl Kernels {
    pub fn new() -> Kernels {
        let library = mla_check::engine::kernels::library::Library::built_in().unwrap();
        let text = |name: &str| library.file(name).unwrap().source.text.clone();
        Kernels { norm: text("norm.cu"), merge: text("merge.cu") }
    }

    fn with(text: &str, [from, to]: [&str; 2]) -> String {
        assert!(text.contains(from), "no {from:?} in it");
        text.replacen(from, to, 1)
    }

    /// Twelve commits: a fault comes and goes; the two in the middle, where git looks first, do not compile; then come the regression
    /// and the first fault once more.
    pub fn history(&self) -> Vec<Commit<'static>> {
        let norm = |text: &str| vec![("kernels/norm.cu", text.to_string())];
        let other = Kernels::with(&self.norm, OTHER);
        let broken = Kernels::with(&self.norm, BROKEN);
        let merge = |text: String| vec![("kernels/merge.cu", text)];
        let commented = format!("{}// Splits are joined first to last.\n", self.merge);
        vec![
            ("begin", [norm(&self.norm), merge(self.merge.clone())].concat()),
            ("a comment", merge(commented)),
            ("notes", Vec::new()),
            ("norm: unroll", norm(&other)),
            ("norm: take the unrolling back", norm(&self.norm)),
            ("norm: wider sums", norm(&broken)),
            ("notes again", Vec::new()),
            ("norm: mend the build", norm(&self.norm)),
            ("merge: base 2 throughout", merge(Kernels::with(&self.merge, REGRESSION))),
            ("norm: unroll once more", norm(&other)),
            ("norm: and back", norm(&self.norm)),
            ("release", Vec::new()),
        ]
    }
}

/// A bisection of kernels with an engine: the run that records the regression, the search for it, and what git is told of a
/// commit that does not compile.
pub fn kernels(engine: &str) {
    let repository = Repository::new(&Kernels::new().history());
    let (model, program) = (model(), program());
    let (model, program) = (model.to_str().unwrap(), program.to_str().unwrap());
    let run = [
        "run",
        model,
        "--engine",
        engine,
        "--kernels",
        "kernels",
        "--form",
        "absorbed",
        "--batch",
        "70+1",
        "--regime",
        "random",
        "--splits",
        "2",
        "--reference-cache",
        ".git/reference",
        "--quiet",
    ];
    let check = |code: i32, more: &[&str]| {
        let out = repository.check(&[&run[..], more].concat());
        assert_eq!(out.status.code(), Some(code), "{more:?}: {}", text(&out));
    };
    check(1, &["--record-signature", ".git/signature.json"]);
    let of = |file| ["--bisect", "--signature", file];
    let said = repository.bisect(&[&[program][..], &run, &of(".git/signature.json")].concat());
    assert_eq!(culprit(&said), Some("merge: base 2 throughout"), "{said}");
    assert!(said.contains("does not compile"), "{said}");

    repository.git(&["checkout", "--quiet", "main~6"]);
    check(4, &["--record-signature", ".git/break.json"]);
    check(1, &of(".git/break.json"));
    check(125, &of(".git/signature.json"));
    // Another fault, without the regression.
    repository.git(&["checkout", "--quiet", "main~8"]);
    check(125, &of(".git/signature.json"));
}
