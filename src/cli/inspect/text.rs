/*! What `inspect` says in a terminal. */

use super::super::text::{escape, short, size, wrap};
use super::{Report, TensorReport, WeightReport, count, data};
use crate::model::lint::{Finding, Severity};
use crate::model::list;
use anstyle::{AnsiColor, Style};

pub(super) fn paint(colour: AnsiColor, text: &str) -> String {
    let style = Style::new().fg_color(Some(colour.into())).bold();
    format!("{style}{text}{style:#}")
}

pub(super) fn plural(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

pub(super) fn verdict(r: &Report) -> String {
    let (defects, warnings) = (count(r, Severity::Defect), count(r, Severity::Warning));
    let warned = if warnings > 0 { format!(", {}", plural(warnings, "warning")) } else { String::new() };
    if defects > 0 {
        let what = format!(
            "{} that break{} attention",
            plural(defects, "defect"),
            if defects == 1 { "s" } else { "" }
        );
        format!("{}{warned}\n", paint(AnsiColor::Red, &what))
    } else {
        let what = if r.data.is_some() { "headers and values are sound" } else { "headers are sound" };
        format!("{}{warned}\n", paint(AnsiColor::Green, what))
    }
}

pub(super) fn text(r: &Report, width: usize) -> String {
    let mut out = String::new();
    let mut line = |label: &str, text: &str| {
        out += &wrap(&format!("{label:<13}{}", escape(text)), width, 13);
        out.push('\n');
    };
    if let [first, rest @ ..] = r.files.as_slice() {
        let more =
            if rest.is_empty() { String::new() } else { format!(" and {}", plural(rest.len(), "more part")) };
        line("file", &format!("{}{more}", first.path));
    }
    line("size", &format!("{}, {}", size(r.bytes), plural(r.tensor_count, "tensor")));
    if let Some(name) = &r.name {
        line("name", name);
    }
    line("architecture", &format!("{} ({})", r.architecture, r.models));
    let g = &r.geometry;
    let queries =
        if g.q_rank > 0 { format!("query rank {}", g.q_rank) } else { "queries without a rank".into() };
    line(
        "geometry",
        &format!(
            "hidden {}, {}, {queries}, latent {}; a head has {} + {} rope columns of key, {} of value",
            g.hidden,
            plural(g.heads, "head"),
            g.latent,
            g.nope,
            g.rope,
            g.value
        ),
    );
    let missing = r.layers - r.mla_layers.len().min(r.layers);
    let mla = match missing {
        0 => format!("{}, all with MLA attention", r.layers),
        _ => format!("{}, MLA attention in {}", r.layers, list(&r.mla_layers)),
    };
    let mtp = match r.mtp_layers.as_slice() {
        [] => String::new(),
        some => format!("; for multi-token prediction: {}", list(some)),
    };
    line("layers", &(mla + &mtp));
    let context = r.context_length.map_or(String::new(), |n| format!("; made for {n} positions"));
    let rope = match &r.yarn {
        _ if !r.rotates => "none: rope columns are used as they are".to_string(),
        None => format!("base {}, no scaling", short(r.rope_theta)),
        Some(y) => format!(
            "base {}, YaRN factor {} over {}, betas {} and {}, {}",
            short(r.rope_theta),
            short(y.factor),
            y.original_context,
            short(y.beta_fast),
            short(y.beta_slow),
            y.log_multiplier.map_or("no multiplier".into(), |m| format!("multiplier {}", short(m)))
        ),
    };
    line("rope", &(rope + &context));
    if let Some(f) = &r.rope_factors {
        line("", &f.text);
    }
    if let Some(k) = r.top_k {
        line("indexer", &format!("keeps {k} keys: requests up to that length are dense attention"));
    }
    let types: Vec<String> = r.attention_types.iter().map(|(t, n)| format!("{n} {t}")).collect();
    line("weights", &format!("{} (attention, norms left out)", types.join(", ")));
    line("conventions", "eps of attn_norm, of q_a and kv_a norms, softmax scale, factor on cos and sin");
    for c in &r.conventions {
        let values = [c.eps_attn, c.eps_latent, c.scale, c.rope_magnitude].map(short);
        line("", &format!("{:<10} {:<9} {:<9} {:<9} {}", c.name, values[0], values[1], values[2], values[3]));
    }
    for l in &r.weights {
        out += &format!(
            "\nlayer {}: role, tensor, type, dims (fastest first), part @ offset; in checkpoints\n",
            l.layer
        );
        l.weights.iter().for_each(|w| weight(&mut out, w, width));
    }
    if let Some(survey) = &r.data {
        out += &data::text(survey, width);
    }
    if let Some(tensors) = &r.tensors {
        out += "\nall tensors: name, type, dims (fastest first), part @ offset\n";
        tensors.iter().for_each(|t| tensor(&mut out, "", t, width));
    }
    out += &findings(&r.findings, width);
    out + "\n" + &wrap(&format!("not looked at: {}", r.not_looked_at), width, 2) + "\n"
}

/// The findings, a paragraph each; nothing where there are none.
pub(super) fn findings(all: &[Finding], width: usize) -> String {
    let mut out = String::new();
    if !all.is_empty() {
        out += "\nfindings\n";
    }
    for f in all {
        let (colour, name) = match f.severity {
            Severity::Defect => (AnsiColor::Red, "defect"),
            Severity::Warning => (AnsiColor::Yellow, "warning"),
            Severity::Note => (AnsiColor::Cyan, "note"),
        };
        let text = wrap(&format!("  {name:<8} {} ({})", escape(&f.what), escape(&f.place)), width, 11);
        out += &text.replacen(name, &paint(colour, name), 1);
        out.push('\n');
    }
    out
}

fn weight(out: &mut String, w: &WeightReport, width: usize) {
    match &w.tensor {
        Some(t) => tensor(out, w.role.name(), t, width),
        None => *out += &format!("  {:<8}{}\n", w.role, paint(AnsiColor::Red, "missing")),
    }
    *out += &wrap(&format!("  {:<8}{}", "", w.hf), width, 10);
    out.push('\n');
}

fn tensor(out: &mut String, role: &str, t: &TensorReport, width: usize) {
    let dims = t.dims.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ");
    let place = format!("{} @ {}", t.part, t.offset);
    let role = if role.is_empty() { "  ".into() } else { format!("  {role:<8}") };
    let name = escape(&t.name);
    let text = format!("{role}{name:<30} {:<7} {dims:<15} {place}", t.ty);
    *out += &wrap(&text, width, 10);
    out.push('\n');
}
