/*!
The keys that a case's tokens attend to, where attention is sparse: chosen by a layer's indexer, in float64, from the case's own
hidden states.

Index keys of the context are drawn, as context rows of the cache are: standard normal rows through the LayerNorm and the rotation
of their position. So a selection is what such a model might choose, scattered over the context, another one for each token.
*/

use super::Case;
use super::draw::{Kept, Stream};
use mla_reference::indexer::top_k;
use mla_reference::{IndexWeights, Indexer, Selection, Sequence, Source, Spec, Stage, Weights};
use ndarray::{Array2, Axis, concatenate, s};
use rayon::prelude::*;

/// Number of the stream of index keys, beside those of the draw.
const INDEX: u64 = 5;

/// An indexer, and the layer whose it is.
pub struct Chooser<'a> {
    /// Scalars of the layer.
    pub spec: &'a Spec,
    /// Weights of the layer.
    pub weights: &'a dyn Weights,
    /// Scalars of the indexer.
    pub indexer: &'a Indexer,
    /// Weights of the indexer.
    pub index: &'a IndexWeights<'a>,
    /// Keys that are kept.
    pub top_k: usize,
    /// Seed of the context's index keys.
    pub seed: u64,
}

impl Chooser<'_> {
    /// Gives the case its selections, the largest logit first, and says in its notes what they leave out.
    pub fn choose(&self, case: &mut Case) {
        let (plan, g) = (&case.plan, &self.spec.geometry);
        let kept = Kept::up_to(Stage::QANormed, (self.spec, self.weights), plan, &case.given);
        let tokens = 0..plan.tokens();
        let latent = kept.block(Stage::QANormed, tokens.clone(), 0..g.q_rank);
        let attn_in = kept.block(Stage::AttnIn, tokens, 0..g.hidden);
        let q = self.indexer.queries(self.index, latent.view(), &plan.positions);
        let k = self.indexer.keys(self.index, attn_in.view(), &plan.positions);
        let heads = self.indexer.head_weights(self.index, attn_in.view());
        let of = |seq: &Sequence| -> Selection {
            let own = seq.tokens.clone();
            let new = k.slice(s![own.clone(), ..]);
            let keys = concatenate(Axis(0), &[self.context(seq).view(), new]).unwrap_or_default();
            let visible: Vec<usize> = (0..own.len()).map(|i| seq.visible(i)).collect();
            let (q, heads) = (q.slice(s![own.clone(), ..]), heads.slice(s![own, ..]));
            let logits = self.indexer.logits(q, heads, keys.view(), &visible);
            logits.rows().into_iter().map(|row| top_k(&row.to_vec(), self.top_k)).collect()
        };
        let all: Vec<Selection> = plan.sequences.par_iter().map(of).collect();
        let (mut some, mut rows) = (0, 0);
        for (seq, lists) in plan.sequences.iter().zip(&all) {
            rows += lists.len();
            some += lists.iter().enumerate().filter(|(i, l)| l.len() < seq.visible(*i)).count();
        }
        case.notes.push(format!(
            "sparse attention: {some} of {rows} rows leave keys out, at most {} are kept; which, the layer's indexer in float64 chose, and engines are given it",
            self.top_k
        ));
        case.given.selection = all;
    }

    /// Index keys of a sequence's context, `[context, width]`.
    fn context(&self, seq: &Sequence) -> Array2<f64> {
        let mut raw = Array2::zeros((seq.context, self.indexer.width));
        for (p, mut row) in raw.rows_mut().into_iter().enumerate() {
            let index = ((seq.request as u64) << 40 | (seq.regime as u64) << 39) + p as u64;
            let mut rng = Stream::new(self.seed, INDEX, index);
            row.mapv_inplace(|_: f64| rng.normal());
        }
        let positions: Vec<u64> = (0..seq.context as u64).collect();
        self.indexer.keys_of(self.index, raw.view(), &positions)
    }
}
