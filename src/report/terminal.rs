/*!
The report for people: verdict first, then what is bad and where, then every tensor, then what was not
looked at.

Everything fits the given width (80 columns at least); columns that do not fit are left out, never wrapped.
Colours are ANSI sequences that the writer strips where they are not wanted; no meaning is in colour alone.
*/

use super::finding::{self, short};
use super::{LayerReport, Report, blocks, markdown};
use crate::judge::{Digest, Unit, Verdict, Which};
use mla_reference::{Form, Phase};
use std::fmt::Write;

/// The whole report.
pub fn render(report: &Report, width: usize) -> String {
    let mut out = String::new();
    for layer in &report.layers {
        layer_report(&mut out, report, layer, width.max(80));
    }
    not_judged(&mut out, report, width.max(80));
    out
}

/// The verdict line alone, one a layer.
pub fn verdict_lines(report: &Report) -> String {
    report.layers.iter().map(|l| verdict_line(report, l) + "\n").collect()
}

pub(super) fn paint(v: Verdict, text: &str) -> String {
    match v.row().colour {
        Some(c) => {
            let style = c.on_default().effects(anstyle::Effects::BOLD);
            format!("{style}{text}{style:#}")
        }
        None => text.to_string(),
    }
}

/// Whether anything was held against the reference (engine `reference` only shows digests).
fn compared(l: &LayerReport) -> bool {
    l.tensors.iter().any(|u| u.elements > 0)
}

fn verdict_line(report: &Report, l: &LayerReport) -> String {
    let mut line = String::new();
    if let Some(f) = &report.deliberate_fault {
        line += &format!("{}\n", paint(Verdict::Fault, &format!("DELIBERATE FAULT {f}")));
    }
    let verdict = match (l.verdict, l.forms_agree) {
        (_, Some(d)) => format!("fused and absorbed agree to {d:.1e} of the largest value"),
        (Verdict::Rounding | Verdict::Exact, None) if report.deliberate_fault.is_some() => {
            format!("{}: the deliberate fault was not seen", l.verdict)
        }
        (Verdict::Rounding | Verdict::Exact, None) => format!("{}{}", l.verdict, seen(l)),
        (Verdict::NotCompared, None) if compared(l) => "no verdict: not all could be compared".into(),
        (Verdict::NotCompared, None) => "no verdict: nothing was compared".into(),
        (v, None) => v.to_string(),
    };
    line += &format!(
        "engine {}, layer {} of {}, weights as stored{}: {}",
        l.engine.name,
        l.layer,
        report.model.layers,
        l.judged.as_ref().map_or(String::new(), |j| format!(", contract {}", j.by)),
        paint(l.verdict, &verdict)
    );
    line
}

/// What would have been seen, for the verdict line.
fn seen(l: &LayerReport) -> String {
    match finding::seen(l) {
        (Some(gain), Some(scale)) => {
            format!("; a gain of {gain:.0e} or a scale of {scale:.0e} would have been seen")
        }
        (Some(gain), None) => format!("; a gain of {gain:.0e} would have been seen"),
        _ => String::new(),
    }
}

fn layer_report(out: &mut String, report: &Report, l: &LayerReport, width: usize) {
    let _ = writeln!(out, "{}", verdict_line(report, l));
    if !l.scalars.is_empty() {
        for s in &l.scalars {
            let _ = writeln!(out, "  {}: the engine has {}, the file says {}", s.name, s.engine, s.reference);
        }
        let _ = writeln!(out, "  no tensor was compared: both sides must compute the same thing first\n");
        return;
    }
    if compared(l) {
        out.push('\n');
        picture(out, l, width);
    }
    let bad = finding::bad(l);
    for (i, u) in bad.iter().enumerate().take(4) {
        out.push('\n');
        evidence(out, l, u, i, width);
    }
    if bad.len() > 4 {
        let names: Vec<String> = bad[4..].iter().map(|u| u.title()).collect();
        wrapped(
            out,
            "",
            &format!("and {} more with evidence of their own: {}", bad.len() - 4, names.join("; ")),
            width,
        );
    }
    blocks::broken_probes(out, l, width);
    out.push('\n');
    let m = &report.model;
    let files = match m.files.as_slice() {
        [one] => one.clone(),
        [first, rest @ ..] => format!("{first} and {} more", rest.len()),
        [] => String::new(),
    };
    wrapped(
        out,
        "model     ",
        &format!("{files}, {}, convention {}", m.architecture, report.convention),
        width,
    );
    wrapped(out, "engine    ", &format!("{}; {}", l.engine.device, report.engine_choice), width);
    wrapped(out, "contract  ", &l.contract_text, width);
    let c = &l.case;
    let pages = format!(
        "page size {}, {} splits in decode, seed {}, hidden states {}",
        c.page_size, c.splits, c.seed, c.hidden
    );
    wrapped(
        out,
        "batch     ",
        &format!("{} in {}, contexts {}; {pages}", c.batch, c.dtype, c.regimes.join(" and ")),
        width,
    );
    for n in &c.notes {
        wrapped(out, "          ", n, width);
    }
    if c.regimes.len() > 1 {
        wrapped(
            out,
            "          ",
            "requests without context are the same in both regimes and run once",
            width,
        );
    }
    blocks::probes(out, l, width);
    out.push('\n');
    table(out, l, width);
    blocks::gates(out, l, width);
    blocks::cumulative(out, l, width);
    for o in &l.odd {
        wrapped(out, "odd: ", o, width);
    }
    let broken = bad.iter().any(|u| u.verdict != Verdict::ContractDiffers);
    if broken && norms_agree(&bad) {
        out.push('\n');
        wrapped(
            out,
            "",
            "Norms of engine and reference agree to 1 % in every tensor at fault: norms can't see this fault.",
            width,
        );
    }
    let _ = writeln!(out, "\n{:.1} s\n", l.seconds);
    if broken {
        paste(out, report, l);
    }
}

/// One line a group: each tensor with the mark of its verdict.
fn picture(out: &mut String, l: &LayerReport, width: usize) {
    let group = |u: &Unit| match (u.which, u.form) {
        (Which::Weight(_), _) => "weights   ",
        (_, None) => "shared    ",
        (_, Some(Form::Fused)) => "fused     ",
        (_, Some(Form::Absorbed)) => "absorbed  ",
    };
    for name in ["weights   ", "shared    ", "fused     ", "absorbed  "] {
        let mut marks: Vec<(&str, Verdict)> = Vec::new();
        for u in l.tensors.iter().filter(|u| group(u) == name) {
            match marks.last_mut() {
                Some((t, v)) if *t == u.tensor => *v = (*v).max(u.verdict),
                _ => marks.push((u.tensor, u.verdict)),
            }
        }
        let mut line = name.to_string();
        let mut used = name.len();
        for (t, v) in marks {
            let cell = t.len() + 3;
            if used + cell > width {
                line = format!("{}\n{}", line.trim_end(), " ".repeat(name.len()));
                used = name.len();
            }
            line += &format!("{t} {} ", paint(v, &v.row().mark.to_string()));
            used += cell;
        }
        if used > name.len() {
            let _ = writeln!(out, "{}", line.trim_end());
        }
    }
    let used = |v: Verdict| l.tensors.iter().any(|u| u.verdict == v);
    let legend: Vec<String> = crate::judge::TABLE
        .iter()
        .filter(|r| used(r.verdict))
        .map(|r| format!("{} {}", r.mark, r.name))
        .collect();
    let _ = writeln!(out, "          ({})", legend.join(", "));
}

/// What is bad about one unit, where and how much.
fn evidence(out: &mut String, l: &LayerReport, u: &Unit, nth: usize, width: usize) {
    let word = match (u.verdict, nth) {
        (Verdict::ContractDiffers, _) => u.verdict.name(),
        (_, 0) => "first bad",
        _ => "also bad",
    };
    let _ = writeln!(out, "{}", paint(u.verdict, &format!("{word}: {}", finding::title(u))));
    for (lead, text) in finding::sentences(l, u) {
        wrapped(out, &format!("  {lead:<12}"), &text, width);
    }
}

/// The block to paste, after all findings.
fn paste(out: &mut String, report: &Report, l: &LayerReport) {
    let _ = writeln!(out, "To paste into an issue:\n");
    for line in markdown::issue(report, l).lines() {
        let _ = writeln!(out, "    {line}");
    }
    out.push('\n');
}

/// Rows of the table: phases of a tensor together, unless one of them is at fault.
fn rows(units: &[Unit]) -> Vec<(Vec<&Unit>, String)> {
    let mut rows: Vec<(Vec<&Unit>, String)> = Vec::new();
    for u in units {
        let phase = u.phase.map_or("", Phase::name);
        match rows.last_mut() {
            Some((all, p))
                if all[0].which == u.which
                    && u.verdict != Verdict::Fault
                    && all[0].verdict != Verdict::Fault =>
            {
                all.push(u);
                *p = "both".into();
            }
            _ => rows.push((vec![u], phase.to_string())),
        }
    }
    rows
}

fn table(out: &mut String, l: &LayerReport, width: usize) {
    let all_weights_exact =
        l.tensors.iter().filter(|u| matches!(u.which, Which::Weight(_))).all(|u| u.verdict == Verdict::Exact);
    let digests_only = !compared(l);
    let (axes, checks) = (width >= 116, width >= 136);
    // Norms to five digits where there is room, to three where there is not.
    let digits = if width >= 90 { 12 } else { 9 };
    let head = |name: &str, phase: &str, axes_text: &str, rest: &str| {
        let mut line = format!("{name:<12} {phase:<8}");
        if axes {
            line += &format!("{axes_text:<25}");
        }
        line + rest
    };
    let mut titles = if digests_only {
        format!("{:>12}", "norm")
    } else {
        let norms = format!("{:>digits$}{:>digits$}", "norm", "ref norm");
        format!("{:<13}{:>6}{:>8}{:>7}{:>7}{norms}", "verdict", "ulps", "bound", "flips", "sees")
    };
    if checks {
        titles += &format!("{:>12}{:>12}", "checksum", if digests_only { "" } else { "reference" });
    }
    let _ = writeln!(out, "{}", head("tensor", "phase", "axes", &titles).trim_end());
    let mut group = None;
    for (units, phase) in rows(&l.tensors) {
        let u = units[0];
        if matches!(u.which, Which::Weight(_)) && all_weights_exact {
            if group.is_none() {
                let n = l.tensors.iter().filter(|u| matches!(u.which, Which::Weight(_))).count();
                let _ = writeln!(out, "{n} weights: {}, bit for bit", paint(Verdict::Exact, "exact"));
                group = Some(u.form);
            }
            continue;
        }
        if group != Some(u.form) && u.form.is_some() {
            let _ = writeln!(out, "{}:", u.form.map_or("", Form::name));
        }
        group = Some(u.form);
        let verdict = units.iter().map(|u| u.verdict).max().unwrap_or(Verdict::NotCompared);
        let worst = units
            .iter()
            .filter_map(|u| u.worst.as_ref())
            .max_by(|a, b| a.share_of_bound.total_cmp(&b.share_of_bound));
        let flips: u64 = units.iter().map(|u| u.flips).sum();
        let elements: u64 = units.iter().map(|u| u.elements).sum();
        let share = if elements == 0 {
            "-".into()
        } else if flips == 0 {
            "0".into()
        } else {
            format!("{:.0e}", flips as f64 / elements as f64)
        };
        let (engine, reference) = (total(&units, |u| u.engine), total(&units, |u| u.reference));
        let digest = |d: Option<Digest>, f: fn(Digest) -> f64| {
            d.map_or("-".into(), |d| format!("{:.*e}", if digits == 12 { 5 } else { 3 }, f(d)))
        };
        let mut rest = String::new();
        if digests_only {
            rest += &format!("{:>12}", digest(reference, |d| d.norm));
        } else {
            let pad = " ".repeat(13usize.saturating_sub(verdict.name().len()));
            rest += &(paint(verdict, verdict.name()) + &pad);
            rest += &format!(
                "{:>6}{:>8}{share:>7}{:>7}{:>digits$}{:>digits$}",
                worst.map_or("-".into(), |w| short(w.ulps)),
                worst.map_or("-".into(), |w| short(w.share_of_bound)),
                sees(&units),
                digest(engine, |d| d.norm),
                digest(reference, |d| d.norm)
            );
        }
        if checks {
            let of_engine = if digests_only { reference } else { engine };
            rest += &format!("{:>12}", digest(of_engine, |d| d.checksum));
            if !digests_only {
                rest += &format!("{:>12}", digest(reference, |d| d.checksum));
            }
        }
        let axes_text: Vec<&str> = u.axes.iter().map(|a| a.name()).collect();
        let _ = writeln!(out, "{}", head(u.tensor, &phase, &axes_text.join(", "), &rest).trim_end());
        for u in units.iter().filter(|u| u.verdict != Verdict::Fault) {
            if let Some(n) = u.note.as_deref().filter(|n| !n.is_empty()) {
                wrapped(out, "             ", n, width);
                break;
            }
        }
    }
    if !digests_only {
        let legend = "worst error in units of the output's last place; bound: as a share of what rounding allows; \
                      flips: share of elements that are not the rounded reference; sees: smallest gain (in attention \
                      also softmax scale) that would have been a fault; norms are shown, never judged";
        wrapped(out, "ulps: ", legend, width);
    }
}

/// The smallest gain, or scale where that is larger, that would have been seen in all phases.
fn sees(units: &[&Unit]) -> String {
    let of = |u: &Unit| {
        let p = u.power.as_ref()?;
        let scale = if p.scale_applies { p.scale } else { Some(0.0) };
        Some(p.gain?.max(scale?))
    };
    let compared: Vec<&&Unit> = units.iter().filter(|u| u.power.is_some()).collect();
    let all: Option<Vec<f64>> = compared.iter().map(|u| of(u)).collect();
    match all.and_then(|v| v.into_iter().reduce(f64::max)) {
        Some(v) => format!("{v:.0e}"),
        None if compared.is_empty() => "-".into(),
        None => "none".into(),
    }
}

/// Norm and checksum of several phases together.
fn total(units: &[&Unit], of: impl Fn(&Unit) -> Option<Digest>) -> Option<Digest> {
    let all: Vec<Digest> = units.iter().filter_map(|u| of(u)).collect();
    (!all.is_empty()).then(|| Digest {
        norm: all.iter().map(|d| d.norm * d.norm).sum::<f64>().sqrt(),
        checksum: all.iter().map(|d| d.checksum).sum(),
    })
}

fn norms_agree(units: &[&Unit]) -> bool {
    units.iter().all(|u| match (u.engine, u.reference) {
        (Some(a), Some(b)) => (a.norm - b.norm).abs() <= 0.01 * b.norm,
        _ => false,
    })
}

fn not_judged(out: &mut String, report: &Report, width: usize) {
    let _ = writeln!(out, "Not judged:");
    for n in &report.not_judged {
        wrapped(out, "  - ", n, width);
    }
    let _ = writeln!(out, "Repeat with:\n  {}", report.command);
}

/// Writes a paragraph with a hanging indent.
pub(super) fn wrapped(out: &mut String, lead: &str, text: &str, width: usize) {
    let indent = " ".repeat(lead.chars().count());
    let mut line = lead.to_string();
    let mut used = line.chars().count();
    for (i, word) in text.split(' ').enumerate() {
        let n = word.chars().count();
        if i > 0 && used + 1 + n > width {
            let _ = writeln!(out, "{}", line.trim_end());
            line = indent.clone();
            used = indent.len();
        } else if i > 0 {
            line.push(' ');
            used += 1;
        }
        line += word;
        used += n;
    }
    let _ = writeln!(out, "{}", line.trim_end());
}
