/*!
The softmax scale: constants that it is usually off by, and a factor fitted where none of them is it.

A factor is fitted by a line search on Σ|o − x| over its logarithm (17 points, then golden section), and finished
by Newton's method on the interval score: least squares of rounded values alone ends 1e-5 off, which leaves flips.
*/

use super::super::evidence::Direction;
use super::super::stats::score::Fineness;
use super::Hypothesis;
use super::change::Change;
use super::scene::Scene;
use mla_reference::Spec;
use std::f64::consts::LOG2_E;

const FAMILY: &str = "softmax scale";

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
    let cost = |a: f64| scene.distance(&scaled(scene, a.exp()));
    let found = line_search(&cost, 1.0, 1e-6);
    let (factor, error) = newton(scene, found.exp());
    if !(factor.is_finite() && error.is_finite()) || (factor - 1.0).abs() < error {
        return Vec::new();
    }
    let text = format!(
        "the softmax scale is off by the factor {factor:.7} ± {error:.1e}{}",
        nearest(scene.spec(), factor)
    );
    let name = format!("softmax scale × {factor:.6}");
    vec![Hypothesis::new(FAMILY, name, text, scaled(scene, factor)).sized(factor, error)]
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

/// Newton's method on the interval score: steps by the coarse estimate, then by the fine one; factor and standard error.
fn newton(scene: &Scene, start: f64) -> (f64, f64) {
    let (mut factor, mut error) = (start, f64::INFINITY);
    for fineness in [Fineness::Coarse, Fineness::Coarse, Fineness::Fine, Fineness::Fine, Fineness::Fine] {
        let counted =
            scaled(scene, factor).with(scene.of, None, |of| of.compare(scene.id, scene.tensor, None));
        let Some(e) = counted.get(&scene.phase) else { break };
        let all = e.measured();
        let of = |m: &&_| {
            let m: &super::super::evidence::Measured = m;
            m.direction == Direction::Scale && m.fineness == fineness && m.head.is_none()
        };
        let Some(m) = all.iter().find(of) else { break };
        if !(m.estimate.beta.is_finite() && m.estimate.beta.abs() < 0.1) {
            break;
        }
        factor *= 1.0 + m.estimate.beta;
        error = m.estimate.se() * factor;
        if fineness == Fineness::Fine && m.estimate.beta.abs() < 0.2 * m.estimate.se_m {
            break;
        }
    }
    (factor, error)
}
