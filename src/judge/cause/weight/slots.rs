/*!
Rows of a stack of q_a and kv_a in a slot that is another's: slots in another order, a cut at another row.

It is asked of engines that declare a stack and of those that do not: what a weight holds says it.
*/

use super::order::From;
use crate::engine::stack::{QKV_A, qkv_a};
use mla_reference::{Geometry, Weight};

/// The weight whose rows stand in the same stack.
pub fn other(weight: Weight) -> Option<Weight> {
    match weight {
        Weight::WQA => Some(Weight::WKvA),
        Weight::WKvA => Some(Weight::WQA),
        _ => None,
    }
}

/// Names and texts of what a slot holds, where rows of the other weight (source 1) are among it. More than one only where
/// they predict the same bits.
pub fn named(weight: Weight, order: &[From], g: &Geometry) -> Vec<(String, String)> {
    let (Some(slots), Some(other)) = (qkv_a(g), other(weight)) else { return Vec::new() };
    let start = |w: Weight| slots.iter().find(|s| s.weight == w).map_or(0, |s| s.rows.start);
    let (own, its, all) = (start(weight), start(other), slots[1].rows.end);
    // Where each row stands in the stack as it is declared.
    let at: Vec<usize> = order.iter().map(|(s, r)| r + if *s == 0 { own } else { its }).collect();
    let from = at.first().copied().unwrap_or(own);
    let mut found = Vec::new();
    let around = at.iter().enumerate().all(|(i, a)| *a == (from + i) % all);
    let past = (from + at.len()).saturating_sub(all);
    let part = |i: usize| format!("{}:{}", slots[i].stage, slots[i].rows.len());
    let (q_a, kv_a) = (part(0), part(1));
    // Two parts that change places are the stack turned by the first one's rows.
    if around && from == (own + slots[0].rows.len()) % all {
        found.push((
            format!("slots of {QKV_A} permuted"),
            format!("slots of {QKV_A} are permuted: it is laid ({kv_a} + {q_a}), declared ({q_a} + {kv_a})"),
        ));
    }
    if around && from == all / 2 && weight == slots[1].weight {
        let anew = match past {
            0 => String::new(),
            n => format!("; its last {n} rows are the stack's first, as it ends before them"),
        };
        found.push((
            format!("{QKV_A} cut in equal chunks"),
            format!("{QKV_A} is cut at row {from}, not {own}: the concatenation was cut in equal chunks{anew}"),
        ));
    }
    if found.is_empty() && around && past == 0 {
        found.push((
            format!("{QKV_A} cut at another row"),
            format!("{QKV_A} is cut at row {from}, not {own}: {weight} holds its rows {from}..{}", from + at.len() - 1),
        ));
    }
    if found.is_empty() {
        let text = format!("{weight} holds rows of {other}: {}", runs(weight, other, order));
        found.push((format!("rows of {other} in {weight}"), text));
    }
    found
}

/// Runs of rows that are not where they should be.
fn runs(weight: Weight, other: Weight, order: &[From]) -> String {
    let mut runs: Vec<(usize, usize, From)> = Vec::new();
    for (i, (source, row)) in order.iter().enumerate() {
        match runs.last_mut() {
            Some((a, b, (s, first))) if s == source && *first + (i - *a) == *row => *b = i,
            _ => runs.push((i, i, (*source, *row))),
        }
    }
    let wrong: Vec<_> = runs.iter().filter(|(a, _, from)| *from != (0, *a)).collect();
    let words = wrong.iter().take(4).map(|(a, b, (source, first))| {
        let whose = if *source == 0 { weight } else { other };
        format!("its rows {a}..{b} are rows {first}..{} of {whose}", first + b - a)
    });
    let more = if wrong.len() > 4 { format!(", and {} runs more", wrong.len() - 4) } else { String::new() };
    words.collect::<Vec<_>>().join(", ") + &more
}
