/*!
A capture from the folder that `run --save` writes: its manifest says everything, and no map is needed.

Context rows of the cache are those that the run was given (the reference's side), so that a row of the engine's cache
that was changed afterwards shows.
*/

use super::{Capture, CompareError, plain, sane, scalars};
use crate::case::{Batch, Case, MOST_PARTS};
use crate::engine::Description;
use crate::judge::OPEN;
use crate::model::{Convention, Model, Reading};
use crate::trace::read::{Array, Dump, Stored};
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::{Contract, Form, Geometry, Given, Plan, Regime, Route, Scope, Sequence, Spec, Stage};
use ndarray::{Array2, s};
use serde::Deserialize;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Rows, pages and splits that a manifest may claim.
const MOST: usize = 1 << 24;

#[derive(Deserialize)]
struct Manifest {
    schema: String,
    version: String,
    engine: EngineName,
    convention: String,
    norm_eps: Option<f64>,
    #[serde(default)]
    n_ctx: Option<u64>,
    layer: usize,
    batch: String,
    positions: Vec<u64>,
    page_size: usize,
    pages: usize,
    splits: usize,
    #[serde(default = "one")]
    ranks: usize,
    #[serde(default)]
    route: Option<usize>,
    #[serde(default)]
    context_chunk: Option<usize>,
    sequences: Vec<SequenceEntry>,
    scalars: Vec<(String, f64)>,
    contract: Contract,
    tensors: Vec<Entry>,
}

fn one() -> usize {
    1
}

#[derive(Deserialize)]
struct EngineName {
    name: String,
    device: String,
}

#[derive(Deserialize)]
struct SequenceEntry {
    request: usize,
    regime: Regime,
    tokens: Range<usize>,
    context: usize,
    slots: Vec<usize>,
}

#[derive(Deserialize)]
struct Entry {
    tensor: String,
    form: Option<Form>,
    side: String,
    file: String,
    dtype: DType,
}

/// A layer that was saved.
pub struct Saved {
    dir: PathBuf,
    manifest: Manifest,
}

/// Layers of a folder that `run --save` wrote, or of one of its folders; None where it is no such folder.
///
/// # Errors
/// A manifest that can't be read.
pub fn open(dir: &Path) -> Result<Option<Vec<Saved>>, CompareError> {
    if dir.join("manifest.json").is_file() {
        return Ok(Some(vec![Saved::read(dir)?]));
    }
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let layer = entry
            .file_name()
            .to_string_lossy()
            .strip_prefix("layer-")
            .is_some_and(|n| n.parse::<usize>().is_ok());
        if layer && path.join("manifest.json").is_file() {
            all.push(Saved::read(&path)?);
        }
    }
    all.sort_by_key(Saved::layer);
    Ok((!all.is_empty()).then_some(all))
}

impl Saved {
    fn read(dir: &Path) -> Result<Saved, CompareError> {
        let path = dir.join("manifest.json");
        let bad = |what: String| {
            CompareError::new(
                what,
                path.display().to_string(),
                "save the run again with this version: mla-check run --save",
            )
        };
        let text =
            std::fs::read_to_string(&path).map_err(|e| bad(format!("the manifest can't be read: {e}")))?;
        let manifest: Manifest = serde_json::from_str(&text)
            .map_err(|e| bad(format!("the manifest is not one of this version's: {e}")))?;
        if manifest.schema != "mla-check.dump/1" {
            return Err(bad(format!("the manifest has schema {}", manifest.schema.escape_debug())));
        }
        Ok(Saved { dir: dir.into(), manifest })
    }

    /// The layer that was saved.
    pub fn layer(&self) -> usize {
        self.manifest.layer
    }

    /// How the run read the model's numbers.
    pub fn reading(&self) -> Reading {
        let all = [Convention::Auto].into_iter().chain(Convention::ALL);
        let convention =
            all.into_iter().find(|c| c.name() == self.manifest.convention).unwrap_or(Convention::Auto);
        Reading { convention, norm_eps: self.manifest.norm_eps, n_ctx: self.manifest.n_ctx }
    }

    fn bad(&self, what: impl Into<String>) -> CompareError {
        CompareError::new(what, self.dir.display().to_string(), "save the run again: mla-check run --save")
    }

    /// Reads everything.
    ///
    /// # Errors
    /// A manifest that contradicts itself or the model; files that can't be read.
    pub fn capture(&self, model: &Model) -> Result<Capture, CompareError> {
        let (m, spec) = (&self.manifest, model.spec(&self.reading()));
        let g = &spec.geometry;
        let differ = scalars(m.scalars.iter().cloned(), &spec, "scalars of the manifest")?;
        let mut case = self.case()?;
        if !g.heads.is_multiple_of(m.ranks) {
            return Err(self.bad(format!("{} ranks can't share {} heads", m.ranks, g.heads)));
        }
        let engine: Vec<&Entry> = m.tensors.iter().filter(|e| e.side == "engine").collect();
        if engine.is_empty() {
            return Err(self.bad("the folder holds no tensors of an engine"));
        }
        let (mut captured, mut tensors) = (Vec::new(), Vec::new());
        let mut forms: Vec<Form> = Vec::new();
        for entry in engine {
            let id = self.id(entry, &case.plan, g)?;
            forms.extend(id.form);
            captured.push(id);
            // What is listed and not there is the judge's to say.
            if self.dir.join(&entry.file).is_file() {
                tensors.push((id, self.tensor(id, entry, &case.plan, g)?));
            }
        }
        forms.sort();
        forms.dedup();
        if forms.is_empty() {
            forms = Form::ALL.to_vec();
        }
        let twice = captured.iter().enumerate().any(|(i, id)| captured[..i].contains(id));
        if twice {
            return Err(self.bad("the manifest lists a tensor twice"));
        }
        self.given(&mut case, &spec, &tensors)?;
        Ok(Capture {
            engine: Description::plain(
                format!("{} (mla-check {})", plain(&m.engine.name), plain(&m.version)),
                format!("saved in {}; {}", self.dir.display(), plain(&m.engine.device)),
            ),
            forms,
            case,
            contract: m.contract,
            chosen: None,
            undeclared: false,
            captured,
            tensors,
            weights: Vec::new(),
            unjudged: Vec::new(),
            closed: OPEN.to_vec(),
            model: true,
            other_software: false,
            scalars: differ,
            not_applicable: Vec::new(),
            heads: None,
            caller: Vec::new(),
            evidence: Vec::new(),
            left_out: vec!["the weights that the engine held: `run --save` does not write them".into()],
        })
    }

    fn case(&self) -> Result<Case, CompareError> {
        let m = &self.manifest;
        let batch: Batch = m.batch.parse().map_err(|_| self.bad(format!("{:?} is no batch", m.batch)))?;
        let tokens: usize = batch.0.iter().map(|r| r.new).sum();
        let route = Route { threshold: m.route, context_chunk: m.context_chunk, inside: false };
        let token_request: Vec<usize> = batch
            .order(m.route)
            .into_iter()
            .flat_map(|i| std::iter::repeat_n(i, batch.0.get(i).map_or(0, |r| r.new)))
            .collect();
        let slots = m.page_size.checked_mul(m.pages).filter(|n| *n <= MOST);
        let fits = |s: &SequenceEntry| {
            let Some(r) = batch.0.get(s.request) else { return false };
            let first = token_request.iter().position(|t| *t == s.request).unwrap_or(0);
            (s.context, s.tokens.clone()) == (r.context, first..first + r.new)
                && s.slots.len() == r.total()
                && s.slots.iter().all(|slot| slots.is_some_and(|n| *slot < n))
        };
        if m.positions.len() != tokens
            || m.page_size == 0
            || !(1..=MOST_PARTS).contains(&m.splits)
            || !(1..=MOST_PARTS).contains(&m.ranks)
            || m.sequences.is_empty()
            || m.route == Some(0)
            || m.context_chunk.is_some_and(|n| n == 0 || batch.parts(m.route, n) > MOST_PARTS)
            || !m.sequences.iter().all(fits)
        {
            return Err(self.bad(
                "the manifest contradicts itself: positions, sequences or pages are not those of its batch",
            ));
        }
        // Rows of partial results are counted by the plan, and dealt by the contract.
        let more = |s: &SequenceEntry| m.contract.split_ranges(s.slots.len()).len() > m.splits;
        if !sane(&m.contract) || m.splits > 1 && m.sequences.iter().any(more) {
            return Err(
                self.bad("the manifest contradicts itself: the contract has more splits than there are")
            );
        }
        let mut regimes: Vec<Regime> = m.sequences.iter().map(|s| s.regime).collect();
        regimes.sort();
        regimes.dedup();
        let sequences = m.sequences.iter().map(|s| Sequence {
            request: s.request,
            regime: s.regime,
            tokens: s.tokens.clone(),
            context: s.context,
            slots: s.slots.clone(),
        });
        Ok(Case {
            regimes,
            plan: Plan {
                positions: m.positions.clone(),
                token_request,
                sequences: sequences.collect(),
                page_size: m.page_size,
                pages: m.pages,
                splits: m.splits,
                ranks: m.ranks,
                route,
            },
            given: Given::default(),
            notes: Vec::new(),
            batch,
        })
    }

    fn id(&self, entry: &Entry, plan: &Plan, g: &Geometry) -> Result<TensorId, CompareError> {
        let stage = Stage::from_name(&entry.tensor).filter(|s| s.exists(g) && plan.has(*s, entry.form));
        let id = stage.map(|stage| TensorId { stage, form: entry.form });
        let id = id.filter(|id| match (id.stage.row().scope, id.form) {
            (Scope::Shared, form) => form.is_none(),
            (_, form) => form.is_some_and(|f| id.stage.in_form(f)),
        });
        let plain = Path::new(&entry.file).components().count() == 1 && !entry.file.contains("..");
        id.filter(|_| plain).ok_or_else(|| {
            self.bad(format!(
                "the manifest lists {}, which is none of its tensors",
                entry.file.escape_debug()
            ))
        })
    }

    fn array(&self, entry: &Entry) -> Result<Array, CompareError> {
        let path = self.dir.join(&entry.file);
        let read = Dump::open(&path).and_then(|d| match d.entries() {
            [one] => d.read(one).map(Some),
            _ => Ok(None),
        });
        match read {
            Ok(Some(array)) => Ok(array),
            Ok(None) => Err(self.bad(format!("{} is no array", entry.file.escape_debug()))),
            Err(e) => Err(self.bad(e.to_string().lines().next().unwrap_or_default())),
        }
    }

    fn tensor(&self, id: TensorId, entry: &Entry, plan: &Plan, g: &Geometry) -> Result<Tensor, CompareError> {
        let array = self.array(entry)?;
        let is = match array.stored {
            Stored::Float(d) => d == entry.dtype,
            Stored::UInt(n) => n == entry.dtype.bytes(),
            _ => false,
        };
        let wanted = plan.shape(id.stage, id.form, g);
        if !is || array.shape != wanted {
            return Err(self.bad(format!(
                "{} is {} of shape {:?}, the manifest says {} of {wanted:?}",
                entry.file.escape_debug(),
                array.stored,
                array.shape,
                entry.dtype
            )));
        }
        Ok(Tensor { bytes: array.bytes, ..Tensor::zeros(id, plan, g, entry.dtype) })
    }

    /// Hidden states and context rows as the run was given them: the reference's side, or the engine's where there is none.
    fn given(
        &self,
        case: &mut Case,
        spec: &Spec,
        tensors: &[(TensorId, Tensor)],
    ) -> Result<(), CompareError> {
        let g = &spec.geometry;
        let of = |stage: Stage| -> Result<Option<Tensor>, CompareError> {
            let id = TensorId::shared(stage);
            let listed = |e: &&Entry| e.side == "reference" && e.tensor == stage.name();
            match self.manifest.tensors.iter().find(listed).filter(|e| self.dir.join(&e.file).is_file()) {
                Some(entry) => {
                    self.id(entry, &case.plan, g)?;
                    self.tensor(id, entry, &case.plan, g).map(Some)
                }
                None => Ok(tensors.iter().find(|t| t.0 == id).map(|t| t.1.clone())),
            }
        };
        let hidden = of(Stage::Hidden)?.ok_or_else(|| self.bad("the folder lacks the hidden states"))?;
        let cache = of(Stage::Cache)?.ok_or_else(|| self.bad("the folder lacks the cache"))?;
        let context = case.plan.sequences.iter().map(|seq| {
            let mut own = Array2::zeros((seq.context, g.cache()));
            for (p, slot) in seq.slots.iter().take(seq.context).enumerate() {
                own.slice_mut(s![p..p + 1, ..]).assign(&cache.block(*slot..slot + 1, 0..g.cache()));
            }
            own
        });
        let context = context.collect();
        case.given =
            Given { hidden: hidden.block(0..hidden.rows, 0..hidden.cols), context, ..Given::default() };
        Ok(())
    }
}
