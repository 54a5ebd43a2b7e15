/*!
A latent with a single value that is not zero reads a column of a weight: sums of one product and zeros are exact in any
order, so what comes out is weight times value, rounded once. Order and layout show without any tolerance.

Two ways lead there. The base case has context rows with a single 1 among their latents: in the fused form their
`k` and `v` are columns of w_uk and w_uv. And a run of its own, whose hidden states are one-hot and whose projections
in front of the cache and of q are replaced by selections (ones in chosen places): each token's `kv_c_normed` is one-hot
at a chosen latent and its `q` at a chosen nope column, the same in every head. It sees one key, so that in the
absorbed form `q_latent` is a column of w_uk and `attn_out` one of w_uv, and in the fused form `k`, `v` and, through
attention, `attn_out`.
*/

use super::case::Common;
use super::one_key::{Kernel, singles};
use super::place::{Count, place};
use super::run::{Change, Kept, Runner, selection};
use super::{Outcome, outcome};
use crate::case::Case;
use crate::engine::EngineError;
use crate::model::Grid;
use crate::trace::Tensor;
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Form, Geometry, Stage, Weight, Weights};

/// What is chosen for each token of the run.
struct Chosen {
    hidden: Vec<usize>,
    q_rank: Vec<usize>,
    latent: Vec<usize>,
    nope: Vec<usize>,
}

/// A one-hot value in a row: where it must be, and what it turned out to be.
#[derive(Clone, Copy)]
struct Hot {
    at: usize,
    value: f64,
}

/// Reads columns back.
pub fn probe(
    runner: &Runner,
    base: &Kept,
    case: &Case,
    form: Form,
    common: &Common,
    latents: &[usize],
) -> Result<Outcome, EngineError> {
    let g = runner.layer.spec.geometry;
    let contract = runner.engine.contract();
    let grid = Grid::new(runner.layer.weights, contract.weights, &[Weight::WUk, Weight::WUv]);
    let (Some(w_uk), Some(w_uv)) = (grid.matrix(Weight::WUk), grid.matrix(Weight::WUv)) else {
        return Ok(Outcome::NotApplicable { why: "the layer has no w_uk or w_uv".into() });
    };
    let mut count = Count::default();
    if let (Form::Fused, Some(k), Some(v)) = (form, base.get(Stage::K), base.get(Stage::V)) {
        let first = case.plan.key_rows().nth(2).map_or(0, |(_, _, r)| r.start);
        let at: Vec<(usize, Hot)> =
            latents.iter().enumerate().map(|(p, l)| (first + p, Hot { at: *l, value: 1.0 })).collect();
        count.add(keys(case, form, k, w_uk, &g, &at));
        let shape = (g.heads, g.value);
        let exact = |_: usize, _: f64| 0.0;
        count.add(values(case, form, (Stage::V, v), w_uv, shape, &|_| at.clone(), &exact));
    }
    let n = latents.len().min(g.hidden).min(g.nope).min(if g.q_rank > 0 { g.q_rank } else { usize::MAX });
    let loud = |weight: Weight, what: u64| loudest(runner.layer.weights.norm(weight), common, n, what);
    let chosen = Chosen {
        hidden: loud(Weight::GAttn, 1),
        q_rank: if g.q_rank > 0 { loud(Weight::GQ, 2) } else { Vec::new() },
        latent: latents[..n].to_vec(),
        nope: common.indices(g.nope, n, 3),
    };
    let own = common.one_hot(&chosen.hidden);
    let kept = match runner.run(&own, form, &|_| chosen.change(&g))? {
        Ok(kept) => kept,
        Err(why) => return Ok(Outcome::NotApplicable { why }),
    };
    let (Some(latent), Some(q), Some(out)) =
        (kept.get(Stage::KvCNormed), kept.get(Stage::Q), kept.get(Stage::AttnOut))
    else {
        return Ok(Outcome::NotApplicable { why: "a tensor is missing".into() });
    };
    // What the run was made for; then what it reads.
    let mut hot = Vec::new();
    for (t, l) in chosen.latent.iter().enumerate() {
        hot.push(one_hot(&mut count, &own, form, (Stage::KvCNormed, latent), t, 0..g.latent, *l));
    }
    let mut queries = Vec::new();
    for (t, i) in chosen.nope.iter().enumerate() {
        for h in 0..g.heads {
            let cols = h * g.key()..(h + 1) * g.key();
            queries.push(one_hot(&mut count, &own, form, (Stage::Q, q), t, cols, *i));
        }
    }
    let singles = singles(&own.plan);
    let rows = |of: fn(&super::one_key::Single) -> usize| -> Vec<(usize, Hot)> {
        singles.iter().map(of).zip(hot.iter().copied()).collect()
    };
    let shape = (g.heads, g.value);
    if form == Form::Fused {
        let (Some(k), Some(v)) = (kept.get(Stage::K), kept.get(Stage::V)) else {
            return Ok(Outcome::NotApplicable { why: "a tensor is missing".into() });
        };
        let at = rows(|s| s.key);
        count.add(keys(&own, form, k, w_uk, &g, &at));
        count.add(values(&own, form, (Stage::V, v), w_uv, shape, &|_| at.clone(), &|_, _| 0.0));
        // Through attention: 1·v/1, or as near as float32 leaves it (one_key).
        let at = rows(|s| s.row);
        let near = |i: usize, x: f64| {
            let p = score(&kept, &g, runner.layer.spec.scale, singles[i].token, singles[i].key);
            Kernel { contract: &contract, p, split: singles[i].split }.of_value(x)
        };
        count.add(values(&own, form, (Stage::AttnOut, out), w_uv, shape, &|_| at.clone(), &near));
    } else {
        let (Some(lifted), Some(o)) = (kept.get(Stage::QLatent), kept.get(Stage::OLatent)) else {
            return Ok(Outcome::NotApplicable { why: "a tensor is missing".into() });
        };
        count.add(lifts(&own, form, lifted, w_uk, &g, &queries));
        let mut by_head = vec![Vec::new(); g.heads];
        for (s, l) in singles.iter().zip(&chosen.latent) {
            for (h, at) in by_head.iter_mut().enumerate() {
                let cols = h * g.latent..(h + 1) * g.latent;
                at.push((s.row, one_hot(&mut count, &own, form, (Stage::OLatent, o), s.row, cols, *l)));
            }
        }
        count.add(values(
            &own,
            form,
            (Stage::AttnOut, out),
            w_uv,
            shape,
            &|h| by_head[h].clone(),
            &|_, _| 0.0,
        ));
    }
    let read = hot.iter().filter(|h| h.value != 0.0).count();
    let what = format!("{read} of {} latents read w_uv, {} nope columns w_uk", g.latent, chosen.nope.len());
    let what = if form == Form::Fused {
        format!("{} of {} latents read w_uk and w_uv", read.max(latents.len()), g.latent)
    } else {
        what
    };
    Ok(outcome(count, what, "a one-hot row does not read the column that it should"))
}

impl Chosen {
    /// Selections in place of the projections in front of cache and q.
    fn change(&self, g: &Geometry) -> Change<'static> {
        let pick = |w: Weight, rows: &[usize], cols: &[usize]| {
            let ones = rows.iter().copied().zip(cols.iter().copied());
            (w, Box::new(selection(w.matrix(g), ones)) as Box<dyn Rows>)
        };
        let to_q = |w: Weight, cols: &[usize]| {
            let heads = (0..g.heads)
                .flat_map(|h| self.nope.iter().map(move |i| h * g.key() + i).zip(cols.iter().copied()));
            (w, Box::new(selection(w.matrix(g), heads)) as Box<dyn Rows>)
        };
        let mut weights = vec![pick(Weight::WKvA, &self.latent, &self.hidden)];
        if g.q_rank > 0 {
            weights.push(pick(Weight::WQA, &self.q_rank, &self.hidden));
            weights.push(to_q(Weight::WQB, &self.q_rank));
        } else {
            weights.push(to_q(Weight::WQ, &self.hidden));
        }
        Change { weights, scale: None }
    }
}

/// Distinct indices where a norm's weight is not zero, as far as there are any.
fn loudest(norm: Option<&[f64]>, common: &Common, count: usize, what: u64) -> Vec<usize> {
    let Some(norm) = norm else { return Vec::new() };
    let mut all = common.indices(norm.len(), (4 * count).min(norm.len()), what);
    all.sort_by_key(|i| norm[*i] == 0.0);
    all.truncate(count);
    all
}

/// A row must be zero but at one place; returns what is there.
fn one_hot(
    count: &mut Count,
    case: &Case,
    form: Form,
    (stage, t): (Stage, &Tensor),
    row: usize,
    cols: std::ops::Range<usize>,
    at: usize,
) -> Hot {
    for c in cols.clone().filter(|c| *c != cols.start + at) {
        count.check(t.get(row, c) == 0.0, || place(case, form, stage, t, row, c));
    }
    Hot { at, value: t.get(row, cols.start + at) }
}

/// Weight times value as a kernel computes and stores it: one product in float32, one rounding to the stored dtype.
fn read(dtype: DType, weight: f64, value: f64) -> f64 {
    dtype.round(DType::F32.round(weight * value))
}

fn same(t: &Tensor, row: usize, col: usize, want: f64) -> bool {
    // Zeros of either sign are equal: the sum of a negative zero and zeros is a positive one.
    !want.is_finite() || t.get(row, col) == want
}

/// The nope columns of rows of k are rows of w_uk.
fn keys(case: &Case, form: Form, k: &Tensor, w: &dyn Rows, g: &Geometry, rows: &[(usize, Hot)]) -> Count {
    let mut count = Count::default();
    let mut line = vec![0.0; g.nope];
    for &(row, hot) in rows {
        for h in 0..g.heads {
            w.decode(h * g.latent + hot.at, 0, &mut line);
            for (i, w) in line.iter().enumerate() {
                let col = h * g.key() + i;
                let want = read(k.dtype, *w, hot.value);
                count.check(same(k, row, col, want), || place(case, form, Stage::K, k, row, col));
            }
        }
    }
    count
}

/// Rows of a tensor of values are columns of w_uv. `rows(h)`: row and hot latent of each, by head; `near`: how far the
/// value before the final rounding may be off.
fn values(
    case: &Case,
    form: Form,
    (stage, t): (Stage, &Tensor),
    w: &dyn Rows,
    (heads, width): (usize, usize),
    rows: &dyn Fn(usize) -> Vec<(usize, Hot)>,
    near: &dyn Fn(usize, f64) -> f64,
) -> Count {
    let mut count = Count::default();
    let mut line = vec![0.0; w.cols()];
    for h in 0..heads {
        let rows = rows(h);
        for j in 0..width {
            let col = h * width + j;
            w.decode(col, 0, &mut line);
            for (i, &(row, hot)) in rows.iter().enumerate() {
                let want = read(t.dtype, line[hot.at], hot.value);
                let b = near(i, want);
                let holds = if b == 0.0 {
                    same(t, row, col, want)
                } else {
                    let o = t.get(row, col);
                    !want.is_finite() || t.dtype.round(want - b) <= o && o <= t.dtype.round(want + b)
                };
                count.check(holds, || place(case, form, stage, t, row, col));
            }
        }
    }
    count
}

/// Rows of q_latent are columns of w_uk. `queries`: hot nope column of each (token, head).
fn lifts(case: &Case, form: Form, t: &Tensor, w: &dyn Rows, g: &Geometry, queries: &[Hot]) -> Count {
    let mut count = Count::default();
    let mut line = vec![0.0; g.nope];
    for h in 0..g.heads {
        for l in 0..g.latent {
            w.decode(h * g.latent + l, 0, &mut line);
            for row in 0..t.rows {
                let hot = queries[row * g.heads + h];
                let (col, want) = (h * g.latent + l, read(t.dtype, line[hot.at], hot.value));
                count.check(same(t, row, col, want), || place(case, form, Stage::QLatent, t, row, col));
            }
        }
    }
    count
}

/// Largest |p − 1| over the heads of a token that sees one key, as in `one_key`.
fn score(kept: &Kept, g: &Geometry, scale: f64, token: usize, key: usize) -> f64 {
    let (Some(q), Some(k)) = (kept.get(Stage::Q), kept.get(Stage::K)) else { return 0.0 };
    let largest = (0..g.heads)
        .map(|h| {
            let cols = h * g.key()..(h + 1) * g.key();
            let (a, b) = (q.block(token..token + 1, cols.clone()), k.block(key..key + 1, cols));
            (a.row(0).dot(&b.row(0)) * scale).abs()
        })
        .fold(0.0, f64::max);
    super::one_key::p_error(largest)
}
