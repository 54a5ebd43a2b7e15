/*!
Tensor parallelism from end to end: an engine runs once a rank, and what the ranks delivered is judged as one layer.

Ranks that have the same bits of what all ranks have are judged together ([`crate::parallel::group`]); a rank that has others
is judged by itself, from its own copy, and its units say so (`kv_a@rank 3`).
*/

use super::{Beside, CheckError, Judged, Options, judge_fed};
use crate::case::Case;
use crate::engine::{Engine, EngineError};
use crate::fault::{Alter, Fault, FaultError, FaultyWeights, Kind};
use crate::judge::{Settings, Unit, Verdict, Which, sort};
use crate::model::list;
use crate::model::{Layer, Stored};
use crate::parallel::gather::Gather;
use crate::parallel::group::Gathered;
use crate::parallel::heads::OfHeads;
use crate::parallel::{Ranks, RanksError};
use crate::report::ranks::{RankNorm, RankReport, RanksReport};
use crate::trace::TensorId;
use crate::written::keep;
use mla_reference::product::Rows;
use mla_reference::{Axis, Plan, Stage, Weight, Weights};

/// The ranks that the options ask for; None: no tensor parallelism.
pub(super) fn of(layer: &Layer, stored: &[Stored], of: usize) -> Result<Option<Ranks>, RanksError> {
    let place = format!("layer {}", layer.index);
    let ranks = Ranks::new(of, &layer.spec.geometry, layer.weights, stored, &place)?;
    Ok((ranks.of > 1).then_some(ranks))
}

/// Calls `f` with the layer as a rank has it.
pub(super) fn with<T>(ranks: Ranks, rank: usize, layer: &Layer, f: impl FnOnce(&Layer) -> T) -> T {
    let heads = ranks.heads(rank);
    let weights = OfHeads::new(layer.weights, &heads, &layer.spec.geometry);
    f(&Layer { index: layer.index, spec: heads.spec(&layer.spec), weights: &weights })
}

/// Weights of which a fault gives every rank the first rank's shard.
struct ShardZero<'a> {
    own: &'a OfHeads<'a>,
    first: &'a OfHeads<'a>,
    /// The one weight that it is; None: all.
    only: Option<Weight>,
}

impl Weights for ShardZero<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        let hit = self.only.is_none_or(|w| w == weight);
        if hit { self.first.matrix(weight) } else { self.own.matrix(weight) }
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.own.norm(weight)
    }
}

/// Runs the engine once a rank, with the options' deliberate fault if there is one.
fn gather(
    ranks: Ranks,
    layer: &Layer,
    case: &Case,
    options: &Options,
    engine: &dyn Engine,
    progress: &dyn Fn(&str),
) -> Result<Gathered, CheckError> {
    let g = &layer.spec.geometry;
    let contract = engine.contract();
    let dtypes = (contract.weights, contract.norm_weights);
    let alone = Case { plan: Plan { ranks: 1, ..case.plan.clone() }, ..case.clone() };
    let fault = options.fault.as_ref();
    let faulty = fault.map(|f| FaultyWeights::new(f, layer.weights, g, None)).transpose()?;
    let shifted = fault.map(|f| f.case(&alone));
    let seen: &Case = shifted.as_deref().unwrap_or(&alone);
    let all: &dyn Weights = faulty.as_ref().map_or(layer.weights, |f| f);
    let first = OfHeads::new(all, &ranks.heads(0), g);
    let mut gathered = Gathered::new(ranks);
    for rank in 0..ranks.of {
        let heads = ranks.heads(rank);
        let file = OfHeads::new(layer.weights, &heads, g);
        let spec = heads.spec(&layer.spec);
        let mut sink = Gather::new(rank, &file, dtypes, progress);
        match fault {
            None => {
                let own = Layer { index: layer.index, spec, weights: &file };
                engine.run(&own, &alone, &options.forms, &mut sink)?;
            }
            Some(fault) => {
                let own = OfHeads::new(all, &heads, g);
                let zero = match fault.kind {
                    Kind::ShardZero(only) => Some(ShardZero { own: &own, first: &first, only }),
                    _ => None,
                };
                let weights: &dyn Weights = zero.as_ref().map_or(&own, |z| z);
                let held = Layer { index: layer.index, spec: fault.spec(&spec), weights };
                if fault.on_rank(rank, ranks.of) && !fault.on_sum(engine.seams()) {
                    let mut alter = Alter::new(fault, engine.seams(), &spec, &alone.plan, &mut sink)?;
                    engine.run(&held, seen, &options.forms, &mut alter)?;
                    alter.finish()?;
                } else {
                    engine.run(&held, seen, &options.forms, &mut sink)?;
                }
            }
        }
        gathered.push(sink.finish());
    }
    if let Some(fault) = fault {
        fault.took_part(engine)?;
    }
    Ok(gathered)
}

/// Runs the engine once a rank of the case's plan and judges the ranks together.
pub(super) fn judge<'a>(
    layer: &'a Layer<'a>,
    case: &'a Case,
    options: &'a Options,
    engine: &dyn Engine,
    beside: Beside<'a>,
    progress: &'a dyn Fn(&str),
) -> Result<Judged, CheckError> {
    let ranks = Ranks::new(case.plan.ranks, &layer.spec.geometry, layer.weights, &[], "this layer")?;
    let lost = lost(options.fault.as_ref(), ranks)?;
    let gathered = gather(ranks, layer, case, options, engine, progress)?;
    let declared = engine.contract();
    let mut whole = Judged::default();
    let Beside { settings, mut recorder, others } = beside;
    let saves = recorder.is_some();
    for (nth, group) in gathered.groups().iter().enumerate() {
        let main = nth == 0;
        let heads = group.heads();
        let some = OfHeads::new(layer.weights, &heads, &layer.spec.geometry);
        let weights: &dyn Weights = if group.is_all() { layer.weights } else { &some };
        let own = Layer { index: layer.index, spec: heads.spec(&layer.spec), weights };
        let plan = Plan { ranks: group.ranks().len(), ..case.plan.clone() };
        let mine = Case { plan, ..case.clone() };
        let held = match group.is_all() {
            true => Beside { settings: settings.clone(), recorder: recorder.take().map(|r| r as _), others },
            // Of some heads alone, other layers' weights and other conventions have other shapes, and a saved layer too.
            false => {
                let closer = settings.closer;
                let own =
                    Settings { budget: options.budget, seed: options.seed, closer, ..Settings::default() };
                Beside { settings: own, ..Beside::default() }
            }
        };
        let (spec, case) = (&own.spec, &mine);
        let judged = judge_fed(&own, case, options, &declared, held, progress, &mut |sink| {
            let numbers = (declared.weights, &spec.geometry, &case.plan);
            let Some(fault) = options.fault.as_ref().filter(|f| f.on_sum(engine.seams()) && main) else {
                return Ok(group.feed(weights, numbers, lost, sink).map_err(EngineError::from)?);
            };
            let mut alter = Alter::new(fault, engine.seams(), spec, &case.plan, sink)?;
            group.feed(weights, numbers, lost, &mut alter).map_err(EngineError::from)?;
            Ok(alter.finish()?)
        })?;
        whole.add(judged, (!group.is_all()).then(|| group.ranks()));
    }
    for rank in gathered.silent() {
        let which = Which::Tensor(TensorId::shared(Stage::Hidden));
        let note = "missing: the rank delivered no tensor at all";
        let unit = Unit::without_data(which, None, Verdict::Fault, note);
        whole.add(Judged { units: vec![unit], ..Judged::default() }, Some(vec![rank]));
    }
    if saves && !gathered.groups().first().is_some_and(|g| g.is_all()) {
        whole.odd.push("tensors were not saved: ranks differ in what they should have alike".into());
    }
    sort(&mut whole.units);
    whole.ranks = Some(report(ranks, &gathered, lost));
    Ok(whole)
}

/// The rank whose part a fault leaves out of the sum.
fn lost(fault: Option<&Fault>, ranks: Ranks) -> Result<Option<usize>, FaultError> {
    match fault {
        Some(Fault { kind: Kind::LostRank(r), text, .. }) if *r >= ranks.of => Err(FaultError::Nowhere(
            format!("there is no rank {r} among {}", ranks.of),
            text.clone(),
            format!("choose a rank below {}", ranks.of),
        )),
        Some(Fault { kind: Kind::LostRank(r), .. }) => Ok(Some(*r)),
        _ => Ok(None),
    }
}

impl Judged {
    /// Adds what was found of some ranks alone.
    fn add(&mut self, other: Judged, ranks: Option<Vec<usize>>) {
        self.gates.extend(other.gates);
        self.cumulative.extend(other.cumulative);
        self.reference_cache = self.reference_cache.take().or(other.reference_cache);
        self.odd.extend(other.odd);
        let Some(ranks) = ranks else {
            self.units.extend(other.units);
            return;
        };
        let label = format!("rank{} {}", if ranks.len() > 1 { "s" } else { "" }, list(&ranks));
        self.units.extend(other.units.into_iter().map(|mut u| {
            u.tensor = keep(format!("{}@{label}", u.tensor));
            if u.axes.iter().any(|a| matches!(a, Axis::Rank | Axis::Head)) {
                let among = format!("heads and ranks are counted among those of {label}");
                u.note = Some(u.note.take().map_or(among.clone(), |n| format!("{n}; {among}")));
            }
            u
        }));
    }
}

/// What reports say of the ranks.
fn report(ranks: Ranks, gathered: &Gathered, lost: Option<usize>) -> RanksReport {
    let each = gathered.ranks().iter().map(|r| {
        let heads = ranks.heads(r.number).0;
        RankReport {
            rank: r.number,
            heads: (heads[0], heads[heads.len() - 1]),
            norms: r
                .sizes
                .iter()
                .map(|(id, norm)| RankNorm { tensor: keep(id.to_string()), norm: *norm })
                .collect(),
        }
    });
    RanksReport {
        of: ranks.of,
        sum: match lost {
            None => "float32, in the order of ranks, rounded once".into(),
            Some(r) => format!("float32, in the order of ranks, rounded once, without rank {r}"),
        },
        ranks: each.collect(),
        differ: gathered.differ(),
    }
}
