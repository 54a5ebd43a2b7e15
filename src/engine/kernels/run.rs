/*!
The stages in the order of the table: which kernel computes what from which memory.

Every tensor is read back and goes through the sink before anything reads it, and its memory is given back when nothing
will read it again.
*/

use super::machine::{Held, Machine, broke, poison};
use super::weights;
use super::work::{self, Item, Layout};
use crate::case::Case;
use crate::device::{Arg, Device, Problem};
use crate::engine::cpu::elementwise::temperature;
use crate::engine::{EngineError, Sink};
use crate::model::Layer;
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::{Contract, Form, Geometry, Pairing, Phase, Plan, Stage, Weight};
use std::collections::BTreeMap;
use std::f64::consts::LOG2_E;

/// Guards that are told of at a time: buffers of a run, twice.
const MOST_GUARDS: usize = 64;

/// One run of one plan.
pub struct Run<'a, 'm, D: Device> {
    machine: &'a mut Machine<'m, D>,
    contract: Contract,
    layer: &'a Layer<'a>,
    case: &'a Case,
    weights: BTreeMap<Weight, Held>,
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

/// The page tables of all sequences, for each pass: entries behind a table's end differ.
struct Pages {
    tables: Vec<Held>,
    begin: Vec<usize>,
}

/// A product: c[i][j] of each head = Σ a[rows[i]] · b[j].
struct Product {
    weight: Weight,
    /// Rows, columns and terms of a head.
    m: usize,
    n: usize,
    k: usize,
    heads: usize,
    /// Elements between rows, and between heads.
    a: (usize, usize),
    b: usize,
    c: (usize, usize),
    /// Rows of the weight are terms.
    transposed: bool,
}

impl<'a, 'm, D: Device> Run<'a, 'm, D> {
    /// Uploads what stages share; weights are shown to the sink.
    pub fn new(
        machine: &'a mut Machine<'m, D>,
        contract: Contract,
        layer: &'a Layer<'a>,
        case: &'a Case,
        sink: &mut dyn Sink,
    ) -> Result<Run<'a, 'm, D>, EngineError> {
        let (g, plan) = (&layer.spec.geometry, &case.plan);
        let weights = weights::upload(machine, layer, contract.weights, sink)?;
        let most = plan.tokens().max(plan.rows(Stage::Out));
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
        Ok(Run { machine, contract, layer, case, weights, identity, tables })
    }

    fn geometry(&self) -> &'a Geometry {
        &self.layer.spec.geometry
    }

    fn plan(&self) -> &'a Plan {
        &self.case.plan
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
        forms.iter().try_for_each(|form| self.form(*form, &shared, sink))
    }

    /// Computes tensors with some launches, as often as the device asks for; says what was wrong with the outputs.
    fn compute(
        &mut self,
        sink: &mut dyn Sink,
        ids: &[TensorId],
        mut launches: impl FnMut(&mut Self, usize, &[Held]) -> Result<(), EngineError>,
    ) -> Result<Vec<(Tensor, Held)>, EngineError> {
        let mut out = Vec::new();
        for id in ids {
            let tensor = Tensor::zeros(*id, self.plan(), self.geometry(), self.stored(id.stage));
            let held = self.machine.allocate(tensor.bytes.len(), id.stage.name())?;
            out.push((tensor, held));
        }
        let buffers: Vec<Held> = out.iter().map(|o| o.1).collect();
        for pass in 0..self.machine.passes() {
            for (tensor, held) in &out {
                self.machine.device.poison(held.buffer, poison(pass, tensor.dtype)).map_err(broke)?;
            }
            launches(self, pass, &buffers)?;
            self.watch(sink, ids[0])?;
            for ((tensor, held), id) in out.iter_mut().zip(ids) {
                let bytes = self.machine.read(*held)?;
                if pass == 0 {
                    tensor.bytes = bytes;
                    let unwritten = self.machine.device.unwritten(held.buffer).map_err(broke)?.unwrap_or(0);
                    // Memory is rounded up to whole words and never empty.
                    let spare = held.bytes.max(16).next_multiple_of(4) - held.bytes;
                    if unwritten > spare as u64 {
                        let n = unwritten - spare as u64;
                        sink.evidence(
                            *id,
                            &format!("{n} of {} bytes of its memory were never written", held.bytes),
                        )?;
                    }
                } else if let Some(text) = apart(tensor, &bytes) {
                    sink.evidence(*id, &text)?;
                    // What was judged is what goes on.
                    self.machine.write(*held, &tensor.bytes)?;
                }
            }
        }
        Ok(out)
    }

    /// Waits, and tells what the device saw and what was written outside of buffers.
    fn watch(&mut self, sink: &mut dyn Sink, id: TensorId) -> Result<(), EngineError> {
        let mut left = MOST_GUARDS;
        while let Err(e) = self.machine.device.check_guards() {
            if !matches!(e.problem(), Problem::Guard { .. }) || left == 0 {
                return Err(broke(e));
            }
            left -= 1;
            let what = format!("{}, in {}", e.problem(), e.place());
            sink.evidence(id, &what)?;
        }
        for finding in self.machine.device.take_findings() {
            sink.evidence(id, &finding)?;
        }
        Ok(())
    }

    /// Hands a tensor over, and takes over what a deliberate fault made of it.
    fn hand(
        &mut self,
        sink: &mut dyn Sink,
        id: TensorId,
        (mut tensor, held): (Tensor, Held),
    ) -> Result<Held, EngineError> {
        if sink.tensor(id, &mut tensor)? {
            self.machine.write(held, &tensor.bytes)?;
        }
        Ok(held)
    }

    /// Computes one tensor and hands it over.
    fn stage(
        &mut self,
        sink: &mut dyn Sink,
        id: TensorId,
        launches: impl FnMut(&mut Self, usize, &[Held]) -> Result<(), EngineError>,
    ) -> Result<Held, EngineError> {
        let mut made = self.compute(sink, &[id], launches)?;
        let made = made.pop().ok_or_else(|| broke("a stage made nothing"))?;
        self.hand(sink, id, made)
    }

    fn norm(
        &mut self,
        sink: &mut dyn Sink,
        stage: Stage,
        input: Held,
        (cols, stride): (usize, usize),
        (weight, eps): (Weight, f64),
    ) -> Result<Held, EngineError> {
        let gamma = self.weight(weight)?;
        let rows = self.plan().tokens();
        self.stage(sink, TensorId::shared(stage), |run, _, out| {
            let arguments = [
                Arg::In(input.buffer),
                Arg::In(gamma.buffer),
                Arg::Out(out[0].buffer),
                (cols as i32).into(),
                (stride as i32).into(),
                (cols as i32).into(),
                (eps as f32).into(),
            ];
            run.machine.launch("rms_norm", &[("rows", rows)], &arguments)
        })
    }

    fn rope(
        &mut self,
        sink: &mut dyn Sink,
        stage: Stage,
        input: Held,
        (heads, nope): (usize, usize),
        (stride, at): (usize, usize),
    ) -> Result<Held, EngineError> {
        let (rows, rope) = (self.plan().tokens(), self.geometry().rope);
        let adjacent = self.layer.spec.rope.pairing == Pairing::Adjacent;
        let factors = if stage == Stage::Q { self.tables[2] } else { self.ones()? };
        let made = self.stage(sink, TensorId::shared(stage), |run, _, out| {
            let arguments = [
                Arg::In(input.buffer),
                Arg::In(run.tables[0].buffer),
                Arg::In(run.tables[1].buffer),
                Arg::In(factors.buffer),
                Arg::Out(out[0].buffer),
                (heads as i32).into(),
                (nope as i32).into(),
                (rope as i32).into(),
                (stride as i32).into(),
                (at as i32).into(),
                ((heads * (nope + rope)) as i32).into(),
                i32::from(adjacent).into(),
            ];
            run.machine.launch("rope", &[("rows", rows), ("nope", nope), ("rope", rope)], &arguments)
        })?;
        if stage != Stage::Q {
            self.machine.free(factors)?;
        }
        Ok(made)
    }

    fn ones(&mut self) -> Result<Held, EngineError> {
        self.machine.upload_words(vec![1f32.to_bits(); self.plan().tokens()], "ones")
    }

    fn product(
        &mut self,
        input: Held,
        rows: Held,
        p: &Product,
        out: Held,
        whole: bool,
    ) -> Result<(), EngineError> {
        let weight = self.weight(p.weight)?;
        let entry = if p.transposed { "product_transposed" } else { "product" };
        let names = [("m", p.m), ("n", p.n), ("k", p.k), ("heads", p.heads)];
        let arguments = [
            Arg::In(input.buffer),
            Arg::In(rows.buffer),
            Arg::In(weight.buffer),
            if whole { Arg::Out(out.buffer) } else { Arg::InOut(out.buffer) },
            (p.a.1 as i64).into(),
            ((p.n * p.k) as i64).into(),
            (p.c.1 as i64).into(),
            (p.m as i32).into(),
            (p.n as i32).into(),
            (p.k as i32).into(),
            (p.a.0 as i32).into(),
            (p.b as i32).into(),
            (p.c.0 as i32).into(),
        ];
        self.machine.launch(entry, &names, &arguments)
    }

    /// A stage that is a product with a whole weight, for all heads at once.
    fn plain(
        &mut self,
        sink: &mut dyn Sink,
        id: TensorId,
        input: Held,
        weight: Weight,
    ) -> Result<Held, EngineError> {
        let (n, k) = weight.matrix(self.geometry());
        let m = self.plan().rows(id.stage);
        let p = Product { weight, m, n, k, heads: 1, a: (k, 0), b: k, c: (n, 0), transposed: false };
        let identity = self.identity;
        self.stage(sink, id, |run, _, out| run.product(input, identity, &p, out[0], true))
    }

    /// A stage that is a product a head: columns of `input` from `h · stride` on.
    fn by_head(
        &mut self,
        sink: &mut dyn Sink,
        id: TensorId,
        input: Held,
        stride: usize,
        weight: Weight,
    ) -> Result<Held, EngineError> {
        let heads = self.geometry().heads;
        let (all, k) = weight.matrix(self.geometry());
        let (n, m) = (all / heads, self.plan().rows(id.stage));
        let p = Product {
            weight,
            m,
            n,
            k,
            heads,
            a: (heads * stride, stride),
            b: k,
            c: (all, n),
            transposed: false,
        };
        let identity = self.identity;
        self.stage(sink, id, |run, _, out| run.product(input, identity, &p, out[0], true))
    }

    /// All stages up to the cache.
    fn shared(&mut self, sink: &mut dyn Sink) -> Result<Shared, EngineError> {
        let (g, spec) = (self.geometry(), &self.layer.spec);
        let id = TensorId::shared;
        let hidden = self.hidden(sink)?;
        let attn = (Weight::GAttn, spec.eps_attn);
        let attn_in = self.norm(sink, Stage::AttnIn, hidden, (g.hidden, g.hidden), attn)?;
        self.machine.free(hidden)?;
        let q_raw = if g.q_rank > 0 {
            let q_a = self.plain(sink, id(Stage::QA), attn_in, Weight::WQA)?;
            let latent = (Weight::GQ, spec.eps_latent);
            let normed = self.norm(sink, Stage::QANormed, q_a, (g.q_rank, g.q_rank), latent)?;
            self.machine.free(q_a)?;
            let q_raw = self.plain(sink, id(Stage::QRaw), normed, Weight::WQB)?;
            self.machine.free(normed)?;
            q_raw
        } else {
            self.plain(sink, id(Stage::QRaw), attn_in, Weight::WQ)?
        };
        let q = self.rope(sink, Stage::Q, q_raw, (g.heads, g.nope), (g.heads * g.key(), 0))?;
        self.machine.free(q_raw)?;
        let kv_a = self.plain(sink, id(Stage::KvA), attn_in, Weight::WKvA)?;
        self.machine.free(attn_in)?;
        let latent = (Weight::GKv, spec.eps_latent);
        let latent = self.norm(sink, Stage::KvCNormed, kv_a, (g.latent, g.cache()), latent)?;
        let k_pe = self.rope(sink, Stage::KPe, kv_a, (1, 0), (g.cache(), g.latent))?;
        self.machine.free(kv_a)?;
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

    /// The pool, one for each pass: context as given, new tokens by the kernel, all else poison.
    fn cache(&mut self, sink: &mut dyn Sink, latent: Held, k_pe: Held) -> Result<Vec<Held>, EngineError> {
        let (g, plan) = (self.geometry(), self.plan());
        let id = TensorId::shared(Stage::Cache);
        let mut tensor = Tensor::zeros(id, plan, g, self.stored(Stage::Cache));
        let (dtype, row_bytes) = (tensor.dtype, g.cache() * tensor.dtype.bytes());
        let mut owned = vec![false; tensor.rows];
        let mut context = Vec::new();
        for (i, seq) in plan.sequences.iter().enumerate() {
            for (position, &slot) in seq.slots.iter().enumerate() {
                owned[slot] = true;
                if position < seq.context {
                    context.push((slot, dtype.encode(&self.case.given.context[i].row(position).to_vec())));
                }
            }
        }
        // Tokens that several sequences share are written to each one's slots.
        let mut writes: Vec<(u32, u32)> = Vec::new();
        for seq in &plan.sequences {
            writes.extend(
                seq.tokens.clone().zip(&seq.slots[seq.context..]).map(|(t, s)| (t as u32, *s as u32)),
            );
        }
        let tokens = self.machine.upload_words(writes.iter().map(|w| w.0), "tokens")?;
        let to = self.machine.upload_words(writes.iter().map(|w| w.1), "slots")?;
        let mut pools = Vec::new();
        for pass in 0..self.machine.passes() {
            let pool = self.machine.allocate(tensor.bytes.len(), "cache")?;
            self.machine.device.poison(pool.buffer, poison(pass, dtype)).map_err(broke)?;
            for (slot, bytes) in &context {
                self.machine.device.write(pool.buffer, (slot * row_bytes) as u64, bytes).map_err(broke)?;
            }
            let arguments = [
                Arg::In(latent.buffer),
                Arg::In(k_pe.buffer),
                Arg::In(tokens.buffer),
                Arg::In(to.buffer),
                Arg::InOut(pool.buffer),
                (g.latent as i32).into(),
                (g.rope as i32).into(),
            ];
            self.machine.launch("cache_write", &[("rows", writes.len())], &arguments)?;
            self.watch(sink, id)?;
            let bytes = self.machine.read(pool)?;
            let poisoned = super::machine::poison(pass, dtype).bytes();
            let stray = (0..tensor.rows)
                .filter(|r| !owned[*r])
                .find(|r| bytes[r * row_bytes..][..row_bytes].chunks(poisoned.len()).any(|c| c != poisoned));
            if let Some(slot) = stray {
                sink.evidence(id, &format!("slot {slot} was written, which no request owns"))?;
            }
            if pass == 0 {
                tensor.bytes = bytes;
            } else {
                let apart = |r: &usize| {
                    owned[*r]
                        && bytes[r * row_bytes..][..row_bytes] != tensor.bytes[r * row_bytes..][..row_bytes]
                };
                if let Some(slot) = (0..tensor.rows).find(apart) {
                    sink.evidence(
                        id,
                        &format!("slot {slot} depends on what lay there before: it was not wholly written"),
                    )?;
                }
            }
            pools.push(pool);
        }
        let before = tensor.bytes.clone();
        if sink.tensor(id, &mut tensor)? {
            for (slot, (new, old)) in tensor.bytes.chunks(row_bytes).zip(before.chunks(row_bytes)).enumerate()
            {
                for pool in pools.iter().filter(|_| new != old) {
                    self.machine.device.write(pool.buffer, (slot * row_bytes) as u64, new).map_err(broke)?;
                }
            }
        }
        self.machine.free(tokens)?;
        self.machine.free(to)?;
        Ok(pools)
    }

    /// Everything after the cache.
    fn form(&mut self, form: Form, shared: &Shared, sink: &mut dyn Sink) -> Result<(), EngineError> {
        let id = |stage| TensorId::of(stage, form);
        let g = self.geometry();
        let attn_out = match form {
            Form::Fused => {
                let slots = self.plan().sequences.iter().flat_map(|s| s.slots.iter().map(|s| *s as u32));
                let slots = self.machine.upload_words(slots, "slots of keys")?;
                let k = self.keys(sink, shared, slots)?;
                let v = self.values(sink, shared, slots)?;
                self.machine.free(slots)?;
                let keys = self.plan().key_rows().map(|(_, _, r)| r.start).collect();
                let layout = Layout { per_token: 1, keys };
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
                let layout = Layout { per_token: g.heads, keys: pages.begin.clone() };
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

    /// k: each head's latent · w_uk, beside a copy of the rope columns.
    fn keys(&mut self, sink: &mut dyn Sink, shared: &Shared, slots: Held) -> Result<Held, EngineError> {
        let g = self.geometry();
        let (stage, m, heads) = (Stage::K, self.plan().rows(Stage::K), g.heads);
        let p = Product {
            weight: Weight::WUk,
            m,
            n: g.nope,
            k: g.latent,
            heads,
            a: (g.cache(), 0),
            b: g.nope,
            c: (heads * g.key(), g.key()),
            transposed: true,
        };
        self.stage(sink, TensorId::of(stage, Form::Fused), |run, pass, out| {
            run.product(shared.cache[pass], slots, &p, out[0], false)?;
            let arguments = [
                Arg::In(shared.cache[pass].buffer),
                Arg::In(slots.buffer),
                Arg::InOut(out[0].buffer),
                (heads as i32).into(),
                (g.nope as i32).into(),
                (g.latent as i32).into(),
                (g.rope as i32).into(),
            ];
            run.machine.launch("key_rope", &[("rows", m)], &arguments)
        })
    }

    fn values(&mut self, sink: &mut dyn Sink, shared: &Shared, slots: Held) -> Result<Held, EngineError> {
        let g = self.geometry();
        let (stage, m, n) = (Stage::V, self.plan().rows(Stage::V), g.heads * g.value);
        let p = Product {
            weight: Weight::WUv,
            m,
            n,
            k: g.latent,
            heads: 1,
            a: (g.cache(), 0),
            b: g.latent,
            c: (n, 0),
            transposed: false,
        };
        self.stage(sink, TensorId::of(stage, Form::Fused), |run, pass, out| {
            run.product(shared.cache[pass], slots, &p, out[0], true)
        })
    }

    /// Page tables, one entry of another page behind each.
    fn pages(&mut self) -> Result<Pages, EngineError> {
        let plan = self.plan();
        let (mut begin, mut entries) = (Vec::new(), Vec::new());
        for (i, seq) in plan.sequences.iter().enumerate() {
            begin.push(entries.len());
            let page = |at: &usize| at / plan.page_size;
            let odd = seq.slots.iter().enumerate().find(|(p, slot)| {
                page(slot) != page(&seq.slots[p - p % plan.page_size])
                    || *slot % plan.page_size != p % plan.page_size
            });
            if let Some((position, slot)) = odd {
                return Err(broke(format!(
                    "position {position} lies in slot {slot}, which no page table can say\n  where: sequence {i}\n  do: draw the case in whole pages"
                )));
            }
            entries.extend(seq.slots.iter().step_by(plan.page_size).map(|s| Some(page(s) as u32)));
            entries.push(None);
        }
        let mut tables = Vec::new();
        for pass in 0..self.machine.passes() {
            let other = if pass == 0 { 0 } else { plan.pages.saturating_sub(1) as u32 };
            tables
                .push(self.machine.upload_words(entries.iter().map(|e| e.unwrap_or(other)), "page tables")?);
        }
        Ok(Pages { tables, begin })
    }

    /// Attention of a form: decode rows in splits and merged where the plan has splits, all others at once. `operands` are
    /// the arguments before the work list.
    fn attention(
        &mut self,
        sink: &mut dyn Sink,
        form: Form,
        layout: &Layout,
        file: &str,
        operands: &dyn Fn(usize) -> Vec<Arg>,
    ) -> Result<Held, EngineError> {
        let id = |stage| TensorId::of(stage, form);
        let output = if form == Form::Fused { Stage::AttnOut } else { Stage::OLatent };
        let parts = if self.plan().has(Stage::PartO) {
            let lists = self.lists(layout, file, Stage::PartO, true)?;
            let ids = [id(Stage::PartO), id(Stage::PartLse)];
            let mut made = self
                .compute(sink, &ids, |run, pass, out| run.attend(form, &lists, &operands(pass), out, true))?;
            self.free_lists(lists)?;
            let (Some(lse), Some(o)) = (made.pop(), made.pop()) else {
                return Err(broke("attention made nothing"));
            };
            let o = self.hand(sink, ids[0], o)?;
            Some((o, self.hand(sink, ids[1], lse)?))
        } else {
            None
        };
        let lists = self.lists(layout, file, output, false)?;
        let to = match parts {
            None => None,
            Some(_) => {
                let rows = self.plan().attention_rows().filter(|(_, s, _)| s.phase() == Phase::Decode);
                let rows: Vec<u32> = rows.map(|(_, _, r)| r.start as u32).collect();
                Some(self.machine.upload_words(rows, "rows of merged results")?)
            }
        };
        let ids = [id(output), id(Stage::Lse)];
        let mut made = self.compute(sink, &ids, |run, pass, out| {
            if let (Some((part_o, part_lse)), Some(to)) = (parts, to) {
                run.merge(form, (part_o, part_lse), to, out)?;
            }
            run.attend(form, &lists, &operands(pass), out, parts.is_none())
        })?;
        self.free_lists(lists)?;
        for held in parts.into_iter().flat_map(|(o, lse)| [o, lse]).chain(to) {
            self.machine.free(held)?;
        }
        let (Some(lse), Some(o)) = (made.pop(), made.pop()) else {
            return Err(broke("attention made nothing"));
        };
        // In the order of the table.
        let (o, lse) = if form == Form::Fused {
            let lse = self.hand(sink, ids[1], lse)?;
            (self.hand(sink, ids[0], o)?, lse)
        } else {
            (self.hand(sink, ids[0], o)?, self.hand(sink, ids[1], lse)?)
        };
        self.machine.free(lse)?;
        Ok(o)
    }

    /// Work lists on the device, by entry point.
    fn lists(
        &mut self,
        layout: &Layout,
        file: &str,
        stage: Stage,
        parts: bool,
    ) -> Result<Vec<(String, usize, Held)>, EngineError> {
        let entries = self.machine.entries(file, stage.name())?;
        let rows: Vec<usize> = entries.iter().map(|e| e.1).collect();
        let groups = work::items(self.plan(), &self.contract, layout, parts, &rows);
        let mut lists = Vec::new();
        for ((entry, _), items) in entries.into_iter().zip(groups).filter(|(_, items)| !items.is_empty()) {
            let words = items.iter().flat_map(Item::words);
            lists.push((entry, items.len(), self.machine.upload_words(words, "work list")?));
        }
        Ok(lists)
    }

    fn free_lists(&mut self, lists: Vec<(String, usize, Held)>) -> Result<(), EngineError> {
        lists.into_iter().try_for_each(|(_, _, held)| self.machine.free(held))
    }

    /// Runs attention kernels over their work lists. `whole`: one launch writes all of the output.
    fn attend(
        &mut self,
        form: Form,
        lists: &[(String, usize, Held)],
        operands: &[Arg],
        out: &[Held],
        whole: bool,
    ) -> Result<(), EngineError> {
        let whole = whole && lists.len() == 1;
        let written = |h: Held| if whole { Arg::Out(h.buffer) } else { Arg::InOut(h.buffer) };
        let c2 = (self.layer.spec.scale * LOG2_E) as f32;
        let heads = self.geometry().heads;
        for (entry, items, list) in lists {
            let mut arguments = operands.to_vec();
            arguments.extend([Arg::In(list.buffer), written(out[0]), written(out[1]), (heads as i32).into()]);
            if form == Form::Absorbed {
                arguments.push((self.plan().page_size as i32).into());
            }
            arguments.push(c2.into());
            self.machine.launch(entry, &[("items", *items), ("heads", heads)], &arguments)?;
        }
        Ok(())
    }

    fn merge(&mut self, form: Form, parts: (Held, Held), to: Held, out: &[Held]) -> Result<(), EngineError> {
        let g = self.geometry();
        let width = if form == Form::Fused { g.value } else { g.latent };
        let rows = self.plan().decode_rows();
        let arguments = [
            Arg::In(parts.0.buffer),
            Arg::In(parts.1.buffer),
            Arg::In(to.buffer),
            Arg::InOut(out[0].buffer),
            Arg::InOut(out[1].buffer),
            (self.plan().splits as i32).into(),
            (g.heads as i32).into(),
            (width as i32).into(),
        ];
        self.machine.launch("merge", &[("rows", rows), ("heads", g.heads)], &arguments)
    }
}

/// In what two passes over different poison differ, in words.
fn apart(first: &Tensor, second: &[u8]) -> Option<String> {
    let n = first.dtype.bytes();
    let (mut survivors, mut others, mut place) = (0u64, 0u64, None);
    let fills = [poison(0, first.dtype).bytes(), poison(1, first.dtype).bytes()];
    for (i, (a, b)) in first.bytes.chunks(n).zip(second.chunks(n)).enumerate() {
        if a != b {
            place.get_or_insert(i);
            if a == fills[0] && b == fills[1] { survivors += 1 } else { others += 1 }
        }
    }
    let at = place?;
    let (row, col) = (at / first.cols.max(1), at % first.cols.max(1));
    let all = first.len();
    let mut said = Vec::new();
    if survivors > 0 {
        said.push(format!("{survivors} of {all} elements were never written"));
    }
    if others > 0 {
        said.push(format!("{others} of {all} elements differ between two runs over different poison"));
    }
    Some(format!("{}; first at row {row}, column {col}", said.join("; ")))
}
