/*! `mla-check devices`: which engines this machine can run. */

use super::out::{Failure, Output};
use clap::Args;

/// Options of `devices`.
#[derive(Args)]
#[command(after_help = "Example: mla-check devices --format json")]
pub struct DevicesArgs {}

/// Runs the command.
pub fn main(_args: &DevicesArgs, _out: &mut Output) -> Result<u8, Failure> {
    Ok(0)
}
