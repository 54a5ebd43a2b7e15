/*!
One function a stage: the float64 value of a tensor from its inputs, chunk by chunk.

The same functions serve twice. The engine `reference` feeds them what they gave before (cumulative). The
judge feeds them the bits that an engine recorded (isolated), with the engine's contract, and compares.
A chunk carries beside the value the *terms* that decide how far an honest engine may be off; bounds
themselves are the judge's business.

Chunks keep memory flat: a stage's output never stands whole in float64 unless somebody collects it.
*/

use crate::attention::{Head, attend_as, attend_split_as, merge_weights_as, part, strided};
use crate::contract::{Accumulate, Contract};
use crate::departure::{Departure, KeyList, Slip};
use crate::elementwise::{block_norms, declared_table, normalise, rotate_cast, times_gamma};
use crate::geometry::Spec;
use crate::key_stats::KeyStats;
use crate::plan::{Given, Plan, Sequence};
use crate::product::{Dense, Rows, Strided, product, product_with_norms};
use crate::recall::{self, Memory};
use crate::route::Cut;
use crate::rows::{Part, dense};
use crate::stage::{Form, Phase, Stage, Weight};
use ndarray::{Array2, ArrayView2, Axis, s};
use rayon::prelude::*;
use std::ops::Range;

mod chosen;
mod ranks;
mod terms;

pub use terms::{Chunk, Terms};

/// Rows in one product: bounds memory for long prefills and contexts.
const TOKEN_CHUNK: usize = 1024;
/// Columns of a product's output in one chunk.
const COLUMN_CHUNK: usize = 2048;
/// Rows of attention handled at once.
const ROW_CHUNK: usize = 64;
/// The same where only some rows are asked for.
const FEW_ROWS: usize = 8;

/// The weights of a layer, as matrices that products read.
pub trait Weights: Sync {
    /// A matrix in the orientation of the stage table (rows: all axes but the last; w_o: hidden).
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows>;
    /// A norm's vector.
    fn norm(&self, weight: Weight) -> Option<&[f64]>;
}

/// Tensors computed so far.
pub trait Source: Sync {
    /// A block of a stage's matrix in float64.
    fn block(&self, stage: Stage, rows: Range<usize>, cols: Range<usize>) -> Array2<f64>;
}

/// Everything a stage is computed from.
pub struct Evaluator<'a> {
    /// The layer's numbers.
    pub spec: &'a Spec,
    /// Rows and sequences.
    pub plan: &'a Plan,
    /// What is given from outside.
    pub given: &'a Given,
    /// The layer's weights, as the engine holds them.
    pub weights: &'a dyn Weights,
    /// The contract to emulate.
    pub contract: &'a Contract,
    /// Inputs.
    pub source: &'a dyn Source,
    /// Rows and heads of an attention that are wanted, by the first row of a chunk and the head; None: all.
    pub wanted: Option<Wanted<'a>>,
    /// In what attention departs from its formula; None: in nothing.
    pub departure: Option<&'a Departure>,
    /// Where results of this stage from these inputs may be known; None: everything is computed.
    pub memory: Memory<'a>,
}

/// Whether a chunk of an attention is wanted: first row of the stage's matrix, head.
pub type Wanted<'a> = &'a (dyn Fn(usize, usize) -> bool + Sync);

/// A stage in a form.
type Of = (Stage, Option<Form>);

/// Takes chunks, in any order, from several threads.
pub type Visit<'v> = &'v (dyn Fn(Chunk) + Sync);

impl Evaluator<'_> {
    /// Computes a stage in a form (None for shared stages) and hands its chunks to `visit`.
    ///
    /// Chunks cover the whole matrix once. A missing weight yields no chunks: the caller has refused the
    /// layer before.
    pub fn evaluate(&self, stage: Stage, form: Option<Form>, visit: Visit) {
        let g = &self.spec.geometry;
        let absorbed = form == Some(Form::Absorbed);
        let of_form = form.unwrap_or(Form::Fused);
        match stage {
            Stage::Hidden => self.hidden(visit),
            Stage::AttnIn => {
                self.norm(Stage::Hidden, 0..g.hidden, Weight::GAttn, self.spec.eps_attn, visit);
            }
            Stage::QANormed => self.norm(Stage::QA, 0..g.q_rank, Weight::GQ, self.spec.eps_latent, visit),
            Stage::KvCNormed => self.norm(Stage::KvA, 0..g.latent, Weight::GKv, self.spec.eps_latent, visit),
            Stage::QA => self.project((stage, form), Stage::AttnIn, g.hidden, Weight::WQA, visit),
            Stage::KvA => self.project((stage, form), Stage::AttnIn, g.hidden, Weight::WKvA, visit),
            Stage::QRaw if g.q_rank == 0 => {
                self.project((stage, form), Stage::AttnIn, g.hidden, Weight::WQ, visit)
            }
            Stage::QRaw => self.project((stage, form), Stage::QANormed, g.q_rank, Weight::WQB, visit),
            Stage::PartOut => self.ranks(form, visit),
            Stage::Out if self.plan.joins(stage, form) => self.sum(form, visit),
            Stage::Out => self.project((stage, form), Stage::AttnOut, g.values(), Weight::WO, visit),
            Stage::Q => self.rotate_q(visit),
            Stage::KPe => self.rotate_k(visit),
            Stage::Cache => self.cache(visit),
            Stage::K => self.keys(visit),
            Stage::V => {
                let Some(w) = self.weights.matrix(Weight::WUv) else { return };
                let all = self.cache_rows(0..g.latent);
                for rows in row_chunks(all.nrows(), TOKEN_CHUNK) {
                    let mut latent = all.slice(s![rows.clone(), ..]).to_owned();
                    let sums = self.operands(&mut latent);
                    self.panels((latent.view(), sums.as_ref()), rows, w, visit);
                }
            }
            Stage::QLatent => {
                let absorb = |h| (Weight::WUk, h * g.latent..(h + 1) * g.latent);
                let nope = |h: usize| {
                    let at = h * g.key();
                    self.source.block(Stage::Q, 0..self.plan.rows(stage, form), at..at + g.nope)
                };
                self.heads((stage, form), g.latent, &nope, &absorb, visit);
            }
            Stage::AttnOut if absorbed => {
                let values = |h| (Weight::WUv, h * g.value..(h + 1) * g.value);
                let rows = 0..self.plan.rows(stage, form);
                let latent = |h: usize| {
                    self.source.block(Stage::OLatent, rows.clone(), h * g.latent..(h + 1) * g.latent)
                };
                self.heads((stage, form), g.value, &latent, &values, visit);
            }
            Stage::PartO | Stage::PartLse => self.attention(stage, of_form, visit),
            Stage::OLatent | Stage::AttnOut | Stage::Lse => {
                self.attention(stage, of_form, visit);
                self.merge(stage, of_form, visit);
            }
        }
    }

    fn hidden(&self, visit: Visit) {
        let x = self.given.hidden.clone();
        visit(Chunk { rows: 0..x.nrows(), cols: 0..x.ncols(), x, terms: Terms::Copy });
    }

    fn norm(&self, input: Stage, cols: Range<usize>, weight: Weight, eps: f64, visit: Visit) {
        let Some(gamma) = self.weights.norm(weight) else { return };
        row_chunks(self.plan.tokens(), TOKEN_CHUNK).into_par_iter().for_each(|rows| {
            let a = self.source.block(input, rows.clone(), cols.clone());
            let z = normalise(a.view(), eps);
            let x = times_gamma(&z, gamma, self.contract.norm_cast);
            let terms = Terms::Norm { len: a.ncols(), z: z.into(), gamma };
            visit(Chunk { rows, cols: 0..x.ncols(), x, terms });
        });
    }

    /// A product with a whole weight: `[rows, K] · [M, K]ᵀ`.
    fn project(&self, (stage, form): Of, input: Stage, k: usize, weight: Weight, visit: Visit) {
        let Some(w) = self.weights.matrix(weight) else { return };
        for rows in row_chunks(self.plan.rows(stage, form), TOKEN_CHUNK) {
            let mut a = self.source.block(input, rows.clone(), 0..k);
            let sums = self.operands(&mut a);
            self.panels((a.view(), sums.as_ref()), rows, w, visit);
        }
    }

    /// `a [rows, K] · [M, K]ᵀ`, a panel of columns at a time.
    fn panels(&self, (a, sums): Left, rows: Range<usize>, w: &dyn Rows, visit: Visit) {
        let norms = self.norms(a);
        for cols in row_chunks(w.rows(), COLUMN_CHUNK) {
            let part = Part { inner: w, rows: cols.clone() };
            let place = (rows.start, cols.start, 0);
            let product = self.multiply(place, a, &part, norms.as_ref());
            let (mut x, terms) = product.terms(a, &part);
            add_sums(&mut x, sums, 0..a.nrows(), &part);
            visit(Chunk { rows: rows.clone(), cols, x, terms });
        }
    }

    /// Rounds the left side of a product as the contract says; what sums of its blocks add, where there are any.
    fn operands(&self, a: &mut Array2<f64>) -> Option<Array2<f64>> {
        let sums = self.contract.operands.sums(a);
        self.contract.operands.round(a);
        sums
    }

    /// Heads that are asked for.
    fn some_heads(&self) -> Vec<usize> {
        let asked = |h: &usize| self.departure.is_none_or(|d| d.only.head(*h));
        (0..self.spec.geometry.heads).filter(asked).collect()
    }

    /// [`multiply`], or what is remembered of it.
    fn multiply(
        &self,
        place: recall::Place,
        a: ArrayView2<f64>,
        w: &dyn Rows,
        norms: Option<&Array2<f64>>,
    ) -> Product {
        let shape = (a.nrows(), w.rows(), norms.is_some());
        recall::product(self.memory, place, shape, || multiply(a, w, norms))
    }

    /// Norms of blocks of the left side, where a bound will ask for them.
    fn norms(&self, a: ArrayView2<f64>) -> Option<Array2<f64>> {
        (self.contract.accumulate != Accumulate::Exact).then(|| block_norms(a))
    }

    /// A product a head: `input(h) [rows, K] · W(h) [width, K]ᵀ`, columns `h·width..`, heads in parallel.
    fn heads(
        &self,
        (stage, form): Of,
        width: usize,
        input: &(dyn Fn(usize) -> Array2<f64> + Sync),
        weight: &(dyn Fn(usize) -> (Weight, Range<usize>) + Sync),
        visit: Visit,
    ) {
        let total = self.plan.rows(stage, form);
        self.some_heads().into_par_iter().for_each(|h| {
            let (which, range) = weight(h);
            let Some(w) = self.weights.matrix(which) else { return };
            let w = dense(w, range, false);
            let mut a = input(h);
            let sums = self.operands(&mut a);
            for rows in row_chunks(total, TOKEN_CHUNK) {
                let a = a.slice(s![rows.clone(), ..]);
                let w = strided(&w);
                let place = (rows.start, h * width, 0);
                let product = self.multiply(place, a, &w, self.norms(a).as_ref());
                let (mut x, terms) = product.terms(a, &w);
                add_sums(&mut x, sums.as_ref(), rows.clone(), &w);
                visit(Chunk { rows, cols: h * width..(h + 1) * width, x, terms });
            }
        });
    }

    /// Rows of the cache in the order of keys of all sequences.
    fn cache_rows(&self, cols: Range<usize>) -> Array2<f64> {
        let mut all = Array2::zeros((self.plan.rows(Stage::K, Some(Form::Fused)), cols.len()));
        for (_, seq, rows) in self.plan.key_rows() {
            all.slice_mut(s![rows, ..]).assign(&self.gather(seq, cols.clone()));
        }
        all
    }

    /// Cache rows of one sequence, by position.
    fn gather(&self, seq: &Sequence, cols: Range<usize>) -> Array2<f64> {
        let mut out = Array2::zeros((seq.slots.len(), cols.len()));
        for (mut row, &slot) in out.rows_mut().into_iter().zip(&seq.slots) {
            row.assign(&self.source.block(Stage::Cache, slot..slot + 1, cols.clone()).row(0));
        }
        out
    }

    fn keys(&self, visit: Visit) {
        let g = &self.spec.geometry;
        let Some(w) = self.weights.matrix(Weight::WUk) else { return };
        let cache = self.cache_rows(0..g.cache());
        for rows in row_chunks(cache.nrows(), TOKEN_CHUNK) {
            let mut latent = cache.slice(s![rows.clone(), ..g.latent]).to_owned();
            let sums = self.operands(&mut latent);
            let latent = latent.view();
            let norms = self.norms(latent);
            // A few heads at a time, so that the rows of the cache are laid out for the product less often.
            let some = self.some_heads();
            for heads in row_chunks(g.heads, (COLUMN_CHUNK / g.nope).max(1)) {
                if !heads.clone().any(|h| some.contains(&h)) {
                    continue;
                }
                let mut lifted = Array2::zeros((heads.len() * g.nope, g.latent));
                let parts: Vec<_> = lifted.axis_chunks_iter_mut(Axis(0), g.nope).zip(heads.clone()).collect();
                parts.into_par_iter().for_each(|(mut part, h)| {
                    part.assign(&dense(w, h * g.latent..(h + 1) * g.latent, true));
                });
                let place = (rows.start, heads.start * g.key(), 0);
                let product = self.multiply(place, latent, &strided(&lifted), norms.as_ref());
                for (i, h) in heads.enumerate() {
                    let own = i * g.nope..(i + 1) * g.nope;
                    let at = h * g.key();
                    let w = part(&strided(&lifted), own.clone());
                    let (mut x, terms) = product.columns(own).terms(latent, &w);
                    add_sums(&mut x, sums.as_ref(), 0..latent.nrows(), &w);
                    visit(Chunk { rows: rows.clone(), cols: at..at + g.nope, x, terms });
                    let x = cache.slice(s![rows.clone(), g.latent..]).to_owned();
                    visit(Chunk {
                        rows: rows.clone(),
                        cols: at + g.nope..at + g.key(),
                        x,
                        terms: Terms::Copy,
                    });
                }
            }
        }
    }

    fn rotate_q(&self, visit: Visit) {
        let g = &self.spec.geometry;
        let table = declared_table(&self.spec.rope, &self.plan.positions, self.contract);
        self.some_heads().into_par_iter().for_each(|h| {
            let cols = h * g.key()..(h + 1) * g.key();
            let mut x = self.source.block(Stage::QRaw, 0..self.plan.tokens(), cols.clone());
            let mut size = Array2::zeros(x.dim());
            let pe = x.slice(s![.., g.nope..]);
            let cast = self.contract.rope_products;
            let turned = rotate_cast(pe, &table, |i| i, self.spec.rope.pairing, cast);
            x.slice_mut(s![.., g.nope..]).assign(&turned.y);
            size.slice_mut(s![.., g.nope..]).assign(&turned.size);
            let mut steps = turned.steps;
            let mut first = g.nope;
            if let Some(t) = self.spec.temperature {
                for (i, p) in self.plan.positions.iter().enumerate() {
                    let f = t.factor(*p);
                    x.row_mut(i).mapv_inplace(|v| v * f);
                    size.row_mut(i).mapv_inplace(|v| v * f);
                    if !steps.is_empty() {
                        steps.row_mut(i).mapv_inplace(|v| v * f.abs());
                    }
                    for j in 0..g.nope {
                        size[[i, j]] = if f == 1.0 { 0.0 } else { x[[i, j]].abs() };
                    }
                }
                first = 0;
            }
            let terms = Terms::Rope { size: size.into(), first, steps: steps.into() };
            visit(Chunk { rows: 0..x.nrows(), cols, x, terms });
        });
    }

    fn rotate_k(&self, visit: Visit) {
        let g = &self.spec.geometry;
        let table = declared_table(&self.spec.rope, &self.plan.positions, self.contract);
        let x = self.source.block(Stage::KvA, 0..self.plan.tokens(), g.latent..g.cache());
        let cast = self.contract.rope_products;
        let turned = rotate_cast(x.view(), &table, |i| i, self.spec.rope.pairing, cast);
        let (size, steps) = (turned.size.into(), turned.steps.into());
        let terms = Terms::Rope { size, first: 0, steps };
        visit(Chunk { rows: 0..turned.y.nrows(), cols: 0..g.rope, x: turned.y, terms });
    }

    fn cache(&self, visit: Visit) {
        let g = &self.spec.geometry;
        let tokens = 0..self.plan.tokens();
        let latent = self.source.block(Stage::KvCNormed, tokens.clone(), 0..g.latent);
        let pe = self.source.block(Stage::KPe, tokens, 0..g.rope);
        let mut x = Array2::from_elem((self.plan.rows(Stage::Cache, None), g.cache()), f64::NAN);
        for (i, seq) in self.plan.sequences.iter().enumerate() {
            for (position, &slot) in seq.slots.iter().enumerate() {
                if position < seq.context {
                    x.row_mut(slot).assign(&self.given.context[i].row(position));
                } else {
                    let t = seq.tokens.start + position - seq.context;
                    x.slice_mut(s![slot, ..g.latent]).assign(&latent.row(t));
                    x.slice_mut(s![slot, g.latent..]).assign(&pe.row(t));
                }
            }
        }
        visit(Chunk { rows: 0..x.nrows(), cols: 0..x.ncols(), x, terms: Terms::Copy });
    }

    /// Attention of rows that have no parts (o_latent, attn_out, lse), or of each part of the others (part_o, part_lse).
    fn attention(&self, stage: Stage, form: Form, visit: Visit) {
        let parts = matches!(stage, Stage::PartO | Stage::PartLse);
        if parts {
            let all = self.plan.part_rows(form);
            for (sequence, seq, rows, own) in self.plan.part_sequences(form) {
                let read = Read { sequence, seq, rows, parts: Some((all, own.start)) };
                self.attend(stage, form, &read, visit);
            }
            return;
        }
        for (sequence, seq, rows) in self.plan.attention_rows(Some(form)) {
            if !self.plan.in_parts(form, seq) {
                self.attend(stage, form, &Read { sequence, seq, rows, parts: None }, visit);
            }
        }
    }

    /// Attention of one sequence.
    fn attend(&self, stage: Stage, form: Form, read: &Read, visit: Visit) {
        let (sequence, seq, rows) = (read.sequence, read.seq, &read.rows);
        let first = read.parts.map_or(rows.start, |(_, own)| own);
        let chunks = row_chunks(seq.tokens.len(), ROW_CHUNK);
        let wanted = |h: usize, i: usize| self.wanted.is_none_or(|w| w(first + i, h));
        let heads: Vec<usize> =
            self.some_heads().into_iter().filter(|h| chunks.iter().any(|c| wanted(*h, c.start))).collect();
        if heads.is_empty() {
            return;
        }
        if let Some(chosen) = self.chosen(sequence) {
            return self.attend_chosen(stage, form, read, chosen, visit);
        }
        let cache = (form == Form::Absorbed).then(|| {
            let all = self.gather(seq, 0..self.spec.geometry.cache());
            match self.listed(sequence) {
                Some(list) => list.of(&all),
                None => all,
            }
        });
        let shared = KeyStats::default();
        let split = seq.phase() == Phase::Decode || self.contract.split_prefill;
        let cut = self.plan.cut(form, seq);
        heads.into_par_iter().for_each(|h| {
            let wanted = |i: usize| wanted(h, i);
            let shared = cache.as_ref().map(|c| (c, &shared));
            self.attend_head(read, h, shared, &wanted, &mut |tokens, head| {
                let whole = 0..head.visible.last().copied().unwrap_or(0);
                let slip = self.slip(sequence);
                // Keys may be listed otherwise than they are: splits are dealt over what is read.
                let ranges = match cut {
                    Cut::Chunks(_) => {
                        let mut ranges = self.plan.part_ranges(form, seq, self.contract);
                        let last = ranges.iter().rposition(|r| !r.is_empty()).unwrap_or(0);
                        ranges[last].end = head.k.rows;
                        let within = |r: Range<usize>| r.start.min(head.k.rows)..r.end.min(head.k.rows);
                        ranges.into_iter().map(within).collect()
                    }
                    Cut::Splits if read.parts.is_some() => {
                        let mut dealt = self.contract.split_ranges(head.k.rows);
                        let own = self.plan.part_ranges(form, seq, self.contract).len();
                        dealt.resize(own.max(dealt.len()), head.k.rows..head.k.rows);
                        dealt
                    }
                    _ => self.contract.split_ranges(head.k.rows),
                };
                let inside = split || matches!(cut, Cut::Chunks(_));
                let Some((all, own)) = read.parts else {
                    let first = rows.start + tokens.start;
                    let to = first..first + tokens.len();
                    if inside && ranges.len() > 1 {
                        // The engine merges its parts itself: there are no partial results to read.
                        self.visit_merged(stage, h, to, (&head, slip), &ranges, visit);
                    } else {
                        self.visit_attended(stage, h, to, (&head, slip), whole, visit);
                    }
                    return;
                };
                for (part, range) in ranges.into_iter().enumerate() {
                    let first = part * all + own + tokens.start;
                    let to = first..first + tokens.len();
                    self.visit_attended(stage, h, to, (&head, slip), range, visit);
                }
            });
        });
    }

    /// Keys of a sequence as they are read, where that is not in order.
    fn listed(&self, sequence: usize) -> Option<&KeyList> {
        self.departure.and_then(|d| d.list(sequence))
    }

    /// What an attention over a sequence does wrong.
    fn slip(&self, sequence: usize) -> Slip<'_> {
        self.departure.map_or(Slip::default(), |d| Slip {
            gone: d.gone(sequence),
            rescale: d.rescale,
            no_last_rescale: d.no_last_rescale,
        })
    }

    fn visit_attended(
        &self,
        stage: Stage,
        h: usize,
        rows: Range<usize>,
        (head, slip): (&Head, Slip),
        range: Range<usize>,
        visit: Visit,
    ) {
        let place = (rows.start, h, range.start);
        let shape = (rows.len(), range.clone(), head.v.cols());
        let attended =
            recall::attention(self.memory, place, shape, || attend_as(head, range, self.contract, slip));
        let lse = matches!(stage, Stage::Lse | Stage::PartLse);
        let (x, width) = if lse {
            let column = Array2::from_shape_vec((rows.len(), 1), attended.lse.clone());
            (column.unwrap_or_default(), 1)
        } else {
            (attended.x.clone(), head.v.cols())
        };
        let terms = Terms::Attention { attended: &attended, head, lse };
        visit(Chunk { rows, cols: h * width..(h + 1) * width, x, terms });
    }

    fn visit_merged(
        &self,
        stage: Stage,
        h: usize,
        rows: Range<usize>,
        (head, slip): (&Head, Slip),
        splits: &[Range<usize>],
        visit: Visit,
    ) {
        let merged = attend_split_as(head, splits, self.contract, slip, self.merge_power());
        let lse = stage == Stage::Lse;
        let x = if lse {
            Array2::from_shape_vec((rows.len(), 1), merged.lse.clone()).unwrap_or_default()
        } else {
            merged.x.clone()
        };
        let cols = h * x.ncols()..(h + 1) * x.ncols();
        visit(Chunk { rows, cols, x, terms: Terms::Split { merged: &merged, head, lse } });
    }

    fn merge_power(&self) -> f64 {
        self.departure.map_or(1.0, |d| d.merge_power)
    }

    /// Calls `f` with the queries, keys and values of a head of a sequence, a few rows at a time: those whose first row,
    /// counted within the sequence, is wanted.
    fn attend_head(
        &self,
        read: &Read,
        h: usize,
        cache: Option<(&Array2<f64>, &KeyStats)>,
        wanted: &dyn Fn(usize) -> bool,
        f: &mut dyn FnMut(Range<usize>, Head),
    ) {
        let (g, seq) = (&self.spec.geometry, read.seq);
        let (mut k, mut v) = (Array2::zeros((0, 0)), Array2::zeros((0, 0)));
        let own = KeyStats::default();
        if cache.is_none() {
            let rows = self.plan.key_rows().find(|(_, s, _)| std::ptr::eq(*s, seq)).map_or(0..0, |r| r.2);
            k = self.source.block(Stage::K, rows.clone(), h * g.key()..(h + 1) * g.key());
            v = self.source.block(Stage::V, rows, h * g.value..(h + 1) * g.value);
            if let Some(list) = self.listed(read.sequence) {
                (k, v) = (list.of(&k), list.of(&v));
            }
        }
        let gain = self.departure.and_then(|d| d.value_gain.get(h)).copied().filter(|f| *f != 1.0);
        let from = self.departure.map_or(0, |d| d.value_from).min(g.rope);
        let own_values = gain.is_some() || from > 0;
        if own_values {
            v = cache.map_or(v, |(c, _)| c.slice(s![.., from..from + g.latent]).to_owned());
            v.mapv_inplace(|v| v * gain.unwrap_or(1.0));
        }
        let size = if read.few(self.departure) { FEW_ROWS } else { ROW_CHUNK };
        for tokens in row_chunks(seq.tokens.len(), size).into_iter().filter(|c| wanted(c.start)) {
            if !read.asked(self.departure, &tokens) {
                continue;
            }
            let rows = seq.tokens.start + tokens.start..seq.tokens.start + tokens.end;
            let seen = |i| match self.departure {
                None => seq.visible(i),
                Some(d) => d.visible(read.sequence, seq.visible(i), seq.keys()),
            };
            let visible: Vec<usize> = tokens.clone().map(seen).collect();
            let scale = self.spec.scale;
            let q = self.source.block(Stage::Q, rows.clone(), h * g.key()..(h + 1) * g.key());
            match cache {
                None => {
                    let (k, v) = (strided(&k), strided(&v));
                    f(tokens, Head { q: q.view(), k, v, visible: &visible, scale, stats: &own });
                }
                Some((c, stats)) => {
                    let mut lifted = Array2::zeros((rows.len(), g.cache()));
                    let latent = self.source.block(Stage::QLatent, rows, h * g.latent..(h + 1) * g.latent);
                    lifted.slice_mut(s![.., ..g.latent]).assign(&latent);
                    lifted.slice_mut(s![.., g.latent..]).assign(&q.slice(s![.., g.nope..]));
                    let k = strided(c);
                    let (v, stats) = match own_values {
                        false => (Strided { cols: g.latent, ..k }, stats),
                        true => (strided(&v), &own),
                    };
                    f(tokens, Head { q: lifted.view(), k, v, visible: &visible, scale, stats });
                }
            }
        }
    }

    /// Rows computed in parts: merged from part_o and part_lse.
    fn merge(&self, stage: Stage, form: Form, visit: Visit) {
        let g = &self.spec.geometry;
        let (splits, all) = (self.plan.parts(form), self.plan.part_rows(form));
        if all == 0 {
            return;
        }
        // Row of the result and row within each part, a few neighbours at a time.
        let some: Vec<(Range<usize>, usize)> = self
            .plan
            .part_sequences(form)
            .flat_map(|(_, _, rows, own)| {
                let chunks = row_chunks(rows.len(), ROW_CHUNK).into_iter();
                chunks.map(move |c| (rows.start + c.start..rows.start + c.end, own.start + c.start))
            })
            .collect();
        let lse = stage == Stage::Lse;
        let width = if form == Form::Absorbed { g.latent } else { g.value };
        let part_lse = self.source.block(Stage::PartLse, 0..splits * all, 0..g.heads);
        self.some_heads().into_par_iter().for_each(|h| {
            let cols = h * width..(h + 1) * width;
            let part_o = (!lse).then(|| self.source.block(Stage::PartO, 0..splits * all, cols.clone()));
            for (rows, own) in &some {
                let n = rows.len();
                let mut spread = vec![0.0; n];
                let (mut x, mut size) = match lse {
                    true => (Array2::zeros((n, 1)), Array2::zeros((0, 0))),
                    false => (Array2::zeros((n, width)), Array2::zeros((n, width))),
                };
                for i in 0..n {
                    let l: Vec<f64> = (0..splits).map(|s| part_lse[[s * all + own + i, h]]).collect();
                    let (w, total) = merge_weights_as(&l, self.merge_power());
                    let apart = |(v, w): (&f64, &f64)| if *w > 0.0 { (v - total).abs() } else { 0.0 };
                    spread[i] = l.iter().zip(&w).map(apart).fold(0.0, f64::max);
                    let Some(o) = &part_o else {
                        x[[i, 0]] = total;
                        continue;
                    };
                    for (s, w) in w.iter().enumerate().filter(|(_, w)| **w != 0.0) {
                        for (j, v) in o.row(s * all + own + i).iter().enumerate() {
                            x[[i, j]] += w * v;
                            size[[i, j]] += (w * v).abs();
                        }
                    }
                }
                let cols = if lse { h..h + 1 } else { cols.clone() };
                let terms = Terms::Merge { spread, size, splits, lse };
                visit(Chunk { rows: rows.clone(), cols, x, terms });
            }
        });
    }
}

/// What one sequence's attention reads and writes.
struct Read<'a> {
    sequence: usize,
    seq: &'a Sequence,
    /// Its rows of attention.
    rows: Range<usize>,
    /// Rows of each part of the form and the first of its own among them, where parts are rows of their own.
    parts: Option<(usize, usize)>,
}

impl Read<'_> {
    /// Whether only some rows are asked for.
    fn few(&self, departure: Option<&Departure>) -> bool {
        departure.is_some_and(|d| !d.only.rows.is_empty())
    }

    /// Whether any of these tokens is asked for.
    fn asked(&self, departure: Option<&Departure>, tokens: &Range<usize>) -> bool {
        let Some(only) = departure.map(|d| &d.only).filter(|o| !o.rows.is_empty()) else { return true };
        match self.parts {
            Some((rows, own)) => only.rows.chunks(rows.max(1)).any(|part| {
                part.get(own + tokens.start..own + tokens.end).is_some_and(|r| r.contains(&true))
            }),
            None => only.any(self.rows.start + tokens.start..self.rows.start + tokens.end),
        }
    }
}

/// `0..n` in pieces of at most `size`.
pub fn row_chunks(n: usize, size: usize) -> Vec<Range<usize>> {
    (0..n).step_by(size.max(1)).map(|a| a..(a + size).min(n)).collect()
}

/// The left side of a product, rounded, and what sums of its blocks add.
type Left<'a> = (ArrayView2<'a, f64>, Option<&'a Array2<f64>>);

/// Adds Σ over blocks of (s − d·Σq) times the smallest weight of the block ([`crate::operands`]); `rows`: which of `sums`.
fn add_sums(x: &mut Array2<f64>, sums: Option<&Array2<f64>>, rows: Range<usize>, w: &dyn Rows) {
    let Some(sums) = sums else { return };
    let sums = sums.slice(s![rows, ..]);
    let block = w.cols() / sums.ncols().max(1);
    for (j, mut column) in x.columns_mut().into_iter().enumerate() {
        let row = dense(w, j..j + 1, false);
        let least =
            |b: usize| row.slice(s![0, b * block..(b + 1) * block]).fold(f64::INFINITY, |m, v| m.min(*v));
        let least: Vec<f64> = (0..sums.ncols()).map(least).collect();
        for (x, sums) in column.iter_mut().zip(sums.rows()) {
            *x += sums.iter().zip(&least).map(|(s, m)| s * m).sum::<f64>();
        }
    }
}

/// a · wᵀ with what its bounds and noise need; all but `x` empty where nobody asked.
pub(crate) struct Product {
    pub(crate) x: Array2<f64>,
    pub(crate) size: Array2<f64>,
    pub(crate) a_norms: Vec<f64>,
    pub(crate) w_norms: Vec<f64>,
}

impl Product {
    /// Some columns.
    fn columns(&self, cols: Range<usize>) -> Product {
        let some =
            |m: &Array2<f64>| if m.is_empty() { m.clone() } else { m.slice(s![.., cols.clone()]).to_owned() };
        Product {
            x: some(&self.x),
            size: some(&self.size),
            a_norms: self.a_norms.clone(),
            w_norms: self.w_norms.get(cols.clone()).unwrap_or(&[]).to_vec(),
        }
    }

    /// The value and its terms.
    fn terms<'t>(self, a: ArrayView2<'t, f64>, w: &'t dyn Rows) -> (Array2<f64>, Terms<'t, 't>) {
        let terms = Terms::Product {
            len: a.ncols(),
            size: self.size.into(),
            a_norms: self.a_norms.into(),
            w_norms: self.w_norms.into(),
            a,
            w,
        };
        (self.x, terms)
    }
}

/// a · wᵀ, and where the norms of a's blocks are given an upper bound of Σ|a·w| for each element:
/// Σ over blocks of 128 of ‖a_b‖·‖w_b‖.
fn multiply(a: ArrayView2<f64>, w: &dyn Rows, norms: Option<&Array2<f64>>) -> Product {
    let (tokens, m) = (a.nrows(), w.rows());
    let none = || Array2::zeros((0, 0));
    let mut x = Array2::zeros((tokens, m));
    let a = a.as_standard_layout();
    let (a_norms, w_norms) = (Vec::new(), Vec::new());
    let (Some(data), Some(out)) = (a.as_slice(), x.as_slice_mut()) else {
        return Product { x, size: none(), a_norms, w_norms };
    };
    let Some(norms) = norms else {
        product(data, tokens, w, out);
        return Product { x, size: none(), a_norms, w_norms };
    };
    let blocks = w.cols().div_ceil(128);
    let mut squares = vec![0.0; m * blocks];
    product_with_norms(data, tokens, w, out, &mut squares);
    let whole = |squares: f64| squares.sqrt();
    let w_norms = squares.chunks_exact(blocks.max(1)).map(|b| whole(b.iter().sum())).collect();
    let a_norms = norms.rows().into_iter().map(|b| whole(b.iter().map(|v| v * v).sum())).collect();
    squares.iter_mut().for_each(|v| *v = v.sqrt());
    let mut size = Array2::zeros((tokens, m));
    if let (Some(n), Some(size)) = (norms.as_slice(), size.as_slice_mut()) {
        product(n, tokens, &Dense { data: &squares, cols: blocks }, size);
    }
    Product { x, size, a_norms, w_norms }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Σ over blocks of 128 columns of ‖a_b‖·‖w_b‖, in plain loops: never below Σ|a·w|, equal to it where
    /// |a| and |w| are in proportion inside each block.
    #[test]
    fn sizes_of_products_are_blockwise_norms() {
        let value = |i: usize, j: usize| ((i * 7919 + j * 31) % 101) as f64 / 50.0 - 1.0;
        let a = Array2::from_shape_fn((3, 300), |(i, j)| value(i, j));
        let mut w = Array2::from_shape_fn((5, 300), |(i, j)| value(i + 9, 2 * j));
        // The first row of w is the first of a, another sign and size in each block.
        for j in 0..300 {
            w[[0, j]] = a[[0, j]] * [2.0, -3.0, 0.5][j / 128];
        }
        let p = multiply(a.view(), &strided(&w), Some(&block_norms(a.view())));
        let (x, size) = (&p.x, &p.size);
        for i in 0..3 {
            for m in 0..5 {
                let sum = |r: Range<usize>, f: &dyn Fn(usize) -> f64| r.map(f).sum::<f64>();
                let square = |v: f64| v * v;
                let want: f64 = [0..128, 128..256, 256..300]
                    .map(|r| {
                        let n = |f: &dyn Fn(usize) -> f64| sum(r.clone(), &|j| square(f(j))).sqrt();
                        n(&|j| a[[i, j]]) * n(&|j| w[[m, j]])
                    })
                    .iter()
                    .sum();
                let terms = sum(0..300, &|j| (a[[i, j]] * w[[m, j]]).abs());
                assert!((size[[i, m]] - want).abs() <= 1e-13 * want, "{i} {m}");
                assert!(size[[i, m]] >= terms * (1.0 - 1e-13), "{i} {m}");
                assert!((x[[i, m]] - sum(0..300, &|j| a[[i, j]] * w[[m, j]])).abs() <= 1e-13 * want);
                assert!(i + m > 0 || (size[[i, m]] - terms).abs() <= 1e-13 * want);
                let n = |f: &dyn Fn(usize) -> f64| sum(0..300, &|j| square(f(j))).sqrt();
                assert!((p.a_norms[i] / n(&|j| a[[i, j]]) - 1.0).abs() < 1e-13);
                assert!((p.w_norms[m] / n(&|j| w[[m, j]]) - 1.0).abs() < 1e-13);
            }
        }
    }
}
