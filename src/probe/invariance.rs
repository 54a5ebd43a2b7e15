/*!
Two changes that must not change a bit: pages laid out another way, and a power of two moved from scale to q.

**Pages.** Every tensor but `cache` keeps its bits, and the rows of `cache` move with their slots.

**Powers of two.** The weight that makes q is multiplied by 2², the softmax scale by 2⁻². In binary floating point
both are exact, so q_raw, q and q_latent are 4 times what they were, scores in front of the scale too, and whatever
comes after the scale has the same bits. The exception are values below the smallest normal one of their dtype (in
f16: 6e-5): there a value is rounded coarser than 4 times the value is. A (token, head) that has one among its
queries, or one that would leave the range, is left out.
*/

use super::place::{Count, place};
use super::run::{Change, Kept, Runner, Scaled, unchanged};
use super::{Outcome, outcome};
use crate::case::Case;
use crate::engine::EngineError;
use crate::trace::Tensor;
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Form, Stage, Weight, Weights};
use std::collections::HashSet;

/// Factor on q; its inverse is the factor on the scale.
const FACTOR: f64 = 4.0;

/// Relabels the pages.
pub fn pages(runner: &Runner, base: &Kept, case: &Case, form: Form) -> Result<Outcome, EngineError> {
    let moved = super::case::mirrored(case);
    let other = match runner.run(&moved, form, &unchanged)? {
        Ok(other) => other,
        Err(why) => return Ok(Outcome::NotApplicable { why }),
    };
    let mut count = Count::default();
    for stage in base.stages() {
        let (Some(a), Some(b)) = (base.get(stage), other.get(stage)) else { continue };
        if stage == Stage::Cache {
            let from = case.plan.sequences.iter().flat_map(|s| &s.slots);
            let to = moved.plan.sequences.iter().flat_map(|s| &s.slots);
            for (&x, &y) in from.zip(to) {
                count.add(rows_equal(case, form, stage, (a, x), (b, y)));
            }
        } else {
            (0..a.rows).for_each(|r| count.add(rows_equal(case, form, stage, (a, r), (b, r))));
        }
    }
    let held = format!("{} pages in another order", case.plan.pages);
    Ok(outcome(count, held, "bits depend on where pages lie"))
}

/// Two rows, bit for bit.
fn rows_equal(case: &Case, form: Form, stage: Stage, a: (&Tensor, usize), b: (&Tensor, usize)) -> Count {
    let mut count = Count::default();
    for c in 0..a.0.cols {
        count.check(a.0.bits(a.1, c) == b.0.bits(b.1, c), || place(case, form, stage, a.0, a.1, c));
    }
    count
}

/// Moves a power of two from the scale to q.
pub fn powers(runner: &Runner, base: &Kept, case: &Case, form: Form) -> Result<Outcome, EngineError> {
    let g = &runner.layer.spec.geometry;
    let dtype = runner.engine.contract().weights;
    let which = if g.q_rank > 0 { Weight::WQB } else { Weight::WQ };
    let Some(w) = runner.layer.weights.matrix(which) else {
        return Ok(Outcome::NotApplicable { why: format!("the layer has no {which}") });
    };
    if !stays_finite(w, dtype) {
        let why = format!("{which} times {FACTOR} leaves the range of {dtype}");
        return Ok(Outcome::NotApplicable { why });
    }
    fn scaled(w: &dyn Weights, which: Weight, dtype: DType) -> Change<'_> {
        let matrix = w.matrix(which).map(|m| (which, Box::new(Scaled::new(m, dtype, FACTOR)) as Box<dyn Rows>));
        Change { weights: matrix.into_iter().collect(), scale: Some(1.0 / FACTOR) }
    }
    let other = match runner.run(case, form, &|w| scaled(w, which, dtype))? {
        Ok(other) => other,
        Err(why) => return Ok(Outcome::NotApplicable { why }),
    };
    let inexact = inexact(base, g.heads);
    let mut count = Count::default();
    for stage in base.stages() {
        let (Some(a), Some(b)) = (base.get(stage), other.get(stage)) else { continue };
        let factor = if is_query(stage) { FACTOR } else { 1.0 };
        let token = tokens(case, stage);
        for row in 0..a.rows {
            for col in 0..a.cols {
                let head = col / (a.cols / g.heads).max(1);
                if token.get(row).is_some_and(|t| inexact.contains(&(*t, head))) {
                    continue;
                }
                let holds = if factor == 1.0 {
                    a.bits(row, col) == b.bits(row, col)
                } else {
                    let (x, y) = (a.get(row, col), b.get(row, col));
                    y == x * factor || x.is_nan() && y.is_nan()
                };
                count.check(holds, || place(case, form, stage, a, row, col));
            }
        }
    }
    let left_out = match inexact.len() {
        0 => String::new(),
        n => format!(", {n} (token, head) pairs with subnormal queries left out"),
    };
    let held = format!("q times {FACTOR}, scale times {}{left_out}", 1.0 / FACTOR);
    Ok(outcome(count, held, "q times a power of two is not undone by the scale"))
}

fn is_query(stage: Stage) -> bool {
    matches!(stage, Stage::QRaw | Stage::Q | Stage::QLatent)
}

/// Token of each row of what follows from a query; empty for what does not.
fn tokens(case: &Case, stage: Stage) -> Vec<usize> {
    let plan = &case.plan;
    match stage {
        Stage::QRaw | Stage::Q | Stage::QLatent => (0..plan.tokens()).collect(),
        Stage::PartO | Stage::PartLse | Stage::OLatent | Stage::Lse | Stage::AttnOut => {
            let token = |n: &mla_reference::RowName| {
                n.sequence.and_then(|s| plan.sequences.get(s)).map_or(0, |s| s.tokens.start + n.index)
            };
            plan.names(stage).iter().map(token).collect()
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
                if x != 0.0 && x < least || x * FACTOR > t.dtype.largest() {
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
