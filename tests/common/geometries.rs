//! Layers of every geometry that the engines are to take, small in all that does not matter: the same on every engine.
#![allow(dead_code)]

use super::small::with_layer;
use mla_check::check::{self, Beside, CheckError, EngineKind, Options};
use mla_check::engine::EngineError;
use mla_check::judge::origins;
use mla_reference::{Form, Geometry, Pairing, Regime, Rope, Spec};

/// A layer with its requests.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Name.
    pub name: &'static str,
    /// Widths.
    pub geometry: Geometry,
    /// Requests.
    pub batch: &'static str,
    /// Slots of a page.
    pub page_size: usize,
    /// Splits of the keys in decode.
    pub splits: usize,
}

/// What a head of DeepSeek has, with narrow projections: they say nothing about attention.
const USUAL: Geometry =
    Geometry { hidden: 64, heads: 8, q_rank: 64, latent: 512, rope: 64, nope: 128, value: 128 };
/// No context; a decode step on a page and a bit; some tokens on a context.
const BATCH: &str = "0+1,17+1,18+3";

const fn shape(name: &'static str, geometry: Geometry) -> Shape {
    Shape { name, geometry, batch: BATCH, page_size: 16, splits: 2 }
}

/// All of them. A batch is short, since the PTX machine takes its time.
pub const ALL: [Shape; 21] = [
    shape("kimi-k2", Geometry { heads: 64, ..USUAL }),
    shape("minicpm3", Geometry { heads: 40, latent: 256, rope: 32, nope: 64, value: 64, ..USUAL }),
    shape("mistral-small-4", Geometry { heads: 32, latent: 256, nope: 64, ..USUAL }),
    shape("glm-4.7-flash", Geometry { heads: 20, nope: 192, value: 256, ..USUAL }),
    shape("no-rope", Geometry { rope: 0, ..USUAL }),
    shape("nope-256", Geometry { nope: 256, ..USUAL }),
    shape("nope-256-no-rope", Geometry { nope: 256, rope: 0, value: 256, ..USUAL }),
    shape("values-256-keys-320", Geometry { nope: 256, value: 256, ..USUAL }),
    shape("without-query-rank", Geometry { q_rank: 0, ..USUAL }),
    shape("heads-1", Geometry { heads: 1, ..USUAL }),
    shape("heads-5", Geometry { heads: 5, ..USUAL }),
    shape("heads-8", USUAL),
    shape("heads-12", Geometry { heads: 12, ..USUAL }),
    shape("heads-20", Geometry { heads: 20, ..USUAL }),
    shape("heads-40", Geometry { heads: 40, ..USUAL }),
    shape("heads-96", Geometry { heads: 96, ..USUAL }),
    Shape { page_size: 1, ..shape("pages-of-1", USUAL) },
    Shape { page_size: 64, batch: "0+1,70+1,66+3", ..shape("pages-of-64", USUAL) },
    // Splits of which most see no key.
    Shape { splits: 7, batch: "0+1,2+1,40+1", ..shape("empty-splits", USUAL) },
    Shape { batch: "0+1,0+2,0+33", ..shape("no-context", USUAL) },
    Shape { batch: "33+2,30+3,17+4,16+5,15+6,1+7,64+8", ..shape("some-tokens-on-a-context", USUAL) },
];

/// What the kernels refuse, by the condition in their header: (name, form, the condition). Who makes them take it deletes the row.
pub const REFUSED: &[(&str, Form, &str)] =
    &[("values-256-keys-320", Form::Fused, "NOPE + ROPE <= 256 || NOPE + ROPE <= 320 && VALUE <= 128")];

fn spec(g: Geometry) -> Spec {
    let inv_freq = (0..g.rope / 2).map(|j| 1e4f64.powf(-2.0 * j as f64 / g.rope as f64)).collect();
    Spec {
        geometry: g,
        eps_attn: 1e-5,
        eps_latent: 1e-6,
        rope: Rope { inv_freq, magnitude: 1.0, pairing: Pairing::Adjacent },
        scale: 1.0 / (g.key() as f64).sqrt(),
        temperature: None,
    }
}

/// What is at fault with an engine's tensors of a shape, in one form; an error where the engine does not take it.
pub fn faults(
    engine: EngineKind,
    s: &Shape,
    form: Form,
    change: impl FnOnce(&mut Options),
) -> Result<Vec<String>, CheckError> {
    let mut options = Options {
        engine,
        forms: vec![form],
        batch: s.batch.parse().unwrap(),
        regimes: vec![Regime::Random],
        page_size: s.page_size,
        splits: Some(s.splits),
        ..Options::default()
    };
    change(&mut options);
    with_layer(spec(s.geometry), |layer| {
        let case = check::draw(layer, &options)?;
        let engine = check::engine(&options)?;
        let judged = check::judge(layer, &case, &options, engine.as_ref(), Beside::default(), &|_| ())?;
        let empty = |u: &&mla_check::judge::Unit| u.elements == 0 && s.geometry.rope > 0;
        let empty = judged.units.iter().filter(empty).map(|u| format!("{} was not compared", u.title()));
        let wrong = origins(&judged.units).map(|u| format!("{}: {}", u.title(), u.evidence.join("; ")));
        Ok(wrong.chain(empty).collect())
    })
}

/// An engine is right about a shape in both forms, or refuses it where it is known to.
pub fn right(engine: EngineKind, s: &Shape) {
    for form in Form::ALL {
        let kernels = engine.runs_kernels();
        let refused = REFUSED.iter().find(|r| kernels && (r.0, r.1) == (s.name, form));
        match (faults(engine, s, form, |_| ()), refused) {
            (Ok(faults), None) => assert!(faults.is_empty(), "{}, {form:?}: {faults:?}", s.name),
            (Ok(_), Some(_)) => panic!("{}, {form:?} is taken now: delete its row of REFUSED", s.name),
            (Err(CheckError::Engine(EngineError::Input(e))), Some((_, _, condition))) => {
                assert!(e.contains(&format!("asks for {condition}, which does not hold")), "{}: {e}", s.name);
            }
            (Err(e), _) => panic!("{}, {form:?}: {e}", s.name),
        }
    }
}
