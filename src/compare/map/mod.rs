/*!
Maps: which array of a dump is which tensor, and what the dump does not say of itself.

`parse` reads them from TOML with a closed set of keys ([docs/dumps.md](../../../docs/dumps.md)); some are built in
(`builtin`); manifests of the hooks in `adapters/` become the same struct ([`super::hook`]).
*/

mod builtin;
mod nearest;
mod parse;

pub use builtin::{BUILT_IN, BuiltIn, built_in};
pub use nearest::nearest;
pub(super) use parse::{page_size, target};

use crate::case::Batch;
use crate::contracts;
use crate::model::Convention;
use mla_numeric::DType;
use mla_reference::{Contract, Form, LseBase, Pairing, RopeAngle, Splits, Stage, Weight};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Rope columns of queries, where a dump has no others: what attention reads beside `q_latent`.
pub const Q_PE: &str = "q_pe";

/// What stands for the rank in names of arrays.
pub const RANK: &str = "{rank}";

/// What a map says.
#[derive(Clone, Debug)]
pub struct Map {
    /// Backend and version, for the report.
    pub engine: EngineName,
    /// What else is known of how the dump was made, for the report.
    pub notes: Vec<String>,
    /// Which of a dump's captures it is, for the report.
    pub label: Option<String>,
    /// It is one of several captures of a dump: arrays that it does not name are the others'.
    pub part: bool,
    /// Layer of the model.
    pub layer: Option<usize>,
    /// What `{step}` in names of arrays stands for.
    pub step: usize,
    /// Ranks of tensor parallelism, where names of arrays hold [`RANK`].
    pub ranks: Option<Ranks>,
    /// Whose reading of the model's numbers; None: the backend's.
    pub convention: Option<Convention>,
    /// eps of the q_a and kv_a norms.
    pub norm_eps: Option<f64>,
    /// The contract that is emulated.
    pub contract: MapContract,
    /// Splits of the keys in decode, instead of the contract's.
    pub splits: Option<Splits>,
    /// Form of tensors that both forms have.
    pub form: Option<Form>,
    /// Lengths of requests.
    pub requests: Requests,
    /// Position of each new token; None: those of a causal sequence.
    pub positions: Option<Numbers>,
    /// Slots of a page.
    pub page_size: usize,
    /// Base of lse; None: the contract's.
    pub lse_base: Option<LseBase>,
    /// How positions are rotated; None: as the contract says, where the engine declares it, else unknown.
    pub rope: Option<RopeTable>,
    /// Scalars that the engine used, by the names of `run --save`'s manifest.
    pub geometry: BTreeMap<String, f64>,
    /// Tensors of activations.
    pub stages: Vec<(Target, Entry)>,
    /// Weights.
    pub weights: Vec<(Weight, Entry)>,
    /// What was to be captured and is not there, and what is known of that.
    pub missing: Vec<(Target, String)>,
    /// What the engine's path does not have, and why.
    pub not_applicable: Vec<(Target, String)>,
}

/// Backend and version.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct EngineName {
    pub backend: String,
    pub version: String,
}

/// Which contract.
#[derive(Clone, Debug)]
pub enum MapContract {
    /// Written in the map: the engine declares it.
    Declared(Box<Contract>),
    /// Nothing is known.
    None,
    /// A kernel of the built-in table.
    Named(&'static contracts::Kernel),
    /// A file's.
    File(String, Box<Contract>),
}

/// Where lengths come from.
#[derive(Clone, Debug)]
pub enum Requests {
    /// The map.
    Given(Batch),
    /// Two integer arrays of the dump: keys after the step, and new tokens, of each request.
    Arrays {
        /// Array of all keys.
        keys: String,
        /// Array of new tokens.
        new: String,
    },
}

/// Integers, in an array of the dump or written out.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Numbers {
    /// An array's name.
    Array(String),
    /// Written out.
    Given(Vec<usize>),
}

/// Ranks of tensor parallelism: each holds as many heads as the others, in the order of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// How many there are.
    pub of: usize,
    /// Those that dumped, ascending.
    pub present: Vec<usize>,
}

impl Ranks {
    /// Those that did not dump.
    pub fn lost(&self) -> Vec<usize> {
        (0..self.of).filter(|r| !self.present.contains(r)).collect()
    }
}

/// How an engine rotates, as fields of a contract.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeTable {
    /// cos and sin are held in this.
    pub table: DType,
    /// From which angles.
    #[serde(default = "exact")]
    pub angle: RopeAngle,
    /// What products are rounded to before they are added.
    pub products: Option<DType>,
}

fn exact() -> RopeAngle {
    RopeAngle::Exact
}

/// A place at which the attention's output was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Point {
    /// What the attention returned.
    Kernel,
    /// What the output projection reads.
    Caller,
}

impl Point {
    /// Both, by name.
    pub const ALL: [(&str, Point); 2] =
        [("attn_out@kernel", Point::Kernel), ("attn_out@caller", Point::Caller)];
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A stage in a form; None: shared, or of the map's form.
    Stage(Stage, Option<Form>),
    /// [`Q_PE`].
    QPe,
    /// `attn_out` at one of two places.
    Point(Point, Option<Form>),
}

impl Target {
    /// The stage whose values they are.
    pub fn stage(self) -> Stage {
        match self {
            Target::Stage(stage, _) => stage,
            Target::QPe => Stage::Q,
            Target::Point(..) => Stage::AttnOut,
        }
    }

    /// The form, where it says one.
    pub fn form(self) -> Option<Form> {
        match self {
            Target::Stage(_, form) | Target::Point(_, form) => form,
            Target::QPe => Some(Form::Absorbed),
        }
    }
}

/// Where the values of a tensor are.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Array's name.
    #[serde(default)]
    pub name: String,
    /// Axes in the order of the dump.
    pub axes: Option<Vec<String>>,
    /// What the bits are, where the file does not say.
    pub dtype: Option<DType>,
    /// Order of rope pairs in the dump.
    pub pair_order: Option<PairOrder>,
    /// Part of an axis that counts.
    #[serde(default)]
    pub slice: BTreeMap<String, (usize, usize)>,
    /// Two arrays, one after the other on the last axis, instead of one.
    #[serde(default)]
    pub parts: Vec<Entry>,
    /// The map is a built-in one: where the dump lacks the array, the tensor was not captured.
    #[serde(skip)]
    pub optional: bool,
    /// Cache: integer array [request, page] of the pages of each request.
    pub block_table: Option<String>,
    /// Cache: the slot of each key, request after request.
    pub slots: Option<Numbers>,
    /// `out`: not yet summed over ranks.
    #[serde(default)]
    pub partial: bool,
}

/// Order of the pairs that a rotation turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum PairOrder {
    Adjacent,
    Half,
}

impl PairOrder {
    /// As the reference has it.
    pub fn pairing(self) -> Pairing {
        match self {
            PairOrder::Adjacent => Pairing::Adjacent,
            PairOrder::Half => Pairing::Half,
        }
    }
}

impl Map {
    /// The convention: the map's, or what fits the backend.
    pub fn convention(&self) -> Convention {
        let backend = self.engine.backend.to_ascii_lowercase();
        let by_backend = match backend.as_str() {
            b if b.starts_with("vllm") => Convention::Vllm,
            b if b.starts_with("sglang") => Convention::Sglang,
            b if b.starts_with("llama") => Convention::LlamaCpp,
            _ => Convention::Hf,
        };
        self.convention.filter(|c| *c != Convention::Auto).unwrap_or(by_backend)
    }

    /// All arrays that it names.
    pub fn arrays(&self) -> Vec<&str> {
        fn of(n: &Numbers) -> Option<&str> {
            match n {
                Numbers::Array(name) => Some(name),
                Numbers::Given(_) => None,
            }
        }
        let mut all: Vec<&str> = self.positions.iter().filter_map(of).collect();
        if let Requests::Arrays { keys, new } = &self.requests {
            all.extend([keys.as_str(), new.as_str()]);
        }
        let entries = self.stages.iter().map(|(_, e)| e).chain(self.weights.iter().map(|(_, e)| e));
        for e in entries.flat_map(|e| std::iter::once(e).chain(&e.parts)) {
            all.extend(e.block_table.as_deref());
            all.extend(e.slots.iter().filter_map(of));
            all.extend((!e.name.is_empty()).then_some(e.name.as_str()));
        }
        all
    }
}
