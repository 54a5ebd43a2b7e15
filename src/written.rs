/*!
How reports write what JSON has no form for, and how it is read back: numbers that may be infinite or NaN as text, words that the
program holds as `&'static str`, rows of tensors as runs.

A report that is read is the struct that was written: the same renderers serve it, and it is written again with the same bytes
(serde_json with `float_roundtrip`).
*/

use serde::{Deserialize, Deserializer};
use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, PoisonError};

/// A word of the program's own. Behind another name than `&str`, or serde would borrow it from the text that is read.
pub type Name = &'static str;

/// Words that came from files. They are few (names of stages, engines, rules), and each is kept once.
static WORDS: LazyLock<Mutex<HashSet<&'static str>>> = LazyLock::new(Mutex::default);

/// A name for as long as the program runs; each once.
pub fn keep(word: String) -> Name {
    let mut words = WORDS.lock().unwrap_or_else(PoisonError::into_inner);
    match words.get(word.as_str()) {
        Some(known) => known,
        None => {
            let word: Name = Box::leak(word.into_boxed_str());
            words.insert(word);
            word
        }
    }
}

/// One word.
pub fn name<'de, D: Deserializer<'de>>(d: D) -> Result<Name, D::Error> {
    String::deserialize(d).map(keep)
}

/// A list of words.
pub fn names<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Name>, D::Error> {
    Ok(Vec::<String>::deserialize(d)?.into_iter().map(keep).collect())
}

/// A list of numbers, each with a word.
pub fn numbered<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<(usize, Name)>, D::Error> {
    Ok(Vec::<(usize, String)>::deserialize(d)?.into_iter().map(|(n, w)| (n, keep(w))).collect())
}

/// A number that serde_json writes as null where it is not finite.
pub fn number<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(d)?.unwrap_or(f64::NAN))
}

/// Numbers as text.
pub mod text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    /// Shortest text that is read back as the same number.
    pub fn serialize<S: Serializer>(v: &f64, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format!("{v:e}"))
    }

    /// The number.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
        let text = String::deserialize(d)?;
        text.parse().map_err(|_| D::Error::custom(format!("{text:?} is not a number")))
    }
}

/// What the rows of tensors are, by tensor: rows that follow each other in one request are one entry.
pub mod rows {
    use super::{Name, keep};
    use mla_reference::RowName;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::collections::BTreeMap;

    /// The most rows that a report is believed to have: the limit of a batch, both regimes, 64 splits.
    const MOST: usize = 1 << 27;

    #[derive(Serialize, Deserialize)]
    struct Run {
        sequence: Option<usize>,
        request: Option<usize>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        split: Option<usize>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rank: Option<usize>,
        first: usize,
        rows: usize,
    }

    impl Run {
        /// The row behind the last one. Rows of no request have no index.
        fn next(&self) -> RowName {
            let step = if self.request.is_some() { self.rows } else { 0 };
            let index = self.first.saturating_add(step);
            RowName {
                sequence: self.sequence,
                request: self.request,
                split: self.split,
                rank: self.rank,
                index,
            }
        }
    }

    /// As runs.
    pub fn serialize<S: Serializer>(of: &BTreeMap<Name, Vec<RowName>>, s: S) -> Result<S::Ok, S::Error> {
        let runs = |rows: &Vec<RowName>| {
            let mut all: Vec<Run> = Vec::new();
            for r in rows {
                match all.last_mut() {
                    Some(run) if run.next() == *r => run.rows += 1,
                    _ => all.push(Run {
                        sequence: r.sequence,
                        request: r.request,
                        split: r.split,
                        rank: r.rank,
                        first: r.index,
                        rows: 1,
                    }),
                }
            }
            all
        };
        s.collect_map(of.iter().map(|(name, rows)| (name, runs(rows))))
    }

    /// Row by row again.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<BTreeMap<Name, Vec<RowName>>, D::Error> {
        let mut all = BTreeMap::new();
        for (name, runs) in BTreeMap::<String, Vec<Run>>::deserialize(d)? {
            let mut rows: Vec<RowName> = Vec::new();
            for run in runs {
                if run.rows.saturating_add(rows.len()) > MOST {
                    return Err(serde::de::Error::custom(format!("{name} has more rows than any batch")));
                }
                let mut done = Run { rows: 0, ..run };
                for _ in 0..run.rows {
                    rows.push(done.next());
                    done.rows += 1;
                }
            }
            all.insert(keep(name), rows);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::RowName;
    use serde::Serialize;
    use std::collections::BTreeMap;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct All {
        #[serde(deserialize_with = "name")]
        name: Name,
        #[serde(with = "text")]
        x: f64,
        #[serde(deserialize_with = "number")]
        y: f64,
        #[serde(with = "rows")]
        rows: BTreeMap<Name, Vec<RowName>>,
    }

    #[test]
    fn what_is_written_is_read() {
        let row = |sequence, request, index, split| RowName { sequence, request, index, split, rank: split };
        let none = row(None, None, 0, None);
        let mut cache = vec![row(Some(0), Some(0), 0, None), row(Some(0), Some(0), 1, None)];
        cache.resize(100, none);
        let keys: Vec<RowName> = (0..1000).map(|i| row(Some(1), Some(0), i, Some(1))).collect();
        let rows = BTreeMap::from([("cache", cache), ("k", keys)]);
        let all = All { name: "k_pe", x: f64::INFINITY, y: 0.1 + 0.2, rows };
        let text = serde_json::to_string(&all).unwrap();
        assert!(text.len() < 400, "runs are few: {text}");
        let read: All = serde_json::from_str(&text).unwrap();
        assert_eq!(read, all);
        let other: All = serde_json::from_str(&text).unwrap();
        assert!(std::ptr::eq(read.name, other.name), "each word is kept once");
        let nan = serde_json::to_string(&All { y: f64::NAN, x: f64::NAN, ..all }).unwrap();
        let read: All = serde_json::from_str(&nan).unwrap();
        assert!(read.y.is_nan() && read.x.is_nan());
        assert_eq!(serde_json::to_string(&read).unwrap(), nan);
        let many = nan.replace("\"rows\":1000", "\"rows\":18446744073709551615");
        assert!(serde_json::from_str::<All>(&many).unwrap_err().to_string().contains("more rows"));
    }
}
