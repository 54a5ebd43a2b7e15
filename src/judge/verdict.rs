/*!
Verdicts: one ordered enum, one table.

Exit code, exit code under `--bisect`, status in JUnit, mark and colour are columns of [`TABLE`]; the documentation prints
it, nothing else knows a code.
*/

use serde::{Deserialize, Serialize};

/// What is said of a tensor, a layer or a run. Ordered: the worst one of a group is the group's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
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

/// What JUnit files say of a test. Ordered: a group has the worst of its tests.
///
/// Whoever gates on a JUnit file must not read as passed what the exit code does not call clean. So only verdicts of exit code 0 pass,
/// and no verdict at all is an error: the test did not say what it was asked. Skipped is what needed no test of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// Passed.
    Passed,
    /// Skipped, with the reason.
    Skipped,
    /// It was judged, and is wrong.
    Failure,
    /// It could not be judged.
    Error,
}

impl Status {
    /// As the documentation has it.
    pub const fn name(self) -> &'static str {
        match self {
            Status::Passed => "passed",
            Status::Skipped => "skipped",
            Status::Failure => "failure",
            Status::Error => "error",
        }
    }
    /// Whether a gate stops.
    pub const fn stops(self) -> bool {
        matches!(self, Status::Failure | Status::Error)
    }
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
    /// Status in JUnit files.
    pub junit: Status,
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
    junit: Status,
    mark: char,
    colour: Option<anstyle::AnsiColor>,
) -> Row {
    Row { verdict, name, exit, bisect, junit, mark, colour }
}

use Status::{Error, Failure, Passed, Skipped};
use anstyle::AnsiColor::{Green, Magenta, Red, Yellow};

/// The table, in the order of [`Verdict`].
pub static TABLE: &[Row] = &[
    row(Verdict::NotApplicable, "not applicable", 3, 125, Skipped, '-', None),
    row(Verdict::Exact, "exact", 0, 0, Passed, '=', Some(Green)),
    row(Verdict::Rounding, "rounding", 0, 0, Passed, '~', Some(Green)),
    row(Verdict::ContractDiffers, "contract differs", 0, 0, Passed, 'c', Some(Yellow)),
    row(Verdict::ConventionDiffers, "convention differs", 0, 0, Passed, 'v', Some(Yellow)),
    row(Verdict::AfterFault, "after-fault", 1, 1, Skipped, '|', Some(Yellow)),
    row(Verdict::NotCompared, "not compared", 3, 125, Error, '?', Some(Magenta)),
    row(Verdict::Inconclusive, "inconclusive", 3, 125, Error, '?', Some(Magenta)),
    row(Verdict::ContractBroken, "contract broken", 1, 1, Failure, 'c', Some(Red)),
    row(Verdict::Fault, "fault", 1, 1, Failure, 'X', Some(Red)),
    row(Verdict::Broke, "engine broke", 4, 125, Error, '!', Some(Red)),
    row(Verdict::Unavailable, "not available", 5, 128, Error, '!', Some(Red)),
    row(Verdict::Usage, "usage", 2, 128, Error, '!', Some(Red)),
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

    /// What passes is clean by its exit code, and what is clean passes. A run is never `not applicable` or `after-fault` as a whole.
    #[test]
    fn junit_passes_what_exit_code_0_calls_clean() {
        for r in TABLE {
            assert_eq!(r.junit == Status::Passed, r.exit == 0, "{}", r.name);
            let part = matches!(r.verdict, Verdict::NotApplicable | Verdict::AfterFault);
            assert_eq!(r.junit == Status::Skipped, part, "{}", r.name);
            assert_eq!(r.junit == Status::Failure, r.exit == 1 && !part, "{}", r.name);
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
