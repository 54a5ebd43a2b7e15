/*!
The report: one serde struct, and its renderers.

[`Report`] is what `--format json` prints; its names are part of the interface, `schema` says which version.
[`terminal`] renders the same struct for people; the text is not an interface. [`study`] does so for studies of the judge.
*/

mod blocks;
mod drawing;
pub mod faults;
pub mod finding;
pub mod github;
mod html;
pub mod invariance;
pub mod junit;
pub mod kinds;
pub mod markdown;
pub mod ranks;
pub mod read;
#[cfg(test)]
pub(crate) mod sample;
pub mod study;
mod table;
pub mod terminal;

use crate::case::Routed;
use crate::compare::beside::Pair;
use crate::engine::Description;
use crate::engine::stack::StackReport;
use crate::judge::cumulative::Drift;
use crate::judge::memory::Use;
use crate::judge::watch::GateReport;
use crate::judge::{Budget, ScalarDifference, Unit, Verdict};
use crate::model::{Layout, Model, Stored};
use crate::probe::Probe;
use crate::report::ranks::RanksReport;
use crate::snapshot::{Digest, Kept, State};
use crate::trace::TensorId;
use crate::written::{self, Name};
use mla_reference::{Contract, Geometry, RowName, Stage};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Schema of `run`: name and version.
pub const RUN: Name = "mla-check.run/1";
/// Schema of `compare`.
pub const COMPARE: Name = "mla-check.compare/1";
/// Those that are read back.
pub const SCHEMAS: [Name; 2] = [RUN, COMPARE];

/// A whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Name and version of this form.
    #[serde(deserialize_with = "written::name")]
    pub schema: Name,
    /// Version of the program.
    #[serde(deserialize_with = "written::name")]
    pub version: Name,
    /// The worst verdict of all layers.
    pub verdict: Verdict,
    /// Exit code that goes with it.
    pub exit: u8,
    /// The fault that was planted, if one was.
    pub deliberate_fault: Option<String>,
    /// The model.
    pub model: ModelReport,
    /// The convention by which the file's numbers were read.
    #[serde(deserialize_with = "written::name")]
    pub convention: Name,
    /// How the engine was chosen.
    pub engine_choice: String,
    /// Layer by layer.
    pub layers: Vec<LayerReport>,
    /// Two dumps side by side, where two were given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Pair>,
    /// `--signature`: whether what is wrong is the recorded fault; none where nothing is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signature: Option<SignatureReport>,
    /// `--snapshot`: what became of each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<Kept>,
    /// What was not judged.
    pub not_judged: Vec<String>,
    /// Why layers are missing that were asked for: the engine broke or was not there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub broken: Vec<Lack>,
    /// What a merge of reports misses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gaps: Vec<Lack>,
    /// The command that repeats the run; of a merge the commands of its parts, one a line.
    pub command: String,
}

/// What a cache of the reference was good for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheReport {
    /// Parts of the reference that were known, and that were computed.
    #[serde(flatten)]
    pub used: Use,
    /// Entries that were damaged, and were computed anew.
    pub damaged: u64,
    /// Why something could not be kept, where that happened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
}

/// What a run says of a recorded fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignatureReport {
    /// The signature's file.
    pub file: String,
    /// Whether the recorded fault is there.
    pub same: bool,
    /// In words.
    pub text: String,
}

/// Something that is not in a report and should be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Lack {
    /// What that makes of the whole.
    pub verdict: Verdict,
    /// In words.
    pub what: String,
}

impl Report {
    /// Of nothing yet.
    pub fn empty(schema: Name, model: ModelReport, command: String) -> Report {
        Report {
            schema,
            version: env!("CARGO_PKG_VERSION"),
            verdict: Verdict::NotCompared,
            exit: Verdict::NotCompared.exit(false),
            deliberate_fault: None,
            model,
            convention: "none",
            engine_choice: String::new(),
            layers: Vec::new(),
            beside: Vec::new(),
            signature: None,
            snapshots: Vec::new(),
            not_judged: Vec::new(),
            broken: Vec::new(),
            gaps: Vec::new(),
            command,
        }
    }

    /// The command that judged a layer.
    pub fn command_of<'a>(&'a self, l: &'a LayerReport) -> &'a str {
        l.command.as_deref().unwrap_or(&self.command)
    }

    /// What does not let it pass and stands in no layer, each with a word for what it is.
    pub fn lacks(&self) -> Vec<(&'static str, Lack)> {
        let broken = self.broken.iter().map(|l| ("broken", l.clone()));
        let gaps = self.gaps.iter().map(|l| ("missing", l.clone()));
        let snapshots = self.snapshots.iter().filter(|s| !s.accepted).map(|s| {
            let state = match s.state {
                State::New => "is new",
                State::Agrees | State::Differs => "differs",
            };
            let what = format!("{} {state}\n{}", s.file, s.diff.join("\n"));
            ("snapshot", Lack { verdict: Verdict::Fault, what })
        });
        broken.chain(gaps).chain(snapshots).collect()
    }

    /// The worst of its layers and of what is missing.
    pub fn worst(&self) -> Verdict {
        let lacks = self.broken.iter().chain(&self.gaps).map(|l| l.verdict);
        self.layers.iter().map(|l| l.verdict).chain(lacks).max().unwrap_or(Verdict::NotCompared)
    }
}

/// The model of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelReport {
    /// Files, in order.
    pub files: Vec<String>,
    /// Their sizes in bytes.
    pub bytes: Vec<u64>,
    /// general.architecture
    #[serde(deserialize_with = "written::name")]
    pub architecture: Name,
    /// general.name, if it has one.
    pub name: Option<String>,
    /// Layers in the file.
    pub layers: usize,
    /// Those with MLA attention.
    #[serde(default)]
    pub mla_layers: Vec<usize>,
    /// What whoever reads a verdict about this model has to know of the program: an architecture that nobody verified.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

impl Report {
    /// The exit code: what the verdict says, or that of a fault where only a snapshot is not accepted.
    pub fn exit_code(&self, bisect: bool) -> u8 {
        // Another fault than the recorded one says nothing of that one.
        let another = bisect && self.signature.as_ref().is_some_and(|s| !s.same);
        let verdict = if another { Verdict::NotCompared } else { self.verdict };
        match verdict.exit(bisect) {
            0 if self.snapshots.iter().any(|s| !s.accepted) => Verdict::Fault.exit(bisect),
            code => code,
        }
    }
}

impl ModelReport {
    /// Of a dump that is compared without one.
    pub fn none() -> ModelReport {
        ModelReport {
            files: Vec::new(),
            bytes: Vec::new(),
            architecture: "none",
            name: None,
            layers: 0,
            mla_layers: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Of an open model.
    pub fn new(model: &Model) -> ModelReport {
        let files = model.source().files();
        ModelReport {
            files: files.iter().map(|(path, _)| path.display().to_string()).collect(),
            bytes: files.iter().map(|(_, bytes)| *bytes).collect(),
            architecture: model.arch.name,
            name: model.source().name().map(|n| n.escape_debug().to_string()),
            layers: model.blocks,
            mla_layers: model.mla_layers(),
            warnings: model.arch.warning().into_iter().collect(),
        }
    }
}

/// The case of a layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseReport {
    /// Requests.
    pub batch: String,
    /// Regimes.
    #[serde(deserialize_with = "written::names")]
    pub regimes: Vec<Name>,
    /// Request and regime of each sequence.
    #[serde(deserialize_with = "written::numbered")]
    pub sequences: Vec<(usize, Name)>,
    /// Dtype of the engine's activations.
    #[serde(deserialize_with = "written::name")]
    pub dtype: Name,
    /// Seed.
    pub seed: u64,
    /// Slots of a page.
    pub page_size: usize,
    /// Splits of the keys in decode.
    pub splits: usize,
    /// Which way requests went, where each goes one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routed: Option<Routed>,
    /// Keys of a chunk of the context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_chunk: Option<usize>,
    /// Where the hidden states come from.
    #[serde(deserialize_with = "written::name")]
    pub hidden: Name,
    /// What the draw turned out to be.
    pub notes: Vec<String>,
}

impl CaseReport {
    /// Which way requests went and how contexts were cut, as labelled lines; none where nothing is out of the ordinary.
    pub fn ways(&self) -> Vec<(&'static str, String)> {
        let routed = self.routed.as_ref().map(|r| {
            let text = format!(
                "decodes are requests of at most {} new tokens (absorbed form), the others prefills (fused form): {r}; ran in the order {}, numbers as in --batch, from 0",
                r.decode_threshold,
                r.order_text(&self.batch)
            );
            ("routed", text)
        });
        let chunks = self.context_chunk.map(|n| {
            (
                "chunks",
                format!(
                    "contexts of prefills in chunks of {n} keys, merged with the new tokens (fused form)"
                ),
            )
        });
        routed.into_iter().chain(chunks).collect()
    }
}

impl LayerReport {
    /// What the rows of a unit are.
    pub fn names(&self, unit: &Unit) -> Option<&Vec<RowName>> {
        self.names.get(unit.tensor)
    }
}

/// What a row of many layers shows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// The largest share of what rounding allows, of all elements that are not the rounded reference.
    pub worst: Option<f64>,
    /// Norm of the layer's output.
    pub norm: Option<f64>,
    /// Norm of the reference's.
    pub reference: Option<f64>,
}

impl LayerReport {
    /// The layer in three numbers; norms of all phases of the first form together.
    pub fn summary(&self) -> Summary {
        let shares = self.tensors.iter().filter_map(|u| Some(u.worst.as_ref()?.share_of_bound));
        let out = || self.tensors.iter().filter(|u| u.tensor == Stage::Out.name());
        let form = out().find_map(|u| u.form);
        let norm = |of: fn(&Unit) -> Option<crate::judge::Digest>| {
            let all: Vec<f64> = out().filter(|u| u.form == form).filter_map(|u| Some(of(u)?.norm)).collect();
            (!all.is_empty()).then(|| all.iter().map(|n| n * n).sum::<f64>().sqrt())
        };
        Summary { worst: shares.reduce(f64::max), norm: norm(|u| u.engine), reference: norm(|u| u.reference) }
    }
}

/// The contract that a layer was judged by.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Judgement {
    /// How it was asked for: `none`, a name, a file.
    pub by: String,
    /// The contract.
    pub contract: Contract,
}

/// One layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
    /// Weights that the engine stacks, by slots in the declared order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stacks: Vec<StackReport>,
    /// Layout of w_uk and w_uv.
    pub layout: Layout,
    /// The case.
    pub case: CaseReport,
    /// Budget of false alarms and promised sizes.
    pub budget: Budget,
    /// Widths and counts; none where nothing ran.
    pub geometry: Option<Geometry>,
    /// What the rows of tensors at fault are.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", with = "written::rows")]
    pub names: BTreeMap<Name, Vec<RowName>>,
    /// Scalars that differ between engine and file.
    pub scalars: Vec<ScalarDifference>,
    /// Unit by unit, in the order of judgement.
    pub tensors: Vec<Unit>,
    /// Probes of the engine, form by form; a broken one is a fault.
    pub probes: Vec<Probe>,
    /// `--invariance`: the same requests run another way; a fault there is one of the run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub invariance: Vec<invariance::Variant>,
    /// Time that probes took, part of `seconds`.
    pub probe_seconds: f64,
    /// `--gates`: what other people's rules say of the outputs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gates: Vec<GateReport>,
    /// `--cumulative`: differences from the start of the layer; shown, not judged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cumulative: Vec<Drift>,
    /// `--reference-cache`: what it was good for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference_cache: Option<CacheReport>,
    /// `--snapshot`: digests of the reference from the start of the layer, in order.
    #[serde(skip)]
    pub reference: Vec<(TensorId, Digest)>,
    /// What is odd in the weights themselves.
    pub odd: Vec<String>,
    /// How the file was read where it could be read in two ways: rope factors, weights that it holds twice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// `--tp`: the ranks, and what should be the same on all of them and is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RanksReport>,
    /// Engine `reference`: largest difference between the forms, relative to the largest value.
    pub forms_agree: Option<f64>,
    /// Wall time.
    pub seconds: f64,
    /// The command that judged it, in a report that was merged from several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}
