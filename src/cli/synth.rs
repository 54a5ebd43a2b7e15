/*! `mla-check synth`: which engines this machine can run. */

use super::out::{Failure, Output};
use clap::Args;

/// Options of `synth`.
#[derive(Args)]
#[command(after_help = "Example: mla-check synth --format json")]
pub struct SynthArgs {}

/// Runs the command.
pub fn main(_args: &SynthArgs, _out: &mut Output) -> Result<u8, Failure> {
    Ok(0)
}
