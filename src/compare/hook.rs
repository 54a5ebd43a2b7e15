/*!
Dumps of the hooks in `adapters/`: manifests, one a rank, become maps.

Each capture of a manifest (a layer, a step, a form) is one [`Map`]; what ranks say of it must agree, but for what is missing on
some of them. A place that should have fired and did not is evidence: it is listed as captured and is not there.
*/

use super::CompareError;
use super::map::{
    self, EngineName, Entry, Map, MapContract, Numbers, Point, RANK, Ranks, Requests, RopeTable, Target,
};
use crate::case::Batch;
use mla_reference::{Form, LseBase, Weight};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// What manifests call themselves.
pub const SCHEMA: &str = "mla-check.hook/1";

#[derive(Deserialize)]
struct Manifest {
    schema: String,
    engine: EngineName,
    #[serde(default)]
    adapter: String,
    rank: usize,
    ranks: usize,
    heads: Option<(usize, usize)>,
    #[serde(default)]
    notes: BTreeMap<String, serde_json::Value>,
    #[serde(default)]
    mode: String,
    #[serde(default = "map::page_size")]
    page_size: usize,
    #[serde(default)]
    geometry: BTreeMap<String, f64>,
    rope: Option<RopeTable>,
    lse: Option<Lse>,
    #[serde(default)]
    weights: BTreeMap<String, Written>,
    captures: Vec<Captured>,
}

#[derive(Deserialize)]
struct Lse {
    base: LseBase,
}

#[derive(Deserialize)]
struct Captured {
    layer: usize,
    #[serde(default)]
    step: usize,
    form: Form,
    requests: Vec<String>,
    positions: Option<Vec<usize>>,
    slots: Option<Vec<Vec<usize>>>,
    tensors: BTreeMap<String, Written>,
    #[serde(default)]
    not_applicable: BTreeMap<String, String>,
    #[serde(default)]
    failed: BTreeMap<String, String>,
}

/// An entry of a manifest: one of a map, and where it comes from.
#[derive(Clone, Deserialize)]
struct Written {
    array: Option<String>,
    #[serde(default = "once")]
    fired: usize,
    axes: Option<Vec<String>>,
    dtype: Option<mla_numeric::DType>,
    pair_order: Option<map::PairOrder>,
    #[serde(default)]
    slice: BTreeMap<String, (usize, usize)>,
    #[serde(default)]
    parts: Vec<Written>,
    #[serde(default)]
    partial: bool,
    place: Option<String>,
}

fn once() -> usize {
    1
}

impl Written {
    /// As a map has it; None where there is no array.
    fn entry(&self) -> Option<Entry> {
        let parts = self.parts.iter().map(Written::entry).collect::<Option<Vec<Entry>>>()?;
        let name = match &self.array {
            Some(array) => format!("rank-{RANK}/{array}"),
            None if parts.is_empty() => return None,
            None => String::new(),
        };
        Some(Entry {
            name,
            axes: self.axes.clone(),
            dtype: self.dtype,
            pair_order: self.pair_order,
            slice: self.slice.clone(),
            parts,
            partial: self.partial,
            ..Entry::default()
        })
    }

    fn there(&self) -> bool {
        self.fired > 0 && self.entry().is_some()
    }
}

/// Maps of a folder that a hook wrote; None where it is no such folder.
///
/// # Errors
/// Manifests that can't be read, or that do not belong together.
pub fn maps(dir: &Path) -> Result<Option<Vec<Map>>, CompareError> {
    let mut all: Vec<Manifest> = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let of_rank = name.strip_prefix("rank-").and_then(|n| n.strip_suffix(".json"));
        if of_rank.is_some_and(|n| n.parse::<usize>().is_ok()) {
            all.push(read(&entry.path())?);
        }
    }
    all.sort_by_key(|m| m.rank);
    let Some(first) = all.first() else { return Ok(None) };
    let bad = |what: String| {
        CompareError::new(
            what,
            dir.display().to_string(),
            "dump again into an empty folder, all ranks of one engine",
        )
    };
    let present: Vec<usize> = all.iter().map(|m| m.rank).collect();
    let alike = all.iter().all(|m| {
        (m.ranks, &m.engine.backend, &m.engine.version)
            == (first.ranks, &first.engine.backend, &first.engine.version)
    });
    let twice = present.windows(2).any(|w| w[0] == w[1]);
    if !alike || twice || present.iter().any(|r| *r >= first.ranks) || first.ranks > 4096 {
        return Err(bad(format!("manifests of ranks {present:?} do not belong together")));
    }
    let ranks = Ranks { of: first.ranks, present };
    check_heads(&all, &ranks).map_err(bad)?;
    let mut maps = Vec::new();
    for (i, c) in first.captures.iter().enumerate() {
        let same: Vec<&Captured> = all
            .iter()
            .filter_map(|m| m.captures.get(i))
            .filter(|o| (o.layer, o.step, o.form, &o.requests) == (c.layer, c.step, c.form, &c.requests))
            .collect();
        if same.len() != all.len() || all.iter().any(|m| m.captures.len() != first.captures.len()) {
            return Err(bad(format!(
                "ranks captured different things: layer {}, step {} is not on all of them alike",
                c.layer, c.step
            )));
        }
        let map = capture(first, &same, &ranks, dir)?;
        maps.extend(apart(map));
    }
    if maps.is_empty() {
        return Err(bad("the manifests list no capture: the hook was never armed, or no request ran".into()));
    }
    Ok(Some(maps))
}

fn read(path: &Path) -> Result<Manifest, CompareError> {
    let bad = |what: String| {
        CompareError::new(what, path.display().to_string(), "dump again with the adapters of this version")
    };
    let text = std::fs::read_to_string(path).map_err(|e| bad(format!("the manifest can't be read: {e}")))?;
    let manifest: Manifest =
        serde_json::from_str(&text).map_err(|e| bad(format!("this is no manifest of a hook: {e}")))?;
    if manifest.schema != SCHEMA {
        return Err(bad(format!("the manifest has schema {}", manifest.schema.escape_debug())));
    }
    if manifest.page_size == 0 || manifest.page_size > 65536 {
        return Err(bad(format!("page_size {} is no page", manifest.page_size)));
    }
    Ok(manifest)
}

/// Each rank holds its share of the heads, in the order of ranks.
fn check_heads(all: &[Manifest], ranks: &Ranks) -> Result<(), String> {
    for m in all {
        let (Some((from, to)), Some(heads)) = (m.heads, m.geometry.get("heads")) else { continue };
        let each = *heads as usize / ranks.of;
        if (from, to) != (m.rank * each, (m.rank + 1) * each) {
            return Err(format!(
                "rank {} of {} says that it holds heads {from} to {to} of {heads}, not {each} from {} on",
                m.rank,
                ranks.of,
                m.rank * each
            ));
        }
    }
    Ok(())
}

/// The map of one capture, from what each rank says of it.
fn capture(m: &Manifest, of: &[&Captured], ranks: &Ranks, dir: &Path) -> Result<Map, CompareError> {
    let c = of[0];
    let place = format!("{}, layer {}, step {}", dir.display(), c.layer, c.step);
    let bad =
        |what: String| CompareError::new(what, place.clone(), "dump again with the adapters of this version");
    let requests: Batch =
        c.requests.join(",").parse().map_err(|_| bad(format!("{:?} are no requests", c.requests)))?;
    let mut notes: Vec<String> = Vec::new();
    if !m.adapter.is_empty() {
        notes.push(format!("adapter {}", m.adapter));
    }
    if !m.mode.is_empty() {
        notes.push(format!("mode {}", m.mode));
    }
    notes.extend(m.notes.iter().map(|(k, v)| match v {
        serde_json::Value::String(s) => format!("{k} {s}"),
        other => format!("{k} {other}"),
    }));
    notes.extend(c.failed.iter().map(|(tensor, why)| format!("{tensor} could not be had: {why}")));
    let slots: Option<Vec<usize>> = c.slots.as_ref().map(|all| all.iter().flatten().copied().collect());
    let mut map = Map {
        engine: m.engine.clone(),
        notes,
        label: Some(format!("step {}, {}", c.step, c.form.name())),
        part: true,
        layer: Some(c.layer),
        step: c.step,
        ranks: Some(ranks.clone()),
        convention: None,
        norm_eps: None,
        contract: MapContract::None,
        splits: None,
        form: Some(c.form),
        requests: Requests::Given(requests),
        positions: c.positions.clone().map(Numbers::Given),
        page_size: m.page_size,
        lse_base: m.lse.as_ref().map(|l| l.base),
        rope: m.rope,
        geometry: m.geometry.clone(),
        stages: Vec::new(),
        weights: Vec::new(),
        missing: Vec::new(),
        not_applicable: Vec::new(),
    };
    for (name, why) in &c.not_applicable {
        map.not_applicable.push((map::target(name, &place)?, why.clone()));
    }
    for (r, other) in ranks.present.iter().zip(of) {
        let odd = other.tensors.keys().find(|n| !c.tensors.contains_key(*n));
        let odd = odd.or_else(|| c.tensors.keys().find(|n| !other.tensors.contains_key(*n)));
        if let Some(name) = odd {
            let name = name.escape_debug();
            return Err(bad(format!(
                "{name} was captured on some ranks only: rank {} and rank {r} differ",
                m.rank
            )));
        }
    }
    for (name, written) in &c.tensors {
        let target = map::target(name, &place)?;
        // All of q holds its rotated columns.
        if target == Target::QPe && c.tensors.get("q").is_some_and(Written::there) {
            continue;
        }
        let silent: Vec<usize> = ranks
            .present
            .iter()
            .zip(of)
            .filter(|(_, c)| !c.tensors.get(name).is_some_and(Written::there))
            .map(|(r, _)| *r)
            .collect();
        match written.entry().filter(|_| silent.is_empty()) {
            Some(mut entry) => {
                if target.stage() == mla_reference::Stage::Cache {
                    entry.slots = slots.clone().map(Numbers::Given);
                }
                map.stages.push((target, entry));
            }
            None => {
                let at = written.place.as_ref().map_or(String::new(), |p| format!(" ({p})"));
                map.missing.push((
                    target,
                    format!(
                        "{name} was never seen on rank {}{at}: the place that computes it did not run, though the layer did",
                        crate::model::list(&silent)
                    ),
                ));
            }
        }
    }
    for (name, written) in &m.weights {
        let own =
            name.strip_prefix(&format!("{}/", c.layer)).or((!name.contains('/')).then_some(name.as_str()));
        let (Some(name), Some(entry)) = (own, written.entry()) else { continue };
        let weight = Weight::from_name(name)
            .ok_or_else(|| bad(format!("no weight is called {}", name.escape_debug())))?;
        map.weights.push((weight, entry));
    }
    Ok(map)
}

/// A capture, and each rank's own part of `out` where ranks have not summed it yet.
fn apart(mut map: Map) -> Vec<Map> {
    let is_out = |t: &Target| t.stage() == mla_reference::Stage::Out;
    let ranks = map.ranks.clone().unwrap_or(Ranks { of: 1, present: vec![0] });
    let partial = map.stages.iter().any(|(t, e)| is_out(t) && e.partial);
    if !partial || ranks.present.len() == 1 {
        return vec![map];
    }
    let from = |t: &Target| matches!(t, Target::Point(Point::Caller, _));
    let read = if map.stages.iter().any(|(t, _)| from(t)) { Point::Caller } else { Point::Kernel };
    let mut one = map.clone();
    one.stages.retain(|(t, _)| is_out(t) || matches!(t, Target::Point(p, _) if *p == read));
    one.weights.retain(|(w, _)| *w == Weight::WO);
    (one.missing, one.not_applicable) = (Vec::new(), Vec::new());
    map.stages.retain(|(t, _)| !is_out(t));
    let mut all = vec![map];
    for r in &ranks.present {
        let label = one.label.as_ref().map(|l| format!("{l}, rank {r}'s part of out"));
        all.push(Map { label, ranks: Some(Ranks { of: ranks.of, present: vec![*r] }), ..one.clone() });
    }
    all
}
