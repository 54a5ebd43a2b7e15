//! Which tensors of a model are looked at, and how their elements belong to heads.

use super::{Heads, Subject};
use crate::gguf::{Gguf, TensorInfo};
use crate::model::{Held, Model, in_layer};
use mla_reference::product::{Blocks, Rows};
use mla_reference::{Geometry, Weight};
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
        let own = Weight::ALL.iter().filter(|w| w.exists(g)).map(|w| Held::Weight(*w));
        // kv_b holds both; it is looked at once.
        for held in own.chain([Held::KvB(Weight::WUk)]).filter(|h| model.source().holds(layer, *h)) {
            let (role, kv_b) = held.weight();
            let (heads, groups) = heads(role, kv_b, g);
            match model.source().take(layer, held, g) {
                Ok(taken) => found.push(Subject {
                    layer: Some(layer),
                    role: Some(role),
                    ty: taken.ty,
                    bytes: stored(model, &taken.tensor, taken.rows.as_ref()),
                    name: taken.tensor,
                    values: taken.rows,
                    heads,
                    groups,
                }),
                Err(e) => unread.push(Unread {
                    name: format!("{role} of layer {layer}"),
                    role: Some(role),
                    why: e.to_string().lines().next().unwrap_or_default().to_string(),
                }),
            }
        }
    }
    (found, unread)
}

/// Every other tensor of a GGUF file.
pub fn others<'a>(model: &'a Model, but: &[Subject]) -> (Vec<Subject<'a>>, Vec<Unread>) {
    let (mut found, mut unread) = (Vec::new(), Vec::new());
    let Some(gguf) = model.gguf() else { return (found, unread) };
    let known: BTreeSet<&str> = but.iter().map(|s| s.name.as_str()).collect();
    for info in gguf.tensors().iter().filter(|t| !known.contains(t.name.as_str())) {
        match other(gguf, info) {
            Ok(subject) => found.push(subject),
            Err(why) => unread.push(Unread { name: info.name.clone(), role: None, why }),
        }
    }
    (found, unread)
}

fn other<'a>(gguf: &'a Gguf, info: &TensorInfo) -> Result<Subject<'a>, String> {
    let bytes = gguf.bytes(info).map_err(|e| e.problem().to_string())?;
    let ty = info.ty.known().ok_or_else(|| format!("its type is {}", info.ty))?;
    let cols = info.dims.first().and_then(|n| usize::try_from(*n).ok()).unwrap_or(0);
    let values = Blocks::new(ty, bytes, cols).map_err(|e| e.to_string())?;
    Ok(Subject {
        name: info.name.clone(),
        layer: in_layer(&info.name).map(|l| l.0),
        role: None,
        ty: info.ty.to_string(),
        bytes: bytes.len() as u64,
        values: Box::new(values),
        heads: Heads::None,
        groups: ["all", ""],
    })
}

/// Bytes as they lie in the file; where that can't be said, those of its values in 16 bits.
fn stored(model: &Model, tensor: &str, rows: &dyn Rows) -> u64 {
    let info = model.gguf().and_then(|g| g.tensor(tensor)?.size);
    info.unwrap_or(2 * rows.rows() as u64 * rows.cols() as u64)
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
