/*! Kinds of `--report`: one row an extension. */

use super::{Report, junit};
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
    Kind { extension: "xml", what: "JUnit, for CI", render: junit::render },
];

fn json(report: &Report) -> Result<Vec<u8>, String> {
    serde_json::to_vec_pretty(report).map_err(|e| e.to_string())
}

impl Kind {
    /// The kind of a file by its extension.
    pub fn of(path: &Path) -> Option<&'static Kind> {
        let extension = path.extension()?;
        KINDS.iter().find(|k| extension.eq_ignore_ascii_case(k.extension))
    }

    /// `.json or .xml`
    pub fn list() -> String {
        let all: Vec<String> = KINDS.iter().map(|k| format!(".{}", k.extension)).collect();
        all.join(" or ")
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
        assert_eq!(Kind::list(), ".json or .xml");
    }
}
