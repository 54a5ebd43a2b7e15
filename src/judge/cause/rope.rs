/*! Rotation: pairing, direction, position, frequencies, columns, once or twice or not at all. */

use super::Hypothesis;
use super::change::Change;
use super::scene::Scene;
use crate::trace::Tensor;
use mla_reference::elementwise::{declared_table, rope_table, rotate};
use mla_reference::{Geometry, Pairing, Plan, Source, Stage};
use ndarray::{Array2, s};
use std::ops::Range;

const FAMILY: &str = "rope";
/// Bases of models.
const BASES: [f64; 7] = [1e4, 5e5, 1e6, 5e6, 8e6, 1e7, 5e7];
/// Ends of a table of positions that are tried.
const ENDS: usize = 128;
/// Position offsets.
const OFFSETS: [i64; 10] = [-1, 1, -2, 2, -3, 3, -4, 4, 64, -64];

/// All of the family.
pub(super) fn all<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if !matches!(scene.id.stage, Stage::Q | Stage::KPe) {
        return Vec::new();
    }
    let what = if scene.id.stage == Stage::Q { "q" } else { "k_pe" };
    let spec = scene.spec();
    let mut all = Vec::new();
    let mut add = |name: String, text: String, change| all.push(Hypothesis::new(FAMILY, name, text, change));
    let other = match spec.rope.pairing {
        Pairing::Adjacent => ("half-split", "adjacent", Pairing::Half),
        Pairing::Half => ("adjacent", "half-split", Pairing::Adjacent),
    };
    add(
        format!("rope with {} pairs", other.0),
        format!("{what} is rotated in {} pairs, the file's order is {}", other.0, other.1),
        Change::spec(spec, |s| s.rope.pairing = other.2),
    );
    add(
        "rope skipped".into(),
        format!("{what} is not rotated at all"),
        Change::spec(spec, |s| {
            s.rope.inv_freq.fill(0.0);
            s.rope.magnitude = 1.0;
        }),
    );
    add("rope twice".into(), format!("{what} is rotated twice"), twice(scene));
    add(
        "rope backwards".into(),
        format!("{what} is rotated the other way round (by minus the angle)"),
        Change::spec(spec, |s| s.rope.inv_freq.iter_mut().for_each(|f| *f = -*f)),
    );
    for n in OFFSETS {
        let text = format!("{what} is rotated by the position {n:+} of what it should be");
        add(format!("position of {what} {n:+}"), text, moved(scene, n));
    }
    positions(scene, what, &mut add);
    if let Some((end, change)) = table(scene) {
        let text = format!("{what} is rotated as at position {end} from there on: the table is too short");
        add(format!("positions of {what} stop at {end}"), text, change);
    }
    frequencies(scene, what, &mut add);
    for (name, text, change) in columns(scene, what) {
        add(name, text, change);
    }
    all
}

/// Positions moved: the angle that is missing is turned beforehand, in float64, so that none is negative.
fn moved<'a>(scene: &Scene<'a>, by: i64) -> Change<'a> {
    let positions = &scene.of.case.plan.positions;
    let fits = |p: &u64| p.checked_add_signed(by);
    if let Some(moved) = positions.iter().map(fits).collect::<Option<Vec<u64>>>() {
        return Change::plan(&scene.of.case.plan, |p| p.positions = moved);
    }
    let spec = scene.spec();
    let mut rope = spec.rope.clone();
    rope.magnitude = 1.0;
    rope.inv_freq.iter_mut().for_each(|f| *f *= by as f64);
    let table = rope_table(&rope, &[1], mla_numeric::DType::F64);
    turned(scene, move |x, _| rotate(x.view(), &table, |_| 0, spec.rope.pairing).0)
}

/// The input with its rope columns changed, head by head: `turn` gets them and the tokens.
fn turned<'a>(
    scene: &Scene<'a>,
    turn: impl Fn(Array2<f64>, Range<usize>) -> Array2<f64> + Sync + 'a,
) -> Change<'a> {
    let g = scene.spec().geometry;
    let (stage, width, first) = input(scene.id.stage, &g);
    Change::source(stage, move |source: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
        let mut block = source.block(stage, rows.clone(), cols.clone());
        // The stage reads whole heads of q_raw, and the rope columns of kv_a.
        let mut at = cols.start;
        while at < cols.end {
            let start = (at / width * width + first).max(cols.start);
            let end = start + g.rope;
            if end <= cols.end {
                let mut part = block.slice_mut(s![.., start - cols.start..end - cols.start]);
                let new = turn(part.to_owned(), rows.clone());
                part.assign(&new);
            }
            at = (at / width + 1) * width;
        }
        block
    })
}

/// What a rotation reads: stage, columns of a head, first rope column of it.
fn input(stage: Stage, g: &Geometry) -> (Stage, usize, usize) {
    match stage {
        Stage::Q => (Stage::QRaw, g.key(), g.nope),
        _ => (Stage::KvA, g.cache(), g.latent),
    }
}

fn twice<'a>(scene: &Scene<'a>) -> Change<'a> {
    let (spec, contract, dtype) = (scene.spec(), scene.of.contract, scene.tensor.dtype);
    let table = declared_table(&spec.rope, &scene.of.case.plan.positions, contract);
    turned(scene, move |x, rows| {
        rotate(x.view(), &table, |i| rows.start + i, spec.rope.pairing).0.mapv(|v| dtype.round(v))
    })
}

/// Positions that are counted from somewhere else.
fn positions<'a>(scene: &Scene<'a>, what: &str, add: &mut dyn FnMut(String, String, Change<'a>)) {
    let plan = &scene.of.case.plan;
    let names = plan.names(Stage::Q, None);
    let mut other = |name: &str, text: &str, positions: Vec<u64>| {
        if positions != plan.positions {
            let change = Change::plan(plan, |p: &mut Plan| p.positions = positions);
            add(format!("positions of {what} {name}"), format!("positions of {what} {text}"), change);
        }
    };
    let within = names.iter().map(|n| n.index as u64).collect();
    other("without context", "count the new tokens alone: the context is left out", within);
    let before = std::iter::once(plan.positions.first()).chain(plan.positions.iter().map(Some));
    let before = before.flatten().copied().take(plan.tokens()).collect();
    other("of the row before", "are those of the row before it in the batch", before);
    other(
        "over the batch",
        "count over the whole batch, not by request",
        (0..plan.tokens() as u64).collect(),
    );
    // Without a magnitude that is no rotation.
    if (scene.spec().rope.magnitude - 1.0).abs() > 1e-9 {
        other("all zero", "are all zero", vec![0; plan.tokens()]);
    }
}

/// A table of positions that ends where rows begin to be wrong: all before are right, all after are not.
fn table<'a>(scene: &Scene<'a>) -> Option<(u64, Change<'a>)> {
    let plan = &scene.of.case.plan;
    let position = |r: &usize| plan.positions.get(*r).copied().unwrap_or(0);
    let (wrong, right): (Vec<usize>, Vec<usize>) = scene.rows.iter().partition(|r| scene.odd_row(**r) > 0);
    let least = wrong.iter().map(position).min()?;
    let most = right.iter().map(position).max()?;
    if most >= least {
        return None;
    }
    let change =
        |end: u64| Change::plan(plan, |p: &mut Plan| p.positions.iter_mut().for_each(|v| *v = (*v).min(end)));
    let some: Vec<usize> = wrong.iter().copied().take(16).collect();
    // At position 0 nothing is rotated: that has a name of its own.
    let ends = (most.max(1)..least).rev().take(ENDS);
    let share = |end: u64| scene.aside_share(&change(end), &some, &[]);
    let (_, end) = ends.map(|e| (share(e), e)).min_by(|a, b| a.0.total_cmp(&b.0))?;
    Some((end, change(end)))
}

/// Other bases, no YaRN, another magnitude.
fn frequencies<'a>(scene: &Scene<'a>, what: &str, add: &mut dyn FnMut(String, String, Change<'a>)) {
    let spec = scene.spec();
    let (rope, width) = (&spec.rope, spec.geometry.rope as f64);
    // YaRN leaves the fast frequencies alone, so the second one tells the base, if the third one is its square. It is not where
    // factors divide frequencies, nor where nothing is rotated.
    let base = match rope.inv_freq.as_slice() {
        [_, f, g, ..] if (g / (f * f) - 1.0).abs() < 1e-6 => Some(f.powf(-width / 2.0)),
        [_, f] if *f > 0.0 => Some(f.powf(-width / 2.0)),
        _ => None,
    };
    let plain = |base: f64| -> Vec<f64> {
        (0..rope.inv_freq.len()).map(|j| base.powf(-2.0 * j as f64 / width)).collect()
    };
    let differs = |f: &[f64]| f.iter().zip(&rope.inv_freq).any(|(a, b)| (a / b - 1.0).abs() > 1e-6);
    let mut set = |name: String, text: String, freq: Vec<f64>| {
        if differs(&freq) && freq.iter().all(|f| f.is_finite()) {
            add(name, text, Change::spec(spec, |s| s.rope.inv_freq = freq));
        }
    };
    if let Some(base) = base {
        set(
            "rope without YaRN".into(),
            format!("{what} is rotated by plain frequencies of base {base:.0}: YaRN is left out"),
            plain(base),
        );
    }
    for other in BASES.into_iter().filter(|other| base.is_none_or(|b| (other / b - 1.0).abs() > 1e-3)) {
        let text = match base {
            Some(base) => format!("{what} is rotated with base {other:.0}, not {base:.0}"),
            None if rope.inv_freq.iter().all(|f| *f == 0.0) => {
                format!("{what} is rotated with base {other:.0}, but the model rotates nothing")
            }
            None => format!(
                "{what} is rotated by plain frequencies of base {other:.0}: the model's factors are left out"
            ),
        };
        set(format!("rope base {other:.0}"), text, plain(other));
    }
    if (rope.magnitude - 1.0).abs() > 1e-9 {
        let text = format!("rope's factor {:.6} on cos and sin is left out", rope.magnitude);
        add("rope magnitude left out".into(), text, Change::spec(spec, |s| s.rope.magnitude = 1.0));
    }
    let own = (spec.scale * (spec.geometry.key() as f64).sqrt()).sqrt();
    if (own - 1.0).abs() > 1e-6 && (own / rope.magnitude - 1.0).abs() > 1e-6 {
        let text = format!("cos and sin carry the factor mscale = {own:.6}");
        add("rope magnitude mscale".into(), text, Change::spec(spec, |s| s.rope.magnitude = own));
    }
    if spec.temperature.is_some() {
        let text = format!("the temperature of {what} is left out");
        add("temperature left out".into(), text, Change::spec(spec, |s| s.temperature = None));
    }
}

/// Columns of each head of the engine's tensor in another order: new column j is old column `order[j]`.
pub(super) fn reordered(tensor: &Tensor, width: usize, order: &[usize]) -> Tensor {
    let mut out = tensor.clone();
    let n = tensor.dtype.bytes();
    for (to, from) in out.bytes.chunks_exact_mut(width * n).zip(tensor.bytes.chunks_exact(width * n)) {
        for (j, o) in order.iter().enumerate() {
            to[j * n..(j + 1) * n].copy_from_slice(&from[o * n..(o + 1) * n]);
        }
    }
    out
}

/// Other columns rotated, or the right ones stored in another order.
fn columns<'a>(scene: &Scene<'a>, what: &str) -> Vec<(String, String, Change<'a>)> {
    let g = scene.spec().geometry;
    let mut all = Vec::new();
    if scene.id.stage == Stage::Q && g.rope <= g.nope {
        // Read with the first columns last, rotated, and put back.
        let order: Vec<usize> = (g.rope..g.key()).chain(0..g.rope).collect();
        let tensor = reordered(scene.tensor, g.key(), &order);
        let source = move |source: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
            let block = source.block(Stage::QRaw, rows, cols);
            let mut out = block.clone();
            for (j, mut column) in out.columns_mut().into_iter().enumerate() {
                column.assign(&block.column(j / g.key() * g.key() + order[j % g.key()]));
            }
            out
        };
        let change = Change { tensors: vec![(scene.id, tensor)], ..Change::source(Stage::QRaw, source) };
        let text = format!("the first {} columns of each head of {what} are rotated, not the last", g.rope);
        all.push(("rope on the first columns".into(), text, change));
    }
    if scene.id.stage == Stage::KPe && g.rope <= g.latent {
        let source = move |source: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
            source.block(Stage::KvA, rows, cols.start - g.latent..cols.end - g.latent)
        };
        let text = format!("k_pe is made of the first {} columns of kv_a, not of the last", g.rope);
        all.push(("k_pe of the first columns".into(), text, Change::source(Stage::KvA, source)));
    }
    let (_, _, first) = input(scene.id.stage, &g);
    let (width, first) = if scene.id.stage == Stage::Q { (g.key(), first) } else { (g.rope, 0) };
    let half = g.rope / 2;
    let split = |j: usize| if j.is_multiple_of(2) { j / 2 } else { half + j / 2 };
    let joined = |j: usize| if j < half { 2 * j } else { 2 * (j - half) + 1 };
    for name in ["half-split", "adjacent"] {
        let of = |j: usize| if name == "adjacent" { joined(j) } else { split(j) };
        let order: Vec<usize> =
            (0..width).map(|j| if j < first { j } else { first + of(j - first) }).collect();
        let change =
            Change { tensors: vec![(scene.id, reordered(scene.tensor, width, &order))], ..Change::default() };
        let text = format!("{what} is rotated right and stored in {name} order");
        all.push((format!("rope columns in {name} order"), text, change));
    }
    all
}
