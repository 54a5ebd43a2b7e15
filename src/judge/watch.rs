/*!
A sink in front of the judge that asks other people's rules about some stages: the outputs of attention for `--gates`,
those at which a fault acts for studies of sensitivity.

The reference is the plain float64 stage from the engine's own inputs: softmax over all keys at once, nothing cast,
no splits. `low` is what an eager 16-bit program makes of the same inputs: scores rounded, softmax of the rounded
scores in float64, the normalised P rounded, P·V rounded; of a product, its rounded value. It keeps the inputs a
second time: with the flag, memory for tensors doubles.
*/

use super::gates::{Gates, Rule};
use super::session::expected;
use super::verdict::Verdict;
use crate::case::Case;
use crate::engine::{Sink, SinkError};
use crate::model::{Grid, Layer};
use crate::trace::store::Store;
use crate::trace::{Tensor, TensorId};
use crate::written::{self, Name};
use mla_numeric::DType;
use mla_reference::attention::{Attended, Head, part, weigh};
use mla_reference::product::Rows;
use mla_reference::{Chunk, Contract, Evaluator, Form, Phase, Plan, Route, Stage, Terms, Weight, Weights};
use ndarray::Array2;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The outputs of attention.
pub const OUTPUTS: [Stage; 4] = [Stage::AttnOut, Stage::OLatent, Stage::Lse, Stage::Out];

/// What the rules say of one output in one phase. Part of the report; names are stable.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GateReport {
    /// The stage.
    #[serde(deserialize_with = "written::name")]
    pub tensor: Name,
    /// Form.
    pub form: Option<Form>,
    /// Phase.
    pub phase: Phase,
    /// Our verdict of the same unit.
    pub verdict: Verdict,
    /// Rule by rule.
    pub rules: Vec<Rule>,
}

/// The sink.
pub struct Watch<'a> {
    inner: &'a mut dyn Sink,
    on: Option<Inner<'a>>,
}

struct Inner<'a> {
    stages: &'a [Stage],
    layer: &'a Layer<'a>,
    case: &'a Case,
    /// The case's plan without splits.
    plan: Plan,
    dtype: DType,
    weights: Held<'a>,
    pending: Vec<TensorId>,
    tensors: Store,
    all: Vec<GateReport>,
}

/// The weights of some stages, on the contract's grid.
struct Held<'a> {
    matrices: Grid<'a>,
    norms: Vec<(Weight, Vec<f64>)>,
}

impl<'a> Held<'a> {
    fn new(stages: &[Stage], layer: &'a Layer<'a>, contract: &Contract) -> Held<'a> {
        let g = &layer.spec.geometry;
        let forms = [None, Some(Form::Fused), Some(Form::Absorbed)];
        let all = stages.iter().flat_map(|s| forms.iter().flat_map(|f| s.weights(g, *f)));
        let mut roles: Vec<Weight> = all.copied().collect();
        roles.sort();
        roles.dedup();
        let rounded = |w: &Weight| {
            let mut values = layer.weights.norm(*w)?.to_vec();
            contract.norm_weights.round_slice(&mut values);
            Some((*w, values))
        };
        Held {
            matrices: Grid::new(layer.weights, contract.weights, &roles),
            norms: roles.iter().filter_map(rounded).collect(),
        }
    }
}

impl Weights for Held<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        self.matrices.matrix(weight)
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.norms.iter().find(|(w, _)| *w == weight).map(|(_, v)| v.as_slice())
    }
}

impl<'a> Watch<'a> {
    /// In front of `inner`; where no stage is asked about, everything just passes.
    pub fn new(
        stages: &'a [Stage],
        layer: &'a Layer<'a>,
        case: &'a Case,
        forms: &[Form],
        contract: &Contract,
        inner: &'a mut dyn Sink,
    ) -> Watch<'a> {
        let on = (!stages.is_empty()).then(|| Inner {
            stages,
            layer,
            case,
            plan: Plan {
                splits: 1,
                route: Route { context_chunk: None, ..case.plan.route },
                ..case.plan.clone()
            },
            dtype: contract.activations,
            weights: Held::new(stages, layer, contract),
            pending: expected(&layer.spec, case, forms),
            tensors: Store::default(),
            all: Vec::new(),
        });
        Watch { inner, on }
    }

    /// What was said; verdicts are still to be filled in ([`with_verdicts`]).
    pub fn finish(self) -> Vec<GateReport> {
        self.on.map(|i| i.all).unwrap_or_default()
    }
}

/// Puts our verdicts beside the rules'.
pub fn with_verdicts(gates: &mut [GateReport], units: &[super::Unit]) {
    for g in gates {
        let same = |u: &&super::Unit| u.tensor == g.tensor && u.form == g.form && u.phase == Some(g.phase);
        if let Some(u) = units.iter().find(same) {
            g.verdict = u.verdict;
        }
    }
}

impl Inner<'_> {
    fn take(&mut self, id: TensorId, tensor: &Tensor) {
        let g = &self.layer.spec.geometry;
        self.pending.retain(|p| *p != id);
        let want = Tensor::zeros(id, &self.case.plan, g, tensor.dtype);
        // What has another shape is the judge's business, and no input of anything.
        if (&want.shape, want.rows, want.bytes.len()) == (&tensor.shape, tensor.rows, tensor.bytes.len()) {
            if self.stages.contains(&id.stage) {
                self.ask(id, tensor);
            }
            self.tensors.keep(id, tensor.clone());
        }
        self.tensors.release(&self.pending, g);
    }

    fn ask(&mut self, id: TensorId, tensor: &Tensor) {
        let g = &self.layer.spec.geometry;
        let source = self.tensors.view(id.form);
        if id.stage.inputs(g, id.form, false).iter().any(|s| source.get(*s).is_none()) {
            return;
        }
        let phases: Vec<Phase> = self
            .plan
            .names(id.stage, id.form)
            .iter()
            .map(|n| n.request.map_or(Phase::Prefill, |r| self.plan.request_phase(r)))
            .collect();
        let counted = Mutex::new(BTreeMap::<Phase, Gates>::new());
        let low = self.dtype;
        let visit = |c: Chunk| {
            let eager = match &c.terms {
                Terms::Attention { attended, head, lse: false } => Some(eager(attended, head, low)),
                _ => None,
            };
            let mut mine = BTreeMap::<Phase, Gates>::new();
            let mut o = vec![0.0; c.cols.len()];
            for (i, x) in c.x.rows().into_iter().enumerate() {
                let row = c.rows.start + i;
                tensor.read(row, c.cols.clone(), &mut o);
                let e = eager.as_ref().map(|e| e.row(i).to_vec());
                mine.entry(phases[row]).or_default().row(
                    (row, c.cols.start),
                    &o,
                    &x.to_vec(),
                    e.as_deref(),
                    low,
                );
            }
            let mut all = counted.lock().unwrap_or_else(PoisonError::into_inner);
            for (phase, g) in mine {
                all.entry(phase).or_default().merge(g);
            }
        };
        Evaluator {
            spec: &self.layer.spec,
            plan: &self.plan,
            given: &self.case.given,
            weights: &self.weights,
            contract: &Contract::exact(),
            source: &source,
            wanted: None,
            departure: None,
            memory: None,
        }
        .evaluate(id.stage, id.form, &visit);
        for (phase, gates) in counted.into_inner().unwrap_or_else(PoisonError::into_inner) {
            self.all.push(GateReport {
                tensor: id.stage.name(),
                form: id.form,
                phase,
                verdict: Verdict::NotCompared,
                rules: gates.rules(id.stage == Stage::Lse),
            });
        }
    }
}

/// Attention of one head as an eager program in `low` computes it.
fn eager(a: &Attended, head: &Head, low: DType) -> Array2<f64> {
    let mut p = a.s.mapv(|s| low.round(s));
    for mut row in p.rows_mut() {
        let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if most == f64::NEG_INFINITY {
            row.fill(0.0);
            continue;
        }
        row.mapv_inplace(|s| libm::exp(s - most));
        let total = row.sum();
        row.mapv_inplace(|v| low.round(v / total));
    }
    let v = part(&head.v, a.range.clone());
    let mut x = weigh(p.view(), &v);
    debug_assert_eq!(x.ncols(), v.cols());
    x.mapv_inplace(|v| low.round(v));
    x
}

impl Sink for Watch<'_> {
    fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        self.inner.weight(weight, rows)
    }
    fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
        self.inner.norm(weight, values)
    }
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.inner.evidence(id, what)
    }
    fn weight_evidence(&mut self, weight: Weight, what: &str) -> Result<(), SinkError> {
        self.inner.weight_evidence(weight, what)
    }
    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        let altered = self.inner.tensor(id, tensor)?;
        if let Some(i) = &mut self.on {
            i.take(id, tensor);
        }
        Ok(altered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::attention::{attend, strided};
    use ndarray::array;

    /// Scores 0 and 1.003: in bf16 1.0; P = 1/(1+e), e/(1+e) → 0.26953125, 0.73046875; times (1, 2) = 1.73046875,
    /// in bf16 1.734375 (1.7265625 and 1.734375 lie around it, 1.73046875 is the middle: even significand wins).
    #[test]
    fn eager_rounds_scores_probabilities_and_the_product() {
        let (q, k, v) = (array![[1.0]], array![[0.0], [1.003]], array![[1.0], [2.0]]);
        let visible = [2];
        let stats = mla_reference::KeyStats::default();
        let head = Head {
            q: q.view(),
            k: strided(&k),
            v: strided(&v),
            visible: &visible,
            scale: 1.0,
            stats: &stats,
        };
        let a = attend(&head, 0..2, &Contract::exact());
        let e = std::f64::consts::E;
        let p = [DType::Bf16.round(1.0 / (1.0 + e)), DType::Bf16.round(e / (1.0 + e))];
        assert_eq!(p, [0.26953125, 0.73046875]);
        assert_eq!(eager(&a, &head, DType::Bf16)[[0, 0]], DType::Bf16.round(p[0] + 2.0 * p[1]));
        // Without rounding it is something else.
        assert!((a.x[[0, 0]] - (p[0] + 2.0 * p[1])).abs() > 1e-4);
    }
}
