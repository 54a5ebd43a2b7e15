/*!
The table of ggml's tensor types: id, name, elements and bytes of a block.

One row a type; everything that needs a size or a name reads it here. Whether a type can be *decoded*
is another question, answered by [`crate::dequant`].

Source of ids and sizes: ggml 0.25.3 (`enum ggml_type` and its type traits).
*/

use serde::{Deserialize, Serialize};

macro_rules! types {
    ($($name:ident = $id:literal, $text:literal, $elements:literal, $bytes:literal;)*) => {
        /// A tensor type that a current GGUF file may use.
        #[allow(non_camel_case_types, missing_docs, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum GgmlType { $($name,)* }

        impl GgmlType {
            /// Every type, in the order of ids.
            pub const ALL: &'static [GgmlType] = &[$(GgmlType::$name,)*];

            /// The type with this id, if it is a current one.
            pub fn from_id(id: u32) -> Option<GgmlType> {
                match id { $($id => Some(GgmlType::$name),)* _ => None }
            }
            /// ggml's number for the type.
            pub fn id(self) -> u32 {
                match self { $(GgmlType::$name => $id,)* }
            }
            /// ggml's name for the type.
            pub fn name(self) -> &'static str {
                match self { $(GgmlType::$name => $text,)* }
            }
            /// Elements in a block; a row is whole blocks.
            pub fn block_elements(self) -> usize {
                match self { $(GgmlType::$name => $elements,)* }
            }
            /// Bytes of a block.
            pub fn block_bytes(self) -> usize {
                match self { $(GgmlType::$name => $bytes,)* }
            }
        }
    };
}

types! {
    F32 = 0, "F32", 1, 4;
    F16 = 1, "F16", 1, 2;
    Q4_0 = 2, "Q4_0", 32, 18;
    Q4_1 = 3, "Q4_1", 32, 20;
    Q5_0 = 6, "Q5_0", 32, 22;
    Q5_1 = 7, "Q5_1", 32, 24;
    Q8_0 = 8, "Q8_0", 32, 34;
    Q8_1 = 9, "Q8_1", 32, 36;
    Q2_K = 10, "Q2_K", 256, 84;
    Q3_K = 11, "Q3_K", 256, 110;
    Q4_K = 12, "Q4_K", 256, 144;
    Q5_K = 13, "Q5_K", 256, 176;
    Q6_K = 14, "Q6_K", 256, 210;
    Q8_K = 15, "Q8_K", 256, 292;
    IQ2_XXS = 16, "IQ2_XXS", 256, 66;
    IQ2_XS = 17, "IQ2_XS", 256, 74;
    IQ3_XXS = 18, "IQ3_XXS", 256, 98;
    IQ1_S = 19, "IQ1_S", 256, 50;
    IQ4_NL = 20, "IQ4_NL", 32, 18;
    IQ3_S = 21, "IQ3_S", 256, 110;
    IQ2_S = 22, "IQ2_S", 256, 82;
    IQ4_XS = 23, "IQ4_XS", 256, 136;
    I8 = 24, "I8", 1, 1;
    I16 = 25, "I16", 1, 2;
    I32 = 26, "I32", 1, 4;
    I64 = 27, "I64", 1, 8;
    F64 = 28, "F64", 1, 8;
    IQ1_M = 29, "IQ1_M", 256, 56;
    BF16 = 30, "BF16", 1, 2;
    TQ1_0 = 34, "TQ1_0", 256, 54;
    TQ2_0 = 35, "TQ2_0", 256, 66;
    MXFP4 = 39, "MXFP4", 32, 17;
    NVFP4 = 40, "NVFP4", 64, 36;
    Q1_0 = 41, "Q1_0", 128, 18;
    Q2_0 = 42, "Q2_0", 64, 18;
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// A match of the fork's ids; the rows of those in the second list are interleaved.
macro_rules! fork {
    ($id:expr, { $($plain:literal $name:literal;)* } { $($rows:literal $of:literal;)* } else $other:expr) => {
        match $id {
            $($plain => concat!($name, ", a type of the fork ik_llama.cpp"),)*
            $($rows => concat!($of, " with interleaved rows, a type of the fork ik_llama.cpp"),)*
            _ => $other,
        }
    };
}

/// What is known of a type id that no current file may use, for an error message.
pub fn describe_unknown(id: u32) -> &'static str {
    #[rustfmt::skip]
    let fork = fork!(id, {
        97 "Q8_0_X4"; 98 "Q8_1_X4"; 99 "Q8_2_X4"; 133 "Q6_0"; 134 "IQ1_BN"; 135 "IQ2_BN"; 136 "Q8_K64";
        137 "IQ2_K"; 138 "IQ3_K"; 139 "IQ4_K"; 140 "IQ5_K"; 141 "IQ6_K"; 144 "IQ4_KS"; 145 "IQ2_KS";
        146 "IQ4_KSS"; 147 "Q8_K16"; 148 "Q8_K32"; 149 "Q8_KR8"; 150 "Q8_K128"; 151 "Q8_KV"; 152 "IQ5_KS";
        153 "IQ2_KT"; 154 "IQ3_KT"; 155 "IQ4_KT"; 156 "IQ3_KS"; 157 "IQ2_KL"; 158 "IQ1_KT"; 202 "Q4_0_R8";
        230 "BF16_R16"; 353 "MXFP4_R8";
    } {
        206 "Q5_0"; 208 "Q8_0"; 210 "Q2_K"; 211 "Q3_K"; 212 "Q4_K"; 213 "Q5_K"; 214 "Q6_K"; 216 "IQ2_XXS";
        217 "IQ2_XS"; 218 "IQ3_XXS"; 219 "IQ1_S"; 220 "IQ4_NL"; 221 "IQ3_S"; 222 "IQ2_S"; 223 "IQ4_XS";
        229 "IQ1_M"; 335 "IQ2_BN"; 337 "IQ2_K"; 338 "IQ3_K"; 339 "IQ4_K"; 340 "IQ5_K"; 344 "IQ4_KS";
        352 "IQ5_KS";
    } else match id {
        4 => "Q4_2, removed from ggml in 2023",
        5 => "Q4_3, removed from ggml in 2023",
        31..=33 => "Q4_0 interleaved for ARM, removed from ggml: requantise to Q4_0",
        36..=38 => "IQ4_NL interleaved (ggml) or I2_S (ik_llama.cpp): neither is a current type",
        142 | 143 | 200..=399 => "probably a type of the fork ik_llama.cpp",
        _ => "not a type of ggml that this version knows",
    });
    fork
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_and_are_unique() {
        for &t in GgmlType::ALL {
            assert_eq!(GgmlType::from_id(t.id()), Some(t));
            assert_ne!(t.block_bytes(), 0);
        }
        for gone in [4, 5, 31, 32, 33, 36, 37, 38, 43, 144, u32::MAX] {
            assert_eq!(GgmlType::from_id(gone), None);
            assert!(!describe_unknown(gone).is_empty());
        }
    }
}
