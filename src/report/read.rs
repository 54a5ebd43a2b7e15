/*!
Reports read back from their JSON, as the struct that wrote them: `merge`, `diff` and `explain` see what renderers see, and what
they write has the same schema because it is the same code.

The other way, a second set of structs for reading, would have to follow every change of the first by hand; where it did not, a merge
would lose fields without a word.
*/

use super::{Report, SCHEMAS};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A report with the file that it came from.
#[derive(Clone, Debug)]
pub struct Source {
    /// File.
    pub path: PathBuf,
    /// What it holds.
    pub report: Report,
}

/// Why a file is no report that can be used: what, where, what to do.
#[derive(Debug, thiserror::Error)]
#[error("{what}\n  where: {}\n  do: {how}", escape(place))]
pub struct ReadError {
    what: String,
    place: String,
    how: String,
}

/// Nothing that comes from a file moves the cursor of a terminal.
fn escape(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_debug().collect() } else { vec![c] }).collect()
}

/// Reads a report of `run` or `compare`.
///
/// # Errors
/// The file can't be read; it is no JSON; its schema is none of these commands' or of a version that this program does not know; what
/// it holds is not what the schema says.
pub fn read(path: &Path) -> Result<Report, ReadError> {
    let how = "name a report that `mla-check run --report FILE.json` or `compare --report FILE.json` wrote";
    let fail =
        |what: String, how: &str| ReadError { what, place: path.display().to_string(), how: how.to_string() };
    let bytes = std::fs::read(path).map_err(|e| fail(format!("the report can't be read: {e}"), how))?;
    let no_report = |e: serde_json::Error| fail(format!("this is no report: {e}"), how);
    let head: Value = serde_json::from_slice(&bytes).map_err(no_report)?;
    let word = |key: &str| head.get(key).and_then(Value::as_str).map(escape);
    let Some(schema) = word("schema") else { return Err(fail("it has no schema".into(), how)) };
    if !SCHEMAS.contains(&schema.as_str()) {
        let family = |s: &str| s.rsplit_once('/').map_or(String::new(), |(name, _)| name.to_string());
        let newer = SCHEMAS.iter().any(|s| family(s) == family(&schema));
        let how = if newer { "use the version of mla-check that wrote it" } else { how };
        let what = format!("its schema is {schema}; known are {}", SCHEMAS.join(" and "));
        return Err(fail(what, how));
    }
    let ours = env!("CARGO_PKG_VERSION");
    let mut report: Report = serde_json::from_slice(&bytes).map_err(|e| match word("version") {
        Some(v) if v != ours => fail(
            format!("the report is of mla-check {}, this is {ours}, and they differ in: {e}", v),
            "use the version that made it, or make a new report with this one",
        ),
        _ => fail(format!("the report says {schema} but is not: {e}"), how),
    })?;
    for l in &mut report.layers {
        for unit in &mut l.tensors {
            if !unit.place() {
                let what = format!("it has a tensor {}, which no layer has", escape(unit.tensor));
                return Err(fail(what, how));
            }
        }
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        std::fs::write(&path, text).unwrap();
        let e = read(&path).unwrap_err().to_string();
        assert_eq!(e.lines().count(), 3, "{e}");
        e
    }

    #[test]
    fn what_is_no_report_is_named() {
        assert!(said("{").contains("this is no report"));
        assert!(said("[]").contains("no schema"));
        assert!(said("{}").contains("no schema"));
        let other = said(r#"{"schema": "mla-check.explain/1"}"#);
        assert!(other.contains("mla-check.explain/1") && other.contains("run --report"), "{other}");
        let newer = said(r#"{"schema": "mla-check.run/2", "version": "9.0.0"}"#);
        assert!(newer.contains("run/2; known are") && newer.contains("use the version"), "{newer}");
        let old = said(r#"{"schema": "mla-check.run/1", "version": "0.0.9"}"#);
        assert!(old.contains("of mla-check 0.0.9"), "{old}");
        let ours = format!(r#"{{"schema": "mla-check.run/1", "version": "{}"}}"#, env!("CARGO_PKG_VERSION"));
        assert!(said(&ours).contains("but is not: missing field"));
        assert!(read(Path::new("none.json")).unwrap_err().to_string().contains("can't be read"));
        assert!(!said("{\"schema\": \"\\u001b[2J\"}").contains('\u{1b}'));
    }
}
