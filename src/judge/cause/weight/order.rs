/*!
Rows or columns in another order: ranks' shards, heads, anything else; rows of a stack also from its other slot.
*/

use super::{About, Guess, Pair, Predict, heads_of, slots};
use mla_numeric::DType;
use mla_reference::Weight;
use mla_reference::product::Rows;
use mla_reference::rows::dense;
use std::collections::HashMap;

/// Columns of a row that tell it from others.
const COLUMNS: usize = 256;
/// Rows that tell a column from others.
const LINES: usize = 8;
/// Equal rows or columns that are remembered.
const EQUAL: usize = 16;
/// What is named before the rest is counted.
const NAMED: usize = 6;

/// Where a line was found: in which of the sources, and where there.
pub type From = (usize, usize);

/// Lines by their bits.
#[derive(Default)]
struct Index(HashMap<Vec<u64>, Vec<From>>);

fn key(values: impl IntoIterator<Item = f64>) -> Vec<u64> {
    values.into_iter().map(f64::to_bits).collect()
}

impl Index {
    fn add(&mut self, key: Vec<u64>, from: From) {
        let all = self.0.entry(key).or_default();
        if all.len() < EQUAL {
            all.push(from);
        }
    }

    /// Where each line comes from; None if one is nowhere. Of equal lines the one that has not moved is taken, then the one
    /// that follows on the last.
    fn order(&self, lines: impl IntoIterator<Item = Vec<u64>>) -> Option<Vec<From>> {
        let mut order: Vec<From> = Vec::new();
        for (i, line) in lines.into_iter().enumerate() {
            let all = self.0.get(&line)?;
            let next = order.last().map(|(s, r)| (*s, r + 1));
            let best = all.iter().find(|f| **f == (0, i)).or_else(|| all.iter().find(|f| Some(**f) == next));
            order.push(*best.or(all.first())?);
        }
        Some(order)
    }
}

/// Rows in another order, of this weight or of the other slot of its stack.
pub fn of_rows<'p>(pair: &Pair<'p>, about: &About<'p>) -> Vec<Guess<'p>> {
    let Some((order, sources)) = rows_from(pair, about) else { return Vec::new() };
    let named: Vec<(String, String)> = if order.iter().any(|f| f.0 > 0) {
        slots::named(pair.weight, &order, about.geometry)
    } else {
        let rows: Vec<usize> = order.iter().map(|f| f.1).collect();
        let head = heads_of(pair.weight, about.geometry, rows.len());
        in_order(pair.weight, "rows", &rows, head, about.ranks).into_iter().collect()
    };
    let guess = |(name, text)| {
        let (order, sources) = (order.clone(), sources.clone());
        let row: Predict<'p> = Box::new(move |r, out| {
            let (source, from) = order[r];
            sources[source].decode(from, 0, out);
        });
        Guess { name, text, row }
    };
    named.into_iter().map(guess).collect()
}

/// Where every row comes from, and the weights that they are rows of.
fn rows_from<'p>(pair: &Pair<'p>, about: &About<'p>) -> Option<(Vec<From>, Vec<&'p dyn Rows>)> {
    let (rows, cols) = (pair.engine.rows(), pair.engine.cols().min(COLUMNS));
    let other = slots::other(pair.weight).and_then(|w| about.sibling(w));
    let sources: Vec<&dyn Rows> =
        std::iter::once(pair.file).chain(other.filter(|o| o.cols() == pair.engine.cols())).collect();
    let mut line = vec![0.0; cols];
    let mut index = Index::default();
    for (i, source) in sources.iter().enumerate() {
        for r in 0..source.rows() {
            source.decode(r, 0, &mut line);
            pair.dtype.round_slice(&mut line);
            index.add(key(line.iter().copied()), (i, r));
        }
    }
    let lines = (0..rows).map(|r| {
        pair.engine.decode(r, 0, &mut line);
        key(line.iter().copied())
    });
    Some((index.order(lines)?, sources))
}

/// Columns in another order.
pub fn of_columns<'p>(pair: &Pair<'p>, about: &About) -> Option<Guess<'p>> {
    let few = pair.engine.rows().min(LINES);
    if few < 2 && pair.engine.cols() < 2 {
        return None;
    }
    let column = |rows: &dyn Rows, dtype: Option<DType>| {
        let mut all = dense(rows, 0..few, true);
        if let Some(dtype) = dtype {
            all.mapv_inplace(|v| dtype.round(v));
        }
        all
    };
    let mut index = Index::default();
    for (c, line) in column(pair.file, Some(pair.dtype)).rows().into_iter().enumerate() {
        index.add(key(line.iter().copied()), (0, c));
    }
    let engine = column(pair.engine, None);
    let order = index.order(engine.rows().into_iter().map(|line| key(line.iter().copied())))?;
    let order: Vec<usize> = order.into_iter().map(|f| f.1).collect();
    let head = (pair.weight == Weight::WO).then_some(about.geometry.value);
    let (name, text) = in_order(pair.weight, "columns", &order, head, about.ranks)?;
    let file = pair.file;
    let row: Predict<'p> = Box::new(move |r, out| {
        let mut whole = vec![0.0; out.len()];
        file.decode(r, 0, &mut whole);
        out.iter_mut().zip(&order).for_each(|(o, c)| *o = whole[*c]);
    });
    Some(Guess { name, text, row })
}

/// For each block of so many lines the block that it is, if all are whole.
fn blocks(order: &[usize], size: usize) -> Option<Vec<usize>> {
    if size == 0 || !order.len().is_multiple_of(size) {
        return None;
    }
    let of: Vec<usize> = order.iter().step_by(size).map(|r| r / size).collect();
    let whole = |(i, r): (usize, &usize)| *r == of[i / size] * size + i % size;
    order.iter().enumerate().all(whole).then_some(of)
}

/// An order in words, its name first; None where nothing has moved. `head`: lines of a head, where there are heads along them.
fn in_order(
    weight: Weight,
    what: &str,
    order: &[usize],
    head: Option<usize>,
    ranks: usize,
) -> Option<(String, String)> {
    let moved = (0..order.len()).filter(|i| order[*i] != *i).count();
    if moved == 0 {
        return None;
    }
    if let (true, Some(head)) = (ranks > 1 && order.len().is_multiple_of(ranks.max(1)), head) {
        let shard = order.len() / ranks;
        let whole_heads = head > 0 && shard.is_multiple_of(head);
        if let Some(of) = blocks(order, shard).filter(|_| whole_heads) {
            return Some(shards(weight, &of));
        }
    }
    let name = format!("{what} of {weight} in another order");
    if let Some(of) = head.and_then(|size| blocks(order, size)) {
        let words = some(of.iter().enumerate().filter(|(h, o)| h != *o), |(h, o)| format!("head {h} holds {o}"));
        return Some((name, format!("heads of {weight} are in another order: {words}")));
    }
    Some((name, format!("{what} of {weight} are in another order: {}", runs(order, moved))))
}

/// Which rank's shard each rank holds, in words.
fn shards(weight: Weight, of: &[usize]) -> (String, String) {
    let first = of[0];
    if of.iter().all(|o| *o == first) {
        let name = format!("rank {first}'s shard of {weight} on every rank");
        return (name, format!("every rank holds rank {first}'s shard of {weight}"));
    }
    let mut said = false;
    let words = some(of.iter().enumerate().filter(|(r, o)| r != *o), |(r, o)| {
        let what = if std::mem::replace(&mut said, true) { "" } else { " holds" };
        let shard = if what.is_empty() { "" } else { " shard" };
        format!("rank {r}{what} rank {o}'s{shard}")
    });
    (format!("shards of {weight} in another order"), format!("shards of {weight} are in another order: {words}"))
}

/// The first few in words, and how many more there are.
fn some<T>(items: impl Iterator<Item = T>, mut word: impl FnMut(T) -> String) -> String {
    let all: Vec<T> = items.collect();
    let more = all.len().saturating_sub(NAMED);
    let words: Vec<String> = all.into_iter().take(NAMED).map(&mut word).collect();
    let more = if more > 0 { format!(", and {more} more") } else { String::new() };
    words.join(", ") + &more
}

/// Runs of lines that have moved.
fn runs(order: &[usize], moved: usize) -> String {
    let mut runs: Vec<(usize, usize, usize)> = Vec::new();
    for (i, from) in order.iter().enumerate() {
        match runs.last_mut() {
            Some((a, b, first)) if *first + (i - *a) == *from => *b = i,
            _ => runs.push((i, i, *from)),
        }
    }
    let words: Vec<String> = runs
        .iter()
        .filter(|(a, _, f)| a != f)
        .take(4)
        .map(|(a, b, f)| format!("{a}..{b} hold {f}..{}", f + b - a))
        .collect();
    let more = if runs.len() > 5 { format!(" … ({moved} moved)") } else { String::new() };
    format!("{}{more}", words.join(", "))
}
