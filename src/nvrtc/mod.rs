/*!
NVIDIA's run-time compiler, NVRTC: found, opened, and asked for PTX, CUBIN and what kernels take. It needs neither a GPU
nor a driver nor a toolkit: two shared libraries of a Python wheel are enough.

- `find`: where it is looked for, and which of several is taken.
- `library`: the shared library itself, and all that is `unsafe`.
- [`Options`], [`Source`], [`Compiled`]: what goes in and comes out; figures from `cubin` and `log`.
- [`stamp`]: whether committed PTX still belongs to its source. Needs no NVRTC.

```no_run
use mla_check::nvrtc::{Nvrtc, Options, Source, Target};
let nvrtc = Nvrtc::here()?;
let source = Source::new("add.cu", "extern \"C\" __global__ void add(float* x) { x[threadIdx.x] += 1.f; }");
let code = nvrtc.compile(&source, Target::sm(120), &Options::default())?;
println!("{} registers", code.kernels[0].registers);
# Ok::<(), mla_check::nvrtc::Error>(())
```
*/

mod compile;
mod cubin;
mod error;
mod find;
mod library;
mod log;
pub mod stamp;
mod target;
mod version;

pub use compile::{Compiled, Notice, Options, Resources, Source, includes};
pub use cubin::Parameter;
pub(crate) use cubin::parse as read_cubin;
pub use error::{Error, Problem};
pub use find::{Candidate, Search, VARIABLE};
pub use target::{BadTarget, Kind, Suffix, Target};
pub use version::{PINNED, Version};

use library::{End, Input, Library};
use rayon::prelude::*;
use std::ffi::CString;

/// An opened NVRTC. It may be used by several threads at once.
pub struct Nvrtc {
    library: Library,
    place: String,
}

impl Nvrtc {
    /// By this process's environment.
    ///
    /// # Errors
    /// As [`Nvrtc::find`].
    pub fn here() -> Result<Nvrtc, Error> {
        Nvrtc::find(&Search::from_environment())
    }

    /// The first of [`Search::candidates`] that can be opened.
    ///
    /// # Errors
    /// [`Problem::NotThere`] or [`Problem::Open`] of what the user named; [`Problem::Absent`] where nothing was found;
    /// else the error of the best one found.
    pub fn find(search: &Search) -> Result<Nvrtc, Error> {
        let (candidates, looked) = search.candidates()?;
        let mut first: Option<Error> = None;
        for candidate in &candidates {
            let place = candidate.library.display().to_string();
            match Library::open(&candidate.library, candidate.builtins.as_deref()) {
                Ok(library) => return Ok(Nvrtc { library, place }),
                // A bare name that the system does not know is no finding.
                Err(problem) if candidate.library.is_absolute() => {
                    first.get_or_insert(Error::new(problem, place));
                }
                Err(_) => {}
            }
        }
        Err(first.unwrap_or_else(|| Error::new(Problem::Absent { looked }, "this machine")))
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.library.version()
    }

    /// Path of its library, or the name by which the system found it.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// Numbers of the architectures it compiles for, ten times the compute capability.
    pub fn architectures(&self) -> &[u32] {
        self.library.architectures()
    }

    /// That this is another version than the pinned one, if so.
    pub fn notice(&self) -> Option<Notice> {
        Notice::of_version(self.version())
    }

    /// Compiles for one target.
    ///
    /// # Errors
    /// Where: the source's name for what is wrong with it, the library's path for all else.
    pub fn compile(&self, source: &Source, target: Target, options: &Options) -> Result<Compiled, Error> {
        let version = self.version();
        let library = |problem| Error::new(problem, &*self.place);
        if !self.architectures().contains(&target.number) {
            let known = self.architectures().iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
            return Err(library(Problem::Target { target: target.to_string(), version, known }));
        }
        let fail = |problem| Error::new(problem, &*source.name);
        let input = input(source, &options.all_arguments(target, version)).map_err(fail)?;
        let end = self
            .library
            .run(&input)
            .map_err(|f| library(Problem::Call { version, call: f.call, why: f.why }))?;
        match end {
            End::Done { log, ptx, cubin } => {
                Compiled::new((target, version, &source.name), log, ptx, cubin).map_err(fail)
            }
            End::BadCode { log } => {
                Err(fail(Problem::Code { target: target.to_string(), log: log.trim_end().into() }))
            }
            End::BadOption { log } => Err(fail(Problem::Options { version, log: log.trim_end().into() })),
            End::NoBuiltins { log } => Err(library(Problem::Builtins { log: log.trim_end().into() })),
        }
    }

    /// Compiles for several targets at once, in threads; results are in the order of `targets`.
    pub fn compile_all(
        &self,
        source: &Source,
        targets: &[Target],
        options: &Options,
    ) -> Vec<Result<Compiled, Error>> {
        targets.par_iter().map(|&target| self.compile(source, target, options)).collect()
    }
}

/// The text as C takes it.
fn input(source: &Source, arguments: &[String]) -> Result<Input, Problem> {
    let headers = source.headers.iter().map(|(name, text)| {
        Ok((c_text(name, || "name of a header".into())?, c_text(text, || format!("header {name:?}"))?))
    });
    Ok(Input {
        source: c_text(&source.text, || "source".into())?,
        name: c_text(&source.name, || "name of the source".into())?,
        headers: headers.collect::<Result<_, Problem>>()?,
        options: arguments
            .iter()
            .map(|a| c_text(a, || format!("option {a:?}")))
            .collect::<Result<_, Problem>>()?,
    })
}

fn c_text(text: &str, what: impl FnOnce() -> String) -> Result<CString, Problem> {
    CString::new(text).map_err(|e| Problem::Nul { what: what(), at: e.nul_position() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nul_byte_is_named_where_it_stands() {
        let source = Source::new("a.cu", "int x;").header("h.cuh", "int y;");
        assert!(input(&source, &["-DA=1".into()]).is_ok());
        let nul =
            |source: &Source, arguments: &[String]| input(source, arguments).err().map(|e| e.to_string());
        let at = nul(&Source::new("a.cu", "int\0x"), &[]).unwrap();
        assert!(at.contains("source has a NUL byte at offset 3"), "{at}");
        assert!(nul(&Source::new("a\0", ""), &[]).unwrap().contains("name of the source"));
        assert!(nul(&source.clone().header("i.cuh", "\0"), &[]).unwrap().contains("header \"i.cuh\""));
        assert!(nul(&source.clone().header("\0", ""), &[]).unwrap().contains("name of a header"));
        assert!(nul(&source, &["-D\0".into()]).unwrap().contains("option"));
    }

    #[test]
    fn an_absent_library_is_an_error_that_lists_where_it_was_looked_for() {
        let root = tempfile::tempdir().unwrap();
        let search = Search { toolkits: vec![root.path().into()], ..Search::default() };
        let error = Nvrtc::find(&search).err().unwrap();
        assert!(matches!(error.problem(), Problem::Absent { looked } if looked.len() == 1), "{error}");
        assert!(error.to_string().contains(&root.path().display().to_string()));
    }

    /// A file that is no library, one that is none of NVRTC, and a best candidate that is damaged.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_that_is_no_nvrtc_is_an_error_with_its_path() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("libnvrtc.so.13");
        std::fs::write(&file, b"text").unwrap();
        let named = Search { named: Some(file.clone()), ..Search::default() };
        let found = Search { toolkits: vec![root.path().into()], ..Search::default() };
        for search in [named, found] {
            let error = Nvrtc::find(&search).err().unwrap();
            assert!(matches!(error.problem(), Problem::Open { .. }), "{error}");
            assert!(error.place().ends_with("libnvrtc.so.13") && error.is_unavailable());
        }
        let system = Library::open("libc.so.6".as_ref(), None).err();
        assert!(matches!(system, Some(Problem::Symbol { name: "nvrtcGetErrorString" })), "{system:?}");
    }
}
