/*! RMSNorm: another eps, its weight left out or with one added to it, no norm at all. */

use super::Hypothesis;
use super::change::Change;
use super::input::recorded;
use super::scale::line_search;
use super::scene::Scene;
use mla_reference::{Spec, Stage, Weight};

const FAMILY: &str = "norm";
/// Values of eps that models use, and those beside them.
const EPS: [f64; 9] = [0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 5e-6];

fn parts(scene: &Scene) -> Option<(Weight, f64)> {
    let s = scene.spec();
    match scene.id.stage {
        Stage::AttnIn => Some((Weight::GAttn, s.eps_attn)),
        Stage::QANormed => Some((Weight::GQ, s.eps_latent)),
        Stage::KvCNormed => Some((Weight::GKv, s.eps_latent)),
        _ => None,
    }
}

fn with_eps<'a>(scene: &Scene<'a>, eps: f64) -> Change<'a> {
    let attn = scene.id.stage == Stage::AttnIn;
    let set = |s: &mut Spec| if attn { s.eps_attn = eps } else { s.eps_latent = eps };
    Change::spec(scene.spec(), set)
}

/// Constants, and what is done with the weight.
pub(super) fn all<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let Some((weight, eps)) = parts(scene) else { return Vec::new() };
    let mut all: Vec<Hypothesis> = EPS
        .iter()
        .filter(|e| (**e / eps - 1.0).abs() > 1e-4)
        .map(|e| {
            let text = format!("eps of the norm is {e:.0e}, not {eps:.4e}");
            Hypothesis::new(FAMILY, format!("eps = {e:.0e}"), text, with_eps(scene, *e)).sized(*e, 0.0)
        })
        .collect();
    // eps belongs to the mean of the squares: what is added to their sum counts for a share of it.
    let width = scene.width as f64;
    for (name, text, times) in [
        ("eps / width", "eps of the norm is added to the sum of the squares, not to their mean", 1.0 / width),
        ("eps × width", "eps of the norm is multiplied by the width", width),
    ] {
        let text = format!("{text}: it counts as {:.3e}, not {eps:.4e}", eps * times);
        let h = Hypothesis::new(FAMILY, name, text, with_eps(scene, eps * times));
        all.push(h.sized(eps * times, 0.0));
    }
    let Some(gamma) = scene.of.weights.norm(weight) else { return all };
    all.extend(other_rows(scene, gamma, eps));
    let norm = |f: &dyn Fn(f64) -> f64| Change {
        norm: Some((weight, gamma.iter().map(|v| f(*v)).collect())),
        ..Change::default()
    };
    let mut add = |name: &str, text: String, change| all.push(Hypothesis::new(FAMILY, name, text, change));
    add("norm weight left out", format!("the norm's weight {weight} is left out"), norm(&|_| 1.0));
    add("norm weight plus one", format!("the norm multiplies with 1 + {weight}"), norm(&|v| 1.0 + v));
    for other in [Weight::GAttn, Weight::GQ, Weight::GKv] {
        let values = scene.of.weights.norm(other).filter(|v| other != weight && v.len() == gamma.len());
        if let Some(values) = values {
            let change = Change { norm: Some((weight, values.to_vec())), ..Change::default() };
            let text = format!("the norm multiplies with {other}, not {weight}");
            all.push(Hypothesis::new(FAMILY, format!("norm weight {other}"), text, change));
        }
    }
    all
}

/// Rows that are no norm of their input, or one over more columns than it has: computed here, and excused where the engine's
/// values are those of this computation within an ulp.
fn other_rows<'a>(scene: &Scene<'a>, gamma: &[f64], eps: f64) -> Vec<Hypothesis<'a>> {
    let g = &scene.spec().geometry;
    let (stage, cols) = match scene.id.stage {
        Stage::AttnIn => (Stage::Hidden, g.hidden),
        Stage::QANormed => (Stage::QA, g.q_rank),
        _ => (Stage::KvA, g.cache()),
    };
    let Some(input) = recorded(scene, stage, cols) else { return Vec::new() };
    let dtype = scene.tensor.dtype;
    let with = |name: &str, text: String, row: &dyn Fn(&[f64], &mut [f64])| {
        let (mut tensor, mut bad) = (scene.copy_of(), 0usize);
        let mut want = vec![0.0; gamma.len()];
        for &r in &scene.rows {
            let line = input.row(r);
            row(line.as_slice()?, &mut want);
            for (c, x) in want.iter().enumerate() {
                let (near, o) = (dtype.round(*x), tensor.get(r, c));
                bad += usize::from(o != near);
                let (lo, hi) = dtype.cell(near);
                if o == near || (o - x).abs() <= hi - lo {
                    tensor.set_bits(r, c, scene.rounded.bits(r, c));
                }
            }
        }
        // Nearly every bit is the prediction's; the others are flips of it.
        let share = bad as f64 / (scene.rows.len() * gamma.len()).max(1) as f64;
        let change = Change::tensors(vec![(scene.id, tensor)], share);
        Some(Hypothesis::new(FAMILY, name, text, change))
    };
    let mean = |x: &[f64]| x.iter().map(|v| v * v).sum::<f64>() / x.len().max(1) as f64;
    let mut all = vec![with("norm skipped", format!("{stage} goes on without its norm"), &|x, out| {
        out.copy_from_slice(&x[..out.len()]);
    })];
    if cols > gamma.len() {
        let text = "the norm is taken over latent and rope together".to_string();
        all.push(with("norm over latent and rope", text, &|x, out| {
            let r = 1.0 / (mean(x) + eps).sqrt();
            out.iter_mut().zip(x).zip(gamma).for_each(|((o, x), g)| *o = x * r * g);
        }));
    }
    all.into_iter().flatten().collect()
}

/// An eps that fits.
pub(super) fn fitted<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let Some((_, eps)) = parts(scene).filter(|(_, eps)| *eps > 0.0) else { return Vec::new() };
    // Counting is what a change of eps shows in: it moves some rows by less than their ulp.
    let at = |a: f64| with_eps(scene, eps * a.exp());
    let found = line_search(&|a| scene.distance(&at(a)), 9.0, 1e-4).exp() * eps;
    // Where the odd share is as low to both sides, nothing says more about eps.
    let share = |e: f64| scene.share(&with_eps(scene, e));
    let best = share(found);
    let mut width = 1e-4;
    while width < 1.0 && share(found * (1.0 + width)) <= best && share(found / (1.0 + width)) <= best {
        width *= 2.0;
    }
    let text = format!("eps of the norm is {found:.3e} ± {:.0e}, not {eps:.4e}", found * width);
    let h = Hypothesis::new(FAMILY, format!("eps = {found:.2e}"), text, with_eps(scene, found));
    vec![h.sized(found, found * width)]
}
