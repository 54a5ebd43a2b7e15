/*! `mla-check diff`: two reports of the same case against each other. */

use super::out::{Failure, Output};
use crate::diff::{diff, text};
use crate::report::read::{Source, read};
use clap::Args;
use std::path::{Path, PathBuf};

/// Options of `diff`.
#[derive(Args)]
#[command(after_help = "Examples:
  mla-check run model.gguf --report before.json
  mla-check run model.gguf --report after.json      (another kernel, driver, version)
  mla-check diff before.json after.json

Exit codes: 1 where something got worse that matters, else 0; 2 where the reports can't be held against each other.")]
pub struct DiffArgs {
    /// A JSON report of `run`, `compare` or `merge`
    #[arg(value_name = "A.json")]
    a: PathBuf,
    /// Another one, of the same model and case
    #[arg(value_name = "B.json")]
    b: PathBuf,
}

/// Runs the command.
pub fn main(args: &DiffArgs, out: &mut Output) -> Result<u8, Failure> {
    let source = |path: &Path| -> Result<Source, Failure> {
        Ok(Source { path: path.to_path_buf(), report: read(path).map_err(Failure::input)? })
    };
    let d = diff(&source(&args.a)?, &source(&args.b)?).map_err(Failure::input)?;
    // A reader who left early (`| head`) does not change what was found.
    let printed = if out.json() {
        out.print_json(&d)
    } else if out.quiet() {
        out.print(&format!("{}\n", text::line(&d)))
    } else {
        out.print(&text::render(&d, out.width()))
    };
    match printed {
        Err(Failure::ClosedPipe) | Ok(()) => Ok(d.exit),
        Err(e) => Err(e),
    }
}
