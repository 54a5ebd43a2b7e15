//! Products against the definition, written down once more in six lines, and against a plain triple loop.

use super::*;
use crate::ggml::GgmlType;

/// Uniform in [-1, 1), from a counter.
fn draw(n: usize, seed: u64) -> Vec<f64> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect()
}

/// The definition: one fma chain per 256 columns, then a sum of blocks.
fn spec(x: &[f64], t: usize, w: &[f64], m: usize, k: usize) -> Vec<f64> {
    let mut c = Vec::new();
    for (i, j) in (0..t).flat_map(|i| (0..m).map(move |j| (i, j))) {
        let chain = |k0| (k0..k.min(k0 + 256)).fold(0.0f64, |p, k1| w[j * k + k1].mul_add(x[i * k + k1], p));
        c.push((0..k).step_by(256).map(chain).fold(0.0, |c, p| c + p));
    }
    c
}

fn same(a: &[f64], b: &[f64], what: &str) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(),
            "{what}: element {i}: {a:e} and {b:e}"
        );
    }
}

fn by(plan: Plan, x: &[f64], t: usize, w: &dyn Rows) -> Vec<f64> {
    let mut c = vec![f64::NAN; t * w.rows()];
    run(plan, x, t, w, &mut c, None);
    c
}

fn all() -> impl Iterator<Item = Plan> {
    Isa::available().map(|isa| Plan { isa, block: None })
}

const SIZES: [(usize, usize, usize); 13] = [
    (1, 1, 1),
    (2, 5, 3),
    (3, 23, 255),
    (4, 24, 256),
    (5, 25, 257),
    (7, 49, 600),
    (8, 31, 1024),
    (9, 6, 513),
    (13, 96, 64),
    (16, 7, 31),
    (17, 100, 300),
    (18, 200, 257),
    (33, 11, 700),
];

#[test]
fn odd_sizes_have_the_bits_of_the_definition() {
    for (t, m, k) in SIZES {
        let (x, w) = (draw(t * k, 1), draw(m * k, 2));
        let want = spec(&x, t, &w, m, k);
        for p in all() {
            same(&by(p, &x, t, &Dense { data: &w, cols: k }), &want, &format!("{:?} {t} {m} {k}", p.isa));
        }
    }
}

#[test]
fn weighted_sums_have_the_bits_of_the_definition() {
    for (t, rows, d) in
        [(1, 1, 1), (5, 1, 17), (64, 7, 8), (257, 25, 20), (600, 2, 33), (300, 200, 9), (7, 24, 4)]
    {
        let stride = d + 5;
        let (p, v) = (draw(rows * t, 3), draw(t * stride, 4));
        // Output and weights change places: O[r][d] is the definition's C with X = P, W = Vᵀ, and fma is symmetric.
        let turned: Vec<f64> =
            (0..d).flat_map(|d| (0..t).map(move |t| t * stride + d)).map(|i| v[i]).collect();
        let want = spec(&p, rows, &turned, d, t);
        let v = Strided { data: &v[..v.len() - 5], rows: t, cols: d, stride };
        for isa in Isa::available() {
            let mut out = vec![f64::NAN; rows * d];
            weighted::with(isa, &p, &v, &mut out);
            same(&out, &want, &format!("{isa:?} {t} {rows} {d}"));
        }
        same(
            &by(Plan::default(), &draw(d, 5), 1, &v),
            &spec(&draw(d, 5), 1, &dense(&v), t, d),
            "strided weights",
        );
    }
    weighted_sum(&[], &Strided { data: &[], rows: 0, cols: 2, stride: 2 }, &mut [1.0; 0]);
    let mut out = [1.0; 4];
    weighted_sum(&[], &Strided { data: &[], rows: 0, cols: 2, stride: 2 }, &mut out);
    assert_eq!(out, [0.0; 4]);
}

fn dense(w: &dyn Rows) -> Vec<f64> {
    let mut all = vec![0.0; w.rows() * w.cols()];
    for (r, row) in all.chunks_mut(w.cols()).enumerate() {
        w.decode(r, 0, row);
    }
    all
}

#[test]
fn near_a_plain_triple_loop() {
    let (t, m, k) = (11, 37, 901);
    let (x, w) = (draw(t * k, 3), draw(m * k, 4));
    let c = by(Plan::default(), &x, t, &Dense { data: &w, cols: k });
    for i in 0..t {
        for j in 0..m {
            let terms = || (0..k).map(|l| x[i * k + l] * w[j * k + l]);
            // Both sums lie within γ_k Σ|x||w| of the exact one.
            let most = 2.0 * k as f64 * f64::EPSILON * terms().map(f64::abs).sum::<f64>();
            assert!((c[i * m + j] - terms().sum::<f64>()).abs() <= most);
        }
    }
}

#[test]
fn nan_and_inf_stay_where_they_belong() {
    for t in [1, 2, 6, 17] {
        let (m, k) = (29, 300);
        let (mut x, mut w) = (draw(t * k, 5), draw(m * k, 6));
        x[k - 1] = f64::NAN;
        w[3 * k + 7] = f64::INFINITY;
        w[28 * k + 299] = f64::NEG_INFINITY;
        w[5 * k] = f64::MAX;
        let want = spec(&x, t, &w, m, k);
        for p in all() {
            let c = by(p, &x, t, &Dense { data: &w, cols: k });
            same(&c, &want, &format!("{:?} {t}", p.isa));
            for (i, v) in c.iter().enumerate() {
                assert_eq!(v.is_nan(), i < m, "only token 0 is NaN");
                assert_eq!(v.is_infinite(), i >= m && [3, 28].contains(&(i % m)));
            }
        }
    }
}

#[test]
fn threads_tokens_and_blocks_change_no_bit() {
    let (t, m, k) = (37, 211, 1300);
    let (x, w) = (draw(t * k, 7), draw(m * k, 8));
    let w = Dense { data: &w, cols: k };
    let want = by(Plan::default(), &x, t, &w);
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        same(&pool.install(|| by(Plan::default(), &x, t, &w)), &want, "threads");
    }
    for block in [1, 24, 100, 500] {
        same(&by(Plan { block: Some(block), ..Plan::default() }, &x, t, &w), &want, "block");
    }
    for part in [1, 2, 3, 5, 8, 12, 20] {
        let c: Vec<f64> = x.chunks(part * k).flat_map(|x| by(Plan::default(), x, x.len() / k, &w)).collect();
        same(&c, &want, "tokens at a time");
    }
}

#[test]
fn nothing_to_do() {
    assert!(by(Plan::default(), &[0.0; 8], 2, &Dense { data: &[], cols: 4 }).is_empty());
    assert!(by(Plan::default(), &[], 0, &Dense { data: &[1.0; 8], cols: 4 }).is_empty());
    let mut norms = [0.0; 2];
    product_with_norms(&[], 0, &Dense { data: &[1.0, 2.0, 3.0, 4.0], cols: 2 }, &mut [], &mut norms);
    assert_eq!(norms, [5.0, 25.0]);
}

/// Every type in a product: the decoded values, and a decorator on top of them.
#[test]
fn stored_types_and_decorators() {
    struct Negated<'a>(&'a dyn Rows);
    impl Rows for Negated<'_> {
        fn rows(&self) -> usize {
            self.0.rows()
        }
        fn cols(&self) -> usize {
            self.0.cols()
        }
        fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
            self.0.decode(row, k0, out);
            out.iter_mut().for_each(|v| *v = -*v);
        }
    }
    for &ty in GgmlType::ALL.iter().filter(|ty| crate::dequant::is_supported(**ty)) {
        for (t, m, k) in [(3, 26, 1024), (1, 25, 1536), (20, 13, 512 + ty.block_elements())] {
            let x = draw(t * k, 9);
            // Bytes below 0x3c: finite scales and values wherever they stand.
            let n = m * k / ty.block_elements() * ty.block_bytes();
            let raw: Vec<u8> = draw(n, 10).iter().map(|v| ((v.to_bits() >> 20) as u8) % 0x3c).collect();
            let mut w = vec![0.0; m * k];
            crate::dequant::decode(ty, &raw, &mut w).unwrap();
            assert!(w.iter().all(|v| v.is_finite()));
            let want = spec(&x, t, &w, m, k);
            let rows = Blocks::new(ty, &raw, k).unwrap();
            for p in all() {
                same(&by(p, &x, t, &rows), &want, &format!("{ty} {:?}", p.isa));
            }
            let minus: Vec<f64> = want.iter().map(|v| 0.0 - v).collect();
            same(&by(Plan::default(), &x, t, &Negated(&rows)), &minus, "decorated");
        }
    }
    assert_eq!(Blocks::new(GgmlType::Q4_K, &[], 192).err(), Some(BlocksError::Columns(GgmlType::Q4_K, 192)));
    assert_eq!(Blocks::new(GgmlType::F32, &[0; 9], 2).err(), Some(BlocksError::Bytes(9, 8)));
}

/// NVFP4 with its tensor's scale: every element exact, and never taken for its blocks.
#[test]
fn scale_of_a_tensor() {
    let (m, k, scale) = (3, 128, 0.1f32);
    let raw: Vec<u8> = (0..m * k / 64 * 36).map(|i| (i * 37 % 251) as u8).collect();
    let rows = || Blocks::new(GgmlType::NVFP4, &raw, k).unwrap();
    let (mut plain, mut scaled) = (vec![0.0; k], vec![0.0; k]);
    for row in 0..m {
        rows().decode(row, 0, &mut plain);
        Scaled { rows: rows(), scale }.decode(row, 0, &mut scaled);
        for (plain, scaled) in plain.iter().zip(&scaled) {
            // Whole numbers of 2^-10, and of 2^-27 (0.1f32 is 13421773 of them): their product has 2^-37.
            let exact = (plain * 1024.0) as i128 * 13_421_773;
            assert_eq!((scaled * 2f64.powi(37)) as i128, exact);
        }
        assert!(plain.iter().any(|v| *v != 0.0));
    }
    let said = |rows: &dyn Rows| {
        let mut all = Vec::new();
        rows.say(&mut |b| all.extend_from_slice(b));
        all
    };
    let (one, other) = (Scaled { rows: rows(), scale }, Scaled { rows: rows(), scale: 0.2 });
    assert!(one.stored().is_none() && rows().stored().is_some());
    assert!(said(&one) != said(&other) && said(&one) != said(&rows()));
    assert_eq!((one.rows(), one.cols()), (m, k));
}

#[test]
fn norms() {
    for (t, m, k) in [(10, 50, 700), (1, 25, 129), (40, 200, 256)] {
        let (x, w) = (draw(t * k, 11), draw(m * k, 12));
        let blocks = k.div_ceil(NORM_BLOCK);
        let mut first: Option<Vec<f64>> = None;
        for p in all() {
            let (mut c, mut s) = (vec![0.0; t * m], vec![f64::NAN; m * blocks]);
            run(p, &x, t, &Dense { data: &w, cols: k }, &mut c, Some(&mut s));
            same(&c, &spec(&x, t, &w, m, k), "product");
            for (w, s) in w.chunks(k).zip(s.chunks(blocks)) {
                for (w, s) in w.chunks(NORM_BLOCK).zip(s) {
                    // Positive terms: both sums are within 128 roundings of the exact one.
                    let plain: f64 = w.iter().map(|v| v * v).sum();
                    assert!((s - plain).abs() <= 256.0 * f64::EPSILON / 2.0 * plain);
                }
            }
            same(first.get_or_insert_with(|| s.clone()), &s, "norms");
        }
    }
}
