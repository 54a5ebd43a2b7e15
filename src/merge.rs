/*!
Reports of several machines into one: layer ranges of a model, shards of a matrix of forms, phases, dtypes and engines.

What does not belong together is refused, what contradicts itself is named, and what is missing makes no verdict: a merged report is
clean only where every layer of the model is in it. The result does not depend on the order of its parts, merging it again changes
nothing, and its layers are the parts' own, so that `diff`, `explain` and another merge read it like any other report.
*/

use crate::judge::{Unit, Verdict};
use crate::model::list;
use crate::report::read::Source;
use crate::report::{Lack, LayerReport, Report};
use mla_reference::{Form, Phase};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Why reports can't be one.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// They are not parts of one thing.
    #[error("{what}\n  where: {}\n  do: {how}", where_.join(" and "))]
    Apart {
        /// What is different.
        what: String,
        /// Files.
        where_: Vec<String>,
        /// What to do.
        how: &'static str,
    },
    /// They say different things of the same bits.
    #[error(
        "{what}\n  where: {}\n  do: runs are deterministic, so a machine, a driver, a model file or a kernel is not what the other one's is: find out which, and merge without its report",
        where_.join(" and ")
    )]
    Contradiction {
        /// What is different.
        what: String,
        /// Files.
        where_: Vec<String>,
    },
}

/// What a merge must hold.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Layers; None: all with MLA attention.
    pub layers: Option<Vec<usize>>,
    /// Layer reports by engine `cuda`, at least.
    pub gpu_floor: usize,
}

/// A merged report.
#[derive(Debug)]
pub struct Merged {
    /// The report.
    pub report: Report,
    /// Layer reports that were there more than once, the same.
    pub repeated: usize,
    /// What is there, a line for each engine and dtype.
    pub there: Vec<String>,
}

/// A layer with where it came from.
struct Part {
    file: String,
    layer: LayerReport,
    /// Whose it is, forms left out.
    key: Value,
    /// Key and forms, for order.
    order: (usize, String),
    /// All that two runs of the same must agree in.
    says: Value,
}

/// Merges reports.
///
/// # Errors
/// [`MergeError`]; there is nothing to merge.
pub fn merge(mut sources: Vec<Source>, wanted: &Wanted) -> Result<Merged, MergeError> {
    // Their order is that of their content: whatever is chosen below is chosen the same way.
    sources.sort_by_cached_key(|s| (value(&s.report).to_string(), s.path.clone()));
    let Some((first, rest)) = sources.split_first() else {
        return Err(MergeError::Apart {
            what: "there is no report to merge".into(),
            where_: vec!["the files that were named".into()],
            how: "name .json reports, or folders that hold some",
        });
    };
    for s in &sources {
        alone(s)?;
    }
    for other in rest {
        together(first, other)?;
    }
    let mut parts: Vec<Part> = sources.iter().flat_map(of).collect();
    parts.sort_by(|a, b| (&a.order, a.says.to_string()).cmp(&(&b.order, b.says.to_string())));
    contracts(&parts)?;
    let all = parts.len();
    let parts = once(parts)?;
    let repeated = all - parts.len();
    let layers: Vec<LayerReport> = parts.into_iter().map(|p| p.layer).collect();
    let mut report = first.report.clone();
    report.model.files = sources.iter().map(|s| s.report.model.files.clone()).min().unwrap_or_default();
    report.engine_choice = distinct(sources.iter().map(choices)).join("; ");
    report.not_judged = distinct(sources.iter().map(|s| s.report.not_judged.clone()));
    let broken: BTreeSet<Lack> = sources.iter().flat_map(|s| s.report.broken.clone()).collect();
    report.broken = broken.into_iter().collect();
    (report.layers, report.command) = commands(layers, &sources);
    report.gaps = gaps(&report, wanted);
    report.verdict = report.worst();
    report.exit = report.verdict.exit(false);
    let there = there(&report);
    Ok(Merged { report, repeated, there })
}

fn value(of: &impl serde::Serialize) -> Value {
    serde_json::to_value(of).unwrap_or_default()
}

fn name(s: &Source) -> String {
    s.path.display().to_string()
}

/// Whether a report can be part of another one.
fn alone(s: &Source) -> Result<(), MergeError> {
    if s.report.beside.is_empty() {
        return Ok(());
    }
    Err(MergeError::Apart {
        what: "this report holds two dumps side by side".into(),
        where_: vec![name(s)],
        how: "make a report of each dump with `compare` without --other",
    })
}

/// Whether two reports are parts of one.
fn together(a: &Source, b: &Source) -> Result<(), MergeError> {
    type Field<'a> = (&'a str, &'a dyn Fn(&Source) -> String, &'static str);
    let fields: [Field; 5] = [
        (
            "schemas",
            &|s| s.report.schema.to_string(),
            "merge reports of `run` and of `compare` by themselves",
        ),
        ("versions of mla-check", &|s| s.report.version.to_string(), "make all parts with one version"),
        ("models", &|s| model(&s.report), "merge the reports of each model by themselves"),
        ("conventions", &|s| s.report.convention.to_string(), "make all parts with one --convention"),
        (
            "deliberate faults",
            &|s| s.report.deliberate_fault.clone().unwrap_or("none".into()),
            "leave reports of deliberate faults out, or merge those of one fault",
        ),
    ];
    for (what, of, how) in fields {
        let (x, y) = (of(a), of(b));
        if x != y {
            let what =
                format!("the reports are of different {what}: {} and {}", printable(&x), printable(&y));
            return Err(MergeError::Apart { what, where_: vec![name(a), name(b)], how });
        }
    }
    Ok(())
}

/// Which model a report is of, in words: names and sizes of its files, wherever they lie.
pub fn model(report: &Report) -> String {
    let m = &report.model;
    let file = |path: &String| path.rsplit(['/', '\\']).next().unwrap_or_default().to_string();
    let files: Vec<String> =
        m.files.iter().zip(&m.bytes).map(|(f, n)| format!("{} of {n} bytes", file(f))).collect();
    match files.as_slice() {
        [] => "no model".into(),
        _ => printable(&format!("{}, {}, {} layers", files.join(" and "), m.architecture, m.layers)),
    }
}

/// Text of a file, on one line.
fn printable(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_debug().collect() } else { vec![c] }).collect()
}

/// The layers of a report.
fn of(s: &Source) -> impl Iterator<Item = Part> {
    s.report.layers.iter().map(|l| {
        let mut layer = l.clone();
        layer.command = Some(s.report.command_of(l).to_string());
        let key = json!({
            "layer": l.layer, "engine": l.engine, "contract": l.contract, "judged": l.judged,
            "case": l.case, "budget": l.budget,
        });
        let forms: BTreeSet<Option<Form>> = l.tensors.iter().map(|u| u.form).collect();
        let mut says = value(l);
        if let Some(all) = says.as_object_mut() {
            // What was measured of time, what was known before, and what was only shown on request.
            for field in [
                "seconds",
                "probe_seconds",
                "command",
                "gates",
                "cumulative",
                "invariance",
                "reference_cache",
            ] {
                all.remove(field);
            }
        }
        let order = (l.layer, format!("{key} {}", value(&forms)));
        Part { file: name(s), layer, key, order, says }
    })
}

/// An engine declares one contract a dtype; only its splits go with the batch.
fn contracts(parts: &[Part]) -> Result<(), MergeError> {
    let declared = |p: &Part| {
        let mut c = p.layer.contract;
        c.splits = mla_reference::Splits::Parts(1);
        (c, p.layer.judged.as_ref().map(|j| j.by.clone()))
    };
    let mut first: BTreeMap<(String, &str), &Part> = BTreeMap::new();
    for p in parts {
        let known = first.entry((p.layer.engine.name.to_string(), p.layer.case.dtype)).or_insert(p);
        if declared(known) != declared(p) {
            let text = |p: &Part| printable(&p.layer.contract_text);
            return Err(MergeError::Apart {
                what: format!(
                    "the reports hold engine {} to different contracts: {} | {}",
                    printable(&p.layer.engine.name),
                    text(known),
                    text(p)
                ),
                where_: vec![known.file.clone(), p.file.clone()],
                how: "merge the reports of each contract by themselves",
            });
        }
    }
    Ok(())
}

/// Each layer report once; two that are of the same must say the same.
fn once(parts: Vec<Part>) -> Result<Vec<Part>, MergeError> {
    let mut kept: Vec<Part> = Vec::new();
    for p in parts {
        let same_key = kept.iter().rposition(|k| k.order.0 == p.order.0 && k.key == p.key);
        for k in kept.iter().filter(|k| k.order.0 == p.order.0 && k.key == p.key) {
            contradiction(k, &p)?;
        }
        let repeats = same_key.filter(|i| kept[*i].order == p.order);
        match repeats {
            None => kept.push(p),
            Some(i) => {
                // One of them stays: what was shown more, then the least in order.
                let rank = |p: &Part| {
                    let shown = p.layer.gates.len() + p.layer.cumulative.len() + p.layer.invariance.len();
                    (usize::MAX - shown, value(&p.layer).to_string())
                };
                if rank(&p) < rank(&kept[i]) {
                    kept[i] = p;
                }
            }
        }
    }
    Ok(kept)
}

/// What two reports of the same layer, case and engine disagree about.
fn contradiction(a: &Part, b: &Part) -> Result<(), MergeError> {
    let at = |u: &Unit| (u.form, u.phase, u.tensor);
    let say = |what: String| {
        let engine = printable(&b.layer.engine.name);
        let what = format!("two reports of layer {} by engine {engine} {what}", b.layer.layer);
        Err(MergeError::Contradiction { what, where_: vec![a.file.clone(), b.file.clone()] })
    };
    for u in &a.layer.tensors {
        let Some(v) = b.layer.tensors.iter().find(|v| at(v) == at(u)) else { continue };
        for ((field, x), (_, y)) in figures(u).iter().zip(&figures(v)) {
            if x != y {
                return say(format!("differ in {} of {}: {x} and {y}", field, u.title()));
            }
        }
        if a.order == b.order && u.verdict != v.verdict {
            return say(format!("differ in the verdict of {}: {} and {}", u.title(), u.verdict, v.verdict));
        }
    }
    if a.order == b.order && a.says != b.says {
        let (x, y) = (a.says.as_object(), b.says.as_object());
        let fields = x.into_iter().flatten().filter(|(k, v)| y.and_then(|y| y.get(*k)) != Some(v));
        let names: Vec<&str> = fields.map(|(k, _)| k.as_str()).collect();
        return say(format!("differ in {}", names.join(", ")));
    }
    Ok(())
}

/// What the bits of a tensor say, whatever else was judged in the same run.
fn figures(u: &Unit) -> [(&'static str, Value); 7] {
    [
        ("elements", json!(u.elements)),
        ("flips", json!(u.flips)),
        ("elements beyond their bounds", json!(u.beyond)),
        ("elements not finite", json!(u.not_finite)),
        ("norm and checksum", json!(u.engine)),
        ("norm and checksum of the reference", json!(u.reference)),
        ("worst element", json!(u.worst.as_ref().map(|w| (&w.index, w.engine.to_bits())))),
    ]
}

/// Layer reports by engine `cuda`.
pub fn on_gpu(report: &Report) -> usize {
    report.layers.iter().filter(|l| l.engine.name == "cuda").count()
}

/// Why engines are the ones they are; of a merge, several.
fn choices(s: &Source) -> Vec<String> {
    s.report.engine_choice.split("; ").map(String::from).collect()
}

/// Lists as one: as they are where all are the same, else sorted.
fn distinct(lists: impl Iterator<Item = Vec<String>>) -> Vec<String> {
    let all: BTreeSet<Vec<String>> = lists.collect();
    if all.len() == 1 {
        return all.into_iter().flatten().collect();
    }
    let flat: BTreeSet<String> = all.into_iter().flatten().collect();
    flat.into_iter().collect()
}

/// Layers with their commands, unless all have the same, and the commands of all.
fn commands(mut layers: Vec<LayerReport>, sources: &[Source]) -> (Vec<LayerReport>, String) {
    let mut all: Vec<String> = Vec::new();
    let of_layers = layers.iter().filter_map(|l| l.command.clone());
    let others: BTreeSet<String> =
        sources.iter().flat_map(|s| s.report.command.lines().map(String::from)).collect();
    for c in of_layers.chain(others) {
        if !all.contains(&c) {
            all.push(c);
        }
    }
    if all.len() == 1 {
        layers.iter_mut().for_each(|l| l.command = None);
    }
    (layers, all.join("\n"))
}

/// Engine and dtype.
type Group<'a> = (&'a str, &'a str);

/// Forms and phases of each layer.
type Layers = BTreeMap<usize, BTreeSet<(Form, Option<Phase>)>>;

/// Layers of each engine and dtype, with the forms and phases that each has.
fn groups(report: &Report) -> BTreeMap<Group<'_>, Layers> {
    let mut groups: BTreeMap<Group<'_>, Layers> = BTreeMap::new();
    for l in &report.layers {
        let group = groups.entry((l.engine.name.as_ref(), l.case.dtype)).or_default();
        let here = group.entry(l.layer).or_default();
        here.extend(l.tensors.iter().filter_map(|u| u.form.map(|f| (f, u.phase))));
    }
    groups
}

fn words((form, phase): &(Form, Option<Phase>)) -> String {
    phase.map_or(form.name().to_string(), |p| format!("{} {}", form.name(), p.name()))
}

/// What is missing.
fn gaps(report: &Report, wanted: &Wanted) -> Vec<Lack> {
    let mut all = Vec::new();
    let mut lack = |verdict: Verdict, what: String| all.push(Lack { verdict, what });
    let have: BTreeSet<usize> = report.layers.iter().map(|l| l.layer).collect();
    let expected = wanted.layers.as_ref().unwrap_or(&report.model.mla_layers);
    let missing: Vec<usize> = expected.iter().copied().filter(|l| !have.contains(l)).collect();
    if !missing.is_empty() {
        let word = if missing.len() == 1 { "layer" } else { "layers" };
        lack(Verdict::NotCompared, format!("no report has {word} {}", list(&missing)));
    }
    // A layer whose numbers differ from the file's has no tensors, and is a fault as it is.
    let stopped: BTreeSet<usize> =
        report.layers.iter().filter(|l| !l.scalars.is_empty()).map(|l| l.layer).collect();
    for ((engine, dtype), layers) in groups(report) {
        let every: BTreeSet<_> = layers.values().flatten().copied().collect();
        for what in every {
            let without = layers.iter().filter(|(l, has)| !has.contains(&what) && !stopped.contains(l));
            let without: Vec<usize> = without.map(|(l, _)| *l).collect();
            if !without.is_empty() {
                let word = if without.len() == 1 { "layer" } else { "layers" };
                let engine = printable(engine);
                let text = format!(
                    "{word} {} by engine {engine} in {dtype}: no {}, which other layers have",
                    list(&without),
                    words(&what)
                );
                lack(Verdict::NotCompared, text);
            }
        }
    }
    let gpu = on_gpu(report);
    if gpu < wanted.gpu_floor {
        let text = format!("{gpu} layer reports are by engine cuda, {} must be", wanted.gpu_floor);
        lack(Verdict::Fault, text);
    }
    all
}

/// What is there.
fn there(report: &Report) -> Vec<String> {
    let line = |(engine, dtype): Group, layers: &Layers| {
        let numbers: Vec<usize> = layers.keys().copied().collect();
        let what: BTreeSet<_> = layers.values().flatten().collect();
        let what: Vec<String> = what.into_iter().map(words).collect();
        let of = report.model.mla_layers.len();
        let (engine, numbers, count) = (printable(engine), list(&numbers), layers.len());
        format!("engine {engine} in {dtype}: layers {numbers} ({count} of {of}); {}", what.join(", "))
    };
    groups(report).iter().map(|(group, layers)| line(*group, layers)).collect()
}

#[cfg(test)]
mod tests;
