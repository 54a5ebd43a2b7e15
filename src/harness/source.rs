/*! Who computes: the program's engines, or a kernel author's own. */

use super::gate::{lacking_compiler, lacking_gpu};
use super::matrix::plain;
use crate::case::Batch;
use crate::check::{self, EngineKind, Options};
use crate::engine::kernels::header::COMPUTED;
use crate::engine::{Engine, EngineError};
use mla_numeric::DType;
use mla_reference::Form;

type Make = dyn Fn(&Options) -> Result<Box<dyn Engine>, EngineError> + Send + Sync;

/// An engine of the matrix, made anew for every case.
pub struct Source {
    pub(super) name: String,
    /// None: not the program's.
    pub(super) kind: Option<EngineKind>,
    pub(super) dtypes: Vec<DType>,
    /// Empty: both in one run.
    pub(super) forms: Vec<Form>,
    /// Whether the user's own models are its too.
    pub(super) own_models: bool,
    pub(super) gpu: bool,
    pub(super) lacking: Option<String>,
    /// Dtypes whose kernels have to be compiled, and why that can't be done here.
    uncompiled: Option<(Vec<DType>, String)>,
    batch: Option<Batch>,
    splits: Option<usize>,
    pub(super) make: Box<Make>,
}

impl Source {
    /// An engine of your own. `name` is the first part of its tests' names; `make` is asked once a case for an engine that
    /// computes in `options.dtype` with `options.splits()` splits of the keys in decode, in `options.forms`.
    pub fn new(
        name: &str,
        dtypes: &[DType],
        make: impl Fn(&Options) -> Result<Box<dyn Engine>, EngineError> + Send + Sync + 'static,
    ) -> Source {
        Source {
            name: plain(name),
            kind: None,
            dtypes: dtypes.to_vec(),
            forms: Form::ALL.to_vec(),
            own_models: true,
            gpu: false,
            lacking: None,
            uncompiled: None,
            batch: None,
            splits: None,
            make: Box::new(make),
        }
    }

    /// An engine of the program.
    pub fn of(kind: EngineKind) -> Source {
        let dtypes: &[DType] = match kind {
            EngineKind::Cpu | EngineKind::Ptx | EngineKind::Cuda => &COMPUTED,
            EngineKind::Reference => &[DType::F64],
        };
        let source = Source { kind: Some(kind), ..Source::new(kind.name(), dtypes, check::engine) };
        match kind {
            EngineKind::Cpu => source,
            // It holds the two forms against each other.
            EngineKind::Reference => Source { forms: Vec::new(), ..source },
            EngineKind::Ptx => {
                // PTX is committed for bf16 alone.
                let others = COMPUTED.into_iter().filter(|d| *d != DType::Bf16).collect();
                let uncompiled = lacking_compiler().map(|why| (others, why));
                // A layer of a real model takes the emulated machine hours.
                Source { own_models: false, uncompiled, ..source }
            }
            EngineKind::Cuda => source.on_gpu(lacking_gpu()),
        }
    }

    /// It needs a GPU. `lacking`: what this machine lacks for it, in a sentence; its cases are then skipped, or failures where
    /// a GPU is required. One case at a time has the GPU.
    pub fn on_gpu(self, lacking: Option<String>) -> Source {
        Source { gpu: true, lacking, ..self }
    }

    /// Runs these forms only.
    pub fn forms(self, forms: &[Form]) -> Source {
        Source { forms: forms.to_vec(), ..self }
    }

    /// Requests with the harness's own models, instead of the default ones; the user's models always get the default. It
    /// should have both phases.
    pub fn batch(self, batch: Batch) -> Source {
        Source { batch: Some(batch), ..self }
    }

    /// Splits of the keys in decode with the harness's own models, instead of one for every 256 keys.
    pub fn splits(self, splits: usize) -> Source {
        Source { splits: Some(splits), ..self }
    }

    /// Why kernels of a dtype can't be compiled here, where they have to be.
    pub(super) fn uncompiled(&self, dtype: DType) -> Option<String> {
        self.uncompiled.as_ref().filter(|(dtypes, _)| dtypes.contains(&dtype)).map(|(_, why)| why.clone())
    }

    /// Requests with a model, both phases.
    pub(super) fn requests(&self, own: bool) -> Batch {
        self.batch.clone().filter(|_| !own).unwrap_or_else(|| Options::default().batch)
    }

    /// Splits of the keys in decode; None: by length.
    pub(super) fn splits_of(&self, own: bool) -> Option<usize> {
        self.splits.filter(|_| !own)
    }

    /// What the checks take for the kind; it decides only whether float64 runs alone.
    pub(super) fn options_kind(&self) -> EngineKind {
        self.kind.unwrap_or(if self.gpu { EngineKind::Cuda } else { EngineKind::Cpu })
    }
}
