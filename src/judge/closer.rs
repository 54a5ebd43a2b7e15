/*!
A closer look at a tensor that carries evidence: is it explained by something else than was declared, and where is it?

Done while the tensor and its inputs are at hand, for whatever *may* become a finding: the run's budget is only settled
at its end. An explanation is accepted only if under it the tensor passes as a clean one would; one that merely
makes the residual smaller is never named.
*/

use super::cause::{self, Diagnosis, Known};
use super::compare::Isolated;
use super::evidence::Evidence;
use super::localise::{self, Found};
use super::menu;
use super::picture::Picture;
use super::route::{Otherwise, Route};
use super::search::Search;
use super::session::Settings;
use super::unit::Explained;
use crate::trace::{Tensor, TensorId};
use mla_reference::{Phase, RowName, Weight, Weights};
use std::collections::BTreeMap;

/// What a closer look found.
pub struct Look {
    /// Where.
    pub found: Option<Found>,
    /// The same as a picture.
    pub picture: Option<Picture>,
    /// Another contract or convention that explains it.
    pub explained: Option<Explained>,
    /// Contracts and conventions tried.
    pub tried: usize,
    /// Why, where neither explains it.
    pub diagnosis: Option<Diagnosis>,
}

/// Weights that nobody captured: the file's, and which.
pub struct Unknown<'a> {
    /// The file's weights.
    pub file: &'a dyn Weights,
    /// Those that were not captured.
    pub weights: Vec<Weight>,
}

/// Looks at one tensor; what was tried for one phase serves the other.
pub struct Closer<'a> {
    isolated: &'a Isolated<'a>,
    id: TensorId,
    tensor: &'a Tensor,
    settings: &'a Settings,
    unknown: Option<Unknown<'a>>,
    known: &'a Known,
    tried: Vec<(Explained, BTreeMap<Phase, Evidence>)>,
}

impl<'a> Closer<'a> {
    /// Nothing is computed before somebody looks.
    pub fn new(
        isolated: &'a Isolated<'a>,
        id: TensorId,
        tensor: &'a Tensor,
        settings: &'a Settings,
        unknown: Option<Unknown<'a>>,
        known: &'a Known,
    ) -> Closer<'a> {
        Closer { isolated, id, tensor, settings, unknown, known, tried: Vec::new() }
    }

    /// Looks at one phase.
    pub fn look(
        &mut self,
        phase: Phase,
        evidence: &Evidence,
        name: &dyn Fn(usize) -> Option<RowName>,
    ) -> Look {
        if self.tried.is_empty() {
            self.try_all();
        }
        let log_alpha = self.settings.budget.log_alpha();
        let passes = |e: &BTreeMap<Phase, Evidence>| {
            e.get(&phase).is_some_and(|e| !e.suspect(log_alpha, &e.tests(name)))
        };
        let explained = self.tried.iter().find(|(_, e)| passes(e)).map(|(what, _)| what.clone());
        let (found, picture) = localise::find(self.isolated, self.id, self.tensor, phase, evidence).unzip();
        let run = (log_alpha, self.known);
        let diagnosis = explained
            .is_none()
            .then(|| cause::search(self.isolated, self.id, self.tensor, phase, evidence, run, name));
        Look { found, picture, explained, tried: self.tried.len(), diagnosis }
    }

    fn try_all(&mut self) {
        // What was searched for has been tried, and more.
        let searched = self.settings.search && Search::applies(self.id, self.tensor.dtype);
        let mut all = match searched {
            true => Vec::new(),
            false => menu::entries(self.isolated.contract, self.id.stage, self.id.form),
        };
        if let Some(declared) = self.settings.declared.filter(|_| !searched).map(|c| c.of_form(self.id.form))
        {
            all.retain(|(_, c)| *c != declared);
            all.insert(0, (menu::declared(self.isolated.contract, &declared), declared));
        }
        for (name, contract) in all {
            let other = Isolated { contract: &contract, ..*self.isolated };
            self.tried.push((Explained::Contract(name), other.compare(self.id, self.tensor, None)));
        }
        if let Some(Unknown { file, weights }) = &self.unknown {
            let norms = weights.iter().any(|w| w.is_norm());
            let c = self.isolated.contract;
            for route in Route::of_unknown(if norms { c.norm_weights } else { c.weights }) {
                let otherwise = Otherwise::new(self.isolated.weights, *file, weights, route);
                let other = Isolated { weights: &otherwise, ..*self.isolated };
                let counted = other.compare(self.id, self.tensor, None);
                self.tried.push((Explained::Contract(route.name()), counted));
            }
        }
        for (name, spec) in &self.settings.conventions {
            let other = Isolated { spec, ..*self.isolated };
            self.tried.push((Explained::Convention(name.clone()), other.compare(self.id, self.tensor, None)));
        }
    }
}
