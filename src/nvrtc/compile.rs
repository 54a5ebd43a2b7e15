/*!
What goes into a compilation and what comes out of it.

The same source with the same options must give the same arithmetic everywhere: by default the compiler contracts no
multiplication and addition on its own (`--fmad=false`); where kernels want `fma` they write it.
*/

use super::cubin::{self, Parameter};
use super::error::Problem;
use super::log;
use super::target::Target;
use super::version::{PINNED, Version};
use serde::Serialize;
use std::fmt;

/// A source with the texts that it includes. No file is read: `#include "NAME"` finds what was given under NAME.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Name in messages: the kernel file's own.
    pub name: String,
    /// CUDA C++.
    pub text: String,
    /// Names as they are included, and texts.
    pub headers: Vec<(String, String)>,
}

impl Source {
    /// A source without headers.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Source {
        Source { name: name.into(), text: text.into(), headers: Vec::new() }
    }
    /// The same with a header.
    pub fn header(mut self, name: impl Into<String>, text: impl Into<String>) -> Source {
        self.headers.push((name.into(), text.into()));
        self
    }
}

/// Names in the `#include "…"` lines of a source.
pub fn includes(text: &str) -> Vec<String> {
    let named = |line: &str| {
        let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?.trim_start();
        Some(rest.strip_prefix('"')?.split_once('"')?.0.to_string())
    };
    text.lines().filter_map(named).collect()
}

/// Options that change the code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Macros: names and values.
    pub defines: Vec<(String, String)>,
    /// Whether the compiler may fuse a product and a sum that the source rounds apart.
    pub fmad: bool,
    /// Source lines in the code, for profilers.
    pub line_info: bool,
    /// Most registers of a thread, where `__launch_bounds__` says nothing.
    pub max_registers: Option<u32>,
    /// Further arguments, as NVRTC takes them.
    pub extra: Vec<String>,
}

impl Options {
    /// The same with a macro.
    pub fn define(mut self, name: impl Into<String>, value: impl fmt::Display) -> Options {
        self.defines.push((name.into(), value.to_string()));
        self
    }

    /// Arguments that the code depends on, the target's first.
    pub fn arguments(&self, target: Target) -> Vec<String> {
        let mut out = vec![
            format!("--gpu-architecture={target}"),
            "--std=c++17".into(),
            format!("--fmad={}", self.fmad),
        ];
        out.extend(self.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        out.extend(self.max_registers.map(|n| format!("--maxrregcount={n}")));
        out.extend(self.line_info.then(|| "-lineinfo".into()));
        out.extend(self.extra.iter().cloned());
        out
    }

    /// Those, and what makes the log complete: figures of ptxas, and no result from the driver's cache, which comes
    /// without a log.
    pub(super) fn all_arguments(&self, target: Target, version: Version) -> Vec<String> {
        let mut out = self.arguments(target);
        if target.is_real() {
            out.push("--ptxas-options=-v".into());
        }
        if version.has_no_cache() {
            out.push("--no-cache".into());
        }
        out
    }
}

/// Code, and what is known about it.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// What it was compiled for.
    pub target: Target,
    /// By which NVRTC.
    pub version: Version,
    /// Name of the source.
    pub name: String,
    /// PTX text.
    pub ptx: String,
    /// Machine code; none for a virtual target.
    pub cubin: Option<Vec<u8>>,
    /// The compiler's log, figures of ptxas included.
    pub log: String,
    /// Figures of each kernel, by name; empty for a virtual target.
    pub kernels: Vec<Resources>,
    /// What a reader should know before trusting the figures.
    pub notices: Vec<Notice>,
}

impl Compiled {
    /// A kernel's figures.
    pub fn kernel(&self, name: &str) -> Option<&Resources> {
        self.kernels.iter().find(|k| k.kernel == name)
    }
    /// Warnings and remarks of the compiler.
    pub fn diagnostics(&self) -> String {
        log::diagnostics(&self.log)
    }

    /// PTX that was compiled before, such as committed PTX. Without a CUBIN there are no figures of kernels; the version
    /// is taken to be the pinned one, by which PTX is committed.
    pub fn of_ptx(name: impl Into<String>, target: Target, ptx: impl Into<String>) -> Compiled {
        Compiled {
            target,
            version: PINNED,
            name: name.into(),
            ptx: ptx.into(),
            cubin: None,
            log: String::new(),
            kernels: Vec::new(),
            notices: Vec::new(),
        }
    }

    /// Machine code that was compiled before. There is no PTX, and spills are not known; the version is taken to be the
    /// pinned one.
    ///
    /// # Errors
    /// [`Problem::Cubin`].
    pub fn of_cubin(name: impl Into<String>, cubin: Vec<u8>) -> Result<Compiled, Problem> {
        let found = cubin::parse(&cubin).map_err(|what| Problem::Cubin { what })?;
        let number = found.number.ok_or_else(|| Problem::Cubin { what: "its target is not known".into() })?;
        let (kernels, notices) = merge(found.kernels, &[], Vec::new());
        Ok(Compiled {
            target: Target::sm(number),
            version: PINNED,
            name: name.into(),
            ptx: String::new(),
            cubin: Some(cubin),
            log: String::new(),
            kernels,
            notices,
        })
    }

    /// From what the library delivered.
    pub(super) fn new(
        (target, version, name): (Target, Version, &str),
        log: String,
        ptx: Vec<u8>,
        cubin: Vec<u8>,
    ) -> Result<Compiled, Problem> {
        let empty = |what| Problem::Empty { target: target.to_string(), what };
        let mut ptx =
            String::from_utf8(ptx).map_err(|e| Problem::NotUtf8 { at: e.utf8_error().valid_up_to() })?;
        ptx.truncate(ptx.trim_end_matches('\0').len());
        if ptx.is_empty() {
            return Err(empty("PTX"));
        }
        let ptx = without_folders(&ptx);
        let mut notices: Vec<Notice> = Notice::of_version(version).into_iter().collect();
        let mut kernels = Vec::new();
        if target.is_real() {
            if cubin.is_empty() {
                return Err(empty("CUBIN"));
            }
            let found = cubin::parse(&cubin).map_err(|what| Problem::Cubin { what })?;
            if let Some(number) = found.number.filter(|n| *n != target.number) {
                return Err(Problem::Cubin { what: format!("it is for sm_{number}, not for {target}") });
            }
            (kernels, notices) = merge(found.kernels, &log::parse(&log), notices);
        }
        let cubin = target.is_real().then_some(cubin);
        Ok(Compiled { target, version, name: name.into(), ptx, cubin, log, kernels, notices })
    }
}

/// PTX whose `.file` lines name files only: the compiler puts the folder it runs in before them, though it opens none.
fn without_folders(ptx: &str) -> String {
    let mut out = String::with_capacity(ptx.len());
    for line in ptx.split_inclusive('\n') {
        let named = line.trim_start().starts_with(".file").then(|| line.split_once('"')).flatten();
        match named.and_then(|(head, rest)| Some((head, rest.split_once('"')?))) {
            Some((head, (path, tail))) => {
                let name = path.rsplit('/').next().unwrap_or(path);
                // Time and size of a file that was never opened follow in some versions.
                out += &format!("{head}\"{name}\"{tail}");
            }
            None => out += line,
        }
    }
    out
}

/// What a kernel takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Resources {
    /// Name of the kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's stack frame: arrays that are indexed, and spills.
    pub frame_bytes: u32,
    /// Bytes of spill stores, with those of functions that are called; none where there was no log.
    pub spill_store_bytes: Option<u32>,
    /// Bytes of spill loads, likewise.
    pub spill_load_bytes: Option<u32>,
    /// Bytes of static shared memory of a block.
    pub static_shared_bytes: u32,
    /// Threads a block may have by `__launch_bounds__`.
    pub threads_bound: Option<u32>,
    /// Parameters, in order.
    pub parameters: Vec<Parameter>,
    /// Bytes of all parameters.
    pub parameter_bytes: u32,
    /// Bytes of machine code.
    pub code_bytes: u64,
}

/// Figures of the CUBIN with spills of the log, and where the two disagree.
fn merge(
    cubin: Vec<cubin::Kernel>,
    log: &[log::Entry],
    mut notices: Vec<Notice>,
) -> (Vec<Resources>, Vec<Notice>) {
    let mut unknown = Vec::new();
    let kernels = cubin
        .into_iter()
        .map(|k| {
            let entry = log.iter().find(|e| e.kernel == k.name);
            let stores = entry.and_then(|e| e.spill_store_bytes);
            let loads = entry.and_then(|e| e.spill_load_bytes);
            if stores.is_none() || loads.is_none() {
                unknown.push(k.name.clone());
            }
            if let Some(e) = entry {
                let pairs = [
                    ("registers", e.registers, k.registers),
                    ("bytes of stack frame", e.frame_bytes, k.frame_bytes),
                    ("bytes of shared memory", Some(e.static_shared_bytes), k.static_shared_bytes),
                ];
                notices.extend(pairs.into_iter().filter_map(|(what, log, cubin)| {
                    let log = log.filter(|log| *log != cubin)?;
                    Some(Notice::Disagree { kernel: k.name.clone(), what, log, cubin })
                }));
            }
            Resources {
                kernel: k.name,
                registers: k.registers,
                frame_bytes: k.frame_bytes,
                spill_store_bytes: stores,
                spill_load_bytes: loads,
                static_shared_bytes: k.static_shared_bytes,
                threads_bound: k.threads_bound,
                parameters: k.parameters,
                parameter_bytes: k.parameter_bytes,
                code_bytes: k.code_bytes,
            }
        })
        .collect();
    if !unknown.is_empty() {
        notices.push(Notice::SpillsUnknown { kernels: unknown });
    }
    (kernels, notices)
}

/// What a reader should know, and what is no error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Notice {
    #[error(
        "compiled by NVRTC {found}; this program is made for {PINNED}: code and figures may differ from committed ones"
    )]
    OtherVersion { found: Version },
    #[error("spills are not known for {}: the compiler wrote no log of them", kernels.join(", "))]
    SpillsUnknown { kernels: Vec<String> },
    #[error("kernel {kernel}: the log says {log} {what}, the CUBIN {cubin}; the CUBIN is believed")]
    Disagree { kernel: String, what: &'static str, log: u32, cubin: u32 },
}

impl Notice {
    /// That this is not the pinned version, if so.
    pub fn of_version(found: Version) -> Option<Notice> {
        (found != PINNED).then_some(Notice::OtherVersion { found })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &[u8] = b".version 9.0\n\0";
    const CUBIN: &[u8] = include_bytes!("../../fixtures/nvrtc/small.sm_120.cubin");
    const LOG: &str = include_str!("../../fixtures/nvrtc/small.sm_120.log");

    fn compiled(target: Target, log: &str, ptx: &[u8], cubin: &[u8]) -> Result<Compiled, Problem> {
        Compiled::new((target, PINNED, "small.cu"), log.into(), ptx.into(), cubin.into())
    }

    #[test]
    fn arguments_are_in_a_fixed_order_and_the_cache_is_left_out_where_it_can_be() {
        let options = Options {
            max_registers: Some(64),
            line_info: true,
            extra: vec!["-G".into()],
            ..Options::default()
        }
        .define("TILE", 32)
        .define("N", "1+1");
        let fixed = ["--gpu-architecture=sm_90", "--std=c++17", "--fmad=false", "-DTILE=32", "-DN=1+1"];
        let fixed = [&fixed[..], &["--maxrregcount=64", "-lineinfo", "-G"]].concat();
        assert_eq!(options.arguments(Target::sm(90)), fixed);
        let all = |v, t| options.all_arguments(t, v)[fixed.len()..].to_vec();
        assert_eq!(all(PINNED, Target::sm(90)), ["--ptxas-options=-v", "--no-cache"]);
        assert_eq!(all(Version { major: 12, minor: 8 }, Target::sm(90)), ["--ptxas-options=-v"]);
        assert_eq!(all(PINNED, Target::compute(90)), ["--no-cache"]);
    }

    #[test]
    fn figures_come_from_the_cubin_and_spills_from_the_log() {
        let c = compiled(Target::sm(120), LOG, PTX, CUBIN).unwrap();
        assert_eq!((c.ptx.as_str(), c.notices.len()), (".version 9.0\n", 0));
        let k = c.kernel("crowded").unwrap();
        assert_eq!((k.registers, k.frame_bytes), (64, 160));
        assert_eq!((k.spill_store_bytes, k.spill_load_bytes), (Some(404), Some(404)));
        assert_eq!(c.kernel("centre").unwrap().spill_store_bytes, Some(0));
        assert!(c.kernel("other").is_none());
    }

    /// From the driver's cache there is no log; unknown spills must not read as none.
    #[test]
    fn without_a_log_spills_are_unknown_and_all_else_is_there() {
        let c = compiled(Target::sm(120), "", PTX, CUBIN).unwrap();
        assert_eq!(c.kernel("crowded").unwrap().spill_store_bytes, None);
        assert_eq!(c.kernel("crowded").unwrap().registers, 64);
        assert_eq!(c.notices.len(), 1);
        assert!(c.notices[0].to_string().contains("centre, crowded"));
        let c = compiled(Target::sm(120), &LOG.replace("Used 64", "Used 65"), PTX, CUBIN).unwrap();
        assert!(c.notices[0].to_string().contains("log says 65 registers, the CUBIN 64"), "{:?}", c.notices);
    }

    #[test]
    fn what_a_virtual_target_gives_and_what_is_no_code() {
        let c = compiled(Target::compute(120), "", PTX, b"").unwrap();
        assert!(c.cubin.is_none() && c.kernels.is_empty() && c.notices.is_empty());
        let empty = |what| Problem::Empty { target: "sm_120".into(), what };
        assert_eq!(compiled(Target::sm(120), LOG, PTX, b"").unwrap_err(), empty("CUBIN"));
        assert_eq!(compiled(Target::sm(120), LOG, b"\0", CUBIN).unwrap_err(), empty("PTX"));
        assert_eq!(compiled(Target::sm(120), LOG, b"a\xff", CUBIN).unwrap_err(), Problem::NotUtf8 { at: 1 });
        let other = compiled(Target::sm(121), LOG, PTX, CUBIN).unwrap_err();
        assert!(other.to_string().contains("for sm_120, not for sm_121"), "{other}");
        assert!(matches!(compiled(Target::sm(120), LOG, PTX, b"ELF").unwrap_err(), Problem::Cubin { .. }));
    }
}
