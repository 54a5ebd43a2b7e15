/*!
Stages judged together, where a Trace does not hold what stands between them.

A tensor that was not captured is computed from what was, by the reference under the contract, and rounded as an honest
engine would store it. An honest engine's own may differ: with C the bound of its value before rounding (the stage's own,
grown by what its inputs may do, `grow`), the stored value lies between round(x − C) and round(x + C), so it is off by
at most `E = max |round(x ± C) − round(x)|`: 0 where no tie is near. [`Slack`] keeps E beside each such tensor, and S,
the standard deviation that is usual: `S² = p·ulp² + σ²` for flips of probability p, with σ the noise before rounding
(its own and inherited; σ² alone only where it is no smaller than half an ulp), never above E.

A stage with such inputs is judged by bits and grown bounds. Its flips are not tested, since the honest share is not
known, and P's cast is noise, since it can't be predicted (`softmax.emulate` off); directions are tested by the coarse
score with the spread of the rows, above a floor that holds what S may do. Where no element of any input may differ,
nothing is lost and the stage is judged as any other.
*/

mod attention;
mod grow;

pub(super) use grow::times;
pub use grow::{Grown, grown};

use super::bound::bound;
use super::compare::Isolated;
use super::stats::noise;
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::elementwise::step;
use mla_reference::{Chunk, Contract, Form, Stage, Terms};
use ndarray::{Array2, ArrayView2, s};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// How far an honest engine's stored values may be from those computed here, `[rows, columns]` of the stage's matrix.
pub struct Slack {
    /// E: at most.
    most: Array2<f32>,
    /// S: standard deviation.
    usual: Array2<f32>,
}

impl Slack {
    /// From E and S.
    pub fn new(most: &Array2<f64>, usual: &Array2<f64>) -> Slack {
        Slack { most: most.mapv(up), usual: usual.mapv(up) }
    }

    fn zeros(dim: (usize, usize)) -> Slack {
        Slack { most: Array2::zeros(dim), usual: Array2::zeros(dim) }
    }

    /// Whether any element may differ.
    fn loose(&self) -> bool {
        self.most.iter().any(|e| *e != 0.0)
    }
}

/// E and S of some elements in float64.
pub struct Errors {
    /// E.
    pub most: Array2<f64>,
    /// S.
    pub usual: Array2<f64>,
}

impl Errors {
    /// None.
    pub fn zeros(dim: (usize, usize)) -> Errors {
        Errors { most: Array2::zeros(dim), usual: Array2::zeros(dim) }
    }

    /// Whether there are any.
    pub fn any(&self) -> bool {
        self.most.iter().any(|e| *e != 0.0)
    }
}

/// What was computed because it was not captured.
#[derive(Default)]
pub struct Chain {
    slacks: HashMap<TensorId, Slack>,
    /// Everything not captured between a tensor and what it was computed from, itself included.
    behind: HashMap<TensorId, Vec<Stage>>,
}

impl Chain {
    /// Keeps a tensor's errors; `behind`: what was not captured on its way.
    pub fn keep(&mut self, id: TensorId, slack: Slack, behind: Vec<Stage>) {
        self.slacks.insert(id, slack);
        self.behind.insert(id, behind);
    }

    /// What was not captured between a tensor and what it was computed from; None: it was not computed here.
    pub fn behind(&self, id: TensorId) -> Option<&[Stage]> {
        self.behind.get(&id).map(Vec::as_slice)
    }

    /// Drops the errors of tensors that are gone.
    pub fn release(&mut self, kept: impl Fn(TensorId) -> bool) {
        self.slacks.retain(|id, _| kept(*id));
    }

    /// As stages of a form read it.
    pub fn view(&self, form: Option<Form>) -> Slacks<'_> {
        Slacks { chain: Some(self), form }
    }
}

/// Errors of inputs as stages of a form read them.
#[derive(Clone, Copy, Default)]
pub struct Slacks<'a> {
    chain: Option<&'a Chain>,
    form: Option<Form>,
}

impl Slacks<'_> {
    fn get(&self, stage: Stage) -> Option<&Slack> {
        let id = self.form.map_or(TensorId::shared(stage), |form| TensorId::of(stage, form));
        self.chain?.slacks.get(&id)
    }

    /// Whether every tensor was captured.
    pub fn is_empty(&self) -> bool {
        self.chain.is_none_or(|c| c.slacks.is_empty())
    }

    /// Whether any element of these inputs may differ.
    pub fn loose(&self, inputs: &[Stage]) -> bool {
        inputs.iter().any(|s| self.get(*s).is_some_and(Slack::loose))
    }

    /// E and S of a block; None where the tensor was captured.
    pub fn block(&self, stage: Stage, rows: Range<usize>, cols: Range<usize>) -> Option<Errors> {
        let slack = self.get(stage)?;
        let part = |m: &Array2<f32>| m.slice(s![rows.clone(), cols.clone()]).mapv(f64::from);
        Some(Errors { most: part(&slack.most), usual: part(&slack.usual) })
    }

    /// E and S of some rows.
    pub fn rows(&self, stage: Stage, rows: &[usize], cols: Range<usize>) -> Option<Errors> {
        let slack = self.get(stage)?;
        let part = |m: &Array2<f32>| {
            let at = |(i, j): (usize, usize)| f64::from(m[[rows[i], cols.start + j]]);
            Array2::from_shape_fn((rows.len(), cols.len()), at)
        };
        Some(Errors { most: part(&slack.most), usual: part(&slack.usual) })
    }
}

/// The contract under which a stage with such inputs is compared: nothing is known of P's cast.
pub fn loosened(contract: &Contract) -> Contract {
    let mut c = *contract;
    c.softmax.emulate = false;
    c
}

/// Computes a tensor as an honest engine would store it, with its errors. None where the reference can't compute all
/// of it (a weight is not there).
pub fn compute(of: &Isolated, id: TensorId) -> Option<(Tensor, Slack)> {
    let dtype = of.contract.stored(id.stage);
    let tensor = Tensor::zeros(id, &of.case.plan, &of.spec.geometry, dtype);
    let (dim, wanted) = ((tensor.rows, tensor.cols), tensor.len());
    let made = Mutex::new((tensor, Slack::zeros(dim), 0usize));
    of.evaluate(id, &|c: Chunk| {
        let (most, usual) = errors(of, id, &c, dtype);
        let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
        for (i, x) in c.x.rows().into_iter().enumerate() {
            made.0.write(c.rows.start + i, c.cols.start, &x.to_vec());
        }
        let at = s![c.rows.clone(), c.cols.clone()];
        made.1.most.slice_mut(at).assign(&most);
        made.1.usual.slice_mut(at).assign(&usual);
        made.2 += c.x.len();
    });
    let (tensor, slack, written) = made.into_inner().unwrap_or_else(PoisonError::into_inner);
    (written == wanted).then_some((tensor, slack))
}

/// E and S of a chunk after it is stored.
fn errors(of: &Isolated, id: TensorId, c: &Chunk, dtype: DType) -> (Array2<f32>, Array2<f32>) {
    let grown = grown(of, id, c);
    if grown.is_none() && matches!(c.terms, Terms::Copy) {
        return (Array2::zeros(c.x.dim()), Array2::zeros(c.x.dim()));
    }
    let own = noise::of(of.contract, &c.terms, c.x.view(), dtype).sigma;
    let (most, inherited) = match grown {
        Some(g) => (g.most, Some(g.usual)),
        None => (bound(of.contract, &c.terms, c.x.view(), of.spec.temperature.is_some()), None),
    };
    // A contract that accumulates exactly has neither bound nor noise.
    let at = |m: &Array2<f64>, i: usize, j: usize| m.get([i, j]).copied().unwrap_or(0.0);
    let (mut e, mut s) = (Array2::zeros(c.x.dim()), Array2::zeros(c.x.dim()));
    for ((i, j), x) in c.x.indexed_iter() {
        let moved = stored_error(dtype, *x, at(&most, i, j));
        let sigma = at(&own, i, j).hypot(inherited.as_ref().map_or(0.0, |m| m[[i, j]]));
        (e[[i, j]], s[[i, j]]) = (up(moved), up(usual(dtype, *x, sigma).min(moved)));
    }
    (e, s)
}

/// E of a value x whose error before rounding is at most `by`.
fn stored_error(dtype: DType, x: f64, by: f64) -> f64 {
    if x.is_nan() || by == 0.0 {
        return 0.0;
    }
    let (low, high) = (dtype.round(x - by), dtype.round(x + by));
    if low == high {
        return 0.0;
    }
    let moved = step(dtype, x, by);
    if moved.is_nan() { f64::INFINITY } else { moved }
}

/// S of a value x whose noise before rounding is σ: the average over where x lies between two values, or a normal tail
/// where it lies near a tie, whichever is more.
fn usual(dtype: DType, x: f64, sigma: f64) -> f64 {
    if !x.is_finite() || sigma <= 0.0 {
        return 0.0;
    }
    let ulp = dtype.spacing(x);
    let p = (0.8 * sigma / ulp).max(noise::flip_probability(dtype, x, sigma)).min(1.0);
    let smooth = if sigma >= ulp / 2.0 { sigma * sigma } else { 0.0 };
    (p * ulp * ulp + smooth).sqrt()
}

/// As float32, never less.
fn up(v: f64) -> f32 {
    let near = v as f32;
    if f64::from(near) < v { near.next_up() } else { near }
}

/// |m|.
fn sizes(m: ArrayView2<f64>) -> Array2<f64> {
    m.mapv(f64::abs)
}

/// m².
fn squares(m: ArrayView2<f64>) -> Array2<f64> {
    m.mapv(|v| v * v)
}
