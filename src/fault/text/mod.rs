/*!
Faults inside kernels, as data: a text of a kernel file that stands there once, and what is put in its place before the
compiler sees it.

What no tensor, weight or table altered from outside can imitate is planted here: a mask's comparison, a rescaling left
out, a barrier, a stride, the base of a logarithm, the tail of a tile. A row says how the kernel is broken, which requests
make it show, and what has to be found: the first tensor that is wrong and why, or what the PTX machine's detectors say,
where values come out right by luck. Every row runs as `--fault kernel:NAME` on engines ptx and cuda.
*/

mod dequant;
mod later;
mod masks;
mod place;
mod shows;
mod softmax;
mod splits;
mod stages;
mod waits;

pub use shows::{GEOMETRY, Shows};

use crate::engine::kernels::edit::Edit;
use mla_reference::{Stage, Weight};
use std::sync::LazyLock;

/// What stands before a name in `--fault`.
pub const PREFIX: &str = "kernel:";

/// A fault inside a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mutation {
    /// Name, in kebab-case: `--fault kernel:NAME`.
    pub name: &'static str,
    /// Family of public faults, `F01` to `F28`.
    pub family: &'static str,
    /// Public issues of this kind, `owner/repository#number`; none: none is known to be of it.
    pub issues: &'static [&'static str],
    /// What is broken, one sentence.
    pub broken: &'static str,
    /// File that holds the text: a kernel's, or one that kernels include.
    pub kernel: &'static str,
    /// Entry points that run the text; none: all that the file, or what includes it, has.
    pub entries: &'static [&'static str],
    /// Text that stands in the file once.
    pub from: &'static str,
    /// What takes its place.
    pub to: &'static str,
    /// Requests and options that make it act.
    pub shows: Shows,
    /// What has to be the first that is wrong; None: values are right or wrong by chance, and detectors have to see it.
    pub first: Option<First>,
    /// Part of the cause, or of the other contract, that has to be named; None: nothing has a name for it, and none is given.
    pub cause: Option<&'static str>,
    /// Parts of what may rightly be named of tensors behind the first, where that is another sentence.
    pub also: &'static [&'static str],
    /// Part of what the PTX machine's detectors must say; None: they need not see it.
    pub finding: Option<&'static str>,
    /// Whether the norm of what is wrong first is off by more than 10 %.
    pub norms: bool,
}

/// What is wrong first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    /// A weight, as the engine holds it.
    Weight(Weight),
    /// A tensor of the table.
    Tensor(Stage),
}

impl First {
    /// Name in the table of weights or stages.
    pub fn name(self) -> &'static str {
        match self {
            First::Weight(w) => w.name(),
            First::Tensor(s) => s.name(),
        }
    }
}

impl Mutation {
    /// What is done to the kernel files.
    pub fn edit(&self) -> Edit {
        let Mutation { name, kernel: file, from, to, .. } = *self;
        Edit { asked: "--fault kernel:", name, file, from, to }
    }
}

/// What most rows have: a row says what is different.
const ROW: Mutation = Mutation {
    name: "",
    family: "",
    issues: &[],
    broken: "",
    kernel: "",
    entries: &[],
    from: "",
    to: "",
    shows: shows::PREFILL,
    first: None,
    cause: None,
    also: &[],
    finding: None,
    norms: false,
};

/// A tensor that is wrong first.
const fn tensor(stage: Stage) -> Option<First> {
    Some(First::Tensor(stage))
}

/// All of them, kind by kind.
pub fn all() -> &'static [Mutation] {
    static ALL: LazyLock<Vec<Mutation>> = LazyLock::new(|| {
        [masks::ROWS, softmax::ROWS, splits::ROWS, place::ROWS, waits::ROWS, stages::ROWS, dequant::ROWS]
            .concat()
    });
    &ALL
}

/// Those that were written when the judge was done, to be run once against it.
pub fn later() -> &'static [Mutation] {
    later::ROWS
}

/// One by name.
pub fn by_name(name: &str) -> Option<&'static Mutation> {
    all().iter().chain(later()).find(|m| m.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::kernels::library::Library;
    use std::collections::BTreeSet;

    #[test]
    fn every_text_stands_in_its_kernel_once() {
        for m in all().iter().chain(later()) {
            let library = Library::built_in_for(m.shows.dtype).unwrap();
            assert_ne!(m.from, m.to, "{}", m.name);
            let edited = library.edited(&m.edit()).unwrap_or_else(|e| panic!("{}: {e}", m.name));
            for entry in m.entries {
                let (_, file) = edited.with_entry(entry).unwrap_or_else(|| panic!("{}: {entry}", m.name));
                assert!(!file.built_in, "{}: {entry} is of another file", m.name);
            }
        }
    }

    #[test]
    fn rows_are_well_formed() {
        let mut names = BTreeSet::new();
        for m in all().iter().chain(later()) {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(m.name.chars().all(plain) && names.insert(m.name), "{}", m.name);
            let family = m.family.strip_prefix('F').and_then(|n| n.parse::<u32>().ok());
            assert!(m.family.len() == 3 && family.is_some_and(|n| (1..=28).contains(&n)), "{}", m.name);
            for issue in m.issues {
                let (repository, number) = issue.split_once('#').unwrap_or_default();
                let two = repository.split('/').filter(|p| !p.is_empty()).count() == 2;
                assert!(two && number.parse::<u32>().is_ok(), "{}: {issue}", m.name);
            }
            assert!(m.broken.len() > 20 && !m.broken.ends_with('.'), "{}", m.name);
            // A row that asks for nothing would pass whatever comes out.
            assert!(m.first.is_some() || m.finding.is_some(), "{}", m.name);
            assert!(m.cause.is_none() || m.first.is_some(), "{}", m.name);
            assert!(m.shows.batch.parse::<crate::case::Batch>().is_ok(), "{}", m.name);
        }
    }

    /// All files that the program has kernels in, and both ways to show a fault.
    #[test]
    fn no_kernel_is_left_out() {
        let mut open: BTreeSet<String> = BTreeSet::new();
        for dtype in crate::engine::kernels::header::COMPUTED {
            let library = Library::built_in_for(dtype).unwrap();
            open.extend(library.files().map(|(_, f)| f.source.name.clone()));
        }
        all().iter().for_each(|m| _ = open.remove(m.kernel));
        assert!(open.is_empty(), "no fault in {open:?}");
        assert!(all().len() >= 35 && all().iter().filter(|m| m.first.is_none()).count() >= 3);
    }
}
