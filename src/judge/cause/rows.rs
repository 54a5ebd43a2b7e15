/*!
Rows that nobody wrote: zeros, poison, one value throughout, copies of other rows, another tensor's bits, rows that stand
elsewhere.

What such a cell (a row of a head) holds is a matter of bits, so nothing is fitted: cells that differ from the
reference and are copies or constants are excused, and the rest must pass as clean.
*/

use super::Hypothesis;
use super::change::Change;
use super::scene::Scene;
use crate::report::finding::ranges;
use crate::trace::Tensor;
use mla_reference::{RowName, Stage};
use std::collections::HashMap;

const FAMILY: &str = "rows";

/// What a wrong cell holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    /// Zeros.
    Zeros,
    /// NaN, or all bits set.
    Poison,
    /// One value.
    Constant,
    /// An lse of −∞.
    NoKey,
    /// What another cell of the engine's tensor holds: row, head.
    Copy(usize, usize),
    /// What another row should hold.
    Other(usize),
}

/// All of the family.
pub(super) fn all<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let mut all: Vec<Hypothesis> = buffer(scene).into_iter().collect();
    let wrong: Vec<(usize, usize)> = scene
        .rows
        .iter()
        .flat_map(|r| (0..scene.heads).map(move |h| (*r, h)))
        .filter(|(r, h)| scene.odd[[*r, *h]] > 0)
        .collect();
    if wrong.is_empty() {
        return all;
    }
    let cells = cells(scene);
    let seen: Vec<((usize, usize), Holds)> =
        wrong.iter().filter_map(|c| Some((*c, holds(scene, &cells, *c)?))).collect();
    if seen.is_empty() {
        return all;
    }
    let mut tensor = scene.copy_of();
    for ((r, h), _) in &seen {
        excuse(scene, &mut tensor, *r, *h);
    }
    let mut tensors = vec![(scene.id, tensor)];
    if let Some(moved) = moved(scene, &seen) {
        tensors.push((scene.id, moved));
    }
    let (name, text) = words(scene, &seen);
    let change = Change { tensors, counted: Some(0.0), ..Change::default() };
    all.push(Hypothesis::new(FAMILY, name, text, change));
    all
}

fn bytes<'t>(scene: &Scene, t: &'t Tensor, row: usize, head: usize) -> &'t [u8] {
    let n = t.dtype.bytes();
    let at = (row * t.cols + head * scene.width) * n;
    t.bytes.get(at..at + scene.width * n).unwrap_or_default()
}

fn excuse(scene: &Scene, t: &mut Tensor, row: usize, head: usize) {
    let own = bytes(scene, &scene.rounded, row, head).to_vec();
    t.write_bytes(row, head * scene.width, &own);
}

/// Cells of the engine's tensor by their bytes, first ones first, and rows of the reference by theirs.
struct Cells<'t> {
    engine: HashMap<&'t [u8], (usize, usize)>,
    reference: HashMap<Vec<u8>, usize>,
    /// Columns by which rows of the reference are known.
    probes: Vec<Vec<usize>>,
}

fn probe(t: &Tensor, row: usize, columns: &[usize]) -> Vec<u8> {
    columns.iter().flat_map(|c| t.bits(row, *c).to_le_bytes()).collect()
}

fn cells<'t>(scene: &Scene<'t>) -> Cells<'t> {
    let mut engine = HashMap::new();
    let t = scene.tensor;
    for r in 0..t.rows {
        for h in 0..scene.heads {
            engine.entry(bytes(scene, t, r, h)).or_insert((r, h));
        }
    }
    // Eight columns at a time, far apart: a flip spoils one look-up in eight.
    let probes: Vec<Vec<usize>> =
        (0..8).map(|k| (0..8).map(|i| (i * 8 + k) * t.cols / 64).collect()).collect();
    let mut reference = HashMap::new();
    for r in 0..t.rows {
        for p in &probes {
            reference.entry(probe(&scene.rounded, r, p)).or_insert(r);
        }
    }
    Cells { engine, reference, probes }
}

fn holds(scene: &Scene, cells: &Cells, (row, head): (usize, usize)) -> Option<Holds> {
    let t = scene.tensor;
    let own = bytes(scene, t, row, head);
    let first = scene.width * head;
    let bits = |j: usize| t.bits(row, first + j);
    if own.iter().all(|b| *b == 0) {
        return Some(Holds::Zeros);
    }
    if (0..scene.width).all(|j| t.get(row, first + j).is_nan()) {
        return Some(Holds::Poison);
    }
    // One number that equals another's says nothing.
    if scene.width < 2 {
        let none = scene.is_lse() && t.get(row, first) == f64::NEG_INFINITY;
        return none.then_some(Holds::NoKey);
    }
    if scene.width >= 4 && (0..scene.width).all(|j| bits(j) == bits(0)) {
        return Some(Holds::Constant);
    }
    // Keys and slots that stand elsewhere say more than that another row holds the same.
    let keyed = matches!(scene.id.stage, Stage::K | Stage::V | Stage::Cache);
    if let Some(other) = other(scene, cells, row).filter(|_| keyed) {
        return Some(Holds::Other(other));
    }
    if scene.width >= 4
        && let Some(&(r, h)) = cells.engine.get(own)
        && (r, h) != (row, head)
        && bytes(scene, &scene.rounded, r, h) != bytes(scene, &scene.rounded, row, head)
    {
        return Some(Holds::Copy(r, h));
    }
    // The first of two equal cells may be the wrong one.
    let twin = || {
        scene.rows.iter().flat_map(|r| (0..scene.heads).map(move |h| (*r, h))).find(|(r, h)| {
            (*r, *h) != (row, head) && scene.odd[[*r, *h]] == 0 && bytes(scene, t, *r, *h) == own
        })
    };
    if scene.width >= 4
        && let Some((r, h)) = twin()
    {
        return Some(Holds::Copy(r, h));
    }
    other(scene, cells, row).map(Holds::Other)
}

/// Another row whose reference this one holds.
fn other(scene: &Scene, cells: &Cells, row: usize) -> Option<usize> {
    let t = scene.tensor;
    if scene.width < 8 {
        return None;
    }
    let other = cells.probes.iter().find_map(|p| cells.reference.get(&probe(t, row, p)).copied())?;
    let same = (0..t.cols).filter(|c| t.bits(row, *c) == scene.rounded.bits(other, *c)).count();
    (other != row && same * 2 > t.cols).then_some(other)
}

/// The rows that stand elsewhere, where they belong; what is not among them takes the reference.
fn moved(scene: &Scene, seen: &[((usize, usize), Holds)]) -> Option<Tensor> {
    let moved: Vec<(usize, usize)> = seen
        .iter()
        .filter_map(|((r, _), holds)| match holds {
            Holds::Other(to) => Some((*r, *to)),
            _ => None,
        })
        .collect();
    if moved.is_empty() {
        return None;
    }
    let mut out = scene.rounded.clone();
    for (from, to) in moved {
        let n = scene.tensor.cols * scene.tensor.dtype.bytes();
        let line = scene.tensor.bytes.get(from * n..(from + 1) * n)?.to_vec();
        out.write_bytes(to, 0, &line);
    }
    Some(out)
}

/// All that is wrong is what another tensor that was recorded holds there, bit for bit.
fn buffer<'a>(scene: &Scene<'a>) -> Option<Hypothesis<'a>> {
    let t = scene.tensor;
    let plan = &scene.of.case.plan;
    let heads = |r: &usize| (0..scene.heads).map(|h| (*r, h)).collect::<Vec<_>>();
    let wrong: Vec<(usize, usize)> =
        scene.rows.iter().flat_map(heads).filter(|(r, h)| scene.odd[[*r, *h]] > 0).collect();
    for &stage in Stage::ALL {
        if stage == scene.id.stage || plan.rows(stage, scene.id.form) != t.rows {
            continue;
        }
        let Some(block) = super::input::recorded(scene, stage, t.cols) else { continue };
        let columns = |h: usize| h * scene.width..(h + 1) * scene.width;
        let same = |(r, h): &(usize, usize)| {
            scene.width > 1 && columns(*h).all(|c| t.get(*r, c).to_bits() == block[[*r, c]].to_bits())
        };
        if !wrong.is_empty() && wrong.iter().all(same) {
            let mut tensor = scene.copy_of();
            wrong.iter().for_each(|(r, h)| excuse(scene, &mut tensor, *r, *h));
            let names = plan.names(scene.id.stage, scene.id.form);
            let which = cells_words(scene, &names, &wrong);
            let text = format!("{which}: the recorded {stage}, bit for bit");
            let change =
                Change { tensors: vec![(scene.id, tensor)], counted: Some(0.0), ..Change::default() };
            return Some(Hypothesis::new("buffer", format!("holds {stage}"), text, change));
        }
    }
    None
}

fn place(names: &[RowName], row: usize) -> String {
    match names.get(row) {
        Some(RowName { request: Some(r), index, rank: Some(rank), .. }) => {
            format!("row {index} of request {r} of rank {rank}")
        }
        Some(RowName { request: Some(r), index, .. }) => format!("row {index} of request {r}"),
        _ => format!("row {row}"),
    }
}

fn words(scene: &Scene, seen: &[((usize, usize), Holds)]) -> (String, String) {
    let names = scene.of.case.plan.names(scene.id.stage, scene.id.form);
    let mut parts: Vec<(String, String)> = Vec::new();
    let constants = [
        (Holds::Zeros, "zero rows", "zeros throughout, never written or written from nothing"),
        (
            Holds::Poison,
            "unwritten rows",
            "NaN throughout, never written or read from memory that nobody wrote",
        ),
        (Holds::Constant, "constant rows", "one value throughout"),
        (Holds::NoKey, "rows taken to see no key", "an lse of −∞, though they see keys"),
    ];
    for (holds, name, text) in constants {
        let cells: Vec<(usize, usize)> = seen.iter().filter(|(_, h)| *h == holds).map(|(c, _)| *c).collect();
        if !cells.is_empty() {
            parts.push((name.into(), format!("{}: {text}", cells_words(scene, &names, &cells))));
        }
    }
    let copies: Vec<&((usize, usize), Holds)> =
        seen.iter().filter(|(_, h)| matches!(h, Holds::Copy(..))).collect();
    if !copies.is_empty() {
        let words: Vec<String> = copies
            .iter()
            .take(3)
            .map(|((r, h), of)| {
                let Holds::Copy(a, b) = of else { return String::new() };
                let head = |h: usize| if scene.heads > 1 { format!(", head {h}") } else { String::new() };
                format!("{}{} holds {}{}", place(&names, *r), head(*h), place(&names, *a), head(*b))
            })
            .collect();
        let more = copies.len().saturating_sub(3);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let text = format!("stale rows, copies bit for bit: {}{more}", words.join("; "));
        parts.push(("stale rows".into(), text));
    }
    let others: Vec<(usize, usize)> = seen
        .iter()
        .filter_map(|((r, _), h)| match h {
            Holds::Other(to) => Some((*r, *to)),
            _ => None,
        })
        .collect();
    let mut others = others;
    others.dedup();
    if !others.is_empty() {
        let words = moved_words(scene, &names, &others);
        let more = words.len().saturating_sub(4);
        let words = &words[..words.len().min(4)];
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        parts.push(("rows of other places".into(), format!("{}{more}", words.join("; "))));
    }
    let names: Vec<String> = parts.iter().map(|p| p.0.clone()).collect();
    let texts: Vec<String> = parts.into_iter().map(|p| p.1).collect();
    (names.join(" and "), texts.join("; "))
}

/// Rows that stand elsewhere, whole pages of keys as such.
fn moved_words(scene: &Scene, names: &[RowName], others: &[(usize, usize)]) -> Vec<String> {
    let size = scene.of.case.plan.page_size.max(1);
    let keyed = matches!(scene.id.stage, Stage::K | Stage::V);
    let page = |r: usize| names.get(r).and_then(|n| Some((n.request?, n.index / size, n.index % size)));
    let mut words: Vec<String> = Vec::new();
    for (r, to) in others {
        let text = match (page(*r), page(*to)) {
            (Some((a, p, i)), Some((b, q, j))) if keyed && i == j => {
                format!("keys of page {p} of request {a} are those of page {q} of request {b}")
            }
            _ => format!("{} holds {}", place(names, *r), place(names, *to)),
        };
        if !words.contains(&text) {
            words.push(text);
        }
    }
    words
}

/// Cells in words: everything, some heads, some rows.
fn cells_words(scene: &Scene, names: &[RowName], cells: &[(usize, usize)]) -> String {
    let mut rows: Vec<usize> = cells.iter().map(|c| c.0).collect();
    rows.dedup();
    let mut heads: Vec<usize> = cells.iter().map(|c| c.1).collect();
    heads.sort_unstable();
    heads.dedup();
    if rows.len() * heads.len() != cells.len() {
        return format!("{} cells (row and head)", cells.len());
    }
    let all_rows = rows.len() == scene.rows.len();
    let rows = match rows[..] {
        [one] => place(names, one),
        _ => format!(
            "{} rows, {} to {}",
            rows.len(),
            place(names, rows[0]),
            place(names, rows[rows.len() - 1])
        ),
    };
    match (all_rows, heads.len() == scene.heads) {
        (true, true) => "all elements".into(),
        (true, false) => format!("heads {}", ranges(&heads)),
        (false, true) => rows,
        (false, false) => format!("heads {} of {rows}", ranges(&heads)),
    }
}
