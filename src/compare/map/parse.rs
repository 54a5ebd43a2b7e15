/*!
Maps as files: TOML with a closed set of keys.

Unknown names are errors that list the nearest ones: a map with a slip of the pen must not turn a tensor into one that was
not captured.
*/

use super::{
    BuiltIn, EngineName, Entry, Map, MapContract, Numbers, Point, Q_PE, Ranks, Requests, RopeTable, Target,
    built_in, nearest,
};
use crate::case::Batch;
use crate::compare::CompareError;
use crate::contracts;
use crate::model::Convention;
use mla_reference::{Form, LseBase, Scope, Splits, Stage, Weight};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The form in files.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    base: Option<String>,
    engine: EngineName,
    #[serde(default)]
    notes: Vec<String>,
    layer: Option<usize>,
    #[serde(default)]
    step: usize,
    ranks: Option<WrittenRanks>,
    convention: Option<String>,
    norm_eps: Option<f64>,
    contract: Option<toml::Value>,
    splits: Option<Splits>,
    form: Option<Form>,
    requests: Option<Vec<String>>,
    lengths: Option<Lengths>,
    positions: Option<Numbers>,
    #[serde(default = "page_size")]
    page_size: usize,
    lse: Option<Lse>,
    rope: Option<RopeTable>,
    #[serde(default)]
    geometry: BTreeMap<String, f64>,
    #[serde(default)]
    tensors: BTreeMap<String, toml::Value>,
    #[serde(default)]
    not_applicable: BTreeMap<String, String>,
}

/// `ranks = 8`, or which of them there are.
#[derive(Deserialize)]
#[serde(untagged)]
enum WrittenRanks {
    All(usize),
    Some(SomeRanks),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SomeRanks {
    of: usize,
    present: Vec<usize>,
}

pub(in crate::compare) fn page_size() -> usize {
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

impl MapContract {
    /// `none`, a kernel of the built-in table, or a .toml file; `place` names it in errors.
    ///
    /// # Errors
    /// A name that is none of these, a file that is no contract.
    pub fn named(name: &str, place: &str) -> Result<MapContract, CompareError> {
        contract(Some(toml::Value::String(name.into())), place)
    }
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
            notes: w.notes,
            label: None,
            part: false,
            layer: w.layer,
            step: w.step,
            ranks: w.ranks.map(|r| ranks(r, place)).transpose()?,
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
            missing: Vec::new(),
            not_applicable: Vec::new(),
        };
        for (key, why) in w.not_applicable {
            map.not_applicable.push((target(&key, place)?, why));
        }
        for (key, value) in w.tensors {
            map.add(&key, entry(value, &key, place)?, place)?;
        }
        if let Some(base) = w.base {
            let base = built_in(&base).map_err(|how| bad(format!("no map is called {base:?}"), &how))?;
            map.inherit(base)?;
        }
        if map.stages.is_empty() && map.missing.is_empty() {
            return Err(bad(
                "the map names no tensor".into(),
                "write [tensors], or base = \"NAME\" of a built-in map",
            ));
        }
        Ok(map)
    }

    /// An entry by its name in the table.
    fn add(&mut self, key: &str, entry: Entry, place: &str) -> Result<(), CompareError> {
        match Weight::from_name(key) {
            Some(weight) => self.weights.push((weight, entry)),
            None => self.stages.push((target(key, place)?, entry)),
        }
        Ok(())
    }

    /// Entries of a built-in map, where this one has none of the name; none of them need be in the dump.
    fn inherit(&mut self, base: &BuiltIn) -> Result<(), CompareError> {
        let place = format!("the built-in map {}", base.name);
        let tensors: BTreeMap<String, toml::Value> = toml::from_str(base.tensors)
            .map_err(|e| CompareError::new(e.to_string(), &*place, "report this as a fault of mla-check"))?;
        for (key, value) in tensors {
            let entry = Entry { optional: true, ..entry(value, &key, &place)? };
            let known = match Weight::from_name(&key) {
                Some(w) => self.weights.iter().any(|(other, _)| *other == w),
                None => {
                    let t = target(&key, &place)?;
                    self.stages.iter().any(|(other, _)| {
                        (std::mem::discriminant(other), other.stage())
                            == (std::mem::discriminant(&t), t.stage())
                    })
                }
            };
            if !known {
                self.add(&key, entry, &place)?;
            }
        }
        Ok(())
    }
}

fn ranks(written: WrittenRanks, place: &str) -> Result<Ranks, CompareError> {
    let ranks = match written {
        WrittenRanks::All(of) => Ranks { of, present: (0..of.min(4096)).collect() },
        WrittenRanks::Some(SomeRanks { of, mut present }) => {
            present.sort_unstable();
            Ranks { of, present }
        }
    };
    let twice = ranks.present.windows(2).any(|w| w[0] == w[1]);
    if !(1..=4096).contains(&ranks.of)
        || ranks.present.is_empty()
        || twice
        || ranks.present.iter().any(|r| *r >= ranks.of)
    {
        return Err(CompareError::new(
            format!("ranks {:?} of {} make no sense", ranks.present, ranks.of),
            place,
            "write ranks = 8, or ranks = { of = 8, present = [0, 1, …] }",
        ));
    }
    Ok(ranks)
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

pub(in crate::compare) fn target(key: &str, place: &str) -> Result<Target, CompareError> {
    if key == Q_PE {
        return Ok(Target::QPe);
    }
    let (form, name) = match key.split_once('/') {
        None => (None, key),
        Some((form, name)) => (Form::ALL.iter().copied().find(|f| f.name() == form), name),
    };
    if let Some((_, point)) = Point::ALL.iter().find(|(n, _)| *n == name)
        && form.is_some() == key.contains('/')
    {
        return Ok(Target::Point(*point, form));
    }
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
                .chain(Point::ALL.map(|p| p.0))
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
    fn ranks_and_points() {
        let text = format!(
            "{HEAD}ranks = {{ of = 4, present = [2, 0] }}\n[tensors]\n'attn_out@caller' = 'r{{rank}}/o'\n[not_applicable]\nk = 'absorbed'\n"
        );
        let m = Map::parse(&text, "m.toml").unwrap();
        assert_eq!(m.stages[0].0, Target::Point(Point::Caller, None));
        assert_eq!(m.not_applicable[0].0, Target::Stage(Stage::K, None));
        let ranks = m.ranks.unwrap();
        assert_eq!((ranks.present.clone(), ranks.lost()), (vec![0, 2], vec![1, 3]));
        for bad in [
            "ranks = 0",
            "ranks = { of = 2, present = [2] }",
            "ranks = { of = 2, present = [1, 1] }",
            "base = 'vlm'",
        ] {
            assert!(Map::parse(&format!("{HEAD}{bad}\n[tensors]\nq = 'q'"), "m.toml").is_err(), "{bad}");
        }
    }

    #[test]
    fn built_in_maps_are_maps_and_yield_to_what_is_written() {
        for b in super::super::BUILT_IN {
            let m =
                Map::parse(&format!("base = '{}'\n{HEAD}[tensors]\nq = 'mine'\n", b.name), "m.toml").unwrap();
            let own: Vec<&Entry> = m
                .stages
                .iter()
                .filter(|s| s.0.stage() == Stage::Q && s.0 != Target::QPe)
                .map(|s| &s.1)
                .collect();
            assert_eq!((own.len(), own[0].name.as_str(), own[0].optional), (1, "mine", false), "{}", b.name);
            assert!(m.stages.iter().any(|s| s.1.optional), "{}", b.name);
        }
    }
}
