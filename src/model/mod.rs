/*!
From a GGUF file or a Hugging Face checkpoint to layers: architecture, geometry, rope, weights by role.

One file an architecture and one row in [`arch::ARCHITECTURES`]; everything else here is the same for all
of them. Whatever a file lacks or contradicts is an error that names the key or tensor.
*/

pub mod arch;
mod both;
mod choose;
mod config;
mod convention;
mod deepseek2;
mod deepseek32;
mod glm_dsa;
mod grid;
mod indexer;
mod kimi_linear;
pub mod lint;
mod minicpm3;
mod mistral4;
mod plm;
mod read;
mod rope;
mod scale;
mod source;
mod weights;

pub use both::Difference;
pub use choose::{Chosen, among, choose};
pub use config::Names;
pub(crate) use config::in_layer as in_checkpoint;
pub use convention::{Convention, Numbers};
pub use grid::Grid;
pub use indexer::Selects;
pub use rope::{FactorSet, Factors, Yarn};
pub use source::{Held, Source, Taken};
pub(crate) use weights::{KeyRows, ValueRows};
pub use weights::{LEGACY, LayerWeights, Layout, Stored};

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::gguf::{Gguf, GgufError};
use arch::{Architecture, Layers};
use mla_reference::{Geometry, Spec, Weights};
use std::ops::Range;
use std::path::Path;

/// One attention layer: its numbers and its weights.
pub struct Layer<'a> {
    /// Index in the model.
    pub index: usize,
    /// Scalars.
    pub spec: Spec,
    /// Exact float64 values of the stored weights, decoded on demand.
    pub weights: &'a dyn Weights,
}

/// Why a file is not a model that can be judged. Each message says what, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The container.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A checkpoint, or its config.json.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Another architecture.
    #[error(
        "architecture '{found}' is not supported: {why}\n  where: {file}, general.architecture\n  do: use a file of {supported}"
    )]
    #[allow(missing_docs)]
    Architecture { found: String, why: &'static str, file: String, supported: String },
    /// A key is missing.
    #[error(
        "the key {key} is missing ({meaning})\n  where: {file}, metadata\n  do: convert the model again with a current converter"
    )]
    #[allow(missing_docs)]
    MissingKey { key: String, meaning: &'static str, file: String },
    /// A key makes no sense.
    #[error("{key} is {found}, {why}\n  where: {file}, metadata\n  do: {advice}")]
    #[allow(missing_docs)]
    BadKey { key: String, found: String, why: String, file: String, advice: String },
    /// A weight is missing.
    #[error(
        "tensor {name} is missing; it should hold {wanted}\n  where: {file}\n  do: check that the download is complete and the file is of the model that its metadata says"
    )]
    #[allow(missing_docs)]
    MissingTensor { name: String, file: String, wanted: String },
    /// A weight has another shape than the metadata says.
    #[error(
        "tensor {tensor} has dims {found:?} (fastest first), its metadata asks for {wanted:?}: {role}\n  where: {file}\n  do: run `mla-check inspect` on the file; one of the two is wrong"
    )]
    #[allow(missing_docs)]
    WrongShape { tensor: String, file: String, found: Vec<u64>, wanted: Vec<u64>, role: String },
    /// The scale of a weight is something else.
    #[error(
        "{scale} has {found}: it should be the scale of {tensor}, one F32\n  where: {file}\n  do: convert the model again"
    )]
    #[allow(missing_docs)]
    WrongScale { scale: String, tensor: String, found: String, file: String },
    /// A tensor's values make no sense.
    #[error(
        "tensor {tensor} holds {found}, {why}\n  where: {file}\n  do: convert the model again, or mend the tensor"
    )]
    #[allow(missing_docs)]
    BadValue { tensor: String, found: String, why: &'static str, file: String },
    /// A weight's type can't be decoded.
    #[error(
        "tensor {tensor} has type {ty}, which can't be decoded\n  where: {file}\n  do: use a file whose attention weights are among {supported}"
    )]
    #[allow(missing_docs)]
    UnsupportedType { tensor: String, ty: String, file: String, supported: String },
    /// A layer that has no MLA.
    #[error(
        "layer {layer} has no MLA attention\n  where: {file}, --layer\n  do: choose among the layers that have it: {with}"
    )]
    #[allow(missing_docs)]
    NoSuchLayer { layer: usize, file: String, with: String },
}

/// How to read a file.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Convention; `Auto` is hf.
    pub convention: Convention,
    /// eps of the q_a and kv_a norms, instead of the convention's.
    pub norm_eps: Option<f64>,
    /// Positions of the session, which choose between the two sets of rope factors where a model has them; None: as many
    /// as it was trained on.
    pub n_ctx: Option<u64>,
}

impl Reading {
    /// By a convention, with nothing of its own.
    pub const fn of(convention: Convention) -> Reading {
        Reading { convention, norm_eps: None, n_ctx: None }
    }
}

impl Default for Reading {
    fn default() -> Self {
        Reading::of(Convention::Auto)
    }
}

/// A model file whose metadata made sense.
pub struct Model {
    source: Source,
    /// Row of the table of architectures.
    pub arch: &'static Architecture,
    /// Widths.
    pub geometry: Geometry,
    /// What the file says of eps and rope.
    pub numbers: Numbers,
    /// Layers of the file, MTP layers included.
    pub blocks: usize,
    /// How many of them, the last ones, are for multi-token prediction.
    mtp: usize,
    /// attention.head_count_kv, where it says which layers have MLA attention: one value, or one a layer.
    kv_heads: Option<Vec<u64>>,
    /// Keys that a sparse indexer keeps, where there is one.
    pub top_k: Option<usize>,
    /// Length the model was made for.
    pub context_length: Option<u64>,
    /// Of a checkpoint: what decimals say that [`Numbers`] has no place for.
    written: Option<config::Written>,
}

impl Model {
    /// Opens a GGUF file, or any part of a split one, or a checkpoint's folder.
    pub fn open(path: &Path) -> Result<Model, ModelError> {
        if Checkpoint::is_meant(path) {
            return config::model(Checkpoint::open(path)?);
        }
        read::model(Gguf::open(path)?)
    }

    /// The container, where it is a GGUF file.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.source {
            Source::Gguf(gguf) => Some(gguf),
            Source::Checkpoint(..) => None,
        }
    }

    /// The container and where layers are in it, where it is a checkpoint.
    pub fn checkpoint(&self) -> Option<(&Checkpoint, &Names)> {
        match &self.source {
            Source::Gguf(_) => None,
            Source::Checkpoint(checkpoint, names) => Some((checkpoint, names)),
        }
    }

    /// The container.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// What to name in messages: path of the first part.
    pub fn file(&self) -> String {
        self.source.path().display().to_string()
    }

    /// What a convention makes of the file.
    pub fn spec(&self, reading: &Reading) -> Spec {
        let mut spec = self.numbers.spec(self.arch, self.geometry, reading);
        if let Some(written) = &self.written {
            written.correct(&mut spec, reading);
        }
        spec
    }

    /// Whether every layer of the architecture has MLA attention.
    pub(crate) fn all_layers_attend(&self) -> bool {
        self.arch.layers == Layers::All
    }

    /// Layers with MLA attention, in order.
    pub fn mla_layers(&self) -> Vec<usize> {
        // One pass over the tensors: block_count is the file's word, and may be anything.
        let mut with = self.source.layers();
        with.retain(|n| *n < self.blocks);
        with.sort_unstable();
        with
    }

    /// Whether the metadata says that a layer has another attention than MLA.
    pub fn other_attention(&self, layer: usize) -> bool {
        let says = self.kv_heads.as_deref().and_then(|all| match all {
            [one] => Some(one),
            all => all.get(layer),
        });
        says == Some(&0)
    }

    /// Layers that the metadata says have another attention than MLA.
    pub(crate) fn other_layers(&self) -> Vec<usize> {
        let said = self.kv_heads.as_ref().map_or(0, |all| all.len().min(self.blocks));
        (0..said).filter(|n| self.other_attention(*n)).collect()
    }

    /// Whether layers may be of several kinds and the metadata does not say which is which.
    pub(crate) fn mixed_and_silent(&self) -> bool {
        self.arch.layers == Layers::ByHeadCountKv && self.kv_heads.is_none()
    }

    /// Which set of rope factors a reading takes, where the model has two.
    pub fn factor_set(&self, reading: &Reading) -> Option<FactorSet> {
        self.numbers.factors.as_ref().map(|f| f.set(reading.n_ctx))
    }

    /// How far attn_kv_b is from attn_k_b and attn_v_b in a layer that has all three; nothing for any other layer.
    ///
    /// # Errors
    /// Weights that can't be read.
    pub fn held_twice(&self, layer: usize) -> Result<Vec<Difference>, ModelError> {
        both::differences(&self.source, layer, &self.geometry)
    }

    /// What is to be said of a layer as it is read: what is odd about it, and what was chosen.
    pub fn remarks(&self, layer: usize, reading: &Reading) -> (Vec<String>, Vec<String>) {
        let (mut odd, mut notes) = (Vec::new(), Vec::new());
        if let Some(f) = &self.numbers.factors {
            notes.push(f.said(reading.n_ctx));
        }
        match self.held_twice(layer) {
            Ok(all) => {
                for d in all {
                    if d.too_far() { odd.push(d.to_string()) } else { notes.push(d.to_string()) }
                }
            }
            // What is not needed may be damaged.
            Err(e) => {
                let what = e.to_string();
                odd.push(format!("not used, and not compared: {}", what.lines().next().unwrap_or_default()));
            }
        }
        (odd, notes)
    }

    /// Layers for multi-token prediction: the last ones, where the metadata counts any.
    pub fn mtp_layers(&self) -> Range<usize> {
        self.blocks.saturating_sub(self.mtp)..self.blocks
    }

    /// The weights of a layer, every shape checked.
    pub fn weights(&self, layer: usize) -> Result<LayerWeights<'_>, ModelError> {
        let with = self.mla_layers();
        if !with.contains(&layer) {
            return Err(ModelError::NoSuchLayer { layer, file: self.file(), with: list(&with) });
        }
        LayerWeights::load(&self.source, layer, &self.geometry)
    }
}

/// `blk.N.NAME` as (N, NAME).
pub(crate) fn in_layer(tensor: &str) -> Option<(usize, &str)> {
    let (number, name) = tensor.strip_prefix("blk.")?.split_once('.')?;
    let canonical = number.bytes().all(|b| b.is_ascii_digit()) && (number == "0" || !number.starts_with('0'));
    Some((number.parse().ok().filter(|_| canonical)?, name))
}

/// `0, 1, 2, 5` as `0..2, 5`.
pub fn list(layers: &[usize]) -> String {
    let mut out = String::new();
    let mut i = 0;
    while i < layers.len() {
        let mut j = i;
        while j + 1 < layers.len() && layers[j + 1] == layers[j] + 1 {
            j += 1;
        }
        let comma = if out.is_empty() { "" } else { ", " };
        out += &if j > i {
            format!("{comma}{}..{}", layers[i], layers[j])
        } else {
            format!("{comma}{}", layers[i])
        };
        i = j + 1;
    }
    if out.is_empty() { "none".into() } else { out }
}
