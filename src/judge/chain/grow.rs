/*!
What errors of inputs do to a stage.

With inputs off by at most E (element by element), an engine's value before its final rounding is within [`Grown::most`]
of the reference from our inputs: the stage's own bound, taken at the engine's inputs, and what the difference of inputs
does. No order is dropped. [`Grown::usual`]: the standard deviation of the second from that of the inputs, S, as if
elements of an input were independent; to first order.

- **Product**: `|Σ (a + d) w − Σ a w| ≤ Σ E_k |w_k| = G`; the bound's own γΣ|a w| grows by γG. `most = B + (1 + γ)G`,
  `usual² = Σ S_k² w_k²`.
- **RMSNorm**: N = √(mean x² + eps) is a norm of the vector (x/√D, √eps), so it moves by at most
  `ν = min(‖E‖/√D, (2Σ|x|E + ΣE²)/(D(2N − ‖E‖/√D)))`, the second from N'² − N². With z = x/N,
  `z' − z = d/N' + z(N − N')/N'`, so `|z' − z| ≤ (E_j + |z_j|ν)/(N − ν) = dz`; nothing is known where ν ≥ N.
  `most = B + (1 + 2⁻¹⁰)|γ|dz` (the relative error ρ of a norm is less than 2⁻¹⁰); a declared cast moves by
  `step(z, ρ|z| + (1 + ρ)dz)` as in [`super::super::bound`].
  `usual² = γ²((S_j/N)² + (z_j √(Σ x²S²)/(D N²))²)`.
- **RoPE**: `G = |cos|E_a + |sin|E_b`, times the temperature; `most = B + (1 + 8u)G`; products that are cast step by
  `u|p| + (1 + u)|cos|E_a`, and so on, in place of G. `usual² = cos²S_a² + sin²S_b²`.
- **Copies**: E and S themselves.
- **Attention**: [`super::attention`].
- **Merge** of partial results: these are captured, or nothing is merged outside ([`super`] attends with splits inside).
*/

use super::super::bound::{bound, rho};
use super::super::compare::Isolated;
use super::attention::{Inputs, Parts};
use super::{Errors, attention, sizes, squares};
use crate::trace::TensorId;
use mla_numeric::U;
use mla_reference::attention::strided;
use mla_reference::elementwise::{declared_table, pair, step};
use mla_reference::product::{Rows, product};
use mla_reference::rows::Mapped;
use mla_reference::{Chunk, Form, Plan, Sequence, Stage, Terms};
use ndarray::{Array2, ArrayView2, s};
use std::ops::Range;

/// What a stage's value may be off by, inputs that were not captured included; `[rows, columns]` of a chunk.
pub struct Grown {
    /// |value before the final rounding − x| is at most this.
    pub most: Array2<f64>,
    /// Standard deviation that is due to inputs.
    pub usual: Array2<f64>,
}

impl Grown {
    /// Some rows.
    pub fn rows(&self, rows: Range<usize>) -> Grown {
        let part = |m: &Array2<f64>| m.slice(s![rows.clone(), ..]).to_owned();
        Grown { most: part(&self.most), usual: part(&self.usual) }
    }
}

/// Of a chunk of a stage; None where no input of it may differ.
pub fn grown(of: &Isolated, id: TensorId, c: &Chunk) -> Option<Grown> {
    // Under a hypothesis that reads other keys, rows of errors are no longer those of keys: less is allowed, and less explained.
    let other_keys = of.departure.is_some_and(|d| !d.keys.is_empty());
    if of.slacks.is_empty() || other_keys && matches!(c.terms, Terms::Attention { .. } | Terms::Split { .. })
    {
        return None;
    }
    let mut grown = match &c.terms {
        Terms::Copy => {
            let e = copied(of, id.stage, c)?;
            Grown { most: e.most, usual: e.usual }
        }
        Terms::Product { len, w, a, .. } => {
            let mut e = left(of, id.stage, c).filter(Errors::any)?;
            for ((a, mut most), mut usual) in
                a.rows().into_iter().zip(e.most.rows_mut()).zip(e.usual.rows_mut())
            {
                let (mut m, mut u) = (most.to_vec(), usual.to_vec());
                of.contract.operands.widen(&a.to_vec(), &mut m, &mut u);
                most.iter_mut().zip(m).for_each(|(to, v)| *to = v);
                usual.iter_mut().zip(u).for_each(|(to, v)| *to = v);
            }
            let gamma = of.contract.accumulate.gamma(*len);
            let mut more = times(e.most.view(), &Mapped { inner: *w, by: f64::abs });
            // Our own sum of positive terms is short by far less than 2⁻³⁰ of itself.
            let factor = (1.0 + gamma) * (1.0 + f64::powi(2.0, -30));
            more.mapv_inplace(|v| v * factor);
            let usual = times(squares(e.usual.view()).view(), &Mapped { inner: *w, by: |v| v * v });
            Grown { most: with_own(of, c, more), usual: usual.mapv(f64::sqrt) }
        }
        Terms::Norm { len, z, gamma } => norm(of, id.stage, c, (*len, z.view(), gamma))?,
        Terms::Rope { first, .. } => rope(of, id.stage, c, *first)?,
        Terms::Attention { attended, head, lse } => {
            let (seq, tokens) = rows_of(&of.case.plan, (id.stage, id.form), &c.rows)?;
            let heads = c.cols.start / c.cols.len().max(1);
            let inputs = Inputs::of(of, id.form, seq, tokens, heads)?;
            attention::grown(of.contract, &Parts::one(attended), head, &inputs, &c.x, *lse)
        }
        Terms::Split { merged, head, lse } => {
            let (seq, tokens) = rows_of(&of.case.plan, (id.stage, id.form), &c.rows)?;
            let inputs = Inputs::of(of, id.form, seq, tokens, c.cols.start / c.cols.len().max(1))?;
            attention::grown(of.contract, &Parts::many(merged), head, &inputs, &c.x, *lse)
        }
        Terms::Merge { .. } | Terms::Sum { .. } => return None,
    };
    // Nothing is known of what has no number.
    grown.most.mapv_inplace(|v| if v.is_nan() { f64::INFINITY } else { v });
    grown.usual.mapv_inplace(|v| if v.is_finite() { v } else { f64::MAX.sqrt() });
    let any = grown.most.iter().any(|v| *v != 0.0);
    any.then_some(grown)
}

/// `more` and the stage's own bound.
fn with_own(of: &Isolated, c: &Chunk, more: Array2<f64>) -> Array2<f64> {
    let own = bound(of.contract, &c.terms, c.x.view(), of.spec.temperature.is_some());
    if own.dim() == more.dim() { own + more } else { more }
}

/// a · wᵀ.
pub(in crate::judge) fn times(a: ArrayView2<f64>, w: &dyn Rows) -> Array2<f64> {
    let rows = a.nrows();
    let mut out = Array2::zeros((rows, w.rows()));
    let a = a.as_standard_layout();
    if let (Some(a), Some(out)) = (a.as_slice(), out.as_slice_mut()) {
        product(a, rows, w, out);
    }
    out
}

/// a · bᵀ of two matrices in memory.
pub fn between(a: ArrayView2<f64>, b: ArrayView2<f64>) -> Array2<f64> {
    times(a, &strided(&b.as_standard_layout().into_owned()))
}

/// Slot of each row of k and v.
fn slots(plan: &Plan, rows: &Range<usize>) -> Vec<usize> {
    let all: Vec<usize> = plan.sequences.iter().flat_map(|s| s.slots.iter().copied()).collect();
    all.get(rows.clone()).unwrap_or_default().to_vec()
}

/// Errors of the left side of a product.
fn left(of: &Isolated, stage: Stage, c: &Chunk) -> Option<Errors> {
    let g = &of.spec.geometry;
    let block = |stage, cols| of.slacks.block(stage, c.rows.clone(), cols);
    match stage {
        Stage::QA | Stage::KvA => block(Stage::AttnIn, 0..g.hidden),
        Stage::QRaw if g.q_rank == 0 => block(Stage::AttnIn, 0..g.hidden),
        Stage::QRaw => block(Stage::QANormed, 0..g.q_rank),
        Stage::K | Stage::V => of.slacks.rows(Stage::Cache, &slots(&of.case.plan, &c.rows), 0..g.latent),
        Stage::QLatent => {
            let at = c.cols.start / g.latent * g.key();
            block(Stage::Q, at..at + g.nope)
        }
        Stage::AttnOut => {
            let at = c.cols.start / g.value * g.latent;
            block(Stage::OLatent, at..at + g.latent)
        }
        Stage::Out => block(Stage::AttnOut, 0..g.values()),
        _ => None,
    }
}

/// Errors of what is copied.
fn copied(of: &Isolated, stage: Stage, c: &Chunk) -> Option<Errors> {
    let (g, plan) = (&of.spec.geometry, &of.case.plan);
    match stage {
        Stage::K => of.slacks.rows(Stage::Cache, &slots(plan, &c.rows), g.latent..g.cache()),
        Stage::Cache => {
            let tokens = 0..plan.tokens();
            let parts = [
                (of.slacks.block(Stage::KvCNormed, tokens.clone(), 0..g.latent), 0),
                (of.slacks.block(Stage::KPe, tokens, 0..g.rope), g.latent),
            ];
            if parts.iter().all(|(p, _)| p.is_none()) {
                return None;
            }
            let mut out = Errors::zeros(c.x.dim());
            for (part, first) in parts.iter().filter_map(|(p, first)| Some((p.as_ref()?, *first))) {
                for seq in &plan.sequences {
                    for (position, &slot) in seq.slots.iter().enumerate().skip(seq.context) {
                        let t = seq.tokens.start + position - seq.context;
                        let to = first..first + part.most.ncols();
                        out.most.slice_mut(s![slot, to.clone()]).assign(&part.most.row(t));
                        out.usual.slice_mut(s![slot, to]).assign(&part.usual.row(t));
                    }
                }
            }
            Some(out)
        }
        _ => None,
    }
}

fn norm(
    of: &Isolated,
    stage: Stage,
    c: &Chunk,
    (len, z, gamma): (usize, ArrayView2<f64>, &[f64]),
) -> Option<Grown> {
    let (input, eps) = match stage {
        Stage::AttnIn => (Stage::Hidden, of.spec.eps_attn),
        Stage::QANormed => (Stage::QA, of.spec.eps_latent),
        _ => (Stage::KvA, of.spec.eps_latent),
    };
    let e = of.slacks.block(input, c.rows.clone(), 0..len).filter(Errors::any)?;
    let x = of.source.block(input, c.rows.clone(), 0..len);
    let (mut most, mut usual) = (Array2::zeros(c.x.dim()), Array2::zeros(c.x.dim()));
    let (n, rho) = (len as f64, rho(len));
    for i in 0..c.x.nrows() {
        let (x, e, s, z) = (x.row(i), e.most.row(i), e.usual.row(i), z.row(i));
        let sum = |f: &dyn Fn(usize) -> f64| (0..len).map(f).sum::<f64>();
        let root = (sum(&|j| x[j] * x[j]) / n + eps).sqrt();
        let wide = (sum(&|j| e[j] * e[j]) / n).sqrt();
        let square = sum(&|j| 2.0 * x[j].abs() * e[j] + e[j] * e[j]) / n;
        let nu = if wide < 2.0 * root { wide.min(square / (2.0 * root - wide)) } else { wide };
        let common = sum(&|j| (x[j] * s[j]).powi(2)).sqrt() / (n * root * root);
        for j in 0..len {
            let dz = if nu < root { (e[j] + z[j].abs() * nu) / (root - nu) } else { f64::INFINITY };
            let g = gamma[j].abs();
            most[[i, j]] = match of.contract.norm_cast {
                Some(cast) => {
                    let moved = step(cast, z[j], rho * z[j].abs() + (1.0 + rho) * dz) * g;
                    moved * (1.0 + U)
                }
                None => g * dz * (1.0 + f64::powi(2.0, -10)),
            };
            usual[[i, j]] = g * (s[j] / root).hypot(z[j] * common);
        }
    }
    Some(Grown { most: with_own(of, c, most), usual })
}

fn rope(of: &Isolated, stage: Stage, c: &Chunk, first: usize) -> Option<Grown> {
    let g = &of.spec.geometry;
    // Columns of the chunk before `turned` are not rotated.
    let (input, cols, turned) = match stage {
        Stage::Q => (Stage::QRaw, c.cols.clone(), g.nope),
        _ => (Stage::KvA, g.latent..g.cache(), 0),
    };
    let e = of.slacks.block(input, c.rows.clone(), cols.clone()).filter(Errors::any)?;
    let x = of.source.block(input, c.rows.clone(), cols);
    let (cos, sin) = declared_table(&of.spec.rope, &of.case.plan.positions, of.contract);
    let (mut most, mut usual) = (e.most.clone(), e.usual.clone());
    let cast = of.contract.rope_products;
    for i in 0..c.x.nrows() {
        let t = c.rows.start + i;
        for k in 0..g.rope / 2 {
            let (ia, ib) = pair(of.spec.rope.pairing, k, g.rope);
            let (ia, ib) = (turned + ia, turned + ib);
            let (cos, sin) = (cos[[t, k]], sin[[t, k]]);
            for (at, p, q) in [(ia, (ia, cos), (ib, sin)), (ib, (ib, cos), (ia, sin))] {
                let of = |(j, f): (usize, f64)| {
                    let (v, e) = (x[[i, j]] * f, e.most[[i, j]] * f.abs());
                    cast.map_or(e, |d| step(d, v, U * v.abs() + (1.0 + U) * e))
                };
                most[[i, at]] = of(p) + of(q);
                usual[[i, at]] = (e.usual[[i, p.0]] * p.1).hypot(e.usual[[i, q.0]] * q.1);
            }
        }
        let factor = of.spec.temperature.map_or(1.0, |f| f.factor(of.case.plan.positions[t]).abs());
        most.row_mut(i).mapv_inplace(|v| v * factor * (1.0 + 8.0 * U));
        usual.row_mut(i).mapv_inplace(|v| v * factor);
    }
    if first > 0 {
        // Copies beside them: no rounding at all.
        most.slice_mut(s![.., ..first]).assign(&e.most.slice(s![.., ..first]));
    }
    Some(Grown { most: with_own(of, c, most), usual })
}

/// The sequence of rows of an attention and its tokens, counted from its first.
fn rows_of<'p>(
    plan: &'p Plan,
    (stage, form): (Stage, Option<Form>),
    rows: &Range<usize>,
) -> Option<(&'p Sequence, Range<usize>)> {
    if matches!(stage, Stage::PartO | Stage::PartLse) {
        let form = form?;
        let start = rows.start % plan.part_rows(form).max(1);
        let (_, seq, _, own) = plan.part_sequences(form).find(|(_, _, _, own)| own.contains(&start))?;
        return Some((seq, start - own.start..start - own.start + rows.len()));
    }
    let (_, seq, own) = plan.attention_rows(form).find(|(_, _, own)| own.contains(&rows.start))?;
    Some((seq, rows.start - own.start..rows.end - own.start))
}

/// |a| of a matrix in memory, and what is added to it.
pub fn enlarged(a: ArrayView2<f64>, by: &Array2<f64>) -> Array2<f64> {
    sizes(a) + by
}
