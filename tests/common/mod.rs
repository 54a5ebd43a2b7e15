//! Shared by tests: fixtures, arrays computed by other software, a sink that keeps tensors.
#![allow(dead_code)]

pub mod real;
pub mod small;

use mla_check::case::Case;
use mla_check::engine::reference::ReferenceEngine;
use mla_check::engine::{Engine, Sink, SinkError};
use mla_check::model::Layer;
use mla_check::trace::{Tensor, TensorId};
use mla_reference::product::Rows;
use mla_reference::{Form, Given, Phase, Plan, Regime, Sequence, Stage, Weight};
use ndarray::{Array2, ArrayD, IxDyn};
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A file of the repository.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// The models that are part of the repository, by name; a split one by its first part.
pub const MODELS: [(&str, &str); 2] = [
    ("dsv3.Q4_K_M", "models/dsv3.Q4_K_M-00001-of-00003.gguf"),
    ("glm5dims.Q4_K_M", "models/glm5dims.Q4_K_M.gguf"),
];

/// Every model of the repository whose attention other software computed (`fixtures/oracle/NAME.safetensors`).
pub const ORACLE: [(&str, &str); 7] = [
    MODELS[0],
    MODELS[1],
    ("dsv32dims.Q4_K_M", "architectures/dsv32dims.Q4_K_M.gguf"),
    ("kimi_linear_dims.Q4_K_M", "architectures/kimi_linear_dims.Q4_K_M.gguf"),
    ("minicpm3dims.Q4_K_M", "architectures/minicpm3dims.Q4_K_M.gguf"),
    ("mistral4dims.Q4_K_M", "architectures/mistral4dims.Q4_K_M.gguf"),
    ("plm_dims.Q4_K_M", "architectures/plm_dims.Q4_K_M.gguf"),
];

/// Hugging Face folders with answers beside them: those of the repository, and of `MLA_CHECK_CHECKPOINTS`.
pub fn checkpoints() -> Vec<PathBuf> {
    let more = std::env::var_os("MLA_CHECK_CHECKPOINTS").map(PathBuf::from);
    let mut all: Vec<PathBuf> = std::iter::once(fixture("checkpoints"))
        .chain(more)
        .flat_map(|dir| std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()))
        .filter(|p| p.is_dir())
        .collect();
    all.sort();
    assert!(all.len() >= 4);
    all
}

/// The answers of such a folder.
pub fn answers(folder: &Path) -> HashMap<String, ArrayD<f64>> {
    let name = folder.file_name().unwrap().to_str().unwrap();
    arrays(&folder.with_file_name(format!("{name}.answers.safetensors")))
}

/// Arrays of a .safetensors file in float64.
pub fn arrays(path: &Path) -> HashMap<String, ArrayD<f64>> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors()
        .into_iter()
        .map(|(name, t)| {
            let values: Vec<f64> = match t.dtype() {
                Dtype::F64 => t.data().as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
                Dtype::F32 => {
                    t.data().as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
                }
                Dtype::I64 => t.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
                Dtype::BOOL => t.data().iter().map(|b| f64::from(*b)).collect(),
                other => panic!("{name} is {other:?}"),
            };
            (name, ArrayD::from_shape_vec(IxDyn(t.shape()), values).unwrap())
        })
        .collect()
}

/// A sink that keeps everything.
#[derive(Default)]
pub struct Keep {
    pub tensors: HashMap<TensorId, Tensor>,
}

impl Keep {
    pub fn get(&self, stage: Stage, form: Form) -> &Tensor {
        &self.tensors[&TensorId::of(stage, form)]
    }
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
        self.tensors.insert(id, tensor.clone());
        Ok(false)
    }
}

/// One causal sequence of tokens at given positions, all of them new.
pub fn sequence(hidden: Array2<f64>, positions: &[u64]) -> Case {
    let n = positions.len();
    let phase = if n == 1 { Phase::Decode } else { Phase::Prefill };
    let seq = Sequence {
        request: 0,
        regime: Regime::Random,
        tokens: 0..n,
        context: 0,
        slots: (0..n).rev().collect(),
    };
    assert_eq!(seq.phase(), phase);
    Case {
        batch: format!("0+{n}").parse().unwrap(),
        regimes: vec![Regime::Random],
        plan: Plan {
            positions: positions.to_vec(),
            token_request: vec![0; n],
            sequences: vec![seq],
            page_size: 1,
            pages: n,
            splits: 1,
            ..Plan::default()
        },
        given: Given { hidden, context: vec![Array2::zeros((0, 0))], ..Given::default() },
        notes: Vec::new(),
    }
}

/// Runs the float64 reference.
pub fn reference(layer: &Layer, case: &Case, forms: &[Form]) -> Keep {
    let mut keep = Keep::default();
    ReferenceEngine.run(layer, case, forms, &mut keep).unwrap();
    keep
}
