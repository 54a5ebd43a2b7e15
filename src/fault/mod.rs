/*!
Deliberate faults: one thing altered on purpose, from outside the engine.

`NAME[=SIZE][@TENSOR]`. A fault is a transform of the layer that the engine is given, of a tensor that it
hands over (it goes on from the altered bits), a [seam](Seams) of the CPU engine, or a [`text`] of a kernel before it
is compiled. The declared contract and scalars
stay what they were: the judge has to find the rest. Reports of such runs say DELIBERATE FAULT.
*/

mod apply;
pub mod catalogue;
mod damage;
mod parse;
mod spoil;
mod stack;
pub mod text;
mod words;
mod written;

pub use apply::{Alter, FaultyWeights};
pub use damage::Damage;
pub use parse::{FaultError, names};
pub use spoil::Spoil;

use crate::case::Case;
use crate::engine::Engine;
use crate::engine::cpu::slips::Turning;
use crate::engine::cpu::{Gain, Seams};
use crate::engine::kernels::edit::Edit;
use crate::trace::TensorId;
use mla_reference::{Plan, Spec, Stage, Weight};
use std::borrow::Cow;
use text::Mutation;

/// Head that a gain of one head acts on, or the last one where there are fewer: a wrong index may still get head 0
/// right.
const HEAD: usize = 1;

/// Where faults inside kernels can be planted.
pub const KERNELS: &str = "pass --engine ptx (no GPU needed) or --engine cuda";

/// What is altered.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// One element of a weight, by so many rms.
    WeightElement(Weight),
    /// One element of a tensor, by so many rms.
    Element(Stage),
    /// The softmax scale, by this factor.
    SoftmaxScale(f64),
    /// All elements of a tensor, by this factor.
    OutputGain(f64),
    /// Head 1 (or the only one) of a tensor, by this factor.
    HeadGain(f64),
    /// eps of the norms, by this factor.
    Eps(f64),
    /// Positions of q (or k_pe), by this many.
    RopeOffset(f64),
    /// Two heads of a tensor exchanged.
    SwapHeads(usize, usize),
    /// A key position left out of attention.
    DropToken(usize),
    /// A page of the page table leads to another request's when keys are gathered.
    ForeignPage(usize),
    /// Partial results merged with exp of base-2 logarithms.
    MergeBase,
    /// The running maximum grows, the sums are not rescaled.
    NoRescale,
    /// The stage after attention reads another buffer than attention wrote.
    PhantomOutput,
    /// The last row of a tensor is never written.
    SkippedRow,
    /// Under tensor parallelism every rank holds rank 0's shard: of a weight, or of all that are sharded.
    ShardZero(Option<Weight>),
    /// Under tensor parallelism a rank's part is not in the sum.
    LostRank(usize),
    /// The stack of q_a and kv_a is laid in the order in which a GGUF file stores them, and read by the declared slots.
    SlotsPermuted,
    /// The stack of q_a and kv_a is cut in two equal chunks: kv_a is read from its middle on, beginning anew at its end.
    EqualChunks,
    /// A text of a kernel file is another one, before it is compiled.
    Kernel(&'static Mutation),
    /// The stack of q_a and kv_a is cut so many rows late: kv_a is read from there on.
    CutAt(usize),
    /// A weight, or w_uk and w_uv (None), as a whole.
    Spoil(Spoil, Option<Weight>),
    /// A tensor, as it is handed over.
    Damage(Damage),
    /// q or k_pe, or both, rotated otherwise.
    Turned(Turning),
    /// Positions, counted otherwise.
    Counted(Counted),
    /// Something inside the engine: its seams.
    Inside(Seams),
}

/// How positions are counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Counted {
    /// Over the new tokens alone.
    Within,
    /// Over the whole batch.
    Batch,
    /// Not at all.
    Zero,
    /// None above this: the last row of a table that is too short.
    Upto(u64),
}

/// A deliberate fault.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// As it was asked for.
    pub text: String,
    /// What.
    pub kind: Kind,
    /// Tensor that it acts on, where it acts on one.
    pub stage: Option<Stage>,
    /// Size of an element's change, in rms of the tensor.
    pub size: f64,
    /// Draws the element.
    pub seed: u64,
}

impl Fault {
    /// The scalars that the engine computes with.
    pub fn spec(&self, spec: &Spec) -> Spec {
        let mut s = spec.clone();
        match self.kind {
            Kind::SoftmaxScale(f) => s.scale *= f,
            Kind::Eps(f) => {
                let all = self.stage.is_none();
                if all || self.stage == Some(Stage::AttnIn) {
                    s.eps_attn *= f;
                }
                if all || self.stage != Some(Stage::AttnIn) {
                    s.eps_latent *= f;
                }
            }
            Kind::Turned(t) if self.stage.is_none() => s.rope = t.rope(&s.rope),
            _ => {}
        }
        s
    }

    /// The case that the engine runs.
    pub fn case<'c>(&self, case: &'c Case) -> Cow<'c, Case> {
        let Kind::Counted(counted) = self.kind else { return Cow::Borrowed(case) };
        let mut plan: Plan = case.plan.clone();
        let names = plan.names(Stage::Q, None);
        for (i, p) in plan.positions.iter_mut().enumerate() {
            *p = match counted {
                Counted::Within => names[i].index as u64,
                Counted::Batch => i as u64,
                Counted::Zero => 0,
                Counted::Upto(most) => (*p).min(most),
            };
        }
        Cow::Owned(Case { plan, ..case.clone() })
    }

    /// The CPU engine's seams. Gains and offsets of a stage that the engine computes act before it rounds; of a
    /// copy, and in an engine without seams, the stored tensor is altered.
    pub fn seams(&self) -> Seams {
        let gain = |head, factor| {
            let stage = self.stage.filter(|s| Gain::has_seam(*s))?;
            Some(Gain { stage, head, factor })
        };
        let mut seams = Seams::default();
        match self.kind {
            Kind::MergeBase => seams.merge_base_e = true,
            Kind::NoRescale => seams.no_rescale = true,
            Kind::DropToken(s) => seams.skip_key = Some(s),
            Kind::ForeignPage(p) => seams.foreign_page = Some(p),
            Kind::OutputGain(f) => seams.gain = gain(None, f),
            Kind::HeadGain(f) => seams.gain = gain(Some(HEAD), f),
            Kind::RopeOffset(n) => seams.rope_offset = self.stage.map(|s| (s, n)),
            Kind::Turned(t) => seams.turning = self.stage.map(|s| (s, t)),
            Kind::Inside(own) => seams = own,
            _ => {}
        }
        seams
    }

    /// Whether it is a fault of the stack of q_a and kv_a, so that there must be one.
    pub fn stacks(&self) -> bool {
        matches!(self.kind, Kind::SlotsPermuted | Kind::EqualChunks | Kind::CutAt(_))
    }

    /// What is to be done to kernel files before they are compiled.
    pub fn edit(&self) -> Option<Edit> {
        match self.kind {
            Kind::Kernel(mutation) => Some(mutation.edit()),
            _ => None,
        }
    }

    /// Fails where a fault inside a kernel had no part in a run: a clean report under its name would be a lie.
    pub fn took_part(&self, engine: &dyn Engine) -> Result<(), FaultError> {
        let Kind::Kernel(m) = self.kind else { return Ok(()) };
        let nowhere = |what: String, mend: String| Err(FaultError::Nowhere(what, self.text.clone(), mend));
        let s = &m.shows;
        match engine.launched(m.kernel, m.entries) {
            Some(true) => Ok(()),
            Some(false) => nowhere(
                format!("no kernel that holds this text of {} ran", m.kernel),
                match s.stored {
                    Some(ty) => format!("choose a layer with weights of type {ty}"),
                    None => format!(
                        "pass --form {} --batch {} --splits {}, which make it act",
                        s.form.name(),
                        s.batch,
                        s.splits
                    ),
                },
            ),
            None => nowhere("this engine runs no kernel files".into(), KERNELS.into()),
        }
    }

    /// Whether it is a fault of tensor parallelism, so that there must be ranks.
    pub fn needs_ranks(&self) -> bool {
        matches!(self.kind, Kind::ShardZero(_) | Kind::LostRank(_)) || self.stage == Some(Stage::PartOut)
    }

    /// Whether it acts on a rank of tensor parallelism: what is altered in one place is altered on one rank, drawn by seed;
    /// all else on all of them.
    pub fn on_rank(&self, rank: usize, of: usize) -> bool {
        let one =
            matches!(self.kind, Kind::Element(_) | Kind::SkippedRow | Kind::SwapHeads(..) | Kind::Damage(_));
        !one || self.seed % of.max(1) as u64 == rank as u64
    }

    /// Whether it acts on what ranks make together: a part of `out` among the others, or the sum.
    pub fn on_sum(&self, seams: Option<&Seams>) -> bool {
        match self.stage {
            Some(Stage::PartOut) => true,
            Some(Stage::Out) => !self.inside(seams),
            _ => false,
        }
    }

    /// Whether an engine with these seams carries it out itself.
    fn inside(&self, seams: Option<&Seams>) -> bool {
        let wanted = self.seams();
        wanted != Seams::default() && seams == Some(&wanted)
    }

    /// Whether only an engine with seams can carry the fault out.
    pub fn needs_seams(&self) -> bool {
        match self.kind {
            Kind::Turned(t) => self.stage.is_some() || t == Turning::Twice,
            Kind::MergeBase | Kind::NoRescale | Kind::DropToken(_) | Kind::ForeignPage(_) => true,
            Kind::Inside(_) => true,
            _ => false,
        }
    }

    /// Whether the fault alters this tensor when it is handed over.
    fn hits(&self, id: TensorId) -> bool {
        self.stage == Some(id.stage)
    }
}
