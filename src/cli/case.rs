/*! `mla-check case`: a test case for a kernel that lives elsewhere. */

use super::out::{Failure, Output};
use super::run::{self, AttentionArg, DtypeArg, RegimeArg};
use super::text::{escape, quoted, size};
use crate::case::{Batch, DEFAULT_BATCH};
use crate::kernel_case::{self, CaseFile, Options};
use crate::model::{Convention, Model, Reading};
use clap::{Args, ValueEnum};
use mla_reference::Form;
use std::path::PathBuf;

/// Options of `case`.
#[derive(Args)]
#[command(after_help = "Example, with examples/python-kernel/attention.py as the kernel:
  mla-check case model.gguf --save mycase
  python examples/python-kernel/attention.py mycase
  mla-check compare --case mycase")]
pub struct CaseArgs {
    /// Model, a GGUF file or a Hugging Face folder: widths, scale and weights that shape the tensors
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Folder to write
    #[arg(long, value_name = "DIR")]
    save: PathBuf,
    /// Layer [default: the first with MLA attention]
    #[arg(long, value_name = "N")]
    layer: Option<usize>,
    /// Form of attention: `absorbed` reads the latent cache through a page table, `fused` each head's own keys
    #[arg(long, value_enum, default_value_t = OneForm::Absorbed)]
    form: OneForm,
    /// Requests, CONTEXT+NEW, as a comma list
    #[arg(long, default_value = DEFAULT_BATCH)]
    batch: String,
    /// Dtype of inputs and outputs; lse is f32
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    dtype: DtypeArg,
    /// How context rows are drawn: requests with a context appear once for each
    #[arg(long, value_enum, default_value_t = RegimeArg::Both)]
    regime: RegimeArg,
    /// Seed of everything that is drawn
    #[arg(long, short = 's', default_value_t = 0)]
    seed: u64,
    /// Slots of a page of the cache
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    page_size: u32,
    /// Whose reading of the file's numbers: eps, YaRN, decimals
    #[arg(long, value_enum, default_value_t = Convention::Auto)]
    convention: Convention,
    /// Positions of the session: chooses between two sets of rope factors, as in `run`
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    n_ctx: Option<u64>,
    /// Attention of models with a sparse indexer: `auto` is dense while every request fits its top_k
    #[arg(long, value_enum, default_value_t = AttentionArg::Auto)]
    attention: AttentionArg,
    /// Threads [default: all cores]; results do not depend on it
    #[arg(long, short = 't', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    threads: Option<u16>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OneForm {
    Absorbed,
    Fused,
}

/// What was written.
#[derive(serde::Serialize)]
struct Report<'a> {
    schema: &'static str,
    version: &'static str,
    folder: String,
    bytes: u64,
    case: &'a CaseFile,
}

/// Runs the command.
pub fn main(args: &CaseArgs, out: &mut Output) -> Result<u8, Failure> {
    let batch: Batch = args.batch.parse().map_err(Failure::input)?;
    run::threads(args.threads)?;
    let model = Model::open(&args.model).map_err(Failure::input)?;
    for w in model.source().warnings() {
        out.warn(&w);
    }
    run::session(args.n_ctx, &model, &batch, out)?;
    run::attention(args.attention, &model, &batch, out)?;
    let first = model.mla_layers().first().copied();
    let layer = args.layer.or(first).ok_or_else(|| {
        let what = "no layer of this file has MLA attention";
        Failure::Input(format!("{what}\n  where: {}\n  do: choose another file", model.file()))
    })?;
    let options = Options {
        form: match args.form {
            OneForm::Absorbed => Form::Absorbed,
            OneForm::Fused => Form::Fused,
        },
        batch,
        dtype: args.dtype.dtype(),
        regimes: args.regime.regimes(),
        seed: args.seed,
        page_size: args.page_size as usize,
        reading: Reading { n_ctx: args.n_ctx, ..Reading::of(args.convention) },
    };
    let bar = out.progress(0);
    bar.set_message("computing the inputs");
    let written = kernel_case::write(&model, layer, &options, &args.save);
    bar.finish_and_clear();
    let written = written.map_err(Failure::input)?;
    let folder = args.save.display().to_string();
    if out.json() {
        out.print_json(&Report {
            schema: "mla-check.case-written/1",
            version: env!("CARGO_PKG_VERSION"),
            folder,
            bytes: written.bytes,
            case: &written.case,
        })?;
    } else if !out.quiet() {
        let c = &written.case;
        let names = |all: &std::collections::BTreeMap<String, kernel_case::Array>| {
            all.keys().cloned().collect::<Vec<_>>().join(", ")
        };
        let needed: Vec<&str> = c.wanted.values().filter(|a| !a.optional).map(|a| a.file.as_str()).collect();
        out.print(&format!(
            "wrote {} ({}): {}, {} requests\n  inputs   {}\n  wanted   {} ({} at least); mla_case.py loads and saves them\nnext: fill in the outputs, then mla-check compare --case {}\n",
            escape(&folder),
            size(written.bytes),
            c.model,
            c.requests.len(),
            names(&c.tensors),
            names(&c.wanted),
            needed.join(", "),
            quoted(&folder),
        ))?;
    }
    Ok(0)
}
