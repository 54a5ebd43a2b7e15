/*! `completions` and `man`: what packagers need, made from the options themselves. */

use super::Cli;
use super::out::{Failure, Output};
use clap::{Args, CommandFactory};

/// Options of `completions`.
#[derive(Args)]
#[command(after_help = "Example: mla-check completions bash > /etc/bash_completion.d/mla-check")]
pub struct CompletionsArgs {
    /// Shell
    shell: clap_complete::Shell,
}

/// Prints a completion script.
pub fn completions(args: &CompletionsArgs, out: &mut Output) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "mla-check", &mut script);
    out.print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// Prints the man page.
pub fn man(out: &mut Output) -> Result<u8, Failure> {
    let mut page = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut page)?;
    out.print(&String::from_utf8_lossy(&page))?;
    Ok(0)
}
