use super::*;
use crate::report::sample;
use std::path::PathBuf;

fn source(name: &str, report: Report) -> Source {
    Source { path: PathBuf::from(name), report }
}

fn parts() -> Vec<Source> {
    let mut b = sample::report(&[2]);
    b.model.files = vec!["/elsewhere/a.gguf".into()];
    b.engine_choice = "chosen because no GPU can be used".into();
    vec![source("1", sample::report(&[1])), source("2", b), source("3", sample::report(&[3]))]
}

fn merged(sources: Vec<Source>) -> Report {
    merge(sources, &Wanted::default()).unwrap().report
}

fn bytes(r: &Report) -> String {
    serde_json::to_string(r).unwrap()
}

#[test]
fn parts_in_any_order_give_the_same_bytes() {
    let [a, b, c] = parts().try_into().unwrap();
    let all = merged(vec![a.clone(), b.clone(), c.clone()]);
    assert_eq!(all.layers.iter().map(|l| l.layer).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!((all.verdict, all.exit), (Verdict::Rounding, 0));
    for order in [[&c, &b, &a], [&b, &a, &c], [&c, &a, &b]] {
        assert!(bytes(&merged(order.into_iter().cloned().collect())) == bytes(&all));
    }
    // Merged in two steps, merged again, merged with its own parts.
    let two = source("ab", merged(vec![b.clone(), a.clone()]));
    assert!(bytes(&merged(vec![two.clone(), c.clone()])) == bytes(&all));
    let once = source("all", all.clone());
    assert!(bytes(&merged(vec![once.clone()])) == bytes(&all));
    let again = merge(vec![once, a.clone(), two], &Wanted::default()).unwrap();
    assert_eq!((bytes(&again.report) == bytes(&all), again.repeated), (true, 3));
    // Each layer keeps the command that judged it; the whole has all of them.
    assert_eq!(all.command_of(&all.layers[1]), b.report.command);
    assert_eq!(all.command.lines().count(), 3);
    let woven = merged(vec![source("odd", sample::report(&[1, 3])), source("even", sample::report(&[2]))]);
    assert_eq!(woven.layers.iter().map(|l| l.layer).collect::<Vec<_>>(), [1, 2, 3]);
    let one = merged(vec![source("3", sample::report(&[1, 2, 3]))]);
    assert!(bytes(&one) == bytes(&sample::report(&[1, 2, 3])), "a report is a merge of itself");
}

#[test]
fn a_merge_is_read_back_as_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("all.json");
    let mut all = merged(parts());
    all.layers[0].tensors[1].engine = Some(crate::judge::Digest { norm: f64::NAN, checksum: 0.1 });
    std::fs::write(&path, bytes(&all)).unwrap();
    let read = crate::report::read::read(&path).unwrap();
    assert_eq!(bytes(&read), bytes(&all));
    assert_eq!(read.layers[0].tensors[0].which, all.layers[0].tensors[0].which);
    assert_eq!(read.layers[0].tensors[2].which, all.layers[0].tensors[2].which);
}

#[test]
fn reports_that_do_not_belong_together_are_refused() {
    type Change = fn(&mut Report);
    let changes: [(&str, Change); 9] = [
        ("different models: a.gguf of 1000 bytes", |r| r.model.bytes = vec![1_001]),
        ("different models", |r| r.model.files = vec!["models/b.gguf".into()]),
        ("different models", |r| r.model.layers = 5),
        ("different versions", |r| r.version = "9.9.9"),
        ("different conventions: hf (auto) and vllm", |r| r.convention = "vllm"),
        ("different schemas", |r| r.schema = crate::report::COMPARE),
        ("different deliberate faults", |r| r.deliberate_fault = Some("eps".into())),
        ("engine cpu to different contracts", |r| r.layers[0].contract.split_prefill = true),
        ("two dumps side by side", |r| {
            let engines = ["a".into(), "b".into()];
            r.beside.push(crate::compare::beside::Pair { layer: 0, engines, tensors: Vec::new() });
        }),
    ];
    for (what, change) in changes {
        let mut b = sample::report(&[2]);
        change(&mut b);
        let sources = vec![source("one.json", sample::report(&[1])), source("two.json", b)];
        let e = merge(sources, &Wanted::default()).unwrap_err();
        assert!(matches!(e, MergeError::Apart { .. }), "{what}");
        let text = e.to_string();
        assert!(text.contains(what) && text.contains("two.json"), "{what}: {text}");
        assert_eq!(text.lines().count(), 3, "{text}");
    }
    assert!(merge(Vec::new(), &Wanted::default()).is_err());
    // Splits go with the batch.
    let mut b = sample::report(&[2]);
    b.layers[0].contract.splits = mla_reference::Splits::Parts(7);
    assert!(merge(vec![source("a", sample::report(&[1])), source("b", b)], &Wanted::default()).is_ok());
}

#[test]
fn what_contradicts_itself_is_named() {
    type Change = fn(&mut Report);
    let changes: [(&str, Change); 5] = [
        ("flips of fused/attn_out, prefill: ", |r| r.layers[0].tensors[2].flips += 1),
        ("the verdict of kv_a, prefill: ", |r| r.layers[0].tensors[1].verdict = Verdict::Inconclusive),
        ("norm and checksum of absorbed/attn_out, decode", |r| {
            r.layers[0].tensors[5].engine = None;
        }),
        ("differ in probes", |r| r.layers[0].probes[0].says = "other"),
        ("differ in odd", |r| r.layers[0].odd.push("odd".into())),
    ];
    for (what, change) in changes {
        let mut b = sample::report(&[1]);
        change(&mut b);
        let sources = vec![source("one.json", sample::report(&[1])), source("two.json", b)];
        let e = merge(sources, &Wanted::default()).unwrap_err();
        assert!(matches!(e, MergeError::Contradiction { .. }), "{e}");
        let text = e.to_string();
        assert!(
            text.contains(what) && text.contains("one.json") && text.contains("two.json"),
            "{what}: {text}"
        );
    }
    // One form by itself says the same of its bits, or contradicts both forms together.
    let fused = |flips: u64| {
        let mut r = sample::report(&[1]);
        r.layers[0].tensors.retain(|u| u.form != Some(Form::Absorbed));
        r.layers[0].tensors[2].flips = flips;
        vec![source("both", sample::report(&[1])), source("fused", r)]
    };
    assert_eq!(merge(fused(20), &Wanted::default()).unwrap().report.layers.len(), 2);
    assert!(matches!(merge(fused(21), &Wanted::default()), Err(MergeError::Contradiction { .. })));
    // Time is no contradiction.
    let mut slow = sample::report(&[1]);
    (slow.layers[0].seconds, slow.layers[0].probe_seconds) = (99.0, 9.0);
    let all = merge(vec![source("a", sample::report(&[1])), source("b", slow)], &Wanted::default()).unwrap();
    assert_eq!((all.repeated, all.report.layers.len()), (1, 1));
}

#[test]
fn what_is_missing_makes_no_verdict() {
    let of = |r: Report, wanted: &Wanted| merge(vec![source("a", r)], wanted).unwrap().report;
    let r = of(sample::report(&[1]), &Wanted::default());
    assert_eq!((r.verdict, r.exit), (Verdict::NotCompared, 3));
    assert_eq!(r.gaps[0].what, "no report has layers 2..3");
    let only = Wanted { layers: Some(vec![1]), ..Wanted::default() };
    assert_eq!(of(sample::report(&[1]), &only).exit, 0);
    // Filled, the gap is gone.
    let rest = source("b", sample::report(&[2, 3]));
    let filled = merge(vec![source("a", r), rest], &Wanted::default()).unwrap().report;
    assert_eq!((filled.gaps.len(), filled.exit), (0, 0));
    // A form and phase that the other layers have.
    let mut some = sample::report(&[1, 2, 3]);
    some.layers[1].tensors.retain(|u| (u.form, u.phase) != (Some(Form::Absorbed), Some(Phase::Decode)));
    let r = of(some, &Wanted::default());
    assert_eq!(r.gaps.len(), 1);
    assert_eq!(r.gaps[0].what, "layer 2 by engine cpu in bf16: no absorbed decode, which other layers have");
    assert_eq!(r.exit, 3);
    // Phases apart are one layer together.
    let half = |phase: Phase, batch: &str| {
        let mut r = sample::report(&[1, 2, 3]);
        for l in &mut r.layers {
            l.case.batch = batch.into();
            l.tensors.retain(|u| u.phase.is_none_or(|p| p == phase) && u.form.is_some());
        }
        source(batch, r)
    };
    let halves = vec![half(Phase::Prefill, "0+3"), half(Phase::Decode, "20+1")];
    let r = merge(halves, &Wanted::default()).unwrap().report;
    assert_eq!((r.layers.len(), r.gaps.len(), r.exit), (6, 0, 0));
    // A fault is worse than a gap.
    let mut bad = sample::report(&[1]);
    sample::spoil(&mut bad, 1, Form::Fused, Phase::Decode);
    assert_eq!(of(bad, &Wanted::default()).exit, 1);
}

#[test]
fn too_few_gpu_reports_are_a_failure() {
    let gpu = |floor: usize| {
        let mut r = sample::report(&[1, 2, 3]);
        for l in &mut r.layers[..2] {
            l.engine.name = "cuda".into();
        }
        let wanted = Wanted { gpu_floor: floor, ..Wanted::default() };
        merge(vec![source("a", r)], &wanted).unwrap().report
    };
    assert_eq!((gpu(2).exit, gpu(2).gaps.len()), (0, 0));
    assert_eq!((gpu(3).exit, gpu(3).verdict), (1, Verdict::Fault));
    assert_eq!(gpu(3).gaps[0].what, "2 layer reports are by engine cuda, 3 must be");
}
