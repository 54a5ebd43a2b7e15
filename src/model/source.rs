/*!
Where a model's weights come from: the containers behind [`super::Model`], and what is asked of each.

A container gives files, what is odd about them, and the tensor that a role's values lie in, its shape checked and
its values decoded on demand. What roles mean, and how w_uk and w_uv come out of kv_b, is the same for all.
*/

use super::{ModelError, in_layer, weights};
use crate::gguf::Gguf;
use mla_reference::product::Rows;
use mla_reference::{Geometry, Weight};
use std::path::{Path, PathBuf};

/// A tensor of a layer: a weight's own, or the unsplit kv_b for one of its two weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// The weight's own tensor.
    Weight(Weight),
    /// kv_b [H·(N+V), L], from which this weight (w_uk or w_uv) is taken.
    KvB(Weight),
}

impl Held {
    /// The weight, and whether it is taken from kv_b.
    pub fn weight(self) -> (Weight, bool) {
        match self {
            Held::Weight(w) => (w, false),
            Held::KvB(w) => (w, true),
        }
    }
}

/// What was found for a [`Held`].
pub struct Taken<'a> {
    /// Tensor's name in the file.
    pub tensor: String,
    /// Its type's name.
    pub ty: String,
    /// Exact values.
    pub rows: Box<dyn Rows + 'a>,
}

/// The container of a model.
pub enum Source {
    /// A GGUF file, or all parts of one.
    Gguf(Gguf),
}

impl Source {
    /// Files and their bytes, the first part first.
    pub fn files(&self) -> Vec<(PathBuf, u64)> {
        match self {
            Source::Gguf(g) => g.parts().iter().map(|p| (p.path().to_path_buf(), p.length())).collect(),
        }
    }

    /// What is odd about the files, a sentence each.
    pub fn warnings(&self) -> Vec<String> {
        match self {
            Source::Gguf(g) => g.warnings().iter().map(ToString::to_string).collect(),
        }
    }

    /// The model's name, where the files have one.
    pub fn name(&self) -> Option<&str> {
        match self {
            Source::Gguf(g) => g.metadata().str("general.name").ok().flatten(),
        }
    }

    /// What to name in messages: the first part.
    pub fn path(&self) -> &Path {
        match self {
            Source::Gguf(g) => g.parts().first().map_or(Path::new(""), |p| p.path()),
        }
    }

    /// Layers that have a w_kv_a, in no order.
    pub(super) fn layers(&self) -> Vec<usize> {
        match self {
            Source::Gguf(g) => {
                let layers = g.tensors().iter().filter_map(|t| in_layer(&t.name));
                layers.filter(|(_, name)| *name == Weight::WKvA.row().gguf).map(|l| l.0).collect()
            }
        }
    }

    /// Whether a layer has this tensor.
    pub(super) fn holds(&self, layer: usize, held: Held) -> bool {
        match self {
            Source::Gguf(g) => g.tensor(&weights::gguf_name(layer, held)).is_some(),
        }
    }

    /// A layer's tensor, its shape checked.
    pub(super) fn take(&self, layer: usize, held: Held, g: &Geometry) -> Result<Taken<'_>, ModelError> {
        match self {
            Source::Gguf(gguf) => weights::from_gguf(gguf, layer, held, g),
        }
    }
}
