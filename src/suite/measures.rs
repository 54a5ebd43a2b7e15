/*!
What common measures say of a tensor beside a right engine's: norms within 10 %, cosine above 0.99, NMSE up to 5e-4, allclose with
1e-2 absolute and relative.

They are asked as people ask them while debugging: against the same tensor of an implementation that is right, the clean twin
of the run. So the layer's output shows what its fault makes of it from the start.
*/

use super::runs::Ran;
use crate::judge::gates::Gates;
use crate::trace::TensorId;
use crate::written::text;
use serde::Serialize;

/// Names, in the order of [`Said::seen`].
pub const NAMES: [&str; 4] = ["norm", "cosine", "nmse", "allclose"];
/// How far a norm may be off.
const NORM: f64 = 0.1;

/// What the measures say of one tensor.
#[derive(Clone, Debug, Serialize)]
pub struct Said {
    /// The tensor.
    pub tensor: String,
    /// Its L2 norm beside the twin's: |ratio − 1|, as text.
    #[serde(with = "text")]
    pub norm: f64,
    /// Cosine, as text.
    #[serde(with = "text")]
    pub cosine: f64,
    /// Normalised mean square error, as text.
    #[serde(with = "text")]
    pub nmse: f64,
    /// max |a − b| / (1e-2 + 1e-2 |b|), as text.
    #[serde(with = "text")]
    pub allclose: f64,
    seen: [bool; NAMES.len()],
}

impl Said {
    /// Which of them would have rejected it.
    pub fn seen(&self) -> [bool; NAMES.len()] {
        self.seen
    }
}

/// Asks about one tensor; None where either run has none, or one of another shape.
pub fn of(ran: &Ran, twin: &Ran, id: TensorId) -> Option<Said> {
    let (a, b) = (ran.tensors.get(&id)?, twin.tensors.get(&id)?);
    if (a.rows, a.cols, a.dtype) != (b.rows, b.cols, b.dtype) {
        return None;
    }
    let mut gates = Gates::default();
    let (mut x, mut y) = (vec![0.0; a.cols], vec![0.0; a.cols]);
    let (mut aa, mut bb, mut lost) = (0.0, 0.0, false);
    for r in 0..a.rows {
        a.read(r, 0..a.cols, &mut x);
        b.read(r, 0..b.cols, &mut y);
        for (x, y) in x.iter().zip(&y).filter(|(_, y)| y.is_finite()) {
            (aa, bb) = (aa + x * x, bb + y * y);
            lost |= !x.is_finite();
        }
        gates.row((r, 0), &x, &y, None, a.dtype);
    }
    let rules = gates.rules(false);
    let rule = |name: &str| rules.iter().find(|r| r.rule == name);
    let value = |name: &str| rule(name).map_or(f64::NAN, |r| r.value);
    let off = match (lost, bb > 0.0) {
        (true, _) => f64::INFINITY,
        (_, true) => ((aa / bb).sqrt() - 1.0).abs(),
        (_, false) => {
            if aa > 0.0 {
                f64::INFINITY
            } else {
                0.0
            }
        }
    };
    let fails = |name: &str| rule(name).is_some_and(|r| !r.passed);
    Some(Said {
        tensor: id.to_string(),
        norm: off,
        cosine: value("cosine"),
        nmse: value("nmse"),
        allclose: value("allclose"),
        seen: [off > NORM, fails("cosine"), fails("nmse"), fails("allclose")],
    })
}
