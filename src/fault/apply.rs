/*! Carrying faults out: altered weights, and a sink that alters tensors on their way. */

use super::spoil::{self, Weighed};
use super::stack::{self, SlotRows};
use super::{Fault, FaultError, HEAD, Kind};
use crate::case::Stream;
use crate::engine::cpu::seams::foreign;
use crate::engine::cpu::{Gain, Seams};
use crate::engine::{Sink, SinkError};
use crate::judge::cause::weight::OtherLayers;
use crate::trace::{Tensor, TensorId};
use mla_reference::elementwise::{rope_table, rotate};
use mla_reference::product::Rows;
use mla_reference::rows::Patched;
use mla_reference::{Geometry, Plan, Spec, Stage, Weight, Weights};
use std::collections::BTreeMap;

/// Draws of an element before any magnitude will do.
const DRAWS: usize = 100_000;

/// A layer's weights with one element altered, with slots of a stack that hold other rows, or altered as a whole.
pub struct FaultyWeights<'a> {
    inner: &'a dyn Weights,
    slots: Vec<(Weight, SlotRows<'a>)>,
    matrix: Option<(Weight, Patched<&'a dyn Rows>)>,
    norm: Option<(Weight, Vec<f64>)>,
    spoilt: Weighed<'a>,
}

impl Weights for FaultyWeights<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        if let Some((_, rows)) = self.spoilt.matrices.iter().find(|(w, _)| *w == weight) {
            return Some(rows);
        }
        if let Some((_, rows)) = self.slots.iter().find(|(w, _)| *w == weight) {
            return Some(rows);
        }
        match &self.matrix {
            Some((w, m)) if *w == weight => Some(m),
            _ => self.inner.matrix(weight),
        }
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        if let Some((_, values)) = self.spoilt.norms.iter().find(|(w, _)| *w == weight) {
            return Some(values);
        }
        match &self.norm {
            Some((w, v)) if *w == weight => Some(v),
            _ => self.inner.norm(weight),
        }
    }
}

/// A value of magnitude between a quarter of the rms and the rms, drawn by seed.
fn draw(seed: u64, count: usize, rms: f64, value: impl Fn(usize) -> f64) -> usize {
    let mut rng = Stream::new(seed, 0xfa17, count as u64);
    let mut at = 0;
    for _ in 0..DRAWS {
        at = rng.below(count);
        let v = value(at).abs();
        if v >= 0.25 * rms && v <= rms {
            break;
        }
    }
    at
}

impl<'a> FaultyWeights<'a> {
    /// The layer's weights as the engine is to see them. `others`: the model's other layers, where they are at hand.
    ///
    /// # Errors
    /// The layer has nothing for the fault to act on.
    pub fn new(
        fault: &Fault,
        inner: &'a dyn Weights,
        g: &Geometry,
        others: Option<&dyn OtherLayers>,
    ) -> Result<FaultyWeights<'a>, FaultError> {
        let slots = stack::slots(fault, inner)?;
        let mut out = FaultyWeights { inner, slots, matrix: None, norm: None, spoilt: Weighed::default() };
        if let Kind::Spoil(spoil, weight) = fault.kind {
            out.spoilt = spoil::spoil(fault, (spoil, weight), inner, g, others)?;
        }
        let Kind::WeightElement(weight) = fault.kind else { return Ok(out) };
        if let Some(values) = inner.norm(weight) {
            let rms = (values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64).sqrt();
            let at = draw(fault.seed, values.len(), rms, |i| values[i]);
            let mut values = values.to_vec();
            values[at] += fault.size * rms;
            out.norm = Some((weight, values));
            return Ok(out);
        }
        let Some(m) = inner.matrix(weight) else {
            return Err(FaultError::Nowhere(
                format!("this layer has no {weight}"),
                fault.text.clone(),
                "choose a weight that `mla-check inspect` lists".into(),
            ));
        };
        // The rms of a few rows stands for the weight's.
        let (rows, cols) = (m.rows(), m.cols());
        let mut line = vec![0.0; cols];
        let mut squares = 0.0;
        let sample = rows.min(64);
        for i in 0..sample {
            m.decode(i * rows / sample, 0, &mut line);
            squares += line.iter().map(|v| v * v).sum::<f64>();
        }
        let rms = (squares / (sample * cols) as f64).sqrt();
        let value = |at: usize| {
            let mut line = vec![0.0; cols];
            m.decode(at / cols, 0, &mut line);
            line[at % cols]
        };
        let at = draw(fault.seed, rows * cols, rms, value);
        let values = BTreeMap::from([((at / cols, at % cols), value(at) + fault.size * rms)]);
        out.matrix = Some((weight, Patched { inner: m, values }));
        Ok(out)
    }
}

/// A sink in front of another one, which alters tensors on their way.
pub struct Alter<'a> {
    fault: &'a Fault,
    /// The engine carries the fault out itself.
    inside: bool,
    spec: &'a Spec,
    plan: &'a Plan,
    inner: &'a mut dyn Sink,
    hits: usize,
}

impl<'a> Alter<'a> {
    /// In front of `inner`, for an engine with these seams.
    pub fn new(
        fault: &'a Fault,
        seams: Option<&Seams>,
        spec: &'a Spec,
        plan: &'a Plan,
        inner: &'a mut dyn Sink,
    ) -> Result<Alter<'a>, FaultError> {
        let inside = fault.inside(seams);
        if fault.needs_seams() && !inside {
            return Err(FaultError::Nowhere(
                "this engine has no seam for the fault".into(),
                fault.text.clone(),
                "take --engine cpu, or a fault that acts on a weight, a tensor or a scalar".into(),
            ));
        }
        Ok(Alter { fault, inside, spec, plan, inner, hits: 0 })
    }

    /// Fails where the fault had nothing to act on: a clean report under its name would be a lie.
    pub fn finish(self) -> Result<(), FaultError> {
        let nowhere =
            |what: String, mend: String| Err(FaultError::Nowhere(what, self.fault.text.clone(), mend));
        match self.fault.kind {
            Kind::SwapHeads(a, b) if a.max(b) >= self.spec.geometry.heads => nowhere(
                format!("head {} does not exist", a.max(b)),
                format!("choose heads below {}", self.spec.geometry.heads),
            ),
            Kind::MergeBase if !self.plan.has_parts() => nowhere(
                "nothing is merged in this run".into(),
                "pass --splits 2 or more, and a request of one new token".into(),
            ),
            Kind::ForeignPage(p)
                if (0..self.plan.sequences.len()).all(|i| foreign(self.plan, i, p).is_none()) =>
            {
                nowhere(
                    format!("no request has a page {p} that could be another's"),
                    "choose a lower page, or a batch of several requests of that length".into(),
                )
            }
            Kind::WeightElement(_)
            | Kind::SoftmaxScale(_)
            | Kind::Eps(_)
            | Kind::DropToken(_)
            | Kind::ForeignPage(_)
            | Kind::MergeBase
            | Kind::NoRescale
            | Kind::ShardZero(_)
            | Kind::LostRank(_)
            | Kind::SlotsPermuted
            | Kind::EqualChunks
            | Kind::CutAt(_)
            | Kind::Spoil(..)
            | Kind::Turned(_)
            | Kind::Counted(_)
            | Kind::Inside(_)
            | Kind::Kernel(_) => Ok(()),
            _ if self.hits == 0 => nowhere(
                format!(
                    "no {} was computed in this run, so nothing was altered",
                    self.fault.stage.map_or("tensor", Stage::name)
                ),
                "choose a tensor, form and batch that this run has".into(),
            ),
            _ => Ok(()),
        }
    }

    fn alter(&self, id: TensorId, t: &mut Tensor) -> bool {
        match self.fault.kind {
            Kind::Element(_) => self.element(t),
            Kind::OutputGain(f) => (0..t.rows).for_each(|r| scale(t, r, 0..t.cols, f)),
            Kind::HeadGain(f) => {
                let gain = Gain { stage: id.stage, head: Some(HEAD), factor: f };
                let Some(columns) = gain.columns(t) else { return false };
                (0..t.rows).for_each(|r| scale(t, r, columns.clone(), f));
            }
            Kind::SwapHeads(a, b) => {
                let Some((heads, width)) = t.heads() else { return false };
                if a >= heads || b >= heads {
                    return false;
                }
                for r in 0..t.rows {
                    for j in 0..width {
                        let (x, y) = (t.bits(r, a * width + j), t.bits(r, b * width + j));
                        t.set_bits(r, a * width + j, y);
                        t.set_bits(r, b * width + j, x);
                    }
                }
            }
            Kind::RopeOffset(n) => self.rope_offset(id, t, n),
            Kind::SkippedRow => {
                let n = t.dtype.bytes() * t.cols;
                let from = t.bytes.len().saturating_sub(n);
                t.bytes[from..].fill(0xff);
            }
            Kind::PhantomOutput => t.bytes.fill(0),
            Kind::Damage(d) => return d.act(id, t, (self.plan, &self.spec.geometry), self.fault.seed),
            _ => return false,
        }
        true
    }

    fn element(&self, t: &mut Tensor) {
        let all = t.block(0..t.rows, 0..t.cols);
        let finite = || all.iter().filter(|v| v.is_finite());
        let rms = (finite().map(|v| v * v).sum::<f64>() / finite().count().max(1) as f64).sqrt();
        let at = |i: usize| all[[i / t.cols, i % t.cols]];
        let i = draw(self.fault.seed, all.len(), rms, at);
        t.set(i / t.cols, i % t.cols, at(i) + self.fault.size * rms);
    }

    fn rope_offset(&self, id: TensorId, t: &mut Tensor, n: f64) {
        let g = &self.spec.geometry;
        let mut rope = self.spec.rope.clone();
        rope.magnitude = 1.0;
        rope.inv_freq.iter_mut().for_each(|f| *f *= n);
        let table = rope_table(&rope, &[1], mla_numeric::DType::F64);
        let (width, first) = if id.stage == Stage::Q { (g.key(), g.nope) } else { (g.rope, 0) };
        for r in 0..t.rows {
            for h in 0..t.cols / width {
                let from = h * width + first;
                let x = t.block(r..r + 1, from..from + g.rope);
                let (y, _) = rotate(x.view(), &table, |_| 0, rope.pairing);
                t.write(r, from, &y.row(0).to_vec());
            }
        }
    }
}

fn scale(t: &mut Tensor, row: usize, cols: std::ops::Range<usize>, f: f64) {
    let mut line = vec![0.0; cols.len()];
    t.read(row, cols.clone(), &mut line);
    line.iter_mut().for_each(|v| *v *= f);
    t.write(row, cols.start, &line);
}

impl Sink for Alter<'_> {
    fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        self.inner.weight(weight, rows)
    }
    fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
        self.inner.norm(weight, values)
    }
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.inner.evidence(id, what)
    }
    fn weight_evidence(&mut self, weight: Weight, what: &str) -> Result<(), SinkError> {
        self.inner.weight_evidence(weight, what)
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        if !self.fault.hits(id) {
            return self.inner.tensor(id, tensor);
        }
        if self.inside {
            let whole = !matches!(self.fault.kind, Kind::HeadGain(_)) || tensor.heads().is_some();
            self.hits += usize::from(whole);
            return self.inner.tensor(id, tensor);
        }
        // A phantom buffer is right where it is recorded, and another one where it is read.
        if self.fault.kind == Kind::PhantomOutput {
            self.inner.tensor(id, tensor)?;
            self.hits += usize::from(self.alter(id, tensor));
            return Ok(true);
        }
        let altered = self.alter(id, tensor);
        self.hits += usize::from(altered);
        Ok(self.inner.tensor(id, tensor)? || altered)
    }
}
