use super::super::sample;
use super::*;
use mla_reference::{Form, Geometry, Phase};

fn page(report: &Report) -> String {
    String::from_utf8(render(report).unwrap()).unwrap()
}

#[test]
fn nothing_is_loaded_and_nothing_runs() {
    let mut report = sample::report(&[1, 2]);
    sample::spoil(&mut report, 2, Form::Absorbed, Phase::Decode);
    report.layers[0].geometry =
        Some(Geometry { hidden: 64, heads: 8, q_rank: 32, latent: 64, rope: 16, nope: 32, value: 100 });
    report.layers[1].geometry = report.layers[0].geometry;
    let text = page(&report);
    for loaded in ["<script", "http:", "https:", "src=", "@import", "url(", "<link"] {
        assert!(!text.contains(loaded), "{loaded}");
    }
    assert!(text.contains("<svg") && text.contains("prefers-color-scheme:dark") && text.contains("viewport"));
    assert!(text.len() < 1_000_000);
}

/// What stands in a file or on the command line is text, whatever it looks like.
#[test]
fn text_is_escaped() {
    let mut report = sample::report(&[1]);
    sample::spoil(&mut report, 1, Form::Fused, Phase::Prefill);
    report.command = "mla-check run '<script>alert(1)</script>' \"&\"".into();
    report.model.files = vec!["<b>.gguf".into()];
    let text = page(&report);
    assert!(!text.contains("<script>") && !text.contains("<b>.gguf") && !text.contains("<differ>"));
    assert!(text.contains("&lt;script&gt;alert(1)&lt;/script&gt;&#39; &quot;&amp;&quot;"));
    assert!(text.contains("&lt;differ&gt;"));
    assert_eq!(escaped("a\u{1b}[31m"), "a\\u{1b}[31m");
}

/// The verdict stands in words and by a mark, not in colour alone.
#[test]
fn verdicts_are_words_and_marks() {
    let mut report = sample::report(&[1]);
    assert!(page(&report).contains("<h1><span class=\"mark\">~</span> rounding</h1>"));
    sample::spoil(&mut report, 1, Form::Fused, Phase::Prefill);
    let text = page(&report);
    assert!(text.contains("<h1><span class=\"mark\">X</span> fault</h1>"));
    assert!(text.contains("First bad, layer 1: <strong>fused/attn_out, prefill"), "{text}");
    report.deliberate_fault = Some("merge-base".into());
    assert!(page(&report).contains("DELIBERATE FAULT merge-base"));
}

/// 78 layers, each with as many tensors as a run has, stay below a megabyte; what is wrong is shown, and what is left out is said.
#[test]
fn many_layers_stay_below_a_megabyte() {
    let all: Vec<usize> = (0..78).collect();
    let mut report = sample::report(&all);
    for l in &mut report.layers {
        let some = l.tensors.clone();
        (0..9).for_each(|_| l.tensors.extend(some.clone()));
    }
    sample::spoil(&mut report, 77, Form::Fused, Phase::Prefill);
    let text = page(&report);
    assert!(text.len() < 1_000_000, "{}", text.len());
    assert!(text.contains("Not shown in full, for the size of this file: layers"));
    assert!(text.contains("<section id=\"layer-77\">"));
    // Every layer has its place in the strip; a link leads somewhere.
    assert_eq!(text.matches("<li class=").count(), 78);
    for l in 0..78 {
        let linked = text.contains(&format!("href=\"#layer-{l}\""));
        assert_eq!(linked, text.contains(&format!("<section id=\"layer-{l}\">")), "{l}");
    }
}
