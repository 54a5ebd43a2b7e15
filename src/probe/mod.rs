/*!
Probes: small questions to the engine itself whose answers need no tolerance, or nearly none.

Each runs the engine on a case of a few tokens and compares its tensors with each other, or with what one
visible key, a power of two or a single one in a row of zeros must give, bit for bit where rounding leaves no
choice. They split the space of faults another way than stages do:

| probe | must hold | sees |
|---|---|---|
| `one-key` | a token with one visible key: attn_out = W_UV · kv_c_normed, lse = the score | values side (cache, W_UV) or scores side (mask, softmax, sums, merge, scale) |
| `powers-of-two` | q · 2² and scale · 2⁻² give the same bits | a scale or bound on scores that is not the layer's |
| `relabelled-pages` | where pages lie changes no bit | page tables, addresses, strays |
| `one-hot` | a one-hot latent reads columns of W_UK and W_UV | order and layout of weights, cache and heads |

`out` is not looked at: a product of attn_out alone, which the judge sees in isolation, and the largest weight of
most layers. What is broken is evidence for a fault, whatever the judge says of the tensors of the run.
*/

mod case;
mod invariance;
mod one_hot;
mod one_key;
mod place;
mod run;

use crate::engine::{Engine, EngineError};
use crate::fault::Fault;
use crate::model::Layer;
use crate::written::{self, Name};
use case::Common;
pub(crate) use case::mirrored;
use mla_reference::Form;
use place::Count;
pub(crate) use place::place;
use run::{Runner, unchanged};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;

/// What is probed.
pub struct Subject<'a> {
    /// The engine.
    pub engine: &'a dyn Engine,
    /// The layer as the file has it.
    pub layer: &'a Layer<'a>,
    /// Forms.
    pub forms: &'a [Form],
    /// The deliberate fault of the run, which acts on its probes too.
    pub fault: Option<&'a Fault>,
    /// Seed of everything drawn.
    pub seed: u64,
    /// Slots of a page.
    pub page_size: usize,
    /// Splits of the keys in decode, as the engine has them.
    pub splits: usize,
}

/// One probe of one form. Part of the report; names are stable.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Probe {
    /// `one-key`, `powers-of-two`, `relabelled-pages`, `one-hot`.
    #[serde(deserialize_with = "written::name")]
    pub name: Name,
    /// Form.
    pub form: Form,
    /// What came out.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// What a break means.
    #[serde(deserialize_with = "written::name")]
    pub says: Name,
}

/// What came out of a probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum Outcome {
    /// What must hold does.
    Held {
        /// What was looked at.
        what: String,
        /// Elements compared.
        elements: u64,
    },
    /// It does not.
    Broken {
        /// What does not hold.
        what: String,
        /// Tensor and place of the first element.
        place: String,
        /// Elements of which it does not hold.
        broken: u64,
        /// Elements compared.
        elements: u64,
    },
    /// Nothing was learned.
    NotApplicable {
        /// Why.
        why: String,
    },
}

impl Probe {
    /// Whether it is evidence for a fault.
    pub fn broken(&self) -> bool {
        matches!(self.outcome, Outcome::Broken { .. })
    }
}

/// Context rows of the decode step in the fused form: with the other tokens 16 keys.
const FEW_KEYS: usize = 12;
/// The same in the absorbed form: a row more than a page of the usual 64 slots.
const MANY_KEYS: usize = 65;
/// One-hot rows that are read back, at most.
const READ: usize = 6;

/// Runs every probe in every form. Fails only where the engine itself gives up.
pub fn all(subject: &Subject, progress: &dyn Fn(&str)) -> Result<Vec<Probe>, EngineError> {
    let contract = subject.engine.contract();
    let g = subject.layer.spec.geometry;
    let common = Common {
        seed: subject.seed,
        page_size: subject.page_size,
        splits: subject.splits,
        dtype: contract.activations,
        hidden: g.hidden,
        latent: g.latent,
        cache: g.cache(),
    };
    let runner = Runner {
        engine: subject.engine,
        layer: subject.layer,
        fault: subject.fault,
        evidence: RefCell::default(),
    };
    let latents = common.indices(g.latent, READ, 0);
    let mut probes = Vec::new();
    for &form in subject.forms {
        let mut add = |name, says, outcome| probes.push(Probe { name, form, outcome, says });
        progress(&format!("probing {}", form.name()));
        // Every key costs the fused form a decompression, the absorbed one next to nothing.
        let case = common.base(&latents, if form == Form::Fused { FEW_KEYS } else { MANY_KEYS });
        let base = match runner.run(&case, form, &unchanged)? {
            Ok(base) => base,
            Err(why) => {
                for (name, says) in [ONE_KEY, POWERS, PAGES, ONE_HOT] {
                    add(name, says, Outcome::NotApplicable { why: why.clone() });
                }
                continue;
            }
        };
        let (outcome, says) = one_key::probe(&base, &case, form, subject.layer, &contract);
        add(ONE_KEY.0, says, outcome);
        let (pages, powers) = invariance::pages_and_powers(&runner, &base, &case, form)?;
        add(POWERS.0, POWERS.1, powers);
        add(PAGES.0, PAGES.1, pages);
        add(ONE_HOT.0, ONE_HOT.1, one_hot::probe(&runner, &base, &case, form, &common, &latents)?);
        let seen = runner.evidence.take();
        if let Some(first) = seen.first() {
            let (what, place, broken) =
                ("what the device watches over".into(), first.clone(), seen.len() as u64);
            add(DEVICE.0, DEVICE.1, Outcome::Broken { what, place, broken, elements: broken });
        }
    }
    Ok(probes)
}

const ONE_KEY: (&str, &str) =
    ("one-key", "both sides: values (cache, its slots, w_uv) and scores (mask, softmax, sums, merge, scale)");
const POWERS: (&str, &str) = (
    "powers-of-two",
    "scores are not q·k times the layer's scale alone: another scale, a clamp, an additive term",
);
const PAGES: (&str, &str) =
    ("relabelled-pages", "a result depends on where pages lie: page table, addresses, rows of others");
const ONE_HOT: (&str, &str) = (
    "one-hot",
    "order or layout: rows, columns or heads of a weight, of the cache or of an output are exchanged",
);

const DEVICE: (&str, &str) =
    ("device", "memory: never written, out of bounds, read before it was written, a race");

/// The outcome of a count; nothing compared is no success.
fn outcome(count: Count, held: String, broken: &str) -> Outcome {
    match count {
        Count { elements: 0, .. } => Outcome::NotApplicable { why: "no element could be compared".into() },
        Count { broken: 0, elements, .. } => Outcome::Held { what: held, elements },
        Count { broken: n, elements, first } => {
            Outcome::Broken { what: broken.into(), place: first.unwrap_or_default(), broken: n, elements }
        }
    }
}
