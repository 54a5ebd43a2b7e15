/*! Writing a case: the CPU engine's tensors up to the attention, as bits. */

use super::file::{Array, CaseFile, SCHEMA};
use crate::case::{Batch, Case, Draw, HiddenError, Request};
use crate::engine::cpu::CpuEngine;
use crate::engine::{Engine, EngineError, Sink, SinkError};
use crate::model::{Layer, Model, ModelError, Reading};
use crate::trace::npy::{self, NpyError, write_atomically, write_integers};
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Axis, Form, Given, Plan, Regime, Route, Sequence, Stage, Weight, Weights};
use ndarray::{Array2, s};
use std::path::{Path, PathBuf};

/// The loader that is copied into each case.
const LOADER: &str = include_str!("../../examples/python-kernel/mla_case.py");

/// Why a case could not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CaseError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Hidden(#[from] HiddenError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Npy(#[from] NpyError),
    #[error("the case could not be written: {0}\n  where: {1}\n  do: name a folder that can be written")]
    Io(std::io::Error, String),
}

/// What to draw.
#[derive(Clone, Debug)]
pub struct Options {
    /// Form of the attention.
    pub form: Form,
    /// Requests.
    pub batch: Batch,
    /// Dtype of all tensors but lse.
    pub dtype: DType,
    /// Regimes of contexts.
    pub regimes: Vec<Regime>,
    /// Seed.
    pub seed: u64,
    /// Slots of a page.
    pub page_size: usize,
    /// How the model's numbers are read.
    pub reading: Reading,
}

/// What was written.
#[derive(Debug)]
pub struct Written {
    /// The folder.
    pub dir: PathBuf,
    /// The case.
    pub case: CaseFile,
    /// Bytes of all arrays.
    pub bytes: u64,
}

/// Draws a case of a layer and writes it into a folder.
///
/// # Errors
/// A layer without MLA, a folder that can't be written.
pub fn write(model: &Model, index: usize, options: &Options, dir: &Path) -> Result<Written, CaseError> {
    let stored = model.weights(index)?;
    let spec = model.spec(&options.reading);
    let layer = Layer { index, spec: spec.clone(), weights: &stored };
    let drawn = Draw {
        batch: options.batch.clone(),
        regimes: options.regimes.clone(),
        seed: options.seed,
        page_size: options.page_size,
        splits: 1,
        route: Route::default(),
        dtype: options.dtype,
        hidden: None,
        spec: &spec,
        weights: &stored,
    };
    let case = apart(drawn.case()?);
    let (inputs, outputs): (&[Stage], &[(Stage, bool)]) = match options.form {
        Form::Absorbed => (
            &[Stage::Q, Stage::Cache, Stage::QLatent],
            &[(Stage::OLatent, false), (Stage::Lse, true), (Stage::AttnOut, true)],
        ),
        Form::Fused => (&[Stage::Q, Stage::K, Stage::V], &[(Stage::AttnOut, false), (Stage::Lse, true)]),
    };
    let mut keep = Keep { wanted: inputs.to_vec(), tensors: Vec::new() };
    match CpuEngine::new(options.dtype, 1).run(&layer, &case, &[options.form], &mut keep) {
        Ok(()) | Err(EngineError::Sink(SinkError::Enough)) => {}
        Err(e) => return Err(e.into()),
    }
    let io = |e| CaseError::Io(e, dir.display().to_string());
    std::fs::create_dir_all(dir.join("out")).map_err(io)?;
    let mut folder = Folder { dir, bytes: 0 };
    let mut tensors = std::collections::BTreeMap::new();
    for (stage, tensor) in keep.tensors {
        if stage == Stage::Q && options.form == Form::Absorbed {
            tensors.insert("q_pe".to_string(), folder.save("q_pe", &rope_columns(&tensor, &spec.geometry))?);
        } else {
            tensors.insert(stage.name().to_string(), folder.save(stage.name(), &tensor)?);
        }
    }
    if options.form == Form::Absorbed {
        tensors.insert("block_table".into(), folder.pages(&case.plan)?);
        if let Some(rows) = stored.matrix(Weight::WUv) {
            let up = dense(rows, Weight::WUv.shape(&spec.geometry), options.dtype);
            tensors.insert(Weight::WUv.name().into(), folder.save(Weight::WUv.name(), &up)?);
        }
    }
    let wanted = outputs.iter().map(|(stage, optional)| {
        let dtype = if *stage == Stage::Lse { DType::F32 } else { options.dtype };
        let array = Array {
            file: format!("out/{}.npy", stage.name()),
            dtype: dtype.name().into(),
            axes: stage.axes(Some(options.form)).iter().map(|a| a.name().into()).collect(),
            shape: case.plan.shape(*stage, Some(options.form), &spec.geometry),
            optional: *optional,
        };
        (stage.name().to_string(), array)
    });
    let g = &spec.geometry;
    let widths =
        [("heads", g.heads), ("nope", g.nope), ("rope", g.rope), ("value", g.value), ("latent", g.latent)];
    let file = CaseFile {
        schema: SCHEMA.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        model: format!("{}, layer {index}", model.arch.name),
        form: options.form,
        scale: spec.scale,
        geometry: widths.into_iter().map(|(n, v)| (n.to_string(), v)).collect(),
        requests: case.batch.0.iter().map(|r| format!("{}+{}", r.context, r.new)).collect(),
        regimes: case.plan.sequences.iter().map(|s| s.regime.name().to_string()).collect(),
        positions: case.plan.positions.iter().map(|p| *p as usize).collect(),
        page_size: case.plan.page_size,
        tensors,
        wanted: wanted.collect(),
    };
    std::fs::write(dir.join("mla_case.py"), LOADER).map_err(io)?;
    write_atomically(&dir.join("case.json"), |out| {
        serde_json::to_writer_pretty(out, &file).map_err(Into::into)
    })
    .map_err(io)?;
    Ok(Written { dir: dir.into(), bytes: folder.bytes, case: file })
}

/// The case with a request of its own for each sequence: what both regimes share stands twice.
fn apart(case: Case) -> Case {
    let (mut positions, mut token_request, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
    let mut hidden = Array2::zeros((0, case.given.hidden.ncols()));
    let mut batch = Vec::new();
    for (i, seq) in case.plan.sequences.iter().enumerate() {
        let start = positions.len();
        positions.extend(&case.plan.positions[seq.tokens.clone()]);
        token_request.extend(std::iter::repeat_n(i, seq.tokens.len()));
        let rows = case.given.hidden.slice(s![seq.tokens.clone(), ..]);
        hidden = ndarray::concatenate![ndarray::Axis(0), hidden, rows];
        batch.push(Request { context: seq.context, new: seq.tokens.len() });
        sequences.push(Sequence { request: i, tokens: start..positions.len(), ..seq.clone() });
    }
    Case {
        batch: Batch(batch),
        plan: Plan { positions, token_request, sequences, ..case.plan },
        given: Given { hidden, ..case.given },
        ..case
    }
}

/// Keeps the tensors that attention reads, and stops the engine when it has them.
struct Keep {
    wanted: Vec<Stage>,
    tensors: Vec<(Stage, Tensor)>,
}

impl Sink for Keep {
    fn weight(&mut self, _: Weight, _: &dyn Rows) -> Result<(), SinkError> {
        Ok(())
    }
    fn norm(&mut self, _: Weight, _: &[f64]) -> Result<(), SinkError> {
        Ok(())
    }
    fn evidence(&mut self, _: TensorId, _: &str) -> Result<(), SinkError> {
        Ok(())
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        if self.wanted.contains(&id.stage) {
            self.tensors.push((id.stage, tensor.clone()));
        }
        if self.tensors.len() == self.wanted.len() { Err(SinkError::Enough) } else { Ok(false) }
    }
}

/// The rotated columns of queries.
fn rope_columns(q: &Tensor, g: &mla_reference::Geometry) -> Tensor {
    let n = q.dtype.bytes();
    let heads = q.bytes.chunks_exact(g.key() * n);
    let bytes = heads.flat_map(|h| h[g.nope * n..].iter().copied()).collect();
    let shape = vec![q.rows, g.heads, g.rope];
    Tensor { axes: vec![Axis::Token, Axis::Head, Axis::Rope], shape, cols: g.heads * g.rope, bytes, ..*q }
}

/// A weight as a kernel holds it.
fn dense(rows: &dyn Rows, shape: Vec<usize>, dtype: DType) -> Tensor {
    let values = mla_reference::rows::dense(rows, 0..rows.rows(), false);
    let (n, cols) = (rows.rows(), rows.cols());
    let mut bytes = vec![0; n * cols * dtype.bytes()];
    dtype.encode_into(values.as_standard_layout().as_slice().unwrap_or(&[]), &mut bytes);
    Tensor { dtype, axes: Weight::WUv.row().axes.to_vec(), shape, rows: n, cols, bytes }
}

/// Where arrays are written.
struct Folder<'a> {
    dir: &'a Path,
    bytes: u64,
}

impl Folder<'_> {
    fn save(&mut self, name: &str, tensor: &Tensor) -> Result<Array, CaseError> {
        let file = format!("{name}.npy");
        npy::write(&self.dir.join(&file), tensor)?;
        self.bytes += tensor.bytes.len() as u64;
        Ok(Array {
            file,
            dtype: tensor.dtype.name().into(),
            axes: tensor.axes.iter().map(|a| a.name().into()).collect(),
            shape: tensor.shape.clone(),
            optional: false,
        })
    }

    /// Pages of each request, in the order of its keys; -1 behind the last.
    fn pages(&mut self, plan: &Plan) -> Result<Array, CaseError> {
        let size = plan.page_size;
        let own =
            |s: &Sequence| s.slots.iter().step_by(size).map(|slot| (slot / size) as i32).collect::<Vec<_>>();
        let most = plan.sequences.iter().map(|s| s.keys().div_ceil(size)).max().unwrap_or(0);
        let shape = [plan.sequences.len(), most];
        let mut table = vec![-1; shape[0] * shape[1]];
        for (row, seq) in table.chunks_exact_mut(most.max(1)).zip(&plan.sequences) {
            let pages = own(seq);
            row[..pages.len()].copy_from_slice(&pages);
        }
        let file = "block_table.npy".to_string();
        write_integers(&self.dir.join(&file), &shape, &table)?;
        self.bytes += 4 * table.len() as u64;
        Ok(Array {
            file,
            dtype: "i32".into(),
            axes: vec!["request".into(), "page".into()],
            shape: shape.to_vec(),
            optional: false,
        })
    }
}
