/*!
Which type each tensor gets in a file of some type: one row a file type.

The rules are llama-quantize's for MLA tensors (its function `llama_tensor_get_type`): everything gets the
base type but `attn_output` and `attn_q`, which have rules of their own, and in MXFP4_MOE the tensors of three
dimensions; a row that is not whole blocks falls back to a type with smaller blocks; tensors of one dimension stay F32.
(The unsplit `attn_kv_b`, whose type there depends on the layer, gets the base type.) NVFP4 is no mix of llama-quantize's:
all matrices have that type and a scale of their own, as llama.cpp's converter writes checkpoints.
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
    query: GgmlType,
    /// k_b and v_b.
    heads: GgmlType,
}

const fn row(name: &'static str, id: u32, base: GgmlType, output: GgmlType) -> FileType {
    FileType { name, id, base, output, query: base, heads: base }
}

impl FileType {
    const fn query(self, query: GgmlType) -> FileType {
        FileType { query, ..self }
    }
    const fn heads(self, heads: GgmlType) -> FileType {
        FileType { heads, ..self }
    }
}

use GgmlType::*;

impl FileType {
    /// Every file type that can be written.
    pub const ALL: &'static [FileType] = &[
        row("F32", 0, F32, F32),
        row("F16", 1, F16, F16),
        row("BF16", 32, BF16, BF16),
        row("Q4_0", 2, Q4_0, Q4_0),
        row("Q4_1", 3, Q4_1, Q4_1),
        row("Q5_0", 8, Q5_0, Q5_0),
        row("Q5_1", 9, Q5_1, Q5_1),
        row("Q8_0", 7, Q8_0, Q8_0),
        row("Q2_K", 10, Q2_K, Q3_K),
        row("Q2_K_S", 21, Q2_K, Q2_K),
        row("Q3_K_S", 11, Q3_K, Q3_K),
        row("Q3_K_M", 12, Q3_K, Q4_K),
        row("Q3_K_L", 13, Q3_K, Q5_K),
        row("Q4_K_S", 14, Q4_K, Q4_K),
        row("Q4_K_M", 15, Q4_K, Q4_K),
        row("Q5_K_S", 16, Q5_K, Q5_K),
        row("Q5_K_M", 17, Q5_K, Q5_K),
        row("Q6_K", 18, Q6_K, Q6_K),
        row("IQ1_S", 24, IQ1_S, IQ2_XXS),
        row("IQ1_M", 31, IQ1_M, IQ2_XXS),
        row("IQ2_XXS", 19, IQ2_XXS, IQ2_XXS),
        row("IQ2_XS", 20, IQ2_XS, IQ2_XS),
        row("IQ2_S", 28, IQ2_XS, IQ3_S),
        row("IQ2_M", 29, IQ2_S, IQ3_S),
        row("IQ3_XXS", 23, IQ3_XXS, IQ3_S).query(IQ2_S),
        row("IQ3_XS", 22, IQ3_S, IQ3_S).query(IQ3_XXS),
        row("IQ3_S", 26, IQ3_S, IQ3_S),
        row("IQ3_M", 27, IQ3_S, Q4_K),
        row("IQ4_NL", 25, IQ4_NL, IQ4_NL),
        row("IQ4_XS", 30, IQ4_XS, IQ4_XS),
        row("TQ1_0", 36, TQ1_0, TQ1_0),
        row("TQ2_0", 37, TQ2_0, TQ2_0),
        row("Q1_0", 40, Q1_0, Q1_0),
        row("Q2_0", 41, Q2_0, Q2_0),
        row("MXFP4_MOE", 38, Q8_0, Q8_0).heads(MXFP4),
        row("NVFP4", 39, NVFP4, NVFP4),
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
            Draw::Query => self.query,
            Draw::Heads => self.heads,
            Draw::Weight => self.base,
        };
        let whole = |ty: &GgmlType| row.is_multiple_of(ty.block_elements() as u64);
        [wanted, smaller(wanted)].into_iter().find(whole).unwrap_or(F16)
    }
}

/// The type that stands in where a row is not whole blocks.
fn smaller(ty: GgmlType) -> GgmlType {
    match ty {
        IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_XS => IQ4_NL,
        Q2_0 | Q2_K | Q3_K | TQ1_0 | TQ2_0 => Q4_0,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        other => other,
    }
}
