/*!
What code is compiled for: `sm_120` (machine code of one architecture) or `compute_120` (PTX only).

An architecture is a number (ten times the compute capability) and a suffix: none runs on every later device of the
family's minor versions, `a` on this one only, `f` on its family.
*/

use std::fmt;
use std::str::FromStr;

/// Machine code or PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `sm_NN`: PTX and a CUBIN.
    Real,
    /// `compute_NN`: PTX only.
    Virtual,
}

/// Letter behind an architecture's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Suffix {
    /// No letter.
    None,
    /// `a`: features of this architecture only.
    Architecture,
    /// `f`: features of its family.
    Family,
}

impl Suffix {
    fn letter(self) -> &'static str {
        match self {
            Suffix::None => "",
            Suffix::Architecture => "a",
            Suffix::Family => "f",
        }
    }
}

/// What code is compiled for, written as compilers write it: `sm_120`, `compute_90`, `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// Ten times the compute capability: 120 for 12.0.
    pub number: u32,
    /// Letter behind it.
    pub suffix: Suffix,
    /// Machine code or PTX.
    pub kind: Kind,
}

impl Target {
    /// `sm_NUMBER`.
    pub const fn sm(number: u32) -> Target {
        Target { number, suffix: Suffix::None, kind: Kind::Real }
    }
    /// `compute_NUMBER`.
    pub const fn compute(number: u32) -> Target {
        Target { number, suffix: Suffix::None, kind: Kind::Virtual }
    }
    /// For this architecture alone, with the instructions that no other has. From 9.0 on; what is older has none of its own.
    pub fn specific(self) -> Target {
        let suffix = if self.number >= 90 { Suffix::Architecture } else { self.suffix };
        Target { suffix, ..self }
    }
    /// Whether compiling gives a CUBIN.
    pub fn is_real(self) -> bool {
        self.kind == Kind::Real
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Real => "sm",
            Kind::Virtual => "compute",
        };
        f.pad(&format!("{kind}_{}{}", self.number, self.suffix.letter()))
    }
}

/// A text that names no target.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no target: write sm_120, sm_90a, compute_120 and the like")]
pub struct BadTarget(String);

impl FromStr for Target {
    type Err = BadTarget;
    fn from_str(text: &str) -> Result<Target, BadTarget> {
        parse(text).ok_or_else(|| BadTarget(text.chars().take(40).collect()))
    }
}

fn parse(text: &str) -> Option<Target> {
    let (kind, rest) = match text.split_once('_')? {
        ("sm", rest) => (Kind::Real, rest),
        ("compute", rest) => (Kind::Virtual, rest),
        _ => return None,
    };
    let digits = rest.trim_end_matches(|c: char| !c.is_ascii_digit());
    let suffix = match &rest[digits.len()..] {
        "" => Suffix::None,
        "a" => Suffix::Architecture,
        "f" => Suffix::Family,
        _ => return None,
    };
    // Compute capabilities have one digit behind the point and at least 1 before it. `parse` takes a leading `+`.
    let written = (2..=3).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
    if !written || digits.starts_with('0') {
        return None;
    }
    Some(Target { number: digits.parse().ok()?, suffix, kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_read_and_written_as_compilers_write_it() {
        for text in ["sm_80", "sm_90a", "sm_120", "sm_120f", "compute_100a", "compute_121"] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
        assert_eq!("sm_120".parse(), Ok(Target::sm(120)));
        assert_eq!("compute_90".parse(), Ok(Target::compute(90)));
        assert_eq!(format!("{:<8}|", Target::sm(90)), "sm_90   |");
        assert!(Target::sm(90).is_real() && !Target::compute(90).is_real());
    }

    #[test]
    fn what_is_no_target_is_refused_with_examples() {
        let bad = [
            "", "120", "sm120", "sm_", "sm_9", "sm_1200", "sm_090", "sm_12x", "sm_120aa", "sm_120 ", "SM_120",
        ];
        for text in bad.into_iter().chain(["sm_+90", "arch_90", "compute_", "sm_é0", "sm_9٠", "sm_90\0"]) {
            let error = text.parse::<Target>().unwrap_err().to_string();
            assert!(error.contains("sm_120") && error.contains("compute_120"), "{text}: {error}");
        }
    }
}
