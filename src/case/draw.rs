/*!
Drawing the inputs of a case from a seed.

- **Hidden states**: standard normal rows; every eighth row has rms 1e-5 instead, so that the norm before
  attention and, through it, the latents shrink and eps is visible. `--hidden` replaces them.
- **Context rows** are drawn at cache level: a latent row is γ_kv ⊙ z with z of mean square 1 (what the
  norm leaves), a rope row has the size that k_pe has for this layer's own tokens, rotated by position.
- **Peaked** rows: for the last token of a request with context, in every fourth head, one context row
  is turned towards γ_kv ⊙ q_latent of that head, just far enough that its probability passes 0.5.

Every value is a function of (seed, what, index) through a counter-based generator, so that requests can be
added or left out without changing the others, and thread counts change nothing.
*/

use super::pages::{lay_out, needed};
use super::{Batch, Case};
use mla_numeric::DType;
use mla_reference::elementwise::{pair, rope_table};
use mla_reference::product::{Dense, product};
use mla_reference::rows::dense;
use mla_reference::{
    Contract, Evaluator, Given, Plan, Regime, Route, Sequence, Source, Spec, Stage, Weight, Weights,
};
use ndarray::{Array2, ArrayView1, ArrayViewMut1, s};
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Mutex;

/// Pages of the pool that no request owns: reading or writing one is a fault.
const SPARE_PAGES: usize = 3;
/// Logit by which a peaked key stands above the log-sum of the others: p = e²/(1+e²) = 0.88.
const PEAK_MARGIN: f64 = 2.0;

/// How a case is drawn.
pub struct Draw<'a> {
    /// Requests.
    pub batch: Batch,
    /// Regimes.
    pub regimes: Vec<Regime>,
    /// Seed.
    pub seed: u64,
    /// Slots of a page.
    pub page_size: usize,
    /// Splits of the keys in decode.
    pub splits: usize,
    /// Which form serves which request, and chunks of context.
    pub route: Route,
    /// Dtype of activations.
    pub dtype: DType,
    /// Real hidden states, [token, hidden], instead of drawn ones; tokens in the order of the batch, however it is routed.
    pub hidden: Option<Array2<f64>>,
    /// The layer.
    pub spec: &'a Spec,
    /// Its weights.
    pub weights: &'a dyn Weights,
}

/// `--hidden` does not fit.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum HiddenError {
    #[error(
        "the hidden states have shape {found:?}, the batch needs [{tokens}, {hidden}]\n  where: --hidden\n  do: give one row a new token of the batch, or change --batch"
    )]
    Shape { found: (usize, usize), tokens: usize, hidden: usize },
    #[error(
        "the hidden state {value:e} is not finite in {dtype}\n  where: --hidden, row {row}, column {column}\n  do: look for what went wrong before this layer, or pass a --dtype that holds the value"
    )]
    NotFinite { value: f64, dtype: DType, row: usize, column: usize },
}

/// A generator of one stream of numbers: SplitMix64 over a counter.
#[derive(Clone)]
pub(crate) struct Stream(u64);

impl Stream {
    /// The stream of (seed, what, index).
    pub(crate) fn new(seed: u64, what: u64, index: u64) -> Stream {
        let mut s = Stream(seed ^ what.wrapping_mul(0xd6e8_feb8_6659_fd93));
        let mixed = s.next() ^ index.wrapping_mul(0xa076_1d64_78bd_642f);
        Stream(mixed)
    }
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Uniform in (0, 1).
    pub(crate) fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) * f64::powi(2.0, -53)
    }
    /// Standard normal (Box–Muller).
    pub(crate) fn normal(&mut self) -> f64 {
        let r = (-2.0 * libm::log(self.uniform())).sqrt();
        r * libm::cos(std::f64::consts::TAU * self.uniform())
    }
    /// Below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }
}

const HIDDEN: u64 = 1;
const PAGES: u64 = 2;
const LATENT: u64 = 3;
const ROPE: u64 = 4;

impl Draw<'_> {
    /// Draws the case.
    pub fn case(self) -> Result<Case, HiddenError> {
        let plan = self.plan();
        let g = self.spec.geometry;
        let hidden = match &self.hidden {
            Some(h) if h.dim() != (plan.tokens(), g.hidden) => {
                return Err(HiddenError::Shape { found: h.dim(), tokens: plan.tokens(), hidden: g.hidden });
            }
            Some(h) => h.clone(),
            None => self.draw_hidden(plan.tokens()),
        };
        if let Some(((row, column), &value)) =
            hidden.indexed_iter().find(|(_, v)| !self.dtype.round(**v).is_finite())
        {
            return Err(HiddenError::NotFinite { value, dtype: self.dtype, row, column });
        }
        let hidden = hidden.mapv(|v| self.dtype.round(v));
        // A request has the same inputs wherever it stands.
        let hidden = match self.route.threshold {
            None => hidden,
            Some(_) => hidden.select(ndarray::Axis(0), &self.batch.tokens(&plan.order())),
        };
        let mut given = Given { hidden, ..Given::default() };
        let own = Own::new(&self, &plan, &given);
        let mut notes = Vec::new();
        given.context = plan.sequences.par_iter().map(|s| self.context(s, &own)).collect();
        if self.regimes.contains(&Regime::Peaked) {
            notes.extend(own.peak(&self, &plan, &mut given.context));
        }
        given.context.par_iter_mut().for_each(|c| c.mapv_inplace(|v| self.dtype.round(v)));
        Ok(Case { batch: self.batch, regimes: self.regimes, plan, given, notes })
    }

    fn plan(&self) -> Plan {
        let (mut positions, mut token_request) = (Vec::new(), Vec::new());
        let mut ranges = vec![0..0; self.batch.0.len()];
        let order = self.batch.order(self.route.threshold);
        for (i, r) in order.iter().map(|i| (*i, &self.batch.0[*i])) {
            ranges[i] = positions.len()..positions.len() + r.new;
            positions.extend((r.context..r.total()).map(|p| p as u64));
            token_request.extend(std::iter::repeat_n(i, r.new));
        }
        let mut sequences: Vec<Sequence> = Vec::new();
        for (nth, &regime) in self.regimes.iter().enumerate() {
            for (i, r) in order.iter().map(|i| (*i, &self.batch.0[*i])) {
                // Without context the regimes do not differ.
                if nth > 0 && r.context == 0 {
                    continue;
                }
                sequences.push(Sequence {
                    request: i,
                    regime,
                    tokens: ranges[i].clone(),
                    context: r.context,
                    slots: Vec::new(),
                });
            }
        }
        let pages = needed(&sequences, self.page_size) + SPARE_PAGES;
        lay_out(&mut sequences, self.page_size, pages, Stream::new(self.seed, PAGES, 0));
        let (page_size, splits, route) = (self.page_size, self.splits, self.route);
        Plan { positions, token_request, sequences, page_size, pages, splits, route, ranks: 1 }
    }

    fn draw_hidden(&self, tokens: usize) -> Array2<f64> {
        let mut out = Array2::zeros((tokens, self.spec.geometry.hidden));
        for (t, mut row) in out.rows_mut().into_iter().enumerate() {
            let rms = if t % 8 == 3 { 1e-5 } else { 1.0 };
            let mut rng = Stream::new(self.seed, HIDDEN, t as u64);
            row.mapv_inplace(|_| rng.normal() * rms);
        }
        out
    }

    /// Context rows of a sequence before any peak.
    fn context(&self, seq: &Sequence, own: &Own) -> Array2<f64> {
        let g = &self.spec.geometry;
        let mut out = Array2::zeros((seq.context, g.cache()));
        let positions: Vec<u64> = (0..seq.context as u64).collect();
        let (cos, sin) = rope_table(&self.spec.rope, &positions, DType::F64);
        let fill = |(p, mut row): (usize, ArrayViewMut1<f64>)| {
            let index = ((seq.request as u64) << 40 | (seq.regime as u64) << 39) + p as u64;
            let mut rng = Stream::new(self.seed, LATENT, index);
            let z: Vec<f64> = (0..g.latent).map(|_| rng.normal()).collect();
            let rms = (z.iter().map(|v| v * v).sum::<f64>() / g.latent as f64).sqrt();
            for (l, z) in z.iter().enumerate() {
                row[l] = own.gamma[l] * z / rms;
            }
            let mut rng = Stream::new(self.seed, ROPE, index);
            let raw: Vec<f64> = (0..g.rope).map(|_| rng.normal() * own.k_pe_rms).collect();
            for j in 0..g.rope / 2 {
                let (a, b) = pair(self.spec.rope.pairing, j, g.rope);
                row[g.latent + a] = raw[a] * cos[[p, j]] - raw[b] * sin[[p, j]];
                row[g.latent + b] = raw[b] * cos[[p, j]] + raw[a] * sin[[p, j]];
            }
        };
        let mut rows: Vec<ArrayViewMut1<f64>> = out.rows_mut().into_iter().collect();
        rows.par_drain(..).enumerate().for_each(fill);
        out
    }
}

/// What this layer makes of the drawn tokens, as far as drawing needs it.
struct Own {
    gamma: Vec<f64>,
    k_pe_rms: f64,
    /// q of the last token of each request, [request, heads · (nope + rope)].
    q: Array2<f64>,
}

/// Stage outputs kept in float64 while drawing.
#[derive(Default)]
pub(super) struct Kept(Mutex<HashMap<Stage, Array2<f64>>>);

impl Kept {
    /// The stages from the hidden states up to this one, in float64.
    pub(super) fn up_to(
        last: Stage,
        (spec, weights): (&Spec, &dyn Weights),
        plan: &Plan,
        given: &Given,
    ) -> Kept {
        let (kept, contract, g) = (Kept::default(), Contract::exact(), &spec.geometry);
        let e = Evaluator {
            spec,
            plan,
            given,
            weights,
            contract: &contract,
            source: &kept,
            wanted: None,
            departure: None,
            memory: None,
        };
        for stage in Stage::ALL.iter().copied().filter(|s| *s <= last && s.exists(g)) {
            let width = plan.shape(stage, None, g).iter().skip(1).product();
            let out = Mutex::new(Array2::zeros((plan.tokens(), width)));
            e.evaluate(stage, None, &|c| {
                let mut out = out.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                out.slice_mut(s![c.rows, c.cols]).assign(&c.x);
            });
            let out = out.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
            kept.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(stage, out);
        }
        kept
    }
}

impl Source for Kept {
    fn block(&self, stage: Stage, rows: Range<usize>, cols: Range<usize>) -> Array2<f64> {
        let kept = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        kept.get(&stage).map(|a| a.slice(s![rows, cols]).to_owned()).unwrap_or_default()
    }
}

impl Own {
    /// Runs the projections on the last token of each request.
    fn new(draw: &Draw, plan: &Plan, given: &Given) -> Own {
        let g = draw.spec.geometry;
        let last: Vec<usize> = (0..draw.batch.0.len())
            .map(|r| plan.token_request.iter().rposition(|x| *x == r).unwrap_or(0))
            .collect();
        let few = Plan {
            positions: last.iter().map(|t| plan.positions[*t]).collect(),
            token_request: (0..last.len()).collect(),
            sequences: Vec::new(),
            ..plan.clone()
        };
        let hidden = given.hidden.select(ndarray::Axis(0), &last);
        let few_given = Given { hidden, ..Given::default() };
        let kept = Kept::up_to(Stage::KPe, (draw.spec, draw.weights), &few, &few_given);
        let k_pe = kept.block(Stage::KPe, 0..last.len(), 0..g.rope);
        // A row drawn with a tiny hidden state says nothing about usual sizes: take the largest row.
        let rms = |r: ArrayView1<f64>| (r.iter().map(|v| v * v).sum::<f64>() / r.len() as f64).sqrt();
        let k_pe_rms = k_pe.rows().into_iter().map(rms).fold(0.0, f64::max);
        Own {
            gamma: draw.weights.norm(Weight::GKv).map_or_else(|| vec![1.0; g.latent], <[f64]>::to_vec),
            k_pe_rms,
            q: kept.block(Stage::Q, 0..last.len(), 0..g.queries()),
        }
    }

    /// Turns one context row a chosen head towards that head's query, in peaked sequences.
    fn peak(&self, draw: &Draw, plan: &Plan, context: &mut [Array2<f64>]) -> Vec<String> {
        let g = draw.spec.geometry;
        let Some(w) = draw.weights.matrix(Weight::WUk) else { return Vec::new() };
        let heads: Vec<usize> = (0..g.heads).step_by(4).collect();
        let (mut peaked, mut tried, mut reached) = (0usize, 0usize, 0usize);
        let (mut sum, mut squares, mut n) = (0.0, 0.0, 0usize);
        for (nth, &h) in heads.iter().enumerate() {
            let w_uk = dense(w, h * g.latent..(h + 1) * g.latent, false);
            let w_uk = w_uk.as_standard_layout();
            for (i, seq) in plan.sequences.iter().enumerate() {
                if seq.regime != Regime::Peaked || seq.context == 0 {
                    continue;
                }
                let q = self.q.slice(s![seq.request, h * g.key()..(h + 1) * g.key()]);
                let mut lifted = vec![0.0; g.latent];
                let (nope, pe) = (q.slice(s![..g.nope]).to_vec(), q.slice(s![g.nope..]));
                if let Some(data) = w_uk.as_slice() {
                    product(&nope, 1, &Dense { data, cols: g.nope }, &mut lifted);
                }
                let rows = &mut context[i];
                let logits: Vec<f64> = rows
                    .rows()
                    .into_iter()
                    .map(|r| {
                        let latent: f64 = lifted.iter().zip(r).map(|(a, b)| a * b).sum();
                        (latent + pe.dot(&r.slice(s![g.latent..]))) * draw.spec.scale
                    })
                    .collect();
                sum += logits.iter().sum::<f64>();
                squares += logits.iter().map(|v| v * v).sum::<f64>();
                n += logits.len();
                tried += 1;
                // The n-th chosen head gets the n-th row from the end: all of them distinct while there are rows.
                if nth >= seq.context {
                    continue;
                }
                let row = seq.context - 1 - nth;
                peaked += 1;
                reached += usize::from(self.aim(&mut rows.row_mut(row), &lifted, &logits, row, draw.spec));
            }
        }
        let mean = sum / n.max(1) as f64;
        let sd = (squares / n.max(1) as f64 - mean * mean).max(0.0).sqrt();
        vec![
            format!("logits of the last token over drawn context rows: standard deviation {sd:.3}"),
            format!(
                "peaked: {reached} of {tried} (request, head) pairs attend to one key with p > 0.5, {peaked} rows turned"
            ),
        ]
    }

    /// Turns a row so that its logit stands [`PEAK_MARGIN`] above the log-sum of all others. False where
    /// even the best direction does not reach it.
    fn aim(
        &self,
        row: &mut ArrayViewMut1<f64>,
        lifted: &[f64],
        logits: &[f64],
        at: usize,
        spec: &Spec,
    ) -> bool {
        let latent = lifted.len();
        let others = logits.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, v)| *v);
        let top = others.clone().fold(f64::NEG_INFINITY, f64::max).max(0.0);
        let total = top + libm::log(others.map(|v| libm::exp(v - top)).sum::<f64>() + libm::exp(-top));
        let old: f64 = (0..latent).map(|l| lifted[l] * row[l]).sum::<f64>() * spec.scale;
        let rest = logits[at] - old;
        // Best direction of z in γ ⊙ z, at mean square 1: z ∝ γ ⊙ q_latent.
        let best: Vec<f64> = lifted.iter().zip(&self.gamma).map(|(q, g)| q * g).collect();
        let norm = best.iter().map(|v| v * v).sum::<f64>().sqrt();
        let most = norm * (latent as f64).sqrt() * spec.scale;
        let wanted = total + PEAK_MARGIN - rest;
        if most <= 0.0 || !most.is_finite() {
            return false;
        }
        let share = (wanted / most).clamp(0.0, 1.0);
        let keep = (1.0 - share * share).sqrt();
        // The old z without its part along the best direction, so that shares add up as planned.
        let z: Vec<f64> =
            (0..latent).map(|l| if self.gamma[l] == 0.0 { 0.0 } else { row[l] / self.gamma[l] }).collect();
        let along = z.iter().zip(&best).map(|(a, b)| a * b).sum::<f64>() / norm;
        for l in 0..latent {
            let unit = best[l] / norm;
            let across = z[l] - along * unit;
            row[l] = self.gamma[l] * (keep * across + share * unit * (latent as f64).sqrt());
        }
        wanted <= most
    }
}

/// Splits of decode rows where the user leaves it to us: 256 keys a split, at most 8.
pub fn automatic_splits(batch: &Batch) -> usize {
    let longest = batch.0.iter().filter(|r| r.new == 1).map(|r| r.total()).max().unwrap_or(0);
    (longest / 256).clamp(1, 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_functions_of_seed_what_and_index() {
        let draw = |s, w, i| Stream::new(s, w, i).next();
        assert_eq!(draw(1, 2, 3), draw(1, 2, 3));
        let all: std::collections::HashSet<u64> =
            (0..8).flat_map(|s| (0..8).flat_map(move |w| (0..8).map(move |i| draw(s, w, i)))).collect();
        assert_eq!(all.len(), 512);
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let mut rng = Stream::new(0, 0, 0);
        let v: Vec<f64> = (0..100_000).map(|_| rng.normal()).collect();
        let mean = v.iter().sum::<f64>() / 1e5;
        let var = v.iter().map(|x| x * x).sum::<f64>() / 1e5;
        // Four standard errors: 4/√n and 4·√(2/n).
        assert!(mean.abs() < 0.013 && (var - 1.0).abs() < 0.018, "{mean} {var}");
    }

    #[test]
    fn split_rule() {
        for (batch, splits) in [("0+64", 1), ("255+1", 1), ("1024+1", 4), ("9000+1", 8)] {
            assert_eq!(automatic_splits(&batch.parse().unwrap()), splits, "{batch}");
        }
    }
}
