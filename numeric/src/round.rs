/*!
Rounding to a format, and where the format's values lie.

Rounding is one rounding of the float64, to nearest, ties to even. Without branches, so that loops
vectorise: with `step` the spacing at |x|, adding and subtracting 1.5 · 2^52 · step leaves a multiple of
`step`, rounded by the processor's own float64 addition (|x| / step < 2^25 is far below the 2^51 up to which
this is exact). Going through float32 first, or `half`'s `from_f64`, rounds twice.
*/

use crate::dtype::{DType, Row, pow2};

const EXPONENT: u64 = 0x7ff << 52;

/// One rounding of `x` to the format `f`, a constant after inlining.
#[inline(always)]
fn nearest(f: Row, x: f64) -> f64 {
    let over = if f.saturates { f.largest } else { f64::INFINITY };
    let (limit, normal) = (2.0 * f.largest, pow2(f.min_exponent));
    let a = x.abs();
    // Comparisons in the form of the processor's own min and max; NaN becomes `limit`.
    let a = if a < limit { a } else { limit };
    let scale = if a > normal { a } else { normal };
    let magic =
        f64::from_bits(((scale.to_bits() & EXPONENT) + ((53 - u64::from(f.precision)) << 52)) | 1 << 51);
    let y = (a + magic) - magic;
    let y = if y > f.largest { over } else { y };
    if x.is_nan() { x } else { y.copysign(x) }
}

/// The distance of the values of `f` in the binade of |x|, without branches.
#[inline(always)]
fn ulp(f: Row, x: f64) -> f64 {
    let (a, normal) = (x.abs(), pow2(f.min_exponent));
    // NaN becomes the largest value.
    let a = if a < f.largest { a } else { f.largest };
    let a = if a > normal { a } else { normal };
    f64::from_bits(a.to_bits() & EXPONENT) * pow2(1 - f.precision as i32)
}

#[inline(always)]
fn ulps(d: DType, xs: &[f64], out: &mut [f64]) {
    macro_rules! each {
        ($($d:ident)*) => {
            match d {
                $(DType::$d => for (o, x) in out.iter_mut().zip(xs) { *o = ulp(const { DType::$d.row() }, *x) },)*
            }
        };
    }
    each!(Bf16 F16 F32 F64 Tf32 E4m3 E2m1)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn ulps_avx2(d: DType, xs: &[f64], out: &mut [f64]) {
    ulps(d, xs, out)
}

#[inline(always)]
fn slice(d: DType, xs: &mut [f64]) {
    macro_rules! each {
        ($($d:ident)*) => {
            match d { $(DType::$d => for x in xs { *x = DType::$d.round(*x) },)* }
        };
    }
    each!(Bf16 F16 F32 F64 Tf32 E4m3 E2m1)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn slice_avx2(d: DType, xs: &mut [f64]) {
    slice(d, xs)
}

impl DType {
    /// `x` rounded once to this format: nearest, ties to even, subnormals kept. Beyond the largest value:
    /// infinity, or the largest value where the format saturates (E4M3, E2M1). NaN stays NaN.
    #[inline(always)]
    pub fn round(self, x: f64) -> f64 {
        match self {
            DType::F64 => x,
            DType::F32 => f64::from(x as f32),
            DType::Bf16 => nearest(const { DType::Bf16.row() }, x),
            DType::F16 => nearest(const { DType::F16.row() }, x),
            DType::Tf32 => nearest(const { DType::Tf32.row() }, x),
            DType::E4m3 => nearest(const { DType::E4m3.row() }, x),
            DType::E2m1 => nearest(const { DType::E2m1.row() }, x),
        }
    }

    /// [`round`](DType::round), in place.
    pub fn round_slice(self, xs: &mut [f64]) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor was just asked.
            return unsafe { slice_avx2(self, xs) };
        }
        slice(self, xs)
    }

    /// ulp(x): the distance of this format's values in the binade of |x|; below the smallest normal value
    /// (zero included) the smallest subnormal; beyond the largest value, and for NaN, as at the largest.
    #[inline]
    pub fn spacing(self, x: f64) -> f64 {
        ulp(self.row(), x)
    }

    /// [`spacing`](DType::spacing) of each of `xs`, to `out`.
    pub fn spacing_slice(self, xs: &[f64], out: &mut [f64]) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor was just asked.
            return unsafe { ulps_avx2(self, xs, out) };
        }
        ulps(self, xs, out)
    }

    /// The largest value of the format below its value `c`; -infinity below the smallest one.
    pub fn below(self, c: f64) -> f64 {
        -self.above(-c)
    }

    /// The smallest value of the format above its value `c`; infinity above the largest one.
    pub fn above(self, c: f64) -> f64 {
        let largest = self.largest();
        if c == f64::NEG_INFINITY {
            -largest
        } else if c >= largest {
            f64::INFINITY
        } else if c >= 0.0 {
            c + self.spacing(c)
        } else {
            // Toward zero a power of two has the spacing of the binade below it.
            c + self.spacing(c.abs().next_down())
        }
    }

    /// The interval `[lo, hi]` of values that round to the format's value `c`: midpoints with its neighbours.
    /// The ends are ties and belong to `c` where its significand is even. At the largest value `hi` is the
    /// threshold of overflow (saturating formats: infinity), at infinity `lo` is. For F64 it is `c` alone.
    pub fn cell(self, c: f64) -> (f64, f64) {
        if self == DType::F64 || c.is_nan() {
            return (c, c);
        }
        let upper = |c: f64| {
            let Row { largest, saturates, .. } = self.row();
            if c < largest {
                // Exact: neighbours differ in the last of at most 24 bits.
                if c == f64::NEG_INFINITY {
                    -(largest + self.spacing(largest) / 2.0)
                } else {
                    (c + self.above(c)) / 2.0
                }
            } else if saturates || c == f64::INFINITY {
                f64::INFINITY
            } else {
                largest + self.spacing(largest) / 2.0
            }
        };
        (-upper(-c), upper(c))
    }
}
