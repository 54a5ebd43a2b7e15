/*!
The variants of a case: one table, and the functions that make another case of the base's.

Nothing is drawn again: what a request is given would depend on its place in the batch. Hidden states and context rows are
moved, and what a token finds in the cache in place of a token that the base computed are the bits that the base wrote.
*/

use super::Kept;
use crate::case::pages::{lay_out, needed};
use crate::case::{Batch, Case, Request, Stream};
use crate::engine::Engine;
use crate::probe;
use crate::report::invariance::Demand;
use crate::trace::TensorId;
use crate::written::Name;
use mla_reference::{Form, Given, Phase, Plan, Regime, Sequence, Stage};
use ndarray::{Array2, Axis};
use std::ops::Range;

/// A row of the table.
pub struct Row {
    /// As reports name it.
    pub name: Name,
    /// What is another one than in the base run.
    pub changes: Name,
    /// What mathematics demands of the bits.
    pub demands: Demand,
    /// Makes it of the base, or says why there is nothing to ask.
    pub make: fn(&Base) -> Result<Made, String>,
}

/// All variants, in the order of reports.
pub static TABLE: &[Row] = &[
    row("order", "requests in reverse order", Demand::Rounding, |b| reversed(b.case)),
    row("pages", "every page at another place of the pool", Demand::Bits, |b| {
        Ok(Made::Run(Box::new(Changed { origin: Origin::same(b.case), case: mirrored(b.case) })))
    }),
    row("page-size", "pages of 16 slots, or of 64 where the base has 16", Demand::Rounding, |b| {
        let size = if b.case.plan.page_size == 16 { 64 } else { 16 };
        let case = repaged(b.case.clone(), size, b.seed);
        Ok(Made::Run(Box::new(Changed { origin: Origin::same(b.case), case })))
    }),
    row("splits-1", "keys of a decode step in one part", Demand::Rounding, |b| split(b, 1)),
    row("splits-2", "keys of a decode step in 2 splits", Demand::Rounding, |b| split(b, 2)),
    row("splits-5", "keys of a decode step in 5 splits", Demand::Rounding, |b| split(b, 5)),
    row("one-by-one", "tokens of a prefill as requests of one token", Demand::Rounding, one_by_one),
    row("forms", "the absorbed form beside the fused one, in the base run", Demand::Rounding, |b| {
        match Form::ALL.iter().all(|f| b.forms.contains(f)) {
            true => Ok(Made::Forms),
            false => Err("only one form ran".into()),
        }
    }),
];

const fn row(
    name: Name,
    changes: Name,
    demands: Demand,
    make: fn(&Base) -> Result<Made, String>,
) -> Row {
    Row { name, changes, demands, make }
}

/// What variants are made of.
pub struct Base<'a> {
    /// The case of the base run.
    pub case: &'a Case,
    /// What the base run computed.
    pub kept: &'a Kept,
    /// The engine.
    pub engine: &'a dyn Engine,
    /// Forms that it ran.
    pub forms: &'a [Form],
    /// Seed of everything drawn.
    pub seed: u64,
}

/// What a row of the table asks for.
pub enum Made {
    /// A run of another case.
    Run(Box<Changed>),
    /// The base's own forms, beside each other.
    Forms,
}

/// A case, and where its rows are in the base's.
pub struct Changed {
    /// The case.
    pub case: Case,
    /// Rows of the base.
    pub origin: Origin,
}

/// Of each row of a variant the base's row that it must agree with.
#[derive(Debug, PartialEq, Eq)]
pub struct Origin {
    /// New tokens.
    pub tokens: Vec<usize>,
    /// Rows of attention: new tokens, sequence after sequence.
    pub attention: Vec<usize>,
}

impl Origin {
    /// Of a case with the base's rows.
    pub fn same(case: &Case) -> Origin {
        let rows = case.plan.rows(Stage::Out, None);
        Origin { tokens: (0..case.plan.tokens()).collect(), attention: (0..rows).collect() }
    }

    /// Rows of a stage.
    pub fn of(&self, stage: Stage) -> &[usize] {
        if stage < Stage::Cache { &self.tokens } else { &self.attention }
    }
}

/// Tokens of a request of the base, on top of all tokens before them.
struct Piece {
    request: usize,
    new: Range<usize>,
}

/// A batch of pieces of the base's requests. `written`: the row that the base wrote to the cache for a new token; slots are
/// the base's, and must be given anew where two pieces are of one request.
fn of_pieces(case: &Case, pieces: &[Piece], written: &dyn Fn(usize) -> Vec<f64>) -> Changed {
    let plan = &case.plan;
    let of = |request: usize, regime: Regime| {
        plan.attention_rows(None).find(|(_, s, _)| (s.request, s.regime) == (request, regime))
    };
    let (mut requests, mut ranges, mut tokens, mut token_request) = (vec![], vec![], vec![], vec![]);
    for (i, p) in pieces.iter().enumerate() {
        let context = case.batch.0.get(p.request).map_or(0, |r| r.context);
        let first = plan.token_request.iter().position(|r| *r == p.request).unwrap_or(0);
        requests.push(Request { context: context + p.new.start, new: p.new.len() });
        ranges.push(tokens.len()..tokens.len() + p.new.len());
        tokens.extend(p.new.clone().map(|t| first + t));
        token_request.extend(std::iter::repeat_n(i, p.new.len()));
    }
    let (mut sequences, mut context, mut attention) = (vec![], vec![], vec![]);
    for &regime in &case.regimes {
        for (i, p) in pieces.iter().enumerate() {
            let Some((at, s, rows)) = of(p.request, regime) else { continue };
            attention.extend(p.new.clone().map(|t| rows.start + t));
            let mut given: Vec<f64> = case.given.context.get(at).into_iter().flatten().copied().collect();
            (0..p.new.start).for_each(|t| given.extend(written(s.tokens.start + t)));
            let before = s.context + p.new.start;
            let width = given.len().checked_div(before).unwrap_or(0);
            context.push(Array2::from_shape_vec((before, width), given).unwrap_or_default());
            sequences.push(Sequence {
                request: i,
                regime,
                tokens: ranges[i].clone(),
                context: before,
                slots: s.slots[..before + p.new.len()].to_vec(),
            });
        }
    }
    let plan = Plan {
        positions: tokens.iter().map(|t| plan.positions[*t]).collect(),
        token_request,
        sequences,
        ..plan.clone()
    };
    let given = Given { hidden: case.given.hidden.select(Axis(0), &tokens), context };
    let case = Case { batch: Batch(requests), plan, given, ..case.clone() };
    Changed { case, origin: Origin { tokens, attention } }
}

/// The requests in reverse order, each with its rows and its pages.
fn reversed(case: &Case) -> Result<Made, String> {
    let n = case.batch.0.len();
    if n < 2 {
        return Err("the batch has one request".into());
    }
    let whole = |request| Piece { request, new: 0..case.batch.0[request].new };
    let pieces: Vec<Piece> = (0..n).rev().map(whole).collect();
    Ok(Made::Run(Box::new(of_pieces(case, &pieces, &|_| Vec::new()))))
}

/// The case with its pool mirrored; a pool of an odd number of pages is one page longer, or one would stay where it is.
fn mirrored(case: &Case) -> Case {
    let mut even = case.clone();
    even.plan.pages = even.plan.pages.next_multiple_of(2);
    probe::mirrored(&even)
}

/// Pages that nobody owns, as in the base.
fn spare(plan: &Plan) -> usize {
    plan.pages.saturating_sub(needed(&plan.sequences, plan.page_size))
}

const PAGES: u64 = 0x1a9e;

/// The case with pages of another size, dealt anew.
fn repaged(mut case: Case, page_size: usize, seed: u64) -> Case {
    let plan = &mut case.plan;
    let pages = needed(&plan.sequences, page_size) + spare(plan).max(1);
    lay_out(&mut plan.sequences, page_size, pages, Stream::new(seed, PAGES, 0));
    (plan.page_size, plan.pages) = (page_size, pages);
    case
}

fn split(base: &Base, splits: usize) -> Result<Made, String> {
    let plan = &base.case.plan;
    if plan.splits == splits {
        return Err("it is what the base run has".into());
    }
    if !plan.sequences.iter().any(|s| s.phase() == Phase::Decode) {
        return Err("no request of the batch has one new token, so nothing is split".into());
    }
    if base.engine.with_splits(splits).is_none() {
        return Err(format!("the engine can't be had with {splits} splits"));
    }
    let case = Case { plan: Plan { splits, ..plan.clone() }, ..base.case.clone() };
    Ok(Made::Run(Box::new(Changed { origin: Origin::same(base.case), case })))
}

/// Requests of at most so many new tokens are taken whole.
const WHOLE: usize = 16;
/// Of longer ones so many tokens.
const SAMPLE: usize = 8;

/// Indices below `n`: the first, the last, and others between them at equal distances.
fn sample(n: usize, count: usize) -> Vec<usize> {
    match count.min(n) {
        0 => Vec::new(),
        1 => vec![n - 1],
        count => (0..count).map(|i| i * (n - 1) / (count - 1)).collect(),
    }
}

/// New tokens of each request of several as requests of one token, each on the rows that the base wrote for those before it.
///
/// Keys cost the most (the fused form decompresses each), so fewer tokens are taken where a request's copies would have more
/// keys than the whole base has.
fn one_by_one(base: &Base) -> Result<Made, String> {
    let case = base.case;
    if case.batch.0.iter().all(|r| r.new < 2) {
        return Err("every request of the batch has one new token".into());
    }
    let [Some(latent), Some(k_pe)] =
        [Stage::KvCNormed, Stage::KPe].map(|s| base.kept.get(&TensorId::shared(s)))
    else {
        return Err("the base run has no kv_c_normed or no k_pe that could be read back".into());
    };
    let room: usize = case.plan.sequences.iter().map(Sequence::keys).sum();
    let mut pieces = Vec::new();
    for (request, r) in case.batch.0.iter().enumerate().filter(|(_, r)| r.new > 1) {
        let wanted = if r.new <= WHOLE { r.new } else { SAMPLE };
        let count = wanted.min(room / r.total()).max(2);
        pieces.extend(sample(r.new, count).into_iter().map(|t| Piece { request, new: t..t + 1 }));
    }
    let written = |t: usize| {
        let mut row = vec![0.0; latent.cols + k_pe.cols];
        latent.read(t, 0..latent.cols, &mut row[..latent.cols]);
        k_pe.read(t, 0..k_pe.cols, &mut row[latent.cols..]);
        row
    };
    let Changed { case: alone, origin } = of_pieces(case, &pieces, &written);
    // Pieces of one request each have pages of their own.
    let case = repaged(alone, case.plan.page_size, base.seed);
    Ok(Made::Run(Box::new(Changed { case, origin })))
}
