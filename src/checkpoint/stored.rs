/*!
From tensors to matrices: which scales belong to a weight, and what they do.

Decided by what the files hold, never by a configuration's lists of excluded modules, which are wrong in published checkpoints.

| tensors of module X | format | value |
|---|---|---|
| `weight` F32, F16, BF16 | plain | as stored |
| `weight` F8_E4M3, `weight_scale_inv` F32 [⌈R/b⌉, ⌈C/b⌉] | block FP8 | code · scale |
| `weight` F8_E4M3, `weight_scale` of one, R, or a grid of elements | FP8 by tensor, row, block | code · scale |
| `weight` U8 [R, C/2], `weight_scale` F8_E4M3 [R, C/16], `weight_scale_2` | NVFP4 of modelopt | code · scale · scale_2 |
| `weight_packed` U8 [R, C/2], `weight_scale` F8_E4M3, `weight_global_scale` | NVFP4 of compressed-tensors | code · scale / global |

b is `quantization_config.weight_block_size`, 128 where there is none. It is never inferred from the number of scales: 576 rows
in 5 blocks are blocks of 128, the last one of 64 rows, not of 116.
*/

use super::{Checkpoint, CheckpointError, TensorInfo};
use mla_numeric::DType;
use mla_reference::GgmlType;
use mla_reference::product::quantised::{Fp8, GROUP, Nvfp4, TensorScale};
use mla_reference::product::{Blocks, Rows};

/// The scale of a whole tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales {
    /// Its value.
    pub value: f64,
    /// What it does.
    pub does: TensorScale,
}

/// A matrix (a vector is one row) with its exact values.
pub struct Matrix<'a> {
    /// Name of the tensor with its codes or values.
    pub tensor: String,
    /// Format in words.
    pub ty: String,
    /// Rows and columns.
    pub shape: (usize, usize),
    /// Exact values; NVFP4 of compressed-tensors rounds once, in float64.
    pub rows: Box<dyn Rows + 'a>,
    /// The scale of the whole tensor, where the format has one.
    pub scale: Option<Scales>,
    /// Whether values are stored as such.
    pub plain: bool,
    /// Rows and columns that share a scale, where it is a block.
    pub block: Option<(usize, usize)>,
}

/// What to do about a weight whose format is not read.
const FORMATS: &str = "use a checkpoint whose attention weights are F32, F16, BF16, FP8 E4M3 with scales, or NVFP4 of modelopt or compressed-tensors";
const CHECK: &str =
    "compare the file with the publisher's: a scale may have been lost, or belong to another weight";

impl Checkpoint {
    /// Whether a module has a weight, in whatever format.
    pub fn has(&self, module: &str) -> bool {
        ["weight", "weight_packed"].iter().any(|w| self.tensor(&format!("{module}.{w}")).is_some())
    }

    /// The weight of a module (a name without `.weight`). None where there is none.
    ///
    /// # Errors
    /// Where it can't be read, its scales are missing or have another shape than the weight needs, or the format is none that
    /// is read.
    pub fn matrix(&self, module: &str) -> Result<Option<Matrix<'_>>, CheckpointError> {
        let part = |name: &str| self.tensor(&format!("{module}.{name}"));
        if let Some(packed) = part("weight_packed") {
            return self.nvfp4(module, packed, "weight_global_scale", TensorScale::Divides).map(Some);
        }
        let Some(weight) = part("weight") else { return Ok(None) };
        // Whether it can be read at all comes first: a tensor that is not there has no dtype.
        self.bytes(weight)?;
        match weight.dtype.name() {
            "F32" => self.plain(weight, GgmlType::F32),
            "F16" => self.plain(weight, GgmlType::F16),
            "BF16" => self.plain(weight, GgmlType::BF16),
            "F8_E4M3" => self.fp8(module, weight),
            "U8" if part("weight_scale_2").is_some() => {
                self.nvfp4(module, weight, "weight_scale_2", TensorScale::Multiplies)
            }
            other => {
                Err(self.refuse(weight, format!("has dtype {other}, which is not read as a weight"), FORMATS))
            }
        }
        .map(Some)
    }

    /// The values of a tensor of this name with one axis of `len`, F32, F16 or BF16. None where there is none.
    ///
    /// # Errors
    /// Where it can't be read, or is none such.
    pub fn vector(&self, name: &str, len: usize) -> Result<Option<Vec<f64>>, CheckpointError> {
        let Some(tensor) = self.tensor(name) else { return Ok(None) };
        if tensor.shape != [len as u64] {
            let what = format!("has shape {:?}, where {len} values should be", tensor.shape);
            return Err(self.refuse(tensor, what, CHECK));
        }
        self.scales(tensor).map(Some)
    }

    fn refuse(&self, tensor: &TensorInfo, what: String, advice: &str) -> CheckpointError {
        CheckpointError::new(
            format!("tensor {} {what}", tensor.name.escape_debug()),
            self.place(tensor),
            advice,
        )
    }

    /// Rows and columns of a tensor of one or two axes.
    fn two(&self, tensor: &TensorInfo) -> Result<(usize, usize), CheckpointError> {
        let shape = match tensor.shape[..] {
            [n] => usize::try_from(n).ok().map(|n| (1, n)),
            [r, c] => usize::try_from(r).ok().zip(usize::try_from(c).ok()),
            _ => None,
        };
        let shape = shape.filter(|(r, c)| *r > 0 && *c > 0);
        shape.ok_or_else(|| {
            self.refuse(tensor, format!("has shape {:?}, which is no matrix", tensor.shape), CHECK)
        })
    }

    fn plain(&self, weight: &TensorInfo, ty: GgmlType) -> Result<Matrix<'_>, CheckpointError> {
        let shape = self.two(weight)?;
        let rows = Blocks::new(ty, self.bytes(weight)?, shape.1)
            .map_err(|e| self.refuse(weight, format!("is no matrix: {e}"), CHECK))?;
        Ok(Matrix {
            tensor: weight.name.clone(),
            ty: ty.to_string(),
            shape,
            rows: Box::new(rows),
            scale: None,
            plain: true,
            block: None,
        })
    }

    /// A tensor of scales in float64.
    fn scales(&self, tensor: &TensorInfo) -> Result<Vec<f64>, CheckpointError> {
        let bytes = self.bytes(tensor)?;
        let dtype = match tensor.dtype.name() {
            "F32" => DType::F32,
            "BF16" => DType::Bf16,
            "F16" => DType::F16,
            // Powers of two: 2^(e - 127), 255 is NaN.
            "F8_E8M0" => {
                let power = |e: &u8| if *e == 255 { f64::NAN } else { libm::exp2(f64::from(*e) - 127.0) };
                return Ok(bytes.iter().map(power).collect());
            }
            other => {
                return Err(self.refuse(
                    tensor,
                    format!("has dtype {other}, which is not read as a scale"),
                    FORMATS,
                ));
            }
        };
        let mut values = vec![0.0; bytes.len() / dtype.bytes()];
        dtype.decode(bytes, &mut values);
        Ok(values)
    }

    /// `quantization_config.weight_block_size`.
    fn block(&self) -> (usize, usize) {
        let config = self.config();
        let text = config.get("text_config").unwrap_or(config);
        let quantised = config.get("quantization_config").or_else(|| text.get("quantization_config"));
        let size = quantised.and_then(|q| q.get("weight_block_size")).and_then(|b| b.as_array());
        let side = |i: usize| {
            let n = size
                .and_then(|s| s.get(i))
                .and_then(serde_json::Value::as_u64)
                .and_then(|n| usize::try_from(n).ok());
            n.filter(|n| *n > 0).unwrap_or(128)
        };
        (side(0), side(1))
    }

    fn fp8(&self, module: &str, weight: &TensorInfo) -> Result<Matrix<'_>, CheckpointError> {
        let (rows, cols) = self.two(weight)?;
        let part = |name: &str| self.tensor(&format!("{module}.{name}"));
        let block = self.block();
        let grid = (rows.div_ceil(block.0), cols.div_ceil(block.1));
        let Some(scale) = part("weight_scale_inv").or_else(|| part("weight_scale")) else {
            let what = "is FP8, but has neither weight_scale_inv nor weight_scale beside it";
            return Err(self.refuse(weight, what.into(), CHECK));
        };
        let values = self.scales(scale)?;
        let one = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let blocked = scale.name.ends_with("_inv");
        let (block, what) = match scale.shape[..] {
            [] | [1] | [1, 1] if !blocked => ((rows, cols), "one scale".to_string()),
            [r] | [r, 1] if one(r) == rows && !blocked => ((1, cols), "a scale a row".to_string()),
            [r, c] if (one(r), one(c)) == grid => (block, format!("blocks of {} x {}", block.0, block.1)),
            _ => {
                let what = format!(
                    "has shape {:?}; the weight of {rows} x {cols} in blocks of {} x {} needs {} x {} scales",
                    scale.shape, block.0, block.1, grid.0, grid.1
                );
                return Err(self.refuse(scale, what, CHECK));
            }
        };
        let tensor_scale =
            (values.len() == 1).then(|| Scales { value: values[0], does: TensorScale::Multiplies });
        let fp8 = Fp8::new(self.bytes(weight)?, (rows, cols), block, values)
            .map_err(|e| self.refuse(weight, format!("does not fit its scales: {e}"), CHECK))?;
        Ok(Matrix {
            tensor: weight.name.clone(),
            ty: format!("FP8 E4M3, {what}"),
            shape: (rows, cols),
            rows: Box::new(fp8),
            scale: tensor_scale,
            plain: false,
            block: (tensor_scale.is_none() || blocked).then_some(block),
        })
    }

    fn nvfp4(
        &self,
        module: &str,
        packed: &TensorInfo,
        global: &str,
        does: TensorScale,
    ) -> Result<Matrix<'_>, CheckpointError> {
        let codes = self.bytes(packed)?;
        let (rows, half) = self.two(packed)?;
        let cols = half.saturating_mul(2);
        let needed = |name: &str| {
            let tensor = self.tensor(&format!("{module}.{name}"));
            tensor.ok_or_else(|| self.refuse(packed, format!("has no {name} beside it"), CHECK))
        };
        if !packed.dtype.is("U8") {
            let what = format!("has dtype {}, which is not read as NVFP4's codes", packed.dtype.name());
            return Err(self.refuse(packed, what, FORMATS));
        }
        let scale = needed("weight_scale")?;
        let scales = self.bytes(scale)?;
        let shape = [rows as u64, (cols / GROUP) as u64];
        if !scale.dtype.is("F8_E4M3") || scale.shape != shape {
            let what = format!(
                "is {} {:?}; NVFP4 of {rows} x {cols} needs F8_E4M3 {shape:?}",
                scale.dtype.name(),
                scale.shape
            );
            return Err(self.refuse(scale, what, FORMATS));
        }
        let global = needed(global)?;
        let values = self.scales(global)?;
        let [value] = values[..] else {
            return Err(self.refuse(global, format!("has {} elements, not one", values.len()), CHECK));
        };
        if !value.is_finite() || value <= 0.0 {
            return Err(self.refuse(global, format!("is {value}, which no scale is"), CHECK));
        }
        let rows_of = Nvfp4::new(codes, scales, (rows, cols), value, does)
            .map_err(|e| self.refuse(packed, format!("does not fit its scales: {e}"), CHECK))?;
        let who = match does {
            TensorScale::Multiplies => "modelopt: times weight_scale_2",
            TensorScale::Divides => "compressed-tensors: over weight_global_scale",
        };
        Ok(Matrix {
            tensor: packed.name.clone(),
            ty: format!("NVFP4 ({who})"),
            shape: (rows, cols),
            rows: Box::new(rows_of),
            scale: Some(Scales { value, does }),
            plain: false,
            block: None,
        })
    }
}
