/*!
The table of formats: name, storage, significand, exponents, what happens beyond the largest value.

One row a format; rounding ([`crate::round`]) and bits ([`crate::bits`]) are derived from it.

Sources: IEEE 754 binary16/32/64; bfloat16 and TF32 have binary32's exponents with 8 and 11 significand
bits; OCP 8-bit floating point (E4M3: no infinity, 0x7f is NaN); OCP microscaling (E2M1: neither).
*/

use serde::{Deserialize, Serialize};

/// A number format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// IEEE binary32.
    F32,
    /// IEEE binary64.
    F64,
    /// NVIDIA's TF32, stored in 4 bytes as the float32 that equals it.
    Tf32,
    /// OCP 8-bit float E4M3 (the "fn" kind: no infinity); rounding saturates.
    E4m3,
    /// OCP 4-bit float E2M1, one value a byte; rounding saturates, and NaN has no bits.
    E2m1,
}

/// What defines a format.
pub(crate) struct Row {
    pub name: &'static str,
    pub bytes: usize,
    /// Significand bits, the hidden one included.
    pub precision: u32,
    /// The smallest normal value is 2 to this power.
    pub min_exponent: i32,
    pub largest: f64,
    /// Beyond the largest value: it, not infinity.
    pub saturates: bool,
}

/// 2^e, subnormals included; `e` in -1074..=1023.
pub(crate) const fn pow2(e: i32) -> f64 {
    if e >= -1022 { f64::from_bits(((e + 1023) as u64) << 52) } else { f64::from_bits(1 << (e + 1074)) }
}

/// (2 - 2^(1-p)) · 2^e.
const fn full(p: u32, e: i32) -> f64 {
    (2.0 - pow2(1 - p as i32)) * pow2(e)
}

const fn row(
    name: &'static str,
    bytes: usize,
    precision: u32,
    min_exponent: i32,
    largest: f64,
    saturates: bool,
) -> Row {
    Row { name, bytes, precision, min_exponent, largest, saturates }
}

impl DType {
    /// Every format.
    pub const ALL: [DType; 7] =
        [DType::Bf16, DType::F16, DType::F32, DType::F64, DType::Tf32, DType::E4m3, DType::E2m1];

    #[inline(always)]
    pub(crate) const fn row(self) -> Row {
        match self {
            DType::Bf16 => row("bf16", 2, 8, -126, full(8, 127), false),
            DType::F16 => row("f16", 2, 11, -14, 65504.0, false),
            DType::F32 => row("f32", 4, 24, -126, f32::MAX as f64, false),
            DType::F64 => row("f64", 8, 53, -1022, f64::MAX, false),
            DType::Tf32 => row("tf32", 4, 11, -126, full(11, 127), false),
            DType::E4m3 => row("e4m3", 1, 4, -6, 448.0, true),
            DType::E2m1 => row("e2m1", 1, 2, 0, 6.0, true),
        }
    }

    /// The name, as in files and on the command line.
    pub const fn name(self) -> &'static str {
        self.row().name
    }
    /// Bytes that a stored value takes.
    pub const fn bytes(self) -> usize {
        self.row().bytes
    }
    /// Significand bits, the hidden one included.
    pub const fn precision(self) -> u32 {
        self.row().precision
    }
    /// Exponent of the smallest normal value, a power of two.
    pub const fn min_exponent(self) -> i32 {
        self.row().min_exponent
    }
    /// The largest finite value.
    pub const fn largest(self) -> f64 {
        self.row().largest
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no format's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownDType(pub String);

impl std::fmt::Display for UnknownDType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "no number format is called {:?}; there are", self.0)?;
        DType::ALL.iter().try_for_each(|d| write!(f, " {d}"))
    }
}

impl std::error::Error for UnknownDType {}

impl std::str::FromStr for DType {
    type Err = UnknownDType;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        DType::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| UnknownDType(s.to_owned()))
    }
}
