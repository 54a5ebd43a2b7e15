use super::*;
use crate::report::sample;
use std::path::PathBuf;

fn source(name: &str, report: Report) -> Source {
    Source { path: PathBuf::from(name), report }
}

fn between(a: Report, b: Report) -> Difference {
    diff(&source("a.json", a), &source("b.json", b)).unwrap()
}

#[test]
fn a_report_differs_from_itself_in_nothing() {
    let d = between(sample::report(&[1, 2]), sample::report(&[1, 2]));
    assert_eq!((d.rows.len(), d.equal, d.worse, d.exit), (0, 16, 0, 0));
    assert!(d.notes.is_empty());
    assert_eq!(text::line(&d), "0 worse, 0 better, 0 differ in nothing that matters, 16 equal");
    // Times are no difference.
    let mut slow = sample::report(&[1, 2]);
    slow.layers[0].seconds = 1e3;
    assert_eq!(between(sample::report(&[1, 2]), slow).rows.len(), 0);
}

#[test]
fn a_fault_is_worse_and_its_end_is_better() {
    let mut bad = sample::report(&[1]);
    sample::spoil(&mut bad, 1, Form::Absorbed, Phase::Decode);
    let d = between(sample::report(&[1]), bad.clone());
    assert_eq!((d.worse, d.better, d.exit), (1, 0, 1));
    assert_eq!(d.rows[0].title(), "layer 1 absorbed/attn_out, decode");
    assert_eq!(d.rows[0].why, ["verdict"]);
    let back = between(bad, sample::report(&[1]));
    assert_eq!((back.worse, back.better, back.exit), (0, 1, 0));
    let shown = text::render(&d, 80);
    assert!(shown.contains("Worse:\n  layer 1 absorbed/attn_out, decode: "), "{shown}");
    assert!(
        shown.lines().all(|l| anstream::adapter::strip_str(l).to_string().chars().count() <= 80),
        "{shown}"
    );
}

/// 8,000 elements in 80 rows. In a projection each is a draw: 10 and 100 flips are no chance. In attention 100 of the columns of one
/// row are one draw, so there even 20 and 2,000 are 0.2 and 20 of 80 rows, beyond 1e-6 only from 3,900 or so on.
#[test]
fn flips_matter_where_they_are_more_than_chance() {
    let with = |index: usize, flips: u64| {
        let mut r = sample::report(&[1]);
        r.layers[0].tensors[index].flips = flips;
        r
    };
    let change = |index, flips| {
        let d = between(sample::report(&[1]), with(index, flips));
        (d.rows[0].change, d.exit)
    };
    assert_eq!(change(1, 11), (Change::Other, 0));
    assert_eq!(change(1, 100), (Change::Worse, 1));
    assert_eq!(between(with(1, 100), sample::report(&[1])).rows[0].change, Change::Better);
    assert_eq!(change(2, 1_000), (Change::Other, 0));
    assert_eq!(change(2, 3_000), (Change::Worse, 1));
    // Another contract has another share of its own.
    let mut other = with(1, 100);
    other.layers[0].contract.softmax.tile = 7;
    let d = between(sample::report(&[1]), other);
    assert_eq!((d.rows[0].change, d.tests, d.exit), (Change::Other, 0, 0));
    assert!(text::render(&d, 200).contains("different contracts"));
    // The bound itself: 55 of 55 flips in one of two equal halves is 2·2^-55.
    let p = flips((0.0, 1e4), (55.0, 1e4));
    assert!((p - -54.0 * std::f64::consts::LN_2).abs() < 1e-9, "{p}");
    assert_eq!(flips((5.0, 1e4), (5.0, 1e4)), 0.0);
    assert_eq!(flips((0.0, 1e4), (0.0, 1e4)), 0.0);
    assert_eq!(flips((3.0, 1e3), (9.0, 1e4)), flips((9.0, 1e4), (3.0, 1e3)));
}

/// The bound against the hypergeometric law itself, term by term: never below the p-value of both sides.
#[test]
fn the_bound_covers_the_hypergeometric_law() {
    let choose = |n: f64, k: f64| libm::lgamma(n + 1.0) - libm::lgamma(k + 1.0) - libm::lgamma(n - k + 1.0);
    let tail = |from: u64, k: u64, n: u64, m: u64| -> f64 {
        let term = |b: u64| {
            let (k, n, m, b) = (k as f64, n as f64, m as f64, b as f64);
            libm::exp(choose(m, b) + choose(n, k - b) - choose(n + m, k))
        };
        (from..=k.min(m)).filter(|b| k - b <= n).map(term).sum()
    };
    for (n, m) in [(100, 100), (100, 300), (40, 4000)] {
        for k in [1u64, 5, 30] {
            for b in 0..=k.min(m) {
                let a = k - b;
                if a > n || (b as f64) * (n as f64) < (a as f64) * (m as f64) {
                    continue;
                }
                let ours = flips((a as f64, n as f64), (b as f64, m as f64)).exp();
                assert!(
                    ours >= (2.0 * tail(b, k, n, m)).min(1.0) * (1.0 - 1e-9),
                    "{a} of {n}, {b} of {m}: {ours}"
                );
            }
        }
    }
}

#[test]
fn rounding_and_exact_are_both_clean() {
    let mut exact = sample::report(&[1]);
    (exact.layers[0].tensors[1].verdict, exact.layers[0].tensors[1].flips) = (Verdict::Exact, 9);
    let d = between(exact, sample::report(&[1]));
    assert_eq!((d.rows[0].change, d.exit), (Change::Other, 0));
}

#[test]
fn power_matters_where_it_crosses_the_promise() {
    let sees = |gain: Option<f64>| {
        let mut r = sample::report(&[1]);
        r.layers[0].tensors[1].power.as_mut().unwrap().gain = gain;
        between(sample::report(&[1]), r)
    };
    assert_eq!((sees(Some(9e-4)).rows.len(), sees(Some(9e-4)).equal), (0, 8));
    assert_eq!(sees(Some(1.1e-3)).rows[0].why, ["no longer sees what it promises"]);
    assert_eq!(sees(None).exit, 1);
}

#[test]
fn what_is_gone_is_worse() {
    let mut one = sample::report(&[1]);
    one.layers[0].tensors.retain(|u| u.form != Some(Form::Absorbed));
    one.layers[0].probes.truncate(1);
    let d = between(sample::report(&[1]), one.clone());
    assert_eq!((d.worse, d.exit), (3, 1), "two phases and a probe");
    let d = between(one, sample::report(&[1]));
    assert_eq!((d.worse, d.better, d.exit), (0, 3, 0));
    let d = between(sample::report(&[1, 2]), sample::report(&[1]));
    assert_eq!((d.worse, d.notes.len()), (1, 1));
    // What was never asked is not missed.
    let mut dump = sample::report(&[1]);
    (dump.layers[0].tensors[1].verdict, dump.layers[0].tensors[1].uncaptured) = (Verdict::NotCompared, true);
    let mut without = dump.clone();
    without.layers[0].tensors.remove(1);
    assert_eq!(between(dump, without).exit, 0);
}

#[test]
fn probes_and_geometry_count() {
    let mut broken = sample::report(&[1]);
    broken.layers[0].probes[1].outcome =
        Outcome::Broken { what: "x".into(), place: "y".into(), broken: 1, elements: 2 };
    assert_eq!(between(sample::report(&[1]), broken).rows[0].tensor, "probe one-key");
    let mut other = sample::report(&[1]);
    (other.layers[0].verdict, other.layers[0].tensors) = (Verdict::Fault, Vec::new());
    assert_eq!(between(sample::report(&[1]), other).exit, 1);
}

#[test]
fn reports_of_other_things_are_not_compared() {
    let refused =
        |b: Report| diff(&source("a", sample::report(&[1])), &source("b", b)).unwrap_err().to_string();
    let mut model = sample::report(&[1]);
    model.model.bytes = vec![7];
    assert!(refused(model).contains("different models"));
    let mut case = sample::report(&[1]);
    case.layers[0].case.batch = "0+9".into();
    let text = refused(case);
    assert!(text.contains("0+3,20+1 in bf16") && text.contains("0+9") && text.lines().count() == 3, "{text}");
    assert!(refused(sample::report(&[2])).contains("no layer was judged with the same case"));
    // Another engine, contract or version is said, and compared.
    let mut engine = sample::report(&[1]);
    engine.layers[0].engine.name = "cuda".into();
    engine.version = "0.0.1";
    let d = between(sample::report(&[1]), engine);
    assert_eq!(
        d.notes,
        [
            "engines: cpu, emulated | cuda, emulated",
            &format!("versions of mla-check: {} | 0.0.1", env!("CARGO_PKG_VERSION"))
        ]
    );
}
