/*!
A finding in words: what is bad about one tensor, where, by how much, and what was tried to explain it.

The same sentences serve the terminal and the block of Markdown that people paste into issues.
*/

use super::LayerReport;
use crate::judge::cause::Left;
use crate::judge::localise::{Found, Keys, Place};
use crate::judge::picture::Picture;
use crate::judge::{Diagnosis, Explained, Unit, Verdict, Which};
use mla_reference::{Axis, Regime};

/// Sentences about a unit, each with its lead word: (`where`, `head 3, rows …`).
pub fn sentences(l: &LayerReport, u: &Unit) -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    if let Some(n) = u.note.as_deref().filter(|n| !n.is_empty()) {
        all.push(("", n.to_string()));
    }
    if let Some(f) = &u.found {
        place(l, u, f, &mut all);
    }
    if let Some(w) = worst(l, u) {
        all.push(("worst", w));
    }
    let shown = 3;
    for e in u.evidence.iter().take(shown) {
        all.push(("evidence", e.clone()));
    }
    if u.evidence.len() > shown {
        all.push(("", format!("and {} more tests", u.evidence.len() - shown)));
    }
    match (&u.explained, u.tried) {
        (Some(Explained::Contract(c)), n) => {
            let than = if l.judged.is_some() { "judged" } else { "declared" };
            let text = format!("by another contract than the one {than}: {c} ({n} explanations tried)");
            all.push(("explained", text));
        }
        (Some(Explained::Convention(c)), n) => {
            all.push(("explained", format!("this is what convention {c} computes ({n} explanations tried)")));
        }
        (None, n) => cause(u.diagnosis.as_ref(), n, &mut all),
    }
    all
}

/// Why, in words; `others`: contracts and conventions that were tried before.
fn cause(diagnosis: Option<&Diagnosis>, others: usize, all: &mut Vec<(&'static str, String)>) {
    let share = |l: &Left| format!("{} ({:.1} % odd)", l.name, 100.0 * l.share);
    match diagnosis {
        Some(Diagnosis::Cause(c)) => {
            let mut text = format!("{} ({} causes tried", c.text, c.tried);
            if let Some(next) = &c.runner_up {
                text += &format!("; next best: {}", share(next));
            }
            all.push(("cause", text + ")"));
            if !c.ambiguous_with.is_empty() {
                let text = format!("these pass as well: {}", c.ambiguous_with.join("; "));
                all.push(("ambiguous", text));
            }
        }
        Some(Diagnosis::Unexplained { tried, best }) => {
            let mut text = format!("none of {tried} causes");
            if others > 0 {
                text += &format!(" and none of {others} other contracts and conventions");
            }
            text += " explains it";
            if !best.is_empty() {
                let best: Vec<String> = best.iter().map(share).collect();
                text += &format!("; nearest: {}", best.join(", "));
            }
            all.push(("unexplained", text));
        }
        None if others > 0 => {
            let text = format!("none of {others} other contracts and conventions explains it");
            all.push(("unexplained", text));
        }
        None => {}
    }
}

/// `fused/attn_out, prefill [token, head, value] = [103, 4, 256]`
pub fn title(u: &Unit) -> String {
    let axes: Vec<&str> = u.axes.iter().map(|a| a.name()).collect();
    let shape: Vec<String> = u.shape.iter().map(|n| n.to_string()).collect();
    if axes.is_empty() {
        u.title()
    } else {
        format!("{} [{}] = [{}]", u.title(), axes.join(", "), shape.join(", "))
    }
}

/// Units with evidence, first in the order of judgement.
pub fn bad(l: &LayerReport) -> Vec<&Unit> {
    crate::judge::origins(&l.tensors).collect()
}

/// The smallest gain and scale that every compared tensor would have shown; None where nothing has power.
pub fn seen(l: &LayerReport) -> (Option<f64>, Option<f64>) {
    let units = || {
        l.tensors
            .iter()
            .filter(|u| matches!(u.verdict, Verdict::Rounding | Verdict::Inconclusive))
            .filter_map(|u| u.power.as_ref())
    };
    let worst = |of: Vec<Option<f64>>| {
        let all: Option<Vec<f64>> = of.into_iter().collect();
        all.and_then(|v| v.into_iter().reduce(f64::max))
    };
    let gain = worst(units().map(|p| p.gain).collect());
    let scale = worst(units().filter(|p| p.scale_applies).map(|p| p.scale).collect());
    (gain, scale)
}

fn place(l: &LayerReport, u: &Unit, f: &Found, all: &mut Vec<(&'static str, String)>) {
    let shown = 3;
    for (i, p) in f.places.iter().take(shown).enumerate() {
        let text = format!("{} ({} of {} elements there)", box_words(l, u, p), p.bad, p.elements);
        all.push((if i == 0 { "where" } else { "and" }, text));
    }
    let rest = f.places.len().saturating_sub(shown);
    if rest > 0 {
        all.push(("and", format!("{rest} more places")));
    }
    if f.places.is_empty() {
        all.push(("where", "spread over the tensor, in no box".into()));
    } else if f.outside_clean {
        let everywhere = f.places.iter().any(is_whole);
        if !everywhere {
            all.push(("", "everything outside is clean".into()));
        }
    } else {
        all.push(("", "outside of these places it is not clean either".into()));
    }
    if !f.keys.is_empty() {
        all.push(("keys", keys_words(l, &f.keys)));
    }
}

fn is_whole(p: &Place) -> bool {
    p.rows.is_empty() && p.heads.is_empty() && p.columns.is_empty() && p.parity.is_none()
}

fn box_words(l: &LayerReport, u: &Unit, p: &Place) -> String {
    if is_whole(p) {
        return "everywhere in it".into();
    }
    let mut parts = Vec::new();
    if !p.rows.is_empty() {
        parts.push(rows_words(l, u, &p.rows));
    }
    if !p.heads.is_empty() {
        let word = if p.heads.len() == 1 { "head" } else { "heads" };
        parts.push(format!("{word} {}", ranges(&p.heads)));
    }
    if !p.columns.is_empty() {
        let all: Vec<String> = p.columns.iter().map(|(a, b)| format!("{a}..{b}")).collect();
        let split = l.geometry.and_then(|g| split_column(u, g));
        let part = match split {
            Some((at, _, after)) if p.columns.iter().all(|(a, _)| *a >= at) => format!(" ({after} part)"),
            Some((at, before, _)) if p.columns.iter().all(|(_, b)| *b < at) => format!(" ({before} part)"),
            _ => String::new(),
        };
        parts.push(format!("columns {}{part}", all.join(", ")));
    }
    if let Some(parity) = p.parity {
        parts.push(format!("{} columns only", if parity == 0 { "even" } else { "odd" }));
    }
    parts.join(", ")
}

/// Where the last axis changes its meaning: column, name before, name after.
fn split_column(u: &Unit, g: mla_reference::Geometry) -> Option<(usize, &'static str, &'static str)> {
    match u.axes.last()? {
        Axis::NopeRope => Some((g.nope, "nope", "rope")),
        Axis::LatentRope => Some((g.latent, "latent", "rope")),
        _ => None,
    }
}

/// Rows by request: `request 2 (64+17): 3..16`.
fn rows_words(l: &LayerReport, u: &Unit, rows: &[usize]) -> String {
    let word = match u.axes.first() {
        Some(Axis::Key) => "keys",
        Some(Axis::Page) => "slots",
        Some(Axis::Split) => "rows",
        _ => "tokens",
    };
    let Some(names) = l.names(u) else { return format!("rows {}", ranges(rows)) };
    let mut by: Vec<(String, Vec<usize>)> = Vec::new();
    for r in rows {
        let Some(n) = names.get(*r) else { continue };
        let request = match n.request {
            Some(r) => {
                let batch = l.case.batch.split(',').nth(r).unwrap_or("?");
                let regime = n.sequence.and_then(|s| l.case.sequences.get(s));
                let regime = regime.filter(|_| l.case.regimes.len() > 1).map(|s| s.1);
                let regime = regime
                    .filter(|r| *r == Regime::Peaked.name())
                    .map_or(String::new(), |r| format!(", {r}"));
                // Of a prefill they are chunks of its context, and its new tokens.
                let word = if batch.ends_with("+1") { "split" } else { "part" };
                let split = n.split.map_or(String::new(), |s| format!(", {word} {s}"));
                let rank = n.rank.map_or(String::new(), |r| format!("rank {r}, "));
                format!("{rank}request {r} ({batch}{regime}{split})")
            }
            None => "slots of no request".into(),
        };
        match by.last_mut() {
            Some((name, all)) if *name == request => all.push(n.index),
            _ => by.push((request, vec![n.index])),
        }
    }
    let shown = 3;
    let mut words: Vec<String> =
        by.iter().take(shown).map(|(name, rows)| rows_of(name, word, rows)).collect();
    if by.len() > shown {
        words.push(format!("and rows of {} more", by.len() - shown));
    }
    words.join("; ")
}

/// A decode step has one row: its number says nothing.
fn rows_of(name: &str, word: &str, rows: &[usize]) -> String {
    if rows == [0] && name.contains("+1") {
        name.to_string()
    } else {
        format!("{name} {word} {}", ranges(rows))
    }
}

fn keys_words(l: &LayerReport, keys: &[Keys]) -> String {
    let name = |s: usize| {
        let (request, regime) = l.case.sequences.get(s).copied().unwrap_or((0, ""));
        let batch = l.case.batch.split(',').nth(request).unwrap_or("?");
        let regime = if regime == Regime::Peaked.name() { ", peaked" } else { "" };
        format!("request {request} ({batch}{regime})")
    };
    let one = |k: &Keys| match k.page {
        Some(p) => format!("page {p} (keys {}..{}) of {}", k.first, k.last, name(k.sequence)),
        None => format!("key {} of {}", k.first, name(k.sequence)),
    };
    let first = &keys[0];
    if keys.len() > 1 && keys.iter().all(|k| k.page.is_none() && k.first == first.first) {
        return format!("the residual points at key {} in {} of the sequences", first.first, keys.len());
    }
    let shown = 3;
    let mut words: Vec<String> = keys.iter().take(shown).map(one).collect();
    if keys.len() > shown {
        words.push(format!("and in {} more sequences", keys.len() - shown));
    }
    format!("the residual points at {}", words.join("; "))
}

/// What a line of a unit's picture is.
pub fn lines_of(u: &Unit) -> String {
    match u.axes.first() {
        Some(Axis::Key) => "keys".into(),
        Some(Axis::Page) => "slots".into(),
        Some(Axis::Token) => "tokens".into(),
        Some(_) => {
            let all: Vec<&str> = u.axes[..u.axes.len() - 1].iter().map(|a| a.name()).collect();
            format!("rows ({})", all.join(", "))
        }
        None => "rows".into(),
    }
}

/// What stands across in a picture.
pub fn across_of(p: &Picture) -> String {
    let what = if p.heads.is_empty() { "columns" } else { "heads" };
    let each = p.across().first().map_or(1, |(a, b)| b - a + 1);
    let last = p.across().last().map_or(0, |c| c.1);
    let grouped = if each > 1 { format!(", {each} a character") } else { String::new() };
    format!("{what} 0 to {last}{grouped}")
}

/// The rows of a line: `request 2, 3..16`; numbers alone where nothing has a name.
pub fn line_words(l: &LayerReport, u: &Unit, (first, last): (usize, usize)) -> String {
    let name = |row: usize| {
        let n = l.names(u)?.get(row)?;
        let request = n.request.map_or("no request".into(), |r| format!("request {r}"));
        let regime = n.sequence.and_then(|s| l.case.sequences.get(s)).filter(|_| l.case.regimes.len() > 1);
        let request = match regime.filter(|s| s.1 == Regime::Peaked.name()) {
            Some((_, peaked)) => format!("{request} {peaked}"),
            None => request,
        };
        let split = n.split.map_or(String::new(), |s| format!(" part {s}"));
        Some((format!("{request}{split}"), n.index))
    };
    match (name(first), name(last)) {
        (Some((a, i)), Some((b, j))) if a == b && i == j => format!("{a}, {i}"),
        (Some((a, i)), Some((b, j))) if a == b => format!("{a}, {i}..{j}"),
        (Some((a, i)), Some((b, j))) => format!("{a}, {i} .. {b}, {j}"),
        _ if first == last => first.to_string(),
        _ => format!("{first}..{last}"),
    }
}

/// `0..3, 7, 9..11`
pub fn ranges(of: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &i in of {
        match runs.last_mut() {
            Some(run) if run.1 + 1 == i => run.1 = i,
            _ => runs.push((i, i)),
        }
    }
    let shown = 8;
    let mut words: Vec<String> = runs
        .iter()
        .take(shown)
        .map(|(a, b)| if a == b { a.to_string() } else { format!("{a}..{b}") })
        .collect();
    if runs.len() > shown {
        words.push(format!("… ({} in all)", of.len()));
    }
    words.join(", ")
}

/// The worst element, where it is and by how much.
fn worst(l: &LayerReport, u: &Unit) -> Option<String> {
    let w = u.worst.as_ref()?;
    let place: Vec<String> = w.index.iter().map(|(a, i)| format!("{} {i}", a.name())).collect();
    let mut at = place.join(", ");
    if let Some(r) = w.request {
        let regime = w.sequence.and_then(|s| l.case.sequences.get(s)).map(|s| format!(", {} context", s.1));
        let what = if matches!(u.axes.first(), Some(Axis::Key | Axis::Page)) { "key" } else { "token" };
        let name = l.case.batch.split(',').nth(r).unwrap_or("?");
        at += &format!(" ({what} {} of request {name}{})", w.within.unwrap_or(0), regime.unwrap_or_default());
    }
    let against = if matches!(u.which, Which::Weight(_)) { "file" } else { "reference" };
    let finite = if u.not_finite > 0 {
        format!("; {} elements are finite on one side only", u.not_finite)
    } else {
        String::new()
    };
    Some(format!(
        "{at}: engine {}, {against} {}, off by {} ulps of {}, {} what rounding allows{finite}",
        value(w.engine),
        value(w.reference),
        short(w.ulps),
        u.dtype.map_or("", |d| d.name()),
        times(w.share_of_bound)
    ))
}

fn value(v: f64) -> String {
    format!("{v:.7e}")
}

/// A number in few characters.
pub fn short(v: f64) -> String {
    if !v.is_finite() {
        "inf".into()
    } else if v == 0.0 {
        "0".into()
    } else if (0.01..1000.0).contains(&v) {
        format!("{v:.2}")
    } else {
        format!("{v:.1e}")
    }
}

fn times(share: f64) -> String {
    if share.is_finite() { format!("{} ×", short(share)) } else { "beyond all".into() }
}

/// Contracts that were found, each with the tensor that it explains, in the order of judgement.
pub fn contracts(l: &LayerReport) -> Vec<String> {
    l.tensors
        .iter()
        .filter_map(|u| u.found_contract.as_ref().map(|found| format!("{}: {found}", u.title())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_numbers() {
        assert_eq!(ranges(&[0, 1, 2, 3, 7, 9, 10]), "0..3, 7, 9..10");
        assert_eq!(ranges(&[]), "");
        let many: Vec<usize> = (0..40).step_by(2).collect();
        assert!(ranges(&many).ends_with("… (20 in all)"));
    }
}
