/*!
Key/value metadata, read where it lies.

Only keys are copied. A value is decoded from the memory map when it is asked for, an array element by
element, so that a vocabulary of 150,000 tokens costs nothing but the pages that were checked at opening.
*/

use super::cursor::Cursor;
use super::error::{GgufError, Notice, Place, Problem, Warning};
use super::map::Map;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// How deep arrays may be nested.
const DEPTH: u32 = 4;

macro_rules! values {
    ($($name:ident = $id:literal, $text:literal, $ty:ty;)*) => {
        /// The type of a metadata value.
        #[allow(missing_docs)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum ValueType { $($name,)* Bool, String, Array }

        /// A metadata value, borrowed from the file.
        #[allow(missing_docs)]
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Value<'a> { $($name($ty),)* Bool(bool), String(&'a [u8]), Array(Array<'a>) }

        impl ValueType {
            /// The type with this number in the file.
            pub fn from_id(id: u32) -> Option<ValueType> {
                match id {
                    $($id => Some(ValueType::$name),)*
                    7 => Some(ValueType::Bool), 8 => Some(ValueType::String), 9 => Some(ValueType::Array),
                    _ => None,
                }
            }
            /// The type's number in the file.
            pub fn id(self) -> u32 {
                match self {
                    $(ValueType::$name => $id,)*
                    ValueType::Bool => 7, ValueType::String => 8, ValueType::Array => 9,
                }
            }
            /// The type's name.
            pub fn name(self) -> &'static str {
                match self {
                    $(ValueType::$name => $text,)*
                    ValueType::Bool => "bool", ValueType::String => "string", ValueType::Array => "array",
                }
            }
            /// Bytes of a value of fixed size.
            fn width(self) -> Option<u64> {
                match self {
                    $(ValueType::$name => Some(size_of::<$ty>() as u64),)*
                    ValueType::Bool => Some(1),
                    ValueType::String | ValueType::Array => None,
                }
            }
            /// The fewest bytes that a value takes.
            fn least(self) -> u64 {
                self.width().unwrap_or(if self == ValueType::String { 8 } else { 12 })
            }
        }

        impl<'a> Value<'a> {
            /// The value's type.
            pub fn ty(&self) -> ValueType {
                match self {
                    $(Value::$name(_) => ValueType::$name,)*
                    Value::Bool(_) => ValueType::Bool,
                    Value::String(_) => ValueType::String,
                    Value::Array(_) => ValueType::Array,
                }
            }
            /// Takes one value off the front; nothing when the bytes do not hold one.
            fn decode(ty: ValueType, bytes: &mut &'a [u8]) -> Option<Value<'a>> {
                Some(match ty {
                    $(ValueType::$name => Value::$name(<$ty>::from_le_bytes(front(bytes)?)),)*
                    ValueType::Bool => Value::Bool(front::<1>(bytes)? != [0]),
                    ValueType::String => {
                        let n = usize::try_from(u64::from_le_bytes(front(bytes)?)).ok()?;
                        Value::String(bytes.split_off(..n)?)
                    }
                    ValueType::Array => {
                        let element = ValueType::from_id(u32::from_le_bytes(front(bytes)?))?;
                        let len = u64::from_le_bytes(front(bytes)?);
                        let array = Array { element, len, bytes };
                        *bytes = match element.width() {
                            Some(w) => bytes.get(usize::try_from(w.checked_mul(len)?).ok()?..)?,
                            None => array.iter().end()?,
                        };
                        Value::Array(array)
                    }
                })
            }
        }
    };
}

values! {
    U8 = 0, "u8", u8;
    I8 = 1, "i8", i8;
    U16 = 2, "u16", u16;
    I16 = 3, "i16", i16;
    U32 = 4, "u32", u32;
    I32 = 5, "i32", i32;
    F32 = 6, "f32", f32;
    U64 = 10, "u64", u64;
    I64 = 11, "i64", i64;
    F64 = 12, "f64", f64;
}

fn front<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*head)
}

impl Value<'_> {
    /// The value of any integer type, or bool, where it is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            Value::Bool(v) => Some(v.into()),
            _ => None,
        }
    }
    /// The value of any number type, where float64 holds it exactly.
    pub fn as_f64(&self) -> Option<f64> {
        const EXACT: u64 = 1 << 53;
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            Value::I8(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::I64(v) => (v.unsigned_abs() <= EXACT).then_some(v as f64),
            Value::Bool(_) => None,
            _ => self.as_u64().filter(|&v| v <= EXACT).map(|v| v as f64),
        }
    }
}

impl std::fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::U8(v) => write!(f, "{v}"),
            Value::I8(v) => write!(f, "{v}"),
            Value::U16(v) => write!(f, "{v}"),
            Value::I16(v) => write!(f, "{v}"),
            Value::U32(v) => write!(f, "{v}"),
            Value::I32(v) => write!(f, "{v}"),
            Value::F32(v) => write!(f, "{v:?}"),
            Value::U64(v) => write!(f, "{v}"),
            Value::I64(v) => write!(f, "{v}"),
            Value::F64(v) => write!(f, "{v:?}"),
            Value::Bool(v) => write!(f, "{v}"),
            Value::String(v) => write!(f, "{:?}", text(v)),
            Value::Array(a) => write!(f, "{} x {}", a.len, a.element.name()),
        }
    }
}

/// An array of metadata values, borrowed from the file.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a> {
    element: ValueType,
    len: u64,
    /// From the first element on; may go on behind the last.
    bytes: &'a [u8],
}

impl PartialEq for Array<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.element == other.element && self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<'a> Array<'a> {
    /// The elements' type.
    pub fn element(&self) -> ValueType {
        self.element
    }
    /// How many elements.
    pub fn len(&self) -> u64 {
        self.len
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// The elements, decoded one after the other.
    pub fn iter(&self) -> ArrayIter<'a> {
        ArrayIter { element: self.element, left: self.len, bytes: self.bytes }
    }
}

/// Iterator over an array's elements.
#[derive(Clone, Debug)]
pub struct ArrayIter<'a> {
    element: ValueType,
    left: u64,
    bytes: &'a [u8],
}

impl<'a> ArrayIter<'a> {
    /// The bytes behind the last element.
    fn end(mut self) -> Option<&'a [u8]> {
        while self.left > 0 {
            self.next()?;
        }
        Some(self.bytes)
    }
}

impl<'a> Iterator for ArrayIter<'a> {
    type Item = Value<'a>;
    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        Value::decode(self.element, &mut self.bytes)
    }
}

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

/// Bytes as text: as they are where they are UTF-8, else escaped.
fn text(raw: &[u8]) -> String {
    match std::str::from_utf8(raw) {
        Ok(s) => s.to_owned(),
        Err(_) => raw.escape_ascii().to_string(),
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
