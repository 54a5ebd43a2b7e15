/*!
The engine `cpu`: what a GPU kernel computes, emulated bit for bit by the contract that it declares.

Operands lie on the grid of a dtype (bf16, f16, f32), products are exact, accumulators are float32 and round
as [`sum`] says; elementwise stages work in float32; attention is an online softmax over tiles with P cast
before P·V, decode rows are computed in splits and merged. Nothing depends on threads, on the other
requests of a batch or on where pages lie.

It shares with the reference the table of stages, decoding of weights and the formats, no mathematics of a
stage: [`matrix`], [`elementwise`] and [`attention`] are its own. The module `run` puts the stages in order.
*/

pub mod attention;
pub mod elementwise;
pub mod matrix;
mod run;
pub mod seams;
pub mod slips;
mod stacked;
pub mod sum;

use super::stack::QkvA;
use super::{Description, Engine, EngineError, Sink};
use crate::case::Case;
use crate::model::Layer;
use mla_numeric::DType;
use mla_reference::{Accumulate, Contract, Form, Softmax};
pub use seams::{Gain, Seams};

/// Keys of a tile where nobody asks for another length.
const TILE: usize = 64;

/// A GPU kernel on the CPU.
#[derive(Clone, Copy, Debug)]
pub struct CpuEngine {
    /// Stored dtype of weights and activations: Bf16, F16 or F32.
    pub dtype: DType,
    /// How products add up. `Mma` needs a 16-bit dtype.
    pub accumulate: Accumulate,
    /// Keys of a tile.
    pub tile: usize,
    /// P is cast to the dtype before P·V (in f32 there is nothing to cast).
    pub cast_p: bool,
    /// Splits of the keys in decode; the case's plan must have as many.
    pub splits: usize,
    /// Whether q_a and kv_a are one product.
    pub qkv_a: QkvA,
    /// Deliberate faults.
    pub seams: Seams,
}

impl CpuEngine {
    /// The usual kernel of a dtype: 16-bit operands in blocks of 16 products, as the cores of a GPU take them,
    /// or a float32 loop of fmas in chains of 256.
    pub fn new(dtype: DType, splits: usize) -> CpuEngine {
        let accumulate = match dtype {
            DType::F32 => Accumulate::Rn { block: 1, chain: 256 },
            _ => Accumulate::Rn { block: 16, chain: 0 },
        };
        CpuEngine {
            dtype,
            accumulate,
            tile: TILE,
            cast_p: true,
            splits,
            qkv_a: QkvA::Split,
            seams: Seams::default(),
        }
    }

    fn p(&self) -> Option<DType> {
        (self.cast_p && self.dtype != DType::F32).then_some(self.dtype)
    }

    /// How products sum, or why this engine can't be.
    fn sum(&self) -> Result<sum::Sum, EngineError> {
        let broke =
            |what: String, fix: &str| EngineError::Broke(format!("{what}\n  where: engine cpu\n  do: {fix}"));
        if !matches!(self.dtype, DType::Bf16 | DType::F16 | DType::F32) {
            return Err(broke(format!("no kernel computes in {}", self.dtype), "take bf16, f16 or f32"));
        }
        let mma = matches!(self.accumulate, Accumulate::Mma { .. });
        if mma && self.p().is_none() {
            let what = "a tensor core with 16-bit operands can't multiply a float32 P".to_string();
            return Err(broke(what, "cast P, or accumulate with rn"));
        }
        if self.tile == 0 || self.splits == 0 {
            return Err(broke("a tile or a number of splits is 0".into(), "take at least 1"));
        }
        sum::Sum::new(self.accumulate, self.dtype).ok_or_else(|| {
            let what = format!("no kernel accumulates {:?} with {} operands", self.accumulate, self.dtype);
            broke(what, "take rn with a block of 1 or more, or mma with bf16 or f16")
        })
    }
}

impl Engine for CpuEngine {
    fn describe(&self) -> Description {
        Description::plain("cpu", "CPU: a GPU kernel's arithmetic, emulated")
    }

    fn seams(&self) -> Option<&Seams> {
        Some(&self.seams)
    }

    fn with_splits(&self, splits: usize) -> Option<Box<dyn Engine + '_>> {
        Some(Box::new(CpuEngine { splits, ..*self }))
    }

    fn contract(&self) -> Contract {
        Contract {
            norm_weights: DType::F32,
            softmax: Softmax { tile: self.tile, p: self.p(), ..Softmax::exact() },
            splits: self.splits.into(),
            ..Contract::usual(self.dtype, self.accumulate)
        }
    }

    fn run(
        &self,
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        run::Run::new(self, layer, case)?.all(forms, sink)
    }
}
