/*!
Requests and options under which faults inside kernels act: few, so that rows share their runs without a fault.

Batches are short, since the PTX machine takes its time; each has what some faults need: a tile and a bit, a page and a
bit, several splits, one that sees no key, a block of rows that is not full.
*/

use mla_numeric::DType;
use mla_reference::{Form, Geometry, GgmlType};

/// Widths that rows were proven on: small, the last terms of q_b no whole tile, heads no multiple of anything.
pub const GEOMETRY: Geometry =
    Geometry { hidden: 64, heads: 5, q_rank: 40, latent: 128, rope: 16, nope: 32, value: 32 };

/// A run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shows {
    /// Name.
    pub name: &'static str,
    /// Form.
    pub form: Form,
    /// Dtype of tensors.
    pub dtype: DType,
    /// Requests, as `--batch` takes them.
    pub batch: &'static str,
    /// Slots of a page.
    pub page_size: usize,
    /// Splits of the keys in decode.
    pub splits: usize,
    /// Keys of a chunk of the context, where there are chunks.
    pub context_chunk: Option<usize>,
    /// Type that weights must be stored in, where it is their decoding that is wrong.
    pub stored: Option<GgmlType>,
}

/// One block of rows, two tiles of keys; some tokens on a context.
pub(super) const PREFILL: Shows = Shows {
    name: "prefill",
    form: Form::Fused,
    dtype: DType::Bf16,
    batch: "0+67,18+3",
    page_size: 16,
    splits: 1,
    context_chunk: None,
    stored: None,
};
/// All keys in one tile.
pub(super) const ONE_TILE: Shows = Shows { name: "prefill in one tile", batch: "0+40,20+30", ..PREFILL };
/// Tiles of 64 keys with some left over, one row each.
pub(super) const DECODE: Shows = Shows { name: "decode", batch: "100+1,70+1", ..PREFILL };
/// The same in three splits.
pub(super) const SPLIT: Shows = Shows { name: "decode in splits", splits: 3, ..DECODE };
/// A context in chunks.
pub(super) const CHUNKED: Shows =
    Shows { name: "prefill in chunks", batch: "100+3", context_chunk: Some(64), ..PREFILL };
/// 16 rows a block, tiles of 32 keys with some left over.
pub(super) const LATENT: Shows = Shows { name: "absorbed decode", form: Form::Absorbed, ..DECODE };
/// The same in three splits.
pub(super) const LATENT_SPLIT: Shows = Shows { name: "absorbed decode in splits", splits: 3, ..LATENT };
/// Splits of which most see no key.
pub(super) const LATENT_EMPTY: Shows =
    Shows { name: "absorbed decode, empty splits", batch: "2+1,40+1", splits: 4, ..LATENT };
/// 32 rows a block, some tokens on a context.
pub(super) const LATENT_FEW: Shows = Shows { name: "absorbed, some tokens", batch: "40+4,70+5", ..LATENT };
/// 64 rows a block, the last one not full.
pub(super) const LATENT_PREFILL: Shows = Shows { name: "absorbed prefill", batch: "0+14,30+7", ..LATENT };
/// Without tensor cores.
pub(super) const PREFILL_F32: Shows =
    Shows { name: "prefill in f32", dtype: DType::F32, batch: "0+30,40+3", ..PREFILL };
/// One row each, whose last tile is not full.
pub(super) const DECODE_F32: Shows =
    Shows { name: "decode in f32", dtype: DType::F32, batch: "40+1,70+1", ..PREFILL };
/// Some tokens without tensor cores, absorbed.
pub(super) const LATENT_F32: Shows = Shows {
    name: "absorbed, some tokens, in f32",
    form: Form::Absorbed,
    dtype: DType::F32,
    batch: "40+3,70+1",
    ..PREFILL
};
/// What comes before attention: as short as it may be.
pub(super) const SHORT: Shows = Shows { name: "short", form: Form::Absorbed, batch: "0+9,20+2", ..PREFILL };

/// A weight of a type, decoded by a kernel.
pub(super) const fn stored(name: &'static str, ty: GgmlType) -> Shows {
    Shows { name, batch: "0+1", stored: Some(ty), ..LATENT }
}
