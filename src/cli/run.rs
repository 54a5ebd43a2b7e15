/*! `mla-check run`: which engines this machine can run. */

use super::out::{Failure, Output};
use clap::Args;

/// Options of `run`.
#[derive(Args)]
#[command(after_help = "Example: mla-check run --format json")]
pub struct RunArgs {}

/// Runs the command.
pub fn main(_args: &RunArgs, _out: &mut Output) -> Result<u8, Failure> {
    Ok(0)
}
