/*!
What the left side of a product is rounded to before it is multiplied.

Most kernels multiply activations as they are stored. ggml's CPU kernels first bring each row of float32 activations to the
type that the weight's type goes with: blocks of 32 in 8 bits (`q8_0`) for the legacy types, with their sums (`q8_1`) for
those that have a minimum, of 256 (`q8_k`) for the K- and IQ-types, float16 or bfloat16 for those. Source: ggml-quants.c and the x86 kernels of ggml-cpu (llama.cpp 0ce8cd11); all in
float32, bit for bit, so that the value of every element is known.

- `q8_0`: m = max |x|, d = f16(m/127), q = round(x · (127/m)) to even, value d·q.
- `q8_1`: the same, and s = f16(m/127 · Σq), which the minimum of a weight's block is multiplied with: a product is off by
  min · (s − d·Σq) for each block. Of a block that was quantised from its minimum up, the smallest weight is that minimum.
- `q8_k`: m the x of largest magnitude, i = −127/m, q = round(i·x) to even, at most 127, value q·(1/i).
*/

use mla_numeric::DType;
use ndarray::Array2;
use serde::{Deserialize, Serialize};

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Operands {
    /// As they are stored.
    Stored,
    F16,
    Bf16,
    #[serde(rename = "q8_0")]
    Q8_0,
    #[serde(rename = "q8_1")]
    Q8_1,
    #[serde(rename = "q8_k")]
    Q8K,
}

impl Operands {
    /// Those that are not as stored.
    pub const OTHERS: [Operands; 5] =
        [Operands::Q8_0, Operands::Q8K, Operands::Q8_1, Operands::F16, Operands::Bf16];

    /// The name in files.
    pub const fn name(self) -> &'static str {
        match self {
            Operands::Stored => "stored",
            Operands::F16 => "f16",
            Operands::Bf16 => "bf16",
            Operands::Q8_0 => "q8_0",
            Operands::Q8_1 => "q8_1",
            Operands::Q8K => "q8_k",
        }
    }

    /// Elements of a block; 1: each by itself.
    pub const fn block(self) -> usize {
        match self {
            Operands::Q8_0 | Operands::Q8_1 => 32,
            Operands::Q8K => 256,
            _ => 1,
        }
    }

    /// Whether rows of so many elements consist of whole blocks.
    pub const fn fits(self, len: usize) -> bool {
        len.is_multiple_of(self.block())
    }

    /// Rounds each row; rows that are not whole blocks stay.
    pub fn round(self, a: &mut Array2<f64>) {
        if self == Operands::Stored || !self.fits(a.ncols()) {
            return;
        }
        for mut row in a.rows_mut() {
            let mut own = row.to_vec();
            self.round_row(&mut own);
            row.iter_mut().zip(own).for_each(|(to, v)| *to = v);
        }
    }

    fn round_row(self, row: &mut [f64]) {
        match self {
            Operands::Stored => {}
            Operands::F16 => DType::F16.round_slice(row),
            Operands::Bf16 => DType::Bf16.round_slice(row),
            Operands::Q8_0 | Operands::Q8_1 => row.chunks_mut(32).for_each(|block| {
                let (d, inverse) = scale(block);
                let d = DType::F16.round(f64::from(d));
                block.iter_mut().for_each(|x| *x = d * f64::from((*x as f32 * inverse).round_ties_even()));
            }),
            Operands::Q8K => row.chunks_mut(256).for_each(|block| {
                let largest = |m: f32, x: &f64| if (*x as f32).abs() > m.abs() { *x as f32 } else { m };
                let most = block.iter().fold(0.0f32, largest);
                if most == 0.0 {
                    block.fill(0.0);
                    return;
                }
                let inverse = -127.0 / most;
                let d = f64::from(1.0 / inverse);
                let step = |x: f64| f64::from((inverse * x as f32).round_ties_even().min(127.0));
                block.iter_mut().for_each(|x| *x = d * step(*x));
            }),
        }
    }

    /// s − d·Σq of each block of each row, where a product takes sums of blocks by themselves; of rows before they are rounded.
    pub fn sums(self, a: &Array2<f64>) -> Option<Array2<f64>> {
        if self != Operands::Q8_1 || !self.fits(a.ncols()) {
            return None;
        }
        let mut all = Array2::zeros((a.nrows(), a.ncols() / 32));
        for (row, mut to) in a.rows().into_iter().zip(all.rows_mut()) {
            for (block, to) in row.to_vec().chunks(32).zip(&mut to) {
                let (d, inverse) = scale(block);
                let sum: f32 = block.iter().map(|x| (*x as f32 * inverse).round_ties_even()).sum();
                let exact = DType::F16.round(f64::from(d)) * f64::from(sum);
                *to = DType::F16.round(f64::from(d * sum)) - exact;
            }
        }
        Some(all)
    }

    /// How far a rounded value may move when each element of the row errs by at most `most`, with a standard deviation of
    /// `usual`: one step, and what the block's own scale moves; `a`: the rounded row. In place.
    ///
    /// |Q(x') − Q(x)| ≤ |x' − x| + the errors of both roundings, half a step each (of an f16 scale 2⁻¹¹ of the value
    /// more, of an f16 sum as much again). The deviation: a step is passed with a probability of 2 usual/step.
    pub fn widen(self, a: &[f64], most: &mut [f64], usual: &mut [f64]) {
        if self == Operands::Stored || !self.fits(a.len()) || most.iter().all(|e| *e == 0.0) {
            return;
        }
        let block = self.block();
        for (first, own) in a.chunks(block).enumerate() {
            let at = first * block..(first + 1) * block;
            let (e, s) = (&mut most[at.clone()], &mut usual[at]);
            let top = own.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            let by = e.iter().fold(0.0f64, |m, v| m.max(*v));
            for ((v, e), s) in own.iter().zip(e).zip(s) {
                let (step, scale) = match self {
                    Operands::F16 => (DType::F16.spacing(v.abs() + *e), 0.0),
                    Operands::Bf16 => (DType::Bf16.spacing(v.abs() + *e), 0.0),
                    _ => ((top + by) / 126.0, if self == Operands::Q8K { 0.0 } else { v.abs() / 512.0 }),
                };
                let often = if step > 0.0 { (2.0 * *s / step).min(1.0) } else { 0.0 };
                *s = (*s * *s + often * step * step + scale * scale).sqrt();
                *e += step + scale;
            }
        }
    }
}

/// m/127 and 127/m of a block, in float32.
fn scale(block: &[f64]) -> (f32, f32) {
    let most = block.iter().fold(0.0f32, |m, x| m.max((*x as f32).abs()));
    (most / 127.0, if most == 0.0 { 0.0 } else { 127.0 / most })
}

impl std::fmt::Display for Operands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_rounded_as_ggml_does() {
        // Largest 127: d = 1, so values are rounded to whole numbers, ties to even.
        let mut row = vec![0.0; 256];
        row[..6].copy_from_slice(&[127.0, 0.5, 1.5, -2.5, 3.2, -0.4]);
        let mut first = row.clone();
        Operands::Q8_0.round_row(&mut first);
        assert_eq!(first[..6], [127.0, 0.0, 2.0, -2.0, 3.0, 0.0]);
        Operands::Q8K.round_row(&mut row);
        assert_eq!(row[..6], [127.0, 0.0, 2.0, -2.0, 3.0, 0.0]);
        // The scale of q8_0 is an f16, that of q8_k is not: 1/127 in either.
        let mut one = vec![1.0; 32];
        Operands::Q8_0.round_row(&mut one);
        assert_eq!(one[0], 127.0 * DType::F16.round(f64::from(1.0f32 / 127.0)));
        assert!((one[0] - 0.999_938_96).abs() < 1e-8);
        let mut one = vec![1.0; 256];
        Operands::Q8K.round_row(&mut one);
        assert!((one[0] - 1.0).abs() < 1e-7);
        // The largest in magnitude is negative: its sign is the scale's, and 128 is none of its steps.
        let mut row = vec![-254.0; 256];
        row[1] = 254.0;
        Operands::Q8K.round_row(&mut row);
        assert_eq!(row[..2], [-254.0, 254.0]);
        // 32 ones: the sum of 127s is 4064, times the f32 scale 32, an f16; times the f16 scale it is not.
        let sums = Operands::Q8_1.sums(&Array2::ones((1, 64))).unwrap();
        assert_eq!(sums.dim(), (1, 2));
        assert!(
            (sums[[0, 1]] - 32.0 * (1.0 - 0.999_938_96)).abs() < 1e-5 && Operands::Q8_0.sums(&sums).is_none()
        );
        assert!(!Operands::Q8K.fits(192) && Operands::Q8_0.fits(192));
    }

    #[test]
    fn uncertain_values_move_by_a_step() {
        let a = vec![127.0; 32];
        let (mut most, mut usual) = (vec![1e-6; 32], vec![1e-7; 32]);
        Operands::Q8_0.widen(&a, &mut most, &mut usual);
        // A step of 127/126, and of the value 2⁻¹¹ twice (the scale of each side), as much again for sums of q8_1.
        let by_hand = 127.0 / 126.0 + 4.0 * 127.0 / 2048.0;
        assert!((most[0] - by_hand).abs() < 1e-5 && usual[0] < 0.25, "{} {}", most[0], usual[0]);
        let (mut none, mut never) = (vec![0.0; 32], vec![0.0; 32]);
        Operands::Q8_0.widen(&a, &mut none, &mut never);
        assert_eq!((none[0], never[0]), (0.0, 0.0));
    }
}
