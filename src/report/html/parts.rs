/*! Parts of a layer's section: the strip of layers, findings in words, what was run, tables. */

use super::{class, escaped, marked};
use crate::judge::{TABLE, Unit};
use crate::probe::Outcome;
use crate::report::finding::short;
use crate::report::{LayerReport, Report};
use mla_reference::{Form, Phase};
use std::fmt::Write;

/// Every layer in a line, with the worst share of a bound and the output's norm; those that are shown in full are linked.
pub(super) fn strip(out: &mut String, report: &Report, shown: &[usize]) {
    if report.layers.len() < 2 {
        return;
    }
    let _ = writeln!(out, "<h2>{} layers</h2>\n<ul class=\"strip\">", report.layers.len());
    for l in &report.layers {
        let s = l.summary();
        let name = format!("{} {}", l.layer, escaped(&l.verdict.row().mark.to_string()));
        let name = match shown.contains(&l.layer) {
            true => format!("<a href=\"#layer-{}\">{name}</a>", l.layer),
            false => name,
        };
        let _ = writeln!(
            out,
            "<li class=\"{}\" title=\"{}: worst {} of its bound; norm of the output {}\">{name}</li>",
            class(l.verdict),
            escaped(l.verdict.name()),
            s.worst.map_or("-".into(), short),
            s.norm.map_or("-".into(), |n| format!("{n:.4e}")),
        );
    }
    out.push_str("</ul>\n<details><summary>The same as a table</summary><div class=\"scroll\"><table>\n");
    out.push_str("<tr><th>layer</th><th class=\"l\">verdict</th><th>worst, of its bound</th><th>norm of the output</th><th>reference</th><th>seconds</th></tr>\n");
    for l in &report.layers {
        let s = l.summary();
        let norm = |n: Option<f64>| n.map_or("-".into(), |n| format!("{n:.5e}"));
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td class=\"l\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.1}</td></tr>",
            l.layer,
            marked(l.verdict),
            s.worst.map_or("-".into(), short),
            norm(s.norm),
            norm(s.reference),
            l.seconds
        );
    }
    out.push_str("</table></div></details>\n");
}

/// Numbers of the configuration that differ.
pub(super) fn scalars(out: &mut String, l: &LayerReport) {
    for s in &l.scalars {
        let _ = writeln!(
            out,
            "<p>{}: the engine has {}, the file says {}</p>",
            escaped(&s.name),
            s.engine,
            s.reference
        );
    }
}

/// Findings: a lead word and a sentence each.
pub(super) fn sentences(out: &mut String, all: &[(&str, String)]) {
    out.push_str("<dl>\n");
    for (lead, text) in all {
        let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escaped(lead), escaped(text));
    }
    out.push_str("</dl>\n");
}

/// Probes that broke.
pub(super) fn probes(out: &mut String, l: &LayerReport) {
    for p in &l.probes {
        let Outcome::Broken { what, place, broken, elements } = &p.outcome else { continue };
        let _ = writeln!(out, "<h3>broken probe: {}/{}</h3>", p.form.name(), escaped(p.name));
        let found = format!("{broken} of {elements} elements, the first at {place}");
        sentences(out, &[("what", what.clone()), ("where", found), ("look at", p.says.to_string())]);
    }
}

/// What the marks mean.
pub(super) fn legend(out: &mut String, l: &LayerReport) {
    let used = TABLE.iter().filter(|r| l.tensors.iter().any(|u| u.verdict == r.verdict));
    let all: Vec<String> = used.map(|r| marked(r.verdict)).collect();
    let _ = writeln!(out, "<p>{}</p>", all.join(" &nbsp; "));
}

/// What ran.
pub(super) fn about(out: &mut String, report: &Report, l: &LayerReport) {
    let m = &report.model;
    let c = &l.case;
    let mut all = vec![
        ("model", format!("{}, {}, convention {}", m.files.join(", "), m.architecture, report.convention)),
        ("engine", format!("{}: {}; {}", l.engine.name, l.engine.device, report.engine_choice)),
        ("contract", l.contract_text.clone()),
        (
            "batch",
            format!(
                "{} in {}, contexts {}; page size {}, {} splits in decode, seed {}, hidden states {}",
                c.batch,
                c.dtype,
                c.regimes.join(" and "),
                c.page_size,
                c.splits,
                c.seed,
                c.hidden
            ),
        ),
    ];
    all.extend(m.warnings.iter().map(|w| ("warning", w.clone())));
    all.extend(l.notes.iter().chain(&c.notes).map(|n| ("note", n.clone())));
    all.extend(l.odd.iter().map(|o| ("odd", o.clone())));
    all.extend(c.ways());
    sentences(out, &all);
}

fn share(n: u64, of: u64) -> String {
    if of == 0 { "-".into() } else { format!("{} %", short(100.0 * n as f64 / of as f64)) }
}

fn group(u: &Unit) -> String {
    format!("{} {}", u.form.map_or("", Form::name), u.phase.map_or("", Phase::name))
}

/// Every tensor.
pub(super) fn tensors(out: &mut String, l: &LayerReport) {
    let _ = writeln!(
        out,
        "<details open><summary>{} tensors and phases</summary><div class=\"scroll\"><table>",
        l.tensors.len()
    );
    out.push_str("<tr><th>tensor</th><th class=\"l\">form, phase</th><th class=\"l\">verdict</th><th>flips</th><th>beyond</th><th>worst, of its bound</th><th>norm</th><th>reference</th><th class=\"l\">note</th></tr>\n");
    for u in &l.tensors {
        let norm = |d: Option<crate::judge::Digest>| d.map_or("-".into(), |d| format!("{:.5e}", d.norm));
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td class=\"l\">{}</td><td class=\"l\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td class=\"l\">{}</td></tr>",
            escaped(u.tensor),
            group(u),
            marked(u.verdict),
            share(u.flips, u.elements),
            u.beyond,
            u.worst.as_ref().map_or("-".into(), |w| short(w.share_of_bound)),
            norm(u.engine),
            norm(u.reference),
            escaped(u.note.as_deref().unwrap_or_default()),
        );
    }
    out.push_str("</table></div></details>\n");
}

/// The smallest faults that would have been seen.
pub(super) fn power(out: &mut String, l: &LayerReport) {
    let units: Vec<(&Unit, &crate::judge::Power)> =
        l.tensors.iter().filter_map(|u| Some((u, u.power.as_ref()?))).collect();
    if units.is_empty() {
        return;
    }
    out.push_str("<details><summary>What would have been seen: the smallest change of each kind</summary><div class=\"scroll\"><table>\n<tr><th>tensor</th><th class=\"l\">form, phase</th><th>gain</th><th>head's gain</th><th>softmax scale</th><th>rope part</th><th>eps</th><th>a row</th><th>an element (rms)</th><th>lost keys</th></tr>\n");
    let size = |v: Option<f64>| v.map_or("-".into(), |v| format!("{v:.1e}"));
    for (u, p) in units {
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td class=\"l\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escaped(u.tensor),
            group(u),
            size(p.gain),
            size(p.head_gain),
            size(p.scale.filter(|_| p.scale_applies)),
            size(p.rope_weight),
            size(p.eps),
            size(p.row),
            size(p.element),
            p.lost_key.map_or("-".into(), |s| format!("{} %", short(100.0 * s))),
        );
    }
    out.push_str("</table></div></details>\n");
}
