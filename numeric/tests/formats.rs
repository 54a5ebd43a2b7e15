//! Formats against mathematics: an exact search of neighbours, and the formats' definitions.

use mla_numeric::{DType, U};
use proptest::prelude::*;

/// Formats small enough that every value can be listed.
const SMALL: [DType; 4] = [DType::Bf16, DType::F16, DType::E4m3, DType::E2m1];
const WIDE: [DType; 2] = [DType::F32, DType::Tf32];

/// Positive finite values, ascending, zero first, from the definition: m · 2^(e - p + 1).
fn grid(d: DType) -> Vec<f64> {
    let (p, mut e) = (d.precision() as i32, d.min_exponent());
    let step = |e: i32| 2f64.powi(e - p + 1);
    let mut all: Vec<f64> = (0..1 << (p - 1)).map(|m| f64::from(m) * step(e)).collect();
    while *all.last().unwrap() < d.largest() {
        all.extend((1 << (p - 1)..1 << p).map(|m| f64::from(m) * step(e)));
        e += 1;
    }
    all.retain(|v| *v <= d.largest());
    all
}

/// Rounding in whole numbers: x = m · 2^q, unit = 2^u, quotient and remainder.
fn nearest(d: DType, x: f64) -> f64 {
    if !x.is_finite() || x == 0.0 {
        return if x.is_infinite() && saturates(d) { d.largest().copysign(x) } else { x };
    }
    let field = (x.abs().to_bits() >> 52) as i32;
    let fraction = x.to_bits() & ((1 << 52) - 1);
    let (m, q) = if field == 0 { (fraction, -1074) } else { (fraction | 1 << 52, field - 1075) };
    let e = q + 63 - m.leading_zeros() as i32;
    let unit = e.max(d.min_exponent()) - d.precision() as i32 + 1;
    let down = unit - q;
    let r = match down {
        ..=0 => return x,
        64.. => 0,
        _ => {
            let (whole, rest, half) = (m >> down, u128::from(m) & ((1 << down) - 1), 1u128 << (down - 1));
            whole + u64::from(rest > half || rest == half && whole & 1 == 1)
        }
    };
    // Exact: r has at most 25 bits and the result is normal in float64.
    let y = r as f64 * 2f64.powi(unit);
    let y = if y <= d.largest() {
        y
    } else if saturates(d) {
        d.largest()
    } else {
        f64::INFINITY
    };
    y.copysign(x)
}

fn saturates(d: DType) -> bool {
    [DType::E4m3, DType::E2m1].contains(&d)
}

fn same(a: f64, b: f64, what: &str) {
    assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{what}: {a:e} and {b:e}");
}

#[test]
fn table() {
    assert_eq!(U, 2f64.powi(-24));
    assert_eq!(DType::Bf16.largest(), 3.3895313892515355e38);
    assert_eq!(DType::Tf32.largest(), f64::from(f32::from_bits(0x7f7f_e000)));
    for d in DType::ALL {
        assert_eq!(d.name().parse(), Ok(d));
        assert_eq!(serde_json::to_string(&d).unwrap(), format!("\"{d}\""));
        assert_eq!(d.round(d.largest()), d.largest());
        // A whole number of the last unit.
        assert_eq!(d.largest() % d.spacing(d.largest()), 0.0);
    }
    assert_eq!(
        "BF16".parse::<DType>().unwrap_err().to_string(),
        "no number format is called \"BF16\"; there are bf16 f16 f32 f64 tf32 e4m3 e2m1"
    );
}

#[test]
fn every_value_its_ties_and_what_lies_beside_them() {
    for d in SMALL {
        let grid = grid(d);
        assert_eq!(*grid.last().unwrap(), d.largest());
        for (i, w) in grid.windows(2).enumerate() {
            let (a, b) = (w[0], w[1]);
            let tie = (a + b) / 2.0;
            // The position on the grid and the significand have the same parity.
            let even = if i % 2 == 0 { a } else { b };
            for sign in [1.0, -1.0] {
                let round = |x: f64| d.round(sign * x) * sign;
                same(round(a), a, "value");
                same(round(tie), even, "tie");
                same(round(tie.next_down()), a, "below the tie");
                same(round(tie.next_up()), b, "above the tie");
                same(round(a.next_up()), a, "above a value");
                same(round(b.next_down()), b, "below a value");
            }
            assert_eq!((d.above(a), d.below(b)), (b, a));
            assert_eq!((d.above(-b), d.below(-a)), (-a, -b));
            assert_eq!(d.spacing(a), d.spacing(a.midpoint(b)));
            assert_eq!(d.spacing(a), b - a, "{d} {a:e}");
            if i > 0 {
                assert_eq!(d.cell(a), ((grid[i - 1] + a) / 2.0, tie));
                assert_eq!(d.cell(-a), (-tie, -(grid[i - 1] + a) / 2.0));
            }
        }
        assert_eq!(d.cell(0.0), (-grid[1] / 2.0, grid[1] / 2.0));
    }
}

#[test]
fn overflow() {
    // The threshold is half a unit above the largest value, itself a tie to the even neighbour: infinity.
    for (d, threshold) in [
        (DType::F16, 65520.0),
        (DType::Bf16, d_threshold(8)),
        (DType::Tf32, d_threshold(11)),
        (DType::F32, d_threshold(24)),
    ] {
        assert_eq!(d.round(threshold), f64::INFINITY, "{d}");
        assert_eq!(d.round(-threshold), f64::NEG_INFINITY);
        assert_eq!(d.round(threshold.next_down()), d.largest());
        assert_eq!(d.round(f64::MAX), f64::INFINITY);
        assert_eq!(d.cell(d.largest()).1, threshold);
        assert_eq!(d.cell(-d.largest()).0, -threshold);
        assert_eq!(d.cell(f64::INFINITY), (threshold, f64::INFINITY));
        assert_eq!(d.cell(f64::NEG_INFINITY), (f64::NEG_INFINITY, -threshold));
        assert_eq!(d.above(d.largest()), f64::INFINITY);
        assert_eq!(d.below(f64::INFINITY), d.largest());
    }
    for d in [DType::E4m3, DType::E2m1] {
        for x in [d.largest(), 1.01 * d.largest(), 1e3, f64::MAX, f64::INFINITY] {
            assert_eq!((d.round(x), d.round(-x)), (d.largest(), -d.largest()));
        }
        assert_eq!(d.cell(d.largest()).1, f64::INFINITY);
    }
    for d in DType::ALL {
        assert!(d.round(f64::NAN).is_nan());
        same(d.round(-0.0), -0.0, "sign of zero");
        same(d.round(-1e-300), if d == DType::F64 { -1e-300 } else { -0.0 }, "sign of an underflow");
        let tiny = 2f64.powi(d.min_exponent()) * 2f64.powi(1 - d.precision() as i32);
        assert_eq!((d.spacing(0.0), d.spacing(tiny), d.above(-0.0), d.below(0.0)), (tiny, tiny, tiny, -tiny));
        // A slice at a time: the same, also for what is no number or too large.
        let values =
            [0.0, tiny, 1.0, -1.5, 0.7e-4, 3e5, d.largest(), f64::INFINITY, f64::NAN, f64::MAX, -1e-300];
        let mut ulps = [0.0; 11];
        d.spacing_slice(&values, &mut ulps);
        assert_eq!(ulps, values.map(|v| d.spacing(v)), "{d}");
        let at_most = d.largest() - d.below(d.largest());
        assert_eq!(ulps[6..10], [at_most; 4], "{d}");
    }
}

/// (2 - 2^-p) · 2^127.
fn d_threshold(p: i32) -> f64 {
    (2.0 - 2f64.powi(-p)) * 2f64.powi(127)
}

#[test]
fn all_bit_patterns() {
    for bits in 0..=u16::MAX {
        let halves = [
            (DType::F16, half::f16::from_bits(bits).to_f64()),
            (DType::Bf16, half::bf16::from_bits(bits).to_f64()),
        ];
        for (d, want) in halves {
            let v = d.from_bits(bits.into());
            same(v, want, d.name());
            same(d.round(v), v, d.name());
            if !v.is_nan() {
                assert_eq!(d.to_bits(v), u64::from(bits));
            }
        }
    }
    for d in [DType::E4m3, DType::E2m1] {
        let values = grid(d);
        let sign = if d == DType::E4m3 { 0x80 } else { 8 };
        for (bits, v) in values.iter().enumerate() {
            for (bits, v) in [(bits as u64, *v), (bits as u64 | sign, -v)] {
                same(d.from_bits(bits), v, d.name());
                assert_eq!(d.to_bits(v), bits);
            }
        }
    }
    assert!(DType::E4m3.from_bits(0x7f).is_nan() && DType::E4m3.from_bits(0xff).is_nan());
    assert_eq!(
        [DType::Bf16, DType::F16, DType::E4m3, DType::E2m1].map(|d| d.to_bits(f64::NAN)),
        [0x7fc0, 0x7e00, 0x7f, 7]
    );
    assert_eq!([DType::Bf16, DType::F16].map(|d| d.to_bits(f64::NEG_INFINITY)), [0xff80, 0xfc00]);
}

/// Bit patterns, and values near a tie of the format.
fn reals(d: DType) -> impl Strategy<Value = f64> {
    let near = (any::<u64>(), -2i64..=2).prop_map(move |(bits, by)| {
        let v = d.round(f64::from_bits(bits));
        let tie = v + d.spacing(v) / 2.0;
        f64::from_bits(tie.to_bits().wrapping_add_signed(by))
    });
    let moderate =
        (any::<u64>(), -160i32..160).prop_map(|(b, e)| (b as f64 / 2f64.powi(63) - 1.0) * 2f64.powi(e));
    prop_oneof![any::<u64>().prop_map(f64::from_bits), near, moderate]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]
    #[test]
    fn as_in_whole_numbers(x in prop_oneof![reals(DType::F32), reals(DType::Tf32), reals(DType::Bf16), reals(DType::F16), reals(DType::E4m3)]) {
        for d in SMALL.into_iter().chain(WIDE) {
            same(d.round(x), nearest(d, x), d.name());
        }
    }

    #[test]
    fn neighbours_enclose_and_cells_round(x in reals(DType::Tf32)) {
        for d in SMALL.into_iter().chain(WIDE) {
            let c = d.round(x);
            if c.is_finite() {
                prop_assert!(d.below(c) < c && c < d.above(c));
                let (lo, hi) = d.cell(c);
                prop_assert!(lo <= x && x <= hi);
                prop_assert_eq!(d.round(lo.next_up()), c);
                prop_assert_eq!(d.round(hi.next_down()), c);
                prop_assert!(d.round(hi.next_up()) > c || d.round(hi) == c && hi == f64::INFINITY);
            }
        }
    }

    #[test]
    fn slices_are_values(xs in prop::collection::vec(reals(DType::Bf16), 0..40)) {
        for d in DType::ALL {
            let mut rounded = xs.clone();
            d.round_slice(&mut rounded);
            let bytes = d.encode(&xs);
            prop_assert_eq!(bytes.len(), xs.len() * d.bytes());
            let mut read = vec![0.0; xs.len()];
            d.decode(&bytes, &mut read);
            for (i, x) in xs.iter().enumerate() {
                same(rounded[i], d.round(*x), "round_slice");
                if !(x.is_nan() && d == DType::E2m1) {
                    same(read[i], d.round(*x), "encode, decode");
                }
            }
        }
    }
}
