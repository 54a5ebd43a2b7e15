/*! A case's folder, with outputs filled in, as a map that `compare` reads. */

use super::file::{CaseFile, SCHEMA};
use crate::compare::CompareError;
use crate::compare::map::{EngineName, Entry, Map, MapContract, Numbers, Q_PE, Requests, Target};
use crate::trace::read::Dump;
use mla_reference::{Form, LseBase, Stage, Weight};
use std::path::Path;

/// The map of a case's folder. `contract`: what is known of the kernel.
///
/// # Errors
/// A folder without `case.json`, one that contradicts itself, outputs that nobody filled in.
pub fn map(dir: &Path, contract: MapContract) -> Result<Map, CompareError> {
    let path = dir.join("case.json");
    let bad = |what: String, how: &str| CompareError::new(what, path.display().to_string(), how);
    let again = "write the case again: mla-check case MODEL --save DIR";
    let text = std::fs::read_to_string(&path).map_err(|e| {
        bad(format!("the case can't be read: {e}"), "name a folder that `mla-check case --save` wrote")
    })?;
    let case: CaseFile =
        serde_json::from_str(&text).map_err(|e| bad(format!("this is no case: {e}"), again))?;
    if case.schema != SCHEMA {
        return Err(bad(format!("the case has schema {}", case.schema.escape_debug()), again));
    }
    if case.page_size == 0 || case.page_size > 65536 {
        return Err(bad(format!("page_size {} is no page", case.page_size), again));
    }
    let requests = case.requests.join(",").parse();
    let requests = requests.map_err(|_| bad(format!("{:?} are no requests", case.requests), again))?;
    let geometry = case.geometry.iter().map(|(n, v)| (n.clone(), *v as f64));
    let mut map = Map {
        engine: EngineName { backend: "kernel".into(), version: format!("in {}", dir.display()) },
        notes: vec![format!("case of {}", case.model)],
        label: None,
        part: true,
        layer: Some(0),
        step: 0,
        ranks: None,
        convention: None,
        norm_eps: None,
        contract,
        splits: None,
        form: Some(case.form),
        requests: Requests::Given(requests),
        positions: Some(Numbers::Given(case.positions)),
        page_size: case.page_size,
        lse_base: Some(LseBase::E),
        rope: None,
        geometry: geometry.chain([("scale".into(), case.scale)]).collect(),
        stages: Vec::new(),
        weights: Vec::new(),
        missing: Vec::new(),
        not_applicable: Vec::new(),
    };
    let there = Dump::open(dir).map_err(|e| bad(e.to_string().replace('\n', "; "), again))?;
    let mut filled = 0;
    for (wanted, arrays) in [(false, &case.tensors), (true, &case.wanted)] {
        for (name, array) in arrays {
            let stem = array.file.strip_suffix(".npy").unwrap_or(&array.file);
            let Some(dtype) = array.format() else { continue };
            if wanted && there.find(stem).is_none() {
                continue;
            }
            filled += usize::from(wanted);
            let mut entry = Entry {
                name: stem.to_string(),
                axes: Some(array.axes.clone()),
                dtype: Some(dtype),
                ..Entry::default()
            };
            if let Some(weight) = Weight::from_name(name) {
                map.weights.push((weight, entry));
                continue;
            }
            let target = match name.as_str() {
                Q_PE => Target::QPe,
                _ => match Stage::from_name(name) {
                    Some(stage) => Target::Stage(stage, None),
                    None => return Err(bad(format!("no tensor is called {}", name.escape_debug()), again)),
                },
            };
            if target.stage() == Stage::Cache {
                entry.block_table = Some("block_table".into());
            }
            map.stages.push((target, entry));
        }
    }
    if filled == 0 {
        let names: Vec<&str> = case.wanted.values().map(|a| a.file.as_str()).collect();
        return Err(CompareError::new(
            "no output is filled in",
            dir.display().to_string(),
            format!("run the kernel on the case's inputs, and save {}", names.join(" or ")),
        ));
    }
    // A projection of what nobody computed: only what is there is asked for.
    if case.form == Form::Absorbed && !map.stages.iter().any(|(t, _)| t.stage() == Stage::AttnOut) {
        map.weights.clear();
    }
    Ok(map)
}
