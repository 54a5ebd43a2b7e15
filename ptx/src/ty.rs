/*! Fundamental types of PTX. */

/// A type as an instruction or a declaration names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Ty {
    B8,
    U8,
    S8,
    B16,
    U16,
    S16,
    B32,
    U32,
    S32,
    B64,
    U64,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
    Pred,
}

const NAMES: [(&str, Ty); 19] = [
    ("b8", Ty::B8),
    ("u8", Ty::U8),
    ("s8", Ty::S8),
    ("b16", Ty::B16),
    ("u16", Ty::U16),
    ("s16", Ty::S16),
    ("b32", Ty::B32),
    ("u32", Ty::U32),
    ("s32", Ty::S32),
    ("b64", Ty::B64),
    ("u64", Ty::U64),
    ("s64", Ty::S64),
    ("f16", Ty::F16),
    ("f16x2", Ty::F16x2),
    ("bf16", Ty::Bf16),
    ("bf16x2", Ty::Bf16x2),
    ("f32", Ty::F32),
    ("f64", Ty::F64),
    ("pred", Ty::Pred),
];

impl Ty {
    /// The type called `name` (without the dot).
    pub fn parse(name: &str) -> Option<Ty> {
        NAMES.iter().find(|(n, _)| *n == name).map(|(_, t)| *t)
    }

    /// Its name, without the dot.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, t)| *t == self).map_or("", |(n, _)| n)
    }

    /// Bytes in memory; 0 for predicates.
    pub const fn bytes(self) -> u32 {
        match self {
            Ty::B8 | Ty::U8 | Ty::S8 => 1,
            Ty::B16 | Ty::U16 | Ty::S16 | Ty::F16 | Ty::Bf16 => 2,
            Ty::B32 | Ty::U32 | Ty::S32 | Ty::F32 | Ty::F16x2 | Ty::Bf16x2 => 4,
            Ty::B64 | Ty::U64 | Ty::S64 | Ty::F64 => 8,
            Ty::Pred => 0,
        }
    }

    /// Whether it is a signed integer.
    pub const fn signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64)
    }

    /// Low bytes of a register as this type: sign- or zero-extended to 64 bits.
    pub const fn extend(self, v: u64) -> u64 {
        match self {
            Ty::S8 => v as i8 as i64 as u64,
            Ty::S16 => v as i16 as i64 as u64,
            Ty::S32 => v as i32 as i64 as u64,
            _ => match self.bytes() {
                1 => v & 0xff,
                2 => v & 0xffff,
                4 => v & 0xffff_ffff,
                _ => v,
            },
        }
    }
}
