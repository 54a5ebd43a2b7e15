/*! Kinds of `--report`: one row an extension. */

use super::{Report, html, junit};
use std::path::Path;

/// A kind of report.
pub struct Kind {
    /// Extension of its files.
    pub extension: &'static str,
    /// What it is.
    pub what: &'static str,
    /// Its renderer.
    pub render: fn(&Report) -> Result<Vec<u8>, String>,
}

/// The table.
pub static KINDS: &[Kind] = &[
    Kind { extension: "json", what: "everything, for programs", render: json },
    Kind { extension: "html", what: "one page, for people", render: html::render },
    Kind { extension: "xml", what: "JUnit, for CI", render: junit::render },
];

fn json(report: &Report) -> Result<Vec<u8>, String> {
    serde_json::to_vec_pretty(report).map_err(|e| e.to_string())
}

/// `a, b or c`
pub fn either(all: &[String]) -> String {
    match all {
        [rest @ .., last] if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => all.concat(),
    }
}

impl Kind {
    /// The kind of a file by its extension.
    pub fn of(path: &Path) -> Option<&'static Kind> {
        let extension = path.extension()?;
        KINDS.iter().find(|k| extension.eq_ignore_ascii_case(k.extension))
    }

    /// `.json, .html or .xml`
    pub fn list() -> String {
        let all: Vec<String> = KINDS.iter().map(|k| format!(".{}", k.extension)).collect();
        either(&all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_go_by_extension() {
        let of = |p: &str| Kind::of(Path::new(p)).map(|k| k.extension);
        assert_eq!(of("a/b.XML"), Some("xml"));
        assert_eq!(of("run.json"), Some("json"));
        assert_eq!((of("run"), of("xml"), of("run.txt")), (None, None, None));
        assert_eq!(of("a.html"), Some("html"));
        assert_eq!(Kind::list(), ".json, .html or .xml");
    }
}
