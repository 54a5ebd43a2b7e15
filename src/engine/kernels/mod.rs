/*!
The engine of our own kernels: the program's kernel files, or a folder of the user's, on any device.

Host code is written once, over [`Device`]: a GPU through its driver, or the PTX machine. Kernel files say themselves how
they are launched and what they round ([`header`]); nothing here knows a tile size. Nothing on the device is trusted
([`machine`]).
*/

pub mod code;
pub mod edit;
pub mod expression;
pub mod header;
pub mod library;
pub mod machine;
mod run;
mod weights;
mod work;

use super::stack::QkvA;
use super::{Description, Engine, EngineError, KernelFile, Sink, fits};
use crate::case::Case;
use crate::device::{Device, Limits};
use crate::model::Layer;
use code::Code;
use library::Library;
use machine::Machine;
use mla_numeric::DType;
use mla_reference::{Contract, Form, Geometry, Splits};
use std::cell::RefCell;

/// Our kernels on a device.
pub struct KernelEngine<D: Device> {
    name: &'static str,
    contract: Contract,
    splits: usize,
    /// Whether q_a and kv_a are one product.
    pub qkv_a: QkvA,
    /// Number of the pool's first page: its pages lie that far behind the beginning of its memory.
    pub first_page: usize,
    inner: RefCell<(D, Code)>,
}

/// Scalars of a layer, and of a device, that kernels may be compiled for.
pub fn scalars(g: &Geometry, limits: &Limits) -> Vec<(&'static str, i64)> {
    [
        ("HIDDEN", g.hidden),
        ("HEADS", g.heads),
        ("Q_RANK", g.q_rank),
        ("LATENT", g.latent),
        ("ROPE", g.rope),
        ("NOPE", g.nope),
        ("VALUE", g.value),
        ("SHARED", limits.shared_per_block as usize),
    ]
    .map(|(name, value)| (name, value as i64))
    .to_vec()
}

impl<D: Device> KernelEngine<D> {
    /// Kernels of a library on a device. `name` is the engine's in reports; the plan must have `splits`, and
    /// only `forms` may be run.
    ///
    /// # Errors
    /// Headers whose contracts contradict each other.
    pub fn new(
        name: &'static str,
        device: D,
        library: Library,
        splits: usize,
        forms: &[Form],
    ) -> Result<KernelEngine<D>, EngineError> {
        let contract = with_splits(contract(&library, forms).map_err(EngineError::Broke)?, splits);
        let inner = RefCell::new((device, Code::new(library)));
        Ok(KernelEngine { name, contract, splits, qkv_a: QkvA::Split, first_page: 0, inner })
    }

    /// Runs with these splits and the contract that says so.
    fn run_split(
        &self,
        (splits, contract): (usize, Contract),
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        fits(self.name, splits, layer, case)?;
        if !case.given.selection.is_empty() {
            let what = "the kernels attend over all keys that a token sees, not over a selection";
            let advice = "use engine cpu or reference, or a case without a selection";
            return Err(EngineError::Broke(format!("{what}\n  where: engine {}\n  do: {advice}", self.name)));
        }
        let mut inner = self.inner.borrow_mut();
        let (device, code) = &mut *inner;
        let scalars = scalars(&layer.spec.geometry, &device.limits());
        let mut machine = Machine::new(device, code, scalars);
        run::Run::new(&mut machine, (contract, self.qkv_a, self.first_page), layer, case, sink)?
            .all(forms, sink)
    }

    /// Lends the device.
    pub fn with_device<T>(&self, use_it: impl FnOnce(&mut D) -> T) -> T {
        use_it(&mut self.inner.borrow_mut().0)
    }
}

/// The contract with splits: of whole tiles of both forms, so that both are cut alike.
fn with_splits(contract: Contract, parts: usize) -> Contract {
    let tiles = [contract.softmax.tile, contract.of_form(Some(Form::Absorbed)).softmax.tile];
    let splits = match tiles {
        [one, other] if one == other => parts.into(),
        [one, other] => Splits::Equal { parts, multiple: common_multiple(one.max(1), other.max(1)) },
    };
    Contract { splits, ..contract }
}

fn common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

/// What the kernels of a library declare together, and what this host adds: norms' weights, partial results and lse are
/// float32. The two forms may have tiles of their own.
fn contract(library: &Library, forms: &[Form]) -> Result<Contract, String> {
    let mut all: Option<(String, Contract)> = None;
    let unused = |name: &str| {
        (name == "fused.cu" && !forms.contains(&Form::Fused))
            || (name == "absorbed.cu" && !forms.contains(&Form::Absorbed))
    };
    for (name, file) in library.files().filter(|(n, _)| !unused(n)) {
        let place = || library.place(name);
        let wrong = |e: String| format!("{e}\n  where: {}\n  do: correct its header", place());
        let Some(mut c) = file.header.contract_for(file.dtype).map_err(wrong)? else { continue };
        c = Contract { norm_weights: DType::F32, ..c };
        let attends = c.softmax != mla_reference::Softmax::exact();
        match &mut all {
            None => all = Some((place(), c)),
            Some((_, known))
                if !attends && (known.activations, known.accumulate) == (c.activations, c.accumulate) => {}
            Some((other, known)) if known.softmax == mla_reference::Softmax::exact() => {
                if (known.activations, known.accumulate) != (c.activations, c.accumulate) {
                    return Err(apart(&place(), other));
                }
                (*other, *known) = (place(), c);
            }
            Some((_, known)) if *known == c => {}
            // Files come by name: the absorbed form's first.
            Some((_, known)) if Contract { softmax: c.softmax, ..*known } == c => {
                (known.absorbed, known.softmax) = (Some(known.softmax), c.softmax);
            }
            Some((other, _)) => return Err(apart(&place(), other)),
        }
    }
    all.map(|(_, c)| c).ok_or_else(|| {
        "no kernel file declares a contract\n  where: the kernel files\n  do: give one a [contract]".into()
    })
}

fn apart(one: &str, other: &str) -> String {
    format!(
        "two kernel files declare contracts that contradict each other\n  where: {one} and {other}\n  do: give both the same roundings (their softmax may differ), or run one --form"
    )
}

impl<D: Device> Engine for KernelEngine<D> {
    fn describe(&self) -> Description {
        let inner = self.inner.borrow();
        let (device, code) = (&inner.0, &inner.1);
        let kernels: Vec<KernelFile> = code
            .library()
            .files()
            .map(|(_, f)| KernelFile {
                name: f.source.name.clone(),
                hash: f.hash.to_string(),
                built_in: f.built_in,
            })
            .collect();
        let theirs: Vec<&str> = kernels.iter().filter(|k| !k.built_in).map(|k| k.name.as_str()).collect();
        let device = match theirs.as_slice() {
            [] => device.describe(),
            some => {
                format!("{}, with {} {}", device.describe(), some.join(", "), code.library().theirs())
            }
        };
        Description { name: self.name.into(), device, kernels, compilers: code.compilers().to_vec() }
    }

    fn with_splits(&self, splits: usize) -> Option<Box<dyn Engine + '_>> {
        let contract = with_splits(self.contract, splits);
        Some(Box::new(Split { engine: self, contract, splits }))
    }

    fn launched(&self, file: &str, entries: &[&str]) -> Option<bool> {
        Some(self.inner.borrow().1.launched(file, entries))
    }

    fn contract(&self) -> Contract {
        self.contract
    }

    fn run(
        &self,
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        self.run_split((self.splits, self.contract), layer, case, forms, sink)
    }
}

/// The same kernels on the same device, with other splits.
struct Split<'a, D: Device> {
    engine: &'a KernelEngine<D>,
    contract: Contract,
    splits: usize,
}

impl<D: Device> Engine for Split<'_, D> {
    fn describe(&self) -> Description {
        self.engine.describe()
    }

    fn launched(&self, file: &str, entries: &[&str]) -> Option<bool> {
        self.engine.launched(file, entries)
    }

    fn contract(&self) -> Contract {
        self.contract
    }

    fn run(
        &self,
        layer: &Layer,
        case: &Case,
        forms: &[Form],
        sink: &mut dyn Sink,
    ) -> Result<(), EngineError> {
        self.engine.run_split((self.splits, self.contract), layer, case, forms, sink)
    }
}
