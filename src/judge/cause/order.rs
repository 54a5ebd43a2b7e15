/*!
Right values in wrong places: heads, ranks' shards, blocks of columns, single columns, stacked parts.

Where columns only stand elsewhere, nearly all bits of one place are those of another place's reference. So places are
matched by equal bits on a few rows, and the engine's tensor is put back in order and judged as it is. A place that
holds a copy of another's leaves a hole: it is excused if the copy is one bit for bit.
*/

use super::Hypothesis;
use super::change::Change;
use super::scene::Scene;
use crate::report::finding::ranges;
use crate::trace::{Tensor, TensorId};
use mla_reference::Stage;
use ndarray::Array2;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

const FAMILY: &str = "order";
/// Rows that are looked at.
const ROWS: usize = 12;
/// Columns of a group that are looked at.
const COLUMNS: usize = 48;
/// Share of equal bits that makes a match.
const MATCH: f64 = 0.5;
/// Most groups: their square is compared.
const GROUPS: usize = 512;
/// Divisions of heads among ranks.
const RANKS: [usize; 6] = [2, 4, 8, 16, 32, 64];

/// A part of the columns that moves as one.
struct Division {
    /// As one of them is called: head, block of 64 columns.
    what: String,
    plural: String,
    width: usize,
}

/// All of the family.
pub(super) fn all<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if scene.odd_share() < 1e-3 || scene.tensor.cols < 2 {
        return Vec::new();
    }
    let (own, reference) = pictures(scene);
    for d in divisions(scene) {
        if let Some(map) = matched(&own, &reference, d.width)
            && let Some(h) = hypothesis(scene, &d, &map)
        {
            return vec![h];
        }
    }
    columns(scene, &own, &reference).into_iter().collect()
}

/// Rows that are looked at: some of those that are wrong, since slots that nobody owns say nothing.
fn rows(scene: &Scene) -> Vec<usize> {
    let wrong: Vec<usize> = scene.rows.iter().copied().filter(|r| scene.odd_row(*r) > 0).collect();
    let step = wrong.len().div_ceil(ROWS).max(1);
    // The last rows see most.
    wrong.into_iter().rev().step_by(step).collect()
}

/// These rows of engine and reference, as stored.
fn pictures(scene: &Scene) -> (Array2<f64>, Array2<f64>) {
    let rows = rows(scene);
    (picture(scene.tensor, &rows), picture(&scene.rounded, &rows))
}

fn picture(t: &Tensor, rows: &[usize]) -> Array2<f64> {
    let mut out = Array2::zeros((rows.len(), t.cols));
    for (mut line, r) in out.rows_mut().into_iter().zip(rows) {
        line.assign(&t.block(*r..r + 1, 0..t.cols).row(0));
    }
    out
}

fn divisions(scene: &Scene) -> Vec<Division> {
    let mut all = Vec::new();
    if scene.heads > 1 {
        all.push(Division { what: "head".into(), plural: "heads".into(), width: scene.width });
        return all;
    }
    let cols = scene.tensor.cols;
    for parts in [2, 4, 8, 16] {
        if cols.is_multiple_of(parts) && cols / parts >= 8 {
            let width = cols / parts;
            all.push(Division { what: "shard".into(), plural: format!("shards of {width} columns"), width });
        }
    }
    for width in [128, 64, 32, 16, 8] {
        let n = cols / width;
        if cols.is_multiple_of(width) && (2..=GROUPS).contains(&n) && all.iter().all(|d| d.width != width) {
            all.push(Division { what: "block".into(), plural: format!("blocks of {width} columns"), width });
        }
    }
    all
}

/// For each group of the engine's the reference's that it equals; None where one equals none, or all are in order.
fn matched(own: &Array2<f64>, reference: &Array2<f64>, width: usize) -> Option<Vec<usize>> {
    let groups = own.ncols() / width;
    let step = width.div_ceil(COLUMNS).max(1);
    let share = |a: usize, b: usize| {
        let (mut same, mut all) = (0usize, 0usize);
        for (o, x) in own.rows().into_iter().zip(reference.rows()) {
            for j in (0..width).step_by(step) {
                all += 1;
                same += usize::from(o[a * width + j].to_bits() == x[b * width + j].to_bits());
            }
        }
        same as f64 / all.max(1) as f64
    };
    let mut map = Vec::with_capacity(groups);
    for a in 0..groups {
        if share(a, a) > MATCH {
            map.push(a);
            continue;
        }
        let (best, at) = (0..groups).map(|b| (share(a, b), b)).max_by(|x, y| x.0.total_cmp(&y.0))?;
        if best <= MATCH {
            return None;
        }
        map.push(at);
    }
    map.iter().enumerate().any(|(a, b)| a != *b).then_some(map)
}

/// The engine's tensor put back in order by a map of groups, and the share of it that is odd then.
fn hypothesis<'a>(scene: &Scene<'a>, d: &Division, map: &[usize]) -> Option<Hypothesis<'a>> {
    let columns: Vec<usize> = map.iter().flat_map(|b| (0..d.width).map(move |j| b * d.width + j)).collect();
    let tensor = restored(scene, &columns)?;
    let share = share(scene, &tensor);
    let (name, text) = words(d, map);
    Some(Hypothesis::new(FAMILY, name, text, Change::tensors(vec![(scene.id, tensor)], share)))
}

/// The engine's column j holds the reference's `columns[j]`: each is put where it belongs. None where two that should be
/// the same are not, or more than half of the columns would be excused.
fn restored(scene: &Scene, columns: &[usize]) -> Option<Tensor> {
    let t = scene.tensor;
    let mut from: Vec<Option<usize>> = vec![None; t.cols];
    let mut copies = Vec::new();
    for (j, c) in columns.iter().enumerate() {
        match from[*c] {
            None => from[*c] = Some(j),
            Some(first) => copies.push((j, first)),
        }
    }
    let holes = from.iter().filter(|f| f.is_none()).count();
    if holes * 2 > t.cols {
        return None;
    }
    let mut out = t.clone();
    // Rows that are right as they stand were written by somebody else, as a cache's context.
    for &r in scene.rows.iter().filter(|r| scene.odd_row(**r) > 0) {
        if copies.iter().any(|(a, b)| t.bits(r, *a) != t.bits(r, *b)) {
            return None;
        }
        for (c, j) in from.iter().enumerate() {
            out.set_bits(r, c, j.map_or_else(|| scene.rounded.bits(r, c), |j| t.bits(r, j)));
        }
    }
    Some(out)
}

/// Share of the phase's elements that are not the rounded reference. Slots that nobody owns are NaN in both.
fn share(scene: &Scene, tensor: &Tensor) -> f64 {
    let same = |r: usize, c: usize| {
        tensor.bits(r, c) == scene.rounded.bits(r, c)
            || tensor.get(r, c).is_nan() && scene.rounded.get(r, c).is_nan()
    };
    let bad = |r: &usize| (0..tensor.cols).filter(|c| !same(*r, *c)).count();
    let all = (scene.rows.len() * tensor.cols).max(1);
    scene.rows.iter().map(bad).sum::<usize>() as f64 / all as f64
}

/// A map of groups in words: name and sentence.
fn words(d: &Division, map: &[usize]) -> (String, String) {
    let n = map.len();
    let moved: Vec<usize> = (0..n).filter(|a| map[*a] != *a).collect();
    if let [a, b] = moved[..]
        && map[a] == b
        && map[b] == a
    {
        let name = format!("{} {a} and {b} exchanged", d.plural);
        return (name.clone(), format!("{name}, all others stand where they belong"));
    }
    for ranks in RANKS.into_iter().filter(|r| d.what == "head" && n.is_multiple_of(*r) && n > *r) {
        let size = n / ranks;
        let of: Vec<usize> = (0..ranks).map(|r| map[r * size] / size).collect();
        let holds = (0..n).all(|a| map[a] == of[a / size] * size + a % size);
        if !holds {
            continue;
        }
        let wrong: Vec<usize> = (0..ranks).filter(|r| of[*r] != *r).collect();
        let part = |r: usize| format!("{}..{}", r * size, (r + 1) * size - 1);
        let text: Vec<String> = wrong
            .iter()
            .take(4)
            .map(|&r| {
                let s = of[r];
                format!(
                    "heads {} hold those of {} (rank {r} holds rank {s}'s shard of {size})",
                    part(r),
                    part(s)
                )
            })
            .collect();
        let more = wrong.len().saturating_sub(4);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let order: Vec<String> = of.iter().map(usize::to_string).collect();
        let name = match wrong[..] {
            [r] => format!("rank {r} holds rank {}'s shard", of[r]),
            _ => format!("shards of {ranks} ranks in the order {}", order.join(", ")),
        };
        return (name, text.join("; ") + &more);
    }
    if (0..n).all(|a| map[a] == n - 1 - a) {
        return (format!("{} reversed", d.plural), format!("{} stand in reverse order", d.plural));
    }
    let pairs: Vec<String> = moved.iter().take(6).map(|a| format!("{} holds {}", a, map[*a])).collect();
    let more = if moved.len() > 6 { format!(" … ({} moved)", moved.len()) } else { String::new() };
    let text = format!("{} stand in another order: {}{more}", d.plural, pairs.join(", "));
    (format!("{} permuted: {}", d.plural, ranges(&moved)), text)
}

/// Columns of a tensor by their values in all rows.
fn index(of: &Array2<f64>) -> HashMap<Vec<u64>, usize> {
    let key = |c: usize| of.column(c).iter().map(|v| v.to_bits()).collect::<Vec<u64>>();
    (0..of.ncols()).map(|c| (key(c), c)).collect()
}

/// Another tensor whose columns may have been mixed up with these: those that come of one stacked projection.
fn sister(scene: &Scene) -> Option<TensorId> {
    let of = |stage| TensorId { stage, form: scene.id.form };
    match scene.id.stage {
        Stage::QA => Some(of(Stage::KvA)),
        Stage::KvA if scene.spec().geometry.q_rank > 0 => Some(of(Stage::QA)),
        Stage::K => Some(of(Stage::V)),
        Stage::V => Some(of(Stage::K)),
        _ => None,
    }
}

/// The reference of another tensor, rounded.
fn reference_of(scene: &Scene, id: TensorId) -> Tensor {
    let plan = &scene.of.case.plan;
    let t = Mutex::new(Tensor::zeros(id, plan, &scene.spec().geometry, scene.tensor.dtype));
    scene.of.evaluate(id, &|c| {
        let mut t = t.lock().unwrap_or_else(PoisonError::into_inner);
        for (i, x) in c.x.rows().into_iter().enumerate() {
            t.write(c.rows.start + i, c.cols.start, &x.to_vec());
        }
    });
    t.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Single columns: each is looked up by its values in a few rows, and those that a flip hides are filled in from the
/// neighbours' order.
fn columns<'a>(scene: &Scene<'a>, own: &Array2<f64>, reference: &Array2<f64>) -> Option<Hypothesis<'a>> {
    let cols = own.ncols();
    let rows = rows(scene);
    let other = sister(scene).map(|id| (id, reference_of(scene, id)));
    let mut all = reference.clone();
    if let Some((_, t)) = &other {
        all = ndarray::concatenate(ndarray::Axis(1), &[all.view(), picture(t, &rows).view()]).ok()?;
    }
    // By few rows at a time: a flip spoils one look-up, not all.
    let few = 4.min(own.nrows());
    let mut found: Vec<Option<usize>> = vec![None; cols];
    for at in (0..own.nrows()).step_by(few) {
        let rows = at..(at + few).min(own.nrows());
        if rows.len() < few.min(2) {
            break;
        }
        let part = |m: &Array2<f64>| m.slice(ndarray::s![rows.clone(), ..]).to_owned();
        let (index, mine) = (index(&part(&all)), part(own));
        for (c, at) in found.iter_mut().enumerate().filter(|(_, f)| f.is_none()) {
            let key: Vec<u64> = mine.column(c).iter().map(|v| v.to_bits()).collect();
            *at = index.get(&key).copied();
        }
    }
    let known = found.iter().filter(|f| f.is_some()).count();
    if known * 10 < cols * 9 {
        return None;
    }
    for c in 0..cols {
        if found[c].is_none() {
            let before = c.checked_sub(1).and_then(|b| found[b]).map(|v| v + 1);
            let after = found.get(c + 1).copied().flatten().and_then(|v| v.checked_sub(1));
            found[c] = before.or(after).filter(|v| *v < all.ncols());
        }
    }
    let map: Vec<usize> = found.into_iter().collect::<Option<_>>()?;
    if map.iter().enumerate().all(|(j, c)| j == *c) {
        return None;
    }
    let (name, text) = (format!("columns of {} in another order", scene.id.stage), column_words(scene, &map));
    if map.iter().all(|c| *c < cols) {
        let tensor = restored(scene, &map)?;
        let share = share(scene, &tensor);
        return Some(Hypothesis::new(FAMILY, name, text, Change::tensors(vec![(scene.id, tensor)], share)));
    }
    let (id, theirs) = other?;
    let (mut mine, mut sisters) = (scene.rounded.clone(), theirs.clone());
    for &r in &scene.rows {
        for (j, c) in map.iter().enumerate() {
            let bits = scene.tensor.bits(r, j);
            if *c < cols { mine.set_bits(r, *c, bits) } else { sisters.set_bits(r, *c - cols, bits) }
        }
    }
    let share = share(scene, &mine);
    let stacked = match scene.id.stage {
        Stage::QA | Stage::KvA => "stacked projection split in the wrong order",
        _ => "kv_b split wrongly",
    };
    let text = format!("{stacked}: {text}");
    Some(Hypothesis::new(
        FAMILY,
        stacked,
        text,
        Change::tensors(vec![(scene.id, mine), (id, sisters)], share),
    ))
}

/// Runs of columns that hold neighbours.
fn column_words(scene: &Scene, map: &[usize]) -> String {
    let cols = scene.tensor.cols;
    let named = |c: usize| match c < cols {
        true => (scene.id.stage.name(), c),
        false => (sister(scene).map_or("?", |s| s.stage.name()), c - cols),
    };
    let mut runs: Vec<(usize, usize, usize)> = Vec::new();
    for (j, c) in map.iter().enumerate() {
        match runs.last_mut() {
            Some((from, to, first)) if *first + (j - *from) == *c && (*c < cols) == (*first < cols) => {
                *to = j
            }
            _ => runs.push((j, j, *c)),
        }
    }
    let moved: Vec<&(usize, usize, usize)> = runs.iter().filter(|(j, _, c)| j != c).collect();
    let words: Vec<String> = moved
        .iter()
        .take(4)
        .map(|(a, b, c)| {
            let (name, c) = named(*c);
            format!("columns {a}..{b} hold {name}'s {c}..{}", c + b - a)
        })
        .collect();
    let more = if moved.len() > 4 { format!(" … ({} runs)", moved.len()) } else { String::new() };
    words.join(", ") + &more
}
