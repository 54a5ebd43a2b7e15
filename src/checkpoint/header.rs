/*!
The header of one .safetensors file: 8 bytes of length, JSON, then the data.

Read here rather than by the `safetensors` crate, because that refuses a file whole: here an entry that makes no sense is kept
with the reason ([`Entry::bad`]), so that a damaged or unknown tensor that nobody needs is a warning. What makes *every* entry
doubtful (length, JSON, a name twice) is an error. Limit of the header as the format sets it: 100 MB.
*/

use super::dtype::Dtype;
use super::error::{AGAIN, CheckpointError};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::HashSet;
use std::path::Path;

/// The largest header that the format allows.
const LIMIT: u64 = 100_000_000;

/// A tensor as a header lists it.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub name: String,
    pub dtype: Dtype,
    /// Slowest first.
    pub shape: Vec<u64>,
    /// From the start of the file.
    pub offset: u64,
    pub bytes: u64,
    /// Why it can't be read.
    pub bad: Option<String>,
}

#[derive(serde::Deserialize)]
struct Raw {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A JSON object with its keys in order, none twice.
pub(super) struct Keyed<T>(pub Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Keyed<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for V<T> {
            type Value = Keyed<T>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keyed<T>, A::Error> {
                let (mut all, mut seen) = (Vec::new(), HashSet::new());
                while let Some(key) = map.next_key::<String>()? {
                    if key == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    if !seen.insert(key.clone()) {
                        return Err(serde::de::Error::custom(format!(
                            "{} is there twice",
                            key.escape_debug()
                        )));
                    }
                    all.push((key, map.next_value()?));
                }
                Ok(Keyed(all))
            }
        }
        d.deserialize_map(V(std::marker::PhantomData))
    }
}

/// A file's tensors, in the order of their data, and what is odd about the file.
pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<(Vec<Entry>, Vec<String>), CheckpointError> {
    let fail = |what: String| CheckpointError::new(what, path.display(), AGAIN);
    let file = bytes.len() as u64;
    let Some((first, _)) = bytes.split_first_chunk::<8>() else {
        return Err(fail(format!(
            "the file has {file} bytes, not even the 8 of a safetensors header's length"
        )));
    };
    let length = u64::from_le_bytes(*first);
    if length > LIMIT {
        let hint = if first.starts_with(b"GGUF") { ": it is a GGUF file" } else { "" };
        return Err(fail(format!("this is no safetensors file{hint} (a header of {length} bytes)")));
    }
    let text = usize::try_from(length).ok().and_then(|n| bytes.get(8..n.checked_add(8)?));
    let Some(text) = text else {
        return Err(fail(format!("the file ends within its header: {length} bytes of {}", file - 8)));
    };
    let start = 8 + length;
    let raw: Keyed<Raw> = serde_json::from_slice(text)
        .map_err(|e| fail(format!("the header is not what it should be: {e}")))?;
    let mut entries: Vec<Entry> =
        raw.0.into_iter().map(|(name, raw)| entry(name, raw, start, file)).collect();
    entries.sort_by_key(|e| (e.offset, e.bytes));
    overlaps(&mut entries);
    let mut warnings = Vec::new();
    let end = entries.iter().map(|e| e.offset.saturating_add(e.bytes)).max().unwrap_or(start);
    if end < file {
        warnings.push(format!("{}: {} bytes after the last tensor", path.display(), file - end));
    }
    let beyond = entries.iter().filter(|e| e.offset.saturating_add(e.bytes) > file).count();
    if beyond > 0 {
        warnings.push(format!(
            "{}: the file is cut short: {beyond} of {} tensors lie beyond its end at {file} bytes",
            path.display(),
            entries.len()
        ));
    }
    Ok((entries, warnings))
}

fn entry(name: String, raw: Raw, start: u64, file: u64) -> Entry {
    let dtype = Dtype::named(&raw.dtype);
    let (from, to) = raw.data_offsets;
    let offset = start.saturating_add(from);
    let bytes = to.saturating_sub(from);
    let bad = if to < from {
        Some(format!("it ends ({to}) before it begins ({from})"))
    } else if offset.checked_add(bytes).is_none_or(|end| end > file) {
        Some(format!("it lies at bytes {offset} to {} of a file of {file}", offset.saturating_add(bytes)))
    } else {
        match (&dtype, dtype.bytes(&raw.shape)) {
            (Dtype::Unknown(name), _) => Some(format!("its dtype {} is not known", name.escape_debug())),
            (_, Some(needed)) if needed == bytes => None,
            (_, Some(needed)) => {
                Some(format!("{} {:?} takes {needed} bytes, but it has {bytes}", dtype.name(), raw.shape))
            }
            (_, None) => Some(format!("{} {:?} is no whole number of bytes", dtype.name(), raw.shape)),
        }
    };
    Entry { name, dtype, shape: raw.shape, offset, bytes, bad }
}

/// Marks entries that begin within an earlier one.
fn overlaps(entries: &mut [Entry]) {
    let mut last: Option<(u64, usize)> = None;
    for i in 0..entries.len() {
        let Entry { offset, bytes, .. } = entries[i];
        if bytes == 0 || entries[i].bad.is_some() {
            continue;
        }
        let end = offset + bytes;
        if let Some((until, before)) = last
            && offset < until
        {
            let name = entries[before].name.escape_debug().to_string();
            entries[i].bad = Some(format!("its bytes overlap those of {name}"));
            if end <= until {
                continue;
            }
        }
        last = Some((end, i));
    }
}
