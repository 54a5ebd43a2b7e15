/*!
Matrices as Hugging Face checkpoints hold them quantised: codes in one tensor, scales in others.

* [`Fp8`]: E4M3 codes, one scale for each block of the matrix (DeepSeek's 128 × 128, a row, all of it): code · scale. A code has
  4 significant bits, a float32 scale 24, so that float64 holds the product exactly.
* [`Nvfp4`]: E2M1 codes, two in a byte, the even column in the low nibble; an E4M3 scale for 16 columns, and a float32 scale of
  the whole tensor. NVIDIA's modelopt multiplies by it: 2 + 4 + 24 bits, exact. compressed-tensors divides by it: code · scale is
  exact (6 bits), the division rounds once, so that a value is within 2⁻⁵³ of itself.

The last block of an axis may be cut short: 576 rows in blocks of 128 have five scales, the fifth for 64 rows.
Layouts: the formats' own exporters (facts with the fixtures that hold their output).
*/

use super::Rows;
use mla_numeric::DType;

/// Columns that share a scale in NVFP4.
pub const GROUP: usize = 16;

/// Why tensors make no matrix: what has how many elements, and how many it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongCount {
    /// Which tensor.
    pub what: &'static str,
    /// Elements it has.
    pub found: usize,
    /// Elements that the matrix needs.
    pub needed: usize,
}

impl std::fmt::Display for WrongCount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} where the matrix needs {}", self.found, self.what, self.needed)
    }
}

impl std::error::Error for WrongCount {}

fn count(what: &'static str, found: usize, needed: usize) -> Result<(), WrongCount> {
    if found == needed { Ok(()) } else { Err(WrongCount { what, found, needed }) }
}

/// E4M3 codes, a scale for each block.
pub struct Fp8<'a> {
    codes: &'a [u8],
    rows: usize,
    cols: usize,
    block: (usize, usize),
    scales: Vec<f64>,
}

impl<'a> Fp8<'a> {
    /// `codes` [rows, cols]; `scales` [⌈rows / block.0⌉, ⌈cols / block.1⌉]. A block longer than an axis is all of it.
    ///
    /// # Errors
    /// Where a count is another one.
    pub fn new(
        codes: &'a [u8],
        (rows, cols): (usize, usize),
        block: (usize, usize),
        scales: Vec<f64>,
    ) -> Result<Fp8<'a>, WrongCount> {
        let block = (block.0.max(1), block.1.max(1));
        count("codes", codes.len(), rows.saturating_mul(cols))?;
        count("scales", scales.len(), rows.div_ceil(block.0).saturating_mul(cols.div_ceil(block.1)))?;
        Ok(Fp8 { codes, rows, cols, block, scales })
    }
}

impl Rows for Fp8<'_> {
    fn rows(&self) -> usize {
        self.rows
    }
    fn cols(&self) -> usize {
        self.cols
    }
    /// A scale of a whole axis goes along with every shard of it.
    fn grain(&self) -> (usize, usize) {
        let of = |block: usize, all: usize| if block >= all { 1 } else { block };
        (of(self.block.0, self.rows), of(self.block.1, self.cols))
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let codes = &self.codes[row * self.cols + k0..][..out.len()];
        let per_row = self.cols.div_ceil(self.block.1);
        let scales = &self.scales[row / self.block.0 * per_row..][..per_row];
        for (i, (o, code)) in out.iter_mut().zip(codes).enumerate() {
            *o = E4M3[usize::from(*code)] * scales[(k0 + i) / self.block.1];
        }
    }
    fn say(&self, to: &mut dyn FnMut(&[u8])) {
        to(format!("fp8 {} {} {:?};", self.rows, self.cols, self.block).as_bytes());
        self.scales.iter().for_each(|s| to(&s.to_le_bytes()));
        to(self.codes);
    }
}

/// What the scale of a whole tensor does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorScale {
    /// modelopt's `weight_scale_2`.
    Multiplies,
    /// compressed-tensors' `weight_global_scale`.
    Divides,
}

/// E2M1 codes, a scale for [`GROUP`] columns, a scale of all.
pub struct Nvfp4<'a> {
    packed: &'a [u8],
    scales: &'a [u8],
    rows: usize,
    cols: usize,
    tensor: f64,
    does: TensorScale,
}

impl<'a> Nvfp4<'a> {
    /// `packed` [rows, cols / 2], `scales` [rows, cols / 16] in E4M3, `tensor` the scale of all.
    ///
    /// # Errors
    /// Where a count is another one, or a row is not whole groups.
    pub fn new(
        packed: &'a [u8],
        scales: &'a [u8],
        (rows, cols): (usize, usize),
        tensor: f64,
        does: TensorScale,
    ) -> Result<Nvfp4<'a>, WrongCount> {
        count("columns", cols, cols.next_multiple_of(GROUP))?;
        count("bytes of codes", packed.len(), rows.saturating_mul(cols / 2))?;
        count("scales", scales.len(), rows.saturating_mul(cols / GROUP))?;
        Ok(Nvfp4 { packed, scales, rows, cols, tensor, does })
    }
}

impl Rows for Nvfp4<'_> {
    fn rows(&self) -> usize {
        self.rows
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn grain(&self) -> (usize, usize) {
        (1, GROUP)
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let packed = &self.packed[(row * self.cols + k0) / 2..];
        let scales = &self.scales[(row * self.cols + k0) / GROUP..];
        let groups = out.as_chunks_mut::<GROUP>().0.iter_mut().zip(packed.as_chunks::<{ GROUP / 2 }>().0);
        for ((out, packed), scale) in groups.zip(scales) {
            let scale = E4M3[usize::from(*scale)];
            for (pair, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
                *pair = [E2M1[usize::from(byte & 15)] * scale, E2M1[usize::from(byte >> 4)] * scale];
            }
            match self.does {
                TensorScale::Multiplies => out.iter_mut().for_each(|v| *v *= self.tensor),
                TensorScale::Divides => out.iter_mut().for_each(|v| *v /= self.tensor),
            }
        }
    }
    fn say(&self, to: &mut dyn FnMut(&[u8])) {
        to(format!("nvfp4 {} {} {:?};", self.rows, self.cols, self.does).as_bytes());
        to(&self.tensor.to_le_bytes());
        to(self.scales);
        to(self.packed);
    }
}

/// Values of all codes.
static E4M3: std::sync::LazyLock<[f64; 256]> = std::sync::LazyLock::new(|| values(DType::E4m3));
static E2M1: std::sync::LazyLock<[f64; 16]> = std::sync::LazyLock::new(|| values(DType::E2m1));

fn values<const N: usize>(dtype: DType) -> [f64; N] {
    std::array::from_fn(|code| dtype.from_bits(code as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(w: &dyn Rows, row: usize) -> Vec<f64> {
        let mut out = vec![0.0; w.cols()];
        w.decode(row, 0, &mut out);
        out
    }

    /// OCP's tables: E4M3 0x7E is 448, 0x08 is 2^-6, 0x01 is 2^-9, 0x7F and 0xFF are NaN; E2M1 0 … 6.
    #[test]
    fn codes_are_those_of_the_ocp_formats() {
        assert_eq!(
            [0x7e, 0x08, 0x01, 0x38, 0xb8].map(|c| E4M3[c]),
            [448.0, 0.015625, 1.0 / 512.0, 1.0, -1.0]
        );
        assert!(E4M3[0x7f].is_nan() && E4M3[0xff].is_nan());
        assert_eq!(E4M3.iter().filter(|v| v.is_nan()).count(), 2);
        assert_eq!(*E2M1, [0., 0.5, 1., 1.5, 2., 3., 4., 6., -0., -0.5, -1., -1.5, -2., -3., -4., -6.]);
    }

    /// 5 rows, 6 columns, blocks of 2 × 4: the last block row has 1 row, the last block column 2 columns.
    #[test]
    fn a_scale_covers_its_block_and_the_last_ones_are_cut_short() {
        let codes = [0x38; 30];
        let scales: Vec<f64> = (1..=6).map(f64::from).collect();
        let w = Fp8::new(&codes, (5, 6), (2, 4), scales).unwrap();
        assert_eq!(row(&w, 1), [1., 1., 1., 1., 2., 2.]);
        assert_eq!(row(&w, 2), [3., 3., 3., 3., 4., 4.]);
        assert_eq!(row(&w, 4), [5., 5., 5., 5., 6., 6.]);
        let short = Fp8::new(&codes, (5, 6), (2, 4), vec![1.0; 4]).err().unwrap();
        assert_eq!(short, WrongCount { what: "scales", found: 4, needed: 6 });
        // A part of a row that does not begin with a block; one scale for all.
        let mut part = [0.0; 2];
        let wide: Vec<u8> = [0x38; 300].into();
        Fp8::new(&wide, (1, 300), (1, 258), vec![1.0, 2.0]).unwrap().decode(0, 256, &mut part);
        assert_eq!(part, [1.0, 1.0]);
        assert_eq!(row(&Fp8::new(&codes, (5, 6), (5, 6), vec![0.5]).unwrap(), 4), [0.5; 6]);
    }

    #[test]
    fn low_nibbles_are_even_columns_and_sixteen_share_a_scale() {
        let mut packed = [0x21u8; 32];
        packed[16] = 0xf7;
        let scales = [0x38, 0x40, 0x30, 0x38];
        let by = |tensor, does| Nvfp4::new(&packed, &scales, (2, 32), tensor, does).unwrap();
        let w = by(0.25, TensorScale::Multiplies);
        assert_eq!(row(&w, 0)[..4], [0.125, 0.25, 0.125, 0.25]);
        assert_eq!(row(&w, 0)[16..18], [0.25, 0.5]);
        assert_eq!(row(&w, 1)[..3], [0.75, -0.75, 0.0625]);
        assert_eq!(row(&by(3.0, TensorScale::Divides), 0)[0], 0.5 / 3.0);
        let odd = Nvfp4::new(&packed, &scales, (2, 31), 1.0, TensorScale::Divides).err().unwrap();
        assert_eq!(odd, WrongCount { what: "columns", found: 31, needed: 32 });
        assert!(Nvfp4::new(&packed, &scales[1..], (2, 32), 1.0, TensorScale::Divides).is_err());
    }

    /// A product of all significands: nothing rounds.
    #[test]
    fn products_are_exact() {
        let scale = f64::from(f32::from_bits(0x3fff_ffff));
        let w = Fp8::new(&[0x7e], (1, 1), (1, 1), vec![scale]).unwrap();
        assert_eq!(row(&w, 0)[0], 448.0 * 2.0 - 448.0 * 2f64.powi(-23));
    }
}
