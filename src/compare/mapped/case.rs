/*! The case of a dump: requests, positions, pages; and what was given to it: hidden states and context rows. */

use super::super::CompareError;
use super::super::map::{MapContract, Requests};
use super::Reader;
use crate::case::{Batch, Case, Request};
use crate::trace::{Tensor, TensorId};
use mla_reference::{Given, Plan, Regime, Sequence, Stage};
use ndarray::{Array2, s};

impl Reader<'_> {
    pub(super) fn batch(&self) -> Result<Batch, CompareError> {
        let (keys, new) = match &self.map.requests {
            Requests::Given(batch) => return Ok(batch.clone()),
            Requests::Arrays { keys, new } => {
                (self.counts(keys, "lengths")?.1, self.counts(new, "lengths")?.1)
            }
        };
        let all = keys.iter().zip(&new).map(|(k, n)| {
            let context = k.checked_sub(*n).filter(|_| *n > 0)?;
            Some(Request { context, new: *n })
        });
        let all =
            all.collect::<Option<Vec<Request>>>().filter(|_| keys.len() == new.len() && !keys.is_empty());
        let text = all.map(|a| Batch(a).to_string());
        // Read back: the same limits as for batches on the command line.
        text.and_then(|t| t.parse().ok()).ok_or_else(|| {
            self.bad(
                "lengths",
                &format!("keys {keys:?} and new tokens {new:?} are no requests"),
                "name an array of all keys and one of new tokens, one number a request, 1 ≤ new ≤ keys",
            )
        })
    }

    pub(super) fn case(&self, batch: Batch) -> Result<Case, CompareError> {
        let page = self.map.page_size;
        let (mut positions, mut token_request, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
        let mut pages = 0;
        for (i, r) in batch.0.iter().enumerate() {
            let start = positions.len();
            positions.extend((r.context..r.total()).map(|p| p as u64));
            token_request.extend(std::iter::repeat_n(i, r.new));
            let first = pages * page;
            pages += r.total().div_ceil(page);
            sequences.push(Sequence {
                request: i,
                regime: Regime::Random,
                tokens: start..positions.len(),
                context: r.context,
                slots: (first..first + r.total()).collect(),
            });
        }
        if let Some(numbers) = &self.map.positions {
            let given = self.numbers(numbers, "positions")?;
            if given.len() != positions.len() {
                let what = format!("there are {} for {} new tokens", given.len(), positions.len());
                return Err(self.bad("positions", &what, "cut the dump to the tokens of the requests"));
            }
            positions = given.into_iter().map(|p| p as u64).collect();
        }
        Ok(Case {
            batch,
            regimes: vec![Regime::Random],
            plan: Plan {
                positions,
                token_request,
                sequences,
                page_size: page,
                pages,
                splits: 1,
                ..Plan::default()
            },
            given: Given::default(),
            notes: Vec::new(),
        })
    }
    /// Hidden states and context rows from what was captured; of which open stages it is known how they come about.
    pub(super) fn given(&self, case: &mut Case, tensors: &[(TensorId, Tensor)]) -> Vec<Stage> {
        let g = &self.spec.geometry;
        let find = |stage| tensors.iter().find(|t| t.0 == TensorId::shared(stage)).map(|t| &t.1);
        case.given.hidden = match find(Stage::Hidden) {
            Some(h) => h.block(0..h.rows, 0..h.cols),
            None => Array2::from_elem((case.plan.tokens(), g.hidden), f64::NAN),
        };
        let cache = find(Stage::Cache);
        let mut rows = Vec::new();
        for seq in &case.plan.sequences {
            let mut own = Array2::from_elem((seq.context, g.cache()), f64::NAN);
            for (p, slot) in seq.slots.iter().take(seq.context).enumerate() {
                if let Some(c) = cache {
                    own.slice_mut(s![p..p + 1, ..]).assign(&c.block(*slot..slot + 1, 0..g.cache()));
                }
            }
            rows.push(own);
        }
        case.given.context = rows;
        let some = case.plan.sequences.iter().any(|s| s.context > 0);
        if some && cache.is_some() {
            case.notes.push(
                "context rows are the dump's own: what stood in the cache before is taken as it is".into(),
            );
        }
        let mut closed = Vec::new();
        closed.extend((cache.is_some() || !some).then_some(Stage::Cache));
        let declared = matches!(self.map.contract, MapContract::Declared(_) | MapContract::File(..));
        closed.extend(declared.then_some(Stage::AttnIn));
        if declared || self.map.rope.is_some() {
            closed.extend([Stage::Q, Stage::KPe]);
        }
        closed
    }
}
