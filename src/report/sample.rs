/*! Small reports for unit tests. */

use super::{CaseReport, LayerReport, ModelReport, RUN, Report};
use crate::engine::Description;
use crate::judge::{Budget, Digest, Power, Unit, Verdict, Which, Worst};
use crate::model::Layout;
use crate::probe::{Outcome, Probe};
use crate::trace::TensorId;
use mla_numeric::DType;
use mla_reference::{Axis, Contract, Form, Phase, Stage, Weight};
use std::collections::BTreeMap;

/// A tensor that was compared.
pub fn unit(stage: Stage, form: Option<Form>, phase: Phase, verdict: Verdict, flips: u64) -> Unit {
    let worst = Worst {
        index: vec![(Axis::Token, 3), (Axis::Head, 1), (Axis::Value, 2)],
        request: None,
        within: None,
        sequence: None,
        engine: 0.1 + 0.2,
        reference: 0.3,
        ulps: 0.5,
        share_of_bound: 0.75,
    };
    Unit {
        axes: vec![Axis::Token, Axis::Head, Axis::Value],
        shape: vec![10, 8, 100],
        dtype: Some(DType::Bf16),
        elements: 8_000,
        flips,
        note: None,
        worst: Some(worst),
        engine: Some(Digest { norm: 12.5, checksum: -0.1 }),
        reference: Some(Digest { norm: 12.5, checksum: -0.1 }),
        power: Some(Power { gain: Some(2e-4), scale: None, sampled: 8_000, ..Power::default() }),
        ..Unit::without_data(Which::Tensor(TensorId { stage, form }), Some(phase), verdict, "")
    }
}

/// A layer by engine cpu: a weight, a shared stage, an output in both forms and phases, a probe of each form.
pub fn layer(index: usize) -> LayerReport {
    let mut weight = Unit::without_data(Which::Weight(Weight::WUk), None, Verdict::Exact, "");
    (weight.elements, weight.note) = (64, None);
    let mut tensors = vec![weight, unit(Stage::KvA, None, Phase::Prefill, Verdict::Rounding, 10)];
    for form in Form::ALL {
        for phase in Phase::ALL {
            tensors.push(unit(Stage::AttnOut, Some(form), phase, Verdict::Rounding, 20));
        }
    }
    let held = || Outcome::Held { what: "equal".into(), elements: 5 };
    let probes = Form::ALL.map(|form| Probe { name: "one-key", form, outcome: held(), says: "both sides" });
    LayerReport {
        layer: index,
        verdict: Verdict::Rounding,
        engine: Description::plain("cpu", "emulated"),
        contract: Contract::exact(),
        contract_text: "exact".into(),
        judged: None,
        weights: Vec::new(),
        stacks: Vec::new(),
        layout: Layout::Split,
        case: CaseReport {
            batch: "0+3,20+1".into(),
            regimes: vec!["random"],
            sequences: vec![(0, "random"), (1, "random")],
            dtype: "bf16",
            seed: 0,
            page_size: 64,
            splits: 1,
            routed: None,
            context_chunk: None,
            hidden: "drawn",
            notes: Vec::new(),
        },
        budget: Budget::default(),
        geometry: None,
        names: BTreeMap::new(),
        scalars: Vec::new(),
        tensors,
        probes: probes.to_vec(),
        invariance: Vec::new(),
        probe_seconds: 0.25,
        gates: Vec::new(),
        cumulative: Vec::new(),
        reference_cache: None,
        reference: Vec::new(),
        odd: Vec::new(),
        notes: Vec::new(),
        ranks: None,
        forms_agree: None,
        seconds: 1.0 + index as f64,
        command: None,
    }
}

/// A run of some layers of a model of four, of which the last three have MLA attention.
pub fn report(layers: &[usize]) -> Report {
    let model = ModelReport {
        files: vec!["models/a.gguf".into()],
        bytes: vec![1_000],
        architecture: "deepseek2",
        name: Some("A".into()),
        layers: 4,
        mla_layers: vec![1, 2, 3],
        warnings: Vec::new(),
    };
    let mut r = Report {
        convention: "hf (auto)",
        engine_choice: "chosen by --engine".into(),
        layers: layers.iter().map(|l| layer(*l)).collect(),
        not_judged: vec!["anything outside attention".into()],
        ..Report::empty(RUN, model, format!("mla-check run models/a.gguf --layer {layers:?}"))
    };
    concluded(&mut r);
    r
}

/// Sets the verdict of the whole.
pub fn concluded(r: &mut Report) {
    r.verdict = r.worst();
    r.exit = r.verdict.exit(false);
}

/// Makes a tensor of a layer a fault.
pub fn spoil(r: &mut Report, layer: usize, form: Form, phase: Phase) {
    let l = r.layers.iter_mut().find(|l| l.layer == layer).unwrap();
    let u = l.tensors.iter_mut().find(|u| u.form == Some(form) && u.phase == Some(phase)).unwrap();
    u.verdict = Verdict::Fault;
    u.beyond = 1;
    u.evidence = vec!["100 % of elements <differ>, a: b\nsecond line".into()];
    l.verdict = Verdict::Fault;
    concluded(r);
}
