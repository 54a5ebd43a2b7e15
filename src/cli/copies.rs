/*!
Where a report goes besides stdout: files of `--report`, and GitHub Actions.

Workflow commands go to stderr, which the runner reads as it reads stdout: `--format json` on stdout stays JSON.
*/

use super::out::{Failure, Output};
use crate::report::Report;
use crate::report::github::{SUMMARY, annotations, summary};
use crate::report::kinds::{KINDS, Kind, either};
use crate::trace::npy::write_atomically;
use clap::{Args, ValueEnum};
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of every command that makes a report.
#[derive(Args)]
pub(super) struct Copies {
    #[arg(long, value_name = "FILE", help = kinds())]
    report: Vec<PathBuf>,
    /// Annotations and a summary of the step for GitHub Actions: `auto` means where GITHUB_ACTIONS=true
    #[arg(long, value_enum, default_value_t = Github::Auto, help_heading = "Output")]
    github: Github,
}

fn kinds() -> String {
    let all: Vec<String> = KINDS.iter().map(|k| format!(".{} ({})", k.extension, k.what)).collect();
    format!("Also write the report to a file, by its extension {} (repeatable)", either(&all))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Github {
    Auto,
    Always,
    Never,
}

impl Copies {
    /// Whether any file is wanted.
    pub(super) fn any(&self) -> bool {
        !self.report.is_empty()
    }

    /// Whether every file can be written, before anything is computed.
    pub(super) fn check(&self) -> Result<(), Failure> {
        for path in &self.report {
            let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
            let what = match (Kind::of(path), parent.is_some_and(|p| !p.is_dir())) {
                (None, _) => "a report of this kind is not part of this version",
                (Some(_), true) => "the report's folder does not exist",
                (Some(_), false) => continue,
            };
            return Err(Failure::Input(format!(
                "{what}\n  where: --report {}\n  do: name a {} file in a folder that exists",
                path.display(),
                Kind::list()
            )));
        }
        Ok(())
    }

    /// Writes the files, and what GitHub is told. All are tried; the first that fails is the error.
    pub(super) fn write(&self, report: &Report, out: &mut Output) -> Result<(), Failure> {
        let mut first = Ok(());
        for path in &self.report {
            let done = write(path, report);
            if first.is_ok() {
                first = done;
            }
        }
        let on = match self.github {
            Github::Always => true,
            Github::Never => false,
            Github::Auto => std::env::var_os("GITHUB_ACTIONS").is_some_and(|v| v == "true"),
        };
        if on {
            for a in annotations(report) {
                out.tell(&a.to_string());
            }
            if let Some(path) = std::env::var_os("GITHUB_STEP_SUMMARY").filter(|p| !p.is_empty())
                && let Err(e) = append(&path, report)
            {
                let place = Path::new(&path).display();
                out.warn(&format!(
                    "the summary of the step could not be written: {e}\n  where: GITHUB_STEP_SUMMARY={place}\n  do: nothing, if it is not wanted; the verdict is not touched"
                ));
            }
        }
        first
    }
}

fn write(path: &Path, report: &Report) -> Result<(), Failure> {
    let fail = |e: String| {
        Failure::Input(format!(
            "the report could not be written: {e}\n  where: {}\n  do: check room and permissions",
            path.display()
        ))
    };
    let Some(kind) = Kind::of(path) else { return Err(fail("its kind is unknown".into())) };
    let bytes = (kind.render)(report).map_err(fail)?;
    write_atomically(path, |out| out.write_all(&bytes)).map_err(|e| fail(e.to_string()))
}

/// Appends a summary, in the room that those before it left.
fn append(path: &OsString, report: &Report) -> std::io::Result<()> {
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path)?;
    let used = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
    file.write_all(summary(report, SUMMARY.saturating_sub(used)).as_bytes())
}
