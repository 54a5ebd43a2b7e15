//! The tensor core's sum against the same rule in wide whole numbers, bit by bit.

use mla_numeric::{DType, tensor_core::TensorCore};
use proptest::prelude::*;

/// Sign and magnitude in units of 2^-500: wide enough for every product and every cut.
/// A plain schoolbook number: bits of the magnitude, least significant first.
#[derive(Clone)]
struct Big(bool, Vec<bool>);
const UNIT: i32 = -500;
const BITS: usize = 896;

impl Big {
    fn new(negative: bool, m: u64, exponent: i32) -> Big {
        let mut bits = vec![false; BITS];
        for i in 0..64 {
            if m >> i & 1 == 1 {
                bits[(exponent - UNIT) as usize + i] = true;
            }
        }
        Big(negative, bits)
    }
    /// Toward zero to a multiple of 2^e.
    fn cut(mut self, e: i32) -> Big {
        for i in 0..(e - UNIT).max(0) as usize {
            self.1[i] = false;
        }
        self
    }
    fn top(&self) -> Option<usize> {
        self.1.iter().rposition(|b| *b)
    }
    fn less(&self, other: &Big) -> bool {
        self.1.iter().rev().lt(other.1.iter().rev())
    }
    fn add(self, other: Big) -> Big {
        let (big, small) = if self.less(&other) { (other, self) } else { (self, other) };
        let minus = big.0 != small.0;
        let mut carry = 0i32;
        let bits = big.1.iter().zip(&small.1).map(|(a, b)| {
            let v = i32::from(*a) + if minus { -i32::from(*b) } else { i32::from(*b) } + carry;
            carry = v >> 1;
            v & 1 == 1
        });
        Big(big.0, bits.collect())
    }
    fn to_f32_truncated(&self) -> f32 {
        let Some(top) = self.top() else { return 0.0 };
        let e = top as i32 + UNIT;
        let a = if e > 127 {
            f32::INFINITY
        } else {
            let last = (e - 23).max(-149);
            let m = (last..=e).rev().fold(0u32, |m, i| m << 1 | u32::from(self.1[(i - UNIT) as usize]));
            (f64::from(m) * 2f64.powi(last)) as f32
        };
        if self.0 { -a } else { a }
    }
}

/// A 16-bit operand: significand as a whole number, exponent field's value, both from the bits.
#[derive(Clone, Copy, Debug)]
struct Format {
    dtype: DType,
    fraction: i32,
    bias: i32,
}
const BF16: Format = Format { dtype: DType::Bf16, fraction: 7, bias: 127 };
const F16: Format = Format { dtype: DType::F16, fraction: 10, bias: 15 };

impl Format {
    fn value(self, bits: u16) -> f32 {
        self.dtype.from_bits(bits.into()) as f32
    }
    /// (negative, significand, exponent): value = m · 2^(exponent - fraction).
    fn parts(self, bits: u16) -> (bool, u64, i32) {
        let m = u64::from(bits) & ((1 << self.fraction) - 1);
        let field = i32::from(bits & 0x7fff) >> self.fraction;
        let m = if field == 0 { m } else { m | 1 << self.fraction };
        (bits >> 15 == 1, m, field.max(1) - self.bias)
    }
}

/// The rule of the module's text, one sentence after the other.
fn slow(f: Format, acc: f32, ab: &[(u16, u16)], bits: i32) -> f32 {
    let nan = f32::from_bits(0x7fff_ffff);
    let products: Vec<f32> = ab
        .iter()
        .map(|&(a, b)| (f.value(a), f.value(b)))
        .map(|(a, b)| if a.is_finite() && b.is_finite() { 0.0 } else { a * b })
        .collect();
    let all = products.iter().copied().chain([acc]);
    let infinite = |v: f32| all.clone().any(|x| x == v);
    if all.clone().any(f32::is_nan) || infinite(f32::INFINITY) && infinite(f32::NEG_INFINITY) {
        return nan;
    }
    for inf in [f32::INFINITY, f32::NEG_INFINITY] {
        if infinite(inf) {
            return inf;
        }
    }
    // (exponent that counts for the alignment, exact value)
    let mut terms = Vec::new();
    for &(a, b) in ab {
        let ((sa, ma, ea), (sb, mb, eb)) = (f.parts(a), f.parts(b));
        if ma * mb != 0 {
            terms.push((ea + eb, Big::new(sa != sb, ma * mb, ea + eb - 2 * f.fraction)));
        }
    }
    if acc != 0.0 {
        let field = (acc.to_bits() >> 23 & 255) as i32;
        let m = u64::from(acc.to_bits() & 0x7f_ffff) | u64::from(field != 0) << 23;
        let e = field.max(1) - 127;
        terms.push((e, Big::new(acc < 0.0, m, e - 23)));
    }
    let Some(e) = terms.iter().map(|t| t.0).max() else { return 0.0 };
    terms.into_iter().map(|(_, v)| v.cut(e - bits)).reduce(Big::add).unwrap().to_f32_truncated()
}

/// Exponent spread around a centre, or any bits at all.
fn operands(f: Format, n: usize) -> impl Strategy<Value = Vec<(u16, u16)>> {
    let (top, fraction) = (if f.fraction == 7 { 254u16 } else { 30 }, f.fraction as u32);
    let part = move |centre: u16, spread: u16| {
        (any::<bool>(), 0..=2 * spread, any::<u16>()).prop_map(move |(s, e, m)| {
            let e = (centre + e).saturating_sub(spread).min(top);
            u16::from(s) << 15 | e << fraction | m & ((1 << fraction) - 1)
        })
    };
    let some = (0..=top, 0..=top, prop_oneof![Just(0u16), Just(2), Just(9), Just(40)])
        .prop_flat_map(move |(a, b, spread)| prop::collection::vec((part(a, spread), part(b, spread)), n));
    let zeros = prop::collection::vec(
        prop_oneof![Just((0u16, 0x8000u16)), Just((0x3f80, 0)), Just((0x0001, 0x3f80))],
        n,
    );
    prop_oneof![6 => some, 1 => prop::collection::vec(any::<(u16, u16)>(), n), 1 => zeros]
}

fn accumulator() -> impl Strategy<Value = f32> {
    prop_oneof![
        Just(0.0),
        Just(-0.0),
        any::<u32>().prop_map(f32::from_bits),
        -100.0..100.0f32,
        (0u32..1 << 23).prop_map(f32::from_bits)
    ]
}

fn check(f: Format, core: TensorCore, acc: f32, ab: &[(u16, u16)]) {
    let want = slow(f, acc, ab, core.bits as i32);
    let unit = core.on(f.dtype);
    let values: Vec<(f32, f32)> = ab.iter().map(|&(a, b)| (f.value(a), f.value(b))).collect();
    let got = unit.sum(acc, values.iter().copied());
    assert_eq!(got.to_bits(), want.to_bits(), "{got:e} {want:e} {acc:e} {values:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]
    #[test]
    fn one_block(bf in operands(BF16, 16), half in operands(F16, 16), acc in accumulator()) {
        check(BF16, TensorCore::HOPPER, acc, &bf);
        check(F16, TensorCore::HOPPER, acc, &half);
        check(BF16, TensorCore::AMPERE, acc, &bf[..8]);
        check(F16, TensorCore::AMPERE, acc, &half[3..11]);
        check(BF16, TensorCore { block: 32, bits: 13 }, acc, &bf);
        check(BF16, TensorCore::HOPPER, acc, &bf[..5]);
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]
    #[test]
    fn blocks_and_lanes(
        columns in prop::collection::vec((prop_oneof![operands(BF16, 40), operands(F16, 40)], accumulator()), 8),
        w in prop_oneof![operands(BF16, 40), operands(F16, 40)],
    ) {
        for (f, core) in [(BF16, TensorCore::HOPPER), (F16, TensorCore::HOPPER), (BF16, TensorCore::AMPERE)] {
            let unit = core.on(f.dtype);
            let x: Vec<[f32; 8]> = (0..40).map(|k| std::array::from_fn(|l| f.value(columns[l].0[k].0))).collect();
            let weights: Vec<f32> = w.iter().map(|w| f.value(w.0)).collect();
            let mut acc: [f32; 8] = std::array::from_fn(|l| columns[l].1);
            let want: [f32; 8] = std::array::from_fn(|l| {
                let ab: Vec<(u16, u16)> = (0..40).map(|k| (w[k].0, columns[l].0[k].0)).collect();
                ab.chunks(core.block).fold(acc[l], |acc, ab| slow(f, acc, ab, core.bits as i32))
            });
            let dots: [f32; 8] = std::array::from_fn(|l| {
                unit.dot(acc[l], &weights, &x.iter().map(|x| x[l]).collect::<Vec<_>>())
            });
            unit.lanes(&mut acc, &weights, &x);
            assert_eq!(dots.map(f32::to_bits), want.map(f32::to_bits));
            assert_eq!(acc.map(f32::to_bits), want.map(f32::to_bits));
        }
    }
}

#[test]
fn by_hand() {
    let t = TensorCore::HOPPER;
    let bits = |v: f32| v.to_bits();
    // Cut, not rounded: 1 + 2^-24 + 2^-24 keeps both addends (25 fractional bits), 1 + 2^-26 · 4 none of them.
    assert_eq!(t.dot(1.0, &[1.0, 1.0], &[U, U]), 1.0 + 2.0 * U);
    assert_eq!(t.dot(1.0, &[1.0; 4], &[U / 4.0; 4]), 1.0);
    // An ideal sum would be 1 + 2^-24 - 2^-60, here the small term vanishes; then cut to float32.
    assert_eq!(t.dot(1.0, &[U, 1.0], &[1.0, -2f32.powi(-60)]), 1.0);
    // A product's exponent is not normalised: 1.5 · 1.5 = 2.25 counts as exponent 0.
    assert_eq!(t.dot(2f32.powi(-25), &[1.5, -1.5], &[1.5, 1.5]), 2f32.powi(-25));
    assert_eq!(t.dot(2f32.powi(-26), &[1.5, -1.5], &[1.5, 1.5]), 0.0);
    assert_eq!(bits(t.dot(-0.0, &[0.0], &[-1.0])), 0);
    assert_eq!(bits(t.dot(f32::NAN, &[1.0], &[1.0])), 0x7fff_ffff);
    assert_eq!(bits(t.dot(0.0, &[f32::INFINITY], &[0.0])), 0x7fff_ffff);
    assert_eq!(bits(t.dot(f32::INFINITY, &[f32::NEG_INFINITY], &[1.0])), 0x7fff_ffff);
    assert_eq!(t.dot(1.0, &[f32::NEG_INFINITY], &[1.0]), f32::NEG_INFINITY);
    assert_eq!(t.dot(f32::MAX, &[2f32.powi(64)], &[2f32.powi(64)]), f32::INFINITY);
    // A sum too small for float32 keeps its sign; all lanes at once must not take it for no term.
    let mut acc = [-0.0, 0.0];
    t.lanes(&mut acc, &[2f32.powi(-80)], &[[-2f32.powi(-80), 0.0]]);
    assert_eq!(acc.map(bits), [0x8000_0000, 0]);
    // Blocks are sums of their own: 2^-25 is lost 16 times at 1, and kept when it comes first.
    let (mut a, b) = ([2f32.powi(-13); 32], [2f32.powi(-13); 32]);
    assert_eq!(t.dot(1.0, &a[..16], &b[..16]), 1.0);
    a[..16].fill(2f32.powi(-12));
    assert_eq!(t.dot(1.0, &a, &b), 1.0 + 2f32.powi(-21));
}
const U: f32 = 1.0 / 16_777_216.0;
