/*!
Two changes that must not change a bit: pages laid out another way, and a power of two moved from scale to q.

**Pages.** Every tensor but `cache` keeps its bits, and the rows of `cache` move with their slots.

**Powers of two.** The weight that makes q is multiplied by 2², the softmax scale by 2⁻². In binary floating point
both are exact, so q_raw, q and q_latent are 4 times what they were, scores in front of the scale too, and whatever
comes after the scale has the same bits. The exception are values below the smallest normal one of their dtype (in
f16: 6e-5): there a value is rounded coarser than 4 times the value is, down to zero. A (token, head) that has one among
its queries, or one that would leave the range, is left out.
*/

use super::place::{Count, place};
use super::run::{Change, Kept, Runner, Scaled, unchanged};
use super::{Outcome, outcome};
use crate::case::Case;
use crate::engine::EngineError;
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Form, Stage, Weight, Weights};
use std::collections::HashSet;

/// Factor on q; its inverse is the factor on the scale.
const FACTOR: f64 = 4.0;

/// Relabels the pages and moves a power of two from the scale to q: the outcomes of pages and of powers.
///
/// One run does both; only where it differs are two runs made, to tell which change it was.
pub fn pages_and_powers(
    runner: &Runner,
    base: &Kept,
    case: &Case,
    form: Form,
) -> Result<(Outcome, Outcome), EngineError> {
    let moved = super::case::mirrored(case);
    let pages = format!("{} pages in another order", case.plan.pages);
    let alone = |cases: &Case, factor: f64, held: String, broken: &str| {
        Ok::<_, EngineError>(match runner.run(cases, form, &|w| scaled(runner, w, factor))? {
            Ok(other) => outcome(compare(base, &other, case, cases, form, factor), held, broken),
            Err(why) => Outcome::NotApplicable { why },
        })
    };
    let only_pages = || alone(&moved, 1.0, pages.clone(), "bits depend on where pages lie");
    if let Some(why) = impossible(runner) {
        return Ok((only_pages()?, Outcome::NotApplicable { why }));
    }
    let left_out = match inexact(base, runner.layer.spec.geometry.heads).len() {
        0 => String::new(),
        n => format!(", {n} (token, head) pairs with subnormal queries left out"),
    };
    let powers = format!("q times {FACTOR}, scale times {}{left_out}", 1.0 / FACTOR);
    let both = runner.run(&moved, form, &|w| scaled(runner, w, FACTOR))?;
    if let Ok(other) = &both {
        let count = compare(base, other, case, &moved, form, FACTOR);
        if count.broken == 0 {
            return Ok((outcome(count.clone(), pages, ""), outcome(count, powers, "")));
        }
    }
    let only_powers = alone(case, FACTOR, powers, "q times a power of two is not undone by the scale")?;
    Ok((only_pages()?, only_powers))
}

/// The weight that makes q.
fn query_weight(runner: &Runner) -> Weight {
    if runner.layer.spec.geometry.q_rank > 0 { Weight::WQB } else { Weight::WQ }
}

fn scaled<'w>(runner: &Runner, weights: &'w dyn Weights, factor: f64) -> Change<'w> {
    if factor == 1.0 {
        return unchanged(weights);
    }
    let (which, dtype) = (query_weight(runner), runner.engine.contract().weights);
    let matrix = weights.matrix(which).map(|m| Box::new(Scaled::new(m, dtype, factor)) as Box<dyn Rows>);
    Change { weights: matrix.map(|m| (which, m)).into_iter().collect(), scale: Some(1.0 / factor) }
}

/// Why the weight can't be scaled.
fn impossible(runner: &Runner) -> Option<String> {
    let (which, dtype) = (query_weight(runner), runner.engine.contract().weights);
    match runner.layer.weights.matrix(which) {
        None => Some(format!("the layer has no {which}")),
        Some(w) if !stays_finite(w, dtype) => {
            Some(format!("{which} times {FACTOR} leaves the range of {dtype}"))
        }
        Some(_) => None,
    }
}

/// Every tensor against the base run's: queries times the factor, all else bit for bit, cache rows by slot.
fn compare(base: &Kept, other: &Kept, case: &Case, moved: &Case, form: Form, factor: f64) -> Count {
    let heads = base.get(Stage::Q).map_or(1, |q| q.shape[1]);
    let inexact = if factor == 1.0 { HashSet::new() } else { inexact(base, heads) };
    let mut count = Count::default();
    for stage in base.stages() {
        let (Some(a), Some(b)) = (base.get(stage), other.get(stage)) else { continue };
        let factor = if is_query(stage) { factor } else { 1.0 };
        let token = tokens(case, Some(form), stage);
        for (row, other_row) in rows(case, moved, stage, a.rows) {
            for col in 0..a.cols {
                let head = col / (a.cols / heads).max(1);
                if token.get(row).is_some_and(|t| inexact.contains(&(*t, head))) {
                    continue;
                }
                let (x, y) = (a.get(row, col), b.get(other_row, col));
                // NaN on both sides agrees and says nothing.
                if x.is_nan() && y.is_nan() {
                    continue;
                }
                let same = a.bits(row, col) == b.bits(other_row, col);
                let holds = if factor == 1.0 { same } else { y == x * factor };
                count.check(holds, || place(case, form, stage, a, row, col));
            }
        }
    }
    count
}

/// Rows that must be the same: of the cache those that somebody owns, by slot.
fn rows(case: &Case, moved: &Case, stage: Stage, rows: usize) -> Vec<(usize, usize)> {
    let slots = |c: &Case| c.plan.sequences.iter().flat_map(|s| s.slots.clone()).collect::<Vec<_>>();
    match stage {
        Stage::Cache => slots(case).into_iter().zip(slots(moved)).collect(),
        _ => (0..rows).map(|r| (r, r)).collect(),
    }
}

fn is_query(stage: Stage) -> bool {
    matches!(stage, Stage::QRaw | Stage::Q | Stage::QLatent)
}

/// Token of each row of what follows from a query; empty for what does not.
fn tokens(case: &Case, form: Option<Form>, stage: Stage) -> Vec<usize> {
    let plan = &case.plan;
    match stage {
        Stage::QRaw | Stage::Q | Stage::QLatent => (0..plan.tokens()).collect(),
        Stage::PartO | Stage::PartLse | Stage::OLatent | Stage::Lse | Stage::AttnOut => {
            let token = |n: &mla_reference::RowName| {
                n.sequence.and_then(|s| plan.sequences.get(s)).map_or(0, |s| s.tokens.start + n.index)
            };
            plan.names(stage, form).iter().map(token).collect()
        }
        _ => Vec::new(),
    }
}

/// Queries, (token, head), with a value whose multiple is rounded otherwise than it.
fn inexact(base: &Kept, heads: usize) -> HashSet<(usize, usize)> {
    let mut all = HashSet::new();
    for t in base.stages().filter(|s| is_query(*s)).filter_map(|s| base.get(s)) {
        let least = f64::powi(2.0, t.dtype.min_exponent());
        for row in 0..t.rows {
            for col in 0..t.cols {
                let x = t.get(row, col).abs();
                // At the smallest normal value too: it may have been rounded up from below, and so may a zero.
                if x <= least || x * FACTOR > t.dtype.largest() {
                    all.insert((row, col / (t.cols / heads).max(1)));
                }
            }
        }
    }
    all
}

/// Whether every finite value stays finite times the factor. Only f16 has so small a range that it must be looked at.
fn stays_finite(w: &dyn Rows, dtype: DType) -> bool {
    if dtype != DType::F16 {
        return true;
    }
    let mut row = vec![0.0; w.cols()];
    (0..w.rows()).all(|r| {
        w.decode(r, 0, &mut row);
        row.iter().all(|v| !v.is_finite() || v.abs() * FACTOR < dtype.largest())
    })
}
