/*!
Code for a device: committed PTX where it still belongs to its source, else what NVRTC compiles.

Both devices get the same source with the same options, so that they compute the same bits: no contraction of products and
sums, macros from the header's tile sizes and the layer's geometry, one pinned compiler.
*/

use super::header::Names;
use super::library::{File, Library};
use super::machine::broke;
use crate::device::{Device, Module};
use crate::engine::EngineError;
use crate::nvrtc::stamp::Stamp;
use crate::nvrtc::{Compiled, Error, Kind, Nvrtc, Options, PINNED, Target};
use mla_numeric::DType;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

macro_rules! committed_ptx {
    ($($name:literal),*) => {
        &[$(($name, include_str!(concat!("../../../kernels/ptx/", $name)))),*]
    };
}

/// PTX of the fixtures' geometries (heads of 128 + 64 and 128, of 192 + 64 and 256; those of DeepSeek-V2, V3, Kimi-K2 and of
/// GLM-5, GLM-4.7-Flash too), for where there is no NVRTC.
pub const COMMITTED: &[(&str, &str)] = committed_ptx![
    "dequant.compute_120.ptx",
    "dequant_iq.compute_120.ptx",
    "dequant_low.compute_120.ptx",
    "dequant_wide.compute_120.ptx",
    "norm.compute_120.ptx",
    "product.compute_120.ptx",
    "rope.compute_120.ptx",
    "cache.compute_120.ptx",
    "merge.compute_120.ptx",
    "fused-nope128-rope64-value128.compute_120.ptx",
    "fused-nope192-rope64-value256.compute_120.ptx",
    "absorbed-rope64-latent512-shared101376.compute_120a.ptx"
];

/// A folder's worth of code, compiled as it is asked for.
pub struct Code {
    library: Library,
    compilers: Vec<String>,
    loaded: HashMap<(String, Vec<(String, i64)>), Module>,
    launched: BTreeSet<String>,
}

/// Options that a kernel file is compiled with, its dtype the first: `geometry` has the values of the scalars that it asks
/// for.
///
/// # Errors
/// A scalar that it asks for and nobody knows.
pub fn options(file: &File, geometry: Names) -> Result<Options, String> {
    let element = format!("ELEMENT_{}", file.dtype.name().to_uppercase());
    let mut options = Options { line_info: true, ..Options::default() }.define(element, 1);
    for (name, value) in &file.header.tile {
        options = options.define(name, value);
    }
    for name in &file.header.geometry {
        let value = geometry.iter().find(|(n, _)| n == name).map(|g| g.1);
        let known = || geometry.iter().map(|g| g.0).collect::<Vec<_>>().join(", ");
        let value = value.ok_or_else(|| format!("its header asks for {name:?}; a layer has {}", known()))?;
        options = options.define(name, value);
    }
    Ok(options)
}

/// What a kernel file is compiled for, on a device of this target.
pub fn target(file: &File, device: Target) -> Target {
    if file.header.specific { device.specific() } else { device }
}

/// Name of committed PTX: the kernel file's, with the geometry that it depends on.
pub fn committed_name(file: &File, geometry: Names, target: Target) -> String {
    let mut name = file.source.name.trim_end_matches(".cu").to_string();
    for g in &file.header.geometry {
        if let Some((_, value)) = geometry.iter().find(|(n, _)| n == g) {
            name += &format!("-{}{value}", g.to_lowercase());
        }
    }
    format!("{name}.{}.ptx", self::target(file, target))
}

impl Code {
    /// Nothing is compiled yet.
    pub fn new(library: Library) -> Code {
        Code { library, compilers: Vec::new(), loaded: HashMap::new(), launched: BTreeSet::new() }
    }

    /// The sources.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// What compiled the code so far, with the options that all files share.
    pub fn compilers(&self) -> &[String] {
        &self.compilers
    }

    /// Takes down that an entry point ran.
    pub fn note(&mut self, entry: &str) {
        if !self.launched.contains(entry) {
            self.launched.insert(entry.to_string());
        }
    }

    /// Whether one of these entry points (none named: any) of a file, or of one that includes it, ran.
    pub fn launched(&self, file: &str, entries: &[&str]) -> bool {
        let ran = |entry: &&String| entries.is_empty() || entries.contains(&entry.as_str());
        self.launched.iter().filter(ran).any(|entry| {
            let source = self.library.with_entry(entry).map(|(_, f)| &f.source);
            source.is_some_and(|s| s.name == file || s.headers.iter().any(|(name, _)| name == file))
        })
    }

    /// The module of a kernel file for a geometry, compiled and loaded at its first use.
    ///
    /// # Errors
    /// What, where, what to do.
    pub fn module<D: Device>(
        &mut self,
        device: &mut D,
        name: &str,
        geometry: Names,
    ) -> Result<Module, EngineError> {
        let missing = || EngineError::Broke(format!("no kernel file is called {name}"));
        let file = self.library.file(name).ok_or_else(missing)?;
        let scalars = geometry.iter().filter(|(n, _)| file.header.geometry.iter().any(|g| g == n));
        let key = (name.to_string(), scalars.map(|(n, v)| (n.to_string(), *v)).collect());
        if let Some(&module) = self.loaded.get(&key) {
            return Ok(module);
        }
        let options = options(file, geometry).map_err(|e| {
            EngineError::Broke(format!(
                "{e}\n  where: {}\n  do: correct its header",
                self.library.place(name)
            ))
        })?;
        let target = target(file, device.target());
        let compiled = match committed(file, &options, geometry, target) {
            Some(compiled) => Arc::new(compiled),
            None => compiled(file, target, &options)?,
        };
        let by = match &compiled.log {
            _ if compiled.cubin.is_none() && compiled.log.is_empty() => {
                format!("committed PTX of NVRTC {PINNED}")
            }
            _ => format!("NVRTC {}", compiled.version),
        };
        let by = format!("{by} {}", Options { defines: Vec::new(), ..options }.arguments(target).join(" "));
        if !self.compilers.contains(&by) {
            self.compilers.push(by);
        }
        let module = device.load(&compiled).map_err(broke)?;
        self.loaded.insert(key, module);
        Ok(module)
    }
}

/// Code that this process compiled before, by what it was made from: a study opens its device anew for every run.
static COMPILED: Mutex<BTreeMap<String, Arc<Compiled>>> = Mutex::new(BTreeMap::new());
static COMPILER: OnceLock<Nvrtc> = OnceLock::new();

/// Compiles, or finds what was compiled.
fn compiled(file: &File, target: Target, options: &Options) -> Result<Arc<Compiled>, EngineError> {
    let nvrtc = match COMPILER.get() {
        Some(nvrtc) => nvrtc,
        None => {
            let found = Nvrtc::here().map_err(|e| absent(&e, file, target))?;
            COMPILER.get_or_init(|| found)
        }
    };
    let key = format!("{:?}", Stamp::of(&file.source, target, options, nvrtc.version()));
    let known = || COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(code) = known().get(&key) {
        return Ok(code.clone());
    }
    let code = Arc::new(nvrtc.compile(&file.source, target, options).map_err(|e| compiling(&e))?);
    known().insert(key, code.clone());
    Ok(code)
}

/// No compiler: where PTX is committed for another dtype, that is a way out.
fn absent(e: &Error, file: &File, target: Target) -> EngineError {
    match compiling(e) {
        EngineError::Unavailable(text)
            if file.built_in && target.kind == Kind::Virtual && file.dtype != DType::Bf16 =>
        {
            EngineError::Unavailable(format!("{text}; or pass --dtype bf16, whose PTX the program has"))
        }
        e => e,
    }
}

/// A compiler that is not there is the machine's affair; code that does not compile is an engine that broke.
fn compiling(e: &Error) -> EngineError {
    match e.problem() {
        _ if e.is_unavailable() => EngineError::Unavailable(e.to_string()),
        _ => EngineError::Broke(e.to_string()),
    }
}

/// Committed PTX, where it belongs to this source, these options and this target.
fn committed(file: &File, options: &Options, geometry: Names, target: Target) -> Option<Compiled> {
    if target.kind != Kind::Virtual {
        return None;
    }
    let name = committed_name(file, geometry, target);
    let text = COMMITTED.iter().find(|(n, _)| *n == name)?.1;
    let ptx = Stamp::of(&file.source, target, options, PINNED).check(text).ok()?;
    Some(Compiled::of_ptx(&file.source.name, target, ptx))
}
