/*!
Attention: over one range of keys, or over splits that the engine merges itself.

`x = Σ_t cast(p_t)·w_t/l · v_t`: every key's weight and value, as [`mla_reference::attention`] has them.
*/

use super::stages::casts_of_softmax;
use super::{Element, Key, Made, Operand, Part, Sum, Term};
use crate::judge::bound::attention::value_error;
use mla_reference::attention::{Attended, Head, Merged};
use mla_reference::product::Strided;
use mla_reference::{Contract, Form, RowSum, Stage};
use ndarray::Array2;

/// Keys with the largest P that are shown.
const KEYS: usize = 8;

/// What the bound of an attention is made of besides.
const OTHERS: &str = "scores, exponentials, row sum, P near ties of its cast";

/// A row of a matrix.
fn line<'m>(m: &Strided<'m>, row: usize) -> &'m [f64] {
    m.data.get(row * m.stride..).and_then(|r| r.get(..m.cols)).unwrap_or(&[])
}

/// One row of an attention over a range of keys.
struct Range<'r, 'h> {
    a: &'r Attended,
    head: &'r Head<'h>,
    i: usize,
    /// The weights of the column's group.
    p: &'r Array2<f64>,
    w: &'r Array2<f64>,
    /// Maximum so far of each key.
    maxima: Vec<f64>,
    contract: &'r Contract,
}

impl<'r, 'h> Range<'r, 'h> {
    fn new(e: &'r Element, a: &'r Attended, head: &'r Head<'h>, lse: bool) -> Range<'r, 'h> {
        let soft = &e.contract.softmax;
        let upper = a.upper.as_ref().filter(|u| !lse && e.j >= u.first);
        let (p, w) = upper.map_or((&a.p, &a.w), |u| (&u.p, &u.w));
        let many = if upper.is_some() { 2 } else { 1 };
        let n = a.range.len();
        let whole = || std::iter::once(0..n).collect();
        let tiles: Vec<_> = if soft.normalised { whole() } else { e.contract.tiles(0..n) };
        let (mut maxima, mut m) = (vec![f64::NEG_INFINITY; n], f64::NEG_INFINITY);
        for group in tiles.chunks(many) {
            m = group.iter().cloned().flatten().map(|t| a.s[[e.i, t]]).fold(m, f64::max);
            group.iter().cloned().flatten().for_each(|t| maxima[t] = m);
        }
        Range { a, head, i: e.i, p, w, maxima, contract: e.contract }
    }

    fn p(&self, t: usize) -> f64 {
        self.p[[self.i, t]]
    }
    fn cast(&self, t: usize) -> f64 {
        self.contract.softmax.cast().map_or(self.p(t), |d| d.round(self.p(t)))
    }
    fn rescale(&self, t: usize) -> f64 {
        self.w[[self.i, t]]
    }
    /// The row sum; 0 where no key is seen.
    fn l(&self) -> f64 {
        self.a.l[self.i]
    }
    /// What a value is weighed with.
    fn weight(&self, t: usize) -> f64 {
        if self.l() == 0.0 { 0.0 } else { self.cast(t) * self.rescale(t) / self.l() }
    }
    /// Keys of the range that the row sees.
    fn seen(&self) -> Vec<usize> {
        (0..self.a.range.len()).filter(|t| self.a.s[[self.i, *t]] != f64::NEG_INFINITY).collect()
    }
    /// What the row sum adds of a key, relative to the last maximum.
    fn summand(&self, t: usize) -> f64 {
        let soft = &self.contract.softmax;
        let p = if soft.row_sum == RowSum::Rounded && !soft.normalised { self.cast(t) } else { self.p(t) };
        p * self.rescale(t)
    }
    fn last(&self) -> f64 {
        self.a.s.row(self.i).iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }
    /// The sum of weighted values in a column.
    fn values(&self, e: &Element, name: &str, j: usize) -> Sum {
        let seen = self.seen();
        let value = |t: usize| line(&self.head.v, self.a.range.start + t).get(j).copied().unwrap_or(f64::NAN);
        let terms: Vec<f64> = seen.iter().map(|&t| self.weight(t) * value(t)).collect();
        Sum::among(name, &terms, e.shown, |n| {
            let (t, key) = (seen[n], self.a.range.start + seen[n]);
            let p = Operand::plain("P cast, rescaled, over the row sum", Vec::new(), self.weight(t));
            Term::new(format!("key {key}"), vec![p, of_key(e, key, Column::Value(j))], terms[n])
        })
    }
    /// Keys with the largest P, whatever their values are.
    fn keys(&self, e: &Element) -> Vec<Key> {
        let mut seen = self.seen();
        seen.sort_by(|a, b| self.weight(*b).total_cmp(&self.weight(*a)).then(a.cmp(b)));
        let q = self.head.q.row(self.i);
        let of = |&t: &usize| {
            let key = self.a.range.start + t;
            Key {
                key,
                from: of_key(e, key, Column::Key(0)),
                raw: q.iter().zip(line(&self.head.k, key)).map(|(q, k)| q * k).sum(),
                score: self.a.s[[self.i, t]],
                maximum: self.maxima[t],
                p: self.p(t),
                cast: self.cast(t),
                rescale: self.rescale(t),
                weight: self.weight(t),
            }
        };
        seen.iter().take(KEYS.max(e.shown)).map(of).collect()
    }
    /// q·k of a key.
    fn score(&self, e: &Element, key: usize) -> Sum {
        let (q, k) = (self.head.q.row(self.i), line(&self.head.k, key));
        let terms: Vec<f64> = q.iter().zip(k).map(|(q, k)| q * k).collect();
        Sum::among(format!("q·k of key {key}"), &terms, e.shown, |c| {
            Term::new(format!("column {c}"), vec![of_query(e, c), of_key(e, key, Column::Key(c))], terms[c])
        })
    }
    /// The row sum.
    fn row_sum(&self, e: &Element) -> Sum {
        let seen = self.seen();
        let terms: Vec<f64> = seen.iter().map(|&t| self.summand(t)).collect();
        Sum::among("row sum", &terms, e.shown, |n| {
            let t = seen[n];
            let factors = vec![
                Operand::plain(
                    "P",
                    Vec::new(),
                    if terms[n] == 0.0 { 0.0 } else { terms[n] / self.rescale(t) },
                ),
                Operand::plain("rescale", Vec::new(), self.rescale(t)),
            ];
            Term::new(format!("key {}", self.a.range.start + t), factors, terms[n])
        })
    }
    /// lse: the last maximum and the logarithm of the row sum of e to the scores above it.
    fn lse(&self) -> Sum {
        let log = self.a.lse[self.i] - self.last();
        let terms = [("largest score", self.last()), ("ln of the row sum", log)];
        Sum::of("x", terms.map(|(n, v)| Term::new(n, Vec::new(), v)).into(), 2)
    }
}

/// A column of a key or of its value.
#[derive(Clone, Copy)]
enum Column {
    Key(usize),
    Value(usize),
}

/// The head of a column of the stage.
fn head_of(e: &Element) -> usize {
    let lse = matches!(e.id.stage, Stage::Lse | Stage::PartLse);
    let g = &e.of.isolated.spec.geometry;
    let width = match (lse, e.id.form) {
        (true, _) => 1,
        (_, Some(Form::Absorbed)) => g.latent,
        _ => g.value,
    };
    e.col / width.max(1)
}

/// The sequence of the row: its index in the plan, and the row's token in it.
fn sequence(e: &Element) -> Option<(usize, usize)> {
    let name = e.of.isolated.case.plan.names(e.id.stage, e.id.form).get(e.row).copied()?;
    Some((name.sequence?, name.index))
}

/// What a key or its value is read from.
fn of_key(e: &Element, key: usize, part: Column) -> Operand {
    let (plan, g, h) = (&e.of.isolated.case.plan, &e.of.isolated.spec.geometry, head_of(e));
    let found = sequence(e).and_then(|(s, _)| match (e.id.form, part) {
        (Some(Form::Absorbed), Column::Key(c) | Column::Value(c)) => {
            let slot = *plan.sequences.get(s)?.slots.get(key)?;
            Some(e.sources.input(Stage::Cache, slot, c, None))
        }
        (_, part) => {
            let row = plan.key_rows().find(|(i, _, _)| *i == s)?.2.start + key;
            Some(match part {
                Column::Key(c) => e.sources.input(Stage::K, row, h * g.key() + c, None),
                Column::Value(c) => e.sources.input(Stage::V, row, h * g.value + c, None),
            })
        }
    });
    found.unwrap_or_else(|| Operand::plain("key", vec![key], f64::NAN))
}

/// What a column of the query is read from.
fn of_query(e: &Element, c: usize) -> Operand {
    let (plan, g, h) = (&e.of.isolated.case.plan, &e.of.isolated.spec.geometry, head_of(e));
    let row =
        sequence(e).and_then(|(s, i)| Some(plan.sequences.get(s)?.tokens.start + i)).unwrap_or(usize::MAX);
    match (e.id.form, c.checked_sub(g.latent)) {
        (Some(Form::Absorbed), None) => e.sources.input(Stage::QLatent, row, h * g.latent + c, None),
        (Some(Form::Absorbed), Some(c)) => e.sources.input(Stage::Q, row, h * g.key() + g.nope + c, None),
        _ => e.sources.input(Stage::Q, row, h * g.key() + c, None),
    }
}

/// Numbers, keys and inner sums of a range.
fn inside(e: &Element, made: &mut Made, r: &Range) {
    let seen = r.seen();
    made.step("scale", e.of.isolated.spec.scale, "factor on q·k");
    let factor = e.contract.score_factor(e.of.isolated.spec.scale);
    if factor != e.of.isolated.spec.scale {
        made.step("factor", factor, "f32(scale · log₂e) / log₂e");
    }
    let range = &r.a.range;
    made.step("visible keys", seen.len() as f64, format!("of keys {}..{}", range.start, range.end));
    made.step("largest score", r.last(), "the last maximum");
    made.step("row sum l", r.l(), "relative to the last maximum");
    made.step("lse", r.a.lse[r.i], "natural");
    made.keys = r.keys(e);
    if let Some(first) = made.keys.first() {
        made.sums.push(r.score(e, first.key));
    }
}

/// Attention over one range of keys.
pub fn range(e: &Element, a: &Attended, head: &Head, lse: bool) -> Made {
    let r = Range::new(e, a, head, lse);
    let mut made = Made { casts: casts_of_softmax(e.contract), ..Made::default() };
    made.sums.push(if lse { r.lse() } else { r.values(e, "x", e.j) });
    inside(e, &mut made, &r);
    made.sums.push(r.row_sum(e));
    if !lse && let Some(x) = made.sums.first() {
        let error = value_error(e.contract, a.range.len());
        made.parts.push(Part::new("roundings of P·V and of the end, times Σ P|v|", error * x.size));
    }
    made.others = OTHERS;
    made
}

/// Attention whose splits are merged inside.
pub fn split(e: &Element, m: &Merged, head: &Head, lse: bool) -> Made {
    let mut made = Made { casts: casts_of_softmax(e.contract), ..Made::default() };
    if let Some(d) = e.contract.part_cast().filter(|_| m.parts.len() > 1 && !lse) {
        made.casts.push(format!("each split's result to {d}"));
        if e.contract.merge_groups.is_some() {
            made.casts.push(format!("each merged group of splits to {d} once more"));
        }
    }
    let weight = |s: usize| m.weights[[s, e.i]];
    let heaviest = (0..m.parts.len()).fold(0, |best, s| if weight(s) > weight(best) { s } else { best });
    let names: Vec<String> =
        m.parts.iter().map(|p| format!("keys {}..{}", p.range.start, p.range.end)).collect();
    if lse {
        let l: Vec<f64> = m.parts.iter().map(|p| p.lse[e.i]).collect();
        let most = l.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let terms = [("largest lse of a split", most), ("ln Σ exp(lse − largest)", m.lse[e.i] - most)];
        made.sums.push(Sum::of("x", terms.map(|(n, v)| Term::new(n, Vec::new(), v)).into(), 2));
        let each: Vec<f64> = l.iter().map(|v| libm::exp(v - most)).collect();
        made.sums.push(Sum::among("Σ exp(lse − largest)", &each, e.shown, |s| {
            Term::new(names[s].clone(), Vec::new(), each[s]).of(Operand::plain(
                "lse of the split",
                Vec::new(),
                l[s],
            ))
        }));
    } else {
        let each: Vec<f64> = m.states.iter().map(|s| s.weight[e.i] * s.stored[[e.i, e.j]]).collect();
        made.sums.push(Sum::among("x", &each, e.shown, |g| {
            let state = &m.states[g];
            let of: Vec<&str> =
                state.parts.iter().filter_map(|s| names.get(*s)).map(String::as_str).collect();
            let factors = vec![
                Operand::plain("weight", Vec::new(), state.weight[e.i]),
                Operand::plain("result as stored", Vec::new(), state.stored[[e.i, e.j]]),
            ];
            Term::new(of.join(", "), factors, each[g])
        }));
    }
    for state in m.states.iter().filter(|s| !lse && s.parts.len() > 1).take(e.shown) {
        let whole = state.weight[e.i];
        let share = |s: usize| if whole == 0.0 { 0.0 } else { weight(s) / whole };
        let value = |s: usize| m.stored[s][[e.i, e.j]];
        let each: Vec<f64> = state.parts.iter().map(|s| share(*s) * value(*s)).collect();
        let of: Vec<&str> = state.parts.iter().map(|s| names[*s].as_str()).collect();
        made.sums.push(Sum::among(format!("merged first: {}", of.join(", ")), &each, e.shown, |k| {
            let s = state.parts[k];
            let factors = vec![
                Operand::plain("share of the weight", Vec::new(), share(s)),
                Operand::plain("result as stored", Vec::new(), value(s)),
            ];
            Term::new(names[s].clone(), factors, each[k])
        }));
    }
    if let Some(part) = m.parts.get(heaviest) {
        let r = Range::new(e, part, head, lse);
        inside(e, &mut made, &r);
        if !lse {
            made.sums.push(r.values(
                e,
                &format!("split of {}, the one of most weight", names[heaviest]),
                e.j,
            ));
        }
        made.sums.push(r.row_sum(e));
    }
    made.others = "as of one range of keys, in each split; weights of splits, roundings of the merge";
    made
}
