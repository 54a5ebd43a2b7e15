/*!
Which keys attention reads: masks, the online softmax's bookkeeping, tokens left out or read twice, pages of others.

Keys and pages are pointed at by the residual ([`super::scene::Scene::keys`]); only those that stand out are tried.
*/

use super::Hypothesis;
use super::change::Change;
use super::scene::Scene;
use mla_reference::{KeyList, Mask, Phase, Rescale, Source, Stage};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

const FAMILY: &str = "keys";
/// Hypotheses that read slots which no request owns.
pub(super) const TABLE: &str = "page table";
/// Keys of a sequence that are tried.
const TOP: usize = 3;
/// Sequences that are looked at one by one.
const SEQUENCES: usize = 8;
/// Pages that are tried in the place of one.
const PAGES: usize = 48;

/// Masks off by a few, or none.
pub(super) fn masks<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if !scene.attends() {
        return Vec::new();
    }
    let mut all = Vec::new();
    for n in [-1i64, 1, -2, 2] {
        let more = if n > 0 { "more" } else { "fewer" };
        let keys = if n.abs() == 1 { "key" } else { "keys" };
        let text = format!("each row sees {} {keys} {more} than the causal mask allows", n.abs());
        let change = Change::departure(|d| d.mask = Mask::Causal(n));
        all.push(Hypothesis::new("mask", format!("mask {n:+}"), text, change));
    }
    if scene.phase == Phase::Prefill {
        let change = Change::departure(|d| d.mask = Mask::All);
        all.push(Hypothesis::new(
            "mask",
            "no mask",
            "there is no causal mask: each row sees all keys",
            change,
        ));
    }
    all
}

/// Running maximum, parts of the score, whole ranges of keys.
pub(super) fn softmax<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if !scene.attends() {
        return Vec::new();
    }
    let rescales = [
        ("no rescale", "sums are not rescaled when the running maximum grows", Rescale::Neither),
        (
            "output not rescaled",
            "the row sum is rescaled when the running maximum grows, the output is not",
            Rescale::Sum,
        ),
        (
            "row sum not rescaled",
            "the output is rescaled when the running maximum grows, the row sum is not",
            Rescale::Output,
        ),
    ];
    // An lse sees the row sum alone.
    let asked = rescales.into_iter().take(if scene.is_lse() { 1 } else { 3 });
    let mut all: Vec<Hypothesis> = asked
        .map(|(name, text, r)| {
            Hypothesis::new("online softmax", name, text, Change::departure(|d| d.rescale = r))
        })
        .collect();
    all.push(Hypothesis::new(
        "online softmax",
        "no rescale at the last tile",
        "sums are not rescaled when the running maximum grows in a row's last tile",
        Change::departure(|d| d.no_last_rescale = true),
    ));
    let g = scene.spec().geometry;
    if scene.absorbed() && !scene.is_lse() && g.rope > 0 {
        let text = format!("values are read from column {} of cache rows on, as if rope came first", g.rope);
        let change = Change::departure(|d| d.value_from = g.rope);
        all.push(Hypothesis::new("values", format!("values from column {}", g.rope), text, change));
    }
    // Columns of an input left out, told by their place inside a head.
    let zero = |stage: Stage, width: usize, which: fn(usize, usize) -> bool| {
        Change::source(stage, move |source: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
            let mut block = source.block(stage, rows, cols.clone());
            for (mut column, c) in block.columns_mut().into_iter().zip(cols) {
                if which(c % width, g.nope) {
                    column.fill(0.0);
                }
            }
            block
        })
    };
    let text = "the rope part is left out of the scores";
    let change = zero(Stage::Q, g.key(), |c, nope| c >= nope);
    all.push(Hypothesis::new("scores", "rope part left out", text, change));
    let change = match scene.absorbed() {
        true => zero(Stage::QLatent, g.latent, |_, _| true),
        false => zero(Stage::Q, g.key(), |c, nope| c < nope),
    };
    let text = "the part without rope is left out of the scores";
    all.push(Hypothesis::new("scores", "nope part left out", text, change));
    let plan = &scene.of.case.plan;
    let tile = scene.of.contract.softmax.tile.max(1);
    let page = plan.page_size.max(1);
    let mut gone = |name: &str, text: &str, of: &dyn Fn(usize, usize) -> Range<usize>| {
        let ranges: Vec<(usize, Vec<usize>)> = plan
            .sequences
            .iter()
            .enumerate()
            .map(|(i, s)| (i, of(s.context, s.keys()).collect()))
            .filter(|(_, r): &(usize, Vec<usize>)| !r.is_empty())
            .collect();
        if !ranges.is_empty() {
            let change = Change::departure(|d| d.gone = ranges);
            all.push(Hypothesis::new(FAMILY, name, text, change));
        }
    };
    gone("context left out", "keys of the context are left out", &|c, _| 0..c);
    gone("new tokens left out", "keys of the new tokens are left out", &|c, n| c..n);
    let rest = |n: usize, size: usize| if n > size { n / size * size..n } else { 0..0 };
    gone("last partial tile left out", "keys after the last whole tile are left out", &|_, n| rest(n, tile));
    gone("last partial page left out", "keys after the last whole page are left out", &|_, n| rest(n, page));
    gone("first page left out", "keys of the first page are left out", &|_, n| {
        0..if n > page { page } else { 0 }
    });
    gone("first key left out", "the first key is left out", &|_, n| 0..n.min(1));
    if scene.phase == Phase::Decode && scene.id.stage != Stage::PartO && scene.id.stage != Stage::PartLse {
        let splits = |n: usize| scene.of.contract.split_ranges(n);
        let most = plan.sequences.iter().map(|s| splits(s.keys()).len()).max().unwrap_or(1);
        for s in (0..most).filter(|_| most > 1) {
            let text = format!("keys of split {s} are left out");
            gone(&format!("split {s} missing"), &text, &|_, n| splits(n).get(s).cloned().unwrap_or(0..0));
        }
    }
    all
}

/// The last tile is read to its end: keys of zeros behind the last one, or the last one again, as far as rows see it.
pub(super) fn tails<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if !scene.attends() {
        return Vec::new();
    }
    let plan = &scene.of.case.plan;
    let tile = scene.of.contract.softmax.tile.max(1);
    let mut ends: Vec<(String, usize)> = Vec::new();
    for (name, size) in [
        ("tile".to_string(), tile),
        ("page".to_string(), plan.page_size.max(1)),
        ("16 keys".to_string(), 16),
        ("8 keys".to_string(), 8),
    ] {
        if size > 1 && ends.iter().all(|e| e.1 != size) {
            ends.push((name, size));
        }
    }
    let filled = |zeros: bool, more: &dyn Fn(usize) -> usize| {
        Change::departure(|d| {
            d.keys = plan
                .sequences
                .iter()
                .enumerate()
                .map(|(i, s)| {
                    let (n, fill) = (s.keys(), more(s.keys()));
                    let last = n.saturating_sub(1);
                    let with = |of: usize| (0..n).chain(std::iter::repeat_n(of, fill)).collect();
                    (i, KeyList { source: with(if zeros { n } else { last }), place: with(last) })
                })
                .collect();
        })
    };
    let mut all = Vec::new();
    for (zeros, what) in [(true, "keys of zeros"), (false, "the last key again")] {
        for (name, size) in &ends {
            let text = format!("rows that see the last key see {what} behind it, to the end of its {name}");
            let change = filled(zeros, &|n| n.next_multiple_of(*size) - n);
            all.push(Hypothesis::new(FAMILY, format!("{what} to the end of the {name}"), text, change));
        }
        let text = format!("rows that see the last key see {what} once behind it");
        all.push(Hypothesis::new(FAMILY, format!("{what} once"), text, filled(zeros, &|_| 1)));
    }
    all
}

/// A sequence that is wrong, with keys and pages that stand out.
struct Wrong {
    sequence: usize,
    rows: Vec<usize>,
    keys: Vec<usize>,
    pages: Vec<usize>,
}

fn wrong(scene: &Scene) -> Vec<Wrong> {
    let plan = &scene.of.case.plan;
    let names = plan.names(scene.id.stage, scene.id.form);
    let mut by: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for &r in &scene.rows {
        if let Some(s) = names[r].sequence {
            by.entry(s).or_default().push(r);
        }
    }
    let share = |rows: &[usize]| {
        let odd: u64 = rows.iter().map(|r| scene.odd_row(*r)).sum();
        odd as f64 / (rows.len() * scene.tensor.cols).max(1) as f64
    };
    let most = by.values().map(|r| share(r)).fold(0.0, f64::max);
    let mut all = Vec::new();
    for (sequence, mut rows) in by {
        let Some(sums) = scene.keys.get(&sequence) else { continue };
        if share(&rows) < 0.1 * most {
            continue;
        }
        let z = |(num, den): (f64, f64)| if den > 0.0 { (num / den.sqrt()).abs() } else { 0.0 };
        let mut keys: Vec<usize> = (0..sums.len()).collect();
        keys.sort_by(|a, b| z(sums[*b]).total_cmp(&z(sums[*a])));
        let size = plan.page_size.max(1);
        let page = |p: &usize| {
            let some = sums.iter().skip(p * size).take(size);
            z(some.fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1)))
        };
        let mut pages: Vec<usize> = (0..sums.len().div_ceil(size)).collect();
        pages.sort_by(|a, b| page(b).total_cmp(&page(a)));
        keys.truncate(TOP);
        pages.truncate(2);
        rows.sort_by_key(|r| std::cmp::Reverse(scene.odd_row(*r)));
        rows.truncate(16);
        all.push(Wrong { sequence, rows, keys, pages });
    }
    all
}

/// Keys without one position, or with it twice.
fn without(keys: usize, t: usize) -> KeyList {
    let place: Vec<usize> = (0..keys).filter(|k| *k != t).collect();
    KeyList { source: place.clone(), place }
}

fn double(keys: usize, t: usize) -> KeyList {
    let place: Vec<usize> =
        (0..keys).flat_map(|k| std::iter::repeat_n(k, if k == t { 2 } else { 1 })).collect();
    KeyList { source: place.clone(), place }
}

/// Ways in which one key may be lost or doubled.
const KINDS: [(&str, &str); 3] = [
    ("left out", "is left out (masked where it stands)"),
    ("left out", "is left out (the keys after it move up)"),
    ("duplicated", "is read twice"),
];

fn one_key<'a>(kind: usize, of: &[(usize, usize, usize)]) -> Change<'a> {
    Change::departure(|d| {
        for &(sequence, keys, t) in of {
            match kind {
                0 => d.gone.push((sequence, vec![t])),
                1 => d.keys.push((sequence, without(keys, t))),
                _ => d.keys.push((sequence, double(keys, t))),
            }
        }
    })
}

/// Single keys and pages.
pub(super) fn lists<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if !scene.attends() {
        return Vec::new();
    }
    let plan = &scene.of.case.plan;
    let wrong = wrong(scene);
    let mut all = Vec::new();
    let names = plan.names(scene.id.stage, scene.id.form);
    let of_phase: BTreeSet<usize> = scene.rows.iter().filter_map(|r| names[*r].sequence).collect();
    let keys = |s: usize| plan.sequences.get(s).map_or(0, |s| s.keys());
    let mut positions: Vec<usize> = wrong.iter().flat_map(|w| w.keys.iter().copied()).collect();
    positions.sort_unstable();
    positions.dedup();
    positions.truncate(3 * TOP);
    for t in positions {
        let of: Vec<(usize, usize, usize)> =
            (0..plan.sequences.len()).map(|s| (s, keys(s), t)).filter(|(_, n, _)| t < *n).collect();
        for (kind, (name, text)) in KINDS.iter().enumerate() {
            let text = format!("key {t} {text}, in every sequence that has it");
            all.push(Hypothesis::new(FAMILY, format!("key {t} {name}"), text, one_key(kind, &of)));
        }
    }
    if wrong.len() <= SEQUENCES && plan.sequences.len() > 1 {
        for (kind, (name, text)) in KINDS.iter().enumerate() {
            let mut chosen = Vec::new();
            for w in &wrong {
                let share = |t: &usize| {
                    scene.aside_share(&one_key(kind, &[(w.sequence, keys(w.sequence), *t)]), &w.rows, &[])
                };
                let best = w.keys.iter().map(|t| (share(t), *t)).min_by(|a, b| a.0.total_cmp(&b.0));
                chosen.extend(best.map(|(_, t)| (w.sequence, keys(w.sequence), t)));
            }
            // The same as the one of every sequence: said already.
            let same = chosen.first().is_some_and(|(_, _, t)| {
                let has = |s: &usize| *t < keys(*s) && of_phase.contains(s);
                let all: Vec<usize> = (0..plan.sequences.len()).filter(has).collect();
                chosen.iter().all(|c| c.2 == *t) && all == chosen.iter().map(|c| c.0).collect::<Vec<_>>()
            });
            if same || chosen.is_empty() {
                continue;
            }
            let list: Vec<String> = chosen
                .iter()
                .map(|(s, _, t)| format!("{t} of request {}", plan.sequences[*s].request))
                .collect();
            let list = list.join(", ");
            let text = format!("key {list} {text}, elsewhere all is read");
            let change = one_key(kind, &chosen);
            all.push(Hypothesis::new(FAMILY, format!("key {list} {name}"), text, change));
        }
    }
    all.extend(pages(scene, &wrong));
    all.extend(tables(scene));
    all
}

/// A page table that is not followed, or taken for what it is not, where keys are read from the pool.
fn tables<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let plan = &scene.of.case.plan;
    let (size, pool) = (plan.page_size.max(1), (plan.pages * plan.page_size).max(1));
    if !scene.absorbed() {
        return Vec::new();
    }
    type Slot<'s> = &'s dyn Fn(&[usize], usize) -> usize;
    let kinds: [(&str, &str, Slot); 2] = [
        (
            "page table not followed",
            "keys are read from one slot after another, from the first one on: the page table is not followed",
            &|slots, i| (slots[0] + i) % pool,
        ),
        (
            "page table taken for slots",
            "the table of pages is taken for a table of slots: keys are read from slots with the numbers of pages",
            &|slots, i| slots[i % slots.len().div_ceil(size) * size] / size,
        ),
    ];
    let of = |(name, text, slot): (&str, &str, Slot)| {
        let change = Change::plan(plan, |p| {
            for s in &mut p.sequences {
                s.slots = (0..s.slots.len()).map(|i| slot(&s.slots, i)).collect();
            }
        });
        Hypothesis::new(TABLE, name, text, change)
    };
    kinds.into_iter().map(of).collect()
}

/// A page read in place of another one: of the sequence, or of another's table.
fn pages<'a>(scene: &Scene<'a>, wrong: &[Wrong]) -> Option<Hypothesis<'a>> {
    let plan = &scene.of.case.plan;
    let size = plan.page_size.max(1);
    if wrong.len() > SEQUENCES {
        return None;
    }
    // (sequence, page, from sequence, from page): slots for latent keys, keys of the same sequence else.
    let change = |of: &[(usize, usize, usize, usize)]| {
        if scene.absorbed() {
            return Change::plan(plan, |p| {
                for &(s, i, from, j) in of {
                    let to = i * size..((i + 1) * size).min(plan.sequences[s].slots.len());
                    let other = &plan.sequences[from].slots;
                    for (k, t) in to.enumerate() {
                        if let Some(slot) = other.get(j * size + k) {
                            p.sequences[s].slots[t] = *slot;
                        }
                    }
                }
            });
        }
        Change::departure(|d| {
            for &(s, i, _, j) in of {
                let n = plan.sequences[s].keys();
                let moved = |t: usize| if t / size == i { (j * size + t % size).min(n - 1) } else { t };
                d.keys.push((s, KeyList { source: (0..n).map(moved).collect(), place: (0..n).collect() }));
            }
        })
    };
    let mut chosen = Vec::new();
    for w in wrong {
        let mut best: Option<(f64, (usize, usize, usize, usize))> = None;
        for &i in &w.pages {
            let filled = (plan.sequences[w.sequence].keys() - i * size).min(size);
            let own = (0..plan.sequences[w.sequence].keys().div_ceil(size)).map(|j| (w.sequence, j));
            let foreign = (0..plan.sequences.len())
                .filter(|s| {
                    scene.absorbed() && plan.sequences[*s].request != plan.sequences[w.sequence].request
                })
                .flat_map(|s| (0..plan.sequences[s].keys().div_ceil(size)).map(move |j| (s, j)));
            let enough = |(s, j): &(usize, usize)| {
                (*s, *j) != (w.sequence, i) && plan.sequences[*s].keys() >= j * size + filled
            };
            for (from, j) in own.chain(foreign).filter(enough).take(PAGES) {
                let one = (w.sequence, i, from, j);
                let share = scene.aside_share(&change(&[one]), &w.rows, &[]);
                if best.is_none_or(|(s, _)| share < s) {
                    best = Some((share, one));
                }
            }
        }
        chosen.extend(best.map(|(_, one)| one));
    }
    if chosen.is_empty() {
        return None;
    }
    let words: Vec<String> = chosen
        .iter()
        .map(|(s, i, from, j)| {
            let (own, other) = (plan.sequences[*s].request, plan.sequences[*from].request);
            let whose = if own == other { "its own".to_string() } else { format!("request {other}'s") };
            format!("page {i} of request {own} is read from {whose} page {j}")
        })
        .collect();
    let short: Vec<String> = chosen
        .iter()
        .map(|(s, i, from, j)| {
            let (own, other) = (plan.sequences[*s].request, plan.sequences[*from].request);
            if own == other {
                format!("page {i} ← {j}")
            } else {
                format!("page {i} ← {j} of request {other}")
            }
        })
        .collect();
    // Both regimes of a request read alike.
    let once = |all: Vec<String>| {
        let mut seen = BTreeSet::new();
        all.into_iter().filter(|w| seen.insert(w.clone())).collect::<Vec<_>>()
    };
    let (short, words) = (once(short), once(words));
    Some(Hypothesis::new(FAMILY, short.join(", "), words.join("; "), change(&chosen)))
}
