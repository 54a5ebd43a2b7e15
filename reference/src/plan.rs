/*!
The plan of a run: which rows the stages work on.

All requests of a batch are stacked, and both regimes stand beside each other, so that a stage which they
share is computed once and each weight is read once a product. Every tensor of the stage table is a matrix
of rows and columns here; [`Plan::rows`] says how many rows, [`Plan::names`] what they are.
*/

use crate::route::Route;
use crate::stage::{Axis, Form, Phase, Scope, Stage};
use ndarray::Array2;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How the context rows of the cache were drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Regime {
    /// Random directions.
    Random,
    /// Some rows aligned with queries, so that a quarter of the heads attends to one key above all.
    Peaked,
}

impl Regime {
    /// Both.
    pub const ALL: [Regime; 2] = [Regime::Random, Regime::Peaked];
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Regime::Random => "random",
            Regime::Peaked => "peaked",
        }
    }
}

/// One request in one regime: new tokens on top of a context, with a page table of its own.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Index of the request in the batch.
    pub request: usize,
    /// How its context was drawn.
    pub regime: Regime,
    /// Rows of its new tokens among the stacked tokens.
    pub tokens: Range<usize>,
    /// Tokens in the cache before.
    pub context: usize,
    /// Slot (page · page size + place) of each key position, `context + tokens.len()` of them.
    pub slots: Vec<usize>,
}

impl Sequence {
    /// Keys of the whole sequence.
    pub fn keys(&self) -> usize {
        self.context + self.tokens.len()
    }
    /// Prefill or decode.
    pub fn phase(&self) -> Phase {
        if self.tokens.len() == 1 { Phase::Decode } else { Phase::Prefill }
    }
    /// Keys that its `i`-th new token sees: causal by position.
    pub fn visible(&self, i: usize) -> usize {
        self.context + i + 1
    }
}

/// What is given from outside: not computed, not judged beyond being copied right.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// Hidden states, [token, hidden], on the grid of the activations.
    pub hidden: Array2<f64>,
    /// Cache rows of each sequence's context, [context, latent+rope], on the grid of the activations.
    pub context: Vec<Array2<f64>>,
    /// Sparse attention: the keys of each sequence that its new tokens attend to. Empty: all that they see.
    pub selection: Vec<Selection>,
}

/// Key positions that each new token of a sequence attends to, in the order in which they are read, whatever chose them: the
/// layer's own indexer, or that of a layer before.
pub type Selection = Vec<Vec<usize>>;

/// Rows of all stages.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Position of each stacked token.
    pub positions: Vec<u64>,
    /// Request of each stacked token.
    pub token_request: Vec<usize>,
    /// Sequences: every request in the first regime, those with a context in the second.
    pub sequences: Vec<Sequence>,
    /// Slots of a page.
    pub page_size: usize,
    /// Pages of the pool, unused ones included.
    pub pages: usize,
    /// Splits of the keys in decode.
    pub splits: usize,
    /// Ranks of tensor parallelism whose tensors are put together; 0 or 1: none. Each holds an equal run of the heads.
    pub ranks: usize,
    /// Which form serves which sequence, and chunks of context.
    pub route: Route,
}

/// What a row of a tensor is, in words that a user knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowName {
    /// Sequence, where the row belongs to one.
    pub sequence: Option<usize>,
    /// Request, where the row belongs to one.
    pub request: Option<usize>,
    /// Index within the request: new token, or key position.
    pub index: usize,
    /// Split of the keys.
    pub split: Option<usize>,
    /// Rank, where there are several and the row is one's own.
    pub rank: Option<usize>,
}

impl Plan {
    /// New tokens of all requests.
    pub fn tokens(&self) -> usize {
        self.positions.len()
    }

    /// Sequences that a form serves with the range of their rows of attention: new tokens, sequence after sequence. None: of
    /// all sequences.
    pub fn attention_rows(
        &self,
        form: Option<Form>,
    ) -> impl Iterator<Item = (usize, &Sequence, Range<usize>)> {
        let mut at = 0;
        let served = self.sequences.iter().enumerate().filter(move |(_, s)| self.serves(form, s));
        served.map(move |(i, s)| {
            let r = at..at + s.tokens.len();
            at = r.end;
            (i, s, r)
        })
    }

    /// The same for rows of k and v: key positions, sequence after sequence, of the fused form.
    pub fn key_rows(&self) -> impl Iterator<Item = (usize, &Sequence, Range<usize>)> {
        let mut at = 0;
        self.attention_rows(Some(Form::Fused)).map(move |(i, s, _)| {
            let r = at..at + s.keys();
            at = r.end;
            (i, s, r)
        })
    }

    /// Rows of a stage's matrix in a form; the columns are the product of its other axes. `form`: None for stages that forms
    /// share; of others, rows of all sequences.
    pub fn rows(&self, stage: Stage, form: Option<Form>) -> usize {
        match stage {
            Stage::Cache => self.pages * self.page_size,
            Stage::K | Stage::V => self.key_rows().map(|(_, s, _)| s.keys()).sum(),
            Stage::QLatent => self.latent_tokens(),
            Stage::PartO | Stage::PartLse => form.map_or(0, |form| self.parts(form) * self.part_rows(form)),
            Stage::PartOut => self.ranks * self.rows(Stage::Out, form),
            Stage::OLatent | Stage::Lse | Stage::AttnOut | Stage::Out => {
                self.attention_rows(form).map(|(_, s, _)| s.tokens.len()).sum()
            }
            _ => self.tokens(),
        }
    }

    /// Stacked tokens that the absorbed form serves: the first ones, since it comes first where requests are routed.
    fn latent_tokens(&self) -> usize {
        let served = self.attention_rows(Some(Form::Absorbed)).map(|(_, s, _)| s.tokens.end);
        if self.route.threshold.is_some() { served.max().unwrap_or(0) } else { self.tokens() }
    }

    /// Whether the stage exists in this plan: a form needs sequences, parts need sequences that are computed in parts.
    pub fn has(&self, stage: Stage, form: Option<Form>) -> bool {
        let form = match stage.row().scope {
            Scope::Shared => return true,
            Scope::Only(form) => Some(form),
            Scope::Each => form,
        };
        match (stage, form) {
            (Stage::PartO | Stage::PartLse, Some(form)) => self.part_rows(form) > 0,
            (Stage::PartO | Stage::PartLse, None) => self.has_parts(),
            (Stage::PartOut, form) => self.ranks > 1 && form.is_none_or(|form| self.has_form(form)),
            (_, Some(form)) => self.has_form(form),
            (_, None) => true,
        }
    }

    /// Whether rows of the stage are put together from parts: of the keys, or of ranks.
    pub fn joins(&self, stage: Stage, form: Option<Form>) -> bool {
        self.has(if stage == Stage::Out { Stage::PartOut } else { Stage::PartO }, form)
    }

    /// Lengths of the axes of a stage in this plan.
    pub fn shape(&self, stage: Stage, form: Option<Form>, g: &crate::Geometry) -> Vec<usize> {
        let mut rows = self.rows(stage, form);
        let parts = form.map_or(1, |form| self.parts(form));
        stage
            .axes(form)
            .iter()
            .map(|a| match a {
                Axis::Page => {
                    rows = self.page_size;
                    self.pages
                }
                Axis::Split => {
                    rows /= parts;
                    parts
                }
                Axis::Rank => {
                    rows /= self.ranks.max(1);
                    self.ranks
                }
                other => other.len(g).unwrap_or(rows),
            })
            .collect()
    }

    /// What the rows of a stage are in a form: one entry a row.
    pub fn names(&self, stage: Stage, form: Option<Form>) -> Vec<RowName> {
        let of = |sequence: usize, s: &Sequence, index| RowName {
            sequence: Some(sequence),
            request: Some(s.request),
            index,
            split: None,
            rank: None,
        };
        match stage {
            Stage::Cache => {
                let none = RowName { sequence: None, request: None, index: 0, split: None, rank: None };
                let mut all = vec![none; self.rows(stage, form)];
                for (i, s) in self.sequences.iter().enumerate() {
                    for (position, &slot) in s.slots.iter().enumerate() {
                        all[slot] = of(i, s, position);
                    }
                }
                all
            }
            Stage::K | Stage::V => {
                self.key_rows().flat_map(|(i, s, r)| (0..r.len()).map(move |j| of(i, s, j))).collect()
            }
            Stage::PartO | Stage::PartLse => {
                let Some(form) = form else { return Vec::new() };
                let rows = |(i, s, r, _): (usize, &Sequence, Range<usize>, _)| {
                    (0..r.len()).map(|j| of(i, s, j)).collect::<Vec<_>>()
                };
                let one: Vec<RowName> = self.part_sequences(form).flat_map(rows).collect();
                let part = |split| one.iter().map(move |n| RowName { split: Some(split), ..*n });
                (0..self.parts(form)).flat_map(part).collect()
            }
            Stage::PartOut => {
                let one = self.names(Stage::Out, form);
                let of = |rank| one.iter().map(move |n| RowName { rank: Some(rank), ..*n });
                (0..self.ranks).flat_map(of).collect()
            }
            Stage::OLatent | Stage::Lse | Stage::AttnOut | Stage::Out => self
                .attention_rows(form)
                .flat_map(|(i, s, r)| (0..r.len()).map(move |j| of(i, s, j)))
                .collect(),
            _ => {
                let mut start = 0;
                (0..self.rows(stage, form))
                    .map(|t| {
                        if t > 0 && self.token_request[t] != self.token_request[t - 1] {
                            start = t;
                        }
                        RowName {
                            sequence: None,
                            request: Some(self.token_request[t]),
                            index: t - start,
                            split: None,
                            rank: None,
                        }
                    })
                    .collect()
            }
        }
    }

    /// Phase of each request of the batch.
    pub fn request_phase(&self, request: usize) -> Phase {
        let n = self.token_request.iter().filter(|r| **r == request).count();
        if n == 1 { Phase::Decode } else { Phase::Prefill }
    }
}
