/*!
The search for a contract that nobody declared.

Where nothing is said of an engine's roundings, its bits say it: under the right contract nearly all of them are predicted,
under any other many are not. For a tensor of attention, the kernels of the table and then single changes of the best are
tried on a sample of rows (`screen`); the best is then compared in full. It is taken only if under it the tensor passes
as a clean one would and far more bits are explained than before: a fault shows under every contract, so it is never taken
for another contract. Where none is found, the judgement is what it was without a search.

Whatever was tried counts among the tests of the run ([`super::conclude`]).
*/

mod screen;

use super::compare::Isolated;
use super::evidence::Evidence;
use super::menu;
use crate::contracts::variants::{CHANGED, Sight, Try, changes, table};
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::{Contract, Form, Phase, RowName, RowSum, Stage};
use screen::{Sample, Screened, screen};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How many times fewer flips a contract must leave. A wrong one brings 2 to 40 % of flips back, the right one leaves 0 to
/// 3 % (the outputs of real kernels); that it passes as clean is what decides.
const FEWER: f64 = 4.0;
/// Rounds of single changes.
const ROUNDS: usize = 3;
/// How many are screened on all rows, if they leave no more than this.
const FINALISTS: usize = 3;
const MOST: f64 = 0.1;

/// A contract that nobody declared and that explains a tensor's bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FoundContract {
    /// Kernel of the table, with its splits and with what is different.
    pub name: String,
    /// Others that can't be told apart on these rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alike: Vec<String>,
    /// The contract.
    pub contract: Contract,
    /// How many were tried.
    pub tried: usize,
    /// Share of elements that are not the rounded reference, without a contract; of float32 those beyond what rounding
    /// allows.
    pub flips_before: f64,
    /// The same under it.
    pub flips: f64,
    /// The next best that makes other values, and the share that it would have left (on a sample of rows, or of all).
    pub runner_up: Option<(String, f64)>,
}

impl std::fmt::Display for FoundContract {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let percent = |x: f64| format!("{:.2} %", 100.0 * x);
        write!(
            f,
            "{} ({} of elements differ, {} before)",
            self.name,
            percent(self.flips),
            percent(self.flips_before)
        )?;
        write!(f, ", {} tried", self.tried)?;
        match &self.runner_up {
            Some((name, share)) => write!(f, "; runner-up {name} would have left {}", percent(*share)),
            None => Ok(()),
        }
    }
}

/// What a search of one phase of a tensor came to.
pub struct Searched {
    /// Contracts tried.
    pub tried: usize,
    /// What was found, with the evidence under it.
    pub found: Option<(FoundContract, Evidence)>,
    /// Where nothing was found: the nearest, with the share of flips that it leaves.
    pub nearest: Option<(String, f64)>,
}

/// Searches for the contracts of one tensor.
pub struct Search<'s, 'a> {
    /// The tensor's stage under no declared contract.
    pub isolated: &'s Isolated<'a>,
    /// Which.
    pub id: TensorId,
    /// The engine's.
    pub tensor: &'s Tensor,
    /// ln of the level of all tests together.
    pub log_alpha: f64,
    /// Names of rows.
    pub name: &'s dyn Fn(usize) -> Option<RowName>,
}

impl Search<'_, '_> {
    /// Whether there is anything to search for: attention, norms and rotations with 16-bit outputs, and lse.
    pub fn applies(id: TensorId, dtype: DType) -> bool {
        let narrow = dtype.precision() < DType::F32.precision();
        match id.stage {
            Stage::Lse => true,
            Stage::AttnOut if id.form == Some(Form::Fused) => narrow,
            Stage::AttnOut
            | Stage::QA
            | Stage::QRaw
            | Stage::KvA
            | Stage::QLatent
            | Stage::K
            | Stage::V
            | Stage::PartOut
            | Stage::Out => dtype == DType::F32,
            Stage::OLatent | Stage::AttnIn | Stage::QANormed | Stage::KvCNormed | Stage::Q | Stage::KPe => {
                narrow
            }
            _ => false,
        }
    }

    /// Searches for one phase. `before`: the evidence without a contract; None where there is none, since nothing was known.
    /// `known`: what was found for the output of the same attention.
    pub fn run(&self, phase: Phase, before: Option<&Evidence>, known: Option<&Contract>) -> Searched {
        match self.id.stage {
            Stage::Lse => self.lse(phase, before, known),
            Stage::OLatent => self.attention(phase, before),
            Stage::AttnOut if self.id.form == Some(Form::Fused) => self.attention(phase, before),
            Stage::AttnIn | Stage::QANormed | Stage::KvCNormed | Stage::Q | Stage::KPe => {
                self.elementwise(phase, before)
            }
            _ => self.product(phase, before),
        }
    }

    /// Products of float32: what their left sides are rounded to. It shows in all bits or in none, a thousand times and more
    /// above what rounding does, so what passes is it.
    fn product(&self, phase: Phase, before: Option<&Evidence>) -> Searched {
        let mut searched = Searched { tried: 0, found: None, nearest: None };
        let suspect = |e: &Evidence| e.suspect(self.log_alpha, &e.tests(self.name));
        if !before.is_some_and(suspect) {
            return searched;
        }
        for (name, contract) in menu::ways(self.isolated.contract, self.id.stage) {
            let Some(evidence) = self.compare(&contract, phase) else { continue };
            searched.tried += 1;
            let share = evidence.odd_share();
            if searched.found.is_none() && !suspect(&evidence) {
                let found = FoundContract {
                    name: name.clone(),
                    alike: Vec::new(),
                    contract,
                    tried: 0,
                    flips_before: before.map_or(1.0, Evidence::odd_share),
                    flips: share,
                    runner_up: None,
                };
                searched.found = Some((found, evidence));
            } else if searched.nearest.as_ref().is_none_or(|(_, least)| share < *least) {
                searched.nearest = Some((name, share));
            }
        }
        if let Some((found, _)) = &mut searched.found {
            (found.tried, found.runner_up) = (searched.tried, searched.nearest.take());
        }
        searched
    }

    fn passes(&self, e: &Evidence) -> bool {
        e.clean() && !e.suspect(self.log_alpha, &e.tests(self.name))
    }

    fn compare(&self, contract: &Contract, phase: Phase) -> Option<Evidence> {
        let other = Isolated { contract, ..*self.isolated };
        other.compare(self.id, self.tensor, None).remove(&phase)
    }

    fn attention(&self, phase: Phase, before: Option<&Evidence>) -> Searched {
        let plan = &self.isolated.case.plan;
        let sequences: Vec<(usize, bool)> = plan
            .sequences
            .iter()
            .filter(|s| s.phase() == phase)
            .map(|s| (s.keys(), phase == Phase::Prefill))
            .collect();
        let sample = Sample::new(self.isolated, self.id.form, self.tensor, phase, false);
        let mut tried = Tried { search: self, sample, sequences, all: Vec::new(), same: Vec::new() };
        tried.screen(table(self.isolated.contract, self.id.form));
        for _ in 0..ROUNDS {
            let Some((best, had)) = tried.best() else { break };
            tried.screen(changes(&best));
            // A gain that is no luck of the sample.
            let better = tried.best().is_some_and(|(_, s)| 1.5 * s.flips as f64 + 6.0 < had.flips as f64);
            if !better {
                break;
            }
        }
        let n = tried.all.len();
        let share_before = before.map_or(1.0, Evidence::flip_share);
        // The best that make different values, then the first few of them on all rows: a sample's flips come in bunches, since
        // one cast of P that goes the other way moves a whole row.
        let mut finalists: Vec<(Try, Screened)> = Vec::new();
        for (t, s) in tried.ordered() {
            if finalists.iter().all(|(_, f)| f.digest != s.digest) {
                finalists.push((t, s));
            }
        }
        let some = finalists.iter().take(FINALISTS).filter(|(_, s)| s.share() < MOST).count();
        let whole = Sample::new(self.isolated, self.id.form, self.tensor, phase, true);
        for (t, s) in finalists.iter_mut().take(some) {
            let all = screen(self.isolated, self.id, self.tensor, &t.contract, &whole);
            *s = Screened { digest: s.digest, ..all };
        }
        // What is in the table stands before what is not, unless the difference is plain.
        let rank = |(t, s): &(Try, Screened)| s.flips as f64 * if t.changed { 1.25 } else { 1.0 };
        if let Some(best) = finalists.get_mut(..some) {
            best.sort_by(|a, b| rank(a).total_cmp(&rank(b)));
        }
        for (i, (t, s)) in finalists.iter().enumerate().take(some.min(2)) {
            let Some(evidence) = self.compare(&t.contract, phase) else { continue };
            let flips = evidence.flip_share();
            let rest: Vec<&(Try, Screened)> =
                finalists.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, f)| f).collect();
            // Of a kernel that does not cast P there is nothing to explain: all that do must explain less.
            let uncast = t.contract.softmax.cast().is_none();
            let other =
                rest.iter().find(|(o, _)| o.contract.softmax.cast().is_some()).map(|(_, s)| s.share());
            let least_before = if uncast { other.unwrap_or(0.0) } else { share_before };
            if !self.passes(&evidence) || flips * FEWER > least_before {
                continue;
            }
            let found = FoundContract {
                name: t.name.clone(),
                alike: tried.alike(&t.name, s.digest),
                contract: t.contract,
                tried: n,
                flips_before: share_before,
                flips,
                runner_up: rest.first().map(|(o, s)| (o.name.clone(), s.share())),
            };
            return Searched { tried: n, found: Some((found, evidence)), nearest: None };
        }
        let nearest = finalists.first().map(|(t, s)| (t.name.clone(), s.share()));
        Searched { tried: n, found: None, nearest }
    }

    /// lse: that of the output's contract, of either row sum; where none was found, also one whose row sum took P cast
    /// somewhere.
    fn lse(&self, phase: Phase, before: Option<&Evidence>, known: Option<&Contract>) -> Searched {
        let mut all: Vec<Try> = Vec::new();
        let with = |c: &Contract, row_sum| {
            let mut c =
                Contract { lse: self.isolated.contract.lse, lse_base: self.isolated.contract.lse_base, ..*c };
            c.softmax.row_sum = row_sum;
            c
        };
        match known {
            Some(c) => {
                all.push(Try::new("the contract of the output", with(c, c.softmax.row_sum)));
                for (row_sum, what) in
                    [(RowSum::Rounded, "row sum of cast P"), (RowSum::Unrounded, "row sum of f32 P")]
                {
                    all.push(Try::new(format!("the contract of the output, but {what}"), with(c, row_sum)));
                }
                all.dedup_by(|a, b| a.contract == b.contract);
            }
            None if before.is_some_and(|e| !e.suspect(self.log_alpha, &e.tests(self.name))) => {}
            None => {
                let contract = with(self.isolated.contract, RowSum::Rounded);
                all.push(Try::new("row sum of P that was cast at an unknown place", contract));
            }
        }
        let tried = all.len();
        for t in all {
            let Some(evidence) = self.compare(&t.contract, phase) else { continue };
            if !evidence.suspect(self.log_alpha, &evidence.tests(self.name)) {
                let found = FoundContract {
                    name: t.name,
                    alike: Vec::new(),
                    contract: t.contract,
                    tried,
                    flips_before: before.map_or(1.0, Evidence::flip_share),
                    flips: evidence.flip_share(),
                    runner_up: None,
                };
                return Searched { tried, found: Some((found, evidence)), nearest: None };
            }
        }
        Searched { tried, found: None, nearest: None }
    }

    /// Norms and rotations: every entry of the menu, in full.
    fn elementwise(&self, phase: Phase, before: Option<&Evidence>) -> Searched {
        let mut searched = Searched { tried: 0, found: None, nearest: None };
        if before.is_some_and(|e| self.passes(e)) {
            return searched;
        }
        let share_before = before.map_or(1.0, Evidence::flip_share);
        let mut all: Vec<(Try, f64, Evidence)> = Vec::new();
        for (name, contract) in menu::ways(self.isolated.contract, self.id.stage) {
            let Some(evidence) = self.compare(&contract, phase) else { continue };
            all.push((Try::new(name, contract), evidence.flip_share(), evidence));
        }
        all.sort_by(|a, b| a.1.total_cmp(&b.1));
        searched.tried = all.len();
        let at = all.iter().position(|(_, share, e)| self.passes(e) && share * FEWER <= share_before);
        let Some(at) = at else {
            searched.nearest = all.first().map(|(t, share, _)| (t.name.clone(), *share));
            return searched;
        };
        let (t, flips, evidence) = all.remove(at);
        let alike = all.iter().filter(|(_, share, e)| *share == flips && self.passes(e));
        let found = FoundContract {
            name: t.name,
            alike: alike.map(|(o, ..)| o.name.clone()).collect(),
            contract: t.contract,
            tried: searched.tried,
            flips_before: share_before,
            flips,
            runner_up: all.iter().find(|(_, share, _)| *share != flips).map(|(o, s, _)| (o.name.clone(), *s)),
        };
        searched.found = Some((found, evidence));
        searched
    }
}

/// What was screened, each sight once.
struct Tried<'t, 's, 'a> {
    search: &'t Search<'s, 'a>,
    sample: Sample,
    sequences: Vec<(usize, bool)>,
    all: Vec<(Try, Sight, Screened)>,
    /// Names that make the same of these rows as one of `all`.
    same: Vec<(String, usize)>,
}

impl Tried<'_, '_, '_> {
    fn screen(&mut self, tries: Vec<Try>) {
        for t in tries {
            let sight = Sight::new(&t.contract, &self.sequences);
            if let Some(at) = self.all.iter().position(|(_, s, _)| *s == sight) {
                self.same.push((t.name, at));
                continue;
            }
            let of = self.search;
            let screened = screen(of.isolated, of.id, of.tensor, &t.contract, &self.sample);
            self.all.push((t, sight, screened));
        }
    }

    /// The fewest flips first; of equal ones the first that was tried.
    fn ordered(&self) -> Vec<(Try, Screened)> {
        let mut all: Vec<(Try, Screened)> = self.all.iter().map(|(t, _, s)| (t.clone(), *s)).collect();
        all.sort_by_key(|(_, s)| s.flips);
        all
    }

    fn best(&self) -> Option<(Try, Screened)> {
        self.all.iter().min_by_key(|(.., s)| s.flips).map(|(t, _, s)| (t.clone(), *s))
    }

    /// Kernels of the table that make the same values.
    fn alike(&self, name: &str, digest: u64) -> Vec<String> {
        let own = self.all.iter().filter(|(.., s)| s.digest == digest).map(|(t, ..)| t.name.clone());
        let same =
            self.same.iter().filter(|(_, at)| self.all[*at].2.digest == digest).map(|(n, _)| n.clone());
        let table = |n: &String| n != name && !n.contains(CHANGED);
        own.chain(same).filter(table).collect()
    }
}

/// What was found, by form and phase, of outputs of attention.
pub type Known = BTreeMap<(Option<Form>, Phase), Contract>;
