/*!
Two dumps of the same layer side by side: where two engines differ, and by how much.

Shown, never judged: each dump has its own verdict, from its own inputs. Two engines that both round correctly differ all
the same, and the further from the start of the layer the more; a tensor in which one is at fault stands out against those before it.
*/

use crate::judge::{Digest, Unit};
use crate::trace::{Tensor, TensorId};
use mla_reference::Stage;
use serde::{Deserialize, Serialize};

/// A tensor of two dumps.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Beside {
    /// Which.
    #[serde(skip, default = "unread")]
    pub id: TensorId,
    /// Its name, form before it.
    pub tensor: String,
    /// What keeps it from being held against the other, in words: one lacks it, shapes differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub apart: Option<String>,
    /// Elements.
    pub elements: u64,
    /// Elements of the same value.
    pub same: u64,
    /// Root mean square of the difference over that of the first.
    #[serde(deserialize_with = "crate::written::number")]
    pub difference: f64,
    /// Norm and checksum of each.
    pub digests: [Option<Digest>; 2],
}

/// Which tensor it is, a report has in words alone.
fn unread() -> TensorId {
    TensorId::shared(Stage::Hidden)
}

/// Two captures of a layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pair {
    /// Layer.
    pub layer: usize,
    /// Engines.
    pub engines: [String; 2],
    /// Tensors, in the order of judgement.
    pub tensors: Vec<Beside>,
}

/// Holds the tensors of two captures against each other.
pub fn pair(layer: usize, engines: [String; 2], a: &[(TensorId, Tensor)], b: &[(TensorId, Tensor)]) -> Pair {
    let mut ids: Vec<TensorId> = a.iter().chain(b).map(|t| t.0).collect();
    ids.sort_by_key(|id| (id.form, id.stage));
    ids.dedup();
    let find = |of: &'_ [(TensorId, Tensor)], id: TensorId| of.iter().position(|t| t.0 == id);
    let tensors = ids.into_iter().map(|id| {
        let (x, y) = (find(a, id).map(|i| &a[i].1), find(b, id).map(|i| &b[i].1));
        beside(id, x, y)
    });
    Pair { layer, engines, tensors: tensors.collect() }
}

fn beside(id: TensorId, a: Option<&Tensor>, b: Option<&Tensor>) -> Beside {
    let digest = |t: Option<&Tensor>| t.and_then(|t| Unit::digest(id, t).reference);
    let mut found = Beside {
        id,
        tensor: id.to_string(),
        apart: None,
        elements: 0,
        same: 0,
        difference: 0.0,
        digests: [digest(a), digest(b)],
    };
    let (Some(a), Some(b)) = (a, b) else {
        let which = if a.is_some() { "second" } else { "first" };
        found.apart = Some(format!("not in the {which}"));
        return found;
    };
    if a.shape != b.shape {
        found.apart = Some(format!("shapes {:?} and {:?}", a.shape, b.shape));
        return found;
    }
    let (x, y) = (values(a), values(b));
    let (mut off, mut size) = (0.0, 0.0);
    for (x, y) in x.iter().zip(&y) {
        found.same += u64::from(x == y || x.is_nan() && y.is_nan());
        if x.is_finite() && y.is_finite() {
            off += (x - y) * (x - y);
            size += x * x;
        }
    }
    found.elements = x.len() as u64;
    found.difference = if size > 0.0 { (off / size).sqrt() } else { off.sqrt() };
    found
}

fn values(t: &Tensor) -> Vec<f64> {
    let mut all = vec![0.0; t.len()];
    t.dtype.decode(&t.bytes, &mut all);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_numeric::DType;
    use mla_reference::{Axis, Stage};

    #[test]
    fn what_differs_is_counted_and_what_is_not_there_is_said() {
        let tensor = |v: &[f64]| {
            let mut bytes = vec![0; v.len() * 4];
            DType::F32.encode_into(v, &mut bytes);
            let (rows, cols) = (1, v.len());
            Tensor {
                dtype: DType::F32,
                axes: vec![Axis::Token, Axis::Hidden],
                shape: vec![1, cols],
                rows,
                cols,
                bytes,
            }
        };
        let id = TensorId::shared;
        let a = [(id(Stage::Hidden), tensor(&[3.0, 4.0])), (id(Stage::QA), tensor(&[1.0]))];
        let b = [(id(Stage::Hidden), tensor(&[3.0, 4.5])), (id(Stage::KvA), tensor(&[1.0]))];
        let p = pair(0, ["a".into(), "b".into()], &a, &b);
        let t = &p.tensors[0];
        assert_eq!((t.elements, t.same, t.difference), (2, 1, 0.1));
        let apart: Vec<Option<&str>> = p.tensors.iter().map(|t| t.apart.as_deref()).collect();
        assert_eq!(apart, [None, Some("not in the second"), Some("not in the first")]);
    }
}
