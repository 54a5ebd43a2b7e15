//! Directions against derivatives by differences; estimates against least squares by hand.

use super::*;
use approx::assert_relative_eq;
use mla_reference::attention::{attend, attend_split, strided};
use mla_reference::{Contract, KeyStats};

struct Data {
    q: Array2<f64>,
    k: Array2<f64>,
    v: Array2<f64>,
    stats: KeyStats,
}

fn data() -> Data {
    let f = |i: usize, j: usize| ((i * 7 + j * 13 + i * j) % 11) as f64 / 5.0 - 1.0;
    Data {
        q: Array2::from_shape_fn((3, 4), |(i, j)| f(i + 2, j)),
        k: Array2::from_shape_fn((9, 4), |(i, j)| f(i, j + 1)),
        v: Array2::from_shape_fn((9, 5), |(i, j)| f(j, i)),
        stats: KeyStats::default(),
    }
}

fn head<'a>(d: &'a Data, scale: f64) -> Head<'a> {
    let (q, k, v) = (d.q.view(), strided(&d.k), strided(&d.v));
    Head { q, k, v, visible: &[5, 8, 9], scale, stats: &d.stats }
}

/// (f(h) − f(−h))/2h of attention under a change.
fn derivative(x: impl Fn(f64) -> Array2<f64>) -> Array2<f64> {
    let h = 1e-5;
    (x(h) - x(-h)) / (2.0 * h)
}

fn same(a: &Array2<f64>, b: &Array2<f64>) {
    for (a, b) in a.iter().zip(b) {
        assert_relative_eq!(a, b, epsilon = 1e-9, max_relative = 1e-7);
    }
}

#[test]
fn directions_are_derivatives_of_the_attention() {
    let d = data();
    let c = Contract::exact();
    let at = |scale| attend(&head(&d, scale), 0..9, &c);
    let a = at(0.7);
    same(&scale(&a, &head(&d, 0.7)), &derivative(|h| at(0.7 * (1.0 + h)).x));
    // Splits that are merged inside change nothing of it.
    let merged = attend_split(&head(&d, 0.7), &[0..4, 4..6, 6..9], &c);
    same(&scale_split(&merged, &head(&d, 0.7)), &scale(&a, &head(&d, 0.7)));

    let rope = |h: f64| {
        let mut k = d.k.clone();
        k.slice_mut(s![.., 2..]).mapv_inplace(|v| v * (1.0 + h));
        let d = Data { q: d.q.clone(), k, v: d.v.clone(), stats: KeyStats::default() };
        attend(&head(&d, 0.7), 0..9, &c).x
    };
    same(&rope_weight(&a, &head(&d, 0.7), 2), &derivative(rope));

    // A factor on the weight of keys 4 and 6, by plain softmax.
    let weighted = |h: f64| {
        Array2::from_shape_fn((3, 5), |(i, j)| {
            let w = |t: usize| a.s[[i, t]].exp() * if t == 4 || t == 6 { 1.0 + h } else { 1.0 };
            (0..9).map(|t| w(t) * d.v[[t, j]]).sum::<f64>() / (0..9).map(w).sum::<f64>()
        })
    };
    same(&tokens(&a, &head(&d, 0.7), |t| t == 4 || t == 6), &derivative(weighted));
}

#[test]
fn a_range_counts_keys_by_their_position() {
    let d = data();
    let a = attend(&head(&d, 0.7), 4..9, &Contract::exact());
    let all = tokens(&a, &head(&d, 0.7), |_| true);
    assert!(all.iter().all(|v| v.abs() < 1e-14));
    let (one, none) = (tokens(&a, &head(&d, 0.7), |t| t == 4), tokens(&a, &head(&d, 0.7), |t| t < 4));
    assert!(none.iter().all(|v| *v == 0.0));
    // The first row sees key 4 alone: its weight is 1 whatever factor it has.
    assert!(one.row(0).iter().all(|v| v.abs() < 1e-15) && one.row(2).iter().any(|v| v.abs() > 1e-3));
}

fn rows(of: &[(f64, f64)]) -> Vec<Cluster> {
    of.iter().map(|&(score, information)| Cluster { score, information }).collect()
}

#[test]
fn estimate_is_weighted_least_squares() {
    assert_eq!(cluster(&[2.0, -1.0], &[3.0, 5.0], &[0.5, 2.0]), Cluster { score: -1.0, information: 20.75 });
    // Rows of S = β I + e: β̂ = 12/6, e = (1, −1, 0) and their sum is 0 by centring.
    let e = test_direction(&rows(&[(3.0, 1.0), (3.0, 2.0), (6.0, 3.0)])).unwrap();
    assert_relative_eq!(e.beta, 2.0);
    assert_relative_eq!(e.se_m, 6f64.powf(-0.5));
    assert_relative_eq!(e.se_c, (1.5f64 * 2.0).sqrt() / 6.0);
    assert_relative_eq!(e.g_eff, 36.0 / 14.0);
    assert_relative_eq!(e.z_sym, 12.0 / 54f64.sqrt());
    assert_relative_eq!(e.se(), e.se_m);
    assert_eq!(test_direction(&rows(&[(0.0, 0.0)])), None);
    assert_eq!(test_direction(&[]), None);
    // One row: its own β̂ fits it exactly.
    assert_eq!(test_direction(&rows(&[(3.0, 1.0)])).unwrap().se_c, 0.0);
}

#[test]
fn the_table_of_laws() {
    use Law::{Normal, SelfNormalised, Student};
    for (kind, clean, g_eff, law) in [
        (Kind::Global, true, 3.0, Normal),
        (Kind::Local, true, 12.0, Normal),
        (Kind::Tokens, true, 3.0, SelfNormalised),
        (Kind::Global, false, 12.0, Student { dof: 11.0 }),
        (Kind::Global, false, 11.9, SelfNormalised),
    ] {
        assert_eq!(Law::of(kind, clean, g_eff), law);
    }
    assert_relative_eq!(Law::SelfNormalised.log_p(4.0), (2.0 * f64::exp(-8.0)).ln(), max_relative = 1e-14);
    assert_eq!(Law::SelfNormalised.log_p(0.5), 0.0);
}

#[test]
fn within_the_floor_nothing_is_significant() {
    let mut e = Estimate { beta: 1e-5, se_m: 1e-7, se_c: 0.0, z_sym: 9.0, g_eff: 64.0 };
    let fine = floor(Kind::Global, 20.0, Fineness::Fine);
    assert_eq!(fine, 2e-5);
    assert_relative_eq!(floor(Kind::Local, 20.0, Fineness::Coarse), 28.0 / 16_777_216.0);
    assert_eq!(floor(Kind::Tokens, 20.0, Fineness::Coarse), 0.00390625);
    for clean in [true, false] {
        for g_eff in [3.0, 64.0] {
            e.g_eff = g_eff;
            assert_eq!(p_value(Kind::Local, &e, fine, clean).log_p, 0.0);
        }
    }
    e.beta = -2.1e-5;
    e.g_eff = 64.0;
    // Ten standard errors beyond it: 2(1 − Φ(10)) = 1.5e-23.
    let p = p_value(Kind::Local, &e, fine, true);
    assert_relative_eq!(p.z, 10.0, max_relative = 1e-9);
    assert_relative_eq!(p.log_p, 1.523_970_604_8e-23f64.ln(), max_relative = 1e-9);
    e.g_eff = 3.0;
    assert_eq!(p_value(Kind::Local, &e, fine, true).z, 9.0);
}
