/*!
Causes: named right or not at all.

The simulation of the groundwork on comparing kernels, section 5.4: a small layer, an attention of this file's own
(truncating accumulators, exponentials in float32), faults of many classes planted one at a time, and faults that the
dictionary does not know. `MLA_CHECK_TRIALS` is the number of trials a class (default 2); with 15 the whole table is
printed. A wrong name fails at once; the share of right ones is held against 95 %.
*/
#![allow(clippy::print_stdout)]

mod common;

use common::Keep;
use common::small::{Memory, Random, Views, with_weights};
use mla_check::case::Case;
use mla_check::check::{self, Options};
use mla_check::engine::Engine;
use mla_check::engine::Sink;
use mla_check::engine::cpu::{CpuEngine, Seams};
use mla_check::fault::Fault;
use mla_check::judge::cause::{self, weight::OtherLayers};
use mla_check::judge::{Diagnosis, Session, Settings, Unit, Verdict, Which};
use mla_check::model::{Layer, Model};
use mla_check::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::attention::{Head, attend_as, merge_weights_as, strided};
use mla_reference::departure::{Rescale, Slip};
use mla_reference::product::{Dense, Rows};
use mla_reference::{
    Accumulate, Contract, Form, Geometry, Given, KeyList, KeyStats, Pairing, Plan, Regime, Rope, Sequence,
    Softmax, Spec, Stage, Weight,
};
use std::collections::HashMap;

const G: Geometry = Geometry { hidden: 96, heads: 4, q_rank: 48, latent: 128, rope: 32, nope: 64, value: 64 };
const PAGE: usize = 32;
/// New tokens and context.
const NEW: usize = 24;
const CONTEXT: usize = 136;
/// YaRN's multiplier for a factor of 40.
const MSCALE: f64 = 1.368_887_945_411_394;

fn spec() -> Spec {
    let freq = |j: usize| 10_000f64.powf(-2.0 * j as f64 / G.rope as f64);
    Spec {
        geometry: G,
        eps_attn: 1e-5,
        eps_latent: 1e-6,
        rope: Rope {
            inv_freq: (0..G.rope / 2).map(freq).collect(),
            magnitude: 1.0,
            pairing: Pairing::Adjacent,
        },
        scale: MSCALE * MSCALE / (G.key() as f64).sqrt(),
        temperature: None,
    }
}

/// Requests (context, new), pages in a shuffled order.
fn case(requests: &[(usize, usize)], splits: usize, r: &mut Random) -> Case {
    let (mut positions, mut token_request, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
    let total: usize = requests.iter().map(|(c, n)| (c + n).div_ceil(PAGE)).sum::<usize>() + 2;
    let mut order: Vec<usize> = (0..total).collect();
    for i in (1..total).rev() {
        order.swap(i, below(r, i + 1));
    }
    let mut next = order.into_iter();
    let mut context = Vec::new();
    for (request, &(c, n)) in requests.iter().enumerate() {
        let start = positions.len();
        positions.extend((c..c + n).map(|p| p as u64));
        token_request.extend(std::iter::repeat_n(request, n));
        let own: Vec<usize> = next.by_ref().take((c + n).div_ceil(PAGE)).collect();
        context.push(r.matrix((c, G.cache()), 1.7).mapv(|v| DType::Bf16.round(v)));
        sequences.push(Sequence {
            request,
            regime: Regime::Random,
            tokens: start..start + n,
            context: c,
            slots: (0..c + n).map(|p| own[p / PAGE] * PAGE + p % PAGE).collect(),
        });
    }
    let hidden = r.matrix((positions.len(), G.hidden), 2.0).mapv(|v| DType::Bf16.round(v));
    let batch = requests.iter().map(|(c, n)| format!("{c}+{n}")).collect::<Vec<_>>().join(",");
    Case {
        batch: batch.parse().unwrap(),
        regimes: vec![Regime::Random],
        plan: Plan {
            positions,
            token_request,
            sequences,
            page_size: PAGE,
            pages: total,
            splits,
            ..Plan::default()
        },
        given: Given { hidden, context, ..Given::default() },
        notes: Vec::new(),
    }
}

fn below(r: &mut Random, n: usize) -> usize {
    (((r.next() + 1.0) / 2.0 * n as f64) as usize).min(n - 1)
}

fn pick<T: Copy>(r: &mut Random, of: &[T]) -> T {
    of[below(r, of.len())]
}

/// What the attention of this file does wrong.
#[derive(Clone, Default)]
struct Wrong {
    scale: f64,
    mask: i64,
    /// Key read at each place; empty: in order.
    keys: Vec<usize>,
    /// Place for which it is read.
    places: Vec<usize>,
    gone: Option<usize>,
    no_rescale: bool,
    gain: f64,
}

fn cut(v: f64) -> f64 {
    // Toward zero to float32.
    let n = v as f32;
    if f64::from(n).abs() > v.abs() { f64::from(f32::from_bits(n.to_bits() - 1)) } else { f64::from(n) }
}

/// Σ a·b in blocks of 16, the accumulator cut to float32 after each.
fn dot(a: &[f64], b: impl Fn(usize) -> f64) -> f64 {
    let mut acc = 0.0;
    for (k, block) in a.chunks(16).enumerate() {
        acc = cut(acc + block.iter().enumerate().map(|(i, v)| v * b(k * 16 + i)).sum::<f64>());
    }
    acc
}

/// The fused attention of one sequence from recorded q, k and v: tiles of 32 keys, P in bf16, one rounding at the end.
fn attention(keep: &Keep, spec: &Spec, wrong: &Wrong) -> Tensor {
    let id = |s| TensorId::of(s, Form::Fused);
    let (q, k, v) =
        (&keep.tensors[&id(Stage::Q)], &keep.tensors[&id(Stage::K)], &keep.tensors[&id(Stage::V)]);
    let mut out = keep.tensors[&id(Stage::AttnOut)].clone();
    let in_order: Vec<usize> = (0..k.rows).collect();
    let keys = if wrong.keys.is_empty() { &in_order } else { &wrong.keys };
    let places = if wrong.places.is_empty() { &in_order } else { &wrong.places };
    let c = (spec.scale * wrong.scale * std::f64::consts::LOG2_E) as f32;
    for h in 0..G.heads {
        let k: Vec<Vec<f64>> =
            keys.iter().map(|r| k.block(*r..r + 1, h * 96..(h + 1) * 96).row(0).to_vec()).collect();
        let v: Vec<Vec<f64>> =
            keys.iter().map(|r| v.block(*r..r + 1, h * 64..(h + 1) * 64).row(0).to_vec()).collect();
        for t in 0..q.rows {
            let q = q.block(t..t + 1, h * 96..(h + 1) * 96).row(0).to_vec();
            let seen = (CONTEXT + t + 1) as i64 + wrong.mask;
            let sees = |i: usize| (places[i] as i64) < seen && wrong.gone != Some(i);
            let s: Vec<f32> = (0..k.len()).map(|i| dot(&q, |j| k[i][j]) as f32).collect();
            let (mut m, mut l, mut o) = (f32::NEG_INFINITY, 0f32, vec![0.0; 64]);
            for tile in (0..k.len()).step_by(32) {
                let tile = tile..(tile + 32).min(k.len());
                let new = tile.clone().filter(|i| sees(*i)).map(|i| s[i]).fold(m, f32::max);
                if new == f32::NEG_INFINITY {
                    continue;
                }
                let a = if m == f32::NEG_INFINITY || wrong.no_rescale { 1.0 } else { ((m - new) * c).exp2() };
                m = new;
                let p: Vec<f32> = tile
                    .clone()
                    .map(|i| if sees(i) { s[i].mul_add(c, -m * c).exp2() } else { 0.0 })
                    .collect();
                l = l * a + p.iter().sum::<f32>();
                let cast: Vec<f64> = p.iter().map(|p| DType::Bf16.round(f64::from(*p))).collect();
                for (j, o) in o.iter_mut().enumerate() {
                    let mut acc = cut(*o * f64::from(a));
                    for (b, p) in cast.chunks(16).enumerate() {
                        let at = tile.start + b * 16;
                        acc = cut(acc + p.iter().enumerate().map(|(i, p)| p * v[at + i][j]).sum::<f64>());
                    }
                    *o = acc;
                }
            }
            let x: Vec<f64> = o.iter().map(|o| f64::from((*o as f32) / l) * wrong.gain).collect();
            out.write(t, h * 64, &x);
        }
    }
    out
}

/// What an engine computes of a layer: everything that it hands over.
fn run(layer: &Layer, case: &Case, seams: Seams, forms: &[Form]) -> Keep {
    let mut engine = CpuEngine::new(DType::Bf16, case.plan.splits);
    engine.accumulate = Accumulate::Mma { k: 16, bits: 25 };
    engine.tile = 32;
    engine.seams = seams;
    let mut keep = Keep::default();
    engine.run(layer, case, forms, &mut keep).unwrap();
    // The attention of this file reads q as a tensor of its form.
    if let Some(q) = keep.tensors.get(&TensorId::shared(Stage::Q)).cloned() {
        keep.tensors.insert(TensorId { stage: Stage::Q, form: Some(Form::Fused) }, q);
    }
    keep
}

/// What the judge says of tensors, against the layer as it is.
fn judged(layer: &Layer, case: &Case, keep: Keep, forms: &[Form]) -> Vec<Unit> {
    let engine = CpuEngine { tile: 32, ..CpuEngine::new(DType::Bf16, case.plan.splits) };
    let contract = Contract { accumulate: Accumulate::Rz { block: 16 }, ..engine.contract() };
    let expected = mla_check::judge::expected(&layer.spec, case, forms);
    let captured: Vec<TensorId> = expected.iter().copied().filter(|id| id.stage != Stage::Out).collect();
    let settings = Settings { captured: Some(captured.clone()), ..Settings::default() };
    let mut session = Session::new(layer, case, forms, contract, None, Box::new(|_| ())).with(settings);
    for &w in Weight::ALL.iter().filter(|w| w.exists(&G)) {
        match layer.weights.norm(w) {
            Some(values) => {
                let held: Vec<f64> = values.iter().map(|v| DType::F32.round(*v)).collect();
                session.norm(w, &held).unwrap();
            }
            None => {
                let m = layer.weights.matrix(w).unwrap();
                let mut held = mla_reference::rows::dense(m, 0..m.rows(), false).into_raw_vec_and_offset().0;
                DType::Bf16.round_slice(&mut held);
                session.weight(w, &Dense { data: &held, cols: m.cols() }).unwrap();
            }
        }
    }
    let mut tensors: HashMap<TensorId, Tensor> = keep.tensors;
    for id in captured {
        session.tensor(id, &mut tensors.remove(&id).unwrap()).unwrap();
    }
    session.finish().0
}

/// How a trial ended.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Right,
    Ambiguous,
    Wrong,
    Unexplained,
    /// No evidence.
    Clean,
}

/// One trial: units, the tensor that was altered, and what a right name holds (empty: none is right).
struct Trial {
    units: Vec<Unit>,
    stage: Stage,
    right: Vec<String>,
}

/// A right name with a factor: `NAME × VALUE` within 1e-4, as five digits of a factor leave 2 % flips.
fn names(name: &str, right: &str) -> bool {
    let two = |s: &str| s.split_once(" × ").and_then(|(n, v)| Some((n.to_string(), v.parse::<f64>().ok()?)));
    match (two(name), two(right)) {
        (Some((n, v)), Some((m, w))) => n == m && (v / w - 1.0).abs() < 1e-4,
        _ => name.starts_with(right),
    }
}

fn end(t: &Trial) -> (End, String) {
    let of = |u: &&Unit| {
        matches!(u.which, Which::Tensor(id) if id.stage == t.stage) && u.verdict == Verdict::Fault
    };
    // Nothing but the altered tensor may be at fault.
    let Some(unit) = t.units.iter().find(of) else {
        let explained = t.units.iter().filter_map(|u| u.explained.as_ref()).next();
        return match explained {
            Some(e) => (End::Wrong, format!("{e:?}")),
            None => (End::Clean, String::new()),
        };
    };
    match &unit.diagnosis {
        Some(Diagnosis::Cause(c)) => {
            let right = |name: &str| t.right.iter().any(|r| names(name, r));
            let all = std::iter::once(&c.name).chain(&c.ambiguous_with).collect::<Vec<_>>();
            let text = format!("{} | {} | {:?} | {:?}", c.name, c.text, c.effect, c.ambiguous_with);
            match (all.iter().all(|n| right(n)), all.iter().any(|n| right(n)) && all.len() > 1) {
                (true, _) => (End::Right, text),
                (_, true) => (End::Ambiguous, text),
                _ => (End::Wrong, text),
            }
        }
        other => (End::Unexplained, format!("{other:?}")),
    }
}

const FUSED: [Form; 1] = [Form::Fused];

/// A trial with the attention of this file.
fn attends(
    r: &mut Random,
    wrong: impl FnOnce(&mut Wrong, &mut Random) -> Vec<String>,
    after: After,
) -> Trial {
    let case = case(&[(CONTEXT, NEW)], 1, r);
    let mut bad = Wrong { scale: 1.0, gain: 1.0, ..Wrong::default() };
    let mut right = wrong(&mut bad, r);
    with_weights(
        spec(),
        |_| (),
        |layer| {
            let mut keep = run(layer, &case, Seams::default(), &FUSED);
            let mut out = attention(&keep, &layer.spec, &bad);
            right.extend(after(&mut out, r));
            keep.tensors.insert(TensorId::of(Stage::AttnOut, Form::Fused), out);
            Trial { units: judged(layer, &case, keep, &FUSED), stage: Stage::AttnOut, right }
        },
    )
}

/// What is done to the output afterwards.
type After<'a> = &'a dyn Fn(&mut Tensor, &mut Random) -> Vec<String>;

fn nothing(_: &mut Tensor, _: &mut Random) -> Vec<String> {
    Vec::new()
}

/// A trial whose engine reads another layer than the judge.
fn layer_of(
    r: &mut Random,
    stage: Stage,
    right: &[&str],
    change: impl FnOnce(&mut Spec, &mut Memory),
    seams: Seams,
) -> Trial {
    let case = case(&[(CONTEXT, NEW)], 1, r);
    let mut other = spec();
    let mut memory = Memory::new(&G);
    change(&mut other, &mut memory);
    let views: Views = views(&memory);
    let keep = run(&Layer { index: 0, spec: other, weights: &views }, &case, seams, &FUSED);
    let units = with_weights(spec(), |_| (), |layer| judged(layer, &case, keep, &FUSED));
    Trial { units, stage, right: right.iter().map(|s| s.to_string()).collect() }
}

fn views(memory: &Memory) -> Views<'_> {
    Views::of(memory)
}

/// A class of faults: its name, how a trial is made, and whether the dictionary knows it.
type Class = (&'static str, fn(&mut Random) -> Trial, bool);

const CLASSES: [Class; 19] = [
    (
        "scale constant",
        |r| {
            let d = 96f64;
            let all = [
                ("log2(e)", std::f64::consts::LOG2_E),
                ("ln(2)", std::f64::consts::LN_2),
                ("√(96/64)", 1.5f64.sqrt()),
                ("√(64/96)", 1.5f64.sqrt().recip()),
                ("√(96/160)", 0.6f64.sqrt()),
                ("mscale", MSCALE),
                ("1/mscale", 1.0 / MSCALE),
                ("mscale²", MSCALE * MSCALE),
                ("1/mscale²", 1.0 / MSCALE / MSCALE),
                ("2", 2.0),
                ("1/2", 0.5),
                ("√96", d.sqrt()),
            ];
            attends(
                r,
                |w, r| {
                    let (name, value) = pick(r, &all);
                    w.scale = value;
                    // One number may have two names.
                    vec![format!("softmax scale × {name}")]
                },
                &nothing,
            )
        },
        true,
    ),
    (
        "scale, arbitrary",
        |r| {
            attends(
                r,
                |w, r| {
                    w.scale = (0.2 * r.next()).exp();
                    vec![format!("softmax scale × {:.7}", w.scale)]
                },
                &nothing,
            )
        },
        true,
    ),
    (
        "rope: pairing, skipped, twice",
        |r| match below(r, 3) {
            0 => layer_of(
                r,
                Stage::Q,
                &["rope with half-split pairs"],
                |s, _| s.rope.pairing = Pairing::Half,
                Seams::default(),
            ),
            1 => {
                layer_of(r, Stage::KPe, &["rope skipped"], |s, _| s.rope.inv_freq.fill(0.0), Seams::default())
            }
            _ => twice(r),
        },
        true,
    ),
    (
        "rope: position ±1",
        |r| {
            let (stage, name) = pick(r, &[(Stage::Q, "position of q"), (Stage::KPe, "position of k_pe")]);
            let n = pick(r, &[-1.0, 1.0]);
            let seams = Seams { rope_offset: Some((stage, n)), ..Seams::default() };
            layer_of(r, stage, &[&format!("{name} {n:+}")], |_, _| (), seams)
        },
        true,
    ),
    (
        "mask ±1",
        |r| {
            attends(
                r,
                |w, r| {
                    w.mask = pick(r, &[-1, 1]);
                    vec![format!("mask {:+}", w.mask)]
                },
                &nothing,
            )
        },
        true,
    ),
    (
        "heads permuted",
        |r| {
            attends(r, |_, _| vec!["heads".into(), "rank".into(), "shards".into()], &|t, r| {
                let orders = [[1, 0, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1], [1, 2, 3, 0], [0, 2, 1, 3]];
                let order = pick(r, &orders);
                let old = t.clone();
                for row in 0..t.rows {
                    for (h, from) in order.iter().enumerate() {
                        for j in 0..64 {
                            t.set_bits(row, h * 64 + j, old.bits(row, from * 64 + j));
                        }
                    }
                }
                Vec::new()
            })
        },
        true,
    ),
    (
        "page i read for page j",
        |r| {
            attends(
                r,
                |w, r| {
                    let (i, j) = (below(r, 4), below(r, 4));
                    let j = if i == j { (j + 1) % 4 } else { j };
                    w.keys = (0..CONTEXT + NEW)
                        .map(|t| if t / PAGE == i { j * PAGE + t % PAGE } else { t })
                        .collect();
                    vec![format!("page {i} ← {j}")]
                },
                &nothing,
            )
        },
        true,
    ),
    (
        "token dropped",
        |r| {
            attends(
                r,
                |w, r| {
                    let t = below(r, CONTEXT);
                    if below(r, 2) == 0 {
                        w.gone = Some(t);
                    } else {
                        w.keys = (0..CONTEXT + NEW).filter(|k| *k != t).collect();
                        w.places = w.keys.clone();
                    }
                    vec![format!("key {t} left out")]
                },
                &nothing,
            )
        },
        true,
    ),
    (
        "token duplicated",
        |r| {
            attends(
                r,
                |w, r| {
                    let t = below(r, CONTEXT);
                    w.keys = (0..CONTEXT + NEW)
                        .flat_map(|k| std::iter::repeat_n(k, 1 + usize::from(k == t)))
                        .collect();
                    w.places = w.keys.clone();
                    vec![format!("key {t} duplicated")]
                },
                &nothing,
            )
        },
        true,
    ),
    (
        "w_uk or w_uv transposed",
        |r| {
            let (w, stage, rows, cols) =
                pick(r, &[(Weight::WUk, Stage::K, 128, 64), (Weight::WUv, Stage::V, 64, 128)]);
            let name = format!("{w} transposed");
            layer_of(
                r,
                stage,
                &[&name],
                |_, m| {
                    let (data, _) = m.0.get_mut(&w).unwrap();
                    for head in data.chunks_exact_mut(rows * cols) {
                        let old = head.to_vec();
                        for i in 0..rows {
                            for j in 0..cols {
                                head[i * cols + j] = old[j * rows + i];
                            }
                        }
                    }
                },
                Seams::default(),
            )
        },
        true,
    ),
    (
        "no rescale on a new max",
        |r| {
            attends(
                r,
                |w, _| {
                    w.no_rescale = true;
                    vec!["no rescale".into()]
                },
                &nothing,
            )
        },
        true,
    ),
    (
        "merge with the wrong base",
        |r| {
            let case = case(&[(150, 1), (100, 1), (170, 1), (60, 1), (130, 1), (90, 1)], 2, r);
            let form = pick(r, &Form::ALL);
            let units = with_weights(
                spec(),
                |_| (),
                |layer| {
                    let keep = run(layer, &case, Seams { merge_base_e: true, ..Seams::default() }, &[form]);
                    judged(layer, &case, keep, &[form])
                },
            );
            let stage = if form == Form::Fused { Stage::AttnOut } else { Stage::OLatent };
            Trial { units, stage, right: vec!["merge with base e for base 2".into()] }
        },
        true,
    ),
    (
        "output gain",
        |r| {
            attends(
                r,
                |w, r| {
                    w.gain = pick(r, &[0.5, 0.98, 1.003, 1.05]);
                    let name = if w.gain == 0.5 { "1/2".to_string() } else { format!("{:.4}", w.gain) };
                    vec![
                        format!("output × {name}"),
                        format!("output × {:.4}", w.gain - 1e-4),
                        format!("output × {:.4}", w.gain - 5e-5),
                    ]
                },
                &nothing,
            )
        },
        true,
    ),
    (
        "three stale rows",
        |r| {
            attends(r, |_, _| vec!["stale rows".into()], &|t, r| {
                for _ in 0..3 {
                    let (row, h) = (1 + below(r, NEW - 1), below(r, 4));
                    for j in 0..64 {
                        t.set_bits(row, h * 64 + j, t.bits(row - 1, h * 64 + j));
                    }
                }
                Vec::new()
            })
        },
        true,
    ),
    (
        "foreign page",
        |r| {
            attends(
                r,
                |w, r| {
                    w.mask = 0;
                    // Keys and values of other heads' and other tokens' places: no page of the request.
                    let i = below(r, 4);
                    w.keys = (0..CONTEXT + NEW)
                        .map(|t| if t / PAGE == i { (t * 37 + 11) % CONTEXT } else { t })
                        .collect();
                    Vec::new()
                },
                &nothing,
            )
        },
        false,
    ),
    (
        "1 % noise",
        |r| {
            attends(r, |_, _| Vec::new(), &|t, r| {
                for row in 0..t.rows {
                    for c in 0..t.cols {
                        let v = t.get(row, c) * (1.0 + 0.017 * r.next());
                        t.set(row, c, v);
                    }
                }
                Vec::new()
            })
        },
        false,
    ),
    (
        "token dropped and scale",
        |r| {
            attends(
                r,
                |w, r| {
                    w.gone = Some(below(r, CONTEXT));
                    w.scale = pick(r, &[0.5, 2.0, MSCALE]);
                    Vec::new()
                },
                &nothing,
            )
        },
        false,
    ),
    (
        "mask and gain",
        |r| {
            attends(
                r,
                |w, r| {
                    w.mask = pick(r, &[-1, 1]);
                    w.gain = pick(r, &[0.98, 1.05]);
                    Vec::new()
                },
                &nothing,
            )
        },
        false,
    ),
    ("no fault", |r| attends(r, |_, _| Vec::new(), &nothing), false),
];

fn twice(r: &mut Random) -> Trial {
    let case = case(&[(CONTEXT, NEW)], 1, r);
    let units = with_weights(
        spec(),
        |_| (),
        |layer| {
            let mut keep = run(layer, &case, Seams::default(), &FUSED);
            // q through the rope once more; what follows was computed before and is left out.
            let mut q = keep.tensors[&TensorId::shared(Stage::Q)].clone();
            for t in 0..q.rows {
                for h in 0..4 {
                    let mut x = q.block(t..t + 1, h * 96 + 64..(h + 1) * 96).row(0).to_vec();
                    for (j, f) in layer.spec.rope.inv_freq.iter().enumerate() {
                        let (sin, cos) = ((CONTEXT + t) as f64 * f).sin_cos();
                        let (a, b) = (x[2 * j], x[2 * j + 1]);
                        (x[2 * j], x[2 * j + 1]) = (a * cos - b * sin, b * cos + a * sin);
                    }
                    q.write(t, h * 96 + 64, &x);
                }
            }
            keep.tensors.insert(TensorId::shared(Stage::Q), q);
            judged(layer, &case, keep, &FUSED)
        },
    );
    Trial { units, stage: Stage::Q, right: vec!["rope twice".into()] }
}

#[test]
fn causes_are_named_right_or_not_at_all() {
    let trials: u64 = std::env::var("MLA_CHECK_TRIALS").ok().and_then(|v| v.parse().ok()).unwrap_or(2);
    let only = std::env::var("MLA_CHECK_CLASS").unwrap_or_default();
    let (mut right, mut known) = (0, 0);
    for (number, (name, make, knows)) in CLASSES.iter().enumerate().filter(|(_, c)| c.0.contains(&only)) {
        let mut counts = [0usize; 5];
        for trial in 0..trials {
            let mut r = Random(1 + trial * 1000 + number as u64);
            (0..8).for_each(|_| _ = r.next());
            let (end, text) = end(&make(&mut r));
            if !matches!(end, End::Right | End::Clean) || trials > 2 {
                println!("{name} {trial}: {end:?} {text}");
            }
            assert!(end != End::Wrong, "{name}, trial {trial}: {text}");
            assert!(*name != "no fault" || end == End::Clean, "{name}, trial {trial}: {text}");
            assert!(*knows || end != End::Right && end != End::Ambiguous);
            counts[end as usize] += 1;
        }
        if *knows {
            (right, known) = (right + counts[0], known + trials as usize);
        }
        let [a, b, c, d, e] = counts;
        println!("| {name} | right {a} | ambiguous {b} | wrong {c} | unexplained {d} | no evidence {e} |");
    }
    assert!(right * 100 >= known * 95, "{right} of {known} are right");
}

/// What the judge says of a deliberate fault in a fixture: (tensor, phase, diagnosis) of all that have one.
fn of_fault(fault: &str) -> Vec<(String, Diagnosis)> {
    let model = Model::open(&common::fixture("models/glm5dims.Q4_K_M.gguf")).unwrap();
    let options = Options {
        batch: "0+3,0+1,64+2,200+1".parse().unwrap(),
        splits: Some(2),
        fault: Some(Fault::parse(fault, 0).unwrap()),
        ..Options::default()
    };
    let report = check::layer(&model, 0, &options, &|_| ()).unwrap();
    let of = |u: &Unit| Some((u.title(), u.diagnosis.clone()?));
    report.tensors.iter().filter_map(of).collect()
}

/// Deliberate faults of `run`: a few, or all with `MLA_CHECK_TRIALS`. Wherever a cause is named it has one of these names;
/// `must`: a tensor whose cause must be named.
#[test]
fn deliberate_faults_are_named_right_or_not_at_all() {
    let only = std::env::var("MLA_CHECK_CLASS").unwrap_or_default();
    let all_trials = std::env::var("MLA_CHECK_TRIALS").is_ok();
    for (fault, right, must) in [
        ("softmax-scale=1.01", &["softmax scale × 1.01"][..], "attn_out"),
        ("softmax-scale=1.4426950408889634", &["softmax scale × log2(e)"], "attn_out"),
        ("output-gain=1.02", &["output × 1.02"], "attn_out"),
        ("head-gain=1.02", &["head 1 × 1.02"], "attn_out"),
        ("eps=10", &["eps = "], ""),
        ("rope-offset=1", &["position of q +1"], "q"),
        ("rope-offset=1@k_pe", &["position of k_pe +1"], "k_pe"),
        ("swap-heads=0,2", &["heads 0 and 2 exchanged"], "attn_out"),
        ("drop-token=1", &["key 1 left out"], "o_latent"),
        ("foreign-page=0", &["rows of other places", "page 0 ← 0 of request"], "k"),
        ("merge-base", &["merge with base e for base 2"], "o_latent"),
        ("no-rescale", &["no rescale"], "part_o"),
        ("phantom-output", &["zero rows"], "out"),
        ("skipped-row", &["unwritten rows"], "attn_out"),
        ("skipped-row@k_pe", &["unwritten rows"], "k_pe"),
        ("attn_out-element", &[], ""),
        ("q_a-element", &[], ""),
        ("w_uk-element", &[], ""),
        ("cache-element", &[], ""),
    ] {
        let short =
            ["output-gain=1.02", "swap-heads=0,2", "skipped-row@k_pe", "q_a-element"].contains(&fault);
        if !fault.contains(&only) || !(short || all_trials || !only.is_empty()) {
            continue;
        }
        let all = of_fault(fault);
        let mut named = Vec::new();
        for (title, diagnosis) in &all {
            match diagnosis {
                Diagnosis::Cause(c) => {
                    println!("{fault}: {title}: {} | {} | {:?}", c.name, c.text, c.ambiguous_with);
                    assert!(right.iter().any(|r| names(&c.name, r)), "{fault}: {title}: {c:?}");
                    named.push(title.clone());
                }
                other => println!("{fault}: {title}: {other:?}"),
            }
        }
        let title = |t: &String| t.trim_start_matches("fused/").trim_start_matches("absorbed/").to_string();
        let there = named.iter().any(|t| title(t).split(',').next() == Some(must));
        assert!(must.is_empty() || there, "{fault}: {must} has no cause among {all:?}");
    }
}

/// A weight that is another one is named; `altered` makes the engine's from w_uk, [4 heads, 128, 64].
fn weight_of(altered: impl FnOnce(&mut Vec<f64>)) -> Diagnosis {
    let memory = Memory::new(&G);
    let file = memory.0[&Weight::WUk].0.iter().map(|v| DType::Bf16.round(*v)).collect::<Vec<_>>();
    let mut engine = file.clone();
    altered(&mut engine);
    let (file, engine) = (Dense { data: &file, cols: 64 }, Dense { data: &engine, cols: 64 });
    let about = cause::weight::About { geometry: &G, layer: None, ranks: 1, others: Some(&Beside) };
    cause::weight::search(Weight::WUk, (&file, &engine), DType::Bf16, &about)
}

/// Two other layers, drawn.
struct Beside;

fn other_layer(layer: usize) -> Vec<f64> {
    let mut r = Random(77 + layer as u64);
    (0..4 * 128 * 64).map(|_| DType::Bf16.round(r.next())).collect()
}

impl OtherLayers for Beside {
    fn layers(&self) -> Vec<usize> {
        vec![1, 2]
    }
    fn with(&self, layer: usize, _: Weight, f: &mut dyn FnMut(&dyn Rows)) {
        f(&Dense { data: &other_layer(layer), cols: 64 });
    }
}

#[test]
fn weights_that_are_others_are_named() {
    let head = 128 * 64;
    let named = |d: Diagnosis| match d {
        Diagnosis::Cause(c) => {
            assert!(c.ambiguous_with.is_empty(), "{c:?}");
            format!("{} | {}", c.name, c.text)
        }
        other => format!("{other:?}"),
    };
    let swapped = named(weight_of(|w| w.rotate_left(head)));
    assert!(swapped.contains("head 0 holds 1, head 1 holds 2"), "{swapped}");
    let other = named(weight_of(|w| *w = other_layer(2)));
    assert!(other.starts_with("w_uk of layer 2"), "{other}");
    let zero = named(weight_of(|w| w[2 * head..].fill(0.0)));
    assert!(zero.contains("rows 256..511 of w_uk are zero"), "{zero}");
    let transposed = named(weight_of(|w| {
        for part in w.chunks_exact_mut(head) {
            let old = part.to_vec();
            (0..head).for_each(|at| part[at] = old[at % 64 * 128 + at / 64]);
        }
    }));
    assert!(transposed.starts_with("w_uk transposed"), "{transposed}");
    let again = named(weight_of(|w| {
        for block in w.chunks_exact_mut(32) {
            let d = block.iter().fold(0.0f64, |m, v| m.max(v.abs())) / 127.0;
            let stored = DType::F16.round(d);
            block.iter_mut().for_each(|v| *v = DType::Bf16.round((*v / d).round() * stored));
        }
    }));
    assert!(again.starts_with("w_uk quantised again"), "{again}");
    // Noise, and two things at once, have no name.
    let mut r = Random(5);
    let noise =
        named(weight_of(|w| w.iter_mut().for_each(|v| *v = DType::Bf16.round(*v * (1.0 + 0.1 * r.next())))));
    assert!(noise.starts_with("Unexplained"), "{noise}");
    let two = named(weight_of(|w| {
        w.rotate_left(head);
        w[..head].iter_mut().for_each(|v| *v = -*v);
    }));
    assert!(two.starts_with("Unexplained"), "{two}");
}

/// What a hypothesis changes in attention, against plain sums.
#[test]
fn slips_of_attention_are_what_they_say() {
    let mut r = Random(3);
    let (q, k, v) = (r.matrix((2, 8), 2.0), r.matrix((20, 8), 2.0), r.matrix((20, 4), 1.0));
    let contract = Contract { softmax: Softmax { tile: 8, ..Softmax::exact() }, ..Contract::exact() };
    let stats = KeyStats::default();
    let head =
        Head { q: q.view(), k: strided(&k), v: strided(&v), visible: &[19, 20], scale: 0.7, stats: &stats };
    // Scores, and Σ w v / Σ w by plain loops.
    let s = |i: usize, t: usize| 0.7 * (0..8).map(|j| q[[i, j]] * k[[t, j]]).sum::<f64>();
    let mean = |w: &[f64], j: usize| (0..20).map(|t| w[t] * v[[t, j]]).sum::<f64>() / w.iter().sum::<f64>();
    let gone = attend_as(&head, 0..20, &contract, Slip { gone: &[3, 17], ..Slip::default() });
    let as_to = |rescale| attend_as(&head, 0..20, &contract, Slip { rescale, ..Slip::default() });
    let stuck = as_to(Rescale::Neither);
    let (output, sum) = (as_to(Rescale::Output), as_to(Rescale::Sum));
    for i in 0..2 {
        let sees = |t: usize| t < 19 + i;
        let without: Vec<f64> =
            (0..20).map(|t| if sees(t) && t != 3 && t != 17 { s(i, t).exp() } else { 0.0 }).collect();
        // Each tile relative to the largest score so far.
        let mut most = f64::NEG_INFINITY;
        let mut kept = vec![0.0; 20];
        for tile in [0..8, 8..16, 16..20] {
            most = tile.clone().filter(|t| sees(*t)).map(|t| s(i, t)).fold(most, f64::max);
            tile.filter(|t| sees(*t)).for_each(|t| kept[t] = (s(i, t) - most).exp());
        }
        let right: Vec<f64> = (0..20).map(|t| if sees(t) { (s(i, t) - most).exp() } else { 0.0 }).collect();
        let over = |w: &[f64], l: &[f64], j: usize| {
            (0..20).map(|t| w[t] * v[[t, j]]).sum::<f64>() / l.iter().sum::<f64>()
        };
        for j in 0..4 {
            assert!((output.x[[i, j]] - over(&right, &kept, j)).abs() < 1e-12);
            assert!((sum.x[[i, j]] - over(&kept, &right, j)).abs() < 1e-12);
            assert!((gone.x[[i, j]] - mean(&without, j)).abs() < 1e-12);
            assert!((stuck.x[[i, j]] - mean(&kept, j)).abs() < 1e-12);
        }
        assert!((gone.lse[i] - without.iter().sum::<f64>().ln()).abs() < 1e-12);
    }
    // An lse sees the row sum alone.
    assert!(output.lse == stuck.lse && sum.lse != stuck.lse);
    // A key twice, and one of zeros behind the last.
    let read = KeyList { source: vec![0, 19, 19, 20], place: vec![0, 19, 19, 19] }.of(&k);
    assert_eq!([read.row(1), read.row(2)], [k.row(19), k.row(19)]);
    assert!(read.row(0) == k.row(0) && read.row(3).iter().all(|v| *v == 0.0));
    // Weights of splits: equal at power 0, their exponential at 1.
    let (w, _) = merge_weights_as(&[1.0, 3.0, f64::NEG_INFINITY], 0.0);
    assert_eq!(w, [0.5, 0.5, 0.0]);
    let (w, total) = merge_weights_as(&[1.0, 3.0], 2.0);
    assert!((w[0] - 1.0 / (1.0 + 4f64.exp())).abs() < 1e-15);
    assert!((total - (3.0 + (-4f64).exp().ln_1p())).abs() < 1e-15);
}
