/*! Splits put together wrongly, and the base of an lse. */

use super::Hypothesis;
use super::change::Change;
use super::scene::Scene;
use mla_reference::{Phase, Source, Stage};
use std::f64::consts::{LN_2, LOG2_E};
use std::ops::Range;

const FAMILY: &str = "merge of splits";
/// Most splits of which each is tried.
const MOST: usize = 32;

/// All of the family.
pub(super) fn all<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let mut all = bases(scene);
    all.extend(empty(scene));
    let inside = scene.attends()
        && scene.phase == Phase::Decode
        && !matches!(scene.id.stage, Stage::PartO | Stage::PartLse)
        && scene.of.contract.splits != 1.into();
    if scene.merges() || inside {
        let power = |p: f64| Change::departure(|d| d.merge_power = p);
        let mut add = |name: &str, text: &str, change| all.push(Hypothesis::new(FAMILY, name, text, change));
        add(
            "merge with base e for base 2",
            "splits are merged with exp of base-2 logarithms (exp where exp2 belongs): weights by exp(1.4427 · lse)",
            power(LOG2_E),
        );
        add(
            "merge with base 2 for base e",
            "splits are merged with exp2 of natural logarithms: weights by exp(0.6931 · lse)",
            power(LN_2),
        );
        add("splits averaged", "splits are averaged as if all had the same lse", power(0.0));
    }
    if scene.merges() {
        all.extend(parts(scene));
    }
    all
}

/// Parts that see no key and hand over something all the same: zeros and an lse of −∞ are what a merge can leave out.
pub(super) fn without_keys<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if !scene.attends() {
        return Vec::new();
    }
    // Attention over keys is never zero throughout; where the reference is, no key is seen.
    let neutral = if scene.is_lse() { f64::NEG_INFINITY } else { 0.0 };
    let columns = |h: usize| h * scene.width..(h + 1) * scene.width;
    let empty = |r: usize, h: usize| columns(h).all(|c| scene.rounded.get(r, c) == neutral);
    let mut tensor = scene.copy_of();
    let (mut excused, mut nan) = (0, true);
    for &r in &scene.rows {
        for h in (0..scene.heads).filter(|h| scene.odd[[r, *h]] > 0) {
            if !empty(r, h) {
                return Vec::new();
            }
            excused += 1;
            for c in columns(h) {
                nan &= scene.tensor.get(r, c).is_nan();
                tensor.set_bits(r, c, scene.rounded.bits(r, c));
            }
        }
    }
    // Finite ones of an lse have a name of their own.
    if excused == 0 || scene.is_lse() && !nan {
        return Vec::new();
    }
    let holds = if nan { "NaN: never written, or computed from a row sum of 0" } else { "values" };
    let belongs = if scene.is_lse() { "−∞" } else { "zeros" };
    let text = format!("{excused} cells (row and head) that see no key hold {holds}; {belongs} belong there");
    let change = Change { tensors: vec![(scene.id, tensor)], counted: Some(0.0), ..Change::default() };
    vec![Hypothesis::new(FAMILY, "rows without a key", text, change)]
}

/// An lse in another base than declared.
fn bases<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if !scene.is_lse() {
        return Vec::new();
    }
    let times = |f: f64| {
        let mut t = scene.copy_of();
        let mut line = vec![0.0; t.cols];
        for r in 0..t.rows {
            t.read(r, 0..t.cols, &mut line);
            line.iter_mut().for_each(|v| *v *= f);
            t.write(r, 0, &line);
        }
        Change { tensors: vec![(scene.id, t)], ..Change::default() }
    };
    vec![
        Hypothesis::new(
            "lse",
            "lse in base 2",
            "the lse is a logarithm of base 2, declared is a natural one",
            times(LN_2),
        ),
        Hypothesis::new(
            "lse",
            "lse in base e",
            "the lse is a natural logarithm, declared is one of base 2",
            times(LOG2_E),
        ),
    ]
}

/// Parts without a key whose lse is a number: it should be −∞, which weighs nothing.
fn empty<'a>(scene: &Scene<'a>) -> Option<Hypothesis<'a>> {
    if scene.id.stage != Stage::PartLse {
        return None;
    }
    let (mut tensor, mut found) = (scene.copy_of(), 0);
    for &r in &scene.rows {
        for c in 0..tensor.cols {
            if scene.rounded.get(r, c) == f64::NEG_INFINITY && tensor.get(r, c).is_finite() {
                found += 1;
                tensor.set_bits(r, c, scene.rounded.bits(r, c));
            }
        }
    }
    let part = if scene.phase == Phase::Decode { "splits" } else { "chunks" };
    let text = format!(
        "{part} in which a row has no key have a finite lse ({found} of them), not −∞: the merge weighs what is nothing"
    );
    let change = Change { tensors: vec![(scene.id, tensor)], counted: Some(0.0), ..Change::default() };
    (found > 0).then(|| Hypothesis::new(FAMILY, "empty parts with a finite lse", text, change))
}

/// Splits, or chunks of a context, left out, taken twice, or with each other's lse.
fn parts<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let Some(form) = scene.id.form else { return Vec::new() };
    let (splits, decode) = (scene.of.case.plan.parts(form), scene.of.case.plan.part_rows(form));
    if splits > MOST || decode == 0 {
        return Vec::new();
    }
    let lse = move |of: Box<dyn Fn(usize, f64) -> f64 + Sync>| {
        Change::source(Stage::PartLse, move |source: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
            let mut block = source.block(Stage::PartLse, rows.clone(), cols);
            for (mut row, r) in block.rows_mut().into_iter().zip(rows) {
                row.mapv_inplace(|v| of(r / decode, v));
            }
            block
        })
    };
    let part = if scene.phase == Phase::Decode { "split" } else { "chunk" };
    let mut all = Vec::new();
    for s in 0..splits {
        let gone = lse(Box::new(move |split, v| if split == s { f64::NEG_INFINITY } else { v }));
        let text = format!("{part} {s} of {splits} is left out of the merge");
        all.push(Hypothesis::new(FAMILY, format!("{part} {s} missing"), text, gone));
        let double = lse(Box::new(move |split, v| if split == s { v + LN_2 } else { v }));
        let text = format!("{part} {s} of {splits} is merged twice");
        all.push(Hypothesis::new(FAMILY, format!("{part} {s} twice"), text, double));
        if splits > 2 {
            let alone = lse(Box::new(move |split, v| if split == s { v } else { f64::NEG_INFINITY }));
            let text = format!("{part} {s} of {splits} alone is taken, the others are not merged");
            all.push(Hypothesis::new(FAMILY, format!("{part} {s} alone"), text, alone));
        }
    }
    // Outputs with the lse of another split.
    let mut orders: Vec<(String, Vec<usize>)> = vec![("reversed".into(), (0..splits).rev().collect())];
    if splits > 2 {
        orders.push(("shifted by one".into(), (0..splits).map(|s| (s + 1) % splits).collect()));
    }
    for (name, order) in orders {
        let change = Change::source(
            Stage::PartLse,
            move |source: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
                let whole = source.block(Stage::PartLse, 0..splits * decode, cols);
                let from: Vec<usize> =
                    rows.map(|r| order.get(r / decode).map_or(r, |s| s * decode + r % decode)).collect();
                whole.select(ndarray::Axis(0), &from)
            },
        );
        let text = format!("outputs of {part}s are merged with the lse of others: {name}");
        all.push(Hypothesis::new(FAMILY, format!("lse of {part}s {name}"), text, change));
    }
    all
}
