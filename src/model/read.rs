/*! Reading the metadata of an MLA model: keys, their defaults, and what contradicts itself. */

use super::arch::{self, ARCHITECTURES, Architecture};
use super::{Model, ModelError, Numbers, Source, Yarn};
use crate::gguf::Gguf;
use mla_reference::{Geometry, Temperature};

/// Path of the first part.
pub(super) fn file(gguf: &Gguf) -> String {
    gguf.parts().first().map(|p| p.path().display().to_string()).unwrap_or_default()
}

struct Keys<'a> {
    gguf: &'a Gguf,
    arch: &'static Architecture,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch.name)
    }
    fn int(&self, name: &str) -> Result<Option<usize>, ModelError> {
        let key = self.key(name);
        let value = self.gguf.metadata().u64(&key)?;
        match value.map(u32::try_from) {
            None => Ok(None),
            Some(Ok(v)) => Ok(Some(v as usize)),
            Some(Err(_)) => Err(self.bad(&key, value.unwrap_or(0), "more than any model has".into())),
        }
    }
    fn needed(&self, name: &str, meaning: &'static str) -> Result<usize, ModelError> {
        let v = self.int(name)?.ok_or_else(|| self.missing(name, meaning))?;
        if v == 0 {
            return Err(self.bad(&self.key(name), v, format!("but {meaning} can't be 0")));
        }
        Ok(v)
    }
    fn float(&self, name: &str) -> Result<Option<f64>, ModelError> {
        let key = self.key(name);
        let v = self.gguf.metadata().f64(&key)?;
        match v {
            Some(x) if !x.is_finite() || x < 0.0 => {
                Err(self.bad(&key, x, "not a number that makes sense".into()))
            }
            other => Ok(other),
        }
    }
    fn missing(&self, name: &str, meaning: &'static str) -> ModelError {
        ModelError::MissingKey { key: self.key(name), meaning, file: file(self.gguf) }
    }
    fn bad(&self, key: &str, found: impl std::fmt::Display, why: String) -> ModelError {
        ModelError::BadKey {
            key: key.to_string(),
            found: found.to_string(),
            why,
            file: file(self.gguf),
            advice: "convert the model again, or mend the key".into(),
        }
    }
}

/// Reads all that decides the mathematics.
pub(super) fn model(gguf: Gguf) -> Result<Model, ModelError> {
    let name = gguf.metadata().str("general.architecture")?;
    let supported =
        || ARCHITECTURES.iter().map(|a| format!("{} ({})", a.name, a.models)).collect::<Vec<_>>().join(", ");
    let Some(arch) = name.and_then(arch::find) else {
        return Err(ModelError::Architecture {
            found: name.unwrap_or("(none)").escape_default().to_string(),
            file: file(&gguf),
            supported: supported(),
        });
    };
    let keys = Keys { gguf: &gguf, arch };
    let geometry = geometry(&keys)?;
    let numbers = numbers(&keys)?;
    let blocks = keys.needed("block_count", "number of layers")?;
    let top_k = if arch.indexer { keys.int("attention.indexer.top_k")?.filter(|k| *k > 0) } else { None };
    if arch.indexer && top_k.is_none() {
        return Err(keys.missing("attention.indexer.top_k", "keys that the sparse indexer keeps"));
    }
    let context_length = keys.int("context_length")?.map(|v| v as u64);
    let mtp = gguf.metadata().u64(&keys.key("nextn_predict_layers")).ok().flatten().unwrap_or(0);
    let mtp = usize::try_from(mtp).unwrap_or(usize::MAX);
    Ok(Model { arch, geometry, numbers, blocks, mtp, top_k, context_length, source: Source::Gguf(gguf) })
}

fn geometry(keys: &Keys) -> Result<Geometry, ModelError> {
    let hidden = keys.needed("embedding_length", "width of the hidden state")?;
    let heads_key = keys.key("attention.head_count");
    let heads = keys.gguf.metadata().u64_or_array(&heads_key)?;
    let heads = match heads.as_deref() {
        None | Some([]) => return Err(keys.missing("attention.head_count", "number of heads")),
        Some([first, rest @ ..]) => {
            if rest.iter().any(|h| h != first) {
                return Err(keys.bad(
                    &heads_key,
                    "different from layer to layer",
                    "which is not supported yet".into(),
                ));
            }
            match usize::try_from(*first) {
                Ok(h) if h > 0 && h <= 1 << 16 => h,
                _ => return Err(keys.bad(&heads_key, first, "not a number of heads".into())),
            }
        }
    };
    let latent = keys.needed("attention.kv_lora_rank", "width of the latent")?;
    let q_rank = keys.int("attention.q_lora_rank")?.unwrap_or(0);
    if q_rank == 0 && !keys.arch.without_query_rank {
        return Err(keys.missing("attention.q_lora_rank", "query rank"));
    }
    let mla = (keys.int("attention.key_length_mla")?, keys.int("attention.value_length_mla")?);
    let (key, value, key_name) = match mla {
        (Some(k), Some(v)) => (k, v, "attention.key_length_mla"),
        (None, None) if keys.arch.legacy => (
            keys.needed("attention.key_length", "width of a key head")?,
            keys.needed("attention.value_length", "width of a value head")?,
            "attention.key_length",
        ),
        (None, None) => return Err(keys.missing("attention.key_length_mla", "width of a key head")),
        (Some(_), None) => return Err(keys.missing("attention.value_length_mla", "width of a value head")),
        (None, Some(_)) => return Err(keys.missing("attention.key_length_mla", "width of a key head")),
    };
    let rope = keys.needed("rope.dimension_count", "rotated columns of a head")?;
    let rope_key = keys.key("rope.dimension_count");
    if rope % 2 == 1 {
        return Err(keys.bad(&rope_key, rope, "but columns rotate in pairs".into()));
    }
    if rope >= key {
        return Err(keys.bad(
            &rope_key,
            rope,
            format!("but {} is {key}: no column is left unrotated", keys.key(key_name)),
        ));
    }
    if value == 0 {
        return Err(keys.bad(&keys.key("attention.value_length_mla"), 0, "so values have no columns".into()));
    }
    Ok(Geometry { hidden, heads, q_rank, latent, rope, nope: key - rope, value })
}

fn numbers(keys: &Keys) -> Result<Numbers, ModelError> {
    let eps = keys
        .float("attention.layer_norm_rms_epsilon")?
        .ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon", "eps of the norms"))?;
    let theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
    if theta <= 1.0 {
        return Err(keys.bad(&keys.key("rope.freq_base"), theta, "but a base is above 1".into()));
    }
    Ok(Numbers { eps, theta, yarn: yarn(keys)?, temperature: temperature(keys)? })
}

fn yarn(keys: &Keys) -> Result<Option<Yarn>, ModelError> {
    let type_key = keys.key("rope.scaling.type");
    let kind = keys.gguf.metadata().str(&type_key)?;
    let factor = match keys.float("rope.scaling.factor")? {
        None => keys.float("rope.scale_linear")?,
        some => some,
    };
    let scaled = factor.is_some_and(|f| f != 0.0 && f != 1.0);
    match kind {
        Some("none") => return Ok(None),
        Some("yarn") => {}
        None | Some("linear") if !scaled => return Ok(None),
        other => {
            let found = other.unwrap_or("absent, which means linear,").escape_default().to_string();
            let why = format!("with factor {}: only none and yarn are supported", factor.unwrap_or(0.0));
            return Err(keys.bad(&type_key, found, why));
        }
    }
    let Some(factor) = factor.filter(|f| *f > 0.0) else {
        return Err(keys.missing("rope.scaling.factor", "YaRN's factor"));
    };
    if let Some(f) = keys.float("rope.scaling.attn_factor")?.filter(|f| *f != 1.0) {
        return Err(keys.bad(
            &keys.key("rope.scaling.attn_factor"),
            f,
            "and a factor of its own is not supported".into(),
        ));
    }
    let original = match keys.int("rope.scaling.original_context_length")? {
        Some(v) => v,
        None => keys.needed("context_length", "length the model was trained for")?,
    };
    Ok(Some(Yarn {
        factor,
        original: original as f64,
        beta_fast: keys.float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        log_multiplier: keys.float("rope.scaling.yarn_log_multiplier")?,
    }))
}

fn temperature(keys: &Keys) -> Result<Option<Temperature>, ModelError> {
    let Some(scale) = keys.float("attention.temperature_scale")?.filter(|s| *s != 0.0) else {
        return Ok(None);
    };
    let length = keys.int("attention.temperature_length")?.unwrap_or(0);
    if length == 0 {
        return Err(keys.missing("attention.temperature_length", "period of the temperature"));
    }
    Ok(Some(Temperature { scale, length: length as f64 }))
}
