//! Which tensors of a model are looked at, and how their elements belong to heads.

use super::{Heads, Subject};
use crate::gguf::TensorInfo;
use crate::model::{LEGACY, Model, in_layer};
use mla_reference::product::Blocks;
use mla_reference::{Geometry, WEIGHTS, Weight};
use serde::Serialize;
use std::collections::BTreeSet;

/// A tensor that can't be read.
#[derive(Clone, Debug, Serialize)]
pub struct Unread {
    /// Its name.
    pub name: String,
    /// What attention reads it as.
    pub role: Option<Weight>,
    /// Why not, in a line.
    pub why: String,
}

/// The attention tensors of these layers, in the order of layers and of the table of weights.
pub fn attention<'a>(model: &'a Model, layers: &[usize]) -> (Vec<Subject<'a>>, Vec<Unread>) {
    let (mut found, mut unread) = (Vec::new(), Vec::new());
    let g = &model.geometry;
    for &layer in layers {
        let names = WEIGHTS.iter().filter(|r| r.weight.exists(g)).map(|r| (r.weight, r.gguf));
        // attn_kv_b holds both; it is looked at as what it is mostly taken for.
        for (role, gguf) in names.chain([(Weight::WUk, LEGACY)]) {
            let Some(info) = model.gguf().tensor(&format!("blk.{layer}.{gguf}")) else { continue };
            let (heads, groups) = heads(role, gguf == LEGACY, g);
            match subject(model, info, Some(layer), Some(role), heads, groups) {
                Ok(subject) => found.push(subject),
                Err(e) => unread.push(e),
            }
        }
    }
    (found, unread)
}

/// Every other tensor of the file.
pub fn others<'a>(model: &'a Model, but: &[Subject]) -> (Vec<Subject<'a>>, Vec<Unread>) {
    let known: BTreeSet<&str> = but.iter().map(|s| s.name.as_str()).collect();
    let (mut found, mut unread) = (Vec::new(), Vec::new());
    for info in model.gguf().tensors().iter().filter(|t| !known.contains(t.name.as_str())) {
        let layer = in_layer(&info.name).map(|l| l.0);
        match subject(model, info, layer, None, Heads::None, ["all", ""]) {
            Ok(subject) => found.push(subject),
            Err(e) => unread.push(e),
        }
    }
    (found, unread)
}

fn subject<'a>(
    model: &'a Model,
    info: &TensorInfo,
    layer: Option<usize>,
    role: Option<Weight>,
    heads: Heads,
    groups: [&'static str; 2],
) -> Result<Subject<'a>, Unread> {
    let unread = |why: String| Unread { name: info.name.clone(), role, why };
    let bytes = model.gguf().bytes(info).map_err(|e| unread(e.problem().to_string()))?;
    let ty = info.ty.known().ok_or_else(|| unread(format!("its type is {}", info.ty)))?;
    let cols = info.dims.first().and_then(|n| usize::try_from(*n).ok()).unwrap_or(0);
    let values = Blocks::new(ty, bytes, cols).map_err(|e| unread(e.to_string()))?;
    let (name, ty) = (info.name.clone(), info.ty.to_string());
    let bytes = bytes.len() as u64;
    // A tensor of another shape than its metadata says has no heads to speak of; the lints say so.
    let whole = info.dims.iter().product::<u64>();
    let fits = match heads {
        Heads::None => true,
        Heads::Rows { each, .. } => each > 0 && (whole / cols.max(1) as u64).is_multiple_of(each as u64),
        Heads::Columns { each } => each > 0 && cols.is_multiple_of(each),
    };
    let (heads, groups) = if fits { (heads, groups) } else { (Heads::None, ["all", ""]) };
    Ok(Subject { name, layer, role, ty, bytes, values: Box::new(values), heads, groups })
}

/// Which rows or columns of a weight are a head's, and what its two groups of rows are called.
fn heads(role: Weight, kv_b: bool, g: &Geometry) -> (Heads, [&'static str; 2]) {
    match role {
        Weight::WUk if kv_b => {
            (Heads::Rows { each: g.nope + g.value, cut: g.nope }, ["kv_b key rows", "kv_b value rows"])
        }
        Weight::WQB | Weight::WQ => (Heads::Rows { each: g.key(), cut: g.nope }, ["nope rows", "rope rows"]),
        // One "head": latent and rope rows by layer.
        Weight::WKvA => (Heads::Rows { each: g.cache(), cut: g.latent }, ["latent rows", "rope rows"]),
        Weight::WUk => (Heads::Rows { each: g.latent, cut: g.latent }, ["all", ""]),
        Weight::WUv => (Heads::Rows { each: g.value, cut: g.value }, ["all", ""]),
        Weight::WO => (Heads::Columns { each: g.value }, ["all", ""]),
        Weight::WQA | Weight::GAttn | Weight::GQ | Weight::GKv => (Heads::None, ["all", ""]),
    }
}
