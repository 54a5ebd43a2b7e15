/*!
`--save DIR`: every tensor of engine and reference as .npy, with a manifest.

`DIR/layer-N/[FORM.]TENSOR.{engine,reference}.npy` and `manifest.json`, which says axes, dtype (NumPy has no
bfloat16: its bits are stored as `<u2`), engine, requests, slots, contract and scalars; `compare` reads it back. The manifest is written last:
a folder without one is not whole.
*/

use super::npy::{self, NpyError, write_atomically};
use super::{Tensor, TensorId};
use crate::case::Case;
use crate::engine::{Description, SinkError};
use crate::judge::Recorder;
use crate::model::Reading;
use mla_reference::{Contract, Spec};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Writes tensors of one layer.
pub struct Saver {
    dir: PathBuf,
    layer: usize,
    entries: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    tensor: &'static str,
    form: Option<&'static str>,
    side: &'static str,
    file: String,
    axes: Vec<&'static str>,
    shape: Vec<usize>,
    dtype: &'static str,
}

/// What a run is, for whoever reads its tensors.
pub struct Run<'a> {
    /// The engine.
    pub engine: &'a Description,
    /// How the model's numbers were read.
    pub reading: &'a Reading,
    /// Numbers of the layer.
    pub spec: &'a Spec,
    /// The case.
    pub case: &'a Case,
    /// The contract that the engine declares.
    pub contract: &'a Contract,
}

#[derive(Serialize)]
struct SequenceEntry {
    request: usize,
    regime: &'static str,
    tokens: std::ops::Range<usize>,
    context: usize,
    slots: Vec<usize>,
}

#[derive(Serialize)]
struct Manifest<'a> {
    schema: &'static str,
    version: &'static str,
    engine: &'a Description,
    convention: &'static str,
    norm_eps: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    n_ctx: Option<u64>,
    layer: usize,
    batch: String,
    positions: &'a [u64],
    page_size: usize,
    pages: usize,
    splits: usize,
    ranks: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context_chunk: Option<usize>,
    sequences: Vec<SequenceEntry>,
    scalars: Vec<(String, f64)>,
    contract: &'a Contract,
    tensors: &'a [Entry],
}

impl Saver {
    /// Makes the layer's folder.
    pub fn new(dir: &Path, layer: usize) -> Result<Saver, NpyError> {
        let dir = dir.join(format!("layer-{layer}"));
        let io = |what, path: &Path| {
            let path = path.display().to_string();
            move |source| NpyError::Io { what, verb: "written", path, source }
        };
        std::fs::create_dir_all(&dir).map_err(io("making a folder", &dir))?;
        // An old manifest would vouch for files that are about to change.
        let manifest = dir.join("manifest.json");
        if manifest.exists() {
            std::fs::remove_file(&manifest).map_err(io("replacing a manifest", &manifest))?;
        }
        Ok(Saver { dir, layer, entries: Vec::new() })
    }

    /// Writes one tensor of one side.
    pub fn write(&mut self, id: TensorId, side: &'static str, tensor: &Tensor) -> Result<(), SinkError> {
        let form = id.form.map(|f| f.name());
        let prefix = form.map(|f| format!("{f}.")).unwrap_or_default();
        let file = format!("{prefix}{}.{side}.npy", id.stage.name());
        npy::write(&self.dir.join(&file), tensor).map_err(|e| SinkError::Write(e.to_string()))?;
        self.entries.push(Entry {
            tensor: id.stage.name(),
            form,
            side,
            file,
            axes: tensor.axes.iter().map(|a| a.name()).collect(),
            shape: tensor.shape.clone(),
            dtype: tensor.dtype.name(),
        });
        Ok(())
    }

    /// Writes the manifest.
    pub fn finish(self, run: &Run) -> Result<(), NpyError> {
        let Run { engine, reading, spec, case, contract } = *run;
        let sequences = case.plan.sequences.iter().map(|s| SequenceEntry {
            request: s.request,
            regime: s.regime.name(),
            tokens: s.tokens.clone(),
            context: s.context,
            slots: s.slots.clone(),
        });
        let manifest = Manifest {
            schema: "mla-check.dump/1",
            version: env!("CARGO_PKG_VERSION"),
            engine,
            convention: reading.convention.name(),
            norm_eps: reading.norm_eps,
            n_ctx: reading.n_ctx,
            layer: self.layer,
            batch: case.batch.to_string(),
            positions: &case.plan.positions,
            page_size: case.plan.page_size,
            pages: case.plan.pages,
            splits: case.plan.splits,
            ranks: case.plan.ranks,
            route: case.plan.route.threshold,
            context_chunk: case.plan.route.context_chunk,
            sequences: sequences.collect(),
            scalars: spec.scalars(),
            contract,
            tensors: &self.entries,
        };
        let path = self.dir.join("manifest.json");
        write_atomically(&path, |out| serde_json::to_writer_pretty(out, &manifest).map_err(Into::into))
            .map_err(|source| NpyError::Io {
                what: "writing the manifest",
                verb: "written",
                path: path.display().to_string(),
                source,
            })
    }
}

impl Recorder for Saver {
    fn record(&mut self, id: TensorId, engine: &Tensor, reference: &Tensor) -> Result<(), SinkError> {
        self.write(id, "engine", engine)?;
        self.write(id, "reference", reference)
    }
}
