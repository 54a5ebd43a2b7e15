/*!
Which cases exist: model × layer × engine × dtype × form × phase, as data.

A case is known by its name, `cpu::glm5dims.Q4_K_M::layer0::bf16::absorbed::decode`: filters take any part of it, reports
are filed under it, and a name means the same case on every machine. Nothing here opens, computes or asks for anything.
*/

use crate::case::{Batch, Request};
use mla_numeric::DType;
use mla_reference::{Form, Phase};

/// One case.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cell {
    /// Engine.
    pub engine: String,
    /// Label of the model.
    pub model: String,
    /// Layer.
    pub layer: usize,
    /// Dtype of weights and activations.
    pub dtype: DType,
    /// Form; None: both in one run, held against each other.
    pub form: Option<Form>,
    /// Requests of this phase.
    pub phase: Phase,
}

/// What an engine brings to the matrix.
#[derive(Clone, Debug)]
pub struct Column<'a> {
    /// Name.
    pub engine: &'a str,
    /// Dtypes that it computes in.
    pub dtypes: &'a [DType],
    /// Forms, each a case of its own; empty: both in one.
    pub forms: &'a [Form],
}

impl Cell {
    /// The name of the test.
    pub fn name(&self) -> String {
        let form = self.form.map_or("both", Form::name);
        let (dtype, phase) = (self.dtype.name(), self.phase.name());
        format!("{}::{}::layer{}::{dtype}::{form}::{phase}", self.engine, self.model, self.layer)
    }

    /// Name of the file of its report.
    pub fn report_name(&self) -> String {
        report_name(&self.name())
    }

    /// The forms that it runs.
    pub fn forms(&self) -> Vec<Form> {
        self.form.map_or(Form::ALL.to_vec(), |f| vec![f])
    }
}

/// A test's name as a file's name. Engines and labels are [`plain`], so that no two names give the same file.
pub fn report_name(test: &str) -> String {
    let safe = |c: char| if is_plain(c) || c == '+' { c } else { '_' };
    format!("{}.json", test.replace("::", "+").chars().map(safe).collect::<String>())
}

/// The text as part of a test's name and of a file's: letters, digits, `.`, `-`, `_`.
pub fn plain(text: &str) -> String {
    let text: String = text.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    if text.is_empty() { "_".into() } else { text }
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._-".contains(c)
}

/// Cases of an engine with a model's layers, in the order of lists.
pub fn cells(model: &str, layers: &[usize], column: &Column) -> Vec<Cell> {
    let forms: Vec<Option<Form>> = match column.forms {
        [] => vec![None],
        some => some.iter().map(|f| Some(*f)).collect(),
    };
    let mut all = Vec::new();
    for &layer in layers {
        for &dtype in column.dtypes {
            for &form in &forms {
                all.extend(Phase::ALL.map(|phase| Cell {
                    engine: column.engine.to_string(),
                    model: model.to_string(),
                    layer,
                    dtype,
                    form,
                    phase,
                }));
            }
        }
    }
    all
}

/// A request's phase.
pub fn phase(request: &Request) -> Phase {
    if request.new == 1 { Phase::Decode } else { Phase::Prefill }
}

/// The requests of one phase, none longer than `most` tokens (what a sparse indexer keeps: up to there, dense attention is
/// what the model computes). Longer ones are cut, context first; what is then the same is asked once.
pub fn batch(of: &Batch, phase: Phase, most: Option<usize>) -> Batch {
    let most = most.unwrap_or(usize::MAX).max(1);
    let mut all: Vec<Request> = Vec::new();
    for r in of.0.iter().filter(|r| self::phase(r) == phase) {
        let new = r.new.min(most);
        let cut = Request { context: r.context.min(most - new), new };
        if self::phase(&cut) == phase && !all.contains(&cut) {
            all.push(cut);
        }
    }
    Batch(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::DEFAULT_BATCH;

    fn default() -> Batch {
        DEFAULT_BATCH.parse().unwrap()
    }

    #[test]
    fn names_are_stable_and_stand_for_one_case() {
        let columns = [
            Column { engine: "reference", dtypes: &[DType::F64], forms: &[] },
            Column { engine: "cpu", dtypes: &[DType::Bf16, DType::F16, DType::F32], forms: &Form::ALL },
        ];
        let of = |model: &str| columns.iter().flat_map(|c| cells(model, &[0, 3], c)).collect::<Vec<_>>();
        let all: Vec<Cell> = [of("a"), of("b.Q4_K_M")].concat();
        // 2 models × 2 layers × 2 phases × (1 + 3 dtypes × 2 forms).
        assert_eq!(all.len(), 56);
        let mut names: Vec<String> = all.iter().map(Cell::name).collect();
        // Written down: scripts and bisects depend on them.
        assert_eq!(names[0], "reference::a::layer0::f64::both::prefill");
        assert_eq!(names[55], "cpu::b.Q4_K_M::layer3::f32::absorbed::decode");
        let mut files: Vec<String> = all.iter().map(Cell::report_name).collect();
        assert_eq!(files[55], "cpu+b.Q4_K_M+layer3+f32+absorbed+decode.json");
        for list in [&mut names, &mut files] {
            list.sort();
            list.dedup();
            assert_eq!(list.len(), 56);
        }
    }

    #[test]
    fn odd_names_become_plain() {
        assert_eq!(plain("my model: é/a::b+c"), "my_model____a__b_c");
        assert_eq!(plain(""), "_");
        assert_eq!(report_name("unreadable::a b/c"), "unreadable+a_b_c.json");
    }

    #[test]
    fn a_phase_has_the_default_batch_s_requests_of_it() {
        let text = |phase, most| batch(&default(), phase, most).to_string();
        assert_eq!(text(Phase::Prefill, None), "0+64,0+5,64+17");
        assert_eq!(text(Phase::Decode, None), "0+1,1024+1,257+1,65+1,64+1,63+1");
        let both = Phase::ALL.map(|p| batch(&default(), p, None).0.len());
        assert_eq!(both.iter().sum::<usize>(), default().0.len());
    }

    #[test]
    fn requests_stay_within_what_an_indexer_keeps() {
        let text = |phase, most| batch(&default(), phase, Some(most)).to_string();
        assert_eq!(text(Phase::Decode, 2048), "0+1,1024+1,257+1,65+1,64+1,63+1");
        assert_eq!(text(Phase::Decode, 66), "0+1,65+1,64+1,63+1");
        assert_eq!(text(Phase::Prefill, 66), "0+64,0+5,49+17");
        assert_eq!(text(Phase::Prefill, 4), "0+4");
        assert_eq!(text(Phase::Prefill, 1), "");
        for most in 1..2000 {
            for phase in Phase::ALL {
                let cut = batch(&default(), phase, Some(most));
                assert!(cut.0.iter().all(|r| r.total() <= most && self::phase(r) == phase), "{cut}");
            }
        }
    }
}
