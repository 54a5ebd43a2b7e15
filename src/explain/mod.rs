/*!
One element in full: every term that its reference is made of, where each operand comes from, and how far the engine's
value is from it.

[`element`] takes a stage as the judge recomputes it ([`crate::judge::Ask`]) and makes an [`Explanation`], one serde struct,
of the piece that holds the element; [`text`] renders it. Nothing here judges: bounds are the judge's, values the
reference's. What the terms add up to is printed beside the reference's x, so that either can be checked against the other.

Schema `mla-check.explain/1`. Numbers that JSON has none for (NaN, infinities) are null there.
*/

mod attention;
mod operand;
mod stages;
mod standing;
mod sum;
pub mod text;

pub use operand::Operand;
pub use standing::{Bound, Part, Standing, Value};
pub use sum::{Rest, Sum, Term};

use crate::judge::evidence::Piece;
use crate::judge::{Asked, Standing as Stands, Which, unravel};
use crate::trace::TensorId;
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Axis, Contract, Form, Geometry, Phase, Stage, Terms, Weight};
use operand::Sources;
use serde::Serialize;
use std::sync::{Mutex, PoisonError};

/// Name and version of the form.
pub const SCHEMA: &str = "mla-check.explain/1";

/// An index along an axis.
#[derive(Clone, Debug, Serialize)]
pub struct Place {
    /// What it counts.
    pub axis: Axis,
    /// Which.
    pub index: usize,
    /// Of how many.
    pub of: usize,
}

/// What the row is, in words that a user knows.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// Request of the batch; none for slots that nobody owns.
    pub request: Option<usize>,
    /// Regime of its context, where the row belongs to one.
    pub regime: Option<&'static str>,
    /// New token or key within the request.
    pub within: Option<usize>,
    /// Prefill or decode.
    pub phase: Option<Phase>,
    /// Split of the keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<usize>,
    /// Rank, of a part of `out`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
}

/// A number on the way.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    /// What it is.
    pub name: String,
    /// Its value.
    pub value: f64,
    /// How it comes about.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub how: String,
}

/// A key that a row attends to.
#[derive(Clone, Debug, Serialize)]
pub struct Key {
    /// Position in the sequence.
    pub key: usize,
    /// First element of its row of the tensor that it is read from.
    pub from: Operand,
    /// q·k before any cast.
    pub raw: f64,
    /// Score: scaled, with the casts of scores.
    pub score: f64,
    /// Maximum so far, when its tile is visited.
    pub maximum: f64,
    /// exp(score − maximum); of a contract that normalises P first, that P.
    pub p: f64,
    /// The same after its cast.
    pub cast: f64,
    /// exp(maximum − last maximum): brings its tile to the last one.
    pub rescale: f64,
    /// cast · rescale / row sum: what its value is weighed with.
    pub weight: f64,
}

/// Everything behind one element.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// Name and version of this form.
    pub schema: &'static str,
    /// Version of the program.
    pub version: &'static str,
    /// The report, as it was named.
    pub report: String,
    /// The command that was repeated.
    pub command: String,
    /// Layer.
    pub layer: usize,
    /// `form/name`, as reports print it.
    pub tensor: String,
    /// Where in it.
    pub index: Vec<Place>,
    /// What the row is.
    pub row: Row,
    /// How the table of stages says that it is computed.
    pub formula: String,
    /// Tensors and weights that it is computed from.
    pub from: Vec<String>,
    /// The contract that it was judged by, in words.
    pub contract: String,
    /// Casts of the contract that were emulated on the way.
    pub casts: Vec<String>,
    /// Numbers on the way.
    pub steps: Vec<Step>,
    /// Keys with the largest P, of an attention.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<Key>,
    /// Sums: the first is that of x, the others are of what it is made of.
    pub sums: Vec<Sum>,
    /// The values.
    pub value: Value,
    /// The bound; none of copies.
    pub bound: Option<Bound>,
    /// What the element is.
    pub standing: Standing,
    /// The report's verdict of its tensor (and phase).
    pub verdict: String,
    /// What may be said besides.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// What a stage's own way of computing gives: the middle part of an [`Explanation`].
#[derive(Default)]
struct Made {
    casts: Vec<String>,
    steps: Vec<Step>,
    keys: Vec<Key>,
    sums: Vec<Sum>,
    parts: Vec<Part>,
    /// What else a bound is made of, of which there are no numbers.
    others: &'static str,
    notes: Vec<String>,
}

impl Made {
    fn step(&mut self, name: impl Into<String>, value: f64, how: impl Into<String>) {
        self.steps.push(Step { name: name.into(), value, how: how.into() });
    }
}

/// The element of a piece that is explained.
struct Element<'e, 't, 'h> {
    id: TensorId,
    /// Row and column of the stage's matrix.
    row: usize,
    col: usize,
    /// The same within the piece.
    i: usize,
    j: usize,
    terms: &'e Terms<'t, 'h>,
    contract: &'e Contract,
    of: &'e Stands<'e>,
    sources: Sources<'e>,
    /// How many terms are shown of a sum.
    shown: usize,
}

/// Explains an element of what was asked about: `index` along each axis of a tensor of this shape, `shown` terms of each sum.
///
/// # Errors
/// In words: the tensor is of another shape now, or the reference says nothing about the element.
pub fn element(asked: &Asked, index: &[usize], shape: &[usize], shown: usize) -> Result<Explanation, String> {
    let flat = index.iter().zip(shape).fold(0, |at, (i, n)| at * n + i);
    match asked {
        Asked::Weight { weight, file, engine, dtype } => {
            let (rows, cols) = (file.rows(), file.cols());
            if shape.iter().product::<usize>() != rows * cols
                || (engine.rows(), engine.cols()) != (rows, cols)
            {
                return Err(format!("{weight} has another shape than in the report"));
            }
            Ok(weight_element(*weight, (*file, *engine), *dtype, (index, shape), (flat / cols, flat % cols)))
        }
        Asked::Tensor(of) => {
            if of.tensor.shape != shape {
                return Err(format!("{} has shape {:?} now", of.id, of.tensor.shape));
            }
            let at = (flat / of.tensor.cols.max(1), flat % of.tensor.cols.max(1));
            tensor_element(of, at, shown)
        }
    }
}

/// An element of a weight: nothing but a cast.
fn weight_element(
    weight: Weight,
    (file, engine): (&dyn Rows, &dyn Rows),
    dtype: DType,
    (index, shape): (&[usize], &[usize]),
    (row, col): (usize, usize),
) -> Explanation {
    let of = |rows: &dyn Rows| {
        let mut values = vec![0.0; rows.cols()];
        rows.decode(row, 0, &mut values);
        values[col]
    };
    let (x, o) = (of(file), of(engine));
    let operand = Operand { file: Some(x), ..Operand::plain(weight.name(), index.to_vec(), x) };
    let (value, bound, standing) = standing::copied(dtype, o, dtype.to_bits(o), x);
    Explanation {
        tensor: weight.name().into(),
        index: places(weight.row().axes, index, shape),
        formula: "the file's value, decoded exactly and rounded once".into(),
        from: vec![format!("the file, {}; in Hugging Face's names {}", weight.row().gguf, weight.row().hf)],
        casts: vec![format!("weights to {dtype}")],
        sums: vec![Sum::of("x", vec![Term::new("", vec![operand], x)], 1)],
        value,
        bound,
        standing,
        ..empty()
    }
}

/// An element of a tensor of activations.
fn tensor_element(of: &Stands, (row, col): (usize, usize), shown: usize) -> Result<Explanation, String> {
    let phase = of.isolated.phases(of.id).get(row).copied().unwrap_or(Phase::Prefill);
    let contract = of.contract(phase);
    let head = of.tensor.heads().map(|(_, width)| col / width.max(1));
    // Rows of an attention are recomputed for one head alone.
    let wanted = move |_: usize, h: usize| head.is_none_or(|own| own == h);
    let isolated =
        crate::judge::compare::Isolated { contract: &contract, wanted: Some(&wanted), ..*of.isolated };
    let found = Mutex::new(None);
    isolated.pieces(of.id, of.tensor, &|piece: &Piece| {
        let inside = (piece.at.0..piece.at.0 + piece.x.nrows()).contains(&row)
            && (piece.at.1..piece.at.1 + piece.x.ncols()).contains(&col);
        if inside {
            let made = piece_element(of, piece, &contract, (row, col), shown);
            *found.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
        }
    });
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut e = found.ok_or_else(|| format!("the reference says nothing about this element of {}", of.id))?;
    e.row = row_words(of, row, phase);
    if let Some((_, f)) = of.found.iter().find(|(p, _)| *p == phase) {
        e.notes.push(format!("nobody declares a contract; the bits say {f}"));
    }
    if !of.chained.is_empty() {
        let names: Vec<&str> = of.chained.iter().map(|s| s.name()).collect();
        e.notes.push(format!(
            "not captured and computed in its place, their errors in the bound: {}",
            names.join(", ")
        ));
    }
    Ok(e)
}

fn piece_element(
    of: &Stands,
    piece: &Piece,
    contract: &Contract,
    (row, col): (usize, usize),
    shown: usize,
) -> Explanation {
    let (g, tensor) = (&of.isolated.spec.geometry, of.tensor);
    let (i, j) = (row - piece.at.0, col - piece.at.1);
    let sources = Sources::new(of, contract);
    let e = Element { id: of.id, row, col, i, j, terms: piece.terms, contract, of, sources, shown };
    let mut made = match piece.terms {
        Terms::Attention { attended, head, lse } => attention::range(&e, attended, head, *lse),
        Terms::Split { merged, head, lse } => attention::split(&e, merged, head, *lse),
        _ => stages::made(&e),
    };
    let unit = piece.prediction.unit();
    if unit != 1.0 {
        made.casts.push("lse in another base than e: divided by its natural logarithm".into());
        made.sums.iter_mut().take(1).for_each(|s| s.scale(unit));
    }
    let x = piece.x[[i, j]];
    let (value, mut bound, standing) =
        standing::of(piece, (i, j), tensor.dtype, tensor.bits(row, col), made.parts);
    if let Some(b) = bound.as_mut().filter(|_| !made.others.is_empty()) {
        let named: f64 = b.made_of.iter().map(|p| p.value).sum();
        b.made_of.push(Part::new(made.others, b.proven - named));
    }
    if let Some(sum) = made.sums.first()
        && (sum.total - x).abs() > 1e-9 * x.abs().max(sum.size)
        && x.is_finite()
    {
        made.notes.push(format!("the terms add up to {:e}, the reference has {x:e}", sum.total));
    }
    let joined = matches!(piece.terms, Terms::Merge { .. } | Terms::Sum { .. });
    let inputs = of.id.stage.inputs(g, of.id.form, joined);
    let weights = match piece.terms {
        Terms::Sum { .. } => &[],
        _ => of.id.stage.weights(g, of.id.form),
    };
    let from = inputs.iter().map(|s| s.name()).chain(weights.iter().map(|w| w.name()));
    made.casts.push(format!("the result to {}", tensor.dtype));
    Explanation {
        tensor: of.id.to_string(),
        index: places(&tensor.axes, &unravel(row * tensor.cols + col, &tensor.shape), &tensor.shape),
        formula: formula(piece.terms, of.id, g),
        from: from.map(String::from).collect(),
        contract: contract.to_string(),
        casts: made.casts,
        steps: made.steps,
        keys: made.keys,
        sums: made.sums,
        value,
        bound,
        standing,
        notes: made.notes,
        ..empty()
    }
}

/// The table's formula: of two ways the one that is gone; a merge has its own.
fn formula(terms: &Terms, id: TensorId, g: &Geometry) -> String {
    let other = match id.stage {
        Stage::AttnOut => id.form == Some(Form::Absorbed),
        Stage::Out => matches!(terms, Terms::Sum { .. }),
        _ => g.q_rank == 0,
    };
    match (terms, id.stage.row().formula.split_once(", or ")) {
        (Terms::Merge { lse: true, .. }, _) => "ln Σ_s exp(part_lse_s)".into(),
        (Terms::Merge { .. }, _) => "Σ_s exp(part_lse_s − lse) · part_o_s".into(),
        (_, Some((one, two))) => if other { two } else { one }.into(),
        (_, None) => id.stage.row().formula.into(),
    }
}

fn places(axes: &[Axis], index: &[usize], shape: &[usize]) -> Vec<Place> {
    let place =
        |((axis, index), of): ((&Axis, &usize), &usize)| Place { axis: *axis, index: *index, of: *of };
    axes.iter().zip(index).zip(shape).map(place).collect()
}

fn row_words(of: &Stands, row: usize, phase: Phase) -> Row {
    let plan = &of.isolated.case.plan;
    let Some(name) = plan.names(of.id.stage, of.id.form).get(row).copied() else { return Row::default() };
    let regime = name.sequence.and_then(|s| plan.sequences.get(s)).map(|s| s.regime.name());
    let within = name.request.map(|_| name.index);
    Row {
        request: name.request,
        regime,
        within,
        phase: name.request.map(|_| phase),
        split: name.split,
        rank: name.rank,
    }
}

/// Nothing yet.
fn empty() -> Explanation {
    let (value, bound, standing) = standing::copied(DType::F64, 0.0, 0, 0.0);
    Explanation {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        report: String::new(),
        command: String::new(),
        layer: 0,
        tensor: String::new(),
        index: Vec::new(),
        row: Row::default(),
        formula: String::new(),
        from: Vec::new(),
        contract: String::new(),
        casts: Vec::new(),
        steps: Vec::new(),
        keys: Vec::new(),
        sums: Vec::new(),
        value,
        bound,
        standing,
        verdict: String::new(),
        notes: Vec::new(),
    }
}

/// The tensor that a name means, as reports print it: `form/name`.
pub fn which(name: &str, form: Option<Form>) -> Option<Which> {
    if let Some(w) = Weight::from_name(name) {
        return Some(Which::Weight(w));
    }
    Stage::from_name(name).map(|stage| Which::Tensor(TensorId { stage, form }))
}
