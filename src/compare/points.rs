/*!
The attention's output at two places: as the attention returned it, and as the output projection reads it.

They are the same tensor, bit for bit, or the output was written elsewhere: a custom operator that the compiler gave a copy,
another alias that was read. Addresses are no evidence (the right bits may lie elsewhere), bits are.
*/

use crate::judge::{Unit, Verdict, Which};
use crate::trace::{Tensor, TensorId};
use mla_reference::Axis;

/// Name of the unit in reports.
const CALLER: &str = "attn_out@caller";

/// Holds what the output projection reads against what the attention returned.
pub fn compare(id: TensorId, kernel: &Tensor, caller: &Tensor) -> Unit {
    let n = kernel.dtype.bytes();
    if (kernel.dtype, &kernel.shape) != (caller.dtype, &caller.shape) {
        let what = format!(
            "the attention returned {} {:?}, the output projection reads {} {:?}",
            kernel.dtype, kernel.shape, caller.dtype, caller.shape
        );
        return unit(id, caller, Verdict::Fault, vec![what]);
    }
    let pairs = || kernel.bytes.chunks_exact(n).zip(caller.bytes.chunks_exact(n));
    let off = pairs().filter(|(a, b)| a != b).count();
    if off == 0 {
        let mut same = unit(id, caller, Verdict::Exact, Vec::new());
        same.note = Some("bit for bit what the attention returned".into());
        return same;
    }
    let mut evidence = vec![format!(
        "output written elsewhere: {off} of {} elements that the output projection reads are not those that the attention returned",
        caller.len()
    )];
    evidence.extend(holds(kernel, caller));
    let mut other = unit(id, caller, Verdict::Fault, evidence);
    other.flips = off as u64;
    other
}

/// The output projection read something, and nobody saw the attention return anything.
pub fn unseen(id: TensorId) -> Unit {
    let note = "what the attention returned was not there to be held against it";
    let mut unit = Unit::without_data(Which::Tensor(id), None, Verdict::NotCompared, note);
    (unit.tensor, unit.given) = (CALLER, true);
    unit
}

fn unit(id: TensorId, caller: &Tensor, verdict: Verdict, evidence: Vec<String>) -> Unit {
    let mut unit = Unit::without_data(Which::Tensor(id), None, verdict, "");
    (unit.tensor, unit.note) = (CALLER, None);
    (unit.axes, unit.shape) = (caller.axes.clone(), caller.shape.clone());
    (unit.dtype, unit.elements, unit.evidence) = (Some(caller.dtype), caller.len() as u64, evidence);
    unit
}

/// What the other buffer holds, where it is plain: nothing, the output's rows or heads in other places.
fn holds(kernel: &Tensor, caller: &Tensor) -> Vec<String> {
    let mut values = vec![0.0; caller.len()];
    caller.dtype.decode(&caller.bytes, &mut values);
    let count = |is: &dyn Fn(f64) -> bool| values.iter().filter(|v| is(**v)).count();
    let all = values.len();
    if count(&|v| v == 0.0) == all {
        return vec!["it holds zeros alone: it was never written".into()];
    }
    let odd = count(&|v| !v.is_finite());
    if odd > 0 {
        return vec![format!("{odd} of its elements are not finite: memory that was never written")];
    }
    let row = caller.cols * caller.dtype.bytes();
    let rows = |t: &'_ Tensor| t.bytes.chunks_exact(row).map(<[u8]>::to_vec).collect::<Vec<_>>();
    let (mine, theirs) = (rows(kernel), rows(caller));
    let wrong: Vec<usize> = (0..mine.len()).filter(|i| mine[*i] != theirs[*i]).collect();
    let moved = wrong.iter().filter(|i| mine.contains(&theirs[**i])).count();
    let zero = wrong.iter().filter(|i| theirs[**i].iter().all(|b| *b == 0)).count();
    let mut all = Vec::new();
    if wrong.len() < mine.len() {
        all.push(format!(
            "{} of {} rows are right; wrong are {}",
            mine.len() - wrong.len(),
            mine.len(),
            crate::model::list(&wrong)
        ));
    }
    if zero > 0 {
        all.push(format!("{zero} of the wrong rows hold zeros: they were never written"));
    } else if moved > 0 {
        all.push(format!("{moved} of the wrong rows are other rows of the output"));
    } else if let Some(text) = heads(kernel, caller) {
        all.push(text);
    }
    all
}

/// Heads that stand in another's place.
fn heads(kernel: &Tensor, caller: &Tensor) -> Option<String> {
    let at = caller.axes.iter().position(|a| *a == Axis::Head)?;
    let (count, width) = (caller.shape[at], caller.cols / caller.shape[at].max(1) * caller.dtype.bytes());
    let block = |t: &Tensor, h: usize| -> Vec<u8> {
        let row = t.cols * t.dtype.bytes();
        t.bytes.chunks_exact(row).flat_map(|r| r[h * width..(h + 1) * width].to_vec()).collect()
    };
    let own: Vec<Vec<u8>> = (0..count).map(|h| block(kernel, h)).collect();
    let found: Option<Vec<usize>> =
        (0..count).map(|h| own.iter().position(|o| *o == block(caller, h))).collect();
    Some(format!("its heads are those of the output in the order {:?}", found?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_numeric::DType;
    use mla_reference::{Form, Stage};

    fn tensor(values: &[f64]) -> Tensor {
        let mut bytes = vec![0; values.len() * 2];
        DType::Bf16.encode_into(values, &mut bytes);
        Tensor {
            axes: vec![Axis::Token, Axis::Head, Axis::Value],
            shape: vec![2, 3, values.len() / 6],
            rows: 2,
            cols: values.len() / 2,
            dtype: DType::Bf16,
            bytes,
        }
    }

    fn said(caller: &[f64]) -> (Verdict, String) {
        let kernel: Vec<f64> = (1..=12).map(f64::from).collect();
        let id = TensorId::of(Stage::AttnOut, Form::Fused);
        let u = compare(id, &tensor(&kernel), &tensor(caller));
        (u.verdict, u.evidence.join("; "))
    }

    #[test]
    fn another_buffer_is_told_by_its_bits_and_described() {
        let right: Vec<f64> = (1..=12).map(f64::from).collect();
        assert_eq!(said(&right), (Verdict::Exact, String::new()));
        let (v, text) = said(&[0.0; 12]);
        assert!(v == Verdict::Fault && text.contains("12 of 12") && text.contains("zeros alone"), "{text}");
        let mut nan = right.clone();
        nan[3] = f64::NAN;
        assert!(said(&nan).1.contains("not finite"));
        let mut half = right.clone();
        half[6..].fill(0.0);
        let text = said(&half).1;
        assert!(text.contains("1 of 2 rows are right") && text.contains("hold zeros"), "{text}");
        let swapped = [3.0, 4.0, 1.0, 2.0, 5.0, 6.0, 9.0, 10.0, 7.0, 8.0, 11.0, 12.0];
        assert!(said(&swapped).1.contains("[1, 0, 2]"));
    }
}
