/*!
What a clean run is: a function of a seed and the run's number.

Requests mix prefill, prefill with context, decode and one-token prompts; lengths are spread over decades, and
often stand at page ends. Dtype, accumulator, forms, regimes, splits and page size vary with them.
*/

use super::layers::{Data, SHAPES, Shape};
use crate::case::{Batch, Request, Stream};
use crate::check::{AccumulateKind, EngineKind, Options};
use crate::contracts::ContractChoice;
use crate::model::Reading;
use mla_numeric::DType;
use mla_reference::{Form, Regime};

/// Tokens, context included, of all requests of a run, a long one aside.
const TOKENS: usize = 240;
/// One run in so many has a long request, on a small layer.
const LONG: usize = 16;
/// Tokens that see a part of a context, at least, of each phase that a run has: one-token prompts alone, say, have one
/// key each and no scale to see.
const SEEING: usize = 12;
/// Keys that are a part of a context.
const KEYS: usize = 16;

/// Where layers come from.
#[derive(Clone, Copy)]
pub enum Layers<'a> {
    /// Made up in memory.
    Made,
    /// Of model files: number of layers, and the longest request that dense attention may have.
    Given {
        /// Layers to choose from.
        count: usize,
        /// Tokens.
        longest: usize,
        /// How numbers of the file are read.
        reading: &'a Reading,
    },
}

/// The layer of a run.
#[derive(Clone, Copy, Debug)]
pub enum Chosen {
    /// A made-up one.
    Made {
        /// Geometry.
        shape: &'static Shape,
        /// Kind of numbers.
        data: Data,
        /// Seed of its weights.
        seed: u64,
    },
    /// The n-th of those given.
    Given(usize),
}

/// One clean run.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Layer.
    pub layer: Chosen,
    /// Everything else.
    pub options: Options,
}

const SETUP: u64 = 30;

/// Draws the run of this number.
pub fn draw(seed: u64, number: u64, layers: Layers, base: &Options) -> Setup {
    let mut rng = Stream::new(seed, SETUP, number);
    let rng = &mut rng;
    let seed = rng.next();
    let long = rng.below(LONG) == 0;
    let (layer, longest) = match layers {
        Layers::Given { count, longest, .. } => (Chosen::Given(rng.below(count)), longest),
        Layers::Made => {
            let kernels = base.engine.runs_kernels();
            let fits = |s: &&Shape| if kernels { s.has_kernels() } else { !long || s.geometry.latent < 256 };
            let from: Vec<&Shape> = SHAPES.iter().filter(fits).collect();
            // Half of the runs are plain: that is what calibration is mostly asked about.
            let data = if rng.below(2) == 0 { Data::Plain } else { pick(rng, &Data::ALL) };
            (Chosen::Made { shape: from[rng.below(from.len())], data, seed }, usize::MAX)
        }
    };
    let dtype = pick(rng, &[DType::Bf16, DType::Bf16, DType::Bf16, DType::F16, DType::F32]);
    // PTX is committed for one dtype, and a user's kernels may be for one.
    let one_dtype = base.engine == EngineKind::Ptx || base.kernels.is_some();
    let dtype = if one_dtype { base.dtype } else { dtype };
    let mma = rng.below(2) == 0 && dtype != DType::F32;
    let page_size = pick(rng, &[1, 5, 16, 64, 128]);
    let splits = 1 + rng.below(8);
    let both = rng.below(4) < 2;
    let one = pick(rng, &Regime::ALL);
    let forms = match rng.below(8) {
        0 => vec![Form::Fused],
        1 => vec![Form::Absorbed],
        _ => Form::ALL.to_vec(),
    };
    let options = Options {
        batch: batch(rng, page_size, long, longest),
        dtype,
        accumulate: if mma { AccumulateKind::Mma } else { AccumulateKind::Rn },
        regimes: if both { Regime::ALL.to_vec() } else { vec![one] },
        forms,
        splits: Some(splits),
        page_size,
        // A command line takes it back: what is printed repeats the run.
        seed: seed >> 32,
        reading: match layers {
            Layers::Given { reading, .. } => *reading,
            Layers::Made => base.reading,
        },
        ..base.clone()
    };
    Setup { layer, options }
}

fn pick<T: Copy>(rng: &mut Stream, from: &[T]) -> T {
    from[rng.below(from.len())]
}

/// A length from 1 to `most`, spread evenly over its logarithm.
fn length(rng: &mut Stream, most: usize) -> usize {
    (libm::exp(rng.uniform() * libm::log(most as f64 + 1.0)) as usize).clamp(1, most)
}

fn batch(rng: &mut Stream, page: usize, long: bool, longest: usize) -> Batch {
    let (mut left, mut requests) = (TOKENS, Vec::new());
    let wanted = 1 + rng.below(4);
    // At most a page more or less than drawn: ends of pages are where tables go wrong.
    let edge = |rng: &mut Stream, context: usize| match rng.below(3) {
        0 => context.next_multiple_of(page),
        1 => (context / page * page).max(1),
        _ => context,
    };
    while requests.len() < wanted && left > 2 {
        let most = left.min(longest);
        let kind = rng.below(5);
        let request = match kind {
            0 => Request { context: 0, new: 1 },
            1 => Request { context: 0, new: length(rng, most.min(64)) },
            2 => {
                let drawn = length(rng, most.min(120));
                Request { context: edge(rng, drawn), new: length(rng, 24) }
            }
            _ => {
                let drawn = length(rng, most);
                Request { context: edge(rng, drawn), new: 1 }
            }
        };
        let fits = request.total() <= longest;
        let request = if fits { request } else { Request { context: 0, new: request.new.min(longest) } };
        left = left.saturating_sub(request.total());
        requests.push(request);
    }
    for decode in [true, false] {
        let of_phase = |r: &Request| (r.new == 1) == decode;
        let seeing = |r: &Request| r.new.min((r.total() + 1).saturating_sub(KEYS));
        let seen: usize = requests.iter().filter(|r| of_phase(r)).map(seeing).sum();
        if longest < 2 * KEYS || seen >= SEEING || !requests.iter().any(of_phase) {
            continue;
        }
        let context = |rng: &mut Stream| KEYS + length(rng, (longest - 2 * KEYS).clamp(1, 64));
        if decode {
            let more = (seen..SEEING).map(|_| Request { context: context(rng), new: 1 });
            requests.extend(more);
        } else {
            let context = context(rng);
            requests.push(Request { context, new: (SEEING - seen).max(2) });
        }
    }
    if long && longest > 1 {
        let drawn = 600 + rng.below(700);
        let context = edge(rng, drawn).min(longest - 1);
        requests.push(Request { context, new: 1 });
    }
    Batch(requests)
}

/// The options of `mla-check run` that repeat the run on its layer.
pub fn run_options(o: &Options) -> String {
    let one = |all: &[&'static str]| match all {
        [only] => *only,
        _ => "both",
    };
    let forms: Vec<_> = o.forms.iter().map(|f| f.name()).collect();
    let regimes: Vec<_> = o.regimes.iter().map(|r| r.name()).collect();
    let mut text = format!("--batch {} --dtype {} --seed {}", o.batch, o.dtype, o.seed);
    text += &format!(" --form {} --regime {}", one(&forms), one(&regimes));
    text += &format!(" --page-size {} --splits {}", o.page_size, o.splits());
    if o.accumulate == AccumulateKind::Mma {
        text += " --accumulate mma";
    }
    text + &engine_options(o)
}

/// ` --engine … --contract …`, where they are not the usual ones.
pub fn engine_options(o: &Options) -> String {
    let mut text = String::new();
    if o.engine.runs_kernels() {
        text += &format!(" --engine {}", o.engine.name());
    }
    if !matches!(o.contract, ContractChoice::Declared) {
        text += &format!(" --contract {}", o.contract);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::Phase;
    use std::collections::BTreeSet;

    #[test]
    fn runs_are_functions_of_seed_and_number_and_cover_what_they_should() {
        let base = Options::default();
        let all: Vec<Setup> = (0..400).map(|i| draw(7, i, Layers::Made, &base)).collect();
        let again = draw(7, 5, Layers::Made, &base);
        assert_eq!(run_options(&again.options), run_options(&all[5].options));
        assert_ne!(run_options(&draw(8, 5, Layers::Made, &base).options), run_options(&all[5].options));
        let mut seen = BTreeSet::new();
        for s in &all {
            let o = &s.options;
            assert!(!o.batch.0.is_empty() && o.batch.0.iter().all(|r| r.new > 0));
            let total: usize = o.batch.0.iter().map(|r| r.total()).sum();
            assert!(total < 2_000, "{}", o.batch);
            assert!(!(o.dtype == DType::F32 && o.accumulate == AccumulateKind::Mma));
            seen.insert(format!("{} {:?}", o.dtype, o.accumulate));
            seen.insert(format!("splits {}", o.splits()));
            seen.insert(format!("forms {} regimes {}", o.forms.len(), o.regimes.len()));
            if let Chosen::Made { shape, data, .. } = s.layer {
                seen.insert(shape.name.into());
                seen.insert(data.name().into());
            }
            for r in &o.batch.0 {
                let phase = if r.new == 1 { Phase::Decode } else { Phase::Prefill };
                seen.insert(format!("{} {}", phase.name(), r.context > 0));
            }
        }
        assert_eq!(seen.len(), 5 + 8 + 4 + SHAPES.len() + Data::ALL.len() + 4, "{seen:?}");
    }

    #[test]
    fn requests_of_a_sparse_model_stay_within_its_keys() {
        let reading = Reading::default();
        let layers = Layers::Given { count: 3, longest: 100, reading: &reading };
        for i in 0..300 {
            let s = draw(0, i, layers, &Options::default());
            assert!(s.options.batch.0.iter().all(|r| r.total() <= 100), "{}", s.options.batch);
            assert!(matches!(s.layer, Chosen::Given(n) if n < 3));
        }
    }
}
