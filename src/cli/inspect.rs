/*! `mla-check inspect`: what a model file holds, and what is wrong with it, from its headers, and with `--data` from its
values. */

mod against;
mod checkpoint;
mod data;
mod text;

use super::layers;
use super::out::{Failure, Output};
use crate::gguf::{Gguf, TensorInfo, Value};
use crate::judge::Verdict;
use crate::model::arch::Rotation;
use crate::model::lint::{Finding, Severity, lint};
use crate::model::{Convention, Difference, FactorSet, LEGACY, Model, Reading};
use crate::survey::Survey;
use clap::Args;
use mla_reference::{Geometry, Weight};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Options of `inspect`.
#[derive(Args)]
#[command(
    after_help = "Exit codes: 0 sound (warnings included), 1 a defect that breaks attention or a tensor that differs from the original, 2 unreadable.\n\nExamples:\n  mla-check inspect model-00001-of-00011.gguf --layer 3\n  mla-check inspect model.gguf --data\n  mla-check inspect model.gguf --against checkpoint/"
)]
pub struct InspectArgs {
    /// Model file (.gguf), of a split one any part, or a folder with config.json and .safetensors files
    model: PathBuf,
    /// Layers whose tensors are listed and, with --data, read: N, A..B, a comma list, or all [default: the first with
    /// MLA attention is listed, all are read]
    #[arg(long, value_name = "LAYERS")]
    layer: Option<String>,
    /// Positions of the session: chooses between two sets of rope factors, as in `run`
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    n_ctx: Option<u64>,
    /// List every tensor of the file too; with --data, read them too
    #[arg(long)]
    tensors: bool,
    /// Read the values of the attention weights: norms, NaN, zeros, heads and layers that stand out
    #[arg(long)]
    data: bool,
    /// Threads that read [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), requires = "data")]
    threads: Option<u16>,
    /// Hold the attention weights of all layers, or of those that --layer names, against the checkpoint that the file was made
    /// from: a folder with config.json and .safetensors files
    #[arg(long, value_name = "DIR", conflicts_with_all = ["tensors", "data"])]
    against: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    version: u32,
    files: Vec<FileReport>,
    bytes: u64,
    tensor_count: usize,
    name: Option<String>,
    architecture: &'static str,
    models: &'static str,
    geometry: Geometry,
    layers: usize,
    mla_layers: Vec<usize>,
    mtp_layers: Vec<usize>,
    /// As stored.
    eps: f64,
    rope_theta: f64,
    /// Whether positions rotate anything.
    rotates: bool,
    rope_factors: Option<FactorsReport>,
    yarn: Option<YarnReport>,
    conventions: Vec<ConventionReport>,
    top_k: Option<usize>,
    context_length: Option<u64>,
    /// Types of the attention weights of all layers, with how many tensors have them.
    attention_types: BTreeMap<String, usize>,
    weights: Vec<LayerReport>,
    /// Of the layers that are listed, or read: attn_kv_b against attn_k_b and attn_v_b, where all are there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    held_twice: Vec<Difference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<TensorReport>>,
    /// Statistics of values, under --data.
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Survey>,
    findings: Vec<Finding>,
    not_looked_at: &'static str,
}

#[derive(Serialize)]
struct FileReport {
    path: String,
    bytes: u64,
    gguf_version: u32,
    tensors: usize,
}

#[derive(Serialize)]
struct YarnReport {
    factor: f64,
    original_context: f64,
    beta_fast: f64,
    beta_slow: f64,
    log_multiplier: Option<f64>,
}

/// Two sets of rope factors.
#[derive(Serialize)]
struct FactorsReport {
    /// The set that a session of `n_ctx` positions takes.
    set: FactorSet,
    n_ctx: Option<u64>,
    original_context: f64,
    #[serde(skip)]
    text: String,
}

#[derive(Serialize)]
struct ConventionReport {
    name: &'static str,
    eps_attn: f64,
    eps_latent: f64,
    scale: f64,
    rope_magnitude: f64,
}

#[derive(Serialize)]
struct LayerReport {
    layer: usize,
    weights: Vec<WeightReport>,
}

#[derive(Serialize)]
struct WeightReport {
    role: Weight,
    hf: String,
    /// Missing from the file where there is none.
    tensor: Option<TensorReport>,
}

#[derive(Serialize)]
struct TensorReport {
    name: String,
    #[serde(rename = "type")]
    ty: String,
    /// Fastest first.
    dims: Vec<u64>,
    /// From 1.
    part: usize,
    offset: u64,
    bytes: Option<u64>,
}

impl From<&TensorInfo> for TensorReport {
    fn from(t: &TensorInfo) -> TensorReport {
        TensorReport {
            name: t.name.clone(),
            ty: t.ty.to_string(),
            dims: t.dims.clone(),
            part: t.part + 1,
            offset: t.offset,
            bytes: t.size,
        }
    }
}

const NOT_LOOKED_AT: &str = "the values of the weights (`--data` reads them), and whether they are the right ones of this model; anything outside attention";
const NOT_LOOKED_AT_WITH_DATA: &str =
    "whether the values are the right ones of this model; anything outside attention";

/// Runs the command.
pub fn main(args: &InspectArgs, out: &mut Output) -> Result<u8, Failure> {
    let model = Model::open(&args.model).map_err(Failure::input)?;
    let mla = model.mla_layers();
    if let Some(original) = &args.against {
        let layers = match &args.layer {
            Some(asked) => layers::choose(asked, &model, out)?,
            None => mla,
        };
        return against::main(&model, original, &layers, out);
    }
    let shown = match &args.layer {
        Some(asked) => layers::choose(asked, &model, out)?,
        None => mla.iter().take(1).copied().collect(),
    };
    let layers = if args.layer.is_some() { shown.clone() } else { mla.clone() };
    if let Some(checkpoint) = model.checkpoint() {
        return checkpoint::main(args, &model, checkpoint, (&shown, &layers), out);
    }
    let Some(gguf) = model.gguf() else { return Ok(0) };
    let mut report = report(&model, gguf, mla, &shown, args);
    if args.data {
        report.data = Some(data::read(args, &model, &layers, &mut report.findings, out)?);
        report.not_looked_at = NOT_LOOKED_AT_WITH_DATA;
    }
    let report = report;
    let defects = count(&report, Severity::Defect);
    if out.json() {
        out.print_json(&report)?;
    } else {
        let width = out.width().clamp(40, 80);
        let verdict = text::verdict(&report);
        let text = if out.quiet() { verdict } else { verdict + &text::text(&report, width) };
        out.print(&text)?;
    }
    Ok(if defects > 0 { Verdict::Fault } else { Verdict::Exact }.exit(false))
}

fn report(model: &Model, gguf: &Gguf, mla_layers: Vec<usize>, shown: &[usize], args: &InspectArgs) -> Report {
    let files: Vec<FileReport> = gguf
        .parts()
        .iter()
        .map(|p| FileReport {
            path: p.path().display().to_string(),
            bytes: p.length(),
            gguf_version: p.version(),
            tensors: p.tensors().len(),
        })
        .collect();
    let mut attention_types = BTreeMap::new();
    for t in gguf.tensors() {
        let name = crate::model::in_layer(&t.name).map_or("", |l| l.1);
        if name == LEGACY || Weight::ALL.iter().any(|w| w.row().gguf == name && !w.is_norm()) {
            *attention_types.entry(t.ty.to_string()).or_insert(0) += 1;
        }
    }
    let n = &model.numbers;
    let compared = if args.data && args.layer.is_none() { &mla_layers } else { shown };
    let (findings, held_twice) = findings(model, compared);
    Report {
        schema: "mla-check.inspect",
        version: 1,
        bytes: files.iter().map(|f| f.bytes).sum(),
        files,
        tensor_count: gguf.tensors().len(),
        name: match gguf.metadata().get("general.name") {
            Some(Value::String(name)) => {
                Some(std::str::from_utf8(name).map_or_else(|_| name.escape_ascii().to_string(), String::from))
            }
            _ => None,
        },
        architecture: model.arch.name,
        models: model.arch.models,
        geometry: model.geometry,
        layers: model.blocks,
        mla_layers,
        mtp_layers: gguf_layers(model, gguf),
        eps: n.eps,
        rope_theta: n.theta,
        rotates: model.arch.rotation != Rotation::None,
        rope_factors: n.factors.as_ref().map(|f| FactorsReport {
            set: f.set(args.n_ctx),
            n_ctx: args.n_ctx,
            original_context: f.original,
            text: f.said(args.n_ctx),
        }),
        yarn: n.yarn.map(|y| YarnReport {
            factor: y.factor,
            original_context: y.original,
            beta_fast: y.beta_fast,
            beta_slow: y.beta_slow,
            log_multiplier: y.log_multiplier,
        }),
        conventions: conventions(model, args.n_ctx),
        top_k: model.top_k,
        context_length: model.context_length,
        attention_types,
        weights: shown.iter().map(|l| layer(model, gguf, *l)).collect(),
        tensors: args.tensors.then(|| gguf.tensors().iter().map(TensorReport::from).collect()),
        data: None,
        held_twice,
        findings,
        not_looked_at: NOT_LOOKED_AT,
    }
}

/// What each convention makes of a model in a session of `n_ctx` positions.
fn conventions(model: &Model, n_ctx: Option<u64>) -> Vec<ConventionReport> {
    let report = |c: Convention| {
        let s = model.spec(&Reading { n_ctx, ..Reading::of(c) });
        ConventionReport {
            name: c.name(),
            eps_attn: s.eps_attn,
            eps_latent: s.eps_latent,
            scale: s.scale,
            rope_magnitude: s.rope.magnitude,
        }
    };
    Convention::ALL.map(report).into()
}

/// What is wrong or odd, by the headers, and by the weights of the layers that hold one twice.
fn findings(model: &Model, shown: &[usize]) -> (Vec<Finding>, Vec<Difference>) {
    let (mut findings, mut twice) = (lint(model), Vec::new());
    for &n in shown {
        let all = model.held_twice(n).unwrap_or_else(|e| {
            let what = e.to_string();
            let what = format!("not used, and not compared: {}", what.lines().next().unwrap_or_default());
            findings.push(Finding { severity: Severity::Warning, what, place: format!("layer {n}") });
            Vec::new()
        });
        for d in all {
            let severity = if d.too_far() { Severity::Warning } else { Severity::Note };
            findings.push(Finding { severity, what: d.to_string(), place: format!("layer {n}") });
            twice.push(d);
        }
    }
    findings.sort_by_key(|f| f.severity);
    (findings, twice)
}

/// Layers for multi-token prediction that are in the file.
fn gguf_layers(model: &Model, gguf: &Gguf) -> Vec<usize> {
    let mtp = model.mtp_layers();
    let layers = gguf.tensors().iter().filter_map(|t| crate::model::in_layer(&t.name));
    let layers: std::collections::BTreeSet<usize> = layers.map(|l| l.0).filter(|n| mtp.contains(n)).collect();
    layers.into_iter().collect()
}

/// The tensors behind each role of a layer.
fn layer(model: &Model, gguf: &Gguf, layer: usize) -> LayerReport {
    let find = |name: &str| gguf.tensor(&format!("blk.{layer}.{name}"));
    let legacy = find(Weight::WUk.row().gguf).is_none();
    let weights = Weight::ALL.iter().filter(|w| w.exists(&model.geometry)).map(|&role| {
        let kv_b = legacy && matches!(role, Weight::WUk | Weight::WUv);
        let tensor = find(if kv_b { LEGACY } else { role.row().gguf }).or_else(|| find(role.row().gguf));
        let hf = format!("model.layers.{layer}.{}", role.row().hf);
        WeightReport { role, hf, tensor: tensor.map(TensorReport::from) }
    });
    LayerReport { layer, weights: weights.collect() }
}

fn count(r: &Report, severity: Severity) -> usize {
    r.findings.iter().filter(|f| f.severity == severity).count()
}
