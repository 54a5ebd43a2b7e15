/*!
Attention as a GPU kernel computes it: online softmax over tiles of keys, and the merge of splits.

A tile: scores `s` (raw q·k in float32), running maximum m of the raw scores, `c = f32(scale · log2 e)`,
`p = exp2(fma(s, c, −m·c))` in float32, `a = exp2(m_old·c − m·c)`; the row sum `l ← l·a + Σp` takes the
float32 p; `o ← o·a + p̂·V` takes p̂ = p cast to the operands' dtype, relative to the maximum so far. At the end
`o / l` and `lse = fma(m·c, ln 2, ln l)`, a natural logarithm. What a row does not see has p = 0. A row that
sees no key has o = 0 and lse = −∞.

exp2, exp and ln are libm's in float32 (below 1 ulp): the same bits on every machine.
*/

use super::Seams;
use super::matrix::read;
use super::sum::{LANES, Lane, Sum};
use crate::trace::Tensor;
use mla_numeric::DType;
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// Numbers of a kernel.
pub struct Kernel {
    /// How products sum.
    pub sum: Sum,
    /// scale · log2 e.
    pub c: f32,
    /// P is cast to this before P·V.
    pub cast: Option<DType>,
    /// Deliberate faults.
    pub seams: Seams,
}

/// Keys and values of one head, or of all heads of one latent cache, of one sequence.
pub struct Keys<'a> {
    /// Tensor and columns of keys.
    pub k: (&'a Tensor, Range<usize>),
    /// Tensor and columns of values.
    pub v: (&'a Tensor, Range<usize>),
    /// Row of either tensor for each key position.
    pub rows: Vec<usize>,
}

/// Queries that share keys.
pub struct Queries {
    /// [rows, key width].
    pub q: Vec<f32>,
    /// Keys that each row sees, from the first on.
    pub visible: Vec<usize>,
    /// Keys among them that it does not see: a deliberate fault.
    pub hidden: Range<usize>,
}

/// What attention leaves, before the stored dtype's rounding.
pub struct Attended {
    /// [rows, value width].
    pub o: Vec<f32>,
    /// Natural log of the sum of exponentials.
    pub lse: Vec<f32>,
}

/// One tile of keys, turned: keys in lanes for the scores, value columns in lanes for P·V.
struct Tile {
    k: Vec<Lane>,
    v: Vec<Lane>,
    keys: Range<usize>,
}

impl Keys<'_> {
    fn tile(&self, keys: Range<usize>) -> Tile {
        let (kw, vw, n) = (self.k.1.len(), self.v.1.len(), keys.len());
        let mut k = vec![[0.0; LANES]; n.div_ceil(LANES) * kw];
        let mut v = vec![[0.0; LANES]; vw.div_ceil(LANES) * n];
        let (mut key, mut value) = (vec![0.0; kw], vec![0.0; vw]);
        for (t, &row) in self.rows[keys.clone()].iter().enumerate() {
            read(self.k.0, row, self.k.1.clone(), &mut key);
            for (lane, x) in k[t / LANES * kw..].iter_mut().zip(&key) {
                lane[t % LANES] = *x;
            }
            read(self.v.0, row, self.v.1.clone(), &mut value);
            for (j, x) in value.chunks(LANES).enumerate() {
                v[j * n + t][..x.len()].copy_from_slice(x);
            }
        }
        Tile { k, v, keys }
    }
}

/// Running state of the rows of a [`Queries`].
struct State {
    /// Largest raw score, −∞ before the first.
    m: Vec<f32>,
    /// m · c.
    mc: Vec<f32>,
    l: Vec<f32>,
    /// [⌈value width / LANES⌉][rows][LANES]
    o: Vec<Lane>,
}

impl Kernel {
    /// Attends over these tiles.
    pub fn attend(&self, queries: &Queries, keys: &Keys, tiles: &[Range<usize>]) -> Attended {
        let (rows, width) = (queries.visible.len(), keys.v.1.len());
        let mut state = State {
            m: vec![f32::NEG_INFINITY; rows],
            mc: vec![0.0; rows],
            l: vec![0.0; rows],
            o: vec![[0.0; LANES]; width.div_ceil(LANES) * rows],
        };
        let most = queries.visible.iter().copied().max().unwrap_or(0);
        for tile in tiles.iter().filter(|t| !t.is_empty() && t.start < most) {
            self.step(queries, &keys.tile(tile.clone()), &mut state);
        }
        let State { m, mc, l, o } = state;
        let (mut out, mut empty) = (vec![0.0; rows * width], Vec::new());
        for (i, line) in out.chunks_exact_mut(width.max(1)).enumerate() {
            if m[i] == f32::NEG_INFINITY && l[i] == 0.0 {
                empty.push(i);
                continue;
            }
            for (j, x) in line.iter_mut().enumerate() {
                *x = o[j / LANES * rows + i][j % LANES] / l[i];
            }
        }
        let lse = mc.iter().zip(&l).map(|(mc, l)| mc.mul_add(LN_2, libm::logf(*l)));
        let mut lse: Vec<f32> = lse.collect();
        if self.seams.empty_lse {
            empty.into_iter().for_each(|i| lse[i] = 0.0);
        }
        Attended { o: out, lse }
    }

    fn step(&self, queries: &Queries, tile: &Tile, state: &mut State) {
        let (rows, n) = (queries.visible.len(), tile.keys.len());
        let width = queries.q.len() / rows.max(1);
        // Scores: [panel of keys][row][lane].
        let mut s = vec![[0.0; LANES]; n.div_ceil(LANES) * rows];
        for (x, s) in tile.k.chunks_exact(width).zip(s.chunks_exact_mut(rows)) {
            self.sum.add(&queries.q, x, s);
        }
        let mut p = vec![0.0; rows * n];
        let mut a = vec![1.0; rows];
        for (i, p) in p.chunks_exact_mut(n).enumerate() {
            let seen = queries.visible[i].saturating_sub(tile.keys.start).min(n);
            let sees = |t: usize| {
                let key = tile.keys.start + t;
                t < seen && self.seams.skip_key != Some(key) && !queries.hidden.contains(&key)
            };
            let score = |t: usize| s[t / LANES * rows + i][t % LANES];
            let m = (0..n).filter(|t| sees(*t)).map(score).fold(state.m[i], f32::max);
            let any_nan = (0..n).any(|t| sees(t) && score(t).is_nan());
            if m == f32::NEG_INFINITY && !any_nan {
                continue;
            }
            let mc = if m == f32::NEG_INFINITY { 0.0 } else { m * self.c };
            let last = self.seams.no_last_rescale && queries.visible[i] <= tile.keys.end;
            if state.m[i] != f32::NEG_INFINITY && !self.seams.no_rescale && !last {
                a[i] = libm::exp2f(state.mc[i] - mc);
            }
            (state.m[i], state.mc[i]) = (m, mc);
            // Eight partial sums of p, then a tree, as the threads of a row add up.
            let mut l = [0f32; LANES];
            for (t, p) in p.iter_mut().enumerate().filter(|(t, _)| sees(*t)) {
                *p = libm::exp2f(score(t).mul_add(self.c, -mc));
                l[t % LANES] += *p;
            }
            let total = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
            state.l[i] = state.l[i] * a[i] + total;
            if let Some(cast) = self.cast {
                p.iter_mut().for_each(|p| *p = cast.round(f64::from(*p)) as f32);
            }
        }
        for (v, o) in tile.v.chunks_exact(n).zip(state.o.chunks_exact_mut(rows)) {
            for (o, a) in o.iter_mut().zip(&a).filter(|(_, a)| **a != 1.0) {
                o.iter_mut().for_each(|o| *o *= a);
            }
            self.sum.add(&p, v, o);
        }
    }

    /// Weights of the splits of a row, from their natural lse, and the lse of all.
    ///
    /// The exponential is of base 2, so differences of lse are converted; the seam forgets that the base
    /// matters. Splits without a key (lse −∞) weigh nothing.
    pub fn merge(&self, lse: &[f32]) -> (Vec<f32>, f32) {
        let (lse, power) = self.seams.merging.map_or_else(|| (lse.to_vec(), 1.0), |m| m.lse(lse));
        let most = lse.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if most == f32::NEG_INFINITY && !lse.iter().any(|v| v.is_nan()) {
            return (vec![0.0; lse.len()], most);
        }
        let exp = if self.seams.merge_base_e { libm::expf } else { libm::exp2f };
        let weight = |v: &f32| if *v == f32::NEG_INFINITY { 0.0 } else { exp((v - most) * LOG2_E * power) };
        let mut w: Vec<f32> = lse.iter().map(weight).collect();
        let total: f32 = w.iter().sum();
        w.iter_mut().for_each(|w| *w /= total);
        (w, most + libm::logf(total))
    }
}
