/*!
A kernel author's crate: an RMSNorm of one's own, put under the harness's whole matrix.

The kernel exists twice. [`rms_norm`] is its arithmetic as a function, which runs anywhere: [`Own`] is an engine that
computes every stage as the program's CPU engine does, but takes the norms from that function. `kernels/norm.cu` is the
kernel itself: [`on_gpu`] is the program's GPU engine with that file in place of its own. `tests/matrix.rs` hands both to the
harness.
*/

use mla_check::case::Case;
use mla_check::check::Options;
use mla_check::device::cuda::Cuda;
use mla_check::engine::cpu::CpuEngine;
use mla_check::engine::kernels::KernelEngine;
use mla_check::engine::kernels::library::Library;
use mla_check::engine::{Description, Engine, EngineError, Sink, SinkError};
use mla_check::model::Layer;
use mla_check::trace::{Tensor, TensorId};
use mla_reference::product::Rows;
use mla_reference::{Contract, Form, Stage, Weight};
use std::path::Path;

/// An RMSNorm of a row: values, weights, eps.
pub type Norm = fn(&[f32], &[f32], f32) -> Vec<f32>;

/// What `kernels/norm.cu` computes, before results are rounded: eight columns at a time, summed by 128 threads.
pub fn rms_norm(x: &[f32], gamma: &[f32], eps: f32) -> Vec<f32> {
    let mut threads = [0f32; 128];
    for (i, piece) in x.chunks(8).enumerate() {
        let sum = &mut threads[i % 128];
        for pair in piece.chunks(2) {
            *sum = pair.iter().rev().fold(*sum, |sum, v| v.mul_add(*v, sum));
        }
    }
    let mean = threads.iter().sum::<f32>() / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    x.iter().zip(gamma).map(|(x, g)| x * scale * g).collect()
}

/// The program's CPU engine with norms of one's own.
pub struct Own {
    others: CpuEngine,
    norm: Norm,
}

impl Own {
    /// With this norm.
    pub fn new(options: &Options, norm: Norm) -> Own {
        Own { others: CpuEngine::new(options.dtype, options.splits()), norm }
    }
}

impl Engine for Own {
    fn describe(&self) -> Description {
        Description::plain("own", "CPU: an author's norms, all other stages as engine cpu")
    }

    /// What is rounded where: known before the run, and held to.
    fn contract(&self) -> Contract {
        self.others.contract()
    }

    fn run(
        &self,
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        let mut own = Replace { layer, norm: self.norm, input: None, sink };
        self.others.run(layer, case, forms, &mut own)
    }
}

/// Stands between engine and judge: every tensor goes through here before the engine goes on from it.
struct Replace<'a> {
    layer: &'a Layer<'a>,
    norm: Norm,
    /// What the next norm reads.
    input: Option<Tensor>,
    sink: &'a mut dyn Sink,
}

impl Sink for Replace<'_> {
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        let spec = &self.layer.spec;
        let replaced = match id.stage {
            Stage::AttnIn => Some((Weight::GAttn, spec.eps_attn)),
            Stage::QANormed => Some((Weight::GQ, spec.eps_latent)),
            Stage::KvCNormed => Some((Weight::GKv, spec.eps_latent)),
            _ => None,
        };
        if let (Some((weight, eps)), Some(input)) = (replaced, &self.input) {
            let gamma = self.layer.weights.norm(weight).unwrap_or_default();
            let gamma: Vec<f32> = gamma.iter().map(|g| *g as f32).collect();
            for row in 0..tensor.rows {
                let x: Vec<f32> = (0..tensor.cols).map(|c| input.get(row, c) as f32).collect();
                let y = (self.norm)(&x, &gamma, eps as f32);
                // Rounded to the dtype that the tensor is stored in.
                tensor.write(row, 0, &y.iter().map(|v| f64::from(*v)).collect::<Vec<_>>());
            }
        }
        let altered = self.sink.tensor(id, tensor)?;
        // A norm follows what it reads.
        if matches!(id.stage, Stage::Hidden | Stage::QA | Stage::KvA) {
            self.input = Some(tensor.clone());
        }
        Ok(altered || replaced.is_some())
    }

    fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        self.sink.weight(weight, rows)
    }

    fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
        self.sink.norm(weight, values)
    }

    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.sink.evidence(id, what)
    }
}

/// The kernel's folder.
pub fn kernels() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels"))
}

/// For the harness: the engine above, as the options of a case ask for it.
///
/// # Errors
/// None; engines of other authors may have some.
pub fn on_cpu(options: &Options) -> Result<Box<dyn Engine>, EngineError> {
    Ok(Box::new(Own::new(options, rms_norm)))
}

/// For the harness: the program's kernels on a GPU, with `kernels/norm.cu` among them.
///
/// # Errors
/// No GPU; a header that is wrong.
pub fn on_gpu(options: &Options) -> Result<Box<dyn Engine>, EngineError> {
    let device = Cuda::open(options.gpu).map_err(|e| EngineError::Unavailable(e.to_string()))?;
    let library = Library::folder(kernels(), options.dtype)?;
    Ok(Box::new(KernelEngine::new("own-gpu", device, library, options.splits(), &options.forms)?))
}
