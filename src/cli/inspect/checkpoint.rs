/*! `mla-check inspect DIR`: what a checkpoint's folder holds, and what is wrong with it, from its headers and scales, and
with `--data` from its values. */

use super::super::out::{Failure, Output};
use super::super::text::{escape, short, size, wrap};
use super::text::{findings, paint, plural};
use super::{ConventionReport, InspectArgs, conventions, data};
use crate::checkpoint::Checkpoint;
use crate::judge::Verdict;
use crate::model::lint::{Finding, Severity, lint};
use crate::model::{Model, Names, list};
use crate::survey::Survey;
use anstyle::AnsiColor;
use mla_reference::{Geometry, Weight};
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    version: u32,
    folder: String,
    files: Vec<FileReport>,
    bytes: u64,
    tensor_count: usize,
    model_type: String,
    architecture: &'static str,
    geometry: Geometry,
    layers: usize,
    mla_layers: Vec<usize>,
    mtp_layers: Vec<usize>,
    /// What stands before `layers.N.` in names.
    prefix: String,
    conventions: Vec<ConventionReport>,
    top_k: Option<usize>,
    context_length: Option<u64>,
    /// Formats of the attention weights of all layers, with how many have them.
    formats: BTreeMap<String, usize>,
    weights: Vec<LayerReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<TensorReport>>,
    /// Statistics of values, under --data.
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Survey>,
    findings: Vec<Finding>,
}

#[derive(Serialize)]
struct FileReport {
    path: String,
    bytes: u64,
}

#[derive(Serialize)]
struct LayerReport {
    layer: usize,
    weights: Vec<WeightReport>,
}

#[derive(Serialize)]
struct WeightReport {
    roles: Vec<Weight>,
    module: String,
    /// None where it can't be read: `findings` say why.
    format: Option<String>,
    shape: Option<(usize, usize)>,
    /// Factor of the whole tensor, as stored.
    tensor_scale: Option<f64>,
}

#[derive(Serialize)]
struct TensorReport {
    name: String,
    dtype: String,
    /// Slowest first.
    shape: Vec<u64>,
    /// From 1; None: the file is missing.
    file: Option<usize>,
    offset: u64,
    bytes: u64,
}

/// Runs the command.
pub(super) fn main(
    args: &InspectArgs,
    model: &Model,
    (checkpoint, names): (&Checkpoint, &Names),
    (shown, layers): (&[usize], &[usize]),
    out: &mut Output,
) -> Result<u8, Failure> {
    let mut report = report(args, model, checkpoint, names, shown);
    if args.data {
        report.data = Some(data::read(args, model, layers, &mut report.findings, out)?);
    }
    let report = report;
    let defects = report.findings.iter().filter(|f| f.severity == Severity::Defect).count();
    if out.json() {
        out.print_json(&report)?;
    } else {
        let width = out.width().clamp(40, 80);
        let verdict = if defects > 0 {
            let breaks = if defects == 1 { "breaks" } else { "break" };
            paint(AnsiColor::Red, &format!("{} that {breaks} attention", plural(defects, "defect")))
        } else {
            let what =
                if args.data { "headers and values are sound" } else { "headers and scales are sound" };
            paint(AnsiColor::Green, what)
        };
        out.print(&if out.quiet() {
            verdict + "\n"
        } else {
            format!("{verdict}\n{}", text(&report, width))
        })?;
    }
    Ok(if defects > 0 { Verdict::Fault } else { Verdict::Exact }.exit(false))
}

fn report(
    args: &InspectArgs,
    model: &Model,
    checkpoint: &Checkpoint,
    names: &Names,
    shown: &[usize],
) -> Report {
    let files: Vec<FileReport> = checkpoint
        .files()
        .into_iter()
        .map(|(path, bytes)| FileReport { path: path.display().to_string(), bytes })
        .collect();
    let mla_layers = model.mla_layers();
    let mut formats = BTreeMap::new();
    for layer in &mla_layers {
        for format in
            layer_report(model, checkpoint, names, *layer).weights.into_iter().filter_map(|w| w.format)
        {
            *formats.entry(format).or_insert(0) += 1;
        }
    }
    let text =
        |key: &str| checkpoint.config().get(key).and_then(|v| v.as_str()).unwrap_or_default().to_string();
    let mtp = model.mtp_layers();
    Report {
        schema: "mla-check.inspect-checkpoint",
        version: 1,
        folder: checkpoint.folder().display().to_string(),
        bytes: files.iter().map(|f| f.bytes).sum(),
        files,
        tensor_count: checkpoint.tensors().len(),
        model_type: text("model_type"),
        architecture: model.arch.name,
        geometry: model.geometry,
        layers: model.blocks,
        mtp_layers: mla_layers.iter().copied().filter(|n| mtp.contains(n)).collect(),
        mla_layers,
        prefix: names.prefix.clone(),
        conventions: conventions(model, args.n_ctx),
        top_k: model.top_k,
        context_length: model.context_length,
        formats,
        weights: shown.iter().map(|l| layer_report(model, checkpoint, names, *l)).collect(),
        tensors: args.tensors.then(|| {
            checkpoint
                .tensors()
                .iter()
                .map(|t| TensorReport {
                    name: t.name.clone(),
                    dtype: t.dtype.name().to_string(),
                    shape: t.shape.clone(),
                    file: t.file.map(|f| f + 1),
                    offset: t.offset,
                    bytes: t.bytes,
                })
                .collect()
        }),
        data: None,
        findings: lint(model),
    }
}

fn layer_report(model: &Model, checkpoint: &Checkpoint, names: &Names, layer: usize) -> LayerReport {
    let mut weights: Vec<WeightReport> = Vec::new();
    for &weight in Weight::ALL.iter().filter(|w| w.exists(&model.geometry)) {
        let module = names.module(layer, weight);
        if let Some(same) = weights.iter_mut().find(|w| w.module == module) {
            same.roles.push(weight);
            continue;
        }
        let matrix = checkpoint.matrix(&module).ok().flatten();
        weights.push(WeightReport {
            roles: vec![weight],
            module,
            format: matrix.as_ref().map(|m| m.ty.clone()),
            shape: matrix.as_ref().map(|m| m.shape),
            tensor_scale: matrix.as_ref().and_then(|m| m.scale).map(|s| s.value),
        });
    }
    LayerReport { layer, weights }
}

fn text(r: &Report, width: usize) -> String {
    let mut out = String::new();
    let mut line = |label: &str, text: &str| {
        out += &wrap(&format!("{label:<13}{}", escape(text)), width, 13);
        out.push('\n');
    };
    line("folder", &r.folder);
    let files = plural(r.files.len(), "file");
    line("size", &format!("{} in {files}, {}", size(r.bytes), plural(r.tensor_count, "tensor")));
    line("architecture", &format!("{} (read as {})", r.model_type, r.architecture));
    let g = &r.geometry;
    let queries =
        if g.q_rank > 0 { format!("query rank {}", g.q_rank) } else { "queries without a rank".into() };
    let heads = plural(g.heads, "head");
    line(
        "geometry",
        &format!(
            "hidden {}, {heads}, {queries}, latent {}; a head has {} + {} rope columns of key, {} of value",
            g.hidden, g.latent, g.nope, g.rope, g.value
        ),
    );
    let mtp = if r.mtp_layers.is_empty() {
        String::new()
    } else {
        format!("; for multi-token prediction: {}", list(&r.mtp_layers))
    };
    line("layers", &format!("{}, MLA attention in {}{mtp}", r.layers, list(&r.mla_layers)));
    if let Some(k) = r.top_k {
        line("indexer", &format!("keeps {k} keys: requests up to that length are dense attention"));
    }
    let formats: Vec<String> = r.formats.iter().map(|(f, n)| format!("{n} {f}")).collect();
    line("weights", &formats.join("; "));
    line("conventions", "eps of attn_norm, of q_a and kv_a norms, softmax scale, factor on cos and sin");
    for c in &r.conventions {
        let values = [c.eps_attn, c.eps_latent, c.scale, c.rope_magnitude].map(short);
        line("", &format!("{:<10} {:<9} {:<9} {:<9} {}", c.name, values[0], values[1], values[2], values[3]));
    }
    for l in &r.weights {
        out +=
            &format!("\nlayer {} ({}layers.{}.): roles, module, shape, format\n", l.layer, r.prefix, l.layer);
        for w in &l.weights {
            let roles = w.roles.iter().map(|r| r.name()).collect::<Vec<_>>().join(", ");
            let module = w.module.rsplit_once(&format!("layers.{}.", l.layer)).map_or(&*w.module, |m| m.1);
            let held = match (&w.format, w.shape) {
                (Some(format), Some((r, c))) => format!("{r} x {c} {format}"),
                _ => paint(AnsiColor::Red, "can't be read"),
            };
            let scale = w.tensor_scale.map_or(String::new(), |s| format!(", scale {}", short(s)));
            out += &wrap(&format!("  {roles:<12} {} {held}{scale}", escape(module)), width, 15);
            out.push('\n');
        }
    }
    if let Some(survey) = &r.data {
        out += &data::text(survey, width);
    }
    if let Some(tensors) = &r.tensors {
        out += "\nall tensors: name, dtype, shape, file @ offset\n";
        for t in tensors {
            let file = t.file.map_or("missing".into(), |f| f.to_string());
            let text =
                format!("  {} {} {:?} {file} @ {}", escape(&t.name), escape(&t.dtype), t.shape, t.offset);
            out += &wrap(&text, width, 10);
            out.push('\n');
        }
    }
    out + &findings(&r.findings, width)
}
