/*! Page tables: which slots of the pool the keys of a sequence lie in. */

use super::Stream;
use mla_reference::Sequence;

/// Pages that sequences need of a pool with pages of this size.
pub(crate) fn needed(sequences: &[Sequence], page_size: usize) -> usize {
    sequences.iter().map(|s| s.keys().div_ceil(page_size)).sum()
}

/// Gives every sequence pages of its own out of a pool of `pages`, shuffled: no order of the pool is that of a request.
pub(crate) fn lay_out(sequences: &mut [Sequence], page_size: usize, pages: usize, mut rng: Stream) {
    let mut order: Vec<usize> = (0..pages).collect();
    for i in (1..pages).rev() {
        order.swap(i, rng.below(i + 1));
    }
    let mut next = order.into_iter();
    for s in sequences {
        let keys = s.keys();
        let own: Vec<usize> = next.by_ref().take(keys.div_ceil(page_size)).collect();
        s.slots = (0..keys).map(|p| own[p / page_size] * page_size + p % page_size).collect();
    }
}
