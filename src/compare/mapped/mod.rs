/*!
A capture from a dump and a map: lengths, pages and positions, then every tensor in the table's axes.

New tokens of all requests are stacked, request after request; the cache is gathered by the dump's own page table into
pages of the case, so that slots that no request owns play no part. Heads are those of the ranks that dumped.
*/

mod cache;
mod case;
mod contract;
mod reader;

use super::map::{Entry, Map, MapContract, Point, Q_PE, Ranks, Target};
use super::{Capture, CompareError, plain, scalars};
use crate::engine::Description;
use crate::parallel::heads::Heads;
use crate::trace::read::Dump;
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::{Axis, Form, Plan, Scope, Spec, Stage, Weight};
use std::cell::RefCell;

/// Reads what a map names of a dump, for a layer of these numbers. `layer`: what `{layer}` in names stands for.
///
/// # Errors
/// Names that are not in the dump, shapes that are not the case's, dtypes that are not known.
pub fn capture(dump: &Dump, map: &Map, spec: &Spec, layer: usize) -> Result<Capture, CompareError> {
    let heads = map.ranks.as_ref().map(|r| heads(r, spec)).transpose()?.flatten();
    let own = heads.as_ref().map_or_else(|| spec.clone(), |h| h.spec(spec));
    let of = Reader { dump, map, spec: &own, layer, differ: RefCell::default() };
    let forms = forms(map)?;
    let batch = of.batch()?;
    let mut case = of.case(batch)?;
    let mut found = Found::default();
    for (target, entry) in &map.stages {
        of.take(*target, entry, &forms, &case.plan, &mut found)?;
    }
    let Found { mut tensors, unjudged, mut caller, mut left_out } = found;
    // What the caller reads is the output, where nobody saw what the attention returned.
    caller.retain(|(id, tensor)| {
        let alone = !tensors.iter().any(|t| t.0 == *id) && !missing(map, *id, &forms);
        if alone {
            tensors.push((*id, tensor.clone()));
        }
        !alone
    });
    if let Some((_, twice)) =
        tensors.iter().enumerate().find(|(i, t)| tensors[..*i].iter().any(|o| o.0 == t.0))
    {
        return Err(of.bad(&twice.0.to_string(), "it is named twice", "leave one of the two out"));
    }
    let mut weights = Vec::new();
    for (w, entry) in &map.weights {
        if entry.optional && !(w.exists(&spec.geometry) && of.has(entry)) {
            continue;
        }
        weights.push((*w, of.weight(*w, entry)?));
    }
    let (mut contract, chosen) = of.contract(&tensors, &weights)?;
    left_out.extend(of.unnamed());
    // Each rank rounds its part of `out` before the parts are summed.
    if let Some(ranks) = map.ranks.as_ref().filter(|r| r.lost().is_empty()) {
        contract.ranks = contract.ranks.max(ranks.of);
    }
    if contract.softmax.emulate && !contract::placed(&contract, &case.plan) {
        contract.softmax.emulate = false;
        left_out
            .push("the place of P's cast: the contract leaves open how this kernel splits the keys".into());
    }
    let rotated = |t: &(TensorId, Tensor)| matches!(t.0.stage, Stage::Q | Stage::KPe);
    if chosen.is_some() && map.rope.is_none() && tensors.iter().any(rotated) {
        left_out.push("the rotation in q and k_pe: nobody says from which table; write rope = { table = \"f32\" } or a [contract]".into());
    }
    let closed = of.given(&mut case, &tensors);
    let mut captured: Vec<TensorId> = tensors.iter().map(|t| t.0).collect();
    let mut evidence: Vec<(TensorId, String)> = Vec::new();
    for (target, why) in &map.missing {
        let id = id(*target, map, &forms).map_err(|(what, how)| of.bad(target.stage().name(), what, how))?;
        if target.stage().exists(&own.geometry) && !captured.contains(&id) {
            captured.push(id);
            evidence.push((id, why.clone()));
        }
    }
    for (tensor, what) in of.differ.take() {
        match tensors.iter().find(|t| t.0.stage.name() == tensor) {
            Some((id, _)) => evidence.push((*id, what)),
            None => left_out.push(format!("{tensor}: {what}")),
        }
    }
    let not_applicable = map.not_applicable.iter().filter_map(|(target, why)| {
        let id = id(*target, map, &forms).ok()?;
        (!captured.contains(&id)).then(|| (id, why.clone()))
    });
    let not_applicable = not_applicable.collect();
    Ok(Capture {
        engine: description(dump, map),
        forms,
        not_applicable,
        case,
        contract,
        chosen,
        undeclared: matches!(map.contract, MapContract::None),
        captured,
        tensors,
        weights: weights.into_iter().map(|(w, (_, values))| (w, values)).collect(),
        unjudged,
        closed,
        model: true,
        other_software: true,
        scalars: scalars(map.geometry.clone(), spec, "[geometry]")?,
        left_out,
        heads,
        caller,
        evidence,
    })
}

/// Heads of the ranks that dumped; None: all.
fn heads(ranks: &Ranks, spec: &Spec) -> Result<Option<Heads>, CompareError> {
    let all = spec.geometry.heads;
    if !all.is_multiple_of(ranks.of) {
        return Err(CompareError::new(
            format!("{all} heads are not to be shared among {} ranks", ranks.of),
            "ranks",
            "give the size of tensor parallelism of the attention",
        ));
    }
    let each = all / ranks.of;
    let own = ranks.present.iter().flat_map(|r| r * each..(r + 1) * each).collect();
    Ok((ranks.present.len() < ranks.of).then_some(Heads(own)))
}

fn description(dump: &Dump, map: &Map) -> Description {
    let label = map.label.as_ref().map_or(String::new(), |l| format!(", {}", plain(l)));
    let mut device = format!("dump {}", dump.path().display());
    if let Some(ranks) = &map.ranks {
        device += &format!("; rank {} of {}", crate::model::list(&ranks.present), ranks.of);
        if !ranks.lost().is_empty() {
            device += &format!(
                " (not there: {}; heads are numbered among those that are)",
                crate::model::list(&ranks.lost())
            );
        }
    }
    for note in &map.notes {
        device += &format!("; {}", plain(note));
    }
    let name = format!("{} {}{label}", plain(&map.engine.backend), plain(&map.engine.version));
    Description::plain(name, device)
}

/// Whether the map says that a tensor was to be captured and is not there.
fn missing(map: &Map, wanted: TensorId, forms: &[Form]) -> bool {
    map.missing.iter().any(|(t, _)| id(*t, map, forms).is_ok_and(|id| id == wanted))
}

/// The tensor that an entry is; else what is not known, and what to write.
fn id(target: Target, map: &Map, forms: &[Form]) -> Result<TensorId, (&'static str, &'static str)> {
    let stage = target.stage();
    let form = target.form().or(map.form).or_else(|| (forms.len() == 1).then(|| forms[0]));
    match (stage.row().scope, form) {
        (Scope::Shared, _) => Ok(TensorId::shared(stage)),
        (Scope::Only(f), _) | (Scope::Each, Some(f)) => Ok(TensorId::of(stage, f)),
        (Scope::Each, None) => {
            Err(("both forms have it", "write form = \"fused\" or \"absorbed\", or the form before the name"))
        }
    }
}

/// Forms of which the map names anything; both where nothing says which.
fn forms(map: &Map) -> Result<Vec<Form>, CompareError> {
    let mut all: Vec<Form> = map.form.into_iter().collect();
    let targets = map.stages.iter().filter(|(_, e)| !e.optional).map(|(t, _)| *t);
    for target in targets.chain(map.missing.iter().map(|(t, _)| *t)) {
        all.extend(target.form().or(match target.stage().row().scope {
            Scope::Only(form) => Some(form),
            _ => None,
        }));
    }
    all.sort();
    all.dedup();
    Ok(if all.is_empty() { Form::ALL.to_vec() } else { all })
}

/// What was read of a dump so far.
#[derive(Default)]
struct Found {
    tensors: Vec<(TensorId, Tensor)>,
    unjudged: Vec<TensorId>,
    /// `attn_out` as the output projection reads it.
    caller: Vec<(TensorId, Tensor)>,
    left_out: Vec<String>,
}

struct Reader<'a> {
    dump: &'a Dump,
    map: &'a Map,
    /// Of the heads that there are.
    spec: &'a Spec,
    layer: usize,
    /// What should be the same on all ranks and is not: tensor, and what differs.
    differ: RefCell<Vec<(String, String)>>,
}

impl Reader<'_> {
    /// Reads an entry of the map.
    fn take(
        &self,
        target: Target,
        entry: &Entry,
        forms: &[Form],
        plan: &Plan,
        found: &mut Found,
    ) -> Result<(), CompareError> {
        let (stage, g) = (target.stage(), &self.spec.geometry);
        if entry.optional && !(stage.exists(g) && self.has(entry)) {
            return Ok(());
        }
        match target {
            Target::QPe => {
                let names = |t: Target| self.map.stages.iter().any(|(o, e)| *o == t && !e.optional);
                if names(Target::Stage(Stage::Q, None)) {
                    return Err(self.bad(
                        Q_PE,
                        "the map has q as well, which holds the same columns",
                        "leave one of the two out",
                    ));
                }
                if !self.map.stages.iter().any(|(t, _)| matches!(t, Target::Stage(Stage::QLatent, _))) {
                    return Err(self.bad(
                        Q_PE,
                        "nothing reads it without q_latent",
                        "name q_latent too, or all of q",
                    ));
                }
                found.tensors.push((TensorId::shared(Stage::Q), self.rope_columns(entry, plan)?));
                let absorbed = TensorId::of(Stage::QLatent, Form::Absorbed);
                found.unjudged.extend([TensorId::shared(Stage::Q), absorbed]);
                return Ok(());
            }
            Target::Stage(Stage::PartO | Stage::PartLse, _) => {
                return Err(self.bad(
                    stage.name(),
                    "partial results of splits are not read by maps in this version",
                    "leave them out: splits are then merged inside the attention",
                ));
            }
            _ => {}
        }
        if !stage.exists(g) {
            return Err(self.bad(stage.name(), "this model has no such tensor", "leave it out"));
        }
        let id = id(target, self.map, forms).map_err(|(what, how)| self.bad(stage.name(), what, how))?;
        if stage == Stage::Out
            && let Some(why) = self.no_sum(entry)
        {
            found.left_out.push(why);
            return Ok(());
        }
        let tensor = match stage {
            Stage::Cache => self.cache(entry, plan)?,
            _ => self.tensor(id, entry, plan)?,
        };
        match target {
            Target::Point(Point::Caller, _) => found.caller.push((id, tensor)),
            _ => found.tensors.push((id, tensor)),
        }
        Ok(())
    }

    /// Why `out` can't be what the output projection makes of the heads that are there.
    fn no_sum(&self, entry: &Entry) -> Option<String> {
        let ranks = self.map.ranks.as_ref()?;
        let one = ranks.present.len() == 1;
        match entry.partial {
            true if one || ranks.of == 1 => None,
            true => Some("out: ranks hold partial sums; write partial = true for each rank alone".into()),
            false if ranks.lost().is_empty() => None,
            false => Some(format!(
                "out: it sums over the heads of rank {}, which did not dump",
                crate::model::list(&ranks.lost())
            )),
        }
    }

    fn tensor(&self, id: TensorId, entry: &Entry, plan: &Plan) -> Result<Tensor, CompareError> {
        let g = &self.spec.geometry;
        let shape: Vec<Option<usize>> = plan.shape(id.stage, id.form, g).into_iter().map(Some).collect();
        let (dtype, _, bytes) = self.values(entry, id.stage.name(), &id.stage.axes(id.form), &shape)?;
        Ok(Tensor { bytes, ..Tensor::zeros(id, plan, g, dtype) })
    }

    /// q of which the rope columns alone are known; the others are NaN, and nothing reads them.
    fn rope_columns(&self, entry: &Entry, plan: &Plan) -> Result<Tensor, CompareError> {
        let g = &self.spec.geometry;
        let axes = [Axis::Token, Axis::Head, Axis::Rope];
        let shape = [plan.tokens(), g.heads, g.rope].map(Some);
        let (dtype, _, bytes) = self.values(entry, Q_PE, &axes, &shape)?;
        let mut q = Tensor::zeros(TensorId::shared(Stage::Q), plan, g, dtype);
        let nan = vec![f64::NAN; g.nope];
        for (i, rope) in bytes.chunks_exact(g.rope * dtype.bytes()).enumerate() {
            let (row, at) = (i / g.heads, i % g.heads * g.key());
            q.write(row, at, &nan);
            q.write_bytes(row, at + g.nope, rope);
        }
        Ok(q)
    }

    fn weight(&self, weight: Weight, entry: &Entry) -> Result<(DType, Vec<f64>), CompareError> {
        let g = &self.spec.geometry;
        if !weight.exists(g) {
            return Err(self.bad(weight.name(), "this model has no such weight", "leave it out"));
        }
        let shape: Vec<Option<usize>> = weight.shape(g).into_iter().map(Some).collect();
        let (dtype, _, bytes) = self.values(entry, weight.name(), weight.row().axes, &shape)?;
        let mut values = vec![0.0; bytes.len() / dtype.bytes()];
        dtype.decode(&bytes, &mut values);
        Ok((dtype, values))
    }

    /// Arrays that the map does not name.
    fn unnamed(&self) -> Vec<String> {
        if self.map.part {
            return Vec::new();
        }
        let named = self.named();
        let rest: Vec<&str> =
            self.dump.entries().iter().map(|e| e.name.as_str()).filter(|n| !named.contains(n)).collect();
        if rest.is_empty() {
            return Vec::new();
        }
        const MOST: usize = 20;
        let more = if rest.len() > MOST { format!(" and {} more", rest.len() - MOST) } else { String::new() };
        let shown: Vec<String> = rest.iter().take(MOST).map(|n| n.escape_debug().to_string()).collect();
        vec![format!("arrays of the dump that the map does not name: {}{more}", shown.join(", "))]
    }
}
