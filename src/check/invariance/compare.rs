/*! Holding a tensor of a variant directly against the base run's: bit by bit, row by row, by request and token. */

use super::Kept;
use super::variants::Changed;
use crate::case::Case;
use crate::engine::SinkError;
use crate::judge::Recorder;
use crate::probe::place;
use crate::report::invariance::Difference;
use crate::trace::{Tensor, TensorId};
use mla_reference::{Form, Stage};

/// Tensors that are held against each other: what a layer stores and gives out. They have a row for each token, whatever
/// pages and splits are.
pub const STAGES: [Stage; 6] =
    [Stage::Q, Stage::KvCNormed, Stage::KPe, Stage::Lse, Stage::AttnOut, Stage::Out];

/// A row of the base.
struct BaseRow<'a> {
    tensor: &'a Tensor,
    form: Option<Form>,
    row: usize,
}

/// Takes a variant's tensors as they are judged, and compares them with the base's.
pub struct Against<'a> {
    /// What the base computed.
    pub kept: &'a Kept,
    /// The base's case: places are named in it.
    pub case: &'a Case,
    /// The variant.
    pub changed: &'a Changed,
    /// What was compared, in the order of judgement.
    pub found: Vec<Difference>,
}

impl Recorder for Against<'_> {
    fn record(&mut self, id: TensorId, engine: &Tensor, _: &Tensor) -> Result<(), SinkError> {
        if STAGES.contains(&id.stage) {
            let rows = self.rows(id);
            self.found.extend(between(id, engine, &rows, self.case));
        }
        Ok(())
    }
}

impl<'a> Against<'a> {
    /// The base's row for each row of the variant. Where a request went another way in the base, its row of the other form.
    fn rows(&self, id: TensorId) -> Vec<Option<BaseRow<'a>>> {
        let origin = &self.changed.origin;
        let Some(form) = id.form else {
            let base = self.kept.get(&id);
            let from = |t: &usize| base.map(|tensor| BaseRow { tensor, form: None, row: *t });
            return origin.tokens.iter().map(from).collect();
        };
        let other = Form::ALL.into_iter().filter(|f| *f != form);
        let ways: Vec<Form> = std::iter::once(form).chain(other).collect();
        let mut all = Vec::new();
        for (i, s, _) in self.changed.case.plan.attention_rows(id.form) {
            let (sequence, first) = origin.sequences.get(i).copied().unwrap_or_default();
            let found = ways.iter().find_map(|&form| {
                let tensor = self.kept.get(&TensorId::of(id.stage, form))?;
                let mut rows = self.case.plan.attention_rows(Some(form));
                Some((tensor, form, rows.find(|(at, _, _)| *at == sequence)?.2.start + first))
            });
            let row = |j| found.map(|(tensor, form, at)| BaseRow { tensor, form: Some(form), row: at + j });
            all.extend((0..s.tokens.len()).map(row));
        }
        all
    }
}

/// The forms of one run beside each other, where both compute the same rows: under the absorbed form's name.
pub fn forms(kept: &Kept, case: &Case) -> Vec<Difference> {
    let both = STAGES.iter().filter_map(|&stage| {
        let [fused, absorbed] = [Form::Fused, Form::Absorbed].map(|form| TensorId::of(stage, form));
        let other = kept.get(&absorbed).filter(|_| absorbed.form.is_some())?;
        let tensor = kept.get(&fused)?;
        let from = |row| Some(BaseRow { tensor, form: absorbed.form, row });
        between(absorbed, other, &(0..tensor.rows).map(from).collect::<Vec<_>>(), case)
    });
    both.collect()
}

/// What differs. `rows`: the base's row for each row of the variant. None where nothing can be held against each other.
fn between(id: TensorId, variant: &Tensor, rows: &[Option<BaseRow>], case: &Case) -> Option<Difference> {
    if variant.rows != rows.len() {
        return None;
    }
    let mut d = Difference::none(id.stage.name(), id.form);
    let (mut squares, mut size) = (0.0, 0.0);
    let (mut a, mut b) = (vec![0.0; variant.cols], vec![0.0; variant.cols]);
    for (row, from) in rows.iter().enumerate() {
        let Some(BaseRow { tensor: base, form, row: from }) = from else { continue };
        if (variant.cols, variant.dtype) != (base.cols, base.dtype) || *from >= base.rows {
            continue;
        }
        variant.read(row, 0..base.cols, &mut a);
        base.read(*from, 0..base.cols, &mut b);
        d.elements += base.cols as u64;
        for (col, (a, b)) in a.iter().zip(&b).enumerate() {
            // NaN has many bit patterns, and says nothing on both sides.
            if variant.bits(row, col) != base.bits(*from, col) && !(a.is_nan() && b.is_nan()) {
                d.differ += 1;
                let form = form.unwrap_or(Form::Fused);
                d.first.get_or_insert_with(|| place(case, form, id.stage, base, *from, col));
            }
            if !a.is_finite() || !b.is_finite() {
                d.not_finite += u64::from(a.is_finite() != b.is_finite());
                continue;
            }
            squares += (a - b) * (a - b);
            size += b * b;
            if a != b {
                d.ulps = d.ulps.max((a - b).abs() / base.dtype.spacing(a.abs().max(b.abs())));
            }
        }
    }
    d.relative_l2 = if squares == 0.0 { 0.0 } else { (squares / size).sqrt() };
    (d.elements > 0).then_some(d)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_numeric::DType;

    fn tensor(rows: &[[f64; 2]]) -> Tensor {
        let values: Vec<f64> = rows.iter().flatten().copied().collect();
        Tensor {
            dtype: DType::Bf16,
            axes: Vec::new(),
            shape: vec![rows.len(), 2],
            rows: rows.len(),
            cols: 2,
            bytes: DType::Bf16.encode(&values),
        }
    }

    /// Rows 1 and 0 of the base: an ulp of bf16 in [1, 2) is 2⁻⁷; √(2⁻¹⁴ / (1 + 4 + 9)) of NaN left out.
    #[test]
    fn differences_by_hand() {
        let plan =
            mla_reference::Plan { positions: vec![0, 1], token_request: vec![0, 0], ..Default::default() };
        let batch = "0+2".parse().unwrap();
        let case = Case { batch, regimes: vec![], plan, given: Default::default(), notes: vec![] };
        let base = tensor(&[[1.0, 2.0], [3.0, f64::NAN]]);
        let id = TensorId::shared(Stage::KPe);
        let of = |variant: &Tensor, rows: &[usize]| {
            let from = |r: &usize| Some(BaseRow { tensor: &base, form: None, row: *r });
            between(id, variant, &rows.iter().map(from).collect::<Vec<_>>(), &case)
        };
        let same = of(&tensor(&[[3.0, f64::NAN], [1.0, 2.0]]), &[1, 0]).unwrap();
        assert_eq!((same.elements, same.differ, same.relative_l2, same.first), (4, 0, 0.0, None));
        let step = f64::powi(2.0, -7);
        let other = tensor(&[[3.0, f64::NAN], [1.0 + step, 2.0]]);
        let d = of(&other, &[1, 0]).unwrap();
        assert_eq!((d.differ, d.ulps, d.not_finite), (1, 1.0, 0));
        assert!((d.relative_l2 - step / 14f64.sqrt()).abs() < 1e-15, "{d:?}");
        assert!(d.first.unwrap().starts_with("k_pe, request 0+2 token 0"));
        let odd = of(&tensor(&[[f64::NAN, 2.0]]), &[0]).unwrap();
        assert_eq!((odd.differ, odd.not_finite), (1, 1));
        // Another number of rows is nothing to compare; a row that the base lacks is left out.
        assert!(of(&other, &[0]).is_none());
        assert_eq!(of(&other, &[1, 2]).unwrap().elements, 2);
    }
}
