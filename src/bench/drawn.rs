/*!
A few requests of a large run, judged as a run of their own.

The judge recomputes in float64, which takes minutes where a GPU takes a millisecond. What it says of an output depends on
rows alone that it is computed from: of a decode step on one request's, of a prefill on a token's and those before it. So
some requests, and some runs of tokens of long ones, are drawn by seed; their rows of every tensor make a case of a few
requests, and the judge judges that as any other. Tokens before a drawn run are context there.
*/

use crate::case::{Batch, Case, Request, Stream};
use crate::engine::{Sink, SinkError};
use crate::trace::{Tensor, TensorId};
use mla_reference::product::Rows;
use mla_reference::{Form, Geometry, Given, Plan, Sequence, Stage, Weight};
use ndarray::{Array2, Axis, s};

/// Sequences that are drawn of many, the first and the last among them.
const SEQUENCES: usize = 4;
/// Tokens of a drawn run of a prefill.
const TOKENS: usize = 32;
/// Stream of what is drawn.
const DRAWN: u64 = 40;

/// Some tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    sequence: usize,
    /// First of its new tokens, and how many.
    from: usize,
    tokens: usize,
}

/// Takes a run's tensors and keeps the drawn rows.
pub struct Drawn<'a> {
    full: &'a Case,
    geometry: &'a Geometry,
    pieces: Vec<Piece>,
    plan: Plan,
    /// Where each sequence's rows of attention begin, by form, of its parts, and of its keys.
    starts: Starts,
    kept: Vec<(TensorId, Tensor)>,
    seen: Vec<(TensorId, String)>,
}

/// A few requests as a run of their own.
pub struct Few {
    /// Requests and what is given.
    pub case: Case,
    /// Tensors in the order in which they came.
    pub tensors: Vec<(TensorId, Tensor)>,
    /// What the device saw go wrong.
    pub seen: Vec<(TensorId, String)>,
}

struct Starts {
    rows: [Vec<usize>; 2],
    parts: [Vec<usize>; 2],
    keys: Vec<usize>,
}

impl Starts {
    fn of(plan: &Plan) -> Starts {
        let none = vec![0; plan.sequences.len()];
        let mut starts =
            Starts { rows: [none.clone(), none.clone()], parts: [none.clone(), none.clone()], keys: none };
        for form in Form::ALL {
            plan.attention_rows(Some(form)).for_each(|(i, _, r)| starts.rows[form as usize][i] = r.start);
            let parts = plan.part_sequences(form);
            parts.for_each(|(i, _, _, own)| starts.parts[form as usize][i] = own.start);
        }
        plan.key_rows().for_each(|(i, _, r)| starts.keys[i] = r.start);
        starts
    }
}

impl<'a> Drawn<'a> {
    /// Draws.
    pub fn new(full: &'a Case, geometry: &'a Geometry, seed: u64) -> Drawn<'a> {
        let pieces = pieces(&full.plan, seed);
        let plan = plan(&full.plan, &pieces);
        let starts = Starts::of(&full.plan);
        Drawn { full, geometry, pieces, plan, starts, kept: Vec::new(), seen: Vec::new() }
    }

    /// How many requests, and rows of attention, in words.
    pub fn describe(&self) -> String {
        let of = &self.full.plan;
        let mut requests: Vec<usize> = self.pieces.iter().map(|p| p.sequence).collect();
        requests.dedup();
        let all: usize = of.sequences.iter().map(|s| s.tokens.len()).sum();
        format!(
            "{} of {} tokens, of {} of {} requests, all heads",
            self.plan.tokens(),
            all,
            requests.len(),
            of.sequences.len()
        )
    }

    /// The row of the run that is this one here; None: of a slot that nobody owns.
    fn rows(&self, id: TensorId) -> Vec<Option<usize>> {
        let of = &self.full.plan;
        let form = id.form.unwrap_or(Form::Fused) as usize;
        let names = self.plan.names(id.stage, id.form);
        let row = |n: &mla_reference::RowName| {
            let piece = self.pieces[n.sequence.or(n.request)?];
            let sequence = &of.sequences[piece.sequence];
            Some(match id.stage {
                Stage::Cache => sequence.slots[n.index],
                Stage::K | Stage::V => self.starts.keys[piece.sequence] + n.index,
                Stage::PartO | Stage::PartLse => {
                    let all = id.form.map_or(0, |f| of.part_rows(f));
                    n.split.unwrap_or(0) * all
                        + self.starts.parts[form][piece.sequence]
                        + piece.from
                        + n.index
                }
                Stage::OLatent | Stage::Lse | Stage::AttnOut | Stage::Out => {
                    self.starts.rows[form][piece.sequence] + piece.from + n.index
                }
                _ => sequence.tokens.start + piece.from + n.index,
            })
        };
        names.iter().map(row).collect()
    }

    /// What was drawn.
    pub fn finish(self) -> Few {
        let cache = self.kept.iter().find(|(id, _)| id.stage == Stage::Cache).map(|(_, t)| t);
        let width = self.geometry.cache();
        let context = self.pieces.iter().zip(&self.plan.sequences).map(|(piece, own)| {
            let given = &self.full.given.context[piece.sequence];
            let mut rows = Array2::zeros((own.context, width));
            let known = given.nrows().min(own.context);
            rows.slice_mut(s![..known, ..]).assign(&given.slice(s![..known, ..]));
            if let Some(cache) = cache {
                // What the tokens before the drawn ones left there.
                for (position, &slot) in own.slots.iter().enumerate().take(own.context).skip(known) {
                    rows.row_mut(position).assign(&cache.block(slot..slot + 1, 0..width).row(0));
                }
            }
            rows
        });
        let context = context.collect();
        let tokens: Vec<usize> = self
            .pieces
            .iter()
            .flat_map(|p| {
                let first = self.full.plan.sequences[p.sequence].tokens.start + p.from;
                first..first + p.tokens
            })
            .collect();
        let hidden = self.full.given.hidden.select(Axis(0), &tokens);
        let requests =
            self.plan.sequences.iter().map(|s| Request { context: s.context, new: s.tokens.len() });
        let case = Case {
            batch: Batch(requests.collect()),
            regimes: self.full.regimes.clone(),
            given: Given { hidden, context, ..Given::default() },
            notes: Vec::new(),
            plan: self.plan,
        };
        Few { case, tensors: self.kept, seen: self.seen }
    }
}

impl Sink for Drawn<'_> {
    /// Weights are judged where their kernels are: by `run`. Here stages are judged with the file's.
    fn weight(&mut self, _: Weight, _: &dyn Rows) -> Result<(), SinkError> {
        Ok(())
    }

    fn norm(&mut self, _: Weight, _: &[f64]) -> Result<(), SinkError> {
        Ok(())
    }

    fn tensor(&mut self, id: TensorId, tensor: &mut Tensor) -> Result<bool, SinkError> {
        let mut few = Tensor::zeros(id, &self.plan, self.geometry, tensor.dtype);
        // Slots that nobody owns hold poison, a NaN.
        few.bytes.fill(0xff);
        for (here, there) in self.rows(id).into_iter().enumerate() {
            if let Some(there) = there.filter(|r| *r < tensor.rows && few.cols == tensor.cols) {
                few.write_bytes(here, 0, tensor.bytes_of(there, 0..tensor.cols));
            }
        }
        self.kept.push((id, few));
        Ok(false)
    }

    fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
        self.seen.push((id, what.into()));
        Ok(())
    }
}

/// Which tokens: those of up to [`SEQUENCES`] sequences; of a long prefill the last ones and some others.
fn pieces(of: &Plan, seed: u64) -> Vec<Piece> {
    let mut rng = Stream::new(seed, DRAWN, 0);
    let all = of.sequences.len();
    let mut taken: Vec<usize> = if all <= SEQUENCES {
        (0..all).collect()
    } else {
        let between = (0..SEQUENCES - 2).map(|_| 1 + rng.below(all - 2)).collect::<Vec<_>>();
        [0].into_iter().chain(between).chain([all - 1]).collect()
    };
    taken.sort_unstable();
    taken.dedup();
    let mut pieces = Vec::new();
    for sequence in taken {
        let new = of.sequences[sequence].tokens.len();
        if new <= 2 * TOKENS {
            pieces.push(Piece { sequence, from: 0, tokens: new });
            continue;
        }
        let last = new - TOKENS;
        for from in [rng.below(last - TOKENS + 1), last] {
            pieces.push(Piece { sequence, from, tokens: TOKENS });
        }
    }
    pieces
}

/// The plan of the pieces, each a request of its own, in whole pages one behind the other.
fn plan(of: &Plan, pieces: &[Piece]) -> Plan {
    let (mut positions, mut token_request, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
    let mut pages = 0;
    for (request, piece) in pieces.iter().enumerate() {
        let full = &of.sequences[piece.sequence];
        let first = positions.len();
        let tokens = full.tokens.start + piece.from..full.tokens.start + piece.from + piece.tokens;
        positions.extend_from_slice(&of.positions[tokens]);
        token_request.extend(std::iter::repeat_n(request, piece.tokens));
        let context = full.context + piece.from;
        let keys = context + piece.tokens;
        let slots = (0..keys).map(|k| pages * of.page_size + k).collect();
        pages += keys.div_ceil(of.page_size);
        let (tokens, regime) = (first..positions.len(), full.regime);
        sequences.push(Sequence { request, regime, tokens, context, slots });
    }
    let (page_size, splits, ranks, route) = (of.page_size, of.splits, of.ranks, of.route);
    Plan { positions, token_request, sequences, page_size, pages, splits, ranks, route }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Draw;
    use crate::check::Options;
    use crate::engine::Engine;
    use crate::engine::cpu::CpuEngine;
    use crate::judge::{Session, Settings, Verdict, overall};
    use crate::model::{Layer, Model};
    use mla_reference::{Regime, Route};
    use std::path::Path;

    /// Judges what was drawn of a run of the CPU engine over these requests; `spoil` may alter a tensor on its way.
    fn judged(
        requests: &[Request],
        form: Form,
        splits: usize,
        spoil: &dyn Fn(TensorId, &mut Tensor),
    ) -> (Verdict, Vec<String>) {
        struct Spoiler<'s, 'd>(&'s mut Drawn<'d>, &'s dyn Fn(TensorId, &mut Tensor));
        impl Sink for Spoiler<'_, '_> {
            fn weight(&mut self, w: Weight, rows: &dyn Rows) -> Result<(), SinkError> {
                self.0.weight(w, rows)
            }
            fn norm(&mut self, w: Weight, values: &[f64]) -> Result<(), SinkError> {
                self.0.norm(w, values)
            }
            fn tensor(&mut self, id: TensorId, t: &mut Tensor) -> Result<bool, SinkError> {
                (self.1)(id, t);
                self.0.tensor(id, t)?;
                Ok(true)
            }
            fn evidence(&mut self, id: TensorId, what: &str) -> Result<(), SinkError> {
                self.0.evidence(id, what)
            }
        }
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/glm5dims.Q4_K_M.gguf");
        let model = Model::open(&file).unwrap();
        let stored = model.weights(0).unwrap();
        let options = Options::default();
        let layer = Layer { index: 0, spec: model.spec(&options.reading), weights: &stored };
        let case = Draw {
            batch: Batch(requests.to_vec()),
            regimes: vec![Regime::Random],
            seed: 3,
            page_size: 16,
            splits,
            route: Route::default(),
            dtype: options.dtype,
            hidden: None,
            spec: &layer.spec,
            weights: layer.weights,
        };
        let case = case.case().unwrap();
        let engine = CpuEngine::new(options.dtype, splits);
        let mut drawn = Drawn::new(&case, &layer.spec.geometry, 1);
        engine.run(&layer, &case, &[form], &mut Spoiler(&mut drawn, spoil)).unwrap();
        let Few { case: few, tensors, seen } = drawn.finish();
        assert!(few.plan.tokens() < case.plan.tokens() && seen.is_empty());
        let settings = Settings { captured_weights: Some(Vec::new()), ..Settings::default() };
        let mut session =
            Session::new(&layer, &few, &[form], engine.contract(), None, Box::new(|_| ())).with(settings);
        for (id, mut tensor) in tensors {
            session.tensor(id, &mut tensor).unwrap();
        }
        let (units, _) = session.finish();
        let wrong = units.iter().filter(|u| u.verdict == Verdict::Fault);
        (overall(&units), wrong.map(|u| u.tensor.to_string()).collect())
    }

    fn decode() -> Vec<Request> {
        (0..6).map(|i| Request { context: 100 + i, new: 1 }).collect()
    }

    #[test]
    fn rows_of_a_decode_are_judged_as_a_run_of_their_own() {
        for splits in [1, 3] {
            assert_eq!(
                judged(&decode(), Form::Absorbed, splits, &|_, _| ()).0,
                Verdict::Rounding,
                "{splits}"
            );
        }
        assert_eq!(judged(&decode(), Form::Fused, 2, &|_, _| ()).0, Verdict::Rounding);
    }

    #[test]
    fn runs_of_a_prefill_see_what_lay_before_them() {
        let prefill = [Request { context: 20, new: 150 }];
        for form in Form::ALL {
            assert_eq!(judged(&prefill, form, 1, &|_, _| ()).0, Verdict::Rounding, "{form:?}");
        }
    }

    /// The last request is always drawn: an element of its output that is off is found, and where it is.
    #[test]
    fn what_is_wrong_in_a_drawn_row_is_found() {
        let spoil = |id: TensorId, t: &mut Tensor| {
            if id.stage == Stage::OLatent {
                let v = t.get(t.rows - 1, 7);
                t.set(t.rows - 1, 7, v + 0.5);
            }
        };
        let (verdict, wrong) = judged(&decode(), Form::Absorbed, 2, &spoil);
        assert_eq!((verdict, wrong), (Verdict::Fault, vec!["o_latent".to_string()]));
    }

    #[test]
    fn first_and_last_are_among_those_drawn() {
        let sequence = |i: usize, new: usize| Sequence {
            request: i,
            regime: Regime::Random,
            tokens: i * new..(i + 1) * new,
            context: 0,
            slots: Vec::new(),
        };
        let of = |n, new| Plan { sequences: (0..n).map(|i| sequence(i, new)).collect(), ..Plan::default() };
        for seed in 0..50 {
            let many = pieces(&of(100, 1), seed);
            assert!((2..=SEQUENCES).contains(&many.len()));
            assert_eq!((many[0].sequence, many[many.len() - 1].sequence), (0, 99));
            let long = pieces(&of(1, 1000), seed);
            assert_eq!((long.len(), long[1].from), (2, 1000 - TOKENS));
            assert!(long[0].from + TOKENS <= long[1].from);
        }
        assert_eq!(pieces(&of(1, 50), 0), [Piece { sequence: 0, from: 0, tokens: 50 }]);
    }
}
