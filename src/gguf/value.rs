/*!
Metadata values, decoded from the bytes of the file without copying them.
*/

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
            pub(super) fn width(self) -> Option<u64> {
                match self {
                    $(ValueType::$name => Some(size_of::<$ty>() as u64),)*
                    ValueType::Bool => Some(1),
                    ValueType::String | ValueType::Array => None,
                }
            }
            /// The fewest bytes that a value takes.
            pub(super) fn least(self) -> u64 {
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
            pub(super) fn decode(ty: ValueType, bytes: &mut &'a [u8]) -> Option<Value<'a>> {
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

/// Bytes as text: as they are where they are UTF-8, else escaped.
pub(super) fn text(raw: &[u8]) -> String {
    match std::str::from_utf8(raw) {
        Ok(s) => s.to_owned(),
        Err(_) => raw.escape_ascii().to_string(),
    }
}
