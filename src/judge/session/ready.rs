/*!
What a stage is compared from: inputs that were delivered, and those that were not captured, computed in their place.

A list of what a Trace captured says what is expected. An input that is listed and not there is nothing to compare with;
one that is not listed is computed from its own inputs, as deep as it takes ([`super::super::chain`]), and kept as long as
a tensor to come reads it.
*/

use super::super::chain;
use super::super::compare::Isolated;
use super::super::unit::{Unit, Which};
use super::super::verdict::Verdict;
use super::Session;
use crate::trace::TensorId;
use crate::trace::store::View;
use mla_reference::rows::Rounded;
use mla_reference::{Contract, Phase, Stage, Weight};

/// What stands ready for a stage.
#[derive(Default)]
pub(super) struct Ready {
    /// What it reads.
    inputs: Vec<Stage>,
    /// What of it, and of what that was computed from, was not captured.
    pub(super) chained: Vec<Stage>,
    /// Rows that are computed in parts are merged from partial results that were captured.
    pub(super) parts: bool,
    /// They are merged inside the attention, since these were not.
    inside: bool,
}

/// An input of a tensor.
fn input(of: TensorId, stage: Stage) -> TensorId {
    of.form.map_or(TensorId::shared(stage), |form| TensorId::of(stage, form))
}

impl Session<'_> {
    /// Takes the file's weight for the engine's.
    pub(super) fn assume(&mut self, weight: Weight) {
        let has = self.layer.weights.matrix(weight).is_some();
        let note = match (self.settings.model, has) {
            (true, _) => "not captured; the file's is taken",
            (false, true) => "the dump's own, taken as it is: there is no model",
            (false, false) => "not in the dump, and there is no model",
        };
        let mut unit = Unit::without_data(Which::Weight(weight), None, Verdict::NotCompared, note);
        unit.uncaptured = true;
        if let Some(norm) = self.layer.weights.norm(weight) {
            let mut values = norm.to_vec();
            self.contract.norm_weights.round_slice(&mut values);
            self.held.norms.push((weight, values));
        } else if let Some(inner) = self.layer.weights.matrix(weight) {
            let dtype = self.contract.weights;
            self.held.matrices.push((weight, Box::new(Rounded { inner, dtype })));
        }
        self.seen_weights.insert(weight);
        self.units.push(unit);
    }

    /// Whether a tensor is expected.
    pub(super) fn listed(&self, id: TensorId) -> bool {
        self.settings.captured.as_ref().is_none_or(|c| c.contains(&id))
    }

    /// Sees to it that all inputs of a stage are there, and computes those that were not captured. Else why not.
    pub(super) fn prepare(&mut self, id: TensorId) -> Result<Ready, String> {
        let (g, plan) = (&self.layer.spec.geometry, &self.case.plan);
        if let Some(w) = id.stage.weights(g, id.form).iter().find(|w| self.held.another.contains(w)) {
            return Err(format!("the engine's {w} is another weight altogether"));
        }
        let lacks_weight =
            |w: &&Weight| self.layer.weights.matrix(**w).is_none() && self.layer.weights.norm(**w).is_none();
        if let Some(w) = id.stage.weights(g, id.form).iter().find(lacks_weight) {
            return Err(format!("{w} is not in the dump, and there is no model"));
        }
        let split = plan.joins(id.stage, id.form);
        let needs = |split| id.stage.inputs(g, id.form, split);
        let lacks = |s: &Stage| self.tensors.view(id.form).get(*s).is_none() && plan.has(*s, id.form);
        let merges = split && needs(true) != needs(false);
        let lost = |s: &&Stage| lacks(s) && !self.listed(input(id, **s));
        // Without all partial results, splits are merged inside the attention.
        let mut ready = Ready { parts: merges && !needs(true).iter().any(|s| lost(&s)), ..Ready::default() };
        ready.inside = merges && !ready.parts;
        let mut wanted: Vec<Stage> = needs(false).to_vec();
        if ready.parts {
            wanted.extend(needs(true));
            // Where every row is merged, nothing reads what its parts were computed from.
            let all = || Phase::ALL.iter().all(|p| !plan.merged(id.form, *p).1);
            if id.stage == Stage::Out || self.settings.captured.is_some() && all() {
                wanted = needs(true).to_vec();
            }
        } else if merges {
            ready.chained.extend(needs(true).iter().filter(|s| lost(s)));
        }
        for stage in wanted {
            let from = input(id, stage);
            if self.tensors.view(id.form).get(stage).is_none() && plan.has(stage, id.form) {
                if self.listed(from) {
                    return Err(format!("its input {stage} is not there"));
                }
                self.compute(from)?;
            }
            ready.inputs.push(stage);
            ready.chained.extend(self.chain.behind(from).unwrap_or_default());
        }
        ready.chained.sort();
        ready.chained.dedup();
        Ok(ready)
    }

    /// Computes a tensor that was not captured.
    fn compute(&mut self, id: TensorId) -> Result<(), String> {
        (self.progress)(&id.to_string());
        let ready = self.prepare(id).map_err(|why| format!("{} was not captured, and {why}", id.stage))?;
        let (view, contract) = (self.tensors.view(id.form), self.contract_for(id, &ready));
        let made = chain::compute(&self.isolated(id, &ready, &view, &contract), id);
        let Some((tensor, slack)) = made else {
            return Err(format!("{} was not captured, and a weight that it reads is not there", id.stage));
        };
        let behind = ready.chained.into_iter().chain([id.stage]).collect();
        self.chain.keep(id, slack, behind);
        self.tensors.keep(id, tensor);
        Ok(())
    }

    /// The contract under which a stage is compared: less is emulated where its inputs are uncertain.
    pub(super) fn contract_for(&self, id: TensorId, ready: &Ready) -> Contract {
        let own = self.contract.of_form(id.form);
        if self.chain.view(id.form).loose(&ready.inputs) { chain::loosened(&own) } else { own }
    }

    /// A stage with what it is recomputed from.
    pub(super) fn isolated<'s>(
        &'s self,
        id: TensorId,
        ready: &Ready,
        source: &'s View<'s>,
        contract: &'s Contract,
    ) -> Isolated<'s> {
        Isolated {
            spec: &self.layer.spec,
            case: self.whole.as_deref().filter(|_| ready.inside).unwrap_or(self.case),
            weights: &self.held,
            contract,
            source,
            slacks: self.chain.view(id.form),
            seed: self.settings.seed,
            wanted: None,
            departure: None,
            memory: None,
        }
    }

    /// Tensors that are still to come, or to be computed for one that is.
    pub(super) fn live(&self) -> Vec<TensorId> {
        let g = &self.layer.spec.geometry;
        let (mut live, mut rest): (Vec<TensorId>, Vec<TensorId>) =
            self.pending.iter().partition(|id| self.listed(**id));
        rest.retain(|id| self.chain.behind(*id).is_none());
        let reads = |by: &TensorId, id: &TensorId| {
            [false, true].iter().any(|s| by.stage.inputs(g, by.form, *s).contains(&id.stage))
                && (id.form.is_none() || id.form == by.form)
        };
        while let Some(at) = rest.iter().position(|id| live.iter().any(|by| reads(by, id))) {
            live.push(rest.swap_remove(at));
        }
        live
    }
}
