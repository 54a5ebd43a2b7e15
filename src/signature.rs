/*!
Signatures: what one fault looks like, so that a bisection finds *its* commit and skips those with another one.

A signature is written by a run that fails ([`Signature::of`]) and held against later runs of the same case
([`Signature::compare`]). Two runs have the same fault where one tensor, in one form and phase of one layer, is wrong in
both in the same way: the residuals point the same way ([`sketch`]), or both have the same cause, or, where there are no
values to compare, the same is said of it. Figures never decide: another commit may round otherwise. A break of the engine is the same
where its first line is, numbers aside.

What differs in the case (model, batch, seed …) makes the comparison worthless, and is refused.
*/

use crate::check::Options;
use crate::judge::sketch::{self, ALIKE};
use crate::judge::{Diagnosis, Unit, Verdict};
use crate::model::Model;
use crate::report::{Report, SignatureReport};
use crate::trace::npy;
use mla_reference::{Form, Phase};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Name and version of the file's form.
pub const SCHEMA: &str = "mla-check.signature/1";

/// A fault as it was recorded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Signature {
    schema: String,
    /// Version of the program that recorded it.
    version: String,
    /// What was run.
    case: Setup,
    /// What carried evidence of its own, in the order of judgement.
    faults: Vec<Mark>,
    /// What an engine said that broke.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    broke: Option<String>,
}

/// What must be the same for two runs to be comparable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    engine: String,
    architecture: String,
    /// Sizes of the model's files.
    bytes: Vec<u64>,
    layers: Vec<usize>,
    forms: Vec<Form>,
    batch: String,
    regimes: Vec<String>,
    dtype: String,
    seed: u64,
    page_size: usize,
    #[serde(default)]
    route: Option<usize>,
    #[serde(default)]
    context_chunk: Option<usize>,
    hidden: String,
    convention: String,
    contract: String,
}

/// One thing that was wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mark {
    kind: Kind,
    layer: usize,
    /// Tensor, probe, scalar or variant.
    name: String,
    form: Option<Form>,
    phase: Option<Phase>,
    /// The cause that was named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cause: Option<String>,
    /// What is said of it first, numbers aside.
    says: String,
    /// Direction of the residual.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    residual: Vec<i16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Tensor,
    Probe,
    Scalar,
    Variant,
}

impl Setup {
    /// Of a run.
    pub fn of(model: &Model, options: &Options, layers: &[usize]) -> Setup {
        Setup {
            engine: options.engine.name().into(),
            architecture: model.arch.name.into(),
            bytes: model.source().files().into_iter().map(|f| f.1).collect(),
            layers: layers.to_vec(),
            forms: options.forms.clone(),
            batch: options.batch.to_string(),
            regimes: options.regimes.iter().map(|r| r.name().to_string()).collect(),
            dtype: options.dtype.name().into(),
            seed: options.seed,
            page_size: options.page_size,
            route: options.route,
            context_chunk: options.context_chunk,
            hidden: if options.hidden.is_some() { "given" } else { "drawn" }.into(),
            convention: options.reading.convention.name().into(),
            contract: options.contract.to_string(),
        }
    }

    /// In what another one differs: name, here, there.
    fn differences(&self, other: &Setup) -> Vec<String> {
        let fields = |s: &Setup| match serde_json::to_value(s) {
            Ok(serde_json::Value::Object(fields)) => fields,
            _ => serde_json::Map::new(),
        };
        let (here, there) = (fields(self), fields(other));
        let unlike = here.iter().filter(|(name, value)| there.get(*name) != Some(*value));
        unlike
            .map(|(name, value)| format!("{name} is {value}, was {}", there.get(name).unwrap_or_default()))
            .collect()
    }
}

/// Digits are what differs between commits: `512 of 4096 bytes` is `# of # bytes`.
fn without_numbers(text: &str) -> String {
    let mut out = String::new();
    for c in text.lines().next().unwrap_or_default().chars() {
        match c {
            '0'..='9' if out.ends_with('#') => {}
            '0'..='9' => out.push('#'),
            c => out.push(c),
        }
    }
    out
}

impl Mark {
    fn of_unit(layer: usize, u: &Unit) -> Mark {
        let cause = match &u.diagnosis {
            Some(Diagnosis::Cause(c)) => Some(c.text.clone()),
            _ => None,
        };
        let says = u.evidence.first().or(u.note.as_ref()).map(|t| without_numbers(t)).unwrap_or_default();
        let name = u.tensor.to_string();
        let residual = u.residual.clone();
        Mark { kind: Kind::Tensor, layer, name, form: u.form, phase: u.phase, cause, says, residual }
    }

    fn plain(kind: Kind, layer: usize, name: &str, form: Option<Form>) -> Mark {
        let (says, residual) = (String::new(), Vec::new());
        Mark { kind, layer, name: name.into(), form, phase: None, cause: None, says, residual }
    }

    /// Why two are the same fault; None where they are not.
    fn same(&self, other: &Mark) -> Option<String> {
        let place = |m: &Mark| (m.kind, m.layer, m.name.clone(), m.form, m.phase);
        if place(self) != place(other) {
            return None;
        }
        if let Some(c) = sketch::cosine(&self.residual, &other.residual).filter(|c| *c >= ALIKE) {
            return Some(format!("off in the same direction, cosine {c:.2}"));
        }
        if self.cause.is_some() && self.cause == other.cause {
            return Some("the same cause".into());
        }
        let nothing = self.residual.is_empty() && other.residual.is_empty();
        (nothing && self.says == other.says).then(|| match self.says.as_str() {
            "" => "the same break".into(),
            says => format!("of both it is said: {says}"),
        })
    }

    fn title(&self) -> String {
        let form = self.form.map_or(String::new(), |f| format!("{}/", f.name()));
        let phase = self.phase.map_or(String::new(), |p| format!(", {}", p.name()));
        let kind = match self.kind {
            Kind::Tensor => "",
            Kind::Probe => "probe ",
            Kind::Scalar => "scalar ",
            Kind::Variant => "variant ",
        };
        format!("{kind}{form}{}{phase} of layer {}", self.name, self.layer)
    }
}

/// All that is wrong in a report.
fn marks(report: &Report) -> Vec<Mark> {
    let mut all = Vec::new();
    for l in &report.layers {
        all.extend(l.scalars.iter().map(|s| Mark::plain(Kind::Scalar, l.layer, &s.name, None)));
        let wrong = |u: &&Unit| matches!(u.verdict, Verdict::Fault | Verdict::ContractBroken);
        all.extend(l.tensors.iter().filter(wrong).map(|u| Mark::of_unit(l.layer, u)));
        let probes = l.probes.iter().filter(|p| p.broken());
        all.extend(probes.map(|p| Mark::plain(Kind::Probe, l.layer, p.name, Some(p.form))));
        let variants = l.invariance.iter().filter(|v| v.verdict() == Verdict::Fault);
        all.extend(variants.map(|v| Mark::plain(Kind::Variant, l.layer, v.name, None)));
    }
    all
}

impl Signature {
    /// What is wrong in a run's report; None where nothing is.
    pub fn of(case: Setup, report: &Report) -> Option<Signature> {
        let faults = marks(report);
        (!faults.is_empty()).then(|| Signature { faults, ..Signature::empty(case) })
    }

    /// Of an engine that broke, by what it said.
    pub fn of_break(case: Setup, said: &str) -> Signature {
        Signature { broke: Some(without_numbers(said)), ..Signature::empty(case) }
    }

    fn empty(case: Setup) -> Signature {
        let version = env!("CARGO_PKG_VERSION").into();
        Signature { schema: SCHEMA.into(), version, case, faults: Vec::new(), broke: None }
    }

    /// Reads one.
    ///
    /// # Errors
    /// What, where, what to do.
    pub fn read(path: &Path) -> Result<Signature, String> {
        let bad = |what: String| {
            format!(
                "{what}\n  where: {}\n  do: write one with --record-signature at a commit that has the fault",
                path.display()
            )
        };
        let text =
            std::fs::read_to_string(path).map_err(|e| bad(format!("the signature can't be read: {e}")))?;
        let read: Signature =
            serde_json::from_str(&text).map_err(|e| bad(format!("this is no signature: {e}")))?;
        match read.schema == SCHEMA {
            true => Ok(read),
            false => Err(bad(format!("the signature's schema is {:?}, not {SCHEMA:?}", read.schema))),
        }
    }

    /// Writes it; a file that is there is replaced as a whole.
    ///
    /// # Errors
    /// What, where, what to do.
    pub fn write(&self, path: &Path) -> Result<(), String> {
        npy::write_atomically(path, |out| serde_json::to_writer(out, self).map_err(Into::into)).map_err(|e| {
            format!(
                "the signature could not be written: {e}\n  where: {}\n  do: check room and permissions",
                path.display()
            )
        })
    }

    /// Refuses a run of another case than the recorded one.
    ///
    /// # Errors
    /// What, where, what to do.
    pub fn fits(&self, case: &Setup, path: &Path) -> Result<(), String> {
        let unlike = case.differences(&self.case);
        if unlike.is_empty() {
            return Ok(());
        }
        Err(format!(
            "the signature is of another case: {}\n  where: --signature {}\n  do: run with the options it was recorded with, or record it anew",
            unlike.join("; "),
            path.display()
        ))
    }

    /// Whether what is wrong in a run is the recorded fault; None where nothing is.
    pub fn compare(&self, report: &Report, path: &Path) -> Option<SignatureReport> {
        let here = marks(report);
        if here.is_empty() {
            return None;
        }
        let of_tensors = self.faults.iter().any(|m| m.kind == Kind::Tensor);
        // A probe that breaks says little of what broke it: it counts where there is nothing better.
        let telling = |m: &&Mark| !of_tensors || m.kind == Kind::Tensor;
        let mut found = None;
        for mark in self.faults.iter().filter(telling) {
            let why = here.iter().find_map(|m| mark.same(m));
            found = found.or(why.map(|why| format!("the recorded fault: {} ({why})", mark.title())));
        }
        let same = found.is_some();
        let text = found.unwrap_or_else(|| {
            let first = |all: &[Mark]| all.first().map_or("nothing".to_string(), Mark::title);
            match &self.broke {
                Some(said) => format!("not the recorded break ({said}); wrong here: {}", first(&here)),
                None => {
                    format!("not the recorded fault, {}; wrong here: {}", first(&self.faults), first(&here))
                }
            }
        });
        Some(SignatureReport { file: path.display().to_string(), same, text })
    }

    /// Whether a break is the recorded one.
    pub fn is_break(&self, said: &str) -> bool {
        self.broke.as_deref() == Some(without_numbers(said).as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(residual: &[i16], says: &str, cause: Option<&str>) -> Mark {
        Mark {
            kind: Kind::Tensor,
            layer: 0,
            name: "attn_out".into(),
            form: Some(Form::Fused),
            phase: Some(Phase::Decode),
            cause: cause.map(Into::into),
            says: without_numbers(says),
            residual: residual.to_vec(),
        }
    }

    #[test]
    fn the_same_fault_is_told_from_another_one() {
        let (a, b) = ([1000, -500, 250, 0], [-500, -1000, 0, 250]);
        let like = [900, -600, 200, 50];
        for (here, there, same) in [
            (mark(&a, "x", None), mark(&like, "y", None), true),
            (mark(&a, "x", None), mark(&b, "x", None), false),
            // Another residual, but the same cause: a token, say, that weighs otherwise.
            (mark(&a, "", Some("no mask")), mark(&b, "", Some("no mask")), true),
            (mark(&a, "", Some("no mask")), mark(&b, "", Some("swapped heads")), false),
            // Nothing was written: there are no values.
            (
                mark(&[], "12 of 96 bytes were never written", None),
                mark(&[], "7 of 96 bytes were never written", None),
                true,
            ),
            (mark(&[], "missing", None), mark(&[], "has shape [1]", None), false),
            (mark(&a, "x", None), mark(&[], "x", None), false),
        ] {
            assert_eq!(here.same(&there).is_some(), same, "{here:?} {there:?}");
            assert_eq!(there.same(&here).is_some(), same);
        }
        let elsewhere = Mark { phase: Some(Phase::Prefill), ..mark(&a, "x", None) };
        assert!(elsewhere.same(&mark(&a, "x", None)).is_none());
    }

    #[test]
    fn numbers_of_a_break_do_not_matter() {
        let a = without_numbers("norm.cu(31): error: identifier \"x\" is undefined\n  where: norm.cu");
        assert_eq!(a, "norm.cu(#): error: identifier \"x\" is undefined");
        assert_eq!(a, without_numbers("norm.cu(2907): error: identifier \"x\" is undefined"));
    }
}
