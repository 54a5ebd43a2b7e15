/*!
Storage bits of a format, little-endian.

The bits of a value are its sign, then the biased exponent and the fraction. With m the significand as a whole
number (hidden bit included) and e the exponent, both fields together are ((e - e_min) << (p - 1)) + m, also
for subnormals: the hidden bit, where there is one, adds 1 to the exponent field.
*/

use crate::dtype::{DType, Row, pow2};

/// Bits of `y`, a value of the format `f`; `width` bits with the sign.
fn compose(f: Row, width: u32, y: f64) -> u64 {
    let sign = u64::from(y.is_sign_negative()) << (width - 1);
    let a = y.abs();
    // The first pattern above the finite ones: infinity, or E4M3's NaN. E2M1 has none left.
    let end = magnitude(&f, f.largest) + u64::from(f.precision > 2);
    let m = if y.is_nan() {
        // The quiet NaN of the format; E4M3 has one NaN only.
        if f.saturates { end } else { end | 1 << (f.precision - 2) }
    } else if a > f.largest {
        end
    } else {
        magnitude(&f, a)
    };
    sign | m
}

/// Exponent and fraction field of a finite value.
fn magnitude(f: &Row, a: f64) -> u64 {
    let e = ((a.to_bits() >> 52) as i32 - 1023).max(f.min_exponent);
    let m = (a * pow2(f.precision as i32 - 1 - e)) as u64;
    (((e - f.min_exponent) as u64) << (f.precision - 1)) + m
}

/// The value of `bits`, without branches on the value.
#[inline(always)]
fn value(f: Row, width: u32, bits: u64) -> f64 {
    let magnitude = bits & ((1 << (width - 1)) - 1);
    let fraction = f.precision - 1;
    let placed = magnitude << (52 - fraction);
    let normal = pow2(f.min_exponent);
    // Subnormals: put the fraction under the smallest normal value's exponent, and take that value away.
    let low = f64::from_bits(normal.to_bits() | placed) - normal;
    let high = f64::from_bits(placed.wrapping_add(((1022 + f.min_exponent) as u64) << 52));
    let a = if magnitude >> fraction == 0 { low } else { high };
    let a = if a <= f.largest {
        a
    } else if f.saturates || magnitude & ((1 << fraction) - 1) != 0 {
        f64::NAN
    } else {
        f64::INFINITY
    };
    f64::from_bits(a.to_bits() | bits >> (width - 1) << 63)
}

/// The body of `$each` for one format: its name, stored bytes and the word that holds its bits.
macro_rules! by_storage {
    ($format:expr, $each:ident) => {
        match $format {
            DType::Bf16 => $each!(Bf16 2 u16),
            DType::F16 => $each!(F16 2 u16),
            DType::F32 => $each!(F32 4 u32),
            DType::F64 => $each!(F64 8 u64),
            DType::Tf32 => $each!(Tf32 4 u32),
            DType::E4m3 => $each!(E4m3 1 u8),
            DType::E2m1 => $each!(E2m1 1 u8),
        }
    };
}

impl DType {
    /// Storage bits of `x` rounded to this format. NaN: a quiet NaN; E2M1 has none and takes its largest value.
    pub fn to_bits(self, x: f64) -> u64 {
        let y = self.round(x);
        match self {
            DType::F64 => y.to_bits(),
            DType::F32 | DType::Tf32 => u64::from((y as f32).to_bits()),
            DType::Bf16 => u64::from((y as f32).to_bits() >> 16),
            DType::F16 => compose(self.row(), 16, y),
            DType::E4m3 => compose(self.row(), 8, y),
            DType::E2m1 => compose(self.row(), 4, y),
        }
    }

    /// The value of storage bits, exactly; bits above the format's width are not looked at.
    #[inline(always)]
    pub fn from_bits(self, bits: u64) -> f64 {
        match self {
            DType::F64 => f64::from_bits(bits),
            DType::F32 | DType::Tf32 => f64::from(f32::from_bits(bits as u32)),
            DType::Bf16 => f64::from(f32::from_bits((bits as u32) << 16)),
            DType::F16 => value(const { DType::F16.row() }, 16, bits & 0xffff),
            DType::E4m3 => value(const { DType::E4m3.row() }, 8, bits & 0xff),
            DType::E2m1 => value(const { DType::E2m1.row() }, 4, bits & 0xf),
        }
    }

    /// Values rounded to this format, as they are stored: little-endian, [`bytes`](DType::bytes) each.
    pub fn encode(self, xs: &[f64]) -> Vec<u8> {
        let mut out = vec![0; xs.len() * self.bytes()];
        self.encode_into(xs, &mut out);
        out
    }

    /// The same into a place that is there. Stops at the end of the shorter of `xs` and `out`.
    #[inline(always)]
    pub fn encode_into(self, xs: &[f64], out: &mut [u8]) {
        macro_rules! each {
            ($d:ident $n:literal $word:ty) => {
                for (x, o) in xs.iter().zip(out.as_chunks_mut::<$n>().0) {
                    *o = (DType::$d.to_bits(*x) as $word).to_le_bytes();
                }
            };
        }
        by_storage!(self, each)
    }

    /// The stored values, exactly. Stops at the end of the shorter of `bytes` and `out`.
    #[inline(always)]
    pub fn decode(self, bytes: &[u8], out: &mut [f64]) {
        macro_rules! each {
            ($d:ident $n:literal $word:ty) => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<$n>().0) {
                    *o = DType::$d.from_bits(<$word>::from_le_bytes(*b) as u64);
                }
            };
        }
        by_storage!(self, each)
    }
}
