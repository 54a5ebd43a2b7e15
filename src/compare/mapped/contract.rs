/*! The contract that a dump is judged by: the map's, with what the dump itself shows. */

use super::super::map::MapContract;
use super::super::{CompareError, sane};
use super::Reader;
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::{Accumulate, Contract, Phase, Plan, Softmax, Splits, Stage, Weight};

/// Whether the contract says where the tiles of every row lie: a scheduler's splits are not known, nor those of a prefill
/// whose rows it does not say to be split.
pub(super) fn placed(contract: &Contract, plan: &Plan) -> bool {
    let whole = contract.softmax.tile == 0;
    plan.sequences.iter().all(|s| {
        let one = contract.split_ranges(s.keys()).len() <= 1 && contract.splits != Splits::Scheduled;
        let split = s.phase() == Phase::Decode || contract.split_prefill;
        whole || one || split && contract.splits != Splits::Scheduled
    })
}

impl Reader<'_> {
    /// The contract to emulate, and how it was chosen where nobody declares it. What is stored how is the dump's.
    pub(super) fn contract(
        &self,
        tensors: &[(TensorId, Tensor)],
        weights: &[(Weight, (DType, Vec<f64>))],
    ) -> Result<(Contract, Option<String>), CompareError> {
        let is_lse = |t: &&(TensorId, Tensor)| t.0.stage == Stage::Lse;
        let first = tensors.iter().find(|t| !is_lse(t)).map(|(id, t)| (id.to_string(), t.dtype));
        let Some((name, dtype)) = first else {
            return Err(self.bad("[tensors]", "no tensor but lse is named", "name those that were dumped"));
        };
        if let Some((id, t)) = tensors.iter().find(|t| !is_lse(t) && t.1.dtype != dtype) {
            return Err(self.bad(
                &id.to_string(),
                &format!("it is {}, and {name} is {dtype}", t.dtype),
                "dump tensors as the engine stores them; say dtype in the map where they were widened",
            ));
        }
        let narrow = dtype.precision() < DType::F32.precision();
        let (mut contract, chosen) = match &self.map.contract {
            MapContract::Declared(c) => (**c, None),
            MapContract::File(name, c) => (**c, Some(name.clone())),
            MapContract::Named(k) => {
                let c = k.contract_for(dtype);
                let softmax = Softmax { p: c.softmax.p.filter(|_| narrow), ..c.softmax };
                (Contract { softmax, ..c }, Some(k.name.clone()))
            }
            MapContract::None => {
                let softmax = Softmax { emulate: false, p: narrow.then_some(dtype), ..Softmax::exact() };
                (
                    Contract { softmax, ..Contract::usual(dtype, Accumulate::Unknown) },
                    Some("none".to_string()),
                )
            }
        };
        if contract.activations != dtype {
            return Err(self.bad(
                &name,
                &format!("it is {dtype}, and the contract stores {}", contract.activations),
                "correct one of the two",
            ));
        }
        if let Some(rope) = &self.map.rope {
            contract.rope_table = rope.table;
            contract.rope_angle = rope.angle;
            contract.rope_products = rope.products;
        }
        contract.splits = self.map.splits.unwrap_or(contract.splits);
        if !sane(&contract) {
            return Err(self.bad(
                "contract",
                "its tiles or splits are of no kernel",
                "give at most 1024 parts",
            ));
        }
        contract.lse_base = self.map.lse_base.unwrap_or(contract.lse_base);
        if let Some((_, lse)) = tensors.iter().find(is_lse) {
            contract.lse = lse.dtype;
        }
        for norm in [false, true] {
            let mut kinds = weights.iter().filter(|w| w.0.is_norm() == norm).map(|w| (w.0, w.1.0));
            let Some((_, dtype)) = kinds.next() else { continue };
            if let Some((w, other)) = kinds.find(|k| k.1 != dtype) {
                return Err(self.bad(
                    w.name(),
                    &format!("it is {other}, other weights are {dtype}"),
                    "name weights of one dtype",
                ));
            }
            *(if norm { &mut contract.norm_weights } else { &mut contract.weights }) = dtype;
        }
        Ok((contract, chosen))
    }
}
