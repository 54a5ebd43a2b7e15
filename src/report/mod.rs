/*!
The report: one serde struct, and its renderers.

[`Report`] is what `--format json` prints; its names are part of the interface, `schema` says which version.
[`terminal`] renders the same struct for people; the text is not an interface.
*/

pub mod terminal;

use crate::case::Case;
use crate::check::{EngineKind, Options};
use crate::engine::Description;
use crate::judge::{ScalarDifference, Unit, Verdict};
use crate::model::{Layout, Model, Stored};
use mla_reference::Contract;
use serde::Serialize;

/// A whole run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Name and version of this form.
    pub schema: &'static str,
    /// Version of the program.
    pub version: &'static str,
    /// The worst verdict of all layers.
    pub verdict: Verdict,
    /// Exit code that goes with it.
    pub exit: u8,
    /// The fault that was planted, if one was.
    pub deliberate_fault: Option<String>,
    /// The model.
    pub model: ModelReport,
    /// The convention by which the file's numbers were read.
    pub convention: &'static str,
    /// How the engine was chosen.
    pub engine_choice: String,
    /// Layer by layer.
    pub layers: Vec<LayerReport>,
    /// What was not judged.
    pub not_judged: Vec<String>,
    /// The command that repeats the run.
    pub command: String,
}

/// The model of a run.
#[derive(Debug, Serialize)]
pub struct ModelReport {
    /// Files, in order.
    pub files: Vec<String>,
    /// general.architecture
    pub architecture: &'static str,
    /// general.name, if it has one.
    pub name: Option<String>,
    /// Layers in the file.
    pub layers: usize,
}

impl ModelReport {
    /// Of an open model.
    pub fn new(model: &Model) -> ModelReport {
        ModelReport {
            files: model.gguf().parts().iter().map(|p| p.path().display().to_string()).collect(),
            architecture: model.arch.name,
            name: model
                .gguf()
                .metadata()
                .str("general.name")
                .ok()
                .flatten()
                .map(|n| n.escape_debug().to_string()),
            layers: model.blocks,
        }
    }
}

/// The case of a layer.
#[derive(Debug, Serialize)]
pub struct CaseReport {
    /// Requests.
    pub batch: String,
    /// Regimes.
    pub regimes: Vec<&'static str>,
    /// Request and regime of each sequence.
    pub sequences: Vec<(usize, &'static str)>,
    /// Dtype of the engine's activations.
    pub dtype: &'static str,
    /// Seed.
    pub seed: u64,
    /// Slots of a page.
    pub page_size: usize,
    /// Splits of the keys in decode.
    pub splits: usize,
    /// Where the hidden states come from.
    pub hidden: &'static str,
    /// What the draw turned out to be.
    pub notes: Vec<String>,
}

impl CaseReport {
    /// Of a drawn case.
    pub fn new(case: &Case, options: &Options) -> CaseReport {
        CaseReport {
            batch: case.batch.to_string(),
            regimes: case.regimes.iter().map(|r| r.name()).collect(),
            sequences: case.plan.sequences.iter().map(|s| (s.request, s.regime.name())).collect(),
            dtype: if options.engine == EngineKind::Reference { "f64" } else { options.dtype.name() },
            seed: options.seed,
            page_size: case.plan.page_size,
            splits: case.plan.splits,
            hidden: if options.hidden.is_some() { "given" } else { "drawn" },
            notes: case.notes.clone(),
        }
    }
}

/// One layer.
#[derive(Debug, Serialize)]
pub struct LayerReport {
    /// Index.
    pub layer: usize,
    /// The worst of its tensors.
    pub verdict: Verdict,
    /// The engine.
    pub engine: Description,
    /// What it declared.
    pub contract: Contract,
    /// The same in words.
    pub contract_text: String,
    /// Which tensor of the file each weight is.
    pub weights: Vec<Stored>,
    /// Layout of w_uk and w_uv.
    pub layout: Layout,
    /// The case.
    pub case: CaseReport,
    /// Scalars that differ between engine and file.
    pub scalars: Vec<ScalarDifference>,
    /// Unit by unit, in the order of judgement.
    pub tensors: Vec<Unit>,
    /// What is odd in the weights themselves.
    pub odd: Vec<String>,
    /// Engine `reference`: largest difference between the forms, relative to the largest value.
    pub forms_agree: Option<f64>,
    /// Wall time.
    pub seconds: f64,
}

/// What no run of an engine of ours says anything about.
pub fn not_judged(options: &Options) -> Vec<String> {
    let mut all = vec![
        "whether the file's weights are the right ones: `inspect` shows headers and shapes only".to_string(),
        "what a serving engine computes from this file".to_string(),
        "anything outside attention: router, experts, norms after attention, sampling, chat template"
            .to_string(),
    ];
    match options.engine {
        EngineKind::Cpu => {
            all.push("GPU kernels: engine cpu emulates a kernel's arithmetic, it runs none".to_string())
        }
        EngineKind::Reference => {
            all.push(
                "any engine: the float64 reference was computed, nothing was held against it".to_string(),
            );
        }
    }
    if options.engine != EngineKind::Reference {
        all.push("how small a fault would have been seen: power is not measured by this version".to_string());
    }
    if options.forms.len() < 2 {
        let other = if options.forms.contains(&mla_reference::Form::Fused) { "absorbed" } else { "fused" };
        all.push(format!("the {other} form"));
    }
    all
}
