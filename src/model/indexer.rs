/*!
The sparse indexer of a layer (DSA): its scalars and weights, from GGUF or a checkpoint; or which layer's choice it takes over.

Nothing of it is read before it is asked for: dense attention needs none of it. Engines disagree about the same file:

| | hf | llama.cpp | vllm | sglang |
|---|---|---|---|---|
| pairs of the rope, from a checkpoint | `indexer_rope_interleave`, else the model's own | the model's own | `indexer_rope_interleave`, else half-split | as vllm |
| eps of the keys' norm | 1e-6 | 1e-6, `glm-dsa` 0 | 1e-6 | 1e-6 |
| Hadamard matrix | no | yes | no | yes |

The model's own pairs: `glm-dsa` adjacent, `deepseek32` half-split. The matrix leaves logits as they are.
*/

use super::config::Keys as Config;
use super::read::Keys as Metadata;
use super::weights::values;
use super::{Convention, Model, ModelError, Reading, Source};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::gguf::Gguf;
use mla_reference::product::Rows;
use mla_reference::rows::dense;
use mla_reference::{IndexWeights, Indexer, Pairing, Rope};
use serde_json::Value;

/// Where a layer's selection comes from.
pub enum Selects<'a> {
    /// From nowhere: the model has no indexer.
    All,
    /// From an indexer of its own.
    Own(Box<(Indexer, IndexWeights<'a>)>),
    /// From the indexer of this layer before.
    From(usize),
}

/// A tensor of the indexer: names in GGUF (after `blk.N.`) and in a checkpoint (after `layers.N.`).
struct Named {
    gguf: &'static str,
    hf: &'static str,
}

const Q: Named = Named { gguf: "indexer.attn_q_b.weight", hf: "self_attn.indexer.wq_b" };
const K: Named = Named { gguf: "indexer.attn_k.weight", hf: "self_attn.indexer.wk" };
const PROJ: Named = Named { gguf: "indexer.proj.weight", hf: "self_attn.indexer.weights_proj" };
const GAMMA: Named = Named { gguf: "indexer.k_norm.weight", hf: "self_attn.indexer.k_norm.weight" };
const BETA: Named = Named { gguf: "indexer.k_norm.bias", hf: "self_attn.indexer.k_norm.bias" };

/// More than any model has; keeps shapes far from overflow.
const MOST: usize = 1 << 16;

impl Model {
    /// The indexer of a layer, every shape checked.
    ///
    /// # Errors
    /// Keys or tensors that are missing or make no sense.
    pub fn selects(&self, layer: usize, reading: &Reading) -> Result<Selects<'_>, ModelError> {
        let (Some(pairing), Some(top_k)) = (self.arch.indexer, self.top_k) else { return Ok(Selects::All) };
        let full = self.full_layers()?;
        if !full(layer) {
            let before = (0..layer).rev().find(|l| full(*l));
            return before.map(Selects::From).ok_or_else(|| self.nobody(layer));
        }
        let (heads, width) = match &self.source {
            Source::Gguf(gguf) => {
                let keys = Metadata { gguf, arch: self.arch };
                let heads = keys.needed("attention.indexer.head_count", "heads of the sparse indexer")?;
                (heads, keys.needed("attention.indexer.key_length", "width of the indexer's heads")?)
            }
            Source::Checkpoint(c, _) => {
                let keys = Config::of(c);
                let heads = keys.needed("index_n_heads", "heads of the sparse indexer")?;
                (heads, keys.needed("index_head_dim", "width of the indexer's heads")?)
            }
        };
        let convention = reading.convention;
        let hadamard = matches!(convention, Convention::LlamaCpp | Convention::Sglang);
        let rope = Rope { pairing: self.index_pairing(pairing, convention), ..self.spec(reading).rope };
        if heads > MOST || width > MOST || width < 2 * rope.inv_freq.len() {
            let why = format!("but {} columns of each of its heads rotate", 2 * rope.inv_freq.len());
            return Err(self.bad_width(format!("{heads} heads of {width}"), why));
        }
        if hadamard && !width.is_power_of_two() {
            let why = format!(
                "but {} multiplies by a Hadamard matrix, whose width is a power of two",
                convention.name()
            );
            return Err(self.bad_width(width.to_string(), why));
        }
        // llama.cpp never sets this eps for glm-dsa.
        let unset = convention == Convention::LlamaCpp && self.arch.name == "glm-dsa";
        let indexer = Indexer { heads, width, top_k, rope, eps: if unset { 0.0 } else { 1e-6 }, hadamard };
        let g = &self.geometry;
        let matrix = |named: &Named, rows, cols| self.index_matrix(layer, named, rows, cols);
        let weights = IndexWeights {
            q: matrix(&Q, heads * width, g.q_rank)?,
            k: matrix(&K, width, g.hidden)?,
            gamma: self.index_vector(layer, &GAMMA, width)?,
            beta: self.index_vector(layer, &BETA, width)?,
            proj: matrix(&PROJ, heads, g.hidden)?,
        };
        Ok(Selects::Own(Box::new((indexer, weights))))
    }

    /// Which layers have an indexer of their own.
    fn full_layers(&self) -> Result<Box<dyn Fn(usize) -> bool>, ModelError> {
        match &self.source {
            Source::Gguf(gguf) => {
                let key = format!("{}.attention.indexer.types", self.arch.name);
                let listed = gguf.metadata().u64_or_array(&key)?;
                let shared = self.arch.name == "glm-dsa" && self.context_length.is_some_and(|n| n >= 1 << 20);
                Ok(match listed {
                    Some(all) => Box::new(move |l| all.get(l).is_none_or(|full| *full != 0)),
                    None if shared => Box::new(every(4, 3)),
                    None => Box::new(|_| true),
                })
            }
            Source::Checkpoint(c, _) => {
                let keys = Config::of(c);
                if let Some(all) = keys.get("indexer_types").and_then(Value::as_array) {
                    let shared: Vec<bool> = all.iter().map(|t| t.as_str() == Some("shared")).collect();
                    return Ok(Box::new(move |l| !shared.get(l).copied().unwrap_or(false)));
                }
                let frequency = keys.int("index_topk_freq")?.filter(|n| *n > 0).unwrap_or(1);
                Ok(Box::new(every(frequency, keys.int("index_topk_offset")?.unwrap_or(1))))
            }
        }
    }

    fn index_pairing(&self, own: Pairing, convention: Convention) -> Pairing {
        let Source::Checkpoint(c, _) = &self.source else { return own };
        let said = match Config::of(c).get("indexer_rope_interleave") {
            Some(Value::Bool(true)) => Some(Pairing::Adjacent),
            Some(Value::Bool(false)) => Some(Pairing::Half),
            _ => None,
        };
        match convention {
            Convention::LlamaCpp => own,
            Convention::Hf | Convention::Auto => said.unwrap_or(own),
            Convention::Vllm | Convention::Sglang => said.unwrap_or(Pairing::Half),
        }
    }

    fn nobody(&self, layer: usize) -> ModelError {
        let found = format!("'shared' for layer {layer}");
        let why = "but no layer before it has an indexer whose choice it could take".to_string();
        match &self.source {
            Source::Gguf(gguf) => {
                let keys = Metadata { gguf, arch: self.arch };
                keys.bad(&keys.key("attention.indexer.types"), found, why)
            }
            Source::Checkpoint(c, _) => Config::of(c).bad("indexer_types", found, &why),
        }
    }

    fn bad_width(&self, found: String, why: String) -> ModelError {
        match &self.source {
            Source::Gguf(gguf) => {
                let keys = Metadata { gguf, arch: self.arch };
                keys.bad(&keys.key("attention.indexer.key_length"), found, why)
            }
            Source::Checkpoint(c, _) => Config::of(c).bad("index_head_dim", found, &why),
        }
    }

    fn index_matrix(
        &self,
        layer: usize,
        named: &Named,
        rows: usize,
        cols: usize,
    ) -> Result<Box<dyn Rows + '_>, ModelError> {
        match &self.source {
            Source::Gguf(gguf) => from_gguf(gguf, &format!("blk.{layer}.{}", named.gguf), &[cols, rows]),
            Source::Checkpoint(c, names) => {
                let module = format!("{}layers.{layer}.{}", names.prefix, named.hf);
                let found =
                    c.matrix(&module)?.ok_or_else(|| lost(c, &module, &format!("{rows} x {cols}")))?;
                if found.shape != (rows, cols) {
                    let (r, k) = found.shape;
                    return Err(CheckpointError::new(
                        format!("tensor {} is {r} x {k}, config.json asks for {rows} x {cols}", found.tensor),
                        c.folder().display(),
                        "run `mla-check inspect` on the folder; one of the two is wrong",
                    )
                    .into());
                }
                Ok(found.rows)
            }
        }
    }

    fn index_vector(&self, layer: usize, named: &Named, len: usize) -> Result<Vec<f64>, ModelError> {
        match &self.source {
            Source::Gguf(gguf) => {
                let rows = from_gguf(gguf, &format!("blk.{layer}.{}", named.gguf), &[len])?;
                Ok(dense(rows.as_ref(), 0..1, false).into_raw_vec_and_offset().0)
            }
            Source::Checkpoint(c, names) => {
                let name = format!("{}layers.{layer}.{}", names.prefix, named.hf);
                Ok(c.vector(&name, len)?.ok_or_else(|| lost(c, &name, &format!("{len} values")))?)
            }
        }
    }
}

/// GLM-5.2's rule: the layers before `offset` and then every `frequency`-th, counted from the last of those.
fn every(frequency: usize, offset: usize) -> impl Fn(usize) -> bool {
    move |layer| (layer + 1).saturating_sub(offset) % frequency == 0
}

/// A tensor of the indexer; `dims` fastest first.
fn from_gguf<'a>(gguf: &'a Gguf, name: &str, dims: &[usize]) -> Result<Box<dyn Rows + 'a>, ModelError> {
    let file = || gguf.parts().first().map(|p| p.path().display().to_string()).unwrap_or_default();
    let wanted: Vec<u64> = dims.iter().map(|d| *d as u64).collect();
    let Some(info) = gguf.tensor(name) else {
        let wanted = format!("a weight of the sparse indexer, dims {wanted:?}");
        return Err(ModelError::MissingTensor { name: name.into(), file: file(), wanted });
    };
    if info.dims != wanted {
        return Err(ModelError::WrongShape {
            tensor: name.into(),
            file: file(),
            found: info.dims.clone(),
            wanted,
            role: "a weight of the sparse indexer".into(),
        });
    }
    Ok(values(gguf, info, dims[0])?.1)
}

fn lost(checkpoint: &Checkpoint, name: &str, wanted: &str) -> CheckpointError {
    CheckpointError::new(
        format!("{name} is missing; it should hold a weight of the sparse indexer, {wanted}"),
        checkpoint.folder().display(),
        "check that the download is complete and config.json is of this model",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GLM-5.2: full at 0, 1, 2 and then every fourth.
    #[test]
    fn layers_with_an_indexer_of_their_own() {
        let full: Vec<usize> = (0..16).filter(|l| every(4, 3)(*l)).collect();
        assert_eq!(full, [0, 1, 2, 6, 10, 14]);
        assert!((0..9).all(every(1, 1)));
    }
}
