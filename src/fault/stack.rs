/*!
Stacks of which a slot holds other rows than it should.

The engine lays q_a and kv_a as it is given them and reads the declared slots, so a wrong layout is a transform of the
layer: each weight becomes the rows that its slot really holds.
*/

use super::{Fault, FaultError, Kind};
use mla_reference::product::Rows;
use mla_reference::rows::{Part, Stacked};
use mla_reference::{Weight, Weights};

/// Rows of a slot, from wherever they were taken.
pub type SlotRows<'a> = Stacked<Part<'a>>;

/// What the slots of qkv_a hold under a fault of stacks; nothing under another one.
///
/// # Errors
/// Nothing to stack; a fault that changes nothing here.
pub fn slots<'a>(fault: &Fault, weights: &'a dyn Weights) -> Result<Vec<(Weight, SlotRows<'a>)>, FaultError> {
    if !fault.stacks() {
        return Ok(Vec::new());
    }
    let nowhere = |what: &str, mend: &str| {
        Err(FaultError::Nowhere(what.to_string(), fault.text.clone(), mend.to_string()))
    };
    let (Some(q_a), Some(kv_a)) = (weights.matrix(Weight::WQA), weights.matrix(Weight::WKvA)) else {
        return nowhere(
            "this layer projects queries at once: there is no q_a to stack with kv_a",
            "choose a layer with attn_q_a, or another fault",
        );
    };
    let (r, all) = (q_a.rows(), q_a.rows() + kv_a.rows());
    match fault.kind {
        // A GGUF file has kv_a before q_a: laid so, and read by the declared slots.
        Kind::SlotsPermuted => {
            let laid = [kv_a, q_a];
            Ok(vec![(Weight::WQA, taken(laid, 0, r)), (Weight::WKvA, taken(laid, r, all - r))])
        }
        Kind::CutAt(late) => Ok(vec![(Weight::WKvA, taken([q_a, kv_a], (r + late) % all, all - r))]),
        _ if all / 2 == r => {
            nowhere("q_a has as many rows as kv_a: equal chunks are the slots", "choose another fault")
        }
        _ => Ok(vec![(Weight::WKvA, taken([q_a, kv_a], all / 2, all - r))]),
    }
}

/// So many rows of two matrices under each other from `start` on, beginning anew at their end.
fn taken<'a>(parts: [&'a dyn Rows; 2], start: usize, count: usize) -> SlotRows<'a> {
    let mut out = Vec::new();
    let (mut at, mut left) = (start, count);
    while left > 0 {
        let first = parts[0].rows();
        let (inner, from) = if at < first { (parts[0], at) } else { (parts[1], at - first) };
        let n = (inner.rows() - from).min(left);
        out.push(Part { inner, rows: from..from + n });
        left -= n;
        at = (at + n) % (first + parts[1].rows());
    }
    Stacked { parts: out }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::product::Dense;

    fn held(of: &SlotRows) -> Vec<f64> {
        let mut out = [0.0];
        (0..of.rows())
            .map(|r| {
                of.decode(r, 0, &mut out);
                out[0]
            })
            .collect()
    }

    #[test]
    fn rows_are_taken_across_the_seam_and_begin_anew_at_the_end() {
        let (a, b) = ([0.0, 1.0, 2.0], [10.0, 11.0, 12.0, 13.0, 14.0]);
        let (a, b) = (Dense { data: &a, cols: 1 }, Dense { data: &b, cols: 1 });
        assert_eq!(held(&taken([&b, &a], 0, 3)), [10.0, 11.0, 12.0]);
        assert_eq!(held(&taken([&b, &a], 3, 5)), [13.0, 14.0, 0.0, 1.0, 2.0]);
        // Cut in the middle where the second part is the longer one: its last rows are the stack's first.
        assert_eq!(held(&taken([&a, &b], 4, 5)), [11.0, 12.0, 13.0, 14.0, 0.0]);
    }
}
