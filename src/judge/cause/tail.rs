/*! Sums of a product that end too early: the terms after the last whole step are left out. */

use super::Hypothesis;
use super::change::Change;
use super::scene::Scene;
use mla_reference::{Form, Source, Stage};
use std::ops::Range;

/// Terms that kernels take at a time.
const STEPS: [usize; 6] = [8, 16, 32, 64, 128, 256];

/// What a product sums over: the input, how far apart its heads lie (all columns where it has none), terms of a sum.
fn input(scene: &Scene) -> Option<(Stage, usize, usize)> {
    let g = &scene.spec().geometry;
    let whole = |stage, n| Some((stage, n, n));
    match scene.id.stage {
        Stage::QA | Stage::KvA => whole(Stage::AttnIn, g.hidden),
        Stage::QRaw if g.q_rank == 0 => whole(Stage::AttnIn, g.hidden),
        Stage::QRaw => whole(Stage::QANormed, g.q_rank),
        Stage::K | Stage::V => Some((Stage::Cache, g.cache(), g.latent)),
        Stage::QLatent => Some((Stage::Q, g.key(), g.nope)),
        Stage::AttnOut if scene.id.form == Some(Form::Absorbed) => whole(Stage::OLatent, g.latent),
        Stage::Out if !scene.of.case.plan.joins(Stage::Out, scene.id.form) => {
            whole(Stage::AttnOut, g.values())
        }
        _ => None,
    }
}

/// All of the family.
pub(super) fn all<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    let Some((stage, width, terms)) = input(scene).filter(|i| i.2 > 0) else { return Vec::new() };
    let mut all: Vec<Hypothesis> = Vec::new();
    let mut known = 0;
    for step in STEPS {
        let rest = terms % step;
        if rest == known || rest == terms {
            continue;
        }
        known = rest;
        let read = move |source: &dyn Source, rows: Range<usize>, cols: Range<usize>| {
            let mut block = source.block(stage, rows, cols.clone());
            for (mut column, c) in block.columns_mut().into_iter().zip(cols) {
                if (terms - rest..terms).contains(&(c % width)) {
                    column.fill(0.0);
                }
            }
            block
        };
        let name = format!("last {rest} of {terms} terms left out");
        let text =
            format!("sums end after the last whole step of {step} terms: {rest} of {terms} are left out");
        all.push(Hypothesis::new("products", name, text, Change::source(stage, read)));
    }
    all
}
