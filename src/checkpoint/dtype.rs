/*! The dtypes of the safetensors format: names and widths; which of them hold weights is `stored.rs`'s question. */

/// A tensor's dtype.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// One of the format's.
    Known(&'static str, u64),
    /// A name that is none of them.
    Unknown(String),
}

/// Names and bits of an element.
const ROWS: &[(&str, u64)] = &[
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("C64", 64),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
];

impl Dtype {
    /// The dtype of this name.
    pub fn named(name: &str) -> Dtype {
        let row = ROWS.iter().find(|r| r.0 == name);
        row.map_or_else(|| Dtype::Unknown(name.to_string()), |r| Dtype::Known(r.0, r.1))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Dtype::Known(name, _) => name,
            Dtype::Unknown(name) => name,
        }
    }

    /// Whether it is the one of this name.
    pub fn is(&self, name: &str) -> bool {
        matches!(self, Dtype::Known(n, _) if *n == name)
    }

    /// Bytes of a tensor of this shape. None: more than there can be, no whole number, or an unknown dtype.
    pub fn bytes(&self, shape: &[u64]) -> Option<u64> {
        let Dtype::Known(_, bits) = self else { return None };
        let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d))?;
        elements.checked_mul(*bits).filter(|b| b.is_multiple_of(8)).map(|b| b / 8)
    }
}
