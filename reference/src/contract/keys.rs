/*!
How keys are dealt: splits, and the tiles inside them.
*/

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Order in which the tiles of a split are visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum TileOrder {
    Forward,
    Reverse,
}

/// Which keys a split takes.
///
/// In files: `{ parts = 4 }`, `{ parts = 4, multiple = 1 }`, `{ keys = 128 }`, `"scheduled"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub enum Splits {
    /// So many equal parts, each rounded up to whole tiles; late ones may be empty.
    Parts(usize),
    /// So many equal parts, each rounded up to a multiple of keys; late ones may be empty.
    Equal {
        /// How many.
        parts: usize,
        /// Keys.
        multiple: usize,
    },
    /// So many keys a part; as many parts as that takes.
    Keys(usize),
    /// A scheduler deals them: key ranges are handed over beside the contract.
    Scheduled,
}

/// The form in files.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Word(Word),
    Parts(WrittenParts),
    Keys(WrittenKeys),
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Scheduled,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenParts {
    parts: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    multiple: Option<usize>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenKeys {
    keys: usize,
}

impl From<Written> for Splits {
    fn from(w: Written) -> Splits {
        match w {
            Written::Word(Word::Scheduled) => Splits::Scheduled,
            Written::Parts(WrittenParts { parts, multiple: None }) => Splits::Parts(parts),
            Written::Parts(WrittenParts { parts, multiple: Some(multiple) }) => {
                Splits::Equal { parts, multiple }
            }
            Written::Keys(WrittenKeys { keys }) => Splits::Keys(keys),
        }
    }
}

impl From<Splits> for Written {
    fn from(s: Splits) -> Written {
        match s {
            Splits::Scheduled => Written::Word(Word::Scheduled),
            Splits::Parts(parts) => Written::Parts(WrittenParts { parts, multiple: None }),
            Splits::Equal { parts, multiple } => {
                Written::Parts(WrittenParts { parts, multiple: Some(multiple) })
            }
            Splits::Keys(keys) => Written::Keys(WrittenKeys { keys }),
        }
    }
}

impl From<usize> for Splits {
    fn from(parts: usize) -> Splits {
        Splits::Parts(parts)
    }
}

impl Splits {
    /// Key ranges of a row of `keys` keys in tiles of `tile`, in order.
    ///
    /// Rules that name a number of parts always give that many, so that every row of a batch has the same
    /// number. What a scheduler deals is not known here: one range.
    pub fn ranges(self, keys: usize, tile: usize) -> Vec<Range<usize>> {
        let (parts, per) = match self {
            Splits::Scheduled => (1, keys),
            Splits::Keys(n) => (keys.div_ceil(n.max(1)).max(1), n.max(1)),
            Splits::Parts(parts) => (parts, keys.div_ceil(parts.max(1)).next_multiple_of(tile.max(1))),
            Splits::Equal { parts, multiple } => {
                (parts, keys.div_ceil(parts.max(1)).next_multiple_of(multiple.max(1)))
            }
        };
        (0..parts.max(1)).map(|s| (s * per).min(keys)..((s + 1) * per).min(keys)).collect()
    }
}

impl std::fmt::Display for Splits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Splits::Parts(1) => f.write_str("1 split"),
            Splits::Parts(n) => write!(f, "{n} splits"),
            Splits::Equal { parts, multiple } => write!(f, "{parts} splits of a multiple of {multiple} keys"),
            Splits::Keys(n) => write!(f, "splits of {n} keys"),
            Splits::Scheduled => f.write_str("splits by a scheduler"),
        }
    }
}

/// Tiles of a key range, in the order in which they are visited; `tile` 0: all keys at once.
pub fn tiles(range: Range<usize>, tile: usize, order: TileOrder) -> Vec<Range<usize>> {
    let tile = if tile == 0 { range.len().max(1) } else { tile };
    let mut tiles: Vec<_> = range.clone().step_by(tile).map(|a| a..(a + tile).min(range.end)).collect();
    if order == TileOrder::Reverse {
        tiles.reverse();
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_cover_the_keys_once() {
        for splits in 1..=9 {
            for keys in [1, 63, 64, 65, 257, 1025] {
                for (rule, multiple) in [
                    (Splits::Parts(splits), 64),
                    (Splits::Equal { parts: splits, multiple: 32 }, 32),
                    (Splits::Equal { parts: splits, multiple: 1 }, 1),
                    (Splits::Keys(splits), splits),
                    (Splits::Scheduled, keys),
                ] {
                    let r = rule.ranges(keys, 64);
                    assert!(
                        r.len() == splits || matches!(rule, Splits::Keys(_) | Splits::Scheduled),
                        "{rule}"
                    );
                    let all: Vec<_> = r.iter().flat_map(|r| r.clone()).collect();
                    assert_eq!(all, (0..keys).collect::<Vec<_>>(), "{rule}");
                    assert!(r.iter().all(|r| r.is_empty() || r.start % multiple == 0), "{rule}");
                }
            }
        }
        // What kernels do with 130 keys and 4 splits: Triton 33 keys each, in multiples of 32 two parts of 64.
        assert_eq!(Splits::Equal { parts: 4, multiple: 1 }.ranges(130, 32)[3], 99..130);
        assert_eq!(Splits::Equal { parts: 4, multiple: 32 }.ranges(130, 32)[2], 128..130);
        assert_eq!(tiles(0..200, 64, TileOrder::Reverse), [192..200, 128..192, 64..128, 0..64]);
    }
}
