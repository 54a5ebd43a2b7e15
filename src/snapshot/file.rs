/*!
Snapshot files: insta's form, and insta's rules of when one is written.

The form is small (a header of YAML between two lines `---`, then the text), so it is written here; the crate's run-time
interface asks cargo where the workspace is and reports by panicking, which no program for users may do. A test reads
the files back with the crate itself.

| INSTA_UPDATE | new | different |
|---|---|---|
| `auto`, the default | `NAME.snap.new`, fails | `NAME.snap.new`, fails |
| `auto` where `CI` is set, `no` | nothing, fails | nothing, fails |
| `new` | `NAME.snap.new`, fails | `NAME.snap.new`, fails |
| `unseen` | written, passes | `NAME.snap.new`, fails |
| `always` | written, passes | written, passes |

With INSTA_FORCE_PASS=1 nothing fails. A `NAME.snap.new` that is no longer true is removed.
*/

use super::diff;
use crate::trace::npy::write_atomically;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// When snapshots are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    mode: Mode,
    force_pass: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Beside the old ones.
    New,
    /// In place.
    Always,
    /// In place where there is none, beside the old ones otherwise.
    Unseen,
    /// Not at all.
    No,
}

/// What writing does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writes {
    InPlace,
    Beside,
    Nothing,
}

impl Update {
    /// By the environment: `INSTA_UPDATE`, `INSTA_FORCE_PASS`, `CI`, `TF_BUILD`.
    ///
    /// # Errors
    /// A value of INSTA_UPDATE that means nothing.
    pub fn from_environment() -> Result<Update, String> {
        Update::of(|name| std::env::var(name).ok())
    }

    /// By variables.
    fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Update, String> {
        let ci = match variable("CI").as_deref() {
            Some("false" | "0" | "") => false,
            Some(_) => true,
            None => variable("TF_BUILD").is_some(),
        };
        let mode = match variable("INSTA_UPDATE").as_deref() {
            None | Some("" | "auto") if ci => Mode::No,
            None | Some("" | "auto" | "new") => Mode::New,
            Some("always" | "1" | "force") => Mode::Always,
            Some("unseen") => Mode::Unseen,
            Some("no") => Mode::No,
            Some(other) => {
                return Err(format!(
                    "INSTA_UPDATE={other} means nothing\n  where: the environment\n  do: set it to auto, new, unseen, always or no, or unset it"
                ));
            }
        };
        Ok(Update { mode, force_pass: variable("INSTA_FORCE_PASS").is_some_and(|v| v == "1") })
    }

    fn writes(self, exists: bool) -> Writes {
        match self.mode {
            Mode::New => Writes::Beside,
            Mode::Always => Writes::InPlace,
            Mode::Unseen if exists => Writes::Beside,
            Mode::Unseen => Writes::InPlace,
            Mode::No => Writes::Nothing,
        }
    }

    /// Makes the folder and tries whether files can be written there; where nothing will be written, it must be there.
    ///
    /// # Errors
    /// What, where, what to do.
    pub fn prepare(self, dir: &Path) -> Result<(), String> {
        let failed = |what: &str, why: &dyn std::fmt::Display| {
            Err(format!(
                "{what}: {why}\n  where: --snapshot {}\n  do: name a folder that may be written",
                dir.display()
            ))
        };
        if self.mode == Mode::No {
            return match dir.is_dir() {
                true => Ok(()),
                false => Err(format!(
                    "there is no such folder, and INSTA_UPDATE or CI says that nothing is to be written\n  where: --snapshot {}\n  do: make the snapshots first, with INSTA_UPDATE=always",
                    dir.display()
                )),
            };
        }
        if let Err(e) = std::fs::create_dir_all(dir) {
            return failed("the snapshots' folder can't be made", &e);
        }
        let tried = dir.join(format!(".mla-check-{}", std::process::id()));
        match std::fs::write(&tried, "").and_then(|()| std::fs::remove_file(&tried)) {
            Ok(()) => Ok(()),
            Err(e) => failed("snapshots can't be written", &e),
        }
    }
}

/// How a snapshot compares with the one on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It is the same.
    Agrees,
    /// There is none.
    New,
    /// It is another one.
    Differs,
}

/// What became of one snapshot. Part of the report; names are stable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// File.
    pub file: String,
    /// How it compares.
    pub state: State,
    /// What was written, if anything was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<String>,
    /// Whether the run may pass: the snapshot agrees, or was accepted.
    pub accepted: bool,
    /// The first lines that differ.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub diff: Vec<String>,
}

/// Holds a text against the snapshot of that name, and writes what the rules say. `description` is one line for reviewers.
///
/// # Errors
/// A file can't be read or written: what, where, what to do.
pub fn keep(dir: &Path, name: &str, description: &str, text: &str, update: Update) -> Result<Kept, String> {
    let path = dir.join(name);
    let pending = dir.join(format!("{name}.new"));
    let old = read(&path)?;
    let text = text.trim_end();
    let state = match &old {
        None => State::New,
        Some(old) if old == text => State::Agrees,
        Some(_) => State::Differs,
    };
    let mut kept =
        Kept { file: path.display().to_string(), state, written: None, accepted: true, diff: Vec::new() };
    if state == State::Agrees {
        remove(&pending)?;
        return Ok(kept);
    }
    if let Some(old) = &old {
        kept.diff = diff::short(old, text);
    }
    let writes = update.writes(old.is_some());
    let target = match writes {
        Writes::InPlace => Some(&path),
        Writes::Beside => Some(&pending),
        Writes::Nothing => None,
    };
    if let Some(target) = target {
        write(target, description, text)?;
        kept.written = Some(target.display().to_string());
    }
    if writes == Writes::InPlace {
        remove(&pending)?;
    }
    kept.accepted = writes == Writes::InPlace || update.force_pass;
    Ok(kept)
}

/// The text of a snapshot, without its header; None where there is no file. What is no snapshot is all text, and differs.
fn read(path: &Path) -> Result<Option<String>, String> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(problem("the snapshot can't be read", path, &e)),
    };
    let all = String::from_utf8_lossy(&bytes).replace("\r\n", "\n");
    let body = all.strip_prefix("---\n").and_then(|rest| match rest.strip_prefix("---\n") {
        Some(body) => Some(body),
        None => rest.split_once("\n---\n").map(|(_, body)| body),
    });
    Ok(Some(body.unwrap_or(&all).trim_end().to_string()))
}

fn write(path: &Path, description: &str, text: &str) -> Result<(), String> {
    let written = write_atomically(path, |out| {
        // A JSON string is a YAML string.
        writeln!(out, "---\ndescription: {}\n---\n{text}", serde_json::Value::from(description))
    });
    written.map_err(|e| problem("the snapshot could not be written", path, &e))
}

fn remove(path: &PathBuf) -> Result<(), String> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(problem("a snapshot that is no longer true can't be removed", path, &e))
        }
        _ => Ok(()),
    }
}

fn problem(what: &str, path: &Path, e: &std::io::Error) -> String {
    format!("{what}: {e}\n  where: {}\n  do: check room and permissions", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(variables: &[(&str, &str)]) -> Update {
        let of = |name: &str| variables.iter().find(|v| v.0 == name).map(|v| v.1.to_string());
        Update::of(of).unwrap()
    }

    /// Variables, then what becomes of a new snapshot and of another one.
    type Rule<'a> = (&'a [(&'a str, &'a str)], Writes, Writes);

    /// insta's own rules: documentation of INSTA_UPDATE, and `CI` as the crate reads it.
    #[test]
    fn the_environment_decides() {
        use Writes::{Beside, InPlace, Nothing};
        let cases: [Rule; 12] = [
            (&[], Beside, Beside),
            (&[("INSTA_UPDATE", "")], Beside, Beside),
            (&[("INSTA_UPDATE", "auto"), ("CI", "true")], Nothing, Nothing),
            (&[("CI", "1")], Nothing, Nothing),
            (&[("CI", "false")], Beside, Beside),
            (&[("TF_BUILD", "True")], Nothing, Nothing),
            (&[("INSTA_UPDATE", "no")], Nothing, Nothing),
            (&[("INSTA_UPDATE", "new"), ("CI", "true")], Beside, Beside),
            (&[("INSTA_UPDATE", "always"), ("CI", "true")], InPlace, InPlace),
            (&[("INSTA_UPDATE", "1")], InPlace, InPlace),
            (&[("INSTA_UPDATE", "force")], InPlace, InPlace),
            (&[("INSTA_UPDATE", "unseen")], InPlace, Beside),
        ];
        for (variables, new, different) in cases {
            let update = update(variables);
            assert_eq!((update.writes(false), update.writes(true)), (new, different), "{variables:?}");
        }
        assert!(Update::of(|n| (n == "INSTA_UPDATE").then(|| "maybe".into())).is_err());
    }

    #[test]
    fn what_is_new_or_different_fails_and_what_agrees_clears_up() {
        let dir = tempfile::tempdir().unwrap();
        let (auto, no) = (update(&[]), update(&[("INSTA_UPDATE", "no")]));
        let always = update(&[("INSTA_UPDATE", "always")]);
        let at = |name: &str| dir.path().join(name);
        let keep = |text: &str, update| keep(dir.path(), "a.snap", "d: \"é", text, update).unwrap();

        let kept = keep("1\n2\n", no);
        assert_eq!((kept.state, kept.written, kept.accepted), (State::New, None, false));
        assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());

        let kept = keep("1\n2\n", auto);
        assert_eq!((kept.state, kept.accepted), (State::New, false));
        std::fs::rename(at("a.snap.new"), at("a.snap")).unwrap();
        let kept = keep("1\n2\n", no);
        assert_eq!((kept.state, kept.accepted), (State::Agrees, true));

        let kept = keep("1\n3\n", auto);
        assert_eq!((kept.state, kept.accepted), (State::Differs, false));
        assert_eq!(kept.diff, ["- 2", "+ 3"]);
        assert!(at("a.snap.new").exists());
        assert!(keep("1\n2\n", auto).accepted);
        assert!(!at("a.snap.new").exists());

        assert!(!keep("1\n3\n", auto).accepted && keep("1\n3\n", always).accepted);
        assert!(!at("a.snap.new").exists() && keep("1\n3\n", no).accepted);
        assert!(keep("4", update(&[("INSTA_FORCE_PASS", "1")])).accepted);
    }

    /// The crate itself reads what is written here, and what it would compare is the same text.
    #[test]
    fn insta_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let text = "first\n---\n  indented: \"x\"\n\nlast";
        keep(dir.path(), "a.snap", "layer 0: \"quoted\" # é", text, update(&[("INSTA_UPDATE", "always")]))
            .unwrap();
        let path = dir.path().join("a.snap");
        let read_back = insta::Snapshot::from_file(&path).unwrap();
        assert_eq!(read_back.as_text().unwrap().to_string(), text);
        assert_eq!(read_back.metadata().description(), Some("layer 0: \"quoted\" # é"));
        assert_eq!(read(&path).unwrap().unwrap(), text);
        // What insta's macros write is read here; so is what somebody's editor did to its line ends.
        std::fs::write(&path, "---\r\nsource: a.rs\r\nexpression: b\r\n---\r\n1\r\n2\r\n\r\n").unwrap();
        assert_eq!(read(&path).unwrap().unwrap(), "1\n2");
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        assert_eq!(keep(dir.path(), "a.snap", "", text, update(&[])).unwrap().state, State::Differs);
    }

    #[test]
    fn a_folder_that_is_none_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        for update in [update(&[]), update(&[("CI", "1")])] {
            let e = update.prepare(&file.join("snapshots")).unwrap_err();
            assert!(e.contains("where: --snapshot") && e.lines().count() == 3, "{e}");
        }
        assert!(update(&[]).prepare(&dir.path().join("a/b")).is_ok() && dir.path().join("a/b").is_dir());
        assert!(update(&[("CI", "1")]).prepare(dir.path()).is_ok());
    }
}
