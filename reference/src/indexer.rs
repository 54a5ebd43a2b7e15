/*!
The sparse indexer (DSA) in float64: which keys a new token attends to.

```text
q[h]    = rope(w_idx_q[h] · q_a_normed)                  heads of `width` columns
k       = rope(LayerNorm(w_idx_k · attn_in) · g + b)     one head, shared
w[h]    = (w_idx_proj[h] · attn_in) / √heads
logit_s = Σ_h w[h] · relu(q[h] · k_s / √width)           over the keys s that the token sees
topk    = the positions of the largest `top_k` logits
```

The *first* columns of a head are rotated, where the attention itself rotates the last, and in a pair order of its own. Where
`hadamard` is set q and k are multiplied by the Sylvester matrix over √width after rope: orthonormal, so logits stay what they
are. A row with no more keys than `top_k` keeps them all. Equal logits: the lower position comes first; engines differ there,
and [`margin`] says which rows leave a choice.
*/

use crate::elementwise::{rope_table, rotate};
use crate::geometry::Rope;
use crate::product::{Rows, product};
use mla_numeric::DType;
use ndarray::{Array2, ArrayView2, s};

/// The scalars of a layer's indexer.
#[derive(Clone, Debug, PartialEq)]
pub struct Indexer {
    /// Heads of the indexer's queries.
    pub heads: usize,
    /// Columns of a head.
    pub width: usize,
    /// Keys that are kept.
    pub top_k: usize,
    /// Rotation of the first columns of a head, two for each frequency.
    pub rope: Rope,
    /// eps of the keys' LayerNorm.
    pub eps: f64,
    /// Whether q and k go through the Hadamard matrix after rope; `width` is a power of two then.
    pub hadamard: bool,
}

/// The weights of a layer's indexer.
pub struct IndexWeights<'a> {
    /// `[heads · width, q_rank]`.
    pub q: Box<dyn Rows + 'a>,
    /// `[width, hidden]`.
    pub k: Box<dyn Rows + 'a>,
    /// Factors of the LayerNorm, `[width]`.
    pub gamma: Vec<f64>,
    /// What the LayerNorm adds, `[width]`.
    pub beta: Vec<f64>,
    /// Weights of the heads, `[heads, hidden]`.
    pub proj: Box<dyn Rows + 'a>,
}

impl Indexer {
    /// Queries of tokens, `[token, heads · width]`, from q_a_normed.
    pub fn queries(&self, weights: &IndexWeights, latent: ArrayView2<f64>, positions: &[u64]) -> Array2<f64> {
        let mut q = times(latent, weights.q.as_ref());
        for h in 0..self.heads {
            let mut own = q.slice_mut(s![.., h * self.width..(h + 1) * self.width]);
            let turned = self.turn(own.to_owned(), positions);
            own.assign(&turned);
        }
        q
    }

    /// Keys of tokens, `[token, width]`, from attn_in.
    pub fn keys(&self, weights: &IndexWeights, attn_in: ArrayView2<f64>, positions: &[u64]) -> Array2<f64> {
        self.keys_of(weights, times(attn_in, weights.k.as_ref()).view(), positions)
    }

    /// The same from what the LayerNorm is given, `[token, width]`.
    pub fn keys_of(&self, weights: &IndexWeights, raw: ArrayView2<f64>, positions: &[u64]) -> Array2<f64> {
        self.turn(layer_norm(raw, &weights.gamma, &weights.beta, self.eps), positions)
    }

    /// Weights of the heads, `[token, heads]`, from attn_in.
    pub fn head_weights(&self, weights: &IndexWeights, attn_in: ArrayView2<f64>) -> Array2<f64> {
        times(attn_in, weights.proj.as_ref()) / (self.heads as f64).sqrt()
    }

    /// Logits, `[row, key]`, of rows that see the first `visible` keys each; −∞ beyond.
    pub fn logits(
        &self,
        q: ArrayView2<f64>,
        head_weights: ArrayView2<f64>,
        k: ArrayView2<f64>,
        visible: &[usize],
    ) -> Array2<f64> {
        let root = (self.width as f64).sqrt();
        let mut all = Array2::zeros((q.nrows(), k.nrows()));
        for h in 0..self.heads {
            let dots = q.slice(s![.., h * self.width..(h + 1) * self.width]).dot(&k.t());
            for ((i, s), dot) in dots.indexed_iter() {
                // Not `max`: that would lose a NaN.
                let passed = if *dot < 0.0 { 0.0 } else { dot / root };
                all[[i, s]] += head_weights[[i, h]] * passed;
            }
        }
        for (mut row, seen) in all.rows_mut().into_iter().zip(visible) {
            row.iter_mut().skip(*seen).for_each(|v| *v = f64::NEG_INFINITY);
        }
        all
    }

    /// Rope on the first columns, and the Hadamard matrix where there is one.
    fn turn(&self, mut x: Array2<f64>, positions: &[u64]) -> Array2<f64> {
        let table = rope_table(&self.rope, positions, DType::F64);
        let turned = 2 * self.rope.inv_freq.len();
        let (y, _) = rotate(x.slice(s![.., ..turned]), &table, |i| i, self.rope.pairing);
        x.slice_mut(s![.., ..turned]).assign(&y);
        if self.hadamard {
            x.rows_mut().into_iter().for_each(|mut row| {
                let mut values = row.to_vec();
                hadamard(&mut values);
                row.iter_mut().zip(values).for_each(|(to, v)| *to = v);
            });
        }
        x
    }
}

/// `a [rows, K] · w [M, K]ᵀ`.
fn times(a: ArrayView2<f64>, w: &dyn Rows) -> Array2<f64> {
    let a = a.as_standard_layout();
    let mut x = Array2::zeros((a.nrows(), w.rows()));
    if let (Some(data), Some(out)) = (a.as_slice(), x.as_slice_mut()) {
        product(data, a.nrows(), w, out);
    }
    x
}

/// `(x − mean) / √(variance + eps) · γ + β` of each row; the variance is that of the row itself, not of a sample.
pub fn layer_norm(x: ArrayView2<f64>, gamma: &[f64], beta: &[f64], eps: f64) -> Array2<f64> {
    let mut y = x.to_owned();
    for mut row in y.rows_mut() {
        let n = row.len() as f64;
        let mean = row.sum() / n;
        row.mapv_inplace(|v| v - mean);
        let root = (row.iter().map(|v| v * v).sum::<f64>() / n + eps).sqrt();
        for ((v, g), b) in row.iter_mut().zip(gamma).zip(beta) {
            *v = *v / root * g + b;
        }
    }
    y
}

/// Times the Sylvester matrix over √n, in place: `H_1 = 1`, `H_2n = (H_n, H_n; H_n, −H_n)`. `x.len()`: a power of two.
pub fn hadamard(x: &mut [f64]) {
    let mut half = 1;
    while half < x.len() {
        for block in x.chunks_exact_mut(2 * half) {
            let (low, high) = block.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let root = (x.len() as f64).sqrt();
    x.iter_mut().for_each(|v| *v /= root);
}

/// Positions of the `k` largest logits of a row, the largest first, the lower position first among equals; −∞ is never kept, so
/// a row with fewer keys gives fewer. A NaN counts as the largest.
pub fn top_k(logits: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).filter(|s| logits[*s] != f64::NEG_INFINITY).collect();
    let rank = |s: usize| if logits[s].is_nan() { f64::INFINITY } else { logits[s] };
    // Stable: equal ones stay in the order of positions. −0 and 0 are equal.
    order.sort_by(|a, b| rank(*b).partial_cmp(&rank(*a)).unwrap_or(std::cmp::Ordering::Equal));
    order.truncate(k);
    order
}

/// How far the last kept logit of a row is above the first that is dropped; ∞ where none is dropped. 0: a tie.
pub fn margin(logits: &[f64], k: usize) -> f64 {
    let next = top_k(logits, k.saturating_add(1));
    match (k.checked_sub(1).and_then(|last| next.get(last)), next.get(k)) {
        (Some(kept), Some(dropped)) => logits[*kept] - logits[*dropped],
        _ => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Pairing;
    use crate::product::Dense;
    use approx::assert_relative_eq;
    use ndarray::array;

    fn small(hadamard: bool) -> Indexer {
        let rope = Rope { inv_freq: vec![1.0], magnitude: 1.0, pairing: Pairing::Half };
        Indexer { heads: 2, width: 4, top_k: 2, rope, eps: 0.25, hadamard }
    }

    #[test]
    fn layer_norm_takes_the_mean_away_first() {
        // mean 2, variance 5, plus eps 4: root 3.
        let y = layer_norm(
            array![[-1.0, 1.0, 3.0, 5.0]].view(),
            &[3.0, 6.0, 3.0, 3.0],
            &[1.0, 0.0, 0.0, 0.5],
            4.0,
        );
        assert_eq!(y, array![[-2.0, -2.0, 1.0, 3.5]]);
    }

    #[test]
    fn hadamard_is_sylvesters_matrix_over_the_root() {
        for i in 0..8 {
            let mut x = [0.0; 8];
            x[i] = 1.0;
            hadamard(&mut x);
            for (j, v) in x.iter().enumerate() {
                // Entry (i, j) is −1 to the number of bits that both have.
                let sign = if (i & j).count_ones() % 2 == 0 { 1.0 } else { -1.0 };
                assert_relative_eq!(*v, sign / 8f64.sqrt(), max_relative = 1e-15);
            }
        }
    }

    /// q of two heads from one latent column, rotated by position in columns 0 and 1 alone.
    #[test]
    fn the_first_columns_of_each_head_rotate() {
        let w: Vec<f64> = (1..=8).map(f64::from).collect();
        let of = |data| Box::new(Dense { data, cols: 1 });
        let weights = IndexWeights { q: of(&w), k: of(&w), gamma: vec![], beta: vec![], proj: of(&w) };
        let q = small(false).queries(&weights, array![[1.0]].view(), &[2]);
        let (c, s) = (2f64.cos(), 2f64.sin());
        for (got, want) in
            q.iter().zip([c - 2.0 * s, 2.0 * c + s, 3.0, 4.0, 5.0 * c - 6.0 * s, 6.0 * c + 5.0 * s, 7.0, 8.0])
        {
            assert_relative_eq!(*got, want, max_relative = 1e-14);
        }
    }

    #[test]
    fn logits_weigh_what_relu_lets_through() {
        let q = array![[1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0]];
        let k = array![[4.0, -6.0, 9.0, 9.0], [-4.0, 6.0, 9.0, 9.0], [f64::NAN, 0.0, 0.0, 0.0]];
        let w = array![[10.0, -1.0], [0.5, 1.0]];
        let l = small(false).logits(q.view(), w.view(), k.view(), &[2, 3]);
        assert_eq!(l.row(0).to_vec(), [20.0, -3.0, f64::NEG_INFINITY]);
        assert_eq!((l[[1, 0]], l[[1, 1]]), (2.0, 6.0));
        assert!(l[[1, 2]].is_nan());
    }

    #[test]
    fn the_matrix_leaves_logits_alone() {
        let f = |i: usize, j: usize| ((i * 7 + j * 13) % 11) as f64 / 5.0 - 1.0;
        let wq: Vec<f64> = (0..24).map(|i| f(i, 3)).collect();
        let wk: Vec<f64> = (0..12).map(|i| f(i, 5)).collect();
        let of = |data, cols| Box::new(Dense { data, cols });
        let gamma = vec![1.0, 2.0, 0.5, 1.5];
        let weights =
            IndexWeights { q: of(&wq, 3), k: of(&wk, 3), gamma, beta: vec![0.1; 4], proj: of(&wq[..6], 3) };
        let x = Array2::from_shape_fn((5, 3), |(i, j)| f(i, j));
        let run = |hadamard| {
            let own = small(hadamard);
            let positions = [0, 1, 2, 3, 4];
            let (q, k) =
                (own.queries(&weights, x.view(), &positions), own.keys(&weights, x.view(), &positions));
            let w = own.head_weights(&weights, x.view());
            (own.logits(q.view(), w.view(), k.view(), &[5; 5]), k)
        };
        let ((plain, k), (rotated, turned)) = (run(false), run(true));
        assert!((&k - &turned).iter().any(|d| d.abs() > 0.1));
        assert!((&plain - &rotated).iter().all(|d| d.abs() < 1e-14));
        assert!(plain.iter().any(|v| *v != 0.0));
    }

    #[test]
    fn top_k_keeps_the_largest_and_ties_go_to_the_lower_position() {
        let none = f64::NEG_INFINITY;
        let row = [0.5, 2.0, 0.0, -0.0, 2.0, -1.0, none];
        assert_eq!(top_k(&row, 3), [1, 4, 0]);
        assert_eq!(top_k(&row, 4), [1, 4, 0, 2]);
        assert_eq!(top_k(&row, 9), [1, 4, 0, 2, 3, 5]);
        assert_eq!(top_k(&[1.0, f64::NAN, none], 1), [1]);
        assert_eq!(
            [margin(&row, 1), margin(&row, 2), margin(&row, 3), margin(&row, 4)],
            [0.0, 1.5, 0.5, 0.0]
        );
        assert_eq!((margin(&row, 6), margin(&row, 9)), (f64::INFINITY, f64::INFINITY));
        assert_eq!(top_k(&row, 0), Vec::<usize>::new());
    }
}
