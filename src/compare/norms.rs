/*!
Logs of norms alone, as people print them while they debug (`layer 3 q norm=67.2270`), for what little they can show.

A norm is one number of a tensor: no permutation, no sign, no single element shows in it, and without the tensors themselves
nothing can be recomputed. What it can show: that a tensor is not finite or is zero throughout; that ranks hold different
values where all hold the same; that a rotation changed a length, which none does; that a weight's length is the file's, whole or a
rank's share. A weight's length that is none of these is shown, not held against anybody: what was printed may be its
quantised bytes.
*/

use crate::judge::Verdict;
use crate::model::{Model, ModelError};
use mla_reference::{Axis, Stage, Weight, Weights};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;

/// Relative rounding that a printed norm may carry: of a bf16 norm of bf16 values, each half an ulp off.
pub const ROUNDING: f64 = 1.0 / 128.0;
/// Most lines of a log that are read.
const MOST_LINES: usize = 1 << 22;

/// A norm of a log.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Logged {
    /// Line of the log, from 1.
    pub line: usize,
    /// Name as printed.
    pub name: String,
    /// Layer, where the line or one before says one.
    pub layer: Option<usize>,
    /// Rank, where the line says one.
    pub rank: Option<usize>,
    /// The norm.
    #[serde(serialize_with = "text")]
    pub norm: f64,
}

fn text<S: serde::Serializer>(v: &f64, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&format!("{v}"))
}

/// Something that norms say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Said {
    /// Fault, exact (agrees), or not compared.
    pub verdict: Verdict,
    /// In words.
    pub text: String,
    /// Lines that say it.
    pub lines: Vec<usize>,
}

/// What a name of a log stands for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Meaning {
    Stage(Stage),
    Weights(&'static [Weight]),
}

/// Names that people print, without a weight's ending.
const NAMES: [(&str, Meaning); 36] = {
    use Meaning::{Stage as S, Weights as W};
    [
        ("hidden", S(Stage::Hidden)),
        ("hidden_states", S(Stage::Hidden)),
        ("attn_in", S(Stage::AttnIn)),
        ("q_a", S(Stage::QA)),
        ("q_c", S(Stage::QANormed)),
        ("q_a_normed", S(Stage::QANormed)),
        ("q_raw", S(Stage::QRaw)),
        ("q", S(Stage::Q)),
        ("kv_a", S(Stage::KvA)),
        ("kv_lora", S(Stage::KvA)),
        ("kv_c", S(Stage::KvCNormed)),
        ("kv_c_normed", S(Stage::KvCNormed)),
        ("k_c_normed", S(Stage::KvCNormed)),
        ("k_pe", S(Stage::KPe)),
        ("k", S(Stage::K)),
        ("v", S(Stage::V)),
        ("ql_nope", S(Stage::QLatent)),
        ("q_latent", S(Stage::QLatent)),
        ("o_latent", S(Stage::OLatent)),
        ("attn_out", S(Stage::AttnOut)),
        ("attn_output", S(Stage::AttnOut)),
        ("output", S(Stage::AttnOut)),
        ("out", S(Stage::Out)),
        ("q_a_proj", W(&[Weight::WQA])),
        ("q_b_proj", W(&[Weight::WQB])),
        ("q_proj", W(&[Weight::WQ])),
        ("kv_a_proj_with_mqa", W(&[Weight::WKvA])),
        ("fused_qkv_a_proj", W(&[Weight::WQA, Weight::WKvA])),
        ("kv_b_proj", W(&[Weight::WUk, Weight::WUv])),
        ("w_uk", W(&[Weight::WUk])),
        ("w_uk_t", W(&[Weight::WUk])),
        ("w_uv", W(&[Weight::WUv])),
        ("o_proj", W(&[Weight::WO])),
        ("input_layernorm", W(&[Weight::GAttn])),
        ("q_a_layernorm", W(&[Weight::GQ])),
        ("kv_a_layernorm", W(&[Weight::GKv])),
    ]
};

/// What a printed name means: its last parts, without `self_attn.` and the like before them. A module's bare name is its weight
/// only where `.weight` says so; else it is its output.
fn meaning(name: &str) -> Option<Meaning> {
    let lower = name.to_ascii_lowercase();
    let (stem, weight) = match lower.strip_suffix(".weight").or_else(|| lower.strip_suffix("_weight")) {
        Some(stem) => (stem, true),
        None => (lower.as_str(), lower.starts_with("w_")),
    };
    let last = stem.rsplit('.').next().unwrap_or(stem);
    let found = NAMES.iter().find(|(n, _)| *n == last).map(|(_, m)| *m)?;
    match (found, weight) {
        (Meaning::Weights(_), true) | (Meaning::Stage(_), false) => Some(found),
        _ => None,
    }
}

/// All norms of a log, in its order.
pub fn parse(log: &str) -> Vec<Logged> {
    let mut all = Vec::new();
    let mut layer = None;
    for (i, line) in log.lines().take(MOST_LINES).enumerate() {
        layer = number_after(line, &["layers.", "layer"]).or(layer);
        let rank = number_after(line, &["_tp", "tp_rank", "tp", "rank"]);
        for (name, norm) in norms(line) {
            all.push(Logged { line: i + 1, name, layer, rank, norm });
        }
    }
    all
}

/// The number that follows one of some words, with at most a few signs between.
fn number_after(line: &str, words: &[&str]) -> Option<usize> {
    let lower = line.to_ascii_lowercase();
    words.iter().find_map(|word| {
        lower.match_indices(word).find_map(|(at, _)| {
            let inside = lower[..at].chars().next_back().is_some_and(|c| c.is_ascii_alphanumeric());
            let rest = lower[at + word.len()..].trim_start_matches([' ', '=', ':', '_', '#', '.', '[']);
            let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            (!inside).then(|| rest[..end].parse().ok()).flatten()
        })
    })
}

/// `NAME norm=X`, `NAME.norm() = X`, `norm(NAME): X` of a line.
fn norms(line: &str) -> Vec<(String, f64)> {
    let mut all = Vec::new();
    let lower = line.to_ascii_lowercase();
    if lower.len() != line.len() {
        return all;
    }
    for (at, _) in lower.match_indices("norm") {
        let after = &line[at + 4..];
        let ident = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.' || c == '@';
        let (name, rest) = match after.strip_prefix('(').and_then(|r| r.split_once(')')) {
            Some((inner, rest)) if !inner.is_empty() => (inner.trim().to_string(), rest),
            other => {
                let before = line[..at].trim_end_matches([' ', '.', '_', '-', '|', '\'', '"', ']']);
                let start = before.rfind(|c: char| !ident(c)).map_or(0, |i| i + 1);
                (before[start..].to_string(), other.map_or(after, |(_, rest)| rest))
            }
        };
        let rest = rest.trim_start_matches([' ', '\'', '"']);
        let Some(value) = rest.strip_prefix(['=', ':']) else { continue };
        let value = value.trim_start().trim_start_matches("tensor(");
        let end = value
            .find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '+' | '-')))
            .unwrap_or(value.len());
        if let (false, Ok(x)) = (name.is_empty(), value[..end].trim_end_matches('.').parse()) {
            all.push((name, x));
        }
    }
    all
}

/// What the norms of a log say of a model.
///
/// # Errors
/// A layer's weights that can't be read.
pub fn judge(model: &Model, log: &[Logged], only: Option<usize>) -> Result<Vec<Said>, ModelError> {
    let mut said = Vec::new();
    for l in log.iter().filter(|l| meaning(&l.name).is_some() && !(l.norm.is_finite() && l.norm != 0.0)) {
        // Engines fill outputs with zeros in runs that only warm up: zeros count where there is nothing else.
        let alike = |o: &&Logged| o.name == l.name && o.rank == l.rank;
        let (verdict, what) = match l.norm.is_finite() {
            false => (Verdict::Fault, "is not finite"),
            true if log.iter().filter(alike).all(|o| o.norm == 0.0) => (
                Verdict::Fault,
                "is zero, each time that it was printed: it was never written, or from nothing",
            ),
            true => (
                Verdict::NotCompared,
                "is zero here and not elsewhere: a warm-up, or rows that were not written",
            ),
        };
        let text = format!("the norm of {}{} {what}", l.name, place(l));
        said.push(Said { verdict, text, lines: vec![l.line] });
    }
    let sound = || log.iter().filter(|l| l.norm.is_finite() && l.norm != 0.0);
    said.extend(replicated(sound()));
    // A temperature scales queries besides.
    if model.spec(&crate::model::Reading::of(crate::model::Convention::Hf)).temperature.is_none() {
        said.extend(rotated(sound()));
    }
    let layers: Vec<usize> = model.mla_layers().to_vec();
    let mut wanted: BTreeMap<usize, Vec<&Logged>> = BTreeMap::new();
    for l in sound().filter(|l| matches!(meaning(&l.name), Some(Meaning::Weights(_)))) {
        if let Some(layer) = l.layer.or(only).filter(|n| layers.contains(n)) {
            wanted.entry(layer).or_default().push(l);
        }
    }
    for (layer, logged) in wanted {
        let weights = model.weights(layer)?;
        for l in logged {
            if let Some(Meaning::Weights(parts)) = meaning(&l.name) {
                said.push(weight(model, layer, &weights, parts, l));
            }
        }
    }
    Ok(said)
}

fn place(l: &Logged) -> String {
    let layer = l.layer.map_or(String::new(), |n| format!(", layer {n}"));
    layer + &l.rank.map_or(String::new(), |r| format!(", rank {r}"))
}

/// Tensors without heads that differ between ranks, each time that they were printed.
fn replicated<'l>(log: impl Iterator<Item = &'l Logged>) -> Vec<Said> {
    type ByRank<'l> = BTreeMap<usize, Vec<&'l Logged>>;
    let mut by: BTreeMap<(String, Option<usize>), ByRank> = BTreeMap::new();
    for l in log {
        let Some(Meaning::Stage(stage)) = meaning(&l.name) else { continue };
        let shared = !stage.axes(None).contains(&Axis::Head) && !matches!(stage, Stage::Hidden | Stage::Out);
        if let (true, Some(rank)) = (shared, l.rank) {
            by.entry((l.name.clone(), l.layer)).or_default().entry(rank).or_default().push(l);
        }
    }
    let mut said = Vec::new();
    for ((name, _), ranks) in by.iter().filter(|(_, r)| r.len() > 1) {
        let Some((first, own)) = ranks.iter().next() else { continue };
        for (rank, other) in ranks.iter().skip(1).filter(|(_, o)| o.len() == own.len()) {
            let off = own.iter().zip(other).find(|(a, b)| (a.norm - b.norm).abs() > 1e-4 * a.norm);
            if let Some((a, b)) = off {
                said.push(Said {
                    verdict: Verdict::Fault,
                    text: format!(
                        "{name}{} has norm {} on rank {first} and {} on rank {rank}: a tensor without heads is the same on all",
                        a.layer.map_or(String::new(), |n| format!(", layer {n}")),
                        a.norm,
                        b.norm
                    ),
                    lines: vec![a.line, b.line],
                });
            }
        }
    }
    said
}

/// A rotation that changed the length of the queries: printed before and after, on the same rank and layer.
fn rotated<'l>(log: impl Iterator<Item = &'l Logged>) -> Vec<Said> {
    let mut before: BTreeMap<(Option<usize>, Option<usize>), &Logged> = BTreeMap::new();
    let mut said = Vec::new();
    for l in log {
        match meaning(&l.name) {
            Some(Meaning::Stage(Stage::QRaw)) => {
                before.insert((l.layer, l.rank), l);
            }
            Some(Meaning::Stage(Stage::Q)) => {
                let Some(raw) = before.remove(&(l.layer, l.rank)) else { continue };
                let off = (l.norm - raw.norm).abs() / raw.norm;
                let (verdict, how) = match off > 2.0 * ROUNDING {
                    true => (Verdict::Fault, "a rotation changes no length"),
                    false => (Verdict::Exact, "as it must be: a rotation changes no length"),
                };
                let text = format!("q{} has norm {}, q_raw {}: {how}", place(l), l.norm, raw.norm);
                said.push(Said { verdict, text, lines: vec![raw.line, l.line] });
            }
            _ => {}
        }
    }
    said
}

/// A weight's norm against the file's, whole or a rank's share of heads.
fn weight(model: &Model, layer: usize, weights: &dyn Weights, parts: &[Weight], l: &Logged) -> Said {
    let g = &model.geometry;
    // Squares of each head; of what has none, one.
    let mut heads = vec![0.0; g.heads];
    let mut rest = 0.0;
    for w in parts.iter().filter(|w| w.exists(g)) {
        if let Some(norm) = weights.norm(*w) {
            rest += norm.iter().map(|v| v * v).sum::<f64>();
            continue;
        }
        let Some(rows) = weights.matrix(*w) else { continue };
        let (n, cols) = (rows.rows(), rows.cols());
        let at = w.row().axes.iter().position(|a| *a == Axis::Head);
        let squares: Vec<Vec<f64>> = (0..n)
            .into_par_iter()
            .map(|r| {
                let mut values = vec![0.0; cols];
                rows.decode(r, 0, &mut values);
                let width = if at == Some(1) { cols / g.heads } else { cols };
                values.chunks(width).map(|c| c.iter().map(|v| v * v).sum()).collect()
            })
            .collect();
        for (r, own) in squares.iter().enumerate() {
            match at {
                Some(0) => heads[r * g.heads / n] += own[0],
                Some(_) => heads.iter_mut().zip(own).for_each(|(h, s)| *h += s),
                None => rest += own[0],
            }
        }
    }
    let whole = (rest + heads.iter().sum::<f64>()).sqrt();
    let near = |x: f64| (l.norm - x).abs() <= ROUNDING * x;
    let name = format!("{}, layer {layer}", l.name);
    let agrees = |what: String| Said {
        verdict: Verdict::Exact,
        text: format!(
            "{name}: {} is the norm of {what}; the order of its rows, heads and parts does not show",
            l.norm
        ),
        lines: vec![l.line],
    };
    if near(whole) {
        return agrees("the file's whole weight".into());
    }
    if rest == 0.0 {
        for of in [2, 4, 8, 16, 32].into_iter().filter(|n| g.heads.is_multiple_of(*n)) {
            let each = g.heads / of;
            let norms = heads.chunks(each).map(|c| c.iter().sum::<f64>().sqrt());
            let fits: Vec<usize> = norms.enumerate().filter(|(_, x)| near(*x)).map(|(r, _)| r).collect();
            if !fits.is_empty() {
                return agrees(format!(
                    "a share of 1/{of} of the file's heads (such as rank {}'s)",
                    crate::model::list(&fits)
                ));
            }
        }
    }
    Said {
        verdict: Verdict::NotCompared,
        text: format!(
            "{name}: {} is neither the norm of the file's weight, {whole:.6}, nor of a rank's share of heads; quantised bytes and scaled formats have norms of their own",
            l.norm
        ),
        lines: vec![l.line],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_are_found_as_people_print_them() {
        let log = "(Worker_TP3 pid=77) layer 5 q norm=67.2270 k norm = 12.5\n\
                   nothing here\n\
                   model.layers.7.self_attn.kv_b_proj.weight.norm(): 101.25\n\
                   rank=2 norm(kv_c) = tensor(3.5, device='cuda:2'), v_norm: nan\n\
                   output norm=inf normal=3";
        let all = parse(log);
        let of = |i: usize| (all[i].name.as_str(), all[i].layer, all[i].rank, all[i].norm);
        assert_eq!(of(0), ("q", Some(5), Some(3), 67.227));
        assert_eq!(of(1), ("k", Some(5), Some(3), 12.5));
        assert_eq!(of(2), ("model.layers.7.self_attn.kv_b_proj.weight", Some(7), None, 101.25));
        assert_eq!(of(3), ("kv_c", Some(7), Some(2), 3.5));
        assert!(all[4].name == "v" && all[4].norm.is_nan());
        assert_eq!((all[5].name.as_str(), all[5].norm, all.len()), ("output", f64::INFINITY, 6));
    }

    #[test]
    fn names_mean_outputs_unless_they_say_weight() {
        assert_eq!(
            meaning("self_attn.kv_b_proj.weight"),
            Some(Meaning::Weights(&[Weight::WUk, Weight::WUv]))
        );
        assert_eq!(meaning("kv_b_proj"), None);
        assert_eq!(meaning("W_UK_T"), Some(Meaning::Weights(&[Weight::WUk])));
        assert_eq!(meaning("q"), Some(Meaning::Stage(Stage::Q)));
        assert_eq!(meaning("logits"), None);
    }

    #[test]
    fn what_is_the_same_everywhere_must_be() {
        let log = parse(
            "rank 0 layer 1 kv_c norm=2.0\nrank 1 layer 1 kv_c norm=2.1\nrank 0 q norm=1\nrank 1 q norm=3\n",
        );
        let said = replicated(log.iter());
        assert_eq!((said.len(), said[0].verdict, &said[0].lines[..]), (1, Verdict::Fault, &[1, 2][..]));
        let turned = |raw: f64, q: f64| {
            let log = parse(&format!("layer 1 q_raw norm={raw}\nlayer 1 q norm={q}\n"));
            rotated(log.iter()).iter().map(|s| s.verdict).collect::<Vec<_>>()
        };
        assert_eq!(turned(10.0, 10.05), [Verdict::Exact]);
        assert_eq!(turned(10.0, 11.0), [Verdict::Fault]);
    }
}
