/*!
Cases that probes run: a handful of tokens, few keys, pages that can be laid out another way.

The base case has one request of one token and the first token of a prefill (one visible key each, by either
phase's path), and one decode step over a context that passes a page's end where pages are short enough; its
first context rows are one-hot latents. Hidden states and the other rows are standard normal: the size of
values is nothing that a probe depends on.
*/

use crate::case::pages::{lay_out, needed};
use crate::case::{Batch, Case, Request, Stream};
use mla_numeric::DType;
use mla_reference::{Given, Plan, Regime, Sequence};
use ndarray::Array2;

/// Pages that nobody owns.
const SPARE: usize = 3;

const PAGES: u64 = 0x9a6e;
const HIDDEN: u64 = 0x41dd;
const ROWS: u64 = 0x0c08;
const INDEX: u64 = 0x1dec;

/// What all cases of a run have in common.
#[derive(Clone, Copy, Debug)]
pub struct Common {
    /// Seed of everything drawn.
    pub seed: u64,
    /// Slots of a page.
    pub page_size: usize,
    /// Splits of the keys in decode.
    pub splits: usize,
    /// Dtype of the engine's activations.
    pub dtype: DType,
    /// Width of the hidden state.
    pub hidden: usize,
    /// Columns of the latent, and of a row of the cache.
    pub latent: usize,
    /// Columns of a row of the cache.
    pub cache: usize,
}

impl Common {
    /// The base case. `latents` are the columns of its one-hot context rows, from position 0 on; `context`:
    /// rows in front of the decode step.
    pub fn base(&self, latents: &[usize], context: usize) -> Case {
        let context = context.max(latents.len());
        let requests = [(0, 1), (0, 2), (context, 1)];
        let mut case = self.case(&requests);
        let rows = &mut case.given.context[2];
        for (p, mut row) in rows.rows_mut().into_iter().enumerate() {
            let mut rng = Stream::new(self.seed, ROWS, p as u64);
            for (c, v) in row.iter_mut().enumerate() {
                let drawn = self.dtype.round(rng.normal());
                *v = match latents.get(p) {
                    Some(at) if c < self.latent => f64::from(u8::from(*at == c)),
                    _ => drawn,
                };
            }
        }
        case
    }

    /// One request of one token for each column: its hidden state is one-hot there.
    pub fn one_hot(&self, columns: &[usize]) -> Case {
        let mut case = self.case(&vec![(0, 1); columns.len()]);
        case.given.hidden.fill(0.0);
        for (t, c) in columns.iter().enumerate() {
            case.given.hidden[[t, *c]] = 1.0;
        }
        case
    }

    /// Distinct indices below `n`: the first, the last, others by seed.
    pub fn indices(&self, n: usize, count: usize, what: u64) -> Vec<usize> {
        let mut all = vec![0];
        if n > 1 && count > 1 {
            all.push(n - 1);
        }
        let mut rng = Stream::new(self.seed, INDEX, what);
        while all.len() < count.min(n) {
            let i = rng.below(n);
            if !all.contains(&i) {
                all.push(i);
            }
        }
        all
    }

    fn case(&self, requests: &[(usize, usize)]) -> Case {
        let (mut positions, mut token_request, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
        for (request, &(context, new)) in requests.iter().enumerate() {
            let first = positions.len();
            positions.extend((context..context + new).map(|p| p as u64));
            token_request.extend(std::iter::repeat_n(request, new));
            sequences.push(Sequence {
                request,
                regime: Regime::Random,
                tokens: first..first + new,
                context,
                slots: Vec::new(),
            });
        }
        // An even number, so that no page stays where it is when the pool is mirrored.
        let pages = (SPARE + needed(&sequences, self.page_size)).next_multiple_of(2);
        lay_out(&mut sequences, self.page_size, pages, Stream::new(self.seed, PAGES, 0));
        let mut hidden = Array2::zeros((positions.len(), self.hidden));
        for (t, mut row) in hidden.rows_mut().into_iter().enumerate() {
            let mut rng = Stream::new(self.seed, HIDDEN, t as u64);
            row.mapv_inplace(|_| self.dtype.round(rng.normal()));
        }
        let context = sequences.iter().map(|s| Array2::zeros((s.context, self.cache))).collect();
        Case {
            batch: Batch(requests.iter().map(|&(context, new)| Request { context, new }).collect()),
            regimes: vec![Regime::Random],
            plan: Plan {
                positions,
                token_request,
                sequences,
                page_size: self.page_size,
                pages,
                splits: self.splits,
                ..Plan::default()
            },
            given: Given { hidden, context, ..Given::default() },
            notes: Vec::new(),
        }
    }
}

/// The same case with the pool mirrored: page p is page `pages − 1 − p`.
///
/// A shift would not do: an engine that reads the next page of the pool instead of the table's reads the same
/// rows after a shift of all pages.
pub fn mirrored(case: &Case) -> Case {
    let mut out = case.clone();
    let (size, pages) = (case.plan.page_size, case.plan.pages);
    for slot in out.plan.sequences.iter_mut().flat_map(|s| s.slots.iter_mut()) {
        *slot = (pages - 1 - *slot / size) * size + *slot % size;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMON: Common =
        Common { seed: 3, page_size: 4, splits: 2, dtype: DType::Bf16, hidden: 8, latent: 5, cache: 7 };

    #[test]
    fn the_base_case_has_one_hot_rows_and_passes_a_page() {
        let case = COMMON.base(&[0, 4, 2], 5);
        let seq = &case.plan.sequences[2];
        assert_eq!((seq.context, seq.keys().div_ceil(4)), (5, 2));
        let rows = &case.given.context[2];
        for (p, l) in [0, 4, 2].into_iter().enumerate() {
            assert!((0..5).all(|c| rows[[p, c]] == f64::from(u8::from(c == l))), "{p}");
        }
        assert!(rows.row(3).iter().all(|v| *v != 0.0));
        // Nobody shares a slot, all lie in the pool.
        let mut slots: Vec<usize> = case.plan.sequences.iter().flat_map(|s| s.slots.clone()).collect();
        slots.sort_unstable();
        let n = slots.len();
        slots.dedup();
        assert!(slots.len() == n && slots[n - 1] < case.plan.pages * 4);
    }

    #[test]
    fn mirroring_moves_every_page_and_twice_is_nothing() {
        let case = COMMON.base(&[0], 12);
        let other = mirrored(&case);
        for (a, b) in case.plan.sequences.iter().zip(&other.plan.sequences) {
            assert!(a.slots.iter().zip(&b.slots).all(|(a, b)| a / 4 != b / 4 && a % 4 == b % 4));
        }
        let back = mirrored(&other);
        assert!(case.plan.sequences.iter().zip(&back.plan.sequences).all(|(a, b)| a.slots == b.slots));
    }

    #[test]
    fn indices_are_distinct_and_have_both_ends() {
        let i = COMMON.indices(5, 4, 0);
        assert_eq!((i.len(), i[0], i[1]), (4, 0, 4));
        assert!(i.iter().all(|a| i.iter().filter(|b| a == *b).count() == 1));
        assert_eq!(COMMON.indices(2, 6, 0), [0, 1]);
        assert_eq!(COMMON.indices(1, 6, 0), [0]);
    }
}
