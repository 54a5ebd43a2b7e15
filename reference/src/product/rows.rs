/*!
Where a product's weights come from: [`Rows`], and the plain sources.

A decorator (weights rounded to bf16, one element patched, rows gathered) implements [`Rows`] over another one and
changes what `decode` has written.
*/

use crate::dequant::{self, Decoder};
use crate::ggml::GgmlType;
use std::borrow::Cow;
use std::ops::Range;

/// A matrix of weights, read a part of a row at a time.
pub trait Rows: Sync {
    /// Rows, the M of a product.
    fn rows(&self) -> usize;
    /// Columns, the K of a product.
    fn cols(&self) -> usize;
    /// Writes columns `k0 .. k0 + out.len()` of a row. `k0` is a multiple of 256; `out` ends at the end of the row or
    /// at a multiple of 256 columns. Called once for each part by a product, in any order, from many threads.
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]);
    /// Type and bytes of all rows, one after another, where the matrix is ggml blocks and nothing else: for who decodes
    /// them itself.
    fn stored(&self) -> Option<(GgmlType, &[u8])> {
        None
    }
    /// Rows and columns that share a stored scale: a shard that begins or ends inside of such a block can't be cut from what
    /// is stored. (1, 1) where every value stands alone.
    fn grain(&self) -> (usize, usize) {
        (1, self.stored().map_or(1, |(ty, _)| ty.block_elements()))
    }
    /// Hands out bytes that say what the matrix is: two with the same bytes have the same values. Meant for hashing. What is
    /// stored says it in few; all else hands out every value.
    fn say(&self, to: &mut dyn FnMut(&[u8])) {
        if let Some((ty, bytes)) = self.stored() {
            to(format!("{ty} {} {};", self.rows(), self.cols()).as_bytes());
            return to(bytes);
        }
        to(format!("f64 {} {};", self.rows(), self.cols()).as_bytes());
        let (mut row, mut bytes) = (vec![0.0; self.cols()], Vec::new());
        for r in 0..self.rows() {
            self.decode(r, 0, &mut row);
            bytes.clear();
            bytes.extend(row.iter().flat_map(|v| v.to_le_bytes()));
            to(&bytes);
        }
    }
}

impl<R: Rows + ?Sized> Rows for &R {
    fn rows(&self) -> usize {
        (**self).rows()
    }
    fn cols(&self) -> usize {
        (**self).cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        (**self).decode(row, k0, out);
    }
    fn stored(&self) -> Option<(GgmlType, &[u8])> {
        (**self).stored()
    }
    fn grain(&self) -> (usize, usize) {
        (**self).grain()
    }
    fn say(&self, to: &mut dyn FnMut(&[u8])) {
        (**self).say(to);
    }
}

/// A matrix of ggml blocks, whole ones in each row.
pub struct Blocks<'a> {
    decoder: &'static Decoder,
    bytes: Cow<'a, [u8]>,
    cols: usize,
    row_bytes: usize,
}

/// Why bytes are no matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlocksError {
    /// The type has no decoder.
    Unsupported(GgmlType),
    /// A row would not be whole blocks, or has no columns.
    Columns(GgmlType, usize),
    /// The number of bytes is no whole number of rows (bytes, bytes of a row).
    Bytes(usize, usize),
    /// A shard would begin or end inside of a block (type, first column, end).
    Inside(GgmlType, usize, usize),
}

impl std::fmt::Display for BlocksError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BlocksError::Unsupported(ty) => write!(f, "type {ty} can't be decoded"),
            BlocksError::Columns(ty, cols) => {
                write!(
                    f,
                    "a row of {cols} elements is not whole blocks of {ty} ({} each)",
                    ty.block_elements()
                )
            }
            BlocksError::Inside(ty, from, to) => write!(
                f,
                "columns {from}..{to} do not begin and end with blocks of {ty} ({} each)",
                ty.block_elements()
            ),
            BlocksError::Bytes(bytes, row) => write!(f, "{bytes} bytes are not whole rows of {row} bytes"),
        }
    }
}

impl std::error::Error for BlocksError {}

impl<'a> Blocks<'a> {
    /// `bytes` as rows of `cols` elements of type `ty`.
    pub fn new(ty: GgmlType, bytes: &'a [u8], cols: usize) -> Result<Self, BlocksError> {
        let decoder = dequant::decoder(ty).ok_or(BlocksError::Unsupported(ty))?;
        if cols == 0 || !cols.is_multiple_of(ty.block_elements()) {
            return Err(BlocksError::Columns(ty, cols));
        }
        let row_bytes = (cols / ty.block_elements())
            .checked_mul(ty.block_bytes())
            .ok_or(BlocksError::Columns(ty, cols))?;
        if !bytes.len().is_multiple_of(row_bytes) {
            return Err(BlocksError::Bytes(bytes.len(), row_bytes));
        }
        Ok(Blocks { decoder, bytes: Cow::Borrowed(bytes), cols, row_bytes })
    }

    /// Some rows and columns of it, as whoever loads a shard takes them: stored blocks, nothing decoded. Rows alone are not
    /// copied.
    ///
    /// # Errors
    /// Columns that do not begin and end with a block, or are none.
    pub fn shard(self, rows: Range<usize>, cols: Range<usize>) -> Result<Blocks<'a>, BlocksError> {
        let ty = self.decoder.ty();
        let (each, size) = (ty.block_elements(), ty.block_bytes());
        if cols.is_empty()
            || cols.end > self.cols
            || !cols.start.is_multiple_of(each)
            || !cols.end.is_multiple_of(each)
        {
            return Err(BlocksError::Inside(ty, cols.start, cols.end));
        }
        let of_rows =
            rows.start.min(self.rows()) * self.row_bytes..rows.end.min(self.rows()) * self.row_bytes;
        let whole = cols.len() == self.cols;
        let bytes = match self.bytes {
            Cow::Borrowed(b) if whole => Cow::Borrowed(&b[of_rows]),
            b => {
                let own = cols.start / each * size..cols.end / each * size;
                Cow::Owned(
                    b[of_rows].chunks_exact(self.row_bytes).flat_map(|r| &r[own.clone()]).copied().collect(),
                )
            }
        };
        Ok(Blocks { decoder: self.decoder, bytes, cols: cols.len(), row_bytes: cols.len() / each * size })
    }
}

impl Rows for Blocks<'_> {
    fn rows(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }
    fn stored(&self) -> Option<(GgmlType, &[u8])> {
        Some((self.decoder.ty(), &self.bytes))
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let ty = self.decoder.ty();
        let (elements, bytes) = (ty.block_elements(), ty.block_bytes());
        let from = row * self.row_bytes + k0 / elements * bytes;
        self.decoder.decode(&self.bytes[from..from + out.len() / elements * bytes], out);
    }
}

/// A matrix times the scale that a checkpoint gives the whole tensor.
///
/// NVFP4 weights have one, a float32 that is in no block: GGUF has it as a tensor of one element, `blk.0.attn_output.scale`
/// for `blk.0.attn_output.weight`. With NVFP4 the product is exact: 24 significand bits times at most 6. Not
/// [stored](Rows::stored) as blocks and nothing else, so that nobody decodes the blocks and forgets the scale.
pub struct Scaled<R> {
    /// The matrix without its scale.
    pub rows: R,
    /// What every element is multiplied by.
    pub scale: f32,
}

impl<R: Rows> Rows for Scaled<R> {
    fn rows(&self) -> usize {
        self.rows.rows()
    }
    fn cols(&self) -> usize {
        self.rows.cols()
    }
    fn grain(&self) -> (usize, usize) {
        self.rows.grain()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        self.rows.decode(row, k0, out);
        let scale = f64::from(self.scale);
        out.iter_mut().for_each(|v| *v *= scale);
    }
    fn say(&self, to: &mut dyn FnMut(&[u8])) {
        to(format!("scaled {:08x};", self.scale.to_bits()).as_bytes());
        self.rows.say(to);
    }
}

/// A row-major matrix of float64.
pub struct Dense<'a> {
    /// `[rows, cols]`.
    pub data: &'a [f64],
    /// Elements of a row.
    pub cols: usize,
}

impl Rows for Dense<'_> {
    fn rows(&self) -> usize {
        self.data.len().checked_div(self.cols).unwrap_or(0)
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        out.copy_from_slice(&self.data[row * self.cols + k0..][..out.len()]);
    }
}

/// A float64 matrix whose rows lie `stride` apart: a head's columns of a wider tensor.
#[derive(Clone, Copy)]
pub struct Strided<'a> {
    /// From the first element of the first row.
    pub data: &'a [f64],
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Elements from a row's start to the next one's.
    pub stride: usize,
}

impl<'a> Strided<'a> {
    /// Columns `k0 .. k0 + n` of a row.
    pub(super) fn part(&self, row: usize, k0: usize, n: usize) -> &'a [f64] {
        &self.data[row * self.stride + k0..][..n]
    }
}

impl Rows for Strided<'_> {
    fn rows(&self) -> usize {
        self.rows
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        out.copy_from_slice(self.part(row, k0, out.len()));
    }
}
