/*! `mla-check synth`: a model file with real dimensions and random weights. */

use super::out::{Failure, Output};
use super::text::{escape, quoted, size};
use crate::synth::{self, FileType, Preset, Spec};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::path::PathBuf;

/// Options of `synth`.
#[derive(Args)]
#[command(after_help = "Example: mla-check synth --preset glm-5 /tmp/glm-5.gguf --type Q4_K_M --layers 2")]
pub struct SynthArgs {
    /// File to write
    #[arg(value_name = "OUT.gguf")]
    out: PathBuf,
    /// Model whose dimensions the file has
    #[arg(long, value_parser = presets())]
    preset: &'static Preset,
    /// Layers
    #[arg(long, value_name = "N", default_value_t = 1)]
    layers: u32,
    /// File type, whose mix of tensor types is used
    #[arg(long = "type", value_name = "TYPE", default_value = "Q4_K_M", value_parser = file_types(), ignore_case = true)]
    file_type: &'static FileType,
    /// Heads, instead of the model's
    #[arg(long, value_name = "N")]
    heads: Option<u64>,
    /// Seed of the weights: the same seed gives the same bytes
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

pub(super) fn presets() -> impl TypedValueParser<Value = &'static Preset> {
    PossibleValuesParser::new(Preset::ALL.iter().map(|p| p.name))
        .try_map(|name| Preset::by_name(&name).ok_or("no such model"))
}

pub(super) fn file_types() -> impl TypedValueParser<Value = &'static FileType> {
    PossibleValuesParser::new(FileType::ALL.iter().map(|t| t.name))
        .try_map(|name| FileType::by_name(&name).ok_or("no such file type"))
}

/// What was written.
#[derive(serde::Serialize)]
struct Report<'a> {
    schema: &'static str,
    version: u32,
    file: String,
    bytes: u64,
    preset: &'a str,
    file_type: &'a str,
    layers: u32,
    heads: u64,
    seed: u64,
}

/// Runs the command.
pub fn main(args: &SynthArgs, out: &mut Output) -> Result<u8, Failure> {
    let SynthArgs { preset, file_type, layers, heads, seed, .. } = *args;
    let spec = Spec { preset, file_type, layers, heads, seed };
    let bar = out.progress(1);
    bar.set_message(format!("{} {}", preset.name, file_type.name));
    if let Ok(style) = bar.style().template("{msg} [{bar:30}] {bytes}/{total_bytes} {elapsed}") {
        bar.set_style(style);
    }
    let written = synth::write(&spec, &args.out, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let bytes = written.map_err(Failure::input)?;
    let file = args.out.display().to_string();
    let heads = heads.unwrap_or(preset.heads);
    if out.json() {
        let (preset, file_type) = (preset.name, file_type.name);
        let (schema, version) = ("mla-check.synth", 1);
        out.print_json(&Report { schema, version, file, bytes, preset, file_type, layers, heads, seed })?;
    } else if !out.quiet() {
        out.print(&format!(
            "wrote {} ({})\n  {} layer{} of {}, {heads} heads, {}, random weights of seed {seed}\nnext: mla-check run {}\n",
            escape(&file),
            size(bytes),
            layers,
            if layers == 1 { "" } else { "s" },
            preset.name,
            file_type.name,
            quoted(&file),
        ))?;
    }
    Ok(0)
}
