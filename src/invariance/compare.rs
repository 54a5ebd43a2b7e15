/*! Holding a tensor of a variant directly against the base run's: bit by bit, row by row, by request and token. */

use super::Kept;
use super::variants::Origin;
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

/// Takes a variant's tensors as they are judged, and compares them with the base's.
pub struct Against<'a> {
    /// What the base computed.
    pub kept: &'a Kept,
    /// The base's case: places are named in it.
    pub case: &'a Case,
    /// Rows of the base.
    pub origin: &'a Origin,
    /// What was compared, in the order of judgement.
    pub found: Vec<Difference>,
}

impl Recorder for Against<'_> {
    fn record(&mut self, id: TensorId, engine: &Tensor, _: &Tensor) -> Result<(), SinkError> {
        if let Some(base) = self.kept.get(&id) {
            self.found.extend(between(id, engine, base, self.origin.of(id.stage), self.case));
        }
        Ok(())
    }
}

/// The forms of one run beside each other: what both have, under the absorbed form's name.
pub fn forms(kept: &Kept, case: &Case) -> Vec<Difference> {
    let origin = Origin::same(case);
    let both = STAGES.iter().filter_map(|&stage| {
        let [fused, absorbed] = [Form::Fused, Form::Absorbed].map(|form| TensorId::of(stage, form));
        let other = kept.get(&absorbed).filter(|_| absorbed.form.is_some())?;
        between(absorbed, other, kept.get(&fused)?, origin.of(stage), case)
    });
    both.collect()
}

/// What differs. `rows`: the base's row for each row of the variant. None where the two can't be held against each other.
fn between(id: TensorId, variant: &Tensor, base: &Tensor, rows: &[usize], case: &Case) -> Option<Difference> {
    let shapes = variant.cols == base.cols && variant.dtype == base.dtype && variant.rows == rows.len();
    if !shapes || rows.iter().any(|r| *r >= base.rows) {
        return None;
    }
    let mut d = Difference::none(id.stage.name(), id.form);
    let (mut squares, mut size) = (0.0, 0.0);
    let (mut a, mut b) = (vec![0.0; base.cols], vec![0.0; base.cols]);
    for (row, &from) in rows.iter().enumerate() {
        variant.read(row, 0..base.cols, &mut a);
        base.read(from, 0..base.cols, &mut b);
        d.elements += base.cols as u64;
        for (col, (a, b)) in a.iter().zip(&b).enumerate() {
            // NaN has many bit patterns, and says nothing on both sides.
            if variant.bits(row, col) != base.bits(from, col) && !(a.is_nan() && b.is_nan()) {
                d.differ += 1;
                let form = id.form.unwrap_or(Form::Fused);
                d.first.get_or_insert_with(|| place(case, form, id.stage, base, from, col));
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
    Some(d)
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
        let case = Case {
            batch: "0+2".parse().unwrap(),
            regimes: Vec::new(),
            plan: mla_reference::Plan {
                positions: vec![0, 1],
                token_request: vec![0, 0],
                sequences: Vec::new(),
                page_size: 1,
                pages: 1,
                splits: 1,
                ..mla_reference::Plan::default()
            },
            given: Default::default(),
            notes: Vec::new(),
        };
        let base = tensor(&[[1.0, 2.0], [3.0, f64::NAN]]);
        let id = TensorId::shared(Stage::KPe);
        let same = between(id, &tensor(&[[3.0, f64::NAN], [1.0, 2.0]]), &base, &[1, 0], &case).unwrap();
        assert_eq!((same.elements, same.differ, same.relative_l2, same.first), (4, 0, 0.0, None));
        let step = f64::powi(2.0, -7);
        let other = tensor(&[[3.0, f64::NAN], [1.0 + step, 2.0]]);
        let d = between(id, &other, &base, &[1, 0], &case).unwrap();
        assert_eq!((d.differ, d.ulps, d.not_finite), (1, 1.0, 0));
        assert!((d.relative_l2 - step / 14f64.sqrt()).abs() < 1e-15, "{d:?}");
        assert!(d.first.unwrap().starts_with("k_pe, request 0+2 token 0"));
        let odd = between(id, &tensor(&[[f64::NAN, 2.0]]), &base, &[0], &case).unwrap();
        assert_eq!((odd.differ, odd.not_finite), (1, 1));
        assert!(between(id, &other, &base, &[0], &case).is_none());
        assert!(between(id, &other, &base, &[0, 2], &case).is_none());
    }
}
