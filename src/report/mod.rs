/*!
The report: one serde struct, and its renderers.

[`Report`] is what `--format json` prints; its names are part of the interface, `schema` says which version.
[`terminal`] renders the same struct for people; the text is not an interface. [`study`] does so for studies of the judge.
*/

mod blocks;
pub mod finding;
pub mod markdown;
pub mod study;
mod table;
pub mod terminal;

use crate::compare::beside::Pair;
use crate::engine::Description;
use crate::judge::cumulative::Drift;
use crate::judge::watch::GateReport;
use crate::judge::{Budget, ScalarDifference, Unit, Verdict};
use crate::model::{Layout, Model, Stored};
use crate::probe::Probe;
use crate::snapshot::{Digest, Kept};
use crate::trace::TensorId;
use mla_reference::{Contract, Geometry, RowName};
use serde::Serialize;
use std::collections::BTreeMap;

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
    /// Two dumps side by side, where two were given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Pair>,
    /// `--snapshot`: what became of each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<Kept>,
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
    /// Their sizes in bytes.
    pub bytes: Vec<u64>,
    /// general.architecture
    pub architecture: &'static str,
    /// general.name, if it has one.
    pub name: Option<String>,
    /// Layers in the file.
    pub layers: usize,
}

impl Report {
    /// The exit code: what the verdict says, or that of a fault where only a snapshot is not accepted.
    pub fn exit_code(&self, bisect: bool) -> u8 {
        match self.verdict.exit(bisect) {
            0 if self.snapshots.iter().any(|s| !s.accepted) => Verdict::Fault.exit(bisect),
            code => code,
        }
    }
}

impl ModelReport {
    /// Of a dump that is compared without one.
    pub fn none() -> ModelReport {
        ModelReport { files: Vec::new(), bytes: Vec::new(), architecture: "none", name: None, layers: 0 }
    }

    /// Of an open model.
    pub fn new(model: &Model) -> ModelReport {
        ModelReport {
            files: model.gguf().parts().iter().map(|p| p.path().display().to_string()).collect(),
            bytes: model.gguf().parts().iter().map(|p| p.length()).collect(),
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

impl LayerReport {
    /// What the rows of a unit are.
    pub fn names(&self, unit: &Unit) -> Option<&Vec<RowName>> {
        self.names.get(unit.tensor)
    }
}

/// The contract that a layer was judged by.
#[derive(Clone, Debug, Serialize)]
pub struct Judgement {
    /// How it was asked for: `none`, a name, a file.
    pub by: String,
    /// The contract.
    pub contract: Contract,
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
    /// The contract that was judged, in words.
    pub contract_text: String,
    /// The contract that was judged, where it is not the declared one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub judged: Option<Judgement>,
    /// Which tensor of the file each weight is.
    pub weights: Vec<Stored>,
    /// Layout of w_uk and w_uv.
    pub layout: Layout,
    /// The case.
    pub case: CaseReport,
    /// Budget of false alarms and promised sizes.
    pub budget: Budget,
    /// Widths and counts; none where nothing ran.
    pub geometry: Option<Geometry>,
    /// What the rows of tensors at fault are.
    #[serde(skip)]
    pub names: BTreeMap<&'static str, Vec<RowName>>,
    /// Scalars that differ between engine and file.
    pub scalars: Vec<ScalarDifference>,
    /// Unit by unit, in the order of judgement.
    pub tensors: Vec<Unit>,
    /// Probes of the engine, form by form; a broken one is a fault.
    pub probes: Vec<Probe>,
    /// Time that probes took, part of `seconds`.
    pub probe_seconds: f64,
    /// `--gates`: what other people's rules say of the outputs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gates: Vec<GateReport>,
    /// `--cumulative`: differences from the start of the layer; shown, not judged.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cumulative: Vec<Drift>,
    /// `--snapshot`: digests of the reference from the start of the layer, in order.
    #[serde(skip)]
    pub reference: Vec<(TensorId, Digest)>,
    /// What is odd in the weights themselves.
    pub odd: Vec<String>,
    /// Engine `reference`: largest difference between the forms, relative to the largest value.
    pub forms_agree: Option<f64>,
    /// Wall time.
    pub seconds: f64,
}
