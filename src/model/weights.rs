/*!
The weights of a layer by role: stored tensors behind the orientation of the stage table.

New layout: `attn_k_b` [H, L, N] and `attn_v_b` [H, V, L] (or the same bytes folded to two axes). Legacy:
`attn_kv_b` [H·(N+V), L], per head N key rows, then V value rows, from which w_uk is transposed. Nothing is
copied: values are decoded from the mapped file on demand (the legacy w_uk, a few percent of a layer, is
kept transposed).
*/

use super::source::{Held, Source, Taken};
use super::{ModelError, scale};
use crate::gguf::{Gguf, TensorInfo};
use mla_reference::dequant;
use mla_reference::product::{Blocks, Rows, Scaled};
use mla_reference::rows::dense;
use mla_reference::{Geometry, Weight, Weights};
use std::sync::OnceLock;

/// Layout of the decompression weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// attn_k_b and attn_v_b.
    Split,
    /// attn_kv_b.
    Legacy,
}

/// Where a role's values lie in the file.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Stored {
    /// Role.
    pub weight: Weight,
    /// Tensor's name in the file.
    pub tensor: String,
    /// ggml type's name.
    pub ty: String,
}

/// The weights of one layer.
pub struct LayerWeights<'a> {
    /// Layout of w_uk and w_uv.
    pub layout: Layout,
    /// Which tensor each role came from.
    pub stored: Vec<Stored>,
    matrices: Vec<(Weight, Box<dyn Rows + 'a>)>,
    norms: Vec<(Weight, Vec<f64>)>,
}

impl Weights for LayerWeights<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        self.matrices.iter().find(|(w, _)| *w == weight).map(|(_, m)| m.as_ref())
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.norms.iter().find(|(w, _)| *w == weight).map(|(_, v)| v.as_slice())
    }
}

impl<'a> LayerWeights<'a> {
    /// Finds and checks every weight of a layer.
    pub(super) fn load(
        source: &'a Source,
        layer: usize,
        g: &Geometry,
    ) -> Result<LayerWeights<'a>, ModelError> {
        let split = source.holds(layer, Held::Weight(Weight::WUk));
        let mut all = LayerWeights {
            layout: if split { Layout::Split } else { Layout::Legacy },
            stored: Vec::new(),
            matrices: Vec::new(),
            norms: Vec::new(),
        };
        for &weight in Weight::ALL.iter().filter(|w| w.exists(g)) {
            let from_kv_b = !split && matches!(weight, Weight::WUk | Weight::WUv);
            let held = if from_kv_b { Held::KvB(weight) } else { Held::Weight(weight) };
            let Taken { tensor, ty, rows } = source.take(layer, held, g)?;
            all.stored.push(Stored { weight, tensor, ty });
            if weight.is_norm() {
                all.norms.push((weight, dense(rows.as_ref(), 0..1, false).into_raw_vec_and_offset().0));
                continue;
            }
            let matrix: Box<dyn Rows + 'a> = match weight {
                Weight::WUk if from_kv_b => Box::new(KeyRows::new(rows, *g)),
                Weight::WUv if from_kv_b => Box::new(ValueRows { kv_b: rows, g: *g }),
                _ => rows,
            };
            all.matrices.push((weight, matrix));
        }
        Ok(all)
    }
}

/// A layer's tensor of a GGUF file, its shape checked.
pub(super) fn from_gguf<'a>(
    gguf: &'a Gguf,
    layer: usize,
    held: Held,
    g: &Geometry,
) -> Result<Taken<'a>, ModelError> {
    let (weight, from_kv_b) = held.weight();
    let name = gguf_name(layer, held);
    let info = gguf.tensor(&name).ok_or_else(|| ModelError::MissingTensor {
        name: name.clone(),
        file: file(gguf),
        wanted: format!("{} {:?}", weight, weight.shape(g)),
    })?;
    let (_, cols) = matrix(weight, g, from_kv_b);
    check_shape(gguf, info, weight, g, from_kv_b)?;
    let (scaled, rows) = values(gguf, info, cols)?;
    let ty = if scaled { format!("{} scaled", info.ty) } else { info.ty.to_string() };
    Ok(Taken { tensor: name, ty, rows })
}

/// A tensor's values in rows of `cols`, times its scale where it has one; whether it has.
pub(super) fn values<'a>(
    gguf: &'a Gguf,
    info: &TensorInfo,
    cols: usize,
) -> Result<(bool, Box<dyn Rows + 'a>), ModelError> {
    let rows = blocks(gguf, info, cols)?;
    Ok(match scale::of(gguf, &info.name, || file(gguf))? {
        None => (false, Box::new(rows)),
        Some(scale) => (true, Box::new(Scaled { rows, scale })),
    })
}

/// Name of a layer's tensor in a GGUF file.
pub(super) fn gguf_name(layer: usize, held: Held) -> String {
    let (weight, from_kv_b) = held.weight();
    format!("blk.{layer}.{}", if from_kv_b { LEGACY } else { weight.row().gguf })
}

/// The unsplit decompression weight's name, after `blk.N.`.
pub const LEGACY: &str = "attn_kv_b.weight";

fn file(gguf: &Gguf) -> String {
    gguf.parts().first().map(|p| p.path().display().to_string()).unwrap_or_default()
}

pub(super) fn blocks<'a>(gguf: &'a Gguf, info: &TensorInfo, cols: usize) -> Result<Blocks<'a>, ModelError> {
    let bytes = gguf.bytes(info)?;
    let undecodable = || ModelError::UnsupportedType {
        tensor: info.name.clone(),
        ty: info.ty.to_string(),
        file: file(gguf),
        supported: mla_reference::GgmlType::ALL
            .iter()
            .filter(|t| dequant::is_supported(**t))
            .map(|t| t.name())
            .collect::<Vec<_>>()
            .join(" "),
    };
    let ty = info.ty.known().ok_or_else(undecodable)?;
    Blocks::new(ty, bytes, cols).map_err(|_| undecodable())
}

/// Rows and columns of the tensor that holds a weight.
pub(super) fn matrix(weight: Weight, g: &Geometry, from_kv_b: bool) -> (usize, usize) {
    if from_kv_b { (g.heads * (g.nope + g.value), g.latent) } else { weight.matrix(g) }
}

/// The dimensions of the tensor that holds a weight, fastest first without trailing ones: as it should be, and
/// folded to two axes (the same bytes).
pub(super) fn dims(weight: Weight, g: &Geometry, from_kv_b: bool) -> (Vec<u64>, Vec<u64>) {
    let (rows, cols) = matrix(weight, g, from_kv_b);
    let mut folded = vec![cols as u64, rows as u64];
    let mut wanted: Vec<u64> = if from_kv_b || matches!(weight, Weight::WO | Weight::WQB | Weight::WQ) {
        folded.clone()
    } else {
        weight.shape(g).iter().rev().map(|n| *n as u64).collect()
    };
    for dims in [&mut wanted, &mut folded] {
        while dims.len() > 1 && dims.last() == Some(&1) {
            dims.pop();
        }
    }
    (wanted, folded)
}

fn check_shape(
    gguf: &Gguf,
    info: &TensorInfo,
    weight: Weight,
    g: &Geometry,
    from_kv_b: bool,
) -> Result<(), ModelError> {
    let (wanted, folded) = dims(weight, g, from_kv_b);
    if info.dims == wanted || info.dims == folded {
        return Ok(());
    }
    Err(ModelError::WrongShape {
        tensor: info.name.clone(),
        file: file(gguf),
        found: info.dims.clone(),
        wanted,
        role: format!(
            "{weight} [{}]",
            weight.row().axes.iter().map(|a| a.name()).collect::<Vec<_>>().join(", ")
        ),
    })
}

/// w_uk [H, L, N] out of kv_b [H·(N+V), L].
pub(crate) struct KeyRows<'a> {
    kv_b: Box<dyn Rows + 'a>,
    g: Geometry,
    heads: OnceLock<Vec<f64>>,
}

impl<'a> KeyRows<'a> {
    pub(crate) fn new(kv_b: Box<dyn Rows + 'a>, g: Geometry) -> KeyRows<'a> {
        KeyRows { kv_b, g, heads: OnceLock::new() }
    }
}

impl Rows for KeyRows<'_> {
    fn rows(&self) -> usize {
        self.g.heads * self.g.latent
    }
    fn cols(&self) -> usize {
        self.g.nope
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let g = &self.g;
        let all = self.heads.get_or_init(|| {
            (0..g.heads)
                .flat_map(|h| {
                    let first = h * (g.nope + g.value);
                    dense(self.kv_b.as_ref(), first..first + g.nope, true).into_raw_vec_and_offset().0
                })
                .collect()
        });
        let at = row * g.nope + k0;
        out.copy_from_slice(&all[at..at + out.len()]);
    }
    fn say(&self, to: &mut dyn FnMut(&[u8])) {
        to(format!("keys of kv_b, {:?};", self.g).as_bytes());
        self.kv_b.say(to);
    }
}

/// w_uv [H, V, L] out of kv_b.
pub(crate) struct ValueRows<'a> {
    pub(crate) kv_b: Box<dyn Rows + 'a>,
    pub(crate) g: Geometry,
}

impl Rows for ValueRows<'_> {
    fn rows(&self) -> usize {
        self.g.heads * self.g.value
    }
    fn cols(&self) -> usize {
        self.g.latent
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let (h, v) = (row / self.g.value, row % self.g.value);
        self.kv_b.decode(h * (self.g.nope + self.g.value) + self.g.nope + v, k0, out);
    }
    fn say(&self, to: &mut dyn FnMut(&[u8])) {
        to(format!("values of kv_b, {:?};", self.g).as_bytes());
        self.kv_b.say(to);
    }
}
