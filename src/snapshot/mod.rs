/*!
Snapshots: what a layer and a form of a model gave, as a small text that people review as a diff.

A snapshot holds what a change of reference, judge or kernel may change and a reviewer must see: shapes, dtypes,
contract, verdict and cause of every tensor, and [digests](Digest) of the float64 reference computed from the start of
the layer. No figure depends on an engine's bits (an isolated reference does, so its digests are not here), and there
are no times, paths or names of machines: the same file and the same case give the same text wherever they run.

Files have the form that the crate insta gives its own, so `cargo insta review` works on them ([`mod@file`]).
*/

mod diff;
pub mod digest;
pub mod file;

pub use digest::{Digest, Digests};
pub use file::{Kept, State, Update};

use crate::judge::{Diagnosis, Explained, Unit};
use crate::probe::Outcome;
use crate::report::LayerReport;
use crate::trace::TensorId;
use mla_reference::{Axis, Form};
use std::fmt::Write;

/// Of a run, what all its layers share.
#[derive(Clone, Debug)]
pub struct Head {
    /// [`stem`] of the model's file.
    pub model: String,
    /// general.architecture
    pub architecture: &'static str,
    /// The convention by which the file's numbers were read.
    pub convention: &'static str,
    /// eps of the q_a and kv_a norms, where it was given.
    pub norm_eps: Option<f64>,
    /// Positions of the session, where they were given.
    pub n_ctx: Option<u64>,
    /// The fault that was planted, if one was.
    pub fault: Option<String>,
}

/// A model's name in snapshots: its file's, without `.gguf` and without which part it is of how many, so that all parts
/// of a split file are the same model; of a checkpoint, its folder's.
pub fn stem(file: &str) -> String {
    let file = match file.rsplit_once(['/', '\\']) {
        Some((folder, name)) if name.ends_with(".safetensors") => folder,
        _ => file,
    };
    let name = file.rsplit(['/', '\\']).next().unwrap_or(file);
    let name = name.strip_suffix(".gguf").unwrap_or(name);
    let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    let whole = name.rsplit_once("-of-").filter(|(_, n)| digits(n)).and_then(|(rest, _)| {
        let (stem, part) = rest.rsplit_once('-')?;
        digits(part).then_some(stem)
    });
    whole.unwrap_or(name).to_string()
}

/// Name of the file that holds a layer and form: `MODEL-layerN-FORM[-routed]-ENGINE.snap`.
pub fn file_name(head: &Head, layer: &LayerReport, form: Form) -> String {
    let routed = if layer.case.routed.is_some() { "-routed" } else { "" };
    format!("{}-layer{}-{}{routed}-{}.snap", head.model, layer.layer, form.name(), layer.engine.name)
}

/// The snapshot of one form of a layer.
pub fn text(head: &Head, layer: &LayerReport, form: Form) -> String {
    let mut out = String::new();
    let c = &layer.case;
    let _ = writeln!(out, "model       {}, {}", head.model, head.architecture);
    let _ = writeln!(out, "layer       {}, form {}", layer.layer, form.name());
    if let Some(f) = &head.fault {
        let _ = writeln!(out, "fault       {f} (deliberate)");
    }
    let _ = writeln!(out, "engine      {}", layer.engine.name);
    let _ = writeln!(out, "contract    {}", layer.contract);
    if let Some(j) = &layer.judged {
        let _ = writeln!(out, "judged by   {}", j.contract);
    }
    let _ = writeln!(out, "batch       {} in {}, contexts {}", c.batch, c.dtype, c.regimes.join(" and "));
    let _ = writeln!(
        out,
        "case        seed {}, page size {}, splits {}, hidden states {}",
        c.seed, c.page_size, c.splits, c.hidden
    );
    for (label, text) in c.ways() {
        let _ = writeln!(out, "{label:<11} {text}");
    }
    let eps = head.norm_eps.map_or(String::new(), |e| format!(", eps {e:e}"));
    let n_ctx = head.n_ctx.map_or(String::new(), |n| format!(", a session of {n} positions"));
    let _ = writeln!(out, "convention  {}{eps}{n_ctx}", head.convention);
    for s in &layer.scalars {
        let _ = writeln!(
            out,
            "scalar      {}: the engine has {}, the file says {}",
            s.name, s.engine, s.reference
        );
    }

    let _ = writeln!(out, "\ntensor       phase    dtype verdict             axes");
    for u in layer.tensors.iter().filter(|u| u.form.is_none_or(|f| f == form)) {
        let _ = writeln!(out, "{}", verdict(u));
    }
    for p in layer.probes.iter().filter(|p| p.form == form) {
        let outcome = match p.outcome {
            Outcome::Held { .. } => "held",
            Outcome::Broken { .. } => "broken",
            Outcome::NotApplicable { .. } => "not applicable",
        };
        let _ = writeln!(out, "probe {}: {outcome}", p.name);
    }

    let _ = writeln!(out, "\nfloat64 reference, from the start of the layer");
    for (id, d) in layer.reference.iter().filter(|(id, _)| id.form.is_none_or(|f| f == form)) {
        let _ = writeln!(out, "{}", reference(*id, d));
    }
    out
}

/// Axes with their lengths: `token 10, head 4`.
fn shape(axes: &[Axis], lengths: &[usize]) -> String {
    let all: Vec<String> = axes.iter().zip(lengths).map(|(a, n)| format!("{} {n}", a.name())).collect();
    all.join(", ")
}

fn verdict(u: &Unit) -> String {
    let mut line = format!(
        "{:<12} {:<8} {:<5} {:<19} {}",
        u.tensor,
        u.phase.map_or("", |p| p.name()),
        u.dtype.map_or("", |d| d.name()),
        u.verdict,
        shape(&u.axes, &u.shape)
    );
    if let Some(why) = cause(u) {
        let _ = write!(line, ": {why}");
    }
    line.trim_end().to_string()
}

/// Why a tensor is what it is, without any figure that was measured on an engine's bits.
fn cause(u: &Unit) -> Option<String> {
    match (&u.explained, &u.diagnosis) {
        (Some(Explained::Contract(what)), _) => Some(format!("contract {what}")),
        (Some(Explained::Convention(what)), _) => Some(format!("convention {what}")),
        (None, Some(Diagnosis::Cause(c))) => {
            let fitted = c.effect.map(|(value, _)| format!(" × {value:.6}"));
            let name = fitted.and_then(|f| c.name.strip_suffix(f.as_str())).unwrap_or(&c.name);
            // A family of one is not named twice.
            Some(if name.starts_with(c.family) { name.to_string() } else { format!("{}: {name}", c.family) })
        }
        (None, Some(Diagnosis::Unexplained { .. })) => Some("unexplained".into()),
        (None, None) => None,
    }
}

fn reference(id: TensorId, d: &Digest) -> String {
    format!("{:<12} {}  {}", id.stage.name(), shape(&d.axes, &d.shape), d)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_model_are_one_model() {
        for (file, expected) in [
            ("a/b/m.Q4_K_M-00002-of-00003.gguf", "m.Q4_K_M"),
            ("m.Q4_K_M.gguf", "m.Q4_K_M"),
            ("a/dsv3.fp8/model-00001-of-00002.safetensors", "dsv3.fp8"),
            ("/x/m-1-of-3.gguf", "m-1-of-3"),
            ("best-of-00003.gguf", "best-of-00003"),
            ("m", "m"),
        ] {
            assert_eq!(stem(file), expected);
        }
    }
}
