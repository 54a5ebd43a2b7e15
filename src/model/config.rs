/*!
From a checkpoint's config.json to a model: architecture, geometry, rope; and where its layers' tensors are.

Numbers of config.json are decimals, taken as written: what conventions do about the float32 of GGUF metadata does not apply.
Both styles of rope settings are read (`rope_theta` and `rope_scaling` with `type` or `rope_type`; `rope_parameters` of
transformers 5), and the text part of a multimodal model. YaRN in general, which GGUF can't say (transformers 5.24,
`_compute_yarn_parameters` and the models' own scaling; g(m) = 0.1 m ln factor + 1, 1 where factor ≤ 1):

| | hf | vllm, sglang |
|---|---|---|
| cos, sin | · g(mscale) / g(mscale_all_dim), or · g(1) unless both are given | · g(mscale, 1 if absent) / g(mscale_all_dim, 0 if absent) |
| scale | · g(mscale_all_dim)² | same |

`llama.cpp` is what its converter would write, read as llama.cpp reads it.
*/

use super::arch::{self, Layers, Rotation, YarnMultiplier};
use super::rope::{Factors, plain_frequencies};
use super::{Convention, Model, ModelError, Numbers, Reading, Source, Yarn};
use crate::checkpoint::{Checkpoint, CheckpointError};
use mla_reference::{Geometry, Pairing, Spec, Temperature, Weight};
use serde_json::Value;
use std::collections::BTreeMap;

/// model_type and the architecture of the table that has the same attention.
const TYPES: &[(&str, &str)] = &[
    ("deepseek_v2", "deepseek2"),
    ("deepseek_v3", "deepseek2"),
    ("kimi_k2", "deepseek2"),
    ("glm4_moe_lite", "deepseek2"),
    ("deepseek_v32", "deepseek32"),
    ("glm_moe_dsa", "glm-dsa"),
    ("mistral4", "mistral4"),
    ("minicpm3", "minicpm3"),
    ("plm", "plm"),
    ("kimi_linear", "kimi-linear"),
];

/// Relatives whose attention is not what this program computes.
const REFUSED: &[(&str, &str)] = &[
    ("longcat_flash", "its query and key-value latents are scaled"),
    ("bailing_hybrid", "its heads' outputs are gated"),
    ("glm5_next", "its attention has no rope columns"),
];

/// What config.json says that [`Numbers`] has no place for.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Written {
    eps: f64,
    theta: f64,
    yarn: Option<Multipliers>,
    /// Whether YaRN leaves the softmax scale alone.
    plain_scale: bool,
    /// Sets of factors, as decimals.
    factors: Option<Factors>,
    /// `rope_interleave` false.
    half_split: bool,
}

/// YaRN's factor, `mscale` and `mscale_all_dim`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Multipliers {
    factor: f64,
    mscale: Option<f64>,
    all_dim: Option<f64>,
}

impl Multipliers {
    fn g(&self, m: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * m * libm::log(self.factor) + 1.0 }
    }
}

impl Written {
    /// Puts into a spec what the decimals say, unless it is llama.cpp's: that knows only what its converter wrote.
    pub(super) fn correct(&self, spec: &mut Spec, reading: &Reading) {
        if self.half_split {
            spec.rope.pairing = Pairing::Half;
        }
        let hf = match reading.convention {
            Convention::LlamaCpp => return,
            Convention::Hf | Convention::Auto => true,
            Convention::Vllm | Convention::Sglang => false,
        };
        spec.eps_attn = self.eps;
        spec.eps_latent = reading.norm_eps.unwrap_or(if hf { 1e-6 } else { self.eps });
        if let Some(y) = &self.yarn {
            let given = |m: Option<f64>| m.filter(|m| *m != 0.0);
            let (mscale, all_dim) = (given(y.mscale), given(y.all_dim));
            spec.rope.magnitude = match (mscale, all_dim) {
                (Some(m), Some(a)) => y.g(m) / y.g(a),
                _ if hf => y.g(1.0),
                _ => y.g(y.mscale.unwrap_or(1.0)) / y.g(y.all_dim.unwrap_or(0.0)),
            };
            let scale = all_dim.filter(|_| !self.plain_scale).map_or(1.0, |a| y.g(a) * y.g(a));
            spec.scale = scale / (spec.geometry.key() as f64).sqrt();
        }
        if let Some(f) = &self.factors {
            let plain = plain_frequencies(self.theta, spec.geometry.rope);
            let divisors = f.of(f.set(reading.n_ctx));
            spec.rope.inv_freq = plain.iter().zip(divisors).map(|(f, d)| f / d).collect();
        }
    }
}

/// Where in a checkpoint layers are.
#[derive(Clone, Debug)]
pub struct Names {
    /// What stands before `layers.N.`: `model.`, `language_model.model.`
    pub prefix: String,
}

impl Names {
    /// The module of a weight in a layer, without `.weight`.
    pub(crate) fn module(&self, layer: usize, weight: Weight) -> String {
        let hf = weight.row().hf;
        let module = hf.split_once(".weight").map_or(hf, |m| m.0);
        format!("{}layers.{layer}.{module}", self.prefix)
    }
}

/// A module's name as (prefix, layer, name in the layer).
pub(crate) fn in_layer(tensor: &str) -> Option<(&str, usize, &str)> {
    let at = if tensor.starts_with("layers.") { 0 } else { tensor.find(".layers.")? + 1 };
    let (prefix, rest) = tensor.split_at(at);
    let (number, name) = rest.strip_prefix("layers.")?.split_once('.')?;
    let canonical = number.bytes().all(|b| b.is_ascii_digit()) && (number == "0" || !number.starts_with('0'));
    Some((prefix, number.parse().ok().filter(|_| canonical)?, name))
}

const KV_A: &str = "self_attn.kv_a_proj_with_mqa.weight";

/// Layers with MLA attention by prefix: the one with most of them is the model's.
pub(super) fn names(checkpoint: &Checkpoint) -> Result<(Names, Vec<usize>), CheckpointError> {
    let mut by_prefix: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        if let Some((prefix, layer, name)) = in_layer(&tensor.name)
            && (name == KV_A || name.strip_suffix("_packed") == Some(KV_A))
        {
            by_prefix.entry(prefix).or_default().push(layer);
        }
    }
    let most = by_prefix.into_iter().max_by_key(|(_, layers)| layers.len());
    let Some((prefix, layers)) = most else {
        let what = "no tensor is named …layers.N.self_attn.kv_a_proj_with_mqa.weight: this is no MLA model in Hugging Face's names";
        let advice = "give a folder in the format of transformers (other names, such as DeepSeek's or Mistral's own, must be converted)";
        return Err(CheckpointError::new(what, checkpoint.folder().display(), advice));
    };
    Ok((Names { prefix: prefix.to_string() }, layers))
}

pub(super) struct Keys<'a> {
    checkpoint: &'a Checkpoint,
    text: &'a Value,
}

impl<'a> Keys<'a> {
    /// Of the text part, where the model is multimodal.
    pub(super) fn of(checkpoint: &'a Checkpoint) -> Keys<'a> {
        let config = checkpoint.config();
        let text = config.get("text_config").filter(|t| t.get("kv_lora_rank").is_some()).unwrap_or(config);
        Keys { checkpoint, text }
    }
    fn error(&self, what: String, advice: &str) -> ModelError {
        CheckpointError::new(what, self.checkpoint.config_path().display(), advice).into()
    }
    fn missing(&self, key: &str, meaning: &str) -> ModelError {
        self.error(format!("the key {key} is missing ({meaning})"), "fetch the publisher's config.json")
    }
    pub(super) fn bad(&self, key: &str, found: impl std::fmt::Display, why: &str) -> ModelError {
        self.error(format!("{key} is {found}, {why}"), "compare the file with the publisher's")
    }
    /// A key that is there and not null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.text.get(key).filter(|v| !v.is_null())
    }
    fn int_of(&self, key: &str, value: Option<&Value>) -> Result<Option<usize>, ModelError> {
        let Some(v) = value else { return Ok(None) };
        // 40.0 is 40.
        let n = v.as_u64().or_else(|| v.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0).map(|f| f as u64));
        match n.map(u32::try_from) {
            Some(Ok(n)) => Ok(Some(n as usize)),
            _ => Err(self.bad(key, short(v), "not a number that a model can have there")),
        }
    }
    pub(super) fn int(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.int_of(key, self.get(key))
    }
    pub(super) fn needed(&self, key: &str, meaning: &str) -> Result<usize, ModelError> {
        match self.int(key)? {
            Some(0) => Err(self.bad(key, 0, &format!("but {meaning} can't be 0"))),
            Some(n) => Ok(n),
            None => Err(self.missing(key, meaning)),
        }
    }
    fn float_of(&self, key: &str, value: Option<&Value>) -> Result<Option<f64>, ModelError> {
        let Some(v) = value.filter(|v| !v.is_null()) else { return Ok(None) };
        match v.as_f64().filter(|f| f.is_finite() && *f >= 0.0) {
            Some(f) => Ok(Some(f)),
            None => Err(self.bad(key, short(v), "not a number that makes sense there")),
        }
    }
}

/// A JSON value for a message.
fn short(v: &Value) -> String {
    v.to_string().chars().take(40).collect()
}

/// Reads all that decides the mathematics.
pub(super) fn model(checkpoint: Checkpoint) -> Result<Model, ModelError> {
    let keys = Keys::of(&checkpoint);
    let arch = architecture(&keys)?;
    if let Some(Value::Bool(true)) = keys.get("attention_bias") {
        return Err(keys.bad("attention_bias", "true", "and projections with a bias are not computed here"));
    }
    let geometry = geometry(&keys)?;
    let rope = rope(&keys, arch, geometry.rope)?;
    let eps = keys.float_of("rms_norm_eps", keys.get("rms_norm_eps"))?;
    let eps = eps.ok_or_else(|| keys.missing("rms_norm_eps", "eps of the norms"))?;
    let yarn = rope.yarn.map(|(y, _)| y);
    // As the converter writes them: only llama.cpp's convention reads these.
    let f32 = |x: f64| f64::from(x as f32);
    let as_tensor = |f: &Factors| {
        let f32s = |v: &[f64]| v.iter().copied().map(f32).collect();
        Factors { short: f32s(&f.short), long: f32s(&f.long), ..*f }
    };
    let numbers = Numbers {
        eps: f32(eps),
        theta: rope.theta,
        yarn,
        temperature: rope.temperature,
        factors: rope.factors.as_ref().map(as_tensor),
    };
    let half_split = matches!(keys.get("rope_interleave"), Some(Value::Bool(false)));
    let written = Written {
        eps,
        theta: rope.theta,
        yarn: rope.yarn.map(|(_, m)| m),
        plain_scale: arch.yarn == YarnMultiplier::Plain,
        factors: rope.factors,
        half_split: half_split && arch.rotation != Rotation::None,
    };
    let hidden_layers = keys.needed("num_hidden_layers", "number of layers")?;
    let nextn = keys.int("num_nextn_predict_layers")?.unwrap_or(0);
    let (names, layers) = names(&checkpoint)?;
    let mtp = if layers.iter().any(|l| *l >= hidden_layers) { nextn } else { 0 };
    let top_k = if arch.indexer.is_some() {
        Some(keys.needed("index_topk", "keys that the sparse indexer keeps")?)
    } else {
        None
    };
    let context_length = keys.int("max_position_embeddings")?.map(|v| v as u64);
    let blocks = hidden_layers.saturating_add(mtp);
    // Of layers of two kinds the ones with kv_a have MLA attention.
    let kv_heads = match (arch.layers, layers.iter().max()) {
        (Layers::ByHeadCountKv, Some(last)) => {
            Some((0..=*last).map(|l| u64::from(layers.contains(&l))).collect())
        }
        _ => None,
    };
    Ok(Model {
        arch,
        geometry,
        numbers,
        blocks,
        mtp,
        kv_heads,
        top_k,
        context_length,
        written: Some(written),
        source: Source::Checkpoint(checkpoint, names),
    })
}

fn architecture(keys: &Keys) -> Result<&'static arch::Architecture, ModelError> {
    let name = keys.get("model_type").and_then(Value::as_str).unwrap_or("(none)");
    let known = TYPES.iter().find(|t| t.0 == name).and_then(|t| arch::find(t.1));
    known.ok_or_else(|| {
        let supported: Vec<&str> = TYPES.iter().filter(|t| arch::find(t.1).is_some()).map(|t| t.0).collect();
        let why = match (REFUSED.iter().find(|r| r.0 == name), TYPES.iter().any(|t| t.0 == name)) {
            (Some((_, why)), _) => format!(": {why}"),
            (None, true) => " yet".to_string(),
            (None, false) => String::new(),
        };
        keys.error(
            format!("model_type {} is not supported{why}", name.escape_debug()),
            &format!("use a model of {}", supported.join(", ")),
        )
    })
}

fn geometry(keys: &Keys) -> Result<Geometry, ModelError> {
    let g = Geometry {
        hidden: keys.needed("hidden_size", "width of the hidden state")?,
        heads: keys.needed("num_attention_heads", "number of heads")?,
        q_rank: keys.int("q_lora_rank")?.unwrap_or(0),
        latent: keys.needed("kv_lora_rank", "width of the latent")?,
        rope: keys.needed("qk_rope_head_dim", "rotated columns of a head")?,
        nope: keys.needed("qk_nope_head_dim", "columns of a head that are not rotated")?,
        value: keys.needed("v_head_dim", "columns of a value head")?,
    };
    if g.heads > 1 << 16 {
        return Err(keys.bad("num_attention_heads", g.heads, "more than any model has"));
    }
    if g.rope % 2 == 1 {
        return Err(keys.bad("qk_rope_head_dim", g.rope, "but columns rotate in pairs"));
    }
    Ok(g)
}

struct RopeSettings {
    theta: f64,
    yarn: Option<(Yarn, Multipliers)>,
    temperature: Option<Temperature>,
    factors: Option<Factors>,
}

fn rope(keys: &Keys, arch: &arch::Architecture, width: usize) -> Result<RopeSettings, ModelError> {
    let (name, settings) = match (keys.get("rope_parameters"), keys.get("rope_scaling")) {
        (Some(v), _) => ("rope_parameters", Some(v)),
        (None, some) => ("rope_scaling", some),
    };
    let get = |key: &str| settings.and_then(|s| s.get(key)).filter(|v| !v.is_null());
    let float = |key: &str| keys.float_of(&format!("{name}.{key}"), get(key));
    let theta = match float("rope_theta")? {
        Some(t) => t,
        None => match keys.float_of("rope_theta", keys.get("rope_theta"))? {
            Some(t) => t,
            // Nothing is rotated: it has no meaning.
            None if arch.rotation == Rotation::None => 1e4,
            None => return Err(keys.missing("rope_theta", "base of rope's frequencies")),
        },
    };
    if theta <= 1.0 {
        return Err(keys.bad("rope_theta", theta, "but a base is above 1"));
    }
    let kind = get("rope_type").or_else(|| get("type")).and_then(Value::as_str).unwrap_or("default");
    let mut factors = None;
    let yarn = match kind {
        "default" | "none" => None,
        "longrope" if arch.factors => {
            let set = |key: &str| divisors(keys, &format!("{name}.{key}"), get(key), width / 2);
            let context = keys.needed("max_position_embeddings", "length the model was made for")? as f64;
            let (short, long) = (set("short_factor")?, set("long_factor")?);
            factors = Some(Factors { short, long, original: original(keys, name, &get)?, context });
            None
        }
        "yarn" | "deepseek_yarn" => Some(yarn(keys, name, &get, &float)?),
        other => {
            return Err(keys.bad(
                &format!("{name}.rope_type"),
                other.escape_debug(),
                "which is not supported for this model",
            ));
        }
    };
    let temperature = match float("llama_4_scaling_beta")?.filter(|b| *b != 0.0) {
        None => None,
        Some(scale) => {
            let length = original(keys, name, &get)?;
            Some(Temperature { scale, length })
        }
    };
    Ok(RopeSettings { theta, yarn, temperature, factors })
}

/// A set of rope factors.
fn divisors(keys: &Keys, key: &str, value: Option<&Value>, pairs: usize) -> Result<Vec<f64>, ModelError> {
    let all = value.and_then(Value::as_array).ok_or_else(|| keys.missing(key, "factors of rope"))?;
    let numbers: Vec<f64> =
        all.iter().filter_map(Value::as_f64).filter(|f| f.is_finite() && *f > 0.0).collect();
    if numbers.len() == pairs && all.len() == pairs {
        Ok(numbers)
    } else {
        Err(keys.bad(
            key,
            format!("an array of {}", all.len()),
            &format!("but {pairs} pairs have a positive factor each"),
        ))
    }
}

/// Positions that the model was first trained on.
fn original<'a>(keys: &Keys, name: &str, get: &dyn Fn(&str) -> Option<&'a Value>) -> Result<f64, ModelError> {
    let key = "original_max_position_embeddings";
    let there = keys.int_of(&format!("{name}.{key}"), get(key))?.or(keys.int(key)?);
    let length = match there {
        Some(n) => n,
        None => keys.needed("max_position_embeddings", "length the model was trained for")?,
    };
    if length == 0 { Err(keys.bad(key, 0, "but YaRN divides by it")) } else { Ok(length as f64) }
}

fn yarn<'a>(
    keys: &Keys,
    name: &str,
    get: &dyn Fn(&str) -> Option<&'a Value>,
    float: &dyn Fn(&str) -> Result<Option<f64>, ModelError>,
) -> Result<(Yarn, Multipliers), ModelError> {
    let factor = float("factor")?.filter(|f| *f > 0.0);
    let factor = factor.ok_or_else(|| keys.missing(&format!("{name}.factor"), "YaRN's factor"))?;
    if let Some(f) = float("attention_factor")? {
        return Err(keys.bad(
            &format!("{name}.attention_factor"),
            f,
            "and a factor of its own is not supported",
        ));
    }
    if let Some(Value::Bool(false)) = get("truncate") {
        return Err(keys.bad(&format!("{name}.truncate"), "false", "which is not supported"));
    }
    let (mscale, all_dim) = (float("mscale")?, float("mscale_all_dim")?);
    let original = original(keys, name, get)?;
    let yarn = Yarn {
        factor,
        original,
        beta_fast: float("beta_fast")?.unwrap_or(32.0),
        beta_slow: float("beta_slow")?.unwrap_or(1.0),
        // As the converter writes it.
        log_multiplier: all_dim.map(|m| f64::from((0.1 * m) as f32)),
    };
    Ok((yarn, Multipliers { factor, mscale, all_dim }))
}
