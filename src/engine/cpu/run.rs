/*!
The stages in the order of the table: what is multiplied with what, and which rows attend to which keys.

Shared stages come first, then each form's. Every tensor goes through the sink before anything reads it,
and is dropped when nothing will read it again.
*/

use super::Seams;
use super::attention::{Attended, Kernel, Keys, Queries};
use super::elementwise::{Turn, rms_norm, temperature};
use super::matrix::{Held, Operand, Panels, Part, TOKENS, Transposed, narrow, project, read, write};
use super::seams::{Gain, foreign};
use super::slips::{Norming, Turning, rounded};
use super::sum::Sum;
use super::{CpuEngine, EngineError, Sink};
use crate::case::Case;
use crate::engine::SinkError;
use crate::model::Layer;
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::{Contract, Form, Geometry, Plan, Sequence, Stage, WEIGHTS, Weight};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Rows of attention that a thread handles at once.
const ATTENTION_ROWS: usize = 64;

/// One run of one plan.
pub struct Run<'a> {
    pub(super) engine: &'a CpuEngine,
    contract: Contract,
    pub(super) sum: Sum,
    pub(super) layer: &'a Layer<'a>,
    case: &'a Case,
}

/// Tensors that forms read.
struct Shared {
    q: Tensor,
    cache: Tensor,
}

/// What the attention of a form reads.
enum Inputs<'t> {
    Fused { q: &'t Tensor, k: Tensor, v: Tensor },
    Absorbed { q: &'t Tensor, q_latent: Tensor, cache: &'t Tensor },
}

/// Rows of attention that share keys: one thread's work.
struct Task<'p> {
    seq: &'p Sequence,
    /// Its index in the plan.
    sequence: usize,
    /// (new token of the sequence, head).
    rows: Vec<(usize, usize)>,
    keys: Range<usize>,
    /// Row of the sequence's first token in the output.
    first_row: usize,
    /// Positions that are read, in this order, where they are not all that the rows see.
    chosen: Option<&'p [usize]>,
}

impl Task<'_> {
    /// The engine's seams, with the key that is left out counted along what is read.
    fn seams(&self, seams: Seams) -> Seams {
        let place = |key: usize| self.chosen.map_or(Some(key), |list| list.iter().position(|s| *s == key));
        Seams { skip_key: seams.skip_key.and_then(place), ..seams }
    }
}

/// Rotates columns, and again where that is asked for.
fn rotate((turn, again): &(Turn, Option<DType>), x: &mut [f32]) {
    turn.apply(x);
    if let Some(dtype) = again {
        rounded(x, *dtype);
        turn.apply(x);
    }
}

impl<'a> Run<'a> {
    /// Refuses what can't be computed.
    pub fn new(engine: &'a CpuEngine, layer: &'a Layer<'a>, case: &'a Case) -> Result<Run<'a>, EngineError> {
        use crate::engine::Engine;
        crate::engine::fits("cpu", engine.splits, layer, case)?;
        Ok(Run { engine, contract: engine.contract(), sum: engine.sum()?, layer, case })
    }

    /// Weights, shared stages, then form after form.
    pub fn all(&self, forms: &[Form], sink: &mut dyn Sink) -> Result<(), EngineError> {
        self.weights(sink)?;
        let shared = self.shared(sink)?;
        let mut served = forms.iter().filter(|form| self.plan().has_form(**form));
        Ok(served.try_for_each(|form| self.form(*form, &shared, sink))?)
    }

    pub(super) fn geometry(&self) -> &'a Geometry {
        &self.layer.spec.geometry
    }

    pub(super) fn plan(&self) -> &'a Plan {
        &self.case.plan
    }

    fn weights(&self, sink: &mut dyn Sink) -> Result<(), SinkError> {
        for w in WEIGHTS.iter().map(|r| r.weight).filter(|w| w.exists(self.geometry())) {
            if w.is_norm() {
                let values: Vec<f64> = self.norm_weight(w).iter().map(|v| f64::from(*v)).collect();
                sink.norm(w, &values)?;
            } else if self.show_slot(w, sink)? {
                continue;
            } else if let Some(held) = self.held(w) {
                sink.weight(w, &held)?;
            }
        }
        Ok(())
    }

    fn held(&self, w: Weight) -> Option<Held<'a>> {
        Some(Held { inner: self.layer.weights.matrix(w)?, dtype: self.engine.dtype })
    }

    fn norm_weight(&self, w: Weight) -> Vec<f32> {
        let exact = self.layer.weights.norm(w).unwrap_or_default();
        let mut held = vec![0.0; exact.len()];
        narrow(exact, &mut held);
        held
    }

    pub(super) fn stored(&self, stage: Stage) -> DType {
        match stage {
            Stage::PartO => self.contract.partials,
            Stage::Lse | Stage::PartLse => self.contract.lse,
            _ => self.engine.dtype,
        }
    }

    /// A deliberate gain on this stage.
    pub(super) fn gain(&self, stage: Stage) -> Option<Gain> {
        self.engine.seams.gain.filter(|g| g.stage == stage && Gain::has_seam(stage))
    }

    /// Room for a stage's results: in float32 where a gain is still to come.
    fn zeros(&self, id: TensorId) -> Tensor {
        let dtype = if self.gain(id.stage).is_some() { DType::F32 } else { self.stored(id.stage) };
        Tensor::zeros(id, self.plan(), self.geometry(), dtype)
    }

    /// A stage's results as they are stored.
    pub(super) fn settle(&self, id: TensorId, t: Tensor) -> Tensor {
        let gain = self.gain(id.stage);
        if gain.is_none() && t.dtype == self.stored(id.stage) {
            return t;
        }
        let mut out = Tensor::zeros(id, self.plan(), self.geometry(), self.stored(id.stage));
        let (columns, factor) = gain.map_or((None, 1.0), |g| (g.columns(&t), g.factor));
        let columns = columns.unwrap_or(0..0);
        let mut row = vec![0.0; t.cols];
        for r in 0..t.rows {
            t.read(r, 0..t.cols, &mut row);
            row[columns.clone()].iter_mut().for_each(|v| *v *= factor);
            out.write(r, 0, &row);
        }
        out
    }

    /// How q or k_pe of a token is rotated, and whether again, rounded in between.
    fn turn(&self, stage: Stage, token: usize) -> (Turn, Option<DType>) {
        let seams = &self.engine.seams;
        let offset = seams.rope_offset.filter(|(s, _)| *s == stage).map_or(0.0, |o| o.1);
        let position = self.plan().positions[token] as f64 + offset;
        let rope = &self.layer.spec.rope;
        let turning = seams.turning.filter(|(s, _)| *s == stage).map(|t| t.1);
        let turn = match turning {
            None | Some(Turning::Twice) => Turn::new(rope, position),
            Some(t) => Turn::new(&t.rope(rope), position),
        };
        (turn, (turning == Some(Turning::Twice)).then(|| self.stored(stage)))
    }

    /// Hands a shared tensor over and takes back what is to be used.
    pub(super) fn put(&self, sink: &mut dyn Sink, stage: Stage, tensor: Tensor) -> Result<Tensor, SinkError> {
        let id = TensorId::shared(stage);
        let mut tensor = self.settle(id, tensor);
        sink.tensor(id, &mut tensor)?;
        Ok(tensor)
    }

    /// All stages up to the cache.
    fn shared(&self, sink: &mut dyn Sink) -> Result<Shared, SinkError> {
        let (g, spec) = (self.geometry(), &self.layer.spec);
        let positions = &self.plan().positions;
        let norm = |stage, (input, first): (&Tensor, usize), width, weight, eps: f64| {
            let mut gamma = self.norm_weight(weight);
            let slip = self.engine.seams.norm.filter(|n| n.0 == stage).map(|n| n.1);
            match slip {
                Some(Norming::NoWeight) => gamma.fill(1.0),
                Some(Norming::PlusOne) => gamma.iter_mut().for_each(|g| *g += 1.0),
                _ => {}
            }
            self.each_row(stage, input, first..first + width, &|t, x| match slip {
                Some(Norming::Skipped) => {}
                Some(Norming::Wide) => {
                    let mut all = vec![0.0; input.cols - first];
                    read(input, t, first..input.cols, &mut all);
                    let mut gamma = gamma.clone();
                    gamma.resize(all.len(), 1.0);
                    rms_norm(&mut all, &gamma, eps as f32);
                    x.copy_from_slice(&all[..x.len()]);
                }
                _ => rms_norm(x, &gamma, eps as f32),
            })
        };
        let product = |stage, input: &Tensor, weight| {
            self.product(TensorId::shared(stage), input, 0..input.cols, weight)
        };

        let mut hidden = self.zeros(TensorId::shared(Stage::Hidden));
        for (i, row) in self.case.given.hidden.rows().into_iter().enumerate() {
            hidden.write(i, 0, &row.to_vec());
        }
        let hidden = self.put(sink, Stage::Hidden, hidden)?;
        let attn_in = self.put(
            sink,
            Stage::AttnIn,
            norm(Stage::AttnIn, (&hidden, 0), g.hidden, Weight::GAttn, spec.eps_attn),
        )?;
        drop(hidden);
        let mut stack = self.stacked(&attn_in);
        let q_raw = if g.q_rank > 0 {
            let (q_a, first) = self.down(sink, (Stage::QA, Weight::WQA), &attn_in, &mut stack)?;
            let normed = norm(Stage::QANormed, (&q_a, first), g.q_rank, Weight::GQ, spec.eps_latent);
            drop(q_a);
            let normed = self.put(sink, Stage::QANormed, normed)?;
            product(Stage::QRaw, &normed, Weight::WQB)
        } else {
            product(Stage::QRaw, &attn_in, Weight::WQ)
        };
        let q_raw = self.put(sink, Stage::QRaw, q_raw)?;
        let q = self.each_row(Stage::Q, &q_raw, 0..q_raw.cols, &|t, x| {
            let turn = self.turn(Stage::Q, t);
            for head in x.chunks_exact_mut(g.key()) {
                rotate(&turn, &mut head[g.nope..]);
            }
            if let Some(factor) = spec.temperature.map(|f| temperature(&f, positions[t])) {
                x.iter_mut().for_each(|v| *v *= factor);
            }
        });
        drop(q_raw);
        let q = self.put(sink, Stage::Q, q)?;
        let (kv_a, first) = self.down(sink, (Stage::KvA, Weight::WKvA), &attn_in, &mut stack)?;
        drop(attn_in);
        let latent = norm(Stage::KvCNormed, (&kv_a, first), g.latent, Weight::GKv, spec.eps_latent);
        let latent = self.put(sink, Stage::KvCNormed, latent)?;
        let k_pe = self.each_row(Stage::KPe, &kv_a, first + g.latent..first + g.cache(), &|t, x| {
            rotate(&self.turn(Stage::KPe, t), x);
        });
        let k_pe = self.put(sink, Stage::KPe, k_pe)?;
        let cache = self.put(sink, Stage::Cache, self.cache(&latent, &k_pe))?;
        Ok(Shared { q, cache })
    }

    /// An elementwise stage: columns `cols` of each row, changed in float32, rounded once.
    fn each_row(
        &self,
        stage: Stage,
        input: &Tensor,
        cols: Range<usize>,
        change: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Tensor {
        let mut out = self.zeros(TensorId::shared(stage));
        let (dtype, row_bytes) = (out.dtype, out.cols * out.dtype.bytes());
        out.bytes.par_chunks_mut(row_bytes.max(1)).enumerate().for_each(|(t, line)| {
            let mut x = vec![0.0; cols.len()];
            read(input, t, cols.clone(), &mut x);
            change(t, &mut x);
            let x: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
            line.copy_from_slice(&dtype.encode(&x));
        });
        out
    }

    /// A product with a whole weight.
    pub(super) fn product(&self, id: TensorId, input: &Tensor, cols: Range<usize>, weight: Weight) -> Tensor {
        let mut out = self.zeros(id);
        if let Some(w) = self.held(weight) {
            project(self.sum, input, cols, &Part { rows: 0..w.inner.rows(), weight: &w }, &mut out, 0);
        }
        out
    }

    /// A product a head: columns of `input` from `h · stride` on with head h of the weight.
    fn product_by_head(&self, id: TensorId, input: &Tensor, stride: usize, weight: Weight) -> Tensor {
        let mut out = self.zeros(id);
        if let Some(w) = self.held(weight) {
            let rows = w.inner.rows() / self.geometry().heads;
            for h in 0..self.geometry().heads {
                let part = Part { weight: &w, rows: h * rows..(h + 1) * rows };
                let cols = h * stride..h * stride + part.cols();
                project(self.sum, input, cols, &part, &mut out, h * rows);
            }
        }
        out
    }

    /// The pool: NaN where nobody writes, context as given, new tokens by slot.
    fn cache(&self, latent: &Tensor, k_pe: &Tensor) -> Tensor {
        let mut pool = self.zeros(TensorId::shared(Stage::Cache));
        // All bits set is a NaN in every format of this engine.
        pool.bytes.fill(0xff);
        let (wide, narrow) = (latent.cols * pool.dtype.bytes(), k_pe.cols * pool.dtype.bytes());
        for (i, seq) in self.plan().sequences.iter().enumerate() {
            for (position, &slot) in seq.slots.iter().enumerate() {
                if position < seq.context {
                    pool.write(slot, 0, &self.case.given.context[i].row(position).to_vec());
                } else {
                    let t = seq.tokens.start + position - seq.context;
                    let row = &mut pool.bytes[slot * (wide + narrow)..][..wide + narrow];
                    row[..wide].copy_from_slice(&latent.bytes[t * wide..][..wide]);
                    row[wide..].copy_from_slice(&k_pe.bytes[t * narrow..][..narrow]);
                }
            }
        }
        pool
    }

    /// Everything after the cache.
    fn form(&self, form: Form, shared: &Shared, sink: &mut dyn Sink) -> Result<(), SinkError> {
        let g = self.geometry();
        let id = |stage| TensorId::of(stage, form);
        let hand = |sink: &mut dyn Sink, stage, t: Tensor| {
            let mut t = self.settle(id(stage), t);
            sink.tensor(id(stage), &mut t).map(|_| t)
        };
        let inputs = match form {
            Form::Fused => {
                let k = hand(sink, Stage::K, self.keys(&shared.cache))?;
                let v = hand(sink, Stage::V, self.values(&shared.cache))?;
                Inputs::Fused { q: &shared.q, k, v }
            }
            Form::Absorbed => {
                let q_latent = self.product_by_head(id(Stage::QLatent), &shared.q, g.key(), Weight::WUk);
                let q_latent = hand(sink, Stage::QLatent, q_latent)?;
                Inputs::Absorbed { q: &shared.q, q_latent, cache: &shared.cache }
            }
        };
        let attended = if form == Form::Fused { Stage::AttnOut } else { Stage::OLatent };
        let (mut o, mut lse) = (self.zeros(id(attended)), self.zeros(id(Stage::Lse)));
        if self.plan().has(Stage::PartO, Some(form)) {
            let (mut part_o, mut part_lse) = (self.zeros(id(Stage::PartO)), self.zeros(id(Stage::PartLse)));
            self.attention((form, &inputs), true, &mut part_o, &mut part_lse);
            let part_o = hand(sink, Stage::PartO, part_o)?;
            let part_lse = hand(sink, Stage::PartLse, part_lse)?;
            self.merge(form, (&part_o, &part_lse), &mut o, &mut lse);
        }
        self.attention((form, &inputs), false, &mut o, &mut lse);
        drop(inputs);
        let attn_out = if form == Form::Fused {
            hand(sink, Stage::Lse, lse)?;
            o
        } else {
            let o_latent = hand(sink, Stage::OLatent, o)?;
            hand(sink, Stage::Lse, lse)?;
            self.product_by_head(id(Stage::AttnOut), &o_latent, g.latent, Weight::WUv)
        };
        let attn_out = hand(sink, Stage::AttnOut, attn_out)?;
        let out = self.product(id(Stage::Out), &attn_out, 0..attn_out.cols, Weight::WO);
        hand(sink, Stage::Out, out).map(|_| ())
    }

    /// Rows of the cache that a sequence's keys are read from.
    fn gathered(&self, sequence: usize) -> Vec<usize> {
        let page = self.engine.seams.foreign_page;
        let foreign = page.and_then(|p| foreign(self.plan(), sequence, p));
        let paging = self.engine.seams.paging;
        let other = paging.map(|p| p.slots(self.plan(), &self.plan().sequences[sequence]));
        foreign.or(other).unwrap_or_else(|| self.plan().sequences[sequence].slots.clone())
    }

    /// Rows of the cache in the order of keys of the sequences that the fused form serves.
    fn slots(&self) -> Vec<usize> {
        self.plan().key_rows().flat_map(|(i, _, _)| self.gathered(i)).collect()
    }

    /// k: each head's latent · w_uk, beside a copy of the rope columns.
    fn keys(&self, cache: &Tensor) -> Tensor {
        let g = self.geometry();
        let mut k = self.zeros(TensorId::of(Stage::K, Form::Fused));
        let slots = self.slots();
        if let Some(w) = self.held(Weight::WUk) {
            for (i, rows) in slots.chunks(TOKENS).enumerate() {
                let latent = Panels::gather(cache, rows, 0..g.latent);
                for h in 0..g.heads {
                    let w = Transposed::new(&Part { weight: &w, rows: h * g.latent..(h + 1) * g.latent });
                    latent.multiply(self.sum, &w, &mut k, i * TOKENS, h * g.key());
                }
            }
        }
        let n = k.dtype.bytes();
        let (row, pe) = (k.cols * n, g.rope * n);
        for (line, slot) in k.bytes.chunks_exact_mut(row).zip(&slots) {
            let from = &cache.bytes[(slot * g.cache() + g.latent) * n..][..pe];
            for head in line.chunks_exact_mut(g.key() * n) {
                head[g.nope * n..].copy_from_slice(from);
            }
        }
        k
    }

    fn values(&self, cache: &Tensor) -> Tensor {
        let mut v = self.zeros(TensorId::of(Stage::V, Form::Fused));
        if let Some(w) = self.held(Weight::WUv) {
            let w = Part { rows: 0..w.inner.rows(), weight: &w };
            for (i, rows) in self.slots().chunks(TOKENS).enumerate() {
                let latent = Panels::gather(cache, rows, 0..self.geometry().latent);
                latent.multiply(self.sum, &w, &mut v, i * TOKENS, 0);
            }
        }
        v
    }

    /// Attention of sequences that are computed in parts, part by part (`parts`), or of all others.
    fn attention(&self, (form, inputs): (Form, &Inputs), parts: bool, o: &mut Tensor, lse: &mut Tensor) {
        let p = self.contract.softmax.p;
        let c = (self.layer.spec.scale * std::f64::consts::LOG2_E) as f32;
        let kernel = Kernel { sum: self.sum, c, cast: p, seams: self.engine.seams };
        let out = Mutex::new((o, lse));
        self.tasks(form, inputs, parts).par_iter().for_each(|task| {
            let queries = self.queries(inputs, task);
            let kernel = Kernel { seams: task.seams(kernel.seams), ..kernel };
            let tiles = self.contract.tiles(task.keys.clone());
            let Attended { o, lse } = kernel.attend(&queries, &self.keys_of(inputs, task), &tiles);
            let width = o.len() / task.rows.len().max(1);
            let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
            for (i, &(token, head)) in task.rows.iter().enumerate() {
                let row = task.first_row + token;
                write(out.0, row, head * width, &o[i * width..(i + 1) * width]);
                write(out.1, row, head, &lse[i..i + 1]);
            }
        });
    }

    fn tasks(&self, form: Form, inputs: &Inputs, parts: bool) -> Vec<Task<'a>> {
        let (heads, plan) = (self.geometry().heads, self.plan());
        let part_rows = plan.part_rows(form);
        // Sequences and the first row of each that they write, of the first part where they have parts.
        let some: Vec<(usize, &Sequence, usize)> = if parts {
            plan.part_sequences(form).map(|(i, s, _, own)| (i, s, own.start)).collect()
        } else {
            let whole = plan.attention_rows(Some(form)).filter(|(_, s, _)| !plan.in_parts(form, s));
            whole.map(|(i, s, rows)| (i, s, rows.start)).collect()
        };
        let mut all = Vec::new();
        for (sequence, seq, first) in some {
            if let Some(chosen) = self.case.given.selection.get(sequence) {
                for (token, list) in chosen.iter().enumerate() {
                    let token = (token, list.as_slice());
                    all.extend(self.tasks_of((sequence, seq, first), (form, parts), token, inputs));
                }
                continue;
            }
            let tokens = 0..seq.tokens.len();
            // Heads share the keys of a latent cache; else each has its own.
            let groups: Vec<Vec<(usize, usize)>> = match inputs {
                Inputs::Absorbed { .. } => {
                    vec![tokens.flat_map(|t| (0..heads).map(move |h| (t, h))).collect()]
                }
                Inputs::Fused { .. } => {
                    (0..heads).map(|h| tokens.clone().map(|t| (t, h)).collect()).collect()
                }
            };
            // Without parts all keys are one.
            let whole = || Contract { splits: 1.into(), ..self.contract }.split_ranges(seq.keys());
            let ranges = if parts { plan.part_ranges(form, seq, &self.contract) } else { whole() };
            for (part, keys) in ranges.into_iter().enumerate() {
                let first_row = part * part_rows + first;
                for rows in groups.iter().flat_map(|g| g.chunks(ATTENTION_ROWS)) {
                    let (rows, keys) = (rows.to_vec(), keys.clone());
                    all.push(Task { seq, sequence, rows, keys, first_row, chosen: None });
                }
            }
        }
        all
    }

    /// Attention of one token over the keys that are chosen for it, dealt into splits as they are listed.
    fn tasks_of(
        &self,
        (sequence, seq, first): (usize, &'a Sequence, usize),
        (form, parts): (Form, bool),
        (token, list): (usize, &'a [usize]),
        inputs: &Inputs,
    ) -> Vec<Task<'a>> {
        let heads: Vec<(usize, usize)> = (0..self.geometry().heads).map(|h| (token, h)).collect();
        let groups: Vec<_> = match inputs {
            Inputs::Absorbed { .. } => heads.chunks(ATTENTION_ROWS).collect(),
            Inputs::Fused { .. } => heads.chunks(1).collect(),
        };
        let n = list.len();
        let mut ranges = Contract { splits: 1.into(), ..self.contract }.split_ranges(n);
        if parts {
            ranges = self.contract.split_ranges(n);
            ranges.resize(self.plan().parts(form).max(ranges.len()), n..n);
        }
        let part_rows = self.plan().part_rows(form);
        let of = |(part, keys): (usize, Range<usize>)| {
            let first_row = part * part_rows + first;
            let task = move |rows: &&[(usize, usize)]| Task {
                seq,
                sequence,
                rows: rows.to_vec(),
                keys: keys.clone(),
                first_row,
                chosen: Some(list),
            };
            groups.iter().map(task).collect::<Vec<_>>()
        };
        ranges.into_iter().enumerate().flat_map(of).collect()
    }

    fn queries(&self, inputs: &Inputs, task: &Task) -> Queries {
        let g = self.geometry();
        let mut q = Vec::new();
        for &(token, h) in &task.rows {
            let row = task.seq.tokens.start + token;
            let mut append = |tensor: &Tensor, cols: Range<usize>| {
                let at = q.len();
                q.resize(at + cols.len(), 0.0);
                read(tensor, row, cols, &mut q[at..]);
            };
            match inputs {
                Inputs::Fused { q, .. } => append(q, h * g.key()..(h + 1) * g.key()),
                Inputs::Absorbed { q, q_latent, .. } => {
                    append(q_latent, h * g.latent..(h + 1) * g.latent);
                    append(q, h * g.key() + g.nope..(h + 1) * g.key());
                }
            }
        }
        let seams = &self.engine.seams;
        if let Some(part) = seams.scores {
            let width = q.len() / task.rows.len().max(1);
            q.chunks_exact_mut(width.max(1)).for_each(|q| part.take(q, g.rope));
        }
        let keys = task.chosen.map_or(task.seq.keys(), <[usize]>::len);
        let visible = |token: usize| task.chosen.map_or_else(|| task.seq.visible(token), <[usize]>::len);
        let seen = |visible: usize| seams.sight.map_or(visible, |s| s.of(visible, keys));
        let tile = self.contract.softmax.tile;
        let hidden = seams.lost.map_or(0..0, |l| l.keys(task.seq, self.plan().page_size, tile));
        let visible = task.rows.iter().map(|(token, _)| seen(visible(*token))).collect();
        Queries { q, visible, hidden }
    }

    fn keys_of<'t>(&self, inputs: &'t Inputs, task: &Task) -> Keys<'t> {
        let g = self.geometry();
        let read = |rows: Vec<usize>| match task.chosen {
            None => rows,
            Some(list) => list.iter().filter_map(|s| rows.get(*s)).copied().collect(),
        };
        match inputs {
            Inputs::Fused { k, v, .. } => {
                let h = task.rows.first().map_or(0, |r| r.1);
                let same = |(_, s, _): &(usize, &Sequence, Range<usize>)| std::ptr::eq(*s, task.seq);
                let rows = self.plan().key_rows().find(same).map_or(0..0, |r| r.2).collect();
                let next =
                    |is: bool| if self.engine.seams.next_head == Some(is) { (h + 1) % g.heads } else { h };
                let (a, b) = (next(false), next(true));
                let (kc, vc) = (a * g.key()..(a + 1) * g.key(), b * g.value..(b + 1) * g.value);
                Keys { k: (k, kc), v: (v, vc), rows: read(rows) }
            }
            Inputs::Absorbed { cache, .. } => {
                let view = self.engine.seams.value_view.min(g.rope);
                let (kc, vc) = (0..g.cache(), view..view + g.latent);
                Keys { k: (cache, kc), v: (cache, vc), rows: read(self.gathered(task.sequence)) }
            }
        }
    }

    /// Rows out of their parts, in float32.
    fn merge(&self, form: Form, (part_o, part_lse): (&Tensor, &Tensor), o: &mut Tensor, lse: &mut Tensor) {
        let (heads, parts) = (self.geometry().heads, self.plan().parts(form));
        let kernel = Kernel { sum: self.sum, c: 0.0, cast: None, seams: self.engine.seams };
        let part_rows = self.plan().part_rows(form);
        let width = part_o.cols / heads.max(1);
        let rows = self.plan().part_sequences(form).flat_map(|(_, _, rows, _)| rows);
        for (i, to) in rows.enumerate() {
            for h in 0..heads {
                let part = |s: usize| part_lse.get(s * part_rows + i, h) as f32;
                let (w, total) = kernel.merge(&(0..parts).map(part).collect::<Vec<_>>());
                let (mut x, mut one) = (vec![0.0; width], vec![0.0; width]);
                // A part of no weight is not read: it may hold nothing.
                for (s, w) in w.iter().enumerate().filter(|(_, w)| **w != 0.0) {
                    read(part_o, s * part_rows + i, h * width..(h + 1) * width, &mut one);
                    x.iter_mut().zip(&one).for_each(|(x, o)| *x += w * o);
                }
                write(o, to, h * width, &x);
                write(lse, to, h, &[total]);
            }
        }
    }
}
