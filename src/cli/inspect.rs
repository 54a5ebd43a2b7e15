/*! `mla-check inspect`: which engines this machine can run. */

use super::out::{Failure, Output};
use clap::Args;

/// Options of `inspect`.
#[derive(Args)]
#[command(after_help = "Example: mla-check inspect --format json")]
pub struct InspectArgs {}

/// Runs the command.
pub fn main(_args: &InspectArgs, _out: &mut Output) -> Result<u8, Failure> {
    Ok(0)
}
