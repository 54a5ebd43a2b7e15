/*!
Whole weights that are not what they should be: rows in another order, kv_b taken apart wrongly, scales lost, other layers'.

The engine loads what it is given, so all of this acts from outside. Rows are changed as they are decoded; only what needs another
shape or another layer holds values in memory.
*/

use super::{Fault, FaultError};
use crate::case::Stream;
use crate::judge::cause::weight::OtherLayers;
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::rows::dense;
use mla_reference::{Axis, Geometry, Weight, Weights};
use std::ops::Range;

/// What is done to a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Spoil {
    /// Two heads exchanged.
    Heads(usize, usize),
    /// The bytes of a head read with the other shape.
    Transposed,
    /// kv_b, which lies head by head, taken as all keys and then all values.
    Halves,
    /// kv_b taken as if each head had its values first.
    ValuesFirst,
    /// Times a factor.
    Gain(f64),
    /// The rows of the last partial block of 128 times a factor.
    TailGain(f64),
    /// Through q8_0 once more.
    Requantised,
    /// The second half of the rows zero, as a shard that was never loaded.
    ZeroHalf,
    /// Each row is the one so many later, beginning anew at the end.
    RowShift(usize),
    /// The rows of each head's rope part in half-split order.
    RopeRows,
    /// One added (norms).
    PlusOne,
    /// One throughout (norms).
    LeftOut,
    /// Every value off by a random share, up to this.
    Drift(f64),
    /// The nearest other layer's.
    OtherLayer,
}

/// Rows of a block that share a scale in block-quantised checkpoints.
const BLOCK: usize = 128;
/// Values that a fault may hold in memory.
const MOST: usize = 1 << 27;

/// How rows are changed as they are decoded.
enum Change {
    Moved(Vec<usize>),
    Values(Vec<f64>),
    Gain(Range<usize>, f64),
    Requantised,
    Drift(f64, u64),
}

/// A weight's matrix, changed.
pub struct Spoilt<'a> {
    inner: &'a dyn Rows,
    change: Change,
}

impl Rows for Spoilt<'_> {
    fn rows(&self) -> usize {
        self.inner.rows()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        match &self.change {
            Change::Moved(from) => return self.inner.decode(from[row], k0, out),
            Change::Values(all) => return out.copy_from_slice(&all[row * self.cols() + k0..][..out.len()]),
            _ => self.inner.decode(row, k0, out),
        }
        match &self.change {
            Change::Gain(rows, f) if rows.contains(&row) => out.iter_mut().for_each(|v| *v *= f),
            Change::Requantised => requantise(out),
            Change::Drift(size, seed) => {
                let mut rng = Stream::new(*seed, row as u64, k0 as u64);
                out.iter_mut().for_each(|v| *v *= 1.0 + size * (2.0 * rng.uniform() - 1.0));
            }
            _ => {}
        }
    }
}

/// ggml's q8_0: blocks of 32, d = max|x| / 127 stored in f16.
fn requantise(out: &mut [f64]) {
    for block in out.chunks_mut(32) {
        let d = block.iter().fold(0.0f64, |m, v| m.max(v.abs())) / 127.0;
        let stored = DType::F16.round(d);
        block.iter_mut().for_each(|v| *v = if d > 0.0 { (*v / d).round() * stored } else { 0.0 });
    }
}

/// What a fault makes of the layer's matrices and norms.
#[derive(Default)]
pub struct Weighed<'a> {
    /// Matrices.
    pub matrices: Vec<(Weight, Spoilt<'a>)>,
    /// Norms.
    pub norms: Vec<(Weight, Vec<f64>)>,
}

/// Carries a fault of a whole weight out; `only`: the weight, all that it concerns else.
///
/// # Errors
/// The layer has no such weight; a head that is not there; no other layer; more values than memory should hold.
pub fn spoil<'a>(
    fault: &Fault,
    (spoil, only): (Spoil, Option<Weight>),
    weights: &'a dyn Weights,
    g: &Geometry,
    others: Option<&dyn OtherLayers>,
) -> Result<Weighed<'a>, FaultError> {
    let nowhere = |what: String, mend: &str| FaultError::Nowhere(what, fault.text.clone(), mend.to_string());
    let mut out = Weighed::default();
    let all: Vec<Weight> = match only {
        Some(w) => vec![w],
        None => vec![Weight::WUk, Weight::WUv],
    };
    for w in all {
        if let Some(values) = weights.norm(w) {
            out.norms.push((w, norm(fault, spoil, w, values, others)?));
            continue;
        }
        let missing =
            || nowhere(format!("this layer has no {w}"), "choose a weight that `mla-check inspect` lists");
        let inner = weights.matrix(w).ok_or_else(missing)?;
        let (rows, cols) = (inner.rows(), inner.cols());
        let held = matches!(spoil, Spoil::Transposed | Spoil::Halves | Spoil::ValuesFirst | Spoil::ZeroHalf)
            || spoil == Spoil::OtherLayer;
        if held && rows * cols > MOST {
            return Err(nowhere(format!("{w} is too large for this fault"), "choose a smaller model"));
        }
        let head = (w.row().axes.first() == Some(&Axis::Head)).then(|| rows / g.heads.max(1));
        let change = match spoil {
            Spoil::Heads(a, b) => {
                let Some(head) = head.filter(|_| a.max(b) < g.heads) else {
                    return Err(nowhere(
                        format!("{w} has no heads {a} and {b} along its rows"),
                        "choose heads that the layer has, of a weight with heads",
                    ));
                };
                let of = |h: usize| {
                    if h == a {
                        b
                    } else if h == b {
                        a
                    } else {
                        h
                    }
                };
                Change::Moved((0..rows).map(|r| of(r / head) * head + r % head).collect())
            }
            Spoil::RowShift(n) => Change::Moved((0..rows).map(|r| (r + n) % rows).collect()),
            Spoil::RopeRows => {
                let (width, first) = if w == Weight::WKvA { (rows, g.latent) } else { (g.key(), g.nope) };
                let of = |j: usize| match j.checked_sub(first) {
                    None => j,
                    Some(i) if i < g.rope / 2 => first + 2 * i,
                    Some(i) => first + 2 * (i - g.rope / 2) + 1,
                };
                Change::Moved((0..rows).map(|r| r / width * width + of(r % width)).collect())
            }
            Spoil::Transposed => {
                let (height, all) = (head.unwrap_or(rows), held_in_memory(inner));
                let from = |r: usize, c: usize| r / height * height * cols + c * height + r % height;
                Change::Values((0..rows * cols).map(|i| all[from(i / cols, i % cols)]).collect())
            }
            Spoil::Halves | Spoil::ValuesFirst => {
                let other = if w == Weight::WUk { Weight::WUv } else { Weight::WUk };
                let other = weights.matrix(other).ok_or_else(missing)?;
                Change::Values(apart(spoil, w, (inner, other), g))
            }
            Spoil::Gain(f) => Change::Gain(0..rows, f),
            Spoil::TailGain(f) => Change::Gain((rows - 1) / BLOCK * BLOCK..rows, f),
            Spoil::Requantised => Change::Requantised,
            Spoil::ZeroHalf => {
                let mut all = held_in_memory(inner);
                all[rows / 2 * cols..].fill(0.0);
                Change::Values(all)
            }
            Spoil::Drift(size) => Change::Drift(size, fault.seed),
            Spoil::OtherLayer => Change::Values(other_layer(fault, w, rows * cols, others)?),
            Spoil::PlusOne | Spoil::LeftOut => {
                return Err(nowhere(format!("{w} is no norm's weight"), "choose g_attn, g_q or g_kv"));
            }
        };
        out.matrices.push((w, Spoilt { inner, change }));
    }
    Ok(out)
}

fn norm(
    fault: &Fault,
    spoil: Spoil,
    weight: Weight,
    values: &[f64],
    others: Option<&dyn OtherLayers>,
) -> Result<Vec<f64>, FaultError> {
    let n = values.len();
    let mut rng = Stream::new(fault.seed, 0, 0);
    Ok(match spoil {
        Spoil::PlusOne => values.iter().map(|v| v + 1.0).collect(),
        Spoil::LeftOut => vec![1.0; n],
        Spoil::Gain(f) => values.iter().map(|v| v * f).collect(),
        Spoil::Drift(size) => values.iter().map(|v| v * (1.0 + size * (2.0 * rng.uniform() - 1.0))).collect(),
        Spoil::RowShift(by) => (0..n).map(|i| values[(i + by) % n]).collect(),
        Spoil::OtherLayer => other_layer(fault, weight, n, others)?,
        _ => {
            return Err(FaultError::Nowhere(
                format!("{weight} is one row: it has neither heads nor blocks"),
                fault.text.clone(),
                "choose a matrix".into(),
            ));
        }
    })
}

fn held_in_memory(rows: &dyn Rows) -> Vec<f64> {
    let mut all = vec![0.0; rows.rows() * rows.cols()];
    for (r, line) in all.chunks_exact_mut(rows.cols().max(1)).enumerate() {
        rows.decode(r, 0, line);
    }
    all
}

fn other_layer(
    fault: &Fault,
    weight: Weight,
    values: usize,
    others: Option<&dyn OtherLayers>,
) -> Result<Vec<f64>, FaultError> {
    let mut found = Vec::new();
    if let Some((others, layer)) = others.and_then(|o| Some((o, *o.layers().first()?))) {
        others.with(layer, weight, &mut |rows| found = held_in_memory(rows));
    }
    if found.len() != values {
        return Err(FaultError::Nowhere(
            format!("there is no other layer with a {weight} of this shape at hand"),
            fault.text.clone(),
            "choose a model of several layers, without --tp".into(),
        ));
    }
    Ok(found)
}

/// w_uk or w_uv as a loader takes it out of a kv_b that lies otherwise than it thinks: [K0 V0 K1 V1 …] by rows.
fn apart(spoil: Spoil, weight: Weight, (own, other): (&dyn Rows, &dyn Rows), g: &Geometry) -> Vec<f64> {
    let (k, v) = if weight == Weight::WUk { (own, other) } else { (other, own) };
    let (n, width, per) = (g.nope, g.value, g.nope + g.value);
    let mut kv_b = vec![0.0; g.heads * per * g.latent];
    for h in 0..g.heads {
        let keys = dense(k, h * g.latent..(h + 1) * g.latent, false);
        let values = dense(v, h * width..(h + 1) * width, false);
        for i in 0..per {
            for l in 0..g.latent {
                kv_b[(h * per + i) * g.latent + l] = if i < n { keys[[l, i]] } else { values[[i - n, l]] };
            }
        }
    }
    // The row of kv_b that is read as row i of a head's keys or values.
    let row = |h: usize, i: usize| match (spoil, weight) {
        (Spoil::Halves, Weight::WUk) => h * n + i,
        (Spoil::Halves, _) => g.heads * n + h * width + i,
        (_, Weight::WUk) => h * per + width + i,
        _ => h * per + i,
    };
    let cols = own.cols();
    let of = |r: usize, c: usize| match weight {
        Weight::WUk => kv_b[row(r / g.latent, c) * g.latent + r % g.latent],
        _ => kv_b[row(r / width, r % width) * g.latent + c],
    };
    (0..own.rows() * cols).map(|i| of(i / cols, i % cols)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::product::Dense;

    /// Two heads, latent 2, nope 2, value 1: kv_b has rows K00 K01 V0 K10 K11 V1.
    #[test]
    fn kv_b_is_taken_apart_by_rows() {
        let g = Geometry { hidden: 4, heads: 2, q_rank: 0, latent: 2, rope: 2, nope: 2, value: 1 };
        // Element (row of kv_b, latent) is 10 · row + latent; w_uk is [head, latent, nope], w_uv [head, value, latent].
        let uk = [0.0, 10.0, 1.0, 11.0, 30.0, 40.0, 31.0, 41.0];
        let uv = [20.0, 21.0, 50.0, 51.0];
        let (uk, uv) = (Dense { data: &uk, cols: 2 }, Dense { data: &uv, cols: 2 });
        // Halves: keys are rows 0, 1 | 2, 3, values rows 4 | 5.
        assert_eq!(
            apart(Spoil::Halves, Weight::WUk, (&uk, &uv), &g),
            [0.0, 10.0, 1.0, 11.0, 20.0, 30.0, 21.0, 31.0]
        );
        assert_eq!(apart(Spoil::Halves, Weight::WUv, (&uv, &uk), &g), [40.0, 41.0, 50.0, 51.0]);
        // Values first: the value is row 0 of each head, the keys rows 1, 2.
        assert_eq!(apart(Spoil::ValuesFirst, Weight::WUv, (&uv, &uk), &g), [0.0, 1.0, 30.0, 31.0]);
        assert_eq!(
            apart(Spoil::ValuesFirst, Weight::WUk, (&uk, &uv), &g),
            [10.0, 20.0, 11.0, 21.0, 40.0, 50.0, 41.0, 51.0]
        );
    }
}
