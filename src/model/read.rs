/*! Reading the metadata of an MLA model: keys, their defaults, and what contradicts itself. */

use super::arch::{self, ARCHITECTURES, Architecture, Layers, NoValueLength, Query, Widths};
use super::weights::blocks;
use super::{Factors, Model, ModelError, Numbers, Source, Yarn};
use crate::gguf::Gguf;
use mla_reference::rows::dense;
use mla_reference::{Geometry, Temperature};

/// Path of the first part.
pub(super) fn file(gguf: &Gguf) -> String {
    gguf.parts().first().map(|p| p.path().display().to_string()).unwrap_or_default()
}

pub(super) struct Keys<'a> {
    pub(super) gguf: &'a Gguf,
    pub(super) arch: &'static Architecture,
}

impl Keys<'_> {
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch.name)
    }
    pub(super) fn int(&self, name: &str) -> Result<Option<usize>, ModelError> {
        let key = self.key(name);
        let value = self.gguf.metadata().u64(&key)?;
        match value.map(u32::try_from) {
            None => Ok(None),
            Some(Ok(v)) => Ok(Some(v as usize)),
            Some(Err(_)) => Err(self.bad(&key, value.unwrap_or(0), "more than any model has".into())),
        }
    }
    pub(super) fn needed(&self, name: &str, meaning: &'static str) -> Result<usize, ModelError> {
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
    pub(super) fn bad(&self, key: &str, found: impl std::fmt::Display, why: String) -> ModelError {
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
            why: name.map_or("the file does not say which model it is", arch::refusal),
            file: file(&gguf),
            supported: supported(),
        });
    };
    let keys = Keys { gguf: &gguf, arch };
    let geometry = geometry(&keys)?;
    let blocks = keys.needed("block_count", "number of layers")?;
    let numbers = numbers(&keys, geometry.rope)?;
    let kv_heads = kv_heads(&keys, blocks)?;
    let top_k =
        if arch.indexer.is_some() { keys.int("attention.indexer.top_k")?.filter(|k| *k > 0) } else { None };
    if arch.indexer.is_some() && top_k.is_none() {
        return Err(keys.missing("attention.indexer.top_k", "keys that the sparse indexer keeps"));
    }
    let context_length = keys.int("context_length")?.map(|v| v as u64);
    let mtp = gguf.metadata().u64(&keys.key("nextn_predict_layers")).ok().flatten().unwrap_or(0);
    let mtp = usize::try_from(mtp).unwrap_or(usize::MAX);
    let source = Source::Gguf(gguf);
    let written = None;
    Ok(Model { arch, geometry, numbers, blocks, mtp, kv_heads, top_k, context_length, written, source })
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
    let q_rank = match keys.arch.query {
        Query::Direct => 0,
        Query::Rank => keys.needed("attention.q_lora_rank", "query rank")?,
        Query::Either => keys.int("attention.q_lora_rank")?.unwrap_or(0),
    };
    let (key, value, key_name, value_name) = widths(keys, hidden, heads)?;
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
        return Err(keys.bad(&keys.key(value_name), 0, "so values have no columns".into()));
    }
    Ok(Geometry { hidden, heads, q_rank, latent, rope, nope: key - rope, value })
}

/// Widths of a key head and of a value head, and the keys that hold them.
fn widths(
    keys: &Keys,
    hidden: usize,
    heads: usize,
) -> Result<(usize, usize, &'static str, &'static str), ModelError> {
    const MLA: [&str; 2] = ["attention.key_length_mla", "attention.value_length_mla"];
    const PLAIN: [&str; 2] = ["attention.key_length", "attention.value_length"];
    const MEANINGS: [&str; 2] = ["width of a key head", "width of a value head"];
    let mla = match keys.arch.widths {
        Widths::Plain => [None, None],
        Widths::Mla | Widths::Either => [keys.int(MLA[0])?, keys.int(MLA[1])?],
    };
    match mla {
        [Some(k), Some(v)] => Ok((k, v, MLA[0], MLA[1])),
        [None, None] if keys.arch.widths != Widths::Mla => {
            let value = match keys.arch.no_value_length {
                NoValueLength::HiddenPerHead if keys.int(PLAIN[1])?.is_none() => hidden / heads,
                _ => keys.needed(PLAIN[1], MEANINGS[1])?,
            };
            Ok((keys.needed(PLAIN[0], MEANINGS[0])?, value, PLAIN[0], PLAIN[1]))
        }
        [Some(_), None] => Err(keys.missing(MLA[1], MEANINGS[1])),
        [None, _] => Err(keys.missing(MLA[0], MEANINGS[0])),
    }
}

/// Of an architecture whose layers are of two kinds: key heads of each layer, as far as the file says.
fn kv_heads(keys: &Keys, blocks: usize) -> Result<Option<Vec<u64>>, ModelError> {
    if keys.arch.layers == Layers::All {
        return Ok(None);
    }
    let key = keys.key("attention.head_count_kv");
    match keys.gguf.metadata().u64_or_array(&key)? {
        // One for all of them.
        Some(all) if all.len() == 1 || all.len() >= blocks => Ok(Some(all)),
        Some(all) => {
            let why = format!("but {} is {blocks}", keys.key("block_count"));
            Err(keys.bad(&key, format!("an array of {}", all.len()), why))
        }
        None => Ok(None),
    }
}

fn numbers(keys: &Keys, rope: usize) -> Result<Numbers, ModelError> {
    let eps = keys
        .float("attention.layer_norm_rms_epsilon")?
        .ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon", "eps of the norms"))?;
    let theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
    if theta <= 1.0 {
        return Err(keys.bad(&keys.key("rope.freq_base"), theta, "but a base is above 1".into()));
    }
    Ok(Numbers {
        eps,
        theta,
        yarn: yarn(keys)?,
        temperature: temperature(keys)?,
        factors: if keys.arch.factors { factors(keys, rope)? } else { None },
    })
}

/// The two sets of rope factors; None where the file has neither.
fn factors(keys: &Keys, rope: usize) -> Result<Option<Factors>, ModelError> {
    let (short, long) = (divisors(keys, SHORT, rope)?, divisors(keys, LONG, rope)?);
    let (short, long) = match (short, long) {
        (None, None) => return Ok(None),
        (Some(short), Some(long)) => (short, long),
        (short, _) => {
            return Err(ModelError::MissingTensor {
                name: if short.is_none() { SHORT } else { LONG }.into(),
                file: file(keys.gguf),
                wanted: format!("factors of rope [{}], as the other set that is there", rope / 2),
            });
        }
    };
    let context = keys.needed("context_length", "length the model was made for")?;
    let original = keys.int("rope.scaling.original_context_length")?.filter(|n| *n > 0).unwrap_or(context);
    Ok(Some(Factors { short, long, original: original as f64, context: context as f64 }))
}

const SHORT: &str = "rope_factors_short.weight";
const LONG: &str = "rope_factors_long.weight";

/// One set of factors.
fn divisors(keys: &Keys, name: &'static str, rope: usize) -> Result<Option<Vec<f64>>, ModelError> {
    let Some(info) = keys.gguf.tensor(name) else { return Ok(None) };
    let wanted = vec![(rope / 2) as u64];
    if info.dims != wanted {
        return Err(ModelError::WrongShape {
            tensor: name.into(),
            file: file(keys.gguf),
            found: info.dims.clone(),
            wanted,
            role: "a divisor for each pair of rope columns".into(),
        });
    }
    let values = dense(&blocks(keys.gguf, info, rope / 2)?, 0..1, false).into_raw_vec_and_offset().0;
    match values.iter().find(|v| !(v.is_finite() && **v > 0.0)) {
        None => Ok(Some(values)),
        Some(v) => Err(ModelError::BadValue {
            tensor: name.into(),
            found: v.to_string(),
            why: "but a factor divides a frequency",
            file: file(keys.gguf),
        }),
    }
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
        // The factors are in tensors.
        Some("longrope") if keys.arch.factors => return Ok(None),
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
