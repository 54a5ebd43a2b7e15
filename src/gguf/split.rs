/*!
Models in several files.

The parts of a split are named `PREFIX-00001-of-00003.gguf`; `split.no` counts from 0. Given any part, the
others are looked for beside it, and must agree about what they are parts of.
*/

use super::error::{GgufError, Notice, Place, Problem, Warning};
use super::metadata::Metadata;
use super::table::Part;
use super::value::ValueType;
use std::path::{Path, PathBuf};

/// Keys that parts of one model have in common, where a part has them.
const COMMON: [&str; 3] = ["general.architecture", "general.name", "general.file_type"];

/// What a file's name says about its split.
#[derive(Debug, PartialEq, Eq)]
pub struct Name<'a> {
    /// What all parts begin with.
    pub prefix: &'a str,
    /// Which part, from 1.
    pub number: u64,
    /// Parts in all.
    pub count: u64,
}

/// Reads `PREFIX-00001-of-00003.gguf`; None where a name is not of that form.
pub fn parse(name: &str) -> Option<Name<'_>> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let five = |s: &str| (s.len() == 5).then(|| s.parse().ok()).flatten();
    Some(Name { prefix, number: five(number)?, count: five(count)? })
}

/// Opens every part of the model that `path` is a part of.
pub(super) fn open(path: &Path) -> Result<(Vec<Part>, Vec<Warning>), GgufError> {
    let given = Part::open(path, 0)?;
    let mut warnings = Vec::new();
    let name = path.file_name().and_then(|n| n.to_str()).and_then(parse);
    let count = given.metadata.u64("split.count")?.unwrap_or(1);
    if count <= 1 {
        if name.is_some_and(|n| n.count > 1) {
            warnings.push(Warning { notice: Notice::NotSplit, place: Place::file(given.map.path()) });
        }
        return Ok((vec![given], warnings));
    }
    let place = || Place::file(given.map.path()).key("split.count");
    let Some(name) = name.filter(|n| n.count == count && (1..=count).contains(&n.number)) else {
        return Err(GgufError::new(Problem::SplitName { count }, place()));
    };
    let sibling =
        |number: u64| path.with_file_name(format!("{}-{number:05}-of-{count:05}.gguf", name.prefix));
    let mut parts: Vec<Part> = Vec::new();
    for number in 1..=count {
        let part = Part::open(&sibling(number), parts.len())
            .map_err(|e| missing(e, sibling(number), number, count))?;
        check(&part, number, count, parts.first())?;
        parts.push(part);
    }
    let Some(first) = parts.first() else { return Ok((vec![given], warnings)) };
    total(&parts, &first.metadata, &mut warnings)?;
    Ok((parts, warnings))
}

fn missing(error: GgufError, path: PathBuf, number: u64, count: u64) -> GgufError {
    match error.problem() {
        Problem::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            GgufError::new(Problem::SplitMissing { number, count }, Place::file(&path.into()))
        }
        _ => error,
    }
}

/// Whether a part is the one that its name says, of the same model as part 1.
fn check(part: &Part, number: u64, count: u64, first: Option<&Part>) -> Result<(), GgufError> {
    let text = |key| part.metadata.get(key).map_or("absent".to_owned(), |v| v.to_string());
    let value = |key| part.metadata.u64(key);
    if value("split.no")? != Some(number - 1) || value("split.count")? != Some(count) {
        let (no, found) = (text("split.no"), text("split.count"));
        let place = part.metadata.place("split.no");
        return Err(GgufError::new(Problem::SplitNumber { number, count, no, found }, place));
    }
    for key in COMMON {
        let theirs = first.and_then(|f| f.metadata.get(key));
        if let (Some(ours), Some(theirs)) = (part.metadata.get(key), theirs)
            && ours != theirs
        {
            let (found, expected) = (ours.to_string(), theirs.to_string());
            let problem = Problem::SplitForeign { number, key, found, expected };
            return Err(GgufError::new(problem, part.metadata.place(key)));
        }
    }
    Ok(())
}

fn total(parts: &[Part], first: &Metadata, warnings: &mut Vec<Warning>) -> Result<(), GgufError> {
    let found = parts.iter().map(|p| p.tensors.len() as u64).sum();
    let key = "split.tensors.count";
    match first.u64(key)? {
        Some(expected) if expected != found => {
            return Err(GgufError::new(Problem::SplitTotal { expected, found }, first.place(key)));
        }
        Some(_) => {}
        None => warnings.push(Warning { notice: Notice::NoSplitTotal, place: first.place(key) }),
    }
    if let Some(ty) = first.get("split.count").map(|v| v.ty())
        && ty != ValueType::U16
    {
        let notice = Notice::SplitType { found: ty.name() };
        warnings.push(Warning { notice, place: first.place("split.count") });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let name = |number, count| Some(Name { prefix: "a-of-b", number, count });
        assert_eq!(parse("a-of-b-00002-of-00011.gguf"), name(2, 11));
        for other in ["a-2-of-11.gguf", "a.gguf", "a-00002-of-00011.bin", "-of-", "a-0000x-of-00011.gguf"] {
            assert_eq!(parse(other), None);
        }
    }
}
