/*! Variants of a run in the report: what came out of each, in numbers and in words. */

use super::LayerReport;
use super::finding::short;
use super::terminal::{paint, wrapped};
use crate::judge::Verdict;
use crate::written::{self, Name};
use mla_reference::Form;
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// What mathematics demands of the bits of a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Demand {
    /// The same operations on the same numbers: equal bits.
    Bits,
    /// Operations may come in another order: rounding.
    Rounding,
}

/// One variant. Part of the report; names are stable.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Variant {
    /// `order`, `pages`, …
    #[serde(deserialize_with = "written::name")]
    pub name: Name,
    /// What is another one than in the base run.
    #[serde(deserialize_with = "written::name")]
    pub changes: Name,
    /// What mathematics demands.
    pub demands: Demand,
    /// What came out.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// What the judge says of the variant by itself; none where it did not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judged: Option<Verdict>,
    /// The largest gain by which variant and base could differ and both judgements be clean; none where it is not bounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden_gain: Option<f64>,
    /// The same of the softmax scale.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden_scale: Option<f64>,
    /// Tensor by tensor, against the base run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<Difference>,
}

/// What came out of a variant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum Outcome {
    /// Every bit that was compared is the base's.
    Bits,
    /// Bits differ, and both runs are clean.
    Rounding,
    /// Something is wrong here that is not wrong in the base run.
    Fault {
        /// Tensor and place.
        first: String,
        /// All that is said of it.
        said: Vec<String>,
    },
    /// The base run has a fault, and the variant has no other one.
    AsBase {
        /// Whether it shows here too.
        what: String,
    },
    /// The engine gave up here, and did not in the base run.
    Broke {
        /// What it said.
        what: String,
    },
    /// There is nothing to ask.
    NotApplicable {
        /// Why.
        why: String,
    },
}

/// A tensor against the base run's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Tensor.
    #[serde(deserialize_with = "written::name")]
    pub tensor: Name,
    /// Form; none for shared stages.
    pub form: Option<Form>,
    /// Elements compared.
    pub elements: u64,
    /// Of which the bits differ.
    pub differ: u64,
    /// Of which one side is not finite; figures leave them out.
    pub not_finite: u64,
    /// Largest difference, in units of the larger one's last place.
    pub ulps: f64,
    /// ‖variant − base‖ / ‖base‖ over the rows compared.
    #[serde(deserialize_with = "written::number")]
    pub relative_l2: f64,
    /// Where the first bit differs: request and token of the base run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<String>,
}

impl Difference {
    /// Nothing compared yet.
    pub fn none(tensor: Name, form: Option<Form>) -> Difference {
        Difference {
            tensor,
            form,
            elements: 0,
            differ: 0,
            not_finite: 0,
            ulps: 0.0,
            relative_l2: 0.0,
            first: None,
        }
    }

    /// `fused/attn_out`
    pub fn title(&self) -> String {
        self.form.map_or(self.tensor.to_string(), |f| format!("{}/{}", f.name(), self.tensor))
    }

    fn figures(&self) -> String {
        let share = 100.0 * self.differ as f64 / self.elements.max(1) as f64;
        let ulps =
            if self.ulps == 0.0 { String::new() } else { format!(", up to {} ulps", short(self.ulps)) };
        let odd = match self.not_finite {
            0 => String::new(),
            n => format!(", {n} finite on one side only"),
        };
        format!(
            "{} % of {} elements{ulps}, relative L2 {}{odd}",
            short(share),
            self.elements,
            short(self.relative_l2)
        )
    }
}

impl Variant {
    /// The row of the table of verdicts that an outcome stands for.
    pub fn verdict(&self) -> Verdict {
        match self.outcome {
            Outcome::Bits => Verdict::Exact,
            Outcome::Rounding => Verdict::Rounding,
            Outcome::Fault { .. } => Verdict::Fault,
            Outcome::AsBase { .. } => Verdict::AfterFault,
            Outcome::Broke { .. } => Verdict::Broke,
            Outcome::NotApplicable { .. } => Verdict::NotApplicable,
        }
    }

    /// Whether it makes a run wrong that was clean.
    pub fn wrong(&self) -> bool {
        matches!(self.outcome, Outcome::Fault { .. } | Outcome::Broke { .. })
    }

    /// The outcome in a word.
    pub fn word(&self) -> &'static str {
        match self.outcome {
            Outcome::Bits => "bits",
            Outcome::Rounding => "rounding",
            Outcome::Fault { .. } => "fault",
            Outcome::AsBase { .. } => "as the base",
            Outcome::Broke { .. } => "engine broke",
            Outcome::NotApplicable { .. } => "not applicable",
        }
    }

    /// The outcome in a sentence.
    pub fn sentence(&self) -> String {
        let elements: u64 = self.tensors.iter().map(|t| t.elements).sum();
        let differ = || self.tensors.iter().filter(|t| t.differ > 0);
        match &self.outcome {
            Outcome::Bits => format!("all {elements} elements of {} tensors", self.tensors.len()),
            Outcome::Rounding => {
                let first = differ().next().map_or(String::new(), |d| {
                    format!("first in {}; ", d.first.as_deref().unwrap_or(d.tensor))
                });
                let most = differ().max_by(|a, b| a.relative_l2.total_cmp(&b.relative_l2));
                let most = most.map_or(String::new(), |d| format!("most in {}: {}", d.title(), d.figures()));
                let unsure = match self.judged {
                    Some(Verdict::Inconclusive) => {
                        "; the variant alone has too few elements for the judge's promise"
                    }
                    Some(Verdict::NotCompared) => "; not all of it could be judged",
                    _ => "",
                };
                format!("{first}{most}{unsure}")
            }
            Outcome::Fault { first, .. } => first.clone(),
            Outcome::AsBase { what } | Outcome::Broke { what } => what.lines().next().unwrap_or("").into(),
            Outcome::NotApplicable { why } => why.clone(),
        }
    }

    /// What could have hidden in it, where that is bounded.
    fn hidden(&self) -> Option<String> {
        let size = |v: Option<f64>, what: &str| v.map(|v| format!("{what} of {v:.0e}"));
        let sizes = [size(self.hidden_gain, "a gain"), size(self.hidden_scale, "a softmax scale")];
        let sizes: Vec<String> = sizes.into_iter().flatten().collect();
        (!sizes.is_empty()).then(|| sizes.join(" or "))
    }
}

/// What the variants make of a layer's verdict.
pub fn worst(variants: &[Variant]) -> Option<Verdict> {
    variants.iter().filter(|v| v.wrong()).map(Variant::verdict).max()
}

/// In words: what changes bits, and what that is.
pub fn summary(l: &LayerReport) -> Option<String> {
    let with = |word| {
        let all = l.invariance.iter().filter(move |v| v.word() == word);
        all.map(|v| v.name).collect::<Vec<_>>().join(", ")
    };
    if l.invariance.is_empty() {
        return None;
    }
    let (bits, rounding, fault) = (with("bits"), with("rounding"), with("fault"));
    let mut said = Vec::new();
    if !fault.is_empty() {
        said.push(format!("The answer is wrong under {fault}, and not in the run above."));
    }
    if !rounding.is_empty() {
        said.push(format!("This engine is not bit-invariant to {rounding}: all these answers are rounding."));
    }
    if !bits.is_empty() {
        said.push(format!("It is bit-invariant to {bits}."));
    }
    (!said.is_empty()).then(|| said.join(" "))
}

/// The block of a terminal report.
pub(super) fn text(out: &mut String, l: &LayerReport, width: usize) {
    if l.invariance.is_empty() {
        return;
    }
    out.push('\n');
    wrapped(
        out,
        "",
        "Invariance: the same requests, run another way; every run is judged in full, then compared with the one above bit by bit.",
        width,
    );
    for v in &l.invariance {
        let pad = " ".repeat(15usize.saturating_sub(v.word().len()));
        let lead = format!("{:<11} ", v.name);
        // Colours have no width: the paragraph is laid out without them.
        let mut lines = String::new();
        wrapped(&mut lines, &lead, &format!("{}{pad}{}", v.word(), v.sentence()), width);
        *out += &lines.replacen(v.word(), &paint(v.verdict(), v.word()), 1);
        if let Outcome::Fault { said, .. } = &v.outcome {
            wrapped(out, "  ", v.changes, width);
            said.iter().for_each(|s| wrapped(out, "  ", s, width));
        }
        if let Outcome::Broke { what } = &v.outcome {
            what.lines().skip(1).for_each(|s| wrapped(out, "  ", s.trim(), width));
        }
    }
    if let Some(s) = summary(l) {
        wrapped(out, "", &s, width);
    }
    let rounding = l.invariance.iter().filter(|v| v.outcome == Outcome::Rounding);
    let hidden = rounding.filter_map(|v| Some(format!("{}: {}", v.name, v.hidden()?)));
    let hidden: Vec<String> = hidden.collect();
    if !hidden.is_empty() {
        wrapped(out, "could have hidden in one tensor: ", &hidden.join("; "), width);
    }
}

/// Bullets of a Markdown block: what is wrong.
pub(super) fn bullets(l: &LayerReport) -> String {
    let mut out = String::new();
    for v in l.invariance.iter().filter(|v| v.wrong()) {
        let _ = writeln!(out, "- `--invariance`, {} ({}): {}, {}", v.name, v.changes, v.word(), v.sentence());
        if let Outcome::Fault { said, .. } = &v.outcome {
            said.iter().for_each(|s| out += &format!("  - {s}\n"));
        }
    }
    out
}

/// A cell of a Markdown table: every variant with its outcome.
pub(super) fn cell(l: &LayerReport) -> Option<String> {
    let all: Vec<String> = l.invariance.iter().map(|v| format!("{}: {}", v.name, v.word())).collect();
    (!all.is_empty()).then(|| all.join("; "))
}
