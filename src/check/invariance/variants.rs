/*!
The variants of a case: one table, and the functions that make another case of the base's.

Nothing is drawn again: what a request is given would depend on its place in the batch. Hidden states and context rows are
moved, and what a token finds in the cache in place of a token that the base computed are the bits that the base wrote.
*/

use super::Kept;
use crate::case::pages::{lay_out, needed};
use crate::case::{Batch, Case, Request, Stream};
use crate::engine::Engine;
use crate::model::Layer;
use crate::parallel::Ranks;
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
    row(
        "order",
        "requests in reverse order (decodes first, where requests are routed)",
        Demand::Rounding,
        |b| reversed(b.case),
    ),
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
    row(
        "chunks",
        "contexts of prefills in 3 chunks, or in one go where the base has chunks",
        Demand::Rounding,
        chunked,
    ),
    row(
        "routed",
        "decodes absorbed, prefills fused; or both both ways where the base is routed",
        Demand::Rounding,
        routed,
    ),
    row("tp", "the heads on several ranks, or on one where the base has several", Demand::Rounding, ranks),
    row("forms", "the absorbed form beside the fused one, in the base run", Demand::Rounding, |b| {
        both_forms(b)?;
        match b.case.plan.route.threshold {
            None => Ok(Made::Forms),
            Some(_) => Err("each request went one way".into()),
        }
    }),
];

const fn row(name: Name, changes: Name, demands: Demand, make: fn(&Base) -> Result<Made, String>) -> Row {
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
    /// The layer.
    pub layer: &'a Layer<'a>,
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
    /// The base's row of each new token.
    pub tokens: Vec<usize>,
    /// The base's sequence of each sequence, and which of its new tokens is the first.
    pub sequences: Vec<(usize, usize)>,
}

impl Origin {
    /// Of a case with the base's rows.
    pub fn same(case: &Case) -> Origin {
        let sequences = (0..case.plan.sequences.len()).map(|i| (i, 0)).collect();
        Origin { tokens: (0..case.plan.tokens()).collect(), sequences }
    }
}

/// A run of the base's case with something else in its plan.
fn replanned(base: &Base, change: impl FnOnce(&mut Plan)) -> Result<Made, String> {
    let mut case = base.case.clone();
    change(&mut case.plan);
    Ok(Made::Run(Box::new(Changed { origin: Origin::same(base.case), case })))
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
        let mut all = plan.sequences.iter().enumerate();
        all.find(|(_, s)| (s.request, s.regime) == (request, regime))
    };
    // Where requests are routed, the absorbed form's come first.
    let absorbed = |p: &&Piece| plan.route.threshold.is_none_or(|most| p.new.len() <= most);
    let (first, then): (Vec<&Piece>, Vec<&Piece>) = pieces.iter().partition(absorbed);
    let pieces = [first, then].concat();
    let (mut requests, mut ranges, mut tokens, mut token_request) = (vec![], vec![], vec![], vec![]);
    for (i, p) in pieces.iter().enumerate() {
        let context = case.batch.0.get(p.request).map_or(0, |r| r.context);
        let first = plan.token_request.iter().position(|r| *r == p.request).unwrap_or(0);
        requests.push(Request { context: context + p.new.start, new: p.new.len() });
        ranges.push(tokens.len()..tokens.len() + p.new.len());
        tokens.extend(p.new.clone().map(|t| first + t));
        token_request.extend(std::iter::repeat_n(i, p.new.len()));
    }
    let (mut sequences, mut context, mut origins) = (vec![], vec![], vec![]);
    for &regime in &case.regimes {
        for (i, p) in pieces.iter().enumerate() {
            let Some((at, s)) = of(p.request, regime) else { continue };
            origins.push((at, p.new.start));
            let mut given: Vec<f64> = case.given.context.get(at).into_iter().flatten().copied().collect();
            (0..p.new.start).for_each(|t| given.extend(written(s.tokens.start + t)));
            let before = s.context + p.new.start;
            let none = case.given.context.get(at).map_or(0, |c| c.ncols());
            let width = given.len().checked_div(before).unwrap_or(none);
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
    let given = Given { hidden: case.given.hidden.select(Axis(0), &tokens), context, ..Given::default() };
    let case = Case { batch: Batch(requests), plan, given, ..case.clone() };
    Changed { case, origin: Origin { tokens, sequences: origins } }
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
    replanned(base, |plan| plan.splits = splits)
}

/// Chunks of the longest context that a prefill has.
const CHUNKS: usize = 3;

fn chunked(base: &Base) -> Result<Made, String> {
    let plan = &base.case.plan;
    if !base.forms.contains(&Form::Fused) {
        return Err("only the fused form reads contexts in chunks".into());
    }
    let prefills =
        plan.sequences.iter().filter(|s| s.phase() == Phase::Prefill && plan.serves(Some(Form::Fused), s));
    let longest = prefills.map(|s| s.context).max().unwrap_or(0);
    if longest < 2 {
        return Err("no prefill of the fused form has a context to be cut".into());
    }
    let chunk = plan.route.context_chunk.is_none().then(|| longest.div_ceil(CHUNKS));
    replanned(base, |plan| plan.route.context_chunk = chunk)
}

fn both_forms(base: &Base) -> Result<(), String> {
    let both = Form::ALL.iter().all(|f| base.forms.contains(f));
    if both { Ok(()) } else { Err("only one form ran".into()) }
}

/// Routed as by a decode threshold of 1, or not at all.
fn routed(base: &Base) -> Result<Made, String> {
    both_forms(base)?;
    let threshold = base.case.plan.route.threshold.is_none().then_some(1);
    let mut case = base.case.clone();
    case.plan.route.threshold = threshold;
    // In the order in which they ran, but for decodes that go first now.
    let whole = |request: usize| Piece { request, new: 0..case.batch.0[request].new };
    let pieces: Vec<Piece> = case.plan.order().into_iter().map(whole).collect();
    Ok(Made::Run(Box::new(of_pieces(&case, &pieces, &|_| Vec::new()))))
}

fn ranks(base: &Base) -> Result<Made, String> {
    if base.case.plan.ranks > 1 {
        return replanned(base, |plan| plan.ranks = 1);
    }
    let Layer { spec, weights, index } = base.layer;
    let heads = spec.geometry.heads;
    let cut = |of: usize| Ranks::new(of, &spec.geometry, *weights, &[], &format!("layer {index}"));
    match (2..=heads).find(|of| cut(*of).is_ok()) {
        Some(of) => replanned(base, |plan| plan.ranks = of),
        None => Err(format!("its {heads} heads can't be cut for any number of ranks")),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Tensor;
    use mla_numeric::DType;

    /// Two regimes, three requests (0+3, 4+1, 2+2), pages of 2 slots; every value says where it stood.
    fn case() -> Case {
        let batch: Batch = "0+3,4+1,2+2".parse().unwrap();
        let (mut positions, mut token_request, mut sequences, mut context) = (vec![], vec![], vec![], vec![]);
        let mut ranges = Vec::new();
        for (i, r) in batch.0.iter().enumerate() {
            ranges.push(positions.len()..positions.len() + r.new);
            positions.extend((r.context..r.total()).map(|p| p as u64));
            token_request.extend(std::iter::repeat_n(i, r.new));
        }
        for (n, regime) in Regime::ALL.into_iter().enumerate() {
            for (i, r) in batch.0.iter().enumerate().filter(|(_, r)| n == 0 || r.context > 0) {
                let tokens = ranges[i].clone();
                sequences.push(Sequence { request: i, regime, tokens, context: r.context, slots: vec![] });
                context.push(Array2::from_shape_fn((r.context, 2), |(p, c)| {
                    (1000 * (n + 1) + 100 * i + 10 * p + c) as f64
                }));
            }
        }
        let pages = needed(&sequences, 2) + 3;
        lay_out(&mut sequences, 2, pages, Stream::new(0, PAGES, 0));
        let hidden = Array2::from_shape_fn((positions.len(), 1), |(t, _)| t as f64);
        let plan =
            Plan { positions, token_request, sequences, page_size: 2, pages, splits: 1, ..Plan::default() };
        let regimes = Regime::ALL.to_vec();
        Case { batch, regimes, plan, given: Given { hidden, context, ..Given::default() }, notes: Vec::new() }
    }

    fn run(made: Result<Made, String>) -> Changed {
        match made {
            Ok(Made::Run(changed)) => *changed,
            _ => panic!("nothing to run"),
        }
    }

    struct Nothing;

    impl mla_reference::Weights for Nothing {
        fn matrix(&self, _: mla_reference::Weight) -> Option<&dyn mla_reference::product::Rows> {
            None
        }
        fn norm(&self, _: mla_reference::Weight) -> Option<&[f64]> {
            None
        }
    }

    fn with_base<T>(case: &Case, kept: &Kept, f: impl FnOnce(&Base) -> T) -> T {
        use mla_reference::{Geometry, Pairing, Rope, Spec};
        let engine = crate::engine::reference::ReferenceEngine;
        let spec = Spec {
            geometry: Geometry { hidden: 1, heads: 2, q_rank: 0, latent: 1, rope: 1, nope: 1, value: 1 },
            eps_attn: 0.0,
            eps_latent: 0.0,
            rope: Rope { inv_freq: Vec::new(), magnitude: 1.0, pairing: Pairing::Adjacent },
            scale: 1.0,
            temperature: None,
        };
        let layer = Layer { index: 0, spec, weights: &Nothing };
        f(&Base { case, kept, engine: &engine, layer: &layer, forms: &Form::ALL, seed: 0 })
    }

    /// Nobody shares a slot, and all lie in the pool.
    fn slots_are_sound(case: &Case) {
        let mut slots: Vec<usize> = case.plan.sequences.iter().flat_map(|s| s.slots.clone()).collect();
        slots.sort_unstable();
        let n = slots.len();
        slots.dedup();
        assert!(slots.len() == n && slots[n - 1] < case.plan.pages * case.plan.page_size);
        assert!(case.plan.sequences.iter().all(|s| s.slots.len() == s.keys()));
    }

    #[test]
    fn reversed_requests_keep_what_is_theirs() {
        let base = case();
        let Changed { case: other, origin } = run(reversed(&base));
        assert_eq!(other.batch.to_string(), "2+2,4+1,0+3");
        assert_eq!(origin.tokens, [4, 5, 3, 0, 1, 2]);
        assert_eq!(other.plan.token_request, [0, 0, 1, 2, 2, 2]);
        assert_eq!(other.given.hidden.column(0).to_vec(), [4.0, 5.0, 3.0, 0.0, 1.0, 2.0]);
        assert_eq!(other.plan.positions, [2, 3, 4, 0, 1, 2]);
        // Sequences of the base: three random ones, two peaked ones.
        assert_eq!(origin.sequences, [(2, 0), (1, 0), (0, 0), (4, 0), (3, 0)]);
        slots_are_sound(&other);
        for (at, s) in other.plan.sequences.iter().enumerate() {
            let mine = |b: &&Sequence| (2 - b.request, b.regime) == (s.request, s.regime);
            let from = base.plan.sequences.iter().position(|b| mine(&b)).unwrap();
            assert_eq!(s.slots, base.plan.sequences[from].slots);
            assert_eq!(other.given.context[at], base.given.context[from]);
        }
        let Changed { case: back, .. } = run(reversed(&other));
        assert_eq!(back.given.hidden, base.given.hidden);
        assert_eq!(back.given.context, base.given.context);
    }

    /// Decodes go first, wherever they stood; a base that is routed is undone in the order in which it ran.
    #[test]
    fn routed_requests_of_one_token_come_first() {
        let base = case();
        with_base(&base, &Kept::new(), |subject| {
            let Changed { case: other, origin } = run(routed(subject));
            assert_eq!(other.batch.to_string(), "4+1,0+3,2+2");
            assert_eq!(other.batch.order(Some(1)), [0, 1, 2]);
            assert_eq!(origin.tokens, [3, 0, 1, 2, 4, 5]);
            assert_eq!(other.plan.rows(Stage::Out, Some(Form::Absorbed)), 2);
            slots_are_sound(&other);
            let Changed { case: back, .. } = run(reversed(&other));
            assert_eq!(back.batch.to_string(), "4+1,2+2,0+3");
        });
    }

    #[test]
    fn a_mirrored_pool_moves_every_page() {
        for more in [0, 1] {
            let mut base = case();
            base.plan.pages += more;
            let other = mirrored(&base);
            slots_are_sound(&other);
            for (a, b) in base.plan.sequences.iter().zip(&other.plan.sequences) {
                assert!(a.slots.iter().zip(&b.slots).all(|(a, b)| a / 2 != b / 2 && a % 2 == b % 2));
            }
        }
    }

    #[test]
    fn other_pages_hold_the_same_keys() {
        let other = repaged(case(), 16, 3);
        slots_are_sound(&other);
        assert_eq!(other.plan.page_size, 16);
        assert!(other.plan.sequences.iter().all(|s| s.slots.windows(2).all(|w| w[1] == w[0] + 1)));
        assert!(other.plan.pages > needed(&other.plan.sequences, 16));
    }

    /// Token i of 2+2 stands on the two context rows and on what the base wrote for the tokens before it.
    #[test]
    fn tokens_one_by_one_stand_on_what_the_base_wrote() {
        let base = case();
        let mut kept = Kept::new();
        for (stage, add) in [(Stage::KvCNormed, 0.25), (Stage::KPe, 0.5)] {
            let mut t = Tensor {
                dtype: DType::F32,
                axes: Vec::new(),
                shape: vec![6, 1],
                rows: 6,
                cols: 1,
                bytes: vec![0; 24],
            };
            (0..6).for_each(|r| t.set(r, 0, r as f64 + add));
            kept.insert(TensorId::shared(stage), t);
        }
        let Changed { case: alone, origin } = with_base(&base, &kept, |subject| run(one_by_one(subject)));
        assert_eq!(alone.batch.to_string(), "0+1,1+1,2+1,2+1,3+1");
        assert_eq!(origin.tokens, [0, 1, 2, 4, 5]);
        assert_eq!(alone.plan.positions, [0, 1, 2, 2, 3]);
        assert_eq!(origin.sequences, [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (4, 0), (4, 1)]);
        slots_are_sound(&alone);
        let rows = |at: usize| alone.given.context[at].iter().copied().collect::<Vec<_>>();
        assert_eq!(rows(2), [0.25, 0.5, 1.25, 1.5]);
        assert_eq!(rows(4), [1200.0, 1201.0, 1210.0, 1211.0, 4.25, 4.5]);
        assert_eq!(rows(6), [2200.0, 2201.0, 2210.0, 2211.0, 4.25, 4.5]);
    }

    #[test]
    fn samples_have_both_ends() {
        assert_eq!(sample(5, 16), [0, 1, 2, 3, 4]);
        assert_eq!(sample(64, 8), [0, 9, 18, 27, 36, 45, 54, 63]);
        assert_eq!(sample(64, 2), [0, 63]);
    }

    #[test]
    fn names_are_told_apart() {
        for (i, row) in TABLE.iter().enumerate() {
            assert!(TABLE[..i].iter().all(|r| r.name != row.name) && row.name.len() <= 11, "{}", row.name);
        }
    }
}
