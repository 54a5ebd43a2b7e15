/*! Parsing a batch, `0+64,1024+1`, and its limits. */

use serde::Serialize;
use std::str::FromStr;

/// One request: `new` tokens on top of `context` cached ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct Request {
    pub context: usize,
    pub new: usize,
}

impl Request {
    /// Tokens of the whole request.
    pub fn total(&self) -> usize {
        self.context + self.new
    }
}

impl std::fmt::Display for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}+{}", self.context, self.new)
    }
}

/// A comma list of requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Batch(pub Vec<Request>);

/// The batch that `run` takes by default: short and long, with and without context, around page ends.
pub const DEFAULT_BATCH: &str = "0+64,0+5,0+1,64+17,1024+1,257+1,65+1,64+1,63+1";

/// Tokens that one batch may hold: positions fit every known model, and memory stays bounded.
const MOST_TOKENS: usize = 1 << 20;

/// Why a batch can't be run.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// Not `C+N`.
    #[error(
        "'{0}' is not a request\n  where: --batch\n  do: write CONTEXT+NEW, for example 0+64 for a prefill of 64 tokens or 1024+1 for one decode step"
    )]
    Request(String),
    /// N = 0.
    #[error(
        "request '{0}' has no new token, so there is nothing to compute\n  where: --batch\n  do: give at least one new token, for example {0}1"
    )]
    Empty(String),
    /// Too many tokens.
    #[error(
        "the batch holds {0} tokens, more than {MOST_TOKENS}\n  where: --batch\n  do: split it into several runs"
    )]
    TooLong(usize),
}

impl FromStr for Batch {
    type Err = BatchError;

    fn from_str(text: &str) -> Result<Batch, BatchError> {
        let mut all = Vec::new();
        let mut total = 0usize;
        for part in text.split(',') {
            let part = part.trim();
            let bad = || BatchError::Request(part.to_string());
            let (context, new) = part.split_once('+').ok_or_else(bad)?;
            let number = |s: &str| s.parse::<u32>().map(|n| n as usize).map_err(|_| bad());
            let r = Request { context: number(context)?, new: number(new)? };
            if r.new == 0 {
                return Err(BatchError::Empty(format!("{}+", r.context)));
            }
            total += r.total();
            if total > MOST_TOKENS {
                return Err(BatchError::TooLong(total));
            }
            all.push(r);
        }
        Ok(Batch(all))
    }
}

impl std::fmt::Display for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, r) in self.0.iter().enumerate() {
            write!(f, "{}{r}", if i > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_a_comma_list_of_context_plus_new() {
        let b: Batch = "0+64, 1024+1".parse().unwrap();
        assert_eq!(b.0, [Request { context: 0, new: 64 }, Request { context: 1024, new: 1 }]);
        assert_eq!(b.to_string(), "0+64,1024+1");
        assert_eq!(DEFAULT_BATCH.parse::<Batch>().unwrap().to_string(), DEFAULT_BATCH);
    }

    #[test]
    fn nonsense_is_named() {
        for bad in ["", "64", "a+1", "1+-1", "+", "1+1,,2+2", "99999999999+1"] {
            assert!(matches!(bad.parse::<Batch>(), Err(BatchError::Request(_))), "{bad}");
        }
        assert_eq!("7+0".parse::<Batch>(), Err(BatchError::Empty("7+".into())));
        assert!(matches!("4000000000+1".parse::<Batch>(), Err(BatchError::TooLong(_))));
    }
}
