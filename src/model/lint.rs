/*!
What is wrong or odd about a model file, judged by its headers alone.

A *defect* breaks attention: a tensor that is missing or has another shape than the metadata says. A
*warning* is what some engine refuses, or what contradicts itself without deciding anything here. A *note* is
neither: conventions that read this file differently.

The tensor table is passed over once and sorted by layer; then every layer is asked the same questions, and
layers with the same answer become one finding. Names, keys and layouts: llama.cpp 0c1e57098 and its converter.
*/

mod checkpoint;
mod conventions;
mod file_type;
mod types;

use super::arch::{Layers, Query, Widths};
use super::weights::{LEGACY, dims};
use super::{Model, Source, in_layer, list, scale};
use crate::gguf::{Gguf, TensorInfo};
use mla_reference::{WEIGHTS, Weight, dequant};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Attention can't be right.
    Defect,
    /// Odd, or refused by some engine.
    Warning,
    /// Worth knowing; nothing is wrong.
    Note,
}

/// Something that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// What; where one layer is meant, tensors have their full names, else `blk.*`.
    pub what: String,
    /// Layers, metadata, or the place in a file.
    pub place: String,
}

/// The tensors of a layer that matter here.
#[derive(Default)]
struct InLayer<'a> {
    weights: [Option<&'a TensorInfo>; Weight::ALL.len()],
    kv_b: Option<&'a TensorInfo>,
    nextn: bool,
    /// Names like those of attention that are no weight's.
    strange: Vec<&'a str>,
}

impl<'a> InLayer<'a> {
    fn get(&self, w: Weight) -> Option<&'a TensorInfo> {
        self.weights.get(w as usize).copied().flatten()
    }
    /// Whether w_uk and w_uv are to be taken out of attn_kv_b, as [`super::LayerWeights::load`] decides.
    fn legacy(&self) -> bool {
        self.get(Weight::WUk).is_none() && self.kv_b.is_some()
    }
    fn attention(&self) -> bool {
        self.kv_b.is_some() || self.weights.iter().any(Option::is_some)
    }
}

struct Lint<'a> {
    model: &'a Model,
    gguf: &'a Gguf,
    layers: BTreeMap<usize, InLayer<'a>>,
    /// Layers behind the last ordinary one, for multi-token prediction.
    mtp: Range<usize>,
    found: Vec<Finding>,
    /// What was found, in layers.
    by_layer: BTreeMap<(Severity, String), BTreeSet<usize>>,
}

/// All findings, the worst first.
pub fn lint(model: &Model) -> Vec<Finding> {
    let gguf = match model.source() {
        Source::Gguf(gguf) => gguf,
        Source::Checkpoint(c, _) => return checkpoint::lint(model, c),
    };
    let mut layers: BTreeMap<usize, InLayer> = BTreeMap::new();
    for tensor in gguf.tensors() {
        let Some((layer, name)) = in_layer(&tensor.name) else { continue };
        let layer = layers.entry(layer).or_default();
        if name == LEGACY {
            layer.kv_b = Some(tensor);
        } else if let Some(row) = WEIGHTS.iter().find(|r| r.gguf == name) {
            layer.weights[row.weight as usize] = Some(tensor);
        } else if name.starts_with("attn") && !name.ends_with("scale") {
            layer.strange.push(name);
        }
        layer.nextn |= name.starts_with("nextn.");
    }
    let mtp = model.mtp_layers();
    let mut lint = Lint { model, gguf, layers, mtp, found: Vec::new(), by_layer: BTreeMap::new() };
    if let Some(what) = model.arch.warning() {
        lint.metadata(Severity::Warning, what);
    }
    for what in types::odd(gguf, model.arch.name) {
        lint.metadata(Severity::Warning, what);
    }
    lint.count();
    lint.weights();
    lint.layout();
    lint.lengths();
    lint.strange();
    lint.integers();
    lint.file_type();
    lint.container();
    lint.conventions();
    let Lint { by_layer, mut found, .. } = lint;
    found.extend(by_layer.into_iter().map(|((severity, what), layers)| {
        let layers: Vec<usize> = layers.into_iter().collect();
        match layers.as_slice() {
            [n] => {
                let what = what.replace("blk.*.", &format!("blk.{n}."));
                Finding { severity, what, place: format!("layer {n}") }
            }
            all => Finding { severity, what, place: format!("layers {}", list(all)) },
        }
    }));
    found.sort_by_key(|f| f.severity);
    found
}

impl Lint<'_> {
    fn metadata(&mut self, severity: Severity, what: String) {
        self.found.push(Finding { severity, what, place: "metadata".into() });
    }
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.model.arch.name)
    }
    /// Integers of a key; of one that has another type, a warning.
    fn ints(&mut self, name: &str) -> Option<Vec<u64>> {
        let key = self.key(name);
        match self.gguf.metadata().u64_or_array(&key) {
            Ok(values) => values,
            Err(e) => {
                self.metadata(Severity::Warning, format!("{key}: {}", e.problem()));
                None
            }
        }
    }

    /// Layers that are there against layers that should be.
    fn count(&mut self) {
        let blocks = self.model.blocks;
        let beyond: Vec<usize> = self.layers.range(blocks..).map(|l| *l.0).collect();
        if !beyond.is_empty() {
            let what =
                format!("layers {} lie beyond block_count {blocks}: no engine reads them", list(&beyond));
            self.metadata(Severity::Warning, what);
        }
        // Every layer has MLA, but for those that the metadata says are of another kind (as many as its array is long). Holes
        // are sought between the layers that are there, so that a mad block_count costs nothing.
        let others = self.model.other_layers();
        let there: BTreeSet<usize> = self.layers.keys().copied().filter(|n| *n < blocks).collect();
        let left_out: Vec<usize> = others.iter().copied().filter(|n| !there.contains(n)).collect();
        let mut next = 0;
        let mut holes: Vec<Range<usize>> = Vec::new();
        for n in there.iter().chain(&others).copied().collect::<BTreeSet<usize>>().into_iter().chain([blocks])
        {
            if n > next {
                holes.push(next..n);
            }
            next = n + 1;
        }
        if let Some(first) = holes.first() {
            let (severity, why) = if first.start >= self.mtp.start {
                (Severity::Warning, "the layers for multi-token prediction were left out")
            } else {
                (Severity::Defect, "parts of the file are missing, or block_count is wrong")
            };
            let name = |r: &Range<usize>| {
                if r.len() == 1 { format!("{}", r.start) } else { format!("{}..{}", r.start, r.end - 1) }
            };
            let names = holes.iter().map(name).collect::<Vec<_>>().join(", ");
            let what = format!("block_count is {blocks}, but there are no tensors of layers {names}: {why}");
            self.metadata(severity, what);
        }
        if !left_out.is_empty() {
            let what = format!(
                "layers {} are not MLA layers ({} is 0 there) and have no tensors: attention of the others is all that can be run",
                list(&left_out),
                self.key("attention.head_count_kv")
            );
            self.metadata(Severity::Note, what);
        }
        let mtp: Vec<usize> = self.layers.keys().copied().filter(|n| self.mtp.contains(n)).collect();
        if !mtp.is_empty() {
            let what = "for multi-token prediction (MTP): engines without it leave these layers out";
            self.by_layer.insert((Severity::Note, what.into()), mtp.into_iter().collect());
        }
        let marked: BTreeSet<usize> =
            self.layers.iter().filter(|(n, l)| l.nextn && !self.mtp.contains(n)).map(|l| *l.0).collect();
        if !marked.is_empty() {
            let what = format!(
                "nextn tensors, but {} does not count these layers for multi-token prediction",
                self.key("nextn_predict_layers")
            );
            self.by_layer.insert((Severity::Warning, what), marked);
        }
    }

    /// Each layer's tensors: there, of the right shape, of a type that can be decoded.
    fn weights(&mut self) {
        let g = self.model.geometry;
        let mut found: Vec<(usize, Severity, String)> = Vec::new();
        for (&n, layer) in self.layers.range(..self.model.blocks) {
            let kv_a = layer.get(Weight::WKvA).is_some();
            if self.model.other_attention(n) {
                if kv_a {
                    let key = self.key("attention.head_count_kv");
                    let what = format!(
                        "{key} is 0, which means that the layer has no MLA attention, but it has its tensors; `run` takes it for one"
                    );
                    found.push((n, Severity::Warning, what));
                }
                continue;
            }
            // Whether a layer of mixed kinds has MLA attention is not said: by what it holds.
            if self.model.mixed_and_silent() && !kv_a {
                continue;
            }
            if !layer.attention() {
                let severity = if self.mtp.contains(&n) { Severity::Warning } else { Severity::Defect };
                found.push((n, severity, "no attention tensors".into()));
                continue;
            }
            let legacy = layer.legacy();
            for &w in Weight::ALL.iter().filter(|w| w.exists(&g)) {
                let from_kv_b = legacy && matches!(w, Weight::WUk | Weight::WUv);
                let Some(tensor) = (if from_kv_b { layer.kv_b } else { layer.get(w) }) else {
                    let other = match w {
                        Weight::WUk => format!(" (nor is there {LEGACY})"),
                        Weight::WUv if layer.kv_b.is_some() => {
                            format!(" ({LEGACY} is there, but {} goes first)", Weight::WUk.row().gguf)
                        }
                        _ => String::new(),
                    };
                    let name = w.row().gguf;
                    found.push((n, Severity::Defect, format!("tensor blk.*.{name} ({w}) is missing{other}")));
                    continue;
                };
                if from_kv_b && w == Weight::WUv {
                    continue;
                }
                let name = if from_kv_b { LEGACY } else { w.row().gguf };
                if let Some(error) = self.gguf.damage(tensor) {
                    found.push((n, Severity::Defect, format!("blk.*.{name} ({w}): {}", error.problem())));
                    continue;
                }
                let (wanted, folded) = dims(w, &g, from_kv_b);
                if tensor.dims != wanted && tensor.dims == folded {
                    let what = format!(
                        "blk.*.{name} is folded to two axes {}, not {}: the same bytes, but llama.cpp refuses it",
                        shape(&folded),
                        shape(&wanted)
                    );
                    found.push((n, Severity::Warning, what));
                } else if tensor.dims != wanted {
                    let what = format!(
                        "tensor blk.*.{name} ({w}) has shape {} (fastest first), its metadata asks for {}{}",
                        shape(&tensor.dims),
                        shape(&wanted),
                        self.hint(w, &tensor.dims, &wanted)
                    );
                    found.push((n, Severity::Defect, what));
                }
                found
                    .extend(scale::finding(self.gguf, tensor, w).map(|(severity, what)| (n, severity, what)));
                if !tensor.ty.known().is_some_and(dequant::is_supported) {
                    let what = format!(
                        "blk.*.{name} has type {}, which can't be decoded: `run` can't judge this layer",
                        tensor.ty
                    );
                    found.push((n, Severity::Warning, what));
                }
            }
        }
        for (n, severity, what) in found {
            self.by_layer.entry((severity, what)).or_default().insert(n);
        }
    }

    /// What a wrong shape looks like.
    fn hint(&self, w: Weight, found: &[u64], wanted: &[u64]) -> String {
        let g = self.model.geometry;
        let sorted = |d: &[u64]| {
            let mut d = d.to_vec();
            d.sort_unstable();
            d
        };
        if sorted(found) == sorted(wanted) {
            return ": it looks transposed".into();
        }
        match (w, found) {
            (Weight::WKvA, [_, rows]) if *rows > g.latent as u64 => format!(
                ": its rows leave {} for rope after a latent of {}, but {} is {}",
                rows - g.latent as u64,
                g.latent,
                self.key("rope.dimension_count"),
                g.rope
            ),
            _ => String::new(),
        }
    }

    /// attn_k_b and attn_v_b, or attn_kv_b, and the keys that go with each.
    fn layout(&mut self) {
        let g = self.model.geometry;
        let of = |test: &dyn Fn(&InLayer) -> bool| -> Vec<usize> {
            self.layers.range(..self.model.blocks).filter(|(_, l)| test(l)).map(|l| *l.0).collect()
        };
        let split = of(&|l| l.get(Weight::WUk).is_some());
        let legacy = of(&|l| l.legacy());
        let both =
            of(&|l| l.kv_b.is_some() && (l.get(Weight::WUk).is_some() || l.get(Weight::WUv).is_some()));
        let mla_keys = self.gguf.metadata().get(&self.key("attention.key_length_mla")).is_some();
        if !both.is_empty() {
            let what = format!(
                "both layouts: {LEGACY} beside the split attn_k_b and attn_v_b, with values of their own. `run` takes attn_k_b where it is there; llama.cpp refuses such a file"
            );
            self.by_layer.insert((Severity::Warning, what), both.into_iter().collect());
        }
        if mla_keys && !legacy.is_empty() {
            let what = format!(
                "only {LEGACY}, but the metadata has key_length_mla, with which llama.cpp looks for attn_k_b and attn_v_b; `run` takes attn_kv_b"
            );
            self.by_layer.insert((Severity::Warning, what), legacy.iter().copied().collect());
        }
        if !mla_keys && !split.is_empty() {
            let length = g.key();
            let (severity, why) = if length == self.cache_row() {
                let why =
                    "that is the width of a cache row (kv_lora_rank + rope): every width of a head is wrong";
                (Severity::Defect, why)
            } else {
                (Severity::Warning, "llama.cpp looks for attn_kv_b then")
            };
            let what = format!(
                "attn_k_b without the key {}, so that key_length {length} was taken as the width of a head; {why}",
                self.key("attention.key_length_mla")
            );
            self.by_layer.insert((severity, what), split.iter().copied().collect());
        }
        if g.nope == g.latent && !split.is_empty() {
            let what = format!(
                "attn_k_b is square ({} x {}): were it transposed, its shape would not show it",
                g.nope, g.latent
            );
            self.by_layer.insert((Severity::Warning, what), split.iter().copied().collect());
        }
        if self.model.arch.widths == Widths::Plain && !split.is_empty() {
            let what = format!(
                "attn_k_b, but engines look for {LEGACY} in files of architecture {}; `run` takes attn_k_b",
                self.model.arch.name
            );
            self.by_layer.insert((Severity::Warning, what), split.iter().copied().collect());
        }
        let expected = if split.is_empty() { g.heads as u64 } else { 1 };
        let (layout, key) =
            (if split.is_empty() { LEGACY } else { "attn_k_b" }, self.key("attention.head_count_kv"));
        let found = self.ints("attention.head_count_kv");
        let odd = match &found {
            // Absent means as many as heads.
            None => (expected == 1 && g.heads > 1).then(|| format!("absent, which means {}", g.heads)),
            // 0: a layer without MLA attention, where there may be some.
            Some(all) => {
                let other = self.model.arch.layers == Layers::ByHeadCountKv;
                all.iter().find(|n| **n != expected && !(other && **n == 0)).map(u64::to_string)
            }
        };
        if let Some(odd) = odd.filter(|_| !(split.is_empty() && legacy.is_empty())) {
            let what = format!(
                "{key} is {odd}, but files with {layout} have {expected}: an engine that sizes its cache by it will go wrong"
            );
            self.metadata(Severity::Warning, what);
        }
    }

    fn cache_row(&self) -> usize {
        self.model.geometry.cache()
    }

    /// Lengths in the metadata that nothing here is read by, but that others read.
    fn lengths(&mut self) {
        let g = self.model.geometry;
        let mla_keys = self.gguf.metadata().get(&self.key("attention.key_length_mla")).is_some();
        let wanted = [
            ("attention.key_length", g.cache(), "kv_lora_rank + rope.dimension_count"),
            ("attention.value_length", g.latent, "kv_lora_rank"),
        ];
        let count = if self.model.arch.value_length_counts { 2 } else { 1 };
        for (name, wanted, why) in wanted.into_iter().take(count).filter(|_| mla_keys) {
            let odd = self.ints(name).unwrap_or_default().into_iter().find(|n| *n != wanted as u64);
            if let Some(found) = odd {
                let what = format!("{} is {found}, but a cache row has {wanted} ({why})", self.key(name));
                self.metadata(Severity::Warning, what);
            }
        }
        if self.model.arch.query == Query::Direct {
            let rank = self.ints("attention.q_lora_rank").unwrap_or_default().into_iter().find(|r| *r > 0);
            if let Some(rank) = rank {
                let what = format!(
                    "{} is {rank}, but engines of architecture {} make queries straight from the hidden state, and so does `run`",
                    self.key("attention.q_lora_rank"),
                    self.model.arch.name
                );
                self.metadata(Severity::Warning, what);
            }
        }
        if self.model.arch.factors && self.model.numbers.factors.is_none() {
            let what = "no rope_factors_short.weight and rope_factors_long.weight: frequencies are taken as they are";
            self.metadata(Severity::Warning, what.into());
        }
        let embedding = self.gguf.tensor("token_embd.weight").and_then(|t| t.dims.first().copied());
        if let Some(found) = embedding.filter(|n| *n != g.hidden as u64) {
            let what = format!(
                "{} is {}, but token_embd.weight has rows of {found}",
                self.key("embedding_length"),
                g.hidden
            );
            self.metadata(Severity::Warning, what);
        }
    }

    /// Tensors of attention layers that nothing here reads: a bias, a gate, a norm that these architectures do not have.
    fn strange(&mut self) {
        let layers = self.layers.iter().filter(|(_, l)| l.get(Weight::WKvA).is_some());
        for (&n, layer) in layers {
            for name in &layer.strange {
                let what = format!(
                    "blk.*.{name} is no weight of this architecture's attention: `run` leaves it out, llama.cpp refuses the file"
                );
                self.by_layer.entry((Severity::Warning, what)).or_default().insert(n);
            }
        }
    }

    /// Integers of the architecture stored in another type than u32: read here where they fit.
    fn integers(&mut self) {
        use crate::gguf::ValueType::{I8, I16, I32, I64, U8, U16, U64};
        let prefix = self.key("");
        let odd: Vec<String> = self
            .gguf
            .metadata()
            .iter()
            .filter(|(key, _)| key.starts_with(&prefix))
            .filter(|(_, v)| matches!(v.ty(), U8 | I8 | U16 | I16 | I32 | U64 | I64))
            .map(|(key, v)| format!("{key} ({})", v.ty().name()))
            .collect();
        if let [first, rest @ ..] = odd.as_slice() {
            let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
            self.metadata(
                Severity::Warning,
                format!("{first}{more}: not stored as u32, which llama.cpp asks for"),
            );
        }
    }

    /// general.file_type against the types of the tensors.
    fn file_type(&mut self) {
        let gguf = self.gguf;
        let id = match gguf.metadata().u64("general.file_type") {
            Ok(Some(id)) => id,
            Ok(None) => return,
            Err(e) => return self.metadata(Severity::Warning, format!("general.file_type: {}", e.problem())),
        };
        // 1024: the quantiser guessed.
        let row = file_type::FILE_TYPES.iter().find(|r| u64::from(r.0) == id & !1024);
        let what = match row {
            None => format!("general.file_type is {id}, which is no file type that is known here"),
            Some((_, name, base)) if !gguf.tensors().iter().any(|t| t.ty.to_string() == *base) => format!(
                "general.file_type is {id} ({name}), but no tensor of the file has type {base}; each tensor's own type counts"
            ),
            Some(_) => return,
        };
        self.metadata(Severity::Warning, what);
    }

    /// What the reader of the container found odd, a kind once.
    fn container(&mut self) {
        let mut kinds: Vec<(&crate::gguf::Warning, usize)> = Vec::new();
        for warning in self.gguf.warnings() {
            let kind = std::mem::discriminant(&warning.notice);
            match kinds.iter_mut().find(|(w, _)| std::mem::discriminant(&w.notice) == kind) {
                Some((_, more)) => *more += 1,
                None => kinds.push((warning, 0)),
            }
        }
        for (first, more) in kinds {
            let more = if more > 0 { format!(", and {more} more like it") } else { String::new() };
            self.found.push(Finding {
                severity: Severity::Warning,
                what: format!("{}{more}", first.notice),
                place: first.place.to_string(),
            });
        }
    }

    /// Conventions that read this file differently, and by how much.
    fn conventions(&mut self) {
        for what in conventions::differences(self.model) {
            self.metadata(Severity::Note, what);
        }
    }
}

fn shape(dims: &[u64]) -> String {
    dims.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ")
}
