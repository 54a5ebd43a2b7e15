/*!
What a kernel file says of itself: a comment of TOML at its beginning, whose first and last line are three dashes beside
the comment's own marks.

It is the only source of launch geometry and contract: a kernel's author changes one file. `docs/kernels.md` describes
the fields for people.
*/

use super::expression;
use mla_numeric::DType;
use mla_reference::Contract;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Version of the parameter structs that this program passes.
pub const VERSION: u32 = 2;

/// What kernels may be compiled for.
pub const COMPUTED: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

/// A kernel file's header.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Version of the parameter structs.
    pub version: u32,
    /// Whether the code is compiled for one architecture alone, as sm_90a, whose own instructions it uses.
    #[serde(default)]
    pub specific: bool,
    /// What tensors may be stored in: the code compiles for each.
    #[serde(default = "only_bf16")]
    pub dtypes: Vec<DType>,
    /// Scalars of the layer that the code is compiled for, as macros.
    #[serde(default)]
    pub geometry: Vec<String>,
    /// Tile sizes: macros, and names in expressions.
    #[serde(default)]
    pub tile: BTreeMap<String, i64>,
    /// Entry points.
    #[serde(rename = "kernel")]
    pub kernels: Vec<Entry>,
    /// What the kernels round, as in contract files; numbers may be names of tile sizes.
    contract: Option<toml::Table>,
}

fn only_bf16() -> Vec<DType> {
    vec![DType::Bf16]
}

/// One entry point.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Name.
    pub entry: String,
    /// Tensors that it computes.
    #[serde(default)]
    pub stages: Vec<String>,
    /// ggml type that it decodes.
    #[serde(rename = "type")]
    pub ty: Option<String>,
    /// Most query rows of a work item.
    pub rows: Option<String>,
    /// Threads of a block.
    pub threads: String,
    /// Blocks along x, y, z.
    pub grid: Vec<String>,
    /// Bytes of dynamic shared memory of a block.
    pub shared: Option<String>,
    /// What must hold, for this kernel to be used.
    #[serde(default)]
    pub requires: Vec<String>,
    /// What else a reader should know: rows that a launch need not write.
    pub note: Option<String>,
}

/// Names and values that a launch knows.
pub type Names<'a> = &'a [(&'a str, i64)];

impl Header {
    /// Reads a kernel file's header.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    pub fn of(text: &str) -> Result<Header, String> {
        let begin = text.trim_start();
        let inner = begin.strip_prefix("/*---").and_then(|t| t.split_once("---*/")).map(|t| t.0);
        let inner = inner.ok_or("the file does not begin with a header between /*--- and ---*/")?;
        let header: Header =
            toml::from_str(inner).map_err(|e| format!("its header: {}", e.to_string().trim_end()))?;
        if header.version != VERSION {
            return Err(format!(
                "its parameters are of version {}, this program passes version {VERSION}",
                header.version
            ));
        }
        let odd = header.dtypes.iter().find(|d| !COMPUTED.contains(d));
        if let Some(odd) = odd {
            return Err(format!("its header lists {odd} in dtypes; kernels compute in bf16, f16 and f32"));
        }
        if let Some(written) = header.contract()?.map(|c| c.activations)
            && !header.dtypes.contains(&written)
        {
            return Err(format!("its header declares a contract for {written}, which dtypes does not list"));
        }
        Ok(header)
    }

    /// An entry point.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.kernels.iter().find(|k| k.entry == name)
    }

    /// An expression's value, by tile sizes and what the launch knows.
    ///
    /// # Errors
    /// The expression and what is wrong with it.
    pub fn value(&self, expression: &str, names: Names) -> Result<i64, String> {
        let of = |name: &str| {
            let known = names.iter().find(|(n, _)| *n == name).map(|(_, v)| *v);
            known.or_else(|| self.tile.get(name).copied())
        };
        expression::value(expression, &of).map_err(|wrong| format!("{expression:?} in its header: {wrong}"))
    }

    /// The contract that it declares, of code that is compiled for `dtype`: what is written is for the dtype of the written
    /// activations, and its other places follow.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn contract_for(&self, dtype: DType) -> Result<Option<Contract>, String> {
        Ok(self.contract()?.map(|c| c.retyped(c.activations, dtype)))
    }

    /// The contract as it is written.
    fn contract(&self) -> Result<Option<Contract>, String> {
        let Some(table) = &self.contract else { return Ok(None) };
        let table = self.with_numbers(table)?;
        let contract = table.try_into().map_err(|e: toml::de::Error| {
            format!("the contract in its header: {}", e.to_string().trim_end())
        })?;
        Ok(Some(contract))
    }

    /// The table with tile sizes in place of their names.
    fn with_numbers(&self, table: &toml::Table) -> Result<toml::Table, String> {
        let mut out = toml::Table::new();
        for (key, value) in table {
            let value = match value {
                toml::Value::Table(inner) => toml::Value::Table(self.with_numbers(inner)?),
                toml::Value::String(s) if key == "tile" => toml::Value::Integer(self.value(s, &[])?),
                other => other.clone(),
            };
            out.insert(key.clone(), value);
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
/*---
version = 2
geometry = ["NOPE"]
[tile]
BN = 32
[[kernel]]
entry = "f"
threads = "BN * 4"
grid = ["cdiv(rows, BN)"]
[contract]
activations = "bf16"
accumulate = "mma(16, 25)"
softmax = { tile = "BN", p = "bf16", row_sum = "unrounded" }
---*/
code"#;

    #[test]
    fn a_header_is_read_with_its_expressions_and_contract() {
        let h = Header::of(TEXT).unwrap();
        assert_eq!(h.value(&h.entry("f").unwrap().threads, &[]), Ok(128));
        assert_eq!(h.value(&h.kernels[0].grid[0], &[("rows", 33)]), Ok(2));
        let c = h.contract().unwrap().unwrap();
        assert_eq!((c.softmax.tile, c.softmax.p, c.weights), (32, Some(DType::Bf16), DType::Bf16));
        assert_eq!(h.dtypes, [DType::Bf16]);
    }

    #[test]
    fn the_contract_follows_the_dtype_that_code_is_compiled_for() {
        let h =
            Header::of(&TEXT.replace("version = 2", "version = 2\ndtypes = [\"bf16\", \"f16\"]")).unwrap();
        assert_eq!(h.dtypes, [DType::Bf16, DType::F16]);
        let c = h.contract_for(DType::F16).unwrap().unwrap();
        assert_eq!((c.activations, c.weights, c.softmax.p), (DType::F16, DType::F16, Some(DType::F16)));
        assert_eq!((c.partials, c.lse, c.softmax.tile), (DType::F32, DType::F32, 32));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let of = |from: &str, to: &str| {
            let text = TEXT.replace(from, to);
            assert_ne!(text, TEXT);
            Header::of(&text).err().unwrap_or_default()
        };
        assert!(of("/*---", "/*--").contains("does not begin with a header"));
        assert!(of("version = 2", "version = 1").contains("of version 1, this program passes version 2"));
        assert!(of("threads", "thread").contains("unknown field `thread`"));
        assert!(of("tile = \"BN\"", "tile = \"BM\"").contains("nothing is called \"BM\""));
        assert!(of("mma(16, 25)", "mma").contains("\"mma\" is no accumulator"));
        let dtypes = |list: &str| of("version = 2", &format!("version = 2\ndtypes = {list}"));
        assert!(dtypes("[\"bf16\", \"f64\"]").contains("lists f64 in dtypes"));
        assert!(dtypes("[\"f16\"]").contains("a contract for bf16, which dtypes does not list"));
    }
}
