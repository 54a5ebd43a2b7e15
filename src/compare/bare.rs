/*!
A dump without a model: what attention is computed from is in the dump, its widths and its scale in the map.

From q, k and v, or q_latent, q_pe and the cache, to the output and lse nothing of a model is needed but widths and the
softmax scale. w_uk and w_uv may be in the dump; they are taken as they are, since nobody says what they should be. All else
needs a model: norms, projections and rotations have weights and tables that no map writes down.
*/

use super::map::{Map, Target};
use super::mapped;
use super::{Beside, Capture, CompareError, Options, judged};
use crate::check::CheckError;
use crate::judge::Which;
use crate::model::{Layer, Layout};
use crate::report::LayerReport;
use crate::trace::read::Dump;
use mla_reference::product::{Dense, Rows};
use mla_reference::{Axis, Form, Geometry, Pairing, Rope, Spec, Stage, Weight, Weights};

/// Scalars that a map may give without a model.
const NAMES: [&str; 6] = ["heads", "nope", "rope", "value", "latent", "scale"];
/// Tensors that need no model.
const STAGES: [Stage; 8] =
    [Stage::Q, Stage::K, Stage::V, Stage::QLatent, Stage::Cache, Stage::OLatent, Stage::Lse, Stage::AttnOut];

/// Widths and scale of a map's `[geometry]`, complete for the tensors that it names.
///
/// # Errors
/// A scalar that is missing, no number of its kind, or of a model; a tensor or weight that needs one.
pub fn spec(map: &Map) -> Result<Spec, CompareError> {
    let bad = |what: String, how: &str| CompareError::new(what, "the map, without a model", how);
    let model = "name the model file before the dump: mla-check compare MODEL DUMP";
    for (target, _) in &map.stages {
        let stage = target.stage();
        if !STAGES.contains(&stage) {
            return Err(bad(
                format!("{stage} needs a model: its weights or its table are not in a map"),
                model,
            ));
        }
        let projected = stage == Stage::AttnOut && target.form().or(map.form) == Some(Form::Absorbed);
        if projected && !map.weights.iter().any(|(w, _)| *w == Weight::WUv) {
            return Err(bad(
                "absorbed/attn_out needs w_uv, from a model or from the dump".into(),
                "name w_uv in [tensors], or the model file before the dump",
            ));
        }
    }
    if let Some((w, _)) = map.weights.iter().find(|(w, _)| !matches!(w, Weight::WUk | Weight::WUv)) {
        return Err(bad(format!("{w} needs a model: nothing that reads it is judged without one"), model));
    }
    if let Some(name) = map.geometry.keys().find(|k| !NAMES.contains(&k.as_str())) {
        return Err(bad(
            format!(
                "[geometry] {}: without a model there is nothing to compare it with",
                name.escape_debug()
            ),
            "leave it out, or name the model file before the dump",
        ));
    }
    let mut g = Geometry { hidden: 0, heads: 0, q_rank: 0, latent: 0, rope: 0, nope: 0, value: 0 };
    for (name, to) in [
        ("heads", &mut g.heads),
        ("nope", &mut g.nope),
        ("rope", &mut g.rope),
        ("value", &mut g.value),
        ("latent", &mut g.latent),
    ] {
        let Some(value) = map.geometry.get(name) else { continue };
        if value.fract() != 0.0 || !(1.0..=65536.0).contains(value) {
            return Err(bad(format!("[geometry] {name} = {value} is no width"), "give a whole number"));
        }
        *to = *value as usize;
    }
    let scale = map.geometry.get("scale").copied().filter(|s| s.is_finite() && *s > 0.0);
    let fused = map.stages.iter().any(|(t, _)| matches!(t.stage(), Stage::K | Stage::V));
    let lacks = |axes: &[Axis]| -> Option<&'static str> {
        axes.iter().find_map(|a| match a {
            Axis::Head if g.heads == 0 => Some("heads"),
            Axis::Nope | Axis::NopeRope if g.nope == 0 => Some("nope"),
            Axis::Rope | Axis::NopeRope | Axis::LatentRope if g.rope == 0 => Some("rope"),
            Axis::Latent | Axis::LatentRope if g.latent == 0 => Some("latent"),
            Axis::Value if g.value == 0 => Some("value"),
            _ => None,
        })
    };
    let of_stages = map.stages.iter().find_map(|(t, _)| match t {
        Target::QPe => lacks(&[Axis::Head, Axis::Rope]),
        // Of the absorbed form the columns that are not rotated play no part.
        Target::Stage(Stage::Q, _) if !fused => lacks(&[Axis::Head, Axis::Rope]),
        of => lacks(&of.stage().axes(of.form().or(map.form))),
    });
    let of_weights = map.weights.iter().find_map(|(w, _)| lacks(w.row().axes));
    if let Some(name) = of_stages.or(of_weights).or(scale.is_none().then_some("scale")) {
        return Err(bad(
            format!("[geometry] does not say {name}"),
            "give heads, rope, scale and what else the tensors have of nope, value and latent, or name the model file before the dump",
        ));
    }
    Ok(Spec {
        geometry: g,
        eps_attn: 0.0,
        eps_latent: 0.0,
        // Nothing is rotated without a model.
        rope: Rope { inv_freq: vec![0.0; g.rope / 2], magnitude: 1.0, pairing: Pairing::Adjacent },
        scale: scale.unwrap_or_default(),
        temperature: None,
    })
}

/// Weights of the dump itself.
struct Taken<'a>(Vec<(Weight, Dense<'a>)>);

impl Weights for Taken<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        self.0.iter().find(|(w, _)| *w == weight).map(|(_, m)| m as &dyn Rows)
    }
    fn norm(&self, _: Weight) -> Option<&[f64]> {
        None
    }
}

/// Reads what a map names of a dump, without a model. `layer`: what `{layer}` in names stands for.
///
/// # Errors
/// As [`spec`] and [`mapped::capture`].
pub fn capture(dump: &Dump, map: &Map, layer: usize) -> Result<(Spec, Capture), CompareError> {
    // What a built-in map may name, and what of it needs a model, is left out.
    let mut map = map.clone();
    map.stages.retain(|(t, e)| !e.optional || STAGES.contains(&t.stage()));
    map.weights.retain(|(w, e)| !e.optional || matches!(w, Weight::WUk | Weight::WUv));
    let spec = spec(&map)?;
    let mut capture = mapped::capture(dump, &map, &spec, layer)?;
    capture.model = false;
    capture.left_out.retain(|what| !what.starts_with("the rotation "));
    Ok((spec, capture))
}

/// The report of a dump without a model.
///
/// # Errors
/// What [`super::judge`] refuses.
pub fn layer(
    spec: Spec,
    index: usize,
    mut capture: Capture,
    options: &Options,
    progress: &dyn Fn(&str),
) -> Result<LayerReport, CheckError> {
    let values = std::mem::take(&mut capture.weights);
    let spec = capture.heads.take().map_or(spec.clone(), |h| h.spec(&spec));
    let g = spec.geometry;
    let taken = Taken(values.iter().map(|(w, v)| (*w, Dense { data: v, cols: w.matrix(&g).1 })).collect());
    let layer = Layer { index, spec, weights: &taken };
    let mut report =
        judged(&layer, Vec::new(), Layout::Split, capture, options, Beside::default(), progress)?;
    // What needs a model is no gap of the dump.
    report.tensors.retain(|u| {
        !u.uncaptured
            || matches!(u.which, Which::Tensor(id) if id.form.is_some() && STAGES.contains(&id.stage))
    });
    Ok(report)
}
