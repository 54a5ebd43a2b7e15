/*!
Key/value metadata, read where it lies.

Only keys are copied. A value is decoded from the memory map when it is asked for, an array element by
element, so that a vocabulary of 150,000 tokens costs nothing but the pages that were checked at opening.
*/

use super::cursor::Cursor;
use super::error::{GgufError, Notice, Place, Problem, Warning};
use super::map::Map;
use super::value::{Value, ValueType, text};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// How deep arrays may be nested.
const DEPTH: u32 = 4;

struct Entry {
    key: Box<str>,
    ty: ValueType,
    /// The value's bytes in the file.
    range: Range<usize>,
}

/// A file's metadata.
pub struct Metadata {
    map: Arc<Map>,
    entries: Vec<Entry>,
    index: HashMap<Box<str>, usize>,
}

impl Metadata {
    /// Reads `count` pairs, checking every length but keeping no value.
    pub(super) fn parse(
        map: &Arc<Map>,
        cursor: &mut Cursor<'_>,
        count: u64,
        warnings: &mut Vec<Warning>,
    ) -> Result<Metadata, GgufError> {
        let mut metadata = Metadata { map: map.clone(), entries: Vec::new(), index: HashMap::new() };
        for _ in 0..count {
            cursor.subject = None;
            let start = cursor.offset();
            let raw = cursor.string("the length of a metadata key")?;
            if raw.is_empty() {
                return Err(cursor.error(start, Problem::EmptyKey));
            }
            let key = name(raw, |notice| {
                let place = cursor.place(start).key(&text(raw));
                warnings.push(Warning { notice, place });
            });
            cursor.subject = Some(format!("key {key:?}"));
            if metadata.index.insert(key.clone(), metadata.entries.len()).is_some() {
                return Err(cursor.error(start, Problem::DuplicateKey));
            }
            let ty = value_type(cursor, "the type of the value")?;
            let from = cursor.offset() as usize;
            skip(cursor, ty, 0, warnings)?;
            metadata.entries.push(Entry { key, ty, range: from..cursor.offset() as usize });
        }
        cursor.subject = None;
        Ok(metadata)
    }

    fn value(&self, entry: &Entry) -> Option<Value<'_>> {
        Value::decode(entry.ty, &mut self.map.bytes().get(entry.range.clone())?)
    }
    fn entry(&self, key: &str) -> Option<&Entry> {
        self.entries.get(*self.index.get(key)?)
    }
    /// The place of a key's value, for messages about it.
    pub fn place(&self, key: &str) -> Place {
        let place = Place::file(self.map.path()).key(key);
        match self.entry(key) {
            Some(entry) => place.at(entry.range.start as u64),
            None => place,
        }
    }

    /// A key's value.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        self.value(self.entry(key)?)
    }
    /// All pairs, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.entries.iter().filter_map(|e| Some((&*e.key, self.value(e)?)))
    }
    /// How many pairs there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn convert<'s, T>(
        &'s self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(Value<'s>) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| {
            let found = format!("{value} ({})", value.ty().name());
            GgufError::new(Problem::WrongType { found, expected }, self.place(key))
        })
    }
    /// A number stored in any integer type that it fits.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.convert(key, "an integer that is not negative", |v| match v {
            Value::Bool(_) => None,
            v => v.as_u64(),
        })
    }
    /// A number stored in any type that float64 holds exactly (an f32 is widened, not rounded).
    pub fn f64(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.convert(key, "a number", |v| v.as_f64())
    }
    /// A string of valid UTF-8.
    pub fn str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.convert(key, "a string of valid UTF-8", |v| match v {
            Value::String(s) => std::str::from_utf8(s).ok(),
            _ => None,
        })
    }
    /// A bool.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.convert(key, "a bool", |v| match v {
            Value::Bool(b) => Some(b),
            _ => None,
        })
    }
    /// One integer, or an array of integers or bools (false 0, true 1).
    pub fn u64_or_array(&self, key: &str) -> Result<Option<Vec<u64>>, GgufError> {
        self.convert(key, "an integer or an array of integers, none negative", |v| match v {
            Value::Array(a) => a.iter().map(|v| v.as_u64()).collect(),
            Value::Bool(_) => None,
            v => v.as_u64().map(|v| vec![v]),
        })
    }
}

fn value_type(cursor: &mut Cursor<'_>, field: &'static str) -> Result<ValueType, GgufError> {
    let offset = cursor.offset();
    let found = cursor.u32(field)?;
    ValueType::from_id(found).ok_or_else(|| cursor.error(offset, Problem::ValueType { field, found }))
}

/// Passes over a value, checking that it lies whole in the file.
fn skip(
    cursor: &mut Cursor<'_>,
    ty: ValueType,
    depth: u32,
    warnings: &mut Vec<Warning>,
) -> Result<(), GgufError> {
    match ty {
        ValueType::String => cursor.string("a string value").map(drop),
        ValueType::Array => {
            let offset = cursor.offset();
            if depth == DEPTH {
                return Err(cursor.error(offset, Problem::ArrayDepth { limit: DEPTH }));
            }
            let element = value_type(cursor, "the type of an array's elements")?;
            let count = cursor.count("the length of an array", element.least())?;
            if let Some(width) = element.width() {
                // `count` has checked that the product is at most the bytes left.
                let at = cursor.offset();
                let bytes = cursor.take(count * width, "an array")?;
                if element == ValueType::Bool {
                    odd_bool(cursor, at, bytes, warnings);
                }
                return Ok(());
            }
            (0..count).try_for_each(|_| skip(cursor, element, depth + 1, warnings))
        }
        _ => {
            let at = cursor.offset();
            let bytes = cursor.take(ty.least(), "a value")?;
            if ty == ValueType::Bool {
                odd_bool(cursor, at, bytes, warnings);
            }
            Ok(())
        }
    }
}

fn odd_bool(cursor: &Cursor<'_>, at: u64, bytes: &[u8], warnings: &mut Vec<Warning>) {
    if let Some(i) = bytes.iter().position(|&b| b > 1) {
        let found = bytes[i];
        warnings.push(Warning { notice: Notice::Bool { found }, place: cursor.place(at + i as u64) });
    }
}

/// A key or tensor name, with what is odd about it.
pub(super) fn name(raw: &[u8], mut odd: impl FnMut(Notice)) -> Box<str> {
    if std::str::from_utf8(raw).is_err() {
        odd(Notice::NotUtf8);
    }
    if raw.contains(&0) {
        odd(Notice::NulByte);
    }
    text(raw).into()
}
