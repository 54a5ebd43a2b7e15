/*! `completions` and `man`: what packagers need, made from the options themselves. */

use super::Cli;
use super::out::{Failure, Output};
use clap::{Args, CommandFactory};
use std::path::PathBuf;

/// Options of `completions`.
#[derive(Args)]
#[command(after_help = "Example: mla-check completions bash > /etc/bash_completion.d/mla-check")]
pub struct CompletionsArgs {
    /// Shell
    shell: clap_complete::Shell,
}

/// Options of `man`.
#[derive(Args)]
#[command(after_help = "Examples:
  mla-check man | man -l -
  mla-check man --dir /usr/local/share/man/man1")]
pub struct ManArgs {
    /// Write the main page and one for each command into this folder, instead of printing the main page
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Prints a completion script.
pub fn completions(args: &CompletionsArgs, out: &mut Output) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "mla-check", &mut script);
    out.print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// Prints the main page, or writes all pages.
pub fn man(args: &ManArgs, out: &mut Output) -> Result<u8, Failure> {
    // A page about `help` would say nothing that the others do not.
    let command = Cli::command().disable_help_subcommand(true);
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        out.print(&String::from_utf8_lossy(&page))?;
        return Ok(0);
    };
    let written = std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(command, dir));
    written.map_err(|e| {
        Failure::Input(format!(
            "the pages could not be written: {e}\n  where: --dir {}\n  do: name a folder that may be written",
            dir.display()
        ))
    })?;
    Ok(0)
}
