/*!
A weight that is not the file's: which other one it is.

Weights are copies, so a hypothesis predicts every bit and is accepted only if all of them agree: rows or columns in another
order, of heads or of ranks' shards (`order`), rows of another slot of the stack (`slots`), kv_b put together wrongly
(`kv_b`), the same bytes read with the other shape, another layer's weight, one quantised a second time, rows of zeros, values that nobody wrote, a power of two.
*/

mod kv_b;
mod order;
mod slots;

use super::{Cause, Diagnosis, Left};
use crate::report::finding::ranges;
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::rows::dense;
use mla_reference::{Axis, Geometry, Weight, Weights};

/// Rows that are looked at before all are.
const SAMPLE: usize = 16;
/// Values of a weight that a transposition may hold in memory.
const MOST: usize = 1 << 24;
/// Values of a block of q8_0.
const Q8_BLOCK: usize = 32;

/// The weights of a model's other layers, where the model is at hand.
pub trait OtherLayers: Sync {
    /// Which there are, nearest first.
    fn layers(&self) -> Vec<usize>;
    /// Calls `f` with a weight of one, a norm as one row; not at all where it has none.
    fn with(&self, layer: usize, weight: Weight, f: &mut dyn FnMut(&dyn Rows));
}

/// What is known of the layer whose weight it is.
pub struct About<'a> {
    /// Widths.
    pub geometry: &'a Geometry,
    /// All its weights as the file has them: rows of one may stand in another.
    pub layer: Option<&'a dyn Weights>,
    /// Ranks whose shards were put together in rank order to what the engine holds: heads along rows, of w_o along
    /// columns. 1: there are no shards.
    pub ranks: usize,
    /// The model's other layers.
    pub others: Option<&'a dyn OtherLayers>,
}

impl<'a> About<'a> {
    /// A weight of this layer other than the one that is asked about.
    fn sibling(&self, weight: Weight) -> Option<&'a dyn Rows> {
        self.layer?.matrix(weight)
    }
}

/// What a row should be under a hypothesis.
type Predict<'p> = Box<dyn Fn(usize, &mut [f64]) + 'p>;

struct Guess<'p> {
    name: String,
    text: String,
    row: Predict<'p>,
}

/// A weight and what it is held against.
struct Pair<'p> {
    weight: Weight,
    file: &'p dyn Rows,
    engine: &'p dyn Rows,
    dtype: DType,
}

impl Pair<'_> {
    /// Share of the values of some rows that are not as predicted.
    fn share(&self, rows: impl Iterator<Item = usize>, predict: &dyn Fn(usize, &mut [f64])) -> f64 {
        let cols = self.engine.cols();
        let (mut want, mut got) = (vec![0.0; cols], vec![0.0; cols]);
        let (mut bad, mut all) = (0usize, 0usize);
        for r in rows {
            predict(r, &mut want);
            self.dtype.round_slice(&mut want);
            self.engine.decode(r, 0, &mut got);
            bad += got.iter().zip(&want).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            all += cols;
        }
        bad as f64 / all.max(1) as f64
    }

    fn sample(&self) -> impl Iterator<Item = usize> + use<> {
        let rows = self.engine.rows();
        (0..rows).step_by(rows.div_ceil(SAMPLE).max(1))
    }

    /// Rows that are not the file's.
    fn wrong(&self) -> Vec<usize> {
        let file = |r: usize, out: &mut [f64]| self.file.decode(r, 0, out);
        (0..self.engine.rows()).filter(|r| self.share(std::iter::once(*r), &file) > 0.0).collect()
    }
}

/// Looks for what an engine's weight is, where it is not the file's rounded to `dtype`.
pub fn search(
    weight: Weight,
    (file, engine): (&dyn Rows, &dyn Rows),
    dtype: DType,
    about: &About,
) -> Diagnosis {
    let g = about.geometry;
    let pair = Pair { weight, file, engine, dtype };
    let mut tried: Vec<Left> = Vec::new();
    let mut accepted: Vec<(String, String)> = Vec::new();
    let mut take = |guess: Guess, accepted: &mut Vec<(String, String)>| {
        let share = pair.share(pair.sample(), &guess.row);
        if share == 0.0 && pair.share(0..engine.rows(), &guess.row) == 0.0 {
            accepted.push((guess.name, guess.text));
        } else {
            tried.push(Left { name: guess.name, share });
        }
    };
    for guess in order::of_rows(&pair, about) {
        take(guess, &mut accepted);
    }
    let lost = zeros(&pair, about).into_iter().chain(unwritten(&pair)).chain(gained(&pair));
    for guess in order::of_columns(&pair, about).into_iter().chain(lost) {
        take(guess, &mut accepted);
    }
    for guess in kv_b::guesses(&pair, about).into_iter().chain(transposed(&pair, g)).chain(values(&pair)) {
        take(guess, &mut accepted);
    }
    if let Some(others) = about.others {
        for layer in others.layers() {
            others.with(layer, weight, &mut |other: &dyn Rows| {
                if (other.rows(), other.cols()) == (engine.rows(), engine.cols()) {
                    let name = format!("{weight} of layer {layer}");
                    let text = format!("it is {weight} of layer {layer}, bit for bit");
                    let row: Predict = Box::new(|r, out| other.decode(r, 0, out));
                    take(Guess { name, text, row }, &mut accepted);
                }
            });
        }
    }
    let n = tried.len() + accepted.len();
    tried.sort_by(|a, b| a.share.total_cmp(&b.share));
    if accepted.is_empty() {
        tried.truncate(3);
        return Diagnosis::Unexplained { tried: n, best: tried };
    }
    let (name, text) = accepted.remove(0);
    Diagnosis::Cause(Cause {
        name,
        family: "weights",
        text,
        effect: None,
        tried: n,
        runner_up: tried.into_iter().next(),
        ambiguous_with: accepted.into_iter().map(|a| a.0).collect(),
    })
}

/// Rows of a head of a weight that has heads along them.
fn heads_of(weight: Weight, g: &Geometry, rows: usize) -> Option<usize> {
    let heads = weight.row().axes.first() == Some(&Axis::Head) && g.heads > 0;
    (heads && rows.is_multiple_of(g.heads)).then(|| rows / g.heads)
}

/// Rows of zeros, all others the file's.
fn zeros<'p>(pair: &Pair<'p>, about: &About) -> Option<Guess<'p>> {
    let wrong = pair.wrong();
    let mut line = vec![0.0; pair.engine.cols()];
    let mut empty = |r: &usize| {
        pair.engine.decode(*r, 0, &mut line);
        line.iter().all(|v| *v == 0.0)
    };
    if wrong.is_empty() || !wrong.iter().all(&mut empty) {
        return None;
    }
    let shard = pair.engine.rows() / about.ranks.max(1);
    let sharded = about.ranks > 1 && heads_of(pair.weight, about.geometry, pair.engine.rows()).is_some();
    let (first, last) = (wrong[0], wrong[wrong.len() - 1]);
    let one = wrong.len() == shard && first.is_multiple_of(shard) && last - first < shard;
    let whose = if sharded && one { format!(", rank {}'s", first / shard) } else { String::new() };
    let text =
        format!("rows {} of {} are zero: a shard that was never loaded{whose}", ranges(&wrong), pair.weight);
    let file = pair.file;
    let row: Predict<'p> = Box::new(move |r, out| match wrong.binary_search(&r) {
        Ok(_) => out.fill(0.0),
        Err(_) => file.decode(r, 0, out),
    });
    Some(Guess { name: format!("rows of {} zero", pair.weight), text, row })
}

/// Values that are NaN, all others the file's.
fn unwritten<'p>(pair: &Pair<'p>) -> Option<Guess<'p>> {
    let (file, engine) = (pair.file, pair.engine);
    let cols = engine.cols();
    let (mut own, mut count, mut first) = (vec![0.0; cols], 0, None);
    for r in pair.wrong() {
        engine.decode(r, 0, &mut own);
        for c in (0..cols).filter(|c| own[*c].is_nan()) {
            first.get_or_insert((r, c));
            count += 1;
        }
    }
    let (r, c) = first?;
    let name = format!("values of {} unwritten", pair.weight);
    let text = format!(
        "{count} values of {} are NaN, the first at row {r}, column {c}: never written, or read from memory that nobody wrote",
        pair.weight
    );
    let row: Predict<'p> = Box::new(move |r, out| {
        let mut own = vec![0.0; cols];
        engine.decode(r, 0, &mut own);
        file.decode(r, 0, out);
        out.iter_mut().zip(own).filter(|(_, o)| o.is_nan()).for_each(|(to, o)| *to = o);
    });
    Some(Guess { name, text, row })
}

/// A number in an interval, with as few digits as any there has.
fn simplest(lo: f64, hi: f64) -> f64 {
    for digits in 0..12 {
        let v: f64 = format!("{:.digits$e}", (lo + hi) / 2.0).parse().unwrap_or(lo);
        if lo < v && v < hi {
            return v;
        }
    }
    (lo + hi) / 2.0
}

/// All rows, or a run of them, times one factor: the factors under which each value rounds to the engine's have to overlap.
fn gained<'p>(pair: &Pair<'p>) -> Option<Guess<'p>> {
    let wrong = pair.wrong();
    let (first, last) = (*wrong.first()?, *wrong.last()?);
    let cols = pair.engine.cols();
    let (mut file, mut own) = (vec![0.0; cols], vec![0.0; cols]);
    let (mut lo, mut hi) = (f64::NEG_INFINITY, f64::INFINITY);
    for r in first..=last {
        pair.file.decode(r, 0, &mut file);
        pair.engine.decode(r, 0, &mut own);
        for (w, o) in file.iter().zip(&own).filter(|(w, _)| **w != 0.0) {
            let (below, above) = pair.dtype.cell(*o);
            let (a, b) = (below / w, above / w);
            (lo, hi) = (lo.max(a.min(b)), hi.min(a.max(b)));
        }
    }
    if !(lo < hi && lo.is_finite() && hi.is_finite()) || wrong.len() * cols < 64 {
        return None;
    }
    let (factor, weight, inner) = (simplest(lo, hi), pair.weight, pair.file);
    let which = match (first, last) {
        (0, end) if end + 1 == pair.engine.rows() => weight.to_string(),
        _ => format!("rows {first}..{last} of {weight}"),
    };
    let text = format!("{which} is the file's times {factor}: a scale that is another's, or lost");
    let row: Predict<'p> = Box::new(move |r, out| {
        inner.decode(r, 0, out);
        if (first..=last).contains(&r) {
            out.iter_mut().for_each(|v| *v *= factor);
        }
    });
    Some(Guess { name: format!("{which} × {factor}"), text, row })
}

/// The same bytes read with the other shape, whole or head by head.
fn transposed<'p>(pair: &Pair<'p>, g: &Geometry) -> Vec<Guess<'p>> {
    let (rows, cols) = (pair.file.rows(), pair.file.cols());
    if rows * cols > MOST || pair.weight.is_norm() {
        return Vec::new();
    }
    let mut heights = vec![rows];
    heights.extend(heads_of(pair.weight, g, rows).filter(|h| *h != rows));
    let of = |height: usize| {
        let file = pair.file;
        let whole = held(file, pair.dtype);
        let each = if height < rows { " of each head" } else { "" };
        let row: Predict<'p> = Box::new(move |r, out| {
            let (start, i) = (r / height * height * cols, r % height);
            out.iter_mut().enumerate().for_each(|(j, o)| *o = f64::from(whole[start + j * height + i]));
        });
        Guess {
            name: format!("{} transposed", pair.weight),
            text: format!(
                "{}{each} is transposed in memory: [{height}, {cols}] is read as [{cols}, {height}]",
                pair.weight
            ),
            row,
        }
    };
    heights.into_iter().map(of).collect()
}

/// All values as an engine would hold them, on the grid of its dtype.
fn held(rows: &dyn Rows, dtype: DType) -> Vec<f32> {
    let line = |r| dense(rows, r..r + 1, false).into_raw_vec_and_offset().0;
    (0..rows.rows()).flat_map(line).map(|v| dtype.round(v) as f32).collect()
}

/// Values through one more quantisation, or with one added.
fn values<'p>(pair: &Pair<'p>) -> Vec<Guess<'p>> {
    let (file, weight) = (pair.file, pair.weight);
    let guess = |name: &str, text: &str, change: fn(&mut [f64])| {
        let row: Predict<'p> = Box::new(move |r, out| {
            file.decode(r, 0, out);
            change(out);
        });
        Guess { name: format!("{weight} {name}"), text: format!("{weight} {text}"), row }
    };
    let mut all = vec![
        guess("through f16", "was rounded to f16 before", |out| DType::F16.round_slice(out)),
        guess("through bf16", "was rounded to bf16 before", |out| DType::Bf16.round_slice(out)),
        guess("quantised again", "was quantised a second time, to q8_0", q8_0),
        guess("negated", "has the other sign", |out| out.iter_mut().for_each(|v| *v = -*v)),
    ];
    // Scales of which a power of two was forgotten or counted twice.
    for e in [1, -1, 2, -2, 3, -3, 4, -4] {
        let factor = f64::powi(2.0, e);
        let row: Predict<'p> = Box::new(move |r, out| {
            file.decode(r, 0, out);
            out.iter_mut().for_each(|v| *v *= factor);
        });
        let text = format!("{weight} is {factor} times what the file says");
        all.push(Guess { name: format!("{weight} × {factor}"), text, row });
    }
    if weight.is_norm() {
        all.push(guess("plus one", "has one added", |out| out.iter_mut().for_each(|v| *v += 1.0)));
        all.push(guess("minus one", "has one taken off", |out| out.iter_mut().for_each(|v| *v -= 1.0)));
        all.push(guess("left out", "is one throughout", |out| out.fill(1.0)));
    }
    all
}

/// Blocks of 32: d = max|x|/127 in f16, values round(x/d)·d.
fn q8_0(out: &mut [f64]) {
    for block in out.chunks_mut(Q8_BLOCK) {
        let most = block.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        let d = most / 127.0;
        let stored = DType::F16.round(d);
        block.iter_mut().for_each(|v| *v = if d > 0.0 { (*v / d).round() * stored } else { 0.0 });
    }
}
