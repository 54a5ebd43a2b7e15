/*!
Where NVRTC is looked for: what the user names, CUDA toolkits, Python wheels, the system's own search.

What the user names is the only place then: falling back to another one would compile with a library that was not asked
for. Otherwise the pinned version is preferred wherever it lies, then higher versions, then the order of the search.
Versions are read off file names; no library is opened to find out. Folders named `stubs` hold stand-ins for linking.
*/

use super::error::{Error, Problem};
use super::version::{PINNED, Version};
use std::cmp::Reverse;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The environment variable that names a library or its folder.
pub const VARIABLE: &str = "MLA_CHECK_NVRTC";

/// How long a Python may take to say where its packages are.
const PATIENCE: Duration = Duration::from_secs(5);

/// Below a folder that holds Python packages, or a toolkit: where libraries may lie.
const BELOW: [&str; 7] =
    ["", "lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "cu13/lib", "cuda_nvrtc/lib"];
/// The same for NVIDIA's other libraries, in wheels for CUDA 12.
const BESIDE: &str = "cublas/lib";

/// Where to look.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// A library or a folder that the user named: the only place then.
    pub named: Option<PathBuf>,
    /// Folders of CUDA toolkits.
    pub toolkits: Vec<PathBuf>,
    /// Python environments.
    pub environments: Vec<PathBuf>,
    /// A Python to ask for its packages, if nothing above holds the pinned version.
    pub python: Option<PathBuf>,
    /// Whether to ask the system's loader for the library by name, last.
    pub system: bool,
}

/// A library that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its path, or its name for the system's loader.
    pub library: PathBuf,
    /// The builtins library of the same folder.
    pub builtins: Option<PathBuf>,
    /// By the files' names.
    pub version: Option<Version>,
}

impl Search {
    /// By the environment of this process.
    pub fn from_environment() -> Search {
        Search::with(&|name| std::env::var_os(name))
    }

    /// By the variables that are given: `MLA_CHECK_NVRTC`, `CUDA_HOME`, `CUDA_PATH`, `VIRTUAL_ENV`, `CONDA_PREFIX`; and
    /// where toolkits are installed.
    pub fn with(variable: &dyn Fn(&str) -> Option<OsString>) -> Search {
        let folder = |name| variable(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let mut toolkits: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(folder).collect();
        toolkits.extend(folder("CONDA_PREFIX"));
        toolkits.extend(installed(Path::new("/usr/local")));
        toolkits.extend([PathBuf::from("/opt/cuda")].into_iter().filter(|p| p.is_dir()));
        Search {
            named: folder(VARIABLE),
            toolkits,
            environments: ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folder).collect(),
            python: Some("python3".into()),
            system: true,
        }
    }

    /// What is there, best first, and the places that were looked at.
    pub fn candidates(&self) -> Result<(Vec<Candidate>, Vec<String>), Error> {
        if let Some(named) = &self.named {
            return self::named(named).map(|found| (vec![found], vec![named.display().to_string()]));
        }
        let (mut found, mut looked): (Vec<Candidate>, Vec<String>) = (Vec::new(), Vec::new());
        let mut look = |folder: &Path, found: &mut Vec<Candidate>| {
            looked.push(folder.display().to_string());
            let new = BELOW.iter().filter_map(|below| in_folder(&folder.join(below)));
            found.extend(new.filter(|c| !found.iter().any(|f| f.library == c.library)).collect::<Vec<_>>());
        };
        for folder in self.toolkits.iter().cloned().chain(self.environments.iter().flat_map(|e| packages(e)))
        {
            look(&folder, &mut found);
        }
        if let Some(python) = &self.python
            && !found.iter().any(|c| c.version == Some(PINNED))
        {
            match ask(python, PATIENCE) {
                Some(folders) => folders.iter().for_each(|folder| look(folder, &mut found)),
                None => looked.push(format!("{} (no package `nvidia`)", python.display())),
            }
        }
        found.sort_by_key(|c| (c.version != Some(PINNED), Reverse(c.version)));
        if self.system {
            looked.push("the system's library path".into());
            found.extend(["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"].map(|name| Candidate {
                library: name.into(),
                builtins: None,
                version: None,
            }));
        }
        Ok((found, looked))
    }
}

impl Search {
    /// Other libraries of NVIDIA's that lie in the same places, by their names, in the order of the search.
    pub fn libraries(&self, names: &[&str]) -> Vec<PathBuf> {
        let mut folders: Vec<PathBuf> = self.named.iter().cloned().collect();
        folders.extend(self.named.iter().filter_map(|n| n.parent().map(Path::to_path_buf)));
        folders.extend(self.toolkits.iter().cloned());
        folders.extend(self.environments.iter().flat_map(|e| packages(e)));
        folders.extend(self.python.iter().filter_map(|p| ask(p, PATIENCE)).flatten());
        let below = folders.iter().flat_map(|f| BELOW.iter().chain([&BESIDE]).map(|b| f.join(b)));
        let files = below.filter(|f| !is_stubs(f)).flat_map(|f| names.iter().map(move |n| f.join(n)));
        files.filter(|f| f.is_file()).map(|f| std::path::absolute(&f).unwrap_or(f)).collect()
    }
}

/// Toolkits of a folder: `cuda`, which is shown as looked at even where it is not, and `cuda-13.0` and the like.
fn installed(folder: &Path) -> Vec<PathBuf> {
    let versions = names(folder).into_iter().filter(|n| n.starts_with("cuda-"));
    std::iter::once("cuda".into()).chain(versions).map(|n: String| folder.join(n)).collect()
}

/// The library that the user named, by its file or a folder.
fn named(path: &Path) -> Result<Candidate, Error> {
    let fail = |why: &str| {
        let place = format!("{} (named by {VARIABLE} or an option)", path.display());
        Err(Error::new(Problem::NotThere { why: why.into() }, place))
    };
    if is_stubs(path) || path.parent().is_some_and(is_stubs) {
        return fail("a folder named stubs holds stand-ins for linking");
    }
    if path.is_dir() {
        let below = BELOW.iter().map(|b| path.join(b));
        let below = below.chain(["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].iter().map(|b| path.join(b)));
        return match below.into_iter().find_map(|folder| in_folder(&folder)) {
            Some(found) => Ok(found),
            None => fail("the folder holds no libnvrtc.so.*"),
        };
    }
    if path.is_file() {
        return Ok(candidate(path.to_path_buf(), path.parent().unwrap_or(Path::new("."))));
    }
    fail("no such file or folder")
}

/// `site-packages/nvidia` of a Python environment.
fn packages(environment: &Path) -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> = ["lib", "lib64"]
        .iter()
        .flat_map(|lib| names(&environment.join(lib)).into_iter().map(move |name| Path::new(lib).join(name)))
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")))
        .map(|p| environment.join(p).join("site-packages/nvidia"))
        .filter(|p| p.is_dir())
        .collect();
    if out.is_empty() {
        out.push(environment.join("lib/python3/site-packages/nvidia")); // shown as looked at
    }
    out
}

/// Asks a Python where its package `nvidia` lies (it has no file of its own, and may lie in several folders).
fn ask(python: &Path, patience: Duration) -> Option<Vec<PathBuf>> {
    // Without the current folder, where anybody's file named nvidia.py would be run.
    const QUESTION: &str = "import sys
sys.path[:] = [p for p in sys.path if p not in ('', '.')]
import nvidia
for p in nvidia.__path__: print(p)";
    let mut child = Command::new(python)
        .args(["-c", QUESTION])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut stdout = child.stdout.take()?;
    let (sender, answer) = std::sync::mpsc::channel();
    // A thread of its own, because reading a pipe can't be given up: it ends when whoever holds the pipe does.
    std::thread::Builder::new()
        .spawn(move || {
            let mut text = Vec::new();
            if std::io::Read::read_to_end(&mut stdout, &mut text).is_ok() {
                let _ = sender.send(text);
            }
        })
        .ok()?;
    let text = answer.recv_timeout(patience);
    let _ = child.kill(); // it has ended, or is too late
    let _ = child.wait();
    let text = String::from_utf8(text.ok()?).ok()?;
    let folders: Vec<PathBuf> = text.lines().map(PathBuf::from).filter(|p| p.is_absolute()).collect();
    (!folders.is_empty()).then_some(folders)
}

fn is_stubs(path: &Path) -> bool {
    path.file_name() == Some(OsStr::new("stubs"))
}

/// The library of a folder: the pinned major version, else the highest one.
fn in_folder(folder: &Path) -> Option<Candidate> {
    if is_stubs(folder) {
        return None;
    }
    let majors = names(folder).into_iter().filter_map(|name| {
        let suffix = name.strip_prefix("libnvrtc.so")?;
        let major = suffix.strip_prefix('.').map(|s| s.split('.').next().unwrap_or("").parse::<u32>());
        match major {
            Some(Ok(major)) => Some((Some(major), name.clone())),
            Some(Err(_)) => None,
            None => suffix.is_empty().then_some((None, name.clone())),
        }
    });
    // Of several names of one library the shortest: `libnvrtc.so.13` before `libnvrtc.so.13.0.88`.
    let best = majors.min_by_key(|(major, name)| {
        (*major != Some(PINNED.major), Reverse(*major), name.len(), name.clone())
    })?;
    let library = folder.join(best.1);
    library.is_file().then(|| candidate(library, folder))
}

fn candidate(library: PathBuf, folder: &Path) -> Candidate {
    // `libnvrtc.so.13` is often a link to `libnvrtc.so.13.0.88`, which says more.
    let target = library.canonicalize().unwrap_or_else(|_| library.clone());
    let suffix = |path: &Path| {
        let name = path.file_name()?.to_str()?.strip_prefix("libnvrtc.so.")?;
        Some((name.split('.').next()?.parse::<u32>().ok()?, Version::from_suffix(name)))
    };
    let (major, exact) =
        suffix(&target).or_else(|| suffix(&library)).map_or((None, None), |s| (Some(s.0), s.1));
    let builtins = names(folder)
        .into_iter()
        .filter_map(|name| Some((Version::from_suffix(name.strip_prefix("libnvrtc-builtins.so.")?)?, name)))
        .filter(|(v, _)| exact.map_or(major.is_none_or(|m| v.major == m), |e| *v == e))
        .min_by_key(|(v, name)| (Reverse(*v), name.len()));
    let version = exact.or(builtins.as_ref().map(|b| b.0));
    // dlopen takes a name without a slash for one to search for.
    let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
    let builtins = builtins.map(|b| absolute(folder.join(b.1)));
    Candidate { library: absolute(library), builtins, version }
}

/// Names in a folder, in order; none where it can't be read.
fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests;
