/*!
Scales of whole tensors: what a checkpoint in NVFP4 has beside its blocks.

`blk.N.X.scale`, one float32, belongs to `blk.N.X.weight`; every value of the weight is multiplied by it. It is honoured for
every weight that has one. llama.cpp (0c1e57098) asks for it beside attn_q and attn_output alone, and refuses a file that has
one beside another weight: to read such a weight without it would accuse a correct engine.
*/

use super::ModelError;
use super::lint::Severity;
use crate::gguf::{Gguf, TensorInfo};
use mla_reference::{GgmlType, Weight};

/// Name of the scale of a tensor.
fn name(tensor: &str) -> String {
    format!("{}.scale", tensor.strip_suffix(".weight").unwrap_or(tensor))
}

fn is_scale(info: &TensorInfo) -> bool {
    info.ty.known() == Some(GgmlType::F32) && info.dims.iter().all(|n| *n == 1)
}

/// The scale of a tensor, where the file has one.
///
/// # Errors
/// One that is no single float32, or whose bytes can't be had.
pub(super) fn of(gguf: &Gguf, tensor: &str, file: impl Fn() -> String) -> Result<Option<f32>, ModelError> {
    let Some(info) = gguf.tensor(&name(tensor)) else { return Ok(None) };
    let wrong = || ModelError::WrongScale {
        scale: info.name.clone(),
        tensor: tensor.into(),
        found: format!("type {} and dims {:?}", info.ty, info.dims),
        file: file(),
    };
    if !is_scale(info) {
        return Err(wrong());
    }
    let bytes = gguf.bytes(info)?.first_chunk().ok_or_else(wrong)?;
    Ok(Some(f32::from_le_bytes(*bytes)))
}

/// What a weight's scale, or that it has none, gives reason to say.
pub(super) fn finding(gguf: &Gguf, tensor: &TensorInfo, weight: Weight) -> Option<(Severity, String)> {
    let short =
        |n: &str| crate::model::in_layer(n).map_or(n.to_string(), |(_, rest)| format!("blk.*.{rest}"));
    let Some(scale) = gguf.tensor(&name(&tensor.name)) else {
        let what = format!("{} is NVFP4 and has no tensor scale: 1 is taken", short(&tensor.name));
        return (tensor.ty.known() == Some(GgmlType::NVFP4)).then_some((Severity::Note, what));
    };
    let scale_name = short(&scale.name);
    if !is_scale(scale) {
        let what = format!(
            "{scale_name} should be the scale of its weight, one F32, but has type {} and dims {:?}",
            scale.ty, scale.dims
        );
        return Some((Severity::Defect, what));
    }
    let read = matches!(weight, Weight::WQ | Weight::WO);
    let what = format!(
        "{scale_name} is a tensor scale that llama.cpp does not ask for: it refuses the file; `run` multiplies by it"
    );
    (!read).then_some((Severity::Warning, what))
}
