/*!
Inputs and weights: another recorded tensor read, a weight transposed in memory or swapped, heads of a weight or of an input
in another order, a rank's share of a sum lost or counted twice.
*/

use super::Hypothesis;
use super::change::Change;
use super::scene::Scene;
use mla_reference::product::Rows;
use mla_reference::rows::dense;
use mla_reference::{Form, Source, Stage, Weight};
use ndarray::Array2;
use std::ops::Range;

/// Values of a weight that a hypothesis may hold in memory.
const MOST: usize = 1 << 26;
/// Pairs of heads that are looked at one by one.
const PAIRS: usize = 1024;

/// All of the family.
pub(super) fn all<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let mut all = buffers(scene);
    all.extend(memory(scene));
    all.extend(heads(scene));
    all.extend(shares_of_ranks(scene));
    all
}

/// A recorded tensor of so many columns; None where there is none, or not any more.
pub(super) fn recorded(scene: &Scene, stage: Stage, cols: usize) -> Option<Array2<f64>> {
    let (g, plan) = (&scene.spec().geometry, &scene.of.case.plan);
    let shape = plan.shape(stage, scene.id.form, g);
    let rows = plan.rows(stage, scene.id.form);
    if !plan.has(stage, scene.id.form) || rows == 0 || shape.iter().product::<usize>() != rows * cols {
        return None;
    }
    let block = scene.of.source.block(stage, 0..rows, 0..cols);
    (block.dim() == (rows, cols)).then_some(block)
}

/// Another recorded tensor in place of an input.
fn buffers<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let (g, plan) = (&scene.spec().geometry, &scene.of.case.plan);
    if scene.copy {
        return Vec::new();
    }
    let mut all = Vec::new();
    let split = match scene.id.stage {
        Stage::Out => plan.joins(Stage::Out, scene.id.form),
        _ => scene.merges(),
    };
    for &input in scene.id.stage.inputs(g, scene.id.form, split) {
        let form = scene.id.form;
        let cols = plan.shape(input, form, g).iter().product::<usize>() / plan.rows(input, form).max(1);
        for &stage in Stage::ALL.iter().filter(|s| **s != input && **s != scene.id.stage) {
            if plan.rows(stage, form) != plan.rows(input, form) {
                continue;
            }
            if let Some(other) = recorded(scene, stage, cols) {
                let read = move |_: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
                    other.slice(ndarray::s![rows, cols]).to_owned()
                };
                let text = format!("it is computed from the recorded {stage}, not from {input}");
                let name = format!("reads {stage} for {input}");
                all.push(Hypothesis::new("buffer", name, text, Change::source(input, read)));
            }
        }
    }
    all
}

/// A matrix in memory.
struct Whole {
    data: Vec<f32>,
    cols: usize,
}

impl Rows for Whole {
    fn rows(&self) -> usize {
        self.data.len() / self.cols.max(1)
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let from = row * self.cols + k0;
        for (o, v) in out.iter_mut().zip(self.data.get(from..).unwrap_or(&[])) {
            *o = f64::from(*v);
        }
    }
}

/// Rows of a matrix in another order.
struct Reordered<'a> {
    inner: &'a dyn Rows,
    order: Vec<usize>,
}

impl Rows for Reordered<'_> {
    fn rows(&self) -> usize {
        self.order.len()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        self.inner.decode(self.order.get(row).copied().unwrap_or(row), k0, out);
    }
}

/// The weight that the stage multiplies with, and rows of a head of it (all rows where it has no heads).
fn weight(scene: &Scene) -> Option<(Weight, usize)> {
    let g = &scene.spec().geometry;
    match scene.id.stage {
        Stage::K | Stage::QLatent => Some((Weight::WUk, g.latent)),
        Stage::V => Some((Weight::WUv, g.value)),
        Stage::AttnOut if scene.id.form == Some(Form::Absorbed) => Some((Weight::WUv, g.value)),
        Stage::QA => Some((Weight::WQA, g.q_rank)),
        Stage::KvA => Some((Weight::WKvA, g.cache())),
        Stage::QRaw if g.q_rank == 0 => Some((Weight::WQ, g.queries())),
        Stage::QRaw => Some((Weight::WQB, g.queries())),
        Stage::Out | Stage::PartOut => Some((Weight::WO, g.hidden)),
        _ => None,
    }
}

/// Weights read as what they are not: the bytes of `[a, b]` taken for `[b, a]`, w_uk for w_uv, kv_b split wrongly.
fn memory<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let g = &scene.spec().geometry;
    let Some((which, height)) = weight(scene) else { return Vec::new() };
    let Some(m) = scene.of.weights.matrix(which) else { return Vec::new() };
    let (rows, cols) = (m.rows(), m.cols());
    if rows * cols > MOST || height == 0 || !rows.is_multiple_of(height) {
        return Vec::new();
    }
    let mut all = Vec::new();
    let add = |all: &mut Vec<Hypothesis<'a>>, name: String, text: String, data: Vec<f32>| {
        let rows = Box::new(Whole { data, cols });
        let change = Change { matrix: Some((which, rows)), ..Change::default() };
        all.push(Hypothesis::new("weights", name, text, change));
    };
    // Head by head: element (i, j) is the one that stands at j·height + i.
    let mut data = vec![0f32; rows * cols];
    for h in 0..rows / height {
        let block = dense(m, h * height..(h + 1) * height, false);
        let Some(flat) = block.as_slice() else { return all };
        let out = &mut data[h * height * cols..(h + 1) * height * cols];
        for i in 0..height {
            for j in 0..cols {
                out[i * cols + j] = flat[j * height + i] as f32;
            }
        }
    }
    let each = if rows > height { " of each head" } else { "" };
    let text =
        format!("{which}{each} is transposed in memory: [{height}, {cols}] is read as [{cols}, {height}]");
    add(&mut all, format!("{which} transposed"), text, data);
    let (uk, uv) = (scene.of.weights.matrix(Weight::WUk), scene.of.weights.matrix(Weight::WUv));
    if let (Weight::WUk | Weight::WUv, Some(uk), Some(uv)) = (which, uk, uv) {
        // kv_b by rows: of each head the key rows (columns of w_uk), then the value rows.
        let (per, heads) = (g.nope + g.value, g.heads);
        let mut kv_b = Array2::<f32>::zeros((heads * per, g.latent));
        for h in 0..heads {
            let k = dense(uk, h * g.latent..(h + 1) * g.latent, true);
            let v = dense(uv, h * g.value..(h + 1) * g.value, false);
            for i in 0..per {
                let row = if i < g.nope { k.row(i) } else { v.row(i - g.nope) };
                kv_b.row_mut(h * per + i).assign(&row.mapv(|v| v as f32));
            }
        }
        type Place<'p> = &'p dyn Fn(usize, usize) -> usize;
        let (n, v) = (g.nope, g.value);
        let splits: [(&str, &str, Place, Place); 2] = [
            (
                "kv_b split in halves",
                "kv_b is split as if the keys of all heads came before the values of all heads",
                &|h, i| h * n + i,
                &|h, i| heads * n + h * v + i,
            ),
            (
                "w_uk and w_uv swapped",
                "kv_b is split as if each head had its values before its keys",
                &|h, i| h * per + v + i,
                &|h, i| h * per + i,
            ),
        ];
        for (name, text, keys, values) in splits {
            let mut data = vec![0f32; rows * cols];
            for h in 0..heads {
                for i in 0..if which == Weight::WUk { n } else { v } {
                    let from = if which == Weight::WUk { keys(h, i) } else { values(h, i) };
                    for l in 0..g.latent {
                        let at = match which {
                            Weight::WUk => (h * g.latent + l) * cols + i,
                            _ => (h * v + i) * cols + l,
                        };
                        data[at] = kv_b[[from, l]];
                    }
                }
            }
            add(&mut all, name.into(), text.into(), data);
        }
    }
    all
}

/// Heads of a weight, or of the input, in another order, where the outputs are no permutation: products of a head with its
/// own matrix.
fn heads<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let g = &scene.spec().geometry;
    let absorbed = scene.id.form == Some(Form::Absorbed);
    // The weight of a head, with its rows, and inputs that heads are apart in.
    let (which, inputs) = match scene.id.stage {
        Stage::QLatent => (Some((Weight::WUk, g.latent)), vec![(Stage::Q, g.key())]),
        Stage::AttnOut if absorbed => (Some((Weight::WUv, g.value)), vec![(Stage::OLatent, g.latent)]),
        _ if scene.attends() && !scene.absorbed() => {
            (None, vec![(Stage::Q, g.key()), (Stage::K, g.key()), (Stage::V, g.value)])
        }
        _ => return Vec::new(),
    };
    let bad = scene.bad_heads();
    if bad.len() * g.heads > PAIRS || g.heads < 2 {
        return Vec::new();
    }
    let of_weight = |(which, height): (Weight, usize), map: &[usize]| {
        let order = map.iter().flat_map(|h| h * height..(h + 1) * height).collect();
        let inner = scene.of.weights.matrix(which)?;
        let matrix: (Weight, Box<dyn Rows>) = (which, Box::new(Reordered { inner, order }));
        Some(Change { matrix: Some(matrix), ..Change::default() })
    };
    let of_input = |(input, width): (Stage, usize), map: &[usize]| {
        let map = map.to_vec();
        Change::source(input, move |source: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
            let from = map.get(cols.start / width).copied().unwrap_or(0);
            let at = from * width + cols.start % width;
            source.block(input, rows, at..at + cols.len())
        })
    };
    let mut all = Vec::new();
    type Make<'m, 'a> = Box<dyn Fn(&[usize]) -> Option<Change<'a>> + 'm>;
    let mut kinds: Vec<(String, Make<'_, 'a>)> = Vec::new();
    if let Some(w) = which {
        kinds.push((format!("heads of {}", w.0), Box::new(move |map| of_weight(w, map))));
    }
    for i in inputs {
        kinds.push((format!("heads of {}", i.0), Box::new(move |map| Some(of_input(i, map)))));
    }
    for (what, make) in kinds {
        let mut map: Vec<usize> = (0..g.heads).collect();
        for &h in &bad {
            let share = |from: usize| {
                let mut one: Vec<usize> = (0..g.heads).collect();
                one[h] = from;
                make(&one).map_or(1.0, |c| scene.aside_share(&c, &[], &[h]))
            };
            let best = (0..g.heads).map(|f| (share(f), f)).min_by(|a, b| a.0.total_cmp(&b.0));
            map[h] = best.map_or(h, |b| b.1);
        }
        let moved: Vec<String> = bad
            .iter()
            .filter(|h| map[**h] != **h)
            .take(6)
            .map(|h| format!("head {h} takes {}", map[*h]))
            .collect();
        if let Some(change) = make(&map).filter(|_| !moved.is_empty()) {
            let text = format!("{what} are in another order: {}", moved.join(", "));
            all.push(Hypothesis::new("weights", format!("{what} permuted"), text, change));
        }
    }
    all
}

/// How often a rank's part may be in a sum, and words for it.
const MISCOUNTED: [(f64, &str, &str); 2] =
    [(0.0, "lost", "is missing from the sum"), (2.0, "twice", "is in the sum twice")];

/// A sum of recorded parts: one lost, or counted twice.
fn parts_of_ranks<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let plan = &scene.of.case.plan;
    let (ranks, total) = (plan.ranks, plan.rows(Stage::Out, scene.id.form));
    let one = |rank: usize, (factor, name, text): (f64, &str, &str)| {
        let read = move |source: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
            let own = rows.start / total.max(1) == rank;
            let mut block = source.block(Stage::PartOut, rows, cols);
            if own {
                block.mapv_inplace(|v| v * factor);
            }
            block
        };
        let text = format!("the part of rank {rank} of {ranks} {text}");
        let name = format!("part of rank {rank} of {ranks} {name}");
        Hypothesis::new("all-reduce", name, text, Change::source(Stage::PartOut, read))
    };
    (0..ranks).flat_map(|rank| MISCOUNTED.map(|m| one(rank, m))).collect()
}

/// A sum over ranks: the share of one lost, or counted twice; shares that read each other's columns.
fn shares_of_ranks<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if scene.id.stage != Stage::Out {
        return Vec::new();
    }
    let g = &scene.spec().geometry;
    if scene.of.case.plan.joins(Stage::Out, scene.id.form) {
        return parts_of_ranks(scene);
    }
    let values = g.values();
    let mut all = Vec::new();
    for ranks in [2, 4, 8].into_iter().filter(|r| g.heads.is_multiple_of(*r)) {
        let width = values / ranks;
        let heads = g.heads / ranks;
        for rank in 0..ranks {
            for (factor, name, text) in MISCOUNTED {
                let read = move |source: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
                    let mut block = source.block(Stage::AttnOut, rows, cols.clone());
                    for (mut column, c) in block.columns_mut().into_iter().zip(cols) {
                        if c / width == rank {
                            column.mapv_inplace(|v| v * factor);
                        }
                    }
                    block
                };
                let of = format!("heads {}..{}", rank * heads, (rank + 1) * heads - 1);
                let text = format!("the part of rank {rank} of {ranks} ({of}) {text}");
                let name = format!("part of rank {rank} of {ranks} {name}");
                all.push(Hypothesis::new("all-reduce", name, text, Change::source(Stage::AttnOut, read)));
            }
        }
    }
    let swaps = |n: usize| (0..n).flat_map(move |a| (a + 1..n).map(move |b| (a, b)));
    let mut divisions: Vec<(usize, &str)> = vec![(2, "shards"), (4, "shards")];
    if g.heads <= 8 && !divisions.iter().any(|d| d.0 == g.heads) {
        divisions.push((g.heads, "heads"));
    }
    for (parts, what) in divisions.into_iter().filter(|d| g.heads.is_multiple_of(d.0)) {
        let what = if parts == g.heads { "heads" } else { what };
        let width = values / parts;
        for (a, b) in swaps(parts) {
            let read = move |source: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
                let whole = source.block(Stage::AttnOut, rows, 0..values);
                let from = |c: usize| match c / width {
                    p if p == a => b * width + c % width,
                    p if p == b => a * width + c % width,
                    _ => c,
                };
                whole.select(ndarray::Axis(1), &cols.map(from).collect::<Vec<_>>())
            };
            let text =
                format!("{what} {a} and {b} of {parts} of attn_out are exchanged before the projection");
            let name = format!("{what} {a} and {b} of {parts} of attn_out exchanged");
            all.push(Hypothesis::new("order", name, text, Change::source(Stage::AttnOut, read)));
        }
    }
    all
}
