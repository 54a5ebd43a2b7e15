/*!
Contracts in files, and the built-in table of other people's kernels.

One form for all: a kernel's header, a dump's manifest, this table. TOML, keys as the fields of
[`Contract`], unknown keys refused; `activations` and `accumulate` must be there, in `[softmax]` `tile`, `p` and
`row_sum`, all else has the defaults of [`Contract::usual`].

```
let text = r#"
activations = "bf16"
accumulate = "mma(16, 25)"
splits = { parts = 4 }

[softmax]
tile = 64
p = "bf16"
row_sum = "unrounded"
"#;
let contract = mla_check::contracts::parse(text, "kernel.toml")?;
assert_eq!(contract.split_ranges(300).len(), 4);
# Ok::<(), mla_check::contracts::ContractError>(())
```
*/

mod choice;
pub mod variants;

pub use choice::{ChoiceError, ContractChoice};

use mla_numeric::DType;
use mla_reference::{Contract, Form, Splits};
use serde::Deserialize;
use std::sync::LazyLock;

/// A kernel whose contract is known.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// How it is looked up.
    pub name: String,
    /// Software and version.
    pub source: String,
    /// What the contract leaves open.
    pub note: String,
    /// The form of attention that it computes; none: either.
    pub form: Option<Form>,
    /// Ways to split the keys that it is known by; none: those of the contract.
    #[serde(default)]
    pub tries: Vec<Splits>,
    /// For bf16.
    pub contract: Contract,
}

impl Kernel {
    /// The contract of the same kernel built for a dtype.
    pub fn contract_for(&self, dtype: DType) -> Contract {
        self.contract.retyped(DType::Bf16, dtype)
    }
}

/// The built-in table.
pub fn kernels() -> &'static [Kernel] {
    static TABLE: LazyLock<Vec<Kernel>> = LazyLock::new(|| {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            kernel: Vec<Kernel>,
        }
        // A table that is not well-formed is empty, which the tests see.
        toml::from_str::<Table>(include_str!("kernels.toml")).map(|t| t.kernel).unwrap_or_default()
    });
    &TABLE
}

/// What is wrong with a contract in a file, or with the name of one.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ContractError {
    /// Text that is no contract.
    #[error(
        "{place}: not a contract: {what}\nwrite one value a key, as `mla_check::contracts` lists them; \
         activations and accumulate must be there, in [softmax] tile, p and row_sum"
    )]
    Text {
        /// Where it stands.
        place: String,
        /// With line and column.
        what: String,
    },
    /// A name that is not in the table.
    #[error("no contract is called {name:?}; there are {known}")]
    Name {
        /// What was asked for.
        name: String,
        /// All names.
        known: String,
    },
    /// A contract that can't be written.
    #[error("the contract can't be written as TOML: {0}")]
    Unwritable(String),
}

/// A kernel of the built-in table.
pub fn find(name: &str) -> Result<&'static Kernel, ContractError> {
    kernels().iter().find(|k| k.name == name).ok_or_else(|| ContractError::Name {
        name: name.to_owned(),
        known: kernels().iter().map(|k| k.name.as_str()).collect::<Vec<_>>().join(", "),
    })
}

/// Reads a contract; `place` names the text in errors.
pub fn parse(text: &str, place: &str) -> Result<Contract, ContractError> {
    toml::from_str(text)
        .map_err(|e| ContractError::Text { place: place.to_owned(), what: e.to_string().trim().to_owned() })
}

/// Writes a contract in the form that [`parse`] reads, every field.
pub fn to_toml(contract: &Contract) -> Result<String, ContractError> {
    toml::to_string(contract).map_err(|e| ContractError::Unwritable(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::Accumulate;

    const SHORT: &str = "activations = 'f16'\naccumulate = 'unknown'\n";

    #[test]
    fn every_kernel_is_written_and_read_back() {
        assert_eq!(kernels().len(), 21);
        for k in kernels() {
            let text = to_toml(&k.contract).unwrap();
            assert_eq!(parse(&text, &k.name).unwrap(), k.contract, "{text}");
            assert!(k.contract.unsupported().is_empty() && !k.source.is_empty());
            assert!(std::ptr::eq(find(&k.name).unwrap(), k), "{} twice", k.name);
            // In files that people write by hand too: JSON of reports.
            let json = serde_json::to_string(&k.contract).unwrap();
            assert_eq!(serde_json::from_str::<Contract>(&json).unwrap(), k.contract);
        }
        let e = find("flashmla").unwrap_err().to_string();
        assert!(e.contains("flashmla-decode") && e.contains("hf-linear"), "{e}");
    }

    #[test]
    fn what_is_missing_has_its_default() {
        let c = parse(SHORT, "x").unwrap();
        assert_eq!(c, Contract::usual(DType::F16, Accumulate::Unknown));
        let c = parse(&format!("{SHORT}splits = {{ parts = 3, multiple = 32 }}"), "x").unwrap();
        assert_eq!(c.splits, Splits::Equal { parts: 3, multiple: 32 });
    }

    #[test]
    fn errors_say_what_and_where() {
        let soft = |s: &str| format!("{SHORT}[softmax]\n{s}");
        for (text, words) in [
            ("accumulate = 'exact'".into(), "activations"),
            ("activations = 'bf16'".into(), "accumulate"),
            (format!("{SHORT}tiles = 64"), "tiles"),
            (format!("{SHORT}splits = {{ parts = 1, keys = 2 }}"), "splits"),
            ("activations = 'bf17'\naccumulate = 'exact'".into(), "bf17"),
            ("activations = 'bf16'\naccumulate = 'mma'".into(), "mma(PRODUCTS, BITS)"),
            (soft("p = 'bf16'\nrow_sum = 'rounded'"), "tile"),
            (soft("tile = 64\nrow_sum = 'rounded'"), "`p`"),
            (soft("tile = 64\np = 'fp9'\nrow_sum = 'rounded'"), "fp9"),
            (soft("tile = 64\np = 'none'\nrow_sum = 'half'"), "half"),
        ] {
            let e = parse(&text, "kernel.toml").unwrap_err().to_string();
            assert!(e.contains(words) && e.starts_with("kernel.toml: "), "{words}: {e}");
        }
    }

    #[test]
    fn contracts_are_compared_field_by_field() {
        let (a, b) = (find("flashinfer-mla-fa2").unwrap(), find("flashinfer-mla-fa3").unwrap());
        let d = a.contract.differences(&b.contract);
        assert_eq!(d.len(), 1);
        assert_eq!(d[0].to_string(), "softmax.row_sum: rounded against unrounded");
        for k in kernels() {
            for other in kernels() {
                let differ = !k.contract.differences(&other.contract).is_empty();
                assert_eq!(differ, k.contract != other.contract, "{} {}", k.name, other.name);
            }
        }
        let f16 = a.contract_for(DType::F16);
        assert_eq!((f16.activations, f16.softmax.p, f16.lse), (DType::F16, Some(DType::F16), DType::F32));
    }

    /// What nothing emulates is listed, field by field.
    #[test]
    fn what_is_not_emulated_is_said() {
        for (key, value, words) in [
            ("activations", "q8_1", "activations quantised"),
            ("all_reduce", "ring", "all-reduce by ring in f32"),
            ("subnormals", "flushed", "subnormals"),
            ("ties", "away", "ties"),
            ("weights", "identity", "identity"),
        ] {
            let c = parse(&format!("{SHORT}[unemulated]\n{key} = '{value}'"), "x").unwrap();
            let list = c.unsupported();
            assert!(list.len() == 1 && list[0].contains(words), "{list:?}");
            assert!(c.to_string().contains(&list[0]), "{c}");
        }
        let c = parse(
            &format!("{SHORT}[softmax]\ntile=0\np='none'\nrow_sum='rounded'\nexponential='polynomial'"),
            "x",
        );
        assert!(c.unwrap().unsupported()[0].contains("polynomial"));
    }
}
