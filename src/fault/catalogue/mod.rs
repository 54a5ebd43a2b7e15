/*!
The catalogue of faults, as data: what public reports say goes wrong in MLA attention, one row a fault.

A row says how the fault is planted (`--fault` and the run that it acts in), which families of reports it stands for, which
tensor is the first that it makes wrong and what its cause is called. Expectations come from what the fault does to the
stages, never from what the judge said of it; where the judge falls short of them the row says so (`known`). Nothing here runs:
`crate::suite` does.
*/

mod attention;
mod elementwise;
mod later;
mod memory;
mod merge;
mod weights;

use mla_numeric::DType;
use mla_reference::{Form, Regime};
use std::sync::LazyLock;

/// A family of public reports.
#[derive(Debug)]
pub struct Family {
    /// `F01` to `F28`.
    pub name: &'static str,
    /// What goes wrong.
    pub what: &'static str,
    /// Why no row is due, where none is.
    pub without: Option<&'static str>,
}

const fn family(name: &'static str, what: &'static str) -> Family {
    Family { name, what, without: None }
}

const fn not_due(name: &'static str, what: &'static str, why: &'static str) -> Family {
    Family { name, what, without: Some(why) }
}

/// All families.
pub static FAMILIES: &[Family] = &[
    family("F01", "content and metadata of MLA tensors in a file"),
    family("F02", "order of stacked projections, shards of ranks"),
    family("F03", "scales of blocks and channels of quantised weights"),
    family("F04", "derived weights and caches that were not refreshed"),
    family("F05", "widths hard-coded or derived wrongly"),
    family("F06", "rope: pairs, tables, positions"),
    family("F07", "softmax scale and YaRN's factors"),
    family("F08", "RMSNorm"),
    family("F09", "writes into the cache"),
    not_due("F10", "scales and layouts of fp8 and fp4 caches", "no engine has an fp8 cache yet"),
    family("F11", "layout of a cache row"),
    family("F12", "page tables and page size"),
    family("F13", "index overflow: far pages read as zeros or as others"),
    family("F14", "masks, positions, lengths"),
    family("F15", "several query rows of one request in decode"),
    family("F16", "prefix cache, chunked prefill, empty parts"),
    family("F17", "unit and layout of the lse"),
    family("F18", "splits of the keys and their merge"),
    family("F19", "memory that is not the request's"),
    not_due("F20", "captured graphs and padding", "no engine captures graphs yet"),
    family("F21", "strides, views, unequal widths of keys and values"),
    family("F22", "partial tiles of heads, rows and keys"),
    family("F23", "outputs written elsewhere or not at all"),
    family("F24", "races and dirty workspaces, as the garbage that they leave"),
    family("F25", "kernels of one architecture: fragments and swizzles"),
    not_due("F26", "sparse attention: indexer and top-k", "the suite's layer is dense"),
    family("F27", "cache moved, offloaded, reused"),
    family("F28", "precision and overflow"),
];

/// The run that a fault acts in. The layer is always the suite's own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setup {
    /// Requests.
    pub batch: &'static str,
    /// Splits of the keys in decode.
    pub splits: usize,
    /// Slots of a page.
    pub page: usize,
    /// Ranks of tensor parallelism; 1: none.
    pub tp: usize,
    /// Dtype of weights and activations.
    pub dtype: DType,
    /// How context rows are drawn.
    pub regime: Regime,
    /// Forms.
    pub forms: &'static [Form],
    /// q_a and kv_a as one product.
    pub stacked: bool,
    /// Keys of a chunk of the context, in the fused form's prefill.
    pub chunk: Option<usize>,
}

/// Prefill with and without a context, decode in splits whose last tile is partial, and one-token prompts.
pub const BASE: Setup = Setup {
    batch: "0+12,70+5,140+1,41+1,0+1",
    splits: 2,
    page: 16,
    tp: 1,
    dtype: DType::Bf16,
    regime: Regime::Random,
    forms: &Form::ALL,
    stacked: false,
    chunk: None,
};
const FUSED: Setup = Setup { forms: &[Form::Fused], ..BASE };
const ABSORBED: Setup = Setup { forms: &[Form::Absorbed], ..BASE };
/// Two ranks.
const RANKS: Setup = Setup { tp: 2, ..BASE };
const STACKED: Setup = Setup { stacked: true, ..BASE };

/// Contexts of unequal length in chunks: the shorter ones have no key in the last.
const CHUNKED: Setup = Setup { batch: "0+9,100+5,40+4,70+1", chunk: Some(48), forms: &[Form::Fused], ..BASE };
/// Requests that have fewer keys than there are splits.
const SHORT: Setup = Setup { batch: "0+9,140+1,1+1,0+1,40+1", splits: 4, ..BASE };
/// More than two tiles of keys at once.
const TILES: Setup = Setup { batch: "0+9,240+1,150+4", splits: 1, ..FUSED };
/// A few query rows on a context, as speculative decoding verifies them.
const VERIFY: Setup = Setup { batch: "24+8,12+6,40+4", forms: &[Form::Absorbed], ..BASE };

/// One fault.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Its own name.
    pub name: &'static str,
    /// Family, `F07`.
    pub family: &'static str,
    /// Public reports that it stands for, `owner/repository#number`.
    pub issues: &'static [&'static str],
    /// What is broken, in words.
    pub what: &'static str,
    /// As `--fault` takes it; `{}` stands for the size.
    pub fault: &'static str,
    /// Sizes, the largest (which is judged in full) first; empty: it has none.
    pub sizes: &'static [f64],
    /// The run.
    pub setup: Setup,
    /// Tensors of which one must be the first at fault.
    pub first: &'static [&'static str],
    /// Words of which one must stand in the cause's name or text; empty: it has no name, and none must be given.
    pub cause: &'static [&'static str],
    /// Whether norms can be expected to see it.
    pub norms: bool,
    /// What the judge misses of it, and why.
    pub known: Option<&'static str>,
}

impl Row {
    /// The fault of a size, as `--fault` takes it.
    pub fn text(&self, size: Option<f64>) -> String {
        let size = size.or(self.sizes.first().copied());
        size.map_or(self.fault.to_string(), |s| self.fault.replace("{}", &format!("{s}")))
    }
}

/// A row of `--fault` text, with what most rows have.
const fn row(
    (name, family): (&'static str, &'static str),
    fault: &'static str,
    what: &'static str,
    first: &'static [&'static str],
    cause: &'static [&'static str],
) -> Row {
    Row {
        name,
        family,
        issues: &[],
        what,
        fault,
        sizes: &[],
        setup: BASE,
        first,
        cause,
        norms: false,
        known: None,
    }
}

/// The same in a run of the fused form alone.
const fn fused(
    name: (&'static str, &'static str),
    fault: &'static str,
    what: &'static str,
    first: &'static [&'static str],
    cause: &'static [&'static str],
) -> Row {
    row(name, fault, what, first, cause).in_run(FUSED)
}

impl Row {
    const fn of(self, issues: &'static [&'static str]) -> Row {
        Row { issues, ..self }
    }
    const fn in_run(self, setup: Setup) -> Row {
        Row { setup, ..self }
    }
    const fn sized(self, sizes: &'static [f64]) -> Row {
        Row { sizes, ..self }
    }
    const fn seen_by_norms(self) -> Row {
        Row { norms: true, ..self }
    }
}

/// All rows, family by family.
pub fn all() -> &'static [Row] {
    static ALL: LazyLock<Vec<Row>> = LazyLock::new(|| {
        let mut all = [weights::ROWS, elementwise::ROWS, memory::ROWS, attention::ROWS, merge::ROWS].concat();
        all.sort_by_key(|r| r.family);
        all
    });
    &ALL
}

/// Those that were written when the judge was done, to be run once against it.
pub fn later() -> &'static [Row] {
    later::ROWS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Fault;
    use std::collections::BTreeSet;

    fn is_issue(text: &str) -> bool {
        let Some((repository, number)) = text.split_once('#') else { return false };
        let name =
            |s: &str| !s.is_empty() && s.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
        let two = repository.split_once('/').is_some_and(|(a, b)| name(a) && name(b));
        two && !number.is_empty() && number.chars().all(|c| c.is_ascii_digit())
    }

    #[test]
    fn rows_are_named_once_and_parse_at_every_size() {
        let mut names = BTreeSet::new();
        for r in all().iter().chain(later()) {
            assert!(names.insert(r.name), "{}", r.name);
            assert!(r.name.len() <= 23 && !r.what.is_empty() && !r.first.is_empty(), "{}", r.name);
            assert!(FAMILIES.iter().any(|f| f.name == r.family && f.without.is_none()), "{}", r.name);
            assert_eq!(r.fault.contains("{}"), !r.sizes.is_empty(), "{}", r.name);
            assert!(r.sizes.windows(2).all(|w| w[0] > w[1]), "{}: the largest size first", r.name);
            assert!(r.issues.iter().all(|i| is_issue(i)), "{}: {:?}", r.name, r.issues);
            r.setup.batch.parse::<crate::case::Batch>().unwrap();
            let texts = std::iter::once(r.text(None)).chain(r.sizes.iter().map(|s| r.text(Some(*s))));
            texts.for_each(|t| drop(Fault::parse(&t, 0).unwrap_or_else(|e| panic!("{}: {e}", r.name))));
        }
    }

    #[test]
    fn every_family_that_is_due_has_rows_with_reports() {
        for f in FAMILIES {
            let rows: Vec<&Row> = all().iter().filter(|r| r.family == f.name).collect();
            assert_eq!(rows.is_empty(), f.without.is_some(), "{}", f.name);
            let reported = || rows.iter().any(|r| !r.issues.is_empty());
            assert!(f.without.is_some() || reported(), "{}", f.name);
        }
    }

    #[test]
    fn malformed_numbers_are_no_issues() {
        assert!(is_issue("vllm-project/vllm#41057"));
        for bad in ["", "vllm#1", "a/b#", "a/b#x", "a b/c#1", "/b#1"] {
            assert!(!is_issue(bad), "{bad}");
        }
    }
}
