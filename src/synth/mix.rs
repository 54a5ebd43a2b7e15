/*!
Which type each tensor gets in a file of some type: one row a file type.

The rules are llama-quantize's for MLA tensors (its function `llama_tensor_get_type`): everything gets the
base type but `attn_output`, which has rules of its own; a row that is not whole blocks falls back to a
type with smaller blocks; tensors of one dimension stay F32.
*/

use super::preset::Draw;
use mla_reference::ggml::GgmlType;

/// A file type: name, `general.file_type`, and the types of its tensors.
#[derive(Debug, PartialEq)]
pub struct FileType {
    /// The name, as llama-quantize takes it.
    pub name: &'static str,
    /// The number in `general.file_type`.
    pub id: u32,
    base: GgmlType,
    output: GgmlType,
}

const fn row(name: &'static str, id: u32, base: GgmlType, output: GgmlType) -> FileType {
    FileType { name, id, base, output }
}

use GgmlType::*;

impl FileType {
    /// Every file type that can be written.
    pub const ALL: &'static [FileType] = &[
        row("F32", 0, F32, F32),
        row("F16", 1, F16, F16),
        row("BF16", 32, BF16, BF16),
        row("Q4_0", 2, Q4_0, Q4_0),
        row("Q8_0", 7, Q8_0, Q8_0),
        row("Q2_K", 10, Q2_K, Q3_K),
        row("Q3_K_M", 12, Q3_K, Q4_K),
        row("Q4_K_M", 15, Q4_K, Q4_K),
        row("Q5_K_M", 17, Q5_K, Q5_K),
        row("Q6_K", 18, Q6_K, Q6_K),
        row("IQ4_XS", 30, IQ4_XS, IQ4_XS),
    ];

    /// The file type of this name.
    pub fn by_name(name: &str) -> Option<&'static FileType> {
        FileType::ALL.iter().find(|t| t.name.eq_ignore_ascii_case(name))
    }

    /// The type of a tensor whose rows have this many elements.
    pub(super) fn tensor(&self, draw: Draw, row: u64) -> GgmlType {
        let wanted = match draw {
            Draw::Norm | Draw::Bias => return F32,
            Draw::Output => self.output,
            Draw::Weight => self.base,
        };
        let whole = |ty: &GgmlType| row.is_multiple_of(ty.block_elements() as u64);
        [wanted, smaller(wanted)].into_iter().find(whole).unwrap_or(F16)
    }
}

/// The type that stands in where a row is not whole blocks.
fn smaller(ty: GgmlType) -> GgmlType {
    match ty {
        IQ4_XS => IQ4_NL,
        Q2_K | Q3_K => Q4_0,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        other => other,
    }
}
