/*!
One judgement of one layer: a sink that an engine streams into.

Each tensor is judged when it arrives, from the engine's own inputs (isolated), and dropped when no later
stage reads it. At the end whatever the table asks for and nobody delivered is a fault. Where a Trace lists what it
captured, only that is asked for, and inputs that it lacks are computed from what is there ([`super::chain`]).
*/

use super::ask::{Ask, Asked, Standing};
use super::cause;
use super::cause::settle::settle;
use super::cause::weight::OtherLayers;
use super::chain::Chain;
use super::closer::{Closer, Unknown};
use super::compare::Isolated;
use super::conclude::{Basis, Budget, conclude};
use super::evidence::{Evidence, Piece};
use super::memory::{Memory, Use};
use super::picture;
use super::route::{Route, Routed};
use super::search::{FoundContract, Known, Search};
use super::tally::Tally;
use super::unit::{self, Unit};
use super::verdict::Verdict;
use super::weights;
use crate::case::Case;
use crate::engine::{Sink, SinkError};
use crate::model::Layer;
use crate::trace::store::Store;
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::{Dense, Rows};
use mla_reference::rows::Patched;
use mla_reference::{Axis, Contract, Form, Phase, Plan, Recall, Scope, Spec, Stage, Weight, Weights};
use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, PoisonError};

mod ready;

/// Elements of a weight that differ before it is asked which other weight it is.
const FEW: u64 = 16;

/// Where tensors of a run are also written, for `--save`.
pub trait Recorder {
    /// Takes the engine's tensor and the isolated reference rounded to its dtype.
    fn record(&mut self, id: TensorId, engine: &Tensor, reference: &Tensor) -> Result<(), SinkError>;
}

/// Judges a layer while an engine runs.
pub struct Session<'a> {
    layer: &'a Layer<'a>,
    case: &'a Case,
    contract: Contract,
    pending: Vec<TensorId>,
    tensors: Store,
    chain: Chain,
    /// The case with splits merged inside the attention, for partial results that were not captured.
    whole: Option<Box<Case>>,
    held: Held<'a>,
    units: Vec<Unit>,
    odd: Vec<String>,
    seen_weights: HashSet<Weight>,
    recorder: Option<&'a mut dyn Recorder>,
    progress: Box<dyn Fn(&str) + 'a>,
    settings: Settings,
    /// Contracts found so far.
    known: Known,
    /// What the engine's device saw go wrong.
    seen: Vec<(unit::Which, String)>,
    /// Weights of the model's other layers, where they are at hand.
    others: Option<&'a dyn OtherLayers>,
    /// What causes of tensors so far say.
    causes: cause::Known,
    /// Results of earlier runs, where there are some.
    memory: Option<&'a dyn Memory>,
    used: Use,
}

/// What a judgement may cost and promise, and what it may try.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Budget and promise.
    pub budget: Budget,
    /// Seed of what is sampled.
    pub seed: u64,
    /// Other readings of the model's numbers, by name.
    pub conventions: Vec<(String, Spec)>,
    /// What the engine declares, where another contract is judged: None where the judged one is declared. Then what
    /// another contract explains breaks nothing that was promised, and the declared one is the first to be tried.
    pub declared: Option<Contract>,
    /// Look closer where evidence is found: for what explains it, and where it is. Never decides whether there is any.
    pub closer: bool,
    /// Tensors that the Trace captured; the others are chained across. None: all that the table asks for.
    pub captured: Option<Vec<TensorId>>,
    /// Weights that it captured; of others the file's are taken. None: all.
    pub captured_weights: Option<Vec<Weight>>,
    /// Captured tensors of which it is not known what they should be: taken as they are ([`super::starts`]).
    pub given: Vec<TensorId>,
    /// Nobody declares a contract: it is searched for.
    pub search: bool,
    /// Whether the layer's weights are a model's; else what there is of them is the dump's own.
    pub model: bool,
    /// What another convention explains is no fault: other software reads the same file by its own.
    pub other_conventions_pass: bool,
    /// A question about one tensor: then nothing else is judged that the answer does not need, and the session ends there.
    pub ask: Option<Ask>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            budget: Budget::default(),
            seed: 0,
            conventions: Vec::new(),
            declared: None,
            closer: true,
            captured: None,
            captured_weights: None,
            given: Vec::new(),
            search: false,
            model: true,
            other_conventions_pass: false,
            ask: None,
        }
    }
}

/// The weights as the engine holds them: the file's values on the contract's grid, with what differs.
struct Held<'a> {
    matrices: Vec<(Weight, Box<dyn Rows + 'a>)>,
    norms: Vec<(Weight, Vec<f64>)>,
    /// Weights that differ so much that no stage can be isolated with them.
    another: HashSet<Weight>,
}

impl Weights for Held<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        self.matrices.iter().find(|(w, _)| *w == weight).map(|(_, m)| m.as_ref())
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.norms.iter().find(|(w, _)| *w == weight).map(|(_, v)| v.as_slice())
    }
}

/// All tensors that forms need, in the order in which they are judged.
pub fn expected(spec: &Spec, case: &Case, forms: &[Form]) -> Vec<TensorId> {
    let stages: Vec<Stage> = Stage::ALL.iter().filter(|s| s.exists(&spec.geometry)).copied().collect();
    let shared = stages.iter().filter(|s| s.row().scope == Scope::Shared).map(|s| TensorId::shared(*s));
    let own = forms.iter().flat_map(|form| {
        stages
            .iter()
            .filter(|s| s.row().scope != Scope::Shared && s.in_form(*form) && case.plan.has(**s, Some(*form)))
            .map(|s| TensorId { stage: *s, form: Some(*form) })
    });
    shared.chain(own).collect()
}

/// Stages that are not determined by tensors before them and the model alone.
pub const OPEN: [Stage; 5] = [Stage::Hidden, Stage::AttnIn, Stage::Q, Stage::KPe, Stage::Cache];

/// Captured tensors that nothing is known to come before, in the order of judgement.
///
/// A tensor's inputs are known where they were captured, or can be computed from what was. Of [`OPEN`] only those in
/// `closed` can be: hidden states and context rows (`cache`) come from outside, and how an engine adds the residual before
/// `attn_in`, and which table it rotates by, is not known unless somebody says so.
pub fn starts(
    spec: &Spec,
    case: &Case,
    forms: &[Form],
    captured: &[TensorId],
    closed: &[Stage],
) -> Vec<TensorId> {
    let g = &spec.geometry;
    let (mut known, mut starts) = (HashSet::new(), Vec::new());
    for id in expected(spec, case, forms) {
        let of = |stage| id.form.map_or(TensorId::shared(stage), |form| TensorId::of(stage, form));
        let before = match id.stage {
            s if OPEN.contains(&s) && !closed.contains(&s) => false,
            s => s.inputs(g, id.form, false).iter().all(|s| known.contains(&of(*s))),
        };
        if captured.contains(&id) && !before {
            starts.push(id);
        }
        if captured.contains(&id) || before {
            known.insert(id);
        }
    }
    starts
}

impl<'a> Session<'a> {
    /// Starts a judgement. `progress` hears the name of each tensor as it is taken up.
    pub fn new(
        layer: &'a Layer<'a>,
        case: &'a Case,
        forms: &[Form],
        contract: Contract,
        recorder: Option<&'a mut dyn Recorder>,
        progress: Box<dyn Fn(&str) + 'a>,
    ) -> Session<'a> {
        let pending = expected(&layer.spec, case, forms);
        Session {
            layer,
            case,
            contract,
            pending,
            tensors: Store::default(),
            chain: Chain::default(),
            whole: None,
            held: Held { matrices: Vec::new(), norms: Vec::new(), another: HashSet::new() },
            units: Vec::new(),
            odd: Vec::new(),
            seen_weights: HashSet::new(),
            recorder,
            progress,
            settings: Settings::default(),
            known: Known::new(),
            seen: Vec::new(),
            others: None,
            causes: cause::Known::default(),
            memory: None,
            used: Use::default(),
        }
    }

    /// The same with results of earlier runs at hand.
    pub fn remembering(mut self, memory: Option<&'a dyn Memory>) -> Session<'a> {
        self.memory = memory;
        self
    }

    /// How much of them was of use so far.
    pub fn used(&self) -> Use {
        self.used
    }

    /// The same with the weights of the model's other layers at hand: one of them may be what an engine took.
    pub fn beside(mut self, others: Option<&'a dyn OtherLayers>) -> Session<'a> {
        self.others = others;
        self
    }

    /// What a weight is that is not the file's. Single elements have no name.
    fn diagnose(&self, weight: Weight, pair: (&dyn Rows, &dyn Rows), dtype: DType, unit: &mut Unit) {
        if self.settings.closer && unit.beyond > 0 {
            unit.picture = Some(picture::of_weight(pair.0, pair.1, dtype));
        }
        if self.settings.closer && unit.beyond >= FEW {
            let about = cause::weight::About {
                geometry: &self.layer.spec.geometry,
                layer: Some(self.layer.weights),
                ranks: self.case.plan.ranks.max(1),
                others: self.others,
            };
            unit.diagnosis = Some(cause::weight::search(weight, pair, dtype, &about));
        }
    }

    /// The same with other settings.
    pub fn with(mut self, settings: Settings) -> Session<'a> {
        self.settings = settings;
        if self.settings.captured.is_some() && self.case.plan.has_parts() {
            let route = mla_reference::Route { inside: true, ..self.case.plan.route };
            let plan = Plan { splits: 1, route, ..self.case.plan.clone() };
            self.whole = Some(Box::new(Case { plan, ..self.case.clone() }));
        }
        if let Some(captured) = self.settings.captured_weights.take() {
            let g = &self.layer.spec.geometry;
            for &w in Weight::ALL.iter().filter(|w| w.exists(g) && !captured.contains(w)) {
                self.assume(w);
            }
            self.settings.captured_weights = Some(captured);
        }
        self
    }

    /// Gives later stages another tensor to be judged from than the one that was judged: what the engine read in its place.
    pub fn hand_on(&mut self, id: TensorId, read: Tensor) {
        if self.unreadable(id, &read).is_none() {
            self.tensors.keep(id, read);
            self.tensors.release(&self.live(), &self.layer.spec.geometry);
        }
    }

    /// Takes a unit that was judged elsewhere.
    pub fn add(&mut self, unit: Unit) {
        self.units.push(unit);
    }

    /// Ends it: what was expected and never came is a fault; what is clean but stands behind one says so.
    pub fn finish(mut self) -> (Vec<Unit>, Vec<String>) {
        let g = &self.layer.spec.geometry;
        for &w in Weight::ALL.iter().filter(|w| w.exists(g) && !self.seen_weights.contains(w)) {
            self.units.push(Unit::without_data(
                unit::Which::Weight(w),
                None,
                Verdict::Fault,
                "missing: the engine never showed it",
            ));
        }
        for id in std::mem::take(&mut self.pending) {
            let which = unit::Which::Tensor(id);
            let unit = if self.listed(id) {
                let note = "missing: the engine never delivered it";
                Unit::without_data(which, None, Verdict::Fault, note)
            } else {
                let note = unit::judged_with(id, &self.units);
                Unit { uncaptured: true, ..Unit::without_data(which, None, Verdict::NotCompared, &note) }
            };
            self.units.push(unit);
        }
        unit::sort(&mut self.units);
        let explained = match self.settings.declared {
            None => Verdict::ContractBroken,
            Some(_) => Verdict::ContractDiffers,
        };
        let convention =
            if self.settings.other_conventions_pass { Verdict::ConventionDiffers } else { Verdict::Fault };
        conclude(&mut self.units, self.settings.budget, [explained, convention]);
        for (which, what) in std::mem::take(&mut self.seen) {
            unit::accuse(&mut self.units, which, what);
        }
        self.units.iter_mut().for_each(unit::name_chained);
        unit::mark_after_fault(&mut self.units, g, &self.case.plan);
        let origin = |u: &Unit| unit::origins(std::slice::from_ref(u)).next().is_some();
        self.units
            .iter_mut()
            .filter(|u| !origin(u))
            .for_each(|u| (u.residual, u.picture) = (Vec::new(), None));
        settle(&mut self.units);
        (self.units, self.odd)
    }

    fn take_weight(&mut self, weight: Weight, file: &'a dyn Rows, engine: &dyn Rows, dtype: DType) {
        (self.progress)(weight.name());
        self.seen_weights.insert(weight);
        let which = unit::Which::Weight(weight);
        let shape = weight.shape(&self.layer.spec.geometry);
        if (engine.rows(), engine.cols()) != (file.rows(), file.cols()) {
            let note = format!(
                "the engine's has {} rows of {}, the file's {} of {}",
                engine.rows(),
                engine.cols(),
                file.rows(),
                file.cols()
            );
            self.held.another.insert(weight);
            self.units.push(Unit::without_data(which, None, Verdict::Fault, &note));
            return;
        }
        let (c, explained) = self.compared(weight, file, engine, dtype);
        self.odd.extend(c.odd);
        let axes = weight.row().axes.to_vec();
        let mut unit = weight_unit(which, axes, shape, dtype, c.tally, explained);
        if explained.is_none() {
            self.diagnose(weight, (file, engine), dtype, &mut unit);
        }
        self.units.push(unit);
        let route = explained.unwrap_or(Route::Once(dtype));
        if c.another {
            self.held.another.insert(weight);
        } else if weight.is_norm() {
            let mut values = mla_reference::rows::dense(file, 0..1, false).into_raw_vec_and_offset().0;
            values.iter_mut().for_each(|v| *v = route.value(*v));
            for ((_, col), v) in c.patches {
                values[col] = v;
            }
            self.held.norms.push((weight, values));
        } else {
            self.held.matrices.push((
                weight,
                Box::new(Patched { inner: Routed { inner: file, route }, values: c.patches }),
            ));
        }
    }

    /// What a weight differs in; where the engine promised nothing, another route than one rounding may explain it.
    fn compared(
        &self,
        weight: Weight,
        file: &dyn Rows,
        engine: &dyn Rows,
        dtype: DType,
    ) -> (weights::Compared, Option<Route>) {
        let g = &self.layer.spec.geometry;
        let by = |route| weights::compare(weight, g, file, engine, (route, dtype));
        let once = by(Route::Once(dtype));
        if once.tally.beyond == 0 || !self.nothing_promised() {
            return (once, None);
        }
        let route = Route::of_captured(weight, dtype).into_iter().find(|r| r.explains(file, engine));
        match route {
            Some(route) => {
                let held = by(route);
                // What is shown is how it differs from the file's values; what is held is what the engine has.
                (weights::Compared { tally: once.tally, ..held }, Some(route))
            }
            None => (once, None),
        }
    }

    /// Whether nobody says by which contract the engine computes.
    fn nothing_promised(&self) -> bool {
        self.settings.declared.is_some() || self.settings.search
    }

    /// Why nothing can be read from a tensor: its shape, or bytes that are not those of its shape.
    fn unreadable(&self, id: TensorId, tensor: &Tensor) -> Option<String> {
        let wanted = self.case.plan.shape(id.stage, id.form, &self.layer.spec.geometry);
        if tensor.shape != wanted {
            return Some(format!("has shape {:?}, the case asks for {wanted:?}", tensor.shape));
        }
        let (rows, len) = (self.case.plan.rows(id.stage, id.form), wanted.iter().product::<usize>());
        let (bytes, needed) = (tensor.bytes.len(), len * tensor.dtype.bytes());
        ((tensor.rows, tensor.len(), bytes) != (rows, len, needed)).then(|| {
            format!(
                "has {} rows, {} elements and {bytes} bytes, its shape asks for {rows}, {len} and {needed}",
                tensor.rows,
                tensor.len()
            )
        })
    }

    /// Judges one tensor from the inputs recorded so far.
    fn judge(&mut self, id: TensorId, tensor: &Tensor) -> Result<(), SinkError> {
        let which = unit::Which::Tensor(id);
        let asked = self.settings.ask.as_ref().map(|a| a.which == which);
        if asked == Some(false) && !self.settings.search {
            return Ok(());
        }
        if tensor.dtype != self.contract.stored(id.stage) {
            let note = format!("is stored as {}, declared {}", tensor.dtype, self.contract.stored(id.stage));
            self.units.push(Unit::without_data(which, None, Verdict::Fault, &note));
            return Ok(());
        }
        if self.settings.given.contains(&id) {
            let found = if self.searchable(id, tensor) { self.search_given(id, tensor) } else { None };
            if let Some(units) = found {
                self.units.extend(units);
                return Ok(());
            }
            let note = "taken as it is: what it is computed from, or how, is not known";
            let mut unit = Unit::without_data(which, None, Verdict::NotCompared, note);
            unit.given = true;
            self.units.push(unit);
            return Ok(());
        }
        let ready = match self.prepare(id) {
            Ok(ready) => ready,
            Err(note) => {
                self.units.push(Unit::without_data(which, None, Verdict::NotCompared, &note));
                return Ok(());
            }
        };
        let reference = self
            .recorder
            .is_some()
            .then(|| Mutex::new(Tensor { bytes: vec![0; tensor.bytes.len()], ..tensor.clone() }));
        let watch = |piece: &Piece| {
            if let Some(r) = &reference {
                let mut r = r.lock().unwrap_or_else(PoisonError::into_inner);
                for (i, x) in piece.x.rows().into_iter().enumerate() {
                    r.write(piece.at.0 + i, piece.at.1, &x.to_vec());
                }
            }
        };
        let mut used = Use::default();
        let (units, found) = {
            let (view, contract) = (self.tensors.view(id.form), self.contract_for(id, &ready));
            let isolated = self.isolated(id, &ready, &view, &contract);
            // Of inputs that were computed here no cast of P is placed: there is nothing to find.
            let product = matches!(id.stage, Stage::AttnOut if id.form == Some(Form::Absorbed))
                || !matches!(id.stage, Stage::AttnOut | Stage::OLatent | Stage::Lse);
            let certain = (product || ready.chained.is_empty()) && self.searchable(id, tensor);
            if asked == Some(true) && !certain {
                self.answer(id, tensor, &isolated, &ready.chained, &[]);
                return Ok(());
            }
            let watch = reference.is_some().then_some(&watch as &(dyn Fn(&Piece) + Sync));
            let entry = self.memory.filter(|_| self.costs(id)).map(|m| m.stage(id, &isolated, &view));
            let memory = entry.as_deref().map(|e| e as &dyn Recall);
            let mut counted = Isolated { memory, ..isolated }.compare(id, tensor, watch);
            used = entry.map_or(used, |e| e.used());
            let found = if certain { self.search(id, tensor, &isolated, &mut counted) } else { Vec::new() };
            self.answer(id, tensor, &isolated, &ready.chained, &found);
            let mut units = self.units_of(id, tensor, &isolated, counted);
            tell(&mut units, &found);
            (units, found)
        };
        self.used.taken += used.taken;
        self.used.made += used.made;
        for (phase, _, contract) in &found {
            if let Some(found) = contract.as_ref().filter(|_| id.stage != Stage::Lse) {
                self.known.insert((id.form, *phase), found.contract);
            }
        }
        self.units.extend(units.into_iter().map(|mut u| {
            // Rows that are merged from partial results read nothing else.
            let rest = |phase| self.case.plan.merged(id.form, phase).1;
            let merged = ready.parts && u.phase.is_some_and(|phase| !rest(phase));
            u.chained = if merged { Vec::new() } else { ready.chained.clone() };
            u
        }));
        if let (Some(r), Some(recorder)) = (reference, self.recorder.as_deref_mut()) {
            recorder.record(id, tensor, &r.into_inner().unwrap_or_else(PoisonError::into_inner))?;
        }
        Ok(())
    }

    /// Whether a stage is worth remembering: products and attention are.
    fn costs(&self, id: TensorId) -> bool {
        let weights = id.stage.weights(&self.layer.spec.geometry, id.form);
        let attends =
            matches!(id.stage, Stage::PartO | Stage::PartLse | Stage::OLatent | Stage::Lse | Stage::AttnOut);
        attends || weights.iter().any(|w| !w.is_norm())
    }

    /// Whether a contract is searched for.
    fn searchable(&self, id: TensorId, tensor: &Tensor) -> bool {
        self.settings.search
            && Search::applies(id, tensor.dtype)
            // Nothing is known of norms and rotations without a model.
            && (self.settings.model || matches!(id.stage, Stage::Lse | Stage::OLatent | Stage::AttnOut))
    }

    /// Searches each phase of a tensor for its contract; where one is found, the evidence under it takes the place of the
    /// other.
    fn search(
        &self,
        id: TensorId,
        tensor: &Tensor,
        isolated: &Isolated,
        counted: &mut BTreeMap<Phase, Evidence>,
    ) -> Vec<Told> {
        let names = self.case.plan.names(id.stage, id.form);
        let name = |row: usize| names.get(row).copied();
        let log_alpha = self.settings.budget.log_alpha();
        let search = Search { isolated, id, tensor, log_alpha, name: &name };
        let mut all = Vec::new();
        for (phase, evidence) in counted {
            (self.progress)(&format!("{id}, contract"));
            let known = self.known.get(&(id.form, *phase));
            let searched = search.run(*phase, Some(evidence), known);
            let found = searched.found.map(|(found, under)| {
                *evidence = under;
                found
            });
            let nearest = searched.nearest.filter(|_| found.is_none());
            all.push((*phase, (searched.tried, nearest), found));
        }
        all
    }

    /// A tensor of which nobody says how it comes about: judged where a contract is found, else None.
    fn search_given(&mut self, id: TensorId, tensor: &Tensor) -> Option<Vec<Unit>> {
        let g = &self.layer.spec.geometry;
        // Its inputs must be there: what is computed for it would be no witness.
        if id.stage.inputs(g, id.form, false).iter().any(|s| self.tensors.view(id.form).get(*s).is_none()) {
            return None;
        }
        let ready = self.prepare(id).ok().filter(|r| r.chained.is_empty())?;
        let (view, contract) = (self.tensors.view(id.form), self.contract_for(id, &ready));
        let isolated = self.isolated(id, &ready, &view, &contract);
        let mut counted = isolated.compare(id, tensor, None);
        let found = self.search(id, tensor, &isolated, &mut counted);
        let log_alpha = self.settings.budget.log_alpha();
        let names = self.case.plan.names(id.stage, id.form);
        let name = |row: usize| names.get(row).copied();
        let clean = |e: &Evidence| !e.suspect(log_alpha, &e.tests(&name));
        if found.is_empty() || !counted.values().all(clean) {
            return None;
        }
        self.answer(id, tensor, &isolated, &[], &found);
        let mut units = self.units_of(id, tensor, &isolated, counted);
        tell(&mut units, &found);
        Some(units)
    }

    /// Tells whoever asked about this tensor what it is made of.
    fn answer(&self, id: TensorId, tensor: &Tensor, of: &Isolated, chained: &[Stage], found: &[Told]) {
        let Some(ask) = self.settings.ask.as_ref().filter(|a| a.which == unit::Which::Tensor(id)) else {
            return;
        };
        let found = found.iter().filter_map(|(phase, _, f)| Some((*phase, f.clone()?))).collect();
        let (inputs, file) = (&self.tensors.view(id.form), self.layer.weights);
        (ask.answer)(&Asked::Tensor(Standing { id, tensor, isolated: of, inputs, chained, file, found }));
    }

    /// The same of a weight.
    fn answer_weight(
        &self,
        weight: Weight,
        file: &dyn Rows,
        engine: &dyn Rows,
        dtype: DType,
    ) -> Result<(), SinkError> {
        let which = unit::Which::Weight(weight);
        if let Some(ask) = self.settings.ask.as_ref().filter(|a| a.which == which) {
            (ask.answer)(&Asked::Weight { weight, file, engine, dtype });
        }
        Ask::enough(&self.settings.ask, which)
    }

    /// Weights of a stage that nobody captured, of an engine that promised nothing.
    fn unknown(&self, id: TensorId) -> Option<Unknown<'_>> {
        let captured = self.settings.captured_weights.as_ref().filter(|_| self.nothing_promised())?;
        let reads = id.stage.weights(&self.layer.spec.geometry, id.form);
        let weights: Vec<Weight> = reads.iter().filter(|w| !captured.contains(w)).copied().collect();
        (!weights.is_empty()).then_some(Unknown { file: self.layer.weights, weights })
    }

    /// Units of a tensor, a phase each, from what was counted.
    fn units_of(
        &self,
        id: TensorId,
        tensor: &Tensor,
        isolated: &Isolated,
        counted: BTreeMap<Phase, Evidence>,
    ) -> Vec<Unit> {
        let which = unit::Which::Tensor(id);
        let names = self.case.plan.names(id.stage, id.form);
        let name = |row: usize| names.get(row).copied();
        let mut units = Vec::new();
        let total: u64 = counted.values().map(|e| e.tally.elements).sum();
        if total != tensor.len() as u64 {
            // The reference has nothing to say about some elements: never in silence.
            let note =
                format!("{} of {} elements were not compared", tensor.len() as u64 - total, tensor.len());
            units.push(Unit::without_data(which, None, Verdict::NotCompared, &note));
        }
        let phases = isolated.phases(id);
        let log_alpha = self.settings.budget.log_alpha();
        let unknown = self.unknown(id);
        let mut closer = Closer::new(isolated, id, tensor, &self.settings, unknown, &self.causes);
        for (phase, mut evidence) in counted {
            let tests = evidence.tests(&name);
            let suspect = self.settings.closer && evidence.suspect(log_alpha, &tests);
            let look = suspect.then(|| closer.look(phase, &evidence, &name));
            let rows = phases.iter().filter(|p| **p == phase).count();
            let basis = evidence.has_noise().then(|| Box::new(Basis::new(&evidence, tensor.dtype, rows)));
            let tally = std::mem::take(&mut evidence.tally);
            let (beyond, elements) = (tally.beyond, tally.elements);
            let axes = tensor.axes.clone();
            let mut unit =
                Unit::counted(which, Some(phase), axes, tensor.shape.clone(), tensor.dtype, tally, name);
            unit.odd_limit = evidence.counts_odd().then(|| evidence.whole_limit());
            if beyond > 0 {
                unit.evidence
                    .push(format!("{beyond} of {elements} elements are beyond what rounding allows"));
            }
            if evidence.unlikely > 0 {
                unit.evidence.push(format!(
                    "{} of {elements} elements are beyond the statistical bound",
                    evidence.unlikely
                ));
            }
            unit.tests = tests;
            unit.basis = basis;
            if let Some(look) = look {
                (unit.found, unit.explained, unit.tried) = (look.found, look.explained, look.tried);
                unit.diagnosis = look.diagnosis;
                unit.picture = look.picture;
            }
            units.push(unit);
        }
        units
    }
}

/// Of a phase: how many contracts were tried, the nearest where none was found, what was found.
type Told = (Phase, (usize, Option<(String, f64)>), Option<FoundContract>);

/// Tells units what a search came to.
fn tell(units: &mut [Unit], all: &[Told]) {
    for (phase, (tried, nearest), found) in all {
        for unit in units.iter_mut().filter(|u| u.phase == Some(*phase)) {
            unit.searched = *tried;
            unit.found_contract = found.clone();
            if let Some((name, share)) = nearest {
                let said = format!(
                    "no contract found: {tried} tried, the nearest, {name}, leaves {:.2} % of elements unexplained",
                    100.0 * share
                );
                unit.note = Some(unit.note.take().map_or(said.clone(), |n| format!("{n}; {said}")));
            }
        }
    }
}

/// A weight's unit: bits are equal, or it is a fault.
fn weight_unit(
    which: unit::Which,
    axes: Vec<Axis>,
    shape: Vec<usize>,
    dtype: DType,
    tally: Tally,
    explained: Option<Route>,
) -> Unit {
    let (beyond, all) = (tally.beyond, tally.elements);
    let mut unit = Unit::counted(which, None, axes, shape, dtype, tally, |_| None);
    if beyond > 0 {
        unit.evidence.push(format!("{beyond} of {all} elements are not the file's, rounded to {dtype}"));
    }
    unit.explained = explained.map(|r| unit::Explained::Contract(r.name()));
    unit
}

impl Sink for Session<'_> {
    fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        let Some(file) = self.layer.weights.matrix(weight) else {
            return Err(SinkError::Unasked(format!("the layer has no {weight}")));
        };
        self.take_weight(weight, file, rows, self.contract.weights);
        self.answer_weight(weight, file, rows, self.contract.weights)
    }

    fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
        let Some(file) = self.layer.weights.norm(weight) else {
            return Err(SinkError::Unasked(format!("the layer has no {weight}")));
        };
        (self.progress)(weight.name());
        self.seen_weights.insert(weight);
        let which = unit::Which::Weight(weight);
        if values.len() != file.len() {
            let note = format!("the engine's has {} values, the file's {}", values.len(), file.len());
            self.held.another.insert(weight);
            self.units.push(Unit::without_data(which, None, Verdict::Fault, &note));
            return Ok(());
        }
        let file = Dense { data: file, cols: file.len() };
        let dtype = self.contract.norm_weights;
        let engine = Dense { data: values, cols: values.len() };
        let (c, explained) = self.compared(weight, &file, &engine, dtype);
        self.odd.extend(c.odd);
        let (axes, shape) = (weight.row().axes.to_vec(), vec![values.len()]);
        let mut unit = weight_unit(which, axes, shape, dtype, c.tally, explained);
        if explained.is_none() {
            self.diagnose(weight, (&file, &engine), dtype, &mut unit);
        }
        self.units.push(unit);
        self.held.norms.push((weight, values.to_vec()));
        self.answer_weight(weight, &file, &engine, dtype)
    }

    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.seen.push((unit::Which::Tensor(id), what.to_string()));
        Ok(())
    }

    fn weight_evidence(&mut self, weight: Weight, what: &str) -> Result<(), SinkError> {
        self.seen.push((unit::Which::Weight(weight), what.to_string()));
        Ok(())
    }

    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        (self.progress)(&id.to_string());
        let Some(at) = self.pending.iter().position(|p| *p == id) else {
            return Err(SinkError::Unasked(format!(
                "the engine delivered {id}, which the table does not ask for, or twice"
            )));
        };
        self.pending.remove(at);
        if let Some(note) = self.unreadable(id, tensor) {
            // It is no input of others either: they lack one.
            self.units.push(Unit::without_data(unit::Which::Tensor(id), None, Verdict::Fault, &note));
        } else {
            self.judge(id, tensor)?;
            Ask::enough(&self.settings.ask, unit::Which::Tensor(id))?;
            self.tensors.keep(id, tensor.clone());
        }
        self.tensors.release(&self.live(), &self.layer.spec.geometry);
        let kept = &self.tensors;
        self.chain.release(|id| kept.contains(id));
        Ok(false)
    }
}
