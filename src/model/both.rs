/*!
A layer that holds its decompression weight twice: attn_kv_b beside attn_k_b and attn_v_b.

Engines take one or the other, so it matters whether they say the same. The two were quantised separately, attn_k_b
along other rows, so that they never agree exactly. How far they may be apart follows from the block types: an element
of a block whose largest magnitude is A is off by at most e·A, with e of [`coarseness`]. If errors are spread evenly
in ±e·A, the mean square of a difference is the mean of (e₁·A₁)² / 3 + (e₂·A₂)² / 3; what is above that in some head, or
above three times e₁·A₁ + e₂·A₂ in some element, is no rounding. (Three times: a quantiser with an importance matrix
clips what matters little.)
*/

use super::weights::LEGACY;
use super::{Held, ModelError, Source};
use mla_reference::product::Rows;
use mla_reference::rows::dense;
use mla_reference::{Geometry, GgmlType, Weight};
use ndarray::{Array2, ArrayView2, s};
use std::fmt;

/// How far a split weight and the same rows of attn_kv_b are apart.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Difference {
    /// The split tensor's full name.
    pub tensor: String,
    /// Its type and that of attn_kv_b.
    pub types: [String; 2],
    /// Largest difference, relative to the largest value.
    pub largest: f64,
    /// Root mean square of the difference, relative to that of the values.
    pub rms: f64,
    /// The head where the mean square is largest against what rounding allows, and the root of that quotient.
    pub worst: (usize, f64),
    /// Elements that are further apart than three times what rounding can do.
    pub beyond: usize,
    /// Elements in all.
    pub elements: usize,
}

impl Difference {
    /// Whether block types do not explain it.
    pub fn too_far(&self) -> bool {
        self.beyond > 0 || self.worst.1 > 1.0 || !self.rms.is_finite()
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [own, whole] = &self.types;
        if self.beyond == 0 && self.largest == 0.0 {
            return write!(f, "{} ({own}) is used; {LEGACY} ({whole}) holds the same values", self.tensor);
        }
        write!(
            f,
            "{} ({own}) is used; {LEGACY} ({whole}) holds the same weight {:.1e} of the largest value away at most, rms {:.1e} of its rms: ",
            self.tensor, self.largest, self.rms
        )?;
        if !self.too_far() {
            return write!(f, "as far as two roundings are");
        }
        write!(f, "further than two roundings of these types (most in head {}", self.worst.0)?;
        if self.beyond > 0 {
            write!(f, "; {} of {} elements", self.beyond, self.elements)?;
        }
        write!(f, "); an engine that reads {LEGACY} computes something else")
    }
}

/// The largest error of a stored value, relative to the largest magnitude of its block: half of the largest gap
/// between neighbouring values of a block that is used to its ends, and half a step of a scale that is itself stored in few bits.
fn coarseness(ty: &str) -> f64 {
    match ty {
        "F64" | "F32" => 1.0 / (1u64 << 24) as f64,
        "F16" => 1.0 / 2048.0,
        "BF16" => 1.0 / 256.0,
        "Q6_K" => 1.0 / 32.0,
        // One end of the range is a step short.
        "Q5_0" => 1.0 / 16.0,
        "Q5_1" | "Q5_K" => 1.0 / 31.0 + 1.0 / 63.0,
        "Q4_0" => 1.0 / 8.0,
        "Q4_1" | "Q4_K" => 1.0 / 15.0 + 1.0 / 63.0,
        "IQ4_NL" | "IQ4_XS" => 14.0 / 127.0 + 1.0 / 32.0,
        "Q3_K" => 1.0 / 4.0 + 1.0 / 32.0,
        "Q2_K" => 1.0 / 3.0 + 1.0 / 15.0,
        _ if ty.starts_with("Q8") => 1.0 / 254.0,
        // E2M1: half of the gap from 4 to 6, and a scale that does not fit the largest value.
        _ if ty.contains("FP4") => 1.0 / 3.0,
        _ if ty.starts_with("IQ3") => 1.0 / 2.0,
        _ => 1.0,
    }
}

/// Both parts of a layer that has all three tensors; nothing of any other.
///
/// # Errors
/// Tensors that can't be read, or have other shapes.
pub(super) fn differences(
    source: &Source,
    layer: usize,
    g: &Geometry,
) -> Result<Vec<Difference>, ModelError> {
    let parts = [Weight::WUk, Weight::WUv];
    let kv_b = Held::KvB(Weight::WUk);
    if !source.holds(layer, kv_b) || !parts.iter().all(|w| source.holds(layer, Held::Weight(*w))) {
        return Ok(Vec::new());
    }
    let whole = source.take(layer, kv_b, g)?;
    let mut all = Vec::new();
    for weight in parts {
        let own = source.take(layer, Held::Weight(weight), g)?;
        let (near, far) = ((own.rows.as_ref(), own.ty.as_str()), (whole.rows.as_ref(), whole.ty.as_str()));
        all.push(difference(weight, own.tensor.clone(), near, far, g));
    }
    Ok(all)
}

fn difference(
    weight: Weight,
    tensor: String,
    (own, own_ty): (&dyn Rows, &str),
    (kv_b, kv_b_ty): (&dyn Rows, &str),
    g: &Geometry,
) -> Difference {
    let (e_own, e_whole) = (coarseness(own_ty), coarseness(kv_b_ty));
    let (mut largest, mut value, mut beyond, mut elements) = (0.0f64, 0.0f64, 0, 0);
    let (mut of_difference, mut of_values) = (0.0, 0.0);
    let mut worst = (0, 0.0);
    let rows = own.rows() / g.heads.max(1);
    for h in 0..g.heads {
        let a = dense(own, h * rows..(h + 1) * rows, false);
        let first = h * (g.nope + g.value);
        let (mut b, transposed) = match weight {
            Weight::WUk => (dense(kv_b, first..first + g.nope, false), true),
            _ => (dense(kv_b, first + g.nope..first + g.nope + g.value, false), false),
        };
        let (near, mut far) = (peaks(a.view(), own_ty), peaks(b.view(), kv_b_ty));
        if transposed {
            (b, far) = (b.reversed_axes(), far.reversed_axes());
        }
        let (mut square, mut allowed) = (0.0, 0.0);
        for (((x, y), p), q) in a.iter().zip(&b).zip(&near).zip(&far) {
            let (d, p, q) = ((x - y).abs(), e_own * p, e_whole * q);
            largest = largest.max(d);
            value = value.max(x.abs()).max(y.abs());
            square += d * d;
            of_values += x * x;
            allowed += (p * p + q * q) / 3.0;
            beyond += usize::from(d.is_nan() || d > 3.0 * (p + q));
        }
        elements += a.len();
        of_difference += square;
        let share = if square == 0.0 { 0.0 } else { (square / allowed).sqrt() };
        if share.is_nan() || share > worst.1 {
            worst = (h, share);
        }
    }
    let ratio = |a: f64, b: f64| if a == 0.0 { 0.0 } else { a / b };
    Difference {
        tensor,
        types: [own_ty, kv_b_ty].map(String::from),
        largest: ratio(largest, value),
        rms: ratio(of_difference, of_values).sqrt(),
        worst,
        beyond,
        elements,
    }
}

/// The largest magnitude in each element's block.
fn peaks(of: ArrayView2<f64>, ty: &str) -> Array2<f64> {
    let known = GgmlType::ALL.iter().find(|t| t.name() == ty);
    let width = known.map_or(of.ncols(), |t| t.block_elements()).max(1);
    let mut out = of.mapv(f64::abs);
    for first in (0..of.ncols()).step_by(width) {
        let mut part = out.slice_mut(s![.., first..(first + width).min(of.ncols())]);
        for mut row in part.rows_mut() {
            let peak = row.iter().fold(0.0f64, |m, v| m.max(*v));
            row.fill(peak);
        }
    }
    out
}
