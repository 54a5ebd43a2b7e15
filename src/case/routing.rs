/*!
A batch as serving engines route it: who goes first, which way each request goes, and the counts that say so.

The names are vLLM's: a request counts as a decode when it has at most so many new tokens, whatever its context; decodes come
first and go through multi-query attention over the latent cache (the absorbed form), prefills through multi-head attention
over decompressed keys (the fused form).
*/

use super::{Batch, Request};
use serde::{Deserialize, Serialize};

/// Most parts in which a sequence's keys may be attended: splits of decode, or chunks of context and the new tokens.
pub const MOST_PARTS: usize = 1024;

/// Counts of a routed batch; each request once, whatever the regimes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Routed {
    /// Most new tokens of a decode (vLLM's reorder_batch_threshold).
    pub decode_threshold: usize,
    /// New tokens that go through the absorbed form.
    pub num_mqa_tokens: usize,
    /// New tokens that go through the fused form.
    pub num_mha_tokens: usize,
    /// Requests that go through the absorbed form.
    pub num_decodes: usize,
    /// Requests that go through the fused form.
    pub num_prefills: usize,
    /// Whether a prefill has tokens in the cache.
    pub has_context: bool,
    /// Numbers of the batch's requests, from 0, in the order in which they ran.
    pub order: Vec<usize>,
}

impl Routed {
    /// The order in words: the user's requests, as they ran.
    pub fn order_text(&self, batch: &str) -> String {
        let names: Vec<&str> = batch.split(',').collect();
        let one = |i: &usize| format!("{} ({i})", names.get(*i).copied().unwrap_or("?"));
        self.order.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

impl std::fmt::Display for Routed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "num_mqa_tokens {}, num_mha_tokens {}, num_decodes {}, num_prefills {}, has_context {}",
            self.num_mqa_tokens, self.num_mha_tokens, self.num_decodes, self.num_prefills, self.has_context
        )
    }
}

impl Batch {
    /// Requests in the order in which they run: with a threshold, decodes first and else as given.
    pub fn order(&self, threshold: Option<usize>) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.0.len()).collect();
        if let Some(most) = threshold {
            order.sort_by_key(|i| self.0[*i].new > most);
        }
        order
    }

    /// Rows of the batch's tokens, stacked as given, in another order of its requests.
    pub fn tokens(&self, order: &[usize]) -> Vec<usize> {
        let mut first = vec![0; self.0.len()];
        for i in 1..self.0.len() {
            first[i] = first[i - 1] + self.0[i - 1].new;
        }
        order.iter().flat_map(|i| first[*i]..first[*i] + self.0[*i].new).collect()
    }

    /// Most parts in which chunks of context make any request attend: its chunks and its new tokens.
    pub fn parts(&self, threshold: Option<usize>, chunk: usize) -> usize {
        let prefills = |r: &&Request| r.context > 0 && r.new > threshold.unwrap_or(1).max(1);
        self.0.iter().filter(prefills).map(|r| r.context.div_ceil(chunk.max(1)) + 1).max().unwrap_or(1)
    }

    /// What a threshold makes of the batch.
    pub fn routed(&self, threshold: usize) -> Routed {
        let tokens = |some: &[Request]| some.iter().map(|r| r.new).sum();
        let (decodes, prefills): (Vec<Request>, Vec<Request>) =
            self.0.iter().partition(|r| r.new <= threshold);
        Routed {
            decode_threshold: threshold,
            num_mqa_tokens: tokens(&decodes),
            num_mha_tokens: tokens(&prefills),
            num_decodes: decodes.len(),
            num_prefills: prefills.len(),
            has_context: prefills.iter().any(|r| r.context > 0),
            order: self.order(Some(threshold)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(text: &str) -> Batch {
        text.parse().unwrap()
    }

    /// By hand from vLLM's rule: query length ≤ threshold is a decode; decodes first, else as given.
    #[test]
    fn counts_are_those_of_a_batch_in_a_serving_engine() {
        let b = batch("0+64,0+1,64+17,1024+1,0+5");
        let r = b.routed(1);
        assert_eq!((r.num_decodes, r.num_mqa_tokens, r.num_prefills, r.num_mha_tokens), (2, 2, 3, 86));
        assert!(r.has_context);
        assert_eq!(r.order, [1, 3, 0, 2, 4]);
        assert_eq!(r.order_text(&b.to_string()), "0+1 (1), 1024+1 (3), 0+64 (0), 64+17 (2), 0+5 (4)");
        let r = b.routed(17);
        assert_eq!((r.num_decodes, r.num_mqa_tokens, r.has_context), (4, 24, false));
        assert_eq!(r.order, [1, 2, 3, 4, 0]);
        assert_eq!(b.order(None), [0, 1, 2, 3, 4]);
        assert_eq!(batch("0+1,2+1").routed(1).num_prefills, 0);
    }

    #[test]
    fn tokens_follow_their_requests() {
        assert_eq!(batch("0+3,7+1,0+2").tokens(&[1, 0, 2]), [3, 0, 1, 2, 4, 5]);
    }

    #[test]
    fn parts_are_chunks_of_context_and_the_new_tokens() {
        let b = batch("0+64,64+17,1000+1");
        assert_eq!((b.parts(None, 1), b.parts(None, 7), b.parts(None, 100)), (65, 11, 2));
        // Who goes through the absorbed form reads no chunks.
        assert_eq!((b.parts(Some(16), 7), b.parts(Some(17), 7)), (11, 1));
    }
}
