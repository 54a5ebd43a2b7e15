/*!
Where a model's weights come from: the containers behind [`super::Model`], and what is asked of each.

A container gives files, what is odd about them, and the tensor that a role's values lie in, its shape checked and
its values decoded on demand. What roles mean, and how w_uk and w_uv come out of kv_b, is the same for all.
*/

use super::{ModelError, Names, config, in_layer, weights};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::gguf::{Gguf, GgufError};
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
    /// A Hugging Face folder.
    Checkpoint(Checkpoint, Names),
}

impl Source {
    /// Files and their bytes, the first part first.
    pub fn files(&self) -> Vec<(PathBuf, u64)> {
        match self {
            Source::Gguf(g) => g.parts().iter().map(|p| (p.path().to_path_buf(), p.length())).collect(),
            Source::Checkpoint(c, _) => c.files(),
        }
    }

    /// What is odd about the files, a sentence each.
    pub fn warnings(&self) -> Vec<String> {
        match self {
            Source::Gguf(g) => g.warnings().iter().map(ToString::to_string).collect(),
            Source::Checkpoint(c, _) => c.warnings().to_vec(),
        }
    }

    /// Whether the files are still what they were when they were opened, as far as lengths and times tell.
    ///
    /// # Errors
    /// The first that is not.
    pub fn unchanged(&self) -> Result<(), GgufError> {
        match self {
            Source::Gguf(g) => g.unchanged(),
            Source::Checkpoint(c, _) => c.unchanged(),
        }
    }

    /// The model's name, where the files have one.
    pub fn name(&self) -> Option<&str> {
        match self {
            Source::Gguf(g) => g.metadata().str("general.name").ok().flatten(),
            Source::Checkpoint(c, _) => c.folder().file_name().and_then(|n| n.to_str()),
        }
    }

    /// What to name in messages: the first part.
    pub fn path(&self) -> &Path {
        match self {
            Source::Gguf(g) => g.parts().first().map_or(Path::new(""), |p| p.path()),
            Source::Checkpoint(c, _) => c.folder(),
        }
    }

    /// Layers that have a w_kv_a, in no order.
    pub(super) fn layers(&self) -> Vec<usize> {
        match self {
            Source::Gguf(g) => {
                let layers = g.tensors().iter().filter_map(|t| in_layer(&t.name));
                layers.filter(|(_, name)| *name == Weight::WKvA.row().gguf).map(|l| l.0).collect()
            }
            Source::Checkpoint(c, _) => config::names(c).map(|n| n.1).unwrap_or_default(),
        }
    }

    /// Whether a layer has this tensor.
    pub(crate) fn holds(&self, layer: usize, held: Held) -> bool {
        match self {
            Source::Gguf(g) => g.tensor(&weights::gguf_name(layer, held)).is_some(),
            // kv_b is never split in a checkpoint.
            Source::Checkpoint(c, names) => match held {
                Held::Weight(Weight::WUk | Weight::WUv) => false,
                Held::Weight(w) | Held::KvB(w) => c.has(&names.module(layer, w)),
            },
        }
    }

    /// A layer's tensor, its shape checked.
    pub(crate) fn take(&self, layer: usize, held: Held, g: &Geometry) -> Result<Taken<'_>, ModelError> {
        match self {
            Source::Gguf(gguf) => weights::from_gguf(gguf, layer, held, g),
            Source::Checkpoint(c, names) => {
                Ok(from_checkpoint(c, &names.module(layer, held.weight().0), held, g)?)
            }
        }
    }
}

/// A layer's tensor of a checkpoint, its shape checked.
fn from_checkpoint<'a>(
    checkpoint: &'a Checkpoint,
    module: &str,
    held: Held,
    g: &Geometry,
) -> Result<Taken<'a>, CheckpointError> {
    let (weight, from_kv_b) = held.weight();
    let (rows, cols) = weights::matrix(weight, g, from_kv_b);
    let place = || checkpoint.folder().display();
    let Some(matrix) = checkpoint.matrix(module)? else {
        return Err(CheckpointError::new(
            format!("{module} has no weight; it should hold {weight}, {rows} x {cols}"),
            place(),
            "check that the download is complete and config.json is of this model",
        ));
    };
    if matrix.shape != (rows, cols) {
        let (r, c) = matrix.shape;
        return Err(CheckpointError::new(
            format!("tensor {} is {r} x {c}, config.json asks for {rows} x {cols}: {weight}", matrix.tensor),
            place(),
            "run `mla-check inspect` on the folder; one of the two is wrong",
        ));
    }
    Ok(Taken { tensor: matrix.tensor, ty: matrix.ty, rows: matrix.rows })
}
