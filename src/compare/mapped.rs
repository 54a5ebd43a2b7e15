/*!
A capture from a dump and a map: lengths, pages and positions, then every tensor in the table's axes.

New tokens of all requests are stacked, request after request; the cache is gathered by the dump's own page table into
pages of the case, so that slots that no request owns play no part.
*/

use super::arrange::{Wanted, arrange, reorder, typed};
use super::map::{Entry, Map, MapContract, Q_PE, Requests, Target, nearest};
use super::{Capture, CompareError, plain, sane, scalars};
use crate::case::{Batch, Case, Request};
use crate::engine::Description;
use crate::trace::read::{Array, Dump};
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::{
    Accumulate, Axis, Contract, Form, Given, Phase, Plan, Regime, Sequence, Softmax, Spec, Splits,
    Stage, Weight,
};
use ndarray::{Array2, s};

/// Reads what a map names of a dump, for a layer of these numbers. `layer`: what `{layer}` in names stands for.
///
/// # Errors
/// Names that are not in the dump, shapes that are not the case's, dtypes that are not known.
pub fn capture(dump: &Dump, map: &Map, spec: &Spec, layer: usize) -> Result<Capture, CompareError> {
    let of = Reader { dump, map, spec, layer };
    let forms = forms(map)?;
    let batch = of.batch()?;
    let mut case = of.case(batch)?;
    let mut tensors = Vec::new();
    let mut unjudged = Vec::new();
    for (target, entry) in &map.stages {
        match target {
            Target::QPe => {
                if map.stages.iter().any(|(t, _)| *t == Target::Stage(Stage::Q, None)) {
                    return Err(of.bad(
                        Q_PE,
                        "the map has q as well, which holds the same columns",
                        "leave one of the two out",
                    ));
                }
                let absorbed = TensorId::of(Stage::QLatent, Form::Absorbed);
                if !map.stages.iter().any(|(t, _)| matches!(t, Target::Stage(Stage::QLatent, _))) {
                    return Err(of.bad(
                        Q_PE,
                        "nothing reads it without q_latent",
                        "name q_latent too, or all of q",
                    ));
                }
                tensors.push((TensorId::shared(Stage::Q), of.rope_columns(entry, &case.plan)?));
                unjudged.extend([TensorId::shared(Stage::Q), absorbed]);
            }
            Target::Stage(stage @ (Stage::PartO | Stage::PartLse), _) => {
                return Err(of.bad(
                    stage.name(),
                    "partial results of splits are not read by maps in this version",
                    "leave them out: splits are then merged inside the attention",
                ));
            }
            Target::Stage(stage, form) => {
                if !stage.exists(&spec.geometry) {
                    return Err(of.bad(stage.name(), "this model has no such tensor", "leave it out"));
                }
                let form = form.or(map.form).or_else(|| (forms.len() == 1).then(|| forms[0]));
                let id = match (stage.row().scope, form) {
                    (mla_reference::Scope::Shared, _) => TensorId::shared(*stage),
                    (mla_reference::Scope::Only(f), _) => TensorId::of(*stage, f),
                    (mla_reference::Scope::Each, Some(f)) => TensorId::of(*stage, f),
                    (mla_reference::Scope::Each, None) => {
                        return Err(of.bad(
                            stage.name(),
                            "both forms have it",
                            "write form = \"fused\" or \"absorbed\", or the form before the name",
                        ));
                    }
                };
                let tensor = match stage {
                    Stage::Cache => of.cache(entry, &case.plan)?,
                    _ => of.tensor(id, entry, &case.plan)?,
                };
                tensors.push((id, tensor));
            }
        }
    }
    if let Some((_, twice)) =
        tensors.iter().enumerate().find(|(i, t)| tensors[..*i].iter().any(|o| o.0 == t.0))
    {
        return Err(of.bad(&twice.0.to_string(), "it is named twice", "leave one of the two out"));
    }
    let weights = map
        .weights
        .iter()
        .map(|(w, e)| Ok((*w, of.weight(*w, e)?)))
        .collect::<Result<Vec<_>, CompareError>>()?;
    let (mut contract, chosen) = of.contract(&tensors, &weights)?;
    let mut left_out = of.unnamed();
    if contract.softmax.emulate && !placed(&contract, &case.plan) {
        contract.softmax.emulate = false;
        left_out
            .push("the place of P's cast: the contract leaves open how this kernel splits the keys".into());
    }
    let rotated = |t: &(TensorId, Tensor)| matches!(t.0.stage, Stage::Q | Stage::KPe);
    if chosen.is_some() && map.rope.is_none() && tensors.iter().any(rotated) {
        left_out.push("the rotation in q and k_pe: nobody says from which table; write rope = { table = \"f32\" } or a [contract]".into());
    }
    let closed = of.given(&mut case, &tensors);
    let captured = tensors.iter().map(|t| t.0).collect();
    let rank = map.rank.map_or(String::new(), |r| format!(", rank {r}"));
    Ok(Capture {
        engine: Description::plain(
            format!("{} {}", plain(&map.engine.backend), plain(&map.engine.version)),
            format!("dump {}{rank}", dump.path().display()),
        ),
        forms,
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
    })
}

/// Whether the contract says where the tiles of every row lie: a scheduler's splits are not known, nor those of a prefill
/// whose rows it does not say to be split.
fn placed(contract: &Contract, plan: &Plan) -> bool {
    let whole = contract.softmax.tile == 0;
    plan.sequences.iter().all(|s| {
        let one = contract.split_ranges(s.keys()).len() <= 1 && contract.splits != Splits::Scheduled;
        let split = s.phase() == Phase::Decode || contract.split_prefill;
        whole || one || split && contract.splits != Splits::Scheduled
    })
}

/// Forms of which the map names anything; both where nothing says which.
fn forms(map: &Map) -> Result<Vec<Form>, CompareError> {
    let mut all: Vec<Form> = map.form.into_iter().collect();
    for (target, _) in &map.stages {
        all.extend(match target {
            Target::QPe => Some(Form::Absorbed),
            Target::Stage(_, Some(form)) => Some(*form),
            Target::Stage(stage, None) => match stage.row().scope {
                mla_reference::Scope::Only(form) => Some(form),
                _ => None,
            },
        });
    }
    all.sort();
    all.dedup();
    Ok(if all.is_empty() { Form::ALL.to_vec() } else { all })
}

struct Reader<'a> {
    dump: &'a Dump,
    map: &'a Map,
    spec: &'a Spec,
    layer: usize,
}

impl Reader<'_> {
    fn bad(&self, tensor: &str, what: &str, how: &str) -> CompareError {
        CompareError::new(
            format!("{tensor}: {what}"),
            format!("the map, with {}", self.dump.path().display()),
            how,
        )
    }

    fn name(&self, name: &str) -> String {
        name.replace("{layer}", &self.layer.to_string())
    }

    /// An array by its name in the map; `tensor`: what it is wanted for.
    fn array(&self, name: &str, tensor: &str) -> Result<Array, CompareError> {
        let name = self.name(name);
        let Some(entry) = self.dump.find(&name) else {
            let all: Vec<&str> = self.dump.entries().iter().map(|e| e.name.as_str()).collect();
            return Err(self.bad(
                tensor,
                &format!("the dump has no array {}", name.escape_debug()),
                &format!("the nearest of its {} are {}", all.len(), nearest(&name, &all).join(", ")),
            ));
        };
        self.dump.read(entry).map_err(|e| {
            let text = e.to_string();
            let mut lines = text.split("\n  where: ");
            let what = lines.next().unwrap_or_default().to_string();
            let (place, how) = lines.next().unwrap_or_default().split_once("\n  do: ").unwrap_or_default();
            CompareError::new(what, place, how)
        })
    }

    /// An array of integers that are not negative.
    fn counts(&self, name: &str, tensor: &str) -> Result<(Vec<usize>, Vec<usize>), CompareError> {
        let array = self.array(name, tensor)?;
        let all = array.integers().map(|v| v.into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>());
        match all {
            Some(Ok(all)) => Ok((array.shape, all)),
            _ => Err(self.bad(
                tensor,
                &format!("array {} of {} does not hold counts", self.name(name).escape_debug(), array.stored),
                "name an array of integers that are not negative",
            )),
        }
    }

    fn batch(&self) -> Result<Batch, CompareError> {
        let (keys, new) = match &self.map.requests {
            Requests::Given(batch) => return Ok(batch.clone()),
            Requests::Arrays { keys, new } => {
                (self.counts(keys, "lengths")?.1, self.counts(new, "lengths")?.1)
            }
        };
        let all = keys.iter().zip(&new).map(|(k, n)| {
            let context = k.checked_sub(*n).filter(|_| *n > 0)?;
            Some(Request { context, new: *n })
        });
        let all =
            all.collect::<Option<Vec<Request>>>().filter(|_| keys.len() == new.len() && !keys.is_empty());
        let text = all.map(|a| Batch(a).to_string());
        // Read back: the same limits as for batches on the command line.
        text.and_then(|t| t.parse().ok()).ok_or_else(|| {
            self.bad(
                "lengths",
                &format!("keys {keys:?} and new tokens {new:?} are no requests"),
                "name an array of all keys and one of new tokens, one number a request, 1 ≤ new ≤ keys",
            )
        })
    }

    fn case(&self, batch: Batch) -> Result<Case, CompareError> {
        let page = self.map.page_size;
        let (mut positions, mut token_request, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
        let mut pages = 0;
        for (i, r) in batch.0.iter().enumerate() {
            let start = positions.len();
            positions.extend((r.context..r.total()).map(|p| p as u64));
            token_request.extend(std::iter::repeat_n(i, r.new));
            let first = pages * page;
            pages += r.total().div_ceil(page);
            sequences.push(Sequence {
                request: i,
                regime: Regime::Random,
                tokens: start..positions.len(),
                context: r.context,
                slots: (first..first + r.total()).collect(),
            });
        }
        if let Some(name) = &self.map.positions {
            let (_, given) = self.counts(name, "positions")?;
            if given.len() != positions.len() {
                let what = format!("there are {} for {} new tokens", given.len(), positions.len());
                return Err(self.bad("positions", &what, "cut the dump to the tokens of the requests"));
            }
            positions = given.into_iter().map(|p| p as u64).collect();
        }
        Ok(Case {
            batch,
            regimes: vec![Regime::Random],
            plan: Plan { positions, token_request, sequences, page_size: page, pages, splits: 1 },
            given: Given::default(),
            notes: Vec::new(),
        })
    }

    /// An entry's values with these axes; of parts, the last axis is theirs in turn.
    fn values(
        &self,
        entry: &Entry,
        tensor: &str,
        axes: &[Axis],
        shape: &[Option<usize>],
    ) -> Result<(DType, Vec<usize>, Vec<u8>), CompareError> {
        let g = &self.spec.geometry;
        if !entry.parts.is_empty() {
            return self.joined(entry, tensor, axes, shape);
        }
        let fail = |what: String| {
            let name = self.name(&entry.name);
            self.bad(
                tensor,
                &format!("array {}: {what}", name.escape_debug()),
                "correct the map (docs/dumps.md), or the dump",
            )
        };
        let (dtype, array) = typed(self.array(&entry.name, tensor)?, entry.dtype).map_err(fail)?;
        let wanted = Wanted { axes, shape: shape.to_vec(), g };
        let (shape, mut bytes) = arrange(&array, entry, &wanted).map_err(fail)?;
        if let Some(order) = entry.pair_order {
            if !matches!(axes.last(), Some(Axis::Rope | Axis::NopeRope | Axis::LatentRope)) {
                return Err(fail("it has no rope columns, so no pair_order".into()));
            }
            let width = shape.last().copied().unwrap_or(1);
            reorder(&mut bytes, dtype.bytes(), width, g.rope, order.pairing(), self.spec.rope.pairing);
        }
        Ok((dtype, shape, bytes))
    }

    /// Two arrays, one after the other on the last axis.
    fn joined(
        &self,
        entry: &Entry,
        tensor: &str,
        axes: &[Axis],
        shape: &[Option<usize>],
    ) -> Result<(DType, Vec<usize>, Vec<u8>), CompareError> {
        let first = match axes.last() {
            Some(Axis::NopeRope) => Axis::Nope,
            Some(Axis::LatentRope) => Axis::Latent,
            _ => return Err(self.bad(tensor, "it does not consist of parts", "name one array")),
        };
        let [a, b] = entry.parts.as_slice() else {
            return Err(self.bad(
                tensor,
                "it consists of two parts",
                &format!("give {} and rope", first.name()),
            ));
        };
        let part = |entry: &Entry, last: Axis| {
            let mut axes = axes.to_vec();
            let mut shape = shape.to_vec();
            if let (Some(a), Some(n)) = (axes.last_mut(), shape.last_mut()) {
                (*a, *n) = (last, last.len(&self.spec.geometry));
            }
            self.values(entry, tensor, &axes, &shape)
        };
        let ((da, sa, a), (db, sb, b)) = (part(a, first)?, part(b, Axis::Rope)?);
        let outer = sa.len() - 1;
        if da != db || sa[..outer] != sb[..outer] {
            return Err(self.bad(
                tensor,
                &format!("its parts are {da} {sa:?} and {db} {sb:?}"),
                "dump both alike",
            ));
        }
        let (wa, wb) = (sa[outer] * da.bytes(), sb[outer] * da.bytes());
        let rows = a.chunks_exact(wa).zip(b.chunks_exact(wb));
        let bytes = rows.flat_map(|(a, b)| a.iter().chain(b)).copied().collect();
        let shape = sa[..outer].iter().copied().chain([sa[outer] + sb[outer]]).collect();
        Ok((da, shape, bytes))
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

    /// The cache in the pages of the case.
    fn cache(&self, entry: &Entry, plan: &Plan) -> Result<Tensor, CompareError> {
        let g = &self.spec.geometry;
        let bad = |what: &str, how: &str| self.bad("cache", what, how);
        let named = |axis: &str| {
            let lists = std::iter::once(entry).chain(&entry.parts).filter_map(|e| e.axes.as_ref());
            lists.flatten().any(|a| a.split('*').any(|a| a.trim() == axis))
        };
        let (axes, shape): (&[Axis], &[Option<usize>]) = match named("slot") {
            true => {
                (&[Axis::Page, Axis::Slot, Axis::LatentRope], &[None, Some(plan.page_size), Some(g.cache())])
            }
            false => (&[Axis::Key, Axis::LatentRope], &[None, Some(g.cache())]),
        };
        let (dtype, _, bytes) = self.values(entry, "cache", axes, shape)?;
        let width = g.cache() * dtype.bytes();
        let rows = bytes.len() / width;
        let total = plan.rows(Stage::K);
        let physical: Vec<usize> = match (&entry.block_table, &entry.slots) {
            (Some(_), Some(_)) => return Err(bad("it has a block table and slots", "name one of the two")),
            (None, Some(slots)) => self.counts(slots, "cache")?.1,
            (Some(table), None) => {
                let (shape, table) = self.counts(table, "cache")?;
                let &[requests, pages] = shape.as_slice() else {
                    return Err(bad(
                        &format!("the block table has shape {shape:?}"),
                        "dump it as [request, page]",
                    ));
                };
                let longest =
                    plan.sequences.iter().map(|s| s.keys().div_ceil(plan.page_size)).max().unwrap_or(0);
                if requests != plan.sequences.len() || pages < longest {
                    return Err(bad(
                        &format!(
                            "the block table has shape {shape:?}, {} requests of at most {longest} pages need more",
                            plan.sequences.len()
                        ),
                        "dump a row for each request of the map, and say its page_size",
                    ));
                }
                let slot = |i: usize, p: usize| {
                    table[i * pages + p / plan.page_size].saturating_mul(plan.page_size) + p % plan.page_size
                };
                plan.sequences
                    .iter()
                    .enumerate()
                    .flat_map(|(i, s)| (0..s.keys()).map(move |p| slot(i, p)))
                    .collect()
            }
            (None, None) if rows == total => (0..total).collect(),
            (None, None) => {
                return Err(bad(
                    &format!("it has {rows} rows, the requests have {total} keys"),
                    "name its block_table or slots, or dump a row for each key, request after request",
                ));
            }
        };
        if physical.len() != total || physical.iter().any(|s| *s >= rows) {
            return Err(bad(
                &format!("{} slots, of {} keys, do not all lie in its {rows} rows", physical.len(), total),
                "name the table that the kernel read, and cut it to the requests of the map",
            ));
        }
        let mut cache = Tensor::zeros(TensorId::shared(Stage::Cache), plan, g, dtype);
        // What nobody owns is NaN, as the judge has it.
        let nan = vec![f64::NAN; g.cache()];
        (0..cache.rows).for_each(|row| cache.write(row, 0, &nan));
        let own = plan.sequences.iter().flat_map(|s| &s.slots);
        for (slot, from) in own.zip(&physical) {
            cache.write_bytes(*slot, 0, &bytes[from * width..(from + 1) * width]);
        }
        Ok(cache)
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

    /// The contract to emulate, and how it was chosen where nobody declares it. What is stored how is the dump's.
    fn contract(
        &self,
        tensors: &[(TensorId, Tensor)],
        weights: &[(Weight, (DType, Vec<f64>))],
    ) -> Result<(Contract, Option<String>), CompareError> {
        let is_lse = |t: &&(TensorId, Tensor)| t.0.stage == Stage::Lse;
        let first = tensors.iter().find(|t| !is_lse(t)).map(|(id, t)| (id.to_string(), t.dtype));
        let Some((name, dtype)) = first else {
            return Err(self.bad("[tensors]", "no tensor but lse is named", "name those that were dumped"));
        };
        if let Some((id, t)) = tensors.iter().find(|t| !is_lse(t) && t.1.dtype != dtype) {
            return Err(self.bad(
                &id.to_string(),
                &format!("it is {}, and {name} is {dtype}", t.dtype),
                "dump tensors as the engine stores them; say dtype in the map where they were widened",
            ));
        }
        let narrow = dtype.precision() < DType::F32.precision();
        let (mut contract, chosen) = match &self.map.contract {
            MapContract::Declared(c) => (**c, None),
            MapContract::File(name, c) => (**c, Some(name.clone())),
            MapContract::Named(k) => {
                let c = k.contract_for(dtype);
                let softmax = Softmax { p: c.softmax.p.filter(|_| narrow), ..c.softmax };
                (Contract { softmax, ..c }, Some(k.name.clone()))
            }
            MapContract::None => {
                let softmax = Softmax { emulate: false, p: narrow.then_some(dtype), ..Softmax::exact() };
                (
                    Contract { softmax, ..Contract::usual(dtype, Accumulate::Unknown) },
                    Some("none".to_string()),
                )
            }
        };
        if contract.activations != dtype {
            return Err(self.bad(
                &name,
                &format!("it is {dtype}, and the contract stores {}", contract.activations),
                "correct one of the two",
            ));
        }
        if let Some(rope) = &self.map.rope {
            contract.rope_table = rope.table;
            contract.rope_angle = rope.angle;
            contract.rope_products = rope.products;
        }
        contract.splits = self.map.splits.unwrap_or(contract.splits);
        if !sane(&contract) {
            return Err(self.bad(
                "contract",
                "its tiles or splits are of no kernel",
                "give at most 1024 parts",
            ));
        }
        contract.lse_base = self.map.lse_base.unwrap_or(contract.lse_base);
        if let Some((_, lse)) = tensors.iter().find(is_lse) {
            contract.lse = lse.dtype;
        }
        for norm in [false, true] {
            let mut kinds = weights.iter().filter(|w| w.0.is_norm() == norm).map(|w| (w.0, w.1.0));
            let Some((_, dtype)) = kinds.next() else { continue };
            if let Some((w, other)) = kinds.find(|k| k.1 != dtype) {
                return Err(self.bad(
                    w.name(),
                    &format!("it is {other}, other weights are {dtype}"),
                    "name weights of one dtype",
                ));
            }
            *(if norm { &mut contract.norm_weights } else { &mut contract.weights }) = dtype;
        }
        Ok((contract, chosen))
    }

    /// Hidden states and context rows from what was captured; of which open stages it is known how they come about.
    fn given(&self, case: &mut Case, tensors: &[(TensorId, Tensor)]) -> Vec<Stage> {
        let g = &self.spec.geometry;
        let find = |stage| tensors.iter().find(|t| t.0 == TensorId::shared(stage)).map(|t| &t.1);
        case.given.hidden = match find(Stage::Hidden) {
            Some(h) => h.block(0..h.rows, 0..h.cols),
            None => Array2::from_elem((case.plan.tokens(), g.hidden), f64::NAN),
        };
        let cache = find(Stage::Cache);
        let mut rows = Vec::new();
        for seq in &case.plan.sequences {
            let mut own = Array2::from_elem((seq.context, g.cache()), f64::NAN);
            for (p, slot) in seq.slots.iter().take(seq.context).enumerate() {
                if let Some(c) = cache {
                    own.slice_mut(s![p..p + 1, ..]).assign(&c.block(*slot..slot + 1, 0..g.cache()));
                }
            }
            rows.push(own);
        }
        case.given.context = rows;
        let some = case.plan.sequences.iter().any(|s| s.context > 0);
        if some && cache.is_some() {
            case.notes.push(
                "context rows are the dump's own: what stood in the cache before is taken as it is".into(),
            );
        }
        let mut closed = Vec::new();
        closed.extend((cache.is_some() || !some).then_some(Stage::Cache));
        let declared = matches!(self.map.contract, MapContract::Declared(_) | MapContract::File(..));
        closed.extend(declared.then_some(Stage::AttnIn));
        if declared || self.map.rope.is_some() {
            closed.extend([Stage::Q, Stage::KPe]);
        }
        closed
    }

    /// Arrays that the map does not name.
    fn unnamed(&self) -> Vec<String> {
        let named: Vec<String> = self.map.arrays().into_iter().map(|n| self.name(n)).collect();
        let rest: Vec<&str> = self
            .dump
            .entries()
            .iter()
            .map(|e| e.name.as_str())
            .filter(|n| !named.iter().any(|o| o == n))
            .collect();
        if rest.is_empty() {
            return Vec::new();
        }
        const MOST: usize = 20;
        let more = if rest.len() > MOST { format!(" and {} more", rest.len() - MOST) } else { String::new() };
        let shown: Vec<String> = rest.iter().take(MOST).map(|n| n.escape_debug().to_string()).collect();
        vec![format!("arrays of the dump that the map does not name: {}{more}", shown.join(", "))]
    }
}
