/*!
The faults of a sensitivity study: by which sizes each is planted, and where evidence must appear.

"Found" means evidence *at the right tensor*: one that the fault itself makes wrong, not one that was computed
from it; and nowhere else. Where forms differ, each form that ran must have found it.
*/

use super::accuses;
use crate::case::{Case, Stream};
use crate::fault::{Fault, FaultError};
use crate::judge::gates::RULES;
use crate::judge::watch::GateReport;
use crate::judge::{Unit, Which};
use mla_reference::{Form, Stage};

/// A fault of the study.
#[derive(Debug)]
pub struct Subject {
    /// Name, as in `--fault`.
    pub name: &'static str,
    /// What a size is.
    pub unit: &'static str,
    /// The largest size; None: the fault has no size.
    pub from: Option<f64>,
    /// Whether evidence lies in stages that forms share.
    pub shared: bool,
    /// Stages that may carry evidence, in any form.
    pub stages: &'static [Stage],
    /// The text of the fault.
    text: fn(f64, &Case, u64) -> String,
}

const ATTENTION: &[Stage] = &[Stage::PartO, Stage::PartLse, Stage::OLatent, Stage::Lse, Stage::AttnOut];
const GATHERED: &[Stage] = &[Stage::K, Stage::V, Stage::PartO, Stage::PartLse, Stage::OLatent, Stage::Lse];
const MERGED: &[Stage] = &[Stage::OLatent, Stage::Lse, Stage::AttnOut];
const NORMS: &[Stage] = &[Stage::AttnIn, Stage::QANormed, Stage::KvCNormed];
const SUBJECT: u64 = 40;

/// All.
pub static SUBJECTS: &[Subject] = &[
    Subject {
        name: "softmax-scale",
        unit: "relative",
        from: Some(0.2),
        shared: false,
        stages: ATTENTION,
        text: |e, _, _| format!("softmax-scale={}", 1.0 + e),
    },
    Subject {
        name: "output-gain",
        unit: "relative",
        from: Some(0.2),
        shared: false,
        stages: &[Stage::AttnOut],
        text: |e, _, _| format!("output-gain={}", 1.0 + e),
    },
    Subject {
        name: "head-gain",
        unit: "relative, one head",
        from: Some(0.2),
        shared: false,
        stages: &[Stage::AttnOut],
        text: |e, _, _| format!("head-gain={}", 1.0 + e),
    },
    Subject {
        name: "eps",
        unit: "relative",
        from: Some(10.0),
        shared: true,
        stages: NORMS,
        text: |e, _, _| format!("eps={}", 1.0 + e),
    },
    Subject {
        name: "rope-offset",
        unit: "positions",
        from: Some(1.0),
        shared: true,
        stages: &[Stage::Q],
        text: |e, _, _| format!("rope-offset={e}"),
    },
    Subject {
        name: "drop-token",
        unit: "",
        from: None,
        shared: false,
        stages: ATTENTION,
        text: |_, case, seed| format!("drop-token={}", below(longest(case), seed)),
    },
    Subject {
        name: "foreign-page",
        unit: "",
        from: None,
        shared: false,
        stages: GATHERED,
        text: |_, case, seed| format!("foreign-page={}", foreign_page(case, seed)),
    },
    Subject {
        name: "merge-base",
        unit: "",
        from: None,
        shared: false,
        stages: MERGED,
        text: |_, _, _| "merge-base".into(),
    },
    Subject {
        name: "swap-heads",
        unit: "",
        from: None,
        shared: false,
        stages: &[Stage::AttnOut],
        text: |_, _, _| "swap-heads=0,1".into(),
    },
];

fn longest(case: &Case) -> usize {
    case.batch.0.iter().map(|r| r.total()).max().unwrap_or(1)
}

fn below(n: usize, seed: u64) -> usize {
    Stream::new(seed, SUBJECT, 0).below(n.max(1))
}

/// A page that two requests have whole: the shorter of the two longest ends it.
fn foreign_page(case: &Case, seed: u64) -> usize {
    let mut pages: Vec<usize> = case.batch.0.iter().map(|r| r.total() / case.plan.page_size).collect();
    pages.sort_unstable_by(|a, b| b.cmp(a));
    below(pages.get(1).copied().unwrap_or(1), seed)
}

impl Subject {
    /// The one with this name.
    pub fn by_name(name: &str) -> Option<&'static Subject> {
        SUBJECTS.iter().find(|s| s.name == name)
    }

    /// The fault of this size for a case.
    pub fn fault(&self, size: f64, case: &Case, seed: u64) -> Result<Fault, FaultError> {
        Fault::parse(&(self.text)(size, case, seed), seed)
    }

    /// Sizes, the largest first, in steps of 1-2-5, down to a millionth of it.
    pub fn ladder(&self) -> Vec<f64> {
        let Some(from) = self.from else { return vec![0.0] };
        let mut decade = libm::floor(libm::log10(from) + 1e-9) as i32;
        let mut all = Vec::new();
        while all.len() < 19 {
            for digit in [5, 2, 1] {
                // Through text, so that a size is the decimal that it prints as.
                let size: f64 = format!("{digit}e{decade}").parse().unwrap_or(from);
                if size <= from * (1.0 + 1e-9) {
                    all.push(size);
                }
            }
            decade -= 1;
        }
        all.truncate(19);
        all
    }

    /// Stages that gates are asked about: outputs of parts are no outputs for anybody.
    pub fn gated(&self) -> impl Iterator<Item = Stage> {
        self.stages.iter().copied().filter(|s| !matches!(s, Stage::PartO | Stage::PartLse))
    }

    /// Which gates reject any of the tensors at which the fault acts, in the order of [`RULES`].
    pub fn rejected(&self, gates: &[GateReport]) -> [bool; RULES.len()] {
        let mut all = [false; RULES.len()];
        let rules =
            gates.iter().filter(|g| self.gated().any(|s| s.name() == g.tensor)).flat_map(|g| &g.rules);
        for rule in rules.filter(|r| !r.passed) {
            RULES.iter().zip(&mut all).filter(|(name, _)| **name == rule.rule).for_each(|(_, r)| *r = true);
        }
        all
    }

    /// Whether the fault was found at the right tensor, and nothing else accused.
    pub fn found(&self, units: &[Unit], forms: &[Form]) -> bool {
        let accused = || units.iter().filter(|u| accuses(u.verdict));
        let right = |u: &Unit| matches!(u.which, Which::Tensor(id) if self.stages.contains(&id.stage));
        let of = |form: Option<Form>| accused().any(|u| u.form == form);
        let everywhere = if self.shared { of(None) } else { forms.iter().all(|f| of(Some(*f))) };
        everywhere && accused().all(right)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Verdict;
    use crate::trace::TensorId;

    #[test]
    fn ladders_fall_in_steps_of_1_2_5() {
        let l = Subject::by_name("softmax-scale").unwrap().ladder();
        assert_eq!(l[..7], [0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002]);
        assert!(l.last().unwrap() < &1e-6);
        assert_eq!(Subject::by_name("eps").unwrap().ladder()[..4], [10.0, 5.0, 2.0, 1.0]);
        assert_eq!(Subject::by_name("merge-base").unwrap().ladder(), [0.0]);
    }

    fn unit(stage: Stage, form: Form, verdict: Verdict) -> Unit {
        Unit::without_data(Which::Tensor(TensorId::of(stage, form)), None, verdict, "")
    }

    #[test]
    fn found_means_at_the_right_tensor_in_every_form_and_nowhere_else() {
        use Verdict::{AfterFault, Fault, Rounding};
        let gain = Subject::by_name("output-gain").unwrap();
        let both = [unit(Stage::AttnOut, Form::Fused, Fault), unit(Stage::AttnOut, Form::Absorbed, Fault)];
        assert!(gain.found(&both, &Form::ALL));
        assert!(gain.found(&both[..1], &[Form::Fused]));
        assert!(!gain.found(&both[..1], &Form::ALL));
        let mut after = both.to_vec();
        after.push(unit(Stage::Out, Form::Fused, AfterFault));
        after.push(unit(Stage::Q, Form::Fused, Rounding));
        assert!(gain.found(&after, &Form::ALL));
        after.push(unit(Stage::Out, Form::Fused, Fault));
        assert!(!gain.found(&after, &Form::ALL));
        assert!(!gain.found(&[unit(Stage::Out, Form::Fused, Fault)], &[Form::Fused]));
        let eps = Subject::by_name("eps").unwrap();
        assert!(eps.found(&[unit(Stage::AttnIn, Form::Fused, Fault)], &[]));
        assert!(!eps.found(&[], &[]));
    }
}
