/*!
Arithmetic in kernel headers: `cdiv(rows, BM)`, `2 * BN * (NOPE + ROPE)`, `LATENT % 128 == 0`.

Whole numbers only. Operators as in C, with its precedence: `* / %`, `+ -`, `< <= > >=`, `== !=`, `&&`, `||`; comparisons
give 1 or 0. Functions: `cdiv(a, b)` (a / b rounded up), `min`, `max`. Names are what the caller knows.
*/

use std::fmt;

/// Why an expression has no value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// It is not written as it should be: what was expected, and the rest of the text there.
    Syntax(&'static str, String),
    /// A name that nobody knows.
    Name(String),
    /// Division by zero, or a number beyond 63 bits.
    Range,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Syntax(wanted, rest) if rest.is_empty() => write!(f, "expected {wanted} at its end"),
            Wrong::Syntax(wanted, rest) => write!(f, "expected {wanted} at {rest:?}"),
            Wrong::Name(name) => write!(f, "nothing is called {name:?}"),
            Wrong::Range => f.write_str("it divides by zero or leaves 63 bits"),
        }
    }
}

/// Deepest nesting of parentheses.
const DEPTH: usize = 64;

/// The value of an expression; `of` knows the names.
///
/// # Errors
/// The first thing that is wrong.
pub fn value(text: &str, of: &dyn Fn(&str) -> Option<i64>) -> Result<i64, Wrong> {
    let mut parser = Parser { rest: text.trim_start(), of, depth: 0 };
    let value = parser.level(0)?;
    if parser.rest.is_empty() { Ok(value) } else { Err(parser.wanted("an operator")) }
}

struct Parser<'t> {
    rest: &'t str,
    of: &'t dyn Fn(&str) -> Option<i64>,
    depth: usize,
}

type Operator = fn(i64, i64) -> Option<i64>;

/// Operators by precedence, the weakest first; longer ones before those that they begin with.
const LEVELS: [&[(&str, Operator)]; 6] = [
    &[("||", |a, b| Some(i64::from(a != 0 || b != 0)))],
    &[("&&", |a, b| Some(i64::from(a != 0 && b != 0)))],
    &[("==", |a, b| Some(i64::from(a == b))), ("!=", |a, b| Some(i64::from(a != b)))],
    &[
        ("<=", |a, b| Some(i64::from(a <= b))),
        (">=", |a, b| Some(i64::from(a >= b))),
        ("<", |a, b| Some(i64::from(a < b))),
        (">", |a, b| Some(i64::from(a > b))),
    ],
    &[("+", i64::checked_add), ("-", i64::checked_sub)],
    &[("*", i64::checked_mul), ("/", i64::checked_div), ("%", i64::checked_rem)],
];

impl Parser<'_> {
    fn wanted(&self, what: &'static str) -> Wrong {
        Wrong::Syntax(what, self.rest.into())
    }

    fn take(&mut self, token: &str) -> bool {
        let found = self.rest.strip_prefix(token);
        if let Some(rest) = found {
            self.rest = rest.trim_start();
        }
        found.is_some()
    }

    fn expect(&mut self, token: &'static str) -> Result<(), Wrong> {
        if self.take(token) { Ok(()) } else { Err(self.wanted(token)) }
    }

    fn level(&mut self, level: usize) -> Result<i64, Wrong> {
        let Some(operators) = LEVELS.get(level) else { return self.atom() };
        let mut left = self.level(level + 1)?;
        while let Some((_, operate)) = operators.iter().find(|(token, _)| self.take(token)) {
            let right = self.level(level + 1)?;
            left = operate(left, right).ok_or(Wrong::Range)?;
        }
        Ok(left)
    }

    fn atom(&mut self) -> Result<i64, Wrong> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(self.wanted("fewer parentheses"));
        }
        let value = if self.take("(") {
            let inner = self.level(0)?;
            self.expect(")")?;
            inner
        } else {
            let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let (word, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
            if word.is_empty() {
                return Err(self.wanted("a number or a name"));
            }
            self.rest = rest.trim_start();
            if word.starts_with(|c: char| c.is_ascii_digit()) {
                word.parse().map_err(|_| Wrong::Syntax("a number", word.into()))?
            } else if self.take("(") {
                let a = self.level(0)?;
                self.expect(",")?;
                let b = self.level(0)?;
                self.expect(")")?;
                call(word, a, b)?
            } else {
                (self.of)(word).ok_or_else(|| Wrong::Name(word.into()))?
            }
        };
        self.depth -= 1;
        Ok(value)
    }
}

fn call(name: &str, a: i64, b: i64) -> Result<i64, Wrong> {
    match name {
        "min" => Ok(a.min(b)),
        "max" => Ok(a.max(b)),
        "cdiv" if b > 0 => a.checked_add(b - 1).map(|n| n.div_euclid(b)).ok_or(Wrong::Range),
        "cdiv" => Err(Wrong::Range),
        _ => Err(Wrong::Name(name.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<i64, Wrong> {
        value(text, &|name| match name {
            "BN" => Some(32),
            "rows" => Some(65),
            _ => None,
        })
    }

    #[test]
    fn precedence_is_that_of_c() {
        for (text, expected) in [
            ("1 + 2 * 3", 7),
            ("(1+2)*3", 9),
            ("7 - 2 - 1", 4),
            ("BN%5==2", 1),
            ("1 + 1 == 2 && 3 < 2 || 4 >= 4", 1),
            ("100 / 8 / 2", 6),
            ("cdiv(rows, BN)", 3),
            ("cdiv(64, 32) + max(1, min(BN, 9))", 11),
            ("1 != 1", 0),
        ] {
            assert_eq!(of(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, expected) in [
            ("", "expected a number or a name at its end"),
            ("1 +", "expected a number or a name at its end"),
            ("(1", "expected ) at its end"),
            ("1 2", "expected an operator at \"2\""),
            ("BM", "nothing is called \"BM\""),
            ("log(1, 2)", "nothing is called \"log\""),
            ("1 / 0", "it divides by zero or leaves 63 bits"),
            ("cdiv(1, 0)", "it divides by zero or leaves 63 bits"),
            ("9223372036854775807 + 1", "it divides by zero or leaves 63 bits"),
            ("12a", "expected a number at \"12a\""),
        ] {
            assert_eq!(of(text).unwrap_err().to_string(), expected, "{text}");
        }
        assert!(of(&"(".repeat(100_000)).is_err());
    }
}
