/*! A loaded PTX file and what is in it. */

use crate::error::{Issue, LoadError};
use crate::ir::{Parameter, Program};
use crate::lower::{self, Lowered};
use crate::text::parse::parse;
use std::collections::BTreeMap;
use std::str::FromStr;

/// PTX text, decoded.
pub struct Module {
    version: String,
    target: String,
    pub(crate) sm: u32,
    pub(crate) image: Vec<u8>,
    /// Names of sources by the numbers that `.loc` uses.
    pub(crate) sources: Vec<(u32, String)>,
    kernels: BTreeMap<String, Lowered>,
    issues: Vec<Issue>,
}

/// What a launch has to know about a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelInfo<'m> {
    /// Its name.
    pub name: &'m str,
    /// In order.
    pub parameters: &'m [Parameter],
    /// Static shared memory.
    pub shared_bytes: u32,
    /// Whether it uses the dynamic block.
    pub dynamic_shared: bool,
    /// Local memory of a thread.
    pub local_bytes: u32,
    /// `.maxntid`, or `.reqntid`: then the block must be just that.
    pub max_threads: Option<[u32; 3]>,
    /// Whether `max_threads` is `.reqntid`.
    pub exact_threads: bool,
    /// Instructions, with called functions copied in.
    pub instructions: usize,
    /// Whether it can be launched.
    pub runs: bool,
}

/// What a static look at a module shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Forms of instructions in use: how often, and the first line.
    pub forms: BTreeMap<String, (u32, u32)>,
    /// What this machine does not run.
    pub unsupported: Vec<Issue>,
    /// Lines of multiplications and additions without a rounding mode: ptxas may fuse them, so that the PTX does not
    /// fix the result. Compile with `-fmad=false`.
    pub fusible: Vec<u32>,
}

impl FromStr for Module {
    type Err = LoadError;
    fn from_str(text: &str) -> Result<Self, LoadError> {
        Module::parse(text)
    }
}

impl Module {
    /// Decodes PTX text. Everything in it must be known to the machine.
    ///
    /// # Errors
    /// [`LoadError`] lists every instruction that is not in the table, with its line.
    pub fn parse(text: &str) -> Result<Module, LoadError> {
        let m = Module::parse_partly(text)?;
        let issues: Vec<Issue> = m.report().unsupported;
        if issues.is_empty() { Ok(m) } else { Err(LoadError { issues }) }
    }

    /// Decodes PTX text in which some kernels may use what the machine does not run: those can't be launched, and
    /// [`report`](Module::report) lists why.
    ///
    /// # Errors
    /// Where the text itself can't be read.
    pub fn parse_partly(text: &str) -> Result<Module, LoadError> {
        let (file, mut issues) = parse(text);
        if file.version.is_empty() {
            let why = "a PTX file begins with .version and .target".into();
            issues.insert(0, Issue { line: 0, function: String::new(), what: ".version".into(), why });
        }
        if !issues.is_empty() {
            return Err(LoadError { issues });
        }
        let sm = architecture(&file.target);
        let mut issues = Vec::new();
        if sm == 0 {
            let (what, why) = (file.target.clone(), "no target sm_NN".into());
            issues.push(Issue { line: 0, function: String::new(), what, why });
        }
        let (scope, image) = lower::module(&file, sm, &mut issues);
        let kernels = lower::kernels(&file, &scope);
        Ok(Module {
            version: file.version,
            target: file.target,
            sm,
            image,
            sources: file.sources,
            kernels,
            issues,
        })
    }

    /// `.version`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// `.target`.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Kernels by name.
    pub fn kernels(&self) -> impl Iterator<Item = KernelInfo<'_>> {
        self.kernels.values().map(|k| {
            let p = &k.program;
            KernelInfo {
                name: &p.name,
                parameters: &p.parameters,
                shared_bytes: p.shared_bytes,
                dynamic_shared: p.dynamic_shared,
                local_bytes: p.local_bytes,
                max_threads: p.max_threads,
                exact_threads: p.exact_threads,
                instructions: p.code.len(),
                runs: k.issues.is_empty() && self.issues.is_empty(),
            }
        })
    }

    /// One kernel.
    pub fn kernel(&self, name: &str) -> Option<KernelInfo<'_>> {
        self.kernels().find(|k| k.name == name)
    }

    /// What a static look at it shows.
    pub fn report(&self) -> Report {
        let mut r = Report { unsupported: self.issues.clone(), ..Report::default() };
        for k in self.kernels.values() {
            for (form, &(n, line)) in &k.usage.forms {
                let e = r.forms.entry(form.clone()).or_insert((0, line));
                e.0 += n;
                e.1 = e.1.min(line);
            }
            r.fusible.extend(&k.usage.fusible);
            r.unsupported.extend(k.issues.iter().cloned());
        }
        r.fusible.sort_unstable();
        r.fusible.dedup();
        r.unsupported.sort_by_key(|i| i.line);
        r
    }

    /// The program of a kernel that can run; the first issue of one that can't.
    pub(crate) fn program(&self, name: &str) -> Option<Result<&Program, &Issue>> {
        let k = self.kernels.get(name)?;
        Some(match self.issues.first().or(k.issues.first()) {
            None => Ok(&k.program),
            Some(i) => Err(i),
        })
    }
}

/// 90 of `sm_90a,…`; 0 where there is none.
fn architecture(target: &str) -> u32 {
    let Some((_, rest)) = target.split_once("sm_") else { return 0 };
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(0)
}
