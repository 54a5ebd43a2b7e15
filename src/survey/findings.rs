//! What a survey found, as findings of `inspect`: how bad each is, and where.

use super::odd::Odd;
use super::{Survey, TensorStats};
use crate::model::lint::{Finding, Severity};
use crate::model::list;
use mla_reference::Weight;
use std::collections::BTreeMap;

/// Findings of one kind that are shown one by one.
const SHOWN: usize = 20;

/// The findings, the worst first.
///
/// NaN, infinities and nothing but zeros in a tensor that attention reads are defects: whatever is multiplied with
/// them is lost. The same elsewhere, blocks of zeros, constant rows and what stands out are warnings.
pub fn findings(survey: &Survey) -> Vec<Finding> {
    let mut all: BTreeMap<(Severity, &'static str), Vec<(String, String)>> = BTreeMap::new();
    let mut add = |severity, kind, what: String, place: String| {
        all.entry((severity, kind)).or_default().push((what, place));
    };
    for t in &survey.tensors {
        let place = t.layer.map_or_else(|| "outside the layers".to_string(), |n| format!("layer {n}"));
        for (severity, kind, what) in tensor(t) {
            add(severity, kind, what, place.clone());
        }
    }
    for u in &survey.unread {
        add(Severity::Warning, "unread", format!("{} was not read: {}", u.name, u.why), "its values".into());
    }
    let mut heads: BTreeMap<(Weight, &str, usize), Vec<&Odd>> = BTreeMap::new();
    for o in &survey.odd {
        match o.head {
            Some(_) => heads.entry((o.role, o.group, o.layer)).or_default().push(o),
            None => {
                let what = format!(
                    "{}{} stands out: its norm is {:.3e}, {} that of the layers around it",
                    o.role,
                    group(o.group),
                    o.norm,
                    times(o.norm / o.typical)
                );
                add(Severity::Warning, "layers", what, format!("layer {}", o.layer));
            }
        }
    }
    for ((role, name, layer), heads) in heads {
        let numbers: Vec<usize> = heads.iter().filter_map(|o| o.head).collect();
        let factors = heads.iter().map(|o| o.norm / o.typical);
        let (least, most) = factors.fold((f64::INFINITY, 0.0f64), |(a, b), f| (a.min(f), b.max(f)));
        let (head, stand, norm) = if numbers.len() == 1 {
            ("head", "stands", "its norm is")
        } else {
            ("heads", "stand", "norms are")
        };
        let factor = if least == most { times(most) } else { format!("{} to {}", times(least), times(most)) };
        let what = format!(
            "{role}{}: {head} {} {stand} out: {norm} {factor} the median of the layer's heads",
            group(name),
            list(&numbers)
        );
        add(Severity::Warning, "heads", what, format!("layer {layer}"));
    }
    let mut out = Vec::new();
    for ((severity, _), found) in all {
        let more = found.len().saturating_sub(SHOWN);
        let next = found.get(SHOWN).cloned();
        out.extend(found.into_iter().take(SHOWN).map(|(what, place)| Finding { severity, what, place }));
        if let Some((what, place)) = next {
            out.push(Finding { severity, what: format!("{more} more like it, the next: {what}"), place });
        }
    }
    out.sort_by_key(|f| f.severity);
    out
}

fn group(name: &str) -> String {
    if name == "all" { String::new() } else { format!(" ({name})") }
}

fn times(factor: f64) -> String {
    if factor == 0.0 { "0 times".into() } else { format!("{} times", short(factor)) }
}

/// Three digits.
fn short(x: f64) -> String {
    if (0.01..1000.0).contains(&x) {
        let digits = if x < 1.0 {
            3
        } else if x < 10.0 {
            2
        } else {
            1
        };
        format!("{x:.digits$}")
    } else {
        format!("{x:.2e}")
    }
}

/// What is wrong with one tensor.
fn tensor(t: &TensorStats) -> Vec<(Severity, &'static str, String)> {
    let s = &t.stats;
    let needed = |severity| if t.role.is_some() { severity } else { Severity::Warning };
    let mut found = Vec::new();
    if let Some(first) = s.first_bad_block {
        let what = format!(
            "{} ({}): {} NaN and {} infinite values in {} of {} blocks, the first is block {first}",
            t.name, t.ty, s.nan, s.inf, s.bad_blocks, s.blocks
        );
        found.push((needed(Severity::Defect), "bad", what));
    }
    let Some(first) = s.first_zero_block else {
        return found.into_iter().chain(constant(t)).collect();
    };
    if s.zero_blocks == s.blocks {
        let bytes = if s.zero_byte_blocks == s.blocks {
            "all its bytes are zero, like a hole that a broken download leaves"
        } else {
            "all its values are zero"
        };
        found.push((needed(Severity::Defect), "zero", format!("{} ({}): {bytes}", t.name, t.ty)));
    } else {
        let bytes = match s.zero_byte_blocks {
            0 => String::new(),
            n => format!(" (of {n} also all bytes)"),
        };
        let what = format!(
            "{} ({}): {} of {} blocks are all zero{bytes}, the first is block {first}",
            t.name, t.ty, s.zero_blocks, s.blocks
        );
        found.push((Severity::Warning, "zero", what));
    }
    found.into_iter().chain(constant(t)).collect()
}

fn constant(t: &TensorStats) -> Option<(Severity, &'static str, String)> {
    let first = t.stats.first_constant_row?;
    let what = format!(
        "{} ({}): {} rows hold one value throughout, the first is row {first}",
        t.name, t.ty, t.stats.constant_rows
    );
    Some((Severity::Warning, "constant", what))
}
