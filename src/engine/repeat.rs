/*!
An engine run over and over: the same numbers must come out with the same bits.

What differs from run to run was computed in an order that nobody chose, or of memory that somebody else wrote: a race, as
a rule. Its values may be rounding each time, so only the bits tell. The last run is the one that is judged; what an
earlier one had otherwise is evidence against the tensor.
*/

use super::{Description, Engine, EngineError, Sink, SinkError, cpu};
use crate::case::Case;
use crate::model::Layer;
use crate::probe::place;
use crate::trace::{Tensor, TensorId};
use mla_reference::product::Rows;
use mla_reference::{Contract, Form, Geometry, Spec, Stage, Weight};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

/// An engine that is run several times for one.
pub struct Repeated<'a> {
    engine: &'a dyn Engine,
    times: usize,
}

impl<'a> Repeated<'a> {
    /// Runs `times` times, at least once.
    pub fn new(engine: &'a dyn Engine, times: usize) -> Repeated<'a> {
        Repeated { engine, times: times.max(1) }
    }
}

impl Engine for Repeated<'_> {
    fn describe(&self) -> Description {
        self.engine.describe()
    }

    fn spec<'a>(&self, layer: &'a Layer) -> Cow<'a, Spec> {
        self.engine.spec(layer)
    }

    fn seams(&self) -> Option<&cpu::Seams> {
        self.engine.seams()
    }

    fn launched(&self, file: &str, entries: &[&str]) -> Option<bool> {
        self.engine.launched(file, entries)
    }

    fn contract(&self) -> Contract {
        self.engine.contract()
    }

    fn run(
        &self,
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        let mut known = Known {
            geometry: layer.spec.geometry,
            case,
            times: self.times,
            run: 1,
            first: HashMap::new(),
            other: HashMap::new(),
            of_weights: HashMap::new(),
            differ: HashSet::new(),
        };
        while known.run < self.times {
            self.engine.run(layer, case, forms, &mut Apart { known: &mut known, sink: None })?;
            known.run += 1;
        }
        self.engine.run(layer, case, forms, &mut Apart { known: &mut known, sink: Some(sink) })
    }
}

/// What runs so far gave.
struct Known<'a> {
    geometry: Geometry,
    case: &'a Case,
    times: usize,
    /// The run that is under way, from 1.
    run: usize,
    first: HashMap<TensorId, Tensor>,
    /// What is said of tensors that had other bits once.
    other: HashMap<TensorId, String>,
    /// What is said of weights.
    of_weights: HashMap<Weight, String>,
    /// All that had other bits once.
    differ: HashSet<TensorId>,
}

impl Known<'_> {
    /// Keeps the first run's tensor, and holds others against it.
    fn take(&mut self, id: TensorId, tensor: &Tensor) {
        let Some(first) = self.first.get(&id) else {
            if self.times > 1 {
                self.first.insert(id, tensor.clone());
            }
            return;
        };
        if first.bytes == tensor.bytes || !self.differ.insert(id) {
            return;
        }
        // Computed from other bits: that says nothing of it.
        let joined = self.case.plan.joins(id.stage, id.form);
        let of = |stage: Stage| id.form.map_or(TensorId::shared(stage), |form| TensorId::of(stage, form));
        let inputs = id.stage.inputs(&self.geometry, id.form, joined);
        if inputs.iter().any(|stage| self.differ.contains(&of(*stage))) {
            return;
        }
        let (run, times) = (self.run, self.times);
        let n = tensor.dtype.bytes();
        let differs = || {
            let pairs = first.bytes.chunks(n).zip(tensor.bytes.chunks(n)).enumerate();
            pairs.filter(|(_, (a, b))| a != b).map(|(i, _)| i)
        };
        let said = match differs().next() {
            Some(at) => {
                let (row, col) = (at / first.cols.max(1), at % first.cols.max(1));
                let form = id.form.unwrap_or(Form::Fused);
                let all = first.len();
                format!(
                    "run {run} of {times} gave other bits than the first: {} of {all} elements; first at {}: {:e}, before {:e}",
                    differs().count(),
                    place(self.case, form, id.stage, first, row, col),
                    tensor.get(row, col),
                    first.get(row, col)
                )
            }
            None => format!("run {run} of {times} gave another number of elements than the first"),
        };
        self.other.insert(id, said);
    }
}

/// Takes a run's tensors; the last run's go on to be judged.
struct Apart<'a, 'c, 's> {
    known: &'a mut Known<'c>,
    sink: Option<&'s mut dyn Sink>,
}

impl Sink for Apart<'_, '_, '_> {
    fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
        let Some(sink) = &mut self.sink else { return Ok(()) };
        if let Some(said) = self.known.of_weights.remove(&weight) {
            sink.weight_evidence(weight, &said)?;
        }
        sink.weight(weight, rows)
    }

    fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
        self.sink.as_mut().map_or(Ok(()), |s| s.norm(weight, values))
    }

    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        self.known.take(id, tensor);
        let Some(sink) = &mut self.sink else { return Ok(false) };
        if let Some(said) = self.known.other.remove(&id) {
            sink.evidence(id, &said)?;
        }
        sink.tensor(id, tensor)
    }

    /// What a device saw in an earlier run counts as much: it may show once in many runs.
    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        match &mut self.sink {
            Some(sink) => sink.evidence(id, what),
            None => {
                let said = format!("run {} of {}: {what}", self.known.run, self.known.times);
                self.known.other.entry(id).or_insert(said);
                Ok(())
            }
        }
    }

    fn weight_evidence(&mut self, weight: Weight, what: &str) -> Result<(), SinkError> {
        match &mut self.sink {
            Some(sink) => sink.weight_evidence(weight, what),
            None => {
                let said = format!("run {} of {}: {what}", self.known.run, self.known.times);
                self.known.of_weights.entry(weight).or_insert(said);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{self, EngineKind, Options};
    use crate::judge::{Verdict, origins};
    use crate::model::Model;
    use std::cell::Cell;
    use std::path::Path;

    /// An engine that is right every time, and has one bit otherwise in its `odd`-th run.
    struct Unstable {
        engine: Box<dyn Engine>,
        id: TensorId,
        odd: usize,
        runs: Cell<usize>,
    }

    /// Turns the last bit of one element.
    struct Turn<'a> {
        id: TensorId,
        sink: &'a mut dyn Sink,
    }

    impl Sink for Turn<'_> {
        fn weight(&mut self, weight: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
            self.sink.weight(weight, rows)
        }
        fn norm(&mut self, weight: Weight, values: &[f64]) -> Result<(), SinkError> {
            self.sink.norm(weight, values)
        }
        fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
            if id == self.id {
                let bits = tensor.bits(1, 7) ^ 1;
                tensor.set_bits(1, 7, bits);
            }
            self.sink.tensor(id, tensor)
        }
        fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
            self.sink.evidence(id, what)
        }
    }

    impl Engine for Unstable {
        fn describe(&self) -> Description {
            self.engine.describe()
        }
        fn contract(&self) -> Contract {
            self.engine.contract()
        }
        fn run(
            &self,
            layer: &Layer,
            case: &Case,
            forms: &[Form],
            sink: &mut dyn Sink,
        ) -> Result<(), EngineError> {
            self.runs.set(self.runs.get() + 1);
            if self.runs.get() != self.odd {
                return self.engine.run(layer, case, forms, sink);
            }
            self.engine.run(layer, case, forms, &mut Turn { id: self.id, sink })
        }
    }

    /// The tensors at fault, each with what is said of it, of `times` runs of which the `odd`-th has one bit otherwise; and
    /// the runs that there were.
    fn runs(kind: EngineKind, times: usize, odd: usize) -> (Verdict, Vec<(String, String)>, usize) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/glm5dims.Q4_K_M.gguf");
        let model = Model::open(&file).unwrap();
        let options = Options {
            engine: kind,
            forms: vec![Form::Absorbed],
            batch: "0+2,3+1".parse().unwrap(),
            regimes: vec![mla_reference::Regime::Random],
            repeat: times,
            ..Options::default()
        };
        let engine = check::engine(&options).unwrap();
        let id = TensorId::of(Stage::OLatent, Form::Absorbed);
        let engine = Unstable { engine, id, odd, runs: Cell::new(0) };
        let stored = model.weights(0).unwrap();
        let layer = Layer { index: 0, spec: model.spec(&options.reading), weights: &stored };
        let case = check::draw(&layer, &options).unwrap();
        let repeated = Repeated::new(&engine, times);
        let judged =
            check::judge(&layer, &case, &options, &repeated, check::Beside::default(), &|_| ()).unwrap();
        let units = judged.units;
        let said = origins(&units).map(|u| (u.title(), u.evidence.join("; "))).collect();
        (crate::judge::overall(&units), said, engine.runs.get())
    }

    #[test]
    fn one_other_bit_in_one_run_is_a_fault_of_its_tensor() {
        for (times, odd) in [(20, 7), (2, 1), (3, 3)] {
            let (verdict, said, ran) = runs(EngineKind::Cpu, times, odd);
            assert_eq!((verdict, ran), (Verdict::Fault, times), "{said:?}");
            let (first, text) = &said[0];
            assert_eq!((first.as_str(), said.len()), ("absorbed/o_latent, prefill", 1), "{said:?}");
            // A first run that is the odd one shows in the second.
            let shown = if odd == 1 { 2 } else { odd };
            assert!(
                text.contains(&format!("run {shown} of {times} gave other bits than the first: 1 of ")),
                "{text}"
            );
            let place = "first at absorbed/o_latent, request 0+2 token 1, head 0, latent 7: ";
            assert!(text.contains(place), "{text}");
        }
    }

    #[test]
    fn an_engine_with_the_same_bits_is_as_it_was() {
        let (verdict, said, ran) = runs(EngineKind::Cpu, 20, 0);
        assert_eq!((said.len(), ran), (0, 20), "{said:?}");
        assert_ne!(verdict, Verdict::Fault);
        let (_, said, ran) = runs(EngineKind::Ptx, 3, 2);
        assert_eq!((said.len(), ran, said[0].0.as_str()), (1, 3, "absorbed/o_latent, prefill"), "{said:?}");
    }
}
