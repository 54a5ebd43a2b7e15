/*! `mla-check merge`: JSON reports of several machines into one. */

use super::copies::Copies;
use super::out::{Failure, Output};
use super::{layers, run, text};
use crate::judge::Verdict;
use crate::merge::{self, MergeError, Wanted};
use crate::report::Report;
use crate::report::read::{Source, read};
use clap::Args;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Options of `merge`.
#[derive(Args)]
#[command(after_help = "Examples:
  mla-check run model.gguf --layer 0..38 --report a.json       (on one machine)
  mla-check run model.gguf --layer 39..77 --report b.json      (on another)
  mla-check merge a.json b.json --report all.json --report all.xml
  mla-check merge reports/ --gpu-floor 78

Exit codes are those of a run. A layer of the model that no report has is no verdict (3), as is a form or phase that other layers of
an engine have; two reports that contradict each other, or fewer GPU reports than asked for, are 1; reports of different
versions, conventions or contracts are 2. Reports of several models are merged model by model, which no file can hold.")]
pub struct MergeArgs {
    /// JSON reports of `run` or `compare`, or folders, of which every .json file is taken
    #[arg(value_name = "FILE|DIR", required = true)]
    from: Vec<PathBuf>,
    /// Layers that must be there: N, A..B, a comma list, or all with MLA attention
    #[arg(long, value_name = "LAYERS", default_value = "all")]
    layers: String,
    /// Layer reports that must be by engine cuda, at least
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu_floor: usize,
    #[command(flatten)]
    copies: Copies,
}

/// Runs the command.
pub fn main(args: &MergeArgs, out: &mut Output) -> Result<u8, Failure> {
    args.copies.check()?;
    let mut files = Vec::new();
    for path in &args.from {
        if path.is_dir() {
            let before = files.len();
            collect(path, &mut files).map_err(|e| unreadable(path, &e))?;
            if files.len() == before {
                return Err(Failure::Input(format!(
                    "the folder holds no report\n  where: {}\n  do: name a folder in which .json files are",
                    text::quoted(&path.display().to_string())
                )));
            }
        } else {
            files.push(path.clone());
        }
    }
    files.sort();
    files.dedup();
    let sources =
        files.into_iter().map(|path| Ok(Source { report: read(&path).map_err(Failure::input)?, path }));
    let sources: Vec<Source> = sources.collect::<Result<_, Failure>>()?;
    let mut models: BTreeMap<String, Vec<Source>> = BTreeMap::new();
    for s in sources {
        models.entry(merge::model(&s.report)).or_default().push(s);
    }
    // A file holds the report of one model: which parts differ is the merge's error.
    if models.len() > 1 && (args.copies.any() || out.json()) {
        models = BTreeMap::from([(String::new(), models.into_values().flatten().collect())]);
    }
    let (mut on_gpu, mut worst, alone) = (0, Verdict::NotApplicable, models.len() == 1);
    for sources in models.into_values() {
        let floor = if alone { args.gpu_floor } else { 0 };
        let report = one(args, sources, floor, out)?;
        on_gpu += merge::on_gpu(&report);
        worst = worst.max(report.verdict);
        run::emit(report, None, &args.copies, false, out)?;
    }
    if on_gpu < args.gpu_floor && !alone {
        let what = format!("{on_gpu} layer reports are by engine cuda, {} must be", args.gpu_floor);
        let how = "look for cases that were skipped, filtered out or broken";
        return Err(Failure::Fault(format!("{what}\n  where: --gpu-floor\n  do: {how}")));
    }
    Ok(worst.exit(false))
}

/// Merges the reports of one model, and says what is there.
fn one(
    args: &MergeArgs,
    sources: Vec<Source>,
    gpu_floor: usize,
    out: &mut Output,
) -> Result<Report, Failure> {
    let count = sources.len();
    let asked = match sources.first().map(|s| &s.report.model) {
        Some(m) if args.layers != "all" => {
            Some(layers::among(&args.layers, "--layers", &m.mla_layers, m.layers, out)?)
        }
        _ => None,
    };
    let merged = merge::merge(sources, &Wanted { layers: asked, gpu_floor }).map_err(|e| match e {
        MergeError::Apart { .. } => Failure::input(e),
        MergeError::Contradiction { .. } => Failure::Fault(e.to_string()),
    })?;
    let twice = match merged.repeated {
        0 => String::new(),
        n => format!("; {n} of their layer reports stand in others as well, and say the same"),
    };
    out.say(&format!("merged {count} report{}{twice}", if count == 1 { "" } else { "s" }));
    for line in &merged.there {
        out.say(line);
    }
    Ok(merged.report)
}

/// Every .json file under a folder.
fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let (path, kind) = entry.and_then(|e| Ok((e.path(), e.file_type()?)))?;
        if kind.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
            files.push(path);
        }
    }
    Ok(())
}

fn unreadable(path: &Path, e: &std::io::Error) -> Failure {
    let place = text::quoted(&path.display().to_string());
    Failure::Input(format!("the folder can't be read: {e}\n  where: {place}\n  do: check its permissions"))
}
