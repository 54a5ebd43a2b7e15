/*!
Verdicts: one ordered enum, one table.

Exit code, exit code under `--bisect`, mark and colour are columns of [`TABLE`]; the documentation prints
it, nothing else knows a code.
*/

use serde::Serialize;

/// What is said of a tensor, a layer or a run. Ordered: the worst one of a group is the group's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The engine's path does not have this tensor, with the reason beside it.
    NotApplicable,
    /// Every bit is the correctly rounded reference (copies: equal).
    Exact,
    /// Differences that rounding explains.
    Rounding,
    /// Another contract than the declared or assumed one explains the bits.
    ContractDiffers,
    /// Another convention explains the bits.
    ConventionDiffers,
    /// Clean in itself, but computed from something that is at fault.
    AfterFault,
    /// Not looked at, with the reason beside it.
    NotCompared,
    /// No evidence, and not enough power to say so.
    Inconclusive,
    /// The engine breaks the contract that it declared; another one explains the bits.
    ContractBroken,
    /// Evidence that rounding can't explain.
    Fault,
    /// The engine broke before it delivered.
    Broke,
    /// The engine asked for is not available here.
    Unavailable,
    /// The command line or the input makes no sense.
    Usage,
}

/// One row of the table of verdicts.
#[derive(Debug)]
pub struct Row {
    /// Which.
    pub verdict: Verdict,
    /// The words in reports.
    pub name: &'static str,
    /// Exit code of a run with this verdict.
    pub exit: u8,
    /// Exit code under `--bisect`.
    pub bisect: u8,
    /// Mark in pictures.
    pub mark: char,
    /// Colour in terminals.
    pub colour: Option<anstyle::AnsiColor>,
}

const fn row(
    verdict: Verdict,
    name: &'static str,
    exit: u8,
    bisect: u8,
    mark: char,
    colour: Option<anstyle::AnsiColor>,
) -> Row {
    Row { verdict, name, exit, bisect, mark, colour }
}

use anstyle::AnsiColor::{Green, Magenta, Red, Yellow};

/// The table, in the order of [`Verdict`].
pub static TABLE: &[Row] = &[
    row(Verdict::NotApplicable, "not applicable", 3, 125, '-', None),
    row(Verdict::Exact, "exact", 0, 0, '=', Some(Green)),
    row(Verdict::Rounding, "rounding", 0, 0, '~', Some(Green)),
    row(Verdict::ContractDiffers, "contract differs", 0, 0, 'c', Some(Yellow)),
    row(Verdict::ConventionDiffers, "convention differs", 0, 0, 'v', Some(Yellow)),
    row(Verdict::AfterFault, "after-fault", 1, 1, '|', Some(Yellow)),
    row(Verdict::NotCompared, "not compared", 3, 125, '?', Some(Magenta)),
    row(Verdict::Inconclusive, "inconclusive", 3, 125, '?', Some(Magenta)),
    row(Verdict::ContractBroken, "contract broken", 1, 1, 'c', Some(Red)),
    row(Verdict::Fault, "fault", 1, 1, 'X', Some(Red)),
    row(Verdict::Broke, "engine broke", 4, 125, '!', Some(Red)),
    row(Verdict::Unavailable, "not available", 5, 128, '!', Some(Red)),
    row(Verdict::Usage, "usage", 2, 128, '!', Some(Red)),
];

impl Verdict {
    /// Its row.
    pub fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }
    /// The words in reports.
    pub fn name(self) -> &'static str {
        self.row().name
    }
    /// Whether something other than what was asked about explains the evidence, and nothing is wrong.
    pub fn differs(self) -> bool {
        matches!(self, Verdict::ContractDiffers | Verdict::ConventionDiffers)
    }
    /// Exit code of a run.
    pub fn exit(self, bisect: bool) -> u8 {
        if bisect { self.row().bisect } else { self.row().exit }
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (i, r) in TABLE.iter().enumerate() {
            assert_eq!(r.verdict as usize, i);
        }
    }

    /// git bisect run: 1 to 124 marks a commit bad, 125 skips, 128 and above stops.
    #[test]
    fn only_a_fault_or_a_broken_contract_marks_a_commit_bad() {
        for r in TABLE {
            let bad = (1..125).contains(&r.bisect);
            let accused = matches!(r.verdict, Verdict::Fault | Verdict::ContractBroken | Verdict::AfterFault);
            assert_eq!(bad, accused, "{}", r.name);
        }
    }
}
