/*!
Which contract a run is judged by: the engine's own, or another one that somebody asks about.

An engine's kernel is one thing, the arithmetic that another program expects of it a second: `none` asks whether the
outputs are right wherever P was cast, a name or a file whether they are those of a certain kernel. How keys are
split and what is stored in which dtype stay the engine's: other bits would not even be of the same kind.
*/

use super::{ContractError, Kernel, find, parse};
use mla_numeric::DType;
use mla_reference::{Contract, Softmax, Splits};
use std::path::{Path, PathBuf};

/// Which contract the judge emulates.
#[derive(Clone, Debug, Default)]
pub enum ContractChoice {
    /// What the engine declares.
    #[default]
    Declared,
    /// The same, but tiles and the place of P's cast are unknown: the cast is noise.
    None,
    /// The softmax of a kernel of the built-in table, all else as declared.
    Named(&'static Kernel),
    /// A contract read from a file; its splits are not used.
    File {
        /// Where it was.
        path: PathBuf,
        /// What it says.
        contract: Box<Contract>,
    },
}

/// Why there is no such contract, or why it can't be judged by.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ChoiceError {
    #[error("{0}\n  where: --contract\n  do: write declared, none, one of these names, or a .toml file")]
    Name(ContractError),
    #[error(
        "the contract can't be read: {error}\n  where: --contract {path}\n  do: name a .toml file that can be read"
    )]
    Unreadable { path: String, error: std::io::Error },
    #[error("{error}\n  where: --contract {path}\n  do: correct the file")]
    Text { path: String, error: ContractError },
    #[error(
        "the contract stores {field} in {wanted}, the engine in {is}\n  where: --contract {path}\n  do: write {field} = \"{is}\", or take another --dtype"
    )]
    Stored { path: String, field: &'static str, wanted: DType, is: DType },
}

impl ContractChoice {
    /// Reads `declared`, `none`, a name of the built-in table, or a .toml file.
    pub fn read(text: &str) -> Result<ContractChoice, ChoiceError> {
        match text {
            "declared" => return Ok(ContractChoice::Declared),
            "none" => return Ok(ContractChoice::None),
            _ => {}
        }
        let path = Path::new(text);
        if !path.extension().is_some_and(|e| e.eq_ignore_ascii_case("toml")) {
            return find(text).map(ContractChoice::Named).map_err(ChoiceError::Name);
        }
        let written = std::fs::read_to_string(path)
            .map_err(|error| ChoiceError::Unreadable { path: text.into(), error })?;
        let contract =
            parse(&written, text).map_err(|error| ChoiceError::Text { path: text.into(), error })?;
        Ok(ContractChoice::File { path: path.into(), contract: Box::new(contract) })
    }

    /// The contract to emulate, of an engine that declares this one.
    pub fn of(&self, declared: &Contract) -> Result<Contract, ChoiceError> {
        let softmax = match self {
            ContractChoice::Declared => return Ok(*declared),
            ContractChoice::None => return Ok(declared.with_softmax(|s| Softmax { emulate: false, ..s })),
            ContractChoice::Named(k) => {
                let s = k.contract_for(declared.activations).softmax;
                // Kernels are built for 16 bits; of float32 there is nothing to cast.
                Softmax { p: s.p.filter(|d| d.precision() < DType::F32.precision()), ..s }
            }
            ContractChoice::File { path, contract: c } => {
                let stored = [
                    ("activations", c.activations, declared.activations),
                    ("weights", c.weights, declared.weights),
                    ("norm_weights", c.norm_weights, declared.norm_weights),
                    ("partials", c.partials, declared.partials),
                    ("lse", c.lse, declared.lse),
                ];
                if let Some((field, wanted, is)) = stored.into_iter().find(|(_, wanted, is)| wanted != is) {
                    return Err(ChoiceError::Stored { path: path.display().to_string(), field, wanted, is });
                }
                return Ok(Contract {
                    splits: splits(declared, c.softmax.tile),
                    split_prefill: declared.split_prefill,
                    lse_base: declared.lse_base,
                    ..**c
                });
            }
        };
        Ok(Contract { softmax, absorbed: None, splits: splits(declared, softmax.tile), ..*declared })
    }
}

/// The engine's splits, whatever the judged tile: equal parts are whole tiles of the engine's.
fn splits(declared: &Contract, tile: usize) -> Splits {
    match declared.splits {
        Splits::Parts(parts) if tile != declared.softmax.tile => {
            Splits::Equal { parts, multiple: declared.softmax.tile }
        }
        as_declared => as_declared,
    }
}

impl std::fmt::Display for ContractChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ContractChoice::Declared => f.write_str("declared"),
            ContractChoice::None => f.write_str("none"),
            ContractChoice::Named(k) => f.write_str(&k.name),
            ContractChoice::File { path, .. } => write!(f, "{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::Accumulate;

    fn declared() -> Contract {
        let softmax = Softmax { tile: 64, p: Some(DType::Bf16), ..Softmax::exact() };
        Contract {
            softmax,
            splits: Splits::Parts(3),
            ..Contract::usual(DType::Bf16, Accumulate::Rn { block: 16, chain: 0 })
        }
    }

    #[test]
    fn a_choice_changes_only_what_it_is_about() {
        let of = |text: &str| ContractChoice::read(text).unwrap().of(&declared()).unwrap();
        assert_eq!(of("declared"), declared());
        let none: Vec<_> = of("none").differences(&declared()).iter().map(|d| d.field).collect();
        assert_eq!(none, ["softmax.emulate"]);
        let named = of("vllm-triton-decode");
        for keys in [1, 63, 65, 300, 1000] {
            assert_eq!(named.split_ranges(keys), declared().split_ranges(keys));
        }
        assert_eq!(named.softmax, find("vllm-triton-decode").unwrap().contract.softmax);
        assert!(
            named
                .differences(&declared())
                .iter()
                .all(|d| d.field.starts_with("softmax.") || d.field == "splits")
        );
    }

    #[test]
    fn a_file_keeps_the_engines_splits_and_must_store_what_the_engine_stores() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        let of = |c: &Contract| {
            std::fs::write(&path, super::super::to_toml(c).unwrap()).unwrap();
            ContractChoice::read(path.to_str().unwrap()).unwrap().of(&declared())
        };
        let accumulate = Accumulate::Unknown;
        assert_eq!(
            of(&Contract { accumulate, splits: Splits::Parts(9), ..declared() }).unwrap(),
            Contract { accumulate, ..declared() }
        );
        let e = of(&Contract { partials: DType::Bf16, ..declared() }).unwrap_err().to_string();
        assert!(e.contains("partials in bf16, the engine in f32") && e.contains("  do: "), "{e}");
    }

    #[test]
    fn errors_say_what_where_and_what_to_do() {
        for (text, what) in [("tile-64", "flashmla-decode"), ("/nowhere/c.toml", "can't be read")] {
            let e = ContractChoice::read(text).unwrap_err().to_string();
            assert!(e.contains(what) && e.contains("where: --contract") && e.contains("do: "), "{e}");
        }
    }
}
