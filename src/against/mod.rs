/*!
A GGUF file's attention tensors against the checkpoint that it was made from: whether the *file* is right.

Every tensor is decoded and held against the original's exact values in the same arrangement (kv_b split, key rows transposed), block
by block, by what its type allows ([`mod@allowed`]). What does not fit is tried as what converters have got wrong ([`suspect`]): another
layer's tensor, order of rope rows, order of heads, a lost or inverted scale. Names that the other side has no counterpart for are
counted in both directions.
*/

pub mod allowed;
pub mod fit;
pub mod suspect;

use crate::checkpoint::{Checkpoint, Matrix};
use crate::model::{
    Convention, Held, KeyRows, LEGACY, Model, ModelError, Names, Reading, ValueRows, in_layer,
};
use allowed::{Allowed, allowed};
use fit::{Fit, fit};
use mla_reference::product::Rows;
use mla_reference::{Geometry, GgmlType, WEIGHTS, Weight};
use serde::Serialize;
use std::collections::BTreeSet;
use suspect::{Order, Others, Pair, cause};

/// What became of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Every block is within what its type allows.
    Fits,
    /// Not so.
    Differs,
    /// One side can't be read.
    Unreadable,
}

/// A tensor of the file.
#[derive(Clone, Debug, Serialize)]
pub struct TensorReport {
    /// Name in the file.
    pub tensor: String,
    /// Its type.
    #[serde(rename = "type")]
    pub ty: String,
    /// Name of the original.
    pub original: String,
    /// Its format.
    pub format: String,
    /// What became of it.
    pub outcome: Outcome,
    /// Figures, where both could be read.
    pub fit: Option<Fit>,
    /// What it is instead, or why it can't be read; empty where nothing is known.
    pub cause: String,
}

/// A layer that both have.
#[derive(Clone, Debug, Serialize)]
pub struct LayerReport {
    /// Number.
    pub layer: usize,
    /// Its tensors.
    pub tensors: Vec<TensorReport>,
}

/// A number that the two configurations have differently.
#[derive(Clone, Debug, Serialize)]
pub struct Scalar {
    /// Its name.
    pub name: String,
    /// In the file.
    pub file: f64,
    /// In the original.
    pub original: f64,
}

/// Tensors of one side that the other has no counterpart of.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Unmapped {
    /// Of attention, by name.
    pub attention: Vec<String>,
    /// How many others (feed-forward, embedding …): not looked at.
    pub others: usize,
    /// Layers with MLA attention that only this side has.
    pub layers: Vec<usize>,
}

/// All that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What this is.
    pub schema: &'static str,
    /// Version of the schema.
    pub version: u32,
    /// The GGUF file.
    pub file: String,
    /// The checkpoint's folder.
    pub original: String,
    /// Numbers that differ, read as Hugging Face reads them.
    pub scalars: Vec<Scalar>,
    /// Layers compared.
    pub layers: Vec<LayerReport>,
    /// Only in the file.
    pub only_file: Unmapped,
    /// Only in the original.
    pub only_original: Unmapped,
}

impl Report {
    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorReport> {
        self.layers.iter().flat_map(|l| &l.tensors)
    }
    /// How many ended like this.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.tensors().filter(|t| t.outcome == outcome).count()
    }
    /// Exit code: 0 all fits, 1 something differs, 2 something can't be read.
    pub fn exit(&self) -> u8 {
        if self.count(Outcome::Differs) > 0 || !self.scalars.is_empty() {
            1
        } else if self.count(Outcome::Unreadable) > 0 || self.tensors().next().is_none() {
            2
        } else {
            0
        }
    }
}

/// Compares these layers of a file with the original.
///
/// # Errors
/// Where `original` is no checkpoint, or the widths of heads are others: nothing can be compared then.
pub fn against(
    file: &Model,
    original: &Model,
    layers: &[usize],
    progress: &dyn Fn(&str),
) -> Result<Report, ModelError> {
    let Some((checkpoint, names)) = original.checkpoint() else {
        return Err(crate::checkpoint::CheckpointError::new(
            "the original is no Hugging Face folder",
            original.file(),
            "give --against the folder that the file was converted from",
        )
        .into());
    };
    let (theirs, ours) = (original.mla_layers(), file.mla_layers());
    let scalars = scalars(file, original);
    let mut all = Vec::new();
    // Tensors of other shapes have nothing to be compared; the scalars say why.
    for layer in layers.iter().copied().filter(|l| theirs.contains(l) && file.geometry == original.geometry) {
        progress(&format!("layer {layer}"));
        let compare = Compare { file, checkpoint, names, layers: &theirs, g: file.geometry, layer };
        all.push(LayerReport { layer, tensors: compare.tensors() });
    }
    let only = |a: &[usize], b: &[usize]| a.iter().copied().filter(|l| !b.contains(l)).collect::<Vec<_>>();
    Ok(Report {
        schema: "mla-check.against",
        version: 1,
        file: file.file(),
        original: original.file(),
        scalars,
        layers: all,
        only_file: Unmapped { layers: only(&ours, &theirs), ..unmapped_of_file(file) },
        only_original: Unmapped { layers: only(&theirs, &ours), ..unmapped_of_original(checkpoint, names) },
    })
}

/// Numbers that differ by more than float32 metadata can.
fn scalars(file: &Model, original: &Model) -> Vec<Scalar> {
    let reading = Reading { convention: Convention::Hf, ..Reading::default() };
    let (a, b) = (file.spec(&reading).scalars(), original.spec(&reading).scalars());
    let differs = |a: f64, b: f64| (a - b).abs() > 1e-5 * a.abs().max(b.abs());
    a.into_iter()
        .zip(b)
        .filter(|((_, a), (_, b))| differs(*a, *b))
        .map(|((name, file), (_, original))| Scalar { name, file, original })
        .collect()
}

/// Names of a layer's attention in GGUF files: kv_b, weights, indexers.
fn of_attention(name: &str) -> bool {
    name.starts_with("attn_") || name.starts_with("indexer.")
}

fn unmapped_of_file(file: &Model) -> Unmapped {
    let mut out = Unmapped::default();
    for t in file.gguf().map(|g| g.tensors()).unwrap_or_default() {
        match in_layer(&t.name) {
            // A scale of its own is read with its weight.
            Some((_, name)) if known(name) => {}
            Some((_, name)) if of_attention(name) => out.attention.push(t.name.clone()),
            _ => out.others += 1,
        }
    }
    out
}

fn known(name: &str) -> bool {
    let scaled = name.strip_suffix(".scale").or_else(|| name.strip_suffix(".input_scale"));
    let weight = scaled.map_or(name.to_string(), |base| format!("{base}.weight"));
    weight == LEGACY || WEIGHTS.iter().any(|w| w.gguf == weight)
}

fn unmapped_of_original(checkpoint: &Checkpoint, names: &Names) -> Unmapped {
    let mut out = Unmapped::default();
    for t in checkpoint.tensors() {
        let Some((prefix, _, name)) = crate::model::in_checkpoint(&t.name) else {
            out.others += 1;
            continue;
        };
        let module = name.rsplit_once('.').map_or(name, |m| m.0);
        let part = &name[module.len().min(name.len())..];
        let weighs = part.starts_with(".weight") || part.starts_with(".input_");
        let read = prefix == names.prefix
            && weighs
            && WEIGHTS.iter().any(|w| w.hf.split_once(".weight").is_some_and(|m| m.0 == module));
        if read {
            continue;
        }
        if name.starts_with("self_attn.") { out.attention.push(t.name.clone()) } else { out.others += 1 }
    }
    out
}

#[derive(Clone, Copy)]
struct Compare<'a> {
    file: &'a Model,
    checkpoint: &'a Checkpoint,
    names: &'a Names,
    layers: &'a [usize],
    g: Geometry,
    layer: usize,
}

impl<'a> Compare<'a> {
    fn tensors(&self) -> Vec<TensorReport> {
        let split = self.file.source().holds(self.layer, Held::Weight(Weight::WUk));
        Weight::ALL
            .iter()
            .filter(|w| w.exists(&self.g) && (split || **w != Weight::WUv))
            .map(|&w| match w {
                Weight::WUk if !split => self.tensor(Held::KvB(w)),
                _ => self.tensor(Held::Weight(w)),
            })
            .collect()
    }

    /// The original of a tensor, of any layer.
    fn matrix(&self, layer: usize, weight: Weight) -> Result<Matrix<'a>, String> {
        let module = self.names.module(layer, weight);
        let matrix = self.checkpoint.matrix(&module).map_err(|e| e.to_string())?;
        matrix.ok_or_else(|| format!("the original has no {module}"))
    }

    /// In the arrangement of the file's tensor.
    fn arranged(&self, matrix: Box<dyn Rows + 'a>, held: Held) -> Box<dyn Rows + 'a> {
        match held {
            Held::Weight(Weight::WUk) => Box::new(KeyRows::new(matrix, self.g)),
            Held::Weight(Weight::WUv) => Box::new(ValueRows { kv_b: matrix, g: self.g }),
            _ => matrix,
        }
    }

    fn tensor(&self, held: Held) -> TensorReport {
        let (weight, kv_b) = held.weight();
        let mut report = TensorReport {
            tensor: format!("blk.{}.{}", self.layer, if kv_b { LEGACY } else { weight.row().gguf }),
            ty: String::new(),
            original: self.names.module(self.layer, weight),
            format: String::new(),
            outcome: Outcome::Unreadable,
            fit: None,
            cause: String::new(),
        };
        let first_line = |e: String| e.lines().next().unwrap_or_default().to_string();
        let taken = match self.file.source().take(self.layer, held, &self.g) {
            Ok(taken) => taken,
            Err(e) => return TensorReport { cause: first_line(e.to_string()), ..report },
        };
        report.tensor = taken.tensor;
        report.ty = taken.ty;
        let matrix = match self.matrix(self.layer, weight) {
            Ok(matrix) => matrix,
            Err(e) => return TensorReport { cause: first_line(e), ..report },
        };
        report.original = matrix.tensor;
        report.format = matrix.ty;
        let (plain, scale) = (matrix.plain, matrix.scale);
        // Rows of a split kv_b are not its own.
        let block = matrix.block.filter(|_| !matches!(held, Held::Weight(Weight::WUk | Weight::WUv)));
        let x = self.arranged(matrix.rows, held);
        if (x.rows(), x.cols()) != (taken.rows.rows(), taken.rows.cols()) {
            report.outcome = Outcome::Differs;
            report.cause = format!(
                "it is {} x {}, the original is {} x {}",
                taken.rows.rows(),
                taken.rows.cols(),
                x.rows(),
                x.cols()
            );
            return report;
        }
        let ty = GgmlType::ALL.iter().copied().find(|t| t.name() == report.ty);
        let rule = ty.map_or(Allowed::Nearer(256), allowed);
        let pair = Pair { weight, kv_b, y: taken.rows.as_ref(), x: x.as_ref(), rule, plain, scale, block };
        let found = fit(pair.y, pair.x, rule, plain, 1);
        report.outcome = if found.fits() { Outcome::Fits } else { Outcome::Differs };
        if !found.fits() {
            report.cause = cause(&pair, &self.g, &found, self.others(held));
        }
        report.fit = Some(found);
        report
    }

    /// The same weight of other layers, nearest first, and others of this layer.
    fn others(&self, held: Held) -> Others<'a> {
        let weight = held.weight().0;
        let mut layers: Vec<usize> = self.layers.iter().copied().filter(|l| *l != self.layer).collect();
        layers.sort_by_key(|l| (l.abs_diff(self.layer), *l));
        let mut all: Others<'a> = Vec::new();
        let this = *self;
        for layer in layers {
            let make = move || Some(this.arranged(this.matrix(layer, weight).ok()?.rows, held));
            all.push((format!("it is layer {layer}'s of the original"), Box::new(make)));
        }
        let mut seen = BTreeSet::from([self.names.module(self.layer, weight)]);
        for &other in Weight::ALL.iter().filter(|w| w.exists(&self.g)) {
            let module = self.names.module(self.layer, other);
            if seen.insert(module.clone()) {
                let make = move || Some(this.matrix(this.layer, other).ok()?.rows);
                all.push((format!("it is {module} of the original"), Box::new(make)));
            }
        }
        if let Held::Weight(Weight::WUk | Weight::WUv) = held {
            // Read as [value rows, key rows]: keys come from row V of a head, values from row 0.
            let (nope, value) = (self.g.nope, self.g.value);
            let other = move |i: usize| if i < nope { value + i } else { i - nope };
            let rows = 0..self.g.heads * (nope + value);
            let order: Vec<usize> =
                rows.map(|r| r / (nope + value) * (nope + value) + other(r % (nope + value))).collect();
            let make = move || {
                let inner = this.matrix(this.layer, weight).ok()?.rows;
                Some(this.arranged(Box::new(Order { inner, order: order.clone() }), held))
            };
            let what =
                "each head of kv_b was read as value rows, then key rows; the original has key rows first";
            all.push((what.into(), Box::new(make)));
        }
        all
    }
}
