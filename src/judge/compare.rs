/*!
One tensor against its stage, recomputed from the engine's own inputs under one contract.

The judge compares under the declared contract; where that fails it compares again under others
([`super::menu`]) and, to find the place, element by element ([`super::localise`]). All go through [`Isolated`].
*/

use super::chain::{Grown, Slacks, grown};
use super::evidence::{Columns, Evidence, Piece};
use super::predict::Prediction;
use super::reduce;
use super::sample::Sample;
use crate::case::Case;
use crate::trace::{Tensor, TensorId};
use mla_reference::evaluate::{Visit, Wanted};
use mla_reference::recall::Memory;
use mla_reference::{
    Axis as Name, Chunk, Contract, Departure, Evaluator, Phase, RowName, Source, Spec, Stage, Terms, Weights,
};
use ndarray::s;
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Rows that one thread compares at a time.
const ROWS: usize = 32;

/// A stage with everything that it is recomputed from.
#[derive(Clone, Copy)]
pub struct Isolated<'a> {
    /// The layer's numbers.
    pub spec: &'a Spec,
    /// Rows, sequences, what is given.
    pub case: &'a Case,
    /// The weights as the engine holds them.
    pub weights: &'a dyn Weights,
    /// The roundings to emulate.
    pub contract: &'a Contract,
    /// The engine's own tensors.
    pub source: &'a dyn Source,
    /// Errors of those of `source` that were not captured but computed here.
    pub slacks: Slacks<'a>,
    /// Seed of the sample.
    pub seed: u64,
    /// Rows and heads of an attention that are wanted; None: all.
    pub wanted: Option<Wanted<'a>>,
    /// In what attention departs from its formula, under a hypothesis; None: in nothing.
    pub departure: Option<&'a Departure>,
    /// Where the reference of this stage from these inputs may be known. Of this contract, weights and inputs alone: whoever
    /// changes one of them forgets it.
    pub memory: Memory<'a>,
}

/// Takes a piece of the reference: rows, columns, the engine's values, x, and how far it may be.
pub type Watch<'w> = &'w (dyn Fn(&Piece) + Sync);

impl Isolated<'_> {
    /// Phase of each row of a stage: rows that nobody owns (free slots of the cache) go with the first phase there is.
    pub fn phases(&self, id: TensorId) -> Vec<Phase> {
        let of: Vec<Phase> = (0..self.case.batch.0.len()).map(|r| self.case.plan.request_phase(r)).collect();
        let first = *of.iter().min().unwrap_or(&Phase::Prefill);
        let phase = |n: &RowName| n.request.map_or(first, |r| of[r]);
        self.case.plan.names(id.stage, id.form).iter().map(phase).collect()
    }

    /// Rows of a tensor that are, bit for bit, an earlier row of their phase: of equal tokens, of keys that stand twice in a
    /// context. An honest engine errs in them as it did in the first, so as evidence they count once.
    fn copies(&self, id: TensorId, tensor: &Tensor, phases: &[Phase]) -> Vec<bool> {
        let g = &self.spec.geometry;
        // Keys: the rotated part knows its position, and is copied.
        let parts: Vec<Range<usize>> = match id.stage {
            Stage::K => (0..g.heads).map(|h| h * g.key()..h * g.key() + g.nope).collect(),
            _ => std::iter::once(0..tensor.cols).collect(),
        };
        let bytes = |row: usize, part: &Range<usize>| {
            let n = tensor.dtype.bytes();
            let at = |col: usize| (row * tensor.cols + col) * n;
            tensor.bytes.get(at(part.start)..at(part.end)).unwrap_or_default()
        };
        let same = |a: usize, b: usize| parts.iter().all(|p| bytes(a, p) == bytes(b, p));
        let mut seen: HashMap<(Phase, &[u8]), Vec<usize>> = HashMap::new();
        let mut copy = |row: usize| {
            let first = parts.first().map(|p| bytes(row, p)).unwrap_or_default();
            let like = seen.entry((phases[row], &first[..first.len().min(32)])).or_default();
            let found = like.iter().any(|other| same(row, *other));
            if !found {
                like.push(row);
            }
            found
        };
        (0..phases.len()).map(&mut copy).collect()
    }

    /// Counts everything of a tensor, phase by phase.
    pub fn compare(&self, id: TensorId, tensor: &Tensor, watch: Option<Watch>) -> BTreeMap<Phase, Evidence> {
        let phases = self.phases(id);
        let columns = columns(tensor);
        let copies = self.copies(id, tensor, &phases);
        let mut samples = BTreeMap::new();
        for phase in &phases {
            samples.entry(*phase).or_insert(0usize);
            samples.entry(*phase).and_modify(|n| *n += columns.heads);
        }
        let samples: BTreeMap<Phase, Sample> = samples
            .into_iter()
            .map(|(phase, pairs)| (phase, Sample::new(self.seed, id, pairs, columns.width)))
            .collect();
        let names = self.case.plan.names(id.stage, id.form);
        let counted = Mutex::new(BTreeMap::<Phase, Evidence>::new());
        let (rope, tile) = (self.spec.geometry.rope, self.contract.softmax.tile.max(1));
        let count = |piece: &Piece| {
            let mut mine = BTreeMap::<Phase, (Evidence, Vec<usize>)>::new();
            for i in 0..piece.x.nrows() {
                let new = || (Evidence::new(tensor.dtype, columns), Vec::new());
                mine.entry(phases[piece.at.0 + i]).or_insert_with(new).1.push(i);
            }
            for (phase, (evidence, rows)) in &mut mine {
                evidence.count(piece, rows, &copies);
                rows.retain(|i| !copies[piece.at.0 + i]);
                evidence.directions(piece, rows, &samples[phase], rope, tile);
                // Of a selection, keys are places in a list.
                let whose =
                    |row: usize| names.get(row)?.sequence.filter(|_| self.case.given.selection.is_empty());
                evidence.lost_keys(piece, rows, &samples[phase], &whose);
            }
            if let Some(watch) = watch {
                watch(piece);
            }
            let mut all = counted.lock().unwrap_or_else(PoisonError::into_inner);
            for (phase, (e, _)) in mine {
                match all.entry(phase) {
                    std::collections::btree_map::Entry::Vacant(v) => drop(v.insert(e)),
                    std::collections::btree_map::Entry::Occupied(mut o) => o.get_mut().merge(e),
                }
            }
        };
        self.pieces(id, tensor, &count);
        counted.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Recomputes a stage and hands it out piece by piece, beside what the engine wrote, from several threads.
    pub fn pieces(&self, id: TensorId, tensor: &Tensor, take: Watch) {
        let temperature = self.spec.temperature.is_some();
        let unit = match id.stage {
            Stage::Lse => 1.0 / self.contract.lse_base.to_natural(),
            _ => 1.0,
        };
        let visit = |c: Chunk| {
            let parts = reduce::grown(self, id, &c, tensor.dtype);
            let mut all = reduce::both(self, &c, grown(self, id, &c), parts);
            // Rows are read as slices.
            let mut whole = c.x.as_standard_layout();
            if unit != 1.0 {
                whole.mapv_inplace(|x| x * unit);
                all.iter_mut()
                    .flat_map(|g| [&mut g.most, &mut g.usual])
                    .for_each(|m| m.mapv_inplace(|e| e * unit));
            }
            let piece = |rows: Range<usize>, terms: &Terms| {
                let own = all.as_ref().map(|g| Grown::rows(g, rows.clone()));
                let x = whole.slice(s![rows.clone(), ..]);
                let prediction = Prediction::new(self.contract, terms, x, tensor.dtype, temperature)
                    .grown(own)
                    .in_unit(unit);
                let at = (c.rows.start + rows.start, c.cols.start);
                let engine = tensor.block(at.0..at.0 + rows.len(), c.cols.clone());
                take(&Piece { at, width: tensor.cols, engine: &engine, x, prediction: &prediction, terms });
            };
            let n = c.x.nrows();
            match &c.terms {
                // One chunk a head: threads are busy with heads.
                Terms::Attention { .. } | Terms::Split { .. } | Terms::Merge { .. } => piece(0..n, &c.terms),
                terms => mla_reference::evaluate::row_chunks(n, ROWS).into_par_iter().for_each(|rows| {
                    let part = terms.rows(rows.clone());
                    piece(rows, part.as_ref().unwrap_or(&Terms::Copy));
                }),
            }
        };
        self.evaluate(id, &visit);
    }

    /// Recomputes a stage, chunk by chunk.
    pub fn evaluate(&self, id: TensorId, visit: Visit) {
        Evaluator {
            spec: self.spec,
            plan: &self.case.plan,
            given: &self.case.given,
            weights: self.weights,
            contract: self.contract,
            source: self.source,
            wanted: self.wanted,
            departure: self.departure,
            memory: self.memory,
        }
        .evaluate(id.stage, id.form, visit);
    }
}

/// Heads and columns of a head of a tensor's matrix view.
pub fn columns(tensor: &Tensor) -> Columns {
    let axis = |name| tensor.axes.iter().position(|a| *a == name).map(|i| tensor.shape[i]);
    let heads = axis(Name::Head).unwrap_or(1).max(1);
    Columns { heads, width: (tensor.cols / heads).max(1) }
}
