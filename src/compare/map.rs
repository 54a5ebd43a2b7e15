/*!
Maps: which array of a dump is which tensor, and what the dump does not say of itself.

TOML with a closed set of keys ([docs/dumps.md](../../../docs/dumps.md)). Unknown names are errors that list the nearest
ones: a map with a slip of the pen must not turn a tensor into one that was not captured.
*/

use super::CompareError;
use crate::case::Batch;
use crate::contracts;
use crate::model::Convention;
use mla_numeric::DType;
use mla_reference::{Contract, Form, LseBase, Pairing, RopeAngle, Scope, Splits, Stage, Weight};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Rope columns of queries, where a dump has no others: what attention reads beside `q_latent`.
pub const Q_PE: &str = "q_pe";

/// What a map says.
#[derive(Clone, Debug)]
pub struct Map {
    /// Backend and version, for the report.
    pub engine: EngineName,
    /// Layer of the model.
    pub layer: Option<usize>,
    /// Rank that dumped, for the report.
    pub rank: Option<usize>,
    /// Whose reading of the model's numbers; None: the backend's.
    pub convention: Option<Convention>,
    /// eps of the q_a and kv_a norms.
    pub norm_eps: Option<f64>,
    /// The contract that is emulated.
    pub contract: MapContract,
    /// Splits of the keys in decode, instead of the contract's.
    pub splits: Option<Splits>,
    /// Form of tensors that both forms have.
    pub form: Option<Form>,
    /// Lengths of requests.
    pub requests: Requests,
    /// Array of each new token's position; None: those of a causal sequence.
    pub positions: Option<String>,
    /// Slots of a page.
    pub page_size: usize,
    /// Base of lse; None: the contract's.
    pub lse_base: Option<LseBase>,
    /// How positions are rotated; None: as the contract says, where the engine declares it, else unknown.
    pub rope: Option<RopeTable>,
    /// Scalars that the engine used, by the names of `run --save`'s manifest.
    pub geometry: BTreeMap<String, f64>,
    /// Tensors of activations.
    pub stages: Vec<(Target, Entry)>,
    /// Weights.
    pub weights: Vec<(Weight, Entry)>,
}

/// Backend and version.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct EngineName {
    pub backend: String,
    pub version: String,
}

/// Which contract.
#[derive(Clone, Debug)]
pub enum MapContract {
    /// Written in the map: the engine declares it.
    Declared(Box<Contract>),
    /// Nothing is known.
    None,
    /// A kernel of the built-in table.
    Named(&'static contracts::Kernel),
    /// A file's.
    File(String, Box<Contract>),
}

/// Where lengths come from.
#[derive(Clone, Debug)]
pub enum Requests {
    /// The map.
    Given(Batch),
    /// Two integer arrays of the dump: keys after the step, and new tokens, of each request.
    Arrays {
        /// Array of all keys.
        keys: String,
        /// Array of new tokens.
        new: String,
    },
}

/// How an engine rotates, as fields of a contract.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeTable {
    /// cos and sin are held in this.
    pub table: DType,
    /// From which angles.
    #[serde(default = "exact")]
    pub angle: RopeAngle,
    /// What products are rounded to before they are added.
    pub products: Option<DType>,
}

fn exact() -> RopeAngle {
    RopeAngle::Exact
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A stage in a form; None: shared, or of the map's form.
    Stage(Stage, Option<Form>),
    /// [`Q_PE`].
    QPe,
}

/// Where the values of a tensor are.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Array's name.
    #[serde(default)]
    pub name: String,
    /// Axes in the order of the dump.
    pub axes: Option<Vec<String>>,
    /// What the bits are, where the file does not say.
    pub dtype: Option<DType>,
    /// Order of rope pairs in the dump.
    pub pair_order: Option<PairOrder>,
    /// Part of an axis that counts.
    #[serde(default)]
    pub slice: BTreeMap<String, (usize, usize)>,
    /// Two arrays, one after the other on the last axis, instead of one.
    #[serde(default)]
    pub parts: Vec<Entry>,
    /// Cache: integer array [request, page] of the pages of each request.
    pub block_table: Option<String>,
    /// Cache: integer array of the slot of each key, request after request.
    pub slots: Option<String>,
}

/// Order of the pairs that a rotation turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum PairOrder {
    Adjacent,
    Half,
}

impl PairOrder {
    /// As the reference has it.
    pub fn pairing(self) -> Pairing {
        match self {
            PairOrder::Adjacent => Pairing::Adjacent,
            PairOrder::Half => Pairing::Half,
        }
    }
}

/// The form in files.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    engine: EngineName,
    layer: Option<usize>,
    rank: Option<usize>,
    convention: Option<String>,
    norm_eps: Option<f64>,
    contract: Option<toml::Value>,
    splits: Option<Splits>,
    form: Option<Form>,
    requests: Option<Vec<String>>,
    lengths: Option<Lengths>,
    positions: Option<String>,
    #[serde(default = "page_size")]
    page_size: usize,
    lse: Option<Lse>,
    rope: Option<RopeTable>,
    #[serde(default)]
    geometry: BTreeMap<String, f64>,
    tensors: BTreeMap<String, toml::Value>,
}

fn page_size() -> usize {
    64
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Lengths {
    keys: String,
    new: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Lse {
    base: LseBase,
}

impl Map {
    /// Reads a map from a file.
    pub fn read(path: &Path) -> Result<Map, CompareError> {
        let place = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|e| {
            CompareError::new(
                format!("the map can't be read: {e}"),
                format!("--map {place}"),
                "name a .toml file that can be read",
            )
        })?;
        Map::parse(&text, &place)
    }

    /// Reads a map; `place` names it in errors.
    pub fn parse(text: &str, place: &str) -> Result<Map, CompareError> {
        let bad = |what: String, how: &str| CompareError::new(what, place, how);
        let w: Written = toml::from_str(text).map_err(|e| {
            bad(format!("not a map: {}", e.to_string().trim()), "write the keys that docs/dumps.md lists")
        })?;
        if w.page_size == 0 || w.page_size > 65536 {
            return Err(bad(format!("page_size {} is no page", w.page_size), "give a size from 1 to 65536"));
        }
        let requests = match (w.requests, w.lengths) {
            (Some(list), None) => Requests::Given(
                list.join(",")
                    .parse::<Batch>()
                    .map_err(|e| bad(first_line(&e), "write requests = [\"CONTEXT+NEW\", …]"))?,
            ),
            (None, Some(l)) => Requests::Arrays { keys: l.keys, new: l.new },
            _ => {
                return Err(bad(
                    "the lengths of the requests must be said once".into(),
                    "write requests = [\"CONTEXT+NEW\", …], or lengths = { keys = \"ARRAY\", new = \"ARRAY\" }",
                ));
            }
        };
        let convention = w.convention.map(|c| convention(&c, place)).transpose()?;
        let mut map = Map {
            contract: contract(w.contract, place)?,
            engine: w.engine,
            layer: w.layer,
            rank: w.rank,
            convention,
            norm_eps: w.norm_eps,
            splits: w.splits,
            form: w.form,
            requests,
            positions: w.positions,
            page_size: w.page_size,
            lse_base: w.lse.map(|l| l.base),
            rope: w.rope,
            geometry: w.geometry,
            stages: Vec::new(),
            weights: Vec::new(),
        };
        for (key, value) in w.tensors {
            let entry = entry(value, &key, place)?;
            match Weight::from_name(&key) {
                Some(weight) => map.weights.push((weight, entry)),
                None => map.stages.push((target(&key, place)?, entry)),
            }
        }
        Ok(map)
    }

    /// The convention: the map's, or what fits the backend.
    pub fn convention(&self) -> Convention {
        let backend = self.engine.backend.to_ascii_lowercase();
        let by_backend = match backend.as_str() {
            b if b.starts_with("vllm") => Convention::Vllm,
            b if b.starts_with("sglang") => Convention::Sglang,
            b if b.starts_with("llama") => Convention::LlamaCpp,
            _ => Convention::Hf,
        };
        self.convention.filter(|c| *c != Convention::Auto).unwrap_or(by_backend)
    }

    /// All arrays that it names.
    pub fn arrays(&self) -> Vec<&str> {
        let mut all: Vec<&str> = self.positions.iter().map(String::as_str).collect();
        if let Requests::Arrays { keys, new } = &self.requests {
            all.extend([keys.as_str(), new.as_str()]);
        }
        let entries = self.stages.iter().map(|(_, e)| e).chain(self.weights.iter().map(|(_, e)| e));
        for e in entries.flat_map(|e| std::iter::once(e).chain(&e.parts)) {
            all.extend([&e.block_table, &e.slots].into_iter().flatten().map(String::as_str));
            all.extend((!e.name.is_empty()).then_some(e.name.as_str()));
        }
        all
    }
}

fn first_line(e: &impl std::fmt::Display) -> String {
    e.to_string().lines().next().unwrap_or_default().to_string()
}

fn convention(text: &str, place: &str) -> Result<Convention, CompareError> {
    let all = [Convention::Auto].into_iter().chain(Convention::ALL);
    all.clone().find(|c| c.name() == text).ok_or_else(|| {
        let names: Vec<&str> = all.map(Convention::name).collect();
        let what = format!("no convention is called {text:?}");
        CompareError::new(what, place, format!("write one of {}", names.join(", ")))
    })
}

fn contract(value: Option<toml::Value>, place: &str) -> Result<MapContract, CompareError> {
    let bad = |e: &dyn std::fmt::Display| {
        CompareError::new(
            e.to_string().replace('\n', "; "),
            place,
            "write contract = \"none\", a name of the built-in table or a .toml file, or a table [contract]",
        )
    };
    match value {
        None => Ok(MapContract::None),
        Some(toml::Value::Table(t)) => {
            let text = toml::to_string(&t).map_err(|e| bad(&e))?;
            let contract = contracts::parse(&text, "[contract]").map_err(|e| bad(&e))?;
            Ok(MapContract::Declared(Box::new(contract)))
        }
        Some(toml::Value::String(s)) if s == "none" => Ok(MapContract::None),
        Some(toml::Value::String(s)) if s == "declared" => {
            Err(bad(&"the map declares no contract: \"declared\" is a table [contract]"))
        }
        Some(toml::Value::String(s)) if s.ends_with(".toml") => {
            // Beside the map, unless it is a path of its own.
            let path = Path::new(place).parent().unwrap_or(Path::new("")).join(&s);
            let text =
                std::fs::read_to_string(&path).map_err(|e| bad(&format!("{}: {e}", path.display())))?;
            let contract = contracts::parse(&text, &s).map_err(|e| bad(&e))?;
            Ok(MapContract::File(s, Box::new(contract)))
        }
        Some(toml::Value::String(s)) => contracts::find(&s).map(MapContract::Named).map_err(|e| bad(&e)),
        Some(_) => Err(bad(&"the contract is neither a name nor a table")),
    }
}

fn entry(value: toml::Value, key: &str, place: &str) -> Result<Entry, CompareError> {
    let bad = |what: String| {
        CompareError::new(
            format!("[tensors] {}: {what}", key.escape_debug()),
            place,
            "write \"ARRAY\", or { name = \"ARRAY\", axes = […], dtype = …, pair_order = …, slice = { AXIS = [FROM, TO] } }",
        )
    };
    if let toml::Value::String(name) = value {
        return Ok(Entry { name, ..Entry::default() });
    }
    let entry: Entry =
        value.try_into().map_err(|e: toml::de::Error| bad(e.to_string().trim().replace('\n', "; ")))?;
    if entry.name.is_empty() == entry.parts.is_empty() {
        return Err(bad("give either a name or parts".into()));
    }
    if entry.parts.iter().any(|p| !p.parts.is_empty() || p.name.is_empty()) {
        return Err(bad("each part needs a name and has no parts".into()));
    }
    Ok(entry)
}

fn target(key: &str, place: &str) -> Result<Target, CompareError> {
    if key == Q_PE {
        return Ok(Target::QPe);
    }
    let (form, name) = match key.split_once('/') {
        None => (None, key),
        Some((form, name)) => (Form::ALL.iter().copied().find(|f| f.name() == form), name),
    };
    match Stage::from_name(name) {
        Some(stage) if form.is_some() == key.contains('/') => {
            let shared = stage.row().scope == Scope::Shared;
            if form.is_some_and(|f| shared || !stage.in_form(f)) {
                let what = format!("[tensors] {key}: {name} is not a tensor of that form alone");
                return Err(CompareError::new(what, place, format!("write {name}")));
            }
            Ok(Target::Stage(stage, form))
        }
        _ => {
            let all: Vec<&str> = Stage::ALL
                .iter()
                .map(|s| s.name())
                .chain(Weight::ALL.iter().map(|w| w.name()))
                .chain([Q_PE])
                .collect();
            Err(CompareError::new(
                format!("[tensors] {}: no tensor has this name", key.escape_debug()),
                place,
                format!(
                    "the nearest are {}; names are those of `mla-check run`, with fused/ or absorbed/ before them where both forms have one",
                    nearest(name, &all).join(", ")
                ),
            ))
        }
    }
}

/// The names that are nearest to one, nearest first, at most five.
pub fn nearest(name: &str, all: &[&str]) -> Vec<String> {
    let wanted: Vec<char> = name.to_lowercase().chars().take(200).collect();
    let mut by: Vec<(usize, &str)> = all
        .iter()
        .map(|n| {
            let is: Vec<char> = n.to_lowercase().chars().take(200).collect();
            let contained = !name.is_empty() && n.to_lowercase().contains(&name.to_lowercase());
            (if contained { 0 } else { distance(&wanted, &is) }, *n)
        })
        .collect();
    by.sort();
    by.into_iter().take(5).map(|(_, n)| n.escape_debug().to_string()).collect()
}

/// Levenshtein's distance.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let here = (before + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            before = std::mem::replace(&mut row[j + 1], here);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "engine = { backend = 'vllm', version = '0.33.0' }\nrequests = ['0+3', '5+1']\n";

    #[test]
    fn a_map_says_what_it_says() {
        let text = format!(
            "{HEAD}form = 'absorbed'\nlse = {{ base = 'two' }}\n[tensors]\nattn_out = 'o'\n'fused/lse' = {{ name = 'l', dtype = 'bf16' }}\nw_uk = 'W_UK_T'\nq_pe = 'pe'\n"
        );
        let m = Map::parse(&text, "m.toml").unwrap();
        assert_eq!(
            (m.convention(), m.form, m.lse_base),
            (Convention::Vllm, Some(Form::Absorbed), Some(LseBase::Two))
        );
        let targets: Vec<Target> = m.stages.iter().map(|s| s.0).collect();
        assert_eq!(
            targets,
            [Target::Stage(Stage::AttnOut, None), Target::Stage(Stage::Lse, Some(Form::Fused)), Target::QPe]
        );
        assert_eq!(m.weights[0].0, Weight::WUk);
        assert_eq!(m.arrays(), ["o", "l", "pe", "W_UK_T"]);
    }

    #[test]
    fn slips_are_named_with_what_is_near() {
        for (text, words) in [
            (format!("{HEAD}[tensors]\nattn_ot = 'o'"), "attn_out"),
            (format!("{HEAD}[tensors]\n'absorbed/k' = 'o'"), "write k"),
            (format!("{HEAD}[tensors]\nk = {{ name = 'o', axis = [] }}"), "axis"),
            (format!("{HEAD}[tensors]\nk = {{ axes = ['key'] }}"), "either a name or parts"),
            ("requests = ['0+1']\n[tensors]\n".into(), "engine"),
            ("engine = { backend = 'x' }\nrequests = ['0+1']\n[tensors]\n".into(), "version"),
            ("engine = { backend = 'x', version = '1' }\n[tensors]\n".into(), "lengths"),
            (format!("{HEAD}contract = 'flashml'\n[tensors]\n"), "flashmla-decode"),
            (format!("{HEAD}convention = 'x'\n[tensors]\n"), "llama.cpp"),
            (format!("{HEAD}page_sise = 3\n[tensors]\n"), "page_size"),
        ] {
            let e = Map::parse(&text, "m.toml").unwrap_err().to_string();
            assert!(e.contains(words) && e.contains("\n  where: m.toml\n  do: "), "{words}: {e}");
        }
    }

    #[test]
    fn distances() {
        let d = |a: &str, b: &str| distance(&a.chars().collect::<Vec<_>>(), &b.chars().collect::<Vec<_>>());
        assert_eq!((d("kitten", "sitting"), d("", "abc"), d("abc", "abc")), (3, 3, 0));
        assert_eq!(nearest("q_pe", &["x", "k_pe", "mla.q_pe"])[..2], ["mla.q_pe", "k_pe"]);
    }
}
