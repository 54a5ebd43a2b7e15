/*!
The softmax scale: constants that it is usually off by, and a factor fitted where none of them is it.

A factor is fitted by a line search on Σ|o − x| over its logarithm (17 points, then golden section), and finished
by Newton's method on the interval score: least squares of rounded values alone ends 1e-5 off, which leaves flips.
*/

use super::Hypothesis;
use super::change::Change;
use super::fit;
use super::scene::Scene;
use mla_reference::Spec;
use std::f64::consts::LOG2_E;

pub(super) const FAMILY: &str = "softmax scale";

/// Half of the distance over which a derivative is taken, as a share of the scale.
const BY: f64 = 1e-3;

/// YaRN's multiplier of a factor of 40, as DeepSeek's models have it, where a model has none of its own.
const USUAL_MSCALE: f64 = 1.368_887_945_411_394;

/// Constants that scales are off by, with what they are, inverses included.
pub(super) fn dictionary(spec: &Spec) -> Vec<(String, f64)> {
    let g = &spec.geometry;
    let [n, p, l, v, h] = [g.nope, g.rope, g.latent, g.value, g.heads].map(|n| n as f64);
    let d = n + p;
    let own = (spec.scale * d.sqrt()).sqrt();
    let m = if (own - 1.0).abs() > 1e-6 { own } else { USUAL_MSCALE };
    let mut all: Vec<(String, f64)> = Vec::new();
    let mut add = |name: String, value: f64| {
        let new = all.iter().all(|(_, v)| (v / value - 1.0).abs() > 1e-9);
        if value.is_finite() && value > 0.0 && (value - 1.0).abs() > 1e-9 && new {
            all.push((name, value));
        }
    };
    for (name, inverse, value) in [
        ("log2(e)", "ln(2)", LOG2_E),
        ("mscale", "1/mscale", m),
        ("mscale²", "1/mscale²", m * m),
        ("2", "1/2", 2.0),
    ] {
        add(name.into(), value);
        add(inverse.into(), 1.0 / value);
    }
    for (a, b, of) in [
        (d, n, "nope+rope over nope"),
        (d, l + p, "nope+rope over latent+rope"),
        (d, l, "nope+rope over latent"),
        (d, v, "nope+rope over value"),
        (d, p, "nope+rope over rope"),
    ] {
        add(format!("√({a}/{b}), {of}"), (a / b).sqrt());
        add(format!("√({b}/{a}), the inverse of {of}"), (b / a).sqrt());
    }
    add(format!("√{d}: not divided by the root of the key's width"), d.sqrt());
    add(format!("1/√{d}: divided twice by the root of the key's width"), 1.0 / d.sqrt());
    add("1/scale: no scale at all".into(), 1.0 / spec.scale);
    add(format!("1/{h}, the number of heads"), 1.0 / h);
    add("LOG2_E · mscale²".into(), LOG2_E * m * m);
    add("4".into(), 4.0);
    add("1/4".into(), 0.25);
    all
}

fn scaled<'a>(scene: &Scene<'a>, factor: f64) -> Change<'a> {
    Change::spec(scene.spec(), |s| s.scale *= factor)
}

/// Constants.
pub(super) fn constants<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if !scene.attends() {
        return Vec::new();
    }
    let of = |(name, value): (String, f64)| {
        let short = name.split([',', ':']).next().unwrap_or_default().to_string();
        let text = format!("the softmax scale is off by the factor {value:.7}, {name}");
        Hypothesis::new(FAMILY, format!("softmax scale × {short}"), text, scaled(scene, value))
    };
    dictionary(scene.spec()).into_iter().map(of).collect()
}

/// The constant nearest to a factor, in words.
pub(super) fn nearest(spec: &Spec, factor: f64) -> String {
    let all = dictionary(spec);
    let apart = |v: f64| (v / factor).ln().abs();
    let best = all.iter().min_by(|a, b| apart(a.1).total_cmp(&apart(b.1)));
    best.filter(|b| apart(b.1) < 0.05).map_or(String::new(), |(name, value)| {
        let short = name.split([',', ':']).next().unwrap_or_default();
        format!("; the nearest constant is {short} = {value:.7}")
    })
}

/// A factor that fits.
pub(super) fn fitted<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if !scene.attends() {
        return Vec::new();
    }
    // What fits other tensors of the run, if there is one, is likely to be it here too.
    if let Some((factor, error)) = scene.known.scale() {
        let h = factored(scene, factor, error);
        if scene.goes_on(scene.share(&h.change), &h) {
            return vec![h];
        }
    }
    let cost = |a: f64| scene.distance(&scaled(scene, a.exp()));
    let found = line_search(&cost, 1.0, 1e-6);
    let (factor, error) = newton(scene, found.exp());
    if !(factor.is_finite() && error.is_finite()) || (factor - 1.0).abs() < error {
        return Vec::new();
    }
    vec![factored(scene, factor, error)]
}

fn factored<'a>(scene: &Scene<'a>, factor: f64, error: f64) -> Hypothesis<'a> {
    let near = nearest(scene.spec(), factor);
    let text = format!("the softmax scale is off by the factor {factor:.7} ± {error:.1e}{near}");
    let name = format!("softmax scale × {factor:.6}");
    Hypothesis::new(FAMILY, name, text, scaled(scene, factor)).sized(factor, error)
}

/// Where `cost` is least within ±`reach`: 17 points, then golden section until `enough`.
pub(super) fn line_search(cost: &dyn Fn(f64) -> f64, reach: f64, enough: f64) -> f64 {
    let at = |i: usize| reach * (i as f64 - 8.0) / 8.0;
    let costs: Vec<f64> = (0..17).map(|i| cost(at(i))).collect();
    let best = (0..17).min_by(|a, b| costs[*a].total_cmp(&costs[*b])).unwrap_or(8);
    let (mut lo, mut hi) = (at(best.max(1) - 1), at((best + 1).min(16)));
    const GOLDEN: f64 = 0.618_033_988_749_895;
    let (mut a, mut b) = (hi - GOLDEN * (hi - lo), lo + GOLDEN * (hi - lo));
    let (mut fa, mut fb) = (cost(a), cost(b));
    while hi - lo > enough {
        if fa < fb {
            (hi, b, fb) = (b, a, fa);
            a = hi - GOLDEN * (hi - lo);
            fa = cost(a);
        } else {
            (lo, a, fa) = (a, b, fb);
            b = lo + GOLDEN * (hi - lo);
            fb = cost(b);
        }
    }
    (lo + hi) / 2.0
}

/// Newton's method on the interval score; factor and standard error. The derivative is that of P without its cast, which is
/// smooth.
fn newton(scene: &Scene, start: f64) -> (f64, f64) {
    let (mut factor, mut error) = (start, f64::INFINITY);
    let mut contract = *scene.of.contract;
    contract.softmax.p = None;
    let smooth = |f: f64| scene.sampled(&Change { contract: Some(contract), ..scaled(scene, f) });
    let dtype = scene.tensor.dtype;
    let (up, down) = (smooth(start * (1.0 + BY)), smooth(start * (1.0 - BY)));
    let slope = |at: &(usize, usize)| Some((up.get(at)?.x - down.get(at)?.x) / (2.0 * BY));
    for noise in fit::STEPS {
        let now = scene.sampled(&scaled(scene, factor));
        let all: Vec<_> = now.iter().filter_map(|(at, e)| Some((e, e.x, slope(at)?))).collect();
        let Some((beta, se)) = fit::step(dtype, &all, noise) else { break };
        factor *= 1.0 + beta;
        error = se * factor;
    }
    let now = scene.sampled(&scaled(scene, factor));
    let all: Vec<_> = now.iter().filter_map(|(at, e)| Some((e, e.x, slope(at)?))).collect();
    if let Some(beta) = fit::middle(dtype, &all).filter(|b| b.abs() < 10.0 * error) {
        factor *= 1.0 + beta;
    }
    (factor, error)
}
