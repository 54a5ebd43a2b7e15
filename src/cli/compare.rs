/*! `mla-check compare`: judge tensors that other software computed. */

use super::copies::Copies;
use super::norms;
use super::out::{Failure, Output};
use super::run::{self, AttentionArg};
use crate::compare::map::{Map, MapContract, nearest};
use crate::compare::{self, Capture, Options, beside, hook, mapped, saved};
use crate::judge::{Ask, Budget};
use crate::kernel_case;
use crate::model::{Model, Reading};
use crate::report::{COMPARE, ModelReport, Report};
use crate::trace::read::Dump;
use crate::trace::{Tensor, TensorId};
use clap::Args;
use std::path::{Path, PathBuf};

/// Options of `compare`.
#[derive(Args)]
#[command(override_usage = "mla-check compare [OPTIONS] [MODEL] <DUMP>")]
#[command(after_help = "Examples:
  mla-check compare model.gguf dump.safetensors --map vllm.toml
  mla-check compare model.gguf dump/ --map sglang.toml --layer 3

  mla-check run model.gguf --save tensors/
  mla-check compare model.gguf tensors/            (needs no map)

  mla-check case model.gguf --save mycase          (a kernel of yours fills in the outputs)
  mla-check compare --case mycase

  mla-check compare dump.npz --map kernel.toml     (no model: [geometry] gives widths and scale)

A map says which array is which tensor; docs/dumps.md lists its fields, with an example:
  engine = { backend = \"vllm\", version = \"0.33.0\" }
  layer = 3
  requests = [\"64+1\"]
  contract = \"flashmla-decode\"
  [tensors]
  q_latent = \"q_nope_out\"
  q_pe = \"q_pe\"
  cache = { name = \"kv_cache\", block_table = \"block_table\" }
  o_latent = \"attn_output\"

Folders that the hooks in adapters/ wrote need no map. `base = \"vllm\"` in a map takes the names of arrays from a built-in one:
vllm, sglang, sglang-dumper, flashinfer-mla, flashinfer-ragged, llama.cpp, hf.")]
pub struct CompareArgs {
    /// Model (a GGUF file, any part of a split one, or a Hugging Face folder); without one, attention alone is judged, by the widths and the scale of
    /// the map's [geometry]. Then the dump: a .npy, .npz, .safetensors or torch.save .pt file, a folder of these, or a
    /// folder that `run --save` wrote; or a .txt or .log file of norms
    #[arg(value_names = ["MODEL", "DUMP"], num_args = 1..=2, required_unless_present = "case")]
    paths: Vec<PathBuf>,
    /// Instead: a folder that `mla-check case` wrote, with the outputs filled in
    #[arg(long, value_name = "DIR", conflicts_with_all = ["paths", "map", "layer"])]
    case: Option<PathBuf>,
    /// What is known of the kernel of a --case: `none`, a kernel of the built-in table, or a contract in a .toml file
    #[arg(long, value_name = "none|NAME|FILE.toml", requires = "case", default_value = "none")]
    contract: String,
    /// What is what in the dump, and which engine made it
    #[arg(long, value_name = "FILE.toml")]
    map: Option<PathBuf>,
    /// Take it for granted that the engine computed with the model's numbers, where the map has no [geometry]
    #[arg(long)]
    trust_geometry: bool,
    /// Another engine's dump of the same layer: judged as well, and shown side by side
    #[arg(long, value_name = "DUMP", conflicts_with = "case")]
    other: Option<PathBuf>,
    /// The map of --other
    #[arg(long, value_name = "FILE.toml", requires = "other")]
    other_map: Option<PathBuf>,
    /// Layer of the dump, instead of the map's; of a saved run: which of its layers
    #[arg(long, value_name = "N")]
    layer: Option<usize>,
    /// Positions of the session that was dumped: chooses between two sets of rope factors, as in `run`
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    n_ctx: Option<u64>,
    /// Attention of models with a sparse indexer: `auto` is dense while every request fits its top_k
    #[arg(long, value_enum, default_value_t = AttentionArg::Auto)]
    attention: AttentionArg,
    /// Probability of any false alarm in the whole run
    #[arg(long, value_name = "P", default_value_t = 1e-6, value_parser = run::share)]
    budget: f64,
    /// Size of gain and softmax scale that must be visible; a tensor that can't show it is `inconclusive`
    #[arg(long, value_name = "X", default_value_t = 1e-3, value_parser = run::share)]
    promise: f64,
    #[command(flatten)]
    copies: Copies,
    /// Threads [default: all cores]; results do not depend on it
    #[arg(long, short = 't', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    threads: Option<u16>,
    /// Exit codes for `git bisect run`: usage errors are 128, no verdict 125
    #[arg(long)]
    bisect: bool,
}

impl CompareArgs {
    /// The model file, where there is one.
    fn model(&self) -> Option<&Path> {
        self.paths.first().filter(|_| self.paths.len() > 1).map(PathBuf::as_path)
    }
    /// The dump.
    fn dump(&self) -> &Path {
        self.case.as_deref().or(self.paths.last().map(PathBuf::as_path)).unwrap_or(Path::new(""))
    }
    fn options(&self, ask: Option<Ask>) -> Options {
        Options { budget: Budget { alpha: self.budget, promise: self.promise }, ask }
    }

    /// Repeats one layer of a comparison until `ask` has its answer; nothing is printed or written.
    pub(super) fn ask(mut self, layer: usize, ask: Ask, progress: &dyn Fn(&str)) -> Result<(), Failure> {
        self.layer = Some(layer);
        exists(self.dump())?;
        let options = self.options(Some(ask));
        progress("reading the dump");
        let Some(model) = self.model() else {
            let (map, _) = bare_map(&self)?;
            let dump = Dump::open(self.dump()).map_err(Failure::input)?;
            let (spec, capture) = compare::bare::capture(&dump, &map, layer).map_err(Failure::input)?;
            return run::answered(compare::bare::layer(spec, layer, capture, &options, progress));
        };
        let model = Model::open(model).map_err(Failure::input)?;
        for w in wanted(&self, self.dump(), self.map.as_deref())? {
            let capture = (w.read)(&model)?;
            run::answered(compare::layer(&model, w.layer, &w.reading, capture, &options, progress))?;
        }
        Ok(())
    }
}

/// Reads a layer's tensors once the model is open.
type ReadCapture = Box<dyn Fn(&Model) -> Result<Capture, Failure>>;

/// A layer to judge, before its tensors are read.
struct Wanted {
    layer: usize,
    reading: Reading,
    read: ReadCapture,
}

/// Runs the command.
pub fn main(args: &CompareArgs, out: &mut Output) -> Result<u8, Failure> {
    args.copies.check()?;
    run::threads(args.threads)?;
    let Some(model) = args.model() else { return bare(args, out) };
    exists(args.dump())?;
    let log = norms::is_log(args.dump()) && args.map.is_none();
    let mut wanted_all = if log { Vec::new() } else { wanted(args, args.dump(), args.map.as_deref())? };
    let first = wanted_all.len();
    if let Some(other) = &args.other {
        wanted_all.extend(wanted(args, other, args.other_map.as_deref())?);
    }
    let model = Model::open(model).map_err(Failure::input)?;
    for w in model.source().warnings() {
        out.warn(&w);
    }
    if log {
        return norms::main(&model, args.dump(), args.layer, args.bisect, out);
    }
    let options = args.options(None);
    let convention = wanted_all.first().map_or("hf", |w| w.reading.convention.name());
    let mut report = Report {
        convention: if convention == "auto" { "hf (auto)" } else { convention },
        engine_choice: match &args.map {
            Some(map) => format!("read by {}", map.display()),
            None => "read by its manifest".into(),
        },
        ..Report::empty(COMPARE, ModelReport::new(&model), run::command())
    };
    let mut left_out = Vec::new();
    let mut broken = None;
    let mut kept: Vec<Kept> = Vec::new();
    for w in wanted_all {
        let bar = out.progress(0);
        bar.set_message("reading the dump");
        // First, whether there is such a layer: names of arrays may hold its number.
        let known = model.weights(w.layer).map(|_| ()).map_err(Failure::input);
        let layer = known.and_then(|()| (w.read)(&model)).and_then(|mut capture| {
            run::session(args.n_ctx, &model, &capture.case.batch, out)?;
            run::attention(args.attention, &model, &capture.case.batch, out)?;
            for what in std::mem::take(&mut capture.left_out) {
                if !left_out.contains(&what) {
                    left_out.push(what);
                }
            }
            if args.other.is_some() {
                kept.push((w.layer, capture.engine.name.to_string(), capture.tensors.clone()));
            }
            compare::layer(&model, w.layer, &w.reading, capture, &options, &|what| {
                bar.set_message(what.to_string())
            })
            .map_err(run::failure)
        });
        bar.finish_and_clear();
        match layer {
            Ok(layer) => report.layers.push(layer),
            // What was judged before is not lost: it is printed, then the error.
            Err(e) => {
                broken = Some(e);
                break;
            }
        }
    }
    report.beside = side_by_side(&kept, first);
    report.not_judged = compare::not_judged(&left_out);
    run::emit(report, broken, &args.copies, args.bisect, out)
}

/// Layer, engine and tensors of a capture.
type Kept = (usize, String, Vec<(TensorId, Tensor)>);

/// Captures of the second dump, from `first` on, beside those of the first: of the same layer and with tensors of the same name, in
/// their order.
fn side_by_side(kept: &[Kept], first: usize) -> Vec<beside::Pair> {
    let (a, b) = kept.split_at(first.min(kept.len()));
    let mut taken = vec![false; b.len()];
    let mut pairs = Vec::new();
    for (layer, engine, tensors) in a {
        let common = |t: &[(TensorId, Tensor)]| {
            t.iter().any(|(id, _)| id.form.is_some() && tensors.iter().any(|o| o.0 == *id))
        };
        let Some(i) = (0..b.len()).find(|i| !taken[*i] && b[*i].0 == *layer && common(&b[*i].2)) else {
            continue;
        };
        taken[i] = true;
        pairs.push(beside::pair(*layer, [engine.clone(), b[i].1.clone()], tensors, &b[i].2));
    }
    pairs
}

/// Judges a dump without a model.
fn bare(args: &CompareArgs, out: &mut Output) -> Result<u8, Failure> {
    exists(args.dump())?;
    let (map, read_by) = bare_map(args)?;
    let dump = Dump::open(args.dump()).map_err(Failure::input)?;
    let layer = args.layer.or(map.layer).unwrap_or(0);
    let bar = out.progress(0);
    bar.set_message("reading the dump");
    let (spec, mut capture) = compare::bare::capture(&dump, &map, layer).map_err(Failure::input)?;
    let mut left_out = std::mem::take(&mut capture.left_out);
    left_out.push("norms, projections, rotations and weights: they need a model".into());
    let options = args.options(None);
    let judged =
        compare::bare::layer(spec, layer, capture, &options, &|what| bar.set_message(what.to_string()));
    bar.finish_and_clear();
    let report = Report {
        convention: "none",
        engine_choice: read_by,
        layers: Vec::from([judged.map_err(run::failure)?]),
        not_judged: compare::not_judged(&left_out),
        ..Report::empty(COMPARE, ModelReport::none(), run::command())
    };
    run::emit(report, None, &args.copies, args.bisect, out)
}

/// What reads a dump without a model, and how it came about.
fn bare_map(args: &CompareArgs) -> Result<(Map, String), Failure> {
    Ok(if let Some(dir) = &args.case {
        let contract = MapContract::named(&args.contract, "--contract").map_err(Failure::input)?;
        (kernel_case::map(dir, contract).map_err(Failure::input)?, "read as a case".to_string())
    } else if let Some(path) = &args.map {
        (Map::read(path).map_err(Failure::input)?, format!("read by {}", path.display()))
    } else {
        return Err(Failure::Input(format!(
            "without a model nothing says what the dump's widths are\n  where: {}\n  do: pass --map FILE.toml with a complete [geometry] (docs/dumps.md), or name the model file before the dump{}",
            args.dump().display(),
            arrays(args.dump())
        )));
    })
}

/// Whether there is a dump at all.
fn exists(dump: &Path) -> Result<(), Failure> {
    if dump.exists() {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "there is no such file or folder\n  where: {}\n  do: check the path of the dump",
        dump.display()
    )))
}

/// The layers to judge, by a map or by the manifests of a saved run.
fn wanted(args: &CompareArgs, dump: &Path, map: Option<&Path>) -> Result<Vec<Wanted>, Failure> {
    exists(dump)?;
    if let Some(path) = map {
        let map = Map::read(path).map_err(Failure::input)?;
        let Some(layer) = args.layer.or(map.layer) else {
            return Err(Failure::Input(format!(
                "nothing says which layer was dumped\n  where: {}\n  do: write layer = N in the map, or pass --layer N",
                path.display()
            )));
        };
        if map.geometry.is_empty() && !args.trust_geometry {
            return Err(Failure::Input(format!(
                "nothing says which numbers the engine computed with, so equal bits would prove nothing\n  where: {}\n  do: write them in the map, [geometry] heads = …, scale = …, eps_latent = …, or pass --trust-geometry",
                path.display()
            )));
        }
        return Ok(vec![of_map(dump, map, layer, args.n_ctx)]);
    }
    if let Some(mut maps) = hook::maps(dump).map_err(Failure::input)? {
        let layers: Vec<usize> = maps.iter().filter_map(|m| m.layer).collect();
        maps.retain(|m| args.layer.is_none_or(|l| m.layer == Some(l)));
        if maps.is_empty() {
            return Err(not_there(args, dump, &layers, "dumped"));
        }
        return Ok(maps
            .into_iter()
            .map(|m| (m.layer.unwrap_or(0), m))
            .map(|(l, m)| of_map(dump, m, l, args.n_ctx))
            .collect());
    }
    let Some(mut saved) = saved::open(dump).map_err(Failure::input)? else {
        return Err(Failure::Input(format!(
            "nothing says which array of the dump is which tensor\n  where: {}\n  do: pass --map FILE.toml (docs/dumps.md), or name a folder that `mla-check run --save` wrote{}",
            dump.display(),
            arrays(dump)
        )));
    };
    let layers: Vec<usize> = saved.iter().map(|s| s.layer()).collect();
    saved.retain(|s| args.layer.is_none_or(|l| s.layer() == l));
    if saved.is_empty() {
        return Err(not_there(args, dump, &layers, "saved"));
    }
    let wanted = |s: saved::Saved| Wanted {
        layer: s.layer(),
        reading: s.reading(),
        read: Box::new(move |model: &Model| s.capture(model).map_err(Failure::input)),
    };
    Ok(saved.into_iter().map(wanted).collect())
}

/// A layer that a map reads.
fn of_map(dump: &Path, map: Map, layer: usize, n_ctx: Option<u64>) -> Wanted {
    let reading = Reading { convention: map.convention(), norm_eps: map.norm_eps, n_ctx };
    let dump = dump.to_path_buf();
    let read = move |model: &Model| {
        let dump = Dump::open(&dump).map_err(Failure::input)?;
        mapped::capture(&dump, &map, &model.spec(&reading), layer).map_err(Failure::input)
    };
    Wanted { layer, reading, read: Box::new(read) }
}

/// The layer that was asked for is none of the dump's.
fn not_there(args: &CompareArgs, dump: &Path, layers: &[usize], how: &str) -> Failure {
    let mut layers = layers.to_vec();
    layers.sort_unstable();
    layers.dedup();
    Failure::Input(format!(
        "layer {} was not {how}\n  where: {}\n  do: choose among {}",
        args.layer.unwrap_or(0),
        dump.display(),
        crate::model::list(&layers)
    ))
}

/// What the dump holds, for whoever is about to write a map.
fn arrays(dump: &Path) -> String {
    let Ok(dump) = Dump::open(dump) else { return String::new() };
    let names: Vec<&str> = dump.entries().iter().map(|e| e.name.as_str()).collect();
    let shown = nearest("", &names);
    format!(
        "; the dump holds {} arrays: {}{}",
        names.len(),
        shown.join(", "),
        if names.len() > shown.len() { ", …" } else { "" }
    )
}
