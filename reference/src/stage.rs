/*!
The one table of stages: which tensors an MLA attention layer has, in which order, from what.

Engines, judge, reports, snapshots and docs read [`STAGES`] and [`WEIGHTS`]; nothing else knows the order,
the names or the inputs. A new stage is one row here and one function in the reference.

Letters: D hidden, H heads, R query rank (0: none), L latent, P rope, N nope, V value.
*/

use crate::geometry::Geometry;
use serde::{Deserialize, Serialize};

/// What an axis of a tensor counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Axis {
    Token,
    Key,
    Page,
    Slot,
    Split,
    Rank,
    Head,
    Hidden,
    QRank,
    Latent,
    Nope,
    Rope,
    Value,
    #[serde(rename = "nope+rope")]
    NopeRope,
    #[serde(rename = "latent+rope")]
    LatentRope,
}

impl Axis {
    /// The name as reports print it.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Token => "token",
            Axis::Key => "key",
            Axis::Page => "page",
            Axis::Slot => "slot",
            Axis::Split => "split",
            Axis::Rank => "rank",
            Axis::Head => "head",
            Axis::Hidden => "hidden",
            Axis::QRank => "q_rank",
            Axis::Latent => "latent",
            Axis::Nope => "nope",
            Axis::Rope => "rope",
            Axis::Value => "value",
            Axis::NopeRope => "nope+rope",
            Axis::LatentRope => "latent+rope",
        }
    }

    /// Length, where the geometry alone decides it (None: token, key, page, slot, split, rank).
    pub const fn len(self, g: &Geometry) -> Option<usize> {
        Some(match self {
            Axis::Token | Axis::Key | Axis::Page | Axis::Slot | Axis::Split | Axis::Rank => return None,
            Axis::Head => g.heads,
            Axis::Hidden => g.hidden,
            Axis::QRank => g.q_rank,
            Axis::Latent => g.latent,
            Axis::Nope => g.nope,
            Axis::Rope => g.rope,
            Axis::Value => g.value,
            Axis::NopeRope => g.nope + g.rope,
            Axis::LatentRope => g.latent + g.rope,
        })
    }
}

/// How attention is computed. Both forms serve both phases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// kv_b decompresses the latent: every head has its own keys and values.
    Fused,
    /// W_UK is folded into the query; multi-query attention over the latent cache; W_UV after.
    Absorbed,
}

impl Form {
    /// Both, in the order in which reports list them.
    pub const ALL: [Form; 2] = [Form::Fused, Form::Absorbed];
    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Form::Fused => "fused",
            Form::Absorbed => "absorbed",
        }
    }
}

/// A request is a decode step (one new token) or a prefill (more).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Phase {
    Prefill,
    Decode,
}

impl Phase {
    /// Both, in the order in which reports list them.
    pub const ALL: [Phase; 2] = [Phase::Prefill, Phase::Decode];
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
        }
    }
}

macro_rules! names {
    ($(#[$doc:meta])* $ty:ident { $($variant:ident = $name:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[allow(missing_docs)]
        pub enum $ty { $(#[serde(rename = $name)] $variant,)* }
        impl $ty {
            /// All, in table order.
            pub const ALL: &'static [$ty] = &[$($ty::$variant,)*];
            /// The name used everywhere: reports, files, options.
            pub const fn name(self) -> &'static str {
                match self { $($ty::$variant => $name,)* }
            }
            /// The one with this name.
            pub fn from_name(name: &str) -> Option<$ty> {
                Self::ALL.iter().copied().find(|s| s.name() == name)
            }
        }
        impl std::fmt::Display for $ty {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.pad(self.name()) }
        }
    };
}

names! {
    /// A tensor of activations.
    Stage {
        Hidden = "hidden", AttnIn = "attn_in", QA = "q_a", QANormed = "q_a_normed", QRaw = "q_raw", Q = "q",
        KvA = "kv_a", KvCNormed = "kv_c_normed", KPe = "k_pe", Cache = "cache", K = "k", V = "v",
        QLatent = "q_latent", PartO = "part_o", PartLse = "part_lse", OLatent = "o_latent", Lse = "lse",
        AttnOut = "attn_out", PartOut = "part_out", Out = "out",
    }
}

names! {
    /// A tensor of weights.
    Weight {
        GAttn = "g_attn", WQA = "w_q_a", GQ = "g_q", WQB = "w_q_b", WQ = "w_q", WKvA = "w_kv_a", GKv = "g_kv",
        WUk = "w_uk", WUv = "w_uv", WO = "w_o",
    }
}

/// Where a stage exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Computed once, whatever the form.
    Shared,
    /// Computed by this form only.
    Only(Form),
    /// Computed by each form on its own way.
    Each,
}

/// One row of the table of activations.
#[derive(Debug)]
pub struct StageRow {
    /// Which.
    pub stage: Stage,
    /// Axes, slowest first. `token` means rows of new tokens; from the attention on, rows of sequences.
    pub axes: &'static [Axis],
    /// The formula as DESIGN section 2 has it.
    pub formula: &'static str,
    /// Which forms have it.
    pub scope: Scope,
    /// Inputs in the fused form (and of shared stages).
    pub fused: &'static [Stage],
    /// Inputs in the absorbed form.
    pub absorbed: &'static [Stage],
    /// Where its keys are split the stage is the merge of part_o and part_lse instead; under tensor parallelism `out` is the
    /// sum of part_out.
    pub merges: bool,
    /// Weights it reads.
    pub weights: &'static [Weight],
}

use Axis::*;
use Scope::*;

const fn row(
    stage: Stage,
    axes: &'static [Axis],
    formula: &'static str,
    scope: Scope,
    inputs: [&'static [Stage]; 2],
    weights: &'static [Weight],
) -> StageRow {
    StageRow { stage, axes, formula, scope, fused: inputs[0], absorbed: inputs[1], merges: false, weights }
}

const fn merging(r: StageRow) -> StageRow {
    StageRow { merges: true, ..r }
}

const fn one(i: &'static [Stage]) -> [&'static [Stage]; 2] {
    [i, i]
}

const QKV: [&[Stage]; 2] = [&[Stage::Q, Stage::K, Stage::V], &[Stage::Q, Stage::QLatent, Stage::Cache]];

/// Activations in the order in which they are judged.
pub static STAGES: &[StageRow] = &[
    row(Stage::Hidden, &[Token, Hidden], "given", Shared, one(&[]), &[]),
    row(
        Stage::AttnIn,
        &[Token, Hidden],
        "RMSNorm(hidden) · g_attn",
        Shared,
        one(&[Stage::Hidden]),
        &[Weight::GAttn],
    ),
    row(Stage::QA, &[Token, QRank], "attn_in · w_q_aᵀ", Shared, one(&[Stage::AttnIn]), &[Weight::WQA]),
    row(Stage::QANormed, &[Token, QRank], "RMSNorm(q_a) · g_q", Shared, one(&[Stage::QA]), &[Weight::GQ]),
    // Where R = 0 the input is attn_in and the weight w_q: `inputs` and `weights` below know.
    row(
        Stage::QRaw,
        &[Token, Head, NopeRope],
        "q_a_normed · w_q_bᵀ, or attn_in · w_qᵀ",
        Shared,
        one(&[Stage::QANormed]),
        &[Weight::WQB],
    ),
    row(
        Stage::Q,
        &[Token, Head, NopeRope],
        "q_raw, rope columns rotated by position",
        Shared,
        one(&[Stage::QRaw]),
        &[],
    ),
    row(
        Stage::KvA,
        &[Token, LatentRope],
        "attn_in · w_kv_aᵀ",
        Shared,
        one(&[Stage::AttnIn]),
        &[Weight::WKvA],
    ),
    row(
        Stage::KvCNormed,
        &[Token, Latent],
        "RMSNorm(kv_a[:L]) · g_kv",
        Shared,
        one(&[Stage::KvA]),
        &[Weight::GKv],
    ),
    row(Stage::KPe, &[Token, Rope], "kv_a[L:] rotated by position", Shared, one(&[Stage::KvA]), &[]),
    row(
        Stage::Cache,
        &[Page, Slot, LatentRope],
        "(kv_c_normed, k_pe) of each token at its slot; context rows given",
        Shared,
        one(&[Stage::KvCNormed, Stage::KPe]),
        &[],
    ),
    row(
        Stage::K,
        &[Key, Head, NopeRope],
        "(cache[:L] · w_uk(h), cache[L:])",
        Only(Form::Fused),
        one(&[Stage::Cache]),
        &[Weight::WUk],
    ),
    row(
        Stage::V,
        &[Key, Head, Value],
        "cache[:L] · w_uv(h)ᵀ",
        Only(Form::Fused),
        one(&[Stage::Cache]),
        &[Weight::WUv],
    ),
    row(
        Stage::QLatent,
        &[Token, Head, Latent],
        "q[:N] · w_uk(h)ᵀ",
        Only(Form::Absorbed),
        one(&[Stage::Q]),
        &[Weight::WUk],
    ),
    row(Stage::PartO, &[Split, Token, Head, Value], "attention over one split of the keys", Each, QKV, &[]),
    row(Stage::PartLse, &[Split, Token, Head], "ln Σ exp(scale · q·k) over one split", Each, QKV, &[]),
    merging(row(
        Stage::OLatent,
        &[Token, Head, Latent],
        "softmax(scale · (q_latent, q_pe) · cacheᵀ) · cache[:L]",
        Only(Form::Absorbed),
        QKV,
        &[],
    )),
    merging(row(Stage::Lse, &[Token, Head], "ln Σ exp(scale · q·k)", Each, QKV, &[])),
    // Absorbed: w_uv of o_latent, never a merge; `inputs` and `weights` below know.
    merging(row(
        Stage::AttnOut,
        &[Token, Head, Value],
        "softmax(scale · q·kᵀ) · v, or o_latent · w_uv(h)ᵀ",
        Each,
        [QKV[0], &[Stage::OLatent]],
        &[],
    )),
    row(
        Stage::PartOut,
        &[Rank, Token, Hidden],
        "Σ over a rank's heads attn_out(h) · w_o(h)ᵀ",
        Each,
        one(&[Stage::AttnOut]),
        &[Weight::WO],
    ),
    merging(row(
        Stage::Out,
        &[Token, Hidden],
        "Σ_h attn_out(h) · w_o(h)ᵀ, or Σ over ranks part_out",
        Each,
        one(&[Stage::AttnOut]),
        &[Weight::WO],
    )),
];

/// One row of the table of weights.
#[derive(Debug)]
pub struct WeightRow {
    /// Which.
    pub weight: Weight,
    /// Axes, slowest first; the last one is the one that products sum over.
    pub axes: &'static [Axis],
    /// Name of the tensor in a GGUF file, after `blk.N.`; w_uk and w_uv may come out of `attn_kv_b` too.
    pub gguf: &'static str,
    /// Name of the module in a Hugging Face checkpoint, after `model.layers.N.`.
    pub hf: &'static str,
}

const fn weight(weight: Weight, axes: &'static [Axis], gguf: &'static str, hf: &'static str) -> WeightRow {
    WeightRow { weight, axes, gguf, hf }
}

/// Weights in the order in which they are judged.
pub static WEIGHTS: &[WeightRow] = &[
    weight(Weight::GAttn, &[Hidden], "attn_norm.weight", "input_layernorm.weight"),
    weight(Weight::WQA, &[QRank, Hidden], "attn_q_a.weight", "self_attn.q_a_proj.weight"),
    weight(Weight::GQ, &[QRank], "attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"),
    weight(Weight::WQB, &[Head, NopeRope, QRank], "attn_q_b.weight", "self_attn.q_b_proj.weight"),
    weight(Weight::WQ, &[Head, NopeRope, Hidden], "attn_q.weight", "self_attn.q_proj.weight"),
    weight(
        Weight::WKvA,
        &[LatentRope, Hidden],
        "attn_kv_a_mqa.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
    ),
    weight(Weight::GKv, &[Latent], "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"),
    weight(
        Weight::WUk,
        &[Head, Latent, Nope],
        "attn_k_b.weight",
        "self_attn.kv_b_proj.weight (key rows, transposed)",
    ),
    weight(Weight::WUv, &[Head, Value, Latent], "attn_v_b.weight", "self_attn.kv_b_proj.weight (value rows)"),
    weight(Weight::WO, &[Hidden, Head, Value], "attn_output.weight", "self_attn.o_proj.weight"),
];

impl Stage {
    /// Its row of the table.
    pub fn row(self) -> &'static StageRow {
        &STAGES[self as usize]
    }

    /// Whether a layer of this geometry has it at all (`q_a` needs a query rank).
    pub const fn exists(self, g: &Geometry) -> bool {
        !matches!(self, Stage::QA | Stage::QANormed) || g.q_rank > 0
    }

    /// Axes in this form: partial outputs of the absorbed form are `latent` wide.
    pub fn axes(self, form: Option<Form>) -> Vec<Axis> {
        let mut axes = self.row().axes.to_vec();
        if self == Stage::PartO && form == Some(Form::Absorbed) {
            axes[3] = Axis::Latent;
        }
        axes
    }

    /// What it is computed from. `form`: None for shared stages; `joined`: put together from parts, of the keys or of ranks
    /// ([`Plan::joins`](crate::Plan::joins)).
    pub fn inputs(self, g: &Geometry, form: Option<Form>, joined: bool) -> &'static [Stage] {
        let row = self.row();
        if self == Stage::QRaw && g.q_rank == 0 {
            return &[Stage::AttnIn];
        }
        let absorbed = form == Some(Form::Absorbed);
        if joined && self == Stage::Out {
            return &[Stage::PartOut];
        }
        if joined && row.merges && !(self == Stage::AttnOut && absorbed) {
            return &[Stage::PartO, Stage::PartLse];
        }
        if absorbed { row.absorbed } else { row.fused }
    }

    /// Weights that it reads.
    pub fn weights(self, g: &Geometry, form: Option<Form>) -> &'static [Weight] {
        match self {
            Stage::QRaw if g.q_rank == 0 => &[Weight::WQ],
            Stage::AttnOut if form == Some(Form::Absorbed) => &[Weight::WUv],
            _ => self.row().weights,
        }
    }

    /// Whether a form computes it.
    pub fn in_form(self, form: Form) -> bool {
        match self.row().scope {
            Scope::Shared | Scope::Each => true,
            Scope::Only(f) => f == form,
        }
    }
}

impl Weight {
    /// Its row of the table.
    pub fn row(self) -> &'static WeightRow {
        &WEIGHTS[self as usize]
    }

    /// Whether a layer of this geometry has it.
    pub const fn exists(self, g: &Geometry) -> bool {
        match self {
            Weight::WQA | Weight::GQ | Weight::WQB => g.q_rank > 0,
            Weight::WQ => g.q_rank == 0,
            _ => true,
        }
    }

    /// Whether it is a norm's vector.
    pub const fn is_norm(self) -> bool {
        matches!(self, Weight::GAttn | Weight::GQ | Weight::GKv)
    }

    /// Lengths of its axes.
    pub fn shape(self, g: &Geometry) -> Vec<usize> {
        self.row().axes.iter().filter_map(|a| a.len(g)).collect()
    }

    /// As a matrix of rows that products read: (rows, columns); a norm is one row.
    pub fn matrix(self, g: &Geometry) -> (usize, usize) {
        let shape = self.shape(g);
        match self {
            Weight::WO => (g.hidden, g.heads * g.value),
            _ => {
                let cols = shape.last().copied().unwrap_or(1);
                (shape.iter().rev().skip(1).product(), cols)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_in_the_order_of_their_enums() {
        for (i, r) in STAGES.iter().enumerate() {
            assert_eq!(r.stage as usize, i);
        }
        for (i, r) in WEIGHTS.iter().enumerate() {
            assert_eq!(r.weight as usize, i);
        }
        assert_eq!(STAGES.len(), Stage::ALL.len());
        assert_eq!(WEIGHTS.len(), Weight::ALL.len());
    }

    #[test]
    fn inputs_come_before_their_stage() {
        for q_rank in [0, 8] {
            let g = Geometry { hidden: 4, heads: 2, q_rank, latent: 8, rope: 2, nope: 4, value: 4 };
            for form in Form::ALL {
                for split in [false, true] {
                    for s in Stage::ALL.iter().filter(|s| s.exists(&g) && s.in_form(form)) {
                        for i in s.inputs(&g, Some(form), split) {
                            assert!(i < s && i.exists(&g), "{i} feeds {s}");
                            assert!(i.in_form(form), "{i} feeds {s} in {form:?}");
                        }
                        assert!(s.weights(&g, Some(form)).iter().all(|w| w.exists(&g)));
                    }
                }
            }
        }
    }
}
