/*!
A factor on the output, of the whole tensor or of some heads, fitted by Newton's method on the interval score.

x ← x(1 + β̂) with noise from 0.29 down to 2⁻⁸ ulps of a row. Where the factor is a constant of the dictionary within its
error, the constant itself is tried, and named.
*/

use super::super::stats::score::{information, score};
use super::change::Change;
use super::scene::{Element, Scene};
use super::{Hypothesis, scale};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Form, Source, Stage, Weight};
use std::f64::consts::PI;

const FAMILY: &str = "output";

/// Noise of the steps, in ulps of a row.
pub(super) const STEPS: [f64; 6] = [0.29, 0.29, 0.05, 1.0 / 128.0, 1.0 / 256.0, 1.0 / 256.0];

/// What a sample says of a factor along a direction: β̂ and its standard error, with noise of `step` row ulps.
/// `all`: elements, each with the reference under the factor so far and its derivative by the factor's logarithm.
pub(super) fn step(dtype: DType, all: &[(&Element, f64, f64)], step: f64) -> Option<(f64, f64)> {
    let (mut along, mut info) = (0.0, 0.0);
    for (e, x, d) in all {
        let s = e.sigma.hypot(step * e.ulp) * 3f64.sqrt() / PI;
        along += score(dtype, e.o, *x, s) * d;
        info += information(dtype, *x, s) * d * d;
    }
    (info > 0.0 && along.is_finite()).then(|| ((along / info).clamp(-0.5, 0.5), 1.0 / info.sqrt()))
}

/// The middle of what every bit allows: the shifts β for which x + βd lies in the cell of o for all elements, noise allowed
/// for. None where nothing does (a cast of P that went the other way moves a whole row).
pub(super) fn middle(dtype: DType, all: &[(&Element, f64, f64)]) -> Option<f64> {
    let (mut lo, mut hi) = (f64::NEG_INFINITY, f64::INFINITY);
    for (e, x, d) in all.iter().filter(|(e, _, d)| d.abs() > 0.01 * e.ulp) {
        let (below, above) = dtype.cell(e.o);
        let (a, b) = ((below - 2.0 * e.sigma - x) / d, (above + 2.0 * e.sigma - x) / d);
        (lo, hi) = (lo.max(a.min(b)), hi.min(a.max(b)));
    }
    (lo <= hi && lo.is_finite() && hi.is_finite()).then_some((lo + hi) / 2.0)
}

/// The factor on x that fits, and its standard error.
pub(super) fn newton(dtype: DType, all: &[&Element]) -> Option<(f64, f64)> {
    let sum = |f: &dyn Fn(&Element) -> f64| all.iter().map(|e| f(e)).sum::<f64>();
    let mut factor = sum(&|e| e.o * e.x) / sum(&|e| e.x * e.x);
    let mut error = f64::INFINITY;
    let at = |factor: f64| all.iter().map(|e| (*e, e.x * factor, e.x * factor)).collect::<Vec<_>>();
    for noise in STEPS {
        if !(factor.is_finite() && factor != 0.0) {
            return None;
        }
        let (beta, se) = step(dtype, &at(factor), noise * factor.abs())?;
        factor *= 1.0 + beta;
        error = se * factor.abs();
    }
    if let Some(beta) = middle(dtype, &at(factor)).filter(|b| b.abs() * factor.abs() < 10.0 * error) {
        factor *= 1.0 + beta;
    }
    Some((factor, error))
}

/// Rows of a weight, some of them times a factor.
struct Scaled<'a> {
    inner: &'a dyn Rows,
    /// Rows of a head.
    height: usize,
    heads: Vec<bool>,
    factor: f64,
}

impl Rows for Scaled<'_> {
    fn rows(&self) -> usize {
        self.inner.rows()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        self.inner.decode(row, k0, out);
        if self.heads.get(row / self.height).copied().unwrap_or(true) {
            out.iter_mut().for_each(|v| *v *= self.factor);
        }
    }
}

/// The stage with its values times a factor, all or those of some heads (empty: all). None where that can't be said.
pub(super) fn gain<'a>(scene: &Scene<'a>, heads: &[bool], factor: f64) -> Option<Change<'a>> {
    let g = &scene.spec().geometry;
    let owned = heads.to_vec();
    let on = move |h: usize| owned.get(h).copied().unwrap_or(true);
    // An input times the factor, where the stage is linear in it and heads are apart in it.
    let input = |stage: Stage, width: usize| {
        let on = on.clone();
        Change::source(stage, move |source: &dyn Source, rows, cols: std::ops::Range<usize>| {
            let mut block = source.block(stage, rows, cols.clone());
            for (mut column, c) in block.columns_mut().into_iter().zip(cols) {
                if on(c / width.max(1)) {
                    column.mapv_inplace(|v| v * factor);
                }
            }
            block
        })
    };
    let weight = |weight: Weight, height: usize| {
        let inner = scene.of.weights.matrix(weight)?;
        let rows = Scaled { inner, height, heads: heads.to_vec(), factor };
        Some(Change { matrix: Some((weight, Box::new(rows))), ..Change::default() })
    };
    let norm = |weight: Weight| {
        let gamma: Vec<f64> = scene.of.weights.norm(weight)?.iter().map(|v| v * factor).collect();
        Some(Change { norm: Some((weight, gamma)), ..Change::default() })
    };
    let all = heads.is_empty();
    let attention = || {
        let mut change = Change::default();
        change.departure.value_gain = (0..g.heads).map(|h| if on(h) { factor } else { 1.0 }).collect();
        change
    };
    match scene.id.stage {
        Stage::AttnIn if all => norm(Weight::GAttn),
        Stage::QANormed if all => norm(Weight::GQ),
        Stage::KvCNormed if all => norm(Weight::GKv),
        Stage::QA | Stage::KvA if all => Some(input(Stage::AttnIn, usize::MAX)),
        Stage::Out if all && scene.of.case.plan.joins(Stage::Out, scene.id.form) => {
            Some(input(Stage::PartOut, usize::MAX))
        }
        Stage::Out | Stage::PartOut if all => Some(input(Stage::AttnOut, usize::MAX)),
        Stage::KPe if all => Some(input(Stage::KvA, usize::MAX)),
        Stage::QRaw if g.q_rank == 0 => weight(Weight::WQ, g.key()),
        Stage::QRaw => weight(Weight::WQB, g.key()),
        Stage::Q => Some(input(Stage::QRaw, g.key())),
        Stage::V => weight(Weight::WUv, g.value),
        Stage::QLatent => Some(input(Stage::Q, g.key())),
        Stage::AttnOut if scene.id.form == Some(Form::Absorbed) => Some(input(Stage::OLatent, g.latent)),
        _ if scene.is_lse() => None,
        _ if scene.merges() => Some(input(Stage::PartO, if scene.absorbed() { g.latent } else { g.value })),
        _ if scene.attends() => Some(attention()),
        _ => None,
    }
}

/// Factors on the whole output, and on the heads that are worst.
pub(super) fn gains<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let per_head: Vec<u64> =
        (0..scene.heads).map(|h| scene.rows.iter().map(|r| u64::from(scene.odd[[*r, h]])).sum()).collect();
    let most = per_head.iter().copied().max().unwrap_or(0);
    let some: Vec<bool> = per_head.iter().map(|n| *n * 4 >= most.max(1)).collect();
    let mut sets: Vec<Vec<bool>> = vec![Vec::new()];
    if some.contains(&false) && some.contains(&true) {
        sets.push(some);
    }
    sets.iter().flat_map(|heads| of_heads(scene, heads)).collect()
}

fn of_heads<'a>(scene: &Scene<'a>, heads: &[bool]) -> Vec<Hypothesis<'a>> {
    let on = |e: &&Element| heads.get(e.head).copied().unwrap_or(true);
    let elements: Vec<&Element> = scene.sample.values().filter(on).collect();
    let Some((factor, error)) = newton(scene.tensor.dtype, &elements) else { return Vec::new() };
    if (factor - 1.0).abs() < 3.0 * error || factor.abs() < 1e-3 {
        return Vec::new();
    }
    let which: Vec<usize> = (0..heads.len()).filter(|h| heads[*h]).collect();
    let what = match which.as_slice() {
        [] => "every element".to_string(),
        [one] => format!("head {one}"),
        some => format!("heads {}", crate::report::finding::ranges(some)),
    };
    let name = match which.is_empty() {
        true => "output".to_string(),
        false => what.clone(),
    };
    let near = |v: f64| (v / factor - 1.0).abs() < (5.0 * error / factor.abs()).max(3e-6);
    let mut constants = scale::dictionary(scene.spec());
    constants.push(("−1".into(), -1.0));
    let mut all = Vec::new();
    for (constant, value) in constants.into_iter().filter(|(_, v)| near(*v)) {
        let short = constant.split([',', ':']).next().unwrap_or_default().to_string();
        if let Some(change) = gain(scene, heads, value) {
            let text = format!("{what} is off by the factor {value:.7} = {short}");
            all.push(Hypothesis::new(FAMILY, format!("{name} × {short}"), text, change).sized(value, error));
        }
    }
    if all.is_empty()
        && let Some(change) = gain(scene, heads, factor)
    {
        let text = format!("{what} is off by the factor {factor:.7} ± {error:.1e}");
        all.push(Hypothesis::new(FAMILY, format!("{name} × {factor:.6}"), text, change).sized(factor, error));
    }
    all
}
