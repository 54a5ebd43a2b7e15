use super::*;
use crate::judge::TABLE;
use crate::report::sample;
use quick_junit::{Report as Read, TestCaseStatus};

fn read(r: &Report) -> Read {
    let text = String::from_utf8(render(r).unwrap()).unwrap();
    Read::deserialize_from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Whether a reader takes the file for passed.
fn passed(r: &Read) -> bool {
    r.failures == 0 && r.errors == 0
}

#[test]
fn a_case_for_each_tensor_and_phase_in_suites_by_layer_and_form() {
    let file = read(&sample::report(&[1, 2]));
    let suites: Vec<&str> = file.test_suites.iter().map(|s| s.name.as_str()).collect();
    let of =
        |l: usize| ["weights", "shared", "fused", "absorbed"].map(|g| format!("layer {l}, {g}, cpu bf16"));
    assert_eq!(suites, [of(1), of(2)].concat());
    let names: Vec<&str> = file.test_suites[2].test_cases.iter().map(|c| c.name.as_str()).collect();
    let prefix = "layer 1 fused";
    let want = ["prefill attn_out", "decode attn_out", "probe one-key"].map(|n| format!("{prefix} {n}"));
    assert_eq!(names, want);
    assert_eq!((file.tests, passed(&file)), (16, true));
}

#[test]
fn a_fault_is_a_failure_with_its_sentences() {
    let mut r = sample::report(&[1]);
    sample::spoil(&mut r, 1, Form::Absorbed, Phase::Decode);
    r.layers[0].probes[0].outcome =
        Outcome::Broken { what: "not equal".into(), place: "attn_out 3".into(), broken: 1, elements: 5 };
    let file = read(&r);
    assert_eq!((file.failures, file.errors, file.tests), (2, 0, 8));
    let case =
        |name: &str| file.test_suites.iter().flat_map(|s| &s.test_cases).find(|c| c.name.as_str() == name);
    let TestCaseStatus::NonSuccess { message, description, .. } =
        &case("layer 1 absorbed decode attn_out").unwrap().status
    else {
        panic!("no failure")
    };
    assert!(message.as_ref().unwrap().as_str().starts_with("fault: "));
    let text = description.as_ref().unwrap().as_str();
    assert!(text.contains("evidence: 100 % of elements <differ>, a: b\nsecond line"), "{text}");
    assert!(text.contains("absorbed/attn_out, decode [token, head, value] = [10, 8, 100]"), "{text}");
    assert!(matches!(case("layer 1 fused probe one-key").unwrap().status, TestCaseStatus::NonSuccess { .. }));
}

/// Of every verdict a layer may have, the file passes where the exit code is 0 and only there: with tensors that say so and without.
#[test]
fn the_file_passes_where_the_exit_code_is_0() {
    for row in TABLE {
        // A layer is never one of these as a whole.
        if matches!(row.verdict, Verdict::NotApplicable | Verdict::AfterFault) {
            continue;
        }
        for tensors in [true, false] {
            let mut r = sample::report(&[1]);
            r.layers[0].verdict = row.verdict;
            if tensors {
                r.layers[0].tensors[3].verdict = row.verdict;
            } else {
                r.layers[0].tensors.clear();
                r.layers[0].probes.clear();
            }
            sample::concluded(&mut r);
            assert_eq!(passed(&read(&r)), r.exit == 0, "{} {tensors}", row.name);
        }
    }
    assert!(!passed(&read(&sample::report(&[]))), "no layer at all");
    let mut gap = sample::report(&[1]);
    gap.gaps.push(Lack { verdict: Verdict::NotCompared, what: "no report has layer 2".into() });
    assert_eq!((read(&gap).errors, read(&gap).failures), (1, 0));
    let mut floor = sample::report(&[1]);
    floor.gaps.push(Lack { verdict: Verdict::Fault, what: "too few".into() });
    assert_eq!((read(&floor).errors, read(&floor).failures), (0, 1));
    let mut broken = sample::report(&[1]);
    broken.broken.push(Lack { verdict: Verdict::Broke, what: "the engine gave up\n  where: here".into() });
    assert_eq!(read(&broken).errors, 1);
}

#[test]
fn what_was_not_asked_is_skipped_with_the_reason() {
    let mut r = sample::report(&[1]);
    let tensors = &mut r.layers[0].tensors;
    (tensors[1].verdict, tensors[1].uncaptured) = (Verdict::NotCompared, true);
    tensors[1].note = Some("not captured; judged together with q".into());
    tensors[2].verdict = Verdict::AfterFault;
    tensors[3].verdict = Verdict::NotApplicable;
    tensors[4].verdict = Verdict::NotCompared;
    let file = read(&r);
    let reasons: Vec<String> = (file.test_suites.iter().flat_map(|s| &s.test_cases))
        .filter_map(|c| match &c.status {
            TestCaseStatus::Skipped { message, .. } => message.as_ref().map(|m| m.as_str().to_string()),
            _ => None,
        })
        .collect();
    assert_eq!(reasons.len(), 3, "{reasons:?}");
    assert!(reasons.iter().any(|r| r == "not compared: not captured; judged together with q"), "{reasons:?}");
    assert_eq!(file.errors, 1, "one was asked for and not compared");
}

#[test]
fn names_from_files_do_not_break_the_xml() {
    let mut r = sample::report(&[1]);
    r.layers[0].engine = crate::engine::Description::plain("e\u{1b}[31m\u{0}<&>\"'\u{fffe}]]>.x", "d");
    r.layers[0].tensors[1].note = Some("bell \u{7}".into());
    r.layers[0].tensors[1].verdict = Verdict::Inconclusive;
    let file = read(&r);
    let suite = file.test_suites[0].name.as_str();
    assert_eq!(suite, "layer 1, weights, e\\u{1b}[31m\\u{0}<&>\"'\\u{fffe}]]>.x bf16");
    let text = String::from_utf8(render(&r).unwrap()).unwrap();
    assert!(!text.chars().any(|c| c.is_control() && c != '\n') && !text.contains('\u{fffe}'));
}
