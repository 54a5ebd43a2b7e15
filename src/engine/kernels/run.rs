/*!
The stages in the order of the table: which kernel computes what from which memory.

Every tensor is read back and goes through the sink before anything reads it, and its memory is given back when nothing
will read it again.
*/

mod attention;
mod cache;
mod passes;
mod simple;
mod stacked;

use super::machine::{Held, Machine, broke};
use super::weights;
use super::work::Layout;
use crate::case::Case;
use crate::device::{Arg, Device};
use crate::engine::cpu::elementwise::temperature;
use crate::engine::stack::{QkvA, Slot};
use crate::engine::{EngineError, Sink};
use crate::model::Layer;
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::{Contract, Form, Geometry, Plan, Stage, Weight};
use stacked::Lying;
use std::collections::BTreeMap;

/// One run of one plan.
pub struct Run<'a, 'm, D: Device> {
    machine: &'a mut Machine<'m, D>,
    contract: Contract,
    layer: &'a Layer<'a>,
    case: &'a Case,
    /// Number of the pool's first page.
    first_page: usize,
    weights: BTreeMap<Weight, Held>,
    /// q_a and kv_a in one, where they are stacked.
    stack: Option<(Held, [Slot; 2])>,
    /// 0, 1, 2, …: the rows of an operand that is not gathered.
    identity: Held,
    /// Positions' cosines, sines, and factors of temperature, float32, by token.
    tables: [Held; 3],
}

/// What forms read.
struct Shared {
    q: Held,
    /// The pool of each pass: they differ where nobody wrote.
    cache: Vec<Held>,
}

impl<'a, 'm, D: Device> Run<'a, 'm, D> {
    /// Uploads what stages share; weights are shown to the sink.
    pub fn new(
        machine: &'a mut Machine<'m, D>,
        (contract, qkv_a, first_page): (Contract, QkvA, usize),
        layer: &'a Layer<'a>,
        case: &'a Case,
        sink: &mut dyn Sink,
    ) -> Result<Run<'a, 'm, D>, EngineError> {
        let (g, plan) = (&layer.spec.geometry, &case.plan);
        let weights::Uploaded { alone: weights, stack } =
            weights::upload(machine, layer, (contract.weights, qkv_a), sink)?;
        let most = plan.tokens().max(plan.rows(Stage::Out, None));
        let identity = machine.upload_words(0..most as u32, "row numbers")?;
        let (mut cosines, mut sines, mut factors) = (Vec::new(), Vec::new(), Vec::new());
        for &position in &plan.positions {
            let rope = &layer.spec.rope;
            for angle in rope.inv_freq.iter().map(|f| position as f64 * f) {
                cosines.push(((libm::cos(angle) * rope.magnitude) as f32).to_bits());
                sines.push(((libm::sin(angle) * rope.magnitude) as f32).to_bits());
            }
            let factor = layer.spec.temperature.map_or(1.0, |f| temperature(&f, position));
            factors.push(factor.to_bits());
        }
        let tables = [
            machine.upload_words(cosines, "cosines")?,
            machine.upload_words(sines, "sines")?,
            machine.upload_words(factors, "temperature factors")?,
        ];
        debug_assert_eq!(tables[0].bytes, plan.tokens() * g.rope * 2);
        Ok(Run { machine, contract, layer, case, first_page, weights, stack, identity, tables })
    }

    fn geometry(&self) -> &'a Geometry {
        &self.layer.spec.geometry
    }

    fn plan(&self) -> &'a Plan {
        &self.case.plan
    }

    /// Where the plan's slots begin in the pool.
    fn first_slot(&self) -> usize {
        self.first_page * self.plan().page_size
    }

    fn stored(&self, stage: Stage) -> DType {
        self.contract.stored(stage)
    }

    fn weight(&self, weight: Weight) -> Result<Held, EngineError> {
        self.weights.get(&weight).copied().ok_or_else(|| broke(format!("{weight} was not uploaded")))
    }

    /// Shared stages, then form after form.
    pub fn all(mut self, forms: &[Form], sink: &mut dyn Sink) -> Result<(), EngineError> {
        let shared = self.shared(sink)?;
        let served = forms.iter().filter(|f| self.case.plan.has_form(**f));
        served.clone().try_for_each(|form| self.form(*form, &shared, sink))
    }

    /// All stages up to the cache.
    fn shared(&mut self, sink: &mut dyn Sink) -> Result<Shared, EngineError> {
        let (g, spec) = (self.geometry(), &self.layer.spec);
        let id = TensorId::shared;
        let hidden = self.hidden(sink)?;
        let attn = (Weight::GAttn, spec.eps_attn);
        let attn_in = self.norm(sink, Stage::AttnIn, Lying::alone(hidden, g.hidden), g.hidden, attn)?;
        self.machine.free(hidden)?;
        let mut stack = self.stacked(sink, attn_in)?;
        let q_raw = if g.q_rank > 0 {
            let q_a = self.down(sink, (Stage::QA, Weight::WQA), attn_in, &mut stack)?;
            let latent = (Weight::GQ, spec.eps_latent);
            let normed = self.norm(sink, Stage::QANormed, q_a, g.q_rank, latent)?;
            self.leave(q_a)?;
            let q_raw = self.plain(sink, id(Stage::QRaw), normed, Weight::WQB)?;
            self.machine.free(normed)?;
            q_raw
        } else {
            self.plain(sink, id(Stage::QRaw), attn_in, Weight::WQ)?
        };
        let raw = Lying::alone(q_raw, g.heads * g.key());
        let q = self.rope(sink, Stage::Q, raw, (g.heads, g.nope), 0)?;
        self.machine.free(q_raw)?;
        let kv_a = self.down(sink, (Stage::KvA, Weight::WKvA), attn_in, &mut stack)?;
        self.machine.free(attn_in)?;
        let latent = (Weight::GKv, spec.eps_latent);
        let latent = self.norm(sink, Stage::KvCNormed, kv_a, g.latent, latent)?;
        let k_pe = self.rope(sink, Stage::KPe, kv_a, (1, 0), g.latent)?;
        self.leave(kv_a)?;
        if let Some(stack) = stack {
            self.machine.free(stack.held)?;
        }
        let cache = self.cache(sink, latent, k_pe)?;
        self.machine.free(latent)?;
        self.machine.free(k_pe)?;
        Ok(Shared { q, cache })
    }

    fn hidden(&mut self, sink: &mut dyn Sink) -> Result<Held, EngineError> {
        let id = TensorId::shared(Stage::Hidden);
        let mut hidden = Tensor::zeros(id, self.plan(), self.geometry(), self.stored(Stage::Hidden));
        for (i, row) in self.case.given.hidden.rows().into_iter().enumerate() {
            hidden.write(i, 0, &row.to_vec());
        }
        let held = self.machine.upload(&hidden.bytes, "hidden")?;
        self.hand(sink, id, (hidden, held))
    }

    /// Everything after the cache.
    fn form(&mut self, form: Form, shared: &Shared, sink: &mut dyn Sink) -> Result<(), EngineError> {
        let id = |stage| TensorId::of(stage, form);
        let g = self.geometry();
        let attn_out = match form {
            Form::Fused => {
                let keys = self.plan().key_rows();
                let first = self.first_slot();
                let slots = keys.flat_map(|(_, s, _)| s.slots.iter().map(|s| (first + s) as u32));
                let slots = self.machine.upload_words(slots, "slots of keys")?;
                let k = self.keys(sink, shared, slots)?;
                let v = self.values(sink, shared, slots)?;
                self.machine.free(slots)?;
                let mut keys = vec![0; self.plan().sequences.len()];
                self.plan().key_rows().for_each(|(i, _, r)| keys[i] = r.start);
                let layout = Layout { form, per_token: 1, keys };
                let out = self.attention(sink, form, &layout, "fused.cu", &|_| {
                    vec![Arg::In(shared.q.buffer), Arg::In(k.buffer), Arg::In(v.buffer)]
                })?;
                self.machine.free(k)?;
                self.machine.free(v)?;
                out
            }
            Form::Absorbed => {
                let q_latent = self.by_head(sink, id(Stage::QLatent), shared.q, g.key(), Weight::WUk)?;
                let pages = self.pages()?;
                let layout = Layout { form, per_token: g.heads, keys: pages.begin.clone() };
                let o_latent = self.attention(sink, form, &layout, "absorbed.cu", &|pass| {
                    vec![
                        Arg::In(q_latent.buffer),
                        Arg::In(shared.q.buffer),
                        Arg::In(shared.cache[pass].buffer),
                        Arg::In(pages.tables[pass].buffer),
                    ]
                })?;
                self.machine.free(q_latent)?;
                for t in pages.tables {
                    self.machine.free(t)?;
                }
                let out = self.by_head(sink, id(Stage::AttnOut), o_latent, g.latent, Weight::WUv)?;
                self.machine.free(o_latent)?;
                out
            }
        };
        let out = self.plain(sink, id(Stage::Out), attn_out, Weight::WO)?;
        self.machine.free(attn_out)?;
        self.machine.free(out)
    }
}
