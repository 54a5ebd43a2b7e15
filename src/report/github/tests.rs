use super::*;
use crate::report::{Lack, sample};

#[test]
fn escapes_are_those_that_the_runner_takes_back() {
    let a = Annotation { error: true, title: "50 %: a, b".into(), message: "1 %0A: x, y\r\nz".into() };
    assert_eq!(a.to_string(), "::error title=50 %25%3A a%2C b::1 %250A: x, y%0D%0Az");
    let w = Annotation { error: false, title: "t".into(), message: String::new() };
    assert_eq!(w.to_string(), "::warning title=t::");
}

#[test]
fn findings_are_errors_and_no_verdict_is_a_warning() {
    assert_eq!(annotations(&sample::report(&[1, 2])), []);
    let mut r = sample::report(&[1, 2]);
    sample::spoil(&mut r, 2, Form::Fused, Phase::Prefill);
    r.layers[0].verdict = Verdict::Inconclusive;
    r.layers[0].tensors[1].verdict = Verdict::Inconclusive;
    r.broken.push(Lack { verdict: Verdict::Broke, what: "the kernel hung\n  where: gpu 0".into() });
    let all = annotations(&r);
    let short: Vec<(bool, &str)> = all.iter().map(|a| (a.error, a.title.as_str())).collect();
    let want = [
        (true, "mla-check: engine broke: the kernel hung"),
        (true, "mla-check: fault in layer 2, fused/attn_out, prefill"),
        (false, "mla-check: inconclusive in layer 1"),
    ];
    assert_eq!(short, want);
    assert!(all[1].message.contains("evidence: 100 %") && all[1].message.ends_with("engine cpu, bf16"));
    assert!(all[2].message.contains("kv_a, prefill"));
    for a in &all {
        assert_eq!(a.to_string().lines().count(), 1);
    }
}

#[test]
fn what_is_too_much_is_counted() {
    let mut r = sample::report(&[]);
    for layer in 0..30 {
        r.layers.push(sample::layer(layer));
        sample::spoil(&mut r, layer, Form::Fused, Phase::Decode);
    }
    let all = annotations(&r);
    assert_eq!((all.len(), all[9].title.as_str()), (10, "mla-check: 21 more errors"));
    let whole = summary(&r, SUMMARY);
    assert!(
        whole.contains("## ❌ mla-check: fault") && whole.contains("| 29 | cpu | bf16 | 0+3,20+1 | fault |")
    );
    assert!(whole.contains("<details><summary>30 layer reports</summary>"), "a long table is folded");
    assert!(!whole.contains("did not fit"));
    for room in [0, 10, 300, 2_000, 5_000, whole.len()] {
        let part = summary(&r, room);
        assert!(part.len() <= room, "{} of {room}", part.len());
        assert!(part.is_empty() || part.contains("more parts did not fit"), "{room}");
    }
    assert!(summary(&r, 10).is_empty() && !summary(&r, 5_000).is_empty());
}

#[test]
fn a_cell_stays_a_cell() {
    let mut r = sample::report(&[1]);
    r.layers[0].case.batch = "a|b\n<c>".into();
    let text = summary(&r, SUMMARY);
    assert!(text.contains("| a\\|b &lt;c> |"), "{text}");
    assert!(text.contains("## ✅ mla-check: rounding"));
}
