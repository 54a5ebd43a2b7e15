/*! NVIDIA's part of `devices`: driver, GPUs, compiler; where one is missing, the error that says what to do. */

use crate::cli::text::{escape, size};
use crate::device::cuda::{Gpu, Installed};
use crate::device::{Error, Limits, Problem};
use crate::nvrtc::Nvrtc;
use serde::Serialize;

/// Where lines below a name of the left column begin.
const UNDER: &str = "           ";

/// The driver and its GPUs, or why there is none.
#[derive(Serialize)]
pub struct Driver {
    library: Option<String>,
    version: Option<String>,
    /// The newest CUDA that it runs.
    cuda: Option<String>,
    gpus: Vec<GpuReport>,
    /// What is wrong, where, what to do.
    missing: Option<String>,
}

#[derive(Serialize)]
struct GpuReport {
    #[serde(flatten)]
    gpu: Gpu,
    target: String,
    /// Whether kernels can be checked for it without it: it is in the table of limits.
    known: bool,
    /// Whether the compiler makes code for it; none where there is no compiler.
    compiles: Option<bool>,
}

/// The compiler library, or why there is none.
#[derive(Serialize)]
pub struct Compiler {
    library: Option<String>,
    version: Option<String>,
    /// Numbers of the targets that it compiles for.
    targets: Vec<u32>,
    notice: Option<String>,
    missing: Option<String>,
}

impl Compiler {
    /// Looks for it.
    pub fn look() -> Compiler {
        match Nvrtc::here() {
            Ok(found) => Compiler {
                library: Some(found.place().into()),
                version: Some(found.version().to_string()),
                targets: found.architectures().into(),
                notice: found.notice().map(|n| n.to_string()),
                missing: None,
            },
            Err(e) => Compiler {
                library: None,
                version: None,
                targets: Vec::new(),
                notice: None,
                missing: Some(e.to_string()),
            },
        }
    }

    /// Whether it is there.
    pub fn is_found(&self) -> bool {
        self.missing.is_none()
    }

    /// Lines of text.
    pub fn text(&self) -> Vec<String> {
        if let Some(missing) = &self.missing {
            return lines("NVRTC", missing);
        }
        let targets = self.targets.iter().map(|n| format!("sm_{n}")).collect::<Vec<_>>().join(" ");
        let version = self.version.as_deref().unwrap_or_default();
        let mut out = vec![
            format!("NVRTC      {version}, {}", escape(self.library.as_deref().unwrap_or_default())),
            format!("{UNDER}compiles for {targets}"),
        ];
        out.extend(self.notice.iter().map(|n| format!("{UNDER}{n}")));
        out
    }
}

impl Driver {
    /// Whether it is there.
    pub fn is_found(&self) -> bool {
        self.missing.is_none()
    }

    /// Asks it.
    pub fn look(compiler: &Compiler) -> Driver {
        match Installed::look() {
            Ok(found) => Driver {
                library: found.library,
                version: found.driver,
                cuda: Some(format!("{}.{}", found.cuda.0, found.cuda.1)),
                gpus: found.gpus.into_iter().map(|gpu| GpuReport::new(gpu, compiler)).collect(),
                missing: None,
            },
            Err(e) => Driver {
                library: None,
                version: None,
                cuda: None,
                gpus: Vec::new(),
                missing: Some(e.to_string()),
            },
        }
    }

    /// Why this GPU is not there, if so.
    pub fn lacks(&self, ordinal: u32) -> Option<String> {
        let count = self.gpus.len() as u32;
        let none = || Error::new(Problem::Ordinal { ordinal, count }, "this machine").to_string();
        match &self.missing {
            Some(missing) => Some(missing.clone()),
            None => (ordinal >= count).then(none),
        }
    }

    /// Lines of text.
    pub fn text(&self) -> Vec<String> {
        if let Some(missing) = &self.missing {
            return lines("driver", missing);
        }
        let version = self.version.as_deref().unwrap_or("of a version not told");
        let cuda = self.cuda.as_deref().unwrap_or_default();
        let library = self.library.as_deref().map_or(String::new(), |l| format!(", {}", escape(l)));
        vec![format!("driver     {}, for CUDA {cuda} and older{library}", escape(version))]
    }

    /// Lines of text: each GPU.
    pub fn gpus_text(&self) -> Vec<String> {
        if self.gpus.is_empty() {
            return vec!["GPUs       none".into()];
        }
        let rows = self.gpus.iter().flat_map(|g| {
            let known = if g.known { "known" } else { "not in the table of limits" };
            let compiles = match g.compiles {
                Some(true) => "NVRTC compiles for it",
                Some(false) => "NVRTC does not compile for it: install a newer one",
                None => "no NVRTC to compile for it",
            };
            [
                format!(
                    "  {:<9}{}, compute capability {} ({}, {known}), {}",
                    g.gpu.ordinal,
                    escape(&g.gpu.name),
                    g.gpu.capability(),
                    g.target,
                    size(g.gpu.memory)
                ),
                format!(
                    "{UNDER}{} of shared memory a block, {} multiprocessors; {compiles}",
                    size(u64::from(g.gpu.limits.shared_per_block)),
                    g.gpu.multiprocessors
                ),
            ]
        });
        std::iter::once("GPUs".into()).chain(rows).collect()
    }
}

impl GpuReport {
    fn new(gpu: Gpu, compiler: &Compiler) -> GpuReport {
        let target = gpu.target();
        let compiles = compiler.missing.is_none().then(|| compiler.targets.contains(&target.number));
        GpuReport { target: target.to_string(), known: Limits::of(target).is_some(), compiles, gpu }
    }
}

/// An error's lines behind a name.
fn lines(name: &str, error: &str) -> Vec<String> {
    let shown = error.lines().map(|l| escape(l.trim()));
    shown.enumerate().map(|(i, l)| format!("{:<11}{l}", if i == 0 { name } else { "" })).collect()
}
